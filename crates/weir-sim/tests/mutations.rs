//! Every seeded bug of the engine is found, and within how many crash states.
#![cfg(feature = "mutations")]

mod common;

use weir::mutation::{self, Mutation};
use weir_sim::explore::Limits;
use weir_sim::fault::FaultPlan;
use weir_sim::system::Settings;
use weir_sim::{SimOptions, Workload, run};

/// Runs until something is found; answers after how many crash states.
fn states_until_found(mutation: Mutation, workload: Workload, states: u64) -> Option<u64> {
    let options = SimOptions {
        states,
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
        Mutation::SwallowWriteError | Mutation::CountWithoutData => (Workload::Faults, 200_000),
        _ => (Workload::Exhaustive, 200_000),
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
    for mutation in Mutation::ALL.into_iter().filter(|bug| *bug != Mutation::KeepOwnExtent) {
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
