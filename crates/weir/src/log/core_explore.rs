//! Exhaustive exploration of [`Core`]: every interleaving of a few submitters, the drivers, a checkpoint that
//! flushes, and a device that may fail, to the end. States already seen are not
//! visited twice, so the exploration is complete, not bounded in depth.

use super::*;
use std::collections::HashSet;
use std::hash::{Hash, Hasher};

/// What a submitter wants after it has appended its operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Want {
    Durable,
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
    Appended,
    Asleep,
    /// A driver that sleeps with its alarm set.
    Alarmed,
    /// Was called to look.
    Called,
    /// Is the writer; has not sealed the group.
    Sealing,
    /// Frames up to this LSN are still to be written; true when by forced unit access.
    Writing(Lsn, bool),
    Flushing(Flush, Lsn),
    /// Is about to look for callbacks to call; true after it has called one.
    Acking(bool),
    /// A driver that found nothing to do.
    Sleepy,
    Done,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    core: Core<u8, u8>,
    submitters: Vec<At>,
    drivers: Vec<At>,
    driver_calls: usize,
    results: Vec<Option<bool>>,
    goals: Vec<Option<Goal>>,
    appended: Lsn,
    written: Lsn,
    /// Of the checkpoint: what was written when it came.
    to_cover: Lsn,
    /// What really survives a power cut.
    stable: Lsn,
    failures_left: u8,
    last_ack: Lsn,
    /// Callbacks that came when their LSN was durable already.
    late: Vec<bool>,
    /// A flush has failed: the device promises nothing any more.
    broken: bool,
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
    failures: u8,
    /// The device has forced unit access.
    fua: bool,
    /// LSN 1 is the first part of a batch that LSN 2 ends.
    batch: bool,
}

struct Explorer {
    scenario: Scenario,
    /// Hashes of the states visited: 128 bits, so that none is taken for another.
    seen: HashSet<(u64, u64)>,
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
    fn at(&mut self, who: Who) -> &mut At {
        match who {
            Who::Submitter(number) => &mut self.submitters[number],
            Who::Driver(number) => &mut self.drivers[number],
        }
    }

    /// Calls those for whom there is work.
    fn call(&mut self, beside: Beside) {
        while let Some(call) = self.core.call(beside) {
            match call {
                Call::Driver => self.driver_calls += 1,
                Call::Caller(number) => {
                    let at = &mut self.submitters[usize::from(number)];
                    assert_eq!(*at, At::Asleep, "called but not asleep");
                    *at = At::Called;
                }
            }
        }
    }

    fn continues(scenario: &Scenario, lsn: Lsn) -> bool {
        scenario.batch && lsn == 1
    }

    /// What replay keeps of the frames up to `lsn`: nothing of a batch that is not complete.
    fn kept(scenario: &Scenario, lsn: Lsn) -> Lsn {
        if Self::continues(scenario, lsn) { lsn - 1 } else { lsn }
    }
}

impl Explorer {
    fn answer(&self, world: &mut World, number: usize, success: bool) {
        assert_eq!(world.results[number], None, "{number} was answered twice");
        let lsn = world.goals[number].map_or(0, lsn_of);
        match self.scenario.wants[number] {
            Want::Durable | Want::Callback | Want::Patient if success => {
                assert!(lsn <= world.stable, "acknowledged before durable: {world:?}");
            }
            Want::Written if success => assert!(lsn <= world.written),
            Want::Flush if success => assert!(world.to_cover <= world.stable, "{world:?}"),
            _ => {}
        }
        world.results[number] = Some(success);
    }

    fn wake(&self, world: &mut World, wake: Vec<u8>) {
        for number in wake.into_iter().map(usize::from) {
            assert_eq!(world.submitters[number], At::Asleep, "woken but not asleep");
            let reached = world.goals[number].is_some_and(|goal| world.core.reached(goal));
            self.answer(world, number, reached && !world.core.is_failed());
            world.submitters[number] = At::Done;
        }
    }

    /// What `who` does next, in the critical section in which it has booked what it did before.
    fn go_on(&self, world: &mut World, who: Who, looks: bool) {
        let step = match who {
            Who::Driver(_) => world.core.driver_step(),
            Who::Submitter(number) => {
                let Some(goal) = world.goals[number] else { panic!("no goal") };
                if looks { world.core.look(goal) } else { world.core.step(goal) }
            }
        };
        world.call(match who {
            Who::Driver(_) if step == Step::Wait => Beside::Nothing,
            Who::Driver(_) => Beside::All,
            Who::Submitter(_) => Beside::Alarm,
        });
        let next = match (step, who) {
            (Step::Write, _) => At::Sealing,
            (Step::Flush(flush), _) => At::Flushing(flush, world.written),
            (_, Who::Driver(_)) => At::Acking(false),
            (Step::Wait, Who::Submitter(number)) => {
                let Some(goal) = world.goals[number] else { panic!("no goal") };
                world.core.park(goal, number as u8);
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
        let lsn = world.goals[number].map_or(0, lsn_of);
        match self.scenario.wants[number] {
            Want::Callback | Want::Patient => {
                world.late[number] = lsn <= world.core.durable();
                let patient = self.scenario.wants[number] == Want::Patient;
                world.core.arrive_callback(lsn, number as u8, patient);
                world.call(Beside::All);
                world.submitters[number] = At::Done;
            }
            Want::WriteOut => {
                world.core.request_write_out();
                world.call(Beside::All);
                world.submitters[number] = At::Done;
            }
            _ => self.go_on(world, Who::Submitter(number), false),
        }
    }

    fn start(&self, world: &World, number: usize) -> Vec<World> {
        let wants = &self.scenario.wants;
        // Submitters that want the same are interchangeable: they start in order. The first has the batch.
        let twin_waits = (0..number)
            .any(|twin| wants[twin] == wants[number] && world.submitters[twin] == At::Start);
        let batch_waits = self.scenario.batch && number > 0 && world.submitters[0] == At::Start;
        if twin_waits || batch_waits {
            return Vec::new();
        }
        let mut next = world.clone();
        if wants[number] == Want::Flush {
            next.to_cover = World::kept(&self.scenario, next.written);
            next.goals[number] = Some(next.core.next_flush());
            self.go_on(&mut next, Who::Submitter(number), false);
            return vec![next];
        }
        if wants[number] == Want::Hurry {
            next.core.hurry();
            next.call(Beside::All);
            next.submitters[number] = At::Done;
            return vec![next];
        }
        next.appended += if self.scenario.batch && number == 0 { 2 } else { 1 };
        let lsn = next.appended;
        let written = wants[number] == Want::Written;
        next.goals[number] = Some(if written { Goal::Written(lsn) } else { Goal::Durable(lsn) });
        next.submitters[number] = At::Appended;
        vec![next]
    }

    /// All worlds that one step of `who` can lead to.
    fn steps(&self, world: &World, who: Who) -> Vec<World> {
        let mut next = world.clone();
        match (*next.at(who), who) {
            (At::Start, Who::Submitter(number)) => return self.start(world, number),
            (At::Start, Who::Driver(_)) => self.go_on(&mut next, who, false),
            (At::Appended, Who::Submitter(number)) => self.arrive(&mut next, number),
            (At::Called, _) => self.go_on(&mut next, who, true),
            (At::Asleep | At::Alarmed, Who::Driver(_)) if world.driver_calls > 0 => {
                next.driver_calls -= 1;
                next.core.driver_looks();
                if *next.at(who) == At::Alarmed {
                    next.core.alarm_off();
                }
                *next.at(who) = At::Start;
            }
            (At::Alarmed, _) => {
                next.core.alarm_rings();
                *next.at(who) = At::Start;
            }
            (At::Asleep | At::Done | At::Appended, _) => return Vec::new(),
            (At::Sealing, _) => {
                let one = next.appended == next.written + 1;
                let forced = self.scenario.fua && one && next.core.may_force();
                *next.at(who) = At::Writing(next.appended, forced);
            }
            (At::Writing(until, forced), _) => return self.write(world, who, until, forced),
            (At::Flushing(flush, covers), _) => return self.flush(world, who, flush, covers),
            (At::Acking(called), _) => self.ack(&mut next, who, called),
            (At::Sleepy, _) if next.core.has_driver_work() => self.go_on(&mut next, who, false),
            (At::Sleepy, _) => {
                let alarm = next.core.driver_sleeps();
                *next.at(who) = if alarm { At::Alarmed } else { At::Asleep };
            }
        }
        vec![next]
    }

    fn fail(&self, world: &World) -> Option<World> {
        let mut failed = world.clone();
        failed.failures_left = failed.failures_left.checked_sub(1)?;
        let mut wake = Vec::new();
        failed.core.fail(&mut wake);
        self.wake(&mut failed, wake);
        failed.call(Beside::All);
        Some(failed)
    }

    fn write(&self, world: &World, who: Who, until: Lsn, forced: bool) -> Vec<World> {
        let mut worlds = Vec::new();
        let mut next = world.clone();
        if next.written < until && !next.core.is_failed() {
            if let Some(mut failed) = self.fail(world) {
                failed.core.end_write();
                self.go_on(&mut failed, who, false);
                worlds.push(failed);
            }
            next.written += 1;
            let mut wake = Vec::new();
            let continues = World::continues(&self.scenario, next.written);
            next.core.frame_written(next.written, continues, &mut wake);
            if forced {
                assert!(next.stable + 1 == next.written);
                next.stable = next.written;
                next.core.frame_forced(&mut wake);
            }
            self.wake(&mut next, wake);
        }
        if next.written == until || next.core.is_failed() {
            next.core.end_write();
            self.go_on(&mut next, who, false);
        }
        worlds.push(next);
        worlds
    }

    fn flush(&self, world: &World, who: Who, flush: Flush, covers: Lsn) -> Vec<World> {
        let mut worlds = Vec::new();
        if let Some(mut failed) = self.fail(world) {
            failed.broken = true;
            failed.core.drop_flush();
            self.go_on(&mut failed, who, false);
            worlds.push(failed);
        }
        let mut next = world.clone();
        if !next.broken {
            next.stable = next.stable.max(World::kept(&self.scenario, covers));
        }
        let mut wake = Vec::new();
        next.core.end_flush(flush, &mut wake);
        self.wake(&mut next, wake);
        self.go_on(&mut next, who, false);
        worlds.push(next);
        worlds
    }

    /// Calls one callback at a time. A caller leaves after one and calls a driver for the others.
    fn ack(&self, world: &mut World, who: Who, called: bool) {
        let is_driver = matches!(who, Who::Driver(_));
        if called {
            world.core.finish_acks();
            if is_driver {
                *world.at(who) = At::Start;
            } else {
                world.call(Beside::All);
                *world.at(who) = At::Done;
            }
            return;
        }
        *world.at(who) = match world.core.take_acks(1).first() {
            None if is_driver => At::Sleepy,
            None => At::Done,
            Some(&(callback, success)) => {
                let number = usize::from(callback);
                self.answer(world, number, success);
                let lsn = world.goals[number].map_or(0, lsn_of);
                if success {
                    let in_order = world.late[number] || lsn >= world.last_ack;
                    assert!(in_order, "called out of order");
                    world.last_ack = lsn.max(world.last_ack);
                }
                At::Acking(true)
            }
        };
    }

    fn check(world: &World) {
        let writers = world.submitters.iter().chain(&world.drivers);
        let writes = |at: &&At| matches!(at, At::Sealing | At::Writing(..));
        assert!(writers.clone().filter(writes).count() <= 1, "two writers: {world:?}");
        let flushes = |at: &&At| matches!(at, At::Flushing(..));
        assert!(writers.filter(flushes).count() <= 1, "two flushes: {world:?}");
        let about_to_look = |at: &At| matches!(at, At::Start | At::Acking(_) | At::Sleepy);
        if world.drivers.iter().any(about_to_look) {
            return;
        }
        let left = world.clone().core.call(Beside::Alarm);
        assert_eq!(left, None, "a role with work is free, and nobody was called: {world:?}");
    }

    fn check_end(&mut self, world: &World) {
        self.ends += 1;
        self.failed_ends += usize::from(world.core.is_failed());
        for (number, want) in self.scenario.wants.iter().enumerate() {
            assert_eq!(world.submitters[number], At::Done, "{number} waits for ever: {world:?}");
            if !matches!(want, Want::WriteOut | Want::Hurry) {
                assert!(world.results[number].is_some(), "{number} was never answered: {world:?}");
            }
        }
        assert!(world.drivers.iter().all(|at| *at == At::Asleep));
        let core = &world.core;
        assert!(core.writer.is_none() && core.flusher.is_none() && core.acks.is_empty());
        assert!(core.looking == 0 && core.idle_drivers == world.drivers.len() && !core.write_out);
    }

    fn explore(scenario: Scenario) -> Self {
        let count = scenario.wants.len();
        let mut core = Core::new(0);
        // As if many had come at once before: one alone is gathered.
        core.gathering.expect(2);
        let world = World {
            core,
            submitters: vec![At::Start; count],
            drivers: vec![At::Start; scenario.drivers],
            driver_calls: 0,
            results: vec![None; count],
            goals: vec![None; count],
            appended: 0,
            written: 0,
            to_cover: 0,
            stable: 0,
            failures_left: scenario.failures,
            last_ack: 0,
            late: vec![false; count],
            broken: false,
        };
        let mut explorer = Self { scenario, seen: HashSet::new(), ends: 0, failed_ends: 0 };
        let mut todo = vec![world];
        while let Some(world) = todo.pop() {
            Self::check(&world);
            let mut successors = Vec::new();
            for number in 0..count {
                successors.extend(explorer.steps(&world, Who::Submitter(number)));
            }
            for number in 0..world.drivers.len() {
                // Drivers that are at the same point are interchangeable.
                if number == 0 || world.drivers[number] != world.drivers[number - 1] {
                    successors.extend(explorer.steps(&world, Who::Driver(number)));
                }
            }
            if successors.is_empty() {
                explorer.check_end(&world);
            }
            for mut next in successors {
                next.drivers.sort_unstable();
                if explorer.seen.insert(fingerprint(&next)) {
                    todo.push(next);
                }
            }
        }
        assert!(explorer.ends > 0);
        assert!(explorer.scenario.failures == 0 || explorer.failed_ends > 0);
        explorer
    }
}

fn fingerprint(world: &World) -> (u64, u64) {
    let half = |salt: u64| {
        let mut hasher = std::hash::DefaultHasher::new();
        (salt, world).hash(&mut hasher);
        hasher.finish()
    };
    (half(1), half(2))
}

/// All multisets of `count` wants (the submitters are symmetric).
fn combinations(count: usize) -> Vec<Vec<Want>> {
    let all = [
        Want::Durable,
        Want::Written,
        Want::Callback,
        Want::Patient,
        Want::Hurry,
        Want::WriteOut,
        Want::Flush,
    ];
    let mut result = vec![(vec![], 0)];
    for _ in 0..count {
        result = result
            .into_iter()
            .flat_map(|(wants, from)| {
                (from..all.len()).map(move |index| {
                    let mut wants: Vec<Want> = wants.clone();
                    wants.push(all[index]);
                    (wants, index)
                })
            })
            .filter(|(wants, _)| {
                let count = |which| wants.iter().filter(|want| **want == which).count();
                count(Want::Flush) < 2 && count(Want::Hurry) <= count(Want::Patient)
            })
            .collect();
    }
    result.into_iter().map(|(wants, _)| wants).collect()
}

fn explore(wants: &[Want], drivers: usize, failures: u8) -> usize {
    let scenario = Scenario { wants: wants.to_vec(), drivers, failures, fua: false, batch: false };
    Explorer::explore(scenario).seen.len()
}

#[test]
fn every_interleaving_of_three_submitters_with_a_failure_acknowledges_truly_and_strands_nobody() {
    for wants in combinations(3) {
        let states = explore(&wants, 2, 1);
        println!("{wants:?} {states}");
    }
}

#[test]
fn every_interleaving_of_four_submitters_acknowledges_truly_and_strands_nobody() {
    use Want::{Callback, Durable, Flush, WriteOut, Written};
    for (wants, drivers, failures) in [
        ([Durable; 4], 1, 1),
        ([Durable, Durable, Durable, Flush], 1, 0),
        ([Durable, Durable, Callback, Callback], 1, 0),
        ([Durable, Written, Callback, WriteOut], 1, 0),
    ] {
        let states = explore(&wants, drivers, failures);
        println!("{wants:?} {states}");
    }
}

#[test]
fn patient_callbacks_are_gathered_and_never_forgotten() {
    use Want::{Durable, Hurry, Patient};
    for (wants, failures) in [
        ([Patient; 4], 1),
        ([Patient, Patient, Patient, Hurry], 1),
        ([Durable, Patient, Patient, Hurry], 0),
    ] {
        let states = explore(&wants, 2, failures);
        println!("{wants:?} {states}");
    }
}

#[test]
fn three_drivers_share_the_work_of_callbacks_and_strand_none() {
    let states = explore(&[Want::Callback; 3], 3, 1);
    println!("{states}");
}

#[test]
fn batches_and_forced_writes_keep_the_rules_in_every_interleaving() {
    for wants in combinations(2) {
        for (fua, batch) in [(true, false), (false, true), (true, true)] {
            if batch && matches!(wants[0], Want::Flush | Want::Hurry) {
                continue;
            }
            let wants = wants.clone();
            Explorer::explore(Scenario { wants, drivers: 2, failures: 1, fua, batch });
        }
    }
}
