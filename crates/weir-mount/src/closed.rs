//! New files that were closed and lie in memory only.
//!
//! Whoever unpacks, copies or builds makes files, writes them once and closes them; what makes all of it durable comes at the end, if at
//! all. Left alone, the data would wait in memory for that end, or for some seconds. So all but the newest (of [`KEEP_FILES`] files, and
//! [`KEEP_BYTES`]) is handed to background writeback, which joins the files of a batch: the disk works while the program does, and a sync
//! finds little left to do. The newest is kept because temporary files, which are few, live for a moment only.
//!
//! What was synced before the close is durable in the log already, and not written a second time for nothing.
//!
//! Lock: `queue` is a leaf.

use std::collections::VecDeque;

use weir::sync::Mutex;

/// Data that is kept in memory.
const KEEP_BYTES: u64 = 4 << 20;
/// Files that are kept in memory.
const KEEP_FILES: usize = 256;

/// Files by number, the oldest first. Pure.
#[derive(Debug, Default)]
struct Queue {
    files: VecDeque<(u64, u64)>,
    bytes: u64,
}

impl Queue {
    fn push(&mut self, ino: u64, bytes: u64) {
        self.files.push_back((ino, bytes));
        self.bytes = self.bytes.saturating_add(bytes);
    }

    /// The oldest, if there are more than are kept.
    fn pop(&mut self) -> Option<u64> {
        if self.bytes <= KEEP_BYTES && self.files.len() <= KEEP_FILES {
            return None;
        }
        let (ino, bytes) = self.files.pop_front()?;
        self.bytes = self.bytes.saturating_sub(bytes);
        Some(ino)
    }
}

/// See the module's head.
#[derive(Debug, Default)]
pub struct Closed {
    queue: Mutex<Queue>,
}

impl Closed {
    /// File `ino` was closed with so many bytes of data that no sync has met. Answers the files that are old enough by now.
    pub fn add(&self, ino: u64, bytes: u64) -> Vec<u64> {
        let mut queue = self.queue.lock();
        queue.push(ino, bytes);
        std::iter::from_fn(|| queue.pop()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_are_kept_and_the_others_come_out_oldest_first() {
        let closed = Closed::default();
        let half = KEEP_BYTES / 2;
        assert!(closed.add(1, half).is_empty());
        assert!(closed.add(2, half).is_empty());
        assert_eq!(closed.add(3, 1), [1]);
        assert!(closed.add(4, half - 1).is_empty());
        assert_eq!(closed.add(5, 10 * KEEP_BYTES), [2, 3, 4, 5]);
        assert_eq!(closed.queue.lock().bytes, 0);
    }

    #[test]
    fn of_tiny_files_only_so_many_are_kept() {
        let closed = Closed::default();
        let keep = KEEP_FILES as u64;
        assert!((0..keep).all(|ino| closed.add(ino, 1).is_empty()));
        assert!((keep..3 * keep).all(|ino| closed.add(ino, 1) == [ino - keep]));
    }
}
