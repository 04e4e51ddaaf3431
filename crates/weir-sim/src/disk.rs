//! What a disk with a volatile cache may hold after a power cut.
//!
//! [`DiskState`] follows the [`Event`]s of a device: a durable image, and the writes that are pending
//! since. A *crash state* keeps, of every pending write, any subset of its 512-byte sectors. Where
//! pending writes overlap, each sector holds the durable content or that of any of the
//! writes; since every subset of sectors of every write is considered and later writes are applied over
//! earlier ones, the order in which a disk empties its cache adds no further states.

use std::sync::Arc;

use weir::device::IoClass;

use crate::image::{BlockRef, Image, SECTORS_PER_BLOCK};
use crate::rng::{Rng, mix};

/// What happened at the device, as far as it matters for what a crash leaves behind.
#[derive(Debug, Clone)]
pub enum Event {
    /// A write began: from now on any part of it may be on the medium.
    Write(Arc<Write>),
    /// The write was reported as completed: a flush from now on makes it durable.
    Complete(u64),
    /// The write is durable by itself (forced unit access, or no volatile cache).
    Durable(u64),
    /// A flush ended: everything completed before it began is durable.
    Flush {
        /// Writes that had completed when the flush began.
        covers: Vec<u64>,
    },
    /// A flush failed: some writes became durable, some were dropped from the cache.
    FlushFailed {
        /// Durable now.
        durable: Vec<u64>,
        /// Gone: reads give the content before them.
        dropped: Vec<u64>,
    },
    /// The medium changed by itself.
    Rot {
        /// Block number.
        block: u64,
        /// What it holds now.
        content: BlockRef,
    },
    /// The range's content was given up; it reads as zeros.
    Discard {
        /// First block.
        first_block: u64,
        /// Length.
        blocks: u64,
    },
    /// Nothing happened at the device, but the caller learnt that this ticket has ended.
    Ended(u32),
    /// The same: everything up to this operation of the log is durable, says the engine.
    DurableLsn(u64),
    /// Amid the calls of another operation, this one of those that overlap with it began.
    Began(usize),
    /// It has returned. Under the number after theirs: that other operation has.
    Returned(usize),
}

/// A write under way or in the disk's cache.
#[derive(Debug)]
pub struct Write {
    /// Number of the device call.
    pub id: u64,
    /// Where.
    pub first_block: u64,
    /// What.
    pub blocks: Vec<BlockRef>,
    /// How urgent the engine thought it was.
    pub class: IoClass,
}

impl Write {
    /// Sectors of the write.
    pub fn sectors(&self) -> usize {
        self.blocks.len() * SECTORS_PER_BLOCK
    }
}

/// What becomes of one pending write in a power cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Nothing of it reached the medium.
    Lost,
    /// All of it did.
    Survived,
    /// Its first sectors did.
    Prefix(usize),
    /// All but its first sectors did.
    Suffix(usize),
    /// Each sector by the toss of a coin with this seed.
    Scattered(u64),
}

impl Fate {
    /// The sectors of the write's block `index` that survive, as a bit mask.
    fn mask(self, index: usize) -> u8 {
        let first = index * SECTORS_PER_BLOCK;
        let below = |limit: usize| -> u8 {
            let kept = limit.saturating_sub(first).min(SECTORS_PER_BLOCK);
            ((1_u16 << kept) - 1) as u8
        };
        match self {
            Self::Lost => 0,
            Self::Survived => 0xFF,
            Self::Prefix(sectors) => below(sectors),
            Self::Suffix(sectors) => !below(sectors),
            Self::Scattered(seed) => mix(seed ^ mix(index as u64)) as u8,
        }
    }
}

/// One way a power cut may leave the disk: the fate of every pending write, oldest first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome(pub Vec<Fate>);

/// See the module's head.
#[derive(Debug, Clone)]
pub struct DiskState {
    durable: Image,
    pending: Vec<Pending>,
}

#[derive(Debug, Clone)]
struct Pending {
    write: Arc<Write>,
    completed: bool,
}

impl DiskState {
    /// A disk that holds `image`, with an empty cache.
    pub const fn new(image: Image) -> Self {
        Self { durable: image, pending: Vec::new() }
    }

    /// What is on the medium for certain.
    pub const fn durable(&self) -> &Image {
        &self.durable
    }

    /// Number of pending writes.
    pub fn pending_count(&self) -> usize {
        self.pending.len()
    }

    /// The pending writes, oldest first.
    pub fn pending(&self) -> impl Iterator<Item = &Arc<Write>> {
        self.pending.iter().map(|pending| &pending.write)
    }

    /// Writes in flight complete: the disk goes on though whoever gave the orders has died.
    pub fn complete_all(&mut self) {
        for pending in &mut self.pending {
            pending.completed = true;
        }
    }

    /// Numbers of the pending writes that have completed: what a flush would cover.
    pub fn completed(&self) -> Vec<u64> {
        self.pending.iter().filter(|entry| entry.completed).map(|entry| entry.write.id).collect()
    }

    /// Follows one event.
    pub fn apply(&mut self, event: &Event) {
        match event {
            Event::Write(write) => {
                self.pending.push(Pending { write: Arc::clone(write), completed: false });
            }
            Event::Complete(id) => {
                for pending in self.pending.iter_mut().filter(|entry| entry.write.id == *id) {
                    pending.completed = true;
                }
            }
            Event::Durable(id) => self.settle(|write| write.id == *id),
            Event::Flush { covers } => self.settle(|write| covers.contains(&write.id)),
            Event::FlushFailed { durable, dropped } => {
                self.settle(|write| durable.contains(&write.id));
                self.pending.retain(|entry| !dropped.contains(&entry.write.id));
            }
            Event::Rot { block, content } => self.durable.set_block(*block, Arc::clone(content)),
            Event::Ended(_) | Event::DurableLsn(_) | Event::Began(_) | Event::Returned(_) => {}
            Event::Discard { first_block, blocks } => {
                for index in *first_block..first_block + blocks {
                    self.durable.set_block(index, Arc::clone(crate::image::Block::zero()));
                }
            }
        }
    }

    /// Makes the chosen writes durable. Older pending writes of the same blocks are superseded: the
    /// disk cannot bring them back over what it has reported as durable.
    fn settle(&mut self, chosen: impl Fn(&Write) -> bool) {
        let pending = std::mem::take(&mut self.pending);
        let all = pending.iter().all(|entry| chosen(&entry.write));
        for (index, entry) in pending.iter().enumerate() {
            if chosen(&entry.write) {
                apply_write(&mut self.durable, &entry.write, Fate::Survived);
            } else if !all {
                let newer = pending.iter().skip(index + 1).filter(|newer| chosen(&newer.write));
                self.pending.extend(without_overlap(entry, newer));
            }
        }
    }

    /// The image that a power cut with this outcome leaves.
    pub fn image_after(&self, outcome: &Outcome) -> Image {
        let mut image = self.durable.clone();
        for (pending, fate) in self.pending.iter().zip(&outcome.0) {
            apply_write(&mut image, &pending.write, *fate);
        }
        image
    }

    /// The image that a reader sees while the disk is up: completed writes applied.
    pub fn view(&self) -> Image {
        let mut image = self.durable.clone();
        for pending in self.pending.iter().filter(|entry| entry.completed) {
            apply_write(&mut image, &pending.write, Fate::Survived);
        }
        image
    }

    /// Outcomes to try. With `newest_only`, only such where the newest write at least partly
    /// survives: without it the states are those of the moment before. Always holds the extremes (all
    /// lost, all survived, all but one, only one, each torn) and, for up to three pending writes, every
    /// combination of lost and survived; filled up with random ones to `budget` outcomes.
    pub fn outcomes(&self, newest_only: bool, budget: usize, rng: &mut Rng) -> Vec<Outcome> {
        let count = self.pending.len();
        let mut outcomes = Vec::new();
        if count == 0 {
            if !newest_only {
                outcomes.push(Outcome(Vec::new()));
            }
            return outcomes;
        }
        if count <= 3 {
            for bits in 0..1_u32 << count {
                let survives = |index: &usize| bits & (1 << index) != 0;
                let fates = (0..count)
                    .map(|index| if survives(&index) { Fate::Survived } else { Fate::Lost });
                outcomes.push(Outcome(fates.collect()));
            }
        } else {
            outcomes.push(Outcome(vec![Fate::Survived; count]));
            outcomes.push(Outcome(vec![Fate::Lost; count]));
            for index in (0..count).rev() {
                outcomes.push(self.with_one(Fate::Survived, index, Fate::Lost));
                outcomes.push(self.with_one(Fate::Lost, index, Fate::Survived));
            }
        }
        for index in (0..count).rev() {
            let torn = self.torn(index, rng);
            outcomes.push(self.with_one(Fate::Survived, index, torn));
            if count > 1 {
                let torn = self.torn(index, rng);
                outcomes.push(self.with_one(Fate::Lost, index, torn));
            }
        }
        if newest_only {
            outcomes.retain(|outcome| outcome.0.last().is_some_and(|fate| *fate != Fate::Lost));
        }
        // The extremes come first; what lies in between is sampled when there is too much of it.
        while outcomes.len() > budget.max(2) {
            let victim = 2 + rng.index(outcomes.len() - 2);
            outcomes.swap_remove(victim);
        }
        let room = budget.saturating_sub(outcomes.len());
        let single_block = count == 1 && self.pending[0].write.blocks.len() == 1;
        for _ in 0..if single_block { room.min(2) } else { room } {
            outcomes.push(self.random_outcome(newest_only, rng));
        }
        outcomes
    }

    fn with_one(&self, others: Fate, index: usize, fate: Fate) -> Outcome {
        let mut fates = vec![others; self.pending.len()];
        fates[index] = fate;
        Outcome(fates)
    }

    fn torn(&self, index: usize, rng: &mut Rng) -> Fate {
        let sectors = self.pending[index].write.sectors();
        let cut = 1 + rng.index(sectors.saturating_sub(1).max(1));
        match rng.below(4) {
            0 => Fate::Suffix(cut),
            1 => Fate::Scattered(rng.next_u64()),
            _ => Fate::Prefix(cut),
        }
    }

    fn random_outcome(&self, newest_only: bool, rng: &mut Rng) -> Outcome {
        let count = self.pending.len();
        // Some power cuts lose little, some much.
        let survive_of_eight = 1 + rng.below(7);
        let fates = (0..count).map(|index| {
            let newest = newest_only && index + 1 == count;
            if rng.one_in(4) {
                self.torn(index, rng)
            } else if newest || rng.below(8) < survive_of_eight {
                Fate::Survived
            } else {
                Fate::Lost
            }
        });
        Outcome(fates.collect())
    }

    /// The outcome in words, one line per pending write.
    pub fn describe(&self, outcome: &Outcome) -> Vec<String> {
        let line = |(pending, fate): (&Pending, &Fate)| {
            let write = &pending.write;
            let state = if pending.completed { "completed" } else { "in flight" };
            format!(
                "write of call {} ({:?}, blocks {}..{}, {state}): {fate:?}",
                write.id,
                write.class,
                write.first_block,
                write.first_block + write.blocks.len() as u64,
            )
        };
        self.pending.iter().zip(&outcome.0).map(line).collect()
    }
}

fn apply_write(image: &mut Image, write: &Write, fate: Fate) {
    if fate == Fate::Lost {
        return;
    }
    for (index, block) in write.blocks.iter().enumerate() {
        image.set_sectors(write.first_block + index as u64, block, fate.mask(index));
    }
}

/// What is left of a pending write beside newer durable ones: runs of blocks that none of them covers.
fn without_overlap<'a>(entry: &Pending, newer: impl Iterator<Item = &'a Pending>) -> Vec<Pending> {
    let covered: Vec<(u64, u64)> = newer
        .map(|pending| {
            let write = &pending.write;
            (write.first_block, write.first_block + write.blocks.len() as u64)
        })
        .collect();
    let write = &entry.write;
    let is_covered =
        |block: u64| covered.iter().any(|(start, end)| (*start..*end).contains(&block));
    let blocks = write.first_block..write.first_block + write.blocks.len() as u64;
    if !blocks.clone().any(is_covered) {
        return vec![entry.clone()];
    }
    blocks
        .filter(|block| !is_covered(*block))
        .map(|block| Pending {
            write: Arc::new(Write {
                id: write.id,
                first_block: block,
                blocks: vec![Arc::clone(&write.blocks[(block - write.first_block) as usize])],
                class: write.class,
            }),
            completed: entry.completed,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::{BLOCK_BYTES, Block};

    fn write(id: u64, first_block: u64, fills: &[u8]) -> Event {
        let blocks = fills.iter().map(|fill| Block::new(&[*fill; BLOCK_BYTES])).collect();
        Event::Write(Arc::new(Write { id, first_block, blocks, class: IoClass::Log }))
    }

    fn disk(events: &[Event]) -> DiskState {
        let mut disk = DiskState::new(Image::zeroed(16));
        for event in events {
            disk.apply(event);
        }
        disk
    }

    fn first_bytes(image: &Image, blocks: std::ops::Range<u64>) -> Vec<u8> {
        blocks.map(|block| image.block(block).bytes()[0]).collect()
    }

    #[test]
    fn a_flush_makes_exactly_the_writes_it_covers_durable() {
        let mut disk = disk(&[write(1, 0, &[1]), write(2, 1, &[2]), Event::Complete(1)]);
        assert_eq!(disk.completed(), [1]);
        disk.apply(&Event::Flush { covers: vec![1] });
        assert_eq!(first_bytes(disk.durable(), 0..2), [1, 0]);
        assert_eq!(disk.pending_count(), 1);
    }

    #[test]
    fn overlapping_writes_leave_any_version_of_each_block() {
        let disk = disk(&[write(1, 0, &[1, 1]), write(2, 1, &[2, 2])]);
        let mut rng = Rng::new(7);
        let mut seen: Vec<Vec<u8>> = disk
            .outcomes(false, 0, &mut rng)
            .iter()
            .map(|outcome| first_bytes(&disk.image_after(outcome), 0..3))
            .collect();
        seen.sort();
        seen.dedup();
        assert!(seen.len() <= 2, "the budget holds: {seen:?}");
        let mut all: Vec<Vec<u8>> = disk
            .outcomes(false, 64, &mut rng)
            .iter()
            .map(|outcome| first_bytes(&disk.image_after(outcome), 0..3))
            .collect();
        all.sort();
        all.dedup();
        for expected in [vec![0, 0, 0], vec![1, 1, 0], vec![0, 2, 2], vec![1, 2, 2]] {
            assert!(all.contains(&expected), "{expected:?} not in {all:?}");
        }
    }

    #[test]
    fn the_extremes_are_always_among_the_outcomes() {
        let events: Vec<Event> = (0..6).map(|id| write(id, id, &[id as u8 + 1])).collect();
        let disk = disk(&events);
        let outcomes = disk.outcomes(false, 1000, &mut Rng::new(3));
        let has = |fates: Vec<Fate>| outcomes.contains(&Outcome(fates));
        assert!(has(vec![Fate::Lost; 6]));
        assert!(has(vec![Fate::Survived; 6]));
        for index in 0..6 {
            let mut one = vec![Fate::Lost; 6];
            one[index] = Fate::Survived;
            assert!(has(one));
            let mut but_one = vec![Fate::Survived; 6];
            but_one[index] = Fate::Lost;
            assert!(has(but_one));
            let torn = |fate: &Fate| !matches!(fate, Fate::Lost | Fate::Survived);
            assert!(outcomes.iter().any(|outcome| torn(&outcome.0[index])));
        }
    }

    #[test]
    fn with_a_new_write_only_states_that_hold_some_of_it_are_tried() {
        let disk = disk(&[write(1, 0, &[1]), write(2, 1, &[2])]);
        let outcomes = disk.outcomes(true, 20, &mut Rng::new(3));
        assert!(outcomes.len() >= 4);
        assert!(outcomes.iter().all(|outcome| outcome.0[1] != Fate::Lost));
    }

    #[test]
    fn torn_fates_keep_the_sectors_they_name() {
        assert_eq!(Fate::Prefix(9).mask(0), 0xFF);
        assert_eq!(Fate::Prefix(9).mask(1), 0b0000_0001);
        assert_eq!(Fate::Suffix(3).mask(0), 0b1111_1000);
        assert_eq!(Fate::Suffix(3).mask(1), 0xFF);
        assert_eq!(Fate::Scattered(5).mask(2), Fate::Scattered(5).mask(2));
    }

    #[test]
    fn a_durable_write_supersedes_older_pending_ones() {
        let mut disk = disk(&[write(1, 0, &[1, 1, 1]), write(2, 1, &[2])]);
        disk.apply(&Event::Complete(2));
        disk.apply(&Event::Durable(2));
        let all = Outcome(vec![Fate::Survived; disk.pending_count()]);
        assert_eq!(first_bytes(&disk.image_after(&all), 0..3), [1, 2, 1]);
        assert_eq!(first_bytes(disk.durable(), 0..3), [0, 2, 0]);
    }

    #[test]
    fn writes_dropped_by_a_failed_flush_are_gone() {
        let mut disk = disk(&[write(1, 0, &[1]), write(2, 1, &[2]), write(3, 2, &[3])]);
        disk.apply(&Event::FlushFailed { durable: vec![1], dropped: vec![2] });
        assert_eq!(first_bytes(disk.durable(), 0..3), [1, 0, 0]);
        assert_eq!(disk.pending().map(|write| write.id).collect::<Vec<_>>(), [3]);
    }
}
