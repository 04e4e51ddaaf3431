//! Proof of the log's unflushed tail: which of its frames describe data that really is on the
//! device. Pure but for the checksums of blocks, which the caller supplies.
//!
//! Every block named in the tail has expectations, in log order: it *must hold* some content
//! (`wrote`, `home`), or *anything goes* from here on (`payload` with this home, `free`). The log may end after
//! frame k when, for every block, the last expectation up to k holds.

use super::core::Lsn;
use crate::format::record::Record;
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, VecDeque};

/// Bits of an order that count records within a frame: a frame has fewer than 2^20 records.
const RECORD_BITS: u32 = 24;

/// A block must hold content with this checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Check {
    pub block: u64,
    order: u64,
    pub checksum: u32,
}

/// From this order on, anything goes for the blocks from `start` to before `end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Anything {
    start: u64,
    end: u64,
    order: u64,
}

/// The expectations of the frames that are not known to be durable, in log order.
#[derive(Debug, Default)]
pub(super) struct Expectations {
    checks: VecDeque<Check>,
    anything: VecDeque<Anything>,
    /// Frames that hold at least one entry above: (index, last LSN).
    frames: VecDeque<(u64, Lsn)>,
}

/// A record names a block that the volume does not have.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct OutsideVolume;

impl Expectations {
    /// Takes in what `record`, the `number`-th of frame `frame`, says about blocks.
    pub fn add(
        &mut self,
        record: &Record<'_>,
        frame: u64,
        number: u64,
        total_blocks: u64,
    ) -> Result<(), OutsideVolume> {
        let order = frame << RECORD_BITS | number;
        let inside = |block: u64, length: u64| match block.checked_add(length) {
            Some(end) if end <= total_blocks => Ok(end),
            _ => Err(OutsideVolume),
        };
        match *record {
            Record::Wrote { block, checksums } => {
                inside(block, checksums.len() as u64)?;
                let blocks = block..;
                let checks = blocks.zip(checksums.iter());
                self.checks.extend(checks.map(|(block, checksum)| Check {
                    block,
                    order,
                    checksum,
                }));
            }
            Record::Home { block, checksum, .. } => {
                inside(block, 1)?;
                self.checks.push_back(Check { block, order, checksum });
            }
            Record::Payload { home_block: start, .. } if start != 0 => {
                let end = inside(start, 1)?;
                self.anything.push_back(Anything { start, end, order });
            }
            Record::Free { block: start, length_blocks } => {
                let end = inside(start, u64::from(length_blocks))?;
                self.anything.push_back(Anything { start, end, order });
            }
            _ => {}
        }
        Ok(())
    }

    /// All records of frame `frame` were added.
    pub fn end_frame(&mut self, frame: u64, last_lsn: Lsn) {
        self.frames.push_back((frame, last_lsn));
    }

    /// Frames up to `durable` need no proof: forgets what they say.
    pub fn forget_durable(&mut self, durable: Lsn) {
        let mut first = None;
        while let Some(&(frame, last_lsn)) = self.frames.front() {
            if last_lsn > durable {
                break;
            }
            first = Some((frame + 1) << RECORD_BITS);
            self.frames.pop_front();
        }
        let Some(first) = first else { return };
        while self.checks.front().is_some_and(|check| check.order < first) {
            self.checks.pop_front();
        }
        while self.anything.front().is_some_and(|entry| entry.order < first) {
            self.anything.pop_front();
        }
    }

    /// The checks ordered by block, for reading the blocks once in order.
    pub fn sorted_checks(&mut self) -> &[Check] {
        let checks = self.checks.make_contiguous();
        checks.sort_unstable();
        checks
    }

    /// Given whether each of [`Expectations::sorted_checks`] holds: the ranges of frames, from
    /// the first to before the second, after none of which the log may end.
    pub fn forbidden(&mut self, holds: &[bool]) -> Vec<(u64, u64)> {
        let mut forbidden = Vec::new();
        self.anything.make_contiguous().sort_unstable();
        let mut entering = self.anything.iter().peekable();
        // A sweep over the blocks: which entries cover this one, and where they stop to.
        let mut covering = BTreeSet::new();
        let mut leaving = BinaryHeap::new();
        for (index, check) in self.checks.iter().enumerate() {
            if holds.get(index).copied().unwrap_or(false) {
                continue;
            }
            while let Some(entry) = entering.next_if(|entry| entry.start <= check.block) {
                covering.insert(entry.order);
                leaving.push(Reverse((entry.end, entry.order)));
            }
            while let Some(&Reverse((end, order))) = leaving.peek() {
                if end > check.block {
                    break;
                }
                covering.remove(&order);
                leaving.pop();
            }
            let after = covering.range(check.order + 1..).next().copied();
            let next = self.checks.get(index + 1).filter(|next| next.block == check.block);
            let until = match (after, next.map(|next| next.order)) {
                (Some(a), Some(b)) => a.min(b) >> RECORD_BITS,
                (Some(order), None) | (None, Some(order)) => order >> RECORD_BITS,
                (None, None) => u64::MAX,
            };
            forbidden.push((check.order >> RECORD_BITS, until));
        }
        forbidden
    }
}

/// How many of the `count` frames from `first` on the log keeps: the most such that it does not
/// end inside of a forbidden range, nor where `may_end` says no.
pub(super) fn cut(
    first: u64,
    count: usize,
    forbidden: &[(u64, u64)],
    may_end: impl Fn(usize) -> bool,
) -> usize {
    // Forbidden ranges that begin at, minus those that end at, each frame.
    let mut change = vec![0_i64; count + 1];
    for &(from, until) in forbidden {
        let index = |frame: u64| (frame.saturating_sub(first) as usize).min(count);
        change[index(from)] += 1;
        change[index(until)] -= 1;
    }
    let mut kept = 0;
    let mut depth = 0;
    for (index, step) in change.iter().take(count).enumerate() {
        depth += step;
        if depth == 0 && may_end(index) {
            kept = index + 1;
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::record::Checksums;
    use std::collections::BTreeMap;

    struct Random(u64);
    impl Random {
        fn below(&mut self, bound: u64) -> u64 {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) % bound
        }
    }

    #[derive(Clone, Copy)]
    enum Says {
        Holds(u64, u32),
        Anything(u64, u64),
    }

    /// The definition, word by word.
    fn cut_by_definition(frames: &[Vec<Says>], actual: &[u32], chains: &[bool]) -> usize {
        (0..=frames.len())
            .rev()
            .find(|&kept| {
                let mut last = BTreeMap::new();
                for says in frames[..kept].iter().flatten() {
                    match *says {
                        Says::Holds(block, checksum) => {
                            last.insert(block, Some(checksum));
                        }
                        Says::Anything(start, end) => {
                            last.extend((start..end).map(|block| (block, None)));
                        }
                    }
                }
                let holds = |(block, wanted): (&u64, &Option<u32>)| {
                    wanted.is_none_or(|wanted| actual[*block as usize] == wanted)
                };
                last.iter().all(holds) && (kept == 0 || !chains[kept - 1])
            })
            .unwrap_or(0)
    }

    #[test]
    fn the_sweep_cuts_where_the_definition_does() {
        const BLOCKS: u64 = 12;
        let mut seen = BTreeSet::new();
        for seed in 0..20_000 {
            let mut random = Random(seed);
            let actual: Vec<u32> = (0..BLOCKS).map(|_| random.below(2) as u32).collect();
            let count = random.below(7) as usize;
            let first = random.below(3);
            let mut expectations = Expectations::default();
            let mut frames = Vec::new();
            for frame in 0..count {
                let mut says = Vec::new();
                for number in 0..random.below(4) {
                    let block = random.below(BLOCKS);
                    let checksum = if random.below(4) == 0 {
                        1 - actual[block as usize]
                    } else {
                        actual[block as usize]
                    };
                    let (record, entry) = match random.below(4) {
                        0 => {
                            let length = random.below(BLOCKS - block + 1);
                            let record = Record::Free { block, length_blocks: length as u32 };
                            (record, Says::Anything(block, block + length))
                        }
                        1 => (
                            Record::Payload {
                                inode: 1,
                                file_block: 0,
                                home_block: block,
                                index: 0,
                                checksum: 0,
                            },
                            if block == 0 {
                                Says::Anything(0, 0)
                            } else {
                                Says::Anything(block, block + 1)
                            },
                        ),
                        2 => (
                            Record::Home { inode: 1, file_block: 0, block, checksum },
                            Says::Holds(block, checksum),
                        ),
                        _ => {
                            let sums = [checksum];
                            let record =
                                Record::Wrote { block, checksums: Checksums::Values(&sums) };
                            expectations
                                .add(&record, first + frame as u64, number, BLOCKS)
                                .unwrap();
                            says.push(Says::Holds(block, checksum));
                            continue;
                        }
                    };
                    expectations.add(&record, first + frame as u64, number, BLOCKS).unwrap();
                    says.push(entry);
                }
                expectations.end_frame(first + frame as u64, frame as u64 + 1);
                frames.push(says);
            }
            let chains: Vec<bool> = (0..count).map(|_| random.below(4) == 0).collect();
            let checks = expectations.sorted_checks();
            let holds: Vec<bool> =
                checks.iter().map(|check| actual[check.block as usize] == check.checksum).collect();
            let forbidden = expectations.forbidden(&holds);
            let kept = cut(first, count, &forbidden, |index| !chains[index]);
            assert_eq!(kept, cut_by_definition(&frames, &actual, &chains), "seed {seed}");
            seen.insert((count, kept));
        }
        assert!(seen.len() > 20, "the random logs are too much alike");
    }

    #[test]
    fn durable_frames_are_not_asked_about() {
        let mut expectations = Expectations::default();
        for frame in 0..4 {
            let sums = [0, 0];
            let record = Record::Wrote { block: frame, checksums: Checksums::Values(&sums) };
            expectations.add(&record, frame, 0, 10).unwrap();
            expectations.add(&Record::Free { block: 1, length_blocks: 1 }, frame, 1, 10).unwrap();
            expectations.end_frame(frame, 10 * frame + 9);
        }
        expectations.forget_durable(18);
        assert_eq!(expectations.sorted_checks().len(), 6);
        expectations.forget_durable(19);
        let blocks: Vec<u64> = expectations.sorted_checks().iter().map(|c| c.block).collect();
        assert_eq!(blocks, [2, 3, 3, 4]);
        assert_eq!(expectations.anything.len(), 2);
    }

    #[test]
    fn blocks_outside_of_the_volume_are_refused() {
        let mut expectations = Expectations::default();
        for record in [
            Record::Free { block: 9, length_blocks: 2 },
            Record::Free { block: u64::MAX, length_blocks: 1 },
            Record::Wrote { block: 9, checksums: Checksums::Values(&[1, 2]) },
            Record::Home { inode: 1, file_block: 1, block: 10, checksum: 0 },
            Record::Payload { inode: 1, file_block: 1, home_block: 10, index: 0, checksum: 0 },
        ] {
            assert_eq!(expectations.add(&record, 0, 0, 10), Err(OutsideVolume));
        }
    }
}
