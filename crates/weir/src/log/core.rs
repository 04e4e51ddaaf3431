//! Group commit as a pure state machine: who writes, who flushes, what is durable, and in
//! which order waiters hear of it. No locks, no I/O, no clock; [`super::Log`] keeps one behind
//! its core lock and does what it says.
//!
//! **Rules.** There are two roles, *writer* and *flusher*, and each has at most one holder.
//! Everybody who waits takes a free role that has work when it comes, instead of going to sleep: its own frame
//! first, then a flush, then the frames of others. So an idle log is led by the blocked caller itself, write and
//! flush, and nobody is woken.
//!
//! A flush covers the frames whose writes completed before it started, never later ones. While it is in flight, frames
//! are written *ahead*: what has come so far goes into one frame as soon as the write before it is done. When the
//! flush has ended, the next starts at once if somebody waits for what is written; but a frame that is just being
//! written is waited for, since missing this flush would cost those in it a whole one.
//!
//! A caller may *join* the writer: nobody else sleeps for durability, the writer has sent its one frame on its way, and nothing
//! that is written waits for a flush. It writes what has come since in a frame of its own, at the same time, and one flush covers
//! both: two callers that come one after the other would otherwise take turns for ever, each with a write and a flush for itself.
//! Where the last flush was for more than two, nobody joins: more will come, and share a frame. There is one who joins at a time.
//! Frames still count in order: who has joined counts when it has become the writer, which it does when that ends.
//!
//! A callback may be *patient*: nobody waits for it yet. Patient callbacks are gathered, so that a deep queue of tickets
//! shares frames and flushes: as many as have proved useful ([`super::gather::MOST_GATHERED`] at most), or until somebody waits
//! ([`Core::hurry`]), or until the alarm of a sleeping driver rings. How many that is follows from what is seen: it doubles
//! when as many came while the log was busy, and is half of what was in flight when somebody began to wait; a log that
//! is used by one sync at a time gathers nothing. The alarm is the only timer, and delays nobody who waits.
//!
//! Whoever leaves, or turns to one role, calls for somebody who sleeps if another role is free and has work: a
//! blocked caller that needs it, or else an idle driver (a log thread). Whoever is called only *looks*: a newcomer
//! may have been faster, then it sleeps again.
//!
//! **Invariants**, checked for every interleaving by `explore` below:
//! - there is one writer and at most one who has joined it, and frames count in order;
//! - an LSN is acknowledged as durable only after a successful flush that started after the
//!   writes of all frames up to it had completed, and before any failure;
//! - callbacks are acknowledged in LSN order, but for those that come when their LSN is durable already;
//! - nobody waits for ever: whenever nothing is in flight and no one is about to act, nobody waits;
//! - a role that is free and has work is about to be taken: by somebody awake, if not by a sleeper that was called;
//! - after a failure nothing becomes durable any more, and every waiter hears of it.

use super::gather::Gathering;
use crate::mutation::{self, Mutation};
use std::collections::{BTreeMap, VecDeque};

/// So many callers take turns; where there are more, they share frames.
const FEW: usize = 2;

/// Log sequence number: one per operation, from 1 on.
pub type Lsn = u64;

/// What a waiter waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Goal {
    /// The LSN's frame is on the device, perhaps in its volatile cache.
    Written(Lsn),
    /// The LSN survives a power cut.
    Durable(Lsn),
    /// The flush of this number has ended: see [`Core::next_flush`].
    Flushed(u64),
}

/// What somebody who is awake does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// The goal is reached.
    Done,
    /// The log is shut down.
    Failed,
    /// Write everything appended so far: [`Core::frame_written`] for each frame, then [`Core::end_write`].
    Write,
    /// As [`Step::Write`], beside a writer that has sent its frame: writes the next frame, waits until nobody [joins](Core::has_joined) any
    /// more, which makes it the writer, and then books it.
    Join,
    /// Flush the device: [`Core::end_flush`] or [`Core::fail`] when it has ended.
    Flush(Flush),
    /// Nothing to do: call [`Core::park`] and sleep.
    Wait,
}

/// A sleeper that is called to look.
#[derive(Debug, PartialEq, Eq)]
pub enum Call<C> {
    /// This blocked caller: it goes on with [`Core::look`].
    Caller(C),
    /// An idle driver: it goes on with [`Core::driver_looks`].
    Driver,
}

/// A flush under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[must_use = "a flush that started must end"]
pub struct Flush {
    covers: Lsn,
    number: u64,
}

/// Who has a role: what it waits for itself, if it is not a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Holder {
    own: Option<Goal>,
}

/// What only drivers do, and whether [`Core::call`] is to call one for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beside {
    /// Nothing: a driver asks, who is about to do it itself.
    Nothing,
    /// To set the alarm: a blocked caller asks, who calls callbacks itself.
    Alarm,
    /// To set the alarm and to call callbacks.
    All,
}

/// Blocked callers that have reached their goal, or have to hear of a failure.
pub type Wake<C> = Vec<C>;

type Waiters<T> = BTreeMap<(Lsn, u64), T>;

/// See the module's head. `C` stands for a blocked caller that sleeps, `B` for a callback.
// Independent facts, not a state.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Core<C, B> {
    /// Last LSN of the frames on the device.
    written: Lsn,
    /// The same, but never inside of a batch that spans frames: what a flush makes durable.
    complete: Lsn,
    /// Frames up to this LSN are on the device, and count with the end of the chain that is open: writing more does not help. 0: none do.
    held: Lsn,
    durable: Lsn,
    writer: Option<Holder>,
    /// Who writes the next frame beside the writer's.
    joiner: Option<Holder>,
    /// The last LSN of what the writer has taken, while it is on its way in one frame and nobody has joined.
    sent: Option<Lsn>,
    /// The last flush was for two at most.
    are_few: bool,
    /// The flush in flight, with what the flusher waits for itself.
    flusher: Option<(Flush, Holder)>,
    flushes_begun: u64,
    flushes_ended: u64,
    failed: bool,
    /// The queue grew so long that frames are to be written although nobody waits.
    write_out: bool,
    durable_callers: Waiters<C>,
    written_callers: Waiters<C>,
    flush_callers: Waiters<C>,
    callbacks: Waiters<B>,
    /// Callbacks that nobody waits for.
    gathering: Gathering,
    /// Callbacks to call, in this order; the flag is success.
    acks: VecDeque<(B, bool)>,
    /// Somebody is calling callbacks.
    acking: bool,
    /// Called to look, and have not looked yet.
    looking: usize,
    idle_drivers: usize,
}

impl<C, B> Core<C, B> {
    /// A log of which everything up to `durable` is durable and nothing else exists.
    pub fn new(durable: Lsn) -> Self {
        Self {
            written: durable,
            complete: durable,
            held: 0,
            durable,
            writer: None,
            joiner: None,
            sent: None,
            are_few: true,
            flusher: None,
            flushes_begun: 0,
            flushes_ended: 0,
            failed: false,
            write_out: false,
            durable_callers: BTreeMap::new(),
            written_callers: BTreeMap::new(),
            flush_callers: BTreeMap::new(),
            callbacks: BTreeMap::new(),
            gathering: Gathering::new(durable),
            acks: VecDeque::new(),
            acking: false,
            looking: 0,
            idle_drivers: 0,
        }
    }

    /// Everything up to here is durable.
    pub fn durable(&self) -> Lsn {
        self.durable
    }

    /// A blocked caller that comes next will write its own frame at once: nobody has the writer's role, or who has it may be joined.
    pub fn takes_writer(&self) -> bool {
        self.writer.is_none() || self.may_join(Goal::Durable(Lsn::MAX))
    }

    /// True after a failed flush or a frame that could not be written. Sticky.
    pub fn is_failed(&self) -> bool {
        self.failed
    }

    /// Callbacks that are waiting or not called yet.
    pub fn callbacks_pending(&self) -> usize {
        self.callbacks.len() + self.acks.len()
    }

    /// Whether a waiter with this goal need not wait any more.
    pub fn reached(&self, goal: Goal) -> bool {
        match goal {
            Goal::Written(lsn) => lsn <= self.written,
            Goal::Durable(lsn) => lsn <= self.durable,
            Goal::Flushed(number) => number <= self.flushes_ended,
        }
    }

    /// What was written needs something of the chain that is open: nobody works for it until that is closed.
    pub fn hold(&mut self) {
        self.held = self.written;
    }

    /// The chain is closed: what was held counts with its last frame.
    pub fn release_held(&mut self) {
        self.held = 0;
    }

    /// What `goal` names is held.
    pub fn is_held(&self, goal: Goal) -> bool {
        matches!(goal, Goal::Durable(lsn) if lsn <= self.held && lsn > self.complete)
    }

    /// Everything up to `lsn` is on the device, with all that it needs there.
    pub fn is_complete(&self, lsn: Lsn) -> bool {
        lsn <= self.complete
    }

    /// The first flush that starts from now on: it covers all that was written to the device before, by anyone.
    pub fn next_flush(&self) -> Goal {
        Goal::Flushed(self.flushes_begun + 1)
    }

    /// What a caller does that has come with this goal after its operation was appended, or has ended a step.
    pub fn step(&mut self, goal: Goal) -> Step {
        if self.reached(goal) {
            return Step::Done;
        }
        if self.failed {
            return Step::Failed;
        }
        if self.is_unwritten(goal) && self.writer.is_none() {
            return self.begin_write(Some(goal));
        }
        if self.may_join(goal) {
            return self.begin_join(goal);
        }
        let may_flush = !matches!(goal, Goal::Written(_));
        if may_flush && self.may_begin_flush() && (self.wants_flush() || self.needs_flush(goal)) {
            return self.begin_flush(Some(goal));
        }
        // Its own frame waits for a flush after the one in flight: that leaves time for others.
        let has_time = matches!(goal, Goal::Durable(_)) && !self.is_covered(goal);
        if has_time && self.wants_write() {
            return self.begin_write(Some(goal));
        }
        Step::Wait
    }

    /// What a caller does that was called to look.
    pub fn look(&mut self, goal: Goal) -> Step {
        self.looking -= 1;
        self.step(goal)
    }

    /// What a driver does that is awake; [`Step::Wait`] when neither role has work for it.
    pub fn driver_step(&mut self) -> Step {
        if self.wants_flush() {
            return self.begin_flush(None);
        }
        if self.wants_write() {
            return self.begin_write(None);
        }
        Step::Wait
    }

    /// A driver without work goes to sleep, in the same critical section as its last step. True: it sets an alarm, and
    /// tells [`Core::alarm_off`] when it is called or leaves, or [`Core::alarm_rings`].
    pub fn driver_sleeps(&mut self) -> bool {
        self.idle_drivers += 1;
        self.gathering.set_alarm()
    }

    /// The driver that had set the alarm is awake for another reason.
    pub fn alarm_off(&mut self) {
        self.gathering.alarm_off();
    }

    /// The alarm has woken a driver that was not called: what was gathered is all that comes.
    pub fn alarm_rings(&mut self) {
        self.idle_drivers -= 1;
        if self.gathering.ring() {
            self.hurry_all();
        }
    }

    /// A driver is at work, and will set the alarm when it goes to sleep.
    fn is_driven(&self) -> bool {
        let driven = |by: Holder| by.own.is_none();
        self.writer.is_some_and(driven) || self.flusher.is_some_and(|(_, by)| driven(by))
    }

    /// Somebody waits for what was gathered. It goes out now, or when the next flush for others that wait has ended. Whom
    /// to call then is asked as ever.
    pub fn hurry(&mut self) {
        if self.gathering.hurry(self.callbacks.len()) {
            self.hurry_all();
        }
    }

    fn hurry_all(&mut self) {
        self.gathering.go_out(last(&self.callbacks));
    }

    /// A sleeping driver that was not called is to end.
    pub fn driver_leaves(&mut self) {
        self.idle_drivers -= 1;
    }

    /// A driver that was called is awake.
    pub fn driver_looks(&mut self) {
        self.looking -= 1;
    }

    fn begin_write(&mut self, own: Option<Goal>) -> Step {
        self.writer = Some(Holder { own });
        // It takes all that was appended.
        self.write_out = false;
        Step::Write
    }

    /// Whether this caller's frame may be written beside the writer's: see the module's head. That nothing written waits for a flush bounds how
    /// many frames that has to wait for.
    fn may_join(&self, goal: Goal) -> bool {
        let Goal::Durable(lsn) = goal else { return false };
        let covered = self.flusher.map_or(self.durable, |(flush, _)| flush.covers);
        self.sent.is_some_and(|sent| lsn > sent)
            && self.written <= covered
            && self.durable_callers.is_empty()
            && self.are_few
            && !self.failed
    }

    fn begin_join(&mut self, goal: Goal) -> Step {
        debug_assert!(self.writer.is_some() && self.joiner.is_none());
        self.joiner = Some(Holder { own: Some(goal) });
        self.sent = None;
        self.write_out = false;
        Step::Join
    }

    /// All that the writer has taken, up to this LSN, is about to go to the device in one frame, at a place that is known: somebody
    /// may join.
    pub fn frame_sent(&mut self, last_lsn: Lsn) {
        debug_assert!(self.writer.is_some() && self.joiner.is_none() && last_lsn > self.written);
        self.sent = Some(last_lsn);
    }

    /// The writer's frame is not what was sent, or more is to come with it. Nobody joins any more; true if somebody has.
    pub fn keep_alone(&mut self) -> bool {
        self.sent = None;
        self.joiner.is_some()
    }

    /// Somebody has joined the writer, and is not the writer yet.
    pub fn has_joined(&self) -> bool {
        self.joiner.is_some()
    }

    fn begin_flush(&mut self, own: Option<Goal>) -> Step {
        self.flushes_begun += 1;
        let flush = Flush { covers: self.complete, number: self.flushes_begun };
        self.flusher = Some((flush, Holder { own }));
        Step::Flush(flush)
    }

    /// True when a driver has something to do: a role to take or callbacks to call.
    pub fn has_driver_work(&self) -> bool {
        self.wants_flush() || self.wants_write() || (!self.acking && !self.acks.is_empty())
    }

    /// Whether a frame is still to be written before a flush can bring the goal.
    pub fn is_unwritten(&self, goal: Goal) -> bool {
        match goal {
            Goal::Written(lsn) => lsn > self.written,
            // The end of its batch may be in a frame of its own.
            Goal::Durable(lsn) => lsn > self.complete.max(self.held),
            Goal::Flushed(_) => false,
        }
    }

    /// Whether the flush in flight brings the goal.
    fn is_covered(&self, goal: Goal) -> bool {
        let Some((flush, _)) = &self.flusher else { return false };
        match goal {
            Goal::Written(_) => false,
            Goal::Durable(lsn) => lsn <= flush.covers,
            Goal::Flushed(number) => number <= flush.number,
        }
    }

    /// Whether a flush that starts now brings the goal.
    fn needs_flush(&self, goal: Goal) -> bool {
        match goal {
            Goal::Written(_) => false,
            Goal::Durable(lsn) => lsn > self.durable && lsn <= self.complete,
            Goal::Flushed(number) => number > self.flushes_begun,
        }
    }

    /// A frame that is just being written is waited for: the flush is to cover it.
    fn may_begin_flush(&self) -> bool {
        self.flusher.is_none() && self.writer.is_none() && !self.failed
    }

    /// True when a flush may start and somebody who sleeps waits for one of what is written now.
    fn wants_flush(&self) -> bool {
        let waits = |lsn: Lsn| self.needs_flush(Goal::Durable(lsn));
        self.may_begin_flush()
            && (!self.flush_callers.is_empty()
                || first(&self.durable_callers).is_some_and(waits)
                || first(&self.callbacks)
                    .is_some_and(|lsn| lsn <= self.gathering.hurried() && waits(lsn)))
    }

    /// True when the writer's role is free and somebody, awake or asleep, waits for a frame that is not written.
    fn wants_write(&self) -> bool {
        let waits = |lsn: Lsn| self.is_unwritten(Goal::Durable(lsn));
        let busy =
            self.flusher.is_some_and(|(_, by)| by.own.is_some_and(|own| self.is_unwritten(own)));
        self.writer.is_none()
            && !self.failed
            && (busy
                || self.write_out
                || !self.written_callers.is_empty()
                || last(&self.durable_callers).is_some_and(waits)
                || self.last_hurried().is_some_and(waits))
    }

    /// The last callback that is waited for.
    fn last_hurried(&self) -> Option<Lsn> {
        let hurried = self.gathering.hurried();
        self.callbacks.range(..=(hurried, u64::MAX)).next_back().map(|(key, _)| key.0)
    }

    /// Whom to call for a role that is free and has work, if enough are not looking already. Ask again until there is
    /// nobody, after every step and before going to sleep. `beside`: what counts as
    /// work too.
    pub fn call(&mut self, beside: Beside) -> Option<Call<C>> {
        let (flush, write) = (self.wants_flush(), self.wants_write());
        let alarm = beside != Beside::Nothing && self.gathering.wants_alarm() && !self.is_driven();
        let acks = beside == Beside::All && !self.acking && !self.acks.is_empty();
        let work = [flush, write, acks, alarm].into_iter().filter(|&there| there).count();
        if work <= self.looking {
            return None;
        }
        let mut caller = None;
        // Whoever is looking already takes the flush.
        if flush && (self.looking == 0 || !write) {
            let first = first(&self.durable_callers);
            caller = if first.is_some_and(|lsn| lsn <= self.complete) {
                self.durable_callers.pop_first()
            } else {
                self.flush_callers.pop_first()
            };
        }
        if write && caller.is_none() {
            let written = self.complete.max(self.held);
            caller = if last(&self.durable_callers).is_some_and(|lsn| lsn > written) {
                take_above(&mut self.durable_callers, written)
            } else {
                self.written_callers.pop_first()
            };
        }
        if caller.is_none() && self.idle_drivers > 0 {
            self.idle_drivers -= 1;
            self.looking += 1;
            return Some(Call::Driver);
        }
        if flush && caller.is_none() {
            caller = self.durable_callers.pop_first();
        }
        let (_, caller) = caller?;
        self.looking += 1;
        Some(Call::Caller(caller))
    }

    /// A caller that was told to wait goes to sleep, in the same critical section.
    pub fn park(&mut self, goal: Goal, caller: C) {
        match goal {
            Goal::Written(lsn) => insert(&mut self.written_callers, lsn, caller),
            Goal::Durable(lsn) => insert(&mut self.durable_callers, lsn, caller),
            Goal::Flushed(number) => insert(&mut self.flush_callers, number, caller),
        }
    }

    /// A callback arrives. `patient`: nobody waits for it yet.
    pub fn arrive_callback(&mut self, lsn: Lsn, callback: B, patient: bool) {
        if lsn <= self.durable || self.failed {
            self.acks.push_back((callback, lsn <= self.durable));
            return;
        }
        insert(&mut self.callbacks, lsn, callback);
        let busy = self.writer.is_some() || self.flusher.is_some();
        if self.gathering.arrive(lsn, patient, busy) {
            self.hurry_all();
        }
    }

    /// Frames are to be written although nobody waits.
    pub fn request_write_out(&mut self) {
        self.write_out = !self.failed;
    }

    /// A frame is on the device. Frames complete in order. `continues`: a batch
    /// goes on in the next frame. Fills `wake` with callers that waited for the write only.
    pub fn frame_written(&mut self, last_lsn: Lsn, continues: bool, wake: &mut Wake<C>) {
        debug_assert!(self.writer.is_some() && last_lsn > self.written);
        self.written = last_lsn;
        if !continues {
            self.complete = last_lsn;
        }
        pop_reached(&mut self.written_callers, self.written, |waiter| wake.push(waiter));
    }

    /// The writer has written what it took, or has failed to. Who has joined it is the writer now.
    pub fn end_write(&mut self) {
        debug_assert!(self.writer.is_some());
        self.writer = self.joiner.take();
        self.sent = None;
    }

    /// Somebody writes.
    pub fn has_writer(&self) -> bool {
        self.writer.is_some()
    }

    /// True when the writer's frame may be made durable by itself: somebody waits for durability, and neither a flush in
    /// flight nor anything on the device has to become durable before it.
    pub fn may_force(&self) -> bool {
        let waits = matches!(self.writer, Some(Holder { own: Some(Goal::Durable(_)) }))
            || !self.durable_callers.is_empty()
            || !self.callbacks.is_empty();
        waits && self.flusher.is_none() && self.written == self.durable
    }

    /// Who waits for the durability of the LSNs from `first` to `last`: these go into the next frames.
    pub fn waiting_for(
        &self,
        first: Lsn,
        last: Lsn,
    ) -> (impl Iterator<Item = &C>, impl Iterator<Item = &B>) {
        let keys = (first, 0)..(last.max(first) + 1, 0);
        (
            self.durable_callers.range(keys.clone()).map(|(_, caller)| caller),
            self.callbacks.range(keys).map(|(_, callback)| callback),
        )
    }

    /// The frame written last was forced to the medium, as [`Core::may_force`] allowed: it is durable. As
    /// [`Core::end_flush`] otherwise.
    pub fn frame_forced(&mut self, wake: &mut Wake<C>) -> usize {
        if self.failed { 0 } else { self.advance(self.complete, wake) }
    }

    /// A flush has succeeded. Fills `wake` with the callers whose goal is reached now; callbacks queue up for
    /// [`Core::take_acks`]. Answers how many waiters for durability it was good for.
    pub fn end_flush(&mut self, flush: Flush, wake: &mut Wake<C>) -> usize {
        debug_assert!(self.flusher.is_some_and(|(begun, _)| begun == flush));
        let own = self.flusher.take().and_then(|(_, by)| by.own);
        if self.failed {
            // After a failure the device may report as flushed what it has dropped.
            return 0;
        }
        self.flushes_ended = flush.number;
        pop_reached(&mut self.flush_callers, flush.number, |waiter| wake.push(waiter));
        let own = own.is_some_and(|own| self.needs_flush(own) && is_durable_by(own, flush.covers));
        let acknowledged = self.advance(flush.covers, wake) + usize::from(own);
        self.are_few = acknowledged <= FEW;
        acknowledged
    }

    fn advance(&mut self, durable: Lsn, wake: &mut Wake<C>) -> usize {
        if durable <= self.durable {
            return 0;
        }
        let busy = self.writer.and_then(|by| by.own).is_some_and(|own| is_durable_by(own, durable));
        let before = wake.len() + self.acks.len();
        self.durable = durable;
        pop_reached(&mut self.durable_callers, durable, |waiter| wake.push(waiter));
        let acks = &mut self.acks;
        let all = mutation::active(Mutation::AcknowledgeOutOfOrder);
        let reached = if all { Lsn::MAX } else { durable };
        pop_reached(&mut self.callbacks, reached, |waiter| acks.push_back((waiter, true)));
        let left = if self.gathering.count() == 0 {
            0
        } else {
            let above = (self.gathering.hurried().max(durable) + 1, 0)..;
            self.callbacks.range(above).count()
        };
        if self.gathering.advance(durable, left) {
            self.hurry_all();
        }
        wake.len() + self.acks.len() - before + usize::from(busy)
    }

    /// A flush failed, or a frame could not be written anywhere. Fills `wake` with every caller that sleeps: all
    /// have failed. Whoever holds a role still ends it.
    pub fn fail(&mut self, wake: &mut Wake<C>) {
        self.failed = true;
        self.write_out = false;
        for callers in
            [&mut self.durable_callers, &mut self.written_callers, &mut self.flush_callers]
        {
            wake.extend(std::mem::take(callers).into_values());
        }
        let callbacks = std::mem::take(&mut self.callbacks);
        self.hurry_all();
        self.acks.extend(callbacks.into_values().map(|waiter| (waiter, false)));
    }

    /// A flush has failed: [`Core::fail`] follows or went before.
    pub fn drop_flush(&mut self) {
        self.flusher = None;
    }

    /// Takes up to `limit` callbacks to call, in order, each with its success. Empty when there are none
    /// or somebody else is calling some; otherwise [`Core::finish_acks`] must follow.
    pub fn take_acks(&mut self, limit: usize) -> Vec<(B, bool)> {
        if self.acking || self.acks.is_empty() {
            return Vec::new();
        }
        self.acking = true;
        self.acks.drain(..limit.min(self.acks.len())).collect()
    }

    /// The callbacks taken were called.
    pub fn finish_acks(&mut self) {
        debug_assert!(self.acking);
        self.acking = false;
    }
}

fn first<T>(waiters: &Waiters<T>) -> Option<Lsn> {
    waiters.first_key_value().map(|(key, _)| key.0)
}

fn last<T>(waiters: &Waiters<T>) -> Option<Lsn> {
    waiters.last_key_value().map(|(key, _)| key.0)
}

/// Behind those that wait for the same.
fn insert<T>(waiters: &mut Waiters<T>, lsn: Lsn, waiter: T) {
    // Nearly always it waits for more than all others.
    let place = if last(waiters).is_none_or(|last| last < lsn) {
        0
    } else {
        let same = waiters.range((lsn, 0)..=(lsn, u64::MAX)).next_back();
        same.map_or(0, |(key, _)| key.1 + 1)
    };
    waiters.insert((lsn, place), waiter);
}

/// Takes the first that waits for an LSN above `lsn`.
fn take_above<T>(waiters: &mut Waiters<T>, lsn: Lsn) -> Option<((Lsn, u64), T)> {
    let key = *waiters.range((lsn + 1, 0)..).next()?.0;
    waiters.remove_entry(&key)
}

fn is_durable_by(goal: Goal, durable: Lsn) -> bool {
    matches!(goal, Goal::Durable(lsn) if lsn <= durable)
}

/// Removes the waiters up to `lsn`, in LSN order.
fn pop_reached<T>(waiters: &mut Waiters<T>, lsn: Lsn, mut take: impl FnMut(T)) {
    while let Some(entry) = waiters.first_entry() {
        if entry.key().0 > lsn {
            break;
        }
        take(entry.remove());
    }
}

#[cfg(test)]
mod explore;
#[cfg(test)]
mod tests;
