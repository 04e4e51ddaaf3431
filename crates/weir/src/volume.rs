//! [`Volume`]: what a program holds. Each method is one call into the engine; see there for how.

pub(crate) mod create;
mod machine;
pub(crate) mod open;
mod paths;

use crate::background::{BackgroundWork, Jobs};
use crate::batch::Batch;
use crate::device::Device;
use crate::engine::{Engine, Room};
use crate::error::{CLOSED, Error, FORKED, Result};
use crate::file::fsync::SyncKind;
use crate::file::handle::{File, InodeHold};
use crate::format::MAX_NAME_BYTES;
use crate::inode::Inode;
use crate::log::stats::Histogram;
use crate::mutation::{self, Mutation};
use crate::namespace::path::on_named;
use crate::namespace::xattr::XattrMode;
use crate::running::Running;
use crate::stats::Stats;
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, as_own_thread, is_own_thread};
use crate::ticket::SyncTicket;
use crate::txn::checkpoint::Phase;
use crate::types::{
    Attr, CreateOptions, DirEntry, FileType, NewInode, RenameMode, SetAttr, StatFs, VolumeOptions,
};
use std::path::Path;

/// An open volume. Cheap to clone, `Send` and `Sync`: all calls may be made from any thread at any time.
///
/// Changing calls are atomic and ordered: after a crash, the volume holds the effects of all calls up to some point, and that
/// point is never before the last call that an fsync, [`Volume::sync`] or [`Volume::checkpoint`]
/// covered. (Data written to files obeys its own fsyncs.) None is durable by itself.
///
/// A volume stays open as long as there is a clone of it, a [`File`], an [`InodeHold`] or a [`Batch`]. Dropping the last of them without
/// [`Volume::close`] is like a crash: what was made durable is there.
///
/// It belongs to the process that has opened it: in a child that is forked, each call answers [`Error::Shutdown`], and dropping it does
/// nothing.
///
/// All calls may answer [`Error::Io`] or [`Error::Corrupt`]; changing calls also [`Error::ReadOnly`],
/// [`Error::NoSpace`] and [`Error::Shutdown`].
#[derive(Clone)]
pub struct Volume {
    engine: Arc<Running>,
}

impl std::fmt::Debug for Volume {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Volume")
            .field("geometry", &self.engine.geometry)
            .finish_non_exhaustive()
    }
}

/// Life of a volume.
impl Volume {
    /// Inode number of the root directory.
    pub const ROOT: u64 = 1;

    /// Creates a volume: a new image file of the given size, or on a block device. Writes the log ring and the superblocks fully
    /// (with `prewrite`: everything). Durable when it returns. Never replaces anything without
    /// `force`.
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::Invalid`] for an impossible size, [`Error::HostFull`], [`Error::InUse`].
    pub fn create(path: &Path, options: &CreateOptions) -> Result<()> {
        create::create(path, options, &mut |_, _| {})
    }

    /// As [`Volume::create`]; `progress` is called with (bytes written, bytes to write).
    pub fn create_with_progress(
        path: &Path,
        options: &CreateOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<()> {
        create::create(path, options, progress)
    }

    /// Creates a volume on a device, whatever was there.
    pub fn format_device(device: &Arc<dyn Device>, options: &CreateOptions) -> Result<()> {
        create::format(device, options, &mut |_, _| {})
    }

    /// Opens a volume, after recovering it if need be. Blocks for as long as that takes.
    ///
    /// # Errors
    /// [`Error::NotAVolume`], [`Error::InUse`]; [`Error::TooLittleMemory`] when the log cannot be replayed within the cap.
    pub fn open(path: &Path, options: VolumeOptions) -> Result<Self> {
        let device = open::posix_device(path, options.read_only)?;
        Self::open_device(device, options)
    }

    /// As [`Volume::open`], on any device. The caller makes sure that nobody else uses it.
    pub fn open_device(device: Arc<dyn Device>, options: VolumeOptions) -> Result<Self> {
        Ok(Self { engine: Running::new(open::open(device, options)?) })
    }

    /// Makes everything durable, empties the log and marks the volume as cleanly closed. Files that are still open become
    /// read-only. Unlinked files that are still open are purged at the next opening.
    ///
    /// All clones, files, holds and batches share that; the volume can be opened again when the last of them is gone. Whoever calls this beside
    /// somebody else waits for the same end. Blocks.
    ///
    /// # Errors
    /// What could not be made durable; or, if it is durable, why the log could not be emptied (see [`Volume::checkpoint`]): the next
    /// opening replays it. The volume is open as before then, and may be closed once more, unless it was shut down. [`Error::Invalid`] in a callback or
    /// a waker that one of the volume's own threads calls, or a thread that closes a volume.
    pub fn close(&self) -> Result<()> {
        self.engine.close()
    }

    /// Nothing can be changed.
    pub fn is_read_only(&self) -> bool {
        self.engine.check_writable().is_err()
    }

    /// Why the volume was shut down, if it was.
    pub fn shutdown_reason(&self) -> Option<String> {
        if self.engine.check_process().is_err() {
            return Some(FORKED.to_owned());
        }
        self.engine.shutdown.lock().clone()
    }

    /// Has `listener` told what goes wrong where no call of the program can say so, or not yet: a page that could not be written home,
    /// with the number of its inode (a sync of its file reports it as well), a checkpoint that the device refuses, and why the volume was shut down. Where several
    /// things fail, it hears of the last, about once a second and when the volume closes; of what failed before this call too. It
    /// replaces the one that was there, and goes with the volume's last user.
    ///
    /// It is called by a thread that brings dirty pages home: it should return soon, must not sync or close the volume, and must hold no
    /// [`Volume`] or [`crate::File`], which would keep it open. If it panics, nothing else happens. Without threads
    /// ([`crate::BackgroundMode::Manual`]) it is called only when the volume closes.
    pub fn on_background_error(&self, listener: impl Fn(&Error) + Send + Sync + 'static) {
        self.engine.background.listen(crate::sync::Arc::new(listener));
    }

    /// Makes everything that happened before the call durable (`syncfs`), and [`Volume::durable_lsn`] reaches what barriers have answered
    /// before it. Blocks. (A volume that is open for reading only has
    /// nothing to sync: this and all other syncs succeed.)
    pub fn sync(&self) -> Result<()> {
        self.engine.sync()
    }

    /// Submits [`Volume::sync`] and answers at once with a ticket.
    ///
    /// # Errors
    /// [`Error::WouldBlock`] when 262,144 tickets of the volume have not ended.
    pub fn sync_async(&self) -> Result<SyncTicket> {
        self.engine.sync_async()
    }

    /// Submits a request to make everything up to operation `lsn` durable, and answers at once with a ticket.
    ///
    /// # Errors
    /// As [`Volume::sync_async`]; [`Error::Invalid`]: there is no such operation yet, and no barrier has answered this number.
    pub fn ticket_for(&self, lsn: u64) -> Result<SyncTicket> {
        if lsn > self.last_given_out() {
            return Err(Error::Invalid("there is no operation of this number yet"));
        }
        self.engine.ticket_for(lsn)
    }

    /// Everything up to this operation is durable. Does not block.
    pub fn durable_lsn(&self) -> u64 {
        self.engine.log.durable_lsn()
    }

    /// The last operation so far.
    pub fn last_lsn(&self) -> u64 {
        self.engine.log.last_lsn()
    }

    /// The largest number that can be waited for: that of the last operation, or one that a barrier has answered whose data is
    /// not home yet, and which the next operation will have.
    pub fn last_given_out(&self) -> u64 {
        self.engine.log.last_given_out()
    }

    /// Watches until operation `lsn` is durable, without asking for it: false if `timeout_us` microseconds were not enough. Where
    /// nobody syncs, that may take half a minute; [`Volume::ticket_for`] makes it durable now.
    ///
    /// # Errors
    /// [`Error::Shutdown`].
    pub fn wait_durable(&self, lsn: u64, timeout_us: Option<u64>) -> Result<bool> {
        self.engine.check_process()?;
        if !self.engine.background.has_threads() {
            while self.engine.log.in_open_chain(lsn) && self.engine.barrier_step() {}
        }
        self.engine.log.wait_durable(lsn, timeout_us)
    }

    /// Raises a barrier: after a crash, whatever happened after it is there only if everything that happened before it is:
    /// namespace operations, and data written to any file. Waits for neither: data that only memory has goes into the log at
    /// once if it is little, and is sent home in the background otherwise, and until then nothing that comes later becomes
    /// durable. (So a later sync waits for this data; reads, writes and operations do not.)
    ///
    /// Answers an LSN: when [`Volume::durable_lsn`] has reached it, all that came before the barrier is durable. It may be one more
    /// than [`Volume::last_lsn`]. [`Volume::ticket_for`] makes it durable.
    ///
    /// What other threads do while the call runs is on either side of the barrier. As every operation it may wait at the entry for
    /// log space; and for earlier barriers if 64 overlap, or if four or more have not yet sent home what they cover, 4 MiB in all.
    ///
    /// # Errors
    /// If data before the barrier cannot be written, or where it belongs cannot be read, after three attempts, the volume is shut down: nothing
    /// that came later has become durable then.
    pub fn barrier(&self) -> Result<u64> {
        self.engine.barrier(None)
    }

    /// An empty batch: changes of any files and names that happen together or not at all. See [`Batch`].
    pub fn batch(&self) -> Batch {
        Batch::new(self.engine.clone())
    }

    /// [`Volume::sync`], then a checkpoint: the log is empty afterwards, but for what other threads did meanwhile. Blocks.
    ///
    /// # Errors
    /// As [`Volume::sync`]; [`Error::ReadOnly`] on a volume that is open for reading only; or data could not be written in three attempts, the first where it lives, the others elsewhere. The log
    /// keeps it: nothing is lost, and a later call tries again.
    pub fn checkpoint(&self) -> Result<()> {
        self.engine.sync()?;
        let lsn = self.engine.log.last_lsn();
        let owed = &self.engine.store.obligations;
        self.engine.empty_log(|| owed.oldest().is_none_or(|oldest| oldest > lsn))
    }

    /// Does one small step of background work (manual mode). True if there is more of the kind to do.
    pub fn background_step(&self, work: BackgroundWork) -> Result<bool> {
        self.engine.background_step(work)
    }

    /// Space and inodes.
    pub fn statfs(&self) -> StatFs {
        self.engine.statfs()
    }

    /// The memory cap: [`VolumeOptions::memory_bytes`], or what stands for it.
    pub fn memory_bytes(&self) -> u64 {
        self.engine.memory_bytes
    }

    /// What this volume promises of single writes, and how much of everything it takes at a time.
    pub fn capabilities(&self) -> crate::types::Capabilities {
        self.engine.capabilities()
    }

    /// All counters and histograms.
    pub fn stats(&self) -> Stats {
        self.engine.stats()
    }

    /// The volume's id, label and the like, as last published.
    pub fn superblock(&self) -> crate::format::superblock::Superblock {
        self.engine.superblock.lock().clone()
    }
}

/// The namespace by inode number, as a mount uses it. Names are bytes.
impl Volume {
    fn attr(inode: &Arc<Inode>) -> Attr {
        inode.attr()
    }

    /// The inode that `name` in directory `dir` names.
    pub fn lookup(&self, dir: u64, name: &[u8]) -> Result<Attr> {
        if name.len() > MAX_NAME_BYTES {
            return Err(Error::NameTooLong);
        }
        let parent = self.engine.directory(dir)?;
        match name {
            b"." => self.getattr(dir),
            b".." => {
                // Not with this lock in hand: several are taken in the order of their numbers.
                let above = parent.meta.lock().item.parent;
                self.getattr(above)
            }
            _ => {
                let find = || Ok(self.engine.present(dir, name)?.inode);
                on_named(find, |number| self.getattr_of_named(*number))
            }
        }
    }

    /// Attributes of an inode that was found under a name: one that has lost its last name since is gone, whoever may hold it.
    fn getattr_of_named(&self, ino: u64) -> Result<Attr> {
        let attr = self.getattr(ino)?;
        if attr.links == 0 { Err(Error::NotFound) } else { Ok(attr) }
    }

    /// Attributes of an inode. One that a batch makes exists once that is committed.
    pub fn getattr(&self, ino: u64) -> Result<Attr> {
        self.engine.inode(ino)?.attr_unless_purged()
    }

    /// Changes attributes; a size change is an operation of its own before the rest.
    pub fn setattr(&self, ino: u64, change: &SetAttr) -> Result<Attr> {
        // Who cuts may wait for purges, with the lock in hand that the purge of this one would want.
        let _held = change.size_bytes.map(|_| self.hold(ino)).transpose()?;
        let is_old = mutation::active(Mutation::AnswerBefore);
        let before = is_old.then(|| self.getattr(ino)).transpose()?;
        let after = Self::attr(&self.engine.setattr(ino, change)?);
        Ok(before.unwrap_or(after))
    }

    /// Makes a regular file, directory, fifo, socket or device node.
    pub fn make(&self, dir: u64, name: &[u8], new: &NewInode) -> Result<Attr> {
        self.engine.make(dir, name, new, |made| Self::attr(&made))
    }

    /// As [`Volume::make`], held: it is there whoever takes its name away again. (Between [`Volume::make`] and
    /// [`Volume::hold`] it may go.)
    pub fn make_held(&self, dir: u64, name: &[u8], new: &NewInode) -> Result<(Attr, InodeHold)> {
        let keep =
            |made: Arc<Inode>| Ok((Self::attr(&made), InodeHold::new(self.engine.clone(), made)?));
        self.engine.make(dir, name, new, keep)?
    }

    /// Makes a symbolic link.
    pub fn symlink(
        &self,
        dir: u64,
        name: &[u8],
        target: &[u8],
        uid: u32,
        gid: u32,
    ) -> Result<Attr> {
        Ok(Self::attr(&self.engine.symlink(dir, name, target, (uid, gid))?))
    }

    /// Target of a symbolic link.
    pub fn readlink(&self, ino: u64) -> Result<Vec<u8>> {
        self.engine.readlink(ino)
    }

    /// A regular file without a name (`O_TMPFILE`), open for reading and writing; [`Volume::link`] can give it one.
    pub fn tmpfile(&self, dir: u64, new: &NewInode) -> Result<(Attr, File)> {
        let inode = self.engine.tmpfile(dir, new)?;
        let file = File::new(self.engine.clone(), inode.clone(), true, false)?;
        Ok((Self::attr(&inode), file))
    }

    /// One more name for an inode that is no directory.
    ///
    /// # Errors
    /// [`Error::NotFound`] for one that has lost its last name: only what [`Volume::tmpfile`] has made can get a first one.
    pub fn link(&self, ino: u64, dir: u64, name: &[u8]) -> Result<Attr> {
        Ok(Self::attr(&self.engine.link(ino, dir, name)?))
    }

    /// Removes a name of something that is no directory. An inode without a name lives on while it is open or held.
    pub fn unlink(&self, dir: u64, name: &[u8]) -> Result<()> {
        self.engine.unlink(dir, name)
    }

    /// Removes an empty directory.
    pub fn rmdir(&self, dir: u64, name: &[u8]) -> Result<()> {
        self.engine.rmdir(dir, name)
    }

    /// Renames: see [`RenameMode`]. Where a regular file takes another one's place, what was written to it and not synced yet comes before
    /// that, up to `Capabilities::max_log_payload_bytes`: after a crash there is the new file with its data, or the old one. Of a
    /// file with more to write, writing begins.
    pub fn rename(
        &self,
        dir: u64,
        name: &[u8],
        new_dir: u64,
        new_name: &[u8],
        mode: RenameMode,
    ) -> Result<()> {
        self.engine.rename(dir, name, new_dir, new_name, mode)
    }

    /// Shows the entries of `dir` behind `after_cookie` (0: from the start), without `.` and `..`, until `visit`
    /// answers false.
    pub fn readdir(
        &self,
        dir: u64,
        after_cookie: u64,
        visit: &mut dyn FnMut(DirEntry) -> bool,
    ) -> Result<()> {
        let parent = self.engine.directory(dir)?;
        self.engine.list(&parent, after_cookie, visit)
    }

    /// The directory that directory `dir` is in.
    pub fn parent(&self, dir: u64) -> Result<u64> {
        Ok(self.engine.directory(dir)?.meta.lock().item.parent)
    }

    /// Value of an extended attribute.
    pub fn getxattr(&self, ino: u64, name: &[u8]) -> Result<Vec<u8>> {
        self.engine.getxattr(ino, name)
    }

    /// Sets an extended attribute: at most 4096 bytes, in `user.`, `trusted.`, `security.` or `system.posix_acl_*`.
    pub fn setxattr(&self, ino: u64, name: &[u8], value: &[u8], mode: XattrMode) -> Result<()> {
        self.engine.setxattr(ino, name, value, mode)
    }

    /// Names of all extended attributes.
    pub fn listxattr(&self, ino: u64) -> Result<Vec<Vec<u8>>> {
        self.engine.listxattr(ino)
    }

    /// Removes an extended attribute.
    pub fn removexattr(&self, ino: u64, name: &[u8]) -> Result<()> {
        self.engine.removexattr(ino, name)
    }

    /// Opens a regular file by number.
    ///
    /// # Errors
    /// [`Error::ReadOnly`] for writing on a volume that is open for reading only, [`Error::IsDirectory`], [`Error::Invalid`] for
    /// what is no regular file either.
    pub fn open_inode(&self, ino: u64, write: bool) -> Result<File> {
        self.open_handle(self.engine.inode(ino)?, write, false)
    }

    fn open_handle(&self, inode: Arc<Inode>, write: bool, data_sync: bool) -> Result<File> {
        if write && self.engine.options.read_only {
            return Err(Error::ReadOnly);
        }
        File::new(self.engine.clone(), inode, write, data_sync)
    }

    /// Keeps an inode alive, even when it loses its last name.
    pub fn hold(&self, ino: u64) -> Result<InodeHold> {
        InodeHold::new(self.engine.clone(), self.engine.inode(ino)?)
    }

    /// Makes everything that happened to a directory (or any inode that is no regular file) durable, and all
    /// metadata operations before the last of that. Blocks: see [`File::fsync`].
    pub fn fsync_dir(&self, ino: u64) -> Result<()> {
        let inode = self.engine.inode(ino)?;
        let synced = if inode.file_type == FileType::Regular {
            self.engine.fsync(&inode, 0..u64::MAX, SyncKind::Full)
        } else {
            let prepared = self.prepare_dir(&inode, Room::Normal);
            prepared.and_then(|lsn| self.engine.commit_log(lsn))
        };
        self.engine.counters.count_failed(synced)
    }

    /// Submits [`Volume::fsync_dir`] of an inode that is no regular file, and answers at once with a ticket.
    ///
    /// # Errors
    /// As [`Volume::sync_async`]; [`Error::WouldBlock`] also when the log is too full to take the attributes at once.
    pub fn fsync_dir_async(&self, ino: u64) -> Result<SyncTicket> {
        let inode = self.engine.inode(ino)?;
        if inode.file_type == FileType::Regular {
            return self.engine.fsync_async(&inode, 0..u64::MAX, SyncKind::Full);
        }
        let lsn = self.prepare_dir(&inode, Room::NoWait)?;
        self.engine.ticket_for(lsn)
    }

    /// The operation that an fsync of `inode` has to wait for.
    fn prepare_dir(&self, inode: &Arc<Inode>, room: Room) -> Result<u64> {
        self.engine.check_shutdown()?;
        if self.engine.options.read_only {
            return Ok(0);
        }
        let clock = &self.engine.clock;
        let began_ns = clock.monotonic_ns();
        self.engine.commit_attributes(inode, room)?;
        self.engine.counters.count_sync(clock.since_ns(began_ns));
        Ok(inode.meta.lock().last_lsn)
    }
}

impl Engine {
    /// See [`Volume::sync`].
    pub fn sync(&self) -> Result<()> {
        self.counters.count_failed(self.sync_all())
    }

    fn sync_all(&self) -> Result<()> {
        if self.options.read_only {
            return self.check_shutdown();
        }
        let began_ns = self.clock.monotonic_ns();
        let lsn = self.prepare_all()?;
        self.counters.count_volume_sync(self.clock.since_ns(began_ns));
        self.commit_log(lsn)
    }

    /// The first half of a sync of everything: what was dirty is in the log's stream, or home. If part of that failed, the
    /// rest is made durable before the first error is answered.
    pub fn prepare_all(&self) -> Result<u64> {
        self.check_writable()?;
        // A barrier may have answered a number that nobody has yet, and what came before it may be home already.
        let given_out = self.log.last_given_out();
        let mut failed = None;
        let dirty = self.dirty.all();
        // What fails here strikes again below, file by file.
        let _ = self.send_home_together(&self.too_much_for_frames(&dirty));
        for inode in dirty {
            let prepared = if inode.file_type == FileType::Regular {
                self.prepare_sync(&inode, 0..u64::MAX, SyncKind::Full).map(|_| ())
            } else {
                self.commit_attributes(&inode, Room::Normal)
            };
            if let Err(error) = prepared {
                failed.get_or_insert(error.of_inode(inode.number));
            }
        }
        let lsn = self.log.last_lsn().max(given_out);
        match failed {
            None => Ok(lsn),
            Some(error) => {
                self.commit_log(lsn)?;
                Err(error)
            }
        }
    }

    fn close(self: &Arc<Self>) -> Result<()> {
        self.check_process()?;
        if is_own_thread() {
            let what = "a callback or a waker cannot close its volume: do it on another thread";
            return Err(Error::Invalid(what));
        }
        as_own_thread(|| self.close_alone())
    }

    /// The callbacks that this calls find `closed` locked by their own thread.
    fn close_alone(self: &Arc<Self>) -> Result<()> {
        // Whoever comes second finds it closed, or tries again.
        let mut is_closed = self.closed.lock();
        if *is_closed {
            return Ok(());
        }
        if let Err(error) = self.close_writing() {
            // Nothing more comes of one that was shut down; any other is open as before.
            if self.check_shutdown().is_err() {
                self.stop_threads();
            }
            return Err(error);
        }
        self.stop_threads();
        *is_closed = true;
        if !self.options.read_only {
            self.shut_down(CLOSED);
        }
        Ok(())
    }

    /// Ends all threads. Promises that wait for a barrier or for the log are kept; syncs that were deferred and that nobody does any more end
    /// with an error.
    pub fn stop_threads(self: &Arc<Self>) {
        self.stop_barriers();
        self.stop_background();
        for job in self.background.end_jobs() {
            self.refuse_job(job);
        }
        while self.barrier_step() | self.log.drive() {}
    }

    fn close_writing(self: &Arc<Self>) -> Result<()> {
        if self.options.read_only {
            return Ok(());
        }
        self.check_shutdown()?;
        // Where there are threads, they do that.
        while !self.background.has_threads() && self.sync_step(Jobs::All) {}
        self.end_owed_cuts();
        // A purge that went on beside the last checkpoint would leave something in a log that counts as empty.
        self.purge_all()?;
        self.sync()?;
        // The first checkpoint sends logged pages home, which is logged again; the second leaves an empty log.
        if self.checkpoint_wanted() {
            self.empty_log(|| !self.checkpoint_wanted())?;
        }
        self.stop_threads();
        // What the threads have done until their end.
        if self.checkpoint_wanted() {
            let emptied = self.empty_log(|| !self.checkpoint_wanted());
            emptied.inspect_err(|error| self.shut_down_after(error))?;
        }
        // Whoever goes on beside this hears from here on that it is closed: the superblock is to say that the log is empty.
        self.shut_down(CLOSED);
        self.alloc.end_quarantine();
        if self.log.fill().used_blocks > 0 || self.checkpoint_wanted() {
            // Somebody was faster. The next opening replays what was durable by then.
            return Ok(());
        }
        let superblock = self.superblock.lock().clone();
        let closed = crate::format::superblock::Superblock {
            generation: superblock.generation + 1,
            clean: true,
            errors_seen: self.has_met_damage(),
            ..superblock
        };
        self.write_last_superblock(&closed)
    }

    fn background_step(self: &Arc<Self>, work: BackgroundWork) -> Result<bool> {
        match work {
            BackgroundWork::Log => {
                Ok(self.barrier_step() | self.sync_step(Jobs::All) | self.log.drive())
            }
            BackgroundWork::Writeback => Ok(self.flush_batch()? > 0),
            BackgroundWork::Purge => {
                self.end_owed_cuts();
                self.purge_step()
            }
            BackgroundWork::Checkpoint => self.checkpoint_step(),
            BackgroundWork::PartialCheckpoint => {
                if self.checkpointer.phase() == Phase::Running {
                    self.background.request_room();
                }
                self.checkpoint_step()
            }
            BackgroundWork::EarlyHome => Ok(self.bring_early_home()? > 0),
            BackgroundWork::Frames => Ok(self.log.drive()),
        }
    }

    fn statfs(&self) -> StatFs {
        let totals = self.alloc.totals();
        let inodes = self.store.inode_count();
        let available_blocks = totals.available_blocks();
        StatFs {
            total_blocks: totals.total_blocks,
            free_blocks: (totals.free_blocks + totals.pending_free_blocks)
                .saturating_sub(totals.reserved_blocks),
            available_blocks,
            inodes,
            // An inode needs at least its item and an entry: about 16 fit into a block.
            free_inodes: available_blocks.saturating_mul(16),
            max_name_bytes: MAX_NAME_BYTES as u32,
        }
    }

    fn time_in_step_us(&self) -> u64 {
        let now_ns = self.clock.monotonic_ns();
        match self.checkpointer.phase() {
            Phase::Running => 0,
            _ => now_ns.saturating_sub(self.checkpointer.step_began_ns()) / 1000,
        }
    }

    fn stats(&self) -> Stats {
        let counters = &self.counters;
        let delta = self.store.delta_size();
        let read = Histogram::snapshot;
        Stats {
            cache_hits: counters.cache_hits.get(),
            cache_misses: counters.cache_misses.get(),
            evicted_pages: counters.evicted_pages.get(),
            fsyncs: counters.fsyncs.get(),
            volume_syncs: counters.volume_syncs.get(),
            failed_syncs: counters.failed_syncs.get(),
            checksum_errors: counters.checksum_errors.get(),
            writeback_errors: counters.writeback_errors.get(),
            purge_errors: counters.purge_errors.get(),
            checkpoints: counters.checkpoints.get(),
            checkpoint_phase: self.checkpointer.phase(),
            checkpoint_refused: self.checkpointer.refused(),
            throttled: counters.throttled.get(),
            log_stalls: counters.log_stalls.get(),
            space_stalls: counters.space_stalls.get(),
            in_place_writes: counters.in_place_writes.get(),
            memory_stalls: counters.memory_stalls.get(),
            handed_over_pages: counters.handed_over_pages.get(),
            taken_along: counters.taken_along.get(),
            handover_pages: self.background.handover.pages(),
            sync_home_pages: counters.sync_home_pages.get(),
            sync_moved_pages: counters.sync_moved_pages.get(),
            sync_logged_pages: counters.sync_logged_pages.get(),
            early_home_pages: counters.early_home_pages.get(),
            writeback_rests: counters.writeback_rests.get(),
            pacing: self.background.pacing.stats(),
            read_us: read(&counters.read_us),
            pacing_wait_us: read(&counters.pacing_wait_us),
            let_pass_us: read(&counters.let_pass_us),
            log_delay_us: read(&counters.log_delay_us),
            throttle_us: read(&counters.throttle_us),
            stall_us: read(&counters.stall_us),
            freeze_ns: read(&counters.freeze_ns),
            checkpoint_us: read(&counters.checkpoint_us),
            checkpoint_step_us: std::array::from_fn(|step| {
                read(&counters.checkpoint_step_us[step])
            }),
            checkpoint_in_step_us: self.time_in_step_us(),
            data_phase_ns: read(&counters.data_phase_ns),
            batch_phase_ns: read(&counters.batch_phase_ns),
            barrier_call_ns: read(&counters.barrier_call_ns),
            barrier_data_ns: read(&counters.barrier_data_ns),
            tickets: self.tickets.load(Ordering::Relaxed),
            shutdown_reason: self.shutdown.lock().clone(),
            log: self.log.stats().snapshot(),
            log_fill: self.log.fill(),
            durable_lsn: self.log.durable_lsn(),
            last_lsn: self.log.last_lsn(),
            logged_pages: self.store.obligations.pages(),
            nodes: self.store.nodes.stats(),
            space: self.alloc.totals(),
            pages_in_use: self.pool.in_use_pages() as u64,
            pages_capacity: self.pool.capacity_pages() as u64,
            dirty_pages: self.dirty_pages.load(Ordering::Relaxed),
            inodes_in_memory: self.inodes.count() as u64,
            dirty_inodes: self.dirty.count() as u64,
            delta_bytes: delta.bytes(),
        }
    }
}
