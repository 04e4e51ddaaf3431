//! Where blocks of a file live, by way of [`super::known_homes`].

use super::extents;
use super::known_homes::{Held, KnownHomes, MappedRun, blocks_of};
use crate::engine::Engine;
use crate::error::Result;
use crate::inode::Inode;
use crate::txn::mapping_moments::MappingMoment;
use std::ops::Range;

/// Longer ranges are not worth what is kept: one look-up in the store answers for many blocks.
const LONGEST_BLOCKS: u64 = 33;

impl Engine {
    /// What `ranges` are mapped to. `None`: to be looked up in another way.
    pub(super) fn known_homes(
        &self,
        inode: &Inode,
        ranges: &[Range<u64>],
        held: Held,
    ) -> Result<Option<Vec<MappedRun>>> {
        if ranges.iter().any(|range| range.end - range.start > LONGEST_BLOCKS + 1) {
            return Ok(None);
        }
        let moment = self.store.mappings.moment(inode.number);
        let found = inode.known_homes.lock().look_up(moment, ranges);
        let missing = match found {
            Some(found) if found.missing.is_empty() => {
                debug_assert!(
                    self.is_mapped_so(inode, ranges, &found.mapped)
                        || self.store.mappings.moment(inode.number) != moment
                );
                return Ok(Some(found.mapped));
            }
            Some(found) => found.missing,
            None => KnownHomes::groups_of_all(ranges),
        };
        for number in missing {
            self.fill_group(inode, number, moment, held)?;
        }
        let found = inode.known_homes.lock().look_up(moment, ranges);
        Ok(found.filter(|found| found.missing.is_empty()).map(|found| found.mapped))
    }

    /// Keeps what the store has of a group.
    fn fill_group(
        &self,
        inode: &Inode,
        number: u64,
        moment: MappingMoment,
        held: Held,
    ) -> Result<()> {
        let Range { start, end } = blocks_of(number);
        let pieces = extents::all_pieces(&self.store, inode, start, end)?;
        let runs: Vec<MappedRun> = pieces.iter().map(run_of).collect();
        inode.known_homes.lock().fill(moment, number, &runs, held, &self.homes_budget);
        Ok(())
    }

    /// What each of `ranges`, which are in order, can be replaced by without looking at extents. The caller holds the `map` lock.
    pub(super) fn replaceable(
        &self,
        inode: &Inode,
        ranges: &[Range<u64>],
    ) -> Result<Vec<Replaceable>> {
        let Some(mapped) = self.known_homes(inode, ranges, Held::Map)? else {
            return Ok(vec![Replaceable::Unknown; ranges.len()]);
        };
        let of = |blocks: &Range<u64>| {
            let next = mapped.partition_point(|run| run.end() <= blocks.start);
            match mapped.get(next).filter(|run| run.file_block < blocks.end) {
                None => Replaceable::Nothing,
                // One of several blocks is no extent of its own.
                Some(home) if home.is_own_extent && blocks.end - blocks.start == 1 => {
                    Replaceable::Extent(*home)
                }
                Some(_) => Replaceable::Unknown,
            }
        };
        Ok(ranges.iter().map(of).collect())
    }

    /// Whether the store has exactly `mapped` in `ranges`.
    fn is_mapped_so(&self, inode: &Inode, ranges: &[Range<u64>], mapped: &[MappedRun]) -> bool {
        let by_block = |runs: &[MappedRun]| -> Vec<(u64, u64)> {
            runs.iter().flat_map(MappedRun::by_block).collect()
        };
        let mut there = Vec::new();
        for range in ranges {
            let Ok(pieces) = extents::all_pieces(&self.store, inode, range.start, range.end) else {
                return true;
            };
            there.extend(pieces.iter().map(run_of));
        }
        let own: Vec<u64> = own_extents(&there).collect();
        by_block(&there) == by_block(mapped)
            && own_extents(mapped).all(|block| own.binary_search(&block).is_ok())
    }
}

/// The file blocks of those that are extents of their own.
fn own_extents(runs: &[MappedRun]) -> impl Iterator<Item = u64> {
    runs.iter().filter(|run| run.is_own_extent).map(|run| run.file_block)
}

/// What a range of file blocks is mapped to, as far as it matters to who maps it anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Replaceable {
    /// Surely nothing.
    Nothing,
    /// It is one block, and that an extent of its own.
    Extent(MappedRun),
    /// That is to be looked up.
    Unknown,
}

impl Replaceable {
    /// One of the two is wrong.
    pub(super) fn contradicts(&self, other: &Self) -> bool {
        self != other && *self != Self::Unknown && *other != Self::Unknown
    }
}

/// The piece, and no more of its extent.
pub(super) fn run_of(piece: &extents::Piece) -> MappedRun {
    let (file_block, blocks) = (piece.file_block, piece.blocks);
    let is_own_extent = blocks == 1 && !piece.unwritten && piece.is_whole();
    let block = if piece.unwritten { 0 } else { piece.block };
    MappedRun { file_block, blocks, block, is_own_extent }
}
