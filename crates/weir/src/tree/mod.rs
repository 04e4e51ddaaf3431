//! The copy-on-write B+tree that holds all metadata of a checkpoint.
//!
//! A tree is immutable: [`merge`](merge::merge) applies a sorted batch of changes and yields a
//! new root that shares every untouched subtree with the old one. Readers therefore need no
//! locks, only a [`TreeRoot`] and the [`NodeCache`]. Every step down a tree is verified: a parent
//! names its child's place and checksum, the child its own place, volume and level. Levels must
//! fall by one with each step, so that no stored bytes can make a reader loop or recurse without
//! bound.
//!
//! Locks: only those inside [`NodeCache`], which are leaves and never held over device I/O.

pub mod cache;
pub mod cursor;
pub mod merge;
pub mod read;
mod shard;
#[cfg(test)]
mod tests;
mod value;
pub mod walk;
mod writer;

pub use cache::{CacheStats, NodeCache};
pub use cursor::Cursor;
pub use merge::{NodeSink, Packing, merge};
pub use read::{InLeaf, LeafSpan, Span, get, span, span_le};
pub use value::Value;
pub use walk::{Visitor, WalkProblem, WalkSummary, walk};

use crate::format::node::ChildRef;

/// Where a tree starts, and what it counts: the tree table's entry of a checkpoint root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TreeRoot {
    /// First block of the root node; 0 when the tree is empty.
    pub block: u64,
    /// Level of the root node; 0 = the root is a leaf.
    pub level: u8,
    /// Checksum of the root node.
    pub checksum: u32,
    /// Generation of the checkpoint that last changed the tree.
    pub generation: u64,
    /// Items in the tree.
    pub item_count: u64,
    /// Nodes of the tree.
    pub node_count: u64,
}

impl TreeRoot {
    /// The tree without items.
    pub const EMPTY: Self =
        Self { block: 0, level: 0, checksum: 0, generation: 0, item_count: 0, node_count: 0 };

    /// Whether there is no root node.
    pub const fn is_empty(&self) -> bool {
        self.block == 0
    }

    /// The root node as a parent would name it.
    pub const fn child_ref(&self) -> ChildRef {
        ChildRef { block: self.block, checksum: self.checksum }
    }
}

/// The error for a tree whose nodes are each valid but do not fit together.
fn inconsistent(block: u64, what: &str) -> crate::Error {
    crate::Error::Corrupt(format!("tree node at block {block}: {what}"))
}
