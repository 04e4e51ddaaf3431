//! The figures of the way to durability, against what was asked for and what the device was asked for.

mod common;

use common::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use weir::device::memory::MemoryDevice;
use weir::device::{
    Device, DeviceError, DeviceInfo, DeviceResult, IoClass, OnDone, Operation, Request,
};
use weir::format::frame::FRAME_MAGIC;
use weir::stats::Stats;
use weir::*;

/// A disk that takes its time, and counts.
struct Disk {
    inner: MemoryDevice,
    volatile_cache: bool,
    fua: bool,
    write_us: AtomicU64,
    flushes: AtomicU64,
    forced: AtomicU64,
    frames: AtomicU64,
    frame_bytes: AtomicU64,
    refuses_flushes: AtomicBool,
}

impl Disk {
    fn new(volatile_cache: bool, fua: bool) -> Arc<Self> {
        Arc::new(Self {
            inner: MemoryDevice::new(256 * MIB),
            volatile_cache,
            fua,
            write_us: AtomicU64::new(0),
            flushes: AtomicU64::new(0),
            forced: AtomicU64::new(0),
            frames: AtomicU64::new(0),
            frame_bytes: AtomicU64::new(0),
            refuses_flushes: AtomicBool::new(false),
        })
    }

    /// A volume on it. From here on everything is counted, and takes time.
    fn opened(self: &Arc<Self>, write_us: u64) -> Volume {
        let device: Arc<dyn Device> = self.clone();
        format(&device, 0);
        let volume = open(&device, threads(64 * MIB));
        self.write_us.store(write_us, Ordering::Relaxed);
        for counter in [&self.flushes, &self.forced, &self.frames, &self.frame_bytes] {
            counter.store(0, Ordering::Relaxed);
        }
        volume
    }

    fn sleep(&self, writes: u64) {
        let write_us = self.write_us.load(Ordering::Relaxed);
        if write_us > 0 {
            std::thread::sleep(Duration::from_micros(writes * write_us));
        }
    }

    fn note_write(&self, parts: &[&[u8]], fua: bool) {
        self.sleep(1);
        self.forced.fetch_add(u64::from(fua), Ordering::Relaxed);
        if parts.first().is_some_and(|part| part.starts_with(&FRAME_MAGIC)) {
            let bytes: usize = parts.iter().map(|part| part.len()).sum();
            self.frames.fetch_add(1, Ordering::Relaxed);
            self.frame_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }
}

impl Device for Disk {
    fn info(&self) -> DeviceInfo {
        let (volatile_cache, fua) = (self.volatile_cache, self.fua);
        DeviceInfo { volatile_cache, fua, ..self.inner.info() }
    }
    fn read(&self, offset: u64, buffers: &mut [&mut [u8]], class: IoClass) -> DeviceResult<()> {
        self.inner.read(offset, buffers, class)
    }
    fn write(&self, at: u64, parts: &[&[u8]], class: IoClass, fua: bool) -> DeviceResult<()> {
        self.note_write(parts, fua);
        self.inner.write(at, parts, class, false)
    }
    fn flush(&self) -> DeviceResult<()> {
        self.sleep(4);
        self.flushes.fetch_add(1, Ordering::Relaxed);
        if self.refuses_flushes.load(Ordering::Relaxed) {
            return Err(DeviceError {
                operation: "flush",
                offset_bytes: 0,
                length_bytes: 0,
                reason: "refused".to_owned(),
                no_space: false,
            });
        }
        self.inner.flush()
    }
    fn discard(&self, offset: u64, length: u64) -> DeviceResult<()> {
        self.inner.discard(offset, length)
    }
    fn submit(&self, mut request: Request, on_done: OnDone) {
        if let Operation::Write { fua } = request.operation {
            self.note_write(&request.buffers.slices(), fua);
            request.operation = Operation::Write { fua: false };
        }
        self.inner.submit(request, on_done);
    }
}

/// Syncs of one file: by a blocked caller, by a ticket, or in turns.
fn write_and_sync(file: &File, times: u64, is_ticket: impl Fn(u64) -> bool) {
    for round in 0..times {
        file.write_at(round % 64 * 4096, &[round as u8; 4096]).expect("write");
        if is_ticket(round) {
            let ticket = file.fsync_async(0..u64::MAX, SyncKind::Full).expect("submit");
            ticket.wait().expect("durable");
        } else {
            file.fsync().expect("durable");
        }
    }
}

/// Each sync went through each part of its way once.
fn check_ways(stats: &Stats, what: &str) {
    let log = &stats.log;
    let committed = log.commits + log.async_commits;
    let asked = stats.fsyncs + stats.volume_syncs;
    assert_eq!(stats.data_phase_ns.count(), asked, "{what}");
    assert_eq!(committed + log.commits_found_durable, asked, "{what}");
    assert_eq!(log.commit_ns.count(), log.commits, "{what}");
    assert_eq!(log.async_commit_ns.count(), log.async_commits, "{what}");
    assert_eq!(log.queue_ns.count(), committed, "{what}");
    assert_eq!(log.acknowledge_ns.count(), committed, "{what}");
    assert!(log.queue_ns.sum <= log.commit_ns.sum + log.async_commit_ns.sum, "{what}");
}

#[test]
fn every_sync_is_counted_once_on_each_part_of_its_way() {
    for (volatile_cache, fua) in [(true, false), (true, true), (false, false)] {
        for (callers, tickets) in [(1, 0), (1, 2), (2, 0), (4, 0), (8, 0), (8, 1), (8, 2)] {
            let disk = Disk::new(volatile_cache, fua);
            let volume = disk.opened(50);
            std::thread::scope(|scope| {
                for caller in 0..callers {
                    let file = create(&volume, &format!("/{caller}"));
                    scope.spawn(move || {
                        write_and_sync(&file, 100, |round| round % 2 < tickets);
                    });
                }
            });
            let what =
                format!("cache {volatile_cache}, fua {fua}, {callers} callers, {tickets} tickets");
            let stats = volume.stats();
            assert_eq!(stats.fsyncs, callers * 100, "{what}");
            check_ways(&stats, &what);
            let log = &stats.log;
            if tickets == 0 {
                assert_eq!(log.commits_per_flush.sum, log.commits, "{what}");
            }
            let of_device = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
            assert_eq!((log.flushes, log.flush_ns.count()), {
                let flushes = of_device(&disk.flushes);
                (flushes, flushes)
            });
            assert_eq!(log.fua_writes, of_device(&disk.forced), "{what}");
            assert_eq!(log.frames, of_device(&disk.frames), "{what}");
            assert_eq!(log.frame_bytes, of_device(&disk.frame_bytes), "{what}");
            assert_eq!(log.blocks_per_frame.sum * 4096, log.frame_bytes, "{what}");
        }
    }
}

#[test]
fn what_has_nothing_to_wait_for_is_counted_as_that() {
    let volume = Disk::new(true, false).opened(50);
    let file = create(&volume, "/f");
    let all = 0..u64::MAX;
    write_and_sync(&file, 1, |_| false);
    for round in 1..=5 {
        file.fsync().expect("durable");
        assert_eq!(file.fsync_if_durable(all.clone(), SyncKind::Full), Some(Ok(())));
        let ticket = file.fsync_async(all.clone(), SyncKind::Full).expect("submit");
        assert_eq!(ticket.poll(), Some(Ok(())));
        volume.sync().expect("durable");
        volume.fsync_dir(Volume::ROOT).expect("durable");
        let stats = volume.stats();
        assert_eq!((stats.fsyncs, stats.volume_syncs), (1 + 4 * round, round));
        assert_eq!(stats.log.commits_found_durable, 5 * round);
        check_ways(&stats, "nothing to wait for");
    }
}

#[test]
fn syncs_of_directories_and_of_the_volume_are_on_the_way_too() {
    let volume = Disk::new(true, false).opened(50);
    for round in 0..5 {
        create(&volume, &format!("/a{round}"));
        volume.fsync_dir(Volume::ROOT).expect("durable");
        create(&volume, &format!("/b{round}"));
        volume.fsync_dir_async(Volume::ROOT).expect("submit").wait().expect("durable");
        create(&volume, &format!("/c{round}"));
        volume.sync().expect("durable");
        create(&volume, &format!("/d{round}"));
        volume.sync_async().expect("submit").wait().expect("durable");
    }
    let stats = volume.stats();
    assert_eq!((stats.fsyncs, stats.volume_syncs), (10, 10));
    assert_eq!(stats.log.commits + stats.log.async_commits, 20);
    check_ways(&stats, "directories and the volume");
}

#[test]
fn what_tickets_wait_for_a_thread_is_seen() {
    let disk = Disk::new(true, false);
    let volume = disk.opened(2000);
    let files: Vec<File> = (0..16)
        .map(|number| {
            let file = create(&volume, &format!("/{number}"));
            file.write_at(0, &vec![1; 2 << 20]).expect("write");
            file
        })
        .collect();
    let tickets: Vec<(Instant, SyncTicket)> = files
        .iter()
        .map(|file| (Instant::now(), file.fsync_async(0..u64::MAX, SyncKind::Full)))
        .map(|(began, ticket)| (began, ticket.expect("submit")))
        .collect();
    let (ended, told) = std::sync::mpsc::channel();
    let times = tickets.into_iter().map(|(began, ticket)| {
        let ended = ended.clone();
        ticket.on_completion(move |result| {
            assert_eq!(result, Ok(()));
            ended.send(began.elapsed()).expect("somebody listens");
        });
    });
    let count = times.count();
    let waited: Duration = told.iter().take(count).sum();
    let stats = volume.stats();
    let seen = Duration::from_nanos(stats.data_phase_ns.sum + stats.log.async_commit_ns.sum);
    assert!(seen >= waited.mul_f64(0.8), "{waited:?} from submission to end, {seen:?} of it seen");
    check_ways(&stats, "many large tickets");
}

#[test]
fn batches_and_barriers_are_seen_on_their_way_into_the_log() {
    let volume = Disk::new(true, false).opened(50);
    let file = create(&volume, "/f");
    let batch = |data: &[u8]| {
        let mut batch = volume.batch();
        batch.write_at(&file, 0, data).expect("write");
        batch
    };
    batch(&[1; 100]).commit_relaxed().expect("commit");
    batch(&[2; 100]).commit().expect("commit");
    batch(&vec![3; 4 << 20]).commit_async().expect("commit").wait().expect("durable");
    let mut refused = volume.batch();
    refused.unlink(Volume::ROOT, b"nothing").expect("a step");
    assert!(refused.commit().is_err());
    let stats = volume.stats();
    assert_eq!((stats.batch_phase_ns.count(), stats.failed_syncs), (3, 0));

    file.write_at(0, &[4; 4096]).expect("write");
    volume.barrier().expect("raised");
    let stats = volume.stats();
    let phases = (stats.barrier_call_ns.count(), stats.barrier_data_ns.count());
    assert_eq!(phases, (1, 0), "so little is in the log at once");
    file.write_at(0, &vec![5; 4 << 20]).expect("write");
    volume.barrier().expect("raised");
    volume.sync().expect("durable");
    let stats = volume.stats();
    assert_eq!((stats.barrier_call_ns.count(), stats.barrier_data_ns.count()), (2, 1));
}

#[test]
fn whoever_is_told_an_error_is_counted() {
    let disk = Disk::new(true, false);
    let volume = disk.opened(50);
    let file = create(&volume, "/f");
    write_and_sync(&file, 2, |round| round == 0);
    assert_eq!(volume.stats().failed_syncs, 0);
    disk.refuses_flushes.store(true, Ordering::Relaxed);
    let mut told = 0;
    let mut is_told = |result: Result<()>| {
        assert!(result.is_err());
        told += 1;
        assert_eq!(volume.stats().failed_syncs, told);
    };
    file.write_at(0, &[1; 4096]).expect("write");
    is_told(file.fsync_async(0..u64::MAX, SyncKind::Full).expect("submit").wait());
    is_told(file.fsync());
    is_told(volume.sync());
    is_told(volume.fsync_dir(Volume::ROOT));
}

#[test]
fn an_error_of_writeback_that_is_told_after_a_ticket_is_a_failed_sync() {
    let probe = Probe::new(formatted(64 * MIB, 0));
    let device: Arc<dyn Device> = probe.clone();
    let volume = open(&device, manual(16 * MIB));
    let file = create(&volume, "/f");
    file.write_at(0, &pattern(1, 4096)).expect("write");
    probe.fail_data_writes.store(true, Ordering::Relaxed);
    assert!(volume.background_step(BackgroundWork::Writeback).is_err());
    probe.fail_data_writes.store(false, Ordering::Relaxed);
    let sync = || {
        let ticket = file.fsync_async(0..u64::MAX, SyncKind::Full).expect("submit");
        while ticket.poll().is_none() {
            volume.background_step(BackgroundWork::Log).expect("step");
        }
        ticket.wait()
    };
    assert_eq!((sync(), volume.stats().failed_syncs), (Ok(()), 0), "it is in the log");
    assert!(matches!(file.report_after(sync()), Err(Error::Io(_))));
    assert_eq!(volume.stats().failed_syncs, 1);
    assert_eq!(file.report_after(sync()), Ok(()), "told once");
    // That of the ticket is counted where it ended.
    assert_eq!(file.report_after(Err(Error::NoSpace)), Err(Error::NoSpace));
    assert_eq!(volume.stats().failed_syncs, 1);
}
