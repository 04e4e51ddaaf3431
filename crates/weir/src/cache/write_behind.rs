//! Write-behind of one open handle.
//!
//! Whoever writes a long stream and makes it durable at the end should find most of it on the disk already. So a stream that is
//! long enough not to be short-lived ([`BEGIN_BYTES`]) is handed to background writeback as it goes, a portion
//! of [`PORTION_BYTES`] at a time, but for its newest bytes ([`TRAIL_BYTES`]): the next write may change the last page, and
//! a writer that goes back a little is still in memory. A write elsewhere begins a new stream.
//!
//! It also keeps memory turning: what is written is clean, and its frames can be used again.
//!
//! The policy is pure: the caller tells every write, and hands over what it is told.

use crate::format::BLOCK_BYTES_U64;
use std::ops::Range;

/// A stream shorter than this waits for the dirty limits, or a sync.
pub const BEGIN_BYTES: u64 = 32 << 20;
/// Handed over at a time.
pub const PORTION_BYTES: u64 = 4 << 20;
/// The end of the stream that is not handed over.
pub const TRAIL_BYTES: u64 = 1 << 20;

/// See the module's head.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WriteBehind {
    /// Byte after the last write.
    next_byte: u64,
    /// Where the stream began.
    begin_byte: u64,
    /// Everything of the stream before this page was handed over.
    handed_to_page: u64,
}

impl WriteBehind {
    /// Notes a write of `length_bytes` at `offset`, and says which pages to hand over.
    pub fn on_write(&mut self, offset: u64, length_bytes: u64) -> Option<Range<u64>> {
        if offset != self.next_byte {
            self.begin_byte = offset;
            self.handed_to_page = offset / BLOCK_BYTES_U64;
        }
        self.next_byte = offset.saturating_add(length_bytes);
        if self.next_byte - self.begin_byte < BEGIN_BYTES {
            return None;
        }
        let reached = (self.next_byte - TRAIL_BYTES) / BLOCK_BYTES_U64;
        if (reached - self.handed_to_page) * BLOCK_BYTES_U64 < PORTION_BYTES {
            return None;
        }
        let portion = self.handed_to_page..reached;
        self.handed_to_page = reached;
        Some(portion)
    }
}

const _: () = assert!(TRAIL_BYTES + PORTION_BYTES <= BEGIN_BYTES);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_long_stream_is_handed_over_once_in_order_and_never_its_end() {
        for step in [4096, 10_000, 1 << 20, 100 << 20] {
            let mut state = WriteBehind::default();
            let (mut at, mut handed_to, mut portions) = (12_345, 3, 0);
            while at < 300 << 20 {
                let portion = state.on_write(at, step);
                at += step;
                let Some(portion) = portion else { continue };
                assert!(at - 12_345 >= BEGIN_BYTES);
                assert_eq!(portion.start, handed_to, "nothing is left out or named twice");
                assert!((portion.end - portion.start) * 4096 >= PORTION_BYTES);
                assert!(portion.end * 4096 <= at - TRAIL_BYTES);
                handed_to = portion.end;
                portions += 1;
            }
            assert!(at - handed_to * 4096 < PORTION_BYTES + TRAIL_BYTES + 4096 && portions > 0);
        }
    }

    #[test]
    fn short_streams_and_scattered_writes_are_left_alone() {
        let mut state = WriteBehind::default();
        for number in 0..100_000_u64 {
            let place = number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 30;
            assert_eq!(state.on_write(place / 4096 * 4096, 4096), None);
        }
        for start in [0, 1 << 30] {
            let mut at = start;
            while at + 8192 < start + BEGIN_BYTES {
                assert_eq!(state.on_write(at, 8192), None);
                at += 8192;
            }
        }
    }

    proptest! {
        #[test]
        fn any_writes_are_handed_over_only_after_they_were_written(
            writes in prop::collection::vec((any::<bool>(), 0..u64::MAX, 0_u64..64 << 20), 1..60),
        ) {
            let mut state = WriteBehind::default();
            let mut end = 0_u64;
            for (goes_on, place, length) in writes {
                let at = if goes_on { end } else { place };
                let portion = state.on_write(at, length);
                end = at.saturating_add(length);
                if let Some(portion) = portion {
                    prop_assert!(portion.start < portion.end && portion.end * 4096 <= end);
                }
            }
        }
    }
}
