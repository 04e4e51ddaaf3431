//! Whom a queue's thread lets go first: the class that it waits in, and hands in its answers in.
//!
//! Nearly all requests come from programs that wait for the answer, and leave their processor to the queue's thread by that. What remains is
//! RELEASE: `close` has returned already, and the program was about to make its next request. An ordinary thread that wakes up
//! interrupts it, serves the one request, sleeps, and is woken again a few microseconds later: two switches and a system call for
//! nothing. A thread of the class `SCHED_BATCH` interrupts nobody: it gets both requests when the program waits. It is also woken for less,
//! since the scheduler need not compare the two. (Who shall run next once the program waits is decided as before: whose
//! slice is shorter, see `weir::sync::come_first`.)
//!
//! A program that hops (see `super::hops`) is lent the place of the thread: for so many answers that is of the class `SCHED_IDLE`. A core with
//! nothing but such threads counts as idle, so the program is woken where it was, at once. If it hops again as soon as
//! that ends, the next time is twice as long. Where others make requests on the core too there is nothing to lend, and a loan that nobody uses
//! ends ([`REST`]): a thread must not sleep in that class for long, since who knows what runs on its core when it is woken up.
//!
//! Both have a price where the processor is wanted by others. A thread of the class `SCHED_BATCH` is late where its core is busy and nobody there waits
//! for it (a program computes while its asynchronous requests are to be served; an answer comes from another thread): until the
//! next tick of the clock, up to 4 ms. One of `SCHED_IDLE` is late wherever its core is busy, by some 30 ms for each of those that compute
//! (its slice is by what the scheduler reckons that, and the shortest there is). The kernel tells a thread how long it had to wait
//! (`RunDelay`), so [`Policy`] looks at that every millisecond, and a thread that was late is an ordinary one for a while, and for a longer while
//! each time that it happens again. Except that hopping shows that cores are idle.

use std::time::{Duration, Instant};

use weir::sync::{RunDelay, SchedulingClass, set_scheduling_class};

/// How often the kernel is asked how long the thread has waited: a system call.
const WINDOW: Duration = Duration::from_millis(1);
/// A program that was not interrupted waits soon. So much is expected for each time that the thread woke up,
const USUAL_DELAY: Duration = Duration::from_micros(10);
/// and so much more in a window is late.
const LATE: Duration = Duration::from_micros(300);
/// How long a thread that was late is an ordinary one, at first and at most: being late again costs one tick of that.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(6);
/// After so many pauses' time without being late, the next pause is the first one again.
const FORGIVEN_AFTER: u32 = 16;
/// For how many answers a place is lent, at first and at most: a millisecond, and a tenth of a second.
const FIRST_LOAN: u32 = 128;
const LAST_LOAN: u32 = 8192;
/// A loan that is not used for so long ends.
const REST: Duration = Duration::from_millis(20);
/// A program that hops again within so many answers has not settled.
const SETTLED_AFTER: u32 = 64;

/// When the thread is of which class. Pure: told of time, hops and delays.
#[derive(Debug)]
struct Policy {
    phase: Phase,
    pause: Duration,
    window: Window,
    loan: u32,
    /// Answers for which the place is still lent, and to whom.
    lent: u32,
    borrower: u32,
    /// He has hopped since the last turn.
    has_hopped: bool,
    /// Answers since it was, as far as that matters.
    since_lent: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// It interrupts whoever runs.
    Ordinary { until: Duration },
    /// It interrupts nobody.
    Polite { since: Duration },
}

/// From one look at the delay to the next.
#[derive(Debug, Clone, Copy)]
struct Window {
    began: Duration,
    delay: Duration,
    turns: u32,
}

impl Policy {
    /// At time 0, when the thread has waited for `delay` in its life.
    fn new(delay: Duration) -> Self {
        Self {
            phase: Phase::Polite { since: Duration::ZERO },
            pause: FIRST_PAUSE,
            window: Window { began: Duration::ZERO, delay, turns: 0 },
            loan: FIRST_LOAN,
            lent: 0,
            borrower: 0,
            has_hopped: false,
            since_lent: SETTLED_AFTER,
        }
    }

    /// Program `pid` has made a request. `hops`: not for the first time on another core.
    fn note(&mut self, pid: u32, hops: bool) {
        if hops {
            (self.borrower, self.has_hopped) = (pid, true);
        } else if pid != self.borrower && pid != 0 {
            (self.lent, self.has_hopped) = (0, false);
        }
    }

    /// The thread is about to hand in answers, and to wait. `delay`: how long it has waited for its processor so far. Answers what it
    /// shall be.
    fn turn(&mut self, now: Duration, delay: impl FnOnce() -> Duration) -> SchedulingClass {
        self.window.turns += 1;
        if now.saturating_sub(self.window.began) >= WINDOW {
            let usual = LATE + USUAL_DELAY * self.window.turns;
            let delay = delay();
            let late = delay.saturating_sub(self.window.delay) > usual;
            self.window = Window { began: now, delay, turns: 0 };
            self.judge(now, late);
        }
        self.lend();
        match self.phase {
            _ if self.lent > 0 => SchedulingClass::Idle,
            Phase::Polite { .. } => SchedulingClass::Batch,
            Phase::Ordinary { .. } => SchedulingClass::Ordinary,
        }
    }

    /// Nobody has asked for anything for [`REST`].
    fn rest(&mut self) {
        (self.lent, self.has_hopped, self.since_lent) = (0, false, SETTLED_AFTER);
    }

    fn judge(&mut self, now: Duration, late: bool) {
        match self.phase {
            _ if late && self.lent > 0 => self.be_ordinary(now),
            Phase::Polite { .. } if late => self.be_ordinary(now),
            Phase::Polite { since } => {
                if now.saturating_sub(since) > self.pause * FORGIVEN_AFTER {
                    self.pause = FIRST_PAUSE;
                }
            }
            Phase::Ordinary { until } if now >= until => self.phase = Phase::Polite { since: now },
            Phase::Ordinary { .. } => {}
        }
    }

    fn be_ordinary(&mut self, now: Duration) {
        self.phase = Phase::Ordinary { until: now + self.pause };
        self.pause = (self.pause * 2).min(LAST_PAUSE);
        self.lent = 0;
    }

    fn lend(&mut self) {
        if std::mem::take(&mut self.has_hopped) {
            let has_settled = self.since_lent >= SETTLED_AFTER;
            self.loan = if has_settled { FIRST_LOAN } else { (self.loan * 2).min(LAST_LOAN) };
            self.lent = self.loan;
            self.since_lent = 0;
        } else if self.lent > 0 {
            self.lent -= 1;
        } else {
            self.since_lent = (self.since_lent + 1).min(SETTLED_AFTER);
        }
    }
}

/// The policy of one thread, and its means.
pub struct Manners {
    policy: Policy,
    delay: RunDelay,
    began: Instant,
    class: SchedulingClass,
}

impl Manners {
    /// For the calling thread, which is an ordinary one. `None` where the system does not tell how long it waits.
    pub fn of_this_thread() -> Option<Self> {
        let delay = RunDelay::of_this_thread()?;
        let policy = Policy::new(Duration::from_nanos(delay.total_ns()?));
        Some(Self { policy, delay, began: Instant::now(), class: SchedulingClass::Ordinary })
    }

    /// Program `pid` has made a request. `hops`: not for the first time on another core.
    pub fn note(&mut self, pid: u32, hops: bool) {
        self.policy.note(pid, hops);
    }

    /// How long the thread may wait as it is; then [`Manners::rest`], and a turn. `None`: for as long as it likes.
    pub fn patience(&self) -> Option<Duration> {
        (self.class == SchedulingClass::Idle).then_some(REST)
    }

    /// The thread has lately had to wait for its core.
    pub fn is_late(&self) -> bool {
        matches!(self.policy.phase, Phase::Ordinary { .. })
    }

    /// The thread has waited for [`Manners::patience`], and for nothing.
    pub fn rest(&mut self) {
        self.policy.rest();
    }

    /// The thread, which is the one that made this, is about to hand in answers and to wait. False: it may not be what it should be, or is of a
    /// class that comes before all others; this is not to be called again.
    pub fn turn(&mut self) -> bool {
        let mut is_known = true;
        // Whose delay nobody can say is taken for late.
        let delay = || {
            let total_ns = self.delay.total_ns();
            is_known = total_ns.is_some();
            total_ns.map_or(Duration::MAX, Duration::from_nanos)
        };
        let class = self.policy.turn(self.began.elapsed(), delay);
        if class != self.class {
            is_known &= set_scheduling_class(class);
            self.class = class;
        }
        is_known
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn policy() -> Policy {
        Policy::new(Duration::ZERO)
    }

    fn unasked() -> Duration {
        panic!("asked too often");
    }

    #[test]
    fn who_is_served_in_time_is_never_interrupted_and_the_kernel_is_asked_once_in_a_millisecond() {
        let mut policy = policy();
        let (mut asked, step) = (0, Duration::from_micros(10));
        for n in 1..=100_000 {
            let class = policy.turn(step * n, || {
                asked += 1;
                Duration::from_micros(2) * n
            });
            assert_eq!(class, SchedulingClass::Batch);
        }
        assert_eq!(asked, 1000);
    }

    #[test]
    fn one_wait_for_a_tick_is_enough_however_many_were_short() {
        let mut policy = policy();
        for n in 1..100 {
            assert_eq!(policy.turn(MS * n / 100, unasked), SchedulingClass::Batch);
        }
        assert_eq!(policy.turn(MS * 4, || MS * 3), SchedulingClass::Ordinary);
    }

    #[test]
    fn waits_during_a_pause_do_not_count_after_it() {
        let mut policy = policy();
        let (late, ended) = (MS * 4, MS * 4 + FIRST_PAUSE);
        assert_eq!(policy.turn(late, || MS * 4), SchedulingClass::Ordinary);
        assert_eq!(policy.turn(late + MS, || MS * 9), SchedulingClass::Ordinary);
        assert_eq!(policy.turn(ended, || MS * 50), SchedulingClass::Batch);
        assert_eq!(policy.turn(ended + MS, || MS * 50), SchedulingClass::Batch);
    }

    #[test]
    fn pauses_grow_while_it_goes_on_and_a_good_time_ends_that() {
        let (mut policy, mut now, mut delay) = (policy(), Duration::ZERO, Duration::ZERO);
        let mut pauses = Vec::new();
        for _ in 0..10 {
            now += MS * 4;
            delay += MS * 4;
            assert_eq!(policy.turn(now, || delay), SchedulingClass::Ordinary);
            let late = now;
            while policy.turn(now, || delay) == SchedulingClass::Ordinary {
                now += MS;
            }
            pauses.push(now.saturating_sub(late));
        }
        assert_eq!(pauses[..3], [FIRST_PAUSE, FIRST_PAUSE * 2, FIRST_PAUSE * 4]);
        assert_eq!(pauses[9], LAST_PAUSE);
        for _ in 0..LAST_PAUSE.as_millis() * u128::from(FORGIVEN_AFTER + 1) {
            now += MS;
            assert_eq!(policy.turn(now, || delay), SchedulingClass::Batch);
        }
        now += MS * 4;
        delay += MS;
        assert_eq!(policy.turn(now, || delay), SchedulingClass::Ordinary);
        assert_eq!(policy.turn(now + FIRST_PAUSE, || delay), SchedulingClass::Batch);
    }

    /// Turns until the place is not lent any more, 1 µs each.
    fn loan(policy: &mut Policy, now: &mut Duration) -> u32 {
        let (mut turns, delay) = (0, policy.window.delay);
        policy.note(7, true);
        loop {
            *now += Duration::from_micros(1);
            if policy.turn(*now, || delay) != SchedulingClass::Idle {
                return turns;
            }
            turns += 1;
            policy.note(7, false);
        }
    }

    #[test]
    fn who_hops_again_at_once_has_the_place_for_twice_as_long_and_who_has_settled_begins_anew() {
        let (mut policy, mut now) = (policy(), Duration::ZERO);
        let loans: Vec<u32> = (0..10).map(|_| loan(&mut policy, &mut now)).collect();
        assert_eq!(loans[..4], [FIRST_LOAN, FIRST_LOAN * 2, FIRST_LOAN * 4, FIRST_LOAN * 8]);
        assert_eq!(loans[9], LAST_LOAN);
        for _ in 0..SETTLED_AFTER {
            policy.turn(now, unasked);
        }
        assert_eq!(loan(&mut policy, &mut now), FIRST_LOAN);
    }

    #[test]
    fn a_loan_ends_when_the_thread_is_late_and_a_hop_shows_that_cores_are_idle_again() {
        let mut policy = policy();
        policy.note(7, true);
        assert_eq!(policy.turn(Duration::ZERO, unasked), SchedulingClass::Idle);
        assert_eq!(policy.turn(MS * 30, || MS * 29), SchedulingClass::Ordinary);
        assert_eq!(policy.turn(MS * 30, unasked), SchedulingClass::Ordinary);
        policy.note(7, true);
        assert_eq!(policy.turn(MS * 30, unasked), SchedulingClass::Idle);
        assert_eq!(policy.turn(MS * 60, || MS * 58), SchedulingClass::Ordinary);
    }

    #[test]
    fn a_place_is_lent_to_one_program_and_not_while_others_want_it() {
        let mut policy = policy();
        policy.note(7, true);
        assert_eq!(policy.turn(Duration::ZERO, unasked), SchedulingClass::Idle);
        policy.note(7, false);
        policy.note(0, false);
        assert_eq!(policy.turn(Duration::ZERO, unasked), SchedulingClass::Idle);
        policy.note(8, false);
        policy.note(7, false);
        assert_eq!(policy.turn(Duration::ZERO, unasked), SchedulingClass::Batch);
        policy.note(7, true);
        policy.note(8, false);
        assert_eq!(policy.turn(Duration::ZERO, unasked), SchedulingClass::Batch);
    }

    #[test]
    fn a_loan_that_nobody_uses_ends() {
        let mut policy = policy();
        policy.note(7, true);
        assert_eq!(policy.turn(Duration::ZERO, unasked), SchedulingClass::Idle);
        policy.rest();
        assert_eq!(policy.turn(Duration::ZERO, unasked), SchedulingClass::Batch);
        let mut now = Duration::ZERO;
        assert_eq!(loan(&mut policy, &mut now), FIRST_LOAN);
    }
}
