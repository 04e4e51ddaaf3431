//! New inodes and new names.

use super::{MetaLocks, OP_RECORD_BYTES, OP_SPACE_BLOCKS, check_name};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::format::item::{Dirent, InodeItem, MAX_LINKS};
use crate::format::{Key, MAX_SYMLINK_BYTES};
use crate::inode::Inode;
use crate::sync::Arc;
use crate::txn::Op;
use crate::types::{FileType, NewInode};

impl Engine {
    /// A new inode of any type but a symbolic link, named `name` in `dir`.
    pub fn make(&self, dir: u64, name: &[u8], new: &NewInode) -> Result<Arc<Inode>> {
        if new.file_type == FileType::Symlink {
            return Err(Error::Invalid("a symbolic link is made with symlink"));
        }
        self.make_named(dir, name, new, None)
    }

    /// A new symbolic link to `target`.
    pub fn symlink(
        &self,
        dir: u64,
        name: &[u8],
        target: &[u8],
        (uid, gid): (u32, u32),
    ) -> Result<Arc<Inode>> {
        if target.len() > MAX_SYMLINK_BYTES {
            return Err(Error::NameTooLong);
        }
        if target.is_empty() || target.contains(&0) {
            return Err(Error::NotFound);
        }
        let new = NewInode { uid, gid, ..NewInode::new(FileType::Symlink, 0o777) };
        self.make_named(dir, name, &new, Some(target))
    }

    fn make_named(
        &self,
        dir: u64,
        name: &[u8],
        new: &NewInode,
        target: Option<&[u8]>,
    ) -> Result<Arc<Inode>> {
        check_name(name)?;
        let admission = self.enter(OP_RECORD_BYTES, 0)?;
        self.check_space(OP_SPACE_BLOCKS)?;
        let parent = self.directory(dir)?;
        let _ops = parent.ops.lock();
        parent.check_alive()?;
        let place = self.absent(dir, name)?;
        let number = self.store.allocate_inode();
        let item = self.new_item(&parent, new, target.map_or(0, <[u8]>::len) as u64);
        let is_directory = new.file_type == FileType::Directory;

        let mut op = Op::new();
        op.inode_added();
        op.put(Key::inode(number), &item.encode());
        if let Some(target) = target {
            op.put(Key::inline(number), target);
        }
        let entry = Dirent { inode: number, file_type: new.file_type, name };
        op.put(place, &entry.encode());
        let mut metas = MetaLocks::new(&[&parent]);
        let meta = metas.of(&parent);
        if is_directory {
            if meta.item.links >= MAX_LINKS {
                return Err(Error::TooManyLinks);
            }
            meta.item.links += 1;
            meta.item.subdirectories += 1;
        }
        meta.item.size += 1;
        meta.touch_data(item.ctime);
        metas.commit(self, op, admission)?;
        drop(metas);
        // It may have been found, changed and forgotten already: what counts is what the store says.
        self.inode(number)
    }

    /// A new regular file without a name; it is purged when its last user goes, unless it is linked
    /// before.
    pub fn tmpfile(&self, dir: u64, new: &NewInode) -> Result<Arc<Inode>> {
        if new.file_type != FileType::Regular {
            return Err(Error::Invalid("only regular files can be made without a name"));
        }
        let admission = self.enter(OP_RECORD_BYTES, 0)?;
        self.check_space(OP_SPACE_BLOCKS)?;
        let parent = self.directory(dir)?;
        parent.check_alive()?;
        let number = self.store.allocate_inode();
        let mut item = self.new_item(&parent, new, 0);
        item.links = 0;
        let mut op = Op::new();
        op.inode_added();
        op.put(Key::inode(number), &item.encode());
        op.put(Key::orphan(number), &[]);
        self.store.commit(op, admission)?;
        self.inode(number)
    }

    /// The item of a new inode in `parent`.
    fn new_item(&self, parent: &Inode, new: &NewInode, target_bytes: u64) -> InodeItem {
        let now = self.now();
        let is_directory = new.file_type == FileType::Directory;
        let meta = parent.meta.lock();
        let inherits_group = meta.item.permissions & 0o2000 != 0;
        let mut permissions = new.permissions & 0o7777;
        if inherits_group && is_directory {
            permissions |= 0o2000;
        }
        InodeItem {
            file_type: new.file_type,
            permissions,
            links: if is_directory { 2 } else { 1 },
            uid: new.uid,
            gid: if inherits_group { meta.item.gid } else { new.gid },
            size: target_bytes,
            blocks: 0,
            parent: if is_directory { parent.number } else { 0 },
            change_counter: 1,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            rdev: match new.file_type {
                FileType::CharDevice | FileType::BlockDevice => new.rdev,
                _ => 0,
            },
            flags: if target_bytes > 0 { crate::format::item::INODE_INLINE } else { 0 },
            subdirectories: 0,
        }
    }

    /// One more name for an inode that is no directory.
    pub fn link(&self, number: u64, dir: u64, name: &[u8]) -> Result<Arc<Inode>> {
        check_name(name)?;
        let admission = self.enter(OP_RECORD_BYTES, 0)?;
        self.check_space(OP_SPACE_BLOCKS)?;
        let parent = self.directory(dir)?;
        let inode = self.inode(number)?;
        if inode.file_type == FileType::Directory {
            return Err(Error::NotPermitted);
        }
        let _ops = parent.ops.lock();
        parent.check_alive()?;
        let place = self.absent(dir, name)?;
        let mut op = Op::new();
        let entry = Dirent { inode: number, file_type: inode.file_type, name };
        op.put(place, &entry.encode());

        let now = self.now();
        let mut metas = MetaLocks::new(&[&parent, &inode]);
        let meta = metas.of(&inode);
        if meta.purged || (meta.item.links == 0 && !meta.orphan) {
            return Err(Error::NotFound);
        }
        if meta.item.links >= MAX_LINKS {
            return Err(Error::TooManyLinks);
        }
        if meta.orphan {
            op.delete(Key::orphan(number));
            meta.orphan = false;
        }
        meta.item.links += 1;
        meta.touch_attributes(now);
        let meta = metas.of(&parent);
        meta.item.size += 1;
        meta.touch_data(now);
        metas.commit(self, op, admission)?;
        drop(metas);
        Ok(inode)
    }

    /// Where a symbolic link points.
    pub fn readlink(&self, number: u64) -> Result<Vec<u8>> {
        let inode = self.inode(number)?;
        if inode.file_type != FileType::Symlink {
            return Err(Error::Invalid("not a symbolic link"));
        }
        self.touch_atime(&inode);
        let target = self.store.get(Key::inline(number))?;
        Ok(target.ok_or_else(|| missing("symlink target", number))?.to_vec())
    }
}

fn missing(what: &str, inode: u64) -> Error {
    Error::Corrupt(format!("inode {inode} has no {what}: run fsck"))
}
