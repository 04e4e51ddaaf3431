//! Operations that overlap: while a device call of one is under way, others are executed on the same thread. What they do
//! must never wait for what the first holds (a role of the log, the checkpointer's role, pages under writeback), so
//! they are begun only while there is plenty of everything that an operation may have to wait for; those that wait for
//! pages only during calls that move none: flushes, and writes of frames and superblocks; and those that wait for a flush of
//! their own only during the others, when the log's roles are free. Who cannot begin waits, and so do those behind it, for
//! the next call of the first, at last for its end.

use std::sync::Arc;

use weir::AllocateMode;
use weir::device::IoClass;
use weir::sync::Mutex;

use super::EngineSession;
use crate::device::SimDevice;
use crate::disk::Event;
use crate::image::BLOCK_BYTES;
use crate::op::Op;
use crate::system::{Answer, Overlapped, Session};

/// Blocks that must be free beside those of the data of the next operation.
const FREE_BLOCKS: u64 = 64;

/// What the others do, and what came of it so far.
struct Others {
    /// Shares the volume; its tickets become the first's in the end.
    session: EngineSession,
    ops: Vec<Op>,
    answers: Vec<Answer>,
}

impl Others {
    /// Executes what is left, for as long as nothing will have to wait.
    fn go_on(&mut self, amid: Amid) {
        while let Some(op) = self.ops.get(self.answers.len())
            && amid.allows(op)
            && (amid == Amid::Nothing || self.session.has_plenty_for(op))
        {
            let number = self.answers.len();
            self.session.device.note(Event::Began(number));
            let answer = self.session.answer(op);
            self.session.device.note(Event::Returned(number));
            self.answers.push(answer);
        }
    }
}

/// What is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Amid {
    Nothing,
    /// A call during which no page is on its way: a flush, or a write of the log (or a superblock, which looks the same).
    NoPages,
    /// Some other write: the log is not concerned.
    Pages,
    /// Pages and the frame that names them.
    Both,
}

impl Amid {
    const fn call(class: Option<IoClass>) -> Self {
        match class {
            None | Some(IoClass::Log) => Self::NoPages,
            Some(IoClass::Beside) => Self::Both,
            Some(_) => Self::Pages,
        }
    }

    fn allows(self, op: &Op) -> bool {
        match self {
            Self::Nothing => true,
            Self::NoPages => !op.waits_for_flush(),
            Self::Pages => !op.may_wait_for_pages(),
            Self::Both => !op.may_wait_for_pages() && !op.waits_for_flush(),
        }
    }
}

/// During the call that comes after `calls` others, the others go on; if they do not come to their end, they do so during
/// the next.
fn plan(device: &Arc<SimDevice>, calls: u32, others: &Arc<Mutex<Others>>) {
    let (later, during) = (Arc::clone(device), Arc::clone(others));
    let meanwhile = Box::new(move |class| {
        let mut others = during.lock();
        others.go_on(Amid::call(class));
        let is_left = others.answers.len() < others.ops.len();
        drop(others);
        if is_left {
            plan(&later, 0, &during);
        }
    });
    device.plan_meanwhile(Some((calls, meanwhile)));
}

/// Blocks that `op` may need for data at most.
fn data_blocks(op: &Op) -> u64 {
    match op {
        Op::Write { length, .. } => length.div_ceil(BLOCK_BYTES as u64) + 1,
        Op::Allocate { length, .. } => length.div_ceil(BLOCK_BYTES as u64) + 2,
        Op::Truncate { .. } => 2,
        Op::Batch { parts, .. } => parts.iter().map(data_blocks).sum(),
        _ => 0,
    }
}

impl EngineSession {
    /// `op` will not have to wait for log space, memory, or blocks.
    fn has_plenty_for(&self, op: &Op) -> bool {
        let data_blocks = data_blocks(op);
        let stats = self.volume.stats();
        let fill = stats.log_fill;
        let log_blocks =
            fill.used_blocks + fill.queued_blocks + fill.admitted_blocks + fill.waste_blocks;
        // Operations may fill half of the ring, and what its end wastes counts. A batch, a barrier or a shift asks for up to a quarter at a time.
        let asks_for_much = match op {
            Op::Batch { .. } | Op::Barrier { .. } => true,
            Op::Allocate { mode, .. } => {
                matches!(mode, AllocateMode::InsertRange | AllocateMode::CollapseRange)
            }
            _ => false,
        };
        // The work of a barrier, which may be what the first one is at, comes before any flush.
        let waits_for_barrier = op.waits_for_flush() && fill.has_open_chain;
        // Who waits for pages writes the frames that they wait for; the first may be at that.
        let waits_for_frame = op.may_wait_for_pages() && fill.companion_blocks > 0;
        !waits_for_barrier
            && !waits_for_frame
            && log_blocks <= fill.ring_blocks / if asks_for_much { 8 } else { 4 }
            && stats.dirty_pages + data_blocks <= stats.pages_capacity / 4
            && stats.space.room_blocks >= data_blocks + FREE_BLOCKS
            && stats.shutdown_reason.is_none()
    }

    pub(super) fn run_overlap(&mut self, outer: &Op, at: u32, inner: &[Op]) -> Overlapped {
        let session = self.beside();
        let others = Others { session, ops: inner.to_vec(), answers: Vec::new() };
        let others = Arc::new(Mutex::new(others));
        plan(&self.device, at, &others);
        let outer = self.apply(outer);
        self.device.plan_meanwhile(None);
        let mut others = others.lock();
        let during = others.answers.len() as u64;
        others.go_on(Amid::Nothing);
        self.tickets.append(&mut others.session.tickets);
        if self.queue.is_none() {
            self.queue = others.session.queue.take();
        }
        Overlapped { outer, inner: std::mem::take(&mut others.answers), during }
    }
}
