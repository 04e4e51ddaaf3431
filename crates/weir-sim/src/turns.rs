//! Two threads that take turns: one of them runs at a time, and hands over amid a device call or before it takes a lock, if that is
//! planned, where it would have to wait for a lock or a notification, and at its end. So two callers of the engine can be amid its calls at a
//! time, each may wait for the other, and yet a run is the same every time.

use std::cell::{Cell, RefCell};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use weir::sync::Turn;

use crate::explore::failure::guard;
use crate::explore::{Failure, SECOND_CALLER};

/// So often the two hand over in a row, each because it has to wait, before that counts as a deadlock.
const STUCK: u32 = 1000;
/// The second has no more depth to go to than the engine's calls have. Many may be left behind by findings.
const STACK_BYTES: usize = 1 << 20;

#[derive(Debug, Default)]
struct State {
    /// The second one's turn.
    is_seconds: bool,
    has_first_ended: bool,
    has_second_ended: bool,
    /// Handed over since somebody has got ahead.
    waits: u32,
}

/// See the module's head.
#[derive(Debug, Default)]
pub struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

thread_local! {
    /// What the thread takes part in, and whether as the second.
    static MINE: RefCell<Option<(Arc<Turns>, bool)>> = const { RefCell::new(None) };
    /// How many locks it takes before it hands over at one.
    static LOCKS: Cell<Option<u32>> = const { Cell::new(None) };
}

impl Turns {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The other one goes on, until it hands over.
    fn hand_over(&self, mut state: MutexGuard<'_, State>, is_second: bool) {
        let has_ended = if is_second { state.has_first_ended } else { state.has_second_ended };
        if has_ended {
            return;
        }
        state.is_seconds = !is_second;
        self.changed.notify_all();
        self.await_turn(state, is_second);
    }

    fn await_turn(&self, mut state: MutexGuard<'_, State>, is_second: bool) {
        while state.is_seconds != is_second {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Runs `second` on a thread of its own, whenever it has the turn. A panic of it is a finding.
    ///
    /// # Panics
    /// The system has no thread to give.
    pub fn with_second<T: Send + 'static>(
        self: &Arc<Self>,
        second: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<Result<T, Failure>> {
        let turns = Arc::clone(self);
        let mutation = crate::mutation::active();
        let body = move || {
            turns.await_turn(turns.lock(), true);
            weir::stats::set_thread_part(SECOND_CALLER);
            let _active = crate::mutation::Active::switch_on(mutation);
            let result = turns.taking_part(true, || guard("going on beside it", second));
            let mut state = turns.lock();
            state.has_second_ended = true;
            state.is_seconds = false;
            turns.changed.notify_all();
            result
        };
        let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(body);
        thread.expect("a thread for the second of two callers")
    }

    /// Runs `first` on the calling thread. Whatever the second has left to do then comes with [`Turns::end_first`]. When `first` has
    /// panicked, the second never gets the turn again, which may hold whatever it likes: its thread is left behind.
    pub fn as_first<T>(self: &Arc<Self>, first: impl FnOnce() -> T) -> T {
        self.taking_part(false, first)
    }

    /// The first one's part is over: the second goes on to its end.
    pub fn end_first(&self) {
        let mut state = self.lock();
        state.has_first_ended = true;
        state.is_seconds = true;
        self.changed.notify_all();
        while !state.has_second_ended {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn taking_part<T>(self: &Arc<Self>, is_second: bool, body: impl FnOnce() -> T) -> T {
        struct Leaves;
        impl Drop for Leaves {
            fn drop(&mut self) {
                weir::sync::take_turns(None);
                LOCKS.set(None);
                MINE.take();
            }
        }
        let _leaves = Leaves;
        MINE.set(Some((Arc::clone(self), is_second)));
        weir::sync::take_turns(Some(come_to));
        body()
    }
}

fn mine() -> Option<(Arc<Turns>, bool)> {
    MINE.with_borrow(Clone::clone)
}

/// The calling thread hands over before it takes a lock, having taken so many.
pub fn hand_over_at_lock(locks: u32) {
    LOCKS.set(Some(locks));
}

fn come_to(turn: Turn) {
    if turn == Turn::Waits {
        return wait_for_other();
    }
    match LOCKS.get() {
        None => {}
        Some(0) => {
            LOCKS.set(None);
            let_other_go_on();
        }
        Some(locks) => LOCKS.set(Some(locks - 1)),
    }
}

/// Amid a call: lets the other one go on, if there is one that takes turns with the calling thread.
pub fn let_other_go_on() {
    let Some((turns, is_second)) = mine() else { return };
    turns.hand_over(turns.lock(), is_second);
}

/// The calling thread has made a device call: it gets ahead.
pub fn get_ahead() {
    if let Some((turns, _)) = mine() {
        turns.lock().waits = 0;
    }
}

/// The calling thread has to wait for something: the other one goes on, if there is one that takes turns with it.
///
/// # Panics
/// The two have only waited for each other for long.
pub fn wait_for_other() {
    let Some((turns, is_second)) = mine() else { return };
    let mut state = turns.lock();
    state.waits += 1;
    let is_stuck = state.waits > STUCK;
    turns.hand_over(state, is_second);
    // Who unwinds already has a finding to report.
    assert!(!is_stuck || std::thread::panicking(), "a deadlock: nobody gets ahead");
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir::sync::{Condvar, Mutex};

    #[test]
    fn each_goes_on_where_the_other_waits() {
        for _ in 0..100 {
            let turns = Arc::new(Turns::default());
            let steps = Arc::new((Mutex::new(Vec::new()), Condvar::new()));
            let (notes, theirs) = (Arc::clone(&steps), Arc::clone(&steps));
            let second = turns.with_second(move || {
                theirs.0.lock().push("second begins");
                let mut notes = theirs.0.lock();
                while !notes.contains(&"first ends") {
                    theirs.1.wait(&mut notes);
                }
                notes.push("second ends");
                7
            });
            turns.as_first(|| {
                notes.0.lock().push("first begins");
                let_other_go_on();
                notes.0.lock().push("first goes on");
                let held = notes.0.lock();
                drop(held);
                notes.0.lock().push("first ends");
            });
            turns.end_first();
            assert_eq!(second.join().unwrap(), Ok(7));
            let expected =
                ["first begins", "second begins", "first goes on", "first ends", "second ends"];
            assert_eq!(*steps.0.lock(), expected);
        }
    }

    #[test]
    fn two_that_wait_for_each_other_are_a_finding() {
        let turns = Arc::new(Turns::default());
        let never = Arc::new((Mutex::new(()), Condvar::new()));
        let theirs = Arc::clone(&never);
        let second = turns.with_second(move || {
            loop {
                theirs.1.wait(&mut theirs.0.lock());
            }
        });
        let first = guard("waiting", || {
            turns.as_first(|| {
                loop {
                    never.1.wait(&mut never.0.lock());
                }
            });
        });
        assert!(first.unwrap_err().summary.contains("deadlock"));
        // It may be left behind in its wait, or have found out first.
        drop(second);
    }

    #[test]
    fn a_panic_of_the_second_is_a_finding_and_the_first_comes_to_its_end() {
        let turns = Arc::new(Turns::default());
        let second = turns.with_second(|| assert!(std::hint::black_box(false), "broken"));
        turns.as_first(let_other_go_on);
        turns.end_first();
        assert!(second.join().unwrap().unwrap_err().summary.contains("broken"));
    }
}
