//! What the tests of single workloads share. Each uses a part of it.
#![allow(dead_code)]

use std::sync::OnceLock;

use weir_sim::engine::Engine;
use weir_sim::explore::{Case, Failure, Limits, Tally, explore, prepare};
use weir_sim::fault::{Fault, FaultKind, FaultPlan};
use weir_sim::image::Image;
use weir_sim::model::Model;
use weir_sim::op::{Amid, At, Commit, Op, Sync, Target};
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
    let start = prepare(&Engine, &settings, before).expect("a new volume");
    explored_from(start, seed, limits, settings, ops, faults)
}

/// The same, from what [`prepare`] has answered.
pub fn explored_from(
    (image, model): (Image, Model),
    seed: u64,
    limits: Limits,
    settings: Settings,
    ops: Vec<Op>,
    faults: FaultPlan,
) -> (Tally, Result<(), Failure>) {
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

/// A file of so many pages, each an extent of its own, with the number of the page as its content's.
pub fn scattered(path: &str, pages: u64) -> Vec<Op> {
    let page = |number: u64| {
        let (target, offset) = (Target::Path(path.to_owned()), number * 2 * 4096);
        Op::Write { target, offset, length: 4096, tag: 1000 + number as u32 }
    };
    let create = Op::Create { path: path.to_owned(), permissions: 0o644 };
    std::iter::once(create).chain((0..pages).map(page)).collect()
}

/// `outer` happens to a file `/a` of six extents, each of which takes an operation of its own, and before each `step`th lock that it takes, somebody
/// begins `inner`. Then the file gets longer. What was found, and how many of `inner` ran amid it.
pub fn amid_a_cut(outer: &Op, inner: &[Op], step: usize) -> (Tally, Result<(), Failure>) {
    let a = || Target::Path("/a".to_owned());
    let mut before = scattered("/a", 6);
    before.push(Op::Create { path: "/b".to_owned(), permissions: 0o644 });
    let write =
        Op::Write { target: Target::Path("/b".to_owned()), offset: 0, length: 9000, tag: 2 };
    before.push(write);
    let settings = Settings { cut_extents: Some(1), ..Settings::SMALL };
    let mut all = Tally::default();
    for lock in (0..).step_by(step) {
        let amid = Amid { first: At::Lock(lock), back: None };
        // Whoever is to lose its name meanwhile is held open.
        let open = Op::Open { path: "/a".to_owned(), slot: 1 };
        let first = if inner.iter().all(Op::is_neutral) { Op::Writeback } else { open };
        let ops = vec![
            first,
            Op::Overlap { outer: Box::new(outer.clone()), amid, inner: inner.to_vec() },
            Op::Truncate { target: a(), size: 13 * 4096 },
            Op::Read { target: a(), offset: 0, length: 13 * 4096 },
            Op::Sync(Sync::All),
        ];
        let limits = Limits { outcomes_per_point: 3, recrash_one_in: 32, ..Limits::default() };
        let (tally, result) =
            explored(limits, settings.clone(), &before, ops, FaultPlan::default());
        all.add(&tally);
        if result.is_err() || tally.overlapped == 0 {
            return (all, result);
        }
    }
    unreachable!("locks without end");
}

/// Extents of the file of [`after_a_cut`]: with large attributes before them, and others behind, they lie in two nodes of the tree, of which opening the
/// volume reads one.
pub const MANY_EXTENTS: u64 = 250;

/// A file `/a` of many extents is cut to `size` bytes on a disk that fails `times` reads after so many others, while no more than `extents` of them
/// go at a time, and then `ops` happen to it.
pub fn after_a_cut(
    size: u64,
    (after, times): (u64, u64),
    extents: Option<usize>,
    ops: impl IntoIterator<Item = Op>,
) -> (Tally, Result<(), Failure>) {
    static START: OnceLock<(Image, Model)> = OnceLock::new();
    let cut = Op::Truncate { target: Target::Path("/a".to_owned()), size };
    let ops = std::iter::once(cut).chain(ops).collect();
    let settings = Settings { volume_blocks: 512, cut_extents: extents, ..Settings::SMALL };
    let limits = Limits { outcomes_per_point: 2, states_per_case: 30, ..Limits::default() };
    let fault = Fault { times, ..Fault::once(FaultKind::ReadError, after) };
    let start = START.get_or_init(|| {
        let mut before = scattered("/a", MANY_EXTENTS);
        before.push(Op::Create { path: "/z".to_owned(), permissions: 0o644 });
        for (path, count) in [("/a", 2), ("/z", 6)] {
            before.extend((0..count).map(|number| Op::SetXattr {
                path: path.to_owned(),
                name: format!("user.{number}"),
                length: 4000,
                tag: 1,
                mode: weir::XattrMode::Set,
            }));
        }
        prepare(&Engine, &settings, &before).expect("a new volume")
    });
    explored_from(start.clone(), 1, limits, settings, ops, FaultPlan::new([fault]))
}

/// A batch cuts a file `/a` to `size` bytes amid call `call` of what brings its last page home. That page has a home, and the log holds what is
/// written there. The second answer is what to do, on a volume where the first was done.
pub fn a_batch_that_cuts_amid_writing_in_place(size: u64, call: u32) -> (Vec<Op>, Vec<Op>) {
    let a = || Target::Path("/a".to_owned());
    let write = |offset, length, tag| Op::Write { target: a(), offset, length, tag };
    let create = Op::Create { path: "/a".to_owned(), permissions: 0o644 };
    let parts = vec![write(16_500, 3000, 3), Op::Truncate { target: a(), size }];
    let inner = vec![Op::Batch { parts, commit: Commit::Relaxed }];
    let ops = vec![
        Op::Checkpoint,
        write(16_400, 3_000, 2),
        Op::Sync(Sync::Full(a())),
        Op::Overlap { outer: Box::new(Op::Checkpoint), amid: Amid::call(call), inner },
        Op::Sync(Sync::All),
    ];
    (vec![create, write(0, 20_000, 1), Op::Sync(Sync::All)], ops)
}
