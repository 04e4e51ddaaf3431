//! Memory that the machine has at hand when a case begins.
//!
//! A virtual machine may hand free memory back to its host, or may have begun from a snapshot, and then the first touch
//! of each page is a fault of the host: some 400 MiB/s instead of 10 GiB/s were seen. Whether a case meets such memory
//! depends on what ran before it and on whether its target asks for whole huge pages (these are what is handed back, and
//! what nobody has used yet) or for single ones, and not on the file system. So the lab holds memory that it has touched,
//! frees it right before a target is set up and right before each case, for whoever needs memory in it, and takes as
//! much again after the case. It holds huge pages: who wants single ones gets parts of them, but single ones that were
//! freed are no huge page again for whoever wants that (by hand, 1 GiB: huge pages after freed single ones at 0.7 GiB/s,
//! after freed huge ones at 4.8; single ones after either at 1.7).

use std::time::Instant;

use crate::disk::available_memory_bytes;
use crate::sys::prefer_huge_pages;

const PAGE_BYTES: usize = 4096;
/// Never more of the available memory than one part in this many.
const SHARE: u64 = 4;

/// How fast fresh memory was, in MiB/s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FreshMemory {
    /// Touched for the first time in this run.
    pub first_mib_per_s: f64,
    /// Touched again right after it was freed.
    pub again_mib_per_s: f64,
}

/// Memory that is held between cases. See the head of this module.
pub struct WarmMemory {
    bytes: usize,
    held: Vec<u8>,
}

impl WarmMemory {
    /// Holds `wanted_bytes`, but no more than a quarter of what is available.
    pub fn of(wanted_bytes: u64) -> Self {
        let bytes = wanted_bytes.min(available_memory_bytes() / SHARE);
        WarmMemory { bytes: usize::try_from(bytes).unwrap_or(0), held: Vec::new() }
    }

    /// Takes the memory, frees it and takes it again, with the speed of both.
    pub fn take_twice(&mut self) -> FreshMemory {
        let mut timed = || {
            self.release();
            let begun = Instant::now();
            self.take();
            self.held.len() as f64 / f64::from(1 << 20) / begun.elapsed().as_secs_f64().max(1e-9)
        };
        FreshMemory { first_mib_per_s: timed(), again_mib_per_s: timed() }
    }

    /// Touches as much memory as this holds; nothing when it has it already.
    pub fn take(&mut self) {
        if self.held.is_empty() {
            // Zeroed memory of this size comes from the kernel untouched.
            self.held = vec![0; self.bytes];
            prefer_huge_pages(&mut self.held);
            for page in self.held.chunks_mut(PAGE_BYTES) {
                page[0] = 1;
            }
            std::hint::black_box(&self.held);
        }
    }

    /// Frees what it holds, for the case that begins.
    pub fn release(&mut self) {
        self.held = Vec::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `VmRSS` of this process.
    fn resident_bytes() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").expect("status");
        let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).expect("VmRSS");
        line.trim().trim_end_matches(" kB").parse::<usize>().expect("a number") * 1024
    }

    #[test]
    fn what_is_held_is_touched_and_what_is_released_is_free() {
        const BYTES: usize = 256 << 20;
        let mut memory = WarmMemory::of(BYTES as u64);
        if memory.bytes < BYTES {
            eprintln!("skipped: a quarter of the available memory is less than 256 MiB");
            return;
        }
        let before = resident_bytes();
        let speed = memory.take_twice();
        assert!(speed.first_mib_per_s > 0.0 && speed.again_mib_per_s > 0.0);
        assert!(resident_bytes() >= before + BYTES / 2);
        memory.release();
        assert!(resident_bytes() < before + BYTES / 2);
    }

    #[test]
    fn no_more_than_a_share_of_what_is_available_is_held() {
        let memory = WarmMemory::of(u64::MAX);
        assert!(memory.bytes as u64 <= available_memory_bytes());
    }
}
