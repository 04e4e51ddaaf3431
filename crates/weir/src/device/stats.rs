//! Counters of what a device was asked to do: the raw material for "writes and flushes per fsync".

use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Live counters of one device. Requests are counted when they have ended, failed ones only
/// under `errors`.
#[derive(Debug, Default)]
pub struct DeviceStats {
    /// Reads.
    pub reads: AtomicU64,
    /// Bytes read.
    pub read_bytes: AtomicU64,
    /// Writes.
    pub writes: AtomicU64,
    /// Bytes written.
    pub write_bytes: AtomicU64,
    /// Flushes.
    pub flushes: AtomicU64,
    /// Discards that reached the device.
    pub discards: AtomicU64,
    /// Requests that failed.
    pub errors: AtomicU64,
}

/// The counters at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceCounters {
    /// Reads.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Discards that reached the device.
    pub discards: u64,
    /// Requests that failed.
    pub errors: u64,
}

impl DeviceStats {
    /// The values now. The counters are read one by one: exact only while the device is idle.
    pub fn counters(&self) -> DeviceCounters {
        DeviceCounters {
            reads: self.reads.load(Relaxed),
            read_bytes: self.read_bytes.load(Relaxed),
            writes: self.writes.load(Relaxed),
            write_bytes: self.write_bytes.load(Relaxed),
            flushes: self.flushes.load(Relaxed),
            discards: self.discards.load(Relaxed),
            errors: self.errors.load(Relaxed),
        }
    }

    /// Counts a read that ended with `result`.
    pub fn count_read<E>(&self, bytes: u64, result: &Result<(), E>) {
        self.count(&self.reads, result);
        if result.is_ok() {
            self.read_bytes.fetch_add(bytes, Relaxed);
        }
    }

    /// Counts a write that ended with `result`.
    pub fn count_write<E>(&self, bytes: u64, result: &Result<(), E>) {
        self.count(&self.writes, result);
        if result.is_ok() {
            self.write_bytes.fetch_add(bytes, Relaxed);
        }
    }

    /// Counts a flush that ended with `result`.
    pub fn count_flush<E>(&self, result: &Result<(), E>) {
        self.count(&self.flushes, result);
    }

    /// Counts a discard that ended with `result`.
    pub fn count_discard<E>(&self, result: &Result<(), E>) {
        self.count(&self.discards, result);
    }

    fn count<E>(&self, counter: &AtomicU64, result: &Result<(), E>) {
        let counter = if result.is_ok() { counter } else { &self.errors };
        counter.fetch_add(1, Relaxed);
    }
}

impl DeviceCounters {
    /// What happened since `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            reads: self.reads.saturating_sub(earlier.reads),
            read_bytes: self.read_bytes.saturating_sub(earlier.read_bytes),
            writes: self.writes.saturating_sub(earlier.writes),
            write_bytes: self.write_bytes.saturating_sub(earlier.write_bytes),
            flushes: self.flushes.saturating_sub(earlier.flushes),
            discards: self.discards.saturating_sub(earlier.discards),
            errors: self.errors.saturating_sub(earlier.errors),
        }
    }
}
