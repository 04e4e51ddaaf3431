//! What small files cost: create, write 4 KiB, then sync all asynchronously, as `weir lab fsmark` does in its mode *async*, with
//! the CPU time of each phase and thread. For comparing two builds of the engine: run one, run the other, repeat.
//!
//! `cargo run --release -p weir --example small_files -- IMAGE [submitters] [depth] [files] [flush_us]`: IMAGE is made (4 GiB, with
//! a log of 512 MiB, which is emptied between rounds: with up to 12,000 files nothing has to go home while it is measured) and removed
//! afterwards. `depth` tickets of each submitter are in flight (1024), `files` in all (12,000), and the device's flush takes
//! `flush_us` longer (0).

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use weir::device::posix::{OpenMode, PosixDevice};
use weir::device::{Device, DeviceInfo, DeviceResult, IoClass, OnDone, Request};
use weir::{CompletionQueue, CreateOptions, OpenFlags, Result, SyncKind, Volume, VolumeOptions};

const VOLUME_BYTES: u64 = 4 << 30;
const LOG_BYTES: u64 = 512 << 20;
const ROUNDS: usize = 4;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(path) = arguments.first().map(Path::new) else {
        println!("usage: small_files IMAGE [submitters] [depth] [files] [flush_us]");
        return Ok(());
    };
    let number = |place: usize, default: u64| {
        arguments.get(place).and_then(|text| text.parse().ok()).unwrap_or(default)
    };
    let load = Load {
        submitters: number(1, 1).max(1),
        depth: number(2, 1024).max(1) as usize,
        files: number(3, 12_000).max(1),
    };
    let options = CreateOptions {
        size_bytes: Some(VOLUME_BYTES),
        log_bytes: Some(LOG_BYTES),
        ..CreateOptions::default()
    };
    Volume::create(path, &options)?;
    let inner = PosixDevice::open(path, OpenMode::ReadWrite)?;
    let device = Arc::new(Slow { inner, flush_us: number(4, 0) });
    let volume = Volume::open_device(device, VolumeOptions::default())?;
    let result = (0..ROUNDS).try_for_each(|round| measure(&volume, round, load));
    let closed = volume.close();
    std::fs::remove_file(path)?;
    result.and(closed)
}

#[derive(Clone, Copy)]
struct Load {
    submitters: u64,
    depth: usize,
    files: u64,
}

/// One round in directories of its own. The first also touches fresh memory.
fn measure(volume: &Volume, round: usize, load: Load) -> Result<()> {
    for each in 0..load.submitters {
        let mut path = String::new();
        for part in ["small".to_owned(), format!("round{round}"), format!("t{each}")] {
            path = format!("{path}/{part}");
            match volume.create_dir(&path, 0o755) {
                Ok(_) | Err(weir::Error::Exists) => {}
                Err(error) => return Err(error),
            }
        }
    }
    let before = volume.stats();
    let threads_before = cpu_of_threads();
    let began = Instant::now();
    let own = std::thread::scope(|scope| {
        let jobs: Vec<_> = (0..load.submitters)
            .map(|each| {
                let dir = format!("/small/round{round}/t{each}");
                scope.spawn(move || submitter(volume, &dir, load))
            })
            .collect();
        let joined = jobs.into_iter().map(|job| match job.join() {
            Ok(result) => result,
            Err(_) => Err(weir::Error::Invalid("a submitter panicked")),
        });
        joined.collect::<Result<Vec<[f64; 2]>>>()
    })?;
    let took = began.elapsed();
    let stats = volume.stats();
    let files = (load.files / load.submitters * load.submitters) as f64;
    let create = own.iter().map(|cpu| cpu[0]).sum::<f64>() / files;
    let sync = own.iter().map(|cpu| cpu[1]).sum::<f64>() / files;
    let mut others = String::new();
    let mut all = create + sync;
    for (name, us) in cpu_of_threads() {
        let spent = (us - threads_before.get(&name).copied().unwrap_or(0.0)) / files;
        all += spent;
        if spent > 0.05 {
            others.extend([" ", &name, &format!(" {spent:.2}")]);
        }
    }
    volume.checkpoint()?;
    let flushes = stats.log.flushes - before.log.flushes;
    println!(
        "{:>7.0} files/s, CPU us per file {all:.2}: create {create:.2} sync {sync:.2}{others}; {:.0} fsyncs/flush, {} frames, {} checkpoints",
        files / took.as_secs_f64(),
        files / flushes.max(1) as f64,
        stats.log.frames - before.log.frames,
        stats.checkpoints - before.checkpoints,
    );
    Ok(())
}

/// CPU time of both phases, in microseconds.
fn submitter(volume: &Volume, dir: &str, load: Load) -> Result<[f64; 2]> {
    let began = thread_cpu_us();
    let page = [7_u8; 4096];
    let name = |number| format!("{dir}/f{number:06}");
    let files = load.files / load.submitters;
    for number in 0..files {
        volume.open_file(name(number), OpenFlags::CREATE)?.write_at(0, &page)?;
    }
    let created = thread_cpu_us();
    let queue = CompletionQueue::new()?;
    let mut in_flight = 0;
    for number in 0..files {
        if in_flight == load.depth {
            queue.wait().result?;
            in_flight -= 1;
        }
        let file = volume.open_file(name(number), OpenFlags::READ_WRITE)?;
        file.fsync_async(0..u64::MAX, SyncKind::Full)?.deliver(&queue, number);
        in_flight += 1;
    }
    for _ in 0..in_flight {
        queue.wait().result?;
    }
    Ok([created - began, thread_cpu_us() - created])
}

/// A disk whose flush takes longer.
struct Slow {
    inner: PosixDevice,
    flush_us: u64,
}

impl Device for Slow {
    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }
    fn read(&self, offset: u64, buffers: &mut [&mut [u8]], class: IoClass) -> DeviceResult<()> {
        self.inner.read(offset, buffers, class)
    }
    fn write(&self, offset: u64, data: &[&[u8]], class: IoClass, fua: bool) -> DeviceResult<()> {
        self.inner.write(offset, data, class, fua)
    }
    fn flush(&self) -> DeviceResult<()> {
        if self.flush_us > 0 {
            std::thread::sleep(Duration::from_micros(self.flush_us));
        }
        self.inner.flush()
    }
    fn discard(&self, offset: u64, length: u64) -> DeviceResult<()> {
        self.inner.discard(offset, length)
    }
    fn submit(&self, request: Request, on_done: OnDone) {
        self.inner.submit(request, on_done);
    }
}

/// CPU time of this thread: user and system, of `/proc/thread-self/schedstat`.
fn thread_cpu_us() -> f64 {
    cpu_us("/proc/thread-self/schedstat")
}

fn cpu_us(path: &str) -> f64 {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let ns = text.split(' ').next().and_then(|ns| ns.parse::<f64>().ok());
    ns.unwrap_or(0.0) / 1000.0
}

/// CPU time of the threads of this process by name, without the calling one.
fn cpu_of_threads() -> BTreeMap<String, f64> {
    let mut found = BTreeMap::new();
    let own = std::fs::read_link("/proc/thread-self").unwrap_or_default();
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    for task in tasks.filter(|task| Some(task.file_name().as_os_str()) != own.file_name()) {
        let path = task.path();
        let name = std::fs::read_to_string(path.join("comm")).unwrap_or_default();
        let spent = cpu_us(&path.join("schedstat").to_string_lossy());
        *found.entry(name.trim_end().to_owned()).or_insert(0.0) += spent;
    }
    found
}
