//! What the FUSE client says and hears, in the words of [`crate::ops`]: flags, types, times, replies. No state.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    FileAttr, FopenFlags, Generation, INodeNo, OpenAccMode, OpenFlags, RenameFlags, ReplyAttr,
    ReplyData, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyWrite, ReplyXattr, Request, TimeOrNow,
    WriteFlags,
};
use weir::{AllocateMode, Attr, FileType, RenameMode, SetTime, SyncKind, Timestamp};

use crate::acl;
use crate::errno::Errno;
use crate::ops::{Caller, Change, Done, FileSystemOps, OpResult, Open, SetXattr, WriteMode};

/// Inode numbers are never given out twice.
pub(crate) const GENERATION: Generation = Generation(0);
/// Block size told to programs.
pub(crate) const BLOCK_BYTES: u32 = 4096;

/// Answers a request without a result of its own, on whichever thread its end is known.
pub(crate) fn answer_later(reply: ReplyEmpty) -> Done {
    Box::new(move |result| reply_empty(reply, result))
}

pub(crate) fn errno(error: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(error.raw())
}

pub(crate) fn caller(request: &Request) -> Caller {
    Caller { uid: request.uid(), gid: request.gid() }
}

/// The caller as a member of the group of file `ino`, where they are one and are about to set its access list: whether a file may stay
/// set-group-id depends on it, and a request tells the first group only.
///
/// (`FUSE_SETXATTR_EXT` would tell what the kernel thinks of it, but `fuser` cannot decode such requests.) The caller waits for the
/// answer, so that it is still there to be looked at; of a caller whom this process cannot see, the other groups count for nothing.
pub(crate) fn as_member(
    ops: &dyn FileSystemOps,
    caller: Caller,
    thread: u32,
    ino: u64,
    name: &[u8],
) -> Caller {
    if name != acl::ACCESS || caller.uid == 0 {
        return caller;
    }
    let Ok(attr) = ops.getattr(ino) else { return caller };
    if attr.gid == caller.gid || !groups_of(thread).contains(&attr.gid) {
        return caller;
    }
    Caller { gid: attr.gid, ..caller }
}

/// The supplementary groups of a thread; none, if that cannot be seen.
fn groups_of(thread: u32) -> Vec<u32> {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    let groups = status.lines().find_map(|line| line.strip_prefix("Groups:")).unwrap_or_default();
    groups.split_whitespace().filter_map(|group| group.parse().ok()).collect()
}

pub(crate) fn system_time(time: Timestamp) -> SystemTime {
    let nanoseconds = Duration::from_nanos(time.nanoseconds.into());
    let whole = Duration::from_secs(time.seconds.unsigned_abs());
    let base = if time.seconds >= 0 {
        UNIX_EPOCH.checked_add(whole)
    } else {
        UNIX_EPOCH.checked_sub(whole)
    };
    base.and_then(|base| base.checked_add(nanoseconds)).unwrap_or(UNIX_EPOCH)
}

pub(crate) fn timestamp(time: SystemTime) -> Timestamp {
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => {
            Timestamp { seconds: after.as_secs() as i64, nanoseconds: after.subsec_nanos() }
        }
        Err(before) => {
            let before = before.duration();
            let (seconds, nanoseconds) = (before.as_secs() as i64, before.subsec_nanos());
            if nanoseconds == 0 {
                Timestamp { seconds: -seconds, nanoseconds: 0 }
            } else {
                Timestamp { seconds: -seconds - 1, nanoseconds: 1_000_000_000 - nanoseconds }
            }
        }
    }
}

pub(crate) fn set_time(time: TimeOrNow) -> SetTime {
    match time {
        TimeOrNow::Now => SetTime::Now,
        TimeOrNow::SpecificTime(time) => SetTime::At(timestamp(time)),
    }
}

pub(crate) fn fuser_type(file_type: FileType) -> fuser::FileType {
    match file_type {
        FileType::Regular => fuser::FileType::RegularFile,
        FileType::Directory => fuser::FileType::Directory,
        FileType::Symlink => fuser::FileType::Symlink,
        FileType::Fifo => fuser::FileType::NamedPipe,
        FileType::Socket => fuser::FileType::Socket,
        FileType::CharDevice => fuser::FileType::CharDevice,
        FileType::BlockDevice => fuser::FileType::BlockDevice,
    }
}

pub(crate) fn fuser_attr(attr: &Attr) -> FileAttr {
    FileAttr {
        ino: INodeNo(attr.ino),
        size: attr.size_bytes,
        blocks: attr.blocks.saturating_mul(8),
        atime: system_time(attr.atime),
        mtime: system_time(attr.mtime),
        ctime: system_time(attr.ctime),
        crtime: system_time(attr.btime),
        kind: fuser_type(attr.file_type),
        perm: (attr.permissions & 0o7777) as u16,
        nlink: attr.links,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        blksize: BLOCK_BYTES,
        flags: 0,
    }
}

/// An entry without an inode: the kernel remembers that the name does not exist.
pub(crate) fn negative_attr() -> FileAttr {
    FileAttr {
        ino: INodeNo(0),
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: fuser::FileType::RegularFile,
        perm: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: BLOCK_BYTES,
        flags: 0,
    }
}

pub(crate) fn reply_entry(reply: ReplyEntry, valid: Duration, result: Result<Attr, Errno>) {
    match result {
        Ok(attr) => reply.entry(&valid, &fuser_attr(&attr), GENERATION),
        Err(error) => reply.error(errno(error)),
    }
}

pub(crate) fn reply_attr(reply: ReplyAttr, valid: Duration, result: Result<Attr, Errno>) {
    match result {
        Ok(attr) => reply.attr(&valid, &fuser_attr(&attr)),
        Err(error) => reply.error(errno(error)),
    }
}

pub(crate) fn reply_empty(reply: ReplyEmpty, result: Result<(), Errno>) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(errno(error)),
    }
}

/// Answers what has made a name.
pub(crate) fn answer_entry(
    ops: &dyn FileSystemOps,
    reply: ReplyEntry,
    valid: Duration,
    result: OpResult<Attr>,
) {
    answer_durably(ops, Change::Names, result, move |result| reply_entry(reply, valid, result));
}

/// Answers what has made `change`, and has no result of its own.
pub(crate) fn answer_change(
    ops: &dyn FileSystemOps,
    change: Change,
    reply: ReplyEmpty,
    result: OpResult<()>,
) {
    answer_durably(ops, change, result, move |result| reply_empty(reply, result));
}

pub(crate) fn reply_xattr(reply: ReplyXattr, size_bytes: u32, result: Result<Vec<u8>, Errno>) {
    match result {
        Ok(value) if size_bytes == 0 => reply.size(value.len() as u32),
        Ok(value) if value.len() > size_bytes as usize => reply.error(errno(Errno::ERANGE)),
        Ok(value) => reply.data(&value),
        Err(error) => reply.error(errno(error)),
    }
}

/// The names of attributes as a program gets them, of those that `caller` may see: `trusted.*` is for who has `CAP_SYS_ADMIN`, which a
/// request does not tell; uid 0 stands for it.
pub(crate) fn visible_names(caller: Caller, names: &[Vec<u8>]) -> Vec<u8> {
    let is_visible = |name: &&Vec<u8>| caller.uid == 0 || !name.starts_with(b"trusted.");
    let visible = names.iter().filter(is_visible);
    visible.flat_map(|name| name.iter().copied().chain([0])).collect()
}

pub(crate) fn open_mode(flags: OpenFlags) -> Open {
    Open {
        write: flags.acc_mode() != OpenAccMode::O_RDONLY,
        truncate: flags.0 & libc::O_TRUNC != 0,
        sync: match flags.0 & libc::O_SYNC {
            libc::O_SYNC => Some(SyncKind::Full),
            libc::O_DSYNC => Some(SyncKind::Data),
            _ => None,
        },
    }
}

/// Answers what made `change`: at once, or when that is durable, on whichever thread that is known.
pub(crate) fn answer_durably<T: Send + 'static>(
    ops: &dyn FileSystemOps,
    change: Change,
    result: OpResult<T>,
    answer: impl FnOnce(OpResult<T>) + Send + 'static,
) {
    match result {
        Ok(value) if ops.must_be_durable(change) => {
            ops.make_durable(Box::new(move |durable| answer(durable.map(|()| value))));
        }
        result => answer(result),
    }
}

/// What the kernel may do with a file opened with these `flags`, which made it or did not. `new_past_cache`: see
/// [`crate::options::TransportOptions::new_past_cache`].
pub(crate) fn open_flags(flags: OpenFlags, is_made: bool, new_past_cache: bool) -> FopenFlags {
    // Without `FOPEN_PARALLEL_DIRECT_WRITES`: the kernel cuts a large write into several requests, and two at the same place must not mix.
    let common = FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH;
    let is_new = is_made || flags.0 & libc::O_TRUNC != 0;
    // Who appends does so for long as a rule, and others read along.
    let is_appended = flags.0 & libc::O_APPEND != 0;
    let write_only = flags.acc_mode() == OpenAccMode::O_WRONLY;
    if new_past_cache && is_new && write_only && !is_appended {
        common | FopenFlags::FOPEN_DIRECT_IO
    } else {
        common
    }
}

pub(crate) fn dir_flags() -> FopenFlags {
    FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_CACHE_DIR
}

pub(crate) fn write_mode(flags: OpenFlags, write_flags: WriteFlags) -> WriteMode {
    // Pages written back by the kernel carry the flags of whichever handle it guessed; the sync
    // that asked for them follows as FSYNC.
    let from_cache = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
    let full_sync = !from_cache && flags.0 & libc::O_SYNC == libc::O_SYNC;
    let data_sync = !from_cache && flags.0 & libc::O_DSYNC != 0;
    WriteMode {
        data_sync,
        full_sync,
        kill_suid_sgid: write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID),
    }
}

pub(crate) fn allocate_mode(mode: i32) -> Result<AllocateMode, Errno> {
    const KEEP_PUNCH: i32 = libc::FALLOC_FL_KEEP_SIZE | libc::FALLOC_FL_PUNCH_HOLE;
    const KEEP_ZERO: i32 = libc::FALLOC_FL_KEEP_SIZE | libc::FALLOC_FL_ZERO_RANGE;
    Ok(match mode {
        0 => AllocateMode::Extend,
        libc::FALLOC_FL_KEEP_SIZE => AllocateMode::KeepSize,
        KEEP_PUNCH => AllocateMode::PunchHole,
        libc::FALLOC_FL_ZERO_RANGE => AllocateMode::ZeroRange,
        KEEP_ZERO => AllocateMode::ZeroRangeKeepSize,
        libc::FALLOC_FL_COLLAPSE_RANGE => AllocateMode::CollapseRange,
        libc::FALLOC_FL_INSERT_RANGE => AllocateMode::InsertRange,
        _ => return Err(Errno::EOPNOTSUPP),
    })
}

/// What `setxattr` may replace.
pub(crate) fn xattr_mode(flags: i32) -> OpResult<SetXattr> {
    const BOTH: i32 = libc::XATTR_CREATE | libc::XATTR_REPLACE;
    match flags {
        0 => Ok(SetXattr::Any),
        libc::XATTR_CREATE => Ok(SetXattr::Create),
        libc::XATTR_REPLACE => Ok(SetXattr::Replace),
        BOTH => Ok(SetXattr::CreateAndReplace),
        _ => Err(Errno::EINVAL),
    }
}

pub(crate) fn rename_mode(flags: RenameFlags, caller: Caller) -> Result<RenameMode, Errno> {
    if flags.is_empty() {
        Ok(RenameMode::Replace)
    } else if flags == RenameFlags::RENAME_NOREPLACE {
        Ok(RenameMode::NoReplace)
    } else if flags == RenameFlags::RENAME_EXCHANGE {
        Ok(RenameMode::Exchange)
    } else if flags == RenameFlags::RENAME_WHITEOUT {
        Ok(RenameMode::Whiteout { uid: caller.uid, gid: caller.gid })
    } else {
        Err(Errno::EINVAL)
    }
}

pub(crate) fn answer_write(reply: ReplyWrite, result: Result<usize, Errno>) {
    match result {
        Ok(written) => reply.written(written as u32),
        Err(error) => reply.error(errno(error)),
    }
}

pub(crate) fn answer_read(reply: Option<ReplyData>, result: Result<usize, Errno>, buffer: &[u8]) {
    let Some(reply) = reply else { return };
    match result {
        Ok(length) => reply.data(&buffer[..length]),
        Err(error) => reply.error(errno(error)),
    }
}

pub(crate) fn answer_ioctl(reply: ReplyIoctl, result: Result<Vec<u8>, Errno>) {
    match result {
        Ok(data) => reply.ioctl(0, &data),
        Err(error) => reply.error(errno(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_handles_that_write_a_new_file_and_nothing_else_go_past_the_page_cache() {
        let past = |flags: i32, is_made| {
            let flags = open_flags(OpenFlags(flags), is_made, true);
            flags.contains(FopenFlags::FOPEN_DIRECT_IO)
        };
        assert!(past(libc::O_WRONLY, true));
        assert!(past(libc::O_WRONLY | libc::O_TRUNC, false));
        // A reader has the page cache, and a mapping needs it.
        assert!(!past(libc::O_RDWR, true) && !past(libc::O_RDONLY, true));
        assert!(!past(libc::O_WRONLY, false));
        assert!(!past(libc::O_WRONLY | libc::O_APPEND, true));
        let both = open_flags(OpenFlags(libc::O_WRONLY), true, true);
        assert!(!both.contains(FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES), "writes would mix");
        let off = open_flags(OpenFlags(libc::O_WRONLY), true, false);
        assert!(!off.contains(FopenFlags::FOPEN_DIRECT_IO));
    }

    #[test]
    fn trusted_attributes_are_listed_for_root_only() {
        let names = ["user.a", "trusted.b", "security.c"].map(|name| name.as_bytes().to_vec());
        let listed = |uid| visible_names(Caller { uid, gid: 0 }, &names);
        assert_eq!(listed(0), b"user.a\0trusted.b\0security.c\0");
        assert_eq!(listed(1), b"user.a\0security.c\0");
    }

    #[test]
    fn timestamps_survive_the_way_to_the_kernel_and_back() {
        for seconds in [-5_000_000_000, -1, 0, 1, 1_700_000_000, 10_000_000_000] {
            for nanoseconds in [0, 1, 500_000_000, 999_999_999] {
                let time = Timestamp { seconds, nanoseconds };
                assert_eq!(timestamp(system_time(time)), time);
            }
        }
    }

    #[test]
    fn only_fallocate_modes_the_engine_has_are_accepted() {
        assert_eq!(allocate_mode(0), Ok(AllocateMode::Extend));
        let punch = libc::FALLOC_FL_PUNCH_HOLE;
        assert_eq!(allocate_mode(punch), Err(Errno::EOPNOTSUPP));
        let keep = libc::FALLOC_FL_KEEP_SIZE;
        assert_eq!(allocate_mode(punch | keep), Ok(AllocateMode::PunchHole));
        assert_eq!(allocate_mode(libc::FALLOC_FL_UNSHARE_RANGE), Err(Errno::EOPNOTSUPP));
    }

    #[test]
    fn o_sync_asks_for_all_attributes_and_o_dsync_for_data_only() {
        let direct = WriteFlags::empty();
        let dsync = write_mode(OpenFlags(libc::O_WRONLY | libc::O_DSYNC), direct);
        assert!(dsync.data_sync && !dsync.full_sync);
        let sync = write_mode(OpenFlags(libc::O_WRONLY | libc::O_SYNC), direct);
        assert!(sync.full_sync);
        let cached =
            write_mode(OpenFlags(libc::O_WRONLY | libc::O_SYNC), WriteFlags::FUSE_WRITE_CACHE);
        assert!(!cached.full_sync && !cached.data_sync);
    }

    #[test]
    fn a_whiteout_is_the_callers_and_mixed_rename_flags_are_refused() {
        let caller = Caller { uid: 1, gid: 2 };
        let whiteout = RenameMode::Whiteout { uid: 1, gid: 2 };
        assert_eq!(rename_mode(RenameFlags::RENAME_WHITEOUT, caller), Ok(whiteout));
        for other in [RenameFlags::RENAME_WHITEOUT, RenameFlags::RENAME_NOREPLACE] {
            let mixed = RenameFlags::RENAME_EXCHANGE | other;
            assert_eq!(rename_mode(mixed, caller), Err(Errno::EINVAL));
        }
    }
}
