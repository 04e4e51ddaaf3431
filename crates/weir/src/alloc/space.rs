//! What can be handed out right now: the `used` bits of every group, and the search for runs.
//! No locks and no I/O: a search that needs a group that is not in memory says so.
//!
//! **Invariants:** a group's `free` is the number of its clear bits; no free run of a group is longer
//! than its `longest`; no bit below its `first`, and none from its `end` on, is clear. No group below `data_low` has a clear bit. No group
//! above `node_top` has room for a node. A group's `cells` are its clear cells (a quarter of its free blocks while it is
//! not in memory).
//!
//! Data must not scatter the last free blocks so that no node fits anywhere: when clear cells are few, data takes the free
//! blocks outside of them first, and then one cell after the other.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use super::account::Account;
use super::bitmap::{BITS, Bitmap, CELL_BITS, Search};
use super::policy::{self, AllocKind, Strategy};
use super::{Run, SpaceChange};
use crate::format::NODE_BLOCKS;
use crate::format::geometry::Geometry;

/// One group.
#[derive(Debug)]
struct Group {
    /// `None`: not in memory.
    used: Option<Bitmap>,
    free: u32,
    longest: u32,
    first: u32,
    end: u32,
    cells: u32,
}

/// What is wanted, in blocks of one group: `1 <= min <= want <= BITS`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wish {
    pub want: u32,
    pub min: u32,
    pub hint: Option<u64>,
    pub kind: AllocKind,
    /// Clear cells that data has to leave if there is another place.
    pub keep_cells: u64,
}

/// Outcome of one try to allocate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Here it is.
    Taken(Run),
    /// This group has to be loaded first.
    Load(u32),
    /// No run is long enough.
    NoSpace,
}

/// Bits of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    group: u32,
    bits: Range<u32>,
}

/// Finds bits of one group in a range.
type FindBits<'a> = dyn Fn(&Bitmap, Range<u32>) -> Option<Range<u32>> + 'a;

/// A search ends early with what was found, or with the group it needs.
enum Stop {
    Found(Place),
    Load(u32),
}

/// The group of a range of blocks that lies in one, and its bits there.
fn within_group(blocks: &Range<u64>) -> (u32, Range<u32>) {
    let group = Geometry::group_of(blocks.start);
    (group, bits_in_group(blocks, group))
}

/// The bits of those of `blocks` that are in `group`.
fn bits_in_group(blocks: &Range<u64>, group: u32) -> Range<u32> {
    let first = Geometry::group_start(group);
    let bit = |block: u64| block.saturating_sub(first).min(u64::from(BITS)) as u32;
    bit(blocks.start)..bit(blocks.end)
}

/// See the module's head.
#[derive(Debug)]
pub(super) struct Space {
    groups: Vec<Group>,
    pub account: Account,
    /// Space changes of the running transaction, in log order.
    pub changes: Vec<SpaceChange>,
    /// Blocks to free with the next checkpoint, though they were never recorded.
    pub quarantined: Vec<Run>,
    /// Where small requests are packed: blocks of one group.
    window: Option<Range<u64>>,
    /// Where the file of the last large request will go on growing.
    growing: Option<Range<u64>>,
    data_low: u32,
    node_top: u32,
    /// Sum over the groups.
    cells: u64,
    /// How many groups were looked at for the longest run.
    #[cfg(test)]
    looks: usize,
}

impl Space {
    /// A space of groups with these numbers of free blocks, none in memory yet.
    pub(super) fn new(free_by_group: impl Iterator<Item = u32>) -> Self {
        let group = |free| Group {
            used: None,
            free,
            longest: free,
            first: 0,
            end: BITS,
            cells: free / CELL_BITS,
        };
        let groups: Vec<Group> = free_by_group.map(group).collect();
        let cells = groups.iter().map(|group| u64::from(group.cells)).sum();
        let free = groups.iter().map(|group| u64::from(group.free)).sum();
        Self {
            account: Account::new(free),
            changes: Vec::new(),
            quarantined: Vec::new(),
            window: None,
            growing: None,
            data_low: 0,
            node_top: groups.len().saturating_sub(1) as u32,
            cells,
            groups,
            #[cfg(test)]
            looks: 0,
        }
    }

    fn group(&self, group: u32) -> &Group {
        &self.groups[group as usize]
    }

    /// Puts a group's bits into memory.
    pub(super) fn install(&mut self, group: u32, used: Bitmap) {
        let group = &mut self.groups[group as usize];
        debug_assert_eq!(group.free, used.count_clear());
        let cells = used.count_clear_cells(0..BITS);
        self.cells = self.cells - u64::from(group.cells) + u64::from(cells);
        group.cells = cells;
        group.used = Some(used);
    }

    /// Places that a node surely fits in.
    pub(super) fn cells(&self) -> u64 {
        self.cells
    }

    /// Whether what has to be kept for nodes does not find places for them.
    pub(super) fn is_scattered(&self, kept_blocks: u64) -> bool {
        self.cells < kept_blocks / NODE_BLOCKS
    }

    /// What can be promised if so much is kept.
    pub(super) fn room_blocks(&self, kept_blocks: u64) -> u64 {
        if self.is_scattered(kept_blocks) { 0 } else { self.account.room(kept_blocks) }
    }

    /// Whether every block of the run is in use; `None` if its group is not in memory.
    pub(super) fn is_used(&self, run: Run) -> Option<bool> {
        let used = self.group(run.group()).used.as_ref()?;
        Some(used.is_set(run.bits()))
    }

    /// Takes a run that fulfils `wish`.
    pub(super) fn allocate(&mut self, wish: Wish) -> Step {
        if u64::from(wish.min) > self.account.free() {
            return Step::NoSpace;
        }
        let strategy = Strategy::choose(wish.kind, wish.want);
        // A run of data breaks at most the cells that it touches.
        let breaks = u64::from(wish.want / CELL_BITS + 2);
        let is_tight = wish.keep_cells > 0 && self.cells < wish.keep_cells.saturating_add(breaks);
        if strategy != Strategy::Node && is_tight {
            return match self.find_scrap(wish) {
                Some(Stop::Found(place)) => Step::Taken(self.take(&place, Strategy::Small)),
                Some(Stop::Load(group)) => Step::Load(group),
                None => Step::NoSpace,
            };
        }
        let stop = match strategy {
            Strategy::Node => self.find_node(wish),
            Strategy::Small => self.at_hint(wish).or_else(|| self.find_small(wish)),
            Strategy::Large => self.at_hint(wish).or_else(|| self.find_large(wish)),
        };
        match stop.or_else(|| self.find_longest(wish)) {
            Some(Stop::Found(place)) => Step::Taken(self.take(&place, strategy)),
            Some(Stop::Load(group)) => Step::Load(group),
            None => Step::NoSpace,
        }
    }

    /// The continuation of a file.
    fn at_hint(&self, wish: Wish) -> Option<Stop> {
        let hint = wish.hint?;
        let group = u32::try_from(hint / u64::from(BITS)).ok()?;
        if self.groups.get(group as usize)?.free == 0 {
            return None;
        }
        let Some(used) = &self.group(group).used else { return Some(Stop::Load(group)) };
        let bit = Geometry::bit_of(hint);
        let end = used.next_set(bit..bit.saturating_add(wish.want).min(BITS));
        let blocks = policy::continuation(wish.want, wish.min, end - bit)?;
        Some(Stop::Found(Place { group, bits: bit..bit + blocks }))
    }

    /// The first run of the wanted length in the window, else in a new window: below the old one,
    /// right behind it, anywhere that is not in the way of a large file, anywhere.
    fn find_small(&mut self, wish: Wish) -> Option<Stop> {
        let want = wish.want;
        let all = self.all_groups();
        let growing = self.growing.clone();
        let growing = growing.as_ref();
        let stop = if let Some(window) = self.window.clone() {
            let (group, bits) = within_group(&window);
            let next = policy::window_around(bits.end.min(BITS - 1));
            let in_the_way = growing.is_some_and(|growing| growing.start == window.end);
            let behind = if in_the_way { 0..0 } else { bits.end..next.end };
            let inside = self.fit_in(group, bits.clone(), want, None);
            if inside.is_some() {
                return inside;
            }
            self.first_fit(all.start..group, want, growing)
                .or_else(|| self.fit_in(group, 0..bits.start, want, growing))
                .or_else(|| self.fit_in(group, behind, want, None))
        } else {
            None
        };
        let stop = stop
            .or_else(|| self.first_fit(all.clone(), want, growing))
            .or_else(|| growing.and_then(|_| self.first_fit(all, want, None)));
        if let Some(Stop::Found(place)) = &stop {
            let bits = policy::window_around(place.bits.start);
            let first = Geometry::group_start(place.group);
            self.window = Some(first + u64::from(bits.start)..first + u64::from(bits.end));
        }
        stop
    }

    /// The first run of the wanted length outside of the window, near the hint, else anywhere; else in the
    /// window too.
    fn find_large(&mut self, wish: Wish) -> Option<Stop> {
        let all = self.all_groups();
        let window = self.window.clone();
        let window = window.as_ref();
        let near = wish.hint.and_then(|hint| {
            let group = u32::try_from(hint / u64::from(BITS)).ok()?;
            (group < all.end).then_some((group, Geometry::bit_of(hint)))
        });
        let stop = near.and_then(|(group, bit)| {
            self.fit_in(group, bit..BITS, wish.want, window)
                .or_else(|| self.first_fit(group..all.end, wish.want, window))
        });
        stop.or_else(|| self.first_fit(all.clone(), wish.want, window))
            .or_else(|| window.and_then(|_| self.first_fit(all, wish.want, None)))
    }

    /// The highest run of the minimal length.
    fn find_node(&mut self, wish: Wish) -> Option<Stop> {
        for group in (0..=self.node_top).rev() {
            let state = &mut self.groups[group as usize];
            if state.longest < wish.min {
                continue;
            }
            let Some(used) = &state.used else { return Some(Stop::Load(group)) };
            match used.find_run_down(state.first..state.end, wish.want, wish.min) {
                Search::Found(bits) => {
                    if u64::from(wish.min) <= NODE_BLOCKS {
                        self.node_top = group;
                    }
                    return Some(Stop::Found(Place { group, bits }));
                }
                Search::Longest(bits) => state.longest = bits.len() as u32,
            }
        }
        None
    }

    /// For data when cells are few: free blocks outside of cells, else a cell.
    fn find_scrap(&self, wish: Wish) -> Option<Stop> {
        let search = |find: &FindBits<'_>| {
            self.all_groups().find_map(|group| {
                let state = self.group(group);
                if state.free == 0 {
                    return None;
                }
                let Some(used) = &state.used else { return Some(Stop::Load(group)) };
                let bits = find(used, state.first..state.end)?;
                (bits.len() as u32 >= wish.min).then_some(Stop::Found(Place { group, bits }))
            })
        };
        search(&|used, range| used.find_scrap(range, wish.want)).or_else(|| {
            search(&|used, range| {
                let cell = used.find_cell(range)?;
                Some(cell.start..cell.end.min(cell.start + wish.want))
            })
        })
    }

    /// The groups that may have free blocks.
    fn all_groups(&self) -> Range<u32> {
        self.data_low..self.groups.len() as u32
    }

    /// The first run of `want` blocks in `groups`, not touching `kept_out`.
    fn first_fit(
        &mut self,
        groups: Range<u32>,
        want: u32,
        kept_out: Option<&Range<u64>>,
    ) -> Option<Stop> {
        groups.into_iter().find_map(|group| self.fit_in(group, 0..BITS, want, kept_out))
    }

    /// The first run of `want` blocks in `range` of `group`, not touching `kept_out`.
    fn fit_in(
        &mut self,
        group: u32,
        range: Range<u32>,
        want: u32,
        kept_out: Option<&Range<u64>>,
    ) -> Option<Stop> {
        let state = &mut self.groups[group as usize];
        if state.longest < want {
            return None;
        }
        let Some(used) = &state.used else { return Some(Stop::Load(group)) };
        let hole = kept_out.map(|blocks| bits_in_group(blocks, group));
        let hole = hole.filter(|hole| !hole.is_empty());
        let whole = hole.is_none() && range.start <= state.first && range.end >= state.end;
        let range = range.start.max(state.first)..range.end.min(state.end);
        let mut longest = 0;
        for part in policy::around(range, hole.as_ref()) {
            match used.find_run(part, want) {
                Search::Found(bits) => return Some(Stop::Found(Place { group, bits })),
                Search::Longest(bits) => longest = longest.max(bits.len() as u32),
            }
        }
        if whole {
            state.longest = longest;
        }
        None
    }

    /// The longest run of all, if it has the minimal length. Each round makes one group's bound
    /// exact, and ends when the largest bound is.
    fn find_longest(&mut self, wish: Wish) -> Option<Stop> {
        let with_bound = |(index, group): (usize, &Group)| (group.longest, Reverse(index));
        // Of equals the first. Where its bound is exact, as it mostly is, the others need not be put in order.
        self.count_looks(self.groups.len());
        let mut next = self.groups.iter().enumerate().map(with_bound).max();
        let mut others: Option<BinaryHeap<(u32, Reverse<usize>)>> = None;
        while let Some((bound, Reverse(index))) = next {
            if bound < wish.min {
                return None;
            }
            self.count_looks(1);
            let (number, group) = (index as u32, &mut self.groups[index]);
            let Some(used) = &group.used else { return Some(Stop::Load(number)) };
            match used.find_run(group.first..group.end, wish.want) {
                Search::Found(bits) => return Some(Stop::Found(Place { group: number, bits })),
                Search::Longest(bits) if bits.len() as u32 == bound => {
                    return Some(Stop::Found(Place { group: number, bits }));
                }
                Search::Longest(bits) => group.longest = bits.len() as u32,
            }
            let again = with_bound((index, &self.groups[index]));
            let others = others.get_or_insert_with(|| {
                self.count_looks(self.groups.len());
                let all = self.groups.iter().enumerate();
                all.filter(|(other, _)| *other != index).map(with_bound).collect()
            });
            others.push(again);
            next = others.pop();
        }
        None
    }

    #[cfg(test)]
    fn count_looks(&mut self, groups: usize) {
        self.looks += groups;
    }

    #[cfg(not(test))]
    #[allow(clippy::unused_self, reason = "as in tests")]
    fn count_looks(&self, _: usize) {}

    fn take(&mut self, place: &Place, strategy: Strategy) -> Run {
        let Place { group, bits } = place;
        let changed = self.set_used(*group, bits.clone());
        debug_assert_eq!(changed as usize, bits.len(), "a run was handed out twice");
        let start = Geometry::group_start(*group) + u64::from(bits.start);
        let run = Run { start, blocks: bits.len() as u64 };
        if strategy == Strategy::Large {
            self.growing = Some(policy::growing_behind(run.end()));
        }
        run
    }

    /// Marks blocks used; how many were free. The group must be in memory.
    pub(super) fn set_used(&mut self, group: u32, bits: Range<u32>) -> u32 {
        let state = &mut self.groups[group as usize];
        let Some(used) = &mut state.used else { return 0 };
        let before = used.count_clear_cells(bits.clone());
        let changed = used.set(bits.clone());
        let broken = before - used.count_clear_cells(bits.clone());
        state.cells -= broken;
        self.cells -= u64::from(broken);
        state.free -= changed;
        if bits.start <= state.first {
            state.first = state.first.max(bits.end);
        }
        if bits.end >= state.end {
            state.end = state.end.min(bits.start);
        }
        state.longest = state.longest.min(state.free);
        self.account.take(u64::from(changed));
        while self.group(self.data_low).free == 0
            && (self.data_low as usize) + 1 < self.groups.len()
        {
            self.data_low += 1;
        }
        changed
    }

    /// Marks blocks free without counting them as such; how many were used. The group must be in memory.
    pub(super) fn clear_used(&mut self, group: u32, bits: Range<u32>) -> u32 {
        let state = &mut self.groups[group as usize];
        let Some(used) = &mut state.used else { return 0 };
        let before = used.count_clear_cells(bits.clone());
        let changed = used.clear(bits.clone());
        let gained = used.count_clear_cells(bits.clone()) - before;
        state.cells += gained;
        self.cells += u64::from(gained);
        state.free += changed;
        state.first = state.first.min(bits.start);
        state.end = state.end.max(bits.end);
        state.longest = state.longest.max(used.run_around(bits.start).len() as u32);
        self.data_low = self.data_low.min(group);
        self.node_top = self.node_top.max(group);
        changed
    }

    /// Checks the invariants of the module's head.
    #[cfg(test)]
    pub(super) fn check(&self) {
        let mut free = 0;
        assert_eq!(self.cells, self.groups.iter().map(|group| u64::from(group.cells)).sum::<u64>());
        for (number, group) in self.groups.iter().enumerate() {
            free += u64::from(group.free);
            assert!(group.free == 0 || number as u32 >= self.data_low);
            let Some(used) = &group.used else { continue };
            assert_eq!(group.free, used.count_clear());
            assert_eq!(group.cells, used.count_clear_cells(0..BITS));
            assert!(used.is_set(0..group.first));
            assert!(used.is_set(group.end..BITS));
            let Search::Longest(longest) = used.find_run(0..BITS, BITS + 1) else { unreachable!() };
            assert!(longest.len() as u32 <= group.longest);
            assert!((longest.len() as u64) < NODE_BLOCKS || number as u32 <= self.node_top);
        }
        assert_eq!(free, self.account.free());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A full volume just opened, whose groups have single free blocks: what each says of its longest run is how many it has.
    #[test]
    fn the_longest_run_is_found_without_looking_at_all_groups_for_each() {
        const GROUPS: u32 = 1000;
        let mut space = Space::new((0..GROUPS).map(|_| 10));
        for group in 0..GROUPS {
            let mut used = Bitmap::full();
            for bit in 0..10 {
                used.clear(bit * 100..bit * 100 + 1);
            }
            space.install(group, used);
        }
        let (hint, kind, keep_cells) = (None, AllocKind::Data, 0);
        let wish = Wish { want: 16, min: 1, hint, kind, keep_cells };
        for found in 0..3 {
            let Step::Taken(run) = space.allocate(wish) else { panic!("there is room") };
            assert_eq!((run.start, run.blocks), (found * 100, 1));
            space.check();
        }
        assert!(space.looks < 10 * GROUPS as usize, "{} looks", space.looks);
    }
}
