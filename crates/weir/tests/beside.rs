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

/// Data that waits for its frame, and data that begins before.
fn both_ways() -> [(Arc<Probe>, Volume); 2] {
    [None, Some(1)].map(|round_pages| {
        let probe = Probe::new(formatted(32 * MIB, 0));
        let options = VolumeOptions { round_pages, ..manual(4 * MIB) };
        let volume = Volume::open_device(probe.clone(), options).expect("open");
        (probe, volume)
    })
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
    for (probe, volume) in both_ways() {
        each_append_is_written_once(probe, volume, |_, file| file.fsync().expect("fsync"));
    }
}

/// Ten appends of 64 KiB, each made durable by `sync`: ten frames and flushes, and each byte once.
fn each_append_is_written_once(probe: Arc<Probe>, volume: Volume, sync: impl Fn(&Volume, &File)) {
    let (file, mut expected) = (create(&volume, "/f"), Vec::new());
    file.fsync().expect("fsync");
    let before = volume.stats();
    for round in 0..10 {
        let bytes = pattern(round, 16 * PAGE);
        file.append(&bytes).expect("append");
        expected.extend_from_slice(&bytes);
        sync(&volume, &file);
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
fn new_pages_of_a_ticket_are_written_once_and_not_by_who_submits_it() {
    let (probe, volume) = volume_on_probe();
    each_append_is_written_once(probe.clone(), volume, |volume, file| {
        let writes = probe.writes.load(Ordering::Relaxed);
        let ticket = file.fsync_async(0..u64::MAX, SyncKind::Data).expect("submit");
        assert_eq!(probe.writes.load(Ordering::Relaxed), writes);
        assert!(volume.background_step(BackgroundWork::Log).expect("step"));
        ticket.wait().expect("durable");
    });
}

/// What may wait for its frame is bounded, and a submitter waits for nothing: the rest travels in the log.
#[test]
fn tickets_that_nobody_waits_for_go_beside_up_to_a_bound_and_into_the_log_from_there() {
    let probe = Probe::new(formatted(64 * MIB, 0));
    let volume = Volume::open_device(probe.clone(), manual(32 * MIB)).expect("open");
    let (file, mut expected) = (create(&volume, "/f"), Vec::new());
    file.fsync().expect("fsync");
    let before = volume.stats();
    let writes = probe.writes.load(Ordering::Relaxed);
    let mut tickets = Vec::new();
    for round in 0..12 {
        let bytes = pattern(round, 64 * PAGE);
        file.append(&bytes).expect("append");
        for half in 0..2 {
            let start = expected.len() as u64 + half * 32 * PAGE as u64;
            let range = start..start + 32 * PAGE as u64;
            tickets.push(file.fsync_async(range, SyncKind::Data).expect("submit"));
        }
        expected.extend_from_slice(&bytes);
    }
    assert_eq!(probe.writes.load(Ordering::Relaxed), writes, "nobody has waited");
    assert!(volume.background_step(BackgroundWork::Log).expect("step"));
    for ticket in tickets {
        ticket.wait().expect("durable");
    }
    let after = volume.stats();
    let beside = after.log.beside_bytes - before.log.beside_bytes;
    let logged = (after.log.payload_blocks - before.log.payload_blocks) * PAGE as u64;
    assert_eq!(beside + logged, expected.len() as u64);
    assert!(beside >= 2 * MIB && logged > 0, "{beside} and {logged} bytes");
    drop(file);
    holds_after_a_crash(probe, volume, &expected);
}

/// A file that fits into its inode has no blocks of its own: nothing goes beside, and what was taken for that is as dirty as before.
#[test]
fn a_ticket_puts_back_what_cannot_go_beside() {
    let probe = Probe::new(formatted(32 * MIB, 0));
    let options = VolumeOptions { beside_from_pages: Some(1), ..manual(4 * MIB) };
    let volume = Volume::open_device(probe.clone(), options).expect("open");
    let (file, expected) = (create(&volume, "/f"), pattern(1, 100));
    file.write_at(0, &expected).expect("write");
    let before = volume.stats();
    let ticket = file.fsync_async(0..u64::MAX, SyncKind::Data).expect("submit");
    assert!(volume.background_step(BackgroundWork::Log).expect("step"));
    ticket.wait().expect("durable");
    let after = volume.stats();
    assert_eq!(after.log.beside_bytes, before.log.beside_bytes);
    assert_eq!(after.log.payload_blocks - before.log.payload_blocks, 1);
    assert_eq!(after.writeback_errors, 0);
    assert_eq!((after.dirty_pages, after.logged_pages), (1, 1));
    drop(file);
    holds_after_a_crash(probe, volume, &expected);
}

#[test]
fn what_cannot_be_written_beside_its_frame_goes_into_the_log_and_the_sync_is_true() {
    for (probe, volume) in both_ways() {
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
}

/// The pages go home later, as all that the log holds; what was written to one of them meanwhile is not lost.
#[test]
fn a_page_that_changes_while_its_older_version_cannot_be_written_keeps_the_change() {
    for (probe, volume) in both_ways() {
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
}

/// 64 KiB in each of three files.
fn three_files(volume: &Volume) -> Vec<(File, Vec<u8>)> {
    let make = |number: u64| {
        let (file, bytes) = (create(volume, &format!("/f{number}")), pattern(number, 16 * PAGE));
        file.write_at(0, &bytes).expect("write");
        (file, bytes)
    };
    (0..3).map(make).collect()
}

fn three_files_hold_after_a_crash(probe: Arc<Probe>, volume: Volume, files: Vec<(File, Vec<u8>)>) {
    let contents_of: Vec<Vec<u8>> = files.into_iter().map(|(_, bytes)| bytes).collect();
    drop(volume);
    let device: Arc<dyn Device> = probe;
    let report = check_device(&device, &CheckOptions::default()).expect("check");
    assert!(report.is_clean(), "{:#?}", report.problems);
    let volume = open(&device, manual(4 * MIB));
    for (number, expected) in contents_of.iter().enumerate() {
        let file = volume.open_file(format!("/f{number}"), OpenFlags::READ).expect("open");
        assert!(contents(&file) == *expected, "file {number} after it was opened again");
    }
}

#[test]
fn files_that_are_synced_together_leave_in_one_write_beside_one_frame() {
    let (probe, volume) = volume_on_probe();
    let files = three_files(&volume);
    let (before, writes) = (volume.stats(), probe.writes.load(Ordering::Relaxed));
    volume.sync().expect("sync");
    let after = volume.stats();
    assert_eq!(probe.writes.load(Ordering::Relaxed) - writes, 2, "all data, and the frame");
    assert_eq!(after.log.frames - before.log.frames, 1);
    assert_eq!(after.log.flushes - before.log.flushes, 1);
    assert_eq!(after.log.beside_bytes - before.log.beside_bytes, 3 * 16 * PAGE as u64);
    assert_eq!(after.dirty_pages, 0, "all of it is home");
    three_files_hold_after_a_crash(probe, volume, files);
}

#[test]
fn what_cannot_be_written_of_several_files_is_made_up_for_before_their_frame_counts() {
    let (probe, volume) = volume_on_probe();
    let files = three_files(&volume);
    probe.fail_data_writes.store(true, Ordering::Relaxed);
    let before = volume.stats();
    volume.sync().expect("the log has it");
    let after = volume.stats();
    assert_eq!(after.log.payload_blocks - before.log.payload_blocks, 48);
    assert_eq!(after.writeback_errors - before.writeback_errors, 3);
    assert_eq!(after.log.flushes - before.log.flushes, 1, "all frames count together");
    assert!(after.shutdown_reason.is_none() && after.logged_pages == 48);
    probe.fail_data_writes.store(false, Ordering::Relaxed);
    three_files_hold_after_a_crash(probe, volume, files);
}

/// A page that was overwritten travels in the frame beside which new ones are written.
#[test]
fn new_pages_go_beside_the_frame_that_has_the_others() {
    let (probe, volume) = volume_on_probe();
    let (file, mut expected) = (create(&volume, "/f"), pattern(1, 16 * PAGE));
    file.write_at(0, &expected).expect("write");
    file.fsync().expect("fsync");
    file.write_at(3 * PAGE as u64, b"over").expect("write");
    expected[3 * PAGE..][..4].copy_from_slice(b"over");
    let more = pattern(2, 32 * PAGE);
    file.write_at(32 * PAGE as u64, &more[..8 * PAGE]).expect("write");
    expected.resize(32 * PAGE, 0);
    expected.extend_from_slice(&more[..8 * PAGE]);
    let (before, writes) = (volume.stats(), probe.writes.load(Ordering::Relaxed));
    file.fsync().expect("fsync");
    let after = volume.stats();
    assert_eq!(probe.writes.load(Ordering::Relaxed) - writes, 2);
    assert_eq!(after.log.frames - before.log.frames, 1);
    assert_eq!(after.log.payload_blocks - before.log.payload_blocks, 1);
    assert_eq!(after.log.beside_bytes - before.log.beside_bytes, 8 * PAGE as u64);
    drop(file);
    holds_after_a_crash(probe, volume, &expected);
}

/// A file of 16 pages with nothing between them, and its content. Written to again with `seed`.
fn write_scattered(file: &File, expected: &mut Vec<u8>, seed: u64) {
    expected.resize((15 * 7 + 1) * PAGE, 0);
    for place in 0..16 {
        let (at, page) = (place * 7 * PAGE, pattern(seed + place as u64, PAGE));
        file.write_at(at as u64, &page).expect("write");
        expected[at..][..PAGE].copy_from_slice(&page);
    }
}

#[test]
fn pages_that_live_apart_move_and_leave_nothing_to_be_done() {
    let (probe, volume) = volume_on_probe();
    let (file, mut expected) = (create(&volume, "/f"), Vec::new());
    write_scattered(&file, &mut expected, 1);
    file.fsync().expect("fsync");
    volume.checkpoint().expect("checkpoint");
    let free_blocks = volume.stats().space.free_blocks;
    for round in 1..20 {
        let (before, writes) = (volume.stats(), probe.writes.load(Ordering::Relaxed));
        write_scattered(&file, &mut expected, 100 * round);
        file.fsync().expect("fsync");
        let after = volume.stats();
        assert_eq!(probe.writes.load(Ordering::Relaxed) - writes, 2, "all pages, and the frame");
        assert_eq!(after.log.payload_blocks, before.log.payload_blocks);
        assert_eq!(after.sync_moved_pages - before.sync_moved_pages, 16);
        assert_eq!(after.space.pending_free_blocks, 16 * round, "until the next checkpoint");
        assert_eq!(after.dirty_pages, 0, "all of it is home");
    }
    volume.checkpoint().expect("checkpoint");
    assert_eq!(volume.stats().space.free_blocks, free_blocks);
    write_scattered(&file, &mut expected, 9000);
    file.fsync().expect("fsync");
    drop(file);
    holds_after_a_crash(probe, volume, &expected);
}

#[test]
fn pages_that_live_in_one_extent_are_written_to_it_again() {
    let (probe, volume) = volume_on_probe();
    let (file, mut expected) = (create(&volume, "/f"), pattern(1, 64 * PAGE));
    file.write_at(0, &expected).expect("write");
    file.fsync().expect("fsync");
    let before = volume.stats();
    for place in (3..64).step_by(5) {
        let page = pattern(place as u64, PAGE);
        file.write_at((place * PAGE) as u64, &page).expect("write");
        expected[place * PAGE..][..PAGE].copy_from_slice(&page);
    }
    file.fsync().expect("fsync");
    let after = volume.stats();
    assert_eq!(after.log.payload_blocks - before.log.payload_blocks, 13);
    assert_eq!(after.sync_moved_pages, 0);
    assert_eq!(after.space.pending_free_blocks, before.space.pending_free_blocks);
    drop(file);
    holds_after_a_crash(probe, volume, &expected);
}

#[test]
fn pages_that_cannot_be_written_where_they_move_to_are_in_the_log() {
    for (probe, volume) in both_ways() {
        let (file, mut expected) = (create(&volume, "/f"), Vec::new());
        write_scattered(&file, &mut expected, 1);
        file.fsync().expect("fsync");
        write_scattered(&file, &mut expected, 100);
        probe.fail_data_writes.store(true, Ordering::Relaxed);
        let before = volume.stats();
        file.fsync().expect("the log has it");
        let after = volume.stats();
        assert_eq!(after.sync_moved_pages - before.sync_moved_pages, 16);
        assert_eq!(after.log.payload_blocks - before.log.payload_blocks, 16);
        assert!(after.shutdown_reason.is_none() && after.logged_pages == 16);
        probe.fail_data_writes.store(false, Ordering::Relaxed);
        drop(file);
        holds_after_a_crash(probe, volume, &expected);
    }
}

/// Where the free space is short, or mostly holes, pages stay.
#[test]
fn pages_stay_where_they_live_when_the_volume_is_nearly_full() {
    let (probe, volume) = volume_on_probe();
    let (file, mut expected) = (create(&volume, "/f"), Vec::new());
    write_scattered(&file, &mut expected, 1);
    file.fsync().expect("fsync");
    let space = volume.stats().space;
    let filler = create(&volume, "/filler");
    let blocks = space.free_blocks - space.total_blocks / 5;
    filler.allocate(AllocateMode::Extend, 0, blocks * PAGE as u64).expect("allocate");
    write_scattered(&file, &mut expected, 100);
    let before = volume.stats();
    file.fsync().expect("fsync");
    let after = volume.stats();
    assert_eq!(after.sync_moved_pages, 0);
    assert_eq!(after.log.payload_blocks - before.log.payload_blocks, 16);
    drop((file, filler));
    holds_after_a_crash(probe, volume, &expected);
}

/// Data whose frame is never written does not keep anybody waiting.
#[test]
fn after_a_failed_flush_nobody_waits_for_pages_that_have_no_frame() {
    with_watchdog(60, || {
        shut_down_amid_appends(File::fsync);
        // Tickets, one at a time, and several that nobody waits for before the last.
        shut_down_amid_appends(|file| file.fsync_async(0..u64::MAX, SyncKind::Data)?.wait());
        shut_down_amid_appends(|file| {
            let size = file.size();
            let half = |range| file.fsync_async(range, SyncKind::Data);
            let first = half(0..size - 4 * PAGE as u64)?;
            half(size - 4 * PAGE as u64..size)?.wait()?;
            first.wait()
        });
    });
}

fn shut_down_amid_appends(sync: impl Fn(&File) -> Result<()> + Copy + Send + 'static) {
    let probe = Probe::new(formatted(64 * MIB, 0));
    let volume = Volume::open_device(probe.clone(), VolumeOptions::default()).expect("open");
    let append = |file: File| {
        std::thread::spawn(move || {
            for round in 0.. {
                let appended = file.append(&pattern(round, 8 * PAGE));
                if appended.and_then(|_| sync(&file)).is_err() {
                    break;
                }
            }
            file
        })
    };
    let files: Vec<File> = (0..6).map(|number| create(&volume, &format!("/f{number}"))).collect();
    let threads: Vec<_> = files.into_iter().map(append).collect();
    while volume.stats().fsyncs < 50 {
        std::thread::yield_now();
    }
    probe.fail_flushes.store(true, Ordering::Relaxed);
    for thread in threads {
        let file = thread.join().expect("join");
        assert!(file.truncate(0).is_err(), "the volume is shut down");
        assert!(file.fsync().is_err());
    }
    let stats = volume.stats();
    assert!(stats.shutdown_reason.is_some());
    assert_eq!(stats.log_fill.companion_blocks, 0);
}
