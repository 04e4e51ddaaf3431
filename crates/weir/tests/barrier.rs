//! Barriers: everything before is durable before anything after, and the call waits for neither.

mod common;

use common::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use weir::check::{CheckOptions, check_device};
use weir::device::buffer::AlignedBuf;
use weir::device::memory::MemoryDevice;
use weir::device::{
    Buffers, Device, DeviceInfo, DeviceResult, IoClass, OnDone, Operation, Request,
};
use weir::*;

/// A disk with a volatile cache: writes since the last flush are lost, kept or torn in a crash.
struct Volatile {
    inner: MemoryDevice,
    size_bytes: u64,
    pending: std::sync::Mutex<Vec<(u64, Vec<u8>)>>,
    pub writes: AtomicU64,
}

impl Volatile {
    fn new(size_bytes: u64) -> Arc<Self> {
        let inner = MemoryDevice::new(size_bytes);
        Arc::new(Self {
            inner,
            size_bytes,
            pending: std::sync::Mutex::default(),
            writes: AtomicU64::new(0),
        })
    }

    /// What the disk holds after a power cut now; the volume goes on.
    fn after_crash(&self, seed: u64) -> Arc<dyn Device> {
        let copy = MemoryDevice::new(self.size_bytes);
        let mut bytes = AlignedBuf::zeroed(self.size_bytes as usize);
        self.inner.read(0, &mut [&mut bytes], IoClass::SyncRead).expect("read");
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        for (offset, data) in self.pending.lock().expect("lock").iter() {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let keep = match random % 4 {
                0 => 0,
                1 => data.len() / 2 / 4096 * 4096,
                _ => data.len(),
            };
            bytes[*offset as usize..*offset as usize + keep].copy_from_slice(&data[..keep]);
        }
        for (index, part) in bytes.chunks(1 << 20).enumerate() {
            copy.write((index as u64) << 20, &[part], IoClass::Log, false).expect("write");
        }
        Arc::new(copy)
    }
}

fn aligned(bytes: &[u8]) -> AlignedBuf {
    let mut buffer = AlignedBuf::zeroed(bytes.len());
    buffer.copy_from_slice(bytes);
    buffer
}

impl Device for Volatile {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { volatile_cache: true, fua: false, ..self.inner.info() }
    }
    fn read(&self, offset: u64, buffers: &mut [&mut [u8]], class: IoClass) -> DeviceResult<()> {
        self.inner.read(offset, buffers, class)?;
        // What was written is read back, durable or not.
        let pending = self.pending.lock().expect("lock");
        let mut at = offset;
        for buffer in buffers {
            for (start, data) in pending.iter() {
                let from = at.max(*start);
                let to = (at + buffer.len() as u64).min(start + data.len() as u64);
                if from < to {
                    buffer[(from - at) as usize..(to - at) as usize]
                        .copy_from_slice(&data[(from - start) as usize..(to - start) as usize]);
                }
            }
            at += buffer.len() as u64;
        }
        Ok(())
    }
    fn write(&self, offset: u64, buffers: &[&[u8]], _: IoClass, fua: bool) -> DeviceResult<()> {
        assert!(!fua);
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.pending.lock().expect("lock").push((offset, buffers.concat()));
        Ok(())
    }
    fn flush(&self) -> DeviceResult<()> {
        for (offset, data) in std::mem::take(&mut *self.pending.lock().expect("lock")) {
            self.inner.write(offset, &[&aligned(&data)], IoClass::Log, false)?;
        }
        self.inner.flush()
    }
    fn discard(&self, offset: u64, length: u64) -> DeviceResult<()> {
        self.inner.discard(offset, length)
    }
    fn submit(&self, request: Request, on_done: OnDone) {
        let Request { operation, offset_bytes, mut buffers, class } = request;
        let result = match operation {
            Operation::Read => match &mut buffers {
                Buffers::Owned(memory) => self.read(offset_bytes, &mut [memory], class),
                Buffers::Fill(pages) => {
                    let mut slices: Vec<&mut [u8]> = pages.iter_mut().map(|p| &mut **p).collect();
                    self.read(offset_bytes, &mut slices, class)
                }
                _ => Ok(()),
            },
            _ => match &buffers {
                Buffers::Owned(memory) => self.write(offset_bytes, &[memory], class, false),
                Buffers::Pages(pages) => {
                    let slices: Vec<&[u8]> = pages.iter().map(|page| &**page).collect();
                    self.write(offset_bytes, &slices, class, false)
                }
                _ => Ok(()),
            },
        };
        on_done(result, buffers);
    }
}

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
