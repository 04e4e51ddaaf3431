//! Walks the dirty pages of a map in order, as runs.

use super::chunk::CHUNK_PAGES;
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

/// Iterator of [`PageMap::dirty_runs`].
#[derive(Debug)]
pub struct DirtyRuns<'a> {
    map: &'a PageMap,
    /// What is left to look at.
    rest: Range<u64>,
    max_pages: u64,
    filter: RunFilter,
}

impl<'a> DirtyRuns<'a> {
    pub(super) fn new(
        map: &'a PageMap,
        range: Range<u64>,
        max_pages: u64,
        filter: RunFilter,
    ) -> Self {
        Self { map, rest: range, max_pages: max_pages.max(1), filter }
    }

    /// The selected pages of a chunk, among those left to look at.
    fn selected(&self, number: u64) -> u64 {
        let Some(chunk) = self.map.chunk(number) else { return 0 };
        let marks = &chunk.marks;
        let mut mask = marks.dirty & mask_in(number, &self.rest);
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

    /// First chunk with selected pages, and these.
    fn first(&self) -> Option<(u64, u64)> {
        let candidates = match self.filter.logged {
            LoggedFilter::NotLogged => &self.map.fresh_chunks,
            LoggedFilter::Any | LoggedFilter::OwedUpTo(_) => &self.map.dirty_chunks,
        };
        candidates.range(chunks_of(&self.rest)).find_map(|number| {
            let selected = self.selected(number);
            (selected != 0).then_some((number, selected))
        })
    }

    /// The run that starts with the first of the `selected` pages of chunk `number`.
    fn run(&self, mut number: u64, mut selected: u64) -> Range<u64> {
        let start = number * CHUNK_PAGES + u64::from(selected.trailing_zeros());
        let limit = start.saturating_add(self.max_pages).min(self.rest.end);
        let mut end = start;
        loop {
            let length = (selected >> (end % CHUNK_PAGES)).trailing_ones();
            end += u64::from(length);
            if length == 0 || end >= limit || !end.is_multiple_of(CHUNK_PAGES) {
                return start..end.min(limit);
            }
            number += 1;
            selected = self.selected(number);
        }
    }
}

impl Iterator for DirtyRuns<'_> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        let (number, selected) = self.first()?;
        let run = self.run(number, selected);
        self.rest.start = run.end;
        Some(run)
    }
}
