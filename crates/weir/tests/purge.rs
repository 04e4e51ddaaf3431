//! A removal has happened when it answers, whatever becomes of the purge of what was removed: that is tried again.

mod common;

use common::*;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use weir::check::{CheckOptions, check_device};
use weir::device::Device;
use weir::*;

/// Extents of a page: more than one step of a purge takes, in several leaves of the tree.
const EXTENTS: u64 = 1000;

/// A volume with a scattered file `/f` that is not in memory, on a disk that can be told not to read.
fn volume_with_scattered_file() -> (Arc<Probe>, Arc<dyn Device>, Volume) {
    let probe = Probe::new(formatted(64 * MIB, 0));
    let device: Arc<dyn Device> = probe.clone();
    let volume = open(&device, manual(16 * MIB));
    let file = create(&volume, "/f");
    for number in 0..EXTENTS {
        file.write_at(number * 8192, &[7; 4096]).expect("write");
    }
    create(&volume, "/new");
    volume.create_dir("/d", 0o755).expect("mkdir");
    volume.close().expect("close");
    drop((file, volume));
    let volume = open(&device, manual(16 * MIB));
    // What finding them needs.
    volume.metadata("/f").expect("stat");
    volume.metadata("/new").expect("stat");
    (probe, device, volume)
}

fn without_reads<R>(probe: &Probe, body: impl FnOnce() -> R) -> R {
    probe.fail_reads.store(true, Ordering::Relaxed);
    let result = body();
    probe.fail_reads.store(false, Ordering::Relaxed);
    result
}

fn assert_nothing_is_left(device: &Arc<dyn Device>, volume: Volume, inodes: u64) {
    volume.close().expect("close");
    assert_eq!(volume.statfs().inodes, inodes);
    assert_eq!(volume.stats().dirty_inodes, 0);
    drop(volume);
    let report = check_device(device, &CheckOptions::default()).expect("check");
    assert!(report.problems.is_empty(), "{:?}", report.problems);
}

#[test]
fn a_file_whose_purge_fails_is_removed_and_purged_later() {
    let (probe, device, volume) = volume_with_scattered_file();
    let inodes = volume.statfs().inodes;
    without_reads(&probe, || volume.remove_file("/f").expect("it is removed"));
    assert_eq!(volume.metadata("/f"), Err(Error::NotFound));
    assert_eq!(volume.stats().purge_errors, 1);
    assert_eq!(volume.statfs().inodes, inodes, "its purge has failed");
    without_reads(&probe, || {
        let refused = volume.background_step(BackgroundWork::Purge);
        assert!(matches!(refused, Err(Error::Io(_))), "{refused:?}");
    });
    assert_eq!(volume.background_step(BackgroundWork::Purge), Ok(true));
    assert_eq!(volume.background_step(BackgroundWork::Purge), Ok(false));
    assert_nothing_is_left(&device, volume, inodes - 1);
}

#[test]
fn a_file_is_replaced_although_the_purge_of_the_old_one_fails() {
    let (probe, device, volume) = volume_with_scattered_file();
    let inodes = volume.statfs().inodes;
    without_reads(&probe, || volume.rename_path("/new", "/f").expect("it is renamed"));
    assert_eq!(volume.metadata("/f").map(|attr| attr.size_bytes), Ok(0));
    assert_eq!(volume.stats().purge_errors, 1);
    assert_nothing_is_left(&device, volume, inodes - 1);
}

#[test]
fn what_cannot_be_purged_waits_behind_what_can() {
    let (probe, device, volume) = volume_with_scattered_file();
    let inodes = volume.statfs().inodes;
    without_reads(&probe, || {
        volume.remove_file("/f").expect("it is removed");
        volume.remove_file("/new").expect("and this");
        volume.remove_dir("/d").expect("and this");
    });
    assert!(volume.statfs().inodes >= inodes - 2);
    assert_nothing_is_left(&device, volume, inodes - 3);
}

#[test]
fn a_write_on_a_full_volume_does_not_fail_for_what_another_call_removed() {
    let (probe, device, volume) = volume_with_scattered_file();
    drop(volume);
    let in_background = VolumeOptions { purge_at_once_blocks: Some(0), ..manual(16 * MIB) };
    let volume = open(&device, in_background);
    let file = create(&volume, "/g");
    let bytes = vec![1; 1 << 20];
    file.write_at(0, &bytes).expect("write");
    volume.checkpoint().expect("checkpoint");
    volume.remove_file("/f").expect("remove");
    // The first read is that of the purge, when a write finds no space.
    probe.failing_reads.store(1, Ordering::Relaxed);
    let refused = (1..100).find_map(|number| file.write_at(number << 20, &bytes).err());
    assert_eq!(refused, Some(Error::NoSpace));
    assert_eq!(volume.stats().purge_errors, 1, "it was tried in vain");
    assert_eq!(volume.background_step(BackgroundWork::Purge), Ok(false), "and once more");
}

/// A small file is purged by who removes it, or has it open last. Who needs its space meanwhile waits for that as for any other purge.
#[test]
fn a_write_on_a_full_volume_waits_for_what_another_call_is_removing() {
    let (probe, device, volume) = volume_with_scattered_file();
    let file = create(&volume, "/g");
    for length in [1 << 20, 4096] {
        let bytes = vec![1; length];
        while file.append(&bytes).is_ok() {}
    }
    volume.checkpoint().expect("checkpoint");
    while file.append(&[1; 4096]).is_ok() {}
    drop((file, volume));
    let volume = open(&device, manual(16 * MIB));
    volume.metadata("/f").expect("stat");
    let file = volume.open_file("/g", OpenFlags::READ_WRITE).expect("open");
    while file.append(&[1; 4096]).is_ok() {}
    let (tell, told) = mpsc::channel();
    let (go_on, may_go_on) = mpsc::channel::<()>();
    probe.amid_next_read(move || {
        tell.send(()).expect("the test waits for it");
        may_go_on.recv().expect("the test says so");
    });
    with_watchdog(60, || {
        std::thread::scope(|scope| {
            let removed = scope.spawn(|| volume.remove_file("/f"));
            told.recv().expect("the purge reads what the file has");
            let (answer, answered) = mpsc::channel();
            let file = &file;
            scope.spawn(move || answer.send(file.append(&vec![2; 800 * 4096]).map(drop)));
            let early = answered.recv_timeout(Duration::from_millis(500));
            go_on.send(()).expect("the purge waits for it");
            assert_eq!(removed.join().expect("no panic"), Ok(()));
            assert_eq!(early, Err(mpsc::RecvTimeoutError::Timeout), "it did not wait");
            assert_eq!(answered.recv(), Ok(Ok(())));
        });
    });
}
