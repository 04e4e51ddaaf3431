//! What a volume holds for somebody (blocks promised, pages counted as dirty, log space, blocks that nothing says are free) is given back,
//! whatever has failed: many cases, and hardly a crash in each. How a case ends is looked at in every one.

use weir_sim::explore::Limits;
use weir_sim::{SimOptions, SimReport, Workload, run};

/// At least so many `states`, about one of each case.
fn cases(workload: Workload, states: u64) -> SimReport {
    let limits = Limits {
        outcomes_per_point: 1,
        recrash_one_in: 0,
        go_on_one_in: 0,
        lie_one_in: 0,
        kill_one_in: 0,
        states_per_case: 1,
        ..Limits::default()
    };
    run(&SimOptions { seed: 7, states, workload, shrink: false, limits, ..SimOptions::default() })
}

#[test]
fn nothing_is_held_when_a_volume_was_closed() {
    let report = cases(Workload::Random, 400);
    assert!(report.finding.is_none(), "{:#?}", report.finding);
}

#[test]
fn nothing_is_held_when_a_volume_was_closed_whose_disk_had_reported_errors() {
    let report = cases(Workload::Faults, 1000);
    assert!(report.finding.is_none(), "{:#?}", report.finding);
}
