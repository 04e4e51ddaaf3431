//! The delta: metadata changes since a checkpoint, as an ordered map of after-images.
//!
//! Pure data, no locks. A value of `None` says that the key is deleted, whatever the trees say.

use crate::format::Key;
use crate::tree::Value;
use std::collections::BTreeMap;
use std::collections::btree_map;
use std::ops::Bound;

/// Bookkeeping cost of an entry besides its value, for the memory accounting.
const ENTRY_BYTES: usize = 96;

/// See the module's head.
#[derive(Debug, Default)]
pub struct Delta {
    entries: BTreeMap<Key, Option<Value>>,
    value_bytes: usize,
}

impl Delta {
    /// Sets `key` to `value`, or deletes it.
    pub fn set(&mut self, key: Key, value: Option<Value>) {
        self.value_bytes += value.as_ref().map_or(0, |value| value.len());
        if let Some(Some(old)) = self.entries.insert(key, value) {
            self.value_bytes -= old.len();
        }
    }

    /// `None`: the delta says nothing; `Some(None)`: deleted.
    pub fn get(&self, key: &Key) -> Option<&Option<Value>> {
        self.entries.get(key)
    }

    /// Entries with `from <= key <= to`, in order.
    pub fn range(&self, from: Key, to: Key) -> btree_map::Range<'_, Key, Option<Value>> {
        if from > to {
            return self.entries.range((Bound::Excluded(Key::MAX), Bound::Unbounded));
        }
        self.entries.range(from..=to)
    }

    /// Keys held.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Nothing changed.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Memory in use, about.
    pub fn memory_bytes(&self) -> usize {
        self.entries.len() * ENTRY_BYTES + self.value_bytes
    }

    /// Upper bound of what the entries add to the trees.
    pub fn stored_bytes(&self) -> usize {
        self.entries.len() * 32 + self.value_bytes
    }

    /// All entries in order.
    pub fn entries(&self) -> btree_map::Iter<'_, Key, Option<Value>> {
        self.entries.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_bytes_follow_replacement_and_deletion() {
        let mut delta = Delta::default();
        delta.set(Key::inode(1), Some(Value::from(vec![0u8; 100])));
        delta.set(Key::inode(1), Some(Value::from(vec![0u8; 10])));
        assert_eq!(delta.value_bytes, 10);
        delta.set(Key::inode(1), None);
        assert_eq!((delta.value_bytes, delta.len()), (0, 1));
        assert_eq!(delta.get(&Key::inode(1)).map(Option::is_none), Some(true));
    }

    #[test]
    fn inverted_range_is_empty() {
        let mut delta = Delta::default();
        delta.set(Key::MAX, None);
        assert_eq!(delta.range(Key::inode(9), Key::inode(3)).count(), 0);
    }
}
