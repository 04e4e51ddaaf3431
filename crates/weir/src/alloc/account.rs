//! How many blocks are free, promised, or about to become free. Pure.
//!
//! * `free`: clear in `used`, can be handed out now.
//! * `pending`: freed (or quarantined), to be handed out after a durable checkpoint.
//! * `reserved`: promised to dirty data. A promise is kept until [`Account::release`], which may come after
//!   the blocks were taken; meanwhile the space counts twice, so promises err on the safe side.
//! * `merging`: taken by the merge under way. The blocks that its nodes replace are free when it is published; until then so much
//!   less has to be kept.
//! * the metadata reserve: what users' promises must leave to checkpoints, and to who tidies up.
//!
//! A page that is overwritten can become an extent of its own in the middle of another, which nobody knows before it is
//! written: for every [`PAGES_PER_METADATA_BLOCK`] promised blocks, one more is kept for the tree.
//!
//! Dirty pages that go to blocks which they have ([`Account::count_in_place`]) are counted with the promises, since
//! whoever pays for a page does not know: that errs on the safe side, too.
//!
//! **Invariant:** `promise` succeeds only while all that is promised, what is kept for its extents, and what its class leaves of the
//! metadata reserve, `<= free`.
//! No counter goes below zero: taking back more than there is would be a bug of the caller, is
//! asserted in debug builds, and saturates otherwise.

use crate::format::NODE_BLOCKS;
use crate::{Error, Result};

/// Two extents more (40 bytes of a leaf each) and a checksum for each page, twice over as everything that a checkpoint has to find room for, are less
/// than 256 bytes.
pub const PAGES_PER_METADATA_BLOCK: u64 = 16;
/// So much has to wait for a checkpoint before one is made for it: 4 MiB.
const WORTH_A_CHECKPOINT_BLOCKS: u64 = 1024;

/// Who asks for a promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReserveClass {
    /// A user's data, or a new name: leaves the metadata reserve alone.
    User,
    /// A name that moves, a file that is cut: may use what the metadata reserve has for that.
    Tidy,
    /// A file that is cut when there is nothing else to be had: leaves what the next merge needs, should it add a node.
    Cut,
    /// Data that was promised before, and is found in the log: leaves nothing.
    Logged,
}

/// What promises leave free, in blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MetadataReserve {
    /// What it takes to write the tree anew, with the changes that there are.
    pub merge_blocks: u64,
    /// What changes that are small can add to that, and what frees space draws on.
    pub spare_blocks: u64,
    /// For names that move and files that are cut: a full volume can be tidied up, and its logs rotated.
    pub tidy_blocks: u64,
}

impl MetadataReserve {
    /// What is left of it when a merge has taken so many blocks already.
    #[must_use]
    pub fn after_merging(self, blocks: u64) -> Self {
        Self { merge_blocks: self.merge_blocks.saturating_sub(blocks), ..self }
    }

    /// All of it.
    pub fn blocks(self) -> u64 {
        self.kept_from(ReserveClass::User)
    }

    /// What a promise to `class` leaves free.
    pub fn kept_from(self, class: ReserveClass) -> u64 {
        let kept = match class {
            ReserveClass::User => [self.merge_blocks, self.spare_blocks, self.tidy_blocks],
            ReserveClass::Tidy => [self.merge_blocks, self.spare_blocks, 0],
            // A node that the merge adds takes room, and takes it again in the next one.
            ReserveClass::Cut => [self.merge_blocks, 2 * NODE_BLOCKS, 0],
            ReserveClass::Logged => [0; 3],
        };
        kept.into_iter().fold(0, u64::saturating_add)
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
    /// What users can still write, counting what a checkpoint will free: nothing where all free space together is too scattered for what is
    /// kept for metadata.
    pub fn available_blocks(&self) -> u64 {
        let unscattered_blocks = self.unscattered_blocks.saturating_add(self.pending_free_blocks);
        if unscattered_blocks / NODE_BLOCKS < self.metadata_reserve_blocks / NODE_BLOCKS {
            return 0;
        }
        (self.free_blocks + self.pending_free_blocks)
            .saturating_sub(self.reserved_blocks + self.metadata_reserve_blocks)
    }
}

/// Promises, with `blocks` more, and what is kept for their extents.
fn with_extents(reserved: u64, blocks: u64) -> u64 {
    let promised = reserved.saturating_add(blocks);
    promised.saturating_add(promised / PAGES_PER_METADATA_BLOCK)
}

/// See the module's head.
#[derive(Debug, Default)]
pub(super) struct Account {
    free: u64,
    pending: u64,
    reserved: u64,
    merging: u64,
}

fn subtract(counter: &mut u64, blocks: u64) {
    debug_assert!(*counter >= blocks, "a space counter would fall below zero");
    *counter = counter.saturating_sub(blocks);
}

impl Account {
    pub(super) fn new(free: u64) -> Self {
        Self { free, ..Self::default() }
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

    /// Nodes that the merge under way has taken, which need not be kept for it any more.
    pub(super) fn merging(&self) -> u64 {
        self.merging
    }

    /// The merge under way has taken free blocks.
    pub(super) fn merge(&mut self, blocks: u64) {
        self.merging += blocks;
    }

    /// It has given them back, or as many others will be free in their place.
    pub(super) fn merged(&mut self, blocks: u64) {
        self.merging = self.merging.saturating_sub(blocks);
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
        let claimed = match class {
            ReserveClass::Logged => self.reserved.saturating_add(blocks),
            _ => with_extents(self.reserved, blocks),
        };
        if blocks > 0 && claimed.saturating_add(reserve.kept_from(class)) > self.free {
            return Err(Error::NoSpace);
        }
        self.reserved += blocks;
        Ok(())
    }

    /// Counts dirty pages as if they had been promised blocks, of which they will take none: whoever pays for them gives the promise
    /// back. Meanwhile others are promised less than there is.
    pub(super) fn count_in_place(&mut self, blocks: u64) {
        self.reserved += blocks;
    }

    pub(super) fn release(&mut self, blocks: u64) {
        subtract(&mut self.reserved, blocks);
    }

    /// What is free besides promises, what is kept for their extents, and `kept` blocks.
    pub(super) fn room(&self, kept: u64) -> u64 {
        self.free.saturating_sub(with_extents(self.reserved, 0).saturating_add(kept))
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

    fn checkpoints(merge_blocks: u64) -> MetadataReserve {
        MetadataReserve { merge_blocks, ..MetadataReserve::default() }
    }

    #[test]
    fn nothing_is_available_where_what_is_kept_finds_no_nodes() {
        let space = SpaceTotals {
            free_blocks: 1000,
            metadata_reserve_blocks: 10 * NODE_BLOCKS,
            unscattered_blocks: 10 * NODE_BLOCKS,
            ..SpaceTotals::default()
        };
        assert_eq!(space.available_blocks(), 1000 - 10 * NODE_BLOCKS);
        let scattered = SpaceTotals { unscattered_blocks: 9 * NODE_BLOCKS, ..space };
        assert_eq!(scattered.available_blocks(), 0);
        // A checkpoint may free them side by side.
        let pending = SpaceTotals { pending_free_blocks: NODE_BLOCKS, ..scattered };
        assert_eq!(pending.available_blocks(), 1000 - 9 * NODE_BLOCKS);
    }

    #[test]
    fn each_class_leaves_what_the_next_one_has() {
        let reserve = MetadataReserve { merge_blocks: 20, spare_blocks: 30, tidy_blocks: 10 };
        let classes = [
            (ReserveClass::User, 40),
            (ReserveClass::Tidy, 50),
            (ReserveClass::Cut, 100 - 20 - 2 * NODE_BLOCKS),
        ];
        for (class, room) in classes {
            // So few that nothing is kept for their extents.
            let mut account = Account::new(100);
            account.take(room - 10);
            assert_eq!(account.promise(11, class, reserve), Err(Error::NoSpace), "{class:?}");
            assert_eq!(account.promise(10, class, reserve), Ok(()), "{class:?}");
            assert_eq!(account.promise(1, class, reserve), Err(Error::NoSpace), "{class:?}");
            assert_eq!(account.promise(100 - room, ReserveClass::Logged, reserve), Ok(()));
            assert_eq!(account.promise(1, ReserveClass::Logged, reserve), Err(Error::NoSpace));
        }
    }

    #[test]
    fn data_leaves_room_for_the_extents_that_it_may_become() {
        let mut account = Account::new(17_000);
        let kept = checkpoints(0);
        assert_eq!(account.promise(16_001, ReserveClass::User, kept), Err(Error::NoSpace));
        assert_eq!(account.promise(16_000, ReserveClass::User, kept), Ok(()));
        assert_eq!(account.room(0), 0);
        // Written: what was kept for its extents is free for those, or for more data.
        account.take(16_000);
        account.release(16_000);
        assert_eq!(account.room(0), 1000);
        assert_eq!(account.promise(943, ReserveClass::User, kept), Err(Error::NoSpace));
        assert_eq!(account.promise(942, ReserveClass::User, kept), Ok(()));
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
            account.promise(u64::MAX, ReserveClass::Logged, checkpoints(0)),
            Err(Error::NoSpace)
        );
        assert_eq!(account.promise(10, ReserveClass::Logged, checkpoints(u64::MAX)), Ok(()));
        account.release(10);
        assert_eq!(account.reserved(), 0);
    }

    #[test]
    fn pages_that_take_no_blocks_keep_others_from_promises_and_are_never_refused() {
        let mut account = Account::new(10);
        assert_eq!(account.promise(4, ReserveClass::User, checkpoints(3)), Ok(()));
        account.count_in_place(32);
        assert_eq!((account.free(), account.reserved(), account.room(0)), (10, 36, 0));
        assert_eq!(account.promise(1, ReserveClass::Logged, checkpoints(0)), Err(Error::NoSpace));
        account.release(32);
        assert_eq!(account.promise(3, ReserveClass::User, checkpoints(3)), Ok(()));
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
                            .saturating_sub(with_extents(reserved, 0) + kept)
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
