//! Every sequence of one and of two actions from a list of all namespace and data operations, on
//! small starting trees, each action followed by each kind of sync: bounded black-box crash testing.

use std::ops::Range;

use weir::{
    AllocateMode, BackgroundWork, FileType, OpenFlags, RenameMode, SyncRangeFlags, Timestamp,
    XattrMode,
};

use crate::op::{Amid, Commit, HandOver, Hold, Op, Sync, Target};

/// What follows an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Follow {
    /// Nothing.
    Nothing,
    /// `fsync` of the file or directory the action was about.
    Fsync,
    /// `fdatasync` of it.
    Fdatasync,
    /// `fsync` of the directory that holds it.
    FsyncDirectory,
    /// `syncfs`.
    SyncAll,
    /// A checkpoint.
    Checkpoint,
    /// Writeback, without a sync.
    Writeback,
    /// A ticket for an `fsync` of it, which ends when somebody else makes it.
    Ticket,
    /// A ticket for an `fdatasync` of its second page, and the log is driven until that has ended.
    RangedTicket,
    /// A barrier.
    Barrier,
    /// A barrier for the data of the file.
    FileBarrier,
    /// Its first pages are handed to background writeback.
    HandOver,
    /// `fsync` of it, and while the first device call of that is under way, another file is made, written, and a sync of it
    /// asked for.
    AmidFirst,
    /// The same, during the second device call: the flush, of a small sync.
    AmidSecond,
    /// During the second device call of an `fsync` of it, others cut it, make a hole in it, rename and unlink files, commit a batch,
    /// and raise a barrier.
    AmidCuts,
    /// During the second device call of an `fsync` of it, ranges of it are inserted, zeroed and taken out.
    AmidShifts,
    /// During the first device call of writeback, a batch of another file is committed and waits for its own flush.
    AmidCommit,
    /// It is synced, the log fills up, old pages go home, a partial checkpoint begins, and more goes home meanwhile.
    Pressure,
}

/// All of them.
pub const FOLLOWS: [Follow; 18] = [
    Follow::Nothing,
    Follow::Fsync,
    Follow::Fdatasync,
    Follow::FsyncDirectory,
    Follow::SyncAll,
    Follow::Checkpoint,
    Follow::Writeback,
    Follow::Ticket,
    Follow::RangedTicket,
    Follow::Barrier,
    Follow::FileBarrier,
    Follow::HandOver,
    Follow::AmidFirst,
    Follow::AmidSecond,
    Follow::AmidCuts,
    Follow::AmidShifts,
    Follow::AmidCommit,
    Follow::Pressure,
];

/// Names of the starting trees.
pub const TREES: [&str; 3] = ["small", "sparse", "empty"];

fn at(path: &str) -> Target {
    Target::Path(path.to_owned())
}

fn write(path: &str, offset: u64, length: u64) -> Op {
    Op::Write { target: at(path), offset, length, tag: 0 }
}

fn untorn(path: &str, offset: u64, length: u64) -> Op {
    Op::Untorn { target: at(path), offset, length, tag: 0 }
}

fn append(path: &str, length: u64) -> Op {
    Op::Append { target: at(path), length, tag: 0 }
}

fn truncate(path: &str, size: u64) -> Op {
    Op::Truncate { target: at(path), size }
}

fn allocate(path: &str, mode: AllocateMode, offset: u64, length: u64) -> Op {
    Op::Allocate { target: at(path), mode, offset, length }
}

fn rename(from: &str, to: &str, mode: RenameMode) -> Op {
    Op::Rename { from: from.to_owned(), to: to.to_owned(), mode }
}

fn create(path: &str) -> Op {
    Op::Create { path: path.to_owned(), permissions: 0o644 }
}

fn mkdir(path: &str) -> Op {
    Op::Mkdir { path: path.to_owned() }
}

fn link(from: &str, to: &str) -> Op {
    Op::Link { from: from.to_owned(), to: to.to_owned() }
}

fn unlink(path: &str) -> Op {
    Op::Unlink { path: path.to_owned() }
}

fn rmdir(path: &str) -> Op {
    Op::Rmdir { path: path.to_owned() }
}

fn symlink(path: &str, length: usize) -> Op {
    Op::Symlink {
        path: path.to_owned(),
        target: "target/".repeat(length / 7 + 1)[..length].to_owned(),
    }
}

fn set_xattr(path: &str, name: &str, length: u64) -> Op {
    Op::SetXattr {
        path: path.to_owned(),
        name: name.to_owned(),
        length,
        tag: 0,
        mode: XattrMode::Set,
    }
}

fn copy(from: &str, from_offset: u64, to: &str, to_offset: u64, length: u64) -> Op {
    Op::CopyRange { from: at(from), from_offset, to: at(to), to_offset, length }
}

const fn time(seconds: i64) -> Timestamp {
    Timestamp { seconds, nanoseconds: 123_456_789 }
}

/// The operations that make a starting tree. All trees have the same names, so that every action
/// makes sense on each.
pub fn tree(index: usize) -> Vec<Op> {
    let mut ops = vec![
        create("/a"),
        create("/b"),
        mkdir("/d"),
        create("/d/c"),
        mkdir("/e"),
        symlink("/l", 20),
        link("/a", "/h"),
        set_xattr("/a", "user.x", 40),
    ];
    match TREES.get(index) {
        Some(&"small") => {
            ops.extend([write("/a", 0, 6000), write("/b", 0, 100), write("/d/c", 0, 20_000)]);
        }
        Some(&"sparse") => ops.extend([
            write("/a", 50_000, 3000),
            allocate("/a", AllocateMode::KeepSize, 0, 20_000),
            write("/b", 0, 2048),
            write("/d/c", 0, 4096),
            write("/d/c", 12_288, 8000),
            allocate("/d/c", AllocateMode::Extend, 24_576, 8192),
        ]),
        _ => {}
    }
    for (tag, op) in (1..).zip(&mut ops) {
        set_tag(op, 100_000 + tag);
    }
    ops
}

/// Between the tags of two parts of a batch.
pub const PART_TAG: u32 = 1000;
/// The same, of two operations amid another.
pub const INNER_TAG: u32 = 100_000;

/// Gives the data of an operation its tag, and a ticket its number.
pub fn set_tag(op: &mut Op, value: u32) {
    if let Op::Batch { parts, commit } = op {
        for (number, part) in (1..).zip(parts) {
            set_tag(part, value + number * PART_TAG);
        }
        if let Commit::Async { ticket, .. } = commit {
            *ticket = value;
        }
    } else if let Op::Overlap { inner, .. } = op {
        for (number, op) in (1..).zip(inner) {
            set_tag(op, value + number * INNER_TAG);
        }
    } else if let Op::Write { tag, .. }
    | Op::Untorn { tag, .. }
    | Op::Append { tag, .. }
    | Op::SetXattr { tag, .. }
    | Op::Submit { ticket: tag, .. } = op
    {
        *tag = value;
    }
}

const WHITEOUT: RenameMode = RenameMode::Whiteout { uid: 3, gid: 7 };

/// Every action: one operation, or a few that belong together.
pub fn actions() -> Vec<Vec<Op>> {
    use RenameMode::{Exchange, NoReplace, Replace};
    let mut actions: Vec<Vec<Op>> = [
        create("/n"),
        create("/d/n"),
        mkdir("/m"),
        mkdir("/d/m"),
        symlink("/n", 30),
        symlink("/n", 3000),
        Op::Mknod { path: "/n".to_owned(), file_type: FileType::Fifo, rdev: 0 },
        Op::Mknod { path: "/d/n".to_owned(), file_type: FileType::Socket, rdev: 0 },
        Op::Mknod { path: "/n".to_owned(), file_type: FileType::CharDevice, rdev: 5 << 20 | 1 },
        link("/a", "/n"),
        link("/a", "/d/n"),
        link("/b", "/d/n"),
        link("/l", "/n"),
        unlink("/a"),
        unlink("/b"),
        unlink("/h"),
        unlink("/d/c"),
        unlink("/l"),
        rmdir("/e"),
        rename("/a", "/n", Replace),
        rename("/a", "/n", WHITEOUT),
        rename("/a", "/b", WHITEOUT),
        rename("/b", "/d/n", WHITEOUT),
        rename("/d", "/e", WHITEOUT),
        rename("/a", "/b", Replace),
        rename("/a", "/h", Replace),
        rename("/b", "/d/n", Replace),
        rename("/b", "/a", Replace),
        rename("/d/c", "/b", Replace),
        rename("/d", "/e", Replace),
        rename("/d", "/m", Replace),
        rename("/e", "/d/e", Replace),
        rename("/a", "/n", NoReplace),
        rename("/a", "/b", Exchange),
        rename("/b", "/d/c", Exchange),
        rename("/a", "/d", Exchange),
        rename("/d", "/e", Exchange),
        append("/b", 10),
        append("/b", 3000),
        append("/a", 5000),
        append("/d/c", 150_000),
        write("/a", 100, 100),
        write("/a", 0, 4096),
        write("/a", 4096, 4096),
        write("/d/c", 3000, 9000),
        write("/d/c", 0, 8192),
        write("/a", 100_000, 100),
        write("/a", 0, 200_000),
        write("/b", 50, 20),
        write("/b", 5000, 20),
        truncate("/a", 0),
        truncate("/a", 100),
        truncate("/a", 4096),
        truncate("/a", 8192),
        truncate("/a", 9000),
        truncate("/a", 20_000),
        truncate("/d/c", 10_000),
        truncate("/b", 50),
        truncate("/b", 3000),
        allocate("/a", AllocateMode::Extend, 6000, 10_000),
        allocate("/a", AllocateMode::KeepSize, 8192, 8192),
        allocate("/b", AllocateMode::KeepSize, 0, 8192),
        allocate("/d/c", AllocateMode::PunchHole, 4096, 8192),
        allocate("/d/c", AllocateMode::PunchHole, 1000, 6000),
        allocate("/d/c", AllocateMode::PunchHole, 100, 200),
        allocate("/d/c", AllocateMode::ZeroRange, 4096, 4096),
        allocate("/a", AllocateMode::ZeroRange, 1000, 10_000),
        allocate("/d/c", AllocateMode::ZeroRangeKeepSize, 6000, 30_000),
        allocate("/d/c", AllocateMode::CollapseRange, 4096, 4096),
        allocate("/d/c", AllocateMode::InsertRange, 4096, 8192),
        copy("/a", 0, "/b", 0, 6000),
        copy("/d/c", 3000, "/a", 1000, 9000),
        copy("/d/c", 0, "/n", 0, 4096),
        set_xattr("/a", "user.y", 10),
        set_xattr("/a", "user.x", 2000),
        set_xattr("/d", "user.z", 100),
        set_xattr("/l", "trusted.l", 3),
        Op::RemoveXattr { path: "/a".to_owned(), name: "user.x".to_owned() },
        Op::Chmod { path: "/a".to_owned(), permissions: 0o600 },
        Op::Chmod { path: "/d".to_owned(), permissions: 0o1777 },
        Op::Chown { path: "/b".to_owned(), uid: 1000, gid: 1001 },
        Op::Utimens { path: "/a".to_owned(), atime: time(1_000_000), mtime: time(-5) },
        Op::Utimens { path: "/d".to_owned(), atime: time(1_000_001), mtime: time(1 << 33) },
    ]
    .into_iter()
    .map(|op| vec![op])
    .collect();
    let open = |path: &str| Op::Open { path: path.to_owned(), slot: 1 };
    let slot = || Target::Slot(1);
    actions.extend([
        // Unlinked while open: an orphan at the crash.
        vec![open("/b"), unlink("/b")],
        vec![
            open("/d/c"),
            unlink("/d/c"),
            Op::Write { target: slot(), offset: 100, length: 9000, tag: 0 },
            Op::Sync(Sync::Full(slot())),
        ],
        vec![open("/b"), unlink("/b"), Op::Sync(Sync::All), Op::Close { slot: 1 }],
        vec![open("/b"), rename("/a", "/b", Replace), Op::Sync(Sync::All), Op::Close { slot: 1 }],
        // A file without a name, which gets one.
        vec![Op::TmpFile { dir: "/d".to_owned(), slot: 1 }],
        vec![
            Op::TmpFile { dir: "/d".to_owned(), slot: 1 },
            Op::Append { target: slot(), length: 5000, tag: 0 },
            Op::LinkSlot { slot: 1, path: "/d/n".to_owned() },
        ],
        vec![
            Op::TmpFile { dir: "/".to_owned(), slot: 1 },
            Op::Append { target: slot(), length: 50, tag: 0 },
            Op::Sync(Sync::Full(slot())),
            Op::LinkSlot { slot: 1, path: "/n".to_owned() },
            Op::Close { slot: 1 },
        ],
        // The way editors and package managers replace a file.
        vec![
            create("/n"),
            append("/n", 7000),
            Op::Sync(Sync::Full(at("/n"))),
            rename("/n", "/a", Replace),
        ],
        // And the way of those that do not sync: little data, and more than goes before the name.
        vec![create("/n"), append("/n", 7000), rename("/n", "/a", Replace)],
        vec![create("/n"), append("/n", 90_000), rename("/n", "/a", Replace)],
        // A new file with data, and a directory with a file.
        vec![create("/n"), append("/n", 4096)],
        vec![mkdir("/m"), create("/m/n"), append("/m/n", 1000)],
        // Whole pages, synced: old or new.
        vec![untorn("/a", 0, 32_768), Op::Sync(Sync::Data(at("/a")))],
        vec![untorn("/a", 0, 131_072), Op::Sync(Sync::Data(at("/a")))],
        vec![
            write("/b", 8192, 50_000),
            Op::Writeback,
            untorn("/b", 4096, 126_976),
            Op::Sync(Sync::Data(at("/b"))),
        ],
        vec![
            write("/d/c", 0, 20_480),
            Op::Sync(Sync::Data(at("/d/c"))),
            untorn("/d/c", 4096, 12_288),
            Op::Sync(Sync::Data(at("/d/c"))),
        ],
        // Data written in two ways.
        vec![append("/a", 2000), truncate("/a", 1000), append("/a", 2000)],
    ]);
    actions.extend(batches());
    actions.extend(of_handles());
    actions.extend(of_space());
    actions
}

/// Actions that are about ways to open, to hold, and to hand over.
fn of_handles() -> Vec<Vec<Op>> {
    let open = |path: &str, flags| Op::OpenWith { path: path.to_owned(), slot: 1, flags };
    let slot = || Target::Slot(1);
    let by_handle = |offset, length| Op::Write { target: slot(), offset, length, tag: 0 };
    let synced = OpenFlags { data_sync: true, ..OpenFlags::CREATE };
    let cut = OpenFlags { truncate: true, ..OpenFlags::CREATE };
    let xattr = |name: &str, length, mode| {
        let (path, name) = ("/a".to_owned(), name.to_owned());
        Op::SetXattr { path, name, length, tag: 0, mode }
    };
    let hand_over = |flags| {
        let how = HandOver::Flags(flags);
        vec![append("/a", 50_000), Op::HandOver { target: at("/a"), range: 4096..30_000, how }]
    };
    let (before, after) = (SyncRangeFlags::WAIT_BEFORE, SyncRangeFlags::WAIT_AFTER);
    vec![
        vec![open("/n", OpenFlags::CREATE_NEW), by_handle(0, 5000)],
        vec![open("/a", cut), by_handle(0, 300)],
        vec![open("/l", OpenFlags::READ)],
        // What cannot be.
        vec![open("/a", OpenFlags::CREATE_NEW), append("/a", 10)],
        vec![open("/b", OpenFlags::READ), by_handle(0, 10), append("/b", 20)],
        // Every write is durable when it returns.
        vec![open("/b", synced), by_handle(0, 300), by_handle(3000, 9000)],
        vec![open("/n", synced), Op::Append { target: slot(), length: 5000, tag: 0 }],
        vec![
            open("/d/c", synced),
            Op::CopyRange {
                from: at("/a"),
                from_offset: 0,
                to: slot(),
                to_offset: 2000,
                length: 5000,
            },
        ],
        // Held, not opened, while its name goes.
        vec![Op::Hold { path: "/b".to_owned(), slot: 1 }, unlink("/b"), by_handle(50, 9000)],
        vec![
            Op::Hold { path: "/l".to_owned(), slot: 1 },
            rename("/b", "/l", RenameMode::Replace),
            Op::Sync(Sync::All),
            Op::Close { slot: 1 },
        ],
        vec![xattr("user.y", 30, XattrMode::Create)],
        vec![xattr("user.x", 3000, XattrMode::Replace)],
        vec![xattr("user.x", 10, XattrMode::Create), xattr("user.y", 10, XattrMode::Replace)],
        hand_over(before),
        hand_over(SyncRangeFlags::WRITE | after),
        hand_over(before | SyncRangeFlags::WRITE | SyncRangeFlags::NOWAIT),
    ]
}

/// Actions that are about blocks which were allocated and not written.
fn of_space() -> Vec<Vec<Op>> {
    use AllocateMode::{
        CollapseRange, Extend, InsertRange, KeepSize, PunchHole, ZeroRange, ZeroRangeKeepSize,
    };
    let slot = || Target::Slot(1);
    let by_handle = |offset| Op::Write { target: slot(), offset, length: 5000, tag: 0 };
    let hole = |offset, length| Op::Allocate { target: slot(), mode: PunchHole, offset, length };
    vec![
        vec![allocate("/a", KeepSize, 100_000, 20_000), write("/a", 106_496, 5000)],
        vec![allocate("/b", KeepSize, 8192, 16_384), allocate("/b", PunchHole, 12_288, 4096)],
        vec![allocate("/b", KeepSize, 0, 20_000), truncate("/b", 50)],
        vec![allocate("/b", KeepSize, 0, 20_000), truncate("/b", 9000)],
        vec![allocate("/b", KeepSize, 0, 20_000), append("/b", 6000)],
        vec![
            allocate("/d/c", ZeroRange, 10_000, 60_000),
            allocate("/d/c", InsertRange, 4096, 8192),
        ],
        vec![allocate("/d/c", KeepSize, 0, 50_000), allocate("/d/c", CollapseRange, 0, 4096)],
        vec![allocate("/b", InsertRange, 0, 4096), allocate("/b", ZeroRangeKeepSize, 0, 20_000)],
        vec![allocate("/a", Extend, 0, 40_000), allocate("/a", PunchHole, 6000, 20_000)],
        // Without a name, cut in pieces, and then it gets one.
        vec![
            Op::TmpFile { dir: "/d".to_owned(), slot: 1 },
            by_handle(0),
            by_handle(16_384),
            by_handle(40_960),
            Op::Writeback,
            hole(16_384, 4096),
            Op::Truncate { target: slot(), size: 3000 },
            Op::LinkSlot { slot: 1, path: "/d/n".to_owned() },
        ],
    ]
}

fn batch(commit: Commit, parts: impl IntoIterator<Item = Op>) -> Vec<Op> {
    vec![Op::Batch { parts: parts.into_iter().collect(), commit }]
}

/// Actions that are batches.
fn batches() -> Vec<Vec<Op>> {
    use Commit::{Relaxed, Sync};
    use RenameMode::{Exchange, Replace};
    const TICKET: Commit = Commit::Async { ticket: 0, hold: Hold::Await };
    vec![
        // Parts of pages, of several files: one frame.
        batch(Sync, [write("/a", 100, 200), write("/b", 50, 20), write("/d/c", 3000, 2000)]),
        // What has to be put together with data that no sync has made durable.
        [vec![append("/b", 9000)], batch(Sync, [write("/b", 10, 100), write("/a", 4000, 200)])]
            .concat(),
        // More than a frame of the log holds, and more than is logged at all.
        batch(TICKET, [write("/a", 0, 16_384), write("/d/c", 4096, 12_000), write("/b", 0, 3000)]),
        batch(Relaxed, [write("/a", 2000, 70_000), write("/d/c", 8192, 8192)]),
        batch(Sync, (0..12).map(|page| write("/a", page * 8192 + 5, 30))),
        // Cuts, with data before and after.
        batch(TICKET, [truncate("/a", 100), write("/a", 5000, 100), truncate("/d/c", 5000)]),
        batch(Sync, [write("/a", 0, 9000), truncate("/a", 4500), write("/b", 0, 4096)]),
        // New files with data, together with what refers to them.
        batch(Sync, [create("/n"), write("/n", 0, 5000), write("/b", 0, 100)]),
        batch(Relaxed, [mkdir("/m"), create("/m/n"), write("/m/n", 0, 100), unlink("/b")]),
        batch(TICKET, [create("/n"), write("/n", 0, 50_000), rename("/n", "/a", Replace)]),
        // Names only.
        batch(Relaxed, [rename("/a", "/b", Exchange), rename("/d/c", "/n", Replace), rmdir("/e")]),
        batch(Sync, [unlink("/a"), unlink("/h"), link("/b", "/a")]),
        batch(Relaxed, [rename("/a", "/h", Replace)]),
        // Made and removed.
        batch(Sync, [create("/n"), write("/n", 0, 9000), unlink("/n"), mkdir("/m"), rmdir("/m")]),
        // Attributes and data.
        batch(
            TICKET,
            [
                Op::Chmod { path: "/a".to_owned(), permissions: 0o640 },
                write("/a", 0, 10),
                Op::Utimens { path: "/a".to_owned(), atime: time(7), mtime: time(8) },
                Op::Chown { path: "/d".to_owned(), uid: 5, gid: 6 },
            ],
        ),
        // The last part cannot be: nothing happens.
        [batch(Sync, [write("/a", 0, 5000), unlink("/b"), mkdir("/d")]), vec![append("/a", 10)]]
            .concat(),
    ]
}

fn follow(ops: &mut Vec<Op>, action: &[Op], follow: Follow) {
    let Some(main) = action.iter().rev().find(|op| !op.is_neutral()) else { return };
    let subject = main.subject().unwrap_or_else(|| at(main.directory()));
    match follow {
        Follow::Nothing => {}
        Follow::Fsync => ops.push(Op::Sync(Sync::Full(subject))),
        Follow::Fdatasync => ops.push(Op::Sync(Sync::Data(subject))),
        Follow::FsyncDirectory => ops.push(Op::Sync(Sync::Full(at(main.directory())))),
        Follow::SyncAll => ops.push(Op::Sync(Sync::All)),
        Follow::Checkpoint => ops.push(Op::Checkpoint),
        Follow::Writeback => ops.push(Op::Writeback),
        Follow::Barrier => ops.push(Op::Barrier { target: None }),
        Follow::FileBarrier => ops.push(Op::Barrier { target: Some(subject) }),
        Follow::HandOver => {
            ops.push(Op::HandOver { target: subject, range: 0..8192, how: HandOver::Wait });
        }
        Follow::AmidFirst => ops.push(amid(subject, 0)),
        Follow::AmidSecond => ops.push(amid(subject, 1)),
        Follow::AmidCuts => ops.push(amid_cuts(subject)),
        Follow::AmidShifts => ops.push(amid_shifts(subject)),
        Follow::AmidCommit => ops.push(amid_commit()),
        Follow::Pressure => ops.extend(pressure(subject)),
        Follow::Ticket => ops.push(ticket(Sync::Full(subject), 0..u64::MAX)),
        Follow::RangedTicket => {
            ops.push(ticket(Sync::Data(subject), 4096..8192));
            ops.push(Op::Background { work: BackgroundWork::Log, steps: 100 });
        }
    }
}

/// Another user makes a file, and syncs it by and by, while device call `at` of an fsync is under way.
fn amid(subject: Target, at: u32) -> Op {
    let inner = vec![
        create("/o"),
        write("/o", 0, 5000),
        Op::Sync(Sync::Data(self::at("/o"))),
        write("/o", 3000, 3000),
        ticket(Sync::Data(self::at("/o")), 0..u64::MAX),
        Op::Background { work: BackgroundWork::Frames, steps: 3 },
    ];
    Op::Overlap { outer: Box::new(Op::Sync(Sync::Full(subject))), amid: Amid::call(at), inner }
}

/// What waits for pages happens during the flush of an fsync, and frames of it are written meanwhile.
fn amid_cuts(subject: Target) -> Op {
    let frames = || Op::Background { work: BackgroundWork::Frames, steps: 3 };
    let parts = vec![create("/o"), write("/o", 0, 5000), unlink("/b")];
    let inner = vec![
        Op::Truncate { target: subject.clone(), size: 5000 },
        frames(),
        Op::Allocate {
            target: subject.clone(),
            mode: AllocateMode::PunchHole,
            offset: 1000,
            length: 3096,
        },
        rename("/a", "/q", RenameMode::Replace),
        Op::Batch { parts, commit: Commit::Relaxed },
        Op::Barrier { target: None },
        frames(),
    ];
    Op::Overlap { outer: Box::new(Op::Sync(Sync::Full(subject))), amid: Amid::call(1), inner }
}

/// Ranges are inserted, zeroed and taken out during the flush of an fsync, and frames of it are written meanwhile.
fn amid_shifts(subject: Target) -> Op {
    let frames = || Op::Background { work: BackgroundWork::Frames, steps: 3 };
    let change =
        |mode, offset, length| Op::Allocate { target: subject.clone(), mode, offset, length };
    let inner = vec![
        change(AllocateMode::InsertRange, 0, 8192),
        frames(),
        change(AllocateMode::ZeroRange, 7000, 9000),
        change(AllocateMode::CollapseRange, 4096, 4096),
        frames(),
    ];
    Op::Overlap { outer: Box::new(Op::Sync(Sync::Full(subject))), amid: Amid::call(1), inner }
}

/// Another user commits a batch, and waits until that is durable, while writeback is amid its first write.
fn amid_commit() -> Op {
    let parts = vec![create("/o"), write("/o", 0, 5000)];
    let inner = vec![Op::Batch { parts, commit: Commit::Sync }];
    Op::Overlap { outer: Box::new(Op::Writeback), amid: Amid::call(0), inner }
}

/// What happens when the log fills up, step by step.
fn pressure(subject: Target) -> Vec<Op> {
    let step = |work| Op::Background { work, steps: 1 };
    let sync = |target| Op::Sync(Sync::Full(target));
    vec![
        sync(subject),
        create("/q"),
        write("/q", 0, 36_000),
        sync(at("/q")),
        write("/q", 4096, 100),
        sync(at("/q")),
        step(BackgroundWork::EarlyHome),
        step(BackgroundWork::PartialCheckpoint),
        step(BackgroundWork::PartialCheckpoint),
        write("/q", 8192, 36_000),
        sync(at("/q")),
        step(BackgroundWork::EarlyHome),
        Op::Background { work: BackgroundWork::PartialCheckpoint, steps: 3 },
        step(BackgroundWork::EarlyHome),
    ]
}

const fn ticket(sync: Sync, range: Range<u64>) -> Op {
    Op::Submit { sync, range, ticket: 0, hold: Hold::Await }
}

/// One workload: starting tree, and actions with what follows each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequence {
    /// Index into [`TREES`].
    pub tree: usize,
    /// Indices into [`actions`], each with what follows.
    pub steps: Vec<(usize, Follow)>,
}

/// Number of sequences of one and of two actions.
pub fn count() -> u64 {
    let single = (actions().len() * FOLLOWS.len()) as u64;
    TREES.len() as u64 * (single + single * single)
}

/// The sequence with this number: first all of one action, then all of two, the latter scattered by
/// `seed` so that any stretch of numbers is a fair sample.
pub fn sequence(number: u64, seed: u64) -> Sequence {
    let single = (actions().len() * FOLLOWS.len()) as u64;
    let trees = TREES.len() as u64;
    let step = |index: u64| {
        let follows = FOLLOWS.len() as u64;
        ((index / follows) as usize, FOLLOWS[(index % follows) as usize])
    };
    if number < trees * single {
        let tree = (number % trees) as usize;
        return Sequence { tree, steps: vec![step(number / trees)] };
    }
    let pairs = trees * single * single;
    let scattered = scatter((number - trees * single) % pairs, pairs, seed);
    let (tree, pair) = ((scattered % trees) as usize, scattered / trees);
    Sequence { tree, steps: vec![step(pair / single), step(pair % single)] }
}

/// A permutation of `0..count`: multiplication by a number prime to `count`, then a seeded shift.
fn scatter(index: u64, count: u64, seed: u64) -> u64 {
    // A prime larger than any count here divides none of them.
    const PRIME: u128 = 2_147_483_647;
    let shifted = u128::from(index) * PRIME + u128::from(crate::rng::mix(seed) % count);
    (shifted % u128::from(count)) as u64
}

/// The operations of a sequence.
pub fn operations(sequence: &Sequence, actions: &[Vec<Op>]) -> Vec<Op> {
    let mut ops = Vec::new();
    for (index, after) in &sequence.steps {
        if let Some(action) = actions.get(*index) {
            ops.extend(action.iter().cloned());
            follow(&mut ops, action, *after);
        }
    }
    for (tag, op) in (1..).zip(&mut ops) {
        set_tag(op, tag);
    }
    ops
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Model;

    #[test]
    fn starting_trees_are_valid() {
        for (index, name) in TREES.iter().enumerate() {
            let mut model = Model::new();
            for op in tree(index) {
                assert!(model.apply(&op, None).is_ok(), "{name}: {op}");
            }
        }
    }

    #[test]
    fn every_action_succeeds_on_some_tree() {
        for action in actions() {
            let works = (0..TREES.len()).any(|index| {
                let mut model = Model::new();
                for op in tree(index) {
                    model.apply(&op, None).unwrap();
                }
                action.iter().all(|op| model.apply(op, None).is_ok())
            });
            // One batch is in the list because it fails.
            let works = works || matches!(&action[0], Op::Batch { .. }) && action.len() > 1;
            // A copy into a missing file is in the list for its second place in a pair.
            let needs_another = matches!(&action[0], Op::CopyRange { to, .. } if *to == at("/n"));
            // What is refused, and by which error, is what some ways to open and to set attributes are about.
            let may_be_refused = action.iter().any(Op::promises_its_error);
            assert!(works || needs_another || may_be_refused, "{}", action[0]);
        }
    }

    #[test]
    fn numbers_reach_every_single_action_and_scatter_pairs_without_repeats() {
        let single = (actions().len() * FOLLOWS.len()) as u64;
        let singles: std::collections::BTreeSet<String> =
            (0..3 * single).map(|number| format!("{:?}", sequence(number, 1))).collect();
        assert_eq!(singles.len() as u64, 3 * single);
        let pairs: std::collections::BTreeSet<String> = (3 * single..3 * single + 5000)
            .map(|number| format!("{:?}", sequence(number, 1)))
            .collect();
        assert_eq!(pairs.len(), 5000);
        assert!(count() > 1_000_000);
    }
}
