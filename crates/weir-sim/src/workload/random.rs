//! Long random workloads: several writers that take turns, background work at random moments, little
//! memory, a small log, and sometimes too little space.

use weir::{AllocateMode, AtimePolicy, BackgroundWork, FileType, RenameMode, Timestamp, XattrMode};

use crate::model::Model;
use crate::op::{Amid, At, Commit, HandOver, Hold, Op, Sync, Target};
use crate::rng::Rng;
use crate::system::Settings;
use crate::workload::exhaustive::{INNER_TAG, PART_TAG, set_tag};

mod between;

/// What kind of random workload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// How the volume is made.
    pub settings: Settings,
    /// Number of operations.
    pub length: usize,
    /// Writers, each with a directory and a handle of its own.
    pub writers: u8,
    /// Of ten data operations, this many grow files.
    pub growth: u64,
    /// Of how many operations one is a sync.
    pub sync_one_in: u64,
    /// Of how many operations one is background work.
    pub background_one_in: u64,
    /// Of how many operations one overlaps with others.
    pub overlap_one_in: u64,
    /// Background work comes in single phases of checkpoints, with writeback in between.
    pub single_phases: bool,
    /// Some operations come between that are about ways to open, to hold and to hand over, and about space.
    pub varied: bool,
}

impl Shape {
    /// A shape drawn from `rng`.
    pub fn draw(rng: &mut Rng) -> Self {
        let volume_blocks = 256 + rng.below(3) * 128;
        let memory_bytes = match rng.below(12) {
            0 => 4 << 20,
            1..=3 => 2 << 20,
            4..=7 => 1 << 20,
            _ => 512 << 10,
        };
        let batch_part_blocks = [None, Some(1), Some(2), Some(4)][rng.index(4)];
        let beside_from_pages = [None, Some(1)][rng.index(2)];
        let purge_at_once_blocks = [None, Some(0)][rng.index(2)];
        let round_pages = [None, Some(1), Some(3)][rng.index(3)];
        let length = 30 + rng.index(120);
        Self {
            settings: Settings {
                volume_blocks,
                log_blocks: 64,
                memory_bytes,
                batch_part_blocks,
                beside_from_pages,
                dense_merges: length.is_multiple_of(4),
                purge_at_once_blocks,
                round_pages,
                // A chain of frames of one block each has few operations: no hole is one.
                cut_extents: [None, Some(1), Some(2)][length % 3]
                    .filter(|_| batch_part_blocks != Some(1)),
                fua: length.is_multiple_of(5),
                atime: match length % 16 {
                    6 => AtimePolicy::Relative,
                    10 => AtimePolicy::Strict,
                    _ => AtimePolicy::Never,
                },
            },
            varied: length % 4 == 2,
            length,
            writers: 1 + rng.below(4) as u8,
            growth: rng.below(10),
            sync_one_in: 3 + rng.below(12),
            background_one_in: 2 + rng.below(20) / (1 + rng.below(4)),
            overlap_one_in: 4 + rng.below(12),
            single_phases: rng.one_in(2),
        }
    }
}

/// How many pages a volume that is opened with this much memory promises to write as a whole.
fn untorn_pages(settings: &Settings) -> u64 {
    match settings.memory_bytes >> 10 {
        2048.. => 32,
        1024.. => 16,
        _ => 8,
    }
}

/// Names a writer uses.
const NAMES: [&str; 6] = ["a", "b", "c", "d", "e", "long-name-that-takes-some-room-in-its-entry"];

struct Generator<'a> {
    rng: &'a mut Rng,
    /// Draws what comes between: the rest is as it would be without.
    between: Rng,
    model: Model,
    shape: &'a Shape,
    ops: Vec<Op>,
}

/// A workload of this shape that starts on `model`.
pub fn operations(shape: &Shape, model: &Model, rng: &mut Rng) -> Vec<Op> {
    let between = Rng::new(shape.length as u64 ^ shape.sync_one_in << 20 ^ shape.growth << 30);
    let mut generator = Generator { rng, between, model: model.clone(), shape, ops: Vec::new() };
    for writer in 0..shape.writers {
        generator.push(Op::Mkdir { path: format!("/w{writer}") });
    }
    while generator.ops.len() < shape.length {
        if shape.varied && generator.between.one_in(5) {
            generator.come_between();
        }
        generator.step();
    }
    generator.ops
}

impl Generator<'_> {
    /// Appends an operation; it may turn out to fail.
    fn push(&mut self, op: Op) {
        // The engine may run out of space where the model does not; then later operations fail in
        // both, or are executed on what is there.
        let _ = self.model.apply(&op, None);
        self.ops.push(op);
    }

    fn step(&mut self) {
        if self.shape.single_phases && self.rng.one_in(self.shape.background_one_in) {
            let work = BackgroundWork::Checkpoint;
            let op = match self.rng.below(12) {
                0..=2 => Op::Writeback,
                3..=4 => Op::Background { work: BackgroundWork::EarlyHome, steps: 1 },
                5 => Op::Background { work: BackgroundWork::PartialCheckpoint, steps: 1 },
                _ => Op::Background { work, steps: 1 },
            };
            return self.push(op);
        }
        if self.rng.one_in(self.shape.background_one_in) {
            let op = match self.rng.below(6) {
                0 => Op::Checkpoint,
                1 => Op::Writeback,
                2 => Op::Advance { ns: 1_000_000 * self.rng.below(60_000) },
                _ => self.background_steps(),
            };
            return self.push(op);
        }
        let writer = self.rng.below(u64::from(self.shape.writers)) as u8;
        if self.rng.one_in(self.shape.overlap_one_in)
            && let Some(op) = self.overlap(writer)
        {
            return self.push(op);
        }
        if self.rng.one_in(self.shape.sync_one_in) {
            let op = self.sync(writer);
            return self.push(op);
        }
        if self.rng.one_in(16) {
            let target = self.file(writer);
            let pages = self.size(&target) / 4096 + 1;
            let unit = untorn_pages(&self.shape.settings);
            let first = self.rng.below(pages) / unit * unit;
            // All of a unit, or a part of it.
            let skip = if self.rng.one_in(4) { 0 } else { self.rng.below(unit) };
            let most = unit - skip;
            let length = 4096 * if self.rng.one_in(4) { most } else { 1 + self.rng.below(most) };
            let (offset, tag) = (4096 * (first + skip), 1 + self.ops.len() as u32);
            self.push(Op::Untorn { target: target.clone(), offset, length, tag });
            return self.push(Op::Sync(Sync::Data(target)));
        }
        if self.rng.one_in(24) {
            return self.logged_again(writer);
        }
        if self.rng.one_in(10) {
            let op = self.batch(writer);
            return self.push(op);
        }
        let op = if self.rng.below(10) < 6 { self.data(writer) } else { self.name(writer) };
        self.push(op);
    }

    /// A small write that is synced, and another one to the same page, synced as well, while the first goes home.
    fn logged_again(&mut self, writer: u8) {
        let target = self.file(writer);
        let page = self.rng.below(self.size(&target) / 4096 + 1);
        let mut write = |tag| {
            let offset = page * 4096 + self.rng.below(4000);
            Op::Write { target: target.clone(), offset, length: 1 + self.rng.below(200), tag }
        };
        let (older, newer) = (write(1 + self.ops.len() as u32), write(0));
        let sync = Sync::Data(target);
        self.push(older);
        self.push(Op::Sync(sync.clone()));
        let outer = match self.rng.below(4) {
            0 => Op::Background { work: BackgroundWork::EarlyHome, steps: 1 },
            1 => Op::Writeback,
            _ => Op::Checkpoint,
        };
        let submit = Op::Submit { sync, range: 0..u64::MAX, ticket: 0, hold: Hold::Await };
        let frames = Op::Background { work: BackgroundWork::Frames, steps: 3 };
        let mut inner = vec![newer, submit, frames];
        for (number, op) in (1..).zip(&mut inner) {
            set_tag(op, 1 + self.ops.len() as u32 + number * INNER_TAG);
        }
        let amid = Amid::call(self.rng.below(4) as u32);
        self.push(Op::Overlap { outer: Box::new(outer), amid, inner });
    }

    /// An append as a write at the end.
    fn placed(&self, op: Op) -> Op {
        match op {
            Op::Append { target, length, tag } => {
                let offset = self.size(&target);
                Op::Write { target, offset, length, tag }
            }
            other => other,
        }
    }

    /// Amid one of the first `calls` of an operation, or before one of its first locks.
    fn somewhere(&mut self, calls: u64) -> At {
        if self.rng.below(3) > 0 {
            return At::Call(self.rng.below(calls) as u32);
        }
        let magnitude = 3 + self.rng.below(6);
        At::Lock(self.rng.below(1 << magnitude) as u32)
    }

    fn background_steps(&mut self) -> Op {
        let work = match self.rng.below(10) {
            0..=1 => BackgroundWork::Log,
            2 => BackgroundWork::Writeback,
            3 => BackgroundWork::Purge,
            4 => BackgroundWork::PartialCheckpoint,
            5 => BackgroundWork::EarlyHome,
            _ => BackgroundWork::Checkpoint,
        };
        Op::Background { work, steps: 1 + self.rng.below(3) as u32 }
    }

    /// Two writers sync what each has just written, at the same time.
    fn two_syncs(&mut self, writer: u8) -> Option<Op> {
        let number = self.ops.len() as u32;
        let change = self.data(writer);
        let target = change.subject();
        self.push(change);
        let sync = |target| Op::Sync(Sync::Data(target));
        let other = self.rng.below(u64::from(self.shape.writers)) as u8;
        let change = self.data(other);
        let mut inner = vec![self.placed(change)];
        inner.extend(inner[0].subject().map(sync));
        if !inner.iter().all(Op::may_be_inner) {
            return None;
        }
        for (op, nth) in inner.iter_mut().zip(2..) {
            set_tag(op, 1 + number + nth * INNER_TAG);
        }
        let back = self.rng.one_in(2).then(|| self.somewhere(2));
        let amid = Amid { first: self.somewhere(2), back };
        Some(Op::Overlap { outer: Box::new(sync(target?)), amid, inner })
    }

    /// A change, in the midst of which others read, sync, and work in the background.
    fn syncs_amid(&mut self, writer: u8) -> Option<Op> {
        let number = self.ops.len() as u32;
        let change = match self.rng.below(8) {
            0 => self.batch(writer),
            1..=5 => self.data(writer),
            _ => self.name(writer),
        };
        let outer = self.placed(change);
        let mut inner = Vec::new();
        for _ in 0..=self.rng.index(2) {
            let mut op = match self.rng.below(8) {
                0 => Op::Checkpoint,
                1 => Op::Writeback,
                2..=3 => self.background_steps(),
                4..=5 => {
                    let target = outer.subject().unwrap_or_else(|| self.file(writer));
                    let offset = self.rng.below(self.size(&target) + 1);
                    Op::Read { target, offset, length: 1 + self.rng.below(40_000) }
                }
                _ => {
                    let other = self.rng.below(u64::from(self.shape.writers)) as u8;
                    self.sync(other)
                }
            };
            set_tag(&mut op, 1 + number + (1 + inner.len() as u32) * INNER_TAG);
            inner.push(op);
        }
        if !outer.may_be_outer()
            || outer.is_neutral()
            || !inner.iter().all(|op| op.is_neutral() && op.may_be_inner())
        {
            return None;
        }
        let back = self.rng.one_in(2).then(|| self.somewhere(2));
        let amid = Amid { first: self.somewhere(2), back };
        Some(Op::Overlap { outer: Box::new(outer), amid, inner })
    }

    /// A sync, or a step of background work, in the midst of which others go on: they write and name files, sync, ask
    /// for syncs, work in the background, and the log writes what has come together as far as it can.
    fn overlap(&mut self, writer: u8) -> Option<Op> {
        match self.rng.below(8) {
            0..=1 => return self.two_syncs(writer),
            2..=3 => return self.syncs_amid(writer),
            _ => {}
        }
        let outer = match self.rng.below(8) {
            0..=3 => self.sync(writer),
            4 => Op::Background { work: BackgroundWork::Log, steps: 3 },
            5 => Op::Writeback,
            6 => Op::Background { work: BackgroundWork::Checkpoint, steps: 1 },
            _ => Op::Checkpoint,
        };
        if !outer.may_be_outer() || !outer.is_neutral() || matches!(outer, Op::Submit { .. }) {
            return None;
        }
        // Most syncs consist of a write and a flush.
        let more = if self.rng.one_in(4) { 4 } else { 0 };
        let back = self.rng.one_in(2).then(|| self.somewhere(4));
        let amid = Amid { first: self.somewhere(3 + more), back };
        let number = self.ops.len() as u32;
        let before = self.model.clone();
        let mut inner = Vec::new();
        for _ in 0..=self.rng.index(3) {
            let other = self.rng.below(u64::from(self.shape.writers)) as u8;
            let change = match self.rng.below(20) {
                0 => self.batch(other),
                1 => self.own_batch(other),
                2 => Op::Barrier { target: None },
                3 => Op::Barrier { target: Some(self.file(other)) },
                4..=13 => self.data(other),
                _ => self.name(other),
            };
            let mut ops = vec![self.placed(change)];
            if self.rng.below(4) > 0 {
                let sync = match ops[0].subject() {
                    Some(target) if self.rng.below(4) > 0 => Sync::Data(target),
                    _ => Sync::All,
                };
                let hold = if self.rng.one_in(4) { Hold::Deliver } else { Hold::Await };
                ops.push(if self.rng.one_in(2) {
                    Op::Sync(sync)
                } else {
                    Op::Submit { sync, range: 0..u64::MAX, ticket: 0, hold }
                });
            }
            if self.rng.below(4) > 0 {
                ops.push(Op::Background { work: BackgroundWork::Frames, steps: 3 });
            } else if self.rng.one_in(2) {
                ops.push(match self.rng.below(6) {
                    0 => Op::Checkpoint,
                    1 => Op::Writeback,
                    _ => self.background_steps(),
                });
            }
            for mut op in ops.into_iter().filter(Op::may_be_inner) {
                set_tag(&mut op, 1 + number + (1 + inner.len() as u32) * INNER_TAG);
                let _ = self.model.apply(&op, None);
                inner.push(op);
            }
        }
        self.model = before;
        Some(Op::Overlap { outer: Box::new(outer), amid, inner })
    }

    /// A batch that waits for its own flush and for nothing else: of new files.
    fn own_batch(&mut self, writer: u8) -> Op {
        let (number, draw) = (self.ops.len(), self.rng.below(100));
        let mut parts = Vec::new();
        for file in 0..=self.rng.below(2) {
            let path = format!("/w{writer}/n{number}-{draw}-{file}");
            parts.push(Op::Create { path: path.clone(), permissions: 0o640 });
            let (offset, length) = (self.rng.below(2) * self.rng.below(9000), self.length());
            let tag = 1 + number as u32 + (1 + parts.len() as u32) * PART_TAG;
            parts.push(Op::Write { target: Target::Path(path), offset, length, tag });
        }
        Op::Batch { parts, commit: Commit::Sync }
    }

    /// A batch of one to eight parts, each of which is made for what the ones before it leave.
    fn batch(&mut self, writer: u8) -> Op {
        let number = self.ops.len() as u32;
        let before = self.model.clone();
        let count = 1 + self.rng.index(8);
        let mut parts = Vec::new();
        while parts.len() < count {
            let drawn = if self.rng.below(10) < 7 { self.data(writer) } else { self.name(writer) };
            let mut part = self.placed(drawn);
            set_tag(&mut part, 1 + number + (1 + parts.len() as u32) * PART_TAG);
            // Few that fail: they make all of the batch fail.
            let fits = part.may_be_part();
            if fits && (self.model.apply(&part, None).is_ok() || self.rng.one_in(20)) {
                parts.push(part);
            }
        }
        self.model = before;
        let commit = match self.rng.below(10) {
            0..=3 => Commit::Sync,
            4..=5 => Commit::Relaxed,
            6..=8 => Commit::Async { ticket: number, hold: Hold::Await },
            _ => {
                let hold = if self.rng.one_in(2) { Hold::Deliver } else { Hold::Drop };
                Commit::Async { ticket: number, hold }
            }
        };
        Op::Batch { parts, commit }
    }

    fn path(&mut self, writer: u8) -> String {
        // Now and then in somebody else's directory.
        let writer = if self.rng.one_in(8) {
            self.rng.below(u64::from(self.shape.writers)) as u8
        } else {
            writer
        };
        let name = NAMES[self.rng.index(NAMES.len())];
        if self.rng.one_in(5) {
            let inner = NAMES[self.rng.index(NAMES.len())];
            format!("/w{writer}/{inner}/{name}")
        } else {
            format!("/w{writer}/{name}")
        }
    }

    /// A path that is likely to exist.
    fn existing(&mut self, writer: u8) -> String {
        let prefix = format!("/w{writer}/");
        let paths = self.model.paths();
        let own: Vec<&String> =
            paths.iter().map(|(path, _)| path).filter(|path| path.starts_with(&prefix)).collect();
        let chosen = self.rng.pick(&own).map(|path| (*path).clone());
        chosen.unwrap_or_else(|| self.path(writer))
    }

    /// A regular file that is likely to exist: by name, or the writer's handle.
    fn file(&mut self, writer: u8) -> Target {
        if self.model.slots().contains_key(&writer) && self.rng.one_in(2) {
            return Target::Slot(writer);
        }
        let prefix = format!("/w{writer}/");
        let model = &self.model;
        let is_file = |ino: u32| model.inode(ino).is_some_and(|inode| inode.data().is_some());
        let paths: Vec<String> = model
            .paths()
            .into_iter()
            .filter(|(path, ino)| path.starts_with(&prefix) && is_file(*ino))
            .map(|(path, _)| path)
            .collect();
        Target::Path(match self.rng.pick(&paths) {
            Some(path) => path.clone(),
            None => self.path(writer),
        })
    }

    fn size(&self, target: &Target) -> u64 {
        let ino = self.model.target(target).ok();
        let inode = ino.and_then(|ino| self.model.inode(ino));
        inode.and_then(|inode| inode.data()).map_or(0, |data| data.size)
    }

    fn length(&mut self) -> u64 {
        match self.rng.below(10) {
            0..=2 => 1 + self.rng.below(200),
            3..=5 => 1 + self.rng.below(5000),
            6..=7 => 4096 * (1 + self.rng.below(8)),
            8 => 1 + self.rng.below(40_000),
            _ => 100_000 + self.rng.below(100_000),
        }
    }

    fn offset(&mut self, size: u64) -> u64 {
        match self.rng.below(6) {
            0 => 0,
            1..=2 => self.rng.below(size + 1) / 4096 * 4096,
            3..=4 => self.rng.below(size + 1),
            _ => size + self.rng.below(30_000),
        }
    }

    fn data(&mut self, writer: u8) -> Op {
        let target = self.file(writer);
        let size = self.size(&target);
        let tag = 1 + self.ops.len() as u32;
        if self.rng.below(10) < self.shape.growth {
            return Op::Append { target, length: self.length(), tag };
        }
        let (offset, length) = (self.offset(size), self.length());
        match self.rng.below(16) {
            0..=6 => Op::Write { target, offset, length, tag },
            7..=8 => Op::Truncate { target, size: self.rng.below(size + 1) },
            9 => Op::Truncate { target, size: size + self.rng.below(10_000) },
            10..=11 => self.allocate(target, size, offset, length),
            12 => {
                let from = self.file(writer);
                let from_offset = self.rng.below(self.size(&from) + 1);
                Op::CopyRange { from, from_offset, to: target, to_offset: offset, length }
            }
            _ => Op::Read { target, offset: self.rng.below(size + 1), length },
        }
    }

    fn allocate(&mut self, target: Target, size: u64, offset: u64, length: u64) -> Op {
        let pages = size / 4096;
        let start = 4096 * self.rng.below(pages + 1);
        let blocks = 4096 * (1 + self.rng.below(4));
        match self.rng.below(7) {
            0 => Op::Allocate { target, mode: AllocateMode::Extend, offset, length },
            1 => Op::Allocate { target, mode: AllocateMode::KeepSize, offset, length },
            2 => Op::Allocate { target, mode: AllocateMode::PunchHole, offset, length },
            3 => Op::Allocate { target, mode: AllocateMode::ZeroRange, offset, length },
            4 => Op::Allocate { target, mode: AllocateMode::ZeroRangeKeepSize, offset, length },
            5 => Op::Allocate {
                target,
                mode: AllocateMode::CollapseRange,
                offset: start,
                length: blocks,
            },
            _ => Op::Allocate {
                target,
                mode: AllocateMode::InsertRange,
                offset: start,
                length: blocks,
            },
        }
    }

    fn name(&mut self, writer: u8) -> Op {
        let path = self.path(writer);
        let tag = 1 + self.ops.len() as u32;
        match self.rng.below(24) {
            0..=5 => Op::Create { path, permissions: 0o600 + self.rng.below(0o100) as u32 },
            6..=7 => Op::Mkdir { path },
            8 => Op::Symlink { path, target: "t".repeat(1 + self.rng.index(300)) },
            9 => Op::Mknod { path, file_type: FileType::Fifo, rdev: 0 },
            10 => Op::Link { from: self.existing(writer), to: path },
            11..=12 => Op::Unlink { path: self.existing(writer) },
            13 => Op::Rmdir { path: self.existing(writer) },
            14..=15 => {
                let mode = match self.rng.below(6) {
                    0 => RenameMode::NoReplace,
                    1 => RenameMode::Exchange,
                    2 => RenameMode::Whiteout { uid: 0, gid: 7 },
                    _ => RenameMode::Replace,
                };
                let to = if self.rng.one_in(2) { self.existing(writer) } else { path };
                Op::Rename { from: self.existing(writer), to, mode }
            }
            16 => {
                let name = format!("user.{}", NAMES[self.rng.index(NAMES.len())]);
                let limit = if self.rng.one_in(4) { 4000 } else { 100 };
                let length = self.rng.below(limit);
                Op::SetXattr {
                    path: self.existing(writer),
                    name,
                    length,
                    tag,
                    mode: XattrMode::Set,
                }
            }
            17 => {
                let name = format!("user.{}", NAMES[self.rng.index(NAMES.len())]);
                Op::RemoveXattr { path: self.existing(writer), name }
            }
            18 => {
                let permissions = self.rng.below(0o1000) as u32;
                Op::Chmod { path: self.existing(writer), permissions }
            }
            19 => {
                let time = |rng: &mut Rng| Timestamp {
                    seconds: rng.below(1 << 34) as i64 - (1 << 32),
                    nanoseconds: rng.below(1_000_000_000) as u32,
                };
                let (atime, mtime) = (time(self.rng), time(self.rng));
                Op::Utimens { path: self.existing(writer), atime, mtime }
            }
            20 => Op::TmpFile { dir: format!("/w{writer}"), slot: writer },
            21 if self.model.slots().contains_key(&writer) => {
                if self.rng.one_in(2) {
                    Op::LinkSlot { slot: writer, path }
                } else {
                    Op::Close { slot: writer }
                }
            }
            _ => match self.file(writer) {
                Target::Path(path) => Op::Open { path, slot: writer },
                Target::Slot(slot) => Op::Close { slot },
            },
        }
    }

    fn sync(&mut self, writer: u8) -> Op {
        let sync = match self.rng.below(8) {
            0..=3 => Sync::Full(self.file(writer)),
            4..=5 => Sync::Data(self.file(writer)),
            6 => Sync::Full(Target::Path(format!("/w{writer}"))),
            _ => Sync::All,
        };
        match self.rng.below(20) {
            0..=8 => Op::Sync(sync),
            18..=19 if sync.target().is_some() => {
                let target = sync.target().cloned().unwrap_or_else(|| self.file(writer));
                let start = self.rng.below(self.size(&target) + 1);
                let range = start..start + 1 + self.rng.below(100_000);
                let how = match self.rng.below(3) {
                    0 => HandOver::Start,
                    1 => HandOver::Wait,
                    _ => HandOver::Expire,
                };
                Op::HandOver { target, range, how }
            }
            9 => Op::WaitDurable,
            10 => Op::Barrier { target: sync.target().filter(|_| self.rng.one_in(2)).cloned() },
            kind => {
                let size = sync.target().map_or(0, |target| self.size(target));
                let range = if self.rng.one_in(3) {
                    0..u64::MAX
                } else {
                    let start = self.rng.below(size + 1);
                    start..start + 1 + self.rng.below(size + 5000)
                };
                let hold = match kind {
                    11..=15 => Hold::Await,
                    16 => Hold::Deliver,
                    _ => Hold::Drop,
                };
                Op::Submit { sync, range, ticket: self.ops.len() as u32, hold }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_workload_and_most_operations_succeed() {
        let make = |seed| {
            let mut rng = Rng::new(seed);
            let shape = Shape::draw(&mut rng);
            operations(&shape, &Model::new(), &mut rng)
        };
        assert_eq!(make(5), make(5));
        assert_ne!(make(5), make(6));
        let (mut succeeded, mut total) = (0, 0);
        for seed in 0..50 {
            let mut model = Model::new();
            for op in make(seed) {
                total += 1;
                succeeded += usize::from(model.apply(&op, None).is_ok());
            }
        }
        assert!(succeeded * 10 > total * 6, "{succeeded} of {total}");
    }
}
