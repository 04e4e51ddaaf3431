//! Barriers: everything before is durable before anything after, and nobody waits for either.
//!
//! Operations are in the order of the log anyhow; what a barrier has to see to is data that only memory has. Files with few
//! dirty pages are put into the log at once: for them the barrier is a mere point in the log. If more is dirty, the
//! barrier opens a *chain* (`log/chain.rs`): all that is appended from then on, by anyone, is replayed together or not
//! at all. The barrier's thread sends the dirty pages home; their new mapping lands in the chain; then the chain ends. A
//! page that is written again meanwhile travels as it is then: the chain is one piece, so no order is broken.
//!
//! Nobody else's sync in the chain becomes durable before that. So a barrier with data of its own waits where several before it have much left
//! to send home ([`Queue::has_much`]), and helps them.
//!
//! Whoever needs the chain to end (a sync of something in it, a checkpoint, a step in manual mode) does the barrier's work
//! itself if the thread has not begun it.
//!
//! **No deadlock.** Log space for the whole of a barrier's work is admitted before its chain opens, at the entry, where every
//! operation waits, long extents that pages may cut included; the work itself draws on that and, should writeback by others have cut the dirty
//! runs into more pieces, on the ring's reserve. Nobody has some of that when a chain opens, and nobody else takes some while it is open, but for what
//! other pieces on their way home turn out to need ([`Room::Chain`]). It takes `map`, `pages` and `meta` locks only, and
//! waits for nothing but the device and writeback that is under way. So a chain always ends, and a checkpoint may wait for it.
//!
//! **Failure.** Data that cannot be written is tried again at another place, [`ATTEMPTS`] times; so is the file's mapping if it cannot be
//! read. Then the volume is shut down: a chain that ended without its data would break the promise, and one that never ends would stop
//! everybody. (To read the mapping before the chain opens would make the caller wait for the device.)
//!
//! Lock order: the queue of jobs is a leaf.

use crate::background::LogShortage;
use crate::cache::map::{LoggedFilter, RunFilter};
use crate::device::IoClass;
use crate::engine::{Engine, Room, class_of};
use crate::error::{Error, PANICKED, Result};
use crate::file::fsync::SIZE_BYTES;
use crate::file::writeback::{Piece, PieceLimits, cut_bytes, settle_bytes};
use crate::inode::{Inode, Reach};
use crate::log::chain::CHAIN_END_BLOCKS;
use crate::log::{Admission, OpRecords};
use crate::mutation::{self, Mutation};
use crate::sync::{Arc, Condvar, JoinHandle, Mutex, OnPanic, spawn, wait_for};
use crate::txn::Lsn;
use crate::types::FileType;
use std::collections::VecDeque;
use std::ops::Range;

/// Most pages that one barrier puts into the log at once, over all files.
const AT_ONCE_PAGES: usize = 256;
/// Pages that are written together.
const ROUND_PAGES: u64 = 4096;
/// Data that earlier barriers have not sent home when a barrier with more of it waits: pages, and of so many barriers.
const MANY_PAGES: usize = 1024;
const MANY_JOBS: usize = 4;
/// How often data is tried to be written.
const ATTEMPTS: u32 = 3;
/// How far pages reach that are written together or not at all.
const NEIGHBOURS: u64 = 64;

/// Dirty pages that the log does not have.
const UNLOGGED: RunFilter =
    RunFilter { logged: LoggedFilter::NotLogged, only_towrite: false, skip_writeback: false };
/// Those of them that a barrier (or a sync) has chosen.
const CHOSEN: RunFilter = RunFilter { only_towrite: true, ..UNLOGGED };

/// What a file has to send home for a barrier.
struct Part {
    inode: Arc<Inode>,
    /// Pages that were dirty or under writeback, in groups that settle in one operation each.
    groups: Vec<Group>,
    /// The file had blocks: pages may cut extents.
    is_mapped: bool,
    /// How far the file reached.
    reach: Reach,
}

/// Ranges of pages, in order.
type Group = Vec<Range<u64>>;

/// The data phase of one barrier. It holds the chain open.
struct Job {
    parts: Vec<Part>,
    room: Admission,
    /// When the barrier was raised.
    began_ns: u64,
}

impl Job {
    fn pages(&self) -> usize {
        self.parts.iter().map(Part::pages).sum()
    }
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Jobs that have not ended, and their pages.
    pending_jobs: usize,
    pending_pages: usize,
    stop: bool,
}

impl Queue {
    /// Whoever waits for the end of the chain has so much to wait for that nobody should add to it.
    fn has_much(&self) -> bool {
        self.pending_jobs >= MANY_JOBS && self.pending_pages >= MANY_PAGES
    }
}

/// The work of barriers that has not begun, and the thread that does it.
#[derive(Default)]
pub struct Barriers {
    queue: Mutex<Queue>,
    wake: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Blocks of the log that one operation of `bytes` takes at most.
fn blocks_for(bytes: usize) -> u64 {
    OpRecords::blocks_for(bytes, 0)
}

impl Part {
    /// What `inode` would have to send home now; `None` if the log has all of it.
    fn of(inode: &Arc<Inode>, limits: PieceLimits) -> Option<Self> {
        let piece_pages = limits.pages();
        let mut runs: Vec<Range<u64>> = Vec::new();
        let reach;
        {
            let pages = inode.pages.read();
            runs.extend(pages.dirty_runs(0..u64::MAX, piece_pages, UNLOGGED));
            let mut from = 0;
            while let Some(index) = pages.first_writeback(from..u64::MAX) {
                runs.push(index..index + 1);
                from = index + 1;
            }
            reach = inode.reach();
        }
        let item = inode.meta.lock().item;
        let (size_logged, is_mapped) = (item.size >= reach.size, item.blocks > 0);
        if runs.is_empty() && size_logged {
            return None;
        }
        runs.sort_unstable_by_key(|run| run.start);
        let groups = grouped(joined(runs, piece_pages), limits);
        Some(Self { inode: inode.clone(), groups, is_mapped, reach })
    }

    fn ranges(&self) -> impl Iterator<Item = &Range<u64>> {
        self.groups.iter().flatten()
    }

    fn pages(&self) -> usize {
        self.ranges().map(|range| (range.end - range.start) as usize).sum()
    }

    /// Log space for all of it.
    fn log_blocks(&self) -> u64 {
        let pieces = self.groups.iter().map(|group| self.group_blocks(group));
        pieces.sum::<u64>() + blocks_for(SIZE_BYTES)
    }

    fn group_blocks(&self, group: &Group) -> u64 {
        let pages = group.iter().map(|range| range.end - range.start).sum();
        let cut = if self.is_mapped { cut_bytes(group) } else { 0 };
        blocks_for(settle_bytes(pages, group.len()) + cut)
    }
}

/// From its first page to its last.
fn span_of(group: &Group) -> Option<Range<u64>> {
    Some(group.first()?.start..group.last()?.end)
}

/// Puts ranges together that can settle in one operation: what is scattered takes little of the log then.
fn grouped(mut ranges: Vec<Range<u64>>, limits: PieceLimits) -> Vec<Group> {
    let mut groups = Vec::new();
    let mut from = 0;
    while from < ranges.len() {
        let group = limits.first_of(ranges[from..].iter().cloned());
        let Some(first) = group.first() else { break };
        if first.end < ranges[from].end {
            // It was cut, and is alone.
            ranges[from].start = first.end;
        } else {
            from += group.len();
        }
        groups.push(group);
    }
    groups
}

/// Makes overlapping and adjacent runs one, up to `limit` pages.
fn joined(runs: Vec<Range<u64>>, limit: u64) -> Vec<Range<u64>> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for run in runs {
        match ranges.last_mut() {
            Some(last) if run.end <= last.end => {}
            Some(last) if run.start <= last.end && run.end - last.start <= limit => {
                last.end = run.end;
            }
            Some(last) if run.start < last.end => {
                let start = last.end;
                ranges.push(start..run.end);
            }
            _ => ranges.push(run),
        }
    }
    ranges
}

impl Engine {
    /// Raises a barrier for the data of `only`, or of all files. Waits for nothing but room: in the log, and in what others' barriers have
    /// to send home. Answers an LSN that is durable when everything before the barrier is.
    pub fn barrier(&self, only: Option<&Arc<Inode>>) -> Result<Lsn> {
        let began_ns = self.clock.monotonic_ns();
        let raised = self.raise_barrier(only)?;
        let is_early = mutation::active(Mutation::AnswerEarlier);
        let lsn = raised.saturating_sub(u64::from(is_early));
        self.counters.barrier_call_ns.record(self.clock.since_ns(began_ns));
        Ok(lsn)
    }

    fn raise_barrier(&self, only: Option<&Arc<Inode>>) -> Result<Lsn> {
        let mut shortage = LogShortage::default();
        loop {
            self.check_writable()?;
            if mutation::active(Mutation::IgnoreBarrier) {
                return Ok(self.log.last_lsn());
            }
            self.delay_for_log(1);
            let files = only.map_or_else(|| self.dirty.all(), |inode| vec![inode.clone()]);
            let parts = self.log_what_is_small(files)?;
            if parts.is_empty() {
                return Ok(self.log.last_lsn());
            }
            if self.barriers.queue.lock().has_much() {
                self.finish_barriers(Lsn::MAX)?;
                continue;
            }
            let Some(mut room) = self.barrier_room(&parts, &mut shortage)? else { continue };
            let Some(lsn) = self.log.open_chain(&mut room)? else {
                drop(room);
                self.wait_before_chain()?;
                continue;
            };
            for part in &parts {
                let mut pages = part.inode.pages.write();
                for range in part.ranges() {
                    pages.mark_towrite(range.clone());
                }
            }
            let job = Job { parts, room, began_ns: self.clock.monotonic_ns() };
            let mut queue = self.barriers.queue.lock();
            queue.pending_jobs += 1;
            queue.pending_pages += job.pages();
            queue.jobs.push_back(job);
            drop(queue);
            self.barriers.wake.notify_one();
            self.log.note_chain_work();
            return Ok(lsn);
        }
    }

    /// Puts files with few dirty pages into the log. Answers what the others have to send home.
    fn log_what_is_small(&self, files: Vec<Arc<Inode>>) -> Result<Vec<Part>> {
        let limits = self.piece_limits();
        let mut left = AT_ONCE_PAGES;
        let mut parts = Vec::new();
        for inode in files {
            if inode.file_type != FileType::Regular {
                continue;
            }
            let Some(part) = Part::of(&inode, limits) else { continue };
            let pages = part.pages();
            if pages <= left
                && pages <= self.max_payload_pages()
                && self
                    .prepare_at_once(&inode, 0..u64::MAX, crate::SyncKind::Data, false)?
                    .is_some()
            {
                left -= pages;
                continue;
            }
            parts.push(part);
        }
        Ok(parts)
    }

    /// Log space for sending all of `parts` home. `None`: there was not enough; something was done about it, so look again.
    fn barrier_room(
        &self,
        parts: &[Part],
        shortage: &mut LogShortage,
    ) -> Result<Option<Admission>> {
        let blocks = parts.iter().map(Part::log_blocks).sum::<u64>() + CHAIN_END_BLOCKS;
        if blocks <= self.log.fill().ring_blocks / 4 {
            // Barriers before this one may hold much of it.
            self.wait_for_log(Some(blocks));
            let admitted = self.log.admit(blocks, class_of(blocks));
            if admitted.is_err() {
                self.relieve_log(shortage)?;
            }
            return Ok(admitted.ok());
        }
        // So much is dirty that even to say where it went does not fit into a chain.
        let inodes: Vec<_> = parts.iter().map(|part| part.inode.clone()).collect();
        if self.flush_inodes(&inodes, RunFilter { skip_writeback: true, ..UNLOGGED })? == 0 {
            self.relieve_log(shortage)?;
        }
        Ok(None)
    }

    /// Waits until another chain can be opened.
    fn wait_before_chain(&self) -> Result<()> {
        if self.log.has_open_chain() {
            return self.finish_barriers(Lsn::MAX);
        }
        // A checkpoint is about to freeze, or somebody has some of what is kept for the end of chains.
        if self.background.has_threads() {
            self.clock.sleep_us(20);
            return Ok(());
        }
        self.wait_checkpoint(self.checkpointer.goal())
    }

    /// Sees to it that no chain is open that `lsn` lies in.
    pub fn finish_barriers(&self, lsn: Lsn) -> Result<()> {
        while self.log.in_open_chain(lsn) {
            let moment = self.log.chain_moment();
            if !self.barrier_step() {
                // Somebody else is at it, or about to say what there is to do.
                self.log.wait_chain(lsn, Some(moment))?;
            }
        }
        Ok(())
    }

    /// Does the work of one barrier. False: there is none that nobody has begun.
    pub fn barrier_step(&self) -> bool {
        let Some(job) = self.barriers.queue.lock().jobs.pop_front() else { return false };
        let (pages, began_ns) = (job.pages(), job.began_ns);
        let sent = self.send_job_home(job);
        self.counters.barrier_data_ns.record(self.clock.since_ns(began_ns));
        let mut queue = self.barriers.queue.lock();
        queue.pending_jobs -= 1;
        queue.pending_pages -= pages;
        drop(queue);
        match sent {
            Ok(()) => self.log.close_chain(),
            Err(Error::Shutdown(reason)) => self.shut_down(&reason),
            Err(error) => self.shut_down(&format!("data before a barrier: {error}")),
        }
        true
    }

    fn send_job_home(&self, mut job: Job) -> Result<()> {
        let mut failures = 0;
        loop {
            match self.job_round(&mut job) {
                Ok(true) => break,
                Ok(false) => {}
                Err(error) => {
                    self.check_shutdown()?;
                    failures += 1;
                    if failures == ATTEMPTS {
                        return Err(error);
                    }
                }
            }
        }
        for part in &job.parts {
            drop(job.room.split(blocks_for(SIZE_BYTES)));
            self.log_size(&part.inode, part.reach, Room::Chain)?;
        }
        Ok(())
    }

    /// Sends everything home that is chosen and not under writeback, and waits for what is. True: nothing is left.
    fn job_round(&self, job: &mut Job) -> Result<bool> {
        let mut pieces = Vec::new();
        let mut pages = 0;
        for part in &job.parts {
            for group in &part.groups {
                let Some(span) = span_of(group) else { continue };
                if part.inode.pages.read().dirty_runs(span.clone(), 1, CHOSEN).next().is_none() {
                    continue;
                }
                let given_back = job.room.split(part.group_blocks(group));
                let room = (&mut job.room, given_back);
                pages += self.collect_group(part, &span, room, &mut pieces)?;
                if pages >= ROUND_PAGES {
                    pages = 0;
                    self.write_pieces(&mut pieces)?;
                }
            }
        }
        self.write_pieces(&mut pieces)?;
        // A page of which an older version was under way was left out, and one that could not be written is back.
        let mut some_left = false;
        for part in &job.parts {
            for range in part.ranges() {
                // Pages that may be one write go together: neighbours hold each other up.
                let start = range.start / NEIGHBOURS * NEIGHBOURS;
                let pages = start..range.end.saturating_add(NEIGHBOURS);
                some_left |= self.wait_for_chosen(&part.inode, &pages, range);
            }
        }
        Ok(!some_left)
    }

    /// Takes the chosen pages of `span`; log space for it is what is `given_back`, and then comes out of `room`.
    fn collect_group(
        &self,
        part: &Part,
        span: &Range<u64>,
        (room, mut given_back): (&mut Admission, Admission),
        pieces: &mut Vec<Piece>,
    ) -> Result<u64> {
        let mut pages = 0;
        loop {
            drop(given_back);
            let budget = (u64::MAX, Room::Chain);
            let collected = self.collect(&part.inode, span.clone(), CHOSEN, budget, pieces);
            let complete = match collected {
                Ok(collected) => {
                    pages += collected.pages;
                    collected.complete
                }
                Err(Error::WouldBlock) if room.blocks() > 0 => false,
                Err(Error::WouldBlock) => {
                    return Err(Error::Shutdown("the log has no room for a barrier's data".into()));
                }
                Err(error) => {
                    // What was taken before must not stay under writeback.
                    self.write_pieces(pieces)?;
                    return Err(error.of_inode(part.inode.number));
                }
            };
            if complete {
                return Ok(pages);
            }
            self.write_pieces(pieces)?;
            given_back = room.split(room.blocks());
        }
    }

    fn write_pieces(&self, pieces: &mut Vec<Piece>) -> Result<()> {
        let mut taken = std::mem::take(pieces);
        self.write_out(&mut taken, IoClass::SyncWrite);
        self.settle_of_many(taken)
    }

    /// Starts the barriers' thread.
    pub fn start_barriers(self: &Arc<Self>) -> Result<()> {
        self.barriers.queue.lock().stop = false;
        let engine = self.clone();
        let thread = spawn("weir-barrier", move || {
            let _ends_all = OnPanic::new(|| engine.shut_down(PANICKED));
            engine.barrier_loop();
        })?;
        *self.barriers.thread.lock() = Some(thread);
        Ok(())
    }

    /// Ends the barriers' thread after what it is doing. What is left, whoever waits for it does.
    pub fn stop_barriers(&self) {
        let Some(thread) = self.barriers.thread.lock().take() else { return };
        self.barriers.queue.lock().stop = true;
        self.barriers.wake.notify_all();
        // One that panicked has shut the volume down.
        let _ = thread.join();
    }

    fn barrier_loop(&self) {
        loop {
            while self.barrier_step() {}
            let mut queue = self.barriers.queue.lock();
            if queue.stop {
                return;
            }
            if queue.jobs.is_empty() {
                wait_for(&self.barriers.wake, &mut queue, 1_000_000);
            }
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::{grouped, joined};
    use crate::file::writeback::PieceLimits;

    #[test]
    fn groups_hold_all_ranges_in_order_and_each_fits_into_one_operation() {
        for max_operation_bytes in [8192, 20_000, 100_000, 1 << 20] {
            let limits = PieceLimits::new(max_operation_bytes);
            for (stride, length) in [(1, 1), (2, 1), (40, 7), (300, 256), (1000, 999)] {
                let runs = (0..200).map(|number| number * stride..number * stride + length);
                let ranges = joined(runs.collect(), limits.pages());
                let groups = grouped(ranges.clone(), limits);
                let pages = |ranges: &[std::ops::Range<u64>]| -> Vec<u64> {
                    ranges.iter().cloned().flatten().collect()
                };
                assert_eq!(pages(&groups.concat()), pages(&ranges));
                for group in &groups {
                    assert_eq!(&limits.first_of(group.iter().cloned()), group);
                }
                let scattered = stride > length && length == 1;
                assert!(!scattered || max_operation_bytes < 20_000 || groups.len() < 60);
            }
        }
    }

    #[test]
    fn joined_ranges_cover_the_same_pages_once() {
        let cases: [&[(u64, u64)]; 5] = [
            &[(0, 4), (4, 8), (8, 9)],
            &[(0, 4), (1, 2), (3, 4), (6, 7)],
            &[(0, 8), (7, 8), (8, 12), (11, 12), (20, 28)],
            &[(2, 3), (3, 4), (5, 6)],
            &[],
        ];
        for runs in cases {
            let mut wanted: Vec<u64> = runs.iter().flat_map(|&(a, b)| a..b).collect();
            wanted.sort_unstable();
            wanted.dedup();
            let ranges = joined(runs.iter().map(|&(a, b)| a..b).collect(), 8);
            assert!(ranges.iter().all(|range| range.end - range.start <= 8));
            let covered: Vec<u64> = ranges.into_iter().flatten().collect();
            assert_eq!(covered, wanted, "{runs:?}");
        }
    }

    /// Others may have sent home what a barrier is about between its look and its chain: then its number is nobody's until the chain ends.
    #[test]
    #[cfg(not(feature = "shuttle"))]
    fn a_sync_covers_the_number_of_a_barrier_that_has_nothing_left_to_do() {
        let (volume, file) = crate::txn::volume_with_a_file();
        volume.sync().expect("sync");
        let engine = file.engine();
        let blocks = super::CHAIN_END_BLOCKS;
        let mut room = engine.log.admit(blocks, super::class_of(blocks)).expect("room");
        let lsn = engine.log.open_chain(&mut room).expect("open").expect("a number");
        assert_eq!(lsn, volume.last_lsn() + 1, "nobody's yet");
        let ticket = volume.sync_async().expect("submit");
        assert_eq!(engine.prepare_all(), Ok(lsn));
        engine.log.close_chain();
        while !matches!(ticket.poll(), Some(Ok(()))) {
            volume.background_step(crate::BackgroundWork::Log).expect("step");
        }
        assert!(volume.durable_lsn() >= lsn);
    }
}
