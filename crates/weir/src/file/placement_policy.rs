//! What travels in the log, and what goes straight home before it. Pure.
//!
//! An fsync has three ways to make a page durable:
//!
//! * **Log**: the page is payload of the frame. One write and one flush, however scattered the pages are; but
//!   the page is written a second time later, and until then occupies the ring.
//! * **Home**: the page is written to a block of its own first, by the caller's thread, in parallel with
//!   other callers; then a frame with the mapping. One write more before the flush, but every byte is written once, and
//!   the frame is small.
//! * **Beside**: as home, but the page and the frame with its mapping are written at the same time, by one caller who has the writer's role
//!   meanwhile ([`crate::log::lead`]).
//!
//! Counted for an append of 64 KiB (W: a small write, F: a flush, b: the time of 64 KiB at the disk's bandwidth):
//!
//! | | alone | n callers at a time | bytes |
//! |---|---|---|---|
//! | Log | W + b + F | (W + n b + F) / n each, and n b again in the background | 2x |
//! | Home | 2 W + b + F | (2 W + b + F) / n each, as long as n b fits | 1x |
//! | Beside | W + b + F | (W + n b + F) each, one after the other | 1x |
//!
//! Alone, beside is as fast as the log and writes half the bytes: what the log holds has to be brought home by somebody, on the same disk. It asks for
//! pages that are all new, since others are better logged, and for the writer's role, so it is for few callers. With several
//! callers the frames' bytes queue up behind one another in the log, twice the bytes fill the disk, and the ring fills until a
//! checkpoint has to empty it. From about [`CROWD`] other callers on home is faster; and it is always right when
//! the ring fills faster than it is emptied.
//!
//! Pages that have a home stay in the log: written in place later they neither fragment the file nor tear, and a random
//! write of many pages needs one write now instead of as many as there are pages. So do few new ones: a write of their own
//! costs more than it saves. Where new pages lie in the file does not matter: those of one sync are placed side by side, and
//! leave in one write.
//!
//! **Untorn**: pages side by side in one unit go the same way, so that one operation holds all of them.

use crate::cache::map::UNTORN_PAGES;
use std::ops::Range;

/// Fewer new pages than this (32 KiB), of a sync, are not worth a write of their own.
pub const MIN_HOME_PAGES: u64 = 8;
/// Fewer than this (16 KiB) are not worth a request of their own, even at the same time as the frame.
pub const MIN_BESIDE_PAGES: u64 = 4;
/// So many others committing at the same time make a crowd.
pub const CROWD: u32 = 3;
/// From this fill of the part of the ring that operations may use, in percent, new pages leave room to those that need it.
pub const PRESSED_PERCENT: u64 = 65;

/// What else happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Situation {
    /// Callers that wait for the log now, besides this one.
    pub others: u32,
    /// How full the ring's part for operations is.
    pub log_percent: u64,
}

impl Situation {
    /// New pages should go home.
    pub fn prefers_home(self) -> bool {
        self.others >= CROWD || self.log_percent >= PRESSED_PERCENT
    }
}

/// Where the pages of a sync go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Way {
    /// Into the log.
    Log,
    /// These home first, and the rest into the log.
    HomeFirst(Vec<Range<u64>>),
    /// All of them home, beside the frame.
    Beside,
}

/// Where the dirty `runs` of a sync go. `beside_from`: so many pages at least go beside the frame; `None` if the caller may not
/// take a role of the log.
pub fn way(
    runs: &[Range<u64>],
    situation: Situation,
    beside_from: Option<u64>,
    has_home: impl Fn(u64) -> bool,
) -> Way {
    if situation.prefers_home() {
        let chosen = goes_home(runs, situation, has_home);
        return if chosen.is_empty() { Way::Log } else { Way::HomeFirst(chosen) };
    }
    let is_new = |run: &Range<u64>| !run.clone().any(&has_home);
    let is_worth_it = beside_from.is_some_and(|least| pages_of(runs) >= least);
    if is_worth_it && runs.iter().all(is_new) { Way::Beside } else { Way::Log }
}

/// Of the dirty `runs` of a sync, the ranges that go home before the rest is logged. `has_home` says whether a page lives
/// in a block already.
fn goes_home(
    runs: &[Range<u64>],
    situation: Situation,
    has_home: impl Fn(u64) -> bool,
) -> Vec<Range<u64>> {
    let mut chosen: Vec<Range<u64>> = Vec::new();
    if !situation.prefers_home() {
        return chosen;
    }
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
    if pages_of(&chosen) < MIN_HOME_PAGES {
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

    const QUIET: Situation = Situation { others: 0, log_percent: 0 };
    const CROWDED: Situation = Situation { others: CROWD, log_percent: 0 };

    #[test]
    fn a_lone_caller_logs_everything_until_the_ring_is_pressed() {
        for others in 0..8 {
            for log_percent in 0..=120 {
                let situation = Situation { others, log_percent };
                let sent = goes_home(std::slice::from_ref(&(0..16)), situation, |_| false);
                let expected = others >= CROWD || log_percent >= PRESSED_PERCENT;
                assert_eq!(!sent.is_empty(), expected, "{situation:?}");
            }
        }
    }

    /// All runs of up to 40 pages across a unit's border, with one run of mapped pages anywhere in them.
    #[test]
    fn what_goes_home_is_new_whole_in_its_unit_and_large_enough() {
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
        let runs = [run.clone()];
        assert!(goes_home(&runs, QUIET, |page| mapped.contains(&page)).is_empty());
        let sent = goes_home(&runs, CROWDED, |page| mapped.contains(&page));
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
        let is_worth_it = new.len() as u64 >= MIN_HOME_PAGES;
        assert_eq!(sent.is_empty(), !is_worth_it, "{run:?} {mapped:?}");
        assert!(new.iter().all(|&page| is_sent(page) == is_worth_it), "{run:?} {mapped:?}");
    }

    #[test]
    fn few_callers_write_new_pages_beside_the_frame_if_all_are_new_and_enough() {
        let scattered: Vec<Range<u64>> = (0..16).map(|run| run * 100..run * 100 + 1).collect();
        for others in 0..8 {
            for log_percent in [0, 49, 50, 90] {
                let situation = Situation { others, log_percent };
                let few = !situation.prefers_home();
                for may_lead in [false, true] {
                    let beside_from = may_lead.then_some(MIN_BESIDE_PAGES);
                    let way = |pages: usize, has_home: &dyn Fn(u64) -> bool| {
                        super::way(&scattered[..pages], situation, beside_from, has_home)
                    };
                    assert_eq!(way(16, &|_| false) == Way::Beside, few && may_lead);
                    assert_eq!(way(4, &|_| false) == Way::Beside, few && may_lead);
                    assert_ne!(way(16, &|page| page == 500), Way::Beside);
                    assert_eq!(way(3, &|_| false), Way::Log);
                    assert_eq!(way(16, &|_| true), Way::Log);
                    let home = matches!(way(16, &|_| false), Way::HomeFirst(_));
                    assert_eq!(home, !few);
                }
            }
        }
    }

    #[test]
    fn scattered_new_pages_go_home_together_or_not_at_all() {
        let runs = [0..8, 10..17, 64..128];
        assert_eq!(goes_home(&runs, CROWDED, |_| false), runs);
        assert_eq!(goes_home(&runs, CROWDED, |page| page == 100), vec![0..8, 10..17, 64..96]);
        let scattered: Vec<Range<u64>> = (0..16).map(|run| run * 100..run * 100 + 1).collect();
        assert_eq!(goes_home(&scattered, CROWDED, |_| false), scattered);
        assert_eq!(goes_home(&scattered[..7], CROWDED, |_| false), vec![]);
        assert_eq!(goes_home(&scattered, CROWDED, |page| page >= 700), vec![]);
        assert_eq!(goes_home(&scattered, CROWDED, |page| page >= 800), scattered[..8]);
        assert!(goes_home(&[], CROWDED, |_| false).is_empty());
    }
}
