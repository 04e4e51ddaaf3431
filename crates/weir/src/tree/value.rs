//! Immutable bytes that are cheap to clone.

use crate::format::node::Node;
use crate::sync::Arc;
use std::ops::{Deref, Range};

/// The value of an item: either its own memory or a part of a cached node, which it keeps alive.
#[derive(Clone)]
pub enum Value {
    /// Own memory.
    Shared(Arc<[u8]>),
    /// A part of a node.
    InNode {
        /// The node.
        node: Arc<Node>,
        /// Where in its bytes.
        range: Range<u16>,
    },
}

impl Value {
    /// The value of `slot` in a leaf.
    pub(super) fn in_node(node: &Arc<Node>, slot: usize) -> Option<Self> {
        let range = node.value_range(slot)?;
        Some(Self::InNode { node: Arc::clone(node), range })
    }
}

impl Deref for Value {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Self::Shared(bytes) => bytes,
            Self::InNode { node, range } => node
                .bytes()
                .get(usize::from(range.start)..usize::from(range.end))
                .unwrap_or_default(),
        }
    }
}

impl AsRef<[u8]> for Value {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl From<Vec<u8>> for Value {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Shared(bytes.into())
    }
}

impl From<&[u8]> for Value {
    fn from(bytes: &[u8]) -> Self {
        Self::Shared(bytes.into())
    }
}

impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Value {}

impl std::fmt::Debug for Value {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Value({} bytes: {:02x?})", self.len(), self.get(..16).unwrap_or(self))
    }
}
