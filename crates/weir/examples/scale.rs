//! One million files: what the last 100,000 creates cost against the first, how many tree nodes a cold look-up reads, how long
//! opening takes, and how long recovery of a full log.
//!
//! `cargo run --release -p weir --example scale -- IMAGE [files]`: IMAGE is made (8 GiB, sparse) and removed afterwards.

use std::path::Path;
use std::time::Instant;
use weir::{
    BackgroundMode, CreateOptions, FileType, NewInode, OpenFlags, Result, Volume, VolumeOptions,
};

const VOLUME_BYTES: u64 = 8 << 30;
const STEP: u64 = 100_000;
const DIRECTORIES: u64 = 1000;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let Some(path) = arguments.next() else {
        println!("usage: scale IMAGE [files]");
        return Ok(());
    };
    let files = arguments.next().and_then(|count| count.parse().ok()).unwrap_or(1_000_000);
    let path = Path::new(&path);
    for directories in [1, DIRECTORIES] {
        let options = CreateOptions { size_bytes: Some(VOLUME_BYTES), ..CreateOptions::default() };
        Volume::create(path, &options)?;
        let result = names(path, files, directories).and_then(|()| full_log(path));
        std::fs::remove_file(path)?;
        result?;
    }
    Ok(())
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
    for start in (0..files).step_by(STEP as usize) {
        let began = Instant::now();
        let count = STEP.min(files - start);
        for number in start..start + count {
            let dir = dirs[(number % directories) as usize];
            volume.make(dir, format!("file-{number:07}").as_bytes(), &new)?;
        }
        rates.push(count as f64 / began.elapsed().as_secs_f64());
        let stats = volume.stats();
        println!(
            "    {:>7} files: {:>7.0} creates/s  nodes {} MiB  delta {} MiB  {} checkpoints  {} log stalls",
            start + count,
            rates[rates.len() - 1],
            stats.nodes.bytes >> 20,
            stats.delta_bytes >> 20,
            stats.checkpoints,
            stats.log_stalls,
        );
    }
    if let (Some(first), Some(last)) = (rates.first(), rates.last()) {
        println!("    the last {STEP} cost {:.2} times the first", first / last);
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

/// Fills the log, leaves without closing, opens again.
fn full_log(path: &Path) -> Result<()> {
    {
        // Without threads nobody empties the log.
        let options =
            VolumeOptions { background: BackgroundMode::Manual, ..VolumeOptions::default() };
        let volume = Volume::open(path, options)?;
        let file = volume.open_file("/random", OpenFlags::CREATE)?;
        let size = 256 << 20;
        let zeros = vec![0; 1 << 20];
        for at in (0..size).step_by(1 << 20) {
            file.write_at(at, &zeros)?;
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

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0) * 4096
}
