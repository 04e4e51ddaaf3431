//! Heap memory aligned to 4096 bytes, as `O_DIRECT` wants it.
//!
//! Invariants: `capacity` is a multiple of 4096 (0 for the empty buffer, which owns no memory),
//! `len <= capacity`, and **every** byte up to `capacity` is initialised. So growing within the
//! capacity needs no unsafe code, and slices never expose uninitialised memory.
//!
//! This module uses `unsafe`: stable Rust has no safe way to ask for an alignment larger than
//! that of a type, and a `Vec<[u8; 4096]>` of an aligned type would copy through the stack.

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Alignment of every [`AlignedBuf`], in bytes.
pub const ALIGNMENT_BYTES: usize = 4096;

/// A byte buffer whose memory starts at a multiple of 4096.
///
/// Like a `Vec<u8>`, running out of memory aborts the process.
pub struct AlignedBuf {
    start: NonNull<u8>,
    len: usize,
    capacity: usize,
}

// SAFETY: the buffer owns its memory exclusively, as `Vec<u8>` does; `u8` is Send.
unsafe impl Send for AlignedBuf {}
// SAFETY: a shared reference only gives out `&[u8]`.
unsafe impl Sync for AlignedBuf {}

/// The layout of a buffer of `capacity` bytes. Panics where `Vec` would: above `isize::MAX` bytes.
fn layout(capacity: usize) -> Layout {
    Layout::from_size_align(capacity, ALIGNMENT_BYTES)
        .unwrap_or_else(|_| panic!("buffer of {capacity} bytes exceeds the address space"))
}

/// `len` rounded up to the alignment.
fn round_up(len: usize) -> usize {
    len.checked_next_multiple_of(ALIGNMENT_BYTES)
        .unwrap_or_else(|| panic!("buffer of {len} bytes exceeds the address space"))
}

impl AlignedBuf {
    /// A buffer of length 0 that owns no memory.
    pub const fn new() -> Self {
        // Alignment for form's sake: a zero-length slice only needs a non-null pointer.
        Self { start: NonNull::dangling(), len: 0, capacity: 0 }
    }

    /// `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        let mut buffer = Self::with_capacity(len);
        buffer.len = len;
        buffer
    }

    /// An empty buffer that can grow to `capacity` bytes (rounded up to 4096) without moving.
    pub fn with_capacity(capacity: usize) -> Self {
        let capacity = round_up(capacity);
        if capacity == 0 {
            return Self::new();
        }
        let layout = layout(capacity);
        // SAFETY: the layout's size is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout));
        Self { start, len: 0, capacity }
    }

    /// A copy of `bytes`.
    pub fn from_slice(bytes: &[u8]) -> Self {
        let capacity = round_up(bytes.len());
        if capacity == 0 {
            return Self::new();
        }
        let layout = layout(capacity);
        // SAFETY: the layout's size is not zero.
        let start = unsafe { alloc(layout) };
        let start = NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout));
        // SAFETY: the allocation has `capacity >= bytes.len()` bytes, is new, so cannot overlap
        // `bytes`, and the two calls initialise all of it.
        unsafe {
            start.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            start.as_ptr().add(bytes.len()).write_bytes(0, capacity - bytes.len());
        }
        Self { start, len: bytes.len(), capacity }
    }

    /// Bytes the buffer can hold without moving.
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Makes the length 0 and keeps the memory.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Shortens to `len`; longer than the buffer does nothing.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Shortens to `len`, or lengthens to it with zero bytes.
    pub fn resize_zeroed(&mut self, len: usize) {
        let old = self.len;
        self.reserve_total(len);
        self.len = len;
        if len > old {
            // Bytes past the old end are initialised but may be left over from before.
            self[old..].fill(0);
        }
    }

    /// Appends `bytes`.
    pub fn extend_from_slice(&mut self, bytes: &[u8]) {
        let old = self.len;
        let len = old.saturating_add(bytes.len());
        self.reserve_total(len);
        self.len = len;
        self[old..].copy_from_slice(bytes);
    }

    /// Makes the capacity at least `len`, at least doubling it when it has to grow.
    fn reserve_total(&mut self, len: usize) {
        if len <= self.capacity {
            return;
        }
        let mut larger = Self::with_capacity(len.max(self.capacity.saturating_mul(2)));
        larger.len = self.len;
        larger.copy_from_slice(self);
        *self = larger;
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if self.capacity != 0 {
            // SAFETY: `start` came from the global allocator with exactly this layout.
            unsafe { dealloc(self.start.as_ptr(), layout(self.capacity)) }
        }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `len <= capacity` initialised bytes at `start`; for the empty buffer the length is 0.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for AlignedBuf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Default for AlignedBuf {
    fn default() -> Self {
        Self::new()
    }
}

impl Clone for AlignedBuf {
    fn clone(&self) -> Self {
        Self::from_slice(self)
    }
}

impl PartialEq for AlignedBuf {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for AlignedBuf {}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("AlignedBuf")
            .field("len", &self.len)
            .field("capacity", &self.capacity)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_and_zero() {
        for len in [1, 511, 4096, 4097, 1 << 20] {
            let buffer = AlignedBuf::zeroed(len);
            assert_eq!(buffer.len(), len);
            assert_eq!(buffer.as_ptr().align_offset(ALIGNMENT_BYTES), 0);
            assert!(buffer.iter().all(|&byte| byte == 0));
            assert_eq!(buffer.capacity() % ALIGNMENT_BYTES, 0);
        }
    }

    #[test]
    fn empty_buffers_own_nothing_and_can_grow() {
        let mut buffer = AlignedBuf::from_slice(&[]);
        assert!(buffer.is_empty() && buffer.clone().is_empty());
        assert_eq!(buffer.capacity(), 0);
        buffer.extend_from_slice(b"abc");
        assert_eq!(&buffer[..], b"abc");
        assert_eq!(buffer.as_ptr().align_offset(ALIGNMENT_BYTES), 0);
    }

    #[test]
    fn resizing_never_shows_old_bytes() {
        let mut buffer = AlignedBuf::from_slice(&[7; 5000]);
        buffer.truncate(10);
        buffer.resize_zeroed(6000);
        assert!(buffer[..10].iter().all(|&byte| byte == 7));
        assert!(buffer[10..].iter().all(|&byte| byte == 0));
        buffer.clear();
        buffer.resize_zeroed(20_000);
        assert!(buffer.iter().all(|&byte| byte == 0));
    }

    #[test]
    fn growing_keeps_content() {
        let mut buffer = AlignedBuf::new();
        let mut expected = Vec::new();
        for round in 0..100_u8 {
            let piece = vec![round; 37 * usize::from(round)];
            buffer.extend_from_slice(&piece);
            expected.extend_from_slice(&piece);
        }
        assert_eq!(&buffer[..], &expected[..]);
        assert_eq!(buffer, AlignedBuf::from_slice(&expected));
    }
}
