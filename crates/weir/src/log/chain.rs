//! Open chains: from [`Log::open_chain`] until the last [`Log::close_chain`], everything that anybody appends belongs to one
//! chain of frames. Replay finds all of it or nothing, and none of it becomes durable before its end. This is what a
//! barrier is made of: what the log does not have yet when the barrier is raised is appended within the chain, so it cannot
//! be missing while something later is there.
//!
//! A chain may be opened again while it is open: it ends when all have closed it. A chain that is opened over and over would
//! never end; so only [`MAX_JOINED`] may join one.
//!
//! **Invariants.** A chain starts a frame of its own. No boundary of a transaction lies inside of a chain ([`Log::seal`] refuses),
//! so a checkpoint holds all of a chain or nothing, and of what lies before it and needs something of it, as well (`companion`). [`Log::commit`] waits for the chain to close before it asks for a
//! flush: nobody ever works for an LSN that cannot become durable. The first LSN of a chain exists when it is closed.

use super::core::{Beside, Lsn};
use super::op::OpRecords;
use super::waiter::Outbox;
use super::{Admission, AdmissionClass, Appender, Boundary, Log};
use crate::Result;
use crate::sync::atomic::Ordering;

/// How many may join a chain that is open.
pub const MAX_JOINED: u32 = 64;
/// Log space that whoever opens a chain must have: its end may need a frame.
pub const CHAIN_END_BLOCKS: u64 = 1;
/// In `chain_first`: no chain is open.
pub(super) const NO_CHAIN: Lsn = Lsn::MAX;

/// What the append lock guards of an open chain.
#[derive(Debug)]
pub(super) struct OpenChain {
    first: Lsn,
    /// How many have yet to close it.
    holders: u32,
    joined: u32,
    /// A frame of it was sealed.
    has_frames: bool,
    /// Room for a record that ends it.
    end: Admission,
}

impl Log {
    /// Opens a chain, or joins the one that is open. Answers an LSN that becomes durable with the end of the chain, no sooner.
    /// `None`: nothing was opened, because the chain has been joined too often, because a boundary between transactions
    /// has to come first, or because more of the ring is taken than operations may fill; [`Log::wait_chain`] and try again. `room` gives up
    /// [`CHAIN_END_BLOCKS`].
    ///
    /// # Errors
    /// The log is shut down.
    pub fn open_chain(&self, room: &mut Admission) -> Result<Option<Lsn>> {
        if self.shut_down.load(Ordering::Acquire) {
            return Err(self.shutdown_error());
        }
        let mut append = self.append.lock();
        let last = append.next_lsn - 1;
        if let Some(chain) = &mut append.chain {
            if chain.joined == MAX_JOINED {
                return Ok(None);
            }
            chain.joined += 1;
            chain.holders += 1;
            return Ok(Some(chain.first.max(last)));
        }
        // Nor while somebody has some of what is kept for its end.
        let admitted = self.admitted.blocks();
        let is_free = append.ring.admissible(0, admitted, AdmissionClass::Foreground).is_ok();
        if append.boundary_wanted || !is_free {
            return Ok(None);
        }
        append.seal_open();
        let first = last + 1;
        let end = room.split(CHAIN_END_BLOCKS);
        append.chain = Some(OpenChain { first, holders: 1, joined: 1, has_frames: false, end });
        self.chain_first.store(first, Ordering::Release);
        Ok(Some(first))
    }

    /// Closes a chain that the caller has opened or joined: it ends when this was the last.
    pub fn close_chain(&self) {
        let mut append = self.append.lock();
        let Some(chain) = &mut append.chain else {
            debug_assert!(false, "a chain is closed once by each who opened it");
            return;
        };
        chain.holders -= 1;
        if chain.holders > 0 {
            return;
        }
        if let Some(chain) = append.chain.take() {
            append.end_chain(chain);
        }
        self.last.store(append.next_lsn - 1, Ordering::Release);
        self.chain_first.store(NO_CHAIN, Ordering::Release);
        let mut commit = self.commit.lock();
        drop(append);
        commit.core.release_held();
        for (lsn, callback) in std::mem::take(&mut commit.held) {
            self.arrive(&mut commit, lsn, callback, false);
        }
        let mut out = Outbox::default();
        Self::call(&mut commit, Beside::All, &mut out);
        self.chain_closed.notify_all();
        drop(commit);
        out.send(&self.driver_wake);
    }

    /// Some chain is open.
    pub fn has_open_chain(&self) -> bool {
        self.chain_first.load(Ordering::Acquire) != NO_CHAIN
    }

    /// `lsn` lies in a chain that is open.
    pub fn in_open_chain(&self, lsn: Lsn) -> bool {
        let first = self.chain_first.load(Ordering::Acquire);
        first != NO_CHAIN && lsn >= first
    }

    /// The moment to compare with in [`Log::wait_chain`]; take it before looking for work.
    pub fn chain_moment(&self) -> u64 {
        self.commit.lock().chain_moment
    }

    /// There is work that brings a chain nearer to its end: whoever waits for that may do it.
    pub fn note_chain_work(&self) {
        self.commit.lock().chain_moment += 1;
        self.chain_closed.notify_all();
    }

    /// Waits until no chain is open that `lsn` lies in; or, with `since`, until there is work that was not there at that
    /// moment.
    ///
    /// # Errors
    /// The log is shut down.
    pub fn wait_chain(&self, lsn: Lsn, since: Option<u64>) -> Result<()> {
        if !self.in_open_chain(lsn) {
            return Ok(());
        }
        let mut commit = self.commit.lock();
        while self.in_open_chain(lsn) {
            if let Some(reason) = &commit.shutdown_reason {
                return Err(reason.clone());
            }
            if since.is_some_and(|moment| moment != commit.chain_moment) {
                return Ok(());
            }
            self.chain_closed.wait(&mut commit);
        }
        Ok(())
    }

    /// Ends the open frame and the running transaction: later operations belong to the checkpoint
    /// `next_transaction`. Microseconds, no I/O. `None`: a chain is open; no other is opened before the boundary was
    /// made, so the caller waits for that one to close and comes again.
    pub fn seal(&self, next_transaction: u64) -> Option<Boundary> {
        let mut append = self.append.lock();
        append.boundary_wanted = append.chain.is_some();
        if append.boundary_wanted {
            return None;
        }
        append.seal_open();
        append.transaction = next_transaction;
        Some(Boundary { lsn: append.next_lsn - 1 })
    }

    /// What waits for a chain to close hears that the log has failed.
    pub(super) fn fail_chain(&self, commit: &mut super::Commit) {
        for (lsn, callback) in std::mem::take(&mut commit.held) {
            self.arrive(commit, lsn, callback, false);
        }
        self.chain_closed.notify_all();
    }
}

impl Appender {
    /// Whether the frame that is being sealed is not the last of its chain.
    pub(super) fn note_sealed(&mut self) -> bool {
        let chain = self.chain.as_mut();
        chain.is_some_and(|chain| {
            chain.has_frames = true;
            true
        })
    }

    /// The chain ends with what was appended last.
    fn end_chain(&mut self, chain: OpenChain) {
        let OpenChain { first, has_frames, end, .. } = chain;
        let exists = self.next_lsn > first;
        if exists && (!self.open.is_empty() || !has_frames) {
            // The open frame is the last one.
        } else if exists && let Some(last) = self.sealed.back_mut() {
            last.continues = false;
        } else {
            // All frames are on their way, each saying that another follows; or nobody has appended anything.
            let mut filler = OpRecords::new();
            filler.next_inode(1);
            self.add(&mut filler, u64::MAX);
        }
        drop(end);
    }
}
