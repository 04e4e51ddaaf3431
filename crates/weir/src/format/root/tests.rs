use super::*;
use crate::format::geometry::default_log_blocks;
use proptest::prelude::*;

const GOLDEN: &[u8] = include_bytes!("../../../tests/golden/root.bin");
const GOLDEN_BITMAP: &[u8] = include_bytes!("../../../tests/golden/bitmap.bin");
const POINTER: RootPointer = RootPointer { block: 17, generation: 41, checksum: 0xe49a_bd9c };

fn volume_id() -> VolumeId {
    std::array::from_fn(|index| index as u8)
}

fn geometry() -> Geometry {
    Geometry::new(100_000, default_log_blocks(100_000)).unwrap()
}

fn sample() -> Root {
    let free = [19_729, 32_251, 32_256, 3_216];
    let entry = |(index, free_blocks)| GroupEntry {
        generation: 40 + u64::from(index),
        free_blocks,
        checksum: 0x1000 + index,
        slot: (index % 2) as u8,
    };
    Root {
        generation: 41,
        checkpoint_lsn: 5000,
        next_inode: 77,
        inode_count: 55,
        tree: TreeRoot {
            root_block: 20_000,
            level: 2,
            checksum: 0xcafe_babe,
            item_count: 1111,
            node_count: 22,
            generation: 40,
        },
        groups: (0_u32..).zip(free).map(entry).collect(),
    }
}

/// Repairs both checksums after a deliberate change.
fn reseal(bytes: &mut [u8]) -> RootPointer {
    let used = geometry().root_bytes() as usize;
    let sum = checksum_without_field(&bytes[..used], 4);
    bytes[4..8].copy_from_slice(&sum.to_le_bytes());
    RootPointer { checksum: crate::format::checksum(&bytes[..used]), ..POINTER }
}

#[test]
fn golden_bytes() {
    let (bytes, pointer) = sample().encode(&geometry(), &volume_id(), 17).unwrap();
    assert_eq!(&bytes[..], GOLDEN);
    assert_eq!(pointer, POINTER);
    assert_eq!(Root::decode(GOLDEN, &geometry(), &volume_id(), &POINTER), Ok(sample()));
}

#[test]
fn golden_bitmap_bytes() {
    use crate::format::bitmap::{self, BitmapHeader, WORDS};
    let block_address = geometry().bitmap_block(2, 1);
    let header = BitmapHeader { volume_id: volume_id(), block_address, generation: 40, group: 2 };
    let mut words = [0; WORDS];
    words[0] = 0x81;
    words[WORDS - 1] = 1 << 63;
    let (bytes, checksum) = bitmap::encode(&header, &words);
    assert_eq!(&bytes[..], GOLDEN_BITMAP);
    assert_eq!(checksum, 0x520c_0a77);
}

#[test]
fn a_root_that_the_superblock_does_not_name_is_refused() {
    let decode =
        |id: VolumeId, pointer: RootPointer| Root::decode(GOLDEN, &geometry(), &id, &pointer);
    assert!(decode(volume_id(), POINTER).is_ok());
    assert!(decode([0; 16], POINTER).is_err());
    assert!(decode(volume_id(), RootPointer { block: 16, ..POINTER }).is_err());
    assert!(decode(volume_id(), RootPointer { generation: 40, ..POINTER }).is_err());
    assert!(decode(volume_id(), RootPointer { checksum: 0, ..POINTER }).is_err());
    assert!(Root::decode(&GOLDEN[..600], &geometry(), &volume_id(), &POINTER).is_err());
    let fewer = Root { groups: vec![GroupEntry::default(); 3], ..sample() };
    assert!(fewer.encode(&geometry(), &volume_id(), 16).is_err());
}

#[test]
fn impossible_fields_under_a_right_checksum_are_refused() {
    let refused = |offset: usize, value: u8| {
        let mut bytes = GOLDEN.to_vec();
        bytes[offset] = value;
        let pointer = reseal(&mut bytes);
        assert!(Root::decode(&bytes, &geometry(), &volume_id(), &pointer).is_err(), "{offset}");
    };
    refused(0, b'X');
    refused(64, 1); // free blocks
    refused(72, 5); // groups
    refused(76, 2); // trees
    refused(82, 9); // tree beyond the volume
    refused(512 + 8, 1); // a group's free blocks
    refused(512 + 16, 2); // a slot
}

proptest! {
    #[test]
    fn no_flipped_bit_of_the_used_bytes_goes_unnoticed(bit in 0_usize..(512 + 24 * 4) * 8) {
        let mut bytes = GOLDEN.to_vec();
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(Root::decode(&bytes, &geometry(), &volume_id(), &POINTER).is_err());
    }

    #[test]
    fn edited_roots_never_panic(edits in prop::collection::vec((0_usize..608, any::<u8>()), 1..8)) {
        let mut bytes = GOLDEN.to_vec();
        for (offset, value) in edits {
            bytes[offset] = value;
        }
        let pointer = reseal(&mut bytes);
        if let Ok(root) = Root::decode(&bytes, &geometry(), &volume_id(), &pointer) {
            prop_assert!(root.free_blocks() <= geometry().data_blocks());
        }
    }

    #[test]
    fn random_bytes_give_an_error(bytes in prop::collection::vec(any::<u8>(), 0..5000)) {
        prop_assert!(Root::decode(&bytes, &geometry(), &volume_id(), &POINTER).is_err());
    }
}
