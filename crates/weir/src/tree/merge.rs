//! Applies a sorted batch of changes to a tree.
//!
//! The old tree is walked along the changes only. A leaf is looked at lazily: as long as the
//! changes put what is already there, or delete what is not, nothing happens. With the first
//! change that matters the whole path down to the leaf becomes *touched* (freed, its contents go
//! to the [`Writer`]); what was passed over before that is handed to the writer as shared
//! subtrees. Everything flows in key order, so memory is bounded by the path and the writer's
//! runs, however many changes there are.

use super::writer::Writer;
use super::{NodeCache, TreeRoot, inconsistent};
use crate::device::buffer::AlignedBuf;
use crate::format::Key;
use crate::format::node::Node;
use crate::sync::Arc;
use crate::{Error, Result};
use std::iter::Peekable;

/// Where a merge gets room for nodes and leaves them.
pub trait NodeSink {
    /// Four contiguous free blocks; the first one's number.
    ///
    /// # Errors
    /// When there are none.
    fn allocate(&mut self) -> Result<u64>;
    /// The node at `block` is not part of the new tree. Called once per node. Its blocks
    /// must not be reused before the new tree is durable.
    fn free(&mut self, block: u64);
    /// Takes a node to be written. It has to be on the device when the new root is published, not
    /// before: the merge never reads it back.
    ///
    /// # Errors
    /// When it cannot be written; the merge then ends with this error.
    fn write(&mut self, block: u64, node: AlignedBuf) -> Result<()>;
}

/// Which nodes a merge writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// Those on the way to changes, and few more: what does not change is shared with the old tree. A
    /// leaf that overflows becomes two, so single items here and there can add a node each.
    Shared,
    /// All of the tree anew, each as full as its items allow: no tree of these items has fewer
    /// leaves, and none of the old tree's nodes is left.
    Dense,
}

/// A change: the item's new value, or `None` to delete it.
pub type Change<'v> = (Key, Option<&'v [u8]>);

/// The tree that `root` becomes with `changes`, which come in strictly increasing key order. The
/// nodes of `root` stay as they are. If nothing changes, the result is `root` itself. New nodes say
/// that `generation` wrote them, as part of this `tree` of the table.
///
/// # Errors
/// [`Error::Invalid`] for changes out of order or too large; the sink's errors; [`Error::Corrupt`]
/// or [`Error::Io`] when the old tree cannot be read. Blocks allocated up to then are the
/// caller's to take back; the old tree is intact.
pub fn merge<'v>(
    cache: &NodeCache,
    root: &TreeRoot,
    changes: impl Iterator<Item = Change<'v>>,
    packing: Packing,
    (generation, tree): (u64, u8),
    sink: &mut dyn NodeSink,
) -> Result<TreeRoot> {
    let mut merger = Merger {
        writer: Writer::new(cache, sink, packing, (generation, tree)),
        path: Vec::new(),
        changes: Changes { inner: changes.peekable(), previous: None },
        item_count: root.item_count,
        touched: false,
    };
    if root.is_empty() {
        merger.load_all()?;
    } else {
        merger.apply(root)?;
    }
    if !merger.touched {
        return Ok(*root);
    }
    merger.writer.finish(root, merger.item_count)
}

/// The changes, checked for order.
struct Changes<I: Iterator> {
    inner: Peekable<I>,
    previous: Option<Key>,
}

impl<'v, I: Iterator<Item = Change<'v>>> Changes<I> {
    /// The next change's key if it is below `end`.
    fn peek_below(&mut self, end: Option<Key>) -> Result<Option<Key>> {
        let Some((key, _)) = self.inner.peek() else { return Ok(None) };
        if self.previous.is_some_and(|previous| previous >= *key) {
            return Err(Error::Invalid("changes of a merge are not in key order"));
        }
        Ok(Some(*key).filter(|key| end.is_none_or(|end| *key < end)))
    }

    /// The next change if its key is below `end`.
    fn next_below(&mut self, end: Option<Key>) -> Result<Option<Change<'v>>> {
        let Some(key) = self.peek_below(end)? else { return Ok(None) };
        self.previous = Some(key);
        Ok(self.inner.next())
    }
}

/// A node of the old tree that the walk is in.
struct Frame {
    node: Arc<Node>,
    /// First slot whose child is not dealt with. (Interior nodes.)
    slot: usize,
    /// The node's contents go to the writer; those before `slot` have gone.
    touched: bool,
    /// Where the next node of the level starts.
    end: Option<Key>,
}

struct Merger<'a, 'v, I: Iterator<Item = Change<'v>>> {
    writer: Writer<'a, 'v>,
    /// From the root down. Touched frames are a prefix of it.
    path: Vec<Frame>,
    changes: Changes<I>,
    item_count: u64,
    touched: bool,
}

impl<'v, I: Iterator<Item = Change<'v>>> Merger<'_, 'v, I> {
    /// Merges into the empty tree.
    fn load_all(&mut self) -> Result<()> {
        while let Some((key, value)) = self.changes.next_below(None)? {
            if let Some(value) = value {
                self.touched = true;
                self.item_count += 1;
                self.writer.push_item(key, value, true)?;
            }
        }
        Ok(())
    }

    fn apply(&mut self, root: &TreeRoot) -> Result<()> {
        if self.changes.peek_below(None)?.is_none() {
            return Ok(());
        }
        let node = self.writer.load(root.child_ref(), root.level)?;
        self.path.push(Frame { node, slot: 0, touched: false, end: None });
        while let Some(key) = self.changes.peek_below(None)? {
            while self.path.last().is_some_and(|frame| frame.end.is_some_and(|end| end <= key)) {
                self.leave()?;
            }
            self.descend(&key)?;
            self.merge_leaf()?;
            if self.path.len() > 1 {
                self.leave()?;
            }
        }
        while !self.path.is_empty() {
            self.leave()?;
        }
        Ok(())
    }

    /// Goes from the current node down to the leaf that covers `key`.
    fn descend(&mut self, key: &Key) -> Result<()> {
        while let Some(frame) = self.path.last_mut()
            && frame.node.level() > 0
        {
            let target = frame.node.child_index(key);
            if target < frame.slot {
                return Err(inconsistent(frame.node.block(), "children overlap"));
            }
            if frame.touched {
                self.writer.pass_children(&frame.node, frame.slot, target)?;
            }
            frame.slot = target;
            let level = frame.node.level() - 1;
            let Some((first, child)) = frame.node.key(target).zip(frame.node.child(target)) else {
                return Err(inconsistent(frame.node.block(), "slot out of bounds"));
            };
            let end = frame.node.key(target + 1).or(frame.end);
            let node = self.writer.load(child, level)?;
            if node.first_key() != Some(first)
                || end.is_some_and(|end| node.last_key() >= Some(end))
            {
                return Err(inconsistent(child.block, "keys outside of the parent's separators"));
            }
            self.path.push(Frame { node, slot: 0, touched: false, end });
        }
        Ok(())
    }

    /// Applies all changes that belong to the leaf at the end of the path.
    fn merge_leaf(&mut self) -> Result<()> {
        let Some((leaf, end)) = self.path.last().map(|frame| (Arc::clone(&frame.node), frame.end))
        else {
            return Ok(());
        };
        // Slots before this one are in the writer, if the leaf is touched.
        let mut done = 0;
        let mut touched = false;
        while let Some((key, value)) = self.changes.next_below(end)? {
            let found = leaf.find(&key);
            let old = found.ok().and_then(|slot| leaf.value(slot));
            if value == old {
                continue;
            }
            if !touched {
                self.touch_path()?;
                touched = true;
            }
            let (Ok(slot) | Err(slot)) = found;
            self.writer.push_old(&leaf, done, slot)?;
            done = slot + usize::from(old.is_some());
            let fresh = old.is_none();
            if fresh {
                self.item_count += 1;
            }
            match value {
                Some(value) => self.writer.push_item(key, value, fresh)?,
                None => self.item_count = self.item_count.checked_sub(1).ok_or_else(miscounted)?,
            }
        }
        if touched {
            self.writer.push_old(&leaf, done, leaf.count())?;
        }
        Ok(())
    }

    /// Touches all nodes of the path; what lies before it goes to the writer.
    fn touch_path(&mut self) -> Result<()> {
        self.touched = true;
        for frame in &mut self.path {
            if !frame.touched {
                frame.touched = true;
                self.writer.free(&frame.node);
                if frame.node.level() > 0 {
                    self.writer.pass_children(&frame.node, 0, frame.slot)?;
                }
            }
        }
        Ok(())
    }

    /// Goes up: the node at the end of the path is done.
    fn leave(&mut self) -> Result<()> {
        let Some(frame) = self.path.pop() else { return Ok(()) };
        if frame.touched && frame.node.level() > 0 {
            self.writer.pass_children(&frame.node, frame.slot, frame.node.count())?;
        }
        let Some(parent) = self.path.last_mut() else { return Ok(()) };
        let slot = parent.slot;
        parent.slot += 1;
        if parent.touched && !frame.touched {
            self.writer.pass_children(&parent.node, slot, slot + 1)?;
        }
        Ok(())
    }
}

fn miscounted() -> Error {
    Error::Corrupt("tree: fewer items counted than it has".to_owned())
}
