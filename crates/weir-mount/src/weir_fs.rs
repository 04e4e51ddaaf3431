//! [`FileSystemOps`] on a [`weir::Volume`]: what a kernel expects of a file system beyond what the
//! engine does.
//!
//! - Inodes that the kernel knows are held, so that their numbers stay theirs (see [`crate::tables`]).
//! - `.` and `..` exist only here; they take the directory cookies 1 and 2.
//! - POSIX ACLs are inherited, shown in the permission bits, and changed by `chmod`; a mount without them hides those that are stored.
//! - Privileges of a file (set-user-id, set-group-id, `security.capability`) end when someone
//!   writes to it; that there are none is remembered, so that a write does not have to look.
//! - The attribute `weir.status` of the root directory says how the mount is: `ok`, or what went
//!   wrong since it was mounted. (It is neither stored nor listed.)
//! - What FUSE has no request for are commands: see [`crate::ioctl`].
//! - The kernel's client leaves it to the server what `sync` and `dirsync` mean for everything but writes: see [`Synchronous`].
//!
//! Creating an inode in a directory with a default ACL is three steps of the log: the inode, its lists, and the permission bits that show
//! them. Until then it has bits that give nobody more than the list: so a crash in between can take rights away, and never grants any.

mod batches;
mod errors;
mod files;
mod listing;
mod privileges;
#[cfg(test)]
mod promise_tests;
mod snapshots;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use weir::stats::Report;
use weir::sync::Mutex;
use weir::{
    AllocateMode, Attr, Error, File, FileType, RenameMode, SetAttr, StatFs, SyncKind, SyncTicket,
    Volume, XattrMode,
};

use crate::acl::{self, Acl};
use crate::batch::Batches;
use crate::closed::Closed;
use crate::errno::Errno;
use crate::forgetting::Forgetting;
use crate::ioctl::{self, Command};
use crate::leftover::Leftover;
use crate::ops::{
    Answer, Caller, Change, ControlTarget, Done, FileSystemOps, Handle, KernelCache, Make,
    OpResult, Open, Seek, SetXattr, SyncTarget, Visit, VisitPlus, Wait, WriteMode,
};
use crate::tables::{Fact, HandleTable, InodeTable, OpenFile};
use crate::watch::Watcher;
use errors::Errors;
pub use errors::LogSink;
use privileges::{CAPABILITY, is_list, is_privileged};
use snapshots::Snapshots;

/// Microseconds between two tries to get a ticket.
const FULL_PATIENCE_US: u64 = 1000;
/// The mount's own state, on the root directory.
const STATUS: &[u8] = b"weir.status";
/// What went wrong since the volume was mounted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trouble {
    /// Requests whose handler panicked (they were answered with EIO).
    pub panics: u64,
    /// The first panic's text.
    pub first_panic: Option<String>,
    /// Requests that failed with an I/O, corruption or shutdown error.
    pub device_errors: u64,
}

/// What is durable before its answer, by options of the mount. (Writes say so themselves.)
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Synchronous {
    /// `sync`: every change.
    pub all: bool,
    /// `dirsync`: every change of a directory.
    pub names: bool,
}

/// A mounted volume.
pub struct WeirFs {
    volume: Volume,
    posix_acl: bool,
    synchronous: Synchronous,
    inodes: Arc<InodeTable>,
    handles: HandleTable,
    first_panic: Mutex<Option<String>>,
    panics: AtomicU64,
    errors: Arc<Errors>,
    /// Files whose last user was the answer to a sync: dropping them may wait, so a later request does.
    leftover: Arc<Leftover>,
    watcher: Watcher,
    /// New files that were closed without a sync.
    closed: Closed,
    /// Statistics that somebody reads page by page, oldest first.
    snapshots: Mutex<Snapshots>,
    batches: Batches,
    kernel: OnceLock<Weak<dyn KernelCache>>,
    /// Who asks the kernel to forget inodes when it knows too many.
    forgetting: Forgetting,
}

impl WeirFs {
    /// Serves `volume`. With `posix_acl`, access control lists take part in creation and `chmod`.
    pub fn new(volume: Volume, posix_acl: bool, log: LogSink) -> weir::Result<Self> {
        let inodes = Arc::new(InodeTable::default());
        inodes.acquire(&volume, Volume::ROOT)?;
        let errors = Arc::new(Errors::new(log));
        let told = Arc::clone(&errors);
        volume.on_background_error(move |error| told.note(error));
        Ok(Self {
            forgetting: Forgetting::new(volume.memory_bytes()),
            watcher: Watcher::new(volume.clone()),
            snapshots: Mutex::default(),
            volume,
            posix_acl,
            synchronous: Synchronous::default(),
            inodes,
            handles: HandleTable::default(),
            first_panic: Mutex::new(None),
            panics: AtomicU64::new(0),
            errors,
            leftover: Arc::default(),
            closed: Closed::default(),
            batches: Batches::default(),
            kernel: OnceLock::new(),
        })
    }

    /// The same with such changes durable before they are answered.
    #[must_use]
    pub fn synchronous(self, synchronous: Synchronous) -> Self {
        Self { synchronous, ..self }
    }

    /// The volume served.
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// Closes every file and forgets every inode that is left, then closes the volume. To be
    /// called when no request can come any more.
    pub fn close(&self) -> weir::Result<()> {
        self.watcher.close();
        self.forgetting.close();
        self.handles.clear();
        self.inodes.clear();
        // Syncs under way hold files too, and the last user of an unlinked file purges it: before the volume closes. An
        // error of this sync is found again by the close.
        let _ = self.volume.sync();
        self.leftover.wait_answered();
        self.drop_leftover();
        self.volume.close()
    }

    /// What went wrong so far.
    pub fn trouble(&self) -> Trouble {
        Trouble {
            panics: self.panics.load(Ordering::Relaxed),
            first_panic: self.first_panic.lock().clone(),
            device_errors: self.errors.count(),
        }
    }

    /// Inodes the kernel knows, and files it has open.
    pub fn in_use(&self) -> (usize, usize) {
        (self.inodes.count(), self.handles.count())
    }

    fn status(&self) -> String {
        let trouble = self.trouble();
        let mut lines = Vec::new();
        if let Some(reason) = self.volume.shutdown_reason() {
            lines.push(format!("shut down: {reason}"));
        }
        if let Some(error) = self.volume.stats().checkpoint_refused {
            lines.push(format!("a checkpoint is tried again after an error: {error}"));
        }
        if let Some(first) = trouble.first_panic {
            lines.push(format!("{} internal errors, the first: {first}", trouble.panics));
        }
        if trouble.device_errors > 0 {
            lines.push(format!("{} requests failed with EIO", trouble.device_errors));
        }
        if lines.is_empty() { "ok".to_owned() } else { lines.join("; ") }
    }

    fn fail(&self, error: Error) -> Errno {
        self.errors.fail(error)
    }

    /// Drops what an answer to a sync could not.
    fn drop_leftover(&self) {
        let files = self.leftover.take();
        drop(files);
    }

    fn check<T>(&self, result: weir::Result<T>) -> OpResult<T> {
        result.map_err(|error| self.fail(error))
    }

    /// One more reference of the kernel to `ino`.
    fn acquire(&self, ino: u64) -> weir::Result<()> {
        self.inodes.acquire(&self.volume, ino)?;
        self.forgetting.known(&self.inodes);
        Ok(())
    }

    /// References `attr` for the kernel.
    fn entry(&self, attr: Attr) -> OpResult<Attr> {
        self.check(self.acquire(attr.ino))?;
        Ok(attr)
    }

    /// Makes everything up to operation `lsn` durable and tells `done`. Does not wait, unless as many tickets have not ended as may be: what
    /// is to be durable has happened, so that is no answer.
    fn make_durable_to(&self, lsn: u64, done: Done) {
        let ticket = loop {
            match self.volume.ticket_for(lsn) {
                Err(weir::Error::WouldBlock) => {}
                other => break other,
            }
            match self.volume.wait_durable(lsn, Some(FULL_PATIENCE_US)) {
                Ok(false) => {}
                watched => return done(self.check(watched.map(drop))),
            }
        };
        match ticket {
            Ok(ticket) => {
                let errors = Arc::clone(&self.errors);
                ticket.on_completion(move |result| {
                    done(result.map_err(|error| errors.fail(error)));
                });
            }
            Err(error) => done(Err(self.fail(error))),
        }
    }

    /// Submits a sync. Answers the file that it is of, too.
    fn ticket_of(
        &self,
        target: &SyncTarget,
    ) -> OpResult<(weir::Result<SyncTicket>, Option<Arc<OpenFile>>)> {
        Ok(match target {
            SyncTarget::File { handle, range, data_only } => {
                let open = self.handles.get(*handle)?;
                open.unsynced_bytes.store(0, Ordering::Relaxed);
                (open.file.fsync_async(range.clone(), sync_kind(*data_only)), Some(open))
            }
            SyncTarget::Directory(ino) => (self.volume.fsync_dir_async(*ino), None),
            SyncTarget::Volume => (self.volume.sync_async(), None),
        })
    }

    /// After a change of a file's content that is no write: syncs the file where its handle, or the mount, promises that.
    fn sync_if_promised(&self, open: &OpenFile) -> OpResult<()> {
        let kind = if self.synchronous.all { Some(SyncKind::Full) } else { open.how.sync };
        kind.map_or(Ok(()), |kind| {
            open.unsynced_bytes.store(0, Ordering::Relaxed);
            self.check(sync_file(&open.file, &(0..u64::MAX), kind == SyncKind::Data))
        })
    }
}

fn sync_kind(data_only: bool) -> SyncKind {
    if data_only { SyncKind::Data } else { SyncKind::Full }
}

/// Makes `range` durable and waits for it: the whole file without a hand-over to another thread.
fn sync_file(file: &File, range: &Range<u64>, data_only: bool) -> weir::Result<()> {
    match (*range == (0..u64::MAX), data_only) {
        (true, true) => file.fdatasync(),
        (true, false) => file.fsync(),
        (false, _) => {
            let synced = file.fsync_async(range.clone(), sync_kind(data_only))?.wait();
            file.report_after(synced)
        }
    }
}

impl FileSystemOps for WeirFs {
    fn lookup(&self, parent: u64, name: &[u8]) -> OpResult<Attr> {
        let find = || match name {
            b"." => self.volume.getattr(parent),
            b".." => self.volume.parent(parent).and_then(|ino| self.volume.getattr(ino)),
            _ => self.volume.lookup(parent, name),
        };
        let mut gone = None;
        loop {
            let attr = self.check(find())?;
            match self.acquire(attr.ino) {
                // A batch has put something else in its place: the kernel keeps renames and look-ups apart, and knows of no batches.
                Err(Error::NotFound) if gone != Some(attr.ino) => gone = Some(attr.ino),
                acquired => return self.check(acquired.map(|()| attr)),
            }
        }
    }

    fn forget(&self, ino: u64, count: u64) {
        if ino != Volume::ROOT {
            self.inodes.forget(ino, count);
        }
    }

    fn getattr(&self, ino: u64) -> OpResult<Attr> {
        self.check(self.volume.getattr(ino))
    }

    fn setattr(&self, _caller: Caller, ino: u64, change: &SetAttr) -> OpResult<Attr> {
        let facts = self.inodes.facts(ino);
        let owner_changes = change.uid.is_some() || change.gid.is_some();
        if change.size_bytes.is_some() || owner_changes {
            self.end_privileges(ino, &facts, false)?;
        }
        match change.permissions {
            None => self.check(self.volume.setattr(ino, change)),
            Some(permissions) => facts.changing_but(Fact::NoAccessAcl, |no_list| {
                let attr = self.check(self.volume.setattr(ino, change))?;
                if self.posix_acl && !no_list {
                    self.chmod_list(ino, permissions)?;
                }
                Ok(attr)
            }),
        }
    }

    fn make(&self, caller: Caller, parent: u64, name: &[u8], new: &Make) -> OpResult<Attr> {
        let planned = self.plan(caller, parent, new)?;
        let changes = self.inodes.changes();
        // Until the kernel's reference is counted: a batch may take the name away.
        let (attr, _held) = self.check(self.volume.make_held(parent, name, &planned.inode))?;
        let attr = self.store_lists(attr, &planned).inspect_err(|_| {
            // What was not made whole was not made. The first error is the one to tell.
            let _ = match new.file_type {
                FileType::Directory => self.volume.rmdir(parent, name),
                _ => self.volume.unlink(parent, name),
            };
        })?;
        let attr = self.entry(attr)?;
        self.inodes.establish_new(attr.ino, planned.facts(&attr), changes);
        Ok(attr)
    }

    fn create(
        &self,
        caller: Caller,
        parent: u64,
        name: &[u8],
        new: &Make,
        open: Open,
        exclusive: bool,
    ) -> OpResult<(Attr, Handle)> {
        let (attr, is_new) = loop {
            match self.make(caller, parent, name, new) {
                Err(error) if error.raw() == libc::EEXIST && !exclusive => {
                    match self.lookup(parent, name) {
                        // A batch has removed it since.
                        Err(error) if error.raw() == libc::ENOENT => {}
                        found => break (found?, false),
                    }
                }
                made => break (made?, true),
            }
        };
        let opened = self.open_as(caller, attr.ino, open, is_new).and_then(|handle| {
            // Of what was found and emptied, the kernel is to remember the size that it has now.
            let is_old = open.truncate && !is_new;
            let attr = if is_old { self.getattr(attr.ino) } else { Ok(attr.clone()) };
            let attr = attr.inspect_err(|_| drop(self.handles.remove(handle)))?;
            Ok((attr, handle))
        });
        opened.inspect_err(|_| self.forget(attr.ino, 1))
    }

    fn tmpfile(&self, caller: Caller, parent: u64, new: &Make) -> OpResult<(Attr, Handle)> {
        let planned = self.plan(caller, parent, new)?;
        let (attr, file) = self.check(self.volume.tmpfile(parent, &planned.inode))?;
        let attr = self.store_lists(attr, &planned)?;
        let attr = self.entry(attr)?;
        let facts = self.inodes.facts(attr.ino);
        // The transport does not say how it is opened; until it has a name, nothing of it can be durable.
        let open = Open { write: true, ..Open::default() };
        Ok((attr, self.handles.insert(OpenFile::new(file, facts, open, false))))
    }

    fn symlink(&self, caller: Caller, parent: u64, name: &[u8], target: &[u8]) -> OpResult<Attr> {
        let attr = self.volume.symlink(parent, name, target, caller.uid, caller.gid);
        self.check(attr).and_then(|attr| self.entry(attr))
    }

    fn readlink(&self, ino: u64) -> OpResult<Vec<u8>> {
        self.check(self.volume.readlink(ino))
    }

    fn link(&self, ino: u64, parent: u64, name: &[u8]) -> OpResult<Attr> {
        self.check(self.volume.link(ino, parent, name)).and_then(|attr| self.entry(attr))
    }

    fn unlink(&self, parent: u64, name: &[u8]) -> OpResult<()> {
        self.check(self.volume.unlink(parent, name))
    }

    fn rmdir(&self, parent: u64, name: &[u8]) -> OpResult<()> {
        self.check(self.volume.rmdir(parent, name))
    }

    fn rename(
        &self,
        parent: u64,
        name: &[u8],
        new_parent: u64,
        new_name: &[u8],
        mode: RenameMode,
    ) -> OpResult<()> {
        self.check(self.volume.rename(parent, name, new_parent, new_name, mode))
    }

    fn readdir(&self, dir: u64, cookie: u64, visit: Visit<'_>) -> OpResult<()> {
        self.list(dir, cookie, visit)
    }

    fn readdir_plus(&self, dir: u64, cookie: u64, visit: VisitPlus<'_>) -> OpResult<()> {
        self.list_plus(dir, cookie, visit)
    }

    fn open(&self, caller: Caller, ino: u64, open: Open) -> OpResult<Handle> {
        self.open_as(caller, ino, open, false)
    }

    fn release(&self, handle: Handle) {
        self.batches.closed(handle);
        if let Some(open) = self.handles.remove(handle) {
            self.hand_over_closed(&open);
        }
        self.drop_leftover();
    }

    fn read(&self, handle: Handle, offset: u64, buffer: &mut [u8], wait: Wait) -> OpResult<usize> {
        let open = self.handles.get(handle)?;
        let read = match wait {
            Wait::No => open.file.read_at_nowait(offset, buffer),
            Wait::Yes => open.file.read_at(offset, buffer),
        };
        match read {
            Err(Error::WouldBlock) => Err(Errno::EAGAIN),
            read => self.check(read),
        }
    }

    fn write(&self, handle: Handle, offset: u64, data: &[u8], mode: WriteMode) -> OpResult<usize> {
        let open = self.handles.get(handle)?;
        self.end_privileges(open.file.ino(), &open.facts, mode.kill_suid_sgid)?;
        let written = self.check(open.file.write_at(offset, data))?;
        open.unsynced_bytes.fetch_add(written as u64, Ordering::Relaxed);
        if mode.full_sync || mode.data_sync {
            self.check(sync_file(&open.file, &(0..u64::MAX), !mode.full_sync))?;
        }
        Ok(written)
    }

    fn sync(&self, target: &SyncTarget) -> OpResult<()> {
        match target {
            SyncTarget::File { handle, range, data_only } => {
                let open = self.handles.get(*handle)?;
                open.unsynced_bytes.store(0, Ordering::Relaxed);
                self.check(sync_file(&open.file, range, *data_only))
            }
            SyncTarget::Directory(ino) => self.check(self.volume.fsync_dir(*ino)),
            SyncTarget::Volume => self.check(self.volume.sync()),
        }
    }

    fn sync_if_durable(&self, target: &SyncTarget) -> Option<OpResult<()>> {
        let SyncTarget::File { handle, range, data_only } = target else { return None };
        let open = self.handles.get(*handle).ok()?;
        let synced = open.file.fsync_if_durable(range.clone(), sync_kind(*data_only))?;
        open.unsynced_bytes.store(0, Ordering::Relaxed);
        Some(self.check(synced))
    }

    fn submit_sync(&self, target: &SyncTarget, done: Done) -> Result<(), Done> {
        let (ticket, open) = match self.ticket_of(target) {
            Ok(submitted) => submitted,
            Err(error) => {
                done(Err(error));
                return Ok(());
            }
        };
        let ticket = match ticket {
            Ok(ticket) => ticket,
            Err(Error::WouldBlock) => return Err(done),
            Err(error) => {
                done(Err(self.fail(error)));
                return Ok(());
            }
        };
        let (errors, leftover) = (Arc::clone(&self.errors), Arc::clone(&self.leftover));
        let submitted = leftover.submit();
        ticket.on_completion(move |result| {
            let told = match &open {
                Some(open) => open.file.report_after(result),
                None => result,
            };
            done(told.map_err(|error| errors.fail(error)));
            // The last user of an unlinked file purges it, which waits for the log: not on a thread of the log.
            if let Some(last) = open.and_then(Arc::into_inner) {
                leftover.leave(last);
            }
            drop(submitted);
        });
        Ok(())
    }

    fn start_sync(&self, target: &SyncTarget) -> bool {
        let Ok((Ok(ticket), _open)) = self.ticket_of(target) else { return false };
        let errors = Arc::clone(&self.errors);
        ticket.on_completion(move |result| {
            // Counted and logged; the file still has it for the next sync.
            let _ = result.map_err(|error| errors.fail(error));
        });
        true
    }

    fn must_be_durable(&self, change: Change) -> bool {
        self.synchronous.all || change == Change::Names && self.synchronous.names
    }

    fn make_durable(&self, done: Done) {
        self.make_durable_to(self.volume.last_lsn(), done);
    }

    fn allocate(
        &self,
        caller: Caller,
        handle: Handle,
        mode: AllocateMode,
        offset: u64,
        length: u64,
    ) -> OpResult<()> {
        let open = self.handles.get(handle)?;
        self.end_privileges(open.file.ino(), &open.facts, !is_privileged(caller))?;
        if let Err(error) = self.check(open.file.allocate(mode, offset, length)) {
            // Some of it may be done: what the kernel remembers of the file need not be so any more.
            self.fetch_mapped(Some(open.file.ino()));
            return Err(error);
        }
        self.sync_if_promised(&open)
    }

    fn is_written(&self, ino: u64) -> bool {
        self.handles.is_written(ino)
    }

    fn seek(&self, handle: Handle, offset: u64, seek: Seek) -> OpResult<u64> {
        let open = self.handles.get(handle)?;
        self.check(match seek {
            Seek::Data => open.file.seek_data(offset),
            Seek::Hole => open.file.seek_hole(offset),
        })
    }

    fn copy_range(
        &self,
        caller: Caller,
        from: Handle,
        offset: u64,
        to: Handle,
        to_offset: u64,
        length: u64,
    ) -> OpResult<u64> {
        let (from, to) = (self.handles.get(from)?, self.handles.get(to)?);
        self.end_privileges(to.file.ino(), &to.facts, !is_privileged(caller))?;
        let copied = self.check(from.file.copy_range(offset, &to.file, to_offset, length))?;
        if copied > 0 {
            self.sync_if_promised(&to)?;
        }
        Ok(copied)
    }

    fn getxattr(&self, ino: u64, name: &[u8]) -> OpResult<Vec<u8>> {
        if name == STATUS && ino == Volume::ROOT {
            return Ok(self.status().into_bytes());
        }
        self.check_name(name)?;
        if name == CAPABILITY && self.inodes.facts(ino).holds(Fact::Unprivileged) {
            return Err(Errno::ENODATA);
        }
        self.check(self.volume.getxattr(ino, name))
    }

    fn setxattr(
        &self,
        caller: Caller,
        ino: u64,
        name: &[u8],
        value: &[u8],
        mode: SetXattr,
    ) -> OpResult<()> {
        if name == STATUS {
            return Err(Errno::EPERM);
        }
        self.check_name(name)?;
        let mode = match mode {
            SetXattr::Any => XattrMode::Set,
            SetXattr::Create => XattrMode::Create,
            SetXattr::Replace => XattrMode::Replace,
            SetXattr::CreateAndReplace => {
                let found = self.optional_xattr(ino, name)?;
                return Err(if found.is_some() { Errno::EEXIST } else { Errno::ENODATA });
            }
        };
        self.inodes.facts(ino).changing(|| {
            if self.posix_acl && name == acl::ACCESS {
                return self.set_access_list(caller, ino, value, mode);
            }
            if self.posix_acl && name == acl::DEFAULT && Acl::parse(value).is_none() {
                return Err(Errno::EINVAL);
            }
            self.check(self.volume.setxattr(ino, name, value, mode))
        })
    }

    fn listxattr(&self, ino: u64) -> OpResult<Vec<Vec<u8>>> {
        let mut names = self.check(self.volume.listxattr(ino))?;
        names.retain(|name| self.check_name(name).is_ok());
        Ok(names)
    }

    fn removexattr(&self, ino: u64, name: &[u8]) -> OpResult<()> {
        self.check_name(name)?;
        let facts = self.inodes.facts(ino);
        if is_list(name) {
            // There are the permission bits in any case: programs that reduce a list to those do not expect an error.
            return facts.changing(|| self.remove_optional_xattr(ino, name));
        }
        facts.changing(|| self.check(self.volume.removexattr(ino, name)))
    }

    fn statfs(&self) -> OpResult<StatFs> {
        Ok(self.volume.statfs())
    }

    fn control(&self, target: ControlTarget, command: &Command) -> OpResult<Vec<u8>> {
        match command {
            Command::Lsn => {
                let file = match target.handle {
                    Some(handle) => self.handles.get(handle)?.file.last_lsn(),
                    None => 0,
                };
                // In this order, so that what is durable is never more than what there is.
                let durable = self.volume.durable_lsn();
                Ok(ioctl::encode_lsn(durable, self.volume.last_lsn(), file))
            }
            Command::WriteRange { range, flags } => {
                let open = self.handles.get(target.handle.ok_or(Errno::EISDIR)?)?;
                match open.file.sync_range(range.clone(), *flags) {
                    Err(Error::WouldBlock) => Err(Errno::EAGAIN),
                    written => self.check(written).map(|()| Vec::new()),
                }
            }
            Command::Expire { range } => {
                let open = self.handles.get(target.handle.ok_or(Errno::EISDIR)?)?;
                self.check(open.file.expire(range.clone())).map(|()| Vec::new())
            }
            Command::Capabilities => Ok(ioctl::encode_capabilities(&self.volume.capabilities())),
            Command::Stats { snapshot, offset } => {
                let kept = match *snapshot {
                    0 => {
                        let text = ioctl::stats_text(&Report::from(&self.volume.stats()));
                        self.snapshots.lock().keep(text)
                    }
                    number => self.snapshots.lock().find(number).ok_or(Errno::ESTALE)?,
                };
                ioctl::encode_stats(kept.0, *offset, &kept.1)
            }
            Command::Barrier { file, mapped } => {
                if *mapped {
                    self.fetch_mapped(file.then_some(target.ino));
                }
                let lsn = match target.handle {
                    Some(handle) if *file => self.handles.get(handle)?.file.barrier(),
                    None if *file => return Err(Errno::EISDIR),
                    _ => self.volume.barrier(),
                };
                self.check(lsn).map(ioctl::encode_barrier)
            }
            Command::BatchBegin => self.begin_batch(target),
            Command::BatchAdd { id, steps } => {
                let handle = target.handle.ok_or(Errno::EISDIR)?;
                self.batches.add(handle, *id, steps).map(|()| Vec::new())
            }
            Command::BatchAbort { id } => {
                let handle = target.handle.ok_or(Errno::EISDIR)?;
                self.batches.take(handle, *id).map(|_| Vec::new())
            }
            // The transport has taken care of these.
            Command::SyncRange { .. }
            | Command::SyncVolume { .. }
            | Command::WaitLsn { .. }
            | Command::BatchCommit { .. } => Err(Errno::ENOTTY),
        }
    }

    fn fetch_mapped(&self, only: Option<u64>) {
        let Some(kernel) = self.kernel.get().and_then(Weak::upgrade) else { return };
        match only {
            Some(ino) => kernel.content_changed(ino),
            // Whoever has mapped a file for writing has it open for writing; the last close sends what is left.
            None => self.handles.written().into_iter().for_each(|ino| kernel.content_changed(ino)),
        }
    }

    fn commit_batch(&self, target: ControlTarget, id: u64, sync: bool, done: Answer) {
        let lsn = target.handle.ok_or(Errno::EISDIR).and_then(|handle| {
            let staged = self.batches.take(handle, id)?;
            self.apply_batch(target, &staged.steps)
        });
        match lsn {
            Err(error) => done(Err(error)),
            Ok(lsn) if !sync && !self.must_be_durable(Change::Names) => {
                done(Ok(ioctl::encode_batch(id, lsn)));
            }
            Ok(lsn) => {
                let durable = move |result: OpResult<()>| {
                    done(result.map(|()| ioctl::encode_batch(id, lsn)));
                };
                self.make_durable_to(lsn, Box::new(durable));
            }
        }
    }

    fn mounted(&self, kernel: Weak<dyn KernelCache>) {
        self.forgetting.ask(Weak::clone(&kernel));
        // One volume is served by one mount, so this is called once.
        let _ = self.kernel.set(kernel);
    }

    fn wait_lsn(&self, lsn: u64, timeout_us: u64, push: bool, done: Done) {
        if lsn > self.volume.last_given_out() {
            return done(Err(Errno::EINVAL));
        }
        if !push {
            return self.watcher.watch(lsn, Duration::from_micros(timeout_us), done);
        }
        self.make_durable_to(lsn, done);
    }

    fn panicked(&self, what: &str) {
        let count = self.panics.fetch_add(1, Ordering::Relaxed) + 1;
        self.first_panic.lock().get_or_insert_with(|| what.to_owned());
        if count == 1 {
            self.errors.tell(&format!(
                "internal error: {what}; the request was answered with EIO and the mount goes on: \
                 unmount and run weir fsck when you can"
            ));
        }
    }
}
