//! Group commit as a pure state machine: who leads, what is in flight, what is durable, and in
//! which order waiters hear of it. No locks, no I/O, no clock; [`super::Log`] keeps one behind
//! its core lock and does what it says.
//!
//! **Rules.** There are no timers. At most one *leader* writes frames. When nobody leads, whoever
//! comes leads at once. While it writes and flushes, everybody else waits and the next group
//! accumulates. A flush covers the frames whose writes completed before it started, never later
//! ones; anyone may flush at any time (the checkpoint does), also beside the leader. A leader
//! that is a blocked caller leaves after its own round and names exactly one blocked caller as the
//! next leader; if only callbacks wait, the asynchronous driver (the log thread, or a step
//! function) is to lead.
//!
//! **Invariants**, checked for every interleaving by `explore` below:
//! - an LSN is acknowledged as durable only after a successful flush that started after the
//!   writes of all frames up to it had completed, and before any failure;
//! - callbacks are acknowledged in LSN order, but for those that come when their LSN is durable already;
//! - nobody waits for ever: whenever nothing is in flight and no one is about to act, nobody waits;
//! - after a failure nothing becomes durable any more, and every waiter hears of it.

use crate::mutation::{self, Mutation};
use std::collections::{BTreeMap, VecDeque};

/// Log sequence number: one per operation, from 1 on.
pub type Lsn = u64;

/// What a waiter waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Goal {
    /// The LSN's frame is on the device, perhaps in its volatile cache.
    Written(Lsn),
    /// The LSN survives a power cut.
    Durable(Lsn),
}

/// What a caller that arrives has to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// The goal is reached.
    Done,
    /// The log is shut down.
    Failed,
    /// Nobody leads: the caller is the leader now.
    Lead,
    /// Somebody leads: call [`Core::park`] and wait.
    Wait,
}

/// Who leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Leader {
    Caller(Goal),
    Driver,
}

/// What happens after a round.
#[derive(Debug, PartialEq, Eq)]
pub enum Next<T> {
    /// This blocked caller is the leader now: wake it and tell it.
    Caller(T),
    /// Nobody leads, but there is work for the driver: wake it.
    Driver,
    /// Nobody waits for a round.
    Idle,
}

/// A flush under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[must_use = "a flush that started must end"]
pub struct Flush {
    covers: Lsn,
}

/// Blocked callers that have reached their goal, or have to hear of a failure.
pub type Wake<T> = Vec<T>;

type Waiters<T> = BTreeMap<(Lsn, u64), T>;

/// See the module's head. `T` stands for a waiter: a parked thread's slot or a callback.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Core<T> {
    /// Last LSN of the frames on the device.
    written: Lsn,
    /// The same, but never inside of a batch that spans frames: what a flush makes durable.
    complete: Lsn,
    durable: Lsn,
    leader: Option<Leader>,
    failed: bool,
    /// The queue grew so long that frames are to be written although nobody waits.
    write_out: bool,
    durable_callers: Waiters<T>,
    written_callers: Waiters<T>,
    callbacks: Waiters<T>,
    /// Callbacks to call, in this order; the flag is success.
    acks: VecDeque<(T, bool)>,
    /// Somebody is calling callbacks.
    acking: bool,
    next_ticket: u64,
}

impl<T> Core<T> {
    /// A log of which everything up to `durable` is durable and nothing else exists.
    pub fn new(durable: Lsn) -> Self {
        Self {
            written: durable,
            complete: durable,
            durable,
            leader: None,
            failed: false,
            write_out: false,
            durable_callers: BTreeMap::new(),
            written_callers: BTreeMap::new(),
            callbacks: BTreeMap::new(),
            acks: VecDeque::new(),
            acking: false,
            next_ticket: 0,
        }
    }

    /// Everything up to here is durable.
    pub fn durable(&self) -> Lsn {
        self.durable
    }

    /// True after a failed flush or a frame that could not be written. Sticky.
    pub fn is_failed(&self) -> bool {
        self.failed
    }

    /// Callbacks that are waiting or not called yet.
    pub fn callbacks_pending(&self) -> usize {
        self.callbacks.len() + self.acks.len()
    }

    /// Callbacks whose LSN is not durable yet.
    pub fn callbacks_waiting(&self) -> usize {
        self.callbacks.len()
    }

    /// Whether a waiter with this goal need not wait any more.
    pub fn reached(&self, goal: Goal) -> bool {
        match goal {
            Goal::Written(lsn) => lsn <= self.written,
            Goal::Durable(lsn) => lsn <= self.durable,
        }
    }

    /// A caller that can block arrives, after its operation was appended.
    pub fn arrive(&mut self, goal: Goal) -> Arrival {
        if self.reached(goal) {
            return Arrival::Done;
        }
        if self.failed {
            return Arrival::Failed;
        }
        if self.leader.is_some() {
            return Arrival::Wait;
        }
        self.lead(Leader::Caller(goal));
        Arrival::Lead
    }

    fn ticket(&mut self) -> u64 {
        self.next_ticket += 1;
        self.next_ticket
    }

    /// Parks a caller that was told to wait, in the same critical section.
    pub fn park(&mut self, goal: Goal, waiter: T) {
        let ticket = self.ticket();
        match goal {
            Goal::Written(lsn) => self.written_callers.insert((lsn, ticket), waiter),
            Goal::Durable(lsn) => self.durable_callers.insert((lsn, ticket), waiter),
        };
    }

    /// A callback arrives. True when the driver has to be woken: nobody who acts now will see it.
    pub fn arrive_callback(&mut self, lsn: Lsn, callback: T) -> bool {
        if lsn <= self.durable || self.failed {
            self.acks.push_back((callback, lsn <= self.durable));
            return !self.acking;
        }
        let ticket = self.ticket();
        self.callbacks.insert((lsn, ticket), callback);
        self.leader.is_none()
    }

    /// Frames are to be written although nobody waits. True when the driver has to be woken.
    pub fn request_write_out(&mut self) -> bool {
        let wake = !self.write_out && self.leader.is_none() && !self.failed;
        self.write_out = !self.failed;
        wake
    }

    fn wants_round(&self) -> bool {
        !self.failed
            && (self.write_out
                || !self.durable_callers.is_empty()
                || !self.callbacks.is_empty()
                || !self.written_callers.is_empty())
    }

    /// True when the driver has something to do: a round to lead or callbacks to call.
    pub fn driver_has_work(&self) -> bool {
        (self.leader.is_none() && self.wants_round()) || (!self.acking && !self.acks.is_empty())
    }

    /// The driver takes the lead if there is reason to and nobody else has it.
    pub fn try_lead_as_driver(&mut self) -> bool {
        let lead = self.leader.is_none() && self.wants_round();
        if lead {
            self.lead(Leader::Driver);
        }
        lead
    }

    /// A round begins: it takes all that was appended, so what was to be written out will be.
    fn lead(&mut self, leader: Leader) {
        self.leader = Some(leader);
        self.write_out = false;
    }

    /// A frame of the leader is on the device. Frames complete in order. `continues`: a batch
    /// goes on in the next frame. Fills `wake` with callers that waited for the write only.
    pub fn frame_written(&mut self, last_lsn: Lsn, continues: bool, wake: &mut Wake<T>) {
        debug_assert!(self.leader.is_some() && last_lsn > self.written);
        self.written = last_lsn;
        if !continues {
            self.complete = last_lsn;
        }
        pop_reached(&mut self.written_callers, self.written, |waiter| wake.push(waiter));
    }

    /// True when somebody, the leader included, waits for a flush of what is written now.
    pub fn wants_flush(&self) -> bool {
        let waits = |lsn: Lsn| lsn > self.durable && lsn <= self.complete;
        let first =
            |waiters: &Waiters<T>| waiters.first_key_value().is_some_and(|(k, _)| waits(k.0));
        let own = matches!(self.leader, Some(Leader::Caller(Goal::Durable(lsn))) if waits(lsn));
        !self.failed && (own || first(&self.durable_callers) || first(&self.callbacks))
    }

    /// True when somebody waits for durability at all: the next frame may be forced through.
    pub fn wants_durability(&self) -> bool {
        matches!(self.leader, Some(Leader::Caller(Goal::Durable(_))))
            || !self.durable_callers.is_empty()
            || !self.callbacks.is_empty()
    }

    /// True when everything on the device is durable.
    pub fn all_written_is_durable(&self) -> bool {
        self.written == self.durable
    }

    /// A flush starts now.
    pub fn begin_flush(&self) -> Flush {
        Flush { covers: self.complete }
    }

    /// A flush has succeeded. Fills `wake` with the callers whose LSN is durable now; callbacks queue up for
    /// [`Core::take_acks`].
    pub fn end_flush(&mut self, flush: Flush, wake: &mut Wake<T>) {
        if self.failed || flush.covers <= self.durable {
            // After a failure the device may report as flushed what it has dropped.
            return;
        }
        self.durable = flush.covers;
        pop_reached(&mut self.durable_callers, self.durable, |waiter| wake.push(waiter));
        let acks = &mut self.acks;
        let all = mutation::active(Mutation::AcknowledgeOutOfOrder);
        let reached = if all { Lsn::MAX } else { self.durable };
        pop_reached(&mut self.callbacks, reached, |waiter| acks.push_back((waiter, true)));
    }

    /// A flush failed, or a frame could not be written anywhere. Fills `wake` with every blocked
    /// caller: all have failed.
    pub fn fail(&mut self, wake: &mut Wake<T>) {
        self.failed = true;
        self.write_out = false;
        wake.extend(std::mem::take(&mut self.durable_callers).into_values());
        wake.extend(std::mem::take(&mut self.written_callers).into_values());
        let callbacks = std::mem::take(&mut self.callbacks);
        self.acks.extend(callbacks.into_values().map(|waiter| (waiter, false)));
    }

    /// The leader's round is over.
    pub fn end_round(&mut self) -> Next<T> {
        debug_assert!(self.leader.is_some());
        self.leader = None;
        if let Some(((lsn, _), waiter)) = self.durable_callers.pop_first() {
            self.lead(Leader::Caller(Goal::Durable(lsn)));
            return Next::Caller(waiter);
        }
        if let Some(((lsn, _), waiter)) = self.written_callers.pop_first() {
            self.lead(Leader::Caller(Goal::Written(lsn)));
            return Next::Caller(waiter);
        }
        if self.wants_round() { Next::Driver } else { Next::Idle }
    }

    /// Takes up to `limit` callbacks to call, in order, each with its success. Empty when there are none
    /// or somebody else is calling some; otherwise [`Core::finish_acks`] must follow.
    pub fn take_acks(&mut self, limit: usize) -> Vec<(T, bool)> {
        if self.acking || self.acks.is_empty() {
            return Vec::new();
        }
        self.acking = true;
        self.acks.drain(..limit.min(self.acks.len())).collect()
    }

    /// The callbacks taken were called. True when more have queued up.
    pub fn finish_acks(&mut self) -> bool {
        debug_assert!(self.acking);
        self.acking = false;
        !self.acks.is_empty()
    }
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
#[path = "core_explore.rs"]
mod explore;

#[cfg(test)]
mod tests {
    use super::*;

    fn lead_and_write(core: &mut Core<u8>, lsn: Lsn) -> Wake<u8> {
        let mut wake = Vec::new();
        core.frame_written(lsn, false, &mut wake);
        wake
    }

    #[test]
    fn an_idle_log_is_led_at_once_by_whoever_comes() {
        let mut core = Core::<u8>::new(5);
        assert_eq!(core.arrive(Goal::Durable(5)), Arrival::Done);
        assert_eq!(core.arrive(Goal::Durable(6)), Arrival::Lead);
        assert_eq!(core.arrive(Goal::Durable(7)), Arrival::Wait);
        assert_eq!(core.arrive(Goal::Written(5)), Arrival::Done);
    }

    #[test]
    fn a_flush_covers_only_what_was_written_when_it_started() {
        let mut core = Core::<u8>::new(0);
        assert_eq!(core.arrive(Goal::Durable(2)), Arrival::Lead);
        let mut wake = lead_and_write(&mut core, 1);
        let flush = core.begin_flush();
        core.frame_written(2, false, &mut wake);
        core.end_flush(flush, &mut wake);
        assert_eq!(core.durable(), 1);
        assert!(core.wants_flush());
    }

    #[test]
    fn the_leader_names_the_first_blocked_caller_before_the_driver() {
        let mut core = Core::<u8>::new(0);
        assert_eq!(core.arrive(Goal::Durable(1)), Arrival::Lead);
        assert!(!core.arrive_callback(2, 2));
        core.park(Goal::Written(3), 3);
        core.park(Goal::Durable(5), 5);
        core.park(Goal::Durable(4), 4);
        let mut wake = lead_and_write(&mut core, 1);
        let flush = core.begin_flush();
        core.end_flush(flush, &mut wake);
        assert_eq!(core.end_round(), Next::Caller(4));
        wake.extend(lead_and_write(&mut core, 4));
        assert_eq!(wake, [3]);
        let flush = core.begin_flush();
        core.end_flush(flush, &mut wake);
        assert_eq!(core.take_acks(9), [(2, true)]);
        assert!(!core.finish_acks());
        assert_eq!(core.end_round(), Next::Caller(5));
        wake.extend(lead_and_write(&mut core, 5));
        assert!(!core.arrive_callback(6, 6));
        assert_eq!(core.end_round(), Next::Driver);
        assert!(core.try_lead_as_driver());
        assert!(!core.try_lead_as_driver());
        wake.extend(lead_and_write(&mut core, 6));
        let flush = core.begin_flush();
        core.end_flush(flush, &mut wake);
        assert_eq!(core.end_round(), Next::Idle);
        assert_eq!(core.take_acks(9), [(6, true)]);
    }

    #[test]
    fn a_batch_is_durable_as_a_whole_or_not_at_all() {
        let mut core = Core::<u8>::new(0);
        assert_eq!(core.arrive(Goal::Durable(3)), Arrival::Lead);
        let mut wake = Vec::new();
        core.frame_written(1, false, &mut wake);
        core.frame_written(2, true, &mut wake);
        let flush = core.begin_flush();
        core.end_flush(flush, &mut wake);
        assert_eq!(core.durable(), 1);
        core.frame_written(3, false, &mut wake);
        let flush = core.begin_flush();
        core.end_flush(flush, &mut wake);
        assert_eq!(core.durable(), 3);
    }

    #[test]
    fn nothing_becomes_durable_after_a_failure() {
        let mut core = Core::<u8>::new(0);
        assert_eq!(core.arrive(Goal::Durable(1)), Arrival::Lead);
        let mut wake = lead_and_write(&mut core, 1);
        core.park(Goal::Durable(2), 2);
        assert!(!core.arrive_callback(3, 3));
        let (first, second) = (core.begin_flush(), core.begin_flush());
        core.fail(&mut wake);
        core.end_flush(second, &mut wake);
        let _ = first;
        assert_eq!((core.durable(), wake), (0, vec![2]));
        assert_eq!(core.end_round(), Next::Idle);
        assert_eq!(core.take_acks(9), [(3, false)]);
        assert_eq!(core.arrive(Goal::Durable(1)), Arrival::Failed);
    }
}
