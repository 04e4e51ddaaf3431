//! What each operation on names does, given that the names were looked up: to the attributes of the inodes concerned, and to
//! the log. The same for a single call and for a step of a batch: both bring the attributes ([`Metas`]), and an
//! operation that takes the changes.
//!
//! A rule that refuses has changed attributes or not: the caller throws both away.

use super::entry::Found;
use crate::error::{Error, Result};
use crate::format::Key;
use crate::format::item::{Dirent, INODE_INLINE, InodeItem, MAX_LINKS};
use crate::inode::{Inode, Meta};
use crate::mutation::{self, Mutation};
use crate::sync::Arc;
use crate::txn::Op;
use crate::types::{FileType, NewInode, Timestamp};

/// The attributes of the inodes that an operation concerns.
pub trait Metas {
    /// Those of `inode`.
    fn of(&mut self, inode: &Inode) -> &mut Meta;
}

/// A directory and a name in it.
#[derive(Clone, Copy)]
pub struct Side<'a> {
    /// The directory.
    pub parent: &'a Arc<Inode>,
    /// The name.
    pub name: &'a [u8],
}

/// A name that moves.
#[derive(Clone, Copy)]
pub struct Move<'a> {
    /// From where.
    pub from: Side<'a>,
    /// The entry there.
    pub source: &'a Found,
    /// The inode that it names.
    pub moved: &'a Arc<Inode>,
    /// To where.
    pub to: Side<'a>,
    /// The entry's place there.
    pub place: Key,
    /// What was there before.
    pub victim: Option<&'a Arc<Inode>>,
    /// Number and attributes of a new inode that takes the old place.
    pub left: Option<(u64, &'a InodeItem)>,
}

/// Two names that swap what they name.
#[derive(Clone, Copy)]
pub struct Exchange<'a> {
    /// One of them.
    pub from: Side<'a>,
    /// Its entry.
    pub source: &'a Found,
    /// What that names.
    pub first: &'a Arc<Inode>,
    /// The other one.
    pub to: Side<'a>,
    /// Its entry.
    pub other: &'a Found,
    /// What that names.
    pub second: &'a Arc<Inode>,
}

/// The item of a new inode in a directory with the attributes `parent`.
pub fn new_item(
    (number, parent): (u64, &Meta),
    new: &NewInode,
    target_bytes: u64,
    now: Timestamp,
) -> InodeItem {
    let is_directory = new.file_type == FileType::Directory;
    let inherits_group = parent.item.permissions & 0o2000 != 0;
    let mut permissions = new.permissions & 0o7777;
    if inherits_group && is_directory {
        permissions |= 0o2000;
    }
    InodeItem {
        file_type: new.file_type,
        permissions,
        links: if is_directory { 2 } else { 1 },
        uid: new.uid,
        gid: if inherits_group { parent.item.gid } else { new.gid },
        size: target_bytes,
        blocks: 0,
        parent: if is_directory { number } else { 0 },
        change_counter: 1,
        atime: now,
        mtime: now,
        ctime: now,
        btime: now,
        rdev: match new.file_type {
            FileType::CharDevice | FileType::BlockDevice => new.rdev,
            _ => 0,
        },
        flags: if target_bytes > 0 { INODE_INLINE } else { 0 },
        subdirectories: 0,
    }
}

/// A new inode gets its first name, at `place`.
pub fn make(
    metas: &mut dyn Metas,
    op: &mut Op,
    (to, place): (Side<'_>, Key),
    (number, item): (u64, &InodeItem),
    target: Option<&[u8]>,
) -> Result<()> {
    op.inode_added();
    if item.file_type == FileType::Directory {
        op.directory_added(number);
    }
    op.put(Key::inode(number), &item.encode());
    if let Some(target) = target {
        op.put(Key::inline(number), target);
    }
    let entry = Dirent { inode: number, file_type: item.file_type, name: to.name };
    op.put(place, &entry.encode());
    let meta = metas.of(to.parent);
    if item.file_type == FileType::Directory {
        check_links(meta)?;
        meta.item.links += 1;
        meta.item.subdirectories += 1;
    }
    meta.item.size += 1;
    meta.touch_data(item.ctime);
    Ok(())
}

/// `inode` gets one more name, at `place`.
pub fn link(
    metas: &mut dyn Metas,
    op: &mut Op,
    (to, place): (Side<'_>, Key),
    inode: &Inode,
    now: Timestamp,
) -> Result<()> {
    let entry = Dirent { inode: inode.number, file_type: inode.file_type, name: to.name };
    op.put(place, &entry.encode());
    let meta = metas.of(inode);
    if meta.purged || (meta.item.links == 0 && !meta.linkable) {
        return Err(Error::NotFound);
    }
    check_links(meta)?;
    if meta.orphan && !meta.cutting {
        op.delete(Key::orphan(inode.number));
    }
    meta.orphan = false;
    meta.linkable = false;
    meta.item.links += 1;
    meta.touch_attributes(now);
    let meta = metas.of(to.parent);
    meta.item.size += 1;
    meta.touch_data(now);
    Ok(())
}

/// The entry at `key` of `parent`, a name of `inode`, goes away.
pub fn unlink(
    metas: &mut dyn Metas,
    op: &mut Op,
    (parent, key): (&Inode, Key),
    inode: &Inode,
    now: Timestamp,
) {
    op.delete(key);
    drop_link(metas, inode, op, now);
    let meta = metas.of(parent);
    meta.item.size = meta.item.size.saturating_sub(1);
    meta.touch_data(now);
}

/// The directory `inode`, at `key` of `parent`, goes away, if it is empty.
pub fn rmdir(
    metas: &mut dyn Metas,
    op: &mut Op,
    (parent, key): (&Inode, Key),
    inode: &Inode,
    now: Timestamp,
) -> Result<()> {
    op.delete(key);
    drop_directory(metas, parent, inode, op, now)?;
    let meta = metas.of(parent);
    meta.item.size = meta.item.size.saturating_sub(1);
    meta.touch_data(now);
    Ok(())
}

/// A name moves, and replaces what was there.
pub fn move_name(metas: &mut dyn Metas, op: &mut Op, step: Move<'_>, now: Timestamp) -> Result<()> {
    let Move { from, source, moved, to, place, victim, left } = step;
    let is_directory = source.file_type == FileType::Directory;
    // A replaced directory makes room for the one that comes.
    if is_directory && victim.is_none() && from.parent.number != to.parent.number {
        check_links(metas.of(to.parent))?;
    }
    if let Some(victim) = victim {
        if victim.file_type == FileType::Directory {
            drop_directory(metas, to.parent, victim, op, now)?;
        } else {
            drop_link(metas, victim, op, now);
        }
        let meta = metas.of(to.parent);
        meta.item.size = meta.item.size.saturating_sub(1);
    }
    if let Some((number, item)) = left {
        op.inode_added();
        op.put(Key::inode(number), &item.encode());
        let entry = Dirent { inode: number, file_type: item.file_type, name: from.name };
        op.put(source.key, &entry.encode());
    } else {
        op.delete(source.key);
    }
    let entry = Dirent { inode: source.inode, file_type: source.file_type, name: to.name };
    op.put(place, &entry.encode());
    let meta = metas.of(from.parent);
    meta.item.size = meta.item.size.saturating_sub(u64::from(left.is_none()));
    if is_directory {
        meta.item.links = meta.item.links.saturating_sub(1);
        meta.item.subdirectories = meta.item.subdirectories.saturating_sub(1);
    }
    meta.touch_data(now);
    let meta = metas.of(to.parent);
    meta.item.size += 1;
    if is_directory {
        meta.item.links += 1;
        meta.item.subdirectories += 1;
    }
    meta.touch_data(now);
    let meta = metas.of(moved);
    if is_directory {
        meta.item.parent = to.parent.number;
    }
    meta.touch_attributes(now);
    Ok(())
}

/// Two names swap what they name.
pub fn exchange(
    metas: &mut dyn Metas,
    op: &mut Op,
    step: Exchange<'_>,
    now: Timestamp,
) -> Result<()> {
    let Exchange { from, source, first, to, other, second } = step;
    let entry = Dirent { inode: other.inode, file_type: other.file_type, name: from.name };
    op.put(source.key, &entry.encode());
    let entry = Dirent { inode: source.inode, file_type: source.file_type, name: to.name };
    op.put(other.key, &entry.encode());
    if from.parent.number != to.parent.number {
        let arriving =
            [(from.parent, to.parent, source, first), (to.parent, from.parent, other, second)];
        for (_, enters, found, _) in arriving {
            if found.file_type == FileType::Directory && source.file_type != other.file_type {
                check_links(metas.of(enters))?;
            }
        }
        for (leaves, enters, found, moved) in arriving {
            if found.file_type == FileType::Directory {
                let meta = metas.of(leaves);
                meta.item.links = meta.item.links.saturating_sub(1);
                meta.item.subdirectories = meta.item.subdirectories.saturating_sub(1);
                let meta = metas.of(enters);
                meta.item.links += 1;
                meta.item.subdirectories += 1;
                metas.of(moved).item.parent = enters.number;
            }
        }
    }
    for parent in [from.parent, to.parent] {
        metas.of(parent).touch_data(now);
    }
    for inode in [first, second] {
        metas.of(inode).touch_attributes(now);
    }
    Ok(())
}

/// Which kinds of things may replace each other.
pub fn check_replace(source: FileType, victim: FileType) -> Result<()> {
    match (source, victim) {
        (FileType::Directory, FileType::Directory) => Ok(()),
        (FileType::Directory, _) => Err(Error::NotDirectory),
        (_, FileType::Directory) => Err(Error::IsDirectory),
        _ => Ok(()),
    }
}

/// On a damaged volume a directory may have an entry for itself. Whoever would remove it, or put something in its place, holds its lock already.
pub fn check_not_itself(parent: &Inode, inode: &Inode) -> Result<()> {
    if inode.number == parent.number { Err(contains_itself(parent.number)) } else { Ok(()) }
}

fn contains_itself(directory: u64) -> Error {
    Error::Corrupt(format!("directory {directory} contains itself: run fsck"))
}

/// A directory cannot move below itself. `parent_of` must not change meanwhile.
pub fn check_no_loop(
    moved: &Found,
    new_parent: u64,
    mut parent_of: impl FnMut(u64) -> Result<u64>,
) -> Result<()> {
    if moved.file_type != FileType::Directory {
        return Ok(());
    }
    let mut ancestor = new_parent;
    // On a damaged volume directories may contain each other: one that was passed a while ago is known again.
    let (mut passed, mut steps) = (new_parent, 0_u64);
    loop {
        if ancestor == moved.inode {
            return Err(Error::Invalid("a directory cannot be moved below itself"));
        }
        if ancestor == crate::Volume::ROOT {
            return Ok(());
        }
        let above = parent_of(ancestor)?;
        if above == ancestor || above == 0 {
            return Ok(());
        }
        if above == passed {
            return Err(contains_itself(above));
        }
        steps += 1;
        if steps.is_power_of_two() {
            passed = above;
        }
        ancestor = above;
    }
}

/// Refuses one more link of an inode that has as many as its link count can say.
fn check_links(meta: &Meta) -> Result<()> {
    if meta.item.links >= MAX_LINKS { Err(Error::TooManyLinks) } else { Ok(()) }
}

/// One name less for `inode`; the last one leaves an orphan.
fn drop_link(metas: &mut dyn Metas, inode: &Inode, op: &mut Op, now: Timestamp) {
    let meta = metas.of(inode);
    meta.item.links = meta.item.links.saturating_sub(1);
    meta.touch_attributes(now);
    if meta.item.links == 0 {
        if !mutation::active(Mutation::ForgetOrphan) {
            op.put(Key::orphan(inode.number), &[]);
        }
        meta.orphan = true;
    }
}

/// The directory `inode` in `parent` goes away, if it is empty.
fn drop_directory(
    metas: &mut dyn Metas,
    parent: &Inode,
    inode: &Inode,
    op: &mut Op,
    now: Timestamp,
) -> Result<()> {
    let meta = metas.of(inode);
    if meta.item.size > 0 {
        return Err(Error::NotEmpty);
    }
    meta.item.links = 0;
    meta.item.subdirectories = 0;
    meta.touch_attributes(now);
    op.put(Key::orphan(inode.number), &[]);
    meta.orphan = true;
    let meta = metas.of(parent);
    meta.item.links = meta.item.links.saturating_sub(1);
    meta.item.subdirectories = meta.item.subdirectories.saturating_sub(1);
    Ok(())
}
