//! Who keeps a volume open: every [`crate::Volume`], file, hold and batch has a share of its [`Running`], and the threads stop when the last one
//! goes. So a ticket ends as long as there is anything that it could have been asked of. Read-ahead under way has ended by then, too: the device
//! can be opened again at once.
//!
//! **Invariant:** no thread of the engine waits for the end of the engine's threads.

use crate::engine::Engine;
use crate::sync::{Arc, is_own_thread, spawn};
use std::ops::Deref;

/// An engine with its threads. The threads themselves hold the engine only.
pub struct Running {
    engine: Arc<Engine>,
}

impl Running {
    /// The share of whoever has opened it.
    pub fn new(engine: Arc<Engine>) -> Arc<Self> {
        Arc::new(Self { engine })
    }
}

impl Deref for Running {
    type Target = Arc<Engine>;
    fn deref(&self) -> &Arc<Engine> {
        &self.engine
    }
}

/// Nobody uses the volume any more: ends what holds the engine, and the device with it.
fn end(engine: &Arc<Engine>) {
    engine.stop_threads();
    // No more of it begins.
    engine.reads_ahead.wait();
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.engine.check_process().is_err() {
            // A child's copy: there is no thread to wait for, and what they hold stays as it is.
            std::mem::forget(self.engine.clone());
            return;
        }
        if !is_own_thread() {
            end(&self.engine);
            return;
        }
        // In a callback or a waker, on one of the threads that have to end.
        let engine = self.engine.clone();
        let stopping = spawn("weir-stop", move || end(&engine));
        // Where there is no thread to be had, the volume stays open until the process ends.
        drop(stopping);
    }
}
