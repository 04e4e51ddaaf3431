//! How long a thread that writes much back works at a stretch.
//!
//! Collecting and settling pages takes processor time, a millisecond or two for each round, and whoever wakes up meanwhile on the same
//! processor waits for it, be it the caller of a log append: the scheduler reckons that a thread that mostly waits for the disk is owed that much.
//! So after [`STRETCH_US`] of work, while there is foreground I/O, it sleeps for [`REST_US`], and all that
//! is ready to run on its processor runs. A wait for something else is as good as a rest.
//!
//! A sync has a caller who waits for it, so it is left alone for its first [`SYNC_GRACE_US`]: one of some megabytes has ended by then.
//!
//! The policy is pure: the time comes from the caller.

/// After so much work a rest is due.
pub const STRETCH_US: u64 = 150;
/// How long a rest is. Timers are late by some 50 µs, and one that is due before the thread is asleep lets nobody else run.
pub const REST_US: u64 = 60;

/// How long a sync takes before it rests for the first time.
pub const SYNC_GRACE_US: u64 = 2000;

/// The work of one thread since it last rested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stretch {
    /// In the future: left alone until then.
    began_us: u64,
}

impl Stretch {
    /// A thread begins to work.
    pub const fn new(now_us: u64) -> Self {
        Self { began_us: now_us }
    }

    /// A sync begins.
    pub const fn of_sync(now_us: u64) -> Self {
        Self { began_us: now_us.saturating_add(SYNC_GRACE_US) }
    }

    /// True when a rest is due.
    pub fn is_over(&self, now_us: u64) -> bool {
        now_us.saturating_sub(self.began_us) >= STRETCH_US
    }

    /// The thread may have slept since `from_us`: if it took long enough, that was a rest.
    pub fn waited(&mut self, from_us: u64, now_us: u64) {
        if now_us.saturating_sub(from_us) >= REST_US {
            self.began_us = self.began_us.max(now_us);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rest_is_due_after_a_stretch_of_work_and_not_before() {
        let stretch = Stretch::new(1000);
        assert!(!stretch.is_over(1000) && !stretch.is_over(1000 + STRETCH_US - 1));
        assert!(stretch.is_over(1000 + STRETCH_US));
        // A clock that goes back is no work.
        assert!(!stretch.is_over(0));
    }

    #[test]
    fn a_sync_is_left_alone_at_first_whatever_it_waits_for() {
        let mut stretch = Stretch::of_sync(0);
        stretch.waited(0, 10 * REST_US);
        assert!(!stretch.is_over(SYNC_GRACE_US + STRETCH_US - 1));
        assert!(stretch.is_over(SYNC_GRACE_US + STRETCH_US));
        assert!(!Stretch::of_sync(u64::MAX).is_over(u64::MAX));
    }

    #[test]
    fn a_wait_counts_as_a_rest_if_others_had_time_to_run() {
        let mut stretch = Stretch::new(0);
        stretch.waited(STRETCH_US, STRETCH_US + REST_US - 1);
        assert!(stretch.is_over(STRETCH_US + REST_US - 1));
        stretch.waited(STRETCH_US, STRETCH_US + REST_US);
        assert!(!stretch.is_over(2 * STRETCH_US));
        assert!(stretch.is_over(2 * STRETCH_US + REST_US));
    }
}
