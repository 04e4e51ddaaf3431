//! All figures of a volume as a list of named metrics: the one form that is printed, told as JSON and compared with an
//! earlier one.
//!
//! Names end in their units. The text is that of the BPF tools: plain figures one to a line, distributions as log2
//! histograms. Nothing here takes locks or reads clocks.

use super::Stats;
use crate::error::Error;
use crate::log::stats::{BUCKETS, HistogramSnapshot};
use crate::txn::checkpoint::Phase;
use std::borrow::Cow;
use std::fmt::{self, Display, Formatter};

/// A figure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Metric {
    /// Grows for as long as the volume is open.
    Count(u64),
    /// What is the case now.
    Gauge(u64),
    /// The same in words.
    State(String),
    /// How often which values were met.
    Distribution(Box<HistogramSnapshot>),
}

/// Metrics that belong together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// What they are of.
    pub name: String,
    /// Names and values, in the order in which they are to be read.
    pub metrics: Vec<(String, Metric)>,
}

/// All metrics, or their differences between two moments.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    /// See [`Group`].
    pub groups: Vec<Group>,
}

impl Metric {
    /// What was added since `earlier`; gauges and states as they are now.
    #[must_use]
    fn since(&self, earlier: Option<&Self>) -> Self {
        match (self, earlier) {
            (Self::Count(now), Some(Self::Count(before))) => {
                Self::Count(now.saturating_sub(*before))
            }
            (Self::Distribution(now), Some(Self::Distribution(before))) => {
                Self::Distribution(Box::new(HistogramSnapshot {
                    buckets: std::array::from_fn(|index| {
                        now.buckets[index].saturating_sub(before.buckets[index])
                    }),
                    sum: now.sum.saturating_sub(before.sum),
                }))
            }
            (now, _) => now.clone(),
        }
    }

    /// Nothing was counted.
    fn is_nothing(&self) -> bool {
        match self {
            Self::Count(value) => *value == 0,
            Self::Distribution(snapshot) => snapshot.count() == 0,
            Self::Gauge(_) | Self::State(_) => false,
        }
    }
}

impl Report {
    /// The metric `name` of `group`.
    pub fn find(&self, group: &str, name: &str) -> Option<&Metric> {
        let group = self.groups.iter().find(|found| found.name == group)?;
        group.metrics.iter().find(|(found, _)| found == name).map(|(_, metric)| metric)
    }

    /// What happened since `earlier`: differences of counts and distributions; gauges and states as they are now.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let groups = self.groups.iter().map(|group| Group {
            name: group.name.clone(),
            metrics: group
                .metrics
                .iter()
                .map(|(name, metric)| (name.clone(), metric.since(earlier.find(&group.name, name))))
                .collect(),
        });
        Self { groups: groups.collect() }
    }
}

/// Widest bar of a histogram.
const BAR_COLUMNS: u64 = 40;

impl Display for Report {
    /// Plain figures of each group on lines of their own, then its distributions. What did not happen is left out.
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        for group in &self.groups {
            let shown: Vec<_> =
                group.metrics.iter().filter(|(_, metric)| !metric.is_nothing()).collect();
            if shown.is_empty() {
                continue;
            }
            writeln!(formatter, "[{}]", group.name)?;
            for (name, metric) in &shown {
                match metric {
                    Metric::Count(value) | Metric::Gauge(value) => {
                        writeln!(formatter, "{name}: {value}")?;
                    }
                    Metric::State(text) => writeln!(formatter, "{name}: {text}")?,
                    Metric::Distribution(_) => {}
                }
            }
            for (name, metric) in &shown {
                if let Metric::Distribution(snapshot) = metric {
                    write!(formatter, "{}", render(name, snapshot))?;
                }
            }
            writeln!(formatter)?;
        }
        Ok(())
    }
}

/// One distribution as text:
///
/// ```text
/// @flush_ns: 300 times, mean 52103
/// [32K, 64K)           288 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|
/// [64K, 128K)           12 |@                                       |
/// ```
pub fn render(name: &str, snapshot: &HistogramSnapshot) -> String {
    let count = snapshot.count();
    if count == 0 {
        return format!("@{name}: never\n");
    }
    let times = if count == 1 { "once".to_owned() } else { format!("{count} times") };
    let mut lines = vec![format!("@{name}: {times}, mean {}", snapshot.sum / count)];
    let filled = |count: &u64| *count > 0;
    let first = snapshot.buckets.iter().position(filled).unwrap_or(0);
    let last = snapshot.buckets.iter().rposition(filled).unwrap_or(0);
    let most = snapshot.buckets.iter().copied().max().unwrap_or(1).max(1);
    for bucket in first..=last {
        let here = snapshot.buckets[bucket];
        let columns = here.saturating_mul(BAR_COLUMNS).div_ceil(most) as usize;
        let bar = "@".repeat(columns);
        let width = BAR_COLUMNS as usize;
        lines.push(format!("{:<16} {here:>10} |{bar:<width$}|", interval(bucket)));
    }
    lines.join("\n") + "\n"
}

/// The values that a bucket counts.
fn interval(bucket: usize) -> String {
    match bucket {
        0 => "[0]".to_owned(),
        1 => "[1]".to_owned(),
        64 => format!("[{}, ...)", power(63)),
        bits => format!("[{}, {})", power(bits - 1), power(bits)),
    }
}

/// 2 to this, with a unit: 1K is 1024.
fn power(bits: usize) -> String {
    const UNITS: [&str; 7] = ["", "K", "M", "G", "T", "P", "E"];
    format!("{}{}", 1_u64 << (bits % 10), UNITS[(bits / 10).min(UNITS.len() - 1)])
}

/// `blocks` counted in blocks, as bytes: both are powers of two.
fn as_bytes(blocks: &HistogramSnapshot) -> HistogramSnapshot {
    const SHIFT: usize = 12;
    let mut bytes = HistogramSnapshot { buckets: [0; BUCKETS], sum: blocks.sum << SHIFT };
    bytes.buckets[0] = blocks.buckets[0];
    for bucket in 1..BUCKETS {
        bytes.buckets[(bucket + SHIFT).min(BUCKETS - 1)] += blocks.buckets[bucket];
    }
    bytes
}

/// What a checkpoint in this phase does, and so what whoever waits for it waits for.
fn waits_for(stats: &Stats) -> Cow<'static, str> {
    match &stats.checkpoint_refused {
        Some(Error::HostFull(_)) => "space on the host of the volume: free some there".into(),
        Some(error) => {
            format!("the next attempt, since the disk has refused this one: {error}").into()
        }
        None => phase_waits_for(stats.checkpoint_phase).into(),
    }
}

const fn phase_waits_for(phase: Phase) -> &'static str {
    match phase {
        Phase::Running => "nothing: none is under way",
        Phase::CommitStart => "logged pages that go home",
        Phase::CommitDoing => "the swap of the delta",
        Phase::Unblocked => "nodes, bitmaps and root that are being written",
        Phase::SuperCommitted => "the superblock and its flush",
        Phase::Completed => "the release of blocks and log",
        Phase::Aborted => "nothing: it failed, and the volume was shut down",
    }
}

/// Collects one group.
struct Collect(Group);

impl Collect {
    fn new(name: &str) -> Self {
        Self(Group { name: name.to_owned(), metrics: Vec::new() })
    }
    fn add(mut self, name: &str, metric: Metric) -> Self {
        self.0.metrics.push((name.to_owned(), metric));
        self
    }
    fn count(self, name: &str, value: u64) -> Self {
        self.add(name, Metric::Count(value))
    }
    fn gauge(self, name: &str, value: u64) -> Self {
        self.add(name, Metric::Gauge(value))
    }
    fn state(self, name: &str, text: impl Into<String>) -> Self {
        self.add(name, Metric::State(text.into()))
    }
    fn times(self, name: &str, snapshot: &HistogramSnapshot) -> Self {
        self.add(name, Metric::Distribution(Box::new(snapshot.clone())))
    }
}

impl From<&Stats> for Report {
    fn from(stats: &Stats) -> Self {
        Self {
            groups: vec![
                volume(stats),
                durability(stats),
                log(stats),
                checkpoint(stats),
                stalls(stats),
                writeback(stats),
                cache(stats),
                space(stats),
            ],
        }
    }
}

fn volume(stats: &Stats) -> Group {
    let state = match &stats.shutdown_reason {
        Some(reason) => format!("shut down, nothing can be written: {reason}"),
        None => "ok".to_owned(),
    };
    Collect::new("volume")
        .state("state", state)
        .gauge("last_lsn", stats.last_lsn)
        .gauge("durable_lsn", stats.durable_lsn)
        .gauge("tickets", stats.tickets)
        .count("checksum_errors", stats.checksum_errors)
        .count("writeback_errors", stats.writeback_errors)
        .count("purge_errors", stats.purge_errors)
        .0
}

/// The waits on the way to durability, in their order.
fn durability(stats: &Stats) -> Group {
    let log = &stats.log;
    Collect::new("durability")
        .count("fsyncs", stats.fsyncs)
        .count("volume_syncs", stats.volume_syncs)
        .count("failed_syncs", stats.failed_syncs)
        .count("commits", log.commits)
        .count("async_commits", log.async_commits)
        .count("commits_found_durable", log.commits_found_durable)
        .count("sync_home_pages", stats.sync_home_pages)
        .count("sync_moved_pages", stats.sync_moved_pages)
        .count("sync_logged_pages", stats.sync_logged_pages)
        .times("data_phase_ns", &stats.data_phase_ns)
        .times("batch_phase_ns", &stats.batch_phase_ns)
        .times("barrier_call_ns", &stats.barrier_call_ns)
        .times("barrier_data_ns", &stats.barrier_data_ns)
        .times("queue_ns", &log.queue_ns)
        .times("frame_write_ns", &log.frame_write_ns)
        .times("flush_ns", &log.flush_ns)
        .times("acknowledge_ns", &log.acknowledge_ns)
        .times("commit_ns", &log.commit_ns)
        .times("async_commit_ns", &log.async_commit_ns)
        .times("commits_per_flush", &log.commits_per_flush)
        .times("frame_bytes", &as_bytes(&log.blocks_per_frame))
        .0
}

fn log(stats: &Stats) -> Group {
    let log = &stats.log;
    Collect::new("log")
        .count("operations", log.operations)
        .count("frames", log.frames)
        .count("frames_awaited", log.frames_awaited)
        .count("frames_joined", log.frames_joined)
        .count("written_bytes", log.frame_bytes)
        .count("payload_blocks", log.payload_blocks)
        .count("beside_bytes", log.beside_bytes)
        .count("flushes", log.flushes)
        .count("fua_writes", log.fua_writes)
        .count("write_retries", log.write_retries)
        .gauge("ring_blocks", stats.log_fill.ring_blocks)
        .gauge("used_blocks", stats.log_fill.used_blocks)
        .gauge("logged_pages", stats.logged_pages)
        .0
}

fn checkpoint(stats: &Stats) -> Group {
    let mut group = Collect::new("checkpoint")
        .state("phase", format!("{:?}", stats.checkpoint_phase))
        .state("waits_for", waits_for(stats))
        .gauge("in_step_us", stats.checkpoint_in_step_us)
        .gauge("writers", stats.log_fill.writers)
        .gauge("dirty_inodes", stats.dirty_inodes)
        .gauge("delta_bytes", stats.delta_bytes)
        .count("checkpoints", stats.checkpoints)
        .times("gate_hold_ns", &stats.freeze_ns)
        .times("whole_us", &stats.checkpoint_us);
    for (name, snapshot) in super::CHECKPOINT_STEPS.iter().zip(&stats.checkpoint_step_us) {
        group = group.times(&format!("{name}_us"), snapshot);
    }
    group.0
}

fn stalls(stats: &Stats) -> Group {
    Collect::new("stalls")
        .count("throttled", stats.throttled)
        .count("log_space", stats.log_stalls)
        .count("free_blocks", stats.space_stalls)
        .count("written_in_place", stats.in_place_writes)
        .count("memory", stats.memory_stalls)
        .times("throttle_us", &stats.throttle_us)
        .times("log_delay_us", &stats.log_delay_us)
        .times("stall_us", &stats.stall_us)
        .0
}

/// What background writeback is allowed and does.
fn writeback(stats: &Stats) -> Group {
    Collect::new("writeback")
        .gauge("limit_bytes", stats.pacing.limit_bytes)
        .gauge("in_flight_bytes", stats.pacing.in_flight_bytes)
        .gauge("handover_pages", stats.handover_pages)
        .count("handed_over_pages", stats.handed_over_pages)
        .count("taken_along", stats.taken_along)
        .count("early_home_pages", stats.early_home_pages)
        .count("rests", stats.writeback_rests)
        .times("pacing_wait_us", &stats.pacing_wait_us)
        .times("let_pass_us", &stats.let_pass_us)
        .times("read_us", &stats.read_us)
        .0
}

fn cache(stats: &Stats) -> Group {
    Collect::new("cache")
        .count("hits", stats.cache_hits)
        .count("misses", stats.cache_misses)
        .count("evicted_pages", stats.evicted_pages)
        .gauge("pages_in_use", stats.pages_in_use)
        .gauge("pages_capacity", stats.pages_capacity)
        .gauge("dirty_pages", stats.dirty_pages)
        .gauge("inodes_in_memory", stats.inodes_in_memory)
        .count("node_hits", stats.nodes.hits)
        .count("node_misses", stats.nodes.misses)
        .count("damaged_nodes", stats.nodes.damaged)
        .gauge("nodes", stats.nodes.nodes)
        .0
}

fn space(stats: &Stats) -> Group {
    Collect::new("space")
        .gauge("total_blocks", stats.space.total_blocks)
        .gauge("free_blocks", stats.space.free_blocks)
        .gauge("pending_free_blocks", stats.space.pending_free_blocks)
        .gauge("reserved_blocks", stats.space.reserved_blocks)
        .gauge("room_blocks", stats.space.room_blocks)
        .0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(values: &[(usize, u64)], sum: u64) -> HistogramSnapshot {
        let mut buckets = [0; BUCKETS];
        for (bucket, count) in values {
            buckets[*bucket] = *count;
        }
        HistogramSnapshot { buckets, sum }
    }

    fn report(count: u64, gauge: u64, distribution: &HistogramSnapshot) -> Report {
        let group = Collect::new("g")
            .count("count", count)
            .gauge("gauge", gauge)
            .state("state", "ok")
            .times("wait_us", distribution);
        Report { groups: vec![group.0] }
    }

    #[test]
    fn a_histogram_is_drawn_from_its_first_to_its_last_filled_bucket() {
        let text = render("us", &snapshot(&[(3, 40), (5, 10)], 300));
        let bar = |columns: usize| format!("|{:<40}|", "@".repeat(columns));
        let expected = format!(
            "@us: 50 times, mean 6\n[4, 8)                   40 {}\n[8, 16)                   0 {}\n\
             [16, 32)                 10 {}\n",
            bar(40),
            bar(0),
            bar(10)
        );
        assert_eq!(text, expected);
        assert_eq!(render("us", &snapshot(&[], 0)), "@us: never\n");
    }

    #[test]
    fn intervals_have_units_of_1024_up_to_the_last() {
        assert_eq!(interval(0), "[0]");
        assert_eq!(interval(1), "[1]");
        assert_eq!(interval(11), "[1K, 2K)");
        assert_eq!(interval(10), "[512, 1K)");
        assert_eq!(interval(63), "[4E, 8E)");
        assert_eq!(interval(64), "[8E, ...)");
    }

    #[test]
    fn a_value_of_one_in_a_full_histogram_still_shows() {
        let text = render("n", &snapshot(&[(1, 1), (2, u64::MAX / 64)], 1));
        assert!(text.contains("1 |@ "), "{text}");
    }

    #[test]
    fn blocks_become_bytes_bucket_by_bucket() {
        let bytes = as_bytes(&snapshot(&[(1, 7), (6, 2)], 7 + 2 * 33));
        assert_eq!(bytes, snapshot(&[(13, 7), (18, 2)], (7 + 2 * 33) * 4096));
    }

    #[test]
    fn a_difference_subtracts_what_is_counted_and_keeps_what_is_the_case() {
        let before = report(5, 9, &snapshot(&[(3, 4)], 20));
        let now = report(8, 2, &snapshot(&[(3, 5), (4, 1)], 35));
        assert_eq!(now.since(&before), report(3, 2, &snapshot(&[(3, 1), (4, 1)], 15)));
        // A volume that was opened anew counts from the start.
        assert_eq!(before.since(&now).find("g", "count"), Some(&Metric::Count(0)));
        assert_eq!(now.since(&Report::default()), now);
    }

    #[test]
    fn what_did_not_happen_is_not_printed() {
        let text = report(0, 0, &snapshot(&[], 0)).to_string();
        assert_eq!(text, "[g]\ngauge: 0\nstate: ok\n\n");
    }
}
