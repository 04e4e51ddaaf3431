//! New files that were closed before anybody synced them, and are then synced one by one.
//!
//! Whoever unpacks a package or takes in mail writes many files, closes them, and then opens and syncs each: a flush for each, although all of the
//! data is there when the first one is asked for. So where a sync finds its file in this state, it takes others along that were closed
//! unsynced, in that order: into the same frame, behind its own, without waiting for anything ([`Engine::prepare_at_once`]). Their own
//! syncs then find everything durable. (btrfs does so by accident: the first sync commits the whole transaction.)
//!
//! Who does not work like that should not pay. A program that syncs before it closes is never concerned. How many are taken along begins small and
//! doubles only while those taken before are asked for; if few are, nobody is taken along for a while ([`Policy`]).
//!
//! Only new files: where those live need not be looked up. What fails is not reported here: the pages stay dirty, and the file's own sync meets the error.
//!
//! **Invariant:** taking others along changes what is durable early, never what is durable: each is logged as its own sync would log it.
//!
//! Lock: `state` is a leaf.

use super::fsync::{MAX_PAYLOAD_PAGES, SyncKind, count_unlogged};
use crate::engine::Engine;
use crate::inode::Inode;
use crate::sync::atomic::{AtomicU8, Ordering};
use crate::sync::{Arc, Mutex};
use std::collections::VecDeque;

/// Files taken along the first time, and the most.
const FIRST: usize = 4;
const MOST: usize = 64;
/// Pages taken along at most: 512 KiB.
const MOST_PAGES: usize = 128;
/// So many syncs take nobody along after most of those taken were not asked for.
const REST: u32 = 32;
/// Files that are remembered; the oldest are forgotten first.
const MOST_FILES: usize = 8192;

/// What a file's next sync tells.
const NOTHING: u8 = 0;
const CLOSED: u8 = 1;
const TAKEN: u8 = 2;

/// Kept with each inode: whether it was closed unsynced, or taken along since.
#[derive(Debug, Default)]
pub struct Mark(AtomicU8);

impl Mark {
    /// What it says, once.
    fn take(&self) -> u8 {
        // Nearly always nothing, which costs no more than a look.
        if self.0.load(Ordering::Relaxed) == NOTHING {
            return NOTHING;
        }
        self.0.swap(NOTHING, Ordering::AcqRel)
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
        if self.taken > 2 * (self.hits + width) {
            (self.width, self.rest, self.new_taken, self.new_hits) = (0, REST, 0, 0);
            return 0;
        }
        self.width = width;
        if self.new_taken >= width && self.new_hits * 2 >= self.new_taken {
            self.width = (width * 2).min(MOST);
            (self.new_taken, self.new_hits) = (0, 0);
        }
        self.width
    }

    /// So many were taken along.
    fn took(&mut self, files: usize) {
        self.taken += files;
        self.new_taken += files;
        if self.taken > MOST_FILES {
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
#[derive(Debug, Default)]
pub struct ClosedFiles {
    state: Mutex<State>,
}

impl ClosedFiles {
    fn add(&self, number: u64) {
        let mut state = self.state.lock();
        if state.files.len() >= MOST_FILES {
            state.files.pop_front();
        }
        state.files.push_back(number);
    }

    fn next(&self) -> Option<u64> {
        self.state.lock().files.pop_front()
    }
}

impl Engine {
    /// A handle that may have written to `inode` is gone.
    pub fn note_closed(&self, inode: &Inode) {
        // Clean, or an old file: nothing to take along.
        if !inode.listed.load(Ordering::Acquire) || !is_small_and_new(inode) {
            return;
        }
        if inode.closed.0.swap(CLOSED, Ordering::AcqRel) != CLOSED {
            self.closed_files.add(inode.number);
        }
    }

    /// `inode` was brought into the log for somebody who is about to wait for it. Takes others along, if that is what is going on.
    pub fn take_others_along(&self, inode: &Inode) {
        let width = match inode.closed.take() {
            CLOSED => self.closed_files.state.lock().policy.miss(),
            TAKEN => {
                self.closed_files.state.lock().policy.hit();
                return;
            }
            _ => return,
        };
        let (mut files, mut pages) = (0, 0);
        while files < width && pages < MOST_PAGES {
            let Some(number) = self.closed_files.next() else { break };
            let Some(other) = self.inodes.peek(number) else { continue };
            if other.closed.0.load(Ordering::Acquire) != CLOSED || !is_small_and_new(&other) {
                continue;
            }
            pages += unlogged_pages(&other);
            if self.take_along(&other) {
                other.closed.0.store(TAKEN, Ordering::Release);
                files += 1;
            }
        }
        if files > 0 {
            self.closed_files.state.lock().policy.took(files);
            self.counters.taken_along.add(files as u64);
        }
    }

    /// A sync has found `inode` durable.
    pub fn note_found_durable(&self, inode: &Inode) {
        if inode.closed.take() == TAKEN {
            self.closed_files.state.lock().policy.hit();
        }
    }

    fn take_along(&self, inode: &Arc<Inode>) -> bool {
        // An error is met again by who asks for the file.
        matches!(self.prepare_at_once(inode, 0..u64::MAX, SyncKind::Full), Ok(Some(_)))
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
        for hits_of_ten in 0..4 {
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
