//! Syncs that were left to the sync threads, and which of them a thread does.
//!
//! Those that write more than a frame takes go on for as long as their data takes to get to the disk, and all threads but one may be busy
//! with such. That one does small ones only: so a large sync delays no small one.

use std::collections::VecDeque;

/// Which deferred syncs somebody does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Jobs {
    /// The oldest.
    All,
    /// The oldest of those that fit into a frame.
    Small,
}

/// What was deferred, in the order in which it came, with its number in it.
pub struct JobQueue<T> {
    small: VecDeque<(u64, T)>,
    large: VecDeque<(u64, T)>,
    count: u64,
    /// Nobody does anything any more.
    has_ended: bool,
}

impl<T> Default for JobQueue<T> {
    fn default() -> Self {
        Self { small: VecDeque::new(), large: VecDeque::new(), count: 0, has_ended: false }
    }
}

impl<T> JobQueue<T> {
    /// The next to come.
    ///
    /// # Errors
    /// It comes too late: here it is again.
    pub fn add(&mut self, job: T, is_small: bool) -> Result<(), T> {
        if self.has_ended {
            return Err(job);
        }
        self.count += 1;
        let queue = if is_small { &mut self.small } else { &mut self.large };
        queue.push_back((self.count, job));
        Ok(())
    }

    /// Nothing more is added. Answers what nobody has taken, in order.
    pub fn end(&mut self) -> Vec<T> {
        self.has_ended = true;
        std::iter::from_fn(|| self.next(Jobs::All)).collect()
    }

    /// Takes one of `jobs`.
    pub fn next(&mut self, jobs: Jobs) -> Option<T> {
        let number = |queue: &VecDeque<(u64, T)>| queue.front().map_or(u64::MAX, |front| front.0);
        let is_large_older = number(&self.large) < number(&self.small);
        let takes_large = jobs == Jobs::All && is_large_older;
        let queue = if takes_large { &mut self.large } else { &mut self.small };
        queue.pop_front().map(|(_, job)| job)
    }

    /// Whether there is one of `jobs`.
    pub fn has(&self, jobs: Jobs) -> bool {
        !self.small.is_empty() || (jobs == Jobs::All && !self.large.is_empty())
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn deferred_syncs_are_done_in_their_order_and_small_ones_need_not_wait_for_large_ones() {
        let mut queue = JobQueue::default();
        for (job, is_small) in [(1, false), (2, true), (3, false), (4, true), (5, true)] {
            queue.add(job, is_small).unwrap();
        }
        assert_eq!(queue.next(Jobs::Small), Some(2));
        assert_eq!(queue.next(Jobs::All), Some(1));
        assert_eq!(queue.next(Jobs::All), Some(3));
        assert_eq!(queue.next(Jobs::All), Some(4));
        queue.add(6, false).unwrap();
        assert_eq!(queue.next(Jobs::All), Some(5));
        assert!(queue.has(Jobs::All) && !queue.has(Jobs::Small));
        assert_eq!(queue.next(Jobs::Small), None);
        assert_eq!(queue.next(Jobs::All), Some(6));
        assert!(!queue.has(Jobs::All));
    }

    #[test]
    fn what_nobody_does_any_more_comes_back() {
        let mut queue = JobQueue::default();
        for (job, is_small) in [(1, false), (2, true), (3, false)] {
            queue.add(job, is_small).unwrap();
        }
        assert_eq!(queue.end(), [1, 2, 3]);
        assert_eq!(queue.add(4, true), Err(4));
        assert!(!queue.has(Jobs::All));
    }
}
