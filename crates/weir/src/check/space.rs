//! Which blocks are reached from the tree, and whether the stored bitmaps say the same.

use super::View;
use super::report::{Findings, Place, ProblemKind};
use crate::alloc::bitmap::Bitmap;
use crate::device::buffer::AlignedBuf;
use crate::device::{Device, IoClass};
use crate::format::bitmap::{self as stored, BitmapHeader, WORDS};
use crate::format::geometry::Geometry;
use crate::format::root::GroupEntry;
use crate::format::{BLOCK_BYTES, BLOCK_BYTES_U64};
use std::collections::BTreeMap;

/// Groups whose bitmaps are read together.
const GROUPS_AT_ONCE: usize = 64;

/// The blocks that were reached. Memory: 4 KiB for each group that has any.
pub(super) struct Reached {
    geometry: Geometry,
    groups: BTreeMap<u32, Bitmap>,
}

/// What claiming blocks led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Claim {
    /// They are the caller's now.
    Fresh,
    /// They are not inside of the data area and of one group.
    Outside,
    /// Somebody claimed some of them before.
    Twice,
}

impl Reached {
    pub fn new(geometry: Geometry) -> Self {
        Self { geometry, groups: BTreeMap::new() }
    }

    /// Marks blocks as reached.
    pub fn claim(&mut self, start: u64, blocks: u64) -> Claim {
        if !self.geometry.is_data_run(start, blocks) {
            return Claim::Outside;
        }
        let first = Geometry::bit_of(start);
        let bits = first..first + blocks as u32;
        let empty = || Bitmap::from_words([0; WORDS]);
        let group = self.groups.entry(Geometry::group_of(start)).or_insert_with(empty);
        if u64::from(group.set(bits)) == blocks { Claim::Fresh } else { Claim::Twice }
    }

    /// The words that a bitmap must have: what was reached, and what is no data at all.
    fn expected(&self, group: u32) -> Bitmap {
        let mut bitmap = Bitmap::full();
        let data = self.geometry.data_bits(group);
        bitmap.clear(data.clone());
        if let Some(reached) = self.groups.get(&group) {
            let mut words = *bitmap.words();
            for (word, reached) in words.iter_mut().zip(reached.words()) {
                *word |= reached;
            }
            return Bitmap::from_words(words);
        }
        bitmap
    }
}

/// Reads all bitmaps that the root names and compares them with what was reached. With `all_reached` false (part of
/// the tree could not be read), only blocks in use that are marked as free count.
pub(super) fn check_bitmaps(
    view: &View<'_>,
    reached: &Reached,
    all_reached: bool,
    findings: &mut Findings,
) {
    for (chunk, entries) in view.root.groups.chunks(GROUPS_AT_ONCE).enumerate() {
        let first = (chunk * GROUPS_AT_ONCE) as u32;
        let slots = [0, 1].map(|slot| read_slot(view, first, entries, slot));
        for (index, entry) in entries.iter().enumerate() {
            let group = first + index as u32;
            if entry.generation > view.root.generation {
                findings.add(ProblemKind::Root, Place::Group(group), || {
                    format!(
                        "bitmap of generation {} in a root of {}",
                        entry.generation, view.root.generation
                    )
                });
            }
            let bytes = match &slots[usize::from(entry.slot & 1)] {
                Ok(bytes) => bytes.get(index * BLOCK_BYTES..(index + 1) * BLOCK_BYTES),
                Err(reason) => {
                    findings.add(ProblemKind::Unreadable, Place::Group(group), || reason.clone());
                    continue;
                }
            };
            let header = BitmapHeader {
                volume_id: view.superblock.volume_id,
                block_address: view.superblock.geometry.bitmap_block(group, entry.slot),
                generation: entry.generation,
                group,
            };
            match stored::decode(bytes.unwrap_or(&[]), &header, entry) {
                Ok(words) => compare(group, &words, reached, all_reached, findings),
                Err(error) => {
                    findings.add(ProblemKind::Bitmap, Place::Group(group), || error.to_string());
                }
            }
        }
    }
}

/// The blocks of slot `slot` of some neighbouring groups, if any of them uses that slot.
fn read_slot(
    view: &View<'_>,
    first: u32,
    entries: &[GroupEntry],
    slot: u8,
) -> Result<AlignedBuf, String> {
    if entries.iter().all(|entry| entry.slot & 1 != slot) {
        return Ok(AlignedBuf::new());
    }
    let mut bytes = AlignedBuf::zeroed(entries.len() * BLOCK_BYTES);
    let block = view.superblock.geometry.bitmap_block(first, slot);
    let device: &dyn Device = view.device;
    device
        .read(block * BLOCK_BYTES_U64, &mut [&mut bytes], IoClass::Background)
        .map_err(|error| error.to_string())?;
    Ok(bytes)
}

fn compare(
    group: u32,
    words: &[u64; WORDS],
    reached: &Reached,
    all_reached: bool,
    findings: &mut Findings,
) {
    let expected = reached.expected(group);
    if expected.words() == words {
        return;
    }
    let first = Geometry::group_start(group);
    let mut report = |kind: ProblemKind, difference: [u64; WORDS], text: &str| {
        let difference = Bitmap::from_words(difference);
        let mut at = 0;
        loop {
            let start = difference.next_set(at..crate::alloc::bitmap::BITS);
            if start >= crate::alloc::bitmap::BITS {
                return;
            }
            let end = difference
                .next_clear(start..crate::alloc::bitmap::BITS)
                .unwrap_or(crate::alloc::bitmap::BITS);
            let (from, to) = (first + u64::from(start), first + u64::from(end) - 1);
            findings.add(kind, Place::Block(from), || format!("blocks {from} to {to} {text}"));
            at = end;
        }
    };
    let pairs = || expected.words().iter().zip(words).enumerate();
    let mut difference = [0; WORDS];
    pairs().for_each(|(index, (expected, stored))| difference[index] = expected & !stored);
    report(ProblemKind::MarkedFree, difference, "are in use and marked as free");
    if all_reached {
        pairs().for_each(|(index, (expected, stored))| difference[index] = stored & !expected);
        report(ProblemKind::Leaked, difference, "are marked as allocated, but nobody uses them");
    }
}
