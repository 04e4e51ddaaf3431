//! Memory as the kernel's vectored calls want it: a list of segments, neighbours joined.
//!
//! Page frames of one write mostly lie side by side in memory. Joined, a request of 1 MiB is one segment instead of
//! 256, and the kernel pins a huge page at a time instead of a page.
//!
//! **Invariant:** a list names memory that was borrowed or owned as separate slices, in their order, and only the kernel looks
//! through it: no slice of ours ever spans two of them.

/// What is left of a request's buffers.
#[derive(Debug, Default)]
pub(super) struct Segments(Vec<libc::iovec>);

// SAFETY: the list is addresses and lengths, which nobody follows here. Whose memory they name is for the owner to see to, on
// whatever thread: it keeps the buffers, which are `Send`, beside the list.
unsafe impl Send for Segments {}

impl Segments {
    /// Memory that the kernel reads.
    pub(super) fn to_kernel<'a>(buffers: impl Iterator<Item = &'a [u8]>) -> Self {
        let mut segments = Self::default();
        for buffer in buffers {
            segments.push(buffer.as_ptr().cast_mut(), buffer.len());
        }
        segments
    }

    /// Memory that the kernel fills.
    pub(super) fn from_kernel<'a>(buffers: impl Iterator<Item = &'a mut [u8]>) -> Self {
        let mut segments = Self::default();
        for buffer in buffers {
            segments.push(buffer.as_mut_ptr(), buffer.len());
        }
        segments
    }

    fn push(&mut self, start: *mut u8, length: usize) {
        if length == 0 {
            return;
        }
        if let Some(last) = self.0.last_mut()
            && last.iov_base.addr() + last.iov_len == start.addr()
        {
            last.iov_len += length;
            return;
        }
        self.0.push(libc::iovec { iov_base: start.cast(), iov_len: length });
    }

    /// Takes the first `count` bytes off.
    pub(super) fn advance(&mut self, mut count: usize) {
        let whole = self.0.iter().take_while(|segment| {
            let done = segment.iov_len <= count;
            count -= if done { segment.iov_len } else { 0 };
            done
        });
        let whole = whole.count();
        self.0.drain(..whole);
        if let Some(first) = self.0.first_mut() {
            first.iov_base = first.iov_base.wrapping_byte_add(count);
            first.iov_len -= count;
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.0.iter().map(|segment| segment.iov_len as u64).sum()
    }

    /// Where the list lies, and how many of it one call takes.
    pub(super) fn as_raw(&self, most: usize) -> (*const libc::iovec, u32) {
        (self.0.as_ptr(), self.0.len().min(most) as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_joined_and_others_are_not() {
        let bytes = [0_u8; 64];
        let parts = [&bytes[..10], &bytes[10..30], &bytes[30..30], &bytes[40..64], &bytes[30..40]];
        let segments = Segments::to_kernel(parts.into_iter());
        let found: Vec<_> = segments
            .0
            .iter()
            .map(|segment| (segment.iov_base.addr() - bytes.as_ptr().addr(), segment.iov_len))
            .collect();
        assert_eq!(found, [(0, 30), (40, 24), (30, 10)]);
        assert_eq!(segments.bytes(), 64);
    }

    #[test]
    fn short_counts_leave_the_rest() {
        let bytes = [0_u8; 64];
        for done in 0..=62 {
            // Not side by side: 10, 30 and 22 bytes.
            let parts = [&bytes[..10], &bytes[11..41], &bytes[42..]];
            let mut left = Segments::to_kernel(parts.into_iter());
            left.advance(done);
            assert_eq!(left.bytes(), 62 - done as u64);
            let place = done + usize::from(done >= 10) + usize::from(done >= 40);
            let first = left.0.first().map(|first| first.iov_base.addr() - bytes.as_ptr().addr());
            assert_eq!(first, (done < 62).then_some(place));
        }
    }
}
