//! Operations that overlap: in the midst of one, another caller, on a thread of its own, executes others.
//! The two take turns ([`crate::turns`]): the second begins amid a device call of the first, or before the first takes a lock, and hands over
//! where it has to wait for what the first holds (a role of the log, the checkpointer's role, pages under writeback, a lock), amid a call or
//! before a lock of its own if that is planned, and at its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::EngineSession;
use crate::device::SimDevice;
use crate::disk::Event;
use crate::op::{Amid, At, Op};
use crate::system::{Answer, Overlapped, Session};
use crate::turns::{Turns, hand_over_at_lock, let_other_go_on};

/// The calling caller hands over to the other one there.
fn hand_over_at(device: &SimDevice, at: At) {
    match at {
        At::Call(calls) => {
            device.plan_meanwhile(Some((calls, Box::new(let_other_go_on))));
        }
        At::Lock(locks) => hand_over_at_lock(locks),
    }
}

impl EngineSession {
    /// Executes one operation after the other, as the second caller.
    fn answer_all(&mut self, ops: &[Op], begun: &AtomicU64) -> Vec<Answer> {
        let mut answers = Vec::new();
        for (number, op) in ops.iter().enumerate() {
            begun.fetch_add(1, Ordering::Relaxed);
            self.device.note(Event::Began(number));
            answers.push(self.answer(op));
            self.device.note(Event::Returned(number));
        }
        self.device.end_amid();
        answers
    }

    pub(super) fn run_overlap(&mut self, outer: &Op, amid: Amid, inner: &[Op]) -> Overlapped {
        let (mut others, ops) = (self.beside(), inner.to_vec());
        let begun = Arc::new(AtomicU64::new(0));
        let joined_before = self.volume.stats().log.frames_joined;
        let turns = Arc::new(Turns::default());
        let counted = Arc::clone(&begun);
        let second = turns.with_second(move || {
            others.device.begin_amid();
            if let Some(back) = amid.back {
                hand_over_at(&others.device, back);
            }
            let answers = others.answer_all(&ops, &counted);
            (others, answers)
        });
        self.is_plain = true;
        let outer = turns.as_first(|| {
            hand_over_at(&self.device, amid.first);
            self.answer(outer)
        });
        self.is_plain = false;
        self.device.note(Event::Returned(inner.len()));
        self.device.plan_meanwhile(None);
        let during = begun.load(Ordering::Relaxed);
        turns.end_first();
        let (mut others, answers) = match second.join() {
            Ok(Ok(ended)) => ended,
            Ok(Err(failure)) => panic!("{}: {:?}", failure.summary, failure.details),
            Err(panic) => std::panic::resume_unwind(panic),
        };
        self.tickets.append(&mut others.tickets);
        let joined = self.volume.stats().log.frames_joined - joined_before;
        Overlapped { outer, inner: answers, during, joined }
    }
}
