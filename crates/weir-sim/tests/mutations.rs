//! Every seeded bug of the engine is found, and within how many crash states.
#![cfg(feature = "mutations")]

mod common;

use weir::RenameMode;
use weir::device::IoClass;
use weir::mutation::{self, Mutation};
use weir_sim::explore::Limits;
use weir_sim::fault::{Fault, FaultKind, FaultPlan};
use weir_sim::op::{Amid, At, Op, Sync, Target};
use weir_sim::system::Settings;
use weir_sim::{SimOptions, Workload, run};

/// Runs until something is found; answers after how many crash states.
fn states_until_found(mutation: Mutation, workload: Workload, states: u64) -> Option<u64> {
    let options = SimOptions {
        states,
        seed: seed(mutation),
        workload,
        mutation: Some(mutation.name().to_owned()),
        threads: 2,
        shrink: false,
        limits: Limits::default(),
        ..SimOptions::default()
    };
    run(&options).finding.map(|finding| finding.after_states)
}

/// The workload that meets the bug soonest, and a generous bound.
const fn hunt(mutation: Mutation) -> (Workload, u64) {
    match mutation {
        Mutation::AcceptStaleFrame
        | Mutation::ForgetOwedPayload
        | Mutation::ForgetOrphan
        | Mutation::SkipZeroTail
        | Mutation::OverwriteUnlogged
        | Mutation::SizeBeforeData
        | Mutation::ReleaseLogEarly
        | Mutation::AcknowledgeOutOfOrder
        | Mutation::IgnoreBarrier
        | Mutation::EarlyBarrier
        | Mutation::CutBatch
        | Mutation::ReplayPartOfChain
        | Mutation::ForgetDurableFrames
        | Mutation::ForgetEarlierRuns
        | Mutation::ForgetMapped
        | Mutation::SettleNewer
        | Mutation::OweWhatIsBeside
        | Mutation::SettleUnderway
        | Mutation::CountBegun
        | Mutation::TearInPlace => (Workload::Random, 200_000),
        // Found once in some 150,000 states: a block has to be freed, taken and written within two steps of a checkpoint; an image
        // has to change between two reads.
        Mutation::ReuseBeforeCheckpoint | Mutation::TrustSecondRead => {
            (Workload::Random, 1_500_000)
        }
        Mutation::SwallowWriteError
        | Mutation::CountWithoutData
        | Mutation::ForgetWiped
        | Mutation::SkipRefusedSpace => (Workload::Faults, 200_000),
        _ => (Workload::Exhaustive, 200_000),
    }
}

/// Bugs that seed 1 meets late are hunted with one that met them within 16,000 states. When what the engine does changes, it may not any
/// more: the bounds of [`hunt`] are what they were for seed 1.
const fn seed(mutation: Mutation) -> u64 {
    match mutation {
        Mutation::TearInPlace => 3,
        Mutation::SwallowWriteError => 5,
        Mutation::TrustSecondRead => 6,
        Mutation::SettleUnderway => 7,
        Mutation::ReuseBeforeCheckpoint => 10,
        _ => 1,
    }
}

#[test]
fn without_a_mutation_the_same_workloads_are_green() {
    for workload in [Workload::Exhaustive, Workload::Random] {
        let options = SimOptions { states: 10_000, workload, threads: 2, ..SimOptions::default() };
        let report = run(&options);
        assert!(report.finding.is_none(), "{}", weir_sim::cli::text(&report, true));
    }
}

#[test]
fn every_mutation_is_found() {
    let mut missed = Vec::new();
    let has_its_own = [
        Mutation::KeepOwnExtent,
        Mutation::KeepFrameBehind,
        Mutation::ApplyOutsideGate,
        Mutation::CountBeforeChain,
        Mutation::RenameBeforeData,
    ];
    for mutation in Mutation::ALL.into_iter().filter(|bug| !has_its_own.contains(bug)) {
        let (workload, states) = hunt(mutation);
        match states_until_found(mutation, workload, states) {
            Some(after) => println!("{}: found after {after} crash states", mutation.name()),
            None => missed.push(mutation.name()),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}

/// Random workloads meet this one less than once in a million states.
#[test]
fn a_grown_extent_that_is_taken_for_one_block_is_found_by_a_workload_of_its_own() {
    let explored = || {
        let ops = common::an_extent_grows_and_is_replaced();
        common::explored(Limits::default(), Settings::SMALL, &[], ops, FaultPlan::default()).1
    };
    assert!(explored().is_ok());
    mutation::set(Some(Mutation::KeepOwnExtent));
    let found = explored();
    mutation::set(None);
    assert!(found.is_err());
}

/// The write of a frame has failed and reached the medium all the same, as has the one behind it, near the end of the ring, where only that
/// one had room left; both are written again at the start, and the next frame behind them.
#[test]
fn a_frame_that_stays_behind_one_that_moves_is_found_by_a_workload_of_its_own() {
    let sync = || Op::Sync(Sync::Data(Target::Path("/b".to_owned())));
    let write = |tag| {
        let target = Target::Path("/b".to_owned());
        Op::Write { target, offset: 0, length: 10, tag }
    };
    let explored = |seed| {
        // The first of the two begins six blocks before the ring's end.
        let mut ops: Vec<Op> = (10..35).flat_map(|tag| [write(tag), sync()]).collect();
        ops.extend(common::two_frames_at_a_time(Amid::call(0), 9000, 10));
        let fault = Fault { class: Some(IoClass::Log), ..Fault::once(FaultKind::WriteError, 0) };
        let (before, plan) = (common::two_files(), FaultPlan::new([fault.amid()]));
        common::explored_by(seed, Limits::default(), Settings::SMALL, &before, ops, plan).1
    };
    let mut found = 0;
    // One failed write in five leaves all of the frame on the medium.
    for seed in 0..16 {
        assert!(explored(seed).is_ok());
        mutation::set(Some(Mutation::KeepFrameBehind));
        found += u32::from(explored(seed).is_err());
        mutation::set(None);
    }
    assert!(found > 0);
}

/// A checkpoint comes between the log's having an operation and the running transaction's having it: one lock of all that an operation takes.
#[test]
fn an_operation_that_is_applied_a_moment_late_is_found_by_a_workload_of_its_own() {
    let explored = |lock| {
        let outer = Box::new(Op::Create { path: "/n".to_owned(), permissions: 0o644 });
        let amid = Amid { first: At::Lock(lock), back: None };
        let overlap = Op::Overlap { outer, amid, inner: vec![Op::Checkpoint] };
        let (before, ops) = (common::two_files(), vec![overlap, Op::Sync(Sync::All)]);
        let limits = Limits { outcomes_per_point: 4, ..Limits::default() };
        common::explored(limits, Settings::SMALL, &before, ops, FaultPlan::default()).1
    };
    let mut found = 0;
    for lock in 0..40 {
        assert!(explored(lock).is_ok());
        mutation::set(Some(Mutation::ApplyOutsideGate));
        found += u32::from(explored(lock).is_err());
        mutation::set(None);
    }
    assert!(found > 0);
}

/// Data that travels beside a frame cannot be written, and while it is tried somebody raises a barrier: what makes up for the data lies in the
/// barrier's open chain, which replay takes as a whole or not at all.
#[test]
fn a_frame_that_counts_before_the_chain_it_needs_is_found_by_a_workload_of_its_own() {
    let at = |path: &str| Target::Path(path.to_owned());
    let write = |path, length, tag| Op::Write { target: at(path), offset: 0, length, tag };
    let behind_the_ring = 24 + Settings::SMALL.log_blocks..u64::MAX;
    let explored = |seed| {
        let outer = Box::new(Op::Sync(Sync::Full(at("/a"))));
        let inner = vec![write("/b", 200_000, 8), Op::Barrier { target: None }];
        let ops = vec![write("/a", 9000, 7), Op::Overlap { outer, amid: Amid::call(0), inner }];
        let settings = Settings { beside_from_pages: Some(1), ..Settings::SMALL };
        let fault = Fault::once(FaultKind::WriteError, 0).in_blocks(behind_the_ring.clone());
        let plan = FaultPlan::new([Fault { class: Some(IoClass::Beside), ..fault }]);
        common::explored_by(seed, Limits::default(), settings, &common::two_files(), ops, plan).1
    };
    let mut found = 0;
    // One failed write in five leaves all of the data on the medium.
    for seed in 0..8 {
        assert!(explored(seed).is_ok());
        mutation::set(Some(Mutation::CountBeforeChain));
        found += u32::from(explored(seed).is_err());
        mutation::set(None);
    }
    println!("{found} of 8");
    assert!(found > 0);
}

/// A new file takes the place of an old one, and nobody syncs it; another one's sync makes the rename durable.
#[test]
fn a_rename_before_its_data_is_found_by_a_workload_of_its_own() {
    let at = |path: &str| Target::Path(path.to_owned());
    let explored = |length| {
        let create = |path: &str| Op::Create { path: path.to_owned(), permissions: 0o644 };
        let (from, to) = ("/n".to_owned(), "/a".to_owned());
        let ops = vec![
            create("/n"),
            Op::Append { target: at("/n"), length, tag: 7 },
            Op::Rename { from, to, mode: RenameMode::Replace },
            Op::Sync(Sync::Full(at("/b"))),
            create("/m"),
            Op::Sync(Sync::Full(at("/m"))),
        ];
        let (before, limits) = (common::two_files(), Limits::default());
        common::explored(limits, Settings::SMALL, &before, ops, FaultPlan::default()).1
    };
    for length in [10, 7000, 14 * 4096] {
        assert!(explored(length).is_ok());
        mutation::set(Some(Mutation::RenameBeforeData));
        let found = explored(length);
        mutation::set(None);
        assert!(found.is_err(), "{length}");
    }
}
