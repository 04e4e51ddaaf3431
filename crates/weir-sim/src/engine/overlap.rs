//! Operations that overlap: while a device call of one is under way, others are executed on the same thread. What they do
//! must never wait for what the first holds (a role of the log, the checkpointer's role, pages under writeback), so
//! they are begun only while there is plenty of everything that an operation may have to wait for.

use std::sync::Arc;

use parking_lot::Mutex;

use super::{EngineSession, Result};
use crate::disk::Event;
use crate::image::BLOCK_BYTES;
use crate::model::Outcome;
use crate::op::Op;
use crate::system::{Overlapped, Session};

/// Blocks that must be free beside those of the data of the next operation.
const FREE_BLOCKS: u64 = 64;

/// What the others do, and what came of it so far.
struct Others {
    /// Shares the volume; its tickets become the first's in the end.
    session: EngineSession,
    ops: Vec<Op>,
    answers: Vec<(Result<Outcome>, Option<u64>)>,
}

impl Others {
    /// Executes what is left, for as long as nothing will have to wait; all of it if `calm`.
    fn go_on(&mut self, calm: bool) {
        while let Some(op) = self.ops.get(self.answers.len())
            && (calm || self.session.has_plenty_for(op))
        {
            let number = self.answers.len();
            self.session.device.note(Event::Began(number));
            let answer = self.session.apply(op);
            let lsn = self.session.last_lsn();
            self.session.device.note(Event::Returned(number));
            self.answers.push((answer, lsn));
        }
    }
}

impl EngineSession {
    /// `op` will not have to wait for log space, memory, or blocks.
    fn has_plenty_for(&self, op: &Op) -> bool {
        let data_blocks = match op {
            Op::Write { length, .. } => length.div_ceil(BLOCK_BYTES as u64) + 1,
            _ => 0,
        };
        let stats = self.volume.stats();
        let fill = stats.log_fill;
        let log_blocks = fill.used_blocks + fill.queued_blocks + fill.admitted_blocks;
        log_blocks <= fill.ring_blocks / 4
            && stats.dirty_pages + data_blocks <= stats.pages_capacity / 4
            && self.volume.statfs().available_blocks >= data_blocks + FREE_BLOCKS
            && stats.shutdown_reason.is_none()
    }

    pub(super) fn run_overlap(&mut self, outer: &Op, at: u32, inner: &[Op]) -> Overlapped {
        let session = self.beside();
        let others = Others { session, ops: inner.to_vec(), answers: Vec::new() };
        let others = Arc::new(Mutex::new(others));
        let during = Arc::clone(&others);
        let meanwhile = Box::new(move || during.lock().go_on(false));
        self.device.plan_meanwhile(Some((at, meanwhile)));
        let outer = self.apply(outer);
        self.device.plan_meanwhile(None);
        let mut others = others.lock();
        let during = others.answers.len() as u64;
        others.go_on(true);
        self.tickets.append(&mut others.session.tickets);
        if self.queue.is_none() {
            self.queue = others.session.queue.take();
        }
        Overlapped { outer, inner: std::mem::take(&mut others.answers), during }
    }
}
