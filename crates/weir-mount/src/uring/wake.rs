//! How other threads wake the thread of a queue, when they have left it an answer: by an event, at once; or by an alarm, a moment later.
//!
//! The alarm is for the answer of a thread on the same core (the queue's helper, a thread of the log) while others compute there. Many systems
//! share a processor between groups first and within them afterwards (`sched_autogroup_enabled`: sessions; control groups). Our group
//! has just had the processor, if only for 20 µs, so when the thread that answered sleeps, the scheduler turns to the group of those that
//! compute. That another thread of ours became ready before that is no reason to come back to it before the next tick of the clock, 4 ms
//! later. One that becomes ready while *they* run interrupts them at once (`weir::sync::come_first`).
//!
//! Whether others compute is known by what they do to the queue's thread: see `super::manners`.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::EventfdFlags;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

/// After this the thread that answered sleeps, and others have had the processor for as long as it had it.
const LATER_NS: i64 = 30_000;
/// As soon as an alarm can be.
const NOW_NS: i64 = 1;

/// How many [`Wake::sources`] there are.
pub const SOURCES: usize = 2;

/// Wakes one thread, which reads [`Wake::sources`].
pub struct Wake {
    event: OwnedFd,
    alarm: OwnedFd,
    core: usize,
    is_late: AtomicBool,
}

impl Wake {
    /// For a thread that stays on `core`.
    pub fn new(core: usize) -> io::Result<Self> {
        Ok(Self {
            event: rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?,
            alarm: timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC)?,
            core,
            is_late: AtomicBool::new(false),
        })
    }

    /// What the thread reads eight bytes from, each time that it was woken by it.
    pub fn sources(&self) -> [BorrowedFd<'_>; SOURCES] {
        [self.event.as_fd(), self.alarm.as_fd()]
    }

    /// Whether the thread has lately had to wait for its core.
    pub fn set_late(&self, is_late: bool) {
        self.is_late.store(is_late, Ordering::Relaxed);
    }

    /// Wakes the thread, now or in a moment.
    pub fn wake(&self) {
        let later =
            self.is_late.load(Ordering::Relaxed) && rustix::thread::sched_getcpu() == self.core;
        if !(later && self.set_alarm(LATER_NS).is_ok()) {
            // It can only fail for want of room, and then the thread has been woken anyhow.
            let _ = self.raise();
        }
    }

    /// Whatever the thread still reads from ends soon.
    pub fn end_reads(&self) -> io::Result<()> {
        self.raise()?;
        self.set_alarm(NOW_NS)
    }

    fn raise(&self) -> io::Result<()> {
        rustix::io::write(&self.event, &1_u64.to_ne_bytes())?;
        Ok(())
    }

    fn set_alarm(&self, nanoseconds: i64) -> io::Result<()> {
        let once = Itimerspec {
            it_interval: Timespec { tv_sec: 0, tv_nsec: 0 },
            it_value: Timespec { tv_sec: 0, tv_nsec: nanoseconds },
        };
        timerfd_settime(&self.alarm, TimerfdTimerFlags::empty(), &once)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, poll};

    /// Which sources can be read within a second; they are read.
    fn ready(wake: &Wake) -> [bool; 2] {
        let sources = wake.sources();
        let mut polled = sources.map(|source| PollFd::from_borrowed_fd(source, PollFlags::IN));
        poll(&mut polled, Some(&Timespec { tv_sec: 1, tv_nsec: 0 })).unwrap();
        let ready = [0, 1].map(|at: usize| polled[at].revents().contains(PollFlags::IN));
        for at in [0, 1] {
            if ready[at] {
                assert_eq!(rustix::io::read(sources[at], &mut [0_u8; 8]).unwrap(), 8);
            }
        }
        ready
    }

    /// Runs on core 0, as the queue of a `Wake` would.
    fn on_core_0(test: impl FnOnce() + Send + 'static) {
        let thread = std::thread::spawn(|| {
            super::super::stay_on(0);
            test();
        });
        thread.join().unwrap();
    }

    #[test]
    fn who_is_not_late_is_woken_by_the_event() {
        on_core_0(|| {
            let wake = Wake::new(0).unwrap();
            wake.wake();
            assert_eq!(ready(&wake), [true, false]);
        });
    }

    #[test]
    fn who_is_late_is_woken_by_the_alarm_each_time_and_only_from_its_own_core() {
        on_core_0(|| {
            let (here, elsewhere) = (Wake::new(0).unwrap(), Wake::new(1).unwrap());
            here.set_late(true);
            elsewhere.set_late(true);
            for _ in 0..3 {
                here.wake();
                assert_eq!(ready(&here), [false, true]);
            }
            elsewhere.wake();
            assert_eq!(ready(&elsewhere), [true, false]);
            here.set_late(false);
            here.wake();
            assert_eq!(ready(&here), [true, false]);
        });
    }

    #[test]
    fn all_reads_end() {
        let wake = Wake::new(0).unwrap();
        wake.end_reads().unwrap();
        for source in wake.sources() {
            assert_eq!(rustix::io::read(source, &mut [0_u8; 8]).unwrap(), 8);
        }
    }
}
