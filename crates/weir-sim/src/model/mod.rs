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

use std::collections::BTreeMap;
use std::sync::Arc;

use weir::{FileType, Timestamp};

use crate::op::Target;
use data::FileData;

pub use apply::Outcome;

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
    pub const ENOTEMPTY: Errno = 39;
    pub const ENODATA: Errno = 61;
    pub const EOPNOTSUPP: Errno = 95;
}

/// Number of an inode in the model; unrelated to the engine's numbers.
pub type Ino = u32;

/// The root directory.
pub const ROOT: Ino = 1;

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
    /// Set by `utimens`, and nothing that changes it happened since.
    pub atime: Option<Timestamp>,
    /// Set by `utimens`, and nothing that changes it happened since.
    pub mtime: Option<Timestamp>,
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
    fn new(file_type: FileType, permissions: u32, body: Body, step: u64) -> Self {
        Self {
            file_type,
            permissions,
            uid: 0,
            gid: 0,
            names: 1,
            linkable: false,
            rdev: 0,
            atime: None,
            mtime: None,
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
    slots: BTreeMap<u8, Ino>,
    /// Operations applied so far.
    step: u64,
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
        let root = Inode::new(FileType::Directory, 0o755, body, 0);
        Self {
            inodes: BTreeMap::from([(ROOT, Arc::new(root))]),
            next_ino: ROOT + 1,
            slots: BTreeMap::new(),
            step: 0,
        }
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

    /// Inode of a path. Symbolic links are not followed.
    ///
    /// # Errors
    /// `ENOENT` and `ENOTDIR` as POSIX has them.
    pub fn resolve(&self, path: &str) -> Result<Ino, Errno> {
        let mut ino = ROOT;
        for name in path.split('/').filter(|name| !name.is_empty()) {
            let inode = self.inode(ino).ok_or(errno::ENOENT)?;
            let entries = inode.entries().ok_or(errno::ENOTDIR)?;
            ino = *entries.get(name).ok_or(errno::ENOENT)?;
        }
        Ok(ino)
    }

    /// Inode of a path or handle.
    ///
    /// # Errors
    /// As [`Self::resolve`]; `EBADF` for a handle that is not open.
    pub fn target(&self, target: &Target) -> Result<Ino, Errno> {
        match target {
            Target::Path(path) => self.resolve(path),
            Target::Slot(slot) => self.slots.get(slot).copied().ok_or(errno::EBADF),
        }
    }

    /// Open handles.
    pub const fn slots(&self) -> &BTreeMap<u8, Ino> {
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
}
