//! How long a caller waits at worst where the log fills up, for comparing two builds of the engine: run one, run the other, repeat.
//!
//! `cargo run --release -p weir --example pressure -- IMAGE tickets [depth] [files]`: `files` files of 4 KiB (200,000) are written, then
//! synced one after the other with tickets, `depth` (64) in flight. What is measured is from submission to the end of a ticket.
//!
//! `cargo run --release -p weir --example pressure -- IMAGE batches [relaxed|tickets|durable] [batches]`: `batches` batches (20,000) of
//! eight random pages of a file of 512 MiB. What is measured is the call that commits.
//!
//! IMAGE is made (8 GiB, with a log of 256 MiB) and removed afterwards.

use std::path::Path;
use std::time::Instant;
use weir::{
    CompletionQueue, CreateOptions, Error, OpenFlags, Result, SyncKind, Volume, VolumeOptions,
};

const VOLUME_BYTES: u64 = 8 << 30;
const LOG_BYTES: u64 = 256 << 20;
const PAGE: u64 = 4096;
const FILE_BYTES: u64 = 512 << 20;
const BATCH_PAGES: usize = 8;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let word = |place: usize| arguments.get(place).map_or("", String::as_str);
    let number = |place: usize, default: u64| word(place).parse().unwrap_or(default).max(1);
    let path = Path::new(word(0));
    let options = CreateOptions {
        size_bytes: Some(VOLUME_BYTES),
        log_bytes: Some(LOG_BYTES),
        ..CreateOptions::default()
    };
    if !["tickets", "batches"].contains(&word(1)) {
        println!("usage: pressure IMAGE tickets [depth] [files]");
        println!("       pressure IMAGE batches [relaxed|tickets|durable] [batches]");
        return Ok(());
    }
    Volume::create(path, &options)?;
    let volume = Volume::open(path, VolumeOptions::default())?;
    let result = match word(1) {
        "tickets" => tickets(&volume, number(2, 64) as usize, number(3, 200_000)),
        _ => batches(&volume, word(2), number(3, 20_000)),
    };
    let closed = volume.close();
    std::fs::remove_file(path)?;
    result.and(closed)
}

fn tickets(volume: &Volume, depth: usize, files: u64) -> Result<()> {
    let name = |number: u64| format!("/f{number:06}");
    for number in 0..files {
        volume.open_file(name(number), OpenFlags::CREATE)?.write_at(0, &[7; PAGE as usize])?;
    }
    let queue = CompletionQueue::new()?;
    let mut submitted = Vec::with_capacity(files as usize);
    let mut waits_us = Vec::with_capacity(files as usize);
    let began = Instant::now();
    let mut end_one = |submitted: &[Instant]| -> Result<()> {
        let ended = queue.wait();
        ended.result?;
        waits_us.push(submitted[ended.user_data as usize].elapsed().as_micros());
        Ok(())
    };
    for number in 0..files {
        if number >= depth as u64 {
            end_one(&submitted)?;
        }
        let file = volume.open_file(name(number), OpenFlags::READ_WRITE)?;
        submitted.push(Instant::now());
        file.fsync_async(0..u64::MAX, SyncKind::Full)?.deliver(&queue, number);
    }
    for _ in 0..files.min(depth as u64) {
        end_one(&submitted)?;
    }
    report(volume, began, waits_us);
    Ok(())
}

fn batches(volume: &Volume, commit: &str, batches: u64) -> Result<()> {
    let file = volume.open_file("/database", OpenFlags::CREATE)?;
    let mib = vec![1; 1 << 20];
    for offset in (0..FILE_BYTES).step_by(mib.len()) {
        file.write_at(offset, &mib)?;
    }
    file.fsync()?;
    volume.checkpoint()?;
    let mut random = 88_172_645_463_325_252_u64;
    let mut waits_us = Vec::with_capacity(batches as usize);
    let began = Instant::now();
    for _ in 0..batches {
        let mut batch = volume.batch();
        for _ in 0..BATCH_PAGES {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            batch.write_at(&file, random % (FILE_BYTES / PAGE) * PAGE, &[7; PAGE as usize])?;
        }
        let called = Instant::now();
        match commit {
            "" | "relaxed" => drop(batch.commit_relaxed()?),
            "tickets" => drop(batch.commit_async()?),
            "durable" => drop(batch.commit()?),
            _ => return Err(Error::Invalid("commit is relaxed, tickets or durable")),
        }
        waits_us.push(called.elapsed().as_micros());
    }
    report(volume, began, waits_us);
    Ok(())
}

/// Prints the rate, quantiles and the slowest, and how often somebody waited for a checkpoint to make room in the log.
fn report(volume: &Volume, began: Instant, mut waits_us: Vec<u128>) {
    let per_second = waits_us.len() as f64 / began.elapsed().as_secs_f64();
    waits_us.sort_unstable();
    let quantile = |part: f64| waits_us[((waits_us.len() - 1) as f64 * part) as usize];
    println!(
        "{per_second:>7.0}/s, us: p50 {} p99 {} p99.9 {} slowest {}; {} waits for log space",
        quantile(0.5),
        quantile(0.99),
        quantile(0.999),
        quantile(1.0),
        volume.stats().log_stalls,
    );
}
