//! The simulator finds what is wrong with broken file systems, and nothing wrong with a sound one.

use weir_sim::toy::{Toy, ToyBug};
use weir_sim::{SimOptions, SimReport, Workload, run_on};

fn run(bug: ToyBug, workload: Workload, states: u64) -> SimReport {
    let options = SimOptions { states, workload, threads: 2, ..SimOptions::default() };
    run_on(&Toy::new(bug), &options)
}

fn summary(bug: ToyBug, workload: Workload) -> String {
    let report = run(bug, workload, 50_000);
    report
        .finding
        .unwrap_or_else(|| panic!("{bug:?} is not found in {} states", report.states))
        .failure
        .summary
}

#[test]
fn a_sound_file_system_passes() {
    for workload in [Workload::Exhaustive, Workload::Random] {
        let report = run(ToyBug::None, workload, 10_000);
        assert!(report.finding.is_none(), "{workload:?}: {:#?}", report.finding);
        assert!(report.states >= 10_000);
        assert!(report.recovery_states + report.later_states > 0);
    }
}

#[test]
fn an_acknowledgement_before_the_flush_is_found() {
    for workload in [Workload::Exhaustive, Workload::Random] {
        assert!(summary(ToyBug::AcknowledgeBeforeFlush, workload).contains("history"));
    }
}

#[test]
fn accepting_torn_and_stale_records_is_found() {
    assert!(summary(ToyBug::AcceptStale, Workload::Random).contains("history"));
    assert!(summary(ToyBug::AcceptTorn, Workload::Random).contains("history"));
}

#[test]
fn a_recovery_whose_result_is_not_durable_is_found() {
    assert!(summary(ToyBug::NoFlushAtOpen, Workload::Random).contains("history"));
}

#[test]
fn losing_the_last_record_or_an_unlink_is_found() {
    summary(ToyBug::ReplayTooShort, Workload::Exhaustive);
    summary(ToyBug::ForgetUnlink, Workload::Random);
}

#[test]
fn endless_recovery_and_panics_are_found() {
    assert!(summary(ToyBug::LoopInRecovery, Workload::Random).contains("device calls"));
    assert!(summary(ToyBug::PanicOnTorn, Workload::Random).contains("a torn record"));
}

#[test]
fn a_finding_is_repeated_by_seed_and_case_and_shrinks() {
    let report = run(ToyBug::AcknowledgeBeforeFlush, Workload::Random, 100_000);
    let finding = report.finding.unwrap();
    let options = SimOptions {
        workload: Workload::Random,
        case: Some(finding.case),
        ..SimOptions::default()
    };
    let again = run_on(&Toy::new(ToyBug::AcknowledgeBeforeFlush), &options).finding.unwrap();
    assert_eq!(again.failure, finding.failure);
    // What begins with a blank only tells what an operation met.
    let count = |lines: &[String]| lines.iter().filter(|line| !line.starts_with(' ')).count();
    let (before, after) = (finding.failure.operations, finding.shrunk.unwrap().operations);
    // How far it goes depends on which outcomes are tried at each point: a half is what is promised.
    assert!(count(&after) <= (count(&before) / 2).max(3), "{before:#?}: {after:#?}");
}

#[test]
fn the_number_of_threads_changes_nothing() {
    let report = |threads| {
        let options = SimOptions { states: 5000, threads, ..SimOptions::default() };
        let report = run_on(&Toy::new(ToyBug::None), &options);
        (report.cases, report.states, report.duplicates, report.operations)
    };
    assert_eq!(report(1), report(2));
}
