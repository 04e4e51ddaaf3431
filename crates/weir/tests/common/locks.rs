//! A call that lets something happen before it takes one of its locks, or where it would have to wait.

use std::cell::RefCell;
use weir::sync::{Turn, take_turns};

type Happening = Box<dyn FnOnce()>;

/// What is to happen, on the calling thread, while it makes a call.
#[derive(Default)]
pub struct Happenings {
    /// One after the other, each where the call would have to wait.
    pub at_waits: Vec<Happening>,
    /// After the first wait, before it takes its lock of this number.
    pub at_lock: Option<(u32, Happening)>,
    /// The call has had to wait.
    pub has_waited: bool,
}

thread_local! {
    static PLANNED: RefCell<Option<Happenings>> = const { RefCell::new(None) };
}

/// Makes `call`. Answers what it answers, and what has not happened.
pub fn amid_locks<R>(planned: Happenings, call: impl FnOnce() -> R) -> (R, Happenings) {
    PLANNED.set(Some(planned));
    take_turns(Some(come_to));
    let result = call();
    take_turns(None);
    (result, PLANNED.take().unwrap_or_default())
}

fn come_to(turn: Turn) {
    // What happens takes locks as well.
    let Some(mut planned) = PLANNED.take() else { return };
    let happening = match turn {
        Turn::Waits => {
            planned.has_waited = true;
            (!planned.at_waits.is_empty()).then(|| planned.at_waits.remove(0))
        }
        Turn::Locks => match planned.at_lock.take() {
            Some((0, happening)) if planned.has_waited => Some(happening),
            Some((left, happening)) => {
                planned.at_lock = Some((left - u32::from(planned.has_waited), happening));
                None
            }
            None => None,
        },
    };
    take_turns(None);
    match happening {
        Some(happening) => happening(),
        None if turn == Turn::Waits => std::thread::yield_now(),
        None => {}
    }
    take_turns(Some(come_to));
    PLANNED.set(Some(planned));
}
