//! Neighbours who ask for more than the disk can do: it is they who are slowed down, and not those who ask for little.
//!
//! Whatever is flooded (dirty memory, the log, the delta, the barriers' room), others never wait for a checkpoint. Their operations are
//! delayed at most as one page is; and a small fsync waits for two flushes, and for what its own flush has to come after.

use super::*;
use std::collections::VecDeque;

/// How long a flood lasts.
const FLOOD_NS: u64 = 4_000_000_000;
/// What one piece of it takes to compute.
const COMPUTING_NS: u64 = 5_000;
/// The longest delay of a page, and what is left of others' delays that were too short to sleep.
const DELAYED_NS: u64 = 1_200_000;
/// Blocks that a small fsync puts into the log: each may be delayed as long.
const SMALL_FSYNC_BLOCKS: u64 = 2;
/// A file that is flooded is so long at most.
const FILE_BYTES: u64 = 256 * MIB;

struct Flood {
    body: Body,
    threads: u64,
    /// What a small fsync may take beyond its delay.
    small_fsync_ns: u64,
    /// So many schedules are tried.
    seeds: u64,
    /// In which the disk serves what waits.
    order: Order,
}

fn flooded_file(stage: &Stage, rng: &mut Rng) -> File {
    stage.file(&format!("/flood{}", rng.below(u64::MAX)))
}

/// A mebibyte at a time, and nobody syncs it.
fn buffered_writes(stage: &Stage, mut rng: Rng) {
    let file = flooded_file(stage, &mut rng);
    let piece = vec![8; MIB as usize];
    for number in 0.. {
        if stage.is_over() {
            break;
        }
        file.write_at(number * MIB % FILE_BYTES, &piece).expect("write");
        stage.time.sleep(20 * COMPUTING_NS);
    }
}

fn names_made_and_removed(stage: &Stage, mut rng: Rng) {
    const KEPT: u64 = 200;
    let volume = &stage.volume;
    let path = format!("/flood{}", rng.below(u64::MAX));
    let dir = volume.create_dir(path, 0o755).expect("mkdir").ino;
    let new = NewInode::new(FileType::Regular, 0o644);
    for number in 0.. {
        if stage.is_over() {
            break;
        }
        volume.make(dir, format!("n{number}").as_bytes(), &new).expect("create");
        if let Some(old) = u64::checked_sub(number, KEPT) {
            volume.unlink(dir, format!("n{old}").as_bytes()).expect("unlink");
        }
        stage.time.sleep(COMPUTING_NS);
    }
}

fn synced_appends(stage: &Stage, mut rng: Rng) {
    let file = flooded_file(stage, &mut rng);
    let piece = vec![8; 16 * PAGE as usize];
    while !stage.is_over() {
        file.append(&piece).expect("append");
        file.fdatasync().expect("fsync");
    }
}

/// The same with tickets: the log's threads do all of the work.
fn appends_with_tickets(stage: &Stage, mut rng: Rng) {
    const DEPTH: usize = 8;
    let file = flooded_file(stage, &mut rng);
    let piece = vec![8; 16 * PAGE as usize];
    let mut in_flight = VecDeque::new();
    while !stage.is_over() {
        let offset = file.append(&piece).expect("append");
        let ticket = file.fsync_async(offset..offset + 16 * PAGE, SyncKind::Full);
        in_flight.push_back(ticket.expect("ticket"));
        if in_flight.len() == DEPTH {
            in_flight.pop_front().expect("the oldest").wait().expect("durable");
        }
        stage.time.sleep(COMPUTING_NS);
    }
}

/// Random pages, thousands of tickets in flight.
fn tickets_of_pages(stage: &Stage, mut rng: Rng) {
    const DEPTH: usize = 8192;
    let file = flooded_file(stage, &mut rng);
    let page = vec![8; PAGE as usize];
    let mut in_flight = VecDeque::new();
    while !stage.is_over() {
        let offset = PAGE * rng.below(FILE_BYTES / PAGE);
        file.write_at(offset, &page).expect("write");
        let ticket = file.fsync_async(offset..offset + PAGE, SyncKind::Data);
        in_flight.push_back(ticket.expect("ticket"));
        if in_flight.len() == DEPTH {
            in_flight.pop_front().expect("the oldest").wait().expect("durable");
        }
        stage.time.sleep(COMPUTING_NS);
    }
}

/// A mebibyte in each, which is not synced.
fn relaxed_batches(stage: &Stage, mut rng: Rng) {
    let file = flooded_file(stage, &mut rng);
    let piece = vec![8; 16 * PAGE as usize];
    while !stage.is_over() {
        let mut batch = stage.volume.batch();
        for _ in 0..16 {
            let offset = 16 * PAGE * rng.below(FILE_BYTES / (16 * PAGE));
            batch.write_at(&file, offset, &piece).expect("stage");
        }
        batch.commit_relaxed().expect("commit");
        stage.time.sleep(20 * COMPUTING_NS);
    }
}

/// Of scattered pages, more than a barrier puts into the log at once.
fn barriers(stage: &Stage, mut rng: Rng) {
    let file = flooded_file(stage, &mut rng);
    let page = vec![8; PAGE as usize];
    while !stage.is_over() {
        for _ in 0..rng.below(200) {
            file.write_at(PAGE * rng.below(FILE_BYTES / PAGE), &page).expect("write");
        }
        file.barrier().expect("barrier");
        stage.time.sleep(10_000_000);
    }
}

/// Files of many extents.
fn removals(stage: &Stage, mut rng: Rng) {
    let page = vec![8; PAGE as usize];
    for number in 0.. {
        if stage.is_over() {
            break;
        }
        let name = format!("/flood{}-{number}", rng.below(u64::MAX));
        let file = stage.file(&name);
        for number in 0..2048 {
            file.write_at(2 * PAGE * number, &page).expect("write");
        }
        file.fsync().expect("fsync");
        stage.volume.remove_file(&name).expect("remove");
    }
}

/// Of pages that are read again and again.
fn modest_reads(stage: &Stage, mut rng: Rng) {
    let file = stage.file("/small-read");
    let mut page = vec![0; PAGE as usize];
    while !stage.is_over() {
        let offset = PAGE * rng.below(16);
        stage.prompt("cached read", &mut rng, || file.read_at(offset, &mut page)).expect("read");
        let read = || file.read_at_nowait(offset, &mut page);
        let read = stage.prompt("no-wait read", &mut rng, read);
        assert!(matches!(read, Ok(_) | Err(weir::Error::WouldBlock)), "{read:?}");
    }
}

/// Somebody whose file is small, and who writes little.
fn modest_writes(stage: &Stage, mut rng: Rng) {
    let file = stage.file("/modest");
    let page = vec![7; PAGE as usize];
    while !stage.is_over() {
        let offset = PAGE * rng.below(64);
        stage.prompt("write", &mut rng, || file.write_at(offset, &page)).expect("write");
        stage.time.sleep(3_000_000);
    }
}

/// Somebody who has pages written beside a ticket's frame, and then syncs the same pages again: nobody keeps them.
fn tickets_and_syncs(stage: &Stage, mut rng: Rng) {
    const PAGES: u64 = 6;
    let file = stage.file("/modest-again");
    let page = vec![7; PAGE as usize];
    while !stage.is_over() {
        let first = rng.below(8);
        let write = || {
            for number in 0..PAGES {
                let offset = PAGE * (first + 8 * number);
                file.write_at(offset, &page).expect("write");
            }
        };
        write();
        let ticket = file.fsync_async(0..u64::MAX, SyncKind::Data).expect("ticket");
        ticket.wait().expect("durable");
        write();
        let grant = (stage.small_fsync_ns + PAGES * DELAYED_NS, &[Before::Frames][..]);
        stage.timed("small fsync after a ticket", grant, || file.fdatasync()).expect("fsync");
        stage.time.sleep(rng.below(20_000_000));
    }
}

fn run(seed: u64, flood: &Flood) -> BTreeMap<&'static str, Waits> {
    let time = Time::default();
    let ticker = time.start();
    let (mut stage, servers) = prepare_on(&time, 16 * MIB, 32 * 1024 * MIB, flood.order);
    stage.big.fsync().expect("fsync");
    stage.prompt_ns = DELAYED_NS;
    stage.small_fsync_ns = flood.small_fsync_ns + SMALL_FSYNC_BLOCKS * DELAYED_NS;
    let stage = Arc::new(stage);
    let mut bodies: Vec<(u64, Body)> = vec![
        (1, modest_reads),
        (2, modest_writes),
        (3, names),
        (4, small_fsyncs),
        (5, tickets),
        (6, tickets_and_syncs),
    ];
    bodies.extend((0..flood.threads).map(|number| (10 + number, flood.body)));
    let threads = start(&stage, seed, &bodies);
    time.sleep(FLOOD_NS);
    stage.over.store(true, SeqCst);
    for thread in threads {
        thread.join().expect("no thread panics");
    }
    let stats = stage.volume.stats();
    let (checkpoints, stalls) = (stats.checkpoints, stats.log_stalls);
    println!("{checkpoints} checkpoints, {stalls} log stalls, {:?}", stage.disk.served());
    assert!(checkpoints > 0, "checkpoints were made");
    // Those who flood the log may have to wait for a checkpoint; others would be late.
    assert_eq!(stats.memory_stalls + stats.space_stalls, 0, "somebody stood still");
    end(&time, ticker, stage, servers)
}

fn neighbours_of(flood: Flood) {
    let first = environment("STALL_SEED", 1);
    let flood = Arc::new(flood);
    for seed in first..first + flood.seeds {
        let flood = Arc::clone(&flood);
        let waits = scheduled(seed, move || run(seed, &flood));
        let late = report(&waits);
        for (name, wait) in &waits {
            assert!(wait.count > 2, "{name}: {wait:?}");
        }
        assert!(late.is_empty(), "seed {seed}: {late:#?}");
    }
}

fn flood(body: Body, threads: u64) -> Flood {
    Flood { body, threads, small_fsync_ns: SMALL_FSYNC_NS, seeds: 1, order: Order::PerClass }
}

#[test]
fn dirty_memory_that_others_fill_delays_nobody_else() {
    neighbours_of(flood(buffered_writes, 8));
}

#[test]
fn names_that_others_make_delay_nobody_for_long() {
    neighbours_of(flood(names_made_and_removed, 4));
}

#[test]
fn appends_that_others_sync_keep_the_log_from_nobody() {
    neighbours_of(Flood { seeds: 4, ..flood(synced_appends, 16) });
}

#[test]
fn appends_that_others_have_tickets_for_keep_the_log_from_nobody() {
    neighbours_of(Flood { seeds: 4, ..flood(appends_with_tickets, 4) });
}

#[test]
fn a_log_that_is_full_of_others_tickets_is_full_for_them_only() {
    neighbours_of(flood(tickets_of_pages, 2));
}

#[test]
fn a_log_that_is_full_of_others_batches_is_full_for_them_only() {
    neighbours_of(flood(relaxed_batches, 2));
}

#[test]
fn barriers_without_end_take_the_log_from_nobody() {
    // What comes after a barrier waits for the data before it: a flush more, and the writes of hundreds of pages.
    let small_fsync_ns = 2 * SMALL_FSYNC_NS;
    neighbours_of(Flood { small_fsync_ns, ..flood(barriers, 1) });
}

#[test]
fn removals_of_large_files_delay_nobody() {
    neighbours_of(flood(removals, 2));
}

/// The same on a disk that serves what waits by its place, all classes alike: the log lies before all data, and who writes more and more
/// behind what was served last must let it pass. What goes home for a barrier, a batch or a checkpoint does not, and is little.
#[test]
fn no_flood_keeps_the_log_from_a_disk_that_serves_by_place() {
    let floods: [(Body, u64); 5] = [
        (buffered_writes, 8),
        (synced_appends, 16),
        (relaxed_batches, 2),
        (barriers, 1),
        (removals, 2),
    ];
    for (body, threads) in floods {
        let small_fsync_ns = 2 * SMALL_FSYNC_NS;
        neighbours_of(Flood { small_fsync_ns, order: Order::ByPlace, ..flood(body, threads) });
    }
}
