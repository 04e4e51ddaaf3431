//! Statistics that are read page by page: the pages of one reader are of one moment.

use std::collections::VecDeque;
use std::sync::Arc;

/// Statistics kept for readers that come back for the next page.
const MAX_SNAPSHOTS: usize = 16;

/// Statistics being read, by number.
#[derive(Default)]
pub(super) struct Snapshots {
    texts: VecDeque<(u64, Arc<[u8]>)>,
    last: u64,
}

impl Snapshots {
    /// Keeps one more, and forgets the oldest; its number and itself.
    pub(super) fn keep(&mut self, text: Vec<u8>) -> (u64, Arc<[u8]>) {
        self.last += 1;
        self.texts.push_back((self.last, text.into()));
        if self.texts.len() > MAX_SNAPSHOTS {
            self.texts.pop_front();
        }
        self.texts[self.texts.len() - 1].clone()
    }
    /// The one of this number, if it is not forgotten.
    pub(super) fn find(&self, number: u64) -> Option<(u64, Arc<[u8]>)> {
        self.texts.iter().find(|(found, _)| *found == number).cloned()
    }
}
