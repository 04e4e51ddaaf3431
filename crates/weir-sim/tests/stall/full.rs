//! A volume that is nearly full, and whose big file is overwritten at random: nobody waits for room.
//!
//! Whoever overwrites takes new blocks, and the old ones are free only after the next checkpoint. So what is free is used up again and
//! again, and as often a checkpoint has to make room. It begins while there is enough left for as long as it takes.

use super::*;

/// What is left free: some seconds' worth of overwrites.
const ROOM: u64 = 48 * MIB;
/// Overwritten at a time, and how often.
const PIECE: u64 = 16 << 10;
const PAUSE_NS: u64 = 2_000_000;
/// Pieces that are handed over to writeback together.
const HANDED_OVER: u64 = 16;

/// Overwrites the big file, and hands over what it wrote, until it has used up the room several times.
fn overwrites(stage: &Stage, mut rng: Rng) {
    let piece = vec![8; PIECE as usize];
    let flags = SyncRangeFlags { write: true, nowait: true, ..SyncRangeFlags::default() };
    for number in 1..=5 * ROOM / PIECE {
        let offset = PIECE * rng.below(stage.big_bytes / PIECE);
        let write = || stage.big.write_at(offset, &piece);
        stage.timed("overwrite", (PROMPT_NS, &[]), write).expect("write");
        if number % HANDED_OVER == 0 {
            let handed_over = stage.big.sync_range(0..stage.big_bytes, flags);
            assert!(
                matches!(handed_over, Ok(()) | Err(weir::Error::WouldBlock)),
                "{handed_over:?}"
            );
        }
        stage.time.sleep(PAUSE_NS);
    }
}

/// A volume with that much room, all of whose data is home.
fn prepare_full(time: &Time, big_bytes: u64) -> (Stage, Vec<thread::JoinHandle<()>>) {
    let (stage, servers) = prepare_on(time, big_bytes, big_bytes + 448 * MIB, Order::PerClass);
    stage.big.fsync().expect("fsync");
    let fill = stage.file("/fill");
    let chunk = vec![6; MIB as usize];
    for number in 0.. {
        if stage.volume.statfs().available_blocks * PAGE <= ROOM {
            break;
        }
        fill.write_at(number * MIB, &chunk).expect("write");
        if number % 32 == 0 {
            fill.fsync().expect("fsync");
        }
    }
    fill.fsync().expect("fsync");
    while stage.volume.background_step(BackgroundWork::Checkpoint).expect("checkpoint") {}
    (stage, servers)
}

fn run(seed: u64) -> BTreeMap<&'static str, Waits> {
    let time = Time::default();
    let ticker = time.start();
    let (stage, servers) = prepare_full(&time, 96 * MIB);
    let stage = Arc::new(stage);
    let before = stage.volume.stats();
    let bodies: [(u64, Body); 3] = [(1, writes), (2, names), (3, small_fsyncs)];
    let threads = start(&stage, seed, &bodies);
    overwrites(&stage, Rng::derived(seed, 9));
    stage.over.store(true, SeqCst);
    for thread in threads {
        thread.join().expect("no thread panics");
    }
    let after = stage.volume.stats();
    let checkpoints = after.checkpoints - before.checkpoints;
    println!("{checkpoints} checkpoints, {:?}", stage.disk.served());
    assert!(checkpoints >= 4, "the room was used up several times: {checkpoints} checkpoints");
    assert_eq!(after.space_stalls, before.space_stalls, "somebody waited for room");
    end(&time, ticker, stage, servers)
}

#[test]
fn nobody_waits_for_room_on_a_volume_that_is_nearly_full_and_overwritten() {
    let seed = environment("STALL_SEED", 1);
    let waits = scheduled(seed, move || run(seed));
    let late = report(&waits);
    assert!(late.is_empty(), "{late:#?}");
}
