//! The delta: metadata changes since a checkpoint, as an ordered map of after-images.
//!
//! Pure data, no locks. A value of `None` says that the key is deleted, whatever the trees say.
//!
//! Values lie side by side in a few large pieces of memory ([`Values`]), not each in its own: a delta gets hundreds of thousands,
//! and another thread than the one that made them frees them all at once.

use crate::format::{Key, Kind};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Bound;

/// Memory of an entry besides its value, about: the map's nodes are two thirds full.
const ENTRY_BYTES: usize = 56;

/// See the module's head.
#[derive(Debug, Default)]
pub struct Delta {
    entries: BTreeMap<Key, Place>,
    values: Values,
    /// Sum of the values' lengths.
    value_bytes: usize,
    names: NameFilter,
}

/// Where a value is. Small, since a search passes many on its way.
#[derive(Debug, Clone, Copy)]
struct Place {
    /// In units of all slabs together.
    unit: u32,
    /// In bytes; [`Place::DELETED`].
    length: u32,
}

impl Place {
    const DELETED: Self = Self { unit: 0, length: u32::MAX };

    fn is_deleted(self) -> bool {
        self.length == u32::MAX
    }
}

/// Memory for values. A value that is replaced by one of about its size is overwritten; what becomes void otherwise stays
/// until all is dropped.
#[derive(Debug, Default)]
struct Values {
    slabs: Vec<Vec<u8>>,
    bytes: usize,
}

impl Values {
    const SLAB_BYTES: usize = 64 << 10;
    const UNIT_BYTES: usize = 8;
    const SLAB_UNITS: usize = Self::SLAB_BYTES / Self::UNIT_BYTES;

    /// Room for a value of this length: in steps of at most a quarter, so that a value that grows little by little does not
    /// need a new place each time.
    fn room(length: usize) -> usize {
        let step = match length.checked_sub(1).and_then(usize::checked_ilog2) {
            Some(log) => (1 << log >> 2).max(Self::UNIT_BYTES),
            None => Self::UNIT_BYTES,
        };
        length.next_multiple_of(step)
    }

    fn get(&self, place: Place) -> Option<&[u8]> {
        if place.is_deleted() {
            return None;
        }
        let slab = &self.slabs[place.unit as usize / Self::SLAB_UNITS];
        let start = place.unit as usize % Self::SLAB_UNITS * Self::UNIT_BYTES;
        Some(&slab[start..start + place.length as usize])
    }

    fn add(&mut self, value: &[u8]) -> Place {
        let room = Self::room(value.len());
        let fits = |slab: &Vec<u8>| slab.len() + room <= slab.capacity().min(Self::SLAB_BYTES);
        if !self.slabs.last().is_some_and(fits) {
            // Small deltas are many in tests and on small volumes.
            let wanted = (2 * self.bytes).clamp(4096, Self::SLAB_BYTES).max(room);
            self.slabs.push(Vec::with_capacity(wanted));
        }
        let number = self.slabs.len() - 1;
        let slab = &mut self.slabs[number];
        let start = slab.len();
        slab.extend_from_slice(value);
        slab.resize(start + room, 0);
        self.bytes += room;
        let unit = number * Self::SLAB_UNITS + start / Self::UNIT_BYTES;
        Place { unit: unit as u32, length: value.len() as u32 }
    }

    /// Where `value` is after it has replaced what is at `place`.
    fn replace(&mut self, place: Place, value: &[u8]) -> Place {
        if place.is_deleted() || Self::room(place.length as usize) != Self::room(value.len()) {
            return self.add(value);
        }
        let slab = &mut self.slabs[place.unit as usize / Self::SLAB_UNITS];
        let start = place.unit as usize % Self::SLAB_UNITS * Self::UNIT_BYTES;
        slab[start..start + value.len()].copy_from_slice(value);
        Place { length: value.len() as u32, ..place }
    }
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
    pub fn set(&mut self, key: Key, value: Option<&[u8]>) {
        self.names.add(&key);
        self.value_bytes += value.map_or(0, <[u8]>::len);
        match self.entries.entry(key) {
            Entry::Occupied(mut entry) => {
                let old = *entry.get();
                self.value_bytes -= if old.is_deleted() { 0 } else { old.length as usize };
                let place = value.map(|value| self.values.replace(old, value));
                entry.insert(place.unwrap_or(Place::DELETED));
            }
            Entry::Vacant(entry) => {
                let place = value.map(|value| self.values.add(value));
                entry.insert(place.unwrap_or(Place::DELETED));
            }
        }
        if self.entries.len() == FILTER_FROM && self.names.bits.is_empty() {
            self.names = NameFilter::of(self.entries.keys());
        }
    }

    /// `None`: the delta says nothing; `Some(None)`: deleted.
    pub fn get(&self, key: &Key) -> Option<Option<&[u8]>> {
        self.entries.get(key).map(|place| self.values.get(*place))
    }

    /// Entries with `from <= key <= to`, in order.
    pub fn range(
        &self,
        from: Key,
        to: Key,
    ) -> impl DoubleEndedIterator<Item = (Key, Option<&[u8]>)> {
        let nothing = from > to || self.names.excludes(&from, &to);
        let range = if nothing {
            self.entries.range((Bound::Excluded(Key::MAX), Bound::Unbounded))
        } else {
            self.entries.range(from..=to)
        };
        range.map(|(key, place)| (*key, self.values.get(*place)))
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
        self.entries.len() * ENTRY_BYTES + self.values.bytes + self.names.bits.len() * 8
    }

    /// Upper bound of what the entries add to the trees.
    pub fn stored_bytes(&self) -> usize {
        self.entries.len() * 32 + self.value_bytes
    }

    /// All entries in order.
    pub fn entries(&self) -> impl Iterator<Item = (Key, Option<&[u8]>)> {
        self.entries.iter().map(|(key, place)| (*key, self.values.get(*place)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_bytes_follow_replacement_and_deletion() {
        let mut delta = Delta::default();
        delta.set(Key::inode(1), Some(&[0; 100]));
        delta.set(Key::inode(1), Some(&[0; 10]));
        assert_eq!(delta.value_bytes, 10);
        delta.set(Key::inode(1), None);
        assert_eq!((delta.value_bytes, delta.len()), (0, 1));
        assert_eq!(delta.get(&Key::inode(1)), Some(None));
    }

    #[test]
    fn values_are_what_was_set_last_whatever_their_lengths() {
        let mut delta = Delta::default();
        let mut model = BTreeMap::new();
        let mut random = 1_u64;
        for step in 0..50_000_u64 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let key = Key::inode(random >> 40 & 255);
            let length = (random >> 33) % if step % 100 == 0 { 4609 } else { 80 };
            let value = (random >> 60 > 0).then(|| vec![step as u8; length as usize]);
            delta.set(key, value.as_deref());
            assert_eq!(delta.get(&key), Some(value.as_deref()));
            model.insert(key, value);
        }
        assert!(delta.entries().eq(model.iter().map(|(key, value)| (*key, value.as_deref()))));
        let live = model.values().flatten().map(Vec::len).sum::<usize>();
        assert_eq!(delta.value_bytes, live);
    }

    #[test]
    fn a_value_that_grows_little_by_little_leaves_little_behind() {
        let mut delta = Delta::default();
        for length in 0..=1024 {
            delta.set(Key::inode(1), Some(&vec![7; length]));
        }
        assert!(delta.values.bytes < 8 * 1024, "{} bytes", delta.values.bytes);
    }

    #[test]
    fn every_name_of_a_bucket_is_found_and_most_empty_buckets_are_known() {
        const NAMES: u64 = 2 * FILTER_FROM as u64;
        let mut delta = Delta::default();
        let key = |number: u64| Key::new(number % 7, Kind::Dirent, (number << 8) | (number % 256));
        for number in 0..NAMES {
            delta.set(key(number), (number % 3 > 0).then_some(&[1]));
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
