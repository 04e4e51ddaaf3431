//! What the tests of the public API share: devices, a clock that is set by hand, patterns.
#![allow(dead_code, unused_imports)]

pub mod locks;
mod probe;
pub mod volatile;

pub use probe::Probe;

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;
use weir::device::Device;
use weir::device::memory::MemoryDevice;
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
