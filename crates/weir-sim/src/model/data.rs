//! Contents of a model file: what it holds now, and what a crash may leave of it.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use crate::image::{BLOCK_BYTES, Block, BlockRef};
use crate::rng::mix;

const PAGE: u64 = BLOCK_BYTES as u64;

/// Names one version of a page or size in the history of a file: where the page moves, and whatever is
/// cut off it, its versions keep their names.
type Version = u64;

/// The name of what operation number `step` makes of file block `index`; `part` tells apart what else the operation
/// makes.
fn version(step: u64, index: u64, part: u64) -> Version {
    mix(step ^ mix(index ^ mix(part)))
}

/// `part` of the zeros that a block holds before it is first written.
const UNWRITTEN: u64 = u64::MAX;
/// `part` of a size.
const SIZE: u64 = u64::MAX - 1;
/// `part` of a page that begins to hold data.
const HOME: u64 = u64::MAX - 2;
/// Tells a block that was allocated apart from one that holds data.
const KEPT: u64 = 0x6B65_7074;

/// One content that a crash may leave.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// The bytes.
    pub content: BlockRef,
    version: Version,
    /// The file has been this long while it was the content.
    reach: u64,
}

/// Whether a page holds data, zeros included: it has, or will have, a block for it, or lies in the inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Home {
    /// It is a hole, or was allocated and not written.
    None,
    /// It holds data now, and a crash may take it away.
    Written(Version),
    /// It holds data, also after a crash.
    Certain,
}

/// One page of a file.
#[derive(Debug, Clone)]
pub struct Page {
    /// What a crash may leave, oldest first. The last is what a read gives now.
    candidates: Vec<Candidate>,
    /// The operation that last wrote to it.
    written: u64,
    home: Home,
    /// A call has allocated a block for it, which stays until the page is taken away.
    pub(super) kept: bool,
}

impl Page {
    /// Zeros until operation `step` writes to block `index`.
    pub(super) fn unwritten(step: u64, index: u64) -> Self {
        let version = version(step, index, UNWRITTEN);
        let zeros = Candidate { content: Arc::clone(Block::zero()), version, reach: 0 };
        Self { candidates: vec![zeros], written: 0, home: Home::None, kept: false }
    }

    /// It holds data for certain.
    pub(super) const fn make_certain(&mut self) {
        self.home = Home::Certain;
    }

    /// It holds data now.
    pub fn has_data(&self) -> bool {
        self.home != Home::None
    }

    /// It holds data, also after a crash.
    pub fn is_certain(&self) -> bool {
        self.home == Home::Certain
    }

    /// A call has allocated a block for it.
    pub const fn is_kept(&self) -> bool {
        self.kept
    }

    /// What a read gives now.
    pub fn now(&self) -> &BlockRef {
        // There always is one: it is the one thing that never leaves the list.
        &self.candidates[self.candidates.len() - 1].content
    }

    /// What a crash may leave, oldest first, and as the last what a read gives now.
    pub fn may_be(&self) -> impl DoubleEndedIterator<Item = &BlockRef> {
        self.candidates.iter().map(|candidate| &candidate.content)
    }

    /// The newest version, in a file that is `size` bytes long before. An equal older one counts as this one.
    fn replace(&mut self, size: u64, new: Candidate) {
        if let Some(last) = self.candidates.last_mut() {
            last.reach = last.reach.max(size);
        }
        self.add(new);
    }

    fn add(&mut self, new: Candidate) {
        self.candidates.retain(|known| known.content.hash() != new.content.hash());
        self.candidates.push(new);
    }

    fn change_all(&mut self, change: impl Fn(&BlockRef) -> BlockRef) {
        for candidate in std::mem::take(&mut self.candidates) {
            self.add(Candidate { content: change(&candidate.content), ..candidate });
        }
    }

    /// Nothing tells it from a page that never was.
    fn is_hole(&self) -> bool {
        !self.kept && self.home == Home::None
    }

    /// Nothing but the present is left.
    fn settle(&mut self) {
        self.candidates.drain(..self.candidates.len() - 1);
        if self.has_data() {
            self.home = Home::Certain;
        }
    }

    fn is_settled(&self) -> bool {
        self.candidates.len() == 1 && !matches!(self.home, Home::Written(_))
    }

    /// It began to hold data in what is durable now.
    fn is_among(&self, settled: &Settled) -> bool {
        matches!(self.home, Home::Written(version) if settled.homes.contains(&version))
    }

    /// Versions that are out of date once the present is durable.
    fn outdated(&self) -> impl Iterator<Item = Version> {
        let older = &self.candidates[..self.candidates.len() - 1];
        older.iter().map(|candidate| candidate.version)
    }
}

/// A size that a crash may leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Size {
    bytes: u64,
    version: Version,
}

/// Contents of a regular file. Pages that are not in the map are zeros, now and after a crash.
#[derive(Debug, Clone)]
pub struct FileData {
    /// Size now.
    pub size: u64,
    /// Sizes that a crash may leave, oldest first, `size` as the last. Between the smallest and the largest, every
    /// multiple of the page size may be left as well: an append can be made durable in part.
    sizes: Vec<Size>,
    /// By file block.
    pub pages: BTreeMap<u64, Page>,
    /// Blocks that it may have besides, nobody knows where.
    pub surplus: u64,
    /// Its first page may lie in the inode: it had data while the file was small.
    pub was_small: bool,
}

impl Default for FileData {
    fn default() -> Self {
        Self {
            size: 0,
            sizes: vec![Size { bytes: 0, version: 0 }],
            pages: BTreeMap::new(),
            surplus: 0,
            was_small: false,
        }
    }
}

/// What is out of date since part of a file is durable: to be taken out of later states too, which
/// the file has passed through meanwhile.
#[derive(Debug)]
pub struct Settled {
    versions: HashSet<Version>,
    /// Pages that hold data.
    homes: HashSet<Version>,
    /// The size that is durable at least, and the sizes it replaces.
    size: u64,
    sizes: HashSet<Version>,
}

/// `content` with the bytes from `start` to `end` set to zero.
fn zeroed(content: &BlockRef, start: usize, end: usize) -> BlockRef {
    let mut bytes = *content.bytes();
    bytes[start..end].fill(0);
    Block::new(&bytes)
}

/// The file blocks that bytes `range` touch.
fn blocks_of(range: &Range<u64>) -> Range<u64> {
    range.start / PAGE..range.end.div_ceil(PAGE).max(range.start / PAGE)
}

impl FileData {
    /// Contents that are durable as they are.
    pub fn durable(size: u64, pages: impl IntoIterator<Item = (u64, BlockRef)>) -> Self {
        let zero = Block::zero().hash();
        let pages = pages
            .into_iter()
            .filter(|(_, content)| content.hash() != zero)
            .map(|(index, content)| {
                let version = version(0, index, 0);
                let candidates = vec![Candidate { content, version, reach: size }];
                (index, Page { candidates, written: 0, home: Home::Certain, kept: false })
            })
            .collect();
        let sizes = vec![Size { bytes: size, version: 0 }];
        Self { size, sizes, pages, surplus: 0, was_small: false }
    }

    /// Stands for what a user sees: equal before and after an operation that changes nothing.
    pub fn fingerprint(&self) -> (u64, u64) {
        let zero = Block::zero().hash();
        let share = |(index, page): (&u64, &Page)| {
            let hash = page.now().hash();
            if hash == zero { 0 } else { mix(hash ^ mix(*index)) }
        };
        let kept =
            self.pages.iter().filter(|(_, page)| page.kept).map(|(index, _)| mix(index ^ KEPT));
        let shares = self.pages.iter().map(share).chain(kept);
        (self.size, shares.fold(0, u64::wrapping_add))
    }

    /// A crash may leave this size.
    pub fn may_have_size(&self, size: u64) -> bool {
        let sizes = || self.sizes.iter().map(|size| size.bytes);
        let smallest = sizes().min().is_some_and(|smallest| smallest < size);
        let largest = sizes().max().is_some_and(|largest| size < largest);
        sizes().any(|known| known == size) || (smallest && largest && size.is_multiple_of(PAGE))
    }

    /// The contents of file block `index` that a crash may leave in a file of `size` bytes: where a size ends that no
    /// sync has promised, there is what has made the file that long.
    pub fn may_hold(&self, index: u64, size: u64) -> Option<impl Iterator<Item = &BlockRef>> {
        let page = self.pages.get(&index)?;
        let promised = self.sizes.iter().map(|known| known.bytes).min().unwrap_or(0);
        let is_end = size > promised && (size - 1) / PAGE == index;
        let least = if is_end { size } else { 0 };
        let last = page.candidates.len() - 1;
        let reach = move |place: usize, known: &Candidate| {
            known.reach.max(if place == last { self.size } else { 0 })
        };
        let candidates = page.candidates.iter().enumerate();
        let candidates = candidates.filter(move |(place, known)| reach(*place, known) >= least);
        Some(candidates.map(|(_, candidate)| &candidate.content))
    }

    /// The sizes that a crash may leave, for people.
    pub fn sizes(&self) -> Vec<u64> {
        self.sizes.iter().map(|size| size.bytes).collect()
    }

    /// The last operation that wrote to `range`.
    pub fn written(&self, range: &Range<u64>) -> u64 {
        let pages = self.pages.range(blocks_of(range));
        pages.map(|(_, page)| page.written).max().unwrap_or(0)
    }

    /// The bytes of a range as a read gives them: cut at the end of the file.
    pub fn read(&self, offset: u64, length: u64) -> Vec<u8> {
        let end = self.size.min(offset.saturating_add(length));
        let mut result = Vec::with_capacity(end.saturating_sub(offset) as usize);
        let mut position = offset;
        while position < end {
            let page = self.pages.get(&(position / PAGE)).map_or(Block::zero(), Page::now);
            let start = (position % PAGE) as usize;
            let count = (PAGE - position % PAGE).min(end - position) as usize;
            result.extend_from_slice(&page.bytes()[start..start + count]);
            position += count as u64;
        }
        result
    }

    /// Operation `step` writes: after a crash each page has it or not.
    pub fn write(&mut self, step: u64, offset: u64, bytes: &[u8]) {
        let mut done = 0;
        let reach = self.size.max(offset + bytes.len() as u64);
        while done < bytes.len() {
            let position = offset + done as u64;
            let index = position / PAGE;
            let start = (position % PAGE) as usize;
            let count = (BLOCK_BYTES - start).min(bytes.len() - done);
            let page = self.pages.entry(index).or_insert_with(|| Page::unwritten(step, index));
            let mut content = *page.now().bytes();
            content[start..start + count].copy_from_slice(&bytes[done..done + count]);
            let version = version(step, index, 0);
            let new = Candidate { content: Block::new(&content), version, reach };
            page.replace(self.size, new);
            page.written = step;
            if page.home == Home::None {
                page.home = Home::Written(self::version(step, index, HOME));
            }
            done += count;
        }
        self.grow_lazily(step, reach);
        self.note_small();
    }

    /// The size becomes at least `end`; a crash may leave the old size.
    fn grow_lazily(&mut self, step: u64, end: u64) {
        if end > self.size {
            self.size = end;
            self.sizes.push(Size { bytes: end, version: version(step, end, SIZE) });
        }
    }

    /// The size becomes `size` at the operation's place in the order.
    fn set_size(&mut self, step: u64, size: u64) {
        self.size = size;
        self.sizes = vec![Size { bytes: size, version: version(step, size, SIZE) }];
    }

    /// The size becomes at least `end`, as an operation with its place in the order if it is smaller.
    pub fn grow(&mut self, step: u64, end: u64) {
        if end > self.size {
            self.set_size(step, end);
        }
    }

    /// The size becomes `size`; what lies beyond is gone, and zeros when the file grows again. With `gives_back`, so are
    /// blocks that were allocated there.
    pub fn truncate(&mut self, step: u64, size: u64, gives_back: bool) {
        self.set_size(step, size);
        let gone = self.pages.split_off(&size.div_ceil(PAGE));
        if !gives_back {
            for (index, _) in gone.into_iter().filter(|(_, page)| page.kept) {
                self.keep(step, index..index + 1);
            }
        }
        let tail = (size % PAGE) as usize;
        if let Some(page) = self.pages.get_mut(&(size / PAGE)) {
            page.change_all(|content| zeroed(content, tail, BLOCK_BYTES));
        }
        self.note_small();
    }

    /// The range becomes zeros. Whole pages at the operation's place in the order; parts of pages as a write
    /// does, which a crash may undo.
    pub fn zero(&mut self, step: u64, start: u64, end: u64) {
        for (index, page) in self.pages.range_mut(blocks_of(&(start..end))) {
            let from = start.saturating_sub(index * PAGE).min(PAGE) as usize;
            let to = end.saturating_sub(index * PAGE).min(PAGE) as usize;
            if from == 0 && to == BLOCK_BYTES {
                *page = Page::unwritten(step, *index);
            } else if page.has_data() {
                page.written = step;
                let known = page.candidates.clone();
                let newest = known.len() - 1;
                for (place, candidate) in known.into_iter().enumerate() {
                    // An old version with the hole in it is as old as it was without.
                    let is_now = place == newest;
                    let version = if is_now { version(step, *index, 0) } else { candidate.version };
                    let content = zeroed(&candidate.content, from, to);
                    page.add(Candidate { content, version, ..candidate });
                }
            }
        }
        self.pages.retain(|_, page| !page.is_hole());
        self.note_small();
    }

    /// Takes out `[start, end)`, both multiples of the page size.
    pub fn collapse(&mut self, step: u64, start: u64, end: u64) {
        let moved = self.pages.split_off(&(end / PAGE));
        drop(self.pages.split_off(&(start / PAGE)));
        let distance = (end - start) / PAGE;
        self.pages.extend(moved.into_iter().map(|(index, page)| (index - distance, page)));
        self.set_size(step, self.size - (end - start));
        self.was_small &= start > 0;
        self.note_small();
    }

    /// Opens a hole of `length` at `start`, both multiples of the page size.
    pub fn insert(&mut self, step: u64, start: u64, length: u64) {
        let moved = self.pages.split_off(&(start / PAGE));
        self.pages.extend(moved.into_iter().map(|(index, page)| (index + length / PAGE, page)));
        self.set_size(step, self.size + length);
        self.was_small &= start > 0;
    }

    /// `range` is durable, at this place in the order: nothing but the present of its pages is left, and the size
    /// reaches to its end at least.
    pub fn settle(&mut self, range: &Range<u64>) {
        for (_, page) in self.pages.range_mut(blocks_of(range)) {
            page.settle();
        }
        self.raise_size(self.covered(range), |_| true);
    }

    /// The size that is durable with `range`: it may reach to the end of the range's last page, if the range begins
    /// before the end of the file.
    fn covered(&self, range: &Range<u64>) -> u64 {
        let blocks = blocks_of(range);
        if blocks.start.saturating_mul(PAGE) >= self.size {
            return 0;
        }
        blocks.end.saturating_mul(PAGE).min(self.size)
    }

    /// Sizes that are `chosen` and smaller become `size`.
    fn raise_size(&mut self, size: u64, chosen: impl Fn(Version) -> bool) {
        for known in self.sizes.iter_mut().filter(|known| chosen(known.version)) {
            known.bytes = known.bytes.max(size);
        }
        let mut kept: Vec<Size> = Vec::with_capacity(self.sizes.len());
        for known in &self.sizes {
            // Of equal sizes the newest stays.
            kept.retain(|older| older.bytes != known.bytes);
            kept.push(*known);
        }
        self.sizes = kept;
    }

    /// [`Self::settle`] would change nothing.
    pub fn is_settled(&self, range: &Range<u64>) -> bool {
        let covered = self.covered(range);
        self.pages.range(blocks_of(range)).all(|(_, page)| page.is_settled())
            && self.sizes.iter().all(|size| size.bytes >= covered)
    }

    /// What is out of date once `range` is durable as it is now.
    pub fn settled(&self, range: &Range<u64>) -> Settled {
        let pages = || self.pages.range(blocks_of(range)).map(|(_, page)| page);
        let home = |page: &Page| match page.home {
            Home::Written(version) => Some(version),
            _ => None,
        };
        Settled {
            versions: pages().flat_map(Page::outdated).collect(),
            homes: pages().filter_map(home).collect(),
            size: self.covered(range),
            sizes: self.sizes.iter().map(|size| size.version).collect(),
        }
    }

    /// Whether [`Self::apply_settled`] would change anything.
    pub fn is_affected(&self, settled: &Settled) -> bool {
        let outdated = |version| settled.versions.contains(&version);
        self.pages.values().any(|page| page.outdated().any(outdated) || page.is_among(settled))
            || self
                .sizes
                .iter()
                .any(|size| size.bytes < settled.size && settled.sizes.contains(&size.version))
    }

    /// Takes out of this state what is out of date since an earlier state became durable.
    pub fn apply_settled(&mut self, settled: &Settled) {
        for page in self.pages.values_mut() {
            if page.is_among(settled) {
                page.home = Home::Certain;
            }
            let last = page.candidates.len() - 1;
            let mut place = 0..;
            page.candidates.retain(|candidate| {
                place.next() == Some(last) || !settled.versions.contains(&candidate.version)
            });
        }
        if self.sizes.iter().any(|size| size.bytes < settled.size) {
            self.raise_size(settled.size, |version| settled.sizes.contains(&version));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn may_be(data: &FileData, index: u64) -> Vec<u8> {
        let mut firsts: Vec<u8> = data.pages.get(&index).map_or_else(
            || vec![0],
            |page| page.may_be().map(|content| content.bytes()[0]).collect(),
        );
        firsts.sort_unstable();
        firsts
    }

    const ALL: Range<u64> = 0..u64::MAX;

    fn synced(data: &FileData) -> FileData {
        let mut data = data.clone();
        data.settle(&ALL);
        data
    }

    #[test]
    fn an_unsynced_write_may_or_may_not_survive_page_by_page() {
        let mut data = FileData::default();
        data.write(1, 0, &[1; 8192]);
        assert_eq!((may_be(&data, 0), may_be(&data, 1)), (vec![0, 1], vec![0, 1]));
        assert_eq!(data.sizes(), [0, 8192]);
        let mut data = synced(&data);
        assert_eq!((may_be(&data, 0), data.sizes()), (vec![1], vec![8192]));
        data.write(2, 4096, &[2; 10]);
        assert_eq!((may_be(&data, 0), may_be(&data, 1)), (vec![1], vec![1, 2]));
        assert_eq!(data.sizes(), [8192]);
    }

    #[test]
    fn an_append_may_survive_in_whole_pages() {
        let mut data = FileData::default();
        data.write(1, 0, &[1; 100]);
        let mut data = synced(&data);
        data.write(2, 100, &[2; 9000]);
        let allowed: Vec<u64> = (0..10_000).filter(|size| data.may_have_size(*size)).collect();
        assert_eq!(allowed, [100, 4096, 8192, 9100]);
    }

    #[test]
    fn truncation_reaches_every_version() {
        let mut data = FileData::default();
        data.write(1, 0, &[1; 4096]);
        let mut data = synced(&data);
        data.write(2, 0, &[2; 4096]);
        data.truncate(3, 100, true);
        data.truncate(4, 4096, false);
        for content in data.pages[&0].may_be() {
            assert!(content.bytes()[100..].iter().all(|byte| *byte == 0));
        }
        assert_eq!(may_be(&data, 0), [1, 2]);
        assert_eq!(data.sizes(), [4096]);
        assert_eq!(data.read(90, 100), [vec![2; 10], vec![0; 90]].concat());
    }

    #[test]
    fn a_hole_is_certain_for_whole_pages_and_a_write_for_parts() {
        let mut data = FileData::default();
        data.write(1, 0, &[1; 12288]);
        let mut data = synced(&data);
        data.zero(2, 4096, 8292);
        assert_eq!(may_be(&data, 1), [0]);
        assert_eq!(may_be(&data, 2), [0, 1]);
        assert_eq!(data.size, 12288);
    }

    #[test]
    fn collapse_and_insert_move_pages_with_their_versions() {
        let mut data = FileData::default();
        data.write(1, 0, &[1; 4096]);
        let mut data = synced(&data);
        data.write(2, 4096, &[2; 4096]);
        data.insert(3, 4096, 8192);
        assert_eq!((may_be(&data, 1), may_be(&data, 3), data.size), (vec![0], vec![0, 2], 16384));
        data.collapse(4, 0, 4096);
        assert_eq!((may_be(&data, 0), may_be(&data, 2), data.size), (vec![0], vec![0, 2], 12288));
    }

    #[test]
    fn a_durable_range_settles_its_pages_and_lifts_the_size_to_its_end() {
        let mut data = FileData::default();
        data.write(1, 0, &[1; 4 * 4096]);
        data.settle(&(4096..4097));
        assert_eq!(
            (may_be(&data, 0), may_be(&data, 1), may_be(&data, 2)),
            (vec![0, 1], vec![1], vec![0, 1])
        );
        let allowed: Vec<u64> = (0..20_000).filter(|size| data.may_have_size(*size)).collect();
        assert_eq!(allowed, [8192, 12288, 16384]);
    }

    #[test]
    fn a_range_that_becomes_durable_later_takes_old_versions_out_of_what_was_done_meanwhile() {
        let mut data = FileData::default();
        data.write(1, 0, &[1; 8192]);
        let submitted = data.clone();
        data.write(2, 0, &[2; 100]);
        data.zero(3, 4096, 4196);
        let settled = submitted.settled(&ALL);
        assert!(data.is_affected(&settled));
        data.apply_settled(&settled);
        assert_eq!((may_be(&data, 0), may_be(&data, 1)), (vec![1, 2], vec![0, 1]));
        assert_eq!(data.pages[&1].may_be().count(), 2, "with the hole, and without");
        assert_eq!(data.sizes(), [8192]);
        assert!(!data.is_affected(&settled));
    }

    #[test]
    fn pages_that_were_moved_or_made_anew_meanwhile_are_told_apart() {
        let mut data = FileData::default();
        data.write(1, 0, &[1; 8192]);
        let submitted = data.clone();
        data.collapse(2, 0, 4096);
        data.write(3, 4096, &[3; 4096]);
        data.apply_settled(&submitted.settled(&ALL));
        assert_eq!(may_be(&data, 0), [1], "the second page, which was durable before it moved");
        assert_eq!(
            may_be(&data, 1),
            [0, 3],
            "a page that was not there when the sync was asked for"
        );
        assert_eq!(data.sizes(), [4096, 8192]);
    }

    #[test]
    fn a_size_that_nobody_promised_ends_in_what_made_it() {
        let mut data = FileData::default();
        data.write(1, 0, &[1; 4096]);
        let mut data = synced(&data);
        data.write(2, 4096, &[2; 4096]);
        data.write(3, 8192, &[3; 100]);
        data.write(4, 20_000, &[4; 100]);
        let may_hold = |index, size| -> Vec<u8> {
            let held = data.may_hold(index, size).into_iter().flatten();
            held.map(|content| content.bytes()[0]).collect()
        };
        assert_eq!(may_hold(1, 8192), [2]);
        assert_eq!(may_hold(1, 8292), [0, 2]);
        assert_eq!(may_hold(2, 8292), [3]);
        assert_eq!(may_hold(0, 4096), [1]);
        let mut data = synced(&data);
        data.write(5, 30_000, &[5; 10]);
        data.write(6, 20_000, &[6; 10]);
        let held = |size| data.may_hold(4, size).into_iter().flatten().count();
        assert_eq!((held(20_480), held(30_010)), (2, 2), "written before and after it grew");
    }

    #[test]
    fn an_old_content_written_again_is_new() {
        let mut data = FileData::default();
        data.write(1, 0, &[1; 4096]);
        let mut data = synced(&data);
        data.write(2, 0, &[2; 4096]);
        let submitted = data.clone();
        data.write(3, 0, &[1; 4096]);
        data.apply_settled(&submitted.settled(&ALL));
        assert_eq!(may_be(&data, 0), [1, 2]);
    }
}
