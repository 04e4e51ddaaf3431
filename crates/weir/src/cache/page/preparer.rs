//! Memory that is backed by the kernel before somebody needs it: when to make some, and the thread that does.
//!
//! [`Preparation`] decides, and is pure: it knows the pool's figures and what slabs have cost. [`PagePool::run_preparer`] acts. Why
//! all of this: DESIGN.md, *Fresh memory is prepared ahead, and recycled where it is dear*.
//!
//! **Locks.** The pool's mutex, and never while the kernel clears memory.

#[cfg(test)]
mod tests;

use super::pool::{PagePool, State};
use super::slab::{Backing, SLAB_FRAMES, Slab};
use crate::sync::{
    Arc, Clock, MutexGuard, SchedulingClass, give_way, may_change_class, processor_time_ns,
    wait_for,
};

/// Frames that are kept ready (256 MiB), so that a burst of writes into fresh memory finds frames that the kernel has backed
/// already ...
const AHEAD_FRAMES: usize = 128 * SLAB_FRAMES;
/// ... and at most this part of the capacity, in eighths.
const AHEAD_EIGHTHS: usize = 3;
/// While others use slabs up, the preparer leaves them the processor until there are less than this part of what it keeps ready.
const LOW_PART: usize = 4;
/// A burst is over when no slab has been used up for so long.
const BURST_PAUSE_US: u64 = 30_000;
/// Fresh memory is dear when the kernel takes longer than this for a slab (2 GiB/s): writing a page home and reading it again
/// costs less.
const DEAR_SLAB_NS: u64 = 1_000_000;
/// Whoever wants so many frames at once (64 KiB) makes a huge slab for them where there is none: its cost is spread over many pages, and
/// requests of few segments are worth it.
pub(super) const MANY_FRAMES: usize = 16;
/// With fewer frames ready than this (32 MiB) somebody may soon be short of them.
const FEW_FRAMES: usize = 16 * SLAB_FRAMES;
/// While fresh memory is dear, and nobody is short of it or a burst's worth is in use, the preparer rests so many times as long as it
/// worked ...
const DEAR_REST: u64 = 3;
/// ... and while others wait for the log, each of whom may wait for as long as the kernel clears a slab, so many times.
const DEAR_REST_BESIDE_SYNCS: u64 = 60;
const MAX_REST_US: u64 = 250_000;
/// While it rests it looks so often whether it still should.
const REST_STEP_US: u64 = 20_000;
/// Of the thread that prepares slabs: a tenth of the processor where others want it too.
const PREPARER_NICENESS: i32 = 10;
/// Who waits so long for the processor while he counts for nothing is on a machine that computes all the time ...
const STARVED_NS: u64 = 10_000_000;
/// ... and does not count for nothing while he makes so many slabs.
const ORDINARY_SLABS: u32 = 32;
/// The preparer looks again after this long, whatever it heard.
const PREPARER_PATIENCE_US: u64 = 1_000_000;

/// The pool's figures that decisions rest on, in frames.
#[derive(Debug, Clone, Copy)]
pub(super) struct Figures {
    pub(super) capacity: usize,
    /// Frames of all slabs, prepared ones included.
    pub(super) total: usize,
    pub(super) in_use: usize,
    /// Frames that can be had without the system's help.
    pub(super) ready: usize,
}

impl Figures {
    /// Frames that are kept ready: a burst's worth.
    fn ahead(self) -> usize {
        AHEAD_FRAMES.min(self.capacity * AHEAD_EIGHTHS / 8)
    }

    pub(super) fn is_low(self) -> bool {
        self.ready < self.ahead() / LOW_PART
    }

    /// There is room for one more slab.
    fn may_fill(self) -> bool {
        self.capacity >= SLAB_FRAMES && self.total < self.capacity && self.ready < self.ahead()
    }

    /// Somebody may soon be short of frames.
    fn are_few(self) -> bool {
        self.ready < FEW_FRAMES
    }

    fn is_burst_in_use(self) -> bool {
        self.in_use >= self.ahead()
    }

    /// Somebody may soon be short of frames who is not to take used ones yet.
    fn is_urgent(self) -> bool {
        !self.is_burst_in_use() && self.are_few()
    }
}

/// Whether to prepare memory, and how dear it is.
#[derive(Debug)]
pub(super) struct Preparation {
    /// What is kept ready is filled up until all of it is there.
    is_filling: bool,
    /// How long the kernel takes to back a slab: a moving average of what the preparer has seen.
    slab_cost_ns: u64,
}

impl Preparation {
    pub(super) fn new() -> Self {
        Self { is_filling: true, slab_cost_ns: 0 }
    }

    /// Whether the preparer should make one more slab.
    fn wants_slab(&mut self, pool: Figures) -> bool {
        let may_fill = pool.may_fill();
        self.is_filling = may_fill && (self.is_filling || pool.is_low());
        self.is_filling
    }

    pub(super) fn is_dear(&self) -> bool {
        self.slab_cost_ns > DEAR_SLAB_NS
    }

    /// What is clean and cold had better be used again than that the pool grows.
    pub(super) fn prefers_recycling(&self, pool: Figures) -> bool {
        self.is_dear() && pool.is_burst_in_use()
    }

    /// What a slab is made of that somebody waits for who wants few frames: its header is touched under the lock, so where memory is dear,
    /// a huge page would hold up everybody for milliseconds.
    pub(super) fn backing(&self) -> Backing {
        if self.is_dear() { Backing::Ordinary } else { Backing::Huge }
    }

    /// Learns what a slab costs.
    fn note_slab_cost(&mut self, took_ns: u64) {
        self.slab_cost_ns = (self.slab_cost_ns * 7 + took_ns) / 8;
    }

    /// How long the preparer is to rest after it has worked for `took_ns`, while others wait for the log or not.
    fn rest_us(&self, took_ns: u64, are_syncs_awaited: bool, pool: Figures) -> u64 {
        if !self.is_dear() || pool.is_urgent() {
            return 0;
        }
        let times = if are_syncs_awaited { DEAR_REST_BESIDE_SYNCS } else { DEAR_REST };
        (took_ns.saturating_mul(times) / 1000).min(MAX_REST_US)
    }
}

/// Whether the preparer counts for nothing while the kernel clears memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Modesty {
    /// Its thread may change its class and back.
    is_possible: bool,
    /// Slabs that it makes as an ordinary thread first.
    ordinary_slabs: u32,
}

impl Modesty {
    fn class(self, pool: Figures) -> SchedulingClass {
        let is_modest = self.is_possible && self.ordinary_slabs == 0 && !pool.is_urgent();
        if is_modest { SchedulingClass::Idle } else { SchedulingClass::Ordinary }
    }

    /// A slab was made by a thread of `class` that waited so long for the processor.
    fn note(&mut self, class: SchedulingClass, waited_ns: u64) {
        self.ordinary_slabs = match class {
            SchedulingClass::Idle if waited_ns > STARVED_NS => ORDINARY_SLABS,
            _ => self.ordinary_slabs.saturating_sub(1),
        };
    }
}

impl PagePool {
    /// Allocates one more full slab and has the kernel fill it with zeroed memory now, outside of the
    /// lock: a background thread that calls this while [`PoolStats::ready`](super::PoolStats::ready) is low takes the page
    /// faults (about 300 µs a slab, and ten times that in a virtual machine whose host has to find the memory)
    /// off the writers. False when the pool has all its memory, or is too small for full slabs.
    pub fn prepare_slab(&self) -> bool {
        self.prepare_slab_as(SchedulingClass::Ordinary)
    }

    /// As [`PagePool::prepare_slab`]; the calling thread is of `class` while the kernel clears the memory, and ordinary while it
    /// holds a lock.
    fn prepare_slab_as(&self, class: SchedulingClass) -> bool {
        let mut state = self.0.state.lock();
        if state.capacity < SLAB_FRAMES || state.total >= state.capacity {
            return false;
        }
        state.total += SLAB_FRAMES;
        drop(state);
        let pool = Arc::as_ptr(&self.0);
        let slab = Slab::allocate_populated(SLAB_FRAMES, (Backing::Huge, class), pool);
        let mut state = self.0.state.lock();
        let made = slab.is_some();
        match slab {
            Some(slab) => state.prepared.push(slab),
            None => state.total -= SLAB_FRAMES,
        }
        made
    }

    /// What a background thread does for the pool: prepares slabs ahead of need while `go_on` says so, which is asked
    /// after every slab and every wait, under the pool's lock. Learns on the way what fresh memory costs; where it is dear, it
    /// leaves most of the processor to others once a burst's worth is there, and nearly all of it if `are_syncs_awaited`: somebody
    /// waits for the log. Where it may, and nobody is short of frames, it counts for nothing
    /// while the kernel clears memory: two milliseconds that nothing but this class lets who wakes up interrupt.
    pub fn run_preparer(
        &self,
        clock: &dyn Clock,
        go_on: impl Fn() -> bool,
        are_syncs_awaited: impl Fn() -> bool,
    ) {
        // Anybody who has something to do comes first: this holds no lock while it works.
        give_way(PREPARER_NICENESS);
        let mut modesty = Modesty { is_possible: may_change_class(), ordinary_slabs: 0 };
        let mut refused = false;
        loop {
            let mut state = self.0.state.lock();
            // Asked under the lock, so that a wake-up is not missed.
            if !go_on() {
                return;
            }
            let figures = state.figures();
            if refused || !state.preparation.wants_slab(figures) {
                // A system that has no memory to give is not asked in a loop.
                let is_burst = !refused && figures.may_fill();
                refused = false;
                self.await_slab_taken(&mut state, is_burst);
                continue;
            }
            drop(state);
            let class = modesty.class(figures);
            let (began_ns, used_ns) = (clock.monotonic_ns(), processor_time_ns());
            refused = !self.prepare_slab_as(class);
            let elapsed_ns = clock.since_ns(began_ns);
            // While others have the processor, memory becomes no dearer.
            let took_ns = match (used_ns, processor_time_ns()) {
                (Some(before), Some(after)) => after.saturating_sub(before).min(elapsed_ns),
                _ => elapsed_ns,
            };
            modesty.note(class, elapsed_ns - took_ns);
            self.note_slab_cost(took_ns);
            self.rest(took_ns, clock, &go_on, &are_syncs_awaited);
        }
    }

    /// Rests after `took_ns` of work, for as long as that is right.
    fn rest(
        &self,
        took_ns: u64,
        clock: &dyn Clock,
        go_on: impl Fn() -> bool,
        are_syncs_awaited: impl Fn() -> bool,
    ) {
        let began_ns = clock.monotonic_ns();
        loop {
            // Takes a lock, and the pool's is a leaf.
            let are_syncs_awaited = are_syncs_awaited();
            let mut state = self.0.state.lock();
            let rest_us = state.preparation.rest_us(took_ns, are_syncs_awaited, state.figures());
            let rested_us = clock.since_ns(began_ns) / 1000;
            if rested_us >= rest_us || !go_on() {
                return;
            }
            wait_for(&self.0.slab_wanted, &mut state, (rest_us - rested_us).min(REST_STEP_US));
        }
    }

    /// Waits until a slab comes into use; in a burst, until few are left or none has for a while.
    fn await_slab_taken(&self, state: &mut MutexGuard<'_, State>, is_burst: bool) {
        let begun = state.slabs_begun;
        state.is_idle = !is_burst;
        let patience_us = if is_burst { BURST_PAUSE_US } else { PREPARER_PATIENCE_US };
        wait_for(&self.0.slab_wanted, state, patience_us);
        state.is_idle = false;
        state.preparation.is_filling |= is_burst && state.slabs_begun == begun;
    }

    fn note_slab_cost(&self, took_ns: u64) {
        self.0.state.lock().preparation.note_slab_cost(took_ns);
    }

    /// Has [`PagePool::run_preparer`] ask whether to go on.
    pub fn wake_preparer(&self) {
        let state = self.0.state.lock();
        self.0.slab_wanted.notify_all();
        drop(state);
    }

    /// The pool is so large that it takes its memory in full slabs: only then is there something to prepare.
    pub fn has_full_slabs(&self) -> bool {
        self.capacity_pages() >= SLAB_FRAMES
    }
}
