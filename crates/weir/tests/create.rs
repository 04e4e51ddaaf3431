//! What a new volume is made with, and what is refused before anything is written.

mod common;

use common::*;
use std::path::PathBuf;
use std::sync::Arc;
use weir::device::Device;
use weir::device::memory::MemoryDevice;
use weir::format::MIN_VOLUME_BYTES;
use weir::format::superblock::choose_superblock;
use weir::*;

/// A path that is there for nobody else, and gone at the end.
struct Image(PathBuf);

impl Image {
    fn new(name: &str) -> Self {
        let name = format!("weir-create-{}-{name}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_file(&path);
        Self(path)
    }

    fn holding(name: &str, bytes: &[u8]) -> Self {
        let image = Self::new(name);
        std::fs::write(&image.0, bytes).expect("written");
        image
    }

    fn bytes(&self) -> u64 {
        std::fs::metadata(&self.0).expect("it is there").len()
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn forced() -> CreateOptions {
    CreateOptions { force: true, ..CreateOptions::default() }
}

#[test]
fn what_no_volume_can_be_made_with_changes_nothing_of_the_file_that_is_there() {
    // No multiple of a block, as files that are no volumes are.
    let precious = pattern(1, (2 << 20) + 100);
    let image = Image::holding("precious", &precious);
    let long = "x".repeat(65);
    for options in [
        CreateOptions { label: long.clone(), ..forced() },
        CreateOptions { label: "a\0b".into(), ..forced() },
        CreateOptions { log_bytes: Some(1 << 20), ..forced() },
        CreateOptions { size_bytes: Some(4096), ..forced() },
        CreateOptions { size_bytes: Some(MIB), label: long, ..forced() },
        CreateOptions { size_bytes: Some(MIB), log_bytes: Some(4096), ..forced() },
        CreateOptions::default(),
    ] {
        let refused = Volume::create(&image.0, &options);
        let is_right = match refused {
            Err(Error::Invalid(_)) => options.force,
            Err(Error::Exists) => !options.force,
            _ => false,
        };
        assert!(is_right, "{options:?}: {refused:?}");
        assert!(std::fs::read(&image.0).expect("read") == precious, "{options:?}");
    }
    let new = Image::new("new");
    let made = Volume::create(&new.0, &CreateOptions { size_bytes: Some(100), ..forced() });
    assert_eq!(made, Err(Error::Invalid("a volume needs at least 1 MiB")));
    assert!(!new.0.exists());
    // One that is too small as it is.
    let small = Image::holding("small", &precious[..5000]);
    assert!(matches!(Volume::create(&small.0, &forced()), Err(Error::Invalid(_))));
    assert_eq!(small.bytes(), 5000);
}

#[test]
fn what_no_volume_can_be_made_with_changes_nothing_of_the_volume_that_is_there() {
    let device = formatted(8 * MIB, 64);
    let volume = open(&device, manual(4 * MIB));
    create(&volume, "/kept");
    volume.close().expect("close");
    drop(volume);
    for options in [
        CreateOptions { size_bytes: Some(8 * MIB + 4096), ..CreateOptions::default() },
        CreateOptions { size_bytes: Some(MIN_VOLUME_BYTES - 1), ..CreateOptions::default() },
        CreateOptions { label: "a\0b".into(), ..CreateOptions::default() },
        CreateOptions { log_bytes: Some(2 * MIB), ..CreateOptions::default() },
    ] {
        let refused = Volume::format_device(&device, &options);
        assert!(matches!(refused, Err(Error::Invalid(_))), "{options:?}: {refused:?}");
        let volume = open(&device, manual(4 * MIB));
        assert!(volume.metadata("/kept").is_ok(), "{options:?}");
        volume.close().expect("close");
    }
}

#[test]
fn a_volume_has_what_it_was_made_with_up_to_the_bounds() {
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(4 * MIB));
    let label = "x".repeat(64);
    let options = CreateOptions {
        size_bytes: Some(MIN_VOLUME_BYTES),
        log_bytes: Some(256 << 10),
        label: label.clone(),
        root_uid: 5,
        root_gid: 6,
        ..CreateOptions::default()
    };
    Volume::format_device(&device, &options).expect("format");
    let (newest, places) = choose_superblock(&*device).expect("a superblock");
    assert_eq!(newest.geometry.total_blocks(), MIN_VOLUME_BYTES / 4096);
    assert_eq!(newest.geometry.log_blocks(), 64);
    assert!(newest.label == label && newest.clean && newest.created_ns > 0);
    // A copy that is damaged later is made up for by the generation before, in the other slot.
    let others = newest.other_places();
    let found = places.iter().filter(|place| others.contains(&place.block) && place.found.is_ok());
    assert_eq!(found.count(), 2);
    let volume = open(&device, manual(4 * MIB));
    let root = volume.metadata("/").expect("a root");
    assert_eq!((root.uid, root.gid, root.permissions), (5, 6, 0o755));
}

#[test]
fn an_image_has_the_size_that_was_asked_for_in_whole_blocks() {
    let image = Image::new("sized");
    let sized = |size_bytes| CreateOptions { size_bytes: Some(size_bytes), ..forced() };
    // A new one; one that grows; one that shrinks.
    for size_bytes in [2 * MIB + 100, 4 * MIB + 4095, 3 * MIB + 1] {
        Volume::create(&image.0, &sized(size_bytes)).expect("create");
        assert_eq!(image.bytes(), size_bytes / 4096 * 4096);
        let volume = Volume::open(&image.0, manual(4 * MIB)).expect("open");
        let blocks = volume.superblock().geometry.total_blocks();
        assert_eq!(blocks, size_bytes / 4096);
        volume.close().expect("close");
    }
    // Without a size it is as large as what was there.
    let other = Image::holding("other", &pattern(2, (2 << 20) + 100));
    Volume::create(&other.0, &forced()).expect("create");
    assert_eq!(other.bytes(), 2 * MIB);
}

#[test]
fn progress_grows_up_to_all_that_is_to_be_written() {
    let image = Image::new("progress");
    for prewrite in [false, true] {
        let options = CreateOptions { size_bytes: Some(16 * MIB), prewrite, ..forced() };
        let mut told = Vec::new();
        Volume::create_with_progress(&image.0, &options, &mut |done, all| told.push((done, all)))
            .expect("create");
        assert!(told.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 == pair[1].1));
        let &(done, all) = told.last().expect("some is written");
        assert_eq!(done, all);
        assert_eq!(all == 16 * MIB, prewrite);
    }
}
