//! New pages of one sync, written home at the same time as the frame that maps them: see [`crate::log::lead`].
//!
//! The operation is in the log, and everybody sees the new mapping, while the pages are still on their way. They stay under writeback until the
//! frame counts as written, so they are neither evicted nor cut, and nobody reads them from the device.
//!
//! **Invariant:** log space for the pages themselves is admitted before the operation is committed: what cannot be written home goes
//! into the log after it, and both frames count together.

use super::output::{requests_of, to_device};
use super::piece::{Piece, Place};
use crate::device::IoClass;
use crate::engine::{Engine, Room};
use crate::error::{Error, Result};
use crate::file::fsync::{PAYLOAD_RECORD_BYTES, UNLOGGED};
use crate::format::Key;
use crate::inode::Inode;
use crate::log::Admission;
use crate::log::lead::Lead;
use crate::sync::Arc;
use crate::txn::Op;
use std::ops::Range;

impl Engine {
    /// Sends the dirty pages of `range`, which are few and new, home beside the frame that maps them; before it where that is not
    /// possible any more, and not at all for lack of log space. Blocks for the writes, not for a flush.
    pub fn sync_beside(&self, inode: &Arc<Inode>, range: &Range<u64>) -> Result<()> {
        self.delay_for_log(1);
        let mut pieces = Vec::new();
        let budget = (self.max_payload_pages() as u64, Room::NoWait);
        let collected = self.collect(inode, range.clone(), UNLOGGED, budget, &mut pieces);
        let done = match pieces.as_mut_slice() {
            [piece] => self.write_beside(piece)?,
            _ => false,
        };
        if !done {
            self.write_out(&mut pieces, IoClass::SyncWrite);
            self.settle(pieces)?;
        }
        match collected {
            Ok(_) | Err(Error::WouldBlock) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Commits the piece and writes it beside its frame. False: nothing was done.
    fn write_beside(&self, piece: &mut Piece) -> Result<bool> {
        let is_new = piece.segments.iter().all(|segment| segment.place == Place::New);
        let count = piece.pages.len();
        if !is_new || piece.into_inode || count > self.max_payload_pages() {
            return Ok(false);
        }
        let Ok(spare) = self.admit(PAYLOAD_RECORD_BYTES, count, Room::NoWait) else {
            return Ok(false);
        };
        let (_, requests) = to_device(requests_of(std::slice::from_ref(piece)), IoClass::Beside);
        let inode = piece.inode.clone();
        let map = inode.map.lock();
        let Some(mut lead) = self.log.try_lead() else { return Ok(false) };
        if let Err(error) = self.commit_piece(piece) {
            drop((lead, map));
            return self.end_piece(piece, Err(error)).map(|()| true);
        }
        drop(map);
        match lead.write(requests) {
            Ok(None) => {}
            Ok(Some(_)) => return self.make_up(piece, spare, lead).map(|()| true),
            // Shut down: what is in the log cannot be taken back, and will not be durable.
            Err(error) => {
                self.shut_down_after(&error);
                return self.end_piece(piece, Err(error)).map(|()| true);
            }
        }
        lead.end();
        self.counters.sync_home_pages.add(count as u64);
        self.end_piece(piece, Ok(())).map(|()| true)
    }

    /// The piece is mapped, but could not be written: its pages go into the log as they were, and home later, as all that the
    /// log holds.
    fn make_up(&self, piece: &Piece, admission: Admission, mut lead: Lead<'_>) -> Result<()> {
        self.counters.writeback_errors.add(1);
        let logged = self.log_instead(piece, admission);
        let written = logged.and_then(|()| {
            lead.made_up();
            lead.write(Vec::new())
        });
        // Without them the log shuts down here.
        lead.end();
        written.map(drop).inspect_err(|error| self.shut_down_after(error))
    }

    fn log_instead(&self, piece: &Piece, admission: Admission) -> Result<()> {
        let inode = &piece.inode;
        let _map = inode.map.lock();
        let mut pages = inode.pages.write();
        let mut op = Op::new();
        let mut changed = Vec::with_capacity(piece.pages.len());
        let mut paid = 0;
        for segment in &piece.segments {
            let taken = &piece.pages[segment.first..segment.first + segment.pages];
            for (page, block) in taken.iter().zip(segment.block..) {
                op.payload(inode.number, page.index, block, page.page.clone());
                let end = pages.end_writeback(page.index, piece.token, false);
                // Written to meanwhile: then it was counted, and promised a block, twice.
                paid += u64::from(!end.stale && !end.newly_dirty);
                changed.push((page.index, end));
            }
        }
        let mut meta = inode.meta.lock();
        op.put(Key::inode(inode.number), &meta.item.encode());
        let committed = self.store.commit(op, admission);
        if let Ok(lsn) = committed {
            meta.logged(lsn, true);
        }
        drop(meta);
        for (index, end) in changed {
            let Ok(lsn) = committed else { break };
            if end.stale {
                self.store.obligations.release(lsn);
                continue;
            }
            if let Some(older) = pages.set_logged(index, lsn) {
                self.store.obligations.release(older);
            }
            if !end.newly_dirty {
                // The log has what it was when it was taken.
                pages.mark_dirty(index);
            }
        }
        drop(pages);
        self.pages_paid(paid);
        inode.io_ended();
        committed.map(drop)
    }
}
