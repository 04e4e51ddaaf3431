//! Latency of one class of operation: an HDR histogram and a time series of its maxima.
//!
//! Nanoseconds from 1 ns to 1000 s with three significant digits; larger values saturate and are
//! counted. Recorders are per thread and merged at the end, so recording takes no lock.

use std::ops::Range;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

const LOWEST_NS: u64 = 1;
const HIGHEST_NS: u64 = 1_000_000_000_000;
const DIGITS: u8 = 3;

/// Width of one point of a time series.
pub const SERIES_STEP: Duration = Duration::from_millis(100);

/// The percentiles every latency is reported with.
pub const PERCENTILES: [(&str, f64); 5] =
    [("p50", 50.0), ("p95", 95.0), ("p99", 99.0), ("p999", 99.9), ("p9999", 99.99)];

/// One point of a time series: the operations that *began* in one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SeriesPoint {
    /// Operations.
    pub count: u64,
    /// Their mean latency.
    pub mean_us: f64,
    /// The slowest of them.
    pub max_us: f64,
}

/// Records the latencies of one class of operation.
#[derive(Clone)]
pub struct Recorder {
    hist: Histogram<u64>,
    epoch: Instant,
    /// Per step: operations, sum of ns, maximum ns.
    steps: Vec<(u64, u64, u64)>,
    /// When each operation was due, and how long it took, if that is kept.
    each: Option<Vec<(Instant, Duration)>>,
}

impl Recorder {
    /// A recorder whose time series starts at `epoch`.
    pub fn new(epoch: Instant) -> Self {
        let mut hist = Histogram::new_with_bounds(LOWEST_NS, HIGHEST_NS, DIGITS)
            .unwrap_or_else(|_| unreachable!("constant bounds are valid"));
        hist.auto(false);
        Recorder { hist, epoch, steps: Vec::new(), each: None }
    }

    /// The same, and each operation is kept: see [`Recorder::without`].
    pub fn keeping(epoch: Instant) -> Self {
        Recorder { each: Some(Vec::new()), ..Recorder::new(epoch) }
    }

    /// Only the operations that were not under way, or waited for, within any of `spans`. For a recorder that keeps them.
    #[must_use]
    pub fn without(&self, spans: &[Range<Instant>]) -> Recorder {
        let mut rest = Recorder::new(self.epoch);
        for &(from, took) in self.each.iter().flatten() {
            if !spans.iter().any(|span| from < span.end && span.start < from + took) {
                rest.record_at(from, took);
            }
        }
        rest
    }

    /// Records an operation that was due (or began) at `from` and ended now.
    pub fn since(&mut self, from: Instant) -> Duration {
        let took = from.elapsed();
        self.record_at(from, took);
        took
    }

    /// Records an operation that was due at `from` and took `took` from then.
    pub fn record_at(&mut self, from: Instant, took: Duration) {
        let ns = took.as_nanos() as u64;
        self.record_ns(ns);
        if let Some(each) = &mut self.each {
            each.push((from, took));
        }
        let step = from.saturating_duration_since(self.epoch).as_millis() as usize
            / SERIES_STEP.as_millis() as usize;
        if step >= self.steps.len() {
            self.steps.resize(step + 1, (0, 0, 0));
        }
        let s = &mut self.steps[step];
        s.0 += 1;
        s.1 += ns;
        s.2 = s.2.max(ns);
    }

    /// Records a latency that belongs to no point in time.
    pub fn record_ns(&mut self, ns: u64) {
        self.hist.saturating_record(ns.max(LOWEST_NS));
    }

    /// Adds what another thread recorded against the same epoch.
    pub fn merge(&mut self, other: &Recorder) {
        // Same bounds on both sides: adding cannot fail.
        self.hist.add(&other.hist).unwrap_or_else(|_| unreachable!("same bounds"));
        if let Some(each) = &other.each {
            self.each.get_or_insert_default().extend(each);
        }
        if other.steps.len() > self.steps.len() {
            self.steps.resize(other.steps.len(), (0, 0, 0));
        }
        for (mine, theirs) in self.steps.iter_mut().zip(&other.steps) {
            mine.0 += theirs.0;
            mine.1 += theirs.1;
            mine.2 = mine.2.max(theirs.2);
        }
    }

    /// Operations recorded.
    pub fn count(&self) -> u64 {
        self.hist.len()
    }

    /// Mean latency.
    pub fn mean_us(&self) -> f64 {
        self.hist.mean() / 1e3
    }

    /// The latency that `percentile` percent of the operations did not exceed.
    pub fn percentile_us(&self, percentile: f64) -> f64 {
        if self.hist.is_empty() {
            return 0.0;
        }
        self.hist.value_at_percentile(percentile) as f64 / 1e3
    }

    /// The slowest operation.
    pub fn max_us(&self) -> f64 {
        if self.hist.is_empty() { 0.0 } else { self.hist.max() as f64 / 1e3 }
    }

    /// Share of operations that took at most `ns`.
    pub fn share_within_ns(&self, ns: u64) -> f64 {
        if self.hist.is_empty() { 0.0 } else { self.hist.quantile_below(ns) }
    }

    /// The curve for a percentile plot: (percentile, µs), denser towards the tail, and only as far
    /// as the number of operations supports.
    pub fn curve(&self) -> Vec<(f64, f64)> {
        const AT: [f64; 20] = [
            1.0, 10.0, 25.0, 50.0, 75.0, 80.0, 90.0, 95.0, 98.0, 99.0, 99.5, 99.8, 99.9, 99.95,
            99.98, 99.99, 99.995, 99.999, 99.9995, 99.9999,
        ];
        let n = self.count() as f64;
        AT.iter()
            .filter(|&&p| n * (100.0 - p) / 100.0 >= 0.999 || p <= 50.0)
            .filter(|_| n > 0.0)
            .map(|&p| (p, self.percentile_us(p)))
            .collect()
    }

    /// The time series, one point per [`SERIES_STEP`].
    pub fn series(&self) -> Vec<SeriesPoint> {
        self.steps
            .iter()
            .map(|&(count, sum, max)| SeriesPoint {
                count,
                mean_us: if count == 0 { 0.0 } else { sum as f64 / count as f64 / 1e3 },
                max_us: max as f64 / 1e3,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(range: std::ops::RangeInclusive<u64>) -> Recorder {
        let mut r = Recorder::new(Instant::now());
        for us in range {
            r.record_ns(us * 1000);
        }
        r
    }

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() <= b * 0.002
    }

    #[test]
    fn percentiles_of_a_known_distribution_hold_to_three_digits() {
        let r = filled(1..=10_000);
        assert!(close(r.percentile_us(50.0), 5000.0), "{}", r.percentile_us(50.0));
        assert!(close(r.percentile_us(99.0), 9900.0));
        assert!(close(r.percentile_us(99.99), 9999.0));
        assert!(close(r.max_us(), 10_000.0));
        assert!(close(r.mean_us(), 5000.5));
        assert!((r.share_within_ns(2_500_000) - 0.25).abs() < 0.002);
    }

    #[test]
    fn merging_equals_recording_together() {
        let mut a = filled(1..=500);
        a.merge(&filled(501..=1000));
        let whole = filled(1..=1000);
        for p in [1.0, 50.0, 99.0, 99.9, 100.0] {
            assert!((a.percentile_us(p) - whole.percentile_us(p)).abs() < f64::EPSILON);
        }
        assert_eq!(a.count(), 1000);
    }

    #[test]
    fn huge_and_zero_latencies_saturate_instead_of_getting_lost() {
        let mut r = Recorder::new(Instant::now());
        r.record_ns(0);
        r.record_ns(u64::MAX);
        assert_eq!(r.count(), 2);
        assert!(r.max_us() >= 1e9);
    }

    #[test]
    fn an_empty_recorder_reports_zeros_and_no_curve() {
        let r = Recorder::new(Instant::now());
        assert!(r.percentile_us(99.0).abs() < f64::EPSILON);
        assert!(r.curve().is_empty() && r.series().is_empty());
    }

    #[test]
    fn curve_stops_where_the_sample_ends() {
        let last = filled(1..=1000).curve().last().map(|p| p.0);
        assert_eq!(last, Some(99.9));
    }

    #[test]
    fn operations_that_met_a_span_are_left_out_and_all_others_are_not() {
        let epoch = Instant::now();
        let at = |ms: u64| epoch + Duration::from_millis(ms);
        let (mut one, mut other) = (Recorder::keeping(epoch), Recorder::keeping(epoch));
        for (due, took) in [(0, 9), (5, 10), (12, 1), (19, 30)] {
            one.record_at(at(due), Duration::from_millis(took));
        }
        other.record_at(at(20), Duration::from_millis(2));
        one.merge(&other);
        let rest = one.without(std::slice::from_ref(&(at(10)..at(20))));
        assert_eq!((one.count(), rest.count()), (5, 2));
        assert!(close(rest.max_us(), 9000.0), "{}", rest.max_us());
        assert_eq!(one.without(&[]).count(), 5);
    }

    #[test]
    fn series_puts_an_operation_where_it_was_due() {
        let epoch = Instant::now();
        let mut r = Recorder::new(epoch);
        r.record_at(epoch + Duration::from_millis(250), Duration::from_micros(70));
        r.record_at(epoch + Duration::from_millis(260), Duration::from_micros(30));
        let s = r.series();
        assert_eq!(s.len(), 3);
        assert_eq!(s[2], SeriesPoint { count: 2, mean_us: 50.0, max_us: 70.0 });
        assert_eq!(s[0].count, 0);
    }
}
