//! [`File`]: an open regular file. [`InodeHold`]: an inode that is kept alive without being open.

use super::fsync::SyncKind;
use super::handover::SyncRangeFlags;
use super::submit::WhenFull;
use crate::cache::readahead::{DEFAULT_MAX_WINDOW_BYTES, ReadAhead};
use crate::cache::write_behind::WriteBehind;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::inode::Inode;
use crate::mutation::{self, Mutation};
use crate::running::Running;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Arc, Mutex};
use crate::ticket::SyncTicket;
use crate::types::{AllocateMode, Attr, FileType};

/// Keeps an inode alive: an unlinked one is purged when its last hold (or file) is dropped.
pub struct InodeHold {
    engine: Arc<Running>,
    inode: Arc<Inode>,
}

impl InodeHold {
    pub(crate) fn new(engine: Arc<Running>, inode: Arc<Inode>) -> Result<Self> {
        {
            let meta = inode.meta.lock();
            if meta.purged {
                return Err(Error::NotFound);
            }
            inode.users.fetch_add(1, Ordering::AcqRel);
        }
        Ok(Self { engine, inode })
    }

    /// The inode's number.
    pub fn ino(&self) -> u64 {
        self.inode.number
    }
}

impl Drop for InodeHold {
    fn drop(&mut self) {
        if self.inode.users.fetch_sub(1, Ordering::AcqRel) == 1
            && self.engine.check_process().is_ok()
        {
            // A failure leaves the orphan item, and the next recovery purges the inode.
            if self.engine.purge_if_unused(&self.inode).is_err() {
                self.engine.counters.purge_errors.add(1);
            }
        }
    }
}

impl std::fmt::Debug for InodeHold {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("InodeHold").field("ino", &self.ino()).finish_non_exhaustive()
    }
}

struct Handle {
    hold: InodeHold,
    writable: bool,
    data_sync: bool,
    read_ahead: Mutex<ReadAhead>,
    write_behind: Mutex<WriteBehind>,
    /// Write errors up to this one were reported through this handle.
    errors_seen: AtomicU64,
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.writable && self.hold.engine.check_process().is_ok() {
            self.hold.engine.note_closed(&self.hold.inode);
        }
    }
}

/// An open regular file. Cheap to clone; clones share the state of read-ahead and write-behind and are one handle. `Send` and
/// `Sync`: all calls may be made from any thread at any time.
///
/// Reads and writes go through the cache. Nothing is durable before [`File::fsync`], [`File::fdatasync`] or a sync of the
/// volume, unless the file was opened with `data_sync`.
#[derive(Clone)]
pub struct File {
    handle: Arc<Handle>,
}

impl std::fmt::Debug for File {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("File").field("ino", &self.ino()).finish_non_exhaustive()
    }
}

impl File {
    pub(crate) fn new(
        engine: Arc<Running>,
        inode: Arc<Inode>,
        writable: bool,
        data_sync: bool,
    ) -> Result<Self> {
        match inode.file_type {
            FileType::Regular => {}
            FileType::Directory => return Err(Error::IsDirectory),
            _ => return Err(Error::Invalid("only regular files can be opened")),
        }
        let errors_seen = AtomicU64::new(inode.write_error.lock().0);
        let hold = InodeHold::new(engine, inode)?;
        let read_ahead = Mutex::new(ReadAhead::new(DEFAULT_MAX_WINDOW_BYTES));
        let write_behind = Mutex::default();
        let handle = Handle { hold, writable, data_sync, read_ahead, write_behind, errors_seen };
        Ok(Self { handle: Arc::new(handle) })
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.handle.hold.engine
    }

    pub(super) fn inode(&self) -> &Arc<Inode> {
        &self.handle.hold.inode
    }

    /// The inode's number.
    pub fn ino(&self) -> u64 {
        self.inode().number
    }

    /// It was opened for writing.
    pub fn is_writable(&self) -> bool {
        self.handle.writable
    }

    /// Attributes as they are now, including writes that are not durable. Does not block on I/O.
    pub fn attr(&self) -> Result<Attr> {
        Ok(self.inode().attr())
    }

    /// Current size in bytes. Does not block on I/O. Of a batch, the sizes of all files change at once.
    pub fn size(&self) -> u64 {
        self.inode().settled_size()
    }

    /// Reads up to `buffer.len()` bytes at `offset`; fewer only at the end of the file. Cached data is copied under
    /// one shared lock; missing data is read from the device first, and a sequential reader gets
    /// read-ahead.
    ///
    /// # Errors
    /// [`Error::Io`] from the device, [`Error::Corrupt`] if a checksum does not match.
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        let (engine, inode) = (self.engine(), self.inode());
        engine.check_process()?;
        if let Some(mut state) = self.handle.read_ahead.try_lock() {
            let advice = state.on_read(offset, buffer.len() as u64, inode.size());
            drop(state);
            if let Some(ahead) = advice.ahead {
                engine.read_ahead(inode, ahead);
            }
        }
        let count = engine.read(inode, offset, buffer)?;
        if count > 0 && engine.wants_atime(inode) {
            engine.touch_atime(inode);
        }
        Ok(count)
    }

    /// As [`File::read_at`], but never waits: [`Error::WouldBlock`] unless all of the range is cached. The same where the access time
    /// may have to be logged first, since memory holds too many inodes: then [`File::read_at`] does that.
    pub fn read_at_nowait(&self, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        let (engine, inode) = (self.engine(), self.inode());
        engine.check_process()?;
        let count = engine.read_nowait(inode, offset, buffer)?;
        if count > 0 && engine.wants_atime(inode) {
            if engine.inodes.is_over_limit(inode.number) {
                return Err(Error::WouldBlock);
            }
            let _ = engine.touch_atime_in_memory(inode);
        }
        Ok(count)
    }

    pub(crate) fn check_writable(&self) -> Result<()> {
        if self.handle.writable { Ok(()) } else { Err(Error::NotWritable) }
    }

    /// Writes `data` at `offset`; the file grows if need be. Blocks only for the throttle, for space, and for
    /// the old content of a page that is overwritten in part. Not durable, unless the file was opened with `data_sync`.
    ///
    /// On a full volume what has blocks, written before or [allocated](File::allocate), can be written still: such a write goes in place and
    /// is durable when this returns, a flush for each 128 KiB or less. (Where that could not be written, which shuts the volume down, nobody sees the
    /// write, and after a crash it is there or not: as with a batch.)
    ///
    /// # Errors
    /// [`Error::NotWritable`], [`Error::NoSpace`], [`Error::FileTooLarge`]. If an error strikes after a part was written,
    /// the length of that part is answered.
    pub fn write_at(&self, offset: u64, data: &[u8]) -> Result<usize> {
        self.check_writable()?;
        let count = self.engine().write(self.inode(), offset, data)?;
        self.written(offset, count as u64)?;
        Ok(count)
    }

    /// As [`File::write_at`], all of `data`: where a part was written, what is left is written as well.
    ///
    /// # Errors
    /// As [`File::write_at`]: the one that has struck, and then a part may have been written.
    pub fn write_all_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        let mut done = 0;
        while done < data.len() {
            done += self.write_at(offset.saturating_add(done as u64), &data[done..])?;
        }
        Ok(())
    }

    /// Writes `data` at the end of the file, atomically with respect to other appends; answers
    /// the offset. All of it or nothing: where the volume has no space for all of it, or an error strikes amid it, the file stays as long as it
    /// was. (Not where it was opened with `data_sync` and only the sync fails: then all of it is there, and not durable. Nor where the log has
    /// a part of it already, and the volume is shut down, or what says where that lies cannot be read: the part stays.) Otherwise as
    /// [`File::write_at`].
    pub fn append(&self, data: &[u8]) -> Result<u64> {
        self.check_writable()?;
        let offset = self.engine().append(self.inode(), data)?;
        self.written(offset, data.len() as u64)?;
        Ok(offset)
    }

    /// What a write leads to.
    fn written(&self, offset: u64, length: u64) -> Result<()> {
        if length == 0 {
            return Ok(());
        }
        if self.handle.data_sync && !mutation::active(Mutation::SkipWriteSync) {
            let range = offset..offset.saturating_add(length);
            return self.tell(self.engine().fsync(self.inode(), range, SyncKind::Data));
        }
        let behind = self.handle.write_behind.lock().on_write(offset, length);
        if let Some(pages) = behind {
            self.engine().hand_over(self.inode(), &pages);
        }
        Ok(())
    }

    /// Sets the size. Bytes that are gained read as zeros. One operation in the log, not durable by itself.
    pub fn truncate(&self, size_bytes: u64) -> Result<()> {
        self.check_writable()?;
        self.engine().truncate(self.inode(), size_bytes)
    }

    /// Makes data and attributes durable, and every metadata operation of the volume that came before the last one of this file: what came
    /// later, to others, may become so or not ([`crate::Volume::sync`] takes all). Blocks: one device write and one flush, shared with all
    /// concurrent callers, and before that the writing of large amounts of dirty data. Of a new file that was closed unsynced and opened
    /// again, the sync takes along some of the others that were closed like it: whoever syncs them one by one finds most of them durable.
    ///
    /// # Errors
    /// An error of background writeback is reported once to every handle; the data stays dirty and readable, and a
    /// later success is true. [`Error::Shutdown`] when the log could not be made durable.
    pub fn fsync(&self) -> Result<()> {
        self.sync(SyncKind::Full)
    }

    /// As [`File::fsync`], without attributes that are not needed to read the data back (times).
    pub fn fdatasync(&self) -> Result<()> {
        self.sync(SyncKind::Data)
    }

    /// Submits a sync of bytes `range` and answers at once with a ticket: nothing is waited for, and nothing read. Ranged: pages outside
    /// are neither written nor waited for; the size that becomes durable reaches to the end of the range, and what lies before the range
    /// and is not durable reads as before, or as zeros, after a crash. Write errors are reported by [`File::fsync`] as well, once per handle.
    ///
    /// # Errors
    /// [`Error::WouldBlock`] when 262,144 tickets of the volume have not ended.
    pub fn fsync_async(&self, range: std::ops::Range<u64>, kind: SyncKind) -> Result<SyncTicket> {
        self.fsync_async_with(range, kind, WhenFull::WouldBlock)
    }

    /// As [`File::fsync_async`]; `when_full` says what happens when too many tickets have not ended.
    pub fn fsync_async_with(
        &self,
        range: std::ops::Range<u64>,
        kind: SyncKind,
        when_full: WhenFull,
    ) -> Result<SyncTicket> {
        self.engine().fsync_async_with(self.inode(), range, kind, when_full)
    }

    /// Writeback on request, as `sync_file_range(2)`: see [`SyncRangeFlags`]. Starts writing the dirty pages that cover bytes
    /// `range`, leaves out those on their way already, and waits for none of it unless asked to. What is handed over is gathered,
    /// sorted and merged with what others hand over before it goes to the device, so small random ranges cost nothing extra.
    ///
    /// Makes nothing durable: no size is logged for it, nothing is flushed. An [`File::fsync`] afterwards has only the log frame
    /// left to do. `write` waits while too much is handed over already ([`crate::Capabilities::handover_bytes`]), unless
    /// `nowait` is set.
    ///
    /// # Errors
    /// [`Error::WouldBlock`] with `nowait`. With a wait: an error of background writeback, once per handle.
    pub fn sync_range(&self, range: std::ops::Range<u64>, flags: SyncRangeFlags) -> Result<()> {
        self.engine().sync_range(self.inode(), range, flags)?;
        if flags.wait_before || flags.wait_after { self.report_errors() } else { Ok(()) }
    }

    /// Hands the dirty pages that cover bytes `range` to background writeback and answers at once, whatever is handed over
    /// already: the caller does not need them in memory dirty any longer. Makes nothing durable. On a volume that is open for reading
    /// only there are none.
    pub fn expire(&self, range: std::ops::Range<u64>) -> Result<()> {
        let pages =
            super::writeback::page_range(range.start, range.end.saturating_sub(range.start));
        if self.engine().options.read_only {
            return self.engine().check_shutdown();
        }
        self.engine().check_writable()?;
        self.engine().hand_over(self.inode(), &pages);
        Ok(())
    }

    /// [`File::fsync`] of bytes `range` if there is nothing to wait for, because all that it covers is durable already. `None`: something is not, and
    /// nothing was done. Does not block. For whoever must not wait, and would pay for handing the sync over to somebody who may.
    pub fn fsync_if_durable(
        &self,
        range: std::ops::Range<u64>,
        kind: SyncKind,
    ) -> Option<Result<()>> {
        let is_durable = self.engine().fsync_if_durable(self.inode(), range, kind);
        is_durable.then(|| self.tell(Ok(())))
    }

    fn sync(&self, kind: SyncKind) -> Result<()> {
        self.tell(self.engine().fsync(self.inode(), 0..u64::MAX, kind))
    }

    /// What the caller of a sync is told that came to `result`: an error that it has met is this handle's, too, and told once.
    fn tell(&self, result: Result<()>) -> Result<()> {
        self.engine().counters.count_failed(self.report_errors().and(result))
    }

    /// LSN of the last operation of this file that the log has: when [`crate::Volume::durable_lsn`] has reached it, that
    /// operation is durable. Written data that no sync and no writeback has taken yet is not part of one.
    pub fn last_lsn(&self) -> u64 {
        self.inode().meta.lock().last_lsn
    }

    /// As [`crate::Volume::barrier`], for namespace operations and the data of this file: what was written to other files may
    /// become durable later. What comes after the barrier is everything, in any file.
    ///
    /// # Errors
    /// [`Error::NotWritable`]: the file was opened for reading; [`crate::Volume::barrier`] needs no file.
    pub fn barrier(&self) -> Result<u64> {
        self.check_writable()?;
        self.engine().barrier(Some(self.inode()))
    }

    /// The error of a writeback that failed since this handle last asked, if one did. [`File::fsync`] asks by itself; whoever
    /// holds a ticket asks when it has ended ([`File::report_after`]).
    pub fn report_errors(&self) -> Result<()> {
        let held = self.inode().write_error.lock();
        let seen = self.handle.errors_seen.swap(held.0, Ordering::AcqRel);
        match &held.1 {
            Some(error) if seen != held.0 => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// What whoever asked for a sync is told whose ticket has `ended` so: that error, or one of [`File::report_errors`], which is counted
    /// among failed syncs then, as the ticket's was.
    pub fn report_after(&self, ended: Result<()>) -> Result<()> {
        let reported = self.report_errors();
        ended.and_then(|()| self.engine().counters.count_failed(reported))
    }

    /// The modes of `fallocate(2)`: see [`AllocateMode`]. Not durable by itself. What was allocated can be written on a full volume,
    /// but for what the tree has to grow if that happens here and there.
    ///
    /// # Errors
    /// [`Error::NotWritable`]; [`Error::NoSpace`], also for a hole, where the free space is so scattered that the tree cannot grow by a node;
    /// [`Error::Invalid`] and [`Error::FileTooLarge`] for ranges that cannot be.
    pub fn allocate(&self, mode: AllocateMode, offset: u64, length: u64) -> Result<()> {
        self.check_writable()?;
        self.engine().allocate(self.inode(), mode, offset, length)
    }

    /// First offset at or after `offset` with data.
    pub fn seek_data(&self, offset: u64) -> Result<u64> {
        self.engine().seek_data(self.inode(), offset)
    }

    /// First offset at or after `offset` in a hole; the end of the file is one.
    pub fn seek_hole(&self, offset: u64) -> Result<u64> {
        self.engine().seek_hole(self.inode(), offset)
    }

    /// Copies up to `length` bytes to `target`; answers how many. Not durable by itself, unless `target` was opened
    /// with `data_sync`. Atomic neither towards who writes to the source nor towards who reads the target meanwhile.
    ///
    /// # Errors
    /// [`Error::NotWritable`]; [`Error::Invalid`] if the ranges overlap, or `target` is of another volume.
    pub fn copy_range(
        &self,
        offset: u64,
        target: &Self,
        target_offset: u64,
        length: u64,
    ) -> Result<u64> {
        target.check_writable()?;
        if !Arc::ptr_eq(self.engine(), target.engine()) {
            return Err(Error::Invalid("source and target of a copy are of different volumes"));
        }
        let from = (self.inode(), offset);
        let count = self.engine().copy_range(from, (target.inode(), target_offset), length)?;
        target.written(target_offset, count)?;
        Ok(count)
    }
}
