//! Operations that overlap: one of them, which changes nothing itself, is in the midst of its device calls while the others
//! begin. Each of those has its place in the order, between its beginning and its return; the outer one
//! promises when it returns, perhaps in the midst of one of the others, what it would have promised at its beginning. An error of any of them is its own: it promises nothing, and one that
//! has returned an error has not happened; until it returns, a crash may leave either. (A batch, or a write on a full volume, that waited for
//! its frame when the volume was shut down may be there after a crash also later: its frame may be on the medium although its write failed.)

use std::sync::Arc;

use super::execute::Executed;
use super::failure::{Failure, describe, guard};
use super::{Explorer, Run};
use crate::disk::Event;
use crate::image::BLOCK_BYTES;
use crate::model::history::{Durable, Moment};
use crate::model::times::Span;
use crate::model::{Errno, Model, Outcome};
use crate::op::{Amid, Op};
use crate::system::{Answer, Session, System, SystemError};

/// What is on its way home has its blocks, and is promised them still, while it is: so many times as much room is enough for certain.
const ROOM_AMID: u64 = 3;

/// One of several operations, between its beginning and its return.
struct Begun {
    moment: Moment,
    expected: Result<Outcome, Errno>,
    /// What it answers if it is not cut short.
    whole: Option<Result<Outcome, Errno>>,
    /// The state after it.
    next: Arc<Model>,
    /// What there may be of it after a crash although it has failed, or what is left of it.
    left_open: Option<Arc<Model>>,
    /// What had happened for certain before it.
    known: Arc<Model>,
    /// The volume had been shut down before: it is refused before it is anywhere.
    is_late: bool,
}

/// What is known of the outer operation while the others are looked at.
struct Outer {
    /// The state at its beginning.
    then: Arc<Model>,
    /// What it may answer: it may look at what it is about before one of the others, or after it.
    expected: Vec<Result<Outcome, Errno>>,
    /// Its target has been another file since.
    has_target_moved: bool,
    /// It changes something, and this comes of it.
    begun: Option<Begun>,
    /// Then also: the states that it passes through.
    passes: Vec<Arc<Model>>,
    has_returned: bool,
    /// When all of them ran.
    clock: Span,
}

impl Outer {
    /// What has happened for certain: while the outer operation changes something, what there was before.
    fn known<S: Session>(&self, run: &Run<S>) -> Arc<Model> {
        Arc::clone(if self.begun.is_some() { &self.then } else { run.history.now() })
    }

    /// Others have gone on, to the state `now`.
    fn see(&mut self, op: &Op, now: &Model) {
        if self.has_returned || self.begun.is_some() {
            return;
        }
        self.expected.push(Model::clone(now).apply(op, None));
        self.has_target_moved |= !has_same_target(op, &self.then, now);
    }
}

/// What an error that shut the volume down leaves open.
#[derive(Default)]
struct Doubt {
    /// Somebody has heard of it: what begins later does not happen.
    is_shut_down: bool,
    /// What there is if the operation happened that was waiting for its frame then.
    state: Option<Arc<Model>>,
}

/// A sync in either state is one of the same file.
fn has_same_target(op: &Op, then: &Model, now: &Model) -> bool {
    let (Op::Sync(sync) | Op::Submit { sync, .. }) = op else { return true };
    sync.target().is_none_or(|target| then.target(target).ok() == now.target(target).ok())
}

/// What a read has found amid a change: of each page what one of the states has there.
fn is_mixture(
    op: &Op,
    result: &Result<Outcome, SystemError>,
    states: &[Result<Outcome, Errno>],
) -> bool {
    let (Op::Read { offset, .. }, Ok(Outcome::Data(found))) = (op, result) else { return false };
    let data = |state: &Result<Outcome, Errno>| match state {
        Ok(Outcome::Data(data)) => Some(data.clone()),
        _ => None,
    };
    let mut states: Vec<Vec<u8>> = states.iter().filter_map(data).collect();
    let lengths = states.iter().map(Vec::len);
    let (least, most) = (lengths.clone().min().unwrap_or(1), lengths.max().unwrap_or(0));
    // Behind an end there are zeros.
    for state in &mut states {
        state.resize(most, 0);
    }
    let page_bytes = BLOCK_BYTES as u64;
    let mut at = 0;
    while (least..=most).contains(&found.len()) && at < found.len() {
        let page_end = (offset + at as u64) / page_bytes * page_bytes + page_bytes - offset;
        let end = found.len().min(page_end as usize);
        if !states.iter().any(|state| state[at..end] == found[at..end]) {
            return false;
        }
        at = end;
    }
    at == found.len()
}

impl<S: System> Explorer<'_, S> {
    pub(super) fn execute_overlap(
        &mut self,
        run: &mut Run<S::Session>,
        op: &Op,
        amid: Amid,
        inner: &[Op],
    ) -> Result<Executed, Failure> {
        let then = Arc::clone(run.history.now());
        let text = format!("executing {op} and {} more at once", inner.len());
        let began_ns = run.clock.elapsed_ns();
        let overlapped = guard(&text, || run.session.overlap(op, amid, inner))?;
        let clock = self.span_since(run, began_ns);
        run.clock.advance_ns(1000);
        self.tally.overlapped += overlapped.during;
        self.tally.joined += overlapped.joined;
        let answers = overlapped.inner;
        let mut outer = Outer {
            then: Arc::clone(&then),
            expected: Vec::new(),
            has_target_moved: false,
            begun: None,
            passes: Vec::new(),
            has_returned: false,
            clock,
        };
        outer.see(op, &then);
        if !op.is_neutral() {
            let begun = self.begin_inner(run, op, &overlapped.outer, (&then, clock));
            outer.passes.extend([Arc::clone(&then), Arc::clone(&begun.next)]);
            outer.passes.extend(Self::at(&then, clock).half_way(op).into_iter().map(Arc::new));
            outer.begun = Some(begun);
        }
        let mut begun: Option<Begun> = None;
        let mut doubt = Doubt::default();
        let mut next = 0;
        self.examine_with(run, &mut |explorer, run, event| {
            match event {
                Event::Began(number) => {
                    let known = outer.known(run);
                    let (op_inner, answer) = (&inner[*number], &answers[*number]);
                    let is_late = doubt.is_shut_down;
                    let new = explorer.begin_inner(run, op_inner, answer, (&known, clock));
                    begun = Some(Begun { is_late, ..new });
                    outer.see(op, run.history.now());
                }
                Event::Returned(number) if *number == inner.len() => {
                    explorer.outer_returned(run, op, &overlapped.outer, &mut outer, &mut doubt)?;
                }
                Event::Returned(number) => {
                    let (Some(begun), Some(answer)) = (begun.take(), answers.get(*number)) else {
                        return Ok(());
                    };
                    next = number + 1;
                    let op_inner = &inner[*number];
                    explorer.end_inner(run, op_inner, answer, &begun, &outer, &mut doubt)?;
                    outer.see(op, run.history.now());
                }
                _ => {}
            }
            Ok(())
        })?;
        for (op_inner, answer) in inner.iter().zip(&answers).skip(next) {
            let known = outer.known(run);
            let is_late = doubt.is_shut_down;
            let new = self.begin_inner(run, op_inner, answer, (&known, clock));
            let begun = Begun { is_late, ..new };
            self.end_inner(run, op_inner, answer, &begun, &outer, &mut doubt)?;
        }
        if !outer.has_returned {
            self.outer_returned(run, op, &overlapped.outer, &mut outer, &mut doubt)?;
        }
        let result = &overlapped.outer.result;
        let mut all = std::iter::once(result).chain(answers.iter().map(|a| &a.result));
        let shutdown = all.any(|result| result.as_ref().is_err_and(|error| error.shutdown));
        Ok(if shutdown {
            run.log.push(format!("   {text} -> {}", describe(result)));
            Executed::Shutdown
        } else {
            Executed::Went(describe(result))
        })
    }

    /// The answer is what the model says, or there was no room, or a fault.
    fn foreseen(
        &self,
        run: &Run<S::Session>,
        op: &Op,
        result: &Result<Outcome, SystemError>,
        expected: &Result<Outcome, Errno>,
    ) -> Result<(), Failure> {
        let agrees = match (result, expected) {
            (Err(error), Err(expected)) if error.errno == *expected => true,
            (Err(error), _) if error.is_environmental() => {
                return self.check_refusal(run, (op, error), ROOM_AMID);
            }
            (Err(_), Err(_)) => !op.promises_its_error(),
            (Ok(result), Ok(expected)) => result == expected,
            _ => false,
        };
        if agrees {
            return Ok(());
        }
        let text = format!("{op}: {}, expected {expected:?}", describe(result));
        Err(Failure::new(text))
    }

    /// From here on a crash may leave what comes of the operation. `known`: what has happened for certain.
    fn begin_inner(
        &mut self,
        run: &mut Run<S::Session>,
        op: &Op,
        answer: &Answer,
        (known, clock): (&Arc<Model>, Span),
    ) -> Begun {
        self.tally.operations += 1;
        let granted = match &answer.result {
            Ok(Outcome::Count(count)) => Some(*count),
            _ => None,
        };
        let moment = run.history.moment();
        let before = Self::at(run.history.now(), clock);
        let mut next = Model::clone(&before);
        let expected = next.apply(op, granted);
        let whole = granted.map(|_| Model::clone(&before).apply(op, None));
        if answer.result.is_ok() && has_same_target(op, known, &before) {
            Self::submitted(run, op, known, &next);
        }
        let next = Arc::new(next);
        let left_open = Self::left_open(&before, op, answer.left_open_bytes);
        if expected.is_ok() && !op.is_neutral() {
            run.history.extend(before.half_way(op).into_iter().map(Arc::new));
            run.history.extend(left_open.clone());
            run.history.push(Arc::clone(&next));
        }
        Begun { moment, expected, whole, next, left_open, known: Arc::clone(known), is_late: false }
    }

    /// What is in doubt is to be seen, too.
    fn end_inner(
        &mut self,
        run: &mut Run<S::Session>,
        op: &Op,
        Answer { result, lsn, read_back, .. }: &Answer,
        begun: &Begun,
        outer: &Outer,
        doubt: &mut Doubt,
    ) -> Result<(), Failure> {
        let known = outer.known(run);
        self.foreseen(run, op, result, &begun.expected).or_else(|failure| {
            // Who changes something has one place in the order, and is judged there; who only looks may see any state that the outer one passes through.
            let seen = if op.is_neutral() { &outer.passes[..] } else { &[] };
            let also = doubt.state.iter().chain(seen);
            let also: Vec<_> = also.map(|model| Model::clone(model).apply(op, None)).collect();
            let is_one =
                also.iter().any(|expected| self.foreseen(run, op, result, expected).is_ok());
            let is_foreseen = is_one || !seen.is_empty() && is_mixture(op, result, &also);
            if is_foreseen { Ok(()) } else { Err(failure) }
        })?;
        if let (Ok(Outcome::Count(count)), Some(whole)) = (result, &begun.whole) {
            self.check_count(run, op, (Some(*count), whole), ROOM_AMID)?;
        }
        let step = run.history.now().step();
        run.log.push(format!("   meanwhile: {op} -> {} ({step})", describe(result)));
        if let Err(error) = result {
            self.tally.refused += 1;
            Self::take_back(run, op, error, begun, doubt);
            if begun.expected.is_ok() {
                let clocks = (outer.clock, outer.clock);
                self.adopt_half(run, op, clocks, read_back.as_ref());
                if !self.case.faults.is_empty() {
                    Self::doubt_allocation(run, op, outer.clock);
                }
            } else if let (Some(read), Some(_)) = (op.reads_back(), read_back) {
                // It had to fail, and was looked at all the same.
                self.note_looking(run, &read, outer.clock);
            }
            return self.examine_point(run, false, "after the error");
        }
        run.history.leave_open(begun.left_open.clone());
        if let Some(lsn) = lsn {
            run.note_lsn_as(*lsn, &known, op.answers_its_lsn());
        }
        // Who changes nothing promises what there was at its beginning.
        let promised = if op.is_neutral() { &begun.known } else { &known };
        if has_same_target(op, promised, run.history.now()) {
            self.acknowledge(run, op, promised)?;
        }
        Ok(())
    }

    /// An operation has failed: it has not happened.
    fn take_back(
        run: &mut Run<S::Session>,
        op: &Op,
        error: &SystemError,
        begun: &Begun,
        doubt: &mut Doubt,
    ) {
        doubt.is_shut_down |= error.shutdown;
        if op.is_neutral() {
            return;
        }
        run.history.back_to(begun.moment);
        if begun.expected.is_ok() && error.shutdown && !begun.is_late {
            let waits = op.waits_for_its_frame().then_some(&begun.next);
            let open = begun.left_open.as_ref().or(waits).cloned();
            run.history.leave_open(open.clone());
            doubt.state = open.or(doubt.state.take());
        }
    }

    fn outer_returned(
        &mut self,
        run: &mut Run<S::Session>,
        op: &Op,
        answer: &Answer,
        outer: &mut Outer,
        doubt: &mut Doubt,
    ) -> Result<(), Failure> {
        outer.has_returned = true;
        if let Some(begun) = outer.begun.take() {
            return self.end_inner(run, op, answer, &begun, outer, doubt);
        }
        self.tally.refused += u64::from(answer.result.is_err());
        let judged =
            outer.expected.iter().map(|expected| self.foreseen(run, op, &answer.result, expected));
        judged.reduce(Result::or).unwrap_or(Ok(()))?;
        if answer.result.is_err() || outer.has_target_moved {
            return Ok(());
        }
        let durable = match op {
            Op::Checkpoint => Some(Durable::All),
            Op::Sync(sync) => Self::promise(&outer.then, sync, &(0..u64::MAX)),
            _ => None,
        };
        let Some(durable) = durable else { return Ok(()) };
        let by = format!("{op} (operation count {})", outer.then.step());
        run.history.acknowledge_at(&outer.then, &durable, &by);
        self.examine_point(run, false, &format!("after the return of {op}"))
    }
}
