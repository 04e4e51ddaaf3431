//! What the kernel refers to: inodes it has looked up, and open files.
//!
//! Invariants: an inode with a positive lookup count is held in the engine, so its number stays
//! its own even when the last name goes; a handle number is never given out twice.
//!
//! Lock order: a shard's lock, then the engine. Holds and files are dropped outside of the locks,
//! because dropping the last one of an unlinked file purges it.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use weir::sync::{Mutex, RwLock};
use weir::{File, InodeHold, Volume};

use crate::errno::Errno;
use crate::ops::{Handle, OpResult};

const SHARDS: usize = 64;

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
}

/// Inodes that the kernel knows.
pub struct InodeTable {
    shards: Vec<Mutex<HashMap<u64, Node>>>,
    /// Changes of any inode that could end facts.
    changes: Arc<AtomicU64>,
}

impl Default for InodeTable {
    fn default() -> Self {
        Self { shards: (0..SHARDS).map(|_| Mutex::default()).collect(), changes: Arc::default() }
    }
}

impl InodeTable {
    fn shard(&self, ino: u64) -> &Mutex<HashMap<u64, Node>> {
        &self.shards[(ino % SHARDS as u64) as usize]
    }

    /// Counts one more reference of the kernel.
    pub fn acquire(&self, volume: &Volume, ino: u64) -> weir::Result<()> {
        let mut shard = self.shard(ino).lock();
        if let Some(node) = shard.get_mut(&ino) {
            node.lookups += 1;
            return Ok(());
        }
        let hold = volume.hold(ino)?;
        let facts = Arc::new(Facts::new(&self.changes));
        shard.insert(ino, Node { lookups: 1, facts, hold });
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
        let Some(node) = shard.get_mut(&ino) else { return };
        node.lookups = node.lookups.saturating_sub(count);
        if node.lookups > 0 {
            return;
        }
        let node = shard.remove(&ino);
        drop(shard);
        drop(node.map(|node| node.hold));
    }

    /// What is known of `ino`. For inodes the kernel never looked up (the root) nothing is, and
    /// nothing is kept.
    pub fn facts(&self, ino: u64) -> Arc<Facts> {
        let shard = self.shard(ino).lock();
        let known = shard.get(&ino).map(|node| Arc::clone(&node.facts));
        known.unwrap_or_else(|| Arc::new(Facts::new(&self.changes)))
    }

    /// Whether the kernel knows `ino`, so that it is in memory.
    pub fn knows(&self, ino: u64) -> bool {
        self.shard(ino).lock().contains_key(&ino)
    }

    /// Inodes the kernel knows.
    pub fn count(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().len()).sum()
    }

    /// Forgets everything: the connection is gone.
    pub fn clear(&self) {
        for shard in &self.shards {
            let nodes = std::mem::take(&mut *shard.lock());
            drop(nodes);
        }
    }
}

/// An open file.
pub struct OpenFile {
    /// The engine's handle.
    pub file: File,
    /// What is known of its inode.
    pub facts: Arc<Facts>,
    /// All of its content came, and will come, through this handle: it was made, or emptied, by opening it.
    pub is_new: bool,
    /// Written since the last sync of the file.
    pub unsynced_bytes: AtomicU64,
}

impl OpenFile {
    /// A file that was opened.
    pub fn new(file: File, facts: Arc<Facts>, is_new: bool) -> Self {
        Self { file, facts, is_new, unsynced_bytes: AtomicU64::new(0) }
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

    #[test]
    fn of_a_new_inode_nothing_is_known_if_anything_changed_while_it_was_made() {
        let device = Arc::new(weir::device::memory::MemoryDevice::new(64 << 20));
        let device: Arc<dyn weir::device::Device> = device;
        Volume::format_device(&device, &weir::CreateOptions::default()).unwrap();
        let volume = Volume::open_device(device, weir::VolumeOptions::default()).unwrap();
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
