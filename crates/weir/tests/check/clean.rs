//! Undamaged volumes, in every state that closing, crashing and checkpointing leave them in.

use crate::sample::{MIB, closed, formatted, manual, open, pattern, populate};
use std::sync::Arc;
use weir::check::{CheckOptions, CheckReport, check_device};
use weir::device::Device;
use weir::device::memory::MemoryDevice;
use weir::{AllocateMode, BackgroundWork, OpenFlags, Volume};

pub fn check(device: &Arc<MemoryDevice>) -> CheckReport {
    let device: Arc<dyn Device> = device.clone();
    check_device(&device, &CheckOptions::default()).expect("check")
}

#[track_caller]
pub fn assert_clean(report: &CheckReport) {
    let problems: Vec<_> = report.problems.iter().map(ToString::to_string).collect();
    assert!(report.is_clean(), "{problems:#?}");
    assert!(report.warnings.is_empty(), "{:#?}", report.warnings);
}

#[test]
fn a_new_volume_is_clean() {
    for size_bytes in [MIB, 4 * MIB, 200 * MIB] {
        let report = check(&formatted(size_bytes));
        assert_clean(&report);
        assert!(!report.log_replayed && report.cleanly_closed);
        assert_eq!((report.counts.inodes, report.counts.directories), (1, 1));
    }
}

#[test]
fn a_closed_volume_with_everything_is_clean() {
    let device = closed();
    let before = device.image();
    let report = check(&device);
    assert_clean(&report);
    assert!(!report.log_replayed && report.cleanly_closed);
    let counts = report.counts;
    assert_eq!((counts.inodes, counts.directories, counts.files, counts.symlinks), (14, 4, 6, 1));
    assert_eq!((counts.orphans, counts.entries, counts.attributes), (1, 13, 3));
    assert!(counts.verified_blocks > 20 && counts.verified_blocks < counts.file_blocks);
    assert!(device.image() == before, "a check changes nothing");
}

#[test]
fn a_crashed_volume_is_checked_as_it_will_be_after_recovery() {
    let device = formatted(4 * MIB);
    let volume = open(&device);
    populate(&volume);
    let gone = volume.open_file("/gone", OpenFlags::CREATE).expect("create");
    gone.write_at(0, &pattern(5, 20_000)).expect("write");
    volume.remove_file("/gone").expect("unlink");
    volume.sync().expect("sync");
    drop((gone, volume));
    let before = device.image();
    let report = check(&device);
    assert_clean(&report);
    assert!(report.log_replayed && !report.cleanly_closed && report.log_frames > 0);
    assert_eq!((report.counts.files, report.counts.orphans), (5, 0), "the orphan is gone");
    assert!(device.image() == before, "a check changes nothing");
    drop(open(&device));
    let report = check(&device);
    assert_clean(&report);
    assert!(!report.log_replayed, "recovery left nothing to replay");
}

#[test]
fn a_large_directory_and_many_files_are_clean() {
    let device = formatted(64 * MIB);
    let volume = open(&device);
    volume.create_dir("/many", 0o755).expect("mkdir");
    for number in 0..5000 {
        let file = volume.open_file(format!("/many/{number}"), OpenFlags::CREATE).expect("create");
        file.write_at(0, format!("content {number}").as_bytes()).expect("write");
    }
    let large = volume.open_file("/large", OpenFlags::CREATE).expect("create");
    large.write_at(777, &pattern(3, 12 << 20)).expect("write");
    large.fsync().expect("fsync");
    volume.sync().expect("sync");
    assert_clean(&check(&device));
    for number in (0..5000).step_by(3) {
        volume.remove_file(format!("/many/{number}")).expect("unlink");
    }
    large.allocate(AllocateMode::PunchHole, 1 << 20, 3 << 20).expect("punch");
    large.truncate(9_000_001).expect("truncate");
    volume.sync().expect("sync");
    assert_clean(&check(&device));
    drop(large);
    volume.close().expect("close");
    let report = check(&device);
    assert_clean(&report);
    assert_eq!(report.counts.entries, 3333 + 2);
    assert!(report.counts.verified_blocks > 1000);
}

/// Whatever was done last and however far the background work is: the device is always consistent.
#[test]
fn every_step_of_a_history_leaves_a_clean_device() {
    let device = formatted(4 * MIB);
    let volume = open(&device);
    let file = volume.open_file("/f", OpenFlags::CREATE).expect("create");
    let mut replayed = 0;
    for step in 0_u64..300 {
        match step * 7 % 11 {
            0 => drop(file.write_at(step * 1000 % 90_000, &pattern(step, 9000)).expect("write")),
            1 => file.truncate(step * 501 % 70_000).expect("truncate"),
            2 => file.fsync().expect("fsync"),
            3 => drop(volume.background_step(BackgroundWork::Writeback).expect("writeback")),
            4 | 5 => drop(volume.background_step(BackgroundWork::Checkpoint).expect("checkpoint")),
            6 => drop(volume.background_step(BackgroundWork::Log).expect("log")),
            7 => {
                let name = format!("/n{}", step % 5);
                let other = volume.open_file(&name, OpenFlags::CREATE).expect("create");
                other.write_at(0, &pattern(step, 300)).expect("write");
                other.fsync().expect("fsync");
            }
            8 => drop(volume.remove_file(format!("/n{}", step % 4))),
            9 => file.allocate(AllocateMode::PunchHole, step * 37, 10_000).expect("punch"),
            _ => file
                .allocate(AllocateMode::KeepSize, step * 997 % 50_000, 30_000)
                .expect("allocate"),
        }
        let report = check(&device);
        let problems: Vec<_> = report.problems.iter().map(ToString::to_string).collect();
        assert!(report.is_clean(), "step {step}: {problems:#?}");
        replayed += u32::from(report.log_replayed);
    }
    assert!((50..300).contains(&replayed), "{replayed} of the states had a log");
}

#[test]
fn an_interrupted_cut_is_finished_by_recovery() {
    let device = formatted(32 * MIB);
    let volume = open(&device);
    let file = volume.open_file("/holes", OpenFlags::CREATE).expect("create");
    for page in 0..400 {
        file.write_at(page * 8192, &pattern(page, 4096)).expect("write");
    }
    volume.checkpoint().expect("checkpoint");
    file.truncate(5000).expect("truncate");
    volume.sync().expect("sync");
    let report = check(&device);
    assert_clean(&report);
    assert!(report.log_replayed);
}

#[test]
fn an_image_file_checks_like_the_device_and_an_open_one_is_refused() {
    let path = std::env::temp_dir().join(format!("weir-check-{}.img", std::process::id()));
    let device = closed();
    std::fs::write(&path, device.image()).expect("write the image");
    let result = weir::check::check(&path, &CheckOptions::default());
    let held = Volume::open(&path, manual()).expect("open");
    let refused = weir::check::check(&path, &CheckOptions::default());
    drop(held);
    std::fs::remove_file(&path).expect("remove");
    assert_eq!(result.expect("check"), check(&device));
    assert!(matches!(refused, Err(weir::Error::InUse(_))));
}
