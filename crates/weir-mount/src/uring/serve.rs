//! One request: decoded, served by [`FileSystemOps`], answered. What `crate::fuser_transport` says about the kernel holds here too; what
//! `fuser` does not know, this does: `O_TMPFILE`, and `statx` with the birth time.
//!
//! Nothing waits on a queue's thread: each core has one queue, and whoever runs on that core would wait too. So a lone sync is done by
//! one of the queue's helpers, others become tickets; what may block is done by the other helper, or goes to the pool where that has
//! something to do.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fuser::{OpenFlags, RenameFlags, WriteFlags};
use weir::{Attr, FileType, RenameMode, SetAttr, SetTime, Timestamp};

use super::abi::{Fields, Writer, op};
use super::helper::Helper;
use super::queue::{Entry, Held, answering_later};
use crate::dispatch::{Asks, Class, Dispatcher, Here};
use crate::errno::Errno;
use crate::fuser_convert::{
    BLOCK_BYTES, allocate_mode, answer_durably, as_member, open_flags, open_mode, rename_mode,
    visible_names, write_mode, xattr_mode,
};
use crate::fuser_transport::valid_for;
use crate::ioctl::{self, Command};
use crate::ops::{
    Caller, Change, ControlTarget, Done, FileSystemOps, Handle, Make, OpResult, Seek, SyncTarget,
    Wait, WriteMode,
};
use crate::options::TransportOptions;

/// Largest part of a file copied by one request.
const MAX_COPY_BYTES: u64 = 1 << 30;
/// A longer copy is no matter of one core.
const SHORT_COPY_BYTES: u64 = 1 << 20;
/// `FUSE_IOCTL_DIR`.
const IOCTL_DIR: u32 = 1 << 4;
/// `FUSE_FSYNC_FDATASYNC`.
const FDATASYNC: u32 = 1;

/// Serves requests, whichever ring they come from.
pub struct Server {
    ops: Arc<dyn FileSystemOps>,
    dispatcher: Arc<Dispatcher>,
    context: Context,
    /// For lone syncs, one for each queue; fewer where threads are not to be had.
    helpers: Vec<Helper<(Entry, SyncTarget, Done)>>,
    /// The same for requests that may wait.
    waiters: Vec<Helper<(Entry, Job)>>,
    crowd: Arc<Crowd>,
}

type Job = Box<dyn FnOnce() + Send>;

/// Of a request: its queue, by number, and where that holds it.
type Place = (usize, Entry);

/// For how long a sync that met another says that there are several who sync.
const CROWD: Duration = Duration::from_millis(2);

/// Who syncs at the same time.
struct Crowd {
    under_way: AtomicUsize,
    began: Instant,
    /// Nanoseconds since `began` until which there are several.
    until_ns: AtomicU64,
}

impl Default for Crowd {
    fn default() -> Self {
        Self { under_way: AtomicUsize::new(0), began: Instant::now(), until_ns: AtomicU64::new(0) }
    }
}

impl Crowd {
    /// A sync begins; answers whether it is, and lately was, the only one.
    fn enter(&self) -> bool {
        let now_ns = self.began.elapsed().as_nanos() as u64;
        if self.under_way.fetch_add(1, Ordering::Relaxed) > 0 {
            self.until_ns.store(now_ns + CROWD.as_nanos() as u64, Ordering::Relaxed);
            return false;
        }
        now_ns >= self.until_ns.load(Ordering::Relaxed)
    }
    /// It has ended.
    fn leave(&self) {
        self.under_way.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What every request may need.
#[derive(Debug, Clone, Copy)]
struct Context {
    valid: Duration,
    xattr: bool,
    new_past_cache: bool,
}

/// Bits of `fuse_setattr_in.valid`.
mod valid {
    pub const MODE: u32 = 1;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
}

/// How long an operation may keep a thread.
fn class(opcode: u32, operation: Fields<'_>) -> Class {
    let bits = |at| operation.u32(at).unwrap_or(0);
    match opcode {
        op::COPY_FILE_RANGE => Class::Blocking,
        op::SETATTR if bits(0) & valid::SIZE != 0 => Class::Blocking,
        op::OPEN if bits(0) & libc::O_TRUNC as u32 != 0 => Class::Blocking,
        _ => Class::Normal,
    }
}

/// Computes for long.
fn is_long(held: &Held) -> bool {
    held.request.opcode == op::COPY_FILE_RANGE
        && held.parts().0.u64(40).is_ok_and(|length| length > SHORT_COPY_BYTES)
}

impl Server {
    pub fn new(ops: Arc<dyn FileSystemOps>, options: TransportOptions, queues: usize) -> Self {
        let reporter = Arc::clone(&ops);
        // A queue's thread is the only one that reads its requests: as if there were no other.
        let dispatcher = Dispatcher::new(1, move |what| reporter.panicked(what));
        let context = Context {
            valid: valid_for(&options),
            xattr: options.xattr,
            new_past_cache: options.new_past_cache(),
        };
        let helper = |core| {
            let (ops, dispatcher) = (Arc::clone(&ops), Arc::clone(&dispatcher));
            Helper::new(
                "weir-fsync",
                core,
                move |(entry, target, done): (Entry, SyncTarget, Done)| {
                    answering_later(entry, || dispatcher.run_waiting(|| done(ops.sync(&target))))
                },
            )
        };
        let helpers = (0..queues).map_while(|core| helper(core).ok()).collect();
        let waiter = |core| {
            let dispatcher = Arc::clone(&dispatcher);
            Helper::new("weir-wait", core, move |(entry, job): (Entry, Job)| {
                answering_later(entry, || dispatcher.run_waiting(job))
            })
        };
        let waiters = (0..queues).map_while(|core| waiter(core).ok()).collect();
        Self { ops, dispatcher, context, helpers, waiters, crowd: Arc::default() }
    }

    /// A ring gave up, and the mount with it.
    pub fn failed(&self, what: &str) {
        self.ops.panicked(what);
    }

    /// Serves what is queued, and ends the pool.
    pub fn close(&self) {
        self.dispatcher.close();
    }

    /// Serves one request, here or elsewhere. A panic drops it, which answers EIO.
    pub fn serve(&self, held: Held) {
        let opcode = held.request.opcode;
        match opcode {
            op::READ => self.read(held),
            op::FSYNC | op::FSYNCDIR => self.dispatcher.run_here(Here::Free, || self.fsync(held)),
            op::WRITE => self.write(held),
            op::LSEEK if self.ops.is_written(held.request.ino) => {
                let (ops, context) = (Arc::clone(&self.ops), self.context);
                self.ask(held.place(), move || {
                    ops.fetch_mapped(Some(held.request.ino));
                    answer(&*ops, context, held);
                });
            }
            // After an error it asks the kernel.
            op::FALLOCATE => {
                let (ops, context) = (Arc::clone(&self.ops), self.context);
                self.ask(held.place(), move || answer(&*ops, context, held));
            }
            op::IOCTL => self.dispatcher.run_here(Here::Free, || self.ioctl(held)),
            _ => {
                let (operation, _) = held.parts();
                self.run(class(opcode, operation), held, answer);
            }
        }
    }

    fn run(
        &self,
        class: Class,
        held: Held,
        job: impl FnOnce(&dyn FileSystemOps, Context, Held) + Send + 'static,
    ) {
        let context = self.context;
        if let Some(permission) = self.dispatcher.admit(class) {
            self.dispatcher.run_here(permission, || job(&*self.ops, context, held));
        } else {
            let (ops, is_long) = (Arc::clone(&self.ops), is_long(&held));
            let place = held.place();
            let job: Job = Box::new(move || job(&*ops, context, held));
            let left = if is_long { Some(job) } else { self.wait(place, job) };
            if let Some(job) = left {
                self.dispatcher.submit(job);
            }
        }
    }

    /// Has `job` done by whoever waits for the queue, or gives it back where he has something to do.
    fn wait(&self, (queue, entry): Place, job: Job) -> Option<Job> {
        match self.waiters.get(queue) {
            Some(waiter) => waiter.give((entry, job)).err().map(|(_, job)| job),
            None => Some(job),
        }
    }

    /// The same for a job that may ask the kernel for pages. Nothing waits behind what a waiter does, so the kernel may ask for anything meanwhile.
    fn ask(&self, place: Place, job: impl FnOnce() + Send + 'static) {
        if let Some(job) = self.wait(place, Box::new(job)) {
            self.dispatcher.submit_asking(Asks::Content, job);
        }
    }

    /// Cached data is answered at once; what has to wait for the device waits elsewhere.
    fn read(&self, held: Held) {
        let mut must_wait = None;
        self.dispatcher.run_here(Here::Free, || must_wait = read(&*self.ops, held, Wait::No));
        if let Some(held) = must_wait {
            self.run(Class::Blocking, held, |ops, _, held| drop(read(ops, held, Wait::Yes)));
        }
    }

    fn fsync(&self, held: Held) {
        let (operation, _) = held.parts();
        let ino = held.request.ino;
        let target = operation.u64(0).and_then(|handle| {
            let data_only = operation.u32(8)? & FDATASYNC != 0;
            Ok(if held.request.opcode == op::FSYNCDIR {
                SyncTarget::Directory(ino)
            } else {
                SyncTarget::File { handle: Handle(handle), range: 0..u64::MAX, data_only }
            })
        });
        match target {
            Ok(target) => {
                self.sync(held.place(), target, answer_empty(held));
            }
            Err(error) => held.answer(Err(error)),
        }
    }

    /// Makes `target` durable without waiting for it here: a lone sync on the helper of this queue, others as tickets, which share
    /// flushes better than threads do. What is durable already needs neither.
    fn sync(&self, (queue, entry): Place, target: SyncTarget, done: Done) {
        if let Some(result) = self.ops.sync_if_durable(&target) {
            return done(result);
        }
        let crowd = Arc::clone(&self.crowd);
        let alone = crowd.enter();
        let done: Done = Box::new(move |result| {
            crowd.leave();
            done(result);
        });
        let helper = if alone { self.helpers.get(queue) } else { None };
        let left = match helper {
            Some(helper) => {
                helper.give((entry, target, done)).err().map(|(_, target, done)| (target, done))
            }
            None => Some((target, done)),
        };
        if let Some((target, done)) = left {
            self.submit_sync(target, done);
        }
    }

    /// Makes `target` durable without waiting for it here.
    fn submit_sync(&self, target: SyncTarget, done: Done) {
        if let Err(done) = self.ops.submit_sync(&target, done) {
            let ops = Arc::clone(&self.ops);
            self.dispatcher.submit(move || done(ops.sync(&target)));
        }
    }

    fn write(&self, held: Held) {
        let (mut to_sync, place) = (None, held.place());
        let Some(permission) = self.dispatcher.admit(Class::Normal) else {
            // Under pressure: all of it elsewhere.
            return self.run(Class::Blocking, held, |ops, _, held| {
                let result = write(ops, &held, true).map(|(count, _)| count);
                answer_count(held, result);
            });
        };
        self.dispatcher.run_here(permission, || match write(&*self.ops, &held, false) {
            Ok((count, Some(target))) => to_sync = Some((held, count, target)),
            result => answer_count(held, result.map(|(count, _)| count)),
        });
        if let Some((held, count, target)) = to_sync {
            let done: Done = Box::new(move |result| answer_count(held, result.map(|()| count)));
            self.dispatcher.run_here(Here::Free, || self.sync(place, target, done));
        }
    }

    /// A command of our own.
    fn ioctl(&self, held: Held) {
        match decode_ioctl(&held) {
            Ok((target, command)) => self.control(held, target, command),
            Err(error) => held.answer(Err(error)),
        }
    }

    fn control(&self, held: Held, target: ControlTarget, command: Command) {
        let done = |held| -> Done {
            Box::new(move |result: OpResult<()>| answer_ioctl(held, result.map(|()| Vec::new())))
        };
        let what = |target: ControlTarget, range, data_only| match target.handle {
            Some(handle) => SyncTarget::File { handle, range, data_only },
            None => SyncTarget::Directory(target.ino),
        };
        match command {
            Command::SyncRange { range, data_only, start } => {
                let (place, what) = (held.place(), what(target, range, data_only));
                self.begin_sync(place, what, start, done(held));
            }
            Command::SyncVolume { start, mapped: true } => {
                let (ops, done) = (Arc::clone(&self.ops), done(held));
                self.dispatcher
                    .submit_asking(Asks::Content, move || ops.sync_with_mapped(start, done));
            }
            Command::SyncVolume { start, mapped: false } => {
                self.begin_sync(held.place(), SyncTarget::Volume, start, done(held));
            }
            Command::WaitLsn { lsn, timeout_us, push } => {
                // A wait for somebody else's sync keeps an entry of the queue for as long: only so many of them may.
                let timeout_us = if held.is_scarce() && !push { 0 } else { timeout_us };
                self.ops.wait_lsn(lsn, timeout_us, push, done(held));
            }
            Command::BatchCommit { id, sync } => {
                let done = Box::new(move |result| answer_ioctl(held, result));
                let ops = Arc::clone(&self.ops);
                self.dispatcher
                    .submit_asking(Asks::Names, move || ops.commit_batch(target, id, sync, done));
            }
            command if command.asks_the_kernel() => {
                let ops = Arc::clone(&self.ops);
                let job = move || answer_ioctl(held, ops.control(target, &command));
                self.dispatcher.submit_asking(Asks::Content, job);
            }
            command => self.run(command.class(), held, move |ops, _, held| {
                answer_ioctl(held, ops.control(target, &command));
            }),
        }
    }

    /// Makes `target` durable; with `start`, answers as soon as that is under way: how it ends is told by the next sync of the same handle.
    fn begin_sync(&self, place: Place, target: SyncTarget, start: bool, done: Done) {
        if !start {
            return self.sync(place, target, done);
        }
        if self.ops.start_sync(&target) {
            return done(Ok(()));
        }
        let ops = Arc::clone(&self.ops);
        self.dispatcher.submit(move || done(ops.sync(&target)));
    }
}

fn caller(held: &Held) -> Caller {
    Caller { uid: held.request.uid, gid: held.request.gid }
}

fn answer_empty(held: Held) -> Done {
    Box::new(move |result| held.answer(result.map(|()| 0)))
}

/// Answers with what `write` puts into the payload.
fn answer_with(mut held: Held, write: impl FnOnce(&mut Writer<'_>) -> OpResult<()>) {
    let mut writer = Writer::new(held.space());
    let result = write(&mut writer).map(|()| writer.used());
    held.answer(result);
}

/// `struct fuse_write_out`.
fn answer_count(held: Held, result: OpResult<usize>) {
    answer_with(held, |to| to.u32s(&[result? as u32, 0]));
}

/// `struct fuse_ioctl_out` and the data.
fn answer_ioctl(held: Held, result: OpResult<Vec<u8>>) {
    answer_with(held, |to| {
        let data = result?;
        to.u32s(&[0; 4])?;
        to.bytes(&data)
    });
}

fn read(ops: &dyn FileSystemOps, mut held: Held, wait: Wait) -> Option<Held> {
    let place = |operation: Fields<'_>| -> OpResult<(Handle, u64, usize)> {
        Ok((Handle(operation.u64(0)?), operation.u64(8)?, operation.u32(16)? as usize))
    };
    let (operation, _) = held.parts();
    let result = place(operation).and_then(|(handle, offset, size)| {
        let buffer = held.space().get_mut(..size).ok_or(Errno::EINVAL)?;
        ops.read(handle, offset, buffer, wait)
    });
    if wait == Wait::No && result == Err(Errno::EAGAIN) {
        return Some(held);
    }
    held.answer(result);
    None
}

/// Writes; answers what is to be made durable still, unless that was done too (`whole`).
fn write(
    ops: &dyn FileSystemOps,
    held: &Held,
    whole: bool,
) -> OpResult<(usize, Option<SyncTarget>)> {
    let (operation, payload) = held.parts();
    let (handle, offset) = (Handle(operation.u64(0)?), operation.u64(8)?);
    let data = payload.get(..operation.u32(16)? as usize).ok_or(Errno::EIO)?;
    let flags = OpenFlags(operation.u32(32)? as i32);
    let mode = write_mode(flags, WriteFlags::from_bits_retain(operation.u32(20)?));
    if whole || !(mode.data_sync || mode.full_sync) {
        return ops.write(handle, offset, data, mode).map(|count| (count, None));
    }
    let plain = WriteMode { data_sync: false, full_sync: false, ..mode };
    let count = ops.write(handle, offset, data, plain)?;
    let range = offset..offset.saturating_add(count as u64);
    Ok((count, Some(SyncTarget::File { handle, range, data_only: !mode.full_sync })))
}

fn decode_ioctl(held: &Held) -> OpResult<(ControlTarget, Command)> {
    let (operation, payload) = held.parts();
    let input = payload.get(..operation.u32(24)? as usize).ok_or(Errno::EIO)?;
    let command = ioctl::decode(operation.u32(12)?, input)?;
    let is_dir = operation.u32(8)? & IOCTL_DIR != 0;
    let handle = if is_dir { None } else { Some(Handle(operation.u64(0)?)) };
    let (ino, caller, thread) = (held.request.ino, caller(held), held.request.pid);
    Ok((ControlTarget { ino, handle, caller, thread }, command))
}

/// Everything that needs one call and one answer.
fn answer(ops: &dyn FileSystemOps, context: Context, mut held: Held) {
    // What is needed of the request is copied out, since the answer takes its place.
    let result = Request::of(&held).and_then(|request| {
        let mut writer = Writer::new(held.space());
        request.serve(ops, context, &mut writer)?;
        Ok((writer.used(), request.change()))
    });
    match result {
        Ok((used, Some(change))) => {
            answer_durably(ops, change, Ok(used), move |result| held.answer(result));
        }
        result => held.answer(result.map(|(used, _)| used)),
    }
}

/// A request that owns what it needs.
struct Request {
    opcode: u32,
    ino: u64,
    caller: Caller,
    /// The caller's.
    thread: u32,
    operation: [u8; 128],
    payload: Vec<u8>,
}

impl Request {
    fn of(held: &Held) -> OpResult<Self> {
        let (operation, payload) = held.parts();
        Ok(Self {
            opcode: held.request.opcode,
            ino: held.request.ino,
            caller: caller(held),
            thread: held.request.pid,
            operation: operation.0.try_into().map_err(|_| Errno::EIO)?,
            payload: payload.to_vec(),
        })
    }

    fn fields(&self) -> Fields<'_> {
        Fields(&self.operation)
    }

    fn name(&self) -> OpResult<&[u8]> {
        Fields(&self.payload).string().map(|(name, _)| name)
    }

    fn two_names(&self) -> OpResult<(&[u8], &[u8])> {
        let (first, rest) = Fields(&self.payload).string()?;
        Ok((first, rest.string()?.0))
    }

    fn serve(
        &self,
        ops: &dyn FileSystemOps,
        context: Context,
        to: &mut Writer<'_>,
    ) -> OpResult<()> {
        let (fields, ino, valid) = (self.fields(), self.ino, context.valid.as_secs());
        match self.opcode {
            op::LOOKUP => match ops.lookup(ino, self.name()?) {
                Ok(attr) => to.entry_out(&attr, valid),
                Err(Errno::ENOENT) => to.no_entry(valid),
                Err(error) => Err(error),
            },
            op::GETATTR => to.attr_out(&ops.getattr(ino)?, valid),
            op::STATX => to.statx_out(&ops.getattr(ino)?, valid),
            op::SETATTR => to.attr_out(&ops.setattr(self.caller, ino, &self.set_attr()?)?, valid),
            op::READLINK => to.bytes(&ops.readlink(ino)?),
            op::SYMLINK => {
                let (name, target) = self.two_names()?;
                to.entry_out(&ops.symlink(self.caller, ino, name, target)?, valid)
            }
            op::MKNOD | op::MKDIR => to.entry_out(&self.make(ops)?, valid),
            op::CREATE | op::TMPFILE => self.create(ops, context, to),
            op::UNLINK => ops.unlink(ino, self.name()?),
            op::RMDIR => ops.rmdir(ino, self.name()?),
            op::RENAME => self.rename(ops, RenameMode::Replace),
            op::RENAME2 => {
                let flags = RenameFlags::from_bits_retain(fields.u32(8)?);
                self.rename(ops, rename_mode(flags, self.caller)?)
            }
            op::LINK => to.entry_out(&ops.link(fields.u64(0)?, ino, self.name()?)?, valid),
            op::OPEN => {
                let how = OpenFlags(fields.u32(0)? as i32);
                let handle = ops.open(self.caller, ino, open_mode(how))?;
                to.open_out(handle.0, open_flags(how, false, context.new_past_cache).bits())
            }
            op::RELEASE => {
                ops.release(Handle(fields.u64(0)?));
                Ok(())
            }
            op::READDIR | op::READDIRPLUS => self.read_dir(ops, to, valid),
            op::STATFS => statfs(ops, to),
            op::SETXATTR if context.xattr => self.set_xattr(ops),
            op::GETXATTR if context.xattr => {
                xattr_out(to, fields.u32(0)?, &ops.getxattr(ino, self.name()?)?)
            }
            op::LISTXATTR if context.xattr => {
                let list = visible_names(self.caller, &ops.listxattr(ino)?);
                xattr_out(to, fields.u32(0)?, &list)
            }
            op::REMOVEXATTR if context.xattr => ops.removexattr(ino, self.name()?),
            op::FALLOCATE => {
                let mode = allocate_mode(fields.u32(24)? as i32)?;
                let (offset, length) = (fields.u64(8)?, fields.u64(16)?);
                ops.allocate(self.caller, Handle(fields.u64(0)?), mode, offset, length)
            }
            op::LSEEK => to.u64s(&[self.seek(ops)?]),
            op::COPY_FILE_RANGE => to.u32s(&[self.copy_range(ops)? as u32, 0]),
            // The kernel stops asking for what it need not have.
            _ => Err(Errno::ENOSYS),
        }
    }

    /// What it changes, of what may have to be durable before the answer.
    fn change(&self) -> Option<Change> {
        match self.opcode {
            op::SYMLINK
            | op::MKNOD
            | op::MKDIR
            | op::CREATE
            | op::LINK
            | op::UNLINK
            | op::RMDIR
            | op::RENAME
            | op::RENAME2 => Some(Change::Names),
            op::SETATTR | op::SETXATTR | op::REMOVEXATTR => Some(Change::Attributes),
            op::OPEN => {
                let flags = self.fields().u32(0).unwrap_or(0) as i32;
                (flags & libc::O_TRUNC != 0).then_some(Change::Attributes)
            }
            _ => None,
        }
    }

    fn set_attr(&self) -> OpResult<SetAttr> {
        let fields = self.fields();
        let bits = fields.u32(0)?;
        let given = |bit: u32, at| {
            if bits & bit == 0 { Ok(None) } else { fields.u32(at).map(Some) }
        };
        let time = |bit: u32, now: u32, seconds, nanoseconds| -> OpResult<Option<SetTime>> {
            if bits & now != 0 {
                return Ok(Some(SetTime::Now));
            }
            let Some(nanoseconds) = given(bit, nanoseconds)? else { return Ok(None) };
            let seconds = fields.u64(seconds)? as i64;
            if nanoseconds >= 1_000_000_000 {
                return Err(Errno::EINVAL);
            }
            Ok(Some(SetTime::At(Timestamp { seconds, nanoseconds })))
        };
        let (uid, gid) = (given(valid::UID, 76)?, given(valid::GID, 80)?);
        let size_bytes = if bits & valid::SIZE == 0 { None } else { Some(fields.u64(16)?) };
        let owner_changes = uid.is_some() || gid.is_some();
        Ok(SetAttr {
            permissions: given(valid::MODE, 68)?.map(|mode| mode & 0o7777),
            uid,
            gid,
            size_bytes,
            atime: time(valid::ATIME, valid::ATIME_NOW, 32, 56)?,
            mtime: time(valid::MTIME, valid::MTIME_NOW, 40, 60)?,
            kill_suid_sgid: owner_changes || (size_bytes.is_some() && self.caller.uid != 0),
        })
    }

    fn make(&self, ops: &dyn FileSystemOps) -> OpResult<Attr> {
        let fields = self.fields();
        let mode = fields.u32(0)?;
        let (file_type, rdev, umask) = if self.opcode == op::MKDIR {
            (FileType::Directory, 0, fields.u32(4)?)
        } else {
            let file_type = FileType::from_mode(mode).ok_or(Errno::EINVAL)?;
            (file_type, fields.u32(4)?, fields.u32(8)?)
        };
        let new = Make { file_type, permissions: mode & 0o7777, umask, rdev };
        ops.make(self.caller, self.ino, self.name()?, &new)
    }

    fn create(
        &self,
        ops: &dyn FileSystemOps,
        context: Context,
        to: &mut Writer<'_>,
    ) -> OpResult<()> {
        let fields = self.fields();
        let (flags, permissions) = (fields.u32(0)? as i32, fields.u32(4)? & 0o7777);
        let new =
            Make { file_type: FileType::Regular, permissions, umask: fields.u32(8)?, rdev: 0 };
        let (attr, handle) = if self.opcode == op::TMPFILE {
            ops.tmpfile(self.caller, self.ino, &new)?
        } else {
            let (open, exclusive) = (open_mode(OpenFlags(flags)), flags & libc::O_EXCL != 0);
            ops.create(self.caller, self.ino, self.name()?, &new, open, exclusive)?
        };
        to.entry_out(&attr, context.valid.as_secs())?;
        let open_flags = open_flags(OpenFlags(flags), true, context.new_past_cache);
        to.open_out(handle.0, open_flags.bits())
    }

    fn rename(&self, ops: &dyn FileSystemOps, mode: RenameMode) -> OpResult<()> {
        let (name, new_name) = self.two_names()?;
        ops.rename(self.ino, name, self.fields().u64(0)?, new_name, mode)
    }

    fn read_dir(&self, ops: &dyn FileSystemOps, to: &mut Writer<'_>, valid: u64) -> OpResult<()> {
        let fields = self.fields();
        let (cookie, limit) = (fields.u64(8)?, fields.u32(16)? as usize);
        if self.opcode == op::READDIR {
            return ops.readdir(self.ino, cookie, &mut |entry| {
                let what = (entry.ino, entry.cookie, entry.file_type, &entry.name[..]);
                to.dirent(limit, what, None).is_ok()
            });
        }
        ops.readdir_plus(self.ino, cookie, &mut |entry, attr| {
            let what = (entry.ino, entry.cookie, entry.file_type, &entry.name[..]);
            to.dirent(limit, what, Some((attr.ok(), valid))).is_ok()
        })
    }

    fn set_xattr(&self, ops: &dyn FileSystemOps) -> OpResult<()> {
        let fields = self.fields();
        let mode = xattr_mode(fields.u32(4)? as i32)?;
        let (name, value) = Fields(&self.payload).string()?;
        let value = value.0.get(..fields.u32(0)? as usize).ok_or(Errno::EIO)?;
        let caller = as_member(ops, self.caller, self.thread, self.ino, name);
        ops.setxattr(caller, self.ino, name, value, mode)
    }

    fn seek(&self, ops: &dyn FileSystemOps) -> OpResult<u64> {
        let fields = self.fields();
        let seek = match fields.u32(16)? as i32 {
            libc::SEEK_DATA => Seek::Data,
            libc::SEEK_HOLE => Seek::Hole,
            _ => return Err(Errno::EINVAL),
        };
        let offset = fields.u64(8)?;
        if i64::try_from(offset).is_err() {
            return Err(Errno::ENXIO);
        }
        ops.seek(Handle(fields.u64(0)?), offset, seek)
    }

    fn copy_range(&self, ops: &dyn FileSystemOps) -> OpResult<u64> {
        let fields = self.fields();
        let (from, offset) = (Handle(fields.u64(0)?), fields.u64(8)?);
        let (to, to_offset) = (Handle(fields.u64(24)?), fields.u64(32)?);
        let length = fields.u64(40)?.min(MAX_COPY_BYTES);
        ops.copy_range(self.caller, from, offset, to, to_offset, length)
    }
}

/// `struct fuse_getxattr_out`, or the value.
fn xattr_out(to: &mut Writer<'_>, size_bytes: u32, value: &[u8]) -> OpResult<()> {
    if size_bytes == 0 {
        to.u32s(&[value.len() as u32, 0])
    } else if value.len() > size_bytes as usize {
        Err(Errno::ERANGE)
    } else {
        to.bytes(value)
    }
}

/// `struct fuse_statfs_out`.
fn statfs(ops: &dyn FileSystemOps, to: &mut Writer<'_>) -> OpResult<()> {
    let space = ops.statfs()?;
    to.u64s(&[space.total_blocks, space.free_blocks, space.available_blocks])?;
    to.u64s(&[space.inodes.saturating_add(space.free_inodes), space.free_inodes])?;
    to.u32s(&[BLOCK_BYTES, space.max_name_bytes, BLOCK_BYTES, 0, 0, 0, 0, 0, 0, 0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sync_is_alone_until_it_meets_another_and_for_a_while_after_that_nobody_is() {
        let crowd = Crowd::default();
        assert!(crowd.enter());
        crowd.leave();
        assert!(crowd.enter());
        assert!(!crowd.enter());
        crowd.leave();
        crowd.leave();
        let until_ns = crowd.until_ns.load(Ordering::Relaxed);
        assert!(until_ns >= CROWD.as_nanos() as u64);
        crowd.until_ns.store(u64::MAX, Ordering::Relaxed);
        assert!(!crowd.enter());
        crowd.leave();
        crowd.until_ns.store(0, Ordering::Relaxed);
        assert!(crowd.enter());
    }
}
