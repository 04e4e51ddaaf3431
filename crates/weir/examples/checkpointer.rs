//! A small database's checkpointer: it writes thousands of scattered pages back and makes them durable, while transactions
//! keep committing to their log. Three ways to do it, and what each does to the commits.
//!
//! ```text
//! cargo run --release -p weir --example checkpointer
//! ```

mod common;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::Scratch;
use weir::{CompletionQueue, File, OpenFlags, Result, SyncKind, SyncRangeFlags, Volume};

const PAGE_BYTES: u64 = 8192;
/// Pages between two calls that hand them on.
const BATCH_PAGES: usize = 64;

/// How the checkpoint's pages reach the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Strategy {
    /// Everything is dirtied, then one fsync.
    FsyncAtEnd,
    /// Each batch is handed to background writeback; the fsync at the end has little left to do.
    SyncRange,
    /// Each batch is submitted as a ranged asynchronous sync; at the end the tickets are waited for.
    RangedTickets,
}

const STRATEGIES: [Strategy; 3] =
    [Strategy::FsyncAtEnd, Strategy::SyncRange, Strategy::RangedTickets];

/// Where a checkpoint writes: pages all over the table, each once, in an order that looks random.
fn scattered(pages: u64) -> impl Iterator<Item = u64> {
    // Multiplication by an odd number permutes a power of two.
    let mask = pages.next_power_of_two() - 1;
    (0..=mask).map(move |i| i.wrapping_mul(0x9E37_79B9) & mask).filter(move |page| *page < pages)
}

/// Sorts pages and joins neighbours: fewer calls, and the disk gets longer writes.
fn ranges(pages: &mut Vec<u64>) -> Vec<Range<u64>> {
    pages.sort_unstable();
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for page in pages.drain(..) {
        let start = page * PAGE_BYTES;
        match ranges.last_mut() {
            Some(last) if last.end == start => last.end += PAGE_BYTES,
            _ => ranges.push(start..start + PAGE_BYTES),
        }
    }
    ranges
}

/// Writes the pages of a table and makes them durable. Content: the page's number and `generation`.
fn checkpoint(table: &File, pages: u64, generation: u64, strategy: Strategy) -> Result<()> {
    let queue = CompletionQueue::new()?;
    let mut page = vec![0; PAGE_BYTES as usize];
    let mut batch = Vec::with_capacity(BATCH_PAGES);
    let mut submitted = 0;
    let mut hand_on = |batch: &mut Vec<u64>| -> Result<()> {
        match strategy {
            Strategy::FsyncAtEnd => batch.clear(),
            Strategy::SyncRange => {
                for range in ranges(batch) {
                    // Makes nothing durable. What is handed over by several calls is merged before it is written.
                    table.sync_range(range, SyncRangeFlags::WRITE)?;
                }
            }
            Strategy::RangedTickets => {
                for range in ranges(batch) {
                    // Pages outside the range are neither written nor waited for.
                    table.fsync_async(range, SyncKind::Data)?.deliver(&queue, submitted);
                    submitted += 1;
                }
            }
        }
        Ok(())
    };
    for number in scattered(pages) {
        page[..8].copy_from_slice(&number.to_le_bytes());
        page[8..16].copy_from_slice(&generation.to_le_bytes());
        table.write_all_at(number * PAGE_BYTES, &page)?;
        batch.push(number);
        if batch.len() == BATCH_PAGES {
            hand_on(&mut batch)?;
        }
    }
    hand_on(&mut batch)?;
    for _ in 0..submitted {
        queue.wait().result?;
    }
    // What the tickets covered is durable already: this is cheap after them.
    table.fdatasync()
}

/// Commits small records until told to stop; answers how long each took.
fn commits(log: &File, stop: &AtomicBool) -> Result<Vec<Duration>> {
    let mut took = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let begun = Instant::now();
        log.append(&[1; 200])?;
        log.fdatasync()?;
        took.push(begun.elapsed());
        std::thread::sleep(Duration::from_micros(500));
    }
    took.sort_unstable();
    Ok(took)
}

/// A checkpoint with transactions beside it: its length, and the sorted latencies of their commits.
fn run(
    volume: &Volume,
    pages: u64,
    generation: u64,
    strategy: Strategy,
) -> Result<(Duration, Vec<Duration>)> {
    let table = volume.open_file("/table", OpenFlags::CREATE)?;
    let log = volume.open_file("/log", OpenFlags::CREATE)?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let transactions = scope.spawn(|| commits(&log, &stop));
        let begun = Instant::now();
        let written = checkpoint(&table, pages, generation, strategy);
        let took = begun.elapsed();
        stop.store(true, Ordering::Relaxed);
        let latencies =
            transactions.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        written?;
        Ok((took, latencies))
    })
}

fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    let at = (sorted.len() * percent / 100).min(sorted.len().saturating_sub(1));
    sorted.get(at).copied().unwrap_or_default()
}

fn main() -> Result<()> {
    let scratch = Scratch::new("checkpointer", 1 << 30)?;
    let volume = scratch.open()?;
    let pages = 8192;
    // The first generation also gives every page its place.
    run(&volume, pages, 0, Strategy::FsyncAtEnd)?;
    for (generation, strategy) in (1..).zip(STRATEGIES) {
        let (took, latencies) = run(&volume, pages, generation, strategy)?;
        println!(
            "{strategy:?}: {} MiB in {took:?}; {} commits meanwhile, p50 {:?}, p99 {:?}, max {:?}",
            (pages * PAGE_BYTES) >> 20,
            latencies.len(),
            percentile(&latencies, 50),
            percentile(&latencies, 99),
            percentile(&latencies, 100),
        );
    }
    volume.close()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_of_a_checkpoint_is_written_once_and_survives() {
        let pages = 300;
        let mut all: Vec<u64> = scattered(pages).collect();
        assert!(!all.is_sorted());
        let whole = 0..pages * PAGE_BYTES;
        assert_eq!(ranges(&mut all), vec![whole]);
        let scratch = Scratch::new("checkpointer-test", 128 << 20).expect("volume");
        for (generation, strategy) in (1..).zip(STRATEGIES) {
            run(&scratch.open().expect("open"), pages, generation, strategy).expect("durable");
            let volume = scratch.open().expect("open again");
            let table = volume.open_file("/table", OpenFlags::READ).expect("there");
            for number in 0..pages {
                let mut head = [0; 16];
                table.read_at(number * PAGE_BYTES, &mut head).expect("read");
                let wanted = [number.to_le_bytes(), generation.to_le_bytes()].concat();
                assert_eq!(head.as_slice(), wanted, "{strategy:?}");
            }
        }
    }
}
