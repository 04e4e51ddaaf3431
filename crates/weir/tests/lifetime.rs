//! How long a volume is open, and what becomes of those who wait for it at the end.

mod common;

use common::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;
use weir::check::{CheckOptions, check_device};
use weir::device::{Device, DeviceInfo, DeviceResult, IoClass, OnDone, Request};
use weir::format::geometry::Geometry;
use weir::*;

const SECONDS: Duration = Duration::from_secs(20);

/// Whether the ticket has ended, or does so soon.
fn ends(ticket: &SyncTicket) -> bool {
    ticket.wait_timeout(20_000_000).is_some()
}

#[test]
fn a_ticket_ends_when_the_volume_is_closed() {
    let volume = open(&formatted(64 * MIB, 0), manual(16 * MIB));
    let file = create(&volume, "/f");
    file.write_at(0, &vec![1; 1 << 20]).expect("write");
    let ticket = file.fsync_async(0..u64::MAX, SyncKind::Full).expect("submit");
    let all = volume.sync_async().expect("submit");
    volume.close().expect("close");
    assert_eq!((ticket.poll(), all.poll()), (Some(Ok(())), Some(Ok(()))));
    let refused = file.fsync_async(0..1, SyncKind::Full).map(drop).expect_err("closed");
    assert!(matches!(refused, Error::Shutdown(_)), "{refused:?}");
    assert_eq!(refused.to_string(), "the volume was closed: open it again");
}

#[test]
fn a_ticket_ends_when_the_volume_is_dropped() {
    let volume = open(&formatted(64 * MIB, 0), manual(16 * MIB));
    let file = create(&volume, "/f");
    file.write_at(0, &vec![1; 1 << 20]).expect("write");
    let ticket = file.fsync_async(0..u64::MAX, SyncKind::Full).expect("submit");
    drop((file, volume));
    assert!(ends(&ticket), "never ends");
}

#[test]
fn a_ticket_of_a_file_that_outlives_its_volume_says_when_it_is_durable() {
    for length in [1 << 10, 1 << 20] {
        let device = formatted(64 * MIB, 0);
        let volume = open(&device, threads(16 * MIB));
        let file = create(&volume, "/f");
        drop(volume);
        file.write_at(0, &vec![1; length]).expect("write");
        let ticket = file.fsync_async(0..u64::MAX, SyncKind::Full).expect("submit");
        assert_eq!(ticket.wait_timeout(20_000_000), Some(Ok(())), "{length} bytes");
        drop(file);
        let volume = open(&device, manual(16 * MIB));
        assert_eq!(volume.metadata("/f").map(|attr| attr.size_bytes), Ok(length as u64));
    }
}

#[test]
fn a_batch_that_outlives_its_volume_is_committed() {
    let device = formatted(64 * MIB, 0);
    let volume = open(&device, threads(16 * MIB));
    let mut batch = volume.batch();
    let new = NewInode::new(FileType::Regular, 0o644);
    batch.create_file(Volume::ROOT, b"f", &new).expect("record");
    drop(volume);
    let ticket = batch.commit_async().expect("commit");
    assert!(ends(&ticket), "never ends");
}

#[test]
fn the_last_of_a_volume_may_be_dropped_in_a_callback() {
    for holds_file in [false, true] {
        let device = formatted(64 * MIB, 0);
        let volume = open(&device, threads(16 * MIB));
        let file = create(&volume, "/f");
        file.write_at(0, &[1; 100]).expect("write");
        let ticket = file.fsync_async(0..u64::MAX, SyncKind::Full).expect("submit");
        let (told, hears) = mpsc::channel();
        let held = holds_file.then_some(file);
        let weak = Arc::downgrade(&device);
        drop(device);
        ticket.on_completion(move |result| {
            drop((held, volume));
            told.send(result).expect("somebody listens");
        });
        assert_eq!(hears.recv_timeout(SECONDS), Ok(Ok(())));
        // The threads end, and with them whatever holds the device.
        for _ in 0..2000 {
            if weak.strong_count() == 0 {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(weak.strong_count(), 0);
    }
}

#[test]
fn a_callback_that_closes_its_volume_hears_that_it_cannot() {
    let volume = open(&formatted(64 * MIB, 0), threads(16 * MIB));
    let file = create(&volume, "/f");
    file.write_at(0, &[1; 100]).expect("write");
    let (told, hears) = mpsc::channel();
    let closing = volume.clone();
    let ticket = file.fsync_async(0..u64::MAX, SyncKind::Full).expect("submit");
    ticket.on_completion(move |_| told.send(closing.close()).expect("somebody listens"));
    let heard = hears.recv_timeout(SECONDS).expect("it ends");
    // Durable already when it was asked for, the callback is called by this thread.
    assert!(matches!(heard, Err(Error::Invalid(_)) | Ok(())), "{heard:?}");
    volume.close().expect("close");
}

#[test]
fn a_callback_amid_a_close_that_closes_the_volume_hears_that_it_cannot() {
    let volume = open(&formatted(64 * MIB, 0), manual(16 * MIB));
    let file = create(&volume, "/f");
    file.write_at(0, &[1; 100]).expect("write");
    let (told, hears) = mpsc::channel();
    let closing = volume.clone();
    let ticket = file.fsync_async(0..u64::MAX, SyncKind::Full).expect("submit");
    // Nobody else does what there is to do: the thread that closes calls it.
    ticket.on_completion(move |_| told.send(closing.close()).expect("somebody listens"));
    with_watchdog(20, move || volume.close()).expect("close");
    let heard = hears.try_recv().expect("it was called");
    assert!(matches!(heard, Err(Error::Invalid(_))), "{heard:?}");
}

#[test]
fn a_close_that_failed_leaves_the_volume_open_and_may_be_tried_again() {
    for options in [manual(16 * MIB), threads(16 * MIB)] {
        let probe = Probe::new(formatted(64 * MIB, 0));
        let device: Arc<dyn Device> = probe.clone();
        let volume = open(&device, options);
        let file = create(&volume, "/f");
        file.write_at(0, &vec![1; 1 << 20]).expect("write");
        probe.fail_data_writes.store(true, Ordering::Relaxed);
        assert!(volume.close().is_err());
        file.write_at(1 << 20, &[2; 100]).expect("it is open");
        probe.fail_data_writes.store(false, Ordering::Relaxed);
        volume.close().expect("close");
        volume.close().expect("it is closed");
        drop((file, volume));
        let volume = open(&device, manual(16 * MIB));
        assert_eq!(volume.metadata("/f").map(|attr| attr.size_bytes), Ok((1 << 20) + 100));
    }
}

#[test]
fn a_second_close_waits_for_the_first() {
    let probe = Probe::new(formatted(64 * MIB, 0));
    let device: Arc<dyn Device> = probe.clone();
    let volume = open(&device, threads(32 * MIB));
    let file = create(&volume, "/f");
    file.write_at(0, &vec![1; 4 << 20]).expect("write");
    let second = Arc::new(Mutex::new(None));
    let (closing, started) = (volume.clone(), second.clone());
    probe.amid_next_data_write(move || {
        let closes = move || closing.close().map(|()| closing.shutdown_reason());
        *started.lock().expect("lock") = Some(std::thread::spawn(closes));
    });
    volume.close().expect("close");
    let second = second.lock().expect("lock").take().expect("somebody else closes");
    let reason = second.join().expect("no panic").expect("close");
    assert!(reason.is_some(), "closed, and nothing is durable");
}

/// Somebody else goes on amid any of the superblocks that a close writes: what was acknowledged to him is there, and the volume is in order.
#[test]
fn a_volume_that_is_closed_while_others_sync_is_in_order() {
    let mut happened = 0;
    let blocks = [0, 1].map(Geometry::superblock_block);
    let times = |block| (0..4).map(move |writes| (block, writes));
    for (block, writes) in blocks.into_iter().flat_map(times) {
        let probe = Probe::new(formatted(16 * MIB, 0));
        let device: Arc<dyn Device> = probe.clone();
        let volume = open(&device, manual(4 * MIB));
        let file = create(&volume, "/f");
        let acknowledged = Arc::new(AtomicBool::new(false));
        let is_acknowledged = acknowledged.clone();
        probe.amid_write_of(block, writes, move || {
            let synced = file.write_at(0, &pattern(1, 5000)).and_then(|_| file.fsync());
            acknowledged.store(synced.is_ok(), Ordering::Relaxed);
        });
        volume.close().expect("close");
        drop(volume);
        happened += u32::from(probe.has_happened());
        let report = check_device(&device, &CheckOptions::default()).expect("check");
        let problems = report.problems;
        assert!(problems.is_empty(), "amid write {writes} of block {block}: {problems:?}");
        let volume = open(&device, manual(4 * MIB));
        let file = volume.open_file("/f", OpenFlags::READ).expect("open");
        if is_acknowledged.load(Ordering::Relaxed) {
            assert!(contents(&file) == pattern(1, 5000), "amid write {writes} of block {block}");
        }
    }
    assert!(happened >= 2, "{happened}");
}

/// Submitted requests take their time: until the flag is set, but not for ever.
struct Slow(Arc<dyn Device>, Arc<AtomicBool>);

impl Device for Slow {
    fn info(&self) -> DeviceInfo {
        self.0.info()
    }
    fn read(&self, offset: u64, buffers: &mut [&mut [u8]], class: IoClass) -> DeviceResult<()> {
        self.0.read(offset, buffers, class)
    }
    fn write(&self, offset: u64, buffers: &[&[u8]], class: IoClass, fua: bool) -> DeviceResult<()> {
        self.0.write(offset, buffers, class, fua)
    }
    fn flush(&self) -> DeviceResult<()> {
        self.0.flush()
    }
    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> DeviceResult<()> {
        self.0.discard(offset_bytes, length_bytes)
    }
    fn submit(&self, request: Request, on_done: OnDone) {
        let (inner, hurry) = (self.0.clone(), self.1.clone());
        std::thread::spawn(move || {
            for _ in 0..100 {
                if hurry.load(Ordering::Acquire) {
                    break;
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            inner.submit(request, on_done);
        });
    }
}

#[test]
fn read_ahead_does_not_keep_a_device_open_that_nobody_uses_any_more() {
    let inner = formatted(64 * MIB, 0);
    let volume = open(&inner, threads(16 * MIB));
    create(&volume, "/f").write_at(0, &pattern(1, 1 << 20)).expect("write");
    volume.close().expect("close");
    drop(volume);
    for closes in [true, false] {
        let is_gone = Arc::new(AtomicBool::new(false));
        let device: Arc<dyn Device> = Arc::new(Slow(inner.clone(), is_gone.clone()));
        let volume = open(&device, threads(16 * MIB));
        let file = volume.open_file("/f", OpenFlags::READ).expect("open");
        file.read_at(0, &mut [0; 4096]).expect("read");
        if closes {
            volume.close().expect("close");
        }
        drop((file, volume));
        assert_eq!(Arc::strong_count(&device), 1, "the next opening finds it in use");
        is_gone.store(true, Ordering::Release);
    }
}
