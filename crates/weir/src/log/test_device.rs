//! A disk that loses, tears and refuses, and what the tests of the log share.
#![cfg_attr(feature = "shuttle", allow(dead_code))] // The schedules need a part of it only.
#![cfg_attr(feature = "shuttle", allow(clippy::wildcard_imports))] // Elsewhere it is a test, and they are allowed.

use super::*;
use crate::cache::page::{PagePool, PageRef};
use crate::device::{DeviceError, DeviceResult, IoClass, OnDone, Request};
use crate::format::{Key, checksum};
use crate::sync::SystemClock;

const VOLUME: VolumeId = [3; 16];
pub(super) const LOG_START: u64 = 8;

pub(super) struct Random(pub u64);
impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

#[derive(Default)]
pub(super) struct Disk {
    pub stable: Vec<u8>,
    /// Writes since the last flush, in order.
    pending: Vec<(usize, Vec<u8>)>,
    writes: usize,
    flushes: usize,
    pub fua_writes: usize,
    /// Upcoming writes that fail: each may store its bytes all the same.
    pub failing_writes: Vec<bool>,
    pub failing_flushes: usize,
    pub failing_reads: usize,
    /// Requests for what is not the log fail.
    pub failing_data: bool,
    /// The next write of the log ends only when another one has: how many there had been, if one is held up.
    pub hold_next_write: bool,
}

/// A disk with a volatile cache. Flushing covers what was written before.
pub(super) struct FaultyDevice {
    disk: std::sync::Mutex<Disk>,
    written: std::sync::Condvar,
    info: DeviceInfo,
}

impl FaultyDevice {
    pub fn new(blocks: u64) -> Arc<Self> {
        Self::with(blocks, false, true)
    }

    pub fn with(blocks: u64, fua: bool, volatile_cache: bool) -> Arc<Self> {
        let size_bytes = blocks * BLOCK_BYTES as u64;
        let disk = Disk { stable: vec![0; size_bytes as usize], ..Disk::default() };
        let info = DeviceInfo { size_bytes, fua, volatile_cache, discard: false };
        Arc::new(Self {
            disk: std::sync::Mutex::new(disk),
            written: std::sync::Condvar::new(),
            info,
        })
    }

    pub fn disk(&self) -> std::sync::MutexGuard<'_, Disk> {
        self.disk.lock().unwrap()
    }

    /// Power cut: each pending write survives, is lost, or is torn at sectors.
    pub fn crash(&self, random: &mut Random) {
        let mut disk = self.disk();
        for (offset, bytes) in std::mem::take(&mut disk.pending) {
            let fate = random.below(3);
            for (index, sector) in bytes.chunks(512).enumerate() {
                if fate == 0 || (fate == 1 && random.below(2) == 0) {
                    let at = offset + index * 512;
                    disk.stable[at..at + sector.len()].copy_from_slice(sector);
                }
            }
        }
        disk.failing_writes.clear();
        disk.failing_flushes = 0;
    }

    pub fn counts(&self) -> (usize, usize) {
        let disk = self.disk();
        (disk.writes, disk.flushes)
    }
}

fn broken(operation: &'static str) -> DeviceError {
    let reason = "told to fail".to_owned();
    DeviceError { operation, offset_bytes: 0, length_bytes: 0, reason, no_space: false }
}

impl Device for FaultyDevice {
    fn info(&self) -> DeviceInfo {
        self.info
    }
    fn read(&self, offset: u64, buffers: &mut [&mut [u8]], _: IoClass) -> DeviceResult<()> {
        let mut disk = self.disk();
        if disk.failing_reads > 0 {
            disk.failing_reads -= 1;
            return Err(broken("read"));
        }
        let mut at = offset as usize;
        for buffer in buffers {
            let end = at + buffer.len();
            buffer.copy_from_slice(&disk.stable[at..end]);
            for (start, bytes) in &disk.pending {
                let from = at.max(*start);
                let until = end.min(start + bytes.len());
                if from < until {
                    buffer[from - at..until - at]
                        .copy_from_slice(&bytes[from - start..until - start]);
                }
            }
            at = end;
        }
        Ok(())
    }
    fn write(&self, offset: u64, buffers: &[&[u8]], _: IoClass, fua: bool) -> DeviceResult<()> {
        let mut disk = self.disk();
        disk.writes += 1;
        let bytes = buffers.concat();
        let offset = offset as usize;
        assert!(bytes.len().is_multiple_of(BLOCK_BYTES) && offset.is_multiple_of(BLOCK_BYTES));
        assert!(offset + bytes.len() <= disk.stable.len());
        assert!(buffers.iter().all(|buffer| buffer.as_ptr().addr().is_multiple_of(BLOCK_BYTES)));
        let fails = (!disk.failing_writes.is_empty()).then(|| disk.failing_writes.remove(0));
        if fails != Some(false) {
            if (fua || !self.info.volatile_cache) && fails.is_none() {
                disk.fua_writes += 1;
                disk.stable[offset..offset + bytes.len()].copy_from_slice(&bytes);
            } else {
                disk.pending.push((offset, bytes));
            }
        }
        self.written.notify_all();
        if std::mem::take(&mut disk.hold_next_write) {
            let writes = disk.writes;
            let patience = std::time::Duration::from_secs(20);
            let waited =
                self.written.wait_timeout_while(disk, patience, |disk| disk.writes == writes);
            disk = waited.unwrap().0;
            assert!(disk.writes > writes, "nobody has written meanwhile");
        }
        drop(disk);
        crate::sync::yield_now();
        if fails.is_some() { Err(broken("write")) } else { Ok(()) }
    }
    fn flush(&self) -> DeviceResult<()> {
        let mut disk = self.disk();
        disk.flushes += 1;
        if disk.failing_flushes > 0 {
            disk.failing_flushes -= 1;
            return Err(broken("flush"));
        }
        for (offset, bytes) in std::mem::take(&mut disk.pending) {
            disk.stable[offset..offset + bytes.len()].copy_from_slice(&bytes);
        }
        drop(disk);
        crate::sync::yield_now();
        Ok(())
    }
    fn discard(&self, _: u64, _: u64) -> DeviceResult<()> {
        Ok(())
    }
    fn submit(&self, request: Request, on_done: OnDone) {
        let is_data = request.offset_bytes < LOG_START * BLOCK_BYTES as u64;
        let result = if is_data && self.disk().failing_data {
            Err(broken("write"))
        } else {
            let slices = request.buffers.slices();
            self.write(request.offset_bytes, &slices, request.class, false)
        };
        on_done(result, request.buffers);
    }
}

pub(super) fn geometry(log_blocks: u64) -> LogGeometry {
    let total_blocks = LOG_START + log_blocks + 64;
    LogGeometry { volume_id: VOLUME, log_start_block: LOG_START, log_blocks, total_blocks }
}

pub(super) const START: LogStart = LogStart {
    point: ReplayPoint { position_blocks: 0, sequence: 1, prev_digest: 77 },
    epoch: 1,
    next_lsn: 1,
    transaction: 1,
    live_blocks: 0,
};

pub(super) fn open(device: &Arc<FaultyDevice>, log_blocks: u64, start: &LogStart) -> Log {
    let device: Arc<dyn Device> = Arc::clone(device) as _;
    Log::new(device, Arc::new(SystemClock::default()), geometry(log_blocks), start)
}

/// An operation that says `number`, with `pages` pages filled with it.
pub(super) fn operation(pool: &PagePool, number: u64, filler: usize, pages: u64) -> OpRecords {
    let mut op = OpRecords::new();
    op.put(Key::extent(1, number), &vec![number as u8; filler]).unwrap();
    for file_block in 0..pages {
        let mut page = pool.alloc_zeroed().unwrap();
        page.fill(number as u8);
        let page: PageRef = page.freeze();
        let sum = checksum(&page);
        op.payload(number, file_block, 0, Some(sum), page);
    }
    op
}
