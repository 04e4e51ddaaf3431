//! Directories, names, links, attributes: everything about inodes but their data.
//!
//! Every changing call is one operation in the log: it happens entirely or not at all, also
//! across a crash, and in the order of the calls. None is durable by itself: an fsync of any
//! inode that the operation touched, or a sync of the volume, makes it (and all that came before) durable.
//!
//! * [`entry`]: finding a name in a directory (collisions, free slots)
//! * [`create`]: make, symlink, tmpfile, link
//! * [`remove`]: unlink, rmdir, and the purge of inodes nobody needs any more
//! * [`rename`]: the three kinds of rename
//! * [`rules`]: what each of them does to attributes and log, for single calls and for batches
//! * [`attr`]: getattr, setattr
//! * [`xattr`]: extended attributes
//! * [`path`]: the same by path, for programs
//!
//! Locks: `ops` of the directories concerned, then `meta` of all inodes concerned in the order of their
//! numbers ([`MetaLocks`]); see `inode.rs`.

pub mod attr;
pub mod create;
pub mod entry;
pub mod path;
pub mod remove;
pub mod rename;
pub mod rules;
pub mod xattr;

use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::format::Key;
use crate::format::item::InodeItem;
use crate::inode::{Inode, Meta};
use crate::log::Admission;
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, MutexGuard};
use crate::txn::{Lsn, Op};
use crate::types::FileType;
use rules::Metas;

/// Log space that covers any operation of this module except the purge: a few inodes, entries, an attribute.
pub const OP_RECORD_BYTES: usize = 8192;
/// Blocks that must be free for a creating operation: its share of nodes in the next checkpoint.
pub const OP_SPACE_BLOCKS: u64 = 4;

/// The `meta` locks of some inodes, taken in the order of their numbers.
pub struct MetaLocks<'a> {
    /// In the order of their numbers. The first needs no memory of its own: most operations lock one.
    first: Option<Locked<'a>>,
    others: Vec<Locked<'a>>,
}

type Locked<'a> = (&'a Inode, MutexGuard<'a, Meta>);

impl<'a> MetaLocks<'a> {
    /// Locks all of `inodes`; one that is named twice is locked once.
    pub fn new(inodes: &[&'a Arc<Inode>]) -> Self {
        let lock = |inode: &'a Inode| (inode, inode.meta.lock());
        if let [only] = *inodes {
            return Self { first: Some(lock(only)), others: Vec::new() };
        }
        let mut order: Vec<&'a Inode> = inodes.iter().map(|inode| &***inode).collect();
        order.sort_by_key(|inode| inode.number);
        order.dedup_by_key(|inode| inode.number);
        let mut locked = order.into_iter().map(lock);
        Self { first: locked.next(), others: locked.collect() }
    }

    fn all(&self) -> impl Iterator<Item = &Locked<'a>> {
        self.first.iter().chain(&self.others)
    }

    fn all_mut(&mut self) -> impl Iterator<Item = &mut Locked<'a>> {
        self.first.iter_mut().chain(&mut self.others)
    }

    /// Copies of all of them, for [`MetaLocks::restore`].
    pub fn save(&self) -> Vec<Meta> {
        self.all().map(|(_, meta)| (**meta).clone()).collect()
    }

    /// Takes everything back that happened since they were saved.
    pub fn restore(&mut self, saved: Vec<Meta>) {
        for ((_, meta), saved) in self.all_mut().zip(saved) {
            **meta = saved;
        }
    }

    /// The item of inode `number`, one of those locked, if it still has one.
    pub fn item_to_log(&self, number: u64) -> Option<&InodeItem> {
        let is_first = self.first.as_ref().is_some_and(|(inode, _)| inode.number == number);
        let place = || self.others.binary_search_by_key(&number, |(inode, _)| inode.number).ok();
        let (_, meta) = if is_first { self.first.as_ref() } else { self.others.get(place()?) }?;
        (!meta.purged).then_some(&meta.item)
    }

    /// The items of all of them were committed as of `lsn`.
    pub fn logged(&mut self, lsn: Lsn) {
        for (inode, meta) in self.all_mut() {
            inode.atime_settled.store(false, Ordering::Relaxed);
            meta.logged(lsn, true);
        }
    }

    /// Adds the items of all locked inodes to `op`, commits it, and notes the LSN in each.
    pub fn commit(&mut self, engine: &Engine, mut op: Op, admission: Admission) -> Result<Lsn> {
        for (inode, meta) in self.all() {
            if !meta.purged {
                op.put(Key::inode(inode.number), &meta.item.encode());
            }
        }
        let lsn = engine.store.commit(op, admission)?;
        self.logged(lsn);
        Ok(lsn)
    }
}

impl Metas for MetaLocks<'_> {
    /// The attributes of `inode`, which must be one of those locked.
    fn of(&mut self, inode: &Inode) -> &mut Meta {
        let number = inode.number;
        let place = self.others.binary_search_by_key(&number, |(locked, _)| locked.number);
        match (&mut self.first, place) {
            (Some((first, meta)), _) if first.number == number => meta,
            (_, Ok(place)) => &mut self.others[place].1,
            _ => unreachable!("inode {number} is not among the locked ones"),
        }
    }
}

impl Engine {
    /// The directory `number`.
    pub fn directory(&self, number: u64) -> Result<Arc<Inode>> {
        let inode = self.inode(number)?;
        if inode.file_type == FileType::Directory { Ok(inode) } else { Err(Error::NotDirectory) }
    }
}

/// Refuses names that no directory can hold.
pub fn check_name(name: &[u8]) -> Result<()> {
    if name.len() > crate::format::MAX_NAME_BYTES {
        return Err(Error::NameTooLong);
    }
    if name.is_empty() {
        return Err(Error::NotFound);
    }
    if name == b"." || name == b".." || name.contains(&b'/') || name.contains(&0) {
        return Err(Error::Invalid("a name cannot be . or .. or contain / or NUL"));
    }
    Ok(())
}
