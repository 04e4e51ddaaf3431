//! The shortest workloads of bugs that the simulator has found in the engine, each with what went wrong.

mod common;

use common::survives_within;
use weir::device::IoClass;
use weir::{AllocateMode, AtimePolicy, BackgroundWork, OpenFlags, Timestamp};
use weir_sim::explore::{Limits, Tally};
use weir_sim::fault::{Fault, FaultKind, FaultPlan};
use weir_sim::op::{Amid, At, Commit, Hold, Op, Sync, Target};
use weir_sim::system::Settings;

fn file() -> Target {
    Target::Path("/f".to_owned())
}

fn create() -> Op {
    Op::Create { path: "/f".to_owned(), permissions: 0o644 }
}

const fn steps(work: BackgroundWork) -> Op {
    Op::Background { work, steps: 100 }
}

/// Looks at all crash states of `ops`, closely.
fn survives(settings: Settings, ops: Vec<Op>) {
    let tally = survives_faults(settings, &[], ops, FaultPlan::default());
    assert!(tally.states > 10, "{tally:?}");
}

/// As [`survives`], on a volume where `before` was done and unmounted, and on a disk with `faults`.
fn survives_faults(settings: Settings, before: &[Op], ops: Vec<Op>, faults: FaultPlan) -> Tally {
    let limits =
        Limits { outcomes_per_point: 40, recrash_one_in: 4, go_on_one_in: 8, ..Limits::default() };
    survives_within(limits, settings, before, ops, faults)
}

/// An append that ran out of space in its midst answered with an error, but had made the file longer.
#[test]
fn an_append_that_runs_out_of_space_leaves_the_file_as_it_was() {
    let append = |tag| Op::Append { target: file(), length: 300_000, tag };
    let mut ops = vec![create()];
    ops.extend((1..4).map(append));
    ops.push(Op::Read { target: file(), offset: 0, length: 1 << 20 });
    ops.push(Op::Sync(Sync::All));
    survives(Settings::SMALL, ops);
}

/// The part of a failed append was cut off again, but the times stayed moved.
#[test]
fn an_append_that_runs_out_of_space_leaves_the_times_as_they_were() {
    let append = |tag| Op::Append { target: file(), length: 300_000, tag };
    let mut ops = vec![create()];
    ops.extend((1..3).map(append));
    let set = Timestamp { seconds: 3_878_109_090, nanoseconds: 5 };
    ops.push(Op::Utimens { path: "/f".to_owned(), atime: set, mtime: set });
    ops.extend((3..5).map(append));
    ops.push(Op::Sync(Sync::All));
    survives(Settings::SMALL, ops);
}

/// A hole took the last dirty pages; the inode counted as clean, and the size of the write before
/// was lost at unmount.
#[test]
fn a_size_survives_the_unmount_when_a_hole_takes_the_pages_that_made_it() {
    for work in [BackgroundWork::Writeback, BackgroundWork::Checkpoint] {
        let ops = vec![
            create(),
            Op::Write { target: file(), offset: 0, length: 45_056, tag: 1 },
            Op::Writeback,
            Op::Write { target: file(), offset: 45_056, length: 18_666, tag: 2 },
            Op::Allocate {
                target: file(),
                mode: AllocateMode::PunchHole,
                offset: 45_056,
                length: 161_237,
            },
            Op::Write { target: file(), offset: 0, length: 100, tag: 3 },
            steps(work),
        ];
        survives(Settings::SMALL, ops);
    }
}

/// A hole in a page that the log did not know yet logged the page, but not the size: recovery wrote it
/// behind the end of the file.
#[test]
fn a_hole_in_a_page_that_was_never_synced_leaves_nothing_behind_the_end() {
    for mode in [AllocateMode::ZeroRangeKeepSize, AllocateMode::PunchHole] {
        let ops = vec![
            create(),
            Op::Append { target: file(), length: 81, tag: 1 },
            Op::Allocate { target: file(), mode, offset: 37, length: 4096 },
            steps(BackgroundWork::Checkpoint),
            Op::Append { target: file(), length: 9000, tag: 2 },
            Op::Allocate { target: file(), mode, offset: 5000, length: 100 },
            Op::Mkdir { path: "/d".to_owned() },
            Op::Sync(Sync::Full(Target::Path("/d".to_owned()))),
        ];
        survives(Settings::SMALL, ops);
    }
}

/// `fallocate` on a small file reserves blocks behind its inline data; fsck took them for damage.
#[test]
fn reserved_blocks_behind_inline_data_are_no_damage() {
    for mode in [AllocateMode::KeepSize, AllocateMode::Extend] {
        let ops = vec![
            create(),
            Op::Write { target: file(), offset: 0, length: 100, tag: 1 },
            Op::Writeback,
            Op::Allocate { target: file(), mode, offset: 0, length: 8192 },
            Op::Checkpoint,
            Op::Write { target: file(), offset: 5000, length: 10, tag: 2 },
            Op::Sync(Sync::Data(file())),
        ];
        survives(Settings::SMALL, ops);
    }
}

/// A sync of a range behind the end of a file logged its size, and with it bytes that were not durable.
#[test]
fn a_ranged_sync_behind_the_end_exposes_nothing() {
    let ops = vec![
        create(),
        Op::Append { target: file(), length: 100, tag: 1 },
        Op::Sync(Sync::Full(file())),
        Op::Append { target: file(), length: 10, tag: 2 },
        Op::Submit { sync: Sync::Data(file()), range: 4096..8192, ticket: 1, hold: Hold::Await },
        Op::Background { work: BackgroundWork::Log, steps: 10 },
        Op::Mkdir { path: "/d".to_owned() },
        Op::Sync(Sync::Full(Target::Path("/d".to_owned()))),
    ];
    survives(Settings::SMALL, ops);
}

/// A batch that wrote to a page with data that no sync had made durable logged all of the page, but the size only up to its own
/// write: recovery found bytes behind the end of the file.
#[test]
fn a_batch_in_a_page_that_was_never_synced_leaves_nothing_behind_the_end() {
    for commit in [Commit::Sync, Commit::Relaxed] {
        let part = Op::Write { target: file(), offset: 10, length: 100, tag: 2 };
        let ops = vec![
            create(),
            Op::Append { target: file(), length: 9000, tag: 1 },
            Op::Batch { parts: vec![part], commit },
            Op::Mkdir { path: "/d".to_owned() },
            Op::Sync(Sync::Full(Target::Path("/d".to_owned()))),
        ];
        survives(Settings::SMALL, ops);
    }
}

/// A hole zeroed its first edge, and then could not read its second: it failed, and the first stayed cut.
#[test]
fn a_hole_that_cannot_read_one_of_its_edges_changes_neither() {
    let before = [
        create(),
        Op::Write { target: file(), offset: 0, length: 16_384, tag: 1 },
        Op::Sync(Sync::All),
    ];
    for mode in [AllocateMode::PunchHole, AllocateMode::ZeroRangeKeepSize] {
        let mut holes_refused = 0;
        // The first of these strike the mount, which then fails; the others nodes of the tree, and both edges.
        for after in 0..20 {
            let ops = vec![
                Op::Allocate { target: file(), mode, offset: 2000, length: 8000 },
                Op::Read { target: file(), offset: 0, length: 16_384 },
                Op::Sync(Sync::All),
            ];
            let faults = FaultPlan::new([Fault::once(FaultKind::ReadError, after)]);
            let tally = survives_faults(Settings::SMALL, &before, ops, faults);
            holes_refused += u64::from(tally.operations == 3 && tally.refused > 0);
        }
        assert!(holes_refused >= 2, "{mode:?}: {holes_refused}");
    }
}

/// A small file, whose data lay in its inode, was made longer without a write; when a range was inserted at its beginning, the
/// data stayed where it was.
#[test]
fn data_in_the_inode_moves_with_the_rest_when_a_range_is_inserted() {
    let write = Op::Write { target: file(), offset: 0, length: 28, tag: 7 };
    let grow = Op::Truncate { target: file(), size: 25_197 };
    let (mode, offset, length) = (AllocateMode::InsertRange, 0, 8192);
    let insert = Op::Allocate { target: file(), mode, offset, length };
    let sync = Op::Sync(Sync::Full(file()));
    survives(Settings::SMALL, vec![create(), write, Op::Checkpoint, grow, insert, sync]);
}

/// The sync after an untorn write found the log full; the checkpoint that made room logged when the write was made, before the
/// log had what was written: the one thing that may be there without the write.
#[test]
fn a_checkpoint_may_log_the_time_of_an_untorn_write_before_the_write() {
    let other = Target::Path("/g".to_owned());
    for fills in 10..18 {
        let set = Timestamp { seconds: 3_878_109_090, nanoseconds: 5 };
        let mut ops = vec![
            create(),
            Op::Create { path: "/g".to_owned(), permissions: 0o644 },
            Op::Utimens { path: "/f".to_owned(), atime: set, mtime: set },
        ];
        for tag in 1..=fills {
            ops.push(Op::Write { target: other.clone(), offset: 0, length: 4096, tag });
            ops.push(Op::Sync(Sync::Full(other.clone())));
        }
        ops.push(Op::Untorn { target: file(), offset: 0, length: 8 * 4096, tag: 99 });
        ops.push(Op::Sync(Sync::Data(file())));
        survives(Settings::SMALL, ops);
    }
}

/// Several files with more than a frame takes go home together, then each is synced; also when one of their writes fails.
#[test]
fn a_sync_of_everything_with_several_large_files_survives_a_crash_at_every_device_call() {
    let paths = ["/a", "/b", "/c", "/small"];
    let create = |path: &str| Op::Create { path: path.to_owned(), permissions: 0o644 };
    let write = |number: usize, tag| Op::Write {
        target: Target::Path(paths[number].to_owned()),
        offset: 4096 * number as u64,
        length: if paths[number] == "/small" { 5000 } else { 100_000 },
        tag,
    };
    let mut ops: Vec<Op> = paths.into_iter().map(create).collect();
    for round in 1..3 {
        ops.extend((0..paths.len()).map(|number| write(number, round * 10 + number as u32)));
        ops.push(Op::Sync(Sync::All));
    }
    survives(Settings::SMALL, ops.clone());
    for after in 0..12 {
        let faults = FaultPlan::new([Fault::once(FaultKind::WriteError, after)]);
        survives_faults(Settings::SMALL, &[], ops.clone(), faults);
    }
}

/// New pages of several files are written beside the frame that maps all of them; what cannot be written is made up for, of one file or of
/// all, and whatever is written with it. What it found besides: failed attempts to write frames filled the ring until nothing could empty it any
/// more; and a recovery that had to make room in the ring forgot what was not home.
#[test]
fn new_pages_of_several_files_beside_one_frame_survive_a_crash_at_every_device_call() {
    let paths = ["/a", "/b", "/c", "/small"];
    let create = |path: &str| Op::Create { path: path.to_owned(), permissions: 0o644 };
    let write = |number: usize, page: u64, tag| Op::Write {
        target: Target::Path(paths[number].to_owned()),
        offset: 4096 * page,
        length: if paths[number] == "/small" { 5000 } else { 5 * 4096 },
        tag,
    };
    let mut ops: Vec<Op> = paths.into_iter().map(create).collect();
    // New, then half of them new, then none.
    for (round, page) in [(1, 0), (2, 2), (3, 7), (4, 0)] {
        ops.extend((0..paths.len()).map(|number| write(number, page, round * 10 + number as u32)));
        ops.push(Op::Sync(Sync::All));
    }
    survives(Settings::SMALL, ops.clone());
    for after in 0..10 {
        for count in 1..4 {
            let faults = (after..after + count).map(|at| Fault::once(FaultKind::WriteError, at));
            survives_faults(Settings::SMALL, &[], ops.clone(), FaultPlan::new(faults));
        }
    }
}

/// A file was cut and grew again after a barrier, and the barrier's end told the log a size up to which nothing was durable.
#[test]
fn a_file_that_was_cut_after_a_barrier_does_not_grow_by_what_nobody_synced() {
    let write = |offset, length, tag| Op::Write { target: file(), offset, length, tag };
    let other = Op::Create { path: "/other".to_owned(), permissions: 0o644 };
    let ops = vec![
        create(),
        write(31_863, 133_195, 1),
        Op::Barrier { target: None },
        Op::Truncate { target: file(), size: 19_381 },
        write(18_526, 23_127, 2),
        other,
        Op::Sync(Sync::Full(Target::Path("/other".to_owned()))),
    ];
    survives(Settings::SMALL, ops);
}

/// Of a block that is an extent of its own that is remembered, so that it can be replaced without a look at the extent. What joins it
/// must end that.
#[test]
fn a_block_that_another_has_joined_is_not_replaced_alone() {
    survives(Settings::SMALL, common::an_extent_grows_and_is_replaced());
}

/// A sync takes others along that were closed before they were synced: what each sync has acknowledged is there, and no more is lost than before.
#[test]
fn files_that_were_closed_and_are_synced_one_by_one_are_durable_when_their_sync_returns() {
    let path = |number: u32| Target::Path(format!("/f{number}"));
    let mut ops = Vec::new();
    for number in 0..14_u32 {
        ops.push(Op::Create { path: format!("/f{number}"), permissions: 0o644 });
        ops.push(Op::Write { target: path(number), offset: 0, length: 5000, tag: number });
    }
    ops.push(Op::Sync(Sync::Full(path(3))));
    // One that was taken along changes before its own sync.
    ops.push(Op::Write { target: path(0), offset: 100, length: 100, tag: 20 });
    ops.push(Op::Unlink { path: "/f1".to_owned() });
    for number in (0..14_u32).filter(|&number| number != 1 && number != 3) {
        ops.push(Op::Sync(Sync::Full(path(number))));
    }
    survives(Settings::SMALL, ops);
}

/// A batch writes into a page and cuts off what it has written there, but not the page: that had data of an earlier write, which was not in the
/// log with the batch, although a batch settles the pages that it writes.
#[test]
fn a_page_of_which_a_batch_cuts_off_what_it_wrote_is_settled_with_it() {
    let write = |offset, length, tag| Op::Write { target: file(), offset, length, tag };
    let parts = vec![write(3839, 30_963, 2), Op::Truncate { target: file(), size: 498 }];
    for commit in [Commit::Sync, Commit::Async { ticket: 1, hold: Hold::Await }] {
        let batch = Op::Batch { parts: parts.clone(), commit };
        let ops = vec![create(), Op::Sync(Sync::All), write(0, 48, 1), batch, Op::Sync(Sync::All)];
        survives(Settings::SMALL, ops);
    }
}

/// A batch that cut a file within a hole gave that a block of zeros, also where one had been allocated.
#[test]
fn a_batch_that_cuts_within_a_hole_leaves_the_hole() {
    let batch = |size| {
        let parts = vec![Op::Truncate { target: file(), size }];
        Op::Batch { parts, commit: Commit::Sync }
    };
    let (mode, offset, length) = (AllocateMode::KeepSize, 0, 8192);
    let ops = vec![
        create(),
        Op::Write { target: file(), offset: 36_864, length: 16_384, tag: 1 },
        batch(24_234),
        Op::Allocate { target: file(), mode, offset, length },
        Op::Writeback,
        batch(5000),
    ];
    survives(Settings::SMALL, ops);
}

/// The block that a small file gets before ranges of it move moved its change time: that was found without the move.
#[test]
fn a_small_file_whose_ranges_have_not_moved_has_its_old_times() {
    let (mut lock, mut amid) = (0, 1);
    while amid > 0 {
        let (mode, offset) = (AllocateMode::InsertRange, 0);
        let insert = Op::Allocate { target: file(), mode, offset, length: 8192 };
        let (first, inner) = (At::Lock(lock), vec![Op::Sync(Sync::All)]);
        let before = [
            create(),
            Op::Write { target: file(), offset, length: 100, tag: 1 },
            Op::Sync(Sync::All),
        ];
        let amid_insert =
            Op::Overlap { outer: Box::new(insert), amid: Amid { first, back: None }, inner };
        let limits = Limits { outcomes_per_point: 3, ..Limits::default() };
        let ops = vec![amid_insert, Op::Sync(Sync::Full(file()))];
        let faults = FaultPlan::default();
        amid = survives_within(limits, Settings::SMALL, &before, ops, faults).overlapped;
        lock += 2;
    }
    assert!(lock > 20, "{lock}");
}

/// A file that was opened to be cut kept blocks that had been allocated, where it was empty.
#[test]
fn an_empty_file_that_is_opened_to_be_cut_gives_back_what_was_allocated() {
    let (mode, offset, length) = (AllocateMode::KeepSize, 0, 20_000);
    let flags = OpenFlags { truncate: true, ..OpenFlags::READ_WRITE };
    let ops = vec![
        create(),
        Op::Allocate { target: file(), mode, offset, length },
        Op::OpenWith { path: "/f".to_owned(), slot: 1, flags },
        Op::Sync(Sync::All),
    ];
    survives(Settings::SMALL, ops);
}

/// What was read after a refusal moved the access time, later than the oracle allowed: it took the time of the call that was refused.
#[test]
fn reading_after_a_refused_allocation_moves_the_access_time_then() {
    let other = || Target::Path("/g".to_owned());
    let (mode, offset, length) = (AllocateMode::ZeroRangeKeepSize, 5000, 100_000);
    let mut ops = vec![
        create(),
        Op::Write { target: file(), offset: 0, length: 110_000, tag: 1 },
        Op::Sync(Sync::All),
        Op::Create { path: "/g".to_owned(), permissions: 0o644 },
    ];
    for (bytes, tag) in [(100_000, 2), (30_000, 3), (8192, 4)] {
        ops.extend(vec![Op::Append { target: other(), length: bytes, tag }; 6]);
    }
    ops.push(Op::Allocate { target: file(), mode, offset, length });
    ops.push(Op::Sync(Sync::All));
    survives(Settings { atime: AtimePolicy::Relative, ..Settings::SMALL }, ops);
}

/// What had to fail amid another call was looked at, and that moved the access time without the oracle's knowledge.
#[test]
fn reading_after_a_call_that_had_to_fail_amid_another_moves_the_access_time() {
    let slot = || Target::Slot(1);
    let flags = OpenFlags { write: false, ..OpenFlags::READ_WRITE };
    let (mode, offset, length) = (AllocateMode::ZeroRangeKeepSize, 5000, 100);
    let first = At::Call(0);
    let ops = vec![
        create(),
        Op::Write { target: file(), offset: 0, length: 20_000, tag: 1 },
        Op::OpenWith { path: "/f".to_owned(), slot: 1, flags },
        Op::Overlap {
            outer: Box::new(Op::Sync(Sync::Full(slot()))),
            amid: Amid { first, back: None },
            inner: vec![Op::Allocate { target: slot(), mode, offset, length }],
        },
        Op::Sync(Sync::All),
    ];
    survives(Settings { atime: AtimePolicy::Strict, ..Settings::SMALL }, ops);
}

/// The oracle took a symbolic link amid a path for the end of it.
#[test]
fn a_symbolic_link_amid_a_path_is_followed() {
    let link = |path: &str, target: String| Op::Symlink { path: path.to_owned(), target };
    let make = |path: &str| Op::Create { path: path.to_owned(), permissions: 0o644 };
    let ops = vec![
        Op::Mkdir { path: "/d".to_owned() },
        link("/d/gone", "nowhere".to_owned()),
        link("/d/long", "t".repeat(300)),
        link("/d/self", "self/x".to_owned()),
        link("/l", "/d".to_owned()),
        make("/d/gone/f"),
        make("/d/long/f"),
        make("/d/self/f"),
        make("/l/f"),
        Op::Write { target: Target::Path("/l/f".to_owned()), offset: 0, length: 100, tag: 1 },
        Op::Link { from: "/l/f".to_owned(), to: "/l/g".to_owned() },
        Op::Sync(Sync::Full(Target::Path("/l/g".to_owned()))),
    ];
    survives(Settings::SMALL, ops);
}

/// What the last checkpoint could not write, and has written elsewhere, was still kept from others when the volume was closed.
#[test]
fn what_a_checkpoint_could_not_write_is_free_once_the_volume_is_closed() {
    let ops = vec![Op::Mkdir { path: "/d".to_owned() }, Op::Checkpoint];
    for after in 0..4 {
        let fault =
            Fault { class: Some(IoClass::Background), ..Fault::once(FaultKind::WriteError, after) };
        survives_faults(Settings::SMALL, &[], ops.clone(), FaultPlan::new([fault]));
    }
}

/// What an append had written before the host was full could not be taken back, since that asked for room in the log, and became durable later.
#[test]
fn an_append_on_a_full_host_is_taken_back() {
    let mut refused = 0;
    for (volume_blocks, synced) in [(2048, 4), (2048, 8), (2048, 12), (300, 2), (300, 6)] {
        for length in [100_000, 180_000, 600_000, 1_500_000] {
            for after in [0, 1, 3] {
                let settings = Settings { volume_blocks, memory_bytes: 1 << 20, ..Settings::SMALL };
                let append = |length, tag| Op::Append { target: file(), length, tag };
                let mut ops = vec![create()];
                for tag in 0..synced {
                    ops.push(append(9_000, tag));
                    ops.push(Op::Sync(Sync::Data(file())));
                }
                ops.extend((synced..synced + 5).map(|tag| append(length, tag)));
                ops.push(Op::Read { target: file(), offset: 0, length: 8 << 20 });
                ops.push(Op::Sync(Sync::Full(file())));
                let behind_log = 80..u64::MAX;
                let fault = Fault::sticky(FaultKind::WriteNoSpace, after).in_blocks(behind_log);
                refused += survives_faults(settings, &[], ops, FaultPlan::new([fault])).refused;
            }
        }
    }
    assert!(refused > 100, "{refused}");
}
