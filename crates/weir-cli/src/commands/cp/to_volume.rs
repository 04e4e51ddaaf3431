//! From the host into a volume.
//!
//! As on the host, a regular file is replaced only when its copy is complete: until then that has no name, so that a copy cut short or
//! interrupted leaves the old file and nothing else.

use std::collections::HashMap;
use std::ffi::{CString, OsStr};
use std::fs::{self, File, Metadata};
use std::io::{ErrorKind, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{SeekFrom, XattrFlags, lgetxattr, llistxattr, seek};
use rustix::io::Errno;
use weir::{Error, FileType, NewInode, SetAttr, SetTime, Timestamp, Volume, XattrMode};

use super::output::identity;
use super::{CHUNK_BYTES, Tally};
use crate::failure::{Failure, Outcome};
use crate::place::Place;

/// Copies into one volume.
pub(super) struct Copier<'a> {
    volume: &'a Volume,
    pub(super) tally: &'a mut Tally,
    /// FIFOs, devices and sockets are copied as what they are, else they are read; and what is one file here is one there.
    recursive: bool,
    /// The volume's own file on the host, which cannot be copied into itself.
    own: Option<(u64, u64)>,
    /// Inodes made for host files with several names: (device, inode) to inode.
    linked: HashMap<(u64, u64), u64>,
    buffer: Vec<u8>,
}

fn file_type(meta: &Metadata) -> FileType {
    let kind = meta.file_type();
    if kind.is_dir() {
        FileType::Directory
    } else if kind.is_symlink() {
        FileType::Symlink
    } else if kind.is_fifo() {
        FileType::Fifo
    } else if kind.is_socket() {
        FileType::Socket
    } else if kind.is_char_device() {
        FileType::CharDevice
    } else if kind.is_block_device() {
        FileType::BlockDevice
    } else {
        FileType::Regular
    }
}

/// The kernel's 64-bit device number in 32 bits.
fn device_number(rdev: u64) -> u32 {
    let (major, minor) = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
    minor & 0xff | (major & 0xfff) << 8 | (minor & !0xff) << 12
}

/// What a copy is made as; the rest comes with its attributes.
fn new_inode(file_type: FileType, meta: &Metadata) -> NewInode {
    NewInode {
        file_type,
        permissions: meta.mode() & 0o777,
        uid: meta.uid(),
        gid: meta.gid(),
        rdev: 0,
    }
}

fn times(meta: &Metadata) -> (SetTime, SetTime) {
    let at = |seconds, nanoseconds: i64| {
        SetTime::At(Timestamp { seconds, nanoseconds: nanoseconds as u32 })
    };
    (at(meta.atime(), meta.atime_nsec()), at(meta.mtime(), meta.mtime_nsec()))
}

impl<'a> Copier<'a> {
    /// For copies to `place`, which is in `volume`.
    pub(super) fn new(
        volume: &'a Volume,
        place: &Place,
        recursive: bool,
        tally: &'a mut Tally,
    ) -> Self {
        let own = place.volume.metadata().ok().map(|meta| identity(&meta));
        let buffer = vec![0; CHUNK_BYTES];
        Self { volume, tally, recursive, own, linked: HashMap::new(), buffer }
    }

    /// Copies `source` to `place`, or below it if that is a directory.
    pub(super) fn copy(&mut self, source: &Path, place: &Place) -> Outcome {
        // As with cp(1), a link is followed that is named, and copied where a tree is.
        let meta = if self.recursive { source.symlink_metadata() } else { source.metadata() };
        let meta = meta.map_err(|error| Failure::host(source, &error))?;
        if meta.is_dir() && !self.recursive {
            return Err(Failure::new(source.display(), "is a directory: add -r to copy it"));
        }
        let fail = |error: Error| Failure::inside(place, &error);
        let followed = if self.recursive { None } else { source.canonicalize().ok() };
        let from = followed.as_deref().unwrap_or(source);
        let contents_only =
            source.as_os_str().as_bytes().ends_with(b"/.") || source.as_os_str() == ".";
        let existing = match self.volume.metadata(&place.path) {
            Ok(attr) => Some(attr),
            Err(Error::NotFound) => None,
            Err(error) => return Err(fail(error)),
        };
        match existing {
            Some(attr) if attr.file_type == FileType::Directory && contents_only => {
                self.directory(source, attr.ino, place)?;
                self.attributes(source, &meta, attr.ino, place)
            }
            Some(attr) if attr.file_type == FileType::Directory => {
                let named = source.canonicalize();
                let name = match source.file_name() {
                    Some(name) => name.to_owned(),
                    None => named
                        .ok()
                        .and_then(|path| path.file_name().map(OsStr::to_owned))
                        .ok_or_else(|| {
                            Failure::new(source.display(), "has no name to copy it to")
                        })?,
                };
                let name = name.into_vec();
                self.entry(from, &meta, attr.ino, &name, &place.join(&name))
            }
            Some(_) if meta.is_dir() || place.must_be_directory => {
                Err(Failure::new(place, "is not a directory"))
            }
            None if place.must_be_directory && !meta.is_dir() => Err(Failure::new(
                place,
                format!("no such directory: make it first: weir mkdir {place}"),
            )),
            _ => {
                let (dir, name) = self.volume.resolve_parent(&place.path).map_err(fail)?;
                self.entry(from, &meta, dir, &name, place)
            }
        }
    }

    fn entry(
        &mut self,
        source: &Path,
        meta: &Metadata,
        dir: u64,
        name: &[u8],
        place: &Place,
    ) -> Outcome {
        let fail = |error: Error| Failure::inside(place, &error);
        let kind = file_type(meta);
        if self.own == Some(identity(meta)) {
            self.tally.skip(source.display(), "is the volume that it would be copied into");
            return Ok(());
        }
        let is_read = match kind {
            FileType::Regular => true,
            FileType::Directory | FileType::Symlink => false,
            _ => !self.recursive,
        };
        let several_names = self.recursive && kind != FileType::Directory && meta.nlink() > 1;
        let identity = (meta.dev(), meta.ino());
        if let Some(&ino) = self.linked.get(&identity).filter(|_| several_names)
            && self.link(ino, dir, name).map_err(fail)?
        {
            self.tally.files += 1;
            return Ok(());
        }
        let ino = if is_read {
            let Some(ino) = self.file(source, meta, (dir, name), place)? else { return Ok(()) };
            ino
        } else {
            let ino = match kind {
                FileType::Directory => self.directory_at(dir, name).map_err(fail)?,
                FileType::Symlink => {
                    let target =
                        fs::read_link(source).map_err(|error| Failure::host(source, &error))?;
                    self.make_room(dir, name).map_err(fail)?;
                    let target = target.into_os_string().into_vec();
                    let link = self.volume.symlink(dir, name, &target, meta.uid(), meta.gid());
                    link.map_err(fail)?.ino
                }
                _ => {
                    self.make_room(dir, name).map_err(fail)?;
                    let rdev = device_number(meta.rdev());
                    let new = NewInode { rdev, ..new_inode(kind, meta) };
                    self.volume.make(dir, name, &new).map_err(fail)?.ino
                }
            };
            if kind == FileType::Directory {
                self.directory(source, ino, place)?;
            }
            self.attributes(source, meta, ino, place)?;
            ino
        };
        if several_names {
            self.linked.insert(identity, ino);
        }
        self.tally.files += 1;
        Ok(())
    }

    /// Copies what can be read of `source` to a file with this name; `None` (and a word) if it cannot be opened.
    fn file(
        &mut self,
        source: &Path,
        meta: &Metadata,
        (dir, name): (u64, &[u8]),
        place: &Place,
    ) -> Outcome<Option<u64>> {
        let fail = |error: Error| Failure::inside(place, &error);
        // Before anything is taken away.
        let from = match File::open(source) {
            Ok(from) => from,
            Err(error) => {
                self.tally.go_on(Err(Failure::host(source, &error)))?;
                return Ok(None);
            }
        };
        let new = new_inode(FileType::Regular, meta);
        let found = self.volume.lookup(dir, name);
        if !found.is_ok_and(|attr| attr.file_type == FileType::Regular) {
            self.make_room(dir, name).map_err(fail)?;
            let ino = self.volume.make(dir, name, &new).map_err(fail)?.ino;
            let file = self.volume.open_inode(ino, true).map_err(fail)?;
            self.contents((source, &from), &file, place).map_err(|(at, failure)| {
                failure.with_remark(format_args!("the copy is incomplete: it ends at byte {at}"))
            })?;
            self.attributes(source, meta, ino, place)?;
            return Ok(Some(ino));
        }
        let (attr, file) = self.volume.tmpfile(dir, &new).map_err(fail)?;
        self.contents((source, &from), &file, place)
            .map_err(|(_, failure)| failure.with_remark("the old file is kept"))?;
        self.attributes(source, meta, attr.ino, place)?;
        self.replace(&file, dir, name).map_err(fail)?;
        Ok(Some(attr.ino))
    }

    /// Puts a file without a name in the place of another one.
    fn replace(&self, file: &weir::File, dir: u64, name: &[u8]) -> weir::Result<()> {
        // After a crash the name has the old file, or the new one with all that is in it.
        if file.size() > u64::from(self.volume.capabilities().max_log_payload_bytes) {
            file.fsync()?;
        } else {
            file.barrier()?;
        }
        self.exchange(file.ino(), dir, name)
    }

    /// Takes a name away from what it leads to, and gives it to another inode, at once.
    fn exchange(&self, ino: u64, dir: u64, name: &[u8]) -> weir::Result<()> {
        let mut batch = self.volume.batch();
        batch.unlink(dir, name)?;
        batch.link(ino, dir, name)?;
        batch.commit_relaxed()?;
        Ok(())
    }

    /// One more name for what was copied before. False: that is no more, because something else has got the only name of the copy.
    fn link(&self, ino: u64, dir: u64, name: &[u8]) -> weir::Result<bool> {
        if !self.volume.getattr(ino).is_ok_and(|attr| attr.links > 0) {
            return Ok(false);
        }
        match self.volume.lookup(dir, name) {
            Ok(there) if there.ino == ino => {}
            Ok(_) => self.exchange(ino, dir, name)?,
            Err(Error::NotFound) => self.volume.link(ino, dir, name).map(drop)?,
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    /// Takes away what is in the way of a new file.
    fn make_room(&self, dir: u64, name: &[u8]) -> weir::Result<()> {
        match self.volume.unlink(dir, name) {
            Ok(()) | Err(Error::NotFound) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn directory_at(&self, dir: u64, name: &[u8]) -> weir::Result<u64> {
        match self.volume.lookup(dir, name) {
            Ok(attr) if attr.file_type == FileType::Directory => Ok(attr.ino),
            Ok(_) => Err(Error::Exists),
            Err(Error::NotFound) => {
                let new = NewInode::new(FileType::Directory, 0o700);
                self.volume.make(dir, name, &new).map(|attr| attr.ino)
            }
            Err(error) => Err(error),
        }
    }

    fn directory(&mut self, source: &Path, ino: u64, place: &Place) -> Outcome {
        let host = |error: std::io::Error| Failure::host(source, &error);
        let entries = match fs::read_dir(source) {
            Ok(entries) => entries,
            // What is in it is left out, and no more.
            Err(error) => return self.tally.go_on(Err(host(error))),
        };
        for entry in entries {
            let copied = entry.map_err(host).and_then(|entry| self.below(&entry, ino, place));
            self.tally.go_on(copied)?;
        }
        Ok(())
    }

    fn below(&mut self, entry: &fs::DirEntry, dir: u64, place: &Place) -> Outcome {
        let path = entry.path();
        let name = entry.file_name().into_vec();
        self.tally.progress.message(path.display());
        let meta = entry.metadata().map_err(|error| Failure::host(&path, &error))?;
        self.entry(&path, &meta, dir, &name, &place.join(&name))
    }

    /// Copies what is data, up to the end that the source has by then, and leaves holes as they are. An error comes with where the copy
    /// ends.
    fn contents(
        &mut self,
        (source, from): (&Path, &File),
        file: &weir::File,
        place: &Place,
    ) -> Result<(), (u64, Failure)> {
        let host = |at, error: std::io::Error| (at, Failure::host(source, &error));
        // What else there is has no holes, and some of it says that it is at 0 wherever one seeks.
        let has_holes = from.metadata().is_ok_and(|meta| meta.is_file());
        let seek = |to| if has_holes { seek(from, to) } else { Err(Errno::INVAL) };
        let mut offset = 0;
        loop {
            let data = match seek(SeekFrom::Data(offset)) {
                Ok(data) => data,
                Err(Errno::NXIO) => break,
                // A file system that does not know; some do not even know a size.
                Err(_) => offset,
            };
            let end = seek(SeekFrom::Hole(data)).unwrap_or(u64::MAX);
            offset = data;
            while offset < end {
                let wanted = (end - offset).min(CHUNK_BYTES as u64) as usize;
                let buffer = &mut self.buffer[..wanted];
                let read_bytes = read(from, buffer, offset).map_err(|error| host(offset, error))?;
                if read_bytes == 0 {
                    break;
                }
                write_all(file, offset, &buffer[..read_bytes]).map_err(|(written, error)| {
                    (offset + written, Failure::inside(place, &error))
                })?;
                self.tally.count_bytes(read_bytes);
                offset += read_bytes as u64;
            }
            if offset < end {
                break;
            }
        }
        let meta = from.metadata().map_err(|error| host(offset, error))?;
        let size_bytes = meta.len().max(offset);
        file.truncate(size_bytes).map_err(|error| (offset, Failure::inside(place, &error)))
    }

    fn attributes(&mut self, source: &Path, meta: &Metadata, ino: u64, place: &Place) -> Outcome {
        self.xattrs(source, ino)?;
        let (atime, mtime) = times(meta);
        let is_link = meta.file_type().is_symlink();
        let change = SetAttr {
            permissions: (!is_link).then_some(meta.mode() & 0o7777),
            uid: Some(meta.uid()),
            gid: Some(meta.gid()),
            atime: Some(atime),
            mtime: Some(mtime),
            ..SetAttr::default()
        };
        let changed = self.volume.setattr(ino, &change);
        changed.map(|_| ()).map_err(|error| Failure::inside(place, &error))
    }

    /// Attributes that this user cannot read, or the volume does not take, are left out with a word.
    fn xattrs(&mut self, source: &Path, ino: u64) -> Outcome {
        let mut list = vec![0; 65_536];
        let list_bytes = match llistxattr(source, &mut list) {
            Ok(list_bytes) => list_bytes,
            // There are none on this file system.
            Err(Errno::OPNOTSUPP) => return Ok(()),
            Err(error) => {
                let failure = Failure::host(source, &error.into());
                return self.tally.go_on(Err(failure.with_remark("without its attributes")));
            }
        };
        let mut value = vec![0; 65_536];
        for name in list[..list_bytes].split(|&byte| byte == 0).filter(|name| !name.is_empty()) {
            let Ok(c_name) = CString::new(name) else { continue };
            let stored = lgetxattr(source, c_name.as_c_str(), &mut value)
                .map_err(|error| error.to_string())
                .and_then(|bytes| {
                    self.volume
                        .setxattr(ino, name, &value[..bytes], XattrMode::Set)
                        .map_err(|error| error.to_string())
                });
            if let Err(error) = stored {
                let name = String::from_utf8_lossy(name);
                self.tally.skip(source.display(), format!("attribute {name}: {error}"));
            }
        }
        Ok(())
    }
}

/// Reads at `offset`; from a FIFO or terminal, which has no places, what comes next.
fn read(mut from: &File, buffer: &mut [u8], offset: u64) -> std::io::Result<usize> {
    loop {
        let read = match from.read_at(buffer, offset) {
            Err(error) if error.kind() == ErrorKind::NotSeekable => from.read(buffer),
            read => read,
        };
        match read {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            read => return read,
        }
    }
}

/// Writes all of `data`: a write stops early where space ends. The error comes with how many bytes
/// were written before it.
fn write_all(file: &weir::File, offset: u64, data: &[u8]) -> Result<(), (u64, Error)> {
    let mut written = 0;
    while written < data.len() {
        match file.write_at(offset + written as u64, &data[written..]) {
            Ok(0) => return Err((written as u64, Error::NoSpace)),
            Ok(more) => written += more,
            Err(error) => return Err((written as u64, error)),
        }
    }
    Ok(())
}

/// Flags of a plain `setxattr`.
pub(super) const ANY: XattrFlags = XattrFlags::empty();
