//! Rename: replace, refuse to replace, exchange, leave a whiteout.
//!
//! A rename that concerns more than one directory's `ops` lock (two parents, or a directory that is moved or
//! replaced) holds the engine's tree lock, so that the ancestors it checks stay as they are and
//! locks of several directories are never taken by two calls at once.

use super::rules::Metas as _;
use super::rules::{self, Exchange, Move, Side};
use super::{MetaLocks, OP_RECORD_BYTES, OP_SPACE_BLOCKS, check_name};
use crate::alloc::ReserveClass;
use crate::engine::{Engine, Room};
use crate::error::{Error, Result};
use crate::inode::Inode;
use crate::mutation::{self, Mutation};
use crate::namespace::entry::{Found, Lookup};
use crate::sync::{Arc, MutexGuard};
use crate::txn::Op;
use crate::types::{FileType, NewInode, RenameMode};

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
        let (from, to) = ((dir, name), (new_dir, new_name));
        let replaces = matches!(mode, RenameMode::Replace | RenameMode::Whiteout { .. });
        loop {
            let ordered = if replaces { self.order_before_replacing(from, to)? } else { None };
            if self.rename_ordered(from, to, mode, ordered)? {
                return Ok(());
            }
        }
    }

    /// False, and nothing has happened: it would put a file in another one's place that is not the one that was `ordered`.
    fn rename_ordered(
        &self,
        (dir, name): (u64, &[u8]),
        (new_dir, new_name): (u64, &[u8]),
        mode: RenameMode,
        ordered: Option<u64>,
    ) -> Result<bool> {
        let is_late = mutation::active(Mutation::RenameBeforeData);
        self.before_entry()?;
        let class = match mode {
            // A whiteout is an inode more.
            RenameMode::Whiteout { .. } => ReserveClass::User,
            RenameMode::Replace | RenameMode::NoReplace | RenameMode::Exchange => {
                ReserveClass::Tidy
            }
        };
        self.check_space(OP_SPACE_BLOCKS, class)?;
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
                self.exchange((&from, &source), (&to, &other))?;
                return Ok(true);
            }
            (RenameMode::NoReplace, Lookup::Present(_)) => return Err(Error::Exists),
            (_, Lookup::Present(victim)) if victim.inode == source.inode => {
                // Two names of one inode: POSIX says that nothing happens.
                return Ok(true);
            }
            (_, Lookup::Present(victim))
                if source.is_file()
                    && victim.is_file()
                    && ordered != Some(source.inode)
                    && !is_late =>
            {
                return Ok(false);
            }
            (_, Lookup::Present(victim)) => {
                Some(self.replace((&from, &source), (&to, &victim), mode)?)
            }
            (_, Lookup::Absent(place)) => {
                self.move_entry((&from, &source), (&to, place), None, mode)?;
                None
            }
        };
        drop(ops);
        drop(tree);
        if let Some(victim) = replaced {
            self.purge_or_leave(&victim);
        }
        Ok(true)
    }

    /// Data before its name, where a file is about to take another one's: programs that write a new file and rename it over the old one expect
    /// to find either of the two after a crash, also those that do not sync it. Answers whose data is in order; none if there is no file to
    /// be replaced, as far as can be seen while no names are locked.
    fn order_before_replacing(&self, from: (u64, &[u8]), to: (u64, &[u8])) -> Result<Option<u64>> {
        if mutation::active(Mutation::RenameBeforeData) {
            return Ok(None);
        }
        let file_at = |(dir, name)| match self.find_entry(dir, name) {
            Ok(Lookup::Present(found)) if found.is_file() => Some(found.inode),
            // What is wrong is for the rename to say.
            _ => None,
        };
        let Some(source) = file_at(from) else { return Ok(None) };
        let Ok(inode) = self.inode(source) else { return Ok(Some(source)) };
        let replaces = || file_at(to).is_some_and(|victim| victim != source);
        Ok(self.log_before_replacing(&inode, replaces)?.then_some(source))
    }

    /// A directory cannot move below itself. The caller holds the tree lock.
    fn check_no_loop(&self, moved: &Found, new_parent: &Inode) -> Result<()> {
        let parent_of = |number| Ok(self.directory(number)?.meta.lock().item.parent);
        rules::check_no_loop(moved, new_parent.number, parent_of)
    }

    fn replace(
        &self,
        (from, source): (&Side<'_>, &Found),
        (to, victim): (&Side<'_>, &Found),
        mode: RenameMode,
    ) -> Result<Arc<Inode>> {
        rules::check_replace(source.file_type, victim.file_type)?;
        let inode = self.inode(victim.inode)?;
        if inode.number == from.parent.number {
            // The victim holds the source, so it is not empty.
            return Err(Error::NotEmpty);
        }
        rules::check_not_itself(to.parent, &inode)?;
        // The victim's own lock: nothing may be created in it while it goes.
        let victim_ops = (victim.file_type == FileType::Directory).then(|| inode.ops.lock());
        self.move_entry((from, source), (to, victim.key), Some(&inode), mode)?;
        drop(victim_ops);
        Ok(inode)
    }

    fn move_entry(
        &self,
        (from, source): (&Side<'_>, &Found),
        (to, place): (&Side<'_>, crate::format::Key),
        victim: Option<&Arc<Inode>>,
        mode: RenameMode,
    ) -> Result<()> {
        let moved = self.inode(source.inode)?;
        let admission = self.admit(OP_RECORD_BYTES, 0, Room::Normal)?;
        let mut concerned = vec![from.parent, to.parent, &moved];
        concerned.extend(victim);
        let mut metas = MetaLocks::new(&concerned);
        let mut op = Op::new();
        let now = self.now();
        let whiteout = if let RenameMode::Whiteout { uid, gid } = mode {
            let new = NewInode { uid, gid, ..NewInode::new(FileType::CharDevice, 0) };
            let item = rules::new_item((from.parent.number, metas.of(from.parent)), &new, 0, now);
            Some((self.store.allocate_inode(), item))
        } else {
            None
        };
        let left = whiteout.as_ref().map(|(number, item)| (*number, item));
        let step = Move { from: *from, source, moved: &moved, to: *to, place, victim, left };
        rules::move_name(&mut metas, &mut op, step, now)?;
        metas.commit(self, op, admission)?;
        Ok(())
    }

    fn exchange(
        &self,
        (from, source): (&Side<'_>, &Found),
        (to, other): (&Side<'_>, &Found),
    ) -> Result<()> {
        if source.inode == other.inode {
            return Ok(());
        }
        let first = self.inode(source.inode)?;
        let second = self.inode(other.inode)?;
        let admission = self.admit(OP_RECORD_BYTES, 0, Room::Normal)?;
        let mut op = Op::new();
        let mut metas = MetaLocks::new(&[from.parent, to.parent, &first, &second]);
        let (from, to) = (*from, *to);
        let step = Exchange { from, source, first: &first, to, other, second: &second };
        rules::exchange(&mut metas, &mut op, step, self.now())?;
        metas.commit(self, op, admission)?;
        Ok(())
    }
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
