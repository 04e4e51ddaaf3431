//! Threads that take turns, for the simulator: one of them runs at a time, who would have to wait hands over instead, and others may hand
//! over wherever they come by a lock.
//!
//! A program that does not ask for this pays for one look at a variable of the thread for each lock, a load and a branch.

use std::cell::Cell;

/// Where a thread that takes turns has come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// It is about to take a lock, whoever has it.
    Locks,
    /// It would have to wait for a lock, or a notification.
    Waits,
}

thread_local! {
    static TAKES_TURNS: Cell<Option<fn(Turn)>> = const { Cell::new(None) };
}

/// From now on the calling thread calls `hook` before it takes a lock; and where it would wait for one, or for a notification, it calls it
/// instead, without the lock that the notification is about, and looks again when it returns (a wait with a time limit ends then). `None`:
/// it waits as ever. (The `shuttle` build has a scheduler of its own, and ignores this.)
pub fn take_turns(hook: Option<fn(Turn)>) {
    TAKES_TURNS.set(hook);
}

pub(super) fn takes_turns() -> bool {
    cfg!(not(feature = "shuttle")) && TAKES_TURNS.get().is_some()
}

#[inline]
pub(super) fn come_to(turn: Turn) {
    if cfg!(not(feature = "shuttle"))
        && let Some(hook) = TAKES_TURNS.get()
    {
        hook(turn);
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
        take_turns(Some(|turn| {
            CALLS.fetch_add(u32::from(turn == Turn::Waits), SeqCst);
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
    fn who_takes_turns_may_hand_over_at_every_lock() {
        static CALLS: AtomicU32 = AtomicU32::new(0);
        let (mutex, lock) = (Mutex::new(7), RwLock::new(8));
        take_turns(Some(|turn| {
            CALLS.fetch_add(u32::from(turn == Turn::Locks), SeqCst);
        }));
        *mutex.lock() += 1;
        *lock.write() += *mutex.lock();
        assert_eq!((*lock.read(), CALLS.load(SeqCst)), (16, 4));
        take_turns(None);
        assert_eq!((*mutex.lock(), CALLS.load(SeqCst)), (8, 4));
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
            take_turns(Some(|turn| {
                CALLS.fetch_add(u32::from(turn == Turn::Waits), SeqCst);
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
