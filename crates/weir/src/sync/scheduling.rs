//! How a thread of the engine asks to be scheduled: one that works in the background gives way to whoever wakes up.
//!
//! Linux does not take the processor from a running thread before its time slice is over (0.7 to 3 ms), not even for one that
//! has just woken up and is owed time. Unless the one that wakes has a shorter slice (Linux 6.12, EEVDF with *custom slices*:
//! `Documentation/scheduler/sched-eevdf.rst`). So such a thread asks for a longer slice than others have. It gets as much
//! of the processor as before, but no cached read waits for the end of a 2 MiB page that is being cleared. Neither
//! `SCHED_BATCH` nor niceness does that. `SCHED_IDLE` would, but a thread of that class gets next to nothing while others compute.
//!
//! Older kernels, other systems, and sandboxes that refuse: as if nothing had been asked for.
//!
//! This module contains `unsafe`: a system call without a wrapper.

/// Longer than the slice of any thread that asks for nothing (at most 2.8 ms), and not much: it is also how long others may come first.
#[cfg(all(target_os = "linux", not(any(miri, feature = "shuttle"))))]
const LONG_SLICE_NS: u64 = 4_000_000;

/// The calling thread gives way to others that wake up, and gets a smaller share where others compute too if `niceness` is above
/// 0. Never makes a thread less nice than it is.
#[cfg(all(target_os = "linux", not(any(miri, feature = "shuttle"))))]
pub fn give_way(niceness: i32) {
    let niceness = rustix::process::getpriority_process(None).unwrap_or(0).max(niceness);
    let attributes = libc::sched_attr {
        size: size_of::<libc::sched_attr>() as u32,
        sched_policy: libc::SCHED_OTHER as u32,
        sched_flags: 0,
        sched_nice: niceness,
        sched_priority: 0,
        sched_runtime: LONG_SLICE_NS,
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: the kernel reads `size` bytes of the attributes, which outlive the call; 0 is the calling thread.
    let refused = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    if refused != 0 {
        // Then at least this; the thread is less polite.
        let _ = rustix::process::setpriority_process(None, niceness);
    }
}

/// Nothing to ask for.
#[cfg(not(all(target_os = "linux", not(any(miri, feature = "shuttle")))))]
pub fn give_way(_niceness: i32) {}

#[cfg(all(test, target_os = "linux", not(any(miri, feature = "shuttle"))))]
mod tests {
    use super::*;

    fn niceness() -> i32 {
        rustix::process::getpriority_process(None).expect("a thread has a niceness")
    }

    #[test]
    fn giving_way_never_makes_a_thread_less_nice() {
        let thread = std::thread::spawn(|| {
            let before = niceness();
            give_way(0);
            assert_eq!(niceness(), before);
            give_way(before + 3);
            assert_eq!(niceness(), before + 3);
            give_way(0);
            assert_eq!(niceness(), before + 3);
        });
        thread.join().expect("the thread ends");
    }
}
