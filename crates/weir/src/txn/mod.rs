//! Transactions: the delta over the trees, atomic operations, and the checkpoint that merges one
//! into the other.
//!
//! * [`delta`]: the ordered map of after-images (pure data)
//! * [`op`]: one operation, put together (pure data)
//! * [`store`]: look-ups through delta and tree, commit, freeze
//! * [`mapping_moments`]: how often the mappings of files have changed
//! * [`names`]: names that paths have led to, and how often directory entries have changed
//! * [`new_directories`]: filters of the names in directories that were made since opening
//! * [`view`]: the same look-ups through changes that are not committed yet
//! * [`checkpoint`]: the transaction's states and the work of each
//! * `merge`: its merge, which leaves room for the next one
//!
//! **Invariant:** a commit applies an operation to delta, allocator and log under one lock; the
//! order of LSNs is the order of changes. **Invariant:** at most one delta is frozen.

pub mod checkpoint;
pub mod delta;
pub mod mapping_moments;
mod merge;
pub mod names;
pub mod new_directories;
pub mod obligations;
pub mod op;
pub mod store;
pub mod view;

pub use op::{Home, Op};
pub use store::Store;
pub use view::{Overlay, View};

/// Log sequence number: one per operation, from 1 on, never reused within a volume.
pub type Lsn = u64;
