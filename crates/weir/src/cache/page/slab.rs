//! Slabs and the frames in them: raw memory with reference counts, found again from a frame's address.
//!
//! A slab is 2 MiB, 2 MiB aligned and advised to be a huge page (not where somebody waits for one that is dear), or less when the
//! whole pool is smaller than that. Its first 4 KiB are the header (the owning pool and the reference counts), the rest are frames.
//!
//! **Invariant:** all bytes of a frame are initialised memory at all times.
//!
//! The reference counts are `std` atomics on purpose: like those of `Arc`, they are not a scheduling point of the `shuttle` build, and
//! live in memory that starts as zero bytes.
//!
//! This module contains `unsafe`: it owns the memory, and computes addresses in it.

use super::PAGE_BYTES;
use super::pool::Inner;
use crate::prefetch::prefetch_bytes;
use crate::sync::{Arc, SchedulingClass, in_class};
use std::alloc::Layout;
use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Size and alignment of a full slab: a huge page of the processors we care about.
const SLAB_BYTES: usize = 2 << 20;
/// Frames of a full slab; the header takes the place of one.
pub(super) const SLAB_FRAMES: usize = SLAB_BYTES / PAGE_BYTES - 1;

/// By all pools.
static SLABS_MADE: AtomicU64 = AtomicU64::new(0);

/// First bytes of a slab. Zero bytes are valid counts, so only what comes before them is ever written, when the slab is made.
#[repr(C)]
struct SlabHeader {
    pool: *const Inner,
    /// Slabs made before this one, by anybody.
    sequence: u64,
    /// References of frame `i + 1`. Meaningful only while the frame is in use.
    references: [AtomicU32; SLAB_FRAMES],
}

const _: () = assert!(size_of::<SlabHeader>() <= PAGE_BYTES);
// The frame's number must fit into the offset within a page.
const _: () = assert!(SLAB_FRAMES < PAGE_BYTES);

/// Names a frame: points `number` bytes into the frame's memory, where `number` (1 to
/// [`SLAB_FRAMES`]) is its place in the slab. One word gives data, header and count.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Frame(pub(super) NonNull<u8>);

impl Frame {
    /// # Safety
    /// `slab` is the start of a live slab of more than `number` frames, `number` is at least 1.
    pub(super) unsafe fn new(slab: NonNull<u8>, number: usize) -> Self {
        debug_assert!((1..=SLAB_FRAMES).contains(&number));
        // SAFETY: the frame is inside of the slab (caller), and `number` is less than a page.
        Self(unsafe { slab.add(number * PAGE_BYTES + number) })
    }

    fn number(self) -> usize {
        self.0.addr().get() & (PAGE_BYTES - 1)
    }

    #[inline]
    pub(super) fn data(self) -> NonNull<u8> {
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
    pub(super) unsafe fn references<'a>(self) -> &'a AtomicU32 {
        // SAFETY: the caller's promise is the same.
        unsafe { &self.header().references[self.number() - 1] }
    }

    /// Where the frame lies: those side by side in one slab follow one another, and what was made later comes behind. Unlike its address, this is
    /// the same whenever the same is done.
    ///
    /// # Safety
    /// As [`Frame::header`].
    pub(super) unsafe fn place(self) -> u64 {
        // SAFETY: the caller's promise is the same.
        let sequence = unsafe { self.header() }.sequence;
        sequence * (SLAB_FRAMES as u64 + 1) + self.number() as u64
    }

    /// Asks for the frame's bytes and its count to be brought near.
    pub(super) fn prefetch(self) {
        let start = self.data().as_ptr();
        let header = start.wrapping_sub(self.number() * PAGE_BYTES);
        let count =
            offset_of!(SlabHeader, references) + (self.number() - 1) * size_of::<AtomicU32>();
        prefetch_bytes(header.wrapping_add(count), size_of::<AtomicU32>());
        prefetch_bytes(start, PAGE_BYTES);
    }

    /// Returns the frame to its pool.
    ///
    /// # Safety
    /// The frame is in use, and the caller is its only owner and gives it up.
    pub(super) unsafe fn release(self) {
        // SAFETY: a frame in use owns a strong count of its pool (`PagePool::take` made it with
        // `increment_strong_count`); the only owner of the frame turns it back into an `Arc`.
        let pool = unsafe { Arc::from_raw(self.header().pool) };
        pool.put(self);
    }
}

/// What a full slab is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Backing {
    /// One huge page: one fault, and requests of few segments.
    Huge,
    /// Ordinary pages, each of which the kernel finds when it is touched first.
    Ordinary,
}

/// A slab, owned by its pool's state.
pub(super) struct Slab {
    pub(super) start: NonNull<u8>,
    pub(super) frames: usize,
}

impl Slab {
    fn layout(frames: usize) -> Option<Layout> {
        let align = if frames == SLAB_FRAMES { SLAB_BYTES } else { PAGE_BYTES };
        Layout::from_size_align((frames + 1) * PAGE_BYTES, align).ok()
    }

    /// Zeroed memory for `frames` frames and the header; `backing` is that of a full slab. `None` when the system has none.
    pub(super) fn allocate(frames: usize, backing: Backing, pool: *const Inner) -> Option<Self> {
        Some(Self::begin(Self::map(frames, backing)?, frames, pool))
    }

    /// As [`Slab::allocate`], and the kernel has backed all of it; the calling thread, an ordinary one, is of `class` while it does. Not
    /// while the address space changes: its lock is everybody's.
    pub(super) fn allocate_populated(
        frames: usize,
        (backing, class): (Backing, SchedulingClass),
        pool: *const Inner,
    ) -> Option<Self> {
        let start = Self::map(frames, backing)?;
        // SAFETY: the allocation has room for the frames and the header, and nobody else knows it yet.
        in_class(class, || unsafe { system::populate(start, (frames + 1) * PAGE_BYTES) });
        Some(Self::begin(start, frames, pool))
    }

    /// Memory for `frames` frames and the header, zero, perhaps not backed yet.
    fn map(frames: usize, backing: Backing) -> Option<NonNull<u8>> {
        let layout = Self::layout(frames)?;
        if frames == SLAB_FRAMES {
            return system::allocate_aligned(layout, backing);
        }
        // SAFETY: the layout's size is not zero.
        NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })
    }

    /// Makes a slab of what [`Slab::map`] gave for so many frames.
    fn begin(start: NonNull<u8>, frames: usize, pool: *const Inner) -> Self {
        let sequence = SLABS_MADE.fetch_add(1, Ordering::Relaxed);
        let header = start.cast::<SlabHeader>().as_ptr();
        // SAFETY: the first page of the fresh allocation is ours alone and large and aligned
        // enough for the header, whose other fields are valid as zero bytes.
        unsafe {
            (&raw mut (*header).pool).write(pool);
            (&raw mut (*header).sequence).write(sequence);
        }
        Self { start, frames }
    }

    /// # Safety
    /// No frame of the slab is in use or will be handed out again.
    pub(super) unsafe fn free(&self) {
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
    /// long as that takes, and every large allocation of other threads would wait for it. By writing to it at once: a read
    /// would be a fault of its own, for a page of zeroes that all share.
    ///
    /// # Safety
    /// Nobody else uses the `size` bytes from `start` on, and they are zero.
    pub(super) unsafe fn populate(start: NonNull<u8>, size: usize) {
        for at in (0..size).step_by(super::PAGE_BYTES) {
            // SAFETY: within the memory, which is ours and holds nothing yet (caller).
            unsafe { start.as_ptr().add(at).write_volatile(0) };
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
