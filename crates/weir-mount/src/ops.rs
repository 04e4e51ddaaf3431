//! The operations a mount needs, free of any transport.
//!
//! A transport (today [`crate::fuser_transport`] over `/dev/fuse`) decodes requests, calls one method
//! of [`FileSystemOps`] each, and encodes the reply. The trait knows nothing of the wire protocol,
//! of reply objects or of threads, so that another transport can take its place.
//!
//! Invariants every implementation keeps:
//! - Methods are called from several threads at once, in any order.
//! - Permissions have been checked by the kernel (`default_permissions`).
//! - Each [`Attr`] returned by a *name-giving* call (`lookup`, `make`, `create`, `symlink`, `link`,
//!   `tmpfile`, and `readdir_plus` entries) counts as one reference on the inode, released by
//!   [`FileSystemOps::forget`]. The inode stays usable until then, with or without a name.
//! - An inode number names one inode for as long as it is referenced.

use std::ops::Range;
use std::sync::Weak;

use crate::errno::Errno;
use crate::ioctl::Command;
use weir::{AllocateMode, Attr, DirEntry, FileType, RenameMode, SetAttr, StatFs, SyncKind};

/// Result of every operation.
pub type OpResult<T> = Result<T, Errno>;

/// On whose behalf a request is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    /// Effective (file system) user.
    pub uid: u32,
    /// Effective (file system) group.
    pub gid: u32,
}

/// A new inode as the program asked for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Make {
    /// What it is.
    pub file_type: FileType,
    /// Permission bits (07777) as given.
    pub permissions: u32,
    /// The caller's umask, not applied yet: a default ACL of the directory overrides it.
    pub umask: u32,
    /// Device number of device nodes.
    pub rdev: u32,
}

/// How a regular file is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Open {
    /// Writes will come.
    pub write: bool,
    /// Cut the file to length 0 first.
    pub truncate: bool,
    /// What it changes is durable before the reply (`O_DSYNC`, `O_SYNC`). Writes say so themselves ([`WriteMode`]); this is for
    /// `allocate` and `copy_range`.
    pub sync: Option<SyncKind>,
}

/// What an operation has changed, of what a mount can promise to make durable before the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Names of a directory.
    Names,
    /// Attributes of an inode, extended ones and its size included.
    Attributes,
}

/// What a write asks beyond storing its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WriteMode {
    /// Durable before the reply: the data and what is needed to find it.
    pub data_sync: bool,
    /// Durable before the reply: all attributes too.
    pub full_sync: bool,
    /// The writer is not privileged: clear set-user-id and set-group-id.
    pub kill_suid_sgid: bool,
}

/// Whether a call may wait for the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Answer [`Errno::EAGAIN`] instead.
    No,
    /// Wait.
    Yes,
}

/// What an extended attribute may replace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetXattr {
    /// Create or replace.
    Any,
    /// Must not exist.
    Create,
    /// Must exist.
    Replace,
    /// Must not exist, and must: always an error, which says what is the case.
    CreateAndReplace,
}

/// Where `seek` looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seek {
    /// The next data at or after the offset.
    Data,
    /// The next hole at or after the offset; the end of the file counts as one.
    Hole,
}

/// A file handle, as given out by `open`, `create` and `tmpfile`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Handle(pub u64);

/// What is to be made durable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SyncTarget {
    /// Bytes of an open file.
    File {
        /// Which.
        handle: Handle,
        /// Bytes; `0..u64::MAX`: all.
        range: Range<u64>,
        /// Leave out attributes that are not needed to read the bytes.
        data_only: bool,
    },
    /// Every name of a directory, by inode number.
    Directory(u64),
    /// Everything before the call.
    Volume,
}

/// Told once how a request ended, on any thread, which it must not keep waiting.
pub type Done = Box<dyn FnOnce(OpResult<()>) + Send>;

/// Told once what a command answers, on any thread, which it must not keep waiting.
pub type Answer = Box<dyn FnOnce(OpResult<Vec<u8>>) + Send>;

/// What the kernel remembers of the file system, for changes that it did not ask for. These calls may wait for requests that are
/// being served: no lock that a request could need may be held.
pub trait KernelCache: Send + Sync {
    /// The attributes of an inode have changed.
    fn attributes_changed(&self, ino: u64);
    /// Content and attributes of an inode have changed, or are going to: dirty pages are written back.
    fn content_changed(&self, ino: u64);
    /// What a name refers to has changed.
    fn name_changed(&self, dir: u64, name: &[u8]);
    /// Asks the kernel to forget those of `inodes` that nobody uses; [`FileSystemOps::forget`] says of which it did. False: this
    /// kernel cannot be asked.
    fn forget(&self, inodes: &[u64]) -> bool;
    /// A file has become longer, and ends with `last`. (That its attributes have changed does not move the end at which the kernel appends.)
    fn grown(&self, _ino: u64, _size_bytes: u64, _last: u8) {}
    /// Whether the kernel goes by its own size of a file that it knows, whatever it is told (`writeback_cache`).
    fn keeps_sizes(&self) -> bool {
        false
    }
}

/// What a command of [`crate::ioctl`] is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ControlTarget {
    /// The inode.
    pub ino: u64,
    /// The open file; `None`: a directory.
    pub handle: Option<Handle>,
    /// Who asks.
    pub caller: Caller,
    /// The thread that asks, and waits for the answer; 0: one that this process cannot see.
    pub thread: u32,
}

/// One directory entry on its way out. The visitor returns false when its buffer is full; that
/// entry then counts as not read.
pub type Visit<'a> = &'a mut dyn FnMut(&DirEntry) -> bool;

/// As [`Visit`], with the attributes of the entry, or why they cannot be read.
pub type VisitPlus<'a> = &'a mut dyn FnMut(&DirEntry, OpResult<&Attr>) -> bool;

/// A file system, as seen by a transport. See the module's head for the invariants.
pub trait FileSystemOps: Send + Sync + 'static {
    /// The entry `name` of `parent`. `.` and `..` may be asked for by a file server.
    fn lookup(&self, parent: u64, name: &[u8]) -> OpResult<Attr>;
    /// Releases `count` references on `ino`.
    fn forget(&self, ino: u64, count: u64);

    /// Attributes of `ino`.
    fn getattr(&self, ino: u64) -> OpResult<Attr>;
    /// Changes attributes of `ino`.
    fn setattr(&self, caller: Caller, ino: u64, change: &SetAttr) -> OpResult<Attr>;

    /// A new inode with a name.
    fn make(&self, caller: Caller, parent: u64, name: &[u8], new: &Make) -> OpResult<Attr>;
    /// A new regular file, open. Opens an existing one unless `exclusive`.
    fn create(
        &self,
        caller: Caller,
        parent: u64,
        name: &[u8],
        new: &Make,
        open: Open,
        exclusive: bool,
    ) -> OpResult<(Attr, Handle)>;
    /// A new regular file without a name, open.
    fn tmpfile(&self, caller: Caller, parent: u64, new: &Make) -> OpResult<(Attr, Handle)>;
    /// A new symbolic link.
    fn symlink(&self, caller: Caller, parent: u64, name: &[u8], target: &[u8]) -> OpResult<Attr>;
    /// Target of a symbolic link.
    fn readlink(&self, ino: u64) -> OpResult<Vec<u8>>;
    /// One more name for `ino`.
    fn link(&self, ino: u64, parent: u64, name: &[u8]) -> OpResult<Attr>;
    /// Removes a name of something that is not a directory.
    fn unlink(&self, parent: u64, name: &[u8]) -> OpResult<()>;
    /// Removes an empty directory.
    fn rmdir(&self, parent: u64, name: &[u8]) -> OpResult<()>;
    /// Renames.
    fn rename(
        &self,
        parent: u64,
        name: &[u8],
        new_parent: u64,
        new_name: &[u8],
        mode: RenameMode,
    ) -> OpResult<()>;

    /// Entries after `cookie` (0: from the start), `.` and `..` included. An error is the answer only if no entry was visited: the kernel
    /// takes none, and counts no reference, of an answer that is one.
    fn readdir(&self, dir: u64, cookie: u64, visit: Visit<'_>) -> OpResult<()>;
    /// As `readdir`, with attributes. Every visited entry that has some, but for `.` and `..`, is referenced unless
    /// the visitor refused it.
    fn readdir_plus(&self, dir: u64, cookie: u64, visit: VisitPlus<'_>) -> OpResult<()>;
    /// Opens a regular file.
    fn open(&self, caller: Caller, ino: u64, open: Open) -> OpResult<Handle>;
    /// Closes a handle.
    fn release(&self, handle: Handle);
    /// Reads at `offset` into `buffer`; answers how many bytes. Fewer than asked for only at the end of the file.
    fn read(&self, handle: Handle, offset: u64, buffer: &mut [u8], wait: Wait) -> OpResult<usize>;
    /// Writes all of `data`.
    fn write(&self, handle: Handle, offset: u64, data: &[u8], mode: WriteMode) -> OpResult<usize>;
    /// Makes `target` durable, and waits until it is.
    fn sync(&self, target: &SyncTarget) -> OpResult<()>;
    /// As [`FileSystemOps::sync`], if there is nothing to wait for: all is durable already. `None`: that is not known without waiting.
    fn sync_if_durable(&self, target: &SyncTarget) -> Option<OpResult<()>> {
        let _ = target;
        None
    }
    /// As [`FileSystemOps::sync`], but answers at once; `done` hears of the end. Gives `done` back if the request cannot be
    /// submitted without waiting: nothing has been done then.
    fn submit_sync(&self, target: &SyncTarget, done: Done) -> Result<(), Done> {
        let _ = target;
        Err(done)
    }
    /// Begins to make `target` durable, which nobody waits for: an error is told by the next sync of the same handle, so it must not count
    /// as told before. False: that cannot be begun without waiting, or not at all, and nothing has been done; [`FileSystemOps::sync`] may wait,
    /// and says why.
    fn start_sync(&self, target: &SyncTarget) -> bool {
        let _ = target;
        false
    }
    /// Programs were promised that such a change is durable when they hear of it: so [`FileSystemOps::make_durable`] comes between a
    /// call that has made one and its answer.
    fn must_be_durable(&self, change: Change) -> bool {
        let _ = change;
        false
    }
    /// Makes all names and attributes as they are now durable and tells `done`. Does not wait.
    fn make_durable(&self, done: Done) {
        done(Ok(()));
    }
    /// Has the kernel send what it holds of `only` (`None`: of all files that are open for writing) and has not sent: what was
    /// stored through mappings, or is kept by `writeback_cache`. Waits for the kernel, which waits for requests: not for a
    /// thread that has to serve those.
    fn fetch_mapped(&self, only: Option<u64>) {
        let _ = only;
    }
    /// Reserves, frees or zeroes a range. After an error the kernel may be told that it knows nothing of the file, which waits for it
    /// as [`FileSystemOps::fetch_mapped`] does.
    fn allocate(
        &self,
        caller: Caller,
        handle: Handle,
        mode: AllocateMode,
        offset: u64,
        length: u64,
    ) -> OpResult<()>;
    /// Somebody has the file open for writing, so the kernel may hold what was stored through a mapping: a transport has it fetched
    /// ([`FileSystemOps::fetch_mapped`]) before it seeks.
    fn is_written(&self, ino: u64) -> bool {
        let _ = ino;
        false
    }
    /// The next data or hole, of what the kernel has sent.
    fn seek(&self, handle: Handle, offset: u64, seek: Seek) -> OpResult<u64>;
    /// Copies a range between two files of the volume; returns the bytes copied.
    fn copy_range(
        &self,
        caller: Caller,
        from: Handle,
        offset: u64,
        to: Handle,
        to_offset: u64,
        length: u64,
    ) -> OpResult<u64>;

    /// An extended attribute's value.
    fn getxattr(&self, ino: u64, name: &[u8]) -> OpResult<Vec<u8>>;
    /// Sets an extended attribute.
    fn setxattr(
        &self,
        caller: Caller,
        ino: u64,
        name: &[u8],
        value: &[u8],
        mode: SetXattr,
    ) -> OpResult<()>;
    /// Names of all extended attributes; the transport leaves out those that the caller may not see.
    fn listxattr(&self, ino: u64) -> OpResult<Vec<Vec<u8>>>;
    /// Removes an extended attribute.
    fn removexattr(&self, ino: u64, name: &[u8]) -> OpResult<()>;

    /// Space and limits.
    fn statfs(&self) -> OpResult<StatFs>;
    /// Does one of the commands that neither sync nor wait, and answers with the bytes of its result.
    fn control(&self, target: ControlTarget, command: &Command) -> OpResult<Vec<u8>> {
        let _ = (target, command);
        Err(Errno::ENOTTY)
    }
    /// Makes the changes of a batch and tells `done` when that is over, with `sync` when they are durable.
    fn commit_batch(&self, target: ControlTarget, id: u64, sync: bool, done: Answer) {
        let _ = (target, id, sync);
        done(Err(Errno::ENOTTY));
    }
    /// The kernel's memory, for as long as it is mounted.
    fn mounted(&self, kernel: Weak<dyn KernelCache>) {
        let _ = kernel;
    }
    /// Tells `done` when operation `lsn` is durable, or after `timeout_us` ([`Errno::ETIMEDOUT`]); with `push` it is made
    /// durable now. Does not wait.
    fn wait_lsn(&self, lsn: u64, timeout_us: u64, push: bool, done: Done) {
        let _ = (lsn, timeout_us, push);
        done(Err(Errno::ENOTTY));
    }
    /// As [`FileSystemOps::sync`] of the volume, with what only the kernel has; with `start`, `done` hears as soon as it is
    /// under way. Waits: see [`FileSystemOps::fetch_mapped`].
    fn sync_with_mapped(&self, start: bool, done: Done) {
        self.fetch_mapped(None);
        if start && self.start_sync(&SyncTarget::Volume) {
            return done(Ok(()));
        }
        done(self.sync(&SyncTarget::Volume));
    }
    /// A handler panicked while it served this file system. The mount goes on; the implementation
    /// makes the fact visible.
    fn panicked(&self, what: &str);
}
