//! Cuts and holes beside readers, and beside those who take a name away or give one.

use crate::{PAGE, all, contents, device, explore, open, open_with};
use std::sync::Arc;
use weir::device::memory::MemoryDevice;
use weir::device::{Device, IoClass, buffer::AlignedBuf};
use weir::*;

fn both(first: impl FnOnce() + Send + 'static, second: impl FnOnce() + Send + 'static) {
    all(vec![Box::new(first), Box::new(second)]);
}

fn file_of(volume: &Volume, bytes: &[u8]) -> File {
    let file = volume.open_file("/f", OpenFlags::CREATE).expect("create");
    file.write_at(0, bytes).expect("write");
    file
}

/// The first `length` bytes, or as many as there are, in one look.
fn read(file: &File, length: usize) -> Vec<u8> {
    let mut bytes = vec![0xee; length];
    let count = file.read_at(0, &mut bytes).expect("read");
    bytes.truncate(count);
    bytes
}

/// What a crash now would leave: the process dies.
fn crashed(device: &Arc<dyn Device>) -> Volume {
    let mut bytes = AlignedBuf::zeroed(device.info().size_bytes as usize);
    device.read(0, &mut [&mut bytes], IoClass::SyncRead).expect("read");
    let copy: Arc<dyn Device> = Arc::new(MemoryDevice::from_image(&bytes));
    open(&copy)
}

/// So many extents that a cut takes two operations.
fn scattered(volume: &Volume, file: &File) {
    for number in 0..80 {
        file.write_at(number * 2 * PAGE as u64, &[7; PAGE]).expect("write");
    }
    volume.checkpoint().expect("checkpoint");
}

#[test]
fn a_read_beside_a_cut_finds_the_file_as_it_was_before_or_is_after() {
    explore(|| {
        let volume = open(&device());
        let file = file_of(&volume, &[7; 2 * PAGE]);
        let cutter = file.clone();
        both(
            move || {
                for to in [5000, PAGE as u64] {
                    cutter.truncate(to).expect("cut");
                }
            },
            move || {
                let bytes = read(&file, 2 * PAGE);
                assert!([2 * PAGE, 5000, PAGE].contains(&bytes.len()));
                assert!(bytes.iter().all(|&byte| byte == 7), "{} bytes, zeros within", bytes.len());
            },
        );
    });
}

#[test]
fn a_read_beside_a_write_that_makes_the_file_longer_finds_it_before_or_after() {
    explore(|| {
        let volume = open(&device());
        let file = file_of(&volume, &[7; PAGE]);
        let writer = file.clone();
        both(
            move || assert_eq!(writer.write_at(0, &[8; 2 * PAGE]), Ok(2 * PAGE)),
            move || {
                let bytes = read(&file, 2 * PAGE);
                assert!(bytes == [7; PAGE] || bytes == [8; 2 * PAGE], "{} bytes", bytes.len());
            },
        );
    });
}

#[test]
fn a_read_beside_a_hole_that_is_punched_finds_it_before_or_after() {
    explore(|| {
        let volume = open(&device());
        let file = file_of(&volume, &[7; 4 * PAGE]);
        let cutter = file.clone();
        both(
            move || {
                let punched = cutter.allocate(AllocateMode::PunchHole, 100, 3 * PAGE as u64);
                punched.expect("punch");
            },
            move || {
                let bytes = read(&file, 4 * PAGE);
                let hole = &bytes[100..100 + 3 * PAGE];
                assert!(hole.iter().all(|&byte| byte == hole[0]), "half a hole");
            },
        );
    });
}

#[test]
fn a_file_that_is_cut_while_it_loses_its_name_leaves_nothing_in_a_crash() {
    explore(|| {
        let device = device();
        let volume = open_with(&device, 1 << 20);
        let file = volume.open_file("/f", OpenFlags::CREATE).expect("create");
        scattered(&volume, &file);
        let (cutter, removing) = (file.clone(), volume.clone());
        both(
            move || cutter.truncate(0).expect("cut"),
            move || removing.unlink(Volume::ROOT, b"f").expect("unlink"),
        );
        // It is still open.
        volume.sync().expect("sync");
        assert_eq!(crashed(&device).statfs().inodes, 1, "it is there for ever");
        drop(file);
    });
}

#[test]
fn a_file_that_is_cut_while_it_gets_its_first_name_is_cut_in_a_crash() {
    explore(|| {
        let device = device();
        let volume = open_with(&device, 1 << 20);
        let new = NewInode::new(FileType::Regular, 0o644);
        let (attr, file) = volume.tmpfile(Volume::ROOT, &new).expect("tmpfile");
        scattered(&volume, &file);
        let (size, disk) = (file.size(), device.clone());
        let (cutter, linking) = (file.clone(), volume.clone());
        both(
            move || cutter.truncate(0).expect("cut"),
            move || {
                linking.link(attr.ino, Volume::ROOT, b"n").expect("link");
                linking.sync().expect("sync");
                let crashed = crashed(&disk);
                let file = crashed.open_file("/n", OpenFlags::READ_WRITE).expect("open");
                if file.size() < size {
                    file.truncate(size).expect("grow");
                    assert!(contents(&file).iter().all(|&byte| byte == 0), "it is back");
                }
            },
        );
    });
}
