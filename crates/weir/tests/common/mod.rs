//! What the tests of the public API share: devices, a clock that is set by hand, patterns.
#![allow(dead_code)]

pub mod locks;
pub mod volatile;

use std::collections::HashSet;
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weir::device::memory::MemoryDevice;
use weir::device::{
    Device, DeviceError, DeviceInfo, DeviceResult, IoClass, OnDone, Operation, Request,
};
use weir::sync::Clock;
use weir::*;

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;

/// A fresh volume on a memory device, with a log of `log_blocks` (0: the default size).
pub fn formatted(size_bytes: u64, log_blocks: u64) -> Arc<dyn Device> {
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(size_bytes));
    format(&device, log_blocks);
    device
}

pub fn format(device: &Arc<dyn Device>, log_blocks: u64) {
    let options = CreateOptions {
        volume_id: Some([7; 16]),
        log_bytes: (log_blocks > 0).then_some(log_blocks * 4096),
        ..CreateOptions::default()
    };
    Volume::format_device(device, &options).expect("format");
}

pub fn manual(memory_bytes: u64) -> VolumeOptions {
    VolumeOptions {
        background: BackgroundMode::Manual,
        memory_bytes: Some(memory_bytes),
        ..VolumeOptions::default()
    }
}

pub fn threads(memory_bytes: u64) -> VolumeOptions {
    VolumeOptions { memory_bytes: Some(memory_bytes), ..VolumeOptions::default() }
}

pub fn open(device: &Arc<dyn Device>, options: VolumeOptions) -> Volume {
    Volume::open_device(device.clone(), options).expect("open")
}

/// A fresh volume of 32 MiB in manual mode.
pub fn small_volume() -> Volume {
    open(&formatted(32 * MIB, 0), manual(4 * MIB))
}

/// Bytes that tell where they belong.
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..length)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

/// Random numbers that are the same in every run.
pub struct Random(u64);

impl Random {
    pub fn seeded(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) % end
    }
}

/// All bytes of a file.
pub fn contents(file: &File) -> Vec<u8> {
    let mut bytes = vec![0xee; file.size() as usize];
    let count = file.read_at(0, &mut bytes).expect("read");
    assert_eq!(count, bytes.len());
    bytes
}

pub fn create(volume: &Volume, path: &str) -> File {
    volume.open_file(path, OpenFlags::CREATE).expect("create")
}

pub fn names(volume: &Volume, path: &str) -> Vec<Vec<u8>> {
    let mut names: Vec<_> =
        volume.read_dir(path).expect("list").into_iter().map(|entry| entry.name).collect();
    names.sort();
    names
}

/// Aborts the test process when `body` takes longer than `seconds`: a deadlock.
pub fn with_watchdog<R>(seconds: u64, body: impl FnOnce() -> R) -> R {
    let done = Arc::new(AtomicBool::new(false));
    let watched = done.clone();
    let watchdog = std::thread::spawn(move || {
        for _ in 0..seconds * 20 {
            if watched.load(Ordering::Relaxed) {
                return;
            }
            std::thread::park_timeout(Duration::from_millis(50));
        }
        // Not with a macro: what those print is kept until the test ends.
        let _ = writeln!(std::io::stderr(), "no end after {seconds} s: a deadlock");
        std::process::abort();
    });
    let result = body();
    done.store(true, Ordering::Relaxed);
    watchdog.thread().unpark();
    watchdog.join().expect("watchdog");
    result
}

/// A clock that stands still until it is moved.
#[derive(Debug, Default)]
pub struct HandClock {
    now_ns: AtomicI64,
}

impl HandClock {
    pub fn at(seconds: i64) -> Arc<Self> {
        Arc::new(Self { now_ns: AtomicI64::new(seconds * 1_000_000_000) })
    }
    pub fn advance_s(&self, seconds: i64) {
        self.now_ns.fetch_add(seconds * 1_000_000_000, Ordering::Relaxed);
    }
}

impl Clock for HandClock {
    fn realtime_ns(&self) -> i64 {
        self.now_ns.load(Ordering::Relaxed)
    }
    fn monotonic_ns(&self) -> u64 {
        self.now_ns.load(Ordering::Relaxed) as u64
    }
    fn sleep_us(&self, _: u64) {}
}

/// A device that counts reads, and fails on request, or lets something happen amid a write.
pub struct Probe {
    inner: Arc<dyn Device>,
    pub reads: AtomicU64,
    pub read_bytes: AtomicU64,
    pub writes: AtomicU64,
    /// Writes of this class fail while it is set.
    pub fail_data_writes: AtomicBool,
    pub fail_flushes: AtomicBool,
    pub fail_reads: AtomicBool,
    /// So many reads to come fail.
    pub failing_reads: AtomicU64,
    /// Writes that have failed.
    pub failed_writes: AtomicU64,
    amid_data_write: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// Amid the write of a block, after so many before.
    amid_block_write: Mutex<Option<(u64, u32, Happening)>>,
    refused: Mutex<Option<Refused>>,
    /// The blocks written so far, all that there are while the host is full.
    written: Mutex<HashSet<u64>>,
    host_is_full: AtomicBool,
}

/// What happens amid a write.
type Happening = Box<dyn FnOnce() + Send>;

/// Which writes fail: by offset and by what the first buffer begins with.
type Refused = Box<dyn Fn(u64, &[u8]) -> bool + Send>;

impl Probe {
    pub fn new(inner: Arc<dyn Device>) -> Arc<Self> {
        Arc::new(Self {
            inner,
            reads: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            fail_data_writes: AtomicBool::new(false),
            fail_flushes: AtomicBool::new(false),
            fail_reads: AtomicBool::new(false),
            failing_reads: AtomicU64::new(0),
            failed_writes: AtomicU64::new(0),
            amid_data_write: Mutex::new(None),
            amid_block_write: Mutex::new(None),
            refused: Mutex::new(None),
            written: Mutex::default(),
            host_is_full: AtomicBool::new(false),
        })
    }

    /// As a file with holes on a host that is full, or is not any more: only what was written before can be written.
    pub fn set_host_full(&self, is_full: bool) {
        self.host_is_full.store(is_full, Ordering::Relaxed);
    }

    /// From now on writes fail of which this is true, by offset and by what the first buffer begins with.
    pub fn refuse(&self, is_refused: impl Fn(u64, &[u8]) -> bool + Send + 'static) {
        *self.refused.lock().expect("lock") = Some(Box::new(is_refused));
    }

    /// `happening` runs while the next write of data is under way, on the thread that writes: it must not wait for that write.
    pub fn amid_next_data_write(&self, happening: impl FnOnce() + Send + 'static) {
        *self.amid_data_write.lock().expect("lock") = Some(Box::new(happening));
    }

    /// The same for a write that begins with `block`, after `writes` of it before.
    pub fn amid_write_of(
        &self,
        block: u64,
        writes: u32,
        happening: impl FnOnce() + Send + 'static,
    ) {
        *self.amid_block_write.lock().expect("lock") = Some((block, writes, Box::new(happening)));
    }

    /// Nothing is left to happen amid a write.
    pub fn has_happened(&self) -> bool {
        self.amid_data_write.lock().expect("lock").is_none()
            && self.amid_block_write.lock().expect("lock").is_none()
    }

    fn happens_amid_write_of(&self, offset_bytes: u64) {
        let mut planned = self.amid_block_write.lock().expect("lock");
        let happening = match planned.take() {
            Some((block, 0, happening)) if block * 4096 == offset_bytes => Some(happening),
            Some((block, writes, happening)) if block * 4096 == offset_bytes => {
                *planned = Some((block, writes - 1, happening));
                None
            }
            others => {
                *planned = others;
                None
            }
        };
        drop(planned);
        if let Some(happening) = happening {
            happening();
        }
    }

    fn count(&self, length_bytes: u64) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.read_bytes.fetch_add(length_bytes, Ordering::Relaxed);
    }

    /// Counts a write, or says why it fails.
    fn admit_write(
        &self,
        class: IoClass,
        offset_bytes: u64,
        buffers: &[&[u8]],
    ) -> DeviceResult<()> {
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.happens_amid_write_of(offset_bytes);
        let begins = buffers.first().copied().unwrap_or_default();
        if self.refuses(class, offset_bytes, begins) {
            return injected("write");
        }
        let length_bytes = buffers.iter().map(|buffer| buffer.len() as u64).sum();
        self.take_from_host(offset_bytes, length_bytes).inspect_err(|_| {
            self.failed_writes.fetch_add(1, Ordering::Relaxed);
        })
    }

    fn take_from_host(&self, offset_bytes: u64, length_bytes: u64) -> DeviceResult<()> {
        let blocks = offset_bytes / 4096..(offset_bytes + length_bytes).div_ceil(4096);
        let mut written = self.written.lock().expect("lock");
        let is_there = |block: u64| written.contains(&block);
        if self.host_is_full.load(Ordering::Relaxed) && !blocks.clone().all(is_there) {
            let reason = "No space left on device (os error 28)".into();
            let operation = "write";
            return Err(DeviceError {
                operation,
                offset_bytes,
                length_bytes,
                reason,
                no_space: true,
            });
        }
        written.extend(blocks);
        Ok(())
    }

    fn refuses(&self, class: IoClass, offset_bytes: u64, begins: &[u8]) -> bool {
        let is_data = match class {
            IoClass::SyncWrite | IoClass::Writeback | IoClass::Background => true,
            IoClass::Beside => !begins.starts_with(&weir::format::frame::FRAME_MAGIC),
            _ => false,
        };
        if is_data {
            // Out of the lock: it may write data itself.
            let happening = self.amid_data_write.lock().expect("lock").take();
            if let Some(happening) = happening {
                happening();
            }
        }
        let is_refused = self.refused.lock().expect("lock");
        let fails = is_data && self.fail_data_writes.load(Ordering::Relaxed)
            || is_refused.as_ref().is_some_and(|is_refused| is_refused(offset_bytes, begins));
        if fails {
            self.failed_writes.fetch_add(1, Ordering::Relaxed);
        }
        fails
    }
}

fn injected<T>(operation: &'static str) -> DeviceResult<T> {
    Err(DeviceError {
        operation,
        offset_bytes: 0,
        length_bytes: 0,
        reason: "injected".into(),
        no_space: false,
    })
}

impl Device for Probe {
    fn info(&self) -> DeviceInfo {
        // So that flushes are asked for.
        DeviceInfo { volatile_cache: true, fua: false, ..self.inner.info() }
    }
    fn read(
        &self,
        offset_bytes: u64,
        buffers: &mut [&mut [u8]],
        class: IoClass,
    ) -> DeviceResult<()> {
        self.count(buffers.iter().map(|buffer| buffer.len() as u64).sum());
        let one_less = |left: u64| left.checked_sub(1);
        let fails =
            self.failing_reads.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok();
        if fails || self.fail_reads.load(Ordering::Relaxed) {
            return injected("read");
        }
        self.inner.read(offset_bytes, buffers, class)
    }
    fn write(
        &self,
        offset_bytes: u64,
        buffers: &[&[u8]],
        class: IoClass,
        fua: bool,
    ) -> DeviceResult<()> {
        self.admit_write(class, offset_bytes, buffers)?;
        self.inner.write(offset_bytes, buffers, class, fua)
    }
    fn flush(&self) -> DeviceResult<()> {
        if self.fail_flushes.load(Ordering::Relaxed) {
            return injected("flush");
        }
        self.inner.flush()
    }
    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> DeviceResult<()> {
        self.inner.discard(offset_bytes, length_bytes)
    }
    fn submit(&self, request: Request, on_done: OnDone) {
        match request.operation {
            Operation::Read => self.count(0),
            Operation::Write { .. } => {
                let slices = request.buffers.slices();
                let admitted = self.admit_write(request.class, request.offset_bytes, &slices);
                if admitted.is_err() {
                    return on_done(admitted, request.buffers);
                }
            }
            _ => {}
        }
        self.inner.submit(request, on_done);
    }
}
