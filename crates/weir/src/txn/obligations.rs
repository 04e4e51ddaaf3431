//! Which operations' payload pages are still needed in the log: pages that are logged and not home. Replay must start no
//! later than the oldest of them.
//!
//! **Invariant:** pages are added within the commit that logs them, and released after the commit that says that they
//! are home or gone. So the oldest one seen by a freeze is right for the checkpoint of that freeze.
//!
//! **Invariant:** who keeps pages in the log that nobody else can bring home, or has brought them home and not told yet, says so
//! ([`Obligations::begin_change`]) until that is over, and needs no room in the log for that: others do not take the log for full for good
//! meanwhile.
//!
//! Locks: its own, a leaf.

use crate::log::Lsn;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};
use std::collections::{BTreeMap, HashSet};

/// What an operation's payload is needed for.
struct Owed {
    pages: u64,
    /// Whose pages these are, if they are of one inode.
    inode: Option<u64>,
}

/// See the module's head.
#[derive(Default)]
pub struct Obligations {
    held: Mutex<BTreeMap<Lsn, Owed>>,
    /// Of those that are about to change what is held.
    changing: AtomicU64,
}

/// What is held is about to change, as long as it lives.
pub struct Changing<'a>(&'a Obligations);

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.0.changing.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Obligations {
    /// `pages` more depend on the payload of operation `lsn`; `inode`: whose they are, if of one.
    pub(crate) fn add(&self, lsn: Lsn, pages: u64, inode: Option<u64>) {
        let mut held = self.held.lock();
        let owed = held.entry(lsn).or_insert(Owed { pages: 0, inode });
        owed.pages += pages;
        if owed.inode != inode {
            owed.inode = None;
        }
    }

    /// One page of operation `lsn` went home, or is not wanted any more.
    pub fn release(&self, lsn: Lsn) {
        self.release_all(&[lsn]);
    }

    /// The same for a page of each of `lsns`.
    pub fn release_all(&self, lsns: &[Lsn]) {
        if lsns.is_empty() {
            return;
        }
        let mut held = self.held.lock();
        for lsn in lsns {
            if let Some(owed) = held.get_mut(lsn) {
                owed.pages -= 1;
                if owed.pages == 0 {
                    held.remove(lsn);
                }
            } else {
                debug_assert!(false, "released payload {lsn} that nothing depends on");
            }
        }
    }

    /// Pages are about to be brought home by the caller, or he is about to tell of some that are. He waits for no room in the log until then.
    pub fn begin_change(&self) -> Changing<'_> {
        self.changing.fetch_add(1, Ordering::SeqCst);
        Changing(self)
    }

    /// Somebody has begun a change that has not ended.
    pub fn are_changing(&self) -> bool {
        self.changing.load(Ordering::SeqCst) > 0
    }

    /// The oldest operation whose payload is needed.
    pub fn oldest(&self) -> Option<Lsn> {
        self.held.lock().first_key_value().map(|(lsn, _)| *lsn)
    }

    /// Inodes with pages that depend on operations up to `lsn`: those of the `limit` oldest operations, each once. Leaves
    /// out operations on pages of several inodes.
    pub fn inodes_up_to(&self, lsn: Lsn, limit: usize) -> Vec<u64> {
        let oldest = |held: &BTreeMap<Lsn, Owed>| -> Vec<u64> {
            held.range(..=lsn).take(limit).filter_map(|(_, owed)| owed.inode).collect()
        };
        // Every commit with payload needs the lock: what takes longer is done without.
        let mut inodes = oldest(&self.held.lock());
        let mut seen = HashSet::new();
        inodes.retain(|inode| seen.insert(*inode));
        inodes
    }

    /// Pages of the log that are not home.
    pub fn pages(&self) -> u64 {
        self.held.lock().values().map(|owed| owed.pages).sum()
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_come_first_and_what_is_released_is_forgotten() {
        let held = Obligations::default();
        for (lsn, inode) in [(5, 50), (3, 30), (9, 30), (7, 70)] {
            held.add(lsn, 2, Some(inode));
        }
        assert_eq!((held.oldest(), held.pages()), (Some(3), 8));
        assert_eq!(held.inodes_up_to(9, 10), [30, 50, 70]);
        assert_eq!(held.inodes_up_to(6, 10), [30, 50]);
        assert_eq!(held.inodes_up_to(9, 1), [30]);
        held.release(3);
        held.release(3);
        assert_eq!((held.oldest(), held.inodes_up_to(9, 10)), (Some(5), vec![50, 70, 30]));
    }

    #[test]
    fn pages_of_several_inodes_belong_to_none() {
        let held = Obligations::default();
        held.add(1, 1, Some(10));
        held.add(1, 1, Some(11));
        held.add(2, 3, None);
        assert!(held.inodes_up_to(2, 10).is_empty());
        assert_eq!((held.oldest(), held.pages()), (Some(1), 5));
    }
}
