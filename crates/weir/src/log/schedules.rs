//! Writers, flushers, callbacks and the log threads under the deterministic scheduler: no wake-up is
//! lost (a schedule in which somebody waits for ever is a deadlock, which the scheduler reports), and nobody is
//! told before the flush.
//!
//! They are in the library that is built for the scheduler, and not in its unit tests: `tests/shuttle.rs` runs them, and the library
//! is compiled once for all that goes under the scheduler.

#![allow(clippy::wildcard_imports)] // A test of the module above, though not built as one.

use super::test_device::{FaultyDevice, START, open, operation};
use super::waiter::calls;
use super::*;
use crate::cache::page::PagePool;
use crate::format::BLOCK_BYTES;
use crate::sync::atomic::AtomicUsize;
use shuttle::scheduler::Scheduler;
use shuttle::{Config, Runner};

const CALLERS: u64 = 4;

/// Appends one operation and waits for it in one of the ways there are.
fn caller(log: &Log, device: &FaultyDevice, number: u64, called: &Arc<AtomicUsize>, fails: bool) {
    let pool = PagePool::new(4 * BLOCK_BYTES);
    let mut op = operation(&pool, number, 10, number % 2);
    let admission = log.admit(op.blocks(), AdmissionClass::Background).unwrap();
    let Ok(lsn) = log.append(&mut op, admission) else {
        assert!(fails);
        called.fetch_add(1, Ordering::SeqCst);
        return;
    };
    match number % 4 {
        0 | 1 => {
            let result = log.commit(lsn);
            assert!(fails || result.is_ok());
            assert!(result.is_err() || device.counts().1 > 0, "told before any flush");
            assert!(result.is_err() || log.durable_lsn() >= lsn);
            called.fetch_add(1, Ordering::SeqCst);
        }
        2 => {
            let called = Arc::clone(called);
            log.commit_async(
                lsn,
                true,
                calls(move |result| {
                    assert!(fails || result.is_ok());
                    called.fetch_add(1, Ordering::SeqCst);
                }),
            );
        }
        _ => {
            let result = log.write_up_to(lsn).and_then(|()| log.flush());
            assert!(fails || result.is_ok());
            called.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// What the device refuses.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Refuses {
    Nothing,
    /// The first flush: the log shuts down.
    AFlush,
    /// The first two writes, one of which it stores all the same: frames move.
    Writes,
}

fn scenario(with_thread: bool, refuses: Refuses) {
    let fails = refuses == Refuses::AFlush;
    let device = FaultyDevice::new(300);
    if fails {
        device.disk().failing_flushes = 1;
    }
    if refuses == Refuses::Writes {
        device.disk().failing_writes = vec![true, false];
    }
    let log = Arc::new(open(&device, 200, &START));
    if with_thread {
        log.start_thread().unwrap();
    }
    let called = Arc::new(AtomicUsize::new(0));
    let callers: Vec<_> = (0..CALLERS)
        .map(|number| {
            let (log, device, called) =
                (Arc::clone(&log), Arc::clone(&device), Arc::clone(&called));
            crate::sync::spawn("caller", move || caller(&log, &device, number, &called, fails))
                .unwrap()
        })
        .collect();
    for thread in callers {
        thread.join().unwrap();
    }
    if with_thread {
        log.stop();
    }
    while log.drive() {}
    assert_eq!(called.load(Ordering::SeqCst) as u64, CALLERS);
    assert_eq!(log.callbacks_pending(), 0);
}

struct NoTime;

impl crate::sync::Clock for NoTime {
    fn realtime_ns(&self) -> i64 {
        0
    }
    fn monotonic_ns(&self) -> u64 {
        0
    }
    fn sleep_us(&self, _duration_us: u64) {
        shuttle::thread::yield_now();
    }
}

/// Two who write frames and two who let them pass. Time stands still, so nobody goes on because it is over: somebody who is not woken is
/// a deadlock.
fn passing() {
    let underway = Arc::new(underway::Underway::default());
    let (begun, ended) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let write_frames = {
        let (underway, begun, ended) = (underway.clone(), begun.clone(), ended.clone());
        move || {
            for _ in 0..2 {
                underway.pass(|| {
                    begun.fetch_add(1, Ordering::SeqCst);
                    ended.fetch_add(1, Ordering::SeqCst);
                });
            }
        }
    };
    let let_pass = move || {
        for _ in 0..2 {
            let on_their_way = begun.load(Ordering::SeqCst);
            let _ = underway.let_pass(&NoTime, underway::FRAME_US);
            assert!(ended.load(Ordering::SeqCst) >= on_their_way);
        }
    };
    let frames = (0..2).map(|_| crate::sync::spawn("frames", write_frames.clone()).unwrap());
    let data = (0..2).map(|_| crate::sync::spawn("data", let_pass.clone()).unwrap());
    for thread in frames.chain(data).collect::<Vec<_>>() {
        thread.join().unwrap();
    }
}

/// Runs every scenario under `scheduler`.
pub fn explore<S: Scheduler + 'static>(scheduler: impl Fn() -> S) {
    let scenarios = [Refuses::Nothing, Refuses::AFlush, Refuses::Writes];
    for (with_thread, refuses) in scenarios.into_iter().flat_map(|it| [(true, it), (false, it)]) {
        let mut config = Config::new();
        // Shuttle's atomics are large, and the log has hundreds of them in its histograms.
        config.stack_size = 1 << 20;
        Runner::new(scheduler(), config).run(move || scenario(with_thread, refuses));
    }
    Runner::new(scheduler(), Config::new()).run(passing);
}
