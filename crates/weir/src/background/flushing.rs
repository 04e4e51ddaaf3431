//! What the flushers bring home, and how much of it at a time: pages that are dirty for long, or of which there are too many, and logged
//! pages that the log has no room for any more.

use crate::cache::map::{LoggedFilter, RunFilter};
use crate::device::IoClass;
use crate::engine::{Engine, Room};
use crate::error::{Error, Result};
use crate::file::writeback::{FLUSH_INODES, is_of_one_file, owed_filter};
use crate::format::BLOCK_BYTES_U64;
use crate::inode::Inode;
use crate::sync::Arc;
use crate::txn::Lsn;

/// Pages of given inodes that are written together.
const FLUSH_PAGES: u64 = 4096;
/// Pages that a flusher writes before it looks after something else: 64 MiB.
const TURN_PAGES: u64 = 16_384;
/// Pages that one round of bringing logged pages home writes: scattered ones hold a block of the log each meanwhile, and all of them
/// may be on their way to the disk at once.
const HOME_PAGES: u64 = 256;
/// Inodes that one round of bringing logged pages home looks at.
const HOME_INODES: usize = 4096;
/// Logged pages of an inode that are looked through one by one.
const FEW_PAGES: usize = 8;
/// Rounds of the flusher after which a page counts as old.
const OLD_ROUNDS: u64 = 5;
/// Dirty pages that the log does not have.
const UNLOGGED: RunFilter =
    RunFilter { logged: LoggedFilter::NotLogged, only_towrite: false, skip_writeback: true };

impl Engine {
    /// Writes some of what there is too much of: dirty pages in memory, logged pages in the log. Answers how many.
    ///
    /// # Errors
    /// One that struck, if nothing else was written: a file whose logged pages cannot go home keeps no dirty ones in memory.
    pub(super) fn relieve(&self) -> Result<u64> {
        let home = self.bring_early_home();
        if home.as_ref().is_err_and(|error| !is_of_one_file(error)) {
            return home;
        }
        // What was handed over does not wait for the rest.
        let is_alone = || !self.background.handover.is_due();
        let flushed_pages = if self.wants_writeback() { self.flush_dirty(is_alone)? } else { 0 };
        match home {
            Err(error) if flushed_pages == 0 => Err(error),
            home => Ok(home.unwrap_or(0) + flushed_pages),
        }
    }

    /// Brings logged pages home that are old enough for how full the log is. Answers how many.
    pub fn bring_early_home(&self) -> Result<u64> {
        let Some(up_to) = self.home_horizon(self.log_bytes()) else { return Ok(0) };
        let _role = self.background.home_role.lock();
        let owing = self.store.obligations.inodes_up_to(up_to, HOME_PAGES as usize);
        let found = self.send_early_home(&self.dirty.find(&owing), up_to);
        let pages = match found.and_then(|pages| self.search_early_home(pages, up_to)) {
            // Who has the role waits for no log space: a checkpoint that makes some brings these home as well.
            Err(Error::WouldBlock) => 0,
            result => result?,
        };
        self.counters.early_home_pages.add(pages);
        Ok(pages)
    }

    /// If no `pages` were sent home, looks through all that is dirty for some: for those of operations on several inodes.
    fn search_early_home(&self, mut pages: u64, up_to: u64) -> Result<u64> {
        let mut left = self.dirty.count();
        while left > 0 && pages == 0 {
            let wanted = |inode: &Inode| owes_up_to(inode, up_to);
            let (inodes, looked) =
                self.dirty.next_batch_of(HOME_PAGES as usize, HOME_INODES, wanted);
            left = left.saturating_sub(looked.max(1));
            pages = self.send_early_home(&inodes, up_to)?;
        }
        Ok(pages)
    }

    fn send_early_home(&self, inodes: &[Arc<Inode>], up_to: u64) -> Result<u64> {
        self.flush_inodes_in(inodes, owed_filter(up_to), (HOME_PAGES, Room::NoWait))
    }

    /// Up to which operation logged pages should go home now, with so much of the log used; none if all of these are, or if it is too early
    /// to begin.
    pub(super) fn home_horizon(&self, log_bytes: u64) -> Option<u64> {
        let due_bytes = self.background.limits.due_log_bytes(log_bytes)?;
        let oldest = self.store.obligations.oldest()?;
        let due = self.log.lsn_behind(due_bytes / BLOCK_BYTES_U64)?;
        let durable = self.log.durable_lsn();
        if oldest > due.min(durable) {
            return None;
        }
        Some(self.horizon()?.min(durable))
    }

    /// The newest operation that does not lie in the part of the log that may keep its pages.
    fn horizon(&self) -> Option<u64> {
        let kept_bytes = self.background.limits.kept_log_bytes(self.log_bytes())?;
        self.log.lsn_behind(kept_bytes / BLOCK_BYTES_U64)
    }

    /// Up to which operation a checkpoint that is to make room in the log brings logged pages home.
    pub fn home_limit(&self) -> u64 {
        self.horizon().unwrap_or_else(|| self.log.last_lsn())
    }

    /// Writes what has been dirty for some rounds.
    pub(super) fn flush_old(&self) {
        let old = self.dirty.begin_round(OLD_ROUNDS);
        for inodes in old.chunks(FLUSH_INODES) {
            // One that cannot be written is no reason for the others to stay in memory.
            if self.flush_inodes(inodes, UNLOGGED).is_err_and(|error| !is_of_one_file(&error)) {
                return;
            }
        }
    }

    /// Writes one batch of dirty pages home, those that were handed over first. Answers how many.
    pub fn flush_batch(&self) -> Result<u64> {
        if self.options.read_only {
            return Ok(0);
        }
        match self.drain_handover()? {
            0 => self.flush_dirty(|| true),
            pages => Ok(pages),
        }
    }

    /// Writes dirty pages home, those first that the log does not have: about [`TURN_PAGES`], or less where there are not too many any
    /// more, or not to `go_on`; where rounds are small on purpose they are wanted. Answers how many.
    pub(super) fn flush_dirty(&self, go_on: impl Fn() -> bool) -> Result<u64> {
        let is_wanted = || self.options.round_pages.is_some() || self.wants_writeback();
        let go_on = |pages| pages < TURN_PAGES && is_wanted() && go_on();
        match self.flush_while(UNLOGGED, go_on)? {
            0 => self.flush_while(RunFilter::default(), go_on),
            pages => Ok(pages),
        }
    }

    /// Writes dirty pages of `inodes` home, together.
    ///
    /// # Errors
    /// One that struck, after the others were written where it concerns one of them, which it names.
    pub fn flush_inodes(&self, inodes: &[Arc<Inode>], filter: RunFilter) -> Result<u64> {
        self.flush_inodes_in(inodes, filter, (FLUSH_PAGES, Room::Normal))
    }

    /// As [`Engine::flush_inodes`], about so many pages, in this part of the log.
    fn flush_inodes_in(
        &self,
        inodes: &[Arc<Inode>],
        filter: RunFilter,
        (most_pages, room): (u64, Room),
    ) -> Result<u64> {
        let mut pieces = Vec::new();
        let mut pages = 0;
        let mut result = Ok(());
        for inode in inodes {
            let budget = (most_pages.saturating_sub(pages), room);
            match self.collect(inode, 0..u64::MAX, filter, budget, &mut pieces) {
                Ok(collected) => {
                    pages += collected.pages;
                    if !collected.complete {
                        break;
                    }
                }
                Err(error) => {
                    let concerns_more = !is_of_one_file(&error);
                    if result.is_ok() || concerns_more {
                        result = Err(error.of_inode(inode.number));
                    }
                    if concerns_more {
                        break;
                    }
                }
            }
            if pages >= most_pages {
                break;
            }
        }
        self.write_out(&mut pieces, IoClass::Writeback);
        self.settle_of_many(pieces)?;
        result.map(|()| pages)
    }
}

/// Whether pages of `inode` may have versions in the log of `lsn` or older that are not home. Does not wait.
fn owes_up_to(inode: &Inode, lsn: Lsn) -> bool {
    let Some(pages) = inode.pages.try_read() else { return true };
    match pages.logged_count() {
        0 => false,
        1..=FEW_PAGES => pages.logged(0..u64::MAX).any(|(_, owed_lsn)| owed_lsn <= lsn),
        _ => true,
    }
}
