//! Open chains against a device that loses and tears.

use super::replay::{KEPT_RECORD_BYTES, ReplayStart, recover};
use super::test_device::*;
use super::waiter::calls;
use super::*;
use crate::cache::page::PagePool;
use crate::format::record::Record;
use std::sync::atomic::AtomicUsize;

fn start() -> ReplayStart {
    ReplayStart {
        point: START.point,
        epoch: START.epoch,
        epoch_first_sequence: START.point.sequence,
        replay_epoch: 0,
        durable_lsn: START.next_lsn - 1,
        next_lsn: START.next_lsn,
    }
}

/// Numbers of the operations that replay finds.
fn found(device: &FaultyDevice, log_blocks: u64) -> Vec<u64> {
    let recovered =
        recover(device, &geometry(log_blocks), &start(), KEPT_RECORD_BYTES, &mut |_| ()).unwrap();
    let mut numbers = Vec::new();
    let mut visit = |frame: &replay::ReplayFrame<'_>| {
        for record in frame.records() {
            if let Record::Put { key, .. } = record? {
                numbers.push(key.offset);
            }
        }
        Ok(())
    };
    recovered.replay(device, &mut |_| (), &mut visit).unwrap();
    numbers
}

fn append(log: &Log, pool: &PagePool, number: u64) -> Lsn {
    let mut op = operation(pool, number, 100, number % 3);
    let admission = log.admit(op.blocks(), AdmissionClass::Foreground).unwrap();
    log.append(&mut op, admission).unwrap()
}

fn open_chain(log: &Log) -> Lsn {
    let mut room = log.admit(4, AdmissionClass::Foreground).unwrap();
    let lsn = log.open_chain(&mut room).unwrap().unwrap();
    assert!(room.blocks() >= 3);
    lsn
}

#[test]
fn nothing_of_an_open_chain_becomes_durable() {
    let device = FaultyDevice::new(1024);
    let log = open(&device, 256, &START);
    let pool = PagePool::new(1 << 20);
    let before = append(&log, &pool, 1);
    let chain = open_chain(&log);
    assert_eq!(chain, before + 1);
    let inside = append(&log, &pool, 2);
    let told = Arc::new(AtomicUsize::new(0));
    let tell = told.clone();
    log.commit_async(
        inside,
        false,
        calls(move |result| {
            assert_eq!(result, Ok(()));
            tell.fetch_add(1, Ordering::SeqCst);
        }),
    );
    assert_eq!(log.callbacks_pending(), 1);
    // Not even when frames of it are on the disk, and flushed.
    log.write_up_to(inside).unwrap();
    log.commit(before).unwrap();
    log.flush().unwrap();
    while log.drive() {}
    assert_eq!((log.durable_lsn(), told.load(Ordering::SeqCst)), (before, 0));
    assert!(log.seal(2).is_none(), "no boundary inside of a chain");
    log.close_chain();
    while log.drive() {}
    assert_eq!(told.load(Ordering::SeqCst), 1);
    assert!(log.durable_lsn() >= chain);
    assert_eq!(log.open_chain(&mut log.admit(1, AdmissionClass::Foreground).unwrap()), Ok(None));
    assert!(log.seal(2).is_some());
    let again = open_chain(&log);
    log.close_chain();
    assert!(log.last_lsn() >= again, "the chain's LSN exists");
    assert_eq!(found(&device, 256), [1, 2]);
}

#[test]
fn a_chain_ends_with_the_last_who_closes_it() {
    let device = FaultyDevice::new(1024);
    let log = open(&device, 256, &START);
    let pool = PagePool::new(1 << 20);
    let first = open_chain(&log);
    append(&log, &pool, 1);
    let second = open_chain(&log);
    assert!(second >= first);
    log.close_chain();
    assert!(log.has_open_chain());
    let last = append(&log, &pool, 2);
    assert_eq!(log.durable_lsn(), 0);
    log.close_chain();
    log.commit(last).unwrap();
    assert_eq!(log.durable_lsn(), last);
}

#[test]
fn a_chain_can_be_joined_only_so_often() {
    let device = FaultyDevice::new(1024);
    let log = open(&device, 256, &START);
    let mut room = log.admit(4, AdmissionClass::Foreground).unwrap();
    for _ in 0..chain::MAX_JOINED {
        assert!(log.open_chain(&mut room).unwrap().is_some());
    }
    assert_eq!(log.open_chain(&mut room), Ok(None));
    for _ in 0..chain::MAX_JOINED {
        log.close_chain();
    }
    assert!(log.open_chain(&mut room).unwrap().is_some());
    assert_eq!(log.fill().admitted_blocks, 4 - 1);
}

#[test]
fn waiters_of_an_open_chain_hear_of_a_shutdown() {
    let device = FaultyDevice::new(1024);
    let log = Arc::new(open(&device, 256, &START));
    let pool = PagePool::new(1 << 20);
    open_chain(&log);
    let lsn = append(&log, &pool, 1);
    let told = Arc::new(AtomicUsize::new(0));
    let tell = told.clone();
    log.commit_async(
        lsn,
        false,
        calls(move |result| {
            assert!(matches!(result, Err(Error::Shutdown(_))));
            tell.fetch_add(1, Ordering::SeqCst);
        }),
    );
    let waiting = log.clone();
    let waiter = std::thread::spawn(move || waiting.commit(lsn));
    std::thread::yield_now();
    log.shut_down("test");
    assert!(matches!(waiter.join().unwrap(), Err(Error::Shutdown(_))));
    while log.drive() {}
    assert_eq!(told.load(Ordering::SeqCst), 1);
}

/// Random chains, commits and write-outs; a crash at any point: each chain is found whole or not at all, and what
/// is found is a prefix that holds all that was acknowledged.
#[test]
fn crash_finds_each_chain_whole_or_not_at_all() {
    let (mut cut_chains, mut whole_chains) = (0, 0);
    for seed in 0..400 {
        let mut random = Random(seed);
        let device = FaultyDevice::new(1024);
        let log = open(&device, 512, &START);
        let pool = PagePool::new(1 << 22);
        let mut next = 1;
        let mut chains: Vec<(u64, u64)> = Vec::new();
        let mut open_since = None;
        let mut holders = 0;
        // The last number that must be found.
        let mut acknowledged = 0;
        let mut number_of = std::collections::BTreeMap::from([(0, 0)]);
        for _ in 0..random.below(60) {
            match random.below(8) {
                0 if holders < 3 => {
                    open_chain(&log);
                    open_since.get_or_insert(next);
                    holders += 1;
                }
                1 if holders > 0 => {
                    log.close_chain();
                    holders -= 1;
                    if holders == 0 {
                        chains.extend(open_since.take().map(|first| (first, next)));
                    }
                }
                2 if holders == 0 => log.commit(log.last_lsn()).unwrap(),
                3 => log.write_up_to(log.last_lsn()).unwrap(),
                4 => log.flush().unwrap(),
                _ => {
                    number_of.insert(append(&log, &pool, next), next);
                    next += 1;
                }
            }
            let durable = log.durable_lsn();
            let last = number_of.range(..=durable).next_back().map_or(0, |(_, number)| *number);
            acknowledged = acknowledged.max(last);
        }
        chains.extend(open_since.map(|first| (first, u64::MAX)));
        drop(log);
        device.crash(&mut random);
        let numbers = found(&device, 512);
        let end = numbers.len() as u64 + 1;
        assert!(numbers.iter().copied().eq(1..end), "seed {seed}: a prefix");
        assert!(acknowledged < end, "seed {seed}: {acknowledged} of {end}");
        for (first, until) in chains {
            assert!(end <= first || end >= until, "seed {seed}: {first}..{until} cut at {end}");
            if first < until.min(next) {
                *(if end <= first { &mut cut_chains } else { &mut whole_chains }) += 1;
            }
        }
    }
    assert!(cut_chains > 50 && whole_chains > 50, "{cut_chains} {whole_chains}");
}
