//! Pages of syncs that are new, or move to new blocks, written at the same time as the frame that maps them, by whoever writes that: see
//! [`crate::log::companion`].
//!
//! The operation is in the log, and everybody sees the new mapping, while the pages are still on their way. They stay under writeback until the
//! frame counts as written, so they are neither evicted nor cut, and nobody reads them from the device. Whoever waits for them writes the
//! frame himself if nobody else does ([`Engine::wait_pages`]).
//!
//! **Invariant:** log space for the pages themselves is admitted before the operation is committed: what cannot be written home goes
//! into the log after it, and both frames count together.
//! **Invariant:** no pages wait for their frame in an open chain: what ends it may wait for them, while their owner waits for its end.
//! **Invariant:** data begins before its frame only on a thread that goes on to wait for it to be durable, or that does nothing but syncs: on
//! Linux the thread that began it notices its end, so the frame's writer may wait for what that thread does meanwhile.

use super::output::{REQUEST_PAGES, requests_of, to_device};
use super::piece::{Piece, Place};
use crate::device::IoClass;
use crate::engine::{Engine, Room};
use crate::error::{Error, Result};
use crate::file::fsync::{CHOSEN, PAYLOAD_RECORD_BYTES};
use crate::format::Key;
use crate::inode::Inode;
use crate::log::Admission;
use crate::log::companion::{Companion, Companions, Data};
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, Mutex, Weak, at_once};
use crate::txn::{Lsn, Op};
use std::ops::Range;

/// What became of a piece that was to go beside its frame.
enum Beside {
    /// It waits for the frame of this operation, or is on its way.
    Waits(Lsn),
    /// Nothing was done with it.
    Impossible(Box<Piece>),
}

/// How a piece is committed that goes beside its frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    /// Its data is on its way before that.
    Begins,
    /// Its data waits for the frame.
    Waits,
    /// So it does, and nobody waits for whoever has the mapping in his hands.
    AtOnce,
}

impl Manner {
    const fn of_who_waits(may_begin: bool) -> Self {
        if may_begin { Self::Begins } else { Self::Waits }
    }
}

/// A piece that waits for its frame, as the log knows it.
struct Owner {
    engine: Weak<Engine>,
    piece: Arc<Piece>,
    /// Log space for the pages themselves.
    spare: Mutex<Option<Admission>>,
}

impl Companion for Owner {
    fn end(&self, result: Result<()>) {
        let Some(engine) = self.engine.upgrade() else { return };
        // An error shuts the volume down: who waits for the log hears of it, and every handle.
        let _ = engine.end_piece(&self.piece, result);
    }

    fn make_up(&self) -> Result<Lsn> {
        let engine =
            self.engine.upgrade().ok_or(Error::Invalid("data of a volume that is gone"))?;
        let spare = self.spare.lock().take();
        let spare = spare.ok_or(Error::Invalid("data that is made up for twice"))?;
        engine.counters.writeback_errors.add(1);
        engine.log_instead(&self.piece, spare)
    }
}

impl Engine {
    /// Sends the chosen pages of `range`, which are few and go to new blocks, home beside the frame that maps them; before it where that is not
    /// possible any more, and not at all for lack of log space. Waits for the device only if much waits for its frame already.
    pub fn sync_beside(&self, inode: &Arc<Inode>, range: &Range<u64>) -> Result<()> {
        self.delay_for_log(1);
        if !self.log.takes_companions() {
            self.log.write_up_to(self.log.last_lsn())?;
        }
        let mut pieces = Vec::new();
        let budget = (self.max_payload_pages() as u64, Room::NoWait);
        let collected = self.collect_unsummed(inode, range.clone(), CHOSEN, budget, &mut pieces);
        let mut result = Ok(());
        let mut others = Vec::new();
        for piece in pieces {
            match self.commit_beside(piece, Manner::of_who_waits(self.may_begin())) {
                Ok(Beside::Waits(lsn)) if self.log.in_open_chain(lsn) => {
                    result = result.and(self.log.write_up_to(lsn));
                }
                Ok(Beside::Waits(_)) => {}
                Ok(Beside::Impossible(piece)) => others.push(*piece),
                Err(error) => result = result.and(Err(error)),
            }
        }
        let left: usize = others.iter().map(|piece| piece.pages.len()).sum();
        self.counters.sync_home_pages.add(left as u64);
        self.write_out(&mut others, IoClass::SyncWrite);
        result = result.and(self.settle(others));
        match collected {
            Ok(_) | Err(Error::WouldBlock) => result,
            Err(error) => result.and(Err(error)),
        }
    }

    /// As [`Engine::sync_beside`], for somebody who does not wait: never for the device, nor for log space. False: some of the pages are as
    /// dirty as before.
    pub fn sync_beside_at_once(&self, inode: &Arc<Inode>, range: &Range<u64>) -> Result<bool> {
        let mut pieces = Vec::new();
        let budget = (self.max_payload_pages() as u64, Room::NoWait);
        let collected =
            at_once(|| self.collect_unsummed(inode, range.clone(), CHOSEN, budget, &mut pieces));
        let mut result = match collected {
            Ok(_) => Ok(true),
            Err(Error::WouldBlock) => Ok(false),
            Err(error) => Err(error),
        };
        for piece in pieces {
            match self.commit_beside(piece, Manner::AtOnce) {
                // What ends the chain may wait for the pages, and the log's thread does not.
                Ok(Beside::Waits(lsn)) if self.log.in_open_chain(lsn) => {
                    self.log.request_write_out();
                }
                Ok(Beside::Waits(_)) => {}
                Ok(Beside::Impossible(piece)) => {
                    self.put_back(&piece);
                    result = result.and(Ok(false));
                }
                Err(error) => result = result.and(Err(error)),
            }
        }
        result
    }

    /// Commits the piece, to be written beside its frame. If that is not possible it gets its checksums, no more.
    fn commit_beside(&self, mut piece: Piece, manner: Manner) -> Result<Beside> {
        let Some((admission, spare)) = self.admit_beside(&mut piece) else {
            piece.sum();
            return Ok(Beside::Impossible(Box::new(piece)));
        };
        let begins = manner == Manner::Begins;
        if !begins {
            piece.sum();
        }
        let inode = piece.inode.clone();
        // Somebody may hold it while he reads a node, and after this nothing can be taken back.
        let held = match (manner == Manner::AtOnce).then(|| at_once(|| inode.lock_map())) {
            Some(Err(_)) => {
                piece.admission = Some(admission);
                return Ok(Beside::Impossible(Box::new(piece)));
            }
            held => held.transpose()?,
        };
        let count = piece.pages.len();
        let writes = requests_of(std::slice::from_ref(&piece), REQUEST_PAGES);
        let data = if begins {
            let (_, requests) = to_device(writes, IoClass::Beside);
            let begun = self.device.clone().begin_all(requests);
            piece.sum();
            Data::Begun(begun, count as u64)
        } else {
            Data::Waits(writes.into_iter().map(|write| (write.block, write.pages)).collect())
        };
        let piece = Arc::new(piece);
        let owner =
            Owner { engine: self.me.clone(), piece: piece.clone(), spare: Mutex::new(Some(spare)) };
        let companions = Companions::new(data, Box::new(owner));
        let committed = {
            let _map = held.unwrap_or_else(|| inode.map.lock());
            self.commit_piece(&piece, admission, Some(companions)).inspect(|_| {
                // Whoever writes the frame may have been faster.
                let indices = piece.pages.iter().map(|page| page.index);
                piece.inode.pages.write().note_mapped(indices, piece.token);
            })
        };
        let lsn = match committed {
            Ok(lsn) => lsn,
            Err(error) => {
                self.end_piece(&piece, Err(error.clone()))?;
                return Err(error);
            }
        };
        self.counters.sync_home_pages.add(count as u64);
        Ok(Beside::Waits(lsn))
    }

    /// Log space for mapping the piece, and for its pages themselves. `None`: it cannot be written beside a frame.
    fn admit_beside(&self, piece: &mut Piece) -> Option<(Admission, Admission)> {
        let is_new = piece.segments.iter().all(|segment| segment.place == Place::New);
        let count = piece.pages.len();
        if !is_new || piece.into_inode || count > self.max_payload_pages() {
            return None;
        }
        if !self.log.takes_companions() {
            return None;
        }
        let spare = self.admit(PAYLOAD_RECORD_BYTES, count, Room::NoWait).ok()?;
        Some((piece.admission.take()?, spare))
    }

    /// Data begins before its frame exists where nobody else writes: others would have their data written together with it.
    fn may_begin(&self) -> bool {
        self.may_overlap() && self.log.awaits_writer()
    }

    /// Waits until some I/O of `inode` has ended since `moment`; does it, if it is data that waits for its frame.
    pub fn wait_pages(&self, inode: &Inode, moment: u64) {
        // If the log is shut down, all that waits has ended.
        if !self.log.has_companions() || self.log.write_up_to(self.log.last_lsn()).is_err() {
            self.background.pacing.await_pages(|| inode.wait_io(moment));
        }
    }

    /// The piece is mapped, but could not be written: its pages go into the log as they were, and home later, as all that the
    /// log holds.
    fn log_instead(&self, piece: &Piece, admission: Admission) -> Result<Lsn> {
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
        piece.ended.store(true, Ordering::Release);
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
        committed
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn who_does_not_wait_leaves_alone_what_somebody_maps() {
        let (volume, file) = crate::txn::volume_with_a_file();
        let (engine, inode) = (file.engine(), file.inode());
        file.write_at(0, &[7; 3 * 4096]).expect("write");
        let collected = || {
            let mut pieces = Vec::new();
            let budget = (engine.max_payload_pages() as u64, Room::NoWait);
            let filter = crate::cache::map::RunFilter::default();
            engine.collect_unsummed(inode, 0..3, filter, budget, &mut pieces).expect("collect");
            assert_eq!(pieces.len(), 1);
            pieces.remove(0)
        };
        let (piece, before) = (collected(), volume.last_lsn());
        // Its holder may be reading a node, for as long as the disk takes.
        let map = inode.map.lock();
        let piece = match engine.commit_beside(piece, Manner::AtOnce).expect("no error") {
            Beside::Impossible(piece) => piece,
            Beside::Waits(_) => panic!("the mapping is in somebody's hands"),
        };
        drop(map);
        assert_eq!(volume.last_lsn(), before, "nothing was done with it");
        engine.put_back(&piece);
        drop(piece);
        let piece = collected();
        assert!(matches!(engine.commit_beside(piece, Manner::AtOnce), Ok(Beside::Waits(_))));
        file.fsync().expect("fsync");
        volume.close().expect("close");
    }
}
