//! Two frames on their way at a time, on a device that holds up the first until the second is there.

use super::companion::{Companion, Companions, Data};
use super::test_device::*;
use super::tests::{append_now, numbers, recover_log, replay_start, small_pool};
use super::waiter::calls;
use super::*;
use crate::cache::page::{PagePool, PageRef};
use crate::format::checksum;

/// Commits `first`, and `second` while the frame of that is on its way.
fn commit_two(log: &Log, device: &FaultyDevice, first: OpRecords, second: OpRecords) {
    device.disk().hold_next_write = true;
    std::thread::scope(|scope| {
        let lsn = append_now(log, first);
        let writer = scope.spawn(move || log.commit(lsn));
        while device.disk().hold_next_write {
            std::thread::yield_now();
        }
        log.commit(append_now(log, second)).unwrap();
        writer.join().unwrap().unwrap();
    });
}

#[test]
fn who_comes_while_a_frame_is_on_its_way_writes_the_next_and_shares_its_flush() {
    let device = FaultyDevice::new(300);
    let pool = small_pool();
    let log = open(&device, 200, &START);
    for round in 0..10 {
        let (first, second) = (2 * round + 1, 2 * round + 2);
        let with_pages = |number| operation(&pool, number, 10, number % 3);
        commit_two(&log, &device, with_pages(first), with_pages(second));
        assert_eq!(device.counts(), (second as usize, round as usize + 1));
        assert_eq!(log.durable_lsn(), second);
        assert_eq!(log.stats().snapshot().frames_joined, round + 1);
        device.crash(&mut Random(round));
        let recovered = recover_log(&device, 200, &replay_start(&START)).unwrap();
        assert_eq!(numbers(&device, &recovered), (1..=second).collect::<Vec<_>>());
        log.release_before(&log.replay_point(1));
    }
}

/// Writes that fail may have reached the disk, frames may be of any length, and lie anywhere in the ring.
#[test]
fn a_frame_that_moves_takes_the_one_behind_it_along_wherever_they_are() {
    let pool = small_pool();
    let mut moved = 0;
    for position_blocks in [0, 180, 210, 220, 228, 235, 245, 248, 250, 251, 252, 253, 254, 255] {
        for failures in [vec![false], vec![true], vec![true, true], vec![true, false, true]] {
            for (first, second) in [(0, 0), (0, 2), (2, 0), (5, 20), (20, 5)] {
                let mut start = START;
                start.point.position_blocks = position_blocks;
                let device = FaultyDevice::new(400);
                let log = open(&device, 256, &start);
                device.disk().failing_writes.clone_from(&failures);
                let second = operation(&pool, 2, 10, second);
                commit_two(&log, &device, operation(&pool, 1, 10, first), second);
                assert_eq!(log.durable_lsn(), 2);
                moved += log.stats().snapshot().write_retries;
                device.crash(&mut Random(position_blocks));
                let recovered = recover_log(&device, 256, &replay_start(&start)).unwrap();
                assert_eq!(numbers(&device, &recovered), [1, 2]);
                log.commit(append_now(&log, operation(&pool, 3, 10, 1))).unwrap();
                device.crash(&mut Random(position_blocks));
                let recovered = recover_log(&device, 256, &replay_start(&start)).unwrap();
                assert_eq!(numbers(&device, &recovered), [1, 2, 3]);
                assert_eq!(pool.in_use_pages(), 0, "pages are given back");
            }
        }
    }
    assert!(moved > 200, "{moved}");
}

/// The writer's frame stays where it is, and what was wiped behind it has to be written again all the same.
#[test]
fn a_frame_that_finds_no_room_to_move_leaves_the_one_behind_it_its_place() {
    let pool = small_pool();
    for failures in [vec![false], vec![true], vec![true, true], vec![true, false, true]] {
        for (first, second) in [(0, 0), (2, 5), (5, 2)] {
            let device = FaultyDevice::new(300);
            let log = open(&device, 200, &START);
            let others = log.admit(160, AdmissionClass::Background).unwrap();
            device.disk().failing_writes.clone_from(&failures);
            let second = operation(&pool, 2, 10, second);
            commit_two(&log, &device, operation(&pool, 1, 10, first), second);
            assert_eq!(log.durable_lsn(), 2);
            drop(others);
            device.crash(&mut Random(1));
            let recovered = recover_log(&device, 200, &replay_start(&START)).unwrap();
            assert_eq!(numbers(&device, &recovered), [1, 2]);
            log.commit(append_now(&log, operation(&pool, 3, 10, 1))).unwrap();
            let recovered = recover_log(&device, 200, &replay_start(&START)).unwrap();
            assert_eq!(numbers(&device, &recovered), [1, 2, 3]);
        }
    }
}

#[test]
fn a_frame_that_cannot_be_written_anywhere_fails_who_has_joined_its_writer_too() {
    let pool = small_pool();
    let device = FaultyDevice::new(300);
    let log = open(&device, 200, &START);
    device.disk().failing_writes = vec![true];
    device.disk().hold_next_write = true;
    std::thread::scope(|scope| {
        let (log, lsn) = (&log, append_now(&log, operation(&pool, 1, 10, 0)));
        let writer = scope.spawn(move || log.commit(lsn));
        while device.disk().hold_next_write {
            std::thread::yield_now();
        }
        let lsn = append_now(log, operation(&pool, 2, 10, 0));
        // The frame of who joins, and then all that wipes that.
        device.disk().failing_writes = vec![true; 4];
        assert!(matches!(log.commit(lsn), Err(Error::Shutdown(_))));
        assert!(matches!(writer.join().unwrap(), Err(Error::Shutdown(_))));
    });
    assert_eq!(log.durable_lsn(), 0);
}

const DATA_BLOCK: u64 = 2;

fn data_page(pool: &PagePool) -> PageRef {
    let mut page = pool.alloc_zeroed().unwrap();
    // What is found is of the operation that makes up.
    page.fill(3);
    page.freeze()
}

/// Appends what makes up for its data.
struct MakesUp {
    log: Arc<Log>,
    ended: Arc<AtomicU64>,
}

impl Companion for MakesUp {
    fn end(&self, result: Result<()>) {
        result.unwrap();
        self.ended.fetch_add(1, Ordering::AcqRel);
    }
    fn make_up(&self) -> Result<Lsn> {
        let pool = small_pool();
        let page = data_page(&pool);
        let mut op = operation(&pool, 3, 10, 0);
        op.payload(3, 0, DATA_BLOCK, Some(checksum(&page)), page);
        Ok(append_now(&self.log, op))
    }
}

fn with_companion(log: &Arc<Log>, number: u64, ended: &Arc<AtomicU64>) -> OpRecords {
    let pool = small_pool();
    let page = data_page(&pool);
    let mut op = operation(&pool, number, 10, 0);
    op.wrote(DATA_BLOCK, &[checksum(&page)]);
    let owner = MakesUp { log: Arc::clone(log), ended: Arc::clone(ended) };
    op.beside(Companions::new(Data::Waits(vec![(DATA_BLOCK, vec![page])]), Box::new(owner)));
    op
}

#[test]
fn who_has_joined_sees_to_what_the_writer_owes_for_data_that_is_missing() {
    let pool = small_pool();
    for seed in 0..20 {
        let device = FaultyDevice::new(300);
        let log = Arc::new(open(&device, 200, &START));
        let ended = Arc::new(AtomicU64::new(0));
        device.disk().failing_data = true;
        let first = with_companion(&log, 1, &ended);
        commit_two(&log, &device, first, operation(&pool, 2, 10, 0));
        // Three frames that count together, and one flush at the most after each.
        assert_eq!((log.durable_lsn(), log.has_companions()), (3, false));
        assert!(log.takes_companions(), "nothing is owed any more");
        device.crash(&mut Random(seed));
        let recovered = recover_log(&device, 200, &replay_start(&START)).unwrap();
        assert_eq!(numbers(&device, &recovered), [1, 2, 3]);
        assert_eq!(ended.load(Ordering::Acquire), 0, "who has made up for it hears nothing else");
    }
}

#[test]
fn who_joins_may_have_data_beside_its_frame() {
    let pool = small_pool();
    for fails in [false, true] {
        let device = FaultyDevice::new(300);
        let log = Arc::new(open(&device, 200, &START));
        let ended = Arc::new(AtomicU64::new(0));
        device.disk().failing_data = fails;
        let second = with_companion(&log, 2, &ended);
        commit_two(&log, &device, operation(&pool, 1, 10, 0), second);
        assert_eq!(log.durable_lsn(), if fails { 3 } else { 2 });
        assert_eq!(ended.load(Ordering::Acquire), u64::from(!fails));
        assert!(log.takes_companions() && !log.has_companions());
    }
}

/// Replay has all of a chain or nothing, so what lies before it and needs something of it is not durable before its end.
#[test]
fn what_is_made_up_for_in_an_open_chain_counts_with_its_end() {
    for seed in 0..20 {
        let device = FaultyDevice::new(300);
        let log = Arc::new(open(&device, 200, &START));
        device.disk().failing_data = true;
        let waits = append_now(&log, with_companion(&log, 1, &Arc::default()));
        let told = Arc::new(AtomicU64::new(0));
        let tell = told.clone();
        let count = move |result: Result<()>| {
            result.unwrap();
            tell.fetch_add(1, Ordering::AcqRel);
        };
        log.commit_async(waits, false, calls(count));
        assert!(log.open_chain(&mut log.admit(4, AdmissionClass::Foreground).unwrap()).is_ok());
        while log.drive() {}
        log.write_up_to(waits).unwrap();
        assert!(!log.is_complete(waits));
        assert_eq!(
            log.commit(waits),
            Err(Error::WouldBlock),
            "nobody but the caller ends the chain"
        );
        log.flush().unwrap();
        assert_eq!((log.durable_lsn(), told.load(Ordering::Acquire)), (0, 0));
        device.crash(&mut Random(seed));
        let recovered = recover_log(&device, 200, &replay_start(&START)).unwrap();
        assert_eq!(numbers(&device, &recovered), [0; 0]);
        log.close_chain();
        log.commit(waits).unwrap();
        while log.drive() {}
        assert_eq!(told.load(Ordering::Acquire), 1);
        device.crash(&mut Random(seed));
        let recovered = recover_log(&device, 200, &replay_start(&START)).unwrap();
        assert_eq!(numbers(&device, &recovered), [1, 3]);
    }
}
