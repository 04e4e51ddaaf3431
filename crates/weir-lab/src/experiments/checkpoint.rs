//! checkpoint: a database writes back while others work.
//!
//! A checkpointer dirties 8 KiB pages at random over many files at a constant rate and makes them
//! durable, while the foreground does, open-loop: 4 KiB random reads of uncached data, reads of
//! cached data, 8 KiB append + fdatasync to a log, and small metadata operations.
//!
//! Modes: *quiet* (foreground alone), *end* (one fsync per file at the end), *trickle*
//! (`sync_file_range` of the sorted and merged pages of every 256 KiB, then fsync), *async*
//! (ranged asynchronous fdatasync of every 256 KiB of a file, nothing at the end), *dontcache*
//! (uncached buffered writes, then fsync).

use std::ops::Range;
use std::time::{Duration, Instant};

use super::fsmark::method_of;
use super::load::{
    StartLine, Stop, WARM_UP, fill_file, merged, open_loop, open_loop_into, pace, random_bytes,
    read_whole,
};
use super::{Better, Case, CaseResult, Cost, Env, Experiment, Mark, Size};
use crate::error::{LabError, LabResult};
use crate::measure::{BlockDevice, Recorder, Rng, StandstillWatch};
use crate::target::{FileRef, OpenHow, SyncQueue, SyncScope};

/// Options.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct CheckpointOptions {
    /// MiB to dirty [default: 1536, medium: 448, quick: 256]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub dirty_mib: Option<u64>,
    /// MiB dirtied per second [default: 80]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub rate_mib: Option<u64>,
    /// Uncached reads per second [default: 400, quick: 800]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub reads: Option<u64>,
    /// Log appends per second [default: 200, quick: 500]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub appends: Option<u64>,
}

const PAGE_BYTES: u64 = 8192;
const BATCH_PAGES: usize = 32;
const READ_BYTES: u64 = 4096;
const READERS: u64 = 4;
const CACHED_BYTES: u64 = 16 << 20;
const CACHED_PER_S: f64 = 500.0;
const META_PER_S: f64 = 100.0;
const SYNCS_IN_FLIGHT: usize = 16;
const MIB: u64 = 1 << 20;
/// How long those who were due while the disk stood still may keep others waiting.
const BACKLOG: Duration = Duration::from_millis(20);
/// The quick version runs the first four.
const MODES: [&str; 5] = ["quiet", "end", "trickle", "async", "dontcache"];

/// The experiment.
pub struct Checkpoint {
    dirty_bytes: u64,
    bytes_per_s: u64,
    files: u64,
    cold_bytes: u64,
    reads_per_s: u64,
    appends_per_s: u64,
    quiet: Duration,
    modes: &'static [&'static str],
}

impl Checkpoint {
    /// With options.
    pub fn new(o: &CheckpointOptions, size: Size) -> Self {
        Checkpoint {
            dirty_bytes: o.dirty_mib.unwrap_or(size.pick(256, 448, 1536)).max(1) * MIB,
            bytes_per_s: o.rate_mib.unwrap_or(80).max(1) * MIB,
            files: size.pick(8, 32, 64),
            cold_bytes: size.pick(384 * MIB, 1024 * MIB, 2048 * MIB),
            // A p99.9 needs a thousand operations, also in the short version.
            reads_per_s: o.reads.unwrap_or(size.pick(800, 400, 400)).max(READERS),
            appends_per_s: o.appends.unwrap_or(size.pick(500, 200, 200)).max(1),
            // About as long as the others take: a tail grows with the number of operations.
            quiet: size.pick(
                Duration::from_millis(3200),
                Duration::from_secs(6),
                Duration::from_secs(20),
            ),
            modes: size.pick(&MODES[..4], &MODES, &MODES),
        }
    }

    /// The database is twice what is dirtied: a checkpoint touches part of the pages.
    fn file_bytes(&self) -> u64 {
        (2 * self.dirty_bytes / self.files).next_multiple_of(PAGE_BYTES)
    }
}

/// The `i`-th place of a sequence that looks random and repeats no more than chance would.
pub fn scattered(i: u64, n: u64, seed: u64) -> u64 {
    Rng::new(seed, i).below(n)
}

/// Sorts pages and joins neighbours into (offset, length) runs.
pub fn merge_pages(pages: &mut Vec<u64>, page_bytes: u64) -> Vec<(u64, u64)> {
    pages.sort_unstable();
    pages.dedup();
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for offset in pages.drain(..) {
        match runs.last_mut() {
            Some(run) if run.0 + run.1 == offset => run.1 += page_bytes,
            _ => runs.push((offset, page_bytes)),
        }
    }
    runs
}

fn db_path(i: u64) -> String {
    format!("checkpoint/db{i:03}")
}

struct Checkpointer<'a> {
    env: &'a Env<'a>,
    what: &'a Checkpoint,
    mode: &'a str,
    files: Vec<FileRef>,
    /// Pages written and not yet handed on, per file.
    pending: Vec<Vec<u64>>,
    pending_pages: usize,
    queue: Option<Box<dyn SyncQueue>>,
    tag: u64,
}

impl Checkpointer<'_> {
    /// Dirties, makes durable; returns how long the second part took, and the moments it spans.
    fn run(&mut self, epoch: Instant) -> LabResult<(Duration, Vec<Mark>)> {
        let mut page = random_bytes(PAGE_BYTES as usize, self.env.seed);
        let mut rng = Rng::new(self.env.seed, 0xC4EC);
        let begun = Instant::now();
        let pages = self.what.dirty_bytes / PAGE_BYTES;
        let per_file = self.what.file_bytes() / PAGE_BYTES;
        for i in 0..pages {
            if i % 128 == 0 {
                self.env.cancel.check()?;
            }
            let file = rng.below(self.what.files) as usize;
            let offset = rng.below(per_file) * PAGE_BYTES;
            page[..8].copy_from_slice(&i.to_le_bytes());
            if self.mode == "dontcache" {
                self.files[file].write_dontcache_at(&page, offset)?;
            } else {
                self.files[file].write_at(&page, offset)?;
            }
            self.pending[file].push(offset);
            self.pending_pages += 1;
            self.hand_on(file)?;
            pace(begun, (i + 1) * PAGE_BYTES, self.what.bytes_per_s as f64);
        }
        let last = Instant::now();
        self.finish()?;
        let took = last.elapsed();
        let at = |t: Instant| t.duration_since(epoch);
        let marks = vec![
            Mark::new("dirtying", at(begun), at(last)),
            Mark::new("making durable", at(last), at(last) + took),
        ];
        Ok((took, marks))
    }

    fn hand_on(&mut self, file: usize) -> LabResult<()> {
        match self.mode {
            "trickle" if self.pending_pages >= BATCH_PAGES => {
                for (pages, file) in self.pending.iter_mut().zip(&self.files) {
                    for (offset, len) in merge_pages(pages, PAGE_BYTES) {
                        file.start_writeback(offset, len)?;
                    }
                }
                self.pending_pages = 0;
            }
            "async" if self.pending[file].len() >= BATCH_PAGES => self.submit(file)?,
            _ => {}
        }
        Ok(())
    }

    fn submit(&mut self, file: usize) -> LabResult<()> {
        let pages = &mut self.pending[file];
        let Some(queue) = &mut self.queue else { return Ok(()) };
        let (Some(first), Some(last)) = (pages.iter().min(), pages.iter().max()) else {
            return Ok(());
        };
        let range = SyncScope::DataRange(*first, last + PAGE_BYTES - first);
        pages.clear();
        while let Some(done) = queue.complete(queue.in_flight() >= SYNCS_IN_FLIGHT)? {
            done.result.map_err(|e| LabError::io("asynchronous ranged sync", e))?;
        }
        queue.submit(&self.files[file], range, self.tag)?;
        self.tag += 1;
        Ok(())
    }

    fn finish(&mut self) -> LabResult<()> {
        if self.mode != "async" {
            for file in &self.files {
                file.fsync()?;
            }
            return Ok(());
        }
        for file in 0..self.files.len() {
            self.submit(file)?;
        }
        if let Some(queue) = &mut self.queue {
            while let Some(done) = queue.complete(true)? {
                done.result.map_err(|e| LabError::io("asynchronous ranged sync", e))?;
            }
        }
        Ok(())
    }
}

struct Foreground {
    read: Recorder,
    cached: Recorder,
    log: Recorder,
    meta: Recorder,
}

impl Checkpoint {
    fn uncached_reader(
        &self,
        env: &Env<'_>,
        thread: u64,
        line: &StartLine,
        stop: &Stop,
    ) -> LabResult<Recorder> {
        let file = env.fs.open("checkpoint/cold", OpenHow::Read);
        let mut buf = vec![0; READ_BYTES as usize];
        let blocks = self.cold_bytes / READ_BYTES;
        let rate = self.reads_per_s as f64 / READERS as f64;
        let epoch = line.ready();
        let file = file?;
        open_loop_into(Recorder::keeping(epoch), (epoch, rate), stop, |i| {
            let block = scattered(i * READERS + thread, blocks, env.seed);
            read_whole(&*file, &mut buf, block * READ_BYTES)
        })
    }

    fn cached_reader(env: &Env<'_>, line: &StartLine, stop: &Stop) -> LabResult<Recorder> {
        let file = env.fs.open("checkpoint/hot", OpenHow::Read);
        let mut buf = vec![0; READ_BYTES as usize];
        let mut rng = Rng::new(env.seed, 0xCAC4E);
        let epoch = line.ready();
        let file = file?;
        open_loop(epoch, CACHED_PER_S, stop, |_| {
            let block = rng.below(CACHED_BYTES / READ_BYTES);
            read_whole(&*file, &mut buf, block * READ_BYTES)
        })
    }

    fn appender(&self, env: &Env<'_>, line: &StartLine, stop: &Stop) -> LabResult<Recorder> {
        let file = env.fs.open("checkpoint/log", OpenHow::Append);
        let data = random_bytes(PAGE_BYTES as usize, env.seed);
        let epoch = line.ready();
        let file = file?;
        let rate = self.appends_per_s as f64;
        open_loop_into(Recorder::keeping(epoch), (epoch, rate), stop, |_| {
            file.append(&data)?;
            file.fdatasync()?;
            Ok(())
        })
    }

    fn renamer(env: &Env<'_>, line: &StartLine, stop: &Stop) -> LabResult<Recorder> {
        open_loop(line.ready(), META_PER_S, stop, |i| {
            let (new, old) = (format!("checkpoint/m{i}"), format!("checkpoint/n{i}"));
            drop(env.fs.open(&new, OpenHow::Create)?);
            env.fs.rename(&new, &old)?;
            env.fs.unlink(&old)?;
            Ok(())
        })
    }

    fn foreground(&self, env: &Env<'_>, line: &StartLine, stop: &Stop) -> LabResult<Foreground> {
        std::thread::scope(|scope| {
            let readers: Vec<_> = (0..READERS)
                .map(|t| scope.spawn(move || self.uncached_reader(env, t, line, stop)))
                .collect();
            let cached = scope.spawn(|| Self::cached_reader(env, line, stop));
            let log = scope.spawn(|| self.appender(env, line, stop));
            let meta = scope.spawn(|| Self::renamer(env, line, stop));
            let epoch = line.ready();
            let join = |h: std::thread::ScopedJoinHandle<'_, LabResult<Recorder>>| {
                h.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            let reads = readers.into_iter().map(join).collect::<LabResult<Vec<_>>>();
            let (cached, log, meta) = (join(cached), join(log), join(meta));
            Ok(Foreground { read: merged(reads?, epoch), cached: cached?, log: log?, meta: meta? })
        })
    }

    fn checkpointer<'a>(&'a self, env: &'a Env<'a>, mode: &'a str) -> LabResult<Checkpointer<'a>> {
        let files = (0..self.files)
            .map(|i| Ok(env.fs.open(&db_path(i), OpenHow::Write)?))
            .collect::<LabResult<Vec<_>>>()?;
        let queue = if mode == "async" {
            Some(env.fs.sync_queue(method_of(env, "async")?, SYNCS_IN_FLIGHT)?)
        } else {
            None
        };
        let pending = vec![Vec::new(); files.len()];
        let what = self;
        Ok(Checkpointer { env, what, mode, files, pending, pending_pages: 0, queue, tag: 0 })
    }
}

/// The disk that may stand still of its own accord. A loop device with nothing below it that is known is that of a slow disk: its
/// flushes are long because they were asked to be, and to leave out whoever waits for one would hide what the run is about.
fn watched(disks: &[BlockDevice]) -> Option<&BlockDevice> {
    disks.last().filter(|disk| !disk.name.starts_with("loop"))
}

/// How often and how long the disk stood still, and the tails of what did not wait for that.
fn standstills(
    result: &mut CaseResult,
    foreground: &Foreground,
    still: &[Range<Instant>],
    epoch: Instant,
) {
    let total: Duration = still.iter().map(|span| span.end - span.start).sum();
    result.metric("disk_standstills", "", still.len() as f64, Better::Neither);
    result.metric("disk_standstill_ms", "ms", total.as_secs_f64() * 1e3, Better::Neither);
    let since = |at: Instant| at.saturating_duration_since(epoch);
    let marks = still.iter().map(|s| Mark::new("disk stands still", since(s.start), since(s.end)));
    result.marks.extend(marks);
    // Who was due meanwhile is served after it, and whoever comes then waits behind them.
    let spans: Vec<_> = still.iter().map(|span| span.start..span.end + BACKLOG).collect();
    result.percentiles("read_moving", &foreground.read.without(&spans));
    result.percentiles("log_moving", &foreground.log.without(&spans));
}

impl Experiment for Checkpoint {
    fn name(&self) -> &'static str {
        "checkpoint"
    }

    fn question(&self) -> &'static str {
        "What happens to everybody else while a database checkpoint is written and made durable?"
    }

    fn base_mode(&self) -> &'static str {
        "quiet"
    }

    fn cases(&self) -> Vec<Case> {
        let mib = self.dirty_bytes / MIB;
        self.modes.iter().map(|m| Case::new(m).with("dirty_mib", mib)).collect()
    }

    fn default_rounds(&self, size: Size) -> usize {
        // One long round says more about a tail than two short ones.
        size.pick(1, 2, 3)
    }

    fn prepare(&self, env: &Env<'_>) -> LabResult<()> {
        env.fs.mkdir_all("checkpoint")?;
        for i in 0..self.files {
            fill_file(&*env.fs, &db_path(i), self.file_bytes(), env.seed + i, env.cancel)?;
        }
        fill_file(&*env.fs, "checkpoint/cold", self.cold_bytes, env.seed, env.cancel)?;
        fill_file(&*env.fs, "checkpoint/hot", CACHED_BYTES, env.seed, env.cancel)
    }

    fn run(&self, env: &Env<'_>, case: &Case) -> LabResult<CaseResult> {
        env.fs.make_cold()?;
        {
            let hot = env.fs.open("checkpoint/hot", OpenHow::Read)?;
            let mut buf = vec![0; MIB as usize];
            for at in (0..CACHED_BYTES).step_by(MIB as usize) {
                hot.read_at(&mut buf, at)?;
            }
            drop(env.fs.open("checkpoint/log", OpenHow::Create)?);
        }
        let mut checkpointer = self.checkpointer(env, &case.mode)?;
        let stop = Stop::default();
        // Four kinds of foreground, who gathers them, and this thread.
        let line = StartLine::new(READERS as usize + 5);
        let cost = Cost::start(env);
        let watch = StandstillWatch::start(watched(env.disks));
        let (foreground, written, epoch) = std::thread::scope(|scope| {
            let foreground = scope.spawn(|| self.foreground(env, &line, &stop));
            let epoch = line.ready();
            std::thread::sleep(WARM_UP);
            let written = if case.mode == "quiet" {
                std::thread::sleep(self.quiet);
                Ok(None)
            } else {
                // A quiet lead-in makes the time series readable.
                std::thread::sleep(Duration::from_millis(300));
                checkpointer.run(epoch).map(Some)
            };
            std::thread::sleep(Duration::from_millis(200));
            stop.now();
            let foreground =
                foreground.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            (foreground, written, epoch)
        });
        let still = watch.stop();
        drop(checkpointer);
        let (written, foreground) = (written?, foreground?);
        let mut result = CaseResult::default();
        if let Some((last, marks)) = written {
            let total = marks.iter().map(|m| m.to_ms - m.from_ms).sum::<u64>();
            result.metric("last_fsync_ms", "ms", last.as_secs_f64() * 1e3, Better::Lower);
            result.metric("checkpoint_ms", "ms", total as f64, Better::Lower);
            let pages = self.dirty_bytes / PAGE_BYTES;
            result.cost_per("page", cost.stop(env), pages, self.dirty_bytes);
            result.marks = marks;
        }
        standstills(&mut result, &foreground, &still, epoch);
        result.latency("read", foreground.read);
        result.latency("cached_read", foreground.cached);
        result.latency("log", foreground.log);
        result.latency("meta", foreground.meta);
        Ok(result)
    }

    fn space_bytes(&self) -> u64 {
        self.file_bytes() * self.files + self.cold_bytes + CACHED_BYTES + (512 << 20)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scattered_reads_repeat_no_more_than_chance_would() {
        let n = 100_000;
        let mut seen = std::collections::HashSet::new();
        let fresh = (0..10_000).filter(|i| seen.insert(scattered(*i, n, 1))).count();
        assert!(fresh > 9_000, "{fresh} of 10000 were fresh");
    }

    #[test]
    fn the_long_flushes_of_a_slow_disk_are_no_standstills() {
        let disk = |name: &str| BlockDevice { name: name.into() };
        let plain = [disk("loop0"), disk("vda")];
        assert_eq!(watched(&plain), Some(&plain[1]));
        assert_eq!(watched(&plain[1..]), Some(&plain[1]));
        assert_eq!((watched(&plain[..1]), watched(&[])), (None, None));
    }

    #[test]
    fn pages_are_sorted_joined_and_taken() {
        let mut pages = vec![24_576, 0, 8192, 40_960, 8192];
        let runs = merge_pages(&mut pages, 8192);
        assert_eq!(runs, vec![(0, 16_384), (24_576, 8192), (40_960, 8192)]);
        assert!(pages.is_empty());
    }
}
