//! The namespace of a [`Volume`] by path.

use super::Volume;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::file::handle::File;
use crate::namespace::path::{Located, on_named};
use crate::types::{Attr, DirEntry, FileType, NewInode, OpenFlags, RenameMode};

/// The namespace by path: `/`-separated from the root; symbolic links are followed, at the end only where it says so. A directory on the way that
/// another one replaces meanwhile is looked up again. What has no call of its own here goes by number: see [`Volume::at_path`].
impl Volume {
    /// Opens a regular file, creating it if the flags say so. A symbolic link at the end is followed, unless the file has to be a new one.
    ///
    /// # Errors
    /// [`Error::Exists`] if it has to be a new one; [`Error::IsDirectory`]; [`Error::Invalid`] for what is no regular file either,
    /// and for `truncate` without `write`.
    pub fn open_file(&self, path: impl AsRef<[u8]>, flags: OpenFlags) -> Result<File> {
        if flags.truncate && !flags.write {
            return Err(Error::Invalid("who cuts a file opens it for writing: set `write` too"));
        }
        let (file, is_new) = self.open_or_make(path.as_ref(), flags)?;
        // An empty one, too: its times move, and it may have blocks behind its end.
        if flags.truncate && !is_new {
            file.truncate(0)?;
        }
        Ok(file)
    }

    /// And whether it was made. What others do to the name meanwhile is no reason to fail: then it is looked up again.
    fn open_or_make(&self, path: &[u8], flags: OpenFlags) -> Result<(File, bool)> {
        let open = |inode| self.open_handle(inode, flags.write, flags.data_sync);
        let must_be_new = flags.create && flags.exclusive;
        let (mut gone, mut gone_dir) = (None, None);
        loop {
            match self.engine.locate(path, !must_be_new)? {
                Located::Present(_) if must_be_new => {
                    return Err(Error::Exists);
                }
                Located::Present(number) => match self.engine.inode(number).and_then(open) {
                    // Replaced, or removed, after it was found.
                    Err(Error::NotFound) if gone != Some(number) => gone = Some(number),
                    opened => return Ok((opened?, false)),
                },
                Located::Absent { .. } | Located::AbsentDirectory if !flags.create => {
                    return Err(Error::NotFound);
                }
                Located::AbsentDirectory => return Err(Error::IsDirectory),
                Located::Absent { dir, name, place } => {
                    match self.engine.make_at(dir, (&name, place), flags.permissions, open) {
                        // Made by somebody else after it was not found.
                        Err(Error::Exists) if !flags.exclusive => {}
                        // The directory was replaced, or removed, after it was found.
                        Err(Error::NotFound) if gone_dir != Some(dir) => gone_dir = Some(dir),
                        made => return Ok((made??, true)),
                    }
                }
            }
        }
    }

    /// Has `act` done with the inode that `path` names, whose number it is given. Where that is replaced in between, and gone when `act` asks
    /// for it, the path is resolved again: so whoever uses this finds what is always there, whoever renames something over it. (Between
    /// [`Volume::resolve`] and a call with the number an inode may go.)
    ///
    /// ```
    /// # use weir::{Result, SetAttr, Volume, XattrMode};
    /// fn seal(volume: &Volume, path: &str) -> Result<()> {
    ///     let read_only = SetAttr { permissions: Some(0o444), ..SetAttr::default() };
    ///     volume.at_path(path, true, |ino| volume.setattr(ino, &read_only))?;
    ///     volume.at_path(path, true, |ino| volume.setxattr(ino, b"user.sealed", b"1", XattrMode::Set))
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`Volume::resolve`], and those of `act`; [`Error::NotFound`] of `act` if the path still leads to the same inode.
    pub fn at_path<R>(
        &self,
        path: impl AsRef<[u8]>,
        follow_last: bool,
        mut act: impl FnMut(u64) -> Result<R>,
    ) -> Result<R> {
        on_named(|| self.resolve(&path, follow_last), |number| act(*number))
    }

    /// Attributes of what `path` names, symbolic links followed.
    pub fn metadata(&self, path: impl AsRef<[u8]>) -> Result<Attr> {
        self.at_path(path, true, |number| self.getattr_of_named(number))
    }

    /// Attributes of what `path` names; a symbolic link at the end is not followed.
    pub fn symlink_metadata(&self, path: impl AsRef<[u8]>) -> Result<Attr> {
        self.at_path(path, false, |number| self.getattr_of_named(number))
    }

    /// The inode that `path` names.
    pub fn resolve(&self, path: impl AsRef<[u8]>, follow_last: bool) -> Result<u64> {
        self.engine.resolve(path.as_ref(), follow_last)
    }

    /// The directory that the last part of `path` is in, and that part.
    pub fn resolve_parent(&self, path: impl AsRef<[u8]>) -> Result<(u64, Vec<u8>)> {
        self.engine.resolve_parent(path.as_ref())
    }

    /// Makes a directory.
    pub fn create_dir(&self, path: impl AsRef<[u8]>, permissions: u32) -> Result<Attr> {
        let find = || self.parent_of_new(path.as_ref());
        let new = NewInode::new(FileType::Directory, permissions);
        on_named(find, |(dir, name)| self.make(*dir, name, &new))
    }

    /// The directory and the name of what is to be made.
    fn parent_of_new(&self, path: &[u8]) -> Result<(u64, Vec<u8>)> {
        match self.engine.resolve_parent(path) {
            // The root, `.` and `..` have no name, but are there.
            Err(Error::NotFound | Error::Invalid(_)) if self.resolve(path, true).is_ok() => {
                Err(Error::Exists)
            }
            split => split,
        }
    }

    /// The same of what is no directory: a slash at the end of its path says that it is one.
    fn parent_of_new_file(&self, path: &[u8]) -> Result<(u64, Vec<u8>)> {
        let (dir, name) = self.parent_of_new(path)?;
        if path.last() != Some(&b'/') {
            return Ok((dir, name));
        }
        self.lookup(dir, &name)?;
        Err(Error::Exists)
    }

    /// Makes a directory and those on the way to it that are not there, all with these `permissions`; nothing where it is there. Each is an
    /// operation of its own: whoever fails half-way leaves those that were made.
    ///
    /// # Errors
    /// [`Error::Exists`] if something else has its name, or that of one on the way; [`Error::NotDirectory`] where that is found on the way.
    pub fn create_dir_all(&self, path: impl AsRef<[u8]>, permissions: u32) -> Result<Attr> {
        let path = path.as_ref();
        match self.make_or_find_dir(path, permissions) {
            // Or it ends with `.` or `..` of a directory that is not there.
            Err(Error::NotFound | Error::Invalid(_)) => {}
            done => return done,
        }
        for (at, _) in path.iter().enumerate().skip(1).filter(|(_, byte)| **byte == b'/') {
            self.make_or_find_dir(&path[..at], permissions)?;
        }
        self.make_or_find_dir(path, permissions)
    }

    /// The directory `path`, which is made if nothing has its name.
    fn make_or_find_dir(&self, path: &[u8], permissions: u32) -> Result<Attr> {
        match self.create_dir(path, permissions) {
            Err(Error::Exists) => match self.metadata(path) {
                Ok(found) if found.file_type == FileType::Directory => Ok(found),
                // A link that leads nowhere, too.
                Ok(_) | Err(Error::NotFound) => Err(Error::Exists),
                failed => failed,
            },
            done => done,
        }
    }

    /// Makes a symbolic link at `path`, owned by root, that leads to `target`, which need not be there.
    pub fn symlink_path(&self, target: impl AsRef<[u8]>, path: impl AsRef<[u8]>) -> Result<Attr> {
        let find = || self.parent_of_new_file(path.as_ref());
        on_named(find, |(dir, name)| self.symlink(*dir, name, target.as_ref(), 0, 0))
    }

    /// Where the symbolic link at `path` leads.
    pub fn read_link(&self, path: impl AsRef<[u8]>) -> Result<Vec<u8>> {
        self.at_path(path, false, |number| self.readlink(number))
    }

    /// Gives what `path` names one more name, `new_path`. A symbolic link at the end of `path` is not followed.
    ///
    /// # Errors
    /// [`Error::Exists`] if something has the new name, [`Error::NotPermitted`] for a directory.
    pub fn link_path(&self, path: impl AsRef<[u8]>, new_path: impl AsRef<[u8]>) -> Result<Attr> {
        let find = || self.parent_of_new_file(new_path.as_ref());
        self.at_path(path, false, |number| {
            on_named(find, |(dir, name)| self.link(number, *dir, name))
        })
    }

    /// Removes a name of something that is no directory.
    pub fn remove_file(&self, path: impl AsRef<[u8]>) -> Result<()> {
        let find = || match named_parent(&self.engine, path.as_ref()) {
            Err(Error::RootDirectory) => Err(Error::IsDirectory),
            split => split,
        };
        on_named(find, |(dir, name)| {
            self.check_slash(path.as_ref(), *dir, name)?;
            self.unlink(*dir, name)
        })
    }

    /// A slash at the end of `path` says that `name` in `dir` is a directory.
    fn check_slash(&self, path: &[u8], dir: u64, name: &[u8]) -> Result<()> {
        if path.last() != Some(&b'/') || self.lookup(dir, name)?.file_type == FileType::Directory {
            return Ok(());
        }
        Err(Error::NotDirectory)
    }

    /// Removes an empty directory.
    pub fn remove_dir(&self, path: impl AsRef<[u8]>) -> Result<()> {
        let find = || named_parent(&self.engine, path.as_ref());
        on_named(find, |(dir, name)| self.rmdir(*dir, name))
    }

    /// Renames, replacing what is there.
    pub fn rename_path(&self, from: impl AsRef<[u8]>, to: impl AsRef<[u8]>) -> Result<()> {
        let parent_of = |path: &[u8]| named_parent(&self.engine, path);
        let find = || Ok((parent_of(from.as_ref())?, parent_of(to.as_ref())?));
        on_named(find, |((dir, name), (new_dir, new_name))| {
            self.check_slash(from.as_ref(), *dir, name)?;
            self.check_slash(to.as_ref(), *dir, name)?;
            self.rename(*dir, name, *new_dir, new_name, RenameMode::Replace)
        })
    }

    /// All entries of a directory.
    pub fn read_dir(&self, path: impl AsRef<[u8]>) -> Result<Vec<DirEntry>> {
        self.at_path(path, true, |dir| {
            let mut entries = Vec::new();
            self.readdir(dir, 0, &mut |entry| {
                entries.push(entry);
                true
            })?;
            Ok(entries)
        })
    }
}

/// The directory and the name of what is to be removed, renamed or replaced.
fn named_parent(engine: &Engine, path: &[u8]) -> Result<(u64, Vec<u8>)> {
    if !path.is_empty() && path.iter().all(|&byte| byte == b'/') {
        return Err(Error::RootDirectory);
    }
    engine.resolve_parent(path)
}
