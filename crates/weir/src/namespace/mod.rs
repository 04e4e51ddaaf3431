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
use crate::inode::{ATIME_UNSETTLED, Inode, Meta};
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
///
/// **Invariant:** an operation that the log has not taken leaves nothing behind: the attributes are as they were when they were locked.
pub struct MetaLocks<'a> {
    /// In the order of their numbers. The first needs no memory of its own: most operations lock one.
    first: Option<Locked<'a>>,
    others: Vec<Locked<'a>>,
}

/// An inode, its attributes, and what they were when they were locked.
type Locked<'a> = (&'a Inode, MutexGuard<'a, Meta>, Meta);

impl<'a> MetaLocks<'a> {
    /// Locks all of `inodes`; one that is named twice is locked once.
    pub fn new(inodes: &[&'a Arc<Inode>]) -> Self {
        let lock = |inode: &'a Inode| {
            let meta = inode.meta.lock();
            let before = meta.clone();
            (inode, meta, before)
        };
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

    /// Takes everything back that happened to them since they were locked.
    pub fn restore(&mut self) {
        for (_, meta, before) in self.all_mut() {
            (**meta).clone_from(before);
        }
    }

    /// The item of inode `number`, one of those locked, if it still has one.
    pub fn item_to_log(&self, number: u64) -> Option<&InodeItem> {
        let is_first = self.first.as_ref().is_some_and(|(inode, ..)| inode.number == number);
        let place = || self.others.binary_search_by_key(&number, |(inode, ..)| inode.number).ok();
        let (_, meta, _) = if is_first { self.first.as_ref() } else { self.others.get(place()?) }?;
        (!meta.purged).then_some(&meta.item)
    }

    /// The items of all of them were committed as of `lsn`.
    pub fn logged(&mut self, lsn: Lsn) {
        for (inode, meta, _) in self.all_mut() {
            inode.atime_settled_until_s.store(ATIME_UNSETTLED, Ordering::Relaxed);
            meta.logged(lsn, true);
        }
    }

    /// Adds the items of all locked inodes to `op`, commits it, and notes the LSN in each. If that fails, they are as they were.
    pub fn commit(&mut self, engine: &Engine, mut op: Op, admission: Admission) -> Result<Lsn> {
        for (inode, meta, _) in self.all() {
            if !meta.purged {
                op.put(Key::inode(inode.number), &meta.item.encode());
            }
        }
        let committed = engine.store.commit(op, admission);
        let lsn = committed.inspect_err(|_| self.restore())?;
        self.logged(lsn);
        Ok(lsn)
    }
}

impl Metas for MetaLocks<'_> {
    /// The attributes of `inode`, which must be one of those locked.
    fn of(&mut self, inode: &Inode) -> &mut Meta {
        let number = inode.number;
        let place = self.others.binary_search_by_key(&number, |(locked, ..)| locked.number);
        match (&mut self.first, place) {
            (Some((first, meta, _)), _) if first.number == number => meta,
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

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::txn::volume_with_a_file;
    use crate::{OpenFlags, Volume, XattrMode};

    #[test]
    fn an_operation_that_the_log_does_not_take_leaves_names_and_attributes_as_they_were() {
        let (volume, file) = volume_with_a_file();
        let before = (volume.metadata("/f"), volume.metadata("/"));
        let engine = file.engine();
        // An unlink that was let in, and then the volume is shut down.
        let admission = engine.enter(OP_RECORD_BYTES, 0).expect("enter");
        let parent = engine.directory(Volume::ROOT).expect("root");
        let inode = engine.inode(file.ino()).expect("inode");
        let found = engine.present(Volume::ROOT, b"f").expect("entry");
        engine.shut_down("a flush failed");
        {
            let mut op = Op::new();
            let mut metas = MetaLocks::new(&[&parent, &inode]);
            rules::unlink(&mut metas, &mut op, (&parent, found.key), &inode, engine.now());
            let refused = metas.commit(engine, op, admission);
            assert!(matches!(refused, Err(Error::Shutdown(_))), "{refused:?}");
        }
        assert!(before.0.is_ok());
        assert_eq!((volume.metadata("/f"), volume.metadata("/")), before);
        let meta = inode.meta.lock();
        assert!(!meta.orphan && !meta.dirty);
    }

    /// Who had the locks, and waited for log space, waited for ever behind those who had that and waited for the locks.
    #[test]
    fn who_waits_for_a_lock_of_names_or_of_a_file_holds_nothing_of_the_log() {
        let (volume, file) = volume_with_a_file();
        for name in ["/g", "/h", "/i"] {
            volume.open_file(name, OpenFlags::CREATE).expect("create");
        }
        volume.create_dir("/d", 0o755).expect("mkdir");
        volume.setxattr(file.ino(), b"user.a", b"1", XattrMode::Set).expect("set");
        volume.sync().expect("sync");
        volume.checkpoint().expect("checkpoint");
        let calls: [&(dyn Fn() -> crate::Result<()> + Sync); 8] = [
            &|| volume.open_file("/new", OpenFlags::CREATE).map(drop),
            &|| volume.create_dir("/e", 0o755).map(drop),
            &|| volume.link_path("/f", "/l").map(drop),
            &|| volume.rename_path("/g", "/j"),
            &|| volume.remove_file("/h"),
            &|| volume.remove_dir("/d"),
            &|| volume.setxattr(file.ino(), b"user.b", b"2", XattrMode::Set),
            &|| volume.removexattr(file.ino(), b"user.a"),
        ];
        let engine = file.engine();
        let root = engine.directory(Volume::ROOT).expect("root");
        let inode = engine.inode(file.ino()).expect("inode");
        let locks = (engine.tree_lock.lock(), root.ops.lock(), inode.ops.lock());
        hold_nothing_behind(engine, locks, &calls);
        // A directory that is replaced is locked last.
        for name in ["/from", "/to"] {
            volume.create_dir(name, 0o755).expect("mkdir");
        }
        volume.checkpoint().expect("checkpoint");
        let replaced = volume.resolve("/to", true).expect("resolve");
        let replaced = engine.directory(replaced).expect("directory");
        hold_nothing_behind(engine, replaced.ops.lock(), &[&|| volume.rename_path("/from", "/to")]);
    }

    /// Has `calls` wait for `locks`, which are given back then.
    fn hold_nothing_behind<L>(
        engine: &Engine,
        locks: L,
        calls: &[&(dyn Fn() -> crate::Result<()> + Sync)],
    ) {
        std::thread::scope(|scope| {
            let waiting: Vec<_> = calls.iter().map(|call| scope.spawn(call)).collect();
            for _ in 0..40 {
                std::thread::sleep(std::time::Duration::from_millis(5));
                assert_eq!(engine.log.fill().admitted_blocks, 0);
            }
            drop(locks);
            for ended in waiting {
                ended.join().expect("join").expect("call");
            }
        });
    }
}
