//! Batches: all of it or nothing, for errors, for readers, and across a crash.

mod common;

use common::volatile::Volatile;
use common::*;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use weir::check::{CheckOptions, check_device};
use weir::device::Device;
use weir::*;

struct Random(u64);
impl Random {
    fn next(&mut self) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// What a volume holds, as a plain map.
#[derive(Debug, Clone, PartialEq)]
struct Model {
    nodes: BTreeMap<u64, Node>,
}

#[derive(Debug, Clone, PartialEq)]
enum Node {
    Dir(BTreeMap<Vec<u8>, u64>),
    File(Vec<u8>),
    Symlink(Vec<u8>),
    /// A directory that was removed.
    Gone,
}

#[derive(Clone)]
enum Change {
    Make { dir: u64, name: Vec<u8>, ino: u64, node: Node },
    Link(u64, u64, Vec<u8>),
    Unlink(u64, Vec<u8>),
    Rmdir(u64, Vec<u8>),
    Rename((u64, Vec<u8>), (u64, Vec<u8>), RenameMode),
    Write(u64, u64, Vec<u8>),
    Truncate(u64, u64),
}

impl std::fmt::Debug for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
        match self {
            Self::Make { dir, name: made, ino, .. } => write!(f, "make {dir}/{}={ino}", name(made)),
            Self::Link(ino, dir, to) => write!(f, "link {ino} {dir}/{}", name(to)),
            Self::Unlink(dir, gone) => write!(f, "unlink {dir}/{}", name(gone)),
            Self::Rmdir(dir, gone) => write!(f, "rmdir {dir}/{}", name(gone)),
            Self::Rename(from, to, mode) => {
                write!(f, "rename {}/{} {}/{} {mode:?}", from.0, name(&from.1), to.0, name(&to.1))
            }
            Self::Write(ino, offset, data) => write!(f, "write {ino} {offset}+{}", data.len()),
            Self::Truncate(ino, size) => write!(f, "truncate {ino} {size}"),
        }
    }
}

impl Model {
    fn new() -> Self {
        Self { nodes: BTreeMap::from([(Volume::ROOT, Node::Dir(BTreeMap::new()))]) }
    }

    fn dir(&mut self, ino: u64) -> Result<&mut BTreeMap<Vec<u8>, u64>> {
        match self.nodes.get_mut(&ino) {
            Some(Node::Dir(entries)) => Ok(entries),
            None | Some(Node::Gone) => Err(Error::NotFound),
            Some(_) => Err(Error::NotDirectory),
        }
    }

    fn is_dir(&self, ino: u64) -> bool {
        matches!(self.nodes.get(&ino), Some(Node::Dir(_)))
    }

    fn find(&mut self, dir: u64, name: &[u8]) -> Result<u64> {
        self.dir(dir)?.get(name).copied().ok_or(Error::NotFound)
    }

    fn holds(&self, ancestor: u64, ino: u64) -> bool {
        ancestor == ino
            || match self.nodes.get(&ancestor) {
                Some(Node::Dir(entries)) => entries.values().any(|child| self.holds(*child, ino)),
                _ => false,
            }
    }

    fn forget_nameless(&mut self) {
        let named: Vec<u64> = self
            .nodes
            .values()
            .flat_map(|node| match node {
                Node::Dir(entries) => entries.values().copied().collect(),
                _ => Vec::new(),
            })
            .collect();
        self.nodes.retain(|ino, _| *ino == Volume::ROOT || named.contains(ino));
    }

    /// The model with all changes made, or the error of the first that cannot be.
    fn with(&self, changes: &[Change]) -> Result<Self> {
        let mut model = self.clone();
        for change in changes {
            model.apply(change)?;
        }
        model.forget_nameless();
        Ok(model)
    }

    fn apply(&mut self, change: &Change) -> Result<()> {
        match change {
            Change::Make { dir, name, ino, node } => {
                if self.dir(*dir)?.contains_key(name) {
                    return Err(Error::Exists);
                }
                self.dir(*dir)?.insert(name.clone(), *ino);
                self.nodes.insert(*ino, node.clone());
            }
            Change::Link(ino, dir, name) => {
                if !self.nodes.contains_key(ino) {
                    return Err(Error::NotFound);
                }
                if self.is_dir(*ino) || self.nodes[ino] == Node::Gone {
                    return Err(Error::NotPermitted);
                }
                if self.dir(*dir)?.contains_key(name) {
                    return Err(Error::Exists);
                }
                let names = |node: &Node| matches!(node, Node::Dir(entries) if entries.values().any(|named| named == ino));
                if !self.nodes.values().any(names) {
                    // It has lost its last name in this batch.
                    return Err(Error::NotFound);
                }
                self.dir(*dir)?.insert(name.clone(), *ino);
            }
            Change::Unlink(dir, name) => {
                let ino = self.find(*dir, name)?;
                if self.is_dir(ino) {
                    return Err(Error::IsDirectory);
                }
                self.dir(*dir)?.remove(name);
            }
            Change::Rmdir(dir, name) => {
                let ino = self.find(*dir, name)?;
                if !self.is_dir(ino) {
                    return Err(Error::NotDirectory);
                }
                if !self.dir(ino)?.is_empty() {
                    return Err(Error::NotEmpty);
                }
                self.dir(*dir)?.remove(name);
                self.nodes.insert(ino, Node::Gone);
            }
            Change::Rename(from, to, mode) => self.rename(from, to, *mode)?,
            Change::Write(ino, offset, data) => match self.nodes.get_mut(ino) {
                Some(Node::File(bytes)) => {
                    let end = *offset as usize + data.len();
                    if bytes.len() < end {
                        bytes.resize(end, 0);
                    }
                    bytes[*offset as usize..end].copy_from_slice(data);
                }
                Some(Node::Dir(_) | Node::Gone) => return Err(Error::IsDirectory),
                Some(_) => return Err(Error::Invalid("")),
                None => return Err(Error::NotFound),
            },
            Change::Truncate(ino, size) => match self.nodes.get_mut(ino) {
                Some(Node::File(bytes)) => bytes.resize(*size as usize, 0),
                Some(Node::Dir(_) | Node::Gone) => return Err(Error::IsDirectory),
                Some(_) => return Err(Error::Invalid("")),
                None => return Err(Error::NotFound),
            },
        }
        Ok(())
    }

    fn rename(
        &mut self,
        from: &(u64, Vec<u8>),
        to: &(u64, Vec<u8>),
        mode: RenameMode,
    ) -> Result<()> {
        // As a call: both directories, then the names.
        self.dir(from.0)?;
        let target = self.dir(to.0)?.get(&to.1).copied();
        let source = self.find(from.0, &from.1)?;
        let below = Err(Error::Invalid(""));
        if self.is_dir(source) && self.holds(source, to.0) {
            return below;
        }
        match (target, mode) {
            (None, RenameMode::Exchange) => return Err(Error::NotFound),
            (Some(_), RenameMode::NoReplace) => return Err(Error::Exists),
            (Some(target), _) if target == source => return Ok(()),
            (Some(target), RenameMode::Exchange) => {
                if self.is_dir(target) && self.holds(target, from.0) {
                    return below;
                }
                self.dir(from.0)?.insert(from.1.clone(), target);
                self.dir(to.0)?.insert(to.1.clone(), source);
                return Ok(());
            }
            (Some(target), _) => match (self.is_dir(source), self.is_dir(target)) {
                (true, false) => return Err(Error::NotDirectory),
                (false, true) => return Err(Error::IsDirectory),
                (true, true) if !self.dir(target)?.is_empty() => return Err(Error::NotEmpty),
                (true, true) => drop(self.nodes.insert(target, Node::Gone)),
                _ if false => {}
                _ => {}
            },
            (None, _) => {}
        }
        self.dir(from.0)?.remove(&from.1);
        self.dir(to.0)?.insert(to.1.clone(), source);
        Ok(())
    }

    /// What a volume holds.
    fn of(volume: &Volume) -> Self {
        let mut model = Self { nodes: BTreeMap::new() };
        let mut pending = vec![Volume::ROOT];
        let mut links: BTreeMap<u64, u32> = BTreeMap::new();
        while let Some(ino) = pending.pop() {
            let mut entries = BTreeMap::new();
            let mut visit = |entry: DirEntry| {
                entries.insert(entry.name, entry.ino);
                true
            };
            volume.readdir(ino, 0, &mut visit).expect("list");
            for &child in entries.values() {
                *links.entry(child).or_default() += 1;
                let attr = volume.getattr(child).expect("attributes");
                match attr.file_type {
                    FileType::Directory => pending.push(child),
                    FileType::Symlink => {
                        let target = volume.readlink(child).expect("readlink");
                        model.nodes.insert(child, Node::Symlink(target));
                    }
                    _ => {
                        let file = volume.open_inode(child, false).expect("open");
                        model.nodes.insert(child, Node::File(contents(&file)));
                    }
                }
            }
            assert_eq!(volume.getattr(ino).expect("attributes").size_bytes, entries.len() as u64);
            model.nodes.insert(ino, Node::Dir(entries));
        }
        for (ino, count) in links {
            if !model.is_dir(ino) {
                assert_eq!(volume.getattr(ino).expect("attributes").links, count);
            }
        }
        model
    }
}

/// Records random changes in `batch`, most of which make sense for `model`.
fn record(random: &mut Random, model: &Model, batch: &mut Batch, large: bool) -> Vec<Change> {
    let mut changes = Vec::new();
    // What the batch has made of it so far.
    let mut now = model.clone();
    for number in 0..=random.below(9) {
        let known: Vec<u64> = now.nodes.keys().copied().collect();
        let any = |random: &mut Random| known[random.below(known.len() as u64) as usize];
        let dir = |random: &mut Random| {
            let directories: Vec<u64> =
                known.iter().copied().filter(|ino| now.is_dir(*ino)).collect();
            match random.below(6) {
                0 => known[random.below(known.len() as u64) as usize],
                _ => directories[random.below(directories.len() as u64) as usize],
            }
        };
        let name = |random: &mut Random| vec![b'a' + random.below(5) as u8];
        let mut change = match random.below(14) {
            0..=2 => {
                let node = match random.below(4) {
                    0 => Node::Dir(BTreeMap::new()),
                    1 => Node::Symlink(b"/a/b".to_vec()),
                    _ => Node::File(Vec::new()),
                };
                let ino = u64::MAX - number;
                Change::Make { dir: dir(random), name: name(random), ino, node }
            }
            3 => Change::Link(any(random), dir(random), name(random)),
            4 => Change::Unlink(dir(random), name(random)),
            5 => Change::Rmdir(dir(random), name(random)),
            6 | 7 => {
                let mode = match random.below(4) {
                    0 => RenameMode::Exchange,
                    1 => RenameMode::NoReplace,
                    _ => RenameMode::Replace,
                };
                Change::Rename((dir(random), name(random)), (dir(random), name(random)), mode)
            }
            8 => Change::Truncate(any(random), random.below(60_000)),
            _ => {
                let length = match random.below(6) {
                    0 if large => 400_000 + random.below(500_000),
                    1 => 4096,
                    2 => random.below(100_000),
                    _ => 1 + random.below(9000),
                };
                let offset = match random.below(3) {
                    0 => random.below(12) * 4096,
                    _ => random.below(50_000),
                };
                Change::Write(any(random), offset, pattern(random.next(), length as usize))
            }
        };
        let is_valid = now.clone().apply(&change).is_ok();
        if !is_valid && random.below(20) > 0 {
            continue;
        }
        let recorded = match &mut change {
            Change::Make { dir, name, ino, node } => {
                let made = match node {
                    Node::Dir(_) => batch.make_dir(*dir, name, 0o755),
                    Node::Symlink(target) => batch.symlink(*dir, name, target, 0, 0),
                    _ => batch.create_file(*dir, name, &NewInode::new(FileType::Regular, 0o644)),
                };
                made.map(|made| *ino = made)
            }
            Change::Link(ino, dir, name) => batch.link(*ino, *dir, name),
            Change::Unlink(dir, name) => batch.unlink(*dir, name),
            Change::Rmdir(dir, name) => batch.rmdir(*dir, name),
            Change::Rename(from, to, mode) => batch.rename(from.0, &from.1, to.0, &to.1, *mode),
            Change::Write(ino, offset, data) => batch.write_inode(*ino, *offset, data),
            Change::Truncate(ino, size) => batch.truncate_inode(*ino, *size),
        };
        if is_valid {
            now.apply(&change).expect("valid");
        }
        recorded.expect("recorded");
        changes.push(change);
    }
    changes
}

fn same_kind(one: &Error, other: &Error) -> bool {
    std::mem::discriminant(one) == std::mem::discriminant(other)
}

/// Random batches; after each the volume is what the model is. Crashes at random moments find the state after some batch, none
/// before the last that was durable.
#[test]
fn random_batches_happen_as_a_whole_or_not_at_all() {
    let (mut done, mut refused, mut lost, mut homes) = (0, 0, 0, 0);
    for seed in 0..24 {
        let mut random = Random(seed);
        let device = Volatile::new(24 * MIB);
        let dynamic: Arc<dyn Device> = device.clone();
        format(&dynamic, [0, 128][seed as usize % 2]);
        let volume = open(&dynamic, manual([8, 2][seed as usize % 2] * MIB));
        let mut model = Model::new();
        let mut history = vec![(0, model.clone())];
        for _ in 0..25 {
            let mut batch = volume.batch();
            let changes = record(&mut random, &model, &mut batch, true);
            let expected = model.with(&changes);
            let result = match random.below(3) {
                0 => batch.commit(),
                1 => batch.commit_relaxed(),
                _ => batch.commit_async().map(|_ticket| volume.last_lsn()),
            };
            let result = result.map_err(Error::from);
            match (&result, expected) {
                (Ok(lsn), Ok(after)) => {
                    done += 1;
                    model = after;
                    history.push((*lsn, model.clone()));
                }
                (Err(error), Err(wanted)) => {
                    refused += 1;
                    assert!(same_kind(error, &wanted), "seed {seed}: {error} {wanted} {changes:?}");
                }
                (result, wanted) => panic!(
                    "seed {seed}: {result:?}, {} {changes:?}",
                    wanted.map_or_else(|error| error.to_string(), |_| "done".into())
                ),
            }
            assert!(Model::of(&volume) == model, "seed {seed}: {changes:?}");
            match random.below(8) {
                0 => while volume.background_step(BackgroundWork::Writeback).expect("step") {},
                1 => while volume.background_step(BackgroundWork::Checkpoint).expect("step") {},
                2 => while volume.background_step(BackgroundWork::Log).expect("step") {},
                3 => drop(volume.barrier().expect("barrier")),
                4 => volume.sync().expect("sync"),
                _ => {}
            }
            if random.below(6) == 0 {
                let durable = volume.durable_lsn();
                let after = device.after_crash(random.next());
                let found = Model::of(&open(&after, threads(4 * MIB)));
                let place = history.iter().rposition(|(_, state)| *state == found);
                let Some(place) = place else { panic!("seed {seed}: half a batch was found") };
                let least = history.iter().rposition(|(lsn, _)| *lsn <= durable).unwrap_or(0);
                assert!(place >= least, "seed {seed}: {place} of {least}");
                lost += history.len() - 1 - place;
                let report = check_device(&after, &CheckOptions::default()).expect("check");
                assert!(report.is_clean(), "seed {seed}: {:?}", report.problems);
            }
        }
        homes += u64::from(volume.stats().log.payload_blocks > 0);
        volume.close().expect("close");
        let report = check_device(&dynamic, &CheckOptions::default()).expect("check");
        assert!(report.is_clean(), "seed {seed}: {:?}", report.problems);
        drop(volume);
        assert!(Model::of(&open(&dynamic, threads(4 * MIB))) == model);
    }
    assert!(
        done > 200 && refused > 50 && lost > 20 && homes > 0,
        "{done} {refused} {lost} {homes}"
    );
}

#[test]
fn a_batch_far_beyond_a_frame_is_all_or_nothing() {
    for commits in [false, true] {
        let device = Volatile::new(128 * MIB);
        let dynamic: Arc<dyn Device> = device.clone();
        format(&dynamic, 0);
        let volume = open(&dynamic, manual(16 * MIB));
        let old = create(&volume, "/old");
        old.write_at(0, &[1; 10_000]).expect("write");
        volume.sync().expect("sync");
        let mut batch = volume.batch();
        batch.write_at(&old, 5000, &pattern(1, 20_000_000)).expect("recorded");
        let dir = batch.make_dir(Volume::ROOT, b"d", 0o755).expect("recorded");
        for number in 0..500 {
            let name = format!("file-{number:04}").into_bytes();
            let new = NewInode::new(FileType::Regular, 0o644);
            let ino = batch.create_file(dir, &name, &new).expect("recorded");
            batch.write_inode(ino, 0, &pattern(number, 5000)).expect("recorded");
        }
        let writes = volume.stats().log.frames;
        if commits {
            batch.commit().expect("commit");
        } else {
            batch.commit_relaxed().expect("commit");
            assert_eq!(volume.stats().log.frames, writes);
        }
        for seed in 0..3 {
            let volume = open(&device.after_crash(seed), threads(16 * MIB));
            let old = volume.open_file("/old", OpenFlags::READ).expect("open");
            if !commits {
                assert_eq!(contents(&old), [1; 10_000]);
                assert!(matches!(volume.metadata("/d"), Err(Error::NotFound)));
                continue;
            }
            let mut wanted = vec![1; 5000];
            wanted.extend(pattern(1, 20_000_000));
            assert!(contents(&old) == wanted);
            for number in 0..500 {
                let path = format!("/d/file-{number:04}");
                let file = volume.open_file(path, OpenFlags::READ).expect("open");
                assert_eq!(contents(&file), pattern(number, 5000));
            }
        }
    }
}

/// Where one frame is forced to the medium, and nothing is flushed for it, the data that a batch has written home is not there.
#[test]
fn a_batch_that_has_written_data_home_is_durable_also_on_a_disk_with_forced_unit_access() {
    let device = Volatile::with_fua(32 * MIB, true);
    let dynamic: Arc<dyn Device> = device.clone();
    format(&dynamic, 128);
    let volume = open(&dynamic, manual(8 * MIB));
    let file = create(&volume, "/f");
    volume.sync().expect("sync");
    // (Behind data that goes home another frame does without a flush.)
    for (round, length) in [(1, 4096), (2, 75 * 4096), (3, 4096)] {
        let before = volume.stats().log;
        let mut batch = volume.batch();
        batch.write_at(&file, 0, &pattern(round, length)).expect("recorded");
        batch.commit().expect("commit");
        let log = volume.stats().log;
        let forced = (log.flushes - before.flushes, log.fua_writes - before.fua_writes);
        assert_eq!(forced, if length > 4096 { (1, 0) } else { (0, 1) });
        let volume = open(&device.after_crash_with(|_| 0), manual(8 * MIB));
        let file = volume.open_file("/f", OpenFlags::READ).expect("open");
        assert!(contents(&file).starts_with(&pattern(round, length)), "round {round}");
    }
}

#[test]
fn a_small_batch_of_several_files_is_one_write_and_one_flush() {
    let device = Volatile::new(32 * MIB);
    let dynamic: Arc<dyn Device> = device.clone();
    format(&dynamic, 0);
    let volume = open(&dynamic, manual(8 * MIB));
    let files: Vec<_> = (0..5).map(|number| create(&volume, &format!("/{number}"))).collect();
    volume.sync().expect("sync");
    let (writes, flushes) = (device.writes.load(Ordering::Relaxed), volume.stats().log.flushes);
    let mut batch = volume.batch();
    for file in &files {
        batch.write_at(file, 100, b"together").expect("recorded");
    }
    let lsn = batch.commit().expect("commit");
    assert_eq!(device.writes.load(Ordering::Relaxed), writes + 1);
    assert_eq!(volume.stats().log.flushes, flushes + 1);
    assert!(volume.durable_lsn() >= lsn);
    assert!(files.iter().all(|file| file.last_lsn() == lsn));
}

#[test]
fn a_batch_that_fails_leaves_nothing_behind() {
    let probe = Probe::new(formatted(32 * MIB, 0));
    let device: Arc<dyn Device> = probe.clone();
    let volume = open(&device, manual(8 * MIB));
    let file = create(&volume, "/f");
    file.write_at(0, &pattern(1, 9000)).expect("write");
    create(&volume, "/taken");
    volume.checkpoint().expect("checkpoint");
    let before = (Model::of(&volume), volume.statfs(), volume.last_lsn());
    let dirty = volume.stats().dirty_pages;
    let fill = |batch: &mut Batch, length: usize| {
        let new = NewInode::new(FileType::Regular, 0o644);
        let ino = batch.create_file(Volume::ROOT, b"new", &new).expect("recorded");
        batch.write_inode(ino, 0, &pattern(2, length)).expect("recorded");
        batch.write_at(&file, 100, &pattern(3, 5000)).expect("recorded");
        batch.truncate(&file, 50).expect("recorded");
        ino
    };
    let check = |what: &str| {
        assert!(Model::of(&volume) == before.0, "{what}");
        assert_eq!(volume.statfs(), before.1, "{what}");
        assert_eq!((volume.last_lsn(), volume.stats().dirty_pages), (before.2, dirty), "{what}");
    };
    // A name that exists, after data of both kinds was prepared.
    for length in [5000, 3_000_000] {
        let mut batch = volume.batch();
        let ino = fill(&mut batch, length);
        batch.link(ino, Volume::ROOT, b"taken").expect("recorded");
        assert_eq!(batch.commit().map_err(Error::from), Err(Error::Exists));
        assert_eq!(volume.getattr(ino).map(|attr| attr.ino), Err(Error::NotFound));
        check("a name that exists");
    }
    // No space.
    let mut batch = volume.batch();
    fill(&mut batch, 40 << 20);
    assert_eq!(batch.commit(), Err(Error::NoSpace.into()), "no step's fault");
    check("no space");
    // The device.
    let mut batch = volume.batch();
    fill(&mut batch, 3_000_000);
    probe.fail_data_writes.store(true, Ordering::Relaxed);
    assert!(matches!(batch.commit(), Err(BatchError { step: None, error: Error::Io(_) })));
    probe.fail_data_writes.store(false, Ordering::Relaxed);
    assert!(Model::of(&volume) == before.0);
    // And then it works.
    let mut batch = volume.batch();
    fill(&mut batch, 3_000_000);
    batch.commit().expect("commit");
    assert_eq!(file.size(), 50);
    assert_eq!(volume.metadata("/new").expect("attributes").size_bytes, 3_000_000);
    volume.close().expect("close");
    let report = check_device(&device, &CheckOptions::default()).expect("check");
    assert!(report.is_clean(), "{:?}", report.problems);
}

#[test]
fn a_batch_of_another_volume_or_of_a_read_only_handle_is_refused() {
    let (one, two) = (small_volume(), small_volume());
    let file = create(&one, "/f");
    let read_only = one.open_file("/f", OpenFlags::READ).expect("open");
    let mut batch = two.batch();
    assert!(matches!(batch.write_at(&file, 0, b"x"), Err(Error::Invalid(_))));
    assert_eq!(one.batch().write_at(&read_only, 0, b"x"), Err(Error::NotWritable));
    assert!(batch.is_empty());
    assert_eq!(batch.commit(), Ok(two.last_lsn()));
}

/// Writers change two files and a name together; whoever sees one sees the other.
#[test]
fn who_has_seen_a_piece_of_a_batch_sees_all_of_it() {
    with_watchdog(120, || {
        let volume = open(&formatted(64 * MIB, 0), threads(16 * MIB));
        let (first, second) = (create(&volume, "/first"), create(&volume, "/second"));
        for file in [&first, &second] {
            file.write_at(0, &vec![0; 100_000]).expect("write");
        }
        let stop = Arc::new(AtomicBool::new(false));
        let number = |file: &File, offset: u64| {
            let mut bytes = [0; 8];
            assert_eq!(file.read_at(offset, &mut bytes), Ok(8));
            u64::from_le_bytes(bytes)
        };
        std::thread::scope(|scope| {
            for reader in 0..2 {
                let (first, second, stop) = (first.clone(), second.clone(), stop.clone());
                scope.spawn(move || {
                    let mut last = 0;
                    while !stop.load(Ordering::Relaxed) {
                        let (a, b) =
                            if reader == 0 { (&first, &second) } else { (&second, &first) };
                        let seen = number(a, 0);
                        let then = number(b, 90_000);
                        assert!(seen >= last && then >= seen, "{last} {seen} {then}");
                        last = then;
                    }
                });
            }
            for round in 1..400_u64 {
                let mut batch = volume.batch();
                for file in [&first, &second] {
                    batch.write_at(file, 0, &round.to_le_bytes()).expect("recorded");
                    batch.write_at(file, 90_000, &round.to_le_bytes()).expect("recorded");
                }
                if round % 50 == 0 {
                    batch.write_at(&first, 200_000, &vec![1; 3 << 20]).expect("recorded");
                }
                if round % 3 == 0 {
                    batch.commit().expect("commit");
                } else {
                    batch.commit_relaxed().expect("commit");
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
        volume.close().expect("close");
    });
}

/// Batches over the same directories and files beside everything else: nobody waits for ever, and the volume is whole.
#[test]
fn batches_beside_everything_else_end() {
    with_watchdog(240, || {
        for log_blocks in [96, 0] {
            let device = formatted(64 * MIB, log_blocks);
            let volume = open(&device, threads(4 * MIB));
            for dir in 0..3 {
                volume.create_dir(format!("/d{dir}"), 0o755).expect("directory");
            }
            let shared: Vec<_> = (0..4).map(|n| create(&volume, &format!("/s{n}"))).collect();
            std::thread::scope(|scope| {
                for worker in 0..4_u64 {
                    let (volume, shared) = (volume.clone(), shared.clone());
                    scope.spawn(move || {
                        let mut random = Random(worker);
                        for round in 0..60 {
                            let dir = |random: &mut Random| {
                                volume.resolve(format!("/d{}", random.below(3)), true).expect("dir")
                            };
                            let file = &shared[random.below(4) as usize];
                            let name = format!("{}", random.below(6)).into_bytes();
                            match random.below(8) {
                                0 => drop(file.write_at(random.below(90_000), &[1; 7000])),
                                1 => drop(file.truncate(random.below(60_000))),
                                2 => file.fsync().expect("fsync"),
                                3 => drop(volume.barrier().expect("barrier")),
                                4 => drop(volume.unlink(dir(&mut random), &name)),
                                _ => {
                                    let mut batch = volume.batch();
                                    let to = dir(&mut random);
                                    let new = NewInode::new(FileType::Regular, 0o644);
                                    let ino = batch.create_file(to, &name, &new).expect("recorded");
                                    let size = 1 + random.below(40_000) as usize;
                                    batch.write_inode(ino, 0, &vec![2; size]).expect("recorded");
                                    for file in &shared {
                                        let place = random.below(80_000);
                                        batch.write_at(file, place, &[3; 5000]).expect("recorded");
                                    }
                                    let away = dir(&mut random);
                                    if round % 2 == 0 {
                                        let mode = RenameMode::Replace;
                                        batch
                                            .rename(to, &name, away, b"x", mode)
                                            .expect("recorded");
                                    }
                                    match batch.commit_async().map_err(Error::from) {
                                        Ok(ticket) if round % 3 == 0 => {
                                            ticket.wait().expect("durable");
                                        }
                                        Ok(_) | Err(Error::Exists | Error::NoSpace) => {}
                                        // With the smallest of logs.
                                        Err(Error::Invalid(_)) if log_blocks > 0 => {}
                                        Err(error) => panic!("{error}"),
                                    }
                                }
                            }
                        }
                    });
                }
            });
            volume.close().expect("close");
            let report = check_device(&device, &CheckOptions::default()).expect("check");
            assert!(report.is_clean(), "{:?}", report.problems);
        }
    });
}

/// In one batch, each with its number in it.
fn make_files(volume: &Volume, round: u64, names: u64) -> Result<u64> {
    let mut batch = volume.batch();
    for number in 0..names {
        let name = format!("{round}-{number}");
        let new = NewInode::new(FileType::Regular, 0o644);
        let ino = batch.create_file(Volume::ROOT, name.as_bytes(), &new)?;
        batch.write_inode(ino, 0, &number.to_le_bytes())?;
    }
    Ok(batch.commit()?)
}

/// Somebody who records three hundred steps has to know which one it was.
#[test]
fn a_commit_that_fails_names_the_call_it_failed_at() {
    const ROOT: u64 = Volume::ROOT;
    type Record<'a> = Box<dyn Fn(&mut Batch) -> Result<()> + 'a>;
    let volume = small_volume();
    let file = create(&volume, "/f");
    volume.create_dir("/d", 0o755).expect("a directory");
    let dir = volume.metadata("/d").expect("attributes").ino;
    create(&volume, "/d/x");
    let ino = file.ino();
    let new = NewInode::new(FileType::Regular, 0o644);
    let replace = RenameMode::Replace;
    let cases: [(Record<'_>, Error, String); 9] = [
        (
            Box::new(|batch| batch.create_file(ROOT, b"f", &new).map(drop)),
            Error::Exists,
            format!("making \"f\" in directory {ROOT}"),
        ),
        (
            Box::new(|batch| batch.link(ino, dir, b"x")),
            Error::Exists,
            format!("linking inode {ino} as \"x\" in directory {dir}"),
        ),
        (
            Box::new(|batch| batch.unlink(ROOT, b"d")),
            Error::IsDirectory,
            format!("unlinking \"d\" in directory {ROOT}"),
        ),
        (
            Box::new(|batch| batch.rmdir(ROOT, b"d")),
            Error::NotEmpty,
            format!("removing directory \"d\" in directory {ROOT}"),
        ),
        (
            Box::new(|batch| batch.rename(ROOT, b"none", dir, b"\xff", replace)),
            Error::NotFound,
            format!("renaming \"none\" in directory {ROOT} to \"\u{fffd}\" in directory {dir}"),
        ),
        (
            Box::new(|batch| batch.rename(ROOT, b"f", dir, b"none", RenameMode::Exchange)),
            Error::NotFound,
            format!("exchanging \"f\" in directory {ROOT} with \"none\" in directory {dir}"),
        ),
        (
            Box::new(|batch| batch.setattr(99, &SetAttr { uid: Some(1), ..SetAttr::default() })),
            Error::NotFound,
            "changing attributes of inode 99".to_owned(),
        ),
        (
            Box::new(|batch| batch.write_inode(dir, 0, b"x")),
            Error::IsDirectory,
            format!("changing content of inode {dir}"),
        ),
        (
            Box::new(|batch| batch.truncate_inode(99, 0)),
            Error::NotFound,
            "changing content of inode 99".to_owned(),
        ),
    ];
    for (record, error, description) in cases {
        let mut batch = volume.batch();
        batch.write_at(&file, 0, b"a").expect("call 0");
        batch.write_at(&file, 9, b"b").expect("call 1, of the same step");
        assert_eq!(batch.unlink(ROOT, b""), Err(Error::NotFound), "a refused call is none");
        let change = SetAttr { size_bytes: Some(5), uid: Some(1), ..SetAttr::default() };
        batch.setattr(ino, &change).expect("call 2, two steps");
        record(&mut batch).expect("call 3");
        batch.unlink(ROOT, b"later").expect("call 4, which is not come to");
        let step = FailedStep { number: 3, description: description.clone() };
        let failed = batch.commit_relaxed().expect_err("call 3 cannot be done");
        assert_eq!(failed, BatchError { step: Some(step), error: error.clone() });
        let text = format!("step 3 of the batch, {description}: {error}");
        assert_eq!(std::io::Error::from(failed).to_string(), text);
    }
    assert_eq!(file.size(), 0, "nothing has happened");
}

/// Two thousand names are a megabyte of the tree; on a volume with little room a node of 16 KiB for each was asked for.
#[test]
fn a_batch_of_many_names_asks_for_the_room_that_they_take() {
    let device = formatted(64 * MIB, 2048);
    let volume = open(&device, manual(8 * MIB));
    let filler = create(&volume, "/filler");
    filler.allocate(AllocateMode::Extend, 0, 36 * MIB).expect("most of the volume");
    make_files(&volume, 0, 1500).expect("there are 20 MiB for 1,500 files");
    // To the end, in smaller and smaller batches, and no checkpoint fails.
    let (mut round, mut names) = (1, 800);
    while names > 0 {
        match make_files(&volume, round, names) {
            Ok(_) => round += 1,
            Err(error) => {
                assert_eq!(error, Error::NoSpace, "{names} names in round {round}");
                names /= 2;
            }
        }
    }
    volume.checkpoint().expect("a checkpoint of a full volume");
    assert!(volume.shutdown_reason().is_none());
    let last = volume.open_file("/0-1499", OpenFlags::READ).expect("it was made");
    assert_eq!(contents(&last), 1499_u64.to_le_bytes());
    volume.close().expect("close");
    drop((volume, filler, last));
    let report = check_device(&device, &CheckOptions::default()).expect("check");
    assert!(report.is_clean(), "{:#?}", report.problems);
}

/// Each of them has asked whether there is room before any of them takes it.
#[test]
fn batches_of_many_names_at_a_time_leave_a_checkpoint_its_room() {
    const THREADS: u64 = 8;
    let device = formatted(64 * MIB, 2048);
    let volume =
        open(&device, VolumeOptions { memory_bytes: Some(16 * MIB), ..VolumeOptions::default() });
    let filler = create(&volume, "/filler");
    filler.allocate(AllocateMode::Extend, 0, 32 * MIB).expect("most of the volume");
    let rounds = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let mut names = 1200;
                while names > 0 {
                    let round = rounds.fetch_add(1, Ordering::Relaxed);
                    if let Err(error) = make_files(&volume, round, names) {
                        assert_eq!(error, Error::NoSpace, "{names} names in round {round}");
                        names /= 4;
                    }
                }
            });
        }
    });
    volume.checkpoint().expect("a checkpoint of a full volume");
    assert!(volume.shutdown_reason().is_none());
    volume.close().expect("close");
    drop((volume, filler));
    let report = check_device(&device, &CheckOptions::default()).expect("check");
    assert!(report.is_clean(), "{:#?}", report.problems);
}

/// Neither refused calls nor calls that do nothing are any trouble of a batch's other steps.
#[test]
fn a_call_that_was_refused_is_not_part_of_the_batch() {
    let volume = small_volume();
    let file = create(&volume, "/f");
    let (before, missing) = (volume.metadata("/f").expect("attributes"), file.ino() + 1000);
    let mut batch = volume.batch();
    assert_eq!(batch.write_at(&file, u64::MAX - 1, b"x"), Err(Error::FileTooLarge));
    assert_eq!(batch.write_at(&file, u64::MAX - 1, b""), Err(Error::FileTooLarge));
    assert_eq!(batch.truncate(&file, u64::MAX), Err(Error::FileTooLarge));
    assert_eq!(batch.write_inode(missing, u64::MAX, b"x"), Err(Error::FileTooLarge));
    assert_eq!(batch.truncate_inode(Volume::ROOT, u64::MAX), Err(Error::FileTooLarge));
    batch.make_dir(Volume::ROOT, b"d", 0o755).expect("recorded");
    batch.commit().expect("commit");
    assert!(volume.metadata("/d").is_ok());
    assert_eq!(volume.metadata("/f"), Ok(before));
}

/// What a batch costs grows with it, not with its square: these took minutes.
#[test]
fn many_directories_and_many_small_writes_into_a_large_one_are_no_trouble() {
    with_watchdog(60, || {
        let volume = open(&formatted(128 * MIB, 4096), manual(16 * MIB));
        let name = |number: u64| format!("d{number}").into_bytes();
        let (count, length) = (6000, 12 << 20);
        let mut batch = volume.batch();
        for number in 0..count {
            batch.make_dir(Volume::ROOT, &name(number), 0o755).expect("recorded");
        }
        batch.commit().expect("commit");
        let mut batch = volume.batch();
        for number in 0..count {
            batch.rmdir(Volume::ROOT, &name(number)).expect("recorded");
        }
        let new = NewInode::new(FileType::Regular, 0o644);
        let ino = batch.create_file(Volume::ROOT, b"f", &new).expect("recorded");
        let mut expected = pattern(1, length);
        batch.write_inode(ino, 0, &expected).expect("recorded");
        for at in (0..length - 20).step_by(500) {
            expected[at + 3..at + 13].fill(7);
            batch.write_inode(ino, at as u64 + 3, &[7; 10]).expect("recorded");
        }
        batch.commit().expect("commit");
        assert_eq!(names(&volume, "/"), [b"f"]);
        assert!(contents(&volume.open_inode(ino, false).expect("open")) == expected);
    });
}

/// As calls that take away: they need no room.
#[test]
fn what_only_takes_away_works_on_a_full_volume() {
    let volume = open(&formatted(16 * MIB, 64), manual(2 * MIB));
    let (first, second) = (create(&volume, "/first"), create(&volume, "/second"));
    for file in [&first, &second] {
        file.write_all_at(0, &pattern(1, MIB as usize)).expect("write");
    }
    volume.sync().expect("sync");
    let filler = create(&volume, "/filler");
    while filler.append(&pattern(2, 4096)).is_ok() {}
    assert_eq!(filler.append(&[1]), Err(Error::NoSpace));
    let mut batch = volume.batch();
    batch.truncate(&first, 0).expect("recorded");
    batch.truncate(&second, 8192).expect("recorded");
    batch.commit().expect("what only takes away needs no room");
    assert_eq!((first.size(), second.size()), (0, 8192));
    assert!(contents(&second) == pattern(1, MIB as usize)[..8192]);
}

/// As calls: that a name exists is found before there is no room for another one.
#[test]
fn what_is_wrong_with_a_step_is_told_on_a_full_volume_too() {
    let volume = open(&formatted(16 * MIB, 64), manual(2 * MIB));
    let file = create(&volume, "/f");
    volume.create_dir("/d", 0o755).expect("a directory");
    let dir = volume.metadata("/d").expect("attributes").ino;
    while file.append(&pattern(2, 4096)).is_ok() {}
    let new = NewInode::new(FileType::Regular, 0o644);
    assert_eq!(volume.make(dir, b"x", &new), Err(Error::NoSpace));
    let refused = |record: &dyn Fn(&mut Batch)| {
        let mut batch = volume.batch();
        record(&mut batch);
        let failed = batch.commit_relaxed().expect_err("there is no room at least");
        (failed.step.map(|step| step.number), failed.error)
    };
    let make = |batch: &mut Batch, dir: u64, name: &[u8]| {
        batch.create_file(dir, name, &new).expect("recorded");
    };
    assert_eq!(refused(&|batch| make(batch, dir, b"x")), (None, Error::NoSpace));
    assert_eq!(refused(&|batch| make(batch, Volume::ROOT, b"f")), (Some(0), Error::Exists));
    assert_eq!(refused(&|batch| make(batch, file.ino(), b"x")), (Some(0), Error::NotDirectory));
    let into_dir = |batch: &mut Batch| {
        make(batch, dir, b"x");
        batch.write_inode(dir, 0, b"no file").expect("recorded");
    };
    assert_eq!(refused(&into_dir), (Some(1), Error::IsDirectory));
    let empty_dir = |batch: &mut Batch| {
        make(batch, dir, b"x");
        batch.rmdir(Volume::ROOT, b"d").expect("recorded");
    };
    assert_eq!(refused(&empty_dir), (Some(1), Error::NotEmpty));
    assert_eq!(names(&volume, "/d"), Vec::<Vec<u8>>::new());
}

#[test]
fn a_batch_that_no_quarter_of_the_log_can_hold_is_refused_before_its_data_is_written() {
    let probe = Probe::new(formatted(128 * MIB, 128));
    let device: Arc<dyn Device> = probe.clone();
    let volume = open(&device, manual(4 * MIB));
    let file = create(&volume, "/f");
    file.write_at(0, b"old").expect("write");
    volume.sync().expect("sync");
    let before = probe.writes.load(Ordering::Relaxed);
    let mut batch = volume.batch();
    batch.write_at(&file, 0, &vec![7; 40 << 20]).expect("recorded");
    assert!(matches!(batch.commit().map_err(Error::from), Err(Error::Invalid(_))));
    assert_eq!(probe.writes.load(Ordering::Relaxed), before, "nothing is written for nothing");
    // What is wrong with a step comes first.
    let mut batch = volume.batch();
    batch.write_at(&file, 0, &vec![7; 40 << 20]).expect("recorded");
    batch.unlink(Volume::ROOT, b"none").expect("recorded");
    assert_eq!(batch.commit().map_err(Error::from), Err(Error::NotFound));
    assert_eq!(contents(&file), b"old");
}
