//! A big fsync on a disk that serves requests in the order of their places: the log lies before all data, so its frames would wait for as
//! long as more of the big file is on its way behind the last that was served. Whoever sends it, sync or flusher, lets them pass.

use super::*;

/// Requests that may be on their way when a small fsync comes: two rounds of 8 MiB of the big one.
const BEFORE: u64 = 16;

fn run(seed: u64) -> BTreeMap<&'static str, Waits> {
    let big_bytes = environment("STALL_MIB", 1024) * MIB;
    let time = Time::default();
    let ticker = time.start();
    let disk_bytes = 4 * big_bytes + 512 * MIB;
    let (mut stage, servers) = prepare_on(&time, big_bytes, disk_bytes, Order::ByPlace);
    stage.small_fsync_ns = SMALL_FSYNC_NS + BEFORE * WRITE_NS;
    let stage = Arc::new(stage);
    let threads = start(&stage, seed, &[(1, small_fsyncs), (2, small_fsyncs), (3, names)]);
    time.sleep(100_000_000);
    let before = stage.disk.served();
    stage.timed(BIG, (u64::MAX / 2, &[]), || stage.big.fsync()).expect("fsync");
    let after = stage.disk.served();
    stage.over.store(true, SeqCst);
    for thread in threads {
        thread.join().expect("no thread panics");
    }
    println!("{before:?} {after:?}");
    assert!(after.bytes - before.bytes > big_bytes / 2, "most of the big file was written");
    end(&time, ticker, stage, servers)
}

#[test]
fn the_data_of_a_big_fsync_lets_frames_pass_that_lie_before_it() {
    let seed = environment("STALL_SEED", 1);
    let waits = scheduled(seed, move || run(seed));
    let late = report(&waits);
    assert!(waits[BIG].worst_ns > 10 * SMALL_FSYNC_NS, "small ones came meanwhile");
    assert!(late.is_empty(), "{late:#?}");
}
