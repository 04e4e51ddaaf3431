//! Background work and the waits for it.
//!
//! Threads: three log threads (in `log`), one checkpointer, one flusher, one cleaner, two for deferred syncs. The checkpointer never
//! waits for log space (it is what makes some), the others may. In manual mode there are no
//! threads, and whoever would wait does the work.
//!
//! Lock order: `signals`, then `jobs`; `progress` is a leaf.

use crate::cache::map::{LoggedFilter, RunFilter};
use crate::cache::throttle::{DelayDebt, Demand, Limits, Pressure};
use crate::device::IoClass;
use crate::engine::{Engine, Room};
use crate::error::{Error, Result};
use crate::file::submit::SyncJob;
use crate::format::BLOCK_BYTES_U64;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Condvar, JoinHandle, Mutex, spawn, wait_for};
use std::collections::VecDeque;

/// Pages that one round of the flusher writes.
const FLUSH_PAGES: u64 = 4096;
/// Inodes that one round of the flusher looks at.
const FLUSH_INODES: usize = 256;
/// How often the flusher looks for old dirty pages.
const FLUSH_INTERVAL_US: u64 = 1_000_000;
/// Rounds of the flusher after which a page counts as old.
const OLD_ROUNDS: u64 = 5;
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
    /// An unlinked inode is purged.
    Purge,
}

#[derive(Default)]
#[allow(clippy::struct_excessive_bools, reason = "one per kind of thread")]
struct Signals {
    checkpoint: bool,
    flush: bool,
    clean: bool,
    stop: bool,
}

/// What a thread runs.
type Body = fn(&Arc<Engine>);

/// Threads, and what they are asked to do.
pub struct Background {
    signals: Mutex<Signals>,
    wake: Condvar,
    progress_epoch: Mutex<u64>,
    progressed: Condvar,
    threads: Mutex<Vec<JoinHandle<()>>>,
    running: AtomicBool,
    jobs: Mutex<VecDeque<SyncJob>>,
    limits: Limits,
    debt: Mutex<DelayDebt>,
}

impl Background {
    /// No threads yet.
    pub fn new(limits: Limits) -> Self {
        Self {
            signals: Mutex::new(Signals::default()),
            wake: Condvar::new(),
            progress_epoch: Mutex::new(0),
            progressed: Condvar::new(),
            threads: Mutex::new(Vec::new()),
            running: AtomicBool::new(false),
            jobs: Mutex::new(VecDeque::new()),
            limits,
            debt: Mutex::new(DelayDebt::default()),
        }
    }

    /// Somebody else does the background work.
    pub fn has_threads(&self) -> bool {
        self.running.load(Ordering::Acquire)
    }

    fn signal(&self, set: impl FnOnce(&mut Signals)) {
        set(&mut self.signals.lock());
        self.wake.notify_all();
    }

    /// Asks for a checkpoint.
    pub fn request_checkpoint(&self) {
        self.signal(|signals| signals.checkpoint = true);
    }

    /// Asks for writeback.
    pub fn request_flush(&self) {
        self.signal(|signals| signals.flush = true);
    }

    /// There is something to purge.
    pub fn wake_cleaner(&self) {
        self.signal(|signals| signals.clean = true);
    }

    /// Leaves a sync to the sync threads.
    pub fn defer(&self, job: SyncJob) {
        self.jobs.lock().push_back(job);
        self.signal(|_| {});
    }

    /// The oldest deferred sync.
    pub fn next_job(&self) -> Option<SyncJob> {
        self.jobs.lock().pop_front()
    }

    /// Wakes everybody (the volume was shut down).
    pub fn wake_all(&self) {
        self.wake.notify_all();
        self.progress();
    }

    /// Pages became clean, or space free: whoever waits at the entry looks again.
    pub fn progress(&self) {
        *self.progress_epoch.lock() += 1;
        self.progressed.notify_all();
    }

    fn moment(&self) -> u64 {
        *self.progress_epoch.lock()
    }

    /// Waits for progress since `moment`, or a while.
    fn wait_progress(&self, moment: u64) {
        let mut epoch = self.progress_epoch.lock();
        if *epoch == moment {
            wait_for(&self.progressed, &mut epoch, PATIENCE_US);
        }
    }

    /// Waits until `ready` takes a signal, `timeout_us` has passed or it is time to stop. False: stop.
    fn wait_signal(&self, timeout_us: u64, ready: impl Fn(&mut Signals) -> bool) -> bool {
        let mut signals = self.signals.lock();
        loop {
            if signals.stop {
                return false;
            }
            if ready(&mut signals) || wait_for(&self.wake, &mut signals, timeout_us) {
                return !signals.stop;
            }
        }
    }
}

impl Engine {
    /// Starts the threads.
    pub fn start_background(self: &Arc<Self>) -> Result<()> {
        self.log.start_thread()?;
        self.background.running.store(true, Ordering::Release);
        let bodies: [(&str, Body); 5] = [
            ("weir-checkpoint", Self::checkpointer_loop),
            ("weir-flush", Self::flusher_loop),
            ("weir-clean", Self::cleaner_loop),
            ("weir-sync-0", Self::sync_loop),
            ("weir-sync-1", Self::sync_loop),
        ];
        for (name, body) in bodies {
            let engine = self.clone();
            let thread = spawn(name, move || body(&engine))?;
            self.background.threads.lock().push(thread);
        }
        Ok(())
    }

    /// Stops the threads after what they are doing.
    pub fn stop_background(&self) {
        // From here on whoever waits for background work does it: one thread may wait for another that has
        // ended already.
        self.background.running.store(false, Ordering::Release);
        self.background.signal(|signals| signals.stop = true);
        let threads = std::mem::take(&mut *self.background.threads.lock());
        for thread in threads {
            // A thread that panicked has nothing more to say; its work is done by the log at recovery.
            if thread.join().is_err() {
                self.shut_down("a background thread panicked");
            }
        }
        self.log.stop();
        // Nobody else does what is left.
        while self.log.drive() {}
    }

    fn checkpointer_loop(self: &Arc<Self>) {
        let interval_us = u64::from(self.options.checkpoint_interval_s.max(1)) * 1_000_000;
        loop {
            let asked = |signals: &mut Signals| std::mem::take(&mut signals.checkpoint);
            if !self.background.wait_signal(interval_us, asked) {
                return;
            }
            if self.is_shutdown.load(Ordering::Acquire) || !self.checkpoint_wanted() {
                self.skip_checkpoint();
                continue;
            }
            // An error shuts the volume down or leaves the work for the next attempt.
            while matches!(self.checkpoint_step(), Ok(true)) {}
        }
    }

    fn flusher_loop(self: &Arc<Self>) {
        let mut round = 0;
        let mut seen: std::collections::BTreeMap<u64, u64> = std::collections::BTreeMap::new();
        loop {
            let asked = |signals: &mut Signals| std::mem::take(&mut signals.flush);
            if !self.background.wait_signal(FLUSH_INTERVAL_US, asked) {
                return;
            }
            round += 1;
            while self.wants_writeback() && !self.is_shutdown.load(Ordering::Acquire) {
                match self.flush_batch() {
                    Ok(pages) if pages > 0 => {}
                    _ => break,
                }
            }
            self.flush_old(round, &mut seen);
        }
    }

    /// Writes what has been dirty for some rounds.
    fn flush_old(&self, round: u64, seen: &mut std::collections::BTreeMap<u64, u64>) {
        let dirty = self.dirty.all();
        seen.retain(|number, _| dirty.binary_search_by_key(number, |inode| inode.number).is_ok());
        let mut old = Vec::new();
        for inode in dirty {
            let first = *seen.entry(inode.number).or_insert(round);
            if round - first >= OLD_ROUNDS {
                seen.insert(inode.number, round);
                old.push(inode);
            }
        }
        for inodes in old.chunks(FLUSH_INODES) {
            if self.flush_inodes(inodes, UNLOGGED).is_err() {
                return;
            }
        }
    }

    fn sync_loop(self: &Arc<Self>) {
        loop {
            let waiting = |_: &mut Signals| !self.background.jobs.lock().is_empty();
            let go_on = self.background.wait_signal(FLUSH_INTERVAL_US, waiting);
            // What was asked for before the end is still done.
            while self.sync_step() {}
            if !go_on {
                return;
            }
        }
    }

    fn cleaner_loop(self: &Arc<Self>) {
        loop {
            let asked = |signals: &mut Signals| std::mem::take(&mut signals.clean);
            if !self.background.wait_signal(FLUSH_INTERVAL_US, asked) {
                return;
            }
            while matches!(self.purge_step(), Ok(true)) {}
        }
    }

    /// More dirty data than should stay in memory.
    pub fn wants_writeback(&self) -> bool {
        self.background.limits.wants_writeback(&self.pressure())
    }

    fn dirty_bytes(&self) -> u64 {
        self.dirty_pages.load(Ordering::Acquire) * BLOCK_BYTES_U64
    }

    fn pressure(&self) -> Pressure {
        let delta = self.store.delta_size();
        let fill = self.log.fill();
        Pressure {
            dirty_bytes: self.dirty_bytes(),
            delta_bytes: (delta.running_bytes + delta.frozen_bytes) as u64,
            log_bytes: (fill.used_blocks + fill.queued_blocks) * BLOCK_BYTES_U64,
        }
    }

    /// Writes one batch of dirty pages home. Answers how many.
    pub fn flush_batch(&self) -> Result<u64> {
        let inodes = self.dirty.next_batch(FLUSH_INODES);
        let pages = self.flush_inodes(&inodes, UNLOGGED)?;
        if pages > 0 {
            return Ok(pages);
        }
        self.flush_inodes(&self.dirty.next_batch(FLUSH_INODES), RunFilter::default())
    }

    /// Writes dirty pages of `inodes` home, together.
    pub fn flush_inodes(
        &self,
        inodes: &[Arc<crate::inode::Inode>],
        filter: RunFilter,
    ) -> Result<u64> {
        let mut pieces = Vec::new();
        let mut pages = 0;
        let mut result = Ok(());
        for inode in inodes {
            let budget = (FLUSH_PAGES - pages, Room::Normal);
            match self.collect(inode, 0..u64::MAX, filter, budget, &mut pieces) {
                Ok(collected) => {
                    pages += collected.pages;
                    if !collected.complete {
                        break;
                    }
                }
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
            if pages >= FLUSH_PAGES {
                break;
            }
        }
        self.write_out(&mut pieces, IoClass::Writeback);
        self.settle(pieces)?;
        result.map(|()| pages)
    }

    /// The one place where writers wait for writeback: a smooth delay that grows with what is dirty, and a wait at the
    /// hard limit. `data_bytes`: what the caller will dirty. The caller holds at most `ops` locks.
    pub fn throttle(&self, data_bytes: u64) -> Result<()> {
        let limits = &self.background.limits;
        if data_bytes > 0 && self.dirty_bytes() <= limits.writeback_start_bytes() {
            return Ok(());
        }
        loop {
            let moment = self.background.moment();
            let pressure = self.pressure();
            let admission = limits.admit(&pressure, Demand { data_bytes });
            if limits.wants_writeback(&pressure) {
                self.background.request_flush();
            }
            if limits.wants_checkpoint(&pressure) {
                self.background.request_checkpoint();
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
                self.background.wait_progress(moment);
            } else if limits.wants_writeback(&pressure) && self.flush_batch()? > 0 {
                // Made some progress; look again.
            } else {
                self.wait_checkpoint(self.checkpointer.goal())?;
            }
        }
    }

    /// Waits until a checkpoint has released log space.
    pub fn relieve_log(&self) -> Result<()> {
        self.counters.log_stalls.add(1);
        self.timed_stall(|| self.wait_checkpoint(self.checkpointer.goal()))
    }

    /// Makes blocks available that only wait for something: purges, writeback, and a checkpoint. False if there is
    /// nothing to hope for.
    pub fn relieve_space(&self) -> Result<bool> {
        self.counters.space_stalls.add(1);
        self.timed_stall(|| {
            while self.purge_step()? {}
            let totals = self.alloc.totals();
            let pending = totals.pending_free_blocks + totals.reserved_blocks;
            if pending == 0 && self.store.delta_size().running_keys == 0 {
                return Ok(false);
            }
            // A checkpoint frees blocks, and what was kept for it: changes take less room in the trees than
            // was feared.
            let before = self.alloc.user_room_blocks();
            while self.flush_batch()? > 0 {}
            self.wait_checkpoint(self.checkpointer.goal())?;
            Ok(self.alloc.user_room_blocks() > before)
        })
    }

    /// Waits until some page can be evicted.
    pub fn relieve_memory(&self) -> Result<()> {
        self.counters.memory_stalls.add(1);
        self.timed_stall(|| {
            let moment = self.background.moment();
            if !self.background.has_threads() {
                if self.flush_batch()? == 0 && self.dirty_bytes() == 0 {
                    return Err(Error::Io("the page cache is too small for this operation".into()));
                }
                return Ok(());
            }
            self.background.request_flush();
            if !self.wants_writeback() {
                self.flush_batch()?;
            }
            self.background.wait_progress(moment);
            Ok(())
        })
    }

    fn timed_stall<T>(&self, wait: impl FnOnce() -> Result<T>) -> Result<T> {
        let began = self.clock.monotonic_ns();
        let result = wait();
        let took_ns = self.clock.monotonic_ns().saturating_sub(began);
        self.counters.stall_us.record(took_ns / 1000);
        result
    }
}

/// Dirty pages that the log does not have.
const UNLOGGED: RunFilter =
    RunFilter { logged: LoggedFilter::NotLogged, only_towrite: false, skip_writeback: true };
