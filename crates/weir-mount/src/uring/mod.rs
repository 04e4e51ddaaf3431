//! FUSE over `io_uring` (Linux 6.14 and later, where the superuser has switched it on): requests come through a ring for each core,
//! and the answer to one is handed in with the wait for the next.
//!
//! `/dev/fuse` stays: the first request comes there, and so do those that have no answer. `fuser` serves it, and everything,
//! where there are no rings: an older kernel, one where they are switched off (`/sys/module/fuse/parameters/enable_uring`), a
//! sandbox that refuses them.
//!
//! | module | does |
//! |---|---|
//! | [`abi`] | the bytes of requests and answers |
//! | [`queue`] | one ring and its thread |
//! | [`serve`] | one request |
//! | [`helper`] | a sync that a core waits for |

pub mod abi;
pub mod helper;
pub mod queue;
pub mod serve;

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use queue::Queue;
use serve::Server;

/// A header has a page of its own.
const PAGE_BYTES: usize = 4096;
/// Room for the largest payload: a write of the largest size, and what else comes with a request.
const PAYLOAD_MARGIN_BYTES: usize = 64 << 10;
/// A request with a smaller largest write could have attributes that do not fit.
pub const MIN_WRITE_BYTES: u32 = 128 << 10;
/// Requests of a core that can be open at a time, answered by other threads later: syncs, waits.
const ENTRIES: usize = 256;
/// More queues than this are not tried.
const MAX_QUEUES: usize = 64;

/// Rings that are ready, before the kernel is asked whether it wants them.
pub struct Rings(Vec<Queue>);

/// The number of cores there can be: the kernel has a queue for each, and wants all of them served. `0-3`.
fn possible_cores(text: &str) -> Option<usize> {
    let last = text.trim().rsplit([',', '-']).next()?;
    last.parse::<usize>().ok()?.checked_add(1)
}

impl Rings {
    /// One for each core, if the kernel offers this and the process may have them.
    pub fn new(max_write_bytes: u32) -> Option<Self> {
        let enabled = fs::read("/sys/module/fuse/parameters/enable_uring").ok()?;
        if !enabled.starts_with(b"Y") || max_write_bytes < MIN_WRITE_BYTES {
            return None;
        }
        let text = fs::read_to_string("/sys/devices/system/cpu/possible").ok()?;
        let cores = possible_cores(&text).filter(|cores| *cores <= MAX_QUEUES)?;
        let payload_bytes = max_write_bytes as usize + PAYLOAD_MARGIN_BYTES;
        let queues = (0..cores).map(|number| Queue::new(number as u16, ENTRIES, payload_bytes));
        queues.collect::<io::Result<Vec<_>>>().ok().map(Self)
    }

    /// How many.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Serves requests on a thread for each ring, until the connection ends.
    pub fn start(self, device: &OwnedFd, server: &Arc<Server>) -> io::Result<Running> {
        let mut running = Running { threads: Vec::new() };
        for (core, queue) in self.0.into_iter().enumerate() {
            let (device, server) = (device.try_clone()?, Arc::clone(server));
            let thread = std::thread::Builder::new().name(format!("weir-fuse-{core}"));
            running.threads.push(thread.spawn(move || {
                stay_on(core);
                let ended = queue.run(&device, &|held| server.serve(held));
                if let Err(error) = &ended {
                    server.failed(error);
                }
                ended
            })?);
        }
        Ok(running)
    }
}

/// Keeps this thread on the core that its requests come from, if it may be there.
fn stay_on(core: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(core);
    // A core that is not there, or not for us: the thread runs where it can, and serves that queue from afar.
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// Threads that serve rings.
pub struct Running {
    threads: Vec<JoinHandle<io::Result<()>>>,
}

impl Running {
    /// Waits for the end of the connection.
    pub fn join(self) -> io::Result<()> {
        let mut result = Ok(());
        for thread in self.threads {
            let ended = thread.join().unwrap_or_else(|_| Err(io::Error::other("a panic")));
            result = result.and(ended);
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_counted_up_to_the_last_possible_one() {
        assert_eq!(possible_cores("0-1\n"), Some(2));
        assert_eq!(possible_cores("0"), Some(1));
        assert_eq!(possible_cores("0-3,8-11"), Some(12));
        assert_eq!(possible_cores(""), None);
        assert_eq!(possible_cores("x"), None);
    }
}
