//! Figures of the data path on this machine, for comparing two builds of the engine: run one, run the other, repeat.
//!
//! `cargo run --release -p weir --example figures -- PATH [fresh|memory|stream|rewrite|sync|tickets|aged|append|large|random|scattered]`: PATH is an image that
//! is made if missing (4 GiB, written once, so that the host's allocation does not count).

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use weir::{CreateOptions, OpenFlags, Result, Volume, VolumeOptions};

const VOLUME_BYTES: u64 = 4 << 30;
/// How long one cell of the matrix is measured.
const CELL: Duration = Duration::from_secs(3);
const JOBS: [usize; 3] = [1, 4, 16];

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let Some(path) = arguments.next() else {
        println!(
            "usage: figures PATH [fresh|memory|stream|rewrite|sync|tickets|aged|append|large|random|scattered]"
        );
        return Ok(());
    };
    let which = arguments.next().unwrap_or_default();
    let path = Path::new(&path);
    if !path.exists() {
        let options = CreateOptions {
            size_bytes: Some(VOLUME_BYTES),
            prewrite: true,
            ..CreateOptions::default()
        };
        Volume::create(path, &options)?;
    }
    let wanted = |name: &str| which.is_empty() || which == name;
    if wanted("fresh") {
        fresh(path)?;
    }
    if wanted("memory") {
        memory();
    }
    if wanted("stream") {
        stream(path)?;
    }
    if wanted("rewrite") {
        rewrite(path)?;
    }
    if wanted("sync") {
        sync(path)?;
    }
    if wanted("tickets") {
        tickets(path)?;
    }
    if wanted("aged") {
        aged(path)?;
    }
    for jobs in JOBS {
        if wanted("append") {
            report("64 KiB append, fsync each", jobs, &matrix(path, jobs, append_job)?);
        }
        if wanted("large") {
            report("4 MiB append, fsync each", jobs, &matrix(path, jobs, large_job)?);
        }
        if wanted("random") {
            report("4 KiB random, fsync every 16", jobs, &matrix(path, jobs, random_job)?);
        }
        if wanted("scattered") {
            report("the same in new files", jobs, &matrix(path, jobs, scattered_job)?);
        }
    }
    Ok(())
}

/// 4 KiB buffered writes into a cache that nobody has touched yet.
fn fresh(path: &Path) -> Result<()> {
    let options = VolumeOptions { memory_bytes: Some(2 << 30), ..VolumeOptions::default() };
    let volume = Volume::open(path, options)?;
    // What opening began in the background has its time.
    std::thread::sleep(Duration::from_millis(500));
    let file = volume.open_file("/fresh", OpenFlags::CREATE)?;
    let page = [7_u8; 4096];
    for bytes in [64_u64 << 20, 256 << 20] {
        for round in ["fresh", "again"] {
            let began = Instant::now();
            for at in (0..bytes).step_by(4096) {
                file.write_at(at, &page)?;
            }
            let rate = bytes as f64 / began.elapsed().as_secs_f64() / f64::from(1 << 30);
            println!("buffered 4 KiB writes, {:>3} MiB, {round}: {rate:.2} GiB/s", bytes >> 20);
        }
        file.truncate(0)?;
    }
    drop(file);
    volume.close()
}

/// The first touch of memory that was freed a moment ago, and of memory that was free for some seconds: a host that takes free
/// memory back has to find it again.
fn memory() {
    const BYTES: usize = 1 << 30;
    for (free_for, what) in [(0, "before all"), (0, "freed just now"), (5, "free for 5 s")] {
        std::thread::sleep(Duration::from_secs(free_for));
        let mut fresh = vec![0_u8; BYTES];
        let began = Instant::now();
        for page in fresh.chunks_mut(4096) {
            page[0] = 1;
        }
        let rate = 1.0 / began.elapsed().as_secs_f64();
        println!("first touch of 1 GiB, {what}: {rate:.2} GiB/s ({})", fresh[BYTES - 4096]);
    }
}

/// 1 GiB in buffered writes of 1 MiB, until it is durable.
fn stream(path: &Path) -> Result<()> {
    let volume = Volume::open(path, VolumeOptions::default())?;
    let data = vec![7_u8; 1 << 20];
    for round in 0..3 {
        let file = volume.open_file("/stream", OpenFlags::CREATE)?;
        file.truncate(0)?;
        volume.sync()?;
        let (began, cpu_before) = (Instant::now(), cpu_time());
        for at in (0..1_u64 << 30).step_by(data.len()) {
            file.write_at(at, &data)?;
        }
        let written = began.elapsed();
        file.fsync()?;
        let (took, cpu) = (began.elapsed(), cpu_time().saturating_sub(cpu_before));
        let mib_per_s = 1024.0 / took.as_secs_f64();
        println!(
            "1 GiB stream, round {round}: {mib_per_s:.0} MiB/s; fsync began after {} ms; CPU {} ms",
            written.as_millis(),
            cpu.as_millis()
        );
    }
    volume.close()
}

/// A stream over a file that is cached, twice over, until it is durable; and what somebody waits who reads that file meanwhile.
fn rewrite(path: &Path) -> Result<()> {
    const FILE_BYTES: u64 = 512 << 20;
    let volume = Volume::open(path, VolumeOptions::default())?;
    let data = vec![7_u8; 1 << 20];
    let file = volume.open_file("/stream", OpenFlags::CREATE)?;
    file.truncate(0)?;
    for round in 0..5 {
        let ended = AtomicBool::new(false);
        let (took, mut waits) = std::thread::scope(|scope| {
            let reader = scope.spawn(|| read_until(&file, FILE_BYTES, &ended));
            let began = Instant::now();
            let written = (0..2 * FILE_BYTES)
                .step_by(data.len())
                .try_for_each(|at| file.write_at(at % FILE_BYTES, &data).map(drop))
                .and_then(|()| file.fsync());
            ended.store(true, Ordering::Release);
            let waits = reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            written.map(|()| (began.elapsed(), waits))
        })?;
        waits.sort_unstable();
        let p99 = waits.get(waits.len() * 99 / 100).copied().unwrap_or_default();
        println!(
            "1 GiB over a file of 512 MiB, round {round}: {:.0} MiB/s; {} reads of 4 KiB beside it, p99 {} us",
            1024.0 / took.as_secs_f64(),
            waits.len(),
            p99.as_micros(),
        );
    }
    volume.close()
}

/// Reads blocks of the file, one each millisecond; how long each took.
fn read_until(file: &weir::File, file_bytes: u64, ended: &AtomicBool) -> Vec<Duration> {
    let mut waits = Vec::new();
    let mut block = [0; 4096];
    while !ended.load(Ordering::Acquire) {
        std::thread::sleep(Duration::from_millis(1));
        let at = (waits.len() as u64 * 0x9E37_79B9_7F4A) % (file_bytes / 4096) * 4096;
        let began = Instant::now();
        if file.read_at(at, &mut block).is_ok() {
            waits.push(began.elapsed());
        }
    }
    waits
}

/// A sync of the volume with many files to write home.
fn sync(path: &Path) -> Result<()> {
    const FILES: usize = 800;
    let volume = Volume::open(path, VolumeOptions::default())?;
    let data = vec![7_u8; 256 << 10];
    for round in 0..4 {
        for number in 0..FILES {
            let file = volume.open_file(format!("/sync{number}"), OpenFlags::CREATE)?;
            file.truncate(0)?;
            file.write_at(0, &data)?;
        }
        let began = Instant::now();
        volume.sync()?;
        println!(
            "sync of {FILES} files of 256 KiB, round {round}: {} ms",
            began.elapsed().as_millis()
        );
    }
    volume.close()
}

/// Tickets submitted one after the other, each for a file with one dirty page, and what they hold.
fn tickets(path: &Path) -> Result<()> {
    const TICKETS: usize = 100_000;
    const FILES: usize = 1000;
    let volume = Volume::open(path, VolumeOptions::default())?;
    let open = |number| volume.open_file(format!("/ticket{number}"), OpenFlags::CREATE);
    let files = (0..FILES).map(open).collect::<Result<Vec<_>>>()?;
    let page = [7_u8; 4096];
    for file in &files {
        file.write_at(0, &page)?;
    }
    volume.sync()?;
    std::thread::sleep(Duration::from_millis(500));
    let mut held = Vec::with_capacity(TICKETS);
    let mut times = Vec::with_capacity(TICKETS);
    let before = resident_bytes();
    for number in 0..TICKETS {
        let file = &files[number % FILES];
        file.write_at(0, &page)?;
        let began = Instant::now();
        held.push(file.fsync_async(0..4096, weir::SyncKind::Data)?);
        times.push(began.elapsed());
    }
    let unfinished = held.iter().filter(|ticket| ticket.poll().is_none()).count();
    let grown_mib = resident_bytes().saturating_sub(before) >> 20;
    for ticket in &held {
        ticket.wait()?;
    }
    times.sort_unstable();
    let at = |share: f64| times[(TICKETS as f64 * share) as usize].as_nanos();
    println!(
        "ticket submission: p50 {} ns, p90 {} ns, p99 {} ns; {TICKETS} tickets, {unfinished} in flight: {grown_mib} MiB",
        at(0.5),
        at(0.9),
        at(0.99),
    );
    drop((held, files));
    volume.close()
}

/// Syncs of scattered writes over files that are scattered already, for long; and what large files get in the space that this leaves.
fn aged(path: &Path) -> Result<()> {
    const JOBS: usize = 4;
    const FILE_BYTES: u64 = 384 << 20;
    const TIME: Duration = Duration::from_secs(15);
    const LARGE_MIB: u64 = 512;
    let volume = Arc::new(Volume::open(path, VolumeOptions::default())?);
    for name in (0..JOBS).map(|number| format!("/job{number}")) {
        volume.open_file(name, OpenFlags::CREATE)?.truncate(0)?;
    }
    volume.sync()?;
    let end = Instant::now() + TIME;
    let job = |number: usize| {
        let volume = volume.clone();
        std::thread::spawn(move || random_writes(&volume, number, end, FILE_BYTES))
    };
    let threads: Vec<_> = (0..JOBS).map(job).collect();
    let mut times = Vec::new();
    for thread in threads {
        times.extend(thread.join().map_err(|_| weir::Error::Invalid("a job panicked"))??);
    }
    times.sort_unstable();
    let moved = volume.stats().sync_moved_pages as f64 / (times.len() * 16) as f64;
    let p99_us = times[times.len() * 99 / 100].as_micros();
    let per_s = times.len() as f64 / TIME.as_secs_f64();
    println!(
        "scattered for 15 s, {JOBS} jobs: {per_s:.0} fsyncs/s, p99 {p99_us} us, {moved:.2} of the pages moved"
    );
    volume.checkpoint()?;
    let mut data = vec![7_u8; 1 << 20];
    let rate = |began: Instant| LARGE_MIB as f64 / began.elapsed().as_secs_f64();
    for number in 0..3 {
        let file = volume.open_file(format!("/large{number}"), OpenFlags::CREATE)?;
        file.truncate(0)?;
        volume.checkpoint()?;
        let began = Instant::now();
        for mib in 0..LARGE_MIB {
            file.write_at(mib << 20, &data)?;
        }
        file.fsync()?;
        println!("the next large file, {number}: written at {:.0} MiB/s", rate(began));
    }
    volume.close()?;
    drop(volume);
    let options = VolumeOptions { memory_bytes: Some(64 << 20), ..VolumeOptions::default() };
    let volume = Volume::open(path, options)?;
    for number in 0..3 {
        let file = volume.open_file(format!("/large{number}"), OpenFlags::READ)?;
        let began = Instant::now();
        for mib in 0..LARGE_MIB {
            file.read_at(mib << 20, &mut data)?;
        }
        println!("the next large file, {number}: read cold at {:.0} MiB/s", rate(began));
    }
    for number in 0..3 {
        volume.remove_file(format!("/large{number}"))?;
    }
    volume.close()
}

/// Processor time of this process so far, in all its threads.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // Behind the name, which may contain spaces: fields 14 and 15 are user and system time in hundredths of a second.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    let ticks = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok());
    Duration::from_millis(ticks.sum::<u64>() * 10)
}

/// Memory of this process.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0) * 4096
}

/// What one job of a cell does until the time is over; answers the time of every fsync.
type Job = fn(&Volume, usize, Instant) -> Result<Vec<Duration>>;

fn matrix(path: &Path, jobs: usize, job: Job) -> Result<Vec<Duration>> {
    let volume = Arc::new(Volume::open(path, VolumeOptions::default())?);
    for number in 0..jobs {
        let name = format!("/job{number}");
        match volume.remove_file(&name) {
            Ok(()) | Err(weir::Error::NotFound) => {}
            Err(error) => return Err(error),
        }
        let file = volume.open_file(&name, OpenFlags::CREATE)?;
        if job as *const () == random_job as *const () {
            file.write_at(0, &vec![1; FILE_BYTES as usize])?;
        }
    }
    volume.sync()?;
    let cpu_before = cpu_time();
    let end = Instant::now() + CELL;
    let threads: Vec<_> = (0..jobs)
        .map(|number| {
            let volume = volume.clone();
            std::thread::spawn(move || job(&volume, number, end))
        })
        .collect();
    let mut times = Vec::new();
    for thread in threads {
        times.extend(thread.join().map_err(|_| weir::Error::Invalid("a job panicked"))??);
    }
    let cpu_us = cpu_time().saturating_sub(cpu_before).as_micros() / times.len().max(1) as u128;
    let stats = volume.stats();
    println!(
        "    CPU {cpu_us} us/fsync, checkpoints {} log stalls {} throttled {} fsyncs/flush {:.1}",
        stats.checkpoints,
        stats.log_stalls,
        stats.throttled,
        stats.fsyncs as f64 / stats.log.flushes.max(1) as f64,
    );
    volume.close()?;
    times.sort_unstable();
    Ok(times)
}

fn append_job(volume: &Volume, number: usize, end: Instant) -> Result<Vec<Duration>> {
    appends(volume, number, end, 64 << 10)
}

/// More than a frame takes: it goes home.
fn large_job(volume: &Volume, number: usize, end: Instant) -> Result<Vec<Duration>> {
    appends(volume, number, end, 4 << 20)
}

fn appends(volume: &Volume, number: usize, end: Instant, bytes: usize) -> Result<Vec<Duration>> {
    let file = volume.open_file(format!("/job{number}"), OpenFlags::READ_WRITE)?;
    let data = vec![number as u8 + 1; bytes];
    let mut times = Vec::new();
    while Instant::now() < end {
        file.append(&data)?;
        if file.size() >= 128 << 20 {
            file.truncate(0)?;
        }
        let began = Instant::now();
        file.fsync()?;
        times.push(began.elapsed());
    }
    Ok(times)
}

/// Size of each job's file.
const FILE_BYTES: u64 = 32 << 20;

fn random_job(volume: &Volume, number: usize, end: Instant) -> Result<Vec<Duration>> {
    random_writes(volume, number, end, FILE_BYTES)
}

/// Into files that have no blocks yet.
fn scattered_job(volume: &Volume, number: usize, end: Instant) -> Result<Vec<Duration>> {
    random_writes(volume, number, end, 1 << 30)
}

fn random_writes(
    volume: &Volume,
    number: usize,
    end: Instant,
    file_bytes: u64,
) -> Result<Vec<Duration>> {
    let file = volume.open_file(format!("/job{number}"), OpenFlags::READ_WRITE)?;
    let mut state = number as u64 + 1;
    let mut times = Vec::new();
    let page = [number as u8 + 1; 4096];
    while Instant::now() < end {
        for _ in 0..16 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            file.write_at(state % (file_bytes / 4096) * 4096, &page)?;
        }
        let began = Instant::now();
        file.fsync()?;
        times.push(began.elapsed());
    }
    Ok(times)
}

fn report(name: &str, jobs: usize, times: &[Duration]) {
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_micros();
    println!(
        "{name}, {jobs:>2} jobs: {:>7.0} fsyncs/s, p50 {} us, p99 {} us, p99.9 {} us, max {} us",
        times.len() as f64 / CELL.as_secs_f64(),
        at(0.5),
        at(0.99),
        at(0.999),
        at(1.0),
    );
}
