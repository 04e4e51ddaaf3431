//! `weir lab probe`: the floor that every result is judged against, in a few seconds.
//!
//! Device figures come from `O_DIRECT` on a fully written file (or on the run's own loop device),
//! machine figures from memory, system calls and thread hand-over. A result's `floor_ratio` says
//! how many times worse it is than the floor that applies to it.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::disk::registry::{Registry, Resource};
use crate::disk::{own_command, slow, start_helper};
use crate::error::{IoContext, LabResult};
use crate::experiments::{Better, Params};
use crate::measure::{Recorder, Rng};
use crate::report::schema::Row;
use crate::run::Cancel;
use crate::sys::{self, AlignedBuf, Ring};

/// One figure of the floor.
#[derive(Clone, Debug, PartialEq)]
pub struct FloorFigure {
    /// Its name.
    pub metric: &'static str,
    /// Its unit.
    pub unit: &'static str,
    /// Its value.
    pub value: f64,
    /// Which way is better.
    pub better: Better,
}

/// The floor of a disk and the machine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Floor {
    /// All figures.
    pub figures: Vec<FloorFigure>,
}

impl Floor {
    fn add(&mut self, metric: &'static str, unit: &'static str, value: f64, better: Better) {
        self.figures.push(FloorFigure { metric, unit, value, better });
    }

    /// A figure by name.
    pub fn get(&self, metric: &str) -> Option<f64> {
        self.figures.iter().find(|f| f.metric == metric).map(|f| f.value)
    }

    /// The figures as rows of a report.
    pub fn rows(&self, target: &str) -> Vec<Row> {
        self.figures
            .iter()
            .map(|f| Row {
                experiment: "probe".into(),
                target: target.to_owned(),
                mode: "floor".into(),
                params: Params::new(),
                metric: f.metric.to_owned(),
                unit: f.unit.to_owned(),
                better: f.better,
                median: f.value,
                min: f.value,
                max: f.value,
                rounds: vec![f.value],
                missing_rounds: Vec::new(),
                baseline: None,
                ratio: None,
                ratio_min: None,
                ratio_max: None,
                base_mode: None,
                mode_ratio: None,
                floor_ratio: None,
                disturbed_rounds: 0,
            })
            .collect()
    }

    /// Writes with an fdatasync each, by as many threads as the row has.
    fn synced_per_s(&self, size: &str, row: &Row, threads: &str) -> Option<f64> {
        let threads = row.params.get(threads).map_or(Some(1), serde_json::Value::as_u64)?;
        if threads == 1 {
            return Some(1e6 / self.get(&format!("write_fdatasync_{size}_us"))?);
        }
        self.get(&format!("write_fdatasync_{size}_{threads}_threads_per_s"))
    }

    /// How many times worse than the floor a row is, where a floor applies to it.
    pub fn ratio_of(&self, row: &Row) -> Option<f64> {
        let one_at_a_time = row.params.get("threads").is_none_or(|t| t == 1)
            && row.params.get("jobs").is_none_or(|j| j == 1);
        let sync_mode = matches!(row.mode.as_str(), "each" | "seq" | "rand" | "overwrite");
        if row.params.contains_key("file_bytes") {
            // The floors are of 4 KiB.
            return None;
        }
        let floor = match (row.experiment.as_str(), row.metric.as_str()) {
            ("fsmark", "fsync_p50_us") if one_at_a_time && sync_mode => {
                self.get("write_fdatasync_4k_us")?
            }
            ("fsmark", "files_per_s") if matches!(row.mode.as_str(), "async" | "pass") => {
                // Their data, one after the other in a log: a flush is for as many of them as are there, and of a pass all are.
                self.get("sequential_write_mib_per_s")? * 256.0
            }
            ("fsmark", "files_per_s") if sync_mode => self.synced_per_s("4k", row, "threads")?,
            ("fsync", "fsync_per_s") if sync_mode => self.synced_per_s("64k", row, "jobs")?,
            ("fsync", "mib_per_s") if sync_mode => {
                // Both loads sync 64 KiB at a time.
                self.synced_per_s("64k", row, "jobs")? / 16.0
            }
            ("fsync", "fsync_p50_us") if one_at_a_time && sync_mode => {
                self.get("write_fdatasync_64k_us")?
            }
            ("foundation", "files_per_s") if row.mode == "create-fsync" => {
                1e6 / self.get("write_fdatasync_4k_us")?
            }
            ("foundation", "append_p50_us") => self.get("write_fdatasync_64k_us")?,
            ("foundation", "random_read_4k_ns") => self.get("copy_4k_cold_ns")?,
            ("checkpoint", "read_p50_us") => self.get("random_read_4k_us")?,
            ("fastread", "cached_4k_ns" | "cached_nowait_4k_ns")
            | ("foundation", "hot_read_4k_ns") => self.get("copy_4k_ns")?,
            ("ingest" | "foundation", "gib_per_s") => self.get("copy_gib_per_s")?,
            ("aging", "seq_write_mib_per_s") => self.get("sequential_write_mib_per_s")?,
            ("aging", "tree_read_mib_per_s") => self.get("sequential_read_mib_per_s")?,
            _ => return None,
        };
        let ratio = match row.better {
            Better::Higher => floor / row.median,
            Better::Lower => row.median / floor,
            Better::Neither => return None,
        };
        ratio.is_finite().then_some(ratio)
    }
}

const MIB: u64 = 1 << 20;
const AREA_BYTES: u64 = 256 * MIB;
/// Time for each of the device figures.
const EACH: Duration = Duration::from_millis(250);

fn open_direct(path: &Path) -> LabResult<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    let direct = options.clone().custom_flags(libc::O_DIRECT).open(path);
    direct.or_else(|_| options.open(path)).during(|| format!("opening {}", path.display()))
}

/// Measures the floor on `path`, a fully written file or a block device whose content may go.
pub fn measure(path: &Path, cancel: &Cancel) -> LabResult<Floor> {
    let file = open_direct(path)?;
    let mut floor = Floor::default();
    device(&file, &mut floor, cancel).during(|| format!("probing {}", path.display()))?;
    machine(&mut floor);
    Ok(floor)
}

/// Writes a file in `dir` and measures the floor on it.
pub fn measure_dir(dir: &Path, registry: &Registry, cancel: &Cancel) -> LabResult<Floor> {
    let mark = registry.mark();
    // `weir lab clean` finds it by its absolute path.
    let dir = dir.canonicalize().during(|| format!("opening {}", dir.display()))?;
    let own = dir.join(format!(".weir-lab-probe-{}", std::process::id()));
    registry.make_dir(&own)?;
    let path = own.join("floor");
    let made = (|| -> std::io::Result<()> {
        let options = OpenOptions::new().write(true).create(true).truncate(true).clone();
        let file = options
            .clone()
            .custom_flags(libc::O_DIRECT)
            .open(&path)
            .or_else(|_| options.open(&path))?;
        let chunk = AlignedBuf::new(MIB as usize, 0x5A);
        for at in (0..AREA_BYTES).step_by(MIB as usize) {
            file.write_all_at(&chunk, at)?;
        }
        file.sync_all()
    })();
    let measured =
        made.during(|| format!("writing {}", path.display())).and_then(|()| measure(&path, cancel));
    // What cannot be removed stays noted, and is told at the end.
    registry.release_to(mark);
    measured
}

/// Repeats `op` for [`EACH`] and records it.
fn timed(
    cancel: &Cancel,
    mut op: impl FnMut(u64) -> std::io::Result<()>,
) -> std::io::Result<Recorder> {
    let begun = Instant::now();
    let mut recorder = Recorder::new(begun);
    let mut i = 0;
    while (begun.elapsed() < EACH || i < 8) && !cancel.is_cancelled() {
        let from = Instant::now();
        op(i)?;
        recorder.since(from);
        i += 1;
    }
    Ok(recorder)
}

fn device(file: &File, floor: &mut Floor, cancel: &Cancel) -> std::io::Result<()> {
    let mut rng = Rng::new(1, 0x9706E);
    let small = AlignedBuf::new(4096, 1);
    let medium = AlignedBuf::new(64 << 10, 2);
    let mut large = AlignedBuf::new(MIB as usize, 3);
    let mut page = AlignedBuf::new(4096, 0);
    let place = |rng: &mut Rng, bytes: u64| rng.below(AREA_BYTES / bytes) * bytes;

    for (buf, plain, synced, synced_p99) in [
        (&small, "write_4k_us", "write_fdatasync_4k_us", "write_fdatasync_4k_p99_us"),
        (&medium, "write_64k_us", "write_fdatasync_64k_us", "write_fdatasync_64k_p99_us"),
    ] {
        let bytes = buf.len() as u64;
        let r = timed(cancel, |_| file.write_all_at(buf, place(&mut rng, bytes)))?;
        floor.add(plain, "us", r.percentile_us(50.0), Better::Lower);
        let r = timed(cancel, |_| {
            file.write_all_at(buf, place(&mut rng, bytes))?;
            file.sync_data()
        })?;
        floor.add(synced, "us", r.percentile_us(50.0), Better::Lower);
        floor.add(synced_p99, "us", r.percentile_us(99.0), Better::Lower);
    }
    for (buf, threads, metric) in [
        (&small, 2, "write_fdatasync_4k_2_threads_per_s"),
        (&small, 4, "write_fdatasync_4k_4_threads_per_s"),
        (&small, 8, "write_fdatasync_4k_8_threads_per_s"),
        (&small, 16, "write_fdatasync_4k_16_threads_per_s"),
        (&medium, 2, "write_fdatasync_64k_2_threads_per_s"),
        (&medium, 4, "write_fdatasync_64k_4_threads_per_s"),
        (&medium, 8, "write_fdatasync_64k_8_threads_per_s"),
        (&medium, 16, "write_fdatasync_64k_16_threads_per_s"),
    ] {
        floor.add(metric, "1/s", synced_by(file, buf, threads, cancel)?, Better::Higher);
    }
    if let (Some(synced), Some(plain)) =
        (floor.get("write_fdatasync_4k_us"), floor.get("write_4k_us"))
    {
        floor.add("flush_us", "us", (synced - plain).max(0.0), Better::Lower);
    }
    let rate = |r: &Recorder| MIB as f64 / 1_048_576.0 / (r.mean_us() / 1e6);
    let write = timed(cancel, |i| file.write_all_at(&large, i * MIB % AREA_BYTES))?;
    floor.add("sequential_write_mib_per_s", "MiB/s", rate(&write), Better::Higher);
    let read = timed(cancel, |i| file.read_exact_at(&mut large, i * MIB % AREA_BYTES))?;
    floor.add("sequential_read_mib_per_s", "MiB/s", rate(&read), Better::Higher);
    let r = timed(cancel, |_| file.read_exact_at(&mut page, place(&mut rng, 4096)))?;
    floor.add("random_read_4k_us", "us", r.percentile_us(50.0), Better::Lower);
    floor.add("random_read_4k_depth1_per_s", "1/s", 1e6 / r.mean_us(), Better::Higher);
    if let Some(rate) = deep_reads(file, 32, &mut rng) {
        floor.add("random_read_4k_depth32_per_s", "1/s", rate, Better::Higher);
    }
    Ok(())
}

/// Writes with an fdatasync each, by `threads` at once.
fn synced_by(file: &File, buf: &[u8], threads: u64, cancel: &Cancel) -> std::io::Result<f64> {
    let bytes = buf.len() as u64;
    let begun = Instant::now();
    let counts = std::thread::scope(|scope| {
        let each: Vec<_> = (0..threads)
            .map(|t| {
                scope.spawn(move || {
                    let mut rng = Rng::new(3, t);
                    let done = timed(cancel, |_| {
                        file.write_all_at(buf, rng.below(AREA_BYTES / bytes) * bytes)?;
                        file.sync_data()
                    });
                    done.map(|r| r.count())
                })
            })
            .collect();
        let join = |h: std::thread::ScopedJoinHandle<'_, std::io::Result<u64>>| {
            h.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        each.into_iter().map(join).collect::<std::io::Result<Vec<u64>>>()
    })?;
    Ok(counts.iter().sum::<u64>() as f64 / begun.elapsed().as_secs_f64())
}

/// Random reads with `depth` in flight; nothing where `io_uring` is not allowed.
fn deep_reads(file: &File, depth: u64, rng: &mut Rng) -> Option<f64> {
    let mut ring = Ring::new(depth as usize).ok()?;
    let mut submit = |ring: &mut Ring, buf: AlignedBuf, tag: u64| {
        ring.read(file.as_raw_fd(), buf, rng.below(AREA_BYTES / 4096) * 4096, tag).ok()
    };
    for tag in 0..depth {
        submit(&mut ring, AlignedBuf::new(4096, 0), tag)?;
    }
    let begun = Instant::now();
    let mut done = 0_u64;
    while begun.elapsed() < EACH {
        let one = ring.reap(true).ok()??;
        one.result.ok()?;
        done += 1;
        submit(&mut ring, one.buf?, one.tag)?;
    }
    Some(done as f64 / begun.elapsed().as_secs_f64())
}

fn machine(floor: &mut Floor) {
    const CALLS: u32 = 100_000;
    const COLD: u32 = 20_000;
    let begun = Instant::now();
    for _ in 0..CALLS {
        std::hint::black_box(sys::null_syscall());
    }
    floor.add("syscall_ns", "ns", nanos_each(begun, CALLS), Better::Lower);

    let source = AlignedBuf::new(4096, 1);
    let mut sink = AlignedBuf::new(4096, 0);
    let begun = Instant::now();
    for _ in 0..CALLS {
        sink.copy_from_slice(std::hint::black_box(&source));
        std::hint::black_box(&sink);
    }
    floor.add("copy_4k_ns", "ns", nanos_each(begun, CALLS), Better::Lower);

    let big = vec![1_u8; 128 << 20];
    let mut rng = Rng::new(2, 0);
    let begun = Instant::now();
    for _ in 0..COLD {
        let at = rng.below(big.len() as u64 / 4096) as usize * 4096;
        sink.copy_from_slice(&big[at..at + 4096]);
        std::hint::black_box(&sink);
    }
    floor.add("copy_4k_cold_ns", "ns", nanos_each(begun, COLD), Better::Lower);

    let mut copy = vec![0_u8; big.len()];
    copy.copy_from_slice(&big);
    let begun = Instant::now();
    copy.copy_from_slice(std::hint::black_box(&big));
    std::hint::black_box(&copy);
    let rate = big.len() as f64 / 1_073_741_824.0 / begun.elapsed().as_secs_f64();
    floor.add("copy_gib_per_s", "GiB/s", rate, Better::Higher);
    floor.add("thread_hand_over_us", "us", hand_over_us(), Better::Lower);
}

fn nanos_each(begun: Instant, count: u32) -> f64 {
    begun.elapsed().as_nanos() as f64 / f64::from(count)
}

/// Half a round trip between two threads.
fn hand_over_us() -> f64 {
    const TRIPS: u32 = 3000;
    let (there, at_there) = std::sync::mpsc::sync_channel::<()>(0);
    let (back, at_back) = std::sync::mpsc::sync_channel::<()>(0);
    let echo = std::thread::spawn(move || {
        for () in at_there {
            if back.send(()).is_err() {
                return;
            }
        }
    });
    let begun = Instant::now();
    for _ in 0..TRIPS {
        if there.send(()).is_err() || at_back.recv().is_err() {
            break;
        }
    }
    let us = nanos_each(begun, TRIPS) / 2000.0;
    drop(there);
    // The echo thread ends with its channel.
    let _ = echo.join();
    us
}

/// A FUSE round trip: a direct read of 4 KiB from our own RAM-backed file, without any device.
pub fn fuse_round_trip(dir: &Path, registry: &Arc<Registry>, floor: &mut Floor) -> LabResult<()> {
    let mark = registry.mark();
    let mount_point = dir.join(format!(".weir-lab-fuse-{}", std::process::id()));
    registry.make_dir(&mount_point)?;
    let mut command = own_command()?;
    command.arg("slow-disk").arg(&mount_point).args(["1048576", "0"]);
    command.stderr(std::process::Stdio::null());
    start_helper(&mut command, registry)?;
    registry.add(Resource::Mount { path: mount_point.clone() })?;
    let path = mount_point.join(slow::FILE_NAME);
    let begun = Instant::now();
    while !path.exists() && begun.elapsed() < Duration::from_secs(2) {
        std::thread::sleep(Duration::from_millis(5));
    }
    if let Ok(file) = File::open(&path) {
        let mut page = AlignedBuf::new(4096, 0);
        let r = timed(&Cancel::default(), |_| file.read_exact_at(&mut page, 0))
            .during(|| "reading through FUSE".into())?;
        floor.add("fuse_round_trip_us", "us", r.percentile_us(50.0), Better::Lower);
    }
    registry.release_to(mark);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(experiment: &str, mode: &str, metric: &str, better: Better, median: f64) -> Row {
        let mut row = Floor { figures: Vec::new() }.rows("t").pop().unwrap_or_else(|| {
            let mut f = Floor::default();
            f.add("x", "us", 1.0, Better::Lower);
            f.rows("t").remove(0)
        });
        row.experiment = experiment.into();
        row.mode = mode.into();
        row.metric = metric.into();
        row.better = better;
        row.median = median;
        row
    }

    #[test]
    fn floor_ratio_counts_how_many_times_worse_in_both_directions() {
        let mut f = Floor::default();
        f.add("write_fdatasync_4k_us", "us", 50.0, Better::Lower);
        let slow = row("fsmark", "each", "fsync_p50_us", Better::Lower, 100.0);
        assert_eq!(f.ratio_of(&slow), Some(2.0));
        let rate = row("fsmark", "each", "files_per_s", Better::Higher, 5000.0);
        assert_eq!(f.ratio_of(&rate), Some(4.0));
        let mut large = row("fsmark", "each", "files_per_s", Better::Higher, 5000.0);
        large.params.insert("file_bytes".into(), 1_048_576.into());
        assert_eq!(f.ratio_of(&large), None, "a floor of 4 KiB");
    }

    #[test]
    fn parallel_and_asynchronous_results_have_no_one_by_one_floor() {
        let mut f = Floor::default();
        f.add("write_fdatasync_4k_us", "us", 50.0, Better::Lower);
        let mut parallel = row("fsmark", "each", "files_per_s", Better::Higher, 5000.0);
        parallel.params.insert("threads".into(), 4.into());
        assert_eq!(f.ratio_of(&parallel), None);
        for shared in ["async", "pass"] {
            let asynchronous = row("fsmark", shared, "files_per_s", Better::Higher, 5000.0);
            assert_eq!(f.ratio_of(&asynchronous), None);
            let mut fast = f.clone();
            fast.add("sequential_write_mib_per_s", "MiB/s", 1000.0, Better::Higher);
            assert_eq!(fast.ratio_of(&asynchronous), Some(51.2));
        }
    }
}
