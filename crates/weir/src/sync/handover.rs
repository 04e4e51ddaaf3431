//! Threads that take turns, for the simulator: one of them runs at a time, and who would have to wait hands over instead.
//!
//! A program that does not ask for this pays for one look at a variable of the thread before it waits for a lock or a notification, and
//! nothing where it need not wait.

use std::cell::Cell;

thread_local! {
    static HAND_OVER: Cell<Option<fn()>> = const { Cell::new(None) };
}

/// From now on, where the calling thread would wait for a lock or a notification, it calls `hand_over` instead, without a lock of its own
/// choice, and looks again when that returns; a wait with a time limit ends then. `None`: it waits as ever. (The `shuttle` build has a
/// scheduler of its own, and ignores this.)
pub fn take_turns(hand_over: Option<fn()>) {
    HAND_OVER.set(hand_over);
}

pub(super) fn takes_turns() -> bool {
    cfg!(not(feature = "shuttle")) && HAND_OVER.get().is_some()
}

pub(super) fn hand_over() {
    if let Some(hand_over) = HAND_OVER.get() {
        hand_over();
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::sync::{Condvar, Mutex, RwLock, wait_for};
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

    #[test]
    fn who_would_wait_for_a_notification_hands_over_and_looks_again() {
        static CALLS: AtomicU32 = AtomicU32::new(0);
        take_turns(Some(|| {
            CALLS.fetch_add(1, SeqCst);
        }));
        let (mutex, lock, changed) = (Mutex::new(7), RwLock::new(8), Condvar::new());
        let mut guard = mutex.lock();
        *lock.write() += 1;
        assert_eq!((*guard, *lock.read(), CALLS.load(SeqCst)), (7, 9, 0));
        changed.wait(&mut guard);
        assert!(wait_for(&changed, &mut guard, 60_000_000));
        assert_eq!((*guard, CALLS.load(SeqCst)), (7, 2));
        take_turns(None);
    }

    #[test]
    fn who_finds_a_lock_taken_hands_over_until_it_is_free() {
        static CALLS: AtomicU32 = AtomicU32::new(0);
        let called = |times: u32| {
            while CALLS.load(SeqCst) < times {
                std::thread::yield_now();
            }
        };
        let (mutex, lock, all) = (Mutex::new(1), RwLock::new(2), Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let guard = mutex.lock();
                all.wait();
                called(5);
                drop(guard);
                let guard = lock.write();
                all.wait();
                called(10);
                drop(guard);
                let guard = lock.read();
                all.wait();
                called(15);
                drop(guard);
            });
            take_turns(Some(|| {
                CALLS.fetch_add(1, SeqCst);
            }));
            all.wait();
            assert_eq!(*mutex.lock(), 1);
            CALLS.store(5, SeqCst);
            all.wait();
            assert_eq!(*lock.read(), 2);
            CALLS.store(10, SeqCst);
            all.wait();
            assert_eq!(*lock.write(), 2);
            assert!(CALLS.load(SeqCst) >= 15);
            take_turns(None);
        });
    }
}
