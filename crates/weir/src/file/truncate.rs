//! Size changes, and taking ranges out.
//!
//! A cut in the middle of a block zeroes the rest of the page and logs the page in the same operation
//! as the size: the zero-tail invariant holds after any crash. A file with many extents is cut in
//! several operations; until the last one an orphan item with a link count above 0 tells recovery
//! to finish.
//!
//! **Invariant:** an inode has an orphan item as long as it has no name, or a cut of it is not at its end (`Meta::orphan`,
//! `Meta::cutting`). **Invariant:** nothing is mapped behind the end of a file when it gets longer, but for what was allocated there.
//!
//! Writeback of the pages concerned is waited for: a block must not be freed while a write to it is under
//! way.

use super::extents::{self, Mapping, Unmapped};
use super::writeback::page_range;
use crate::alloc::ReserveClass;
use crate::batch::commit::{Packed, pack};
use crate::cache::map::{OldContents, PageMap, Removed, WriteRefused};
use crate::device::IoClass;
use crate::engine::{Engine, Room};
use crate::error::{Error, Result};
use crate::format::{BLOCK_BYTES, BLOCK_BYTES_U64, Key, MAX_FILE_BYTES};
use crate::inode::{Inode, Meta};
use crate::log::{Admission, OpRecords};
use crate::mutation::{self, Mutation};
use crate::namespace::{OP_RECORD_BYTES, OP_SPACE_BLOCKS};
use crate::reclaim::Shortage;
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, MutexGuard};
use crate::txn::{Op, Overlay};
use crate::types::Timestamp;
use std::ops::Range;

/// Extents that one operation takes away, unless [`crate::VolumeOptions::cut_extents`] says otherwise.
const CUT_EXTENTS: usize = 64;

/// Blocks of the log that the chain of operations of a hole takes at most: others wait for the store while it has all of them.
const HOLE_BLOCKS: u64 = 64;

/// Parts of pages that become zero.
type Zero = Vec<(u64, Range<usize>)>;

/// What was at a place of a page before it became zero.
type Zeroed = (u64, usize, Vec<u8>);

impl Engine {
    /// Sets the size of a regular file. Bytes that are gained read as zeros.
    pub fn truncate(&self, inode: &Arc<Inode>, size: u64) -> Result<()> {
        if size > MAX_FILE_BYTES {
            return Err(Error::FileTooLarge);
        }
        let _ops = inode.ops.lock();
        if inode.meta.lock().purged {
            // By number, without a hold: a size set now would bring the item back.
            return Err(Error::NotFound);
        }
        self.end_cut(inode)?;
        // The same size again gives back what was allocated behind the end.
        if size <= inode.size() { self.shrink(inode, size) } else { self.grow(inode, size) }
    }

    /// The file gets longer (or only new times); one operation. The caller holds `ops`.
    pub fn grow(&self, inode: &Arc<Inode>, size: u64) -> Result<()> {
        let admission = self.enter(OP_RECORD_BYTES, 0)?;
        let now = self.now();
        let mut meta = inode.meta.lock();
        let before = (inode.size(), meta.item);
        // Under `meta` alone: only holders of `ops` make the size larger.
        inode.size.store(size, Ordering::Release);
        meta.item.size = size;
        meta.touch_data(now);
        let mut op = Op::new();
        op.put(Key::inode(inode.number), &meta.item.encode());
        let lsn = self.store.commit(op, admission).inspect_err(|_| {
            inode.size.store(before.0, Ordering::Release);
            meta.item = before.1;
        })?;
        meta.logged(lsn, true);
        Ok(())
    }

    /// The file gets shorter. The caller holds `ops`.
    pub fn shrink(&self, inode: &Arc<Inode>, size: u64) -> Result<()> {
        let behind = size.div_ceil(BLOCK_BYTES_U64)..u64::MAX;
        self.shrink_by(inode, size, (behind, Unmapped::Freed), None)
    }

    /// Takes back what an append under way has written from `size` on, with the times that were there before, if they are still to be had.
    /// Of the blocks that were allocated behind the end, those go that hold something already. (If a crash, or an error, ends it between two
    /// of its operations, they go with the rest.) The caller holds `ops`.
    ///
    /// A host that is full may refuse all that would make room: it is waited for only if the log has some of it.
    pub(super) fn take_back(
        &self,
        inode: &Arc<Inode>,
        size: u64,
        times: TimesBefore,
    ) -> Result<()> {
        if self.take_back_unlogged(inode, size, times)? {
            return Ok(());
        }
        let written = page_range(size, inode.size().saturating_sub(size));
        let behind = size.div_ceil(BLOCK_BYTES_U64)..written.end;
        self.shrink_by(inode, size, (behind, Unmapped::WrittenFreed), Some(times))
    }

    /// The same in memory, if the log has nothing of it: then nothing of it has gone home, either. False if it has.
    fn take_back_unlogged(
        &self,
        inode: &Arc<Inode>,
        size: u64,
        times: TimesBefore,
    ) -> Result<bool> {
        let is_logged = |meta: &Meta| meta.item.size > size;
        if is_logged(&inode.meta.lock()) {
            return Ok(false);
        }
        let zero = tail_from(size);
        let (_map, zero) = self.hold_pages(inode, &zero, size / BLOCK_BYTES_U64..u64::MAX, 0)?;
        let mut pages = inode.pages.write();
        let mut meta = inode.meta.lock();
        if is_logged(&meta) {
            return Ok(false);
        }
        self.zero_cached(&mut pages, &zero)?;
        times.touch(&mut meta, self.now());
        drop(meta);
        inode.take_back_size(size);
        let removed = pages.remove_range(size.div_ceil(BLOCK_BYTES_U64)..u64::MAX);
        drop(pages);
        self.forget_removed(&removed);
        Ok(true)
    }

    /// Makes the file shorter, and unmaps what is said. The caller holds `ops`.
    fn shrink_by(
        &self,
        inode: &Arc<Inode>,
        size: u64,
        (behind, unmapped): (Range<u64>, Unmapped),
        times: Option<TimesBefore>,
    ) -> Result<()> {
        let zero = tail_from(size);
        let settled_from = size / BLOCK_BYTES_U64;
        // What only takes away needs no room.
        let added = if zero.is_empty() { 0 } else { OP_SPACE_BLOCKS };
        let needs = (added, OP_RECORD_BYTES);
        let admission = match times {
            None => self.enter_cut(&zero, needs, Self::enter)?,
            Some(_) => self.enter_cut(&zero, needs, Self::enter_to_take_back)?,
        };
        let charged = zero.len() as u64;
        let (map, zero) = self.hold_pages(inode, &zero, settled_from..u64::MAX, charged)?;
        let step = CutStep {
            range: behind,
            unmapped,
            zero,
            size: Some(size),
            times,
            settle: true,
            began: false,
        };
        self.cut_all(inode, step, (map, admission))
    }

    /// Takes bytes `range` out: they read as zeros afterwards and whole blocks become free. The size stays. The
    /// caller holds `ops`.
    ///
    /// All of it happens at once, to readers and in a crash, in a chain of operations if there are many extents; but for a hole of
    /// more than such a chain holds ([`HOLE_BLOCKS`], a quarter of the log), which grows from one to the next.
    pub fn punch(&self, inode: &Arc<Inode>, range: Range<u64>) -> Result<()> {
        // Behind the end of the file there is nothing to keep of a block.
        let reaches_end = range.end >= inode.size();
        let end = if reaches_end { range.end.next_multiple_of(BLOCK_BYTES_U64) } else { range.end };
        if range.start >= end {
            return Ok(());
        }
        let zero = partial_pages(range.start, end);
        let touched = range.start / BLOCK_BYTES_U64..end.div_ceil(BLOCK_BYTES_U64);
        let mut step = CutStep {
            range: range.start.div_ceil(BLOCK_BYTES_U64)..end / BLOCK_BYTES_U64,
            unmapped: Unmapped::Freed,
            zero: Vec::new(),
            size: None,
            times: None,
            settle: true,
            began: false,
        };
        let mut record_bytes = OP_RECORD_BYTES;
        loop {
            let zero = if step.began { &[][..] } else { &zero[..] };
            // A hole within an extent makes two of it.
            let admission = self.enter_cut(zero, (OP_SPACE_BLOCKS, record_bytes), Self::enter)?;
            let charged = zero.len() as u64;
            let (map, zero) = self.hold_pages(inode, zero, touched.clone(), charged)?;
            step.zero = zero;
            match self.cut_step(inode, &mut step, admission)? {
                Stepped::Done => return Ok(()),
                Stepped::GoesOn => {}
                Stepped::NeedsRoom(blocks) => record_bytes = (blocks * BLOCK_BYTES_U64) as usize,
            }
            drop(map);
        }
    }

    /// All operations of a cut with a new size. The `map` lock is not held while log space is waited for: a checkpoint may need it.
    /// Nothing can become dirty in the range meanwhile, because the caller holds `ops`.
    ///
    /// With the first operation the file has its new size. If another one fails, what is left behind the end goes later: see
    /// [`Engine::end_cut`].
    fn cut_all(
        &self,
        inode: &Arc<Inode>,
        mut step: CutStep,
        (map, admission): (MutexGuard<'_, ()>, Admission),
    ) -> Result<()> {
        let stepped = self.cut_step(inode, &mut step, admission)?;
        drop(map);
        if stepped != Stepped::Done && self.cut_on(inode, &mut step).is_err() {
            self.owe_cut(inode);
        }
        Ok(())
    }

    /// The operations of a cut behind the first.
    fn cut_on(&self, inode: &Arc<Inode>, step: &mut CutStep) -> Result<()> {
        loop {
            let admission = self.admit(OP_RECORD_BYTES, 0, Room::Normal)?;
            let _map = inode.map.lock();
            if self.cut_step(inode, step, admission)? == Stepped::Done {
                return Ok(());
            }
        }
    }

    /// One operation of a cut, or the chain of a hole. The caller holds `map`.
    ///
    /// The pages leave the cache, and parts of others become zero, in the moment in which the mapping and the size change, under the `pages`
    /// lock: that voids every read that has looked at the old mapping, which would bring cut data back; and nobody sees
    /// zeros within the old size. What may fail comes before.
    fn cut_step(
        &self,
        inode: &Arc<Inode>,
        step: &mut CutStep,
        admission: Admission,
    ) -> Result<Stepped> {
        let number = inode.number;
        let now = self.now();
        // The first operation has set the size and the times: the rest may come much later, also after a crash.
        let is_rest = step.size.is_some() && !step.settle;
        let range = (step.range.start, step.range.end);
        let (mut ops, cut, next) = match self.unmap(inode, step, admission.blocks())? {
            Unmap::Ready(ops, cut, next) => (ops, cut, next),
            Unmap::NeedsRoom(blocks) => return Ok(Stepped::NeedsRoom(blocks)),
        };
        let mut op = ops.pop().unwrap_or_default();
        step.began = true;
        // A new size takes everything behind it away at once, a hole what its chain reaches.
        let reached = if step.size.is_some() { range.1 } else { next.unwrap_or(range.1) };
        if step.settle && range.0 < reached {
            op.settled(number, range.0, reached - range.0);
        }
        step.settle &= step.size.is_none();
        let zero = std::mem::take(&mut step.zero);
        let logged = self.pages_to_log(inode, &zero, step.size.is_some())?;
        let mut pages = inode.pages.write();
        let zeroed = self.zero_cached(&mut pages, &zero)?;
        for &(index, home) in &logged {
            if let Some(page) = pages.peek(index) {
                op.payload(number, index, home, page.clone());
            }
        }
        let mut meta = inode.meta.lock();
        let before = (meta.item, meta.cutting);
        if step.size.is_some() {
            mark_cut(&mut meta, &mut op, number, next.is_some());
        }
        if meta.item.is_inline() && range.0 == 0 && range.1 > 0 {
            op.delete(Key::inline(number));
            meta.item.flags &= !crate::format::item::INODE_INLINE;
        }
        if let Some(size) = step.size {
            meta.item.size = size;
        } else if let Some((last, _)) = logged.last() {
            // The page is logged as a whole: bytes of it behind the logged size would be left there.
            let covered = inode.size().min((last + 1) * BLOCK_BYTES_U64);
            meta.item.size = meta.item.size.max(covered);
        }
        meta.item.blocks = meta.item.blocks.saturating_sub(cut);
        if !is_rest || mutation::active(Mutation::MoveTimesOfRest) {
            match step.times {
                Some(times) => times.touch(&mut meta, now),
                None => meta.touch_data(now),
            }
        }
        op.put(Key::inode(number), &meta.item.encode());
        let committed = if ops.is_empty() {
            self.store.commit(op, admission)
        } else {
            // The last part has the pages.
            ops.push(op);
            self.store.commit_parts(pack(ops, self.max_part_blocks()).0, admission)
        };
        let lsn = match committed {
            Ok(lsn) => lsn,
            Err(error) => {
                // The volume is shut down. Whoever goes on reading finds the file as it was.
                (meta.item, meta.cutting) = before;
                self.undo_zeroing(&mut pages, zeroed);
                return Err(error);
            }
        };
        if meta.item.blocks == 0 {
            inode.unwritten.store(false, Ordering::Relaxed);
        }
        meta.logged(lsn, true);
        drop(meta);
        if let Some(size) = step.size {
            inode.set_logged_size(size);
        }
        for &(index, _) in &logged {
            if let Some(older) = pages.set_logged(index, lsn) {
                self.store.obligations.release(older);
            }
        }
        let removed = pages.remove_range(range.0..reached.max(range.0));
        drop(pages);
        self.forget_removed(&removed);
        step.range.start = next.unwrap_or(step.range.end);
        Ok(if next.is_none() { Stepped::Done } else { Stepped::GoesOn })
    }

    /// Extents that one operation takes away.
    pub fn cut_extents(&self) -> usize {
        self.options.cut_extents.map_or(CUT_EXTENTS, |extents| extents.max(1))
    }

    /// What unmaps the blocks of a step, for which the log has `admitted` blocks: one operation, and where to go on; of a hole all
    /// of them, or as many as a chain holds. The last one has room for what a cut adds.
    fn unmap(&self, inode: &Inode, step: &CutStep, admitted: u64) -> Result<Unmap> {
        let is_hole = step.size.is_none();
        let last_blocks = OpRecords::blocks_for(OP_RECORD_BYTES, step.zero.len() as u64);
        let most_blocks = (self.log.fill().ring_blocks / 4).min(HOLE_BLOCKS);
        let mut mapping = Mapping::from(inode);
        if step.began {
            mapping = mapping.from_its_start();
        }
        let mut overlay = Overlay::new(&self.store);
        let (mut ops, mut packed) = (Vec::new(), Packed::default());
        let (mut cut, mut needed) = (0, last_blocks);
        let mut from = step.range.start;
        loop {
            let mut op = Op::new();
            let range = (from, step.range.end);
            let limit = self.cut_extents();
            let (blocks, next) =
                extents::cut(&overlay, &mut op, mapping, range, step.unmapped, limit)?;
            cut += blocks;
            match next {
                Some(next) if is_hole && needed < most_blocks => {
                    overlay.absorb(&op);
                    mapping = mapping.from_its_start();
                    from = next;
                    // All that was looked at may have been cut before.
                    if !op.is_empty() {
                        packed.add(&op, self.max_part_blocks());
                        needed = packed.blocks() + last_blocks;
                        ops.push(op);
                    }
                }
                _ if is_hole && needed > admitted => return Ok(Unmap::NeedsRoom(needed)),
                next => {
                    ops.push(op);
                    return Ok(Unmap::Ready(ops, cut, next));
                }
            }
        }
    }

    /// Log space for an operation that cuts a file, and space: for the pages that it may make dirty, charged already, and `added` blocks
    /// for what it adds to the tree. The caller holds nothing but `ops`.
    ///
    /// Cutting works on a full volume: see [`Engine::reserve_spare`].
    fn enter_cut(
        &self,
        zero: &[(u64, Range<usize>)],
        (added, record_bytes): (u64, usize),
        enter: impl Fn(&Self, usize, usize) -> Result<Admission>,
    ) -> Result<Admission> {
        let pages = zero.len() as u64;
        self.reserve_spare(pages + added)?;
        self.alloc.release(added);
        self.dirty_pages.fetch_add(pages, Ordering::AcqRel);
        enter(self, record_bytes, zero.len()).inspect_err(|_| self.pages_paid(pages))
    }

    /// As [`Engine::enter`], for what takes back what the log has let in already: nothing that a full host may refuse comes before it. So it
    /// is not throttled, and draws on what is kept for checkpoints. That is little, and rare: no more comes in while there is no other room.
    fn enter_to_take_back(&self, record_bytes: usize, pages: usize) -> Result<Admission> {
        self.check_writable()?;
        for room in [Room::NoWait, Room::Reserve] {
            match self.admit(record_bytes, pages, room) {
                Err(Error::WouldBlock) => {}
                ended => return ended,
            }
        }
        self.admit(record_bytes, pages, Room::Normal)
    }

    /// Has the pages of `zero` in the cache, dirty and for the cache alone, and takes the `map` lock at a moment when no page of `quiet` is
    /// under writeback: as long as it is held, they stay like that. Answers the lock, and those parts that are no zeros in a hole.
    /// The caller holds `ops` and what [`Engine::enter_cut`] gave, `charged_pages`.
    fn hold_pages<'a>(
        &self,
        inode: &'a Arc<Inode>,
        zero: &[(u64, Range<usize>)],
        quiet: Range<u64>,
        charged_pages: u64,
    ) -> Result<(MutexGuard<'a, ()>, Zero)> {
        let mut charged = Charged { pages: charged_pages, any_dirty: false };
        let result = self.try_hold_pages(inode, zero, quiet, &mut charged);
        self.pages_paid(charged.pages);
        if charged.any_dirty {
            self.dirty.add(inode);
        }
        result
    }

    fn try_hold_pages<'a>(
        &self,
        inode: &'a Arc<Inode>,
        zero: &[(u64, Range<usize>)],
        quiet: Range<u64>,
        charged: &mut Charged,
    ) -> Result<(MutexGuard<'a, ()>, Zero)> {
        let mut shortage = Shortage::default();
        loop {
            let moment = inode.io_moment();
            let map = inode.map.lock();
            let busy = inode.pages.read().first_writeback(quiet.clone()).is_some();
            if busy {
                drop(map);
                self.wait_pages(inode, moment);
                continue;
            }
            // The mapping stays as it is from here on.
            let mut has_content = Vec::with_capacity(zero.len());
            for (index, _) in zero {
                // What is dirty stays so, and the mapping, which may be unreadable, has nothing to say of it.
                let is_dirty = inode.pages.read().state(*index).dirty;
                has_content.push(is_dirty || self.has_content(inode, *index)?);
            }
            let held = {
                let mut pages = inode.pages.write();
                self.hold_cached(&mut pages, zero, &has_content, charged)
            };
            match held {
                Ok(held) => return Ok((map, held)),
                Err(ZeroStop::Missing(index)) => {
                    drop(map);
                    self.fill(inode, index..index + 1, IoClass::SyncRead)?;
                }
                Err(ZeroStop::NoMemory) => {
                    drop(map);
                    self.make_room(&mut shortage)?;
                }
                Err(ZeroStop::NotCharged) => {
                    drop(map);
                    // Log space is held: nothing is waited for.
                    self.reserve_at_once(1, ReserveClass::Cut)?;
                    self.dirty_pages.fetch_add(1, Ordering::AcqRel);
                    charged.pages += 1;
                }
            }
        }
    }

    fn hold_cached(
        &self,
        pages: &mut PageMap,
        zero: &[(u64, Range<usize>)],
        has_content: &[bool],
        charged: &mut Charged,
    ) -> std::result::Result<Zero, ZeroStop> {
        let mut held = Vec::new();
        for ((index, part), has_content) in zero.iter().zip(has_content) {
            let state = pages.state(*index);
            if !has_content && !state.dirty && !state.writeback {
                // A hole, perhaps in the cache: zeros already, and it stays a hole.
                continue;
            }
            if !state.dirty && charged.pages == 0 {
                return Err(ZeroStop::NotCharged);
            }
            let page = self.page_to_zero(pages, *index)?;
            if page.newly_dirty {
                charged.pages -= 1;
                charged.any_dirty = true;
            }
            if mutation::active(Mutation::ZeroBeforeCut) {
                page.bytes[part.clone()].fill(0);
            }
            held.push((*index, part.clone()));
        }
        Ok(held)
    }

    /// Zeroes the parts of pages that [`Engine::hold_pages`] has answered, all or none. The caller has held `map` since.
    fn zero_cached(&self, pages: &mut PageMap, zero: &Zero) -> Result<Vec<Zeroed>> {
        let lost = |_| Error::TooLittleMemory("a page that was to be cut was taken away".into());
        for (index, _) in zero {
            let page = self.page_to_zero(pages, *index).map_err(lost)?;
            debug_assert!(!page.newly_dirty, "page {index} went home under the map lock");
        }
        let mut zeroed = Vec::with_capacity(zero.len());
        for (index, part) in zero {
            let bytes = &mut self.page_to_zero(pages, *index).map_err(lost)?.bytes[part.clone()];
            zeroed.push((*index, part.start, bytes.to_vec()));
            bytes.fill(0);
        }
        Ok(zeroed)
    }

    /// What [`Engine::zero_cached`] has done was for nothing.
    fn undo_zeroing(&self, pages: &mut PageMap, zeroed: Vec<Zeroed>) {
        for (index, start, bytes) in zeroed {
            // It is there, and dirty: nobody has had the lock since.
            if let Ok(page) = self.page_to_zero(pages, index) {
                page.bytes[start..start + bytes.len()].copy_from_slice(&bytes);
            }
        }
    }

    fn page_to_zero<'p>(
        &self,
        pages: &'p mut PageMap,
        index: u64,
    ) -> std::result::Result<crate::cache::map::Writable<'p>, ZeroStop> {
        pages.page_for_write(index, &self.pool, OldContents::Keep).map_err(
            |refused| match refused {
                WriteRefused::NoMemory => ZeroStop::NoMemory,
                WriteRefused::Absent | WriteRefused::Reading => ZeroStop::Missing(index),
            },
        )
    }

    /// Page `index` may hold anything but zeros. The caller holds `ops`.
    pub fn may_have_content(&self, inode: &Inode, index: u64) -> Result<bool> {
        // What is on its way home is mapped when it is no longer.
        let state = inode.pages.read().state(index);
        Ok(state.dirty || state.writeback || self.has_content(inode, index)?)
    }

    /// Page `index` is mapped to data, or in the inode.
    fn has_content(&self, inode: &Inode, index: u64) -> Result<bool> {
        if index == 0 && inode.meta.lock().item.is_inline() {
            return Ok(true);
        }
        let (pieces, _) = extents::pieces(&self.store, inode, index, index + 1)?;
        Ok(pieces.iter().any(|piece| !piece.unwritten))
    }

    /// The pages of `zero` that the operation logs, and where they live. The caller holds `ops` and `map`.
    fn pages_to_log(&self, inode: &Inode, zero: &Zero, is_cut: bool) -> Result<Vec<(u64, u64)>> {
        // What lies behind the size that the log has is not there after a crash: of a hole, such a page stays merely dirty.
        let logged_size = if is_cut { u64::MAX } else { inode.meta.lock().item.size };
        let mut logged = Vec::new();
        for (index, _) in zero.iter().filter(|(index, _)| index * BLOCK_BYTES_U64 < logged_size) {
            if mutation::active(Mutation::SkipZeroTail) {
                break;
            }
            let (pieces, _) = extents::pieces(&self.store, inode, *index, index + 1)?;
            let home =
                pieces.first().filter(|piece| !piece.unwritten).map_or(0, |piece| piece.block);
            logged.push((*index, home));
        }
        Ok(logged)
    }

    /// Takes away what lies beyond the end of a file whose cut was interrupted by a crash.
    pub fn finish_cut(&self, inode: &Arc<Inode>) -> Result<()> {
        let _ops = inode.ops.lock();
        inode.meta.lock().cutting = true;
        self.cut_behind_end(inode)
    }

    /// The same. The caller holds `ops`.
    fn cut_behind_end(&self, inode: &Arc<Inode>) -> Result<()> {
        let size = inode.size();
        let mut step = CutStep {
            range: size.div_ceil(BLOCK_BYTES_U64)..u64::MAX,
            unmapped: Unmapped::Freed,
            zero: Vec::new(),
            size: Some(size),
            times: None,
            settle: false,
            began: false,
        };
        self.cut_on(inode, &mut step)
    }

    /// A cut of `inode` goes on later.
    fn owe_cut(&self, inode: &Arc<Inode>) {
        inode.owes_cut.store(true, Ordering::Release);
        self.owed_cuts.lock().push(inode.clone());
    }

    /// Goes on with a cut of which an operation failed, before the file gets any longer, or what lies behind its end is moved: it would show what
    /// was cut off. The caller holds `ops`.
    pub fn end_cut(&self, inode: &Arc<Inode>) -> Result<()> {
        if !inode.owes_cut.load(Ordering::Acquire) || mutation::active(Mutation::ForgetOwedCut) {
            return Ok(());
        }
        if !inode.meta.lock().purged {
            self.cut_behind_end(inode)?;
        }
        inode.owes_cut.store(false, Ordering::Release);
        Ok(())
    }

    /// Tries again what [`Engine::end_cut`] would have to do.
    pub fn end_owed_cuts(&self) {
        let owed = std::mem::take(&mut *self.owed_cuts.lock());
        for inode in owed {
            let ended = {
                let _ops = inode.ops.lock();
                self.end_cut(&inode)
            };
            if ended.is_err() {
                self.owed_cuts.lock().push(inode);
            }
        }
    }

    /// Drops all cached pages from `first` on, whatever their state; for an inode that is being purged. Waits for their
    /// writeback. The caller holds `ops`.
    pub fn forget_pages(&self, inode: &Arc<Inode>, first: u64) {
        loop {
            let moment = inode.io_moment();
            let map = inode.map.lock();
            let mut pages = inode.pages.write();
            if pages.first_writeback(first..u64::MAX).is_some() {
                drop(pages);
                drop(map);
                self.wait_pages(inode, moment);
                continue;
            }
            let removed = pages.truncate(first);
            drop(pages);
            drop(map);
            self.forget_removed(&removed);
            return;
        }
    }

    /// Pays for pages that were taken out of a map.
    pub fn forget_removed(&self, removed: &Removed) {
        self.pages_paid((removed.dirty + removed.writeback) as u64);
        // Last: who waits until nothing is owed finds everything paid.
        let owed: Vec<_> = removed.logged.iter().map(|(_, lsn)| *lsn).collect();
        self.store.obligations.release_all(&owed);
    }
}

/// Why pages could not be zeroed yet.
enum ZeroStop {
    /// This page's content has to be read.
    Missing(u64),
    /// No page frame was free.
    NoMemory,
    /// A page that was made dirty before has gone home since, and is to be dirty again.
    NotCharged,
}

/// Pages that may become dirty yet: that is promised, and counted.
struct Charged {
    pages: u64,
    /// Some have become dirty.
    any_dirty: bool,
}

/// Notes with an operation that sets a new size whether more has to follow: then an orphan item tells recovery, which goes when nothing is
/// left to do, unless the inode has lost its name.
fn mark_cut(meta: &mut Meta, op: &mut Op, number: u64, goes_on: bool) {
    if meta.cutting != goes_on && !meta.orphan {
        if goes_on {
            if !mutation::active(Mutation::ForgetCutMark) {
                op.put(Key::orphan(number), &[]);
            }
        } else {
            op.delete(Key::orphan(number));
        }
    }
    meta.cutting = goes_on;
}

/// What comes after one step of a cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stepped {
    Done,
    GoesOn,
    /// Nothing was done: it takes so many blocks of the log.
    NeedsRoom(u64),
}

/// The operations of one step.
enum Unmap {
    /// With the number of blocks that they free, and where to go on.
    Ready(Vec<Op>, u64, Option<u64>),
    NeedsRoom(u64),
}

/// Times of a file before a call that is taken back.
#[derive(Clone, Copy)]
pub(super) struct TimesBefore {
    mtime: Timestamp,
    ctime: Timestamp,
    change_counter: u64,
}

impl TimesBefore {
    pub(super) fn of(inode: &Inode) -> Self {
        let item = inode.meta.lock().item;
        Self { mtime: item.mtime, ctime: item.ctime, change_counter: item.change_counter }
    }

    /// The call itself has moved them so often.
    pub(super) fn moved(self, often: u64) -> Self {
        Self { change_counter: self.change_counter.wrapping_add(often), ..self }
    }

    /// The file has changed, and has these times again, unless others have moved them since: links and attributes need no `ops`, and what
    /// they have set stays.
    fn touch(self, meta: &mut Meta, now: Timestamp) {
        let are_untouched = meta.item.change_counter == self.change_counter;
        meta.touch_data(now);
        if are_untouched {
            (meta.item.mtime, meta.item.ctime) = (self.mtime, self.ctime);
        }
    }
}

/// What is left of a cut.
struct CutStep {
    range: Range<u64>,
    unmapped: Unmapped,
    zero: Zero,
    size: Option<u64>,
    /// If they are not to be when the cut begins.
    times: Option<TimesBefore>,
    /// What the log has of the pages becomes void: not for what is left of a cut, whose first operation has said so.
    settle: bool,
    /// An operation of it has come before: nothing reaches the rest from before it.
    began: bool,
}

/// What is behind a file's end in its last page, at `size`.
fn tail_from(size: u64) -> Zero {
    let within = (size % BLOCK_BYTES_U64) as usize;
    let tail = (size / BLOCK_BYTES_U64, within..BLOCK_BYTES);
    (within > 0).then_some(tail).into_iter().collect()
}

/// The pages of which bytes `start .. end` cover only a part, with that part.
fn partial_pages(start: u64, end: u64) -> Vec<(u64, Range<usize>)> {
    let (first, head) = (start / BLOCK_BYTES_U64, (start % BLOCK_BYTES_U64) as usize);
    let (last, tail) = (end / BLOCK_BYTES_U64, (end % BLOCK_BYTES_U64) as usize);
    if first == last {
        return if tail > head { vec![(first, head..tail)] } else { Vec::new() };
    }
    let mut pages = Vec::new();
    if head > 0 {
        pages.push((first, head..BLOCK_BYTES));
    }
    if tail > 0 {
        pages.push((last, 0..tail));
    }
    pages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partial_pages_are_the_edges_only() {
        assert_eq!(partial_pages(0, 4096), vec![]);
        assert_eq!(partial_pages(10, 20), vec![(0, 10..20)]);
        assert_eq!(partial_pages(10, 4096), vec![(0, 10..4096)]);
        assert_eq!(partial_pages(4000, 8200), vec![(0, 4000..4096), (2, 0..8)]);
        assert_eq!(partial_pages(4096, 8192), vec![]);
    }
}
