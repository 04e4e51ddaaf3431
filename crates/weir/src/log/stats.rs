//! Counters and latency histograms of the log: relaxed atomics, always on.

use crate::sync::atomic::{AtomicU64, Ordering};

/// Buckets of a [`Histogram`]: bucket b counts values of b significant bits.
pub const BUCKETS: usize = 65;

/// A log2 histogram that many threads may fill.
#[derive(Debug)]
pub struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    sum: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: std::array::from_fn(|_| AtomicU64::new(0)), sum: AtomicU64::new(0) }
    }
}

impl Histogram {
    /// Counts `value`.
    pub fn record(&self, value: u64) {
        let bucket = (u64::BITS - value.leading_zeros()) as usize;
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(value, Ordering::Relaxed);
    }

    /// The counts now. Not one moment's: recording goes on meanwhile.
    pub fn snapshot(&self) -> HistogramSnapshot {
        HistogramSnapshot {
            buckets: std::array::from_fn(|index| self.buckets[index].load(Ordering::Relaxed)),
            sum: self.sum.load(Ordering::Relaxed),
        }
    }
}

/// A histogram's counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HistogramSnapshot {
    /// Bucket 0 counts zeros, bucket b values from 2^(b-1) to 2^b - 1.
    pub buckets: [u64; BUCKETS],
    /// Sum of all values.
    pub sum: u64,
}

impl HistogramSnapshot {
    /// How many values were recorded.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident: $kind:ident),* $(,)?) => {
        /// What the log did since it was opened.
        #[derive(Debug, Default)]
        pub struct LogStats { $($(#[$doc])* pub $name: $kind),* }
        /// [`LogStats`] read out.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct LogStatsSnapshot { $($(#[$doc])* pub $name: counters!(@ $kind)),* }
        impl LogStats {
            /// All figures now.
            pub fn snapshot(&self) -> LogStatsSnapshot {
                LogStatsSnapshot { $($name: counters!(@read self.$name, $kind)),* }
            }
        }
    };
    (@ AtomicU64) => { u64 };
    (@ Histogram) => { HistogramSnapshot };
    (@read $field:expr, AtomicU64) => { $field.load(Ordering::Relaxed) };
    (@read $field:expr, Histogram) => { $field.snapshot() };
}

counters! {
    /// Operations appended.
    operations: AtomicU64,
    /// Frames written.
    frames: AtomicU64,
    /// Of these, frames that somebody waited for when they began to be written, for durability. Others are written because
    /// the queue grew long, or a checkpoint wants them.
    frames_awaited: AtomicU64,
    /// Of these, frames written while the one before was on its way, by who had joined its writer.
    frames_joined: AtomicU64,
    /// Bytes of frames written, padding and payload included.
    frame_bytes: AtomicU64,
    /// Payload blocks written.
    payload_blocks: AtomicU64,
    /// Data that was written home at the same time as its frame.
    beside_bytes: AtomicU64,
    /// Frame writes that failed and were repeated further on.
    write_retries: AtomicU64,
    /// Device flushes, the checkpoint's included.
    flushes: AtomicU64,
    /// Frames made durable by forced unit access, without a flush.
    fua_writes: AtomicU64,
    /// Commits that waited for durability and got it: blocked callers.
    commits: AtomicU64,
    /// Commits that had nothing to wait for: durable already.
    commits_found_durable: AtomicU64,
    /// As `commits`: callbacks.
    async_commits: AtomicU64,
    /// Wait from the arrival of a commit to the start of the round that covers it.
    queue_ns: Histogram,
    /// Time of a frame's write.
    frame_write_ns: Histogram,
    /// Time of a flush.
    flush_ns: Histogram,
    /// Wait from arrival to acknowledgement of a blocked caller.
    commit_ns: Histogram,
    /// Wait from arrival to acknowledgement of a callback.
    async_commit_ns: Histogram,
    /// Wait from the end of a flush until one whom it made durable is told. (Of the last flush: where they overlap, a
    /// wait is counted for less than it was.)
    acknowledge_ns: Histogram,
    /// When operations last became durable, by the monotonic clock.
    became_durable_ns: AtomicU64,
    /// Commits acknowledged by one flush.
    commits_per_flush: Histogram,
    /// Blocks of a frame.
    blocks_per_frame: Histogram,
}

/// Adds to a counter.
pub(super) fn add(counter: &AtomicU64, value: u64) {
    counter.fetch_add(value, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_powers_of_two() {
        let histogram = Histogram::default();
        for value in [0, 1, 2, 3, 4, 7, 8, u64::MAX >> 1] {
            histogram.record(value);
        }
        let snapshot = histogram.snapshot();
        assert_eq!(snapshot.buckets[..5], [1, 1, 2, 2, 1]);
        assert_eq!(snapshot.buckets[63], 1);
        assert_eq!(snapshot.count(), 8);
        assert_eq!(snapshot.sum, (u64::MAX >> 1) + 25);
    }
}
