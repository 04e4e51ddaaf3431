use super::*;
use crate::device::IoClass;
use crate::device::memory::MemoryDevice;
use crate::format::BLOCK_BYTES_U64;
use crate::format::geometry::default_log_blocks;
use proptest::prelude::*;

const ID: VolumeId = [3; 16];

fn geometry(total_blocks: u64) -> Geometry {
    Geometry::new(total_blocks, default_log_blocks(total_blocks)).unwrap()
}

fn write_bitmaps(device: &MemoryDevice, applied: &AppliedSpace) {
    for write in &applied.writes {
        let offset_bytes = write.block * BLOCK_BYTES_U64;
        device.write(offset_bytes, &[&write.content], IoClass::Background, false).unwrap();
    }
}

/// A formatted volume whose first checkpoint is durable.
fn volume(total_blocks: u64) -> (Arc<MemoryDevice>, Allocator, Vec<GroupEntry>) {
    let device = Arc::new(MemoryDevice::new(total_blocks * BLOCK_BYTES_U64));
    let allocator = Allocator::format(device.clone(), &geometry(total_blocks), ID);
    let applied = allocator.apply(allocator.freeze(), &[], &[], 1).unwrap();
    write_bitmaps(&device, &applied);
    allocator.checkpoint_durable();
    (device, allocator, applied.groups)
}

fn checkpoint(device: &MemoryDevice, allocator: &Allocator, generation: u64) -> Vec<GroupEntry> {
    let frozen = allocator.freeze();
    allocator.load_changed(&frozen, &[], &[]).unwrap();
    let applied = allocator.apply(frozen, &[], &[], generation).unwrap();
    write_bitmaps(device, &applied);
    allocator.checkpoint_durable();
    applied.groups
}

fn data(allocator: &Allocator, want: u64, hint: Option<u64>) -> Run {
    allocator.allocate(want, 1, hint, AllocKind::Data).unwrap()
}

/// Joins runs that follow each other.
fn extents(runs: &[Run]) -> Vec<Run> {
    let mut joined: Vec<Run> = Vec::new();
    for run in runs {
        match joined.last_mut() {
            Some(last) if last.end() == run.start => last.blocks += run.blocks,
            _ => joined.push(*run),
        }
    }
    joined
}

/// Allocates `total` blocks in pieces of `piece`, each hinted at the end of the one before.
fn grow(allocator: &Allocator, total: u64, piece: u64, mut hint: Option<u64>) -> Vec<Run> {
    let (mut runs, mut done) = (Vec::new(), 0);
    while done < total {
        let run = data(allocator, piece.min(total - done), hint);
        done += run.blocks;
        hint = Some(run.end());
        runs.push(run);
    }
    runs
}

#[test]
fn a_64_mib_file_has_at_most_two_extents() {
    for total_blocks in [65_536, 1 << 20] {
        let (_, allocator, _) = volume(total_blocks);
        let runs = grow(&allocator, 16_384, 256, None);
        assert!(extents(&runs).len() <= 2, "{:?}", extents(&runs));
    }
}

#[test]
fn a_large_file_stays_whole_among_small_ones_and_nodes() {
    let (_, allocator, _) = volume(1 << 20);
    let (mut large, mut small, mut hint) = (Vec::new(), Vec::new(), None);
    for round in 0..64_u64 {
        let run = data(&allocator, 256, hint);
        hint = Some(run.end());
        large.push(run);
        for file in 0..20 {
            small.push(data(&allocator, 1 + (round * 7 + file) % 15, None));
        }
        allocator.allocate(4, 4, None, AllocKind::Node).unwrap();
    }
    assert!(extents(&large).len() <= 2, "{:?}", extents(&large));
    let windows =
        small.iter().map(|run| run.start / 512).collect::<std::collections::BTreeSet<_>>();
    let blocks: u64 = small.iter().map(|run| run.blocks).sum();
    assert!(windows.len() as u64 <= blocks.div_ceil(512) + 3, "{windows:?} for {blocks} blocks");
}

#[test]
fn a_thousand_small_files_are_packed() {
    let (_, allocator, _) = volume(1 << 20);
    let runs: Vec<Run> = (0..1000).map(|file| data(&allocator, 1 + file * 5 % 8, None)).collect();
    let blocks: u64 = runs.iter().map(|run| run.blocks).sum();
    let start = runs.iter().map(|run| run.start).min().unwrap();
    let end = runs.iter().map(Run::end).max().unwrap();
    assert!(end - start <= blocks + 512, "{blocks} blocks over {}", end - start);
    assert!(runs.iter().zip(1..).all(|(run, file)| run.blocks == 1 + (file - 1) * 5 % 8));
}

#[test]
fn nodes_are_taken_from_the_end_and_refill_their_holes() {
    let (device, allocator, _) = volume(65_536);
    let end = geometry(65_536).data_end();
    let node = || allocator.allocate(4, 4, None, AllocKind::Node).unwrap();
    let nodes: Vec<Run> = (0..100).map(|_| node()).collect();
    assert!(nodes.iter().all(|run| run.blocks == 4 && run.start >= end - 400));
    let changes: Vec<_> = nodes.iter().map(|run| SpaceChange::Alloc(*run)).collect();
    allocator.record(&changes);
    allocator.record(&[SpaceChange::Free(nodes[10]), SpaceChange::Free(nodes[50])]);
    assert_eq!(node().end(), end - 400);
    checkpoint(&device, &allocator, 2);
    assert_eq!((node(), node()), (nodes[10], nodes[50]));
}

#[test]
fn nodes_return_to_the_last_group_when_it_has_room_again() {
    let (_, allocator, _) = volume(3 * 32_256 + 200);
    let node = || allocator.allocate(4, 4, None, AllocKind::Node).unwrap();
    let last_group: Vec<Run> = (0..46).map(|_| node()).collect();
    assert!(last_group.iter().all(|run| run.group() == 3));
    assert_eq!(node().group(), 2);
    allocator.cancel(last_group[20]);
    assert_eq!(node(), last_group[20]);
    assert_eq!(node().group(), 2);
}

#[test]
fn short_holes_are_left_to_small_files() {
    let (_, allocator, _) = volume(65_536);
    let file = grow(&allocator, 1024, 256, None);
    for index in 0..10 {
        allocator.cancel(Run { start: file[0].start + index * 100, blocks: 10 });
    }
    let large = data(&allocator, 64, None);
    assert!(large.start >= file[3].end());
    let small = data(&allocator, 10, None);
    assert_eq!(small, Run { start: file[0].start, blocks: 10 });
}

#[test]
fn every_block_can_be_allocated_and_then_no_more() {
    for total_blocks in [256, 5_000, 70_000, 66 * 32_256 + 20] {
        let (_, allocator, _) = volume(total_blocks);
        let mut left = geometry(total_blocks).data_blocks();
        let mut step = 0;
        while left > 0 {
            step += 1;
            let kind = if step % 3 == 0 { AllocKind::Node } else { AllocKind::Data };
            let want = if step % 5 == 0 { 7 } else { 32_256 };
            let run = allocator.allocate(want, 1, None, kind).unwrap();
            left -= run.blocks;
            assert_eq!(allocator.free_blocks(), left);
        }
        for kind in [AllocKind::Data, AllocKind::Node] {
            assert_eq!(allocator.allocate(1, 1, None, kind), Err(Error::NoSpace));
        }
        allocator.space.lock().check();
    }
}

#[test]
fn the_longest_run_is_split_when_none_is_long_enough() {
    let (_, allocator, _) = volume(256);
    let all = data(&allocator, 1000, None);
    for (start, blocks) in [(0, 3), (10, 20), (40, 20), (100, 5)] {
        allocator.cancel(Run { start: all.start + start, blocks });
    }
    assert_eq!(allocator.allocate(100, 21, None, AllocKind::Data), Err(Error::NoSpace));
    let first = allocator.allocate(100, 20, None, AllocKind::Data);
    assert_eq!(first, Ok(Run { start: all.start + 10, blocks: 20 }));
    assert_eq!(data(&allocator, 100, Some(u64::MAX)).blocks, 20);
    assert_eq!(allocator.allocate(100, 6, None, AllocKind::Node), Err(Error::NoSpace));
    assert_eq!(data(&allocator, 4, None), Run { start: all.start + 100, blocks: 4 });
    assert!(allocator.allocate(0, 0, None, AllocKind::Data).is_err());
    assert!(allocator.allocate(1, 2, None, AllocKind::Data).is_err());
}

#[test]
fn freed_blocks_wait_for_the_durable_checkpoint() {
    let (device, allocator, _) = volume(256);
    let all = geometry(256).data_blocks();
    let run = data(&allocator, all, None);
    allocator.record(&[SpaceChange::Alloc(run), SpaceChange::Free(run)]);
    assert_eq!((allocator.free_blocks(), allocator.pending_free_blocks()), (0, all));
    let applied = allocator.apply(allocator.freeze(), &[], &[], 2).unwrap();
    write_bitmaps(&device, &applied);
    assert_eq!(allocator.discardable(), [run]);
    assert_eq!(allocator.allocate(1, 1, None, AllocKind::Data), Err(Error::NoSpace));
    allocator.checkpoint_durable();
    assert_eq!((allocator.free_blocks(), allocator.pending_free_blocks()), (all, 0));
    assert_eq!(data(&allocator, all, None), run);
    assert!(allocator.discardable().is_empty());
}

#[test]
fn quarantined_blocks_come_back_with_a_checkpoint_begun_later() {
    let (device, allocator, _) = volume(256);
    let run = data(&allocator, 8, None);
    let frozen = allocator.freeze();
    allocator.quarantine(run);
    let applied = allocator.apply(frozen, &[], &[], 2).unwrap();
    write_bitmaps(&device, &applied);
    allocator.checkpoint_durable();
    assert!(allocator.is_allocated(run));
    checkpoint(&device, &allocator, 3);
    assert!(!allocator.is_allocated(run));
    assert_eq!(allocator.free_blocks(), geometry(256).data_blocks());
}

#[test]
fn quarantined_blocks_are_free_where_nobody_allocates_any_more() {
    let (_, allocator, _) = volume(256);
    let all = allocator.free_blocks();
    allocator.quarantine(data(&allocator, 8, None));
    assert_eq!((allocator.free_blocks(), allocator.pending_free_blocks()), (all - 8, 8));
    allocator.end_quarantine();
    assert_eq!((allocator.free_blocks(), allocator.pending_free_blocks()), (all, 0));
}

#[test]
fn contradictions_are_reported_as_corruption() {
    let (device, allocator, groups) = volume(70_000);
    let run = data(&allocator, 8, None);
    allocator.record(&[SpaceChange::Alloc(run)]);
    let groups_after = checkpoint(&device, &allocator, 2);
    let reopen = |groups: &[GroupEntry]| {
        Allocator::open(device.clone(), &geometry(70_000), ID, groups).unwrap()
    };
    let corrupt = |groups: &[GroupEntry], changes: &[SpaceChange]| {
        let allocator = reopen(groups);
        let replayed = allocator.replay_record(changes);
        let applied = replayed.and_then(|()| {
            let frozen = allocator.freeze();
            allocator.load_changed(&frozen, &[], &[])?;
            allocator.apply(frozen, &[], &[], 3).map(|_| ())
        });
        assert!(matches!(applied, Err(Error::Corrupt(_))), "{changes:?}: {applied:?}");
    };
    let (alloc, free) = (SpaceChange::Alloc(run), SpaceChange::Free(run));
    corrupt(&groups_after, &[alloc]);
    corrupt(&groups_after, &[free, free]);
    corrupt(&groups, &[free]);
    corrupt(&groups, &[alloc, alloc]);
    let total = geometry(70_000).total_blocks();
    for (start, blocks) in [(0, 1), (total - 16, 1), (32_250, 10), (run.start, 0), (u64::MAX, 5)] {
        corrupt(&groups, &[SpaceChange::Alloc(Run { start, blocks })]);
        corrupt(&groups, &[SpaceChange::Free(Run { start, blocks })]);
    }
    // The opposite order is what a log can hold, and the block must not be handed out afterwards.
    let allocator = reopen(&groups_after);
    allocator.replay_record(&[free, alloc]).unwrap();
    checkpoint(&device, &allocator, 3);
    assert!(allocator.is_allocated(run));
    assert_eq!(allocator.free_blocks(), geometry(70_000).data_blocks() - 8);
    assert_eq!(allocator.pending_free_blocks(), 0);
}

#[test]
fn damaged_bitmaps_are_refused() {
    for total_blocks in [256_u64, 70_000] {
        let (device, allocator, _) = volume(total_blocks);
        data(&allocator, 5, None);
        let geometry = geometry(total_blocks);
        let groups = checkpoint(&device, &allocator, 2);
        let open = |device: &Arc<MemoryDevice>, groups: &[GroupEntry]| {
            Allocator::open(device.clone(), &geometry, ID, groups).map(|_| ())
        };
        assert_eq!(open(&device, &groups), Ok(()));
        assert!(open(&device, &groups[..groups.len() - 1]).is_err());
        let mut other = groups.clone();
        other[0].slot = 1 - other[0].slot;
        assert!(matches!(open(&device, &other), Err(Error::Corrupt(_))));
        let mut other = groups.clone();
        other[0].free_blocks -= 1;
        assert!(matches!(open(&device, &other), Err(Error::Corrupt(_))));
        let mut image = device.image();
        image[geometry.bitmap_block(0, groups[0].slot) as usize * 4096 + 100] ^= 1;
        let damaged = Arc::new(MemoryDevice::from_image(&image));
        assert!(matches!(open(&damaged, &groups), Err(Error::Corrupt(_))));
    }
}

/// A bitmap that is intact and says that the superblock is free.
#[test]
fn bitmaps_that_free_what_is_not_data_are_refused() {
    use crate::format::bitmap as stored;
    let (device, _, mut groups) = volume(256);
    let geometry = geometry(256);
    for bit in [0, 83, 240, 255, 256, BITS - 1] {
        let mut words = [u64::MAX; stored::WORDS];
        words[bit as usize / 64] &= !(1 << (bit % 64));
        let header = stored::BitmapHeader {
            volume_id: ID,
            block_address: geometry.bitmap_block(0, 0),
            generation: 1,
            group: 0,
        };
        let (content, checksum) = stored::encode(&header, &words);
        let offset_bytes = header.block_address * BLOCK_BYTES_U64;
        device.write(offset_bytes, &[&content], IoClass::Background, false).unwrap();
        groups[0] = GroupEntry { generation: 1, free_blocks: 1, checksum, slot: 0 };
        let opened = Allocator::open(device.clone(), &geometry, ID, &groups);
        assert!(matches!(opened, Err(Error::Corrupt(_))), "bit {bit}");
    }
}

#[test]
fn large_volumes_load_a_group_when_it_is_needed() {
    let total_blocks = 80 * 32_256;
    let (device, allocator, _) = volume(total_blocks);
    let far = 70 * 32_256 + 500;
    let run = data(&allocator, 300, Some(far));
    assert_eq!(run.start, far);
    allocator.record(&[SpaceChange::Alloc(run)]);
    let groups = checkpoint(&device, &allocator, 2);
    let reads = || device.stats().counters().reads;
    let before = reads();
    let allocator = Allocator::open(device.clone(), &geometry(total_blocks), ID, &groups).unwrap();
    assert_eq!(allocator.free_blocks(), geometry(total_blocks).data_blocks() - 300);
    assert_eq!(reads(), before);
    assert_eq!(data(&allocator, 100, Some(run.end())).start, run.end());
    assert_eq!(reads(), before + 1);
    // Freed in a group that nobody has loaded yet: the checkpoint does.
    let second = Allocator::open(device.clone(), &geometry(total_blocks), ID, &groups).unwrap();
    let before = reads();
    second.record(&[SpaceChange::Free(run)]);
    let groups = checkpoint(&device, &second, 3);
    assert_eq!(reads(), before + 1);
    assert_eq!(second.free_blocks(), geometry(total_blocks).data_blocks());
    let free: u64 = groups.iter().map(|entry| u64::from(entry.free_blocks)).sum();
    assert_eq!(free, second.free_blocks());
    second.space.lock().check();
}

#[test]
fn reservations_are_kept_and_never_exceed_what_is_free() {
    let (_, allocator, _) = volume(256);
    let all = geometry(256).data_blocks();
    let reserve = MetadataReserve { merge_blocks: 5, spare_blocks: 10, tidy_blocks: 5 };
    allocator.set_metadata_reserve(reserve);
    // Of 17 blocks, one is kept for the extents that the others may become.
    let most = (all - 20) * 16 / 17;
    assert_eq!(allocator.reserve(most + 1, ReserveClass::User), Err(Error::NoSpace));
    allocator.reserve(most, ReserveClass::User).unwrap();
    let run = allocator.allocate_reserved(10, 1, None, AllocKind::Data).unwrap();
    assert_eq!(allocator.totals().reserved_blocks, most - 10);
    allocator.cancel(run);
    assert_eq!(allocator.reserve(12, ReserveClass::User), Err(Error::NoSpace));
    allocator.reserve(10, ReserveClass::User).unwrap();
    assert_eq!(allocator.reserve(7, ReserveClass::Tidy), Err(Error::NoSpace));
    assert_eq!(allocator.room_blocks(ReserveClass::Tidy), 5);
    allocator.reserve(5, ReserveClass::Tidy).unwrap();
    allocator.reserve(all - most - 5, ReserveClass::Logged).unwrap();
    assert_eq!(allocator.reserve(1, ReserveClass::Logged), Err(Error::NoSpace));
    allocator.release(all);
    assert_eq!(allocator.totals().reserved_blocks, 0);
}

/// One step of the model test. Numbers choose among what is there at the time.
#[derive(Debug, Clone)]
enum Action {
    Allocate { want: u64, min: u64, hint: Option<u64>, node: bool },
    Cancel(usize),
    Quarantine(usize),
    Record(usize),
    Free { run: usize, skip: u64, blocks: u64 },
    Freeze,
    Apply { nodes: usize },
    Durable,
    Crash,
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        8 => (1_u64..80, 1_u64..20, prop::option::of(0_u64..1200), any::<bool>()).prop_map(
            |(want, min, hint, node)| Action::Allocate { want, min: min.min(want), hint, node }
        ),
        1 => any::<usize>().prop_map(Action::Cancel),
        1 => any::<usize>().prop_map(Action::Quarantine),
        7 => any::<usize>().prop_map(Action::Record),
        5 => (any::<usize>(), 0_u64..20, 1_u64..60)
            .prop_map(|(run, skip, blocks)| Action::Free { run, skip, blocks }),
        2 => Just(Action::Freeze),
        2 => (0_usize..4).prop_map(|nodes| Action::Apply { nodes }),
        2 => Just(Action::Durable),
        1 => Just(Action::Crash),
    ]
}

/// How far the checkpoint under way is.
enum Stage {
    None,
    Frozen(FrozenSpace),
    Applied(Vec<GroupEntry>),
}

/// The naive counterpart: one flag per block, and lists.
struct Model {
    device: Arc<MemoryDevice>,
    allocator: Allocator,
    total: u64,
    generation: u64,
    stage: Stage,
    /// In use or not yet reusable.
    used: Vec<bool>,
    /// As of the durable checkpoint.
    durable: Vec<bool>,
    durable_groups: Vec<GroupEntry>,
    /// As of the checkpoint under way.
    next_durable: Vec<bool>,
    /// Allocated, not recorded.
    outstanding: Vec<Run>,
    /// Recorded and not freed.
    live: Vec<Run>,
    /// Nodes of the tree; only checkpoints change them.
    nodes: Vec<Run>,
    durable_nodes: Vec<Run>,
    /// Recorded since the last freeze, and between the last two.
    running: Vec<SpaceChange>,
    frozen: Vec<SpaceChange>,
    /// To be freed by the running transaction, and by the checkpoint under way.
    pending: Vec<Run>,
    in_flight: Vec<Run>,
}

impl Model {
    fn new(total: u64) -> Self {
        let (device, allocator, durable_groups) = volume(total);
        let geometry = geometry(total);
        let used: Vec<bool> = (0..total).map(|block| !geometry.is_data_run(block, 1)).collect();
        Self {
            device,
            allocator,
            total,
            generation: 1,
            stage: Stage::None,
            durable: used.clone(),
            next_durable: used.clone(),
            used,
            durable_groups,
            outstanding: Vec::new(),
            live: Vec::new(),
            nodes: Vec::new(),
            durable_nodes: Vec::new(),
            running: Vec::new(),
            frozen: Vec::new(),
            pending: Vec::new(),
            in_flight: Vec::new(),
        }
    }

    fn set(flags: &mut [bool], run: Run, value: bool) {
        for flag in &mut flags[run.start as usize..run.end() as usize] {
            assert_ne!(*flag, value, "{run:?}");
            *flag = value;
        }
    }

    fn longest_free(&self) -> u64 {
        self.used.split(|used| *used).map(<[bool]>::len).max().unwrap_or(0) as u64
    }

    fn allocate(&mut self, want: u64, min: u64, hint: Option<u64>, kind: AllocKind) -> Option<Run> {
        let longest = self.longest_free();
        match self.allocator.allocate(want, min, hint, kind) {
            Ok(run) => {
                assert!((min..=want).contains(&run.blocks));
                Self::set(&mut self.used, run, true);
                Some(run)
            }
            Err(Error::NoSpace) => {
                assert!(longest < min, "refused {min} blocks, {longest} are free in a row");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn pick(list: &mut Vec<Run>, number: usize) -> Option<Run> {
        (!list.is_empty()).then(|| list.swap_remove(number % list.len()))
    }

    fn act(&mut self, action: &Action) {
        match *action {
            Action::Allocate { want, min, hint, node } => {
                let kind = if node { AllocKind::Node } else { AllocKind::Data };
                let run = self.allocate(want, min, hint, kind);
                self.outstanding.extend(run);
            }
            Action::Cancel(number) => {
                if let Some(run) = Self::pick(&mut self.outstanding, number) {
                    Self::set(&mut self.used, run, false);
                    self.allocator.cancel(run);
                }
            }
            Action::Quarantine(number) => {
                if let Some(run) = Self::pick(&mut self.outstanding, number) {
                    self.pending.push(run);
                    self.allocator.quarantine(run);
                }
            }
            Action::Record(number) => {
                if let Some(run) = Self::pick(&mut self.outstanding, number) {
                    self.record(SpaceChange::Alloc(run));
                    self.live.push(run);
                }
            }
            Action::Free { run, skip, blocks } => {
                let Some(run) = Self::pick(&mut self.live, run) else { return };
                let start = run.start + skip % run.blocks;
                let part = Run { start, blocks: blocks.min(run.end() - start) };
                let rest = [
                    Run { start: run.start, blocks: start - run.start },
                    Run { start: part.end(), blocks: run.end() - part.end() },
                ];
                self.live.extend(rest.into_iter().filter(|run| run.blocks > 0));
                self.record(SpaceChange::Free(part));
                self.pending.push(part);
            }
            Action::Freeze => {
                if matches!(self.stage, Stage::None) {
                    self.stage = Stage::Frozen(self.allocator.freeze());
                    self.frozen = std::mem::take(&mut self.running);
                    self.in_flight = std::mem::take(&mut self.pending);
                }
            }
            Action::Apply { nodes } => self.apply(nodes),
            Action::Durable => self.make_durable(),
            Action::Crash => self.crash(),
        }
    }

    fn record(&mut self, change: SpaceChange) {
        self.allocator.record(&[change]);
        self.running.push(change);
    }

    fn apply(&mut self, nodes: usize) {
        let frozen = match std::mem::replace(&mut self.stage, Stage::None) {
            Stage::Frozen(frozen) => frozen,
            other => {
                self.stage = other;
                return;
            }
        };
        let freed: Vec<Run> =
            (0..nodes).filter_map(|number| Self::pick(&mut self.nodes, number * 7)).collect();
        let new: Vec<Run> =
            (0..nodes).filter_map(|_| self.allocate(4, 4, None, AllocKind::Node)).collect();
        self.generation += 1;
        let applied = self.allocator.apply(frozen, &new, &freed, self.generation).unwrap();
        write_bitmaps(&self.device, &applied);
        self.next_durable = self.durable.clone();
        for change in std::mem::take(&mut self.frozen) {
            let allocated = matches!(change, SpaceChange::Alloc(_));
            Self::set(&mut self.next_durable, change.run(), allocated);
        }
        for run in &new {
            Self::set(&mut self.next_durable, *run, true);
        }
        for run in &freed {
            Self::set(&mut self.next_durable, *run, false);
        }
        self.in_flight.extend(freed);
        self.nodes.extend(new);
        self.stage = Stage::Applied(applied.groups);
    }

    fn make_durable(&mut self) {
        match std::mem::replace(&mut self.stage, Stage::None) {
            Stage::Applied(groups) => {
                self.allocator.checkpoint_durable();
                self.durable = self.next_durable.clone();
                self.durable_groups = groups;
                self.durable_nodes = self.nodes.clone();
                for run in std::mem::take(&mut self.in_flight) {
                    Self::set(&mut self.used, run, false);
                }
            }
            other => self.stage = other,
        }
    }

    /// Opens the volume from its durable checkpoint and replays some prefix of the log: all of it here.
    fn crash(&mut self) {
        let geometry = geometry(self.total);
        let reopen =
            || Allocator::open(self.device.clone(), &geometry, ID, &self.durable_groups).unwrap();
        let allocator = reopen();
        Self::compare(&allocator, &self.durable);
        let mut log = match self.stage {
            Stage::None => Vec::new(),
            Stage::Frozen(_) => self.frozen.clone(),
            // The log of an applied checkpoint is gone from the model: crash a little later.
            Stage::Applied(_) => return,
        };
        log.extend(self.running.iter().copied());
        let mut used = self.durable.clone();
        for change in &log {
            if let SpaceChange::Alloc(run) = change {
                Self::set(&mut used, *run, true);
            }
        }
        allocator.replay_record(&log).unwrap();
        Self::compare(&allocator, &used);
        self.pending = log
            .iter()
            .filter(|change| matches!(change, SpaceChange::Free(_)))
            .map(SpaceChange::run)
            .collect();
        self.allocator = allocator;
        self.used = used;
        self.stage = Stage::None;
        self.running = log;
        self.frozen.clear();
        self.in_flight.clear();
        self.outstanding.clear();
        self.nodes = self.durable_nodes.clone();
    }

    fn compare(allocator: &Allocator, flags: &[bool]) {
        let space = allocator.space.lock();
        for (block, flag) in (0..).zip(flags) {
            let used = space.is_used(Run { start: block, blocks: 1 });
            assert_eq!(used, Some(*flag), "block {block}");
        }
    }

    fn check(&self) {
        Self::compare(&self.allocator, &self.used);
        self.allocator.space.lock().check();
        let sum = |runs: &[Run]| runs.iter().map(|run| run.blocks).sum::<u64>();
        let free = self.used.iter().filter(|used| !**used).count() as u64;
        assert_eq!(self.allocator.free_blocks(), free);
        let pending = sum(&self.pending) + sum(&self.in_flight);
        assert_eq!(self.allocator.pending_free_blocks(), pending);
        let discardable: u64 = match self.stage {
            Stage::Applied(_) => sum(&self.in_flight),
            _ => 0,
        };
        assert_eq!(sum(&self.allocator.discardable()), discardable);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Nothing is handed out that is in use or pending, and what a crash leaves is exactly the
    /// durable checkpoint plus the log.
    #[test]
    fn agrees_with_a_naive_model_through_crashes(
        total in 256_u64..1500,
        actions in prop::collection::vec(action(), 1..150),
    ) {
        let mut model = Model::new(total);
        for action in actions {
            model.act(&action);
            model.check();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_a_naive_model_over_several_groups(
        actions in prop::collection::vec(action(), 1..60),
        sizes in prop::collection::vec(1_u64..9000, 1..40),
    ) {
        let mut model = Model::new(3 * 32_256 + 100);
        let grown = sizes.into_iter().enumerate().map(|(index, want)| Action::Allocate {
            want,
            min: 1,
            hint: (index % 3 == 0).then_some(32_256 * (index as u64 % 4) + 32_000),
            node: index % 5 == 0,
        });
        for action in grown.chain(actions) {
            model.act(&action);
        }
        model.check();
        model.make_durable();
        model.crash();
        model.check();
    }
}

#[test]
fn a_merge_under_way_leaves_as_much_room_as_before_it_and_after_it() {
    let (_, allocator, _) = volume(256);
    let room = |allocator: &Allocator| allocator.room_blocks(ReserveClass::User);
    let nodes = |count: u64| MetadataReserve {
        merge_blocks: count * NODE_BLOCKS,
        ..MetadataReserve::default()
    };
    allocator.set_metadata_reserve(nodes(3));
    let before = room(&allocator);
    let mut taken: Vec<Run> =
        (0..3).map(|_| allocator.allocate_node(None).expect("a node")).collect();
    assert_eq!(room(&allocator), before, "what is taken need not be kept any more");
    allocator.cancel_nodes(&taken);
    assert_eq!(room(&allocator), before);
    // Given up, and made again with a node more than it replaces.
    taken = (0..3).map(|_| allocator.allocate_node(None).expect("a node")).collect();
    let applied = allocator.apply(allocator.freeze(), &taken, &[], 2).expect("apply");
    assert!(!applied.writes.is_empty());
    allocator.merge_published(0);
    allocator.checkpoint_durable();
    assert_eq!(room(&allocator), before - 3 * NODE_BLOCKS, "the tree has grown");
    let fourth: Vec<Run> = (0..4).map(|_| allocator.allocate_node(None).expect("a node")).collect();
    let _ = allocator.apply(allocator.freeze(), &fourth, &taken, 3).expect("apply");
    assert_eq!(room(&allocator), before - 4 * NODE_BLOCKS, "three are kept, and four are taken");
    allocator.merge_published(3 * NODE_BLOCKS);
    allocator.set_metadata_reserve(nodes(4));
    let published = room(&allocator);
    allocator.checkpoint_durable();
    assert_eq!(room(&allocator), published, "what it replaced is free, and kept again");
    assert_eq!(room(&allocator), before - 5 * NODE_BLOCKS);
    allocator.space.lock().check();
}
