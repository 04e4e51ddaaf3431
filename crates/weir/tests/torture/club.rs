//! Threads that share files as those of a database do: each has pages of its own in them, an attribute, and a file that it replaces, and all
//! append to one log. What one of them syncs is durable for all; who asks for durability is often not who hears of it.
//!
//! All that is theirs has *versions*, which only its owner makes, one after the other. So it is known exactly what a reader may see beside the
//! writers, and what a crash may leave: a version that was there when somebody was last promised that it is durable, or a later one.
//!
//! Moreover: the two pages of a *pair* are only written by batches, and never show different versions after a crash; a page *after* is
//! written when a barrier has followed the page *before*, and is never ahead of that.
//!
//! Locks: all are leaves, but for `Shared::cutting`.

mod member;
mod tickets;

use crate::common::Random;
use crate::disk::Disk;
use crate::{Stage, lock};
use member::{Member, contents};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, RwLock};
use weir::*;

pub const PAGE: u64 = 4096;
const PAGES_OF_MEMBER: u64 = 3;
/// From so many bytes on the log begins anew with the next life.
const LONG_LOG_BYTES: usize = 200 << 10;
/// The files that all write to. What is in the last is told by records.
pub const FILES: [&str; 3] = ["/club/a", "/club/b", "/club/log"];
const LOG: usize = 2;
/// One has takers who wait for a while, one has those who wait for its descriptor, and one has a thread of its own.
const QUEUES: usize = 3;
const OWN_THREAD: usize = 2;

/// What a version is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A page of the file, as every write leaves it, or a hole.
    Plain(usize),
    /// One of the two that batches write.
    Pair(usize),
    /// What comes before a barrier, in the first file, and after it, in the second.
    Before,
    After,
    /// An extended attribute of the first file.
    Attribute,
    /// A file that is replaced as a whole.
    Manifest,
}

const KINDS: [Kind; 8] = [
    Kind::Plain(0),
    Kind::Plain(1),
    Kind::Pair(0),
    Kind::Pair(1),
    Kind::Before,
    Kind::After,
    Kind::Attribute,
    Kind::Manifest,
];
const PAIR: [usize; 2] = [2, 3];
const BEFORE: usize = 4;
const AFTER: usize = 5;
const ATTRIBUTE: usize = 6;
const MANIFEST: usize = 7;

impl Kind {
    /// The file, and the page among those of the member.
    fn page(self) -> Option<(usize, u64)> {
        match self {
            Self::Plain(file) => Some((file, 0)),
            Self::Pair(file) => Some((file, 1)),
            Self::Before => Some((0, 2)),
            Self::After => Some((1, 2)),
            Self::Attribute | Self::Manifest => None,
        }
    }

    /// It is changed by operations with their places in the order.
    fn is_operation(self) -> bool {
        matches!(self, Self::Pair(_) | Self::Attribute | Self::Manifest)
    }
}

/// The versions that a crash may leave, oldest first, and whether each is a hole.
#[derive(Debug)]
struct Versions {
    /// The newest that was begun.
    last: u64,
    /// What a reader sees.
    visible: u64,
    may: Vec<(u64, bool)>,
}

struct Item {
    kind: Kind,
    member: u64,
    versions: Mutex<Versions>,
}

impl Item {
    /// The file and the bytes that it has there.
    fn place(&self) -> Option<(usize, Range<u64>)> {
        let (file, page) = self.kind.page()?;
        let first = (self.member * PAGES_OF_MEMBER + page) * PAGE;
        Some((file, first..first + PAGE))
    }

    /// Its owner is about to make another version.
    fn begin(&self, is_hole: bool) -> u64 {
        let mut versions = lock(&self.versions);
        versions.last += 1;
        let last = versions.last;
        versions.may.push((last, is_hole));
        last
    }

    fn done(&self, version: u64) {
        lock(&self.versions).visible = version;
    }

    /// It has not happened.
    fn refused(&self, version: u64) {
        lock(&self.versions).may.retain(|(known, _)| *known != version);
    }

    fn visible(&self) -> u64 {
        lock(&self.versions).visible
    }

    fn acknowledge(&self, version: u64) {
        lock(&self.versions).may.retain(|(known, _)| *known >= version);
    }

    /// What a crash has left is all that there is.
    fn adopt(&self, found: Shown) -> Result<u64, String> {
        let mut versions = lock(&self.versions);
        let is_it = |(version, is_hole): &&(u64, bool)| found.is(*version, *is_hole);
        let Some(&known) = versions.may.iter().rev().find(is_it) else {
            let (kind, member, may) = (self.kind, self.member, &versions.may);
            return Err(format!("{kind:?} of {member} is {found:?}, where {may:?} may be"));
        };
        versions.may = vec![known];
        versions.visible = known.0;
        Ok(known.0)
    }
}

/// What somebody has seen of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    /// Nothing, or zeros.
    Hole,
    Version(u64),
    /// No version at all.
    Broken,
}

impl Shown {
    fn is(self, version: u64, is_hole: bool) -> bool {
        if is_hole { self == Self::Hole } else { self == Self::Version(version) }
    }
}

/// Bytes that tell whose they are, which version, and where.
fn pattern(owner: u64, version: u64, length: u64) -> Vec<u8> {
    let word = |place: u64| (owner << 56) | ((version & 0xff_ffff) << 32) | place | 1 << 31;
    (0..length).map(|at| word(at / 8).to_le_bytes()[(at % 8) as usize]).collect()
}

/// Which version of what `owner` has these bytes are.
fn shown(owner: u64, bytes: &[u8], length: impl Fn(u64) -> u64) -> Shown {
    if bytes.iter().all(|byte| *byte == 0) {
        return Shown::Hole;
    }
    let Some(first) = bytes.first_chunk() else { return Shown::Broken };
    let version = (u64::from_le_bytes(*first) >> 32) & 0xff_ffff;
    let is_whole = bytes == pattern(owner, version, length(version));
    if is_whole { Shown::Version(version) } else { Shown::Broken }
}

fn manifest_bytes(version: u64) -> u64 {
    100 + version * 7919 % 20_000
}

/// An append.
struct Record {
    offset: u64,
    owner: u64,
    version: u64,
    length: u64,
    is_durable: bool,
}

impl Record {
    fn bytes(&self) -> Vec<u8> {
        pattern(self.owner, self.version, self.length)
    }

    /// What was found at its place is it, or, if nobody was promised that it is, each page's part of it or nothing.
    fn refuses(&self, found: &[u8]) -> bool {
        let end = (self.offset + self.length) as usize;
        let mut found = found[found.len().min(self.offset as usize)..found.len().min(end)].to_vec();
        found.resize(self.length as usize, 0);
        let bytes = self.bytes();
        if self.is_durable {
            return found != bytes;
        }
        let mut from = 0;
        while from < self.length {
            let to = ((self.offset + from) / PAGE + 1) * PAGE - self.offset;
            let part = from as usize..to.min(self.length) as usize;
            let is_zero = found[part.clone()].iter().all(|byte| *byte == 0);
            if !is_zero && found[part.clone()] != bytes[part] {
                return true;
            }
            from = to;
        }
        false
    }
}

#[derive(Default)]
struct Records {
    known: Vec<Record>,
    /// How often the log was cut: what is promised of its records before that is said of others.
    cuts: u64,
    /// An append was refused, or has come to nobody knows what: something of it may lie where others are.
    has_failed: bool,
}

/// What a promise is of.
#[derive(Debug, Clone)]
enum Promise {
    All,
    /// All operations of the order.
    Operations,
    /// A file; `data_only`: without its attributes.
    File {
        file: usize,
        range: Range<u64>,
        data_only: bool,
    },
}

/// What was visible when a promise was asked for.
#[derive(Debug, Default)]
pub struct Seen {
    items: Vec<(usize, u64)>,
    /// How often the log had been cut, and records.
    records: (u64, usize),
}

/// What all members share, with callbacks too.
pub struct Shared {
    items: Vec<Item>,
    records: Mutex<Records>,
    /// Whoever cuts the log is alone with it: the others append and read. Held over calls, and so the only lock that is no leaf; callbacks do
    /// not take it.
    cutting: RwLock<()>,
    queues: [Arc<CompletionQueue>; QUEUES],
    /// What was delivered and not taken.
    delivered: [Mutex<BTreeMap<u64, Seen>>; QUEUES],
    /// Numbers of deliveries and records.
    next: AtomicU64,
    /// Tickets that somebody may wait for.
    kept: Mutex<Vec<(SyncTicket, Seen)>>,
    /// That have not been called.
    callbacks: AtomicU64,
}

impl Shared {
    fn see(&self, promise: &Promise) -> Seen {
        let all = || {
            let records = lock(&self.records);
            (records.cuts, records.known.len())
        };
        let records = match promise {
            Promise::All => all(),
            Promise::File { file: LOG, range, .. } if *range == (0..u64::MAX) => all(),
            _ => (0, 0),
        };
        let is_meant = |item: &Item| match promise {
            Promise::All => true,
            Promise::Operations => item.kind.is_operation(),
            Promise::File { file, range, data_only } => match item.place() {
                Some((of, bytes)) => {
                    of == *file && bytes.start < range.end && range.start < bytes.end
                }
                None => item.kind == Kind::Attribute && *file == 0 && !data_only,
            },
        };
        let items = self.items.iter().enumerate().filter(|(_, item)| is_meant(item));
        Seen { items: items.map(|(index, item)| (index, item.visible())).collect(), records }
    }

    fn acknowledge(&self, seen: &Seen) {
        for (index, version) in &seen.items {
            self.items[*index].acknowledge(*version);
        }
        let (cuts, count) = seen.records;
        let mut records = lock(&self.records);
        if records.cuts == cuts {
            for record in &mut records.known[..count] {
                record.is_durable = true;
            }
        }
    }
}

pub struct Club {
    pub members: u64,
    shared: Arc<Shared>,
    /// What a close that has begun makes durable.
    covered: Mutex<Seen>,
    pub stop_reaper: AtomicBool,
}

impl Club {
    pub fn new(members: u64) -> Self {
        let items = (0..members).flat_map(|member| {
            let versions = || Versions { last: 0, visible: 0, may: vec![(0, true)] };
            KINDS.map(|kind| Item { kind, member, versions: Mutex::new(versions()) })
        });
        let shared = Shared {
            items: items.collect(),
            records: Mutex::default(),
            cutting: RwLock::default(),
            queues: std::array::from_fn(|_| CompletionQueue::new().expect("a queue")),
            delivered: std::array::from_fn(|_| Mutex::default()),
            next: AtomicU64::new(0),
            kept: Mutex::default(),
            callbacks: AtomicU64::new(0),
        };
        let stop_reaper = AtomicBool::new(false);
        Self { members, shared: Arc::new(shared), covered: Mutex::default(), stop_reaper }
    }

    pub fn member<'a>(
        &self,
        number: u64,
        dice: Random,
        volume: &'a Volume,
        disk: &'a Arc<Disk>,
        stage: &'a Stage,
    ) -> Member<'a> {
        let (shared, files) = (self.shared.clone(), BTreeMap::new());
        Member { number, dice, volume, disk, stage, shared, files, held: None, barred: 0 }
    }

    /// The club's directory and files.
    pub fn make(&self, volume: &Volume) -> Result<()> {
        volume.create_dir("/club", 0o755)?;
        for (index, path) in FILES.iter().enumerate() {
            let file = volume.open_file(path, OpenFlags::CREATE_NEW)?;
            if index != LOG {
                file.truncate(self.bytes())?;
            }
        }
        Ok(())
    }

    /// What all pages of all members take.
    fn bytes(&self) -> u64 {
        self.members * PAGES_OF_MEMBER * PAGE
    }

    /// What is there must be what may be there, and is durable from now on.
    pub fn check(&self, volume: &Volume) -> Result<(), String> {
        let failed = |error: Error| format!("the club: cannot be read: {error}");
        let files = FILES.map(|path| volume.open_file(path, OpenFlags::READ_WRITE));
        let mut bytes = Vec::new();
        for file in files {
            bytes.push(contents(&file.map_err(failed)?).map_err(failed)?);
        }
        let mut versions = Vec::new();
        for (index, item) in self.shared.items.iter().enumerate() {
            let seen = found(volume, index as u64, item, &bytes).map_err(failed)?;
            versions.push(item.adopt(seen)?);
        }
        for (member, found) in versions.chunks(KINDS.len()).enumerate() {
            if found[PAIR[0]] != found[PAIR[1]] {
                return Err(format!("half of a batch of member {member} is there: {found:?}"));
            }
            if found[AFTER] > found[BEFORE] {
                return Err(format!("a barrier of member {member} was passed: {found:?}"));
            }
        }
        let mut records = lock(&self.shared.records);
        let is_open = records.has_failed;
        for record in &records.known {
            if (record.is_durable || !is_open) && record.refuses(&bytes[LOG]) {
                let Record { offset, owner, version, length, is_durable } = record;
                let size = bytes[LOG].len();
                return Err(format!(
                    "record {version} of {owner}, {length} bytes at {offset} of {size}, durable \
                     {is_durable}, is not there"
                ));
            }
        }
        records.has_failed = false;
        records.cuts += 1;
        if bytes[LOG].len() > LONG_LOG_BYTES {
            records.known.clear();
            let file = volume.open_file(FILES[LOG], OpenFlags::READ_WRITE).map_err(failed)?;
            file.truncate(0).and_then(|()| volume.sync()).map_err(failed)?;
            return Ok(());
        }
        // What is there from now on stays, and of the others nothing is known.
        records.known.retain_mut(|record| {
            record.is_durable = true;
            !record.refuses(&bytes[LOG])
        });
        Ok(())
    }

    /// The volume is about to be closed.
    pub fn is_closing(&self) {
        *lock(&self.covered) = self.shared.see(&Promise::All);
    }

    /// It was.
    pub fn was_closed(&self) {
        self.shared.acknowledge(&lock(&self.covered));
    }
}

/// What there is of an item of number `owner`.
fn found(volume: &Volume, owner: u64, item: &Item, bytes: &[Vec<u8>]) -> Result<Shown> {
    if let Some((file, range)) = item.place() {
        let page = &bytes[file][range.start as usize..range.end as usize];
        return Ok(shown(owner, page, |_| PAGE));
    }
    let there = if item.kind == Kind::Attribute {
        let ino = volume.resolve(FILES[0], true)?;
        volume.getxattr(ino, attribute(item.member).as_bytes())
    } else {
        let opened = volume.open_file(manifest(item.member), OpenFlags::READ_WRITE);
        opened.and_then(|file| contents(&file))
    };
    match there {
        Ok(there) if item.kind == Kind::Attribute => Ok(shown(owner, &there, |_| 64)),
        // A manifest is never empty, and never all zeros.
        Ok(there) => Ok(match shown(owner, &there, manifest_bytes) {
            Shown::Hole => Shown::Broken,
            other => other,
        }),
        Err(Error::NotFound | Error::NoAttribute) => Ok(Shown::Hole),
        Err(error) => Err(error),
    }
}

fn attribute(member: u64) -> String {
    format!("user.m{member}")
}

fn manifest(member: u64) -> String {
    format!("/club/manifest{member}")
}
