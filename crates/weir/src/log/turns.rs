//! Two frames on their way at a time: what the writer and who has joined it know of each other. When somebody may join is decided
//! by [`super::core`].
//!
//! The writer seals and places its frame, says so ([`Log::announce`]), and writes it. Who joins seals the next one on top of
//! that, writes it at the same time, and waits for its turn ([`Log::take_turn`]): the writer has ended then, and the frames are
//! booked in order.
//!
//! **When the writer's frame cannot be written** where it was announced, the frame behind it is void: its chain and its place
//! were built on that. The writer waits until nobody writes that frame any more, wipes it ([`Log::part`]), and moves its own, or
//! writes it once more where there is no room to. Who has joined hears of it at its turn, and writes its frame again, behind
//! ([`Log::place_anew`]). Wiping matters because a write that was reported as failed may have reached the device all the same:
//! replay would take both frames where they were, and not find what was written behind their copies.
//!
//! **When the writer owes something** for data that is missing beside its frame ([`super::companion`]), that comes behind the
//! frame that is on its way. So it leaves what it could not count to who has joined it ([`Log::leave_owed`]), who sees to the
//! rest.
//!
//! **Locks.** `append`, then `core`; none while waiting for a turn.

use super::companion::Uncounted;
use super::ring::Placement;
use super::writer::WRITE_ATTEMPTS;
use super::{Appender, Commit, Log};
use crate::device::IoClass;
use crate::device::buffer::AlignedBuf;
use crate::format::frame::FrameHeader;
use crate::format::{BLOCK_BYTES, BLOCK_BYTES_U64};
use crate::mutation::{self, Mutation};
use crate::sync::MutexGuard;
use crate::{Error, Result};

/// Who else has a frame on its way while one is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Company {
    /// Nobody.
    Alone,
    /// Somebody may join the writer of this one.
    MayCome,
    /// The writer, whom the writer of this one has joined.
    Writer,
}

/// Who has joined the writer, once it has no write under way.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    is_there: bool,
    /// Where its frame is.
    position_blocks: Option<u64>,
    /// The writer has wiped that frame, or is about to.
    is_wiped: bool,
}

impl Appender {
    /// Sequence number and previous digest of the next frame to be sealed.
    pub(super) fn next_in_chain(&self) -> (u64, u64) {
        self.sent.unwrap_or((self.live.next_sequence(), self.live.digest()))
    }

    /// The frame was written. It is the next one after those that count.
    pub(super) fn push_written(&mut self, header: &FrameHeader, placement: Placement, digest: u64) {
        debug_assert_eq!(self.live.next_sequence(), header.sequence);
        debug_assert_eq!(self.live.digest(), header.prev_digest);
        self.live.push(header.last_lsn, placement, digest);
        self.sent = None;
    }
}

impl Log {
    /// The only frame of the writer's group is sealed as `digest`, and about to be written: somebody may join.
    pub(super) fn announce(&self, header: &FrameHeader, digest: u64) {
        self.append.lock().sent = Some((header.sequence + 1, digest));
        self.commit.lock().core.frame_sent(header.last_lsn);
    }

    /// Nobody joins the writer any more. If somebody has, waits until that one's write is over, and wipes its frame: its chain is to be broken.
    ///
    /// # Errors
    /// The frame could not be wiped.
    pub(super) fn part(&self) -> Result<()> {
        let mut commit = self.commit.lock();
        if !commit.core.keep_alone() {
            drop(commit);
            self.append.lock().sent = None;
            return Ok(());
        }
        while !commit.joiner.is_there {
            self.turn.wait(&mut commit);
        }
        let position_blocks = commit.joiner.position_blocks;
        commit.joiner.is_wiped = true;
        drop(commit);
        self.append.lock().sent = None;
        let Some(position_blocks) = position_blocks else { return Ok(()) };
        if mutation::active(Mutation::KeepFrameBehind) {
            return Ok(());
        }
        let offset_bytes = (self.geometry.log_start_block + position_blocks) * BLOCK_BYTES_U64;
        let nothing = AlignedBuf::zeroed(BLOCK_BYTES);
        let wipe = || self.device.write(offset_bytes, &[&nothing], IoClass::Log, false);
        let mut wiped = wipe();
        for _ in 1..WRITE_ATTEMPTS {
            wiped = wiped.or_else(|_| wipe());
        }
        Ok(wiped?)
    }

    /// Who has joined the writer, and has written a frame or failed to, waits until it is the writer itself. True: that frame was wiped
    /// meanwhile, and has to be written again.
    pub(super) fn take_turn(&self, position_blocks: Option<u64>) -> bool {
        let mut commit = self.commit.lock();
        if !commit.core.has_joined() {
            return false;
        }
        commit.joiner = Waiting { is_there: true, position_blocks, is_wiped: false };
        self.turn.notify_all();
        while commit.core.has_joined() {
            self.turn.wait(&mut commit);
        }
        std::mem::take(&mut commit.joiner).is_wiped && !mutation::active(Mutation::ForgetWiped)
    }

    /// Who has joined the writer panics. The log is shut down, so it does not matter what it has written.
    pub(super) fn leave_turn(&self, commit: &mut MutexGuard<'_, Commit>) {
        commit.joiner.is_there = true;
        self.turn.notify_all();
    }

    /// Who has taken its turn takes what the writer before has left, and owes.
    pub(super) fn take_owed(&self, uncounted: &mut Uncounted) {
        let Some(mut owed) = self.commit.lock().owed.take() else { return };
        owed.append(uncounted);
        *uncounted = owed;
    }

    /// Where a frame that was wiped at `placement` is to be written again: behind the writer's, if that has moved; the chain goes on from there.
    ///
    /// # Errors
    /// There is no room: writes that failed have used it up.
    pub(super) fn place_anew(
        &self,
        header: &mut FrameHeader,
        placement: Placement,
    ) -> Result<Placement> {
        let mut append = self.append.lock();
        if append.live.digest() == header.prev_digest {
            // The writer has found no room further on, and has written its frame where it was.
            return Ok(placement);
        }
        header.prev_digest = append.live.digest();
        let placed = append.ring.place_behind(placement.blocks());
        placed.map_err(|full| Error::Shutdown(full.to_string()))
    }

    /// The writer owes something for what it has written. True: somebody has joined it, and sees to it; the writer is to end.
    pub(super) fn leave_owed(&self, uncounted: &mut Uncounted) -> bool {
        let mut commit = self.commit.lock();
        let left = commit.core.keep_alone();
        if left {
            commit.owed = Some(std::mem::take(uncounted));
        }
        left
    }

    /// The writer ends, and who has joined it becomes the writer.
    pub(super) fn end_write(&self, commit: &mut MutexGuard<'_, Commit>) {
        if commit.core.has_joined() {
            self.turn.notify_all();
        }
        commit.core.end_write();
    }
}
