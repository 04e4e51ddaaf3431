//! Memory is brought near before it is written: whoever writes what the processor's cache does not have waits for it once for every few
//! lines, since a copy does not ask for many of those that it writes.
//!
//! A prefetch says what will be written soon, waits for nothing, and changes nothing that a program can see.
//!
//! This module contains `unsafe`: the processor's instruction is one that takes an address.

/// What a processor fetches from memory at a time.
const LINE_BYTES: usize = 64;

/// Replaces bytes that are likely to be far away, such as those of a page.
pub fn overwrite_far(bytes: &mut [u8], with: &[u8]) {
    prefetch_bytes(bytes.as_ptr(), bytes.len());
    bytes.copy_from_slice(with);
}

/// Asks for the lines of the `length` bytes from `start` on.
#[inline]
pub fn prefetch_bytes(start: *const u8, length: usize) {
    let within = start.addr() % LINE_BYTES;
    for line in 0..(within + length).div_ceil(LINE_BYTES) {
        prefetch_line(start.wrapping_sub(within).wrapping_add(line * LINE_BYTES));
    }
}

/// Asks for the line that `address` is in. Where the processor has no such instruction, or none that we know of: nothing.
#[inline]
fn prefetch_line(address: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
        // SAFETY: a prefetch reads and writes nothing that a program can see, and no address makes it fault.
        unsafe { _mm_prefetch::<_MM_HINT_ET0>(address.cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = address;
}
