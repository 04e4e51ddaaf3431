//! A caller that takes the writer's role before it appends: the data of its operation is written at the same time as the frame that
//! names it.
//!
//! An operation that maps new blocks says what they must hold (`wrote`), and recovery cuts the unflushed tail before the first frame whose
//! blocks hold something else. So a frame need not come after its data on the device. It is enough that nobody counts it as written, and no flush as
//! covering it, before the data is there too. While somebody leads nobody else writes frames, and those of the lead count as written
//! when it ends.
//!
//! **Invariants.** Frames of a lead count as written in order, after all that was written beside them. When some of that could not be
//! written, a later frame of the same lead says so (the pages themselves, as payload), and all of them count together; or the log shuts down.
//! Whoever leads waits for the device, and for locks that are held for computing only.

use super::stats::add;
use super::waiter::Outbox;
use super::{Log, Lsn};
use crate::device::{DeviceError, DeviceResult, IoClass, Request};
use crate::mutation::{self, Mutation};
use crate::{Error, Result};

/// See the module's head.
#[must_use = "nobody else writes frames before it ends"]
pub struct Lead<'a> {
    log: &'a Log,
    /// Frames that are on the device and do not count yet: the last LSN of each, and whether a batch goes on behind it.
    uncounted: Vec<(Lsn, bool)>,
    /// Of what was to be written beside a frame, and is not made up for.
    failed: Option<DeviceError>,
}

/// What is written at the same time as a frame, and what became of it.
pub(super) struct Companions {
    pub requests: Vec<Request>,
    pub results: Vec<DeviceResult<()>>,
    /// Of the frames' writes: those of a lead are of its pages' class, whether or not these go along, because others may wait for
    /// the pages until the lead ends.
    pub class: IoClass,
}

impl Companions {
    /// Frames of the log alone.
    pub fn none() -> Self {
        Self { requests: Vec::new(), results: Vec::new(), class: IoClass::Log }
    }
}

impl Log {
    /// Takes the writer's role, if it is free: the caller appends next. Never waits.
    pub fn try_lead(&self) -> Option<Lead<'_>> {
        let leads = self.commit.lock().core.lead();
        leads.then(|| Lead { log: self, uncounted: Vec::new(), failed: None })
    }
}

impl Lead<'_> {
    /// Writes all that was appended so far, and `requests` at the same time. Answers the first error of these, which has to be made up for:
    /// append what does, call [`Lead::made_up`], and write again.
    ///
    /// # Errors
    /// A frame could not be written: the log is shut down.
    pub fn write(&mut self, requests: Vec<Request>) -> Result<Option<DeviceError>> {
        let log = self.log;
        let bytes: u64 = requests.iter().map(|request| request.buffers.bytes()).sum();
        let mut group = log.append.lock().take_group();
        // Forced unit access would leave out what is written beside.
        let _ = log.begin_group(&group, None);
        let class = IoClass::Beside;
        let mut companions = Companions { requests, results: Vec::new(), class };
        let mut written = Ok(());
        for frame in &mut group {
            written = log.write_frame_beside(frame, &mut false, &mut companions);
            if written.is_err() {
                break;
            }
            self.uncounted.push((frame.last_lsn, frame.continues));
        }
        log.recycle_group(group);
        log.write_companions(&mut companions);
        if bytes > 0 {
            log.note_data_written();
            add(&log.stats.beside_bytes, bytes);
        }
        if let Err(error) = written {
            self.shut_down(error.clone());
            return Err(error);
        }
        if mutation::active(Mutation::CountWithoutData) {
            return Ok(None);
        }
        let error = companions.results.into_iter().find_map(std::result::Result::err);
        if error.is_some() {
            self.failed.clone_from(&error);
        }
        Ok(error)
    }

    /// What could not be written is made up for by what was appended since.
    pub fn made_up(&mut self) {
        self.failed = None;
    }

    /// The frames count as written. Shuts the log down if something is missing on the device.
    pub fn end(self) {}

    fn shut_down(&mut self, error: Error) {
        self.uncounted.clear();
        let mut out = Outbox::default();
        let mut commit = self.log.commit.lock();
        self.log.fail(&mut commit, error, &mut out);
        drop(commit);
        out.send(&self.log.driver_wake);
    }
}

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        if let Some(error) = self.failed.take() {
            self.shut_down(error.into());
        }
        let mut out = Outbox::default();
        let mut commit = self.log.commit.lock();
        if !commit.core.is_failed() {
            for (last_lsn, continues) in self.uncounted.drain(..) {
                commit.core.frame_written(last_lsn, continues, &mut out.reached);
            }
        }
        commit.core.end_write();
        Log::call(&mut commit, super::core::Beside::All, &mut out);
        drop(commit);
        out.send(&self.log.driver_wake);
    }
}
