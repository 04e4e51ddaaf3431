//! fsmark: many small files made durable.
//!
//! Each thread writes its files into a directory of its own and makes them durable in one of these
//! modes: *each* (fsync before close), *pass* (all written, then open-fsync-close one by one),
//! *async* (as pass, but with many fsyncs in flight), *syncfs* (all written, one `syncfs`), *none*.
//! Several iterations on the same file system let the number of files grow.

use std::time::{Duration, Instant};

use super::load::{merged, random_bytes, together};
use super::{Better, Case, CaseResult, Cost, Env, Experiment, Size};
use crate::error::{LabError, LabResult};
use crate::measure::{Recorder, Spread};
use crate::target::{AsyncMethod, OpenHow, SyncQueue, SyncScope};

/// Options.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct FsmarkOptions {
    /// Files per thread and iteration [default: 10000; over all threads: quick 500, medium 2000]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    pub files: Option<u64>,
    /// Bytes per file [default: 4096]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    pub file_bytes: Option<u64>,
    /// Numbers of threads
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=4096), value_delimiter = ',')]
    pub threads: Vec<u64>,
    /// Numbers of asynchronous fsyncs in flight per thread
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=32_768), value_delimiter = ',')]
    pub depth: Vec<u64>,
    /// Iterations on the same file system [default: 5, quick and medium: 2]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub iterations: Option<u64>,
}

/// The experiment.
pub struct Fsmark {
    files: u64,
    /// The number of files was not asked for, and may shrink where there are many threads.
    shared: bool,
    file_bytes: u64,
    threads: Vec<u64>,
    depths: Vec<u64>,
    iterations: u64,
    size: Size,
}

impl Fsmark {
    /// With options; `slow_flush` shortens it on a disk whose flushes are long.
    pub fn new(o: &FsmarkOptions, size: Size, slow_flush: bool) -> Self {
        let or = |given: &[u64], full: &[u64], short: &[u64]| {
            if given.is_empty() { size.pick(short, full, full) } else { given }.to_vec()
        };
        let default_files =
            if slow_flush { size.pick(300, 600, 3000) } else { size.pick(500, 2000, 10_000) };
        Fsmark {
            files: o.files.unwrap_or(default_files),
            shared: size != Size::Full && o.files.is_none(),
            file_bytes: o.file_bytes.unwrap_or(FILE_BYTES),
            threads: or(&o.threads, &[1, 4, 8, 16], &[1, 4]),
            depths: or(&o.depth, &[8, 64, 1024], &[64, 256]),
            iterations: o.iterations.unwrap_or(size.pick(2, 2, 5)),
            size,
        }
    }
}

/// Bytes of a file: what the floors are of.
const FILE_BYTES: u64 = 4096;
/// Asynchronous fsyncs of all submitters together, where there are several.
const MOST_IN_FLIGHT: u64 = 1024;

/// What one thread did in one iteration.
struct Turn {
    syncs: Recorder,
    /// Time inside file system calls.
    calls: Duration,
    wall: Duration,
    sync_phase: Duration,
}

struct Job<'a> {
    env: &'a Env<'a>,
    case: &'a Case,
    dir: String,
    files: u64,
    data: &'a [u8],
}

fn file_name(dir: &str, i: u64) -> String {
    format!("{dir}/f{i:06}")
}

impl Job<'_> {
    fn run(&self, epoch: Instant) -> LabResult<Turn> {
        let begun = Instant::now();
        let mut syncs = Recorder::new(epoch);
        let mut calls = Duration::ZERO;
        let each = self.case.mode == "each";
        for i in 0..self.files {
            if i % 64 == 0 {
                self.env.cancel.check()?;
            }
            let name = file_name(&self.dir, i);
            let at = Instant::now();
            let file = self.env.fs.open(&name, OpenHow::Create)?;
            file.write_at(self.data, 0)?;
            if each {
                let from = Instant::now();
                file.fsync()?;
                syncs.since(from);
            }
            drop(file);
            calls += at.elapsed();
        }
        let sync_begun = Instant::now();
        match self.case.mode.as_str() {
            "pass" => self.sync_pass(&mut syncs, &mut calls)?,
            m if m.starts_with("async") => self.sync_async(&mut syncs)?,
            "syncfs" => {
                self.env.fs.syncfs()?;
                syncs.since(sync_begun);
            }
            _ => {}
        }
        let sync_phase = sync_begun.elapsed();
        if self.case.mode.starts_with("async") || self.case.mode == "syncfs" {
            calls += sync_phase;
        }
        Ok(Turn { syncs, calls, wall: begun.elapsed(), sync_phase })
    }

    fn sync_pass(&self, syncs: &mut Recorder, calls: &mut Duration) -> LabResult<()> {
        for i in 0..self.files {
            if i % 64 == 0 {
                self.env.cancel.check()?;
            }
            let name = file_name(&self.dir, i);
            let at = Instant::now();
            let file = self.env.fs.open(&name, OpenHow::Write)?;
            let from = Instant::now();
            file.fsync()?;
            syncs.since(from);
            drop(file);
            *calls += at.elapsed();
        }
        Ok(())
    }

    fn sync_async(&self, syncs: &mut Recorder) -> LabResult<()> {
        let depth = self.case.number("depth").max(1) as usize;
        let method = method_of(self.env, &self.case.mode)?;
        let mut queue = self.env.fs.sync_queue(method, depth)?;
        let mut due = vec![Instant::now(); self.files as usize];
        for i in 0..self.files {
            while queue.in_flight() >= depth {
                reap(&mut *queue, &due, syncs)?;
            }
            if i % 64 == 0 {
                self.env.cancel.check()?;
            }
            let file = self.env.fs.open(&file_name(&self.dir, i), OpenHow::Write)?;
            due[i as usize] = Instant::now();
            queue.submit(&file, SyncScope::File, i)?;
        }
        while queue.in_flight() > 0 {
            reap(&mut *queue, &due, syncs)?;
        }
        Ok(())
    }
}

fn reap(queue: &mut dyn SyncQueue, due: &[Instant], syncs: &mut Recorder) -> LabResult<()> {
    let Some(done) = queue.complete(true)? else {
        return Err(LabError::BadOption("an asynchronous fsync was lost".into()));
    };
    done.result.map_err(|e| LabError::io("asynchronous fsync", e))?;
    if let Some(from) = due.get(done.tag as usize) {
        syncs.since(*from);
    }
    Ok(())
}

/// `async` is the best method the target has; `async-NAME` a certain one.
pub fn method_of(env: &Env<'_>, mode: &str) -> LabResult<AsyncMethod> {
    let methods = env.fs.async_methods();
    let Some(name) = mode.strip_prefix("async-") else {
        // Threads are no asynchronous interface but what one does without it.
        return methods
            .iter()
            .copied()
            .find(|m| *m != AsyncMethod::Threads)
            .ok_or(LabError::NotOffered("no asynchronous fsync on this target"));
    };
    methods
        .iter()
        .copied()
        .find(|m| m.name() == name)
        .ok_or(LabError::NotOffered("this target has no such asynchronous fsync"))
}

impl Fsmark {
    /// Files of one thread in one iteration.
    fn files_of(&self, threads: u64) -> u64 {
        if self.shared { (self.files / threads).max(self.files.min(150)) } else { self.files }
    }
}

impl Experiment for Fsmark {
    fn name(&self) -> &'static str {
        "fsmark"
    }

    fn question(&self) -> &'static str {
        "How many small files per second can be made durable, and at how many flushes each?"
    }

    fn base_mode(&self) -> &'static str {
        "pass"
    }

    fn cases(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        for &threads in &self.threads {
            let case = |mode: &str| {
                let case = Case::new(mode).with("threads", threads);
                // Files of another size are another measurement.
                let other_bytes = self.file_bytes != FILE_BYTES;
                if other_bytes { case.with("file_bytes", self.file_bytes) } else { case }
            };
            cases.extend([case("pass"), case("each")]);
            for &depth in &self.depths {
                // Thousands in flight are one submitter's business; several together have them anyway.
                let few = !self.size.is_quick() || depth == self.depths[0];
                if threads == self.threads[0] || (few && threads * depth <= MOST_IN_FLIGHT) {
                    cases.push(case("async").with("depth", depth));
                }
            }
            if threads == self.threads[0] || !self.size.is_quick() {
                let depth =
                    self.depths.iter().copied().min_by_key(|d| d.abs_diff(64)).unwrap_or(64);
                cases.push(case("async-libaio").with("depth", depth));
                cases.push(case("async-threads").with("depth", depth.min(16)));
                cases.extend([case("syncfs"), case("none")]);
            }
        }
        cases
    }

    fn run(&self, env: &Env<'_>, case: &Case) -> LabResult<CaseResult> {
        let threads = case.number("threads").max(1);
        let per_thread = self.files_of(threads);
        let data = random_bytes(self.file_bytes as usize, env.seed);
        if case.mode.starts_with("async") {
            method_of(env, &case.mode)?;
        }
        let root = format!("fsmark/{}", case.label().replace([' ', '='], "-"));
        let (mut rates, mut sync_rates, mut overheads) = (Vec::new(), Vec::new(), Vec::new());
        let begun = Instant::now();
        let mut syncs = Recorder::new(begun);
        let (cost, log_before) = (Cost::start(env), env.fs.log());
        for iteration in 0..self.iterations {
            for t in 0..threads {
                env.fs.mkdir_all(&format!("{root}/i{iteration}/t{t}"))?;
            }
            let (turns, took) = together(threads, |t, _| {
                let dir = format!("{root}/i{iteration}/t{t}");
                Job { env, case, dir, files: per_thread, data: &data }.run(begun)
            })?;
            let files = (per_thread * threads) as f64;
            rates.push(files / took.as_secs_f64());
            let slowest = turns.iter().map(|t| t.sync_phase).max().unwrap_or_default();
            sync_rates.push(files / slowest.as_secs_f64().max(1e-9));
            let (wall, calls) = turns.iter().fold((0.0, 0.0), |(w, c), t| {
                (w + t.wall.as_secs_f64(), c + t.calls.as_secs_f64())
            });
            overheads.push((1.0 - calls / wall).max(0.0) * 100.0);
            syncs.merge(&merged(turns.into_iter().map(|t| t.syncs), begun));
        }
        let cost = cost.stop(env);
        let log = env.fs.log().zip(log_before);
        let all_files = per_thread * threads * self.iterations;

        let mut result = CaseResult::default();
        let median = |v: &[f64]| Spread::of(v).map_or(0.0, |s| s.median);
        result.metric("files_per_s", "files/s", median(&rates), Better::Higher);
        if let (Some(first), Some(last)) = (rates.first(), rates.last()) {
            result.metric("last_over_first_iteration", "x", last / first, Better::Higher);
        }
        if case.mode == "pass" || case.mode.starts_with("async") {
            let rate = median(&sync_rates);
            result.metric("sync_phase_files_per_s", "files/s", rate, Better::Higher);
        }
        result.metric("app_overhead_percent", "%", median(&overheads), Better::Neither);
        result.cost_per("file", cost, all_files, all_files * self.file_bytes);
        if let Some((after, earlier)) = log {
            let writes = after.writes.saturating_sub(earlier.writes).max(1) as f64;
            result.metric("files_per_log_write", "", all_files as f64 / writes, Better::Higher);
            if let (Some(a), Some(b)) = (after.forces, earlier.forces) {
                let forces = a.saturating_sub(b) as f64;
                result.metric("log_forces_per_log_write", "", forces / writes, Better::Higher);
            }
        }
        if let Ok((full, _)) = env.fs.fullness() {
            result.metric("fullness_percent", "%", full, Better::Neither);
        }
        result.latency("fsync", syncs);
        if case.mode != "none" && cost.device.is_some_and(|d| d.flushes == 0) {
            result.notes.push("the device saw no flush: this did not make anything durable".into());
        }
        env.fs.remove_tree(&root)?;
        Ok(result)
    }

    fn space_bytes(&self) -> u64 {
        let most = self.threads.iter().copied().max().unwrap_or(1);
        // 4 KiB of metadata per file is generous for every file system here.
        let each = self.file_bytes.next_multiple_of(4096) + 4096;
        [self.iterations, most, each].iter().fold(self.files, |all, n| all.saturating_mul(*n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_another_size_are_another_case() {
        let cases = |file_bytes| {
            let options = FsmarkOptions { file_bytes, ..FsmarkOptions::default() };
            Fsmark::new(&options, Size::Quick, false).cases()
        };
        assert_eq!(cases(None), cases(Some(4096)));
        let large = cases(Some(1 << 20));
        assert!(large.iter().all(|case| case.number("file_bytes") == 1 << 20));
    }
}
