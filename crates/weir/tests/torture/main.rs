//! The torture of threads: the engine with all its threads, several programs, and a disk that fails, takes its time, and loses power.
//!
//! The simulator (`weir-sim`) tries far more crashes, but its callers take turns. This is for what only real threads show: deadlocks, lost
//! wake-ups, and what races leave behind. `docs/TESTING.md` says how to run it for long; without being told it is short.
//!
//! A *round* has a volume, and some *lives* of it: it is opened, used, ended in one of several ways, checked by fsck, and opened again. What is
//! there then is compared with what may be there (`model`). A thread that waits for a minute is a finding: all say what they do, and the
//! process ends.

mod club;
#[path = "../common/mod.rs"]
mod common;
mod disk;
mod model;
mod owner;
mod public;

use club::Club;
use common::Random;
use disk::{Disk, End};
use model::Found;
use owner::Owner;
use public::Public;
use std::fmt::Write as _;
use std::io::Write as _;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};
use weir::check::{CheckOptions, check_device};
use weir::device::Device;
use weir::*;

/// Whoever does the same for so long waits for ever.
const HANGS_AFTER: Duration = Duration::from_secs(60);
/// Rounds, and calls of each life, where nobody has said how long to go on.
const SMOKE_ROUNDS: u64 = 3;
const SMOKE_OPS: u64 = 100;

/// What is said to all threads of a life, and how far they are.
#[derive(Default)]
pub struct Signals {
    /// All are to stop.
    pub stop: AtomicBool,
    /// The volume is about to be closed.
    pub closing: AtomicBool,
    /// Calls so far.
    pub ops: AtomicU64,
}

/// What one thread does.
pub struct Stage {
    name: String,
    signals: Arc<Signals>,
    does: Mutex<(Instant, String)>,
}

impl Deref for Stage {
    type Target = Signals;
    fn deref(&self) -> &Signals {
        &self.signals
    }
}

/// All stages, for whoever looks for one that hangs.
static STAGES: Mutex<Vec<Arc<Stage>>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Stage {
    fn new(name: String, signals: &Arc<Signals>) -> Arc<Self> {
        let does = Mutex::new((Instant::now(), "begins".to_owned()));
        let stage = Arc::new(Self { name, signals: signals.clone(), does });
        lock(&STAGES).push(stage.clone());
        stage
    }

    /// From now on the thread does this.
    pub fn doing(&self, what: &str) {
        let mut does = lock(&self.does);
        does.0 = Instant::now();
        does.1.clear();
        does.1.push_str(what);
    }
}

/// Ends the process when a thread hangs.
fn watch(seed: &AtomicU64, done: &AtomicBool) {
    while !done.load(Ordering::SeqCst) {
        std::thread::park_timeout(Duration::from_millis(500));
        let stages = lock(&STAGES);
        if stages.iter().all(|stage| lock(&stage.does).0.elapsed() < HANGS_AFTER) {
            continue;
        }
        let mut text = format!("torture: seed {}: a thread hangs\n", seed.load(Ordering::SeqCst));
        for stage in stages.iter() {
            let does = lock(&stage.does);
            let _ = writeln!(text, "  {} ({:?}): {}", stage.name, does.0.elapsed(), does.1);
        }
        for task in std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
            let read = |name| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
            let (name, place) = (read("comm"), read("wchan"));
            let number = task.file_name();
            let _ = writeln!(text, "  thread {} {}: {place}", number.display(), name.trim());
        }
        // Not with a macro: what those print is kept until the test ends.
        let _ = std::io::stderr().write_all(text.as_bytes());
        if std::env::var_os("TORTURE_HOLD").is_some() {
            std::thread::sleep(Duration::from_secs(100_000));
        }
        std::process::abort();
    }
}

/// A number from the environment.
fn said(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

#[test]
fn what_threads_do_is_there_whatever_the_disk_does() {
    let seconds = said("TORTURE_SECONDS");
    let rounds = said("TORTURE_ROUNDS").or(seconds.is_none().then_some(SMOKE_ROUNDS));
    let first = said("TORTURE_SEED").unwrap_or(1);
    let began = Instant::now();
    let (seed, done) = (AtomicU64::new(first), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let watchdog = scope.spawn(|| watch(&seed, &done));
        let mut round = 0;
        let ended = loop {
            let is_late = seconds.is_some_and(|seconds| began.elapsed().as_secs() >= seconds);
            if is_late || rounds.is_some_and(|rounds| round >= rounds) {
                break Ok(());
            }
            seed.store(first + round, Ordering::SeqCst);
            let is_long = seconds.is_some() || said("TORTURE_ROUNDS").is_some();
            let result =
                catch_unwind(AssertUnwindSafe(|| Round::new(first + round, is_long).run()));
            lock(&STAGES).clear();
            if let Err(finding) = result {
                println!("torture: found with TORTURE_SEED={}", first + round);
                break Err(finding);
            }
            round += 1;
        };
        done.store(true, Ordering::SeqCst);
        watchdog.thread().unpark();
        if let Err(finding) = ended {
            std::panic::resume_unwind(finding);
        }
        println!("torture: {round} rounds from seed {first} in {:?}", began.elapsed());
    });
}

/// A volume and who uses it.
struct Round {
    dice: Random,
    is_long: bool,
    owners: Vec<Owner>,
    club: Arc<Club>,
    publics: u64,
    disk: Arc<Disk>,
    memory_bytes: u64,
    /// It fails now and then.
    is_bad: bool,
    /// What was done, for people.
    story: String,
}

/// How a life ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// Amid all work.
    Crash(End),
    /// A flush fails amid all work, and then the power.
    FailedFlush,
    /// Closed when all have stopped.
    Close,
    /// Closed amid all work.
    CloseAmid,
    /// Nobody has it open any more, and it was not closed.
    Drop,
}

impl Round {
    fn new(seed: u64, is_long: bool) -> Self {
        let mut dice = Random::seeded(seed);
        let size_bytes = (2 << 20) << dice.below(4);
        let owners = (0..=dice.below(3)).map(|number| Owner::new(number, seed * 8 + number));
        let owners = owners.collect();
        let disk = Disk::new(size_bytes, &mut dice);
        let memory_bytes = (512 << 10) << dice.below(4);
        let log_blocks = [64, 64, 96, 128, 256][dice.below(5) as usize];
        let log_blocks = log_blocks.min(size_bytes / 4096 / 8);
        let device: Arc<dyn Device> = disk.clone();
        common::format(&device, log_blocks);
        let (publics, is_bad) = (dice.below(4), dice.below(3) > 0);
        let club = Arc::new(Club::new([0, 1, 2, 3, 5, 8][dice.below(6) as usize]));
        let story = format!(
            "seed {seed}: {size_bytes} bytes, {memory_bytes} of memory, {log_blocks} blocks of log, \
             bad: {is_bad}, {publics} publics, {} in the club",
            club.members
        );
        Self { dice, is_long, owners, club, publics, disk, memory_bytes, is_bad, story }
    }

    fn run(mut self) {
        let stage = Stage::new("main".to_owned(), &Arc::default());
        let lives = 2 + self.dice.below(5);
        for life in 0..=lives {
            stage.doing("opens the volume");
            if life > 0 && self.dice.below(3) == 0 {
                self.open_amid_trouble();
            }
            let shown = if life > 0 && self.dice.below(4) == 0 { self.show(&stage) } else { None };
            let options = self.options();
            let volume = self.open(options).unwrap_or_else(|error| {
                panic!("{}: cannot be opened: {error}", self.story);
            });
            if life == 0 {
                for path in ["/pub", "/pub/d0", "/pub/d1", "/pub/d2"] {
                    volume.create_dir(path, 0o755).expect("a directory");
                }
                for owner in &self.owners {
                    volume.create_dir(owner.path(), 0o755).expect("a directory");
                }
                self.club.make(&volume).expect("the club's files");
                volume.sync().expect("sync");
            }
            stage.doing("looks at what is there");
            if let Some(shown) = shown {
                assert_eq!(
                    self.found(&volume),
                    shown,
                    "{}: when it was open for reading",
                    self.story
                );
            }
            for owner in &mut self.owners {
                if let Err(why) = owner.check(&volume) {
                    panic!("{}\n{why}", self.story);
                }
            }
            if let Err(why) = self.club.check(&volume) {
                panic!("{}\n{why}", self.story);
            }
            let ending = match self.dice.below(9) {
                0..3 => Ending::Crash(End::PowerCut),
                3 | 4 => Ending::Crash(End::Killed),
                5 => Ending::FailedFlush,
                6 => Ending::Drop,
                7 if self.is_long => Ending::CloseAmid,
                _ => Ending::Close,
            };
            let _ = write!(self.story, "\n  life {life} ends with {ending:?}");
            if self.is_long {
                // Kept by the test's harness unless it fails, or is told not to.
                println!("torture: {}", self.story.lines().last().unwrap_or_default());
            }
            self.disk = self.live(volume, ending, &stage);
            self.verify(&stage);
        }
    }

    fn open(&self, options: VolumeOptions) -> Result<Volume> {
        let device: Arc<dyn Device> = self.disk.clone();
        Volume::open_device(device, options)
    }

    /// Recovery meets errors, or a crash: what comes after finds what it may find all the same.
    fn open_amid_trouble(&mut self) {
        let options = self.options();
        if self.is_bad && self.dice.below(2) == 0 {
            let weather = &self.disk.core.weather;
            weather.failing_reads.store(self.dice.below(100) as u32, Ordering::SeqCst);
            weather.failing_writes.store(self.dice.below(100) as u32, Ordering::SeqCst);
            let opened = self.open(options);
            self.calm();
            match opened {
                Ok(_) | Err(Error::Io(_) | Error::HostFull(_) | Error::Shutdown(_)) => {}
                Err(error) => panic!("{}: opened where reads fail: {error}", self.story),
            }
            return;
        }
        self.disk.core.weather.slow.store(500, Ordering::SeqCst);
        let delay = Duration::from_micros(self.dice.below(20_000));
        let left = std::thread::scope(|scope| {
            let (disk, dice) = (self.disk.clone(), &mut self.dice);
            scope.spawn(move || {
                let device: Arc<dyn Device> = disk;
                drop(Volume::open_device(device, options));
            });
            std::thread::sleep(delay);
            let end = if dice.below(3) == 0 { End::Killed } else { End::PowerCut };
            self.disk.end(end, dice)
        });
        self.disk = left;
    }

    /// What is there for who opens it for reading, and changes nothing.
    fn show(&mut self, stage: &Stage) -> Option<Vec<Found>> {
        stage.doing("opens the volume for reading");
        let writes = self.disk.writes();
        let options = VolumeOptions { read_only: true, ..self.options() };
        let volume = match self.open(options) {
            Ok(volume) => volume,
            // Who reads has to keep in memory what the log has.
            Err(Error::TooLittleMemory(_)) => return None,
            Err(error) => panic!("{}: cannot be opened for reading: {error}", self.story),
        };
        stage.doing("looks at what is there for reading");
        let found = self.found(&volume);
        drop(volume);
        assert_eq!(self.disk.writes(), writes, "{}: who reads has written", self.story);
        Some(found)
    }

    fn found(&self, volume: &Volume) -> Vec<Found> {
        let found = self.owners.iter().map(|owner| owner.found(volume));
        found.map(|found| found.expect("it can be read")).collect()
    }

    fn options(&mut self) -> VolumeOptions {
        self.memory_bytes = (256 << 10) << self.dice.below(5);
        let mut one_in_two = || self.dice.below(2) == 0;
        VolumeOptions {
            memory_bytes: Some(self.memory_bytes),
            checkpoint_interval_s: 1,
            batch_part_blocks: one_in_two().then_some(2),
            beside_from_pages: one_in_two().then_some(1),
            purge_at_once_blocks: one_in_two().then_some(0),
            round_pages: one_in_two().then_some(3),
            cut_extents: one_in_two().then_some(1),
            dense_merges: one_in_two() && one_in_two(),
            atime: if one_in_two() { AtimePolicy::Relative } else { AtimePolicy::Strict },
            ..VolumeOptions::default()
        }
    }

    /// Nothing is wrong with what is left.
    fn verify(&mut self, stage: &Stage) {
        stage.doing("checks the volume");
        let device: Arc<dyn Device> = self.disk.clone();
        let report = check_device(&device, &CheckOptions::default()).expect("check");
        assert!(report.is_clean(), "{}: {:?}", self.story, report.problems);
    }

    /// One life; answers the disk as it is left.
    fn live(&mut self, volume: Volume, ending: Ending, stage: &Arc<Stage>) -> Arc<Disk> {
        let (left, owners, tickets) = self.work(&volume, ending, stage);
        let mut owners = owners;
        let left = match left {
            None if ending != Ending::Drop => Some(self.close(&volume, &mut owners, ending, stage)),
            left => left,
        };
        if let Some(reason) = volume.shutdown_reason() {
            assert!(!reason.contains("internal error"), "{}: {reason}", self.story);
        }
        stage.doing("drops the volume");
        drop(volume);
        for owner in &mut owners {
            owner.end_tickets(stage);
        }
        for ticket in tickets {
            stage.doing("waits for a ticket to end");
            let _ = ticket.wait();
        }
        self.club.end_tickets(&self.disk.core, stage);
        self.owners = owners;
        left.unwrap_or_else(|| {
            stage.doing("waits until nothing holds the disk");
            while Arc::strong_count(&self.disk) > 1 {
                std::thread::sleep(Duration::from_micros(100));
            }
            self.disk.end(End::Killed, &mut self.dice)
        })
    }

    /// All work, and the end of the life, but for one that ends when all have stopped.
    fn work(
        &mut self,
        volume: &Volume,
        ending: Ending,
        stage: &Arc<Stage>,
    ) -> (Option<Arc<Disk>>, Vec<Owner>, Vec<SyncTicket>) {
        let signals = Arc::new(Signals::default());
        let disk = self.disk.clone();
        let mut owners = std::mem::take(&mut self.owners);
        let seed = self.dice.below(1 << 40);
        let (left, tickets) = std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for owner in &mut owners {
                let own = Stage::new(owner.path(), &signals);
                let (stage, disk) = (own.clone(), &disk);
                let work = move || {
                    owner.work(volume, disk, &stage);
                    Vec::new()
                };
                threads.push(spawn(scope, &own, work));
            }
            for number in 0..self.publics {
                let own = Stage::new(format!("public {number}"), &signals);
                let (stage, disk, dice) = (own.clone(), &disk, Random::seeded(seed + number));
                let work = move || {
                    let (open, tickets) = (Vec::new(), Vec::new());
                    Public { dice, volume, disk, stage: &stage, open, tickets }.work()
                };
                threads.push(spawn(scope, &own, work));
            }
            for number in 0..self.club.members {
                let own = Stage::new(format!("member {number}"), &signals);
                let (stage, disk, club) = (own.clone(), &disk, self.club.clone());
                let dice = Random::seeded(seed + 100 + number);
                let work = move || {
                    club.member(number, dice, volume, disk, &stage).work();
                    Vec::new()
                };
                threads.push(spawn(scope, &own, work));
            }
            let own = Stage::new("reaper".to_owned(), &signals);
            let (club, core, reaps) = (self.club.clone(), disk.core.clone(), own.clone());
            club.stop_reaper.store(false, Ordering::SeqCst);
            let reaper = spawn(scope, &own, move || {
                club.reap(&core, &reaps);
                Vec::new()
            });
            let left = catch_unwind(AssertUnwindSafe(|| {
                self.wait(&signals, &threads, stage);
                self.end(volume, ending, &signals, stage)
            }));
            signals.stop.store(true, Ordering::SeqCst);
            stage.doing("waits for all to stop");
            let mut tickets = Vec::new();
            let ended: Vec<_> = threads.into_iter().map(ScopedJoinHandle::join).collect();
            self.club.stop_reaper.store(true, Ordering::SeqCst);
            for thread in ended.into_iter().chain([reaper.join()]) {
                match thread {
                    Ok(left) => tickets.extend(left),
                    Err(finding) => self.fails(finding),
                }
            }
            match left {
                Ok(left) => (left, tickets),
                Err(finding) => self.fails(finding),
            }
        });
        if self.is_long {
            println!("torture:     {} calls", signals.ops.load(Ordering::SeqCst));
        }
        // Whose work is over hangs no more.
        lock(&STAGES).retain(|known| Arc::ptr_eq(known, stage));
        (left, owners, tickets)
    }

    fn fails(&self, finding: Box<dyn std::any::Any + Send>) -> ! {
        println!("torture: {}", self.story);
        std::panic::resume_unwind(finding)
    }

    /// Until so much was done, while the weather changes.
    fn wait<T>(&mut self, signals: &Signals, threads: &[ScopedJoinHandle<'_, T>], stage: &Stage) {
        let most = if self.is_long { 4000 } else { SMOKE_OPS };
        let until = 1 + self.dice.below(most);
        let mut change = 0;
        loop {
            let ops = signals.ops.load(Ordering::SeqCst);
            if ops >= until || threads.iter().any(ScopedJoinHandle::is_finished) {
                break;
            }
            if ops >= change {
                self.set_weather();
                change = ops + self.dice.below(300);
            }
            // It is the others' to hang.
            stage
                .doing(&format!("waits for some work to be done, in {:?}", self.disk.core.weather));
            std::thread::sleep(Duration::from_micros(300));
        }
    }

    fn set_weather(&mut self) {
        let weather = &self.disk.core.weather;
        let mut one_in = |chance: u64, per_mille: u64| {
            if self.dice.below(chance) == 0 { 1 + self.dice.below(per_mille) as u32 } else { 0 }
        };
        weather.slow.store(one_in(2, 100), Ordering::SeqCst);
        weather.stuck.store(if self.is_long { one_in(6, 3) } else { 0 }, Ordering::SeqCst);
        if !self.is_bad {
            return;
        }
        weather.failing_reads.store(one_in(4, 300), Ordering::SeqCst);
        weather.failing_writes.store(one_in(4, 300), Ordering::SeqCst);
        // Where nothing has room everybody waits, call after call: too slow for who is in a hurry.
        weather.host_is_full.store(self.is_long && one_in(8, 1) > 0, Ordering::SeqCst);
    }

    fn calm(&self) {
        let weather = &self.disk.core.weather;
        for what in [&weather.failing_reads, &weather.failing_writes, &weather.failing_flushes] {
            what.store(0, Ordering::SeqCst);
        }
        weather.host_is_full.store(false, Ordering::SeqCst);
    }

    /// Ends the life while the others work; `None`: it ends when they have stopped.
    fn end(
        &mut self,
        volume: &Volume,
        ending: Ending,
        signals: &Signals,
        stage: &Stage,
    ) -> Option<Arc<Disk>> {
        match ending {
            Ending::Crash(end) => {
                let left = self.disk.end(end, &mut self.dice);
                stage.doing("makes all hear of the crash");
                let _ = volume.sync();
                return Some(left);
            }
            Ending::FailedFlush => {
                self.disk.core.weather.failing_flushes.store(1000, Ordering::SeqCst);
                stage.doing("makes a flush fail");
                let _ = volume.setxattr(Volume::ROOT, b"user.x", b"x", XattrMode::Set);
                let _ = volume.sync();
                if self.dice.below(2) == 0 {
                    // It was the only one.
                    self.calm();
                }
            }
            Ending::Close | Ending::Drop => self.calm(),
            Ending::CloseAmid => {
                self.calm();
                self.club.is_closing();
                signals.closing.store(true, Ordering::SeqCst);
                stage.doing("closes the volume amid work");
                let closed = std::thread::scope(|scope| {
                    let other = (self.dice.below(2) == 0).then(|| scope.spawn(|| volume.close()));
                    let closed = volume.close();
                    if let Some(other) = other {
                        self.check_close(&other.join().expect("nothing panics"));
                    }
                    closed
                });
                signals.stop.store(true, Ordering::SeqCst);
                self.check_close(&closed);
            }
        }
        None
    }

    fn check_close(&self, closed: &Result<()>) {
        let may_fail = self.disk.core.has_failed();
        match closed {
            Err(Error::Io(_) | Error::HostFull(_) | Error::Shutdown(_)) if may_fail => {}
            Ok(()) => {}
            Err(error) => panic!("{}: cannot be closed: {error}", self.story),
        }
    }

    /// Ends a life that nobody works in any more.
    fn close(
        &mut self,
        volume: &Volume,
        owners: &mut [Owner],
        ending: Ending,
        stage: &Stage,
    ) -> Arc<Disk> {
        if ending == Ending::FailedFlush {
            return self.disk.end(End::PowerCut, &mut self.dice);
        }
        self.calm();
        if ending == Ending::Close {
            self.club.is_closing();
        }
        stage.doing("closes the volume");
        // Again, if it was closed amid work; and what has failed before may be heard of once.
        let mut closed = volume.close();
        for _ in 0..3 {
            if closed.is_err() {
                closed = volume.close();
            }
        }
        self.check_close(&closed);
        if let Err(error) = &closed {
            // The disk is well again.
            let is_shut_down = volume.shutdown_reason().is_some();
            assert!(is_shut_down, "{}: cannot be closed: {error}", self.story);
            return self.disk.end(End::PowerCut, &mut self.dice);
        }
        self.club.was_closed();
        for owner in owners {
            owner.was_closed();
        }
        if ending != Ending::Close {
            // Who works beside the close may have written what nobody was promised.
            return self.disk.end(End::PowerCut, &mut self.dice);
        }
        let stats = volume.stats();
        let held = (stats.tickets, stats.dirty_pages, stats.space.reserved_blocks);
        assert_eq!(held, (0, 0, 0), "{}: tickets, dirty pages, blocks promised", self.story);
        self.disk.end(End::AtRest, &mut self.dice)
    }
}

fn spawn<'scope>(
    scope: &'scope Scope<'scope, '_>,
    stage: &Stage,
    work: impl FnOnce() -> Vec<SyncTicket> + Send + 'scope,
) -> ScopedJoinHandle<'scope, Vec<SyncTicket>> {
    let named = std::thread::Builder::new().name(stage.name.clone());
    named.spawn_scoped(scope, work).expect("a thread")
}
