//! Threads of the background, and how they are asked for something.
//!
//! Threads: three log threads (in `log`), one checkpointer, two flushers, one cleaner, three for deferred syncs, and one that prepares memory; one for
//! barriers (in `barrier`). The checkpointer never
//! waits for log space (it is what makes some), the others may. In manual mode there are no
//! threads, and whoever would wait does the work. What the flushers write is in `flushing`, who waits for room of any kind in `waits`.
//!
//! Lock order: `signals`, then `jobs`; `progress` is a leaf.

mod flushing;
mod futile;
mod jobs;
mod waits;

use crate::cache::throttle::{DelayDebt, Limits};
use crate::engine::Engine;
use crate::error::{CLOSED, Error, PANICKED, Result};
use crate::file::handover::{self, Handover};
use crate::file::paced::Pacing;
use crate::file::submit::SyncJob;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, Clock, Condvar, JoinHandle, Mutex, OnPanic, give_way, spawn, wait_for};
use crate::ticket::run_foreign;
use crate::txn::checkpoint::is_refusal;
use jobs::JobQueue;
pub use jobs::Jobs;
pub use waits::LogShortage;

/// How often the flusher looks for old dirty pages.
const FLUSH_INTERVAL_US: u64 = 1_000_000;
/// A checkpoint that the device has refused something is tried again after so long at the earliest: each attempt writes what it can.
const REFUSED_PAUSE_US: u64 = 100_000;
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
    /// Who brings logged pages home early: one thread at a time, which holds nothing else and waits for no log space. A checkpoint does not
    /// wait for it: what is under way stays owed.
    pub home_role: Mutex<()>,
    /// How often writeback or a checkpoint has failed, and why the last time. A leaf.
    failed: Mutex<(u64, Option<Error>)>,
    /// Pages so far that are not dirty any more.
    pub paid_pages: AtomicU64,
    /// Who wants to hear of that. A leaf.
    listener: Mutex<Listener>,
}

/// Hears of errors: see [`crate::Volume::on_background_error`].
pub type ErrorListener = Arc<dyn Fn(&Error) + Send + Sync>;

/// A listener, and what it was told.
#[derive(Default)]
struct Listener {
    call: Option<ErrorListener>,
    failures: u64,
    shutdown: bool,
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
            paid_pages: AtomicU64::new(0),
            listener: Mutex::default(),
        }
    }

    /// Writeback or a checkpoint has failed.
    pub fn note_failure(&self, error: &Error) {
        let mut failed = self.failed.lock();
        failed.0 += 1;
        failed.1 = Some(error.clone());
    }

    /// How often that happened, and why the last time.
    pub fn failures(&self) -> (u64, Option<Error>) {
        self.failed.lock().clone()
    }

    /// From now on `listener` is told, instead of whoever was.
    pub fn listen(&self, listener: ErrorListener) {
        let listener = Listener { call: Some(listener), ..Listener::default() };
        // The one before is dropped when the lock is free: that may run a program's code.
        let before = std::mem::replace(&mut *self.listener.lock(), listener);
        run_foreign(|| drop(before));
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
            let waited_us = clock.since_ns(began_ns) / 1000;
            left_us = timeout_us.saturating_sub(waited_us);
        }
    }
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
        self.tell_failures();
        let listener = std::mem::take(&mut *self.background.listener.lock());
        run_foreign(|| drop(listener));
    }

    /// Tells the listener, if there is one, what has failed since it was told last, and why the volume was shut down. The caller holds no
    /// locks.
    fn tell_failures(&self) {
        if self.background.listener.lock().call.is_none() {
            return;
        }
        let (failures, last) = self.background.failures();
        let shutdown = self.shutdown.lock().clone().filter(|reason| reason != CLOSED);
        let (call, news) = {
            let mut listener = self.background.listener.lock();
            let Some(call) = listener.call.clone() else { return };
            let has_failed = std::mem::replace(&mut listener.failures, failures) < failures;
            let was_told = std::mem::replace(&mut listener.shutdown, shutdown.is_some());
            let shutdown = shutdown.filter(|_| !was_told).map(Error::Shutdown);
            (call, last.filter(|_| has_failed).into_iter().chain(shutdown))
        };
        for error in news {
            run_foreign(|| call(&error));
        }
        // The last use of one that was replaced meanwhile.
        run_foreign(|| drop(call));
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
            self.look_at_clock();
            self.tell_failures();
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
}
