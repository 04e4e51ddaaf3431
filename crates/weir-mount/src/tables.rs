//! What the kernel refers to: inodes it has looked up, and open files.
//!
//! Invariants: an inode with a positive lookup count is held in the engine, so its number stays
//! its own even when the last name goes; a handle number is never given out twice; each inode of a
//! shard has one place in the order that [`InodeTable::idle`] goes round.
//!
//! Lock order: a shard's lock, then the engine. Holds and files are dropped outside of the locks,
//! because dropping the last one of an unlinked file purges it.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use weir::sync::{Mutex, RwLock};
use weir::{File, InodeHold, Volume};

use crate::errno::Errno;
use crate::ops::{Handle, OpResult, Open};

const SHARDS: usize = 64;
/// Inodes that are looked at under one hold of a shard's lock when some are to be forgotten.
const LOOK_AT: usize = 128;

/// What is known of an inode's attributes without asking the engine.
///
/// `epoch` grows before and after each change that could invalidate the facts below; a fact is
/// recorded with the epoch read *before* it was established, and holds while the epoch is the same.
#[derive(Debug)]
pub struct Facts {
    epoch: AtomicU64,
    /// Grows with the epoch of any inode.
    changes: Arc<AtomicU64>,
    /// Neither set-user-id nor set-group-id nor `security.capability`.
    unprivileged_at: AtomicU64,
    /// No default ACL.
    no_default_acl_at: AtomicU64,
    /// No access ACL.
    no_access_acl_at: AtomicU64,
}

/// Something that can be known of an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fact {
    /// Writes have no privileges to take away.
    Unprivileged,
    /// New entries inherit no list.
    NoDefaultAcl,
    /// The permission bits are all there is.
    NoAccessAcl,
}

impl Facts {
    fn new(changes: &Arc<AtomicU64>) -> Self {
        Self {
            epoch: AtomicU64::new(1),
            changes: Arc::clone(changes),
            unprivileged_at: AtomicU64::new(0),
            no_default_acl_at: AtomicU64::new(0),
            no_access_acl_at: AtomicU64::new(0),
        }
    }
    fn cell(&self, fact: Fact) -> &AtomicU64 {
        match fact {
            Fact::Unprivileged => &self.unprivileged_at,
            Fact::NoDefaultAcl => &self.no_default_acl_at,
            Fact::NoAccessAcl => &self.no_access_acl_at,
        }
    }
    /// The epoch to establish a fact in.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }
    /// Whether `fact` is known to hold.
    pub fn holds(&self, fact: Fact) -> bool {
        self.cell(fact).load(Ordering::SeqCst) == self.epoch()
    }
    /// `fact` was found to hold by someone who started at `epoch`.
    pub fn establish(&self, fact: Fact, epoch: u64) {
        self.cell(fact).store(epoch, Ordering::SeqCst);
    }
    /// Runs a change that could end any fact.
    pub fn changing<T>(&self, change: impl FnOnce() -> T) -> T {
        self.changes();
        let result = change();
        self.changes();
        result
    }
    /// To be called before and after a change that could end any fact.
    pub fn changes(&self) {
        self.changes.fetch_add(1, Ordering::SeqCst);
        self.epoch.fetch_add(1, Ordering::SeqCst);
    }
    /// Runs a change that leaves `fact` as it is, and answers whether that is known to hold.
    pub fn changing_but<T>(&self, fact: Fact, change: impl FnOnce(bool) -> T) -> T {
        let (held, before) = (self.holds(fact), self.epoch());
        let result = self.changing(|| change(held));
        // Unless somebody else changed something meanwhile.
        if held {
            self.establish(fact, before + 2);
        }
        result
    }
}

struct Node {
    lookups: u64,
    facts: Arc<Facts>,
    hold: InodeHold,
    /// Where it is in the shard's `order`.
    place: usize,
    /// The server was asked about it since it was last looked at.
    is_used: bool,
}

#[derive(Default)]
struct Shard {
    nodes: HashMap<u64, Node>,
    /// The same inodes, to go round.
    order: Vec<u64>,
    /// The next place in `order` to look at.
    hand: usize,
}

impl Shard {
    fn insert(&mut self, ino: u64, facts: Facts, hold: InodeHold) {
        let place = self.order.len();
        self.order.push(ino);
        let facts = Arc::new(facts);
        self.nodes.insert(ino, Node { lookups: 1, facts, hold, place, is_used: false });
    }

    fn remove(&mut self, ino: u64) -> Option<Node> {
        let node = self.nodes.remove(&ino)?;
        debug_assert_eq!(self.order[node.place], ino);
        self.order.swap_remove(node.place);
        // Whoever was last has taken its place.
        let moved = self.order.get(node.place).and_then(|last| self.nodes.get_mut(last));
        if let Some(moved) = moved {
            moved.place = node.place;
        }
        Some(node)
    }

    /// Looks at some inodes, and adds those that were not used since the last time to `idle`, up to `most` in all. Answers how many it
    /// has looked at.
    fn idle(&mut self, most: usize, idle: &mut Vec<u64>) -> usize {
        let look_at = LOOK_AT.min(self.order.len());
        for seen in 0..look_at {
            if idle.len() >= most {
                return seen;
            }
            self.hand = if self.hand < self.order.len() { self.hand } else { 0 };
            let ino = self.order[self.hand];
            self.hand += 1;
            let used = self.nodes.get_mut(&ino).map(|node| std::mem::take(&mut node.is_used));
            if used == Some(false) && ino != Volume::ROOT {
                idle.push(ino);
            }
        }
        look_at
    }
}

/// Inodes that the kernel knows.
pub struct InodeTable {
    shards: Vec<Mutex<Shard>>,
    /// How many there are in all shards.
    known: AtomicUsize,
    /// How many were forgotten since there is this table.
    forgotten: AtomicU64,
    /// The shard whose turn it is in [`Self::idle`].
    turn: AtomicUsize,
    /// Changes of any inode that could end facts.
    changes: Arc<AtomicU64>,
}

impl Default for InodeTable {
    fn default() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            known: AtomicUsize::new(0),
            forgotten: AtomicU64::new(0),
            turn: AtomicUsize::new(0),
            changes: Arc::default(),
        }
    }
}

impl InodeTable {
    fn shard(&self, ino: u64) -> &Mutex<Shard> {
        &self.shards[(ino % SHARDS as u64) as usize]
    }

    /// Counts one more reference of the kernel.
    pub fn acquire(&self, volume: &Volume, ino: u64) -> weir::Result<()> {
        let mut shard = self.shard(ino).lock();
        if let Some(node) = shard.nodes.get_mut(&ino) {
            node.lookups += 1;
            node.is_used = true;
            return Ok(());
        }
        let hold = volume.hold(ino)?;
        shard.insert(ino, Facts::new(&self.changes), hold);
        self.known.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// To be read before an inode is made, for [`Self::establish_new`].
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }

    /// `facts` hold of the inode that was made, and acquired, since there were so many `changes`. That says nothing where others changed
    /// something meanwhile: it could have been this inode, even if nobody was told of it yet.
    pub fn establish_new(&self, ino: u64, facts: impl Iterator<Item = Fact>, changes: u64) {
        let known = self.facts(ino);
        let epoch = known.epoch();
        if self.changes() == changes {
            facts.for_each(|fact| known.establish(fact, epoch));
        }
    }

    /// The kernel gives `count` references back.
    pub fn forget(&self, ino: u64, count: u64) {
        let mut shard = self.shard(ino).lock();
        let Some(node) = shard.nodes.get_mut(&ino) else { return };
        node.lookups = node.lookups.saturating_sub(count);
        if node.lookups > 0 {
            return;
        }
        let node = shard.remove(ino);
        drop(shard);
        self.known.fetch_sub(1, Ordering::Relaxed);
        self.forgotten.fetch_add(1, Ordering::Relaxed);
        drop(node.map(|node| node.hold));
    }

    /// What is known of `ino`. For inodes the kernel never looked up (the root) nothing is, and
    /// nothing is kept.
    pub fn facts(&self, ino: u64) -> Arc<Facts> {
        let mut shard = self.shard(ino).lock();
        let known = shard.nodes.get_mut(&ino).map(|node| {
            node.is_used = true;
            Arc::clone(&node.facts)
        });
        known.unwrap_or_else(|| Arc::new(Facts::new(&self.changes)))
    }

    /// Whether the kernel knows `ino`, so that it is in memory.
    pub fn knows(&self, ino: u64) -> bool {
        self.shard(ino).lock().nodes.contains_key(&ino)
    }

    /// Inodes the kernel knows.
    pub fn count(&self) -> usize {
        self.known.load(Ordering::Relaxed)
    }

    /// Inodes the kernel has forgotten so far.
    pub fn forgotten(&self) -> u64 {
        self.forgotten.load(Ordering::Relaxed)
    }

    /// At most `most` inodes that the server was not asked about since this last came round to them. Looks at so many as the shards
    /// hold, few at a time under their locks, and goes on there the next time: no answer means that all were used.
    pub fn idle(&self, most: usize) -> Vec<u64> {
        let mut idle = Vec::new();
        let (mut looked_at, all) = (0, self.count());
        let mut empty = 0;
        while looked_at < all && idle.len() < most && empty < SHARDS {
            let turn = self.turn.fetch_add(1, Ordering::Relaxed) % SHARDS;
            let seen = self.shards[turn].lock().idle(most, &mut idle);
            looked_at += seen;
            empty = if seen == 0 { empty + 1 } else { 0 };
        }
        idle
    }

    /// Forgets everything: the connection is gone.
    pub fn clear(&self) {
        for shard in &self.shards {
            let shard = std::mem::take(&mut *shard.lock());
            self.known.fetch_sub(shard.nodes.len(), Ordering::Relaxed);
            drop(shard);
        }
    }
}

/// An open file.
pub struct OpenFile {
    /// The engine's handle.
    pub file: File,
    /// What is known of its inode.
    pub facts: Arc<Facts>,
    /// How it was opened.
    pub how: Open,
    /// All of its content came, and will come, through this handle: it was made, or emptied, by opening it.
    pub is_new: bool,
    /// Written since the last sync of the file.
    pub unsynced_bytes: AtomicU64,
}

impl OpenFile {
    /// A file that was opened.
    pub fn new(file: File, facts: Arc<Facts>, how: Open, is_new: bool) -> Self {
        Self { file, facts, how, is_new, unsynced_bytes: AtomicU64::new(0) }
    }
}

/// Open files by handle.
pub struct HandleTable {
    next: AtomicU64,
    shards: Vec<RwLock<HashMap<u64, Arc<OpenFile>>>>,
}

impl Default for HandleTable {
    fn default() -> Self {
        Self { next: AtomicU64::new(1), shards: (0..SHARDS).map(|_| RwLock::default()).collect() }
    }
}

impl HandleTable {
    fn shard(&self, number: u64) -> &RwLock<HashMap<u64, Arc<OpenFile>>> {
        &self.shards[(number % SHARDS as u64) as usize]
    }

    /// Gives `file` a number.
    pub fn insert(&self, file: OpenFile) -> Handle {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.shard(number).write().insert(number, Arc::new(file));
        Handle(number)
    }

    /// The file behind a number.
    pub fn get(&self, handle: Handle) -> OpResult<Arc<OpenFile>> {
        self.shard(handle.0).read().get(&handle.0).cloned().ok_or(Errno::EBADF)
    }

    /// Takes a number back, and answers what it stood for.
    pub fn remove(&self, handle: Handle) -> Option<Arc<OpenFile>> {
        self.shard(handle.0).write().remove(&handle.0)
    }

    /// Inodes that are open for writing.
    pub fn written(&self) -> BTreeSet<u64> {
        let mut inodes = BTreeSet::new();
        for shard in &self.shards {
            let shard = shard.read();
            let open = shard.values().filter(|open| open.file.is_writable());
            inodes.extend(open.map(|open| open.file.ino()));
        }
        inodes
    }

    /// Whether somebody has this inode open for writing.
    pub fn is_written(&self, ino: u64) -> bool {
        self.shards.iter().any(|shard| {
            shard.read().values().any(|open| open.file.is_writable() && open.file.ino() == ino)
        })
    }

    /// Files open now.
    pub fn count(&self) -> usize {
        self.shards.iter().map(|shard| shard.read().len()).sum()
    }

    /// Closes everything: the connection is gone.
    pub fn clear(&self) {
        for shard in &self.shards {
            let files = std::mem::take(&mut *shard.write());
            drop(files);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fact_ends_with_any_change_even_one_that_was_under_way_when_it_was_found() {
        let facts = Facts::new(&Arc::default());
        assert!(!facts.holds(Fact::Unprivileged));
        let epoch = facts.epoch();
        facts.establish(Fact::Unprivileged, epoch);
        assert!(facts.holds(Fact::Unprivileged));
        assert!(!facts.holds(Fact::NoDefaultAcl));

        facts.changing(|| {
            // A reader that looks between the announcement and the change sees the old state.
            let epoch = facts.epoch();
            facts.establish(Fact::Unprivileged, epoch);
        });
        assert!(!facts.holds(Fact::Unprivileged));
    }
    #[test]
    fn a_fact_outlives_a_change_that_leaves_it_alone_but_not_another_at_the_same_time() {
        let facts = Facts::new(&Arc::default());
        let change = |known: bool| assert!(!known);
        facts.changing_but(Fact::NoAccessAcl, change);
        assert!(!facts.holds(Fact::NoAccessAcl), "what was not known still is not");
        for fact in [Fact::NoAccessAcl, Fact::Unprivileged] {
            facts.establish(fact, facts.epoch());
        }
        facts.changing_but(Fact::NoAccessAcl, |known| assert!(known));
        assert!(facts.holds(Fact::NoAccessAcl) && !facts.holds(Fact::Unprivileged));
        facts.changing_but(Fact::NoAccessAcl, |_| facts.changing(|| {}));
        assert!(!facts.holds(Fact::NoAccessAcl));
    }

    fn volume() -> Volume {
        let device = Arc::new(weir::device::memory::MemoryDevice::new(64 << 20));
        let device: Arc<dyn weir::device::Device> = device;
        Volume::format_device(&device, &weir::CreateOptions::default()).unwrap();
        Volume::open_device(device, weir::VolumeOptions::default()).unwrap()
    }

    #[test]
    fn an_inode_is_held_until_the_kernel_has_given_back_as_many_references_as_it_got() {
        let volume = volume();
        let new = weir::NewInode::new(weir::FileType::Regular, 0o644);
        let ino = volume.make(Volume::ROOT, b"f", &new).unwrap().ino;
        let inodes = InodeTable::default();
        for _ in 0..5 {
            inodes.acquire(&volume, ino).unwrap();
        }
        volume.unlink(Volume::ROOT, b"f").unwrap();
        for (count, left) in [(1, true), (3, true), (1, false)] {
            inodes.forget(ino, count);
            assert_eq!((inodes.knows(ino), inodes.count()), (left, usize::from(left)));
            assert_eq!(volume.getattr(ino).is_ok(), left);
        }
        volume.close().unwrap();
    }

    #[test]
    fn of_a_new_inode_nothing_is_known_if_anything_changed_while_it_was_made() {
        let volume = volume();
        let inodes = InodeTable::default();
        inodes.acquire(&volume, Volume::ROOT).unwrap();
        let establish = |changes| {
            inodes.establish_new(Volume::ROOT, [Fact::Unprivileged].into_iter(), changes);
            inodes.facts(Volume::ROOT).holds(Fact::Unprivileged)
        };
        let before = inodes.changes();
        Facts::new(&inodes.changes).changing(|| {});
        assert!(!establish(before));
        assert!(establish(inodes.changes()));
        inodes.clear();
        volume.close().unwrap();
    }
}
