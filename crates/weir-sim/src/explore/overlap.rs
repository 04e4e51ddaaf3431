//! Operations that overlap: one of them, which changes nothing itself, is in the midst of its device calls while the others
//! begin. Each of those has its place in the order, between its beginning and its return; the outer one
//! promises when it returns, perhaps in the midst of one of the others, what it would have promised at its beginning. An error of any of them is its own: it promises nothing, and one that
//! has returned an error has not happened; until it returns, a crash may leave either. (A batch that waited for its frame when the volume was
//! shut down may be there after a crash also later: its frame may be on the medium although its write failed.)

use std::sync::Arc;

use super::failure::{Failure, describe, guard};
use super::{Executed, Explorer, Run};
use crate::disk::Event;
use crate::model::history::{Durable, Moment};
use crate::model::{Errno, Model, Outcome};
use crate::op::{Amid, Op};
use crate::system::{Answer, Session, System, SystemError};

/// One of the inner operations, between its beginning and its return.
struct Begun {
    moment: Moment,
    expected: Result<Outcome, Errno>,
    /// The state after it.
    next: Arc<Model>,
}

impl<S: System> Explorer<'_, S> {
    pub(super) fn execute_overlap(
        &mut self,
        run: &mut Run<S::Session>,
        outer: &Op,
        amid: Amid,
        inner: &[Op],
    ) -> Result<Executed, Failure> {
        let then = Arc::clone(run.history.now());
        let text = format!("executing {outer} and {} more at once", inner.len());
        let overlapped = guard(&text, || run.session.overlap(outer, amid, inner))?;
        run.clock.advance_ns(1000);
        self.tally.overlapped += overlapped.during;
        self.tally.joined += overlapped.joined;
        let expected = Model::clone(&then).apply(outer, None);
        self.foreseen(outer, &overlapped.outer, &expected)?;
        let answers = overlapped.inner;
        let mut begun: Option<Begun> = None;
        let mut in_doubt = None;
        let mut next = 0;
        let mut has_outer_returned = false;
        self.examine_with(run, &mut |explorer, run, event| {
            match event {
                Event::Began(number) => {
                    begun = Some(explorer.begin_inner(run, &inner[*number], &answers[*number]));
                }
                Event::Returned(number) if *number == inner.len() => {
                    explorer.outer_returned(run, outer, &overlapped.outer, &then)?;
                    has_outer_returned = true;
                }
                Event::Returned(number) => {
                    let (Some(begun), Some(answer)) = (begun.take(), answers.get(*number)) else {
                        return Ok(());
                    };
                    next = number + 1;
                    let op = &inner[*number];
                    explorer.end_inner(run, op, answer, &begun, &mut in_doubt)?;
                }
                _ => {}
            }
            Ok(())
        })?;
        for (op, answer) in inner.iter().zip(&answers).skip(next) {
            let begun = self.begin_inner(run, op, answer);
            self.end_inner(run, op, answer, &begun, &mut in_doubt)?;
        }
        if !has_outer_returned {
            self.outer_returned(run, outer, &overlapped.outer, &then)?;
        }
        let mut all = std::iter::once(&overlapped.outer).chain(answers.iter().map(|a| &a.result));
        let shutdown = all.any(|result| result.as_ref().is_err_and(|error| error.shutdown));
        Ok(if shutdown {
            run.log.push(format!("   {text} -> {}", describe(&overlapped.outer)));
            Executed::Shutdown
        } else {
            Executed::Went(describe(&overlapped.outer))
        })
    }

    /// The answer is what the model says, or there was no room, or a fault.
    fn foreseen(
        &self,
        op: &Op,
        result: &Result<Outcome, SystemError>,
        expected: &Result<Outcome, Errno>,
    ) -> Result<(), Failure> {
        let agrees = match (result, expected) {
            (Err(error), _) if error.is_environmental() => {
                error.is_for_lack_of_room() || !self.case.faults.is_empty()
            }
            (Err(_), Err(_)) => true,
            (Ok(result), Ok(expected)) => result == expected,
            _ => false,
        };
        if agrees {
            return Ok(());
        }
        let text = format!("{op}: {}, expected {expected:?}", describe(result));
        Err(Failure::new(text))
    }

    /// From here on a crash may leave what comes of the operation.
    fn begin_inner(&mut self, run: &mut Run<S::Session>, op: &Op, answer: &Answer) -> Begun {
        self.tally.operations += 1;
        let granted = match &answer.result {
            Ok(Outcome::Count(count)) => Some(*count),
            _ => None,
        };
        let moment = run.history.moment();
        let before = Arc::clone(run.history.now());
        let mut next = Model::clone(&before);
        let expected = next.apply(op, granted);
        if answer.result.is_ok() {
            Self::submitted(run, op, &next);
        }
        let next = Arc::new(next);
        if expected.is_ok() && !op.is_neutral() {
            run.history.extend(before.half_way(op).map(Arc::new));
            run.history.push(Arc::clone(&next));
        }
        Begun { moment, expected, next }
    }

    /// `in_doubt`: what there is if an operation happened that shut the volume down when it waited for its frame. That is to be seen, too.
    fn end_inner(
        &mut self,
        run: &mut Run<S::Session>,
        op: &Op,
        Answer { result, lsn, read_back }: &Answer,
        begun: &Begun,
        in_doubt: &mut Option<Arc<Model>>,
    ) -> Result<(), Failure> {
        self.foreseen(op, result, &begun.expected).or_else(|failure| {
            let doubted = in_doubt.as_deref().ok_or(failure)?;
            self.foreseen(op, result, &Model::clone(doubted).apply(op, None))
        })?;
        let step = run.history.now().step();
        run.log.push(format!("   meanwhile: {op} -> {} ({step})", describe(result)));
        if let Err(error) = result {
            self.tally.refused += 1;
            run.history.back_to(begun.moment);
            if begun.expected.is_ok() && error.shutdown && op.waits_for_its_frame() {
                run.history.leave_open(Arc::clone(&begun.next));
                *in_doubt = Some(Arc::clone(&begun.next));
            }
            if begun.expected.is_ok() {
                Self::adopt_half(run, op, read_back.as_ref());
            }
            return Ok(());
        }
        if let Some(lsn) = lsn {
            run.note_lsn_as(*lsn);
        }
        self.acknowledge(run, op)
    }

    fn outer_returned(
        &mut self,
        run: &mut Run<S::Session>,
        outer: &Op,
        result: &Result<Outcome, SystemError>,
        then: &Arc<Model>,
    ) -> Result<(), Failure> {
        self.tally.refused += u64::from(result.is_err());
        let durable = match outer {
            _ if result.is_err() => None,
            Op::Checkpoint => Some(Durable::All),
            Op::Sync(sync) => Self::promise(then, sync, &(0..u64::MAX)),
            _ => None,
        };
        let Some(durable) = durable else { return Ok(()) };
        let by = format!("{outer} (operation count {})", then.step());
        run.history.acknowledge_at(then, &durable, &by);
        self.examine_point(run, false, &format!("after the return of {outer}"))
    }
}
