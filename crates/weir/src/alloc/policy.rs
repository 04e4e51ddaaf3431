//! Where blocks are taken from. Pure: no locks, no I/O.
//!
//! The aim is that files end up in few, long extents and free space stays in few, long runs:
//!
//! * A request that continues a file (its hint is free) is served at the hint.
//! * **Small** data (under 16 blocks, 64 KiB) is packed first-fit into a *window* of 512 blocks
//!   (2 MiB). Large requests go around the window, so small files never land in the way of a
//!   growing large one, nor the other way round. When the window has no room, a new one
//!   is opened: below it, if an older hole is there, else right behind it. The 64 MiB behind the last
//!   large request are left to the file that grows there, as long as there is another place.
//! * **Large** data takes the first run that holds all of it, in the hint's group from the hint on,
//!   else from the start of the volume. So holes that are too short are left to small files, and
//!   the volume fills from its start.
//! * **Nodes** are taken from the end of the volume downwards. Copy-on-write frees and takes nodes all the
//!   time; at their own end they refill their own holes.
//! * When no run is long enough, the longest is split off, if it has at least the minimum.
//!
//! Groups carry an upper bound of their longest free run, so that full and fragmented groups are
//! passed over without looking at their bits.

use std::ops::Range;

use super::bitmap::BITS;
use crate::format::geometry::Geometry;

/// Requests below this are small.
pub const SMALL_BLOCKS: u32 = 16;
/// Size and alignment of the window for small requests.
pub const WINDOW_BLOCKS: u32 = 512;
/// What is left to a growing large file.
pub const GROWTH_BLOCKS: u64 = 16_384;

/// What the blocks are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AllocKind {
    /// Contents of a file.
    Data,
    /// Tree nodes.
    Node,
}

/// How a request is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strategy {
    /// Packed into the window.
    Small,
    /// First run that holds it all.
    Large,
    /// From the end of the volume downwards.
    Node,
}

impl Strategy {
    /// The strategy for `want` blocks of `kind`.
    pub fn choose(kind: AllocKind, want: u32) -> Self {
        match kind {
            AllocKind::Node => Self::Node,
            AllocKind::Data if want < SMALL_BLOCKS => Self::Small,
            AllocKind::Data => Self::Large,
        }
    }
}

/// How many of the `free_here` clear blocks from the hint on to take, if they are worth it: all that is
/// wanted, or for a large request at least so many that the split costs nothing worth mentioning. (A short
/// rest behind a file's end is better left to small files than made an extent of its own.)
pub fn continuation(want: u32, min: u32, free_here: u32) -> Option<u32> {
    let blocks = want.min(free_here);
    let enough = if blocks < want { min.max(SMALL_BLOCKS) } else { min };
    (blocks > 0 && blocks >= enough).then_some(blocks)
}

/// The window around `bit`.
pub fn window_around(bit: u32) -> Range<u32> {
    let start = bit / WINDOW_BLOCKS * WINDOW_BLOCKS;
    start..(start + WINDOW_BLOCKS).min(BITS)
}

/// Where a file whose last large run ended before `block` will go on growing: from the window that
/// `block` is in.
pub fn growing_behind(block: u64) -> Range<u64> {
    let start = block - u64::from(Geometry::bit_of(block) % WINDOW_BLOCKS);
    start..block + GROWTH_BLOCKS
}

/// `range` without `hole`: what is before and what is behind it.
pub fn around(range: Range<u32>, hole: Option<&Range<u32>>) -> [Range<u32>; 2] {
    match hole {
        Some(hole) if hole.start < range.end && hole.end > range.start => {
            [range.start..hole.start.max(range.start), hole.end.min(range.end)..range.end]
        }
        _ => [range.clone(), range.end..range.end],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn continuations_are_whole_or_worth_it() {
        for want in 1..40 {
            for min in 1..=want {
                for free in 0..60 {
                    let taken = continuation(want, min, free);
                    if free >= want {
                        assert_eq!(taken, Some(want));
                    } else if free >= min && free >= SMALL_BLOCKS {
                        assert_eq!(taken, Some(free));
                    } else {
                        assert_eq!(taken, None);
                    }
                }
            }
        }
    }

    #[test]
    fn windows_tile_the_group() {
        let mut next = 0;
        while next < BITS {
            let window = window_around(next);
            assert_eq!(window.start, next);
            assert_eq!(window_around(window.end - 1), window);
            next = window.end;
        }
        assert_eq!(next, BITS);
    }

    #[test]
    fn growth_is_protected_from_the_window_it_starts_in() {
        assert_eq!(growing_behind(1000), 512..1000 + GROWTH_BLOCKS);
        assert_eq!(growing_behind(1024), 1024..1024 + GROWTH_BLOCKS);
        let second = u64::from(BITS);
        assert_eq!(growing_behind(second + 3), second..second + 3 + GROWTH_BLOCKS);
    }

    #[test]
    fn going_around_a_hole_covers_exactly_the_rest() {
        for (start, end) in [(0, 20), (5, 10), (8, 8), (0, 4), (15, 20), (6, 9)] {
            let hole = 6..12;
            let parts = around(start..end, Some(&hole));
            let covered: Vec<u32> = parts.into_iter().flatten().collect();
            let expected: Vec<u32> = (start..end).filter(|bit| !hole.contains(bit)).collect();
            assert_eq!(covered, expected);
            let whole: Vec<u32> = around(start..end, None).into_iter().flatten().collect();
            assert_eq!(whole, (start..end).collect::<Vec<_>>());
        }
    }

    #[test]
    fn strategies_follow_kind_and_size() {
        assert_eq!(Strategy::choose(AllocKind::Data, 15), Strategy::Small);
        assert_eq!(Strategy::choose(AllocKind::Data, 16), Strategy::Large);
        assert_eq!(Strategy::choose(AllocKind::Node, 4), Strategy::Node);
        assert_eq!(Strategy::choose(AllocKind::Node, 400), Strategy::Node);
    }
}
