//! How many bytes of background writeback may be in flight at the device.
//!
//! Writeback fills whatever queue the device has, and a foreground read then waits behind it. The
//! pacer watches the latency of foreground I/O (uncached reads and log writes) and holds writeback to
//! as many bytes in flight as that latency bears: additive increase while latency is fine, halving
//! when it is not (AIMD), between [`MIN_IN_FLIGHT_BYTES`] and [`MAX_IN_FLIGHT_BYTES`]. A request counts for [`cost_bytes`],
//! because many small ones keep a disk busy for longer than their bytes do.
//!
//! "Fine" is relative to the device: the pacer keeps the best typical latency it saw as its baseline.
//! A device may become slower, so the baseline rises too, but only by what writeback cannot be
//! blamed for: latency while there is no writeback, or while it is at its minimum. (A baseline that
//! followed any latency would let a long checkpoint get used to the spikes it causes.) Without
//! foreground I/O nobody suffers, and the limit doubles; where foreground I/O begins, it starts again from
//! [`START_IN_FLIGHT_BYTES`], because what is in flight already cannot be taken back.
//!
//! A sync's data is written for somebody who waits, so the limit is not for it; but while others have foreground I/O it comes in
//! small rounds ([`Pacer::is_foreground_active`]), and background writeback makes room for it.
//!
//! The policy is pure: latencies and the time come from the caller.

/// Writeback always may have this much in flight.
pub const MIN_IN_FLIGHT_BYTES: u64 = 512 << 10;
/// Writeback never has more than this in flight.
pub const MAX_IN_FLIGHT_BYTES: u64 = 32 << 20;
/// What writeback has before there was any foreground I/O.
pub const FIRST_IN_FLIGHT_BYTES: u64 = 16 << 20;
/// What writeback has when foreground I/O begins: four requests.
pub const START_IN_FLIGHT_BYTES: u64 = 1 << 20;
/// Largest request of writeback while there is foreground I/O.
pub const SHARED_REQUEST_BYTES: u64 = 256 << 10;
/// What a request costs the disk beside its bytes, as bytes: 256 requests of 8 KiB kept a read waiting for 2.1 ms where
/// 2 MiB in one piece take 0.9.
const REQUEST_COST_BYTES: u64 = 16 << 10;
/// Foreground I/O counts as going on for so long after the last.
const ACTIVE_US: u64 = 3 * INTERVAL_US;
/// What one good interval adds.
const INCREASE_BYTES: u64 = 256 << 10;
/// How often the limit is reconsidered.
pub const INTERVAL_US: u64 = 10_000;
/// Latency is too high above this multiple of the baseline ...
const TOLERATED_MULTIPLE: u64 = 3;
/// ... but never below this, whatever the baseline: fast devices jitter.
const TOLERATED_US: u64 = 300;
/// The baseline rises by at most one part in this many in an interval.
const BASELINE_RISE: u64 = 64;
/// After a decrease the limit rests for this many intervals: what was in flight has to drain first.
const REST_INTERVALS: u32 = 2;

/// What a request of `bytes` counts for.
pub const fn cost_bytes(bytes: u64) -> u64 {
    bytes.saturating_add(REQUEST_COST_BYTES)
}

/// See the module's head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pacer {
    limit_bytes: u64,
    /// Best average of an interval, slowly rising; none before the first sample. In nanoseconds, to
    /// let small values rise.
    baseline_ns: Option<u64>,
    interval_end_us: u64,
    /// Foreground I/O goes on until then.
    active_until_us: u64,
    /// Of the running interval.
    samples: u64,
    sum_us: u64,
    max_us: u64,
    /// Writeback had something to write in the running interval.
    was_writing: bool,
    /// Writeback used all it was allowed in the running interval.
    was_limited: bool,
    rest: u32,
}

impl Default for Pacer {
    fn default() -> Self {
        Self {
            limit_bytes: FIRST_IN_FLIGHT_BYTES,
            baseline_ns: None,
            interval_end_us: 0,
            active_until_us: 0,
            samples: 0,
            sum_us: 0,
            max_us: 0,
            was_writing: false,
            was_limited: false,
            rest: 0,
        }
    }
}

impl Pacer {
    /// A pacer that knows nothing of its device yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes that writeback may have in flight now.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// True when a request of `bytes` may be submitted with `in_flight_bytes` under way. One request
    /// may always be, however large.
    pub fn may_submit(&mut self, in_flight_bytes: u64, bytes: u64) -> bool {
        let may = in_flight_bytes == 0
            || in_flight_bytes.checked_add(bytes).is_some_and(|sum| sum <= self.limit_bytes);
        self.was_writing = true;
        self.was_limited |= !may;
        may
    }

    /// Notes the latency of a foreground I/O that went to the device.
    pub fn on_foreground_io(&mut self, latency_us: u64, now_us: u64) {
        self.on_time(now_us);
        if !self.is_foreground_active(now_us) {
            self.limit_bytes = self.limit_bytes.min(START_IN_FLIGHT_BYTES);
        }
        self.active_until_us = now_us.saturating_add(ACTIVE_US);
        self.samples += 1;
        self.sum_us = self.sum_us.saturating_add(latency_us);
        self.max_us = self.max_us.max(latency_us);
    }

    /// True while somebody reads from the device or writes to the log.
    pub fn is_foreground_active(&self, now_us: u64) -> bool {
        now_us < self.active_until_us
    }

    /// Lets time pass; to be called at least whenever writeback has something to submit.
    pub fn on_time(&mut self, now_us: u64) {
        if now_us < self.interval_end_us {
            return;
        }
        self.end_interval(now_us);
        self.interval_end_us = now_us.saturating_add(INTERVAL_US);
    }

    /// Latency above which the limit is halved; none before the first sample.
    pub fn tolerated_us(&self) -> Option<u64> {
        let baseline_us = self.baseline_ns? / 1000;
        Some(baseline_us.saturating_mul(TOLERATED_MULTIPLE).max(TOLERATED_US))
    }

    fn end_interval(&mut self, now_us: u64) {
        if let Some(average_us) = self.sum_us.checked_div(self.samples) {
            self.learn(average_us);
            // A single sample says little about the tail; of several the worst counts half.
            let tail_us = if self.samples >= 4 { self.max_us / 2 } else { 0 };
            self.judge(average_us.max(tail_us));
        } else if self.was_limited && !self.is_foreground_active(now_us) {
            // Nobody reads, and writeback would use more.
            self.grow(self.limit_bytes);
        }
        self.rest = self.rest.saturating_sub(1);
        (self.samples, self.sum_us, self.max_us) = (0, 0, 0);
        (self.was_writing, self.was_limited) = (false, false);
    }

    fn judge(&mut self, latency_us: u64) {
        if self.rest > 0 {
            return;
        }
        let too_high = self.tolerated_us().is_some_and(|tolerated_us| latency_us > tolerated_us);
        if too_high && self.was_writing {
            self.limit_bytes = (self.limit_bytes / 2).max(MIN_IN_FLIGHT_BYTES);
            self.rest = REST_INTERVALS + 1;
        } else if !too_high && self.was_limited {
            self.grow(INCREASE_BYTES);
        }
    }

    fn grow(&mut self, bytes: u64) {
        self.limit_bytes = (self.limit_bytes + bytes).min(MAX_IN_FLIGHT_BYTES);
    }

    fn learn(&mut self, average_us: u64) {
        let average_ns = average_us.saturating_mul(1000);
        let baseline = self.baseline_ns.unwrap_or(average_ns);
        let innocent = !self.was_writing || self.limit_bytes == MIN_IN_FLIGHT_BYTES;
        let rise = if innocent { baseline / BASELINE_RISE + 1 } else { 0 };
        self.baseline_ns = Some(baseline.saturating_add(rise).min(average_ns));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A device whose foreground latency grows with the writeback in flight. Runs `intervals` with a
    /// writeback that always wants more; answers limit and latency of every interval.
    fn run(
        pacer: &mut Pacer,
        now_us: &mut u64,
        intervals: usize,
        latency_us: impl Fn(u64) -> u64,
        reads: u64,
    ) -> Vec<(u64, u64)> {
        let mut history = Vec::new();
        for _ in 0..intervals {
            let latency = latency_us(pacer.limit_bytes());
            assert!(!pacer.may_submit(pacer.limit_bytes(), MIB));
            for read in 0..reads {
                pacer.on_foreground_io(latency, *now_us + read);
            }
            *now_us += INTERVAL_US;
            pacer.on_time(*now_us);
            history.push((pacer.limit_bytes(), latency));
            assert!((MIN_IN_FLIGHT_BYTES..=MAX_IN_FLIGHT_BYTES).contains(&pacer.limit_bytes()));
        }
        history
    }

    #[test]
    fn a_device_that_does_not_mind_gets_the_maximum() {
        let (mut pacer, mut now_us) = (Pacer::new(), 0);
        run(&mut pacer, &mut now_us, 200, |_| 100, 10);
        assert_eq!(pacer.limit_bytes(), MAX_IN_FLIGHT_BYTES);
    }

    #[test]
    fn latency_settles_near_what_is_tolerated_on_any_device() {
        for (idle_us, us_per_mib) in [(40, 100), (100, 200), (200, 400), (5000, 8000)] {
            let (mut pacer, mut now_us) = (Pacer::new(), 0);
            // A quiet time teaches the baseline.
            run(&mut pacer, &mut now_us, 20, |_| idle_us, 10);
            let history = run(
                &mut pacer,
                &mut now_us,
                3000,
                |limit| idle_us + us_per_mib * (limit / MIB),
                10,
            );
            let tolerated_us = (3 * idle_us).max(TOLERATED_US);
            let tail = &history[100..];
            let bad = tail.iter().filter(|(_, latency)| *latency > 2 * tolerated_us).count();
            assert!(bad * 5 < tail.len(), "{bad} of {} at idle {idle_us}", tail.len());
            let floor_us = idle_us + us_per_mib;
            let mean = tail.iter().map(|(_, latency)| latency).sum::<u64>() / tail.len() as u64;
            assert!(mean <= tolerated_us.max(floor_us) * 3 / 2, "{mean} at idle {idle_us}");
            // And it does not starve writeback either: it keeps probing for more.
            assert!(tail.iter().any(|&(limit, _)| limit > MIN_IN_FLIGHT_BYTES));
        }
    }

    #[test]
    fn a_latency_spike_halves_at_once_and_recovery_is_additive() {
        let (mut pacer, mut now_us) = (Pacer::new(), 0);
        run(&mut pacer, &mut now_us, 200, |_| 100, 10);
        run(&mut pacer, &mut now_us, 1, |_| 50_000, 10);
        assert_eq!(pacer.limit_bytes(), MAX_IN_FLIGHT_BYTES / 2);
        let history = run(&mut pacer, &mut now_us, 10, |_| 100, 10);
        assert!(history.windows(2).all(|pair| pair[1].0 - pair[0].0 <= INCREASE_BYTES));
        assert!(pacer.limit_bytes() > MAX_IN_FLIGHT_BYTES / 2);
        run(&mut pacer, &mut now_us, 60, |_| 50_000, 10);
        assert_eq!(pacer.limit_bytes(), MIN_IN_FLIGHT_BYTES);
    }

    #[test]
    fn without_readers_the_limit_grows_fast() {
        let (mut pacer, mut now_us) = (Pacer::new(), 0);
        run(&mut pacer, &mut now_us, 5, |_| 100, 1);
        run(&mut pacer, &mut now_us, 60, |_| 50_000, 10);
        run(&mut pacer, &mut now_us, 13, |_| 0, 0);
        assert_eq!(pacer.limit_bytes(), MAX_IN_FLIGHT_BYTES);
    }

    #[test]
    fn foreground_io_that_begins_finds_little_in_flight_and_one_that_goes_on_keeps_what_it_bears() {
        let (mut pacer, mut now_us) = (Pacer::new(), 0);
        assert!(!pacer.is_foreground_active(now_us));
        run(&mut pacer, &mut now_us, 100, |_| 0, 0);
        assert_eq!(pacer.limit_bytes(), MAX_IN_FLIGHT_BYTES);
        pacer.on_foreground_io(100, now_us);
        assert_eq!(pacer.limit_bytes(), START_IN_FLIGHT_BYTES);
        assert!(pacer.is_foreground_active(now_us + ACTIVE_US - 1));
        assert!(!pacer.is_foreground_active(now_us + ACTIVE_US));
        run(&mut pacer, &mut now_us, 20, |_| 100, 1);
        let grown = pacer.limit_bytes();
        assert!(grown > START_IN_FLIGHT_BYTES);
        // An interval without a sample is no silence yet.
        run(&mut pacer, &mut now_us, 1, |_| 0, 0);
        pacer.on_foreground_io(100, now_us);
        assert_eq!(pacer.limit_bytes(), grown);
    }

    #[test]
    fn many_small_requests_count_for_more_than_a_large_one() {
        let small = 256 * cost_bytes(8 << 10);
        assert!(small > 5 * MIB / 2 && cost_bytes(2 * MIB) < 9 * MIB / 4);
        assert_eq!(cost_bytes(u64::MAX), u64::MAX);
    }

    #[test]
    fn what_fits_exactly_may_be_submitted_and_a_byte_more_not() {
        let mut pacer = Pacer::new();
        let limit = pacer.limit_bytes();
        assert!(pacer.may_submit(1, limit - 1));
        assert!(!pacer.may_submit(1, limit));
    }

    /// `spikes` of 50 ms among reads of 100 us, all in one interval, after a time without any.
    fn limit_after(spikes: &[u64]) -> u64 {
        let (mut pacer, mut now_us) = (Pacer::new(), 0);
        run(&mut pacer, &mut now_us, 200, |_| 100, 10);
        assert_eq!(pacer.limit_bytes(), MAX_IN_FLIGHT_BYTES);
        assert!(!pacer.may_submit(pacer.limit_bytes(), MIB));
        for &latency_us in spikes {
            pacer.on_foreground_io(latency_us, now_us);
        }
        now_us += INTERVAL_US;
        pacer.on_time(now_us);
        pacer.limit_bytes()
    }

    #[test]
    fn the_worst_of_several_reads_counts_half_and_of_a_few_not_by_itself() {
        // Tolerated are 300 us: on average that holds in all of these.
        assert_eq!(limit_after(&[100, 100, 100, 500]), MAX_IN_FLIGHT_BYTES);
        assert_eq!(limit_after(&[100, 100, 100, 700]), MAX_IN_FLIGHT_BYTES / 2);
        assert_eq!(limit_after(&[100, 100, 650]), MAX_IN_FLIGHT_BYTES);
    }

    #[test]
    fn after_a_decrease_the_limit_rests_until_what_was_in_flight_has_drained() {
        let (mut pacer, mut now_us) = (Pacer::new(), 0);
        run(&mut pacer, &mut now_us, 200, |_| 100, 10);
        let history = run(&mut pacer, &mut now_us, 4, |_| 50_000, 10);
        let limits: Vec<u64> = history.iter().map(|&(limit, _)| limit).collect();
        let half = MAX_IN_FLIGHT_BYTES / 2;
        assert_eq!(limits, [half, half, half, half / 2]);
    }

    #[test]
    fn a_limit_that_nobody_reaches_does_not_grow() {
        let mut pacer = Pacer::new();
        for interval in 0..100 {
            assert!(pacer.may_submit(0, 64 * MIB), "one request always may");
            pacer.on_foreground_io(100, interval * INTERVAL_US);
        }
        assert_eq!(pacer.limit_bytes(), START_IN_FLIGHT_BYTES);
    }

    #[test]
    fn a_device_that_became_slower_is_believed_after_a_while() {
        let (mut pacer, mut now_us) = (Pacer::new(), 0);
        run(&mut pacer, &mut now_us, 20, |_| 200, 10);
        let history = run(&mut pacer, &mut now_us, 1000, |_| 2000, 10);
        assert_eq!(history[30].0, MIN_IN_FLIGHT_BYTES);
        assert_eq!(pacer.limit_bytes(), MAX_IN_FLIGHT_BYTES);
    }

    #[test]
    fn spikes_without_writeback_are_not_blamed_on_it() {
        let (mut pacer, mut now_us) = (Pacer::new(), 0);
        run(&mut pacer, &mut now_us, 200, |_| 100, 10);
        for _ in 0..100 {
            pacer.on_foreground_io(50_000, now_us);
            now_us += INTERVAL_US;
            pacer.on_time(now_us);
        }
        assert_eq!(pacer.limit_bytes(), MAX_IN_FLIGHT_BYTES);
    }

    #[test]
    fn extreme_inputs_stay_within_bounds() {
        let mut pacer = Pacer::new();
        for latency_us in [0, u64::MAX, 1, u64::MAX / 2, 0] {
            for now_us in [0, u64::MAX, 5, u64::MAX - 1] {
                pacer.on_foreground_io(latency_us, now_us);
                assert!(!pacer.may_submit(u64::MAX, u64::MAX));
                assert!((MIN_IN_FLIGHT_BYTES..=MAX_IN_FLIGHT_BYTES).contains(&pacer.limit_bytes()));
            }
        }
    }
}
