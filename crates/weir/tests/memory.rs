//! Memory: the cap holds whatever is done, what is cached is served without the device, and what does not fit is still
//! read and written correctly.

mod common;

use common::*;
use std::sync::atomic::Ordering;
use weir::*;

/// Asserts that what is in memory now is within its shares. `slack_inodes`: those in use.
fn check(volume: &Volume, memory_bytes: u64, slack_inodes: u64) {
    let stats = volume.stats();
    assert!(stats.pages_in_use <= stats.pages_capacity);
    assert!(stats.pages_capacity * 4096 <= memory_bytes);
    assert!(stats.dirty_pages <= stats.pages_capacity);
    assert!(stats.nodes.bytes <= memory_bytes / 8 + (64 << 10), "{:?}", stats.nodes);
    // One operation may go beyond the limit; then all wait for the checkpoint.
    assert!(stats.delta_bytes <= (memory_bytes / 8).max(128 << 10) + (32 << 10));
    let limit = (memory_bytes / 16 / 1024).max(64) + 16;
    // Those with dirty pages stay until they are written: no more than there are pages.
    let pinned = stats.dirty_pages + slack_inodes;
    assert!(stats.inodes_in_memory <= limit + pinned + 32, "{} inodes", stats.inodes_in_memory);
}

#[test]
fn the_cap_holds_while_200_000_files_are_made() {
    let memory_bytes = 4 * MIB;
    let device = formatted(1 << 30, 0);
    let volume = open(&device, manual(memory_bytes));
    let dirs: Vec<u64> = (0..10)
        .map(|number| volume.create_dir(format!("/d{number}"), 0o755).expect("mkdir").ino)
        .collect();
    let new = NewInode::new(FileType::Regular, 0o644);
    for number in 0..200_000_u64 {
        let dir = dirs[(number % 10) as usize];
        let attr = volume.make(dir, format!("file {number}").as_bytes(), &new).expect("create");
        if number % 50 == 0 {
            let file = volume.open_inode(attr.ino, true).expect("open");
            file.write_at(0, &number.to_le_bytes()).expect("write");
        }
        if number % 1000 == 0 {
            check(&volume, memory_bytes, 0);
        }
    }
    check(&volume, memory_bytes, 0);
    assert_eq!(volume.statfs().inodes, 200_011);
    volume.close().expect("close");
    let volume = open(&device, manual(memory_bytes));
    for number in (0..200_000_u64).step_by(1550) {
        let path = format!("/d{}/file {number}", number % 10);
        let file = volume.open_file(path, OpenFlags::READ).expect("open");
        let expected = if number % 50 == 0 { number.to_le_bytes().to_vec() } else { Vec::new() };
        assert_eq!(contents(&file), expected);
    }
    check(&volume, memory_bytes, 0);
}

/// The same few items change again and again, and each time blocks are taken and freed.
#[test]
fn the_cap_holds_while_one_file_gets_other_blocks_all_the_time() {
    let memory_bytes = 2 * MIB;
    let volume = open(&formatted(1 << 30, 0), manual(memory_bytes));
    let file = create(&volume, "/f");
    for number in 0..60_000 {
        file.allocate(AllocateMode::Extend, 0, 4096).expect("allocate");
        file.allocate(AllocateMode::PunchHole, 0, 4096).expect("punch");
        if number % 100 == 0 {
            check(&volume, memory_bytes, 1);
        }
    }
    assert!(volume.stats().checkpoints > 0);
}

#[test]
fn reading_many_files_keeps_no_more_inodes_than_fit() {
    let memory_bytes = 2 * MIB;
    let device = formatted(256 * MIB, 0);
    let clock = HandClock::at(1000);
    let options = || VolumeOptions { clock: clock.clone(), ..manual(memory_bytes) };
    let volume = open(&device, options());
    for number in 0..5000_u64 {
        create(&volume, &format!("/{number}")).write_at(0, &[1; 100]).expect("write");
    }
    volume.checkpoint().expect("checkpoint");
    // Each read moves the access time, which is only logged later.
    clock.advance_s(100);
    for number in 0..5000_u64 {
        let file = volume.open_file(format!("/{number}"), OpenFlags::READ).expect("open");
        assert_eq!(contents(&file).len(), 100);
        drop(file);
        // What had dirty pages until the checkpoint leaves the table as others come.
        check(&volume, memory_bytes, if number < 64 { 64 } else { 0 });
    }
    volume.sync().expect("sync");
    drop(volume);
    let volume = open(&device, options());
    for number in (0..5000_u64).step_by(97) {
        let attr = volume.metadata(format!("/{number}")).expect("stat");
        assert_eq!(attr.atime.seconds, 1100);
    }
}

#[test]
fn a_file_of_100_times_the_cap_is_written_and_read() {
    let memory_bytes = MIB;
    let device = formatted(256 * MIB, 0);
    let volume = open(&device, manual(memory_bytes));
    let file = create(&volume, "/big");
    let part = 300_000;
    let count = 100 * MIB / part;
    for number in 0..count {
        file.write_at(number * part, &pattern(number, part as usize)).expect("write");
        check(&volume, memory_bytes, 1);
    }
    let mut read = vec![0; part as usize];
    for number in (0..count).rev() {
        assert_eq!(file.read_at(number * part, &mut read), Ok(part as usize));
        assert!(read == pattern(number, part as usize));
        check(&volume, memory_bytes, 1);
    }
    assert!(volume.stats().evicted_pages > 2 * 99 * MIB / 4096);
    volume.close().expect("close");
}

#[test]
fn the_smallest_cap_is_enough_for_every_operation() {
    let device = formatted(64 * MIB, 64);
    // Less than the least: that is what is used then.
    let volume = open(&device, manual(1));
    let file = create(&volume, "/f");
    let data = pattern(1, 3_000_000);
    file.write_at(1000, &data).expect("write");
    file.fsync().expect("fsync");
    let copy = create(&volume, "/copy");
    assert_eq!(file.copy_range(1000, &copy, 0, 3_000_000), Ok(3_000_000));
    file.allocate(AllocateMode::PunchHole, 5000, 1_000_000).expect("punch");
    file.allocate(AllocateMode::CollapseRange, 0, 4096).expect("collapse");
    assert!(contents(&copy) == data);
    for number in 0..500 {
        volume.create_dir(format!("/d{number}"), 0o700).expect("mkdir");
    }
    assert_eq!(names(&volume, "/").len(), 502);
    volume.close().expect("close");
}

#[test]
fn what_is_cached_is_served_without_the_device() {
    for options in [manual(32 * MIB), threads(32 * MIB)] {
        let probe = Probe::new(formatted(128 * MIB, 0));
        let volume = Volume::open_device(probe.clone(), options).expect("open");
        let file = create(&volume, "/f");
        let data = pattern(1, 4 << 20);
        file.write_at(0, &data).expect("write");
        let dir = volume.create_dir("/d", 0o755).expect("mkdir").ino;
        for number in 0..200 {
            let new = NewInode::new(FileType::Regular, 0o644);
            volume.make(dir, format!("{number}").as_bytes(), &new).expect("make");
        }
        let serve = || {
            assert!(contents(&file) == data);
            for number in 0..200 {
                volume.lookup(dir, format!("{number}").as_bytes()).expect("lookup");
            }
            assert_eq!(names(&volume, "/d").len(), 200);
        };
        serve();
        volume.checkpoint().expect("checkpoint");
        serve();
        let before = probe.reads.load(Ordering::Relaxed);
        for _ in 0..5 {
            serve();
            file.write_at(8192, &data[8192..20_000]).expect("write");
            file.fsync().expect("fsync");
        }
        assert_eq!(probe.reads.load(Ordering::Relaxed), before, "reads of the device");
        volume.close().expect("close");
    }
}

#[test]
fn a_hot_file_stays_cached_while_a_large_one_is_read_once() {
    let probe = Probe::new(formatted(128 * MIB, 0));
    let volume = Volume::open_device(probe.clone(), manual(8 * MIB)).expect("open");
    let hot = create(&volume, "/hot");
    let data = pattern(1, 1 << 20);
    hot.write_at(0, &data).expect("write");
    let cold = create(&volume, "/cold");
    for number in 0..60 {
        cold.write_at(number << 20, &pattern(number, 1 << 20)).expect("write");
    }
    volume.checkpoint().expect("checkpoint");
    for _ in 0..5 {
        assert!(contents(&hot) == data);
    }
    let mut buffer = vec![0; 1 << 20];
    for number in 0..60 {
        cold.read_at(number << 20, &mut buffer).expect("read");
        let mut piece = [0; 100];
        hot.read_at((number * 17_000) % 1_000_000, &mut piece).expect("read");
    }
    let before = probe.read_bytes.load(Ordering::Relaxed);
    assert!(contents(&hot) == data);
    let read = probe.read_bytes.load(Ordering::Relaxed) - before;
    assert!(read <= 512 << 10, "{read} bytes of the hot file had to be read again");
}

/// A volume whose log holds `pages` pages of one file that are not home, in `data`.
fn with_payload_in_the_log(pages: u64) -> (std::sync::Arc<dyn weir::device::Device>, Vec<u8>) {
    let device = formatted(512 * MIB, 16_384);
    let volume = open(&device, manual(128 * MIB));
    let file = create(&volume, "/f");
    let mut data = pattern(1, pages as usize * 4096);
    file.write_at(0, &data).expect("write");
    create(&volume, "/other").write_at(0, &pattern(2, 20 << 20)).expect("write");
    volume.checkpoint().expect("checkpoint");
    let fresh = pattern(3, data.len());
    for page in 0..pages as usize {
        let place = page * 4096..(page + 1) * 4096;
        file.write_at(place.start as u64, &fresh[place.clone()]).expect("write");
        if page % 16 == 15 {
            file.fsync().expect("fsync");
        }
        data[place.clone()].copy_from_slice(&fresh[place]);
    }
    file.fsync().expect("fsync");
    assert!(volume.stats().logged_pages >= pages / 2, "{}", volume.stats().logged_pages);
    (device, data)
}

#[test]
fn an_opening_for_reading_only_keeps_what_the_log_holds_within_the_cap_or_says_what_it_takes() {
    let (device, data) = with_payload_in_the_log(2000);
    let read_only = |memory_bytes| VolumeOptions { read_only: true, ..manual(memory_bytes) };
    let refused = Volume::open_device(device.clone(), read_only(4 * MIB)).map(drop);
    let error = refused.expect_err("8 MiB do not fit into 4");
    assert!(matches!(&error, Error::TooLittleMemory(text) if text.contains("8 MiB")), "{error}");
    assert_eq!(error.errno(), libc::ENOMEM);

    let probe = Probe::new(device.clone());
    let memory_bytes = 26 * MIB;
    let volume = Volume::open_device(probe.clone(), read_only(memory_bytes)).expect("open");
    // More than the rest of the cache holds, twice; and what is in the log is still there.
    let other = volume.open_file("/other", OpenFlags::READ).expect("open");
    for _ in 0..2 {
        assert!(contents(&other) == pattern(2, 20 << 20));
        let stats = volume.stats();
        assert!(stats.pages_in_use <= stats.pages_capacity);
        assert!(stats.pages_capacity * 4096 <= memory_bytes);
    }
    assert!(contents(&volume.open_file("/f", OpenFlags::READ).expect("open")) == data);
    volume.close().expect("close");
    assert_eq!(probe.writes.load(Ordering::Relaxed), 0, "it is open for reading only");
    drop(volume);

    // Who may write brings it home as it goes.
    let volume = open(&device, manual(4 * MIB));
    assert!(contents(&volume.open_file("/f", OpenFlags::READ).expect("open")) == data);
    check(&volume, 4 * MIB, 1);
    volume.close().expect("close");
}

#[test]
fn a_log_with_more_changes_than_the_memory_holds_is_refused_in_one_sentence() {
    let device = formatted(256 * MIB, 4096);
    {
        let volume = open(&device, manual(64 * MIB));
        let new = NewInode::new(FileType::Regular, 0o644);
        for number in 0..8000 {
            volume.make(Volume::ROOT, format!("file {number}").as_bytes(), &new).expect("make");
        }
        volume.sync().expect("sync");
        assert_eq!(volume.stats().checkpoints, 0);
        assert!(volume.stats().delta_bytes > MIB, "{}", volume.stats().delta_bytes);
    }
    for read_only in [false, true] {
        let options = |memory_bytes| VolumeOptions { read_only, ..manual(memory_bytes) };
        let refused = Volume::open_device(device.clone(), options(512 << 10)).map(drop);
        assert!(matches!(refused, Err(Error::TooLittleMemory(_))), "{refused:?}");
    }
    // Nothing was lost by the attempts.
    let volume = open(&device, manual(8 * MIB));
    assert_eq!(volume.statfs().inodes, 8001);
    volume.close().expect("close");
}
