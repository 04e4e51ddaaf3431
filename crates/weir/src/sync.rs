//! The one seam through which the engine reaches threads, locks, atomics and the clock.
//!
//! A normal build uses `parking_lot` and `std`. With the `shuttle` feature every primitive comes from
//! the deterministic scheduler of the `shuttle` crate, so that the locking modules can be explored
//! schedule by schedule. No other module of the engine may name `std::sync`'s locks,
//! `std::thread` or `std::time::Instant`.
//!
//! The wrappers have `parking_lot`'s shape: locking never fails. (A poisoned lock of the
//! `shuttle` build has already failed the test that poisoned it.)

mod scheduling;

pub use scheduling::give_way;
pub use std::sync::{Arc, Weak};

#[cfg(not(feature = "shuttle"))]
mod imp {
    pub use parking_lot::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
    pub use std::sync::atomic;
    pub use std::thread::{JoinHandle, yield_now};

    /// Starts a named thread of the engine.
    ///
    /// # Errors
    /// The operating system's, when it has no thread to give.
    pub fn spawn<F>(name: &str, body: F) -> std::io::Result<JoinHandle<()>>
    where
        F: FnOnce() + Send + 'static,
    {
        std::thread::Builder::new().name(name.to_owned()).spawn(body)
    }

    /// Waits on `condvar` for at most `timeout_us`; true when the time ran out.
    pub fn wait_for<T>(condvar: &Condvar, guard: &mut MutexGuard<'_, T>, timeout_us: u64) -> bool {
        condvar.wait_for(guard, std::time::Duration::from_micros(timeout_us)).timed_out()
    }
}

#[cfg(feature = "shuttle")]
mod imp {
    pub use shuttle::sync::atomic;
    pub use shuttle::thread::{JoinHandle, yield_now};
    use std::ops::{Deref, DerefMut};

    /// See `parking_lot::Mutex`.
    #[derive(Debug, Default)]
    pub struct Mutex<T: ?Sized>(shuttle::sync::Mutex<T>);
    /// Guard of [`Mutex`]; the option is empty only while a condition variable holds the lock.
    #[derive(Debug)]
    pub struct MutexGuard<'a, T: ?Sized>(Option<shuttle::sync::MutexGuard<'a, T>>);

    impl<T> Mutex<T> {
        /// See `parking_lot::Mutex::new`.
        pub fn new(value: T) -> Self {
            Self(shuttle::sync::Mutex::new(value))
        }
        /// See `parking_lot::Mutex::into_inner`.
        pub fn into_inner(self) -> T {
            self.0.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)
        }
    }
    impl<T: ?Sized> Mutex<T> {
        /// See `parking_lot::Mutex::lock`.
        pub fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard(Some(self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)))
        }
        /// See `parking_lot::Mutex::get_mut`.
        pub fn get_mut(&mut self) -> &mut T {
            self.0.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner)
        }
        /// See `parking_lot::Mutex::try_lock`.
        pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok().map(|guard| MutexGuard(Some(guard)))
        }
    }
    impl<T: ?Sized> Deref for MutexGuard<'_, T> {
        type Target = T;
        fn deref(&self) -> &T {
            self.0.as_ref().unwrap_or_else(|| unreachable!("guard used while waiting"))
        }
    }
    impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.0.as_mut().unwrap_or_else(|| unreachable!("guard used while waiting"))
        }
    }

    /// See `parking_lot::Condvar`.
    #[derive(Debug, Default)]
    pub struct Condvar(shuttle::sync::Condvar);
    impl Condvar {
        /// See `parking_lot::Condvar::new`.
        pub fn new() -> Self {
            Self(shuttle::sync::Condvar::new())
        }
        /// See `parking_lot::Condvar::wait`.
        pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            if let Some(inner) = guard.0.take() {
                guard.0 =
                    Some(self.0.wait(inner).unwrap_or_else(std::sync::PoisonError::into_inner));
            }
        }
        /// See `parking_lot::Condvar::notify_one`.
        pub fn notify_one(&self) {
            self.0.notify_one();
        }
        /// See `parking_lot::Condvar::notify_all`.
        pub fn notify_all(&self) {
            self.0.notify_all();
        }
    }

    /// Waits on `condvar`; `shuttle` has no time, so the wait ends by notification or at once.
    pub fn wait_for<T>(condvar: &Condvar, guard: &mut MutexGuard<'_, T>, _timeout_us: u64) -> bool {
        if let Some(inner) = guard.0.take() {
            let timeout = std::time::Duration::from_micros(1);
            let (inner, result) = condvar
                .0
                .wait_timeout(inner, timeout)
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            guard.0 = Some(inner);
            return result.timed_out();
        }
        false
    }

    /// See `parking_lot::RwLock`.
    #[derive(Debug, Default)]
    pub struct RwLock<T: ?Sized>(shuttle::sync::RwLock<T>);
    /// Shared guard of [`RwLock`].
    pub type RwLockReadGuard<'a, T> = shuttle::sync::RwLockReadGuard<'a, T>;
    /// Exclusive guard of [`RwLock`].
    pub type RwLockWriteGuard<'a, T> = shuttle::sync::RwLockWriteGuard<'a, T>;
    impl<T> RwLock<T> {
        /// See `parking_lot::RwLock::new`.
        pub fn new(value: T) -> Self {
            Self(shuttle::sync::RwLock::new(value))
        }
    }
    impl<T: ?Sized> RwLock<T> {
        /// See `parking_lot::RwLock::read`.
        pub fn read(&self) -> RwLockReadGuard<'_, T> {
            self.0.read().unwrap_or_else(std::sync::PoisonError::into_inner)
        }
        /// See `parking_lot::RwLock::write`.
        pub fn write(&self) -> RwLockWriteGuard<'_, T> {
            self.0.write().unwrap_or_else(std::sync::PoisonError::into_inner)
        }
        /// See `parking_lot::RwLock::try_read`.
        pub fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
            self.0.try_read().ok()
        }
        /// See `parking_lot::RwLock::try_write`.
        pub fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
            self.0.try_write().ok()
        }
    }

    /// Starts a thread under the scheduler; the name is ignored.
    ///
    /// # Errors
    /// Never.
    pub fn spawn<F>(_name: &str, body: F) -> std::io::Result<JoinHandle<()>>
    where
        F: FnOnce() + Send + 'static,
    {
        Ok(shuttle::thread::spawn(body))
    }
}

pub use imp::*;

/// Where the engine gets time from; the simulator brings its own.
pub trait Clock: Send + Sync {
    /// Wall clock: nanoseconds since 1970, for file timestamps.
    fn realtime_ns(&self) -> i64;
    /// Monotonic clock: nanoseconds, for latencies and pacing.
    fn monotonic_ns(&self) -> u64;
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
