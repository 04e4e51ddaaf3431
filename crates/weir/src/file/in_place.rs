//! Writes on a full volume, to pages that have blocks.
//!
//! Data goes to new blocks as a rule, and a full volume has none to give. What a file has is its own, though: what was
//! allocated can be written for the first time, and what was written can be overwritten, as on file systems that know no
//! other way. Such a write goes piece by piece, the way of a synced one: into the log, which is made durable, and then to where it
//! lives. It is in the log for good before the cache has it (`in_place/overwrite.rs`), so that nobody can take its pages elsewhere, and
//! they need no promise of blocks. Where all of a piece is written already it needs no room at all: the tree has as many items as before,
//! and as large ones. First writes here and there make the tree grow: what they can add is promised for as long as the piece lasts, out of
//! what is kept for who tidies up and of what is spare, and they are refused when that is used up.
//!
//! Small files in their inodes, files that have met errors, and logs too small for a piece are left: these have their pages in the cache
//! first, which hold a promise of blocks for as long as the piece lasts, out of the same.
//!
//! **Invariant:** a piece is all that one call writes of a unit ([`Engine::untorn_pages`]), or nothing of it: a crash does not tear it.

mod overwrite;

use super::writeback::page_range;
use crate::alloc::ReserveClass;
use crate::cache::map::RunFilter;
use crate::device::IoClass;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::file::fsync::SyncKind;
use crate::format::BLOCK_BYTES_U64;
use crate::inode::Inode;
use crate::mutation::{self, Mutation};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Arc, Mutex, MutexGuard};
use overwrite::Mapping;
use std::ops::Range;

/// A checkpoint that frees so many blocks for each that is wanted is worth waiting for; otherwise a write goes in place.
const WORTH_A_CHECKPOINT: u64 = 16;

/// What the pages of a write were promised.
pub(super) enum Charge<'a> {
    /// Blocks of their own.
    Blocks,
    /// Only until they are home: so many of the first pages, which have blocks.
    InPlace { pages: u64, _underway: Underway<'a> },
    /// Nothing: so many of the first bytes are where they live already.
    Written { bytes: usize },
}

/// How many pieces there are, and whose turn it is when what is spare is not enough for all. Lock order: `turn` is taken after `ops`, and
/// before everything else.
#[derive(Default)]
pub struct InPlace {
    underway: AtomicU64,
    /// Those who want to be alone: no other piece begins meanwhile.
    held_back: AtomicU64,
    turn: Mutex<()>,
}

/// A piece on its way, as long as it lives.
pub(super) struct Underway<'a>(&'a Engine);

impl<'a> Underway<'a> {
    /// Counted before it is asked whether somebody wants to be alone, who is counted before he asks for pieces.
    fn begin(engine: &'a Engine) -> Self {
        engine.in_place.underway.fetch_add(1, Ordering::SeqCst);
        Self(engine)
    }
}

impl Drop for Underway<'_> {
    fn drop(&mut self) {
        self.0.in_place.underway.fetch_sub(1, Ordering::SeqCst);
        self.0.background.progress();
    }
}

/// No piece is on its way, and none of others begins, as long as it lives.
pub struct Alone<'a> {
    engine: &'a Engine,
    _turn: MutexGuard<'a, ()>,
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.engine.in_place.held_back.fetch_sub(1, Ordering::SeqCst);
        self.engine.background.progress();
    }
}

impl Engine {
    /// Waits for the end of the pieces on their way, which hold what is spare, one caller after the other. The caller has no piece, and
    /// holds no lock but `ops`.
    pub fn without_pieces(&self) -> Alone<'_> {
        self.in_place.held_back.fetch_add(1, Ordering::SeqCst);
        let alone = Alone { engine: self, _turn: self.in_place.turn.lock() };
        self.await_while(|in_place| in_place.underway.load(Ordering::SeqCst) > 0);
        alone
    }

    /// Where there are no threads, nobody else goes on while the caller waits.
    fn await_while(&self, is_busy: impl Fn(&InPlace) -> bool) {
        loop {
            let moment = self.background.moment();
            if !self.background.has_threads() || !is_busy(&self.in_place) {
                return;
            }
            self.await_others(moment);
        }
    }

    /// A piece that begins when nobody wants to be alone.
    fn begin_piece(&self) -> Underway<'_> {
        let is_held_back = |in_place: &InPlace| in_place.held_back.load(Ordering::SeqCst) > 0;
        loop {
            let underway = Underway::begin(self);
            if !self.background.has_threads() || !is_held_back(&self.in_place) {
                return underway;
            }
            drop(underway);
            self.await_while(is_held_back);
        }
    }

    /// Promises blocks to the pages of a write, or lets those of its first unit go in place when there are none: `data` at `offset`. The
    /// caller holds `ops`, and no other lock.
    ///
    /// # Errors
    /// [`Error::NoSpace`] if the volume is full, and of the pages in the first unit some have no block; or if some are written for the
    /// first time, and the tree has no room to grow. Those of [`Engine::overwrite`].
    pub(super) fn charge_write(
        &self,
        inode: &Arc<Inode>,
        offset: u64,
        data: &[u8],
    ) -> Result<Charge<'_>> {
        let end = offset + data.len() as u64;
        let pages = page_range(offset, data.len() as u64);
        let tears = mutation::active(Mutation::TearInPlace);
        let unit = if tears { 1 } else { self.untorn_pages() };
        let first_unit = pages.start..pages.end.min((pages.start / unit + 1) * unit);
        let has_place = || self.has_place(inode, &first_unit, end);
        if self.reserve_unless(pages.end - pages.start, has_place)? {
            return Ok(Charge::Blocks);
        }
        let fits = first_unit.end * BLOCK_BYTES_U64 - offset;
        let bytes = data.len().min(fits as usize);
        if self.overwrite(inode, offset, &data[..bytes])? {
            return Ok(Charge::Written { bytes });
        }
        let pages = first_unit.end - first_unit.start;
        Ok(Charge::InPlace { pages, _underway: self.promise_piece(pages)? })
    }

    /// Promises `blocks` to an append of `bytes`, if they do not all have them. True: they are promised. The caller holds
    /// `ops`, and no other lock.
    ///
    /// # Errors
    /// [`Error::NoSpace`] if the volume is full, and some pages have no block.
    pub(super) fn charge_append(
        &self,
        inode: &Inode,
        bytes: Range<u64>,
        blocks: u64,
    ) -> Result<bool> {
        let pages = page_range(bytes.start, bytes.end - bytes.start);
        self.reserve_unless(blocks, || self.has_place(inode, &pages, bytes.end))
    }

    /// Promises `blocks` to a user. False: there are none, and `has_place` says that none are needed.
    fn reserve_unless(&self, blocks: u64, has_place: impl Fn() -> Result<bool>) -> Result<bool> {
        match self.reserve_at_once(blocks, ReserveClass::User) {
            Err(Error::NoSpace) => {}
            reserved => return reserved.map(|()| true),
        }
        let is_worth_it = self.alloc.pending_free_blocks() >= WORTH_A_CHECKPOINT * blocks;
        if !is_worth_it && has_place()? {
            return Ok(false);
        }
        match self.reserve(blocks) {
            Err(Error::NoSpace) if has_place()? => Ok(false),
            reserved => reserved.map(|()| true),
        }
    }

    /// Promises `blocks` to a piece, which begins with that.
    fn promise_piece(&self, blocks: u64) -> Result<Underway<'_>> {
        let underway = self.begin_piece();
        // It is soon given back: no reason to wait for a checkpoint.
        let at_once = [ReserveClass::Tidy, ReserveClass::Cut];
        if at_once.into_iter().any(|class| self.reserve_at_once(blocks, class).is_ok()) {
            return Ok(underway);
        }
        drop(underway);
        let alone = self.without_pieces();
        self.reserve_spare_alone(blocks, &alone)?;
        Ok(Underway::begin(self))
    }

    /// Whether all of `pages` have blocks, or are a small file in its inode that does not grow beyond byte `end`.
    fn has_place(&self, inode: &Inode, pages: &Range<u64>, end: u64) -> Result<bool> {
        if inode.meta.lock().item.is_inline() {
            return Ok(*pages == (0..1) && end <= inode.size());
        }
        Ok(self.mapping_of(inode, pages)? != Mapping::Elsewhere)
    }

    /// Brings `bytes`, just written into the cache, to where they live. An error leaves them dirty, and is one of the device or of
    /// the log: the next sync meets it, or was told of it.
    pub(super) fn settle_in_place(&self, inode: &Arc<Inode>, bytes: Range<u64>) {
        self.counters.in_place_writes.add(1);
        let pages = page_range(bytes.start, bytes.end - bytes.start);
        let settle = || {
            let lsn = self.prepare_sync(inode, bytes, SyncKind::Data)?;
            self.commit_log(lsn)?;
            self.write_back(inode, pages.clone(), RunFilter::default(), IoClass::SyncWrite)
        };
        if settle().is_ok() {
            self.wait_writeback(inode, &pages);
        }
    }
}
