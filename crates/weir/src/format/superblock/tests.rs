use super::*;
use crate::device::memory::MemoryDevice;
use crate::device::{DeviceError, DeviceInfo, DeviceResult, OnDone, Request};
use crate::format::geometry::default_log_blocks;
use proptest::prelude::*;

const GOLDEN: &[u8] = include_bytes!("../../../tests/golden/superblock.bin");

fn sample(total_blocks: u64, generation: u64) -> Superblock {
    let geometry = Geometry::new(total_blocks, default_log_blocks(total_blocks)).unwrap();
    Superblock {
        volume_id: std::array::from_fn(|index| index as u8),
        generation,
        geometry,
        features: Features { compat: 0x11, ro_compat: 0, incompat: 0 },
        created_ns: 1_700_000_000_123_456_789,
        label: "goldené".to_owned(),
        root: RootPointer { block: geometry.root_block(1), generation: 41, checksum: 0xdead_beef },
        log_epoch: 3,
        epoch_first_sequence: 1000,
        durable_sequence: 0,
        replay_epoch: 0,
        replay: ReplayPoint {
            position_blocks: 17,
            sequence: 1234,
            prev_digest: 0x0123_4567_89ab_cdef,
        },
        durable_lsn: 99_999,
        clean: false,
        errors_seen: true,
    }
}

/// Repairs the checksum after a deliberate change.
fn seal(bytes: &mut [u8]) {
    let sum = checksum_without_field(bytes, 8);
    bytes[8..12].copy_from_slice(&sum.to_le_bytes());
}

fn publish(device: &MemoryDevice, superblock: &Superblock) {
    for block in superblock.places() {
        let bytes = superblock.encode(block).unwrap();
        device.write(block * 4096, &[&bytes], IoClass::Log, true).unwrap();
    }
}

fn refusal(device: &MemoryDevice) -> String {
    match choose_superblock(device) {
        Err(Error::NotAVolume(text)) => text,
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn golden_bytes() {
    let superblock = sample(100_000, 7);
    assert_eq!(&superblock.encode(8).unwrap()[..], GOLDEN);
    assert_eq!(Superblock::decode(GOLDEN, 8), Ok(superblock));
}

#[test]
fn a_copy_is_valid_only_in_its_own_places() {
    let superblock = sample(512, 6);
    assert_eq!(superblock.places(), [0, 496]);
    for block in superblock.places() {
        let bytes = superblock.encode(block).unwrap();
        assert_eq!(Superblock::decode(&bytes, block).as_ref(), Ok(&superblock));
        for other in [0, 8, 496, 504].into_iter().filter(|&other| other != block) {
            assert!(Superblock::decode(&bytes, other).is_err());
        }
    }
    // A copy that names a place of the other slot was never written by a working program.
    let bytes = superblock.encode(8).unwrap();
    assert!(Superblock::decode(&bytes, 8).is_err());
}

#[test]
fn labels_that_do_not_fit_are_refused() {
    let label = |text: &str| Superblock { label: text.to_owned(), ..sample(512, 6) }.encode(0);
    assert!(label(&"x".repeat(64)).is_ok());
    assert!(label(&"x".repeat(65)).is_err());
    assert!(label("a\0b").is_err());
    let full = Superblock { label: "x".repeat(64), ..sample(512, 6) };
    assert_eq!(Superblock::decode(&full.encode(0).unwrap(), 0), Ok(full));
}

#[test]
fn feature_policy() {
    let allowed = |features: Features| (features.allow_reading(), features.allow_writing());
    let none = Features::default();
    assert_eq!(allowed(Features { compat: !0, ..none }), (true, true));
    assert_eq!(allowed(Features { ro_compat: 1 << 40, ..none }), (true, false));
    assert_eq!(allowed(Features { incompat: 1, ..none }), (false, false));
    let superblock = Superblock { features: Features { incompat: 6, ..none }, ..sample(512, 6) };
    let bytes = superblock.encode(0).unwrap();
    assert_eq!(Superblock::decode(&bytes, 0), Err(SuperblockError::UnknownFeatures(6)));
}

#[test]
fn the_highest_generation_of_four_places_wins() {
    let device = MemoryDevice::new(512 * 4096);
    publish(&device, &sample(512, 6));
    publish(&device, &sample(512, 7));
    assert_eq!(choose_superblock(&device).unwrap().0.generation, 7);
    let zeros = AlignedBuf::zeroed(4096);
    let erase = |block: u64| device.write(block * 4096, &[&zeros], IoClass::Log, true).unwrap();
    erase(8);
    let (chosen, places) = choose_superblock(&device).unwrap();
    assert_eq!(chosen.generation, 7);
    let found: Vec<_> =
        places.iter().map(|place| (place.block, place.found.clone().ok())).collect();
    assert_eq!(found, [(0, Some(6)), (8, None), (496, Some(6)), (504, Some(7))]);
    erase(0);
    assert_eq!(choose_superblock(&device).unwrap().0.generation, 7);
    erase(504);
    assert_eq!(choose_superblock(&device).unwrap().0.generation, 6);
    erase(496);
    assert!(refusal(&device).contains("empty"));
}

#[test]
fn mirrors_are_found_on_a_device_larger_than_the_volume() {
    let device = MemoryDevice::new(10_000 * 4096);
    publish(&device, &sample(512, 6));
    publish(&device, &sample(512, 7));
    device.write(8 * 4096, &[&AlignedBuf::zeroed(4096)], IoClass::Log, true).unwrap();
    assert_eq!(choose_superblock(&device).unwrap().0.generation, 7);
}

/// A device that cannot read these blocks.
struct Unreadable<'a>(&'a MemoryDevice, &'a [u64]);

impl Device for Unreadable<'_> {
    fn info(&self) -> DeviceInfo {
        self.0.info()
    }
    fn read(&self, offset: u64, buffers: &mut [&mut [u8]], class: IoClass) -> DeviceResult<()> {
        if self.1.contains(&(offset / 4096)) {
            return Err(DeviceError {
                operation: "read",
                offset_bytes: offset,
                length_bytes: 4096,
                reason: "a bad cable".into(),
                no_space: false,
            });
        }
        self.0.read(offset, buffers, class)
    }
    fn write(&self, offset: u64, buffers: &[&[u8]], class: IoClass, fua: bool) -> DeviceResult<()> {
        self.0.write(offset, buffers, class, fua)
    }
    fn flush(&self) -> DeviceResult<()> {
        self.0.flush()
    }
    fn discard(&self, offset: u64, length: u64) -> DeviceResult<()> {
        self.0.discard(offset, length)
    }
    fn submit(&self, request: Request, on_done: OnDone) {
        self.0.submit(request, on_done);
    }
}

/// What an older superblock refers to may have been used again since, and the log as well.
#[test]
fn an_older_superblock_is_not_taken_where_the_newest_cannot_be_read() {
    let device = MemoryDevice::new(512 * 4096);
    publish(&device, &sample(512, 6));
    publish(&device, &sample(512, 7));
    let chosen = |unreadable: &[u64]| {
        choose_superblock(&Unreadable(&device, unreadable)).map(|(chosen, _)| chosen.generation)
    };
    for known in [&[][..], &[8], &[504], &[0, 8], &[0, 504], &[8, 496]] {
        assert_eq!(chosen(known), Ok(7), "{known:?}");
    }
    // Nor can it be known that the other one is older.
    for unknown in [&[8, 504][..], &[0, 496], &[0, 8, 496, 504]] {
        assert!(matches!(chosen(unknown), Err(Error::Io(_))), "{unknown:?}");
    }
    // A torn copy may be what a crash has left of the newest, which the other place has whole.
    let mut image = device.image();
    image[504 * 4096 + 300] ^= 1;
    let torn = MemoryDevice::from_image(&image);
    assert_eq!(choose_superblock(&torn).expect("another copy").0.generation, 7);
    let doubtful = choose_superblock(&Unreadable(&torn, &[8]));
    assert!(matches!(doubtful, Err(Error::Io(_))), "{doubtful:?}");
}

#[test]
fn what_is_not_a_volume_is_told_apart() {
    assert!(refusal(&MemoryDevice::new(0)).contains("smaller than"));
    assert!(refusal(&MemoryDevice::new(1 << 20)).contains("empty"));
    let text = "#!/bin/sh\necho hello\n".repeat(100_000);
    assert!(refusal(&MemoryDevice::from_image(text.as_bytes())).contains("something else"));

    let device = MemoryDevice::new(512 * 4096);
    publish(&device, &sample(512, 6));
    let cut = MemoryDevice::from_image(&device.image()[..100 * 4096]);
    assert!(refusal(&cut).contains("truncated"));

    let mut image = device.image();
    image[300] ^= 1;
    image[496 * 4096 + 300] ^= 1;
    assert!(refusal(&MemoryDevice::from_image(&image)).contains("without an intact superblock"));

    let mut image = device.image();
    for start in [0, 496 * 4096] {
        image[start + 12] = 2;
        seal(&mut image[start..start + 4096]);
    }
    let text = refusal(&MemoryDevice::from_image(&image));
    assert!(text.contains("version 2 is newer"), "{text}");

    let mut image = device.image();
    image[80] = 1;
    seal(&mut image[..4096]);
    let text = refusal(&MemoryDevice::from_image(&image));
    assert!(text.contains("incompat bits 0x1"), "{text}");
}

proptest! {
    #[test]
    fn no_flipped_bit_goes_unnoticed(bit in 0_usize..BLOCK_BYTES * 8) {
        let mut bytes = GOLDEN.to_vec();
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(Superblock::decode(&bytes, 8).is_err());
    }

    /// Whatever a checksummed superblock says, its places lie inside the volume.
    #[test]
    fn edited_superblocks_give_an_error_or_consistent_places(
        edits in prop::collection::vec((12_usize..400, any::<u8>()), 1..6),
    ) {
        let mut bytes = GOLDEN.to_vec();
        for (offset, value) in edits {
            bytes[offset] = value;
        }
        seal(&mut bytes);
        if let Ok(superblock) = Superblock::decode(&bytes, 8) {
            let geometry = superblock.geometry;
            prop_assert!(geometry.data_start() < geometry.data_end());
            prop_assert!(geometry.root_slot_at(superblock.root.block).is_some());
            prop_assert!(superblock.replay.position_blocks < geometry.log_blocks());
            prop_assert_eq!(&superblock.encode(8).unwrap()[12..272], &bytes[12..272]);
        }
    }

    #[test]
    fn random_bytes_give_an_error(mut bytes in prop::collection::vec(any::<u8>(), 0..5000), magic: bool) {
        if magic && bytes.len() >= 8 {
            bytes[..8].copy_from_slice(&MAGIC);
        }
        prop_assert!(Superblock::decode(&bytes, 0).is_err());
    }
}
