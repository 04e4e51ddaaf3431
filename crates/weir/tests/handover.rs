//! `sync_range` and `expire`: writeback on request, in good batches, within bounds, without promises it does not make.

mod common;

use common::*;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use weir::device::memory::MemoryDevice;
use weir::device::{Device, DeviceInfo, DeviceResult, IoClass, OnDone, Request};
use weir::*;

const PAGE: u64 = 4096;

/// Counts writes of data, blocking and submitted.
struct Counting {
    inner: MemoryDevice,
    data_writes: AtomicU64,
    data_bytes: AtomicU64,
    flushes: AtomicU64,
}

impl Counting {
    fn new(size_bytes: u64) -> Arc<Self> {
        let device = Arc::new(Self {
            inner: MemoryDevice::new(size_bytes),
            data_writes: AtomicU64::new(0),
            data_bytes: AtomicU64::new(0),
            flushes: AtomicU64::new(0),
        });
        let volume: Arc<dyn Device> = device.clone();
        format(&volume, 0);
        device
    }
    fn figures(&self) -> (u64, u64) {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (read(&self.data_writes), read(&self.data_bytes))
    }
}

impl Device for Counting {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { volatile_cache: true, fua: false, ..self.inner.info() }
    }
    fn read(&self, offset: u64, buffers: &mut [&mut [u8]], class: IoClass) -> DeviceResult<()> {
        self.inner.read(offset, buffers, class)
    }
    fn write(&self, offset: u64, buffers: &[&[u8]], class: IoClass, fua: bool) -> DeviceResult<()> {
        if matches!(class, IoClass::Writeback | IoClass::SyncWrite) {
            let bytes: usize = buffers.iter().map(|buffer| buffer.len()).sum();
            self.data_writes.fetch_add(1, Ordering::Relaxed);
            self.data_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        self.inner.write(offset, buffers, class, fua)
    }
    fn flush(&self) -> DeviceResult<()> {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        self.inner.flush()
    }
    fn discard(&self, offset: u64, length: u64) -> DeviceResult<()> {
        self.inner.discard(offset, length)
    }
    fn submit(&self, request: Request, on_done: OnDone) {
        self.inner.submit(request, on_done);
    }
}

/// 8 KiB pieces in an order that is no order.
fn scattered(pieces: u64) -> Vec<u64> {
    (0..pieces).map(|number| number * 7919 % pieces * 2 * PAGE).collect()
}

#[test]
fn what_is_trickled_at_random_goes_home_in_large_requests() {
    let device = Counting::new(64 * MIB);
    let volume = Volume::open_device(device.clone(), manual(64 * MIB)).expect("open");
    let file = create(&volume, "/f");
    let pieces = 512;
    for offset in scattered(pieces) {
        file.write_at(offset, &pattern(offset, 8192)).expect("write");
        file.sync_range(offset..offset + 8192, SyncRangeFlags::WRITE).expect("sync_range");
    }
    assert_eq!(device.figures(), (0, 0), "nothing is written before a batch is asked for");
    assert_eq!(volume.stats().handover_pages, pieces * 2);
    let flushes = device.flushes.load(Ordering::Relaxed);
    assert!(volume.background_step(BackgroundWork::Writeback).expect("writeback"));
    let (writes, bytes) = device.figures();
    assert_eq!(bytes, pieces * 8192);
    assert!(writes <= 8, "{writes} writes for {pieces} pieces");
    assert_eq!(volume.stats().handover_pages, 0);
    assert_eq!(volume.stats().handed_over_pages, pieces * 2);
    assert_eq!(volume.stats().dirty_pages, 0);
    assert_eq!(device.flushes.load(Ordering::Relaxed), flushes, "no flush is implied");
    // A later fsync has the frame left.
    file.fsync().expect("fsync");
    assert_eq!(device.figures(), (writes, bytes));
    for offset in scattered(pieces) {
        let mut bytes = vec![0; 8192];
        file.read_at(offset, &mut bytes).expect("read");
        assert_eq!(bytes, pattern(offset, 8192));
    }
}

/// What was rewritten leaves holes of its size, and each would just take the next rewritten page.
#[test]
fn small_pieces_of_many_files_leave_in_large_requests_although_there_are_holes_for_each() {
    const FILES: u64 = 48;
    // As many as are packed side by side, and more, for which other places are looked for.
    const PAGES: std::ops::Range<u64> = 2..20;
    let device = Counting::new(128 * MIB);
    let volume = Volume::open_device(device.clone(), manual(32 * MIB)).expect("open");
    let files: Vec<File> =
        (0..FILES).map(|number| create(&volume, &format!("/f{number}"))).collect();
    let rewrite = |page: u64| {
        for (number, file) in (0..).zip(&files) {
            file.write_at(page * PAGE, &pattern(number + page, 4096)).expect("write");
            file.sync_range(page * PAGE..(page + 1) * PAGE, SyncRangeFlags::WRITE)
                .expect("hand over");
        }
        assert!(volume.background_step(BackgroundWork::Writeback).expect("writeback"));
    };
    for file in &files {
        file.write_at(0, &pattern(1, 32 * 4096)).expect("write");
        file.fsync().expect("fsync");
    }
    let mut writes = 0;
    for page in PAGES {
        let (before, _) = device.figures();
        rewrite(page);
        writes += device.figures().0 - before;
        while volume.background_step(BackgroundWork::Checkpoint).expect("checkpoint") {}
    }
    assert!(writes <= 4 * (PAGES.end - PAGES.start), "{writes} writes");
    volume.sync().expect("sync");
    for (number, file) in (0..).zip(&files) {
        let mut expected = pattern(1, 32 * 4096);
        for page in PAGES {
            let bytes = page as usize * 4096..(page as usize + 1) * 4096;
            expected[bytes].copy_from_slice(&pattern(number + page, 4096));
        }
        assert_eq!(contents(file), expected);
    }
}

#[test]
fn the_budget_refuses_or_waits_and_expire_never_does() {
    let device = Counting::new(64 * MIB);
    let volume = Volume::open_device(device.clone(), manual(8 * MIB)).expect("open");
    let file = create(&volume, "/f");
    let limit = volume.capabilities().handover_bytes;
    let nowait = SyncRangeFlags::WRITE | SyncRangeFlags::NOWAIT;
    let mut offset = 0;
    let refused_at = loop {
        file.write_at(offset, &[1; PAGE as usize]).expect("write");
        match file.sync_range(offset..offset + PAGE, nowait) {
            Ok(()) => offset += PAGE,
            Err(error) => break (offset, error),
        }
    };
    assert_eq!(refused_at, (limit, Error::WouldBlock));
    file.expire(offset..offset + PAGE).expect("expire is not refused");
    assert_eq!(device.figures().0, 0);
    // Without `nowait` room is made.
    file.write_at(offset + PAGE, &[2; PAGE as usize]).expect("write");
    file.sync_range(offset + PAGE..offset + 2 * PAGE, SyncRangeFlags::WRITE).expect("waits");
    assert_eq!(device.figures().1, limit + PAGE);
    assert_eq!(volume.stats().handover_pages, 1);
}

#[test]
fn waits_end_when_the_range_is_home_and_skip_what_is_not_asked_for() {
    for background in [BackgroundMode::Manual, BackgroundMode::Threads] {
        let device = Counting::new(64 * MIB);
        let options = VolumeOptions { background, ..manual(16 * MIB) };
        let volume = Volume::open_device(device.clone(), options).expect("open");
        let file = create(&volume, "/f");
        file.write_at(0, &pattern(1, 1 << 20)).expect("write");
        let all = SyncRangeFlags::WAIT_BEFORE | SyncRangeFlags::WRITE | SyncRangeFlags::WAIT_AFTER;
        // Half of it.
        file.sync_range(0..512 * KIB, all).expect("sync_range");
        assert_eq!(volume.stats().dirty_pages, 128, "{background:?}");
        // Waiting alone starts nothing.
        file.sync_range(0..u64::MAX, SyncRangeFlags::WAIT_BEFORE | SyncRangeFlags::WAIT_AFTER)
            .expect("wait");
        assert_eq!(volume.stats().dirty_pages, 128);
        file.sync_range(0..u64::MAX, all).expect("sync_range");
        assert_eq!(volume.stats().dirty_pages, 0);
        file.sync_range(0..u64::MAX, SyncRangeFlags::default()).expect("nothing");
        file.sync_range(5..5, all).expect("an empty range");
        assert_eq!(contents(&file), pattern(1, 1 << 20));
    }
}

#[test]
fn expired_ranges_go_home_by_themselves() {
    let device = Counting::new(64 * MIB);
    let volume = Volume::open_device(device.clone(), threads(16 * MIB)).expect("open");
    let file = create(&volume, "/f");
    file.write_at(0, &pattern(1, 1 << 20)).expect("write");
    file.expire(0..u64::MAX).expect("expire");
    // Pages are home before it is counted that they were handed over.
    with_watchdog(60, || {
        while volume.stats().dirty_pages > 0 || volume.stats().handover_pages > 0 {
            std::thread::yield_now();
        }
    });
}

#[test]
fn an_error_of_the_writing_is_reported_by_the_wait_and_the_data_stays() {
    let probe = Probe::new(formatted(32 * MIB, 0));
    let device: Arc<dyn Device> = probe.clone();
    let volume = open(&device, manual(8 * MIB));
    let file = create(&volume, "/f");
    file.write_at(0, &pattern(3, 256 << 10)).expect("write");
    let all = SyncRangeFlags::WRITE | SyncRangeFlags::WAIT_AFTER;
    probe.fail_data_writes.store(true, Ordering::Relaxed);
    assert!(matches!(file.sync_range(0..u64::MAX, all), Err(Error::Io(_))));
    assert_eq!(volume.stats().dirty_pages, 64);
    assert_eq!(contents(&file), pattern(3, 256 << 10));
    probe.fail_data_writes.store(false, Ordering::Relaxed);
    file.sync_range(0..u64::MAX, all).expect("a retry that succeeds is true");
    assert_eq!(volume.stats().dirty_pages, 0);
}

/// Random calls against a plain vector; nothing is lost or exposed, whatever is handed over when.
#[test]
fn random_ranges_change_nothing_that_a_reader_sees() {
    for seed in 1..12_u64 {
        let device = formatted(32 * MIB, if seed % 2 == 0 { 64 } else { 0 });
        let mut model: Vec<u8> = Vec::new();
        {
            let volume = open(&device, manual(2 * MIB));
            let file = create(&volume, "/f");
            let mut state = seed * 77;
            let mut next = |bound: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 33) % bound
            };
            for step in 0..400 {
                let (offset, length) = (next(1 << 20), next(60_000) + 1);
                match next(8) {
                    0..3 => {
                        let data = pattern(step, length as usize);
                        file.write_at(offset, &data).expect("write");
                        let end = (offset + length) as usize;
                        model.resize(model.len().max(end), 0);
                        model[offset as usize..end].copy_from_slice(&data);
                    }
                    3 => {
                        file.truncate(offset).expect("truncate");
                        model.resize(offset as usize, 0);
                    }
                    4 => file.expire(offset..offset + length).expect("expire"),
                    5 => {
                        let flags = SyncRangeFlags {
                            wait_before: next(2) == 0,
                            write: next(3) > 0,
                            wait_after: next(2) == 0,
                            nowait: next(2) == 0,
                        };
                        match file.sync_range(offset..offset + length, flags) {
                            Ok(()) | Err(Error::WouldBlock) => {}
                            Err(error) => panic!("{error}"),
                        }
                    }
                    6 => {
                        volume.background_step(BackgroundWork::Writeback).expect("writeback");
                    }
                    _ => file.fsync().expect("fsync"),
                }
                assert_eq!(file.size(), model.len() as u64);
            }
            assert_eq!(contents(&file), model);
            file.fsync().expect("fsync");
        }
        let volume = open(&device, manual(2 * MIB));
        let file = volume.open_file("/f", OpenFlags::READ).expect("open");
        assert_eq!(contents(&file), model, "seed {seed}");
    }
}

#[test]
fn a_submission_waits_for_a_free_ticket_where_it_is_told_to() {
    let device = formatted(32 * MIB, 0);
    let volume = open(&device, manual(8 * MIB));
    let file = create(&volume, "/f");
    file.write_at(0, &[1; 4096]).expect("write");
    let mut refused = 0;
    for _ in 0..volume.capabilities().max_tickets + 10 {
        // Dirty attributes, so that there is something to wait for.
        match file.fsync_async(0..u64::MAX, SyncKind::Full) {
            Ok(ticket) => drop(ticket),
            Err(Error::WouldBlock) => refused += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(refused, 10);
    let ticket =
        file.fsync_async_with(0..u64::MAX, SyncKind::Full, WhenFull::Wait).expect("room is made");
    while volume.background_step(BackgroundWork::Log).expect("log") {}
    ticket.wait().expect("durable");
}

#[test]
fn a_file_that_cannot_be_written_holds_up_no_other_that_was_handed_over() {
    one_bad_file_among_others(true);
}

#[test]
fn a_file_that_cannot_be_written_holds_up_no_other_that_is_too_much_in_memory() {
    one_bad_file_among_others(false);
}

fn one_bad_file_among_others(handed_over: bool) {
    const FILES: u8 = 8;
    const BAD: u8 = 3;
    let probe = Probe::new(Arc::new(MemoryDevice::new(64 * MIB)));
    let device: Arc<dyn Device> = probe.clone();
    format(&device, 0);
    // Rounds of less than a file has.
    let options = VolumeOptions { round_pages: Some(4), ..manual(64 * MIB) };
    let volume = Volume::open_device(device, options).expect("open");
    let seen = Arc::new(Mutex::new(std::collections::BTreeSet::new()));
    let writing = seen.clone();
    probe.refuse(move |_, begins| {
        let first = begins.first().copied().unwrap_or_default();
        if begins.iter().all(|byte| *byte == first) {
            writing.lock().expect("lock").insert(first);
        }
        begins.starts_with(&[BAD; 4096])
    });
    let files: Vec<File> = (1..=FILES).map(|n| create(&volume, &format!("/f{n}"))).collect();
    for (number, file) in (1..).zip(&files) {
        file.write_at(0, &vec![number; 64 * 4096]).expect("write");
        if handed_over {
            file.sync_range(0..64 * PAGE, SyncRangeFlags::WRITE).expect("hand over");
        }
    }
    let failed = volume.background_step(BackgroundWork::Writeback);
    assert!(matches!(failed, Err(Error::Io(_))), "{failed:?}");
    assert!((1..=FILES).all(|number| seen.lock().expect("lock").contains(&number)), "{seen:?}");
    for (number, file) in (1..).zip(&files) {
        assert_eq!(file.report_errors().is_err(), number == BAD, "{number}");
        if number != BAD {
            // All is home, so the sync writes no more than its frame.
            let writes = probe.writes.load(Ordering::Relaxed);
            assert_eq!(file.fdatasync(), Ok(()), "{number}");
            let writes = probe.writes.load(Ordering::Relaxed) - writes;
            assert!(writes <= 1, "{number}: {writes} writes");
        }
        assert!(contents(file) == vec![number; 64 * 4096]);
    }
}
