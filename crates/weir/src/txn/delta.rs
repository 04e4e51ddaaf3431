//! The delta: metadata changes since a checkpoint, as an ordered map of after-images.
//!
//! Pure data, no locks. A value of `None` says that the key is deleted, whatever the trees say.

use crate::format::{Key, Kind};
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
    names: NameFilter,
}

/// Which buckets of directory entries (those that share a hash but for its low byte) have any: says sometimes yes where
/// there are none. Whether a new name is free is asked all the time; in a large map the answer costs many cache misses, here one.
#[derive(Debug, Default)]
struct NameFilter {
    /// Empty as long as the map is small.
    bits: Box<[u64]>,
}

/// Entries that share a bucket: what [`crate::namespace::entry`] searches.
const BUCKET_SHIFT: u32 = 8;
/// Entries from which on there is a filter.
const FILTER_FROM: usize = 4096;
/// 128 KiB: with 200,000 names one look-up in six is not spared.
const FILTER_BITS: u32 = 20;

/// The same for all entries that share a bucket; its high bits are spread well.
pub(super) fn name_bucket_hash(key: &Key) -> u64 {
    let mixed = key.inode.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (key.offset >> BUCKET_SHIFT);
    mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The two keys are of one bucket of directory entries.
pub(super) fn is_one_bucket(from: &Key, to: &Key) -> bool {
    from.kind == Kind::Dirent
        && (from.inode, from.kind) == (to.inode, to.kind)
        && from.offset >> BUCKET_SHIFT == to.offset >> BUCKET_SHIFT
}

impl NameFilter {
    fn place(key: &Key) -> (usize, u64) {
        let hash = name_bucket_hash(key) >> (u64::BITS - FILTER_BITS);
        ((hash / 64) as usize, 1 << (hash % 64))
    }

    fn of<'a>(keys: impl Iterator<Item = &'a Key>) -> Self {
        let mut filter = Self { bits: vec![0; 1 << (FILTER_BITS - 6)].into() };
        keys.for_each(|key| filter.add(key));
        filter
    }

    fn add(&mut self, key: &Key) {
        if key.kind == Kind::Dirent {
            let (word, bit) = Self::place(key);
            if let Some(bits) = self.bits.get_mut(word) {
                *bits |= bit;
            }
        }
    }

    /// There is surely no entry between the two keys.
    fn excludes(&self, from: &Key, to: &Key) -> bool {
        if !is_one_bucket(from, to) {
            return false;
        }
        let (word, bit) = Self::place(from);
        self.bits.get(word).is_some_and(|bits| bits & bit == 0)
    }
}

impl Delta {
    /// Sets `key` to `value`, or deletes it.
    pub fn set(&mut self, key: Key, value: Option<Value>) {
        self.names.add(&key);
        self.value_bytes += value.as_ref().map_or(0, |value| value.len());
        if let Some(Some(old)) = self.entries.insert(key, value) {
            self.value_bytes -= old.len();
        }
        if self.entries.len() == FILTER_FROM && self.names.bits.is_empty() {
            self.names = NameFilter::of(self.entries.keys());
        }
    }

    /// `None`: the delta says nothing; `Some(None)`: deleted.
    pub fn get(&self, key: &Key) -> Option<&Option<Value>> {
        self.entries.get(key)
    }

    /// Entries with `from <= key <= to`, in order.
    pub fn range(&self, from: Key, to: Key) -> btree_map::Range<'_, Key, Option<Value>> {
        if from > to || self.names.excludes(&from, &to) {
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
        self.entries.len() * ENTRY_BYTES + self.value_bytes + self.names.bits.len() * 8
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
    fn every_name_of_a_bucket_is_found_and_most_empty_buckets_are_known() {
        const NAMES: u64 = 2 * FILTER_FROM as u64;
        let mut delta = Delta::default();
        let key = |number: u64| Key::new(number % 7, Kind::Dirent, (number << 8) | (number % 256));
        for number in 0..NAMES {
            delta.set(key(number), (number % 3 > 0).then(|| Value::from(vec![1])));
        }
        let bucket = |key: Key| {
            (Key { offset: key.offset & !0xff, ..key }, Key { offset: key.offset | 0xff, ..key })
        };
        for number in 0..NAMES {
            let (first, last) = bucket(key(number));
            assert_eq!(delta.range(first, last).count(), 1);
        }
        let known = (NAMES..2 * NAMES).filter(|number| {
            let (first, last) = bucket(key(*number));
            assert_eq!(delta.range(first, last).count(), 0);
            delta.names.excludes(&first, &last)
        });
        assert!(known.count() as u64 > NAMES * 9 / 10);
        // Ranges of several buckets, or kinds, are not the filter's.
        assert_eq!(delta.range(Key::MIN, Key::MAX).count() as u64, NAMES);
    }

    #[test]
    fn inverted_range_is_empty() {
        let mut delta = Delta::default();
        delta.set(Key::MAX, None);
        assert_eq!(delta.range(Key::inode(9), Key::inode(3)).count(), 0);
    }
}
