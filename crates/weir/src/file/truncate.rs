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
use crate::cache::map::{OldContents, PageMap, Removed, WriteRefused};
use crate::device::IoClass;
use crate::engine::{Engine, Room};
use crate::error::{Error, Result};
use crate::format::{BLOCK_BYTES, BLOCK_BYTES_U64, Key, MAX_FILE_BYTES};
use crate::inode::{Inode, Meta};
use crate::log::Admission;
use crate::mutation::{self, Mutation};
use crate::namespace::{OP_RECORD_BYTES, OP_SPACE_BLOCKS};
use crate::reclaim::Shortage;
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, MutexGuard};
use crate::txn::Op;
use std::ops::Range;

/// Extents that one operation takes away.
const CUT_EXTENTS: usize = 64;

/// Parts of pages that become zero.
type Zero = Vec<(u64, Range<usize>)>;

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
        // Under `meta` alone: only holders of `ops` make the size larger.
        inode.size.store(size, Ordering::Release);
        meta.item.size = size;
        meta.touch_data(now);
        let mut op = Op::new();
        op.put(Key::inode(inode.number), &meta.item.encode());
        let lsn = self.store.commit(op, admission)?;
        meta.logged(lsn, true);
        Ok(())
    }

    /// The file gets shorter. The caller holds `ops`.
    pub fn shrink(&self, inode: &Arc<Inode>, size: u64) -> Result<()> {
        let first_gone = size.div_ceil(BLOCK_BYTES_U64);
        let within = size % BLOCK_BYTES_U64;
        let partial =
            (within > 0).then_some((size / BLOCK_BYTES_U64, within as usize..BLOCK_BYTES));
        let zero: Zero = partial.into_iter().collect();
        let settled_from = size / BLOCK_BYTES_U64;
        // What only takes away needs no room.
        let added = if zero.is_empty() { 0 } else { OP_SPACE_BLOCKS };
        let admission = self.enter_cut(&zero, added)?;
        let (map, zero) = self.hold_pages(inode, &zero, settled_from..u64::MAX)?;
        let step = CutStep {
            range: first_gone..u64::MAX,
            zero,
            size: Some(size),
            settle: true,
            began: false,
        };
        self.cut_all(inode, step, (map, admission))
    }

    /// Takes bytes `range` out: they read as zeros afterwards and whole blocks become free. The size stays. The
    /// caller holds `ops`.
    pub fn punch(&self, inode: &Arc<Inode>, range: Range<u64>) -> Result<()> {
        // Behind the end of the file there is nothing to keep of a block.
        let reaches_end = range.end >= inode.size();
        let end = if reaches_end { range.end.next_multiple_of(BLOCK_BYTES_U64) } else { range.end };
        if range.start >= end {
            return Ok(());
        }
        let zero = partial_pages(range.start, end);
        // A hole within an extent makes two of it.
        let admission = self.enter_cut(&zero, OP_SPACE_BLOCKS)?;
        let whole = range.start.div_ceil(BLOCK_BYTES_U64)..end / BLOCK_BYTES_U64;
        let touched = range.start / BLOCK_BYTES_U64..end.div_ceil(BLOCK_BYTES_U64);
        let (map, zero) = self.hold_pages(inode, &zero, touched)?;
        let step = CutStep { range: whole, zero, size: None, settle: true, began: false };
        self.cut_all(inode, step, (map, admission))
    }

    /// All operations of a cut. The `map` lock is not held while log space is waited for: a checkpoint may need it.
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
        let done = self.cut_step(inode, &mut step, admission)?;
        drop(map);
        if done {
            return Ok(());
        }
        match self.cut_on(inode, &mut step) {
            Err(_) if step.size.is_some() => {
                self.owe_cut(inode);
                Ok(())
            }
            ended => ended,
        }
    }

    /// The operations of a cut behind the first.
    fn cut_on(&self, inode: &Arc<Inode>, step: &mut CutStep) -> Result<()> {
        let mut done = false;
        while !done {
            let admission = self.admit(OP_RECORD_BYTES, 0, Room::Normal)?;
            let _map = inode.map.lock();
            done = self.cut_step(inode, step, admission)?;
        }
        Ok(())
    }

    /// One operation of a cut; true when it was the last. The caller holds `map`.
    ///
    /// The pages leave the cache, and parts of others become zero, in the moment in which the mapping and the size change, under the `pages`
    /// lock: that voids every read that has looked at the old mapping, which would bring cut data back; and nobody sees
    /// zeros within the old size. What may fail comes before.
    fn cut_step(
        &self,
        inode: &Arc<Inode>,
        step: &mut CutStep,
        admission: Admission,
    ) -> Result<bool> {
        let number = inode.number;
        let now = self.now();
        let mut op = Op::new();
        let range = (step.range.start, step.range.end);
        let mapping = Mapping::from(&**inode);
        let mapping = if step.began { mapping.from_its_start() } else { mapping };
        let (cut, next) =
            extents::cut(&self.store, &mut op, mapping, range, Unmapped::Freed, CUT_EXTENTS)?;
        step.began = true;
        // A new size takes everything behind it away at once; a hole grows step by step.
        let reached = if step.size.is_some() { range.1 } else { next.unwrap_or(range.1) };
        if step.settle && range.0 < reached {
            op.settled(number, range.0, reached - range.0);
        }
        step.settle &= step.size.is_none();
        let zero = std::mem::take(&mut step.zero);
        let logged = self.pages_to_log(inode, &zero, step.size.is_some())?;
        let mut pages = inode.pages.write();
        self.zero_cached(&mut pages, &zero)?;
        for &(index, home) in &logged {
            if let Some(page) = pages.peek(index) {
                op.payload(number, index, home, page.clone());
            }
        }
        let mut meta = inode.meta.lock();
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
        if meta.item.blocks == 0 {
            inode.unwritten.store(false, Ordering::Relaxed);
        }
        meta.touch_data(now);
        op.put(Key::inode(number), &meta.item.encode());
        let lsn = self.store.commit(op, admission)?;
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
        Ok(next.is_none())
    }

    /// Log space for an operation that cuts a file, and space: for the pages that it may make dirty, charged already, and `added` blocks
    /// for what it adds to the tree. The caller holds nothing but `ops`.
    ///
    /// Cutting works on a full volume: see [`Engine::reserve_spare`].
    fn enter_cut(&self, zero: &[(u64, Range<usize>)], added: u64) -> Result<Admission> {
        let pages = zero.len() as u64;
        self.reserve_spare(pages + added)?;
        self.alloc.release(added);
        self.dirty_pages.fetch_add(pages, Ordering::AcqRel);
        self.enter(OP_RECORD_BYTES, zero.len()).inspect_err(|_| self.pages_paid(pages))
    }

    /// Has the pages of `zero` in the cache, dirty and for the cache alone, and takes the `map` lock at a moment when no page of `quiet` is
    /// under writeback: as long as it is held, they stay like that. Answers the lock, and those parts that are no zeros in a hole.
    /// The caller holds `ops` and what [`Engine::enter_cut`] gave.
    fn hold_pages<'a>(
        &self,
        inode: &'a Arc<Inode>,
        zero: &Zero,
        quiet: Range<u64>,
    ) -> Result<(MutexGuard<'a, ()>, Zero)> {
        let mut newly_dirty = 0;
        let result = self.try_hold_pages(inode, zero, quiet, &mut newly_dirty);
        self.pages_paid(zero.len() as u64 - newly_dirty);
        if newly_dirty > 0 {
            self.dirty.add(inode);
        }
        result
    }

    fn try_hold_pages<'a>(
        &self,
        inode: &'a Arc<Inode>,
        zero: &Zero,
        quiet: Range<u64>,
        newly_dirty: &mut u64,
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
                has_content.push(self.has_content(inode, *index)?);
            }
            let held = {
                let mut pages = inode.pages.write();
                self.hold_cached(&mut pages, zero, &has_content, newly_dirty)
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
            }
        }
    }

    fn hold_cached(
        &self,
        pages: &mut PageMap,
        zero: &Zero,
        has_content: &[bool],
        newly_dirty: &mut u64,
    ) -> std::result::Result<Zero, ZeroStop> {
        let mut held = Vec::new();
        for ((index, part), has_content) in zero.iter().zip(has_content) {
            let state = pages.state(*index);
            if !has_content && !state.dirty && !state.writeback {
                // A hole, perhaps in the cache: zeros already, and it stays a hole.
                continue;
            }
            *newly_dirty += u64::from(self.page_to_zero(pages, *index)?.newly_dirty);
            held.push((*index, part.clone()));
        }
        Ok(held)
    }

    /// Zeroes the parts of pages that [`Engine::hold_pages`] has answered, all or none. The caller has held `map` since.
    fn zero_cached(&self, pages: &mut PageMap, zero: &Zero) -> Result<()> {
        let lost = |_| Error::TooLittleMemory("a page that was to be cut was taken away".into());
        for (index, _) in zero {
            let page = self.page_to_zero(pages, *index).map_err(lost)?;
            debug_assert!(!page.newly_dirty, "page {index} went home under the map lock");
        }
        for (index, part) in zero {
            self.page_to_zero(pages, *index).map_err(lost)?.bytes[part.clone()].fill(0);
        }
        Ok(())
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
            zero: Vec::new(),
            size: Some(size),
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
        if !inode.owes_cut.load(Ordering::Acquire) {
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
        for (_, lsn) in &removed.logged {
            self.store.obligations.release(*lsn);
        }
        self.pages_paid((removed.dirty + removed.writeback) as u64);
    }
}

/// Why pages could not be zeroed yet.
enum ZeroStop {
    /// This page's content has to be read.
    Missing(u64),
    /// No page frame was free.
    NoMemory,
}

/// Notes with an operation that sets a new size whether more has to follow: then an orphan item tells recovery, which goes when nothing is
/// left to do, unless the inode has lost its name.
fn mark_cut(meta: &mut Meta, op: &mut Op, number: u64, goes_on: bool) {
    if meta.cutting != goes_on && !meta.orphan {
        if goes_on {
            op.put(Key::orphan(number), &[]);
        } else {
            op.delete(Key::orphan(number));
        }
    }
    meta.cutting = goes_on;
}

/// What is left of a cut.
struct CutStep {
    range: Range<u64>,
    zero: Zero,
    size: Option<u64>,
    settle: bool,
    /// An operation of it has come before: nothing reaches the rest from before it.
    began: bool,
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
