//! Recovery: from the durable checkpoint and the log to a volume in use.
//!
//! Runs when a volume is opened, before anybody else sees it, on the calling thread:
//!
//! 1. the log is scanned and its tail proved (`log::replay`);
//! 2. a superblock with the next log epoch is made durable, so that frames that were cut can never
//!    come back (not when read-only);
//! 3. records that the checkpoint does not contain become the running delta; payload pages are
//!    remembered by place (frames that the checkpoint contains matter only for those);
//! 4. payload pages enter the cache as dirty, logged pages and go home; orphans are purged and
//!    interrupted cuts finished. None of that is logged, since the next replay would do the same: the ring may be
//!    full, of frames and of what failed attempts to write frames have left;
//! 5. a checkpoint publishes the result and empties the log.
//!
//! A crash during any of this leaves the old checkpoint and the old log: nothing they need is
//! overwritten, except pages going home in place, which the log still holds.
//!
//! **Invariant:** a checkpoint before step 5, for lack of memory, keeps the frames from the oldest on whose payload is not home
//! (`Log::keep_recovered`).

use crate::alloc::{ReserveClass, Run, SpaceChange};
use crate::cache::map::RunFilter;
use crate::cache::page::PageMut;
use crate::device::IoClass;
use crate::engine::{Engine, Room};
use crate::error::{Error, Result};
use crate::file::extents;
use crate::format::item::InodeItem;
use crate::format::record::Record;
use crate::format::{BLOCK_BYTES, Key, Kind, MAX_COUNTER_AT_OPENING, checksum};
use crate::log::Admission;
use crate::log::replay::{Progress, Recovered, ReplayFrame};
use crate::mutation::{self, Mutation};
use crate::sync::atomic::Ordering;
use crate::tree;
use crate::txn::Lsn;
use crate::txn::checkpoint::HOME_ATTEMPTS;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

/// Orphans read at a time.
const ORPHAN_BATCH: usize = 64;
/// Payload pages that are in the cache before they are sent home (256 MiB; a quarter of the cache at most): sorted together, more
/// of them are neighbours.
const PAGES_IN_CACHE: usize = 65_536;
/// Pages that are written home together.
const HOME_PAGES: u64 = 8192;

/// The newest payload of every page that is not home: LSN of its frame, and how to find it.
type Payloads = BTreeMap<(u64, u64), Lsn>;

/// What replay gathers besides the delta.
#[derive(Default)]
struct Gathered {
    payloads: Payloads,
    /// Inode items touched, and whether they exist now.
    inodes: BTreeMap<u64, bool>,
    next_inode: u64,
}

impl Gathered {
    /// The inode number was given out.
    fn use_inode(&mut self, number: u64) -> Result<()> {
        if number >= MAX_COUNTER_AT_OPENING {
            return Err(Error::Corrupt(format!("log: inode number {number} is impossibly large")));
        }
        self.next_inode = self.next_inode.max(number + 1);
        Ok(())
    }
}

impl Engine {
    /// Steps 3 to 5. Answers whether there was anything to recover.
    pub fn recover(&self, recovered: &Recovered, checkpoint_lsn: Lsn) -> Result<bool> {
        let mut gathered = Gathered::default();
        recovered.replay(&*self.device, &mut |_| {}, &mut |frame| {
            if frame.header.last_lsn <= checkpoint_lsn {
                replay_payloads(frame, &mut gathered)
            } else {
                self.replay_frame(frame, &mut gathered)?;
                self.check_delta_fits()
            }
        })?;
        self.count_inodes(&gathered)?;
        let orphans = self.orphans()?;
        // Frames that nothing is needed of stay in the ring until a checkpoint says so.
        if recovered.live_frames().len() == 0 && orphans.is_empty() {
            return Ok(false);
        }
        self.store.replaying.store(true, Ordering::Release);
        self.forget_orphaned_payloads(&mut gathered.payloads)?;
        self.check_payloads_fit(gathered.payloads.len() as u64)?;
        // All at once: a checkpoint that has to make room in the log meanwhile must keep what is not loaded yet.
        for ((inode, _), lsn) in &gathered.payloads {
            self.store.obligations.add(*lsn, 1, Some(*inode));
        }
        self.load_payloads(recovered, &gathered.payloads)?;
        if !self.options.read_only {
            self.send_all_home(self.geometry.log_blocks())?;
            self.clean_orphans(orphans)?;
            self.wait_checkpoint(self.checkpointer.goal())?;
        }
        self.store.replaying.store(false, Ordering::Release);
        Ok(true)
    }

    /// What follows from replay is not logged: it needs memory, and no room in the ring. Where that becomes too much, a checkpoint publishes
    /// what is done; it keeps the frames that are owed something.
    pub fn admit_unlogged(&self, room: Room) -> Result<Admission> {
        let bytes = self.store.delta_size().running_bytes as u64;
        if room == Room::Normal && bytes > self.replayed_delta_bytes() {
            self.wait_checkpoint(self.checkpointer.goal())?;
        }
        Ok(self.log.admit_nothing())
    }

    /// What was changed by somebody with much more memory may be too much for this opening.
    fn check_delta_fits(&self) -> Result<()> {
        let bytes = self.store.delta_size().running_bytes as u64;
        let most = self.replayed_delta_bytes();
        if bytes <= most {
            return Ok(());
        }
        Err(Error::TooLittleMemory(format!(
            "the changes in the log take more than {} KiB, which is what this opening may spend on them",
            most >> 10,
        )))
    }

    /// A volume that is open for reading only keeps all payload in memory, and has to have room for what is read besides.
    fn check_payloads_fit(&self, pages: u64) -> Result<()> {
        let most = self.pool.capacity_pages() as u64 / 2;
        if !self.options.read_only || pages <= most {
            return Ok(());
        }
        let mib = |pages: u64| (pages * BLOCK_BYTES as u64).div_ceil(1 << 20);
        Err(Error::TooLittleMemory(format!(
            "{} MiB of data are in the log only, and an opening for reading only with this much memory can keep {} MiB",
            mib(pages),
            mib(most),
        )))
    }

    fn replay_frame(&self, frame: &ReplayFrame<'_>, gathered: &mut Gathered) -> Result<()> {
        let lsn = frame.header.last_lsn;
        for record in frame.records() {
            match record? {
                Record::Put { key, value } => {
                    if key.kind == Kind::Inode {
                        gathered.inodes.insert(key.inode, true);
                        gathered.use_inode(key.inode)?;
                    }
                    self.store.replay(key, Some(value));
                }
                Record::Delete { .. } if mutation::active(Mutation::IgnoreDeletes) => {}
                Record::Delete { key } => {
                    if key.kind == Kind::Inode {
                        gathered.inodes.insert(key.inode, false);
                        drop_payloads(&mut gathered.payloads, key.inode, 0, u64::MAX);
                    }
                    self.store.replay(key, None);
                }
                Record::Alloc { block, length_blocks } => {
                    let run = Run { start: block, blocks: length_blocks.into() };
                    self.alloc.replay_record(&[SpaceChange::Alloc(run)])?;
                }
                Record::Free { block, length_blocks } => {
                    let run = Run { start: block, blocks: length_blocks.into() };
                    self.alloc.replay_record(&[SpaceChange::Free(run)])?;
                }
                Record::Payload { inode, file_block, .. } => {
                    gathered.payloads.insert((inode, file_block), lsn);
                }
                Record::Settled { inode, file_block, length_blocks } => {
                    drop_payloads(&mut gathered.payloads, inode, file_block, length_blocks);
                }
                Record::Home { inode, file_block, checksum, .. } => {
                    gathered.payloads.remove(&(inode, file_block));
                    self.replay_home(inode, file_block, checksum)?;
                }
                Record::NextInode { next_inode } => {
                    gathered.use_inode(next_inode.saturating_sub(1))?;
                }
                Record::Wrote { .. } => {}
            }
        }
        Ok(())
    }

    /// The extent that maps the page gets the page's new checksum.
    fn replay_home(&self, inode: u64, file_block: u64, checksum: u32) -> Result<()> {
        let (pieces, _) = extents::pieces(&self.store, inode, file_block, file_block + 1)?;
        let Some(piece) = pieces.first() else {
            return Err(Error::Corrupt(format!(
                "log: page {file_block} of inode {inode} has no home"
            )));
        };
        let (key, mut extent) = piece.whole()?;
        match extent.checksums.get_mut((file_block - key.offset) as usize) {
            Some(field) => *field = checksum,
            None => {
                return Err(Error::Corrupt("log: a page went home to an unwritten extent".into()));
            }
        }
        self.store.replay(key, Some(&extent.encode()));
        Ok(())
    }

    /// The number of inodes after replay.
    fn count_inodes(&self, gathered: &Gathered) -> Result<()> {
        let root = self.store.tree();
        let mut added = 0;
        for (&number, &exists) in &gathered.inodes {
            let existed = tree::get(&self.store.nodes, &root, Key::inode(number))?.is_some();
            added += i64::from(exists) - i64::from(existed);
        }
        self.store.replay_inodes(gathered.next_inode, added);
        Ok(())
    }

    /// Payload of inodes that do not exist is not wanted.
    fn forget_orphaned_payloads(&self, payloads: &mut Payloads) -> Result<()> {
        let mut looked_at = None;
        let mut missing = BTreeSet::new();
        for &(inode, _) in payloads.keys() {
            if looked_at.replace(inode) != Some(inode)
                && self.store.get(Key::inode(inode))?.is_none()
            {
                missing.insert(inode);
            }
        }
        payloads.retain(|(inode, _), _| !missing.contains(inode));
        Ok(())
    }

    /// Second pass over the log: the payload pages that are still wanted enter the cache.
    fn load_payloads(&self, recovered: &Recovered, payloads: &Payloads) -> Result<()> {
        if payloads.is_empty() {
            return Ok(());
        }
        let frames: BTreeSet<Lsn> = payloads.values().copied().collect();
        let most = PAGES_IN_CACHE.min(self.pool.capacity_pages() / 4);
        let mut in_cache = 0;
        let read_blocks = Cell::new(0);
        let mut report = |progress: Progress| {
            read_blocks.set(progress.read_blocks);
            self.report_recovery(progress.read_blocks);
        };
        let wanted = |lsn| frames.contains(&lsn);
        recovered.replay_payloads(&*self.device, &wanted, &mut report, &mut |frame| {
            let lsn = frame.header.last_lsn;
            for record in frame.records() {
                let Record::Payload { inode, file_block, index, checksum: wanted, .. } = record?
                else {
                    continue;
                };
                if payloads.get(&(inode, file_block)) != Some(&lsn) {
                    continue;
                }
                let bytes = frame
                    .payload(index)
                    .ok_or_else(|| Error::Corrupt("log: payload block out of range".into()))?;
                // It was right when the log was scanned; this is another read.
                if checksum(bytes) != wanted && !mutation::active(Mutation::TrustSecondRead) {
                    return Err(Error::Corrupt(
                        "log: a payload block changed while it was read".into(),
                    ));
                }
                self.load_payload(inode, file_block, lsn, bytes)?;
                in_cache += 1;
            }
            if in_cache >= most && !self.options.read_only {
                self.send_all_home(read_blocks.get())?;
                // Their memory has been touched and is good for the next: fresh memory costs more.
                self.evict(in_cache);
                in_cache = 0;
            }
            Ok(())
        })
    }

    fn load_payload(&self, number: u64, file_block: u64, lsn: Lsn, bytes: &[u8]) -> Result<()> {
        let inode = self.inode(number)?;
        let mut page: PageMut = self.page()?;
        let length = bytes.len().min(BLOCK_BYTES);
        page[..length].copy_from_slice(&bytes[..length]);
        let mut pages = inode.pages.write();
        let inserted = pages.insert_dirty(file_block, page.freeze());
        if inserted.newly_dirty {
            self.alloc.reserve(1, ReserveClass::Logged)?;
            self.dirty_pages.fetch_add(1, Ordering::AcqRel);
        }
        // The same frame may hold the page twice; the later one counts, and is what is owed.
        let older = pages.set_logged(file_block, lsn);
        debug_assert!(older.is_none_or(|older| older == lsn));
        drop(pages);
        if inserted.new_chunk {
            self.note_resident(number, file_block);
        }
        self.dirty.add(&inode);
        Ok(())
    }

    /// Writes all dirty pages home, when `read_blocks` of the log were read again. Not as background work: somebody waits, and there is nobody to be disturbed.
    fn send_all_home(&self, read_blocks: u64) -> Result<()> {
        let mut attempts = 0;
        loop {
            let mut pieces = Vec::new();
            let mut pages = 0;
            for inode in self.dirty.all() {
                let budget = (HOME_PAGES - pages, Room::Normal);
                let every = RunFilter::default();
                let collected = self.collect(&inode, 0..u64::MAX, every, budget, &mut pieces)?;
                pages += collected.pages;
                if pages >= HOME_PAGES || !collected.complete {
                    break;
                }
            }
            if pieces.is_empty() {
                return Ok(());
            }
            self.write_out(&mut pieces, IoClass::SyncWrite);
            match self.settle(pieces) {
                Ok(()) => attempts = 0,
                // The next attempt goes elsewhere.
                Err(Error::Io(_) | Error::HostFull(_)) if attempts + 1 < HOME_ATTEMPTS => {
                    attempts += 1;
                }
                Err(error) => return Err(error),
            }
            self.report_recovery(read_blocks);
        }
    }

    /// So much of the log was read a second time. The scan was the first half of the work.
    fn report_recovery(&self, read_blocks: u64) {
        if let Some(report) = &self.options.on_recovery_progress {
            let ring_blocks = self.geometry.log_blocks();
            report(ring_blocks + read_blocks.min(ring_blocks), 2 * ring_blocks);
        }
    }

    /// Inodes that a crash left unlinked, or in the middle of a cut.
    fn orphans(&self) -> Result<Vec<u64>> {
        let mut orphans = Vec::new();
        let mut next = Some(Key::orphan(0));
        while let Some(from) = next {
            let (items, more) = self.store.collect(from, Key::orphan(u64::MAX), ORPHAN_BATCH)?;
            orphans.extend(items.into_iter().map(|(key, _)| key.offset));
            next = more;
        }
        Ok(orphans)
    }

    fn clean_orphans(&self, orphans: Vec<u64>) -> Result<()> {
        for number in orphans {
            let value = self.store.get(Key::inode(number))?;
            let Some(value) = value else {
                return Err(Error::Corrupt(format!("orphan {number} has no inode: run fsck")));
            };
            // One that cannot be read stays an orphan, which takes nothing but its space: no reason to refuse the volume.
            let Ok(InodeItem { links, .. }) = InodeItem::decode(&value) else {
                self.counters.purge_errors.add(1);
                continue;
            };
            let inode = self.inode(number)?;
            if links > 0 {
                if !mutation::active(Mutation::LeaveCut) {
                    self.finish_cut(&inode)?;
                }
            } else {
                {
                    let mut meta = inode.meta.lock();
                    meta.orphan = true;
                    meta.purged = true;
                }
                self.purge(&inode)?;
            }
        }
        Ok(())
    }
}

/// A frame that the checkpoint contains: it is only here for pages that were not home yet.
fn replay_payloads(frame: &ReplayFrame<'_>, gathered: &mut Gathered) -> Result<()> {
    let payloads = &mut gathered.payloads;
    for record in frame.records() {
        match record? {
            Record::Payload { inode, file_block, .. } => {
                payloads.insert((inode, file_block), frame.header.last_lsn);
            }
            Record::Settled { inode, file_block, length_blocks } => {
                drop_payloads(payloads, inode, file_block, length_blocks);
            }
            Record::Home { inode, file_block, .. } => {
                payloads.remove(&(inode, file_block));
            }
            Record::Delete { key } if key.kind == Kind::Inode => {
                drop_payloads(payloads, key.inode, 0, u64::MAX);
            }
            _ => {}
        }
    }
    Ok(())
}

fn drop_payloads(payloads: &mut Payloads, inode: u64, first: u64, count: u64) {
    let end = first.saturating_add(count);
    let gone: Vec<_> = payloads
        .range((inode, first)..=(inode, u64::MAX))
        .map(|(place, _)| *place)
        .take_while(|(_, file_block)| *file_block < end)
        .collect();
    for place in gone {
        payloads.remove(&place);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::device::memory::MemoryDevice;
    use crate::inode::for_tests::item;
    use crate::sync::Arc;
    use crate::txn::Op;
    use crate::types::Timestamp;
    use crate::{BackgroundMode, CreateOptions, OpenFlags, Volume, VolumeOptions};

    #[test]
    fn an_orphan_that_cannot_be_read_keeps_nobody_from_opening_the_volume() {
        let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(32 << 20));
        Volume::format_device(&device, &CreateOptions::default()).expect("format");
        let open = || {
            let background = BackgroundMode::Manual;
            let options = VolumeOptions { background, ..VolumeOptions::default() };
            Volume::open_device(device.clone(), options).expect("open")
        };
        let volume = open();
        let file = volume.open_file("/f", OpenFlags::CREATE).expect("create");
        let engine = file.engine();
        let mtime = Timestamp { seconds: 0, nanoseconds: u32::MAX };
        let number = engine.store.allocate_inode();
        let mut op = Op::new();
        op.inode_added();
        op.put(Key::inode(number), &InodeItem { mtime, ..item(0) }.encode());
        op.put(Key::orphan(number), &[]);
        let admission = engine.enter(4096, 0).expect("enter");
        engine.store.commit(op, admission).expect("commit");
        volume.sync().expect("sync");
        drop((file, volume));
        for _ in 0..2 {
            let volume = open();
            assert_eq!(volume.stats().purge_errors, 1);
            assert!(volume.metadata("/f").is_ok());
            volume.close().expect("close");
        }
    }
}
