//! Runs a workload once and examines the crash states it passes through.
//!
//! The workload runs on one [`SimDevice`]; after each operation the device's record is walked event
//! by event, and at every write (and wherever a sync was acknowledged) images that a power cut may leave are
//! made from the durable image and the pending writes. Each image is mounted, read
//! back, compared with the states the [`History`] allows, and checked with fsck. A sample is crashed
//! again *during* that recovery, and a sample goes on: more operations, syncs, and crashes of the
//! recovered volume, which must not lose what the recovery showed.

mod execute;
pub mod failure;
mod overlap;
mod recovery;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use weir::{AtimePolicy, BackgroundWork};

use crate::clock::SimClock;
use crate::device::{Completion, DeviceConfig, SimDevice};
use crate::disk::{DiskState, Event};
use crate::fault::FaultPlan;
use crate::image::Image;
use crate::model::compare::{Blocks, Disk, Strictness, compare};
use crate::model::found::Found;
use crate::model::history::{Durable, History};
use crate::model::{Model, errno};
use crate::op::{Op, Sync};
use crate::rng::Rng;
use crate::system::{Session, Settings, System, SystemError};
use execute::Executed;
use failure::describe;
pub use failure::{Failure, guard};

/// How much to examine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Crash images at a point of the workload.
    pub outcomes_per_point: usize,
    /// Crash images at a point of a recovery, or of what follows one.
    pub outcomes_per_inner_point: usize,
    /// Of how many crash states one is crashed again during its recovery; 0: none.
    pub recrash_one_in: u64,
    /// Of how many crash states one is used on; 0: none.
    pub go_on_one_in: u64,
    /// Of how many crash states one is recovered once more, on a disk that lies; 0: none.
    pub lie_one_in: u64,
    /// Of how many points one is continued after the program died but the disk stayed up, its cache
    /// filled; 0: none.
    pub kill_one_in: u64,
    /// Crash states of a case; after that many the workload goes on without crashes.
    pub states_per_case: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            outcomes_per_point: 12,
            outcomes_per_inner_point: 3,
            recrash_one_in: 16,
            go_on_one_in: 32,
            lie_one_in: 24,
            kill_one_in: 16,
            states_per_case: u64::MAX,
        }
    }
}

/// A workload with everything it starts from.
#[derive(Debug, Clone)]
pub struct Case {
    /// For people: what kind of workload, which number.
    pub name: String,
    /// Draws crash images and everything else that is sampled.
    pub seed: u64,
    /// How the volume was made and is opened.
    pub settings: Settings,
    /// The volume at the start.
    pub image: Image,
    /// What is on it.
    pub model: Model,
    /// What to do.
    pub ops: Vec<Op>,
    /// What goes wrong meanwhile.
    pub faults: FaultPlan,
    /// The disk lies: what cannot be read is not held against the volume.
    pub silent_faults: bool,
    /// How much to examine.
    pub limits: Limits,
}

/// What was examined.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Crash states mounted and verified.
    pub states: u64,
    /// Of these: crashed during recovery.
    pub recovery_states: u64,
    /// Of these: crashed after a recovery and more work.
    pub later_states: u64,
    /// Crash states skipped because an equal one was verified before.
    pub duplicates: u64,
    /// Operations executed (without those after a recovery).
    pub operations: u64,
    /// Of these: begun in the midst of another one.
    pub overlapped: u64,
    /// Frames of the log that two callers had on their way at the same time, counted by the second.
    pub joined: u64,
    /// Operations that failed for lack of space or a fault.
    pub refused: u64,
    /// Device calls that a fault struck.
    pub faults: u64,
    /// Of these: during a call amid which others went on, that call included.
    pub faults_amid: u64,
}

impl Tally {
    /// Adds another tally.
    pub const fn add(&mut self, other: &Self) {
        self.states += other.states;
        self.recovery_states += other.recovery_states;
        self.later_states += other.later_states;
        self.duplicates += other.duplicates;
        self.operations += other.operations;
        self.overlapped += other.overlapped;
        self.joined += other.joined;
        self.refused += other.refused;
        self.faults += other.faults;
        self.faults_amid += other.faults_amid;
    }
}

/// How deep a session is below the workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Depth {
    Workload,
    Recovery,
    Later,
}

/// Numbers of the threads of a case, whatever other threads there are.
pub(crate) const FIRST_CALLER: usize = 0;
/// Of who goes on amid the first one's calls.
pub(crate) const SECOND_CALLER: usize = 1;

/// Of how many crash images one is opened for reading only as well.
const READ_ONLY_ONE_IN: u64 = 24;

/// After how many operations the living volume is compared with the model.
const LOOK_ONE_IN: u64 = 12;

/// More steps of driving the log than this mean that it never comes to rest.
const DRIVE_STEPS: u32 = 10_000;

/// A session that is dropped only on purpose: after a panic in its midst, dropping it may wait for ever
/// for what the panic has left half done.
type Leaky<S> = std::mem::ManuallyDrop<S>;

/// A session after recovery, what it shows, and the state of the history that this is.
type Recovered<S> = (Leaky<<S as System>::Session>, Found, Arc<Model>);

/// Lets a session go without unmounting: the process dies, but not in a panic.
fn let_go<S>(session: Leaky<S>) -> Result<(), Failure> {
    guard("dropping the volume", || drop(Leaky::into_inner(session)))
}

/// A sync that was asked for and has not ended.
struct InFlight {
    /// The present of that time.
    then: Arc<Model>,
    durable: Durable,
    text: String,
}

/// Hears that one of several overlapping operations has begun or returned.
type OnOverlap<'a, E, S> = &'a mut dyn FnMut(&mut E, &mut Run<S>, &Event) -> Result<(), Failure>;

/// A mounted volume and what is known about it.
struct Run<S> {
    device: Arc<SimDevice>,
    clock: Arc<SimClock>,
    session: Leaky<S>,
    disk: DiskState,
    history: History,
    seen: HashSet<(u64, u64)>,
    log: Vec<String>,
    depth: Depth,
    tickets: BTreeMap<u32, InFlight>,
    /// Those that nobody has kept: nobody hears of their end.
    dropped: Vec<InFlight>,
    /// Last log sequence numbers of operations, and the present after them.
    lsns: BTreeMap<u64, Arc<Model>>,
    /// What the engine was seen to claim as durable.
    durable_lsn: u64,
}

impl<S: Session> Run<S> {
    fn new(
        device: &Arc<SimDevice>,
        clock: &Arc<SimClock>,
        session: Leaky<S>,
        (disk, model): (DiskState, Model),
        depth: Depth,
    ) -> Self {
        Self {
            device: Arc::clone(device),
            clock: Arc::clone(clock),
            session,
            disk,
            history: History::new(model),
            seen: HashSet::new(),
            log: Vec::new(),
            depth,
            tickets: BTreeMap::new(),
            dropped: Vec::new(),
            lsns: BTreeMap::new(),
            durable_lsn: device.claimed_lsn().unwrap_or(0),
        }
    }

    /// The engine says that everything up to `lsn` of its log is durable: that are all operations that had
    /// returned when the log was this long.
    fn learn_durable(&mut self, lsn: u64) {
        self.durable_lsn = self.durable_lsn.max(lsn);
        let later = self.lsns.split_off(&(lsn + 1));
        let reached = std::mem::replace(&mut self.lsns, later);
        if let Some((known, model)) = reached.into_iter().max_by_key(|(_, model)| model.step()) {
            let by = format!("durable_lsn() >= {known} (operation count {})", model.step());
            self.history.acknowledge_at(&model, &Durable::Prefix, &by);
        }
    }

    /// `present`, or the present after all that had returned, is durable as soon as `lsn` is: this was answered (`is_told`), or is the last one there
    /// is. Not the last one if a barrier has answered a later one: that does not exist yet.
    fn note_lsn_as(&mut self, lsn: u64, present: &Arc<Model>, is_told: bool) {
        if is_told || self.lsns.last_key_value().is_none_or(|(last, _)| *last <= lsn) {
            self.lsns.insert(lsn, Arc::clone(present));
        }
        // What is durable already: so is this.
        if is_told && self.durable_lsn >= lsn {
            self.learn_durable(lsn);
        }
    }

    fn note_lsn(&mut self, is_told: bool) {
        if let Some(lsn) = self.session.last_lsn() {
            let present = Arc::clone(self.history.now());
            self.note_lsn_as(lsn, &present, is_told);
        }
    }
}

struct Explorer<'a, S> {
    system: &'a S,
    case: &'a Case,
    rng: Rng,
    /// Draws when to look at the living volume: the crash states are the same whether anybody does.
    looks: Rng,
    tally: Tally,
    /// Recovered volumes that fsck has found sound in this case, by hash: many crash images recover to the same one.
    sound: HashSet<u64>,
}

/// Runs `case` on `system`.
///
/// # Errors
/// The first finding. The tally is of what was examined until then.
pub fn explore<S: System>(system: &S, case: &Case) -> (Tally, Result<(), Failure>) {
    weir::stats::set_thread_part(FIRST_CALLER);
    let (rng, looks) = (Rng::derived(case.seed, 0xE0), Rng::derived(case.seed, 0xE1));
    let mut explorer =
        Explorer { system, case, rng, looks, tally: Tally::default(), sound: HashSet::new() };
    let result = explorer.run_case();
    (explorer.tally, result)
}

/// Prepares a start: makes a volume, applies `ops` and unmounts.
///
/// # Errors
/// Anything that goes wrong: without crashes and faults nothing may.
pub fn prepare<S: System>(
    system: &S,
    settings: &Settings,
    ops: &[Op],
) -> Result<(Image, Model), Failure> {
    weir::stats::set_thread_part(FIRST_CALLER);
    let image = Image::zeroed(settings.volume_blocks);
    let device = Arc::new(SimDevice::new(image, DeviceConfig::default()));
    let clock = Arc::new(SimClock::new());
    let failed = |what: &str, error: &SystemError| Failure::new(format!("{what}: {error}"));
    guard("creating the volume", || system.create(&device, &clock, settings))?
        .map_err(|error| failed("create failed", &error))?;
    let mut session = guard("mounting the new volume", || system.open(&device, &clock, settings))?
        .map_err(|error| failed("mounting the new volume failed", &error))?;
    let mut model = Model::new();
    model.set_atime_policy(settings.atime);
    for op in ops {
        let expected = model.apply(op, None);
        let result = guard(&format!("executing {op}"), || session.apply(op))?;
        if expected.is_err() || result.is_err() {
            return Err(Failure::new(format!("start: {op}: {result:?}, expected {expected:?}")));
        }
    }
    guard("unmounting", || session.close())?
        .map_err(|error| failed("unmounting failed", &error))?;
    let mut session =
        guard("mounting the prepared volume", || system.open(&device, &clock, settings))?
            .map_err(|error| failed("mounting the prepared volume failed", &error))?;
    let found = guard("reading the prepared volume", || session.found())?
        .map_err(|error| failed("reading the prepared volume failed", &error))?;
    model.close_all();
    let differences = compare(&model, &found, Strictness::CLOSED);
    if !differences.is_empty() {
        return Err(Failure::new("the prepared volume is not what was written").with(differences));
    }
    guard("unmounting", || session.close())?
        .map_err(|error| failed("unmounting failed", &error))?;
    let mut prepared = Model::from_found(&found).with_allocations_of(&model);
    prepared.set_atime_policy(settings.atime);
    if settings.atime != AtimePolicy::Never {
        prepared.was_read(clock.span_since(0));
    }
    Ok((device.view(), prepared))
}

impl<S: System> Explorer<'_, S> {
    fn strictness(&self) -> Strictness {
        let disk = if self.case.silent_faults { Disk::Lying } else { Disk::Sound };
        Strictness { disk, ..Strictness::CRASH }
    }

    fn device(&self, image: Image, faults: (FaultPlan, u64)) -> Arc<SimDevice> {
        self.device_with(image, faults, false)
    }

    /// With `fua`, it understands forced unit access.
    fn device_with(
        &self,
        image: Image,
        (faults, seed): (FaultPlan, u64),
        fua: bool,
    ) -> Arc<SimDevice> {
        let config = DeviceConfig {
            completion: Completion::Immediate,
            fua,
            faults,
            is_struck: self.is_struck(),
            seed,
            ..DeviceConfig::default()
        };
        Arc::new(SimDevice::new(image, config))
    }

    /// What the case's faults have left may be on any of its disks.
    fn is_struck(&self) -> bool {
        !self.case.faults.is_empty()
    }

    fn run_case(&mut self) -> Result<(), Failure> {
        let case = self.case;
        let faults = (case.faults.clone(), case.seed);
        let device = self.device_with(case.image.clone(), faults, case.settings.fua);
        let clock = Arc::new(SimClock::starting_at(1_000_000_000_000));
        let opened = guard("mounting the start volume", || {
            self.system.open(&device, &clock, &case.settings)
        });
        let session = match opened {
            Ok(Ok(session)) => Leaky::new(session),
            // With faults on the way, mounting may fail, and the volume must be as it was.
            Ok(Err(error)) if !case.faults.is_empty() && error.is_environmental() => {
                return self.check_unmountable(&device, &clock);
            }
            Ok(Err(error)) => {
                let failure = Failure::new(format!("the start volume does not mount: {error}"));
                return Err(failure.with_trace(&device));
            }
            Err(failure) => return Err(failure.with_trace(&device)),
        };
        let start = (DiskState::new(case.image.clone()), case.model.clone());
        let mut run = Run::new(&device, &clock, session, start, Depth::Workload);
        let result = self.run_ops(&mut run, &case.ops);
        self.tally.faults += run.device.faults_struck();
        self.tally.faults_amid += run.device.faults_struck_amid();
        match result {
            Ok(true) => self.finish(run),
            Ok(false) => let_go(run.session),
            Err(mut failure) => {
                failure.operations = run.log;
                Err(failure.with_trace(&run.device))
            }
        }
    }

    fn check_unmountable(
        &mut self,
        device: &Arc<SimDevice>,
        clock: &Arc<SimClock>,
    ) -> Result<(), Failure> {
        self.tally.faults += device.faults_struck();
        let mut disk = DiskState::new(self.case.image.clone());
        for event in device.take_events() {
            disk.apply(&event);
        }
        let history = History::new(self.case.model.clone());
        let budget = self.case.limits.outcomes_per_point;
        for outcome in disk.outcomes(false, budget, &mut self.rng) {
            let image = disk.image_after(&outcome);
            self.verify(&image, &history, clock.elapsed_ns(), Depth::Recovery).map_err(
                |failure| {
                    failure
                        .with(["after a mount that failed".to_owned()])
                        .with(disk.describe(&outcome))
                },
            )?;
        }
        Ok(())
    }

    /// Executes operations and examines the crash states on the way. True: the session is alive.
    fn run_ops(&mut self, run: &mut Run<S::Session>, ops: &[Op]) -> Result<bool, Failure> {
        self.examine(run)?;
        for (index, op) in ops.iter().enumerate() {
            if let Op::Advance { ns } = op {
                run.clock.advance_ns(*ns);
            }
            run.device.mark(index as u64 + 1);
            let torn = Self::torn(op, ops.get(index + 1), run.history.now());
            let op = torn.as_ref().unwrap_or(op);
            let executed = self.execute(run, op);
            if executed.is_err() {
                run.log.push(format!("{}. {op} -> the finding", index + 1));
            }
            match executed? {
                Executed::Went(text) => {
                    let step = run.history.now().step();
                    run.log.push(format!("{}. {op} -> {text} ({step})", index + 1));
                    if run.depth == Depth::Workload && self.looks.one_in(LOOK_ONE_IN) {
                        self.look(run)?;
                    }
                }
                Executed::Shutdown => {
                    self.end_tickets(run)?;
                    Self::look_after_shutdown(run)?;
                    return Ok(false);
                }
            }
        }
        self.end_tickets(run)?;
        if run.depth == Depth::Later {
            self.look(run)?;
        }
        Ok(true)
    }

    /// What a living volume shows is the model, whatever goes on in it. Where reading leaves something, only the end is looked at.
    fn look(&self, run: &mut Run<S::Session>) -> Result<(), Failure> {
        if reading_moves_times(self.case) {
            return Ok(());
        }
        // What is planned is for the workload.
        let faults = run.device.set_faults(FaultPlan::default());
        let live = guard("reading the living volume", || run.session.found())?;
        run.device.set_faults(faults);
        let strictness = self.live();
        match live {
            Ok(found) => {
                let differences = compare(run.history.now(), &found, strictness);
                if differences.is_empty() {
                    return Ok(());
                }
                Err(Failure::new("the living volume is not the model").with(differences))
            }
            Err(_) if self.is_struck() => Ok(()),
            Err(error) => Err(Failure::new(format!("the living volume cannot be read: {error}"))),
        }
    }

    /// A volume in use. On a disk that may have failed, a cut may be owed.
    fn live(&self) -> Strictness {
        if self.case.silent_faults {
            Strictness { disk: Disk::Lying, ..Strictness::EXACT }
        } else if self.is_struck() {
            Strictness { disk: Disk::Failing, blocks: Blocks::Uncut, ..Strictness::EXACT }
        } else {
            Strictness::EXACT
        }
    }

    /// A volume that was shut down can be read, and shows what there was before the operation that failed, or what that leaves open.
    fn look_after_shutdown(run: &mut Run<S::Session>) -> Result<(), Failure> {
        // What the call that failed has allocated before is open.
        let strictness = Strictness { disk: Disk::Lying, ..Strictness::EXACT };
        let live = guard("reading a volume that was shut down", || run.session.found())?;
        // What is in memory is read from there, and the disk may go on failing.
        let Ok(found) = live else { return Ok(()) };
        let differences = run.history.newest().map(|model| compare(model, &found, strictness));
        match differences.min_by_key(Vec::len) {
            Some(differences) if !differences.is_empty() => {
                Err(Failure::new("the volume that was shut down is not the model")
                    .with(differences))
            }
            _ => Ok(()),
        }
    }

    /// An untorn write has a place in the order only if a sync of the file follows at once. One that leaves a gap behind the
    /// old end may leave a size in between.
    fn torn(op: &Op, next: Option<&Op>, now: &Model) -> Option<Op> {
        let Op::Untorn { target, offset, .. } = op else { return None };
        let inode = now.target(target).ok().and_then(|ino| now.inode(ino));
        let size = inode.and_then(|inode| inode.data()).map_or(0, |data| data.size);
        if matches!(next, Some(Op::Sync(Sync::Data(synced))) if synced == target) && *offset <= size
        {
            return None;
        }
        let mut torn = op.clone();
        torn.tear();
        Some(torn)
    }

    /// Every ticket ends: with success, or with an error when the volume has shut down or a write failed.
    fn end_tickets(&mut self, run: &mut Run<S::Session>) -> Result<(), Failure> {
        if run.tickets.is_empty() && run.dropped.is_empty() {
            return Ok(());
        }
        let drive = Op::Background { work: BackgroundWork::Log, steps: DRIVE_STEPS };
        // An error of driving is an error of some ticket.
        let driven = guard("driving the log", || run.session.apply(&drive))?;
        run.log.push(format!("driving the log -> {}", describe(&driven)));
        self.examine(run)?;
        if let Some((number, in_flight)) = run.tickets.first_key_value() {
            let text = format!("ticket {number} ({}) never ends", in_flight.text);
            return Err(Failure::new(text));
        }
        // Whoever drops one cancels nothing. Where some may have failed, nobody knows which.
        let dropped = std::mem::take(&mut run.dropped);
        if driven.is_err() || run.session.failed_syncs() > 0 || dropped.is_empty() {
            return Ok(());
        }
        for InFlight { then, durable, text } in dropped {
            run.history.acknowledge_at(&then, &durable, &text);
        }
        self.examine_point(run, false, "after the end of tickets that were dropped")
    }

    /// Walks the device's new events.
    fn examine(&mut self, run: &mut Run<S::Session>) -> Result<(), Failure> {
        self.examine_with(run, &mut |_, _, _| Ok(()))
    }

    /// As [`Self::examine`]; `overlap` hears of those that belong to overlapping operations.
    fn examine_with(
        &mut self,
        run: &mut Run<S::Session>,
        overlap: OnOverlap<'_, Self, S::Session>,
    ) -> Result<(), Failure> {
        let mut ended: BTreeMap<u32, Result<(), SystemError>> =
            run.session.ended().into_iter().collect();
        for event in run.device.take_events() {
            run.disk.apply(&event);
            match &event {
                Event::Write(write) => {
                    self.examine_point(run, true, &format!("at device call #{}", write.id))?;
                }
                Event::Complete(_) => {}
                Event::Began(_) | Event::Returned(_) => overlap(self, run, &event)?,
                Event::Ended(ticket) => {
                    if let Some(result) = ended.remove(ticket) {
                        self.ticket_ended(run, *ticket, &result)?;
                    }
                }
                Event::DurableLsn(lsn) => {
                    run.learn_durable(*lsn);
                    self.examine_point(run, false, &format!("after LSN {lsn} was durable"))?;
                }
                _ => self.examine_point(run, false, "after a flush")?,
            }
        }
        for (ticket, result) in ended {
            self.ticket_ended(run, ticket, &result)?;
        }
        Ok(())
    }

    /// A ticket that has ended well acknowledges what it was asked for; one that failed promises nothing.
    fn ticket_ended(
        &mut self,
        run: &mut Run<S::Session>,
        ticket: u32,
        result: &Result<(), SystemError>,
    ) -> Result<(), Failure> {
        let Some(InFlight { then, durable, text }) = run.tickets.remove(&ticket) else {
            return Ok(());
        };
        let outcome = result.as_ref().map_or_else(ToString::to_string, |()| "durable".to_owned());
        run.log.push(format!("   ticket {ticket}: {outcome}"));
        match result {
            Ok(()) => {
                run.history.acknowledge_at(&then, &durable, &text);
                self.examine_point(run, false, &format!("after the end of ticket {ticket}"))
            }
            Err(error)
                if !error.is_environmental()
                    || error.errno != errno::ENOSPC && !self.is_excused(run) =>
            {
                Err(Failure::new(format!("{text} failed without a fault: {error}")))
            }
            Err(_) => Ok(()),
        }
    }

    fn examine_point(
        &mut self,
        run: &mut Run<S::Session>,
        newest_only: bool,
        place: &str,
    ) -> Result<(), Failure> {
        let limits = &self.case.limits;
        let budget = match run.depth {
            Depth::Workload => limits.outcomes_per_point,
            Depth::Recovery | Depth::Later => limits.outcomes_per_inner_point,
        };
        if self.tally.states >= limits.states_per_case {
            return Ok(());
        }
        let kill = run.depth == Depth::Workload && run.disk.pending_count() > 0;
        if kill && limits.kill_one_in > 0 && self.rng.one_in(limits.kill_one_in) {
            self.kill(run).map_err(|failure| failure.with([format!("killed {place}")]))?;
        }
        for outcome in run.disk.outcomes(newest_only, budget, &mut self.rng) {
            let image = run.disk.image_after(&outcome);
            if !run.seen.insert((image.hash(), run.history.epoch())) {
                self.tally.duplicates += 1;
                continue;
            }
            let elapsed_ns = run.clock.elapsed_ns();
            self.verify(&image, &run.history, elapsed_ns, run.depth).map_err(|failure| {
                failure
                    .with([format!("crash {place}, with these writes pending:")])
                    .with(run.disk.describe(&outcome).into_iter().map(|line| format!("  {line}")))
            })?;
        }
        Ok(())
    }

    /// The program dies, the disk stays up: what is in its cache is read by the recovery, but is
    /// durable only once that has flushed it.
    fn kill(&mut self, run: &Run<S::Session>) -> Result<(), Failure> {
        self.tally.states += 1;
        let config = DeviceConfig { is_struck: self.is_struck(), ..DeviceConfig::default() };
        let device = Arc::new(SimDevice::with_disk(run.disk.clone(), config));
        let clock = Arc::new(SimClock::starting_at(run.clock.elapsed_ns() + 1_000_000_000));
        let result = self.recover(&device, &clock, &run.history).and_then(|recovered| {
            let Some((session, found, state)) = recovered else { return Ok(()) };
            self.go_on(session, &device, &clock, (&found, &state))
        });
        result.map_err(|failure| {
            let all =
                crate::disk::Outcome(vec![crate::disk::Fate::Survived; run.disk.pending_count()]);
            let pending = run.disk.describe(&all).into_iter().map(|line| format!("  {line}"));
            failure
                .with_trace(&device)
                .with(["with these writes in the disk's cache:".to_owned()])
                .with(pending)
        })
    }

    /// Mounts a crash image and compares.
    fn verify(
        &mut self,
        image: &Image,
        history: &History,
        elapsed_ns: u64,
        depth: Depth,
    ) -> Result<(), Failure> {
        self.tally.states += 1;
        match depth {
            Depth::Workload => {}
            Depth::Recovery => self.tally.recovery_states += 1,
            Depth::Later => self.tally.later_states += 1,
        }
        let device = self.device(image.clone(), Default::default());
        let clock = Arc::new(SimClock::starting_at(elapsed_ns + 1_000_000_000));
        self.verify_on(&device, &clock, image, history, depth)
            .map_err(|failure| failure.with_trace(&device))
    }

    fn verify_on(
        &mut self,
        device: &Arc<SimDevice>,
        clock: &Arc<SimClock>,
        image: &Image,
        history: &History,
        depth: Depth,
    ) -> Result<(), Failure> {
        let Some((session, found, state)) = self.recover(device, clock, history)? else {
            return Ok(());
        };
        let recovery = device.take_events();
        if self.case.silent_faults {
            return let_go(session);
        }
        self.check(device, Some((&*session, &found)))?;
        if depth != Depth::Workload {
            return let_go(session);
        }
        if image.hash().is_multiple_of(READ_ONLY_ONE_IN) {
            self.look_only(image, history, clock.elapsed_ns())?;
        }
        let limits = &self.case.limits;
        if limits.recrash_one_in > 0 && self.rng.one_in(limits.recrash_one_in) {
            self.recrash(image, &recovery, history, clock.elapsed_ns())?;
        }
        if limits.recrash_one_in > 0 && self.rng.one_in(limits.recrash_one_in * 2) {
            self.faulty_recovery(image, history, clock.elapsed_ns())?;
        }
        let lies = limits.lie_one_in > 0 && self.system.notices_lies();
        if lies && self.rng.one_in(limits.lie_one_in) {
            self.lied_to(image, history, clock.elapsed_ns())?;
        }
        if limits.go_on_one_in > 0 && self.rng.one_in(limits.go_on_one_in) {
            return self.go_on(session, device, clock, (&found, &state));
        }
        let_go(session)
    }

    /// The workload is over: the live volume, and the volume after an orderly unmount, are exactly the
    /// model.
    fn finish(&mut self, mut run: Run<S::Session>) -> Result<(), Failure> {
        let faulty = !self.case.faults.is_empty();
        let strictness = self.live();
        let log = std::mem::take(&mut run.log);
        let device = Arc::clone(&run.device);
        let result = self.finish_on(run, strictness, faulty);
        result.map_err(|mut failure| {
            failure.operations = log;
            failure.with_trace(&device)
        })
    }

    fn finish_on(
        &mut self,
        mut run: Run<S::Session>,
        strictness: Strictness,
        faulty: bool,
    ) -> Result<(), Failure> {
        let mut model = Model::clone(run.history.now());
        let read_ns = run.clock.elapsed_ns();
        let live = guard("reading the live volume", || run.session.found())?;
        match live {
            Ok(found) => {
                let differences = compare(&model, &found, strictness);
                if !differences.is_empty() {
                    return Err(Failure::new("the live volume is not the model").with(differences));
                }
            }
            Err(error) if faulty => drop(error),
            Err(error) => {
                return Err(Failure::new(format!("the live volume cannot be read: {error}")));
            }
        }
        if self.case.silent_faults {
            return let_go(run.session);
        }
        // The disk is well again: what had failed can be done, and what was held for it is given back.
        run.device.set_faults(FaultPlan::default());
        let clock = Arc::new(SimClock::starting_at(run.clock.elapsed_ns()));
        let closed = guard("unmounting", || Leaky::into_inner(run.session).close())?;
        let free_blocks = match closed {
            // By what failed before: nobody goes on with that.
            Err(error) if faulty && error.shutdown => return Ok(()),
            closed => {
                closed.map_err(|error| Failure::new(format!("unmounting failed: {error}")))?
            }
        };
        model.close_all();
        let mut disk = run.disk;
        for event in run.device.take_events() {
            disk.apply(&event);
        }
        if disk.pending_count() > 0 {
            return Err(Failure::new("writes are pending after an unmount"));
        }
        let device = self.device(disk.durable().clone(), Default::default());
        self.check(&device, None)?;
        let mut session =
            guard("mounting again", || self.system.open(&device, &clock, &self.case.settings))?
                .map_err(|error| Failure::new(format!("mounting again failed: {error}")))?;
        if session.free_blocks() != free_blocks {
            let after = session.free_blocks();
            let text = "blocks are free that were not when the volume was closed, or the other way";
            return Err(Failure::new(text).with([format!("{free_blocks:?}, then {after:?}")]));
        }
        let found = guard("reading the volume mounted again", || session.found())?
            .map_err(|error| Failure::new(format!("the volume cannot be read: {error}")))?;
        if reading_moves_times(self.case) {
            model.was_read(run.clock.span_since(read_ns));
        }
        let mut differences = compare(&model, &found, Strictness::CLOSED);
        differences.extend(session.contradictions(&found));
        if differences.is_empty() {
            Ok(())
        } else {
            Err(Failure::new("after an orderly unmount the volume is not the model")
                .with(differences))
        }
    }
}

/// Reading is an operation that leaves something.
fn reading_moves_times(case: &Case) -> bool {
    case.settings.atime != AtimePolicy::Never
}
