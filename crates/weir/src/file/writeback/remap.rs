//! The new mapping of a piece, as changes of extent items.
//!
//! Several runs of one operation may lie in the same old extent. What the operation has changed already is not in the
//! store: so whatever begins before the end of the last run is looked up again, through the operation. An extent in which pages stay
//! is held open until the runs leave it: it is decoded and put once, however many they are.

use super::is_scattered;
use super::piece::{Piece, Place, free_overlap};
use crate::alloc::Run;
use crate::engine::Engine;
use crate::error::Result;
use crate::file::extents::{self, Unmapped};
use crate::file::homes::Replaceable;
use crate::file::known_homes::MappedRun;
use crate::file::known_mapping::Mapped;
use crate::format::Key;
use crate::format::item::Extent;
use crate::mutation::{self, Mutation};
use crate::txn::{Home, Op, Overlay};
use std::borrow::Cow;
use std::ops::Range;

/// Blocks that an inode gets and loses.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Changed {
    pub(super) added: u64,
    pub(super) removed: u64,
}

/// See the module's head. The runs of `piece` come in order; the `map` lock is held.
pub(super) struct Remapping<'a> {
    engine: &'a Engine,
    piece: &'a Piece,
    /// Pages that the log has something newer of.
    newer: &'a [u64],
    op: &'a mut Op,
    view: Overlay<'a>,
    /// Changes of `op` that `view` has.
    seen: usize,
    /// Extents that begin before this file block may have been changed by `op`.
    changed_to: u64,
    /// The extent in which pages stayed last; not in `op` yet.
    open: Option<(Key, Extent)>,
    changed: Changed,
    /// Of each run, what it replaces, where that was known when this began and what is before does not matter.
    known: Cow<'a, [Replaceable]>,
}

impl<'a> Remapping<'a> {
    pub(super) fn new(
        engine: &'a Engine,
        (piece, newer): (&'a Piece, &'a [u64]),
        op: &'a mut Op,
    ) -> Result<Self> {
        let view = Overlay::new(&engine.store);
        let seen = op.change_count();
        let changed = Changed::default();
        let known = engine.still_replaceable(piece)?;
        Ok(Self { engine, piece, newer, op, view, seen, changed_to: 0, open: None, changed, known })
    }

    /// The blocks that all runs together added and removed.
    pub(super) fn finish(mut self) -> Changed {
        self.close();
        self.changed
    }

    /// Puts the extent that is held open.
    fn close(&mut self) {
        if let Some((key, extent)) = self.open.take() {
            self.op.set_unlogged(key, &extent.encode());
        }
    }

    /// The store with what the operation does so far.
    fn view(&mut self) -> &Overlay<'a> {
        self.close();
        self.view.absorb_from(self.op, self.seen);
        self.seen = self.op.change_count();
        &self.view
    }

    /// What the piece's run `number` is mapped to.
    fn mapped(&mut self, number: usize, blocks: &Range<u64>) -> Result<Mapped> {
        if self.known[number] == Replaceable::Nothing {
            return Ok((Vec::new(), None));
        }
        let inode = &*self.piece.inode;
        let (old, before) = self.engine.look_up_mapping(inode, blocks)?;
        let first = old.first().map(extents::Piece::extent_start);
        let starts = [first, before.as_ref().map(extents::Before::extent_start)];
        let is_unchanged = starts.into_iter().flatten().all(|start| start >= self.changed_to);
        if is_unchanged || mutation::active(Mutation::ForgetEarlierRuns) {
            return Ok((old, before));
        }
        extents::all_pieces_after(self.view(), inode.into(), blocks.start, blocks.end)
    }

    /// The mapping of the run stays, only checksums change.
    pub(super) fn stay(&mut self, number: usize) -> Result<()> {
        let run = &self.piece.runs[number];
        let blocks = self.piece.file_blocks(run);
        let holds_all = |(key, extent): &(Key, Extent)| {
            key.offset <= blocks.start && blocks.end <= key.offset + extent.blocks
        };
        if self.open.as_ref().is_some_and(holds_all) {
            self.stay_in_open(&blocks, run.start);
        } else {
            for part in self.mapped(number, &blocks)?.0 {
                self.close();
                self.open = Some(part.whole()?);
                let place = run.start + (part.file_block - blocks.start) as usize;
                self.stay_in_open(&(part.file_block..part.end()), place);
            }
        }
        self.changed_to = blocks.end;
        Ok(())
    }

    /// `blocks`, of the extent that is held open, have the content of the piece's pages from `place` on.
    fn stay_in_open(&mut self, blocks: &Range<u64>, place: usize) {
        let Some((key, extent)) = &mut self.open else { return };
        let inode = key.inode;
        for (file_block, &checksum) in blocks.clone().zip(&self.piece.checksums[place..]) {
            if self.newer.binary_search(&file_block).is_ok() {
                // To say that it is home would be to say so of the newer version. Nobody reads what is there before that has got home.
                continue;
            }
            let within = file_block - key.offset;
            extent.checksums[within as usize] = checksum;
            let block = extent.block + within;
            self.op.home_record(Home { inode, file_block, block, checksum });
        }
    }

    /// The whole run is mapped anew.
    pub(super) fn move_to_segments(&mut self, number: usize) -> Result<()> {
        let inode = self.piece.inode.clone();
        let run = &self.piece.runs[number];
        let Range { start, end } = self.piece.file_blocks(run);
        if let Replaceable::Extent(home) = self.known[number] {
            self.replace_extent(run, &home);
            self.changed_to = end;
            return Ok(());
        }
        let (old, before) = self.mapped(number, &(start..end))?;
        self.close();
        let mut left = match (before, old.first()) {
            // Placed with the others of the piece, not behind what is before it in the file.
            _ if is_scattered(self.piece, run) => None,
            (Some(before), _) => before.adjoining(start)?,
            (None, Some(first)) if first.file_block == start => {
                extents::left_neighbour(self.view(), &*inode, start)?
            }
            (None, _) => None,
        };
        self.changed.removed += extents::cut_pieces(self.op, &old, Unmapped::Kept)?;
        self.changed.added += end - start;
        for segment in self.piece.segments_of(run) {
            if segment.place == Place::New {
                let from = start + (segment.first - run.start) as u64;
                free_overlap(self.op, &old, &(from..from + segment.pages as u64));
            }
        }
        for (file_block, extent) in self.piece.extents_of(run) {
            extents::insert(self.op, inode.number, file_block, &extent, left.take());
        }
        self.changed_to = end;
        Ok(())
    }

    /// The run is one block, mapped to `home`, which is an extent of its own: its item is replaced.
    fn replace_extent(&mut self, run: &Range<usize>, home: &MappedRun) {
        self.close();
        for segment in self.piece.segments_of(run) {
            let extent = Extent::encode_block(segment.block, self.piece.checksums[segment.first]);
            self.op.freed(Run { start: home.block, blocks: 1 });
            self.op.put(Key::extent(self.piece.inode.number, home.file_block), &extent);
        }
        self.changed.removed += 1;
        self.changed.added += 1;
    }
}
