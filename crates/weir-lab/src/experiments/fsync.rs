//! fsync: jobs that write and sync their own file.
//!
//! *seq*: 64 KiB appends with an fsync after each. *rand*: 4 KiB writes at random places of a new
//! file with an fsync after every 16. *overwrite*: the same on a file that is already written.
//! *seq-data* and *seq-range* replace the fsync by `fdatasync` and by asynchronous ranged syncs.

use std::time::{Duration, Instant};

use super::fsmark::method_of;
use super::load::{fill_file, merged, random_bytes, together};
use super::{Better, Case, CaseResult, Cost, Env, Experiment, Size};
use crate::error::{LabError, LabResult};
use crate::measure::{Recorder, Rng};
use crate::target::{OpenHow, SyncScope};

/// Options.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct FsyncOptions {
    /// Numbers of jobs
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=4096), value_delimiter = ',')]
    pub jobs: Vec<u64>,
    /// Seconds per case [default: 5, quick and medium: 0.8]
    #[arg(long, value_parser = super::seconds)]
    pub seconds: Option<f64>,
}

const SEQ_WRITE_BYTES: u64 = 64 << 10;
const PAGE_BYTES: u64 = 4096;
const WRITES_PER_SYNC: u64 = 16;
/// Ranged syncs in flight in *seq-range*.
const RANGES_IN_FLIGHT: usize = 8;
/// All jobs together.
const TOTAL_FILE_BYTES: u64 = 1 << 30;

/// The experiment.
pub struct FsyncJobs {
    jobs: Vec<u64>,
    time: Duration,
    size: Size,
}

impl FsyncJobs {
    /// With options.
    pub fn new(o: &FsyncOptions, size: Size) -> Self {
        let every: &[u64] = &[1, 2, 4, 8, 16, 32, 64];
        let default: &[u64] = size.pick(&[1, 4, 16][..], every, every);
        let seconds = o.seconds.unwrap_or(size.pick(0.8, 0.8, 5.0));
        FsyncJobs {
            jobs: if o.jobs.is_empty() { default.to_vec() } else { o.jobs.clone() },
            time: Duration::from_secs_f64(seconds.clamp(0.05, 3600.0)),
            size,
        }
    }
}

struct Done {
    syncs: Recorder,
    bytes: u64,
}

fn job_bytes(jobs: u64) -> u64 {
    (TOTAL_FILE_BYTES / jobs.max(1)).clamp(4 << 20, 1 << 30)
}

struct Job<'a> {
    env: &'a Env<'a>,
    path: String,
    file_bytes: u64,
    time: Duration,
    number: u64,
}

impl Job<'_> {
    fn running(&self, epoch: Instant) -> LabResult<bool> {
        self.env.cancel.check()?;
        Ok(epoch.elapsed() < self.time)
    }

    fn sequential(&self, epoch: Instant, data_only: bool) -> LabResult<Done> {
        let data = random_bytes(SEQ_WRITE_BYTES as usize, self.env.seed + self.number);
        let mut syncs = Recorder::new(epoch);
        let mut file = self.env.fs.open(&self.path, OpenHow::Create)?;
        let (mut at, mut bytes) = (0, 0);
        while self.running(epoch)? {
            if at >= self.file_bytes {
                // Start over as a new file, so that every write stays an append.
                file = self.env.fs.open(&self.path, OpenHow::Create)?;
                at = 0;
            }
            file.write_at(&data, at)?;
            let from = Instant::now();
            if data_only {
                file.fdatasync()?;
            } else {
                file.fsync()?;
            }
            syncs.since(from);
            at += SEQ_WRITE_BYTES;
            bytes += SEQ_WRITE_BYTES;
        }
        Ok(Done { syncs, bytes })
    }

    fn random(&self, epoch: Instant, how: OpenHow) -> LabResult<Done> {
        let data = random_bytes(PAGE_BYTES as usize, self.env.seed + self.number);
        let mut rng = Rng::new(self.env.seed, self.number);
        let mut syncs = Recorder::new(epoch);
        let file = self.env.fs.open(&self.path, how)?;
        let mut bytes = 0;
        while self.running(epoch)? {
            for _ in 0..WRITES_PER_SYNC {
                file.write_at(&data, rng.below(self.file_bytes / PAGE_BYTES) * PAGE_BYTES)?;
                bytes += PAGE_BYTES;
            }
            let from = Instant::now();
            file.fsync()?;
            syncs.since(from);
        }
        Ok(Done { syncs, bytes })
    }

    fn ranged(&self, epoch: Instant) -> LabResult<Done> {
        let data = random_bytes(SEQ_WRITE_BYTES as usize, self.env.seed + self.number);
        let mut syncs = Recorder::new(epoch);
        let method = method_of(self.env, "async")?;
        let mut queue = self.env.fs.sync_queue(method, RANGES_IN_FLIGHT)?;
        let mut due = [epoch; RANGES_IN_FLIGHT * 2];
        let mut file = self.env.fs.open(&self.path, OpenHow::Create)?;
        let (mut at, mut bytes, mut tag) = (0, 0, 0_u64);
        let mut submitting = true;
        while submitting || queue.in_flight() > 0 {
            submitting = submitting && self.running(epoch)?;
            if submitting && queue.in_flight() < RANGES_IN_FLIGHT {
                if at >= self.file_bytes {
                    file = self.env.fs.open(&self.path, OpenHow::Create)?;
                    at = 0;
                }
                file.write_at(&data, at)?;
                due[tag as usize % due.len()] = Instant::now();
                queue.submit(&file, SyncScope::DataRange(at, SEQ_WRITE_BYTES), tag)?;
                tag += 1;
                at += SEQ_WRITE_BYTES;
                bytes += SEQ_WRITE_BYTES;
                continue;
            }
            if let Some(done) = queue.complete(true)? {
                done.result.map_err(|e| LabError::io("asynchronous ranged sync", e))?;
                syncs.since(due[done.tag as usize % due.len()]);
            }
        }
        Ok(Done { syncs, bytes })
    }
}

impl Experiment for FsyncJobs {
    fn name(&self) -> &'static str {
        "fsync"
    }

    fn question(&self) -> &'static str {
        "What do jobs that write and fsync their own files get, and what does each fsync cost?"
    }

    fn base_mode(&self) -> &'static str {
        "seq"
    }

    fn cases(&self) -> Vec<Case> {
        let modes: &[&str] = if self.size.is_quick() {
            &["seq", "rand"]
        } else {
            &["seq", "rand", "overwrite", "seq-data", "seq-range"]
        };
        modes.iter().flat_map(|m| self.jobs.iter().map(|j| Case::new(m).with("jobs", *j))).collect()
    }

    fn run(&self, env: &Env<'_>, case: &Case) -> LabResult<CaseResult> {
        let jobs = case.number("jobs").max(1);
        let file_bytes = job_bytes(jobs);
        env.fs.mkdir_all("fsync")?;
        let path = |j: u64| format!("fsync/job{j:03}");
        if case.mode == "overwrite" {
            for j in 0..jobs {
                fill_file(&*env.fs, &path(j), file_bytes, env.seed + j, env.cancel)?;
            }
            super::load::settle(env)?;
        }
        let cost = Cost::start(env);
        let (all, took) = together(jobs, |number, epoch| {
            let job = Job { env, path: path(number), file_bytes, time: self.time, number };
            match case.mode.as_str() {
                "rand" => job.random(epoch, OpenHow::Create),
                "overwrite" => job.random(epoch, OpenHow::Write),
                "seq-data" => job.sequential(epoch, true),
                "seq-range" => job.ranged(epoch),
                _ => job.sequential(epoch, false),
            }
        })?;
        let cost = cost.stop(env);
        let bytes: u64 = all.iter().map(|d| d.bytes).sum();
        let syncs = merged(all.into_iter().map(|d| d.syncs), Instant::now());
        let mut result = CaseResult::default();
        let seconds = took.as_secs_f64();
        result.metric("mib_per_s", "MiB/s", bytes as f64 / seconds / 1_048_576.0, Better::Higher);
        result.metric("fsync_per_s", "1/s", syncs.count() as f64 / seconds, Better::Higher);
        result.cost_per("fsync", cost, syncs.count(), bytes);
        result.latency("fsync", syncs);
        env.fs.remove_tree("fsync")?;
        Ok(result)
    }

    fn space_bytes(&self) -> u64 {
        let most = self.jobs.iter().copied().max().unwrap_or(1);
        job_bytes(most) * most + (256 << 20)
    }
}
