//! What a submitter, a driver or the device may do next in a state.

use super::*;

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
    pub(super) fn steps(&self, world: &World, who: Who, worlds: &mut Vec<World>) {
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
}
