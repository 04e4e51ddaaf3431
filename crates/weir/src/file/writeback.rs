//! Writeback: dirty pages go home.
//!
//! Three steps, so that pages of many inodes travel together:
//!
//! 1. [`Engine::collect`] takes dirty runs (under the inode's `map` lock), decides where each page goes, and
//!    allocates blocks;
//! 2. [`Engine::write_out`] writes the pieces of all inodes in the order of their blocks, neighbours
//!    in one request;
//! 3. [`Engine::settle`] commits the new mapping of each piece and ends its writeback.
//!
//! Where a page goes: into the inode (small files); in place, if the log holds exactly this content durably, so that
//! a torn write can be repaired; into its unwritten extent; into new blocks otherwise.
//!
//! **Invariant:** one version of a page is under way at a time. **Invariant:** log space for step 3 is admitted before
//! step 1 marks anything, so a page under writeback never waits for the log.
//! **Invariant:** a piece is about [`PIECE_PAGES`] pages of one inode at most, and settles in one operation.
//! **Invariant (untorn):** pages that the log does not have, that lie side by side in an aligned unit of [`UNTORN_PAGES`] and
//! that may so be one write, are in one piece: [`crate::cache::map::PageMap::begin_writeback_untorn`] takes them together,
//! under the lock that the write took, and pieces are cut between units.

use super::extents::{self, Piece as Mapped, Unmapped};
use crate::alloc::{AllocKind, Run};
use crate::cache::map::{RunFilter, UNTORN_PAGES, WritebackPage};
use crate::cache::page::PageRef;
use crate::device::request::{Batch, Outcome, submit_batch};
use crate::device::{Buffers, IoClass, Operation, Request};
use crate::engine::{Engine, Room};
use crate::error::{Error, Result};
use crate::format::item::{Extent, INODE_INLINE};
use crate::format::{BLOCK_BYTES, BLOCK_BYTES_U64, Key, MAX_INLINE_BYTES, checksum};
use crate::inode::Inode;
use crate::log::Admission;
use crate::mutation::{self, Mutation};
use crate::sync::Arc;
use crate::sync::atomic::Ordering;
use crate::txn::{Home, Lsn, Op};
use crate::types::BackgroundMode;
use std::ops::Range;

/// Most pages of one piece: 1 MiB, a good request for any disk.
pub const PIECE_PAGES: u64 = 256;
/// Most pages that one inode's writeback has under way: 8 MiB.
const ROUND_PAGES: u64 = 8 * PIECE_PAGES;
/// Most pages of one request after neighbours were joined.
const REQUEST_PAGES: usize = 512;

/// From this length on, new pages are placed near the file's last extent before them even if that is far away in the file.
const FAR_HINT_PAGES: u64 = 16;

/// Log space for settling `pages` pages.
/// Extents that are cut take up to 2 KiB for their remaining checksums; what few pages need fits into one block with the
/// frame's header. What an estimate lacks comes from the checkpoint's share.
pub fn settle_bytes(pages: u64) -> usize {
    3000 + 56 * pages as usize
}

/// What [`Engine::collect`] took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Collected {
    /// How many pages.
    pub pages: u64,
    /// Nothing was left over for lack of log space or budget.
    pub complete: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    New,
    Unwritten,
    /// In place.
    Same,
}

/// Consecutive pages that go to consecutive blocks.
#[derive(Debug, Clone)]
struct Segment {
    /// Index of the first page within the piece.
    first: usize,
    pages: usize,
    block: u64,
    place: Place,
}

/// Dirty pages of one inode on their way home. See the module's head.
pub struct Piece {
    inode: Arc<Inode>,
    admission: Option<Admission>,
    token: u64,
    pages: Vec<WritebackPage>,
    checksums: Vec<u32>,
    segments: Vec<Segment>,
    /// The file was this long when the pages were taken.
    size: u64,
    into_inode: bool,
    failed: Option<Error>,
}

impl Piece {
    fn first(&self) -> u64 {
        self.pages[0].index
    }

    fn end(&self) -> u64 {
        self.first() + self.pages.len() as u64
    }
}

impl Engine {
    /// Takes dirty pages of `range` of `inode` that pass `filter`, about `budget_pages` of them, and prepares them for
    /// writing. Log space is waited for only while `pieces` is empty: what they hold has to be given back first. So the
    /// answer may be incomplete; the caller writes, settles and comes again.
    pub fn collect(
        &self,
        inode: &Arc<Inode>,
        range: Range<u64>,
        filter: RunFilter,
        (budget_pages, room): (u64, Room),
        pieces: &mut Vec<Piece>,
    ) -> Result<Collected> {
        let filter = RunFilter { skip_writeback: true, ..filter };
        let mut from = range.start;
        let mut collected = Collected { pages: 0, complete: true };
        while from < range.end {
            let limit = PIECE_PAGES.min(self.max_piece_pages());
            let run = inode.pages.read().dirty_runs(from..range.end, limit, filter).next();
            let Some(run) = run.map(|run| cut_between_units(run, limit)) else { break };
            if collected.pages >= budget_pages {
                collected.complete = false;
                break;
            }
            let room = match room {
                Room::Normal if !pieces.is_empty() => Room::NoWait,
                room => room,
            };
            let admission = match self.admit(settle_bytes(run.end - run.start), 0, room) {
                Err(Error::WouldBlock) if !pieces.is_empty() => {
                    collected.complete = false;
                    break;
                }
                other => other?,
            };
            match self.take(inode, run.clone(), &range, admission) {
                Ok(Some(piece)) => {
                    collected.pages += piece.pages.len() as u64;
                    pieces.push(piece);
                }
                Ok(None) => {}
                // More pages belong together than the log has room for.
                Err(Error::WouldBlock) if !pieces.is_empty() => {
                    collected.complete = false;
                    break;
                }
                Err(Error::WouldBlock) if room == Room::Normal => {
                    self.relieve_log()?;
                    continue;
                }
                Err(error) => return Err(error),
            }
            from = run.end;
        }
        Ok(collected)
    }

    /// Bytes of records that one operation may have, leaving room for estimates that are too low.
    fn max_operation_bytes(&self) -> usize {
        (self.log.max_operation_blocks() as usize).saturating_sub(3) * BLOCK_BYTES
    }

    /// The pages that one operation of this log can settle.
    pub fn max_piece_pages(&self) -> u64 {
        (self.max_operation_bytes() / 256).clamp(1, PIECE_PAGES as usize) as u64
    }

    fn take(
        &self,
        inode: &Arc<Inode>,
        run: Range<u64>,
        bounds: &Range<u64>,
        mut admission: Admission,
    ) -> Result<Option<Piece>> {
        let expected_pages = run.end - run.start;
        let _map = inode.map.lock();
        let (writeback, size) = {
            let mut pages = inode.pages.write();
            (pages.begin_writeback_untorn(run, bounds), inode.size())
        };
        let more_pages = (writeback.pages.len() as u64).saturating_sub(expected_pages);
        if more_pages > 0 {
            match self.admit(settle_bytes(more_pages), 0, Room::Reserve) {
                Ok(more) => admission.join(more),
                Err(error) => {
                    self.put_back(inode, &writeback.pages, writeback.token);
                    return Err(error);
                }
            }
        }
        if writeback.pages.is_empty() {
            return Ok(None);
        }
        let mut piece = Piece {
            inode: inode.clone(),
            admission: Some(admission),
            token: writeback.token,
            pages: writeback.pages,
            checksums: Vec::new(),
            segments: Vec::new(),
            size,
            into_inode: false,
            failed: None,
        };
        // A page between two dirty ones may have become clean meanwhile: go on with the first run.
        let consecutive = piece
            .pages
            .windows(2)
            .position(|pair| pair[0].index + 1 != pair[1].index)
            .map_or(piece.pages.len(), |last| last + 1);
        let rest = piece.pages.split_off(consecutive);
        if !rest.is_empty() {
            self.put_back(inode, &rest, piece.token);
        }
        if let Err(error) = self.place(&mut piece) {
            for segment in piece.segments.iter().filter(|segment| segment.place == Place::New) {
                self.alloc.cancel(Run { start: segment.block, blocks: segment.pages as u64 });
            }
            self.end(&piece, false);
            return Err(error);
        }
        Ok(Some(piece))
    }

    /// Pages that were taken are dirty again.
    fn put_back(&self, inode: &Inode, taken: &[WritebackPage], token: u64) {
        let mut pages = inode.pages.write();
        let ends = taken.iter().map(|page| pages.end_writeback(page.index, token, false));
        // One that was written meanwhile has paid for itself already.
        let paid = ends.filter(|end| !end.stale && !end.newly_dirty).count();
        drop(pages);
        self.pages_paid(paid as u64);
        inode.io_ended();
    }

    /// Decides where the pages go. The caller holds the `map` lock.
    fn place(&self, piece: &mut Piece) -> Result<()> {
        let (start, end) = (piece.first(), piece.end());
        let (mapped, before) = self.mapped(&piece.inode, start, end)?;
        let hint = before.map(|before| before.next_block()).transpose()?;
        if start == 0 && end == 1 && piece.size <= MAX_INLINE_BYTES as u64 && mapped.is_empty() {
            piece.into_inode = true;
            return Ok(());
        }
        let durable = self.log.durable_lsn();
        // Blocks that could not be written once are not relied on again.
        let trusted = piece.inode.write_error.lock().0 == 0;
        let mut at = start;
        for part in &mapped {
            self.place_new(piece, at, part.file_block, hint)?;
            at = part.file_block;
            while at < part.end() {
                let place = |page: u64| {
                    let page = &piece.pages[(page - start) as usize];
                    let is_durable = page.logged_lsn.is_some_and(|lsn| lsn <= durable);
                    let logged = page.is_logged && is_durable && trusted
                        || mutation::active(Mutation::OverwriteUnlogged);
                    match (part.unwritten, logged) {
                        (true, _) => Place::Unwritten,
                        (false, true) => Place::Same,
                        (false, false) => Place::New,
                    }
                };
                let kind = place(at);
                let stop = (at..part.end()).find(|&page| place(page) != kind).unwrap_or(part.end());
                if kind == Place::New {
                    self.place_new(piece, at, stop, hint)?;
                } else {
                    piece.segments.push(Segment {
                        first: (at - start) as usize,
                        pages: (stop - at) as usize,
                        block: part.block + (at - part.file_block),
                        place: kind,
                    });
                }
                at = stop;
            }
        }
        self.place_new(piece, at, end, hint)?;
        piece.checksums = piece.pages.iter().map(|page| checksum(&page.page)).collect();
        Ok(())
    }

    /// What file blocks `start .. end` are mapped to, and the extent before; without a look where nothing is. The caller
    /// holds the `map` lock.
    fn mapped(
        &self,
        inode: &Inode,
        start: u64,
        end: u64,
    ) -> Result<(Vec<Mapped>, Option<extents::Before>)> {
        if inode.meta.lock().item.blocks == 0 {
            return Ok((Vec::new(), None));
        }
        extents::all_pieces_after(&self.store, inode.into(), start, end)
    }

    /// New blocks for file blocks `from .. to` of the piece. Space was reserved when the pages became dirty. `hint`: the
    /// block behind what the file has before the piece, if that is near.
    fn place_new(&self, piece: &mut Piece, from: u64, to: u64, hint: Option<u64>) -> Result<()> {
        let start = piece.first();
        let mut at = from;
        let is_first = piece.inode.meta.lock().item.blocks == 0;
        while at < to {
            let hint = match piece.segments.last() {
                Some(last) => Some(last.block + last.pages as u64),
                None if is_first || hint.is_some() => hint,
                // A scattered page belongs nowhere in particular.
                _ if to - at < FAR_HINT_PAGES => None,
                _ => extents::placement_hint(&self.store, piece.inode.number, at)?,
            };
            let run = self.alloc.allocate(to - at, 1, hint, AllocKind::Data)?;
            piece.segments.push(Segment {
                first: (at - start) as usize,
                pages: run.blocks as usize,
                block: run.start,
                place: Place::New,
            });
            at += run.blocks;
        }
        Ok(())
    }

    /// Writes all `pieces`. A piece that could not be written carries its error from here on.
    pub fn write_out(&self, pieces: &mut [Piece], class: IoClass) {
        let requests = requests_of(pieces);
        if requests.is_empty() {
            return;
        }
        let results = self.run_paced(requests, class);
        self.log.note_data_written();
        note_failures(pieces, results);
    }

    /// Submits the writing of `pieces`; [`Engine::finish_write_out`] waits for it. In manual mode it is written at once, and
    /// settled by that.
    fn begin_write_out(&self, pieces: Vec<Piece>, class: IoClass) -> UnderWay {
        let requests = requests_of(&pieces);
        let writes = if self.options.background == BackgroundMode::Manual {
            Writes::Done(self.run_requests(requests, class))
        } else {
            let (numbers, requests) = to_device(requests, class);
            Writes::Submitted(numbers, submit_batch(&*self.device, requests))
        };
        UnderWay { pieces, writes }
    }

    /// Waits until the pieces are written, and settles them.
    fn finish_write_out(&self, under_way: UnderWay) -> Result<()> {
        let UnderWay { mut pieces, writes } = under_way;
        let results = writes.wait();
        self.log.note_data_written();
        note_failures(&mut pieces, results);
        self.settle(pieces)
    }

    /// Runs the requests; those of the background in portions that the pacer allows.
    fn run_paced(&self, mut requests: Vec<OutRequest>, class: IoClass) -> Written {
        let is_background = matches!(class, IoClass::Writeback | IoClass::Background);
        if !is_background || !self.background.has_threads() {
            return self.run_requests(requests, class);
        }
        let mut results = Vec::with_capacity(requests.len());
        while !requests.is_empty() {
            let sizes = requests.iter().map(|request| request.pages.len() as u64 * BLOCK_BYTES_U64);
            let portion = self.begin_paced_write(sizes);
            let rest = requests.split_off(portion.requests);
            results.extend(self.run_requests(requests, class));
            self.end_paced_write(portion);
            requests = rest;
        }
        results
    }

    /// Runs the requests: in one batch, or in manual mode one by one.
    fn run_requests(&self, requests: Vec<OutRequest>, class: IoClass) -> Written {
        if requests.len() == 1 || self.options.background == BackgroundMode::Manual {
            return requests
                .into_iter()
                .map(|request| {
                    let slices: Vec<&[u8]> = request.pages.iter().map(|page| &**page).collect();
                    let offset_bytes = request.block * BLOCK_BYTES_U64;
                    let result = self.device.write(offset_bytes, &slices, class, false);
                    (request.pieces, result.map_err(Error::from))
                })
                .collect();
        }
        let (pieces, requests) = to_device(requests, class);
        with_results(pieces, self.device.run_all(requests))
    }

    /// Commits what was written. The first error is returned after all pieces were settled.
    pub fn settle(&self, pieces: Vec<Piece>) -> Result<()> {
        let mut first_error = None;
        for mut piece in pieces {
            let result = match piece.failed.take() {
                Some(error) => Err(error),
                None => self.commit_piece(&mut piece),
            };
            self.end(&piece, result.is_ok() || mutation::active(Mutation::SwallowWriteError));
            if let Err(error) = result {
                self.counters.writeback_errors.add(1);
                self.give_back(&piece);
                note_error(&piece.inode, &error);
                first_error.get_or_insert(error);
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    fn commit_piece(&self, piece: &mut Piece) -> Result<()> {
        let Some(admission) = piece.admission.take() else { return Ok(()) };
        let inode = piece.inode.clone();
        let _map = inode.map.lock();
        let mut op = Op::new();
        let mut blocks_added = 0;
        let mut blocks_removed = 0;
        let mut drop_inline = false;
        if piece.into_inode {
            let bytes = &piece.pages[0].page[..piece.size as usize];
            op.put(Key::inline(inode.number), bytes);
        } else if piece.segments.iter().all(|segment| segment.place == Place::Same) {
            self.commit_in_place(piece, &mut op)?;
        } else {
            (blocks_added, blocks_removed) = self.commit_mapping(piece, &mut op)?;
            drop_inline = piece.first() == 0 && inode.meta.lock().item.is_inline();
        }
        if drop_inline {
            op.delete(Key::inline(inode.number));
        }
        if piece.pages.iter().any(|page| page.logged_lsn.is_some()) {
            op.settled(inode.number, piece.first(), piece.pages.len() as u64);
        }
        let mut meta = inode.meta.lock();
        let item = &mut meta.item;
        let written_to = piece.size.min(piece.end() * BLOCK_BYTES_U64);
        item.size = item.size.max(written_to);
        item.blocks = (item.blocks + blocks_added).saturating_sub(blocks_removed);
        if piece.into_inode {
            item.flags |= INODE_INLINE;
        } else if drop_inline {
            item.flags &= !INODE_INLINE;
        }
        op.put(Key::inode(inode.number), &item.encode());
        let lsn = self.store.commit(op, admission)?;
        meta.logged(lsn, true);
        Ok(())
    }

    /// The mapping stays, only checksums change.
    fn commit_in_place(&self, piece: &Piece, op: &mut Op) -> Result<()> {
        let number = piece.inode.number;
        let inode = &*piece.inode;
        for mapped in extents::all_pieces(&self.store, inode, piece.first(), piece.end())? {
            let (key, mut extent) = mapped.whole()?;
            for file_block in mapped.file_block..mapped.end() {
                let crc = piece.checksums[(file_block - piece.first()) as usize];
                extent.checksums[(file_block - key.offset) as usize] = crc;
                let block = extent.block + (file_block - key.offset);
                op.home_record(Home { inode: number, file_block, block, checksum: crc });
            }
            op.set_unlogged(key, &extent.encode());
        }
        Ok(())
    }

    /// The whole range is mapped anew. Answers blocks added and removed.
    fn commit_mapping(&self, piece: &Piece, op: &mut Op) -> Result<(u64, u64)> {
        let number = piece.inode.number;
        let (start, end) = (piece.first(), piece.end());
        let (old, before) = self.mapped(&piece.inode, start, end)?;
        let removed = extents::cut_pieces(op, &old, Unmapped::Kept)?;
        for segment in &piece.segments {
            let from = start + segment.first as u64;
            if segment.place == Place::New {
                free_overlap(op, &old, from, from + segment.pages as u64);
                op.allocated(Run { start: segment.block, blocks: segment.pages as u64 });
            }
            op.wrote(segment.block, &piece.checksums[segment.first..segment.first + segment.pages]);
        }
        let mut left = match (before, old.first()) {
            (Some(before), _) => before.adjoining(start)?,
            (None, Some(first)) if first.file_block == start => {
                extents::left_neighbour(&self.store, &*piece.inode, start)?
            }
            (None, _) => None,
        };
        for (file_block, extent) in joined(piece) {
            extents::insert(op, number, file_block, &extent, left.take());
        }
        Ok((end - start, removed))
    }

    /// Ends the writeback of a piece's pages, and pays what depended on them.
    fn end(&self, piece: &Piece, ok: bool) {
        let mut paid = 0;
        {
            let mut pages = piece.inode.pages.write();
            for page in &piece.pages {
                let end = pages.end_writeback(page.index, piece.token, ok);
                if let Some(lsn) = end.home_lsn {
                    self.store.obligations.release(lsn);
                }
                if !end.stale && !end.newly_dirty {
                    paid += 1;
                }
            }
        }
        self.pages_paid(paid);
        piece.inode.io_ended();
        if ok {
            self.dirty.remove_if_clean(&piece.inode);
        }
    }

    /// Blocks that were allocated for a piece that failed. They are not used again before they
    /// have gone through a checkpoint, so that the next attempt goes elsewhere.
    fn give_back(&self, piece: &Piece) {
        for segment in piece.segments.iter().filter(|segment| segment.place == Place::New) {
            self.alloc.quarantine(Run { start: segment.block, blocks: segment.pages as u64 });
        }
    }

    /// `count` pages are not dirty any more: their reservations are released.
    pub fn pages_paid(&self, count: u64) {
        if count > 0 {
            self.dirty_pages.fetch_sub(count, Ordering::AcqRel);
            self.alloc.release(count);
            self.background.progress();
        }
    }

    /// Collects, writes and settles dirty pages of `inode` until none of the range that pass `filter` are left but
    /// those under writeback. Of many, one round is on its way to the disk while the next is collected.
    pub fn write_back(
        &self,
        inode: &Arc<Inode>,
        range: Range<u64>,
        filter: RunFilter,
        class: IoClass,
    ) -> Result<()> {
        let mut under_way: Option<UnderWay> = None;
        loop {
            let mut pieces = Vec::new();
            // What is under way holds log space.
            let room = if under_way.is_some() { Room::NoWait } else { Room::Normal };
            let budget = (ROUND_PAGES, room);
            let collected = self.collect(inode, range.clone(), filter, budget, &mut pieces);
            let goes_on = matches!(collected, Ok(Collected { complete: false, .. }));
            let had_more = under_way.is_some();
            let finish_last = |engine: &Self, last: Option<UnderWay>| {
                last.map_or(Ok(()), |last| engine.finish_write_out(last))
            };
            if goes_on {
                let next = self.begin_write_out(pieces, class);
                let ended = finish_last(self, under_way.replace(next));
                if ended.is_err() {
                    let _ = finish_last(self, under_way.take());
                    return ended;
                }
                continue;
            }
            self.write_out(&mut pieces, class);
            let ended = finish_last(self, under_way.take());
            let settled = self.settle(pieces);
            ended.and(settled)?;
            match collected {
                // For lack of log space, which there may be now.
                Err(Error::WouldBlock) if had_more => {}
                Err(error) => return Err(error),
                Ok(collected) if collected.complete => return Ok(()),
                Ok(_) => {}
            }
        }
    }
}

/// A run as long as the limit goes on: it ends between two units.
fn cut_between_units(run: Range<u64>, limit: u64) -> Range<u64> {
    let end = run.end / UNTORN_PAGES * UNTORN_PAGES;
    if run.end - run.start < limit || end <= run.start { run } else { run.start..end }
}

/// Frees what `old` maps in `from .. to`.
fn free_overlap(op: &mut Op, old: &[Mapped], from: u64, to: u64) {
    for part in old {
        let start = part.file_block.max(from);
        let end = part.end().min(to);
        if start < end {
            op.freed(Run { start: part.block + (start - part.file_block), blocks: end - start });
        }
    }
}

/// The extents of a piece: segments that lie side by side in one group become one.
fn joined(piece: &Piece) -> Vec<(u64, Extent)> {
    let mut extents: Vec<(u64, Extent)> = Vec::new();
    for segment in &piece.segments {
        let checksums = &piece.checksums[segment.first..segment.first + segment.pages];
        let group = segment.block / crate::format::GROUP_BLOCKS;
        if let Some((_, last)) = extents.last_mut()
            && last.block + last.blocks == segment.block
            && last.block / crate::format::GROUP_BLOCKS == group
        {
            last.blocks += segment.pages as u64;
            last.checksums.extend_from_slice(checksums);
            continue;
        }
        let extent = Extent {
            block: segment.block,
            blocks: segment.pages as u64,
            checksums: checksums.to_vec(),
        };
        extents.push((piece.first() + segment.first as u64, extent));
    }
    extents
}

/// Remembers that pages of `inode` could not be written, for every handle to report once.
fn note_error(inode: &Inode, error: &Error) {
    let mut held = inode.write_error.lock();
    held.0 += 1;
    held.1 = Some(error.clone());
}

/// Neighbouring blocks of some pieces, by their numbers.
struct OutRequest {
    block: u64,
    pages: Vec<PageRef>,
    pieces: Vec<usize>,
}

/// Pieces whose writing was submitted. Holds their log space, and must be finished.
struct UnderWay {
    pieces: Vec<Piece>,
    writes: Writes,
}

/// Which pieces a request was for, and how it ended.
type Written = Vec<(Vec<usize>, Result<()>)>;

enum Writes {
    /// Which pieces each request of the batch is for.
    Submitted(Vec<Vec<usize>>, Batch),
    Done(Written),
}

impl Writes {
    fn wait(self) -> Written {
        match self {
            Self::Submitted(numbers, batch) => with_results(numbers, batch.wait()),
            Self::Done(results) => results,
        }
    }
}

fn with_results(numbers: Vec<Vec<usize>>, outcomes: Vec<Outcome>) -> Written {
    let results = outcomes.into_iter().map(|(result, _)| result.map_err(Error::from));
    numbers.into_iter().zip(results).collect()
}

/// What is to be written for `pieces`, in the order of blocks.
fn requests_of(pieces: &[Piece]) -> Vec<OutRequest> {
    let mut order: Vec<(u64, usize, usize)> = Vec::new();
    for (number, piece) in pieces.iter().enumerate() {
        for (segment_number, segment) in piece.segments.iter().enumerate() {
            order.push((segment.block, number, segment_number));
        }
    }
    order.sort_unstable();
    let mut requests: Vec<OutRequest> = Vec::new();
    for (block, number, segment_number) in order {
        let segment = &pieces[number].segments[segment_number];
        let pages = pieces[number].pages[segment.first..segment.first + segment.pages].iter();
        let fits = requests.last().is_some_and(|last| {
            last.block + last.pages.len() as u64 == block
                && last.pages.len() + segment.pages <= REQUEST_PAGES
        });
        if !fits {
            requests.push(OutRequest { block, pages: Vec::new(), pieces: Vec::new() });
        }
        if let Some(last) = requests.last_mut() {
            last.pages.extend(pages.map(|page| page.page.clone()));
            last.pieces.push(number);
        }
    }
    requests
}

/// The same for the device, and the pieces of each.
fn to_device(requests: Vec<OutRequest>, class: IoClass) -> (Vec<Vec<usize>>, Vec<Request>) {
    let one = |request: OutRequest| {
        let device_request = Request {
            operation: Operation::Write { fua: false },
            offset_bytes: request.block * BLOCK_BYTES_U64,
            buffers: Buffers::Pages(request.pages),
            class,
        };
        (request.pieces, device_request)
    };
    requests.into_iter().map(one).unzip()
}

/// Notes with each piece that a part of it could not be written.
fn note_failures(pieces: &mut [Piece], results: Written) {
    for (numbers, result) in results {
        if let Err(error) = result {
            for number in numbers {
                pieces[number].failed = Some(error.clone());
            }
        }
    }
}

/// The newest operation whose payload may go home: durable in the log.
pub fn owed_filter(up_to: Lsn) -> RunFilter {
    RunFilter { logged: crate::cache::map::LoggedFilter::OwedUpTo(up_to), ..RunFilter::default() }
}

/// Pages that cover bytes `offset .. offset + length`.
pub fn page_range(offset: u64, length: u64) -> Range<u64> {
    let end = offset.saturating_add(length);
    offset / BLOCK_BYTES_U64..end.div_ceil(BLOCK_BYTES as u64)
}
