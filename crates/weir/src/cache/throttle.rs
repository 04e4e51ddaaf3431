//! How long an operation waits at its entry, and nowhere else.
//!
//! Three resources fill up behind the foreground's back: dirty pages, the metadata delta, and the log
//! ring. For each there is a fill level at which background work starts, one at which delays start, and a hard limit. Between
//! the last two an operation is delayed by an amount that grows smoothly from nothing, so that the
//! foreground settles at the rate of the background by itself: a fast disk at a low level, with delays
//! too small to see, a slow one further up. There is no cliff anywhere below the hard limit, and at
//! the hard limit (which the delays make hard to reach) the operation waits for progress.
//!
//! The delay is the cube of the level, times [`MAX_PAGE_DELAY_NS`], per page written. In figures: 2 GiB/s
//! settle at 13 % of the way from start to hard limit, 150 MiB/s at 30 %, 10 MiB/s at 73 %.
//!
//! The log is filled by those who put something into it, so at its entry they wait by how much they bring ([`Limits::log_delay_ns`]), and
//! where it is nearly full, those who bring much ([`Limits::log_refuses`]) wait for a checkpoint: the rest of it is left to names,
//! attributes and small syncs. For other operations it counts as one page, and has no hard limit before it is full.
//!
//! The log has one more stage below these: from 40 % of its size on the flusher brings logged pages home that are older
//! than the newest 40 % ([`Limits::kept_log_bytes`]), so that a checkpoint finds little left to do and releases the ring soon.
//! What was logged last waits, because it may be overwritten soon. It begins when a batch has come together
//! ([`Limits::due_log_bytes`]): pages of many syncs are found by one walk and leave in few writes.
//!
//! Delays are computed in nanoseconds and too short to sleep one by one: [`DelayDebt`] saves them up.
//!
//! The policy is pure: no locks, no clock.

/// Denominator of a level: full scale is the hard limit.
const LEVEL_ONE: u64 = 1 << 20;
/// Delay of one page (or one metadata operation) just below the hard limit.
pub const MAX_PAGE_DELAY_NS: u64 = 1_000_000;
/// Longest delay of one operation, however much it writes.
pub const MAX_OPERATION_DELAY_NS: u64 = 100_000_000;
/// Shortest sleep worth taking: below it the timer's slack would dominate.
pub const MIN_SLEEP_US: u64 = 200;
/// Shares of the memory cap at which writeback starts, at which delays start, and at which writers wait for writeback.
const DIRTY_START_PERCENT: u64 = 25;
const DIRTY_DELAY_PERCENT: u64 = 40;
const DIRTY_HARD_PERCENT: u64 = 65;
/// Shares of the delta's and the log's size at which delays start (a checkpoint starts before), and
/// at which operations wait for the checkpoint. From `LOG_HOME` on logged pages go home, in batches.
const LOG_HOME_PERCENT: u64 = 40;
const LOG_HOME_BATCH_PERCENT: u64 = 4;
const CHECKPOINT_START_PERCENT: u64 = 50;
const LOG_CHECKPOINT_PERCENT: u64 = 55;
const DELTA_DELAY_PERCENT: u64 = 75;
const DELTA_HARD_PERCENT: u64 = 100;
const LOG_DELAY_PERCENT: u64 = 70;
const LOG_HARD_PERCENT: u64 = 90;
/// From so much of the log on those wait for a checkpoint who bring more than [`SMALL_BLOCKS`] at a time, or whom nobody waits for.
const LOG_REFUSE_PERCENT: u64 = 95;
/// A small operation brings so much to the log at most: an operation on names, or a sync of a page or two.
pub const SMALL_BLOCKS: u64 = 4;
/// What brings more than this share of the log counts as if it brought so much.
const LOG_LARGE_PERCENT: u64 = 12;

fn percent_of(whole: u64, percent: u64) -> u64 {
    (u128::from(whole) * u128::from(percent) / 100) as u64
}

/// When something starts, and where it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Slope {
    start: u64,
    hard: u64,
}

impl Slope {
    fn new(whole: u64, start_percent: u64, hard_percent: u64) -> Self {
        let start = percent_of(whole, start_percent);
        Self { start, hard: percent_of(whole, hard_percent).max(start.saturating_add(1)) }
    }

    /// How far `used` is from start to hard limit, 0 to [`LEVEL_ONE`].
    fn level(self, used: u64) -> u64 {
        let above = u128::from(used.saturating_sub(self.start));
        let span = u128::from(self.hard - self.start);
        (above * u128::from(LEVEL_ONE) / span).min(u128::from(LEVEL_ONE)) as u64
    }
}

/// The limits of one volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    dirty: Slope,
    delta: Slope,
    log: Slope,
    writeback_start_bytes: u64,
    checkpoint_delta_bytes: u64,
    checkpoint_log_bytes: u64,
    refuse_log_bytes: u64,
    log_bytes: u64,
}

/// How full everything is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pressure {
    /// Dirty pages and pages under writeback.
    pub dirty_bytes: u64,
    /// The running delta and the frozen one, with their changes of space.
    pub delta_bytes: u64,
    /// Log ring space that cannot be reused yet.
    pub log_bytes: u64,
}

/// What an operation is about to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Demand {
    /// Bytes it will dirty; 0 for an operation on metadata only.
    pub data_bytes: u64,
}

/// What an operation has to do before it starts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Admission {
    /// To be waited at the entry, through [`DelayDebt`].
    pub delay_ns: u64,
    /// A hard limit is reached: wait until writeback or a checkpoint made progress, then ask again.
    pub must_wait: bool,
}

impl Limits {
    /// Limits for a volume with this much memory, a delta of at most `delta_bytes` and a ring of
    /// `log_bytes`.
    pub fn new(memory_bytes: u64, delta_bytes: u64, log_bytes: u64) -> Self {
        Self {
            dirty: Slope::new(memory_bytes, DIRTY_DELAY_PERCENT, DIRTY_HARD_PERCENT),
            delta: Slope::new(delta_bytes, DELTA_DELAY_PERCENT, DELTA_HARD_PERCENT),
            log: Slope::new(log_bytes, LOG_DELAY_PERCENT, LOG_HARD_PERCENT),
            writeback_start_bytes: percent_of(memory_bytes, DIRTY_START_PERCENT),
            checkpoint_delta_bytes: percent_of(delta_bytes, CHECKPOINT_START_PERCENT),
            checkpoint_log_bytes: percent_of(log_bytes, LOG_CHECKPOINT_PERCENT),
            refuse_log_bytes: percent_of(log_bytes, LOG_REFUSE_PERCENT),
            log_bytes,
        }
    }

    /// True when the flushers should write without being asked.
    pub fn wants_writeback(&self, pressure: &Pressure) -> bool {
        pressure.dirty_bytes > self.writeback_start_bytes
    }

    /// True when a checkpoint should start without being asked.
    pub fn wants_checkpoint(&self, pressure: &Pressure) -> bool {
        pressure.delta_bytes > self.checkpoint_delta_bytes
            || pressure.log_bytes > self.checkpoint_log_bytes
    }

    /// Memory that the delta may take while the log is replayed: a volume that was in use has at most two deltas in its log, and
    /// recovery needs the cache for little else.
    pub fn replayed_delta_bytes(&self) -> u64 {
        self.delta.hard.saturating_mul(4)
    }

    /// Bytes of dirty data above which writeback starts; it stops below.
    pub fn writeback_start_bytes(&self) -> u64 {
        self.writeback_start_bytes
    }

    /// How much of the log that operations may use is used, in percent.
    pub fn log_percent(&self, log_bytes: u64) -> u64 {
        (u128::from(log_bytes) * 100 / u128::from(self.log_bytes.max(1))) as u64
    }

    /// What an operation that puts `blocks` into the log has to wait, in proportion: so the wait for a full log
    /// is spread over those who fill it.
    pub fn log_delay_ns(&self, log_bytes: u64, blocks: u64) -> u64 {
        let delay_ns = page_delay_ns(self.log.level(log_bytes));
        delay_ns.saturating_mul(blocks).min(MAX_OPERATION_DELAY_NS)
    }

    /// Nobody's delay for the log grows any more.
    pub fn log_delay_is_longest(&self, log_bytes: u64) -> bool {
        self.log.level(log_bytes) == LEVEL_ONE
    }

    /// So much of the log is used that `blocks` more, or any that nobody waits for (`None`), wait until a checkpoint has released some. What is
    /// very large has to find its room by itself: a checkpoint leaves a part of the log where it is.
    pub fn log_refuses(&self, log_bytes: u64, blocks: Option<u64>) -> bool {
        let is_small = blocks.is_some_and(|blocks| blocks <= SMALL_BLOCKS);
        let bytes = blocks.unwrap_or(0).saturating_mul(crate::format::BLOCK_BYTES_U64);
        let bytes = bytes.min(percent_of(self.log_bytes, LOG_LARGE_PERCENT));
        !is_small && log_bytes.saturating_add(bytes) > self.refuse_log_bytes
    }

    /// How many bytes of the log, the newest, may keep their logged pages when `log_bytes` are used: the pages of all that is
    /// older should go home. `None`: the log is not that full.
    pub fn kept_log_bytes(&self, log_bytes: u64) -> Option<u64> {
        let keep_bytes = percent_of(self.log_bytes, LOG_HOME_PERCENT);
        (log_bytes > keep_bytes).then_some(keep_bytes)
    }

    /// How many bytes of the log, the newest, have to be left by the oldest logged page before the flusher brings any home.
    /// `None`: the log is not that full.
    pub fn due_log_bytes(&self, log_bytes: u64) -> Option<u64> {
        let due_bytes = percent_of(self.log_bytes, LOG_HOME_PERCENT + LOG_HOME_BATCH_PERCENT);
        (log_bytes > due_bytes).then_some(due_bytes)
    }

    /// What an operation with this demand has to wait. Dirty data delays only those who dirty more.
    pub fn admit(&self, pressure: &Pressure, demand: Demand) -> Admission {
        let dirty = if demand.data_bytes > 0 { self.dirty.level(pressure.dirty_bytes) } else { 0 };
        let level = dirty.max(self.delta.level(pressure.delta_bytes));
        let pages = demand.data_bytes.div_ceil(crate::format::BLOCK_BYTES_U64).max(1);
        let delay_ns = page_delay_ns(level).saturating_mul(pages).min(MAX_OPERATION_DELAY_NS);
        let delay_ns = delay_ns.max(self.log_delay_ns(pressure.log_bytes, 1));
        Admission { delay_ns, must_wait: level == LEVEL_ONE }
    }
}

/// The curve: a cube, flat at its start.
fn page_delay_ns(level: u64) -> u64 {
    let one = u128::from(LEVEL_ONE);
    let cube = u128::from(level).pow(3);
    (cube * u128::from(MAX_PAGE_DELAY_NS) / (one * one * one)) as u64
}

/// Delays that were too short to sleep.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DelayDebt {
    owed_ns: u64,
}

impl DelayDebt {
    /// Adds an operation's delay; answers how long to sleep now (0: go on).
    #[must_use]
    pub fn add(&mut self, delay_ns: u64) -> u64 {
        self.owed_ns = self.owed_ns.saturating_add(delay_ns);
        let owed_us = self.owed_ns / 1000;
        if owed_us < MIN_SLEEP_US {
            return 0;
        }
        self.owed_ns %= 1000;
        owed_us
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const STEPS: u64 = 2000;

    fn limits() -> Limits {
        Limits::new(GIB, GIB / 8, GIB / 16)
    }

    fn write(bytes: u64) -> Demand {
        Demand { data_bytes: bytes }
    }

    /// `resource` at `step` of `STEPS` between empty and 110 % full.
    fn pressure(resource: usize, step: u64) -> Pressure {
        let at = |which: usize, whole: u64| {
            if which == resource { whole / 10 * 11 * step / STEPS } else { 0 }
        };
        Pressure {
            dirty_bytes: at(0, GIB),
            delta_bytes: at(1, GIB / 8),
            log_bytes: at(2, GIB / 16),
        }
    }

    #[test]
    fn delay_is_monotone_and_has_no_cliff_in_every_resource() {
        let limits = limits();
        for resource in 0..3 {
            for data_bytes in [0, 1, 4096, 65536, 1 << 20, 1 << 30] {
                let mut before = limits.admit(&pressure(resource, 0), write(data_bytes));
                assert_eq!(before, Admission::default());
                for step in 1..=STEPS {
                    let now = limits.admit(&pressure(resource, step), write(data_bytes));
                    assert!(now.delay_ns >= before.delay_ns);
                    assert!(now.must_wait >= before.must_wait);
                    // The steepest place: the slope of a cube at 1, over the narrowest span (25 %).
                    let pages = data_bytes.div_ceil(4096).max(1);
                    let jump = MAX_PAGE_DELAY_NS * 3 * 11 / 2 / STEPS * pages + pages + 1;
                    assert!(now.delay_ns - before.delay_ns <= jump, "{resource} {step} {now:?}");
                    before = now;
                }
                let waits = [data_bytes > 0, true, false];
                assert_eq!(before.must_wait, waits[resource], "{resource}");
            }
        }
    }

    #[test]
    fn below_the_start_nobody_waits_and_at_the_hard_limit_all_writers_do() {
        let limits = limits();
        for (percent, delayed, stopped) in [
            (0, false, false),
            (25, false, false),
            (40, false, false),
            (45, true, false),
            (64, true, false),
            (66, true, true),
            (100, true, true),
        ] {
            // One byte more than the rounded-down share.
            let pressure = Pressure { dirty_bytes: GIB * percent / 100, ..Pressure::default() };
            let admission = limits.admit(&pressure, write(4096));
            assert_eq!(
                (admission.delay_ns > 0, admission.must_wait),
                (delayed, stopped),
                "{percent}"
            );
            assert_eq!(limits.admit(&pressure, write(0)), Admission::default());
            assert_eq!(limits.wants_writeback(&pressure), percent > 25);
        }
    }

    #[test]
    fn more_of_anything_never_shortens_the_delay() {
        let limits = limits();
        let grid = |whole: u64| (0..=12).map(move |step| whole / 10 * step);
        for dirty_bytes in grid(GIB) {
            for delta_bytes in grid(GIB / 8) {
                for log_bytes in grid(GIB / 16) {
                    let pressure = Pressure { dirty_bytes, delta_bytes, log_bytes };
                    let here = limits.admit(&pressure, write(8192));
                    for more in [
                        Pressure { dirty_bytes: dirty_bytes + 1000, ..pressure },
                        Pressure { delta_bytes: delta_bytes + 1000, ..pressure },
                        Pressure { log_bytes: log_bytes + 1000, ..pressure },
                    ] {
                        let there = limits.admit(&more, write(8192));
                        assert!(
                            there.delay_ns >= here.delay_ns && there.must_wait >= here.must_wait
                        );
                    }
                    let larger = limits.admit(&pressure, write(16384));
                    assert!(larger.delay_ns >= here.delay_ns);
                    assert!(larger.delay_ns <= MAX_OPERATION_DELAY_NS);
                }
            }
        }
    }

    #[test]
    fn a_part_of_a_page_counts_as_a_page_and_the_log_as_one_for_everybody() {
        let limits = limits();
        let delay = |pressure: &Pressure, bytes| limits.admit(pressure, write(bytes)).delay_ns;
        let dirty = Pressure { dirty_bytes: GIB / 2, ..Pressure::default() };
        let page_ns = delay(&dirty, 1);
        assert!(page_ns > 0);
        for (bytes, pages) in [(4096, 1), (4097, 2), (8192, 2), (3 * 4096 + 1, 4)] {
            assert_eq!(delay(&dirty, bytes), pages * page_ns, "{bytes} bytes");
        }
        let log = Pressure { log_bytes: GIB / 16 * 85 / 100, ..Pressure::default() };
        let log_ns = limits.log_delay_ns(log.log_bytes, 1);
        assert!(log_ns > 0);
        for bytes in [0, 1, 1 << 20] {
            assert_eq!(delay(&log, bytes), log_ns, "{bytes} bytes");
        }
    }

    #[test]
    fn replay_may_take_what_a_volume_in_use_can_have_left_and_more() {
        // At most two deltas, each of which may have been at its hard limit.
        assert!(limits().replayed_delta_bytes() >= 2 * GIB / 8);
    }

    #[test]
    fn a_checkpoint_is_wanted_before_anyone_is_delayed() {
        let limits = limits();
        for resource in 1..3 {
            for step in 0..=STEPS {
                let pressure = pressure(resource, step);
                let admission = limits.admit(&pressure, write(0));
                assert!(admission.delay_ns == 0 || limits.wants_checkpoint(&pressure));
            }
        }
        assert!(!limits.wants_checkpoint(&pressure(1, 0)));
    }

    /// Runs a writer of 4 KiB pages against a disk; the level it settles at, in percent.
    fn settled_level(disk_bytes_per_s: u64) -> u64 {
        let limits = limits();
        let (mut dirty, mut now_ns, mut debt) = (0_u64, 0_u64, DelayDebt::default());
        let mut drained_at = 0;
        for _ in 0..1_000_000 {
            let pressure = Pressure { dirty_bytes: dirty, ..Pressure::default() };
            let admission = limits.admit(&pressure, write(4096));
            assert!(!admission.must_wait, "the delays keep the writer off the limit");
            now_ns += 800 + debt.add(admission.delay_ns) * 1000;
            dirty += 4096;
            let drained = (now_ns - drained_at) * disk_bytes_per_s / 1_000_000_000;
            if limits.wants_writeback(&pressure) && drained > 0 {
                dirty = dirty.saturating_sub(drained);
            }
            if drained > 0 {
                drained_at = now_ns;
            }
        }
        limits.dirty.level(dirty) * 100 / LEVEL_ONE
    }

    #[test]
    fn writers_settle_at_the_rate_of_the_disk() {
        let fast = settled_level(2 << 30);
        let slow = settled_level(150 << 20);
        let crawling = settled_level(10 << 20);
        assert!((5..20).contains(&fast), "{fast}");
        assert!((22..38).contains(&slow), "{slow}");
        assert!((60..85).contains(&crawling), "{crawling}");
    }

    #[test]
    fn the_newest_part_of_the_log_is_kept_before_a_checkpoint_is_wanted() {
        let limits = limits();
        let log_bytes = GIB / 16;
        let part = log_bytes * LOG_HOME_PERCENT / 100;
        for percent in 0..=120 {
            let used = log_bytes / 100 * percent;
            let kept = limits.kept_log_bytes(used);
            assert_eq!(kept, (used > part).then_some(part));
            let pressure = Pressure { log_bytes: used, ..Pressure::default() };
            // A checkpoint that leaves the kept part ends well below where the next is wanted, and the flusher was there before.
            assert!(kept.is_some() || !limits.wants_checkpoint(&pressure));
            let due = limits.due_log_bytes(used);
            assert!(due.is_some() || !limits.wants_checkpoint(&pressure));
            assert!(due.is_none_or(|due| kept.is_some_and(|kept| kept < due && due < used)));
        }
        assert_eq!(limits.kept_log_bytes(u64::MAX), Some(part));
    }

    #[test]
    fn the_log_delays_in_proportion_and_from_where_it_says() {
        let limits = limits();
        let log_bytes = GIB / 16;
        for percent in 0..=120 {
            let used = log_bytes / 100 * percent;
            let one = limits.log_delay_ns(used, 1);
            assert_eq!(percent <= LOG_DELAY_PERCENT, limits.log.level(used) == 0);
            assert_eq!(limits.log_delay_ns(used, 17), (one * 17).min(MAX_OPERATION_DELAY_NS));
            assert!(limits.log_percent(used).abs_diff(percent) <= 1);
            assert_eq!(limits.log_delay_is_longest(used), one == MAX_PAGE_DELAY_NS);
        }
        assert_eq!(limits.log_delay_ns(log_bytes, 1), MAX_PAGE_DELAY_NS);
        assert_eq!(limits.log_delay_ns(u64::MAX, u64::MAX), MAX_OPERATION_DELAY_NS);
    }

    #[test]
    fn a_nearly_full_log_is_left_to_those_who_bring_little() {
        let limits = limits();
        let log_bytes = GIB / 16;
        for percent in 0..=120 {
            let used = log_bytes / 100 * percent;
            let refuses = percent > LOG_REFUSE_PERCENT;
            for blocks in [1, SMALL_BLOCKS] {
                assert!(!limits.log_refuses(used, Some(blocks)));
            }
            assert_eq!(limits.log_refuses(used, None), refuses);
            let mut before = refuses;
            for blocks in [SMALL_BLOCKS + 1, 100, 1000, log_bytes / 4096, u64::MAX] {
                let is_refused = limits.log_refuses(used, Some(blocks));
                assert!(is_refused >= before);
                before = is_refused;
            }
            // Where a checkpoint leaves what is new nobody is refused, however much it is; who is, has been delayed.
            assert!(!before || used > log_bytes * 82 / 100);
            assert!(!before || limits.log_delay_ns(used, 1) > 0);
            let pressure = Pressure { log_bytes: used, ..Pressure::default() };
            for data_bytes in [0, 4096, 1 << 20] {
                let admission = limits.admit(&pressure, write(data_bytes));
                assert!(!admission.must_wait && admission.delay_ns <= MAX_PAGE_DELAY_NS);
            }
        }
    }

    #[test]
    fn debt_is_paid_in_full_and_in_sleepable_pieces() {
        for delay_ns in [1, 999, 1000, 12_345, 1_000_000, 70_000_000] {
            let mut debt = DelayDebt::default();
            let mut slept_us = 0;
            for _ in 0..5000 {
                let sleep_us = debt.add(delay_ns);
                assert!(sleep_us == 0 || sleep_us >= MIN_SLEEP_US);
                slept_us += sleep_us;
            }
            let total_us = 5000 * delay_ns / 1000;
            assert!(slept_us <= total_us && total_us - slept_us < MIN_SLEEP_US + 1);
        }
        let mut debt = DelayDebt::default();
        assert_eq!(debt.add(150_000), 0);
        assert_eq!(debt.add(49_999), 0);
        assert_eq!(debt.add(1), 200);
    }

    #[test]
    fn degenerate_limits_neither_panic_nor_let_everyone_through() {
        for whole in [0, 1, 2, 99, u64::MAX] {
            let limits = Limits::new(whole, whole, whole);
            let full =
                Pressure { dirty_bytes: u64::MAX, delta_bytes: u64::MAX, log_bytes: u64::MAX };
            assert!(limits.admit(&full, write(u64::MAX)).must_wait);
            assert!(!limits.admit(&Pressure::default(), write(u64::MAX)).must_wait);
        }
    }
}
