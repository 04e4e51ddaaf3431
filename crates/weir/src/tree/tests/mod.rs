//! Tests of the tree against a `BTreeMap`, on a memory device.

mod corruption;
mod model;
mod policy;

use super::*;
use crate::device::buffer::AlignedBuf;
use crate::device::memory::MemoryDevice;
use crate::device::{Device, IoClass};
use crate::format::node::{LEAF_SLOT_BYTES, NODE_CAPACITY_BYTES, Node};
use crate::format::{BLOCK_BYTES_U64, Key, Kind, NODE_BLOCKS, VolumeId};
use crate::sync::Arc;
use crate::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

/// The item with the greatest key that is not larger than `key`.
fn get_le(cache: &NodeCache, root: &TreeRoot, key: Key) -> Result<Option<(Key, Value)>> {
    let span = span_le(cache, root, key)?;
    let last = span.iter().flat_map(LeafSpan::items).next_back();
    Ok(last.and_then(|(key, value)| Some((key, value.to_value()?))))
}

const VOLUME_ID: VolumeId = *b"tree test volume";
const TOTAL_BLOCKS: u64 = 1 << 20;

type Model = BTreeMap<Key, Vec<u8>>;
type Changes = BTreeMap<Key, Option<Vec<u8>>>;

/// Deterministic random numbers (`SplitMix64`).
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (bits ^ (bits >> 31)) % end
    }
}

/// Allocates and accounts: panics at any breach of the sink's contract.
struct TestSink {
    device: Arc<MemoryDevice>,
    live: BTreeSet<u64>,
    /// Freed before this merge: reused at once, so that stale cache entries meet new nodes.
    reusable: Vec<u64>,
    freed: BTreeSet<u64>,
    unwritten: BTreeSet<u64>,
    pending: Vec<(u64, AlignedBuf)>,
    next_block: u64,
    allocated: u64,
    /// Allocations that are still granted.
    grants: u64,
}

impl NodeSink for TestSink {
    fn allocate(&mut self) -> Result<u64> {
        self.grants = self.grants.checked_sub(1).ok_or(Error::NoSpace)?;
        let block = self.reusable.pop().unwrap_or_else(|| {
            self.next_block += NODE_BLOCKS;
            self.next_block
        });
        assert!(block + NODE_BLOCKS <= TOTAL_BLOCKS);
        assert!(self.live.insert(block));
        assert!(self.unwritten.insert(block));
        self.allocated += 1;
        Ok(block)
    }

    fn free(&mut self, block: u64) {
        assert!(self.live.remove(&block), "freed twice, or never allocated: {block}");
        assert!(!self.unwritten.contains(&block));
        self.freed.insert(block);
    }

    fn write(&mut self, block: u64, node: AlignedBuf) -> Result<()> {
        assert!(self.unwritten.remove(&block), "written twice, or not allocated: {block}");
        self.pending.push((block, node));
        Ok(())
    }
}

impl TestSink {
    /// Only now the nodes reach the device: a merge must not depend on reading its own.
    fn write_pending(&mut self) {
        for (block, node) in self.pending.drain(..) {
            let offset = block * BLOCK_BYTES_U64;
            self.device.write(offset, &[&node], IoClass::Background, false).unwrap();
        }
    }
}

struct Volume {
    device: Arc<MemoryDevice>,
    cache: NodeCache,
    sink: TestSink,
    root: TreeRoot,
    model: Model,
    generation: u64,
    packing: Packing,
}

impl Volume {
    fn new(cache_bytes: u64) -> Self {
        let device = Arc::new(MemoryDevice::new(TOTAL_BLOCKS * BLOCK_BYTES_U64));
        let cache = NodeCache::new(
            Arc::clone(&device) as Arc<dyn Device>,
            VOLUME_ID,
            TOTAL_BLOCKS,
            cache_bytes,
        );
        let sink = TestSink {
            device: Arc::clone(&device),
            live: BTreeSet::new(),
            reusable: Vec::new(),
            freed: BTreeSet::new(),
            unwritten: BTreeSet::new(),
            pending: Vec::new(),
            next_block: 0,
            allocated: 0,
            grants: u64::MAX,
        };
        let (root, packing) = (TreeRoot::EMPTY, Packing::Shared);
        Self { device, cache, sink, root, model: Model::new(), generation: 0, packing }
    }

    fn merge<'v>(&mut self, changes: impl Iterator<Item = merge::Change<'v>>) -> Result<TreeRoot> {
        self.generation += 1;
        let (root, at, packing) = (self.root, (self.generation, 0), self.packing);
        let result = super::merge(&self.cache, &root, changes, packing, at, &mut self.sink);
        self.sink.write_pending();
        result
    }

    /// Merges `changes` into the tree and the model, and checks the accounting.
    fn apply(&mut self, changes: Changes) {
        let root = self.merge(changes.iter().map(|(key, value)| (*key, value.as_deref()))).unwrap();
        self.root = root;
        for (key, value) in changes {
            match value {
                Some(value) => self.model.insert(key, value),
                None => self.model.remove(&key),
            };
        }
        assert!(self.sink.unwritten.is_empty());
        assert_eq!(self.root.node_count, self.sink.live.len() as u64);
        assert_eq!(self.root.item_count, self.model.len() as u64);
        let freed = std::mem::take(&mut self.sink.freed);
        self.sink.reusable.extend(freed);
    }

    fn walk(&self) -> Seen {
        let mut seen = Seen::default();
        let volume = walk::WalkVolume {
            device: &*self.device,
            volume_id: VOLUME_ID,
            total_blocks: TOTAL_BLOCKS,
        };
        seen.summary = super::walk(volume, &self.root, 0, &mut seen);
        seen
    }

    /// As [`Volume::apply`], with this packing.
    fn apply_packed(&mut self, changes: Changes, packing: Packing) {
        self.packing = packing;
        self.apply(changes);
        self.packing = Packing::Shared;
    }

    /// The tree holds the model's items and exactly the live nodes.
    fn check_contents(&self) -> Seen {
        let seen = self.walk();
        assert_eq!(seen.problems, []);
        assert!(seen.items.iter().map(|(key, value)| (key, value)).eq(self.model.iter()));
        assert!(seen.blocks.iter().eq(self.sink.live.iter()));
        assert_eq!(seen.blocks.len() as u64, seen.summary.nodes);
        seen
    }

    /// Every way to read agrees with the model at `key`.
    fn check_reads(&self, key: &Key) {
        let found = get(&self.cache, &self.root, *key).unwrap();
        assert_eq!(found.as_deref(), self.model.get(key).map(Vec::as_slice), "{key:?}");
        let found = get_le(&self.cache, &self.root, *key).unwrap();
        let expected = self.model.range(..=*key).next_back();
        assert_eq!(found.as_ref().map(|(key, value)| (key, &**value)), borrowed(expected));
        let mut cursor = Cursor::seek(&self.cache, &self.root, *key).unwrap();
        let mut expected = self.model.range(*key..);
        for _ in 0..20 {
            let expected = expected.next();
            assert_eq!(cursor.peek_key().unwrap(), expected.map(|(key, _)| *key));
            let found = cursor.next().unwrap();
            assert_eq!(found.as_ref().map(|(key, value)| (key, &**value)), borrowed(expected));
        }
    }

    /// Used part of the leaves, without the last one.
    fn leaf_fill(&self) -> f64 {
        let mut used = self.check_contents().leaf_used_bytes;
        used.pop();
        used.iter().sum::<usize>() as f64 / (used.len() * NODE_CAPACITY_BYTES) as f64
    }
}

fn borrowed<'a>(item: Option<(&'a Key, &'a Vec<u8>)>) -> Option<(&'a Key, &'a [u8])> {
    item.map(|(key, value)| (key, value.as_slice()))
}

/// Collects what a walk visits.
#[derive(Default)]
struct Seen {
    items: Vec<(Key, Vec<u8>)>,
    blocks: BTreeSet<u64>,
    leaf_used_bytes: Vec<usize>,
    single_children: usize,
    problems: Vec<WalkProblem>,
    progress_calls: usize,
    summary: WalkSummary,
}

impl Visitor for Seen {
    fn node(&mut self, node: &Node) -> ControlFlow<()> {
        assert!(self.blocks.insert(node.block()), "visited twice");
        if node.level() == 0 {
            self.leaf_used_bytes.push(node.used_bytes());
        } else {
            self.single_children += usize::from(node.count() == 1);
        }
        ControlFlow::Continue(())
    }
    fn item(&mut self, key: Key, value: &[u8]) -> ControlFlow<()> {
        self.items.push((key, value.to_vec()));
        ControlFlow::Continue(())
    }
    fn problem(&mut self, problem: WalkProblem) -> ControlFlow<()> {
        self.problems.push(problem);
        ControlFlow::Continue(())
    }
    fn progress(&mut self, _visited_nodes: u64, _node_count: u64) -> ControlFlow<()> {
        self.progress_calls += 1;
        ControlFlow::Continue(())
    }
}

/// An inode-sized item of a large tree.
fn numbered(number: u64) -> (Key, Option<Vec<u8>>) {
    (Key::inode(number), Some(vec![number as u8; 192]))
}
