//! Asynchronous syncs: the request is submitted, a ticket is held.
//!
//! Submission does what needs no waiting: if the dirty pages of the range are few, none is under writeback and the log has
//! room, they go into the open frame at once, and the log's thread (or a blocked caller who leads anyway) makes them durable with
//! everybody else's. All else is left to the sync threads: sending many pages home, waiting for writeback or for log space, or until a log
//! that is nearly full has been emptied. So a thousand small syncs share a flush, and a large one delays none of them: one of the threads does
//! small ones only.

use super::fsync::SyncKind;
use crate::background::Jobs;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::inode::Inode;
use crate::log::OnDurable;
use crate::mutation::{self, Mutation};
use crate::sync::Arc;
use crate::sync::atomic::Ordering;
use crate::ticket::{Hurry, Promise, PromiseOwner, SyncTicket, ticket};
use crate::txn::Lsn;
use std::ops::Range;

/// Most tickets of a volume that have not ended.
pub const MAX_TICKETS: u64 = 1 << 18;

/// What a submission does when [`MAX_TICKETS`] have not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WhenFull {
    /// Answers [`Error::WouldBlock`].
    #[default]
    WouldBlock,
    /// Waits until one has ended.
    Wait,
}

/// A request that could not be done at submission.
pub enum SyncJob {
    /// Part of a file.
    File {
        /// Which.
        inode: Arc<Inode>,
        /// Bytes.
        range: Range<u64>,
        /// How much of it.
        kind: SyncKind,
        /// When it was submitted.
        began_ns: u64,
        /// Whom to tell.
        promise: Promise,
    },
    /// Everything.
    Volume {
        /// When it was submitted.
        began_ns: u64,
        /// Whom to tell.
        promise: Promise,
    },
}

impl Hurry for Engine {
    fn hurry(&self) {
        self.log.hurry();
    }
}

impl PromiseOwner for Engine {
    fn end(&self, promise: Promise, result: Result<()>) {
        if let Err(error) = &result {
            self.shut_down_after(error);
        }
        self.end_ticket(promise, result);
    }
}

impl Engine {
    /// Submits a sync of bytes `range` of `inode`.
    pub fn fsync_async(
        self: &Arc<Self>,
        inode: &Arc<Inode>,
        range: Range<u64>,
        kind: SyncKind,
    ) -> Result<SyncTicket> {
        self.fsync_async_with(inode, range, kind, WhenFull::WouldBlock)
    }

    /// As [`Engine::fsync_async`]; `when_full` says what happens when there are too many tickets.
    pub fn fsync_async_with(
        self: &Arc<Self>,
        inode: &Arc<Inode>,
        range: Range<u64>,
        kind: SyncKind,
        when_full: WhenFull,
    ) -> Result<SyncTicket> {
        self.check_shutdown()?;
        self.admit_ticket(when_full)?;
        if self.options.read_only {
            return Ok(self.ended_ticket());
        }
        let (ticket, promise) = ticket(Some(Arc::<Self>::clone(self)));
        let began_ns = self.clock.monotonic_ns();
        match self.prepare_at_once(inode, range.clone(), kind, true) {
            Ok(Some(lsn)) => {
                self.counters.count_sync(self.clock.since_ns(began_ns));
                self.promise_patiently(lsn, true, promise);
            }
            Ok(None) => {
                let is_small = self.fits_frame(inode, &range);
                let inode = inode.clone();
                self.defer(SyncJob::File { inode, range, kind, began_ns, promise }, is_small);
            }
            Err(error) => self.end_ticket(promise, Err(error)),
        }
        Ok(ticket)
    }

    /// Submits a sync of the whole volume.
    pub fn sync_async(self: &Arc<Self>) -> Result<SyncTicket> {
        self.check_shutdown()?;
        self.admit_ticket(WhenFull::WouldBlock)?;
        if self.options.read_only {
            return Ok(self.ended_ticket());
        }
        let (ticket, promise) = ticket(None);
        let began_ns = self.clock.monotonic_ns();
        self.defer(SyncJob::Volume { began_ns, promise }, false);
        Ok(ticket)
    }

    /// A ticket for everything up to `lsn`.
    pub fn ticket_for(self: &Arc<Self>, lsn: Lsn) -> Result<SyncTicket> {
        self.check_shutdown()?;
        self.admit_ticket(WhenFull::WouldBlock)?;
        let (ticket, promise) = ticket(None);
        self.promise_at(lsn, promise);
        Ok(ticket)
    }

    /// A ticket for the durability of what `operation` does.
    ///
    /// # Errors
    /// Those of `operation`; [`Error::WouldBlock`] when too many tickets have not ended: then it was not done.
    pub fn ticket_after<E: From<Error>>(
        self: &Arc<Self>,
        operation: impl FnOnce() -> Result<Lsn, E>,
    ) -> Result<SyncTicket, E> {
        self.admit_ticket(WhenFull::WouldBlock)?;
        let lsn = operation().inspect_err(|_| {
            if self.give_ticket_back() {
                self.background.progress();
            }
        })?;
        let (ticket, promise) = ticket(None);
        self.promise_at(lsn, promise);
        Ok(ticket)
    }

    fn admit_ticket(self: &Arc<Self>, when_full: WhenFull) -> Result<()> {
        loop {
            if self.take_ticket() {
                return Ok(());
            }
            let moment = self.background.moment();
            // One may have ended before that moment.
            if self.take_ticket() {
                return Ok(());
            }
            if when_full == WhenFull::WouldBlock {
                return Err(Error::WouldBlock);
            }
            self.check_shutdown()?;
            if self.background.has_threads() {
                self.background.wait_progress(moment);
            } else if !(self.barrier_step() | self.sync_step(Jobs::All) | self.log.drive()) {
                return Err(Error::WouldBlock);
            }
        }
    }

    /// Counts one more ticket, unless there are too many.
    fn take_ticket(&self) -> bool {
        // One that is refused is never counted: two that wait would each find the other's and sleep, with one to be had.
        let one_more = |tickets| (tickets < MAX_TICKETS).then_some(tickets + 1);
        self.tickets.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).is_ok()
    }

    /// Counts one less. True: there were as many as may be, and somebody may wait for one to end.
    fn give_ticket_back(&self) -> bool {
        self.tickets.fetch_sub(1, Ordering::AcqRel) >= MAX_TICKETS
    }

    /// The ticket of a sync of a volume that is open for reading only: there is nothing to make durable.
    fn ended_ticket(&self) -> SyncTicket {
        let (ticket, promise) = ticket(None);
        self.end_ticket(promise, Ok(()));
        ticket
    }

    fn end_ticket(&self, promise: Promise, result: Result<()>) {
        let was_full = self.give_ticket_back();
        promise.complete(self.counters.count_failed(result));
        if was_full {
            self.background.progress();
        }
    }

    /// Completes `promise` when `lsn` is durable.
    fn promise_at(self: &Arc<Self>, lsn: Lsn, promise: Promise) {
        self.promise_patiently(lsn, false, promise);
    }

    /// As [`Engine::promise_at`]; `patient`: nobody waits for it yet.
    fn promise_patiently(self: &Arc<Self>, lsn: Lsn, patient: bool, promise: Promise) {
        if lsn <= self.log.durable_lsn() {
            self.log.note_found_durable();
            return self.end_ticket(promise, Ok(()));
        }
        let owner = Arc::<Self>::clone(self);
        self.log.commit_async(lsn, patient, OnDurable { owner, promise });
        // Beside somebody who closes the volume: either he finds it, or it is done here.
        if self.background.has_ended() {
            while self.log.drive() {}
        }
    }

    fn defer(&self, job: SyncJob, is_small: bool) {
        if let Err(job) = self.background.defer(job, is_small) {
            self.refuse_job(job);
        }
    }

    /// The volume has no threads any more that could do `job`.
    pub fn refuse_job(&self, job: SyncJob) {
        let (SyncJob::File { promise, .. } | SyncJob::Volume { promise, .. }) = job;
        let reason = "the volume was closed, or dropped, before this sync was done";
        self.end_ticket(promise, Err(Error::Shutdown(reason.to_owned())));
    }

    /// Does one deferred request of `jobs`. False: there is none.
    pub fn sync_step(self: &Arc<Self>, jobs: Jobs) -> bool {
        let Some(job) = self.background.next_job(jobs) else { return false };
        self.run_job(job);
        true
    }

    /// What a sync thread does with a request.
    pub fn run_job(self: &Arc<Self>, job: SyncJob) {
        self.wait_for_log(None);
        match job {
            SyncJob::File { promise, .. }
                if mutation::active(Mutation::CancelDropped) && promise.is_unheard() =>
            {
                self.end_ticket(promise, Ok(()));
            }
            SyncJob::File { inode, range, kind, began_ns, promise } => {
                match self.prepare_sync(&inode, range, kind) {
                    Ok(lsn) => {
                        self.counters.count_sync(self.clock.since_ns(began_ns));
                        self.promise_at(lsn, promise);
                    }
                    Err(error) => self.end_ticket(promise, Err(error)),
                }
            }
            SyncJob::Volume { began_ns, promise } => match self.prepare_all() {
                Ok(lsn) => {
                    self.counters.count_volume_sync(self.clock.since_ns(began_ns));
                    self.promise_at(lsn, promise);
                }
                Err(error) => self.end_ticket(promise, Err(error)),
            },
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::txn::volume_with_a_file;

    #[test]
    fn who_waits_for_a_ticket_to_end_hears_of_one_that_came_to_nothing() {
        let (_volume, file) = volume_with_a_file();
        let engine = file.engine();
        engine.tickets.store(MAX_TICKETS - 1, Ordering::Release);
        let moment = engine.background.moment();
        let failed = engine.ticket_after(|| {
            let other = file.fsync_async(0..1, SyncKind::Data).map(drop);
            assert_eq!(other, Err(Error::WouldBlock), "this is the last");
            Err(Error::NotFound)
        });
        assert_eq!(failed.map(drop), Err(Error::NotFound));
        assert_ne!(engine.background.moment(), moment);
        assert_eq!(engine.tickets.load(Ordering::Acquire), MAX_TICKETS - 1);
        engine.tickets.store(0, Ordering::Release);
        file.fsync_async(0..1, SyncKind::Data).expect("there is room").wait_timeout(0);
    }
}
