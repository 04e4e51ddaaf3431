//! What a modest program waits beside one that asks for more than the disk can do, for comparing two builds of the engine.
//!
//! `cargo run --release -p weir --example neighbours -- IMAGE none|tickets|batches|barriers|appends|large [threads] [seconds]`
//!
//! Every 5 ms one thread creates a file, writes a page of another, and syncs that. Meanwhile some `threads` (2) write random pages with
//! thousands of tickets in flight, commit relaxed batches of a mebibyte, raise barriers behind some hundred scattered pages each, or
//! append 64 KiB and sync; or they write 256 MiB, sync, and cut them off again.
//!
//! IMAGE is made (8 GiB, with a log of 256 MiB) and removed afterwards.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use weir::{
    CreateOptions, Error, File, FileType, NewInode, OpenFlags, Result, SyncKind, Volume,
    VolumeOptions,
};

const VOLUME_BYTES: u64 = 8 << 30;
const LOG_BYTES: u64 = 256 << 20;
const PAGE: u64 = 4096;
const FILE_BYTES: u64 = 512 << 20;
static PIECE: [u8; 16 * PAGE as usize] = [8; 16 * PAGE as usize];
const PAUSE: Duration = Duration::from_millis(5);

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let word = |place: usize| arguments.get(place).map_or("", String::as_str);
    let number = |place: usize, default: u64| word(place).parse().unwrap_or(default).max(1);
    let flood: Flood = match word(1) {
        "none" => |_, _, _| Ok(()),
        "tickets" => tickets,
        "batches" => batches,
        "barriers" => barriers,
        "appends" => appends,
        "large" => large,
        _ => {
            println!(
                "usage: neighbours IMAGE none|tickets|batches|barriers|appends|large [threads] [seconds]"
            );
            return Ok(());
        }
    };
    let path = Path::new(word(0));
    let options = CreateOptions {
        size_bytes: Some(VOLUME_BYTES),
        log_bytes: Some(LOG_BYTES),
        ..CreateOptions::default()
    };
    Volume::create(path, &options)?;
    let volume = Volume::open(path, VolumeOptions::default())?;
    let result = beside(&volume, flood, number(2, 2), Duration::from_secs(number(3, 10)));
    let closed = volume.close();
    std::fs::remove_file(path)?;
    result.and(closed)
}

/// What a flooding thread does with its file until it is over; the last is a random number.
type Flood = fn(&Volume, (&File, &AtomicBool), &mut u64) -> Result<()>;

fn beside(volume: &Volume, flood: Flood, threads: u64, time: Duration) -> Result<()> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let start = |number: u64| {
            let over = &over;
            scope.spawn(move || {
                let file = volume.open_file(format!("/flood{number}"), OpenFlags::CREATE)?;
                flood(volume, (&file, over), &mut (88_172_645_463_325_252 + number))
            })
        };
        let floods: Vec<_> = (0..threads).map(start).collect();
        let waits = modest(volume, time);
        over.store(true, Ordering::Relaxed);
        for flood in floods {
            flood.join().map_err(|_| Error::Invalid("a thread panicked"))??;
        }
        for (name, waits_us) in ["create", "write", "fsync"].into_iter().zip(waits?) {
            report(name, waits_us);
        }
        let stats = volume.stats();
        let (stalls, checkpoints) = (stats.log_stalls, stats.checkpoints);
        println!("{stalls} waits for log space, {checkpoints} checkpoints");
        Ok(())
    })
}

fn modest(volume: &Volume, time: Duration) -> Result<[Vec<u128>; 3]> {
    let directory = volume.create_dir("/modest", 0o755)?.ino;
    let file = volume.open_file("/modest-file", OpenFlags::CREATE)?;
    let mut waits: [Vec<u128>; 3] = Default::default();
    let began = Instant::now();
    for number in 0_u64.. {
        if began.elapsed() > time {
            break;
        }
        let (name, new) = (format!("f{number}"), NewInode::new(FileType::Regular, 0o644));
        let called = Instant::now();
        volume.make(directory, name.as_bytes(), &new)?;
        waits[0].push(called.elapsed().as_micros());
        let called = Instant::now();
        file.write_at(PAGE * (number % 64), &PIECE[..PAGE as usize])?;
        waits[1].push(called.elapsed().as_micros());
        let called = Instant::now();
        file.fsync()?;
        waits[2].push(called.elapsed().as_micros());
        std::thread::sleep(PAUSE);
    }
    Ok(waits)
}

fn random_below(random: &mut u64, limit: u64) -> u64 {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    *random % limit
}

fn tickets(_: &Volume, (file, over): (&File, &AtomicBool), random: &mut u64) -> Result<()> {
    let mut in_flight = VecDeque::new();
    while !over.load(Ordering::Relaxed) {
        let offset = PAGE * random_below(random, FILE_BYTES / PAGE);
        file.write_at(offset, &PIECE[..PAGE as usize])?;
        in_flight.push_back(file.fsync_async(offset..offset + PAGE, SyncKind::Data)?);
        if in_flight.len() > 8192
            && let Some(oldest) = in_flight.pop_front()
        {
            oldest.wait()?;
        }
    }
    in_flight.into_iter().try_for_each(|ticket| ticket.wait())
}

fn batches(volume: &Volume, (file, over): (&File, &AtomicBool), random: &mut u64) -> Result<()> {
    let piece = PIECE.len() as u64;
    while !over.load(Ordering::Relaxed) {
        let mut batch = volume.batch();
        for _ in 0..16 {
            batch.write_at(file, piece * random_below(random, FILE_BYTES / piece), &PIECE)?;
        }
        batch.commit_relaxed()?;
    }
    Ok(())
}

fn barriers(_: &Volume, (file, over): (&File, &AtomicBool), random: &mut u64) -> Result<()> {
    while !over.load(Ordering::Relaxed) {
        for _ in 0..200 {
            let offset = PAGE * random_below(random, FILE_BYTES / PAGE);
            file.write_at(offset, &PIECE[..PAGE as usize])?;
        }
        file.barrier()?;
    }
    Ok(())
}

fn appends(_: &Volume, (file, over): (&File, &AtomicBool), _: &mut u64) -> Result<()> {
    while !over.load(Ordering::Relaxed) {
        if file.size() > FILE_BYTES {
            file.truncate(0)?;
        }
        file.append(&PIECE)?;
        file.fdatasync()?;
    }
    Ok(())
}

fn large(_: &Volume, (file, over): (&File, &AtomicBool), _: &mut u64) -> Result<()> {
    const LARGE_BYTES: u64 = 256 << 20;
    let (began, mut bytes) = (Instant::now(), 0);
    while !over.load(Ordering::Relaxed) {
        for offset in (0..LARGE_BYTES).step_by(PIECE.len()) {
            bytes += file.write_at(offset, &PIECE)?;
        }
        file.fsync()?;
        file.truncate(0)?;
    }
    println!(
        "{:.0} MiB/s by one of them",
        bytes as f64 / f64::from(1 << 20) / began.elapsed().as_secs_f64()
    );
    Ok(())
}

fn report(name: &str, mut waits_us: Vec<u128>) {
    waits_us.sort_unstable();
    let last = waits_us.len().saturating_sub(1) as f64;
    let quantile =
        |part: f64| waits_us.get((last * part) as usize).map_or(0.0, |&us| us as f64 / 1000.0);
    println!(
        "{name:<8} {:>6} times, ms: p50 {:>8.3} p99 {:>8.3} slowest {:>8.3}",
        waits_us.len(),
        quantile(0.5),
        quantile(0.99),
        quantile(1.0)
    );
}
