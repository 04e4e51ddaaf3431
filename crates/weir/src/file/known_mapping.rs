//! What was looked up of a file's mapping: a sync asks for the same places when it decides where pages go, when it takes
//! them, and when it commits the result.
//!
//! **Invariant:** an answer was looked up after its moment was taken, so it is right while the moment stands.

use super::extents::{Before, Piece};
use crate::txn::mapping_moments::MappingMoment;
use std::ops::Range;

/// Answers that are kept of a file.
const MOST_ANSWERS: usize = 512;

/// What file blocks are mapped to, and the extent before them.
pub type Mapped = (Vec<Piece>, Option<Before>);

/// See the module's head. Pure.
#[derive(Default)]
pub struct KnownMapping {
    as_of: Option<MappingMoment>,
    /// In order of file blocks, none twice.
    answers: Vec<(Range<u64>, Mapped)>,
}

impl KnownMapping {
    /// What `blocks` are mapped to at `now`, if that was looked up.
    pub fn get(&self, now: MappingMoment, blocks: &Range<u64>) -> Option<Mapped> {
        if self.as_of != Some(now) {
            return None;
        }
        let place = self.answers.binary_search_by_key(&blocks.start, |(known, _)| known.start);
        let (known, mapped) = self.answers.get(place.ok()?)?;
        (known == blocks).then(|| mapped.clone())
    }

    /// `blocks` were looked up after `moment`.
    pub fn remember(&mut self, moment: MappingMoment, blocks: Range<u64>, mapped: Mapped) {
        if self.as_of != Some(moment) || self.answers.len() >= MOST_ANSWERS {
            self.forget();
            self.as_of = Some(moment);
        }
        match self.answers.binary_search_by_key(&blocks.start, |(known, _)| known.start) {
            Ok(place) => self.answers[place] = (blocks, mapped),
            Err(place) => self.answers.insert(place, (blocks, mapped)),
        }
    }

    /// Gives the memory back: the answers keep parts of the tree in memory.
    pub fn forget(&mut self) {
        *self = Self::default();
    }
}

/// Where some blocks of a file are, and nothing else of their extent: keeps nothing in memory but itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Home {
    /// First file block.
    pub file_block: u64,
    /// How many.
    pub blocks: u64,
    /// First block of the volume; 0: unwritten.
    pub block: u64,
}

impl Home {
    /// File block after the last.
    pub fn end(&self) -> u64 {
        self.file_block + self.blocks
    }
}

/// Homes that are kept of a file.
const MOST_HOMES: usize = 16;

/// Homes of blocks that were synced before, for the next sync: whoever writes the same places again and again asks for nothing else.
/// Pure.
#[derive(Default)]
pub struct KnownHomes {
    as_of: Option<MappingMoment>,
    /// In order of file blocks, none overlapping.
    homes: Vec<Home>,
}

impl KnownHomes {
    /// The home that holds all of `blocks` at `now`, if that was looked up.
    pub fn get(&self, now: MappingMoment, blocks: &Range<u64>) -> Option<Home> {
        if self.as_of != Some(now) {
            return None;
        }
        let place = self.homes.partition_point(|home| home.end() <= blocks.start);
        let home = self.homes.get(place)?;
        (home.file_block <= blocks.start && blocks.end <= home.end()).then_some(*home)
    }

    /// `home` was looked up after `moment`.
    pub fn remember(&mut self, moment: MappingMoment, home: Home) {
        if self.as_of != Some(moment) || self.homes.len() >= MOST_HOMES {
            self.homes.clear();
            self.as_of = Some(moment);
        }
        let place = self.homes.partition_point(|known| known.end() <= home.file_block);
        let end = self.homes.partition_point(|known| known.file_block < home.end());
        self.homes.splice(place..end.max(place), [home]);
    }

    /// Between the two moments only the mapping of `ranges` of the file has changed: the caller has held its `map` lock.
    pub fn carry_over(
        &mut self,
        before: MappingMoment,
        after: MappingMoment,
        ranges: impl Iterator<Item = Range<u64>>,
    ) {
        if self.as_of != Some(before) {
            return;
        }
        for range in ranges {
            self.homes.retain(|home| home.end() <= range.start || range.end <= home.file_block);
        }
        self.as_of = Some(after);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::format::Key;
    use crate::txn::mapping_moments::MappingMoments;

    #[test]
    fn answers_hold_for_their_blocks_and_for_as_long_as_nothing_changes() {
        let moments = MappingMoments::default();
        let mut known = KnownMapping::default();
        let now = moments.moment(3);
        assert!(known.get(now, &(5..6)).is_none());
        for start in [9, 5, 7, 5] {
            known.remember(now, start..start + 1, (Vec::new(), None));
        }
        assert_eq!(known.answers.len(), 3);
        for start in 0..12 {
            assert_eq!(known.get(now, &(start..start + 1)).is_some(), [5, 7, 9].contains(&start));
            assert!(known.get(now, &(start..start + 2)).is_none());
        }
        moments.touch(Key::extent(3, 5));
        let later = moments.moment(3);
        assert!(known.get(later, &(5..6)).is_none());
        known.remember(later, 5..6, (Vec::new(), None));
        assert!(known.get(later, &(5..6)).is_some() && known.get(now, &(5..6)).is_none());
        assert!(known.get(later, &(7..8)).is_none());
    }

    #[test]
    fn a_file_keeps_a_bounded_number_of_answers() {
        let moment = MappingMoments::default().moment(3);
        let mut known = KnownMapping::default();
        for start in 0..3000 {
            known.remember(moment, start..start + 1, (Vec::new(), None));
            assert!(known.answers.len() <= MOST_ANSWERS);
            assert!(known.get(moment, &(start..start + 1)).is_some());
        }
        known.forget();
        assert!(known.get(moment, &(2999..3000)).is_none());
    }

    #[test]
    fn homes_hold_for_what_they_cover_and_for_as_long_as_nothing_changes() {
        let moments = MappingMoments::default();
        let now = moments.moment(3);
        let mut known = KnownHomes::default();
        assert!(known.get(now, &(5..6)).is_none());
        let home = |file_block, blocks| Home { file_block, blocks, block: 1000 + file_block };
        for (file_block, blocks) in [(20, 5), (10, 1), (12, 4)] {
            known.remember(now, home(file_block, blocks));
        }
        for start in 0..30 {
            for end in start + 1..30 {
                let holds = |first: u64, blocks: u64| first <= start && end <= first + blocks;
                let expected = [(10, 1), (12, 4), (20, 5)]
                    .into_iter()
                    .find(|&(first, blocks)| holds(first, blocks))
                    .map(|(first, blocks)| home(first, blocks));
                assert_eq!(known.get(now, &(start..end)), expected);
            }
        }
        // More of an extent than was known of it.
        known.remember(now, home(11, 12));
        assert_eq!(known.homes, [home(10, 1), home(11, 12)]);
        moments.touch(Key::extent(3, 5));
        assert!(known.get(moments.moment(3), &(10..11)).is_none());
        known.remember(moments.moment(3), home(4, 1));
        assert_eq!(known.homes, [home(4, 1)]);
    }

    #[test]
    fn homes_outlive_a_change_of_the_mapping_of_others() {
        let moments = MappingMoments::default();
        let mut known = KnownHomes::default();
        let home = |file_block, blocks| Home { file_block, blocks, block: 1000 + file_block };
        let before = moments.moment(3);
        for (file_block, blocks) in [(10, 1), (12, 4), (20, 5)] {
            known.remember(before, home(file_block, blocks));
        }
        moments.touch(Key::extent(3, 15));
        let after = moments.moment(3);
        known.carry_over(before, after, [11..12, 15..20].into_iter());
        assert_eq!(known.get(after, &(10..11)), Some(home(10, 1)));
        assert_eq!(known.get(after, &(20..25)), Some(home(20, 5)));
        assert_eq!(known.get(after, &(12..13)), None, "a part of it has changed");
        // What was known of an older moment stays old.
        moments.touch(Key::extent(3, 15));
        let later = moments.moment(3);
        known.carry_over(before, later, std::iter::empty());
        assert_eq!(known.get(later, &(10..11)), None);
    }

    #[test]
    fn a_file_keeps_a_bounded_number_of_homes() {
        let moment = MappingMoments::default().moment(3);
        let mut known = KnownHomes::default();
        for file_block in 0..1000 {
            let home = Home { file_block, blocks: 1, block: 7 };
            known.remember(moment, home);
            assert!(known.homes.len() <= MOST_HOMES);
            assert_eq!(known.get(moment, &(file_block..file_block + 1)), Some(home));
        }
    }
}
