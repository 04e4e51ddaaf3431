//! One operation: done, compared with what the model makes of it, and taken into the history.
//!
//! What succeeded has its place there; what failed for a reason that the model cannot know has either state until it has
//! ended, and the one before from then on; what was acknowledged survives every crash from there.

use std::ops::Range;
use std::sync::Arc;

use super::failure::{Failure, describe, first_difference, guard};
use super::{Depth, Explorer, InFlight, Run, reading_moves_times};
use crate::model::history::Durable;
use crate::model::times::Span;
use crate::model::{Errno, Model, Outcome, Slot, errno};
use crate::op::{Commit, Hold, Op, Sync, Target};
use crate::system::{Session, System, SystemError};

/// How an operation went.
pub(super) enum Executed {
    Went(String),
    Shutdown,
}

/// What an operation that failed would have left.
struct Effect {
    next: Model,
    /// The state in its middle.
    middle: Vec<Model>,
    /// What there may be of it after a crash although it has failed.
    left_open: Option<Arc<Model>>,
    /// The model says that it could have been done.
    is_possible: bool,
}

impl<S: System> Explorer<'_, S> {
    /// Does `op`, and examines the crash states that it passes through.
    pub(super) fn execute(
        &mut self,
        run: &mut Run<S::Session>,
        op: &Op,
    ) -> Result<Executed, Failure> {
        if run.depth == Depth::Workload {
            self.tally.operations += 1;
        }
        if let Op::Overlap { outer, amid, inner } = op {
            return self.execute_overlap(run, outer, *amid, inner);
        }
        let began_ns = run.clock.elapsed_ns();
        let result = guard(&format!("executing {op}"), || run.session.apply(op))?;
        let clock = self.span_since(run, began_ns);
        run.clock.advance_ns(1000);
        let granted = match &result {
            Ok(Outcome::Count(count)) => Some(*count),
            _ => None,
        };
        let before = Self::at(run.history.now(), clock);
        let mut next = Model::clone(&before);
        let expected = next.apply(op, granted);
        if granted.is_some() {
            let whole = Model::clone(&before).apply(op, None);
            self.check_count(run, op, (granted, &whole), 1)?;
        }
        if result.is_ok() {
            Self::submitted(run, op, &before, &next);
        }
        // Some operations have a state in the middle, with its own place in the order.
        let middle = before.half_way(op);
        let left_open = Self::left_open(&before, op, run.session.left_open_bytes());
        match (&result, &expected) {
            (Err(error), Err(expected)) if error.errno == *expected => {}
            (Err(error), _) if error.is_environmental() => {
                let is_possible = expected.is_ok();
                let effect = Effect { next, middle, left_open, is_possible };
                return self.refused(run, (op, error), &before, (effect, clock));
            }
            (Err(error), Err(expected)) if !op.promises_its_error() || error.errno == *expected => {
            }
            (Ok(result), Ok(expected)) if result == expected => {}
            (Ok(Outcome::Data(found)), Ok(Outcome::Data(expected))) => {
                return Err(Failure::new(format!("{op} gave wrong data")).with([
                    format!("found {} bytes: {}", found.len(), first_difference(found, expected)),
                    format!("expected {} bytes", expected.len()),
                ]));
            }
            _ => {
                let text = format!("{op}: {}, expected {expected:?}", describe(&result));
                return Err(Failure::new(text));
            }
        }
        let moves_a_time = matches!(op, Op::Read { .. }) && reading_moves_times(self.case);
        if (!op.is_neutral() || moves_a_time) && result.is_ok() {
            run.history.extend(middle.into_iter().map(Arc::new));
            run.history.push(Arc::new(next));
            run.history.leave_open(left_open);
        }
        // An untorn write gets its place in the log with the sync that follows.
        if result.is_ok() && !matches!(op, Op::Untorn { .. }) {
            run.note_lsn(op.answers_its_lsn());
        }
        self.examine(run)?;
        if result.is_ok() {
            let now = Arc::clone(run.history.now());
            self.acknowledge(run, op, &now)?;
            self.acknowledge_write(run, op, (&before, granted))?;
        }
        Ok(Executed::Went(describe(&result)))
    }

    /// `op` failed for what is around it: a fault, no room, a volume that was shut down.
    fn refused(
        &mut self,
        run: &mut Run<S::Session>,
        (op, error): (&Op, &SystemError),
        before: &Arc<Model>,
        (effect, clock): (Effect, Span),
    ) -> Result<Executed, Failure> {
        self.check_refusal(run, (op, error), 1)?;
        self.tally.refused += 1;
        let moment = run.history.moment();
        // Not done, but a crash meanwhile may leave either state.
        let has_effect = effect.is_possible && !op.is_neutral();
        let next = Arc::new(effect.next);
        if has_effect {
            run.history.extend(effect.middle.into_iter().map(Arc::new));
            run.history.extend(effect.left_open.clone());
            run.history.push(Arc::clone(&next));
        }
        self.examine(run)?;
        if has_effect {
            run.history.back_to(moment);
            let waits = error.shutdown && op.waits_for_its_frame();
            run.history.leave_open(effect.left_open.or_else(|| waits.then(|| Arc::clone(&next))));
            if matches!(op, Op::Append { .. }) {
                // A part may have gone home before it was cut off again: each in its place in
                // the order.
                let part = Model::clone(&next).counted_as(before.step());
                let now = Arc::clone(run.history.now());
                run.history.extend([Arc::new(part), now]);
            }
            let read = op.reads_back();
            let began_ns = run.clock.elapsed_ns();
            let read =
                read.map(|read| guard("reading after an error", || run.session.apply(&read)));
            let found = read.transpose()?.and_then(Result::ok);
            let looked = self.span_since(run, began_ns);
            self.adopt_half(run, op, (clock, looked), found.as_ref());
            if !self.case.faults.is_empty() {
                Self::doubt_allocation(run, op, clock);
            }
            self.examine(run)?;
            self.examine_point(run, false, "after the error")?;
        }
        Ok(if error.shutdown { Executed::Shutdown } else { Executed::Went(error.to_string()) })
    }

    /// A fault has struck the disk, now or before: anything may fail.
    pub(super) fn is_excused(&self, run: &Run<S::Session>) -> bool {
        let is_first = run.depth == Depth::Workload;
        self.is_struck() && (!is_first || run.device.faults_struck() > 0)
    }

    /// Without a fault nothing fails but for lack of room, and not where there is more than `times` what it takes.
    pub(super) fn check_refusal(
        &self,
        run: &Run<S::Session>,
        (op, error): (&Op, &SystemError),
        times: u64,
    ) -> Result<(), Failure> {
        if self.is_excused(run) {
            return Ok(());
        }
        let is_known = error.is_for_lack_of_room()
            && (error.errno != errno::EOPNOTSUPP || op.may_be_unsupported());
        if !is_known {
            return Err(Failure::new(format!("{op} failed without a fault: {error}")));
        }
        let available = run.session.available_blocks();
        if op.most_blocks().zip(available).is_some_and(|(most, left)| left > times * most)
            && error.errno == errno::ENOSPC
        {
            let text = format!("{op}: {error}, with {available:?} blocks available");
            return Err(Failure::new(text));
        }
        Ok(())
    }

    /// Less than all is written or copied only where there is no room for more, or a fault has struck. `whole`: what all of it would be.
    pub(super) fn check_count(
        &self,
        run: &Run<S::Session>,
        op: &Op,
        (granted, whole): (Option<u64>, &Result<Outcome, Errno>),
        times: u64,
    ) -> Result<(), Failure> {
        let (Some(count), Ok(Outcome::Count(whole))) = (granted, whole) else { return Ok(()) };
        let room = op.most_blocks().zip(run.session.available_blocks());
        let is_scarce = room.is_none_or(|(most, left)| left <= times * most);
        if count >= *whole || is_scarce || self.is_excused(run) {
            return Ok(());
        }
        Err(Failure::new(format!("{op}: {count} of {whole} bytes, and there is room")))
    }

    /// What there may be after a crash of a write of which the log had so many bytes when the volume was shut down.
    pub(super) fn left_open(before: &Model, op: &Op, bytes: Option<u64>) -> Option<Arc<Model>> {
        let bytes = bytes?;
        let mut open = before.clone();
        open.apply(op, Some(bytes)).ok()?;
        Some(Arc::new(open))
    }

    /// When what began then and has ended now may have happened.
    pub(super) fn span_since(&self, run: &Run<S::Session>, began_ns: u64) -> Span {
        if self.system.has_times() { run.clock.span_since(began_ns) } else { Span::ANY }
    }

    /// `model`, at this time.
    pub(super) fn at(model: &Model, clock: Span) -> Arc<Model> {
        let mut model = model.clone();
        model.set_clock(clock);
        Arc::new(model)
    }

    /// An allocation that has failed may have done a part of it.
    pub(super) fn doubt_allocation(run: &mut Run<S::Session>, op: &Op, clock: Span) {
        if matches!(op, Op::Allocate { .. }) {
            let mut doubted = Model::clone(&Self::at(run.history.now(), clock));
            doubted.doubt_allocation(op);
            run.history.push(Arc::new(doubted));
        }
    }

    /// An operation with a state in the middle failed: what its range reads as since tells whether it got there, if that is not
    /// what it would read as anyway. The one was done in the first span of time, and the other in the second.
    pub(super) fn adopt_half(
        &self,
        run: &mut Run<S::Session>,
        op: &Op,
        (clock, looked): (Span, Span),
        found: Option<&Outcome>,
    ) {
        let (Some(zeroing), Some(read), Some(found)) = (op.first_half(), op.reads_back(), found)
        else {
            return;
        };
        let now = Self::at(run.history.now(), clock);
        let shows = |model: &Model| model.clone().apply(&read, None).as_ref() == Ok(found);
        let mut half = Model::clone(&now);
        if half.apply(&zeroing, None).is_ok() && shows(&half) && !shows(&now) {
            run.history.push(Arc::new(half));
        }
        self.note_looking(run, &read, looked);
    }

    /// Somebody has looked at what an operation that failed has left, with `read`: that may have moved times.
    pub(super) fn note_looking(&self, run: &mut Run<S::Session>, read: &Op, looked: Span) {
        if reading_moves_times(self.case) {
            let step = run.history.now().step();
            let mut read_back = Model::clone(&Self::at(run.history.now(), looked));
            if read_back.apply(read, None).is_ok() {
                run.history.push(Arc::new(read_back.counted_as(step)));
            }
        }
    }

    /// What `sync` of `range` promises when it has succeeded.
    pub(super) fn promise(now: &Model, sync: &Sync, range: &Range<u64>) -> Option<Durable> {
        let data_only = matches!(sync, Sync::Data(_));
        let Some(target) = sync.target() else { return Some(Durable::All) };
        let ino = now.target(target).ok()?;
        let is_file = now.inode(ino).is_some_and(|inode| inode.data().is_some());
        Some(if is_file && *range != (0..u64::MAX) {
            Durable::Range { ino, data_only, range: range.clone() }
        } else {
            Durable::Inode { ino, data_only }
        })
    }

    /// Remembers what a ticket stands for. `before` is the state that `op` has found, `next` the one after it.
    pub(super) fn submitted(run: &mut Run<S::Session>, op: &Op, before: &Arc<Model>, next: &Model) {
        let (then, durable, ticket, hold) = match op {
            Op::Submit { sync, range, ticket, hold } => {
                let then = Arc::clone(before);
                let durable = Self::promise(&then, sync, range);
                (then, durable, ticket, hold)
            }
            Op::Batch { commit: Commit::Async { ticket, hold }, .. } => {
                (Arc::new(next.clone()), Some(Durable::Prefix), ticket, hold)
            }
            _ => return,
        };
        let Some(durable) = durable else { return };
        let text = format!("{op} (operation count {})", then.step());
        let in_flight = InFlight { then, durable, text };
        match hold {
            Hold::Drop => run.dropped.push(in_flight),
            Hold::Await | Hold::Deliver => drop(run.tickets.insert(*ticket, in_flight)),
        }
    }

    /// A sync of what there was in `now` returned: from now on more must survive, so all images are looked at again.
    pub(super) fn acknowledge(
        &mut self,
        run: &mut Run<S::Session>,
        op: &Op,
        now: &Arc<Model>,
    ) -> Result<(), Failure> {
        let durable = match op {
            Op::Checkpoint => Some(Durable::All),
            Op::Batch { commit: Commit::Sync, .. } => Some(Durable::Prefix),
            Op::Sync(sync) => Self::promise(now, sync, &(0..u64::MAX)),
            _ => None,
        };
        let Some(durable) = durable else { return Ok(()) };
        let by = format!("{op} (operation count {})", now.step());
        run.history.acknowledge_at(now, &durable, &by);
        self.examine_point(run, false, &format!("after the return of {op}"))
    }

    /// Through a handle of a certain kind every write is durable when it returns. `before` it, and so many bytes were written.
    fn acknowledge_write(
        &mut self,
        run: &mut Run<S::Session>,
        op: &Op,
        (before, granted): (&Model, Option<u64>),
    ) -> Result<(), Failure> {
        let (Op::Write { target, .. }
        | Op::Untorn { target, .. }
        | Op::Append { target, .. }
        | Op::CopyRange { to: target, .. }) = op
        else {
            return Ok(());
        };
        let Target::Slot(slot) = target else { return Ok(()) };
        let Some(Slot { ino, syncs: true, .. }) = before.slots().get(slot).copied() else {
            return Ok(());
        };
        let size = before.inode(ino).and_then(|inode| inode.data()).map_or(0, |data| data.size);
        let offset = match op {
            Op::Write { offset, .. } | Op::Untorn { offset, .. } => *offset,
            Op::CopyRange { to_offset, .. } => *to_offset,
            _ => size,
        };
        let Some(count) = granted.filter(|count| *count > 0) else { return Ok(()) };
        let durable = Durable::Range { ino, data_only: true, range: offset..offset + count };
        run.history.acknowledge(&durable, &format!("{op}, by a handle that syncs"));
        self.examine_point(run, false, &format!("after the return of {op}"))
    }
}
