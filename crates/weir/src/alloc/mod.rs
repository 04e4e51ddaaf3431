//! The block allocator.
//!
//! Two bits per block: `used` ([`space`]) says what cannot be handed out (committed, in flight, or
//! freed and not yet durable), `committed` says what recorded operations have made of it, and is what
//! checkpoints write. The life of a block:
//!
//! 1. [`Allocator::allocate`] sets `used`. The block belongs to the caller, who may
//!    [`Allocator::cancel`] it (usable again at once) or [`Allocator::quarantine`] it (after a checkpoint).
//! 2. [`Allocator::record`], within an operation's commit, notes the allocation for the running
//!    transaction; [`Allocator::freeze`] hands the notes to a checkpoint, and [`Allocator::apply`] sets `committed`.
//! 3. A later operation records that the block is freed; the checkpoint that contains that clears `committed`.
//! 4. [`Allocator::checkpoint_durable`] clears `used`.
//!
//! **Invariant:** a block whose bit is clear in `used` is not reachable from the durable
//! checkpoint, the live log or any operation under way.
//! **Invariant:** `committed` is changed by `apply` only, in log order; an allocation of a block
//! in use or a freeing of a free one is reported as corruption and nothing is written.
//!
//! Bitmaps are read when the volume is opened if it has at most 64 groups (7.8 GiB), else each when it is first
//! needed, by whoever needs it.
//!
//! Lock order: `committed`, then `space`. Neither is held over device I/O. Foreground calls take
//! `space` only, unless they have to load a group. A checkpoint frees blocks in
//! small batches, so that an allocation never waits for all of them.

mod account;
pub mod bitmap;
mod committed;
pub mod policy;
mod space;

use std::ops::Range;

use crate::device::Device;
use crate::device::buffer::AlignedBuf;
use crate::format::geometry::Geometry;
use crate::format::root::GroupEntry;
use crate::format::{NODE_BLOCKS, VolumeId};
use crate::mutation::{self, Mutation};
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};
use crate::sync::{Arc, Mutex};
use crate::{Error, Result};
pub use account::{MetadataReserve, PAGES_PER_METADATA_BLOCK, ReserveClass, SpaceTotals, Supply};
use bitmap::BITS;
use committed::{Committed, EAGER_GROUPS, Owner};
pub use policy::AllocKind;
use space::{Space, Step, Wish};

/// Runs that become free under one acquisition of the space lock.
const RELEASE_BATCH: usize = 64;

/// Consecutive blocks of one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Run {
    /// First block.
    pub start: u64,
    /// How many.
    pub blocks: u64,
}

impl Run {
    /// One past the last block.
    pub const fn end(&self) -> u64 {
        self.start + self.blocks
    }

    fn group(&self) -> u32 {
        Geometry::group_of(self.start)
    }

    fn bits(&self) -> Range<u32> {
        let first = Geometry::bit_of(self.start);
        first..first.saturating_add(u32::try_from(self.blocks).unwrap_or(u32::MAX))
    }
}

/// A recorded change of the space, as the log has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpaceChange {
    /// The blocks are in use.
    Alloc(Run),
    /// The blocks are free once the checkpoint is durable.
    Free(Run),
}

impl SpaceChange {
    /// The blocks it is about.
    pub const fn run(&self) -> Run {
        match self {
            Self::Alloc(run) | Self::Free(run) => *run,
        }
    }
}

/// The space changes of one transaction, on their way into a checkpoint.
#[derive(Debug, Default)]
#[must_use = "a frozen transaction's space changes belong into its checkpoint"]
pub struct FrozenSpace {
    changes: Vec<SpaceChange>,
    quarantined: Vec<Run>,
}

impl FrozenSpace {
    /// Whether there is nothing to apply.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty() && self.quarantined.is_empty()
    }
    /// The recorded changes, in log order.
    pub fn changes(&self) -> &[SpaceChange] {
        &self.changes
    }
}

/// A bitmap that a checkpoint has to write.
#[derive(Debug)]
pub struct BitmapWrite {
    /// Where to.
    pub block: u64,
    /// The slot that is.
    pub slot: u8,
    /// One block.
    pub content: AlignedBuf,
}

/// What [`Allocator::apply`] gives a checkpoint.
#[derive(Debug)]
pub struct AppliedSpace {
    /// To be on the device before the superblock names the new root.
    pub writes: Vec<BitmapWrite>,
    /// The whole group table for the new root.
    pub groups: Vec<GroupEntry>,
}

/// See the module's head.
pub struct Allocator {
    device: Arc<dyn Device>,
    owner: Owner,
    merge_reserve: AtomicU64,
    spare_reserve: AtomicU64,
    tidy_reserve: AtomicU64,
    committed: Mutex<Committed>,
    space: Mutex<Space>,
    /// Memory of the changes of the running transaction, and of the one that a checkpoint has.
    running_bytes: AtomicU64,
    frozen_bytes: AtomicU64,
}

impl std::fmt::Debug for Allocator {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Allocator").field("totals", &self.totals()).finish_non_exhaustive()
    }
}

impl Allocator {
    /// The allocator of an existing volume, whose current root has this group table.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if a bitmap is not what the table says (at once for small volumes, else
    /// when it is needed); [`Error::Io`].
    pub fn open(
        device: Arc<dyn Device>,
        geometry: &Geometry,
        volume_id: VolumeId,
        groups: &[GroupEntry],
    ) -> Result<Self> {
        if groups.len() != geometry.group_count() as usize {
            return Err(Error::Corrupt("the group table does not fit the volume's size".into()));
        }
        let allocator = Self::new(device, geometry, volume_id, groups.to_vec());
        match groups {
            [entry] => {
                let bitmap = allocator.owner.read(&*allocator.device, 0, entry)?;
                allocator.install(0, bitmap);
            }
            _ if geometry.group_count() <= EAGER_GROUPS => {
                let bitmaps = allocator.owner.read_all(&*allocator.device, groups)?;
                for (group, bitmap) in (0..).zip(bitmaps) {
                    allocator.install(group, bitmap);
                }
            }
            _ => {}
        }
        Ok(allocator)
    }

    /// The allocator of a new, empty volume. Its first checkpoint writes the bitmaps of all groups.
    pub fn format(device: Arc<dyn Device>, geometry: &Geometry, volume_id: VolumeId) -> Self {
        let entry = |group| GroupEntry {
            free_blocks: geometry.data_bits(group).len() as u32,
            slot: 1,
            ..GroupEntry::default()
        };
        let entries = (0..geometry.group_count()).map(entry).collect();
        let allocator = Self::new(device, geometry, volume_id, entries);
        for group in 0..geometry.group_count() {
            allocator.install(group, allocator.owner.empty_group(group));
        }
        allocator.committed.lock().change_all();
        allocator
    }

    fn new(
        device: Arc<dyn Device>,
        geometry: &Geometry,
        volume_id: VolumeId,
        entries: Vec<GroupEntry>,
    ) -> Self {
        Self {
            device,
            owner: Owner { geometry: *geometry, volume_id },
            merge_reserve: AtomicU64::new(0),
            spare_reserve: AtomicU64::new(0),
            tidy_reserve: AtomicU64::new(0),
            space: Mutex::new(Space::new(entries.iter().map(|entry| entry.free_blocks))),
            committed: Mutex::new(Committed::new(entries)),
            running_bytes: AtomicU64::new(0),
            frozen_bytes: AtomicU64::new(0),
        }
    }

    fn install(&self, group: u32, bitmap: bitmap::Bitmap) {
        let mut committed = self.committed.lock();
        if !committed.is_loaded(group) {
            self.space.lock().install(group, bitmap.clone());
            committed.install(group, bitmap);
        }
    }

    /// Brings a group into memory.
    fn load(&self, group: u32) -> Result<()> {
        let entry = {
            let committed = self.committed.lock();
            if committed.is_loaded(group) {
                return Ok(());
            }
            committed.entries[group as usize]
        };
        match self.owner.read(&*self.device, group, &entry) {
            Ok(bitmap) => {
                self.install(group, bitmap);
                Ok(())
            }
            // Another thread was faster, and checkpoints have since reused the slot being read.
            Err(_) if self.committed.lock().is_loaded(group) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Takes up to `want_blocks` and at least `min_blocks` consecutive blocks, at `hint` (the block that
    /// would continue a file) if possible. The caller holds a reservation for them, which it
    /// [releases](Self::release) later, or is a checkpoint, which draws on the metadata reserve.
    ///
    /// # Errors
    /// [`Error::NoSpace`] if no free run is long enough; [`Error::Corrupt`] or [`Error::Io`] if a
    /// bitmap cannot be loaded.
    pub fn allocate(
        &self,
        want_blocks: u64,
        min_blocks: u64,
        hint: Option<u64>,
        kind: AllocKind,
    ) -> Result<Run> {
        self.allocate_with(want_blocks, min_blocks, hint, kind, |_, _| ())
    }

    /// Takes the blocks of a node for the merge under way, which may use what is kept for it.
    ///
    /// # Errors
    /// As [`Allocator::allocate`].
    pub fn allocate_node(&self, hint: Option<u64>) -> Result<Run> {
        self.allocate_with(NODE_BLOCKS, NODE_BLOCKS, hint, AllocKind::Node, |space, run| {
            space.account.merge(run.blocks);
        })
    }

    /// Gives back the nodes of a merge that is given up.
    pub fn cancel_nodes(&self, runs: &[Run]) {
        for run in runs {
            self.cancel(*run);
            self.disown_node(*run);
        }
    }

    /// The blocks are none of the merge under way any more: what is kept for it is kept anew. Somebody else gives them back.
    pub fn disown_node(&self, run: Run) {
        self.space.lock().account.merged(run.blocks);
    }

    /// The tree that was merged is the one there is: of what that took, only as much as it replaces does not count as kept.
    pub fn merge_published(&self, replaced_blocks: u64) {
        let mut space = self.space.lock();
        let grown = space.account.merging().saturating_sub(replaced_blocks);
        space.account.merged(grown);
    }

    /// As [`Allocator::allocate`], and releases the caller's reservation for the blocks in the same step.
    ///
    /// # Errors
    /// As [`Allocator::allocate`]; the reservation is then as before.
    pub fn allocate_reserved(
        &self,
        want_blocks: u64,
        min_blocks: u64,
        hint: Option<u64>,
        kind: AllocKind,
    ) -> Result<Run> {
        self.allocate_with(want_blocks, min_blocks, hint, kind, |space, run| {
            space.account.release(run.blocks);
        })
    }

    fn allocate_with(
        &self,
        want_blocks: u64,
        min_blocks: u64,
        hint: Option<u64>,
        kind: AllocKind,
        taken: impl Fn(&mut Space, Run),
    ) -> Result<Run> {
        if min_blocks == 0 || min_blocks > want_blocks {
            return Err(Error::Invalid("an allocation needs 1 <= min <= want"));
        }
        if min_blocks > u64::from(BITS) {
            return Err(Error::NoSpace);
        }
        let want = want_blocks.min(u64::from(BITS)) as u32;
        loop {
            let group = {
                let mut space = self.space.lock();
                // What is kept grows with the delta, and there have to be cells for it then.
                let kept_blocks = self.kept(&space).blocks();
                let keep_cells = (kept_blocks + kept_blocks / 2).div_ceil(NODE_BLOCKS);
                let wish = Wish { want, min: min_blocks as u32, hint, kind, keep_cells };
                match space.allocate(wish) {
                    Step::Taken(run) => {
                        taken(&mut space, run);
                        return Ok(run);
                    }
                    Step::NoSpace => return Err(Error::NoSpace),
                    Step::Load(group) => group,
                }
            };
            self.load(group)?;
        }
    }

    /// Gives back a run, or part of one, that was allocated and never recorded: it is free at once.
    pub fn cancel(&self, run: Run) {
        let mut space = self.space.lock();
        let changed = space.clear_used(run.group(), run.bits());
        debug_assert_eq!(u64::from(changed), run.blocks, "cancelled blocks were not allocated");
        space.account.give(u64::from(changed));
    }

    /// As [`Allocator::cancel`], but the blocks become free only with the checkpoint after next freeze: for
    /// blocks that could not be written.
    pub fn quarantine(&self, run: Run) {
        let mut space = self.space.lock();
        space.account.expect(run.blocks);
        space.quarantined.push(run);
    }

    /// Nobody allocates any more, so that nothing has to be kept from them: what no checkpoint is about to free is free.
    pub fn end_quarantine(&self) {
        let mut space = self.space.lock();
        for run in std::mem::take(&mut space.quarantined) {
            let freed = space.clear_used(run.group(), run.bits());
            space.account.settle(run.blocks, u64::from(freed));
        }
    }

    /// Notes the space changes of an operation that is being committed. Calls must come in log
    /// order: under the lock that orders the log.
    pub fn record(&self, changes: &[SpaceChange]) {
        let mut space = self.space.lock();
        for change in changes {
            match change {
                SpaceChange::Alloc(run) => {
                    debug_assert_ne!(space.is_used(*run), Some(false), "recorded, not allocated");
                }
                SpaceChange::Free(run) => space.account.expect(run.blocks),
            }
        }
        space.changes.extend_from_slice(changes);
        self.note_recorded(&space);
    }

    fn note_recorded(&self, space: &Space) {
        let bytes = space.changes.len() * size_of::<SpaceChange>();
        self.running_bytes.store(bytes as u64, Relaxed);
    }

    /// Memory, about, of the recorded changes that are not in a durable checkpoint. Whoever gives the same places other blocks all the time has few
    /// items that change, and many of these.
    pub fn recorded_bytes(&self) -> u64 {
        self.running_bytes.load(Relaxed) + self.frozen_bytes.load(Relaxed)
    }

    /// As [`Allocator::record`], for changes that recovery reads from the log: allocated blocks
    /// are marked as used as well.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if a run is impossible; blocks allocated twice or freed twice are found by
    /// [`Allocator::apply`]. [`Error::Io`].
    pub fn replay_record(&self, changes: &[SpaceChange]) -> Result<()> {
        for change in changes {
            let run = change.run();
            self.check_run(run)?;
            if let SpaceChange::Alloc(_) = change {
                self.load(run.group())?;
            }
            let mut space = self.space.lock();
            match change {
                SpaceChange::Alloc(_) => {
                    space.set_used(run.group(), run.bits());
                }
                SpaceChange::Free(_) => space.account.expect(run.blocks),
            }
            space.changes.push(*change);
            self.note_recorded(&space);
        }
        Ok(())
    }

    fn check_run(&self, run: Run) -> Result<()> {
        if self.owner.geometry.is_data_run(run.start, run.blocks) {
            return Ok(());
        }
        let end = run.start.saturating_add(run.blocks);
        Err(Error::Corrupt(format!("blocks {} to {end} cannot be allocated", run.start)))
    }

    /// Whether `run` lies in the data area and all of it is in use: what is true of every extent of
    /// an intact volume. (Of a group that is not in memory, only the place is checked.)
    pub fn is_allocated(&self, run: Run) -> bool {
        self.check_run(run).is_ok() && self.space.lock().is_used(run).unwrap_or(true)
    }

    /// Ends the running transaction's list of changes and begins the next one's. Constant time.
    pub fn freeze(&self) -> FrozenSpace {
        let mut space = self.space.lock();
        self.frozen_bytes.store(self.running_bytes.swap(0, Relaxed), Relaxed);
        FrozenSpace {
            changes: std::mem::take(&mut space.changes),
            quarantined: std::mem::take(&mut space.quarantined),
        }
    }

    /// Reads the bitmaps that [`Allocator::apply`] is about to change, as far as they are not in memory. May be repeated.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if a run is impossible; [`Error::Io`].
    pub fn load_changed(
        &self,
        frozen: &FrozenSpace,
        node_allocs: &[Run],
        node_frees: &[Run],
    ) -> Result<()> {
        let recorded = frozen.changes.iter().map(SpaceChange::run);
        for run in recorded.chain(node_allocs.iter().chain(node_frees).copied()) {
            self.check_run(run)?;
            self.load(run.group())?;
        }
        Ok(())
    }

    /// Applies a transaction and the checkpoint's own node changes to the committed bits, and gives
    /// the bitmaps to write. One checkpoint at a time: [`Allocator::checkpoint_durable`] ends it. What changes was
    /// [loaded](Self::load_changed).
    ///
    /// # Errors
    /// [`Error::Corrupt`] if blocks in use are allocated, or free ones freed, or a group is not loaded. The allocator must not be
    /// used for a checkpoint after that.
    pub fn apply(
        &self,
        frozen: FrozenSpace,
        node_allocs: &[Run],
        node_frees: &[Run],
        generation: u64,
    ) -> Result<AppliedSpace> {
        let node_allocs = node_allocs.iter().map(|run| SpaceChange::Alloc(*run));
        let node_frees = node_frees.iter().map(|run| SpaceChange::Free(*run));
        let mut changes = frozen.changes;
        let recorded = changes.len();
        changes.extend(node_allocs.chain(node_frees));
        let mut committed = self.committed.lock();
        debug_assert!(committed.in_flight.is_empty(), "two checkpoints at once");
        for (index, change) in changes.into_iter().enumerate() {
            committed.apply(change)?;
            if let SpaceChange::Free(run) = change {
                if index >= recorded {
                    self.space.lock().account.expect(run.blocks);
                }
                committed.in_flight.push(run);
            }
        }
        committed.in_flight.extend(frozen.quarantined);
        let writes = committed.write_changed(&self.owner, generation);
        let groups = committed.entries.clone();
        drop(committed);
        if mutation::active(Mutation::ReuseBeforeCheckpoint) {
            self.checkpoint_durable();
        }
        Ok(AppliedSpace { writes, groups })
    }

    /// The runs that [`Allocator::checkpoint_durable`] is about to free, sorted and merged: between the
    /// superblock's flush and that call, and only then, they may be discarded.
    pub fn discardable(&self) -> Vec<Run> {
        let committed = self.committed.lock();
        let mut runs: Vec<Run> = Vec::new();
        for run in &committed.in_flight {
            let first = Geometry::group_start(run.group());
            runs.extend(committed.free_parts(*run).map(|bits| Run {
                start: first + u64::from(bits.start),
                blocks: bits.len() as u64,
            }));
        }
        runs.sort_unstable();
        runs.dedup_by(|next, run| {
            let touches = next.start <= run.end();
            if touches {
                run.blocks = next.end().max(run.end()) - run.start;
            }
            touches
        });
        runs
    }

    /// The superblock that names the applied checkpoint is durable: what it freed can be handed
    /// out.
    pub fn checkpoint_durable(&self) {
        let mut committed = self.committed.lock();
        let runs = std::mem::take(&mut committed.in_flight);
        for batch in runs.chunks(RELEASE_BATCH) {
            let mut space = self.space.lock();
            for run in batch {
                let given: u32 = committed
                    .free_parts(*run)
                    .map(|bits| space.clear_used(run.group(), bits))
                    .sum();
                space.account.settle(run.blocks, u64::from(given));
                space.account.merged(u64::from(given));
            }
        }
        let mut space = self.space.lock();
        let left = space.account.merging();
        space.account.merged(left);
        self.frozen_bytes.store(0, Relaxed);
    }

    /// Promises `blocks` to a later allocation, and says how that leaves the free space.
    ///
    /// # Errors
    /// [`Error::NoSpace`] if that many are not free, besides earlier promises and what `class` leaves of the metadata
    /// reserve; or if free space is so scattered that this does not fit in as nodes.
    pub fn reserve(&self, blocks: u64, class: ReserveClass) -> Result<Supply> {
        let mut space = self.space.lock();
        let reserve = self.kept(&space);
        if blocks > 0 && space.is_scattered(reserve.kept_from(class)) {
            return Err(Error::NoSpace);
        }
        space.account.promise(blocks, class, reserve)?;
        Ok(space.account.supply(reserve.blocks(), space.cells() * NODE_BLOCKS))
    }

    /// Counts dirty pages that go to blocks which they have: see [`Allocator::release`] for when they are home.
    pub fn count_in_place(&self, blocks: u64) {
        self.space.lock().account.count_in_place(blocks);
    }

    /// What could be promised to `class` at this moment.
    pub fn room_blocks(&self, class: ReserveClass) -> u64 {
        let space = self.space.lock();
        space.room_blocks(self.kept(&space).kept_from(class))
    }

    /// Blocks that nodes can be put into, besides what is promised.
    pub fn node_room_blocks(&self) -> u64 {
        let space = self.space.lock();
        space.account.room(0).min(space.cells() * NODE_BLOCKS)
    }

    /// Takes back a promise, kept or not.
    pub fn release(&self, blocks: u64) {
        self.space.lock().account.release(blocks);
    }

    /// Sets what promises must leave free.
    pub fn set_metadata_reserve(&self, reserve: MetadataReserve) {
        self.merge_reserve.store(reserve.merge_blocks, Relaxed);
        self.spare_reserve.store(reserve.spare_blocks, Relaxed);
        self.tidy_reserve.store(reserve.tidy_blocks, Relaxed);
    }

    /// What promises must leave free at this moment.
    fn kept(&self, space: &Space) -> MetadataReserve {
        let reserve = MetadataReserve {
            merge_blocks: self.merge_reserve.load(Relaxed),
            spare_blocks: self.spare_reserve.load(Relaxed),
            tidy_blocks: self.tidy_reserve.load(Relaxed),
        };
        reserve.after_merging(space.account.merging())
    }

    /// Blocks that can be handed out now.
    pub fn free_blocks(&self) -> u64 {
        self.space.lock().account.free()
    }

    /// Blocks that become free with checkpoints to come.
    pub fn pending_free_blocks(&self) -> u64 {
        self.space.lock().account.pending()
    }

    /// All numbers at one moment.
    pub fn totals(&self) -> SpaceTotals {
        let space = self.space.lock();
        let metadata_reserve_blocks = self.kept(&space).blocks();
        SpaceTotals {
            total_blocks: self.owner.geometry.data_blocks(),
            free_blocks: space.account.free(),
            pending_free_blocks: space.account.pending(),
            reserved_blocks: space.account.reserved(),
            metadata_reserve_blocks,
            unscattered_blocks: space.cells() * NODE_BLOCKS,
            room_blocks: space.room_blocks(metadata_reserve_blocks),
        }
    }
}

#[cfg(test)]
mod tests;
