//! The namespace against a model: random creations, links, removals, renames of all kinds, attributes and open handles of
//! unlinked files, with background work and reopening in between. What the model allows must succeed; what it
//! does not must fail with the errno that it says.

mod common;

use common::*;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;
use weir::device::Device;
use weir::*;

const ROOT: usize = 0;
const NAMES: [&[u8]; 5] =
    [b"a", b"b", b"cc", b"\xff\xfe", b"a name that is a little longer than the others"];
const ATTRIBUTES: [&[u8]; 3] = [b"user.one", b"security.two", b"trusted.three"];

struct Node {
    ino: u64,
    file_type: FileType,
    permissions: u32,
    links: u32,
    entries: BTreeMap<Vec<u8>, usize>,
    parent: usize,
    attributes: BTreeMap<Vec<u8>, Vec<u8>>,
    handles: usize,
    /// It was made without a name, and has not got one yet.
    linkable: bool,
    target: Vec<u8>,
}

impl Node {
    fn is_dir(&self) -> bool {
        self.file_type == FileType::Directory
    }
    fn is_alive(&self) -> bool {
        self.links > 0 || self.handles > 0
    }
}

/// Places are numbers, taken modulo what there is.
#[derive(Debug, Clone)]
enum Step {
    Make { dir: usize, name: usize, kind: usize, permissions: u32 },
    Symlink { dir: usize, name: usize, length: usize },
    TmpFile { dir: usize },
    Link { node: usize, dir: usize, name: usize },
    Unlink { dir: usize, name: usize },
    Rmdir { dir: usize, name: usize },
    Rename { dir: usize, name: usize, to: usize, to_name: usize, mode: usize },
    Open { node: usize },
    Close { handle: usize },
    Chmod { node: usize, permissions: u32 },
    SetAttribute { node: usize, name: usize, length: usize, mode: usize },
    RemoveAttribute { node: usize, name: usize },
    Sync { node: usize },
    Background(BackgroundWork),
    Checkpoint,
    Reopen { close: bool },
    Compare,
}

fn steps() -> impl Strategy<Value = Step> {
    let any = 0..64_usize;
    let name = 0..NAMES.len();
    let attribute = 0..ATTRIBUTES.len();
    let place = (any.clone(), name.clone());
    let work = prop_oneof![
        Just(BackgroundWork::Log),
        Just(BackgroundWork::Writeback),
        Just(BackgroundWork::Checkpoint),
        Just(BackgroundWork::Purge),
    ];
    prop_oneof![
        10 => (place.clone(), 0..6_usize, 0..0o7777_u32).prop_map(|((dir, name), kind, permissions)| {
            Step::Make { dir, name, kind, permissions }
        }),
        2 => (place.clone(), 1..300_usize)
            .prop_map(|((dir, name), length)| Step::Symlink { dir, name, length }),
        2 => any.clone().prop_map(|dir| Step::TmpFile { dir }),
        4 => (any.clone(), place.clone())
            .prop_map(|(node, (dir, name))| Step::Link { node, dir, name }),
        4 => place.clone().prop_map(|(dir, name)| Step::Unlink { dir, name }),
        3 => place.clone().prop_map(|(dir, name)| Step::Rmdir { dir, name }),
        10 => (place.clone(), place, 0..4_usize).prop_map(|((dir, name), (to, to_name), mode)| {
            Step::Rename { dir, name, to, to_name, mode }
        }),
        3 => any.clone().prop_map(|node| Step::Open { node }),
        3 => any.clone().prop_map(|handle| Step::Close { handle }),
        2 => (any.clone(), 0..0o7777_u32).prop_map(|(node, permissions)| Step::Chmod { node, permissions }),
        3 => (any.clone(), attribute.clone(), 0..5000_usize, 0..3_usize).prop_map(
            |(node, name, length, mode)| Step::SetAttribute { node, name, length, mode }
        ),
        2 => (any.clone(), attribute).prop_map(|(node, name)| Step::RemoveAttribute { node, name }),
        2 => any.prop_map(|node| Step::Sync { node }),
        3 => work.prop_map(Step::Background),
        1 => Just(Step::Checkpoint),
        1 => proptest::bool::ANY.prop_map(|close| Step::Reopen { close }),
        2 => Just(Step::Compare),
    ]
}

struct World {
    device: Arc<dyn Device>,
    volume: Volume,
    nodes: Vec<Node>,
    handles: Vec<(usize, File)>,
}

impl World {
    fn new() -> Self {
        let device = formatted(16 * MIB, 64);
        let volume = open(&device, manual(256 * KIB));
        let permissions = volume.getattr(Volume::ROOT).expect("root").permissions;
        let mut world = Self { device, volume, nodes: Vec::new(), handles: Vec::new() };
        world.add(Volume::ROOT, FileType::Directory, permissions, ROOT);
        world
    }

    fn add(&mut self, ino: u64, file_type: FileType, permissions: u32, parent: usize) -> usize {
        self.nodes.push(Node {
            ino,
            file_type,
            permissions,
            links: if file_type == FileType::Directory { 2 } else { 1 },
            entries: BTreeMap::new(),
            parent,
            attributes: BTreeMap::new(),
            handles: 0,
            linkable: false,
            target: Vec::new(),
        });
        self.nodes.len() - 1
    }

    /// A living node that fulfils `is`.
    fn pick(&self, number: usize, is: impl Fn(&Node) -> bool) -> Option<usize> {
        let fit: Vec<usize> = (0..self.nodes.len())
            .filter(|&node| self.nodes[node].is_alive() && is(&self.nodes[node]))
            .collect();
        (!fit.is_empty()).then(|| fit[number % fit.len()])
    }

    fn dir(&self, number: usize) -> usize {
        self.pick(number, Node::is_dir).unwrap_or(ROOT)
    }

    fn found(&self, dir: usize, name: &[u8]) -> Option<usize> {
        self.nodes[dir].entries.get(name).copied()
    }

    fn is_below(&self, mut node: usize, ancestor: usize) -> bool {
        loop {
            if node == ancestor {
                return true;
            }
            if node == ROOT {
                return false;
            }
            node = self.nodes[node].parent;
        }
    }

    fn insert(&mut self, dir: usize, name: &[u8], node: usize) {
        self.nodes[dir].entries.insert(name.to_vec(), node);
        if self.nodes[node].is_dir() {
            self.nodes[dir].links += 1;
            self.nodes[node].parent = dir;
        }
    }

    fn take_out(&mut self, dir: usize, name: &[u8]) -> usize {
        let node = self.nodes[dir].entries.remove(name).expect("entry");
        if self.nodes[node].is_dir() {
            self.nodes[dir].links -= 1;
        }
        node
    }

    /// The node loses a name.
    fn unname(&mut self, node: usize) {
        let node = &mut self.nodes[node];
        node.links = if node.is_dir() { 0 } else { node.links - 1 };
        if !node.is_alive() {
            assert_eq!(self.volume.getattr(node.ino), Err(Error::NotFound));
        }
    }

    fn apply(&mut self, step: &Step) {
        match *step {
            Step::Make { dir, name, kind, permissions } => {
                self.make(dir, NAMES[name], kind, permissions);
            }
            Step::Symlink { dir, name, length } => self.symlink(dir, NAMES[name], length),
            Step::TmpFile { dir } => {
                let dir = self.dir(dir);
                let new = NewInode::new(FileType::Regular, 0o600);
                let (attr, file) = self.volume.tmpfile(self.nodes[dir].ino, &new).expect("tmpfile");
                let node = self.add(attr.ino, FileType::Regular, 0o600, ROOT);
                self.nodes[node].links = 0;
                self.nodes[node].handles = 1;
                self.nodes[node].linkable = true;
                self.handles.push((node, file));
            }
            Step::Link { node, dir, name } => self.link(node, dir, NAMES[name]),
            Step::Unlink { dir, name } => {
                let (dir, name) = (self.dir(dir), NAMES[name]);
                let expected = match self.found(dir, name) {
                    None => Err(Error::NotFound),
                    Some(node) if self.nodes[node].is_dir() => Err(Error::IsDirectory),
                    Some(_) => Ok(()),
                };
                assert_eq!(self.volume.unlink(self.nodes[dir].ino, name), expected);
                if expected.is_ok() {
                    let node = self.take_out(dir, name);
                    self.unname(node);
                }
            }
            Step::Rmdir { dir, name } => {
                let (dir, name) = (self.dir(dir), NAMES[name]);
                let expected = match self.found(dir, name).map(|node| &self.nodes[node]) {
                    None => Err(Error::NotFound),
                    Some(node) if !node.is_dir() => Err(Error::NotDirectory),
                    Some(node) if !node.entries.is_empty() => Err(Error::NotEmpty),
                    Some(_) => Ok(()),
                };
                assert_eq!(self.volume.rmdir(self.nodes[dir].ino, name), expected);
                if expected.is_ok() {
                    let node = self.take_out(dir, name);
                    self.unname(node);
                }
            }
            Step::Rename { dir, name, to, to_name, mode } => {
                self.rename((self.dir(dir), NAMES[name]), (self.dir(to), NAMES[to_name]), mode);
            }
            Step::Open { node } => {
                if let Some(node) = self.pick(node, |node| node.file_type == FileType::Regular) {
                    let file = self.volume.open_inode(self.nodes[node].ino, true).expect("open");
                    self.nodes[node].handles += 1;
                    self.handles.push((node, file));
                }
            }
            Step::Close { handle } => {
                if !self.handles.is_empty() {
                    let (node, file) = self.handles.swap_remove(handle % self.handles.len());
                    drop(file);
                    let node = &mut self.nodes[node];
                    node.handles -= 1;
                    if !node.is_alive() {
                        assert_eq!(self.volume.getattr(node.ino), Err(Error::NotFound));
                    }
                }
            }
            Step::Chmod { node, permissions } => {
                let Some(node) = self.pick(node, |_| true) else { return };
                let change = SetAttr { permissions: Some(permissions), ..SetAttr::default() };
                let attr = self.volume.setattr(self.nodes[node].ino, &change).expect("setattr");
                assert_eq!(attr.permissions, permissions);
                self.nodes[node].permissions = permissions;
            }
            Step::SetAttribute { node, name, length, mode } => {
                self.set_attribute(node, ATTRIBUTES[name], length, mode);
            }
            Step::RemoveAttribute { node, name } => {
                let Some(node) = self.pick(node, |_| true) else { return };
                let removed = self.volume.removexattr(self.nodes[node].ino, ATTRIBUTES[name]);
                match self.nodes[node].attributes.remove(ATTRIBUTES[name]) {
                    Some(_) => assert_eq!(removed, Ok(())),
                    None => assert_eq!(removed, Err(Error::NoAttribute)),
                }
            }
            Step::Sync { node } => {
                let Some(node) = self.pick(node, |_| true) else { return };
                assert_eq!(self.volume.fsync_dir(self.nodes[node].ino), Ok(()));
            }
            Step::Background(work) => {
                self.volume.background_step(work).expect("background");
            }
            Step::Checkpoint => self.volume.checkpoint().expect("checkpoint"),
            Step::Reopen { close } => self.reopen(close),
            Step::Compare => self.compare(),
        }
    }

    fn make(&mut self, dir: usize, name: &[u8], kind: usize, permissions: u32) {
        let dir = self.dir(dir);
        let file_type = [
            FileType::Regular,
            FileType::Directory,
            FileType::Fifo,
            FileType::Socket,
            FileType::CharDevice,
            FileType::BlockDevice,
        ][kind];
        let new = NewInode { rdev: 0x0010_0203, ..NewInode::new(file_type, permissions) };
        let made = self.volume.make(self.nodes[dir].ino, name, &new);
        if self.found(dir, name).is_some() {
            assert_eq!(made, Err(Error::Exists));
            return;
        }
        // Set-group-id is inherited by directories.
        let inherited = self.nodes[dir].permissions & 0o2000;
        let permissions =
            permissions | if file_type == FileType::Directory { inherited } else { 0 };
        let attr = made.expect("make");
        let node = self.add(attr.ino, file_type, permissions, dir);
        self.insert(dir, name, node);
    }

    fn symlink(&mut self, dir: usize, name: &[u8], length: usize) {
        let dir = self.dir(dir);
        let target = vec![b't'; length];
        let made = self.volume.symlink(self.nodes[dir].ino, name, &target, 0, 0);
        if self.found(dir, name).is_some() {
            assert_eq!(made, Err(Error::Exists));
            return;
        }
        let node = self.add(made.expect("symlink").ino, FileType::Symlink, 0o777, dir);
        self.nodes[node].target = target;
        self.insert(dir, name, node);
    }

    fn link(&mut self, node: usize, dir: usize, name: &[u8]) {
        let Some(node) = self.pick(node, |_| true) else { return };
        let dir = self.dir(dir);
        let linked = self.volume.link(self.nodes[node].ino, self.nodes[dir].ino, name);
        if self.nodes[node].is_dir() {
            assert_eq!(linked, Err(Error::NotPermitted));
        } else if self.found(dir, name).is_some() {
            assert_eq!(linked, Err(Error::Exists));
        } else if self.nodes[node].links == 0 && !self.nodes[node].linkable {
            assert_eq!(linked, Err(Error::NotFound));
        } else {
            self.nodes[node].links += 1;
            self.nodes[node].linkable = false;
            assert_eq!(linked.expect("link").links, self.nodes[node].links);
            self.insert(dir, name, node);
        }
    }

    fn rename_error(
        &self,
        (dir, name): (usize, &[u8]),
        (to, to_name): (usize, &[u8]),
        mode: RenameMode,
    ) -> Option<Error> {
        let loops = |moved: usize, new_parent: usize| {
            self.nodes[moved].is_dir() && self.is_below(new_parent, moved)
        };
        let invalid = Error::Invalid("a directory cannot be moved below itself");
        let Some(source) = self.found(dir, name) else { return Some(Error::NotFound) };
        if loops(source, to) {
            return Some(invalid);
        }
        let target = self.found(to, to_name);
        match (mode, target) {
            (RenameMode::Exchange, None) => Some(Error::NotFound),
            (RenameMode::Exchange, Some(other)) => loops(other, dir).then_some(invalid),
            (RenameMode::NoReplace, Some(_)) => Some(Error::Exists),
            (_, None) => None,
            (_, Some(victim)) if victim == source => None,
            (_, Some(victim)) => {
                let (source, victim) = (&self.nodes[source], &self.nodes[victim]);
                match (source.is_dir(), victim.is_dir()) {
                    (true, false) => Some(Error::NotDirectory),
                    (false, true) => Some(Error::IsDirectory),
                    (true, true) if !victim.entries.is_empty() => Some(Error::NotEmpty),
                    _ => None,
                }
            }
        }
    }

    fn rename(&mut self, from: (usize, &[u8]), to: (usize, &[u8]), mode: usize) {
        let whiteout = RenameMode::Whiteout { uid: 5, gid: 6 };
        let mode =
            [RenameMode::Replace, RenameMode::NoReplace, RenameMode::Exchange, whiteout][mode];
        let renamed =
            self.volume.rename(self.nodes[from.0].ino, from.1, self.nodes[to.0].ino, to.1, mode);
        if let Some(error) = self.rename_error(from, to, mode) {
            assert_eq!(renamed, Err(error));
            return;
        }
        assert_eq!(renamed, Ok(()));
        let source = self.found(from.0, from.1).expect("source");
        let target = self.found(to.0, to.1);
        if target == Some(source) {
            return;
        }
        self.take_out(from.0, from.1);
        if let Some(target) = target {
            self.take_out(to.0, to.1);
            if mode == RenameMode::Exchange {
                self.insert(from.0, from.1, target);
            } else {
                self.unname(target);
            }
        }
        self.insert(to.0, to.1, source);
        if mode == whiteout {
            let left = self.volume.lookup(self.nodes[from.0].ino, from.1).expect("a whiteout");
            assert_eq!((left.rdev, left.uid), (0, 5));
            let node = self.add(left.ino, FileType::CharDevice, 0, from.0);
            self.insert(from.0, from.1, node);
        }
    }

    fn set_attribute(&mut self, node: usize, name: &[u8], length: usize, mode: usize) {
        let Some(node) = self.pick(node, |_| true) else { return };
        let mode = [XattrMode::Set, XattrMode::Create, XattrMode::Replace][mode];
        let value = pattern(length as u64, length);
        let set = self.volume.setxattr(self.nodes[node].ino, name, &value, mode);
        let present = self.nodes[node].attributes.contains_key(name);
        let expected = if length > 4096 {
            Err(Error::AttributeTooLarge)
        } else if mode == XattrMode::Create && present {
            Err(Error::Exists)
        } else if mode == XattrMode::Replace && !present {
            Err(Error::NoAttribute)
        } else {
            Ok(())
        };
        assert_eq!(set, expected);
        if expected.is_ok() {
            self.nodes[node].attributes.insert(name.to_vec(), value);
        }
    }

    fn reopen(&mut self, close: bool) {
        if close {
            self.volume.close().expect("close");
        } else {
            self.volume.sync().expect("sync");
        }
        self.handles.clear();
        self.volume = open(&self.device, manual(256 * KIB));
        for node in &mut self.nodes {
            node.handles = 0;
        }
        self.compare();
    }

    fn compare(&self) {
        let alive = self.nodes.iter().filter(|node| node.is_alive()).count() as u64;
        assert_eq!(self.volume.statfs().inodes, alive);
        for node in &self.nodes {
            if !node.is_alive() {
                assert_eq!(self.volume.getattr(node.ino), Err(Error::NotFound));
                continue;
            }
            let attr = self.volume.getattr(node.ino).expect("getattr");
            assert_eq!(
                (attr.file_type, attr.permissions, attr.links),
                (node.file_type, node.permissions, node.links)
            );
            self.compare_attributes(node);
            if node.file_type == FileType::Symlink {
                assert_eq!(self.volume.readlink(node.ino), Ok(node.target.clone()));
            }
            if node.is_dir() {
                assert_eq!(attr.size_bytes, node.entries.len() as u64);
                assert_eq!(self.volume.parent(node.ino), Ok(self.nodes[node.parent].ino));
                let mut found = BTreeMap::new();
                self.volume
                    .readdir(node.ino, 0, &mut |entry| {
                        assert!(found.insert(entry.name, (entry.ino, entry.file_type)).is_none());
                        true
                    })
                    .expect("readdir");
                let expected: BTreeMap<_, _> = node
                    .entries
                    .iter()
                    .map(|(name, &child)| {
                        (name.clone(), (self.nodes[child].ino, self.nodes[child].file_type))
                    })
                    .collect();
                assert_eq!(found, expected);
            }
        }
    }

    fn compare_attributes(&self, node: &Node) {
        let mut listed = self.volume.listxattr(node.ino).expect("listxattr");
        listed.sort();
        assert!(listed.iter().eq(node.attributes.keys()));
        for (name, value) in &node.attributes {
            assert_eq!(self.volume.getxattr(node.ino, name).as_ref(), Ok(value));
        }
    }
}

fn config() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|text| text.parse().ok());
    ProptestConfig {
        cases: cases.unwrap_or(200),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn the_namespace_is_as_the_model_says(steps in prop::collection::vec(steps(), 1..200)) {
        let mut world = World::new();
        for step in &steps {
            world.apply(step);
        }
        world.compare();
        world.reopen(false);
        world.reopen(true);
    }
}
