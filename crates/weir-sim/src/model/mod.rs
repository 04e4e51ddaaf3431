//! The oracle's file system: POSIX semantics in memory, with nothing but ordered maps.
//!
//! A [`Model`] is a value: cloning one costs one reference per inode, so the history keeps the
//! model after every operation. Beside what a user sees now, file contents and sizes carry
//! what a crash may leave of them ([`data`]). `docs/TESTING.md` states the rules.

mod apply;
pub mod compare;
pub mod data;
pub mod found;
pub mod history;
mod slots;
pub mod space;
pub mod times;

use std::collections::BTreeMap;
use std::sync::Arc;

use weir::{AtimePolicy, FileType};

use crate::op::{Target, parent};
use data::FileData;
use times::{Span, Times};

pub use apply::Outcome;
pub use slots::Slot;

/// A POSIX error number.
pub type Errno = i32;

/// Error numbers the model answers with (Linux values).
#[allow(missing_docs)]
pub mod errno {
    use super::Errno;
    pub const EPERM: Errno = 1;
    pub const ENOENT: Errno = 2;
    pub const EIO: Errno = 5;
    pub const EBADF: Errno = 9;
    pub const EEXIST: Errno = 17;
    pub const ENOTDIR: Errno = 20;
    pub const EISDIR: Errno = 21;
    pub const EINVAL: Errno = 22;
    pub const EFBIG: Errno = 27;
    pub const ENOSPC: Errno = 28;
    pub const EROFS: Errno = 30;
    pub const ENAMETOOLONG: Errno = 36;
    pub const ENOTEMPTY: Errno = 39;
    pub const ELOOP: Errno = 40;
    pub const ENODATA: Errno = 61;
    pub const EOPNOTSUPP: Errno = 95;
}

/// Number of an inode in the model; unrelated to the engine's numbers.
pub type Ino = u32;

/// The root directory.
pub const ROOT: Ino = 1;

/// Longest name of a directory entry.
const MAX_NAME_BYTES: usize = 255;
/// Symbolic links followed before a path is given up on.
const MAX_SYMLINKS: u32 = 40;

/// What an inode holds.
#[derive(Debug, Clone)]
pub enum Body {
    /// Contents of a regular file.
    File(Arc<FileData>),
    /// Entries of a directory, and the directory it is in.
    Directory {
        /// By name.
        entries: BTreeMap<String, Ino>,
        /// Where `..` leads.
        parent: Ino,
    },
    /// Target of a symbolic link.
    Symlink(String),
    /// Pipe, socket or device node.
    Special,
}

/// A model inode.
#[derive(Debug, Clone)]
pub struct Inode {
    /// What it is.
    pub file_type: FileType,
    /// Permission bits (07777).
    pub permissions: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Names of a file; for directories see [`Model::links`].
    pub names: u32,
    /// Made without a name, and may get one.
    pub linkable: bool,
    /// Device number.
    pub rdev: u32,
    /// Last access.
    pub atime: Times,
    /// Last change of the contents.
    pub mtime: Times,
    /// Last change of anything.
    pub ctime: Times,
    /// When it was made.
    pub birth: Span,
    /// Extended attributes.
    pub xattrs: BTreeMap<String, Vec<u8>>,
    /// What it holds.
    pub body: Body,
    /// Number of operations up to and with the last that changed it.
    pub touched: u64,
    /// The same for data and size alone.
    pub data_touched: u64,
    /// As `touched`, without writes: what a sync of any range has to cover.
    pub changed: u64,
    /// As `data_touched`, without writes.
    pub shaped: u64,
}

impl Inode {
    fn new(file_type: FileType, permissions: u32, body: Body, (step, now): (u64, Span)) -> Self {
        let times = Times::new(now, step);
        Self {
            file_type,
            permissions,
            uid: 0,
            gid: 0,
            names: 1,
            linkable: false,
            rdev: 0,
            atime: times.clone(),
            mtime: times.clone(),
            ctime: times,
            birth: now,
            xattrs: BTreeMap::new(),
            body,
            touched: step,
            data_touched: step,
            changed: step,
            shaped: step,
        }
    }

    /// Contents, if it is a regular file.
    pub const fn data(&self) -> Option<&Arc<FileData>> {
        match &self.body {
            Body::File(data) => Some(data),
            _ => None,
        }
    }

    /// Before the operations `steps` have set mtime and ctime, these were something else, which a crash may bring back.
    fn has_times_in_memory(&self, [mtime, ctime]: [u64; 2]) -> bool {
        self.mtime.is_affected(mtime) || self.ctime.is_affected(ctime)
    }

    /// Entries, if it is a directory.
    pub const fn entries(&self) -> Option<&BTreeMap<String, Ino>> {
        match &self.body {
            Body::Directory { entries, .. } => Some(entries),
            _ => None,
        }
    }
}

/// See the module's head.
#[derive(Debug, Clone)]
pub struct Model {
    inodes: BTreeMap<Ino, Arc<Inode>>,
    next_ino: Ino,
    slots: BTreeMap<u8, Slot>,
    /// Operations applied so far.
    step: u64,
    /// When the next operation happens.
    clock: Span,
    /// When reading moves the access time.
    atime: AtimePolicy,
    /// Amid a batch: how long the files were before it, of which it sets sizes.
    sizes_before: Option<BTreeMap<Ino, u64>>,
}

impl Default for Model {
    fn default() -> Self {
        Self::new()
    }
}

impl Model {
    /// A new volume: an empty root directory.
    pub fn new() -> Self {
        let body = Body::Directory { entries: BTreeMap::new(), parent: ROOT };
        let root = Inode::new(FileType::Directory, 0o755, body, (0, Span::ANY));
        Self {
            inodes: BTreeMap::from([(ROOT, Arc::new(root))]),
            next_ino: ROOT + 1,
            slots: BTreeMap::new(),
            step: 0,
            clock: Span::ANY,
            atime: AtimePolicy::Never,
            sizes_before: None,
        }
    }

    /// The operations from now on happen at this time.
    pub const fn set_clock(&mut self, clock: Span) {
        self.clock = clock;
    }

    /// Reading moves the access time like this.
    pub const fn set_atime_policy(&mut self, policy: AtimePolicy) {
        self.atime = policy;
    }

    /// Operations applied so far.
    pub const fn step(&self) -> u64 {
        self.step
    }

    /// The same state, as one that follows `step` operations: no acknowledgement of a later one demands it.
    #[must_use]
    pub fn counted_as(mut self, step: u64) -> Self {
        self.step = step;
        self
    }

    /// The inode with this number.
    pub fn inode(&self, ino: Ino) -> Option<&Arc<Inode>> {
        self.inodes.get(&ino)
    }

    /// All inodes, by number.
    pub fn inodes(&self) -> impl Iterator<Item = (Ino, &Arc<Inode>)> {
        self.inodes.iter().map(|(ino, inode)| (*ino, inode))
    }

    /// Link count as `stat` gives it.
    pub fn links(&self, inode: &Inode) -> u32 {
        inode.entries().map_or(inode.names, |entries| {
            let is_directory = |ino: &&Ino| {
                self.inode(**ino).is_some_and(|child| child.file_type == FileType::Directory)
            };
            2 + entries.values().filter(is_directory).count() as u32
        })
    }

    /// Inode of a path. A symbolic link at its end is not followed.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`, `ENAMETOOLONG` and `ELOOP` as POSIX has them.
    pub fn resolve(&self, path: &str) -> Result<Ino, Errno> {
        self.walk(ROOT, path, false, &mut 0)
    }

    /// What `path` leads to from the directory `start` on. `links`: how many were followed.
    fn walk(&self, start: Ino, path: &str, follow: bool, links: &mut u32) -> Result<Ino, Errno> {
        let mut ino = if path.starts_with('/') { ROOT } else { start };
        let mut names = path.split('/').filter(|name| !name.is_empty()).peekable();
        while let Some(name) = names.next() {
            let inode = self.inode(ino).ok_or(errno::ENOENT)?;
            let entries = inode.entries().ok_or(errno::ENOTDIR)?;
            if name.len() > MAX_NAME_BYTES {
                return Err(errno::ENAMETOOLONG);
            }
            let next = *entries.get(name).ok_or(errno::ENOENT)?;
            ino = match self.inode(next).map(|inode| &inode.body) {
                Some(Body::Symlink(target)) if follow || names.peek().is_some() => {
                    *links += 1;
                    if *links > MAX_SYMLINKS {
                        return Err(errno::ELOOP);
                    }
                    self.walk(ino, target, true, links)?
                }
                _ => next,
            };
        }
        Ok(ino)
    }

    /// The directory that a path's last name is in.
    pub(super) fn parent_of(&self, path: &str) -> Result<Ino, Errno> {
        self.walk(ROOT, parent(path), true, &mut 0)
    }

    /// Inode of a path or handle.
    ///
    /// # Errors
    /// As [`Self::resolve`]; `EBADF` for a handle that is not open.
    pub fn target(&self, target: &Target) -> Result<Ino, Errno> {
        match target {
            Target::Path(path) => self.resolve(path),
            Target::Slot(slot) => self.slots.get(slot).map(|slot| slot.ino).ok_or(errno::EBADF),
        }
    }

    /// Open handles.
    pub const fn slots(&self) -> &BTreeMap<u8, Slot> {
        &self.slots
    }

    /// Paths of all inodes that have one, each inode once, in the order of names.
    pub fn paths(&self) -> Vec<(String, Ino)> {
        let mut result = Vec::new();
        let mut seen = std::collections::BTreeSet::new();
        self.collect_paths("", ROOT, &mut seen, &mut result);
        result
    }

    fn collect_paths(
        &self,
        prefix: &str,
        directory: Ino,
        seen: &mut std::collections::BTreeSet<Ino>,
        result: &mut Vec<(String, Ino)>,
    ) {
        let entries = self.inode(directory).and_then(|inode| inode.entries());
        for (name, ino) in entries.into_iter().flatten() {
            if seen.insert(*ino) {
                let path = format!("{prefix}/{name}");
                result.push((path.clone(), *ino));
                self.collect_paths(&path, *ino, seen, result);
            }
        }
    }

    /// Adds a directory tree that is durable as it is: for a model of a recovered volume.
    pub(crate) fn insert(&mut self, ino: Ino, inode: Inode) {
        self.next_ino = self.next_ino.max(ino + 1);
        self.inodes.insert(ino, Arc::new(inode));
    }

    /// Replaces the contents of a file by such that leave a crash fewer choices.
    pub(crate) fn settle(&mut self, ino: Ino, data: &Arc<FileData>) {
        if let Some(inode) = self.inodes.get_mut(&ino)
            && inode.data().is_some()
        {
            Arc::make_mut(inode).body = Body::File(Arc::clone(data));
        }
    }

    /// What the operations `steps` have set mtime and ctime of a file to is in the log.
    pub(crate) fn settle_times(&mut self, ino: Ino, [mtime, ctime]: [u64; 2]) {
        if let Some(inode) = self.inodes.get_mut(&ino) {
            let inode = Arc::make_mut(inode);
            inode.mtime.settle_from(mtime);
            inode.ctime.settle_from(ctime);
        }
    }
}
