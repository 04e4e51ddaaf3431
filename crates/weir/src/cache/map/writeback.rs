//! Writeback of the pages of one file: choosing, beginning, ending, and what the log has of them. See the module above for
//! the life of a page.

use super::{
    CHUNK_PAGES, DirtyRuns, Marks, PageMap, RunFilter, UNTORN_PAGES, Writeback, WritebackEnd,
    WritebackPage, bits, chunks_of, mask_in, split,
};
use std::collections::BTreeSet;
use std::ops::Range;

impl PageMap {
    /// Runs of dirty pages in `range`, in order, each of at most `max_pages` pages.
    pub fn dirty_runs(
        &self,
        range: Range<u64>,
        max_pages: u64,
        filter: RunFilter,
    ) -> DirtyRuns<'_> {
        DirtyRuns::new(self, range, max_pages, filter)
    }

    /// Marks the dirty pages of `range` as chosen by a sync, so that the sync does not chase pages
    /// dirtied after it began; returns how many are chosen now.
    pub fn mark_towrite(&mut self, range: Range<u64>) -> usize {
        let numbers: Vec<u64> = self.dirty_chunks.range(chunks_of(&range)).collect();
        let mut chosen = 0;
        for number in numbers {
            self.update(number, false, |chunk| {
                let mask = chunk.marks.dirty & mask_in(number, &range);
                chunk.marks.towrite |= mask;
                chosen += mask.count_ones() as usize;
            });
        }
        chosen
    }

    /// Begins writeback of every dirty page of `range` that is not under writeback already (one
    /// version of a page is on its way at a time). They are no longer dirty.
    pub fn begin_writeback(&mut self, range: Range<u64>) -> Writeback {
        let mut writeback = Writeback { token: self.new_token(), pages: Vec::new() };
        self.begin_selected(chunks_of(&range), &mut writeback, |marks, number| {
            marks.dirty & !marks.writeback & mask_in(number, &range)
        });
        writeback
    }

    /// As [`PageMap::begin_writeback`], for several `runs` in order, but never takes a part of what may be one write: of the
    /// pages that the log does not have, all that lie side by side in one unit of [`UNTORN_PAGES`] go together (also
    /// those outside of the run, but within `bounds`), or stay if one of them is under writeback. After the first run it ends
    /// before one that would make it more than `most_pages`. Answers how many runs it has been through, too.
    pub fn begin_writeback_untorn(
        &mut self,
        runs: &[Range<u64>],
        bounds: &Range<u64>,
        most_pages: u64,
    ) -> (Writeback, usize) {
        let pages: u64 = runs.iter().map(|run| run.end - run.start).sum();
        let pages = Vec::with_capacity(pages.min(most_pages) as usize);
        let mut writeback = Writeback { token: self.new_token(), pages };
        for (number, run) in runs.iter().enumerate() {
            if number > 0 && writeback.pages.len() as u64 + (run.end - run.start) > most_pages {
                debug_assert!(writeback.is_in_order());
                return (writeback, number);
            }
            let start = run.start / UNTORN_PAGES * UNTORN_PAGES;
            let end = run.end.saturating_add(UNTORN_PAGES - 1) / UNTORN_PAGES * UNTORN_PAGES;
            self.begin_selected(chunks_of(&(start..end)), &mut writeback, |marks, number| {
                let wanted = mask_in(number, run);
                let fresh = marks.dirty & !marks.logged & mask_in(number, bounds);
                let logged = marks.dirty & marks.logged & !marks.writeback & wanted;
                stretches(fresh)
                    .filter(|stretch| stretch & wanted != 0 && stretch & marks.writeback == 0)
                    .fold(logged, |taken, stretch| taken | stretch)
            });
        }
        debug_assert!(writeback.is_in_order());
        (writeback, runs.len())
    }

    /// Begins writeback of the pages that `select` names of each chunk: dirty ones, not under writeback.
    fn begin_selected(
        &mut self,
        chunks: Range<u64>,
        writeback: &mut Writeback,
        select: impl Fn(&Marks, u64) -> u64,
    ) {
        let mut next = self.dirty_chunks.range(chunks.clone()).next();
        while let Some(number) = next {
            self.update(number, false, |chunk| {
                let mask = select(&chunk.marks, number);
                for bit in bits(mask) {
                    let Some(page) = chunk.page(bit).cloned() else { continue };
                    chunk.set_token(bit, writeback.token);
                    writeback.pages.push(WritebackPage {
                        index: number * CHUNK_PAGES + u64::from(bit),
                        page,
                        logged_lsn: chunk.owed_lsn(bit),
                        is_logged: chunk.marks.logged & (1 << bit) != 0,
                    });
                }
                chunk.marks.dirty &= !mask;
                chunk.marks.towrite &= !mask;
                chunk.marks.relogged &= !mask;
                chunk.marks.mapped &= !mask;
                chunk.marks.in_place &= !mask;
                chunk.marks.writeback |= mask;
            });
            next = self.dirty_chunks.range(number + 1..chunks.end.max(number + 1)).next();
        }
    }

    /// The log has the mapping of these pages' versions on their way home: whoever makes that durable does so with the pages.
    pub fn note_mapped(&mut self, indices: impl Iterator<Item = u64>, token: u64) {
        self.note_under_way(indices, token, |marks| &mut marks.mapped);
    }

    /// These pages' versions on their way home are in the log, durably, and go to where the pages live.
    pub fn note_in_place(&mut self, indices: impl Iterator<Item = u64>, token: u64) {
        self.note_under_way(indices, token, |marks| &mut marks.in_place);
    }

    /// Sets a mark of those pages whose writeback has this token.
    fn note_under_way(
        &mut self,
        indices: impl Iterator<Item = u64>,
        token: u64,
        mark: impl Fn(&mut Marks) -> &mut u64,
    ) {
        for index in indices {
            let (number, bit) = split(index);
            let mask = 1_u64 << bit;
            self.update(number, false, |chunk| {
                if chunk.marks.writeback & mask != 0 && chunk.token(bit) == Some(token) {
                    *mark(&mut chunk.marks) |= mask;
                }
            });
        }
    }

    /// The page went into the log once more after the version on its way home was taken.
    pub fn is_relogged(&self, index: u64) -> bool {
        let (number, bit) = split(index);
        self.chunk(number).is_some_and(|chunk| chunk.marks.relogged & (1 << bit) != 0)
    }

    /// Ends the writeback of a page. When it failed the page is dirty again; when not, a debt of
    /// the log is paid, unless a newer version went into the log and is not home.
    pub fn end_writeback(&mut self, index: u64, token: u64, ok: bool) -> WritebackEnd {
        let (number, bit) = split(index);
        let mask = 1_u64 << bit;
        let ended = self.update(number, false, |chunk| {
            if chunk.marks.writeback & mask == 0 || chunk.token(bit) != Some(token) {
                return None;
            }
            let marks = &mut chunk.marks;
            marks.writeback &= !mask;
            let newly_dirty = !ok && marks.dirty & mask == 0;
            let paid = ok && marks.owed & mask != 0 && (marks.dirty & marks.relogged & mask == 0);
            marks.relogged &= !mask;
            marks.mapped &= !mask;
            marks.in_place &= !mask;
            if !ok {
                marks.dirty |= mask;
                // A sync or barrier that had chosen it must find it again.
                marks.towrite |= mask;
            }
            if paid {
                marks.logged &= !mask;
            }
            let home_lsn = if paid { chunk.pay(bit) } else { None };
            Some(WritebackEnd { stale: false, newly_dirty, home_lsn })
        });
        ended.flatten().unwrap_or(WritebackEnd { stale: true, ..WritebackEnd::default() })
    }

    /// Notes that the page's contents are in the log with `lsn`, and gives back the LSN of the
    /// older version that the log held, which is no longer owed. The page is dirty or under
    /// writeback (a clean one becomes dirty: it costs a write, and loses nothing); a page that is
    /// not in the map is ignored.
    pub fn set_logged(&mut self, index: u64, lsn: u64) -> Option<u64> {
        let (number, bit) = split(index);
        let mask = 1_u64 << bit;
        let older = self.update(number, false, |chunk| {
            let marks = &mut chunk.marks;
            if marks.present & mask == 0 {
                return None;
            }
            marks.dirty |= mask & !marks.writeback;
            marks.relogged |= mask & marks.writeback;
            marks.towrite &= !mask;
            marks.logged |= mask;
            Some(chunk.owe(bit, lsn))
        });
        debug_assert!(older.flatten().is_some(), "the caller logged a page of the map");
        older.flatten().flatten()
    }

    /// Pages of `range` whose newest version in the log is not home, with its LSN.
    pub fn logged(&self, range: Range<u64>) -> impl Iterator<Item = (u64, u64)> {
        let under_way = self.writeback_chunks.range(chunks_of(&range));
        let numbers: BTreeSet<u64> =
            self.dirty_chunks.range(chunks_of(&range)).chain(under_way).collect();
        numbers.into_iter().flat_map(move |number| {
            let chunk = self.chunk(number);
            let owed = chunk.map_or(0, |chunk| chunk.marks.owed & mask_in(number, &range));
            bits(owed).filter_map(move |bit| {
                Some((number * CHUNK_PAGES + u64::from(bit), chunk?.owed_lsn(bit)?))
            })
        })
    }
}

/// The runs of set bits of `fresh`, none of which crosses a multiple of [`UNTORN_PAGES`].
fn stretches(fresh: u64) -> impl Iterator<Item = u64> {
    let unit = u64::MAX >> (CHUNK_PAGES - UNTORN_PAGES);
    (0..CHUNK_PAGES / UNTORN_PAGES).flat_map(move |number| {
        let mut rest = fresh & (unit << (number * UNTORN_PAGES));
        std::iter::from_fn(move || {
            // Adding the lowest bit carries through its run.
            let lowest = rest & rest.wrapping_neg();
            let stretch = rest & !rest.wrapping_add(lowest);
            rest &= !stretch;
            (stretch != 0).then_some(stretch)
        })
    })
}
