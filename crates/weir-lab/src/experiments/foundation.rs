//! foundation: the plain paths that everything else stands on.
//!
//! *create-fsync* (create + write 4 KiB + fsync + close, one thread), *append-64k* (64 KiB appends with an
//! fsync each), *cached-read* (4 KiB of a hot block, and at random over a cached file), *buffered-4k* (4 KiB
//! writes into the cache), *write-1m* (1 MiB buffered writes until they are durable), *read-1m* (cold
//! sequential reads), *untar* (a source tree, then `syncfs`), *one-directory* and *many-directories* (very
//! many files: what the last tenth costs against the first, a cold look-up, the opening), *recovery* (the
//! start after a crash with a full log). Target `raw` gives the bandwidth of the bare disk for *write-1m*
//! and *read-1m*. Each case starts on a fresh file system.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::load::{fill_file, random_bytes, read_whole, settle, together};
use super::tree;
use super::{Better, Case, CaseResult, Cost, Env, Experiment, Size};
use crate::error::{IoContext, LabError, LabResult};
use crate::measure::{Recorder, Rng};
use crate::sys::AlignedBuf;
use crate::target::stage::find_tool;
use crate::target::{Fs, OpenHow};

/// Options.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct FoundationOptions {
    /// Files of one-directory and many-directories [default: 1000000, quick: 20000]
    #[arg(long, value_parser = clap::value_parser!(u64).range(10..=1_000_000_000))]
    pub files: Option<u64>,
    /// MiB of write-1m and read-1m [default: 1024, quick: 256]
    #[arg(long, value_parser = clap::value_parser!(u64).range(8..=1 << 20))]
    pub sequential_mib: Option<u64>,
    /// Files that are synced one by one in create-fsync [default: 10000, medium: 3000, quick: 1000]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    pub synced_files: Option<u64>,
    /// MiB of cached-read and buffered-4k [default: 256]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub cached_mib: Option<u64>,
    /// An uncompressed archive for untar [default: a generated source tree]
    #[arg(long, value_name = "FILE")]
    pub tar: Option<PathBuf>,
}

/// The experiment.
pub struct Foundation {
    files: u64,
    sequential_bytes: u64,
    synced_files: u64,
    /// Most files that are written to fill the log.
    log_files: u64,
    tree_files: u64,
    append_time: Duration,
    cached_bytes: u64,
    cached_reads: u64,
    tar: Option<PathBuf>,
}

const PAGE: u64 = 4096;
const KIB: u64 = 1024;
const MIB: u64 = 1 << 20;
const GIB: f64 = 1_073_741_824.0;
const DIRECTORIES: u64 = 1000;
const COLD_LOOKUPS: u64 = 200;
/// Requests in flight on the bare disk.
const RAW_DEPTH: u64 = 8;
/// The log counts as full at this share of what users may fill.
const LOG_FULL: f64 = 0.9;

impl Foundation {
    /// With options.
    pub fn new(o: &FoundationOptions, size: Size) -> Self {
        Foundation {
            files: o.files.unwrap_or(size.pick(20_000, 1_000_000, 1_000_000)).max(10),
            sequential_bytes: o.sequential_mib.unwrap_or(size.pick(256, 1024, 1024)).max(8) * MIB,
            synced_files: o.synced_files.unwrap_or(size.pick(1000, 3000, 10_000)).max(1),
            log_files: size.pick(2000, 20_000, 20_000),
            tree_files: size.pick(1500, 6000, 6000),
            append_time: Duration::from_millis(size.pick(700, 1500, 5000)),
            cached_bytes: o.cached_mib.unwrap_or(256).max(1) * MIB,
            cached_reads: size.pick(100_000, 300_000, 1_000_000),
            tar: o.tar.clone(),
        }
    }

    fn create_fsync(&self, env: &Env<'_>) -> LabResult<CaseResult> {
        let data = random_bytes(PAGE as usize, env.seed);
        let cost = Cost::start(env);
        let begun = Instant::now();
        let mut syncs = Recorder::new(begun);
        for i in 0..self.synced_files {
            if i % 64 == 0 {
                env.cancel.check()?;
            }
            let file = env.fs.open(&format!("f{i:06}"), OpenHow::Create)?;
            file.write_at(&data, 0)?;
            let from = Instant::now();
            file.fsync()?;
            syncs.since(from);
        }
        let took = begun.elapsed().as_secs_f64();
        let mut result = CaseResult::default();
        let rate = self.synced_files as f64 / took;
        result.metric("files_per_s", "files/s", rate, Better::Higher);
        result.cost_per("file", cost.stop(env), self.synced_files, self.synced_files * PAGE);
        result.latency("fsync", syncs);
        Ok(result)
    }

    fn append(&self, env: &Env<'_>) -> LabResult<CaseResult> {
        let data = random_bytes(64 * KIB as usize, env.seed);
        let file = env.fs.open("log", OpenHow::Append)?;
        let before = env.fs.device();
        let begun = Instant::now();
        let mut syncs = Recorder::new(begun);
        while begun.elapsed() < self.append_time {
            env.cancel.check()?;
            let from = Instant::now();
            file.append(&data)?;
            file.fsync()?;
            syncs.since(from);
        }
        let took = begun.elapsed().as_secs_f64();
        let bytes = syncs.count() * data.len() as u64;
        let mut result = CaseResult::default();
        let rate = bytes as f64 / MIB as f64 / took;
        result.metric("mib_per_s", "MiB/s", rate, Better::Higher);
        result.device_per("append", env.device_since(before), syncs.count(), bytes);
        result.latency("append", syncs);
        Ok(result)
    }

    fn cached_read(&self, env: &Env<'_>) -> LabResult<CaseResult> {
        fill_file(&*env.fs, "cached", self.cached_bytes, env.seed, env.cancel)?;
        let file = env.fs.open("cached", OpenHow::Read)?;
        let mut large = vec![0; MIB as usize];
        for at in (0..self.cached_bytes).step_by(MIB as usize) {
            file.read_at(&mut large, at)?;
        }
        let before = env.fs.device();
        let mut page = vec![0; PAGE as usize];
        let mut rng = Rng::new(env.seed, 0xCAC4E);
        let each_ns = |offset: &mut dyn FnMut() -> u64, page: &mut [u8]| -> LabResult<f64> {
            let offsets: Vec<u64> = (0..self.cached_reads).map(|_| offset()).collect();
            let begun = Instant::now();
            for at in &offsets {
                read_whole(&*file, page, *at)?;
            }
            Ok(begun.elapsed().as_nanos() as f64 / self.cached_reads as f64)
        };
        let hot = each_ns(&mut || 0, &mut page)?;
        let random = each_ns(&mut || rng.below(self.cached_bytes / PAGE) * PAGE, &mut page)?;
        let mut result = CaseResult::default();
        result.metric("hot_read_4k_ns", "ns", hot, Better::Lower);
        result.metric("random_read_4k_ns", "ns", random, Better::Lower);
        if let Some(d) = env.device_since(before).filter(|d| d.reads > 0) {
            result.notes.push(format!("{} reads went to the device: not all was cached", d.reads));
        }
        Ok(result)
    }

    fn buffered_write(&self, env: &Env<'_>) -> LabResult<CaseResult> {
        let data = random_bytes(PAGE as usize, env.seed);
        let file = env.fs.open("buffered", OpenHow::Create)?;
        file.fsync()?;
        let before = env.fs.device();
        let begun = Instant::now();
        for at in (0..self.cached_bytes).step_by(PAGE as usize) {
            if at % MIB == 0 {
                env.cancel.check()?;
            }
            file.write_at(&data, at)?;
        }
        let took = begun.elapsed().as_secs_f64();
        let mut result = CaseResult::default();
        let rate = self.cached_bytes as f64 / GIB / took;
        result.metric("gib_per_s", "GiB/s", rate, Better::Higher);
        if let Some(d) = env.device_since(before).filter(|d| d.write_bytes > self.cached_bytes / 4)
        {
            let percent = d.write_bytes * 100 / self.cached_bytes;
            result.notes.push(format!("writeback began while writing ({percent} %)"));
        }
        Ok(result)
    }

    fn sequential_write(&self, env: &Env<'_>) -> LabResult<CaseResult> {
        if let Some(disk) = env.fs.bare_disk() {
            return self.raw(env, &disk, true);
        }
        let data = random_bytes(MIB as usize, env.seed);
        let file = env.fs.open("sequential", OpenHow::Create)?;
        let before = env.fs.device();
        let begun = Instant::now();
        for at in (0..self.sequential_bytes).step_by(MIB as usize) {
            env.cancel.check()?;
            file.write_at(&data, at)?;
        }
        file.fsync()?;
        let mut result = self.bandwidth(begun.elapsed());
        let device = env.device_since(before);
        result.device_per("mib", device, self.sequential_bytes / MIB, self.sequential_bytes);
        Ok(result)
    }

    fn sequential_read(&self, env: &Env<'_>) -> LabResult<CaseResult> {
        if let Some(disk) = env.fs.bare_disk() {
            return self.raw(env, &disk, false);
        }
        fill_file(&*env.fs, "sequential", self.sequential_bytes, env.seed, env.cancel)?;
        env.fs.make_cold()?;
        settle(env)?;
        let file = env.fs.open("sequential", OpenHow::Read)?;
        let mut data = vec![0; MIB as usize];
        let begun = Instant::now();
        for at in (0..self.sequential_bytes).step_by(MIB as usize) {
            env.cancel.check()?;
            read_whole(&*file, &mut data, at)?;
        }
        Ok(self.bandwidth(begun.elapsed()))
    }

    fn bandwidth(&self, took: Duration) -> CaseResult {
        let mut result = CaseResult::default();
        let rate = self.sequential_bytes as f64 / MIB as f64 / took.as_secs_f64();
        result.metric("mib_per_s", "MiB/s", rate, Better::Higher);
        result
    }

    /// The bare disk in pieces of 1 MiB, one at a time and [`RAW_DEPTH`] at a time.
    fn raw(&self, env: &Env<'_>, disk: &Path, write: bool) -> LabResult<CaseResult> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_DIRECT);
        let file = options.open(disk).during(|| format!("opening {}", disk.display()))?;
        let pieces = self.sequential_bytes / MIB;
        // Beyond its end an image would grow, by blocks that are not written in full as the others are.
        let disk_bytes =
            (&file).seek(SeekFrom::End(0)).during(|| format!("sizing {}", disk.display()))?;
        if disk_bytes < self.sequential_bytes {
            let (mib, has) = (self.sequential_bytes / MIB, disk_bytes / MIB);
            let text = format!("{mib} MiB do not fit on a disk of {has} MiB: use --size");
            return Err(LabError::BadOption(text));
        }
        let run = |depth: u64| -> LabResult<Duration> {
            let begun = Instant::now();
            together(depth, |thread, _| {
                let mut buf = AlignedBuf::new(MIB as usize, 0x5A);
                for piece in (thread..pieces).step_by(depth as usize) {
                    env.cancel.check()?;
                    let done = if write {
                        file.write_all_at(&buf, piece * MIB)
                    } else {
                        file.read_exact_at(&mut buf, piece * MIB)
                    };
                    done.during(|| format!("using {}", disk.display()))?;
                }
                Ok(())
            })?;
            if write {
                file.sync_data().during(|| format!("syncing {}", disk.display()))?;
            }
            Ok(begun.elapsed())
        };
        let single = self.bandwidth(run(1)?);
        let mut result = self.bandwidth(run(RAW_DEPTH)?);
        let rate = single.metrics[0].value;
        result.metric("mib_per_s_one_at_a_time", "MiB/s", rate, Better::Higher);
        Ok(result)
    }

    fn untar(&self, env: &Env<'_>) -> LabResult<CaseResult> {
        let Some(root) = env.fs.mounted_at() else {
            return Err(LabError::NotOffered("programs need a mount"));
        };
        if find_tool("tar").is_none() {
            return Err(LabError::ToolMissing { tool: "tar", package: "tar" });
        }
        let archive = match &self.tar {
            Some(path) => {
                let mut bytes = Vec::new();
                let opened = File::open(path).and_then(|mut f| f.read_to_end(&mut bytes));
                opened.during(|| format!("reading {}", path.display()))?;
                bytes
            }
            None => tree::source_tree_archive(self.tree_files, env.seed),
        };
        let begun = Instant::now();
        extract(&root, &archive)?;
        let extracted = begun.elapsed().as_secs_f64();
        env.fs.syncfs()?;
        let total = begun.elapsed().as_secs_f64();
        let mut result = CaseResult::default();
        result.metric("total_s", "s", total, Better::Lower);
        result.metric("untar_s", "s", extracted, Better::Lower);
        result.metric("sync_s", "s", total - extracted, Better::Lower);
        Ok(result)
    }

    fn very_many(&self, env: &Env<'_>, directories: u64) -> LabResult<CaseResult> {
        let path = |i: u64| {
            if directories == 1 {
                format!("many/f{i:07}")
            } else {
                format!("many/d{:03}/f{i:07}", i % directories)
            }
        };
        env.fs.mkdir_all("many")?;
        for d in 0..directories {
            if directories > 1 {
                env.fs.mkdir_all(&format!("many/d{d:03}"))?;
            }
        }
        let tenth = self.files / 10;
        let mut tenths = Vec::new();
        let begun = Instant::now();
        let mut from = begun;
        for i in 0..tenth * 10 {
            if i % 256 == 0 {
                env.cancel.check()?;
            }
            drop(env.fs.open(&path(i), OpenHow::Create)?);
            if (i + 1) % tenth == 0 {
                tenths.push(from.elapsed().as_secs_f64());
                from = Instant::now();
            }
        }
        let took = begun.elapsed().as_secs_f64();
        let mut result = CaseResult::default();
        let rate = (tenth * 10) as f64 / took;
        result.metric("files_per_s", "files/s", rate, Better::Higher);
        if let (Some(first), Some(last)) = (tenths.first(), tenths.last()) {
            result.metric("last_over_first_tenth", "x", last / first, Better::Lower);
        }
        match env.fs.make_cold()? {
            Some(open) => {
                result.metric("open_ms", "ms", open.as_secs_f64() * 1e3, Better::Lower);
            }
            None => result.notes.push(
                "names stay cached on a target that is not mounted anew: these look-ups are not cold"
                    .into(),
            ),
        }
        let mut rng = Rng::new(env.seed, 0x100C);
        let before = env.fs.device();
        let mut lookups = Recorder::new(Instant::now());
        for _ in 0..COLD_LOOKUPS {
            env.cancel.check()?;
            let wanted = path(rng.below(tenth * 10));
            let from = Instant::now();
            env.fs.stat(&wanted)?;
            lookups.since(from);
        }
        if let Some(d) = env.device_since(before) {
            let reads = d.reads as f64 / COLD_LOOKUPS as f64;
            result.metric("reads_per_cold_lookup", "reads", reads, Better::Lower);
        }
        result.latency("cold_lookup", lookups);
        Ok(result)
    }

    /// Syncs files until the log is full or there are enough, crashes, starts again, and looks for
    /// every one of them.
    fn recovery(&self, env: &Env<'_>) -> LabResult<CaseResult> {
        env.fs.let_log_grow()?;
        let data = random_bytes(PAGE as usize, env.seed);
        let name = |i: u64| format!("f{i:06}");
        let mut synced = 0;
        let full = |fs: &dyn Fs| {
            fs.log_fill().is_some_and(|f| f.used_bytes as f64 >= f.limit_bytes as f64 * LOG_FULL)
        };
        while synced < self.log_files && !(synced % 64 == 0 && full(&*env.fs)) {
            env.cancel.check()?;
            let file = env.fs.open(&name(synced), OpenHow::Create)?;
            file.write_at(&data, 0)?;
            file.fsync()?;
            synced += 1;
        }
        let fill = env.fs.log_fill();
        let recovered = env.fs.crash()?;
        let is_lost = |i: &u64| !is_whole(&*env.fs, &name(*i), &data);
        let lost = (0..synced).filter(is_lost).count();
        if lost > 0 {
            let text =
                format!("{lost} of {synced} synced files are gone or damaged after the crash");
            return Err(LabError::BadOption(text));
        }
        let mut result = CaseResult::default();
        result.metric("recovery_ms", "ms", recovered.as_secs_f64() * 1e3, Better::Lower);
        result.metric("synced_files", "files", synced as f64, Better::Neither);
        if let Some(fill) = fill {
            let mib = fill.used_bytes as f64 / MIB as f64;
            result.metric("log_mib", "MiB", mib, Better::Neither);
            let percent = fill.used_bytes as f64 * 100.0 / fill.limit_bytes.max(1) as f64;
            result.metric("log_full_percent", "%", percent, Better::Neither);
        }
        Ok(result)
    }
}

/// Whether a file is there with this content and nothing else.
fn is_whole(fs: &dyn Fs, path: &str, content: &[u8]) -> bool {
    let mut found = vec![0; content.len() + 1];
    let got = fs.open(path, OpenHow::Read).and_then(|file| file.read_at(&mut found, 0));
    got.is_ok_and(|bytes| found[..bytes] == *content)
}

/// `tar -x` from memory, so that no target pays for reading the archive from the disk.
fn extract(root: &Path, archive: &[u8]) -> LabResult<()> {
    let mut child = Command::new("tar")
        .args(["-x", "-f", "-", "-C"])
        .arg(root)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .during(|| "running tar".into())?;
    // A tar that fails closes its end: its own words, below, say more than the broken pipe.
    let fed = child.stdin.take().map_or(Ok(()), |mut pipe| pipe.write_all(archive));
    let out = child.wait_with_output().during(|| "running tar".into())?;
    if !out.status.success() {
        let message = String::from_utf8_lossy(&out.stderr).trim().replace('\n', "; ");
        return Err(LabError::Command { command: "tar -x".into(), message });
    }
    fed.during(|| "feeding tar".into())
}

impl Experiment for Foundation {
    fn name(&self) -> &'static str {
        "foundation"
    }

    fn question(&self) -> &'static str {
        "What do the plain paths cost: a small file, an append, a cached read, a stream, a million names?"
    }

    fn base_mode(&self) -> &'static str {
        "create-fsync"
    }

    fn fresh_for_each_case(&self) -> bool {
        true
    }

    fn cases(&self) -> Vec<Case> {
        let mib = self.sequential_bytes / MIB;
        vec![
            Case::new("create-fsync").with("files", self.synced_files),
            Case::new("append-64k"),
            Case::new("cached-read").with("file_mib", self.cached_bytes / MIB),
            Case::new("buffered-4k").with("file_mib", self.cached_bytes / MIB),
            Case::new("write-1m").with("file_mib", mib),
            Case::new("read-1m").with("file_mib", mib),
            Case::new("untar"),
            Case::new("one-directory").with("files", self.files),
            Case::new("many-directories").with("files", self.files),
            Case::new("recovery"),
        ]
    }

    fn run(&self, env: &Env<'_>, case: &Case) -> LabResult<CaseResult> {
        match case.mode.as_str() {
            "create-fsync" => self.create_fsync(env),
            "append-64k" => self.append(env),
            "cached-read" => self.cached_read(env),
            "buffered-4k" => self.buffered_write(env),
            "write-1m" => self.sequential_write(env),
            "read-1m" => self.sequential_read(env),
            "untar" => self.untar(env),
            "one-directory" => self.very_many(env, 1),
            "many-directories" => self.very_many(env, DIRECTORIES),
            _ => self.recovery(env),
        }
    }

    fn space_bytes(&self) -> u64 {
        // An inode and its name, generously.
        let names = self.files * 1024;
        let small = self.synced_files.max(self.log_files) * 2 * PAGE;
        names.max(small).max(self.sequential_bytes).max(self.cached_bytes) + (512 << 20)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::mounted::{Cold, MountedFs};

    #[test]
    fn a_synced_file_is_there_only_with_what_was_written() {
        let dir = std::env::temp_dir().join(format!("weir-lab-whole-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("made");
        let fs = MountedFs::new(dir.clone(), None, Cold::Advise);
        for (name, content) in
            [("same", &b"data"[..]), ("empty", b""), ("zeros", &[0; 4]), ("longer", b"data\0")]
        {
            std::fs::write(dir.join(name), content).expect("written");
            assert_eq!(is_whole(&fs, name, b"data"), name == "same", "{name}");
        }
        assert!(!is_whole(&fs, "gone", b"data"));
        std::fs::remove_dir_all(dir).expect("removed");
    }
}
