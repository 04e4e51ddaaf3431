//! Requests that wait for the log to get somewhere by itself: one thread for all of them.
//!
//! Lock order: the list is a leaf; answers are given outside of it.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use weir::Volume;
use weir::sync::{Condvar, Mutex, without_signals};

use crate::errno::Errno;
use crate::ops::Done;

/// Longest wait for one operation: a request cannot be interrupted, so a killed program would have to wait that long.
pub const LONGEST: Duration = Duration::from_secs(60);
/// How late the end of a time may be noticed.
const PATIENCE_US: u64 = 20_000;

struct Watch {
    lsn: u64,
    deadline: Instant,
    done: Done,
}

#[derive(Default)]
struct List {
    watches: Vec<Watch>,
    thread: Option<JoinHandle<()>>,
    closing: bool,
}

struct Shared {
    list: Mutex<List>,
    changed: Condvar,
    volume: Volume,
}

/// Watches the durable LSN of a volume. Its thread is started by the first watch.
pub struct Watcher(Arc<Shared>);

impl Watcher {
    /// Watches nothing yet.
    pub fn new(volume: Volume) -> Self {
        Self(Arc::new(Shared { list: Mutex::default(), changed: Condvar::new(), volume }))
    }

    /// Tells `done` when `lsn` is durable, or [`Errno::ETIMEDOUT`] after `timeout`.
    pub fn watch(&self, lsn: u64, timeout: Duration, done: Done) {
        if lsn <= self.0.volume.durable_lsn() {
            return done(Ok(()));
        }
        if timeout.is_zero() {
            return done(Err(Errno::ETIMEDOUT));
        }
        let deadline = Instant::now() + timeout.min(LONGEST);
        let mut list = self.0.list.lock();
        if list.closing {
            drop(list);
            return done(Err(Errno::EIO));
        }
        if list.thread.is_none() {
            let shared = Arc::clone(&self.0);
            let builder = std::thread::Builder::new().name("weir-watch".to_owned());
            let Ok(thread) = without_signals(|| builder.spawn(move || shared.run())) else {
                drop(list);
                return done(Err(Errno::ENOMEM));
            };
            list.thread = Some(thread);
        }
        list.watches.push(Watch { lsn, deadline, done });
        drop(list);
        self.0.changed.notify_one();
    }

    /// Answers whoever still waits, and ends the thread.
    pub fn close(&self) {
        let thread = {
            let mut list = self.0.list.lock();
            list.closing = true;
            list.thread.take()
        };
        self.0.changed.notify_one();
        if let Some(thread) = thread {
            // It answers and ends; what it calls does not unwind.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self) {
        loop {
            let mut list = self.list.lock();
            while list.watches.is_empty() && !list.closing {
                self.changed.wait(&mut list);
            }
            if list.closing {
                let watches = std::mem::take(&mut list.watches);
                drop(list);
                return watches.into_iter().for_each(|watch| (watch.done)(Err(Errno::EIO)));
            }
            drop(list);
            // Any progress wakes this, so a watch that was added meanwhile is not missed.
            let durable = self.volume.durable_lsn();
            self.answer(durable);
            if let Err(error) = self.volume.wait_durable(durable + 1, Some(PATIENCE_US)) {
                let watches = std::mem::take(&mut self.list.lock().watches);
                for watch in watches {
                    (watch.done)(Err((&error).into()));
                }
            }
        }
    }

    /// Answers whose operation is durable, and whose time is over.
    fn answer(&self, durable: u64) {
        let now = Instant::now();
        let ended: Vec<Watch> = self
            .list
            .lock()
            .watches
            .extract_if(.., |watch| watch.lsn <= durable || watch.deadline <= now)
            .collect();
        for watch in ended {
            let reached = watch.lsn <= durable;
            (watch.done)(if reached { Ok(()) } else { Err(Errno::ETIMEDOUT) });
        }
    }
}
