//! New pages of a lone sync are written at the same time as the frame that maps them: each byte once, and nothing is lost when they
//! cannot be written.

mod common;

use common::*;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use weir::check::{CheckOptions, check_device};
use weir::device::Device;
use weir::*;

const PAGE: usize = 4096;

fn volume_on_probe() -> (Arc<Probe>, Volume) {
    let probe = Probe::new(formatted(32 * MIB, 0));
    let volume = Volume::open_device(probe.clone(), manual(4 * MIB)).expect("open");
    (probe, volume)
}

/// As after a power cut: what was acknowledged is there, and the volume is clean.
fn holds_after_a_crash(probe: Arc<Probe>, volume: Volume, expected: &[u8]) {
    drop(volume);
    let device: Arc<dyn Device> = probe;
    let report = check_device(&device, &CheckOptions::default()).expect("check");
    assert!(report.is_clean(), "{:#?}", report.problems);
    let volume = open(&device, manual(4 * MIB));
    let file = volume.open_file("/f", OpenFlags::READ).expect("open");
    assert!(contents(&file) == expected, "after it was opened again");
}

#[test]
fn appends_of_a_lone_writer_are_written_once_and_flushed_once() {
    let (probe, volume) = volume_on_probe();
    let (file, mut expected) = (create(&volume, "/f"), Vec::new());
    file.fsync().expect("fsync");
    let before = volume.stats();
    for round in 0..10 {
        let bytes = pattern(round, 16 * PAGE);
        file.append(&bytes).expect("append");
        expected.extend_from_slice(&bytes);
        file.fsync().expect("fsync");
    }
    let after = volume.stats();
    assert_eq!(after.log.beside_bytes - before.log.beside_bytes, expected.len() as u64);
    assert_eq!(after.log.payload_blocks, before.log.payload_blocks);
    assert_eq!(after.log.flushes - before.log.flushes, 10);
    assert_eq!(after.log.frames - before.log.frames, 10);
    assert_eq!(after.dirty_pages, 0, "all of it is home");
    drop(file);
    holds_after_a_crash(probe, volume, &expected);
}

#[test]
fn what_cannot_be_written_beside_its_frame_goes_into_the_log_and_the_sync_is_true() {
    let (probe, volume) = volume_on_probe();
    let (file, expected) = (create(&volume, "/f"), pattern(1, 16 * PAGE));
    file.write_at(0, &expected).expect("write");
    probe.fail_data_writes.store(true, Ordering::Relaxed);
    let before = volume.stats();
    file.fsync().expect("the log has it");
    let after = volume.stats();
    assert_eq!(after.log.payload_blocks - before.log.payload_blocks, 16);
    assert_eq!(after.writeback_errors - before.writeback_errors, 1);
    assert_eq!(after.log.flushes - before.log.flushes, 1, "both frames count together");
    assert!(after.shutdown_reason.is_none() && after.logged_pages == 16);
    assert!(contents(&file) == expected);
    probe.fail_data_writes.store(false, Ordering::Relaxed);
    drop(file);
    holds_after_a_crash(probe, volume, &expected);
}

/// The pages go home later, as all that the log holds; what was written to one of them meanwhile is not lost.
#[test]
fn a_page_that_changes_while_its_older_version_cannot_be_written_keeps_the_change() {
    let (probe, volume) = volume_on_probe();
    let (file, mut expected) = (create(&volume, "/f"), pattern(1, 16 * PAGE));
    file.write_at(0, &expected).expect("write");
    let other = volume.open_file("/f", OpenFlags::READ_WRITE).expect("open");
    probe.amid_next_data_write(move || {
        other.write_at(3 * PAGE as u64 + 5, b"newer").expect("write");
    });
    probe.fail_data_writes.store(true, Ordering::Relaxed);
    file.fsync().expect("the log has the older version");
    assert!(probe.has_happened());
    expected[3 * PAGE + 5..][..5].copy_from_slice(b"newer");
    assert!(contents(&file) == expected);
    probe.fail_data_writes.store(false, Ordering::Relaxed);
    file.fsync().expect("fsync");
    volume.checkpoint().expect("checkpoint");
    assert_eq!(volume.stats().dirty_pages, 0);
    drop(file);
    holds_after_a_crash(probe, volume, &expected);
}
