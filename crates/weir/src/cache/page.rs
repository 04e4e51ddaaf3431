//! Page frames: 4 KiB of aligned memory with a reference count, handed out by a bounded pool.
//!
//! A page starts as a [`PageMut`] (one owner, writable), is frozen into a [`PageRef`] (shared,
//! immutable) and returns to its pool when the last `PageRef` is dropped. A `PageRef` that is the
//! only one can be written again ([`PageRef::get_mut`]); one that writeback or a zero-copy reader
//! also holds cannot, so whoever wants to change it clones the page. Nobody ever waits for a page.
//!
//! Where the memory comes from: [`PagePool`] (`page/pool.rs`), in slabs (`page/slab.rs`) that a thread has the kernel back ahead of need
//! (`page/preparer.rs`).
//!
//! This module contains `unsafe`: frames are raw memory with a hand-made reference count.

mod pool;
mod preparer;
mod slab;
#[cfg(test)]
mod tests;

use crate::format::BLOCK_BYTES;
use slab::Frame;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{Ordering, fence};

pub use pool::{Growth, PagePool, PoolStats};

/// Size of a page: one block.
pub const PAGE_BYTES: usize = BLOCK_BYTES;
/// A count above this is a leak of references (`mem::forget` in a loop), not use.
const MAX_REFERENCES: u32 = u32::MAX / 2;

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

    /// Where the page lies in memory, in pages: those side by side follow one another. Pages of one pool come in the order in which their memory
    /// was made, so that it is the same in every run that does the same.
    pub fn place(&self) -> u64 {
        // SAFETY: the page is in use, so its slab is live.
        unsafe { self.0.place() }
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
