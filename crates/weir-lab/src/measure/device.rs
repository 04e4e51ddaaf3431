//! Device truth: what the block layer counted, and whether someone else used the disk or the CPU.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// Requests that reached a device, cumulative.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceCounters {
    /// Read requests.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Write requests.
    pub writes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Cache flushes.
    pub flushes: u64,
}

impl DeviceCounters {
    /// What happened between `earlier` and `self`.
    #[must_use]
    pub fn since(self, earlier: DeviceCounters) -> DeviceCounters {
        DeviceCounters {
            reads: self.reads.saturating_sub(earlier.reads),
            read_bytes: self.read_bytes.saturating_sub(earlier.read_bytes),
            writes: self.writes.saturating_sub(earlier.writes),
            write_bytes: self.write_bytes.saturating_sub(earlier.write_bytes),
            flushes: self.flushes.saturating_sub(earlier.flushes),
        }
    }
}

/// Parses one `/sys/block/*/stat` line. Flushes are field 16 (Linux 5.5).
pub fn parse_stat(line: &str) -> Option<DeviceCounters> {
    let f: Vec<u64> = line.split_whitespace().filter_map(|w| w.parse().ok()).collect();
    Some(DeviceCounters {
        reads: *f.first()?,
        read_bytes: *f.get(2)? * 512,
        writes: *f.get(4)?,
        write_bytes: *f.get(6)? * 512,
        flushes: f.get(15).copied().unwrap_or(0),
    })
}

/// A whole block device, by its name in `/sys/block`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockDevice {
    /// For example `loop0` or `vda`.
    pub name: String,
}

impl BlockDevice {
    /// The disk below a device node such as `/dev/loop0` or a partition.
    pub fn of_node(node: &Path) -> Option<BlockDevice> {
        let node = fs::canonicalize(node).ok()?;
        let name = node.file_name()?.to_str()?.to_owned();
        if Path::new("/sys/block").join(&name).exists() {
            return Some(BlockDevice { name });
        }
        // A partition: /sys/class/block/vda1 -> .../vda/vda1.
        let link = fs::canonicalize(Path::new("/sys/class/block").join(&name)).ok()?;
        let parent = link.parent()?.file_name()?.to_str()?.to_owned();
        Path::new("/sys/block").join(&parent).exists().then_some(BlockDevice { name: parent })
    }

    /// The counters now.
    pub fn counters(&self) -> io::Result<DeviceCounters> {
        let path = PathBuf::from("/sys/block").join(&self.name).join("stat");
        let text = fs::read_to_string(&path)?;
        parse_stat(&text)
            .ok_or_else(|| io::Error::other(format!("{}: cannot be read", path.display())))
    }

    /// `major:minor`.
    pub fn number(&self) -> io::Result<String> {
        let text = fs::read_to_string(Path::new("/sys/block").join(&self.name).join("dev"))?;
        Ok(text.trim().to_owned())
    }

    /// Requests in flight now.
    pub fn in_flight(&self) -> u64 {
        fs::read_to_string(Path::new("/sys/block").join(&self.name).join("inflight"))
            .map_or(0, |t| t.split_whitespace().filter_map(|w| w.parse::<u64>().ok()).sum())
    }
}

/// A mounted file system as `/proc/self/mountinfo` describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountInfo {
    /// Where it is mounted.
    pub mount_point: PathBuf,
    /// Its type, such as `ext4`.
    pub fs_type: String,
    /// The device or other source.
    pub source: String,
    /// Mount and superblock options.
    pub options: String,
}

/// A path as the kernel writes it in a list: blanks, tabs, newlines and backslashes as `\\040` and so on.
fn unescaped(text: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [first, after @ ..] = rest {
        let code = (*first == b'\\').then(|| after.get(..3)).flatten();
        let code = code.and_then(|digits| std::str::from_utf8(digits).ok());
        let code = code.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        bytes.push(code.unwrap_or(*first));
        rest = if code.is_some() { &after[3..] } else { after };
    }
    OsString::from_vec(bytes)
}

/// Every mount that this process can see, oldest first.
pub fn mounts() -> io::Result<Vec<MountInfo>> {
    Ok(parse_mountinfo(&fs::read("/proc/self/mountinfo")?))
}

/// Parses `/proc/self/mountinfo`, in which names are bytes, text or not.
pub fn parse_mountinfo(text: &[u8]) -> Vec<MountInfo> {
    text.split(|&byte| byte == b'\n').filter_map(parse_mount).collect()
}

fn parse_mount(line: &[u8]) -> Option<MountInfo> {
    let mut fields = line.split(|&byte| byte == b' ');
    let mount_point = PathBuf::from(unescaped(fields.nth(4)?));
    let lossy = |field: &[u8]| String::from_utf8_lossy(field).into_owned();
    let own_options = lossy(fields.next()?);
    // A varying number of optional fields ends with a single dash.
    fields.find(|field| *field == b"-")?;
    let fs_type = lossy(fields.next()?);
    let source = unescaped(fields.next()?).to_string_lossy().into_owned();
    let options = format!("{own_options},{}", lossy(fields.next()?));
    Some(MountInfo { mount_point, fs_type, source, options })
}

/// The mount that `path` is on: the longest mount point above it, the latest of equals.
pub fn mount_of(path: &Path) -> Option<MountInfo> {
    let path = fs::canonicalize(path).ok()?;
    mounts()
        .ok()?
        .into_iter()
        .filter(|m| path.starts_with(&m.mount_point))
        .enumerate()
        .max_by_key(|(i, m)| (m.mount_point.components().count(), *i))
        .map(|(_, m)| m)
}

/// The mount that `path` is on, if it goes through FUSE.
pub fn fuse_mount_of(path: &Path) -> Option<MountInfo> {
    mount_of(path).filter(|mount| mount.fs_type.starts_with("fuse"))
}

/// The disk that the file system of `path` is on, if it is on one.
pub fn disk_of(path: &Path) -> Option<BlockDevice> {
    BlockDevice::of_node(Path::new(&mount_of(path)?.source))
}

/// Watches for load that is not ours during one case.
pub struct DisturbanceWatch {
    started: Instant,
    /// Our disk and the one its image is on: what the lower has done beyond the upper is foreign.
    stacked: Option<[(BlockDevice, DeviceCounters); 2]>,
    steal_ticks: u64,
    others_ticks: u64,
    foreign: Vec<(BlockDevice, DeviceCounters)>,
}

/// What the watch saw.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Disturbance {
    /// CPU taken by the hypervisor, in percent of one CPU.
    pub steal_percent: f64,
    /// CPU used by processes that are not ours, in percent of one CPU.
    pub other_cpu_percent: f64,
    /// Bytes per second on disks that the run does not use.
    pub foreign_bytes_per_s: f64,
}

impl Disturbance {
    /// A sentence when the disturbance is large enough to matter.
    pub fn verdict(&self) -> Option<String> {
        let mut said = Vec::new();
        if self.steal_percent > 5.0 {
            said.push(format!("{:.0} % CPU steal", self.steal_percent));
        }
        if self.other_cpu_percent > 25.0 {
            said.push(format!("other processes used {:.0} % of a CPU", self.other_cpu_percent));
        }
        if self.foreign_bytes_per_s > 8e6 {
            said.push(format!(
                "{:.0} MB/s of foreign disk traffic",
                self.foreign_bytes_per_s / 1e6
            ));
        }
        (!said.is_empty()).then(|| said.join(", "))
    }
}

const TICKS_PER_S: f64 = 100.0;

/// (busy without iowait, steal) ticks of the whole machine from `/proc/stat`.
pub fn parse_cpu(text: &str) -> Option<(u64, u64)> {
    let f: Vec<u64> =
        text.lines().next()?.split_whitespace().skip(1).filter_map(|w| w.parse().ok()).collect();
    let steal = *f.get(7)?;
    // user, nice, system; interrupt time is caused by devices, often our own.
    Some((f[0] + f[1] + f[2], steal))
}

fn own_ticks() -> u64 {
    tree_ticks(vec![std::process::id()])
}

/// Ticks of processes and all that they started: mount daemons and disk servers are our children.
fn tree_ticks(mut children: Vec<u32>) -> u64 {
    let mut total = 0;
    while let Some(pid) = children.pop() {
        let Some(fields) = stat_fields(pid) else { continue };
        total += sum_of(&fields, OWN_TICKS) + sum_of(&fields, ENDED_TICKS);
        children.extend(children_of(pid));
    }
    total
}

/// utime and stime are fields 14 and 15 of the line, 11 and 12 after the name.
const OWN_TICKS: Range<usize> = 11..13;
/// cutime and cstime: of children that have ended and were waited for, and of theirs.
const ENDED_TICKS: Range<usize> = 13..15;

/// The fields of a process's `stat` after its name; 0 for those that are no numbers.
fn stat_fields(pid: u32) -> Option<Vec<u64>> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    Some(rest.split(' ').map(|w| w.parse().unwrap_or(0)).collect())
}

fn sum_of(fields: &[u64], which: Range<usize>) -> u64 {
    fields.get(which).map_or(0, |f| f.iter().sum())
}

fn children_of(pid: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    list.split_whitespace().filter_map(|w| w.parse().ok()).collect()
}

/// CPU used by kernel threads, which work for us as well as for others, is not "other".
fn kernel_thread_ticks() -> u64 {
    kernel_threads(|_, stat| {
        stat.get(11..13).map_or(0, |t| t.iter().filter_map(|w| w.parse::<u64>().ok()).sum())
    })
    .into_values()
    .sum()
}

/// A figure of each of the kernel's threads, by its number: of its directory in `/proc`, and of the fields of its `stat` after
/// the name.
fn kernel_threads(figure: impl Fn(&Path, &[&str]) -> u64) -> HashMap<u32, u64> {
    let Ok(dir) = fs::read_dir("/proc") else { return HashMap::new() };
    let mut figures = HashMap::new();
    for entry in dir.flatten() {
        let Ok(number) = entry.file_name().to_string_lossy().parse() else { continue };
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else { continue };
        let Some((_, rest)) = stat.rsplit_once(") ") else { continue };
        let fields: Vec<&str> = rest.split(' ').collect();
        // Field 4 of the line is the parent: kthreadd is 2.
        if fields.get(1) == Some(&"2") {
            figures.insert(number, figure(&entry.path(), &fields));
        }
    }
    figures
}

/// CPU time at one moment: of this process, of those that it started, and of the kernel's threads.
pub struct CpuTime {
    processes_us: u64,
    /// In nanoseconds. These threads come and go: a sum of those that are there may become less.
    kernel_ns: HashMap<u32, u64>,
}

fn own_cpu_us() -> u64 {
    let own = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    own.tv_sec as u64 * 1_000_000 + own.tv_nsec as u64 / 1000
}

/// The server of a disk is the disk, and its work no file system's.
static DISK_SERVER: AtomicU32 = AtomicU32::new(0);

/// Leaves a process that this one started out of [`CpuTime`].
pub fn is_disk_server(pid: u32) {
    DISK_SERVER.store(pid, Ordering::Relaxed);
}

fn without_disk_server(mut children: Vec<u32>) -> Vec<u32> {
    children.retain(|pid| *pid != DISK_SERVER.load(Ordering::Relaxed));
    children
}

impl CpuTime {
    /// Before a load. Reading this costs milliseconds, which are not the load's.
    pub fn before() -> Self {
        Self::before_by(own_cpu_us, Self::others)
    }

    fn before_by(own_us: impl FnOnce() -> u64, others: impl FnOnce() -> Self) -> Self {
        let others = others();
        Self { processes_us: others.processes_us + own_us(), ..others }
    }

    /// After it.
    pub fn after() -> Self {
        Self::after_by(own_cpu_us, Self::others)
    }

    fn after_by(own_us: impl FnOnce() -> u64, others: impl FnOnce() -> Self) -> Self {
        let own_us = own_us();
        let others = others();
        Self { processes_us: others.processes_us + own_us, ..others }
    }

    /// All but this process.
    fn others() -> Self {
        let own = std::process::id();
        let live = tree_ticks(without_disk_server(children_of(own)));
        let children = live + stat_fields(own).map_or(0, |f| sum_of(&f, ENDED_TICKS));
        // A kernel without nanoseconds on a processor leaves these threads out.
        let kernel_ns = kernel_threads(|dir, _| {
            let text = fs::read_to_string(dir.join("schedstat")).unwrap_or_default();
            text.split(' ').next().and_then(|w| w.parse().ok()).unwrap_or(0)
        });
        Self { processes_us: children * 1_000_000 / TICKS_PER_S as u64, kernel_ns }
    }

    /// Microseconds from `earlier` to this moment. What threads of the kernel that have ended meanwhile used is not known.
    pub fn us_since(&self, earlier: &Self) -> u64 {
        let used_ns = |(number, &ns): (&u32, &u64)| {
            let before_ns = earlier.kernel_ns.get(number).copied().unwrap_or(0);
            // Less than before is another thread of the same number.
            ns.checked_sub(before_ns).unwrap_or(ns)
        };
        let kernel_ns: u64 = self.kernel_ns.iter().map(used_ns).sum();
        self.processes_us.saturating_sub(earlier.processes_us) + kernel_ns / 1000
    }
}

impl DisturbanceWatch {
    /// Starts watching; `ours` are the disks that the run itself uses.
    pub fn start(ours: &[BlockDevice]) -> Self {
        let cpu = fs::read_to_string("/proc/stat").ok().and_then(|t| parse_cpu(&t));
        let (busy, steal) = cpu.unwrap_or((0, 0));
        let foreign = fs::read_dir("/sys/block")
            .map(|dir| {
                dir.flatten()
                    .map(|e| BlockDevice { name: e.file_name().to_string_lossy().into_owned() })
                    .filter(|d| !ours.contains(d))
                    .filter_map(|d| d.counters().ok().map(|c| (d, c)))
                    .collect()
            })
            .unwrap_or_default();
        let counted = |d: &BlockDevice| Some((d.clone(), d.counters().ok()?));
        let stacked = match ours {
            [upper, lower] => counted(upper).zip(counted(lower)).map(|(u, l)| [u, l]),
            _ => None,
        };
        DisturbanceWatch {
            started: Instant::now(),
            stacked,
            steal_ticks: steal,
            others_ticks: busy.saturating_sub(own_ticks() + kernel_thread_ticks()),
            foreign,
        }
    }

    /// What happened since the start.
    pub fn stop(&self) -> Disturbance {
        let elapsed = self.started.elapsed().max(Duration::from_millis(1)).as_secs_f64();
        let cpu = fs::read_to_string("/proc/stat").ok().and_then(|t| parse_cpu(&t));
        let (busy, steal) = cpu.unwrap_or((0, 0));
        let others = busy.saturating_sub(own_ticks() + kernel_thread_ticks());
        let percent = |ticks: u64| ticks as f64 / TICKS_PER_S / elapsed * 100.0;
        let foreign: u64 = self
            .foreign
            .iter()
            .filter_map(|(d, before)| d.counters().ok().map(|now| now.since(*before)))
            .map(|c| c.read_bytes + c.write_bytes)
            .sum();
        let moved = |(d, before): &(BlockDevice, DeviceCounters)| {
            let c = d.counters().unwrap_or(*before).since(*before);
            c.read_bytes + c.write_bytes
        };
        let beyond = self
            .stacked
            .as_ref()
            .map_or(0, |[upper, lower]| moved(lower).saturating_sub(moved(upper)));
        let foreign = foreign + beyond;
        Disturbance {
            steal_percent: percent(steal.saturating_sub(self.steal_ticks)),
            other_cpu_percent: percent(others.saturating_sub(self.others_ticks)),
            foreign_bytes_per_s: foreign as f64 / elapsed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_line_gives_requests_bytes_and_flushes() {
        let line = " 64665 22717 2801130 32240 7415 13938 581216 2677 2 21792 35084 3218 8 140040 158 242 9";
        let c = parse_stat(line).expect("a full line");
        assert_eq!(c.reads, 64665);
        assert_eq!(c.read_bytes, 2_801_130 * 512);
        assert_eq!(c.writes, 7415);
        assert_eq!(c.write_bytes, 581_216 * 512);
        assert_eq!(c.flushes, 242);
        assert_eq!(parse_stat("1 2"), None);
    }

    #[test]
    fn difference_never_wraps() {
        let a = DeviceCounters { writes: 5, ..Default::default() };
        let b = DeviceCounters { writes: 9, flushes: 2, ..Default::default() };
        assert_eq!(b.since(a).writes, 4);
        assert_eq!(a.since(b), DeviceCounters::default());
    }

    #[test]
    fn mountinfo_gives_source_type_and_options() {
        let text =
            b"36 35 98:0 /mnt1 /mnt\\040a rw,noatime master:1 - ext4 /dev/vda1 rw,errors=continue\n";
        let m = parse_mountinfo(text);
        assert_eq!(m.len(), 1);
        assert_eq!(m[0].mount_point, PathBuf::from("/mnt a"));
        assert_eq!(m[0].fs_type, "ext4");
        assert_eq!(m[0].source, "/dev/vda1");
        assert_eq!(m[0].options, "rw,noatime,rw,errors=continue");
    }

    #[test]
    fn a_mount_point_is_known_whatever_is_in_its_name() {
        let text = b"36 35 98:0 / /a\\011b\\134c\\012d\\040e\xff rw - ext4 /dev/vda1 rw\n";
        let expected = OsString::from_vec(b"/a\tb\\c\nd e\xff".to_vec());
        assert_eq!(parse_mountinfo(text)[0].mount_point, PathBuf::from(expected));
        assert_eq!(unescaped(b"\\9 \\"), "\\9 \\", "nothing that is a code");
    }

    #[test]
    fn cpu_line_separates_steal() {
        assert_eq!(parse_cpu("cpu  1616 4 1178 131157 1905 0 26 12 0 0\n"), Some((2798, 12)));
        assert_eq!(parse_cpu("cpu 1 2"), None);
    }

    #[test]
    fn threads_of_the_kernel_that_end_take_no_time_away() {
        let time = |processes_us, kernel_ns: &[(u32, u64)]| CpuTime {
            processes_us,
            kernel_ns: kernel_ns.iter().copied().collect(),
        };
        let before = time(100, &[(5, 1_000_000), (6, 900_000_000), (7, 50_000)]);
        // 6 has ended, 7 has and its number is another's now, 8 is new.
        let after = time(150, &[(5, 1_030_000), (7, 20_000), (8, 10_000)]);
        assert_eq!(after.us_since(&before), 50 + 30 + 20 + 10);
    }

    #[test]
    fn what_it_costs_to_read_the_time_is_not_part_of_it() {
        // A clock that goes on by 5 ms while the kernel's threads are looked at, and by 70 µs in the load.
        let clock_us = std::cell::Cell::new(1000);
        let others = || {
            clock_us.set(clock_us.get() + 5000);
            CpuTime { processes_us: 30, kernel_ns: HashMap::new() }
        };
        let before = CpuTime::before_by(|| clock_us.get(), others);
        clock_us.set(clock_us.get() + 70);
        let after = CpuTime::after_by(|| clock_us.get(), others);
        assert_eq!(after.us_since(&before), 70);
    }

    #[test]
    fn the_server_of_a_disk_is_not_among_those_that_work_for_a_file_system() {
        is_disk_server(u32::MAX);
        assert_eq!(without_disk_server(vec![5, u32::MAX, 7]), [5, 7]);
        is_disk_server(0);
    }

    #[test]
    fn small_disturbances_are_not_reported() {
        assert_eq!(Disturbance::default().verdict(), None);
        let d = Disturbance { steal_percent: 30.0, ..Default::default() };
        assert_eq!(d.verdict().as_deref(), Some("30 % CPU steal"));
    }
}
