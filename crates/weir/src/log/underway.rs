//! Frames on their way to the device, and who lets them pass.
//!
//! A disk may serve requests in the order of their places: a scheduler does that where the device's own queue is short (mq-deadline), and some
//! devices do. Whoever goes on sending more and more of a large file then keeps a frame waiting that lies before it, for as long as he goes on.
//! So he waits between two portions until the frames are written that are on their way: what he has sent comes to its end, and
//! the frame's turn comes. And a little for a flush, which may have something to be written as well.
//!
//! **Invariant:** a frame that is on its way waits for nothing but the device, so that nobody waits for himself here.
//!
//! Lock: its own, a leaf. Frames take it only where somebody waits for them.

use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Clock, Condvar, Mutex, wait_for};

/// How long a portion of data waits for frames at most: whatever holds them up then is not the data that was sent before.
pub const FRAME_US: u64 = 20_000;
/// How long it waits for a flush at most. It may take much longer, and then for other reasons; but if it has something to be written first (an
/// inode of the file system that the volume is a file of), that has its turn after so long.
pub const FLUSH_US: u64 = 2_000;

/// See the module's head.
#[derive(Default)]
pub struct Underway {
    begun: AtomicU64,
    ended: AtomicU64,
    waiting: AtomicU64,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Underway {
    /// Performs the write of a frame, or a flush.
    pub(super) fn pass<R>(&self, write: impl FnOnce() -> R) -> R {
        self.begun.fetch_add(1, Ordering::SeqCst);
        let result = write();
        self.ended.fetch_add(1, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            // Who has seen that it had not ended sleeps by now.
            drop(self.lock.lock());
            self.changed.notify_all();
        }
        result
    }

    /// Waits until as many have ended as were begun before the call, at most `most_us`. Answers how long that was, in microseconds; none if there
    /// was nothing to wait for.
    pub fn let_pass(&self, clock: &dyn Clock, most_us: u64) -> Option<u64> {
        let begun = self.begun.load(Ordering::SeqCst);
        let is_over = || self.ended.load(Ordering::SeqCst) >= begun;
        if is_over() {
            return None;
        }
        let began_ns = clock.monotonic_ns();
        let waited_us = || clock.since_ns(began_ns) / 1000;
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let mut held = self.lock.lock();
        while !is_over() {
            let left_us = most_us.saturating_sub(waited_us());
            if left_us == 0 || wait_for(&self.changed, &mut held, left_us) {
                break;
            }
        }
        drop(held);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        Some(waited_us())
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::sync::{Arc, SystemClock};

    #[test]
    fn who_lets_frames_pass_goes_on_when_they_are_written() {
        let underway = Arc::new(Underway::default());
        assert_eq!(underway.let_pass(&SystemClock::default(), FRAME_US), None);
        let other = underway.clone();
        let waiting = underway.pass(|| {
            let waiting =
                std::thread::spawn(move || other.let_pass(&SystemClock::default(), FRAME_US));
            while underway.waiting.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            waiting
        });
        assert!(waiting.join().expect("ended").is_some(), "it has waited");
        assert_eq!(underway.waiting.load(Ordering::SeqCst), 0);
        assert_eq!(underway.let_pass(&SystemClock::default(), FRAME_US), None, "it is written");
    }

    #[test]
    fn a_frame_that_is_held_up_by_something_else_holds_nobody_up_for_ever() {
        let underway = Underway::default();
        let waited_us = underway.pass(|| underway.let_pass(&SystemClock::default(), FRAME_US));
        assert!(waited_us >= Some(FRAME_US), "{waited_us:?}");
    }
}
