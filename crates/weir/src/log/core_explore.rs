//! Exhaustive exploration of [`Core`]: every interleaving of a few submitters, the drivers, a checkpoint that
//! flushes, and a device that may fail, to the end. States already seen are not
//! visited twice, so the exploration is complete, not bounded in depth.
//!
//! States that behave alike are one ([`World::simplify`]), submitters that want the same come in the order of their
//! numbers, and of a state that was seen only 128 bits are kept: so all mixes of four can be explored.

#[path = "core_fingerprint.rs"]
mod fingerprint;

use super::*;
use fingerprint::{Taken, fingerprint};
use std::collections::HashSet;
use std::hash::BuildHasherDefault;

/// Most submitters, and most drivers.
const MOST: usize = 5;
const MOST_DRIVERS: usize = 3;

/// What a submitter wants after it has appended its operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Want {
    Durable,
    /// The same, with data that is written beside its frame, and may be missing: then frames count together with what makes up for it
    /// ([`super::super::companion`]).
    Beside,
    Written,
    Callback,
    /// A callback that nobody waits for before a `Hurry` comes.
    Patient,
    /// Somebody waits for the patient ones. Appends nothing.
    Hurry,
    WriteOut,
    /// A flush of what was written when it came: the checkpoint. Appends nothing.
    Flush,
}

/// Where a submitter or a driver is. What has happened to it is booked in the same step as what it does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum At {
    /// A submitter that has not come yet; a driver that is about to take a step.
    Start,
    /// Has opened a chain, with an operation.
    Chaining,
    Appended,
    Asleep,
    /// A driver that sleeps with its alarm set.
    Alarmed,
    /// Was called to look.
    Called,
    /// Is the writer, or joins it (true); has not sealed the group.
    Sealing(bool),
    /// Has joined the writer: frames up to this LSN are on their way, and count when its turn comes.
    Joined(u8),
    /// Frames up to this LSN are still to be written; true when by forced unit access.
    Writing(u8, bool),
    /// Is the writer; data is missing, and what makes up for it was appended, but not sealed.
    Owing,
    /// Frames up to this LSN are still to be written, and count together.
    MakingUp(u8),
    /// What had been written when the flush began.
    Flushing(u8),
    /// Is about to look for callbacks to call; true after it has called one.
    Acking(bool),
    /// A driver that found nothing to do.
    Sleepy,
    Done,
}

/// One who wants something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Submitter {
    at: At,
    /// What it waits for, until it is answered.
    goal: Option<Goal>,
    /// Its callback came when its LSN was durable already.
    late: bool,
    /// Of a checkpoint, until it is answered: what was written when it came.
    to_cover: u8,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    core: Core<u8, u8>,
    /// Those that do not take part are done: so are drivers.
    submitters: [Submitter; MOST],
    drivers: [At; MOST_DRIVERS],
    driver_calls: usize,
    appended: Lsn,
    written: Lsn,
    /// What really survives a power cut.
    stable: Lsn,
    last_ack: Lsn,
    /// First and last LSN of the chain; 0 while there is none.
    chain: (Lsn, Lsn),
    /// The writer has left what it owes, and what was written with it, to who has joined it.
    owed: bool,
    /// LSN that is not on the device, whatever is behind it: its frame is on its way, or what makes up for data that is missing beside it. 0: none.
    missing: Lsn,
    /// From this LSN on frames need what makes up for missing data and lies in the chain. 0: none do.
    held: Lsn,
}

/// A submitter or a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Who {
    Submitter(usize),
    Driver(usize),
}

/// What is explored.
#[derive(Debug, Clone)]
struct Scenario {
    wants: Vec<Want>,
    drivers: usize,
    /// Any of its writes and flushes may fail.
    fails: bool,
    /// The device has forced unit access.
    fua: bool,
    /// The first submitter opens a chain before it appends its operation, which ends it: what others append meanwhile belongs to it.
    chain: bool,
}

/// An error in the core's rules, or in how they are followed, that the explorer must find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Planted {
    /// A flush acknowledges frames that were written after it began.
    FlushCoversLaterFrames,
    /// A flush acknowledges what it covers although the log has failed meanwhile.
    AcknowledgesAfterFailure,
    /// Who asks for a flush is content with the one in flight.
    TakesFlushInFlight,
    /// The part of a chain that is written counts as if it were complete.
    CutsChain,
    /// A frame is forced although others before it are not durable.
    ForcesTooMuch,
    /// The writer's role is free for everybody.
    SharesWriter,
    /// Who has joined the writer does not wait for its turn.
    CountsOutOfTurn,
    /// The writer counts its frame, though something is missing beside it, where somebody has joined.
    ForgetsWhatIsOwed,
    /// Frames count although what makes up for the data that is missing beside them lies in a chain that goes on.
    CountsBeforeChain,
    /// The last callback is called first.
    CallsBackwards,
    /// Nobody is called for a role that has become free.
    CallsNobody,
    /// A driver that was called counts as looking for ever.
    LooksForEver,
    /// A failure wakes nobody.
    FailsSilently,
    /// No driver sets its alarm.
    SetsNoAlarm,
    /// Callbacks that come after a failure are kept.
    KeepsCallbacksAfterFailure,
}

struct Explorer {
    scenario: Scenario,
    planted: Option<Planted>,
    /// Hashes of the states visited: 128 bits, so that none is taken for another.
    seen: HashSet<u128, BuildHasherDefault<Taken>>,
    /// Longest way that was gone from the start.
    depth: u32,
    ends: usize,
    failed_ends: usize,
}

fn lsn_of(goal: Goal) -> Lsn {
    match goal {
        Goal::Durable(lsn) | Goal::Written(lsn) => lsn,
        Goal::Flushed(_) => 0,
    }
}

impl World {
    fn new(scenario: &Scenario) -> Self {
        let mut core = Core::new(0);
        // As if many had come at once before: one alone is gathered.
        core.gathering.expect(2);
        let mut submitters =
            [Submitter { at: At::Done, goal: None, late: false, to_cover: 0 }; MOST];
        for submitter in &mut submitters[..scenario.wants.len()] {
            submitter.at = At::Start;
        }
        let mut drivers = [At::Done; MOST_DRIVERS];
        drivers[..scenario.drivers].fill(At::Start);
        Self {
            core,
            submitters,
            drivers,
            driver_calls: 0,
            appended: 0,
            written: 0,
            stable: 0,
            last_ack: 0,
            chain: (0, 0),
            owed: false,
            missing: 0,
            held: 0,
        }
    }

    fn at(&mut self, who: Who) -> &mut At {
        match who {
            Who::Submitter(number) => &mut self.submitters[number].at,
            Who::Driver(number) => &mut self.drivers[number],
        }
    }

    fn goal(&self, number: usize) -> Goal {
        self.submitters[number].goal.unwrap_or_else(|| panic!("{number} has no goal: {self:?}"))
    }

    /// Makes states equal that behave alike: drivers at the same point are interchangeable; flushes are numbered from
    /// the last that has ended; nothing is remembered that nobody will ask for.
    fn simplify(&mut self, scenario: &Scenario) {
        self.drivers.sort_unstable();
        let left = |wanted: &[Want], done: bool| {
            let mut all = self.submitters.iter().zip(&scenario.wants);
            all.any(|(submitter, want)| {
                let is_left = matches!(submitter.at, At::Start | At::Chaining | At::Appended);
                wanted.contains(want) && (is_left || done && submitter.goal.is_some())
            })
        };
        if !left(&[Want::Callback, Want::Patient], true) {
            self.last_ack = 0;
        }
        if self.core.failed || !left(&[Want::Patient], false) {
            self.core.gathering.expect(2);
        }
        self.renumber_flushes();
    }

    fn renumber_flushes(&mut self) {
        let ended = std::mem::take(&mut self.core.flushes_ended);
        if ended == 0 {
            return;
        }
        let shift = |goal: &mut Goal| {
            if let Goal::Flushed(number) = goal {
                *number = number.saturating_sub(ended);
            }
        };
        self.core.flushes_begun -= ended;
        if let Some((flush, by)) = &mut self.core.flusher {
            flush.number -= ended;
            by.own.iter_mut().for_each(shift);
        }
        for by in [&mut self.core.writer, &mut self.core.joiner].into_iter().flatten() {
            by.own.iter_mut().for_each(shift);
        }
        self.submitters.iter_mut().filter_map(|submitter| submitter.goal.as_mut()).for_each(shift);
        if !self.core.flush_callers.is_empty() {
            let callers = std::mem::take(&mut self.core.flush_callers);
            let shifted = callers
                .into_iter()
                .map(|((number, place), caller)| ((number - ended, place), caller));
            self.core.flush_callers = shifted.collect();
        }
    }

    /// The frame that ends with `lsn` is one of a chain, and not its last.
    fn continues(&self, lsn: Lsn) -> bool {
        let (first, end) = self.chain;
        first > 0 && lsn >= first && (end == 0 || lsn < end)
    }

    /// What replay keeps of the frames up to `lsn`: nothing behind what is missing, and nothing of a chain that is not complete, or that
    /// needs something of it.
    fn kept(&self, lsn: Lsn) -> Lsn {
        let lsn = if self.missing > 0 { lsn.min(self.missing - 1) } else { lsn };
        let chain_is_there = self.chain.1 > 0 && lsn >= self.chain.1;
        if self.held > 0 && lsn >= self.held && !chain_is_there {
            return self.held - 1;
        }
        if self.continues(lsn) { self.chain.0 - 1 } else { lsn }
    }

    /// Nobody waits for what is in a chain before that is closed, unless all is lost anyway.
    fn must_wait_for_chain(&self, number: usize) -> bool {
        let open = self.chain.0 > 0 && self.chain.1 == 0;
        let inside = |goal| matches!(goal, Goal::Durable(lsn) if lsn >= self.chain.0);
        open && self.submitters[number].goal.is_some_and(inside) && !self.core.is_failed()
    }
}

impl Explorer {
    fn has(&self, planted: Planted) -> bool {
        self.planted == Some(planted)
    }

    /// Calls those for whom there is work.
    fn call(&self, world: &mut World, beside: Beside) {
        if self.has(Planted::CallsNobody) {
            return;
        }
        while let Some(call) = world.core.call(beside) {
            match call {
                Call::Driver => world.driver_calls += 1,
                Call::Caller(number) => {
                    let at = world.at(Who::Submitter(usize::from(number)));
                    assert_eq!(*at, At::Asleep, "called but not asleep");
                    *at = At::Called;
                }
            }
        }
    }

    fn answer(&self, world: &mut World, number: usize, success: bool) {
        let goal = world.submitters[number].goal.take();
        let to_cover = std::mem::take(&mut world.submitters[number].to_cover);
        let Some(goal) = goal else { panic!("{number} was answered twice: {world:?}") };
        match self.scenario.wants[number] {
            Want::Durable | Want::Beside | Want::Callback | Want::Patient if success => {
                assert!(lsn_of(goal) <= world.stable, "acknowledged before durable: {world:?}");
            }
            Want::Written if success => assert!(lsn_of(goal) <= world.written, "{world:?}"),
            Want::Flush if success => assert!(Lsn::from(to_cover) <= world.stable, "{world:?}"),
            _ => {}
        }
    }

    fn wake(&self, world: &mut World, wake: Vec<u8>) {
        for number in wake.into_iter().map(usize::from) {
            assert_eq!(world.submitters[number].at, At::Asleep, "woken but not asleep");
            let reached = world.core.reached(world.goal(number));
            self.answer(world, number, reached && !world.core.is_failed());
            world.submitters[number].at = At::Done;
        }
    }

    /// What `who` does next, in the critical section in which it has booked what it did before.
    fn go_on(&self, world: &mut World, who: Who, looks: bool) {
        if self.has(Planted::SharesWriter) {
            world.core.writer = None;
        }
        let step = match who {
            Who::Driver(_) => world.core.driver_step(),
            Who::Submitter(number) => {
                let goal = world.goal(number);
                if looks { world.core.look(goal) } else { world.core.step(goal) }
            }
        };
        let beside = match who {
            Who::Driver(_) if step == Step::Wait => Beside::Nothing,
            Who::Driver(_) => Beside::All,
            Who::Submitter(_) => Beside::Alarm,
        };
        self.call(world, beside);
        let next = match (step, who) {
            (Step::Write, _) => At::Sealing(false),
            (Step::Join, _) => At::Sealing(true),
            (Step::Flush(_), _) => At::Flushing(world.written as u8),
            (_, Who::Driver(_)) => At::Acking(false),
            (Step::Wait, Who::Submitter(number)) => {
                world.core.park(world.goal(number), number as u8);
                At::Asleep
            }
            (_, Who::Submitter(number)) => {
                self.answer(world, number, step == Step::Done);
                At::Acking(false)
            }
        };
        *world.at(who) = next;
    }

    fn arrive(&self, world: &mut World, number: usize) {
        match self.scenario.wants[number] {
            Want::Callback | Want::Patient => {
                let lsn = lsn_of(world.goal(number));
                world.submitters[number].late = lsn <= world.core.durable();
                let patient = self.scenario.wants[number] == Want::Patient;
                let failed = world.core.failed;
                world.core.failed &= !self.has(Planted::KeepsCallbacksAfterFailure);
                world.core.arrive_callback(lsn, number as u8, patient);
                world.core.failed = failed;
                self.call(world, Beside::All);
                world.submitters[number].at = At::Done;
            }
            Want::WriteOut => {
                world.submitters[number].goal = None;
                world.core.request_write_out();
                self.call(world, Beside::All);
                world.submitters[number].at = At::Done;
            }
            _ => self.go_on(world, Who::Submitter(number), false),
        }
    }

    /// Whether it can come: those that want the same are interchangeable, they come in order. The first has the
    /// batch.
    fn may_start(&self, world: &World, number: usize) -> bool {
        let wants = &self.scenario.wants;
        let waits = |other: usize| world.submitters[other].at == At::Start;
        let first = usize::from(self.scenario.chain);
        !(first..number).any(|twin| wants[twin] == wants[number] && waits(twin))
    }

    fn start(&self, next: &mut World, number: usize) {
        match self.scenario.wants[number] {
            Want::Flush => {
                next.submitters[number].to_cover = next.kept(next.written) as u8;
                let flush = next.core.next_flush();
                let in_flight = next.core.flusher.map(|(flush, _)| Goal::Flushed(flush.number));
                let content = self.has(Planted::TakesFlushInFlight);
                let goal = in_flight.filter(|_| content).unwrap_or(flush);
                next.submitters[number].goal = Some(goal);
                self.go_on(next, Who::Submitter(number), false);
            }
            Want::Hurry => {
                next.core.hurry();
                self.call(next, Beside::All);
                next.submitters[number].at = At::Done;
            }
            want => {
                next.appended += 1;
                let lsn = next.appended;
                if self.scenario.chain && number == 0 {
                    if next.chain.0 == 0 {
                        next.chain.0 = lsn;
                        next.submitters[0].at = At::Chaining;
                        return;
                    }
                    next.chain.1 = lsn;
                    next.core.release_held();
                    self.call(next, Beside::All);
                }
                let written = want == Want::Written;
                let goal = if written { Goal::Written(lsn) } else { Goal::Durable(lsn) };
                next.submitters[number].goal = Some(goal);
                next.submitters[number].at = At::Appended;
            }
        }
    }

    /// Adds all worlds that one step of `who` can lead to.
    fn steps(&self, world: &World, who: Who, worlds: &mut Vec<World>) {
        let at = match who {
            Who::Submitter(number) => world.submitters[number].at,
            Who::Driver(number) => world.drivers[number],
        };
        let can = match (at, who) {
            (At::Start, Who::Submitter(number)) => self.may_start(world, number),
            (At::Asleep, Who::Driver(_)) => world.driver_calls > 0,
            (At::Appended, Who::Submitter(number)) => !world.must_wait_for_chain(number),
            (At::Asleep | At::Done, _) => false,
            _ => true,
        };
        if !can {
            return;
        }
        let mut next = world.clone();
        match (at, who) {
            (At::Start | At::Chaining, Who::Submitter(number)) => self.start(&mut next, number),
            (At::Start, Who::Driver(_)) => self.go_on(&mut next, who, false),
            (At::Appended, Who::Submitter(number)) => self.arrive(&mut next, number),
            (At::Called, _) => self.go_on(&mut next, who, true),
            (At::Asleep | At::Alarmed, Who::Driver(_)) if world.driver_calls > 0 => {
                next.driver_calls -= 1;
                if !self.has(Planted::LooksForEver) {
                    next.core.driver_looks();
                }
                if at == At::Alarmed {
                    next.core.alarm_off();
                }
                self.go_on(&mut next, who, false);
            }
            (At::Alarmed, _) => {
                next.core.alarm_rings();
                self.go_on(&mut next, who, false);
            }
            (At::Asleep | At::Done | At::Appended | At::Chaining, _) => return,
            (At::Sealing(true), _) => *next.at(who) = At::Joined(next.appended as u8),
            (At::Joined(until), _) => return self.take_turn(next, who, until.into(), worlds),
            (At::Sealing(false), _) => {
                let one =
                    next.appended == next.written + 1 && !self.is_beside(&next, next.appended);
                let may = next.core.may_force() || self.has(Planted::ForcesTooMuch);
                *next.at(who) = At::Writing(next.appended as u8, self.scenario.fua && one && may);
            }
            (At::Writing(until, forced), _) => {
                Self::send(&next, until.into(), worlds);
                return self.write(next, who, until.into(), forced, worlds);
            }
            (At::Owing, _) => *next.at(who) = At::MakingUp(next.appended as u8),
            (At::MakingUp(until), _) => return self.make_up(next, who, until.into(), worlds),
            (At::Flushing(covers), _) => {
                return self.flush(next, who, covers.into(), worlds);
            }
            (At::Acking(called), _) => self.ack(&mut next, who, called),
            (At::Sleepy, _) if next.core.has_driver_work() => self.go_on(&mut next, who, false),
            (At::Sleepy, _) => {
                let alarm = next.core.driver_sleeps() && !self.has(Planted::SetsNoAlarm);
                *next.at(who) = if alarm { At::Alarmed } else { At::Asleep };
            }
        }
        worlds.push(next);
    }

    fn fail(&self, world: &World) -> Option<World> {
        if !self.scenario.fails {
            return None;
        }
        let mut failed = world.clone();
        let mut wake = Vec::new();
        failed.core.fail(&mut wake);
        if self.has(Planted::FailsSilently) {
            wake.clear();
        }
        self.wake(&mut failed, wake);
        self.call(&mut failed, Beside::All);
        Some(failed)
    }

    /// The writer's frame may be on its way for a while, and others learn of it.
    fn send(world: &World, until: Lsn, worlds: &mut Vec<World>) {
        let core = &world.core;
        let is_one = world.written + 1 == until && !world.continues(until);
        let is_known = core.sent.is_some() || core.joiner.is_some() || core.is_failed();
        if is_one && !is_known && world.missing == 0 {
            let mut sent = world.clone();
            sent.core.frame_sent(until);
            sent.missing = until;
            worlds.push(sent);
        }
    }

    /// Who has joined the writer goes on when it is the writer itself, and with what that has left it.
    fn take_turn(&self, mut next: World, who: Who, until: Lsn, worlds: &mut Vec<World>) {
        if next.core.has_joined() && !self.has(Planted::CountsOutOfTurn) {
            return;
        }
        if std::mem::take(&mut next.owed) {
            *next.at(who) = At::Owing;
            worlds.push(next);
        } else {
            self.write(next, who, until, false, worlds);
        }
    }

    /// Data is missing beside the next frame, and what makes up for it was appended: by the writer, who sees to the rest himself unless
    /// somebody has joined him.
    fn owe(&self, next: &World, who: Who) -> World {
        let mut owing = next.clone();
        owing.appended += 1;
        owing.missing = owing.written + 1;
        if !owing.core.keep_alone() {
            *owing.at(who) = At::Owing;
            return owing;
        }
        owing.owed = !self.has(Planted::ForgetsWhatIsOwed);
        owing.core.end_write();
        self.go_on(&mut owing, who, false);
        owing
    }

    fn write(&self, mut next: World, who: Who, until: Lsn, forced: bool, worlds: &mut Vec<World>) {
        if next.written < until && !next.core.is_failed() {
            if let Some(mut failed) = self.fail(&next) {
                failed.core.end_write();
                self.go_on(&mut failed, who, false);
                worlds.push(failed);
            }
            if self.is_beside(&next, next.written + 1) {
                worlds.push(self.owe(&next, who));
            }
            next.written += 1;
            if next.missing == next.written && !matches!(next.at(who), At::Joined(_)) {
                next.missing = 0;
            }
            let mut wake = Vec::new();
            let continues = next.continues(next.written);
            let told = continues && !self.has(Planted::CutsChain);
            next.core.frame_written(next.written, told, &mut wake);
            if forced {
                assert!(next.stable >= next.kept(next.written - 1), "forced too much: {next:?}");
                next.stable = next.stable.max(next.kept(next.written));
                next.core.frame_forced(&mut wake);
            }
            self.wake(&mut next, wake);
        }
        if next.written == until || next.core.is_failed() {
            next.core.end_write();
            self.go_on(&mut next, who, false);
        }
        worlds.push(next);
    }

    /// The operation has data that is written beside its frame, and its owner has not been answered.
    fn is_beside(&self, world: &World, lsn: Lsn) -> bool {
        let wants = self.scenario.wants.iter().zip(&world.submitters);
        let goal = Some(Goal::Durable(lsn));
        wants.into_iter().any(|(want, owner)| *want == Want::Beside && owner.goal == goal)
    }

    /// The frames up to what makes up for missing data count together.
    fn make_up(&self, mut next: World, who: Who, until: Lsn, worlds: &mut Vec<World>) {
        let end = |mut world: World| {
            world.core.end_write();
            self.go_on(&mut world, who, false);
            world
        };
        if !next.core.is_failed() {
            worlds.extend(self.fail(&next).map(end));
            let mut wake = Vec::new();
            let missing = std::mem::take(&mut next.missing);
            let in_chain = next.continues(until);
            if in_chain && next.held == 0 {
                next.held = missing;
            }
            let waits = in_chain && !self.has(Planted::CountsBeforeChain);
            while next.written < until {
                next.written += 1;
                let continues = waits || next.continues(next.written);
                let told = continues && !self.has(Planted::CutsChain);
                next.core.frame_written(next.written, told, &mut wake);
            }
            if waits && next.chain.1 == 0 {
                next.core.hold();
            }
            self.wake(&mut next, wake);
        }
        worlds.push(end(next));
    }

    fn flush(&self, mut next: World, who: Who, covers: Lsn, worlds: &mut Vec<World>) {
        let Some((mut flush, _)) = next.core.flusher else { panic!("no flush: {next:?}") };
        if let Some(mut failed) = self.fail(&next) {
            failed.core.drop_flush();
            self.go_on(&mut failed, who, false);
            worlds.push(failed);
        }
        // After a failure nothing that the device says counts: the strictest view of it.
        if !next.core.is_failed() {
            next.stable = next.stable.max(next.kept(covers));
        }
        let failed = next.core.failed;
        next.core.failed &= !self.has(Planted::AcknowledgesAfterFailure);
        if self.has(Planted::FlushCoversLaterFrames) {
            flush.covers = next.core.complete;
            if let Some((begun, _)) = &mut next.core.flusher {
                begun.covers = flush.covers;
            }
        }
        let mut wake = Vec::new();
        next.core.end_flush(flush, &mut wake);
        if self.has(Planted::CallsBackwards) {
            next.core.acks.make_contiguous().reverse();
        }
        self.wake(&mut next, wake);
        next.core.failed = failed;
        self.go_on(&mut next, who, false);
        worlds.push(next);
    }

    /// Calls one callback at a time. A caller leaves after one and calls a driver for the others.
    fn ack(&self, world: &mut World, who: Who, called: bool) {
        let is_driver = matches!(who, Who::Driver(_));
        if called {
            world.core.finish_acks();
            if is_driver {
                *world.at(who) = At::Start;
            } else {
                self.call(world, Beside::All);
                *world.at(who) = At::Done;
            }
            return;
        }
        *world.at(who) = match world.core.take_acks(1).first() {
            None if is_driver => At::Sleepy,
            None => At::Done,
            Some(&(callback, success)) => {
                let number = usize::from(callback);
                let lsn = lsn_of(world.goal(number));
                self.answer(world, number, success);
                let late = std::mem::take(&mut world.submitters[number].late);
                if success {
                    assert!(late || lsn >= world.last_ack, "called out of order: {world:?}");
                    world.last_ack = lsn.max(world.last_ack);
                }
                At::Acking(true)
            }
        };
    }

    fn check(world: &World) {
        let submitters = world.submitters.iter().map(|submitter| &submitter.at);
        let all = submitters.chain(&world.drivers);
        let writes = |at: &&At| {
            matches!(at, At::Sealing(false) | At::Writing(..) | At::Owing | At::MakingUp(_))
        };
        assert!(all.clone().filter(writes).count() <= 1, "two writers: {world:?}");
        let joins = |at: &&At| matches!(at, At::Sealing(true) | At::Joined(_));
        assert!(all.clone().filter(joins).count() <= 1, "two have joined: {world:?}");
        let flushes = |at: &&At| matches!(at, At::Flushing(..));
        assert!(all.filter(flushes).count() <= 1, "two flushes: {world:?}");
        let about_to_look = |at: &At| matches!(at, At::Start | At::Acking(_) | At::Sleepy);
        if world.drivers.iter().any(about_to_look) {
            return;
        }
        let left = world.core.clone().call(Beside::Alarm);
        assert_eq!(left, None, "a role with work is free, and nobody was called: {world:?}");
    }

    fn check_end(&mut self, world: &World) {
        self.ends += 1;
        self.failed_ends += usize::from(world.core.is_failed());
        for (number, submitter) in world.submitters.iter().enumerate() {
            assert_eq!(submitter.at, At::Done, "{number} waits for ever: {world:?}");
            assert_eq!(submitter.goal, None, "{number} was never answered: {world:?}");
        }
        let drivers = &world.drivers[..self.scenario.drivers];
        assert!(drivers.iter().all(|at| *at == At::Asleep), "{world:?}");
        let core = &world.core;
        assert!(core.writer.is_none() && core.joiner.is_none() && core.sent.is_none());
        assert!(core.flusher.is_none() && core.acks.is_empty() && !world.owed);
        let idle = core.idle_drivers == self.scenario.drivers;
        assert!(core.looking == 0 && idle && !core.write_out, "{world:?}");
    }

    fn explore(scenario: Scenario, planted: Option<Planted>) -> Self {
        let (count, drivers) = (scenario.wants.len(), scenario.drivers);
        let mut todo = vec![World::new(&scenario)];
        let mut depths = vec![0];
        let (seen, depth, ends, failed_ends) = (HashSet::default(), 0, 0, 0);
        let mut explorer = Self { scenario, planted, seen, depth, ends, failed_ends };
        while let (Some(world), Some(depth)) = (todo.pop(), depths.pop()) {
            explorer.depth = explorer.depth.max(depth);
            Self::check(&world);
            let from = todo.len();
            for number in 0..count {
                explorer.steps(&world, Who::Submitter(number), &mut todo);
            }
            for number in 0..drivers {
                // Drivers that are at the same point are interchangeable.
                if number == 0 || world.drivers[number] != world.drivers[number - 1] {
                    explorer.steps(&world, Who::Driver(number), &mut todo);
                }
            }
            if todo.len() == from {
                explorer.check_end(&world);
            }
            for index in (from..todo.len()).rev() {
                todo[index].simplify(&explorer.scenario);
                if !explorer.seen.insert(fingerprint(&todo[index])) {
                    todo.swap_remove(index);
                }
            }
            depths.resize(todo.len(), depth + 1);
        }
        assert!(explorer.ends > 0);
        let calls = explorer.scenario.wants.iter().any(|want| *want != Want::Hurry);
        let fails = calls && explorer.scenario.fails;
        assert_eq!(explorer.failed_ends > 0, fails);
        explorer
    }
}

const ALL_WANTS: [Want; 8] = [
    Want::Durable,
    Want::Beside,
    Want::Written,
    Want::Callback,
    Want::Patient,
    Want::Hurry,
    Want::WriteOut,
    Want::Flush,
];

/// All multisets of `count` wants (the submitters are symmetric).
fn mixes(count: usize) -> Vec<Vec<Want>> {
    let mut result = vec![(vec![], 0)];
    for _ in 0..count {
        let longer = |(wants, from): (Vec<Want>, usize)| {
            (from..ALL_WANTS.len()).map(move |index| {
                let mut wants = wants.clone();
                wants.push(ALL_WANTS[index]);
                (wants, index)
            })
        };
        result = result.into_iter().flat_map(longer).collect();
    }
    result.into_iter().map(|(wants, _)| wants).collect()
}

/// The mix, or, with a chain, one for each that can be the first, which has the chain.
fn with_first(wants: &[Want], chain: bool) -> Vec<Vec<Want>> {
    if !chain {
        return vec![wants.to_vec()];
    }
    let may_be_first = |&at: &usize| {
        !matches!(wants[at], Want::Flush | Want::Hurry) && !wants[..at].contains(&wants[at])
    };
    let rotated = |at: usize| {
        let mut wants = wants.to_vec();
        wants[..=at].rotate_right(1);
        wants
    };
    (0..wants.len()).filter(may_be_first).map(rotated).collect()
}

/// Explores all mixes of `count` that `chosen` takes, and says how much that was.
fn explore_mixes(
    count: usize,
    drivers: usize,
    variants: &[(bool, bool)],
    chosen: impl Fn(&[Want]) -> bool,
) {
    let (mut states, mut depth, mut explored) = (0, 0, 0);
    for wants in mixes(count).into_iter().filter(|wants| chosen(wants)) {
        for &(fua, chain) in variants {
            for wants in with_first(&wants, chain) {
                let scenario = Scenario { wants, drivers, fails: true, fua, chain };
                let text = format!("{:?} fua {fua} chain {chain}", scenario.wants);
                let explorer = Explorer::explore(scenario, None);
                println!("{text}: {} states, depth {}", explorer.seen.len(), explorer.depth);
                states += explorer.seen.len();
                depth = depth.max(explorer.depth);
                explored += 1;
            }
        }
    }
    println!(
        "{count} submitters, {drivers} drivers: {explored} scenarios, {states} states, depth {depth}"
    );
}

const PLAIN: [(bool, bool); 1] = [(false, false)];
const FORCED: [(bool, bool); 1] = [(true, false)];
const CHAINS: [(bool, bool); 2] = [(false, true), (true, true)];
const ALL_VARIANTS: [(bool, bool); 4] =
    [(false, false), (true, false), (false, true), (true, true)];

/// Whether nobody has data beside its frame: there is a test for those who do.
fn all(wants: &[Want]) -> bool {
    !beside(wants)
}

fn beside(wants: &[Want]) -> bool {
    wants.contains(&Want::Beside)
}

/// Whether somebody is patient: that is half of the work with four.
fn patient(wants: &[Want]) -> bool {
    wants.contains(&Want::Patient) && !beside(wants)
}

#[test]
fn every_interleaving_of_four_acknowledges_truly_and_strands_nobody() {
    explore_mixes(4, 1, &PLAIN, all);
}

#[test]
fn forced_writes_keep_the_rules_in_every_interleaving() {
    explore_mixes(3, 2, &FORCED, all);
}

#[test]
fn chains_keep_the_rules_in_every_interleaving() {
    explore_mixes(2, 2, &CHAINS, all);
    explore_mixes(3, 1, &CHAINS, all);
}

#[test]
fn several_drivers_share_the_work_and_strand_none() {
    explore_mixes(3, 2, &PLAIN, all);
    explore_mixes(2, 3, &PLAIN, all);
}

#[test]
fn data_beside_frames_keeps_the_rules_in_every_interleaving() {
    explore_mixes(3, 1, &ALL_VARIANTS, beside);
    explore_mixes(2, 2, &ALL_VARIANTS, beside);
}

/// About a minute in a release build: `cargo test --release -p weir --lib log::core::explore -- --nocapture`.
#[test]
#[cfg_attr(debug_assertions, ignore = "for release builds")]
fn every_interleaving_of_four_and_two_drivers_with_patient_ones() {
    explore_mixes(4, 2, &PLAIN, patient);
}

/// As above.
#[test]
#[cfg_attr(debug_assertions, ignore = "for release builds")]
fn every_interleaving_of_four_and_two_drivers_without_patient_ones() {
    explore_mixes(4, 2, &PLAIN, |wants| all(wants) && !patient(wants));
}

/// As above.
#[test]
#[cfg_attr(debug_assertions, ignore = "for release builds")]
fn every_interleaving_of_four_of_whom_one_has_data_beside() {
    explore_mixes(4, 1, &PLAIN, |wants| {
        wants.iter().filter(|&&want| want == Want::Beside).count() == 1
    });
}

/// Takes minutes: `cargo test --release -p weir --lib log::core::explore -- --nocapture --ignored`.
#[test]
#[ignore = "takes minutes"]
fn every_interleaving_of_three_with_chains_forced_writes_and_three_drivers() {
    explore_mixes(3, 3, &ALL_VARIANTS, all);
}

/// As above.
#[test]
#[ignore = "takes minutes"]
fn every_interleaving_of_four_with_chains_and_forced_writes() {
    explore_mixes(4, 1, &ALL_VARIANTS, all);
}

/// As above.
#[test]
#[ignore = "takes minutes"]
fn every_interleaving_of_five() {
    explore_mixes(5, 1, &PLAIN, all);
}

#[test]
fn every_planted_error_is_found() {
    use Planted::*;
    for planted in [
        FlushCoversLaterFrames,
        AcknowledgesAfterFailure,
        TakesFlushInFlight,
        CutsChain,
        ForcesTooMuch,
        SharesWriter,
        CountsOutOfTurn,
        ForgetsWhatIsOwed,
        CountsBeforeChain,
        CallsBackwards,
        CallsNobody,
        LooksForEver,
        FailsSilently,
        SetsNoAlarm,
        KeepsCallbacksAfterFailure,
    ] {
        let found = (1..=3).flat_map(mixes).find(|wants| {
            ALL_VARIANTS.iter().any(|&(fua, chain)| {
                with_first(wants, chain).into_iter().any(|wants| {
                    let scenario = Scenario { wants, drivers: 2, fails: true, fua, chain };
                    let explore = || Explorer::explore(scenario, Some(planted));
                    std::panic::catch_unwind(explore).is_err()
                })
            })
        });
        println!("{planted:?}: found by {found:?}");
        assert!(found.is_some(), "{planted:?} was not found");
    }
}

#[test]
fn no_state_is_taken_for_another() {
    let wants = vec![Want::Durable, Want::Patient, Want::Flush];
    let scenario = Scenario { wants, drivers: 2, fails: true, fua: false, chain: false };
    let explorer = Explorer::explore(scenario.clone(), None);
    let mut seen = HashSet::new();
    let mut todo = vec![World::new(&scenario)];
    while let Some(world) = todo.pop() {
        let mut successors = Vec::new();
        for number in 0..3 {
            explorer.steps(&world, Who::Submitter(number), &mut successors);
        }
        for number in 0..2 {
            explorer.steps(&world, Who::Driver(number), &mut successors);
        }
        for mut next in successors {
            next.simplify(&explorer.scenario);
            if seen.insert(next.clone()) {
                todo.push(next);
            }
        }
    }
    assert_eq!(seen.len(), explorer.seen.len());
}
