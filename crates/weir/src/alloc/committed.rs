//! The state of the bits as of recorded operations: what the next checkpoint writes, and the
//! reading of it back. No locks.

use std::ops::Range;

use super::bitmap::{BITS, Bitmap};
use super::{BitmapWrite, Run, SpaceChange};
use crate::device::buffer::AlignedBuf;
use crate::device::{Device, IoClass};
use crate::format::bitmap::{self as stored, BitmapHeader};
use crate::format::geometry::Geometry;
use crate::format::root::GroupEntry;
use crate::format::{BLOCK_BYTES, BLOCK_BYTES_U64, FormatError, VolumeId};
use crate::{Error, Result};

/// Up to so many groups, all bitmaps are read when the volume is opened, in one request.
pub(super) const EAGER_GROUPS: u32 = 64;

/// Which bitmap is read or written.
#[derive(Debug, Clone, Copy)]
pub(super) struct Owner {
    pub geometry: Geometry,
    pub volume_id: VolumeId,
}

impl Owner {
    fn header(&self, group: u32, slot: u8, generation: u64) -> BitmapHeader {
        let block_address = self.geometry.bitmap_block(group, slot);
        BitmapHeader { volume_id: self.volume_id, block_address, generation, group }
    }

    /// The bitmap of `group` in `bytes`, checked against the root's `entry` for it.
    fn decode(&self, bytes: &[u8], group: u32, entry: &GroupEntry) -> Result<Bitmap> {
        let header = self.header(group, entry.slot, entry.generation);
        let bitmap = Bitmap::from_words(stored::decode(bytes, &header, entry)?);
        let data = self.geometry.data_bits(group);
        if bitmap.is_set(0..data.start) && bitmap.is_set(data.end..BITS) {
            return Ok(bitmap);
        }
        let problem = format!("group {group}: blocks outside of the data area are free");
        Err(FormatError::new("allocation bitmap", problem).into())
    }

    /// Reads the bitmap of one group.
    pub(super) fn read(
        &self,
        device: &dyn Device,
        group: u32,
        entry: &GroupEntry,
    ) -> Result<Bitmap> {
        let mut block = AlignedBuf::zeroed(BLOCK_BYTES);
        let offset_bytes = self.geometry.bitmap_block(group, entry.slot) * BLOCK_BYTES_U64;
        device.read(offset_bytes, &mut [&mut block], IoClass::SyncRead)?;
        self.decode(&block, group, entry)
    }

    /// Reads the bitmaps of all groups.
    pub(super) fn read_all(
        &self,
        device: &dyn Device,
        entries: &[GroupEntry],
    ) -> Result<Vec<Bitmap>> {
        let mut blocks = AlignedBuf::zeroed(2 * entries.len() * BLOCK_BYTES);
        let offset_bytes = self.geometry.bitmap_start_block() * BLOCK_BYTES_U64;
        device.read(offset_bytes, &mut [&mut blocks], IoClass::SyncRead)?;
        (0..)
            .zip(entries)
            .map(|(group, entry)| {
                let block = self.geometry.bitmap_block(group, entry.slot);
                let index = (block - self.geometry.bitmap_start_block()) as usize;
                self.decode(&blocks[index * BLOCK_BYTES..][..BLOCK_BYTES], group, entry)
            })
            .collect()
    }

    /// The bitmap of a group of an empty volume.
    pub(super) fn empty_group(&self, group: u32) -> Bitmap {
        let mut bitmap = Bitmap::full();
        bitmap.clear(self.geometry.data_bits(group));
        bitmap
    }
}

/// See the module's head.
#[derive(Debug)]
pub(super) struct Committed {
    /// As of the last call of [`Committed::write_changed`]; before it, as of the durable root.
    pub entries: Vec<GroupEntry>,
    /// `None`: not in memory, and so not changed since the volume was opened.
    bitmaps: Vec<Option<Bitmap>>,
    /// Groups changed since the last checkpoint; may name a group more than once.
    changed: Vec<u32>,
    /// Blocks to hand out again once the checkpoint being written is durable.
    pub in_flight: Vec<Run>,
}

/// An allocation or freeing that contradicts the bits.
fn contradiction(what: &str, run: Run) -> Error {
    Error::Corrupt(format!(
        "{what}: blocks {} to {}: run fsck",
        run.start,
        run.start.saturating_add(run.blocks)
    ))
}

impl Committed {
    pub(super) fn new(entries: Vec<GroupEntry>) -> Self {
        let bitmaps = vec![None; entries.len()];
        Self { entries, bitmaps, changed: Vec::new(), in_flight: Vec::new() }
    }

    pub(super) fn is_loaded(&self, group: u32) -> bool {
        self.bitmaps[group as usize].is_some()
    }

    pub(super) fn install(&mut self, group: u32, bitmap: Bitmap) {
        self.bitmaps[group as usize] = Some(bitmap);
    }

    /// Makes the next checkpoint write every group.
    pub(super) fn change_all(&mut self) {
        self.changed.extend(0..self.entries.len() as u32);
    }

    /// Applies one change. Its run must have been checked to be a data run of a loaded group.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if blocks in use are allocated or free ones freed.
    pub(super) fn apply(&mut self, change: SpaceChange) -> Result<()> {
        let run = change.run();
        let group = run.group();
        let Some(bitmap) = &mut self.bitmaps[group as usize] else {
            return Err(contradiction("a change of an unknown group", run));
        };
        let changed = match change {
            SpaceChange::Alloc(_) => bitmap.set(run.bits()),
            SpaceChange::Free(_) => bitmap.clear(run.bits()),
        };
        if u64::from(changed) != run.blocks {
            let what = match change {
                SpaceChange::Alloc(_) => "blocks in use were allocated again",
                SpaceChange::Free(_) => "free blocks were freed",
            };
            return Err(contradiction(what, run));
        }
        if self.changed.last() != Some(&group) {
            self.changed.push(group);
        }
        Ok(())
    }

    /// The bitmaps that changed, for the slots that the durable root does not name, and the
    /// group table updated for them.
    pub(super) fn write_changed(&mut self, owner: &Owner, generation: u64) -> Vec<BitmapWrite> {
        let mut changed = std::mem::take(&mut self.changed);
        changed.sort_unstable();
        changed.dedup();
        let mut writes = Vec::with_capacity(changed.len());
        for group in changed {
            let Some(bitmap) = &self.bitmaps[group as usize] else { continue };
            let entry = &mut self.entries[group as usize];
            let slot = 1 - (entry.slot & 1);
            let header = owner.header(group, slot, generation);
            let (content, checksum) = stored::encode(&header, bitmap.words());
            let free_blocks = bitmap.count_clear();
            *entry = GroupEntry { generation, free_blocks, checksum, slot };
            writes.push(BitmapWrite { block: header.block_address, slot, content });
        }
        writes
    }

    /// The parts of `run` that are free in the committed state: all of it, unless replay saw
    /// blocks freed and allocated again.
    pub(super) fn free_parts(&self, run: Run) -> impl Iterator<Item = Range<u32>> {
        let bitmap = self.bitmaps[run.group() as usize].as_ref();
        let bits = run.bits();
        let mut at = bits.start;
        std::iter::from_fn(move || {
            let bitmap = bitmap?;
            let start = bitmap.next_clear(at..bits.end)?;
            at = bitmap.next_set(start..bits.end);
            Some(start..at)
        })
    }
}
