//! What must be done at once says so to all that it calls: where they would read from the device, or wait for a lock that may be held over that,
//! they fail with [`crate::Error::WouldBlock`] instead.
//!
//! **Invariant:** what is called so only looks up and takes hold, and lets go again where it fails. A commit is never impatient: its failure would
//! be an error of the file.

use super::thread_local;
use std::cell::Cell;

/// How often a lock is tried that others mostly hold for computing only.
const ATTEMPTS: usize = 64;

thread_local! {
    static MAY_WAIT: Cell<bool> = const { Cell::new(true) };
}

/// What `body` calls on this thread does not wait.
pub fn at_once<T>(body: impl FnOnce() -> T) -> T {
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            MAY_WAIT.with(|may_wait| may_wait.set(self.0));
        }
    }
    let _before = Before(MAY_WAIT.with(|may_wait| may_wait.replace(false)));
    body()
}

/// False within [`at_once`].
pub fn may_wait() -> bool {
    MAY_WAIT.with(Cell::get)
}

/// What `lock` takes; within [`at_once`] what `try_lock` gets in a moment.
pub fn patiently<T>(lock: impl FnOnce() -> T, try_lock: impl Fn() -> Option<T>) -> Option<T> {
    if may_wait() {
        return Some(lock());
    }
    for _ in 0..ATTEMPTS {
        if let Some(guard) = try_lock() {
            return Some(guard);
        }
        std::hint::spin_loop();
    }
    None
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::sync::Mutex;

    #[test]
    fn nobody_waits_within_and_everybody_may_again_behind_it() {
        let mutex = Mutex::new(1);
        let take = || patiently(|| mutex.lock(), || mutex.try_lock());
        assert!(may_wait());
        assert_eq!(at_once(|| take().map(|guard| *guard)), Some(1));
        let held = mutex.lock();
        assert!(at_once(|| at_once(|| take().is_none()) && take().is_none() && !may_wait()));
        drop(held);
        assert!(may_wait() && take().is_some());
        let panicked = std::panic::catch_unwind(|| at_once(|| panic!("on purpose")));
        assert!(panicked.is_err() && may_wait());
    }
}
