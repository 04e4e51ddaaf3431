//! The leader's round: take the group, write its frames, flush, acknowledge, hand over. And the
//! thread or step function that leads when only callbacks wait.

use super::core::{Arrival, Flush, Goal, Next, Wake};
use super::op::Frame;
use super::stats::add;
use super::waiter::{Slot, Verdict, Waiter};
use super::{Commit, Log};
use crate::device::IoClass;
use crate::format::frame::FrameHeader;
use crate::format::{BLOCK_BYTES, BLOCK_BYTES_U64};
use crate::mutation::{self, Mutation};
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, MutexGuard};
use crate::{Error, Result};
use std::collections::VecDeque;

/// Attempts to write a frame, each at another place, before the log shuts down.
const WRITE_ATTEMPTS: u32 = 3;
/// Callbacks that a blocked caller calls for others before it leaves the rest to the log thread.
const CALLER_CALLBACKS: usize = 16;
/// Callbacks taken under one lock acquisition.
const CALLBACK_BATCH: usize = 256;

impl Log {
    /// Brings a blocked caller to its goal.
    pub(super) fn reach(&self, goal: Goal) -> Result<()> {
        let arrived_ns = self.clock.monotonic_ns();
        let mut commit = self.commit.lock();
        let verdict = match commit.core.arrive(goal) {
            Arrival::Done => {
                let durable = u64::from(matches!(goal, Goal::Durable(_)));
                add(&self.stats.commits_found_durable, durable);
                return Ok(());
            }
            Arrival::Failed => return Err(reason(&commit)),
            Arrival::Lead => {
                drop(commit);
                Verdict::Lead
            }
            Arrival::Wait => {
                let slot = Arc::new(Slot::default());
                commit.core.park(goal, Waiter::Caller(Arc::clone(&slot)));
                drop(commit);
                slot.wait()
            }
        };
        let (result, started_ns) = match verdict {
            Verdict::Lead => {
                let started_ns = self.clock.monotonic_ns();
                (self.lead(started_ns, Some(goal)), started_ns)
            }
            Verdict::Reached { round_started_ns } => (Ok(()), round_started_ns),
            Verdict::Failed(error) => (Err(error), arrived_ns),
        };
        if result.is_ok() && matches!(goal, Goal::Durable(_)) {
            add(&self.stats.commits, 1);
            self.stats.queue_ns.record(started_ns.saturating_sub(arrived_ns));
            self.stats.commit_ns.record(self.clock.monotonic_ns().saturating_sub(arrived_ns));
        }
        result
    }

    /// One round as the leader. `own` is the blocked caller's own goal.
    fn lead(&self, started_ns: u64, own: Option<Goal>) -> Result<()> {
        let mut group = self.append.lock().take_group();
        let mut wake = Vec::new();
        let flush = self.write_group(&mut group, &mut wake);
        tell_reached(wake.drain(..), started_ns);
        // Without somebody who waits for durability, or after a failure, there is nothing to flush.
        let flushed = flush.map(|(flush, data)| {
            let skip = mutation::active(Mutation::AcknowledgeBeforeFlush);
            (flush, data, if skip { Ok(()) } else { self.flush_device() })
        });
        let mut commit = self.commit.lock();
        match flushed {
            Some((flush, data, Ok(()))) => self.end_flush(&mut commit, flush, data, own, &mut wake),
            Some((_, _, Err(error))) => self.fail(&mut commit, error),
            None => {}
        }
        let result = match own {
            Some(goal) if !commit.core.reached(goal) => Err(reason(&commit)),
            _ => Ok(()),
        };
        let next = commit.core.end_round();
        // The driver is woken for rounds only; for callbacks, whoever leaves some behind does.
        self.wake_driver_if(matches!(next, Next::Driver), &commit);
        drop(commit);
        if let Next::Caller(waiter) = next {
            // First of all: the device is idle until it comes.
            waiter.tell(Verdict::Lead);
        }
        tell_reached(wake, started_ns);
        // Pages go back to their pool before the lock is taken.
        group.retain_mut(Frame::recycle);
        self.append.lock().recycle(group);
        if own.is_some() {
            self.call_back(CALLER_CALLBACKS, started_ns);
        }
        result
    }

    /// Writes all frames of the group. Answers with the flush that is to follow and the data writes it covers.
    fn write_group(
        &self,
        group: &mut VecDeque<Frame>,
        wake: &mut Wake<Waiter>,
    ) -> Option<(Flush, u64)> {
        let mut fua = self.may_force(group.len());
        let mut count = group.len();
        if count == 0 {
            return self.begin_wanted_flush(&self.commit.lock());
        }
        for frame in group.iter_mut() {
            count -= 1;
            let written = self.write_frame(frame, &mut fua);
            let mut commit = self.commit.lock();
            if let Err(error) = written {
                self.fail(&mut commit, error);
                return None;
            }
            if commit.core.is_failed() {
                return None;
            }
            commit.core.frame_written(frame.last_lsn, frame.continues, wake);
            if count > 0 {
                continue;
            }
            if fua {
                // The frame was the only thing on the device that was not durable yet.
                let flush = commit.core.begin_flush();
                let data = self.data_flushed.load(Ordering::Acquire);
                self.end_flush(&mut commit, flush, data, None, wake);
                add(&self.stats.fua_writes, 1);
                return None;
            }
            return self.begin_wanted_flush(&commit);
        }
        None
    }

    fn begin_wanted_flush(&self, commit: &Commit) -> Option<(Flush, u64)> {
        let data = self.data_written.load(Ordering::Acquire);
        commit.core.wants_flush().then(|| (commit.core.begin_flush(), data))
    }

    /// Whether a group of `frames` becomes durable by forced unit access alone: it is one
    /// frame, somebody waits for it, and nothing else in the device's cache has to be durable with it. The group is
    /// sealed, so data noted from now on belongs to later operations.
    fn may_force(&self, frames: usize) -> bool {
        if !self.info.fua || !self.info.volatile_cache || frames != 1 {
            return false;
        }
        let clean =
            self.data_written.load(Ordering::Acquire) == self.data_flushed.load(Ordering::Acquire);
        let commit = self.commit.lock();
        clean && commit.core.wants_durability() && commit.core.all_written_is_durable()
    }

    /// Writes one frame, at another place when that fails. Clears `fua` when it had to move: a
    /// flush then covers whatever the failed write left.
    fn write_frame(&self, frame: &mut Frame, fua: &mut bool) -> Result<()> {
        let blocks = frame.blocks();
        // The padding of the records up to a whole block.
        let meta_bytes = frame.meta.len();
        frame.meta.resize_zeroed(meta_bytes.next_multiple_of(BLOCK_BYTES));
        let mut append = self.append.lock();
        let mut placement = append.ring.place(blocks).map_err(|full| corrupt_ring(&full))?;
        let mut header = FrameHeader {
            volume_id: self.geometry.volume_id,
            epoch: self.epoch,
            sequence: append.live.next_sequence(),
            first_lsn: frame.first_lsn,
            last_lsn: frame.last_lsn,
            transaction: frame.transaction,
            durable_lsn: self.durable.load(Ordering::Acquire),
            prev_digest: append.live.digest(),
            ring_position_blocks: placement.position_blocks,
            meta_bytes: meta_bytes as u32,
            record_count: frame.record_count,
            payload_blocks: frame.payloads.len() as u32,
            continues: frame.continues,
        };
        drop(append);
        let mut attempt = 1;
        loop {
            header.ring_position_blocks = placement.position_blocks;
            let digest = header.seal(&mut frame.meta)?;
            let started_ns = self.clock.monotonic_ns();
            match self.write_blocks(frame, placement.position_blocks, *fua) {
                Ok(()) => {
                    let elapsed_ns = self.clock.monotonic_ns().saturating_sub(started_ns);
                    self.count_frame(blocks, frame.payloads.len() as u64, elapsed_ns);
                    self.append.lock().live.push(frame.last_lsn, placement, digest);
                    return Ok(());
                }
                Err(error) if attempt == WRITE_ATTEMPTS => return Err(error),
                Err(error) => {
                    attempt += 1;
                    *fua = false;
                    add(&self.stats.write_retries, 1);
                    let mut append = self.append.lock();
                    let admitted = self.admitted.load(Ordering::Acquire);
                    let again = append.ring.place_again(placement, admitted);
                    drop(append);
                    // A ring without room for another attempt: the failure stands.
                    placement = again.map_err(|_| error)?;
                }
            }
        }
    }

    /// One device write: header and records, then the payload straight from the page frames.
    fn write_blocks(&self, frame: &Frame, position_blocks: u64, fua: bool) -> Result<()> {
        let offset = (self.geometry.log_start_block + position_blocks) * BLOCK_BYTES_U64;
        let written = if frame.payloads.is_empty() {
            self.device.write(offset, &[&frame.meta], IoClass::Log, fua)
        } else {
            let mut parts: Vec<&[u8]> = Vec::with_capacity(1 + frame.payloads.len());
            parts.push(&frame.meta);
            parts.extend(frame.payloads.iter().map(|page| &**page));
            self.device.write(offset, &parts, IoClass::Log, fua)
        };
        Ok(written?)
    }

    fn count_frame(&self, blocks: u64, payload_blocks: u64, elapsed_ns: u64) {
        add(&self.stats.frames, 1);
        add(&self.stats.frame_bytes, blocks * BLOCK_BYTES_U64);
        add(&self.stats.payload_blocks, payload_blocks);
        self.stats.frame_write_ns.record(elapsed_ns);
        self.stats.blocks_per_frame.record(blocks);
    }

    fn flush_device(&self) -> Result<()> {
        if !self.info.volatile_cache {
            return Ok(());
        }
        let started_ns = self.clock.monotonic_ns();
        self.device.flush()?;
        add(&self.stats.flushes, 1);
        self.stats.flush_ns.record(self.clock.monotonic_ns().saturating_sub(started_ns));
        Ok(())
    }

    /// Flushes the device: all that was written to it before, by anyone, is durable afterwards, and
    /// the durable LSN advances accordingly. Beside a leader's round, not instead of it.
    ///
    /// # Errors
    /// The flush failed, now or before: the log is shut down.
    pub fn flush(&self) -> Result<()> {
        let started_ns = self.clock.monotonic_ns();
        let commit = self.commit.lock();
        if commit.core.is_failed() {
            return Err(reason(&commit));
        }
        let flush = commit.core.begin_flush();
        let data = self.data_written.load(Ordering::Acquire);
        drop(commit);
        let flushed = self.flush_device();
        let mut wake = Vec::new();
        let mut commit = self.commit.lock();
        match flushed {
            Ok(()) => self.end_flush(&mut commit, flush, data, None, &mut wake),
            Err(error) => self.fail(&mut commit, error),
        }
        let failed = commit.core.is_failed().then(|| reason(&commit));
        self.wake_driver_if(commit.core.driver_has_work(), &commit);
        drop(commit);
        tell_reached(wake, started_ns);
        failed.map_or(Ok(()), Err)
    }

    /// Books a flush that succeeded.
    fn end_flush(
        &self,
        commit: &mut MutexGuard<'_, Commit>,
        flush: Flush,
        data: u64,
        own: Option<Goal>,
        wake: &mut Wake<Waiter>,
    ) {
        if commit.core.is_failed() {
            return;
        }
        self.data_flushed.fetch_max(data, Ordering::AcqRel);
        let pending = commit.core.callbacks_waiting();
        let woken = wake.len();
        commit.core.end_flush(flush, wake);
        self.durable.store(commit.core.durable(), Ordering::Release);
        if commit.watchers > 0 {
            self.durable_changed.notify_all();
        }
        let leader = usize::from(matches!(own, Some(Goal::Durable(_))));
        let acknowledged = leader + wake.len() - woken + pending - commit.core.callbacks_waiting();
        if acknowledged > 0 {
            self.stats.commits_per_flush.record(acknowledged as u64);
        }
    }

    /// Shuts the log down: sticky. All parked callers hear of it at once; callbacks are due.
    fn fail(&self, commit: &mut MutexGuard<'_, Commit>, error: Error) {
        if commit.shutdown_reason.is_none() {
            let error = match error {
                Error::Shutdown(_) => error,
                other => Error::Shutdown(other.to_string()),
            };
            commit.shutdown_reason = Some(error);
        }
        self.shut_down.store(true, Ordering::Release);
        let mut wake = Vec::new();
        commit.core.fail(&mut wake);
        for waiter in wake {
            waiter.tell(Verdict::Failed(reason(commit)));
        }
        self.fail_chain(commit);
        self.durable_changed.notify_all();
        self.wake_driver_if(true, commit);
    }

    /// Shuts the log down for a reason outside of it, such as a superblock that could not be written: all
    /// waiters get the error, and nothing becomes durable any more.
    pub fn shut_down(&self, reason: &str) {
        self.fail(&mut self.commit.lock(), Error::Shutdown(reason.to_owned()));
    }

    pub(super) fn shutdown_error(&self) -> Error {
        reason(&self.commit.lock())
    }

    pub(super) fn request_write_out(&self) {
        let mut commit = self.commit.lock();
        let wake = commit.core.request_write_out();
        self.wake_driver_if(wake, &commit);
    }

    pub(super) fn wake_driver_if(&self, wake: bool, commit: &Commit) {
        if wake && commit.driver_parked {
            self.driver_wake.notify_one();
        }
    }

    /// Calls callbacks whose time has come, on behalf of a caller up to `limit` when a log thread can do the
    /// rest. True when it called any.
    fn call_back(&self, limit: usize, started_ns: u64) -> bool {
        let mut called = 0;
        loop {
            let threaded = self.has_thread.load(Ordering::Acquire);
            let mut commit = self.commit.lock();
            if threaded && called >= limit {
                self.wake_driver_if(commit.core.driver_has_work(), &commit);
                return true;
            }
            let room = if threaded { limit - called } else { CALLBACK_BATCH };
            let acks = commit.core.take_acks(room.min(CALLBACK_BATCH));
            if acks.is_empty() {
                return called > 0;
            }
            let failed = commit.core.is_failed().then(|| reason(&commit));
            drop(commit);
            called += acks.len();
            let _finish = FinishAcks(self);
            let now_ns = self.clock.monotonic_ns();
            for (waiter, success) in acks {
                self.call_one(
                    waiter,
                    if success { None } else { failed.as_ref() },
                    now_ns,
                    started_ns,
                );
            }
        }
    }

    fn call_one(&self, waiter: Waiter, failed: Option<&Error>, now_ns: u64, started_ns: u64) {
        let Waiter::Callback { on_durable, arrived_ns } = waiter else { return };
        if failed.is_none() {
            add(&self.stats.async_commits, 1);
            self.stats.async_commit_ns.record(now_ns.saturating_sub(arrived_ns));
            self.stats.queue_ns.record(started_ns.saturating_sub(arrived_ns));
        }
        on_durable(failed.map_or(Ok(()), |error| Err(error.clone())));
    }

    /// Does one step of asynchronous work on the calling thread: leads a round if callbacks or a long
    /// queue ask for one and nobody leads, and calls the callbacks whose LSN is durable. False
    /// when there was nothing to do.
    pub fn drive(&self) -> bool {
        let started_ns = self.clock.monotonic_ns();
        let leads = self.commit.lock().core.try_lead_as_driver();
        if leads {
            // A failure has shut the log down: every waiter hears of it from there.
            let _ = self.lead(started_ns, None);
        }
        self.call_back(usize::MAX, started_ns) || leads
    }

    /// The log thread.
    pub(super) fn run(&self) {
        loop {
            let mut commit = self.commit.lock();
            while !commit.core.driver_has_work() && !commit.stopping {
                commit.driver_parked = true;
                self.driver_wake.wait(&mut commit);
                commit.driver_parked = false;
            }
            if commit.stopping && !commit.core.driver_has_work() {
                return;
            }
            drop(commit);
            self.drive();
        }
    }
}

/// Ends a turn of calling callbacks, also when one of them panics.
struct FinishAcks<'a>(&'a Log);

impl Drop for FinishAcks<'_> {
    fn drop(&mut self) {
        let mut commit = self.0.commit.lock();
        let more = commit.core.finish_acks();
        self.0.wake_driver_if(more, &commit);
    }
}

fn reason(commit: &Commit) -> Error {
    let missing = || Error::Shutdown("the log ended its round early".to_owned());
    commit.shutdown_reason.clone().unwrap_or_else(missing)
}

/// Admission excludes this; and if it failed to, live frames are still not overwritten.
fn corrupt_ring(full: &super::LogFull) -> Error {
    debug_assert!(false, "an admitted frame found the ring full: {full}");
    Error::Shutdown(full.to_string())
}

/// Wakes callers that have reached their goal.
fn tell_reached(wake: impl IntoIterator<Item = Waiter>, round_started_ns: u64) {
    for waiter in wake {
        waiter.tell(Verdict::Reached { round_started_ns });
    }
}
