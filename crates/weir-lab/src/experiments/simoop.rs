//! simoop: a mixed load under memory pressure, the model of a Hadoop-like machine.
//!
//! Workers keep touching a working set; each loop of a worker times a fan of reader threads, a fan
//! of writer threads, and an allocation. CPU burners and walkers, which stat a tree of small files
//! again and again so that inodes are always being reclaimed, run beside them. All of it, and a
//! mount daemon where there is one, lives under one memory limit.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::load::{fill_file, merged, random_bytes, read_whole};
use super::{Better, Case, CaseResult, Env, Experiment, Size};
use crate::disk::cgroup;
use crate::error::{LabError, LabResult};
use crate::measure::{Recorder, Rng};
use crate::sys::is_root;
use crate::target::{FsError, OpenHow};

/// Options.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct SimoopOptions {
    /// Seconds to measure, after the warm-up [default: 60, medium: 15, quick: 4]
    #[arg(long, value_parser = super::seconds)]
    pub seconds: Option<f64>,
    /// Workers [default: 8, medium and quick: 4]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub workers: Option<u64>,
    /// Working set of each worker in MiB [default: 224, medium: 80, quick: 40]
    #[arg(long, value_parser = clap::value_parser!(u64).range(..=1 << 20))]
    pub working_set_mib: Option<u64>,
    /// Memory limit in MiB, 0 for none [default: 3072, medium: 1024, quick: 512]
    #[arg(long, value_parser = clap::value_parser!(u64).range(..=1 << 20))]
    pub memory_mib: Option<u64>,
    /// Files of 1 MiB to read from [default: 9600, medium: 2400, quick: 1200: 60 % of the default disk]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub files: Option<u64>,
}

const MIB: u64 = 1 << 20;
const READERS: u64 = 4;
const WRITERS: u64 = 4;
const IO_BYTES: u64 = MIB;
const CPU_BURNERS: u64 = 2;
/// New files are removed again once there are so many per worker and writer.
const NEW_FILES_KEPT: u64 = 8;
const PAGE: usize = 4096;

/// The experiment.
pub struct Simoop {
    time: Duration,
    warm_up: Duration,
    workers: u64,
    set_bytes: u64,
    alloc_bytes: u64,
    memory_bytes: u64,
    files: u64,
    tree_files: u64,
}

impl Simoop {
    /// With options.
    pub fn new(o: &SimoopOptions, size: Size) -> Self {
        let seconds = o.seconds.unwrap_or(size.pick(4.0, 15.0, 60.0)).clamp(0.1, 86_400.0);
        Simoop {
            time: Duration::from_secs_f64(seconds),
            warm_up: Duration::from_secs_f64((seconds / 6.0).min(10.0)),
            workers: o.workers.unwrap_or(size.pick(4, 4, 8)).max(1),
            set_bytes: o.working_set_mib.unwrap_or(size.pick(40, 80, 224)) * MIB,
            alloc_bytes: size.pick(16 * MIB, 32 * MIB, 32 * MIB),
            memory_bytes: o.memory_mib.unwrap_or(size.pick(512, 1024, 3072)) * MIB,
            files: o.files.unwrap_or(size.pick(1200, 2400, 9600)).max(1),
            tree_files: size.pick(2000, 5000, 20_000),
        }
    }
}

/// What all threads of a run share.
struct Shared<'a> {
    what: &'a Simoop,
    env: &'a Env<'a>,
    epoch: Instant,
    /// Set once the warm-up is over: latencies are recorded from then on, also of what has not ended at the end.
    recording: AtomicBool,
    /// Set from the end of the warm-up to the end of the time: what is counted is per second of that.
    counting: AtomicBool,
    stop: AtomicBool,
    loops: AtomicU64,
    walked: AtomicU64,
    failure: Mutex<Option<LabError>>,
}

impl<'a> Shared<'a> {
    fn new(what: &'a Simoop, env: &'a Env<'a>) -> Self {
        Shared {
            what,
            env,
            epoch: Instant::now(),
            recording: AtomicBool::new(false),
            counting: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            loops: AtomicU64::new(0),
            walked: AtomicU64::new(0),
            failure: Mutex::new(None),
        }
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed) || self.env.cancel.is_cancelled()
    }

    fn count(&self, counter: &AtomicU64) {
        if self.counting.load(Ordering::Relaxed) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Keeps the first error and ends the run.
    fn guard<T>(&self, result: LabResult<T>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(e) => {
                if let Ok(mut failure) = self.failure.lock() {
                    failure.get_or_insert(e);
                }
                self.stop.store(true, Ordering::Relaxed);
                None
            }
        }
    }
}

struct Recorders {
    read: Recorder,
    write: Recorder,
    alloc: Recorder,
}

fn data_path(i: u64) -> String {
    format!("simoop/data{}/f{i}", i % 16)
}

fn read_one(shared: &Shared<'_>, rng_seed: u64) -> LabResult<()> {
    let mut rng = Rng::new(rng_seed, 0x5EAD);
    let path = data_path(rng.below(shared.what.files));
    let file = shared.env.fs.open(&path, OpenHow::Read)?;
    let mut buf = vec![0; IO_BYTES as usize];
    read_whole(&*file, &mut buf, 0)
}

fn write_one(
    shared: &Shared<'_>,
    worker: u64,
    writer: u64,
    turn: u64,
    data: &[u8],
) -> LabResult<()> {
    let name = |t: u64| format!("simoop/new{worker}/w{writer}-{t}");
    let file = shared.env.fs.open(&name(turn), OpenHow::Create)?;
    file.write_at(data, 0)?;
    drop(file);
    if turn >= NEW_FILES_KEPT {
        shared.env.fs.unlink(&name(turn - NEW_FILES_KEPT))?;
    }
    Ok(())
}

/// Starts `n` threads and returns once the last is back: a fan, timed as a whole by the caller.
fn fan(n: u64, work: impl Fn(u64) -> LabResult<()> + Sync) -> LabResult<()> {
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..n)
            .map(|i| {
                let work = &work;
                scope.spawn(move || work(i))
            })
            .collect();
        let mut all = Ok(());
        for handle in handles {
            let one = handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            all = all.and(one);
        }
        all
    })
}

/// Touches each page of a fresh allocation of `bytes` and frees it.
fn allocate(bytes: u64) {
    let mut memory = vec![0_u8; bytes as usize];
    for page in memory.chunks_mut(PAGE) {
        page[0] = 1;
    }
    std::hint::black_box(&memory);
}

fn worker(shared: &Shared<'_>, number: u64) -> Recorders {
    let mut recorders = Recorders {
        read: Recorder::new(shared.epoch),
        write: Recorder::new(shared.epoch),
        alloc: Recorder::new(shared.epoch),
    };
    let mut set = vec![1_u8; shared.what.set_bytes as usize];
    let data = random_bytes(IO_BYTES as usize, number);
    let mut rng = Rng::new(shared.env.seed, number);
    let mut turn = 0;
    while !shared.stopped() {
        let from = Instant::now();
        let seed = rng.draw();
        if shared.guard(fan(READERS, |i| read_one(shared, seed ^ i))).is_none() {
            break;
        }
        let read_done = Instant::now();
        let wrote = fan(WRITERS, |i| write_one(shared, number, i, turn, &data));
        if shared.guard(wrote).is_none() {
            break;
        }
        let write_done = Instant::now();
        allocate(shared.what.alloc_bytes);
        let alloc_done = Instant::now();
        // The working set is kept warm, and this is the CPU work of a loop.
        for page in set.chunks_mut(PAGE) {
            page[0] = page[0].wrapping_add(1);
        }
        shared.count(&shared.loops);
        if shared.recording.load(Ordering::Relaxed) {
            recorders.read.record_at(from, read_done - from);
            recorders.write.record_at(read_done, write_done - read_done);
            recorders.alloc.record_at(write_done, alloc_done - write_done);
        }
        turn += 1;
    }
    recorders
}

fn walker(shared: &Shared<'_>) {
    while !shared.stopped() {
        for dir in 0..tree_dirs(shared.what.tree_files) {
            let dir = format!("simoop/tree/d{dir}");
            let walked = (|| -> LabResult<()> {
                for (name, _) in shared.env.fs.read_dir(&dir)? {
                    shared.env.fs.stat(&format!("{dir}/{name}"))?;
                    shared.count(&shared.walked);
                    if shared.stopped() {
                        break;
                    }
                }
                Ok(())
            })();
            if shared.guard(walked).is_none() || shared.stopped() {
                return;
            }
        }
    }
}

fn burner(shared: &Shared<'_>) {
    let mut rng = Rng::new(1, 2);
    while !shared.stopped() {
        for _ in 0..10_000 {
            std::hint::black_box(rng.draw());
        }
        // A burner takes a share of a processor, not all of it: pressure is to be the limit.
        std::thread::sleep(Duration::from_micros(500));
    }
}

fn tree_dirs(files: u64) -> u64 {
    files.div_ceil(200)
}

/// Counts of waits for memory so far: direct reclaim of the machine, and hits of the limit.
fn stalls() -> u64 {
    let vmstat = std::fs::read_to_string("/proc/vmstat").unwrap_or_default();
    let reclaim: u64 = vmstat
        .lines()
        .filter(|l| l.starts_with("allocstall"))
        .filter_map(|l| l.rsplit(' ').next()?.parse::<u64>().ok())
        .sum();
    reclaim + cgroup::memory_limit_hits()
}

/// Time that some task waited for memory so far (pressure stall information), in µs.
fn pressure_us() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/pressure/memory").ok()?;
    text.lines().next()?.rsplit("total=").next()?.trim().parse().ok()
}

impl Simoop {
    fn measure(&self, env: &Env<'_>) -> LabResult<CaseResult> {
        let shared = Shared::new(self, env);
        let (recorders, took, (stalled, stalled_us), device) = std::thread::scope(|scope| {
            let shared = &shared;
            let workers: Vec<_> =
                (0..self.workers).map(|w| scope.spawn(move || worker(shared, w))).collect();
            scope.spawn(move || walker(shared));
            for _ in 0..CPU_BURNERS {
                scope.spawn(move || burner(shared));
            }
            sleep_while(self.warm_up, || !shared.stopped());
            let before = (stalls(), pressure_us());
            let device = env.fs.device();
            let begun = Instant::now();
            for switch in [&shared.recording, &shared.counting] {
                switch.store(true, Ordering::Relaxed);
            }
            sleep_while(self.time, || !shared.stopped());
            shared.counting.store(false, Ordering::Relaxed);
            let took = begun.elapsed();
            let device = env.device_since(device);
            // Before the workers have ended: what they still wait for then is not of this time.
            let stalled = stalls().saturating_sub(before.0);
            let stalled_us =
                pressure_us().zip(before.1).map(|(now, then)| now.saturating_sub(then));
            shared.stop.store(true, Ordering::Relaxed);
            let recorders: Vec<Recorders> = workers
                .into_iter()
                .map(|h| h.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect();
            (recorders, took, (stalled, stalled_us), device)
        });
        if let Ok(mut failure) = shared.failure.lock()
            && let Some(e) = failure.take()
        {
            return Err(e);
        }
        env.cancel.check()?;
        let seconds = took.as_secs_f64();
        let loops = shared.loops.load(Ordering::Relaxed);
        let mut result = CaseResult::default();
        if let Ok((full, _)) = env.fs.fullness() {
            result.metric("fullness_percent", "%", full, Better::Neither);
        }
        result.metric("work_per_s", "loops/s", loops as f64 / seconds, Better::Higher);
        let walked = shared.walked.load(Ordering::Relaxed) as f64 / seconds;
        result.metric("stat_per_s", "1/s", walked, Better::Higher);
        let per_s = stalled as f64 / seconds;
        result.metric("stalls_per_s", "1/s", per_s, Better::Lower);
        if let Some(us) = stalled_us {
            let percent = us as f64 / 1e4 / seconds;
            result.metric("memory_stall_percent", "%", percent, Better::Lower);
        }
        result.device_per("loop", device, loops, loops * WRITERS * IO_BYTES);
        let mut all = Recorders {
            read: Recorder::new(shared.epoch),
            write: Recorder::new(shared.epoch),
            alloc: Recorder::new(shared.epoch),
        };
        for r in &recorders {
            all.read.merge(&r.read);
            all.write.merge(&r.write);
            all.alloc.merge(&r.alloc);
        }
        result.latency("read", merged([all.read], shared.epoch));
        result.latency("write", merged([all.write], shared.epoch));
        result.latency("alloc", merged([all.alloc], shared.epoch));
        Ok(result)
    }
}

fn sleep_while(time: Duration, goes_on: impl Fn() -> bool) {
    let begun = Instant::now();
    while begun.elapsed() < time && goes_on() {
        std::thread::sleep(Duration::from_millis(20));
    }
}

impl Experiment for Simoop {
    fn name(&self) -> &'static str {
        "simoop"
    }

    fn question(&self) -> &'static str {
        "What do reads, writes and allocations wait for when memory is short?"
    }

    fn base_mode(&self) -> &'static str {
        "limited"
    }

    fn cases(&self) -> Vec<Case> {
        let mode = if self.memory_bytes == 0 { "unlimited" } else { "limited" };
        vec![
            Case::new(mode)
                .with("workers", self.workers)
                .with("memory_mib", self.memory_bytes / MIB),
        ]
    }

    fn prepare(&self, env: &Env<'_>) -> LabResult<()> {
        for d in 0..16 {
            env.fs.mkdir_all(&format!("simoop/data{d}"))?;
        }
        let data = random_bytes(IO_BYTES as usize, env.seed);
        for i in 0..self.files {
            env.cancel.check()?;
            env.fs.open(&data_path(i), OpenHow::Create)?.write_at(&data, 0)?;
        }
        for d in 0..tree_dirs(self.tree_files) {
            env.fs.mkdir_all(&format!("simoop/tree/d{d}"))?;
            for i in 0..200 {
                drop(env.fs.open(&format!("simoop/tree/d{d}/s{i}"), OpenHow::Create)?);
            }
        }
        for w in 0..self.workers {
            env.fs.mkdir_all(&format!("simoop/new{w}"))?;
        }
        fill_file(&*env.fs, "simoop/marker", 4096, env.seed, env.cancel)?;
        env.fs.syncfs()?;
        env.fs.make_cold()?;
        Ok(())
    }

    fn run(&self, env: &Env<'_>, _case: &Case) -> LabResult<CaseResult> {
        let mut notes = Vec::new();
        // A target with a cache of its own gets a quarter of the limit for it; without a limit, what it takes by itself.
        if self.memory_bytes > 0 {
            match env.fs.set_memory_cap(self.memory_bytes / 4) {
                Ok(()) | Err(FsError::NotOffered(_)) => {}
                Err(e) => return Err(e.into()),
            }
        }
        let mark = env.registry.mark();
        if self.memory_bytes > 0 && is_root() {
            cgroup::limit_memory(env.registry, self.memory_bytes, &(env.daemons)())?;
        } else if self.memory_bytes > 0 {
            notes.push("not root: no memory limit, so no pressure".into());
        }
        let measured = self.measure(env);
        for stuck in env.registry.release_to(mark) {
            notes.push(format!("memory limit not lifted: {stuck}"));
        }
        let mut result = measured?;
        result.notes = notes;
        for w in 0..self.workers {
            env.fs.remove_tree(&format!("simoop/new{w}"))?;
            env.fs.mkdir_all(&format!("simoop/new{w}"))?;
        }
        Ok(result)
    }

    fn space_bytes(&self) -> u64 {
        (self.files + self.workers * WRITERS * (NEW_FILES_KEPT + 1)) * MIB + (512 << 20)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::registry::Registry;
    use crate::run::Cancel;
    use crate::target::mounted::{Cold, MountedFs};
    use std::sync::Arc;

    #[test]
    fn what_happens_before_and_after_the_time_is_not_counted() {
        let fs = Arc::new(MountedFs::new(std::env::temp_dir(), None, Cold::Advise));
        let (registry, cancel) = (Registry::new().expect("state directory"), Cancel::default());
        let (registry, cancel, daemons) = (&registry, &cancel, &Vec::new);
        let env = Env { fs, seed: 1, cancel, registry, daemons, disks: &[] };
        let what = Simoop::new(&SimoopOptions::default(), Size::Quick);
        let shared = Shared::new(&what, &env);
        shared.count(&shared.walked);
        shared.counting.store(true, Ordering::Relaxed);
        shared.count(&shared.walked);
        shared.count(&shared.walked);
        shared.counting.store(false, Ordering::Relaxed);
        shared.count(&shared.walked);
        assert_eq!(shared.walked.load(Ordering::Relaxed), 2);
    }
}
