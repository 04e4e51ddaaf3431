//! What there is of the files of one owner, and what a crash may leave of it (`docs/TESTING.md`, *The promise after a crash*).
//!
//! A [`World`] is what there is after one operation of the order, with all that a crash may leave of the data then. A [`History`] has the
//! worlds that may be found: those from the last acknowledged operation on. What a sync has made out of date is taken out of each.
//!
//! Every content and every size has a name of its own, that of what made it, and keeps it wherever it moves and whatever is cut off it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::ops::Range;
use std::sync::Arc;

pub const PAGE: u64 = 4096;
pub const EVERYTHING: Range<u64> = 0..u64::MAX;

/// A page's bytes; all have the same length.
pub type Bytes = Arc<[u8]>;

/// One content that a crash may leave.
#[derive(Debug, Clone)]
struct Version {
    name: u64,
    bytes: Bytes,
    /// The file has been this long while it was the content.
    reach: u64,
}

#[derive(Debug, Clone, Default)]
struct Page {
    /// Oldest first; the last is what a read gives.
    versions: Vec<Version>,
    /// The operation that last wrote to it.
    written: u64,
}

/// A regular file. Pages that it does not have are zeros.
#[derive(Debug, Clone, Default)]
pub struct Content {
    pub size: u64,
    /// Names, and sizes that a crash may leave; the last is `size`.
    sizes: Vec<(u64, u64)>,
    pages: BTreeMap<u64, Page>,
    pub xattrs: BTreeMap<String, Vec<u8>>,
    /// The last operation that touched it in any way; its data or size; anything but by a write; data or size but by a write.
    touched: u64,
    data_touched: u64,
    changed: u64,
    shaped: u64,
}

/// What is out of date since part of a file is durable.
pub struct Settled {
    names: BTreeSet<u64>,
    size: u64,
    sizes: BTreeSet<u64>,
}

fn zeros() -> Bytes {
    Arc::from([0; PAGE as usize])
}

fn zeroed(bytes: &Bytes, range: Range<usize>) -> Bytes {
    let mut copy = bytes.to_vec();
    copy[range].fill(0);
    Arc::from(copy)
}

fn pages_of(range: &Range<u64>) -> Range<u64> {
    range.start / PAGE..range.end.div_ceil(PAGE).max(range.start / PAGE)
}

impl Page {
    fn add(&mut self, new: Version) {
        self.versions.retain(|known| known.bytes != new.bytes);
        self.versions.push(new);
    }
}

/// Gives names.
#[derive(Debug, Default)]
pub struct Names(u64);

impl Names {
    pub fn next(&mut self) -> u64 {
        self.0 += 1;
        self.0
    }
}

impl Content {
    /// A new file, or one as it was found: durable as it is.
    pub fn durable(
        names: &mut Names,
        op: u64,
        bytes: &[u8],
        xattrs: BTreeMap<String, Vec<u8>>,
    ) -> Self {
        let mut made = Self { size: bytes.len() as u64, xattrs, ..Self::default() };
        made.sizes.push((names.next(), made.size));
        for (index, part) in bytes.chunks(PAGE as usize).enumerate() {
            let mut page = part.to_vec();
            page.resize(PAGE as usize, 0);
            if page.iter().any(|byte| *byte != 0) {
                let (name, reach) = (names.next(), made.size);
                let first = Version { name, bytes: Arc::from(page), reach };
                made.pages.insert(index as u64, Page { versions: vec![first], written: op });
            }
        }
        made.change(op);
        made
    }

    /// An operation with its place in the order changes attributes.
    pub fn change(&mut self, op: u64) {
        (self.touched, self.changed) = (op, op);
    }

    /// The same for data or size.
    fn reshape(&mut self, op: u64) {
        self.change(op);
        (self.data_touched, self.shaped) = (op, op);
    }

    /// What changes nothing that a user sees need not become durable.
    pub fn forget_touch_unless_changed(&mut self, before: &Self) {
        if self.size == before.size && self.read(EVERYTHING) == before.read(EVERYTHING) {
            (self.touched, self.data_touched) = (before.touched, before.data_touched);
            (self.changed, self.shaped) = (before.changed, before.shaped);
        }
    }

    fn set_size(&mut self, names: &mut Names, size: u64) {
        self.size = size;
        self.sizes = vec![(names.next(), size)];
    }

    /// What a read gives.
    pub fn read(&self, range: Range<u64>) -> Vec<u8> {
        let end = range.end.min(self.size);
        let mut bytes = vec![0; end.saturating_sub(range.start) as usize];
        for (index, page) in self.pages.range(pages_of(&(range.start..end))) {
            let (from, to) = (range.start.max(index * PAGE), end.min((index + 1) * PAGE));
            if let (true, Some(now)) = (from < to, page.versions.last()) {
                let source = (from - index * PAGE) as usize..(to - index * PAGE) as usize;
                let target = (from - range.start) as usize..(to - range.start) as usize;
                bytes[target].copy_from_slice(&now.bytes[source]);
            }
        }
        bytes
    }

    /// After a crash each page has it or not, and the file may be as long as before.
    pub fn write(&mut self, names: &mut Names, op: u64, offset: u64, data: &[u8]) {
        if data.is_empty() {
            return;
        }
        (self.touched, self.data_touched) = (op, op);
        let size = self.size;
        let end = offset + data.len() as u64;
        let reach = size.max(end);
        for index in pages_of(&(offset..end)) {
            let (from, to) = (offset.max(index * PAGE), end.min((index + 1) * PAGE));
            let page = self.pages.entry(index).or_default();
            page.written = op;
            if let Some(last) = page.versions.last_mut() {
                last.reach = last.reach.max(size);
            } else {
                let hole = Version { name: names.next(), bytes: zeros(), reach: size };
                page.versions.push(hole);
            }
            let mut bytes =
                page.versions.last().map_or_else(zeros, |now| now.bytes.clone()).to_vec();
            let place = (from - index * PAGE) as usize..(to - index * PAGE) as usize;
            bytes[place].copy_from_slice(&data[(from - offset) as usize..(to - offset) as usize]);
            page.add(Version { name: names.next(), bytes: Arc::from(bytes), reach });
        }
        if end > size {
            self.size = end;
            self.sizes.push((names.next(), end));
        }
    }

    pub fn truncate(&mut self, names: &mut Names, op: u64, size: u64) {
        self.reshape(op);
        self.set_size(names, size);
        drop(self.pages.split_off(&size.div_ceil(PAGE)));
        if let Some(page) = self.pages.get_mut(&(size / PAGE)) {
            for version in std::mem::take(&mut page.versions) {
                let bytes = zeroed(&version.bytes, (size % PAGE) as usize..PAGE as usize);
                page.add(Version { bytes, ..version });
            }
        }
    }

    /// Longer by an operation with its place in the order.
    pub fn grow(&mut self, names: &mut Names, op: u64, size: u64) {
        if size > self.size {
            self.reshape(op);
            self.set_size(names, size);
        }
    }

    /// Whole pages at the operation's place in the order; of parts of pages, a crash may leave either.
    pub fn zero(&mut self, names: &mut Names, op: u64, range: &Range<u64>) {
        let mut range = range.clone();
        if range.end >= self.size {
            range.end = range.end.next_multiple_of(PAGE);
        }
        let touched: Vec<u64> =
            self.pages.range(pages_of(&range)).map(|(index, _)| *index).collect();
        // What changes nothing need not become durable.
        if touched.is_empty() {
            return;
        }
        self.reshape(op);
        for index in touched {
            let from = range.start.saturating_sub(index * PAGE).min(PAGE) as usize;
            let to = (range.end - index * PAGE).min(PAGE) as usize;
            let Some(page) = self.pages.get_mut(&index) else { continue };
            if from == 0 && to as u64 == PAGE {
                self.pages.remove(&index);
                continue;
            }
            page.written = op;
            let known = page.versions.clone();
            let newest = known.len() - 1;
            for (place, version) in known.into_iter().enumerate() {
                let name = if place == newest { names.next() } else { version.name };
                let bytes = zeroed(&version.bytes, from..to);
                page.add(Version { name, bytes, ..version });
            }
        }
    }

    pub fn collapse(&mut self, names: &mut Names, op: u64, range: &Range<u64>) {
        self.reshape(op);
        let moved = self.pages.split_off(&(range.end / PAGE));
        drop(self.pages.split_off(&(range.start / PAGE)));
        let distance = (range.end - range.start) / PAGE;
        self.pages.extend(moved.into_iter().map(|(index, page)| (index - distance, page)));
        self.set_size(names, self.size - distance * PAGE);
    }

    pub fn insert(&mut self, names: &mut Names, op: u64, start: u64, length: u64) {
        self.reshape(op);
        let moved = self.pages.split_off(&(start / PAGE));
        self.pages.extend(moved.into_iter().map(|(index, page)| (index + length / PAGE, page)));
        self.set_size(names, self.size + length);
    }

    /// The size that is durable with `range`.
    fn covered(&self, range: &Range<u64>) -> u64 {
        let pages = pages_of(range);
        if pages.start.saturating_mul(PAGE) >= self.size {
            return 0;
        }
        pages.end.saturating_mul(PAGE).min(self.size)
    }

    /// What is out of date once `range` is durable as it is now.
    fn settled(&self, range: &Range<u64>) -> Settled {
        let pages = self.pages.range(pages_of(range));
        let older = pages.flat_map(|(_, page)| &page.versions[..page.versions.len() - 1]);
        Settled {
            names: older.map(|version| version.name).collect(),
            size: self.covered(range),
            sizes: self.sizes.iter().map(|(name, _)| *name).collect(),
        }
    }

    fn is_affected(&self, settled: &Settled) -> bool {
        let is_outdated = |known: &Version| settled.names.contains(&known.name);
        self.pages.values().any(|page| page.versions.iter().any(is_outdated))
            || self
                .sizes
                .iter()
                .any(|(name, size)| *size < settled.size && settled.sizes.contains(name))
    }

    fn apply(&mut self, settled: &Settled) {
        for page in self.pages.values_mut() {
            let Some(now) = page.versions.last().map(|now| now.name) else { continue };
            page.versions.retain(|known| known.name == now || !settled.names.contains(&known.name));
        }
        for (name, size) in &mut self.sizes {
            if settled.sizes.contains(name) {
                *size = (*size).max(settled.size);
            }
        }
    }

    /// From this operation on `range` is as it is now.
    pub fn settle(&mut self, range: &Range<u64>) {
        let settled = self.settled(range);
        self.apply(&settled);
    }

    /// Why a crash may not leave `bytes`.
    pub fn refuses(&self, bytes: &[u8]) -> Option<String> {
        let size = bytes.len() as u64;
        let sizes = || self.sizes.iter().map(|(_, size)| *size);
        let (least, most) = (sizes().min().unwrap_or(0), sizes().max().unwrap_or(0));
        let is_between = least < size && size < most && size.is_multiple_of(PAGE);
        if !is_between && !sizes().any(|known| known == size) {
            let known: Vec<u64> = sizes().collect();
            return Some(format!("a size of {size}, where {known:?} may be"));
        }
        for (index, part) in bytes.chunks(PAGE as usize).enumerate() {
            let is_end = size > least && (size - 1) / PAGE == index as u64;
            let versions = self.pages.get(&(index as u64)).map_or(&[][..], |page| &page.versions);
            let last = versions.last().map_or(0, |version| version.name);
            let reaches = |version: &&Version| {
                let reach = if version.name == last { self.size } else { version.reach };
                !is_end || version.reach.max(reach) >= size
            };
            let is_it = |version: &Version| version.bytes[..part.len()] == *part;
            let is_zero = versions.is_empty() && part.iter().all(|byte| *byte == 0);
            if !is_zero && !versions.iter().filter(reaches).any(is_it) {
                let may: Vec<String> =
                    versions.iter().map(|known| describe(&known.bytes)).collect();
                let (is, may) = (describe(part), may.join(", "));
                return Some(format!("page {index} of {size} bytes is {is}, where [{may}] may be"));
            }
        }
        None
    }
}

/// A page in a few words: where its words change, and from what to what.
fn describe(bytes: &[u8]) -> String {
    let mut text = String::new();
    let mut last = None;
    for (index, word) in bytes.chunks(8).enumerate() {
        let mut whole = [0; 8];
        whole[..word.len()].copy_from_slice(word);
        let source = u64::from_le_bytes(whole) >> 32;
        if last != Some(source) {
            let _ = write!(text, "{}:{source:x} ", index * 8);
            last = Some(source);
        }
        if text.len() > 120 {
            return text + "...";
        }
    }
    text
}

/// What an owner's directory holds after one operation.
#[derive(Debug, Clone, Default)]
pub struct World {
    pub op: u64,
    /// The last that changed the names.
    pub named: u64,
    pub names: BTreeMap<String, u64>,
    pub files: BTreeMap<u64, Arc<Content>>,
    /// There is part of an append of this file that has failed: a sync of the file ends that.
    part_of: Option<u64>,
}

/// What was found in the directory: by name, the inode, bytes and attributes.
pub type Found = BTreeMap<String, (u64, Vec<u8>, BTreeMap<String, Vec<u8>>)>;

impl World {
    pub fn file(&mut self, file: u64) -> &mut Content {
        Arc::make_mut(self.files.entry(file).or_default())
    }

    /// What a crash that leaves this world may not leave.
    fn refuses(&self, found: &Found) -> Option<String> {
        if !found.keys().eq(self.names.keys()) {
            let found: Vec<&String> = found.keys().collect();
            return Some(format!("{found:?}, where {:?} are", self.names.keys()));
        }
        let mut inodes = BTreeMap::new();
        for ((name, (ino, bytes, xattrs)), file) in found.iter().zip(self.names.values()) {
            if inodes.insert(file, ino).is_some_and(|other| other != ino) {
                return Some(format!("{name} is not the same file as its other name"));
            }
            let content = &self.files[file];
            if content.xattrs != *xattrs {
                return Some(format!("{name} has other extended attributes"));
            }
            if let Some(why) = content.refuses(bytes) {
                return Some(format!("{name} has {why}"));
            }
        }
        None
    }
}

/// What a sync has promised.
#[derive(Debug, Clone)]
pub enum Promise {
    /// Everything, data too.
    All,
    /// All operations up to the moment.
    Prefix,
    /// The directory.
    Directory,
    /// A file, or a range of it; `data_only`: what touched its data or size.
    File { file: u64, range: Range<u64>, data_only: bool },
}

/// The worlds that a crash may leave.
#[derive(Debug, Default)]
pub struct History {
    worlds: Vec<World>,
    pub acknowledged: u64,
    pub ops: u64,
    pub names: Names,
}

impl History {
    pub fn new() -> Self {
        Self { worlds: vec![World::default()], ..Self::default() }
    }

    /// What there is.
    pub fn now(&self) -> &World {
        &self.worlds[self.worlds.len() - 1]
    }

    /// Begins an operation: its number, and a world to apply it to.
    pub fn begin(&mut self) -> (u64, World) {
        self.ops += 1;
        (self.ops, World { op: self.ops, ..self.now().clone() })
    }

    /// An operation with its place in the order has happened.
    pub fn push(&mut self, world: World) {
        self.worlds.push(world);
    }

    /// A write: of a crash that leaves no other operation, all that it left before may be left.
    pub fn replace(&mut self, world: World) {
        self.worlds.pop();
        self.worlds.push(world);
    }

    /// A crash may leave this as well: something in the middle of an operation, or a part of an append of `part_of` that has failed. It counts
    /// as what there was before.
    pub fn push_middle(&mut self, world: World, part_of: Option<u64>) {
        let now = self.now().clone();
        self.worlds.push(World { op: now.op, part_of, ..world });
        self.worlds.push(now);
    }

    /// Every file's data is as it is now, in what comes from this operation on.
    pub fn settle_all(world: &mut World, range: &Range<u64>) {
        for content in world.files.values_mut() {
            Arc::make_mut(content).settle(range);
        }
    }

    /// What was promised when `then` was the present holds.
    pub fn acknowledge(&mut self, then: &World, promise: &Promise) {
        let (op, parts): (u64, Vec<(u64, Range<u64>)>) = match promise {
            Promise::All => (then.op, then.files.keys().map(|file| (*file, EVERYTHING)).collect()),
            Promise::Prefix => (then.op, Vec::new()),
            Promise::Directory => (then.named, Vec::new()),
            Promise::File { file, range, data_only } => {
                let Some(content) = then.files.get(file) else { return };
                let op = match (*range == EVERYTHING, data_only) {
                    (true, false) => content.touched,
                    (true, true) => content.data_touched,
                    (false, _) => {
                        let pages = content.pages.range(pages_of(range));
                        let written = pages.map(|(_, page)| page.written).max().unwrap_or(0);
                        written.max(if *data_only { content.shaped } else { content.changed })
                    }
                };
                (op, vec![(*file, range.clone())])
            }
        };
        self.acknowledged = self.acknowledged.max(op);
        for (file, range) in parts {
            let Some(content) = then.files.get(&file) else { continue };
            let settled = content.settled(&range);
            for world in &mut self.worlds {
                if let Some(content) = world.files.get_mut(&file)
                    && content.is_affected(&settled)
                {
                    Arc::make_mut(content).apply(&settled);
                }
            }
            if range == EVERYTHING {
                let is_over = |world: &World| world.part_of == Some(file) && world.op <= then.op;
                self.worlds.retain(|world| !is_over(world));
            }
        }
        let acknowledged = self.acknowledged;
        let newest = self.worlds.len() - 1;
        let mut place = 0..;
        self.worlds.retain(|world| place.next() == Some(newest) || world.op >= acknowledged);
    }

    /// What was found after a crash is what there is from now on; or what may have been found, and why it is none of that.
    pub fn adopt(&mut self, found: &Found) -> Result<(), String> {
        let refusals: Vec<String> = (self.worlds.iter())
            .filter_map(|world| Some(format!("{}: {}", world.op, world.refuses(found)?)))
            .collect();
        if refusals.len() == self.worlds.len() {
            let text = refusals.join("\n  ");
            return Err(format!("acknowledged {} of {}:\n  {text}", self.acknowledged, self.ops));
        }
        let mut world = World { op: self.ops, named: self.ops, ..World::default() };
        let mut files = BTreeMap::new();
        for (name, (ino, bytes, xattrs)) in found {
            let file = *files.entry(*ino).or_insert_with(|| self.names.next());
            world.names.insert(name.clone(), file);
            let content = Content::durable(&mut self.names, self.ops, bytes, xattrs.clone());
            world.files.entry(file).or_insert_with(|| Arc::new(content));
        }
        self.acknowledged = self.ops;
        self.worlds = vec![world];
        Ok(())
    }
}
