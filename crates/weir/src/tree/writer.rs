//! Assembles the new nodes of a merge from a stream of items and shared subtrees in key order.
//!
//! There is one *run* per level: the entries (items of leaves, children of interior nodes) that
//! are going to be in new nodes and are not written yet. A run longer than two nodes writes
//! a full node from its front, so memory stays bounded, and what is left at the end can still be
//! cut into well-filled nodes. Runs end where an untouched subtree follows ([`Writer::pass`]).
//! Before that, a run of less than a third of a node tries to swallow a neighbour: the
//! subtree that follows, or the untouched node before it, if all fits into one node.
//!
//! With [`Packing::Dense`] no subtree is shared: all of its items go through the runs.
//!
//! Invariants: a node is written exactly when its place in the order is settled, so no new node is
//! ever rewritten; an old node that is not shared is freed exactly once; entries of a run
//! come after everything in the runs of higher levels.

use super::merge::{NodeSink, Packing};
use super::{NodeCache, TreeRoot, inconsistent};
use crate::device::IoClass;
use crate::format::node::{
    ChildRef, INTERIOR_SLOT_BYTES, LEAF_SLOT_BYTES, MAX_LEVEL, NODE_CAPACITY_BYTES, Node,
    NodeBuilder, Placement,
};
use crate::format::{Key, MAX_VALUE_BYTES};
use crate::sync::Arc;
use crate::{Error, Result};
use std::collections::VecDeque;
use std::ops::Range;

/// A run below this looks for a neighbour to join.
const UNDERFULL_BYTES: usize = NODE_CAPACITY_BYTES / 3;
/// A run above this writes a node from its front.
const RUN_LIMIT_BYTES: usize = 2 * NODE_CAPACITY_BYTES;

/// Something that takes room in a node.
trait Entry {
    fn key(&self) -> Key;
    /// Of the last thing in it.
    fn last_key(&self) -> Key {
        self.key()
    }
    fn bytes(&self) -> usize;
}

/// Items of a leaf: one that is new, or some that an old leaf has side by side, which are copied in one go.
enum Items<'v> {
    /// From the changes.
    New { key: Key, value: &'v [u8] },
    /// From a node of the old tree.
    Old { leaf: Arc<Node>, slots: Range<usize>, keys: (Key, Key) },
}

impl Items<'_> {
    /// Those of some slots of an old leaf.
    fn old(leaf: &Arc<Node>, slots: Range<usize>) -> Result<Option<Self>> {
        if slots.is_empty() {
            return Ok(None);
        }
        match leaf.key(slots.start).zip(leaf.key(slots.end - 1)) {
            Some(keys) => Ok(Some(Self::Old { leaf: Arc::clone(leaf), slots, keys })),
            None => Err(inconsistent(leaf.block(), "slot out of bounds")),
        }
    }

    fn count(&self) -> usize {
        match self {
            Self::New { .. } => 1,
            Self::Old { slots, .. } => slots.len(),
        }
    }

    /// Bytes of each item.
    fn sizes(&self) -> impl Iterator<Item = usize> {
        let (new, old) = match self {
            Self::New { value, .. } => (Some(LEAF_SLOT_BYTES + value.len()), None),
            Self::Old { leaf, slots, .. } => {
                (None, Some(slots.clone().map(|slot| leaf.item_bytes(slot))))
            }
        };
        new.into_iter().chain(old.into_iter().flatten())
    }
}

impl Entry for Items<'_> {
    fn key(&self) -> Key {
        match self {
            Self::New { key, .. } => *key,
            Self::Old { keys, .. } => keys.0,
        }
    }
    fn last_key(&self) -> Key {
        match self {
            Self::New { key, .. } => *key,
            Self::Old { keys, .. } => keys.1,
        }
    }
    fn bytes(&self) -> usize {
        match self {
            Self::New { value, .. } => LEAF_SLOT_BYTES + value.len(),
            Self::Old { leaf, slots, .. } => leaf.items_bytes(slots),
        }
    }
}

#[derive(Clone, Copy)]
struct Child {
    key: Key,
    node: ChildRef,
    /// The old tree's node, untouched; otherwise written by this merge.
    shared: bool,
}

impl Entry for Child {
    fn key(&self) -> Key {
        self.key
    }
    fn bytes(&self) -> usize {
        INTERIOR_SLOT_BYTES
    }
}

/// The entries of one level that are to be written.
struct Run<E> {
    entries: VecDeque<E>,
    bytes: usize,
    /// Nodes already written from the front of this run.
    written: usize,
    /// The last entry is new, and nothing old came after it: this may be an ascending load.
    ends_fresh: bool,
    /// Largest key that went through this level.
    last: Option<Key>,
}

impl<E> Default for Run<E> {
    fn default() -> Self {
        Self { entries: VecDeque::new(), bytes: 0, written: 0, ends_fresh: false, last: None }
    }
}

impl<E: Entry> Run<E> {
    fn push(&mut self, entry: E, fresh: bool) -> Result<()> {
        let key = entry.key();
        if self.last.is_some_and(|last| last >= key) {
            return Err(Error::Corrupt(format!("tree: {key:?} is out of order")));
        }
        self.last = Some(entry.last_key());
        self.bytes += entry.bytes();
        self.ends_fresh = fresh;
        self.entries.push_back(entry);
        Ok(())
    }

    /// Puts the entries of the node before this run in front of it.
    fn prepend(&mut self, entries: Vec<E>) {
        if self.entries.is_empty() {
            self.last = entries.last().map(Entry::last_key).max(self.last);
        }
        for entry in entries.into_iter().rev() {
            self.bytes += entry.bytes();
            self.entries.push_front(entry);
        }
    }

    /// How many things from the front, of these sizes, make the next node.
    fn cut(&self, sizes: impl Iterator<Item = usize>) -> usize {
        let at_end = self.bytes <= RUN_LIMIT_BYTES;
        cut(sizes, self.bytes, at_end, self.ends_fresh)
    }

    fn pop_front(&mut self) -> Option<E> {
        let entry = self.entries.pop_front()?;
        self.bytes -= entry.bytes();
        Some(entry)
    }

    fn end(&mut self) {
        self.written = 0;
        self.ends_fresh = false;
    }
}

impl<'v> Run<Items<'v>> {
    /// Up to `count` items from the front, as they lie together.
    fn pop_items(&mut self, count: usize) -> Result<Option<Items<'v>>> {
        let Some(items) = self.pop_front() else { return Ok(None) };
        let Items::Old { leaf, slots, .. } = &items else { return Ok(Some(items)) };
        if slots.len() <= count {
            return Ok(Some(items));
        }
        let middle = slots.start + count;
        if let Some(rest) = Items::old(leaf, middle..slots.end)? {
            self.bytes += rest.bytes();
            self.entries.push_front(rest);
        }
        Items::old(leaf, slots.start..middle)
    }
}

/// How many entries from the front of a run the next node gets: everything if it fits; at the end
/// of a run the half nearest to the middle, if both halves fit; otherwise as many as fit, so that
/// an ascending load, which never comes back, leaves full nodes.
fn cut(
    sizes: impl Iterator<Item = usize>,
    total_bytes: usize,
    at_end: bool,
    ascending: bool,
) -> usize {
    let (mut fitting, mut best, mut best_distance) = (0, None, usize::MAX);
    let mut left = 0;
    for size in sizes {
        if left + size > NODE_CAPACITY_BYTES {
            break;
        }
        left += size;
        fitting += 1;
        let right = total_bytes - left;
        if right <= NODE_CAPACITY_BYTES && left.abs_diff(right) < best_distance {
            best_distance = left.abs_diff(right);
            best = Some(fitting);
        }
    }
    if total_bytes <= NODE_CAPACITY_BYTES || !at_end || ascending {
        return fitting;
    }
    best.unwrap_or(fitting)
}

/// See the module's head.
pub(super) struct Writer<'a, 'v> {
    cache: &'a NodeCache,
    sink: &'a mut dyn NodeSink,
    packing: Packing,
    generation: u64,
    tree: u8,
    leaf: Run<Items<'v>>,
    /// Runs of levels 1, 2, …
    interior: Vec<Run<Child>>,
    allocated: u64,
    freed: u64,
}

impl<'a, 'v> Writer<'a, 'v> {
    pub(super) fn new(
        cache: &'a NodeCache,
        sink: &'a mut dyn NodeSink,
        packing: Packing,
        (generation, tree): (u64, u8),
    ) -> Self {
        let (leaf, interior) = (Run::default(), Vec::new());
        Self { cache, sink, packing, generation, tree, leaf, interior, allocated: 0, freed: 0 }
    }

    /// Reads a node of the old tree.
    pub(super) fn load(&self, child: ChildRef, level: u8) -> Result<Arc<Node>> {
        let node = self.cache.get_for(child, level, IoClass::Background)?;
        if node.tree() != self.tree {
            return Err(inconsistent(child.block, "of another tree"));
        }
        Ok(node)
    }

    /// An old node is not part of the new tree.
    pub(super) fn free(&mut self, node: &Node) {
        self.freed += 1;
        self.cache.replaced(node.child_ref());
        self.sink.free(node.block());
    }

    /// Appends an item. `fresh`: its key was not in the old tree.
    pub(super) fn push_item(&mut self, key: Key, value: &'v [u8], fresh: bool) -> Result<()> {
        if value.len() > MAX_VALUE_BYTES {
            return Err(Error::Invalid("item larger than 4608 bytes"));
        }
        self.push(Items::New { key, value }, fresh)
    }

    fn push(&mut self, items: Items<'v>, fresh: bool) -> Result<()> {
        self.leaf.push(items, fresh)?;
        while self.leaf.bytes > RUN_LIMIT_BYTES {
            self.write_node(0)?;
        }
        Ok(())
    }

    /// Appends the items of slots `from..to` of an old leaf.
    pub(super) fn push_old(&mut self, leaf: &Arc<Node>, from: usize, to: usize) -> Result<()> {
        match Items::old(leaf, from..to)? {
            Some(items) => self.push(items, false),
            None => Ok(()),
        }
    }

    /// Appends the old subtree `child` of this level, shared unless all is written anew, or a small run
    /// before it swallows its root.
    pub(super) fn pass(&mut self, level: u8, key: Key, child: ChildRef) -> Result<()> {
        if self.packing == Packing::Dense {
            let node = self.load(child, level)?;
            self.free(&node);
            return self.open(&node);
        }
        let pending = self.pending_bytes(level);
        if pending > 0 && pending < UNDERFULL_BYTES {
            let node = self.load(child, level)?;
            if pending + node.used_bytes() <= NODE_CAPACITY_BYTES {
                self.free(&node);
                return self.open(&node);
            }
        }
        self.flush(level)?;
        self.push_child(level + 1, Child { key, node: child, shared: true }, false)
    }

    /// Appends what is in an old node instead of the node itself.
    fn open(&mut self, node: &Arc<Node>) -> Result<()> {
        if node.level() == 0 {
            return self.push_old(node, 0, node.count());
        }
        self.pass_children(node, 0, node.count())
    }

    /// Appends the children in slots `from..to` of an old interior node.
    pub(super) fn pass_children(&mut self, node: &Node, from: usize, to: usize) -> Result<()> {
        for slot in from..to {
            let Some((key, child)) = node.key(slot).zip(node.child(slot)) else {
                return Err(inconsistent(node.block(), "slot out of bounds"));
            };
            self.pass(node.level() - 1, key, child)?;
        }
        Ok(())
    }

    /// Bytes that the nodes of this level still to be written have so far; what waits below will be
    /// at least one child.
    fn pending_bytes(&self, level: u8) -> usize {
        let level = usize::from(level);
        if level == 0 {
            return self.leaf.bytes;
        }
        let below = self.leaf.bytes > 0
            || self.interior.iter().take(level - 1).any(|run| !run.entries.is_empty());
        let own = self.interior.get(level - 1).map_or(0, |run| run.bytes);
        own + if below { INTERIOR_SLOT_BYTES } else { 0 }
    }

    /// Ends the runs of all levels up to this one.
    fn flush(&mut self, level: u8) -> Result<()> {
        // From above, so that a lone child finds siblings before it looks for one to join.
        for level in (0..=level).rev() {
            self.join_previous(level)?;
        }
        for level in 0..=level {
            self.write_out(level)?;
        }
        Ok(())
    }

    /// Lets a small run swallow the untouched node before it, if all fits into one node.
    fn join_previous(&mut self, level: u8) -> Result<()> {
        let pending = self.pending_bytes(level);
        if pending == 0 || pending >= UNDERFULL_BYTES {
            return Ok(());
        }
        let Some(parents) = self.interior.get(usize::from(level)) else { return Ok(()) };
        let Some(previous) = parents.entries.back().filter(|last| last.shared) else {
            return Ok(());
        };
        let node = self.load(previous.node, level)?;
        if pending + node.used_bytes() > NODE_CAPACITY_BYTES {
            return Ok(());
        }
        self.free(&node);
        if let Some(parents) = self.interior.get_mut(usize::from(level))
            && let Some(entry) = parents.entries.pop_back()
        {
            parents.bytes -= entry.bytes();
            parents.last = parents.entries.back().map(Entry::key);
        }
        let slots = 0..node.count();
        if level == 0 {
            self.leaf.prepend(Items::old(&node, slots)?.into_iter().collect());
        } else {
            let child = |slot| {
                let (key, child) = node.key(slot).zip(node.child(slot))?;
                Some(Child { key, node: child, shared: true })
            };
            self.run(level)?.prepend(slots.filter_map(child).collect());
        }
        Ok(())
    }

    /// The run of an interior level.
    fn run(&mut self, level: u8) -> Result<&mut Run<Child>> {
        if level == 0 || level > MAX_LEVEL {
            return Err(Error::Corrupt("tree: too many levels".to_owned()));
        }
        let index = usize::from(level) - 1;
        if self.interior.len() <= index {
            self.interior.resize_with(index + 1, Run::default);
        }
        Ok(&mut self.interior[index])
    }

    fn push_child(&mut self, level: u8, child: Child, fresh: bool) -> Result<()> {
        let run = self.run(level)?;
        run.push(child, fresh)?;
        if run.bytes > RUN_LIMIT_BYTES {
            self.write_node(level)?;
        }
        Ok(())
    }

    /// Writes all that waits on this level.
    fn write_out(&mut self, level: u8) -> Result<()> {
        while self.entry_count(level) > 0 {
            self.write_node(level)?;
        }
        if level == 0 {
            self.leaf.end();
        } else {
            self.run(level)?.end();
        }
        Ok(())
    }

    fn entry_count(&self, level: u8) -> usize {
        match usize::from(level).checked_sub(1) {
            None => self.leaf.entries.len(),
            Some(index) => self.interior.get(index).map_or(0, |run| run.entries.len()),
        }
    }

    /// Writes one node from the front of this level's run, and hands it to the level above.
    fn write_node(&mut self, level: u8) -> Result<()> {
        let mut builder = NodeBuilder::new(level);
        let mut first = None;
        let fresh;
        // A leaf that takes the place of others will be changed again; one of new items, as at the end of ascending
        // numbers, rather not.
        let mut rewritten = level > 0;
        if level == 0 {
            let mut left = self.leaf.cut(self.leaf.entries.iter().flat_map(Items::sizes));
            while left > 0 {
                let Some(items) = self.leaf.pop_items(left)? else { break };
                left -= items.count();
                first.get_or_insert(items.key());
                match &items {
                    Items::New { key, value } => builder.push_item(*key, value)?,
                    Items::Old { leaf, slots, .. } => {
                        rewritten = true;
                        builder.push_items(leaf, slots)?;
                    }
                }
            }
            fresh = self.leaf.ends_fresh && self.leaf.written > 0;
            self.leaf.written += 1;
        } else {
            let run = self.run(level)?;
            for _ in 0..run.cut(run.entries.iter().map(Entry::bytes)) {
                let Some(entry) = run.pop_front() else { break };
                first.get_or_insert(entry.key);
                builder.push_child(entry.key, entry.node)?;
            }
            fresh = run.ends_fresh && run.written > 0;
            run.written += 1;
        }
        let Some(key) = first else { return Ok(()) };
        let block = self.sink.allocate()?;
        self.allocated += 1;
        let (generation, tree) = (self.generation, self.tree);
        let volume_id = self.cache.volume_id();
        let at = Placement { volume_id, block, generation, tree };
        let (bytes, node) = builder.finish(&at)?;
        let child = node.child_ref();
        self.cache.insert_written(Arc::new(node), rewritten);
        self.sink.write(block, bytes)?;
        self.push_child(level + 1, Child { key, node: child, shared: false }, fresh)
    }

    /// Ends all runs and yields the root of the new tree.
    pub(super) fn finish(mut self, old: &TreeRoot, item_count: u64) -> Result<TreeRoot> {
        for level in (0..=self.interior.len() as u8).rev() {
            self.join_previous(level)?;
        }
        let mut level = 0;
        let top = loop {
            self.write_out(level)?;
            level += 1;
            let above = usize::from(level);
            let is_top = self.interior.iter().skip(above).all(|run| run.entries.is_empty());
            if is_top && self.entry_count(level) <= 1 {
                break self.run(level)?.entries.pop_front();
            }
        };
        let Some(top) = top else {
            if item_count != 0 {
                return Err(Error::Corrupt(format!("tree: {item_count} items too many counted")));
            }
            return Ok(TreeRoot { generation: self.generation, ..TreeRoot::EMPTY });
        };
        let (root, level) = self.skip_single_children(&top, level - 1)?;
        let node_count = (old.node_count + self.allocated).checked_sub(self.freed);
        let Some(node_count) = node_count else {
            return Err(Error::Corrupt(format!("tree: node count {} too small", old.node_count)));
        };
        Ok(TreeRoot {
            block: root.block,
            level,
            checksum: root.checksum,
            generation: self.generation,
            item_count,
            node_count,
        })
    }

    /// Follows interior nodes with a single child down from the top: they need not be in the tree.
    /// Only an old node can be one: a new one at the top was written because it has several
    /// children. (And new nodes must not be read: the sink may not have written them yet.)
    fn skip_single_children(&mut self, top: &Child, level: u8) -> Result<(ChildRef, u8)> {
        let (mut root, mut level) = (top.node, level);
        while top.shared && level > 0 {
            let node = self.load(root, level)?;
            let Some(child) = node.child(0).filter(|_| node.count() == 1) else { break };
            self.free(&node);
            (root, level) = (child, level - 1);
        }
        Ok((root, level))
    }
}
