//! Point look-ups.

use super::{NodeCache, TreeRoot, Value, inconsistent};
use crate::Result;
use crate::device::IoClass;
use crate::format::Key;
use crate::format::node::Node;
use crate::sync::Arc;

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

/// The item with the greatest key that is not larger than `key`.
///
/// # Errors
/// When a node on the way cannot be read or is corrupt.
pub fn get_le(cache: &NodeCache, root: &TreeRoot, key: Key) -> Result<Option<(Key, Value)>> {
    if root.is_empty() {
        return Ok(None);
    }
    let (leaf, leftmost) = leaf_for(cache, root, &key)?;
    let slot = match leaf.find(&key) {
        Ok(slot) => slot,
        Err(0) if leftmost => return Ok(None),
        // The separator that led here is the leaf's first key.
        Err(0) => return Err(inconsistent(leaf.block(), "starts after its separator")),
        Err(slot) => slot - 1,
    };
    Ok(leaf.key(slot).zip(Value::in_node(&leaf, slot)))
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
