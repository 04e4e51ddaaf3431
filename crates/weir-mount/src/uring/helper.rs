//! The thread that waits for a core's sync, so that the thread of its queue does not.
//!
//! A lone sync is fastest when one thread writes and flushes (see `docs/DESIGN.md`, group commit); waking the log's threads on
//! other cores instead costs more than the flush of a fast disk. The helper runs on the queue's core: to wake it and to be
//! woken by it are switches on that core. Where several sync at a time, tickets are better: see `super::serve`.
//!
//! Lock: `state` is a leaf; no job runs under it.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use weir::sync::{Condvar, Mutex};

enum State<T> {
    Idle,
    Given(T),
    Busy,
    Closing,
}

struct Shared<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

/// See the module's head. Dropping it waits for its job.
pub struct Helper<T> {
    shared: Arc<Shared<T>>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Send + 'static> Helper<T> {
    /// The helper of a core; `work` does a job, and must not unwind.
    pub fn new(core: usize, work: impl Fn(T) + Send + 'static) -> io::Result<Self> {
        let shared = Shared { state: Mutex::new(State::Idle), changed: Condvar::new() };
        let shared = Arc::new(shared);
        let theirs = Arc::clone(&shared);
        let thread =
            std::thread::Builder::new().name(format!("weir-fsync-{core}")).spawn(move || {
                super::stay_on(core);
                weir::sync::come_first();
                theirs.run(&work);
            })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Gives it `job`, or gives `job` back if it has one.
    pub fn give(&self, job: T) -> Result<(), T> {
        let mut state = self.shared.state.lock();
        if !matches!(*state, State::Idle) {
            return Err(job);
        }
        *state = State::Given(job);
        drop(state);
        self.shared.changed.notify_one();
        Ok(())
    }
}

impl<T> Drop for Helper<T> {
    fn drop(&mut self) {
        {
            let mut state = self.shared.state.lock();
            while !matches!(*state, State::Idle) {
                self.shared.changed.wait(&mut state);
            }
            *state = State::Closing;
        }
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // Jobs do not unwind.
            let _ = thread.join();
        }
    }
}

impl<T> Shared<T> {
    fn run(&self, work: &dyn Fn(T)) {
        let mut state = self.state.lock();
        loop {
            match std::mem::replace(&mut *state, State::Busy) {
                State::Given(job) => {
                    drop(state);
                    work(job);
                    state = self.state.lock();
                    *state = State::Idle;
                    // Whoever drops the helper may wait for this.
                    self.changed.notify_all();
                }
                State::Closing => return,
                State::Idle | State::Busy => {
                    *state = State::Idle;
                    self.changed.wait(&mut state);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn one_job_at_a_time_is_taken_and_all_that_were_are_done_before_it_ends() {
        let (begun, has_begun) = mpsc::channel();
        let (go_on, may_go_on) = mpsc::channel::<()>();
        let (done, is_done) = mpsc::channel();
        let helper = Helper::new(0, move |job: u32| {
            begun.send(()).unwrap();
            may_go_on.recv().unwrap();
            done.send(job).unwrap();
        });
        let helper = helper.unwrap();
        assert_eq!(helper.give(1), Ok(()));
        has_begun.recv().unwrap();
        assert_eq!(helper.give(2), Err(2));
        go_on.send(()).unwrap();
        drop(helper);
        assert_eq!(is_done.iter().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn it_takes_the_next_job_after_each() {
        let (done, is_done) = mpsc::channel();
        let helper = Helper::new(0, move |job| done.send(job).unwrap()).unwrap();
        for number in 0..100 {
            while helper.give(number).is_err() {
                std::thread::yield_now();
            }
            assert_eq!(is_done.recv().unwrap(), number);
        }
    }
}
