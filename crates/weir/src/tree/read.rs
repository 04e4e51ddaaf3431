//! Point look-ups.

use super::{NodeCache, TreeRoot, Value, inconsistent};
use crate::Result;
use crate::device::IoClass;
use crate::format::Key;
use crate::format::node::Node;
use crate::sync::Arc;
use std::ops::Range;

/// The value of `key`.
///
/// # Errors
/// When a node on the way cannot be read or is corrupt.
pub fn get(cache: &NodeCache, root: &TreeRoot, key: Key) -> Result<Option<Value>> {
    if root.is_empty() {
        return Ok(None);
    }
    let (leaf, _) = leaf_for(cache, root, &key)?;
    match leaf.find(&key) {
        Ok(slot) => Ok(Value::in_node(&leaf, slot)),
        Err(_) => Ok(None),
    }
}

/// A part of a leaf: items that lie side by side.
#[derive(Debug)]
pub struct LeafSpan {
    leaf: Arc<Node>,
    slots: Range<usize>,
}

impl LeafSpan {
    /// The items in order; the values belong to the leaf.
    pub fn items(&self) -> impl DoubleEndedIterator<Item = (Key, InLeaf<'_>)> {
        let leaf = &self.leaf;
        self.slots.clone().filter_map(move |slot| Some((leaf.key(slot)?, InLeaf { leaf, slot })))
    }
}

/// The value of an item where it is.
#[derive(Debug, Clone, Copy)]
pub struct InLeaf<'a> {
    leaf: &'a Arc<Node>,
    slot: usize,
}

impl InLeaf<'_> {
    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        self.leaf.value(self.slot).unwrap_or_default()
    }

    /// A value that keeps the leaf alive.
    pub fn to_value(self) -> Option<Value> {
        Value::in_node(self.leaf, self.slot)
    }
}

/// What [`span`] found.
#[derive(Debug)]
pub enum Span {
    /// There is nothing in the range.
    Empty,
    /// All items of the range.
    Leaf(LeafSpan),
    /// The range may go on in another leaf: use a [`super::Cursor`].
    Wide,
}

/// The items with `from <= key <= to`, if one leaf has them all, as it nearly always has those of a narrow range. One
/// descent, nothing allocated.
///
/// # Errors
/// When a node on the way cannot be read or is corrupt.
pub fn span(cache: &NodeCache, root: &TreeRoot, from: Key, to: Key) -> Result<Span> {
    if root.is_empty() || from > to {
        return Ok(Span::Empty);
    }
    let mut node = cache.root_node(root, IoClass::SyncRead)?;
    let mut reaches_beyond = false;
    while node.level() > 0 {
        let slot = node.child_index(&from);
        reaches_beyond |= node.key(slot + 1).is_some_and(|next| next <= to);
        let Some(child) = node.child(slot) else {
            return Err(inconsistent(node.block(), "no child"));
        };
        node = cache.get(child, node.level() - 1)?;
    }
    if reaches_beyond {
        return Ok(Span::Wide);
    }
    let first = node.lower_bound(&from);
    // Mostly there is nothing, or one item.
    if node.key(first).is_none_or(|key| key > to) {
        return Ok(Span::Empty);
    }
    let last = node.find(&to).map_or_else(|slot| slot, |slot| slot + 1);
    Ok(Span::Leaf(LeafSpan { leaf: node, slots: first..last }))
}

/// The items of one leaf up to `key`: the last of them has the greatest key of the tree that is not larger. `None` if there is
/// no such item. One descent, nothing allocated.
///
/// # Errors
/// When a node on the way cannot be read or is corrupt.
pub fn span_le(cache: &NodeCache, root: &TreeRoot, key: Key) -> Result<Option<LeafSpan>> {
    if root.is_empty() {
        return Ok(None);
    }
    let (leaf, leftmost) = leaf_for(cache, root, &key)?;
    let end = match leaf.find(&key) {
        Ok(slot) => slot + 1,
        Err(0) if leftmost => return Ok(None),
        // The separator that led here is the leaf's first key.
        Err(0) => return Err(inconsistent(leaf.block(), "starts after its separator")),
        Err(slot) => slot,
    };
    Ok(Some(LeafSpan { leaf, slots: 0..end }))
}

/// The leaf that covers `key`, and whether it is the tree's first.
fn leaf_for(cache: &NodeCache, root: &TreeRoot, key: &Key) -> Result<(Arc<Node>, bool)> {
    let mut node = cache.root_node(root, IoClass::SyncRead)?;
    let mut leftmost = true;
    while node.level() > 0 {
        let slot = node.child_index(key);
        leftmost &= slot == 0;
        let Some(child) = node.child(slot) else {
            return Err(inconsistent(node.block(), "no child"));
        };
        node = cache.get(child, node.level() - 1)?;
    }
    Ok((node, leftmost))
}
