//! Opening: superblock, root, bitmaps, log; recovery; threads.

use crate::alloc::{Allocator, MetadataReserve};
use crate::background::Background;
use crate::barrier::Barriers;
use crate::cache::page::PagePool;
use crate::cache::throttle::Limits;
use crate::device::buffer::AlignedBuf;
use crate::device::posix::{OpenMode, PosixDevice};
use crate::device::{Device, IoClass};
use crate::dirty_list::DirtyList;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::file::closed::ClosedFiles;
use crate::file::in_place::InPlace;
use crate::file::known_homes::HomesBudget;
use crate::format::geometry::Geometry;
use crate::format::root::Root;
use crate::format::superblock::{Superblock, SuperblockPlace, choose_superblock};
use crate::format::{BLOCK_BYTES, BLOCK_BYTES_U64, MAX_COUNTER_AT_OPENING};
use crate::inode::InodeTable;
use crate::log::replay::{Recovered, ReplayStart, recover};
use crate::log::ring::ReplayPoint;
use crate::log::{Log, LogGeometry, LogStart};
use crate::mutation::{self, Mutation};
use crate::namespace::OP_SPACE_BLOCKS;
use crate::reclaim::Reclaim;
use crate::stats::Counters;
use crate::sync::atomic::{AtomicBool, AtomicI64, AtomicU64};
use crate::sync::{Arc, Mutex, Process};
use crate::tree::{NodeCache, TreeRoot};
use crate::txn::Store;
use crate::txn::checkpoint::{Checkpointer, loaded_tree, with_attempts};
use crate::txn::names::CACHED_NAME_BYTES;
use crate::txn::store::Memory;
use crate::types::{BackgroundMode, Timestamp, VolumeOptions};
use crate::volume::machine;
use std::path::Path;

/// Largest default memory cap.
const DEFAULT_MEMORY_BYTES: u64 = 1 << 30;
/// Less memory than this is not asked for.
const LEAST_MEMORY_BYTES: u64 = 256 << 10;
/// Part of the memory that the log's records may take until they are replayed: as long as no page is in the cache.
const KEPT_RECORDS_SHARE: u64 = 16;
/// Blocks always kept free for checkpoints, besides what the trees and the delta need.
const BASE_RESERVE_BLOCKS: u64 = 16;
/// Part of the volume that is kept for names that move where nothing else finds room: so many blocks at least, and at most.
const TIDY_RESERVE_SHARE: u64 = 256;
const LEAST_TIDY_RESERVE_BLOCKS: u64 = 4 * OP_SPACE_BLOCKS;
const MOST_TIDY_RESERVE_BLOCKS: u64 = 64;

/// Of a volume whose newest superblock is gone: see [`Superblock::may_be_outlived`] and [`Recovered::is_outlived`].
pub(crate) const OUTLIVED: &str = "both copies of the newest superblock are damaged, and the one before it is older than what the \
     log holds: run weir fsck, or restore a copy";

/// Opens an image file or block device, exclusively.
pub(crate) fn posix_device(path: &Path, read_only: bool) -> Result<Arc<dyn Device>> {
    let mode = if read_only { OpenMode::ReadOnly } else { OpenMode::ReadWrite };
    Ok(Arc::new(PosixDevice::open(path, mode)?))
}

/// Most names in the cache of names.
const MOST_NAMES: u64 = 1 << 16;

/// min(1 GiB, RAM / 8).
fn default_memory_bytes() -> u64 {
    machine::memory_bytes()
        .map_or(DEFAULT_MEMORY_BYTES, |bytes| (bytes / 8).min(DEFAULT_MEMORY_BYTES))
}

/// The memory cap.
fn memory_bytes(options: &VolumeOptions) -> u64 {
    options.memory_bytes.unwrap_or_else(default_memory_bytes).max(LEAST_MEMORY_BYTES)
}

/// How the memory cap is divided.
struct Shares {
    pages: u64,
    nodes: u64,
    delta: u64,
    inodes: usize,
    names: usize,
    new_directory_bytes: usize,
    home_bytes: usize,
}

impl Shares {
    /// Pages take what the rest leaves. An inode in memory costs about 1 KiB.
    fn of(memory_bytes: u64) -> Self {
        let nodes = memory_bytes / 8;
        let delta = memory_bytes / 8;
        let inodes = memory_bytes / 16;
        let names = (memory_bytes / 128).min(MOST_NAMES * CACHED_NAME_BYTES);
        let new_directories = memory_bytes / 128;
        let homes = memory_bytes / 64;
        Self {
            pages: memory_bytes - nodes - delta - inodes - names - new_directories - homes,
            nodes,
            delta: delta.max(128 << 10),
            inodes: ((inodes / 1024) as usize).max(64),
            names: 1 << (names / CACHED_NAME_BYTES).max(16).ilog2(),
            new_directory_bytes: new_directories as usize,
            home_bytes: homes as usize,
        }
    }
}

/// What users leave free whatever the volume holds.
fn base_reserve(geometry: &Geometry) -> MetadataReserve {
    let share_blocks = geometry.data_blocks() / TIDY_RESERVE_SHARE;
    MetadataReserve {
        merge_blocks: 0,
        spare_blocks: BASE_RESERVE_BLOCKS,
        tidy_blocks: share_blocks.clamp(LEAST_TIDY_RESERVE_BLOCKS, MOST_TIDY_RESERVE_BLOCKS),
    }
}

/// What an engine is made of, besides the device.
pub(super) struct Parts {
    pub superblock: Superblock,
    pub tree: TreeRoot,
    pub next_inode: u64,
    pub inode_count: u64,
    pub alloc: Allocator,
    pub log_start: LogStart,
}

/// Puts an engine together; nothing is recovered and no thread runs.
pub(super) fn assemble(
    device: Arc<dyn Device>,
    options: VolumeOptions,
    parts: Parts,
) -> Arc<Engine> {
    let Parts { superblock, tree, next_inode, inode_count, alloc, log_start } = parts;
    let geometry = superblock.geometry;
    let volume_id = superblock.volume_id;
    let memory_bytes = memory_bytes(&options);
    let shares = Shares::of(memory_bytes);
    let clock = options.clock.clone();
    let log_geometry = log_geometry(&superblock);
    let log = Arc::new(Log::new(device.clone(), clock.clone(), log_geometry, &log_start));
    let alloc = Arc::new(alloc);
    let nodes = NodeCache::new(device.clone(), volume_id, geometry.total_blocks(), shares.nodes);
    let counts = (next_inode, inode_count);
    let memory =
        Memory { cached_names: shares.names, new_directory_bytes: shares.new_directory_bytes };
    let store = Store::new(
        nodes,
        log.clone(),
        alloc.clone(),
        tree,
        counts,
        base_reserve(&geometry),
        memory,
    );
    // Foreground operations may fill half of the ring: delays end there.
    let usable_log_bytes = geometry.log_blocks() * BLOCK_BYTES_U64 / 2;
    let limits = Limits::new(shares.pages, shares.delta, usable_log_bytes);
    let checkpointer = Checkpointer::default();
    checkpointer.set_covered(log.last_lsn());
    let page_bytes = shares.pages as usize;
    let seen_s = AtomicI64::new(Timestamp::from_ns(clock.realtime_ns()).seconds);
    Arc::new_cyclic(|me| Engine {
        me: me.clone(),
        geometry,
        volume_id,
        clock,
        seen_s,
        store,
        log,
        alloc,
        pool: PagePool::with_reserve(page_bytes, page_bytes / 16),
        reads_ahead: Arc::default(),
        reclaim: Reclaim::default(),
        inodes: InodeTable::new(shares.inodes),
        homes_budget: Arc::new(HomesBudget::new(shares.home_bytes)),
        dirty: DirtyList::default(),
        // What is closed and dirty has a page at least, and no more than that many are.
        closed_files: ClosedFiles::new(page_bytes / BLOCK_BYTES / 2),
        tree_lock: Mutex::new(()),
        checkpointer,
        background: Background::new(limits),
        barriers: Barriers::default(),
        counters: Counters::default(),
        dirty_pages: AtomicU64::new(0),
        in_place: InPlace::default(),
        tickets: AtomicU64::new(0),
        process: Process::this(),
        shutdown: Mutex::new(None),
        is_shutdown: AtomicBool::new(false),
        closed: Mutex::new(false),
        owed_cuts: Mutex::default(),
        purges: Mutex::default(),
        superblock: Mutex::new(superblock),
        device,
        options,
        memory_bytes,
    })
}

fn log_geometry(superblock: &Superblock) -> LogGeometry {
    LogGeometry {
        volume_id: superblock.volume_id,
        log_start_block: superblock.geometry.log_start_block(),
        log_blocks: superblock.geometry.log_blocks(),
        total_blocks: superblock.geometry.total_blocks(),
    }
}

/// The checkpoint root that `superblock` names.
pub(crate) fn read_root(device: &dyn Device, superblock: &Superblock) -> Result<Root> {
    let blocks = superblock.geometry.root_slot_blocks() as usize;
    let mut bytes = AlignedBuf::zeroed(blocks * BLOCK_BYTES);
    let offset_bytes = superblock.root.block * BLOCK_BYTES_U64;
    device.read(offset_bytes, &mut [&mut bytes], IoClass::SyncRead)?;
    Ok(Root::decode(&bytes, &superblock.geometry, &superblock.volume_id, &superblock.root)?)
}

/// Where replay starts, as superblock and root say.
pub(crate) fn replay_start(superblock: &Superblock, root: &Root) -> ReplayStart {
    ReplayStart {
        point: ReplayPoint {
            position_blocks: superblock.replay.position_blocks,
            sequence: superblock.replay.sequence,
            prev_digest: superblock.replay.prev_digest,
        },
        epoch: superblock.log_epoch,
        epoch_first_sequence: superblock.epoch_first_sequence,
        replay_epoch: if mutation::active(Mutation::AnyReplayEpoch) {
            0
        } else {
            superblock.replay_epoch
        },
        durable_lsn: superblock.durable_lsn,
        next_lsn: root.checkpoint_lsn + 1,
    }
}

/// The whole opening.
pub(super) fn open(device: Arc<dyn Device>, options: VolumeOptions) -> Result<Arc<Engine>> {
    let (mut superblock, places) = choose_superblock(&*device)?;
    if !options.read_only && !superblock.features.allow_writing() {
        return Err(Error::NotAVolume(
            "a Weir volume with features that this version can only read: open it read-only".into(),
        ));
    }
    let root = read_root(&*device, &superblock)?;
    let recovered = scan_log(&*device, &superblock, &root, &options)?;
    if superblock.may_be_outlived(&places) && recovered.is_outlived(&*device) {
        return Err(Error::Corrupt(OUTLIVED.into()));
    }
    if !options.read_only {
        check_counters(&superblock, &root, &recovered)?;
        superblock = begin_epoch(&*device, superblock, &places, &recovered)?;
    }
    let alloc =
        Allocator::open(device.clone(), &superblock.geometry, superblock.volume_id, &root.groups)?;
    let parts = Parts {
        tree: loaded_tree(&root.tree),
        next_inode: root.next_inode,
        inode_count: root.inode_count,
        alloc,
        log_start: recovered.continue_with(root.generation + 1),
        superblock,
    };
    let threads = options.background == BackgroundMode::Threads && !options.read_only;
    let engine = assemble(device, options, parts);
    engine.log.keep_recovered(recovered.first(), recovered.live_frames());
    engine.recover(&recovered, root.checkpoint_lsn)?;
    engine.store.check_new_numbers();
    if threads && let Err(error) = start_threads(&engine) {
        // Those there are have the engine, and with it the device.
        engine.stop_threads();
        return Err(error);
    }
    Ok(engine)
}

fn start_threads(engine: &Arc<Engine>) -> Result<()> {
    engine.start_background()?;
    engine.start_barriers()
}

fn scan_log(
    device: &dyn Device,
    superblock: &Superblock,
    root: &Root,
    options: &VolumeOptions,
) -> Result<Recovered> {
    let start = replay_start(superblock, root);
    let kept_record_bytes = (memory_bytes(options) / KEPT_RECORDS_SHARE) as usize;
    let geometry = log_geometry(superblock);
    let recovered = recover(device, &geometry, &start, kept_record_bytes, &mut |progress| {
        if let Some(report) = &options.on_recovery_progress {
            // The second half: see `recovery.rs`.
            report(progress.read_blocks, 2 * progress.ring_blocks);
        }
    })?;
    if lost_durable(superblock, &recovered) {
        return Err(Error::Corrupt(
            "the log ends before operations that were durable: the device lost writes; run weir fsck"
                .into(),
        ));
    }
    Ok(recovered)
}

/// Nothing that counts comes near to the end of its numbers.
fn check_counters(superblock: &Superblock, root: &Root, recovered: &Recovered) -> Result<()> {
    let counters = [
        superblock.generation,
        superblock.log_epoch,
        root.generation,
        root.next_inode,
        recovered.end.sequence,
        recovered.next_lsn,
    ];
    if counters.iter().all(|counter| *counter < MAX_COUNTER_AT_OPENING) {
        return Ok(());
    }
    Err(Error::Corrupt("a counter is impossibly large: open the volume read-only".into()))
}

/// What was durable once is missing: the device lost it. Pages that are not home may be in frames that are older than the
/// checkpoint, so that all of its operations are there says too little.
pub(crate) fn lost_durable(superblock: &Superblock, recovered: &Recovered) -> bool {
    let forgets = mutation::active(Mutation::ForgetDurableFrames);
    let lost_frames = recovered.end.sequence < superblock.durable_sequence && !forgets;
    recovered.lost_durable() || lost_frames
}

/// Makes the next log epoch durable, so that frames behind the recovered ones stay cut for ever. The
/// first flush makes what was recovered durable too: after a mere crash of the process it may only
/// be in the device's cache.
///
/// The superblock goes where the one before the present one is. So that one generation has both of its copies whatever happens, the present
/// one gets the copy first that an opening could not write, or a crash has torn.
fn begin_epoch(
    device: &dyn Device,
    old: Superblock,
    places: &[SuperblockPlace],
    recovered: &Recovered,
) -> Result<Superblock> {
    let is_there = |block| {
        places.iter().any(|place| place.block == block && place.found == Ok(old.generation))
    };
    for block in old.places().into_iter().filter(|block| !is_there(*block)) {
        write_copy(device, &old, block)?;
    }
    device.flush()?;
    let superblock = Superblock {
        generation: old.generation + 1,
        log_epoch: old.log_epoch + 1,
        epoch_first_sequence: recovered.end.sequence,
        replay_epoch: recovered.epoch(),
        durable_sequence: recovered.end.sequence,
        durable_lsn: recovered.next_lsn - 1,
        clean: false,
        errors_seen: false,
        ..old
    };
    for block in superblock.places() {
        write_copy(device, &superblock, block)?;
    }
    device.flush()?;
    Ok(superblock)
}

/// The copy of `superblock` that belongs at `block`.
fn write_copy(device: &dyn Device, superblock: &Superblock, block: u64) -> Result<()> {
    let bytes = superblock.encode(block)?;
    let offset_bytes = block * BLOCK_BYTES_U64;
    with_attempts(|| Ok(device.write(offset_bytes, &[&bytes], IoClass::Log, false)?))
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use crate::device::Device;
    use crate::device::memory::MemoryDevice;
    use crate::format::MAX_COUNTER_AT_OPENING;
    use crate::format::superblock::{Superblock, choose_superblock};
    use crate::sync::{Arc, THREADS_LEFT};
    use crate::{CreateOptions, Error, OpenFlags, Volume, VolumeOptions};

    /// Whoever has the device has its lock.
    #[test]
    fn an_opening_that_gets_too_few_threads_lets_go_of_the_device() {
        let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(32 << 20));
        Volume::format_device(&device, &CreateOptions::default()).expect("format");
        let options = || VolumeOptions { memory_bytes: Some(8 << 20), ..VolumeOptions::default() };
        for threads in 0..100 {
            THREADS_LEFT.set(threads);
            let opened = Volume::open_device(device.clone(), options());
            THREADS_LEFT.set(usize::MAX);
            match opened {
                Ok(volume) => {
                    assert!(threads >= 5, "{threads}");
                    volume.open_file("/f", OpenFlags::CREATE).expect("create");
                    return volume.close().expect("close");
                }
                Err(error) => assert!(matches!(error, Error::NoThread(_)), "{error}"),
            }
            assert_eq!(Arc::strong_count(&device), 1, "with {threads} threads");
        }
        panic!("no number of threads is enough");
    }

    #[test]
    fn a_counter_that_comes_near_to_its_end_is_opened_for_reading_only() {
        let late = |change: &dyn Fn(Superblock) -> Superblock| {
            let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(32 << 20));
            Volume::format_device(&device, &CreateOptions::default()).expect("format");
            let (old, _) = choose_superblock(&*device).expect("superblock");
            let late = change(old);
            for block in late.places() {
                super::write_copy(&*device, &late, block).expect("write");
            }
            let open = |read_only| {
                let options = VolumeOptions { read_only, ..VolumeOptions::default() };
                Volume::open_device(device.clone(), options).and_then(|volume| volume.close())
            };
            assert_eq!(open(true), Ok(()));
            open(false)
        };
        let generation = |generation| late(&|old| Superblock { generation, ..old });
        let log_epoch = |log_epoch| late(&|old| Superblock { log_epoch, ..old });
        for with_counter in [&generation as &dyn Fn(u64) -> _, &log_epoch] {
            let refused = with_counter(MAX_COUNTER_AT_OPENING);
            let said = matches!(&refused, Err(Error::Corrupt(what)) if what.contains("counter"));
            assert!(said, "{refused:?}");
            assert_eq!(with_counter(MAX_COUNTER_AT_OPENING - 1), Ok(()));
        }
    }
}
