//! New files that were closed before anybody synced them, and are then synced one by one.
//!
//! Whoever unpacks a package or takes in mail writes many files, closes them, and then opens and syncs each: a flush for each, although all of the
//! data is there when the first one is asked for. So where a sync finds its file in this state, it takes others along that were closed
//! unsynced, in that order: into the same frame, behind its own, without waiting for anything ([`Engine::prepare_at_once`]). Their own
//! syncs then find everything durable. (btrfs does so by accident: the first sync commits the whole transaction.)
//!
//! Who does not work like that should not pay. A program that syncs before it closes is never concerned. How many are taken along begins small and
//! doubles only while those taken before are asked for; if few are, nobody is taken along for a while ([`Policy`]).
//! Several programs may be at it at the same time, each at a place of its own. So files are kept by the thread that closed them, and a sync takes
//! along what the same thread has closed.
//!
//! Only new files: where those live need not be looked up. What fails is not reported here: the pages stay dirty, and the file's own sync meets the error.
//!
//! **Invariant:** taking others along changes what is durable early, never what is durable: each is logged as its own sync would log it.
//!
//! Lock: the `state` of a queue is a leaf.

use super::fsync::{MAX_PAYLOAD_PAGES, SyncKind, count_unlogged};
use crate::engine::Engine;
use crate::inode::Inode;
use crate::stats::thread_part;
use crate::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use crate::sync::{Arc, Mutex};
use std::collections::VecDeque;

/// Files taken along the first time, and the most.
const FIRST: usize = 4;
const MOST: usize = 64;
/// Pages taken along at most: 512 KiB.
const MOST_PAGES: usize = 128;
/// So many syncs take nobody along after most of those taken were not asked for.
const REST: u32 = 64;
/// One of so many that were taken along has to be asked for, or it is not worth it: to log a small file costs a seventh of a write and a
/// flush on a fast disk.
const WORTH: usize = 4;
/// What was taken along before the last so many files counts half.
const MEMORY: usize = 8192;
/// Queues; threads share them. Three bits of a [`Mark`].
const QUEUES: usize = 8;

/// What a file's next sync tells; above it the number of its queue.
const NOTHING: u8 = 0;
const CLOSED: u8 = 1;
const TAKEN: u8 = 2;
const WHAT: u8 = 3;

/// Kept with each inode: whether it was closed unsynced, or taken along since, and in which queue it was.
#[derive(Debug, Default)]
pub struct Mark(AtomicU8);

impl Mark {
    /// What it says, and of which queue. It says so once.
    fn take(&self) -> (u8, usize) {
        // Nearly always nothing, which costs no more than a look.
        if self.0.load(Ordering::Relaxed) == NOTHING {
            return (NOTHING, 0);
        }
        let mark = self.0.swap(NOTHING, Ordering::AcqRel);
        (mark & WHAT, usize::from(mark >> 2) % QUEUES)
    }

    /// Says `what` of `queue`. Answers whether it said so before.
    fn set(&self, what: u8, queue: usize) -> bool {
        let mark = what | (queue as u8) << 2;
        self.0.swap(mark, Ordering::AcqRel) & WHAT == what
    }

    fn is_closed(&self) -> bool {
        self.0.load(Ordering::Acquire) & WHAT == CLOSED
    }
}

/// How many files a sync takes along. Pure.
#[derive(Debug, Default)]
struct Policy {
    width: usize,
    /// Files that were taken along, and how many of those were asked for. What was long ago counts less.
    taken: usize,
    hits: usize,
    /// The same since the width has grown.
    new_taken: usize,
    new_hits: usize,
    rest: u32,
}

impl Policy {
    /// A file that was taken along is synced.
    fn hit(&mut self) {
        self.hits += 1;
        self.new_hits += 1;
    }

    /// A file that was closed unsynced is synced, and nobody has taken it along: how many to take.
    fn miss(&mut self) -> usize {
        if self.rest > 0 {
            self.rest -= 1;
            if self.rest == 0 {
                self.forget_half();
            }
            return 0;
        }
        // Several may sync at the same time, and nobody has been asked yet for what the others have just taken.
        let width = self.width.max(FIRST);
        if self.taken > WORTH * (self.hits + width) {
            (self.width, self.rest, self.new_taken, self.new_hits) = (0, REST, 0, 0);
            return 0;
        }
        self.width = width;
        if self.new_taken >= width && self.new_hits * WORTH >= self.new_taken {
            self.width = (width * 2).min(MOST);
            (self.new_taken, self.new_hits) = (0, 0);
        }
        self.width
    }

    /// So many were taken along.
    fn took(&mut self, files: usize) {
        self.taken += files;
        self.new_taken += files;
        if self.taken > MEMORY {
            self.forget_half();
        }
    }

    fn forget_half(&mut self) {
        self.taken /= 2;
        self.hits /= 2;
    }
}

#[derive(Debug, Default)]
struct State {
    /// Numbers of inodes, the oldest first. Some may have been synced or purged meanwhile.
    files: VecDeque<u64>,
    policy: Policy,
}

/// See the module's head.
#[derive(Debug)]
pub struct ClosedFiles {
    queues: [Mutex<State>; QUEUES],
    /// In all queues.
    files: AtomicUsize,
    most_files: usize,
}

impl ClosedFiles {
    /// Remembers at most `most_files`.
    pub fn new(most_files: usize) -> Self {
        Self { queues: Default::default(), files: AtomicUsize::new(0), most_files }
    }

    /// Forgets the oldest of the queue if there are too many.
    fn add(&self, queue: usize, number: u64) {
        let mut state = self.queues[queue].lock();
        let is_full = self.files.load(Ordering::Relaxed) >= self.most_files;
        if !is_full {
            self.files.fetch_add(1, Ordering::Relaxed);
        } else if state.files.pop_front().is_none() {
            return;
        }
        state.files.push_back(number);
    }

    fn next(&self, queue: usize) -> Option<u64> {
        let number = self.queues[queue].lock().files.pop_front()?;
        self.files.fetch_sub(1, Ordering::Relaxed);
        Some(number)
    }

    fn policy<R>(&self, queue: usize, ask: impl FnOnce(&mut Policy) -> R) -> R {
        ask(&mut self.queues[queue].lock().policy)
    }
}

impl Engine {
    /// A handle that may have written to `inode` is gone.
    pub fn note_closed(&self, inode: &Inode) {
        // Clean, or an old file: nothing to take along.
        if !inode.listed.load(Ordering::Acquire) || !is_small_and_new(inode) {
            return;
        }
        let queue = thread_part() % QUEUES;
        if !inode.closed.set(CLOSED, queue) {
            self.closed_files.add(queue, inode.number);
        }
    }

    /// `inode` was brought into the log for somebody who is about to wait for it. Takes others along, if that is what is going on.
    pub fn take_others_along(&self, inode: &Inode) {
        let (what, queue) = inode.closed.take();
        let width = match what {
            CLOSED => self.closed_files.policy(queue, Policy::miss),
            TAKEN => return self.closed_files.policy(queue, Policy::hit),
            _ => return,
        };
        let (mut files, mut pages) = (0, 0);
        while files < width && pages < MOST_PAGES {
            let Some(number) = self.closed_files.next(queue) else { break };
            let Some(other) = self.inodes.peek(number) else { continue };
            if !other.closed.is_closed() || !is_small_and_new(&other) {
                continue;
            }
            pages += unlogged_pages(&other);
            if self.take_along(&other) {
                other.closed.set(TAKEN, queue);
                files += 1;
            }
        }
        if files > 0 {
            self.closed_files.policy(queue, |policy| policy.took(files));
            self.counters.taken_along.add(files as u64);
        }
    }

    /// A sync has found `inode` durable.
    pub fn note_found_durable(&self, inode: &Inode) {
        if let (TAKEN, queue) = inode.closed.take() {
            self.closed_files.policy(queue, Policy::hit);
        }
    }

    fn take_along(&self, inode: &Arc<Inode>) -> bool {
        // An error is met again by who asks for the file.
        matches!(self.prepare_at_once(inode, 0..u64::MAX, SyncKind::Full, false), Ok(Some(_)))
    }
}

/// Fits into a frame, has no block that would have to be looked up, and has a name.
fn is_small_and_new(inode: &Inode) -> bool {
    (1..=MAX_PAYLOAD_PAGES).contains(&unlogged_pages(inode)) && {
        let meta = inode.meta.lock();
        meta.item.blocks == 0 && !meta.orphan && !meta.purged
    }
}

/// Dirty pages that the log does not have; of many, more than fit into a frame.
fn unlogged_pages(inode: &Inode) -> usize {
    count_unlogged(inode, &(0..u64::MAX), MAX_PAYLOAD_PAGES)
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    /// A sync that takes along what the policy says, and there is.
    fn sync(policy: &mut Policy) -> usize {
        let width = policy.miss();
        policy.took(width);
        width
    }

    #[test]
    fn as_many_are_taken_along_as_those_before_deserve() {
        let mut policy = Policy::default();
        let mut widths = Vec::new();
        for _ in 0..8 {
            let width = sync(&mut policy);
            widths.push(width);
            (0..width).for_each(|_| policy.hit());
        }
        assert_eq!(widths, [4, 8, 16, 32, 64, 64, 64, 64]);
        for _ in 0..1000 {
            assert_eq!(sync(&mut policy), MOST, "and so on for ever");
            (0..MOST).for_each(|_| policy.hit());
        }
    }

    #[test]
    fn syncs_at_the_same_time_do_not_take_each_other_for_refusals() {
        for callers in [2, 4, 16] {
            let mut policy = Policy::default();
            let mut last = Vec::new();
            for _ in 0..40 {
                last = (0..callers).map(|_| sync(&mut policy)).collect();
                (0..last.iter().sum()).for_each(|_| policy.hit());
            }
            assert_eq!(last, vec![MOST; callers]);
        }
    }

    #[test]
    fn who_is_not_asked_for_what_it_took_takes_next_to_nothing() {
        for hits_of_ten in 0..2 {
            let mut policy = Policy::default();
            let (mut taken, mut open, syncs) = (0, 0, 10_000);
            for _ in 0..syncs {
                let width = sync(&mut policy);
                (taken, open) = (taken + width, open + width * hits_of_ten);
                while open >= 10 {
                    policy.hit();
                    open -= 10;
                }
            }
            assert!(
                taken * 2 < syncs,
                "{taken} taken along by {syncs} syncs, {hits_of_ten} of ten asked for"
            );
        }
    }
}
