//! The allocation bitmap of a group: one block, 32,256 bits.

use std::mem::{offset_of, size_of};

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::root::GroupEntry;
use super::{BLOCK_BYTES, FormatError, GROUP_BLOCKS, VolumeId, checksum_without_field};
use crate::device::buffer::AlignedBuf;

/// First bytes of a bitmap.
pub const MAGIC: [u8; 4] = *b"BMAP";
/// 64-bit words of a bitmap.
pub const WORDS: usize = GROUP_BLOCKS as usize / 64;

const STRUCTURE: &str = "allocation bitmap";

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct Raw {
    magic: [u8; 4],
    checksum: U32,
    volume_id: VolumeId,
    block_address: U64,
    generation: U64,
    group: U32,
    free_blocks: U32,
    reserved: [u8; 16],
    bits: [U64; WORDS],
}

const _: () = {
    assert!(size_of::<Raw>() == BLOCK_BYTES);
    assert!(offset_of!(Raw, checksum) == 4);
    assert!(offset_of!(Raw, volume_id) == 8);
    assert!(offset_of!(Raw, block_address) == 24);
    assert!(offset_of!(Raw, generation) == 32);
    assert!(offset_of!(Raw, group) == 40);
    assert!(offset_of!(Raw, free_blocks) == 44);
    assert!(offset_of!(Raw, bits) == 64);
};

/// What a bitmap says of itself besides its bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BitmapHeader {
    /// Identity of the volume.
    pub volume_id: VolumeId,
    /// Where this copy lives.
    pub block_address: u64,
    /// Generation of the checkpoint that wrote it.
    pub generation: u64,
    /// The group it describes.
    pub group: u32,
}

/// Clear bits of a bitmap.
fn count_clear(words: &[u64; WORDS]) -> u32 {
    words.iter().map(|word| word.count_zeros()).sum()
}

/// The block of a bitmap, and its checksum for the group table. Bits: 1 = allocated.
pub fn encode(header: &BitmapHeader, words: &[u64; WORDS]) -> (AlignedBuf, u32) {
    let mut raw = Raw {
        magic: MAGIC,
        checksum: 0.into(),
        volume_id: header.volume_id,
        block_address: header.block_address.into(),
        generation: header.generation.into(),
        group: header.group.into(),
        free_blocks: count_clear(words).into(),
        reserved: [0; 16],
        bits: words.map(U64::new),
    };
    let checksum = super::checksum(raw.as_bytes());
    raw.checksum = checksum.into();
    (AlignedBuf::from_slice(raw.as_bytes()), checksum)
}

/// The bits of the bitmap in `bytes`, which must be exactly the one that `header` and the group
/// table's `entry` describe.
///
/// # Errors
/// It is another one, or damaged.
pub fn decode(
    bytes: &[u8],
    header: &BitmapHeader,
    entry: &GroupEntry,
) -> Result<[u64; WORDS], FormatError> {
    let check = |holds: bool, problem: &str| {
        let error = || format!("group {}: {problem}", header.group);
        if holds { Ok(()) } else { Err(FormatError::new(STRUCTURE, error())) }
    };
    let raw = Raw::ref_from_bytes(bytes)
        .map_err(|_| FormatError::new(STRUCTURE, "a bitmap has 4096 bytes"))?;
    check(raw.magic == MAGIC, "wrong magic")?;
    let computed = checksum_without_field(bytes, offset_of!(Raw, checksum));
    check(raw.checksum.get() == computed, "its checksum does not match")?;
    check(raw.checksum.get() == entry.checksum, "not the one the root names")?;
    check(raw.volume_id == header.volume_id, "it belongs to another volume")?;
    check(raw.block_address.get() == header.block_address, "it belongs to another place")?;
    check(raw.generation.get() == header.generation, "it is of another generation")?;
    check(raw.group.get() == header.group, "it describes another group")?;
    let words = raw.bits.map(U64::get);
    let free_blocks = count_clear(&words);
    check(
        raw.free_blocks.get() == free_blocks && entry.free_blocks == free_blocks,
        "free blocks do not add up",
    )?;
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HEADER: BitmapHeader =
        BitmapHeader { volume_id: [7; 16], block_address: 18, generation: 5, group: 3 };

    fn sample() -> ([u64; WORDS], AlignedBuf, GroupEntry) {
        let mut words = [0; WORDS];
        for (index, word) in words.iter_mut().enumerate() {
            *word = (index as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        }
        let (bytes, checksum) = encode(&HEADER, &words);
        let free_blocks = count_clear(&words);
        (words, bytes, GroupEntry { generation: 5, free_blocks, checksum, slot: 0 })
    }

    #[test]
    fn bits_come_back_and_are_least_significant_first() {
        let (words, bytes, entry) = sample();
        assert_eq!(decode(&bytes, &HEADER, &entry), Ok(words));
        let mut words = [0; WORDS];
        words[0] = 1 << 9;
        let (bytes, _) = encode(&HEADER, &words);
        assert_eq!(&bytes[64..68], &[0, 2, 0, 0]);
    }

    #[test]
    fn a_bitmap_of_another_place_time_or_volume_is_refused() {
        let (_, bytes, entry) = sample();
        let refused = |header: BitmapHeader, entry: GroupEntry| {
            assert!(decode(&bytes, &header, &entry).is_err());
        };
        refused(BitmapHeader { volume_id: [8; 16], ..HEADER }, entry);
        refused(BitmapHeader { block_address: 19, ..HEADER }, entry);
        refused(BitmapHeader { generation: 4, ..HEADER }, entry);
        refused(BitmapHeader { group: 2, ..HEADER }, entry);
        refused(HEADER, GroupEntry { checksum: entry.checksum ^ 1, ..entry });
        refused(HEADER, GroupEntry { free_blocks: entry.free_blocks + 1, ..entry });
    }

    proptest! {
        #[test]
        fn no_flipped_bit_goes_unnoticed(bit in 0_usize..BLOCK_BYTES * 8) {
            let (_, mut bytes, entry) = sample();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(decode(&bytes, &HEADER, &entry).is_err());
        }

        #[test]
        fn random_bytes_give_an_error(bytes in prop::collection::vec(any::<u8>(), 0..5000)) {
            let entry = GroupEntry::default();
            prop_assert!(decode(&bytes, &HEADER, &entry).is_err());
        }
    }
}
