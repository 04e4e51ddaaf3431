//! Exhaustive exploration of [`Core`]: every interleaving of a few submitters, the driver, a second
//! flusher (the checkpoint) and a device that may fail, to the end. States already seen are not
//! visited twice, so the exploration is complete, not bounded in depth.

use super::*;
use std::collections::HashSet;
use std::hash::{Hash, Hasher};

/// What a submitter wants after it has appended its operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Want {
    Durable,
    Written,
    Callback,
    WriteOut,
}

/// Where a submitter or the driver is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum At {
    Start,
    Appended(Lsn),
    Parked(Lsn),
    /// Leads; has not sealed the group.
    Leading(Lsn),
    /// Leads; frames up to the second LSN are still to be written.
    Writing(Lsn, Lsn),
    Flushing(Lsn, Flush, Lsn),
    /// Calls callbacks; true after it has called one.
    Acking(Lsn, bool),
    Done,
}

/// The checkpoint flushes once, at any time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Checkpoint {
    Before,
    Flushing(Flush, Lsn),
    After,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    core: Core<u8>,
    actors: Vec<At>,
    results: Vec<Option<bool>>,
    lsns: Vec<Lsn>,
    appended: Lsn,
    written: Lsn,
    /// What really survives a power cut.
    stable: Lsn,
    failures_left: u8,
    driver_awake: bool,
    checkpoint: Checkpoint,
    last_ack: Lsn,
    /// Callbacks that came when their LSN was durable already.
    late: Vec<bool>,
    broken: bool,
}

struct Explorer {
    wants: Vec<Want>,
    /// Hashes of the states visited: 128 bits, so that none is taken for another.
    seen: HashSet<(u64, u64)>,
    ends: usize,
    failed_ends: usize,
}

impl Explorer {
    fn driver(&self) -> usize {
        self.wants.len()
    }

    fn answer(&self, world: &mut World, who: usize, success: bool) {
        assert_eq!(world.results[who], None, "{who} was answered twice");
        if success && self.wants[who] != Want::Written {
            assert!(world.lsns[who] <= world.stable, "acknowledged before durable: {world:?}");
        }
        if success && self.wants[who] == Want::Written {
            assert!(world.lsns[who] <= world.written);
        }
        world.results[who] = Some(success);
    }

    fn wake(&self, world: &mut World, wake: Vec<u8>) {
        for who in wake {
            let who = usize::from(who);
            let At::Parked(lsn) = world.actors[who] else { panic!("woken but not parked") };
            let reached = match self.wants[who] {
                Want::Written => lsn <= world.core.written,
                _ => lsn <= world.core.durable(),
            };
            self.answer(world, who, reached && !world.core.is_failed());
            world.actors[who] = At::Done;
        }
    }

    fn finish_own(&self, world: &mut World, who: usize, lsn: Lsn) {
        if who == self.driver() {
            world.actors[who] = At::Start;
            return;
        }
        if self.wants[who] != Want::Callback && self.wants[who] != Want::WriteOut {
            let reached = match self.wants[who] {
                Want::Written => lsn <= world.core.written,
                _ => lsn <= world.core.durable(),
            };
            assert!(reached || world.core.is_failed(), "a round must reach the leader's own goal");
            self.answer(world, who, reached);
        }
        world.actors[who] = At::Done;
    }

    fn arrive(&self, world: &mut World, who: usize, lsn: Lsn) {
        let goal = match self.wants[who] {
            Want::Durable => Goal::Durable(lsn),
            Want::Written => Goal::Written(lsn),
            Want::Callback => {
                world.late[who] = lsn <= world.core.durable();
                world.driver_awake |= world.core.arrive_callback(lsn, who as u8);
                world.actors[who] = At::Done;
                return;
            }
            Want::WriteOut => {
                world.driver_awake |= world.core.request_write_out();
                world.actors[who] = At::Done;
                return;
            }
        };
        world.actors[who] = match world.core.arrive(goal) {
            Arrival::Done | Arrival::Failed => {
                let success = world.core.reached(goal);
                self.answer(world, who, success);
                At::Done
            }
            Arrival::Lead => At::Leading(lsn),
            Arrival::Wait => {
                world.core.park(goal, who as u8);
                At::Parked(lsn)
            }
        };
    }

    fn fail(&self, world: &mut World) {
        let mut wake = Vec::new();
        world.core.fail(&mut wake);
        self.wake(world, wake);
    }

    fn end_round(world: &mut World, who: usize, lsn: Lsn) {
        match world.core.end_round() {
            Next::Caller(next) => {
                let next = usize::from(next);
                let At::Parked(next_lsn) = world.actors[next] else { panic!("leader not parked") };
                world.actors[next] = At::Leading(next_lsn);
            }
            Next::Driver => world.driver_awake = true,
            Next::Idle => {}
        }
        world.actors[who] = At::Acking(lsn, false);
    }

    /// All worlds that one step of `who` can lead to.
    fn steps(&self, world: &World, who: usize) -> Vec<World> {
        let mut next = world.clone();
        match world.actors[who] {
            At::Start if who == self.driver() => {
                if !world.driver_awake {
                    return Vec::new();
                }
                next.driver_awake = false;
                next.actors[who] = if next.core.try_lead_as_driver() {
                    At::Leading(0)
                } else {
                    At::Acking(0, false)
                };
            }
            At::Start => {
                // Submitters that want the same are interchangeable: they start in order.
                let twin_waits = (0..who).any(|twin| {
                    self.wants[twin] == self.wants[who] && world.actors[twin] == At::Start
                });
                if twin_waits {
                    return Vec::new();
                }
                next.appended += 1;
                next.lsns[who] = next.appended;
                next.actors[who] = At::Appended(next.appended);
            }
            At::Appended(lsn) => self.arrive(&mut next, who, lsn),
            At::Parked(_) | At::Done => return Vec::new(),
            At::Leading(lsn) => {
                next.actors[who] = At::Writing(lsn, next.appended);
                if next.written == next.appended {
                    Self::after_writes(&mut next, who, lsn);
                }
            }
            At::Writing(lsn, until) => return self.step_write(world, who, lsn, until),
            At::Flushing(lsn, flush, covers) => {
                let mut worlds = Vec::new();
                if world.failures_left > 0 {
                    let mut failed = world.clone();
                    failed.failures_left -= 1;
                    failed.broken = true;
                    self.fail(&mut failed);
                    Self::end_round(&mut failed, who, lsn);
                    worlds.push(failed);
                }
                self.end_flush(&mut next, flush, covers);
                Self::end_round(&mut next, who, lsn);
                worlds.push(next);
                return worlds;
            }
            At::Acking(lsn, called) => {
                if called {
                    next.core.finish_acks();
                }
                if let Some(&(waiter, success)) = next.core.take_acks(1).first() {
                    self.call(&mut next, usize::from(waiter), success);
                    next.actors[who] = At::Acking(lsn, true);
                } else {
                    self.finish_own(&mut next, who, lsn);
                }
            }
        }
        vec![next]
    }

    fn step_write(&self, world: &World, who: usize, lsn: Lsn, until: Lsn) -> Vec<World> {
        let mut next = world.clone();
        if world.core.is_failed() {
            Self::end_round(&mut next, who, lsn);
            return vec![next];
        }
        let mut worlds = Vec::new();
        if world.failures_left > 0 {
            let mut failed = world.clone();
            failed.failures_left -= 1;
            self.fail(&mut failed);
            Self::end_round(&mut failed, who, lsn);
            worlds.push(failed);
        }
        next.written += 1;
        let mut wake = Vec::new();
        next.core.frame_written(next.written, false, &mut wake);
        self.wake(&mut next, wake);
        if next.written == until {
            Self::after_writes(&mut next, who, lsn);
        }
        worlds.push(next);
        worlds
    }

    fn after_writes(world: &mut World, who: usize, lsn: Lsn) {
        if world.core.wants_flush() {
            world.actors[who] = At::Flushing(lsn, world.core.begin_flush(), world.written);
        } else {
            Self::end_round(world, who, lsn);
        }
    }

    /// Calls a callback.
    fn call(&self, world: &mut World, waiter: usize, success: bool) {
        self.answer(world, waiter, success);
        let lsn = world.lsns[waiter];
        if success {
            assert!(world.late[waiter] || lsn >= world.last_ack, "called out of order");
            world.last_ack = lsn.max(world.last_ack);
        }
    }

    fn end_flush(&self, world: &mut World, flush: Flush, covers: Lsn) {
        if !world.broken {
            world.stable = world.stable.max(covers);
        }
        let mut wake = Vec::new();
        world.core.end_flush(flush, &mut wake);
        self.wake(world, wake);
    }

    /// The checkpoint's own flush, once, at any time.
    fn checkpoint_steps(&self, world: &World) -> Vec<World> {
        let mut next = world.clone();
        match world.checkpoint {
            Checkpoint::Before => {
                next.checkpoint = Checkpoint::Flushing(next.core.begin_flush(), next.written);
                vec![next]
            }
            Checkpoint::Flushing(flush, covers) => {
                let mut failed = world.clone();
                self.end_flush(&mut next, flush, covers);
                // Whoever ends a flush calls the callbacks it acknowledged; here the driver does.
                next.driver_awake |= next.core.driver_has_work();
                next.checkpoint = Checkpoint::After;
                if world.failures_left == 0 {
                    return vec![next];
                }
                failed.failures_left -= 1;
                failed.broken = true;
                self.fail(&mut failed);
                failed.driver_awake |= failed.core.driver_has_work();
                failed.checkpoint = Checkpoint::After;
                vec![next, failed]
            }
            Checkpoint::After => Vec::new(),
        }
    }

    fn check_end(&mut self, world: &World) {
        self.ends += 1;
        self.failed_ends += usize::from(world.core.is_failed());
        for (who, want) in self.wants.iter().enumerate() {
            assert_eq!(world.actors[who], At::Done, "{who} waits for ever: {world:?}");
            if *want != Want::WriteOut {
                assert!(world.results[who].is_some(), "{who} was never answered: {world:?}");
            }
        }
        assert!(world.core.leader.is_none() && world.core.acks.is_empty());
        let wrote_out = !self.wants.contains(&Want::WriteOut) || world.core.is_failed();
        assert!(wrote_out || !world.core.write_out);
    }

    fn explore(wants: &[Want], failures: u8) -> Self {
        let count = wants.len();
        let world = World {
            core: Core::new(0),
            actors: vec![At::Start; count + 1],
            results: vec![None; count],
            lsns: vec![0; count],
            appended: 0,
            written: 0,
            stable: 0,
            failures_left: failures,
            driver_awake: false,
            checkpoint: Checkpoint::Before,
            last_ack: 0,
            late: vec![false; count],
            broken: false,
        };
        let mut explorer =
            Self { wants: wants.to_vec(), seen: HashSet::new(), ends: 0, failed_ends: 0 };
        let mut todo = vec![world];
        while let Some(world) = todo.pop() {
            let mut successors = explorer.checkpoint_steps(&world);
            for who in 0..=count {
                successors.extend(explorer.steps(&world, who));
            }
            if successors.is_empty() {
                explorer.check_end(&world);
            }
            for next in successors {
                if explorer.seen.insert(fingerprint(&next)) {
                    todo.push(next);
                }
            }
        }
        assert!(explorer.ends > 0);
        assert!(failures == 0 || explorer.failed_ends > 0);
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
    let all = [Want::Durable, Want::Written, Want::Callback, Want::WriteOut];
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
            .collect();
    }
    result.into_iter().map(|(wants, _)| wants).collect()
}

#[test]
fn every_interleaving_of_three_submitters_with_a_failure_acknowledges_truly_and_strands_nobody() {
    for wants in combinations(3) {
        Explorer::explore(&wants, 1);
    }
}

#[test]
fn every_interleaving_of_four_callers_acknowledges_truly_and_strands_nobody() {
    for (wants, failures) in [
        ([Want::Durable; 4], 1),
        ([Want::Durable, Want::Durable, Want::Callback, Want::Callback], 1),
        ([Want::Durable, Want::Written, Want::Callback, Want::WriteOut], 0),
    ] {
        Explorer::explore(&wants, failures);
    }
}
