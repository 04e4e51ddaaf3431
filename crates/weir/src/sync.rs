//! The one seam through which the engine reaches threads, locks, atomics and the clock.
//!
//! A normal build uses `std`. With the `shuttle` feature every primitive comes from
//! the deterministic scheduler of the `shuttle` crate, so that the locking modules can be explored
//! schedule by schedule. No other module of the engine may name `std::sync`'s locks,
//! `std::thread` or `std::time::Instant`.

mod handover;
mod locks;
mod patience;
mod process;
mod scheduling;

pub use handover::{Turn, take_turns};
pub use locks::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, wait_for};
pub use patience::{at_once, may_wait, patiently};
pub use process::{NumberedProcess, Process};
#[cfg(not(feature = "shuttle"))]
pub use scheduling::without_signals;
pub use scheduling::{
    RunDelay, SchedulingClass, come_first, give_way, in_class, may_change_class, processor_time_ns,
    set_scheduling_class,
};
pub use std::sync::{Arc, Weak};

/// What a normal build is made of.
#[cfg(not(feature = "shuttle"))]
mod base {
    pub use std::sync::atomic;
    pub use std::sync::{
        Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError,
    };
    pub use std::thread::{JoinHandle, yield_now};
    pub use std::thread_local;

    /// How long [`super::wait_for`] waits.
    pub fn timeout(timeout_us: u64) -> std::time::Duration {
        std::time::Duration::from_micros(timeout_us)
    }

    #[cfg(test)]
    thread_local! {
        /// How many threads the calling one can start before the system has no more for it.
        pub static THREADS_LEFT: std::cell::Cell<usize> = const { std::cell::Cell::new(usize::MAX) };
    }

    /// See [`super::spawn`].
    pub fn spawn<F>(name: &str, body: F) -> std::io::Result<JoinHandle<()>>
    where
        F: FnOnce() + Send + 'static,
    {
        #[cfg(test)]
        match THREADS_LEFT.get().checked_sub(1) {
            Some(left) => THREADS_LEFT.set(left),
            None => return Err(std::io::Error::from_raw_os_error(libc::EAGAIN)),
        }
        let thread = std::thread::Builder::new().name(name.to_owned());
        super::scheduling::without_signals(|| thread.spawn(body))
    }
}

/// What the schedule tests are made of.
#[cfg(feature = "shuttle")]
mod base {
    pub use shuttle::sync::atomic;
    pub use shuttle::sync::{
        Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
    };
    pub use shuttle::thread::{JoinHandle, yield_now};
    pub use shuttle::thread_local;
    pub use std::sync::TryLockError;

    /// `shuttle` has no time: a wait ends by notification or at once.
    pub fn timeout(_timeout_us: u64) -> std::time::Duration {
        std::time::Duration::from_micros(1)
    }

    /// See [`super::spawn`]: a thread under the scheduler, without a name. Never fails: the two have one shape.
    #[allow(clippy::unnecessary_wraps)]
    pub fn spawn<F>(_name: &str, body: F) -> std::io::Result<JoinHandle<()>>
    where
        F: FnOnce() + Send + 'static,
    {
        Ok(shuttle::thread::spawn(body))
    }
}

use crate::error::{Error, Result};
#[cfg(all(test, not(feature = "shuttle")))]
pub use base::THREADS_LEFT;
use base::thread_local;
pub use base::{JoinHandle, atomic, yield_now};
use std::cell::Cell;

thread_local! {
    static IS_OWN: Cell<bool> = const { Cell::new(false) };
}

/// Starts a named thread of the engine. It takes none of the program's signals.
///
/// # Errors
/// [`Error::NoThread`], when the operating system has none to give.
pub fn spawn<F>(name: &str, body: F) -> Result<JoinHandle<()>>
where
    F: FnOnce() + Send + 'static,
{
    let started = base::spawn(name, move || {
        IS_OWN.with(|is_own| is_own.set(true));
        body();
    });
    started.map_err(|error| Error::NoThread(error.to_string()))
}

/// Calls its end when it is dropped by a panic: what others wait for will not come from this thread any more. Not by one that was under way
/// before: whoever panics with a volume open ends that in good order while it unwinds.
pub struct OnPanic<F: Fn()> {
    end: F,
    was_panicking: bool,
}

impl<F: Fn()> OnPanic<F> {
    /// From here on.
    pub fn new(end: F) -> Self {
        Self { end, was_panicking: is_panicking() }
    }
}

impl<F: Fn()> Drop for OnPanic<F> {
    fn drop(&mut self) {
        if is_panicking() && !self.was_panicking {
            (self.end)();
        }
    }
}

/// The calling thread panics, and others will go on. In a schedule test nobody does.
pub fn is_panicking() -> bool {
    std::thread::panicking() && !cfg!(feature = "shuttle")
}

/// The calling thread was started by an engine, or closes a volume: callbacks and wakers run there, and what waits for the end of either must
/// not be called by one.
pub fn is_own_thread() -> bool {
    IS_OWN.with(Cell::get)
}

/// Does `body`, in which the calling thread counts as one of an engine's.
pub fn as_own_thread<R>(body: impl FnOnce() -> R) -> R {
    /// What it was before, also where `body` panics.
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            IS_OWN.with(|is_own| is_own.set(self.0));
        }
    }
    let _before = Before(IS_OWN.with(|is_own| is_own.replace(true)));
    body()
}

/// Where the engine gets time from; the simulator brings its own.
pub trait Clock: Send + Sync {
    /// Wall clock: nanoseconds since 1970, for file timestamps.
    fn realtime_ns(&self) -> i64;
    /// Monotonic clock: nanoseconds, for latencies and pacing.
    fn monotonic_ns(&self) -> u64;
    /// Nanoseconds of the monotonic clock since it showed `began_ns`.
    fn since_ns(&self, began_ns: u64) -> u64 {
        self.monotonic_ns().saturating_sub(began_ns)
    }
    /// Lets `duration_us` pass for the calling thread.
    fn sleep_us(&self, duration_us: u64);
}

/// The machine's clocks.
#[derive(Debug)]
pub struct SystemClock {
    start: std::time::Instant,
}

impl Default for SystemClock {
    fn default() -> Self {
        Self { start: std::time::Instant::now() }
    }
}

impl Clock for SystemClock {
    fn realtime_ns(&self) -> i64 {
        std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |since| i64::try_from(since.as_nanos()).unwrap_or(i64::MAX))
    }
    fn monotonic_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }
    fn sleep_us(&self, duration_us: u64) {
        std::thread::sleep(std::time::Duration::from_micros(duration_us));
    }
}
