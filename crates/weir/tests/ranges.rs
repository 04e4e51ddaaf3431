//! Cuts, holes and allocations that fail: on the way, because of the disk, or because the volume has no room.

mod common;

use common::*;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use weir::device::Device;
use weir::device::memory::MemoryDevice;
use weir::*;

const PAGE: u64 = 4096;

/// The image of a volume with a file `/f`, made by `fill`.
fn image(size_bytes: u64, fill: impl Fn(&Volume, &File)) -> Vec<u8> {
    let device = Arc::new(MemoryDevice::new(size_bytes));
    let generic: Arc<dyn Device> = device.clone();
    format(&generic, 512);
    let volume = open(&generic, manual(16 * MIB));
    let file = create(&volume, "/f");
    fill(&volume, &file);
    drop(file);
    volume.close().expect("close");
    device.image()
}

/// The volume of `image`, and its file, with nothing in memory. The disk's read number `failing` from now on fails.
fn with_failing_read(image: &[u8], failing: i64) -> (Arc<Probe>, Volume, File) {
    let inner = Arc::new(MemoryDevice::from_image(image));
    let disk = Probe::new(inner);
    let device: Arc<dyn Device> = disk.clone();
    let volume = open(&device, manual(MIB));
    let file = volume.open_file("/f", OpenFlags::READ_WRITE).expect("open");
    disk.failing_read.store(failing, Ordering::Relaxed);
    (disk, volume, file)
}

/// 1,500 pages, each an extent of its own.
fn scattered(_: &Volume, file: &File) {
    for number in 0..1500 {
        file.write_at(number * 2 * PAGE, &[number as u8 | 1; PAGE as usize]).expect("write");
    }
}

#[test]
fn a_cut_is_done_or_not_whichever_read_fails_and_what_the_file_gains_afterwards_is_zeros() {
    let image = image(32 * MIB, scattered);
    let (size, cut_to) = (1499 * 2 * PAGE + PAGE, 100 * 2 * PAGE + 1000);
    let (mut refused, mut owed) = (0, 0);
    for failing in 1..200 {
        let (disk, volume, file) = with_failing_read(&image, failing);
        let cut = file.truncate(cut_to);
        let was_struck = disk.failing_read.swap(0, Ordering::Relaxed) <= 0;
        let mut page = [0xee; PAGE as usize];
        if cut.is_err() {
            refused += 1;
            assert_eq!(file.size(), size, "read {failing}");
            file.read_at(100 * 2 * PAGE, &mut page).expect("read");
            assert!(page == [101; PAGE as usize], "read {failing}: refused, and it is cut");
        } else {
            owed += u64::from(was_struck);
            assert_eq!(file.size(), cut_to);
            file.truncate(size).expect("grow");
            for number in [100, 101, 102, 700, 1499] {
                file.read_at(number * 2 * PAGE, &mut page).expect("read");
                let kept = if number == 100 { 1000 } else { 0 };
                assert!(page[..kept].iter().all(|&byte| byte == 101));
                assert!(page[kept..].iter().all(|&byte| byte == 0), "cut off, and there again");
            }
        }
        // In a crash too, and with nothing left over.
        volume.sync().expect("sync");
        let content = contents(&file);
        drop((file, volume));
        let device: Arc<dyn Device> = disk;
        let report = weir::check::check_device(&device, &weir::check::CheckOptions::default());
        let report = report.expect("check");
        assert!(report.is_clean(), "read {failing}: {:#?}", report.problems);
        let volume = open(&device, manual(MIB));
        let file = volume.open_file("/f", OpenFlags::READ).expect("open");
        assert!(contents(&file) == content, "read {failing}");
        if !was_struck {
            assert!(refused > 0 && owed > 0, "{refused} refused, {owed} done in part");
            return;
        }
    }
    panic!("a read failed each time");
}

#[test]
fn what_a_cut_has_left_behind_becomes_free_later() {
    let image = image(32 * MIB, scattered);
    for failing in 1..200 {
        let (disk, volume, file) = with_failing_read(&image, failing);
        let cut = file.truncate(0);
        let was_struck = disk.failing_read.swap(0, Ordering::Relaxed) <= 0;
        if !was_struck {
            return;
        }
        if cut.is_ok() {
            volume.background_step(BackgroundWork::Purge).expect("purge");
            volume.checkpoint().expect("checkpoint");
            assert_eq!(file.attr().expect("attributes").blocks, 0, "read {failing}");
        }
    }
    panic!("a read failed each time");
}

/// The cut has happened when the call has answered; what is left of it is nobody's change.
#[test]
fn what_a_cut_has_left_behind_goes_later_and_the_file_keeps_its_times() {
    let image = image(32 * MIB, scattered);
    let mut owed = 0;
    for failing in 1..200 {
        let disk = Probe::new(Arc::new(MemoryDevice::from_image(&image)));
        let device: Arc<dyn Device> = disk.clone();
        let open_at = |seconds| {
            let clock = HandClock::at(seconds);
            let options = VolumeOptions { clock: clock.clone(), ..manual(MIB) };
            (open(&device, options), clock)
        };
        let (volume, clock) = open_at(1000);
        let file = volume.open_file("/f", OpenFlags::READ_WRITE).expect("open");
        disk.failing_read.store(failing, Ordering::Relaxed);
        let cut = file.truncate(PAGE);
        let was_struck = disk.failing_read.swap(0, Ordering::Relaxed) <= 0;
        if !was_struck {
            assert!(owed > 0, "no cut was done in part");
            return;
        }
        if cut.is_err() {
            continue;
        }
        owed += 1;
        volume.sync().expect("sync");
        if failing % 2 == 0 {
            clock.advance_s(500);
            volume.background_step(BackgroundWork::Purge).expect("purge");
            let attr = file.attr().expect("attributes");
            assert_eq!((attr.blocks, attr.mtime.seconds, attr.ctime.seconds), (1, 1000, 1000));
            volume.sync().expect("sync");
        }
        drop((file, volume));
        let (volume, _) = open_at(3000);
        let attr = volume.metadata("/f").expect("attributes");
        assert_eq!((attr.blocks, attr.mtime.seconds, attr.ctime.seconds), (1, 1000, 1000));
    }
    panic!("a read failed each time");
}

#[test]
fn a_hole_of_many_extents_is_punched_or_not_whichever_read_fails() {
    let image = image(32 * MIB, scattered);
    let (mut refused, hole) = (0, 50 * PAGE + 100..1200 * 2 * PAGE);
    for failing in 1..200 {
        let (disk, volume, file) = with_failing_read(&image, failing);
        let before = {
            let device: Arc<dyn Device> = Arc::new(MemoryDevice::from_image(&image));
            contents(&open(&device, manual(MIB)).open_file("/f", OpenFlags::READ).expect("open"))
        };
        let punched = file.allocate(AllocateMode::PunchHole, hole.start, hole.end - hole.start);
        let was_struck = disk.failing_read.swap(0, Ordering::Relaxed) <= 0;
        let mut expected = before;
        match punched {
            Ok(()) => expected[hole.start as usize..hole.end as usize].fill(0),
            Err(_) => refused += 1,
        }
        assert!(contents(&file) == expected, "read {failing}: half a hole");
        volume.sync().expect("sync");
        drop((file, volume));
        let device: Arc<dyn Device> = disk;
        let volume = open(&device, manual(MIB));
        let file = volume.open_file("/f", OpenFlags::READ).expect("open");
        assert!(contents(&file) == expected, "read {failing}: half a hole after a crash");
        if !was_struck {
            assert!(refused > 0);
            return;
        }
    }
    panic!("a read failed each time");
}

/// More extents than an operation takes away, and more than a chain within a quarter of the log.
#[test]
fn holes_of_any_number_of_extents_are_punched() {
    for log_blocks in [64, 512] {
        let device = formatted(64 * MIB, log_blocks);
        let volume = open(&device, manual(8 * MIB));
        let file = create(&volume, "/f");
        for number in 0..4000_u64 {
            file.write_at(number * 2 * PAGE, &[number as u8 | 1; PAGE as usize]).expect("write");
        }
        volume.checkpoint().expect("checkpoint");
        let mut expected = contents(&file);
        for (first, end) in [(10, 20), (100, 1000), (1001 * PAGE, 3000 * PAGE), (5, 7999 * PAGE)] {
            file.allocate(AllocateMode::PunchHole, first, end - first).expect("punch");
            expected[first as usize..end as usize].fill(0);
            assert!(contents(&file) == expected);
        }
        volume.checkpoint().expect("checkpoint");
        assert_eq!(file.attr().expect("attributes").blocks, 1);
        drop((file, volume));
        let report = weir::check::check_device(&device, &weir::check::CheckOptions::default());
        let report = report.expect("check");
        assert!(report.is_clean(), "{:#?}", report.problems);
        let file = open(&device, manual(8 * MIB)).open_file("/f", OpenFlags::READ).expect("open");
        assert!(contents(&file) == expected);
    }
}

#[test]
fn an_allocation_that_fails_loses_no_blocks() {
    let image = image(256 * MIB, |volume, file| {
        for number in 0..200_u64 {
            file.write_at(number * 201 * PAGE, &vec![7; 200 * PAGE as usize]).expect("write");
            if number % 20 == 0 {
                volume.checkpoint().expect("checkpoint");
            }
        }
    });
    let mut refused = 0;
    for failing in (1..120).step_by(4) {
        let (disk, volume, file) = with_failing_read(&image, failing);
        let allocated = file.allocate(AllocateMode::KeepSize, 0, 200 * 201 * PAGE);
        disk.failing_read.store(0, Ordering::Relaxed);
        if allocated.is_ok() {
            break;
        }
        refused += 1;
        volume.checkpoint().and_then(|()| volume.checkpoint()).expect("checkpoint");
        let free_blocks = volume.statfs().free_blocks;
        drop((file, volume));
        let device: Arc<dyn Device> = disk;
        let found = open(&device, manual(MIB)).statfs().free_blocks;
        assert_eq!(free_blocks, found, "read {failing}");
    }
    assert!(refused > 0);
}

#[test]
fn a_collapse_that_is_refused_changes_nothing() {
    let device = formatted(32 * MIB, 64);
    let volume = open(&device, manual(MIB));
    let file = create(&volume, "/f");
    scattered(&volume, &file);
    scattered(&volume, &file);
    let before = contents(&file);
    let collapsed = file.allocate(AllocateMode::CollapseRange, 0, 2 * PAGE);
    assert!(matches!(collapsed, Err(Error::NotSupported(_))), "{collapsed:?}");
    assert!(contents(&file) == before, "refused, and the range is gone");
}

#[test]
fn a_collapse_gives_back_the_blocks_of_the_range() {
    let device = formatted(32 * MIB, 0);
    let volume = open(&device, manual(4 * MIB));
    let file = create(&volume, "/f");
    let old = pattern(3, 100 * PAGE as usize);
    file.write_at(0, &old).expect("write");
    volume.checkpoint().expect("checkpoint");
    // In the middle of an extent, at its start, and up to the last page.
    let mut expected = old;
    for (first, count) in [(10, 5), (0, 7), (20, 60)] {
        let (offset, length) = (first * PAGE, count * PAGE);
        file.allocate(AllocateMode::CollapseRange, offset, length).expect("collapse");
        expected.drain(offset as usize..(offset + length) as usize);
        assert!(contents(&file) == expected);
    }
    volume.sync().expect("sync");
    assert_eq!(file.attr().expect("attributes").blocks, 28);
    drop((file, volume));
    let report = weir::check::check_device(&device, &weir::check::CheckOptions::default());
    let report = report.expect("check");
    assert!(report.is_clean(), "{:#?}", report.problems);
    let file = open(&device, manual(4 * MIB)).open_file("/f", OpenFlags::READ).expect("open");
    assert!(contents(&file) == expected);
}

#[test]
fn zeroing_a_range_on_a_volume_without_room_is_refused_and_changes_nothing() {
    let volume = open(&formatted(32 * MIB, 512), manual(4 * MIB));
    let file = create(&volume, "/f");
    let half = volume.statfs().available_blocks / 2 * PAGE;
    let old = pattern(5, half as usize + (MIB as usize));
    file.write_at(0, &old).expect("write");
    volume.sync().expect("sync");
    for mode in [AllocateMode::ZeroRange, AllocateMode::ZeroRangeKeepSize] {
        assert_eq!(file.allocate(mode, 0, old.len() as u64), Err(Error::NoSpace));
        assert_eq!(file.allocate(mode, 100, 1 << 40), Err(Error::NoSpace));
        assert!(contents(&file) == old, "refused, and it is gone");
    }
    // Of what there is room for, it is done.
    file.allocate(AllocateMode::ZeroRange, 100, MIB).expect("zero");
    let mut expected = old;
    expected[100..100 + MIB as usize].fill(0);
    assert!(contents(&file) == expected);
}

#[test]
fn an_allocation_that_a_volume_has_no_room_for_takes_none() {
    let volume = open(&formatted(32 * MIB, 512), manual(4 * MIB));
    let file = create(&volume, "/f");
    volume.sync().expect("sync");
    let available = volume.statfs().available_blocks;
    for mode in [AllocateMode::Extend, AllocateMode::KeepSize] {
        assert_eq!(file.allocate(mode, 0, 1 << 40), Err(Error::NoSpace));
        assert_eq!(file.allocate(mode, 0, (available + 1) * PAGE), Err(Error::NoSpace));
        assert_eq!((file.size(), file.attr().expect("attributes").blocks), (0, 0));
    }
    assert_eq!(volume.statfs().available_blocks, available);
    // Nearly all of it can be had.
    file.allocate(AllocateMode::Extend, 0, available * 9 / 10 * PAGE).expect("allocate");
}

#[test]
fn a_write_of_all_says_when_a_part_was_left() {
    let volume = open(&formatted(32 * MIB, 512), manual(4 * MIB));
    let file = create(&volume, "/f");
    file.write_all_at(100, &pattern(1, 300_000)).expect("write");
    assert!(contents(&file)[100..] == pattern(1, 300_000));
    let much = vec![7; (volume.statfs().available_blocks * PAGE) as usize + (4 << 20)];
    assert_eq!(file.write_all_at(0, &much), Err(Error::NoSpace));
    assert!(file.size() > 1 << 20, "a part was written");
    let reader = volume.open_file("/f", OpenFlags::READ).expect("open");
    assert_eq!(reader.write_all_at(0, b"x"), Err(Error::NotWritable));
}

/// A hole that ends in the midst of a page has that page, and the one that it begins in, dirty before it is punched. The first has gone home when
/// the second was read: then it is dirty anew, and so much has to be promised, and counted, once more.
#[test]
fn a_page_that_goes_home_while_a_hole_waits_for_another_is_counted_again() {
    let image = image(32 * MIB, |volume, file| {
        file.write_at(0, &pattern(1, 8 * PAGE as usize)).expect("write");
        volume.sync().expect("sync");
        while volume.background_step(BackgroundWork::Writeback).expect("writeback") {}
    });
    let disk = Probe::new(Arc::new(MemoryDevice::from_image(&image)));
    let device: Arc<dyn Device> = disk.clone();
    let volume = open(&device, manual(16 * MIB));
    let file = volume.open_file("/f", OpenFlags::CREATE).expect("open");
    let mut page = vec![0; PAGE as usize];
    file.read_at(2 * PAGE, &mut page).expect("read");
    let free_blocks = volume.statfs().available_blocks;
    let other = volume.clone();
    disk.amid_next_page_read(move || {
        assert!(other.background_step(BackgroundWork::Writeback).expect("writeback"));
    });
    file.allocate(AllocateMode::PunchHole, 2 * PAGE + 100, PAGE).expect("punch");
    assert!(disk.has_happened(), "nothing went home meanwhile");
    volume.sync().expect("sync");
    while volume.background_step(BackgroundWork::Writeback).expect("writeback") {}
    volume.checkpoint().expect("checkpoint");
    assert_eq!(volume.statfs().available_blocks, free_blocks, "nothing is promised any more");
    let mut expected = pattern(1, 8 * PAGE as usize);
    expected[2 * PAGE as usize + 100..3 * PAGE as usize + 100].fill(0);
    assert!(contents(&file) == expected);
    volume.close().expect("close");
}
