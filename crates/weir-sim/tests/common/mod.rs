//! What the tests of single workloads share. Each uses a part of it.
#![allow(dead_code)]

use weir_sim::engine::Engine;
use weir_sim::explore::{Case, Failure, Limits, Tally, explore, prepare};
use weir_sim::fault::FaultPlan;
use weir_sim::op::{Amid, Op, Sync, Target};
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
    let (tally, result) = explored(limits, settings, before, ops, faults);
    assert!(result.is_ok(), "{:#?}", result.err());
    tally
}

/// The same, and what was found.
pub fn explored(
    limits: Limits,
    settings: Settings,
    before: &[Op],
    ops: Vec<Op>,
    faults: FaultPlan,
) -> (Tally, Result<(), Failure>) {
    explored_by(1, limits, settings, before, ops, faults)
}

/// The same, for this seed.
pub fn explored_by(
    seed: u64,
    limits: Limits,
    settings: Settings,
    before: &[Op],
    ops: Vec<Op>,
    faults: FaultPlan,
) -> (Tally, Result<(), Failure>) {
    let (image, model) = prepare(&Engine, &settings, before).expect("a new volume");
    let case = Case {
        name: "test".to_owned(),
        seed,
        settings,
        image,
        model,
        ops,
        faults,
        silent_faults: false,
        limits,
    };
    explore(&Engine, &case)
}

/// Two scattered pages go home together, so that each is an extent of its own; another joins the second one, which then is written anew,
/// again with a page that is far away.
pub fn an_extent_grows_and_is_replaced() -> Vec<Op> {
    let file = || Target::Path("/f".to_owned());
    let page =
        |number: u64, tag| Op::Write { target: file(), offset: number * 4096, length: 4096, tag };
    vec![
        Op::Create { path: "/f".to_owned(), permissions: 0o644 },
        page(10, 1),
        page(20, 2),
        Op::Writeback,
        page(21, 3),
        Op::Writeback,
        page(20, 4),
        page(40, 5),
        Op::Writeback,
        Op::Sync(Sync::All),
        Op::Read { target: file(), offset: 0, length: 41 * 4096 },
    ]
}

/// Two callers sync what each has written (so many bytes), the second while call `amid` of the first is under way, and somebody goes on.
pub fn two_frames_at_a_time(amid: Amid, first_bytes: u64, second_bytes: u64) -> Vec<Op> {
    let write = |path: &str, length: u64, tag| {
        let (target, offset) = (Target::Path(path.to_owned()), 100);
        Op::Write { target, offset, length, tag }
    };
    let sync = |path: &str| Op::Sync(Sync::Data(Target::Path(path.to_owned())));
    vec![
        write("/a", first_bytes, 2),
        Op::Overlap {
            outer: Box::new(sync("/a")),
            amid,
            inner: vec![write("/b", second_bytes, 3), sync("/b")],
        },
        write("/a", 50, 4),
        sync("/a"),
        Op::Read { target: Target::Path("/b".to_owned()), offset: 0, length: 20_000 },
    ]
}

/// What [`two_frames_at_a_time`] begins with.
pub fn two_files() -> Vec<Op> {
    let create = |path: &str| Op::Create { path: path.to_owned(), permissions: 0o644 };
    let write = |path: &str| {
        let (target, offset, length, tag) = (Target::Path(path.to_owned()), 0, 9000, 1);
        Op::Write { target, offset, length, tag }
    };
    vec![create("/a"), write("/a"), create("/b"), write("/b"), Op::Sync(Sync::All)]
}
