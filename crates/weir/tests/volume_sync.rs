//! A sync of the volume brings all files home together, and says of each what became of it; what a checkpoint, a close or an opening
//! cannot write home is not lost, and holds nobody up for ever.

mod common;

use common::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use weir::check::{CheckOptions, check_device};
use weir::device::Device;
use weir::*;

/// More pages than a frame takes.
const LARGE_BYTES: usize = 200 << 10;
/// Few enough for a frame.
const SMALL_BYTES: usize = 8 << 10;
const FILES: u64 = 12;

fn volume_on_probe() -> (Arc<Probe>, Volume) {
    let probe = Probe::new(formatted(64 * MIB, 0));
    let volume = Volume::open_device(probe.clone(), manual(16 * MIB)).expect("open");
    (probe, volume)
}

/// Large and small files in turns.
fn write_files(volume: &Volume, seed: u64) -> Vec<(File, Vec<u8>)> {
    let one = |number: u64| {
        let length = if number.is_multiple_of(2) { LARGE_BYTES } else { SMALL_BYTES };
        let file = create(volume, &format!("/f{number}"));
        let bytes = pattern(seed + number, length);
        file.write_at(0, &bytes).expect("write");
        (file, bytes)
    };
    (0..FILES).map(one).collect()
}

/// As after a power cut now.
fn holds_after_a_crash(probe: Arc<Probe>, volume: Volume, expected: &[Vec<u8>]) {
    drop(volume);
    let device: Arc<dyn Device> = probe;
    let volume = open(&device, manual(16 * MIB));
    for (number, bytes) in expected.iter().enumerate() {
        let file = volume.open_file(format!("/f{number}"), OpenFlags::READ).expect("open");
        assert!(contents(&file) == *bytes, "file {number}");
    }
}

#[test]
fn all_files_are_durable_with_one_flush() {
    let (probe, volume) = volume_on_probe();
    let files = write_files(&volume, 1);
    let before = volume.stats();
    volume.sync().expect("sync");
    let after = volume.stats();
    assert_eq!(after.log.flushes - before.log.flushes, 1);
    let small_pages = FILES / 2 * SMALL_BYTES as u64 / 4096;
    assert_eq!(after.log.payload_blocks - before.log.payload_blocks, small_pages);
    assert_eq!(after.dirty_pages, small_pages, "large files are home, small ones in the log");
    let expected: Vec<Vec<u8>> = files.into_iter().map(|(_, bytes)| bytes).collect();
    holds_after_a_crash(probe, volume, &expected);
}

#[test]
fn files_that_cannot_be_written_keep_their_data_and_others_are_durable() {
    let (probe, volume) = volume_on_probe();
    let files = write_files(&volume, 1);
    volume.sync().expect("sync");
    let newer: Vec<Vec<u8>> =
        (0..FILES).map(|n| pattern(50 + n, files[n as usize].1.len())).collect();
    for ((file, _), bytes) in files.iter().zip(&newer) {
        file.write_at(0, bytes).expect("write");
    }
    probe.fail_data_writes.store(true, Ordering::Relaxed);
    assert!(matches!(volume.sync(), Err(Error::Io(_))));
    assert!(volume.shutdown_reason().is_none());
    for ((file, _), bytes) in files.iter().zip(&newer) {
        assert!(contents(file) == *bytes, "dirty and readable");
    }
    // Of the small files the log has the newer version, of the large ones nobody.
    let device = probe.clone();
    probe.fail_data_writes.store(false, Ordering::Relaxed);
    let image: Arc<dyn Device> =
        Arc::new(weir::device::memory::MemoryDevice::from_image(&image_of(&*device)));
    let crashed = open(&image, manual(16 * MIB));
    for (number, (_, older)) in files.iter().enumerate() {
        let found =
            contents(&crashed.open_file(format!("/f{number}"), OpenFlags::READ).expect("open"));
        let expected = if number % 2 == 0 { older } else { &newer[number] };
        assert!(found == *expected, "file {number}");
    }
    // A retry that succeeds is true.
    volume.sync().expect("sync");
    drop(files);
    holds_after_a_crash(probe, volume, &newer);
}

/// What a power cut would leave of a device that has no cache.
fn image_of(device: &dyn Device) -> Vec<u8> {
    let mut bytes = weir::device::buffer::AlignedBuf::zeroed(device.info().size_bytes as usize);
    device.read(0, &mut [&mut bytes], weir::device::IoClass::SyncRead).expect("read");
    bytes.to_vec()
}

/// A file that lives where it can be found, and has changed since then: the change is in the log.
fn changed_in_the_log() -> (Arc<Probe>, Volume, u64, Vec<u8>) {
    let (probe, volume) = volume_on_probe();
    let file = create(&volume, "/f");
    let mut bytes = pattern(1, LARGE_BYTES);
    file.write_at(0, &bytes).expect("write");
    volume.checkpoint().expect("checkpoint");
    let image = image_of(&*probe);
    let lives_at = |(_, block): &(usize, &[u8])| **block == bytes[..4096];
    let (block, _) = image.chunks(4096).enumerate().find(lives_at).expect("it was written home");
    let change = pattern(2, 4096);
    file.write_at(0, &change).expect("write");
    file.fsync().expect("fsync");
    bytes[..4096].copy_from_slice(&change);
    (probe, volume, block as u64 * 4096, bytes)
}

fn holds(probe: Arc<Probe>, expected: &[u8]) {
    let device: Arc<dyn Device> = probe;
    let report = check_device(&device, &CheckOptions::default()).expect("check");
    assert!(report.is_clean(), "{:#?}", report.problems);
    let volume = open(&device, manual(16 * MIB));
    let file = volume.open_file("/f", OpenFlags::READ_WRITE).expect("open");
    assert!(contents(&file) == expected);
    file.fsync().expect("nothing is wrong with it");
    assert_eq!(volume.stats().dirty_pages, 0);
}

#[test]
fn a_checkpoint_moves_what_cannot_be_written_where_it_lives() {
    let (probe, volume, home, bytes) = changed_in_the_log();
    probe.refuse(move |offset_bytes, _| offset_bytes == home);
    volume.checkpoint().expect("checkpoint");
    assert_eq!(probe.failed_writes.load(Ordering::Relaxed), 1);
    assert_eq!(volume.stats().dirty_pages, 0);
    volume.close().expect("close");
    drop(volume);
    holds(probe, &bytes);
}

#[test]
fn an_opening_moves_what_cannot_be_written_where_it_lives() {
    let (probe, volume, home, bytes) = changed_in_the_log();
    drop(volume);
    probe.refuse(move |offset_bytes, _| offset_bytes == home);
    holds(probe.clone(), &bytes);
    assert_eq!(probe.failed_writes.load(Ordering::Relaxed), 1);
}

#[test]
fn what_can_be_written_nowhere_stays_in_the_log_and_nobody_waits_for_it_for_ever() {
    for closes in [false, true] {
        let (probe, volume, _, bytes) = changed_in_the_log();
        let change = bytes[..4096].to_vec();
        probe.refuse(move |_, begins| begins.starts_with(&change));
        let ended = with_watchdog(60, || if closes { volume.close() } else { volume.checkpoint() });
        assert!(matches!(ended, Err(Error::Io(_))), "{ended:?}");
        assert_eq!(probe.failed_writes.load(Ordering::Relaxed), 3);
        drop(volume);
        // An opening cannot bring it home either, and says so; one for reading only need not.
        let device: Arc<dyn Device> = probe.clone();
        let opened = with_watchdog(60, || Volume::open_device(device.clone(), manual(16 * MIB)));
        assert!(matches!(opened, Err(Error::Io(_))));
        let reads_only = VolumeOptions { read_only: true, ..manual(16 * MIB) };
        let volume = open(&device, reads_only);
        assert!(contents(&volume.open_file("/f", OpenFlags::READ).expect("open")) == bytes);
        drop(volume);
        probe.refuse(|_, _| false);
        holds(probe, &bytes);
    }
}

#[test]
fn a_file_that_cannot_be_written_keeps_no_other_from_a_sync_of_everything() {
    for bad in (0..FILES).step_by(2) {
        let (probe, volume) = volume_on_probe();
        let mut files = write_files(&volume, 1);
        let (bad_file, bytes) = files.remove(bad as usize);
        probe.refuse_page(Some(bytes[..4096].to_vec()));
        assert!(matches!(volume.sync(), Err(Error::Io(_))));
        let is_durable = |file: &File| file.fsync_if_durable(0..u64::MAX, SyncKind::Full).is_some();
        assert!(files.iter().all(|(file, _)| is_durable(file)));
        assert!(!is_durable(&bad_file));
        assert!(contents(&bad_file) == bytes);
        drop((files, bad_file));
    }
}

/// Extents of a file whose mapping fills several leaves.
const EXTENTS: u64 = 6_000;
const NODE_BYTES: u64 = 16_384;

/// A volume with a file of [`EXTENTS`], a page each, and little memory. Not all of it is home.
fn with_a_scattered_file() -> (Arc<Probe>, Volume, File) {
    let probe = Probe::new(formatted(64 * MIB, 0));
    let volume = Volume::open_device(probe.clone(), manual(2 * MIB)).expect("open");
    let file = create(&volume, "/scattered");
    for extent in 0..EXTENTS {
        file.write_at(extent * 8192, &pattern(extent, 4096)).expect("write");
    }
    (probe, volume, file)
}

/// The same, where one leaf cannot be read from now on. A page whose place that leaf says was overwritten and synced before: the log has it.
fn with_an_unreadable_leaf() -> (Arc<Probe>, Volume, File) {
    let (probe, volume, file) = with_a_scattered_file();
    volume.checkpoint().expect("checkpoint");
    let image = weir::device::memory::MemoryDevice::from_image(&image_of(&*probe));
    let twin = Probe::new(Arc::new(image));
    let twin_volume = Volume::open_device(twin.clone(), manual(16 * MIB)).expect("open");
    let twin_file = twin_volume.open_file("/scattered", OpenFlags::READ).expect("open");
    let leaf = Arc::new(AtomicU64::new(0));
    let last = leaf.clone();
    twin.refuse_reads(move |offset_bytes, length_bytes| {
        if length_bytes == NODE_BYTES {
            last.store(offset_bytes, Ordering::Relaxed);
        }
        false
    });
    twin_file.read_at(EXTENTS / 2 * 8192, &mut [0; 4096]).expect("read");
    drop((twin_file, twin_volume));
    let leaf = leaf.load(Ordering::Relaxed);
    assert!(leaf > 0, "the twin has read no leaf");
    file.write_at(EXTENTS / 2 * 8192, &pattern(7, 4096)).expect("write");
    file.fsync().expect("fsync");
    // Other leaves take its place in the cache.
    for extent in (0..EXTENTS / 3).chain(EXTENTS * 2 / 3..EXTENTS) {
        file.read_at(extent * 8192, &mut [0; 4096]).expect("read");
    }
    probe.refuse_reads(move |offset_bytes, _| offset_bytes == leaf);
    (probe, volume, file)
}

#[test]
fn a_file_whose_mapping_cannot_be_read_keeps_no_checkpoint_from_its_end() {
    let (probe, volume, scattered) = with_an_unreadable_leaf();
    let mut others = Vec::new();
    for number in 0..100 {
        let file = create(&volume, &format!("/f{number}"));
        file.write_at(0, &pattern(number, 8192)).expect("write");
        file.fsync().expect("fsync");
        others.push(file);
    }
    let before = volume.stats().checkpoints;
    while volume.background_step(BackgroundWork::Checkpoint).expect("of others") {}
    let stats = volume.stats();
    assert_eq!(stats.checkpoints, before + 1);
    assert_eq!(stats.dirty_pages, 1, "all others are home");
    // Who wants everything home hears of it, and so does the owner.
    assert!(matches!(volume.checkpoint(), Err(Error::Io(_))));
    assert!(matches!(scattered.fsync(), Err(Error::Io(_))));
    assert!(volume.shutdown_reason().is_none());
    probe.refuse_reads(|_, _| false);
    volume.checkpoint().expect("it can be read");
    assert_eq!(volume.stats().dirty_pages, 0);
}

#[test]
fn a_file_whose_mapping_cannot_be_read_keeps_no_other_from_room_on_a_full_volume() {
    let (_probe, volume, _scattered) = with_an_unreadable_leaf();
    let fill = |path: &str| {
        let file = create(&volume, path);
        let mut length = 0;
        loop {
            match file.write_at(length, &vec![7; 1 << 16]) {
                Ok(count) => length += count as u64,
                Err(error) => return (length, error),
            }
        }
    };
    let (length, error) = fill("/large");
    assert_eq!(error, Error::NoSpace);
    volume.remove_file("/large").expect("remove");
    let (again, error) = fill("/large");
    assert_eq!(error, Error::NoSpace);
    assert!(again > length / 2, "{again} of {length}");
}

#[test]
fn every_kind_of_sync_succeeds_on_a_volume_that_is_open_for_reading_only() {
    let device = formatted(64 * MIB, 0);
    let volume = open(&device, manual(16 * MIB));
    let file = create(&volume, "/f");
    file.write_at(0, &[1; 100]).expect("write");
    file.fsync().expect("fsync");
    drop((file, volume));
    let volume = open(&device, VolumeOptions { read_only: true, ..manual(16 * MIB) });
    let file = volume.open_file("/f", OpenFlags::READ).expect("open");
    assert_eq!((volume.sync(), file.fsync(), file.fdatasync()), (Ok(()), Ok(()), Ok(())));
    let all = SyncRangeFlags::WAIT_BEFORE | SyncRangeFlags::WRITE | SyncRangeFlags::WAIT_AFTER;
    assert_eq!(file.sync_range(0..u64::MAX, all), Ok(()));
    assert_eq!(file.expire(0..u64::MAX), Ok(()));
    assert_eq!(file.fsync_if_durable(0..10, SyncKind::Data), Some(Ok(())));
}

/// The append has its first part in the cache, and no page of it can go home, since where the file's last blocks are cannot be read.
#[test]
fn an_append_to_a_file_whose_mapping_cannot_be_read_is_taken_back() {
    const TAIL_BYTES: usize = 1_000;
    let (probe, volume, file) = with_a_scattered_file();
    let (end, tail) = (EXTENTS * 8192, pattern(7, TAIL_BYTES));
    file.write_at(end, &tail).expect("write");
    volume.checkpoint().expect("checkpoint");
    let read_tail = || {
        let mut bytes = vec![0; 4096];
        file.read_at(end, &mut bytes).expect("read");
        assert!(bytes[..TAIL_BYTES] == tail);
    };
    // Other leaves take the place of the last in the cache, and the last page stays there.
    for extent in 0..EXTENTS * 2 / 3 {
        file.read_at(extent * 8192, &mut [0; 4096]).expect("read");
        if extent % 16 == 0 {
            read_tail();
        }
    }
    let size = file.size();
    for _ in 0..3 {
        probe.refuse_reads(|_, length_bytes| length_bytes == NODE_BYTES);
        let appended = with_watchdog(60, || file.append(&pattern(8, 4 << 20)));
        assert!(matches!(appended, Err(Error::Io(_))), "{appended:?}");
        assert_eq!(file.size(), size, "all or nothing");
        read_tail();
        probe.refuse_reads(|_, _| false);
    }
    assert!(volume.stats().dirty_pages <= 1, "the last page");
    assert!(volume.shutdown_reason().is_none());
    let more = pattern(9, 4 << 20);
    assert_eq!(file.append(&more), Ok(size));
    let expected = [&tail[..], &more[..]].concat();
    let mut bytes = vec![0; expected.len()];
    assert_eq!(file.read_at(end, &mut bytes), Ok(expected.len()));
    assert!(bytes == expected);
    volume.checkpoint().expect("checkpoint");
    volume.close().expect("close");
}

#[test]
fn who_has_a_file_open_whose_mapping_cannot_be_read_hears_of_it_once() {
    let (probe, volume, file) = with_an_unreadable_leaf();
    let other = volume.open_file("/scattered", OpenFlags::READ).expect("open");
    assert_eq!(volume.stats().writeback_errors, 0);
    assert!(matches!(volume.background_step(BackgroundWork::Writeback), Err(Error::Io(_))));
    assert!(volume.stats().writeback_errors > 0);
    for handle in [&file, &other] {
        assert!(matches!(handle.report_errors(), Err(Error::Io(_))));
        assert_eq!(handle.report_errors(), Ok(()));
    }
    probe.refuse_reads(|_, _| false);
    while volume.background_step(BackgroundWork::Writeback).expect("it can be read") {}
    assert_eq!((volume.stats().dirty_pages, file.fsync(), other.fsync()), (0, Ok(()), Ok(())));
}

/// With threads: all that is dirty is of this file, and where it lives cannot be read.
#[test]
fn who_waits_for_writeback_of_a_file_whose_mapping_cannot_be_read_hears_of_it() {
    let (probe, volume, file) = with_a_scattered_file();
    drop(file);
    volume.close().expect("close");
    let volume = Volume::open_device(probe.clone(), threads(2 * MIB)).expect("open");
    let file = volume.open_file("/scattered", OpenFlags::READ_WRITE).expect("open");
    let write_all = |seed: u64| {
        let write_one = |extent| file.write_at(extent * 8192, &pattern(seed + extent, 4096));
        (EXTENTS / 2..EXTENTS).try_for_each(|extent| write_one(extent).map(drop))
    };
    probe.refuse_reads(|_, length_bytes| length_bytes == NODE_BYTES);
    let written = with_watchdog(60, || write_all(1));
    let its_inode = format!("(inode {})", file.ino());
    assert!(matches!(&written, Err(Error::Io(why)) if why.contains(&its_inode)), "{written:?}");
    assert!(volume.shutdown_reason().is_none());
    probe.refuse_reads(|_, _| false);
    with_watchdog(60, || write_all(2)).expect("it can be read");
    assert!(matches!(file.fsync(), Err(Error::Io(_))), "what was noted is told once");
    file.fsync().expect("nothing is lost");
    for extent in EXTENTS / 2..EXTENTS {
        let mut bytes = vec![0; 4096];
        file.read_at(extent * 8192, &mut bytes).expect("read");
        assert!(bytes == pattern(2 + extent, 4096), "extent {extent}");
    }
}
