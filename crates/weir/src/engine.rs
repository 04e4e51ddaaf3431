//! What all parts of an open volume share, and the entry checks of every operation.
//!
//! **Waiting happens in one place**: [`Engine::enter`] and [`Engine::reserve`] are called before any lock but `ops` is
//! taken; they wait for log space, delta space and blocks. Past them an operation only waits for
//! device reads of its own data, or for writeback of its own range.
//!
//! Lock order of the whole engine: tree lock → inode `ops` (parents first) → `map` → `pages` → `meta` (by
//! number) → store state → log append → allocator. The turn of those who write in place (`file/in_place.rs`) comes after `ops`, and
//! may be held while room is made: whoever waits for that holds the inode, so that no purge wants its `ops`. Dirty list, inode table, eviction queue and
//! statistics are leaves.

use crate::alloc::{Allocator, ReserveClass, Supply};
use crate::background::{Background, LogShortage};
use crate::barrier::Barriers;
use crate::cache::page::{PageMut, PagePool};
use crate::cache::throttle::SMALL_BLOCKS;
use crate::device::Device;
use crate::dirty_list::DirtyList;
use crate::error::{Error, FORKED, Result};
use crate::file::closed::ClosedFiles;
use crate::file::in_place::{Alone, InPlace};
use crate::file::known_homes::HomesBudget;
use crate::file::read::ReadsAhead;
use crate::format::geometry::Geometry;
use crate::format::item::InodeItem;
use crate::format::{BLOCK_BYTES, Key, VolumeId};
use crate::inode::{Inode, InodeTable};
use crate::log::{Admission, AdmissionClass, Log, OpRecords};
use crate::reclaim::{Reclaim, Shortage};
use crate::stats::Counters;
use crate::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use crate::sync::{Arc, Clock, Mutex, Process, Weak};
use crate::txn::Store;
use crate::txn::checkpoint::{Checkpointer, Phase};
use crate::types::{Timestamp, VolumeOptions};

/// How often a caller tries to get space that was made available, and that others take before it can.
const SPACE_ATTEMPTS: u32 = 8;

/// See the module's head.
pub struct Engine {
    /// For what outlives a call, such as data that the log writes.
    pub me: Weak<Engine>,
    /// The disk.
    pub device: Arc<dyn Device>,
    /// Where everything is on it.
    pub geometry: Geometry,
    /// Its id.
    pub volume_id: VolumeId,
    /// How it was opened.
    pub options: VolumeOptions,
    /// The memory cap that came of that.
    pub memory_bytes: u64,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Seconds since 1970 when a thread last looked: see [`Engine::recent_s`].
    pub seen_s: AtomicI64,
    /// Metadata.
    pub store: Store,
    /// The log.
    pub log: Arc<Log>,
    /// Blocks.
    pub alloc: Arc<Allocator>,
    /// Page frames.
    pub pool: PagePool,
    /// Read-ahead that is under way.
    pub reads_ahead: Arc<ReadsAhead>,
    /// What to evict.
    pub reclaim: Reclaim,
    /// Inodes in memory.
    pub inodes: InodeTable,
    /// The memory of what is known of where their blocks live.
    pub homes_budget: Arc<HomesBudget>,
    /// Inodes with dirty pages or attributes.
    pub dirty: DirtyList,
    /// Files that were closed before they were synced.
    pub closed_files: ClosedFiles,
    /// Serialises renames between directories, and removals of directories.
    pub tree_lock: Mutex<()>,
    /// Checkpoints.
    pub checkpointer: Checkpointer,
    /// Threads, and what they are asked to do.
    pub background: Background,
    /// Barriers whose data is not home.
    pub barriers: Barriers,
    /// Counters and histograms.
    pub counters: Counters,
    /// Pages dirty or under writeback, over all inodes.
    pub dirty_pages: AtomicU64,
    /// Pieces of writes that go in place.
    pub in_place: InPlace,
    /// Tickets that have not ended.
    pub tickets: AtomicU64,
    /// Who has opened it.
    pub process: Process,
    /// Set once, when the volume must not be written any more.
    pub shutdown: Mutex<Option<String>>,
    /// Fast check of `shutdown`.
    pub is_shutdown: AtomicBool,
    /// Close has finished. Held while it goes on, outside of all other locks.
    pub closed: Mutex<bool>,
    /// Inodes whose cuts go on later. A leaf.
    pub owed_cuts: Mutex<Vec<Arc<Inode>>>,
    /// What is to be purged in the background.
    pub purges: Mutex<crate::namespace::remove::Purges>,
    /// The superblock as last written.
    pub superblock: Mutex<crate::format::superblock::Superblock>,
}

/// Which part of the log's ring an operation may use, and what it does when that is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// The first half of the ring; waits for a checkpoint.
    Normal,
    /// As `Normal`, but answers [`Error::WouldBlock`] instead of waiting.
    NoWait,
    /// What is kept for checkpoints, so that logged pages can always go home; answers
    /// [`Error::WouldBlock`] instead of waiting. While a chain is open, it is its barrier's: the same answer.
    Reserve,
    /// The same for the data of a barrier, and for what a piece on its way home turns out to need.
    Chain,
}

/// Who brings `blocks` to the log.
pub fn class_of(blocks: u64) -> AdmissionClass {
    if blocks > SMALL_BLOCKS { AdmissionClass::Bulk } else { AdmissionClass::Foreground }
}

impl Engine {
    /// Refuses when the volume cannot be written.
    pub fn check_writable(&self) -> Result<()> {
        if self.options.read_only {
            return Err(Error::ReadOnly);
        }
        self.check_shutdown()
    }

    /// Refuses in a child that was forked from the process that has the volume open. Takes no lock: a thread that is not there in the child
    /// may have had it.
    pub fn check_process(&self) -> Result<()> {
        if self.process.is_this() { Ok(()) } else { Err(Error::Shutdown(FORKED.to_owned())) }
    }

    /// Refuses when the volume was shut down.
    pub fn check_shutdown(&self) -> Result<()> {
        self.check_process()?;
        if !self.is_shutdown.load(Ordering::Acquire) {
            return Ok(());
        }
        let reason = self.shutdown.lock().clone().unwrap_or_default();
        Err(Error::Shutdown(reason))
    }

    /// Stops all writing after `error`, for good.
    pub fn shut_down_after(&self, error: &Error) {
        match error {
            Error::Shutdown(reason) => self.shut_down(reason),
            other => self.shut_down(&other.to_string()),
        }
    }

    /// Stops all writing, for good. Memory stays readable.
    pub fn shut_down(&self, reason: &str) {
        let mut shutdown = self.shutdown.lock();
        if shutdown.is_none() {
            *shutdown = Some(reason.to_owned());
            self.is_shutdown.store(true, Ordering::Release);
        }
        drop(shutdown);
        self.log.shut_down(reason);
        self.background.wake_all();
        self.checkpointer.wake_all();
    }

    /// Since the volume was opened something was read, of data or metadata, that does not match its checksum.
    pub fn has_met_damage(&self) -> bool {
        self.counters.checksum_errors.get() > 0 || self.store.nodes.damaged() > 0
    }

    /// See [`crate::Volume::capabilities`].
    pub fn capabilities(&self) -> crate::types::Capabilities {
        let page = BLOCK_BYTES as u32;
        crate::types::Capabilities {
            untorn_write_bytes: self.untorn_pages() as u32 * page,
            untorn_alignment_bytes: page,
            untorn_boundary_bytes: self.untorn_pages() as u32 * page,
            max_log_payload_bytes: self.max_payload_pages() as u32 * page,
            max_tickets: crate::file::submit::MAX_TICKETS,
            handover_bytes: self.handover_limit() * u64::from(page),
            max_batch_payload_bytes: self.max_batch_payload_pages() * u64::from(page),
        }
    }

    /// Now, for file times.
    pub fn now(&self) -> Timestamp {
        Timestamp::from_ns(self.clock.realtime_ns())
    }

    /// Seconds since 1970, as of a moment ago: for who asks with every cached read. Without threads nobody looks at the clock meanwhile.
    pub fn recent_s(&self) -> i64 {
        if self.background.has_threads() {
            self.seen_s.load(Ordering::Relaxed)
        } else {
            self.now().seconds
        }
    }

    /// To be called about once a second.
    pub fn look_at_clock(&self) {
        self.seen_s.store(self.now().seconds, Ordering::Relaxed);
    }

    /// The gate at the entry of every changing operation: checks that the volume can be written, and gets log space for
    /// `record_bytes` of records and `payload_pages` pages. May wait for a checkpoint; the caller
    /// holds at most `ops` locks.
    pub fn enter(&self, record_bytes: usize, payload_pages: usize) -> Result<Admission> {
        self.before_entry()?;
        self.admit(record_bytes, payload_pages, Room::Normal)
    }

    /// The entry of an operation that locks names or `ops` first, and has [`Engine::admit`] let it in with these in hand: whoever waits for a lock
    /// must hold nothing of the log. He who has the lock may wait for log space.
    pub fn before_entry(&self) -> Result<()> {
        self.check_writable()?;
        self.throttle(0)
    }

    /// Log space only, for work that must not be throttled (writeback, purge).
    pub fn admit(
        &self,
        record_bytes: usize,
        payload_pages: usize,
        room: Room,
    ) -> Result<Admission> {
        if self.store.replaying.load(Ordering::Acquire) {
            return self.admit_unlogged(room);
        }
        let blocks = OpRecords::blocks_for(record_bytes, payload_pages as u64);
        let class = match room {
            Room::Normal | Room::NoWait => class_of(blocks),
            Room::Reserve | Room::Chain => AdmissionClass::Background,
        };
        let mut shortage = LogShortage::default();
        loop {
            match self.log.admit(blocks, class) {
                // Looked at when the room is held: whoever opens one looks at what is held.
                Ok(_) if room == Room::Reserve && self.log.has_open_chain() => {
                    return Err(Error::WouldBlock);
                }
                Ok(admission) => return Ok(admission),
                Err(_full) if room != Room::Normal => return Err(Error::WouldBlock),
                Err(_full) => self.relieve_log(&mut shortage)?,
            }
        }
    }

    /// Reserves `blocks` for a user's data. When the volume is full, space that only waits for a checkpoint is
    /// made available first. The caller holds at most `ops` locks.
    pub fn reserve(&self, blocks: u64) -> Result<()> {
        self.reserve_for(blocks, ReserveClass::User)
    }

    /// As [`Engine::reserve`], for `class`.
    pub fn reserve_for(&self, blocks: u64, class: ReserveClass) -> Result<()> {
        match self.reserve_at_once(blocks, class) {
            Err(Error::NoSpace) => {}
            reserved => return reserved,
        }
        // What pieces hold is given back sooner than a checkpoint finds more.
        let _alone = (class == ReserveClass::Tidy).then(|| self.without_pieces());
        self.reserve_relieved(blocks, class)
    }

    /// As [`Engine::reserve_for`], for who is alone with what pieces hold.
    fn reserve_relieved(&self, blocks: u64, class: ReserveClass) -> Result<()> {
        for _ in 1..SPACE_ATTEMPTS {
            match self.reserve_at_once(blocks, class) {
                Err(Error::NoSpace) if self.relieve_space(class)? => {}
                reserved => return reserved,
            }
        }
        self.reserve_at_once(blocks, class)
    }

    /// As [`Engine::reserve_for`], of what is there.
    pub fn reserve_at_once(&self, blocks: u64, class: ReserveClass) -> Result<()> {
        if self.alloc.reserve(blocks, class)? == Supply::Short {
            self.make_room_early();
        }
        Ok(())
    }

    /// Reserves `blocks` for work that a full volume has to allow. There is room for that, and when it is used up, a checkpoint makes
    /// it anew. Where none can, since nothing else waits to be written any more or the host has no space for what does, this draws on what is
    /// spare: it is refused only where the free space is so scattered that a checkpoint would not find room for one node more.
    pub fn reserve_spare(&self, blocks: u64) -> Result<()> {
        match self.reserve_at_once(blocks, ReserveClass::Tidy) {
            Err(Error::NoSpace) => self.reserve_spare_alone(blocks, &self.without_pieces()),
            reserved => reserved,
        }
    }

    /// As [`Engine::reserve_spare`], for who is alone with what pieces hold.
    pub fn reserve_spare_alone(&self, blocks: u64, _alone: &Alone<'_>) -> Result<()> {
        match self.reserve_relieved(blocks, ReserveClass::Tidy) {
            Err(Error::NoSpace) => self.reserve_at_once(blocks, ReserveClass::Cut),
            // Who frees space needs nothing of the host but what the log takes.
            Err(full @ Error::HostFull(_)) => {
                self.reserve_at_once(blocks, ReserveClass::Cut).map_err(|_| full)
            }
            reserved => reserved,
        }
    }

    /// Has a checkpoint begin that makes room before there is none, unless one is under way.
    fn make_room_early(&self) {
        if self.background.has_threads() && self.checkpointer.phase() == Phase::Running {
            self.background.request_room();
        }
    }

    /// Checks that a metadata operation finds room, without keeping it: the store's reserve takes over
    /// at commit. The caller holds at most `ops` locks.
    pub fn check_space(&self, blocks: u64, class: ReserveClass) -> Result<()> {
        self.reserve_for(blocks, class)?;
        self.alloc.release(blocks);
        Ok(())
    }

    /// The inode `number`, loaded if need be.
    pub fn inode(&self, number: u64) -> Result<Arc<Inode>> {
        self.inode_with(number, || self.load_inode(number))
    }

    /// The inode `number`, or what `load` makes of it if it is not in memory: see [`InodeTable::find_or_load`].
    pub fn inode_with(
        &self,
        number: u64,
        load: impl FnMut() -> Result<Inode>,
    ) -> Result<Arc<Inode>> {
        self.check_process()?;
        let (inode, dropped) = self.inodes.find_or_load(number, load)?;
        drop(dropped);
        Ok(inode)
    }

    /// The inode `number` as the store has it.
    pub fn load_inode(&self, number: u64) -> Result<Inode> {
        let value = self.store.get(Key::inode(number))?.ok_or(Error::NotFound)?;
        // What happened to it before is unknown: an fsync has to cover all of the log so far.
        Ok(Inode::committed(number, InodeItem::decode(&value)?, self.log.last_lsn()))
    }

    /// A page frame whose content will be overwritten. Evicts clean pages to get one.
    pub fn page(&self) -> Result<PageMut> {
        let mut shortage = Shortage::default();
        loop {
            if let Some(page) = self.pool.alloc_for_overwrite() {
                return Ok(page);
            }
            self.make_room(&mut shortage)?;
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::device::memory::MemoryDevice;
    use crate::device::{
        DeviceError, DeviceInfo, DeviceResult, IoClass, OnDone, Operation, Request,
    };

    /// A file with holes on a host that may be full: it has what the log takes, and no more.
    struct Sparse(MemoryDevice, AtomicBool);

    impl Sparse {
        fn admit(&self, class: IoClass) -> DeviceResult<()> {
            let is_refused = !matches!(class, IoClass::Log | IoClass::Beside);
            if !is_refused || !self.1.load(Ordering::Relaxed) {
                return Ok(());
            }
            let (operation, reason) = ("write", "full".into());
            let (offset_bytes, length_bytes, no_space) = (0, 0, true);
            Err(DeviceError { operation, offset_bytes, length_bytes, reason, no_space })
        }
    }

    impl Device for Sparse {
        fn info(&self) -> DeviceInfo {
            self.0.info()
        }
        fn read(&self, at: u64, buffers: &mut [&mut [u8]], class: IoClass) -> DeviceResult<()> {
            self.0.read(at, buffers, class)
        }
        fn write(&self, at: u64, data: &[&[u8]], class: IoClass, fua: bool) -> DeviceResult<()> {
            self.admit(class)?;
            self.0.write(at, data, class, fua)
        }
        fn flush(&self) -> DeviceResult<()> {
            self.0.flush()
        }
        fn discard(&self, offset_bytes: u64, length_bytes: u64) -> DeviceResult<()> {
            self.0.discard(offset_bytes, length_bytes)
        }
        fn submit(&self, request: Request, on_done: OnDone) {
            let is_write = matches!(request.operation, Operation::Write { .. });
            match self.admit(request.class) {
                Err(error) if is_write => on_done(Err(error), request.buffers),
                _ => self.0.submit(request, on_done),
            }
        }
    }

    #[test]
    fn who_frees_space_has_what_is_spare_where_the_host_lets_no_checkpoint_make_more() {
        let sparse = Arc::new(Sparse(MemoryDevice::new(32 << 20), AtomicBool::new(false)));
        let (_volume, file) = crate::txn::volume_with_a_file_on(sparse.clone());
        file.write_at(0, &[7; 4096 * 3]).expect("write");
        let engine = file.engine();
        sparse.1.store(true, Ordering::Relaxed);
        let take_all =
            |class| std::iter::from_fn(|| engine.reserve_at_once(1, class).ok()).count() as u64;
        let mut taken = take_all(ReserveClass::Tidy);
        engine.reserve_spare(1).expect("there is some that is spare");
        // What nobody has is the host's to give.
        taken += 1 + take_all(ReserveClass::Cut);
        assert!(matches!(engine.reserve_spare(1), Err(Error::HostFull(_))));
        engine.alloc.release(taken);
    }
}
