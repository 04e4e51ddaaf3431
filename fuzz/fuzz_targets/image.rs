//! A whole volume, damaged: checked, recovered, read and written. Nothing may panic or hang.
//!
//! The input is a list of changes of 12 bytes each. Raw ones change bytes of the image; the others change
//! items of the tree and are written back under right checksums.

#![no_main]

#[path = "../../crates/weir/tests/check/image.rs"]
#[allow(dead_code)]
mod image;
#[path = "../../crates/weir/tests/check/sample.rs"]
#[allow(dead_code)]
mod sample;

use libfuzzer_sys::fuzz_target;
use std::sync::{Arc, OnceLock};
use weir::check::{CheckOptions, check_device};
use weir::device::Device;
use weir::device::memory::MemoryDevice;
use weir::format::{Key, Kind};
use weir::{OpenFlags, Volume, VolumeOptions};

fn originals() -> &'static [Vec<u8>; 2] {
    static ORIGINALS: OnceLock<[Vec<u8>; 2]> = OnceLock::new();
    ORIGINALS.get_or_init(|| {
        [true, false].map(|close| {
            let device = sample::formatted(sample::MIB);
            let volume = sample::open(&device);
            sample::populate(&volume);
            if close { volume.close() } else { volume.sync() }.expect("write everything");
            drop(volume);
            device.image()
        })
    })
}

/// (where, what)
fn changes(input: &[u8]) -> impl Iterator<Item = (usize, u64)> {
    input.chunks_exact(12).take(16).map(|change| {
        let number =
            |bytes: &[u8]| bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        (number(&change[..4]) as usize, number(&change[4..]))
    })
}

fn damaged(mode: u8, input: &[u8]) -> Vec<u8> {
    let original = &originals()[usize::from(mode & 1)];
    if mode & 2 == 0 {
        let mut image = original.clone();
        for (place, value) in changes(input) {
            let place = place % (image.len() - 8);
            image[place..place + 8].copy_from_slice(&value.to_le_bytes());
        }
        return image;
    }
    let mut image = image::Image::load(&Arc::new(MemoryDevice::from_image(&originals()[0])));
    for (place, value) in changes(input) {
        let count = image.items.len().max(1);
        let Some(key) = image.items.keys().nth(place % count).copied() else { break };
        let at = place >> 12 & 0xff;
        let mut item = image.items[&key].clone();
        match place >> 28 {
            0 => drop(image.items.remove(&key)),
            1 => {
                let kind = Kind::from_u8(at as u8 % 7).unwrap_or(key.kind);
                image.items.insert(Key::new(value >> 56, kind, key.offset), item);
            }
            2 => {
                image.items.insert(Key { offset: value, ..key }, item);
            }
            3 => {
                item.truncate(at);
                image.items.insert(key, item);
            }
            4 => image.root.next_inode = value >> 3,
            5 => image.root.inode_count = value >> 3,
            6 => image.wrong_bits.push(value % 256),
            _ => {
                let at = if at & 1 == 0 { at / 2 * 8 } else { at / 2 };
                for (place, byte) in item.iter_mut().skip(at).zip(value.to_le_bytes()) {
                    *place = byte;
                }
                image.items.insert(key, item);
            }
        }
    }
    if image.items.is_empty() {
        return original.clone();
    }
    image.store();
    image.device.image()
}

fn use_it(volume: &Volume) {
    for path in ["/", "/dir", "/dir/sub"] {
        for entry in volume.read_dir(path).unwrap_or_default().iter().take(100) {
            let _ = volume.getattr(entry.ino);
            let _ = volume.listxattr(entry.ino);
            let _ = volume.readlink(entry.ino);
            let Ok(file) = volume.open_inode(entry.ino, true) else { continue };
            let _ = file.read_at(0, &mut [0; 20_000]);
            let _ = file.write_at(1000, &[1; 5000]);
            let _ = file.fsync();
            let _ = file.truncate(2000);
        }
    }
    if let Ok(file) = volume.open_file("/new", OpenFlags::CREATE) {
        let _ = file.write_at(0, &[2; 10_000]);
    }
    let _ = volume.remove_file("/small");
    let _ = volume.rename_path("/dir/file", "/moved");
    let _ = volume.close();
}

fuzz_target!(|input: &[u8]| {
    let Some((mode, changes)) = input.split_first() else { return };
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::from_image(&damaged(*mode, changes)));
    let _ = check_device(&device, &CheckOptions::default());
    let options = VolumeOptions { memory_bytes: Some(sample::MIB), ..sample::manual() };
    if let Ok(volume) = Volume::open_device(device, options) {
        use_it(&volume);
    }
});
