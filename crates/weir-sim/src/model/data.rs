//! Contents of a model file: what it holds now, and what a crash may leave of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::image::{BLOCK_BYTES, Block, BlockRef};

const PAGE: u64 = BLOCK_BYTES as u64;

/// One page of a file.
#[derive(Debug, Clone)]
pub struct Page {
    /// What a read gives now.
    pub now: BlockRef,
    /// What a crash may leave: one of these, `now` among them.
    pub may_be: Vec<BlockRef>,
}

impl Page {
    fn zero() -> Self {
        Self { now: Arc::clone(Block::zero()), may_be: vec![Arc::clone(Block::zero())] }
    }

    fn add(&mut self, content: &BlockRef) {
        if !self.may_be.iter().any(|known| known.hash() == content.hash()) {
            self.may_be.push(Arc::clone(content));
        }
    }

    fn change_all(&mut self, change: impl Fn(&BlockRef) -> BlockRef) {
        self.now = change(&self.now);
        for content in &mut self.may_be {
            *content = change(content);
        }
        self.may_be.sort_by_key(|content| content.hash());
        self.may_be.dedup_by_key(|content| content.hash());
    }

    fn is_zero(&self) -> bool {
        let zero = Block::zero().hash();
        self.may_be.iter().all(|content| content.hash() == zero)
    }
}

/// Contents of a regular file. Pages that are not in the map are zeros, now and after a crash.
#[derive(Debug, Clone)]
pub struct FileData {
    /// Size now.
    pub size: u64,
    /// Sizes that a crash may leave, `size` among them. Between the smallest and the largest, every
    /// multiple of the page size may be left as well: an append can be made durable in part.
    pub sizes: Vec<u64>,
    /// By file block.
    pub pages: BTreeMap<u64, Page>,
}

impl Default for FileData {
    fn default() -> Self {
        Self { size: 0, sizes: vec![0], pages: BTreeMap::new() }
    }
}

/// `content` with the bytes from `start` to `end` set to zero.
fn zeroed(content: &BlockRef, start: usize, end: usize) -> BlockRef {
    let mut bytes = *content.bytes();
    bytes[start..end].fill(0);
    Block::new(&bytes)
}

impl FileData {
    /// Contents that are durable as they are.
    pub fn durable(size: u64, pages: impl IntoIterator<Item = (u64, BlockRef)>) -> Self {
        let zero = Block::zero().hash();
        let pages = pages
            .into_iter()
            .filter(|(_, content)| content.hash() != zero)
            .map(|(index, content)| {
                (index, Page { now: Arc::clone(&content), may_be: vec![content] })
            })
            .collect();
        Self { size, sizes: vec![size], pages }
    }

    /// Stands for what a user sees: equal before and after an operation that changes nothing.
    pub fn fingerprint(&self) -> (u64, u64) {
        let zero = Block::zero().hash();
        let share = |(index, page): (&u64, &Page)| {
            let hash = page.now.hash();
            if hash == zero { 0 } else { crate::rng::mix(hash ^ crate::rng::mix(*index)) }
        };
        (self.size, self.pages.iter().map(share).fold(0, u64::wrapping_add))
    }

    /// A crash may leave this size.
    pub fn may_have_size(&self, size: u64) -> bool {
        let smallest = self.sizes.iter().min().is_some_and(|smallest| *smallest < size);
        let largest = self.sizes.iter().max().is_some_and(|largest| size < *largest);
        self.sizes.contains(&size) || (smallest && largest && size.is_multiple_of(PAGE))
    }

    /// The bytes of a range as a read gives them: cut at the end of the file.
    pub fn read(&self, offset: u64, length: u64) -> Vec<u8> {
        let end = self.size.min(offset.saturating_add(length));
        let mut result = Vec::with_capacity(end.saturating_sub(offset) as usize);
        let mut position = offset;
        while position < end {
            let page = self.pages.get(&(position / PAGE)).map_or(Block::zero(), |page| &page.now);
            let start = (position % PAGE) as usize;
            let count = (PAGE - position % PAGE).min(end - position) as usize;
            result.extend_from_slice(&page.bytes()[start..start + count]);
            position += count as u64;
        }
        result
    }

    /// A write: after a crash each page has it or not.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        let mut done = 0;
        while done < bytes.len() {
            let position = offset + done as u64;
            let start = (position % PAGE) as usize;
            let count = (BLOCK_BYTES - start).min(bytes.len() - done);
            let page = self.pages.entry(position / PAGE).or_insert_with(Page::zero);
            let mut content = *page.now.bytes();
            content[start..start + count].copy_from_slice(&bytes[done..done + count]);
            page.now = Block::new(&content);
            let now = Arc::clone(&page.now);
            page.add(&now);
            done += count;
        }
        self.grow_lazily(offset + bytes.len() as u64);
    }

    /// The size becomes at least `end`; a crash may leave the old size.
    pub fn grow_lazily(&mut self, end: u64) {
        if end > self.size {
            self.size = end;
            if !self.sizes.contains(&end) {
                self.sizes.push(end);
            }
        }
    }

    /// The size becomes at least `end`, as an operation with its place in the order if it is smaller.
    pub fn grow(&mut self, end: u64) {
        if end > self.size {
            self.size = end;
            self.sizes = vec![end];
        }
    }

    /// The size becomes `size`; what lies beyond is gone, and zeros when the file grows again.
    pub fn truncate(&mut self, size: u64) {
        self.size = size;
        self.sizes = vec![size];
        drop(self.pages.split_off(&size.div_ceil(PAGE)));
        let tail = (size % PAGE) as usize;
        if let Some(page) = self.pages.get_mut(&(size / PAGE)) {
            page.change_all(|content| zeroed(content, tail, BLOCK_BYTES));
        }
    }

    /// The range becomes zeros. Whole pages at the operation's place in the order; parts of pages as a write
    /// does, which a crash may undo.
    pub fn zero(&mut self, start: u64, end: u64) {
        let first = start / PAGE;
        let last = end.div_ceil(PAGE);
        for (index, page) in self.pages.range_mut(first..last.max(first)) {
            let from = start.saturating_sub(index * PAGE).min(PAGE) as usize;
            let to = end.saturating_sub(index * PAGE).min(PAGE) as usize;
            if from == 0 && to == BLOCK_BYTES {
                *page = Page::zero();
            } else {
                page.now = zeroed(&page.now, from, to);
                for content in page.may_be.clone() {
                    page.add(&zeroed(&content, from, to));
                }
            }
        }
        self.pages.retain(|_, page| !page.is_zero());
    }

    /// Takes out `[start, end)`, both multiples of the page size.
    pub fn collapse(&mut self, start: u64, end: u64) {
        let moved = self.pages.split_off(&(end / PAGE));
        drop(self.pages.split_off(&(start / PAGE)));
        let distance = (end - start) / PAGE;
        self.pages.extend(moved.into_iter().map(|(index, page)| (index - distance, page)));
        self.size -= end - start;
        self.sizes = vec![self.size];
    }

    /// Opens a hole of `length` at `start`, both multiples of the page size.
    pub fn insert(&mut self, start: u64, length: u64) {
        let moved = self.pages.split_off(&(start / PAGE));
        self.pages.extend(moved.into_iter().map(|(index, page)| (index + length / PAGE, page)));
        self.size += length;
        self.sizes = vec![self.size];
    }

    /// Everything is durable.
    #[must_use]
    pub fn synced(&self) -> Self {
        Self::durable(
            self.size,
            self.pages.iter().map(|(index, page)| (*index, Arc::clone(&page.now))),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn may_be(data: &FileData, index: u64) -> Vec<u8> {
        let mut firsts: Vec<u8> = data.pages.get(&index).map_or_else(
            || vec![0],
            |page| page.may_be.iter().map(|content| content.bytes()[0]).collect(),
        );
        firsts.sort_unstable();
        firsts
    }

    #[test]
    fn an_unsynced_write_may_or_may_not_survive_page_by_page() {
        let mut data = FileData::default();
        data.write(0, &[1; 8192]);
        assert_eq!((may_be(&data, 0), may_be(&data, 1)), (vec![0, 1], vec![0, 1]));
        assert_eq!(data.sizes, [0, 8192]);
        let mut data = data.synced();
        assert_eq!((may_be(&data, 0), data.sizes.clone()), (vec![1], vec![8192]));
        data.write(4096, &[2; 10]);
        assert_eq!((may_be(&data, 0), may_be(&data, 1)), (vec![1], vec![1, 2]));
        assert_eq!(data.sizes, [8192]);
    }

    #[test]
    fn an_append_may_survive_in_whole_pages() {
        let mut data = FileData::default();
        data.write(0, &[1; 100]);
        let mut data = data.synced();
        data.write(100, &[2; 9000]);
        let allowed: Vec<u64> = (0..10_000).filter(|size| data.may_have_size(*size)).collect();
        assert_eq!(allowed, [100, 4096, 8192, 9100]);
    }

    #[test]
    fn truncation_reaches_every_version() {
        let mut data = FileData::default();
        data.write(0, &[1; 4096]);
        let mut data = data.synced();
        data.write(0, &[2; 4096]);
        data.truncate(100);
        data.truncate(4096);
        for content in &data.pages[&0].may_be {
            assert!(content.bytes()[100..].iter().all(|byte| *byte == 0));
        }
        assert_eq!(may_be(&data, 0), [1, 2]);
        assert_eq!(data.sizes, [4096]);
        assert_eq!(data.read(90, 100), [vec![2; 10], vec![0; 90]].concat());
    }

    #[test]
    fn a_hole_is_certain_for_whole_pages_and_a_write_for_parts() {
        let mut data = FileData::default();
        data.write(0, &[1; 12288]);
        let mut data = data.synced();
        data.zero(4096, 8292);
        assert_eq!(may_be(&data, 1), [0]);
        assert_eq!(may_be(&data, 2), [0, 1]);
        assert_eq!(data.size, 12288);
    }

    #[test]
    fn collapse_and_insert_move_pages_with_their_versions() {
        let mut data = FileData::default();
        data.write(0, &[1; 4096]);
        let mut data = data.synced();
        data.write(4096, &[2; 4096]);
        data.insert(4096, 8192);
        assert_eq!((may_be(&data, 1), may_be(&data, 3), data.size), (vec![0], vec![0, 2], 16384));
        data.collapse(0, 4096);
        assert_eq!((may_be(&data, 0), may_be(&data, 2), data.size), (vec![0], vec![0, 2], 12288));
    }
}
