//! What goes home together and settles in one operation: dirty pages of one inode, in one run or several.
//!
//! Scattered pages are gathered into one piece, because an operation of its own for each costs far more than the page: locks,
//! the inode's item, a place in the log, a wake-up.

use super::super::extents::Piece as Mapped;
use super::super::homes::Replaceable;
use crate::alloc::{Allocator, Run};
use crate::cache::map::{PageMap, UNTORN_PAGES, Writeback, WritebackPage};
use crate::engine::Engine;
use crate::error::{Error, PANICKED};
use crate::format::item::Extent;
use crate::format::{GROUP_BLOCKS, MAX_WRITTEN_EXTENT_BLOCKS, checksum};
use crate::inode::Inode;
use crate::log::Admission;
use crate::mutation::{self, Mutation};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Weak, is_panicking};
use crate::txn::Op;
use crate::txn::mapping_moments::MappingMoment;
use std::iter;
use std::ops::Range;

/// Most pages of one piece: 1 MiB, a good request for any disk.
pub const PIECE_PAGES: u64 = 256;
/// Lists of runs begin with room for so many.
pub const USUAL_RUNS: usize = 16;
/// Most runs of one piece.
const PIECE_RUNS: usize = 128;
/// Log space for settling anything. Extents that are cut leave checksums of up to [`CUT_BYTES`]; what few pages need
/// besides fits into one block with the frame's header.
const SETTLE_BYTES: usize = 3000;
/// Of those, for what is left of extents that are cut.
pub(super) const CUT_BYTES: usize = 2048;
/// Of a part of an extent that is left, beside its checksums.
const CUT_HEAD_BYTES: usize = 64;
const CHECKSUM_BYTES: usize = 4;
/// Log space for another page.
const PAGE_BYTES: usize = 56;
/// Log space for another run: its allocation, its extent, and that the log owes it no longer.
const RUN_BYTES: usize = 144;
/// Most that a page that is placed apart from its neighbours can take, and another run that cuts extents.
const WORST_PAGE_BYTES: usize = 256;
const WORST_RUN_BYTES: usize = RUN_BYTES + CUT_BYTES;

/// Log space for settling `pages` pages in `runs` runs. What this lacks comes from the checkpoint's share.
pub fn settle_bytes(pages: u64, runs: usize) -> usize {
    SETTLE_BYTES + PAGE_BYTES * pages as usize + RUN_BYTES * runs.saturating_sub(1)
}

/// What that lacks at most where `runs`, which settle in one operation, cut extents of blocks that are written: each run may leave two parts, and
/// the second is put again by the next run that cuts it.
pub fn cut_bytes(runs: &[Range<u64>]) -> usize {
    // One page lies in one extent, others may begin in one and end in another.
    let extents: usize = runs.iter().map(|run| if run.end - run.start == 1 { 1 } else { 2 }).sum();
    let checksums = extents * MAX_WRITTEN_EXTENT_BLOCKS as usize * CHECKSUM_BYTES;
    (checksums + 2 * CUT_HEAD_BYTES * runs.len()).saturating_sub(CUT_BYTES)
}

/// How much one operation can settle. Pure.
#[derive(Debug, Clone, Copy)]
pub struct PieceLimits {
    max_operation_bytes: usize,
}

impl PieceLimits {
    /// Where an operation may have records of so many bytes.
    pub fn new(max_operation_bytes: usize) -> Self {
        Self { max_operation_bytes }
    }

    /// Pages of a piece.
    pub fn pages(self) -> u64 {
        (self.max_operation_bytes / WORST_PAGE_BYTES).clamp(1, PIECE_PAGES as usize) as u64
    }

    fn holds(self, pages: u64, runs: usize) -> bool {
        let worst = SETTLE_BYTES
            + WORST_PAGE_BYTES * pages as usize
            + WORST_RUN_BYTES * runs.saturating_sub(1);
        pages <= self.pages() && runs <= PIECE_RUNS && worst <= self.max_operation_bytes
    }

    /// The first of `runs` (each of at most [`Self::pages`] pages) that may settle together. One that is as long as it may be
    /// ends between two units, within which writes are not torn.
    pub fn first_of(self, runs: impl Iterator<Item = Range<u64>>) -> Vec<Range<u64>> {
        let limit = self.pages();
        let mut taken = Vec::with_capacity(USUAL_RUNS);
        let mut pages = 0;
        for run in runs {
            let length = run.end - run.start;
            if taken.is_empty() {
                let first = cut_between_units(run, limit);
                pages = first.end - first.start;
                taken.push(first);
                if pages < length {
                    break;
                }
            } else if self.holds(pages + length, taken.len() + 1) {
                pages += length;
                taken.push(run);
            } else {
                break;
            }
            if pages >= limit {
                break;
            }
        }
        taken
    }
}

/// A run as long as the limit goes on: it ends between two units.
fn cut_between_units(run: Range<u64>, limit: u64) -> Range<u64> {
    let end = run.end / UNTORN_PAGES * UNTORN_PAGES;
    if run.end - run.start < limit || end <= run.start { run } else { run.start..end }
}

/// How a page finds its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    New,
    Unwritten,
    /// In place.
    Same,
}

/// Consecutive pages that go to consecutive blocks.
#[derive(Debug, Clone)]
pub(super) struct Segment {
    /// Place of the first page in the piece.
    pub(super) first: usize,
    pub(super) pages: usize,
    pub(super) block: u64,
    pub(super) place: Place,
}

impl Segment {
    pub(super) fn run(&self) -> Run {
        Run { start: self.block, blocks: self.pages as u64 }
    }

    /// `next` goes on where this ends, on the device.
    fn is_before(&self, next: &Self) -> bool {
        self.block + self.pages as u64 == next.block
            && self.block / GROUP_BLOCKS == next.block / GROUP_BLOCKS
    }

    /// And among the pages.
    fn adjoins(&self, next: &Self) -> bool {
        self.first + self.pages == next.first && self.is_before(next)
    }
}

/// Dirty pages of one inode on their way home. See the module's head.
pub struct Piece {
    pub(super) engine: Weak<Engine>,
    pub inode: Arc<Inode>,
    pub(super) admission: Option<Admission>,
    pub(super) token: u64,
    /// In order of index.
    pub(super) pages: Vec<WritebackPage>,
    /// The runs of consecutive ones, as places among them.
    pub(super) runs: Vec<Range<usize>>,
    /// Of the pages, once [`Piece::sum`] has been called.
    pub(super) checksums: Vec<u32>,
    /// In order of the pages; none reaches from one run into another.
    pub(super) segments: Vec<Segment>,
    /// The file was this long when the pages were taken.
    pub(super) size: u64,
    pub(super) into_inode: bool,
    /// What each run replaces, as long as the file is mapped as it was at that moment.
    pub(super) replaceable: Option<(MappingMoment, Vec<Replaceable>)>,
    /// Blocks for the next piece of the batch.
    pub(super) spare: Option<Spare>,
    pub(super) failed: Option<Error>,
    /// Its pages are not under writeback any more.
    pub(super) ended: AtomicBool,
}

/// Blocks that were allocated for several small pieces, so that they lie side by side and leave in few writes: what none has taken yet. Nobody else has
/// heard of them; dropping it gives them back.
pub(super) struct Spare {
    alloc: Arc<Allocator>,
    run: Run,
}

impl Spare {
    pub(super) fn new(alloc: Arc<Allocator>, run: Run) -> Self {
        Self { alloc, run }
    }

    /// Up to `blocks` of it; none when it is used up.
    pub(super) fn take(&mut self, blocks: u64) -> Run {
        let blocks = blocks.min(self.run.blocks);
        let taken = Run { start: self.run.start, blocks };
        self.run = Run { start: taken.end(), blocks: self.run.blocks - blocks };
        taken
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        if self.run.blocks > 0 {
            self.alloc.cancel(self.run);
        }
    }
}

/// A thread that panics gives its pages back: others wait until they are not under writeback any more. The volume is shut down, so
/// the blocks that they were to get, and what is counted of them, do not matter.
impl Drop for Piece {
    fn drop(&mut self) {
        // Whoever unwinds may have ended others in good order.
        if !is_panicking() || self.ended.load(Ordering::Acquire) {
            return;
        }
        if let Some(engine) = self.engine.upgrade() {
            engine.shut_down(PANICKED);
        }
        let mut pages = self.inode.pages.write();
        for page in &self.pages {
            pages.end_writeback(page.index, self.token, false);
        }
        drop(pages);
        self.inode.io_ended();
    }
}

impl Piece {
    /// Pages of `inode`, at least one, that were just taken; nothing is decided yet.
    pub(super) fn new(
        engine: Weak<Engine>,
        inode: Arc<Inode>,
        admission: Admission,
        writeback: Writeback,
        size: u64,
    ) -> Self {
        let runs = runs_of(&writeback.pages);
        Self {
            engine,
            inode,
            admission: Some(admission),
            token: writeback.token,
            pages: writeback.pages,
            runs,
            checksums: Vec::new(),
            segments: Vec::new(),
            size,
            into_inode: false,
            replaceable: None,
            spare: None,
            failed: None,
            ended: AtomicBool::new(false),
        }
    }

    /// Computes the checksums. What is under writeback does not change (a writer gets a copy), so this needs no lock.
    pub(super) fn sum(&mut self) {
        self.checksums = self.pages.iter().map(|page| checksum(&page.page)).collect();
    }

    /// File block of the first page.
    pub(super) fn first(&self) -> u64 {
        self.pages[0].index
    }

    /// File block behind the last page.
    pub(super) fn end(&self) -> u64 {
        self.pages[self.pages.len() - 1].index + 1
    }

    /// The file blocks of a run.
    pub(super) fn file_blocks(&self, run: &Range<usize>) -> Range<u64> {
        let start = self.pages[run.start].index;
        start..start + run.len() as u64
    }

    /// The segments of a run.
    pub(super) fn segments_of(&self, run: &Range<usize>) -> &[Segment] {
        let from = self.segments.partition_point(|segment| segment.first < run.start);
        let to = self.segments.partition_point(|segment| segment.first < run.end);
        &self.segments[from..to]
    }

    /// The checksums of a segment's pages.
    pub(super) fn checksums_of(&self, segment: &Segment) -> &[u32] {
        &self.checksums[segment.first..segment.first + segment.pages]
    }

    /// The pages that are written to where they live.
    pub(super) fn indices_in_place(&self) -> impl Iterator<Item = u64> {
        let stay = self.segments.iter().filter(|segment| segment.place == Place::Same);
        stay.flat_map(|segment| &self.pages[segment.first..segment.first + segment.pages])
            .map(|page| page.index)
    }

    /// The pages that have gone into the log once more since they were taken, in order.
    pub(super) fn newer_in_log(&self, pages: &PageMap) -> Vec<u64> {
        if mutation::active(Mutation::SettleNewer) {
            return Vec::new();
        }
        self.indices_in_place().filter(|&index| pages.is_relogged(index)).collect()
    }

    /// The file blocks of which the log has nothing any more that is not home when this has settled: of runs that it had something of, all
    /// but `newer`.
    pub(super) fn settled(&self, newer: &[u64]) -> Vec<Range<u64>> {
        let mut settled: Vec<Range<u64>> = Vec::new();
        for run in self.runs.iter().filter(|run| self.is_owed(run)) {
            let Range { start, end } = self.file_blocks(run);
            let mut from = start;
            for &index in newer.iter().filter(|index| (start..end).contains(index)) {
                settled.push(from..index);
                from = index + 1;
            }
            settled.push(from..end);
        }
        settled.retain(|blocks| !blocks.is_empty());
        settled
    }

    /// Of some page of the run the log has, or had, a version that is not home.
    pub(super) fn is_owed(&self, run: &Range<usize>) -> bool {
        self.pages[run.clone()].iter().any(|page| page.logged_lsn.is_some())
    }

    /// The extents of a run: segments that lie side by side in one group become one.
    pub(super) fn extents_of(&self, run: &Range<usize>) -> impl Iterator<Item = (u64, Extent)> {
        joined(self.segments_of(run).iter()).map(|segment| {
            let file_block = self.pages[segment.first].index;
            let checksums = self.checksums_of(&segment).to_vec();
            let blocks = segment.pages as u64;
            (file_block, Extent { block: segment.block, blocks, checksums })
        })
    }

    /// Where the pages of the run live stays as it is.
    pub(super) fn is_in_place(&self, run: &Range<usize>) -> bool {
        self.segments_of(run).iter().all(|segment| segment.place == Place::Same)
    }

    /// Tells `op` what was allocated, and what was written elsewhere than in place: neighbours on the device together, whatever their order in the
    /// file.
    pub(super) fn note_written(&self, op: &mut Op) {
        let anew = self.runs.iter().filter(|run| !self.is_in_place(run));
        let mut written: Vec<&Segment> = Vec::with_capacity(self.segments.len());
        written.extend(anew.flat_map(|run| self.segments_of(run)));
        written.sort_unstable_by_key(|segment| segment.block);
        let mut checksums = Vec::new();
        for side_by_side in written.chunk_by(|segment, next| segment.is_before(next)) {
            for new in side_by_side.chunk_by(|segment, next| segment.place == next.place) {
                let blocks = new.iter().map(|segment| segment.pages as u64).sum();
                if new[0].place == Place::New {
                    op.allocated(Run { start: new[0].block, blocks });
                }
            }
            checksums.clear();
            for segment in side_by_side {
                checksums.extend_from_slice(self.checksums_of(segment));
            }
            op.wrote(side_by_side[0].block, &checksums);
        }
    }
}

/// The runs of consecutive pages, as places in `pages`.
fn runs_of(pages: &[WritebackPage]) -> Vec<Range<usize>> {
    let mut start = 0;
    let chunks = pages.chunk_by(|page, next| page.index + 1 == next.index);
    let mut runs = Vec::with_capacity(USUAL_RUNS.min(pages.len()));
    runs.extend(chunks.map(|chunk| {
        start += chunk.len();
        start - chunk.len()..start
    }));
    runs
}

/// Neighbouring segments that lie side by side become one.
fn joined<'a>(segments: impl Iterator<Item = &'a Segment>) -> impl Iterator<Item = Segment> {
    let mut rest = segments.peekable();
    iter::from_fn(move || {
        let mut whole = rest.next()?.clone();
        while let Some(next) = rest.next_if(|next| whole.adjoins(next)) {
            whole.pages += next.pages;
        }
        Some(whole)
    })
}

/// Frees what `old` maps in `range`.
pub(super) fn free_overlap(op: &mut Op, old: &[Mapped], range: &Range<u64>) {
    for part in old {
        let start = part.file_block.max(range.start);
        let end = part.end().min(range.end);
        if start < end {
            op.freed(Run { start: part.block + (start - part.file_block), blocks: end - start });
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// What settles together is the beginning of what there is, at least one run of it, and fits one operation.
        #[test]
        fn a_piece_takes_as_many_runs_as_one_operation_holds(
            max_operation_bytes in 4096..4_000_000_usize,
            lengths in prop::collection::vec((1..300_u64, 1..40_u64), 1..200),
        ) {
            let limits = PieceLimits::new(max_operation_bytes);
            let mut at = 0;
            let mut runs = Vec::new();
            for (length, gap) in lengths {
                let start = at + gap;
                at = start + length.min(limits.pages());
                runs.push(start..at);
            }
            let taken = limits.first_of(runs.iter().cloned());
            prop_assert!(!taken.is_empty());
            prop_assert_eq!(&taken[1..], &runs[1..taken.len()]);
            prop_assert_eq!(taken[0].start, runs[0].start);
            let pages: u64 = taken.iter().map(|run| run.end - run.start).sum();
            prop_assert!(pages <= limits.pages());
            if taken[0] != runs[0] {
                prop_assert!(taken[0].end < runs[0].end && taken.len() == 1);
                prop_assert_eq!(taken[0].end % UNTORN_PAGES, 0);
            }
            if taken.len() > 1 {
                prop_assert!(limits.holds(pages, taken.len()));
            }
            if let Some(next) = runs.get(taken.len()).filter(|_| taken[0] == runs[0]) {
                let more = pages + next.end - next.start;
                prop_assert!(pages >= limits.pages() || !limits.holds(more, taken.len() + 1));
            }
        }
    }

    #[test]
    fn runs_of_pages_end_where_an_index_is_missing() {
        let pool = crate::cache::page::PagePool::new(64 * 4096);
        let page = |index| WritebackPage {
            index,
            page: pool.alloc_zeroed().expect("a page").freeze(),
            logged_lsn: None,
            is_logged: false,
        };
        let pages: Vec<WritebackPage> = [3, 4, 5, 9, 11, 12].into_iter().map(page).collect();
        assert_eq!(runs_of(&pages), [0..3, 3..4, 4..6]);
        assert_eq!(runs_of(&[]), []);
    }
}
