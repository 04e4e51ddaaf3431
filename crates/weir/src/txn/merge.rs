//! The merge of a checkpoint: the frozen delta and the tree become a new tree.
//!
//! The new tree is written beside the old one, so there has to be room for all nodes that change. Who
//! promises space leaves room for that ([`crate::alloc::MetadataReserve`]), from the size that the tree has. Single items in nodes that
//! are nearly full can make it grow by more than they are large, and all nodes at about the same time, when names are alike: so
//! after a merge that leaves too little room for the next one, another one is made instead, which takes the fewest nodes.
//!
//! **Invariant:** a checkpoint leaves as much room as it takes to write all nodes of its tree anew, if any tree of these items
//! does. **Invariant:** no node of a merge that is given up is in use: its blocks are free again before the next one begins, or, if
//! the disk has refused to write them, set aside until checkpoints have gone by.

use super::delta::Delta;
use crate::alloc::{MetadataReserve, Run};
use crate::device::IoClass;
use crate::device::buffer::AlignedBuf;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::format::node::{LEAF_SLOT_BYTES, NODE_CAPACITY_BYTES};
use crate::format::{BLOCK_BYTES_U64, MAX_VALUE_BYTES, NODE_BLOCKS};
use crate::tree::{self, NodeSink, Packing, TreeRoot};

/// Nodes gathered for writing.
const NODE_BATCH: usize = 64;
/// Of the nodes of a tree, one in so many may be added by items that are small: users leave so much more room than it
/// takes to write the tree once, so that on a full volume not every checkpoint has to write all of it.
const SPLIT_SHARE: u64 = 8;

/// A tree whose nodes are written, and not yet durable.
pub(super) struct NewTree {
    pub root: TreeRoot,
    /// Blocks of the nodes that are new.
    pub allocs: Vec<Run>,
    /// Blocks of the nodes that are not part of it any more.
    pub frees: Vec<Run>,
}

/// Bytes that a leaf lacks at most when the next item does not fit in.
const UNUSED_BYTES: u64 = (MAX_VALUE_BYTES + LEAF_SLOT_BYTES - 1) as u64;
/// Bytes that it has at least then.
const FULL_BYTES: u64 = NODE_CAPACITY_BYTES as u64 - UNUSED_BYTES;

/// Changes that are to be merged.
#[derive(Debug, Clone, Copy, Default)]
pub struct DeltaSum {
    /// Items that change.
    pub keys: u64,
    /// What they take in the tree at most.
    pub bytes: u64,
}

/// What is kept for a merge of `delta` into a tree of so many nodes, besides `base`.
pub(super) fn merge_reserve(
    base: MetadataReserve,
    node_count: u64,
    delta: DeltaSum,
) -> MetadataReserve {
    let grown = grown_nodes(node_count, delta.keys);
    let spare = (node_count / SPLIT_SHARE).saturating_sub(grown);
    MetadataReserve {
        merge_blocks: (node_count + grown) * NODE_BLOCKS + 2 * delta.bytes / BLOCK_BYTES_U64,
        spare_blocks: spare * NODE_BLOCKS + base.spare_blocks,
        ..base
    }
}

/// Nodes that a merge takes besides as many as the tree has, because items are put between others: what they take themselves is
/// counted with the delta. Each may have a leaf divided, which makes two new nodes of one; and however many there are, a tree that is
/// written anew has leaves that are full but for an item that did not fit in.
fn grown_nodes(node_count: u64, keys: u64) -> u64 {
    let divided = (2 * keys).saturating_sub(node_count);
    divided.min(node_count * UNUSED_BYTES / FULL_BYTES)
}

/// Whether a tree of so many nodes can be written anew in so much room, and `base` is left.
fn leaves_room(room_blocks: u64, node_count: u64, base: MetadataReserve) -> bool {
    room_blocks >= node_count * NODE_BLOCKS + base.spare_blocks
}

impl Engine {
    /// Merges the delta into `tree`, so that the next merge has room too.
    ///
    /// # Errors
    /// [`Error::NoSpace`] if no merge finds room; those of the device; [`Error::Corrupt`].
    pub(super) fn merge_delta(&self, tree: &TreeRoot, delta: &Delta) -> Result<NewTree> {
        match self.merge_packed(tree, delta, Packing::Shared) {
            Ok(new) if self.is_good(tree, &new) => return Ok(new),
            Ok(new) => self.alloc.cancel_nodes(&new.allocs),
            Err(Error::NoSpace) => {}
            Err(error) => return Err(error),
        }
        match self.merge_packed(tree, delta, Packing::Dense) {
            // Less room than for the whole tree: the part that changes may fit in.
            Err(Error::NoSpace) => self.merge_packed(tree, delta, Packing::Shared),
            merged => merged,
        }
    }

    /// Whether `new` takes no more room than the tree it is made from, or leaves enough for the next merge, once the nodes that it
    /// has replaced are free.
    fn is_good(&self, tree: &TreeRoot, new: &NewTree) -> bool {
        if self.options.dense_merges {
            return false;
        }
        let freed_blocks = new.frees.len() as u64 * NODE_BLOCKS;
        let room_blocks = self.alloc.node_room_blocks() + freed_blocks;
        new.root.node_count <= tree.node_count
            || leaves_room(room_blocks, new.root.node_count, self.store.base_reserve)
    }

    fn merge_packed(&self, tree: &TreeRoot, delta: &Delta, packing: Packing) -> Result<NewTree> {
        let generation = self.superblock.lock().root.generation + 1;
        let mut sink = Sink {
            engine: self,
            allocs: Vec::new(),
            frees: Vec::new(),
            pending: Vec::new(),
            refused: Vec::new(),
        };
        let nodes = &self.store.nodes;
        let merged = tree::merge(nodes, tree, delta.entries(), packing, (generation, 0), &mut sink);
        match merged.and_then(|root| sink.write_pending().map(|()| root)) {
            Ok(root) => Ok(NewTree { root, allocs: sink.allocs, frees: sink.frees }),
            Err(error) => {
                sink.give_up(&error);
                Err(error)
            }
        }
    }
}

/// Where a merge puts its nodes: neighbours are written together.
struct Sink<'a> {
    engine: &'a Engine,
    allocs: Vec<Run>,
    frees: Vec<Run>,
    pending: Vec<(u64, AlignedBuf)>,
    /// Blocks of nodes, one of which the disk has refused to write.
    refused: Vec<u64>,
}

impl Sink<'_> {
    fn write_pending(&mut self) -> Result<()> {
        self.pending.sort_unstable_by_key(|(block, _)| *block);
        let mut rest = &self.pending[..];
        while !rest.is_empty() {
            let neighbours = rest
                .windows(2)
                .position(|pair| pair[0].0 + NODE_BLOCKS != pair[1].0)
                .map_or(rest.len(), |last| last + 1);
            let (together, others) = rest.split_at(neighbours);
            let slices: Vec<&[u8]> = together.iter().map(|(_, node)| &node[..]).collect();
            let offset_bytes = together[0].0 * BLOCK_BYTES_U64;
            if let Err(error) =
                self.engine.device.write(offset_bytes, &slices, IoClass::Background, false)
            {
                self.refused = together.iter().map(|(block, _)| *block).collect();
                return Err(error.into());
            }
            rest = others;
        }
        self.pending.clear();
        Ok(())
    }

    /// Gives back all blocks. The next attempt goes elsewhere with what the disk has refused.
    fn give_up(self, error: &Error) {
        let Self { engine, allocs, refused, .. } = self;
        let is_broken = |run: &Run| matches!(error, Error::Io(_)) && refused.contains(&run.start);
        let (broken, others): (Vec<Run>, Vec<Run>) = allocs.into_iter().partition(is_broken);
        engine.alloc.cancel_nodes(&others);
        for run in broken {
            engine.alloc.disown_node(run);
            engine.give_back(run, error);
        }
    }
}

impl NodeSink for Sink<'_> {
    fn allocate(&mut self) -> Result<u64> {
        let hint = self.allocs.last().map(Run::end);
        let run = self.engine.alloc.allocate_node(hint)?;
        self.allocs.push(run);
        Ok(run.start)
    }

    fn free(&mut self, block: u64) {
        self.frees.push(Run { start: block, blocks: NODE_BLOCKS });
    }

    fn write(&mut self, block: u64, node: AlignedBuf) -> Result<()> {
        self.pending.push((block, node));
        if self.pending.len() >= NODE_BATCH { self.write_pending() } else { Ok(()) }
    }
}
