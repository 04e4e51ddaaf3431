//! Files whose last user was the answer to a sync.
//!
//! Dropping the last user of an unlinked file purges it, which may wait for the log. An answer is given on a thread of the log,
//! which must not wait for itself: it leaves the file here, and a later request, or the end of the mount, drops it.
//!
//! Lock: `state` is a leaf; nothing is dropped under it.

use std::sync::Arc;

use weir::sync::{Condvar, Mutex};

use crate::tables::OpenFile;

#[derive(Default)]
struct State {
    files: Vec<OpenFile>,
    unanswered: u64,
}

/// See the module's head.
#[derive(Default)]
pub struct Leftover {
    state: Mutex<State>,
    answered: Condvar,
}

/// A sync that was submitted; dropping it says that it was answered.
pub struct Submitted(Arc<Leftover>);

impl Drop for Submitted {
    fn drop(&mut self) {
        self.0.state.lock().unanswered -= 1;
        self.0.answered.notify_all();
    }
}

impl Leftover {
    /// A sync is being submitted.
    pub fn submit(self: &Arc<Self>) -> Submitted {
        self.state.lock().unanswered += 1;
        Submitted(Arc::clone(self))
    }

    /// Takes a file that cannot be dropped here.
    pub fn leave(&self, file: OpenFile) {
        self.state.lock().files.push(file);
    }

    /// What was left.
    pub fn take(&self) -> Vec<OpenFile> {
        std::mem::take(&mut self.state.lock().files)
    }

    /// Waits until every sync submitted so far was answered. Each is in the end, with an error if need be.
    pub fn wait_answered(&self) {
        let mut state = self.state.lock();
        while state.unanswered > 0 {
            self.answered.wait(&mut state);
        }
    }
}
