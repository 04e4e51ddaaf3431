//! The decoder of allocation bitmaps, on bytes whose checksum is right.

#![no_main]

use libfuzzer_sys::fuzz_target;
use weir::format::bitmap::{BitmapHeader, decode, encode};
use weir::format::root::GroupEntry;
use weir::format::{BLOCK_BYTES, checksum_without_field};

fuzz_target!(|input: &[u8]| {
    let mut block = [0; BLOCK_BYTES];
    let length = input.len().min(BLOCK_BYTES);
    block[..length].copy_from_slice(&input[..length]);
    let checksum = checksum_without_field(&block, 4);
    block[4..8].copy_from_slice(&checksum.to_le_bytes());
    let number =
        |at: usize| block[at..at + 8].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    let mut volume_id = [0; 16];
    volume_id.copy_from_slice(&block[8..24]);
    let group = number(40) as u32;
    let header =
        BitmapHeader { volume_id, block_address: number(24), generation: number(32), group };
    let free_blocks = u32::from_le_bytes([block[44], block[45], block[46], block[47]]);
    let entry = GroupEntry { generation: header.generation, free_blocks, checksum, slot: 0 };
    let _ = decode(input, &header, &entry);
    if let Ok(words) = decode(&block, &header, &entry) {
        let (bytes, checksum) = encode(&header, &words);
        assert_eq!(decode(&bytes, &header, &GroupEntry { checksum, ..entry }), Ok(words));
    }
});
