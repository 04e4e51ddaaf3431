//! Finding a name in a directory, and a place for a new one.

use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::format::item::{Dirent, name_hash};
use crate::format::{Key, Kind};
use crate::inode::Inode;
use crate::namespace::check_name;
use crate::txn::View;
use crate::txn::names::{Moment, Named};
use crate::types::{DirEntry, FileType};

/// An entry that exists.
#[derive(Debug, Clone, Copy)]
pub struct Found {
    /// Its place.
    pub key: Key,
    /// The inode it names.
    pub inode: u64,
    /// What that is.
    pub file_type: FileType,
}

impl Found {
    /// What the entry names.
    pub fn named(&self) -> Named {
        Named { inode: self.inode, file_type: self.file_type }
    }

    /// That is a regular file.
    pub fn is_file(&self) -> bool {
        self.file_type == FileType::Regular
    }
}

/// What a look-up in a directory found.
#[derive(Debug, Clone, Copy)]
pub enum Lookup {
    /// The entry.
    Present(Found),
    /// No such name; it would go here.
    Absent(Key),
}

/// A place that was free for a new entry, and when.
#[derive(Debug, Clone, Copy)]
pub struct FreePlace {
    /// The place.
    pub key: Key,
    /// Before it was found.
    pub moment: Moment,
}

/// How many entries a directory listing reads at a time.
const LIST_BATCH: usize = 128;

#[cold]
fn impossible_name(dir: u64, name: &[u8]) -> Error {
    Error::Corrupt(format!(
        "directory {dir} has an entry \"{}\", which is no name: run fsck",
        name.escape_ascii()
    ))
}

/// Looks `name` up in `dir`, as `view` has it.
pub fn find(view: &dyn View, dir: u64, name: &[u8]) -> Result<Lookup> {
    let hash = name_hash(name);
    let first = Key::new(dir, Kind::Dirent, hash);
    let last = Key::new(dir, Kind::Dirent, hash | 0xff);
    let mut free = hash;
    let mut present = None;
    view.scan(first, last, &mut |key, value| {
        let entry = Dirent::decode(value)?;
        if entry.name == name {
            present = Some(Found { key, inode: entry.inode, file_type: entry.file_type });
        } else if key.offset == free {
            free += 1;
        }
        Ok(present.is_none())
    })?;
    if let Some(found) = present {
        return Ok(Lookup::Present(found));
    }
    if free & !0xff != hash {
        return Err(Error::NoSpace);
    }
    Ok(Lookup::Absent(Key::new(dir, Kind::Dirent, free)))
}

impl Engine {
    /// Looks `name` up in `dir`.
    pub fn find_entry(&self, dir: u64, name: &[u8]) -> Result<Lookup> {
        find(&self.store, dir, name)
    }

    /// The entry `name` of `dir`, or [`Error::NotFound`].
    pub fn present(&self, dir: u64, name: &[u8]) -> Result<Found> {
        match self.find_entry(dir, name)? {
            Lookup::Present(found) => Ok(found),
            Lookup::Absent(_) => Err(Error::NotFound),
        }
    }

    /// As [`Engine::absent`], which it does not ask if `known`, a place for this entry, is free for sure. The caller holds the
    /// directory's `ops` lock.
    pub fn absent_as_known(&self, dir: u64, name: &[u8], known: Option<FreePlace>) -> Result<Key> {
        if let Some(FreePlace { key, moment }) = known
            && self.store.names.is_unchanged(moment)
        {
            debug_assert!(match self.find_entry(dir, name) {
                Ok(Lookup::Absent(free)) => free == key,
                found => found.is_err(),
            });
            return Ok(key);
        }
        self.absent(dir, name)
    }

    /// A free place for `name` in `dir`, or [`Error::Exists`].
    pub fn absent(&self, dir: u64, name: &[u8]) -> Result<Key> {
        match self.find_entry(dir, name)? {
            Lookup::Present(_) => Err(Error::Exists),
            Lookup::Absent(key) => Ok(key),
        }
    }

    /// Shows the entries of `dir` after `after_cookie` (0: from the start) to `visit` until it answers
    /// false. Entries made or removed meanwhile may or may not be seen; all others are seen once.
    ///
    /// A name that cannot be one (checksums hold, so somebody has made it) is shown to nobody: who copies a tree would join it to a path of
    /// the host, and write outside of where he was told to.
    pub fn list(
        &self,
        dir: &Inode,
        after_cookie: u64,
        visit: &mut dyn FnMut(DirEntry) -> bool,
    ) -> Result<()> {
        self.touch_atime(dir);
        let Some(start) = after_cookie.checked_add(1) else { return Ok(()) };
        let last = Key::new(dir.number, Kind::Dirent, u64::MAX);
        let mut next = Some(Key::new(dir.number, Kind::Dirent, start));
        while let Some(from) = next {
            let (entries, more) = self.store.collect(from, last, LIST_BATCH)?;
            for (key, value) in entries {
                let entry = Dirent::decode(&value)?;
                check_name(entry.name).map_err(|_| impossible_name(dir.number, entry.name))?;
                let shown = DirEntry {
                    name: entry.name.to_vec(),
                    ino: entry.inode,
                    file_type: entry.file_type,
                    cookie: key.offset,
                };
                if !visit(shown) {
                    return Ok(());
                }
            }
            next = more.filter(|key| *key <= last);
        }
        Ok(())
    }
}
