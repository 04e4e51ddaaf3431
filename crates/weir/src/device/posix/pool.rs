//! The threads that serve submitted requests.
//!
//! A thread is started when a request finds none idle, up to the limit; nothing is started for a
//! device that is only used through blocking calls. Waiting requests are served most urgent
//! class first, first come first served within a class. The classes nobody waits for
//! (read-ahead and below) never take the last free thread, so that an urgent request finds one.
//!
//! Locks: `state` is a leaf and is not held while a request is performed or completed.
//! Dropping the pool serves what is queued, then waits for the threads (unless it is dropped
//! *on* one of them, by a completion that held the last reference to the device).

use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::Disk;
use crate::device::request::perform;
use crate::device::{IoClass, OnDone, Request};
use crate::sync::{Arc, Condvar, JoinHandle, Mutex, NumberedProcess, spawn};

/// Number of classes.
const CLASSES: usize = IoClass::Background as usize + 1;

thread_local! {
    /// Whether this thread belongs to a pool.
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

struct Job {
    disk: Arc<Disk>,
    request: Request,
    on_done: OnDone,
}

#[derive(Default)]
struct State {
    queues: [VecDeque<Job>; CLASSES],
    threads: Vec<JoinHandle<()>>,
    idle: usize,
    /// Threads that perform a request nobody waits for.
    patient: usize,
    stop: bool,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    limit: usize,
}

/// See the module's head.
pub(super) struct Pool {
    shared: Arc<Shared>,
    process: NumberedProcess,
}

impl fmt::Debug for Pool {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Pool").field("limit", &self.shared.limit).finish_non_exhaustive()
    }
}

/// Whether a caller waits for requests of this class.
fn is_urgent(class: usize) -> bool {
    class <= IoClass::SyncWrite as usize
}

impl State {
    /// The next request to serve, with its class.
    fn take(&mut self, limit: usize) -> Option<(usize, Job)> {
        let class = (0..CLASSES).find(|&class| !self.queues[class].is_empty())?;
        let patient_allowed = limit == 1 || self.patient + 1 < limit;
        if !is_urgent(class) && !patient_allowed {
            return None;
        }
        self.queues[class].pop_front().map(|job| (class, job))
    }

    fn queued(&self) -> usize {
        self.queues.iter().map(VecDeque::len).sum()
    }
}

impl Pool {
    /// A pool of at most `limit` threads; none is started yet.
    pub(super) fn new(limit: usize) -> Self {
        let state = Mutex::new(State::default());
        let shared = Arc::new(Shared { state, work: Condvar::new(), limit });
        Self { shared, process: NumberedProcess::this() }
    }

    /// Queues `request` for `disk`.
    pub(super) fn submit(&self, disk: &Arc<Disk>, request: Request, on_done: OnDone) {
        let class = request.class as usize;
        let job = Job { disk: Arc::clone(disk), request, on_done };
        if !self.process.is_this() {
            // It has no threads in a forked child, and what those have locked stays so.
            return run(job);
        }
        let mut state = self.shared.state.lock();
        state.queues[class].push_back(job);
        self.shared.work.notify_one();
        // Counted against all that is queued: an idle thread may be on its way to an earlier one.
        if state.queued() > state.idle && state.threads.len() < self.shared.limit {
            let shared = Arc::clone(&self.shared);
            match spawn("weir-io", move || serve(&shared)) {
                Ok(thread) => state.threads.push(thread),
                Err(_) if state.threads.is_empty() => {
                    // No thread to be had at all: serve the request here, rather than never.
                    let job = state.queues[class].pop_back();
                    drop(state);
                    if let Some(job) = job {
                        run(job);
                    }
                }
                Err(_) => {}
            }
        }
    }
}

fn run(job: Job) {
    let Job { disk, request, on_done } = job;
    let (result, buffers) = perform(&*disk, request);
    drop(disk);
    on_done(result, buffers);
}

/// As [`run`], and a completion that panics (the hook has reported it) does not end the thread.
fn run_on_worker(job: Job) {
    let _ = catch_unwind(AssertUnwindSafe(|| run(job)));
}

/// A thread's life.
fn serve(shared: &Shared) {
    IS_WORKER.set(true);
    let mut state = shared.state.lock();
    loop {
        if let Some((class, job)) = state.take(shared.limit) {
            let patient = usize::from(!is_urgent(class));
            state.patient += patient;
            drop(state);
            run_on_worker(job);
            state = shared.state.lock();
            state.patient -= patient;
        } else if state.stop && state.queued() == 0 {
            // Others may have gone to sleep before the last request was taken.
            shared.work.notify_all();
            return;
        } else {
            state.idle += 1;
            shared.work.wait(&mut state);
            state.idle -= 1;
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if !self.process.is_this() {
            // Their handles lead nowhere.
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        let threads = {
            let mut state = self.shared.state.lock();
            state.stop = true;
            self.shared.work.notify_all();
            std::mem::take(&mut state.threads)
        };
        if !IS_WORKER.get() {
            for thread in threads {
                // Threads do not panic, and dropping must not either.
                let _ = thread.join();
            }
        }
    }
}
