//! What travels in the log, and what goes straight home. Pure.
//!
//! An fsync has three ways to make a page durable:
//!
//! * **Log**: the page is payload of the frame. One write and one flush, however scattered the pages are; but
//!   the page is written a second time later, and until then occupies the ring.
//! * **Beside**: the page is written to a block of its own at the same time as the frame with its mapping, in one batch with those of all
//!   others who share the frame ([`crate::log::companion`]). Every byte is written once, and the frame is small; the mapping is made now, not
//!   in the background.
//! * **Home**: the page is written first, by the caller's thread; then a frame with the mapping. For what is too much for a frame.
//!
//! Counted for appends of 64 KiB (W: a small write, F: a flush, b: the time of 64 KiB at the disk's bandwidth):
//!
//! | | n callers at a time | bytes |
//! |---|---|---|
//! | Log | (W + n b + F) / n each, and n b again in the background | 2x |
//! | Home | (2 W + b + F) / n each, as long as n b fits | 1x |
//! | Beside | (W + n b + F) / n each | 1x |
//!
//! Beside is as fast as the log and writes half the bytes: what the log holds has to be brought home by somebody, on the same disk. So
//! new pages go beside, whatever else happens. The others of the same sync travel in the same frame.
//!
//! Pages that have a home among their neighbours of the file stay in the log: written in place later they neither fragment the file nor
//! tear, and a random write of many pages needs one write now instead of as many as there are pages. So do few new ones: a request of
//! their own costs more than it saves. Where new pages lie in the file does not matter: those of one sync are placed side by
//! side, and leave in one write.
//!
//! Pages whose home adjoins nothing of the file *move*: they go beside like new ones, and the blocks where they lived become free. No extent
//! is cut, and nobody has to write each of them home by itself later. What they leave are holes in the free space, which the next large file would
//! pay for; so they move while there is much free space and little of it is holes ([`has_room_to_move`]).
//!
//! **Untorn**: pages side by side in one unit go the same way, so that one operation holds all of them.
//!
//! **Invariant:** no extent is cut for what goes beside.
//!
//! The pieces of a batch of background writeback share runs of blocks on the same condition ([`batch_blocks`]).

use crate::alloc::SpaceTotals;
use crate::cache::map::UNTORN_PAGES;
use std::ops::Range;

/// Fewer new pages than this (16 KiB), of a sync, are not worth a request of their own, even at the same time as the frame.
pub const MIN_BESIDE_PAGES: u64 = 4;
/// Pages move only while this part of the volume is free: the blocks that they leave are not, before the next checkpoint ...
const LEAST_FREE_PART: u64 = 4;
/// ... and while no more than this part of the free space is holes: they leave more.
const MOST_SCATTERED_PART: u64 = 4;

/// Blocks for a batch of small pieces: a large request (1 MiB), and few that nobody has yet ...
const BATCH_BLOCKS: u64 = 256;
/// ... and no more than this part of what can be written now.
const BATCH_PART: u64 = 16;

/// Whether pages that have a home may get another.
pub fn has_room_to_move(space: &SpaceTotals) -> bool {
    let scattered_blocks = space.free_blocks.saturating_sub(space.unscattered_blocks);
    space.free_blocks >= space.total_blocks / LEAST_FREE_PART
        && scattered_blocks <= space.free_blocks / MOST_SCATTERED_PART
}

/// How many blocks to take at a time for small pieces of many files that go home together; `None`: only what each needs, and holes are
/// as good.
pub fn batch_blocks(space: &SpaceTotals) -> Option<u64> {
    has_room_to_move(space).then(|| (space.room_blocks / BATCH_PART).min(BATCH_BLOCKS))
}

/// The `runs`, which are in order, each with the page before and the one behind it: what [`beside`] asks the homes of.
pub fn with_neighbours(runs: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut known_to = 0;
    let around = |run: &Range<u64>| {
        let range = run.start.saturating_sub(1).max(known_to)..run.end.saturating_add(1);
        known_to = range.end;
        range
    };
    runs.iter().map(around).collect()
}

/// Of the dirty `runs` of a sync, the ranges that are written beside the frame, at least `least` pages; the rest travels in the log. `home` is
/// the block that a page lives in, 0 if none. `may_move`: pages that have a home may get another.
pub fn beside(
    runs: &[Range<u64>],
    least: u64,
    may_move: bool,
    home: impl Fn(u64) -> u64,
) -> Vec<Range<u64>> {
    let adjoin = |page: u64| page > 0 && home(page - 1) != 0 && home(page - 1) + 1 == home(page);
    let mut chosen: Vec<Range<u64>> = Vec::with_capacity(runs.len());
    for run in runs {
        // Stretches of pages that go: cut between units only.
        let mut at = run.start;
        let mut goes_from = None;
        while at < run.end {
            let unit_end = ((at / UNTORN_PAGES + 1) * UNTORN_PAGES).min(run.end);
            let is_apart = || may_move && !adjoin(at) && !adjoin(unit_end);
            if !(at..unit_end).any(|page| home(page) != 0) || is_apart() {
                goes_from.get_or_insert(at);
            } else if let Some(from) = goes_from.take() {
                chosen.push(from..at);
            }
            at = unit_end;
        }
        chosen.extend(goes_from.map(|from| from..run.end));
    }
    if pages_of(&chosen) < least {
        chosen.clear();
    }
    chosen
}

fn pages_of(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: u64 = MIN_BESIDE_PAGES;

    const NOWHERE: fn(u64) -> u64 = |_| 0;

    /// All runs of up to 40 pages across a unit's border, with one run of mapped pages anywhere in them.
    #[test]
    fn what_goes_beside_is_new_whole_in_its_unit_and_large_enough() {
        for start in 20..36_u64 {
            for end in start + 1..start + 40 {
                for home_start in start..=end {
                    for home_end in [home_start, home_start + 1, home_start + 5, end] {
                        check(start..end, home_start..home_end.min(end).max(home_start));
                    }
                }
            }
        }
    }

    fn check(run: Range<u64>, mapped: Range<u64>) {
        let home = |page: u64| if mapped.contains(&page) { 1000 + page } else { 0 };
        let sent = beside(std::slice::from_ref(&run), LEAST, false, home);
        assert!(sent.iter().all(|range| run.start <= range.start && range.end <= run.end));
        is_untorn(&run, &sent);
        let is_sent = |page: u64| sent.iter().any(|range| range.contains(&page));
        assert!(!mapped.clone().any(is_sent), "mapped pages stay: {run:?} {mapped:?}");
        // All pages of units without a mapped one are sent, or so few are left that none is.
        let unit = |page: u64| {
            let first = page / UNTORN_PAGES * UNTORN_PAGES;
            first.max(run.start)..(first + UNTORN_PAGES).min(run.end)
        };
        let new: Vec<u64> =
            run.clone().filter(|&page| !unit(page).any(|page| mapped.contains(&page))).collect();
        let is_worth_it = new.len() as u64 >= LEAST;
        assert_eq!(sent.is_empty(), !is_worth_it, "{run:?} {mapped:?}");
        assert!(new.iter().all(|&page| is_sent(page) == is_worth_it), "{run:?} {mapped:?}");
    }

    fn is_untorn(run: &Range<u64>, sent: &[Range<u64>]) {
        let is_sent = |page: u64| sent.iter().any(|range| range.contains(&page));
        for page in run.start..run.end - 1 {
            if !(page + 1).is_multiple_of(UNTORN_PAGES) {
                assert_eq!(is_sent(page), is_sent(page + 1), "torn: {run:?} {sent:?}");
            }
        }
    }

    /// Extents of pages that live in these blocks.
    fn extents(home: impl Fn(u64) -> u64, pages: Range<u64>) -> usize {
        let begins = |&page: &u64| {
            home(page) != 0
                && (page == 0 || home(page - 1) == 0 || home(page - 1) + 1 != home(page))
        };
        pages.filter(begins).count()
    }

    /// All ways in which eight pages at a unit's border can be mapped: each not at all, behind the one before it, or elsewhere; and all
    /// runs among them.
    #[test]
    fn pages_move_whole_units_at_a_time_and_cut_no_extent() {
        const FIRST: u64 = UNTORN_PAGES - 4;
        const PAGES: u64 = 8;
        let mut moved = 0;
        for code in 0..3_u64.pow(PAGES as u32) {
            let mut homes = [0; PAGES as usize];
            for place in 0..PAGES as usize {
                homes[place] = match (code / 3_u64.pow(place as u32) % 3, place) {
                    (0, _) => 0,
                    (1, 1..) if homes[place - 1] != 0 => homes[place - 1] + 1,
                    _ => 100 * (place as u64 + 1),
                };
            }
            let home = |page: u64| match page.checked_sub(FIRST) {
                Some(place @ 0..PAGES) => homes[place as usize],
                _ => 0,
            };
            for (start, end) in
                (0..PAGES).flat_map(|from| (from + 1..=PAGES).map(move |to| (from, to)))
            {
                let run = FIRST + start..FIRST + end;
                let sent = beside(std::slice::from_ref(&run), 1, true, home);
                is_untorn(&run, &sent);
                let is_sent = |page: u64| sent.iter().any(|range| range.contains(&page));
                // Those that go are placed side by side, in order.
                let after = |page: u64| if is_sent(page) { 10_000 + page } else { home(page) };
                let all = FIRST..FIRST + PAGES;
                let new = run.clone().filter(|&page| home(page) == 0 && is_sent(page)).count();
                let (before, after) = (extents(home, all.clone()), extents(after, all));
                assert!(after <= before + new, "{homes:?} {run:?} {sent:?}");
                let has_moved = run.clone().any(|page| home(page) != 0 && is_sent(page));
                assert!(new > 0 || after <= before, "{homes:?} {run:?} {sent:?}");
                moved += usize::from(has_moved);
                // What may not move is sent only if it is new.
                let stays = beside(std::slice::from_ref(&run), 1, false, home);
                assert!(stays.iter().cloned().flatten().all(|page| home(page) == 0));
            }
        }
        assert!(moved > 1000, "{moved}");
    }

    #[test]
    fn a_page_moves_if_its_neighbours_in_the_file_live_elsewhere() {
        let apart = |page: u64| 2 * page + 100;
        let scattered: Vec<Range<u64>> = (0..16).map(|run| run * 7..run * 7 + 1).collect();
        assert_eq!(beside(&scattered, LEAST, true, apart), scattered);
        assert_eq!(beside(&scattered, LEAST, false, apart), vec![]);
        assert_eq!(beside(&scattered, LEAST, true, |page| page + 100), vec![]);
        assert_eq!(beside(&scattered[..3], LEAST, true, apart), vec![], "too few");
        // An extent that goes as a whole.
        let extent = |page: u64| if (8..12).contains(&page) { page + 50 } else { 0 };
        assert_eq!(beside(std::slice::from_ref(&(8..12)), LEAST, true, extent), vec![8..12]);
        assert_eq!(beside(std::slice::from_ref(&(8..11)), 1, true, extent), vec![]);
        assert_eq!(beside(std::slice::from_ref(&(9..12)), 1, true, extent), vec![]);
    }

    #[test]
    fn neighbours_are_asked_for_once_and_in_order() {
        let runs = [0..1, 2..3, 4..6, 9..10, u64::MAX - 1..u64::MAX];
        let asked = [0..2, 2..4, 4..7, 8..11, u64::MAX - 2..u64::MAX];
        assert_eq!(with_neighbours(&runs), asked);
        assert!(with_neighbours(&[]).is_empty());
    }

    #[test]
    fn pages_move_while_much_is_free_and_little_of_it_is_holes() {
        let space = |free_blocks, unscattered_blocks| SpaceTotals {
            total_blocks: 1000,
            free_blocks,
            unscattered_blocks,
            ..SpaceTotals::default()
        };
        assert!(has_room_to_move(&space(1000, 1000)));
        assert!(has_room_to_move(&space(400, 300)));
        assert!(!has_room_to_move(&space(400, 299)));
        assert!(has_room_to_move(&space(250, 250)));
        assert!(!has_room_to_move(&space(249, 249)));
        assert!(
            has_room_to_move(&space(250, 300)),
            "of groups that are not in memory less is known"
        );
    }

    #[test]
    fn a_batch_takes_a_small_part_of_plenty_at_a_time() {
        let space = |room_blocks, unscattered_blocks| SpaceTotals {
            total_blocks: 100_000,
            free_blocks: 50_000,
            unscattered_blocks,
            room_blocks,
            ..SpaceTotals::default()
        };
        assert_eq!(batch_blocks(&space(40_000, 50_000)), Some(256));
        assert_eq!(batch_blocks(&space(1600, 50_000)), Some(100));
        assert_eq!(batch_blocks(&space(5, 50_000)), Some(0));
        assert_eq!(batch_blocks(&space(40_000, 30_000)), None, "holes are to be filled");
    }

    #[test]
    fn scattered_new_pages_go_beside_together_or_not_at_all() {
        let runs = [0..8, 10..17, 64..128];
        assert_eq!(beside(&runs, LEAST, true, NOWHERE), runs);
        assert_eq!(
            beside(&runs, LEAST, false, |page| u64::from(page == 100)),
            vec![0..8, 10..17, 64..96]
        );
        let scattered: Vec<Range<u64>> = (0..16).map(|run| run * 100..run * 100 + 1).collect();
        assert_eq!(beside(&scattered, LEAST, true, NOWHERE), scattered);
        assert_eq!(beside(&scattered[..3], LEAST, true, NOWHERE), vec![]);
        assert_eq!(beside(&scattered[..3], 1, true, NOWHERE), scattered[..3]);
        assert_eq!(beside(&scattered, LEAST, false, |page| u64::from(page >= 300)), vec![]);
        assert_eq!(beside(&scattered, LEAST, false, |page| u64::from(page >= 400)), scattered[..4]);
        assert_eq!(beside(&scattered, LEAST, false, |_| 1), vec![]);
        assert!(beside(&[], 0, true, NOWHERE).is_empty());
    }
}
