//! Writeback on request: `sync_range` and `expire`.
//!
//! A checkpointer of a database tells which pages it is done with, few at a time and at random. Written at
//! once, that would be a storm of tiny writes. So a call only hands its range over: ranges wait in the order of
//! inodes and file blocks, neighbours become one, and the flusher takes all of them together: blocks are chosen in that
//! order, and the requests of all files are sorted and merged ([`Engine::drain_handover`]). It begins when a good batch has
//! gathered ([`BATCH_PAGES`]), when somebody waits, or after [`PATIENCE_US`].
//!
//! No durability is promised, no size is logged that would not be logged otherwise, nothing is flushed. A later fsync finds the
//! pages clean, and only has the frame left.
//!
//! **Bounded**: while [`Engine::handover_limit`] dirty pages or more wait or are under way, a call waits, or answers
//! [`Error::WouldBlock`]; one that is let in hands over all of its range. `expire` is never refused: it costs a range
//! in memory, and when there are
//! [`MAX_RANGES`] of one queue, a file's ranges become one.
//!
//! **Invariant:** a range is in the queue until a batch takes it, and in that batch until its pages were written and
//! settled, but for those that may be one write with a page whose older version was on its way; who waits for a range looks at all of
//! them, then at the pages under writeback.
//!
//! Locks: `drain` (one thread at a time) before an inode's `map`; `state` is a leaf.

use super::writeback::page_range;
use crate::cache::map::{LoggedFilter, RunFilter};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::inode::Inode;
use crate::sync::{Arc, Mutex, MutexGuard};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// Pages that are worth a batch: 4 MiB.
pub const BATCH_PAGES: u64 = 1024;
/// Longest time that a range waits for company.
pub const PATIENCE_US: u64 = 20_000;
/// Most dirty pages handed over: 64 MiB, or less where memory is short.
const MAX_PAGES: u64 = 16_384;
/// Most ranges that are kept apart.
const MAX_RANGES: usize = 65_536;

/// What [`crate::File::sync_range`] does, in this order. All `false`: nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(clippy::struct_excessive_bools, reason = "independent flags, as of sync_file_range(2)")]
pub struct SyncRangeFlags {
    /// Wait until nothing of the range is on its way home.
    pub wait_before: bool,
    /// Start writing the dirty pages of the range home, but those on their way already, and those beside one of these that may be one write
    /// with it (see [`crate::Capabilities`]): with `wait_before` there are none.
    pub write: bool,
    /// Wait until what was started is home.
    pub wait_after: bool,
    /// `write` answers [`Error::WouldBlock`] where it would wait for the budget of background writeback.
    pub nowait: bool,
}

impl SyncRangeFlags {
    /// Start writing, do not wait.
    pub const WRITE: Self =
        Self { wait_before: false, write: true, wait_after: false, nowait: false };
    /// Wait for what is on its way.
    pub const WAIT_BEFORE: Self =
        Self { wait_before: true, write: false, wait_after: false, nowait: false };
    /// Wait for what is on its way, after `write`.
    pub const WAIT_AFTER: Self =
        Self { wait_before: false, write: false, wait_after: true, nowait: false };
    /// Do not wait for the budget.
    pub const NOWAIT: Self =
        Self { wait_before: false, write: false, wait_after: false, nowait: true };
}

impl std::ops::BitOr for SyncRangeFlags {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self {
            wait_before: self.wait_before | other.wait_before,
            write: self.write | other.write,
            wait_after: self.wait_after | other.wait_after,
            nowait: self.nowait | other.nowait,
        }
    }
}

/// Ranges of pages of many files, merged where they touch. Pure.
pub struct RangeSet<T> {
    /// By file and first page: one past the last page, and what comes with the file.
    ranges: BTreeMap<(u64, u64), (u64, T)>,
}

impl<T> Default for RangeSet<T> {
    fn default() -> Self {
        Self { ranges: BTreeMap::new() }
    }
}

impl<T: Clone> RangeSet<T> {
    /// Adds `pages` of `file`.
    pub fn add(&mut self, file: u64, pages: Range<u64>, tag: &T) {
        if pages.is_empty() {
            return;
        }
        let (mut start, mut end) = (pages.start, pages.end);
        if self.ranges.len() >= MAX_RANGES {
            // One range of the file from its first page to its last is more than was asked for, and harmless.
            if let Some((first, _)) = self.first_of(file) {
                start = start.min(first);
            }
            if let Some((&(_, _), (last, _))) =
                self.ranges.range((file, 0)..=(file, u64::MAX)).next_back()
            {
                end = end.max(*last);
            }
        }
        // Everything that begins at or before the end and ends at or after the start becomes part of it.
        while let Some((&(_, other_start), (other_end, _))) =
            self.ranges.range((file, 0)..=(file, end)).next_back()
        {
            if *other_end < start {
                break;
            }
            start = start.min(other_start);
            end = end.max(*other_end);
            self.ranges.remove(&(file, other_start));
        }
        self.ranges.insert((file, start), (end, tag.clone()));
    }

    fn first_of(&self, file: u64) -> Option<(u64, u64)> {
        let (&(_, start), &(end, _)) = self.ranges.range((file, 0)..=(file, u64::MAX)).next()?;
        Some((start, end))
    }

    /// Whether a range of `file` shares a page with `pages`.
    pub fn overlaps(&self, file: u64, pages: &Range<u64>) -> bool {
        if pages.is_empty() {
            return false;
        }
        self.ranges
            .range((file, 0)..(file, pages.end))
            .next_back()
            .is_some_and(|(_, (end, _))| *end > pages.start)
    }

    /// How many ranges.
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// There are none.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The ranges with what comes with their files, by file and page.
    pub fn to_vec(&self) -> Vec<(T, Range<u64>)> {
        self.iter().map(|(tag, range)| (tag.clone(), range)).collect()
    }

    /// The same, one by one.
    pub fn iter(&self) -> impl Iterator<Item = (&T, Range<u64>)> {
        self.ranges.iter().map(|(&(_, start), (end, tag))| (tag, start..*end))
    }
}

/// Ranges that are written together, by file and page.
pub(super) type Batch = Vec<(Arc<Inode>, Range<u64>)>;

#[derive(Default)]
struct State {
    queue: RangeSet<Arc<Inode>>,
    /// Dirty pages of the queue, as they were counted when they were handed over.
    queued_pages: u64,
    /// What the flusher is writing, the oldest first.
    batches: VecDeque<(RangeSet<Arc<Inode>>, u64)>,
    /// Somebody waits for the queue.
    urgent: bool,
}

/// The queue of ranges. See the module's head.
#[derive(Default)]
pub struct Handover {
    state: Mutex<State>,
    /// Whoever drains.
    drain: Mutex<()>,
}

impl Handover {
    /// Dirty pages that wait or are under way.
    pub fn pages(&self) -> u64 {
        let state = self.state.lock();
        state.queued_pages + state.batches.iter().map(|(_, pages)| pages).sum::<u64>()
    }

    /// Nothing waits.
    pub fn is_empty(&self) -> bool {
        self.state.lock().queue.is_empty()
    }

    /// The batch should not wait any longer for company.
    pub fn is_due(&self) -> bool {
        let state = self.state.lock();
        !state.queue.is_empty() && (state.urgent || state.queued_pages >= BATCH_PAGES)
    }

    fn overlaps(&self, inode: &Inode, pages: &Range<u64>) -> bool {
        let state = self.state.lock();
        let mut sets = state.batches.iter().map(|(ranges, _)| ranges).chain([&state.queue]);
        sets.any(|ranges| ranges.overlaps(inode.number, pages))
    }

    /// Whoever drains is alone.
    pub(super) fn begin_drain(&self) -> MutexGuard<'_, ()> {
        self.drain.lock()
    }

    /// The queue becomes a batch, to be ended by [`Handover::end_batch`]; none if nothing waits.
    pub(super) fn take_batch(&self) -> Option<Batch> {
        let mut state = self.state.lock();
        state.urgent = false;
        let ranges = std::mem::take(&mut state.queue);
        let pages = std::mem::take(&mut state.queued_pages);
        if ranges.is_empty() {
            return None;
        }
        let batch = ranges.to_vec();
        state.batches.push_back((ranges, pages));
        Some(batch)
    }

    /// The oldest batch is home, or given up; what it was of.
    pub(super) fn end_batch(&self) -> Option<Batch> {
        let (ranges, _) = self.state.lock().batches.pop_front()?;
        Some(ranges.to_vec())
    }
}

impl Engine {
    /// See [`crate::File::sync_range`].
    pub fn sync_range(
        &self,
        inode: &Arc<Inode>,
        range: Range<u64>,
        flags: SyncRangeFlags,
    ) -> Result<()> {
        if self.options.read_only {
            return self.check_shutdown();
        }
        self.check_writable()?;
        let pages = page_range(range.start, range.end.saturating_sub(range.start));
        if flags.wait_before {
            self.wait_handed_over(inode, &pages)?;
        }
        if flags.write {
            self.wait_for_handover_budget(flags.nowait)?;
            self.hand_over(inode, &pages);
        }
        if flags.wait_after {
            self.wait_handed_over(inode, &pages)?;
        }
        Ok(())
    }

    /// Leaves the dirty pages of `pages` to background writeback.
    pub fn hand_over(&self, inode: &Arc<Inode>, pages: &Range<u64>) {
        let dirty_pages = {
            let map = inode.pages.read();
            let runs = map.dirty_runs(pages.clone(), u64::MAX, TO_WRITE);
            runs.map(|run| run.end - run.start).sum::<u64>()
        };
        if dirty_pages == 0 {
            return;
        }
        let handover = &self.background.handover;
        let (was_empty, is_due) = {
            let mut state = handover.state.lock();
            let was_empty = state.queue.is_empty();
            state.queue.add(inode.number, pages.clone(), inode);
            let was_due = state.queued_pages >= BATCH_PAGES;
            state.queued_pages += dirty_pages;
            (was_empty, !was_due && state.queued_pages >= BATCH_PAGES)
        };
        if was_empty || is_due {
            self.background.request_flush();
        }
    }

    /// Most dirty pages that are handed over at a time.
    pub fn handover_limit(&self) -> u64 {
        MAX_PAGES.min(self.pool.capacity_pages() as u64 / 8).max(1)
    }

    fn wait_for_handover_budget(&self, nowait: bool) -> Result<()> {
        loop {
            let moment = self.background.moment();
            if self.background.handover.pages() < self.handover_limit() {
                return Ok(());
            }
            if nowait {
                return Err(Error::WouldBlock);
            }
            self.check_shutdown()?;
            if self.background.has_threads() {
                self.hurry_handover();
                self.background.wait_progress(moment);
            } else {
                // An error was noted with the file it concerns; what is written no longer waits in any case.
                let _ = self.drain_handover();
            }
        }
    }

    fn hurry_handover(&self) {
        self.background.handover.state.lock().urgent = true;
        self.background.request_flush();
    }

    /// Waits until nothing of `pages` is handed over or under writeback.
    fn wait_handed_over(&self, inode: &Arc<Inode>, pages: &Range<u64>) -> Result<()> {
        loop {
            let moment = inode.io_moment();
            if !self.background.handover.overlaps(inode, pages) {
                self.wait_writeback(inode, pages);
                return Ok(());
            }
            self.check_shutdown()?;
            if self.background.has_threads() {
                self.hurry_handover();
                inode.wait_io_for(moment, PATIENCE_US);
            } else {
                // An error was noted with the file it concerns; what is written no longer waits in any case.
                let _ = self.drain_handover();
            }
        }
    }
}

/// Dirty pages that the log does not have and that are not on their way.
pub(super) const TO_WRITE: RunFilter =
    RunFilter { logged: LoggedFilter::NotLogged, only_towrite: false, skip_writeback: true };

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(set: &RangeSet<u64>) -> Vec<(u64, Range<u64>)> {
        set.iter().map(|(tag, range)| (*tag, range)).collect()
    }

    #[test]
    fn ranges_are_sorted_and_merged_where_they_touch() {
        let mut set = RangeSet::default();
        for (file, range) in [(2, 10..12), (1, 8..10), (2, 12..14), (2, 0..2), (1, 0..8), (2, 5..6)]
        {
            set.add(file, range, &file);
        }
        assert_eq!(listed(&set), [(1, 0..10), (2, 0..2), (2, 5..6), (2, 10..14)]);
        set.add(2, 1..11, &2);
        assert_eq!(listed(&set), [(1, 0..10), (2, 0..14)]);
        set.add(2, 20..u64::MAX, &2);
        set.add(1, 3..3, &1);
        assert_eq!(listed(&set), [(1, 0..10), (2, 0..14), (2, 20..u64::MAX)]);
    }

    /// Against a set of pages: many small ranges of two files in every order a generator makes.
    #[test]
    fn a_range_set_is_the_union_of_what_was_added() {
        let mut state = 1_u64;
        let mut next = |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % bound
        };
        for _ in 0..300 {
            let mut set = RangeSet::default();
            let mut model = std::collections::BTreeSet::new();
            for _ in 0..next(30) {
                let (file, start) = (next(2), next(60));
                let end = start + next(6);
                set.add(file, start..end, &file);
                model.extend((start..end).map(|page| (file, page)));
                let found: std::collections::BTreeSet<_> = set
                    .iter()
                    .flat_map(|(file, range)| range.map(move |page| (*file, page)))
                    .collect();
                assert_eq!(found, model);
                let ranges = listed(&set);
                let apart = |pair: &[(u64, Range<u64>)]| {
                    pair[0].0 < pair[1].0 || pair[0].1.end < pair[1].1.start
                };
                assert!(ranges.windows(2).all(apart), "{ranges:?}");
                for page in 0..70 {
                    assert_eq!(
                        set.overlaps(file, &(page..page + 1)),
                        model.contains(&(file, page))
                    );
                    let wide = (page..page + 4).any(|page| model.contains(&(file, page)));
                    assert_eq!(set.overlaps(file, &(page..page + 4)), wide);
                }
            }
        }
    }

    #[test]
    fn a_full_set_gives_a_file_one_range() {
        let mut set = RangeSet::default();
        for page in 0..MAX_RANGES as u64 {
            set.add(7, page * 2..page * 2 + 1, &7);
        }
        assert_eq!(set.len(), MAX_RANGES);
        set.add(7, 1_000_000..1_000_001, &7);
        assert_eq!(listed(&set), [(7, 0..1_000_001)]);
    }
}
