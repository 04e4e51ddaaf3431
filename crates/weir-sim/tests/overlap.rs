//! Operations that run amid the device calls of others: that they really do, and that errors strike them there.

mod common;

use common::{
    a_batch_that_cuts_amid_writing_in_place, survives_within, two_files, two_frames_at_a_time,
};
use weir::device::IoClass;
use weir::{AllocateMode, BackgroundWork, RenameMode};
use weir_sim::explore::{Limits, Tally};
use weir_sim::fault::{Fault, FaultKind, FaultPlan};
use weir_sim::op::{Amid, At, Commit, HandOver, Hold, Op, Sync, Target};
use weir_sim::system::Settings;
use weir_sim::{SimOptions, SimReport, Workload};

fn at(path: &str) -> Target {
    Target::Path(path.to_owned())
}

fn create(path: &str) -> Op {
    Op::Create { path: path.to_owned(), permissions: 0o644 }
}

fn write(path: &str, offset: u64, length: u64, tag: u32) -> Op {
    Op::Write { target: at(path), offset, length, tag }
}

fn allocate(mode: AllocateMode, offset: u64, length: u64) -> Op {
    Op::Allocate { target: at("/a"), mode, offset, length }
}

const fn frames() -> Op {
    Op::Background { work: BackgroundWork::Frames, steps: 3 }
}

fn fsync(path: &str) -> Op {
    Op::Sync(Sync::Full(at(path)))
}

fn amid(outer: Op, at: u32, inner: Vec<Op>) -> Op {
    Op::Overlap { outer: Box::new(outer), amid: Amid::call(at), inner }
}

/// Executes `ops` on a volume with a file `/a` of five pages, and looks at the crash states.
fn survives(ops: Vec<Op>, faults: FaultPlan) -> Tally {
    let before = [create("/a"), write("/a", 0, 20_000, 1), Op::Sync(Sync::All)];
    let limits = Limits { recrash_one_in: 8, ..Limits::default() };
    survives_within(limits, Settings::SMALL, &before, ops, faults)
}

#[test]
fn ranges_are_inserted_zeroed_and_taken_out_amid_a_flush() {
    let inner = vec![
        allocate(AllocateMode::InsertRange, 4096, 8192),
        write("/a", 6000, 3000, 3),
        allocate(AllocateMode::ZeroRange, 20_000, 20_000),
        allocate(AllocateMode::CollapseRange, 0, 4096),
        frames(),
    ];
    let count = inner.len() as u64;
    let ops = vec![write("/a", 100, 5000, 2), amid(fsync("/a"), 1, inner), fsync("/a")];
    let tally = survives(ops, FaultPlan::default());
    assert_eq!(tally.overlapped, count, "{tally:?}");
}

#[test]
fn a_batch_waits_for_a_flush_of_its_own_amid_the_writing_of_data() {
    for outer in [Op::Writeback, Op::Checkpoint] {
        let parts = vec![create("/b"), write("/b", 0, 9000, 3)];
        let batch = Op::Batch { parts, commit: Commit::Sync };
        let ops = vec![write("/a", 0, 20_000, 2), amid(outer.clone(), 0, vec![batch])];
        let tally = survives(ops, FaultPlan::default());
        // A checkpoint begins with a sync.
        let expected = u64::from(matches!(outer, Op::Writeback));
        assert!(tally.overlapped >= expected, "{tally:?}");
    }
}

#[test]
fn a_batch_cuts_a_file_amid_the_writing_of_its_last_page_in_place() {
    let mut cut_amid = 0;
    for size in [100, 17_000, 19_000, 21_000] {
        for call in 0..6 {
            let (before, ops) = a_batch_that_cuts_amid_writing_in_place(size, call);
            let limits = Limits { recrash_one_in: 8, ..Limits::default() };
            let plan = FaultPlan::default();
            cut_amid += survives_within(limits, Settings::SMALL, &before, ops, plan).overlapped;
        }
    }
    assert!(cut_amid >= 20, "{cut_amid}");
}

/// Files go home, each in a round of its own, one while the next is on its way; amid the call `at` of this, a file that somebody makes
/// becomes durable, in a frame with everything that was in the log by then.
fn somebody_syncs_amid_rounds(at: u32) -> Vec<Op> {
    let (sync, range, hold) = (Sync::Full(self::at("/z")), 0..u64::MAX, Hold::Await);
    let submit = Op::Submit { sync, range, ticket: 1, hold };
    let inner = vec![create("/z"), write("/z", 0, 5000, 2), submit, frames()];
    let files = ["/a", "/b", "/c", "/d", "/e"];
    let mut ops: Vec<Op> =
        files.iter().flat_map(|path| [create(path), write(path, 0, 5000, 2)]).collect();
    ops.extend([amid(Op::Writeback, at, inner), Op::Sync(Sync::All)]);
    ops
}

/// Rounds of one file, two of them on their way at a time.
#[test]
fn a_frame_that_is_flushed_amid_rounds_names_no_page_that_is_on_its_way() {
    let settings = Settings { round_pages: Some(1), ..Settings::SMALL };
    let (mut amid, mut states) = (0, 0);
    for at in 0..6 {
        let ops = somebody_syncs_amid_rounds(at);
        let tally =
            survives_within(Limits::default(), settings.clone(), &[], ops, FaultPlan::default());
        amid += tally.overlapped;
        states += tally.states;
    }
    assert!(amid >= 20 && states > 200, "{amid} amid, {states} states");
}

/// One of two rounds fails, or both, for once or for good: what the other has written counts, and what failed stays dirty.
#[test]
fn errors_strike_rounds_that_are_on_their_way_together() {
    let settings = Settings { round_pages: Some(1), ..Settings::SMALL };
    let (mut struck, mut refused) = (0, 0);
    for after in 0..8 {
        for kind in [FaultKind::WriteError, FaultKind::WriteNoSpace] {
            for fault in [Fault::once(kind, after), Fault::sticky(kind, after)] {
                let fault = Fault { class: Some(IoClass::Writeback), ..fault };
                let ops = somebody_syncs_amid_rounds(2);
                let plan = FaultPlan::new([fault]);
                let tally = survives_within(Limits::default(), settings.clone(), &[], ops, plan);
                struck += tally.faults;
                refused += tally.refused;
            }
        }
    }
    assert!(struck >= 20 && refused >= 20, "{struck} struck, {refused} refused");
}

/// Of the calls amid which they hand over to each other, every one.
fn handing_over() -> impl Iterator<Item = Amid> {
    (0..4).flat_map(|call| {
        let back = [None, Some(At::Call(0)), Some(At::Call(1)), Some(At::Lock(100))];
        back.into_iter().map(move |back| Amid { first: At::Call(call), back })
    })
}

/// The frame of one caller is on its way, and another one writes the next beside it, in either order, and shares the flush.
#[test]
fn two_frames_on_their_way_at_a_time_survive_in_whatever_order_they_get_there() {
    let mut all = Tally::default();
    for beside_from_pages in [None, Some(1)] {
        let settings = Settings { beside_from_pages, ..Settings::SMALL };
        for amid in handing_over() {
            for (first_bytes, second_bytes) in [(10, 10), (5000, 10), (10, 9000)] {
                let ops = two_frames_at_a_time(amid, first_bytes, second_bytes);
                let limits = Limits { recrash_one_in: 8, ..Limits::default() };
                let before = two_files();
                let faults = FaultPlan::default();
                all.add(&survives_within(limits, settings.clone(), &before, ops, faults));
            }
        }
    }
    assert!(all.joined >= 20 && all.overlapped >= 40, "{all:?}");
}

/// What one caller does, and what another one does meanwhile, which begins before each `step`th lock that the first takes.
fn before_every_lock(outer: &Op, inner: &[Op], step: usize) -> (Tally, u32) {
    let mut all = Tally::default();
    for lock in (0..).step_by(step) {
        let amid = Amid { first: At::Lock(lock), back: None };
        let overlap = Op::Overlap { outer: Box::new(outer.clone()), amid, inner: inner.to_vec() };
        let ops = vec![write("/a", 5000, 6000, 2), overlap, fsync("/a"), write("/b", 0, 10, 7)];
        let limits = Limits { outcomes_per_point: 4, recrash_one_in: 32, ..Limits::default() };
        let tally =
            survives_within(limits, Settings::SMALL, &two_files(), ops, FaultPlan::default());
        all.add(&tally);
        if tally.overlapped == 0 {
            return (all, lock);
        }
    }
    unreachable!("locks without end");
}

/// Whatever is changed: a checkpoint, a sync of everything, or a read is begun before the change takes one of its locks, and goes on until it
/// has to wait for it.
#[test]
fn checkpoints_syncs_and_reads_may_begin_before_any_lock_that_a_change_takes() {
    let path = |path: &str| path.to_owned();
    let batch = |commit| {
        let parts = vec![create("/n"), write("/n", 0, 5000, 3), Op::Unlink { path: path("/b") }];
        Op::Batch { parts, commit }
    };
    let ticket = Commit::Async { ticket: 9, hold: Hold::Await };
    let changes = [
        write("/a", 3000, 20_000, 3),
        Op::Truncate { target: at("/a"), size: 5000 },
        Op::Truncate { target: at("/a"), size: 50_000 },
        allocate(AllocateMode::Extend, 4096, 50_000),
        allocate(AllocateMode::PunchHole, 1000, 9000),
        allocate(AllocateMode::ZeroRange, 1000, 9000),
        allocate(AllocateMode::InsertRange, 4096, 8192),
        allocate(AllocateMode::CollapseRange, 4096, 4096),
        Op::CopyRange {
            from: at("/a"),
            from_offset: 4096,
            to: at("/b"),
            to_offset: 8192,
            length: 4096,
        },
        create("/n"),
        Op::Unlink { path: path("/b") },
        Op::Rename { from: path("/a"), to: path("/b"), mode: RenameMode::Replace },
        Op::Rename { from: path("/a"), to: path("/b"), mode: RenameMode::Exchange },
        Op::Link { from: path("/a"), to: path("/n") },
        Op::SetXattr {
            path: path("/a"),
            name: path("user.x"),
            length: 3000,
            tag: 3,
            mode: weir::XattrMode::Set,
        },
        batch(Commit::Sync),
        batch(Commit::Relaxed),
        batch(ticket),
    ];
    for (number, change) in changes.iter().enumerate() {
        let read = Op::Read { target: at("/a"), offset: 100, length: 40_000 };
        for inner in [Op::Checkpoint, Op::Sync(Sync::All), read] {
            let (tally, locks) = before_every_lock(change, &[inner], 1 + number % 2);
            assert!(locks > 3 && tally.overlapped > 3, "{change}: {locks} locks, {tally:?}");
            println!("{change}: {locks} locks, {} states", tally.states);
        }
    }
}

/// A sync of one file, or of everything, or a checkpoint, and before any of its locks somebody makes a change and syncs that.
#[test]
fn somebody_may_sync_before_any_lock_that_a_sync_takes() {
    let inner = [write("/b", 3000, 5000, 3), fsync("/b"), create("/n"), fsync("/n")];
    for (outer, step) in [(fsync("/a"), 1), (Op::Sync(Sync::All), 2), (Op::Checkpoint, 3)] {
        let (tally, locks) = before_every_lock(&outer, &inner, step);
        assert!(locks > 20 && tally.overlapped > 20, "{outer}: {locks} locks, {tally:?}");
        println!("{outer}: {locks} locks, {} states", tally.states);
    }
}

/// A file is replaced, by a rename or in a batch, before any lock that somebody else takes who opens it by its path.
#[test]
fn a_file_that_is_replaced_while_it_is_looked_up_is_there() {
    let path = |path: &str| path.to_owned();
    let rename = Op::Rename { from: path("/b"), to: path("/a"), mode: RenameMode::Replace };
    let parts = vec![Op::Unlink { path: path("/a") }, create("/a"), write("/a", 0, 5000, 3)];
    let batch = Op::Batch { parts, commit: Commit::Relaxed };
    let hand_over = Op::HandOver { target: at("/a"), range: 0..20_000, how: HandOver::Start };
    for outer in [hand_over, fsync("/a")] {
        for inner in [&rename, &batch] {
            let (tally, locks) = before_every_lock(&outer, std::slice::from_ref(inner), 1);
            assert!(locks > 5 && tally.overlapped > 5, "{outer}: {locks} locks, {tally:?}");
            println!("{outer}, {inner}: {locks} locks, {} states", tally.states);
        }
    }
}

/// Writeback of a page fails between two looks of somebody's sync at what there is to write: one at what is dirty, one at what is on its way.
#[test]
fn a_sync_finds_a_page_whose_writeback_fails_while_it_looks() {
    let (mut struck, mut states) = (0, 0);
    for lock in 0..40 {
        let (range, hold) = (0..u64::MAX, Hold::Await);
        let submit = Op::Submit { sync: Sync::Data(at("/a")), range, ticket: 1, hold };
        let amid = Amid { first: At::Call(0), back: Some(At::Lock(lock)) };
        let inner = vec![submit, frames()];
        let overlap = Op::Overlap { outer: Box::new(Op::Writeback), amid, inner };
        let ops = vec![write("/a", 5000, 6000, 2), overlap, frames(), create("/n"), fsync("/n")];
        let class = Some(IoClass::Writeback);
        let fault = Fault { class, ..Fault::once(FaultKind::WriteError, 0).amid() };
        let tally = survives(ops, FaultPlan::new([fault]));
        struck += tally.faults;
        states += tally.states;
    }
    assert!(struck >= 20 && states > 400, "{struck} struck, {states} states");
}

/// Either frame cannot be written, once, twice, or anywhere, or the data beside it, or the flush fails that was for both.
#[test]
fn errors_strike_two_frames_that_are_on_their_way_at_a_time() {
    for (kind, class) in [
        (FaultKind::WriteError, Some(IoClass::Log)),
        (FaultKind::WriteError, Some(IoClass::Beside)),
        (FaultKind::WriteError, None),
        (FaultKind::WriteNoSpace, None),
        (FaultKind::FlushError, None),
    ] {
        let mut all = Tally::default();
        for (number, amid) in handing_over().enumerate() {
            for after in 0..3 {
                for times in [1, 2, u64::MAX] {
                    let fault = Fault { class, times, ..Fault::once(kind, after).amid() };
                    let beside_from_pages = (number % 2 == 1).then_some(1);
                    let settings = Settings { beside_from_pages, ..Settings::SMALL };
                    let (first_bytes, second_bytes) =
                        [(10, 10), (5000, 10), (10, 9000)][number % 3];
                    let ops = two_frames_at_a_time(amid, first_bytes, second_bytes);
                    let limits = Limits { outcomes_per_point: 6, ..Limits::default() };
                    let plan = FaultPlan::new([fault]);
                    all.add(&survives_within(limits, settings, &two_files(), ops, plan));
                }
            }
        }
        assert!(all.faults_amid >= 5 && all.joined >= 5, "{kind:?} {class:?}: {all:?}");
    }
}

/// The error that shuts a volume down leaves open whether a batch that waited for its frame is there after a crash: the frame may be on the
/// medium although its write has failed. (Found with seed 22: the oracle took the batch for one that cannot be there.)
#[test]
fn a_batch_whose_frame_could_not_be_written_is_there_after_a_crash_or_not() {
    let mut shut_down = 0;
    for at in 0..6 {
        let batch = Op::Batch { parts: vec![create("/b")], commit: Commit::Sync };
        let error = Fault {
            kind: FaultKind::WriteError,
            after: 0,
            times: 3,
            blocks: 0..u64::MAX,
            class: Some(IoClass::Log),
            amid: true,
        };
        let ops = vec![write("/a", 0, 20_000, 2), amid(Op::Checkpoint, at, vec![batch])];
        let tally = survives(ops, FaultPlan::new([error]));
        shut_down += u64::from(tally.refused > 0);
    }
    assert!(shut_down > 0);
}

/// Every call is struck, once or from then on, of one operation amid whose calls others go on, and of those others.
#[test]
fn errors_strike_the_one_amid_whose_calls_others_go_on_and_those_others() {
    for kind in [
        FaultKind::ReadError,
        FaultKind::WriteError,
        FaultKind::WriteNoSpace,
        FaultKind::FlushError,
    ] {
        let mut all = Tally::default();
        for (outer, call) in [(fsync("/a"), 0), (fsync("/a"), 1), (Op::Writeback, 0)] {
            for after in 0..10 {
                for fault in [Fault::once(kind, after).amid(), Fault::sticky(kind, after).amid()] {
                    all.add(&survives(story(&outer, call), FaultPlan::new([fault])));
                }
            }
        }
        // Little has to be read there, and flushes are few.
        let least = match kind {
            FaultKind::ReadError => 2,
            FaultKind::FlushError => 5,
            _ => 20,
        };
        assert!(all.faults_amid >= least && all.refused >= least, "{kind:?}: {all:?}");
        assert!(all.overlapped > 100, "{kind:?}: {all:?}");
    }
}

/// What the log holds goes home, in place, while a newer version of it goes into the log and becomes durable there.
#[test]
fn a_page_that_is_logged_again_while_it_goes_home_keeps_what_was_logged_last() {
    let mut submitted = 0;
    for call in 0..10 {
        let (range, hold) = (0..u64::MAX, Hold::Await);
        let submit = Op::Submit { sync: Sync::Data(at("/a")), range, ticket: 1, hold };
        let newer = vec![write("/a", 4000, 5000, 4), submit, frames()];
        let ops = vec![
            write("/a", 3000, 3000, 3),
            fsync("/a"),
            amid(Op::Checkpoint, call, newer),
            Op::Background { work: BackgroundWork::Frames, steps: 3 },
            write("/a", 5000, 10, 5),
        ];
        submitted += survives(ops, FaultPlan::default()).overlapped;
    }
    assert!(submitted > 10, "{submitted}");
}

/// Bytes from `offset` on, which `before` may put into the log, go home, and amid call `call` of that a batch overwrites some of them.
fn a_batch_amid(outer: &Op, call: u32, (offset, before): (u64, &Op), commit: Commit) -> Vec<Op> {
    let parts = vec![write("/a", offset + 1000, 5000, 4), create("/b")];
    let batch = Op::Batch { parts, commit };
    vec![
        write("/a", offset, 3000, 3),
        before.clone(),
        amid(outer.clone(), call, vec![batch, frames()]),
        // That it is home becomes durable, and nothing newer.
        Op::Background { work: BackgroundWork::Frames, steps: 3 },
        write("/a", offset + 2000, 10, 6),
        Op::Checkpoint,
    ]
}

/// A batch that overwrites pages on their way home waits for those that move, and for none that is written in place, whatever becomes of
/// the write.
#[test]
fn a_page_that_a_batch_overwrites_while_it_goes_home_keeps_what_the_batch_wrote() {
    let home_fails = |after| Fault {
        times: 2,
        class: Some(IoClass::Background),
        ..Fault::once(FaultKind::WriteError, after).amid()
    };
    let plans = [None, Some(home_fails(0)), Some(home_fails(1))];
    // In the log and home already: in place. New, in the log or not: to a new place.
    let (in_place, new) = (3000, 100_000);
    let (logged, dirty) = (fsync("/a"), frames());
    let stories = [
        (Op::Checkpoint, (in_place, &logged)),
        (Op::Checkpoint, (new, &logged)),
        (Op::Writeback, (in_place, &dirty)),
        (Op::Writeback, (new, &dirty)),
    ];
    let (mut overlapped, mut states) = (0, 0);
    for (outer, pages) in stories {
        for (call, commit) in
            (0..8).flat_map(|call| [(call, Commit::Sync), (call, Commit::Relaxed)])
        {
            for fault in &plans {
                let ops = a_batch_amid(&outer, call, pages, commit);
                let tally = survives(ops, FaultPlan::new(fault.clone()));
                overlapped += tally.overlapped;
                states += tally.states;
            }
        }
    }
    assert!(overlapped > 120 && states > 4000, "{overlapped} amid others, {states} states");
}

/// A batch whose frame cannot be written shuts the volume down. Who reads then, in the same session, may find it.
#[test]
fn a_batch_that_shut_the_volume_down_may_be_seen_by_those_that_go_on() {
    let parts = vec![create("/c"), write("/c", 0, 5000, 5)];
    let batch = Op::Batch { parts, commit: Commit::Sync };
    let read = Op::Read { target: at("/c"), offset: 1000, length: 2000 };
    let story =
        [write("/a", 0, 12_000, 2), amid(Op::Writeback, 0, vec![batch, read]), Op::Sync(Sync::All)];
    let mut shut_down = 0;
    for after in 0..8 {
        let fault = Fault::sticky(FaultKind::WriteError, after).amid();
        shut_down += survives(story.to_vec(), FaultPlan::new([fault])).refused;
    }
    assert!(shut_down > 0);
}

/// Others write, ask for syncs, cut, shift and commit amid call `call` of `outer`; then everybody tries again.
fn story(outer: &Op, call: u32) -> Vec<Op> {
    let submit = |path: &str, ticket| {
        let (range, hold) = (0..u64::MAX, Hold::Await);
        Op::Submit { sync: Sync::Data(at(path)), range, ticket, hold }
    };
    let parts = vec![create("/c"), write("/c", 0, 5000, 5)];
    let mut inner = vec![create("/b"), write("/b", 0, 9000, 3), submit("/b", 1), frames()];
    if *outer == Op::Writeback {
        inner.push(Op::Batch { parts, commit: Commit::Sync });
    }
    inner.extend([
        // Its second edge has to be read.
        allocate(AllocateMode::ZeroRange, 5000, 9000),
        Op::Truncate { target: at("/a"), size: 9000 },
        write("/a", 4000, 200, 4),
        submit("/a", 2),
        frames(),
    ]);
    vec![
        write("/a", 0, 12_000, 2),
        amid(outer.clone(), call, inner),
        Op::Read { target: at("/a"), offset: 0, length: 20_000 },
        fsync("/a"),
        fsync("/b"),
        Op::Sync(Sync::All),
    ]
}

/// Two callers, two threads each: nothing depends on when the system lets which of them run.
#[test]
fn a_run_with_overlaps_is_the_same_every_time() {
    let result = || {
        let (workload, shrink) = (Workload::Faults, false);
        let options = SimOptions {
            seed: 7,
            states: 8000,
            workload,
            threads: 2,
            shrink,
            ..SimOptions::default()
        };
        let SimReport { cases, states, operations, overlapped, joined, refused, faults, .. } =
            weir_sim::run(&options);
        (cases, states, operations, overlapped, joined, refused, faults)
    };
    let first = result();
    assert!(first.3 > 100, "{first:?}");
    assert_eq!(first, result());
}

/// The log has room for one of them: the second waits for the first, which has been let in and is amid the writing of its data, and
/// makes no checkpoints without end meanwhile. (Found with seeds 311 and 403.)
#[test]
fn who_waits_for_log_space_that_somebody_else_has_lets_that_one_go_on() {
    let new = |path: &str, offset, length, tag| {
        let parts = vec![create(path), write(path, offset, length, tag)];
        Op::Batch { parts, commit: Commit::Sync }
    };
    let long = vec![write("/a", 0, 1763, 2), write("/a", 23_708, 169_352, 3)];
    let commit = Commit::Async { ticket: 1, hold: Hold::Await };
    let ops = vec![
        Op::Batch { parts: long, commit },
        write("/b", 12_288, 20_480, 4),
        write("/a", 193_060, 3129, 5),
        amid(Op::Sync(Sync::Data(at("/b"))), 0, vec![write("/b", 0, 28_672, 6)]),
        amid(Op::Writeback, 1, vec![new("/m", 0, 152, 7), new("/n", 1373, 24_576, 8)]),
    ];
    let mut overlapped = 0;
    for (batch_part_blocks, beside_from_pages, round_pages) in [
        (None, None, None),
        (Some(2), None, None),
        (None, Some(1), None),
        (Some(2), Some(1), None),
        (None, None, Some(1)),
        (Some(2), None, Some(1)),
        (None, Some(1), Some(1)),
        (Some(2), Some(1), Some(1)),
        (Some(4), Some(1), Some(3)),
        (Some(1), Some(1), Some(3)),
    ] {
        let settings =
            Settings { batch_part_blocks, beside_from_pages, round_pages, ..Settings::SMALL };
        let limits = Limits { outcomes_per_point: 2, ..Limits::default() };
        let plan = FaultPlan::default();
        overlapped += survives_within(limits, settings, &two_files(), ops.clone(), plan).overlapped;
    }
    assert!(overlapped > 0);
}

#[test]
fn tickets_of_overlapping_callers_are_delivered_to_one_queue() {
    let deliver = |ticket| Commit::Async { ticket, hold: Hold::Deliver };
    let parts = vec![write("/a", 0, 100_000, 2)];
    let (sync, range) = (Sync::All, 0..u64::MAX);
    let inner = vec![Op::Submit { sync, range, ticket: 2, hold: Hold::Deliver }];
    let ops = vec![amid(Op::Batch { parts, commit: deliver(1) }, 0, inner)];
    assert!(survives(ops, FaultPlan::default()).overlapped > 0);
}
