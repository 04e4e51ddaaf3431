//! One million files: what the last 100,000 creates cost against the first, how many tree nodes a cold look-up reads, how long
//! opening takes, and how long recovery of a full log.
//!
//! `cargo run --release -p weir --example scale -- IMAGE [files] [names|recovery]`: IMAGE is made (8 GiB, sparse; for `recovery`
//! 64 GiB, whose ring has the full 2 GiB) and removed afterwards. `names` leaves the full log out, `recovery` does nothing else.
//! Rates depend on what else the machine does; CPU times of the creating thread do so less.

use std::path::Path;
use std::time::Instant;
use weir::{
    BackgroundMode, CreateOptions, FileType, NewInode, OpenFlags, Result, Volume, VolumeOptions,
};

const VOLUME_BYTES: u64 = 8 << 30;
/// The smallest volume with the largest ring.
const RECOVERY_VOLUME_BYTES: u64 = 64 << 30;
const STEP: u64 = 100_000;
const DIRECTORIES: u64 = 1000;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let Some(path) = arguments.next() else {
        println!("usage: scale IMAGE [files] [names|recovery]");
        return Ok(());
    };
    let files = arguments.next().and_then(|count| count.parse().ok()).unwrap_or(1_000_000);
    let part = arguments.next().unwrap_or_default();
    let path = Path::new(&path);
    if part == "recovery" {
        create(path, RECOVERY_VOLUME_BYTES)?;
        let result = full_log(path, 4 << 30);
        std::fs::remove_file(path)?;
        return result;
    }
    for directories in [1, DIRECTORIES] {
        create(path, VOLUME_BYTES)?;
        let log = || if part == "names" { Ok(()) } else { full_log(path, 256 << 20) };
        let result = names(path, files, directories).and_then(|()| log());
        std::fs::remove_file(path)?;
        result?;
    }
    Ok(())
}

fn create(path: &Path, size_bytes: u64) -> Result<()> {
    let options = CreateOptions { size_bytes: Some(size_bytes), ..CreateOptions::default() };
    Volume::create(path, &options)
}

fn open(path: &Path) -> Result<Volume> {
    let began = Instant::now();
    let volume = Volume::open(path, VolumeOptions::default())?;
    println!("    open: {:.3} s", began.elapsed().as_secs_f64());
    Ok(volume)
}

/// Creates, closes, opens, looks up.
fn names(path: &Path, files: u64, directories: u64) -> Result<()> {
    println!("{files} files in {directories} directories");
    let volume = open(path)?;
    let new = NewInode::new(FileType::Regular, 0o644);
    let dirs: Vec<u64> = (0..directories)
        .map(|number| Ok(volume.create_dir(format!("/d{number}"), 0o755)?.ino))
        .collect::<Result<_>>()?;
    let mut rates = Vec::new();
    let mut costs = Vec::new();
    for start in (0..files).step_by(STEP as usize) {
        let began = Instant::now();
        let began_cpu_us = thread_cpu_us();
        let count = STEP.min(files - start);
        for number in start..start + count {
            let dir = dirs[(number % directories) as usize];
            volume.make(dir, format!("file-{number:07}").as_bytes(), &new)?;
        }
        rates.push(count as f64 / began.elapsed().as_secs_f64());
        costs.push((thread_cpu_us() - began_cpu_us) / count as f64);
        let stats = volume.stats();
        println!(
            "    {:>7} files: {:>7.0} creates/s, {:.1} us of CPU each  nodes {} MiB, {} read  delta {} MiB  {} checkpoints  {} log stalls  {} throttled",
            start + count,
            rates[rates.len() - 1],
            costs[costs.len() - 1],
            stats.nodes.bytes >> 20,
            stats.nodes.misses,
            stats.delta_bytes >> 20,
            stats.checkpoints,
            stats.log_stalls,
            stats.throttled,
        );
    }
    if let (Some(first), Some(last)) = (rates.first(), rates.last()) {
        println!("    the last {STEP} cost {:.2} times the first", first / last);
    }
    if let (Some(first), Some(last)) = (costs.first(), costs.last()) {
        println!("    the last {STEP} cost {:.2} times the CPU of the first", last / first);
    }
    println!("    resident memory {} MiB", resident_bytes() >> 20);
    let began = Instant::now();
    volume.close()?;
    println!("    close: {:.3} s", began.elapsed().as_secs_f64());
    drop(volume);
    let volume = open(path)?;
    let probes = 50;
    let mut reads = Vec::new();
    for probe in 0..probes {
        let number = probe * 7_919_777 % files;
        let before = volume.stats().nodes.misses;
        let dir = volume.lookup(Volume::ROOT, format!("d{}", number % directories).as_bytes())?;
        volume.lookup(dir.ino, format!("file-{number:07}").as_bytes())?;
        reads.push(volume.stats().nodes.misses - before);
    }
    println!(
        "    cold look-ups read {} nodes the first time, {:.1} on average, {} at most",
        reads[0],
        reads.iter().sum::<u64>() as f64 / probes as f64,
        reads.iter().max().unwrap_or(&0),
    );
    volume.close()
}

/// Fills the log with scattered pages of a file of `size` bytes, leaves without closing, opens again.
fn full_log(path: &Path, size: u64) -> Result<()> {
    {
        // Without threads nobody empties the log.
        let options =
            VolumeOptions { background: BackgroundMode::Manual, ..VolumeOptions::default() };
        let volume = Volume::open(path, options)?;
        let file = volume.open_file("/random", OpenFlags::CREATE)?;
        // What every page has as its home is written: the first write to a hole of the image costs its file system more.
        let ones = vec![1; 1 << 20];
        for at in (0..size).step_by(1 << 20) {
            file.write_at(at, &ones)?;
        }
        volume.checkpoint()?;
        let mut state = 1_u64;
        let (mut syncs, mut used) = (0, 0);
        // Operations may fill half of the ring.
        while used == 0 {
            for _ in 0..16 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                file.write_at((state >> 20) % (size / 4096) * 4096, &[syncs as u8; 4096])?;
            }
            file.fsync()?;
            syncs += 1;
            let fill = volume.stats().log_fill;
            if fill.used_blocks * 100 >= fill.ring_blocks * 48 {
                used = fill.used_blocks;
            }
        }
        // Dropped without closing: the log stays as it is.
        println!("    {syncs} syncs, {} MiB of log in use", used >> 8);
    }
    println!("    recovery:");
    open(path)?.close()
}

/// CPU time of this thread: user and system, of `/proc/thread-self/schedstat`.
fn thread_cpu_us() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let ns = text.split(' ').next().and_then(|ns| ns.parse::<f64>().ok());
    ns.unwrap_or(0.0) / 1000.0
}

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0) * 4096
}
