//! The `/dev/fuse` transport: maps the callbacks of the `fuser` crate to [`FileSystemOps`].
//!
//! Nothing here knows how files are stored; everything here knows what the Linux FUSE client does:
//!
//! - We are the only writer, so entries, negative entries and attributes are valid for a year and
//!   the page cache is kept across opens; the kernel invalidates what its own requests change (all
//!   but the blocks that its late writes allocate: with `writeback_cache` a second must do).
//! - `open` answers `FOPEN_NOFLUSH`: a FLUSH round trip on every `close` would carry nothing
//!   (locks are local, and write errors are reported by `fsync`, as on other file systems).
//! - A handle that made or emptied its file, and only writes, goes past the page cache (`FOPEN_DIRECT_IO`): one copy of the data less, and
//!   one request less, since the kernel then leaves it to us to end a file's privileges. Other handles have the page cache, from which
//!   the kernel drops what is written past it.
//! - `opendir` answers ENOSYS when the kernel then stops asking (`FUSE_NO_OPENDIR_SUPPORT`):
//!   directory reading has no state here.
//! - The kernel asks where data and holes are without sending first what programs have stored through mappings: a file that somebody
//!   may have mapped for writing is fetched before the answer.
//! - With `FUSE_HANDLE_KILLPRIV_V2` the kernel asks for `security.capability` not before each write,
//!   but before the first one after it learned an inode's attributes (any refresh makes it forget,
//!   so each new file costs one such round trip; `-o noxattr` ends that), and we clear set-user-id
//!   bits. Whether the caller lacks `CAP_FSETID` is told for writes
//!   only (for truncation the protocol has a flag that `fuser` does not pass on, for `fallocate` and
//!   `copy_file_range` it has none); elsewhere every caller but uid 0 is taken to lack it.
//! - `fuser` 0.18 does not know TMPFILE, SYNCFS and STATX: `O_TMPFILE` fails with EOPNOTSUPP (programs
//!   fall back), `stat` has no birth time (both work over `crate::uring`), and `syncfs` does not get through. (Plain `fuse` mounts
//!   would not get SYNCFS anyway: Linux sends it to `virtiofs` and, since 6.18, to `fuseblk` only.)
//!   `sync` and `syncfs` therefore write back the kernel's dirty pages and no more; durability is
//!   the business of `fsync`, on files and directories, of `weir sync` for everything at once (the
//!   attribute `weir.sync`), and of the unmount.

use std::cell::{Cell, RefCell};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, CopyFileRangeFlags, FileHandle, INodeNo, InitFlags, IoctlFlags, KernelConfig,
    LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek, ReplyOpen, ReplyStatfs,
    ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use weir::{FileType, SetAttr};

use crate::dispatch::{Asks, Class, Dispatcher, Here};
use crate::errno::Errno;
use crate::fuser_convert::{
    BLOCK_BYTES, GENERATION, allocate_mode, answer_change, answer_durably, answer_entry,
    answer_ioctl, answer_later, answer_read, answer_write, as_member, caller, dir_flags, errno,
    fuser_attr, fuser_type, negative_attr, open_flags, open_mode, rename_mode, reply_attr,
    reply_empty, reply_entry, reply_xattr, set_time, visible_names, write_mode, xattr_mode,
};
use crate::ioctl::{self, Command};
use crate::ops::{
    Change, ControlTarget, Done, FileSystemOps, Handle, Make, OpResult, Seek, SyncTarget, Wait,
    WriteMode,
};
use crate::options::TransportOptions;

/// How long the kernel may trust a name or attributes. There is no other writer.
const VALID: Duration = Duration::from_secs(365 * 86_400);
/// The same where the kernel writes back later: it does not notice that this allocates blocks.
const VALID_WITH_WRITEBACK: Duration = Duration::from_secs(1);

/// Where rings bring the requests, this is how long a thread rests after one that tells what the kernel has forgotten. Nothing else comes
/// its way that anybody waits for; and who removes files has the kernel forget each in turn, which would wake a thread up each time. What is forgotten meanwhile
/// comes as one request.
const FORGET_REST: Duration = Duration::from_millis(1);

/// How long the kernel may trust what it is told.
pub(crate) fn valid_for(options: &TransportOptions) -> Duration {
    if options.writeback_cache { VALID_WITH_WRITEBACK } else { VALID }
}

/// Adapter between `fuser` and a [`FileSystemOps`].
pub(crate) struct FuserTransport {
    ops: Arc<dyn FileSystemOps>,
    dispatcher: Arc<Dispatcher>,
    options: TransportOptions,
    stateless_dirs: bool,
    /// Rings are at hand; set to whether the kernel takes them.
    rings: Arc<AtomicBool>,
    /// How long the kernel may trust what it is told.
    valid: Duration,
}

thread_local! {
    /// Reused by every read of a thread, up to the largest request.
    static READ_BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    /// The number of the thread's last request that told of forgotten inodes.
    static FORGET: Cell<u64> = const { Cell::new(0) };
}

/// Whatever is in the buffer will be overwritten: only growth costs.
fn with_size(buffer: &mut Vec<u8>, size_bytes: u32) -> &mut [u8] {
    buffer.resize(size_bytes as usize, 0);
    buffer
}

impl FuserTransport {
    pub(crate) fn new(
        ops: Arc<dyn FileSystemOps>,
        dispatcher: Arc<Dispatcher>,
        options: TransportOptions,
        rings: Arc<AtomicBool>,
    ) -> Self {
        let valid = valid_for(&options);
        Self { ops, dispatcher, options, stateless_dirs: false, rings, valid }
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

    /// Serves `job`, which waits for the kernel as `asks` says, here while another thread is free to read requests.
    fn run_asking(&self, asks: Asks, job: impl FnOnce(&dyn FileSystemOps) + Send + 'static) {
        if let Some(permission) = self.dispatcher.admit(Class::Blocking) {
            self.dispatcher.run_here(permission, || job(&*self.ops));
        } else {
            let ops = Arc::clone(&self.ops);
            self.dispatcher.submit_asking(asks, move || job(&*ops));
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

    /// A command of our own. Whatever has to wait for durability does not do so here.
    fn control(&self, target: ControlTarget, command: Command, reply: ReplyIoctl) {
        let answer = |reply| -> Done {
            Box::new(move |result: Result<(), Errno>| {
                answer_ioctl(reply, result.map(|()| Vec::new()));
            })
        };
        match command {
            Command::SyncRange { range, data_only, start } => {
                let what = match target.handle {
                    Some(handle) => SyncTarget::File { handle, range, data_only },
                    None => SyncTarget::Directory(target.ino),
                };
                self.begin_sync(what, start, answer(reply));
            }
            Command::SyncVolume { start, mapped: true } => {
                let done = answer(reply);
                self.run_asking(Asks::Content, move |ops| ops.sync_with_mapped(start, done));
            }
            Command::SyncVolume { start, mapped: false } => {
                self.begin_sync(SyncTarget::Volume, start, answer(reply));
            }
            Command::WaitLsn { lsn, timeout_us, push } => {
                let done = answer(reply);
                self.dispatcher.run_here(Here::Free, || {
                    self.ops.wait_lsn(lsn, timeout_us, push, done);
                });
            }
            Command::BatchCommit { id, sync } => {
                let done = Box::new(move |result| answer_ioctl(reply, result));
                self.run_asking(Asks::Names, move |ops| ops.commit_batch(target, id, sync, done));
            }
            command if command.asks_the_kernel() => {
                self.run_asking(Asks::Content, move |ops| {
                    answer_ioctl(reply, ops.control(target, &command));
                });
            }
            command => {
                let class = command.class();
                self.run(class, move |ops| answer_ioctl(reply, ops.control(target, &command)));
            }
        }
    }

    /// Makes `target` durable; with `start`, answers as soon as that is under way: how it ends is told by the next sync of the same handle.
    fn begin_sync(&self, target: SyncTarget, start: bool, done: Done) {
        if !start {
            return self.sync(target, done);
        }
        self.dispatcher.run_here(Here::Free, || {
            if self.ops.start_sync(&target) {
                return done(Ok(()));
            }
            let ops = Arc::clone(&self.ops);
            self.dispatcher.submit(move || done(ops.sync(&target)));
        });
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
        let rings = self.rings.load(Ordering::Relaxed)
            && config.add_capabilities(InitFlags::FUSE_OVER_IO_URING).is_ok();
        self.rings.store(rings, Ordering::Relaxed);
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

    fn forget(&self, request: &Request, ino: INodeNo, count: u64) {
        self.run(Class::Quick, move |ops| ops.forget(ino.0, count));
        // One request may tell of many inodes.
        if self.rings.load(Ordering::Relaxed)
            && FORGET.replace(request.unique().0) != request.unique().0
        {
            std::thread::sleep(FORGET_REST);
        }
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
        self.run(class, move |ops| {
            let result = ops.setattr(caller, ino.0, &change);
            answer_durably(ops, Change::Attributes, result, move |result| {
                reply_attr(reply, valid, result);
            });
        });
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
            answer_entry(ops, reply, valid, ops.make(caller, parent.0, &name, &new));
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
            answer_entry(ops, reply, valid, ops.make(caller, parent.0, &name, &new));
        });
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = name.as_bytes().to_vec();
        self.run(Class::Normal, move |ops| {
            answer_change(ops, Change::Names, reply, ops.unlink(parent.0, &name));
        });
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = name.as_bytes().to_vec();
        self.run(Class::Normal, move |ops| {
            answer_change(ops, Change::Names, reply, ops.rmdir(parent.0, &name));
        });
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
            answer_entry(ops, reply, valid, ops.symlink(caller, parent.0, &name, &target));
        });
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let mode = match rename_mode(flags, caller(request)) {
            Ok(mode) => mode,
            Err(error) => return reply.error(errno(error)),
        };
        let (name, new_name) = (name.as_bytes().to_vec(), new_name.as_bytes().to_vec());
        self.run(Class::Normal, move |ops| {
            let result = ops.rename(parent.0, &name, new_parent.0, &new_name, mode);
            answer_change(ops, Change::Names, reply, result);
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
            answer_entry(ops, reply, valid, ops.link(ino.0, parent.0, &name));
        });
    }

    fn open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let (caller, open) = (caller(request), open_mode(flags));
        let open_flags = open_flags(flags, false, self.options.new_past_cache());
        let class = if open.truncate { Class::Blocking } else { Class::Normal };
        self.run(class, move |ops| {
            let result = ops.open(caller, ino.0, open);
            let answer = move |result: OpResult<Handle>| match result {
                Ok(handle) => reply.opened(FileHandle(handle.0), open_flags),
                Err(error) => reply.error(errno(error)),
            };
            if open.truncate {
                answer_durably(ops, Change::Attributes, result, answer);
            } else {
                answer(result);
            }
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
        let open_flags = open_flags(OpenFlags(flags), true, self.options.new_past_cache());
        self.run(Class::Normal, move |ops| {
            let result = ops.create(caller, parent.0, &name, &new, open, exclusive);
            answer_durably(ops, Change::Names, result, move |result| match result {
                Ok((attr, handle)) => {
                    let (attr, handle) = (fuser_attr(&attr), FileHandle(handle.0));
                    reply.created(&valid, &attr, GENERATION, handle, open_flags);
                }
                Err(error) => reply.error(errno(error)),
            });
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
                    let buffer = with_size(buffer, size);
                    match self.ops.read(Handle(handle.0), offset, buffer, Wait::No) {
                        Err(Errno::EAGAIN) => must_wait = true,
                        result => answer_read(reply.take(), result, buffer),
                    }
                });
            });
        }
        if must_wait && let Some(reply) = reply {
            self.run(Class::Blocking, move |ops| {
                READ_BUFFER.with_borrow_mut(|buffer| {
                    let buffer = with_size(buffer, size);
                    let result = ops.read(Handle(handle.0), offset, buffer, Wait::Yes);
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
            let (mut unread, mut is_empty) = (None, true);
            let result = ops.readdir_plus(ino.0, offset, &mut |entry, attr| {
                let attr = match attr {
                    Ok(attr) => fuser_attr(attr),
                    // `fuser` has no entry without attributes: the answer ends before it, and the next one is the error.
                    Err(error) => {
                        unread = Some(error);
                        return false;
                    }
                };
                let name = OsStr::from_bytes(&entry.name);
                let ino = INodeNo(entry.ino);
                let fits = !reply.add(ino, entry.cookie, name, &valid, &attr, GENERATION);
                is_empty &= !fits;
                fits
            });
            match result.and(unread.filter(|_| is_empty).map_or(Ok(()), Err)) {
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
        if !self.options.xattr {
            return reply.error(errno(Errno::ENOSYS));
        }
        let mode = match xattr_mode(flags) {
            Ok(mode) => mode,
            Err(error) => return reply.error(errno(error)),
        };
        let (caller, thread) = (caller(request), request.pid());
        let (name, value) = (name.as_bytes().to_vec(), value.to_vec());
        self.run(Class::Normal, move |ops| {
            let caller = as_member(ops, caller, thread, ino.0, &name);
            let result = ops.setxattr(caller, ino.0, &name, &value, mode);
            answer_change(ops, Change::Attributes, reply, result);
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

    fn listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        if !self.options.xattr {
            return reply.error(errno(Errno::ENOSYS));
        }
        let caller = caller(request);
        self.run(Class::Normal, move |ops| {
            let list = ops.listxattr(ino.0).map(|names| visible_names(caller, &names));
            reply_xattr(reply, size, list);
        });
    }

    fn removexattr(&self, _request: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        if !self.options.xattr {
            return reply.error(errno(Errno::ENOSYS));
        }
        let name = name.as_bytes().to_vec();
        self.run(Class::Normal, move |ops| {
            answer_change(ops, Change::Attributes, reply, ops.removexattr(ino.0, &name));
        });
    }

    fn ioctl(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        flags: IoctlFlags,
        command: u32,
        input: &[u8],
        _output_bytes: u32,
        reply: ReplyIoctl,
    ) {
        let command = match ioctl::decode(command, input) {
            Ok(command) => command,
            Err(error) => return reply.error(errno(error)),
        };
        let is_dir = flags.contains(IoctlFlags::FUSE_IOCTL_DIR);
        let handle = (!is_dir).then_some(Handle(handle.0));
        let (caller, thread) = (caller(request), request.pid());
        let target = ControlTarget { ino: ino.0, handle, caller, thread };
        self.control(target, command, reply);
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
        // After an error it asks the kernel.
        self.run_asking(Asks::Content, move |ops| {
            reply_empty(reply, ops.allocate(caller, Handle(handle.0), mode, offset, length));
        });
    }

    fn lseek(
        &self,
        _request: &Request,
        ino: INodeNo,
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
        let answer = move |ops: &dyn FileSystemOps| match ops.seek(Handle(handle.0), offset, seek) {
            Ok(found) => reply.offset(found as i64),
            Err(error) => reply.error(errno(error)),
        };
        if self.ops.is_written(ino.0) {
            let ops = Arc::clone(&self.ops);
            self.dispatcher.submit_asking(Asks::Content, move || {
                ops.fetch_mapped(Some(ino.0));
                answer(&*ops);
            });
        } else {
            self.run(Class::Normal, answer);
        }
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
