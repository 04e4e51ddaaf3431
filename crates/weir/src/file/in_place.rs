//! Writes on a full volume, to pages that have blocks.
//!
//! Data goes to new blocks as a rule, and a full volume has none to give. What a file has is its own, though: what was
//! allocated can be written for the first time, and what was written can be overwritten, as on file systems that know no
//! other way. Such a write goes the way of a synced one, piece by piece: into the log, which is made durable, and then to where it
//! lives. That takes no block, so the pages hold a promise for as long as that lasts only, and one that draws on what is kept for who tidies
//! up and on what is spare.
//!
//! **Invariant:** a piece is all that one call writes of a unit ([`Engine::untorn_pages`]), or nothing of it: a crash does not tear it.

use super::extents;
use super::writeback::page_range;
use crate::alloc::ReserveClass;
use crate::cache::map::RunFilter;
use crate::device::IoClass;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::file::fsync::SyncKind;
use crate::inode::Inode;
use crate::sync::Arc;
use crate::sync::atomic::Ordering;
use std::ops::Range;

/// A checkpoint that frees so many blocks for each that is wanted is worth waiting for; otherwise a write goes in place.
const WORTH_A_CHECKPOINT: u64 = 16;

/// What the pages of a write were promised.
pub(super) enum Charge<'a> {
    /// Blocks of their own.
    Blocks,
    /// Only until they are home: so many of the first pages, which have blocks.
    InPlace { pages: u64, _underway: Underway<'a> },
}

/// A piece on its way, as long as it lives.
pub(super) struct Underway<'a>(&'a Engine);

impl<'a> Underway<'a> {
    fn begin(engine: &'a Engine) -> Self {
        engine.in_place_pieces.fetch_add(1, Ordering::AcqRel);
        Self(engine)
    }
}

impl Drop for Underway<'_> {
    fn drop(&mut self) {
        self.0.in_place_pieces.fetch_sub(1, Ordering::AcqRel);
        self.0.background.progress();
    }
}

impl Engine {
    /// Promises blocks to the pages of a write, or lets the first of them go in place when there are none. The caller holds
    /// `ops`, and no other lock.
    ///
    /// # Errors
    /// [`Error::NoSpace`] if the volume is full, and of the pages in the first unit some have no block.
    pub(super) fn charge_write(&self, inode: &Arc<Inode>, pages: Range<u64>) -> Result<Charge<'_>> {
        let count = pages.end - pages.start;
        match self.reserve_at_once(count, ReserveClass::User) {
            Err(Error::NoSpace) => {}
            reserved => return reserved.map(|()| Charge::Blocks),
        }
        let is_worth_it = self.alloc.pending_free_blocks() >= WORTH_A_CHECKPOINT * count;
        if !is_worth_it && let Some(charge) = self.charge_in_place(inode, &pages)? {
            return Ok(charge);
        }
        match self.reserve(count) {
            Err(Error::NoSpace) => self.charge_in_place(inode, &pages)?.ok_or(Error::NoSpace),
            reserved => reserved.map(|()| Charge::Blocks),
        }
    }

    /// `None`: of the pages in the first unit some have no block.
    fn charge_in_place(&self, inode: &Inode, pages: &Range<u64>) -> Result<Option<Charge<'_>>> {
        let unit = self.untorn_pages();
        let end = pages.end.min((pages.start / unit + 1) * unit);
        if !self.is_mapped(inode, pages.start..end)? {
            return Ok(None);
        }
        let count = end - pages.start;
        loop {
            let moment = self.background.moment();
            let at_once = [ReserveClass::Tidy, ReserveClass::Cut];
            if at_once.into_iter().any(|class| self.reserve_at_once(count, class).is_ok()) {
                break;
            }
            let others = || self.in_place_pieces.load(Ordering::Acquire) > 0;
            if self.background.has_threads() && others() {
                // They give back what they hold sooner than a checkpoint finds more.
                self.await_others(moment);
                continue;
            }
            match self.reserve_spare(count) {
                Err(Error::NoSpace) if self.background.has_threads() && others() => {}
                reserved => break reserved?,
            }
        }
        Ok(Some(Charge::InPlace { pages: count, _underway: Underway::begin(self) }))
    }

    /// Whether all of `pages` have blocks.
    fn is_mapped(&self, inode: &Inode, pages: Range<u64>) -> Result<bool> {
        if inode.meta.lock().item.blocks == 0 {
            return Ok(false);
        }
        let mut mapped_to = pages.start;
        for piece in extents::all_pieces(&self.store, inode, pages.start, pages.end)? {
            if piece.file_block > mapped_to {
                break;
            }
            mapped_to = piece.end();
        }
        Ok(mapped_to >= pages.end)
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
