//! Copy-on-write images of a device: cloning one, or changing a block of a clone, costs well under
//! a microsecond, whatever the image's size.
//!
//! An image is a vector of chunks of 32 blocks; chunks and blocks are shared between clones. It
//! carries a hash of its whole content, kept up to date block by block, so that equal crash states
//! are recognised without comparing bytes. Blocks never written read as zeros and take no memory.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::rng::mix;

/// Bytes of a block: the unit of sharing.
pub const BLOCK_BYTES: usize = 4096;
/// Bytes of a sector: the unit that a power cut tears at.
pub const SECTOR_BYTES: usize = 512;
/// Sectors of a block.
pub const SECTORS_PER_BLOCK: usize = BLOCK_BYTES / SECTOR_BYTES;
const CHUNK_BLOCKS: usize = 32;

/// The content of one block, never changed once made, and its hash once somebody asked for it: what is read
/// back after a crash is compared with what it may be, byte by byte, which costs a tenth of a hash.
pub struct Block {
    hash: OnceLock<u64>,
    bytes: [u8; BLOCK_BYTES],
}

impl fmt::Debug for Block {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Block({:016x})", self.hash())
    }
}

/// A shared block.
pub type BlockRef = Arc<Block>;

impl Block {
    /// A block that holds the first 4096 bytes of `bytes`, zero-padded.
    pub fn new(bytes: &[u8]) -> BlockRef {
        if let Some(content) = bytes.first_chunk() {
            return Self::from_content(content);
        }
        let mut content = [0; BLOCK_BYTES];
        content[..bytes.len()].copy_from_slice(bytes);
        Self::from_content(&content)
    }

    /// The block of zeros.
    pub fn zero() -> &'static BlockRef {
        static ZERO: OnceLock<BlockRef> = OnceLock::new();
        ZERO.get_or_init(|| Self::from_content(&[0; BLOCK_BYTES]))
    }

    fn from_content(bytes: &[u8; BLOCK_BYTES]) -> BlockRef {
        Arc::new(Self { hash: OnceLock::new(), bytes: *bytes })
    }

    /// The content.
    pub const fn bytes(&self) -> &[u8; BLOCK_BYTES] {
        &self.bytes
    }

    /// XXH3-64 of the content.
    pub fn hash(&self) -> u64 {
        *self.hash.get_or_init(|| xxhash_rust::xxh3::xxh3_64(&self.bytes))
    }

    /// This block with the sectors of `mask` (bit 0 is the first sector) taken from `newer`.
    pub fn with_sectors(self: &Arc<Self>, newer: &BlockRef, mask: u8) -> BlockRef {
        match mask {
            0 => Arc::clone(self),
            0xFF => Arc::clone(newer),
            _ => {
                let mut bytes = self.bytes;
                for sector in (0..SECTORS_PER_BLOCK).filter(|sector| mask & (1 << sector) != 0) {
                    let range = sector * SECTOR_BYTES..(sector + 1) * SECTOR_BYTES;
                    bytes[range.clone()].copy_from_slice(&newer.bytes[range]);
                }
                Self::from_content(&bytes)
            }
        }
    }
}

type Chunk = [Option<BlockRef>; CHUNK_BLOCKS];

/// The content of a device at one instant.
#[derive(Clone)]
pub struct Image {
    chunks: Vec<Option<Arc<Chunk>>>,
    blocks: u64,
    hash: u64,
}

impl fmt::Debug for Image {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Image({} blocks, {:016x})", self.blocks, self.hash)
    }
}

impl PartialEq for Image {
    fn eq(&self, other: &Self) -> bool {
        self.blocks == other.blocks
            && (0..self.blocks).all(|index| self.block(index).bytes == other.block(index).bytes)
    }
}

impl Eq for Image {}

impl Image {
    /// An image of `blocks` blocks of zeros.
    pub fn zeroed(blocks: u64) -> Self {
        let chunks = vec![None; (blocks as usize).div_ceil(CHUNK_BLOCKS)];
        Self { chunks, blocks, hash: 0 }
    }

    /// Capacity in blocks.
    pub const fn blocks(&self) -> u64 {
        self.blocks
    }

    /// A hash of the whole content; equal for equal images, whatever their history.
    pub const fn hash(&self) -> u64 {
        self.hash
    }

    /// The same hash over all but `blocks`.
    pub fn hash_without(&self, blocks: Range<u64>) -> u64 {
        let share = |index| Self::contribution(index, self.block(index));
        blocks.map(share).fold(self.hash, u64::wrapping_sub)
    }

    /// The block at `index`; zeros outside of the image.
    pub fn block(&self, index: u64) -> &BlockRef {
        let chunk = self.chunks.get(index as usize / CHUNK_BLOCKS).and_then(Option::as_ref);
        let block = chunk.and_then(|chunk| chunk[index as usize % CHUNK_BLOCKS].as_ref());
        block.unwrap_or_else(|| Block::zero())
    }

    /// Replaces the block at `index`; ignored outside of the image.
    pub fn set_block(&mut self, index: u64, block: BlockRef) {
        if index >= self.blocks {
            return;
        }
        let old = Self::contribution(index, self.block(index));
        let new = Self::contribution(index, &block);
        let chunk = &mut self.chunks[index as usize / CHUNK_BLOCKS];
        let chunk = chunk.get_or_insert_with(|| Arc::new([const { None }; CHUNK_BLOCKS]));
        Arc::make_mut(chunk)[index as usize % CHUNK_BLOCKS] = Some(block);
        self.hash = self.hash.wrapping_sub(old).wrapping_add(new);
    }

    /// Replaces the sectors of `mask` of the block at `index`.
    pub fn set_sectors(&mut self, index: u64, newer: &BlockRef, mask: u8) {
        if mask != 0 && index < self.blocks {
            let block = self.block(index).with_sectors(newer, mask);
            self.set_block(index, block);
        }
    }

    /// The same content on a device of another capacity: cut, or extended by zeros.
    #[must_use]
    pub fn resized(&self, blocks: u64) -> Self {
        let mut image = Self::zeroed(blocks);
        for index in 0..blocks.min(self.blocks) {
            let block = self.block(index);
            if !Arc::ptr_eq(block, Block::zero()) {
                image.set_block(index, Arc::clone(block));
            }
        }
        image
    }

    /// A block's share in the image's hash: zero blocks add nothing.
    fn contribution(index: u64, block: &Block) -> u64 {
        let hash = block.hash();
        if hash == Block::zero().hash() { 0 } else { mix(hash ^ mix(index)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_share_blocks_and_change_apart() {
        let mut first = Image::zeroed(100);
        first.set_block(70, Block::new(b"a"));
        let mut second = first.clone();
        second.set_block(70, Block::new(b"b"));
        second.set_block(3, Block::new(b"c"));
        assert_eq!(first.block(70).bytes()[0], b'a');
        assert_eq!(second.block(70).bytes()[0], b'b');
        assert_eq!(first.block(3).bytes(), &[0; BLOCK_BYTES]);
        assert_ne!(first.hash(), second.hash());
    }

    #[test]
    fn the_hash_depends_on_content_and_place_but_not_on_history() {
        let mut first = Image::zeroed(64);
        first.set_block(5, Block::new(b"x"));
        let mut second = Image::zeroed(64);
        second.set_block(5, Block::new(b"other"));
        second.set_block(6, Block::new(b"y"));
        second.set_block(6, Block::new(&[]));
        second.set_block(5, Block::new(b"x"));
        assert_eq!(first.hash(), second.hash());
        assert_eq!(first, second);
        second.set_block(9, Block::new(b"beside"));
        assert_eq!(first.hash_without(8..10), second.hash_without(8..10));
        assert_ne!(first.hash_without(5..6), second.hash_without(6..7));
        second.set_block(9, Block::new(&[]));
        let mut moved = Image::zeroed(64);
        moved.set_block(6, Block::new(b"x"));
        assert_ne!(first.hash(), moved.hash());
        assert_ne!(first, moved);
    }

    #[test]
    fn torn_blocks_mix_sectors_of_both_versions() {
        let (old, new) = (Block::new(&[1; BLOCK_BYTES]), Block::new(&[2; BLOCK_BYTES]));
        let torn = old.with_sectors(&new, 0b1000_0001);
        for sector in 0..SECTORS_PER_BLOCK {
            let expected = if sector == 0 || sector == 7 { 2 } else { 1 };
            let range = sector * SECTOR_BYTES..(sector + 1) * SECTOR_BYTES;
            assert!(torn.bytes()[range].iter().all(|&byte| byte == expected), "sector {sector}");
        }
    }

    #[test]
    fn a_resized_image_keeps_what_fits() {
        let mut image = Image::zeroed(40);
        image.set_block(2, Block::new(b"kept"));
        image.set_block(39, Block::new(b"cut"));
        let short = image.resized(32);
        assert_eq!((short.blocks(), short.block(2).bytes()[0]), (32, b'k'));
        assert_eq!(short.resized(40).block(39).bytes(), &[0; BLOCK_BYTES]);
    }
}
