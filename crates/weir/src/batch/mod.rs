//! [`Batch`]: changes of any files and names that happen together or not at all.
//!
//! A batch is recorded in memory, and looked at by nobody, until it is committed. Then:
//!
//! 1. *Plan* (`plan`): with the directories locked, every step is looked up and tried on copies of the attributes.
//! 2. *Data* (`data`): the new content of each page is put together. Little data travels in the log. If it is more,
//!    whole pages have been written to new blocks before any lock was taken, and only their mapping is logged.
//! 3. *Commit* (`commit`): with all page maps and attributes locked, the steps are applied, the log gets one chain of frames, and the
//!    pages enter the cache.
//!
//! A failure anywhere before the chain is in the log leaves nothing behind, in memory or on the disk.
//!
//! Lock order: as everywhere (`docs/ARCHITECTURE.md`); of several inodes of one kind, directories first, under the tree lock,
//! then by number.

pub(crate) mod commit;
mod data;
mod patch;
mod plan;
mod step;

use crate::error::{Error, Result};
use crate::file::handle::File;
use crate::namespace::attr::check_times;
use crate::namespace::check_name;
use crate::namespace::create::check_target;
use crate::running::Running;
use crate::sync::Arc;
use crate::ticket::SyncTicket;
use crate::types::{FileType, NewInode, RenameMode, SetAttr};
use patch::Patch;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
pub use step::{BatchError, FailedStep};
use step::{Recorded, Step};

/// Changes that happen together or not at all, in memory and across a crash: writes at any offsets of any files, cuts, new
/// inodes, links, removals, renames, attributes. Recorded by its methods, which check arguments only; made by one of the three commits, in
/// the order in which they were recorded. Dropping a batch forgets it.
///
/// **Atomic.** An error of a commit means that nothing of the batch happened: a name that exists, a directory that is not
/// empty, no space, an I/O error; [`BatchError`] says which step it was. (Only [`Error::Shutdown`] from [`Batch::commit`] leaves
/// open what the next opening finds: all of it, or nothing.) After a crash all of the batch is there, or nothing.
///
/// **Isolated.** While a batch is being committed, other writers of its files and other changes of names in its directories wait.
/// Readers do not, but for the moment in which it is applied in memory: that happens with the content and the attributes of
/// all its files and directories locked, so whoever has read a piece of the batch, by content or attributes, will not
/// read anything older of it afterwards. A single read of more than is cached may see the file before and after. The steps are checked
/// against the volume as it is at the commit, not as it was when they were recorded: to decide on what was
/// read before, keep other writers out yourself.
///
/// **Ordered.** A batch takes its place among the operations of the volume: after a crash it is there only if every metadata operation
/// before it is. Data that was written to its files before, by other means, and not synced, is not part of it.
///
/// **Limits.** Data up to 2 MiB, an eighth of the log, or an eighth of the page cache, whichever is least, travels in the log: one write and one
/// flush. More is written to new blocks first, and only the mapping is logged. What is logged of one batch must fit a quarter of the
/// log, otherwise [`Error::Invalid`]: with a log of 64 MiB that is about 4 GiB of data, or 20,000 new files. All data is in
/// memory until the commit.
pub struct Batch {
    engine: Arc<Running>,
    /// How many calls have recorded something.
    calls: usize,
    steps: Vec<Recorded>,
    patches: BTreeMap<u64, Patch>,
    /// Keeps the files alive until the commit.
    files: BTreeMap<u64, File>,
}

impl std::fmt::Debug for Batch {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Batch").field("steps", &self.steps.len()).finish_non_exhaustive()
    }
}

/// Content.
impl Batch {
    pub(crate) fn new(engine: Arc<Running>) -> Self {
        Self {
            engine,
            calls: 0,
            steps: Vec::new(),
            patches: BTreeMap::new(),
            files: BTreeMap::new(),
        }
    }

    /// Writes `data` at `offset`; the file grows if need be.
    ///
    /// # Errors
    /// [`Error::FileTooLarge`]; [`Error::NotWritable`] if the file was opened for reading; [`Error::Invalid`] if it is of another volume.
    pub fn write_at(&mut self, file: &File, offset: u64, data: &[u8]) -> Result<()> {
        self.keep(file)?;
        self.write_inode(file.ino(), offset, data)
    }

    /// As [`Batch::write_at`], by number: for files that this batch makes.
    pub fn write_inode(&mut self, ino: u64, offset: u64, data: &[u8]) -> Result<()> {
        if data.is_empty() {
            // As a write of nothing: it finds the file, and changes nothing of it.
            Patch::default().write(offset, data)?;
            self.record_content(ino, false);
        } else {
            self.patch(ino, |patch| patch.write(offset, data))?;
            self.record_content(ino, true);
        }
        self.calls += 1;
        Ok(())
    }

    /// Sets the size. Bytes that are gained read as zeros.
    ///
    /// # Errors
    /// As [`Batch::write_at`].
    pub fn truncate(&mut self, file: &File, size_bytes: u64) -> Result<()> {
        self.keep(file)?;
        self.truncate_inode(file.ino(), size_bytes)
    }

    /// As [`Batch::truncate`], by number.
    pub fn truncate_inode(&mut self, ino: u64, size_bytes: u64) -> Result<()> {
        self.cut(ino, size_bytes)?;
        self.calls += 1;
        Ok(())
    }

    fn cut(&mut self, ino: u64, size_bytes: u64) -> Result<()> {
        self.patch(ino, |patch| patch.truncate(size_bytes))?;
        self.record_content(ino, true);
        Ok(())
    }

    /// A change that is refused leaves no patch behind: each belongs to a step.
    fn patch(&mut self, ino: u64, change: impl FnOnce(&mut Patch) -> Result<()>) -> Result<()> {
        match self.patches.entry(ino) {
            Entry::Occupied(mut known) => change(known.get_mut()),
            Entry::Vacant(place) => {
                let mut patch = Patch::default();
                change(&mut patch)?;
                place.insert(patch);
                Ok(())
            }
        }
    }

    fn keep(&mut self, file: &File) -> Result<()> {
        file.check_writable()?;
        if !Arc::ptr_eq(&**self.engine, file.engine()) {
            return Err(Error::Invalid("the file is of another volume than the batch"));
        }
        self.files.entry(file.ino()).or_insert_with(|| file.clone());
        Ok(())
    }

    fn record_content(&mut self, ino: u64, changes: bool) {
        match self.steps.last_mut().map(|recorded| &mut recorded.step) {
            Some(Step::Content { ino: last, changes: has_changed }) if *last == ino => {
                *has_changed |= changes;
            }
            _ => {
                let step = Step::Content { ino, changes };
                self.steps.push(Recorded { call: self.calls, step });
            }
        }
    }
}

/// Names, by inode number. Directories and files that the batch itself makes may be used like others.
impl Batch {
    /// Makes a regular file and answers its inode number, which exists once the batch is committed.
    ///
    /// # Errors
    /// A name that cannot be; [`Error::Invalid`] if `new` is something else.
    pub fn create_file(&mut self, dir: u64, name: &[u8], new: &NewInode) -> Result<u64> {
        if new.file_type != FileType::Regular {
            return Err(Error::Invalid("create_file makes regular files"));
        }
        self.make(dir, name, new)
    }

    /// Makes a directory and answers its inode number.
    ///
    /// # Errors
    /// A name that cannot be.
    pub fn make_dir(&mut self, dir: u64, name: &[u8], permissions: u32) -> Result<u64> {
        self.make(dir, name, &NewInode::new(FileType::Directory, permissions))
    }

    /// Makes a regular file, directory, fifo, socket or device node.
    ///
    /// # Errors
    /// A name that cannot be.
    pub fn make(&mut self, dir: u64, name: &[u8], new: &NewInode) -> Result<u64> {
        if new.file_type == FileType::Symlink {
            return Err(Error::Invalid("a symbolic link is made with symlink"));
        }
        self.make_any(dir, name, new.clone(), None)
    }

    /// Makes a symbolic link.
    ///
    /// # Errors
    /// A name or target that cannot be.
    pub fn symlink(
        &mut self,
        dir: u64,
        name: &[u8],
        target: &[u8],
        uid: u32,
        gid: u32,
    ) -> Result<u64> {
        check_target(target)?;
        let new = NewInode { uid, gid, ..NewInode::new(FileType::Symlink, 0o777) };
        self.make_any(dir, name, new, Some(target.to_vec()))
    }

    /// One call, one step.
    fn record(&mut self, step: Step) {
        self.steps.push(Recorded { call: self.calls, step });
        self.calls += 1;
    }

    fn make_any(
        &mut self,
        dir: u64,
        name: &[u8],
        new: NewInode,
        target: Option<Vec<u8>>,
    ) -> Result<u64> {
        check_name(name)?;
        let ino = self.engine.store.allocate_inode();
        self.record(Step::Make { dir, name: name.to_vec(), ino, new, target });
        Ok(ino)
    }

    /// One more name for an inode that is no directory.
    ///
    /// # Errors
    /// A name that cannot be.
    pub fn link(&mut self, ino: u64, dir: u64, name: &[u8]) -> Result<()> {
        check_name(name)?;
        self.record(Step::Link { ino, dir, name: name.to_vec() });
        Ok(())
    }

    /// Removes a name of something that is no directory.
    ///
    /// # Errors
    /// A name that cannot be.
    pub fn unlink(&mut self, dir: u64, name: &[u8]) -> Result<()> {
        check_name(name)?;
        self.record(Step::Unlink { dir, name: name.to_vec() });
        Ok(())
    }

    /// Removes a directory that is empty at this point of the batch.
    ///
    /// # Errors
    /// A name that cannot be.
    pub fn rmdir(&mut self, dir: u64, name: &[u8]) -> Result<()> {
        check_name(name)?;
        self.record(Step::Rmdir { dir, name: name.to_vec() });
        Ok(())
    }

    /// Renames: see [`RenameMode`].
    ///
    /// # Errors
    /// A name that cannot be; [`Error::Invalid`]: a batch leaves no whiteouts.
    pub fn rename(
        &mut self,
        dir: u64,
        name: &[u8],
        new_dir: u64,
        new_name: &[u8],
        mode: RenameMode,
    ) -> Result<()> {
        check_name(name)?;
        check_name(new_name)?;
        if matches!(mode, RenameMode::Whiteout { .. }) {
            return Err(Error::Invalid("a batch leaves no whiteouts: rename and make one in it"));
        }
        let (name, new_name) = (name.to_vec(), new_name.to_vec());
        self.record(Step::Rename { dir, name, new_dir, new_name, mode });
        Ok(())
    }

    /// Changes attributes, and the size.
    ///
    /// # Errors
    /// As [`Batch::truncate`]; [`Error::Invalid`] for a time that cannot be.
    pub fn setattr(&mut self, ino: u64, change: &SetAttr) -> Result<()> {
        check_times(change)?;
        if let Some(size_bytes) = change.size_bytes {
            self.cut(ino, size_bytes)?;
        }
        let is_cut = change.size_bytes.is_some();
        let change = SetAttr { size_bytes: None, ..change.clone() };
        // One that changes nothing finds the inode all the same.
        if !is_cut || change != SetAttr::default() {
            self.steps.push(Recorded { call: self.calls, step: Step::Attributes { ino, change } });
        }
        self.calls += 1;
        Ok(())
    }
}

/// The end.
impl Batch {
    /// Nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Makes the changes, and waits until they are durable. Answers the LSN of the batch.
    ///
    /// # Errors
    /// See [`Batch`].
    pub fn commit(self) -> Result<u64, BatchError> {
        let lsn = self.put_into_log()?;
        self.engine.counters.count_failed(self.engine.commit_log(lsn))?;
        Ok(lsn)
    }

    /// Makes the changes, and answers with a ticket for their durability. May wait for what any operation waits for, and for data too
    /// large for the log to be written, but not for durability.
    ///
    /// # Errors
    /// See [`Batch`]; [`Error::WouldBlock`] when too many tickets of the volume have not ended.
    pub fn commit_async(self) -> Result<SyncTicket, BatchError> {
        let engine = self.engine.clone();
        engine.ticket_after(|| self.put_into_log())
    }

    /// Makes the changes. They are durable with a later sync, all together. Answers the LSN of the batch.
    ///
    /// # Errors
    /// See [`Batch`].
    pub fn commit_relaxed(self) -> Result<u64, BatchError> {
        self.put_into_log()
    }

    fn put_into_log(&self) -> Result<u64, BatchError> {
        let engine = &self.engine;
        let began_ns = engine.clock.monotonic_ns();
        let lsn = engine.commit_batch(self)?;
        engine.counters.batch_phase_ns.record(engine.clock.since_ns(began_ns));
        Ok(lsn)
    }
}
