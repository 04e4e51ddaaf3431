//! What a batch does to the content of one file: writes and cuts put together, in memory. Pure.

use crate::error::{Error, Result};
use crate::format::{BLOCK_BYTES, BLOCK_BYTES_U64, MAX_FILE_BYTES};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// See the module's head.
#[derive(Debug)]
pub struct Patch {
    /// New bytes by where they begin; they do not overlap.
    pieces: BTreeMap<u64, Vec<u8>>,
    /// Pages of which a part is left, but none of their new bytes: written all the same, so what is left of them is part of the batch.
    emptied: BTreeSet<u64>,
    /// Of the old content nothing from here on is left.
    cut: u64,
    /// The exact size, if the file was cut or made longer.
    size: Option<u64>,
    /// End of the farthest write since.
    reach: u64,
}

/// Changes nothing.
impl Default for Patch {
    fn default() -> Self {
        let (pieces, emptied) = (BTreeMap::new(), BTreeSet::new());
        Self { pieces, emptied, cut: u64::MAX, size: None, reach: 0 }
    }
}

impl Patch {
    /// `data` at `offset`.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        let end = offset.checked_add(data.len() as u64).filter(|end| *end <= MAX_FILE_BYTES);
        let end = end.ok_or(Error::FileTooLarge)?;
        if data.is_empty() {
            return Ok(());
        }
        for gap in self.overwrite(offset, data) {
            let at = (gap.start - offset) as usize;
            self.put(gap.start, &data[at..at + (gap.end - gap.start) as usize]);
        }
        self.reach = self.reach.max(end);
        self.size = self.size.map(|size| size.max(end));
        Ok(())
    }

    /// Puts `data` into the new bytes that are there already. Answers where there are none. (None is moved: many small writes into a large one
    /// cost what they bring.)
    fn overwrite(&mut self, offset: u64, data: &[u8]) -> Vec<Range<u64>> {
        let end = offset + data.len() as u64;
        let first = self.pieces.range(..=offset).next_back().map_or(offset, |(first, _)| *first);
        let (mut gaps, mut at) = (Vec::new(), offset);
        for (&start, piece) in self.pieces.range_mut(first..end) {
            let (from, to) = (start.max(offset), (start + piece.len() as u64).min(end));
            if from < to {
                piece[(from - start) as usize..(to - start) as usize]
                    .copy_from_slice(&data[(from - offset) as usize..(to - offset) as usize]);
                if at < from {
                    gaps.push(at..from);
                }
                at = to;
            }
        }
        if at < end {
            gaps.push(at..end);
        }
        gaps
    }

    /// New bytes where there are none.
    fn put(&mut self, offset: u64, data: &[u8]) {
        if let Some((start, last)) = self.pieces.range_mut(..offset).next_back()
            && start + last.len() as u64 == offset
        {
            last.extend_from_slice(data);
        } else {
            self.pieces.insert(offset, data.to_vec());
        }
    }

    /// The file has this size from here on.
    pub fn truncate(&mut self, size: u64) -> Result<()> {
        if size > MAX_FILE_BYTES {
            return Err(Error::FileTooLarge);
        }
        let page = size / BLOCK_BYTES_U64;
        let page_end = (page + 1) * BLOCK_BYTES_U64;
        let last = self.pieces.range(..page_end).next_back();
        let loses = last.is_some_and(|(start, piece)| start + piece.len() as u64 > size);
        while self.emptied.last().is_some_and(|&emptied| emptied * BLOCK_BYTES_U64 >= size) {
            self.emptied.pop_last();
        }
        if loses && !size.is_multiple_of(BLOCK_BYTES_U64) {
            self.emptied.insert(page);
        }
        self.cut_pieces(size);
        self.cut = self.cut.min(size);
        self.size = Some(size);
        self.reach = self.reach.min(size);
        Ok(())
    }

    /// Takes the new bytes from `size` on away.
    fn cut_pieces(&mut self, size: u64) {
        while let Some(mut last) = self.pieces.last_entry() {
            if *last.key() < size {
                let kept = (size - last.key()) as usize;
                last.get_mut().truncate(kept);
                return;
            }
            last.remove();
        }
    }

    /// The size of a file that was `old` bytes long.
    pub fn size_after(&self, old: u64) -> u64 {
        self.size.unwrap_or_else(|| old.max(self.reach))
    }

    /// The size that the log may know, which knew `logged`, of a file that is `size` bytes long now. It covers all of the last page
    /// written: that may hold more than the patch, of which the log knew nothing.
    pub fn logged_size_after(&self, logged: u64, size: u64) -> u64 {
        let covered = self.reach.next_multiple_of(BLOCK_BYTES_U64).min(size);
        self.size.unwrap_or_else(|| logged.max(covered))
    }

    /// Where the old content of a file of `old` bytes ends, if anything of it goes.
    pub fn cut_of(&self, old: u64) -> Option<u64> {
        (self.cut < old).then_some(self.cut)
    }

    /// Something of the old content may go, and a part of a page stay.
    pub fn cuts_within_a_page(&self) -> bool {
        self.cut < u64::MAX && !self.cut.is_multiple_of(BLOCK_BYTES_U64)
    }

    /// The pages that were written and are left, as runs in order, each either of pages that are new as a whole (true) or not.
    pub fn runs(&self) -> Vec<(Range<u64>, bool)> {
        let mut runs = self.runs_of_pieces();
        let with_bytes = runs.len();
        for &page in &self.emptied {
            let place = runs[..with_bytes].partition_point(|(run, _)| run.end <= page);
            if runs[..with_bytes].get(place).is_none_or(|(run, _)| run.start > page) {
                runs.push((page..page + 1, false));
            }
        }
        if runs.len() > with_bytes {
            runs.sort_unstable_by_key(|(run, _)| run.start);
        }
        runs
    }

    /// The same of the pages with new bytes.
    fn runs_of_pieces(&self) -> Vec<(Range<u64>, bool)> {
        let mut runs: Vec<(Range<u64>, bool)> = Vec::new();
        let mut add = |range: Range<u64>, whole: bool| {
            if range.is_empty() {
                return;
            }
            match runs.last_mut() {
                Some((last, kind)) if last.end == range.start && *kind == whole => {
                    last.end = range.end;
                }
                _ => runs.push((range, whole)),
            }
        };
        let mut next = 0;
        for (&start, piece) in &self.pieces {
            let end = start + piece.len() as u64;
            let first = (start / BLOCK_BYTES_U64).max(next);
            let last = end.div_ceil(BLOCK_BYTES_U64);
            let mut at = first;
            while at < last {
                let whole_end = end / BLOCK_BYTES_U64;
                if at * BLOCK_BYTES_U64 >= start && at < whole_end {
                    add(at..whole_end, true);
                    at = whole_end;
                } else {
                    add(at..at + 1, self.covers(at));
                    at += 1;
                }
            }
            next = next.max(last);
        }
        runs
    }

    /// All bytes of page `index` are new.
    fn covers(&self, index: u64) -> bool {
        let mut count = 0;
        self.each_in(index, |_, part| count += part.len());
        count == BLOCK_BYTES
    }

    /// Puts the new bytes of page `index` into `page`.
    pub fn apply(&self, index: u64, page: &mut [u8]) {
        self.each_in(index, |within, part| page[within..within + part.len()].copy_from_slice(part));
    }

    fn each_in(&self, index: u64, mut visit: impl FnMut(usize, &[u8])) {
        let (start, end) = (index * BLOCK_BYTES_U64, (index + 1) * BLOCK_BYTES_U64);
        let before = self.pieces.range(..start).next_back();
        for (&first, piece) in before.into_iter().chain(self.pieces.range(start..end)) {
            let from = first.max(start);
            let to = (first + piece.len() as u64).min(end);
            if from < to {
                let part = &piece[(from - first) as usize..(to - first) as usize];
                visit((from - start) as usize, part);
            }
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMIT: usize = 40_000;

    fn step() -> impl Strategy<Value = (u64, Option<usize>)> {
        let place = prop_oneof![0..30_000_u64, (0..8_u64).prop_map(|page| page * 4096)];
        let length = prop_oneof![0..9000_usize, Just(4096_usize), 1..20_usize];
        (place, prop::option::weighted(0.8, length))
    }

    proptest! {
        /// Page by page, the patch gives the file that the steps give one after the other.
        #[test]
        fn a_patch_is_its_steps_one_after_the_other(
            old in 0..20_000_usize,
            steps in prop::collection::vec(step(), 0..12),
        ) {
            let mut file = vec![0xaa; old];
            let mut patch = Patch::default();
            let mut written = BTreeSet::new();
            for (number, (place, length)) in steps.into_iter().enumerate() {
                let byte = number as u8 + 1;
                if let Some(length) = length {
                    let end = place as usize + length;
                    if length > 0 && file.len() < end {
                        file.resize(end, 0);
                    }
                    if length > 0 {
                        file[place as usize..end].fill(byte);
                    }
                    if length > 0 {
                        written.extend(place / 4096..(place + length as u64).div_ceil(4096));
                    }
                    patch.write(place, &vec![byte; length]).unwrap();
                } else {
                    file.resize(place as usize, 0);
                    written.retain(|page| page * 4096 < place);
                    patch.truncate(place).unwrap();
                }
            }
            prop_assert_eq!(patch.size_after(old as u64), file.len() as u64);
            let mut result = vec![0; LIMIT];
            let kept = patch.cut_of(old as u64).unwrap_or(old as u64) as usize;
            result[..kept].fill(0xaa);
            let mut last_end = 0;
            for (run, whole) in patch.runs() {
                prop_assert!(run.start >= last_end && run.start < run.end);
                last_end = run.end;
                for index in run {
                    prop_assert!(written.remove(&index), "not written, or cut off");
                    let start = index as usize * 4096;
                    let page = &mut result[start..(start + 4096).min(LIMIT)];
                    let mut full = page.to_vec();
                    full.resize(4096, 0);
                    if whole {
                        full.fill(0xee);
                    }
                    patch.apply(index, &mut full);
                    prop_assert_eq!(patch.covers(index), whole);
                    page.copy_from_slice(&full[..page.len()]);
                }
            }
            prop_assert!(written.is_empty(), "written, and not there: {written:?}");
            prop_assert_eq!(&result[..file.len()], &file[..]);
            prop_assert!(result[file.len()..].iter().all(|&byte| byte == 0), "a tail of zeros");
        }
    }

    #[test]
    fn sequential_writes_are_one_piece() {
        let mut patch = Patch::default();
        for number in 0..100 {
            patch.write(number * 10, &[number as u8; 10]).unwrap();
        }
        assert_eq!(patch.pieces.len(), 1);
        assert_eq!(patch.write(u64::MAX - 5, &[0; 10]), Err(Error::FileTooLarge));
        assert_eq!(patch.truncate(u64::MAX), Err(Error::FileTooLarge));
    }
}
