//! The log against a device that loses, tears and refuses: what was acknowledged is found again,
//! what is found is a prefix, and nothing old is ever taken for new.

use super::replay::{KEPT_RECORD_BYTES, Progress, Recovered, ReplayStart, recover};
use super::test_device::*;
use super::waiter::calls;
use super::*;
use crate::cache::page::PagePool;
use crate::device::IoClass;
use crate::device::buffer::AlignedBuf;
use crate::format::checksum;
use crate::format::record::Record;
use std::sync::atomic::AtomicUsize;

/// What the superblock would say of a log that began at `start`.
pub(super) fn replay_start(start: &LogStart) -> ReplayStart {
    ReplayStart {
        point: start.point,
        epoch: start.epoch,
        epoch_first_sequence: start.point.sequence,
        replay_epoch: 0,
        durable_lsn: start.next_lsn - 1,
        next_lsn: start.next_lsn,
    }
}

pub(super) fn recover_log(
    device: &FaultyDevice,
    log_blocks: u64,
    start: &ReplayStart,
) -> Result<Recovered> {
    recover(device, &geometry(log_blocks), start, KEPT_RECORD_BYTES, &mut |_: Progress| ())
}

/// Numbers of the operations found, which `append_number` wrote; checks their payload.
pub(super) fn numbers(device: &FaultyDevice, recovered: &Recovered) -> Vec<u64> {
    let mut found = Vec::new();
    recovered
        .replay_payloads(device, &|_| true, &mut |_| (), &mut |frame| {
            for record in frame.records() {
                match record? {
                    Record::Put { key, .. } => found.push(key.offset),
                    Record::Payload { inode, index, .. } => {
                        let page = frame.payload(index).unwrap();
                        assert!(page.iter().all(|&byte| byte == inode as u8));
                    }
                    _ => {}
                }
            }
            Ok(())
        })
        .unwrap();
    found
}

pub(super) fn append_now(log: &Log, mut op: OpRecords) -> Lsn {
    let admission = log.admit(op.blocks(), AdmissionClass::Background).unwrap();
    log.append(&mut op, admission).unwrap()
}

pub(super) fn small_pool() -> PagePool {
    PagePool::new(512 * BLOCK_BYTES)
}

#[test]
fn one_caller_pays_one_write_and_one_flush() {
    let device = FaultyDevice::new(1024);
    let log = open(&device, 256, &START);
    let pool = small_pool();
    for number in 1..=20 {
        let lsn = append_now(&log, operation(&pool, number, 100, 1));
        assert_eq!(lsn, number);
        log.commit(lsn).unwrap();
        assert_eq!(device.counts(), (number as usize, number as usize));
        assert_eq!(log.durable_lsn(), lsn);
    }
    log.commit(20).unwrap();
    assert_eq!(device.counts(), (20, 20));
    assert_eq!(pool.in_use_pages(), 0, "the log gives pages back");
    let stats = log.stats().snapshot();
    assert_eq!((stats.frames, stats.flushes, stats.payload_blocks), (20, 20, 20));
    assert_eq!((stats.commits, stats.commits_per_flush.count()), (20, 20));
}

#[test]
fn acknowledged_operations_survive_and_what_survives_is_a_prefix() {
    for seed in 0..3000 {
        let mut random = Random(seed);
        let log_blocks = [64, 65, 100, 256][random.below(4) as usize];
        let device = FaultyDevice::with(log_blocks + 72, random.below(2) == 0, true);
        let pool = small_pool();
        let mut start = START;
        let mut super_start = replay_start(&start);
        for _generation in 0..4 {
            let log = open(&device, log_blocks, &start);
            // Operations since the superblock, by LSN, and the last acknowledged.
            let base = start.next_lsn;
            let mut appended: Vec<u64> = Vec::new();
            let mut released = 0;
            // In a small ring there may be no room for another attempt: the log shuts down.
            let mut refused_writes = false;
            let acknowledged = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(base - 1));
            for _ in 0..random.below(40) {
                let number = base + appended.len() as u64;
                let pages = random.below(5);
                let op = operation(&pool, number, random.below(3000) as usize, pages);
                if let Ok(admission) = log.admit(op.blocks(), AdmissionClass::Foreground) {
                    let mut op = op;
                    match log.append(&mut op, admission) {
                        Ok(lsn) => assert_eq!(lsn, number),
                        Err(error) => {
                            assert!(matches!(error, Error::Shutdown(_)) && refused_writes);
                            break;
                        }
                    }
                    appended.push(number);
                }
                let lsn = base + appended.len() as u64 - 1;
                let ack = std::sync::atomic::Ordering::SeqCst;
                match random.below(8) {
                    0 => {
                        let committed = log.commit(lsn).is_ok();
                        if committed {
                            acknowledged.fetch_max(lsn, ack);
                        }
                    }
                    1 => {
                        let acknowledged = std::sync::Arc::clone(&acknowledged);
                        log.commit_async(
                            lsn,
                            false,
                            calls(move |result| {
                                if result.is_ok() {
                                    acknowledged.fetch_max(lsn, ack);
                                }
                            }),
                        );
                    }
                    2 => while random.below(3) > 0 && log.drive() {},
                    3 => assert!(log.write_up_to(lsn).is_ok() || refused_writes),
                    4 if random.below(4) == 0 => {
                        // A checkpoint: all that is logged is home, the superblock moves on.
                        let boundary = log.seal(2).unwrap();
                        if log.write_up_to(boundary.lsn).and_then(|()| log.flush()).is_err() {
                            break;
                        }
                        assert_eq!(log.durable_lsn(), boundary.lsn);
                        acknowledged.fetch_max(boundary.lsn, ack);
                        super_start.point = log.replay_point(boundary.lsn + 1);
                        super_start.durable_lsn = boundary.lsn;
                        super_start.next_lsn = boundary.lsn + 1;
                        log.release_before(&super_start.point);
                        released = appended.len();
                    }
                    5 if random.below(3) == 0 => {
                        let fails = (0..=random.below(2)).map(|_| random.below(2) == 0);
                        device.disk().failing_writes = fails.collect();
                        refused_writes = true;
                    }
                    _ => {}
                }
            }
            let acknowledged = acknowledged.load(std::sync::atomic::Ordering::SeqCst);
            assert!(log.durable_lsn() >= acknowledged);
            drop(log);
            device.crash(&mut random);
            let recovered = recover_log(&device, log_blocks, &super_start).unwrap();
            assert!(recovered.durable_lsn >= super_start.durable_lsn && !recovered.lost_durable());
            let found = numbers(&device, &recovered);
            let candidates = &appended[released..];
            assert!(candidates.starts_with(&found), "seed {seed}: {found:?} of {candidates:?}");
            assert!(recovered.next_lsn > acknowledged, "seed {seed}: acknowledged and lost");
            assert_eq!(recovered.next_lsn, super_start.next_lsn + found.len() as u64);
            // Recovery is repeatable.
            let again = recover_log(&device, log_blocks, &super_start).unwrap();
            assert_eq!((again.end, again.next_lsn), (recovered.end, recovered.next_lsn));
            start = recovered.continue_with(1);
            super_start = replay_start(&start);
            super_start.epoch = start.epoch;
        }
        assert_eq!(pool.in_use_pages(), 0);
    }
}

#[test]
fn frames_of_an_earlier_epoch_are_never_accepted() {
    // Two incarnations write the same sequence numbers at the same places.
    let device = FaultyDevice::new(200);
    let pool = small_pool();
    let log = open(&device, 128, &START);
    for number in 1..=3 {
        log.commit(append_now(&log, operation(&pool, number, 10, 0))).unwrap();
    }
    let mut second = START;
    second.epoch = 2;
    let found = recover_log(&device, 128, &replay_start(&second)).unwrap();
    assert_eq!((found.frame_count(), found.next_lsn), (0, 1));
    assert_eq!(recover_log(&device, 128, &replay_start(&START)).unwrap().frame_count(), 3);
    let log = open(&device, 128, &second);
    log.commit(append_now(&log, operation(&pool, 1, 10, 0))).unwrap();
    let found = recover_log(&device, 128, &replay_start(&second)).unwrap();
    assert_eq!(found.frame_count(), 1);
}

#[test]
fn frames_of_an_earlier_lap_are_never_accepted() {
    let device = FaultyDevice::new(200);
    let pool = small_pool();
    let log = open(&device, 64, &START);
    for number in 1..=500 {
        log.commit(append_now(&log, operation(&pool, number, 10, number % 3))).unwrap();
        let point = log.replay_point(number + 1);
        log.release_before(&point);
        let mut start = replay_start(&START);
        start.point = point;
        start.next_lsn = number + 1;
        start.durable_lsn = number;
        assert_eq!(recover_log(&device, 64, &start).unwrap().frame_count(), 0);
    }
}

#[test]
fn crash_between_frame_and_flush_keeps_a_prefix() {
    let pool = small_pool();
    let mut lengths = std::collections::BTreeSet::new();
    for seed in 0..200 {
        let device = FaultyDevice::new(200);
        let log = open(&device, 128, &START);
        for number in 1..=6 {
            let lsn = append_now(&log, operation(&pool, number, 10, 1));
            log.write_up_to(lsn).unwrap();
        }
        assert_eq!((device.counts(), log.durable_lsn()), ((6, 0), 0));
        device.crash(&mut Random(seed));
        let recovered = recover_log(&device, 128, &replay_start(&START)).unwrap();
        let found = numbers(&device, &recovered);
        assert_eq!(found, (1..=found.len() as u64).collect::<Vec<_>>());
        lengths.insert(found.len());
    }
    assert!(lengths.len() >= 4, "{lengths:?}");
}

#[test]
fn a_failing_write_is_retried_further_on_and_recovery_finds_it() {
    let pool = small_pool();
    for stored in [[false, false], [true, false], [false, true], [true, true]] {
        for pages in [0, 3, 20] {
            let device = FaultyDevice::new(300);
            let log = open(&device, 200, &START);
            log.commit(append_now(&log, operation(&pool, 1, 10, 0))).unwrap();
            device.disk().failing_writes = stored.to_vec();
            log.commit(append_now(&log, operation(&pool, 2, 10, pages))).unwrap();
            // With and without a frame after it.
            let recovered = recover_log(&device, 200, &replay_start(&START)).unwrap();
            assert_eq!(numbers(&device, &recovered), [1, 2]);
            log.commit(append_now(&log, operation(&pool, 3, 10, 0))).unwrap();
            let recovered = recover_log(&device, 200, &replay_start(&START)).unwrap();
            assert_eq!(numbers(&device, &recovered), [1, 2, 3]);
            assert_eq!(log.stats().snapshot().write_retries, 2);
        }
    }
}

#[test]
fn three_failing_writes_shut_the_log_down() {
    let device = FaultyDevice::new(300);
    let pool = small_pool();
    let log = open(&device, 200, &START);
    let lsn = append_now(&log, operation(&pool, 1, 10, 0));
    device.disk().failing_writes = vec![false; 3];
    assert!(matches!(log.commit(lsn), Err(Error::Shutdown(_))));
    let mut op = operation(&pool, 2, 10, 0);
    let admission = log.admit(op.blocks(), AdmissionClass::Foreground).unwrap();
    assert!(matches!(log.append(&mut op, admission), Err(Error::Shutdown(_))));
    assert_eq!(log.fill().admitted_blocks, 0);
}

#[test]
fn a_failed_flush_is_sticky_and_everybody_hears_of_it() {
    let device = FaultyDevice::new(300);
    let pool = small_pool();
    let log = open(&device, 200, &START);
    let first = append_now(&log, operation(&pool, 1, 10, 0));
    log.commit(first).unwrap();
    let second = append_now(&log, operation(&pool, 2, 10, 0));
    let heard = Arc::new(std::sync::Mutex::new(Vec::new()));
    for lsn in [second, first] {
        let heard = Arc::clone(&heard);
        log.commit_async(
            lsn,
            false,
            calls(move |result| {
                heard.lock().unwrap().push((lsn, result.is_ok()));
            }),
        );
    }
    device.disk().failing_flushes = 1;
    assert!(matches!(log.commit(second), Err(Error::Shutdown(_))));
    while log.drive() {}
    assert_eq!(*heard.lock().unwrap(), [(first, true), (second, false)]);
    assert!(matches!(log.commit(second), Err(Error::Shutdown(_))));
    assert!(matches!(log.flush(), Err(Error::Shutdown(_))));
    assert!(matches!(log.wait_durable(second, None), Err(Error::Shutdown(_))));
    assert_eq!(log.commit(first), Ok(()));
    assert!(log.shutdown_reason().is_some());
}

#[test]
fn corrupted_bytes_never_panic_and_never_invent_operations() {
    let pool = small_pool();
    let device = FaultyDevice::new(200);
    let log = open(&device, 128, &START);
    for number in 1..=12 {
        log.commit(append_now(&log, operation(&pool, number, 700, number % 3))).unwrap();
    }
    let image = device.disk().stable.clone();
    for seed in 0..4000 {
        let mut random = Random(seed);
        let copy = FaultyDevice::new(200);
        let mut bytes = image.clone();
        for _ in 0..=random.below(3) {
            // Half of the changes hit what is most sensitive: headers.
            let block = LOG_START + random.below(40);
            let range = if random.below(2) == 0 { 128 } else { 4096 };
            let within = random.below(range);
            bytes[(block * 4096 + within) as usize] ^= 1 << random.below(8);
        }
        copy.disk().stable = bytes;
        if let Ok(recovered) = recover_log(&copy, 128, &replay_start(&START)) {
            let found = numbers(&copy, &recovered);
            assert_eq!(found, (1..=found.len() as u64).collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_device_error_while_reading_is_an_error_and_not_the_end_of_the_log() {
    let pool = small_pool();
    let device = FaultyDevice::new(200);
    let log = open(&device, 128, &START);
    log.commit(append_now(&log, operation(&pool, 1, 10, 0))).unwrap();
    device.disk().failing_reads = 1;
    assert!(matches!(recover_log(&device, 128, &replay_start(&START)), Err(Error::Io(_))));
    assert_eq!(recover_log(&device, 128, &replay_start(&START)).unwrap().frame_count(), 1);
}

#[test]
fn data_that_did_not_arrive_cuts_the_log_before_the_frame_that_names_it() {
    let pool = small_pool();
    let device = FaultyDevice::new(300);
    let log = open(&device, 200, &START);
    let home = LOG_START + 200;
    let data = AlignedBuf::from_slice(&[9; BLOCK_BYTES]);
    append_now(&log, operation(&pool, 1, 10, 0));
    log.commit(1).unwrap();
    let mut op = operation(&pool, 2, 10, 0);
    op.wrote(home, &[checksum(&data)]);
    log.write_up_to(append_now(&log, op)).unwrap();
    log.write_up_to(append_now(&log, operation(&pool, 3, 10, 0))).unwrap();
    let recovered = recover_log(&device, 200, &replay_start(&START)).unwrap();
    assert_eq!((numbers(&device, &recovered), recovered.frames_cut), (vec![1], 2));
    // Once the block is freed, its content does not matter any more.
    let mut op = operation(&pool, 4, 10, 0);
    op.free(home, 1);
    log.write_up_to(append_now(&log, op)).unwrap();
    let recovered = recover_log(&device, 200, &replay_start(&START)).unwrap();
    assert_eq!(numbers(&device, &recovered), [1, 2, 3, 4]);
    device.write(home * 4096, &[&data], IoClass::Writeback, false).unwrap();
    let recovered = recover_log(&device, 200, &replay_start(&START)).unwrap();
    assert_eq!(recovered.frames_cut, 0);
}

#[test]
fn a_batch_survives_as_a_whole_or_not_at_all() {
    let pool = small_pool();
    let mut outcomes = std::collections::BTreeSet::new();
    for seed in 0..300 {
        let device = FaultyDevice::new(300);
        let log = open(&device, 200, &START);
        let before = append_now(&log, operation(&pool, 1, 10, 0));
        let mut parts: Vec<OpRecords> =
            (2..=4).map(|number| operation(&pool, number, 500, 5)).collect();
        let blocks = parts.iter().map(OpRecords::blocks).sum();
        let admission = log.admit(blocks, AdmissionClass::Foreground).unwrap();
        assert_eq!(log.append_batch(&mut parts, admission).unwrap(), 4);
        log.write_up_to(append_now(&log, operation(&pool, 5, 10, 0))).unwrap();
        assert!(before == 1 && device.counts().0 == 4);
        device.crash(&mut Random(seed));
        let recovered = recover_log(&device, 200, &replay_start(&START)).unwrap();
        let found = numbers(&device, &recovered);
        assert!([vec![], vec![1], vec![1, 2, 3, 4, 5]].contains(&found), "{found:?}");
        outcomes.insert(found);
    }
    assert_eq!(outcomes.len(), 3);
}

#[test]
fn forced_writes_replace_the_flush_only_when_nothing_else_needs_it() {
    let pool = small_pool();
    let device = FaultyDevice::with(300, true, true);
    let log = open(&device, 200, &START);
    log.commit(append_now(&log, operation(&pool, 1, 10, 1))).unwrap();
    assert_eq!((device.counts(), device.disk().fua_writes), ((1, 0), 1));
    log.note_data_written();
    log.commit(append_now(&log, operation(&pool, 2, 10, 1))).unwrap();
    assert_eq!((device.counts(), device.disk().fua_writes), ((2, 1), 1));
    log.write_up_to(append_now(&log, operation(&pool, 3, 10, 1))).unwrap();
    log.commit(append_now(&log, operation(&pool, 4, 10, 1))).unwrap();
    assert_eq!((device.counts(), device.disk().fua_writes), ((4, 2), 1));
    log.commit(append_now(&log, operation(&pool, 5, 10, 1))).unwrap();
    assert_eq!((device.counts(), device.disk().fua_writes), ((5, 2), 2));
    assert_eq!(log.durable_lsn(), 5);
}

#[test]
fn a_disk_without_a_volatile_cache_is_never_flushed() {
    let pool = small_pool();
    let device = FaultyDevice::with(300, false, false);
    let log = open(&device, 200, &START);
    log.note_data_written();
    log.commit(append_now(&log, operation(&pool, 1, 10, 1))).unwrap();
    log.flush().unwrap();
    assert_eq!((device.counts(), log.durable_lsn()), ((1, 0), 1));
}

#[test]
fn a_long_queue_is_written_without_a_flush() {
    let pool = PagePool::new(2048 * BLOCK_BYTES);
    let device = FaultyDevice::new(4200);
    let log = open(&device, 4096, &START);
    for number in 1..=60 {
        append_now(&log, operation(&pool, number, 10, 10));
        while log.drive() {}
    }
    let (writes, flushes) = device.counts();
    assert!(writes >= 2 && flushes == 0, "{writes} {flushes}");
    assert!(log.fill().queued_blocks <= WRITE_OUT_BLOCKS);
    assert!(log.fill().used_blocks > 0);
}

#[test]
fn frames_are_awaited_where_somebody_wants_them_durable_and_not_where_the_queue_grew_long() {
    let pool = PagePool::new(2048 * BLOCK_BYTES);
    let device = FaultyDevice::new(4200);
    let log = open(&device, 4096, &START);
    let counts = |log: &Log| {
        let stats = log.stats().snapshot();
        (stats.frames, stats.frames_awaited)
    };
    for number in 1..=60 {
        append_now(&log, operation(&pool, number, 10, 10));
        while log.drive() {}
    }
    log.write_up_to(append_now(&log, operation(&pool, 61, 10, 1))).unwrap();
    let (unawaited, awaited) = counts(&log);
    assert!(unawaited >= 2 && awaited == 0, "{unawaited} {awaited}");
    log.commit(append_now(&log, operation(&pool, 62, 10, 1))).unwrap();
    assert_eq!(counts(&log), (unawaited + 1, 1));
    // What is on the device needs a flush, and no frame.
    let lsn = append_now(&log, operation(&pool, 63, 10, 1));
    log.write_up_to(lsn).unwrap();
    log.commit(lsn).unwrap();
    assert_eq!(counts(&log), (unawaited + 2, 1));
}

#[test]
fn admission_refuses_the_foreground_first_and_dropping_gives_back() {
    let device = FaultyDevice::new(300);
    let log = open(&device, 100, &START);
    let mut half = log.admit(50, AdmissionClass::Foreground).unwrap();
    assert!(log.admit(1, AdmissionClass::Foreground).is_err());
    let background = log.admit(10, AdmissionClass::Background).unwrap();
    assert_eq!((log.fill().admitted_blocks, log.fill().writers), (60, 2));
    let part = half.split(20);
    assert_eq!((log.fill().admitted_blocks, log.fill().writers), (60, 3));
    drop(part);
    assert_eq!((half.blocks(), log.fill().admitted_blocks), (30, 40));
    half.join(background);
    assert_eq!((log.fill().admitted_blocks, log.fill().writers), (40, 1));
    drop(half);
    assert_eq!((log.fill().admitted_blocks, log.fill().writers), (0, 0));
    let pool = small_pool();
    let mut op = operation(&pool, 1, 10, 3);
    let all = log.admit(90, AdmissionClass::Background).unwrap();
    let none = log.admit(0, AdmissionClass::Background).unwrap();
    assert!(matches!(log.append(&mut op, none), Err(Error::Invalid(_))));
    drop(all);
    let mut huge = operation(&pool, 1, 10, 25);
    let enough = log.admit(30, AdmissionClass::Foreground).unwrap();
    assert!(matches!(log.append(&mut huge, enough), Err(Error::Invalid(_))));
    assert_eq!(log.last_lsn(), 0);
}

#[test]
fn watching_does_not_ask_for_durability() {
    let device = FaultyDevice::new(300);
    let pool = small_pool();
    let log = open(&device, 200, &START);
    let lsn = append_now(&log, operation(&pool, 1, 10, 0));
    assert_eq!(log.wait_durable(lsn, Some(1)), Ok(false));
    assert_eq!(device.counts(), (0, 0));
    log.commit_async(lsn, false, calls(|result| result.unwrap()));
    assert_eq!(log.wait_durable(lsn, None), Ok(true));
}

#[test]
fn threads_share_flushes_and_nobody_is_forgotten() {
    const THREADS: u64 = 8;
    const EACH: u64 = 300;
    let device = FaultyDevice::new(9000);
    let log = Arc::new(open(&device, 8192, &START));
    log.start_thread().unwrap();
    let called = Arc::new(AtomicUsize::new(0));
    let last_called = Arc::new(AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (log, device) = (&log, &device);
            let (called, last_called) = (&called, &last_called);
            scope.spawn(move || {
                let pool = small_pool();
                for round in 0..EACH {
                    let mut op = operation(&pool, thread * EACH + round, 50, round % 2);
                    let admission = log.admit(op.blocks(), AdmissionClass::Background).unwrap();
                    let lsn = log.append(&mut op, admission).unwrap();
                    if (thread + round) % 4 == 0 {
                        let (called, last_called) = (Arc::clone(called), Arc::clone(last_called));
                        log.commit_async(
                            lsn,
                            (thread + round) % 8 == 0,
                            calls(move |result| {
                                result.unwrap();
                                last_called.fetch_max(lsn, Ordering::SeqCst);
                                called.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                            }),
                        );
                    } else {
                        log.commit(lsn).unwrap();
                        assert!(log.durable_lsn() >= lsn);
                    }
                    if round % 100 == 99 {
                        log.flush().unwrap();
                        assert!(device.counts().1 > 0);
                    }
                }
                assert_eq!(log.wait_durable(log.last_lsn().min(1), Some(1_000_000)), Ok(true));
            });
        }
    });
    log.stop();
    assert_eq!(called.load(std::sync::atomic::Ordering::SeqCst) as u64, THREADS * EACH / 4);
    assert_eq!(log.durable_lsn(), THREADS * EACH);
    let stats = log.stats().snapshot();
    let commits = stats.commits + stats.commits_found_durable + stats.async_commits;
    assert_eq!(commits, THREADS * EACH);
    assert!(stats.flushes <= stats.commits + stats.async_commits + THREADS * EACH / 100);
    let recovered = recover_log(&device, 8192, &replay_start(&START)).unwrap();
    let mut found = numbers(&device, &recovered);
    found.sort_unstable();
    assert_eq!(found, (0..THREADS * EACH).collect::<Vec<_>>());
}
