//! The list of inodes with something to write: dirty pages, or attributes that the log does not have. What is on it stays in memory, and
//! is what writeback, checkpoints and syncs of the whole volume go through: a dirty inode that is missing is lost when the volume is closed.
//!
//! Whoever makes an inode dirty adds it *afterwards*, often without a lock, because it is on the list already as a rule
//! (`Inode::listed`). Whoever has made it clean has it looked at and removed under the list's lock.
//!
//! **Invariant:** while nobody holds the list's lock, `Inode::listed` says whether the inode is on the list; under it, it may say no
//! where the answer is yes, which sends whoever asks to the lock.
//!
//! Lock order: the list, then an inode's `pages` and `meta`.

use crate::inode::Inode;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Arc, Mutex};
use crate::types::FileType;
use std::collections::BTreeMap;

/// See the module's head.
#[derive(Default)]
pub struct DirtyList {
    list: Mutex<BTreeMap<u64, Listed>>,
    next: AtomicU64,
    /// How often somebody has looked for old ones.
    round: AtomicU64,
}

/// An entry of the list, and the round in which it came, or was last found old.
struct Listed {
    inode: Arc<Inode>,
    since_round: u64,
}

impl DirtyList {
    /// Puts `inode` on the list.
    pub fn add(&self, inode: &Arc<Inode>) {
        if inode.listed.load(Ordering::Acquire) {
            return;
        }
        let since_round = self.round.load(Ordering::Relaxed);
        let mut list = self.list.lock();
        inode.listed.store(true, Ordering::Release);
        match list.get(&inode.number) {
            Some(listed) if Arc::ptr_eq(&listed.inode, inode) => {}
            _ => {
                list.insert(inode.number, Listed { inode: inode.clone(), since_round });
            }
        }
    }

    /// Takes `inode` off the list if it is clean.
    pub fn remove_if_clean(&self, inode: &Inode) {
        let mut list = self.list.lock();
        // First take it off, then look: a writer that dirties it in between finds it unlisted and
        // waits for the list lock to list it again.
        inode.listed.store(false, Ordering::SeqCst);
        let is_clean = {
            let pages = inode.pages.read();
            pages.counts().dirty == 0 && pages.counts().writeback == 0
        } && {
            // A hole may have taken the last dirty pages and left a size that the log does not have.
            let meta = inode.meta.lock();
            let size_logged = meta.item.size == inode.size();
            !meta.dirty && (size_logged || inode.file_type != FileType::Regular)
        };
        let is_listed = list
            .get(&inode.number)
            .is_some_and(|listed| std::ptr::eq(Arc::as_ptr(&listed.inode), inode));
        if is_listed && is_clean {
            list.remove(&inode.number);
        } else {
            // Dirty and not on it: whoever made it so is about to put it there, and must not find that done.
            inode.listed.store(is_listed, Ordering::SeqCst);
        }
    }

    /// Takes `inode` off the list: it is purged.
    pub fn remove(&self, inode: &Inode) {
        let mut list = self.list.lock();
        inode.listed.store(false, Ordering::SeqCst);
        list.remove(&inode.number);
    }

    /// Up to `limit` inodes, continuing where the last call ended.
    pub fn next_batch(&self, limit: usize) -> Vec<Arc<Inode>> {
        self.next_batch_of(limit, limit, |_| true).0
    }

    /// Up to `limit` inodes that are `wanted`, among at most the next `looks`, continuing where the last call ended; and how
    /// many were looked at. `wanted` runs under the list's lock: it must not wait.
    pub fn next_batch_of(
        &self,
        limit: usize,
        looks: usize,
        wanted: impl Fn(&Inode) -> bool,
    ) -> (Vec<Arc<Inode>>, usize) {
        let list = self.list.lock();
        let mut from = self.next.load(Ordering::Relaxed);
        let mut batch = Vec::new();
        let mut looked = 0;
        for (number, listed) in list.range(from..).chain(list.range(..from)).take(looks) {
            looked += 1;
            from = number.wrapping_add(1);
            if wanted(&listed.inode) {
                batch.push(listed.inode.clone());
            }
            if batch.len() >= limit {
                break;
            }
        }
        self.next.store(from, Ordering::Relaxed);
        (batch, looked)
    }

    /// Those of `numbers` that are on the list, in that order.
    pub fn find(&self, numbers: &[u64]) -> Vec<Arc<Inode>> {
        let list = self.list.lock();
        numbers.iter().filter_map(|number| Some(list.get(number)?.inode.clone())).collect()
    }

    /// Begins a round. Answers what has been listed for `rounds` without a break, or for as long since it was last answered.
    pub fn begin_round(&self, rounds: u64) -> Vec<Arc<Inode>> {
        let round = self.round.fetch_add(1, Ordering::Relaxed) + 1;
        let mut list = self.list.lock();
        let old = list.values_mut().filter(|listed| listed.since_round + rounds <= round);
        old.map(|listed| {
            listed.since_round = round;
            listed.inode.clone()
        })
        .collect()
    }

    /// All of them.
    pub fn all(&self) -> Vec<Arc<Inode>> {
        self.list.lock().values().map(|listed| listed.inode.clone()).collect()
    }

    /// How many.
    pub fn count(&self) -> usize {
        self.list.lock().len()
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::inode::for_tests::{inode, item};

    fn numbered(numbers: impl IntoIterator<Item = u64>) -> (DirtyList, Vec<Arc<Inode>>) {
        let list = DirtyList::default();
        let inodes: Vec<_> =
            numbers.into_iter().map(|number| Arc::new(Inode::new(number, item(1)))).collect();
        for inode in &inodes {
            list.add(inode);
        }
        (list, inodes)
    }

    fn numbers(inodes: &[Arc<Inode>]) -> Vec<u64> {
        inodes.iter().map(|inode| inode.number).collect()
    }

    #[test]
    fn batches_go_round_the_list_and_leave_nobody_out() {
        let (list, _inodes) = numbered([3, 5, 8]);
        let next = |limit| numbers(&list.next_batch(limit));
        assert_eq!([next(2), next(2), next(3)], [vec![3, 5], vec![8, 3], vec![5, 8, 3]]);
        // Nobody twice, however many there may be.
        assert_eq!(next(10), [5, 8, 3]);
        let (batch, looked) = list.next_batch_of(1, 10, |inode| inode.number == 3);
        assert_eq!((numbers(&batch), looked), (vec![3], 3));
        let (batch, looked) = list.next_batch_of(1, 2, |inode| inode.number == 3);
        assert_eq!((numbers(&batch), looked), (vec![], 2));
        assert_eq!(numbers(&list.find(&[8, 4, 3])), [8, 3]);
    }

    #[test]
    fn what_is_old_is_answered_once_in_so_many_rounds() {
        let (list, _inodes) = numbered([3]);
        let mut answered = Vec::new();
        for round in 1..=7 {
            if round == 3 {
                list.add(&Arc::new(Inode::new(4, item(1))));
            }
            answered.push(numbers(&list.begin_round(3)));
        }
        assert_eq!(answered, [vec![], vec![], vec![3], vec![], vec![4], vec![3], vec![]]);
    }

    #[test]
    fn a_size_that_the_log_does_not_have_keeps_a_file_on_the_list() {
        let (list, inodes) = numbered([3]);
        inodes[0].meta.lock().item.size = 5;
        list.remove_if_clean(&inodes[0]);
        assert_eq!(list.count(), 1);
        inodes[0].meta.lock().item.size = 0;
        list.remove_if_clean(&inodes[0]);
        assert_eq!(list.count(), 0);
    }

    #[test]
    fn an_inode_that_comes_back_under_its_number_is_listed_as_what_it_is_now() {
        let (list, inodes) = numbered([3]);
        let again = Arc::new(Inode::new(3, item(1)));
        list.add(&again);
        assert!(Arc::ptr_eq(&list.find(&[3])[0], &again));
        // The one before is nobody's to take off.
        list.remove_if_clean(&inodes[0]);
        assert!(list.count() == 1 && !inodes[0].listed.load(Ordering::Acquire));
        list.remove(&again);
        assert!(list.count() == 0 && !again.listed.load(Ordering::Acquire));
    }

    #[test]
    fn an_inode_that_somebody_else_finds_dirty_is_listed_by_who_made_it_so() {
        let (list, inode) = (DirtyList::default(), inode());
        list.add(&inode);
        list.remove_if_clean(&inode);
        assert_eq!(list.count(), 0, "it is clean");
        // Somebody writes, another's writeback ends, and only then the writer lists the file.
        inode.meta.lock().dirty = true;
        list.remove_if_clean(&inode);
        list.add(&inode);
        assert_eq!(list.count(), 1);
        list.remove_if_clean(&inode);
        assert_eq!(list.count(), 1, "it is dirty");
        inode.meta.lock().dirty = false;
        list.remove_if_clean(&inode);
        assert_eq!(list.count(), 0);
    }
}
