//! One shard of the node cache: a map and the S3-FIFO eviction policy. Pure: no locks, no I/O.
//!
//! A node enters through the *small* queue (a tenth of the shard); if nobody asked for it again by
//! the time it reaches the end, it leaves, and only its block number is remembered for a while
//! (*ghost*). A node that was asked for, or comes back while remembered, and every interior node,
//! goes to the *main* queue, where each use (up to three) buys another round. So a scan passes
//! through a tenth of the shard and disturbs nothing. The policy depends on nothing but the order
//! of calls.
//!
//! Queue elements carry a ticket; an element whose ticket is not that of the map's entry is dead
//! (its node was forgotten) and is skipped.

use crate::format::node::{ChildRef, Node};
use crate::number_map::NumberMap;
use crate::sync::Arc;
use std::collections::VecDeque;

/// Uses that a node can save up.
const MAX_FREQUENCY: u8 = 3;
/// The small queue's part of the shard.
const SMALL_PART: usize = 10;

struct Entry {
    node: Arc<Node>,
    checksum: u32,
    frequency: u8,
    in_main: bool,
    ticket: u64,
}

/// A queue element: block and ticket.
type Queued = (u64, u64);

/// See the module's head.
#[derive(Default)]
pub(super) struct Shard {
    map: NumberMap<Entry>,
    small: VecDeque<Queued>,
    small_live: usize,
    main: VecDeque<Queued>,
    ghost: VecDeque<Queued>,
    ghost_map: NumberMap<u64>,
    next_ticket: u64,
    capacity_nodes: usize,
    pub(super) hits: u64,
    pub(super) misses: u64,
    pub(super) evictions: u64,
}

impl Shard {
    /// The cached node that is exactly this one. A node of the same place with another checksum is
    /// an older or newer one, and does not count.
    pub(super) fn get(&mut self, child: ChildRef) -> Option<Arc<Node>> {
        if let Some(entry) = self.map.get_mut(&child.block)
            && entry.checksum == child.checksum
        {
            if entry.frequency < MAX_FREQUENCY {
                entry.frequency += 1;
            }
            self.hits += 1;
            return Some(Arc::clone(&entry.node));
        }
        self.misses += 1;
        None
    }

    /// Adds `node`, in place of any other node of its block, and evicts what is too much.
    pub(super) fn insert(&mut self, node: Arc<Node>) {
        let block = node.block();
        let checksum = node.checksum();
        if let Some(entry) = self.map.get_mut(&block) {
            entry.node = node;
            entry.checksum = checksum;
            return;
        }
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let in_main = self.ghost_map.remove(&block).is_some() || node.level() > 0;
        self.map.insert(block, Entry { node, checksum, frequency: 0, in_main, ticket });
        if in_main {
            self.main.push_back((block, ticket));
        } else {
            self.small.push_back((block, ticket));
            self.small_live += 1;
        }
        self.shrink();
    }

    /// Drops the node, if it is cached.
    pub(super) fn forget(&mut self, child: ChildRef) {
        if self.map.get(&child.block).is_some_and(|entry| entry.checksum == child.checksum)
            && let Some(entry) = self.map.remove(&child.block)
        {
            self.small_live -= usize::from(!entry.in_main);
            self.drop_dead_elements();
        }
    }

    pub(super) fn node_count(&self) -> usize {
        self.map.len()
    }

    pub(super) fn set_capacity(&mut self, capacity_nodes: usize) {
        self.capacity_nodes = capacity_nodes;
        self.shrink();
    }

    fn shrink(&mut self) {
        while self.map.len() > self.capacity_nodes {
            let small_limit = (self.capacity_nodes / SMALL_PART).max(1);
            let main_live = self.map.len() - self.small_live;
            if self.small_live > small_limit || main_live == 0 {
                self.advance_small();
            } else {
                self.advance_main();
            }
        }
    }

    /// Moves the oldest node of the small queue to the main queue, or out.
    fn advance_small(&mut self) {
        let Some((block, ticket)) = self.small.pop_front() else { return };
        let Some(entry) = self.map.get_mut(&block).filter(|entry| entry.ticket == ticket) else {
            return;
        };
        self.small_live -= 1;
        if entry.frequency > 0 {
            entry.frequency = 0;
            entry.in_main = true;
            self.main.push_back((block, ticket));
        } else {
            self.evict(block);
            self.remember(block, ticket);
        }
    }

    /// Gives the oldest node of the main queue another round, or evicts it.
    fn advance_main(&mut self) {
        let Some((block, ticket)) = self.main.pop_front() else { return };
        let Some(entry) = self.map.get_mut(&block).filter(|entry| entry.ticket == ticket) else {
            return;
        };
        if entry.frequency > 0 {
            entry.frequency -= 1;
            self.main.push_back((block, ticket));
        } else {
            self.evict(block);
        }
    }

    fn evict(&mut self, block: u64) {
        self.map.remove(&block);
        self.evictions += 1;
    }

    fn remember(&mut self, block: u64, ticket: u64) {
        self.ghost.push_back((block, ticket));
        self.ghost_map.insert(block, ticket);
        while self.ghost.len() > self.capacity_nodes {
            if let Some((oldest, ticket)) = self.ghost.pop_front()
                && self.ghost_map.get(&oldest) == Some(&ticket)
            {
                self.ghost_map.remove(&oldest);
            }
        }
    }

    /// Keeps the queues proportional to the map although forgetting leaves dead elements.
    fn drop_dead_elements(&mut self) {
        if self.small.len() + self.main.len() > 2 * self.map.len() + 64 {
            let map = &self.map;
            let is_live =
                |(block, ticket): &Queued| map.get(block).is_some_and(|e| e.ticket == *ticket);
            self.small.retain(is_live);
            self.main.retain(is_live);
        }
    }

    #[cfg(test)]
    pub(super) fn queue_lengths(&self) -> (usize, usize, usize) {
        (self.small.len(), self.main.len(), self.ghost.len())
    }
}
