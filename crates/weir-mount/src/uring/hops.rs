//! Programs that change the core with every request.
//!
//! An answer wakes the program that has waited for it. The kernel would leave it where it was, but there the queue's thread is
//! running; so it looks for an idle core. On a virtual machine a core that has been idle for some time may be no candidate, since its
//! host has taken the processor away. So a program may stay for long. But once it has moved, the core that it left was busy a moment
//! ago: the next answer, from there, sends it back, and so on, each time with an interrupt to a sleeping core and the wait for it.
//! A round trip takes three times as long then, and nothing ends it. What a queue does about it that sees a program hop [`HOPS`] times
//! is said in `super::manners`.

use std::sync::atomic::{AtomicU64, Ordering};

use weir::sync::may_change_class;

/// So many times a program has changed the core in a row, and then its place is worth some system calls.
const HOPS: u16 = 2;
/// Programs are told apart by the last bits of their number.
const SLOTS: usize = 64;

/// Where programs were last seen, for all queues of a connection. A hint, so nothing is ordered.
pub struct Hops([AtomicU64; SLOTS]);

impl Hops {
    /// Nobody was seen yet. `None` where threads may not change their class and back.
    pub fn new() -> Option<Self> {
        may_change_class().then(|| Self(std::array::from_fn(|_| AtomicU64::new(0))))
    }

    /// The program `pid` has sent a request to `queue`. True: it hops, and is to be kept here.
    pub fn note(&self, pid: u32, queue: u16) -> bool {
        if pid == 0 {
            return false;
        }
        let slot = &self.0[pid as usize % SLOTS];
        let (seen, hops) = Seen::of(slot.load(Ordering::Relaxed)).then(pid, queue);
        slot.store(seen.packed(), Ordering::Relaxed);
        hops
    }
}

/// Where a program was seen last, and how many times in a row it came from another core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seen {
    pid: u32,
    queue: u16,
    hops: u16,
}

impl Seen {
    fn of(packed: u64) -> Self {
        Self { pid: (packed >> 32) as u32, queue: (packed >> 16) as u16, hops: packed as u16 }
    }

    fn packed(self) -> u64 {
        u64::from(self.pid) << 32 | u64::from(self.queue) << 16 | u64::from(self.hops)
    }

    /// Now `pid` is on `queue`. Whether it has hopped often enough; then counting begins again.
    fn then(self, pid: u32, queue: u16) -> (Self, bool) {
        let hops = if self.pid != pid || self.queue == queue { 0 } else { self.hops + 1 };
        let often = hops >= HOPS;
        (Self { pid, queue, hops: if often { 0 } else { hops } }, often)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hops() -> Hops {
        Hops(std::array::from_fn(|_| AtomicU64::new(0)))
    }

    #[test]
    fn a_program_that_changes_the_core_with_every_request_is_kept() {
        let hops = hops();
        let seen: Vec<bool> = (0..8).map(|n| hops.note(7, n % 2)).collect();
        assert_eq!(seen, [false, false, true, false, true, false, true, false]);
    }

    #[test]
    fn who_stays_or_moves_now_and_then_is_left_alone() {
        let hops = hops();
        for n in 0..100 {
            assert!(!hops.note(7, n / 2 % 2) && !hops.note(9, 3));
        }
    }

    #[test]
    fn programs_of_one_slot_do_not_hop_for_each_other() {
        let hops = hops();
        for _ in 0..100 {
            assert!(!hops.note(7, 0) && !hops.note(7 + SLOTS as u32, 1) && !hops.note(0, 2));
        }
    }

    #[test]
    fn what_was_seen_is_kept_in_one_word() {
        let seen = Seen { pid: u32::MAX - 1, queue: 63, hops: 2 };
        assert_eq!(Seen::of(seen.packed()), seen);
    }
}
