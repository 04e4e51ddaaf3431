//! What the tests of single workloads share.

use weir_sim::engine::Engine;
use weir_sim::explore::{Case, Limits, Tally, explore, prepare};
use weir_sim::fault::FaultPlan;
use weir_sim::op::Op;
use weir_sim::system::Settings;

/// Executes `ops` on a volume where `before` was done and unmounted, on a disk with `faults`, and looks at the crash states.
#[track_caller]
pub fn survives_within(
    limits: Limits,
    settings: Settings,
    before: &[Op],
    ops: Vec<Op>,
    faults: FaultPlan,
) -> Tally {
    let (image, model) = prepare(&Engine, &settings, before).expect("a new volume");
    let case = Case {
        name: "test".to_owned(),
        seed: 1,
        settings,
        image,
        model,
        ops,
        faults,
        silent_faults: false,
        limits,
    };
    let (tally, result) = explore(&Engine, &case);
    assert!(result.is_ok(), "{:#?}", result.err());
    tally
}
