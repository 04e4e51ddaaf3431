//! Stored volumes: today's engine opens yesterday's images, and still writes the same bytes.
//!
//! When a change of the engine (not of the format) moves bytes around, the images are made anew
//! with `WEIR_WRITE_GOLDEN=1 cargo test -p weir --test check golden -- --test-threads=1`. A change after which the stored
//! images cannot be *read* breaks the format.

use crate::clean::{assert_clean, check};
use crate::sample::{MIB, formatted, open, pattern, populate};
use std::path::PathBuf;
use std::sync::Arc;
use weir::device::memory::MemoryDevice;
use weir::format::BLOCK_BYTES;
use weir::{OpenFlags, Volume};

/// A closed volume, or one with a log to replay.
fn build(crashed: bool) -> Vec<u8> {
    let device = formatted(MIB);
    let volume = open(&device);
    populate(&volume);
    if crashed {
        volume.checkpoint().expect("checkpoint");
        let file = volume.open_file("/dir/file", OpenFlags::READ_WRITE).expect("open");
        file.write_at(10_000, &pattern(77, 5000)).expect("write");
        file.fsync().expect("fsync");
        volume.rename_path("/small", "/renamed").expect("rename");
        volume.remove_file("/soft").expect("unlink");
        volume.sync().expect("sync");
    } else {
        volume.close().expect("close");
    }
    drop(volume);
    device.image()
}

fn path(crashed: bool) -> PathBuf {
    let name = if crashed { "volume-crashed.blocks" } else { "volume-closed.blocks" };
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// Blocks that are not zero: number (u32), then runs of equal bytes as (length - 1, byte) pairs, or after a
/// length byte of 255, 4096 bytes as they are.
fn pack(image: &[u8]) -> Vec<u8> {
    let mut packed = Vec::new();
    for (number, block) in image.chunks_exact(BLOCK_BYTES).enumerate() {
        if block.iter().all(|&byte| byte == 0) {
            continue;
        }
        packed.extend_from_slice(&(number as u32).to_le_bytes());
        let mut runs = Vec::new();
        for run in block.chunk_by(|a, b| a == b).flat_map(|run| run.chunks(255)) {
            runs.extend_from_slice(&[(run.len() - 1) as u8, run[0]]);
        }
        if runs.len() < BLOCK_BYTES {
            packed.extend_from_slice(&runs);
        } else {
            packed.push(255);
            packed.extend_from_slice(block);
        }
    }
    packed
}

fn unpack(mut packed: &[u8], bytes: usize) -> Vec<u8> {
    let mut image = vec![0; bytes];
    while let Some((number, rest)) = packed.split_first_chunk::<4>() {
        let start = u32::from_le_bytes(*number) as usize * BLOCK_BYTES;
        let block = &mut image[start..start + BLOCK_BYTES];
        packed = rest;
        let mut filled = 0;
        while filled < BLOCK_BYTES {
            if packed[0] == 255 {
                block.copy_from_slice(&packed[1..=BLOCK_BYTES]);
                packed = &packed[1 + BLOCK_BYTES..];
                break;
            }
            let length = usize::from(packed[0]) + 1;
            block[filled..filled + length].fill(packed[1]);
            filled += length;
            packed = &packed[2..];
        }
    }
    image
}

fn stored(crashed: bool) -> Vec<u8> {
    let packed = std::fs::read(path(crashed)).expect("the golden image");
    unpack(&packed, MIB as usize)
}

fn read(volume: &Volume, path: &str, offset: u64, length: usize) -> Vec<u8> {
    let file = volume.open_file(path, OpenFlags::READ).expect("open");
    let mut bytes = vec![0; length];
    let count = file.read_at(offset, &mut bytes).expect("read");
    bytes.truncate(count);
    bytes
}

#[test]
fn packing_an_image_loses_nothing() {
    let mut image = vec![0; 5 * BLOCK_BYTES];
    image[BLOCK_BYTES..2 * BLOCK_BYTES].fill(3);
    image[3 * BLOCK_BYTES..].iter_mut().enumerate().for_each(|(index, byte)| *byte = index as u8);
    assert!(unpack(&pack(&image), image.len()) == image);
}

#[test]
fn the_stored_images_are_what_the_engine_writes_today() {
    for crashed in [false, true] {
        let image = build(crashed);
        if std::env::var_os("WEIR_WRITE_GOLDEN").is_some() {
            std::fs::write(path(crashed), pack(&image)).expect("write the golden image");
        }
        let stored = stored(crashed);
        let differing: Vec<usize> = (0..image.len() / BLOCK_BYTES)
            .filter(|block| {
                let range = block * BLOCK_BYTES..(block + 1) * BLOCK_BYTES;
                image[range.clone()] != stored[range]
            })
            .collect();
        assert!(differing.is_empty(), "crashed: {crashed}, blocks {differing:?} differ");
    }
}

#[test]
fn the_stored_images_open_and_hold_what_was_written() {
    for crashed in [false, true] {
        let device = Arc::new(MemoryDevice::from_image(&stored(crashed)));
        let report = check(&device);
        assert_clean(&report);
        assert_eq!((report.log_replayed, report.cleanly_closed), (crashed, !crashed));
        let volume = open(&device);
        let mut file = pattern(50_000, 50_000);
        let mut small = "/small";
        if crashed {
            file[10_000..15_000].copy_from_slice(&pattern(77, 5000));
            small = "/renamed";
            assert_eq!(volume.metadata("/small").map(|_| ()), Err(weir::Error::NotFound));
            assert_eq!(volume.symlink_metadata("/soft").map(|_| ()), Err(weir::Error::NotFound));
        } else {
            let soft = volume.resolve("/soft", false).expect("resolve");
            assert_eq!(volume.readlink(soft).expect("readlink"), b"dir/file");
        }
        assert!(read(&volume, "/dir/file", 0, 60_000) == file);
        assert!(read(&volume, "/hard", 0, 60_000) == file);
        assert!(read(&volume, small, 0, 200) == pattern(100, 100));
        assert!(read(&volume, "/sparse", 1 << 40, 20) == b"far away");
        assert!(read(&volume, "/reserved", 0, 50_000) == pattern(4, 6000));
        let number = volume.resolve(small, true).expect("resolve");
        assert_eq!(volume.getxattr(number, b"user.color").expect("getxattr"), b"blue");
        assert_eq!(volume.getxattr(number, b"user.large").expect("getxattr"), [7; 4096]);
        assert_eq!(volume.metadata("/null").expect("stat").rdev, 0x103);
        assert_eq!(volume.superblock().label, "sample");
    }
}
