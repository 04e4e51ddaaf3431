//! What is done with a crash image beside comparing it once: recovery under closer examination, and use of what it
//! leaves.

use std::sync::Arc;

use super::failure::{Failure, guard};
use super::{Depth, Explorer, Leaky, Recovered, Run, let_go};
use crate::clock::SimClock;
use crate::device::SimDevice;
use crate::disk::{DiskState, Event};
use crate::image::Image;
use crate::model::Model;
use crate::model::compare::{Blocks, Disk, Strictness};
use crate::model::found::Found;
use crate::model::history::History;
use crate::system::{Session, System};
use crate::workload;

impl<S: System> Explorer<'_, S> {
    /// Mounts, reads everything and compares. `None`: a lying disk made it unreadable.
    pub(super) fn recover(
        &self,
        device: &Arc<SimDevice>,
        clock: &Arc<SimClock>,
        history: &History,
    ) -> Result<Option<Recovered<S>>, Failure> {
        let settings = &self.case.settings;
        let silent = self.case.silent_faults;
        let mut session = match guard("recovering", || self.system.open(device, clock, settings))? {
            Ok(session) => Leaky::new(session),
            Err(error) if silent && error.is_environmental() => return Ok(None),
            Err(error) => return Err(Failure::new(format!("recovery failed: {error}"))),
        };
        let found = match guard("reading the recovered volume", || session.found())? {
            Ok(found) => found,
            Err(error) if silent && error.is_environmental() => {
                let_go(session)?;
                return Ok(None);
            }
            Err(error) => {
                return Err(Failure::new(format!("the recovered volume cannot be read: {error}")));
            }
        };
        let state = history.find(&found, self.strictness()).map_err(|mismatch| {
            Failure::new("the recovered volume is not a state that the history allows")
                .with(mismatch.lines)
        })?;
        Ok(Some((session, found, state)))
    }

    /// fsck of what a recovery has left, and a look at whether what the volume answers agrees. What old frames the ring holds makes no
    /// difference: the log is empty.
    pub(super) fn check(
        &mut self,
        device: &Arc<SimDevice>,
        recovered: Option<(&S::Session, &Found)>,
    ) -> Result<(), Failure> {
        let image = device.view();
        let ring = self.system.leftovers(&self.case.settings);
        if !self.sound.insert(image.hash_without(ring)) {
            return Ok(());
        }
        if let Some((session, found)) = recovered {
            let lines = guard("asking twice", || session.contradictions(found))?;
            if !lines.is_empty() {
                return Err(Failure::new("the recovered volume contradicts itself").with(lines));
            }
        }
        let image = self.device(image, Default::default());
        match guard("checking the recovered volume", || self.system.check(&image))? {
            Ok(defects) if defects.is_empty() => Ok(()),
            Ok(defects) => Err(Failure::new("fsck finds defects after recovery").with(defects)),
            Err(error) => Err(Failure::new(format!("fsck failed after recovery: {error}"))),
        }
    }

    /// Crashes again during the recovery that `events` record.
    pub(super) fn recrash(
        &mut self,
        image: &Image,
        events: &[Event],
        history: &History,
        elapsed_ns: u64,
    ) -> Result<(), Failure> {
        let mut disk = DiskState::new(image.clone());
        let writes = events.iter().filter(|event| matches!(event, Event::Write(_))).count() as u64;
        let budget = self.case.limits.outcomes_per_inner_point;
        for event in events {
            disk.apply(event);
            let is_write = matches!(event, Event::Write(_));
            if matches!(event, Event::Complete(_)) || is_write && self.rng.below(writes) >= 6 {
                continue;
            }
            let when = "second crash during recovery";
            self.verify_outcomes(&disk, (is_write, budget), history, elapsed_ns, when)?;
        }
        Ok(())
    }

    /// Recovers from what `disk` may hold after a crash at this moment, `when`.
    fn verify_outcomes(
        &mut self,
        disk: &DiskState,
        (in_write, budget): (bool, usize),
        history: &History,
        elapsed_ns: u64,
        when: &str,
    ) -> Result<(), Failure> {
        for outcome in disk.outcomes(in_write, budget, &mut self.rng) {
            let image = disk.image_after(&outcome);
            self.verify(&image, history, elapsed_ns, Depth::Recovery).map_err(|failure| {
                failure
                    .with([format!("{when}, with these writes pending:")])
                    .with(disk.describe(&outcome).into_iter().map(|line| format!("  {line}")))
            })?;
        }
        Ok(())
    }

    /// Recovers on a disk that fails somewhere on the way: the recovery may fail, but what it leaves must still
    /// be recoverable.
    pub(super) fn faulty_recovery(
        &mut self,
        image: &Image,
        history: &History,
        elapsed_ns: u64,
    ) -> Result<(), Failure> {
        let faults = workload::faults::draw_errors(&mut self.rng);
        let seed = self.rng.below(u64::MAX);
        let device = self.device(image.clone(), (faults, seed));
        let clock = Arc::new(SimClock::starting_at(elapsed_ns));
        let settings = &self.case.settings;
        let opened =
            guard("recovering on a failing disk", || self.system.open(&device, &clock, settings));
        self.tally.faults += device.faults_struck();
        match opened.map_err(|failure| failure.with_trace(&device))? {
            Ok(session) => {
                let wrong = "what a failing disk was opened as is not an allowed state";
                Self::look_on(Disk::Failing, session, history, wrong)
                    .map_err(|failure| failure.with_trace(&device))?;
            }
            Err(error) if error.is_environmental() => {}
            Err(error) => {
                let text = format!("recovery on a failing disk failed in an odd way: {error}");
                return Err(Failure::new(text).with_trace(&device));
            }
        }
        let disk = device.disk_state();
        let budget = self.case.limits.outcomes_per_inner_point;
        let when = "after a recovery on a failing disk";
        self.verify_outcomes(&disk, (false, budget), history, elapsed_ns, when)
            .map_err(|failure| failure.with_trace(&device))
    }

    /// What opens on a disk that fails or lies shows an allowed state, or says that it cannot be read; else this is `wrong`.
    fn look_on(
        disk: Disk,
        session: S::Session,
        history: &History,
        wrong: &str,
    ) -> Result<(), Failure> {
        let mut session = Leaky::new(session);
        if let Ok(found) = guard("reading on a bad disk", || session.found())? {
            let strictness = Strictness { disk, ..Strictness::CRASH };
            history
                .find(&found, strictness)
                .map_err(|mismatch| Failure::new(wrong).with(mismatch.lines))?;
        }
        let_go(session)
    }

    /// Recovers on a disk that lies once: the volume does not open, or what can be read is some state of the history, be it
    /// one before what was acknowledged (a frame that rots looks like one that was never written).
    pub(super) fn lied_to(
        &mut self,
        image: &Image,
        history: &History,
        elapsed_ns: u64,
    ) -> Result<(), Failure> {
        let faults = workload::faults::draw_lie(&self.case.settings, &mut self.rng);
        let seed = self.rng.below(u64::MAX);
        let device = self.device(image.clone(), (faults, seed));
        let clock = Arc::new(SimClock::starting_at(elapsed_ns));
        let settings = &self.case.settings;
        let checked = (|| {
            let opened =
                guard("recovering on a lying disk", || self.system.open(&device, &clock, settings));
            match opened? {
                Ok(session) => {
                    let wrong = "a disk that lies once makes a volume that never was";
                    Self::look_on(Disk::Lying, session, history, wrong)
                }
                Err(error) if error.is_environmental() => Ok(()),
                Err(error) => {
                    let text = format!("recovery on a lying disk failed in an odd way: {error}");
                    Err(Failure::new(text))
                }
            }
        })();
        self.tally.faults += device.faults_struck();
        checked.map_err(|failure| failure.with_trace(&device))
    }

    /// Opens the image for reading only: what it shows is allowed, and the disk is as it was.
    pub(super) fn look_only(
        &self,
        image: &Image,
        history: &History,
        elapsed_ns: u64,
    ) -> Result<(), Failure> {
        let device = self.device(image.clone(), Default::default());
        let clock = Arc::new(SimClock::starting_at(elapsed_ns));
        let settings = &self.case.settings;
        let looked = (|| {
            let opened = guard("opening for reading only", || {
                self.system.open_read_only(&device, &clock, settings)
            })?;
            let failed = |error| Failure::new(format!("opened for reading only: {error}"));
            let Some(session) = opened.map_err(failed)? else { return Ok(()) };
            let mut session = Leaky::new(session);
            let found = guard("reading a volume that is open for that only", || session.found())?;
            // What is in the log only stays in memory, and nothing is cleaned up.
            let strictness = Strictness { blocks: Blocks::Uncut, ..self.strictness() };
            history.find(&found.map_err(failed)?, strictness).map_err(|mismatch| {
                Failure::new("a volume that is open for reading only is not an allowed state")
                    .with(mismatch.lines)
            })?;
            let_go(session)?;
            match device.take_events().first() {
                None => Ok(()),
                Some(_) => Err(Failure::new("who reads only has written")),
            }
        })();
        looked.map_err(|failure| failure.with_trace(&device))
    }

    /// Uses the recovered volume, and crashes it again.
    pub(super) fn go_on(
        &mut self,
        session: Leaky<S::Session>,
        device: &Arc<SimDevice>,
        clock: &Arc<SimClock>,
        (found, state): (&Found, &Model),
    ) -> Result<(), Failure> {
        let mut model = Model::from_found(found).with_allocations_of(state);
        model.set_atime_policy(self.case.settings.atime);
        if super::reading_moves_times(self.case) {
            model.was_read(clock.span_since(0));
        }
        let ops = workload::followup(&model, &mut self.rng);
        device.take_events();
        // The recovery's own last writes may still be pending.
        let start = (device.disk_state(), model);
        let mut run = Run::new(device, clock, session, start, Depth::Later);
        let examined = self.examine_point(&mut run, false, "right after the recovery");
        match examined.and_then(|()| self.run_ops(&mut run, &ops)) {
            Ok(_) => let_go(run.session),
            Err(failure) => {
                let log = run.log.into_iter().map(|line| format!("  {line}"));
                Err(failure.with(["in use after the recovery:".to_owned()]).with(log))
            }
        }
    }
}
