//! A batch means what its steps mean one after the other: random batches on one volume, the same steps as single calls on its twin. Contents,
//! attributes, names and answers are the same; and where a single call fails, the batch fails with that, says so, and has done nothing.

mod common;

use common::volatile::Volatile;
use common::*;
use std::collections::BTreeMap;
use std::sync::Arc;
use weir::check::{CheckOptions, check_device};
use weir::device::Device;
use weir::*;

const NAMES: [&[u8]; 6] = [b"a", b"b", b"c", b"d", b"\xff\xfe", b"a name longer than the others"];

/// An inode: of those that are there, or the one that the batch's step of this number makes.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Node {
    Old(u64),
    New(usize),
}

#[derive(Debug, Clone)]
enum Step {
    Write(Node, u64, usize),
    Truncate(Node, u64),
    Set(Node, SetAttr),
    Make(Node, &'static [u8], NewInode),
    Symlink(Node, &'static [u8], usize),
    Link(Node, Node, &'static [u8]),
    Unlink(Node, &'static [u8]),
    Rmdir(Node, &'static [u8]),
    Rename((Node, &'static [u8]), (Node, &'static [u8]), RenameMode),
}

/// An inode as programs see it.
#[derive(Debug, Clone, PartialEq)]
struct Seen {
    attr: Attr,
    content: Vec<u8>,
    names: BTreeMap<Vec<u8>, (u64, FileType)>,
    parent: Option<u64>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl Seen {
    fn of(volume: &Volume, ino: u64) -> Result<Self> {
        // A batch's changes count otherwise than those of calls: that the counter moves is looked at elsewhere.
        let attr = Attr { change_counter: 0, ..volume.getattr(ino)? };
        let (mut content, mut names, mut parent) = (Vec::new(), BTreeMap::new(), None);
        match attr.file_type {
            FileType::Regular => content = contents(&volume.open_inode(ino, false)?),
            FileType::Symlink => content = volume.readlink(ino)?,
            FileType::Directory => {
                volume.readdir(ino, 0, &mut |entry| {
                    names.insert(entry.name, (entry.ino, entry.file_type));
                    true
                })?;
                parent = volume.parent(ino).ok();
                for (name, (child, _)) in &names {
                    assert_eq!(volume.lookup(ino, name)?.ino, *child, "the list and the name");
                }
                for name in NAMES {
                    assert_eq!(volume.lookup(ino, name).is_ok(), names.contains_key(name));
                }
            }
            _ => {}
        }
        let mut xattrs = BTreeMap::new();
        for name in volume.listxattr(ino)? {
            let value = volume.getxattr(ino, &name)?;
            xattrs.insert(name, value);
        }
        Ok(Self { attr, content, names, parent, xattrs })
    }

    /// All that has a name, and `held`.
    fn all(volume: &Volume, held: &[u64]) -> BTreeMap<u64, Self> {
        let mut all = BTreeMap::new();
        let mut pending = vec![Volume::ROOT];
        pending.extend(held);
        while let Some(ino) = pending.pop() {
            if all.contains_key(&ino) {
                continue;
            }
            let seen = Self::of(volume, ino).expect("what has a name or is held is there");
            pending.extend(seen.names.values().map(|(child, _)| *child));
            all.insert(ino, seen);
        }
        all
    }
}

/// Without what depends on how far the pages have come.
fn but_blocks(mut all: BTreeMap<u64, Seen>) -> BTreeMap<u64, Seen> {
    for seen in all.values_mut() {
        seen.attr.blocks = 0;
    }
    all
}

fn is_same(what: &str, one: &BTreeMap<u64, Seen>, other: &BTreeMap<u64, Seen>) {
    assert_eq!(one.keys().collect::<Vec<_>>(), other.keys().collect::<Vec<_>>(), "{what}: inodes");
    for (ino, seen) in one {
        let twin = &other[ino];
        assert_eq!(seen.attr, twin.attr, "{what}: {ino}");
        assert!(seen.content == twin.content, "{what}: content of {ino}");
        assert_eq!(seen, twin, "{what}: {ino}");
    }
}

fn step(random: &mut Random, known: &[u64], made: usize) -> Step {
    let node = |random: &mut Random| match random.below(5) {
        0 | 1 if made > 0 => Node::New(random.below(made as u64) as usize),
        _ => Node::Old(known[random.below(known.len() as u64) as usize]),
    };
    // Mostly one of the first, which are directories.
    let dir = |random: &mut Random| match random.below(8) {
        0 => node(random),
        1 | 2 if made > 0 => Node::New(random.below(made as u64) as usize),
        _ => Node::Old(known[random.below(known.len().min(4) as u64) as usize]),
    };
    let name = |random: &mut Random| NAMES[random.below(NAMES.len() as u64) as usize];
    let place = |random: &mut Random| match random.below(4) {
        0 => random.below(24) * 4096,
        1 => random.below(300),
        2 => random.below(90_000),
        _ => (random.below(20) + 1) * 4096 - random.below(3),
    };
    match random.below(24) {
        0..=6 => {
            let length = match random.below(12) {
                0 => 0,
                1 => 4096,
                2 => 100_000 + random.below(200_000),
                3 => 1_500_000 + random.below(1_500_000),
                4 | 5 => random.below(40_000),
                _ => 1 + random.below(600),
            };
            Step::Write(node(random), place(random), length as usize)
        }
        7 | 8 => Step::Truncate(node(random), if random.below(3) == 0 { 0 } else { place(random) }),
        9..=11 => Step::Set(node(random), attributes(random, place)),
        12..=15 => {
            let types = [
                FileType::Regular,
                FileType::Regular,
                FileType::Directory,
                FileType::Directory,
                FileType::Fifo,
                FileType::CharDevice,
            ];
            let file_type = types[random.below(types.len() as u64) as usize];
            let (uid, gid, rdev) = (random.below(3) as u32, random.below(3) as u32, 0x103);
            let permissions = random.below(0o10000) as u32;
            Step::Make(
                dir(random),
                name(random),
                NewInode { file_type, permissions, uid, gid, rdev },
            )
        }
        16 => Step::Symlink(dir(random), name(random), 1 + random.below(200) as usize),
        17 => Step::Link(node(random), dir(random), name(random)),
        18 | 19 => Step::Unlink(dir(random), name(random)),
        20 => Step::Rmdir(dir(random), name(random)),
        _ => {
            let modes = [
                RenameMode::Replace,
                RenameMode::Replace,
                RenameMode::NoReplace,
                RenameMode::Exchange,
            ];
            let (from, to) = ((dir(random), name(random)), (dir(random), name(random)));
            Step::Rename(from, to, modes[random.below(4) as usize])
        }
    }
}

fn attributes(random: &mut Random, place: impl Fn(&mut Random) -> u64) -> SetAttr {
    let time = |random: &mut Random| match random.below(4) {
        0 => Some(SetTime::Now),
        1 => Some(SetTime::At(Timestamp::from_ns(random.below(1 << 60) as i64 - (1 << 59)))),
        _ => None,
    };
    let mut some = |of: u64, end: u64| {
        let value = random.below(end);
        (random.below(of) == 0).then_some(value as u32)
    };
    SetAttr {
        permissions: some(3, 0o10000),
        uid: some(3, 4),
        gid: some(3, 4),
        kill_suid_sgid: some(3, 2) == Some(1),
        atime: time(random),
        mtime: time(random),
        size_bytes: if random.below(5) == 0 { Some(place(random)) } else { None },
    }
}

/// One of the two volumes.
struct Twin {
    device: Arc<Volatile>,
    volume: Volume,
    clock: Arc<HandClock>,
}

impl Twin {
    fn new(seed: u64) -> Self {
        let device = Volatile::new(32 * MIB);
        let clock = HandClock::at(1_000_000);
        let dynamic: Arc<dyn Device> = device.clone();
        format(&dynamic, [0, 256][seed as usize % 2]);
        let options = VolumeOptions {
            clock: clock.clone(),
            atime: AtimePolicy::Never,
            batch_part_blocks: seed.is_multiple_of(3).then_some(seed % 5 + 1),
            ..manual([8, 3][seed as usize / 2 % 2] * MIB)
        };
        let volume = open(&dynamic, options);
        Self { device, volume, clock }
    }

    /// Makes one step as a call of its own. Answers the inode that it makes.
    fn call(&self, step: &Step, made: &[u64], number: u64) -> Result<Option<u64>> {
        let ino = |node: &Node| match *node {
            Node::Old(ino) => ino,
            Node::New(index) => made[index],
        };
        let volume = &self.volume;
        match step {
            Step::Write(node, offset, length) => {
                let file = volume.open_inode(ino(node), true)?;
                file.write_all_at(*offset, &pattern(number, *length))?;
            }
            Step::Truncate(node, size) => volume.open_inode(ino(node), true)?.truncate(*size)?,
            Step::Set(node, change) => {
                volume.setattr(ino(node), change)?;
            }
            Step::Make(dir, name, new) => return Ok(Some(volume.make(ino(dir), name, new)?.ino)),
            Step::Symlink(dir, name, length) => {
                let target = vec![b't'; *length];
                return Ok(Some(volume.symlink(ino(dir), name, &target, 1, 2)?.ino));
            }
            Step::Link(node, dir, name) => {
                volume.link(ino(node), ino(dir), name)?;
            }
            Step::Unlink(dir, name) => volume.unlink(ino(dir), name)?,
            Step::Rmdir(dir, name) => volume.rmdir(ino(dir), name)?,
            Step::Rename((dir, name), (to, new_name), mode) => {
                volume.rename(ino(dir), name, ino(to), new_name, *mode)?;
            }
        }
        Ok(None)
    }
}

/// Records what [`Twin::call`] does.
fn record(batch: &mut Batch, step: &Step, made: &mut Vec<u64>, number: u64) -> Result<()> {
    let ino = |node: &Node| match *node {
        Node::Old(ino) => ino,
        Node::New(index) => made[index],
    };
    match step {
        Step::Write(node, offset, length) => {
            batch.write_inode(ino(node), *offset, &pattern(number, *length))?;
        }
        Step::Truncate(node, size) => batch.truncate_inode(ino(node), *size)?,
        Step::Set(node, change) => batch.setattr(ino(node), change)?,
        Step::Make(dir, name, new) => {
            let ino = batch.make(ino(dir), name, new)?;
            made.push(ino);
        }
        Step::Symlink(dir, name, length) => {
            let ino = batch.symlink(ino(dir), name, &vec![b't'; *length], 1, 2)?;
            made.push(ino);
        }
        Step::Link(node, dir, name) => batch.link(ino(node), ino(dir), name)?,
        Step::Unlink(dir, name) => batch.unlink(ino(dir), name)?,
        Step::Rmdir(dir, name) => batch.rmdir(ino(dir), name)?,
        Step::Rename((dir, name), (to, new_name), mode) => {
            batch.rename(ino(dir), name, ino(to), new_name, *mode)?;
        }
    }
    Ok(())
}

fn background(random: &mut Random, twins: [&Twin; 2]) {
    let works = [BackgroundWork::Writeback, BackgroundWork::Checkpoint, BackgroundWork::Log];
    let work = works[random.below(3) as usize];
    for twin in twins {
        while twin.volume.background_step(work).expect("step") {}
    }
}

/// The same on both: some directories first, files of several sizes, with attributes.
fn furnish(random: &mut Random, twins: [&Twin; 2]) -> Vec<u64> {
    let mut known = vec![Volume::ROOT];
    let wanted = 10 + random.below(40);
    for number in 0..wanted {
        let made = known.len();
        let step = match number {
            0..=2 => {
                let new = NewInode::new(FileType::Directory, [0o755, 0o2755][number as usize % 2]);
                Step::Make(
                    Node::Old(known[made - 1 - (number as usize / 2)]),
                    NAMES[number as usize],
                    new,
                )
            }
            _ => step(random, &known, 0),
        };
        let answers = twins.map(|twin| twin.call(&step, &[], number));
        assert_eq!(answers[0], answers[1]);
        if let Ok(Some(ino)) = answers[0] {
            known.push(ino);
            let value = pattern(number, random.below(300) as usize);
            for twin in twins {
                twin.volume.setxattr(ino, b"user.x", &value, XattrMode::Set).expect("attribute");
            }
        }
        if random.below(8) == 0 {
            background(random, twins);
        }
    }
    known.retain(|ino| twins[0].volume.getattr(*ino).is_ok());
    known
}

fn check(device: &Arc<dyn Device>, what: &str) {
    let report = check_device(device, &CheckOptions::default()).expect("check");
    assert!(report.is_clean(), "{what}: {:?}", report.problems);
}

/// What became of a batch.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Became {
    Done,
    Refused,
}

fn one_batch(seed: u64) -> Became {
    let mut random = Random::seeded(seed + 1);
    let (twin, single) = (Twin::new(seed), Twin::new(seed));
    let known = furnish(&mut random, [&twin, &single]);
    // As the kernel holds what it knows. A batch needs that as little as calls do, for what has a name.
    let held = known.clone();
    let hold = |twin: &Twin| {
        held.iter().map(|ino| twin.volume.hold(*ino).expect("hold")).collect::<Vec<_>>()
    };
    let holds = [&twin, &single].map(hold);
    let was_synced = random.below(2) == 0;
    if was_synced {
        twin.volume.sync().expect("sync");
    }
    let before = Seen::all(&twin.volume, &held);
    let named_before = but_blocks(Seen::all(&twin.volume, &[]));
    is_same("before", &before, &Seen::all(&single.volume, &held));
    twin.clock.advance_s(100);
    single.clock.advance_s(100);

    let mut batch = twin.volume.batch();
    let (mut steps, mut made, mut calls_made) = (Vec::new(), Vec::new(), Vec::new());
    let mut made_holds = Vec::new();
    let mut failed = None;
    for number in 0..=random.below(13) {
        let mut attempt = step(&mut random, &known, made.len());
        // Mostly what can be done: else hardly a batch were.
        let mut answer = single.call(&attempt, &calls_made, 1000 + number);
        for _ in 0..[30, 0][usize::from(random.below(12) == 0)] {
            if answer.is_ok() {
                break;
            }
            attempt = step(&mut random, &known, made.len());
            answer = single.call(&attempt, &calls_made, 1000 + number);
        }
        record(&mut batch, &attempt, &mut made, 1000 + number).expect("recorded");
        steps.push(attempt);
        match answer {
            Ok(ino) => {
                made_holds.extend(ino.map(|ino| single.volume.hold(ino).expect("hold")));
                calls_made.extend(ino);
            }
            Err(error) => {
                failed = Some((number as usize, error));
                break;
            }
        }
    }
    if failed.is_some() && random.below(2) == 0 {
        let more = step(&mut random, &known, made.len());
        record(&mut batch, &more, &mut made, 5000).expect("recorded");
    }
    let how = random.below(3);
    let result = match how {
        0 => batch.commit().map(drop),
        1 => batch.commit_relaxed().map(drop),
        _ => batch.commit_async().map(drop),
    };
    let what = format!("seed {seed}: {steps:?} {made:?}");
    let after_crash = twin.device.after_crash(seed);
    let became = match (result, failed) {
        (Ok(()), None) => {
            assert_eq!(made, calls_made, "{what}");
            Became::Done
        }
        (Err(refused), Some((number, error))) => {
            assert_eq!(refused.error.errno(), error.errno(), "{what}: {refused} {error}");
            assert_eq!(refused.step.map(|step| step.number), Some(number), "{what}");
            Became::Refused
        }
        (result, failed) => panic!("{what}: {result:?} {failed:?}"),
    };
    let after = Seen::all(&twin.volume, &held);
    if became == Became::Done {
        let expected = Seen::all(&single.volume, &held);
        is_same(&what, &but_blocks(after.clone()), &but_blocks(expected));
    } else {
        is_same(&what, &after, &before);
        for ino in &made {
            assert_eq!(twin.volume.getattr(*ino), Err(Error::NotFound), "{what}");
        }
    }
    drop((holds, made_holds));
    let named_after = but_blocks(Seen::all(&twin.volume, &[]));
    if was_synced && how == 0 && became == Became::Done {
        check_crash(&what, &after_crash, &[named_after]);
    } else if was_synced {
        check_crash(&what, &after_crash, &[named_before, named_after]);
    }
    let volumes = [&twin.volume, &single.volume];
    for volume in volumes {
        volume.sync().expect("sync");
        while volume.background_step(BackgroundWork::Writeback).expect("step") {}
        volume.checkpoint().expect("checkpoint");
    }
    if became == Became::Done {
        let [one, other] = volumes.map(|volume| Seen::all(volume, &[]));
        is_same(&format!("home, {what}"), &one, &other);
    }
    for twin in [twin, single] {
        let device: Arc<dyn Device> = twin.device.clone();
        let last = Seen::all(&twin.volume, &[]);
        twin.volume.close().expect("close");
        drop(twin.volume);
        check(&device, &what);
        is_same(
            &what,
            &but_blocks(last),
            &but_blocks(Seen::all(&open(&device, threads(4 * MIB)), &[])),
        );
    }
    became
}

/// After a crash all of the batch is there, or nothing, if all before it was durable.
fn check_crash(what: &str, device: &Arc<dyn Device>, states: &[BTreeMap<u64, Seen>]) {
    let found = but_blocks(Seen::all(&open(device, threads(4 * MIB)), &[]));
    assert!(states.contains(&found), "{what}: a part of a batch was found after a crash");
    check(device, what);
}

#[test]
fn a_batch_is_its_steps_one_after_the_other() {
    let (mut done, mut refused) = (0, 0);
    for seed in 0..80 {
        match one_batch(seed) {
            Became::Done => done += 1,
            Became::Refused => refused += 1,
        }
    }
    assert!(done > 40 && refused > 15, "{done} {refused}");
}
