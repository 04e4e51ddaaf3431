//! A group's bits in memory, and searches in them. Pure.
//!
//! A set bit is a block in use. Positions are bits of the group, `0 .. GROUP_BLOCKS`. Every
//! operation works on whole words; ranges that leave the bitmap are cut to it.

use std::ops::Range;

use crate::format::GROUP_BLOCKS;
use crate::format::bitmap::WORDS;

/// Number of bits.
pub const BITS: u32 = GROUP_BLOCKS as u32;

/// Bits of a cell: room for one tree node.
pub const CELL_BITS: u32 = crate::format::NODE_BLOCKS as u32;

/// The lowest bit of every cell of `word` that is all clear.
fn clear_cells(word: u64) -> u64 {
    let clear = !word;
    let pairs = clear & (clear >> 1);
    pairs & (pairs >> 2) & 0x1111_1111_1111_1111
}

const _: () = assert!(CELL_BITS == 4 && BITS.is_multiple_of(64));

/// See the module's head.
#[derive(Clone, PartialEq, Eq)]
pub struct Bitmap {
    words: Box<[u64; WORDS]>,
}

/// The parts of `range` by word: index and mask.
fn masks(range: Range<u32>) -> impl Iterator<Item = (usize, u64)> {
    let end = range.end.min(BITS);
    let mut at = range.start;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let (word, first) = (at / 64, at % 64);
        let last = (end - word * 64).min(64);
        at = (word + 1) * 64;
        let mask = (u64::MAX << first) & (u64::MAX >> (64 - last));
        Some((word as usize, mask))
    })
}

impl Bitmap {
    /// All bits set.
    pub fn full() -> Self {
        Self { words: Box::new([u64::MAX; WORDS]) }
    }

    /// These bits.
    pub fn from_words(words: [u64; WORDS]) -> Self {
        Self { words: Box::new(words) }
    }

    /// The bits, 64 a word, least significant first.
    pub fn words(&self) -> &[u64; WORDS] {
        &self.words
    }

    /// Clear bits.
    pub fn count_clear(&self) -> u32 {
        self.words.iter().map(|word| word.count_zeros()).sum()
    }

    /// Clear bits in `range`.
    pub fn count_clear_in(&self, range: Range<u32>) -> u32 {
        masks(range).map(|(word, mask)| (!self.words[word] & mask).count_ones()).sum()
    }

    /// Whether all of `range` is set.
    pub fn is_set(&self, range: Range<u32>) -> bool {
        masks(range).all(|(word, mask)| self.words[word] & mask == mask)
    }

    /// Whether all of `range` is clear.
    pub fn is_clear(&self, range: Range<u32>) -> bool {
        masks(range).all(|(word, mask)| self.words[word] & mask == 0)
    }

    /// Sets `range`; how many of its bits were clear.
    pub fn set(&mut self, range: Range<u32>) -> u32 {
        let mut changed = 0;
        for (word, mask) in masks(range) {
            changed += (!self.words[word] & mask).count_ones();
            self.words[word] |= mask;
        }
        changed
    }

    /// Clears `range`; how many of its bits were set.
    pub fn clear(&mut self, range: Range<u32>) -> u32 {
        let mut changed = 0;
        for (word, mask) in masks(range) {
            changed += (self.words[word] & mask).count_ones();
            self.words[word] &= !mask;
        }
        changed
    }

    /// Cells (aligned groups of four bits) that `range` touches and that are all clear: room for a node each.
    pub fn count_clear_cells(&self, range: Range<u32>) -> u32 {
        let cells = range.start / CELL_BITS * CELL_BITS..range.end.next_multiple_of(CELL_BITS);
        masks(cells).map(|(word, mask)| (clear_cells(self.words[word]) & mask).count_ones()).sum()
    }

    /// The first run of clear bits in `range` that lies outside of clear cells, up to `want` bits of one word.
    pub fn find_scrap(&self, range: Range<u32>, want: u32) -> Option<Range<u32>> {
        masks(range).find_map(|(index, mask)| {
            let scrap = !self.words[index] & !(clear_cells(self.words[index]) * 0xf) & mask;
            (scrap != 0).then(|| {
                let start = scrap.trailing_zeros();
                let length = (!(scrap >> start)).trailing_zeros().min(want);
                let start = index as u32 * 64 + start;
                start..start + length
            })
        })
    }

    /// The first clear cell in `range`.
    pub fn find_cell(&self, range: Range<u32>) -> Option<Range<u32>> {
        masks(range).find_map(|(index, mask)| {
            let cells = clear_cells(self.words[index]) & mask;
            let start = index as u32 * 64 + cells.trailing_zeros();
            (cells != 0).then(|| start..start + CELL_BITS)
        })
    }

    /// The first clear bit in `range`.
    pub fn next_clear(&self, range: Range<u32>) -> Option<u32> {
        self.first_match(range, |word| !word)
    }

    /// The first set bit in `range`, or its end.
    pub fn next_set(&self, range: Range<u32>) -> u32 {
        let end = range.end.min(BITS);
        self.first_match(range, |word| word).unwrap_or(end)
    }

    fn first_match(&self, range: Range<u32>, select: impl Fn(u64) -> u64) -> Option<u32> {
        let end = range.end.min(BITS);
        if range.start >= end {
            return None;
        }
        let mut index = range.start / 64;
        let mut word = select(self.words[index as usize]) & (u64::MAX << (range.start % 64));
        loop {
            if word != 0 {
                let bit = index * 64 + word.trailing_zeros();
                return (bit < end).then_some(bit);
            }
            index += 1;
            if index * 64 >= end {
                return None;
            }
            word = select(self.words[index as usize]);
        }
    }

    /// The last clear bit in `range`.
    pub fn last_clear(&self, range: Range<u32>) -> Option<u32> {
        self.last_match(range, |word| !word)
    }

    /// The end of the last set bit in `range` (one past it), or the range's start.
    pub fn last_set_end(&self, range: Range<u32>) -> u32 {
        let start = range.start;
        self.last_match(range, |word| word).map_or(start, |bit| bit + 1)
    }

    fn last_match(&self, range: Range<u32>, select: impl Fn(u64) -> u64) -> Option<u32> {
        let end = range.end.min(BITS);
        if range.start >= end {
            return None;
        }
        let mut index = (end - 1) / 64;
        let mut word = select(self.words[index as usize]) & (u64::MAX >> (63 - (end - 1) % 64));
        loop {
            if word != 0 {
                let bit = index * 64 + 63 - word.leading_zeros();
                return (bit >= range.start).then_some(bit);
            }
            if index * 64 <= range.start {
                return None;
            }
            index -= 1;
            word = select(self.words[index as usize]);
        }
    }

    /// The clear run that contains `bit`, as far as it goes; empty if the bit is set.
    pub fn run_around(&self, bit: u32) -> Range<u32> {
        let end = self.next_set(bit..BITS);
        if end <= bit {
            return bit..bit;
        }
        self.last_set_end(0..bit)..end
    }

    /// The first run of at least `want` clear bits that lies in `range` (cut to `want` bits), else the
    /// longest clear run in it, the first of equals.
    pub fn find_run(&self, range: Range<u32>, want: u32) -> Search {
        let mut longest = 0..0;
        let mut at = range.start;
        while let Some(start) = self.next_clear(at..range.end) {
            // No further than needed: a free group is mostly one long run.
            let end = self.next_set(start..range.end.min(start.saturating_add(want)));
            if end - start >= want {
                return Search::Found(start..end);
            }
            if end - start > longest.end - longest.start {
                longest = start..end;
            }
            at = end;
        }
        Search::Longest(longest)
    }

    /// The last run of at least `min` clear bits in `range`, cut to its last `want` bits; else the
    /// longest clear run in it.
    pub fn find_run_down(&self, range: Range<u32>, want: u32, min: u32) -> Search {
        let mut longest = 0..0;
        let mut at = range.end;
        while let Some(last) = self.last_clear(range.start..at) {
            let end = last + 1;
            // No further than needed.
            let start = self.last_set_end(range.start.max(end.saturating_sub(want))..end);
            if end - start >= min {
                return Search::Found(start..end);
            }
            if end - start > longest.end - longest.start {
                longest = start..end;
            }
            at = start;
        }
        Search::Longest(longest)
    }
}

/// Result of a search for a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Search {
    /// A run that is long enough.
    Found(Range<u32>),
    /// None is; this is the longest (empty if no bit is clear).
    Longest(Range<u32>),
}

impl std::fmt::Debug for Bitmap {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Bitmap").field("clear", &self.count_clear()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A bitmap with the runs `(gap, length)` cleared one after the other, and the same as a list.
    fn build(runs: &[(u32, u32)]) -> (Bitmap, Vec<bool>) {
        let (mut bitmap, mut model) = (Bitmap::full(), vec![true; BITS as usize]);
        let mut at = 0;
        for (gap, length) in runs {
            let start = (at + gap).min(BITS);
            let end = (start + length).min(BITS);
            bitmap.clear(start..end);
            model[start as usize..end as usize].fill(false);
            at = end;
        }
        (bitmap, model)
    }

    /// Clear runs of the model within a range.
    fn runs_in(model: &[bool], range: &Range<u32>) -> Vec<Range<u32>> {
        let mut runs: Vec<Range<u32>> = Vec::new();
        for bit in range.clone().filter(|&bit| !model[bit as usize]) {
            match runs.last_mut() {
                Some(last) if last.end == bit => last.end += 1,
                _ => runs.push(bit..bit + 1),
            }
        }
        runs
    }

    fn longest(runs: &[Range<u32>], down: bool) -> Range<u32> {
        let mut best = 0..0;
        let mut consider = |run: &Range<u32>| {
            if run.len() > best.len() {
                best = run.clone();
            }
        };
        if down {
            runs.iter().rev().for_each(&mut consider);
        } else {
            runs.iter().for_each(&mut consider);
        }
        best
    }

    #[test]
    fn the_last_bits_are_reached() {
        let mut bitmap = Bitmap::full();
        assert_eq!(bitmap.next_clear(0..BITS), None);
        assert_eq!(bitmap.clear(BITS - 1..BITS + 100), 1);
        assert_eq!(bitmap.next_clear(0..u32::MAX), Some(BITS - 1));
        assert_eq!(bitmap.last_clear(0..BITS), Some(BITS - 1));
        assert_eq!(bitmap.run_around(BITS - 1), BITS - 1..BITS);
        assert_eq!(bitmap.clear(0..BITS), BITS - 1);
        assert_eq!(bitmap.find_run(0..BITS, BITS), Search::Found(0..BITS));
        assert_eq!(bitmap.run_around(5), 0..BITS);
    }

    #[test]
    fn scraps_and_cells_are_what_a_list_says() {
        for seed in 0_u64..200 {
            let mut bitmap = Bitmap::full();
            let mut state = seed + 1;
            for _ in 0..60 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let start = (state >> 40) as u32 % 400;
                bitmap.clear(start..start + (state >> 33) as u32 % 9);
            }
            let clear = |bit: u32| !bitmap.is_set(bit..bit + 1);
            let cell = |number: u32| (number * 4..number * 4 + 4).all(clear);
            let cells = (0..BITS / 4).filter(|&number| cell(number)).count() as u32;
            assert_eq!(bitmap.count_clear_cells(0..BITS), cells);
            assert_eq!(bitmap.count_clear_cells(401..402), u32::from(cell(100)));
            let first = (0..BITS / 4).find(|&number| cell(number)).map(|n| n * 4..n * 4 + 4);
            assert_eq!(bitmap.find_cell(0..BITS), first);
            let scrap = (0..BITS).find(|&bit| clear(bit) && !cell(bit / 4));
            let found = bitmap.find_scrap(0..BITS, 9);
            assert_eq!(found.as_ref().map(|run| run.start), scrap);
            assert!(found.is_none_or(|run| run.clone().all(|bit| clear(bit) && !cell(bit / 4))));
        }
    }

    proptest! {
        #[test]
        fn searches_agree_with_a_list(
            runs in prop::collection::vec((0_u32..300, 0_u32..200), 0..60),
            from in 0_u32..10_000,
            length in 0_u32..12_000,
            want in 1_u32..250,
            min in 1_u32..250,
        ) {
            let (bitmap, model) = build(&runs);
            let range = from..from + length;
            let min = min.min(want);
            let clear = runs_in(&model, &range);
            prop_assert_eq!(bitmap.next_clear(range.clone()), clear.first().map(|run| run.start));
            prop_assert_eq!(bitmap.last_clear(range.clone()), clear.last().map(|run| run.end - 1));
            let total: usize = clear.iter().map(ExactSizeIterator::len).sum();
            prop_assert_eq!(bitmap.count_clear_in(range.clone()) as usize, total);
            let up = clear.iter().find(|run| run.len() as u32 >= want);
            prop_assert_eq!(bitmap.find_run(range.clone(), want), match up {
                Some(run) => Search::Found(run.start..run.start + want),
                None => Search::Longest(longest(&clear, false)),
            });
            let down = clear.iter().rev().find(|run| run.len() as u32 >= min);
            prop_assert_eq!(bitmap.find_run_down(range.clone(), want, min), match down {
                Some(run) => Search::Found(run.end - want.min(run.len() as u32)..run.end),
                None => Search::Longest(longest(&clear, true)),
            });
            let whole = runs_in(&model, &(0..BITS));
            let around = whole.iter().find(|run| run.contains(&from)).cloned().unwrap_or(from..from);
            prop_assert_eq!(bitmap.run_around(from), around);
        }

        #[test]
        fn changes_agree_with_a_list(
            runs in prop::collection::vec((0_u32..300, 0_u32..200), 0..60),
            changes in prop::collection::vec((any::<bool>(), 0_u32..12_000, 0_u32..500), 0..30),
        ) {
            let (mut bitmap, mut model) = build(&runs);
            for (set, start, length) in changes {
                let range = start..start + length;
                let slice = &mut model[start as usize..(start + length) as usize];
                let clear = slice.iter().filter(|&&bit| !bit).count() as u32;
                prop_assert_eq!(bitmap.is_clear(range.clone()), clear == length);
                prop_assert_eq!(bitmap.is_set(range.clone()), clear == 0);
                slice.fill(set);
                if set {
                    prop_assert_eq!(bitmap.set(range), clear);
                } else {
                    prop_assert_eq!(bitmap.clear(range), length - clear);
                }
            }
            let total = model.iter().filter(|&&bit| !bit).count();
            prop_assert_eq!(bitmap.count_clear() as usize, total);
            for (index, bit) in model.iter().enumerate() {
                prop_assert_eq!(bitmap.words()[index / 64] >> (index % 64) & 1 == 1, *bit);
            }
        }
    }
}
