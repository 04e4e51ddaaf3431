//! Background work and the waits for it.
//!
//! Threads: three log threads (in `log`), one checkpointer, two flushers, one cleaner, three for deferred syncs. The checkpointer never
//! waits for log space (it is what makes some), the others may. In manual mode there are no
//! threads, and whoever would wait does the work.
//!
//! Lock order: `signals`, then `jobs`; `progress` is a leaf.

mod futile;
mod jobs;

use crate::alloc::ReserveClass;
use crate::cache::map::{LoggedFilter, RunFilter};
use crate::cache::throttle::{DelayDebt, Demand, Limits, Pressure};
use crate::device::IoClass;
use crate::engine::{Engine, Room};
use crate::error::{Error, PANICKED, Result};
use crate::file::handover::{self, Handover};
use crate::file::paced::Pacing;
use crate::file::submit::SyncJob;
use crate::file::writeback::{FLUSH_INODES, is_of_one_file, owed_filter};
use crate::format::BLOCK_BYTES_U64;
use crate::inode::Inode;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Clock, Condvar, JoinHandle, Mutex, OnPanic, give_way, spawn, wait_for};
use crate::txn::Lsn;
use crate::txn::checkpoint::is_refusal;
use futile::Futile;
use jobs::JobQueue;
pub use jobs::Jobs;

/// Pages of given inodes that are written together.
const FLUSH_PAGES: u64 = 4096;
/// Pages that a flusher writes before it looks after something else: 64 MiB.
const TURN_PAGES: u64 = 16_384;
/// Pages that one round of bringing logged pages home writes: scattered ones hold a block of the log each meanwhile, and all of them
/// may be on their way to the disk at once.
const HOME_PAGES: u64 = 256;
/// Inodes that one round of bringing logged pages home looks at.
const HOME_INODES: usize = 4096;
/// Logged pages of an inode that are looked through one by one.
const FEW_PAGES: usize = 8;
/// How often, and for how long each time, a writer waits for a clean page where memory is dear: a millisecond in all.
const CLEAN_PAUSES: u32 = 20;
const CLEAN_PAUSE_US: u64 = 50;
/// How often the flusher looks for old dirty pages.
const FLUSH_INTERVAL_US: u64 = 1_000_000;
/// Rounds of the flusher after which a page counts as old.
const OLD_ROUNDS: u64 = 5;
/// So many checkpoints in a row that have released nothing of the log are the last that somebody waits for. The first may have begun before
/// there was anything to release.
const VAIN_CHECKPOINTS: u32 = 4;
/// No engine leaves a log like that: the room that checkpoints need for it is kept.
const FULL_FOR_GOOD: &str = "the log is full of pages, and has no room for bringing them home: open the volume for reading only, and \
                             copy its files to another";
/// How long somebody who can free no page himself lets others go on, who have them in their hands.
const OTHERS_PAUSE_US: u64 = 100;
/// How long whoever waits for a checkpoint to release log space waits before it looks again.
const LOG_PAUSE_US: u64 = 1_000;
/// A checkpoint that the device has refused something is tried again after so long at the earliest: each attempt writes what it can.
const REFUSED_PAUSE_US: u64 = 100_000;
/// After so many it asks for room whatever they have released.
const LOG_PATIENCE_CHECKPOINTS: u64 = 4;
/// Longest wait between two looks at a condition that somebody else changes.
const PATIENCE_US: u64 = 50_000;

/// A kind of background work, for [`crate::Volume::background_step`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackgroundWork {
    /// Frames that somebody asked for asynchronously.
    Log,
    /// Dirty pages go home.
    Writeback,
    /// One phase of a checkpoint.
    Checkpoint,
    /// As `Checkpoint`; one that begins leaves in the log what is new there, as one does that log pressure has asked for.
    PartialCheckpoint,
    /// Logged pages go home because the log fills up, whatever a checkpoint under way is doing.
    EarlyHome,
    /// Of `Log` only what never waits for anybody: frames, flushes and callbacks whose turn it is.
    Frames,
    /// An unlinked inode is purged.
    Purge,
}

/// Who is asked for background work. Each has a wake-up of its own: an fsync that asks for writeback wakes one thread, not all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Worker {
    Checkpointer,
    Flusher,
    /// Writes dirty pages home beside the flusher.
    SecondFlusher,
    Cleaner,
    /// The threads for deferred syncs, which look at the queue instead of a signal.
    Syncers,
    /// Does small ones of them only, so that these never wait for all the data of others.
    SmallSyncer,
}

/// How many [`Worker`]s there are.
const WORKERS: usize = Worker::SmallSyncer as usize + 1;

#[derive(Default)]
struct Signals {
    /// Who was asked and has not taken notice yet.
    asked: [bool; WORKERS],
    stop: bool,
}

/// What a thread runs.
type Body = fn(&Arc<Engine>);

/// Threads, and what they are asked to do.
pub struct Background {
    signals: Mutex<Signals>,
    wake: [Condvar; WORKERS],
    progress_epoch: Mutex<u64>,
    progressed: Condvar,
    threads: Mutex<Vec<JoinHandle<()>>>,
    running: AtomicBool,
    /// The volume was closed, or dropped.
    ended: AtomicBool,
    jobs: Mutex<JobQueue<SyncJob>>,
    limits: Limits,
    debt: Mutex<DelayDebt>,
    /// A checkpoint is wanted because the log fills up.
    log_needs_room: AtomicBool,
    /// Ranges handed to background writeback.
    pub handover: Handover,
    /// What background writeback may have in flight.
    pub pacing: Pacing,
    /// Who brings logged pages home: flusher or checkpointer. Taken outside of all locks but the checkpointer's role, so a
    /// checkpoint that holds it knows that none of them is under way.
    pub home_role: Mutex<()>,
    /// How often writeback or a checkpoint has failed, and why the last time. A leaf.
    failed: Mutex<(u64, Option<Error>)>,
}

impl Background {
    /// No threads yet.
    pub fn new(limits: Limits) -> Self {
        Self {
            signals: Mutex::new(Signals::default()),
            wake: std::array::from_fn(|_| Condvar::new()),
            progress_epoch: Mutex::new(0),
            progressed: Condvar::new(),
            threads: Mutex::new(Vec::new()),
            running: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            jobs: Mutex::default(),
            limits,
            debt: Mutex::new(DelayDebt::default()),
            log_needs_room: AtomicBool::new(false),
            handover: Handover::default(),
            pacing: Pacing::default(),
            home_role: Mutex::new(()),
            failed: Mutex::default(),
        }
    }

    /// Writeback or a checkpoint has failed.
    pub fn note_failure(&self, error: &Error) {
        let mut failed = self.failed.lock();
        failed.0 += 1;
        failed.1 = Some(error.clone());
    }

    /// How often that happened, and why the last time.
    fn failures(&self) -> (u64, Option<Error>) {
        self.failed.lock().clone()
    }

    /// Somebody else does the background work.
    pub fn has_threads(&self) -> bool {
        self.running.load(Ordering::Acquire)
    }

    /// Asks the threads to end.
    fn stop(&self) {
        self.signals.lock().stop = true;
        self.wake_workers();
    }

    /// Asks for work; wakes the worker only if it was not asked already.
    fn ask(&self, worker: Worker) {
        let was_asked = std::mem::replace(&mut self.signals.lock().asked[worker as usize], true);
        if !was_asked {
            self.wake[worker as usize].notify_all();
        }
    }

    fn wake_workers(&self) {
        for wake in &self.wake {
            wake.notify_all();
        }
    }

    /// Asks for a checkpoint, for whoever has said that he waits for it (see [`crate::txn::checkpoint::Checkpointer::goal`]).
    pub fn request_checkpoint(&self) {
        self.ask(Worker::Checkpointer);
    }

    /// Asks for a checkpoint because the log fills up, or space is short: it brings home what is older than the horizon.
    pub fn request_room(&self) {
        self.log_needs_room.store(true, Ordering::Release);
        self.ask(Worker::Checkpointer);
    }

    /// Whether the checkpoint that begins now was asked for by [`Background::request_room`].
    pub fn take_request_for_room(&self) -> bool {
        self.log_needs_room.swap(false, Ordering::AcqRel)
    }

    /// Asks the flusher for what is its alone: pages handed over, and logged pages that should go home.
    pub fn request_flush(&self) {
        self.ask(Worker::Flusher);
    }

    /// Asks for writeback of dirty pages, of which there are too many.
    fn request_writeback(&self) {
        self.ask(Worker::Flusher);
        self.ask(Worker::SecondFlusher);
    }

    /// There is something to purge.
    pub fn wake_cleaner(&self) {
        self.ask(Worker::Cleaner);
    }

    /// Leaves a sync to the sync threads. `is_small`: what it has to write fits into a frame.
    ///
    /// # Errors
    /// The job, which nobody will do: see [`Background::end_jobs`].
    pub fn defer(&self, job: SyncJob, is_small: bool) -> std::result::Result<(), SyncJob> {
        self.jobs.lock().add(job, is_small)?;
        // Whoever was about to sleep has seen the job, or sleeps once it lets this lock go.
        drop(self.signals.lock());
        self.wake[Worker::Syncers as usize].notify_one();
        if is_small {
            self.wake[Worker::SmallSyncer as usize].notify_one();
        }
        Ok(())
    }

    /// The threads have ended: nothing can be deferred any more. Answers what is left.
    pub fn end_jobs(&self) -> Vec<SyncJob> {
        self.ended.store(true, Ordering::Release);
        self.jobs.lock().end()
    }

    /// The threads have ended for good.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// The oldest deferred sync among `jobs`.
    pub fn next_job(&self, jobs: Jobs) -> Option<SyncJob> {
        self.jobs.lock().next(jobs)
    }

    /// Wakes everybody (the volume was shut down).
    pub fn wake_all(&self) {
        self.wake_workers();
        self.progress();
    }

    /// Pages became clean, or space free: whoever waits at the entry looks again.
    pub fn progress(&self) {
        *self.progress_epoch.lock() += 1;
        self.progressed.notify_all();
    }

    pub(crate) fn moment(&self) -> u64 {
        *self.progress_epoch.lock()
    }

    /// Waits for progress since `moment`, or a while.
    pub(crate) fn wait_progress(&self, moment: u64) {
        let mut epoch = self.progress_epoch.lock();
        if *epoch == moment {
            wait_for(&self.progressed, &mut epoch, PATIENCE_US);
        }
    }

    /// Waits until `worker` is asked for something, `timeout_us` have passed or it is time to stop. False: stop.
    fn wait_asked(&self, worker: Worker, clock: &dyn Clock, timeout_us: u64) -> bool {
        let asked = |signals: &mut Signals| std::mem::take(&mut signals.asked[worker as usize]);
        self.wait_until(worker, clock, timeout_us, asked)
    }

    /// As [`Background::wait_asked`], until `ready`.
    fn wait_until(
        &self,
        worker: Worker,
        clock: &dyn Clock,
        timeout_us: u64,
        ready: impl Fn(&mut Signals) -> bool,
    ) -> bool {
        let mut left_us = timeout_us;
        let wake = &self.wake[worker as usize];
        let began_ns = clock.monotonic_ns();
        let mut signals = self.signals.lock();
        loop {
            if signals.stop {
                return false;
            }
            if ready(&mut signals) || left_us == 0 || wait_for(wake, &mut signals, left_us) {
                return !signals.stop;
            }
            // Woken for others: what they are woken for must not lengthen the wait.
            let waited_us = clock.monotonic_ns().saturating_sub(began_ns) / 1000;
            left_us = timeout_us.saturating_sub(waited_us);
        }
    }
}

/// What somebody has seen who waits for log space.
#[derive(Debug, Default)]
pub struct LogShortage {
    /// Checkpoints in a row that have released nothing, though nobody else had any room.
    vain_checkpoints: u32,
}

impl Engine {
    /// Starts the threads.
    pub fn start_background(self: &Arc<Self>) -> Result<()> {
        self.log.start_thread()?;
        self.background.running.store(true, Ordering::Release);
        let mut bodies: Vec<(&str, Body)> = vec![
            ("weir-checkpoint", Self::checkpointer_loop),
            ("weir-flush", Self::flusher_loop),
            ("weir-flush-1", Self::second_flusher_loop),
            ("weir-clean", Self::cleaner_loop),
            ("weir-sync-0", Self::sync_loop),
            ("weir-sync-1", Self::sync_loop),
            ("weir-sync-small", Self::small_sync_loop),
        ];
        if self.pool.has_full_slabs() {
            bodies.push(("weir-pages", Self::preparer_loop));
        }
        for (name, body) in bodies {
            let engine = self.clone();
            let thread = spawn(name, move || {
                let _ends_all = OnPanic::new(|| engine.shut_down(PANICKED));
                give_way(0);
                body(&engine);
            })?;
            self.background.threads.lock().push(thread);
        }
        Ok(())
    }

    /// Stops the threads after what they are doing.
    pub fn stop_background(&self) {
        // From here on whoever waits for background work does it: one thread may wait for another that has
        // ended already.
        self.background.running.store(false, Ordering::Release);
        self.background.stop();
        self.pool.wake_preparer();
        let threads = std::mem::take(&mut *self.background.threads.lock());
        for thread in threads {
            // A thread that panicked has shut the volume down; its work is done by the log at recovery.
            let _ = thread.join();
        }
        self.log.stop();
        // Nobody else does what is left.
        while self.log.drive() {}
    }

    fn checkpointer_loop(self: &Arc<Self>) {
        let interval_us = u64::from(self.options.checkpoint_interval_s.max(1)) * 1_000_000;
        loop {
            if !self.background.wait_asked(Worker::Checkpointer, &*self.clock, interval_us) {
                return;
            }
            let waits = self.checkpointer.waits();
            if self.is_shutdown.load(Ordering::Acquire) || !self.checkpoint_wanted() {
                self.skip_checkpoint(waits);
                continue;
            }
            // An error shuts the volume down or leaves the work for the next attempt.
            let ended = loop {
                match self.checkpoint_step() {
                    Ok(true) => {}
                    ended => break ended,
                }
            };
            let is_refused = ended.is_err_and(|error| is_refusal(&error));
            let never = |_: &mut Signals| false;
            if is_refused
                && !self.background.wait_until(
                    Worker::Checkpointer,
                    &*self.clock,
                    REFUSED_PAUSE_US,
                    never,
                )
            {
                return;
            }
        }
    }

    fn flusher_loop(self: &Arc<Self>) {
        let mut round_began_ns = self.clock.monotonic_ns();
        loop {
            // Ranges that were handed over wait a moment for company.
            let gathering = !self.background.handover.is_empty();
            let timeout_us = if gathering { handover::PATIENCE_US } else { FLUSH_INTERVAL_US };
            let go_on = self.background.wait_asked(Worker::Flusher, &*self.clock, timeout_us);
            if gathering || self.background.handover.is_due() || !go_on {
                // An error was noted with the file it concerns.
                let _ = self.drain_handover();
            }
            if !go_on {
                return;
            }
            loop {
                if self.is_shutdown.load(Ordering::Acquire) || !matches!(self.relieve(), Ok(1..)) {
                    break;
                }
            }
            let now_ns = self.clock.monotonic_ns();
            if now_ns.saturating_sub(round_began_ns) >= FLUSH_INTERVAL_US * 1000 {
                round_began_ns = now_ns;
                self.flush_old();
            }
        }
    }

    /// A second flusher for dirty pages: while one of them waits for the device, the other takes pages and computes
    /// their checksums.
    fn second_flusher_loop(self: &Arc<Self>) {
        loop {
            let worker = Worker::SecondFlusher;
            if !self.background.wait_asked(worker, &*self.clock, FLUSH_INTERVAL_US) {
                return;
            }
            while self.wants_writeback() && !self.is_shutdown.load(Ordering::Acquire) {
                if !matches!(self.flush_dirty(|| true), Ok(1..)) {
                    break;
                }
            }
        }
    }

    /// Writes some of what there is too much of: dirty pages in memory, logged pages in the log. Answers how many.
    fn relieve(&self) -> Result<u64> {
        let home_pages = self.bring_early_home()?;
        // What was handed over does not wait for the rest.
        let is_alone = || !self.background.handover.is_due();
        let flushed_pages = if self.wants_writeback() { self.flush_dirty(is_alone)? } else { 0 };
        Ok(home_pages + flushed_pages)
    }

    /// Brings logged pages home that are old enough for how full the log is. Answers how many.
    pub fn bring_early_home(&self) -> Result<u64> {
        let Some(up_to) = self.home_horizon(self.log_bytes()) else { return Ok(0) };
        let _role = self.background.home_role.lock();
        let owing = self.store.obligations.inodes_up_to(up_to, HOME_PAGES as usize);
        let found = self.send_early_home(&self.dirty.find(&owing), up_to);
        let pages = match found.and_then(|pages| self.search_early_home(pages, up_to)) {
            // Waiting for log space would be waiting for the checkpoint, which waits for the role.
            Err(Error::WouldBlock) => 0,
            result => result?,
        };
        self.counters.early_home_pages.add(pages);
        Ok(pages)
    }

    /// If no `pages` were sent home, looks through all that is dirty for some: for those of operations on several inodes.
    fn search_early_home(&self, mut pages: u64, up_to: u64) -> Result<u64> {
        let mut left = self.dirty.count();
        while left > 0 && pages == 0 {
            let wanted = |inode: &Inode| owes_up_to(inode, up_to);
            let (inodes, looked) =
                self.dirty.next_batch_of(HOME_PAGES as usize, HOME_INODES, wanted);
            left = left.saturating_sub(looked.max(1));
            pages = self.send_early_home(&inodes, up_to)?;
        }
        Ok(pages)
    }

    fn send_early_home(&self, inodes: &[Arc<Inode>], up_to: u64) -> Result<u64> {
        self.flush_inodes_in(inodes, owed_filter(up_to), (HOME_PAGES, Room::NoWait))
    }

    /// Up to which operation logged pages should go home now, with so much of the log used; none if all of these are, or if it is too early
    /// to begin.
    fn home_horizon(&self, log_bytes: u64) -> Option<u64> {
        let due_bytes = self.background.limits.due_log_bytes(log_bytes)?;
        let oldest = self.store.obligations.oldest()?;
        let due = self.log.lsn_behind(due_bytes / BLOCK_BYTES_U64)?;
        let durable = self.log.durable_lsn();
        if oldest > due.min(durable) {
            return None;
        }
        Some(self.horizon()?.min(durable))
    }

    /// The newest operation that does not lie in the part of the log that may keep its pages.
    fn horizon(&self) -> Option<u64> {
        let kept_bytes = self.background.limits.kept_log_bytes(self.log_bytes())?;
        self.log.lsn_behind(kept_bytes / BLOCK_BYTES_U64)
    }

    /// Up to which operation a checkpoint that is to make room in the log brings logged pages home.
    pub fn home_limit(&self) -> u64 {
        self.horizon().unwrap_or_else(|| self.log.last_lsn())
    }

    /// Writes what has been dirty for some rounds.
    fn flush_old(&self) {
        let old = self.dirty.begin_round(OLD_ROUNDS);
        for inodes in old.chunks(FLUSH_INODES) {
            // One that cannot be written is no reason for the others to stay in memory.
            if self.flush_inodes(inodes, UNLOGGED).is_err_and(|error| !is_of_one_file(&error)) {
                return;
            }
        }
    }

    fn sync_loop(self: &Arc<Self>) {
        self.do_deferred(Worker::Syncers, Jobs::All);
    }

    fn small_sync_loop(self: &Arc<Self>) {
        self.do_deferred(Worker::SmallSyncer, Jobs::Small);
    }

    fn do_deferred(self: &Arc<Self>, worker: Worker, jobs: Jobs) {
        loop {
            let waiting = |_: &mut Signals| self.background.jobs.lock().has(jobs);
            let timeout_us = FLUSH_INTERVAL_US;
            let go_on = self.background.wait_until(worker, &*self.clock, timeout_us, waiting);
            // What was asked for before the end is still done.
            while self.sync_step(jobs) {}
            if !go_on {
                return;
            }
        }
    }

    /// Takes the page faults of fresh memory off readers and writers.
    fn preparer_loop(self: &Arc<Self>) {
        let go_on = || self.background.has_threads();
        self.pool.run_preparer(&*self.clock, go_on, || self.are_syncs_awaited());
    }

    fn cleaner_loop(self: &Arc<Self>) {
        loop {
            if !self.background.wait_asked(Worker::Cleaner, &*self.clock, FLUSH_INTERVAL_US) {
                return;
            }
            while matches!(self.purge_step(), Ok(true)) {}
            self.end_owed_cuts();
        }
    }

    /// More dirty data than should stay in memory.
    pub fn wants_writeback(&self) -> bool {
        self.background.limits.wants_writeback(&self.pressure())
    }

    /// Writers are delayed, or wait, until pages are clean or a checkpoint has ended.
    pub fn holds_writers_up(&self) -> bool {
        let demand = Demand { data_bytes: BLOCK_BYTES_U64 };
        self.background.limits.admit(&self.pressure(), demand).delay_ns > 0
    }

    fn dirty_bytes(&self) -> u64 {
        self.dirty_pages.load(Ordering::Acquire) * BLOCK_BYTES_U64
    }

    fn log_bytes(&self) -> u64 {
        let fill = self.log.fill();
        (fill.used_blocks + fill.queued_blocks) * BLOCK_BYTES_U64
    }

    fn pressure(&self) -> Pressure {
        let delta = self.store.delta_size();
        Pressure {
            dirty_bytes: self.dirty_bytes(),
            delta_bytes: (delta.running_bytes + delta.frozen_bytes) as u64,
            log_bytes: self.log_bytes(),
        }
    }

    /// How full the operations' part of the log is, in percent.
    pub fn log_percent(&self, log_bytes: u64) -> u64 {
        self.background.limits.log_percent(log_bytes)
    }

    /// Memory that the delta may take while the log is replayed.
    pub fn replayed_delta_bytes(&self) -> u64 {
        self.background.limits.replayed_delta_bytes()
    }

    /// Who puts data into the log and does not wait: asks for what empties it, from where others are held up. Answers how many bytes of it
    /// are used.
    pub fn ask_for_log_space(&self) -> u64 {
        let log_bytes = self.log_bytes();
        let others_wait = self.background.limits.log_delay_ns(log_bytes, 1) > 0;
        if others_wait && self.background.has_threads() {
            self.ask_to_empty_log(log_bytes);
        }
        log_bytes
    }

    /// Asks for whatever should be done with so much of the log used.
    fn ask_to_empty_log(&self, log_bytes: u64) {
        if self.home_horizon(log_bytes).is_some() {
            self.background.request_flush();
        }
        let pressure = Pressure { log_bytes, ..Pressure::default() };
        if self.background.limits.wants_checkpoint(&pressure) {
            self.background.request_room();
        }
    }

    /// So much of the log is used that who may not wait leaves it to somebody who may, and waits as long as anybody is delayed: what went on
    /// would fill the log to its end, and there everybody waits for a whole checkpoint.
    pub fn log_holds_up(&self, log_bytes: u64) -> bool {
        self.background.has_threads() && self.background.limits.log_delay_is_longest(log_bytes)
    }

    /// The entry of a sync that puts `blocks` into the log: asks for what empties it early enough, and waits in proportion
    /// to how full it is. The caller holds at most `ops` locks.
    pub fn delay_for_log(&self, blocks: u64) {
        if !self.background.has_threads() {
            return;
        }
        let log_bytes = self.log_bytes();
        self.ask_to_empty_log(log_bytes);
        let delay_ns = self.background.limits.log_delay_ns(log_bytes, blocks);
        if delay_ns == 0 {
            return;
        }
        self.wait_for_log(Some(blocks));
        let sleep_us = self.background.debt.lock().add(delay_ns);
        if sleep_us > 0 {
            self.counters.log_delay_us.record(sleep_us);
            self.clock.sleep_us(sleep_us);
        }
    }

    /// Waits while the log is too full for `blocks` more, or for what nobody waits for (`None`), until a checkpoint has released some of it. Not
    /// for ever: where checkpoints fail, or some have released too little, admission says why, or has the log emptied. The caller holds at
    /// most `ops` locks.
    pub fn wait_for_log(&self, blocks: Option<u64>) {
        let mut waited_us = 0;
        let failures = self.checkpointer.failures();
        let last = self.checkpointer.completed() + LOG_PATIENCE_CHECKPOINTS;
        while self.checkpointer.failures() == failures && self.checkpointer.completed() < last {
            // What a frame may leave unused at the end of the ring is up to admission: in a small ring that is much, for as long as nothing is
            // appended.
            let fill = self.log.fill();
            let used_blocks = fill.used_blocks + fill.queued_blocks + fill.admitted_blocks;
            let log_bytes = used_blocks * BLOCK_BYTES_U64;
            let is_refused = self.background.limits.log_refuses(log_bytes, blocks);
            if !is_refused || !self.background.has_threads() || self.check_writable().is_err() {
                break;
            }
            self.ask_to_empty_log(log_bytes);
            self.clock.sleep_us(LOG_PAUSE_US);
            waited_us += LOG_PAUSE_US;
        }
        if waited_us > 0 {
            self.counters.log_delay_us.record(waited_us);
        }
    }

    /// Writes one batch of dirty pages home, those that were handed over first. Answers how many.
    pub fn flush_batch(&self) -> Result<u64> {
        if self.options.read_only {
            return Ok(0);
        }
        match self.drain_handover()? {
            0 => self.flush_dirty(|| true),
            pages => Ok(pages),
        }
    }

    /// Writes dirty pages home, those first that the log does not have: about [`TURN_PAGES`], or less where there are not too many any
    /// more, or not to `go_on`; where rounds are small on purpose they are wanted. Answers how many.
    fn flush_dirty(&self, go_on: impl Fn() -> bool) -> Result<u64> {
        let is_wanted = || self.options.round_pages.is_some() || self.wants_writeback();
        let go_on = |pages| pages < TURN_PAGES && is_wanted() && go_on();
        match self.flush_while(UNLOGGED, go_on)? {
            0 => self.flush_while(RunFilter::default(), go_on),
            pages => Ok(pages),
        }
    }

    /// Writes dirty pages of `inodes` home, together.
    ///
    /// # Errors
    /// One that struck, after the others were written where it concerns one of them.
    pub fn flush_inodes(
        &self,
        inodes: &[Arc<crate::inode::Inode>],
        filter: RunFilter,
    ) -> Result<u64> {
        self.flush_inodes_in(inodes, filter, (FLUSH_PAGES, Room::Normal))
    }

    /// As [`Engine::flush_inodes`], about so many pages, in this part of the log.
    fn flush_inodes_in(
        &self,
        inodes: &[Arc<crate::inode::Inode>],
        filter: RunFilter,
        (most_pages, room): (u64, Room),
    ) -> Result<u64> {
        let mut pieces = Vec::new();
        let mut pages = 0;
        let mut result = Ok(());
        for inode in inodes {
            let budget = (most_pages.saturating_sub(pages), room);
            match self.collect(inode, 0..u64::MAX, filter, budget, &mut pieces) {
                Ok(collected) => {
                    pages += collected.pages;
                    if !collected.complete {
                        break;
                    }
                }
                Err(error) => {
                    let concerns_more = !is_of_one_file(&error);
                    if result.is_ok() || concerns_more {
                        result = Err(error);
                    }
                    if concerns_more {
                        break;
                    }
                }
            }
            if pages >= most_pages {
                break;
            }
        }
        self.write_out(&mut pieces, IoClass::Writeback);
        self.settle(pieces)?;
        result.map(|()| pages)
    }

    /// The one place where writers wait for writeback: a smooth delay that grows with what is dirty, and a wait at the
    /// hard limit. `data_bytes`: what the caller will dirty. The caller holds at most `ops` locks.
    ///
    /// # Errors
    /// The volume is shut down, or nothing of what is waited for succeeds.
    pub fn throttle(&self, data_bytes: u64) -> Result<()> {
        let limits = &self.background.limits;
        if data_bytes > 0 && self.dirty_bytes() <= limits.writeback_start_bytes() {
            return Ok(());
        }
        let mut futile = None;
        loop {
            let moment = self.background.moment();
            let pressure = self.pressure();
            let admission = limits.admit(&pressure, Demand { data_bytes });
            if limits.wants_writeback(&pressure) {
                self.background.request_writeback();
            }
            if limits.wants_checkpoint(&pressure) {
                self.background.request_room();
            }
            if admission.delay_ns > 0 && self.background.has_threads() {
                let sleep_us = self.background.debt.lock().add(admission.delay_ns);
                if sleep_us > 0 {
                    self.counters.throttled.add(1);
                    self.counters.throttle_us.record(sleep_us);
                    self.clock.sleep_us(sleep_us);
                }
            }
            if !admission.must_wait {
                return Ok(());
            }
            self.check_writable()?;
            if self.background.has_threads() {
                let begun = || Futile::new(self.background.failures().0);
                let futile = futile.get_or_insert_with(begun);
                self.background.wait_progress(moment);
                let is_better = self.background.moment() != moment;
                let (failures, last) = self.background.failures();
                if let (true, Some(error)) = (futile.look(failures, is_better), last) {
                    return Err(error);
                }
            } else if limits.wants_writeback(&pressure) && self.flush_batch()? > 0 {
                // Made some progress; look again.
            } else {
                self.wait_checkpoint(self.checkpointer.goal())?;
                // What is left may be on its way home, by somebody else.
                self.await_others(moment);
            }
        }
    }

    /// Waits until a checkpoint has released log space. Where there was none to release, and others have the room who have been let in
    /// and are not in the log yet, lets them go on.
    ///
    /// # Errors
    /// As [`Engine::wait_checkpoint`]; or several in a row have released nothing, and nobody else has any room: what they could not bring
    /// home stays in the log.
    pub fn relieve_log(&self, shortage: &mut LogShortage) -> Result<()> {
        self.counters.log_stalls.add(1);
        // The end of the one under way may be enough; the caller looks again.
        let next = self.checkpointer.next_goal();
        self.timed_stall(|| {
            let before_blocks = self.log.fill().used_blocks;
            let before_sequence = self.replay_sequence();
            let (before_failures, _) = self.checkpointer.home_failures();
            self.wait_checkpoint(next)?;
            let fill = self.log.fill();
            if fill.used_blocks < before_blocks || self.replay_sequence() != before_sequence {
                shortage.vain_checkpoints = 0;
                return Ok(());
            }
            if fill.admitted_blocks > 0 || fill.has_open_chain {
                self.clock.sleep_us(OTHERS_PAUSE_US);
                return Ok(());
            }
            shortage.vain_checkpoints += 1;
            if shortage.vain_checkpoints < VAIN_CHECKPOINTS {
                return Ok(());
            }
            let (failures, failure) = self.checkpointer.home_failures();
            let refused = failure.filter(|_| failures > before_failures);
            Err(refused.unwrap_or_else(|| Error::Corrupt(FULL_FOR_GOOD.into())))
        })
    }

    /// Of the frame with which the log begins.
    fn replay_sequence(&self) -> u64 {
        self.superblock.lock().replay.sequence
    }

    /// Makes blocks available to `class` that only wait for something: purges, writeback, and a checkpoint. False if there
    /// is nothing to hope for.
    pub fn relieve_space(&self, class: ReserveClass) -> Result<bool> {
        self.counters.space_stalls.add(1);
        self.timed_stall(|| {
            self.purge_all()?;
            let totals = self.alloc.totals();
            let pending = totals.pending_free_blocks + totals.reserved_blocks;
            if pending == 0 && self.store.delta_size().running_keys == 0 {
                return Ok(false);
            }
            // A checkpoint frees blocks, and what was kept for it: changes take less room in the trees than
            // was feared.
            let before = self.alloc.room_blocks(class);
            // What the log holds for good is written where it lives, and takes no new block.
            self.commit_log(self.log.last_lsn())?;
            while self.flush_batch()? > 0 {}
            self.wait_checkpoint(self.checkpointer.goal())?;
            Ok(self.alloc.room_blocks(class) > before)
        })
    }

    /// Lets others go on who have something to do that the caller waits for, from `moment` on.
    pub fn await_others(&self, moment: u64) {
        if self.background.has_threads() {
            self.background.wait_progress(moment);
        } else {
            self.clock.sleep_us(OTHERS_PAUSE_US);
        }
    }

    /// Waits until some page can be evicted.
    pub fn relieve_memory(&self) -> Result<()> {
        self.counters.memory_stalls.add(1);
        self.timed_stall(|| {
            if self.options.read_only {
                // Nothing can be written; others are about to be done with what they read.
                self.clock.sleep_us(OTHERS_PAUSE_US);
                return Ok(());
            }
            let moment = self.background.moment();
            if !self.background.has_threads() {
                if self.flush_batch()? == 0 {
                    // Other callers have the pages: [`Engine::make_room`] says for how long that is believed.
                    self.clock.sleep_us(OTHERS_PAUSE_US);
                }
                return Ok(());
            }
            self.background.request_writeback();
            if !self.wants_writeback() {
                self.flush_batch()?;
            }
            self.background.wait_progress(moment);
            Ok(())
        })
    }

    /// Fresh memory is dear, and no page is clean: gives writeback, if there is any, a moment to clean some, as long as a few `pauses` may
    /// take less than making the memory. False: the caller had better make it.
    pub fn await_clean_page(&self, pauses: &mut u32) -> bool {
        let is_coming = self.background.has_threads()
            && (self.wants_writeback() || self.background.handover.pages() > 0);
        if !is_coming || *pauses >= CLEAN_PAUSES {
            return false;
        }
        *pauses += 1;
        self.clock.sleep_us(CLEAN_PAUSE_US);
        true
    }

    fn timed_stall<T>(&self, wait: impl FnOnce() -> Result<T>) -> Result<T> {
        let began = self.clock.monotonic_ns();
        let result = wait();
        let took_ns = self.clock.monotonic_ns().saturating_sub(began);
        self.counters.stall_us.record(took_ns / 1000);
        result
    }
}

/// Whether pages of `inode` may have versions in the log of `lsn` or older that are not home. Does not wait.
fn owes_up_to(inode: &Inode, lsn: Lsn) -> bool {
    let Some(pages) = inode.pages.try_read() else { return true };
    match pages.logged_count() {
        0 => false,
        1..=FEW_PAGES => pages.logged(0..u64::MAX).any(|(_, owed_lsn)| owed_lsn <= lsn),
        _ => true,
    }
}

/// Dirty pages that the log does not have.
const UNLOGGED: RunFilter =
    RunFilter { logged: LoggedFilter::NotLogged, only_towrite: false, skip_writeback: true };
