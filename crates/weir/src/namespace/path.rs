//! The namespace by path, for programs that link the engine: `/`-separated, from the root.

use super::check_name;
use super::entry::Lookup;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::format::MAX_SYMLINK_BYTES;
use crate::types::FileType;

/// Symbolic links followed before a path is given up on, as in Linux.
const MAX_SYMLINKS: usize = 40;

/// What a path leads to.
#[derive(Debug, Clone, Copy)]
pub enum Located<'p> {
    /// This inode.
    Present(u64),
    /// Nothing, but a directory in which the last component could be made.
    Absent {
        /// The directory.
        dir: u64,
        /// The last component.
        name: &'p [u8],
    },
}

impl Engine {
    /// The inode that `path` names. `follow_last`: a symbolic link at the end is followed.
    pub fn resolve(&self, path: &[u8], follow_last: bool) -> Result<u64> {
        self.walk(crate::Volume::ROOT, path, follow_last, &mut 0)
    }

    /// What `path` names, or where it could be made: one look-up of each component.
    pub fn locate<'p>(&self, path: &'p [u8], follow_last: bool) -> Result<Located<'p>> {
        if path.len() > MAX_SYMLINK_BYTES {
            return Err(Error::NameTooLong);
        }
        let (dir, name) = match self.split_parent(path) {
            Ok(split) => split,
            // The root, `.`, `..`, or nothing.
            Err(no_name) => match self.resolve(path, follow_last) {
                Err(Error::NotFound) => return Err(no_name),
                other => return other.map(Located::Present),
            },
        };
        let must_be_directory = path.last() == Some(&b'/');
        match self.find_entry(dir, name)? {
            Lookup::Absent(_) => Ok(Located::Absent { dir, name }),
            Lookup::Present(found)
                if found.file_type == FileType::Directory
                    || (!must_be_directory
                        && (found.file_type != FileType::Symlink || !follow_last)) =>
            {
                Ok(Located::Present(found.inode))
            }
            Lookup::Present(_) => self.resolve(path, follow_last).map(Located::Present),
        }
    }

    /// The directory that the last component of `path` is in, and that component.
    pub fn resolve_parent(&self, path: &[u8]) -> Result<(u64, Vec<u8>)> {
        let (dir, name) = self.split_parent(path)?;
        Ok((dir, name.to_vec()))
    }

    fn split_parent<'p>(&self, path: &'p [u8]) -> Result<(u64, &'p [u8])> {
        let end = path.iter().rposition(|&byte| byte != b'/').map_or(0, |last| last + 1);
        let path = &path[..end];
        let start = path.iter().rposition(|&byte| byte == b'/').map_or(0, |slash| slash + 1);
        let (parent, name) = path.split_at(start);
        check_name(name)?;
        let dir = self.resolve(parent, true)?;
        if self.inode(dir)?.file_type != FileType::Directory {
            return Err(Error::NotDirectory);
        }
        Ok((dir, name))
    }

    fn walk(&self, start: u64, path: &[u8], follow: bool, links: &mut usize) -> Result<u64> {
        if path.len() > MAX_SYMLINK_BYTES {
            return Err(Error::NameTooLong);
        }
        let mut at = if path.first() == Some(&b'/') { crate::Volume::ROOT } else { start };
        let mut parts = path.split(|&byte| byte == b'/').filter(|part| !part.is_empty()).peekable();
        let must_be_directory = path.last() == Some(&b'/');
        while let Some(part) = parts.next() {
            let dir = self.directory(at)?;
            let (found, file_type) = match part {
                b"." => (at, FileType::Directory),
                b".." => (dir.meta.lock().item.parent, FileType::Directory),
                name if name.len() > crate::format::MAX_NAME_BYTES => {
                    return Err(Error::NameTooLong);
                }
                name => {
                    let found = self.present(at, name)?;
                    (found.inode, found.file_type)
                }
            };
            let is_last = parts.peek().is_none();
            at = if file_type == FileType::Symlink && (!is_last || follow || must_be_directory) {
                *links += 1;
                if *links > MAX_SYMLINKS {
                    return Err(Error::TooManySymlinks);
                }
                let target = self.readlink(found)?;
                self.walk(at, &target, true, links)?
            } else {
                found
            };
        }
        if must_be_directory {
            self.directory(at)?;
        }
        Ok(at)
    }
}
