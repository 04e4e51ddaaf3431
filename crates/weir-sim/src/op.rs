//! The operations a workload is made of. Their text form is what a failure report lists.

use std::fmt;
use std::ops::Range;

use weir::{
    AllocateMode, BackgroundWork, FileType, OpenFlags, RenameMode, SyncRangeFlags, Timestamp,
    XattrMode,
};

/// Which inode a data operation is for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// By name.
    Path(String),
    /// By open handle: works after the name is gone.
    Slot(u8),
}

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(formatter, "{path}"),
            Self::Slot(slot) => write!(formatter, "handle {slot}"),
        }
    }
}

/// How much a sync call must make durable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sync {
    /// `fsync` of a file or directory.
    Full(Target),
    /// `fdatasync`.
    Data(Target),
    /// `syncfs`.
    All,
}

impl Sync {
    /// What it is about, if not everything.
    pub const fn target(&self) -> Option<&Target> {
        match self {
            Self::Full(target) | Self::Data(target) => Some(target),
            Self::All => None,
        }
    }
}

impl fmt::Display for Sync {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full(target) => write!(formatter, "fsync {target}"),
            Self::Data(target) => write!(formatter, "fdatasync {target}"),
            Self::All => write!(formatter, "syncfs"),
        }
    }
}

/// What becomes of a ticket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    /// It is awaited as a future: its end is noticed at once.
    Await,
    /// It is delivered to a completion queue.
    Deliver,
    /// It is dropped, which cancels nothing.
    Drop,
}

/// How pages are handed to background writeback.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandOver {
    /// `sync_range`, which only starts it.
    Start,
    /// `sync_range`, which waits for what is under way, before and after.
    Wait,
    /// `expire`.
    Expire,
    /// `sync_range` with these flags.
    Flags(SyncRangeFlags),
}

/// How a batch is committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Commit {
    /// It is durable when the call returns.
    Sync,
    /// A ticket stands for its durability.
    Async {
        /// Its number.
        ticket: u32,
        /// What becomes of it.
        hold: Hold,
    },
    /// A later sync makes it durable.
    Relaxed,
}

impl fmt::Display for Commit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sync => write!(formatter, "sync"),
            Self::Async { ticket, hold } => write!(formatter, "as ticket {ticket}, {hold:?}"),
            Self::Relaxed => write!(formatter, "relaxed"),
        }
    }
}

/// One call of a workload. Data is made from `tag` (see [`crate::pattern`]).
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Op {
    Create {
        path: String,
        permissions: u32,
    },
    Mkdir {
        path: String,
    },
    Symlink {
        path: String,
        target: String,
    },
    Mknod {
        path: String,
        file_type: FileType,
        rdev: u32,
    },
    Link {
        from: String,
        to: String,
    },
    Unlink {
        path: String,
    },
    Rmdir {
        path: String,
    },
    Rename {
        from: String,
        to: String,
        mode: RenameMode,
    },
    Write {
        target: Target,
        offset: u64,
        length: u64,
        tag: u32,
    },
    /// A write of whole pages that a crash does not tear. A sync of the file follows at once, so that it has a place in
    /// the order.
    Untorn {
        target: Target,
        offset: u64,
        length: u64,
        tag: u32,
    },
    Append {
        target: Target,
        length: u64,
        tag: u32,
    },
    Truncate {
        target: Target,
        size: u64,
    },
    Allocate {
        target: Target,
        mode: AllocateMode,
        offset: u64,
        length: u64,
    },
    CopyRange {
        from: Target,
        from_offset: u64,
        to: Target,
        to_offset: u64,
        length: u64,
    },
    SetXattr {
        path: String,
        name: String,
        length: u64,
        tag: u32,
        mode: XattrMode,
    },
    RemoveXattr {
        path: String,
        name: String,
    },
    Chmod {
        path: String,
        permissions: u32,
    },
    Chown {
        path: String,
        uid: u32,
        gid: u32,
    },
    Utimens {
        path: String,
        atime: Timestamp,
        mtime: Timestamp,
    },
    Open {
        path: String,
        slot: u8,
    },
    /// By its path, with flags: it may be made, cut, opened for reading only, or such that each write is durable.
    OpenWith {
        path: String,
        slot: u8,
        flags: OpenFlags,
    },
    /// Keeps it alive, without opening it.
    Hold {
        path: String,
        slot: u8,
    },
    Close {
        slot: u8,
    },
    /// An unnamed file in a directory, opened.
    TmpFile {
        dir: String,
        slot: u8,
    },
    /// Gives the open file a (further) name.
    LinkSlot {
        slot: u8,
        path: String,
    },
    /// All of `parts` happen together, as one operation of the order, data included: see [`Op::may_be_part`].
    Batch {
        parts: Vec<Op>,
        commit: Commit,
    },
    Sync(Sync),
    /// Asks for a sync without waiting. `range` matters for files only.
    Submit {
        sync: Sync,
        range: Range<u64>,
        ticket: u32,
        hold: Hold,
    },
    /// Hands dirty pages to background writeback. Makes nothing durable.
    HandOver {
        target: Target,
        range: Range<u64>,
        how: HandOver,
    },
    /// Everything before (of the data: that of `target`, if given) is durable before anything after.
    Barrier {
        target: Option<Target>,
    },
    /// Watches whether everything so far becomes durable without anybody asking for it.
    WaitDurable,
    /// A checkpoint from start to end.
    Checkpoint,
    /// Up to this many steps of one kind of background work.
    Background {
        work: BackgroundWork,
        steps: u32,
    },
    /// Starts writeback of everything dirty, without making it durable.
    Writeback,
    /// Reads and compares with the model.
    Read {
        target: Target,
        offset: u64,
        length: u64,
    },
    /// Lets time pass.
    Advance {
        ns: u64,
    },
    /// `outer` runs, and somewhere amid that somebody else does `inner`, one after the other: see
    /// [`Op::may_be_outer`] and [`Op::may_be_inner`].
    Overlap {
        outer: Box<Op>,
        amid: Amid,
        inner: Vec<Op>,
    },
}

/// Where one of two that overlap hands over to the other, beside where it has to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// Amid this device call of it: writes and flushes, from 0.
    Call(u32),
    /// Before it takes this lock of the engine, from 0.
    Lock(u32),
}

/// Where two that overlap hand over to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Amid {
    /// The first one.
    pub first: At,
    /// The second one.
    pub back: Option<At>,
}

impl Amid {
    /// Amid this call of the first one, until the second one has to wait, or ends.
    pub const fn call(call: u32) -> Self {
        Self { first: At::Call(call), back: None }
    }
}

impl fmt::Display for At {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Call(number) => write!(formatter, "call {number}"),
            Self::Lock(number) => write!(formatter, "lock {number}"),
        }
    }
}

impl fmt::Display for Amid {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "amid its {}", self.first)?;
        match self.back {
            Some(back) => write!(formatter, ", and that amid their {back}"),
            None => Ok(()),
        }
    }
}

/// The parent directory of `path`; the root's is the root.
pub fn parent(path: &str) -> &str {
    path.trim_end_matches('/')
        .rsplit_once('/')
        .map_or("/", |(parent, _)| if parent.is_empty() { "/" } else { parent })
}

/// What an operation needs for trees, and what is kept for checkpoints.
const ROOM_BLOCKS: u64 = 40;

impl Op {
    /// Is in the log before it returns, and returns when it is durable: an error that shuts the volume down leaves open whether it happened.
    pub const fn waits_for_its_frame(&self) -> bool {
        matches!(self, Self::Batch { commit: Commit::Sync, .. })
    }

    /// Changes nothing that a user could see.
    pub const fn is_neutral(&self) -> bool {
        matches!(
            self,
            Self::Sync(_)
                | Self::Submit { .. }
                | Self::WaitDurable
                | Self::HandOver { .. }
                | Self::Checkpoint
                | Self::Background { .. }
                | Self::Writeback
                | Self::Read { .. }
                | Self::Advance { .. }
        )
    }

    /// Can be a part of a batch.
    pub const fn may_be_part(&self) -> bool {
        use RenameMode::{Exchange, NoReplace, Replace};
        matches!(
            self,
            Self::Write { .. }
                | Self::Truncate { .. }
                | Self::Create { .. }
                | Self::Mkdir { .. }
                | Self::Symlink { .. }
                | Self::Link { .. }
                | Self::Unlink { .. }
                | Self::Rmdir { .. }
                | Self::Rename { mode: Replace | NoReplace | Exchange, .. }
                | Self::Chmod { .. }
                | Self::Chown { .. }
                | Self::Utimens { .. }
        )
    }

    /// Has one place in the order, or none, with nobody else who has one beside it.
    pub const fn may_be_outer(&self) -> bool {
        self.may_be_inner() && !matches!(self, Self::Read { .. })
    }

    /// Has one place in the order, whatever is going on beside it.
    pub const fn may_be_inner(&self) -> bool {
        matches!(
            self,
            Self::Create { .. }
                | Self::Mkdir { .. }
                | Self::Symlink { .. }
                | Self::Link { .. }
                | Self::Unlink { .. }
                | Self::Rmdir { .. }
                | Self::Rename { .. }
                | Self::Write { .. }
                | Self::Truncate { .. }
                | Self::Allocate { .. }
                | Self::SetXattr { .. }
                | Self::Chmod { .. }
                | Self::Chown { .. }
                | Self::Utimens { .. }
                | Self::Batch { .. }
                | Self::Read { .. }
                | Self::Sync(_)
                | Self::Submit { .. }
                | Self::HandOver { .. }
                | Self::Barrier { .. }
                | Self::Checkpoint
                | Self::Writeback
                | Self::Background { .. }
        )
    }

    /// What shows whether an operation with a state in the middle got there: its range.
    pub fn reads_back(&self) -> Option<Self> {
        let Self::Allocate { target, offset, length, .. } = self.first_half()? else { return None };
        Some(Self::Read { target, offset, length })
    }

    /// Blocks that it may need, generously: with so many available it does not fail for lack of room. `None`: nobody can tell.
    pub const fn most_blocks(&self) -> Option<u64> {
        match self {
            Self::Write { length, .. }
            | Self::Untorn { length, .. }
            | Self::Append { length, .. }
            | Self::CopyRange { length, .. }
            | Self::Allocate { length, .. } => Some(ROOM_BLOCKS + *length / 4096),
            Self::Batch { .. } | Self::Overlap { .. } => None,
            _ => Some(ROOM_BLOCKS),
        }
    }

    /// A volume may be too small for it, whatever is free: a small log cannot take a shift of so much.
    pub const fn may_be_unsupported(&self) -> bool {
        use AllocateMode::{CollapseRange, InsertRange};
        matches!(self, Self::Allocate { mode: CollapseRange | InsertRange, .. })
    }

    /// The call says which LSN is to be durable for all that comes before it to be so. (A barrier of one file says nothing of the others' data, which
    /// may wait behind an earlier barrier.)
    pub const fn answers_its_lsn(&self) -> bool {
        matches!(
            self,
            Self::Barrier { target: None }
                | Self::Batch { commit: Commit::Sync | Commit::Relaxed, .. }
        )
    }

    /// Its operations one after the other, if it is an overlap.
    pub fn unlapped(self) -> Vec<Self> {
        match self {
            Self::Overlap { outer, inner, .. } => std::iter::once(*outer).chain(inner).collect(),
            other => vec![other],
        }
    }

    /// Takes the promises away that a write is not torn, or durable when it returns.
    pub fn tear(&mut self) {
        if let Self::Untorn { target, offset, length, tag } = self {
            let (target, offset, length, tag) = (target.clone(), *offset, *length, *tag);
            *self = Self::Write { target, offset, length, tag };
        }
        // A write whose sync has failed is there all the same.
        if let Self::OpenWith { flags, .. } = self {
            flags.data_sync = false;
        }
    }

    /// What an operation that is done in two steps does first: its range becomes zeros before the file
    /// grows.
    pub fn first_half(&self) -> Option<Self> {
        match self {
            Self::Allocate {
                target,
                mode: AllocateMode::ZeroRange | AllocateMode::ZeroRangeKeepSize,
                offset,
                length,
            } => Some(Self::Allocate {
                target: target.clone(),
                mode: AllocateMode::PunchHole,
                offset: *offset,
                length: *length,
            }),
            _ => None,
        }
    }

    /// What an operation that is done in several steps does first, step by step.
    pub fn steps(&self) -> Vec<Self> {
        use AllocateMode::{Extend, KeepSize, PunchHole, ZeroRange, ZeroRangeKeepSize};
        let Self::Allocate { target, mode, offset, length } = self else { return Vec::new() };
        let modes: &[AllocateMode] = match mode {
            Extend => &[KeepSize],
            ZeroRange => &[PunchHole, ZeroRangeKeepSize],
            ZeroRangeKeepSize => &[PunchHole],
            _ => &[],
        };
        let (offset, length) = (*offset, *length);
        let step = |mode: &AllocateMode| Self::Allocate {
            target: target.clone(),
            mode: *mode,
            offset,
            length,
        };
        modes.iter().map(step).collect()
    }

    /// The error that it answers is a promise too.
    pub const fn promises_its_error(&self) -> bool {
        matches!(self, Self::SetXattr { .. } | Self::OpenWith { .. })
    }

    /// What a user would sync after this operation: the file or directory, by its name
    /// afterwards, or by handle.
    pub fn subject(&self) -> Option<Target> {
        let path = match self {
            Self::Create { path, .. }
            | Self::Mkdir { path }
            | Self::Symlink { path, .. }
            | Self::Mknod { path, .. }
            | Self::SetXattr { path, .. }
            | Self::RemoveXattr { path, .. }
            | Self::Chmod { path, .. }
            | Self::Chown { path, .. }
            | Self::Utimens { path, .. }
            | Self::Open { path, .. }
            | Self::OpenWith { path, .. }
            | Self::Hold { path, .. }
            | Self::LinkSlot { path, .. } => path,
            Self::Link { to, .. } | Self::Rename { to, .. } => to,
            Self::Write { target, .. }
            | Self::Untorn { target, .. }
            | Self::Append { target, .. }
            | Self::Truncate { target, .. }
            | Self::Allocate { target, .. }
            | Self::CopyRange { to: target, .. } => return Some(target.clone()),
            Self::TmpFile { slot, .. } => return Some(Target::Slot(*slot)),
            Self::Batch { parts, .. } => return parts.iter().rev().find_map(Self::subject),
            _ => return None,
        };
        Some(Target::Path(path.clone()))
    }

    /// The directory that holds (or held) the operation's name.
    pub fn directory(&self) -> &str {
        match self {
            Self::Create { path, .. }
            | Self::Mkdir { path }
            | Self::Symlink { path, .. }
            | Self::Mknod { path, .. }
            | Self::Unlink { path }
            | Self::Rmdir { path }
            | Self::SetXattr { path, .. }
            | Self::RemoveXattr { path, .. }
            | Self::Chmod { path, .. }
            | Self::Chown { path, .. }
            | Self::Utimens { path, .. }
            | Self::Open { path, .. }
            | Self::OpenWith { path, .. }
            | Self::Hold { path, .. }
            | Self::LinkSlot { path, .. }
            | Self::Link { to: path, .. }
            | Self::Rename { to: path, .. }
            | Self::Write { target: Target::Path(path), .. }
            | Self::Untorn { target: Target::Path(path), .. }
            | Self::Append { target: Target::Path(path), .. }
            | Self::Truncate { target: Target::Path(path), .. }
            | Self::Allocate { target: Target::Path(path), .. }
            | Self::CopyRange { to: Target::Path(path), .. } => parent(path),
            Self::TmpFile { dir, .. } => dir,
            Self::Batch { parts, .. } => parts.last().map_or("/", Self::directory),
            _ => "/",
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Create { path, permissions } => {
                write!(formatter, "create {path} {permissions:o}")
            }
            Self::Mkdir { path } => write!(formatter, "mkdir {path}"),
            Self::Symlink { path, target } => {
                write!(formatter, "symlink {path} -> {} bytes", target.len())
            }
            Self::Mknod { path, file_type, rdev } => {
                write!(formatter, "mknod {path} {file_type:?} {rdev:#x}")
            }
            Self::Link { from, to } => write!(formatter, "link {from} {to}"),
            Self::Unlink { path } => write!(formatter, "unlink {path}"),
            Self::Rmdir { path } => write!(formatter, "rmdir {path}"),
            Self::Rename { from, to, mode } => write!(formatter, "rename {from} {to} {mode:?}"),
            Self::Write { target, offset, length, tag } => {
                write!(formatter, "write {target} at {offset} length {length} tag {tag}")
            }
            Self::Untorn { target, offset, length, tag } => {
                write!(formatter, "write {target} at {offset} length {length} tag {tag}, untorn")
            }
            Self::HandOver { target, range, how } => {
                let (start, end) = (range.start, range.end);
                write!(formatter, "hand over {target} bytes {start}..{end} ({how:?})")
            }
            Self::Append { target, length, tag } => {
                write!(formatter, "append {target} length {length} tag {tag}")
            }
            Self::Truncate { target, size } => write!(formatter, "truncate {target} to {size}"),
            Self::Allocate { target, mode, offset, length } => {
                write!(formatter, "allocate {target} {mode:?} at {offset} length {length}")
            }
            Self::CopyRange { from, from_offset, to, to_offset, length } => write!(
                formatter,
                "copy_range {from} at {from_offset} to {to} at {to_offset} length {length}"
            ),
            Self::SetXattr { path, name, length, tag, mode } => {
                write!(formatter, "setxattr {path} {name} length {length} tag {tag}")?;
                match mode {
                    XattrMode::Set => Ok(()),
                    mode => write!(formatter, " ({mode:?})"),
                }
            }
            Self::RemoveXattr { path, name } => write!(formatter, "removexattr {path} {name}"),
            Self::Chmod { path, permissions } => write!(formatter, "chmod {path} {permissions:o}"),
            Self::Chown { path, uid, gid } => write!(formatter, "chown {path} {uid}:{gid}"),
            Self::Utimens { path, atime, mtime } => write!(
                formatter,
                "utimens {path} {}.{:09} {}.{:09}",
                atime.seconds, atime.nanoseconds, mtime.seconds, mtime.nanoseconds
            ),
            Self::Open { path, slot } => write!(formatter, "open {path} as handle {slot}"),
            Self::OpenWith { path, slot, flags } => {
                write!(formatter, "open {path} as handle {slot}")?;
                for (is_set, text) in [
                    (flags.write, "write"),
                    (flags.create, "create"),
                    (flags.exclusive, "exclusive"),
                    (flags.truncate, "truncate"),
                    (flags.data_sync, "data_sync"),
                ] {
                    if is_set {
                        write!(formatter, " {text}")?;
                    }
                }
                Ok(())
            }
            Self::Hold { path, slot } => write!(formatter, "hold {path} as handle {slot}"),
            Self::Close { slot } => write!(formatter, "close handle {slot}"),
            Self::TmpFile { dir, slot } => write!(formatter, "tmpfile in {dir} as handle {slot}"),
            Self::LinkSlot { slot, path } => write!(formatter, "link handle {slot} to {path}"),
            Self::Batch { parts, commit } => {
                write!(formatter, "batch, {commit}:")?;
                for (number, part) in parts.iter().enumerate() {
                    write!(formatter, "{} {part}", if number > 0 { ";" } else { "" })?;
                }
                Ok(())
            }
            Self::Overlap { outer, amid, inner } => {
                write!(formatter, "{outer}, and {amid}:")?;
                for (number, op) in inner.iter().enumerate() {
                    write!(formatter, "{} {op}", if number > 0 { ";" } else { "" })?;
                }
                Ok(())
            }
            Self::Sync(sync) => write!(formatter, "{sync}"),
            Self::Submit { sync, range, ticket, hold } => {
                write!(formatter, "submit {sync}")?;
                if *range != (0..u64::MAX) {
                    write!(formatter, " bytes {}..{}", range.start, range.end)?;
                }
                write!(formatter, " as ticket {ticket} ({hold:?})")
            }
            Self::Barrier { target: None } => write!(formatter, "barrier"),
            Self::Barrier { target: Some(target) } => write!(formatter, "barrier of {target}"),
            Self::WaitDurable => write!(formatter, "wait_durable"),
            Self::Checkpoint => write!(formatter, "checkpoint"),
            Self::Background { work, steps } => {
                write!(formatter, "background {work:?}, up to {steps} steps")
            }
            Self::Writeback => write!(formatter, "writeback"),
            Self::Read { target, offset, length } => {
                write!(formatter, "read {target} at {offset} length {length}")
            }
            Self::Advance { ns } => write!(formatter, "advance {ns} ns"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_of_paths() {
        assert_eq!(parent("/a/b/c"), "/a/b");
        assert_eq!(parent("/a"), "/");
        assert_eq!(parent("/"), "/");
    }
}
