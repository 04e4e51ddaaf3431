//! From a volume to the host.

use std::collections::HashMap;
use std::ffi::{CString, OsStr};
use std::fs::{self, DirBuilder, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, Gid, Mode, Timespec, Timestamps, Uid, lsetxattr, makedev, mknodat, utimensat,
};
use weir::{Attr, Error, FileType, Timestamp, Volume};

use super::output::{Output, make_room};
use super::to_volume::ANY;
use super::{CHUNK_BYTES, Tally};
use crate::failure::{Failure, Outcome};
use crate::place::Place;
use crate::show::device_numbers;

struct Copier<'a> {
    volume: &'a Volume,
    tally: &'a mut Tally,
    /// A file that is replaced gets the attributes of its copy; else it keeps its mode and owner.
    recursive: bool,
    /// Host paths made for inodes with several names.
    linked: HashMap<u64, PathBuf>,
    buffer: Vec<u8>,
}

/// Copies `place` to `destination`, or below it if that is a directory.
pub(super) fn copy(
    volume: &Volume,
    place: &Place,
    destination: &Path,
    recursive: bool,
    tally: &mut Tally,
) -> Outcome {
    // As with cp(1), a link is followed that is named, and copied where a tree is.
    let attr = if recursive && !place.must_be_directory {
        volume.symlink_metadata(&place.path)
    } else {
        volume.metadata(&place.path)
    };
    let attr = attr.map_err(|error| Failure::inside(place, &error))?;
    if attr.file_type == FileType::Directory && !recursive {
        return Err(Failure::new(place, "is a directory: add -r to copy it"));
    }
    if place.must_be_directory && attr.file_type != FileType::Directory {
        return Err(Failure::inside(place, &Error::NotDirectory));
    }
    let buffer = vec![0; CHUNK_BYTES];
    let mut copier = Copier { volume, tally, recursive, linked: HashMap::new(), buffer };
    let target = match place.name() {
        Some(name) if destination.is_dir() => destination.join(OsStr::from_bytes(name)),
        _ => destination.to_owned(),
    };
    copier.entry(&attr, place, &target)
}

fn timespec(time: Timestamp) -> Timespec {
    Timespec { tv_sec: time.seconds, tv_nsec: time.nanoseconds.into() }
}

impl Copier<'_> {
    fn entry(&mut self, attr: &Attr, place: &Place, target: &Path) -> Outcome {
        let host = |error: std::io::Error| Failure::host(target, &error);
        let several_names = attr.file_type != FileType::Directory && attr.links > 1;
        if self.tally.made_links.contains(target) {
            return Err(Failure::new(
                target.display(),
                "a link that this copy has just made: not written through: copy one by one",
            ));
        }
        if let Some(first) = self.linked.get(&attr.ino).filter(|_| several_names) {
            make_room(target)?;
            return fs::hard_link(first, target).map_err(host);
        }
        match attr.file_type {
            FileType::Regular => {
                if !self.contents(attr, place, target)? {
                    return Ok(());
                }
            }
            FileType::Directory => {
                // For us alone until it has its attributes, as files are: what is below may not be for everybody's eyes.
                match DirBuilder::new().mode(0o700).create(target) {
                    Err(error) if target.is_dir() => drop(error),
                    made => made.map_err(host)?,
                }
                self.directory(attr, place, target)?;
            }
            FileType::Symlink => {
                let link = self.volume.readlink(attr.ino);
                let link = link.map_err(|error| Failure::inside(place, &error))?;
                make_room(target)?;
                symlink(OsStr::from_bytes(&link), target).map_err(host)?;
                self.tally.made_links.insert(target.to_owned());
            }
            FileType::Fifo | FileType::Socket | FileType::CharDevice | FileType::BlockDevice => {
                make_room(target)?;
                if !self.special(attr, target) {
                    return Ok(());
                }
            }
        }
        if several_names {
            self.linked.insert(attr.ino, target.to_owned());
        }
        self.tally.files += 1;
        if attr.file_type == FileType::Regular {
            return Ok(());
        }
        self.attributes(attr, target, None)
    }

    fn directory(&mut self, attr: &Attr, place: &Place, target: &Path) -> Outcome {
        let mut entries = Vec::new();
        let listed = self.volume.readdir(attr.ino, 0, &mut |entry| {
            entries.push(entry);
            true
        });
        listed.map_err(|error| Failure::inside(place, &error))?;
        for entry in entries {
            let below = place.join(&entry.name);
            self.tally.progress.message(below.to_string());
            match self.volume.getattr(entry.ino) {
                Ok(attr) => {
                    self.entry(&attr, &below, &target.join(OsStr::from_bytes(&entry.name)))?;
                }
                Err(error) => self.tally.skip(below, error),
            }
        }
        Ok(())
    }

    /// Copies a file with its attributes; false (and a word) if it cannot be read to its end.
    fn contents(&mut self, attr: &Attr, place: &Place, target: &Path) -> Outcome<bool> {
        let mut output = Output::open(target)?;
        if let Err(cut_off) = self.data(attr, place, &mut output)? {
            self.tally.skip(place, cut_off);
            return Ok(false);
        }
        output.finish(attr.size_bytes)?;
        if let Some(path) = output.with_attributes() {
            let kept = output.replaced.as_ref().filter(|_| !self.recursive);
            self.attributes(attr, path, kept)?;
        }
        output.complete()?;
        Ok(true)
    }

    /// Copies what is data and leaves holes as they are. The inner error: what cannot be read.
    fn data(
        &mut self,
        attr: &Attr,
        place: &Place,
        output: &mut Output,
    ) -> Outcome<Result<(), String>> {
        let fail = |error: Error| Failure::inside(place, &error);
        let file = self.volume.open_inode(attr.ino, false).map_err(fail)?;
        let mut offset = 0;
        while offset < attr.size_bytes {
            let range = file.seek_data(offset).and_then(|data| Ok((data, file.seek_hole(data)?)));
            let (data, end) = match range {
                Ok(range) => range,
                Err(Error::NoSuchExtent) => break,
                Err(error) => return Err(fail(error)),
            };
            offset = data;
            while offset < end {
                let wanted = (end - offset).min(CHUNK_BYTES as u64) as usize;
                let buffer = &mut self.buffer[..wanted];
                let read_bytes = match file.read_at(offset, buffer) {
                    Ok(0) => return Ok(Err(format!("at byte {offset}: nothing to read"))),
                    Ok(read_bytes) => read_bytes,
                    Err(error) => return Ok(Err(format!("at byte {offset}: {error}"))),
                };
                output.write(offset, &buffer[..read_bytes])?;
                self.tally.count_bytes(read_bytes);
                offset += read_bytes as u64;
            }
        }
        Ok(Ok(()))
    }

    /// Makes a fifo, socket or device node; false (and a word) where this user may not.
    fn special(&mut self, attr: &Attr, target: &Path) -> bool {
        let (major, minor) = device_numbers(attr.rdev);
        let file_type = rustix::fs::FileType::from_raw_mode(attr.file_type.mode_bits());
        let mode = Mode::from_raw_mode(attr.permissions & 0o777);
        match mknodat(CWD, target, file_type, mode, makedev(major, minor)) {
            Ok(()) => true,
            Err(error) => {
                self.tally.skip(target.display(), error);
                false
            }
        }
    }

    /// Gives `target` the attributes of the file that it is a copy of; mode and owner are those of
    /// `kept`, if that is given.
    fn attributes(&mut self, attr: &Attr, target: &Path, kept: Option<&Metadata>) -> Outcome {
        let host = |error: std::io::Error| Failure::host(target, &error);
        let (uid, gid, permissions) = match kept {
            Some(meta) => (meta.uid(), meta.gid(), meta.mode()),
            None => (attr.uid, attr.gid, attr.permissions),
        };
        let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
        let owned =
            rustix::fs::chownat(CWD, target, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
                .is_ok();
        if attr.file_type != FileType::Symlink {
            // Without the owner, set-user-id would lend the wrong identity.
            let lent = if owned { 0o7777 } else { 0o1777 };
            let mode = fs::Permissions::from_mode(permissions & lent);
            fs::set_permissions(target, mode).map_err(host)?;
        }
        if kept.is_none() {
            self.xattrs(attr.ino, target);
        }
        let times = Timestamps {
            last_access: timespec(attr.atime),
            last_modification: timespec(attr.mtime),
        };
        utimensat(CWD, target, &times, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|error| host(error.into()))
    }

    fn xattrs(&mut self, ino: u64, target: &Path) {
        for name in self.volume.listxattr(ino).unwrap_or_default() {
            let stored =
                self.volume.getxattr(ino, &name).map_err(|error| error.to_string()).and_then(
                    |value| {
                        let name = CString::new(name.clone()).map_err(|error| error.to_string())?;
                        lsetxattr(target, name.as_c_str(), &value, ANY)
                            .map_err(|error| error.to_string())
                    },
                );
            if let Err(error) = stored {
                let name = String::from_utf8_lossy(&name);
                self.tally.skip(target.display(), format!("attribute {name}: {error}"));
            }
        }
    }
}
