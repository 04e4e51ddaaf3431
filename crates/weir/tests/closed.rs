//! Files that were closed before they were synced share the frames and flushes of those that are synced first; nobody else pays.

mod common;

use common::*;
use std::sync::{Arc, Barrier};
use weir::check::{CheckOptions, check_device};
use weir::device::Device;
use weir::*;

const PAGE: usize = 4096;

fn volume_on_probe() -> (Arc<Probe>, Volume) {
    let probe = Probe::new(formatted(32 * MIB, 0));
    let volume = Volume::open_device(probe.clone(), manual(8 * MIB)).expect("open");
    (probe, volume)
}

fn path(number: u64) -> String {
    format!("/f{number}")
}

fn write_and_close(volume: &Volume, number: u64) {
    create(volume, &path(number)).write_at(0, &pattern(number, PAGE)).expect("write");
}

fn open_and_sync(volume: &Volume, number: u64) {
    volume
        .open_file(path(number), OpenFlags::READ_WRITE)
        .and_then(|file| file.fsync())
        .expect("sync");
}

#[test]
fn a_pass_over_closed_files_takes_few_flushes_and_each_file_is_durable_when_its_sync_returns() {
    let files = 300;
    for synced in [1, 5, 100, files] {
        let (probe, volume) = volume_on_probe();
        (0..files).for_each(|number| write_and_close(&volume, number));
        let before = volume.stats();
        (0..synced).for_each(|number| open_and_sync(&volume, number));
        let after = volume.stats();
        let flushes = after.log.flushes - before.log.flushes;
        assert!(flushes <= 5 + synced / 50, "{flushes} flushes for {synced} files");
        let taken = after.taken_along - before.taken_along;
        assert!(taken <= 2 * synced + 4, "{taken} files for {synced}");
        // As after a power cut.
        drop(volume);
        let device: Arc<dyn Device> = probe;
        let report = check_device(&device, &CheckOptions::default()).expect("check");
        assert!(report.is_clean(), "{:#?}", report.problems);
        let volume = open(&device, manual(8 * MIB));
        for number in 0..synced {
            let file = volume.open_file(path(number), OpenFlags::READ).expect("open");
            assert!(contents(&file) == pattern(number, PAGE), "file {number} of {synced}");
        }
    }
}

/// Eight threads close files in turns; one of them goes on to sync its own, as one of several programs does that is ahead of the others.
#[test]
fn a_sync_takes_along_what_the_same_thread_has_closed() {
    let (threads, files) = (8, 80);
    let (_probe, volume) = volume_on_probe();
    let turn = Barrier::new(threads);
    std::thread::scope(|scope| {
        for thread in 0..threads as u64 {
            let (volume, turn) = (&volume, &turn);
            scope.spawn(move || {
                for file in 0..files {
                    turn.wait();
                    write_and_close(volume, thread * files + file);
                }
            });
        }
    });
    let before = volume.stats();
    (0..files).for_each(|number| open_and_sync(&volume, number));
    let after = volume.stats();
    let flushes = after.log.flushes - before.log.flushes;
    assert!(flushes <= files / 8, "{flushes} flushes for {files} files");
}

#[test]
fn who_syncs_before_closing_takes_nobody_along() {
    let (_probe, volume) = volume_on_probe();
    let before = volume.stats();
    for number in 0..50 {
        let file = create(&volume, &path(number));
        file.write_at(0, &pattern(number, PAGE)).expect("write");
        file.fsync().expect("sync");
    }
    // Nor who opens again what is durable.
    (0..50).for_each(|number| open_and_sync(&volume, number));
    let after = volume.stats();
    assert_eq!(after.log.flushes - before.log.flushes, 50);
    assert_eq!(after.taken_along, 0);
}

#[test]
fn only_new_files_with_a_name_that_fit_into_a_frame_are_taken_along() {
    let (_probe, volume) = volume_on_probe();
    let old = create(&volume, "/old");
    old.write_at(0, &pattern(1, 64 * PAGE)).expect("write");
    old.fsync().expect("sync");
    old.write_at(0, &pattern(2, PAGE)).expect("write");
    drop(old);
    create(&volume, "/large").write_at(0, &pattern(3, 200 * PAGE)).expect("write");
    write_and_close(&volume, 1);
    write_and_close(&volume, 2);
    volume.remove_file(path(2)).expect("remove");
    write_and_close(&volume, 3);
    open_and_sync(&volume, 3);
    assert_eq!(volume.stats().taken_along, 1, "file 1");
    let flushes = volume.stats().log.flushes;
    open_and_sync(&volume, 1);
    assert_eq!(volume.stats().log.flushes, flushes);
    for (name, expected) in [("/old", pattern(2, PAGE)), ("/large", pattern(3, 200 * PAGE))] {
        let file = volume.open_file(name, OpenFlags::READ).expect("open");
        assert!(contents(&file)[..expected.len()] == expected);
    }
}
