//! What each operation does to the model.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use weir::{AllocateMode, AtimePolicy, FileType, OpenFlags, RenameMode, XattrMode};

use super::space::{INLINE_BYTES, Room, blocks_of};
use super::times::Span;
use super::{Body, Errno, Ino, Inode, MAX_NAME_BYTES, MAX_SYMLINKS, Model, ROOT, Slot, errno};
use crate::image::BLOCK_BYTES;
use crate::model::data::FileData;
use crate::op::{Op, Target, parent};
use crate::pattern;

const MAX_FILE_BYTES: u64 = i64::MAX as u64;

/// What a successful operation answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing but success.
    Done,
    /// Bytes written or copied.
    Count(u64),
    /// Bytes read.
    Data(Vec<u8>),
}

/// The data of a file that takes another one's name is in the log before that if it is no more than what one operation carries, with the
/// log that simulated volumes have (`Capabilities::max_log_payload_bytes`).
const RENAME_SETTLES_BYTES: u64 = 14 * 4096;

/// The last component of a path.
fn name_of(path: &str) -> Result<&str, Errno> {
    let name = path.rsplit('/').next().unwrap_or("");
    match name.len() {
        0 => Err(errno::EINVAL),
        length if length > MAX_NAME_BYTES => Err(errno::ENAMETOOLONG),
        _ => Ok(name),
    }
}

impl Model {
    /// Applies `op`. `granted` limits a write or copy to what the engine says it has done (a short
    /// write when space runs out).
    ///
    /// # Errors
    /// What POSIX prescribes; the model is then as before.
    pub fn apply(&mut self, op: &Op, granted: Option<u64>) -> Result<Outcome, Errno> {
        self.step += 1;
        self.perform(op, granted)
    }

    /// The parts one after the other, as one operation; what they write is settled with it.
    fn batch(&mut self, parts: &[Op]) -> Result<(), Errno> {
        let before = self.clone();
        let size = |(ino, inode): (Ino, &Arc<Inode>)| Some((ino, inode.data()?.size));
        self.sizes_before = Some(self.inodes().filter_map(size).collect());
        for part in parts {
            let performed = match part {
                // Of what others have written before, a batch settles nothing.
                Op::Rename { from, to, mode } => self.rename(from, to, *mode),
                part => self.perform(part, None).map(|_| ()),
            };
            if let Err(error) = performed {
                *self = before;
                return Err(error);
            }
            self.settle_write(part);
        }
        self.sizes_before = None;
        Ok(())
    }

    fn settle_write(&mut self, part: &Op) {
        if let Op::Write { target, offset, length, .. } = part
            && let Ok(ino) = self.target(target)
        {
            self.settle_data(ino, &(*offset..offset + length));
            if let Some(inode) = self.inodes.get_mut(&ino).filter(|_| *length > 0) {
                let inode = Arc::make_mut(inode);
                inode.mtime.settle();
                inode.ctime.settle();
            }
        }
    }

    fn perform(&mut self, op: &Op, granted: Option<u64>) -> Result<Outcome, Errno> {
        let limit = |length: u64| granted.map_or(length, |granted| granted.min(length));
        match op {
            Op::Create { path, permissions } => {
                let body = Body::File(Arc::default());
                self.add(path, FileType::Regular, *permissions, body)?;
            }
            Op::Mkdir { path } => {
                let body = Body::Directory { entries: BTreeMap::new(), parent: ROOT };
                self.add(path, FileType::Directory, 0o755, body)?;
            }
            Op::Symlink { path, target } => {
                self.add(path, FileType::Symlink, 0o777, Body::Symlink(target.clone()))?;
            }
            Op::Mknod { path, file_type, rdev } => {
                let ino = self.add(path, *file_type, 0o600, Body::Special)?;
                let is_device = matches!(file_type, FileType::CharDevice | FileType::BlockDevice);
                self.change(ino).rdev = if is_device { *rdev } else { 0 };
            }
            Op::Link { from, to } => {
                let ino = self.resolve(from)?;
                self.link(ino, to)?;
            }
            Op::LinkSlot { slot, path } => {
                let ino = self.target(&Target::Slot(*slot))?;
                self.link(ino, path)?;
            }
            Op::Unlink { path } => self.unlink(path)?,
            Op::Rmdir { path } => self.rmdir(path)?,
            Op::Rename { from, to, mode } => {
                let replacing = self.takes_the_name_of_a_file(from, to, *mode);
                self.rename(from, to, *mode)?;
                if let Some(ino) = replacing {
                    self.settle_data(ino, &(0..u64::MAX));
                }
            }
            Op::Write { target, offset, length, tag } => {
                let ino = self.file_to_write(target)?;
                return self.write(ino, *offset, limit(*length), *tag);
            }
            Op::Untorn { target, offset, length, tag } => {
                let ino = self.file_to_write(target)?;
                let written = limit(*length);
                let outcome = self.write(ino, *offset, written, *tag)?;
                if written == *length {
                    self.settle_data(ino, &(*offset..offset + length));
                }
                return Ok(outcome);
            }
            Op::HandOver { target, .. } => {
                self.file(target)?;
            }
            Op::Append { target, length, tag } => {
                let ino = self.file_to_write(target)?;
                let offset = self.inodes[&ino].data().map_or(0, |data| data.size);
                return self.write(ino, offset, limit(*length), *tag);
            }
            Op::Truncate { target, size } => {
                let ino = self.file_to_write(target)?;
                self.truncate(ino, *size);
            }
            Op::Allocate { target, mode, offset, length } => {
                self.allocate(target, *mode, *offset, *length)?;
            }
            Op::CopyRange { from, from_offset, to, to_offset, length } => {
                return self.copy(from, *from_offset, to, *to_offset, limit(*length));
            }
            Op::SetXattr { path, name, length, tag, mode } => {
                let ino = self.resolve(path)?;
                match (mode, self.inodes[&ino].xattrs.contains_key(name)) {
                    (XattrMode::Create, true) => return Err(errno::EEXIST),
                    (XattrMode::Replace, false) => return Err(errno::ENODATA),
                    _ => {}
                }
                let value = pattern::bytes(*tag, 0, *length);
                self.change(ino).xattrs.insert(name.clone(), value);
            }
            Op::RemoveXattr { path, name } => {
                let ino = self.resolve(path)?;
                if !self.inodes[&ino].xattrs.contains_key(name) {
                    return Err(errno::ENODATA);
                }
                self.change(ino).xattrs.remove(name);
            }
            Op::Chmod { path, permissions } => {
                let ino = self.resolve(path)?;
                self.change(ino).permissions = *permissions;
            }
            Op::Chown { path, uid, gid } => {
                let ino = self.resolve(path)?;
                let inode = self.change(ino);
                (inode.uid, inode.gid) = (*uid, *gid);
            }
            Op::Utimens { path, atime, mtime } => {
                let (ino, step) = (self.resolve(path)?, self.step);
                let inode = self.change(ino);
                inode.atime.set(Span::exactly(*atime), step);
                inode.mtime.set(Span::exactly(*mtime), step);
            }
            Op::Open { path, slot } => {
                // As the call does; mostly such a link leads nowhere, but what it names may have been made through it.
                let ino = self.resolve(&self.followed(path)?)?;
                self.require_file(ino)?;
                self.set_slot(*slot, Some(Slot { ino, writes: true, syncs: false }));
            }
            Op::OpenWith { path, slot, flags } => self.open_with(path, *slot, *flags)?,
            Op::Hold { path, slot } => {
                let ino = self.resolve(path)?;
                self.set_slot(*slot, Some(Slot { ino, writes: true, syncs: false }));
            }
            Op::Close { slot } => {
                self.target(&Target::Slot(*slot))?;
                self.set_slot(*slot, None);
            }
            Op::TmpFile { dir, slot } => {
                let directory = self.resolve(dir)?;
                self.inodes[&directory].entries().ok_or(errno::ENOTDIR)?;
                let ino = self.new_inode(FileType::Regular, 0o600, Body::File(Arc::default()));
                let inode = self.change(ino);
                (inode.names, inode.linkable) = (0, true);
                self.set_slot(*slot, Some(Slot { ino, writes: true, syncs: false }));
            }
            Op::Read { target, offset, length } => {
                let ino = self.file(target)?;
                let data = self.inodes[&ino].data().map(|data| data.read(*offset, *length));
                let data = data.unwrap_or_default();
                if !data.is_empty() {
                    self.note_read(ino);
                }
                return Ok(Outcome::Data(data));
            }
            Op::Batch { parts, .. } => self.batch(parts)?,
            Op::Overlap { outer, inner, .. } => {
                // Each is an operation of its own: this is for those who only want to know what comes of it.
                for op in std::iter::once(&**outer).chain(inner) {
                    let _ = self.perform(op, None);
                }
            }
            Op::Sync(sync) | Op::Submit { sync, .. } => {
                if let Some(target) = sync.target() {
                    self.target(target)?;
                }
            }
            Op::Barrier { target } => {
                let files = match target {
                    Some(target) => vec![self.file_to_write(target)?],
                    None => self.inodes.keys().copied().collect(),
                };
                for ino in files {
                    self.settle_data(ino, &(0..u64::MAX));
                }
            }
            Op::WaitDurable
            | Op::Checkpoint
            | Op::Background { .. }
            | Op::Writeback
            | Op::Advance { .. } => {}
        }
        Ok(Outcome::Done)
    }

    /// The states in the middle of `op`, if it has any and would succeed. They count as the state before:
    /// nothing acknowledges them.
    pub fn half_way(&self, op: &Op) -> Vec<Self> {
        if let Op::Untorn { target, .. } = op {
            return self.only_the_time_of(op, target).into_iter().collect();
        }
        if Self::clone(self).apply(op, None).is_err() {
            return Vec::new();
        }
        let mut halves = Vec::new();
        for step in op.steps() {
            let mut half = halves.last().unwrap_or(self).clone();
            if half.apply(&step, None).is_ok() {
                half.step = self.step;
                halves.push(half);
            }
        }
        halves.extend(self.out_of_its_inode(op));
        halves
    }

    /// A checkpoint may log when a write was made before the log has what was written: that comes with the sync.
    fn only_the_time_of(&self, write: &Op, target: &Target) -> Option<Self> {
        Self::clone(self).apply(write, None).ok()?;
        let mut half = self.clone();
        let (ino, now, step) = (half.target(target).ok()?, half.clock, half.step);
        let inode = Arc::make_mut(half.inodes.get_mut(&ino)?);
        inode.mtime.may_set(now, step);
        inode.ctime.may_set(now, step);
        Some(half)
    }

    /// Before ranges of a small file move, its page gets a block.
    fn out_of_its_inode(&self, op: &Op) -> Option<Self> {
        use AllocateMode::{CollapseRange, InsertRange};
        let Op::Allocate { target, mode: CollapseRange | InsertRange, offset: 0, .. } = op else {
            return None;
        };
        let mut half = self.clone();
        let ino = half.target(target).ok()?;
        half.leave_inode(ino);
        Some(half)
    }

    fn leave_inode(&mut self, ino: Ino) {
        let step = self.step;
        if let Some(inode) = self.inodes.get_mut(&ino)
            && let Body::File(data) = &mut Arc::make_mut(inode).body
        {
            let data = Arc::make_mut(data);
            if data.size <= INLINE_BYTES {
                data.keep(step, 0..1);
            } else if data.was_small && data.pages.get(&0).is_some_and(|page| !page.is_kept()) {
                // It may be there since the file was small.
                data.surplus += 1;
            }
        }
    }

    /// `op`, which allocates, has failed: some of it may have been done, of which nobody can read anything.
    pub fn doubt_allocation(&mut self, op: &Op) {
        let Op::Allocate { target, offset, length, .. } = op else { return };
        let Ok(ino) = self.file(target) else { return };
        let (now, step) = (self.clock, self.step);
        let pages = blocks_of(*offset, offset + length);
        let Some(inode) = self.inodes.get_mut(&ino) else { return };
        let inode = Arc::make_mut(inode);
        inode.ctime.may_set(now, step);
        inode.mtime.may_set(now, step);
        if let Body::File(data) = &mut inode.body {
            Arc::make_mut(data).doubt(pages);
        }
    }

    fn change(&mut self, ino: Ino) -> &mut Inode {
        let (step, now) = (self.step, self.clock);
        let inode = self.inodes.entry(ino).or_insert_with(|| {
            Arc::new(Inode::new(FileType::Regular, 0, Body::Special, (step, now)))
        });
        let inode = Arc::make_mut(inode);
        inode.touched = step;
        inode.changed = step;
        inode.ctime.set(now, step);
        // The log has all attributes.
        inode.atime.settle();
        inode
    }

    /// The contents change, in an operation with its place in the order.
    fn change_data(&mut self, ino: Ino, change: impl FnOnce(u64, &mut FileData)) {
        let (step, now) = (self.step, self.clock);
        let inode = self.change(ino);
        inode.data_touched = step;
        inode.shaped = step;
        inode.mtime.set(now, step);
        if let Body::File(data) = &mut inode.body {
            change(step, Arc::make_mut(data));
        }
    }

    /// As [`Self::change_data`], for what may turn out to change nothing that a user sees but times: then it
    /// does not have to be made durable either.
    fn reshape(&mut self, ino: Ino, change: impl FnOnce(u64, &mut FileData)) {
        let before = Arc::clone(&self.inodes[&ino]);
        let fingerprint = |inode: &Inode| inode.data().map(|data| data.fingerprint());
        self.change_data(ino, change);
        if fingerprint(&before) == fingerprint(&self.inodes[&ino])
            && let Some(inode) = self.inodes.get_mut(&ino)
        {
            let inode = Arc::make_mut(inode);
            (inode.touched, inode.data_touched) = (before.touched, before.data_touched);
            (inode.changed, inode.shaped) = (before.changed, before.shaped);
        }
    }

    /// A write: what a sync of another range need not cover. Its times are in memory.
    fn write_data(&mut self, ino: Ino, offset: u64, bytes: &[u8]) {
        let (step, now) = (self.step, self.clock);
        let Some(inode) = self.inodes.get_mut(&ino) else { return };
        let inode = Arc::make_mut(inode);
        (inode.touched, inode.data_touched) = (step, step);
        inode.mtime.set_in_memory(now, step);
        inode.ctime.set_in_memory(now, step);
        if let Body::File(data) = &mut inode.body {
            Arc::make_mut(data).write(step, offset, bytes);
        }
    }

    /// Blocks for all of these pages. Where there are all, nothing happens, and no time moves.
    fn allocate_blocks(&mut self, ino: Ino, pages: Range<u64>) {
        let (step, now) = (self.step, self.clock);
        let Some(inode) = self.inodes.get_mut(&ino) else { return };
        let Some(room) = inode.data().map(|data| data.room(pages.clone())) else { return };
        if room == Room::All {
            return;
        }
        let inode = Arc::make_mut(inode);
        if room == Room::Missing {
            (inode.touched, inode.data_touched) = (step, step);
            (inode.changed, inode.shaped) = (step, step);
            inode.ctime.set(now, step);
        } else {
            // What holds data may be home already: then there is nothing to do.
            inode.ctime.may_set(now, step);
        }
        if let Body::File(data) = &mut inode.body {
            Arc::make_mut(data).keep(step, pages);
        }
    }

    /// A smaller size, or the same, gives back what was allocated behind the end; in a batch, one that is smaller than before it.
    fn truncate(&mut self, ino: Ino, size: u64) {
        let before = self.sizes_before.as_ref().and_then(|sizes| sizes.get(&ino).copied());
        let now = self.inodes[&ino].data().map_or(0, |data| data.size);
        let gives_back = before.map_or(size <= now, |before| size < before);
        self.reshape(ino, |step, data| data.truncate(step, size, gives_back));
    }

    fn note_read(&mut self, ino: Ino) {
        let (step, now, policy) = (self.step, self.clock, self.atime);
        let Some(inode) = self.inodes.get_mut(&ino) else { return };
        match policy {
            AtimePolicy::Never => {}
            AtimePolicy::Strict => Arc::make_mut(inode).atime.set_in_memory(now, step),
            AtimePolicy::Relative => Arc::make_mut(inode).atime.may_set(now, step),
        }
    }

    /// Opens a file as the flags say; a symbolic link at the end is followed, unless the file has to be a new one.
    fn open_with(&mut self, path: &str, slot: u8, flags: OpenFlags) -> Result<(), Errno> {
        if flags.truncate && !flags.write {
            return Err(errno::EINVAL);
        }
        let must_be_new = flags.create && flags.exclusive;
        let path = if must_be_new { path.to_owned() } else { self.followed(path)? };
        // Where a link leads may be no name.
        name_of(&path)?;
        let (ino, is_new) = match self.resolve(&path) {
            Ok(_) if must_be_new => return Err(errno::EEXIST),
            Ok(ino) => (ino, false),
            Err(errno::ENOENT) if flags.create => {
                let body = Body::File(Arc::default());
                (self.add(&path, FileType::Regular, flags.permissions, body)?, true)
            }
            Err(error) => return Err(error),
        };
        self.require_file(ino)?;
        // An empty one, too: its times move.
        if flags.truncate && !is_new {
            self.truncate(ino, 0);
        }
        let opened = Slot { ino, writes: flags.write, syncs: flags.data_sync };
        self.set_slot(slot, Some(opened));
        Ok(())
    }

    /// Where a path leads if symbolic links at its end are followed.
    fn followed(&self, path: &str) -> Result<String, Errno> {
        let mut path = path.to_owned();
        for _ in 0..MAX_SYMLINKS {
            let found = self.resolve(&path).ok().map(|ino| &self.inodes[&ino].body);
            let Some(Body::Symlink(target)) = found else { return Ok(path) };
            path = format!("{}/{target}", parent(&path));
        }
        Err(errno::ELOOP)
    }

    /// From this place in the order on, part of a file is as it is now.
    fn settle_data(&mut self, ino: Ino, range: &Range<u64>) {
        let Some(data) = self.inodes[&ino].data() else { return };
        if !data.is_settled(range) {
            let mut data = FileData::clone(data);
            data.settle(range);
            self.settle(ino, &Arc::new(data));
        }
    }

    fn change_entries(&mut self, directory: Ino, change: impl FnOnce(&mut BTreeMap<String, Ino>)) {
        let (step, now) = (self.step, self.clock);
        let inode = self.change(directory);
        inode.mtime.set(now, step);
        if let Body::Directory { entries, .. } = &mut inode.body {
            change(entries);
        }
    }

    fn new_inode(&mut self, file_type: FileType, permissions: u32, body: Body) -> Ino {
        let ino = self.next_ino;
        self.next_ino += 1;
        let made = (self.step, self.clock);
        self.inodes.insert(ino, Arc::new(Inode::new(file_type, permissions, body, made)));
        ino
    }

    fn directory_of(&self, path: &str) -> Result<Ino, Errno> {
        let directory = self.parent_of(path)?;
        self.inodes[&directory].entries().ok_or(errno::ENOTDIR)?;
        Ok(directory)
    }

    fn entry(&self, directory: Ino, name: &str) -> Option<Ino> {
        self.inodes[&directory].entries()?.get(name).copied()
    }

    fn require_file(&self, ino: Ino) -> Result<(), Errno> {
        match self.inode(ino).map(|inode| inode.file_type) {
            Some(FileType::Regular) => Ok(()),
            Some(FileType::Directory) => Err(errno::EISDIR),
            Some(_) => Err(errno::EINVAL),
            // A directory that was removed while it was held.
            None => Err(errno::ENOENT),
        }
    }

    pub(super) fn file(&self, target: &Target) -> Result<Ino, Errno> {
        let ino = self.target(target)?;
        self.require_file(ino)?;
        Ok(ino)
    }

    fn add(
        &mut self,
        path: &str,
        file_type: FileType,
        permissions: u32,
        mut body: Body,
    ) -> Result<Ino, Errno> {
        let directory = self.directory_of(path)?;
        let name = name_of(path)?;
        if self.entry(directory, name).is_some() {
            return Err(errno::EEXIST);
        }
        if self.inodes[&directory].names == 0 {
            return Err(errno::ENOENT);
        }
        if let Body::Directory { parent, .. } = &mut body {
            *parent = directory;
        }
        let ino = self.new_inode(file_type, permissions, body);
        self.change_entries(directory, |entries| {
            entries.insert(name.to_owned(), ino);
        });
        Ok(ino)
    }

    fn link(&mut self, ino: Ino, to: &str) -> Result<(), Errno> {
        let directory = self.directory_of(to)?;
        let name = name_of(to)?;
        if self.inode(ino).is_none_or(|inode| inode.entries().is_some()) {
            return Err(errno::EPERM);
        }
        if self.entry(directory, name).is_some() {
            return Err(errno::EEXIST);
        }
        if self.inodes[&ino].names == 0 && !self.inodes[&ino].linkable {
            return Err(errno::ENOENT);
        }
        let inode = self.change(ino);
        inode.names += 1;
        inode.linkable = false;
        self.change_entries(directory, |entries| {
            entries.insert(name.to_owned(), ino);
        });
        Ok(())
    }

    fn unlink(&mut self, path: &str) -> Result<(), Errno> {
        let directory = self.directory_of(path)?;
        let name = name_of(path)?;
        let ino = self.entry(directory, name).ok_or(errno::ENOENT)?;
        if self.inodes[&ino].entries().is_some() {
            return Err(errno::EISDIR);
        }
        self.change_entries(directory, |entries| {
            entries.remove(name);
        });
        self.drop_name(ino);
        Ok(())
    }

    fn drop_name(&mut self, ino: Ino) {
        self.change(ino).names -= 1;
        self.drop_if_unused(ino);
    }

    fn rmdir(&mut self, path: &str) -> Result<(), Errno> {
        let directory = self.directory_of(path)?;
        let name = name_of(path)?;
        let ino = self.entry(directory, name).ok_or(errno::ENOENT)?;
        let entries = self.inodes[&ino].entries().ok_or(errno::ENOTDIR)?;
        if !entries.is_empty() {
            return Err(errno::ENOTEMPTY);
        }
        self.change_entries(directory, |entries| {
            entries.remove(name);
        });
        self.inodes.remove(&ino);
        Ok(())
    }

    /// `ino` is `directory`, or lies above it.
    fn is_ancestor(&self, ino: Ino, mut directory: Ino) -> bool {
        loop {
            if directory == ino {
                return true;
            }
            match &self.inodes[&directory].body {
                Body::Directory { parent, .. } if *parent != directory => directory = *parent,
                _ => return false,
            }
        }
    }

    /// The file that a rename puts in the place of another one, if it is small: its data comes before the rename.
    fn takes_the_name_of_a_file(&self, from: &str, to: &str, mode: RenameMode) -> Option<Ino> {
        let file = |path: &str| {
            let ino = self.entry(self.directory_of(path).ok()?, name_of(path).ok()?)?;
            Some((ino, self.inodes[&ino].data()?.size))
        };
        let ((ino, size), (replaced, _)) = (file(from)?, file(to)?);
        let replaces = matches!(mode, RenameMode::Replace | RenameMode::Whiteout { .. });
        (replaces && ino != replaced && size <= RENAME_SETTLES_BYTES).then_some(ino)
    }

    fn rename(&mut self, from: &str, to: &str, mode: RenameMode) -> Result<(), Errno> {
        let (from_directory, to_directory) = (self.directory_of(from)?, self.directory_of(to)?);
        let (from_name, to_name) = (name_of(from)?, name_of(to)?);
        let ino = self.entry(from_directory, from_name).ok_or(errno::ENOENT)?;
        let replaced = self.entry(to_directory, to_name);
        if self.is_ancestor(ino, to_directory) {
            return Err(errno::EINVAL);
        }
        match (mode, replaced) {
            (RenameMode::NoReplace, Some(_)) => return Err(errno::EEXIST),
            (RenameMode::Exchange, None) => return Err(errno::ENOENT),
            (RenameMode::Exchange, Some(other)) => {
                if self.is_ancestor(other, from_directory) {
                    return Err(errno::EINVAL);
                }
                if other != ino {
                    self.move_entry(ino, to_directory, to_name);
                    self.move_entry(other, from_directory, from_name);
                }
                return Ok(());
            }
            (_, Some(other)) if other == ino => return Ok(()),
            (_, Some(other)) => self.check_replace(ino, other)?,
            (_, None) => {}
        }
        self.change_entries(from_directory, |entries| {
            entries.remove(from_name);
        });
        self.move_entry(ino, to_directory, to_name);
        if let RenameMode::Whiteout { uid, gid } = mode {
            let left = self.new_inode(FileType::CharDevice, 0, Body::Special);
            let inode = self.change(left);
            (inode.uid, inode.gid) = (uid, gid);
            self.change_entries(from_directory, |entries| {
                entries.insert(from_name.to_owned(), left);
            });
        }
        if let Some(other) = replaced {
            if self.inodes[&other].entries().is_some() {
                self.inodes.remove(&other);
            } else {
                self.drop_name(other);
            }
        }
        Ok(())
    }

    fn check_replace(&self, ino: Ino, other: Ino) -> Result<(), Errno> {
        match (self.inodes[&ino].entries(), self.inodes[&other].entries()) {
            (Some(_), Some(entries)) if !entries.is_empty() => Err(errno::ENOTEMPTY),
            (Some(_), None) => Err(errno::ENOTDIR),
            (None, Some(_)) => Err(errno::EISDIR),
            _ => Ok(()),
        }
    }

    fn move_entry(&mut self, ino: Ino, directory: Ino, name: &str) {
        self.change_entries(directory, |entries| {
            entries.insert(name.to_owned(), ino);
        });
        if let Body::Directory { parent, .. } = &mut self.change(ino).body {
            *parent = directory;
        }
    }

    fn write(&mut self, ino: Ino, offset: u64, length: u64, tag: u32) -> Result<Outcome, Errno> {
        if offset.saturating_add(length) > MAX_FILE_BYTES {
            return Err(errno::EFBIG);
        }
        if length > 0 {
            let bytes = pattern::bytes(tag, offset, length);
            self.write_data(ino, offset, &bytes);
        }
        Ok(Outcome::Count(length))
    }

    fn copy(
        &mut self,
        from: &Target,
        from_offset: u64,
        to: &Target,
        to_offset: u64,
        length: u64,
    ) -> Result<Outcome, Errno> {
        let source = self.file(from)?;
        let ino = self.file_to_write(to)?;
        if source == ino
            && from_offset < to_offset.saturating_add(length)
            && to_offset < from_offset.saturating_add(length)
        {
            return Err(errno::EINVAL);
        }
        let bytes = self.inodes[&source].data().map(|data| data.read(from_offset, length));
        let bytes = bytes.unwrap_or_default();
        if !bytes.is_empty() {
            self.write_data(ino, to_offset, &bytes);
        }
        Ok(Outcome::Count(bytes.len() as u64))
    }

    fn allocate(
        &mut self,
        target: &Target,
        mode: AllocateMode,
        offset: u64,
        length: u64,
    ) -> Result<(), Errno> {
        let ino = self.file_to_write(target)?;
        let size = self.inodes[&ino].data().map_or(0, |data| data.size);
        let end = offset.checked_add(length).ok_or(errno::EFBIG)?;
        let aligned = (offset | length).is_multiple_of(BLOCK_BYTES as u64);
        let shifts = matches!(mode, AllocateMode::CollapseRange | AllocateMode::InsertRange);
        let beyond = match mode {
            AllocateMode::CollapseRange => end >= size,
            AllocateMode::InsertRange => offset >= size,
            _ => false,
        };
        if length == 0 || shifts && (!aligned || beyond) {
            return Err(errno::EINVAL);
        }
        let pages = blocks_of(offset, end);
        // Behind the end of the file there is nothing to keep of a block.
        let hole_end = if end >= size { pages.end * BLOCK_BYTES as u64 } else { end };
        if shifts && offset == 0 {
            self.leave_inode(ino);
        }
        match mode {
            AllocateMode::Extend | AllocateMode::KeepSize => {
                self.allocate_blocks(ino, pages);
                if mode == AllocateMode::Extend && end > size {
                    self.reshape(ino, |step, data| data.grow(step, end));
                }
            }
            AllocateMode::PunchHole => {
                self.reshape(ino, |step, data| data.zero(step, offset, hole_end));
            }
            AllocateMode::ZeroRange | AllocateMode::ZeroRangeKeepSize => {
                self.reshape(ino, |step, data| {
                    data.zero(step, offset, hole_end);
                    data.keep(step, pages);
                    if mode == AllocateMode::ZeroRange {
                        data.grow(step, end);
                    }
                });
            }
            AllocateMode::CollapseRange => {
                self.reshape(ino, |step, data| data.collapse(step, offset, end));
            }
            AllocateMode::InsertRange => {
                self.reshape(ino, |step, data| data.insert(step, offset, length));
            }
        }
        Ok(())
    }
}
