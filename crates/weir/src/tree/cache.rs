//! The cache of tree nodes, and the one way to read them.
//!
//! Invariants: every cached node has been verified; an entry is used only if its checksum is the
//! one the caller got from the parent, so a node of an older checkpoint that lived at the same
//! place is never taken for the current one, and need not be invalidated.
//!
//! Who must not wait ([`crate::sync::at_once`]) finds what the cache has, and nothing else.
//!
//! Locks: one mutex per shard, held for a map look-up only, never over I/O, never two at a time.
//! Concurrent misses of a node both read it; the second insertion replaces the first, unless that is of a newer tree.

use super::TreeRoot;
use super::shard::Shard;
use crate::device::buffer::AlignedBuf;
use crate::device::{Device, IoClass};
use crate::format::node::{ChildRef, Expectation, MAX_LEVEL, Node};
use crate::format::{BLOCK_BYTES_U64, NODE_BLOCKS, NODE_BYTES, VolumeId};
use crate::number_map::spread;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Arc, Mutex, may_wait};
use crate::{Error, Result};

/// Number of shards; a power of two.
const SHARDS: usize = 8;

/// What the cache did so far, and holds now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheStats {
    /// Nodes found.
    pub hits: u64,
    /// Nodes that had to be read.
    pub misses: u64,
    /// Nodes dropped for want of room.
    pub evictions: u64,
    /// Nodes held.
    pub nodes: u64,
    /// Memory of the nodes held.
    pub bytes: u64,
    /// Nodes that were read and are not what they should be.
    pub damaged: u64,
}

/// See the module's head.
pub struct NodeCache {
    device: Arc<dyn Device>,
    volume_id: VolumeId,
    total_blocks: u64,
    shards: Box<[Mutex<Shard>]>,
    damaged: AtomicU64,
}

impl std::fmt::Debug for NodeCache {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("NodeCache").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl NodeCache {
    /// An empty cache for the nodes of a volume of `total_blocks` blocks. It holds nodes of up to
    /// `capacity_bytes`, and never fewer than one node per shard (128 KiB).
    pub fn new(
        device: Arc<dyn Device>,
        volume_id: VolumeId,
        total_blocks: u64,
        capacity_bytes: u64,
    ) -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::new(Shard::default())).collect();
        let damaged = AtomicU64::new(0);
        let cache = Self { device, volume_id, total_blocks, shards, damaged };
        cache.set_capacity(capacity_bytes);
        cache
    }

    /// Changes the capacity, evicting at once what does not fit any more.
    pub fn set_capacity(&self, capacity_bytes: u64) {
        let nodes = usize::try_from(capacity_bytes / NODE_BYTES as u64).unwrap_or(usize::MAX);
        for shard in &self.shards {
            shard.lock().set_capacity((nodes / SHARDS).max(1));
        }
    }

    /// The node `child` of this level, for a caller that waits.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be read, [`Error::Corrupt`] when it is not what was expected, [`Error::WouldBlock`] when
    /// it would have to be read by somebody who does not wait.
    pub fn get(&self, child: ChildRef, level: u8) -> Result<Arc<Node>> {
        self.get_for(child, level, IoClass::SyncRead)
    }

    /// As [`NodeCache::get`], with the priority of the read, if there is one.
    ///
    /// # Errors
    /// As [`NodeCache::get`].
    pub fn get_for(&self, child: ChildRef, level: u8, class: IoClass) -> Result<Arc<Node>> {
        let cached = self.shard(child.block).lock().get(child);
        if let Some(node) = cached {
            if node.level() == level {
                return Ok(node);
            }
            return Err(super::inconsistent(child.block, "wrong level"));
        }
        if !may_wait() {
            // It is not read here, but by who does.
            self.shard(child.block).lock().misses -= 1;
            return Err(Error::WouldBlock);
        }
        let device = &*self.device;
        let expected = Expectation { volume_id: self.volume_id, child, level };
        let read = read_node(device, self.total_blocks, &expected, class);
        let node = Arc::new(read.inspect_err(|error| {
            if matches!(error, Error::Corrupt(_)) {
                self.damaged.fetch_add(1, Ordering::Relaxed);
            }
        })?);
        self.insert(Arc::clone(&node));
        Ok(node)
    }

    /// Adds a node that was read.
    fn insert(&self, node: Arc<Node>) {
        self.shard(node.block()).lock().insert(node, false);
    }

    /// Adds a node that was just written (or is about to be). `is_hot`: it is likely to be asked for again, so a scan of others must not
    /// drive it out.
    pub fn insert_written(&self, node: Arc<Node>, is_hot: bool) {
        self.shard(node.block()).lock().insert(node, is_hot);
    }

    /// A node that the next tree does not contain: still found, but one of the first to leave when there is want of room.
    pub fn replaced(&self, child: ChildRef) {
        self.shard(child.block).lock().replaced(child);
    }

    /// Drops the nodes that were [replaced](Self::replaced): no tree in use contains them any more. Never needed for
    /// correctness.
    pub fn drop_replaced(&self) {
        for shard in &self.shards {
            let dropped = shard.lock().take_replaced();
            // Freeing takes longer than a look-up should wait.
            drop(dropped);
        }
    }

    /// Counters, summed over the shards.
    pub fn stats(&self) -> CacheStats {
        let mut stats = CacheStats::default();
        for shard in &self.shards {
            let shard = shard.lock();
            stats.hits += shard.hits;
            stats.misses += shard.misses;
            stats.evictions += shard.evictions;
            stats.nodes += shard.node_count() as u64;
        }
        stats.bytes = stats.nodes * NODE_BYTES as u64;
        stats.damaged = self.damaged();
        stats
    }

    /// Nodes that were read and are not what they should be.
    pub fn damaged(&self) -> u64 {
        self.damaged.load(Ordering::Relaxed)
    }

    /// The volume whose nodes these are.
    pub fn volume_id(&self) -> VolumeId {
        self.volume_id
    }

    /// The root node of `root`, which must not be empty.
    pub(super) fn root_node(&self, root: &TreeRoot, class: IoClass) -> Result<Arc<Node>> {
        self.get_for(root.child_ref(), root.level, class)
    }

    fn shard(&self, block: u64) -> &Mutex<Shard> {
        // The map below uses the low bits and the top seven of the same hash.
        &self.shards[(spread(block) >> 40) as usize % SHARDS]
    }
}

/// Reads and verifies a node, without any cache.
///
/// # Errors
/// [`Error::Io`] when it cannot be read, [`Error::Corrupt`] when it is not what was expected.
pub(super) fn read_node(
    device: &dyn Device,
    total_blocks: u64,
    expected: &Expectation,
    class: IoClass,
) -> Result<Node> {
    let block = expected.child.block;
    if expected.level > MAX_LEVEL {
        return Err(super::inconsistent(block, "level too high"));
    }
    let inside = block.checked_add(NODE_BLOCKS).is_some_and(|end| end <= total_blocks);
    let offset_bytes = block.checked_mul(BLOCK_BYTES_U64).filter(|_| inside && block != 0);
    let Some(offset_bytes) = offset_bytes else {
        return Err(super::inconsistent(block, "outside of the volume"));
    };
    let mut bytes = AlignedBuf::zeroed(NODE_BYTES);
    device.read(offset_bytes, &mut [&mut bytes], class).map_err(Error::from)?;
    Ok(Node::parse(&bytes, expected)?)
}
