//! Page frames: 4 KiB of aligned memory with a reference count, handed out by a bounded pool.
//!
//! A page starts as a [`PageMut`] (one owner, writable), is frozen into a [`PageRef`] (shared,
//! immutable) and returns to its pool when the last `PageRef` is dropped. A `PageRef` that is the
//! only one can be written again ([`PageRef::get_mut`]); one that writeback or a zero-copy reader
//! also holds cannot, so whoever wants to change it clones the page. Nobody ever waits for a page.
//!
//! **Memory.** The pool takes memory in slabs: 2 MiB, 2 MiB aligned and advised to be a huge page (not where somebody waits for one
//! that is dear), or less when the whole pool is smaller than that. The first 4 KiB of a slab are its header (the
//! owning pool and the reference counts), the rest are page frames. Slabs are allocated one at a
//! time when the free list is empty; freed frames are reused last in, first out, so in the steady
//! state there are neither page faults nor zeroing. [`PagePool::trim`] gives whole free slabs back.
//!
//! **Invariants.**
//! - A frame is in exactly one of: the free list, the never-used tail of the newest slab, or in use
//!   (one `PageMut`, or as many `PageRef`s as its count says).
//! - Every frame in use owns one strong count of the pool, so slabs outlive all their pages.
//! - `in_use <= capacity` for ordinary allocations (at the time of the allocation, the capacity may
//!   shrink later); emergency allocations may also use the reserve.
//! - All bytes of a frame are initialised memory at all times.
//!
//! **Locks.** The pool's mutex is a leaf, held for tens of nanoseconds (for a slab allocation: the
//! system calls). The reference counts are `std` atomics on purpose: like those of `Arc`, they are
//! not a scheduling point of the `shuttle` build, and live in memory that starts as zero bytes.
//!
//! This module contains `unsafe`: frames are raw memory with a hand-made reference count.

#[cfg(test)]
mod tests;

use crate::format::BLOCK_BYTES;
use crate::sync::{Arc, Clock, Condvar, Mutex, MutexGuard, give_way, wait_for};
use std::alloc::Layout;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering, fence};

/// Size of a page: one block.
pub const PAGE_BYTES: usize = BLOCK_BYTES;
/// Size and alignment of a full slab: a huge page of the processors we care about.
const SLAB_BYTES: usize = 2 << 20;
/// Frames of a full slab; the header takes the place of one.
const SLAB_FRAMES: usize = SLAB_BYTES / PAGE_BYTES - 1;
/// Frames of the first slab of a pool that is too small for a full one.
const SMALL_SLAB_FRAMES: usize = 16;
/// Frames that [`PagePool::run_preparer`] keeps ready (256 MiB), so that a burst of writes into fresh memory finds frames that
/// the kernel has backed already ...
const AHEAD_FRAMES: usize = 128 * SLAB_FRAMES;
/// ... and at most this part of the capacity, in eighths.
const AHEAD_EIGHTHS: usize = 3;
/// While others use slabs up, the preparer leaves them the processor until there are less than this part of what it keeps ready.
const LOW_PART: usize = 4;
/// A burst is over when no slab has been used up for so long.
const BURST_PAUSE_US: u64 = 30_000;
/// Fresh memory is dear when the kernel takes longer than this for a slab (1 GiB/s): writing a page home and reading it again
/// costs less.
const DEAR_SLAB_NS: u64 = 2_000_000;
/// With fewer frames ready than this (32 MiB) somebody may soon be short of them.
const FEW_FRAMES: usize = 16 * SLAB_FRAMES;
/// While fresh memory is dear, and nobody is short of it or a burst's worth is in use, the preparer rests so many times as long as it
/// worked.
const DEAR_REST: u64 = 3;
const MAX_REST_US: u64 = 50_000;
/// Of the thread that prepares slabs: a tenth of the processor where others want it too.
const PREPARER_NICENESS: i32 = 10;
/// The preparer looks again after this long, whatever it heard.
const PREPARER_PATIENCE_US: u64 = 1_000_000;
/// A count above this is a leak of references (`mem::forget` in a loop), not use.
const MAX_REFERENCES: u32 = u32::MAX / 2;

/// First bytes of a slab. Zero bytes are valid counts, so only `pool` is ever written.
#[repr(C)]
struct SlabHeader {
    pool: *const Inner,
    /// References of frame `i + 1`. Meaningful only while the frame is in use.
    references: [AtomicU32; SLAB_FRAMES],
}

const _: () = assert!(size_of::<SlabHeader>() <= PAGE_BYTES);
// The frame's number must fit into the offset within a page.
const _: () = assert!(SLAB_FRAMES < PAGE_BYTES);

/// Names a frame: points `number` bytes into the frame's memory, where `number` (1 to
/// [`SLAB_FRAMES`]) is its place in the slab. One word gives data, header and count.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Frame(NonNull<u8>);

impl Frame {
    /// # Safety
    /// `slab` is the start of a live slab of more than `number` frames, `number` is at least 1.
    unsafe fn new(slab: NonNull<u8>, number: usize) -> Self {
        debug_assert!((1..=SLAB_FRAMES).contains(&number));
        // SAFETY: the frame is inside of the slab (caller), and `number` is less than a page.
        Self(unsafe { slab.add(number * PAGE_BYTES + number) })
    }

    fn number(self) -> usize {
        self.0.addr().get() & (PAGE_BYTES - 1)
    }

    #[inline]
    fn data(self) -> NonNull<u8> {
        // SAFETY: `new` added `number` to the start of the frame; this takes it off again.
        unsafe { self.0.sub(self.number()) }
    }

    /// # Safety
    /// The slab is live for `'a`: the caller has a page of it, or is the pool that owns it.
    unsafe fn header<'a>(self) -> &'a SlabHeader {
        // SAFETY: frame `number` starts `number` pages after the header, in the same allocation.
        // The header was initialised before the first frame was handed out, and is changed
        // through atomics only.
        unsafe { self.data().sub(self.number() * PAGE_BYTES).cast::<SlabHeader>().as_ref() }
    }

    /// # Safety
    /// As [`Frame::header`].
    #[inline]
    unsafe fn references<'a>(self) -> &'a AtomicU32 {
        // SAFETY: the caller's promise is the same.
        unsafe { &self.header().references[self.number() - 1] }
    }

    /// Returns the frame to its pool.
    ///
    /// # Safety
    /// The frame is in use, and the caller is its only owner and gives it up.
    unsafe fn release(self) {
        // SAFETY: a frame in use owns a strong count of its pool (`PagePool::take` made it with
        // `increment_strong_count`); the only owner of the frame turns it back into an `Arc`.
        let pool = unsafe { Arc::from_raw(self.header().pool) };
        pool.put(self);
    }
}

/// What a full slab is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Backing {
    /// One huge page: one fault, and requests of few segments.
    Huge,
    /// Ordinary pages, each of which the kernel finds when it is touched first.
    Ordinary,
}

/// A slab, owned by its pool's state.
struct Slab {
    start: NonNull<u8>,
    frames: usize,
}

impl Slab {
    fn layout(frames: usize) -> Option<Layout> {
        let align = if frames == SLAB_FRAMES { SLAB_BYTES } else { PAGE_BYTES };
        Layout::from_size_align((frames + 1) * PAGE_BYTES, align).ok()
    }

    /// Zeroed memory for `frames` frames and the header; `backing` is that of a full slab. `None` when the system has none.
    fn allocate(frames: usize, backing: Backing, pool: *const Inner) -> Option<Self> {
        let layout = Self::layout(frames)?;
        let start = if frames == SLAB_FRAMES {
            system::allocate_aligned(layout, backing)?
        } else {
            // SAFETY: the layout's size is not zero.
            NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })?
        };
        // SAFETY: the first page of the fresh allocation is ours alone and large and aligned
        // enough for the header, whose other fields are valid as zero bytes.
        unsafe { (&raw mut (*start.cast::<SlabHeader>().as_ptr()).pool).write(pool) };
        Some(Self { start, frames })
    }

    /// # Safety
    /// No frame of the slab is in use or will be handed out again.
    unsafe fn free(&self) {
        let Some(layout) = Self::layout(self.frames) else { return };
        if self.frames == SLAB_FRAMES {
            // SAFETY: `allocate` took it from there with the same layout; unused (caller).
            unsafe { system::free_aligned(self.start, layout) };
        } else {
            // SAFETY: as above.
            unsafe { std::alloc::dealloc(self.start.as_ptr(), layout) };
        }
    }
}

/// Memory of full slabs. Straight from the kernel: the allocator would write zeroes over memory
/// that the kernel zeroes anyway, and before we can ask for a huge page.
#[cfg(all(target_os = "linux", not(miri)))]
mod system {
    use super::Backing;
    use std::alloc::Layout;
    use std::ptr::NonNull;

    /// Zeroed memory, aligned to `layout`, that will be backed as said where the kernel can.
    pub(super) fn allocate_aligned(layout: Layout, backing: Backing) -> Option<NonNull<u8>> {
        let advice = match backing {
            Backing::Huge => libc::MADV_HUGEPAGE,
            Backing::Ordinary => libc::MADV_NOHUGEPAGE,
        };
        let (size, align) = (layout.size(), layout.align());
        // Twice as much as needed, to cut an aligned piece out of it.
        // SAFETY: a new anonymous mapping at a place of the kernel's choice touches no memory.
        let mapped = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size + align,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if mapped == libc::MAP_FAILED {
            return None;
        }
        let head = mapped.align_offset(align);
        // SAFETY: `head < align`, so head, piece and tail lie within the mapping in this order;
        // head and tail are not used by anyone. A refused advice or unmapping costs memory only.
        unsafe {
            let start = mapped.add(head);
            if head > 0 {
                libc::munmap(mapped, head);
            }
            libc::munmap(start.add(size), align - head);
            libc::madvise(start, size, advice);
            NonNull::new(start.cast())
        }
    }

    /// Has the kernel back the memory now, by touching it: `MADV_POPULATE_WRITE` would hold the address space's lock for as
    /// long as that takes, and every large allocation of other threads would wait for it.
    ///
    /// # Safety
    /// Nobody else uses the `size` bytes from `start` on.
    pub(super) unsafe fn populate(start: NonNull<u8>, size: usize) {
        for at in (0..size).step_by(super::PAGE_BYTES) {
            // SAFETY: within the memory, which is ours (caller). The first word of the first page holds a value already.
            unsafe {
                let word = start.as_ptr().add(at);
                word.write_volatile(word.read_volatile());
            }
        }
    }

    /// # Safety
    /// `start` came from [`allocate_aligned`] with the same layout and is not used any more.
    pub(super) unsafe fn free_aligned(start: NonNull<u8>, layout: Layout) {
        // SAFETY: exactly the piece that `allocate_aligned` kept, unused (caller).
        unsafe { libc::munmap(start.as_ptr().cast(), layout.size()) };
    }
}

#[cfg(not(all(target_os = "linux", not(miri))))]
mod system {
    use super::Backing;
    use std::alloc::Layout;
    use std::ptr::NonNull;

    /// Zeroed memory, aligned to `layout`.
    pub(super) fn allocate_aligned(layout: Layout, _backing: Backing) -> Option<NonNull<u8>> {
        // SAFETY: a slab's size is not zero.
        NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })
    }

    /// Nothing to do: the allocator wrote the zeroes itself.
    ///
    /// # Safety
    /// None needed: the memory is not touched.
    pub(super) unsafe fn populate(_start: NonNull<u8>, _size: usize) {}

    /// # Safety
    /// `start` came from [`allocate_aligned`] with the same layout and is not used any more.
    pub(super) unsafe fn free_aligned(start: NonNull<u8>, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { std::alloc::dealloc(start.as_ptr(), layout) };
    }
}

/// What the pool's mutex protects.
struct State {
    slabs: Vec<Slab>,
    /// Slabs made by [`PagePool::prepare_slab`] that are not in `slabs` yet.
    prepared: Vec<Slab>,
    /// Frames that were used before.
    free: Vec<Frame>,
    /// Next never-used frame of the newest slab; none left when above the slab's count.
    next_fresh: usize,
    /// Frames of all slabs, prepared ones included.
    total: usize,
    in_use: usize,
    peak: usize,
    /// Most pages in use, including the reserve.
    capacity: usize,
    /// Pages of the capacity that only emergency allocations get.
    reserve: usize,
    /// Slabs that came into use so far.
    slabs_begun: u64,
    /// The preparer fills up what is kept ready, and stops when all of it is there.
    filling: bool,
    /// The preparer sleeps until it is told that a slab came into use.
    is_idle: bool,
    /// The preparer is to be told.
    slab_taken: bool,
    /// How long the kernel takes to back a slab: a moving average of what the preparer has seen.
    slab_cost_ns: u64,
}

// SAFETY: the frames and slabs named by the state are raw memory that belongs to the pool and is
// not tied to a thread.
unsafe impl Send for State {}

struct Inner {
    state: Mutex<State>,
    /// The preparer waits for a slab to be used up.
    slab_wanted: Condvar,
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

    /// Adds a slab: a prepared one, a full one, or in a small pool as much again as there is.
    fn grow(&mut self, growth: Growth, pool: *const Inner) -> Option<()> {
        self.slabs_begun += 1;
        self.slab_taken = self.is_idle || self.is_low();
        if let Some(slab) = self.prepared.pop() {
            self.slabs.push(slab);
            self.next_fresh = 1;
            return Some(());
        }
        if growth == Growth::IfCheap && self.is_dear() && self.in_use >= self.ahead() {
            return None;
        }
        let missing = self.capacity.saturating_sub(self.total);
        let frames = if self.capacity >= SLAB_FRAMES {
            SLAB_FRAMES
        } else {
            missing.min(self.total.max(SMALL_SLAB_FRAMES)).max(1)
        };
        self.slabs.push(Slab::allocate(frames, self.backing(), pool)?);
        self.next_fresh = 1;
        self.total += frames;
        Some(())
    }

    /// Whether the preparer should make one more slab.
    fn wants_slab(&mut self) -> bool {
        let may_fill = self.may_fill();
        self.filling = may_fill && (self.filling || self.is_low());
        self.filling
    }

    /// There is room for one more slab.
    fn may_fill(&self) -> bool {
        self.capacity >= SLAB_FRAMES && self.total < self.capacity && self.ready() < self.ahead()
    }

    fn is_low(&self) -> bool {
        self.ready() < self.ahead() / LOW_PART
    }

    /// Frames that are kept ready: a burst's worth.
    fn ahead(&self) -> usize {
        AHEAD_FRAMES.min(self.capacity * AHEAD_EIGHTHS / 8)
    }

    fn is_dear(&self) -> bool {
        self.slab_cost_ns > DEAR_SLAB_NS
    }

    /// What a slab is made of that somebody waits for: its header is touched under the lock, so where memory is dear, a huge page
    /// would hold up everybody for milliseconds.
    fn backing(&self) -> Backing {
        if self.is_dear() { Backing::Ordinary } else { Backing::Huge }
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
    fn put(&self, frame: Frame) {
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
pub struct PagePool(Arc<Inner>);

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
            filling: true,
            is_idle: false,
            slab_taken: false,
            slab_cost_ns: 0,
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

    /// As [`PagePool::alloc_for_overwrite`]; `growth` as in [`PagePool::alloc_batch_for_overwrite`].
    pub fn alloc_for_overwrite_in(&self, growth: Growth) -> Option<PageMut> {
        Some(self.take(Class::Ordinary, growth)?.0)
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
        let mut state = self.0.state.lock();
        let (frame, zero) = state.take(class, growth, Arc::as_ptr(&self.0))?;
        self.0.in_use.store(state.in_use, Ordering::Relaxed);
        let slab_taken = std::mem::take(&mut state.slab_taken);
        drop(state);
        if slab_taken {
            self.0.slab_wanted.notify_one();
        }
        Some((self.adopt(frame), zero))
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

    /// Allocates one more full slab and has the kernel fill it with zeroed memory now, outside of the
    /// lock: a background thread that calls this while [`PoolStats::ready`] is low takes the page
    /// faults (about 300 µs a slab, and ten times that in a virtual machine whose host has to find the memory)
    /// off the writers. False when the pool has all its memory, or is too small for full slabs.
    pub fn prepare_slab(&self) -> bool {
        let mut state = self.0.state.lock();
        if state.capacity < SLAB_FRAMES || state.total >= state.capacity {
            return false;
        }
        state.total += SLAB_FRAMES;
        drop(state);
        let slab = Slab::allocate(SLAB_FRAMES, Backing::Huge, Arc::as_ptr(&self.0));
        if let Some(slab) = &slab {
            // SAFETY: nobody else knows the slab yet.
            unsafe { system::populate(slab.start, SLAB_BYTES) };
        }
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
    /// leaves most of the processor to others once a burst's worth is there.
    pub fn run_preparer(&self, clock: &dyn Clock, go_on: impl Fn() -> bool) {
        // Anybody who has something to do comes first: this holds no lock while it works.
        give_way(PREPARER_NICENESS);
        let mut refused = false;
        loop {
            let mut state = self.0.state.lock();
            // Asked under the lock, so that a wake-up is not missed.
            if !go_on() {
                return;
            }
            if refused || !state.wants_slab() {
                // A system that has no memory to give is not asked in a loop.
                let is_burst = !refused && state.may_fill();
                refused = false;
                self.await_slab_taken(&mut state, is_burst);
                continue;
            }
            drop(state);
            let began_ns = clock.monotonic_ns();
            refused = !self.prepare_slab();
            let took_ns = clock.monotonic_ns().saturating_sub(began_ns);
            let rest_us = self.note_slab_cost(took_ns);
            if rest_us > 0 {
                clock.sleep_us(rest_us);
            }
        }
    }

    /// Waits until a slab comes into use; in a burst, until few are left or none has for a while.
    fn await_slab_taken(&self, state: &mut MutexGuard<'_, State>, is_burst: bool) {
        let begun = state.slabs_begun;
        state.is_idle = !is_burst;
        let patience_us = if is_burst { BURST_PAUSE_US } else { PREPARER_PATIENCE_US };
        wait_for(&self.0.slab_wanted, state, patience_us);
        state.is_idle = false;
        state.filling |= is_burst && state.slabs_begun == begun;
    }

    /// Learns what a slab costs. Answers how long the preparer is to rest.
    fn note_slab_cost(&self, took_ns: u64) -> u64 {
        let mut state = self.0.state.lock();
        state.slab_cost_ns = (state.slab_cost_ns * 7 + took_ns) / 8;
        let is_urgent = state.in_use < state.ahead() && state.ready() < FEW_FRAMES;
        if state.is_dear() && !is_urgent {
            (took_ns * DEAR_REST / 1000).min(MAX_REST_US)
        } else {
            0
        }
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

/// A page with one owner, who may write it.
pub struct PageMut(Frame);

// SAFETY: the owner of the only handle may access the frame's memory from any thread; the
// counts are atomic and the pool is locked.
unsafe impl Send for PageMut {}
// SAFETY: through `&PageMut` there are only reads.
unsafe impl Sync for PageMut {}

impl PageMut {
    /// Makes the page immutable and shareable.
    pub fn freeze(self) -> PageRef {
        let frame = self.0;
        std::mem::forget(self);
        PageRef(frame)
    }
}

impl From<PageMut> for PageRef {
    fn from(page: PageMut) -> Self {
        page.freeze()
    }
}

impl Deref for PageMut {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the frame's bytes are initialised and live; writers need `&mut self`.
        unsafe { std::slice::from_raw_parts(self.0.data().as_ptr(), PAGE_BYTES) }
    }
}

impl DerefMut for PageMut {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and a `PageMut` is the only handle of its frame.
        unsafe { std::slice::from_raw_parts_mut(self.0.data().as_ptr(), PAGE_BYTES) }
    }
}

impl Drop for PageMut {
    fn drop(&mut self) {
        // SAFETY: the only handle of a frame in use is going away.
        unsafe { self.0.release() };
    }
}

impl fmt::Debug for PageMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageMut({:p})", self.0.data())
    }
}

/// A shared, immutable page. Cloning adds a reference, never copies.
pub struct PageRef(Frame);

// SAFETY: shared handles only read the memory; the count is atomic. Exclusive access is given only
// to the owner of the last handle, after an acquire that pairs with the release of all others.
unsafe impl Send for PageRef {}
// SAFETY: as above.
unsafe impl Sync for PageRef {}

impl PageRef {
    /// True when this is the only reference. The acquire orders what follows after all that other
    /// holders did before they dropped theirs. Nobody else can make a new reference meanwhile,
    /// because that takes a borrow of an existing one, and the caller has the only one.
    #[inline]
    fn is_unique(&mut self) -> bool {
        // SAFETY: the page is in use, so its slab is live.
        unsafe { self.0.references() }.load(Ordering::Acquire) == 1
    }

    /// The bytes for writing when this is the only reference.
    #[inline]
    pub fn get_mut(&mut self) -> Option<&mut [u8]> {
        if !self.is_unique() {
            return None;
        }
        // SAFETY: the only reference, borrowed mutably for as long as the slice lives.
        Some(unsafe { std::slice::from_raw_parts_mut(self.0.data().as_ptr(), PAGE_BYTES) })
    }

    /// The page as a [`PageMut`] when this is the only reference.
    ///
    /// # Errors
    /// Gives the reference back when there are others.
    pub fn try_into_mut(mut self) -> Result<PageMut, Self> {
        if !self.is_unique() {
            return Err(self);
        }
        let frame = self.0;
        std::mem::forget(self);
        Ok(PageMut(frame))
    }

    /// True when both refer to the same memory.
    pub fn same_page(&self, other: &Self) -> bool {
        self.0 == other.0
    }

    /// How many references there are at this moment.
    pub fn reference_count(&self) -> u32 {
        // SAFETY: the page is in use, so its slab is live.
        unsafe { self.0.references() }.load(Ordering::Relaxed)
    }
}

impl Clone for PageRef {
    #[inline]
    fn clone(&self) -> Self {
        // SAFETY: the page is in use, so its slab is live. Relaxed is enough, as for `Arc`: the new
        // reference is made from one that exists.
        let before = unsafe { self.0.references() }.fetch_add(1, Ordering::Relaxed);
        if before > MAX_REFERENCES {
            // An overflow would free memory in use; as for `Arc`, there is no way to go on.
            std::process::abort();
        }
        Self(self.0)
    }
}

impl Drop for PageRef {
    #[inline]
    fn drop(&mut self) {
        if !self.is_unique() {
            // SAFETY: the page is in use, so its slab is live.
            if unsafe { self.0.references() }.fetch_sub(1, Ordering::Release) != 1 {
                return;
            }
            // Pairs with the release of every other holder.
            fence(Ordering::Acquire);
        }
        // SAFETY: this was the last reference.
        unsafe { self.0.release() };
    }
}

impl Deref for PageRef {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the frame's bytes are initialised and live, and nobody writes them while a shared
        // borrow of a reference exists (`get_mut` borrows the only reference mutably).
        unsafe { std::slice::from_raw_parts(self.0.data().as_ptr(), PAGE_BYTES) }
    }
}

impl fmt::Debug for PageRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageRef({:p}, {} references)", self.0.data(), self.reference_count())
    }
}
