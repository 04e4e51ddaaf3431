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

    /// For each of `ranges`, which are in order, whether surely nothing of it is mapped. The caller holds the `map` lock.
    pub(super) fn surely_unmapped(
        &self,
        inode: &Inode,
        ranges: &[Range<u64>],
    ) -> Result<Vec<bool>> {
        let Some(mapped) = self.known_homes(inode, ranges, Held::Map)? else {
            return Ok(vec![false; ranges.len()]);
        };
        let is_unmapped = |blocks: &Range<u64>| {
            let next = mapped.partition_point(|run| run.end() <= blocks.start);
            mapped.get(next).is_none_or(|run| run.file_block >= blocks.end)
        };
        Ok(ranges.iter().map(is_unmapped).collect())
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
        by_block(&there) == by_block(mapped)
    }
}

/// The piece, and no more of its extent.
pub(super) fn run_of(piece: &extents::Piece) -> MappedRun {
    let (file_block, blocks) = (piece.file_block, piece.blocks);
    MappedRun { file_block, blocks, block: if piece.unwritten { 0 } else { piece.block } }
}
