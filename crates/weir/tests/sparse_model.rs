//! File contents against a model: a vector of bytes, and for each page whether it holds data. Random operations of all
//! kinds, with so little memory that pages are evicted all the time and logs so small that operations wait
//! for checkpoints; background work, reopening with and without close in between.

mod common;

use common::*;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::Arc;
use weir::device::Device;
use weir::*;

const FILES: usize = 3;
const PAGE: u64 = 4096;
/// Offsets stay below this.
const LIMIT: u64 = 96 * PAGE;

/// A file as it should be.
#[derive(Clone, Default)]
struct Model {
    bytes: Vec<u8>,
    /// Pages that `seek_data` finds.
    data: BTreeSet<u64>,
}

fn pages(start: u64, end: u64) -> std::ops::Range<u64> {
    start / PAGE..end.div_ceil(PAGE)
}

impl Model {
    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let end = offset as usize + data.len();
        if end > self.bytes.len() {
            self.bytes.resize(end, 0);
        }
        self.bytes[offset as usize..end].copy_from_slice(data);
        self.data.extend(pages(offset, end as u64));
    }

    fn truncate(&mut self, size: u64) {
        self.bytes.resize(size as usize, 0);
        let keep = size.div_ceil(PAGE);
        self.data.retain(|&page| page < keep);
    }

    /// Bytes become zero, whole pages holes.
    fn punch(&mut self, start: u64, end: u64) {
        let cut = end.min(self.size());
        if start < cut {
            self.bytes[start as usize..cut as usize].fill(0);
        }
        // The last page counts as whole when the range reaches the end of the file.
        let end = if end >= self.size() { end.next_multiple_of(PAGE) } else { end };
        let whole = start.div_ceil(PAGE)..end / PAGE;
        self.data.retain(|page| !whole.contains(page));
    }

    fn collapse(&mut self, start: u64, end: u64) {
        self.bytes.drain(start as usize..end as usize);
        let (first, last) = (start / PAGE, end / PAGE);
        self.data = self
            .data
            .iter()
            .filter(|&&page| page < first || page >= last)
            .map(|&page| if page >= last { page - (last - first) } else { page })
            .collect();
    }

    fn insert(&mut self, start: u64, length: u64) {
        let zeros = vec![0; length as usize];
        self.bytes.splice(start as usize..start as usize, zeros);
        let first = start / PAGE;
        self.data = self
            .data
            .iter()
            .map(|&page| if page >= first { page + length / PAGE } else { page })
            .collect();
    }
}

#[derive(Debug, Clone)]
enum Step {
    Write { file: usize, offset: u64, length: u64, seed: u64 },
    Append { file: usize, length: u64, seed: u64 },
    Truncate { file: usize, size: u64 },
    Allocate { file: usize, mode: AllocateMode, offset: u64, length: u64 },
    Copy { from: usize, offset: u64, to: usize, target: u64, length: u64 },
    Read { file: usize, offset: u64, length: u64 },
    Seek { file: usize, offset: u64 },
    Fsync { file: usize, data_only: bool },
    Background(BackgroundWork),
    Checkpoint,
    Reopen { close: bool },
}

/// Byte offsets: anywhere, at page edges, and near the start, where data lives in the inode.
fn offsets() -> impl Strategy<Value = u64> {
    prop_oneof![0..LIMIT, (0..LIMIT / PAGE).prop_map(|page| page * PAGE), 0..3000_u64]
}

fn lengths() -> impl Strategy<Value = u64> {
    prop_oneof![1..100_u64, 1..20 * PAGE, (1..24_u64).prop_map(|pages| pages * PAGE)]
}

fn steps() -> impl Strategy<Value = Step> {
    let file = 0..FILES;
    let mode = prop_oneof![
        Just(AllocateMode::Extend),
        Just(AllocateMode::KeepSize),
        Just(AllocateMode::PunchHole),
        Just(AllocateMode::ZeroRange),
        Just(AllocateMode::ZeroRangeKeepSize),
        Just(AllocateMode::CollapseRange),
        Just(AllocateMode::InsertRange),
    ];
    let work = prop_oneof![
        Just(BackgroundWork::Log),
        Just(BackgroundWork::Writeback),
        Just(BackgroundWork::Checkpoint),
        Just(BackgroundWork::Purge),
    ];
    prop_oneof![
        8 => (file.clone(), offsets(), lengths(), any::<u64>())
            .prop_map(|(file, offset, length, seed)| Step::Write { file, offset, length, seed }),
        2 => (file.clone(), lengths(), any::<u64>())
            .prop_map(|(file, length, seed)| Step::Append { file, length, seed }),
        3 => (file.clone(), offsets()).prop_map(|(file, size)| Step::Truncate { file, size }),
        6 => (file.clone(), mode, offsets(), lengths())
            .prop_map(|(file, mode, offset, length)| Step::Allocate { file, mode, offset, length }),
        2 => (file.clone(), offsets(), file.clone(), offsets(), lengths())
            .prop_map(|(from, offset, to, target, length)| Step::Copy { from, offset, to, target, length }),
        4 => (file.clone(), offsets(), lengths())
            .prop_map(|(file, offset, length)| Step::Read { file, offset, length }),
        3 => (file.clone(), offsets()).prop_map(|(file, offset)| Step::Seek { file, offset }),
        4 => (file, any::<bool>()).prop_map(|(file, data_only)| Step::Fsync { file, data_only }),
        6 => work.prop_map(Step::Background),
        1 => Just(Step::Checkpoint),
        1 => any::<bool>().prop_map(|close| Step::Reopen { close }),
    ]
}

struct World {
    device: Arc<dyn Device>,
    memory_bytes: u64,
    volume: Volume,
    files: Vec<File>,
    models: Vec<Model>,
}

impl World {
    fn new(memory_bytes: u64, log_blocks: u64) -> Self {
        let device = formatted(16 * MIB, log_blocks);
        let volume = open(&device, manual(memory_bytes));
        let files = (0..FILES).map(|number| create(&volume, &format!("/{number}"))).collect();
        volume.sync().expect("sync");
        Self { device, memory_bytes, volume, files, models: vec![Model::default(); FILES] }
    }

    fn apply(&mut self, step: &Step) {
        match *step {
            Step::Write { file, offset, length, seed } => {
                let data = pattern(seed, length as usize);
                assert_eq!(self.files[file].write_at(offset, &data), Ok(data.len()));
                self.models[file].write(offset, &data);
            }
            Step::Append { file, length, seed } => {
                let data = pattern(seed, length as usize);
                let size = self.models[file].size();
                if size < 2 * LIMIT {
                    assert_eq!(self.files[file].append(&data), Ok(size));
                    self.models[file].write(size, &data);
                }
            }
            Step::Truncate { file, size } => {
                assert_eq!(self.files[file].truncate(size), Ok(()));
                self.models[file].truncate(size);
            }
            Step::Allocate { file, mode, offset, length } => {
                self.allocate(file, mode, offset, length);
            }
            Step::Copy { from, offset, to, target, length } => {
                self.copy(from, offset, to, target, length);
            }
            Step::Read { file, offset, length } => self.read(file, offset, length),
            Step::Seek { file, offset } => self.seek(file, offset),
            Step::Fsync { file, data_only } => {
                let file = &self.files[file];
                assert_eq!(if data_only { file.fdatasync() } else { file.fsync() }, Ok(()));
            }
            Step::Background(work) => {
                self.volume.background_step(work).expect("background");
            }
            Step::Checkpoint => self.volume.checkpoint().expect("checkpoint"),
            Step::Reopen { close } => self.reopen(close),
        }
        let stats = self.volume.stats();
        assert!(stats.pages_in_use <= stats.pages_capacity);
    }

    fn allocate(&mut self, file: usize, mode: AllocateMode, offset: u64, length: u64) {
        let model = &mut self.models[file];
        let (size, end) = (model.size(), offset + length);
        let aligned = offset.is_multiple_of(PAGE) && length.is_multiple_of(PAGE);
        let invalid = match mode {
            AllocateMode::CollapseRange => !aligned || end >= size,
            AllocateMode::InsertRange => !aligned || offset >= size || size > 2 * LIMIT,
            _ => false,
        };
        if mode == AllocateMode::InsertRange && aligned && size > 2 * LIMIT {
            return;
        }
        let result = self.files[file].allocate(mode, offset, length);
        if invalid {
            assert!(matches!(result, Err(Error::Invalid(_))), "{result:?}");
            return;
        }
        assert_eq!(result, Ok(()));
        match mode {
            AllocateMode::Extend => {
                if end > size {
                    model.truncate(end);
                }
            }
            AllocateMode::KeepSize => {}
            AllocateMode::PunchHole | AllocateMode::ZeroRangeKeepSize => model.punch(offset, end),
            AllocateMode::ZeroRange => {
                model.punch(offset, end);
                if end > size {
                    model.truncate(end);
                }
            }
            AllocateMode::CollapseRange => model.collapse(offset, end),
            AllocateMode::InsertRange => model.insert(offset, length),
        }
    }

    fn copy(&mut self, from: usize, offset: u64, to: usize, target: u64, length: u64) {
        let source = self.models[from].clone();
        let count = length.min(source.size().saturating_sub(offset));
        let result = self.files[from].copy_range(offset, &self.files[to], target, length);
        if from == to && offset < target + count && target < offset + count {
            assert!(matches!(result, Err(Error::Invalid(_))));
            return;
        }
        assert_eq!(result, Ok(count));
        if count > 0 {
            let data = &source.bytes[offset as usize..(offset + count) as usize];
            self.models[to].write(target, data);
        }
    }

    fn read(&self, file: usize, offset: u64, length: u64) {
        let bytes = &self.models[file].bytes;
        let start = (offset as usize).min(bytes.len());
        let end = ((offset + length) as usize).min(bytes.len());
        let mut buffer = vec![0x5a; length as usize];
        assert_eq!(self.files[file].read_at(offset, &mut buffer), Ok(end - start));
        assert!(buffer[..end - start] == bytes[start..end], "file {file} at {offset}+{length}");
    }

    fn seek(&self, file: usize, offset: u64) {
        let model = &self.models[file];
        let (size, first) = (model.size(), offset / PAGE);
        let last = size.div_ceil(PAGE);
        let data = model.data.range(first..).next().filter(|&&page| page < last);
        let expected = match data {
            Some(page) if offset < size => Ok(offset.max(page * PAGE)),
            _ => Err(Error::NoSuchExtent),
        };
        assert_eq!(self.files[file].seek_data(offset), expected, "data in {file} from {offset}");
        let hole = (first..last).find(|page| !model.data.contains(page)).unwrap_or(last);
        let expected = if offset < size {
            Ok(offset.max(hole * PAGE).min(size))
        } else {
            Err(Error::NoSuchExtent)
        };
        assert_eq!(self.files[file].seek_hole(offset), expected, "hole in {file} from {offset}");
    }

    fn reopen(&mut self, close: bool) {
        if close {
            self.volume.close().expect("close");
        } else {
            self.volume.sync().expect("sync");
        }
        self.files.clear();
        self.volume = open(&formatted(MIB, 64), manual(MIB));
        self.volume = open(&self.device, manual(self.memory_bytes));
        self.files = (0..FILES)
            .map(|number| {
                self.volume.open_file(format!("/{number}"), OpenFlags::READ_WRITE).expect("open")
            })
            .collect();
        self.compare();
    }

    fn compare(&self) {
        for (file, model) in self.files.iter().zip(&self.models) {
            assert_eq!(file.size(), model.size());
            assert!(contents(file) == model.bytes, "contents of {}", file.ino());
        }
    }
}

fn run(memory_bytes: u64, log_blocks: u64, steps: &[Step]) {
    let mut world = World::new(memory_bytes, log_blocks);
    let empty = world.volume.statfs().free_blocks;
    for step in steps {
        world.apply(step);
    }
    world.compare();
    world.reopen(false);
    world.reopen(true);
    for number in 0..FILES {
        world.seek(number, 0);
        world.files[number].truncate(0).expect("truncate");
    }
    world.volume.checkpoint().expect("checkpoint");
    world.volume.checkpoint().expect("checkpoint");
    let left = world.volume.statfs().free_blocks;
    assert!(left + 8 >= empty, "blocks leaked: {empty} were free, {left} are");
    let space = world.volume.stats().space;
    assert_eq!((space.reserved_blocks, space.pending_free_blocks), (0, 0));
}

fn config() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|text| text.parse().ok());
    ProptestConfig {
        cases: cases.unwrap_or(150),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn files_hold_what_was_written_with_little_memory(steps in prop::collection::vec(steps(), 1..120)) {
        run(256 * KIB, 64, &steps);
    }

    #[test]
    fn files_hold_what_was_written_with_a_larger_log(steps in prop::collection::vec(steps(), 1..120)) {
        run(MIB, 512, &steps);
    }
}
