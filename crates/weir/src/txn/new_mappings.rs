//! Files that were made since the volume was opened and are written here and there, each with the file blocks that have ever been
//! mapped: whether a page of a sparse file has a home already needs no look-up in deltas and tree, of which a
//! sync of scattered pages makes one for each.
//!
//! A file is watched from its first extents on, and given up when all of it takes too much memory: then it is looked up as any
//! other. What is unmapped again still counts as mapped, until the file has nothing left and begins anew.
//!
//! Pure data. **Invariant:** every file block of a watched file that is mapped is in its set.

use crate::error::Result;
use crate::format::item::Extent;
use crate::format::{Key, Kind};
use crate::number_map::NumberMap;
use std::ops::Range;

/// File blocks that share a piece of memory: 16 MiB of a file.
const CHUNK_BLOCKS: u64 = 4096;
const WORD_BLOCKS: u64 = u64::BITS as u64;
type Chunk = [u64; (CHUNK_BLOCKS / WORD_BLOCKS) as usize];
/// Memory of a chunk and its place in the map.
const CHUNK_BYTES: usize = size_of::<Chunk>() + 48;
/// Memory of a file that has none.
const FILE_BYTES: usize = 96;

#[derive(Default)]
struct Mapped(NumberMap<Box<Chunk>>);

impl Mapped {
    fn bytes(&self) -> usize {
        FILE_BYTES + self.0.len() * CHUNK_BYTES
    }
}

/// See the module's head.
pub struct NewMappings {
    files: NumberMap<Mapped>,
    bytes: usize,
    most_bytes: usize,
    /// Inodes from this number on were made since opening.
    first_new: u64,
}

impl NewMappings {
    /// No file is new. `most_bytes`: what all sets may take.
    pub fn new(most_bytes: usize) -> Self {
        Self { files: NumberMap::default(), bytes: 0, most_bytes, first_new: u64::MAX }
    }

    /// Inodes from `number` on do not exist, and nothing is mapped of them.
    pub fn begin_at(&mut self, number: u64) {
        self.first_new = number;
    }

    /// Nothing of the file `number` is mapped.
    pub fn watch(&mut self, number: u64) {
        if number < self.first_new {
            return;
        }
        self.forget(number);
        if self.bytes + FILE_BYTES <= self.most_bytes {
            self.bytes += FILE_BYTES;
            self.files.insert(number, Mapped::default());
        }
    }

    /// The item `key` changes to `value`.
    pub fn note(&mut self, key: &Key, value: Option<&[u8]>) {
        match (key.kind, value) {
            (Kind::Extent, Some(extent)) => {
                let has_it = self.files.contains_key(&key.inode);
                if has_it && self.add(key, extent).is_err() {
                    self.forget(key.inode);
                }
            }
            (Kind::Inode, None) => self.forget(key.inode),
            _ => {}
        }
    }

    fn add(&mut self, key: &Key, extent: &[u8]) -> Result<()> {
        let (_, blocks, _) = Extent::decode_head(extent)?;
        let Some(file) = self.files.get_mut(&key.inode) else { return Ok(()) };
        for (number, within) in chunks(&(key.offset..key.offset.saturating_add(blocks))) {
            if !file.0.contains_key(&number) {
                if self.bytes + CHUNK_BYTES > self.most_bytes {
                    self.forget(key.inode);
                    return Ok(());
                }
                self.bytes += CHUNK_BYTES;
            }
            let chunk = file.0.entry(number).or_insert_with(|| Box::new([0; _]));
            masks(&within).for_each(|(word, mask)| chunk[word] |= mask);
        }
        Ok(())
    }

    fn forget(&mut self, number: u64) {
        if let Some(file) = self.files.remove(&number) {
            self.bytes -= file.bytes();
        }
    }

    /// None of `blocks` of the file is mapped, surely.
    pub fn excludes(&self, number: u64, blocks: &Range<u64>) -> bool {
        let Some(file) = self.files.get(&number) else { return false };
        chunks(blocks).all(|(number, within)| {
            file.0
                .get(&number)
                .is_none_or(|chunk| masks(&within).all(|(word, mask)| chunk[word] & mask == 0))
        })
    }
}

/// The chunks that `blocks` lie in, and where in each.
fn chunks(blocks: &Range<u64>) -> impl Iterator<Item = (u64, Range<u64>)> + use<> {
    let Range { start, end } = *blocks;
    let last = if blocks.is_empty() { 0 } else { end.div_ceil(CHUNK_BLOCKS) };
    (start / CHUNK_BLOCKS..last).map(move |number| {
        let base = number * CHUNK_BLOCKS;
        let from = start.max(base) - base;
        (number, from..(end - base).min(CHUNK_BLOCKS))
    })
}

/// The bits of `within`, of a chunk and not empty: word and mask.
fn masks(within: &Range<u64>) -> impl Iterator<Item = (usize, u64)> + use<> {
    let Range { start, end } = *within;
    (start / WORD_BLOCKS..end.div_ceil(WORD_BLOCKS)).map(move |word| {
        let base = word * WORD_BLOCKS;
        let from = start.max(base) - base;
        let to = (end - base).min(WORD_BLOCKS);
        (word as usize, (u64::MAX >> (WORD_BLOCKS - (to - from))) << from)
    })
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn extent(blocks: u64) -> Vec<u8> {
        Extent::unwritten(7, blocks).encode()
    }

    fn watching(most_bytes: usize) -> NewMappings {
        let mut new = NewMappings::new(most_bytes);
        new.begin_at(100);
        new.watch(100);
        new
    }

    #[test]
    fn what_was_ever_mapped_of_a_watched_file_is_known_and_nothing_else() {
        let mut new = watching(1 << 20);
        let mut mapped = BTreeSet::new();
        let mut random = 1_u64;
        for round in 0..300 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Around a border of chunks and of words, and once far away.
            let start =
                if round == 200 { 1 << 40 } else { CHUNK_BLOCKS - 700 + (random >> 33) % 1400 };
            let blocks = if round % 3 == 0 { (random >> 20) % 200 + 1 } else { 1 };
            new.note(&Key::extent(100, start), Some(&extent(blocks)));
            mapped.extend(start..start + blocks);
            if round % 10 == 0 {
                // Unmapped again: may be answered either way, but never wrongly.
                new.note(&Key::extent(100, start), None);
            }
        }
        let base = CHUNK_BLOCKS - 1000;
        for start in (base..base + 2000).chain((1 << 40) - 3..(1 << 40) + 300) {
            for blocks in [1, 2, 63, 64, 65, 130] {
                let expected = mapped.range(start..start + blocks).next().is_none();
                assert_eq!(
                    new.excludes(100, &(start..start + blocks)),
                    expected,
                    "{start} {blocks}"
                );
            }
        }
        assert!(new.excludes(100, &(0..CHUNK_BLOCKS - 1000)));
        assert!(new.excludes(100, &(u64::MAX - 5..u64::MAX)));
        assert!(new.excludes(100, &(CHUNK_BLOCKS..CHUNK_BLOCKS)), "nothing is not mapped");
    }

    #[test]
    fn only_new_files_that_are_watched_are_known() {
        let mut new = watching(1 << 20);
        new.watch(99);
        for number in [99, 101] {
            assert!(!new.excludes(number, &(0..1)), "{number}");
        }
        let mut unknown = NewMappings::new(1 << 20);
        unknown.watch(100);
        assert!(!unknown.excludes(100, &(0..1)), "it is not known which files are new");
    }

    #[test]
    fn a_file_that_is_gone_or_emptied_or_cannot_be_read_is_forgotten() {
        let mut new = watching(1 << 20);
        new.note(&Key::extent(100, 5), Some(&extent(3)));
        assert!(!new.excludes(100, &(7..8)) && new.excludes(100, &(8..9)));
        new.note(&Key::inode(100), Some(&[]));
        assert!(new.excludes(100, &(8..9)));
        new.watch(100);
        assert!(new.excludes(100, &(5..8)));
        new.note(&Key::extent(100, 5), Some(&[1]));
        assert!(!new.excludes(100, &(8..9)));
        new.watch(100);
        new.note(&Key::inode(100), None);
        assert!(!new.excludes(100, &(8..9)));
        assert_eq!((new.bytes, new.files.len()), (0, 0));
    }

    #[test]
    fn memory_is_bounded_and_given_back() {
        let most_bytes = 10 * CHUNK_BYTES;
        let mut new = watching(most_bytes);
        new.watch(101);
        for chunk in 0..100 {
            for file in [100, 101] {
                new.note(&Key::extent(file, chunk * CHUNK_BLOCKS), Some(&extent(1)));
                assert!(new.bytes <= most_bytes);
                assert!(!new.excludes(file, &(chunk * CHUNK_BLOCKS..chunk * CHUNK_BLOCKS + 1)));
            }
        }
        assert_eq!((new.bytes, new.files.len()), (0, 0), "both were given up");
        for number in 0..1000 {
            new.watch(200 + number);
        }
        assert_eq!(new.files.len(), most_bytes / FILE_BYTES);
    }
}
