//! Removing names, and the purge of inodes that have none left and that nobody uses.
//!
//! An inode that loses its last name gets an orphan item in the same operation. The purge then
//! takes its items away in bounded steps, each an operation of its own, the inode item and the
//! orphan item last: after a crash in between, recovery goes on from what is left. A purge that fails is no error of the call that
//! took the name away, which has happened: it is counted (`purge_errors`) and tried again with the next purges, at most once at a time.

use super::{MetaLocks, OP_RECORD_BYTES, check_name, rules};
use crate::alloc::Run;
use crate::engine::{Engine, Room};
use crate::error::{Error, Result};
use crate::format::item::Extent;
use crate::format::{Key, Kind};
use crate::inode::Inode;
use crate::mutation::{self, Mutation};
use crate::sync::Arc;
use crate::sync::atomic::Ordering;
use crate::txn::Op;
use crate::types::FileType;
use std::collections::{BTreeSet, VecDeque};

/// Items that one step of a purge removes.
const PURGE_ITEMS: usize = 64;
/// An inode with more blocks than this is purged in the background.
const INLINE_PURGE_BLOCKS: u64 = 4096;

/// Unlinked inodes that are too large to be purged by the call that removed them, or whose purge has failed.
#[derive(Default)]
pub struct Purges {
    /// The next one first; what has failed goes to the end.
    waiting: VecDeque<Arc<Inode>>,
    /// Purges that have begun so far: each has a number.
    begun: u64,
    /// Those of them that have not ended.
    under_way: BTreeSet<u64>,
    /// So many wait for some to end.
    listeners: usize,
}

/// A purge from when nobody can use the inode any more to its end, however it ends.
struct UnderWay<'a> {
    engine: &'a Engine,
    number: u64,
}

impl<'a> UnderWay<'a> {
    fn begin(engine: &'a Engine, purges: &mut Purges) -> Self {
        let number = purges.begun;
        purges.begun += 1;
        purges.under_way.insert(number);
        Self { engine, number }
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let mut purges = self.engine.purges.lock();
        purges.under_way.remove(&self.number);
        let is_heard = purges.listeners > 0;
        drop(purges);
        // Small files are removed all the time, and those who wait for other things need not look again each time.
        if is_heard {
            self.engine.background.progress();
        }
    }
}

/// Somebody who waits for purges.
struct Listener<'a>(&'a Engine);

impl<'a> Listener<'a> {
    fn new(engine: &'a Engine) -> Self {
        engine.purges.lock().listeners += 1;
        Self(engine)
    }
}

impl Drop for Listener<'_> {
    fn drop(&mut self) {
        self.0.purges.lock().listeners -= 1;
    }
}

impl Engine {
    /// Takes the name of something that is no directory away. What fails of the purge is tried again.
    pub fn unlink(&self, dir: u64, name: &[u8]) -> Result<()> {
        check_name(name)?;
        self.before_entry()?;
        let parent = self.directory(dir)?;
        let inode;
        {
            let _ops = parent.ops.lock();
            let admission = self.admit(OP_RECORD_BYTES, 0, Room::Normal)?;
            let found = self.present(dir, name)?;
            if found.file_type == FileType::Directory {
                return Err(Error::IsDirectory);
            }
            inode = self.inode(found.inode)?;
            let mut op = Op::new();
            let mut metas = MetaLocks::new(&[&parent, &inode]);
            rules::unlink(&mut metas, &mut op, (&parent, found.key), &inode, self.now());
            metas.commit(self, op, admission)?;
        }
        self.purge_or_leave(&inode);
        Ok(())
    }

    /// Removes an empty directory.
    pub fn rmdir(&self, dir: u64, name: &[u8]) -> Result<()> {
        if name == b"." {
            return Err(Error::Invalid("cannot remove ."));
        }
        if name == b".." {
            return Err(Error::NotEmpty);
        }
        check_name(name)?;
        self.before_entry()?;
        let parent = self.directory(dir)?;
        let inode;
        {
            let _tree = self.tree_lock.lock();
            let _ops = parent.ops.lock();
            let found = self.present(dir, name)?;
            if found.file_type != FileType::Directory {
                return Err(Error::NotDirectory);
            }
            inode = self.directory(found.inode)?;
            rules::check_not_itself(&parent, &inode)?;
            let _child_ops = inode.ops.lock();
            let admission = self.admit(OP_RECORD_BYTES, 0, Room::Normal)?;
            let mut op = Op::new();
            let mut metas = MetaLocks::new(&[&parent, &inode]);
            rules::rmdir(&mut metas, &mut op, (&parent, found.key), &inode, self.now())?;
            metas.commit(self, op, admission)?;
        }
        self.purge_or_leave(&inode);
        Ok(())
    }

    /// As [`Engine::purge_if_unused`], after an operation that has happened, whatever comes of the purge.
    pub fn purge_or_leave(&self, inode: &Arc<Inode>) {
        if self.purge_if_unused(inode).is_err() {
            self.counters.purge_errors.add(1);
        }
    }

    /// Purges `inode` if it has no name and no user: at once if it is small, in the background otherwise.
    ///
    /// # Errors
    /// Why it failed, for the caller to count: the purge is tried again in the background, and by the next recovery.
    pub fn purge_if_unused(&self, inode: &Arc<Inode>) -> Result<()> {
        let _under_way = {
            let mut meta = inode.meta.lock();
            if meta.item.links > 0
                || meta.purged
                || (inode.users.load(Ordering::Acquire) > 0
                    && !mutation::active(Mutation::ForgetUsers))
                || self.options.read_only
            {
                return Ok(());
            }
            meta.purged = true;
            UnderWay::begin(self, &mut self.purges.lock())
        };
        let most_blocks = self.options.purge_at_once_blocks.unwrap_or(INLINE_PURGE_BLOCKS);
        if inode.meta.lock().item.blocks > most_blocks {
            self.purges.lock().waiting.push_front(inode.clone());
            self.background.wake_cleaner();
            return Ok(());
        }
        self.purge(inode).inspect_err(|_| self.purges.lock().waiting.push_back(inode.clone()))
    }

    /// Purges one inode that waits for it. False: none does, though others may be purging one.
    ///
    /// # Errors
    /// Why it failed. It waits behind all others then.
    pub fn purge_step(&self) -> Result<bool> {
        match self.purge_next() {
            None => Ok(false),
            Some((_, Ok(()))) => Ok(true),
            Some((inode, Err(error))) => {
                self.purges.lock().waiting.push_back(inode);
                Err(error)
            }
        }
    }

    /// Purges the next inode that waits, if one does; and how that went.
    fn purge_next(&self) -> Option<(Arc<Inode>, Result<()>)> {
        let (inode, _under_way) = {
            let mut purges = self.purges.lock();
            let inode = purges.waiting.pop_front()?;
            (inode, UnderWay::begin(self, &mut purges))
        };
        let result = self.purge(&inode);
        Some((inode, result))
    }

    /// Purges all that wait for it, and waits for the purges of others: after this, what was removed before is gone, and its
    /// space free with the next checkpoint. The caller holds at most `ops` locks.
    ///
    /// What cannot be purged is none of the caller's, who has removed other things, or nothing: it is counted, and goes on waiting.
    ///
    /// # Errors
    /// [`Error::Shutdown`].
    pub fn purge_all(&self) -> Result<()> {
        let mut failed = Vec::new();
        let result = self.purge_waiting(&mut failed);
        self.counters.purge_errors.add(failed.len() as u64);
        self.purges.lock().waiting.extend(failed);
        result
    }

    /// Tries each inode that waits, once: those whose purge fails go to `failed`.
    fn purge_waiting(&self, failed: &mut Vec<Arc<Inode>>) -> Result<()> {
        let _listener = Listener::new(self);
        let mut end = None;
        loop {
            let moment = self.background.moment();
            if let Some((inode, result)) = self.purge_next() {
                if result.is_err() {
                    failed.push(inode);
                }
                continue;
            }
            {
                let purges = self.purges.lock();
                if !purges.waiting.is_empty() {
                    continue;
                }
                // What was removed before has begun by now. Others may remove files without end: what begins later is not waited for.
                let end = *end.get_or_insert(purges.begun);
                if purges.under_way.first().is_none_or(|number| *number >= end) {
                    return Ok(());
                }
            }
            self.check_shutdown()?;
            self.await_others(moment);
        }
    }

    /// Removes everything that belongs to an unlinked inode. Its `purged` mark is set: nobody can
    /// begin to use it.
    pub fn purge(&self, inode: &Arc<Inode>) -> Result<()> {
        let _ops = inode.ops.lock();
        self.forget_pages(inode, 0);
        let mut next = Some(Key::inline(inode.number));
        let last = Key { inode: inode.number, ..Key::MAX };
        let limit = self.options.cut_extents.map_or(PURGE_ITEMS, |items| items.max(1));
        while let Some(from) = next {
            let admission = self.admit(OP_RECORD_BYTES, 0, Room::Normal)?;
            let _map = inode.map.lock();
            let (items, more) = self.store.collect(from, last, limit)?;
            next = more;
            let mut op = Op::new();
            for (key, value) in items {
                if key.kind == Kind::Extent {
                    let (start, blocks, _) = Extent::decode_head(&value)?;
                    op.freed(Run { start, blocks });
                }
                op.delete(key);
            }
            if next.is_none() {
                op.inode_removed();
                op.delete(Key::inode(inode.number));
                let has_orphan_item = {
                    let meta = inode.meta.lock();
                    meta.orphan || meta.cutting
                };
                if has_orphan_item {
                    op.delete(Key::orphan(inode.number));
                }
            }
            // All that a scan looked at may have been deleted before.
            if !op.is_empty() {
                let lsn = self.store.commit(op, admission)?;
                inode.meta.lock().logged(lsn, true);
            }
        }
        self.dirty.remove(inode);
        self.inodes.remove(inode.number);
        Ok(())
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::UnderWay;
    use crate::txn::volume_with_a_file;
    use std::time::{Duration, Instant};

    #[test]
    fn who_waits_for_purges_does_not_wait_for_those_that_begin_later() {
        let (_volume, file) = volume_with_a_file();
        let engine = file.engine();
        let begin = || UnderWay::begin(engine, &mut engine.purges.lock());
        let mut under_way = begin();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| engine.purge_all());
            let began = Instant::now();
            // One is always under way.
            while !waits.is_finished() && began.elapsed() < Duration::from_secs(10) {
                std::thread::sleep(Duration::from_micros(200));
                under_way = begin();
            }
            let has_ended = waits.is_finished();
            drop(under_way);
            assert_eq!(waits.join().expect("no panic"), Ok(()));
            assert!(has_ended, "it waited for what began later");
        });
    }
}
