//! The mapping of file blocks to volume blocks, as operations on extent items.
//!
//! All changes of an inode's mapping are made under its `map` lock. Reading without it is allowed
//! where the caller can tell afterwards that the page it looked up was not touched meanwhile.
//!
//! **Invariant:** the extents of an inode do not overlap; a block belongs to at most one extent.

use crate::alloc::Run;
use crate::error::{Error, Result};
use crate::format::item::Extent;
use crate::format::{Key, Kind, MAX_FILE_BLOCKS, MAX_WRITTEN_EXTENT_BLOCKS};
use crate::tree::Value;
use crate::txn::{Op, View};

/// How many extents one look-up reads at a time.
const BATCH_EXTENTS: usize = 32;

/// A piece of a file that is mapped to consecutive blocks.
#[derive(Debug, Clone)]
pub struct Piece {
    /// First file block of the piece.
    pub file_block: u64,
    /// First block of the volume.
    pub block: u64,
    /// Length.
    pub blocks: u64,
    /// Reads as zeros.
    pub unwritten: bool,
    inode: u64,
    /// The whole extent's item, and where the piece starts in it.
    item: Value,
    skip: u64,
}

impl Piece {
    /// Checksum of the piece's block `index`, unless unwritten.
    pub fn checksum(&self, index: u64) -> Option<u32> {
        Extent::checksum_at(&self.item, self.skip + index)
    }

    /// First file block behind the piece.
    pub fn end(&self) -> u64 {
        self.file_block + self.blocks
    }

    /// The whole extent that the piece is part of.
    pub fn whole(&self) -> Result<(Key, Extent)> {
        let key = Key::extent(self.inode, self.file_block - self.skip);
        Ok((key, Extent::decode(&self.item)?))
    }

    fn clipped(key: Key, item: Value, start: u64, end: u64) -> Result<Option<Self>> {
        let (block, blocks, unwritten) = head(key, &item)?;
        let from = key.offset.max(start);
        let to = key.offset.saturating_add(blocks).min(end);
        if from >= to {
            return Ok(None);
        }
        let skip = from - key.offset;
        Ok(Some(Self {
            file_block: from,
            block: block + skip,
            blocks: to - from,
            unwritten,
            inode: key.inode,
            item,
            skip,
        }))
    }
}

/// The head of an extent item: (block, blocks, unwritten). Its end is a file block that can be, so that
/// sums of places cannot overflow.
fn head(key: Key, item: &[u8]) -> Result<(u64, u64, bool)> {
    let (block, blocks, unwritten) = Extent::decode_head(item)?;
    if key.offset > MAX_FILE_BLOCKS - blocks {
        let inode = key.inode;
        return Err(Error::Corrupt(format!("inode {inode}: an extent beyond the largest file")));
    }
    Ok((block, blocks, unwritten))
}

/// An extent as the store has it.
type Item = (Key, Value);

/// The first key of `inode`'s extents.
fn floor(inode: u64) -> Key {
    Key::extent(inode, 0)
}

/// The extent items that overlap file blocks `start .. end`, at most about `limit`, and the file block
/// to go on from.
fn overlapping(
    store: &dyn View,
    inode: u64,
    start: u64,
    end: u64,
    limit: usize,
) -> Result<(Vec<Item>, Option<u64>)> {
    if start >= end {
        return Ok((Vec::new(), None));
    }
    let mut items = Vec::new();
    if let Some((key, value)) = store.get_le(Key::extent(inode, start), floor(inode))?
        && key.offset < start
    {
        let (_, blocks, _) = head(key, &value)?;
        if key.offset.saturating_add(blocks) > start {
            items.push((key, value));
        }
    }
    let (rest, next) =
        store.collect(Key::extent(inode, start), Key::extent(inode, end - 1), limit)?;
    items.extend(rest);
    let Some(next) = next.filter(|key| key.inode == inode && key.kind == Kind::Extent) else {
        return Ok((items, None));
    };
    // The key to go on from may be the one right behind the last item's: inside its extent.
    let covered = match items.last() {
        Some((key, value)) => key.offset.saturating_add(Extent::decode_head(value)?.1),
        None => start,
    };
    Ok((items, Some(next.offset.max(covered))))
}

/// What file blocks `start .. end` are mapped to, in order, without the holes. The second part tells where to go on,
/// if there may be more.
pub fn pieces(
    store: &dyn View,
    inode: u64,
    start: u64,
    end: u64,
) -> Result<(Vec<Piece>, Option<u64>)> {
    // The common case is one extent for all of it: one search from above.
    if let Some((key, value)) = store.get_le(Key::extent(inode, start), floor(inode))?
        && let Some(piece) = Piece::clipped(key, value, start, end)?
        && piece.end() == end
    {
        return Ok((vec![piece], None));
    }
    let (items, next) = overlapping(store, inode, start, end, BATCH_EXTENTS)?;
    let mut found = Vec::with_capacity(items.len());
    for (key, value) in items {
        found.extend(Piece::clipped(key, value, start, end)?);
    }
    Ok((found, next))
}

/// All of [`pieces`], however many.
pub fn all_pieces(store: &dyn View, inode: u64, start: u64, end: u64) -> Result<Vec<Piece>> {
    let mut found = Vec::new();
    let mut from = Some(start);
    while let Some(start) = from {
        let (more, next) = pieces(store, inode, start, end)?;
        found.extend(more);
        from = next;
    }
    Ok(found)
}

/// What happens to the blocks that a cut unmaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unmapped {
    /// They become free.
    Freed,
    /// They stay allocated: the caller maps them again in the same operation.
    Kept,
}

/// Unmaps file blocks `start .. end`, at most about `limit` extents of them. Answers the number of blocks unmapped
/// and the file block to go on from if more is mapped.
///
/// The range of one call is cut from `start` upwards, so that a crash between calls leaves a
/// mapping that the next attempt continues with.
pub fn cut(
    store: &dyn View,
    op: &mut Op,
    inode: u64,
    (start, end): (u64, u64),
    unmapped: Unmapped,
    limit: usize,
) -> Result<(u64, Option<u64>)> {
    let (items, next) = overlapping(store, inode, start, end, limit)?;
    let mut blocks_cut = 0;
    for (key, value) in items {
        let (block, blocks, unwritten) = head(key, &value)?;
        let from = key.offset.max(start);
        let to = key.offset.saturating_add(blocks).min(end);
        if from >= to {
            continue;
        }
        if from == key.offset {
            op.delete(key);
        }
        let keep_head = from - key.offset;
        let keep_tail = key.offset + blocks - to;
        if keep_head > 0 || keep_tail > 0 {
            let whole =
                if unwritten { Extent::unwritten(block, blocks) } else { Extent::decode(&value)? };
            if keep_head > 0 {
                op.put(key, &whole.part(0, keep_head).encode());
            }
            if keep_tail > 0 {
                op.put(Key::extent(inode, to), &whole.part(to - key.offset, keep_tail).encode());
            }
        }
        if unmapped == Unmapped::Freed {
            op.freed(Run { start: block + keep_head, blocks: to - from });
        }
        blocks_cut += to - from;
    }
    Ok((blocks_cut, next))
}

/// Maps file blocks from `file_block` on to `extent` (any length; stored in items of legal size). The
/// range must be unmapped. With `left`, the extent item that ends there is extended where it
/// fits.
pub fn insert(
    op: &mut Op,
    inode: u64,
    file_block: u64,
    extent: &Extent,
    left: Option<(Key, Extent)>,
) {
    let mut done = 0;
    if let Some((key, left)) = left
        && !left.is_unwritten()
        && !extent.is_unwritten()
        && key.offset + left.blocks == file_block
        && left.block + left.blocks == extent.block
        && left.block / crate::format::GROUP_BLOCKS == extent.block / crate::format::GROUP_BLOCKS
        && left.blocks < MAX_WRITTEN_EXTENT_BLOCKS
    {
        done = extent.blocks.min(MAX_WRITTEN_EXTENT_BLOCKS - left.blocks);
        let mut merged = left;
        merged.blocks += done;
        merged.checksums.extend_from_slice(&extent.checksums[..done as usize]);
        op.put(key, &merged.encode());
    }
    let limit = if extent.is_unwritten() {
        crate::format::MAX_UNWRITTEN_EXTENT_BLOCKS
    } else {
        MAX_WRITTEN_EXTENT_BLOCKS
    };
    while done < extent.blocks {
        let blocks = (extent.blocks - done).min(limit);
        op.put(Key::extent(inode, file_block + done), &extent.part(done, blocks).encode());
        done += blocks;
    }
}

/// The extent that ends exactly at `file_block`, if there is one.
pub fn left_neighbour(
    store: &dyn View,
    inode: u64,
    file_block: u64,
) -> Result<Option<(Key, Extent)>> {
    if file_block == 0 {
        return Ok(None);
    }
    let Some((key, value)) = store.get_le(Key::extent(inode, file_block - 1), floor(inode))? else {
        return Ok(None);
    };
    let (_, blocks, unwritten) = head(key, &value)?;
    if key.offset + blocks != file_block || unwritten {
        return Ok(None);
    }
    Ok(Some((key, Extent::decode(&value)?)))
}

/// The last mapped block before `file_block`: where new blocks are best placed.
pub fn placement_hint(store: &dyn View, inode: u64, file_block: u64) -> Result<Option<u64>> {
    let Some((key, value)) = store.get_le(Key::extent(inode, file_block), floor(inode))? else {
        return Ok(None);
    };
    let (block, blocks, _) = head(key, &value)?;
    Ok(Some(block + (file_block - key.offset).min(blocks)))
}
