//! Tickets for several times as much as the log holds: they slow down before it is full.
//!
//! Submitting a ticket waits for nothing, so it could fill the log at the speed of memory; and there everybody waits until a whole
//! checkpoint has made room. Instead those who come when it is nearly full are left to threads that wait, and what empties it
//! is asked for long before.

use super::*;
use std::collections::VecDeque;
use weir::SyncTicket;

/// New files of a page each, two and a half times what the log holds, and how many tickets are in flight.
const FILES: u64 = 20_000;
const DEPTH: usize = 1024;
/// What a ticket may take behind so many others.
const TICKET_NS: u64 = 10 * FLUSH_NS;

fn run(seed: u64) -> BTreeMap<&'static str, Waits> {
    let time = Time::default();
    let ticker = time.start();
    let (stage, servers) = prepare(&time, 16 * MIB);
    let stage = Arc::new(stage);
    // What makes names is slowed down by itself: they are there before.
    let page = vec![9; PAGE as usize];
    for number in 0..FILES {
        stage.file(&format!("/new{number}")).write_at(0, &page).expect("write");
    }
    while stage.volume.background_step(BackgroundWork::Checkpoint).expect("checkpoint") {}
    let before = stage.volume.stats();
    let threads = start(&stage, seed, &[(1, small_fsyncs)]);
    let mut in_flight = VecDeque::new();
    for number in 0..FILES {
        let file = stage.file(&format!("/new{number}"));
        let submitted_ns = time.now_ns();
        let submit = || file.fsync_async(0..PAGE, SyncKind::Full);
        let ticket = stage.timed("ticket submission", (PROMPT_NS, &[]), submit).expect("ticket");
        in_flight.push_back((submitted_ns, ticket));
        if in_flight.len() == DEPTH {
            end_of_oldest(&stage, &mut in_flight);
        }
    }
    while !in_flight.is_empty() {
        end_of_oldest(&stage, &mut in_flight);
    }
    stage.over.store(true, SeqCst);
    for thread in threads {
        thread.join().expect("no thread panics");
    }
    let after = stage.volume.stats();
    let checkpoints = after.checkpoints - before.checkpoints;
    let delays = after.log_delay_us.count() - before.log_delay_us.count();
    println!("{checkpoints} checkpoints, {delays} delays, {:?}", stage.disk.served());
    assert!(checkpoints >= 2, "the log was emptied several times: {checkpoints} checkpoints");
    assert!(delays > 0, "somebody was slowed down");
    assert_eq!(after.log_stalls, before.log_stalls, "somebody waited for a checkpoint");
    end(&time, ticker, stage, servers)
}

/// Waits for the oldest of the tickets. They end about in the order of submission.
fn end_of_oldest(stage: &Stage, in_flight: &mut VecDeque<(u64, SyncTicket)>) {
    let Some((submitted_ns, ticket)) = in_flight.pop_front() else { return };
    ticket.wait().expect("durable");
    let took_ns = stage.time.now_ns() - submitted_ns;
    stage.note("ticket", (submitted_ns, took_ns), took_ns.saturating_sub(TICKET_NS));
}

#[test]
fn tickets_slow_down_before_the_log_is_full() {
    let seed = environment("STALL_SEED", 1);
    let waits = scheduled(seed, move || run(seed));
    let late = report(&waits);
    assert!(late.is_empty(), "{late:#?}");
}
