//! tickets: what an asynchronous sync costs whoever asks for it, and what it holds while it waits.
//!
//! *submit*: files that were written are submitted one after another, as fast as one thread can; each call is
//! timed. *held*: the same many times over with the device's flushes held back, so that none can end; then
//! what the process has grown by, since it had stopped growing for other reasons (a volume's threads prepare memory for pages). Only for targets with an asynchronous sync of their own.

use std::time::{Duration, Instant};

use super::load::random_bytes;
use super::{Better, Case, CaseResult, Cost, Env, Experiment, Size};
use crate::error::{LabError, LabResult};
use crate::measure::Recorder;
use crate::sys;
use crate::target::{AsyncMethod, FileRef, OpenHow, SyncQueue, SyncScope};

/// Options.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct TicketsOptions {
    /// Files of submit [default: 20000, quick: 4000]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    pub files: Option<u64>,
    /// Tickets of held [default: 100000]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    pub tickets: Option<u64>,
}

/// The experiment.
pub struct Tickets {
    files: u64,
    tickets: u64,
}

/// Files of *held*: each is written once and submitted many times.
const HELD_FILES: u64 = 1000;
const FILE_BYTES: usize = 4096;
/// Who has not grown for so long is done with that. Longer than the pauses of a thread that prepares memory at leisure.
const STEADY_FOR: Duration = Duration::from_millis(300);
const STEADY_PATIENCE: Duration = Duration::from_secs(10);
const ROOT: &str = "tickets";

impl Tickets {
    /// With options.
    pub fn new(o: &TicketsOptions, size: Size) -> Self {
        Tickets {
            files: o.files.unwrap_or(size.pick(4000, 20_000, 20_000)).max(1),
            tickets: o.tickets.unwrap_or(100_000).max(1),
        }
    }

    fn written(env: &Env<'_>, count: u64) -> LabResult<Vec<FileRef>> {
        let data = random_bytes(FILE_BYTES, env.seed);
        env.fs.mkdir_all(ROOT)?;
        (0..count)
            .map(|i| {
                if i % 64 == 0 {
                    env.cancel.check()?;
                }
                let file = env.fs.open(&format!("{ROOT}/f{i}"), OpenHow::Create)?;
                file.write_at(&data, 0)?;
                Ok(file)
            })
            .collect()
    }

    fn submit(&self, env: &Env<'_>) -> LabResult<CaseResult> {
        let mut queue = env.fs.sync_queue(AsyncMethod::Native, self.files as usize)?;
        let files = Self::written(env, self.files)?;
        let cost = Cost::start(env);
        let begun = Instant::now();
        let mut calls = Recorder::new(begun);
        for (tag, file) in (0..).zip(&files) {
            let from = Instant::now();
            queue.submit(file, SyncScope::File, tag)?;
            calls.since(from);
        }
        let submitted = begun.elapsed();
        finish(&mut *queue)?;
        let mut result = CaseResult::default();
        let count = self.files as f64;
        let mean = submitted.as_secs_f64() * 1e6 / count;
        result.metric("submit_mean_us", "us", mean, Better::Lower);
        let rate = count / begun.elapsed().as_secs_f64();
        result.metric("tickets_per_s", "1/s", rate, Better::Higher);
        result.cost_per("ticket", cost.stop(env), self.files, self.files * FILE_BYTES as u64);
        result.latency("submit", calls);
        Ok(result)
    }

    fn held(&self, env: &Env<'_>) -> LabResult<CaseResult> {
        let files = Self::written(env, HELD_FILES.min(self.tickets))?;
        let mut queue = env.fs.sync_queue(AsyncMethod::Native, self.tickets as usize)?;
        await_steady_memory(env)?;
        sys::give_back_free_memory();
        env.fs.hold_flushes(true)?;
        let grown = self.submit_all(&mut *queue, &files);
        // Whatever happened: nothing else goes on without flushes.
        env.fs.hold_flushes(false)?;
        let (grown_bytes, in_flight) = grown?;
        finish(&mut *queue)?;
        if (in_flight as u64) < self.tickets / 10 * 9 {
            let text = format!("only {in_flight} of {} tickets were in flight", self.tickets);
            return Err(LabError::BadOption(text));
        }
        let mut result = CaseResult::default();
        let mib = grown_bytes as f64 / 1_048_576.0;
        result.metric("held_mib", "MiB", mib, Better::Lower);
        let each = grown_bytes as f64 / self.tickets as f64;
        result.metric("bytes_per_ticket", "bytes", each, Better::Lower);
        result.metric("tickets_in_flight", "tickets", in_flight as f64, Better::Neither);
        Ok(result)
    }

    /// Submits all tickets; answers what the process has grown by, and how many have not ended.
    fn submit_all(&self, queue: &mut dyn SyncQueue, files: &[FileRef]) -> LabResult<(u64, usize)> {
        let before = resident_bytes();
        for tag in 0..self.tickets {
            let file = &files[tag as usize % files.len()];
            queue.submit(file, SyncScope::File, tag)?;
        }
        let grown = resident_bytes().saturating_sub(before);
        while let Some(done) = queue.complete(false)? {
            done.result.map_err(|e| LabError::io("ticket", e))?;
        }
        Ok((grown, queue.in_flight()))
    }
}

fn finish(queue: &mut dyn SyncQueue) -> LabResult<()> {
    while let Some(done) = queue.complete(true)? {
        done.result.map_err(|e| LabError::io("ticket", e))?;
    }
    Ok(())
}

/// Waits until this process has not grown for a while, but not for ever.
fn await_steady_memory(env: &Env<'_>) -> LabResult<()> {
    let begun = Instant::now();
    let (mut largest_bytes, mut since) = (resident_bytes(), begun);
    while since.elapsed() < STEADY_FOR && begun.elapsed() < STEADY_PATIENCE {
        env.cancel.check()?;
        std::thread::sleep(STEADY_FOR / 20);
        let bytes = resident_bytes();
        if bytes > largest_bytes {
            (largest_bytes, since) = (bytes, Instant::now());
        }
    }
    Ok(())
}

/// Memory of this process that is in RAM.
fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = text.split(' ').nth(1).and_then(|w| w.parse().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
}

impl Experiment for Tickets {
    fn name(&self) -> &'static str {
        "tickets"
    }

    fn question(&self) -> &'static str {
        "What does submitting an asynchronous sync cost, and what does one hold while it waits?"
    }

    fn base_mode(&self) -> &'static str {
        "submit"
    }

    fn fresh_for_each_case(&self) -> bool {
        true
    }

    fn cases(&self) -> Vec<Case> {
        vec![
            Case::new("submit").with("files", self.files),
            Case::new("held").with("tickets", self.tickets),
        ]
    }

    fn run(&self, env: &Env<'_>, case: &Case) -> LabResult<CaseResult> {
        if !env.fs.async_methods().contains(&AsyncMethod::Native) {
            return Err(LabError::NotOffered("no asynchronous sync of its own"));
        }
        if case.mode == "held" { self.held(env) } else { self.submit(env) }
    }

    fn space_bytes(&self) -> u64 {
        self.files * 8192 + (256 << 20)
    }
}
