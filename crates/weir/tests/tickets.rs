//! Tickets: asynchronous, ranged, many in flight, each of them true.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use weir::device::Device;
use weir::device::memory::MemoryDevice;
use weir::*;

const MIB: u64 = 1 << 20;

fn formatted(size_bytes: u64) -> Arc<dyn Device> {
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(size_bytes));
    Volume::format_device(&device, &CreateOptions::default()).expect("format");
    device
}

fn options(background: BackgroundMode) -> VolumeOptions {
    VolumeOptions { background, memory_bytes: Some(16 * MIB), ..VolumeOptions::default() }
}

fn threads(device: &Arc<dyn Device>) -> Volume {
    Volume::open_device(device.clone(), options(BackgroundMode::Threads)).expect("open")
}

fn content(volume: &Volume, path: &str) -> Vec<u8> {
    let file = volume.open_file(path, OpenFlags::READ).expect("open");
    let mut bytes = vec![0; file.size() as usize];
    assert_eq!(file.read_at(0, &mut bytes), Ok(bytes.len()));
    bytes
}

#[test]
fn thousands_of_tickets_end_and_are_true() {
    let device = formatted(128 * MIB);
    {
        let volume = threads(&device);
        let tickets: Vec<_> = (0..3000)
            .map(|number| {
                let file =
                    volume.open_file(format!("/f{number}"), OpenFlags::CREATE).expect("create");
                file.write_at(0, &[number as u8; 4096]).expect("write");
                file.fsync_async(0..u64::MAX, SyncKind::Full).expect("submit")
            })
            .collect();
        for ticket in tickets {
            ticket.wait().expect("durable");
        }
        let stats = volume.stats();
        assert!(stats.log.flushes < 1500, "{} flushes for 3000 syncs", stats.log.flushes);
    }
    let volume = threads(&device);
    for number in 0..3000 {
        assert_eq!(content(&volume, &format!("/f{number}")), vec![number as u8; 4096]);
    }
}

#[test]
fn large_and_small_tickets_end_together_with_blocking_syncs() {
    let device = formatted(128 * MIB);
    let volume = threads(&device);
    let large = volume.open_file("/large", OpenFlags::CREATE).expect("create");
    large.write_at(0, &vec![1; 3 << 20]).expect("write");
    let queue = CompletionQueue::new().expect("queue");
    large.fsync_async(0..u64::MAX, SyncKind::Data).expect("submit").deliver(&queue, 1);
    let small = volume.open_file("/small", OpenFlags::CREATE).expect("create");
    small.append(b"x").expect("append");
    small.fsync().expect("fsync");
    volume.sync_async().expect("submit").deliver(&queue, 2);
    let mut ended = [queue.wait().user_data, queue.wait().user_data];
    ended.sort_unstable();
    assert_eq!(ended, [1, 2]);
    assert_eq!(queue.take(), None);
    volume.close().expect("close");
    assert_eq!(content(&threads(&device), "/large"), vec![1; 3 << 20]);
}

#[test]
fn submission_reads_no_nodes_and_leaves_them_to_who_does_the_sync() {
    const EXTENTS: u64 = 3000;
    let device = formatted(128 * MIB);
    {
        let volume = threads(&device);
        let file = volume.open_file("/scattered", OpenFlags::CREATE).expect("create");
        for number in 0..EXTENTS {
            file.write_at(2 * 4096 * number, &[1; 4096]).expect("write");
        }
        file.fsync().expect("fsync");
        volume.close().expect("close");
    }
    let volume = Volume::open_device(device.clone(), options(BackgroundMode::Manual));
    let volume = volume.expect("open");
    let file = volume.open_file("/scattered", OpenFlags::READ_WRITE).expect("open");
    let misses = || volume.stats().nodes.misses;
    for first in [1000, 2000, 2900] {
        // Few pages, which are logged with where they live, and many, which move beside their frame.
        for pages in [1, 8] {
            let range = 8192 * first..8192 * (first + pages);
            for number in first..first + pages {
                file.write_at(8192 * number, &[2; 4096]).expect("write");
            }
            let before = misses();
            let ticket = file.fsync_async(range, SyncKind::Data).expect("submit");
            assert_eq!(misses(), before, "submission has read a node");
            while volume.background_step(BackgroundWork::Log).expect("step") {}
            assert_eq!(ticket.poll(), Some(Ok(())));
            // Nobody else did it, and it had to be done.
            assert!(pages > 1 || misses() > before);
        }
    }
    drop((file, volume));
    let bytes = content(&threads(&device), "/scattered");
    for number in 0..EXTENTS as usize {
        let is_new = [1000, 2000, 2900].iter().any(|first| (*first..first + 8).contains(&number));
        let page = vec![if is_new { 2 } else { 1 }; 4096];
        assert_eq!(bytes[8192 * number..8192 * number + 4096], page);
    }
}

#[test]
fn a_range_leaves_other_pages_alone() {
    let device = formatted(64 * MIB);
    {
        let volume =
            Volume::open_device(device.clone(), options(BackgroundMode::Manual)).expect("open");
        let file = volume.open_file("/r", OpenFlags::CREATE).expect("create");
        file.write_at(0, &vec![7; 64 * 4096]).expect("write");
        let ticket = file.fsync_async(4096 * 8..4096 * 9, SyncKind::Data).expect("submit");
        while volume.background_step(BackgroundWork::Log).expect("step") {}
        ticket.wait().expect("durable");
        assert_eq!(volume.stats().logged_pages, 1);
    }
    let volume = threads(&device);
    let bytes = content(&volume, "/r");
    assert_eq!(bytes.len(), 9 * 4096);
    assert!(bytes[8 * 4096..].iter().all(|&byte| byte == 7));
    assert!(bytes[..8 * 4096].iter().all(|&byte| byte == 0), "never written, so never stale");
}

#[test]
fn an_empty_range_is_of_no_page() {
    let manual = options(BackgroundMode::Manual);
    let volume = Volume::open_device(formatted(64 * MIB), manual).expect("open");
    let file = volume.open_file("/r", OpenFlags::CREATE).expect("create");
    file.write_at(0, &vec![7; 4 * 4096]).expect("write");
    for place in [0, 5, 4096, 4097, 4 * 4096, u64::MAX] {
        let ticket = file.fsync_async(place..place, SyncKind::Data).expect("submit");
        file.expire(place..place).expect("expire");
        while volume.background_step(BackgroundWork::Log).expect("step") {}
        assert_eq!(ticket.poll(), Some(Ok(())));
        let stats = volume.stats();
        let synced = (stats.logged_pages, stats.sync_home_pages, stats.handover_pages);
        assert_eq!(synced, (0, 0, 0), "at {place}");
    }
}

struct Unpark(std::thread::Thread);
impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

#[test]
fn a_ticket_is_a_future_on_any_executor() {
    let device = formatted(64 * MIB);
    let volume = threads(&device);
    let file = volume.open_file("/a", OpenFlags::CREATE).expect("create");
    file.append(b"await me").expect("append");
    let mut future = pin!(file.fsync_async(0..u64::MAX, SyncKind::Full).expect("submit"));
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(result) => break result.expect("durable"),
            Poll::Pending => std::thread::park(),
        }
    }
    assert!(volume.durable_lsn() >= 1);
}

#[test]
fn dropping_a_ticket_cancels_nothing() {
    let device = formatted(64 * MIB);
    {
        let volume = threads(&device);
        let file = volume.open_file("/d", OpenFlags::CREATE).expect("create");
        file.append(b"still durable").expect("append");
        drop(file.fsync_async(0..u64::MAX, SyncKind::Full).expect("submit"));
        let last = volume.last_lsn();
        assert_eq!(volume.wait_durable(last, Some(60_000_000)), Ok(true));
    }
    assert_eq!(content(&threads(&device), "/d"), b"still durable");
}

#[test]
fn a_sync_of_what_is_durable_is_answered_at_once_and_no_other() {
    let device = formatted(64 * MIB);
    let manual = options(BackgroundMode::Manual);
    let volume = Volume::open_device(device, manual).expect("open");
    let file = volume.open_file("/f", OpenFlags::CREATE).expect("create");
    let at_once = |range, kind| file.fsync_if_durable(range, kind);
    let (all, full) = (0..u64::MAX, SyncKind::Full);
    assert_eq!(at_once(all.clone(), full), None, "the file itself is not durable");
    file.fsync().expect("durable");
    let (flushes, fsyncs) = (volume.stats().log.flushes, volume.stats().fsyncs);
    assert_eq!(at_once(all.clone(), full), Some(Ok(())));
    assert_eq!((volume.stats().log.flushes, volume.stats().fsyncs), (flushes, fsyncs + 1));
    // A dirty page, and the size.
    file.write_at(0, &[1; 4096]).expect("write");
    assert_eq!(at_once(all.clone(), full), None);
    assert_eq!(at_once(all.clone(), SyncKind::Data), None);
    // In the log's open frame, not durable.
    let ticket = file.fsync_async(all.clone(), full).expect("submit");
    assert_eq!(at_once(all.clone(), full), None);
    while volume.background_step(BackgroundWork::Log).expect("step") {}
    assert_eq!(ticket.wait(), Ok(()));
    assert_eq!(at_once(all.clone(), full), Some(Ok(())));
    // Attributes alone.
    let mode = SetAttr { permissions: Some(0o600), ..SetAttr::default() };
    volume.setattr(file.ino(), &mode).expect("chmod");
    assert_eq!(at_once(all.clone(), full), None);
    file.fsync().expect("durable");
    // Pages beside the range do not matter to it.
    file.write_at(0, &[2; 4096]).expect("write");
    file.write_at(8192, &[3; 4096]).expect("write");
    file.fsync().expect("durable");
    file.write_at(8192, &[4; 4096]).expect("write");
    assert_eq!(at_once(0..4096, SyncKind::Data), Some(Ok(())));
    assert_eq!(at_once(8192..12288, SyncKind::Data), None);
}

/// A waker that cannot be woken.
struct Broken;

impl Wake for Broken {
    fn wake(self: Arc<Self>) {
        panic!("on purpose: a waker");
    }
}

#[test]
fn what_a_program_panics_with_when_it_is_told_ends_nobody_elses_request() {
    let device = formatted(64 * MIB);
    let volume = threads(&device);
    let (all, here) = (0..u64::MAX, std::thread::current().id());
    for round in 0..8 {
        let submit = |name: &str| {
            let file = volume.open_file(format!("/{name}{round}"), OpenFlags::CREATE)?;
            file.write_at(0, name.as_bytes())?;
            file.fsync_async(all.clone(), SyncKind::Full)
        };
        let mut awaited = pin!(submit("woken").expect("submit"));
        let waker = Waker::from(Arc::new(Broken));
        // Not told, where it has ended already.
        let _ = awaited.as_mut().poll(&mut Context::from_waker(&waker));
        // On the thread of the engine: where it has ended already, it is told here.
        submit("called").expect("submit").on_completion(move |_| {
            assert!(std::thread::current().id() == here, "on purpose: a callback");
        });
        let other = submit("other").expect("submit");
        assert_eq!(other.wait_timeout(30_000_000), Some(Ok(())));
    }
    let file = volume.open_file("/last", OpenFlags::CREATE).expect("create");
    file.fsync().expect("durable");
    volume.close().expect("close");
}
