//! The space of a model file: which pages have a block because a call has allocated it, and which hold data.
//!
//! What was allocated is there from its place in the order on, and so is what was taken away. A page that was written has a
//! block when it has gone home, which may be late, and after a crash if its data has survived: the engine says so itself
//! (`SEEK_DATA`), and only for pages that were written.

use std::ops::Range;

use super::data::{FileData, Page};
use crate::image::BLOCK_BYTES;

const PAGE: u64 = BLOCK_BYTES as u64;

/// Files up to this size live in their inode.
pub const INLINE_BYTES: u64 = weir::format::MAX_INLINE_BYTES as u64;

/// What an allocation finds of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// Every page has a block that was allocated.
    All,
    /// Some page has none for certain.
    Missing,
    /// Some page has data, which may be home or not.
    Unknown,
}

/// The file blocks that bytes `start .. end` touch.
pub const fn blocks_of(start: u64, end: u64) -> Range<u64> {
    start / PAGE..end.div_ceil(PAGE)
}

impl FileData {
    /// A file that is small now may have its page in the inode, until that is taken away.
    pub(super) fn note_small(&mut self) {
        let has_page = self.pages.get(&0).is_some_and(Page::has_data);
        self.was_small = has_page && (self.was_small || self.size <= INLINE_BYTES);
    }

    /// What an allocation of these pages finds.
    pub fn room(&self, mut pages: Range<u64>) -> Room {
        let mut room = Room::All;
        let is_missing = pages.any(|index| match self.pages.get(&index) {
            Some(page) if page.is_kept() => false,
            Some(page) if page.has_data() => {
                room = Room::Unknown;
                false
            }
            _ => true,
        });
        if is_missing { Room::Missing } else { room }
    }

    /// Operation `step` gives these pages a block each.
    pub fn keep(&mut self, step: u64, pages: Range<u64>) {
        for index in pages {
            self.pages.entry(index).or_insert_with(|| Page::unwritten(step, index)).kept = true;
        }
    }

    /// Each of these pages may have a block or not.
    pub fn doubt(&mut self, pages: Range<u64>) {
        for (_, page) in self.pages.range_mut(pages.clone()) {
            page.kept = false;
        }
        self.surplus += pages.end.saturating_sub(pages.start);
    }

    /// The same pages have blocks that were allocated as in `other`.
    pub fn keep_as(&mut self, other: &Self) {
        for (index, _) in other.pages.iter().filter(|(_, page)| page.is_kept()) {
            self.keep(0, *index..*index + 1);
        }
        (self.surplus, self.was_small) = (other.surplus, other.was_small);
    }

    /// These pages are said to hold data, and the file to have so many blocks.
    pub fn holds(&mut self, data: impl IntoIterator<Item = Range<u64>>, blocks: u64) {
        let mut count = 0;
        for index in data.into_iter().flatten() {
            self.pages.entry(index).or_insert_with(|| Page::unwritten(0, index)).make_certain();
            count += 1;
        }
        self.surplus = blocks.saturating_sub(count);
        self.was_small = blocks < count;
        self.note_small();
    }

    /// Runs of pages that hold data.
    pub fn where_data_is(&self) -> Vec<Range<u64>> {
        let end = self.size.div_ceil(PAGE);
        let pages = self.pages.range(..end).filter(|(_, page)| page.has_data());
        pages.map(|(index, _)| *index..*index + 1).collect()
    }

    /// Pages that have a block because it was allocated.
    pub fn kept(&self) -> impl Iterator<Item = u64> + '_ {
        self.pages.iter().filter(|(_, page)| page.is_kept()).map(|(index, _)| *index)
    }

    /// Blocks of a file that is home.
    pub fn blocks(&self) -> u64 {
        self.pages.values().filter(|page| page.is_kept() || page.has_data()).count() as u64
    }
}
