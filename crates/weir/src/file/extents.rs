//! The mapping of file blocks to volume blocks, as operations on extent items.
//!
//! All changes of an inode's mapping are made under its `map` lock. Reading without it is allowed
//! where the caller can tell afterwards that the page it looked up was not touched meanwhile.
//!
//! **Invariant:** the extents of an inode do not overlap; a block belongs to at most one extent.
//!
//! What covers a file block is the last extent that begins at or before it, no further away than an extent may be long
//! ([`Mapping::reach_blocks`]). That bound matters: where many extents were cut since the last checkpoint, whatever looks
//! further has to step over all of them.

use crate::alloc::Run;
use crate::error::{Error, Result};
use crate::format::item::Extent;
use crate::format::{
    Key, Kind, MAX_FILE_BLOCKS, MAX_UNWRITTEN_EXTENT_BLOCKS, MAX_WRITTEN_EXTENT_BLOCKS,
};
use crate::inode::Inode;
use crate::mutation::{self, Mutation};
use crate::sync::atomic::Ordering;
use crate::tree::Value;
use crate::txn::mapping_moments::MappingMoment;
use crate::txn::{Op, Store, View};

/// How many extents one look-up reads at a time.
const BATCH_EXTENTS: usize = 32;

/// Whose mapping is looked at.
#[derive(Debug, Clone, Copy)]
pub struct Mapping {
    /// The inode's number.
    pub inode: u64,
    /// No extent of it is longer than this.
    pub reach_blocks: u64,
}

impl Mapping {
    /// The lowest key that an extent may have which reaches file block `file_block`.
    fn floor(self, file_block: u64) -> Key {
        Key::extent(self.inode, (file_block + 1).saturating_sub(self.reach_blocks))
    }

    /// The same, where no extent that begins before the first file block looked at reaches it.
    #[must_use]
    pub fn from_its_start(self) -> Self {
        Self { reach_blocks: 1, ..self }
    }
}

impl From<u64> for Mapping {
    fn from(inode: u64) -> Self {
        Self { inode, reach_blocks: MAX_UNWRITTEN_EXTENT_BLOCKS }
    }
}

impl From<&Inode> for Mapping {
    fn from(inode: &Inode) -> Self {
        let has_unwritten = inode.unwritten.load(Ordering::Relaxed);
        let longest =
            if has_unwritten { MAX_UNWRITTEN_EXTENT_BLOCKS } else { MAX_WRITTEN_EXTENT_BLOCKS };
        Self { inode: inode.number, reach_blocks: longest }
    }
}

const _: () = assert!(MAX_WRITTEN_EXTENT_BLOCKS <= MAX_UNWRITTEN_EXTENT_BLOCKS);

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

    /// The file block that the whole extent begins with.
    pub fn extent_start(&self) -> u64 {
        self.file_block - self.skip
    }

    /// The piece is all of its extent.
    pub fn is_whole(&self) -> bool {
        self.skip == 0 && Extent::decode_head(&self.item).is_ok_and(|head| head.1 == self.blocks)
    }

    /// Bytes of the whole extent's item.
    pub fn item_bytes(&self) -> usize {
        self.item.len()
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

/// What [`overlapping`] found.
struct Found {
    items: Vec<Item>,
    /// The file block to go on from, if there may be more.
    next: Option<u64>,
    /// The last extent before the range, if nothing is mapped where it starts and that extent is within reach.
    before: Option<Item>,
}

/// The extent items that overlap file blocks `start .. end`, at most about `limit`.
fn overlapping(
    store: &dyn View,
    file: Mapping,
    (start, end): (u64, u64),
    limit: usize,
) -> Result<Found> {
    let mut found = Found { items: Vec::new(), next: None, before: None };
    if start >= end {
        return Ok(found);
    }
    // The one look-up that most need.
    let mut reached = start + 1;
    if let Some((key, value)) = store.get_le(Key::extent(file.inode, start), file.floor(start))? {
        let (_, blocks, _) = head(key, &value)?;
        if key.offset + blocks > start {
            reached = key.offset + blocks;
            found.items.push((key, value));
        } else {
            found.before = Some((key, value));
        }
    }
    if reached >= end {
        return Ok(found);
    }
    let range = (Key::extent(file.inode, reached), Key::extent(file.inode, end - 1));
    let (rest, next) = store.collect(range.0, range.1, limit)?;
    found.items.extend(rest);
    if let Some(next) = next.filter(|key| key.inode == file.inode && key.kind == Kind::Extent) {
        // The key to go on from may be the one right behind the last item's: inside its extent.
        let covered = match found.items.last() {
            Some((key, value)) => key.offset.saturating_add(Extent::decode_head(value)?.1),
            None => start,
        };
        found.next = Some(next.offset.max(covered));
    }
    Ok(found)
}

fn clipped(items: Vec<Item>, (start, end): (u64, u64)) -> Result<Vec<Piece>> {
    let mut pieces = Vec::with_capacity(items.len());
    for (key, value) in items {
        pieces.extend(Piece::clipped(key, value, start, end)?);
    }
    Ok(pieces)
}

/// What file blocks `start .. end` are mapped to, in order, without the holes. The second part tells where to go on,
/// if there may be more.
pub fn pieces(
    store: &dyn View,
    file: impl Into<Mapping>,
    start: u64,
    end: u64,
) -> Result<(Vec<Piece>, Option<u64>)> {
    let found = overlapping(store, file.into(), (start, end), BATCH_EXTENTS)?;
    Ok((clipped(found.items, (start, end))?, found.next))
}

/// The first of [`pieces`], without a look at those behind it. As there, none may be found though there are some: then the second says where to
/// go on.
pub fn first_piece(
    store: &dyn View,
    file: impl Into<Mapping>,
    start: u64,
    end: u64,
) -> Result<(Option<Piece>, Option<u64>)> {
    let found = overlapping(store, file.into(), (start, end), 1)?;
    Ok((clipped(found.items, (start, end))?.into_iter().next(), found.next))
}

/// All of [`pieces`], however many.
pub fn all_pieces(
    store: &dyn View,
    file: impl Into<Mapping>,
    start: u64,
    end: u64,
) -> Result<Vec<Piece>> {
    Ok(all_pieces_after(store, file.into(), start, end)?.0)
}

/// The same, and the last extent before `start`, if nothing is mapped there and that extent is within reach.
pub fn all_pieces_after(
    store: &dyn View,
    file: Mapping,
    start: u64,
    end: u64,
) -> Result<(Vec<Piece>, Option<Before>)> {
    let mut walk = Walk::new(store, file, (start, end));
    let Some(first) = walk.look()? else { return Ok((Vec::new(), None)) };
    let before = first.before.map(|(key, item)| Before { key, item });
    let mut pieces = clipped(first.items, (start, end))?;
    while let Some(more) = walk.pieces()? {
        pieces.extend(more);
    }
    Ok((pieces, before))
}

/// A walk through what a range of file blocks is mapped to, some extents at a time.
///
/// Nothing that it has seen reaches the place where it goes on, so nothing is looked for before that: it would step over whatever was cut there
/// once for each part of the way. That holds as long as the mapping stays as it was when the walk began to look.
pub struct Walk<'a> {
    store: &'a dyn View,
    file: Mapping,
    /// Where to go on; none at the end.
    next: Option<u64>,
    end: u64,
    /// Of the mapping, before it was first looked at without knowing what lies before.
    moment: Option<MappingMoment>,
}

impl<'a> Walk<'a> {
    /// Through file blocks `start .. end`.
    pub fn new(store: &'a dyn View, file: impl Into<Mapping>, (start, end): (u64, u64)) -> Self {
        Self { store, file: file.into(), next: Some(start), end, moment: None }
    }

    /// The next pieces, in order, without the holes; perhaps none, where there may be more. `None`: the end.
    pub fn pieces(&mut self) -> Result<Option<Vec<Piece>>> {
        let range = (self.next.unwrap_or(self.end), self.end);
        self.look()?.map(|found| clipped(found.items, range)).transpose()
    }

    fn look(&mut self) -> Result<Option<Found>> {
        let Some(start) = self.next else { return Ok(None) };
        let found = if let Some(found) = self.look_on(start)? {
            found
        } else {
            self.moment = Some(self.store.mapping_moment(self.file.inode));
            overlapping(self.store, self.file, (start, self.end), BATCH_EXTENTS)?
        };
        self.next = found.next;
        Ok(Some(found))
    }

    /// What begins at `start` or behind it; `None` if something may reach it from before.
    fn look_on(&self, start: u64) -> Result<Option<Found>> {
        let Some(moment) = self.moment else { return Ok(None) };
        let file = self.file.from_its_start();
        let found = overlapping(self.store, file, (start, self.end), BATCH_EXTENTS)?;
        Ok((self.store.mapping_moment(self.file.inode) == moment).then_some(found))
    }
}

/// The extent before a place that is not mapped.
#[derive(Clone)]
pub struct Before {
    key: Key,
    item: Value,
}

impl Before {
    /// The file block that the extent begins with.
    pub fn extent_start(&self) -> u64 {
        self.key.offset
    }

    /// The block behind it: where what follows in the file is best placed.
    pub fn next_block(&self) -> Result<u64> {
        let (block, blocks, _) = head(self.key, &self.item)?;
        Ok(block + blocks)
    }

    /// The extent, if it ends exactly at `file_block` and holds data.
    pub fn adjoining(&self, file_block: u64) -> Result<Option<(Key, Extent)>> {
        let (_, blocks, unwritten) = head(self.key, &self.item)?;
        if self.key.offset + blocks != file_block || unwritten {
            return Ok(None);
        }
        Ok(Some((self.key, Extent::decode(&self.item)?)))
    }
}

/// What happens to the blocks that a cut unmaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unmapped {
    /// They become free.
    Freed,
    /// Those that hold data become free; unwritten ones are not unmapped at all.
    WrittenFreed,
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
    file: impl Into<Mapping>,
    (start, end): (u64, u64),
    unmapped: Unmapped,
    limit: usize,
) -> Result<(u64, Option<u64>)> {
    let found = overlapping(store, file.into(), (start, end), limit)?;
    let mut pieces = clipped(found.items, (start, end))?;
    if unmapped == Unmapped::WrittenFreed || mutation::active(Mutation::KeepUnwritten) {
        pieces.retain(|piece| !piece.unwritten);
    }
    Ok((cut_pieces(op, &pieces, unmapped)?, found.next))
}

/// Unmaps `pieces`. Answers the number of blocks.
pub fn cut_pieces(op: &mut Op, pieces: &[Piece], unmapped: Unmapped) -> Result<u64> {
    let mut blocks_cut = 0;
    for piece in pieces {
        let key = Key::extent(piece.inode, piece.file_block - piece.skip);
        let (block, blocks, unwritten) = head(key, &piece.item)?;
        let (keep_head, to) = (piece.skip, piece.end());
        let keep_tail = key.offset + blocks - to;
        if keep_head == 0 {
            op.delete(key);
        }
        if keep_head > 0 || keep_tail > 0 {
            let whole = if unwritten {
                Extent::unwritten(block, blocks)
            } else {
                Extent::decode(&piece.item)?
            };
            if keep_head > 0 {
                op.put(key, &whole.part(0, keep_head).encode());
            }
            if keep_tail > 0 {
                let tail = whole.part(to - key.offset, keep_tail);
                op.put(Key::extent(piece.inode, to), &tail.encode());
            }
        }
        if unmapped != Unmapped::Kept {
            op.freed(Run { start: piece.block, blocks: piece.blocks });
        }
        blocks_cut += piece.blocks;
    }
    Ok(blocks_cut)
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
    file: impl Into<Mapping>,
    file_block: u64,
) -> Result<Option<(Key, Extent)>> {
    if file_block == 0 {
        return Ok(None);
    }
    let file = file.into();
    let last = file_block - 1;
    let Some((key, item)) = store.get_le(Key::extent(file.inode, last), file.floor(last))? else {
        return Ok(None);
    };
    Before { key, item }.adjoining(file_block)
}

/// The last mapped block before `file_block`, however far away, if it is not behind many that were cut: where new blocks are best placed.
pub fn placement_hint(store: &Store, inode: u64, file_block: u64) -> Result<Option<u64>> {
    let lowest = Key::extent(inode, 0);
    let Some((key, value)) = store.guess_le(Key::extent(inode, file_block), lowest)? else {
        return Ok(None);
    };
    let (block, blocks, _) = head(key, &value)?;
    Ok(Some(block + (file_block - key.offset).min(blocks)))
}
