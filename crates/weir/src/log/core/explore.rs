//! Exhaustive exploration of [`Core`]: every interleaving of a few submitters, the drivers, a checkpoint that
//! flushes, and a device that may fail, to the end. States already seen are not
//! visited twice, so the exploration is complete, not bounded in depth.
//!
//! States that behave alike are one ([`World::simplify`]), submitters that want the same come in the order of their
//! numbers, and of a state that was seen only 128 bits are kept: so all mixes of four can be explored.

mod fingerprint;
mod mixes;
mod steps;

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
