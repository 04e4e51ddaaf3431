//! A set of chunk numbers that needs no memory of its own for one: most files are small, and most syncs find little. A few, as a sync of
//! scattered pages has, are in one array: a tree takes several times as long for each that comes or goes, and a page has
//! four of these sets to enter and to leave on its way home.

use std::collections::{BTreeSet, btree_set};
use std::ops::Range;

/// Most numbers in the array.
const FEW: usize = 31;
const _: () = assert!(size_of::<Few>() == 256);

/// Numbers in order, without duplicates.
#[derive(Debug)]
pub(super) struct Few {
    count: usize,
    numbers: [u64; FEW],
}

impl Few {
    fn of(numbers: [u64; 2]) -> Self {
        let mut few = Self { count: 2, numbers: [0; FEW] };
        few.numbers[..2].copy_from_slice(&numbers);
        few.numbers[..2].sort_unstable();
        few
    }

    fn numbers(&self) -> &[u64] {
        &self.numbers[..self.count]
    }

    /// False: there is no room for it.
    fn insert(&mut self, number: u64) -> bool {
        let Err(place) = self.numbers().binary_search(&number) else { return true };
        if self.count == FEW {
            return false;
        }
        self.numbers.copy_within(place..self.count, place + 1);
        self.numbers[place] = number;
        self.count += 1;
        true
    }

    fn remove(&mut self, number: u64) {
        if let Ok(place) = self.numbers().binary_search(&number) {
            self.numbers.copy_within(place + 1..self.count, place);
            self.count -= 1;
        }
    }

    fn range(&self, range: &Range<u64>) -> &[u64] {
        let numbers = self.numbers();
        let from = numbers.partition_point(|&number| number < range.start);
        let to = numbers.partition_point(|&number| number < range.end);
        &numbers[from..to.max(from)]
    }
}

/// See the module's head.
#[derive(Debug, Default)]
pub(super) enum ChunkSet {
    #[default]
    Empty,
    One(u64),
    /// Was once more than one; never empty.
    Few(Box<Few>),
    /// Were once more than [`FEW`]; never empty.
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
            Self::One(only) => *self = Self::Few(Box::new(Few::of([*only, number]))),
            Self::Few(few) => {
                if !few.insert(number) {
                    let all = few.numbers().iter().copied().chain([number]);
                    *self = Self::Many(Box::new(all.collect()));
                }
            }
            Self::Many(numbers) => {
                numbers.insert(number);
            }
        }
    }

    pub(super) fn remove(&mut self, number: u64) {
        match self {
            Self::One(only) if *only == number => *self = Self::Empty,
            Self::Empty | Self::One(_) => {}
            Self::Few(few) => {
                few.remove(number);
                if few.count == 0 {
                    *self = Self::Empty;
                }
            }
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
            Self::Few(few) => ChunkRange::Few(few.range(&range).iter()),
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
    Few(std::slice::Iter<'a, u64>),
    Many(btree_set::Range<'a, u64>),
}

impl Iterator for ChunkRange<'_> {
    type Item = u64;

    #[inline]
    fn next(&mut self) -> Option<u64> {
        match self {
            Self::AtMostOne(number) => number.take(),
            Self::Few(numbers) => numbers.next().copied(),
            Self::Many(numbers) => numbers.next().copied(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_set_of_what_was_inserted_and_not_removed() {
        // One in four steps inserts, or three in four, of eight numbers or of 64: none, one, few and many of them.
        for (bits, inserts) in [(3, 1), (3, 3), (6, 1), (6, 2), (6, 3)] {
            check(bits, inserts);
        }
    }

    fn check(bits: u32, inserts: u64) {
        let (mut set, mut model) = (ChunkSet::default(), BTreeSet::new());
        let mut random = 1_u64;
        let mut largest = 0;
        for _ in 0..20_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let least = 64 - bits;
            let number = random >> least;
            let (start, length) = (random << 8 >> least, random << 16 >> least);
            if (random >> 32) % 4 < inserts {
                set.insert(number);
                model.insert(number);
            } else {
                set.remove(number);
                model.remove(&number);
            }
            assert_eq!(set.contains(number), model.contains(&number));
            let range = start..start + length;
            assert!(set.range(range.clone()).eq(model.range(range).copied()));
            largest = largest.max(model.len());
        }
        assert!(largest > FEW || bits < 5 || inserts < 2, "{largest} at most");
    }
}
