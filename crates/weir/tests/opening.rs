//! Openings that fail halfway, by the device or by a second crash, and the openings after them.

mod common;

use common::volatile::Volatile;
use common::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use weir::check::{CheckOptions, check_device};
use weir::device::buffer::AlignedBuf;
use weir::device::memory::MemoryDevice;
use weir::device::{Device, IoClass};
use weir::format::{frame, root, superblock};
use weir::*;

const LOG_BLOCKS: u64 = 64;

fn opens(device: &Arc<dyn Device>) -> Result<Volume> {
    Volume::open_device(device.clone(), manual(4 * MIB))
}

/// A disk whose log, `fillers` frames further on, holds one frame that no recovery accepts: the power was cut when the disk had it, and
/// did not have the data that it is about.
fn with_a_frame_that_is_cut(fillers: u64) -> Arc<dyn Device> {
    let disk = Volatile::new(4 * MIB);
    let probe = Probe::new(disk.clone());
    let device: Arc<dyn Device> = probe.clone();
    format(&device, LOG_BLOCKS);
    let volume = open(&device, manual(4 * MIB));
    for number in 0..fillers {
        volume.create_dir(format!("/d{number}"), 0o755).expect("mkdir");
        volume.sync().expect("sync");
    }
    volume.checkpoint().expect("checkpoint");
    let lost = create(&volume, "/lost");
    lost.write_at(0, &pattern(2, 300_000)).expect("write");
    probe.fail_flushes.store(true, Ordering::Relaxed);
    lost.fsync().expect_err("the flush fails");
    disk.after_crash_with(|data| if data.starts_with(&frame::FRAME_MAGIC) { data.len() } else { 0 })
}

/// A frame that was cut has the number and the predecessor of the one that is written next. That one overwrites it, unless it did not fit
/// before the end of the ring: then both are there, and the next opening knows which is right by the epoch. So does the one after
/// that, if the next did not come to its end.
#[test]
fn a_frame_that_was_cut_is_not_taken_for_the_one_that_came_after_it_by_later_openings_either() {
    let mut tried = 0;
    for fillers in 0..70 {
        for others in 0..3 {
            let probe = Probe::new(with_a_frame_that_is_cut(fillers));
            let device: Arc<dyn Device> = probe.clone();
            let volume = opens(&device).expect("open");
            assert!(volume.metadata("/lost").is_err(), "its data is not there");
            for number in 0..others {
                volume.create_dir(format!("/other{number}"), 0o755).expect("mkdir");
            }
            // More than a block of records, so that the frame does not fit into the last one of the ring.
            volume.setxattr(Volume::ROOT, b"user.new", &[7; 4096], XattrMode::Create).expect("set");
            volume.sync().expect("acknowledged");
            drop(volume);
            probe.refuse(|_, begins| begins.starts_with(&root::MAGIC));
            opens(&device).expect_err("it ends amid recovery");
            probe.refuse(|_, _| false);
            let volume = opens(&device)
                .unwrap_or_else(|error| panic!("{fillers} fillers, {others} others: {error}"));
            let new = volume.getxattr(Volume::ROOT, b"user.new").unwrap_or_default();
            assert!(new == [7; 4096], "{fillers} fillers, {others} others");
            assert!(volume.metadata("/lost").is_err(), "{fillers} fillers, {others} others");
            tried += 1;
        }
    }
    assert_eq!(tried, 210);
}

/// What is on `device` now, but for both copies of the newest superblock, which are damaged.
fn without_newest_superblock(device: &Arc<dyn Device>) -> Arc<dyn Device> {
    let mut bytes = AlignedBuf::zeroed(4 * MIB as usize);
    device.read(0, &mut [&mut bytes], IoClass::SyncRead).expect("read");
    for block in superblock::choose_superblock(&**device).expect("superblock").0.places() {
        bytes[block as usize * 4096 + 300] ^= 1;
    }
    let copy = MemoryDevice::new(4 * MIB);
    copy.write(0, &[&bytes], IoClass::SyncWrite, false).expect("write");
    Arc::new(copy)
}

/// Where the newest superblock is lost, the one before it is good for as long as the log goes on from there, and for nothing else.
#[test]
fn an_older_superblock_is_opened_only_if_nothing_acknowledged_is_lost_with_the_newest() {
    let device = formatted(4 * MIB, LOG_BLOCKS);
    let (mut opened, mut refused, mut made) = (0, 0, 0);
    let mut look = |made: usize| {
        let copy = without_newest_superblock(&device);
        let report = check_device(&copy, &CheckOptions::default()).expect("check");
        match opens(&copy) {
            Ok(volume) => {
                assert_eq!(names(&volume, "/").len(), made, "names were lost in silence");
                assert!(report.is_clean(), "{:#?}", report.problems);
                opened += 1;
            }
            Err(error) => {
                assert!(!report.is_clean(), "{error}");
                refused += 1;
            }
        }
    };
    for round in 0..6 {
        let volume = opens(&device).expect("open");
        look(made);
        for number in 0..40 * round {
            volume.create_dir(format!("/{round}-{number}"), 0o755).expect("mkdir");
            volume.sync().expect("acknowledged");
            made += 1;
            if number % [9, 45][round % 2] == round {
                volume.checkpoint().expect("checkpoint");
            }
            look(made);
        }
        if round % 2 == 0 {
            volume.close().expect("close");
            look(made);
        }
    }
    assert!(opened > 100 && refused > 5, "{opened} opened, {refused} refused");
}

/// All frames are of one epoch, and the first behind the older superblock is damaged as well: the frames behind the newest one say what they come
/// after.
#[test]
fn an_older_superblock_whose_log_is_gone_is_not_opened_beside_frames_of_the_newest() {
    let device = formatted(4 * MIB, LOG_BLOCKS);
    let volume = opens(&device).expect("open");
    for round in 0..3 {
        for number in 0..5 {
            volume.create_dir(format!("/{round}-{number}"), 0o755).expect("mkdir");
            volume.sync().expect("acknowledged");
        }
        if round < 2 {
            volume.checkpoint().expect("checkpoint");
        }
    }
    let copy = without_newest_superblock(&device);
    assert_eq!(names(&opens(&copy).expect("the log goes on from there"), "/").len(), 15);
    let copy = without_newest_superblock(&device);
    let (older, _) = superblock::choose_superblock(&*copy).expect("the older one");
    let first_frame = older.geometry.log_start_block() + older.replay.position_blocks;
    let zeros = AlignedBuf::zeroed(4096);
    copy.write(first_frame * 4096, &[&zeros], IoClass::SyncWrite, false).expect("write");
    let report = check_device(&copy, &CheckOptions::default()).expect("check");
    assert!(!report.is_clean());
    let error = opens(&copy).map(drop).expect_err("ten names are lost");
    assert!(error.to_string().contains("newest superblock"), "{error}");
}

fn assert_sound(device: &Arc<dyn Device>) {
    let report = check_device(device, &CheckOptions::default()).expect("check");
    assert!(report.is_clean(), "{:#?}", report.problems);
}

/// A volume with a log to replay: pages that are not home, a file that lost its name while it was open.
fn in_use(device: &Arc<dyn Device>) {
    let volume = open(device, manual(4 * MIB));
    let file = create(&volume, "/f");
    file.write_at(0, &pattern(5, 20_000)).expect("write");
    file.fsync().expect("fsync");
    let gone = create(&volume, "/gone");
    gone.write_at(0, &pattern(6, 200_000)).expect("write");
    volume.remove_file("/gone").expect("unlink");
    volume.sync().expect("sync");
}

fn assert_in_use(device: &Arc<dyn Device>) {
    assert_sound(device);
    let volume = opens(device).expect("open");
    let file = volume.open_file("/f", OpenFlags::READ).expect("it is there");
    assert!(contents(&file) == pattern(5, 20_000));
    assert!(volume.metadata("/gone").is_err());
    drop(file);
    volume.close().expect("close");
    drop(volume);
    assert_sound(device);
}

#[test]
fn an_opening_tries_again_whichever_of_its_writes_the_disk_refuses_once() {
    let mut refused = 0;
    for writes_before in 0..1000 {
        let probe = Probe::new(formatted(4 * MIB, LOG_BLOCKS));
        let device: Arc<dyn Device> = probe.clone();
        in_use(&device);
        let writes = AtomicU64::new(0);
        probe.refuse(move |_, _| writes.fetch_add(1, Ordering::Relaxed) == writes_before);
        opens(&device).expect("it is over soon");
        probe.refuse(|_, _| false);
        assert_in_use(&device);
        let struck = probe.failed_writes.load(Ordering::Relaxed);
        if struck == 0 {
            break;
        }
        refused += struck;
    }
    // Two superblocks in two places each, data, nodes, a bitmap, the root.
    assert!((7..100).contains(&refused), "{refused}");
}

#[test]
fn openings_that_cannot_write_one_copy_of_the_superblock_leave_another_generation_whole() {
    for refused_blocks in [vec![1024 - 16, 1024 - 8], vec![0, 8], vec![0, 1024 - 8], vec![8]] {
        for openings in 1..6 {
            let probe = Probe::new(formatted(4 * MIB, LOG_BLOCKS));
            let device: Arc<dyn Device> = probe.clone();
            in_use(&device);
            let blocks = refused_blocks.clone();
            probe.refuse(move |offset, begins| {
                begins.starts_with(&superblock::MAGIC) && blocks.contains(&(offset / 4096))
            });
            let failed = (0..openings).filter(|_| opens(&device).is_err()).count();
            assert!(failed > 0 || openings == 1, "{refused_blocks:?}");
            assert_sound(&device);
            probe.refuse(|_, _| false);
            assert_in_use(&device);
        }
    }
}

/// What the disk has after `calls` writes and flushes of an opening, all of the next of which fail, and a power cut.
#[test]
fn a_disk_that_fails_amid_an_opening_and_loses_its_cache_leaves_everything() {
    let mut ended = false;
    for writes in 0..1000 {
        let disk = Volatile::new(4 * MIB);
        let probe = Probe::new(disk.clone());
        let device: Arc<dyn Device> = probe.clone();
        format(&device, LOG_BLOCKS);
        in_use(&device);
        let done = AtomicU64::new(0);
        probe.refuse(move |_, _| done.fetch_add(1, Ordering::Relaxed) >= writes);
        let opened = opens(&device);
        ended = opened.is_ok();
        drop(opened);
        for seed in 0..8 {
            assert_in_use(&disk.after_crash(seed));
        }
        // And the disk without the cut.
        probe.refuse(|_, _| false);
        assert_in_use(&device);
        if ended {
            break;
        }
    }
    assert!(ended);
}

/// The device fails after so many writes to come: with the next one, or with the flush before that.
fn cut_short_after(writes: u64, probe: &Arc<Probe>, at_a_flush: bool) {
    let done = AtomicU64::new(0);
    let flushes = Arc::downgrade(probe);
    probe.refuse(move |_, _| {
        let before = done.fetch_add(1, Ordering::Relaxed);
        if let Some(probe) = flushes.upgrade().filter(|_| at_a_flush && before + 1 >= writes) {
            // The last write is in the disk's cache when the power goes.
            probe.fail_flushes.store(true, Ordering::Relaxed);
        }
        before >= writes
    });
}

/// An older volume on the device, which may be larger than the new one: its mirrors then lie behind that.
#[test]
fn a_creation_that_is_cut_short_leaves_the_older_volume_as_it_was_or_none() {
    // The newest superblock of the older volume in the one slot, and after another opening in the other.
    for (size_bytes, openings) in [(4 * MIB, 0), (4 * MIB, 1), (2 * MIB, 0), (2 * MIB, 1)] {
        let (mut kept, mut gone, mut ended) = (0, 0, false);
        for (writes, at_a_flush) in (0..1000).flat_map(|writes| [(writes, false), (writes, true)]) {
            let disk = Volatile::new(4 * MIB);
            let probe = Probe::new(disk.clone());
            let device: Arc<dyn Device> = probe.clone();
            format(&device, LOG_BLOCKS);
            (0..openings).for_each(|_| drop(open(&device, manual(4 * MIB))));
            in_use(&device);
            device.flush().expect("flush");
            cut_short_after(writes, &probe, at_a_flush);
            let options =
                CreateOptions { size_bytes: Some(size_bytes), ..CreateOptions::default() };
            ended = Volume::format_device(&device, &options).is_ok();
            if ended {
                break;
            }
            for seed in 0..8 {
                let disk = disk.after_crash(seed);
                match opens(&disk) {
                    Err(Error::NotAVolume(_)) => gone += 1,
                    Ok(new) if new.superblock().volume_id != [7; 16] => {}
                    _ => {
                        assert_in_use(&disk);
                        kept += 1;
                    }
                }
            }
        }
        assert!(ended && kept > 0 && gone > 0, "{kept} kept, {gone} gone");
    }
}
