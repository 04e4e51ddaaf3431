//! Virtual time: passes only when the driver, or a sleeping engine, lets it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use weir::Timestamp;

use crate::model::times::Span;

/// A clock that stands still until it is advanced.
#[derive(Debug)]
pub struct SimClock {
    elapsed_ns: AtomicU64,
}

impl SimClock {
    /// Wall-clock time at the start of every simulation: 2020-01-01 00:00:00 UTC.
    pub const EPOCH_NS: i64 = 1_577_836_800_000_000_000;

    /// A clock at its start.
    pub const fn new() -> Self {
        Self { elapsed_ns: AtomicU64::new(0) }
    }

    /// A clock that has run for `elapsed_ns` already.
    pub const fn starting_at(elapsed_ns: u64) -> Self {
        Self { elapsed_ns: AtomicU64::new(elapsed_ns) }
    }

    /// Lets time pass.
    pub fn advance_ns(&self, duration_ns: u64) {
        self.elapsed_ns.fetch_add(duration_ns, Relaxed);
    }

    /// From when it had run for so long until now.
    pub fn span_since(&self, first_ns: u64) -> Span {
        let at = |elapsed_ns: u64| Timestamp::from_ns(Self::EPOCH_NS + elapsed_ns as i64);
        Span { first: at(first_ns), last: at(self.elapsed_ns()) }
    }

    /// Time passed since the start.
    pub fn elapsed_ns(&self) -> u64 {
        self.elapsed_ns.load(Relaxed)
    }
}

impl Default for SimClock {
    fn default() -> Self {
        Self::new()
    }
}

impl weir::sync::Clock for SimClock {
    fn realtime_ns(&self) -> i64 {
        Self::EPOCH_NS + self.elapsed_ns() as i64
    }
    fn monotonic_ns(&self) -> u64 {
        self.elapsed_ns()
    }
    fn sleep_us(&self, duration_us: u64) {
        self.advance_ns(duration_us.saturating_mul(1000));
        crate::turns::wait_for_other();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir::sync::Clock;

    #[test]
    fn time_passes_only_when_told_to() {
        let clock = SimClock::new();
        assert_eq!((clock.monotonic_ns(), clock.realtime_ns()), (0, SimClock::EPOCH_NS));
        clock.sleep_us(3);
        clock.advance_ns(5);
        assert_eq!((clock.monotonic_ns(), clock.realtime_ns()), (3005, SimClock::EPOCH_NS + 3005));
    }
}
