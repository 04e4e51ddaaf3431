//! Directories that were made since the volume was opened, each with a filter of the names that it has ever had: whether a new
//! name is free there needs no look-up in deltas and tree, which costs more the larger they grow.
//!
//! A filter says sometimes yes where there is nothing, never the other way round. It is made with the directory, grows by
//! layers, and is given up when all of them take too much memory: then the directory is looked up as any other.
//!
//! Pure data. **Invariant:** a filter has every entry that its directory got since it was made.

use super::delta::name_bucket_hash;
use crate::format::{Key, Kind};
use crate::number_map::NumberMap;

/// A cache line of bits: all that one look-up touches in a layer.
type Block = [u64; 8];

/// Names for which a block has room: 16 bits each, so that one look-up in some thousand is wrong.
const NAMES_PER_BLOCK: usize = 32;
/// How much larger each layer is than the one before.
const GROWTH: usize = 8;
/// Bits of a name in its block.
const BITS_PER_NAME: u32 = 8;

struct Layer {
    blocks: Box<[Block]>,
    names: usize,
}

impl Layer {
    fn new(blocks: usize) -> Self {
        Self { blocks: vec![Block::default(); blocks].into(), names: 0 }
    }

    fn is_full(&self) -> bool {
        self.names >= self.blocks.len() * NAMES_PER_BLOCK
    }

    /// The block of a name, from the high half of its hash.
    fn place(&self, hash: u64) -> usize {
        (hash >> 40) as usize % self.blocks.len()
    }

    fn add(&mut self, hash: u64) {
        let block = &mut self.blocks[self.place(hash)];
        bits_of(hash).for_each(|(word, bit)| block[word] |= bit);
        self.names += 1;
    }

    fn excludes(&self, hash: u64) -> bool {
        let block = &self.blocks[self.place(hash)];
        bits_of(hash).any(|(word, bit)| block[word] & bit == 0)
    }
}

/// The bits of a name in its block: word and mask. From bits of its hash that do not choose the block, and as many from those mixed
/// once more.
fn bits_of(hash: u64) -> impl Iterator<Item = (usize, u64)> {
    const HALF: u32 = BITS_PER_NAME / 2;
    let mixed = hash.wrapping_mul(0xd6e8_feb8_6659_fd93) >> 28;
    (0..BITS_PER_NAME).map(move |each| {
        let bits = if each < HALF { hash } else { mixed };
        let bit = bits >> (9 * (each % HALF)) & 511;
        ((bit / 64) as usize, 1 << (bit % 64))
    })
}

/// The names of one directory; the layer that grows comes last.
struct NameSet(Vec<Layer>);

/// See the module's head.
pub struct NewDirectories {
    sets: NumberMap<NameSet>,
    bytes: usize,
    most_bytes: usize,
}

impl NewDirectories {
    /// No directory is new. `most_bytes`: what all filters may take.
    pub fn new(most_bytes: usize) -> Self {
        Self { sets: NumberMap::default(), bytes: 0, most_bytes }
    }

    /// The directory `number` is made: nothing is in it.
    pub fn made(&mut self, number: u64) {
        if let Some(layer) = self.layer(1) {
            self.forget(number);
            self.sets.insert(number, NameSet(vec![layer]));
        }
    }

    /// A layer of so many blocks, if there is memory for it.
    fn layer(&mut self, blocks: usize) -> Option<Layer> {
        let bytes = blocks * size_of::<Block>();
        let fits = self.bytes + bytes <= self.most_bytes;
        fits.then(|| {
            self.bytes += bytes;
            Layer::new(blocks)
        })
    }

    /// The item `key` changes; `is_gone`: it is deleted.
    pub fn note(&mut self, key: &Key, is_gone: bool) {
        match key.kind {
            Kind::Dirent if !is_gone => self.add(key),
            Kind::Inode if is_gone => self.forget(key.inode),
            _ => {}
        }
    }

    fn add(&mut self, key: &Key) {
        let Some(NameSet(layers)) = self.sets.get(&key.inode) else { return };
        if let Some(last) = layers.last()
            && last.is_full()
        {
            let Some(larger) = self.layer(last.blocks.len() * GROWTH) else {
                return self.forget(key.inode);
            };
            if let Some(NameSet(layers)) = self.sets.get_mut(&key.inode) {
                layers.push(larger);
            }
        }
        let layers = self.sets.get_mut(&key.inode);
        if let Some(last) = layers.and_then(|NameSet(layers)| layers.last_mut()) {
            last.add(name_bucket_hash(key));
        }
    }

    fn forget(&mut self, number: u64) {
        if let Some(NameSet(layers)) = self.sets.remove(&number) {
            let blocks: usize = layers.iter().map(|layer| layer.blocks.len()).sum();
            self.bytes -= blocks * size_of::<Block>();
        }
    }

    /// There is surely no entry between the two keys: they are of one bucket of a new directory that never had a name there.
    pub fn excludes(&self, from: &Key, to: &Key) -> bool {
        if !super::delta::is_one_bucket(from, to) {
            return false;
        }
        let hash = name_bucket_hash(from);
        let set = self.sets.get(&from.inode);
        set.is_some_and(|NameSet(layers)| layers.iter().all(|layer| layer.excludes(hash)))
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    fn entry(dir: u64, number: u64) -> Key {
        let hash = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) & 0x7fff_ffff_ffff_ff00;
        Key::new(dir, Kind::Dirent, hash | number & 3)
    }

    fn excludes(new: &NewDirectories, key: Key) -> bool {
        let (first, last) = (key.offset & !0xff, key.offset | 0xff);
        new.excludes(&Key { offset: first, ..key }, &Key { offset: last, ..key })
    }

    #[test]
    fn a_name_that_was_ever_there_is_never_excluded_and_most_others_are() {
        const NAMES: u64 = 100_000;
        let mut new = NewDirectories::new(1 << 20);
        new.made(7);
        for number in 0..NAMES {
            new.note(&entry(7, number), false);
            new.note(&entry(7, number / 2), true);
        }
        assert!((0..NAMES).all(|number| !excludes(&new, entry(7, number))));
        let excluded = (NAMES..2 * NAMES).filter(|number| excludes(&new, entry(7, *number)));
        assert!(excluded.count() as u64 > NAMES * 98 / 100);
    }

    #[test]
    fn only_narrow_ranges_of_new_directories_are_excluded() {
        let mut new = NewDirectories::new(1 << 20);
        assert!(!excludes(&new, entry(7, 1)), "not new");
        new.made(7);
        assert!(excludes(&new, entry(7, 1)));
        assert!(!new.excludes(&Key::MIN, &Key::MAX));
        assert!(!new.excludes(&Key::inode(7), &Key::inode(7)));
        new.note(&Key::inode(7), true);
        assert!(!excludes(&new, entry(7, 1)) && new.bytes == 0, "it is gone");
    }

    #[test]
    fn what_takes_too_much_memory_is_given_up_whole() {
        let mut new = NewDirectories::new(16 * size_of::<Block>());
        new.made(1);
        new.made(2);
        for number in 0..300 {
            new.note(&entry(1, number), false);
        }
        assert!(!excludes(&new, entry(1, 1000)) && excludes(&new, entry(2, 1000)));
        assert_eq!(new.bytes, size_of::<Block>());
        (3..50).for_each(|number| new.made(number));
        assert_eq!((new.sets.len(), new.bytes), (16, 16 * size_of::<Block>()));
    }
}
