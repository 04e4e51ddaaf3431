//! Regular files: what happens to their bytes.
//!
//! * [`read`]: cached reads, misses, read-ahead
//! * [`write`]: buffered writes (delayed allocation)
//! * [`fsync`]: making data durable: payload in the log, or home and then the log
//! * [`placement_policy`]: what travels in the log
//! * [`closed`]: files that were closed before they were synced, and are then synced one by one
//! * [`submit`]: the same asynchronously, with tickets
//! * [`writeback`]: dirty pages go home
//! * [`handover`]: ranges handed to background writeback: sorted, merged, bounded
//! * [`paced`]: how much of that is in flight
//! * [`extents`]: the mapping of file blocks to volume blocks
//! * [`known_mapping`]: what was looked up of it, while it stands
//! * [`known_homes`]: where blocks live, and no more of their extents; [`homes`]: how that is asked for
//! * [`truncate`]: size changes, and removing ranges
//! * [`allocate`]: the modes of `fallocate(2)`
//! * [`seek`]: data and holes; copying ranges
//! * [`cursor`]: a file as a stream of `std::io`
//!
//! A write goes: `File::write_at` → [`crate::engine::Engine::write`] (cache, dirty) → later
//! `fsync` ([`crate::engine::Engine::fsync`]): pages → log frame → flush; or `writeback`: pages → blocks → operation →
//! log frame.
//!
//! **Invariant (zero tail):** bytes beyond the end of the file in its last block are zero in memory, in the log and at
//! home, whenever the operation that set the size is durable. A cut in the middle of a block therefore logs
//! the block's new content together with the size.
//! **Invariant:** payload is logged only for pages that are not under writeback, or where what is written is in the log and goes to where the
//! page lives: then neither the mapping nor what the log has to repair it with depends on how that ends.

pub mod allocate;
pub mod closed;
pub mod cursor;
pub mod extents;
pub mod fsync;
pub mod handle;
pub mod handover;
pub mod homes;
pub mod in_place;
pub mod known_homes;
pub mod known_mapping;
pub mod paced;
pub mod placement_policy;
pub mod read;
pub mod seek;
pub mod submit;
pub mod truncate;
pub mod write;
pub mod writeback;
