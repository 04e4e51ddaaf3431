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
//! **Invariant:** a piece is about [`PIECE_PAGES`] pages of one inode at most, in one run or several, and settles in one
//! operation.
//! **Invariant (untorn):** pages that the log does not have, that lie side by side in an aligned unit of [`UNTORN_PAGES`] and
//! that may so be one write, are in one piece: [`crate::cache::map::PageMap::begin_writeback_untorn`] takes them together,
//! under the lock that the write took, and pieces are cut between units.

mod beside;
mod memory_order;
mod output;
mod piece;
mod remap;
mod rounds;

use super::extents::{self, Piece as Mapped};
use super::fsync::MAX_PAYLOAD_PAGES;
use super::homes::Replaceable;
use super::known_homes::MappedRun;
use super::known_mapping;
use super::placement_policy;
use crate::alloc::{AllocKind, ReserveClass, Run};
use crate::background::LogShortage;
use crate::cache::map::{LoggedFilter, RunFilter};
use crate::device::IoClass;
use crate::engine::{Engine, Room};
use crate::error::{Error, Result};
use crate::format::item::INODE_INLINE;
use crate::format::{BLOCK_BYTES, BLOCK_BYTES_U64, Key, MAX_INLINE_BYTES};
use crate::inode::Inode;
use crate::log::Admission;
use crate::log::companion::Companions;
use crate::mutation::{self, Mutation};
use crate::sync::Arc;
use crate::sync::atomic::Ordering;
use crate::txn::{Lsn, Op};
use crate::types::BackgroundMode;
use memory_order::in_memory_order;
use output::{
    OutRequest, REQUEST_PAGES, SHARED_REQUEST_PAGES, Written, note_failures, requests_of,
    to_device, with_results,
};
use piece::{CUT_BYTES, Place, Segment, Spare};
pub use piece::{PIECE_PAGES, Piece, PieceLimits, USUAL_RUNS, cut_bytes, settle_bytes};
use remap::{Changed, Remapping};
pub use rounds::{FLUSH_INODES, is_of_one_file};
use std::borrow::Cow;
use std::ops::Range;

/// From this length on, new pages are placed near the file's last extent before them even if that is far away in the file.
const FAR_HINT_PAGES: u64 = 16;
/// With so many runs in its first operation with extents, a file is taken for one that is written here and there.
const SCATTERED_RUNS: usize = 2;

/// Of the room that users have, one block in so many at most waits because it could not be written for a checkpoint that cannot be, either.
const SET_ASIDE_SHARE: u64 = 4;

/// What [`Engine::collect`] took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Collected {
    /// How many pages.
    pub pages: u64,
    /// Nothing was left over for lack of log space or budget.
    pub complete: bool,
}

impl Engine {
    /// Takes dirty pages of `range` of `inode` that pass `filter`, about `budget_pages` of them, and prepares them for
    /// writing. Log space is waited for only while `pieces` is empty: what they hold has to be given back first. So the
    /// answer may be incomplete; the caller writes, settles and comes again.
    ///
    /// # Errors
    /// What keeps pages of this file from going home is noted with it, as what fails later is: its owner hears of it, and whoever
    /// waits for pages to become clean.
    pub fn collect(
        &self,
        inode: &Arc<Inode>,
        range: Range<u64>,
        filter: RunFilter,
        budget: (u64, Room),
        pieces: &mut Vec<Piece>,
    ) -> Result<Collected> {
        let before = pieces.len();
        let collected = self.collect_unsummed(inode, range, filter, budget, pieces);
        pieces[before..].iter_mut().for_each(Piece::sum);
        collected
    }

    /// The same without the checksums: [`Piece::sum`] is left to the caller.
    fn collect_unsummed(
        &self,
        inode: &Arc<Inode>,
        range: Range<u64>,
        filter: RunFilter,
        (budget_pages, room): (u64, Room),
        pieces: &mut Vec<Piece>,
    ) -> Result<Collected> {
        let filter = RunFilter { skip_writeback: true, ..filter };
        let limits = self.piece_limits();
        let mut from = range.start;
        let mut collected = Collected { pages: 0, complete: true };
        let mut shortage = LogShortage::default();
        while from < range.end {
            let runs = limits.first_of(inode.pages.read().dirty_runs(
                from..range.end,
                limits.pages(),
                filter,
            ));
            let Some(first) = runs.first() else { break };
            if collected.pages >= budget_pages {
                collected.complete = false;
                break;
            }
            from = first.start;
            let room = match room {
                Room::Normal if !pieces.is_empty() => Room::NoWait,
                room => room,
            };
            let admission = match self.admit(settle_bytes(pages_of(&runs), runs.len()), 0, room) {
                Err(Error::WouldBlock) if !pieces.is_empty() => {
                    collected.complete = false;
                    break;
                }
                Err(error) if room == Room::Normal && !matches!(error, Error::Shutdown(_)) => {
                    // The log is full of what cannot go home: whoever waits for pages to become clean hears of it.
                    self.background.note_failure(&error);
                    return Err(error);
                }
                other => other?,
            };
            // One small piece goes wherever there is room for it. From the second on they are a batch.
            let mut batch = Batch { goes_on: !pieces.is_empty(), spare: None };
            batch.spare = pieces.last_mut().and_then(|piece| piece.spare.take());
            match self.take(inode, &runs, (&range, batch), admission) {
                Ok(taken) => {
                    from = taken.next;
                    if let Some(piece) = taken.piece {
                        collected.pages += piece.pages.len() as u64;
                        pieces.push(piece);
                    }
                }
                // More pages belong together than the log has room for.
                Err(Error::WouldBlock) if !pieces.is_empty() => {
                    collected.complete = false;
                    break;
                }
                Err(Error::WouldBlock) if room == Room::Normal => {
                    self.relieve_log(&mut shortage)?;
                }
                Err(error) => {
                    // A node with the file's mapping, or a bitmap, cannot be read.
                    if is_of_one_file(&error) {
                        self.note_failed_home(inode, &error);
                    }
                    return Err(error);
                }
            }
        }
        Ok(collected)
    }

    /// Bytes of records that one operation may have, leaving room for estimates that are too low.
    fn max_operation_bytes(&self) -> usize {
        (self.log.max_operation_blocks() as usize).saturating_sub(3) * BLOCK_BYTES
    }

    /// What one operation of this log can settle.
    pub fn piece_limits(&self) -> PieceLimits {
        PieceLimits::new(self.max_operation_bytes())
    }

    /// The pages that one operation of this log can settle.
    pub fn max_piece_pages(&self) -> u64 {
        self.piece_limits().pages()
    }

    fn take(
        &self,
        inode: &Arc<Inode>,
        runs: &[Range<u64>],
        (bounds, mut batch): (&Range<u64>, Batch),
        admission: Admission,
    ) -> Result<Taken> {
        let expected_bytes = settle_bytes(pages_of(runs), runs.len());
        let _map = inode.lock_map()?;
        let (writeback, done, size) = {
            let mut pages = inode.pages.write();
            let most_pages = self.max_piece_pages();
            let (writeback, done) = pages.begin_writeback_untorn(runs, bounds, most_pages);
            (writeback, done, inode.size())
        };
        let next = runs[done - 1].end;
        if writeback.pages.is_empty() {
            return Ok(Taken { piece: None, next });
        }
        let mut piece = Piece::new(self.me.clone(), inode.clone(), admission, writeback, size);
        let bytes = settle_bytes(piece.pages.len() as u64, piece.runs.len());
        let more_bytes = bytes.saturating_sub(expected_bytes);
        let placed = self
            .admit_more(&mut piece, more_bytes)
            .and_then(|()| self.place(&mut piece, &mut batch));
        if let Err(error) = placed {
            self.put_back(&piece);
            return Err(error);
        }
        piece.spare = batch.spare;
        let stays: Vec<u64> = piece.indices_in_place().collect();
        if !stays.is_empty() {
            inode.pages.write().note_in_place(stays.into_iter(), piece.token);
        }
        Ok(Taken { piece: Some(piece), next })
    }

    /// The pages of a piece with which nothing was done yet are dirty again.
    fn put_back(&self, piece: &Piece) {
        for segment in piece.segments.iter().filter(|segment| segment.place == Place::New) {
            self.alloc.cancel(segment.run());
        }
        self.end(piece, false);
    }

    /// Adds to the piece's log space, without waiting for it.
    fn admit_more(&self, piece: &mut Piece, bytes: usize) -> Result<()> {
        if bytes > 0
            && let Some(admission) = &mut piece.admission
        {
            admission.join(self.admit(bytes, 0, Room::Chain)?);
        }
        Ok(())
    }

    /// Decides where the pages go. The caller holds the `map` lock.
    fn place(&self, piece: &mut Piece, batch: &mut Batch) -> Result<()> {
        let is_alone = piece.runs.len() == 1;
        let mut planned = Vec::with_capacity(piece.runs.len());
        let mut near = None;
        let mut cut_bytes = 0;
        let moment = self.store.mappings.moment(piece.inode.number);
        let replaceable = self.replaceable_runs(piece)?;
        for (run, known) in piece.runs.iter().zip(&replaceable) {
            let blocks = piece.file_blocks(run);
            let (own, looked_up);
            let (mapped, before): (&[Old], _) = match known {
                Replaceable::Nothing => (&[], None),
                Replaceable::Extent(home) => {
                    own = [Old::extent(home)];
                    (&own, None)
                }
                Replaceable::Unknown => {
                    let (parts, before) = self.look_up_mapping(&piece.inode, &blocks)?;
                    looked_up = parts.iter().map(Old::from).collect::<Vec<_>>();
                    (&looked_up, before)
                }
            };
            let fits_inode = piece.size <= MAX_INLINE_BYTES as u64 && mapped.is_empty();
            if is_alone && blocks == (0..1) && fits_inode {
                piece.into_inode = true;
                return Ok(());
            }
            // Short runs, scattered, belong nowhere in particular.
            if planned.is_empty() && (is_alone || !is_short(run)) {
                near = before.map(|before| before.next_block()).transpose()?;
            }
            cut_bytes += self.plan_segments(piece, run, mapped, &mut planned);
        }
        piece.replaceable = Some((moment, replaceable));
        self.place_new(piece, &planned, near, batch)?;
        // Exact, because several runs may each leave two long parts of an extent.
        self.admit_more(piece, cut_bytes.saturating_sub(CUT_BYTES))
    }

    /// The segments of a run: in place where the log can repair it, in its unwritten extent, or new (block 0: not allocated yet).
    /// Answers the size of the extents that are cut.
    fn plan_segments(
        &self,
        piece: &Piece,
        run: &Range<usize>,
        mapped: &[Old],
        planned: &mut Vec<Segment>,
    ) -> usize {
        let durable = self.log.durable_lsn();
        // Blocks that could not be written once are not relied on again, while the inode is in memory. Whatever else has failed, new ones cost
        // no more than their neighbourhood.
        let trusted = piece.inode.write_error.lock().0 == 0;
        let Range { start, end } = piece.file_blocks(run);
        let mut cut_bytes = 0;
        let mut push = |from: u64, to: u64, block: u64, place: Place| {
            if from < to {
                let first = run.start + (from - start) as usize;
                planned.push(Segment { first, pages: (to - from) as usize, block, place });
            }
        };
        let mut at = start;
        for part in mapped {
            push(at, part.file_block, 0, Place::New);
            at = part.file_block;
            while at < part.end {
                let place = |page: u64| {
                    let page = &piece.pages[run.start + (page - start) as usize];
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
                let stop = (at..part.end).find(|&page| place(page) != kind).unwrap_or(part.end);
                let is_new = kind == Place::New;
                let block = if is_new { 0 } else { part.block + (at - part.file_block) };
                if is_new {
                    cut_bytes += part.item_bytes;
                }
                push(at, stop, block, kind);
                at = stop;
            }
        }
        push(at, end, 0, Place::New);
        cut_bytes
    }

    /// What each run of `piece` replaces, as when it was placed if its file is mapped as it was then. The caller holds the `map` lock.
    fn still_replaceable<'a>(&self, piece: &'a Piece) -> Result<Cow<'a, [Replaceable]>> {
        let now = self.store.mappings.moment(piece.inode.number);
        match &piece.replaceable {
            Some((moment, known)) if *moment == now => {
                debug_assert!(self.replaceable_runs(piece).map_or(true, |again| {
                    known.iter().zip(&again).all(|(known, again)| !known.contradicts(again))
                }));
                Ok(Cow::Borrowed(known))
            }
            _ => self.replaceable_runs(piece).map(Cow::Owned),
        }
    }

    /// What each run of `piece` replaces, where that is known and it does not matter what is before: short and scattered runs
    /// belong nowhere in particular. The caller holds the `map` lock.
    fn replaceable_runs(&self, piece: &Piece) -> Result<Vec<Replaceable>> {
        let inode = &piece.inode;
        if inode.meta.lock().item.blocks == 0 {
            return Ok(vec![Replaceable::Nothing; piece.runs.len()]);
        }
        if piece.runs.len() == 1 {
            return Ok(vec![Replaceable::Unknown]);
        }
        let mut scattered = Vec::with_capacity(piece.runs.len());
        let among = piece.runs.iter().filter(|run| is_scattered(piece, run));
        scattered.extend(among.map(|run| piece.file_blocks(run)));
        let mut known = self.replaceable(inode, &scattered)?.into_iter();
        let mut answer = |run: &Range<usize>| {
            let known = if is_scattered(piece, run) { known.next() } else { None };
            known.unwrap_or(Replaceable::Unknown)
        };
        Ok(piece.runs.iter().map(&mut answer).collect())
    }

    /// What `blocks` are mapped to, and the extent before, as the store has it.
    pub fn look_up_mapping(
        &self,
        inode: &Inode,
        blocks: &Range<u64>,
    ) -> Result<known_mapping::Mapped> {
        let moment = self.store.mappings.moment(inode.number);
        if let Some(mapped) = inode.known_mapping.lock().get(moment, blocks) {
            return Ok(mapped);
        }
        let mapped =
            extents::all_pieces_after(&self.store, inode.into(), blocks.start, blocks.end)?;
        inode.known_mapping.lock().remember(moment, blocks.clone(), mapped.clone());
        Ok(mapped)
    }

    /// Gives the piece its segments: the `planned` ones, and blocks to those that are new. Space was reserved when the pages
    /// became dirty. New ones that follow one another are placed side by side: scattered pages leave in one write. `near`: the
    /// block behind what the file has before the piece, if that is near.
    fn place_new(
        &self,
        piece: &mut Piece,
        planned: &[Segment],
        near: Option<u64>,
        batch: &mut Batch,
    ) -> Result<()> {
        let is_first = piece.inode.meta.lock().item.blocks == 0;
        piece.segments.reserve(planned.len());
        let mut rest = planned;
        while let Some(segment) = rest.first() {
            if segment.place != Place::New {
                piece.segments.push(segment.clone());
                rest = &rest[1..];
                continue;
            }
            let count = rest.iter().take_while(|segment| segment.place == Place::New).count();
            let (news, others) = rest.split_at(count);
            rest = others;
            let pages: usize = news.iter().map(|segment| segment.pages).sum();
            let index = piece.pages[segment.first].index;
            let follows =
                |last: &&Segment| piece.pages[last.first + last.pages - 1].index + 1 == index;
            let hint = match piece.segments.last().filter(follows) {
                Some(last) => Some(last.block + last.pages as u64),
                None if is_first || near.is_some() => near,
                // A scattered page belongs nowhere in particular.
                None if (news[0].pages as u64) < FAR_HINT_PAGES => None,
                None => extents::placement_hint(&self.store, piece.inode.number, index)?,
            };
            self.allocate_side_by_side(piece, news, (pages as u64, hint), batch)?;
        }
        Ok(())
    }

    /// Blocks for the `news`, `pages` in all, in as few runs as there are: in the order in which they lie in the file, or in memory where
    /// they are scattered.
    fn allocate_side_by_side(
        &self,
        piece: &mut Piece,
        news: &[Segment],
        (mut pages, hint): (u64, Option<u64>),
        batch: &mut Batch,
    ) -> Result<()> {
        let mut free = Run { start: 0, blocks: 0 };
        let mut hint = hint;
        let from = piece.segments.len();
        // What was gathered for the background is sorted by files and file blocks, and stays so.
        let is_for_a_sync = piece.pages.len() <= MAX_PAYLOAD_PAGES && !batch.goes_on;
        let is_scattered =
            news.len() > 1 && news.iter().all(|run| (run.pages as u64) < FAR_HINT_PAGES);
        let order =
            (is_for_a_sync && is_scattered).then(|| in_memory_order(news, &piece.pages)).flatten();
        for number in 0..news.len() {
            let segment = &news[order.as_ref().map_or(number, |order| order[number])];
            let mut done = 0;
            while done < segment.pages {
                if free.blocks == 0 {
                    free = self.allocate_of_batch(pages, hint, batch)?;
                }
                let blocks = free.blocks.min((segment.pages - done) as u64);
                let first = segment.first + done;
                let place = Place::New;
                piece.segments.push(Segment {
                    first,
                    pages: blocks as usize,
                    block: free.start,
                    place,
                });
                free = Run { start: free.start + blocks, blocks: free.blocks - blocks };
                hint = Some(free.start);
                pages -= blocks;
                done += blocks as usize;
            }
        }
        if order.is_some() {
            piece.segments[from..].sort_unstable_by_key(|segment| segment.first);
        }
        Ok(())
    }

    /// Up to `pages` blocks. Those of small pieces that go anywhere come out of one run for all of the batch, as long as there is plenty of space
    /// in long runs: packed into the holes that rewritten pages have left, each would be a write of its own.
    fn allocate_of_batch(&self, pages: u64, hint: Option<u64>, batch: &mut Batch) -> Result<Run> {
        let is_small = batch.goes_on && hint.is_none() && pages < FAR_HINT_PAGES;
        if !is_small {
            return self.alloc.allocate(pages, 1, hint, AllocKind::Data);
        }
        if let Some(spare) = &mut batch.spare {
            let run = spare.take(pages);
            if run.blocks > 0 {
                return Ok(run);
            }
        }
        let want = match placement_policy::batch_blocks(&self.alloc.totals()) {
            Some(blocks) => blocks.max(pages),
            None => pages,
        };
        let run = self.alloc.allocate(want, 1, None, AllocKind::Data)?;
        let mut spare = Spare::new(self.alloc.clone(), run);
        let taken = spare.take(pages);
        batch.spare = Some(spare);
        Ok(taken)
    }

    /// Writes all `pieces`. A piece that could not be written carries its error from here on.
    pub fn write_out(&self, pieces: &mut [Piece], class: IoClass) {
        let requests = requests_of(pieces, self.most_request_pages(class));
        if requests.is_empty() {
            return;
        }
        let results = self.run_paced(requests, class);
        self.log.note_data_written();
        note_failures(pieces, results);
    }

    /// Writes may be on their way while something else is done. In manual mode only on purpose: where rounds are small.
    fn may_overlap(&self) -> bool {
        self.options.background != BackgroundMode::Manual || self.options.round_pages.is_some()
    }

    /// How large a request of `class` may be now.
    fn most_request_pages(&self, class: IoClass) -> usize {
        let is_paced = is_paced(class) && self.background.has_threads();
        if is_paced && self.is_foreground_active() { SHARED_REQUEST_PAGES } else { REQUEST_PAGES }
    }

    /// Runs the requests; those of the background in portions that the pacer allows.
    fn run_paced(&self, mut requests: Vec<OutRequest>, class: IoClass) -> Written {
        if !is_paced(class) || !self.background.has_threads() {
            return self.run_requests(requests, class);
        }
        let mut results = Vec::with_capacity(requests.len());
        while !requests.is_empty() {
            let sizes = requests.iter().map(OutRequest::bytes);
            self.let_log_pass(class);
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
    pub fn settle(&self, pieces: impl IntoIterator<Item = Piece>) -> Result<()> {
        let mut first_error = None;
        let _changing = self.store.obligations.begin_change();
        for mut piece in pieces {
            let result = if let Some(error) = piece.failed.take() {
                Err(error)
            } else {
                piece.admission.take().map_or(Ok(()), |admission| {
                    let _map = piece.inode.map.lock();
                    self.commit_piece(&piece, admission, None).map(drop)
                })
            };
            if let Err(error) = self.end_piece(&piece, result) {
                first_error.get_or_insert(error);
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    /// As [`Engine::settle`], of pieces of several files: the error says of which it is.
    pub fn settle_of_many(&self, pieces: impl IntoIterator<Item = Piece>) -> Result<()> {
        let mut result = Ok(());
        for piece in pieces {
            let number = piece.inode.number;
            let settled = self.settle([piece]).map_err(|error| error.of_inode(number));
            result = result.and(settled);
        }
        result
    }

    /// The piece is in the log, or nothing of it.
    pub(super) fn end_piece(&self, piece: &Piece, result: Result<()>) -> Result<()> {
        self.end(piece, result.is_ok() || mutation::active(Mutation::SwallowWriteError));
        result.inspect_err(|error| {
            for segment in piece.segments.iter().filter(|segment| segment.place == Place::New) {
                self.give_back(segment.run(), error);
            }
            self.note_failed_home(&piece.inode, error);
        })
    }

    /// Pages of `inode` could not be brought home: its owner hears of it, and whoever listens.
    pub fn note_failed_home(&self, inode: &Inode, error: &Error) {
        self.counters.writeback_errors.add(1);
        note_error(inode, error);
        self.background.note_failure(&error.of_inode(inode.number));
    }

    /// The piece as one operation, perhaps with `companions`. The caller holds the `map` lock.
    pub(super) fn commit_piece(
        &self,
        piece: &Piece,
        admission: Admission,
        companions: Option<Companions>,
    ) -> Result<Lsn> {
        let inode = &piece.inode;
        let before = self.store.mappings.moment(inode.number);
        let mut op = Op::new();
        let mut changed = Changed::default();
        let newer = piece.newer_in_log(&inode.pages.read());
        let mut drop_inline = false;
        if piece.into_inode {
            let bytes = &piece.pages[0].page[..piece.size as usize];
            op.put(Key::inline(inode.number), bytes);
        } else {
            changed = self.commit_runs(piece, &newer, &mut op)?;
            let replaces = piece.first() == 0 && !piece.is_in_place(&piece.runs[0]);
            drop_inline = replaces && inode.meta.lock().item.is_inline();
        }
        if drop_inline {
            op.delete(Key::inline(inode.number));
        }
        let forgets = companions.is_some() && mutation::active(Mutation::OweWhatIsBeside);
        for settled in piece.settled(&newer).into_iter().filter(|_| !forgets) {
            op.settled(inode.number, settled.start, settled.end - settled.start);
        }
        let mut meta = inode.meta.lock();
        let begins = meta.item.blocks == 0 && piece.runs.len() >= SCATTERED_RUNS;
        let item_before = meta.item;
        let item = &mut meta.item;
        let written_to = piece.size.min(piece.end() * BLOCK_BYTES_U64);
        item.size = item.size.max(written_to);
        item.blocks = (item.blocks + changed.added).saturating_sub(changed.removed);
        if piece.into_inode {
            item.flags |= INODE_INLINE;
        } else if drop_inline {
            item.flags &= !INODE_INLINE;
        }
        op.put(Key::inode(inode.number), &item.encode());
        let moved = if companions.is_some() { changed.removed } else { 0 };
        if let Some(companions) = companions {
            op.beside(companions);
        }
        let committed = self.store.commit(op, admission);
        let lsn = committed.inspect_err(|_| meta.item = item_before)?;
        self.counters.sync_moved_pages.add(moved);
        meta.logged(lsn, true);
        drop(meta);
        inode.known_mapping.lock().forget();
        let after = self.store.mappings.moment(inode.number);
        let mut known = inode.known_homes.lock();
        if begins {
            known.begin(before);
        }
        known.carry_over((before, after), mapped_runs(piece), &self.homes_budget);
        Ok(lsn)
    }

    /// The mapping of each run; of pages that the log has something `newer` of, it stays as it is. The caller holds the `map` lock.
    fn commit_runs(&self, piece: &Piece, newer: &[u64], op: &mut Op) -> Result<Changed> {
        let mut remapping = Remapping::new(self, (piece, newer), op)?;
        for (number, run) in piece.runs.iter().enumerate() {
            if piece.is_in_place(run) {
                remapping.stay(number)?;
            } else {
                remapping.move_to_segments(number)?;
            }
        }
        let changed = remapping.finish();
        piece.note_written(op);
        Ok(changed)
    }

    /// Ends the writeback of a piece's pages, and pays what depended on them.
    fn end(&self, piece: &Piece, ok: bool) {
        let mut paid = 0;
        let mut home = Vec::new();
        {
            let mut pages = piece.inode.pages.write();
            for page in &piece.pages {
                let end = pages.end_writeback(page.index, piece.token, ok);
                home.extend(end.home_lsn);
                if !end.stale && !end.newly_dirty {
                    paid += 1;
                }
            }
            piece.ended.store(true, Ordering::Release);
        }
        self.pages_paid(paid);
        // Last: who waits until nothing is owed finds everything paid.
        self.store.obligations.release_all(&home);
        piece.inode.io_ended();
        if ok {
            self.dirty.remove_if_clean(&piece.inode);
        }
    }

    /// Blocks that were allocated for what could not be written. They are not used again before they have gone through a checkpoint, so that the
    /// next attempt goes elsewhere: to a place that is not broken, or that the host has given already. But not so many wait for that that others
    /// miss what they were promised; nor, where the host is full, or a checkpoint is refused as well, that the volume seems to be full.
    pub fn give_back(&self, run: Run, error: &Error) {
        let room_blocks = self.alloc.room_blocks(ReserveClass::User);
        let waits_long =
            matches!(error, Error::HostFull(_)) || self.checkpointer.refused().is_some();
        let goes_elsewhere = if waits_long {
            let waiting_blocks = self.alloc.pending_free_blocks() + run.blocks;
            waiting_blocks <= room_blocks / SET_ASIDE_SHARE
        } else {
            room_blocks > 0
        };
        if goes_elsewhere {
            self.alloc.quarantine(run);
        } else {
            self.alloc.cancel(run);
        }
    }

    /// `count` pages are not dirty any more: their reservations are released.
    pub fn pages_paid(&self, count: u64) {
        if count > 0 {
            self.dirty_pages.fetch_sub(count, Ordering::AcqRel);
            self.alloc.release(count);
            self.background.paid_pages.fetch_add(count, Ordering::AcqRel);
            self.background.progress();
        }
    }
}

/// True for what keeps the pace of the background.
pub const fn is_paced(class: IoClass) -> bool {
    matches!(class, IoClass::Writeback | IoClass::Background)
}

/// What `piece` maps anew.
fn mapped_runs(piece: &Piece) -> impl Iterator<Item = MappedRun> {
    let forgotten = mutation::active(Mutation::ForgetMapped);
    let anew = piece.runs.iter().filter(move |run| !forgotten && !piece.is_in_place(run));
    anew.flat_map(move |run| {
        let is_own_extent = run.len() == 1 && is_scattered(piece, run);
        piece.segments_of(run).iter().map(move |segment| MappedRun {
            file_block: piece.pages[segment.first].index,
            blocks: segment.pages as u64,
            block: segment.block,
            is_own_extent,
        })
    })
}

/// What a part of a run is mapped to before it is written.
struct Old {
    file_block: u64,
    end: u64,
    block: u64,
    unwritten: bool,
    /// Of what may be left of its extent.
    item_bytes: usize,
}

impl From<&Mapped> for Old {
    fn from(part: &Mapped) -> Self {
        let (file_block, end) = (part.file_block, part.end());
        let (block, unwritten) = (part.block, part.unwritten);
        Self { file_block, end, block, unwritten, item_bytes: part.item_bytes() }
    }
}

impl Old {
    /// An extent of its own: nothing is left of it.
    fn extent(home: &MappedRun) -> Self {
        let (file_block, end, block) = (home.file_block, home.end(), home.block);
        Self { file_block, end, block, unwritten: false, item_bytes: 0 }
    }
}

/// The run is placed with the others of the piece, and no extent before it is made longer by it.
fn is_scattered(piece: &Piece, run: &Range<usize>) -> bool {
    piece.runs.len() > 1 && is_short(run)
}

/// Where such a run is placed has nothing to do with its neighbours in the file.
fn is_short(run: &Range<usize>) -> bool {
    (run.len() as u64) < FAR_HINT_PAGES
}

fn pages_of(runs: &[Range<u64>]) -> u64 {
    runs.iter().map(|run| run.end - run.start).sum()
}

/// What pieces that are collected one after the other have in common.
struct Batch {
    /// There was one before.
    goes_on: bool,
    spare: Option<Spare>,
}

/// What [`Engine::take`] took.
struct Taken {
    /// `None`: nothing of the runs was left to take.
    piece: Option<Piece>,
    /// The file block to go on from.
    next: u64,
}

/// Remembers that pages of `inode` could not be written, for every handle to report once.
fn note_error(inode: &Inode, error: &Error) {
    let mut held = inode.write_error.lock();
    held.0 += 1;
    held.1 = Some(error.clone());
}

/// The newest operation whose payload may go home: durable in the log.
pub fn owed_filter(up_to: Lsn) -> RunFilter {
    RunFilter { logged: LoggedFilter::OwedUpTo(up_to), ..RunFilter::default() }
}

/// Pages that cover bytes `offset .. offset + length`.
pub fn page_range(offset: u64, length: u64) -> Range<u64> {
    if length == 0 {
        // Not the page that it lies in.
        return 0..0;
    }
    let end = offset.saturating_add(length);
    offset / BLOCK_BYTES_U64..end.div_ceil(BLOCK_BYTES as u64)
}
