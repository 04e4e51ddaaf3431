//! Those who wait for the log: parked threads and callbacks.

use crate::sync::{Arc, Condvar, Mutex};
use crate::{Error, Result};

/// Called once when an LSN is durable, or cannot become so any more.
pub type OnDurable = Box<dyn FnOnce(Result<()>) + Send>;

/// What a parked caller is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Its goal is reached, by a round or flush that began then.
    Reached {
        /// Monotonic time.
        round_started_ns: u64,
    },
    /// The log is shut down.
    Failed(Error),
    /// It is the leader now.
    Lead,
}

/// Where one caller is parked. Each has a lock of its own, so that waking many does not make them
/// queue up for the core lock.
#[derive(Debug, Default)]
pub(super) struct Slot {
    verdict: Mutex<Option<Verdict>>,
    wake: Condvar,
}

impl Slot {
    pub fn tell(&self, verdict: Verdict) {
        *self.verdict.lock() = Some(verdict);
        self.wake.notify_one();
    }

    pub fn wait(&self) -> Verdict {
        let mut guard = self.verdict.lock();
        loop {
            if let Some(verdict) = guard.take() {
                return verdict;
            }
            self.wake.wait(&mut guard);
        }
    }
}

/// What the core keeps for the log.
pub(super) enum Waiter {
    Caller(Arc<Slot>),
    Callback { on_durable: OnDurable, arrived_ns: u64 },
}

impl Waiter {
    pub fn callback(on_durable: OnDurable, arrived_ns: u64) -> Self {
        Self::Callback { on_durable, arrived_ns }
    }

    /// Tells a parked caller; a callback is never parked.
    pub fn tell(&self, verdict: Verdict) {
        match self {
            Self::Caller(slot) => slot.tell(verdict),
            Self::Callback { .. } => debug_assert!(false, "callbacks are called, not woken"),
        }
    }
}
