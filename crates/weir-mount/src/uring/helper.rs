//! The threads that wait for a core's sync, and for its other requests that may wait, so that the thread of its queue does not.
//!
//! A lone sync is fastest when one thread writes and flushes (see `docs/DESIGN.md`, group commit); waking the log's threads on
//! other cores instead costs more than the flush of a fast disk; what may wait, and mostly does not,
//! would pay as much. The helper runs on the queue's core: to wake it and to be woken by it are switches on that core.
//! Where several sync at a time, tickets are better: see `super::serve`.
//!
//! What a job leaves to be dropped, its answers, is dropped when the helper can be given the next job already: whoever is answered asks again before
//! the helper has the core back, and would find it busy.
//!
//! Lock: `state` is a leaf; no job runs under it.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use weir::sync::{Condvar, Mutex, without_signals};

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
    /// The helper of a core; `work` does a job, leaves what is to be dropped behind it, and must not unwind.
    pub fn new<R>(
        name: &str,
        core: usize,
        work: impl Fn(T) -> R + Send + 'static,
    ) -> io::Result<Self> {
        let shared = Shared { state: Mutex::new(State::Idle), changed: Condvar::new() };
        let shared = Arc::new(shared);
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name(format!("{name}-{core}"));
        let body = move || {
            super::stay_on(core);
            weir::sync::come_first();
            theirs.run(&work);
        };
        let thread = without_signals(|| thread.spawn(body))?;
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
    fn run<R>(&self, work: &dyn Fn(T) -> R) {
        let mut state = self.state.lock();
        loop {
            match std::mem::replace(&mut *state, State::Busy) {
                State::Given(job) => {
                    drop(state);
                    let left = work(job);
                    state = self.state.lock();
                    *state = State::Idle;
                    drop(state);
                    // Whoever drops the helper may wait for this.
                    self.changed.notify_all();
                    drop(left);
                    state = self.state.lock();
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

    /// Answers when it is dropped, and does not get the core back at once.
    struct Left(u32, mpsc::Sender<u32>, Arc<Mutex<mpsc::Receiver<()>>>);

    impl Drop for Left {
        fn drop(&mut self) {
            self.1.send(self.0).unwrap();
            self.2.lock().recv().unwrap();
        }
    }

    #[test]
    fn who_is_answered_finds_the_helper_free() {
        let (answer, answered) = mpsc::channel();
        let (go_on, may_go_on) = mpsc::channel();
        let may_go_on = Arc::new(Mutex::new(may_go_on));
        let work = move |job| Left(job, answer.clone(), Arc::clone(&may_go_on));
        let helper = Helper::new("weir-test", 0, work).unwrap();
        assert_eq!(helper.give(1), Ok(()));
        assert_eq!(answered.recv(), Ok(1));
        assert_eq!(helper.give(2), Ok(()));
        (0..2).for_each(|_| go_on.send(()).unwrap());
        assert_eq!(answered.recv(), Ok(2));
        drop(helper);
    }

    #[test]
    fn one_job_at_a_time_is_taken_and_all_that_were_are_done_before_it_ends() {
        let (begun, has_begun) = mpsc::channel();
        let (go_on, may_go_on) = mpsc::channel::<()>();
        let (done, is_done) = mpsc::channel();
        let helper = Helper::new("weir-test", 0, move |job: u32| {
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
        let helper = Helper::new("weir-test", 0, move |job| done.send(job).unwrap()).unwrap();
        for number in 0..100 {
            while helper.give(number).is_err() {
                std::thread::yield_now();
            }
            assert_eq!(is_done.recv().unwrap(), number);
        }
    }
}
