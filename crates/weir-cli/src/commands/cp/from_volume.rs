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
use rustix::io::Errno;
use weir::{Attr, Error, FileType, Timestamp, Volume};

use super::output::{Output, make_room};
use super::to_volume::ANY;
use super::{CHUNK_BYTES, Tally};
use crate::failure::{Failure, Outcome};
use crate::place::Place;
use crate::show::device_numbers;

/// Copies out of one volume.
pub(super) struct Copier<'a> {
    volume: &'a Volume,
    pub(super) tally: &'a mut Tally,
    /// A file that is replaced gets the attributes of its copy, else it keeps its mode and owner; and what is one file here is one there.
    recursive: bool,
    /// What was made on the host for inodes with several names: where, and as which file.
    linked: HashMap<u64, (PathBuf, (u64, u64))>,
    buffer: Vec<u8>,
}

fn timespec(time: Timestamp) -> Timespec {
    Timespec { tv_sec: time.seconds, tv_nsec: time.nanoseconds.into() }
}

/// Which file has this name, and no other that it may lead to.
fn named(path: &Path) -> Option<(u64, u64)> {
    path.symlink_metadata().ok().map(|meta| (meta.dev(), meta.ino()))
}

impl<'a> Copier<'a> {
    /// For copies out of `volume`.
    pub(super) fn new(volume: &'a Volume, recursive: bool, tally: &'a mut Tally) -> Self {
        let buffer = vec![0; CHUNK_BYTES];
        Self { volume, tally, recursive, linked: HashMap::new(), buffer }
    }

    /// Copies `place` to `destination`, or below it if that is a directory.
    pub(super) fn copy(&mut self, place: &Place, destination: &Path) -> Outcome {
        // As with cp(1), a link is followed that is named, and copied where a tree is.
        let attr = if self.recursive && !place.must_be_directory {
            self.volume.symlink_metadata(&place.path)
        } else {
            self.volume.metadata(&place.path)
        };
        let attr = attr.map_err(|error| Failure::inside(place, &error))?;
        if attr.file_type == FileType::Directory && !self.recursive {
            return Err(Failure::new(place, "is a directory: add -r to copy it"));
        }
        if place.must_be_directory && attr.file_type != FileType::Directory {
            return Err(Failure::inside(place, &Error::NotDirectory));
        }
        let target = match place.name() {
            Some(name) if destination.is_dir() => destination.join(OsStr::from_bytes(name)),
            _ => destination.to_owned(),
        };
        self.entry(&attr, place, &target)
    }

    fn entry(&mut self, attr: &Attr, place: &Place, target: &Path) -> Outcome {
        let host = |error: std::io::Error| Failure::host(target, &error);
        let is_directory = attr.file_type == FileType::Directory;
        let several_names = self.recursive && !is_directory && attr.links > 1;
        if self.tally.made_links.contains(target) {
            return Err(Failure::new(
                target.display(),
                "a link that this copy has just made: not written through: copy one by one",
            ));
        }
        if several_names && self.link(attr.ino, target)? {
            if attr.file_type == FileType::Symlink {
                self.tally.made_links.insert(target.to_owned());
            }
            self.tally.files += 1;
            return Ok(());
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
                if !self.special(attr, target)? {
                    return Ok(());
                }
            }
        }
        if several_names
            && let Some(file) = target.symlink_metadata().ok()
            // Where that is a link that was there already, or a device, what was written is behind it.
            && file.is_file() == (attr.file_type == FileType::Regular)
        {
            self.linked.insert(attr.ino, (target.to_owned(), (file.dev(), file.ino())));
        }
        self.tally.files += 1;
        if attr.file_type == FileType::Regular {
            return Ok(());
        }
        self.attributes(attr, (target, target), None)
    }

    /// One more name for what was copied before. False: there is no such copy, or something else has got its name since.
    fn link(&self, ino: u64, target: &Path) -> Outcome<bool> {
        let Some((first, file)) = self.linked.get(&ino) else { return Ok(false) };
        if named(first) != Some(*file) {
            return Ok(false);
        }
        if named(target) != Some(*file) {
            make_room(target)?;
            fs::hard_link(first, target).map_err(|error| Failure::host(target, &error))?;
        }
        Ok(true)
    }

    fn directory(&mut self, attr: &Attr, place: &Place, target: &Path) -> Outcome {
        let mut entries = Vec::new();
        let listed = self.volume.readdir(attr.ino, 0, &mut |entry| {
            entries.push(entry);
            true
        });
        // What it has named by then is copied.
        self.tally.go_on(listed.map_err(|error| Failure::inside(place, &error)))?;
        for entry in entries {
            let below = place.join(&entry.name);
            self.tally.progress.message(&below);
            let attr = self.volume.getattr(entry.ino);
            let copied = attr.map_err(|error| Failure::inside(&below, &error)).and_then(|attr| {
                self.entry(&attr, &below, &target.join(OsStr::from_bytes(&entry.name)))
            });
            self.tally.go_on(copied)?;
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
            self.attributes(attr, (path, target), kept)?;
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
    fn special(&mut self, attr: &Attr, target: &Path) -> Outcome<bool> {
        let (major, minor) = device_numbers(attr.rdev);
        let file_type = rustix::fs::FileType::from_raw_mode(attr.file_type.mode_bits());
        let mode = Mode::from_raw_mode(attr.permissions & 0o777);
        match mknodat(CWD, target, file_type, mode, makedev(major, minor)) {
            Ok(()) => Ok(true),
            Err(error) => {
                self.tally.go_on(Err(Failure::host(target, &error.into())))?;
                Ok(false)
            }
        }
    }

    /// Gives `target`, which will be called `shown`, the attributes of the file that it is a copy of;
    /// mode and owner are those of `kept`, if that is given.
    fn attributes(
        &mut self,
        attr: &Attr,
        (target, shown): (&Path, &Path),
        kept: Option<&Metadata>,
    ) -> Outcome {
        let host = |error: std::io::Error| Failure::host(shown, &error);
        let (uid, gid, permissions) = match kept {
            Some(meta) => (meta.uid(), meta.gid(), meta.mode()),
            None => (attr.uid, attr.gid, attr.permissions),
        };
        let owned = self.give((target, shown), Uid::from_raw(uid), Gid::from_raw(gid))?;
        if attr.file_type != FileType::Symlink {
            // Without the owner, set-user-id would lend the wrong identity.
            let lent = if owned { 0o7777 } else { 0o1777 };
            let mode = fs::Permissions::from_mode(permissions & lent);
            fs::set_permissions(target, mode).map_err(host)?;
        }
        if kept.is_none() {
            self.xattrs(attr.ino, target, shown)?;
        }
        let times = Timestamps {
            last_access: timespec(attr.atime),
            last_modification: timespec(attr.mtime),
        };
        utimensat(CWD, target, &times, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|error| host(error.into()))
    }

    /// Gives a copy its owner and group; false (and a word, in the end) where that is not for this user to do.
    fn give(&mut self, (target, shown): (&Path, &Path), uid: Uid, gid: Gid) -> Outcome<bool> {
        let give = |uid, gid| rustix::fs::chownat(CWD, target, uid, gid, AtFlags::SYMLINK_NOFOLLOW);
        match give(Some(uid), Some(gid)) {
            Ok(()) => Ok(true),
            // As with cp(1): nobody but root expects that, and its group is what they may give.
            Err(Errno::PERM | Errno::INVAL) if !rustix::process::geteuid().is_root() => {
                let _ = give(None, Some(gid));
                self.tally.owners_lost += 1;
                Ok(false)
            }
            Err(error) => {
                let failure = Failure::host(shown, &error.into());
                self.tally.go_on(Err(failure.with_remark("the owner is not kept")))?;
                Ok(false)
            }
        }
    }

    fn xattrs(&mut self, ino: u64, target: &Path, shown: &Path) -> Outcome {
        let names = match self.volume.listxattr(ino) {
            Ok(names) => names,
            Err(error) => {
                let failure = Failure::inside(shown.display(), &error);
                return self.tally.go_on(Err(failure.with_remark("without its attributes")));
            }
        };
        for name in names {
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
                self.tally.skip(shown.display(), format!("attribute {name}: {error}"));
            }
        }
        Ok(())
    }
}
