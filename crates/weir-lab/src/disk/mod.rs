//! The disk that all targets of a run share, one after another: an image file in the work
//! directory, its slow-flush sibling in RAM, or the image throttled.
//!
//! The image is written in full before the first use and formatted without discard: holes and
//! unwritten extents would make every flush pay for the host's journal, and for some targets more
//! than for others. All targets use the same blocks of the host, so none has the better place.

pub mod awake;
pub mod cgroup;
pub mod registry;
pub mod slow;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{IoContext, LabError, LabResult};
use crate::measure::BlockDevice;
use crate::run::Cancel;
use crate::sys::{AlignedBuf, is_root, space};
use crate::target::TargetSpec;
use cgroup::IoLimits;
use registry::{Registry, Resource, start_ticks};

/// One word of `--disk`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskSpec {
    /// The image as it is.
    #[default]
    Plain,
    /// A RAM-backed file with flushes of this length.
    Slow {
        /// Length of a flush.
        flush_us: u64,
    },
    /// The image, throttled.
    Limit(IoLimits),
}

impl FromStr for DiskSpec {
    type Err = LabError;

    fn from_str(word: &str) -> LabResult<Self> {
        let unknown = || LabError::UnknownDisk(word.to_owned());
        if word == "plain" {
            return Ok(DiskSpec::Plain);
        }
        if let Some(us) = word.strip_prefix("slow:") {
            return us.parse().map(|flush_us| DiskSpec::Slow { flush_us }).map_err(|_| unknown());
        }
        let list = word.strip_prefix("limit:").ok_or_else(unknown)?;
        let mut limits = IoLimits::default();
        for item in list.split(',') {
            let (key, value) = item.split_once('=').ok_or_else(unknown)?;
            let n = parse_amount(value).filter(|n| *n > 0).ok_or_else(unknown)?;
            match key {
                "rbps" => limits.read_bytes_per_s = n,
                "wbps" => limits.write_bytes_per_s = n,
                "riops" => limits.read_iops = n,
                "wiops" => limits.write_iops = n,
                _ => return Err(unknown()),
            }
        }
        Ok(DiskSpec::Limit(limits))
    }
}

impl std::fmt::Display for DiskSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DiskSpec::Plain => f.write_str("plain"),
            DiskSpec::Slow { flush_us } => write!(f, "slow:{flush_us}"),
            DiskSpec::Limit(l) => {
                let items: Vec<String> = [
                    ("rbps", l.read_bytes_per_s),
                    ("wbps", l.write_bytes_per_s),
                    ("riops", l.read_iops),
                    ("wiops", l.write_iops),
                ]
                .iter()
                .filter(|(_, n)| *n > 0)
                .map(|(k, n)| format!("{k}={n}"))
                .collect();
                write!(f, "limit:{}", items.join(","))
            }
        }
    }
}

/// A number with an optional suffix K, M, G or T (powers of 1024).
pub fn parse_amount(text: &str) -> Option<u64> {
    let text = text.trim();
    let text = text.strip_suffix("iB").or_else(|| text.strip_suffix('B')).unwrap_or(text);
    let (digits, shift) = match text.chars().last()?.to_ascii_uppercase() {
        'K' => (&text[..text.len() - 1], 10),
        'M' => (&text[..text.len() - 1], 20),
        'G' => (&text[..text.len() - 1], 30),
        'T' => (&text[..text.len() - 1], 40),
        _ => (text, 0),
    };
    digits.trim().parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// The disk of a run.
pub struct Disk {
    /// What was asked for.
    pub spec: DiskSpec,
    /// Its size.
    pub size_bytes: u64,
    /// The image, or the served file.
    pub file: PathBuf,
    /// The loop device on it, where there is one.
    pub loop_node: Option<PathBuf>,
    /// Scratch directory of the run, for mount points.
    pub run_dir: PathBuf,
}

/// Makes the run's own directory in `work`.
pub fn make_run_dir(work: &Path, registry: &Arc<Registry>) -> LabResult<PathBuf> {
    std::fs::create_dir_all(work).during(|| format!("creating {}", work.display()))?;
    let work = work.canonicalize().during(|| format!("opening {}", work.display()))?;
    let dir = work.join(format!("weir-lab-{}", std::process::id()));
    registry.make_dir(&dir)?;
    Ok(dir)
}

/// The number of the disk that a directory is on, for limits.
pub fn limited_disk(dir: &Path) -> LabResult<String> {
    let device = crate::measure::device::disk_of(dir).ok_or_else(|| {
        LabError::BadOption(format!("{}: no block device to limit", dir.display()))
    })?;
    Ok(device.number()?)
}

const MIB: u64 = 1 << 20;

impl Disk {
    /// Makes the disk; `with_loop` attaches a loop device, which needs root.
    pub fn create(
        spec: DiskSpec,
        run_dir: &Path,
        size_bytes: u64,
        with_loop: bool,
        registry: &Arc<Registry>,
        cancel: &Cancel,
    ) -> LabResult<Disk> {
        let file = match spec {
            DiskSpec::Slow { flush_us } => serve_slow(run_dir, size_bytes, flush_us, registry)?,
            DiskSpec::Plain | DiskSpec::Limit(_) => {
                let file = run_dir.join("disk.img");
                write_image(&file, run_dir, size_bytes, cancel)?;
                file
            }
        };
        let loop_node = if with_loop { Some(attach_loop(&file, registry)?) } else { None };
        if let DiskSpec::Limit(limits) = spec {
            // The loop device for those that are on it, the disk below for those in the image.
            let below = limited_disk(run_dir)?;
            let on_loop = match loop_node.as_deref().and_then(BlockDevice::of_node) {
                Some(device) => Some(device.number()?),
                None => None,
            };
            cgroup::limit_io(registry, on_loop.as_deref(), &below, limits)?;
        }
        Ok(Disk { spec, size_bytes, file, loop_node, run_dir: run_dir.to_owned() })
    }

    /// Waits until nobody has the loop device any more: what a process held is let go a little
    /// after its end. Formatting tells what is wrong if that does not happen.
    pub fn wait_free(&self) {
        let Some(node) = &self.loop_node else { return };
        let begun = Instant::now();
        let exclusive =
            || OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(node).is_ok();
        while !exclusive() && begun.elapsed() < Duration::from_secs(15) {
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Where a target is put: the loop device, or the image itself.
    pub fn path_of(&self, target: &TargetSpec) -> &PathBuf {
        self.loop_node.as_ref().filter(|_| target.needs_loop()).unwrap_or(&self.file)
    }

    /// What is to be said where the host's page cache is below a target: reads are cold in name only then, and flushes dearer.
    pub fn cached_by_host(&self) -> Option<&'static str> {
        let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&self.file);
        if direct.is_err() {
            return Some(
                "the work directory has no direct I/O: the host's cache is below every target",
            );
        }
        let by_loop = self.loop_node.as_ref().is_some_and(|node| !has_direct_io(node));
        by_loop.then_some(
            "the loop device has no direct I/O: the host's cache is below the file systems on it",
        )
    }

    /// The host's disk that the image is on. A slow disk is in memory: that of its directory has nothing to do with it.
    pub fn below(&self) -> Option<BlockDevice> {
        match self.spec {
            DiskSpec::Slow { .. } => None,
            DiskSpec::Plain | DiskSpec::Limit(_) => crate::measure::device::disk_of(&self.run_dir),
        }
    }

    /// The loop device that a target is on, whose counters are its truth.
    pub fn device_of(&self, target: &TargetSpec) -> Option<BlockDevice> {
        self.loop_node.as_deref().filter(|_| target.needs_loop()).and_then(BlockDevice::of_node)
    }
}

/// Writes every block of the image through `O_DIRECT`, so that its extents are allocated and
/// written, and no page of it is cached.
fn write_image(file: &Path, dir: &Path, size_bytes: u64, cancel: &Cancel) -> LabResult<()> {
    let free = space(dir).during(|| format!("statfs {}", dir.display()))?.available_bytes;
    if free < size_bytes.saturating_add(512 * MIB) {
        return Err(LabError::NoSpace {
            dir: dir.to_owned(),
            need_mib: size_bytes / MIB + 512,
            free_mib: free / MIB,
        });
    }
    crate::tell!("weir lab: writing a disk image of {} MiB", size_bytes / MIB);
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(true);
    // A file system without O_DIRECT still gets a fully written image.
    let out: File = options
        .clone()
        .custom_flags(libc::O_DIRECT)
        .open(file)
        .or_else(|_| options.open(file))
        .during(|| format!("creating {}", file.display()))?;
    let chunk = AlignedBuf::new(4 << 20, 0xA5);
    let mut at = 0;
    while at < size_bytes {
        cancel.check()?;
        let n = (size_bytes - at).min(chunk.len() as u64) as usize;
        out.write_all_at(&chunk[..n], at).during(|| format!("writing {}", file.display()))?;
        at += n as u64;
    }
    out.sync_all().during(|| format!("syncing {}", file.display()))
}

fn attach_loop(file: &Path, registry: &Arc<Registry>) -> LabResult<PathBuf> {
    if !is_root() {
        return Err(LabError::NeedsRoot("a loop device".into()));
    }
    registry.add(Resource::Loop { backing: file.to_owned() })?;
    let out = Command::new("losetup")
        .args(["--direct-io=on", "--show", "-f"])
        .arg(file)
        .output()
        .during(|| "running losetup".into())?;
    if !out.status.success() {
        return Err(LabError::Command {
            command: format!("losetup -f {}", file.display()),
            message: String::from_utf8_lossy(&out.stderr).trim().replace('\n', "; "),
        });
    }
    Ok(PathBuf::from(String::from_utf8_lossy(&out.stdout).trim()))
}

/// Whether a loop device goes past the host's cache. Where the host's file system refuses, `losetup` attaches it all the same.
fn has_direct_io(loop_node: &Path) -> bool {
    let name = loop_node.file_name().unwrap_or_default();
    let dio = Path::new("/sys/block").join(name).join("loop/dio");
    std::fs::read_to_string(dio).is_ok_and(|text| text.trim() == "1")
}

/// How to start this program again as a helper: `weir lab ...` or `weir-lab ...`.
pub fn own_command() -> LabResult<Command> {
    let exe = std::env::current_exe().during(|| "finding this program".into())?;
    let mut command = Command::new(exe);
    if std::env::args_os().nth(1).is_some_and(|word| word == "lab") {
        command.arg("lab");
    }
    // Its own process group: Ctrl-C on the terminal must reach only the lab, which then takes
    // file systems down before the processes that serve them.
    command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null());
    Ok(command)
}

/// Starts a helper process and notes it.
pub fn start_helper(command: &mut Command, registry: &Arc<Registry>) -> LabResult<u32> {
    let child = command.spawn().during(|| format!("starting {command:?}"))?;
    let pid = child.id();
    let start_ticks = start_ticks(pid).unwrap_or(0);
    registry.add(Resource::Process { pid, start_ticks })?;
    Ok(pid)
}

/// What `look` finds once the helper `pid` has done what it was started for. `None`: the helper ended, or took longer than `patience`.
pub fn await_helper<T>(
    pid: u32,
    patience: Duration,
    mut look: impl FnMut() -> Option<T>,
) -> Option<T> {
    let begun = Instant::now();
    loop {
        // Asked first, so that what the helper did last is seen.
        let is_over = start_ticks(pid).is_none() || begun.elapsed() > patience;
        match look() {
            Some(found) => return Some(found),
            None if is_over => return None,
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

fn serve_slow(
    run_dir: &Path,
    size_bytes: u64,
    flush_us: u64,
    registry: &Arc<Registry>,
) -> LabResult<PathBuf> {
    let available = available_memory_bytes();
    if available < size_bytes.saturating_add(size_bytes / 4) {
        return Err(LabError::BadOption(format!(
            "the slow disk lives in memory: {} MiB asked, {} MiB available; use --size",
            size_bytes / MIB,
            available / MIB
        )));
    }
    let mount_point = run_dir.join("slow");
    std::fs::create_dir_all(&mount_point)?;
    let mut command = own_command()?;
    command.arg("slow-disk").arg(&mount_point);
    command.arg(size_bytes.to_string()).arg(flush_us.to_string());
    let pid = start_helper(&mut command, registry)?;
    crate::measure::device::is_disk_server(pid);
    registry.add(Resource::Mount { path: mount_point.clone() })?;
    let file = mount_point.join(slow::FILE_NAME);
    let is_there = || file.exists().then_some(());
    if await_helper(pid, Duration::from_secs(10), is_there).is_none() {
        return Err(LabError::Command {
            command: "slow-disk".into(),
            message: "the slow-flush disk could not be mounted (is /dev/fuse there?)".into(),
        });
    }
    Ok(file)
}

/// `MemAvailable` of `/proc/meminfo`.
pub fn available_memory_bytes() -> u64 {
    std::fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|t| {
            let line = t.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?.to_owned();
            line.trim().trim_end_matches(" kB").trim().parse::<u64>().ok()
        })
        .map_or(0, |kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_words_round_trip() {
        for word in ["plain", "slow:2000", "limit:rbps=1048576,wiops=4000"] {
            assert_eq!(word.parse::<DiskSpec>().expect(word).to_string(), word);
        }
        let limits = "limit:wbps=150M".parse::<DiskSpec>().expect("suffix");
        let DiskSpec::Limit(l) = limits else { panic!("{limits}") };
        assert_eq!(l.write_bytes_per_s, 150 << 20);
    }

    #[test]
    fn an_image_that_the_host_caches_is_told() {
        // Files of the kernel's are never opened past a cache.
        let (spec, run_dir) = (DiskSpec::Plain, PathBuf::from("/proc"));
        let file = run_dir.join("version");
        let disk = Disk { spec, size_bytes: 0, file, loop_node: None, run_dir };
        assert!(disk.cached_by_host().is_some_and(|note| note.contains("every target")));
    }

    #[test]
    fn nonsense_disks_are_refused() {
        for word in
            ["", "fast", "slow:", "slow:x", "limit:", "limit:rbps", "limit:foo=1", "limit:wiops=0"]
        {
            assert!(matches!(word.parse::<DiskSpec>(), Err(LabError::UnknownDisk(_))), "{word}");
        }
    }

    #[test]
    fn amounts_take_binary_suffixes() {
        assert_eq!(parse_amount("4096"), Some(4096));
        assert_eq!(parse_amount("4k"), Some(4096));
        assert_eq!(parse_amount("1.5G"), None);
        assert_eq!(parse_amount("2GiB"), Some(2 << 30));
        assert_eq!(parse_amount("99999999999T"), None);
        assert_eq!(parse_amount(""), None);
    }
}
