//! Whose memory this is. A child that was forked has a copy of everything but the threads, also of what these hold: locks, places in the log,
//! requests on their way. It would wait for threads that are not there, and write where its parent writes. So what belongs to a process asks
//! before all else whether it is still there.
//!
//! This module contains `unsafe`: to be told of a fork, which has no wrapper. A call of the system for the number of the process would tell as
//! well, and costs as much as a cached read.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

/// How many forks lie between the first process and this one, since they are counted.
static FORKS: AtomicU64 = AtomicU64::new(0);
static COUNTING: Once = Once::new();

/// In a child, between the fork and whatever comes after it: nothing but this may happen there.
extern "C" fn count_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// The process in which something was made.
#[derive(Debug, Clone, Copy)]
pub struct Process {
    forks: u64,
}

impl Process {
    /// The calling one.
    pub fn this() -> Self {
        COUNTING.call_once(|| {
            if cfg!(miri) {
                return;
            }
            // SAFETY: the function lives as long as the program, and does nothing but count. Refused (there is no memory) it counts nothing.
            unsafe { libc::pthread_atfork(None, None, Some(count_fork)) };
        });
        Self { forks: FORKS.load(Ordering::Relaxed) }
    }

    /// It is the calling one, and no child that was forked. Costs nothing, takes no lock.
    pub fn is_this(&self) -> bool {
        self.forks == FORKS.load(Ordering::Relaxed)
    }
}

/// As [`Process`], also where the C library knows nothing of a fork; a system call each time.
#[derive(Debug, Clone, Copy)]
pub struct NumberedProcess {
    process: Process,
    number: u32,
}

impl NumberedProcess {
    /// The calling one.
    pub fn this() -> Self {
        Self { process: Process::this(), number: std::process::id() }
    }

    /// It is the calling one, and no child that was forked.
    pub fn is_this(&self) -> bool {
        self.process.is_this() && self.number == std::process::id()
    }
}
