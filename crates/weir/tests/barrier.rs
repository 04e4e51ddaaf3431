//! Barriers: everything before is durable before anything after, and the call waits for neither.

mod common;

use common::volatile::Volatile;
use common::*;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use weir::check::{CheckOptions, check_device};
use weir::device::Device;
use weir::*;

fn dirty(file: &File, seed: u64, offset: u64, length: usize) {
    assert_eq!(file.write_at(offset, &pattern(seed, length)), Ok(length));
}

/// `f` holds `pattern(seed)` of this length at its start.
fn holds(file: &File, seed: u64, length: usize) -> bool {
    let wanted = pattern(seed, length);
    let mut bytes = vec![0; length];
    file.read_at(0, &mut bytes) == Ok(length) && bytes == wanted
}

#[test]
fn a_small_barrier_is_a_point_in_the_log_and_does_no_io() {
    let device = Volatile::new(16 * MIB);
    let dynamic: Arc<dyn Device> = device.clone();
    format(&dynamic, 0);
    let volume = open(&dynamic, manual(8 * MIB));
    let file = create(&volume, "/a");
    dirty(&file, 1, 0, 20_000);
    let writes = device.writes.load(Ordering::Relaxed);
    let lsn = volume.barrier().expect("barrier");
    assert_eq!(device.writes.load(Ordering::Relaxed), writes);
    assert_eq!((lsn, file.last_lsn()), (volume.last_lsn(), lsn));
    assert!(volume.durable_lsn() < lsn);
    assert_eq!(volume.barrier(), Ok(lsn), "nothing happened in between");
    // Later namespace operations drag the data along.
    let other = create(&volume, "/b");
    other.fsync().expect("fsync");
    assert!(volume.durable_lsn() >= lsn);
    drop(volume);
    let volume = open(&device.after_crash(1), threads(8 * MIB));
    assert!(holds(&volume.open_file("/a", OpenFlags::READ).expect("open"), 1, 20_000));
}

/// Large and small data, a barrier, then operations that become durable on their own; a crash after each step.
#[test]
fn what_comes_after_a_barrier_is_never_there_without_what_came_before() {
    let (mut with, mut without) = (0, 0);
    for seed in 0..40 {
        let device = Volatile::new(16 * MIB);
        let dynamic: Arc<dyn Device> = device.clone();
        format(&dynamic, 0);
        let volume = open(&dynamic, manual(8 * MIB));
        let large = create(&volume, "/large");
        let small = create(&volume, "/small");
        volume.sync().expect("sync");
        let length = 300_000 + (seed as usize % 7) * 100_000;
        dirty(&large, seed, 0, length);
        dirty(&small, seed, 0, 5000);
        let writes = device.writes.load(Ordering::Relaxed);
        let lsn = volume.barrier().expect("barrier");
        assert_eq!(
            device.writes.load(Ordering::Relaxed),
            writes,
            "a barrier writes nothing itself"
        );
        create(&volume, "/after");
        if seed % 3 == 0 {
            // Written again after the barrier, at the end: travels along.
            dirty(&large, seed + 1000, length as u64, 5000);
        }
        let mut check = |name: &str| {
            let volume = open(&device.after_crash(seed), threads(8 * MIB));
            if volume.metadata("/after").is_err() {
                without += 1;
                return;
            }
            with += 1;
            for (path, length) in [("/large", length), ("/small", 5000)] {
                let file = volume.open_file(path, OpenFlags::READ).expect("open");
                assert!(holds(&file, seed, length), "seed {seed}, {name}: {path}");
            }
        };
        check("at once");
        match seed % 5 {
            0 => assert!(volume.background_step(BackgroundWork::Log).expect("step")),
            1 => while volume.background_step(BackgroundWork::Writeback).expect("step") {},
            2 => while volume.background_step(BackgroundWork::Checkpoint).expect("step") {},
            3 => {
                let ticket = volume.sync_async().expect("submit");
                while volume.background_step(BackgroundWork::Log).expect("step") {
                    check("ticket");
                }
                ticket.wait().expect("durable");
            }
            _ => {}
        }
        check("after background work");
        volume.fsync_dir(Volume::ROOT).expect("fsync");
        assert!(volume.durable_lsn() >= lsn);
        check("after fsync");
        assert_eq!(volume.metadata("/after").map(|attr| attr.links), Ok(1));
    }
    assert!(with >= 40 && without >= 40, "{with} {without}");
}

/// The number of a barrier whose data is not home yet is the next operation's, and can be waited for before there is one.
#[test]
fn the_number_of_a_barrier_can_be_waited_for_before_anything_came_after_it() {
    let device = Volatile::new(16 * MIB);
    let dynamic: Arc<dyn Device> = device.clone();
    format(&dynamic, 0);
    let volume = open(&dynamic, manual(8 * MIB));
    let file = create(&volume, "/f");
    volume.sync().expect("sync");
    dirty(&file, 1, 0, 2_000_000);
    let lsn = volume.barrier().expect("barrier");
    assert!(lsn > volume.last_lsn(), "it is nobody's yet");
    assert_eq!(volume.last_given_out(), lsn);
    assert!(matches!(volume.ticket_for(lsn + 1), Err(Error::Invalid(_))));
    let ticket = volume.ticket_for(lsn).expect("a ticket");
    assert_eq!(ticket.poll(), None, "nothing was written yet");
    while ticket.poll().is_none() {
        assert!(volume.background_step(BackgroundWork::Log).expect("step"));
        if ticket.poll().is_some() {
            assert!(volume.durable_lsn() >= lsn, "acknowledged too early");
        }
    }
    assert_eq!((ticket.poll(), volume.last_given_out()), (Some(Ok(())), volume.last_lsn()));
    let after = open(&device.after_crash(1), threads(8 * MIB));
    assert!(holds(&after.open_file("/f", OpenFlags::READ).expect("open"), 1, 2_000_000));
}

#[test]
fn a_barrier_of_a_file_leaves_other_files_alone() {
    let device = Volatile::new(16 * MIB);
    let dynamic: Arc<dyn Device> = device.clone();
    format(&dynamic, 0);
    let volume = open(&dynamic, manual(8 * MIB));
    let (first, second) = (create(&volume, "/first"), create(&volume, "/second"));
    volume.sync().expect("sync");
    dirty(&first, 1, 0, 500_000);
    dirty(&second, 2, 0, 500_000);
    let dirty_before = volume.stats().dirty_pages;
    first.barrier().expect("barrier");
    create(&volume, "/after");
    volume.fsync_dir(Volume::ROOT).expect("fsync");
    assert_eq!(volume.stats().dirty_pages, dirty_before - 500_000_u64.div_ceil(4096));
    let after = open(&device.after_crash(1), threads(8 * MIB));
    assert!(holds(&after.open_file("/first", OpenFlags::READ).expect("open"), 1, 500_000));
    assert_eq!(after.metadata("/second").expect("attr").size_bytes, 0);
}

#[test]
fn the_size_before_a_barrier_counts_even_if_it_ends_in_a_hole() {
    let device = Volatile::new(16 * MIB);
    let dynamic: Arc<dyn Device> = device.clone();
    format(&dynamic, 0);
    let volume = open(&dynamic, manual(8 * MIB));
    let file = create(&volume, "/f");
    dirty(&file, 1, 0, 1_000_000);
    file.allocate(AllocateMode::PunchHole, 500_000, 500_000).expect("punch");
    file.barrier().expect("barrier");
    create(&volume, "/after");
    volume.fsync_dir(Volume::ROOT).expect("fsync");
    let after = open(&device.after_crash(1), threads(8 * MIB));
    assert_eq!(after.metadata("/f").expect("attr").size_bytes, 1_000_000);
}

#[test]
fn barriers_overlap_without_end_and_the_log_never_fills_for_good() {
    with_watchdog(120, || {
        for log_blocks in [64, 0] {
            let device = formatted(64 * MIB, log_blocks);
            let volume = open(&device, threads(4 * MIB));
            let workers: Vec<_> = (0..3)
                .map(|number| {
                    let volume = volume.clone();
                    std::thread::spawn(move || {
                        let file = create(&volume, &format!("/w{number}"));
                        for round in 0..120_u64 {
                            dirty(&file, round, (round % 9) * 150_000, 150_000 + round as usize);
                            match (round + number) % 5 {
                                0 => drop(volume.barrier().expect("barrier")),
                                1 => drop(file.barrier().expect("barrier")),
                                2 => file.fsync().expect("fsync"),
                                3 => drop(create(&volume, &format!("/n{number}-{round}"))),
                                _ => drop(volume.sync_async().expect("submit")),
                            }
                        }
                    })
                })
                .collect();
            for worker in workers {
                worker.join().expect("worker");
            }
            let lsn = volume.barrier().expect("barrier");
            volume.sync().expect("sync");
            assert!(volume.durable_lsn() >= lsn);
            volume.close().expect("close");
            let report = check_device(&device, &CheckOptions::default()).expect("check");
            assert!(report.is_clean(), "{report:?}");
        }
    });
}

#[test]
fn a_barrier_whose_data_cannot_be_written_shuts_the_volume_down() {
    let probe = Probe::new(formatted(64 * MIB, 0));
    let device: Arc<dyn Device> = probe.clone();
    let volume = open(&device, manual(8 * MIB));
    let file = create(&volume, "/f");
    volume.sync().expect("sync");
    dirty(&file, 1, 0, 500_000);
    probe.fail_data_writes.store(true, Ordering::Relaxed);
    volume.barrier().expect("submitted");
    create(&volume, "/after");
    let lsn = volume.last_lsn();
    assert!(matches!(volume.fsync_dir(Volume::ROOT), Err(Error::Shutdown(_))));
    assert!(volume.durable_lsn() < lsn);
    assert!(volume.shutdown_reason().is_some_and(|reason| reason.contains("barrier")));
    assert!(holds(&file, 1, 500_000), "still readable");
    drop((file, volume));
    probe.fail_data_writes.store(false, Ordering::Relaxed);
    let volume = open(&device, threads(8 * MIB));
    assert!(matches!(volume.metadata("/after"), Err(Error::NotFound)));
}

#[test]
fn data_before_a_barrier_is_written_elsewhere_when_a_write_fails() {
    let probe = Probe::new(formatted(64 * MIB, 0));
    let device: Arc<dyn Device> = probe.clone();
    let volume = open(&device, manual(8 * MIB));
    let file = create(&volume, "/f");
    volume.sync().expect("sync");
    dirty(&file, 1, 0, 500_000);
    probe.fail_data_writes.store(true, Ordering::Relaxed);
    // Somebody else's writeback fails, once.
    assert!(volume.background_step(BackgroundWork::Writeback).is_err());
    probe.fail_data_writes.store(false, Ordering::Relaxed);
    let lsn = volume.barrier().expect("barrier");
    create(&volume, "/after");
    volume.fsync_dir(Volume::ROOT).expect("fsync");
    assert!(volume.durable_lsn() >= lsn);
    drop((file, volume));
    let volume = open(&device, threads(8 * MIB));
    assert!(holds(&volume.open_file("/f", OpenFlags::READ).expect("open"), 1, 500_000));
}

/// Nobody waits for log space that no checkpoint can release: what a small log keeps, and what its end may waste, is much of it.
#[test]
fn floods_of_barriers_batches_and_tickets_end_in_the_smallest_logs() {
    const ROUNDS: u64 = 150;
    for log_blocks in [64, 128, 256, 1024] {
        let volume = open(&formatted(64 * MIB, log_blocks), threads(16 * MIB));
        let flood = |number: u64| {
            let file = create(&volume, &format!("/f{number}"));
            let mut random = Random::seeded(number + 1);
            for round in 0..ROUNDS {
                for _ in 0..random.below(120) {
                    dirty(&file, round, 8192 * random.below(500), 4096);
                }
                match (number + round) % 3 {
                    0 => drop(file.barrier().expect("barrier")),
                    1 => drop(file.fsync_async(0..u64::MAX, SyncKind::Full).expect("ticket")),
                    _ => {
                        let mut batch = volume.batch();
                        batch
                            .write_at(&file, 8192 * random.below(500), &vec![7; 20_000])
                            .expect("stage");
                        batch.commit_relaxed().expect("commit");
                    }
                }
            }
        };
        with_watchdog(120, || {
            std::thread::scope(|scope| {
                for number in 0..3 {
                    let flood = &flood;
                    scope.spawn(move || flood(number));
                }
            });
            volume.sync().expect("sync");
        });
        volume.close().expect("close");
    }
}

/// Ranges that move may take what is kept for checkpoints of the log. As long as a barrier has data to send home, that is the barrier's:
/// pages that cut long extents take more than could be known when it was raised.
#[test]
fn ranges_that_move_leave_a_barrier_its_room_in_the_log() {
    const EXTENTS: u64 = 20;
    let volume = open(&formatted(64 * MIB, 64), manual(8 * MIB));
    let moving = create(&volume, "/moving");
    for page in 0..EXTENTS {
        dirty(&moving, page, page * 8192, 4096);
    }
    let file = create(&volume, "/file");
    for extent in 0..EXTENTS {
        dirty(&file, extent, extent * MIB, MIB as usize);
    }
    volume.checkpoint().expect("checkpoint");
    for extent in 0..EXTENTS {
        dirty(&file, 100 + extent, extent * MIB + MIB / 2, 4096);
    }
    let lsn = volume.barrier().expect("barrier");
    assert!(lsn > volume.last_lsn(), "its data is not home");
    for number in 0..200 {
        let moved = moving.allocate(AllocateMode::InsertRange, 4096, 4096);
        assert_eq!(moved, Ok(()), "number {number}");
    }
    volume.sync().expect("sync");
    assert!(volume.durable_lsn() >= lsn);
    for extent in 0..EXTENTS {
        let mut bytes = [0; 4096];
        file.read_at(extent * MIB + MIB / 2, &mut bytes).expect("read");
        assert!(bytes[..] == pattern(100 + extent, 4096)[..]);
    }
    volume.close().expect("close");
}

/// Each page lies in the middle of a long extent, which is cut by it: barriers take several times the room in the log that they were let in
/// with.
#[test]
fn barriers_whose_pages_cut_long_extents_end_in_the_smallest_log() {
    const EXTENTS: u64 = 40;
    const FILES: u64 = 6;
    let volume = open(&formatted(512 * MIB, 64), manual(16 * MIB));
    let files: Vec<File> =
        (0..FILES).map(|number| create(&volume, &format!("/f{number}"))).collect();
    for file in &files {
        for extent in 0..EXTENTS {
            dirty(file, extent, extent * MIB, MIB as usize);
        }
    }
    volume.checkpoint().expect("checkpoint");
    let page_at = |extent: u64| extent * MIB + MIB / 2;
    let mut lsn = 0;
    for file in &files {
        for extent in 0..EXTENTS {
            dirty(file, 1000 + extent, page_at(extent), 4096);
        }
        lsn = file.barrier().expect("barrier");
    }
    assert_eq!(volume.sync(), Ok(()));
    assert!(volume.durable_lsn() >= lsn);
    for (file, extent) in
        files.iter().flat_map(|file| (0..EXTENTS).map(move |extent| (file, extent)))
    {
        let mut bytes = [0; 4096];
        file.read_at(page_at(extent), &mut bytes).expect("read");
        assert!(bytes[..] == pattern(1000 + extent, 4096)[..]);
    }
    volume.close().expect("close");
}

/// No two free blocks lie side by side: each page is placed apart, and barriers take several times the room in the log that they were let in
/// with.
#[test]
fn barriers_whose_pages_are_placed_apart_end_in_the_smallest_log() {
    const PAGES: u64 = 120;
    const FILES: u64 = 16;
    let volume = open(&formatted(64 * MIB, 64), manual(16 * MIB));
    let files: Vec<File> =
        (0..FILES).map(|number| create(&volume, &format!("/f{number}"))).collect();
    let filler = create(&volume, "/filler");
    let mut length = 0;
    while filler.write_at(length, &[7; 4096]) == Ok(4096) {
        length += 4096;
    }
    volume.checkpoint().expect("checkpoint");
    for hole in 0..2 * FILES * PAGES {
        let punched = filler.allocate(AllocateMode::PunchHole, 2 * hole * 4096, 4096);
        assert_eq!(punched, Ok(()), "{hole}");
    }
    assert!(length > 4 * FILES * PAGES * 4096, "{length}");
    filler.truncate(length - 2 * MIB).expect("truncate");
    volume.checkpoint().expect("checkpoint");
    let mut lsn = 0;
    for file in &files {
        dirty(file, 1000, 0, (PAGES * 4096) as usize);
        lsn = file.barrier().expect("barrier");
    }
    assert_eq!(volume.sync(), Ok(()));
    assert!(volume.durable_lsn() >= lsn);
    for file in &files {
        assert!(holds(file, 1000, (PAGES * 4096) as usize));
    }
    volume.close().expect("close");
}

/// Who asked for more than a file does not know which it is.
#[test]
fn a_barrier_and_a_sync_of_the_volume_name_the_file_that_they_fail_for() {
    for raises_barrier in [true, false] {
        let probe = Probe::new(formatted(64 * MIB, 0));
        let device: Arc<dyn Device> = probe.clone();
        let volume = open(&device, manual(16 * MIB));
        let files = ["/a", "/bad", "/c"].map(|name| create(&volume, name));
        for (seed, file) in (1..).zip(&files) {
            dirty(file, seed, 0, 1 << 20);
        }
        probe.refuse_page(Some(pattern(2, 1 << 20)[..4096].to_vec()));
        if raises_barrier {
            volume.barrier().expect("it waits for nothing");
        }
        let told = volume.sync().expect_err("a page cannot be written").to_string();
        assert!(told.contains(&format!("(inode {})", files[1].ino())), "{told}");
    }
}
