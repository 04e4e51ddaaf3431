//! Locks and condition variables, of `std` or of `shuttle`: the two have one shape.
//!
//! Locking never fails: what a thread that panicked leaves behind a lock is as good as what it leaves anywhere else, and the
//! volume's own sticky error says so. (A poisoned lock of the `shuttle` build has already failed the test that poisoned it.)
//!
//! **Invariant:** who waits for a lock spins for a moment or sleeps; it never yields the processor. A thread that yields while
//! something else wants to compute loses its turn for a whole time slice, and nobody wakes it when the lock is free
//! (docs/DESIGN.md, "Who waits for a lock sleeps").
//! **Invariant:** who notifies a [`Condvar`] has held its mutex since it changed what others wait for, so that a waiter either
//! has been counted or sees the change.

use super::base;
use super::handover::{Turn, come_to, takes_turns};
use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use base::{RwLockReadGuard, RwLockWriteGuard};

/// Mutual exclusion; not fair, not reentrant.
#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized>(base::Mutex<T>);

/// Holds a [`Mutex`]. The option is empty only while a condition variable has it.
#[derive(Debug)]
pub struct MutexGuard<'a, T: ?Sized> {
    inner: Option<base::MutexGuard<'a, T>>,
    mutex: &'a Mutex<T>,
}

impl<T> Mutex<T> {
    /// An unlocked one.
    pub fn new(value: T) -> Self {
        Self(base::Mutex::new(value))
    }

    /// What it protected.
    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Waits until nobody else holds it.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard { inner: Some(self.lock_base()), mutex: self }
    }

    fn lock_base(&self) -> base::MutexGuard<'_, T> {
        let take = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        get(|| tried(self.0.try_lock()), take)
    }

    /// The guard, if nobody holds it now.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        Some(MutexGuard { inner: Some(tried(self.0.try_lock())?), mutex: self })
    }

    /// The value, without a lock: nobody else can have it.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.inner.as_ref().unwrap_or_else(|| unreachable!("guard used while waiting"))
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.inner.as_mut().unwrap_or_else(|| unreachable!("guard used while waiting"))
    }
}

/// Lets threads wait for a change of what a [`Mutex`] protects. Spurious wake-ups happen.
#[derive(Debug, Default)]
pub struct Condvar {
    inner: base::Condvar,
    /// Who waits, or is on the way to or from it. Changed with the mutex held: notifying nobody costs no system call.
    waiters: AtomicUsize,
}

impl Condvar {
    /// Nobody waits.
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives the mutex away until notified.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        self.waiting(guard, |inner| {
            (self.inner.wait(inner).unwrap_or_else(PoisonError::into_inner), false)
        });
    }

    /// Wakes one, if any waits.
    pub fn notify_one(&self) {
        if self.waiters.load(Ordering::Relaxed) > 0 {
            self.inner.notify_one();
        }
    }

    /// Wakes all that wait.
    pub fn notify_all(&self) {
        if self.waiters.load(Ordering::Relaxed) > 0 {
            self.inner.notify_all();
        }
    }

    fn waiting<'a, T>(
        &self,
        guard: &mut MutexGuard<'a, T>,
        wait: impl FnOnce(base::MutexGuard<'a, T>) -> (base::MutexGuard<'a, T>, bool),
    ) -> bool {
        let Some(inner) = guard.inner.take() else { return false };
        if takes_turns() {
            drop(inner);
            come_to(Turn::Waits);
            guard.inner = Some(guard.mutex.lock_base());
            return true;
        }
        self.waiters.fetch_add(1, Ordering::Relaxed);
        let (inner, timed_out) = wait(inner);
        self.waiters.fetch_sub(1, Ordering::Relaxed);
        guard.inner = Some(inner);
        timed_out
    }
}

/// Waits on `condvar` for at most `timeout_us`; true when the time ran out.
pub fn wait_for<T>(condvar: &Condvar, guard: &mut MutexGuard<'_, T>, timeout_us: u64) -> bool {
    condvar.waiting(guard, |inner| {
        let (inner, result) = condvar
            .inner
            .wait_timeout(inner, base::timeout(timeout_us))
            .unwrap_or_else(PoisonError::into_inner);
        (inner, result.timed_out())
    })
}

/// Many readers or one writer. A reader waits behind a writer that waits, so nobody reads twice at a time.
#[derive(Debug, Default)]
pub struct RwLock<T: ?Sized>(base::RwLock<T>);

impl<T> RwLock<T> {
    /// An unlocked one.
    pub fn new(value: T) -> Self {
        Self(base::RwLock::new(value))
    }
}

impl<T: ?Sized> RwLock<T> {
    /// Waits until no writer holds it.
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        get(|| self.try_read(), || self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits until nobody holds it.
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        get(|| self.try_write(), || self.0.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// The guard, if no writer holds it now.
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
        tried(self.0.try_read())
    }

    /// The guard, if nobody holds it now.
    pub fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
        tried(self.0.try_write())
    }
}

/// A lock, by attempt or by waiting for it.
#[inline]
fn get<G>(attempt: impl Fn() -> Option<G>, take: impl FnOnce() -> G) -> G {
    if cfg!(feature = "shuttle") {
        // To its scheduler an attempt is a place of its own.
        return take();
    }
    come_to(Turn::Locks);
    attempt().unwrap_or_else(|| contended(attempt, take))
}

/// Somebody else has it: sleeps until it can be had; or hands over as often as that takes, where threads take turns.
#[cold]
fn contended<G>(attempt: impl Fn() -> Option<G>, take: impl FnOnce() -> G) -> G {
    while takes_turns() {
        come_to(Turn::Waits);
        if let Some(guard) = attempt() {
            return guard;
        }
    }
    take()
}

fn tried<G>(result: Result<G, base::TryLockError<G>>) -> Option<G> {
    match result {
        Ok(guard) => Some(guard),
        Err(base::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(base::TryLockError::WouldBlock) => None,
    }
}
