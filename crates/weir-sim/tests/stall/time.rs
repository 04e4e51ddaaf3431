//! Virtual time under the deterministic scheduler: it stands still while any thread can run, and jumps to the
//! next alarm when all of them wait.
//!
//! One thread, the ticker, moves it. [`OneByOne`] runs the ticker only when nothing else can run, so a thread that waits
//! for a lock while its holder waits for the disk is seen to wait for as long as the disk takes. Computing takes no time:
//! what is measured is waiting, and nothing but waiting.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use shuttle::scheduler::{Schedule, Scheduler, Task, TaskId};
use shuttle::thread;
use weir_sim::rng::Rng;

/// The main thread is number 0, and the first thing it does is to start the ticker.
const TICKER: usize = 1;
/// Of how many scheduling points one takes the turn from a thread that could go on.
const PREEMPT_ONE_IN: u64 = 50;

/// Runs one thread until it waits, now and then less; the ticker comes last.
pub struct OneByOne {
    rng: Rng,
    executions: u32,
}

impl OneByOne {
    /// One execution, drawn from `seed`.
    pub const fn new(seed: u64) -> Self {
        Self { rng: Rng::new(seed), executions: 1 }
    }
}

impl Scheduler for OneByOne {
    fn new_execution(&mut self) -> Option<Schedule> {
        self.executions = self.executions.checked_sub(1)?;
        Some(Schedule::new(0))
    }

    fn next_task(
        &mut self,
        runnable: &[&Task],
        current: Option<TaskId>,
        is_yielding: bool,
    ) -> Option<TaskId> {
        let ticker = TaskId::from(TICKER);
        let can_run = |task: &&&Task| task.runnable() && task.id() != ticker;
        if let Some(current) = current
            && !is_yielding
            && !self.rng.one_in(PREEMPT_ONE_IN)
            && runnable.iter().filter(can_run).any(|task| task.id() == current)
        {
            return Some(current);
        }
        match runnable.iter().filter(can_run).count() {
            0 => Some(ticker),
            count => {
                let chosen = self.rng.index(count);
                runnable.iter().filter(can_run).nth(chosen).map(|task| task.id())
            }
        }
    }

    fn next_u64(&mut self) -> u64 {
        self.rng.next_u64()
    }
}

#[derive(Default)]
struct State {
    now_ns: u64,
    /// By time, then in the order of the calls.
    alarms: BTreeMap<(u64, u64), thread::Thread>,
    alarms_set: u64,
    over: bool,
}

/// The clock. Never locked across a scheduling point.
#[derive(Clone, Default)]
pub struct Time(Arc<Mutex<State>>);

impl Time {
    fn with<T>(&self, body: impl FnOnce(&mut State) -> T) -> T {
        body(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Starts the ticker. To be called first of all.
    pub fn start(&self) -> thread::JoinHandle<()> {
        let time = self.clone();
        thread::spawn(move || {
            while let Some(due) = time.tick() {
                for sleeper in due {
                    sleeper.unpark();
                }
                thread::yield_now();
            }
        })
    }

    /// Nothing sleeps any more.
    pub fn stop(&self) {
        self.with(|state| state.over = true);
    }

    /// Moves to the next alarm and answers whom it wakes; `None` at the end.
    fn tick(&self) -> Option<Vec<thread::Thread>> {
        self.with(|state| {
            let Some((&(next_ns, _), _)) = state.alarms.first_key_value() else {
                assert!(state.over, "everybody waits, and not for the disk: a deadlock");
                return None;
            };
            state.now_ns = next_ns;
            let later = state.alarms.split_off(&(next_ns + 1, 0));
            Some(std::mem::replace(&mut state.alarms, later).into_values().collect())
        })
    }

    /// Time since the start.
    pub fn now_ns(&self) -> u64 {
        self.with(|state| state.now_ns)
    }

    /// Lets the calling thread wait until then.
    pub fn sleep_until(&self, end_ns: u64) {
        while self.now_ns() < end_ns {
            self.with(|state| {
                state.alarms_set += 1;
                state.alarms.insert((end_ns, state.alarms_set), thread::current());
            });
            thread::park();
        }
    }

    /// Lets the calling thread wait for so long.
    pub fn sleep(&self, duration_ns: u64) {
        self.sleep_until(self.now_ns() + duration_ns);
    }
}

impl weir::sync::Clock for Time {
    fn realtime_ns(&self) -> i64 {
        1_577_836_800_000_000_000 + self.now_ns() as i64
    }
    fn monotonic_ns(&self) -> u64 {
        self.now_ns()
    }
    fn sleep_us(&self, duration_us: u64) {
        self.sleep(duration_us * 1000);
    }
}
