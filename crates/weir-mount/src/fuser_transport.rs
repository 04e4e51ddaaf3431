//! The `/dev/fuse` transport: maps the callbacks of the `fuser` crate to [`FileSystemOps`].
//!
//! Nothing here knows how files are stored; everything here knows what the Linux FUSE client does:
//!
//! - We are the only writer, so entries, negative entries and attributes are valid for a year and
//!   the page cache is kept across opens; the kernel invalidates what its own requests change (all
//!   but the blocks that its late writes allocate: with `writeback_cache` a second must do).
//! - `open` answers `FOPEN_NOFLUSH`: a FLUSH round trip on every `close` would carry nothing
//!   (locks are local, and write errors are reported by `fsync`, as on other file systems).
//! - `opendir` answers ENOSYS when the kernel then stops asking (`FUSE_NO_OPENDIR_SUPPORT`):
//!   directory reading has no state here.
//! - With `FUSE_HANDLE_KILLPRIV_V2` the kernel asks for `security.capability` not before each write,
//!   but before the first one after it learned an inode's attributes (any refresh makes it forget,
//!   so each new file costs one such round trip; `-o noxattr` ends that), and we clear set-user-id
//!   bits. Whether the caller lacks `CAP_FSETID` is told for writes
//!   only (for truncation the protocol has a flag that `fuser` does not pass on, for `fallocate` and
//!   `copy_file_range` it has none); elsewhere every caller but uid 0 is taken to lack it.
//! - `fuser` 0.18 does not know TMPFILE, SYNCFS and STATX: `O_TMPFILE` fails with EOPNOTSUPP (programs
//!   fall back), `stat` has no birth time, and `syncfs` does not get through. (Plain `fuse` mounts
//!   would not get SYNCFS anyway: Linux sends it to `virtiofs` and, since 6.18, to `fuseblk` only.)
//!   `sync` and `syncfs` therefore write back the kernel's dirty pages and no more; durability is
//!   the business of `fsync`, on files and directories, of `weir sync` for everything at once (the
//!   attribute `weir.sync`), and of the unmount.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    BsdFileFlags, CopyFileRangeFlags, FileAttr, FileHandle, FopenFlags, Generation, INodeNo,
    InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenAccMode, OpenFlags, RenameFlags, ReplyAttr,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl,
    ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use weir::{AllocateMode, Attr, FileType, RenameMode, SetAttr, SetTime, Timestamp};

use crate::dispatch::{Class, Dispatcher, Here};
use crate::errno::Errno;
use crate::ops::{
    Caller, Done, FileSystemOps, Handle, Make, Open, Seek, SetXattr, SyncTarget, Wait, WriteMode,
};
use crate::options::TransportOptions;
use crate::weir_fs;

/// How long the kernel may trust a name or attributes. There is no other writer.
const VALID: Duration = Duration::from_secs(365 * 86_400);
/// The same where the kernel writes back later: it does not notice that this allocates blocks.
const VALID_WITH_WRITEBACK: Duration = Duration::from_secs(1);
/// Inode numbers are never given out twice.
const GENERATION: Generation = Generation(0);
/// Block size told to programs.
const BLOCK_BYTES: u32 = 4096;

/// Adapter between `fuser` and a [`FileSystemOps`].
pub(crate) struct FuserTransport {
    ops: Arc<dyn FileSystemOps>,
    dispatcher: Arc<Dispatcher>,
    options: TransportOptions,
    stateless_dirs: bool,
    /// How long the kernel may trust what it is told.
    valid: Duration,
}

thread_local! {
    /// Reused by every read of a thread, up to the largest request.
    static READ_BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl FuserTransport {
    pub(crate) fn new(
        ops: Arc<dyn FileSystemOps>,
        dispatcher: Arc<Dispatcher>,
        options: TransportOptions,
    ) -> Self {
        let valid = if options.writeback_cache { VALID_WITH_WRITEBACK } else { VALID };
        Self { ops, dispatcher, options, stateless_dirs: false, valid }
    }

    /// Serves `job` by its class. A panic drops the reply object inside, which answers EIO.
    fn run(&self, class: Class, job: impl FnOnce(&dyn FileSystemOps) + Send + 'static) {
        if let Some(permission) = self.dispatcher.admit(class) {
            self.dispatcher.run_here(permission, || job(&*self.ops));
        } else {
            let ops = Arc::clone(&self.ops);
            self.dispatcher.submit(move || job(&*ops));
        }
    }

    /// Makes `target` durable: waits for it here while another thread is free to read requests, and does not
    /// wait otherwise.
    fn sync(&self, target: SyncTarget, done: Done) {
        if let Some(permission) = self.dispatcher.admit(Class::Blocking) {
            self.dispatcher.run_here(permission, || done(self.ops.sync(&target)));
        } else {
            self.submit_sync(target, done);
        }
    }

    /// Makes `target` durable without waiting for it here.
    fn submit_sync(&self, target: SyncTarget, done: Done) {
        self.dispatcher.run_here(Here::Free, || {
            if let Err(done) = self.ops.submit_sync(&target, done) {
                let ops = Arc::clone(&self.ops);
                self.dispatcher.submit(move || done(ops.sync(&target)));
            }
        });
    }
}

/// Answers a request without a result of its own, on whichever thread its end is known.
fn answer_later(reply: ReplyEmpty) -> Done {
    Box::new(move |result| reply_empty(reply, result))
}

fn errno(error: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(error.raw())
}

fn caller(request: &Request) -> Caller {
    Caller { uid: request.uid(), gid: request.gid() }
}

fn system_time(time: Timestamp) -> SystemTime {
    let nanoseconds = Duration::from_nanos(time.nanoseconds.into());
    let whole = Duration::from_secs(time.seconds.unsigned_abs());
    let base = if time.seconds >= 0 {
        UNIX_EPOCH.checked_add(whole)
    } else {
        UNIX_EPOCH.checked_sub(whole)
    };
    base.and_then(|base| base.checked_add(nanoseconds)).unwrap_or(UNIX_EPOCH)
}

fn timestamp(time: SystemTime) -> Timestamp {
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

fn set_time(time: TimeOrNow) -> SetTime {
    match time {
        TimeOrNow::Now => SetTime::Now,
        TimeOrNow::SpecificTime(time) => SetTime::At(timestamp(time)),
    }
}

fn fuser_type(file_type: FileType) -> fuser::FileType {
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

fn fuser_attr(attr: &Attr) -> FileAttr {
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
fn negative_attr() -> FileAttr {
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

fn reply_entry(reply: ReplyEntry, valid: Duration, result: Result<Attr, Errno>) {
    match result {
        Ok(attr) => reply.entry(&valid, &fuser_attr(&attr), GENERATION),
        Err(error) => reply.error(errno(error)),
    }
}

fn reply_attr(reply: ReplyAttr, valid: Duration, result: Result<Attr, Errno>) {
    match result {
        Ok(attr) => reply.attr(&valid, &fuser_attr(&attr)),
        Err(error) => reply.error(errno(error)),
    }
}

fn reply_empty(reply: ReplyEmpty, result: Result<(), Errno>) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(errno(error)),
    }
}

fn reply_xattr(reply: ReplyXattr, size_bytes: u32, result: Result<Vec<u8>, Errno>) {
    match result {
        Ok(value) if size_bytes == 0 => reply.size(value.len() as u32),
        Ok(value) if value.len() > size_bytes as usize => reply.error(errno(Errno::ERANGE)),
        Ok(value) => reply.data(&value),
        Err(error) => reply.error(errno(error)),
    }
}

fn open_mode(flags: OpenFlags) -> Open {
    Open {
        write: flags.acc_mode() != OpenAccMode::O_RDONLY,
        truncate: flags.0 & libc::O_TRUNC != 0,
    }
}

/// What the kernel may do with an open file.
fn open_flags() -> FopenFlags {
    FopenFlags::FOPEN_KEEP_CACHE
        | FopenFlags::FOPEN_NOFLUSH
        | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
}

fn dir_flags() -> FopenFlags {
    FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_CACHE_DIR
}

fn write_mode(flags: OpenFlags, write_flags: WriteFlags) -> WriteMode {
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

fn allocate_mode(mode: i32) -> Result<AllocateMode, Errno> {
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

fn rename_mode(flags: RenameFlags) -> Result<RenameMode, Errno> {
    if flags.is_empty() {
        Ok(RenameMode::Replace)
    } else if flags == RenameFlags::RENAME_NOREPLACE {
        Ok(RenameMode::NoReplace)
    } else if flags == RenameFlags::RENAME_EXCHANGE {
        Ok(RenameMode::Exchange)
    } else {
        Err(Errno::EINVAL)
    }
}

impl fuser::Filesystem for FuserTransport {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let mut wanted = vec![
            InitFlags::FUSE_ATOMIC_O_TRUNC,
            InitFlags::FUSE_DO_READDIRPLUS | InitFlags::FUSE_READDIRPLUS_AUTO,
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_HANDLE_KILLPRIV_V2,
            InitFlags::FUSE_CACHE_SYMLINKS,
            InitFlags::FUSE_EXPORT_SUPPORT,
        ];
        if self.options.posix_acl {
            wanted.push(InitFlags::FUSE_POSIX_ACL | InitFlags::FUSE_DONT_MASK);
        }
        if self.options.writeback_cache {
            wanted.push(InitFlags::FUSE_WRITEBACK_CACHE);
        }
        for capability in wanted {
            // What an older kernel lacks, it does without.
            let _ = config.add_capabilities(capability);
        }
        self.stateless_dirs = config.add_capabilities(InitFlags::FUSE_NO_OPENDIR_SUPPORT).is_ok();
        let _ = config.set_max_write(self.options.max_write_bytes);
        let _ = config.set_max_background(self.options.max_background);
        if let Err(largest) = config.set_max_readahead(self.options.max_write_bytes) {
            let _ = config.set_max_readahead(largest);
        }
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let valid = self.valid;
        let name = name.as_bytes().to_vec();
        self.run(Class::Normal, move |ops| match ops.lookup(parent.0, &name) {
            Err(Errno::ENOENT) => reply.entry(&valid, &negative_attr(), GENERATION),
            result => reply_entry(reply, valid, result),
        });
    }

    fn forget(&self, _request: &Request, ino: INodeNo, count: u64) {
        self.run(Class::Quick, move |ops| ops.forget(ino.0, count));
    }

    fn getattr(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        let valid = self.valid;
        self.run(Class::Normal, move |ops| reply_attr(reply, valid, ops.getattr(ino.0)));
    }

    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let valid = self.valid;
        let caller = caller(request);
        let owner_changes = uid.is_some() || gid.is_some();
        let change = SetAttr {
            permissions: mode.map(|mode| mode & 0o7777),
            uid,
            gid,
            size_bytes: size,
            atime: atime.map(set_time),
            mtime: mtime.map(set_time),
            kill_suid_sgid: owner_changes || (size.is_some() && caller.uid != 0),
        };
        let class = if size.is_some() { Class::Blocking } else { Class::Normal };
        self.run(class, move |ops| reply_attr(reply, valid, ops.setattr(caller, ino.0, &change)));
    }

    fn readlink(&self, _request: &Request, ino: INodeNo, reply: ReplyData) {
        self.run(Class::Normal, move |ops| match ops.readlink(ino.0) {
            Ok(target) => reply.data(&target),
            Err(error) => reply.error(errno(error)),
        });
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let valid = self.valid;
        let Some(file_type) = FileType::from_mode(mode) else {
            reply.error(errno(Errno::EINVAL));
            return;
        };
        let new = Make { file_type, permissions: mode & 0o7777, umask, rdev };
        let (caller, name) = (caller(request), name.as_bytes().to_vec());
        self.run(Class::Normal, move |ops| {
            reply_entry(reply, valid, ops.make(caller, parent.0, &name, &new));
        });
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let valid = self.valid;
        let file_type = FileType::Directory;
        let new = Make { file_type, permissions: mode & 0o7777, umask, rdev: 0 };
        let (caller, name) = (caller(request), name.as_bytes().to_vec());
        self.run(Class::Normal, move |ops| {
            reply_entry(reply, valid, ops.make(caller, parent.0, &name, &new));
        });
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = name.as_bytes().to_vec();
        self.run(Class::Normal, move |ops| reply_empty(reply, ops.unlink(parent.0, &name)));
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = name.as_bytes().to_vec();
        self.run(Class::Normal, move |ops| reply_empty(reply, ops.rmdir(parent.0, &name)));
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let valid = self.valid;
        let (caller, name) = (caller(request), name.as_bytes().to_vec());
        let target = target.as_os_str().as_bytes().to_vec();
        self.run(Class::Normal, move |ops| {
            reply_entry(reply, valid, ops.symlink(caller, parent.0, &name, &target));
        });
    }

    fn rename(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let mode = match rename_mode(flags) {
            Ok(mode) => mode,
            Err(error) => return reply.error(errno(error)),
        };
        let (name, new_name) = (name.as_bytes().to_vec(), new_name.as_bytes().to_vec());
        self.run(Class::Normal, move |ops| {
            reply_empty(reply, ops.rename(parent.0, &name, new_parent.0, &new_name, mode));
        });
    }

    fn link(
        &self,
        _request: &Request,
        ino: INodeNo,
        parent: INodeNo,
        name: &OsStr,
        reply: ReplyEntry,
    ) {
        let valid = self.valid;
        let name = name.as_bytes().to_vec();
        self.run(Class::Normal, move |ops| {
            reply_entry(reply, valid, ops.link(ino.0, parent.0, &name));
        });
    }

    fn open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let (caller, open) = (caller(request), open_mode(flags));
        let class = if open.truncate { Class::Blocking } else { Class::Normal };
        self.run(class, move |ops| match ops.open(caller, ino.0, open) {
            Ok(handle) => reply.opened(FileHandle(handle.0), open_flags()),
            Err(error) => reply.error(errno(error)),
        });
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let valid = self.valid;
        let new = Make { file_type: FileType::Regular, permissions: mode & 0o7777, umask, rdev: 0 };
        let (caller, name) = (caller(request), name.as_bytes().to_vec());
        let (open, exclusive) = (open_mode(OpenFlags(flags)), flags & libc::O_EXCL != 0);
        self.run(Class::Normal, move |ops| {
            match ops.create(caller, parent.0, &name, &new, open, exclusive) {
                Ok((attr, handle)) => reply.created(
                    &valid,
                    &fuser_attr(&attr),
                    GENERATION,
                    FileHandle(handle.0),
                    open_flags(),
                ),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn read(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        // Cached data is answered at once; what has to wait for the device waits elsewhere.
        let mut reply = Some(reply);
        let mut must_wait = false;
        if let Some(permission) = self.dispatcher.admit(Class::Quick) {
            self.dispatcher.run_here(permission, || {
                READ_BUFFER.with_borrow_mut(|buffer| {
                    let handle = Handle(handle.0);
                    match self.ops.read(handle, offset, size as usize, buffer, Wait::No) {
                        Err(Errno::EAGAIN) => must_wait = true,
                        result => answer_read(reply.take(), result, buffer),
                    }
                });
            });
        }
        if must_wait && let Some(reply) = reply {
            self.run(Class::Blocking, move |ops| {
                READ_BUFFER.with_borrow_mut(|buffer| {
                    let handle = Handle(handle.0);
                    let result = ops.read(handle, offset, size as usize, buffer, Wait::Yes);
                    answer_read(Some(reply), result, buffer);
                });
            });
        }
    }

    fn write(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let mode = write_mode(flags, write_flags);
        let handle = Handle(handle.0);
        let synchronous = mode.data_sync || mode.full_sync;
        if synchronous && let Some(permission) = self.dispatcher.admit(Class::Blocking) {
            let result = || self.ops.write(handle, offset, data, mode);
            self.dispatcher.run_here(permission, || answer_write(reply, result()));
        } else if let Some(permission) = self.dispatcher.admit(Class::Normal) {
            let plain = WriteMode { data_sync: false, full_sync: false, ..mode };
            let mut written = None;
            self.dispatcher.run_here(permission, || {
                match self.ops.write(handle, offset, data, plain) {
                    Ok(count) if synchronous => written = Some((reply, count)),
                    result => answer_write(reply, result),
                }
            });
            if let Some((reply, count)) = written {
                let range = offset..offset.saturating_add(count as u64);
                let target = SyncTarget::File { handle, range, data_only: !mode.full_sync };
                let done = move |result: Result<(), Errno>| {
                    answer_write(reply, result.map(|()| count));
                };
                self.submit_sync(target, Box::new(done));
            }
        } else {
            let (ops, data) = (Arc::clone(&self.ops), data.to_vec());
            self.dispatcher.submit(move || {
                answer_write(reply, ops.write(handle, offset, &data, mode));
            });
        }
    }

    fn flush(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        // Only kernels without FOPEN_NOFLUSH ask, and stop after this.
        reply.error(errno(Errno::ENOSYS));
    }

    fn release(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.run(Class::Normal, move |ops| {
            ops.release(Handle(handle.0));
            reply.ok();
        });
    }

    fn fsync(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        data_only: bool,
        reply: ReplyEmpty,
    ) {
        let target = SyncTarget::File { handle: Handle(handle.0), range: 0..u64::MAX, data_only };
        self.sync(target, answer_later(reply));
    }

    fn opendir(&self, _request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        if self.stateless_dirs {
            reply.error(errno(Errno::ENOSYS));
        } else {
            reply.opened(FileHandle(0), dir_flags());
        }
    }

    fn readdir(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        self.run(Class::Normal, move |ops| {
            let result = ops.readdir(ino.0, offset, &mut |entry| {
                let name = OsStr::from_bytes(&entry.name);
                !reply.add(INodeNo(entry.ino), entry.cookie, fuser_type(entry.file_type), name)
            });
            match result {
                Ok(()) => reply.ok(),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn readdirplus(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let valid = self.valid;
        self.run(Class::Normal, move |ops| {
            let result = ops.readdir_plus(ino.0, offset, &mut |entry, attr| {
                let name = OsStr::from_bytes(&entry.name);
                let attr = fuser_attr(attr);
                !reply.add(INodeNo(entry.ino), entry.cookie, name, &valid, &attr, GENERATION)
            });
            match result {
                Ok(()) => reply.ok(),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn fsyncdir(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        _data_only: bool,
        reply: ReplyEmpty,
    ) {
        self.sync(SyncTarget::Directory(ino.0), answer_later(reply));
    }

    fn statfs(&self, _request: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        self.run(Class::Normal, move |ops| match ops.statfs() {
            Ok(space) => reply.statfs(
                space.total_blocks,
                space.free_blocks,
                space.available_blocks,
                space.inodes.saturating_add(space.free_inodes),
                space.free_inodes,
                BLOCK_BYTES,
                space.max_name_bytes,
                BLOCK_BYTES,
            ),
            Err(error) => reply.error(errno(error)),
        });
    }

    fn setxattr(
        &self,
        request: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let mode = match flags {
            0 => SetXattr::Any,
            libc::XATTR_CREATE => SetXattr::Create,
            libc::XATTR_REPLACE => SetXattr::Replace,
            _ => return reply.error(errno(Errno::EINVAL)),
        };
        let caller = caller(request);
        let (name, value) = (name.as_bytes().to_vec(), value.to_vec());
        let class = if name == weir_fs::SYNC { Class::Blocking } else { Class::Normal };
        self.run(class, move |ops| {
            reply_empty(reply, ops.setxattr(caller, ino.0, &name, &value, mode));
        });
    }

    fn getxattr(
        &self,
        _request: &Request,
        ino: INodeNo,
        name: &OsStr,
        size: u32,
        reply: ReplyXattr,
    ) {
        if !self.options.xattr {
            // The kernel never asks again.
            return reply.error(errno(Errno::ENOSYS));
        }
        let name = name.as_bytes().to_vec();
        self.run(Class::Normal, move |ops| reply_xattr(reply, size, ops.getxattr(ino.0, &name)));
    }

    fn listxattr(&self, _request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        if !self.options.xattr {
            return reply.error(errno(Errno::ENOSYS));
        }
        self.run(Class::Normal, move |ops| {
            let list = ops.listxattr(ino.0).map(|names| {
                let mut list = Vec::new();
                for name in names {
                    list.extend_from_slice(&name);
                    list.push(0);
                }
                list
            });
            reply_xattr(reply, size, list);
        });
    }

    fn removexattr(&self, _request: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = name.as_bytes().to_vec();
        self.run(Class::Normal, move |ops| reply_empty(reply, ops.removexattr(ino.0, &name)));
    }

    fn ioctl(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _flags: IoctlFlags,
        _command: u32,
        _input: &[u8],
        _output_bytes: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(fuser::Errno::from_i32(libc::ENOTTY));
    }

    fn fallocate(
        &self,
        request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let mode = match allocate_mode(mode) {
            Ok(mode) => mode,
            Err(error) => return reply.error(errno(error)),
        };
        let caller = caller(request);
        self.run(Class::Blocking, move |ops| {
            reply_empty(reply, ops.allocate(caller, Handle(handle.0), mode, offset, length));
        });
    }

    fn lseek(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let seek = match whence {
            libc::SEEK_DATA => Seek::Data,
            libc::SEEK_HOLE => Seek::Hole,
            _ => return reply.error(errno(Errno::EINVAL)),
        };
        let Ok(offset) = u64::try_from(offset) else {
            return reply.error(errno(Errno::ENXIO));
        };
        self.run(Class::Normal, move |ops| match ops.seek(Handle(handle.0), offset, seek) {
            Ok(found) => reply.offset(found as i64),
            Err(error) => reply.error(errno(error)),
        });
    }

    fn copy_file_range(
        &self,
        request: &Request,
        _ino_in: INodeNo,
        from: FileHandle,
        offset: u64,
        _ino_out: INodeNo,
        to: FileHandle,
        to_offset: u64,
        length: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        // The reply's length has 32 bits, and one request should not run for minutes.
        let length = length.min(1 << 30);
        let caller = caller(request);
        self.run(Class::Blocking, move |ops| {
            match ops.copy_range(caller, Handle(from.0), offset, Handle(to.0), to_offset, length) {
                Ok(copied) => reply.written(copied as u32),
                Err(error) => reply.error(errno(error)),
            }
        });
    }
}

fn answer_write(reply: ReplyWrite, result: Result<usize, Errno>) {
    match result {
        Ok(written) => reply.written(written as u32),
        Err(error) => reply.error(errno(error)),
    }
}

fn answer_read(reply: Option<ReplyData>, result: Result<(), Errno>, buffer: &[u8]) {
    let Some(reply) = reply else { return };
    match result {
        Ok(()) => reply.data(buffer),
        Err(error) => reply.error(errno(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn whiteouts_and_mixed_rename_flags_are_refused() {
        assert_eq!(rename_mode(RenameFlags::RENAME_WHITEOUT), Err(Errno::EINVAL));
        let mixed = RenameFlags::RENAME_EXCHANGE | RenameFlags::RENAME_NOREPLACE;
        assert_eq!(rename_mode(mixed), Err(Errno::EINVAL));
    }
}
