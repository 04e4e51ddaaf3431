//! Where blocks of a file live, in memory: a sync of scattered pages asks for each whether it has a home, which in deltas and tree is a
//! descent each.
//!
//! Kept by groups of [`GROUP_FILE_BLOCKS`] file blocks. Of a group that is here everything is known: what of it is mapped, and that the
//! rest is not. Who does not find a group looks all of it up and puts it here ([`KnownHomes::fill`]). Of a file that had nothing when this
//! began ([`KnownHomes::begin`]) all groups are here, until memory runs out: one that is not is empty.
//!
//! Of a block that is an extent of its own that is known too ([`MappedRun::is_own_extent`]): it can be mapped anew without looking at the extent, since
//! nothing of that stays.
//!
//! What writeback maps is taken over from it ([`KnownHomes::carry_over`]); everything else that changes the file's mapping, as cuts do, makes
//! what is known here void.
//!
//! **Invariant:** all that is here was looked up after `as_of`, or taken over since, and is right while that moment stands.
//! **Invariant:** [`HomesBudget`] has counted the memory of all files.

use crate::format::GROUP_BLOCKS;
use crate::format::geometry::MAX_GROUPS;
use crate::mutation::{self, Mutation};
use crate::number_map::NumberMap;
use crate::sync::Arc;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::txn::mapping_moments::MappingMoment;
use std::ops::Range;

/// File blocks of a group.
pub const GROUP_FILE_BLOCKS: u64 = 64;
/// Memory of a group besides its parts.
const GROUP_BYTES: usize = 64;

/// File blocks that are mapped to consecutive blocks of the volume, or unwritten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappedRun {
    /// First file block.
    pub file_block: u64,
    /// How many.
    pub blocks: u64,
    /// First block of the volume; 0: unwritten.
    pub block: u64,
    /// Surely one written block, and all of its extent. False says nothing.
    pub is_own_extent: bool,
}

impl MappedRun {
    /// File block after the last.
    pub fn end(&self) -> u64 {
        self.file_block + self.blocks
    }

    /// What of it lies in `range`.
    pub fn within(&self, range: &Range<u64>) -> Option<Self> {
        let (start, end) = (self.file_block.max(range.start), self.end().min(range.end));
        let skip = start.saturating_sub(self.file_block);
        (start < end).then(|| Self {
            file_block: start,
            blocks: end - start,
            block: if self.is_unwritten() { 0 } else { self.block + skip },
            // It has but one block: there is no smaller part.
            is_own_extent: self.is_own_extent,
        })
    }

    fn is_unwritten(&self) -> bool {
        self.block == 0
    }

    /// Each file block, and its block.
    pub fn by_block(&self) -> impl Iterator<Item = (u64, u64)> + use<> {
        let (block, step) = (self.block, u64::from(!self.is_unwritten()));
        (self.file_block..self.end()).zip(0..).map(move |(at, place)| (at, block + place * step))
    }
}

/// Whether the mapping can change meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    /// No: the caller holds the `map` lock.
    Map,
    /// Yes: what is asked for is a hint.
    Nothing,
}

/// The memory that what is known of all files takes.
#[derive(Debug)]
pub struct HomesBudget {
    used_bytes: AtomicUsize,
    most_bytes: usize,
}

impl HomesBudget {
    /// Nothing is used.
    pub fn new(most_bytes: usize) -> Self {
        Self { used_bytes: AtomicUsize::new(0), most_bytes }
    }

    /// Counts a change; true if that is too much.
    fn change(&self, from_bytes: usize, to_bytes: usize) -> bool {
        let used = if to_bytes >= from_bytes {
            let more = to_bytes - from_bytes;
            self.used_bytes.fetch_add(more, Ordering::AcqRel) + more
        } else {
            self.used_bytes.fetch_sub(from_bytes - to_bytes, Ordering::AcqRel);
            0
        };
        used > self.most_bytes
    }
}

/// What [`KnownHomes::look_up`] found.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct LookedUp {
    /// What is mapped, in the order of what was asked for.
    pub mapped: Vec<MappedRun>,
    /// Groups that are not known.
    pub missing: Vec<u64>,
}

/// A run within a group: its first block's place there, how many blocks, whether it is an extent of its own, and the first block of the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part(u64);

/// In the byte of the number of blocks.
const OWN_EXTENT: u64 = 1 << 7;

const _: () = assert!(MAX_GROUPS * GROUP_BLOCKS < 1 << 48 && GROUP_FILE_BLOCKS < OWN_EXTENT);

impl Part {
    fn new(base: u64, run: &MappedRun) -> Self {
        debug_assert!(run.file_block >= base && run.end() <= base + GROUP_FILE_BLOCKS);
        debug_assert!(!run.is_own_extent || run.blocks == 1 && !run.is_unwritten());
        let own = if run.is_own_extent { OWN_EXTENT } else { 0 };
        Self(run.block << 16 | (run.file_block - base) << 8 | own | run.blocks)
    }

    fn run(self, base: u64) -> MappedRun {
        MappedRun {
            file_block: base + (self.0 >> 8 & 0xff),
            blocks: self.0 & (OWN_EXTENT - 1),
            block: self.0 >> 16,
            is_own_extent: self.0 & OWN_EXTENT != 0,
        }
    }
}

/// Parts in order, none overlapping.
#[derive(Debug, Default)]
struct Group(Vec<Part>);

impl Group {
    fn bytes(&self) -> usize {
        GROUP_BYTES + self.0.capacity() * size_of::<Part>()
    }

    /// From now on `run` is mapped so, whatever it was before.
    fn map(&mut self, base: u64, run: &MappedRun) {
        let from = self.0.partition_point(|part| part.run(base).end() <= run.file_block);
        let to = self.0.partition_point(|part| part.run(base).file_block < run.end());
        let new = Part::new(base, run);
        if let [old] = self.0[from..to]
            && old.run(base).file_block == run.file_block
            && old.run(base).blocks == run.blocks
        {
            self.0[from] = new;
            return;
        }
        if from == to {
            self.0.insert(from, new);
            return;
        }
        let cut = &self.0[from..to];
        let left = cut.first().and_then(|first| first.run(base).within(&(base..run.file_block)));
        let right = cut.last().and_then(|last| last.run(base).within(&(run.end()..u64::MAX)));
        let new = left.iter().chain([run]).chain(&right).map(|run| Part::new(base, run));
        self.0.splice(from..to, new.collect::<Vec<_>>());
    }

    /// The extent of `file_block` may have grown.
    fn not_alone(&mut self, base: u64, file_block: u64) {
        let place = self.0.partition_point(|part| part.run(base).end() <= file_block);
        if let Some(part) = self.0.get_mut(place)
            && part.run(base).file_block == file_block
            && !mutation::active(Mutation::KeepOwnExtent)
        {
            part.0 &= !OWN_EXTENT;
        }
    }

    /// The part that a search looks at first.
    fn middle(&self) -> u64 {
        self.0.get(self.0.len() / 2).map_or(0, |part| part.0)
    }

    fn look_up(&self, base: u64, blocks: &Range<u64>, found: &mut Vec<MappedRun>) {
        let place = self.0.partition_point(|part| part.run(base).end() <= blocks.start);
        found.extend(self.0[place..].iter().map_while(|part| part.run(base).within(blocks)));
    }
}

/// See the module's head.
#[derive(Debug, Default)]
pub struct KnownHomes {
    as_of: Option<MappingMoment>,
    /// A group that is not here is empty.
    is_complete: bool,
    groups: NumberMap<Group>,
    bytes: usize,
    /// Who counts `bytes`, from the first on.
    budget: Option<Arc<HomesBudget>>,
}

impl KnownHomes {
    /// The groups that `ranges`, which are in order, lie in.
    pub fn groups_of_all(ranges: &[Range<u64>]) -> Vec<u64> {
        let mut all = Vec::with_capacity(ranges.len());
        all.extend(ranges.iter().flat_map(groups_of));
        all.dedup();
        all
    }

    /// What each of `ranges` is mapped to at `now`, as far as that is known. `None`: nothing is known of that moment.
    pub fn look_up(&self, now: MappingMoment, ranges: &[Range<u64>]) -> Option<LookedUp> {
        if self.as_of != Some(now) {
            return None;
        }
        // All of them first, and then their parts: most are in nobody's cache, and the processor waits for several at a time.
        let mut groups: Vec<(u64, &Range<u64>, Option<&Group>)> = Vec::with_capacity(ranges.len());
        for blocks in ranges {
            let numbers = groups_of(blocks);
            groups.extend(numbers.map(|number| (number, blocks, self.groups.get(&number))));
        }
        let middles = groups.iter().filter_map(|(_, _, group)| group.map(Group::middle));
        std::hint::black_box(middles.fold(0, |all, middle| all ^ middle));
        let mapped = Vec::with_capacity(ranges.len());
        let mut answer = LookedUp { mapped, missing: Vec::new() };
        for (number, blocks, group) in groups {
            if let Some(group) = group {
                group.look_up(blocks_of(number).start, blocks, &mut answer.mapped);
            } else if !self.is_complete && answer.missing.last() != Some(&number) {
                answer.missing.push(number);
            }
        }
        Some(answer)
    }

    /// The group `number` has exactly `runs`, as was looked up after `moment`.
    pub fn fill(
        &mut self,
        moment: MappingMoment,
        number: u64,
        runs: &[MappedRun],
        held: Held,
        budget: &Arc<HomesBudget>,
    ) {
        if self.as_of != Some(moment) {
            if self.is_complete && held == Held::Nothing {
                // Most likely the mapping is just being taken over from writeback: to lose all of it would be dear.
                return;
            }
            self.forget();
            self.as_of = Some(moment);
        }
        let base = blocks_of(number).start;
        let group = Group(runs.iter().map(|run| Part::new(base, run)).collect());
        let before = self.bytes;
        self.bytes += group.bytes();
        if let Some(old) = self.groups.insert(number, group) {
            self.bytes -= old.bytes();
        }
        self.count(before, budget);
    }

    /// Nothing of the file is mapped at `moment`.
    pub fn begin(&mut self, moment: MappingMoment) {
        self.forget();
        self.as_of = Some(moment);
        self.is_complete = true;
    }

    /// Between the two moments the file has got `runs`, in order, and nothing else of its mapping has changed: the caller has held its `map` lock. The
    /// extent before one that is no extent of its own may have been made longer by it.
    pub fn carry_over(
        &mut self,
        (before, after): (MappingMoment, MappingMoment),
        runs: impl Iterator<Item = MappedRun>,
        budget: &Arc<HomesBudget>,
    ) {
        if self.as_of != Some(before) {
            return;
        }
        self.as_of = Some(after);
        let bytes_before = self.bytes;
        for run in runs {
            if let Some(before) = run.file_block.checked_sub(1).filter(|_| !run.is_own_extent)
                && let Some(group) = self.groups.get_mut(&(before / GROUP_FILE_BLOCKS))
            {
                group.not_alone(blocks_of(before / GROUP_FILE_BLOCKS).start, before);
            }
            for number in groups_of(&(run.file_block..run.end())) {
                let blocks = blocks_of(number);
                if self.is_complete && !self.groups.contains_key(&number) {
                    self.groups.insert(number, Group::default());
                    self.bytes += GROUP_BYTES;
                }
                if let (Some(group), Some(run)) =
                    (self.groups.get_mut(&number), run.within(&blocks))
                {
                    let before = group.bytes();
                    group.map(blocks.start, &run);
                    self.bytes = self.bytes + group.bytes() - before;
                }
            }
        }
        self.count(bytes_before, budget);
    }

    /// Gives all memory back.
    pub fn forget(&mut self) {
        if let Some(budget) = &self.budget {
            budget.change(self.bytes, 0);
        }
        (self.as_of, self.is_complete, self.bytes) = (None, false, 0);
        self.groups = NumberMap::default();
    }

    /// Counts what has changed since it was `before` bytes; what is too much is forgotten.
    fn count(&mut self, before: usize, budget: &Arc<HomesBudget>) {
        if self.budget.is_none() {
            self.budget = Some(budget.clone());
        }
        if budget.change(before, self.bytes) {
            self.forget();
        }
    }
}

impl Drop for KnownHomes {
    fn drop(&mut self) {
        if let Some(budget) = &self.budget {
            budget.change(self.bytes, 0);
        }
    }
}

/// The file blocks of group `number`.
pub fn blocks_of(number: u64) -> Range<u64> {
    number * GROUP_FILE_BLOCKS..(number + 1) * GROUP_FILE_BLOCKS
}

/// The groups that `blocks` lie in.
fn groups_of(blocks: &Range<u64>) -> Range<u64> {
    if blocks.is_empty() {
        return 0..0;
    }
    blocks.start / GROUP_FILE_BLOCKS..(blocks.end - 1) / GROUP_FILE_BLOCKS + 1
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::format::Key;
    use crate::txn::mapping_moments::MappingMoments;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    const INODE: u64 = 3;

    fn budget(most_bytes: usize) -> Arc<HomesBudget> {
        Arc::new(HomesBudget::new(most_bytes))
    }

    /// A moment later than all before.
    fn later(moments: &MappingMoments) -> MappingMoment {
        moments.touch(Key::extent(INODE, 0));
        moments.moment(INODE)
    }

    fn by_block(runs: &[MappedRun]) -> Vec<(u64, u64)> {
        runs.iter().flat_map(MappedRun::by_block).collect()
    }

    /// A run that says nothing of its extent.
    fn run(file_block: u64, blocks: u64, block: u64) -> MappedRun {
        MappedRun { file_block, blocks, block, is_own_extent: false }
    }

    /// The truth: the block of each file block, and which are extents of their own.
    #[derive(Default)]
    struct Model {
        blocks: BTreeMap<u64, u64>,
        own: BTreeSet<u64>,
    }

    impl Model {
        fn map(&mut self, run: &MappedRun) {
            self.blocks.extend(run.by_block());
            self.own.retain(|file_block| !(run.file_block..run.end()).contains(file_block));
            if run.is_own_extent {
                self.own.insert(run.file_block);
            } else {
                // The extent before it may have become longer.
                self.own.remove(&run.file_block.wrapping_sub(1));
            }
        }

        fn cut(&mut self, cut: &Range<u64>) {
            self.blocks.retain(|file_block, _| !cut.contains(file_block));
            self.own.retain(|file_block| !cut.contains(file_block));
        }

        /// What is mapped of `range`, block by block.
        fn mapped_in(&self, range: &Range<u64>) -> Vec<(u64, u64)> {
            let mapped = self.blocks.range(range.clone());
            mapped.map(|(&file_block, &block)| (file_block, block)).collect()
        }

        /// The same as a group is looked up: in runs.
        fn group(&self, number: u64) -> Vec<MappedRun> {
            let mut runs: Vec<MappedRun> = Vec::new();
            for (file_block, block) in self.mapped_in(&blocks_of(number)) {
                let is_own_extent = self.own.contains(&file_block);
                match runs.last_mut() {
                    Some(run)
                        if run.end() == file_block
                            && block != 0
                            && !run.is_unwritten()
                            && !run.is_own_extent
                            && !is_own_extent
                            && run.block + run.blocks == block =>
                    {
                        run.blocks += 1;
                    }
                    _ => runs.push(MappedRun { is_own_extent, ..run(file_block, 1, block) }),
                }
            }
            runs
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        /// Writeback maps runs: file block, blocks, block; one of a block is an extent of its own if its block is even.
        Map(Vec<(u64, u64, u64)>),
        /// Something else changes the mapping: a cut.
        Cut(u64, u64),
        /// What is missing is looked up.
        Ask(u64, u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let block = prop_oneof![3 => 1..1_u64 << 40, 1 => Just(0)];
        let run = (0..300_u64, prop_oneof![Just(1), 1..90_u64], block);
        let step = prop_oneof![
            4 => prop::collection::vec(run, 1..4).prop_map(Step::Map),
            1 => (0..300_u64, 1..100_u64).prop_map(|(from, count)| Step::Cut(from, count)),
            4 => (0..400_u64, 0..80_u64).prop_map(|(from, count)| Step::Ask(from, count)),
        ];
        prop::collection::vec(step, 1..60)
    }

    proptest! {
        #[test]
        fn what_is_known_is_what_is_mapped(
            begins_empty in any::<bool>(),
            most_bytes in prop_oneof![Just(1 << 20), 0..3000_usize],
            steps in steps(),
        ) {
            let (moments, budget) = (MappingMoments::default(), budget(most_bytes));
            let mut model = Model::default();
            let mut known = KnownHomes::default();
            if begins_empty {
                known.begin(moments.moment(INODE));
            } else {
                model.map(&run(100, 80, 5000));
            }
            for step in steps {
                let before = moments.moment(INODE);
                match step {
                    Step::Map(runs) => {
                        let runs: Vec<MappedRun> = runs
                            .into_iter()
                            .map(|(file_block, blocks, block)| MappedRun {
                                is_own_extent: blocks == 1 && block != 0 && block % 2 == 0,
                                ..run(file_block, blocks, block)
                            })
                            .collect();
                        for run in &runs {
                            model.map(run);
                        }
                        known.carry_over((before, later(&moments)), runs.into_iter(), &budget);
                    }
                    Step::Cut(from, count) => {
                        model.cut(&(from..from + count));
                        later(&moments);
                    }
                    Step::Ask(from, count) => {
                        let range = from..from + count;
                        let asked = std::slice::from_ref(&range);
                        let missing = known.look_up(before, asked).map_or_else(
                            || KnownHomes::groups_of_all(asked),
                            |found| found.missing,
                        );
                        for number in missing {
                            let runs = model.group(number);
                            known.fill(before, number, &runs, Held::Map, &budget);
                        }
                        if most_bytes == 1 << 20 {
                            let found = known.look_up(before, asked);
                            prop_assert!(range.is_empty() || found.is_some_and(|it| it.missing.is_empty()));
                        }
                    }
                }
                // Whatever is answered is right.
                let now = moments.moment(INODE);
                for start in (0..450).step_by(7) {
                    let range = start..start + 9;
                    if let Some(found) = known.look_up(now, std::slice::from_ref(&range))
                        && found.missing.is_empty()
                    {
                        prop_assert_eq!(by_block(&found.mapped), model.mapped_in(&range));
                        let mut own = found.mapped.iter().filter(|run| run.is_own_extent);
                        prop_assert!(own.all(|run| run.blocks == 1 && model.own.contains(&run.file_block)));
                    }
                }
                let groups: usize = known.groups.values().map(Group::bytes).sum();
                prop_assert_eq!(known.bytes, groups);
                prop_assert_eq!(budget.used_bytes.load(Ordering::Relaxed), groups);
                prop_assert!(groups <= most_bytes);
            }
            drop(known);
            prop_assert_eq!(budget.used_bytes.load(Ordering::Relaxed), 0);
        }
    }

    #[test]
    fn a_file_that_had_nothing_is_known_without_a_look_until_something_else_changes_it() {
        let (moments, budget) = (MappingMoments::default(), budget(1 << 20));
        let mut known = KnownHomes::default();
        let born = moments.moment(INODE);
        known.begin(born);
        let run_of_three = run(1000, 3, 77);
        let now = later(&moments);
        known.carry_over((born, now), std::iter::once(run_of_three), &budget);
        let asked = [0..10, 1001..1002, 1 << 40..(1 << 40) + 1];
        let mapped = vec![run(1001, 1, 78)];
        assert_eq!(known.look_up(now, &asked), Some(LookedUp { mapped, missing: vec![] }));
        let cut = later(&moments);
        assert_eq!(known.look_up(cut, &asked), None);
        // A hint does not cost what whoever is at it is about to take over.
        known.fill(cut, 0, &[], Held::Nothing, &budget);
        assert!(known.look_up(now, &asked).is_some());
        known.fill(cut, 0, &[], Held::Map, &budget);
        let missing = vec![15, (1 << 40) / GROUP_FILE_BLOCKS];
        assert_eq!(known.look_up(cut, &asked), Some(LookedUp { mapped: vec![], missing }));
    }

    #[test]
    fn an_extent_of_its_own_is_one_until_what_follows_may_have_made_it_longer() {
        let (moments, budget) = (MappingMoments::default(), budget(1 << 20));
        let mut known = KnownHomes::default();
        let mut now = moments.moment(INODE);
        known.begin(now);
        let own =
            |file_block, block| MappedRun { is_own_extent: true, ..run(file_block, 1, block) };
        // Beside each other, and across the border of two groups.
        let steps: [(&[MappedRun], &[u64]); 5] = [
            (&[own(8, 500), own(63, 501)], &[8, 63]),
            (&[own(9, 600), own(64, 601)], &[8, 9, 63, 64]),
            (&[run(65, 20, 602)], &[8, 9, 63]),
            (&[run(64, 1, 700)], &[8, 9]),
            (&[own(64, 800), run(5, 4, 801)], &[9, 64]),
        ];
        for (runs, expected) in steps {
            let before = now;
            now = later(&moments);
            known.carry_over((before, now), runs.iter().copied(), &budget);
            let found = known.look_up(now, std::slice::from_ref(&(0..128))).unwrap_or_default();
            let own = found.mapped.iter().filter(|run| run.is_own_extent);
            assert_eq!(own.map(|run| run.file_block).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn one_file_has_to_make_do_with_what_others_leave() {
        let (moments, budget) = (MappingMoments::default(), budget(2 * (GROUP_BYTES + 8)));
        let moment = moments.moment(INODE);
        let run = |number: u64| run(blocks_of(number).start, 1, 9);
        let (mut one, mut other) = (KnownHomes::default(), KnownHomes::default());
        one.fill(moment, 1, &[run(1)], Held::Map, &budget);
        other.fill(moment, 1, &[run(1)], Held::Map, &budget);
        other.fill(moment, 2, &[run(2)], Held::Map, &budget);
        let nothing = other.look_up(moment, std::slice::from_ref(&blocks_of(1)));
        assert_eq!(nothing, None, "all of it was given up");
        let kept = one.look_up(moment, std::slice::from_ref(&blocks_of(1)));
        assert_eq!(kept, Some(LookedUp { mapped: vec![run(1)], missing: vec![] }));
    }
}
