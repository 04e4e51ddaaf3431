//! The engine as a [`System`]: each operation of a workload is one call of the public interface.

mod agreement;
mod batch;
mod left_open;
mod overlap;
mod ways;

use std::collections::BTreeMap;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Wake, Waker};

use weir::device::Device;
use weir::sync::Mutex;
use weir::{
    Attr, BackgroundMode, BackgroundWork, CompletionQueue, CreateOptions, Error, File, FileType,
    InodeHold, NewInode, OpenFlags, SetAttr, SetTime, SyncKind, SyncRangeFlags, SyncTicket, Volume,
    VolumeOptions,
};

use crate::clock::SimClock;
use crate::device::SimDevice;
use crate::image::{BLOCK_BYTES, BlockRef};
use crate::model::found::{Found, FoundAttr, FoundBody, FoundNode, pages_of};
use crate::model::{Outcome, errno};
use crate::op::{Amid, Commit, HandOver, Hold, Op, Sync, Target};
use crate::pattern;
use crate::system::{Overlapped, Session, Settings, System, SystemError};

/// Files are read as a whole up to here; beyond, only where the engine says that there is data.
const READ_WHOLE_BYTES: u64 = 1 << 20;
const WRITE: SyncRangeFlags = SyncRangeFlags::WRITE;
/// Entries of a directory that are listed before it is asked for more.
const LISTED_AT_A_TIME: usize = 5;
/// More steps than this of one kind of background work mean that it never ends.
const MAX_STEPS: u32 = 10_000;

/// The engine, in manual mode: no threads, everything happens within the calls.
#[derive(Debug, Default)]
pub struct Engine;

/// An open volume.
pub struct EngineSession {
    volume: Volume,
    device: Arc<SimDevice>,
    slots: BTreeMap<u8, File>,
    /// Inodes that are kept alive, by handle.
    holds: BTreeMap<u8, Arc<InodeHold>>,
    /// Operations run amid others: each is the same call every time.
    is_plain: bool,
    /// Tickets that are awaited.
    tickets: BTreeMap<u32, Pin<Box<SyncTicket>>>,
    /// Where the others are delivered.
    /// For all callers: made by whoever needs it first.
    queue: Arc<OnceLock<Arc<CompletionQueue>>>,
    /// What the last call said about when it is durable.
    told_lsn: Option<u64>,
    /// Where the last append began.
    appended_at: u64,
    /// See [`Session::left_open_bytes`].
    left_open_bytes: Option<u64>,
    /// A barrier that was acknowledged too early.
    early: Arc<Mutex<Option<String>>>,
    /// It is one beside another: the device's record is not its business.
    is_beside: bool,
    /// Nothing was done since it was opened.
    is_fresh: bool,
}

impl Drop for EngineSession {
    fn drop(&mut self) {
        // It holds the volume, which holds the device.
        if !self.is_beside {
            self.device.watch_lsn(None);
        }
    }
}

/// Notes in the device's record at which point a ticket ended.
struct Noticed {
    device: Arc<SimDevice>,
    ticket: u32,
}

impl Wake for Noticed {
    fn wake(self: Arc<Self>) {
        self.device.note_ended(self.ticket);
    }
}

impl From<Error> for SystemError {
    fn from(error: Error) -> Self {
        Self {
            errno: error.errno(),
            text: error.to_string(),
            shutdown: matches!(error, Error::Shutdown(_)),
        }
    }
}

type Result<T> = std::result::Result<T, SystemError>;

fn options(clock: &Arc<SimClock>, settings: &Settings) -> VolumeOptions {
    VolumeOptions {
        memory_bytes: Some(settings.memory_bytes),
        batch_part_blocks: settings.batch_part_blocks,
        beside_from_pages: settings.beside_from_pages,
        dense_merges: settings.dense_merges,
        purge_at_once_blocks: settings.purge_at_once_blocks,
        round_pages: settings.round_pages,
        cut_extents: settings.cut_extents,
        background: BackgroundMode::Manual,
        atime: settings.atime,
        clock: Arc::clone(clock) as Arc<dyn weir::sync::Clock>,
        ..VolumeOptions::default()
    }
}

impl System for Engine {
    type Session = EngineSession;

    fn create(
        &self,
        device: &Arc<SimDevice>,
        _clock: &Arc<SimClock>,
        settings: &Settings,
    ) -> Result<()> {
        let options = CreateOptions {
            size_bytes: Some(settings.volume_blocks * BLOCK_BYTES as u64),
            log_bytes: Some(settings.log_blocks * BLOCK_BYTES as u64),
            volume_id: Some(*b"weir-sim-volume!"),
            ..CreateOptions::default()
        };
        let device = Arc::clone(device) as Arc<dyn Device>;
        Ok(Volume::format_device(&device, &options)?)
    }

    fn open(
        &self,
        device: &Arc<SimDevice>,
        clock: &Arc<SimClock>,
        settings: &Settings,
    ) -> Result<EngineSession> {
        let disk = Arc::clone(device) as Arc<dyn Device>;
        let volume = Volume::open_device(disk, options(clock, settings))?;
        let watched = volume.clone();
        device.watch_lsn(Some(Box::new(move || watched.durable_lsn())));
        Ok(EngineSession::new(volume, device))
    }

    fn open_read_only(
        &self,
        device: &Arc<SimDevice>,
        clock: &Arc<SimClock>,
        settings: &Settings,
    ) -> Result<Option<EngineSession>> {
        let disk = Arc::clone(device) as Arc<dyn Device>;
        let options = VolumeOptions { read_only: true, ..options(clock, settings) };
        match Volume::open_device(disk, options) {
            Ok(volume) => {
                // What a crash has left without a name is still there.
                let mut session = EngineSession::new(volume, device);
                session.is_fresh = false;
                Ok(Some(session))
            }
            Err(Error::TooLittleMemory(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn leftovers(&self, settings: &Settings) -> Range<u64> {
        let geometry =
            weir::format::geometry::Geometry::new(settings.volume_blocks, settings.log_blocks);
        geometry.map_or(0..0, |geometry| geometry.log_start_block()..geometry.data_start())
    }

    fn check(&self, device: &Arc<SimDevice>) -> Result<Vec<String>> {
        let device = Arc::clone(device) as Arc<dyn Device>;
        let report = weir::check::check_device(&device, &weir::check::CheckOptions::default())?;
        let mut defects: Vec<String> = report.problems.iter().map(ToString::to_string).collect();
        // Everybody who held an unlinked inode open is gone.
        if report.counts.orphans > 0 {
            defects.push(format!("{} orphans are left", report.counts.orphans));
        }
        Ok(defects)
    }
}

impl EngineSession {
    fn new(volume: Volume, device: &Arc<SimDevice>) -> Self {
        Self {
            volume,
            device: Arc::clone(device),
            slots: BTreeMap::new(),
            holds: BTreeMap::new(),
            is_plain: false,
            tickets: BTreeMap::new(),
            queue: Arc::default(),
            told_lsn: None,
            appended_at: 0,
            left_open_bytes: None,
            early: Arc::default(),
            is_beside: false,
            is_fresh: true,
        }
    }

    /// Another caller of the same volume, with the same open files.
    fn beside(&mut self) -> Self {
        Self {
            volume: self.volume.clone(),
            device: Arc::clone(&self.device),
            slots: self.slots.clone(),
            holds: self.holds.clone(),
            is_plain: true,
            tickets: BTreeMap::new(),
            queue: Arc::clone(&self.queue),
            told_lsn: None,
            appended_at: 0,
            left_open_bytes: None,
            early: Arc::clone(&self.early),
            is_beside: true,
            is_fresh: false,
        }
    }

    fn number(&self, path: &str) -> Result<u64> {
        Ok(self.volume.resolve(path, false)?)
    }

    /// The directory and the name in it.
    fn place(&self, path: &str) -> Result<(u64, Vec<u8>)> {
        Ok(self.volume.resolve_parent(path)?)
    }

    fn file(&self, target: &Target) -> Result<File> {
        match target {
            Target::Path(path) => Ok(self
                .volume
                .at_path(path, false, |number| self.volume.open_inode(number, true))?),
            Target::Slot(slot) => self.slot(*slot),
        }
    }

    /// The open file, or what is held, opened for this.
    fn slot(&self, slot: u8) -> Result<File> {
        let closed = || SystemError::new(errno::EBADF, "no such handle");
        if let Some(hold) = self.holds.get(&slot) {
            return Ok(self.volume.open_inode(hold.ino(), true)?);
        }
        self.slots.get(&slot).cloned().ok_or_else(closed)
    }

    fn slot_number(&self, slot: u8) -> Result<u64> {
        match self.holds.get(&slot) {
            Some(hold) => Ok(hold.ino()),
            None => Ok(self.slot(slot)?.ino()),
        }
    }

    /// One handle, or none, in place of what it was.
    fn set_slot(&mut self, slot: u8, opened: Option<File>, hold: Option<InodeHold>) {
        let held = (self.slots.remove(&slot), self.holds.remove(&slot));
        if let Some(file) = opened {
            self.slots.insert(slot, file);
        }
        if let Some(hold) = hold {
            self.holds.insert(slot, Arc::new(hold));
        }
        drop(held);
    }

    fn make(&self, path: &str, new: &NewInode) -> Result<Outcome> {
        let (dir, name) = self.place(path)?;
        self.agreed(&self.volume.make(dir, &name, new)?)
    }

    /// What a call has answered of an inode is what there is.
    fn agreed(&self, answered: &Attr) -> Result<Outcome> {
        if self.is_plain {
            // Others may have changed it.
            return Ok(Outcome::Done);
        }
        match self.volume.getattr(answered.ino) {
            Ok(now) if now != *answered => {
                Err(SystemError::new(0, format!("answered {answered:?}, it is {now:?}")))
            }
            // It was there a moment ago.
            _ => Ok(Outcome::Done),
        }
    }

    fn set_attr(&self, path: &str, change: &SetAttr) -> Result<Outcome> {
        self.agreed(&self.volume.setattr(self.number(path)?, change)?)
    }

    fn sync(&self, target: &Target, data_only: bool) -> Result<Outcome> {
        let file = match target {
            // Somebody else may rename it meanwhile.
            Target::Path(path) => {
                let opened = self.volume.at_path(path, false, |number| {
                    if self.volume.getattr(number)?.file_type == FileType::Regular {
                        return self.volume.open_inode(number, true).map(Some);
                    }
                    self.volume.fsync_dir(number)?;
                    Ok(None)
                })?;
                let Some(file) = opened else { return Ok(Outcome::Done) };
                file
            }
            Target::Slot(slot) => match self.slot(*slot) {
                Ok(file) => file,
                // Held, and no file.
                Err(error) if is_no_file(&error) => {
                    self.volume.fsync_dir(self.slot_number(*slot)?)?;
                    return Ok(Outcome::Done);
                }
                Err(error) => return Err(error),
            },
        };
        let kind = if data_only { SyncKind::Data } else { SyncKind::Full };
        // As the mount does; an answer counts as that of a sync.
        if let Some(result) = file.fsync_if_durable(0..u64::MAX, kind) {
            result?;
            return Ok(Outcome::Done);
        }
        let result = if data_only { file.fdatasync() } else { file.fsync() };
        result?;
        Ok(Outcome::Done)
    }

    fn submit(&mut self, sync: &Sync, range: &Range<u64>, number: u32, hold: Hold) -> Result<()> {
        let ticket = match sync {
            Sync::All => self.volume.sync_async()?,
            Sync::Full(target) | Sync::Data(target) => match self.file(target) {
                Ok(file) => {
                    let is_full = matches!(sync, Sync::Full(_));
                    let kind = if is_full { SyncKind::Full } else { SyncKind::Data };
                    file.fsync_async(range.clone(), kind)?
                }
                Err(error) if is_no_file(&error) => self.submit_dir(target)?,
                Err(error) => return Err(error),
            },
        };
        self.hold(ticket, number, hold)
    }

    fn submit_dir(&self, target: &Target) -> Result<SyncTicket> {
        let submitted = match target {
            Target::Path(path) => {
                self.volume.at_path(path, false, |number| self.volume.fsync_dir_async(number))
            }
            Target::Slot(_) => Err(Error::WouldBlock),
        };
        match submitted {
            // The log is too full to take the attributes at once.
            Err(Error::WouldBlock) => Ok(self.volume.sync_async()?),
            submitted => Ok(submitted?),
        }
    }

    fn hold(&mut self, ticket: SyncTicket, number: u32, hold: Hold) -> Result<()> {
        match hold {
            Hold::Drop => drop(ticket),
            Hold::Await => {
                let mut ticket = Box::pin(ticket);
                let notice = Noticed { device: Arc::clone(&self.device), ticket: number };
                let waker = Waker::from(Arc::new(notice));
                if ticket.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                    waker.wake();
                }
                self.tickets.insert(number, ticket);
            }
            Hold::Deliver => {
                if self.queue.get().is_none() {
                    // Whoever comes second uses the first.
                    let _ = self.queue.set(CompletionQueue::new()?);
                }
                if let Some(queue) = self.queue.get() {
                    ticket.deliver(queue, u64::from(number));
                }
            }
        }
        Ok(())
    }

    fn batch(&mut self, parts: &[Op], commit: Commit) -> Result<Outcome> {
        let batch = batch::Recorder::record(self, parts)?;
        let result = match commit {
            Commit::Sync => batch.commit().map(|lsn| self.told_lsn = Some(lsn)),
            Commit::Relaxed => batch.commit_relaxed().map(|lsn| self.told_lsn = Some(lsn)),
            Commit::Async { ticket, hold } => match batch.commit_async() {
                Ok(waits) => return self.hold(waits, ticket, hold).map(|()| Outcome::Done),
                Err(failed) => Err(failed),
            },
        };
        match result.map_err(Error::from) {
            Ok(()) => Ok(Outcome::Done),
            // How much of a batch goes into the log depends on where its data lies: the model cannot foresee it.
            Err(Error::Invalid(text)) if text.starts_with("the batch is too large") => {
                Err(SystemError::new(errno::ENOSPC, text))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The number of a barrier can be waited for, even if no operation has it yet. Every other barrier is: a ticket makes the log
    /// write, and a barrier alone must hold too. No ticket ends before its barrier is durable.
    fn watch_barrier(&self, lsn: u64) -> Result<Outcome> {
        if lsn > self.volume.last_given_out() {
            let text = format!("a barrier answered {lsn}, which is nothing's");
            return Err(SystemError::new(0, text));
        }
        if lsn % 2 == 1 {
            // The volume holds this: it must not hold the volume.
            let (device, early) = (Arc::clone(&self.device), Arc::clone(&self.early));
            self.volume.ticket_for(lsn)?.on_completion(move |result| {
                let durable = device.claimed_lsn();
                if result.is_ok() && durable.is_some_and(|durable| durable < lsn) {
                    let text = format!("barrier {lsn} was acknowledged at {durable:?}");
                    early.lock().get_or_insert(text);
                }
            });
        }
        Ok(Outcome::Done)
    }

    /// In manual mode this drives the log and answers at once.
    fn wait_durable(&self) -> Result<Outcome> {
        let last = self.volume.last_lsn();
        let reached = self.volume.wait_durable(last, Some(0))?;
        if reached && self.volume.durable_lsn() < last {
            return Err(SystemError::new(0, "wait_durable answered too early"));
        }
        Ok(Outcome::Done)
    }

    fn read(file: &File, offset: u64, length: u64) -> weir::Result<Vec<u8>> {
        let available = file.size().saturating_sub(offset).min(length);
        let mut data = vec![0; available as usize];
        let mut done = 0;
        while done < data.len() {
            let count = file.read_at(offset + done as u64, &mut data[done..])?;
            if count == 0 {
                break;
            }
            done += count;
        }
        data.truncate(done);
        Ok(data)
    }

    fn background(&self, work: BackgroundWork, steps: u32) -> Result<Outcome> {
        for _ in 0..steps {
            if !self.volume.background_step(work)? {
                break;
            }
        }
        Ok(Outcome::Done)
    }

    fn namespace_op(&mut self, op: &Op) -> Result<Outcome> {
        if !self.is_plain
            && let Some(outcome) = self.by_another_way(op)
        {
            return outcome;
        }
        match op {
            Op::Create { path, permissions } => {
                return self.make(path, &NewInode::new(FileType::Regular, *permissions));
            }
            Op::Mkdir { path } => {
                return self.make(path, &NewInode::new(FileType::Directory, 0o755));
            }
            Op::Mknod { path, file_type, rdev } => {
                let is_device = matches!(file_type, FileType::CharDevice | FileType::BlockDevice);
                let rdev = if is_device { *rdev } else { 0 };
                return self.make(path, &NewInode { rdev, ..NewInode::new(*file_type, 0o600) });
            }
            Op::Symlink { path, target } => {
                let (dir, name) = self.place(path)?;
                return self.agreed(&self.volume.symlink(dir, &name, target.as_bytes(), 0, 0)?);
            }
            Op::Link { from, to } => {
                let number = self.number(from)?;
                let (dir, name) = self.place(to)?;
                return self.agreed(&self.volume.link(number, dir, &name)?);
            }
            Op::LinkSlot { slot, path } => {
                let number = self.slot_number(*slot)?;
                let (dir, name) = self.place(path)?;
                return self.agreed(&self.volume.link(number, dir, &name)?);
            }
            Op::Unlink { path } => {
                let (dir, name) = self.place(path)?;
                self.volume.unlink(dir, &name)?;
            }
            Op::Rmdir { path } => {
                let (dir, name) = self.place(path)?;
                self.volume.rmdir(dir, &name)?;
            }
            Op::Rename { from, to, mode } => {
                let (dir, name) = self.place(from)?;
                let (new_dir, new_name) = self.place(to)?;
                self.volume.rename(dir, &name, new_dir, &new_name, *mode)?;
            }
            Op::SetXattr { path, name, length, tag, mode } => {
                let number = self.number(path)?;
                let value = pattern::bytes(*tag, 0, *length);
                self.volume.setxattr(number, name.as_bytes(), &value, *mode)?;
            }
            Op::RemoveXattr { path, name } => {
                self.volume.removexattr(self.number(path)?, name.as_bytes())?;
            }
            Op::Chmod { path, permissions } => {
                let change = SetAttr { permissions: Some(*permissions), ..SetAttr::default() };
                return self.set_attr(path, &change);
            }
            Op::Chown { path, uid, gid } => {
                let change = SetAttr { uid: Some(*uid), gid: Some(*gid), ..SetAttr::default() };
                return self.set_attr(path, &change);
            }
            Op::Utimens { path, atime, mtime } => {
                let (atime, mtime) = (Some(SetTime::At(*atime)), Some(SetTime::At(*mtime)));
                return self.set_attr(path, &SetAttr { atime, mtime, ..SetAttr::default() });
            }
            _ => return self.data_op(op),
        }
        Ok(Outcome::Done)
    }

    fn data_op(&mut self, op: &Op) -> Result<Outcome> {
        match op {
            Op::Untorn { target, offset, length, tag } => {
                let promised = self.volume.capabilities();
                let unit = u64::from(promised.untorn_boundary_bytes);
                if *length > u64::from(promised.untorn_write_bytes)
                    || offset / unit != (offset + length - 1) / unit
                {
                    return Err(SystemError::new(0, "the volume does not promise this much"));
                }
                let data = pattern::bytes(*tag, *offset, *length);
                let count = self.file(target)?.write_at(*offset, &data)?;
                return Ok(Outcome::Count(count as u64));
            }
            Op::Write { target, offset, length, tag } => {
                let data = pattern::bytes(*tag, *offset, *length);
                let count = self.file(target)?.write_at(*offset, &data)?;
                return Ok(Outcome::Count(count as u64));
            }
            Op::Append { target, length, tag } => {
                let file = self.file(target)?;
                let before = file.size();
                self.appended_at = before;
                let data = pattern::bytes(*tag, before, *length);
                file.append(&data)?;
                return Ok(Outcome::Count(file.size() - before));
            }
            Op::Truncate { target, size } => {
                let file = self.file(target)?;
                let lsn = self.volume.last_lsn();
                // As a mount does it.
                if size % 3 == 1 && file.is_writable() {
                    let change = SetAttr { size_bytes: Some(*size), ..SetAttr::default() };
                    self.volume.setattr(file.ino(), &change)?;
                } else {
                    file.truncate(*size)?;
                }
                if !self.is_plain && file.last_lsn() <= lsn && self.volume.last_lsn() > lsn {
                    let text = format!("cut behind LSN {lsn}, its last is {}", file.last_lsn());
                    return Err(SystemError::new(0, text));
                }
            }
            Op::Allocate { target, mode, offset, length } => {
                self.file(target)?.allocate(*mode, *offset, *length)?;
            }
            Op::CopyRange { from, from_offset, to, to_offset, length } => {
                let (source, target) = (self.file(from)?, self.file(to)?);
                let count = source.copy_range(*from_offset, &target, *to_offset, *length)?;
                return Ok(Outcome::Count(count));
            }
            Op::Open { path, slot } => {
                let file = self.volume.open_file(path, OpenFlags::READ_WRITE)?;
                self.set_slot(*slot, Some(file), None);
            }
            Op::OpenWith { path, slot, flags } => {
                let file = self.volume.open_file(path, *flags)?;
                self.set_slot(*slot, Some(file), None);
            }
            Op::Hold { path, slot } => {
                let hold = self.volume.at_path(path, false, |number| self.volume.hold(number))?;
                self.set_slot(*slot, None, Some(hold));
            }
            Op::Close { slot } => {
                self.slot_number(*slot)?;
                self.set_slot(*slot, None, None);
            }
            Op::TmpFile { dir, slot } => {
                let new = NewInode::new(FileType::Regular, 0o600);
                let (made, file) = self.volume.tmpfile(self.number(dir)?, &new)?;
                self.set_slot(*slot, Some(file), None);
                return self.agreed(&made);
            }
            Op::Read { target, offset, length } => {
                let file = self.file(target)?;
                let mut data = vec![0; *length as usize];
                // What is in memory needs nobody to wait.
                return Ok(Outcome::Data(match file.read_at_nowait(*offset, &mut data) {
                    Ok(count) => {
                        data.truncate(count);
                        data
                    }
                    Err(_) => Self::read(&file, *offset, *length)?,
                }));
            }
            _ => return self.durability_op(op),
        }
        Ok(Outcome::Done)
    }

    fn durability_op(&mut self, op: &Op) -> Result<Outcome> {
        match op {
            Op::Submit { sync, range, ticket, hold } => {
                self.submit(sync, range, *ticket, *hold).map(|()| Outcome::Done)
            }
            Op::Barrier { target } => {
                let lsn = match target {
                    Some(target) => self.file(target)?.barrier()?,
                    None => self.volume.barrier()?,
                };
                self.told_lsn = Some(lsn);
                self.watch_barrier(lsn)
            }
            Op::HandOver { target, range, how } => {
                let (file, wait) = (self.file(target)?, *how == HandOver::Wait);
                let flags = SyncRangeFlags { wait_before: wait, wait_after: wait, ..WRITE };
                match how {
                    HandOver::Expire => file.expire(range.clone())?,
                    HandOver::Flags(flags) => match file.sync_range(range.clone(), *flags) {
                        // So much is handed over already.
                        Err(Error::WouldBlock) if flags.nowait => {}
                        handed_over => handed_over?,
                    },
                    _ => file.sync_range(range.clone(), flags)?,
                }
                Ok(Outcome::Done)
            }
            Op::Batch { parts, commit } => self.batch(parts, *commit),
            Op::WaitDurable => self.wait_durable(),
            Op::Sync(Sync::Full(target)) => self.sync(target, false),
            Op::Sync(Sync::Data(target)) => self.sync(target, true),
            Op::Sync(Sync::All) => Ok(self.volume.sync().map(|()| Outcome::Done)?),
            Op::Checkpoint => Ok(self.volume.checkpoint().map(|()| Outcome::Done)?),
            Op::Background { work, steps } => self.background(*work, *steps),
            Op::Writeback => self.background(BackgroundWork::Writeback, MAX_STEPS),
            _ => Ok(Outcome::Done),
        }
    }

    fn node(&self, attr: &Attr) -> Result<FoundNode> {
        let mut node = FoundNode {
            attr: found_attr(attr),
            xattrs: BTreeMap::new(),
            body: FoundBody::Special,
            data: None,
            unreadable: BTreeMap::new(),
        };
        for name in self.volume.listxattr(attr.ino)? {
            let value = self.volume.getxattr(attr.ino, &name)?;
            if node.xattrs.insert(text(&name), value).is_some() {
                let text = format!("{} is listed twice", text(&name));
                return Err(SystemError::new(0, text));
            }
        }
        node.body = match attr.file_type {
            FileType::Regular => {
                let file = self.volume.open_inode(attr.ino, false)?;
                node.data = Self::where_data_is(&file, attr.size_bytes);
                FoundBody::File(Self::contents(&file, attr, &mut node.unreadable)?)
            }
            FileType::Directory => FoundBody::Directory(self.entries(attr.ino)?),
            FileType::Symlink => FoundBody::Symlink(text(&self.volume.readlink(attr.ino)?)),
            _ => FoundBody::Special,
        };
        Ok(node)
    }

    fn entries(&self, ino: u64) -> Result<BTreeMap<String, (u64, FileType)>> {
        let mut entries = BTreeMap::new();
        let mut listed = 0;
        let mut from = Some(0);
        // A few at a time.
        while let Some(after_cookie) = from.take() {
            self.volume.readdir(ino, after_cookie, &mut |entry| {
                entries.insert(text(&entry.name), (entry.ino, entry.file_type));
                listed += 1;
                from = (listed % LISTED_AT_A_TIME == 0).then_some(entry.cookie);
                from.is_none()
            })?;
        }
        if listed == entries.len() {
            return Ok(entries);
        }
        let text = format!("directory {ino} lists {listed} entries, some of them twice");
        Err(SystemError::new(0, text))
    }

    /// The pages that are said to hold data.
    fn where_data_is(file: &File, size: u64) -> Option<Vec<Range<u64>>> {
        const PAGE: u64 = BLOCK_BYTES as u64;
        let (mut runs, mut at) = (Vec::new(), 0);
        while at < size {
            let data = match file.seek_data(at) {
                Ok(data) => data,
                Err(Error::NoSuchExtent) => break,
                Err(_) => return None,
            };
            let hole = file.seek_hole(data).ok().filter(|hole| *hole > data)?;
            runs.push(data / PAGE..hole.div_ceil(PAGE));
            at = hole;
        }
        Some(runs)
    }

    /// All pages with data. What cannot be read is noted page by page.
    fn contents(
        file: &File,
        attr: &Attr,
        unreadable: &mut BTreeMap<u64, String>,
    ) -> Result<BTreeMap<u64, BlockRef>> {
        let mut pages = BTreeMap::new();
        let whole = attr.size_bytes.min(READ_WHOLE_BYTES);
        match Self::read(file, 0, whole) {
            Ok(data) => pages.extend(pages_of(0, &data)),
            Err(_) => {
                for index in 0..whole.div_ceil(BLOCK_BYTES as u64) {
                    Self::page(file, index, &mut pages, unreadable);
                }
            }
        }
        let mut offset = READ_WHOLE_BYTES;
        while offset < attr.size_bytes {
            let Ok(data) = file.seek_data(offset) else { break };
            let hole = file.seek_hole(data)?;
            for index in data / BLOCK_BYTES as u64..hole.div_ceil(BLOCK_BYTES as u64) {
                Self::page(file, index, &mut pages, unreadable);
            }
            offset = hole;
        }
        Ok(pages)
    }

    fn page(
        file: &File,
        index: u64,
        pages: &mut BTreeMap<u64, BlockRef>,
        unreadable: &mut BTreeMap<u64, String>,
    ) {
        match Self::read(file, index * BLOCK_BYTES as u64, BLOCK_BYTES as u64) {
            Ok(data) => pages.extend(pages_of(index, &data)),
            Err(error) => drop(unreadable.insert(index, error.to_string())),
        }
    }
}

const fn is_no_file(error: &SystemError) -> bool {
    matches!(error.errno, errno::EISDIR | errno::EINVAL)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

const fn found_attr(attr: &Attr) -> FoundAttr {
    FoundAttr {
        file_type: attr.file_type,
        permissions: attr.permissions,
        links: attr.links,
        uid: attr.uid,
        gid: attr.gid,
        size: attr.size_bytes,
        blocks: attr.blocks,
        rdev: attr.rdev,
        atime: attr.atime,
        mtime: attr.mtime,
        ctime: attr.ctime,
        btime: attr.btime,
    }
}

impl Session for EngineSession {
    fn apply(&mut self, op: &Op) -> Result<Outcome> {
        self.told_lsn = None;
        self.is_fresh = false;
        let lsn = self.volume.last_lsn();
        let outcome = self.namespace_op(op);
        self.left_open_bytes = self.left_open(op, &outcome, lsn);
        let early = self.early.lock().take();
        early.map_or(outcome, |text| Err(SystemError::new(0, text)))
    }

    fn overlap(&mut self, outer: &Op, amid: Amid, inner: &[Op]) -> Overlapped {
        self.is_fresh = false;
        self.run_overlap(outer, amid, inner)
    }

    fn ended(&mut self) -> Vec<(u32, Result<()>)> {
        let mut ended: Vec<(u32, Result<()>)> = Vec::new();
        self.tickets.retain(|number, ticket| {
            let result = SyncTicket::poll(ticket);
            let waits = result.is_none();
            ended.extend(result.map(|result| (*number, result.map_err(SystemError::from))));
            waits
        });
        while let Some(done) = self.queue.get().and_then(|queue| queue.take()) {
            ended.push((done.user_data as u32, done.result.map_err(SystemError::from)));
        }
        ended
    }

    fn available_blocks(&self) -> Option<u64> {
        Some(self.volume.statfs().available_blocks)
    }

    fn left_open_bytes(&self) -> Option<u64> {
        self.left_open_bytes
    }

    fn failed_syncs(&self) -> u64 {
        self.volume.stats().failed_syncs
    }

    fn last_lsn(&self) -> Option<u64> {
        self.told_lsn.or_else(|| Some(self.volume.last_lsn()))
    }

    fn found(&mut self) -> Result<Found> {
        let mut found = Found { root: Volume::ROOT, ..Found::default() };
        let mut queue = vec![Volume::ROOT];
        while let Some(ino) = queue.pop() {
            if found.nodes.contains_key(&ino) || found.problems.contains_key(&ino) {
                continue;
            }
            let attr = self.volume.getattr(ino).map_err(SystemError::from);
            match attr.and_then(|attr| self.node(&attr)) {
                Ok(node) => {
                    if let FoundBody::Directory(entries) = &node.body {
                        queue.extend(entries.values().map(|(child, _)| *child));
                    }
                    found.nodes.insert(ino, node);
                }
                Err(error) if ino == Volume::ROOT => return Err(error),
                Err(error) => drop(found.problems.insert(ino, error.to_string())),
            }
        }
        if !self.is_fresh {
            found.contradictions = self.disagreements(&found);
        }
        Ok(found)
    }

    fn contradictions(&self, found: &Found) -> Vec<String> {
        self.disagreements(found)
    }

    fn free_blocks(&self) -> Option<u64> {
        let space = self.volume.stats().space;
        Some(space.free_blocks + space.pending_free_blocks)
    }

    fn close(mut self) -> Result<Option<u64>> {
        self.slots.clear();
        self.holds.clear();
        let closed = self.volume.close().map_err(SystemError::from);
        let early = self.early.lock().take();
        let wrong = early.or_else(|| closed.is_ok().then(|| self.still_held()).flatten());
        wrong.map_or(closed, |text| Err(SystemError::new(0, text)))?;
        Ok(self.free_blocks())
    }
}
