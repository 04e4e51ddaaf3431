//! FUSE over `io_uring` (Linux 6.14 and later): requests come through a ring for each core, and the answer to one is handed in with
//! the wait for the next.
//!
//! The kernel offers it to new connections while `/sys/module/fuse/parameters/enable_uring` says so, and by default that does not. A
//! connection keeps what it was offered. So [`Switch`] turns the parameter on for the moment of our own handshake,
//! where we may, and back.
//!
//! `/dev/fuse` stays: the first request comes there, and so do those that have no answer. `fuser` serves it, and everything,
//! where there are no rings: an older kernel, one that we may not ask for them, a sandbox that refuses them.
//!
//! | module | does |
//! |---|---|
//! | [`abi`] | the bytes of requests and answers |
//! | [`queue`] | one ring and its thread |
//! | [`serve`] | one request |
//! | [`helper`] | a sync, or what may wait, that a core waits for |
//! | [`hops`] | programs that change the core with every request |
//! | [`manners`] | whom a queue's thread lets go first |
//! | [`wake`] | how others wake it |

pub mod abi;
pub mod helper;
pub mod hops;
pub mod manners;
pub mod queue;
pub mod serve;
pub mod wake;

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use hops::Hops;
use queue::Queue;
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use serve::Server;
use weir::sync::without_signals;

use crate::dispatch::panic_message;

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

/// Whether the kernel offers rings to new connections.
const PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";
/// How often and how long a mount waits for another that begins.
const LOCK_TRIES: usize = 50;
const LOCK_RETRY: Duration = Duration::from_millis(10);

/// Has the kernel offer rings to new connections for as long as it lives, where it did not and this process may tell it.
pub struct Switch {
    /// Locked, so that mounts that begin at the same time do not undo each other's offer.
    parameter: File,
    turned: bool,
}

impl Switch {
    /// Turns it on; `None` where it stays off.
    pub fn on() -> Option<Self> {
        Self::of(Path::new(PARAMETER))
    }

    fn of(path: &Path) -> Option<Self> {
        let may_write = File::options().read(true).write(true).open(path);
        let parameter = may_write.or_else(|_| File::open(path)).ok()?;
        // A lock that somebody keeps is not worth waiting for long: without it, rings may be missed, no more.
        for _ in 0..LOCK_TRIES {
            match rustix::fs::flock(&parameter, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::WOULDBLOCK) => std::thread::sleep(LOCK_RETRY),
                _ => break,
            }
        }
        let mut value = [0];
        parameter.read_at(&mut value, 0).ok()?;
        let turned = value != *b"Y";
        if turned {
            parameter.write_at(b"Y", 0).ok()?;
        }
        Some(Self { parameter, turned })
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        if self.turned {
            // Left on it does no harm: who does not ask for rings gets none.
            let _ = self.parameter.write_at(b"N", 0);
        }
    }
}

/// Rings that are ready, before the kernel is asked whether it wants them.
pub struct Rings(Vec<Queue>);

/// The number of cores there can be: the kernel has a queue for each, and wants all of them served. `0-3`.
fn possible_cores(text: &str) -> Option<usize> {
    let last = text.trim().rsplit([',', '-']).next()?;
    last.parse::<usize>().ok()?.checked_add(1)
}

impl Rings {
    /// One for each core, if the process may have them.
    pub fn new(max_write_bytes: u32) -> Option<Self> {
        if max_write_bytes < MIN_WRITE_BYTES {
            return None;
        }
        let text = fs::read_to_string("/sys/devices/system/cpu/possible").ok()?;
        let cores = possible_cores(&text).filter(|cores| *cores <= MAX_QUEUES)?;
        let payload_bytes = max_write_bytes as usize + PAYLOAD_MARGIN_BYTES;
        let hops = if cores > 1 { Hops::new().map(Arc::new) } else { None };
        let queues = (0..cores)
            .map(|number| Queue::new(number as u16, ENTRIES, payload_bytes, hops.clone()));
        queues.collect::<io::Result<Vec<_>>>().ok().map(Self)
    }

    /// How many.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Serves requests on a thread for each ring, until the connection ends. A ring that fails has `abort` end it: the kernel would give
    /// it requests for ever, and who made them would wait as long.
    pub fn start(
        self,
        device: &OwnedFd,
        server: &Arc<Server>,
        abort: impl Fn() -> io::Result<()> + Clone + Send + 'static,
    ) -> io::Result<Running> {
        let mut running = Running { threads: Vec::new() };
        for (core, queue) in self.0.into_iter().enumerate() {
            let (device, server, abort) = (device.try_clone()?, Arc::clone(server), abort.clone());
            let thread = std::thread::Builder::new().name(format!("weir-fuse-{core}"));
            let body = move || {
                stay_on(core);
                weir::sync::come_first();
                let serve = || queue.run(&device, &|held| server.serve(held));
                let ended = catch_unwind(AssertUnwindSafe(serve)).unwrap_or_else(|payload| {
                    let text = panic_message(payload.as_ref());
                    Err(io::Error::other(format!("it panicked: {text}")))
                });
                ended.map_err(|error| {
                    let text = format!("the ring of core {core} failed: {error}");
                    let text = match abort() {
                        Ok(()) => format!("{text}: the mount was ended"),
                        Err(error) => format!("{text}: and the mount cannot be ended: {error}"),
                    };
                    server.failed(&text);
                    io::Error::other(text)
                })
            };
            running.threads.push(without_signals(|| thread.spawn(body))?);
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
    fn the_parameter_is_on_while_it_is_needed_and_as_it_was_afterwards() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("enable_uring");
        let said = || fs::read_to_string(&file).unwrap().trim().to_owned();
        assert!(Switch::of(&file).is_none(), "there is no such parameter");
        fs::write(&file, "N\n").unwrap();
        let switch = Switch::of(&file).unwrap();
        assert_eq!(said(), "Y");
        drop(switch);
        assert_eq!(said(), "N");
        fs::write(&file, "Y\n").unwrap();
        drop(Switch::of(&file).unwrap());
        assert_eq!(said(), "Y");
    }

    #[test]
    fn cores_are_counted_up_to_the_last_possible_one() {
        assert_eq!(possible_cores("0-1\n"), Some(2));
        assert_eq!(possible_cores("0"), Some(1));
        assert_eq!(possible_cores("0-3,8-11"), Some(12));
        assert_eq!(possible_cores(""), None);
        assert_eq!(possible_cores("x"), None);
    }
}
