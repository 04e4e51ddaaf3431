//! Those who wait for the log: parked threads and callbacks.

use super::companion::Party;
use super::core::Goal;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Condvar, Mutex};
use crate::ticket::{Promise, PromiseOwner};
use crate::{Error, Result};
use std::cell::Cell;

/// What is done once when an LSN is durable, or cannot become so any more: a promise ends, as its owner sees to. Tickets are many, and
/// this needs no memory of its own.
pub struct OnDurable {
    /// Sees to it.
    pub owner: Arc<dyn PromiseOwner>,
    /// What ends.
    pub promise: Promise,
}

impl OnDurable {
    pub(super) fn call(self, result: Result<()>) {
        self.owner.end(self.promise, result);
    }
}

/// What a sleeping caller is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Its goal is reached.
    Reached,
    /// The log is shut down.
    Failed(Error),
    /// There may be something to do for it.
    Look,
}

/// A blocked caller.
pub(super) struct Own {
    pub goal: Goal,
    pub arrived_ns: u64,
    /// The round that covers it has begun, and its wait for that is counted.
    pub is_queued: Cell<bool>,
}

/// Where one caller sleeps. Each has a lock of its own, so that waking many does not make them
/// queue up for the core lock.
#[derive(Debug)]
pub(super) struct Slot {
    pub goal: Goal,
    pub arrived_ns: u64,
    /// As of [`Own`]. Under the core lock.
    is_queued: AtomicBool,
    verdict: Mutex<Option<Verdict>>,
    wake: Condvar,
}

impl Slot {
    pub fn new(goal: Goal, arrived_ns: u64) -> Self {
        let is_queued = AtomicBool::new(false);
        Self { goal, arrived_ns, is_queued, verdict: Mutex::new(None), wake: Condvar::new() }
    }

    /// The round that covers the caller has begun.
    pub fn note_queued(&self) {
        self.is_queued.store(true, Ordering::Relaxed);
    }

    /// It did while the caller slept.
    pub fn is_queued(&self) -> bool {
        self.is_queued.load(Ordering::Relaxed)
    }

    fn tell(&self, verdict: Verdict) {
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

/// A callback that waits for its LSN.
pub(super) struct Callback {
    pub on_durable: OnDurable,
    pub arrived_ns: u64,
}

/// Who is to be woken once the core lock is released.
#[derive(Default)]
pub(super) struct Outbox {
    /// Called to look. First of all: a role is free until they come.
    pub calls: Vec<Arc<Slot>>,
    /// Drivers called to look.
    pub driver_calls: usize,
    /// Have reached their goal.
    pub reached: Vec<Arc<Slot>>,
    /// Hear of the shutdown.
    pub failed: Option<(Vec<Arc<Slot>>, Error)>,
    /// Data whose frames count as written, and whose owners are to be told.
    pub parties: Vec<Party>,
    /// These have waited for one flush of whoever is to tell them.
    has_kept_parties: bool,
}

impl Outbox {
    /// Leaves owners untold until after a flush. False: they have waited for one already. Who flushes again and again, because others write
    /// meanwhile, would keep their pages under writeback, and the log from being emptied.
    pub fn keep_parties(&mut self) -> bool {
        !std::mem::replace(&mut self.has_kept_parties, true)
    }

    /// Tells whose data was written beside frames that count. Call it without the core lock.
    pub fn end_parties(&mut self) {
        self.has_kept_parties = false;
        for party in self.parties.drain(..) {
            party.end(&Ok(()));
        }
    }

    /// Wakes everybody. Call it without the core lock. Answers whether somebody is called to look.
    pub fn send(&mut self, driver_wake: &Condvar) -> bool {
        let has_called = !self.calls.is_empty() || self.driver_calls > 0;
        for slot in self.calls.drain(..) {
            slot.tell(Verdict::Look);
        }
        for _ in 0..std::mem::take(&mut self.driver_calls) {
            driver_wake.notify_one();
        }
        for slot in self.reached.drain(..) {
            slot.tell(Verdict::Reached);
        }
        if let Some((slots, error)) = self.failed.take() {
            for slot in slots {
                slot.tell(Verdict::Failed(error.clone()));
            }
        }
        has_called
    }
}

/// A promise for tests: `callback` is called.
#[cfg(any(test, feature = "shuttle"))]
pub fn calls(callback: impl FnOnce(Result<()>) + Send + 'static) -> OnDurable {
    struct Calls<F>(Mutex<Option<F>>);
    impl<F: FnOnce(Result<()>) + Send> PromiseOwner for Calls<F> {
        fn end(&self, promise: Promise, result: Result<()>) {
            let callback = self.0.lock().take();
            promise.complete(result.clone());
            callback.expect("a promise ends once")(result);
        }
    }
    let (_ticket, promise) = crate::ticket::ticket(None);
    OnDurable { owner: Arc::new(Calls(Mutex::new(Some(callback)))), promise }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::Outbox;

    #[test]
    fn owners_of_data_wait_for_one_flush_and_no_more() {
        let mut out = Outbox::default();
        for _ in 0..3 {
            assert!(out.keep_parties());
            assert!(!out.keep_parties());
            assert!(!out.keep_parties());
            out.end_parties();
        }
    }
}
