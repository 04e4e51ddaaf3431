//! Rename: replace, refuse to replace, exchange.
//!
//! A rename that concerns more than one directory's `ops` lock (two parents, or a directory that is moved or
//! replaced) holds the engine's tree lock, so that the ancestors it checks stay as they are and
//! locks of several directories are never taken by two calls at once.

use super::remove::{drop_directory, drop_link};
use super::{MetaLocks, OP_RECORD_BYTES, OP_SPACE_BLOCKS, check_name};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::format::item::{Dirent, MAX_LINKS};
use crate::inode::{Inode, Meta};
use crate::log::Admission;
use crate::namespace::entry::{Found, Lookup};
use crate::sync::{Arc, MutexGuard};
use crate::txn::Op;
use crate::types::{FileType, RenameMode};

/// One side of a rename.
struct Side<'a> {
    parent: &'a Arc<Inode>,
    name: &'a [u8],
}

impl Engine {
    /// See `renameat2(2)`.
    pub fn rename(
        &self,
        dir: u64,
        name: &[u8],
        new_dir: u64,
        new_name: &[u8],
        mode: RenameMode,
    ) -> Result<()> {
        check_name(name)?;
        check_name(new_name)?;
        let admission = self.enter(OP_RECORD_BYTES, 0)?;
        self.check_space(OP_SPACE_BLOCKS)?;
        let from_parent = self.directory(dir)?;
        let to_parent = self.directory(new_dir)?;
        let tree = self.tree_lock.lock();
        let ops = lock_both(&from_parent, &to_parent);
        to_parent.check_alive()?;
        let from = Side { parent: &from_parent, name };
        let to = Side { parent: &to_parent, name: new_name };
        let source = self.present(dir, name)?;
        let target = self.find_entry(new_dir, new_name)?;
        self.check_no_loop(&source, &to_parent)?;
        let replaced = match (mode, target) {
            (RenameMode::Exchange, Lookup::Absent(_)) => return Err(Error::NotFound),
            (RenameMode::Exchange, Lookup::Present(other)) => {
                self.check_no_loop(&other, &from_parent)?;
                return self.exchange((&from, &source), (&to, &other), admission);
            }
            (RenameMode::NoReplace, Lookup::Present(_)) => return Err(Error::Exists),
            (_, Lookup::Present(victim)) if victim.inode == source.inode => {
                // Two names of one inode: POSIX says that nothing happens.
                return Ok(());
            }
            (_, Lookup::Present(victim)) => {
                Some(self.replace((&from, &source), (&to, &victim), admission)?)
            }
            (_, Lookup::Absent(place)) => {
                self.move_entry((&from, &source), (&to, place), None, Op::new(), admission)?;
                None
            }
        };
        drop(ops);
        drop(tree);
        replaced.map_or(Ok(()), |victim| self.purge_if_unused(&victim))
    }

    /// A directory cannot move below itself.
    fn check_no_loop(&self, moved: &Found, new_parent: &Arc<Inode>) -> Result<()> {
        if moved.file_type != FileType::Directory {
            return Ok(());
        }
        let mut ancestor = new_parent.number;
        loop {
            if ancestor == moved.inode {
                return Err(Error::Invalid("a directory cannot be moved below itself"));
            }
            if ancestor == crate::Volume::ROOT {
                return Ok(());
            }
            let above = self.directory(ancestor)?.meta.lock().item.parent;
            if above == ancestor || above == 0 {
                return Ok(());
            }
            ancestor = above;
        }
    }

    fn replace(
        &self,
        (from, source): (&Side<'_>, &Found),
        (to, victim): (&Side<'_>, &Found),
        admission: Admission,
    ) -> Result<Arc<Inode>> {
        match (source.file_type, victim.file_type) {
            (FileType::Directory, FileType::Directory) => {}
            (FileType::Directory, _) => return Err(Error::NotDirectory),
            (_, FileType::Directory) => return Err(Error::IsDirectory),
            _ => {}
        }
        let inode = self.inode(victim.inode)?;
        if inode.number == from.parent.number {
            // The victim holds the source, so it is not empty.
            return Err(Error::NotEmpty);
        }
        // The victim's own lock: nothing may be created in it while it goes.
        let victim_ops = (victim.file_type == FileType::Directory).then(|| inode.ops.lock());
        self.move_entry((from, source), (to, victim.key), Some(&inode), Op::new(), admission)?;
        drop(victim_ops);
        Ok(inode)
    }

    fn move_entry(
        &self,
        (from, source): (&Side<'_>, &Found),
        (to, place): (&Side<'_>, crate::format::Key),
        victim: Option<&Arc<Inode>>,
        mut op: Op,
        admission: Admission,
    ) -> Result<()> {
        let now = self.now();
        let moved = self.inode(source.inode)?;
        let mut concerned = vec![from.parent, to.parent, &moved];
        concerned.extend(victim);
        let mut metas = MetaLocks::new(&concerned);
        let is_directory = source.file_type == FileType::Directory;
        // A replaced directory makes room for the one that comes.
        if is_directory && victim.is_none() && from.parent.number != to.parent.number {
            check_links(metas.of(to.parent))?;
        }
        if let Some(victim) = victim {
            if victim.file_type == FileType::Directory {
                drop_directory(&mut metas, to.parent, victim, &mut op, now)?;
            } else {
                drop_link(&mut metas, victim, &mut op, now);
            }
            let meta = metas.of(to.parent);
            meta.item.size = meta.item.size.saturating_sub(1);
        }
        op.delete(source.key);
        let entry = Dirent { inode: source.inode, file_type: source.file_type, name: to.name };
        op.put(place, &entry.encode());
        let meta = metas.of(from.parent);
        meta.item.size = meta.item.size.saturating_sub(1);
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
        let meta = metas.of(&moved);
        if is_directory {
            meta.item.parent = to.parent.number;
        }
        meta.touch_attributes(now);
        metas.commit(self, op, admission)?;
        Ok(())
    }

    fn exchange(
        &self,
        (from, source): (&Side<'_>, &Found),
        (to, other): (&Side<'_>, &Found),
        admission: Admission,
    ) -> Result<()> {
        if source.inode == other.inode {
            return Ok(());
        }
        let now = self.now();
        let first = self.inode(source.inode)?;
        let second = self.inode(other.inode)?;
        let mut op = Op::new();
        let entry = Dirent { inode: other.inode, file_type: other.file_type, name: from.name };
        op.put(source.key, &entry.encode());
        let entry = Dirent { inode: source.inode, file_type: source.file_type, name: to.name };
        op.put(other.key, &entry.encode());
        let mut metas = MetaLocks::new(&[from.parent, to.parent, &first, &second]);
        if from.parent.number != to.parent.number {
            let arriving = [(from.parent, to.parent, source), (to.parent, from.parent, other)];
            for (_, enters, found) in arriving {
                if found.file_type == FileType::Directory && source.file_type != other.file_type {
                    check_links(metas.of(enters))?;
                }
            }
            for (leaves, enters, found) in arriving {
                if found.file_type == FileType::Directory {
                    let meta = metas.of(leaves);
                    meta.item.links = meta.item.links.saturating_sub(1);
                    meta.item.subdirectories = meta.item.subdirectories.saturating_sub(1);
                    let meta = metas.of(enters);
                    meta.item.links += 1;
                    meta.item.subdirectories += 1;
                    let moved = if found.inode == first.number { &first } else { &second };
                    metas.of(moved).item.parent = enters.number;
                }
            }
        }
        for parent in [from.parent, to.parent] {
            metas.of(parent).touch_data(now);
        }
        for inode in [&first, &second] {
            metas.of(inode).touch_attributes(now);
        }
        metas.commit(self, op, admission)?;
        Ok(())
    }
}

/// Refuses one more subdirectory of a directory that has as many as its link count can say.
fn check_links(parent: &Meta) -> Result<()> {
    if parent.item.links >= MAX_LINKS { Err(Error::TooManyLinks) } else { Ok(()) }
}

/// The `ops` locks of one or two directories. The caller holds the tree lock, so the order is free.
fn lock_both<'a>(
    first: &'a Arc<Inode>,
    second: &'a Arc<Inode>,
) -> (MutexGuard<'a, ()>, Option<MutexGuard<'a, ()>>) {
    let guard = first.ops.lock();
    let other = (first.number != second.number).then(|| second.ops.lock());
    (guard, other)
}
