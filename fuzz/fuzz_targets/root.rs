//! The decoder of checkpoint roots, on bytes whose checksums are right.

#![no_main]

use libfuzzer_sys::fuzz_target;
use weir::format::geometry::Geometry;
use weir::format::root::Root;
use weir::format::superblock::RootPointer;
use weir::format::{checksum, checksum_without_field};

fuzz_target!(|input: &[u8]| {
    // The seed's: 4 MiB, one group.
    let Ok(geometry) = Geometry::new(1024, 128) else { return };
    let mut bytes = input.to_vec();
    bytes.resize(geometry.root_bytes() as usize, 0);
    let sum = checksum_without_field(&bytes, 4);
    bytes[4..8].copy_from_slice(&sum.to_le_bytes());
    let field =
        |at: usize| bytes[at..at + 8].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    let pointer =
        RootPointer { block: field(24), generation: field(32), checksum: checksum(&bytes) };
    let mut volume_id = [0; 16];
    volume_id.copy_from_slice(&bytes[8..24]);
    if let Ok(root) = Root::decode(&bytes, &geometry, &volume_id, &pointer) {
        let (again, pointer) = root
            .encode(&geometry, &volume_id, pointer.block)
            .expect("an accepted root can be encoded");
        assert_eq!(Root::decode(&again, &geometry, &volume_id, &pointer), Ok(root));
    }
});
