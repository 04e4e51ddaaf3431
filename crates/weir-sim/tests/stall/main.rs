//! The stall gate: what does not have to wait for the disk does not wait for it, whatever else is going on.
//!
//! On a disk where a write takes 1 ms and a flush 50 ms, one file of 1 GiB is synced and checkpoints are made without a
//! break. Meanwhile cached reads, no-wait reads, writes below the throttle, metadata operations and the submission of
//! tickets never take longer than 1 ms, and a small fsync never longer than two flushes and its own write: the flush that is
//! under way when it comes, and its own. All times are virtual ([`time`]) and the schedule is drawn from a seed: no run
//! depends on the machine.
//!
//! Two things are added to a small fsync's bound, because nothing can avoid them. Its write queues in the log behind the
//! frames of those who came before: a millisecond each. And a page that is on its way home when it is synced again is
//! waited for, since one version of a page is under way at a time: as long as the batch takes that it travels in. Syncs of new
//! pages, and of pages written again and again, are therefore measured apart. The data of the big fsync is never waited for.
//!
//! ```text
//! cargo test --release -p weir-sim --features stall --test stall
//! STALL_MIB=64 STALL_SEED=7 STALL_TRACE=1 cargo test ...    smaller, other schedule, says who waits for what
//! ```

mod by_place;
mod disk;
mod full;
mod full_log;
mod neighbours;
mod time;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};

use disk::{FLUSH_NS, Order, SlowDisk, WRITE_NS};
use shuttle::{Config, Runner, thread};
use time::{OneByOne, Time};
use weir::device::{Device, IoClass};
use weir::{
    BackgroundMode, BackgroundWork, CreateOptions, File, FileType, NewInode, OpenFlags, SetAttr,
    SyncKind, SyncRangeFlags, Volume, VolumeOptions,
};
use weir_sim::rng::Rng;

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// What an operation that need not wait may take.
const PROMPT_NS: u64 = 1_000_000;
/// What a small fsync may take beyond the frames that are written before it: the flush under way when it comes, and its own.
const SMALL_FSYNC_NS: u64 = 2 * FLUSH_NS;
/// So many frames may be written before a small fsync's own flush, its own included.
const FRAMES: u64 = 4;

fn environment(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// Waits of one kind of operation.
#[derive(Debug, Clone, Copy, Default)]
struct Waits {
    count: u64,
    worst_ns: u64,
    worst_at_ns: u64,
    /// Longest wait beyond what was granted to the operation at hand.
    late_ns: u64,
}

/// Writes that an operation may have to wait for, a millisecond each.
#[derive(Debug, Clone, Copy)]
enum Before {
    /// Frames of the log, whatever class they are of: those that go with data are not of the log's.
    Frames,
    /// All of this class.
    Class(IoClass),
}

/// Everything that the threads share.
struct Stage {
    time: Time,
    disk: Arc<SlowDisk>,
    volume: Volume,
    big: File,
    big_bytes: u64,
    /// What an operation that need not wait may take, and a small fsync beyond the writes before its own.
    prompt_ns: u64,
    small_fsync_ns: u64,
    over: AtomicBool,
    waits: Mutex<BTreeMap<&'static str, Waits>>,
}

impl Stage {
    fn is_over(&self) -> bool {
        self.over.load(SeqCst)
    }

    /// Measures how long `operation` waits. It may for `limit_ns`, and a millisecond for each write of `classes` that
    /// ends meanwhile.
    fn timed<T>(
        &self,
        name: &'static str,
        (limit_ns, before): (u64, &[Before]),
        operation: impl FnOnce() -> T,
    ) -> T {
        let writes = || before.iter().map(|before| self.writes(*before)).sum::<u64>();
        let (began, written) = (self.time.now_ns(), writes());
        let result = operation();
        let took_ns = self.time.now_ns() - began;
        let late_ns = took_ns.saturating_sub(limit_ns + (writes() - written) * WRITE_NS);
        if late_ns > 0 {
            for line in self.disk.waiting() {
                eprintln!("{name} waited {took_ns} ns from {began} ns on; still waiting: {line}");
            }
        }
        self.note(name, (began, took_ns), late_ns);
        result
    }

    fn writes(&self, before: Before) -> u64 {
        match before {
            Before::Frames => self.disk.frames(),
            Before::Class(class) => self.disk.writes(class),
        }
    }

    /// An operation has taken so long, which is `late_ns` more than it may.
    fn note(&self, name: &'static str, (began_ns, took_ns): (u64, u64), late_ns: u64) {
        let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = waits.entry(name).or_default();
        entry.count += 1;
        entry.late_ns = entry.late_ns.max(late_ns);
        if took_ns > entry.worst_ns {
            (entry.worst_ns, entry.worst_at_ns) = (took_ns, began_ns);
        }
    }

    /// A prompt operation, and a short pause, odd so that all phases of the disk's work are met.
    fn prompt<T>(&self, name: &'static str, rng: &mut Rng, operation: impl FnOnce() -> T) -> T {
        let result = self.timed(name, (self.prompt_ns, &[]), operation);
        self.time.sleep(100_000 + rng.below(900_000));
        result
    }

    fn file(&self, name: &str) -> File {
        self.volume.open_file(name, OpenFlags::CREATE).expect("open")
    }
}

/// Cached pages of a small clean file, and of the big one, which is under writeback.
fn reads(stage: &Stage, mut rng: Rng) {
    let small = stage.file("/small-read");
    let mut page = vec![0; PAGE as usize];
    while !stage.is_over() {
        let offset = PAGE * rng.below(16);
        stage.prompt("cached read", &mut rng, || small.read_at(offset, &mut page)).expect("read");
        let offset = PAGE * rng.below(stage.big_bytes / PAGE);
        stage
            .prompt("cached read of the file being synced", &mut rng, || {
                stage.big.read_at(offset, &mut page)
            })
            .expect("read");
        // Whether it finds everything cached or not: it does not wait.
        let read =
            stage.prompt("no-wait read", &mut rng, || stage.big.read_at_nowait(offset, &mut page));
        assert!(matches!(read, Ok(_) | Err(weir::Error::WouldBlock)), "{read:?}");
    }
}

fn writes(stage: &Stage, mut rng: Rng) {
    let small = stage.file("/small-write");
    let page = vec![7; PAGE as usize];
    while !stage.is_over() {
        let offset = PAGE * rng.below(64);
        stage.prompt("write", &mut rng, || small.write_at(offset, &page)).expect("write");
        stage.prompt("append", &mut rng, || small.append(&page[..100])).expect("append");
        let offset = PAGE * rng.below(stage.big_bytes / PAGE);
        stage
            .prompt("write to the file being synced", &mut rng, || {
                stage.big.write_at(offset, &page)
            })
            .expect("write");
        if small.size() > MIB {
            stage.prompt("truncate", &mut rng, || small.truncate(64 * PAGE)).expect("truncate");
        }
    }
}

fn names(stage: &Stage, mut rng: Rng) {
    let volume = &stage.volume;
    let dir = volume.create_dir("/names", 0o755).expect("mkdir").ino;
    let new = NewInode::new(FileType::Regular, 0o644);
    let mut number = 0;
    while !stage.is_over() {
        number += 1;
        let (name, other) = (format!("n{number}").into_bytes(), format!("m{number}").into_bytes());
        let made =
            stage.prompt("create", &mut rng, || volume.make(dir, &name, &new)).expect("create");
        stage.prompt("lookup", &mut rng, || volume.lookup(dir, &name)).expect("lookup");
        let change = SetAttr { permissions: Some(0o600), ..SetAttr::default() };
        stage.prompt("setattr", &mut rng, || volume.setattr(made.ino, &change)).expect("setattr");
        stage
            .prompt("rename", &mut rng, || {
                volume.rename(dir, &name, dir, &other, weir::RenameMode::Replace)
            })
            .expect("rename");
        stage.prompt("getattr", &mut rng, || volume.getattr(made.ino)).expect("getattr");
        stage
            .prompt("readdir", &mut rng, || volume.readdir(dir, 0, &mut |_| true))
            .expect("readdir");
        if number % 2 == 0 {
            stage.prompt("unlink", &mut rng, || volume.unlink(dir, &other)).expect("unlink");
        }
        stage.prompt("statfs", &mut rng, || volume.statfs());
    }
}

fn tickets(stage: &Stage, mut rng: Rng) {
    let page = vec![9; PAGE as usize];
    let mut in_flight = Vec::new();
    let files: Vec<File> = (0..8).map(|number| stage.file(&format!("/ticket{number}"))).collect();
    while !stage.is_over() {
        let file = &files[rng.index(files.len())];
        let offset = PAGE * rng.below(32);
        stage.prompt("write", &mut rng, || file.write_at(offset, &page)).expect("write");
        let ticket = stage.prompt("ticket submission", &mut rng, || {
            file.fsync_async(offset..offset + PAGE, SyncKind::Data)
        });
        in_flight.push(ticket.expect("ticket"));
        if rng.one_in(16) {
            let ticket =
                stage.prompt("ticket submission, volume", &mut rng, || stage.volume.sync_async());
            in_flight.push(ticket.expect("ticket"));
        }
        in_flight.retain(|ticket| ticket.poll().is_none_or(|result| result.is_err()));
    }
    for ticket in in_flight {
        ticket.wait().expect("durable");
    }
}

/// Appends whole pages: none is written twice.
fn small_fsyncs(stage: &Stage, mut rng: Rng) {
    let file = stage.file("/log");
    let record = vec![3; PAGE as usize];
    while !stage.is_over() {
        file.append(&record).expect("append");
        let grant = (stage.small_fsync_ns, &[Before::Frames][..]);
        stage.timed(NEW_PAGE, grant, || file.fdatasync()).expect("fsync");
        stage.time.sleep(rng.below(20_000_000));
    }
}

/// Writes the same pages again and again, which checkpoints bring home meanwhile.
fn small_rewrites(stage: &Stage, mut rng: Rng) {
    let file = stage.file("/database");
    let record = vec![3; 3000];
    while !stage.is_over() {
        file.write_at(PAGE * rng.below(4), &record).expect("write");
        let grant =
            (stage.small_fsync_ns, &[Before::Frames, Before::Class(IoClass::Background)][..]);
        stage.timed(SAME_PAGE, grant, || file.fdatasync()).expect("fsync");
        stage.time.sleep(rng.below(20_000_000));
    }
}

const NEW_PAGE: &str = "small fsync of a new page";
const SAME_PAGE: &str = "small fsync of a page written again";
const BIG: &str = "big fsync";

fn checkpoints(stage: &Stage) {
    while !stage.is_over() {
        if !stage.volume.background_step(BackgroundWork::Checkpoint).expect("checkpoint") {
            stage.time.sleep(5_000_000);
        }
    }
}

/// A volume with a dirty big file, and everything else cached; and the threads of its disk.
fn prepare(time: &Time, big_bytes: u64) -> (Stage, Vec<thread::JoinHandle<()>>) {
    prepare_on(time, big_bytes, 4 * big_bytes + 512 * MIB, Order::PerClass)
}

fn prepare_on(
    time: &Time,
    big_bytes: u64,
    disk_bytes: u64,
    order: Order,
) -> (Stage, Vec<thread::JoinHandle<()>>) {
    let disk = SlowDisk::new(disk_bytes, time.clone(), order);
    let servers = disk.start();
    let device = Arc::clone(&disk) as Arc<dyn Device>;
    let create = CreateOptions { log_bytes: Some(64 * MIB), ..CreateOptions::default() };
    Volume::format_device(&device, &create).expect("format");
    let options = VolumeOptions {
        // The big file stays below the level at which writers are slowed down.
        memory_bytes: Some(8 * big_bytes + 256 * MIB),
        background: BackgroundMode::Threads,
        clock: Arc::new(time.clone()),
        ..VolumeOptions::default()
    };
    let volume = Volume::open_device(device, options).expect("open");
    let small = volume.open_file("/small-read", OpenFlags::CREATE).expect("create");
    small.write_at(0, &vec![1; 16 * PAGE as usize]).expect("write");
    small.fsync().expect("fsync");
    let big = volume.open_file("/big", OpenFlags::CREATE).expect("create");
    let chunk = vec![5; MIB as usize];
    for offset in (0..big_bytes).step_by(MIB as usize) {
        big.write_at(offset, &chunk).expect("write");
    }
    let (over, waits) = (AtomicBool::new(false), Mutex::default());
    let (prompt_ns, small_fsync_ns) = (PROMPT_NS, SMALL_FSYNC_NS);
    let time = time.clone();
    let stage =
        Stage { time, disk, volume, big, big_bytes, prompt_ns, small_fsync_ns, over, waits };
    (stage, servers)
}

/// What a thread does.
type Body = fn(&Stage, Rng);

/// Starts a thread for each of `bodies`.
fn start(stage: &Arc<Stage>, seed: u64, bodies: &[(u64, Body)]) -> Vec<thread::JoinHandle<()>> {
    let start = |&(label, body): &(u64, Body)| {
        let stage = Arc::clone(stage);
        thread::spawn(move || body(&stage, Rng::derived(seed, label)))
    };
    bodies.iter().map(start).collect()
}

/// Closes the volume and ends disk and time; who waited how long.
fn end(
    time: &Time,
    ticker: thread::JoinHandle<()>,
    stage: Arc<Stage>,
    servers: Vec<thread::JoinHandle<()>>,
) -> BTreeMap<&'static str, Waits> {
    let waits = stage.waits.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let disk = Arc::clone(&stage.disk);
    drop(stage);
    disk.stop();
    for server in servers {
        server.join().expect("no server panics");
    }
    time.stop();
    ticker.join().expect("the ticker does not panic");
    waits
}

fn run(seed: u64, big_bytes: u64) -> BTreeMap<&'static str, Waits> {
    let time = Time::default();
    let ticker = time.start();
    let (stage, servers) = prepare(&time, big_bytes);
    let stage = Arc::new(stage);
    let began = time.now_ns();
    let bodies: [(u64, Body); 8] = [
        (1, reads),
        (2, writes),
        (3, names),
        (4, tickets),
        (5, |stage, _| checkpoints(stage)),
        (6, small_fsyncs),
        (7, small_fsyncs),
        (8, small_rewrites),
    ];
    let threads = start(&stage, seed, &bodies);
    // Everybody is at work when the big fsync comes.
    time.sleep(100_000_000);
    stage.timed(BIG, (u64::MAX / 2, &[]), || stage.big.fsync()).expect("fsync");
    time.sleep(200_000_000);
    stage.over.store(true, SeqCst);
    for thread in threads {
        thread.join().expect("no thread panics");
    }
    let elapsed_ms = (time.now_ns() - began) / 1_000_000;
    let checkpoints = stage.volume.stats().checkpoints;
    println!("{elapsed_ms} ms, {checkpoints} checkpoints, {:?}", stage.disk.served());
    assert!(checkpoints > 1, "checkpoints were made");
    assert!(stage.disk.served().bytes > big_bytes, "the big file was written");
    end(&time, ticker, stage, servers)
}

/// What `run` yields under the scheduler.
fn scheduled(
    seed: u64,
    run: impl Fn() -> BTreeMap<&'static str, Waits> + Send + Sync + 'static,
) -> BTreeMap<&'static str, Waits> {
    let mut config = Config::default();
    config.stack_size = 1 << 20;
    config.max_steps = shuttle::MaxSteps::None;
    config.silence_warnings = true;
    config.failure_persistence = shuttle::FailurePersistence::None;
    let result = Arc::new(Mutex::new(BTreeMap::new()));
    let filled = Arc::clone(&result);
    Runner::new(OneByOne::new(seed), config).run(move || {
        *filled.lock().unwrap_or_else(PoisonError::into_inner) = run();
    });
    result.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Says who waited how long; answers who waited too long.
fn report(waits: &BTreeMap<&'static str, Waits>) -> Vec<String> {
    let mut late = Vec::new();
    for (name, wait) in waits {
        let (worst_us, at_us) = (wait.worst_ns / 1000, wait.worst_at_ns / 1000);
        println!("{name:40} {:6} times, worst {worst_us:7} us, at {at_us} us", wait.count);
        if wait.late_ns > 0 {
            late.push(format!("{name} waited {} us too long", wait.late_ns / 1000));
        }
    }
    late
}

#[test]
fn nothing_waits_for_a_big_fsync_and_a_checkpoint_but_who_has_to() {
    let seed = environment("STALL_SEED", 1);
    let big_bytes = environment("STALL_MIB", 1024) * MIB;
    let waits = scheduled(seed, move || run(seed, big_bytes));
    let late = report(&waits);
    for (name, wait) in &waits {
        assert!(*name == BIG || *name == "truncate" || wait.count > 2, "{name}: {wait:?}");
    }
    assert!(waits[BIG].worst_ns >= FLUSH_NS, "it has to wait for the disk");
    let frames_ns = waits[NEW_PAGE].worst_ns.saturating_sub(SMALL_FSYNC_NS);
    assert!(frames_ns <= FRAMES * WRITE_NS, "{frames_ns} ns of frames before a small fsync's own");
    assert!(late.is_empty(), "{late:#?}");
}
