//! What the operations of a [`PageMap`](super::PageMap) take and answer.

use super::super::page::PageRef;
use std::ops::Range;

/// Exact numbers of pages in each state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Pages in the map.
    pub present: usize,
    /// Reads under way.
    pub reading: usize,
    /// Pages with contents that are neither home nor on their way.
    pub dirty: usize,
    /// Pages with a version on its way home.
    pub writeback: usize,
    /// Pages whose newest version in the log is not home.
    pub owed: usize,
}

/// What [`super::PageMap::begin_read`] found missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadPlan {
    /// For [`super::PageMap::finish_read`] and [`super::PageMap::abort_read`].
    pub token: u64,
    /// Absent pages, now marked as reading, in order, as maximal runs.
    pub runs: Vec<Range<u64>>,
}

/// A page under writeback.
#[derive(Debug)]
pub struct WritebackPage {
    /// Where in the file.
    pub index: u64,
    /// The contents to write; nobody changes them.
    pub page: PageRef,
    /// LSN of the newest version in the log, when one is owed to home.
    pub logged_lsn: Option<u64>,
    /// True when these contents are that version.
    pub is_logged: bool,
}

/// What [`super::PageMap::begin_writeback`] selected.
#[derive(Debug)]
pub struct Writeback {
    /// For [`super::PageMap::end_writeback`].
    pub token: u64,
    /// In order of index.
    pub pages: Vec<WritebackPage>,
}

impl Writeback {
    pub(super) fn is_in_order(&self) -> bool {
        self.pages.is_sorted_by(|before, page| before.index < page.index)
    }
}

/// What [`super::PageMap::end_writeback`] did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WritebackEnd {
    /// The page was removed meanwhile; nothing was changed.
    pub stale: bool,
    /// The page was clean but for this writeback, which failed: it is dirty again.
    pub newly_dirty: bool,
    /// A debt of the log that was paid: the LSN need not be kept for this page any more (once the
    /// device was flushed).
    pub home_lsn: Option<u64>,
}

/// What putting a page into the map changed.
#[derive(Debug, Default)]
pub struct Inserted {
    /// The page was not dirty before, and is now.
    pub newly_dirty: bool,
    /// No page of the chunk was in the map before: a new key for the eviction policy.
    pub new_chunk: bool,
    /// The page that was there; best dropped after unlocking.
    pub replaced: Option<PageRef>,
}

/// Why [`super::PageMap::page_for_write`] has no page to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteRefused {
    /// The page is not in the map.
    Absent,
    /// The page is being read.
    Reading,
    /// The page is shared, and there was no memory for a clone.
    NoMemory,
}

/// Whether a writer needs the old contents of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OldContents {
    /// Part of the page is written.
    Keep,
    /// All of the page is overwritten: a clone need not copy.
    Discard,
}

/// A page that may be written.
#[derive(Debug)]
pub struct Writable<'a> {
    /// The contents.
    pub bytes: &'a mut [u8],
    /// The page was not dirty before, and is now.
    pub newly_dirty: bool,
}

/// What [`super::PageMap::remove_range`] took out.
#[derive(Debug, Default)]
pub struct Removed {
    /// Dirty pages among them.
    pub dirty: usize,
    /// Pages under writeback among them; their ends will be stale.
    pub writeback: usize,
    /// Index and LSN of every debt of the log that is void now.
    pub logged: Vec<(u64, u64)>,
    /// The pages; best dropped after unlocking.
    pub pages: Vec<PageRef>,
}

/// Everything known about one page, for diagnosis and tests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "one flag per mark, nothing else")]
pub struct PageState {
    /// In the map.
    pub present: bool,
    /// Being read.
    pub reading: bool,
    /// Newer than home.
    pub dirty: bool,
    /// A version is on its way home.
    pub writeback: bool,
    /// Contents equal the log's.
    pub logged: bool,
    /// Chosen by a sync under way.
    pub towrite: bool,
    /// LSN of the newest version in the log that is not home.
    pub logged_lsn: Option<u64>,
    /// Hits since it came or was cooled, at most 3.
    pub heat: u8,
}
