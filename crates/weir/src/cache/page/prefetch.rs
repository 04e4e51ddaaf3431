//! Page frames are brought near before they are written: whoever writes a page that the processor's cache does not have waits for memory
//! once for every few lines, and the copy itself takes a fifteenth of that.
//!
//! This module contains `unsafe`: the processor's instruction is one that takes an address.

use super::PAGE_BYTES;

/// What a processor fetches from memory at a time.
const LINE_BYTES: usize = 64;

/// Replaces a page's bytes, whose old ones are likely to be far away.
pub fn overwrite_page(page: &mut [u8], with: &[u8]) {
    debug_assert_eq!(page.len(), PAGE_BYTES);
    page.chunks(LINE_BYTES).for_each(|line| prefetch_line(line.as_ptr()));
    page.copy_from_slice(with);
}

/// Asks for the bytes of the page that begins at `start`, and waits for nothing.
pub(super) fn prefetch_page(start: *const u8) {
    for line in 0..PAGE_BYTES / LINE_BYTES {
        prefetch_line(start.wrapping_add(line * LINE_BYTES));
    }
}

/// Asks for the line that `address` is in. Where the processor has no such instruction, or none that we know of: nothing.
#[inline]
pub(super) fn prefetch_line(address: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
        // SAFETY: a prefetch reads and writes nothing that a program can see, and no address makes it fault.
        unsafe { _mm_prefetch::<_MM_HINT_ET0>(address.cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = address;
}
