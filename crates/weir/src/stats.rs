//! Counters of an open volume, and [`Stats`]: all figures read out at once. [`report`] names, prints and compares them.

pub mod report;

use crate::alloc::SpaceTotals;
use crate::error::Error;
use crate::file::paced::PacingStats;
use crate::log::Fill;
use crate::log::stats::{Histogram, HistogramSnapshot, LogStatsSnapshot};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::tree::CacheStats;
use crate::txn::checkpoint::Phase;

pub use report::Report;
use std::cell::Cell;

/// Steps of a checkpoint whose time is taken, in their order: pages and attributes go home; the delta is swapped; the log's
/// frames are written; the delta is merged into the trees; bitmaps and root are written; the flush; the superblock, with its flush.
pub const CHECKPOINT_STEPS: [&str; 7] =
    ["home", "freeze", "log", "merge", "space", "flush", "superblock"];

/// A counter that many threads may bump.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `count`.
    pub fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }
    /// The value now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A counter that is bumped on every cached read: spread over cache lines, so that readers on different cores do not
/// pass one line around.
#[derive(Debug, Default)]
pub struct HotCounter([Padded; 8]);

#[derive(Debug, Default)]
#[repr(align(64))]
struct Padded(AtomicU64);

impl HotCounter {
    /// Adds `count`.
    pub fn add(&self, count: u64) {
        self.0[thread_part() % self.0.len()].0.fetch_add(count, Ordering::Relaxed);
    }
    /// The value now.
    pub fn get(&self) -> u64 {
        self.0.iter().map(|part| part.0.load(Ordering::Relaxed)).sum()
    }
}

/// Threads that have a number. Not an engine primitive, so it is not part of the deterministic scheduler's world.
static NUMBERED: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

thread_local! {
    static PART: Cell<usize> = Cell::new(NUMBERED.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
}

/// A number of the calling thread, for what is spread over threads.
pub fn thread_part() -> usize {
    PART.get()
}

/// Gives the calling thread this number: what comes of a simulation does not depend on how many threads the process has had.
pub fn set_thread_part(part: usize) {
    PART.set(part);
}

/// What the engine counts. Relaxed atomics, always on.
#[derive(Debug, Default)]
pub struct Counters {
    /// Reads served from the cache alone.
    pub cache_hits: HotCounter,
    /// Reads that found something missing.
    pub cache_misses: Counter,
    /// Clean pages taken out of the cache.
    pub evicted_pages: Counter,
    /// Syncs of files and directories: calls of fsync and fdatasync, and tickets.
    pub fsyncs: Counter,
    /// Syncs of the volume.
    pub volume_syncs: Counter,
    /// Syncs, tickets and waits of batches for durability that ended with an error.
    pub failed_syncs: Counter,
    /// Blocks that did not match their checksum.
    pub checksum_errors: Counter,
    /// Pieces of dirty data that could not be written home.
    pub writeback_errors: Counter,
    /// Unlinked inodes that could not be purged (recovery will).
    pub purge_errors: Counter,
    /// Checkpoints published.
    pub checkpoints: Counter,
    /// Operations delayed at the entry.
    pub throttled: Counter,
    /// Operations that had to wait at the entry for log space.
    pub log_stalls: Counter,
    /// Operations that had to wait at the entry for free blocks.
    pub space_stalls: Counter,
    /// Pieces of writes that went in place, each durable at once, because the volume is full.
    pub in_place_writes: Counter,
    /// Calls that had to wait for a page frame.
    pub memory_stalls: Counter,
    /// Pages written home because a range was handed over (`sync_range`, `expire`).
    pub handed_over_pages: Counter,
    /// Files that a sync of another took along.
    pub taken_along: Counter,
    /// Pages that a sync sent home, before its frame or beside it.
    pub sync_home_pages: Counter,
    /// Of those beside their frame, the pages that had a home before, and have another now.
    pub sync_moved_pages: Counter,
    /// Pages of a sync that went into the log.
    pub sync_logged_pages: Counter,
    /// Logged pages brought home ahead of a checkpoint.
    pub early_home_pages: Counter,
    /// Rests of those who write much back, for others to have the processor.
    pub writeback_rests: Counter,
    /// Reads from the device that somebody waited for, in microseconds.
    pub read_us: Histogram,
    /// Waits of background writeback for its turn at the device, in microseconds.
    pub pacing_wait_us: Histogram,
    /// Waits of large data for frames and flushes that were on their way to the device, in microseconds.
    pub let_pass_us: Histogram,
    /// Delays at the entry of a sync for the log's fill, in microseconds.
    pub log_delay_us: Histogram,
    /// Delays at the entry, in microseconds.
    pub throttle_us: Histogram,
    /// Waits for log space, blocks or page frames, in microseconds.
    pub stall_us: Histogram,
    /// Time a checkpoint held the store to swap the delta, in nanoseconds.
    pub freeze_ns: Histogram,
    /// Whole checkpoints, in microseconds.
    pub checkpoint_us: Histogram,
    /// Steps of checkpoints, in microseconds: see [`CHECKPOINT_STEPS`].
    pub checkpoint_step_us: [Histogram; CHECKPOINT_STEPS.len()],
    /// First half of a sync, of a file, a directory or the volume: from the call, or the submission of a ticket, until what it covers is in the
    /// log's open frame, or home. In nanoseconds.
    pub data_phase_ns: Histogram,
    /// What commits of batches took until the log had all of it: locks, data too large for the log, log space. In nanoseconds.
    pub batch_phase_ns: Histogram,
    /// What calls that raised a barrier took: room in the log, and in what others' barriers had to send home. In nanoseconds.
    pub barrier_call_ns: Histogram,
    /// From when a barrier was raised that had data to send home until that was home. In nanoseconds.
    pub barrier_data_ns: Histogram,
}

impl Counters {
    /// Counts a sync of a file or directory whose first half took so long.
    pub fn count_sync(&self, data_phase_ns: u64) {
        self.fsyncs.add(1);
        self.data_phase_ns.record(data_phase_ns);
    }

    /// The same of a sync of the volume.
    pub fn count_volume_sync(&self, data_phase_ns: u64) {
        self.volume_syncs.add(1);
        self.data_phase_ns.record(data_phase_ns);
    }

    /// Counts what somebody who asked for durability is told, if it is an error.
    pub fn count_failed<T, E>(&self, told: Result<T, E>) -> Result<T, E> {
        if told.is_err() {
            self.failed_syncs.add(1);
        }
        told
    }
}

/// All figures of an open volume.
#[derive(Debug, Clone)]
pub struct Stats {
    /// Reads served from the cache alone.
    pub cache_hits: u64,
    /// Reads that found something missing.
    pub cache_misses: u64,
    /// Clean pages taken out of the cache.
    pub evicted_pages: u64,
    /// Syncs of files and directories that have got as far as to wait for the log: calls of fsync and fdatasync, and tickets.
    pub fsyncs: u64,
    /// Syncs of the volume that have got as far, those of checkpoints that are asked for and of closing included.
    pub volume_syncs: u64,
    /// Syncs, tickets and waits of batches for durability that ended with an error.
    pub failed_syncs: u64,
    /// Blocks that did not match their checksum.
    pub checksum_errors: u64,
    /// Pieces of dirty data that could not be written home.
    pub writeback_errors: u64,
    /// Unlinked inodes that could not be purged.
    pub purge_errors: u64,
    /// Checkpoints published.
    pub checkpoints: u64,
    /// Where the running checkpoint is.
    pub checkpoint_phase: Phase,
    /// What the device has refused to it last, if it did: it is tried again, ten times a second at most.
    pub checkpoint_refused: Option<Error>,
    /// Operations delayed at the entry.
    pub throttled: u64,
    /// Waits at the entry for log space.
    pub log_stalls: u64,
    /// Waits at the entry for free blocks.
    pub space_stalls: u64,
    /// Pieces of writes that went in place, each durable at once, because the volume is full.
    pub in_place_writes: u64,
    /// Waits for a page frame.
    pub memory_stalls: u64,
    /// Pages written home because a range was handed over (`sync_range`, `expire`).
    pub handed_over_pages: u64,
    /// New files that were closed unsynced and taken along by the sync of another: their own finds everything durable.
    pub taken_along: u64,
    /// Dirty pages of such ranges that wait or are under way.
    pub handover_pages: u64,
    /// Pages that a sync sent home, before its frame or beside it.
    pub sync_home_pages: u64,
    /// Of those beside their frame, the pages that had a home before, and have another now.
    pub sync_moved_pages: u64,
    /// Pages of a sync that went into the log.
    pub sync_logged_pages: u64,
    /// Logged pages brought home ahead of a checkpoint.
    pub early_home_pages: u64,
    /// Rests of those who write much back while there is foreground I/O, for others to have the processor.
    pub writeback_rests: u64,
    /// How much background writeback may have in flight, and has.
    pub pacing: PacingStats,
    /// Reads from the device that somebody waited for, in microseconds.
    pub read_us: HistogramSnapshot,
    /// Waits of background writeback for its turn at the device, in microseconds.
    pub pacing_wait_us: HistogramSnapshot,
    /// Waits of large data for frames and flushes that were on their way to the device, in microseconds.
    pub let_pass_us: HistogramSnapshot,
    /// Delays at the entry of a sync for the log's fill, in microseconds.
    pub log_delay_us: HistogramSnapshot,
    /// Delays at the entry, in microseconds.
    pub throttle_us: HistogramSnapshot,
    /// Waits for log space, blocks or page frames, in microseconds.
    pub stall_us: HistogramSnapshot,
    /// Time a checkpoint held the store to swap the delta, in nanoseconds.
    pub freeze_ns: HistogramSnapshot,
    /// Whole checkpoints, in microseconds.
    pub checkpoint_us: HistogramSnapshot,
    /// Steps of checkpoints, in microseconds: see [`CHECKPOINT_STEPS`].
    pub checkpoint_step_us: [HistogramSnapshot; CHECKPOINT_STEPS.len()],
    /// How long the running checkpoint has been in its step, in microseconds.
    pub checkpoint_in_step_us: u64,
    /// First half of a sync, of a file, a directory or the volume: from the call, or the submission of a ticket, until what it covers is in the
    /// log's open frame, or home. In nanoseconds.
    pub data_phase_ns: HistogramSnapshot,
    /// What commits of batches took until the log had all of it: locks, data too large for the log, log space. In nanoseconds.
    pub batch_phase_ns: HistogramSnapshot,
    /// What calls that raised a barrier took: room in the log, and in what others' barriers had to send home. In nanoseconds.
    pub barrier_call_ns: HistogramSnapshot,
    /// From when a barrier was raised that had data to send home until that was home. In nanoseconds.
    pub barrier_data_ns: HistogramSnapshot,
    /// Tickets that have not ended.
    pub tickets: u64,
    /// Why the volume was shut down, if it was.
    pub shutdown_reason: Option<String>,
    /// The log: operations, frames, flushes, waits.
    pub log: LogStatsSnapshot,
    /// How full the log is.
    pub log_fill: Fill,
    /// Everything up to here is durable.
    pub durable_lsn: u64,
    /// The last operation.
    pub last_lsn: u64,
    /// Pages of the log that are not home.
    pub logged_pages: u64,
    /// Tree nodes in memory.
    pub nodes: CacheStats,
    /// Blocks.
    pub space: SpaceTotals,
    /// Page frames in use and allowed.
    pub pages_in_use: u64,
    /// Page frames allowed.
    pub pages_capacity: u64,
    /// Pages dirty or under writeback.
    pub dirty_pages: u64,
    /// Inodes in memory.
    pub inodes_in_memory: u64,
    /// Inodes on the dirty list.
    pub dirty_inodes: u64,
    /// Memory of the deltas in bytes, and of the changes of space that belong to them.
    pub delta_bytes: u64,
}
