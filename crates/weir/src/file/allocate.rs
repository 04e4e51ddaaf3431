//! The modes of `fallocate(2)`.

use super::extents::{self, Piece, Unmapped};
use super::writeback::page_range;
use crate::alloc::{AllocKind, ReserveClass};
use crate::background::LogShortage;
use crate::cache::map::RunFilter;
use crate::device::IoClass;
use crate::engine::{Engine, Room};
use crate::error::{Error, Result};
use crate::format::item::Extent;
use crate::format::record::{KEY_BYTES, RECORD_HEADER_BYTES};
use crate::format::{BLOCK_BYTES_U64, Key, MAX_FILE_BYTES};
use crate::inode::Inode;
use crate::mutation::{self, Mutation};
use crate::namespace::{OP_RECORD_BYTES, OP_SPACE_BLOCKS};
use crate::sync::Arc;
use crate::sync::atomic::Ordering;
use crate::txn::{Op, Overlay, View};
use crate::types::AllocateMode;
use std::ops::Range;

/// Blocks that one operation of an allocation adds.
const STEP_BLOCKS: u64 = 16_384;
/// File blocks of the largest file.
const MAX_FILE_BLOCKS: u64 = MAX_FILE_BYTES.div_ceil(BLOCK_BYTES_U64);
/// Holes that are looked for at a time: more than one operation fills.
const MOST_HOLES: usize = 64;
/// Extents that one part of a shift moves.
const SHIFT_EXTENTS: usize = 16;

/// What moving an extent takes of the log besides its item, at least: a key that goes, and one that comes.
const MOVE_RECORD_BYTES: usize = 2 * (RECORD_HEADER_BYTES + KEY_BYTES);
const TOO_MANY_EXTENTS: Error =
    Error::NotSupported("shifting so many extents at once with a log of this size");

/// Whether an allocation is a change of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Times {
    Move,
    Stay,
}

impl Engine {
    /// See [`AllocateMode`].
    pub fn allocate(
        &self,
        inode: &Arc<Inode>,
        mode: AllocateMode,
        offset: u64,
        length: u64,
    ) -> Result<()> {
        let end = offset.checked_add(length).ok_or(Error::FileTooLarge)?;
        if length == 0 {
            return Err(Error::Invalid("the length must be greater than 0"));
        }
        if end > MAX_FILE_BYTES {
            return Err(Error::FileTooLarge);
        }
        self.check_writable()?;
        let _ops = inode.ops.lock();
        self.end_cut(inode)?;
        match mode {
            AllocateMode::Extend => {
                self.allocate_blocks(inode, offset..end, Times::Move)?;
                if end > inode.size() { self.grow(inode, end) } else { Ok(()) }
            }
            AllocateMode::KeepSize => self.allocate_blocks(inode, offset..end, Times::Move),
            AllocateMode::PunchHole => self.punch(inode, offset..end),
            AllocateMode::ZeroRange => {
                self.zero_range(inode, offset..end)?;
                if end > inode.size() { self.grow(inode, end) } else { Ok(()) }
            }
            AllocateMode::ZeroRangeKeepSize => self.zero_range(inode, offset..end),
            AllocateMode::CollapseRange => self.shift(inode, offset, length, Shift::Down),
            AllocateMode::InsertRange => self.shift(inode, offset, length, Shift::Up),
        }
    }

    /// Takes the range out and gives it unwritten blocks. Room for all of them is had first: a volume without it refuses before anything
    /// changes. (The blocks that hold the range now cannot be told to be unwritten where they are: what is written there next would
    /// be found, after a crash before that is durable, in place of the old data.) The caller holds `ops`.
    fn zero_range(&self, inode: &Arc<Inode>, bytes: Range<u64>) -> Result<()> {
        let pages = page_range(bytes.start, bytes.end - bytes.start);
        let blocks = pages.end - pages.start;
        self.with_room(blocks, |left| {
            self.punch(inode, bytes)?;
            self.fill_all_holes(inode, pages, left, Times::Move)
        })
    }

    /// Gives every hole of the range unwritten blocks; on a volume without room for all of them, none. The caller holds `ops`.
    fn allocate_blocks(&self, inode: &Arc<Inode>, bytes: Range<u64>, times: Times) -> Result<()> {
        let pages = page_range(bytes.start, bytes.end - bytes.start);
        let holes = self.holes(inode, pages.clone(), usize::MAX)?;
        let blocks = holes.iter().map(|hole| hole.end - hole.start).sum();
        self.with_room(blocks, |left| self.fill_all_holes(inode, pages, left, times))
    }

    /// Has `work` done with `blocks` reserved. It counts down what it has not taken of them.
    fn with_room(&self, blocks: u64, work: impl FnOnce(&mut u64) -> Result<()>) -> Result<()> {
        let mut left = blocks;
        self.reserve(left)?;
        let done = work(&mut left);
        self.alloc.release(left);
        done
    }

    /// The holes of `pages`, for which `left` blocks are reserved, a step at a time.
    fn fill_all_holes(
        &self,
        inode: &Arc<Inode>,
        pages: Range<u64>,
        left: &mut u64,
        times: Times,
    ) -> Result<()> {
        let short = u64::from(mutation::active(Mutation::AllocateShort));
        let pages = pages.start..pages.end - short;
        let mut from = pages.start;
        while from < pages.end {
            let to = from.saturating_add(STEP_BLOCKS).min(pages.end);
            let Some(first) = self.holes(inode, from..to, 1)?.into_iter().next() else {
                from = to;
                continue;
            };
            let admission = self.enter(OP_RECORD_BYTES, 0)?;
            let (reached, added) = self.fill_holes(inode, first.start..to, admission, times)?;
            // They are in use now.
            let taken = added.min(*left);
            *left -= taken;
            self.alloc.release(taken);
            from = reached;
        }
        Ok(())
    }

    /// The first `most` holes of `pages`, or a few more.
    fn holes(&self, inode: &Inode, pages: Range<u64>, most: usize) -> Result<Vec<Range<u64>>> {
        let mut holes = Vec::new();
        let mut at = pages.start;
        let mut walk = extents::Walk::new(&self.store, inode, (pages.start, pages.end));
        while let Some(pieces) = walk.pieces()? {
            for piece in pieces {
                if at < piece.file_block {
                    holes.push(at..piece.file_block);
                }
                at = piece.end();
            }
            if holes.len() >= most {
                return Ok(holes);
            }
        }
        if at < pages.end {
            holes.push(at..pages.end);
        }
        Ok(holes)
    }

    /// One operation that fills holes of the range, as many as fit. Answers where to go on, and how many blocks that took.
    fn fill_holes(
        &self,
        inode: &Arc<Inode>,
        pages: Range<u64>,
        admission: crate::log::Admission,
        times: Times,
    ) -> Result<(u64, u64)> {
        let _map = inode.map.lock();
        let mut op = Op::new();
        let mut added = 0;
        let holes = self.holes(inode, pages.clone(), MOST_HOLES)?;
        let mut reached = match holes.last() {
            Some(last) if holes.len() >= MOST_HOLES => last.end,
            _ => pages.end,
        };
        'holes: for hole in holes {
            let mut at = hole.start;
            while at < hole.end {
                if op.record_bytes() > OP_RECORD_BYTES / 2 {
                    reached = at;
                    break 'holes;
                }
                let hint = extents::placement_hint(&self.store, inode.number, at);
                let allocate = |hint| self.alloc.allocate(hole.end - at, 1, hint, AllocKind::Data);
                let run = match hint.and_then(allocate) {
                    Ok(run) => run,
                    Err(error) if added == 0 => return Err(error),
                    Err(_) => {
                        reached = at;
                        break 'holes;
                    }
                };
                op.allocated(run);
                let extent = Extent::unwritten(run.start, run.blocks);
                extents::insert(&mut op, inode.number, at, &extent, None);
                at += run.blocks;
                added += run.blocks;
            }
        }
        if added == 0 {
            return Ok((reached, 0));
        }
        inode.unwritten.store(true, Ordering::Relaxed);
        let now = self.now();
        let mut meta = inode.meta.lock();
        let before = meta.item;
        meta.item.blocks += added;
        if times == Times::Move {
            meta.touch_attributes(now);
        }
        op.put(Key::inode(inode.number), &meta.item.encode());
        let committed = self.store.commit(op, admission);
        let lsn = committed.inspect_err(|_| meta.item = before)?;
        meta.logged(lsn, true);
        Ok((reached, added))
    }

    /// Collapse or insert. Everything from `offset` on is brought home and out of the cache first, so that only
    /// extents have to move. The caller holds `ops`.
    fn shift(&self, inode: &Arc<Inode>, offset: u64, length: u64, shift: Shift) -> Result<()> {
        if !offset.is_multiple_of(BLOCK_BYTES_U64) || !length.is_multiple_of(BLOCK_BYTES_U64) {
            return Err(Error::Invalid("offset and length must be multiples of 4096"));
        }
        let size = inode.size();
        let end = offset.checked_add(length).ok_or(Error::FileTooLarge)?;
        let new_size = match shift {
            Shift::Down if end >= size => {
                return Err(Error::Invalid("the range must end before the end of the file"));
            }
            Shift::Up if offset >= size => {
                return Err(Error::Invalid("the range must start before the end of the file"));
            }
            Shift::Down => size - length,
            Shift::Up => size.checked_add(length).ok_or(Error::FileTooLarge)?,
        };
        if new_size > MAX_FILE_BYTES {
            return Err(Error::FileTooLarge);
        }
        let first = offset / BLOCK_BYTES_U64;
        self.check_shift_space(shift)?;
        let mut shortage = LogShortage::default();
        loop {
            if first == 0 {
                self.leave_inode(inode)?;
            }
            self.settle_all(inode, first)?;
            let map = inode.map.lock();
            let quiet = {
                let pages = inode.pages.read();
                pages.dirty_runs(first..u64::MAX, 1, RunFilter::default()).next().is_none()
                    && pages.first_writeback(first..u64::MAX).is_none()
            };
            // Writeback that had taken page 0 while the file was small has put it into the inode since.
            let is_inline = first == 0 && inode.meta.lock().item.is_inline();
            if quiet && (!is_inline || mutation::active(Mutation::LeavePageInline)) {
                let distance = length / BLOCK_BYTES_U64;
                match self.shift_extents(inode, first, distance, (shift, new_size)) {
                    Err(Error::WouldBlock) => {}
                    other => return other,
                }
                // The log is full, and a checkpoint may need this inode's mapping.
                drop(map);
                self.relieve_log(&mut shortage)?;
            }
        }
    }

    /// A shift leaves two extents of one that it goes through. What takes away is not refused where a hole is not.
    fn check_shift_space(&self, shift: Shift) -> Result<()> {
        match shift {
            Shift::Up => self.check_space(OP_SPACE_BLOCKS, ReserveClass::User),
            Shift::Down => {
                self.reserve_spare(OP_SPACE_BLOCKS)?;
                self.alloc.release(OP_SPACE_BLOCKS);
                Ok(())
            }
        }
    }

    /// Page 0 of a small file lives in the inode, or would go there; that of a file that has grown since is still there.
    /// Gives it a block, and makes the page dirty so that it goes to that block. The caller holds `ops`.
    fn leave_inode(&self, inode: &Arc<Inode>) -> Result<()> {
        let is_small = inode.size() <= crate::format::MAX_INLINE_BYTES as u64;
        if !is_small && !inode.meta.lock().item.is_inline() {
            return Ok(());
        }
        // A crash may leave this without the shift, and then nothing has happened that a user sees.
        self.allocate_blocks(inode, 0..BLOCK_BYTES_U64, Times::Stay)?;
        while inode.meta.lock().item.is_inline() {
            self.reserve(1)?;
            self.dirty_pages.fetch_add(1, Ordering::AcqRel);
            let newly_dirty = inode.pages.write().mark_dirty(0);
            if !newly_dirty {
                self.pages_paid(1);
            }
            if inode.pages.read().peek(0).is_some() {
                self.dirty.add(inode);
                self.settle_all(inode, 0)?;
            } else {
                self.fill(inode, 0..1, IoClass::SyncRead)?;
            }
        }
        Ok(())
    }

    /// Brings all dirty pages from `first` on home.
    fn settle_all(&self, inode: &Arc<Inode>, first: u64) -> Result<()> {
        let range = first..u64::MAX;
        self.write_back(inode, range.clone(), RunFilter::default(), IoClass::SyncWrite)?;
        self.wait_writeback(inode, &range);
        Ok(())
    }

    /// Moves the extents from file block `first` on, all or nothing; down, in place of what is there. The caller holds `map`.
    fn shift_extents(
        &self,
        inode: &Arc<Inode>,
        first: u64,
        distance: u64,
        (shift, new_size): (Shift, u64),
    ) -> Result<()> {
        let number = inode.number;
        let limit = self.options.cut_extents.map_or(SHIFT_EXTENTS, |extents| extents.max(1));
        let most_bytes = (self.log.fill().ring_blocks * BLOCK_BYTES_U64 / 2) as usize;
        let mut parts = Vec::new();
        let mut overlay = Overlay::new(&self.store);
        let (mut removed_blocks, mut from) = (0, first);
        if matches!(shift, Shift::Down) {
            from += distance;
            let most = (limit, most_bytes);
            removed_blocks = take_out(number, first..from, most, (&mut overlay, &mut parts))?;
        }
        let mut op = Op::new();
        // An extent that lies across the first block is split; its rest moves.
        let pieces = pieces_to_move(&overlay, number, from, most_bytes)?;
        if let Some(piece) = pieces.first() {
            let (key, whole) = piece.whole()?;
            if key.offset < first {
                op.put(key, &whole.part(0, first - key.offset).encode());
            }
        }
        // Deletions first: a moved extent may take the place of one that has not moved yet.
        if matches!(shift, Shift::Up)
            && pieces.last().is_some_and(|piece| piece.end() + distance > MAX_FILE_BLOCKS)
        {
            return Err(Error::FileTooLarge);
        }
        let mut moved = Vec::with_capacity(pieces.len());
        for piece in &pieces {
            let (key, whole) = piece.whole()?;
            if key.offset >= first {
                op.delete(key);
            }
            let to = match shift {
                Shift::Down => piece.file_block - distance,
                Shift::Up => piece.file_block + distance,
            };
            moved.push((to, whole.part(piece.file_block - key.offset, piece.blocks)));
            split_op(&mut parts, &mut op, limit);
        }
        for (to, extent) in moved {
            extents::insert(&mut op, number, to, &extent, None);
            split_op(&mut parts, &mut op, limit);
        }
        let cost = parts.iter().map(Op::record_bytes).sum::<usize>() + op.record_bytes();
        let record_bytes = cost + (parts.len() + 1) * OP_RECORD_BYTES;
        if record_bytes > most_bytes {
            return Err(TOO_MANY_EXTENTS);
        }
        // What is kept for checkpoints, and for barriers, is for what finds no room among other operations.
        let admission = match self.admit(record_bytes, 0, Room::NoWait) {
            Err(Error::WouldBlock) => self.admit(record_bytes, 0, Room::Reserve)?,
            admitted => admitted?,
        };
        let now = self.now();
        // The cache forgets the pages in the moment in which the mapping changes: that voids the reads that
        // have looked at the old one.
        let mut pages = inode.pages.write();
        let mut meta = inode.meta.lock();
        debug_assert!(
            first > 0 || !meta.item.is_inline() || mutation::active(Mutation::LeavePageInline)
        );
        let before = meta.item;
        meta.item.size = new_size;
        meta.item.blocks = meta.item.blocks.saturating_sub(removed_blocks);
        meta.touch_data(now);
        op.put(Key::inode(number), &meta.item.encode());
        parts.push(op);
        let committed = self.store.commit_parts(parts, admission);
        let lsn = committed.inspect_err(|_| meta.item = before)?;
        meta.logged(lsn, true);
        drop(meta);
        inode.set_logged_size(new_size);
        let removed = pages.truncate(first);
        drop(pages);
        self.forget_removed(&removed);
        Ok(())
    }
}

/// What is mapped from file block `from` on. Each extent is logged again where it moves to: nothing is gathered that the log has no room for.
fn pieces_to_move(
    store: &dyn View,
    number: u64,
    from: u64,
    most_bytes: usize,
) -> Result<Vec<Piece>> {
    let mut walk = extents::Walk::new(store, number, (from, u64::MAX));
    let (mut pieces, mut bytes) = (Vec::new(), 0);
    while let Some(more) = walk.pieces()? {
        bytes += more.iter().map(|piece| piece.item_bytes() + MOVE_RECORD_BYTES).sum::<usize>();
        if bytes > most_bytes {
            return Err(TOO_MANY_EXTENTS);
        }
        pieces.extend(more);
    }
    Ok(pieces)
}

/// Unmaps `pages` of a file, in operations of their own of `limit` extents. Answers how many blocks become free.
fn take_out(
    number: u64,
    pages: Range<u64>,
    (limit, most_bytes): (usize, usize),
    (overlay, parts): (&mut Overlay<'_>, &mut Vec<Op>),
) -> Result<u64> {
    let (mut blocks, mut from, mut bytes) = (0, Some(pages.start), 0);
    let mut mapping = extents::Mapping::from(number);
    while let Some(start) = from {
        let mut op = Op::new();
        let range = (start, pages.end);
        let (count, next) = extents::cut(overlay, &mut op, mapping, range, Unmapped::Freed, limit)?;
        mapping = mapping.from_its_start();
        overlay.absorb(&op);
        bytes += op.record_bytes();
        if bytes > most_bytes {
            return Err(TOO_MANY_EXTENTS);
        }
        if !op.is_empty() {
            parts.push(op);
        }
        blocks += count;
        from = next;
    }
    Ok(blocks)
}

/// Ends the part under construction when it is large enough.
fn split_op(parts: &mut Vec<Op>, op: &mut Op, limit: usize) {
    if op.record_bytes() > limit * 1100 {
        parts.push(std::mem::take(op));
    }
}

#[derive(Debug, Clone, Copy)]
enum Shift {
    Down,
    Up,
}
