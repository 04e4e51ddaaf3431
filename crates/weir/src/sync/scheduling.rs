//! How a thread asks to be scheduled: one that works in the background gives way to whoever wakes up ([`give_way`]), and one that is about to
//! wake others may count for nothing for a moment ([`set_scheduling_class`]), if it comes first otherwise ([`come_first`]). And which signals it is
//! spared ([`without_signals`]).
//!
//! Linux does not take the processor from a running thread before its time slice is over (0.7 to 3 ms), not even for one that
//! has just woken up and is owed time. Unless the one that wakes has a shorter slice (Linux 6.12, EEVDF with *custom slices*:
//! `Documentation/scheduler/sched-eevdf.rst`). So such a thread asks for a longer slice than others have. It gets as much
//! of the processor as before, but no cached read waits for the end of a 2 MiB page that is being cleared. Neither
//! `SCHED_BATCH` nor niceness does that. `SCHED_IDLE` would, but a thread of that class gets next to nothing while others compute.
//!
//! Older kernels, other systems, and sandboxes that refuse: as if nothing had been asked for.
//!
//! This module contains `unsafe`: system calls without a wrapper.

/// Longer than the slice of any thread that asks for nothing (at most 2.8 ms), and not much: it is also how long others may come first.
#[cfg(all(target_os = "linux", not(any(miri, feature = "shuttle"))))]
const LONG_SLICE_NS: u64 = 4_000_000;
/// The shortest there is.
#[cfg(all(target_os = "linux", not(any(miri, feature = "shuttle"))))]
const SHORT_SLICE_NS: u64 = 100_000;

/// The calling thread gives way to others that wake up, and gets a smaller share where others compute too if `niceness` is above
/// 0. Never makes a thread less nice than it is.
#[cfg(all(target_os = "linux", not(any(miri, feature = "shuttle"))))]
pub fn give_way(niceness: i32) {
    let niceness = rustix::process::getpriority_process(None).unwrap_or(0).max(niceness);
    if !ask_for(niceness, LONG_SLICE_NS) {
        // Then at least this; the thread is less polite.
        let _ = rustix::process::setpriority_process(None, niceness);
    }
}

/// The calling thread does little at a time, and others wait for it: it comes before those that compute, and is interrupted sooner. One
/// that comes before all of them already (real-time priority) stays what it is.
#[cfg(all(target_os = "linux", not(any(miri, feature = "shuttle"))))]
pub fn come_first() {
    if !has_a_class() {
        return;
    }
    ask_for(rustix::process::getpriority_process(None).unwrap_or(0), SHORT_SLICE_NS);
}

/// An ordinary thread of this niceness and slice. False: refused.
#[cfg(all(target_os = "linux", not(any(miri, feature = "shuttle"))))]
fn ask_for(niceness: i32, slice_ns: u64) -> bool {
    let attributes = libc::sched_attr {
        size: size_of::<libc::sched_attr>() as u32,
        sched_policy: libc::SCHED_OTHER as u32,
        sched_flags: 0,
        sched_nice: niceness,
        sched_priority: 0,
        sched_runtime: slice_ns,
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: the kernel reads `size` bytes of the attributes, which outlive the call; 0 is the calling thread.
    let refused = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    refused == 0
}

/// How the scheduler treats a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchedulingClass {
    /// As any other (`SCHED_OTHER`), as nice as it was.
    Ordinary,
    /// It has the share of an ordinary one, but takes the processor from nobody when it wakes up (`SCHED_BATCH`): whoever runs goes on until
    /// he waits, or until the clock's next tick.
    Batch,
    /// It counts for nothing (`SCHED_IDLE`): a processor that has only such threads is idle to others.
    Idle,
}

/// Makes the calling thread, which is of one of these classes, one of `class`. False: it may not, or is of another class.
#[cfg(all(target_os = "linux", not(any(miri, feature = "shuttle"))))]
pub fn set_scheduling_class(class: SchedulingClass) -> bool {
    let policy = match class {
        SchedulingClass::Ordinary => libc::SCHED_OTHER,
        SchedulingClass::Batch => libc::SCHED_BATCH,
        SchedulingClass::Idle => libc::SCHED_IDLE,
    };
    if !has_a_class() {
        return false;
    }
    // SAFETY: all zero is a valid parameter.
    let parameter: libc::sched_param = unsafe { std::mem::zeroed() };
    // SAFETY: the parameter outlives the call; 0 is the calling thread.
    unsafe { libc::sched_setscheduler(0, policy, &raw const parameter) == 0 }
}

/// Does `work` as a thread of `class`; the calling thread is an ordinary one, and may change its class and back ([`may_change_class`]).
pub fn in_class<T>(class: SchedulingClass, work: impl FnOnce() -> T) -> T {
    let is_changed = class != SchedulingClass::Ordinary && set_scheduling_class(class);
    let result = work();
    if is_changed {
        set_scheduling_class(SchedulingClass::Ordinary);
    }
    result
}

/// True where threads of this process may change their class and back (not everybody may stop counting for nothing: that takes
/// `CAP_SYS_NICE`, or a limit of niceness that allows it). Makes a thread to find out.
#[cfg(all(target_os = "linux", not(any(miri, feature = "shuttle"))))]
pub fn may_change_class() -> bool {
    // Whoever asks stays what he is: a thread that may not go back would be of the class for good.
    let there_and_back = || {
        set_scheduling_class(SchedulingClass::Idle)
            && set_scheduling_class(SchedulingClass::Ordinary)
    };
    std::thread::Builder::new()
        .spawn(there_and_back)
        .is_ok_and(|thread| thread.join().unwrap_or(false))
}

/// There is one class.
#[cfg(not(all(target_os = "linux", not(any(miri, feature = "shuttle")))))]
pub fn may_change_class() -> bool {
    false
}

/// How long a thread had to wait for a processor while it could run, where the system tells.
pub struct RunDelay(
    #[cfg(all(target_os = "linux", not(any(miri, feature = "shuttle"))))] std::fs::File,
);

impl RunDelay {
    /// That of the calling thread. Whoever asks later need not be that thread.
    #[cfg(all(target_os = "linux", not(any(miri, feature = "shuttle"))))]
    pub fn of_this_thread() -> Option<Self> {
        let delay = Self(std::fs::File::open("/proc/thread-self/schedstat").ok()?);
        delay.total_ns().map(|_| delay)
    }

    /// Nanoseconds since the thread began. One system call.
    #[cfg(all(target_os = "linux", not(any(miri, feature = "shuttle"))))]
    pub fn total_ns(&self) -> Option<u64> {
        use std::os::unix::fs::FileExt;
        // Three numbers: time run, time waited, times it was given a processor (`Documentation/scheduler/sched-stats.rst`).
        let mut text = [0; 64];
        let length = self.0.read_at(&mut text, 0).ok()?;
        let text = std::str::from_utf8(text.get(..length)?).ok()?;
        text.split_ascii_whitespace().nth(1)?.parse().ok()
    }

    /// The system does not tell.
    #[cfg(not(all(target_os = "linux", not(any(miri, feature = "shuttle")))))]
    pub fn of_this_thread() -> Option<Self> {
        None
    }

    /// The system does not tell.
    #[cfg(not(all(target_os = "linux", not(any(miri, feature = "shuttle")))))]
    pub fn total_ns(&self) -> Option<u64> {
        None
    }
}

/// Processor time that the calling thread has used, in nanoseconds, where the system tells. What it waited for is not in it.
#[cfg(all(target_os = "linux", not(any(miri, feature = "shuttle"))))]
pub fn processor_time_ns() -> Option<u64> {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    u64::try_from(time.tv_sec).ok()?.checked_mul(1_000_000_000)?.checked_add(time.tv_nsec as u64)
}

/// The system does not tell.
#[cfg(not(all(target_os = "linux", not(any(miri, feature = "shuttle")))))]
pub fn processor_time_ns() -> Option<u64> {
    None
}

/// Whether the calling thread is of one of the classes of [`SchedulingClass`].
#[cfg(all(target_os = "linux", not(any(miri, feature = "shuttle"))))]
fn has_a_class() -> bool {
    // SAFETY: 0 is the calling thread.
    let present = unsafe { libc::sched_getscheduler(0) };
    [libc::SCHED_OTHER, libc::SCHED_BATCH, libc::SCHED_IDLE].contains(&present)
}

/// There is one class.
#[cfg(not(all(target_os = "linux", not(any(miri, feature = "shuttle")))))]
pub fn set_scheduling_class(_class: SchedulingClass) -> bool {
    false
}

/// Nothing to ask for.
#[cfg(not(all(target_os = "linux", not(any(miri, feature = "shuttle")))))]
pub fn give_way(_niceness: i32) {}

/// Nothing to ask for.
#[cfg(not(all(target_os = "linux", not(any(miri, feature = "shuttle")))))]
pub fn come_first() {}

/// What says that a thread itself went wrong, which it alone can hear; and the profiler's clock, which asks whoever runs.
#[cfg(not(feature = "shuttle"))]
const ONES_OWN_SIGNALS: [i32; 8] = [
    libc::SIGABRT,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGPROF,
    libc::SIGSEGV,
    libc::SIGSYS,
    libc::SIGTRAP,
];

/// Does `start` while the calling thread takes no signals that are the program's: a thread that is started there takes none, ever. They go to
/// one of the program's own, whose handler may rely on its thread's data, and whose call they are to interrupt.
#[cfg(not(feature = "shuttle"))]
pub fn without_signals<T>(start: impl FnOnce() -> T) -> T {
    if cfg!(miri) {
        return start();
    }
    // SAFETY: all zero is a valid set of signals.
    let (mut spared, mut before): (libc::sigset_t, libc::sigset_t) = unsafe { std::mem::zeroed() };
    // SAFETY: the sets outlive the calls, and the numbers are signals.
    let is_changed = unsafe {
        libc::sigfillset(&raw mut spared);
        for signal in ONES_OWN_SIGNALS {
            libc::sigdelset(&raw mut spared, signal);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const spared, &raw mut before) == 0
    };
    let result = start();
    if is_changed {
        // SAFETY: the set was filled in by the call above, and outlives this one.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut())
        };
    }
    result
}

#[cfg(all(test, target_os = "linux", not(any(miri, feature = "shuttle"))))]
mod tests {
    use super::*;

    /// The signals that the calling thread does not take.
    fn spared() -> u64 {
        let status = std::fs::read_to_string("/proc/thread-self/status").expect("Linux tells");
        let line = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).expect("a line");
        u64::from_str_radix(line.trim(), 16).expect("a number")
    }

    #[test]
    fn threads_of_the_engine_take_none_of_the_programs_signals() {
        let is_spared = |set: u64, signal: i32| set >> (signal - 1) & 1 != 0;
        let own = spared();
        let (send, receive) = std::sync::mpsc::channel();
        let thread = crate::sync::spawn("spared", move || send.send(spared()).expect("heard"));
        let set = receive.recv().expect("an answer");
        thread.expect("a thread").join().expect("the thread ends");
        for signal in [libc::SIGALRM, libc::SIGCHLD, libc::SIGTERM, libc::SIGINT, libc::SIGUSR1] {
            assert!(is_spared(set, signal), "signal {signal}");
        }
        assert!(!ONES_OWN_SIGNALS.iter().any(|&signal| is_spared(set, signal)), "{set:#x}");
        assert_eq!(spared(), own, "the caller takes what it took");
    }

    fn niceness() -> i32 {
        rustix::process::getpriority_process(None).expect("a thread has a niceness")
    }

    #[test]
    fn a_thread_that_counts_for_nothing_may_count_again_and_is_as_nice_as_before() {
        let thread = std::thread::spawn(|| {
            let before = niceness();
            if !set_scheduling_class(SchedulingClass::Idle) {
                eprintln!("skipped: this process may not change the class of its threads");
                return;
            }
            // Back it may only with `CAP_SYS_NICE`, or a limit of niceness that says so.
            if set_scheduling_class(SchedulingClass::Ordinary) {
                assert_eq!(niceness(), before);
            }
        });
        thread.join().expect("the thread ends");
    }

    #[test]
    fn processor_time_is_not_spent_asleep() {
        let before = processor_time_ns().expect("Linux tells");
        std::thread::sleep(std::time::Duration::from_millis(200));
        let after = processor_time_ns().expect("Linux tells");
        assert!(after >= before && after - before < 200_000_000, "{before} {after}");
    }

    /// The kernel's name of the calling thread's class.
    fn class() -> i32 {
        // SAFETY: 0 is the calling thread.
        unsafe { libc::sched_getscheduler(0) }
    }

    #[test]
    fn work_is_done_in_its_class_and_the_thread_is_of_its_own_again_afterwards() {
        let before = class();
        let may = may_change_class();
        assert_eq!(class(), before, "asking changes nothing");
        assert_eq!(in_class(SchedulingClass::Ordinary, class), before);
        if !may {
            eprintln!("skipped: this process may not change the class of its threads and back");
            return;
        }
        assert_eq!(in_class(SchedulingClass::Idle, class), libc::SCHED_IDLE);
        assert_eq!(class(), libc::SCHED_OTHER);
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
