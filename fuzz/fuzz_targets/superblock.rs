//! The superblock decoder, on bytes whose checksum is right.

#![no_main]

use libfuzzer_sys::fuzz_target;
use weir::format::superblock::Superblock;
use weir::format::{BLOCK_BYTES, checksum_without_field};

fuzz_target!(|input: &[u8]| {
    let _ = Superblock::decode(input, 0);
    let mut block = [0; BLOCK_BYTES];
    let length = input.len().min(BLOCK_BYTES);
    block[..length].copy_from_slice(&input[..length]);
    let sum = checksum_without_field(&block, 8);
    block[8..12].copy_from_slice(&sum.to_le_bytes());
    let address = u64::from_le_bytes([
        block[32], block[33], block[34], block[35], block[36], block[37], block[38], block[39],
    ]);
    if let Ok(superblock) = Superblock::decode(&block, address) {
        // What is accepted can be written, and reads back as the same.
        let bytes = superblock.encode(address).expect("an accepted superblock can be encoded");
        assert_eq!(Superblock::decode(&bytes, address), Ok(superblock));
    }
});
