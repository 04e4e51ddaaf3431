//! What the explorer drives: a file system on a simulated disk. The engine is one, the toy of the
//! simulator's own tests another.

use std::ops::Range;
use std::sync::Arc;

use weir::AtimePolicy;

use crate::clock::SimClock;
use crate::device::SimDevice;
use crate::model::found::Found;
use crate::model::{Errno, Outcome, errno};
use crate::op::{Amid, Op};

/// A call failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text} (errno {errno})")]
pub struct SystemError {
    /// POSIX error number.
    pub errno: Errno,
    /// The system's words.
    pub text: String,
    /// The volume has shut down: nothing more is to be expected of this session.
    pub shutdown: bool,
}

impl SystemError {
    /// An error with this number and text.
    pub fn new(errno: Errno, text: impl Into<String>) -> Self {
        Self { errno, text: text.into(), shutdown: false }
    }

    /// Caused by the environment (disk, space, size of the log), not by the call: the model cannot
    /// foresee it.
    pub const fn is_environmental(&self) -> bool {
        matches!(self.errno, errno::EIO | errno::ENOSPC | errno::EROFS | errno::EOPNOTSUPP)
    }
}

impl SystemError {
    /// Without any fault an operation may fail so, and only so.
    pub const fn is_for_lack_of_room(&self) -> bool {
        matches!(self.errno, errno::ENOSPC | errno::EOPNOTSUPP)
    }
}

/// How volumes are made and opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Size of the volume.
    pub volume_blocks: u64,
    /// Size of the log ring.
    pub log_blocks: u64,
    /// Memory the engine may use.
    pub memory_bytes: u64,
    /// Blocks of the frames that a batch is cut into; `None`: as few frames as possible.
    pub batch_part_blocks: Option<u64>,
    /// New pages of a sync that are written beside their frame at least; `None`: as few as are worth it.
    pub beside_from_pages: Option<u64>,
    /// Whether checkpoints write all of the tree anew, after a merge that they give up.
    pub dense_merges: bool,
    /// Blocks of the largest removed file that is purged at once; `None`: more than there are.
    pub purge_at_once_blocks: Option<u64>,
    /// Pages of a round of writeback, one of which is on its way while the next is collected; `None`: more than there are.
    pub round_pages: Option<u64>,
    /// Extents that one operation of a cut takes away, and items that one of a purge does; `None`: more than most files have.
    pub cut_extents: Option<usize>,
    /// The disk understands forced unit access: what is written so is durable when the write returns.
    pub fua: bool,
    /// When reading moves access times.
    pub atime: AtimePolicy,
}

impl Settings {
    /// The smallest volume, with memory for everything (but no more: large page pools cost time).
    pub const SMALL: Self = Self {
        volume_blocks: 256,
        log_blocks: 64,
        memory_bytes: 2 << 20,
        batch_part_blocks: None,
        beside_from_pages: None,
        dense_merges: false,
        purge_at_once_blocks: None,
        round_pages: None,
        cut_extents: None,
        fua: false,
        atime: AtimePolicy::Never,
    };
}

/// What one of several operations that overlap has answered.
#[derive(Debug)]
pub struct Answer {
    /// The answer.
    pub result: Result<Outcome, SystemError>,
    /// The log's last LSN when it returned.
    pub lsn: Option<u64>,
    /// See [`Session::left_open_bytes`].
    pub left_open_bytes: Option<u64>,
    /// After an error: what [`Op::reads_back`] gave right afterwards.
    pub read_back: Option<Outcome>,
}

/// What operations that overlap have answered.
#[derive(Debug)]
pub struct Overlapped {
    /// The outer one's answer.
    pub outer: Answer,
    /// The others'.
    pub inner: Vec<Answer>,
    /// How many of these began before the outer one had returned.
    pub during: u64,
    /// Frames of the log that were written while the one before was on its way.
    pub joined: u64,
}

/// A mounted volume. No threads of its own: everything happens within the calls.
pub trait Session {
    /// Performs one operation.
    ///
    /// # Errors
    /// The system's.
    fn apply(&mut self, op: &Op) -> Result<Outcome, SystemError>;

    /// Performs `outer`, and `inner` while a device call of it is under way, or afterwards if there is no such call. The device's
    /// record says when each of `inner` began and returned, and, under the number after those, when `outer` did; what
    /// is not in there came after everything.
    fn overlap(&mut self, outer: &Op, _amid: Amid, inner: &[Op]) -> Overlapped {
        let outer = self.answer(outer);
        let inner = inner.iter().map(|op| self.answer(op)).collect();
        Overlapped { outer, inner, during: 0, joined: 0 }
    }

    /// Performs one operation of several that overlap.
    fn answer(&mut self, op: &Op) -> Answer {
        let result = self.apply(op);
        let (lsn, left_open_bytes) = (self.last_lsn(), self.left_open_bytes());
        let read = if result.is_err() { op.reads_back() } else { None };
        let read_back = read.and_then(|read| self.apply(&read).ok());
        Answer { result, lsn, left_open_bytes, read_back }
    }

    /// Tickets that were found to have ended since the last call of this, with their results.
    fn ended(&mut self) -> Vec<(u32, Result<(), SystemError>)> {
        Vec::new()
    }

    /// The last operation wrote data, and what shut the volume down ended it while the log had more of that data than it answers for: so many of its
    /// first bytes may be there after a crash.
    fn left_open_bytes(&self) -> Option<u64> {
        None
    }

    /// The log sequence number of the last operation, for systems that tell when one is durable.
    fn last_lsn(&self) -> Option<u64> {
        None
    }

    /// Syncs that have failed, tickets among them.
    fn failed_syncs(&self) -> u64 {
        0
    }

    /// Blocks that users may fill, for systems that tell.
    fn available_blocks(&self) -> Option<u64> {
        None
    }

    /// Blocks that are in use by nobody, or will be once what is durable says so, for systems that tell.
    fn free_blocks(&self) -> Option<u64> {
        None
    }

    /// Reads everything back.
    ///
    /// # Errors
    /// The root cannot be read; problems further down are noted in the result.
    fn found(&mut self) -> Result<Found, SystemError>;

    /// Where its answers contradict each other, or what was `found`: one line each.
    fn contradictions(&self, _found: &Found) -> Vec<String> {
        Vec::new()
    }

    /// Unmounts: everything is durable afterwards. (Dropping a session without this is a crash of the
    /// process: nothing more is written.) Answers [`Session::free_blocks`] afterwards.
    ///
    /// # Errors
    /// The system's. Also if it still holds something for somebody: after this nobody is left who would give it back.
    fn close(self) -> Result<Option<u64>, SystemError>;
}

/// A file system.
pub trait System: Sync {
    /// Its mounted volume.
    type Session: Session;

    /// Makes a volume.
    ///
    /// # Errors
    /// The system's.
    fn create(
        &self,
        device: &Arc<SimDevice>,
        clock: &Arc<SimClock>,
        settings: &Settings,
    ) -> Result<(), SystemError>;

    /// Mounts a volume, after recovery if it needs it.
    ///
    /// # Errors
    /// The system's.
    fn open(
        &self,
        device: &Arc<SimDevice>,
        clock: &Arc<SimClock>,
        settings: &Settings,
    ) -> Result<Self::Session, SystemError>;

    /// Mounts a volume so that nothing is ever written: what is to be recovered is recovered in memory. `None`: it cannot do that, or not with
    /// so little memory.
    ///
    /// # Errors
    /// The system's.
    fn open_read_only(
        &self,
        _device: &Arc<SimDevice>,
        _clock: &Arc<SimClock>,
        _settings: &Settings,
    ) -> Result<Option<Self::Session>, SystemError> {
        Ok(None)
    }

    /// Whether it notices when a disk answers with what was never written there.
    fn notices_lies(&self) -> bool {
        true
    }

    /// Whether what it does has times.
    fn has_times(&self) -> bool {
        true
    }

    /// Whether its operations may begin while a device call of another is under way, as [`crate::op::Op::Overlap`] has it.
    fn overlaps(&self) -> bool {
        true
    }

    /// Where on a volume that has nothing to recover old content is left that means nothing: the log.
    fn leftovers(&self, _settings: &Settings) -> Range<u64> {
        0..0
    }

    /// Checks an unmounted volume (`fsck`); one line for each defect.
    ///
    /// # Errors
    /// The system's, when it cannot be checked at all.
    fn check(&self, device: &Arc<SimDevice>) -> Result<Vec<String>, SystemError>;
}
