//! Iteration in key order.

use super::{NodeCache, TreeRoot, Value, inconsistent};
use crate::Result;
use crate::device::IoClass;
use crate::format::Key;
use crate::format::node::Node;
use crate::sync::Arc;

/// A position in a tree, moving forward. It holds the nodes of its path, so that a step inside
/// a leaf touches neither the cache nor a lock, and a step to the next leaf usually looks up
/// one node.
#[derive(Debug)]
pub struct Cursor<'a> {
    cache: &'a NodeCache,
    root: TreeRoot,
    /// From the root to the leaf, with the slot in each. Invariant: empty (past the end of the
    /// tree), or complete down to level 0. The leaf's slot may be one past its last.
    path: Vec<(Arc<Node>, usize)>,
}

impl<'a> Cursor<'a> {
    /// A cursor before the first item whose key is not smaller than `key`.
    ///
    /// # Errors
    /// When a node on the way cannot be read or is corrupt.
    pub fn seek(cache: &'a NodeCache, root: &TreeRoot, key: Key) -> Result<Self> {
        let path = Vec::with_capacity(usize::from(root.level) + 1);
        let mut cursor = Self { cache, root: *root, path };
        cursor.descend_to(&key)?;
        Ok(cursor)
    }

    /// Moves, in either direction, before the first item whose key is not smaller than `key`.
    ///
    /// # Errors
    /// When a node on the way cannot be read or is corrupt.
    pub fn reseek(&mut self, key: Key) -> Result<()> {
        if let Some((leaf, slot)) = self.path.last_mut()
            && leaf.first_key().is_some_and(|first| first <= key)
            && leaf.last_key().is_some_and(|last| key <= last)
        {
            *slot = leaf.lower_bound(&key);
            return Ok(());
        }
        self.descend_to(&key)
    }

    /// The key of the next item, without moving.
    ///
    /// # Errors
    /// When the next leaf cannot be read or is corrupt.
    pub fn peek_key(&mut self) -> Result<Option<Key>> {
        self.settle()?;
        Ok(self.path.last().and_then(|(leaf, slot)| leaf.key(*slot)))
    }

    /// The next item, moving past it.
    ///
    /// # Errors
    /// When the next leaf cannot be read or is corrupt.
    // Not `Iterator`: an error here ends the caller with `?`, and needs no transposing.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Result<Option<(Key, Value)>> {
        self.settle()?;
        let Some((leaf, slot)) = self.path.last_mut() else { return Ok(None) };
        let item = leaf.key(*slot).zip(Value::in_node(leaf, *slot));
        *slot += 1;
        Ok(item)
    }

    /// Moves from the end of a leaf to the start of the next.
    fn settle(&mut self) -> Result<()> {
        let Some((leaf, slot)) = self.path.last() else { return Ok(()) };
        if *slot < leaf.count() {
            return Ok(());
        }
        let last = leaf.last_key();
        // On an error the cursor stays past the end: it never shows an incomplete path.
        let mut path = std::mem::take(&mut self.path);
        path.pop();
        while let Some((node, slot)) = path.last_mut() {
            *slot += 1;
            if *slot < node.count() {
                self.go_down(&mut path, None)?;
                break;
            }
            path.pop();
        }
        if let Some((leaf, _)) = path.last()
            && leaf.first_key() <= last
        {
            return Err(inconsistent(leaf.block(), "overlaps the leaf before it"));
        }
        self.path = path;
        Ok(())
    }

    fn descend_to(&mut self, key: &Key) -> Result<()> {
        let mut path = std::mem::take(&mut self.path);
        path.clear();
        if self.root.is_empty() {
            return Ok(());
        }
        let node = self.cache.root_node(&self.root, IoClass::SyncRead)?;
        let slot = start_slot(&node, Some(key));
        path.push((node, slot));
        self.go_down(&mut path, Some(key))?;
        self.path = path;
        Ok(())
    }

    /// Completes `path` down to a leaf: towards `key`, or along the first slots.
    fn go_down(&self, path: &mut Vec<(Arc<Node>, usize)>, key: Option<&Key>) -> Result<()> {
        while let Some((node, slot)) = path.last()
            && node.level() > 0
        {
            let Some(child) = node.child(*slot) else {
                return Err(inconsistent(node.block(), "no child"));
            };
            let node = self.cache.get(child, node.level() - 1)?;
            let slot = start_slot(&node, key);
            path.push((node, slot));
        }
        Ok(())
    }
}

/// Where a search for `key` continues in `node`; without a key, at its start.
fn start_slot(node: &Node, key: Option<&Key>) -> usize {
    match key {
        None => 0,
        Some(key) if node.level() == 0 => node.lower_bound(key),
        Some(key) => node.child_index(key),
    }
}
