//! How many blocks are free, promised, or about to become free. Pure.
//!
//! * `free`: clear in `used`, can be handed out now.
//! * `pending`: freed (or quarantined), to be handed out after a durable checkpoint.
//! * `reserved`: promised to dirty data. A promise is kept until [`Account::release`], which may come after
//!   the blocks were taken; meanwhile the space counts twice, so promises err on the safe side.
//! * the metadata reserve: what users' promises must leave to checkpoints, and to names that move.
//!
//! **Invariant:** `promise` succeeds only while `reserved + blocks`, and what its class leaves of the metadata reserve, `<= free`.
//! No counter goes below zero: taking back more than there is would be a bug of the caller, is
//! asserted in debug builds, and saturates otherwise.

use crate::{Error, Result};

/// So much has to wait for a checkpoint before one is made for it: 4 MiB.
const WORTH_A_CHECKPOINT_BLOCKS: u64 = 1024;

/// Who asks for a promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReserveClass {
    /// A user's data, or a new name: leaves the metadata reserve alone.
    User,
    /// A name that moves: may use what the metadata reserve has for that.
    Move,
    /// Work that frees space or makes data durable: may use the metadata reserve.
    Privileged,
}

/// What promises leave free, in blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MetadataReserve {
    /// For checkpoints.
    pub checkpoint_blocks: u64,
    /// For names that move: a full volume can be tidied up, and its logs rotated.
    pub move_blocks: u64,
}

impl MetadataReserve {
    /// All of it.
    pub fn blocks(self) -> u64 {
        self.checkpoint_blocks.saturating_add(self.move_blocks)
    }

    /// What a promise to `class` leaves free.
    pub fn kept_from(self, class: ReserveClass) -> u64 {
        match class {
            ReserveClass::User => self.blocks(),
            ReserveClass::Move => self.checkpoint_blocks,
            ReserveClass::Privileged => 0,
        }
    }
}

/// How a promise leaves the free space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Supply {
    /// Enough, or nothing that a checkpoint could do about it.
    Ample,
    /// The next checkpoint will make more room than there is: it had better begin.
    Short,
}

/// Numbers of the whole volume, in blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpaceTotals {
    /// All blocks that data and nodes can ever use.
    pub total_blocks: u64,
    /// Blocks that can be handed out now.
    pub free_blocks: u64,
    /// Blocks that become free with the next durable checkpoints.
    pub pending_free_blocks: u64,
    /// Blocks promised to dirty data.
    pub reserved_blocks: u64,
    /// Blocks kept for metadata.
    pub metadata_reserve_blocks: u64,
    /// Free blocks that lie in clear cells of [`crate::format::NODE_BLOCKS`]: the others are holes between what is in use. A
    /// group that is not in memory is taken to have no holes.
    pub unscattered_blocks: u64,
    /// What users can write before a checkpoint has to make room: none where the free space is too scattered for what is
    /// kept for metadata.
    pub room_blocks: u64,
}

impl SpaceTotals {
    /// What users can still write, counting what a checkpoint will free.
    pub fn available_blocks(&self) -> u64 {
        (self.free_blocks + self.pending_free_blocks)
            .saturating_sub(self.reserved_blocks + self.metadata_reserve_blocks)
    }
}

/// See the module's head.
#[derive(Debug, Default)]
pub(super) struct Account {
    free: u64,
    pending: u64,
    reserved: u64,
}

fn subtract(counter: &mut u64, blocks: u64) {
    debug_assert!(*counter >= blocks, "a space counter would fall below zero");
    *counter = counter.saturating_sub(blocks);
}

impl Account {
    pub(super) fn new(free: u64) -> Self {
        Self { free, pending: 0, reserved: 0 }
    }

    pub(super) fn free(&self) -> u64 {
        self.free
    }
    pub(super) fn pending(&self) -> u64 {
        self.pending
    }
    pub(super) fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Free blocks are taken.
    pub(super) fn take(&mut self, blocks: u64) {
        subtract(&mut self.free, blocks);
    }

    /// Taken blocks are free again.
    pub(super) fn give(&mut self, blocks: u64) {
        self.free += blocks;
    }

    /// Blocks in use will be free after a checkpoint.
    pub(super) fn expect(&mut self, blocks: u64) {
        self.pending += blocks;
    }

    /// Of `expected` blocks, `given` have become free; the others had been taken anew in the same
    /// transaction (only replay meets that).
    pub(super) fn settle(&mut self, expected: u64, given: u64) {
        subtract(&mut self.pending, expected);
        self.free += given;
    }

    pub(super) fn promise(
        &mut self,
        blocks: u64,
        class: ReserveClass,
        reserve: MetadataReserve,
    ) -> Result<()> {
        if blocks > self.room(reserve.kept_from(class)) {
            return Err(Error::NoSpace);
        }
        self.reserved += blocks;
        Ok(())
    }

    pub(super) fn release(&mut self, blocks: u64) {
        subtract(&mut self.reserved, blocks);
    }

    /// What can be promised, besides earlier promises and `kept` blocks.
    pub(super) fn room(&self, kept: u64) -> u64 {
        self.free.saturating_sub(self.reserved.saturating_add(kept))
    }

    /// Short where what users can still write, of `cell_blocks` free ones where nodes fit in, is less than what waits for a checkpoint. Whoever
    /// overwrites turns the one into the other, block by block, so at first half of what can be had is left.
    pub(super) fn supply(&self, metadata_reserve: u64, cell_blocks: u64) -> Supply {
        let room = self.room(metadata_reserve).min(cell_blocks.saturating_sub(metadata_reserve));
        if self.pending >= WORTH_A_CHECKPOINT_BLOCKS && room < self.pending {
            Supply::Short
        } else {
            Supply::Ample
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoints(checkpoint_blocks: u64) -> MetadataReserve {
        MetadataReserve { checkpoint_blocks, move_blocks: 0 }
    }

    #[test]
    fn users_leave_the_metadata_reserve_alone() {
        let mut account = Account::new(100);
        assert_eq!(account.promise(81, ReserveClass::User, checkpoints(20)), Err(Error::NoSpace));
        assert_eq!(account.promise(80, ReserveClass::User, checkpoints(20)), Ok(()));
        assert_eq!(account.promise(1, ReserveClass::User, checkpoints(20)), Err(Error::NoSpace));
        assert_eq!(account.promise(20, ReserveClass::Privileged, checkpoints(20)), Ok(()));
        assert_eq!(
            account.promise(1, ReserveClass::Privileged, checkpoints(20)),
            Err(Error::NoSpace)
        );
        account.release(100);
        assert_eq!(account.reserved(), 0);
    }

    #[test]
    fn names_that_move_have_room_that_users_leave_and_leave_what_checkpoints_need() {
        let mut account = Account::new(100);
        let reserve = MetadataReserve { checkpoint_blocks: 20, move_blocks: 10 };
        assert_eq!(account.promise(71, ReserveClass::User, reserve), Err(Error::NoSpace));
        assert_eq!(account.promise(70, ReserveClass::User, reserve), Ok(()));
        assert_eq!(account.promise(11, ReserveClass::Move, reserve), Err(Error::NoSpace));
        assert_eq!(account.promise(10, ReserveClass::Move, reserve), Ok(()));
        assert_eq!(account.promise(1, ReserveClass::Move, reserve), Err(Error::NoSpace));
        assert_eq!(account.promise(20, ReserveClass::Privileged, reserve), Ok(()));
    }

    #[test]
    fn a_reserve_larger_than_the_volume_refuses_users_only() {
        let mut account = Account::new(10);
        assert_eq!(
            account.promise(1, ReserveClass::User, checkpoints(u64::MAX)),
            Err(Error::NoSpace)
        );
        assert_eq!(account.promise(0, ReserveClass::User, checkpoints(u64::MAX)), Ok(()));
        assert_eq!(
            account.promise(u64::MAX, ReserveClass::Privileged, checkpoints(0)),
            Err(Error::NoSpace)
        );
        assert_eq!(account.promise(10, ReserveClass::Privileged, checkpoints(u64::MAX)), Ok(()));
    }

    #[test]
    fn freed_blocks_are_not_free_before_they_settle() {
        let mut account = Account::new(10);
        account.take(6);
        account.expect(5);
        assert_eq!((account.free(), account.pending()), (4, 5));
        assert_eq!(account.promise(5, ReserveClass::User, checkpoints(0)), Err(Error::NoSpace));
        account.settle(5, 5);
        assert_eq!((account.free(), account.pending()), (9, 0));
        account.give(1);
        assert_eq!(account.promise(10, ReserveClass::User, checkpoints(0)), Ok(()));
    }

    #[test]
    fn room_runs_short_where_a_checkpoint_would_make_more_than_there_is() {
        let (free, kept) = (10_000, 500);
        for taken in (0..=free).step_by(250) {
            for pending in [0, WORTH_A_CHECKPOINT_BLOCKS - 1, WORTH_A_CHECKPOINT_BLOCKS, 5000] {
                for reserved in [0, 700] {
                    for cell_blocks in [0, 1000, 4000, free] {
                        let mut account = Account::new(free);
                        account.take(taken);
                        account.expect(pending);
                        account.reserved = reserved;
                        let room = (free - taken)
                            .saturating_sub(reserved + kept)
                            .min(cell_blocks.saturating_sub(kept));
                        let is_worth_it = pending >= WORTH_A_CHECKPOINT_BLOCKS;
                        let is_short = account.supply(kept, cell_blocks) == Supply::Short;
                        assert_eq!(is_short, is_worth_it && room < pending);
                    }
                }
            }
        }
        // Who overwrites all the time has half of what can be had when it begins.
        let mut account = Account::new(8000);
        let overwritten = (0..8000).find(|_| {
            account.take(1);
            account.expect(1);
            account.supply(0, 8000) == Supply::Short
        });
        assert_eq!(overwritten, Some(4000));
        // A reserve larger than the volume leaves nobody any room.
        account.take(3000);
        assert_eq!(account.supply(u64::MAX, 0), Supply::Short);
    }
}
