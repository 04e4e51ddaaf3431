//! What the roles of group commit do: write the queued frames, flush, acknowledge, call others. And the
//! threads or the step function that do it when only callbacks wait.
//!
//! Everybody works alike: ask [`super::core`] for a step under the core lock, call those for whom there is work
//! too, release the lock, wake whom the last step reached, perform the step.

use super::companion::{Party, Uncounted, end_unwritten};
use super::core::{Beside, Call, Flush, Goal, Step};
use super::op::Frame;
use super::ring::Placement;
use super::stats::add;
use super::turns::Company;
use super::waiter::{Callback, Outbox, Own, Slot, Verdict};
use super::{Commit, Log, Lsn};
use crate::device::{Buffers, IoClass, Operation, Request};
use crate::error::PANICKED;
use crate::format::frame::FrameHeader;
use crate::format::{BLOCK_BYTES, BLOCK_BYTES_U64};
use crate::mutation::{self, Mutation};
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, MutexGuard, OnPanic, wait_for};
use crate::ticket::gather_wakes;
use crate::{Error, Result};
use std::cell::Cell;
use std::collections::VecDeque;

/// Attempts to write a frame, each at another place, before the log shuts down.
pub(super) const WRITE_ATTEMPTS: u32 = 3;
/// Callbacks that a blocked caller calls for others before it leaves the rest to a log thread.
const CALLER_CALLBACKS: usize = 16;
/// How long callbacks that nobody waits for are gathered at most.
const GATHER_US: u64 = 2000;
/// Callbacks taken under one lock acquisition.
const CALLBACK_BATCH: usize = 256;
/// Callbacks whose waiters are woken together: those of the first wait for the last, some ten microseconds.
const WAKE_BATCH: usize = 64;

impl Log {
    /// Brings a blocked caller to its goal, which `goal` names under the core lock.
    pub(super) fn reach(&self, goal: impl FnOnce(&Commit) -> Goal) -> Result<()> {
        let arrived_ns = self.clock.monotonic_ns();
        let mut commit = self.commit.lock();
        let goal = goal(&commit);
        let wants_durable = u64::from(matches!(goal, Goal::Durable(_)));
        if commit.core.reached(goal) {
            add(&self.stats.commits_found_durable, wants_durable);
            return Ok(());
        }
        let own = Own { goal, arrived_ns, is_queued: Cell::new(false) };
        let mut out = Outbox::default();
        let mut acted = false;
        let mut step = commit.core.step(goal);
        let result = loop {
            self.count_queued(&commit, &own);
            Self::call(&mut commit, Beside::Alarm, &mut out);
            match step {
                Step::Done => break Ok(()),
                Step::Failed => break Err(reason(&commit)),
                Step::Write | Step::Join | Step::Flush(_) => {
                    acted = true;
                    drop(commit);
                    self.tell(&mut out, step);
                    commit = self.perform(step, Some(&own), &mut out);
                    step = commit.core.step(goal);
                }
                Step::Wait if self.is_held_by_chain(&commit, goal) => break Err(Error::WouldBlock),
                Step::Wait => {
                    let slot = Arc::new(Slot::new(goal, arrived_ns));
                    commit.core.park(goal, Arc::clone(&slot));
                    drop(commit);
                    self.tell(&mut out, step);
                    let verdict = slot.wait();
                    commit = self.commit.lock();
                    own.is_queued.set(own.is_queued.get() || slot.is_queued());
                    match verdict {
                        Verdict::Reached => break Ok(()),
                        Verdict::Failed(error) => break Err(error),
                        Verdict::Look => {
                            Self::looks(&mut commit, goal);
                            step = commit.core.look(goal);
                        }
                    }
                }
            }
        };
        drop(commit);
        self.tell(&mut out, step);
        if result.is_ok() && wants_durable > 0 {
            add(&self.stats.commits, 1);
            let now_ns = self.clock.monotonic_ns();
            self.stats.commit_ns.record(now_ns.saturating_sub(arrived_ns));
            self.count_acknowledgement(now_ns);
        }
        if acted && self.call_back(CALLER_CALLBACKS) {
            self.call_driver();
        }
        if result.is_err() {
            self.abandon_companions();
        }
        result
    }

    /// Only the end of a chain brings the caller to `goal`, and whoever ends it may be the caller.
    fn is_held_by_chain(&self, commit: &Commit, goal: Goal) -> bool {
        !self.has_thread.load(Ordering::Acquire) && commit.core.is_held(goal)
    }

    /// Without the core lock, before `step`: wakes those who are called or have reached their goal, and tells those whose data was written
    /// beside frames. That takes their locks and some time. So it comes after a flush for which somebody else writes meanwhile, but never
    /// after a second one.
    fn tell(&self, out: &mut Outbox, step: Step) {
        let has_called = out.send(&self.driver_wake);
        let may_come_later = has_called && matches!(step, Step::Flush(_));
        if !(may_come_later && out.keep_parties()) {
            out.end_parties();
        }
    }

    /// Performs a step on the calling thread, without the core lock, and books it. `own` is who does, if it is a blocked caller.
    fn perform(&self, step: Step, own: Option<&Own>, out: &mut Outbox) -> MutexGuard<'_, Commit> {
        let _ends_all = OnPanic::new(|| self.panicked_amid(step));
        match step {
            Step::Write => self.write_queued(false, own, out),
            Step::Join => self.write_queued(true, own, out),
            Step::Flush(flush) => {
                let asked = own.is_some_and(|own| matches!(own.goal, Goal::Flushed(_)));
                self.flush_written(flush, asked, out)
            }
            Step::Done | Step::Failed | Step::Wait => self.commit.lock(),
        }
    }

    /// Who performs `step` panics, be it a thread of the log or of a program: nobody is to wait for what comes of it.
    fn panicked_amid(&self, step: Step) {
        self.shut_down(PANICKED);
        let mut commit = self.commit.lock();
        match step {
            Step::Write if commit.core.has_writer() => self.end_write(&mut commit),
            Step::Join => self.leave_turn(&mut commit),
            Step::Flush(_) => commit.core.drop_flush(),
            Step::Write | Step::Done | Step::Failed | Step::Wait => {}
        }
    }

    /// Collects whom to call for roles that are free and have work.
    pub(super) fn call(commit: &mut Commit, beside: Beside, out: &mut Outbox) {
        while let Some(call) = commit.core.call(beside) {
            match call {
                Call::Caller(slot) => {
                    if let Goal::Durable(lsn) = slot.goal {
                        commit.looking.push(lsn);
                    }
                    out.calls.push(slot);
                }
                Call::Driver => {
                    commit.driver_calls += 1;
                    out.driver_calls += 1;
                }
            }
        }
    }

    /// A caller that was called is awake.
    fn looks(commit: &mut Commit, goal: Goal) {
        let Goal::Durable(lsn) = goal else { return };
        if let Some(place) = commit.looking.iter().position(|looking| *looking == lsn) {
            commit.looking.swap_remove(place);
        }
    }

    /// As the writer, or as who has joined it: writes everything appended so far, and what makes up for data that could not be written beside
    /// it.
    fn write_queued(
        &self,
        joins: bool,
        own: Option<&Own>,
        out: &mut Outbox,
    ) -> MutexGuard<'_, Commit> {
        let mut uncounted = Uncounted::default();
        let mut fua;
        let written = loop {
            let mut group = self.take_group();
            // What the writer has on its way is not durable: nobody forces a frame behind it.
            fua = self.begin_group(&group, own) && !joins;
            let is_behind = joins && uncounted.frames.is_empty();
            let result = self.write_group(&mut group, is_behind, &mut fua, &mut uncounted, out);
            self.recycle_group(group);
            match result {
                Ok(true) => {}
                Ok(false) => break Ok(()),
                Err(error) => break Err(error),
            }
            if self.leave_owed(&mut uncounted) {
                let mut commit = self.commit.lock();
                self.end_write(&mut commit);
                return commit;
            }
        };
        if joins && (written.is_err() || uncounted.frames.is_empty()) {
            // Whatever went wrong: its turn comes first.
            self.take_turn(None);
            self.take_owed(&mut uncounted);
        }
        self.making_up.store(false, Ordering::Release);
        if let Err(error) = written {
            self.fail(&mut self.commit.lock(), error, out);
        }
        let mut commit = self.commit.lock();
        if commit.core.is_failed() {
            drop(commit);
            uncounted.end(&Err(self.shutdown_error()));
            commit = self.commit.lock();
        } else {
            self.count_written(&mut commit, &mut uncounted, out);
            if fua {
                add(&self.stats.fua_writes, 1);
                let acknowledged = commit.core.frame_forced(&mut out.reached);
                self.publish_durable(&commit, acknowledged);
            }
        }
        self.end_write(&mut commit);
        commit
    }

    /// Everything appended so far, with its companions.
    fn take_group(&self) -> VecDeque<Frame> {
        let group = self.append.lock().take_group();
        for frame in &group {
            self.forget_queued(frame);
        }
        group
    }

    /// Writes the frames, each with its companions at the same time; the first `is_behind` that of a writer that was joined. They count, all
    /// but the last, as they are written; but from data that could not be written on, when what makes up for it is there too: true if there
    /// is such, in the next group.
    fn write_group(
        &self,
        group: &mut VecDeque<Frame>,
        is_behind: bool,
        fua: &mut bool,
        uncounted: &mut Uncounted,
        out: &mut Outbox,
    ) -> Result<bool> {
        let mut written = Ok(());
        // Others may wait for data that goes beside any of these frames.
        let is_beside =
            !uncounted.parties.is_empty() || group.iter().any(|frame| !frame.companions.is_empty());
        let class = if is_beside { IoClass::Beside } else { IoClass::Log };
        let is_first = uncounted.frames.is_empty();
        let may_be_joined = is_first && group.len() == 1 && !group[0].continues;
        for index in 0..group.len() {
            let frame = &mut group[index];
            let company = match index {
                0 if is_behind => Company::Writer,
                0 if may_be_joined => Company::MayCome,
                _ => Company::Alone,
            };
            written = self.write_party(frame, class, company, fua, uncounted);
            if written.is_err() {
                break;
            }
            if !uncounted.owes() && index + 1 < group.len() {
                let mut commit = self.commit.lock();
                if commit.core.is_failed() {
                    written = Err(reason(&commit));
                    break;
                }
                self.count_written(&mut commit, uncounted, out);
            }
        }
        if let Err(error) = &written {
            end_unwritten(group, error);
        }
        written.map(|()| uncounted.owes())
    }

    /// Writes one frame and what goes beside it. Where some of that could not be written, what makes up for it is in the log.
    fn write_party(
        &self,
        frame: &mut Frame,
        class: IoClass,
        company: Company,
        fua: &mut bool,
        uncounted: &mut Uncounted,
    ) -> Result<()> {
        let mut party = Party::of(frame);
        party.class = class;
        if party.is_empty() {
            self.write_frame(frame, company, fua, &mut party)?;
            uncounted.frames.push((frame.last_lsn, frame.continues));
            if company == Company::Writer {
                self.take_owed(uncounted);
            }
            return Ok(());
        }
        // Forced unit access would leave out what is written beside.
        *fua = false;
        let written = self.write_frame(frame, company, fua, &mut party);
        self.write_rest(&mut party);
        self.note_beside(&party);
        let made_up = written.and_then(|()| {
            uncounted.frames.push((frame.last_lsn, frame.continues));
            self.making_up.fetch_or(party.has_failed(), Ordering::AcqRel);
            party.make_up()
        });
        uncounted.parties.push(party);
        if company == Company::Writer {
            self.take_owed(uncounted);
        }
        made_up.map(|lsn| lsn.into_iter().for_each(|lsn| uncounted.owe(lsn)))
    }

    /// Counts frames as written: those whose data was written beside them are to be told.
    fn count_written(&self, commit: &mut Commit, uncounted: &mut Uncounted, out: &mut Outbox) {
        // Whoever closes the chain says so under the core lock, after it looks closed.
        let holds = self.in_open_chain(uncounted.made_up_to());
        for (last_lsn, continues) in uncounted.take_frames() {
            commit.core.frame_written(last_lsn, continues, &mut out.reached);
        }
        if holds {
            commit.core.hold();
        }
        out.parties.append(&mut uncounted.parties);
    }

    /// Takes a written group back for its memory.
    pub(super) fn recycle_group(&self, mut group: VecDeque<Frame>) {
        // Pages go back to their pool before the lock is taken.
        group.retain_mut(Frame::recycle);
        self.append.lock().recycle(group);
    }

    /// Counts how long the group's commits have waited for this moment, and whether there are any. Answers whether the group becomes durable by
    /// forced unit access alone: it is one frame, somebody waits for it, and nothing else in the device's cache
    /// has to be durable with it. The group is sealed, so data noted from now on belongs to later operations.
    pub(super) fn begin_group(&self, group: &VecDeque<Frame>, own: Option<&Own>) -> bool {
        let (Some(first), Some(last)) = (group.front(), group.back()) else { return false };
        let now_ns = self.clock.monotonic_ns();
        let clean =
            self.data_written.load(Ordering::Acquire) == self.data_flushed.load(Ordering::Acquire);
        let mut commit = self.commit.lock();
        let mut is_awaited = false;
        let mut queued = |arrived_ns| {
            is_awaited = true;
            self.stats.queue_ns.record(now_ns.saturating_sub(arrived_ns));
        };
        let (callers, callbacks) = commit.core.waiting_for(first.first_lsn, last.last_lsn);
        callers.filter(|slot| !slot.is_queued()).for_each(|slot| {
            queued(slot.arrived_ns);
            slot.note_queued();
        });
        callbacks.for_each(|callback| queued(callback.arrived_ns));
        if let Some(own) = own
            && let Goal::Durable(lsn) = own.goal
            && lsn <= last.last_lsn
            && !own.is_queued.replace(true)
        {
            queued(own.arrived_ns);
        }
        commit.taken = (last.last_lsn, now_ns);
        if is_awaited {
            add(&self.stats.frames_awaited, group.len() as u64);
        }
        let able = self.info.fua && self.info.volatile_cache && group.len() == 1;
        able && clean && commit.core.may_force()
    }

    /// Writes one frame, at another place when that fails, and at the same time what `party` has left to be written. Clears `fua` when it
    /// had to move: a flush then covers whatever the failed write left.
    fn write_frame(
        &self,
        frame: &mut Frame,
        company: Company,
        fua: &mut bool,
        party: &mut Party,
    ) -> Result<()> {
        let (mut header, mut placement) = self.place_frame(frame)?;
        let mut is_behind = company == Company::Writer;
        let mut attempt = 1;
        loop {
            header.ring_position_blocks = placement.position_blocks;
            let digest = header.seal(&mut frame.meta)?;
            if company == Company::MayCome && attempt == 1 {
                self.announce(&header, digest);
            }
            let started_ns = self.clock.monotonic_ns();
            let write = || self.write_blocks(frame, placement.position_blocks, *fua, party);
            let written = self.underway.pass(write);
            let elapsed_ns = self.clock.since_ns(started_ns);
            if std::mem::take(&mut is_behind) {
                add(&self.stats.frames_joined, 1);
                let is_wiped = self.take_turn(Some(placement.position_blocks));
                if self.shut_down.load(Ordering::Acquire) {
                    // The frame before may be missing.
                    return Err(self.shutdown_error());
                }
                if is_wiped {
                    placement = self.place_anew(&mut header, placement)?;
                    continue;
                }
            }
            match written {
                Ok(()) => {
                    let blocks = frame.blocks();
                    self.count_frame(blocks, frame.payloads.len() as u64, elapsed_ns);
                    self.append.lock().push_written(&header, placement, digest);
                    return Ok(());
                }
                Err(error) if attempt == WRITE_ATTEMPTS => return Err(error),
                Err(_) => {
                    attempt += 1;
                    *fua = false;
                    add(&self.stats.write_retries, 1);
                    if company == Company::MayCome {
                        self.part()?;
                    }
                    let mut append = self.append.lock();
                    let admitted = self.admitted.blocks();
                    // Without room further on, the same place once more.
                    placement = append.ring.place_again(placement, admitted).unwrap_or(placement);
                }
            }
        }
    }

    /// Sums up the frame, finds its place, and links it to the one before.
    fn place_frame(&self, frame: &mut Frame) -> Result<(FrameHeader, Placement)> {
        let blocks = frame.blocks();
        frame.sum_payloads();
        // The padding of the records up to a whole block.
        let meta_bytes = frame.meta.len();
        frame.meta.resize_zeroed(meta_bytes.next_multiple_of(BLOCK_BYTES));
        let mut append = self.append.lock();
        let placement = append.ring.place(blocks).map_err(|full| corrupt_ring(&full))?;
        let (sequence, prev_digest) = append.next_in_chain();
        let header = FrameHeader {
            volume_id: self.geometry.volume_id,
            epoch: self.epoch,
            sequence,
            first_lsn: frame.first_lsn,
            last_lsn: frame.last_lsn,
            transaction: frame.transaction,
            durable_lsn: self.durable.load(Ordering::Acquire),
            prev_digest,
            ring_position_blocks: placement.position_blocks,
            meta_bytes: meta_bytes as u32,
            record_count: frame.record_count,
            payload_blocks: frame.payloads.len() as u32,
            continues: frame.continues,
        };
        Ok((header, placement))
    }

    /// One device write: header and records, then the payload straight from the page frames. In one batch with what `party` has left.
    fn write_blocks(
        &self,
        frame: &mut Frame,
        position_blocks: u64,
        fua: bool,
        party: &mut Party,
    ) -> Result<()> {
        let offset = (self.geometry.log_start_block + position_blocks) * BLOCK_BYTES_U64;
        let class = party.class;
        let requests = party.take_requests();
        if !requests.is_empty() {
            return self.write_with(frame, offset, requests, party);
        }
        let written = if frame.payloads.is_empty() {
            self.device.write(offset, &[&frame.meta], class, fua)
        } else {
            let mut parts: Vec<&[u8]> = Vec::with_capacity(1 + frame.payloads.len());
            parts.push(&frame.meta);
            parts.extend(frame.payloads.iter().map(|page| &**page));
            self.device.write(offset, &parts, class, fua)
        };
        Ok(written?)
    }

    /// A frame and the `requests` of its party, in one batch.
    fn write_with(
        &self,
        frame: &mut Frame,
        offset_bytes: u64,
        mut requests: Vec<Request>,
        party: &mut Party,
    ) -> Result<()> {
        let (meta, payloads) =
            (std::mem::take(&mut frame.meta), std::mem::take(&mut frame.payloads));
        requests.push(Request {
            operation: Operation::Write { fua: false },
            offset_bytes,
            buffers: Buffers::Framed(meta, payloads),
            class: party.class,
        });
        let mut outcomes = self.device.run_all(requests);
        let (written, buffers) = outcomes.pop().ok_or(Error::Invalid("a batch without results"))?;
        if let Buffers::Framed(meta, payloads) = buffers {
            (frame.meta, frame.payloads) = (meta, payloads);
        }
        party.written(outcomes.into_iter().map(|(result, _)| result));
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
        self.flushing.pass(|| self.device.flush())?;
        add(&self.stats.flushes, 1);
        self.stats.flush_ns.record(self.clock.since_ns(started_ns));
        Ok(())
    }

    /// As the flusher: flushes, and books what that has made durable. `asked`: the flush itself was asked for, not the
    /// acknowledgement of commits.
    fn flush_written(&self, flush: Flush, asked: bool, out: &mut Outbox) -> MutexGuard<'_, Commit> {
        let data = self.data_written.load(Ordering::Acquire);
        let skip = !asked && mutation::active(Mutation::AcknowledgeBeforeFlush);
        let flushed = if skip { Ok(()) } else { self.flush_device() };
        let mut commit = self.commit.lock();
        match flushed {
            Ok(()) => {
                let acknowledged = commit.core.end_flush(flush, &mut out.reached);
                if !commit.core.is_failed() {
                    self.data_flushed.fetch_max(data, Ordering::AcqRel);
                    self.publish_durable(&commit, acknowledged);
                }
            }
            Err(error) => {
                commit.core.drop_flush();
                self.fail(&mut commit, error, out);
            }
        }
        commit
    }

    /// Flushes the device: all that was written to it before, by anyone, is durable afterwards, and
    /// the durable LSN advances accordingly. Shares the flush with commits.
    ///
    /// # Errors
    /// The flush failed, now or before: the log is shut down.
    pub fn flush(&self) -> Result<()> {
        self.reach(|commit| commit.core.next_flush())
    }

    /// Counts how long a caller that is awake has waited for the round that covers it, if another has begun that, and it is not counted.
    fn count_queued(&self, commit: &Commit, own: &Own) {
        let Goal::Durable(lsn) = own.goal else { return };
        let (taken, began_ns) = commit.taken;
        if lsn <= taken && !own.is_queued.replace(true) {
            self.stats.queue_ns.record(began_ns.saturating_sub(own.arrived_ns));
        }
    }

    /// Somebody is told at `now_ns` that what it waits for is durable.
    fn count_acknowledgement(&self, now_ns: u64) {
        let became_durable_ns = self.stats.became_durable_ns.load(Ordering::Relaxed);
        self.stats.acknowledge_ns.record(now_ns.saturating_sub(became_durable_ns));
    }

    fn publish_durable(&self, commit: &Commit, acknowledged: usize) {
        let durable = commit.core.durable();
        let before = self.durable.swap(durable, Ordering::AcqRel);
        if before < durable {
            self.stats.became_durable_ns.store(self.clock.monotonic_ns(), Ordering::Relaxed);
        }
        if commit.watchers > 0 {
            self.durable_changed.notify_all();
        }
        // Those who are awake, and have not looked yet, hear of this flush as well.
        let is_reached = |lsn: &&Lsn| before < **lsn && **lsn <= durable;
        let acknowledged = acknowledged + commit.looking.iter().filter(is_reached).count();
        if acknowledged > 0 {
            self.stats.commits_per_flush.record(acknowledged as u64);
        }
    }

    /// Shuts the log down: sticky. All sleeping callers hear of it; callbacks are due.
    pub(super) fn fail(&self, commit: &mut Commit, error: Error, out: &mut Outbox) {
        if commit.shutdown_reason.is_none() {
            let error = match error {
                Error::Shutdown(_) => error,
                other => Error::Shutdown(other.to_string()),
            };
            commit.shutdown_reason = Some(error);
        }
        self.shut_down.store(true, Ordering::Release);
        let mut slots = Vec::new();
        commit.core.fail(&mut slots);
        if !slots.is_empty() {
            out.failed = Some((slots, reason(commit)));
        }
        self.fail_chain(commit);
        self.durable_changed.notify_all();
        Self::call(commit, Beside::All, out);
    }

    /// Shuts the log down for a reason outside of it, such as a superblock that could not be written: all
    /// waiters get the error, and nothing becomes durable any more.
    pub fn shut_down(&self, reason: &str) {
        let mut out = Outbox::default();
        self.fail(&mut self.commit.lock(), Error::Shutdown(reason.to_owned()), &mut out);
        out.send(&self.driver_wake);
    }

    pub(super) fn shutdown_error(&self) -> Error {
        reason(&self.commit.lock())
    }

    /// Has the log's thread write what is queued, whoever waits for it. Does not wait.
    pub fn request_write_out(&self) {
        self.commit.lock().core.request_write_out();
        self.call_driver();
    }

    /// Calls callbacks whose time has come, on behalf of a caller up to `limit` when a log thread can do the
    /// rest. True when it called any.
    fn call_back(&self, limit: usize) -> bool {
        self.abandon_companions();
        let mut called = 0;
        loop {
            let threaded = self.has_thread.load(Ordering::Acquire);
            let room = if threaded { limit - called } else { CALLBACK_BATCH };
            let mut commit = self.commit.lock();
            let acks = commit.core.take_acks(room.min(CALLBACK_BATCH));
            if acks.is_empty() {
                return called > 0;
            }
            let failed = commit.core.is_failed().then(|| reason(&commit));
            drop(commit);
            called += acks.len();
            let _finish = FinishAcks(self);
            let now_ns = self.clock.monotonic_ns();
            let mut acks = acks.into_iter();
            while acks.len() > 0 {
                let _wakes = gather_wakes();
                for (callback, success) in acks.by_ref().take(WAKE_BATCH) {
                    self.call_one(callback, if success { None } else { failed.as_ref() }, now_ns);
                }
            }
            if threaded && called >= limit {
                return true;
            }
        }
    }

    /// Leaves what there is to do, callbacks included, to those who sleep.
    fn call_driver(&self) {
        let mut out = Outbox::default();
        let mut commit = self.commit.lock();
        Self::call(&mut commit, Beside::All, &mut out);
        drop(commit);
        out.send(&self.driver_wake);
    }

    fn call_one(&self, callback: Callback, failed: Option<&Error>, now_ns: u64) {
        let Callback { on_durable, arrived_ns } = callback;
        if failed.is_none() {
            add(&self.stats.async_commits, 1);
            self.stats.async_commit_ns.record(now_ns.saturating_sub(arrived_ns));
            self.count_acknowledgement(now_ns);
        }
        on_durable.call(failed.map_or(Ok(()), |error| Err(error.clone())));
    }

    /// Does the asynchronous work there is on the calling thread: writes and flushes if callbacks or a long
    /// queue ask for it, and calls the callbacks whose LSN is durable. False
    /// when there was nothing to do.
    pub fn drive(&self) -> bool {
        let mut out = Outbox::default();
        let mut acted = false;
        let mut commit = self.commit.lock();
        commit.core.hurry();
        loop {
            let step = commit.core.driver_step();
            Self::call(&mut commit, Beside::Nothing, &mut out);
            drop(commit);
            self.tell(&mut out, step);
            if step == Step::Wait {
                break;
            }
            acted = true;
            commit = self.perform(step, None, &mut out);
        }
        self.call_back(usize::MAX) || acted
    }

    /// A log thread: a driver that sleeps while there is nothing to do. There is one for each thing to do at a time: to
    /// write, to flush, and to call callbacks. Whichever is awake takes the most urgent.
    pub(super) fn run(&self) {
        let _ends_all = OnPanic::new(|| self.shut_down(PANICKED));
        let mut out = Outbox::default();
        let mut commit = self.commit.lock();
        loop {
            let step = commit.core.driver_step();
            let beside = if step == Step::Wait { Beside::Nothing } else { Beside::All };
            Self::call(&mut commit, beside, &mut out);
            drop(commit);
            self.tell(&mut out, step);
            if step != Step::Wait {
                commit = self.perform(step, None, &mut out);
                continue;
            }
            let called = self.call_back(CALLBACK_BATCH);
            commit = self.commit.lock();
            if called || commit.core.has_driver_work() {
                continue;
            }
            if commit.stopping {
                return;
            }
            self.sleep(&mut commit);
        }
    }

    /// A log thread sleeps until it is called, until the alarm that it has set rings, or until the end.
    fn sleep(&self, commit: &mut MutexGuard<'_, Commit>) {
        let alarm = commit.core.driver_sleeps();
        let mut rung = false;
        while commit.driver_calls == 0 && !commit.stopping && !rung {
            if alarm {
                rung = wait_for(&self.driver_wake, commit, GATHER_US);
            } else {
                self.driver_wake.wait(commit);
            }
        }
        if commit.driver_calls > 0 {
            commit.driver_calls -= 1;
            commit.core.driver_looks();
        } else if rung {
            return commit.core.alarm_rings();
        } else {
            commit.core.driver_leaves();
        }
        if alarm {
            commit.core.alarm_off();
        }
    }
}

/// Ends a turn of calling callbacks, also when one of them panics.
struct FinishAcks<'a>(&'a Log);

impl Drop for FinishAcks<'_> {
    fn drop(&mut self) {
        self.0.commit.lock().core.finish_acks();
        if std::thread::panicking() {
            self.0.call_driver();
        }
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
