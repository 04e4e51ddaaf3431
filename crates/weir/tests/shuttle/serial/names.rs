//! Names: three threads make, link, rename, list and remove in three directories. After that the power is cut, as it was after every
//! flush, or the process dies: what is found is a state that an order of the calls went through, behind everything that was durable.

use super::order::{Model, Threads, explain};
use super::tree::{DIR_PERMISSIONS, Ino, Inode, Op, Outcome, Place, Tree};
use super::{Moments, describe, one_of, run};
use shuttle::rand::{Rng, thread_rng};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use weir::device::memory::MemoryDevice;
use weir::device::{Device, DeviceInfo, DeviceResult, IoClass, OnDone, Request};
use weir::*;

use crate::open;

const NAMES: [&str; 3] = ["a", "b", "c"];
const THREADS: usize = 3;
const ATTRIBUTE: &[u8] = b"user.a";

impl Model for Tree {
    type Op = Op;
    type Outcome = Outcome;
    fn apply(&mut self, op: &Op, outcome: &Outcome) -> bool {
        Self::apply(self, op, outcome)
    }
}

/// A disk that keeps what a power cut after each flush would leave.
struct Cuts {
    inner: MemoryDevice,
    moments: Arc<Moments>,
    images: Mutex<Vec<(u64, Vec<u8>)>>,
}

impl Device for Cuts {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { volatile_cache: true, fua: false, ..self.inner.info() }
    }
    fn read(&self, offset: u64, buffers: &mut [&mut [u8]], class: IoClass) -> DeviceResult<()> {
        self.inner.read(offset, buffers, class)
    }
    fn write(&self, offset: u64, buffers: &[&[u8]], class: IoClass, fua: bool) -> DeviceResult<()> {
        self.inner.write(offset, buffers, class, fua)
    }
    fn flush(&self) -> DeviceResult<()> {
        // Whatever is written while the flush is on its way may be lost.
        let image = self.inner.image();
        shuttle::thread::yield_now();
        self.images.lock().expect("lock").push((self.moments.next(), image));
        Ok(())
    }
    fn discard(&self, offset: u64, length: u64) -> DeviceResult<()> {
        self.inner.discard(offset, length)
    }
    fn submit(&self, request: Request, on_done: OnDone) {
        self.inner.submit(request, on_done);
    }
}

struct World {
    volume: Volume,
    moments: Arc<Moments>,
    device: Arc<Cuts>,
    /// Directories, the root first, and files.
    dirs: Vec<Ino>,
    files: Vec<Ino>,
    holds: Vec<InodeHold>,
}

impl World {
    /// `/a` is a file, `/b` a directory with a file `a` and an empty directory `b`.
    fn new() -> Self {
        let moments = Arc::new(Moments::default());
        let inner = MemoryDevice::new(2 << 20);
        let device = Arc::new(Cuts { inner, moments: moments.clone(), images: Mutex::default() });
        let generic: Arc<dyn Device> = device.clone();
        let options = CreateOptions {
            volume_id: Some([7; 16]),
            log_bytes: Some(64 * 4096),
            ..CreateOptions::default()
        };
        Volume::format_device(&generic, &options).expect("format");
        let volume = open(&generic);
        let make = |dir, name: &str, file_type, permissions| {
            let new = NewInode::new(file_type, permissions);
            volume.make(dir, name.as_bytes(), &new).expect("make").ino
        };
        let file = |dir, name| make(dir, name, FileType::Regular, 0o644);
        let dir = |dir, name| make(dir, name, FileType::Directory, DIR_PERMISSIONS);
        let below = dir(Volume::ROOT, "b");
        let dirs = vec![Volume::ROOT, below, dir(below, "b")];
        let files = vec![file(Volume::ROOT, "a"), file(below, "a")];
        volume.sync().expect("sync");
        let holds = [&files[..], &dirs[1..]].concat();
        let holds = holds.iter().map(|&number| volume.hold(number).expect("hold")).collect();
        device.images.lock().expect("lock").clear();
        Self { volume, moments, device, dirs, files, holds }
    }

    fn tree(&self) -> Tree {
        let mut tree = look_at(&self.volume);
        for hold in &self.holds {
            let number = hold.ino();
            tree.held.push(number);
            tree.inodes.entry(number).or_insert_with(|| inode(&self.volume, number));
        }
        tree
    }
}

fn inode(volume: &Volume, number: Ino) -> Inode {
    let attr = volume.getattr(number).expect("attributes");
    let attribute = volume.getxattr(number, ATTRIBUTE).ok().map(|value| value[0]);
    let directory = (attr.file_type == FileType::Directory).then(|| {
        let mut entries = BTreeMap::new();
        let see = &mut |entry: DirEntry| {
            let name = NAMES.iter().find(|name| name.as_bytes() == entry.name).expect("a name");
            assert_eq!(entries.insert(*name, entry.ino), None);
            true
        };
        volume.readdir(number, 0, see).expect("list");
        assert_eq!(attr.size_bytes, entries.len() as u64);
        (entries, volume.parent(number).expect("parent"))
    });
    Inode { directory, links: attr.links, permissions: attr.permissions, attribute }
}

/// Everything that has a name.
fn look_at(volume: &Volume) -> Tree {
    let mut tree = Tree::new(Volume::ROOT);
    let mut left = vec![Volume::ROOT];
    while let Some(number) = left.pop() {
        let found = inode(volume, number);
        left.extend(found.directory.iter().flat_map(|(entries, _)| entries.values()));
        tree.inodes.insert(number, found);
    }
    tree
}

/// Draws calls.
struct Draw<'a> {
    world: &'a World,
}

impl Draw<'_> {
    fn place(&self) -> Place {
        (one_of(&self.world.dirs), one_of(&NAMES))
    }

    fn file(&self) -> Ino {
        one_of(&self.world.files)
    }

    fn any(&self) -> Ino {
        one_of(&[&self.world.files[..], &self.world.dirs[1..]].concat())
    }

    fn mode() -> RenameMode {
        one_of(&[
            RenameMode::Replace,
            RenameMode::Replace,
            RenameMode::NoReplace,
            RenameMode::Exchange,
        ])
    }

    fn change(&self) -> Op {
        match thread_rng().gen_range(0..14) {
            0 | 1 => Op::MakeFile(self.place()),
            2 => Op::MakeDir(self.place()),
            3 => Op::Link(self.file(), self.place()),
            4 | 5 => Op::Unlink(self.place()),
            6 => Op::Rmdir(self.place()),
            7..=11 => Op::Rename(self.place(), self.place(), Self::mode()),
            12 => Op::Permit(self.any(), one_of(&[0o600, 0o611, 0o622])),
            _ => Op::SetAttribute(self.any(), thread_rng().gen_range(0..3)),
        }
    }

    /// A batch changes no extended attributes.
    fn parts(&self) -> Vec<Op> {
        let changes = std::iter::repeat_with(|| self.change());
        let parts = changes.filter(|part| !matches!(part, Op::SetAttribute(..)));
        parts.take(thread_rng().gen_range(2..4)).collect()
    }

    fn call(&self) -> Op {
        match thread_rng().gen_range(0..16) {
            0..=8 => self.change(),
            9 => Op::Open(one_of(&NAMES), thread_rng().gen_bool(0.3)),
            10 => Op::Batch(self.parts()),
            11 => Op::LookUp(self.place()),
            12 => Op::List(one_of(&self.world.dirs)),
            13 => Op::Attributes(self.any()),
            14 => Op::GetAttribute(self.any()),
            _ => Op::Sync,
        }
    }
}

fn found(attr: &Attr) -> Outcome {
    let is_dir = attr.file_type == FileType::Directory;
    let entries = if is_dir { attr.size_bytes } else { 0 };
    Outcome::Found(attr.ino, attr.links, attr.permissions, entries)
}

fn record(batch: &mut Batch, part: &Op) -> Result<Option<Ino>> {
    match *part {
        Op::MakeFile((dir, name)) => {
            let new = NewInode::new(FileType::Regular, 0o644);
            return batch.create_file(dir, name.as_bytes(), &new).map(Some);
        }
        Op::MakeDir((dir, name)) => {
            return batch.make_dir(dir, name.as_bytes(), DIR_PERMISSIONS).map(Some);
        }
        Op::Link(number, (dir, name)) => batch.link(number, dir, name.as_bytes()),
        Op::Unlink((dir, name)) => batch.unlink(dir, name.as_bytes()),
        Op::Rmdir((dir, name)) => batch.rmdir(dir, name.as_bytes()),
        Op::Rename((dir, name), (to, to_name), mode) => {
            batch.rename(dir, name.as_bytes(), to, to_name.as_bytes(), mode)
        }
        Op::Permit(number, permissions) => {
            let change = SetAttr { permissions: Some(permissions), ..SetAttr::default() };
            batch.setattr(number, &change)
        }
        ref other => unreachable!("{other:?} in a batch"),
    }
    .map(|()| None)
}

fn perform(volume: &Volume, op: &Op) -> Result<Outcome> {
    let made = |attr: Attr| Outcome::Made(vec![attr.ino]);
    let done = |()| Outcome::Done;
    match *op {
        Op::MakeFile((dir, name)) => {
            volume.make(dir, name.as_bytes(), &NewInode::new(FileType::Regular, 0o644)).map(made)
        }
        Op::MakeDir((dir, name)) => {
            let new = NewInode::new(FileType::Directory, DIR_PERMISSIONS);
            volume.make(dir, name.as_bytes(), &new).map(made)
        }
        Op::Open(name, new) => {
            let flags = if new { OpenFlags::CREATE_NEW } else { OpenFlags::CREATE };
            volume.open_file(name, flags).map(|file| Outcome::Made(vec![file.ino()]))
        }
        Op::Link(number, (dir, name)) => {
            volume.link(number, dir, name.as_bytes()).map(|_| Outcome::Done)
        }
        Op::Unlink((dir, name)) => volume.unlink(dir, name.as_bytes()).map(done),
        Op::Rmdir((dir, name)) => volume.rmdir(dir, name.as_bytes()).map(done),
        Op::Rename((dir, name), (to, to_name), mode) => {
            volume.rename(dir, name.as_bytes(), to, to_name.as_bytes(), mode).map(done)
        }
        Op::LookUp((dir, name)) => volume.lookup(dir, name.as_bytes()).map(|attr| found(&attr)),
        Op::List(dir) => {
            let mut entries = Vec::new();
            let see = &mut |entry: DirEntry| {
                entries.push((String::from_utf8(entry.name).expect("text"), entry.ino));
                true
            };
            volume.readdir(dir, 0, see)?;
            entries.sort();
            Ok(Outcome::Listed(entries))
        }
        Op::Attributes(number) => volume.getattr(number).map(|attr| found(&attr)),
        Op::Permit(number, permissions) => {
            let change = SetAttr { permissions: Some(permissions), ..SetAttr::default() };
            volume.setattr(number, &change).map(|_| Outcome::Done)
        }
        Op::SetAttribute(number, value) => {
            volume.setxattr(number, ATTRIBUTE, &[value], XattrMode::Set).map(done)
        }
        Op::GetAttribute(number) => {
            volume.getxattr(number, ATTRIBUTE).map(|value| Outcome::Value(value[0]))
        }
        Op::Batch(ref parts) => {
            let mut batch = volume.batch();
            let mut made = Vec::new();
            for part in parts {
                made.extend(record(&mut batch, part)?);
            }
            batch.commit_relaxed()?;
            Ok(Outcome::Made(made))
        }
        Op::Sync => volume.sync().map(done),
    }
}

/// A look-up finds a number, and then its attributes: what others do may come in between. But what it finds has a name.
fn steps(op: Op, outcome: Outcome) -> Vec<(Op, Outcome)> {
    match (op, outcome) {
        (Op::LookUp(place), Outcome::Found(number, 0, ..)) => {
            panic!("{place:?} names {number}, which has no name")
        }
        (Op::LookUp(place), found @ Outcome::Found(number, ..)) => {
            let named = (Op::LookUp(place), Outcome::Made(vec![number]));
            vec![named, (Op::Attributes(number), found)]
        }
        step => vec![step],
    }
}

/// How many calls of each thread a crash at `moment` must leave: those that ended before a sync began that has ended by then.
fn promised(threads: &Threads<Tree>, moment: u64) -> Vec<usize> {
    let syncs = threads.iter().flatten().filter(|call| matches!(call.op, Op::Sync));
    let began = syncs.filter(|sync| sync.ended < moment).map(|sync| sync.began).max().unwrap_or(0);
    threads.iter().map(|calls| calls.iter().filter(|call| call.ended < began).count()).collect()
}

fn scenario(calls_each: usize, threads: usize) {
    let mut world = World::new();
    let first = world.tree();
    let draw = Draw { world: &world };
    let calls = (0..threads).map(|_| (0..calls_each).map(|_| draw.call()).collect()).collect();
    let volume = world.volume.clone();
    let perform = move |op: Op| {
        let outcome = perform(&volume, &op).unwrap_or_else(Outcome::Failed);
        steps(op, outcome)
    };
    let threads: Threads<Tree> = run::<Tree>(&world.volume, &world.moments, calls, perform);
    let last = world.tree();
    let states = explain(&threads, &first, &last);
    assert!(
        !states.is_empty(),
        "no order explains this:\n{}from {first:#?}\nto {last:#?}",
        describe::<Tree>(&threads)
    );

    let end = world.moments.next();
    let mut cuts = std::mem::take(&mut *world.device.images.lock().expect("lock"));
    // The process dies, and the disk stays up.
    cuts.push((end, world.device.inner.image()));
    world.holds.clear();
    for (moment, image) in cuts {
        let promised = promised(&threads, moment);
        let device: Arc<dyn Device> = Arc::new(MemoryDevice::from_image(&image));
        let found = look_at(&open(&device));
        let is_allowed = states.iter().any(|(position, state)| {
            position.iter().zip(&promised).all(|(made, must)| made >= must)
                && state.reachable() == found
        });
        assert!(
            is_allowed,
            "a crash at {moment} leaves what no order goes through behind {promised:?}:\n{}from {first:#?}\nto \
             {last:#?}\nfound {found:#?}",
            describe::<Tree>(&threads)
        );
    }
}

#[test]
fn names_are_as_if_one_call_came_after_the_other() {
    crate::explore(|| scenario(3, THREADS));
}

#[test]
fn one_caller_hears_what_the_model_says() {
    crate::explore_some(|| scenario(12, 1), 4);
}
