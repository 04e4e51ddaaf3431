//! aging: what growth does to free space.
//!
//! (a) Copies of many small files (1 to 256 KiB, log-uniform) by parallel writers: *copy-close*
//! (write, close), *copy-fsync* (fsync before close), *copy-pass* (a second open-fsync-close pass).
//! (b) Files growing in turns: *grow-held* (appends round robin to files held open),
//! *grow-reopen* (open, append, close each time), *append-fsync* (append and fsync each time).
//! (c) *churn*: create, delete and grow at 80 % full. Each case starts on a fresh file system; on a
//! `dir:` target only the files' own extents can be seen.

use std::time::Instant;

use super::load::{fill_file, random_bytes, together};
use super::{Better, Case, CaseResult, Env, Experiment, Size};
use crate::error::{LabError, LabResult};
use crate::measure::{Recorder, Rng};
use crate::target::{Fs, FsError, OpenHow, freemap};

/// Options.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct AgingOptions {
    /// Small files to copy [default: 40000, medium: 6000, quick: 2000]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    pub files: Option<u64>,
    /// Parallel writers [default: 4]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=4096))]
    pub writers: Option<u64>,
    /// Percent full during the churn [default: 80]
    #[arg(long, value_parser = clap::value_parser!(u64).range(10..=90))]
    pub fill_percent: Option<u64>,
}

/// The experiment.
pub struct Aging {
    files: u64,
    writers: u64,
    fill_percent: u64,
    seq_bytes: u64,
    size: Size,
}

const KIB: u64 = 1024;
const MIB: u64 = 1 << 20;
const GROWING_FILES: u64 = 100;
/// A sample of this many files is asked for its extents.
const EXTENT_SAMPLE: usize = 2000;

impl Aging {
    /// With options.
    pub fn new(o: &AgingOptions, size: Size) -> Self {
        Aging {
            files: o.files.unwrap_or(size.pick(2000, 6000, 40_000)).max(1),
            writers: o.writers.unwrap_or(4).max(1),
            fill_percent: o.fill_percent.unwrap_or(80).clamp(10, 90),
            seq_bytes: size.pick(64 * MIB, 256 * MIB, 1024 * MIB),
            size,
        }
    }

    fn path(writer: u64, i: u64) -> String {
        format!("aging/w{writer}/d{}/f{i}", i / 500)
    }

    fn make_dirs(&self, env: &Env<'_>, per_writer: u64) -> LabResult<()> {
        for w in 0..self.writers {
            for d in 0..=per_writer / 500 {
                env.fs.mkdir_all(&format!("aging/w{w}/d{d}"))?;
            }
        }
        Ok(())
    }

    fn copy(&self, env: &Env<'_>, mode: &str) -> LabResult<u64> {
        let per_writer = self.files.div_ceil(self.writers);
        self.make_dirs(env, per_writer)?;
        let (bytes, _) = together(self.writers, |w, _| {
            let mut rng = Rng::new(env.seed, w);
            let data = random_bytes(256 * KIB as usize, env.seed + w);
            let mut bytes = 0;
            for i in 0..per_writer {
                if i % 32 == 0 {
                    env.cancel.check()?;
                }
                let len = rng.log_uniform(KIB, 256 * KIB);
                let file = env.fs.open(&Self::path(w, i), OpenHow::Create)?;
                file.write_at(&data[..len as usize], 0)?;
                if mode == "copy-fsync" {
                    file.fsync()?;
                }
                bytes += len;
            }
            if mode == "copy-pass" {
                for i in 0..per_writer {
                    env.cancel.check()?;
                    env.fs.open(&Self::path(w, i), OpenHow::Write)?.fsync()?;
                }
            }
            Ok(bytes)
        })?;
        Ok(bytes.iter().sum())
    }

    /// Files growing in turns; each turn appends 4 to 64 KiB to every file.
    fn grow(&self, env: &Env<'_>, mode: &str) -> LabResult<u64> {
        let turns = self.size.pick(12, 24, 64);
        env.fs.mkdir_all("aging/w0")?;
        let mut rng = Rng::new(env.seed, 0x6401);
        let data = random_bytes(64 * KIB as usize, env.seed);
        let name = |i: u64| format!("aging/w0/g{i}");
        let mut held = Vec::new();
        if mode == "grow-held" {
            for i in 0..GROWING_FILES {
                held.push(env.fs.open(&name(i), OpenHow::Append)?);
            }
        }
        let mut bytes = 0;
        for _ in 0..turns {
            for i in 0..GROWING_FILES {
                env.cancel.check()?;
                let len = rng.log_uniform(4 * KIB, 64 * KIB) as usize;
                bytes += len as u64;
                if let Some(file) = held.get(i as usize) {
                    file.append(&data[..len])?;
                    continue;
                }
                let file = env.fs.open(&name(i), OpenHow::Append)?;
                file.append(&data[..len])?;
                if mode == "append-fsync" {
                    file.fsync()?;
                }
            }
        }
        Ok(bytes)
    }

    /// What the churn may add to a file system that is full to some percent of its capacity: what others have on it is theirs.
    fn churn_bytes(&self, (percent, capacity): (f64, u64)) -> LabResult<u64> {
        let used = (capacity as f64 * percent / 100.0) as u64;
        let bytes = (capacity / 100 * self.fill_percent).saturating_sub(used);
        if bytes < 64 * MIB {
            return Err(LabError::NotOffered("the file system is too full for a churn"));
        }
        Ok(bytes)
    }

    /// Fills to the target with middling files, then deletes, creates and grows at random.
    fn churn(&self, env: &Env<'_>) -> LabResult<u64> {
        let goal = self.churn_bytes(env.fs.fullness()?)?;
        env.fs.mkdir_all("aging/w0/d0")?;
        let data = random_bytes(MIB as usize, env.seed);
        let mut rng = Rng::new(env.seed, 0xC4);
        let mut live: Vec<(u64, u64)> = Vec::new();
        let (mut used, mut next) = (0, 0);
        // A few large files take the bulk, small ones the last quarter: enough to churn.
        while used < goal / 4 * 3 {
            let len = (goal / 64).clamp(MIB, 256 * MIB);
            let path = format!("aging/bulk{next}");
            fill_file(&*env.fs, &path, len, env.seed, env.cancel)?;
            used += len;
            next += 1;
        }
        let create = |rng: &mut Rng, next: &mut u64| -> LabResult<(u64, u64)> {
            let len = rng.log_uniform(4 * KIB, MIB);
            let file = env.fs.open(&format!("aging/w0/d0/f{next}"), OpenHow::Create)?;
            file.write_at(&data[..len as usize], 0)?;
            *next += 1;
            Ok((*next - 1, len))
        };
        let limit = self.size.pick(2500, 5000, 40_000);
        while used < goal && live.len() < limit {
            env.cancel.check()?;
            let made = create(&mut rng, &mut next)?;
            used += made.1;
            live.push(made);
        }
        let steps = live.len() * 2;
        let mut written = 0;
        for step in 0..steps {
            env.cancel.check()?;
            let at = rng.below(live.len() as u64) as usize;
            if step % 3 == 2 {
                let len = rng.log_uniform(4 * KIB, 64 * KIB);
                let file = env.fs.open(&format!("aging/w0/d0/f{}", live[at].0), OpenHow::Append)?;
                file.append(&data[..len as usize])?;
                live[at].1 += len;
                (used, written) = (used + len, written + len);
            }
            // Deleting and creating in step keeps the fill.
            while used >= goal && !live.is_empty() {
                let (id, len) = live.swap_remove(rng.below(live.len() as u64) as usize);
                env.fs.unlink(&format!("aging/w0/d0/f{id}"))?;
                used -= len.min(used);
            }
            let made = create(&mut rng, &mut next)?;
            (used, written) = (used + made.1, written + made.1);
            live.push(made);
        }
        Ok(written)
    }
}

/// Every file below `dir`.
pub fn files_below(fs: &dyn Fs, dir: &str) -> LabResult<Vec<String>> {
    let mut found = Vec::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        for (name, is_dir) in fs.read_dir(&dir)? {
            let path = format!("{dir}/{name}");
            if is_dir { dirs.push(path) } else { found.push(path) }
        }
    }
    found.sort_unstable();
    Ok(found)
}

fn optional<T>(result: Result<T, FsError>) -> LabResult<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(FsError::NotOffered(_)) => Ok(None),
        Err(e) => Err(LabError::from(e)),
    }
}

/// Space held beyond what the files' sizes need.
fn beyond_eof(fs: &dyn Fs, files: &[String]) -> LabResult<u64> {
    let mut beyond = 0;
    for path in files {
        let s = fs.stat(path)?;
        beyond += s.allocated_bytes.saturating_sub(s.size_bytes.next_multiple_of(4096));
    }
    Ok(beyond)
}

fn extents(env: &Env<'_>, files: &[String], result: &mut CaseResult) -> LabResult<()> {
    let step = files.len().div_ceil(EXTENT_SAMPLE).max(1);
    let (mut count, mut bytes, mut sampled) = (0, 0, 0_u64);
    for path in files.iter().step_by(step) {
        env.cancel.check()?;
        let file = env.fs.open(path, OpenHow::Read)?;
        let Some(n) = optional(file.extent_count())? else { return Ok(()) };
        count += n;
        bytes += env.fs.stat(path)?.size_bytes;
        sampled += 1;
    }
    let per_file = count as f64 / sampled.max(1) as f64;
    result.metric("extents_per_file", "extents", per_file, Better::Lower);
    let per_gib = count as f64 / (bytes.max(1) as f64 / 1_073_741_824.0);
    result.metric("extents_per_gib", "extents", per_gib, Better::Lower);
    Ok(())
}

fn free_space(env: &Env<'_>, result: &mut CaseResult) -> LabResult<()> {
    let Some(map) = optional(env.fs.free_map())? else { return Ok(()) };
    let total = map.total_bytes().max(1) as f64;
    result.metric("free_extents", "extents", map.count() as f64, Better::Lower);
    let small = map.bytes_under(256 * KIB) as f64 / MIB as f64;
    result.metric("free_under_256k_mib", "MiB", small, Better::Lower);
    let large = (1.0 - map.bytes_under(MIB) as f64 / total) * 100.0;
    result.metric("free_in_1m_runs_percent", "%", large, Better::Higher);
    for ((_, name), count) in freemap::CLASSES.iter().zip(map.histogram()) {
        let metric = format!("free_extents_to_{name}");
        result.metric(&metric, "extents", count as f64, Better::Neither);
    }
    Ok(())
}

fn tree_read(env: &Env<'_>) -> LabResult<f64> {
    env.fs.make_cold()?;
    let files = files_below(&*env.fs, "aging")?;
    let mut buf = vec![0; MIB as usize];
    let begun = Instant::now();
    let mut bytes = 0_u64;
    for path in &files {
        env.cancel.check()?;
        let file = env.fs.open(path, OpenHow::Read)?;
        let mut at = 0;
        loop {
            let n = file.read_at(&mut buf, at)? as u64;
            at += n;
            bytes += n;
            // The bulk files of the churn are not what is asked about.
            if n < MIB || at >= 8 * MIB {
                break;
            }
        }
    }
    Ok(bytes as f64 / MIB as f64 / begun.elapsed().as_secs_f64())
}

impl Experiment for Aging {
    fn name(&self) -> &'static str {
        "aging"
    }

    fn question(&self) -> &'static str {
        "What does the way files grow do to them and to the free space?"
    }

    fn base_mode(&self) -> &'static str {
        "copy-close"
    }

    fn fresh_for_each_case(&self) -> bool {
        true
    }

    fn default_rounds(&self, size: Size) -> usize {
        // The layout that a load leaves is the same in every round but for the timing of writeback.
        size.pick(1, 1, 3)
    }

    fn cases(&self) -> Vec<Case> {
        let (copies, grows): (&[&str], &[&str]) = if self.size.is_quick() {
            (&["copy-close", "copy-fsync"], &["grow-reopen", "append-fsync"])
        } else {
            (
                &["copy-close", "copy-fsync", "copy-pass"],
                &["grow-held", "grow-reopen", "append-fsync"],
            )
        };
        let mut cases: Vec<Case> =
            copies.iter().map(|m| Case::new(m).with("files", self.files)).collect();
        cases.extend(grows.iter().map(|m| Case::new(m).with("files", GROWING_FILES)));
        cases.push(Case::new("churn").with("fill_percent", self.fill_percent));
        cases
    }

    fn run(&self, env: &Env<'_>, case: &Case) -> LabResult<CaseResult> {
        let mut result = CaseResult::default();
        let before = env.fs.device();
        let begun = Instant::now();
        let bytes = match case.mode.as_str() {
            "churn" => {
                let (_, capacity) = env.fs.fullness()?;
                if capacity > 64 << 30 {
                    return Err(LabError::NotOffered("churn fills the file system: over 64 GiB"));
                }
                self.churn(env)?
            }
            mode if mode.starts_with("copy") => self.copy(env, mode)?,
            mode => self.grow(env, mode)?,
        };
        let took = begun.elapsed().as_secs_f64();
        let files = files_below(&*env.fs, "aging")?;
        let beyond = beyond_eof(&*env.fs, &files)?;
        env.fs.syncfs()?;
        let synced = begun.elapsed().as_secs_f64();
        result.metric("mib_per_s", "MiB/s", bytes as f64 / MIB as f64 / took, Better::Higher);
        let durable = bytes as f64 / MIB as f64 / synced;
        result.metric("mib_per_s_until_durable", "MiB/s", durable, Better::Higher);
        result.device_per("file", env.device_since(before), files.len() as u64, bytes);
        let mib = |b: u64| b as f64 / MIB as f64;
        result.metric("beyond_eof_mib", "MiB", mib(beyond), Better::Lower);
        extents(env, &files, &mut result)?;
        let later = beyond_eof(&*env.fs, &files)?;
        result.metric("beyond_eof_after_sync_mib", "MiB", mib(later), Better::Lower);
        free_space(env, &mut result)?;

        let mut pieces = Recorder::new(Instant::now());
        let data = random_bytes(MIB as usize, env.seed);
        let begun = Instant::now();
        let file = env.fs.open("aging-seq", OpenHow::Create)?;
        for at in (0..self.seq_bytes).step_by(MIB as usize) {
            let from = Instant::now();
            file.write_at(&data, at)?;
            pieces.since(from);
        }
        file.fsync()?;
        let rate = mib(self.seq_bytes) / begun.elapsed().as_secs_f64();
        result.metric("seq_write_mib_per_s", "MiB/s", rate, Better::Higher);
        if let Some(n) = optional(file.extent_count())? {
            result.metric("seq_write_extents", "extents", n as f64, Better::Lower);
        }
        drop(file);
        result.metric("tree_read_mib_per_s", "MiB/s", tree_read(env)?, Better::Higher);
        result.latency("seq_write", pieces);
        env.fs.unlink("aging-seq")?;
        env.fs.remove_tree("aging")?;
        Ok(result)
    }

    fn space_bytes(&self) -> u64 {
        self.files * 64 * KIB + self.seq_bytes + (512 << 20)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_churn_adds_no_more_than_what_is_left_to_its_fill() {
        const GIB: u64 = 1 << 30;
        let aging = Aging::new(&AgingOptions::default(), Size::Quick);
        assert_eq!(aging.churn_bytes((0.0, 100 * GIB)).expect("room"), 80 * GIB);
        assert_eq!(aging.churn_bytes((50.0, 100 * GIB)).expect("room"), 30 * GIB);
        for full in [79.99, 80.0, 95.0, 100.0] {
            assert!(matches!(aging.churn_bytes((full, 100 * GIB)), Err(LabError::NotOffered(_))));
        }
    }
}
