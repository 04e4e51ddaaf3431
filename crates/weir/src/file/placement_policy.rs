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
//! Pages that have a home stay in the log: written in place later they neither fragment the file nor tear, and a random
//! write of many pages needs one write now instead of as many as there are pages. So do few new ones: a request of their own
//! costs more than it saves. Where new pages lie in the file does not matter: those of one sync are placed side by side, and
//! leave in one write.
//!
//! **Untorn**: pages side by side in one unit go the same way, so that one operation holds all of them.

use crate::cache::map::UNTORN_PAGES;
use std::ops::Range;

/// Fewer new pages than this (16 KiB), of a sync, are not worth a request of their own, even at the same time as the frame.
pub const MIN_BESIDE_PAGES: u64 = 4;

/// Of the dirty `runs` of a sync, the ranges that are written beside the frame, at least `least` pages; the rest travels in the log. `has_home` says
/// whether a page lives in a block already.
pub fn beside(runs: &[Range<u64>], least: u64, has_home: impl Fn(u64) -> bool) -> Vec<Range<u64>> {
    let mut chosen: Vec<Range<u64>> = Vec::new();
    for run in runs {
        // Stretches of new pages: cut between units only.
        let mut at = run.start;
        let mut new_from = None;
        while at < run.end {
            let unit_end = ((at / UNTORN_PAGES + 1) * UNTORN_PAGES).min(run.end);
            let is_new = !(at..unit_end).any(&has_home);
            if is_new {
                new_from.get_or_insert(at);
            } else if let Some(from) = new_from.take() {
                chosen.push(from..at);
            }
            at = unit_end;
        }
        chosen.extend(new_from.map(|from| from..run.end));
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
        let sent = beside(std::slice::from_ref(&run), LEAST, |page| mapped.contains(&page));
        let is_sent = |page: u64| sent.iter().any(|range| range.contains(&page));
        assert!(sent.iter().all(|range| run.start <= range.start && range.end <= run.end));
        for page in run.clone() {
            assert!(!(is_sent(page) && mapped.contains(&page)), "mapped pages stay");
            let neighbour = page + 1;
            if run.contains(&neighbour) && !neighbour.is_multiple_of(UNTORN_PAGES) {
                assert_eq!(
                    is_sent(page),
                    is_sent(neighbour),
                    "a unit is not torn: {run:?} {mapped:?}"
                );
            }
        }
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

    #[test]
    fn scattered_new_pages_go_beside_together_or_not_at_all() {
        let runs = [0..8, 10..17, 64..128];
        assert_eq!(beside(&runs, LEAST, |_| false), runs);
        assert_eq!(beside(&runs, LEAST, |page| page == 100), vec![0..8, 10..17, 64..96]);
        let scattered: Vec<Range<u64>> = (0..16).map(|run| run * 100..run * 100 + 1).collect();
        assert_eq!(beside(&scattered, LEAST, |_| false), scattered);
        assert_eq!(beside(&scattered[..3], LEAST, |_| false), vec![]);
        assert_eq!(beside(&scattered[..3], 1, |_| false), scattered[..3]);
        assert_eq!(beside(&scattered, LEAST, |page| page >= 300), vec![]);
        assert_eq!(beside(&scattered, LEAST, |page| page >= 400), scattered[..4]);
        assert_eq!(beside(&scattered, LEAST, |_| true), vec![]);
        assert!(beside(&[], 0, |_| false).is_empty());
    }
}
