//! Inodes in memory, and the table that finds them.
//!
//! An [`Inode`] is the authority on its attributes while it is in memory; the item in the store is
//! what was last logged. Locks of one inode, outermost first:
//!
//! 1. `ops`: serialises calls that change the inode's contents (writes, truncate, allocate; for directories:
//!    creating, removing, renaming entries). Held over device reads of the inode's own data, never over
//!    waits for background work of others.
//! 2. `map`: the mapping of pages to blocks only changes under it.
//! 3. `pages`: the page map. CPU work only.
//! 4. `meta`: attributes. CPU work only; commits of operations that change the inode item happen under it,
//!    so that the order of LSNs is the order of after-images.
//!
//! Parents are locked before children; more than one directory's `ops` only under the engine's tree lock.
//!
//! **Invariant:** the size in `meta.item` is the size the log knows; `size` is what programs see. They differ only
//! while dirty pages beyond the logged size have not been written or logged.
//! **Invariant:** an inode with dirty pages or attributes is on the dirty list, which holds it in memory.

use crate::cache::map::PageMap;
use crate::error::{Error, Result};
use crate::file::closed::Mark;
use crate::file::known_homes::KnownHomes;
use crate::file::known_mapping::KnownMapping;
use crate::format::item::InodeItem;
use crate::number_map::NumberMap;
use crate::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};
use crate::sync::{Arc, Condvar, Mutex, MutexGuard, RwLock, patiently};
use crate::txn::Lsn;
use crate::types::{Attr, FileType, Timestamp};
use std::collections::VecDeque;

/// The next read has to look at the access time.
pub const ATIME_UNSETTLED: i64 = i64::MIN;

/// Attributes under the `meta` lock.
#[derive(Debug, Clone)]
#[allow(clippy::struct_excessive_bools, reason = "facts that do not depend on each other")]
pub struct Meta {
    /// The item as it is to be logged next.
    pub item: InodeItem,
    /// Attributes differ from the logged item.
    pub dirty: bool,
    /// Last operation that concerns this inode.
    pub last_lsn: Lsn,
    /// Last operation that `fdatasync` has to wait for.
    pub data_lsn: Lsn,
    /// An orphan item exists: the inode is unlinked and to be purged when nobody uses it.
    pub orphan: bool,
    /// A cut is not at its end: there is an orphan item, whatever the names are.
    pub cutting: bool,
    /// It was made without a name and may get one; what has lost its last name never gets another.
    pub linkable: bool,
    /// The purge has begun or is done; nothing may be written any more.
    pub purged: bool,
}

/// How far a file reached at some moment.
#[derive(Debug, Clone, Copy)]
pub struct Reach {
    /// It was so long, and
    pub size: u64,
    /// had become shorter so often.
    pub cuts: u64,
}

/// An inode in memory. See the module's head for the locks.
pub struct Inode {
    /// Its number.
    pub number: u64,
    /// Its type never changes.
    pub file_type: FileType,
    /// See the module's head.
    pub ops: Mutex<()>,
    /// See the module's head.
    pub map: Mutex<()>,
    /// See the module's head.
    pub pages: RwLock<PageMap>,
    /// See the module's head.
    pub meta: Mutex<Meta>,
    /// Size that programs see.
    pub size: AtomicU64,
    /// An operation of a cut has failed, and the rest of it is still to be done: see [`crate::engine::Engine::end_cut`].
    pub owes_cut: AtomicBool,
    cuts: AtomicU64,
    /// Where an append that is under way began: it may be taken back. [`u64::MAX`]: there is none. Set under `ops`.
    appending_from: AtomicU64,
    /// Woken when writeback or a read of this inode has ended.
    pub io_done: Condvar,
    /// Counts ends of writeback and reads, for waiting with `io_done`.
    pub io_epoch: Mutex<u64>,
    /// Handles and holds: an unlinked inode is purged when this falls to 0.
    pub users: AtomicU32,
    /// On the dirty list.
    pub listed: AtomicBool,
    /// The relative access time policy has nothing to do until the next change, or until then, in seconds since 1970;
    /// [`ATIME_UNSETTLED`].
    pub atime_settled_until_s: AtomicI64,
    /// May have unwritten extents, which are longer than others. Set under `map`; who reads it without that lock may take
    /// an unwritten extent for a hole, which reads the same.
    pub unwritten: AtomicBool,
    /// Used since the table's hand passed.
    pub referenced: AtomicBool,
    /// Closed before it was synced: see [`crate::file::closed`].
    pub closed: Mark,
    /// The error of a failed background writeback, to be reported by each handle once: (epoch, what).
    pub write_error: Mutex<(u64, Option<Error>)>,
    /// What was looked up of its mapping. A leaf.
    pub known_mapping: Mutex<KnownMapping>,
    /// Where its blocks live. A leaf.
    pub known_homes: Mutex<KnownHomes>,
}

impl Inode {
    /// An inode as the store has it.
    pub fn new(number: u64, item: InodeItem) -> Self {
        Self {
            number,
            file_type: item.file_type,
            ops: Mutex::new(()),
            map: Mutex::new(()),
            pages: RwLock::new(PageMap::new()),
            size: AtomicU64::new(item.size),
            owes_cut: AtomicBool::new(false),
            cuts: AtomicU64::new(0),
            appending_from: AtomicU64::new(u64::MAX),
            meta: Mutex::new(Meta {
                item,
                dirty: false,
                last_lsn: 0,
                data_lsn: 0,
                orphan: item.links == 0,
                cutting: false,
                linkable: false,
                purged: false,
            }),
            io_done: Condvar::new(),
            io_epoch: Mutex::new(0),
            users: AtomicU32::new(0),
            listed: AtomicBool::new(false),
            atime_settled_until_s: AtomicI64::new(ATIME_UNSETTLED),
            unwritten: AtomicBool::new(item.blocks > 0),
            referenced: AtomicBool::new(false),
            closed: Mark::default(),
            write_error: Mutex::new((0, None)),
            known_mapping: Mutex::default(),
            known_homes: Mutex::default(),
        }
    }

    /// An inode whose last operation is, or may be, `lsn`.
    pub fn committed(number: u64, item: InodeItem, lsn: Lsn) -> Self {
        let mut inode = Self::new(number, item);
        let meta = inode.meta.get_mut();
        (meta.last_lsn, meta.data_lsn) = (lsn, lsn);
        inode
    }

    /// The size that an operation has just logged. The caller holds `pages`.
    pub fn set_logged_size(&self, size: u64) {
        if self.size.swap(size, Ordering::AcqRel) > size {
            self.cuts.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// How often the file has become shorter. What it was before says nothing about how far it reaches now.
    pub fn cuts(&self) -> u64 {
        self.cuts.load(Ordering::Acquire)
    }

    /// How far the file reaches, without what an append under way has written. The caller holds `pages`.
    pub fn reach(&self) -> Reach {
        let size = self.size().min(self.appending_from.load(Ordering::Acquire));
        Reach { size, cuts: self.cuts() }
    }

    /// An append begins, or with [`u64::MAX`] it has ended. The caller holds `ops`.
    pub fn set_appending_from(&self, size: u64) {
        self.appending_from.store(size, Ordering::Release);
    }

    /// Sets the size back to where the append under way began. Nobody's reach ([`Inode::reach`]) was more. The caller holds `ops` and `pages`.
    pub fn take_back_size(&self, size: u64) {
        debug_assert!(size == self.appending_from.load(Ordering::Relaxed));
        self.size.store(size, Ordering::Release);
    }

    /// Size that programs see.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// As [`Inode::size`], not amid a batch: who has seen the new size of one of its files sees that of all, since it sets them with the
    /// attributes of all locked.
    pub fn settled_size(&self) -> u64 {
        let _meta = self.meta.lock();
        self.size()
    }

    /// Attributes that programs see.
    pub fn attr(&self) -> Attr {
        let unsettled = self.unsettled_pages();
        let meta = self.meta.lock();
        self.attr_of(&meta, unsettled)
    }

    /// As [`Inode::attr`], of an inode that is there: not purged, and not yet to be made by a batch.
    pub fn attr_unless_purged(&self) -> Result<Attr> {
        let unsettled = self.unsettled_pages();
        let meta = self.meta.lock();
        if meta.purged { Err(Error::NotFound) } else { Ok(self.attr_of(&meta, unsettled)) }
    }

    /// Pages whose blocks the attributes may not count yet: dirty, or on their way home. To be looked at before the attributes, which count
    /// them before they are home: a file with data never shows none.
    fn unsettled_pages(&self) -> u64 {
        if self.file_type == FileType::Regular {
            let counts = self.pages.read().counts();
            (counts.dirty + counts.writeback) as u64
        } else {
            0
        }
    }

    /// As [`Inode::attr`], with the attributes at hand.
    pub fn attr_of(&self, meta: &Meta, unsettled_pages: u64) -> Attr {
        let item = &meta.item;
        let size = if self.file_type == FileType::Regular { self.size() } else { item.size };
        // Pages not yet allocated count, but overwritten ones not twice, as far as that can be told without the mapping: in a file with
        // holes they do, and beside what is allocated behind the end new ones do not.
        let full = size.div_ceil(crate::format::BLOCK_BYTES_U64);
        let mut blocks = (item.blocks + unsettled_pages).min(item.blocks.max(full));
        if item.is_inline() && size > 0 {
            blocks = blocks.max(1);
        }
        Attr {
            ino: self.number,
            file_type: item.file_type,
            permissions: item.permissions,
            links: item.links,
            uid: item.uid,
            gid: item.gid,
            size_bytes: size,
            blocks,
            rdev: item.rdev,
            atime: item.atime,
            mtime: item.mtime,
            ctime: item.ctime,
            btime: item.btime,
            change_counter: item.change_counter,
        }
    }

    /// Wakes everybody who waits for I/O of this inode.
    pub fn io_ended(&self) {
        *self.io_epoch.lock() += 1;
        self.io_done.notify_all();
    }

    /// The `map` lock, which may be held over reads of nodes.
    ///
    /// # Errors
    /// [`Error::WouldBlock`]: somebody who does not wait ([`crate::sync::at_once`]) does not get it.
    pub fn lock_map(&self) -> Result<MutexGuard<'_, ()>> {
        patiently(|| self.map.lock(), || self.map.try_lock()).ok_or(Error::WouldBlock)
    }

    /// The moment to compare with in [`Inode::wait_io`]; take it before looking at the state.
    pub fn io_moment(&self) -> u64 {
        *self.io_epoch.lock()
    }

    /// Waits until some I/O of this inode has ended since `moment`.
    pub fn wait_io(&self, moment: u64) {
        let mut epoch = self.io_epoch.lock();
        while *epoch == moment {
            self.io_done.wait(&mut epoch);
        }
    }

    /// As [`Inode::wait_io`], at most about `timeout_us`.
    pub fn wait_io_for(&self, moment: u64, timeout_us: u64) {
        let mut epoch = self.io_epoch.lock();
        if *epoch == moment {
            crate::sync::wait_for(&self.io_done, &mut epoch, timeout_us);
        }
    }

    /// A directory that was removed, or an unlinked inode.
    pub fn check_alive(&self) -> Result<()> {
        if self.meta.lock().item.links == 0 { Err(Error::NotFound) } else { Ok(()) }
    }
}

impl Meta {
    /// Data changed: mtime, ctime and change counter move.
    pub fn touch_data(&mut self, now: Timestamp) {
        self.item.mtime = now;
        self.touch_attributes(now);
    }

    /// Attributes changed: ctime and change counter move.
    pub fn touch_attributes(&mut self, now: Timestamp) {
        self.item.ctime = now;
        self.item.change_counter = self.item.change_counter.wrapping_add(1);
        self.dirty = true;
    }

    /// An operation with the current item was committed.
    pub fn logged(&mut self, lsn: Lsn, concerns_data: bool) {
        self.dirty = false;
        self.last_lsn = self.last_lsn.max(lsn);
        if concerns_data {
            self.data_lsn = self.data_lsn.max(lsn);
        }
    }
}

/// Number of independently locked parts of the table.
const SHARDS: usize = 16;
/// Inodes that one sweep looks at.
const SWEEP: usize = 64;
/// Inodes that it finds in use before it leaves the rest to the next. Each is a look at memory that the processor's cache does not have, and
/// where a mount's kernel knows more files than the table should hold, all of them are in use.
const SWEEP_IN_USE: usize = 8;
/// The part of the table that those have which nobody has asked for since they came.
const FRESH_PART: usize = 128;

#[derive(Default)]
struct Shard {
    inodes: NumberMap<Arc<Inode>>,
    /// The newest, in the order in which they came. Numbers of inodes that were purged meanwhile are skipped, here and in `clock`.
    fresh: VecDeque<u64>,
    /// The order in which the sweep looks at all others.
    clock: VecDeque<u64>,
    /// Numbers that somebody reads from the store right now: few.
    loading: Vec<Loading>,
}

/// See [`InodeTable::find_or_load`].
struct Loading {
    number: u64,
    readers: u32,
    /// How often the inode left the table meanwhile.
    departures: u64,
}

/// Finds inodes by number, and keeps those that nobody uses within a limit.
pub struct InodeTable {
    shards: Vec<Mutex<Shard>>,
    shard_limit: usize,
}

impl InodeTable {
    /// A table that keeps at most about `limit` unused inodes.
    pub fn new(limit: usize) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::new(Shard::default())).collect(),
            shard_limit: (limit / SHARDS).max(4),
        }
    }

    fn shard(&self, number: u64) -> &Mutex<Shard> {
        &self.shards[(number % SHARDS as u64) as usize]
    }

    /// The inode if it is in memory.
    pub fn find(&self, number: u64) -> Option<Arc<Inode>> {
        self.shard(number).lock().find(number)
    }

    /// As [`InodeTable::find`], without counting as use.
    pub fn peek(&self, number: u64) -> Option<Arc<Inode>> {
        self.shard(number).lock().inodes.get(&number).cloned()
    }

    /// The inode from the table, else what `load` reads from the store. The second part holds inodes that
    /// fell out of the table and whose pages the caller frees, outside of the table's lock.
    ///
    /// An inode may enter the table, be changed and leave it again while `load` runs: what was read is then
    /// out of date, and is read again. Otherwise a change, or a purge, would be undone in memory.
    pub fn find_or_load(
        &self,
        number: u64,
        mut load: impl FnMut() -> Result<Inode>,
    ) -> Result<(Arc<Inode>, Vec<Arc<Inode>>)> {
        loop {
            let departures = {
                let mut shard = self.shard(number).lock();
                if let Some(inode) = shard.find(number) {
                    return Ok((inode, Vec::new()));
                }
                shard.begin_loading(number)
            };
            let loaded = load();
            let mut shard = self.shard(number).lock();
            let is_current = shard.end_loading(number) == departures;
            if let Some(present) = shard.inodes.get(&number) {
                return Ok((present.clone(), Vec::new()));
            }
            if !is_current {
                continue;
            }
            let inode = Arc::new(loaded?);
            shard.insert(number, inode.clone());
            let dropped = shard.shrink(self.shard_limit);
            return Ok((inode, dropped));
        }
    }

    /// Forgets a purged inode.
    pub fn remove(&self, number: u64) {
        let removed = self.shard(number).lock().take(number);
        // Its pages are freed outside of the lock.
        drop(removed);
    }

    /// More inodes like `number` are in memory than should be: all are in use, or have something to write.
    pub fn is_over_limit(&self, number: u64) -> bool {
        self.shard(number).lock().inodes.len() > self.shard_limit
    }

    /// Everything in memory, for syncs and statistics.
    pub fn count(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().inodes.len()).sum()
    }
}

impl Shard {
    fn find(&self, number: u64) -> Option<Arc<Inode>> {
        let inode = self.inodes.get(&number)?;
        if !inode.referenced.load(Ordering::Relaxed) {
            inode.referenced.store(true, Ordering::Relaxed);
        }
        Some(Arc::clone(inode))
    }

    fn insert(&mut self, number: u64, inode: Arc<Inode>) {
        self.inodes.insert(number, inode);
        self.fresh.push_back(number);
        if self.fresh.len() + self.clock.len() > 2 * self.inodes.len() + SWEEP {
            let inodes = &self.inodes;
            self.fresh.retain(|number| inodes.contains_key(number));
            self.clock.retain(|number| inodes.contains_key(number));
        }
    }

    /// Moves what has stopped being fresh to the clock, or out if the shard is full; then a second-chance sweep over the clock. Only ever
    /// drops what nobody else holds. An inode on the dirty list is held by it.
    ///
    /// Whoever makes many files never asks for most of them again: they leave while their memory is still in the processor's
    /// cache, and the next ones are made in it.
    fn shrink(&mut self, limit: usize) -> Vec<Arc<Inode>> {
        let mut dropped = Vec::new();
        let fresh_limit = limit / FRESH_PART;
        let mut in_use = 0;
        for _ in 0..SWEEP {
            let is_full = self.inodes.len() > limit;
            let from_fresh = self.fresh.len() > fresh_limit;
            if !is_full && !from_fresh {
                break;
            }
            let next = if from_fresh { self.fresh.pop_front() } else { self.clock.pop_front() };
            let Some(number) = next.or_else(|| self.fresh.pop_front()) else { break };
            if !is_full {
                self.clock.push_back(number);
                continue;
            }
            let Some(inode) = self.inodes.get(&number) else { continue };
            if Arc::strong_count(inode) == 1
                && !inode.referenced.swap(false, Ordering::Relaxed)
                && !inode.listed.load(Ordering::Acquire)
            {
                dropped.extend(self.take(number));
            } else {
                self.clock.push_back(number);
                in_use += 1;
                if in_use == SWEEP_IN_USE {
                    break;
                }
            }
        }
        dropped
    }

    fn take(&mut self, number: u64) -> Option<Arc<Inode>> {
        let taken = self.inodes.remove(&number);
        if taken.is_some()
            && let Some(loading) = self.loading.iter_mut().find(|each| each.number == number)
        {
            loading.departures += 1;
        }
        taken
    }

    /// One reader more of `number`. Answers how often the inode has left the table since the first of them came.
    fn begin_loading(&mut self, number: u64) -> u64 {
        if let Some(loading) = self.loading.iter_mut().find(|each| each.number == number) {
            loading.readers += 1;
            return loading.departures;
        }
        self.loading.push(Loading { number, readers: 1, departures: 0 });
        0
    }

    /// One reader of `number` is done. Answers how often the inode has left the table.
    fn end_loading(&mut self, number: u64) -> u64 {
        let Some(place) = self.loading.iter().position(|each| each.number == number) else {
            return 0;
        };
        let loading = &mut self.loading[place];
        let departures = loading.departures;
        loading.readers -= 1;
        if loading.readers == 0 {
            self.loading.swap_remove(place);
        }
        departures
    }
}

/// What tests of this and other modules begin with.
#[cfg(any(test, feature = "shuttle"))]
pub mod for_tests {
    use super::{Arc, FileType, Inode, InodeItem, Timestamp};

    /// What a new regular file with `links` links says of itself.
    pub fn item(links: u32) -> InodeItem {
        let now = Timestamp::from_ns(0);
        InodeItem {
            file_type: FileType::Regular,
            permissions: 0o644,
            links,
            uid: 0,
            gid: 0,
            size: 0,
            blocks: 0,
            parent: 0,
            change_counter: 1,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            rdev: 0,
            flags: 0,
            subdirectories: 0,
        }
    }

    /// A file that nobody else knows.
    pub fn inode() -> Arc<Inode> {
        Arc::new(Inode::new(7, item(1)))
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::for_tests::item;
    use super::*;

    #[test]
    fn an_inode_that_came_and_left_while_it_was_read_is_read_again() {
        let table = InodeTable::new(64);
        let reads = AtomicU32::new(0);
        let (inode, _) = table
            .find_or_load(7, || {
                if reads.fetch_add(1, Ordering::Relaxed) == 0 {
                    // Somebody else loads it, changes it, and it falls out of the table.
                    table.find_or_load(7, || Ok(Inode::new(7, item(2)))).expect("load");
                    table.remove(7);
                    return Ok(Inode::new(7, item(1)));
                }
                Ok(Inode::new(7, item(2)))
            })
            .expect("load");
        assert_eq!(inode.meta.lock().item.links, 2);
        assert_eq!(reads.load(Ordering::Relaxed), 2);
        assert!(table.shard(7).lock().loading.is_empty());
    }

    #[test]
    fn inodes_that_come_and_go_leave_no_trace_in_the_clock() {
        let table = InodeTable::new(64);
        for number in 2..10_000 {
            table.find_or_load(number * 16, || Ok(Inode::new(number * 16, item(1)))).expect("load");
            table.remove(number * 16);
        }
        let shard = table.shard(16).lock();
        assert!(shard.clock.len() + shard.fresh.len() <= SWEEP + 1);
    }

    #[test]
    fn a_full_table_looks_at_few_that_are_in_use_and_shrinks_once_they_are_not() {
        const LIMIT: u64 = 64;
        let table = InodeTable::new(SHARDS * LIMIT as usize);
        let load = |each: u64| {
            let number = each * SHARDS as u64;
            table.find_or_load(number, || Ok(Inode::new(number, item(1)))).expect("load").0
        };
        let used: Vec<_> = (1..=4 * LIMIT).map(load).collect();
        assert_eq!(table.count() as u64, 4 * LIMIT);
        let before = table.shard(0).lock().clock.clone();
        drop(load(4 * LIMIT + 1));
        let after = table.shard(0).lock().clock.clone();
        let looked = before.iter().position(|number| Some(number) == after.front());
        assert!(looked.is_some_and(|looked| looked <= SWEEP_IN_USE), "{looked:?}");
        drop(used);
        for each in 0..4 * LIMIT {
            load(5 * LIMIT + each);
        }
        assert!(table.count() as u64 <= LIMIT + 1, "{}", table.count());
    }

    #[test]
    fn a_load_that_fails_leaves_nothing_behind() {
        let table = InodeTable::new(64);
        assert!(matches!(table.find_or_load(7, || Err(Error::NotFound)), Err(Error::NotFound)));
        assert!(table.shard(7).lock().loading.is_empty());
        assert_eq!(table.count(), 0);
    }

    #[test]
    fn what_nobody_asks_for_leaves_before_what_is_used() {
        const LIMIT: u64 = 2048;
        let table = InodeTable::new(SHARDS * LIMIT as usize);
        let number = |each: u64| each * SHARDS as u64;
        let load =
            |each| table.find_or_load(number(each), || Ok(Inode::new(number(each), item(1))));
        for each in 1..=LIMIT / 2 {
            load(each).expect("load");
            load(each).expect("a second use");
        }
        for each in LIMIT..10 * LIMIT {
            load(each).expect("load");
        }
        assert!((1..=LIMIT / 2).all(|each| table.peek(number(each)).is_some()));
        assert!(table.peek(number(10 * LIMIT - 1)).is_some());
        assert!(table.count() as u64 <= LIMIT);
    }

    #[test]
    fn the_table_forgets_unused_inodes_only() {
        let table = InodeTable::new(64);
        let (held, _) = table.find_or_load(16, || Ok(Inode::new(16, item(1)))).expect("load");
        for number in 2..100 {
            table.find_or_load(number * 16, || Ok(Inode::new(number * 16, item(1)))).expect("load");
        }
        assert!(table.count() <= 5 + 64 / SHARDS, "{}", table.count());
        assert!(table.peek(16).is_some_and(|inode| Arc::ptr_eq(&inode, &held)));
    }
}
