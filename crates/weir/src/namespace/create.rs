//! New inodes and new names.

use super::entry::FreePlace;
use super::rules::Metas as _;
use super::rules::{self, Side};
use super::{MetaLocks, OP_RECORD_BYTES, OP_SPACE_BLOCKS, check_name};
use crate::alloc::ReserveClass;
use crate::engine::{Engine, Room};
use crate::error::{Error, Result};
use crate::format::{Key, MAX_SYMLINK_BYTES};
use crate::inode::Inode;
use crate::sync::Arc;
use crate::txn::Op;
use crate::txn::names::Named;
use crate::types::{FileType, NewInode};

impl Engine {
    /// A new inode of any type but a symbolic link, named `name` in `dir`. `keep` gets it before anybody can take that name away: what it
    /// holds or opens then is what was made.
    pub fn make<R>(
        &self,
        dir: u64,
        name: &[u8],
        new: &NewInode,
        keep: impl FnOnce(Arc<Inode>) -> R,
    ) -> Result<R> {
        if new.file_type == FileType::Symlink {
            return Err(Error::Invalid("a symbolic link is made with symlink"));
        }
        self.make_named(dir, (name, None), (new, None), keep)
    }

    /// As [`Engine::make`], of a regular file, where a look-up has just found this place.
    pub fn make_at<R>(
        &self,
        dir: u64,
        (name, place): (&[u8], FreePlace),
        permissions: u32,
        keep: impl FnOnce(Arc<Inode>) -> R,
    ) -> Result<R> {
        let new = NewInode::new(FileType::Regular, permissions);
        self.make_named(dir, (name, Some(place)), (&new, None), keep)
    }

    /// A new symbolic link to `target`.
    pub fn symlink(
        &self,
        dir: u64,
        name: &[u8],
        target: &[u8],
        (uid, gid): (u32, u32),
    ) -> Result<Arc<Inode>> {
        check_target(target)?;
        let new = NewInode { uid, gid, ..NewInode::new(FileType::Symlink, 0o777) };
        self.make_named(dir, (name, None), (&new, Some(target)), |made| made)
    }

    /// Before what gives `dir` the name `name` locks it: room. Where there is none, or nothing may be written, a name that is
    /// there is there all the same, as for other file systems: who makes what he needs each time he starts has it.
    fn before_new(&self, dir: u64, name: &[u8]) -> Result<()> {
        let entered = self
            .before_entry()
            .and_then(|()| self.check_space(OP_SPACE_BLOCKS, ReserveClass::User));
        if matches!(entered, Err(Error::NoSpace | Error::ReadOnly)) {
            self.absent(self.directory(dir)?.number, name)?;
        }
        entered
    }

    fn make_named<R>(
        &self,
        dir: u64,
        (name, known_place): (&[u8], Option<FreePlace>),
        (new, target): (&NewInode, Option<&[u8]>),
        keep: impl FnOnce(Arc<Inode>) -> R,
    ) -> Result<R> {
        check_name(name)?;
        self.before_new(dir, name)?;
        let parent = self.directory(dir)?;
        let _ops = parent.ops.lock();
        let admission = self.admit(OP_RECORD_BYTES, 0, Room::Normal)?;
        parent.check_alive()?;
        let place = self.absent_as_known(dir, name, known_place)?;
        let number = self.store.allocate_inode();
        let mut metas = MetaLocks::new(&[&parent]);
        let target_bytes = target.map_or(0, <[u8]>::len) as u64;
        let item = rules::new_item((dir, metas.of(&parent)), new, target_bytes, self.now());
        let mut op = Op::new();
        let to = Side { parent: &parent, name };
        rules::make(&mut metas, &mut op, (to, place), (number, &item), target)?;
        let mut commit = Some((metas, op, admission));
        let made = self.inode_with(number, || match commit.take() {
            Some((mut metas, op, admission)) => {
                let lsn = metas.commit(self, op, admission)?;
                Ok(Inode::committed(number, item, lsn))
            }
            // It was found, changed and forgotten already: what counts is what the store says.
            None => self.load_inode(number),
        })?;
        if known_place.is_some() {
            // Made by way of a path, and likely to be asked for by way of that path. As long as `ops` is held, the entry is what
            // was made.
            let named = Named { inode: number, file_type: new.file_type };
            self.store.names.remember(self.store.names.moment(&place), (dir, name), named);
        }
        Ok(keep(made))
    }

    /// A new regular file without a name; it is purged when its last user goes, unless it is linked
    /// before.
    pub fn tmpfile(&self, dir: u64, new: &NewInode) -> Result<Arc<Inode>> {
        if new.file_type != FileType::Regular {
            return Err(Error::Invalid("only regular files can be made without a name"));
        }
        self.before_entry()?;
        self.check_space(OP_SPACE_BLOCKS, ReserveClass::User)?;
        let admission = self.admit(OP_RECORD_BYTES, 0, Room::Normal)?;
        let parent = self.directory(dir)?;
        parent.check_alive()?;
        let number = self.store.allocate_inode();
        let mut item = rules::new_item((dir, &parent.meta.lock()), new, 0, self.now());
        item.links = 0;
        let mut op = Op::new();
        op.inode_added();
        op.put(Key::inode(number), &item.encode());
        op.put(Key::orphan(number), &[]);
        // Nothing can fail once it is committed: it would be left behind without a name.
        let mut commit = Some((op, admission));
        let inode = self.inode_with(number, || match commit.take() {
            Some((op, admission)) => {
                let lsn = self.store.commit(op, admission)?;
                Ok(Inode::committed(number, item, lsn))
            }
            // It was found by its number, changed and forgotten already.
            None => self.load_inode(number),
        })?;
        inode.meta.lock().linkable = true;
        Ok(inode)
    }

    /// One more name for an inode that is no directory.
    pub fn link(&self, number: u64, dir: u64, name: &[u8]) -> Result<Arc<Inode>> {
        check_name(name)?;
        self.before_new(dir, name)?;
        let parent = self.directory(dir)?;
        let inode = self.inode(number)?;
        if inode.file_type == FileType::Directory {
            return Err(Error::NotPermitted);
        }
        let _ops = parent.ops.lock();
        let admission = self.admit(OP_RECORD_BYTES, 0, Room::Normal)?;
        parent.check_alive()?;
        let place = self.absent(dir, name)?;
        let mut op = Op::new();
        let mut metas = MetaLocks::new(&[&parent, &inode]);
        let to = Side { parent: &parent, name };
        rules::link(&mut metas, &mut op, (to, place), &inode, self.now())?;
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
        match self.store.get(Key::inline(number))? {
            Some(target) => Ok(target.to_vec()),
            // Its last name was taken away since.
            None if inode.meta.lock().purged => Err(Error::NotFound),
            None => Err(missing("symlink target", number)),
        }
    }
}

/// Refuses what no symbolic link can hold.
pub fn check_target(target: &[u8]) -> Result<()> {
    if target.len() > MAX_SYMLINK_BYTES {
        return Err(Error::NameTooLong);
    }
    if target.is_empty() || target.contains(&0) {
        return Err(Error::NotFound);
    }
    Ok(())
}

fn missing(what: &str, inode: u64) -> Error {
    Error::Corrupt(format!("inode {inode} has no {what}: run fsck"))
}
