//! A set of chunk numbers that needs no memory of its own for one: most files are small, and most syncs find little.

use std::collections::{BTreeSet, btree_set};
use std::ops::Range;

/// See the module's head.
#[derive(Debug, Default)]
pub(super) enum ChunkSet {
    #[default]
    Empty,
    One(u64),
    /// Was once more than one; never empty.
    #[allow(
        clippy::box_collection,
        reason = "each inode in memory has four sets, nearly all of one or none"
    )]
    Many(Box<BTreeSet<u64>>),
}

impl ChunkSet {
    pub(super) fn insert(&mut self, number: u64) {
        match self {
            Self::Empty => *self = Self::One(number),
            Self::One(only) if *only == number => {}
            Self::One(only) => *self = Self::Many(Box::new(BTreeSet::from([*only, number]))),
            Self::Many(numbers) => {
                numbers.insert(number);
            }
        }
    }

    pub(super) fn remove(&mut self, number: u64) {
        match self {
            Self::One(only) if *only == number => *self = Self::Empty,
            Self::Empty | Self::One(_) => {}
            Self::Many(numbers) => {
                numbers.remove(&number);
                if numbers.is_empty() {
                    *self = Self::Empty;
                }
            }
        }
    }

    /// Those within `range`, in order.
    pub(super) fn range(&self, range: Range<u64>) -> ChunkRange<'_> {
        match self {
            Self::Empty => ChunkRange::AtMostOne(None),
            Self::One(only) => {
                ChunkRange::AtMostOne(Some(*only).filter(|only| range.contains(only)))
            }
            Self::Many(numbers) => ChunkRange::Many(numbers.range(range)),
        }
    }

    #[cfg(any(test, debug_assertions))]
    pub(super) fn contains(&self, number: u64) -> bool {
        self.range(number..number + 1).next().is_some()
    }
}

/// Iterator of [`ChunkSet::range`].
#[derive(Debug)]
pub(super) enum ChunkRange<'a> {
    AtMostOne(Option<u64>),
    Many(btree_set::Range<'a, u64>),
}

impl Iterator for ChunkRange<'_> {
    type Item = u64;

    #[inline]
    fn next(&mut self) -> Option<u64> {
        match self {
            Self::AtMostOne(number) => number.take(),
            Self::Many(numbers) => numbers.next().copied(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_set_of_what_was_inserted_and_not_removed() {
        let (mut set, mut model) = (ChunkSet::default(), BTreeSet::new());
        let mut random = 1_u64;
        for _ in 0..20_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let (number, start, length) = (random >> 61, random >> 40 & 7, random >> 50 & 7);
            if (random >> 32).is_multiple_of(4) {
                set.insert(number);
                model.insert(number);
            } else {
                set.remove(number);
                model.remove(&number);
            }
            assert_eq!(set.contains(number), model.contains(&number));
            let range = start..start + length;
            assert!(set.range(range.clone()).eq(model.range(range).copied()));
        }
    }
}
