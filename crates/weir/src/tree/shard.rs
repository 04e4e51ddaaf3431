//! One shard of the node cache: a map and the S3-FIFO eviction policy. Pure: no locks, no I/O.
//!
//! A node enters through the *small* queue (a tenth of the shard); if nobody asked for it again by
//! the time it reaches the end, it leaves, and only its block number is remembered for a while
//! (*ghost*). A node that was asked for, or comes back while remembered, and every interior node,
//! goes to the *main* queue, where each use (up to three) buys another round. So a scan passes
//! through a tenth of the shard and disturbs nothing. The policy depends on nothing but the order
//! of calls.
//!
//! Trees are copied on write, so a leaf that changes again and again is another node of another place each time, which
//! nobody has asked for before: whoever writes it says that it is *hot*, and it enters the main queue. The one that it replaces goes to
//! the *replaced* queue, whose nodes leave before those of the main queue.
//!
//! Queue elements carry a ticket; an element whose ticket is not that of the map's entry is dead
//! (its node moved to another queue, or gave its place to another) and is skipped.

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
    queue: Queue,
    ticket: u64,
}

/// Where an entry is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Queue {
    Small,
    Main,
    Replaced,
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
    replaced: VecDeque<Queued>,
    replaced_live: usize,
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

    /// Adds `node`, in place of an older node of its block, and evicts what is too much. (Who has looked into an older tree, and waited
    /// for the disk until its place was used again, comes with what nobody else asks for.)
    pub(super) fn insert(&mut self, node: Arc<Node>, is_hot: bool) {
        let block = node.block();
        let checksum = node.checksum();
        let is_older = |there: &Entry| there.node.generation() > node.generation();
        if self.map.get(&block).is_some_and(is_older) {
            return;
        }
        if let Some(entry) = self.map.get_mut(&block)
            && (entry.queue == Queue::Main || entry.queue == Queue::Small && !is_hot)
        {
            entry.node = node;
            entry.checksum = checksum;
            return;
        }
        self.remove(block);
        let came_back = self.ghost_map.remove(&block).is_some();
        let is_main = is_hot || came_back || node.level() > 0;
        let queue = if is_main { Queue::Main } else { Queue::Small };
        self.map.insert(block, Entry { node, checksum, frequency: 0, queue, ticket: 0 });
        self.enqueue(block, queue);
        self.shrink();
    }

    /// Puts an entry into a queue; it is in none.
    fn enqueue(&mut self, block: u64, queue: Queue) {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let Some(entry) = self.map.get_mut(&block) else { return };
        (entry.queue, entry.ticket) = (queue, ticket);
        match queue {
            Queue::Small => {
                self.small.push_back((block, ticket));
                self.small_live += 1;
            }
            Queue::Main => self.main.push_back((block, ticket)),
            Queue::Replaced => {
                self.replaced.push_back((block, ticket));
                self.replaced_live += 1;
            }
        }
    }

    /// An entry leaves its queue.
    fn dequeued(&mut self, queue: Queue) {
        match queue {
            Queue::Small => self.small_live -= 1,
            Queue::Main => {}
            Queue::Replaced => self.replaced_live -= 1,
        }
    }

    fn remove(&mut self, block: u64) -> Option<Arc<Node>> {
        let entry = self.map.remove(&block)?;
        self.dequeued(entry.queue);
        Some(entry.node)
    }

    /// The node is not part of the tree that is being made.
    pub(super) fn replaced(&mut self, child: ChildRef) {
        let Some(entry) = self.map.get(&child.block) else { return };
        if entry.checksum == child.checksum && entry.queue != Queue::Replaced {
            self.dequeued(entry.queue);
            self.enqueue(child.block, Queue::Replaced);
            self.drop_dead_elements();
        }
    }

    /// Takes all replaced nodes out.
    pub(super) fn take_replaced(&mut self) -> Vec<Arc<Node>> {
        let replaced = std::mem::take(&mut self.replaced);
        let mut taken = Vec::with_capacity(self.replaced_live);
        for (block, ticket) in replaced {
            if self.map.get(&block).is_some_and(|entry| entry.ticket == ticket) {
                taken.extend(self.remove(block));
            }
        }
        self.drop_dead_elements();
        taken
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
            let main_live = self.map.len() - self.small_live - self.replaced_live;
            if self.small_live > small_limit {
                self.advance_small();
            } else if self.replaced_live > 0 {
                self.advance_replaced();
            } else if main_live == 0 {
                self.advance_small();
            } else {
                self.advance_main();
            }
        }
    }

    /// The oldest node of the replaced queue leaves.
    fn advance_replaced(&mut self) {
        let Some((block, ticket)) = self.replaced.pop_front() else { return };
        if self.map.get(&block).is_some_and(|entry| entry.ticket == ticket) {
            self.evict(block);
        }
    }

    /// Moves the oldest node of the small queue to the main queue, or out.
    fn advance_small(&mut self) {
        let Some((block, ticket)) = self.small.pop_front() else { return };
        let Some(entry) = self.map.get_mut(&block).filter(|entry| entry.ticket == ticket) else {
            return;
        };
        if entry.frequency > 0 {
            entry.frequency = 0;
            self.dequeued(Queue::Small);
            self.enqueue(block, Queue::Main);
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
        self.remove(block);
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

    /// Keeps the queues proportional to the map although nodes move between them.
    fn drop_dead_elements(&mut self) {
        let queues = [&mut self.small, &mut self.main, &mut self.replaced];
        let elements: usize = queues.iter().map(|queue| queue.len()).sum();
        if elements > 2 * self.map.len() + 64 {
            let map = &self.map;
            let is_live =
                |(block, ticket): &Queued| map.get(block).is_some_and(|e| e.ticket == *ticket);
            for queue in queues {
                queue.retain(is_live);
            }
        }
    }

    #[cfg(test)]
    pub(super) fn queue_lengths(&self) -> (usize, usize, usize) {
        (self.small.len(), self.main.len() + self.replaced.len(), self.ghost.len())
    }
}
