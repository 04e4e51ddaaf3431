//! The pool of page frames: who may have one, and where the memory comes from.
//!
//! Slabs are allocated one at a time when the free list is empty; freed frames are reused last in, first out, so in the steady
//! state there are neither page faults nor zeroing. [`PagePool::trim`] gives whole free slabs back.
//!
//! **Invariants.**
//! - A frame is in exactly one of: the free list, the never-used tail of the newest slab, or in use
//!   (one `PageMut`, or as many `PageRef`s as its count says).
//! - Every frame in use owns one strong count of the pool, so slabs outlive all their pages.
//! - `in_use <= capacity` for ordinary allocations (at the time of the allocation, the capacity may
//!   shrink later); emergency allocations may also use the reserve.
//!
//! **Locks.** The pool's mutex is a leaf, held for tens of nanoseconds (for a slab allocation: the system calls).
//!
//! This module contains `unsafe`: it says which frames of which slabs are nobody's.

use super::preparer::{Figures, MANY_FRAMES, Preparation};
use super::slab::{Frame, SLAB_FRAMES, Slab};
use super::{PAGE_BYTES, PageMut};
use crate::sync::{Arc, Condvar, Mutex};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Frames of the first slab of a pool that is too small for a full one.
pub(super) const SMALL_SLAB_FRAMES: usize = 16;

/// What the pool's mutex protects.
pub(super) struct State {
    slabs: Vec<Slab>,
    /// Slabs made by [`PagePool::prepare_slab`] that are not in `slabs` yet.
    pub(super) prepared: Vec<Slab>,
    /// Frames that were used before.
    free: Vec<Frame>,
    /// Next never-used frame of the newest slab; none left when above the slab's count.
    next_fresh: usize,
    /// Frames of all slabs, prepared ones included.
    pub(super) total: usize,
    in_use: usize,
    peak: usize,
    /// Most pages in use, including the reserve.
    pub(super) capacity: usize,
    /// Pages of the capacity that only emergency allocations get.
    reserve: usize,
    /// Slabs that came into use so far.
    pub(super) slabs_begun: u64,
    /// The preparer sleeps until it is told that a slab came into use.
    pub(super) is_idle: bool,
    /// The preparer is to be told.
    slab_taken: bool,
    pub(super) preparation: Preparation,
}

// SAFETY: the frames and slabs named by the state are raw memory that belongs to the pool and is
// not tied to a thread.
unsafe impl Send for State {}

pub(super) struct Inner {
    pub(super) state: Mutex<State>,
    /// The preparer waits for a slab to be used up.
    pub(super) slab_wanted: Condvar,
    /// Copies of the state's figures that are read without the lock.
    in_use: AtomicUsize,
    capacity: AtomicUsize,
}

/// Which part of the capacity an allocation may use.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Ordinary,
    Emergency,
}

/// Whether an allocation may make the pool larger at the caller's expense.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Growth {
    /// When there is no other memory.
    Allowed,
    /// Not while fresh memory is dear: see [`PagePool::alloc_batch_for_overwrite`].
    IfCheap,
}

impl State {
    fn limit(&self, class: Class) -> usize {
        match class {
            Class::Ordinary => self.capacity - self.reserve,
            Class::Emergency => self.capacity,
        }
    }

    /// A frame and whether its bytes are known to be zero.
    fn take(&mut self, class: Class, growth: Growth, pool: *const Inner) -> Option<(Frame, bool)> {
        if self.in_use >= self.limit(class) {
            return None;
        }
        let taken = if let Some(frame) = self.free.pop() {
            (frame, false)
        } else {
            if self.slabs.last().is_none_or(|slab| self.next_fresh > slab.frames) {
                self.grow(growth, pool)?;
            }
            let slab = self.slabs.last()?;
            // SAFETY: `next_fresh` is at least 1 and at most the slab's number of frames.
            let frame = unsafe { Frame::new(slab.start, self.next_fresh) };
            self.next_fresh += 1;
            (frame, true)
        };
        self.in_use += 1;
        self.peak = self.peak.max(self.in_use);
        Some(taken)
    }

    /// What [`State::take`] is likely to answer next.
    fn next(&self) -> Option<Frame> {
        let fresh = || {
            let slab = self.slabs.last().filter(|slab| self.next_fresh <= slab.frames)?;
            // SAFETY: `next_fresh` is at least 1 and at most the slab's number of frames.
            Some(unsafe { Frame::new(slab.start, self.next_fresh) })
        };
        self.free.last().copied().or_else(fresh)
    }

    /// Adds a slab: a prepared one, a full one, or in a small pool as much again as there is.
    fn grow(&mut self, growth: Growth, pool: *const Inner) -> Option<()> {
        self.slabs_begun += 1;
        self.slab_taken = self.is_idle || self.figures().is_low();
        if let Some(slab) = self.prepared.pop() {
            self.slabs.push(slab);
            self.next_fresh = 1;
            return Some(());
        }
        if self.must_recycle(growth) {
            return None;
        }
        let missing = self.capacity.saturating_sub(self.total);
        let frames = if self.capacity >= SLAB_FRAMES {
            SLAB_FRAMES
        } else {
            missing.min(self.total.max(SMALL_SLAB_FRAMES)).max(1)
        };
        self.slabs.push(Slab::allocate(frames, self.preparation.backing(), pool)?);
        self.next_fresh = 1;
        self.total += frames;
        Some(())
    }

    /// Whether the next frame needs a full slab that nobody has made yet.
    fn wants_own_slab(&self, class: Class, growth: Growth) -> bool {
        let may_grow = self.in_use < self.limit(class)
            && self.capacity >= SLAB_FRAMES
            && self.total < self.capacity;
        may_grow && self.ready() == 0 && !self.must_recycle(growth)
    }

    fn must_recycle(&self, growth: Growth) -> bool {
        growth == Growth::IfCheap && self.preparation.prefers_recycling(self.figures())
    }

    pub(super) fn figures(&self) -> Figures {
        Figures {
            capacity: self.capacity,
            total: self.total,
            in_use: self.in_use,
            ready: self.ready(),
        }
    }

    /// Pages that can be had without the system's help.
    fn ready(&self) -> usize {
        let fresh =
            self.slabs.last().map_or(0, |slab| (slab.frames + 1).saturating_sub(self.next_fresh));
        let prepared: usize = self.prepared.iter().map(|slab| slab.frames).sum();
        self.free.len() + fresh + prepared
    }

    /// Unmaps every slab without a page in use.
    fn trim(&mut self) {
        for slab in self.prepared.drain(..) {
            self.total -= slab.frames;
            // SAFETY: no frame of a prepared slab was ever handed out.
            unsafe { slab.free() };
        }
        // The never-used tail of the newest slab becomes part of the free list first.
        if let Some(slab) = self.slabs.last() {
            for number in self.next_fresh..=slab.frames {
                // SAFETY: `number` is a frame of the slab that was never handed out.
                self.free.push(unsafe { Frame::new(slab.start, number) });
            }
            self.next_fresh = slab.frames + 1;
        }
        self.slabs.sort_unstable_by_key(|slab| slab.start);
        let slab_of = |slabs: &[Slab], frame: &Frame| {
            slabs.partition_point(|slab| slab.start <= frame.0).saturating_sub(1)
        };
        let mut free_frames = vec![0_usize; self.slabs.len()];
        for frame in &self.free {
            free_frames[slab_of(&self.slabs, frame)] += 1;
        }
        let unused: Vec<bool> =
            self.slabs.iter().zip(&free_frames).map(|(slab, &free)| free == slab.frames).collect();
        self.free.retain(|frame| !unused[slab_of(&self.slabs, frame)]);
        let mut position = 0;
        self.slabs.retain(|slab| {
            let drop_it = unused[position];
            position += 1;
            if drop_it {
                self.total -= slab.frames;
                // SAFETY: all its frames were in the free list, and were just taken off it.
                unsafe { slab.free() };
            }
            !drop_it
        });
        // No slab has a never-used tail now, whichever is last.
        self.next_fresh = SLAB_FRAMES + 1;
    }
}

impl Inner {
    pub(super) fn put(&self, frame: Frame) {
        let mut state = self.state.lock();
        state.free.push(frame);
        state.in_use -= 1;
        self.in_use.store(state.in_use, Ordering::Relaxed);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let state = self.state.lock();
        debug_assert_eq!(state.in_use, 0, "a page in use keeps its pool");
        for slab in state.slabs.iter().chain(&state.prepared) {
            // SAFETY: every page in use owns a strong count of the pool, and there is none left.
            unsafe { slab.free() };
        }
    }
}

/// Figures of a [`PagePool`], in pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolStats {
    /// Pages handed out and not yet returned.
    pub in_use: usize,
    /// Highest `in_use` so far.
    pub peak: usize,
    /// Most pages in use, reserve included.
    pub capacity: usize,
    /// Part of the capacity that is for [`PagePool::alloc_emergency`] only.
    pub reserve: usize,
    /// Page frames of all slabs, used or not.
    pub allocated: usize,
    /// Page frames that can be handed out without asking the system for memory.
    pub ready: usize,
}

/// A bounded source of pages. Cloning gives another handle of the same pool.
#[derive(Clone)]
pub struct PagePool(pub(super) Arc<Inner>);

impl fmt::Debug for PagePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PagePool").field(&self.stats()).finish()
    }
}

impl PagePool {
    /// A pool of `capacity_bytes` (rounded down to pages) without a reserve. Allocates nothing yet.
    pub fn new(capacity_bytes: usize) -> Self {
        Self::with_reserve(capacity_bytes, 0)
    }

    /// A pool of `capacity_bytes`, of which `reserve_bytes` are kept for
    /// [`PagePool::alloc_emergency`].
    pub fn with_reserve(capacity_bytes: usize, reserve_bytes: usize) -> Self {
        let capacity = capacity_bytes / PAGE_BYTES;
        let state = State {
            slabs: Vec::new(),
            prepared: Vec::new(),
            free: Vec::new(),
            next_fresh: 1,
            total: 0,
            in_use: 0,
            peak: 0,
            capacity,
            reserve: (reserve_bytes / PAGE_BYTES).min(capacity),
            slabs_begun: 0,
            is_idle: false,
            slab_taken: false,
            preparation: Preparation::new(),
        };
        Self(Arc::new(Inner {
            state: Mutex::new(state),
            slab_wanted: Condvar::new(),
            in_use: AtomicUsize::new(0),
            capacity: AtomicUsize::new(capacity),
        }))
    }

    /// A page of zeroes, or `None` at the capacity without the reserve.
    pub fn alloc_zeroed(&self) -> Option<PageMut> {
        let (mut page, zero) = self.take(Class::Ordinary, Growth::Allowed)?;
        if !zero {
            page.fill(0);
        }
        Some(page)
    }

    /// A page with any contents, for a caller that overwrites all of it before anyone else can
    /// see it: it holds zeroes or old bytes of this pool's volume, perhaps of another file.
    pub fn alloc_for_overwrite(&self) -> Option<PageMut> {
        self.alloc_for_overwrite_in(Growth::Allowed)
    }

    /// As [`PagePool::alloc_for_overwrite`], for somebody who takes one page after the other; `growth` as in
    /// [`PagePool::alloc_batch_for_overwrite`]. The next page is on its way into the processor's cache then.
    pub fn alloc_for_overwrite_in(&self, growth: Growth) -> Option<PageMut> {
        let (page, next) = self.take_with(Class::Ordinary, growth, State::next)?;
        if let Some(frame) = next {
            frame.prefetch();
        }
        Some(page.0)
    }

    /// As [`PagePool::alloc_for_overwrite`], and may use the reserve: for writeback and for the
    /// clone of a page that is held by it, which must go on when memory is short.
    pub fn alloc_emergency(&self) -> Option<PageMut> {
        Some(self.take(Class::Emergency, Growth::Allowed)?.0)
    }

    /// Appends up to `count` pages as from [`PagePool::alloc_for_overwrite`] to `pages` under one
    /// lock acquisition, and says how many. Frames that were freed one after the other come in that order, so that neighbours in
    /// memory become neighbours in a file again, and one segment of a request.
    ///
    /// With [`Growth::IfCheap`] the answer may be less although the capacity is not reached: a burst's worth is in use, and
    /// the kernel takes longer for new memory than a disk for a page. A caller that can evict does that, and then asks with
    /// [`Growth::Allowed`].
    pub fn alloc_batch_for_overwrite(
        &self,
        count: usize,
        growth: Growth,
        pages: &mut Vec<PageMut>,
    ) -> usize {
        let mut state = self.0.state.lock();
        let class = Class::Ordinary;
        let used = count.min(state.free.len());
        let used = used.min(state.limit(class).saturating_sub(state.in_use));
        let from = state.free.len() - used;
        pages.extend(state.free.drain(from..).map(|frame| self.adopt(frame)));
        state.in_use += used;
        state.peak = state.peak.max(state.in_use);
        let mut taken = used;
        while taken < count {
            if count >= MANY_FRAMES && state.wants_own_slab(class, growth) {
                drop(state);
                let made = self.prepare_slab();
                state = self.0.state.lock();
                if !made {
                    break;
                }
            }
            let Some((frame, _)) = state.take(class, growth, Arc::as_ptr(&self.0)) else { break };
            pages.push(self.adopt(frame));
            taken += 1;
        }
        self.0.in_use.store(state.in_use, Ordering::Relaxed);
        let slab_taken = std::mem::take(&mut state.slab_taken);
        drop(state);
        if slab_taken {
            self.0.slab_wanted.notify_one();
        }
        taken
    }

    fn take(&self, class: Class, growth: Growth) -> Option<(PageMut, bool)> {
        Some(self.take_with(class, growth, |_| ())?.0)
    }

    /// A page, whether its bytes are known to be zero, and what `look` finds in the state behind it.
    fn take_with<T>(
        &self,
        class: Class,
        growth: Growth,
        look: impl FnOnce(&State) -> T,
    ) -> Option<((PageMut, bool), T)> {
        let mut state = self.0.state.lock();
        let (frame, zero) = state.take(class, growth, Arc::as_ptr(&self.0))?;
        let seen = look(&state);
        self.0.in_use.store(state.in_use, Ordering::Relaxed);
        let slab_taken = std::mem::take(&mut state.slab_taken);
        drop(state);
        if slab_taken {
            self.0.slab_wanted.notify_one();
        }
        Some(((self.adopt(frame), zero), seen))
    }

    /// Makes `frame`, just taken from this pool's state, a page in use.
    fn adopt(&self, frame: Frame) -> PageMut {
        // SAFETY: the pointer is that of a live `Arc`; `Frame::release` takes the count back.
        unsafe { Arc::increment_strong_count(Arc::as_ptr(&self.0)) };
        // SAFETY: the frame is of a slab of this pool, which is live.
        unsafe { frame.references() }.store(1, Ordering::Relaxed);
        PageMut(frame)
    }

    /// Changes the capacity (reserve included). Pages in use stay in use: when there are more than
    /// the new capacity, allocations fail until enough were returned. Free slabs are given back
    /// when the pool shrinks.
    pub fn set_capacity(&self, capacity_bytes: usize) {
        let mut state = self.0.state.lock();
        let capacity = capacity_bytes / PAGE_BYTES;
        let shrinks = capacity < state.capacity;
        state.capacity = capacity;
        state.reserve = state.reserve.min(capacity);
        self.0.capacity.store(capacity, Ordering::Relaxed);
        if shrinks {
            state.trim();
        }
    }

    /// Gives slabs without a page in use back to the system.
    pub fn trim(&self) {
        self.0.state.lock().trim();
    }

    /// Pages in use, without taking the lock.
    pub fn in_use_pages(&self) -> usize {
        self.0.in_use.load(Ordering::Relaxed)
    }

    /// Capacity in pages (reserve included), without taking the lock.
    pub fn capacity_pages(&self) -> usize {
        self.0.capacity.load(Ordering::Relaxed)
    }

    /// All figures at one moment.
    pub fn stats(&self) -> PoolStats {
        let state = self.0.state.lock();
        PoolStats {
            in_use: state.in_use,
            peak: state.peak,
            capacity: state.capacity,
            reserve: state.reserve,
            allocated: state.total,
            ready: state.ready(),
        }
    }
}
