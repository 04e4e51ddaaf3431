//! The log: operations in, frames on the ring, durability out.
//!
//! [`Log::append`] puts one operation into the open frame and never waits for I/O. [`Log::commit`] makes everything up to
//! an LSN durable: the calling thread writes the open frame with one device write and one flush itself when nobody else is
//! doing so, or waits for whoever is. [`Log::commit_async`] calls back instead; the log threads, or [`Log::drive`] where
//! there are none, do the work. The rules of group commit are in [`core`], the ring's geometry in [`ring`], what the roles
//! do in `writer`, how two of them write at a time in `turns`, data that is written beside frames in [`companion`], reading
//! the log after a crash in [`replay`].
//!
//! **Invariants.** LSNs are dense: one per operation (one per part of a batch), in the order of `append`. Frames are sealed
//! and placed in LSN order, and count in that order; at most two are on their way at a time (`turns`). An operation is in
//! one frame; a batch of several parts starts a frame of its own, so that nothing else depends on frames that replay may
//! have to cut away together.
//!
//! **Locks.** `append` (open and sealed frames, ring), then `core` (group commit). Neither is held
//! over I/O or while a callback runs; both are leaves towards the rest of the engine. The roles of writer and flusher
//! are no locks. [`Log::commit`], [`Log::write_up_to`] and [`Log::drive`] may run other callers' callbacks:
//! call them without holding a lock that a callback takes.

pub mod chain;
#[cfg(all(test, not(feature = "shuttle")))]
mod chain_tests;
pub mod companion;
pub mod core;
mod gather;
mod op;
pub mod replay;
pub mod ring;
#[cfg(feature = "shuttle")]
pub mod schedules;
pub mod stats;
mod tail;
#[cfg(any(test, feature = "shuttle"))]
mod test_device;
#[cfg(all(test, not(feature = "shuttle")))]
mod tests;
mod turns;
#[cfg(all(test, not(feature = "shuttle")))]
mod turns_tests;
mod underway;
mod waiter;
mod writer;

pub use core::Lsn;
pub use op::OpRecords;
pub use ring::{AdmissionClass, LogFull, ReplayPoint, Ring};
pub use stats::{Histogram, HistogramSnapshot, LogStats, LogStatsSnapshot};
pub use waiter::OnDurable;

use crate::device::{Device, DeviceInfo};
use crate::format::frame::FRAME_HEADER_BYTES;
use crate::format::{BLOCK_BYTES, VolumeId};
use crate::mutation::{self, Mutation};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, Clock, Condvar, JoinHandle, Mutex};
use crate::{Error, Result};
use companion::Uncounted;
use core::{Beside, Core, Goal};
use op::Frame;
use ring::LiveFrames;
use std::collections::VecDeque;
use waiter::{Callback, Outbox, Slot};

/// Queued blocks from which frames are written although nobody waits: 1 MiB.
const WRITE_OUT_BLOCKS: u64 = 256;
/// Threads for asynchronous work: one for each thing to do at a time (write, flush, call callbacks).
const LOG_THREADS: usize = 3;
/// Emptied frames that are kept for their memory.
const SPARE_FRAMES: usize = 4;
/// Records from which on a frame gets no more operations: its memory is used again, and never has to grow beyond this
/// (unless one operation alone is larger).
const FRAME_RECORD_BYTES: usize = 512 << 10;

/// Where the log lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogGeometry {
    /// Of the volume.
    pub volume_id: VolumeId,
    /// First block of the ring.
    pub log_start_block: u64,
    /// Blocks of the ring.
    pub log_blocks: u64,
    /// Blocks of the volume.
    pub total_blocks: u64,
}

/// Where an open log goes on: the end of the log that replay found, under the epoch that the
/// superblock has published since.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogStart {
    /// Place, sequence and chain of the next frame.
    pub point: ReplayPoint,
    /// Epoch of all frames from now on.
    pub epoch: u64,
    /// LSN of the next operation; all before it are durable.
    pub next_lsn: Lsn,
    /// Generation of the checkpoint that will contain the next operations.
    pub transaction: u64,
    /// Blocks before `point` that hold frames which replay still needs: they are kept until the first
    /// checkpoint releases them.
    pub live_blocks: u64,
}

/// Blocks that are admitted and not appended yet, and how many hold some: in one word, so that counting the holders costs
/// nothing.
#[derive(Debug)]
struct Ledger(AtomicU64);

impl Ledger {
    /// One holder. Rings have fewer blocks than this.
    const HOLDER: u64 = 1 << 40;

    fn add(&self, blocks: u64) {
        self.0.fetch_add(Self::HOLDER + blocks, Ordering::AcqRel);
    }

    fn take(&self, blocks: u64) {
        self.0.fetch_sub(Self::HOLDER + blocks, Ordering::AcqRel);
    }

    fn blocks(&self) -> u64 {
        self.0.load(Ordering::Acquire) % Self::HOLDER
    }

    fn holders(&self) -> u64 {
        self.0.load(Ordering::Acquire) / Self::HOLDER
    }
}

/// Room in the ring for operations that will be appended. Dropping it gives the room back.
#[derive(Debug)]
#[must_use = "room that is not held is given back at once"]
pub struct Admission {
    blocks: u64,
    ledger: Arc<Ledger>,
}

impl Admission {
    /// Blocks admitted.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Adds what `other` holds.
    pub fn join(&mut self, mut other: Self) {
        self.blocks += std::mem::take(&mut other.blocks);
    }

    /// Takes up to `blocks` out into an admission of its own.
    pub fn split(&mut self, blocks: u64) -> Self {
        let blocks = blocks.min(self.blocks);
        self.blocks -= blocks;
        self.ledger.add(0);
        Self { blocks, ledger: Arc::clone(&self.ledger) }
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.ledger.take(self.blocks);
    }
}

/// A point between two operations: a frame ends here, and the running transaction with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Boundary {
    /// The last LSN before the boundary.
    pub lsn: Lsn,
}

/// How full the ring is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fill {
    /// Size of the ring.
    pub ring_blocks: u64,
    /// From the oldest live frame to the newest.
    pub used_blocks: u64,
    /// In memory, not placed yet.
    pub queued_blocks: u64,
    /// Admitted, not appended yet.
    pub admitted_blocks: u64,
    /// Data that waits to be written beside its frame; not in the ring.
    pub companion_blocks: u64,
    /// What the next frames, up to a quarter of the ring, may leave unused at its end.
    pub waste_blocks: u64,
    /// How many hold that: operations that have been let in and are not in the log yet, and barriers until they have
    /// ended.
    pub writers: u64,
    /// A barrier has not ended: what came after it waits for it to become durable.
    pub has_open_chain: bool,
}

/// What the append lock guards.
#[derive(Debug)]
struct Appender {
    open: Frame,
    sealed: VecDeque<Frame>,
    spare: Vec<Frame>,
    next_lsn: Lsn,
    transaction: u64,
    ring: Ring,
    live: LiveFrames,
    /// What the next frame continues while the one before it is on its way: its sequence number, and the digest of that.
    sent: Option<(u64, u64)>,
    write_out_asked: bool,
    /// See [`chain`].
    chain: Option<chain::OpenChain>,
    /// A boundary waits for the open chain to close: none is opened before.
    boundary_wanted: bool,
}

/// What the core lock guards.
struct Commit {
    core: Core<Arc<Slot>, Callback>,
    shutdown_reason: Option<Error>,
    /// How many log threads were called by `driver_wake` and have not come yet.
    driver_calls: usize,
    stopping: bool,
    /// Threads in [`Log::wait_durable`].
    watchers: usize,
    /// Who has joined the writer, where it waits for its turn.
    joiner: turns::Waiting,
    /// What the writer has written and could not count, because it owes something for data that is missing: who has joined it sees to that.
    owed: Option<Uncounted>,
    /// Callbacks for LSNs of an open chain: the core hears of them when it is closed.
    held: Vec<(Lsn, Callback)>,
    /// The operation up to which writers have taken all, and when the round of the last of them began.
    taken: (Lsn, u64),
    /// What callers wait for that were called to look and have not done so yet: a flush may bring it meanwhile.
    looking: Vec<Lsn>,
    /// Counts what may interest those who wait for a chain to close.
    chain_moment: u64,
}

/// See the module's head.
pub struct Log {
    device: Arc<dyn Device>,
    info: DeviceInfo,
    clock: Arc<dyn Clock>,
    geometry: LogGeometry,
    epoch: u64,
    append: Mutex<Appender>,
    commit: Mutex<Commit>,
    driver_wake: Condvar,
    /// The writer has ended, or who has joined it has no frame on its way any more.
    turn: Condvar,
    durable_changed: Condvar,
    chain_closed: Condvar,
    /// First LSN of the open chain.
    chain_first: AtomicU64,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Log threads run: callbacks may be left to them.
    has_thread: AtomicBool,
    durable: AtomicU64,
    last: AtomicU64,
    shut_down: AtomicBool,
    admitted: Arc<Ledger>,
    /// Frames on their way to the device.
    underway: underway::Underway,
    /// Flushes.
    flushing: underway::Underway,
    /// Blocks that wait to be written beside their frames.
    companion_blocks: AtomicU64,
    /// What could not be written beside a frame is being made up for.
    making_up: AtomicBool,
    /// Counts data writes that a flush has yet to make durable, and how many a flush has covered.
    data_written: AtomicU64,
    data_flushed: AtomicU64,
    stats: LogStats,
}

impl std::fmt::Debug for Log {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Log")
            .field("geometry", &self.geometry)
            .field("last_lsn", &self.last_lsn())
            .field("durable_lsn", &self.durable_lsn())
            .finish_non_exhaustive()
    }
}

impl Log {
    /// A log that goes on at `start`, without a thread.
    pub fn new(
        device: Arc<dyn Device>,
        clock: Arc<dyn Clock>,
        geometry: LogGeometry,
        start: &LogStart,
    ) -> Self {
        let position = start.point.position_blocks;
        let ring = Ring::with_live(geometry.log_blocks, position, start.live_blocks);
        let live = LiveFrames::new(&start.point, &ring);
        let durable = start.next_lsn.saturating_sub(1);
        let appender = Appender {
            open: Frame::default(),
            sealed: VecDeque::new(),
            spare: Vec::new(),
            next_lsn: durable + 1,
            transaction: start.transaction,
            ring,
            live,
            sent: None,
            write_out_asked: false,
            chain: None,
            boundary_wanted: false,
        };
        let commit = Commit {
            core: Core::new(durable),
            shutdown_reason: None,
            driver_calls: 0,
            stopping: false,
            watchers: 0,
            joiner: turns::Waiting::default(),
            owed: None,
            held: Vec::new(),
            taken: (durable, 0),
            looking: Vec::new(),
            chain_moment: 0,
        };
        Self {
            info: device.info(),
            device,
            clock,
            geometry,
            epoch: start.epoch,
            append: Mutex::new(appender),
            commit: Mutex::new(commit),
            driver_wake: Condvar::new(),
            turn: Condvar::new(),
            underway: underway::Underway::default(),
            flushing: underway::Underway::default(),
            durable_changed: Condvar::new(),
            chain_closed: Condvar::new(),
            chain_first: AtomicU64::new(chain::NO_CHAIN),
            threads: Mutex::new(Vec::new()),
            has_thread: AtomicBool::new(false),
            durable: AtomicU64::new(durable),
            last: AtomicU64::new(durable),
            shut_down: AtomicBool::new(false),
            admitted: Arc::new(Ledger(AtomicU64::new(0))),
            companion_blocks: AtomicU64::new(0),
            making_up: AtomicBool::new(false),
            data_written: AtomicU64::new(0),
            data_flushed: AtomicU64::new(0),
            stats: LogStats::default(),
        }
    }

    /// Frames that were there before the log was opened: replay needs them until a checkpoint releases them. Once, before anything is appended.
    /// `first`: where replay has begun; of each frame the last LSN, the place, and the digest.
    pub fn keep_recovered(
        &self,
        first: &ReplayPoint,
        frames: impl Iterator<Item = (Lsn, u64, u64)>,
    ) {
        let mut append = self.append.lock();
        let kept = LiveFrames::with_recovered(first, frames, &append.ring);
        debug_assert_eq!(kept.next_sequence(), append.live.next_sequence());
        debug_assert_eq!(kept.digest(), append.live.digest());
        append.live = kept;
    }

    /// No room: for what is not logged.
    pub fn admit_nothing(&self) -> Admission {
        self.admitted.add(0);
        Admission { blocks: 0, ledger: Arc::clone(&self.admitted) }
    }

    /// Most blocks of one operation, header and records included.
    pub fn max_operation_blocks(&self) -> u64 {
        Ring::max_frame_blocks(self.geometry.log_blocks)
    }

    /// Most bytes of records of one operation without payload.
    pub fn max_op_bytes(&self) -> usize {
        self.max_operation_blocks() as usize * BLOCK_BYTES - FRAME_HEADER_BYTES
    }

    /// Payload pages that always fit into one operation beside their records: a quarter of the frame is left
    /// for those.
    pub fn max_op_payload_blocks(&self) -> u64 {
        self.max_operation_blocks() / 4 * 3
    }

    /// Room for operations of `blocks` in all, each counted by [`OpRecords::blocks`].
    ///
    /// # Errors
    /// The class has filled its part of the ring: a checkpoint has to release some first.
    pub fn admit(
        &self,
        blocks: u64,
        class: AdmissionClass,
    ) -> std::result::Result<Admission, LogFull> {
        // The lock makes check and addition one; giving back needs none.
        let append = self.append.lock();
        append.ring.admissible(blocks, self.admitted.blocks(), class)?;
        self.admitted.add(blocks);
        drop(append);
        Ok(Admission { blocks, ledger: Arc::clone(&self.admitted) })
    }

    /// Appends one operation and returns its LSN. Empties `op`. Never waits for I/O.
    ///
    /// # Errors
    /// The log is shut down; or the operation is empty, larger than a frame, or so much larger than its
    /// admission that the background's share of the ring cannot make up for it: then nothing was
    /// appended and `op` is unchanged.
    pub fn append(&self, op: &mut OpRecords, admission: Admission) -> Result<Lsn> {
        self.append_batch(std::slice::from_mut(op), admission)
    }

    /// Appends an operation too large for a frame, in parts, each of which fits into one. Replay finds all of it or
    /// nothing. Returns the LSN of the last part.
    ///
    /// # Errors
    /// As [`Log::append`].
    pub fn append_batch(&self, parts: &mut [OpRecords], admission: Admission) -> Result<Lsn> {
        if self.shut_down.load(Ordering::Acquire) {
            return Err(self.shutdown_error());
        }
        let max = self.max_operation_blocks();
        let mut blocks = 0;
        for part in &*parts {
            if part.is_empty() || part.blocks() > max {
                return Err(Error::Invalid("log operation: empty or larger than a frame"));
            }
            blocks += part.blocks();
        }
        let count = parts.len();
        let companion_blocks: u64 = parts.iter().map(OpRecords::companion_blocks).sum();
        let mut append = self.append.lock();
        if self.shut_down.load(Ordering::Acquire) {
            // Who has taken this lock after a shutdown has seen all that comes.
            drop(append);
            return Err(self.shutdown_error());
        }
        let short = blocks.saturating_sub(admission.blocks);
        let topped_up = short == 0 || append.makes_up_for(short, &self.admitted);
        if count == 0 || !topped_up {
            return Err(Error::Invalid("log operation: larger than its admission"));
        }
        if companion_blocks > 0 {
            self.companion_blocks.fetch_add(companion_blocks, Ordering::AcqRel);
        }
        if count > 1 {
            append.seal_open();
        }
        for (index, part) in parts.iter_mut().enumerate() {
            append.add(part, max);
            if index + 1 < count {
                append.open.continues = !mutation::active(Mutation::CutBatch);
                append.seal_open();
            }
        }
        let lsn = append.next_lsn - 1;
        self.last.store(lsn, Ordering::Release);
        // Under the lock, so that the blocks are never counted neither as admitted nor as queued.
        drop(admission);
        let write_out = append.asks_for_write_out();
        drop(append);
        stats::add(&self.stats.operations, count as u64);
        if write_out {
            self.request_write_out();
        }
        Ok(lsn)
    }

    /// Waits until everything up to `lsn` is durable, doing the work if nobody else is.
    ///
    /// # Errors
    /// The log is shut down. [`Error::WouldBlock`]: a chain has to end first (see [`companion`]), and there are no threads that see to it.
    pub fn commit(&self, lsn: Lsn) -> Result<()> {
        if lsn <= self.durable_lsn() {
            stats::add(&self.stats.commits_found_durable, 1);
            return Ok(());
        }
        let lsn = lsn.min(self.last_given_out());
        self.wait_chain(lsn, None)?;
        self.reach(|_| Goal::Durable(lsn))
    }

    /// Calls `on_durable` once everything up to `lsn` is durable, or with the error once that cannot happen. The
    /// call comes from a log thread, a caller in [`Log::commit`], or [`Log::drive`]; never from
    /// within this function. Never waits for I/O.
    ///
    /// `patient`: nobody waits for it before [`Log::hurry`]; until then it may be gathered with others for two milliseconds.
    pub fn commit_async(&self, lsn: Lsn, patient: bool, on_durable: OnDurable) {
        // An LSN that does not exist yet would make the drivers write in vain. The first of an open chain will exist.
        let early = mutation::active(Mutation::EarlyBarrier);
        let lsn = lsn.min(if early { self.last_lsn() } else { self.last_given_out() });
        let callback = Callback { on_durable, arrived_ns: self.clock.monotonic_ns() };
        let mut out = Outbox::default();
        let mut commit = self.commit.lock();
        if self.in_open_chain(lsn) && commit.shutdown_reason.is_none() {
            // Whoever closes the chain takes this lock after saying so: it finds the callback.
            commit.held.push((lsn, callback));
            return;
        }
        self.arrive(&mut commit, lsn, callback, patient);
        Self::call(&mut commit, Beside::All, &mut out);
        drop(commit);
        out.send(&self.driver_wake);
    }

    /// A callback arrives. Who comes when the round that covers it has begun has waited for none.
    fn arrive(&self, commit: &mut Commit, lsn: Lsn, callback: Callback, patient: bool) {
        let (taken, began_ns) = commit.taken;
        if lsn <= taken {
            self.stats.queue_ns.record(began_ns.saturating_sub(callback.arrived_ns));
        }
        commit.core.arrive_callback(lsn, callback, patient);
    }

    /// Somebody finds everything durable that it would have to wait for.
    pub fn note_found_durable(&self) {
        stats::add(&self.stats.commits_found_durable, 1);
    }

    /// Somebody waits now for what [`Log::commit_async`] was asked for patiently.
    pub fn hurry(&self) {
        let mut out = Outbox::default();
        let mut commit = self.commit.lock();
        commit.core.hurry();
        Self::call(&mut commit, Beside::All, &mut out);
        drop(commit);
        out.send(&self.driver_wake);
    }

    /// Waits until the frames up to `lsn` are on the device, perhaps in its volatile cache.
    ///
    /// # Errors
    /// The log is shut down.
    pub fn write_up_to(&self, lsn: Lsn) -> Result<()> {
        let goal = Goal::Written(lsn.min(self.last_lsn()));
        self.reach(|_| goal)
    }

    /// The frames up to `lsn` are on the device with all that they need there: the next flush makes them durable.
    pub fn is_complete(&self, lsn: Lsn) -> bool {
        self.commit.lock().core.is_complete(lsn)
    }

    /// Everything up to here is durable.
    pub fn durable_lsn(&self) -> Lsn {
        self.durable.load(Ordering::Acquire)
    }

    /// LSN of the last operation appended.
    pub fn last_lsn(&self) -> Lsn {
        self.last.load(Ordering::Acquire)
    }

    /// The largest LSN that anybody has been told: that of the last operation, or the one that an open chain begins with, which
    /// may belong to no operation before the chain ends.
    pub fn last_given_out(&self) -> Lsn {
        // The chain first: whoever closes it says what the last operation is before saying that it is closed.
        let first = self.chain_first.load(Ordering::Acquire);
        let last = self.last_lsn();
        if first == chain::NO_CHAIN { last } else { last.max(first) }
    }

    /// Watches until `lsn` is durable, without asking for it (but what was asked for patiently is hurried). False when `timeout_us` passed first. Without a
    /// log thread it does the asynchronous work there is and then answers at once.
    ///
    /// # Errors
    /// The log is shut down and `lsn` is not durable.
    pub fn wait_durable(&self, lsn: Lsn, timeout_us: Option<u64>) -> Result<bool> {
        let threaded = self.has_thread.load(Ordering::Acquire);
        while !threaded && self.durable_lsn() < lsn && self.drive() {}
        if self.durable_lsn() < lsn {
            self.hurry();
        }
        let deadline =
            timeout_us.map(|us| self.clock.monotonic_ns().saturating_add(us.saturating_mul(1000)));
        let mut commit = self.commit.lock();
        loop {
            if commit.core.durable() >= lsn {
                return Ok(true);
            }
            if let Some(reason) = &commit.shutdown_reason {
                return Err(reason.clone());
            }
            let now = self.clock.monotonic_ns();
            if !threaded || deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(false);
            }
            commit.watchers += 1;
            match deadline {
                Some(deadline) => {
                    let left_us = (deadline - now).div_ceil(1000);
                    crate::sync::wait_for(&self.durable_changed, &mut commit, left_us);
                }
                None => self.durable_changed.wait(&mut commit),
            }
            commit.watchers -= 1;
        }
    }

    /// Data was written past the log since the last flush: the next commit needs a real flush. Call it
    /// after the write completed and before the operation that names the blocks is appended.
    pub fn note_data_written(&self) {
        self.data_written.fetch_add(1, Ordering::AcqRel);
    }

    /// Where replay has to start to see `lsn`: its frame, or where the next frame will be when
    /// the frame is not written yet. Released LSNs give the oldest live frame.
    pub fn replay_point(&self, lsn: Lsn) -> ReplayPoint {
        let append = self.append.lock();
        append.live.replay_point(lsn, &append.ring)
    }

    /// Replay will never start before `point` again: the durable superblock says so.
    pub fn release_before(&self, point: &ReplayPoint) {
        let mut append = self.append.lock();
        let Appender { live, ring, .. } = &mut *append;
        live.release_before(point, ring);
    }

    /// The last written operation that lies further back than `blocks` from the end of the log, if any does.
    pub fn lsn_behind(&self, blocks: u64) -> Option<Lsn> {
        self.append.lock().live.lsn_behind(blocks)
    }

    /// How full the ring is.
    pub fn fill(&self) -> Fill {
        let append = self.append.lock();
        let admitted_blocks = self.admitted.blocks();
        Fill {
            ring_blocks: append.ring.blocks(),
            used_blocks: append.ring.used_blocks(),
            queued_blocks: append.ring.queued_blocks(),
            admitted_blocks,
            waste_blocks: append.ring.waste_ahead(admitted_blocks),
            companion_blocks: self.companion_blocks.load(Ordering::Acquire),
            writers: self.admitted.holders(),
            has_open_chain: append.chain.is_some(),
        }
    }

    /// Waits until the frames that are on their way to the device are written. Answers how long, in microseconds; none if there were none.
    pub fn let_frames_pass(&self) -> Option<u64> {
        self.underway.let_pass(&*self.clock, underway::FRAME_US)
    }

    /// Waits a little for a flush that is under way. Answers as [`Log::let_frames_pass`].
    pub fn let_flush_pass(&self) -> Option<u64> {
        self.flushing.let_pass(&*self.clock, underway::FLUSH_US)
    }

    /// Counters and histograms.
    pub fn stats(&self) -> &LogStats {
        &self.stats
    }

    /// Callbacks that were not called yet.
    pub fn callbacks_pending(&self) -> usize {
        let commit = self.commit.lock();
        commit.core.callbacks_pending() + commit.held.len()
    }

    /// Why the log is shut down, if it is.
    pub fn shutdown_reason(&self) -> Option<Error> {
        self.commit.lock().shutdown_reason.clone()
    }

    /// Starts the log threads, which do the asynchronous work until [`Log::stop`].
    ///
    /// # Errors
    /// The system has no thread to give.
    pub fn start_thread(self: &Arc<Self>) -> Result<()> {
        let mut threads = self.threads.lock();
        if !threads.is_empty() {
            return Ok(());
        }
        self.commit.lock().stopping = false;
        for _ in 0..LOG_THREADS {
            let log = Arc::clone(self);
            match crate::sync::spawn("weir-log", move || log.run()) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    drop(threads);
                    self.stop();
                    return Err(error);
                }
            }
        }
        self.has_thread.store(true, Ordering::Release);
        Ok(())
    }

    /// Ends the log threads after the asynchronous work there is. Call it before dropping the last
    /// handle: the threads hold one too.
    pub fn stop(&self) {
        let threads = std::mem::take(&mut *self.threads.lock());
        if threads.is_empty() {
            return;
        }
        self.has_thread.store(false, Ordering::Release);
        let mut commit = self.commit.lock();
        commit.stopping = true;
        self.driver_wake.notify_all();
        self.durable_changed.notify_all();
        drop(commit);
        for thread in threads {
            // A log thread that panicked has already reported itself on stderr.
            let _ = thread.join();
        }
        while self.drive() {}
    }
}

impl Appender {
    /// Adds one operation that fits into a frame of `max` blocks, sealing the open one when it is full.
    fn add(&mut self, op: &mut OpRecords, max: u64) {
        let is_full =
            self.open.blocks_with(op) > max || self.open.meta_bytes_with(op) > FRAME_RECORD_BYTES;
        if is_full && !self.open.is_empty() {
            self.seal_open();
        }
        let before = self.open.blocks();
        self.open.add(op, self.next_lsn, self.transaction);
        self.ring.queue(self.open.blocks() - before);
        self.next_lsn += 1;
    }

    /// Whether an admission that is `short` of blocks can still be kept to.
    fn makes_up_for(&self, short: u64, admitted: &Ledger) -> bool {
        self.ring.admissible(short, admitted.blocks(), AdmissionClass::Background).is_ok()
    }

    fn seal_open(&mut self) {
        if !self.open.is_empty() {
            self.open.continues |= self.note_sealed();
            let fresh = self.spare.pop().unwrap_or_default();
            self.sealed.push_back(std::mem::replace(&mut self.open, fresh));
        }
    }

    /// Everything appended so far, as frames to be written.
    fn take_group(&mut self) -> VecDeque<Frame> {
        self.seal_open();
        self.write_out_asked = false;
        std::mem::take(&mut self.sealed)
    }

    /// Takes a written group back for its memory.
    fn recycle(&mut self, mut group: VecDeque<Frame>) {
        let room = SPARE_FRAMES - self.spare.len().min(SPARE_FRAMES);
        self.spare.extend(group.drain(..).take(room));
        if self.sealed.is_empty() {
            self.sealed = group;
        }
    }

    /// True once when the queue grows over the limit.
    fn asks_for_write_out(&mut self) -> bool {
        let limit = WRITE_OUT_BLOCKS.min(self.ring.blocks() / 8);
        let asks = self.ring.queued_blocks() > limit && !self.write_out_asked;
        self.write_out_asked |= asks;
        asks
    }
}
