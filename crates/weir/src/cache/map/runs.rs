//! Walks the dirty pages of a map in order, as runs.

use super::chunk::CHUNK_PAGES;
use super::chunk_set::ChunkRange;
use super::{PageMap, chunks_of, mask_in};
use std::ops::Range;

/// Which pages, by what the log holds of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LoggedFilter {
    /// All of them.
    #[default]
    Any,
    /// Only pages whose contents are not in the log: what an fsync still has to make durable.
    NotLogged,
    /// Only pages with a version in the log of this LSN or older that is not home: what keeps
    /// the log from reusing its space.
    OwedUpTo(u64),
}

/// Which dirty pages [`PageMap::dirty_runs`] lists.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RunFilter {
    /// By what the log holds.
    pub logged: LoggedFilter,
    /// Only pages chosen by [`PageMap::mark_towrite`].
    pub only_towrite: bool,
    /// Not pages of which an older version is on its way home ([`PageMap::begin_writeback`] would
    /// not take them).
    pub skip_writeback: bool,
}

/// Iterator of [`PageMap::dirty_runs`]: looks at each chunk once.
#[derive(Debug)]
pub struct DirtyRuns<'a> {
    map: &'a PageMap,
    range: Range<u64>,
    max_pages: u64,
    filter: RunFilter,
    /// The chunks that are still to be looked at.
    chunks: ChunkRange<'a>,
    /// The chunk that was looked at last.
    number: u64,
    /// Its selected pages that no run has had yet.
    left: u64,
}

impl<'a> DirtyRuns<'a> {
    pub(super) fn new(
        map: &'a PageMap,
        range: Range<u64>,
        max_pages: u64,
        filter: RunFilter,
    ) -> Self {
        let candidates = match filter.logged {
            LoggedFilter::NotLogged => &map.fresh_chunks,
            LoggedFilter::Any | LoggedFilter::OwedUpTo(_) => &map.dirty_chunks,
        };
        let chunks = candidates.range(chunks_of(&range));
        Self { map, range, max_pages: max_pages.max(1), filter, chunks, number: 0, left: 0 }
    }

    /// The selected pages of a chunk.
    fn selected(&self, number: u64) -> u64 {
        let Some(chunk) = self.map.chunk(number) else { return 0 };
        let marks = &chunk.marks;
        let mut mask = marks.dirty & mask_in(number, &self.range);
        if self.filter.only_towrite {
            mask &= marks.towrite;
        }
        if self.filter.skip_writeback {
            mask &= !marks.writeback;
        }
        match self.filter.logged {
            LoggedFilter::Any => mask,
            LoggedFilter::NotLogged => mask & !marks.logged,
            LoggedFilter::OwedUpTo(lsn) if mask & marks.owed != 0 => chunk.owed_up_to(lsn) & mask,
            LoggedFilter::OwedUpTo(_) => 0,
        }
    }

    /// Looks at the next chunk, if there is one. Nothing may be left of the last.
    fn advance(&mut self) -> Option<()> {
        self.number = self.chunks.next()?;
        self.left = self.selected(self.number);
        Some(())
    }
}

impl Iterator for DirtyRuns<'_> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        while self.left == 0 {
            self.advance()?;
        }
        let start = self.number * CHUNK_PAGES + u64::from(self.left.trailing_zeros());
        let limit = start.saturating_add(self.max_pages);
        let mut end = start;
        loop {
            let length = u64::from((self.left >> (end % CHUNK_PAGES)).trailing_ones());
            let taken = end..limit.min(end + length);
            self.left &= !mask_in(self.number, &taken);
            end = taken.end;
            // The run goes on if it fills its chunk, and the next begins with selected pages.
            if taken.is_empty() || end == limit || !end.is_multiple_of(CHUNK_PAGES) {
                return Some(start..end);
            }
            if self.advance().is_none() || self.number * CHUNK_PAGES != end {
                return Some(start..end);
            }
        }
    }
}
