//! ingest: how fast writes enter the cache.
//!
//! Buffered writes of 4 KiB, 64 KiB and 1 MiB without reaching the dirty limit, then the time until
//! they are durable. Modes: *new* (a new file that grows, with whatever speculative preallocation
//! the file system has), *truncated* (truncated up to its size first, so that nothing lies beyond
//! EOF and nothing is preallocated there), *allocated* (`fallocate` first), *dontcache*.

use std::time::Instant;

use super::load::{random_bytes, together};
use super::{Better, Case, CaseResult, Env, Experiment, Size};
use crate::error::LabResult;
use crate::measure::Recorder;
use crate::target::{FileRef, OpenHow};

/// Options.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct IngestOptions {
    /// MiB to write in total [default: 1024, medium: 512, quick: 192]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub total_mib: Option<u64>,
    /// Numbers of writers
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=4096), value_delimiter = ',')]
    pub writers: Vec<u64>,
}

/// The experiment.
pub struct Ingest {
    total_bytes: u64,
    writers: Vec<u64>,
    size: Size,
}

impl Ingest {
    /// With options.
    pub fn new(o: &IngestOptions, size: Size) -> Self {
        Ingest {
            total_bytes: o.total_mib.unwrap_or(size.pick(192, 512, 1024)).max(1) << 20,
            writers: if o.writers.is_empty() { vec![1, 4] } else { o.writers.clone() },
            size,
        }
    }
}

const GIB: f64 = 1_073_741_824.0;

fn write_all(env: &Env<'_>, file: &FileRef, case: &Case, bytes: u64) -> LabResult<Recorder> {
    let piece = case.number("piece_bytes");
    let data = random_bytes(piece as usize, env.seed);
    let mut recorder = Recorder::new(Instant::now());
    let uncached = case.mode == "dontcache";
    for at in (0..bytes).step_by(piece as usize) {
        if at % (1 << 20) == 0 {
            env.cancel.check()?;
        }
        let from = Instant::now();
        if uncached {
            file.write_dontcache_at(&data, at)?;
        } else {
            file.write_at(&data, at)?;
        }
        recorder.record_ns(from.elapsed().as_nanos() as u64);
    }
    Ok(recorder)
}

impl Experiment for Ingest {
    fn name(&self) -> &'static str {
        "ingest"
    }

    fn question(&self) -> &'static str {
        "How fast can buffered writes enter the cache, and how long until they are durable?"
    }

    fn base_mode(&self) -> &'static str {
        "new"
    }

    fn cases(&self) -> Vec<Case> {
        let modes: &[&str] = if self.size.is_quick() {
            &["new", "truncated", "allocated"]
        } else {
            &["new", "truncated", "allocated", "dontcache"]
        };
        let mut cases = Vec::new();
        for piece in [4096_u64, 64 << 10, 1 << 20] {
            for &writers in &self.writers {
                for mode in modes {
                    let few = self.size.is_quick() && (writers > 1 || piece > 4096);
                    if few && *mode != "new" {
                        continue;
                    }
                    cases.push(Case::new(mode).with("piece_bytes", piece).with("writers", writers));
                }
            }
        }
        cases
    }

    fn run(&self, env: &Env<'_>, case: &Case) -> LabResult<CaseResult> {
        let writers = case.number("writers").max(1);
        let each = (self.total_bytes / writers).next_multiple_of(1 << 20);
        env.fs.mkdir_all("ingest")?;
        let files = (0..writers)
            .map(|w| {
                let file = env.fs.open(&format!("ingest/w{w}"), OpenHow::Create)?;
                match case.mode.as_str() {
                    "truncated" => file.set_len(each)?,
                    "allocated" => file.fallocate(0, each, false)?,
                    _ => {}
                }
                file.fsync()?;
                Ok(file)
            })
            .collect::<LabResult<Vec<FileRef>>>()?;
        let before = env.fs.device();
        let (recorders, took) =
            together(writers, |w, _| write_all(env, &files[w as usize], case, each))?;
        let entered = env.device_since(before);
        let begun = Instant::now();
        for file in &files {
            file.fsync()?;
        }
        let durable = begun.elapsed();
        let device = env.device_since(before);
        let mut result = CaseResult::default();
        let total = each * writers;
        let rate = total as f64 / GIB / took.as_secs_f64();
        result.metric("gib_per_s", "GiB/s", rate, Better::Higher);
        result.metric("durable_ms", "ms", durable.as_secs_f64() * 1e3, Better::Lower);
        let until_durable = total as f64 / GIB / (took + durable).as_secs_f64();
        result.metric("gib_per_s_until_durable", "GiB/s", until_durable, Better::Higher);
        result.device_per("file", device, writers, total);
        if let Some(entered) = entered
            && case.mode != "dontcache"
            && entered.write_bytes > total / 4
        {
            let percent = entered.write_bytes * 100 / total;
            result.notes.push(format!("writeback began while writing ({percent} %)"));
        }
        result.latency("write", super::load::merged(recorders, Instant::now()));
        drop(files);
        env.fs.remove_tree("ingest")?;
        Ok(result)
    }

    fn space_bytes(&self) -> u64 {
        self.total_bytes + (256 << 20)
    }
}
