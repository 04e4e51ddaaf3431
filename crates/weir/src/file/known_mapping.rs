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
}
