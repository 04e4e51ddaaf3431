//! Where everything is on a volume: a pure function of its size and the size of its log ring.
//!
//! A [`Geometry`] can only be made by [`Geometry::new`], which refuses sizes whose parts would
//! overlap or overflow; so every place it gives is inside the volume, and no two overlap.
//!
//! Limits: `root_bytes` of the superblock is 32 bits wide and the root has 24 bytes per group,
//! so a volume has at most 178,956,949 groups: 20.9 PiB. All arithmetic is checked beyond that.

use std::ops::Range;

use super::{FormatError, GROUP_BLOCKS};

/// Smallest volume.
pub const MIN_TOTAL_BLOCKS: u64 = super::MIN_VOLUME_BYTES / super::BLOCK_BYTES_U64;
/// Smallest log ring.
pub const MIN_LOG_BLOCKS: u64 = 64;
/// Blocks at the end of a volume that hold the mirrors of the superblock.
pub const TAIL_BLOCKS: u64 = 16;
/// Fixed part of a checkpoint root.
pub const ROOT_HEADER_BYTES: u64 = 512;
/// Size of a group's entry in the root.
pub const GROUP_ENTRY_BYTES: u64 = 24;
/// Most groups: the root's used bytes are a 32-bit number.
pub const MAX_GROUPS: u64 = (u32::MAX as u64 - ROOT_HEADER_BYTES) / GROUP_ENTRY_BYTES;

/// Block of superblock slot 0 and 1.
const SUPERBLOCK_BLOCKS: [u64; 2] = [0, 8];
/// Where the roots start.
const ROOT_START: u64 = 16;
/// Default ring: at least 256 MiB ...
const DEFAULT_LOG_MIN_BLOCKS: u64 = (256 << 20) / super::BLOCK_BYTES_U64;
/// ... and at most 2 GiB.
const DEFAULT_LOG_MAX_BLOCKS: u64 = (2 << 30) / super::BLOCK_BYTES_U64;

/// The places of a volume. See the module's head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    total_blocks: u64,
    log_blocks: u64,
    group_count: u32,
    root_slot_blocks: u32,
}

/// Size of the ring of a volume of `total_blocks`, unless its creator says otherwise.
pub fn default_log_blocks(total_blocks: u64) -> u64 {
    (total_blocks / 32)
        .clamp(DEFAULT_LOG_MIN_BLOCKS, DEFAULT_LOG_MAX_BLOCKS)
        .min(total_blocks / 8)
        .max(MIN_LOG_BLOCKS)
}

impl Geometry {
    /// The geometry of a volume of `total_blocks` with a ring of `log_blocks`
    /// (see [`default_log_blocks`]).
    ///
    /// # Errors
    /// The volume is smaller than 1 MiB or larger than the format can describe, or the ring is
    /// smaller than 64 blocks or larger than an eighth of the volume.
    pub fn new(total_blocks: u64, log_blocks: u64) -> Result<Self, FormatError> {
        let refuse = |problem: String| Err(FormatError::new("volume geometry", problem));
        if total_blocks < MIN_TOTAL_BLOCKS {
            return refuse(format!("{total_blocks} blocks; the smallest volume is 1 MiB"));
        }
        let group_count = total_blocks.div_ceil(GROUP_BLOCKS);
        if group_count > MAX_GROUPS {
            return refuse(format!("{total_blocks} blocks; the largest volume is 20.9 PiB"));
        }
        let most = (total_blocks / 8).max(MIN_LOG_BLOCKS);
        if !(MIN_LOG_BLOCKS..=most).contains(&log_blocks) {
            return refuse(format!(
                "a log ring of {log_blocks} blocks; it must have {MIN_LOG_BLOCKS} to {most}"
            ));
        }
        let root_bytes = ROOT_HEADER_BYTES + GROUP_ENTRY_BYTES * group_count;
        let geometry = Self {
            total_blocks,
            log_blocks,
            group_count: group_count as u32,
            root_slot_blocks: root_bytes.div_ceil(super::BLOCK_BYTES_U64) as u32,
        };
        if geometry.data_start() >= geometry.data_end() {
            return refuse(format!("{total_blocks} blocks leave no room for data"));
        }
        Ok(geometry)
    }

    /// Size of the volume.
    pub const fn total_blocks(&self) -> u64 {
        self.total_blocks
    }
    /// Size of the log ring.
    pub const fn log_blocks(&self) -> u64 {
        self.log_blocks
    }
    /// Number of allocation groups.
    pub const fn group_count(&self) -> u32 {
        self.group_count
    }
    /// Blocks of one root slot.
    pub const fn root_slot_blocks(&self) -> u32 {
        self.root_slot_blocks
    }
    /// Used bytes of a checkpoint root.
    pub const fn root_bytes(&self) -> u32 {
        (ROOT_HEADER_BYTES + GROUP_ENTRY_BYTES * self.group_count as u64) as u32
    }

    /// Place of superblock slot `slot` (0 or 1).
    pub const fn superblock_block(slot: u8) -> u64 {
        SUPERBLOCK_BLOCKS[(slot & 1) as usize]
    }
    /// Place of the mirror of superblock slot `slot` (0 or 1) at the end of the volume.
    pub const fn superblock_mirror_block(&self, slot: u8) -> u64 {
        self.total_blocks - TAIL_BLOCKS + SUPERBLOCK_BLOCKS[(slot & 1) as usize]
    }
    /// First block of root slot 0.
    pub const fn root_start_block(&self) -> u64 {
        ROOT_START
    }
    /// First block of root slot `slot` (0 or 1).
    pub const fn root_block(&self, slot: u8) -> u64 {
        ROOT_START + (slot & 1) as u64 * self.root_slot_blocks as u64
    }
    /// The root slot that starts at `block`.
    pub fn root_slot_at(&self, block: u64) -> Option<u8> {
        (0..2).find(|&slot| self.root_block(slot) == block)
    }
    /// First block of the bitmaps.
    pub const fn bitmap_start_block(&self) -> u64 {
        ROOT_START + 2 * self.root_slot_blocks as u64
    }
    /// Place of the bitmap of `group` in `slot` (0 or 1).
    pub const fn bitmap_block(&self, group: u32, slot: u8) -> u64 {
        let slot_start = (slot & 1) as u64 * self.group_count as u64;
        self.bitmap_start_block() + slot_start + group as u64
    }
    /// First block of the log ring.
    pub const fn log_start_block(&self) -> u64 {
        self.bitmap_start_block() + 2 * self.group_count as u64
    }
    /// First block that can be allocated.
    pub const fn data_start(&self) -> u64 {
        self.log_start_block() + self.log_blocks
    }
    /// The end (exclusive) of the blocks that can be allocated.
    pub const fn data_end(&self) -> u64 {
        self.total_blocks - TAIL_BLOCKS
    }
    /// Blocks that can be allocated, if nothing is.
    pub const fn data_blocks(&self) -> u64 {
        self.data_end() - self.data_start()
    }

    /// Whether the `blocks` (at least one) blocks from `start` on can be allocated, or be part of an
    /// extent: in the data area and in one group.
    pub fn is_data_run(&self, start: u64, blocks: u64) -> bool {
        let Some(end) = start.checked_add(blocks) else { return false };
        blocks != 0
            && start >= self.data_start()
            && end <= self.data_end()
            && start / GROUP_BLOCKS == (end - 1) / GROUP_BLOCKS
    }

    /// The group of `block`, which must be a block of the volume.
    pub const fn group_of(block: u64) -> u32 {
        (block / GROUP_BLOCKS) as u32
    }
    /// The bit of `block` in its group's bitmap.
    pub const fn bit_of(block: u64) -> u32 {
        (block % GROUP_BLOCKS) as u32
    }
    /// First block of `group`.
    pub const fn group_start(group: u32) -> u64 {
        group as u64 * GROUP_BLOCKS
    }
    /// The bits of `group` that can ever be clear: those of data blocks. All others are permanently set.
    /// Empty for a group that the ring or the end of the volume fills.
    pub fn data_bits(&self, group: u32) -> Range<u32> {
        let start = Self::group_start(group);
        let end = start + GROUP_BLOCKS;
        let first = self.data_start().clamp(start, end);
        let last = self.data_end().clamp(first, end);
        (first - start) as u32..(last - start) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn smallest_volume() {
        let geometry = Geometry::new(256, default_log_blocks(256)).unwrap();
        assert_eq!(geometry.group_count(), 1);
        assert_eq!(geometry.root_slot_blocks(), 1);
        assert_eq!(geometry.root_block(1), 17);
        assert_eq!(geometry.bitmap_block(0, 0), 18);
        assert_eq!(geometry.bitmap_block(0, 1), 19);
        assert_eq!(geometry.log_start_block(), 20);
        assert_eq!(geometry.data_start()..geometry.data_end(), 84..240);
        assert_eq!(geometry.superblock_mirror_block(0), 240);
        assert_eq!(geometry.superblock_mirror_block(1), 248);
        assert!(Geometry::new(255, 64).is_err());
    }

    #[test]
    fn default_ring_follows_the_specification() {
        let blocks = |mib: u64| mib * 256;
        assert_eq!(default_log_blocks(blocks(1)), 64);
        assert_eq!(default_log_blocks(blocks(16)), blocks(2));
        assert_eq!(default_log_blocks(blocks(512)), blocks(64));
        assert_eq!(default_log_blocks(blocks(1024)), blocks(128));
        assert_eq!(default_log_blocks(blocks(4 << 10)), blocks(256));
        assert_eq!(default_log_blocks(blocks(16 << 10)), blocks(512));
        assert_eq!(default_log_blocks(blocks(32 << 10)), blocks(1024));
        assert_eq!(default_log_blocks(blocks(1 << 20)), blocks(2048));
    }

    #[test]
    fn largest_volume_is_what_32_bits_of_root_describe() {
        let most = MAX_GROUPS * GROUP_BLOCKS;
        let geometry = Geometry::new(most, default_log_blocks(most)).unwrap();
        assert_eq!(u64::from(geometry.root_bytes()), 512 + 24 * MAX_GROUPS);
        for too_large in [most + 1, 1 << 51, u64::MAX] {
            assert!(Geometry::new(too_large, default_log_blocks(too_large)).is_err());
        }
    }

    proptest! {
        #[test]
        fn places_are_disjoint_and_inside(
            total in prop_oneof![256_u64..200_000, 256..MAX_GROUPS * GROUP_BLOCKS, any::<u64>()],
            log in prop_oneof![Just(None), (0_u64..100_000).prop_map(Some), any::<u64>().prop_map(Some)],
        ) {
            let log = log.unwrap_or_else(|| default_log_blocks(total));
            let Ok(geometry) = Geometry::new(total, log) else { return Ok(()) };
            let root = u64::from(geometry.root_slot_blocks());
            let groups = u64::from(geometry.group_count());
            let places = [
                (Geometry::superblock_block(0), 8),
                (Geometry::superblock_block(1), 8),
                (geometry.root_block(0), root),
                (geometry.root_block(1), root),
                (geometry.bitmap_block(0, 0), groups),
                (geometry.bitmap_block(0, 1), groups),
                (geometry.log_start_block(), log),
                (geometry.data_start(), geometry.data_blocks()),
                (geometry.superblock_mirror_block(0), 8),
                (geometry.superblock_mirror_block(1), 8),
            ];
            let mut next = 0;
            for (start, blocks) in places {
                prop_assert_eq!(start, next);
                next = start + blocks;
            }
            prop_assert_eq!(next, total);
        }

        #[test]
        fn data_bits_are_exactly_the_data_blocks(total in 256_u64..200_000) {
            let geometry = Geometry::new(total, default_log_blocks(total)).unwrap();
            let sum: u64 = (0..geometry.group_count())
                .map(|group| geometry.data_bits(group).len() as u64)
                .sum();
            prop_assert_eq!(sum, geometry.data_blocks());
            for block in [0, geometry.data_start() - 1, geometry.data_start(), geometry.data_end() - 1,
                          geometry.data_end(), total - 1] {
                let bits = geometry.data_bits(Geometry::group_of(block));
                prop_assert_eq!(bits.contains(&Geometry::bit_of(block)), geometry.is_data_run(block, 1));
            }
            prop_assert!(!geometry.is_data_run(geometry.data_start(), 0));
            prop_assert!(!geometry.is_data_run(u64::MAX, 2));
        }
    }
}
