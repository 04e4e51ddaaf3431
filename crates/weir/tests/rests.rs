//! Whoever writes much back leaves the processor to others between its pieces, and nothing of what it writes is the worse for it.

mod common;

use common::*;
use std::sync::atomic::{AtomicBool, Ordering};
use weir::*;

const LARGE_BYTES: u64 = 96 * MIB;

fn is_large(file: &File) -> bool {
    (0..LARGE_BYTES).step_by(MIB as usize).all(|at| {
        let mut bytes = vec![0; MIB as usize];
        file.read_at(at, &mut bytes).expect("read") == bytes.len()
            && bytes == pattern(at, bytes.len())
    })
}

fn write_large(volume: &Volume, bytes: u64) -> File {
    let large = create(volume, "/large");
    for at in (0..bytes).step_by(MIB as usize) {
        large.write_at(at, &pattern(at, MIB as usize)).expect("write");
    }
    large
}

/// Whichever it is, the sync or the flushers, that writes most of it.
#[test]
fn who_writes_much_back_rests_while_others_sync_and_what_both_wrote_is_durable() {
    let device = formatted(256 * MIB, 0);
    let volume = open(&device, threads(512 * MIB));
    let log = create(&volume, "/log");
    let ended = AtomicBool::new(false);
    let (appends, large) = std::thread::scope(|scope| {
        let appender = scope.spawn(|| {
            let mut appends = 0_u64;
            while !ended.load(Ordering::Acquire) {
                log.append(&pattern(appends, 4096)).expect("append");
                log.fdatasync().expect("sync");
                appends += 1;
            }
            appends
        });
        let large = write_large(&volume, LARGE_BYTES);
        let synced = large.fsync();
        ended.store(true, Ordering::Release);
        synced.expect("sync");
        (appender.join().expect("the appender ends"), large)
    });
    assert!(volume.stats().writeback_rests > 0, "96 MiB are more than a stretch of work");
    drop((large, log));
    // Without closing it.
    drop(volume);
    let volume = open(&device, threads(64 * MIB));
    assert!(is_large(&volume.open_file("/large", OpenFlags::READ).expect("open")));
    let log = volume.open_file("/log", OpenFlags::READ).expect("open");
    assert_eq!(log.size(), appends * 4096);
    assert!(contents(&log).chunks(4096).zip(0..).all(|(page, n)| page == pattern(n, 4096)));
}

#[test]
fn in_manual_mode_nobody_rests() {
    let volume = open(&formatted(256 * MIB, 0), manual(128 * MIB));
    write_large(&volume, LARGE_BYTES / 2).fsync().expect("sync");
    assert_eq!(volume.stats().writeback_rests, 0);
}

/// The log writes frames because its queue grows long. That is no foreground I/O, for which writeback would make itself small.
#[test]
fn a_stream_that_nobody_syncs_does_not_make_way_for_its_own_frames() {
    let volume = open(&formatted(256 * MIB, 0), threads(32 * MIB));
    let began = std::time::Instant::now();
    let mut names = 0;
    while volume.stats().log.frames == 0 {
        assert!(began.elapsed().as_secs() < 60, "{names} files, and no frame");
        create(&volume, &format!("/{names}"));
        names += 1;
    }
    let stream = write_large(&volume, LARGE_BYTES / 2);
    let stats = volume.stats();
    assert!(stats.dirty_pages < LARGE_BYTES / 2 / 4096, "48 MiB are more than may be dirty");
    assert_eq!(stats.log.frames_awaited, 0);
    let limit_bytes = stats.pacing.limit_bytes;
    assert!(limit_bytes >= 16 * MIB, "{limit_bytes} of writeback in flight");
    stream.fsync().expect("sync");
    assert!(volume.stats().log.frames_awaited > 0);
}
