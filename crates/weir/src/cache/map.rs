//! The pages of one file: a sparse map from page index to page, with marks.
//!
//! The map has no lock of its own. The owner wraps it in a read-write lock: a read hit is
//! [`PageMap::get`] under the shared lock, everything that changes the map takes it exclusively.
//!
//! Page indices are below 2^52 (the largest file is 8 EiB).
//!
//! **Shape.** 64 consecutive pages form a chunk; marks are bit masks of a chunk, so walking dirty
//! pages costs a few instructions per chunk. Chunks near the start of the file are in a vector
//! that is at least about one third full (one load finds a chunk of a densely cached file), all
//! others in an ordered map: memory is proportional to what is cached, not to the file's size. As long as a file has only its first
//! chunk, as most do, that needs no vector: the vector's chunks begin cache lines, which is dear to allocate.
//!
//! **Life of a page.** Absent → *reading* ([`PageMap::begin_read`]) → clean → *dirty* (a write) →
//! *writeback* ([`PageMap::begin_writeback`]) → clean. A write during writeback makes the page dirty
//! as well; the version on its way is a page of its own then and does not change. A dirty page whose
//! contents went into the log is *logged*, and still dirty: the log *owes* it to home. The debt has
//! the LSN of the newest version in the log and stays when the page is written again (it is then
//! dirty, owed and no longer logged), until some version at least as new is home.
//!
//! **Tokens.** A read or a writeback is ended with the token it began with. When the page was
//! replaced or removed meanwhile (an overwrite, a truncation), the token no longer matches and the
//! end changes nothing.
//!
//! **Invariants** (checked by `check`): reading excludes present; dirty, writeback and owed need a
//! page; owed pages are dirty or under writeback; logged pages are owed; pages to be written are
//! dirty; the counts and indexes equal the bits.

mod chunk;
mod chunk_set;
mod runs;
#[cfg(test)]
mod tests;
mod types;
mod writeback;

use super::page::{PageMut, PagePool, PageRef};
use chunk::{CHUNK_PAGES, Chunk, Marks, bits};
use chunk_set::ChunkSet;
pub use runs::{DirtyRuns, LoggedFilter, RunFilter};
use std::collections::BTreeMap;
use std::ops::Range;
pub use types::{
    Counts, Inserted, OldContents, PageState, ReadPlan, Removed, Writable, WriteRefused, Writeback,
    WritebackEnd, WritebackPage,
};

/// Aligned units of pages within which writeback never tears a write apart: 128 KiB, a part of a chunk.
pub const UNTORN_PAGES: u64 = 32;
const _: () = assert!(CHUNK_PAGES.is_multiple_of(UNTORN_PAGES));
/// The vector of chunks reaches to this many chunks beyond twice the number of live chunks.
const DENSE_SLACK: usize = 8;
/// A vector shorter than this is never made shorter.
const DENSE_KEEP: usize = 64;

/// See the module's head.
#[derive(Debug, Default)]
pub struct PageMap {
    /// Chunks `0..dense.len()`, vacant ones included.
    dense: Vec<Line>,
    /// Chunk 0, while `dense` is empty; never vacant.
    first: Option<Box<Chunk>>,
    /// Chunks from `dense.len()` on; never vacant.
    sparse: BTreeMap<u64, Box<Chunk>>,
    /// Chunks that are not vacant.
    live: usize,
    /// Chunks with dirty pages.
    dirty_chunks: ChunkSet,
    /// Those of them with pages whose contents the log does not have: few, where many dirty ones are logged. What a sync walks.
    fresh_chunks: ChunkSet,
    /// Chunks with pages under writeback.
    writeback_chunks: ChunkSet,
    /// Those of them with pages whose contents the log does not have: what a sync waits for.
    awaited_chunks: ChunkSet,
    counts: Counts,
    last_token: u64,
}

/// A chunk in the vector: what a hit touches (its first three fields) is one cache line.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Line(Chunk);

/// Chunk and bit of a page.
#[inline]
fn split(index: u64) -> (u64, u32) {
    (index / CHUNK_PAGES, (index % CHUNK_PAGES) as u32)
}

/// The bits of chunk `number` that lie in `range`.
fn mask_in(number: u64, range: &Range<u64>) -> u64 {
    let base = number * CHUNK_PAGES;
    let low = range.start.saturating_sub(base).min(CHUNK_PAGES);
    let high = range.end.saturating_sub(base).min(CHUNK_PAGES);
    if low >= high { 0 } else { (u64::MAX >> (CHUNK_PAGES - (high - low))) << low }
}

/// The chunks that `range` touches.
fn chunks_of(range: &Range<u64>) -> Range<u64> {
    if range.is_empty() {
        return 0..0;
    }
    range.start / CHUNK_PAGES..(range.end - 1) / CHUNK_PAGES + 1
}

/// Adds what a mark's change from `before` to `after` means for its `count`.
fn recount(count: &mut usize, before: u64, after: u64) {
    let changed = before ^ after;
    if changed == 0 {
        return;
    }
    // The usual case of one page needs no population count (a function call without the instruction).
    if changed.is_power_of_two() {
        if after & changed != 0 {
            *count += 1;
        } else {
            *count -= 1;
        }
    } else {
        *count = *count + after.count_ones() as usize - before.count_ones() as usize;
    }
}

/// Keeps `index` the set of chunks whose mark is not empty.
fn reindex(index: &mut ChunkSet, number: u64, before: u64, after: u64) {
    match (before == 0, after == 0) {
        (true, false) => index.insert(number),
        (false, true) => index.remove(number),
        _ => {}
    }
}

impl PageMap {
    /// An empty map; allocates nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Exact numbers of pages in each state.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Pages whose newest version in the log is not home.
    pub fn logged_count(&self) -> usize {
        self.counts.owed
    }

    /// Bytes of memory the map uses besides the pages.
    pub fn memory_bytes(&self) -> usize {
        let boxed = self.sparse.len() + usize::from(self.first.is_some());
        self.dense.capacity() * size_of::<Line>()
            + boxed * size_of::<Chunk>()
            + self.chunks_in(0..u64::MAX).map(|(_, chunk)| chunk.extra_bytes()).sum::<usize>()
    }

    // --- Chunks -------------------------------------------------------------------------------

    #[inline]
    fn chunk(&self, number: u64) -> Option<&Chunk> {
        if number < self.dense.len() as u64 {
            return Some(&self.dense[number as usize].0);
        }
        if number == 0 {
            return self.first.as_deref();
        }
        self.sparse.get(&number).map(|chunk| &**chunk)
    }

    #[inline]
    fn chunk_mut(&mut self, number: u64) -> Option<&mut Chunk> {
        if number < self.dense.len() as u64 {
            return Some(&mut self.dense[number as usize].0);
        }
        if number == 0 {
            return self.first.as_deref_mut();
        }
        self.sparse.get_mut(&number).map(|chunk| &mut **chunk)
    }

    /// The chunks with these numbers that exist, vacant ones of the vector included, in order.
    fn chunks_in(&self, numbers: Range<u64>) -> impl Iterator<Item = (u64, &Chunk)> {
        let dense = numbers.start..numbers.end.min(self.dense.len() as u64);
        let first = self.first.as_deref().filter(|_| numbers.contains(&0));
        dense
            .map(|number| (number, &self.dense[number as usize].0))
            .chain(first.map(|chunk| (0, chunk)))
            .chain(self.sparse.range(numbers).map(|(&number, chunk)| (number, &**chunk)))
    }

    /// How long the vector may be for the number of live chunks.
    fn dense_limit(&self) -> u64 {
        (2 * self.live + DENSE_SLACK) as u64
    }

    fn chunk_or_create(&mut self, number: u64) -> &mut Chunk {
        if number >= self.dense.len() as u64 {
            if number == 0 {
                return self.first.get_or_insert_default();
            }
            if number >= self.dense_limit() {
                return self.sparse.entry(number).or_default();
            }
            self.grow_dense(number);
        }
        &mut self.dense[number as usize].0
    }

    /// Lengthens the vector to hold chunk `number`, and takes in what the limit allows.
    fn grow_dense(&mut self, number: u64) {
        let stray = self.sparse.range(..self.dense_limit()).next_back();
        let last = stray.map_or(number, |(&stray, _)| stray.max(number));
        let len = last as usize + 1;
        if len <= 2 {
            // Most files are small: no room for growth that does not come.
            self.dense.reserve_exact(len - self.dense.len());
        }
        self.dense.resize_with(len, Line::default);
        if let Some(first) = self.first.take() {
            self.dense[0] = Line(*first);
        }
        while let Some(entry) = self.sparse.first_entry()
            && *entry.key() <= last
        {
            let (stray, chunk) = entry.remove_entry();
            self.dense[stray as usize] = Line(*chunk);
        }
    }

    /// Shortens a vector that has become mostly vacant.
    fn shrink_dense(&mut self) {
        if self.dense.len() < DENSE_KEEP || self.live * 8 > self.dense.len() {
            return;
        }
        let keep = self.dense_limit() as usize;
        for (place, Line(chunk)) in self.dense.drain(keep..).enumerate() {
            if !chunk.marks.is_vacant() {
                self.sparse.insert((keep + place) as u64, Box::new(chunk));
            }
        }
        self.dense.shrink_to(2 * keep);
    }

    /// The one way to change a chunk's marks: keeps counts and indexes exact. `None` when the
    /// chunk does not exist and is not to be created.
    #[inline]
    fn update<R>(
        &mut self,
        number: u64,
        create: bool,
        change: impl FnOnce(&mut Chunk) -> R,
    ) -> Option<R> {
        let chunk = if create { self.chunk_or_create(number) } else { self.chunk_mut(number)? };
        let before = chunk.marks;
        let result = change(chunk);
        let after = chunk.marks;
        if before != after {
            if (before.reading | before.writeback) != 0 {
                chunk.release_tokens();
            }
            self.account(number, before, after);
        }
        Some(result)
    }

    fn account(&mut self, number: u64, before: Marks, after: Marks) {
        recount(&mut self.counts.present, before.present, after.present);
        recount(&mut self.counts.reading, before.reading, after.reading);
        recount(&mut self.counts.dirty, before.dirty, after.dirty);
        recount(&mut self.counts.writeback, before.writeback, after.writeback);
        recount(&mut self.counts.owed, before.owed, after.owed);
        reindex(&mut self.dirty_chunks, number, before.dirty, after.dirty);
        reindex(&mut self.fresh_chunks, number, before.fresh(), after.fresh());
        reindex(&mut self.writeback_chunks, number, before.writeback, after.writeback);
        reindex(&mut self.awaited_chunks, number, before.awaited(), after.awaited());
        match (before.is_vacant(), after.is_vacant()) {
            (true, false) => self.live += 1,
            (false, true) => {
                self.live -= 1;
                if number < self.dense.len() as u64 {
                    self.dense[number as usize] = Line::default();
                } else if number == 0 {
                    self.first = None;
                } else {
                    self.sparse.remove(&number);
                }
                self.shrink_dense();
            }
            _ => {}
        }
    }

    /// Numbers of the chunks that exist and may have pages in `range`.
    fn existing_chunks(&self, range: &Range<u64>) -> Vec<u64> {
        self.chunks_in(chunks_of(range))
            .filter(|(_, chunk)| !chunk.marks.is_vacant())
            .map(|(number, _)| number)
            .collect()
    }

    // --- Lookup -------------------------------------------------------------------------------

    /// The page, noting a hit for the eviction policy. The fast path of a read.
    #[inline]
    pub fn get(&self, index: u64) -> Option<&PageRef> {
        let (number, bit) = split(index);
        let chunk = self.chunk(number)?;
        let page = chunk.page(bit)?;
        chunk.touch(bit);
        Some(page)
    }

    /// The page, without noting a hit: for writeback, and for a read that goes on in the page
    /// where the handle's last read ended.
    #[inline]
    pub fn peek(&self, index: u64) -> Option<&PageRef> {
        let (number, bit) = split(index);
        self.chunk(number)?.page(bit)
    }

    /// First page of `range` that is not in the map (it may be reading).
    pub fn first_absent(&self, range: Range<u64>) -> Option<u64> {
        chunks_of(&range).find_map(|number| {
            let present = self.chunk(number).map_or(0, |chunk| chunk.marks.present);
            first_in(number, mask_in(number, &range) & !present)
        })
    }

    /// First page of `range` that is in the map.
    pub fn first_present(&self, range: Range<u64>) -> Option<u64> {
        self.chunks_in(chunks_of(&range)).find_map(|(number, chunk)| {
            first_in(number, mask_in(number, &range) & chunk.marks.present)
        })
    }

    /// First page of `range` under writeback.
    pub fn first_writeback(&self, range: Range<u64>) -> Option<u64> {
        self.writeback_chunks.range(chunks_of(&range)).find_map(|number| {
            let writeback = self.chunk(number).map_or(0, |chunk| chunk.marks.writeback);
            first_in(number, mask_in(number, &range) & writeback)
        })
    }

    /// First page of `range` under writeback that a sync has to wait for: the log has neither its contents nor its mapping.
    pub fn first_unlogged_writeback(&self, range: Range<u64>) -> Option<u64> {
        self.awaited_chunks.range(chunks_of(&range)).find_map(|number| {
            let awaited = self.chunk(number).map_or(0, |chunk| chunk.marks.awaited());
            first_in(number, mask_in(number, &range) & awaited)
        })
    }

    /// True while the page is under writeback to a new place: its mapping is about to change, and what replaces it has to wait for that. What
    /// is written in place is in the log, and stays where it is.
    pub fn is_moving(&self, index: u64) -> bool {
        let (number, bit) = split(index);
        self.chunk(number)
            .is_some_and(|chunk| chunk.marks.writeback & !chunk.marks.in_place & (1 << bit) != 0)
    }

    /// True while a read of the page is under way.
    pub fn is_reading(&self, index: u64) -> bool {
        let (number, bit) = split(index);
        self.chunk(number).is_some_and(|chunk| chunk.marks.reading & (1 << bit) != 0)
    }

    /// Everything known about the page.
    pub fn state(&self, index: u64) -> PageState {
        let (number, bit) = split(index);
        let Some(chunk) = self.chunk(number) else { return PageState::default() };
        let has = |mark: u64| mark & (1 << bit) != 0;
        PageState {
            present: has(chunk.marks.present),
            reading: has(chunk.marks.reading),
            dirty: has(chunk.marks.dirty),
            writeback: has(chunk.marks.writeback),
            logged: has(chunk.marks.logged),
            towrite: has(chunk.marks.towrite),
            logged_lsn: chunk.owed_lsn(bit),
            heat: chunk.heat(bit),
        }
    }

    // --- Reads from the device ----------------------------------------------------------------

    fn new_token(&mut self) -> u64 {
        self.last_token += 1;
        self.last_token
    }

    /// Marks every page of `range` that is neither present nor reading as reading, and lists them.
    pub fn begin_read(&mut self, range: Range<u64>) -> ReadPlan {
        let token = self.new_token();
        let mut runs: Vec<Range<u64>> = Vec::new();
        for number in chunks_of(&range) {
            let known =
                self.chunk(number).map_or(0, |chunk| chunk.marks.present | chunk.marks.reading);
            let wanted = mask_in(number, &range) & !known;
            if wanted == 0 {
                continue;
            }
            self.update(number, true, |chunk| {
                chunk.marks.reading |= wanted;
                bits(wanted).for_each(|bit| chunk.set_token(bit, token));
            });
            for bit in bits(wanted) {
                let index = number * CHUNK_PAGES + u64::from(bit);
                match runs.last_mut() {
                    Some(run) if run.end == index => run.end += 1,
                    _ => runs.push(index..index + 1),
                }
            }
        }
        ReadPlan { token, runs }
    }

    /// Puts a page that was read into the map, clean.
    ///
    /// # Errors
    /// Gives the page back when the page was written or removed since the read began.
    pub fn finish_read(
        &mut self,
        index: u64,
        token: u64,
        page: PageRef,
    ) -> Result<Inserted, PageRef> {
        let (number, bit) = split(index);
        let mut page = Some(page);
        let inserted = self.update(number, false, |chunk| {
            if !is_reading_with(chunk, bit, token) {
                return None;
            }
            let new_chunk = chunk.marks.present == 0;
            chunk.marks.reading &= !(1 << bit);
            let replaced = chunk.put(bit, page.take()?, number == 0);
            Some(Inserted { newly_dirty: false, new_chunk, replaced })
        });
        match (inserted.flatten(), page) {
            (None, Some(page)) => Err(page),
            (inserted, _) => Ok(inserted.unwrap_or_default()),
        }
    }

    /// Ends a read that failed: the page is absent again. False when it was written or removed
    /// since the read began.
    pub fn abort_read(&mut self, index: u64, token: u64) -> bool {
        let (number, bit) = split(index);
        self.update(number, false, |chunk| {
            let matches = is_reading_with(chunk, bit, token);
            if matches {
                chunk.marks.reading &= !(1 << bit);
            }
            matches
        })
        .unwrap_or(false)
    }

    /// Puts a clean page into the map that did not come from [`PageMap::begin_read`] (a hole).
    ///
    /// # Errors
    /// Gives the page back when one is there or being read.
    pub fn insert_clean(&mut self, index: u64, page: PageRef) -> Result<Inserted, PageRef> {
        let state = self.state(index);
        if state.present || state.reading {
            return Err(page);
        }
        Ok(self.insert(index, page, false))
    }

    fn insert(&mut self, index: u64, page: PageRef, dirty: bool) -> Inserted {
        let (number, bit) = split(index);
        let mask = 1_u64 << bit;
        self.update(number, true, |chunk| {
            let new_chunk = chunk.marks.present == 0;
            chunk.marks.reading &= !mask;
            let replaced = chunk.put(bit, page, number == 0);
            let newly_dirty = dirty && dirty_bit(chunk, mask);
            Inserted { newly_dirty, new_chunk, replaced }
        })
        .unwrap_or_default()
    }

    // --- Writes -------------------------------------------------------------------------------

    /// Puts a page with new contents into the map, dirty, whatever was there: a read under way is
    /// void, a page on its way home stays as it is with the writeback.
    pub fn insert_dirty(&mut self, index: u64, page: PageRef) -> Inserted {
        self.insert(index, page, true)
    }

    /// The page for writing, now dirty: in place when nobody else holds it, else a clone from
    /// `pool` (its reserve included). The caller changes the bytes before it unlocks.
    ///
    /// # Errors
    /// See [`WriteRefused`]; nothing was changed then.
    pub fn page_for_write(
        &mut self,
        index: u64,
        pool: &PagePool,
        old_contents: OldContents,
    ) -> Result<Writable<'_>, WriteRefused> {
        self.page_for_write_in(index, old_contents, || pool.alloc_emergency())
    }

    /// As [`PageMap::page_for_write`]; a clone takes its memory from `frame`.
    pub fn page_for_write_in(
        &mut self,
        index: u64,
        old_contents: OldContents,
        frame: impl FnOnce() -> Option<PageMut>,
    ) -> Result<Writable<'_>, WriteRefused> {
        let (number, bit) = split(index);
        let newly_dirty = self
            .update(number, false, |chunk| {
                let Some(page) = chunk.page_mut(bit) else {
                    let reading = chunk.marks.reading & (1 << bit) != 0;
                    return Err(if reading { WriteRefused::Reading } else { WriteRefused::Absent });
                };
                if page.get_mut().is_none() {
                    let mut clone = frame().ok_or(WriteRefused::NoMemory)?;
                    if old_contents == OldContents::Keep {
                        clone.copy_from_slice(page);
                    }
                    *page = clone.freeze();
                }
                Ok(dirty_bit(chunk, 1 << bit))
            })
            .ok_or(WriteRefused::Absent)??;
        let page = self.chunk_mut(number).and_then(|chunk| chunk.page_mut(bit));
        // Unique since above: new references need a borrow of the map.
        let bytes = page.and_then(PageRef::get_mut).ok_or(WriteRefused::Absent)?;
        Ok(Writable { bytes, newly_dirty })
    }

    /// How many page frames it takes at most to overwrite all pages of `range`: those that are absent or that somebody
    /// else holds.
    pub fn frames_to_overwrite(&mut self, range: Range<u64>) -> usize {
        let taken = range.clone().filter(|&index| {
            let (number, bit) = split(index);
            let page = self.chunk_mut(number).and_then(|chunk| chunk.page_mut(bit));
            page.is_none_or(|page| page.get_mut().is_none())
        });
        taken.count()
    }

    /// True when no page of `range` is in the map.
    pub fn is_absent(&self, range: Range<u64>) -> bool {
        self.chunks_in(chunks_of(&range))
            .all(|(number, chunk)| chunk.marks.present & mask_in(number, &range) == 0)
    }

    /// Marks a page that is in the map as dirty; true when it was not.
    pub fn mark_dirty(&mut self, index: u64) -> bool {
        let (number, bit) = split(index);
        self.update(number, false, |chunk| {
            chunk.marks.present & (1 << bit) != 0 && dirty_bit(chunk, 1 << bit)
        })
        .unwrap_or(false)
    }

    // --- Removal ------------------------------------------------------------------------------

    /// Removes all pages from `first_index` on.
    pub fn truncate(&mut self, first_index: u64) -> Removed {
        self.remove_range(first_index..u64::MAX)
    }

    /// Removes the pages of `range`, whatever their state. Reads and writebacks under way there
    /// end stale.
    pub fn remove_range(&mut self, range: Range<u64>) -> Removed {
        let mut removed = Removed::default();
        let before = self.counts;
        for number in self.existing_chunks(&range) {
            let Removed { pages, logged, .. } = &mut removed;
            self.update(number, false, |chunk| {
                let mask = mask_in(number, &range);
                for bit in bits(mask & chunk.marks.owed) {
                    let index = number * CHUNK_PAGES + u64::from(bit);
                    logged.extend(chunk.owed_lsn(bit).map(|lsn| (index, lsn)));
                }
                chunk.take(mask, pages);
            });
        }
        removed.dirty = before.dirty - self.counts.dirty;
        removed.writeback = before.writeback - self.counts.writeback;
        removed
    }

    /// Takes a page out if that loses nothing: present, clean, not under writeback, not owed.
    pub fn take_clean(&mut self, index: u64) -> Option<PageRef> {
        let (number, bit) = split(index);
        let mut taken = Vec::new();
        if self.chunk(number)?.marks.clean() & (1 << bit) != 0 {
            self.update(number, false, |chunk| chunk.take(1 << bit, &mut taken));
        }
        taken.pop()
    }

    /// Evicts from a chunk: takes out the clean pages that were not hit since the last time, cools
    /// all others by one degree, and says how many pages are left.
    pub fn take_cold(&mut self, chunk_number: u64, pages: &mut Vec<PageRef>) -> usize {
        self.update(chunk_number, false, |chunk| {
            let cold = chunk.marks.clean() & chunk.cold();
            chunk.cool(!cold);
            chunk.take(cold, pages);
            chunk.marks.present.count_ones() as usize
        })
        .unwrap_or(0)
    }

    /// Heat (0 to 3) of the chunk's hottest page, and how many of its pages could be evicted;
    /// `None` when it has no pages. What the eviction policy asks.
    pub fn chunk_heat(&self, chunk_number: u64) -> Option<(u8, usize)> {
        let chunk = self.chunk(chunk_number)?;
        let present = chunk.marks.present;
        (present != 0).then(|| (chunk.max_heat(present), chunk.marks.clean().count_ones() as usize))
    }

    /// Takes one degree of heat from every page of the chunk.
    pub fn cool_chunk(&self, chunk_number: u64) {
        if let Some(chunk) = self.chunk(chunk_number) {
            chunk.cool(u64::MAX);
        }
    }

    /// Takes all heat from every page of the chunk.
    pub fn chill_chunk(&self, chunk_number: u64) {
        if let Some(chunk) = self.chunk(chunk_number) {
            chunk.forget_heat(u64::MAX);
        }
    }

    /// The chunk that `index` is in: the key's second part when chunks are evicted.
    pub fn chunk_of(index: u64) -> u64 {
        index / CHUNK_PAGES
    }

    /// Chunks with pages, in order: the keys to remove from the eviction policy with the file.
    pub fn resident_chunks(&self) -> impl Iterator<Item = u64> {
        self.chunks_in(0..u64::MAX)
            .filter(|(_, chunk)| chunk.marks.present != 0)
            .map(|(number, _)| number)
    }

    /// Asserts every invariant.
    ///
    /// # Panics
    /// When one does not hold.
    #[cfg(any(test, debug_assertions))]
    pub fn check(&self) {
        let mut counts = Counts::default();
        let mut live = 0;
        for (number, chunk) in self.chunks_in(0..u64::MAX) {
            chunk.check();
            let marks = chunk.marks;
            live += usize::from(!marks.is_vacant());
            counts.present += marks.present.count_ones() as usize;
            counts.reading += marks.reading.count_ones() as usize;
            counts.dirty += marks.dirty.count_ones() as usize;
            counts.writeback += marks.writeback.count_ones() as usize;
            assert_eq!(self.dirty_chunks.contains(number), marks.dirty != 0);
            assert_eq!(self.writeback_chunks.contains(number), marks.writeback != 0);
            counts.owed += marks.owed.count_ones() as usize;
            assert_eq!(self.fresh_chunks.contains(number), marks.fresh() != 0);
            assert_eq!(self.awaited_chunks.contains(number), marks.awaited() != 0);
        }
        assert_eq!(counts, self.counts);
        assert_eq!(live, self.live);
        assert!(self.first.is_none() || self.dense.is_empty());
        assert!(self.first.iter().all(|chunk| !chunk.marks.is_vacant()));
        assert!(!self.sparse.contains_key(&0));
        assert!(self.sparse.values().all(|chunk| !chunk.marks.is_vacant()));
        assert!(self.sparse.keys().all(|&number| number >= self.dense.len() as u64));
        assert!(
            self.dense.len() <= DENSE_KEEP.max(8 * live + DENSE_SLACK),
            "{} chunks for {live} live ones",
            self.dense.len()
        );
    }
}

/// Index of the lowest page of `mask` in chunk `number`.
fn first_in(number: u64, mask: u64) -> Option<u64> {
    (mask != 0).then(|| number * CHUNK_PAGES + u64::from(mask.trailing_zeros()))
}

/// True when the read that began with `token` is still the one under way.
fn is_reading_with(chunk: &Chunk, bit: u32, token: u64) -> bool {
    chunk.marks.reading & (1 << bit) != 0 && chunk.token(bit) == Some(token)
}

/// Marks the page of `mask` dirty, with new contents; true when it was not dirty.
fn dirty_bit(chunk: &mut Chunk, mask: u64) -> bool {
    let newly = chunk.marks.dirty & mask == 0;
    chunk.marks.dirty |= mask;
    chunk.marks.logged &= !mask;
    newly
}
