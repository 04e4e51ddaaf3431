//! The metadata store: one ordered map of items, kept as running delta over frozen delta over tree.
//!
//! Look-ups take the state lock for the delta part only; tree nodes are read without it, against the
//! root seen before. A checkpoint may publish a new root meanwhile and the old nodes' blocks may be
//! reused: the parent's checksum then does not match, or the generation has moved on, and the
//! look-up starts over. One that was outrun so a few times keeps the next root from being published until it is done: however slow the
//! disk is, and however fast checkpoints follow one another, it ends. [`Store::commit`] is the only writer.
//!
//! Lock order: `publishing` (a look-up that was outrun holds it while it reads nodes, and takes nothing but the state lock then), state
//! lock, then log append lock, then allocator lock (all inside `commit` and `freeze`). No device I/O under the state lock.

#[cfg(all(test, not(feature = "shuttle")))]
mod tests;

use super::Lsn;
use super::delta::Delta;
use super::mapping_moments::MappingMoments;
use super::merge::{DeltaSum, merge_reserve};
use super::names::NameCache;
use super::new_directories::NewDirectories;
use super::obligations::Obligations;
use super::op::Op;
use crate::alloc::{Allocator, FrozenSpace, MetadataReserve};
use crate::error::Result;
use crate::format::{Key, Kind, MAX_COUNTER_AT_OPENING};
use crate::log::{Admission, Boundary, Log};
use crate::mutation::{self, Mutation};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, RwLock};
use crate::tree::{self, InLeaf, LeafSpan, Span, TreeRoot, Value, cache::NodeCache};
use std::iter::Peekable;

/// Most deleted keys that a walk steps over while it holds the deltas: whoever commits waits for that, and a directory may have had a
/// million names since the last checkpoint, a file as many extents.
const MOST_HIDDEN: usize = 512;

/// A look-up that checkpoints have outrun so often keeps the next from being published.
const OUTRUN: u32 = 3;

/// A key and its value.
pub type Item = (Key, Value);

struct State {
    running: Delta,
    frozen: Option<Arc<Delta>>,
    tree: TreeRoot,
    next_inode: u64,
    inode_count: u64,
    new_directories: NewDirectories,
}

/// How an attempt to look something up has ended.
enum Attempt<T> {
    Answer(T),
    /// The tree that was read is not the current one any more.
    Outrun,
}

/// What the store keeps in memory besides the items, to spare look-ups.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    /// Names in the cache of names; a power of two.
    pub cached_names: usize,
    /// Most memory for filters of the names in new directories.
    pub new_directory_bytes: usize,
}

/// What a freeze takes out of the running transaction.
pub struct Frozen {
    /// All changes since the freeze before.
    pub delta: Arc<Delta>,
    /// All space changes since the freeze before.
    pub space: FrozenSpace,
    /// Last operation contained, and where the log goes on.
    pub boundary: Boundary,
    /// Inode numbers below were used.
    pub next_inode: u64,
    /// Inodes in use at this point.
    pub inode_count: u64,
    /// The tree that the delta is to be merged into.
    pub tree: TreeRoot,
    /// The oldest operation whose payload pages are not all home at this point.
    pub oldest_payload: Option<Lsn>,
}

/// See the module's head.
pub struct Store {
    state: RwLock<State>,
    /// Taken by who publishes a tree, and shared by look-ups that were outrun by that.
    publishing: RwLock<()>,
    /// Nodes of the tree.
    pub nodes: NodeCache,
    /// The log that commits go to.
    pub log: Arc<Log>,
    /// The allocator that commits record space changes in.
    pub alloc: Arc<Allocator>,
    /// What the log must keep besides.
    pub obligations: Obligations,
    /// Names that were found, and which of them may have changed.
    pub names: NameCache,
    /// Which mappings have changed.
    pub mappings: MappingMoments,
    /// The log is being replayed: what follows from it needs no record, because the next replay would do the same.
    pub replaying: AtomicBool,
    /// What users leave free whatever the tree holds.
    pub base_reserve: MetadataReserve,
}

impl Store {
    /// A store over the tree of a checkpoint.
    pub fn new(
        nodes: NodeCache,
        log: Arc<Log>,
        alloc: Arc<Allocator>,
        tree: TreeRoot,
        (next_inode, inode_count): (u64, u64),
        base_reserve: MetadataReserve,
        memory: Memory,
    ) -> Self {
        let running = Delta::default();
        let state = State {
            running,
            frozen: None,
            tree,
            next_inode,
            inode_count,
            new_directories: NewDirectories::new(memory.new_directory_bytes),
        };
        let store = Self {
            state: RwLock::new(state),
            publishing: RwLock::new(()),
            nodes,
            log,
            alloc,
            obligations: Obligations::default(),
            names: NameCache::new(memory.cached_names),
            mappings: MappingMoments::default(),
            replaying: AtomicBool::new(false),
            base_reserve,
        };
        store.update_reserve(&store.state.read());
        store
    }

    /// Makes `attempt`s until one has an answer. Each says which tree it read; an error counts as outrun by a checkpoint if that is not
    /// the current one any more.
    fn settle<T>(&self, mut attempt: impl FnMut() -> (TreeRoot, Result<Attempt<T>>)) -> Result<T> {
        let mut outrun = 0;
        loop {
            let _kept = (outrun >= OUTRUN).then(|| self.publishing.read());
            let (root, found) = attempt();
            match found {
                Ok(Attempt::Answer(answer)) => return Ok(answer),
                // The tree that was read is still the one there is.
                Err(error) if self.state.read().tree.generation == root.generation => {
                    return Err(error);
                }
                Ok(Attempt::Outrun) | Err(_) => outrun += 1,
            }
        }
    }

    /// The value of `key`.
    pub fn get(&self, key: Key) -> Result<Option<Value>> {
        self.settle(|| {
            let root = {
                let state = self.state.read();
                let newer = state.running.get(&key);
                let newer = newer.or_else(|| state.frozen.as_ref()?.get(&key));
                if let Some(value) = newer {
                    return (state.tree, Ok(Attempt::Answer(value.map(Value::from))));
                }
                state.tree
            };
            (root, tree::get(&self.nodes, &root, key).map(Attempt::Answer))
        })
    }

    /// The item with the greatest key `<= key` that is `>= floor`. The tree's items that a delta hides are stepped over one
    /// by one: a floor that is near bounds that.
    pub fn get_le(&self, key: Key, floor: Key) -> Result<Option<(Key, Value)>> {
        self.get_le_over((key, floor), usize::MAX)
    }

    /// As [`Store::get_le`], but perhaps none, though there is one, where much before `key` was deleted since the last checkpoint: for who
    /// would like to know, and can do without.
    pub fn guess_le(&self, key: Key, floor: Key) -> Result<Option<(Key, Value)>> {
        self.get_le_over((key, floor), MOST_HIDDEN)
    }

    fn get_le_over(&self, range: (Key, Key), most_hidden: usize) -> Result<Option<(Key, Value)>> {
        self.settle(|| {
            let root = self.state.read().tree;
            (root, self.get_le_in(&root, range, most_hidden))
        })
    }

    /// As [`Store::get_le_over`], from this tree.
    fn get_le_in(
        &self,
        root: &TreeRoot,
        (key, floor): (Key, Key),
        most_hidden: usize,
    ) -> Result<Attempt<Option<(Key, Value)>>> {
        let is_mapping = floor.kind == Kind::Extent && floor.inode == key.inode;
        let mut upper = key;
        let mut left = most_hidden;
        let mut moment = self.mappings.moment(key.inode);
        loop {
            let span = tree::span_le(&self.nodes, root, upper)?;
            let state = self.state.read();
            if state.tree.generation != root.generation {
                return Ok(Attempt::Outrun);
            }
            // What was found to be hidden is not stepped over again, as long as nothing has changed.
            let now = self.mappings.moment(key.inode);
            let last = if is_mapping && now == moment { upper } else { key };
            moment = now;
            let items = || span.iter().flat_map(LeafSpan::items);
            let lowest = items().next().map(|(lowest, _)| lowest);
            let in_tree = items().rev().take_while(|(found, _)| *found >= floor);
            // What the deltas have before this leaf is compared with the leaf before.
            let known_from = lowest.map_or(floor, |lowest| lowest.max(floor));
            let greatest = state.greatest(in_tree, (known_from, last), &mut left);
            if let Some((found, value)) = greatest {
                let value = value.map_or_else(InLeaf::to_value, |newer| Some(Value::from(newer)));
                return Ok(Attempt::Answer(value.map(|value| (found, value))));
            }
            match lowest.and_then(predecessor).filter(|next| *next >= floor && left > 0) {
                // All of this leaf is hidden.
                Some(next) => upper = next,
                None => return Ok(Attempt::Answer(None)),
            }
        }
    }

    /// Shows the items with `from <= key <= to` in order to `visit` until it answers false. For narrow ranges: nothing is
    /// allocated. `visit` must not take locks.
    pub fn scan(
        &self,
        from: Key,
        to: Key,
        visit: &mut dyn FnMut(Key, &[u8]) -> Result<bool>,
    ) -> Result<()> {
        if self.is_surely_empty(&from, &to) {
            return Ok(());
        }
        let mut result = Ok(());
        let settled = self.overlaid(from, to, |state, in_tree| {
            state.overlay(in_tree, (from, to), usize::MAX, |key, value| {
                let go_on = match value {
                    Overlaid::Changed(value) => visit(key, value),
                    Overlaid::InTree(value) => visit(key, value.bytes()),
                };
                go_on.unwrap_or_else(|error| {
                    result = Err(error);
                    false
                })
            });
        })?;
        if settled.is_some() {
            return result;
        }
        super::view::scan_collected(self, from, to, visit)
    }

    /// There is nothing in the range, as a new directory's filter knows.
    fn is_surely_empty(&self, from: &Key, to: &Key) -> bool {
        if from.kind != Kind::Dirent {
            return false;
        }
        let moment = self.names.moment(from);
        let excluded = self.state.read().new_directories.excludes(from, to);
        debug_assert!(
            !excluded || {
                let there = self.collect(*from, *to, 1).is_ok_and(|(items, _)| !items.is_empty());
                !there || !self.names.is_unchanged(moment)
            }
        );
        excluded
    }

    /// Calls `read` with the deltas and the tree's items of the range at one moment. `None`: the range is not in one
    /// leaf, and nothing was called.
    fn overlaid<T>(
        &self,
        from: Key,
        to: Key,
        read: impl FnOnce(&State, Option<&LeafSpan>) -> T,
    ) -> Result<Option<T>> {
        let mut read = Some(read);
        self.settle(|| {
            let root = self.state.read().tree;
            let span = match tree::span(&self.nodes, &root, from, to) {
                Ok(Span::Wide) => return (root, Ok(Attempt::Answer(None))),
                Ok(Span::Empty) => None,
                Ok(Span::Leaf(span)) => Some(span),
                Err(error) => return (root, Err(error)),
            };
            let state = self.state.read();
            if state.tree.generation != root.generation {
                return (root, Ok(Attempt::Outrun));
            }
            let found = read.take().map(|read| read(&state, span.as_ref()));
            (root, Ok(Attempt::Answer(found)))
        })
    }

    /// Up to about `limit` items with `from <= key <= to` in order, and the key to go on from if there may be more. Perhaps fewer, or
    /// none, where there are more: those who commit do not wait until all that was deleted since the last checkpoint is stepped over.
    pub fn collect(&self, from: Key, to: Key, limit: usize) -> Result<(Vec<Item>, Option<Key>)> {
        let narrow = self.overlaid(from, to, |state, in_tree| {
            let mut items = Vec::new();
            let next = state.overlay(in_tree, (from, to), MOST_HIDDEN, |key, value| {
                let room = items.len() < limit;
                if room {
                    items.extend(value.to_value().map(|value| (key, value)));
                }
                room
            });
            (items, next)
        })?;
        if let Some(found) = narrow {
            return Ok(found);
        }
        self.settle(|| {
            let root = self.state.read().tree;
            let (in_tree, tree_end) = match self.collect_tree(&root, from, to, limit) {
                Ok(found) => found,
                Err(error) => return (root, Err(error)),
            };
            let state = self.state.read();
            if state.tree.generation != root.generation {
                return (root, Ok(Attempt::Outrun));
            }
            (root, Ok(Attempt::Answer(state.merge(in_tree, (from, to), tree_end, limit))))
        })
    }

    /// Items of the tree alone, and the last key that the answer speaks for.
    fn collect_tree(
        &self,
        root: &TreeRoot,
        from: Key,
        to: Key,
        limit: usize,
    ) -> Result<(Vec<Item>, Key)> {
        let mut items = Vec::new();
        if from > to {
            return Ok((items, to));
        }
        let mut cursor = tree::Cursor::seek(&self.nodes, root, from)?;
        while let Some((key, value)) = cursor.next()? {
            if key > to {
                return Ok((items, to));
            }
            items.push((key, value));
            if items.len() >= limit {
                return Ok((items, key));
            }
        }
        Ok((items, to))
    }

    /// Makes `op` part of the running transaction, all at once. Never blocks on I/O. Not durable
    /// before the log is: see [`Log::commit`].
    ///
    /// # Errors
    /// The volume is shut down; nothing was applied.
    pub fn commit(&self, mut op: Op, admission: Admission) -> Result<Lsn> {
        let mut state = self.state.write();
        let lsn = if self.replaying.load(Ordering::Acquire) && op.payload_pages() == 0 {
            // The admission is for nothing, and what the log has is durable.
            self.log.last_lsn()
        } else {
            self.log.append(&mut op.records, admission)?
        };
        if mutation::active(Mutation::ApplyOutsideGate) {
            drop(state);
            state = self.state.write();
        }
        self.apply(&mut state, lsn, &op);
        self.update_reserve(&state);
        drop(state);
        op.recycle();
        Ok(lsn)
    }

    /// Makes all of `parts` part of the running transaction, all or nothing also across a crash. For what is too
    /// large for one frame of the log. Answers the LSN of the last part; those of the others come right before it.
    pub fn commit_parts(&self, mut parts: Vec<Op>, admission: Admission) -> Result<Lsn> {
        let mut state = self.state.write();
        let mut records: Vec<_> =
            parts.iter_mut().map(|op| std::mem::take(&mut op.records)).collect();
        let lsn = self.log.append_batch(&mut records, admission)?;
        let first = lsn + 1 - parts.len() as u64;
        for (number, op) in (first..).zip(parts) {
            self.apply(&mut state, number, &op);
        }
        self.update_reserve(&state);
        Ok(lsn)
    }

    /// The log has `op` as `lsn`.
    fn apply(&self, state: &mut State, lsn: Lsn, op: &Op) {
        for number in &op.new_directories {
            state.new_directories.made(*number);
        }
        for (key, value) in op.changes() {
            self.names.note(&key);
            self.mappings.note(&key);
            state.new_directories.note(&key, value.is_none());
            state.running.set(key, value);
        }
        if !op.space.is_empty() {
            self.alloc.record(&op.space);
        }
        if op.payload_pages > 0 {
            // Under the LSN of the part: replay has to start at its frame.
            self.obligations.add(lsn, op.payload_pages, op.payload_inode);
        }
        state.inode_count = state.inode_count.saturating_add_signed(op.inodes_added);
    }

    /// Applies one recovered change; only while nobody else uses the store.
    pub fn replay(&self, key: Key, value: Option<&[u8]>) {
        let mut state = self.state.write();
        self.names.note(&key);
        self.mappings.note(&key);
        state.running.set(key, value);
    }

    /// Recovered inode numbers, and the number of inodes.
    pub fn replay_inodes(&self, next: u64, added: i64) {
        let mut state = self.state.write();
        state.next_inode = state.next_inode.max(next);
        state.inode_count = state.inode_count.saturating_add_signed(added);
    }

    /// To be called once everything is replayed, before anything is made. A new directory's filter is complete because
    /// the directory begins empty. On a damaged volume, as fsck finds it, numbers that are still to be given out have items, or that cannot
    /// be seen: then nothing is taken for new, and numbers that have items are not given out again.
    pub fn check_new_numbers(&self) {
        let next = self.state.read().next_inode;
        if matches!(self.get_le(Key::MAX, Key::inode(next)), Ok(None)) {
            return;
        }
        // Greater ones are never reached.
        let last_number = Key { inode: MAX_COUNTER_AT_OPENING / 2, ..Key::MAX };
        let used = self.get_le(last_number, Key::inode(next));
        let mut state = self.state.write();
        state.new_directories = NewDirectories::new(0);
        if let Ok(Some((last, _))) = used {
            state.next_inode = last.inode + 1;
        }
    }

    /// Inodes in use.
    pub fn inode_count(&self) -> u64 {
        self.state.read().inode_count
    }

    /// A new inode number. It is used up even if the operation it was meant for fails.
    pub fn allocate_inode(&self) -> u64 {
        let mut state = self.state.write();
        let number = state.next_inode;
        state.next_inode += 1;
        number
    }

    /// Takes the running delta out: microseconds. The delta stays readable as the frozen one until
    /// [`Store::publish`]. `None`: a barrier's chain is open, which a checkpoint must not cut; no other chain begins before the
    /// freeze.
    pub fn freeze(&self, next_transaction: u64) -> Option<Frozen> {
        let mut state = self.state.write();
        debug_assert!(state.frozen.is_none());
        let boundary = self.log.seal(next_transaction)?;
        let delta = Arc::new(std::mem::take(&mut state.running));
        state.frozen = Some(delta.clone());
        Some(Frozen {
            delta,
            space: self.alloc.freeze(),
            boundary,
            next_inode: state.next_inode,
            inode_count: state.inode_count,
            tree: state.tree,
            oldest_payload: self.obligations.oldest(),
        })
    }

    /// The frozen delta is in `tree` now.
    pub fn publish(&self, tree: TreeRoot) {
        let frozen = {
            let _publishing = self.publishing.write();
            let mut state = self.state.write();
            state.tree = tree;
            let frozen = state.frozen.take();
            self.update_reserve(&state);
            frozen
        };
        // Freeing a large delta takes milliseconds: not under the lock that every operation needs.
        drop(frozen);
    }

    /// Memory of the deltas, and keys in the running one.
    pub fn delta_size(&self) -> DeltaSize {
        let state = self.state.read();
        DeltaSize {
            running_bytes: state.running.memory_bytes(),
            frozen_bytes: state.frozen.as_ref().map_or(0, |frozen| frozen.memory_bytes()),
            space_bytes: self.alloc.recorded_bytes(),
            running_keys: state.running.len(),
        }
    }

    /// The tree of the last checkpoint.
    pub fn tree(&self) -> TreeRoot {
        self.state.read().tree
    }

    /// Keeps so much space free that the next checkpoint can write every node anew and add the
    /// deltas: a checkpoint, and so a deletion, does not fail for space.
    fn update_reserve(&self, state: &State) {
        let reserve = merge_reserve(self.base_reserve, state.tree.node_count, state.delta_sum());
        self.alloc.set_metadata_reserve(reserve);
    }

    /// Blocks that `added` changes add to what is kept for the next checkpoint.
    pub fn growth_blocks(&self, added: DeltaSum) -> u64 {
        let state = self.state.read();
        let now = state.delta_sum();
        let then = DeltaSum { keys: now.keys + added.keys, bytes: now.bytes + added.bytes };
        let kept = |delta| merge_reserve(self.base_reserve, state.tree.node_count, delta).blocks();
        kept(then).saturating_sub(kept(now))
    }
}

/// See [`Store::delta_size`].
#[derive(Debug, Clone, Copy)]
pub struct DeltaSize {
    /// Memory of the running delta.
    pub running_bytes: usize,
    /// Memory of the frozen delta.
    pub frozen_bytes: usize,
    /// Memory of the changes of space that belong to both.
    pub space_bytes: u64,
    /// Keys of the running delta.
    pub running_keys: usize,
}

impl DeltaSize {
    /// All of it.
    pub fn bytes(&self) -> u64 {
        (self.running_bytes + self.frozen_bytes) as u64 + self.space_bytes
    }
}

/// The greatest key before `key`.
pub(super) fn predecessor(key: Key) -> Option<Key> {
    if let Some(offset) = key.offset.checked_sub(1) {
        return Some(Key { offset, ..key });
    }
    if let Some(kind) = crate::format::Kind::from_u8((key.kind as u8).wrapping_sub(1)) {
        return Some(Key { kind, offset: u64::MAX, ..key });
    }
    let inode = key.inode.checked_sub(1)?;
    Some(Key { inode, ..Key::MAX })
}

impl State {
    /// Changes that are not in the tree yet.
    fn delta_sum(&self) -> DeltaSum {
        let frozen = self.frozen.as_ref();
        let (keys, bytes) = frozen.map_or((0, 0), |frozen| (frozen.len(), frozen.stored_bytes()));
        DeltaSum {
            keys: (self.running.len() + keys) as u64,
            bytes: (self.running.stored_bytes() + bytes) as u64,
        }
    }

    /// The greatest key in `from ..= to` that has a value, in the deltas (`Ok`) or in `in_tree` (`Err`), whose keys descend. Each of the
    /// three is searched once. `left`: so many that are deleted may be stepped over.
    fn greatest<T>(
        &self,
        in_tree: impl Iterator<Item = (Key, T)>,
        (from, to): (Key, Key),
        left: &mut usize,
    ) -> Option<(Key, Layered<'_, T>)> {
        let mut running = self.running.range(from, to).rev().peekable();
        let frozen = self.frozen.iter();
        let mut frozen = frozen.flat_map(|frozen| frozen.range(from, to).rev()).peekable();
        let mut in_tree = in_tree.peekable();
        loop {
            let (key, value) = newest(&mut running, &mut frozen, &mut in_tree, Key::max)?;
            if let Some(value) = value {
                return Some((key, value));
            }
            *left = left.checked_sub(1)?;
        }
    }

    /// Lays the deltas over `in_tree`, which speaks for `from ..= tree_end`.
    fn merge(
        &self,
        in_tree: Vec<(Key, Value)>,
        (from, to): (Key, Key),
        tree_end: Key,
        limit: usize,
    ) -> (Vec<Item>, Option<Key>) {
        let mut merged = Vec::with_capacity(in_tree.len());
        let range = (from, tree_end);
        let stopped = self.overlay_items(in_tree.into_iter(), range, MOST_HIDDEN, |key, value| {
            let room = merged.len() < limit;
            if room {
                merged.push((key, value.map_or_else(|in_tree| in_tree, Value::from)));
            }
            room
        });
        let behind = || if tree_end < to { tree_end.successor() } else { None };
        (merged, stopped.or_else(behind))
    }

    /// As [`State::overlay_items`], over a part of a leaf.
    fn overlay<'a>(
        &'a self,
        in_tree: Option<&'a LeafSpan>,
        range: (Key, Key),
        most_hidden: usize,
        mut visit: impl FnMut(Key, Overlaid<'a>) -> bool,
    ) -> Option<Key> {
        let in_tree = in_tree.into_iter().flat_map(LeafSpan::items);
        self.overlay_items(in_tree, range, most_hidden, |key, value| {
            visit(key, value.map_or_else(Overlaid::InTree, Overlaid::Changed))
        })
    }

    /// Shows what the deltas (`Ok`) and `in_tree` (`Err`) have between `from` and `to` in order to `visit`, until that answers false
    /// for the key that is answered; or until `most_hidden` deleted keys were stepped over, and there may be something from the key on that is
    /// answered.
    fn overlay_items<'a, T>(
        &'a self,
        in_tree: impl Iterator<Item = (Key, T)>,
        (from, to): (Key, Key),
        most_hidden: usize,
        mut visit: impl FnMut(Key, Layered<'a, T>) -> bool,
    ) -> Option<Key> {
        let mut running = self.running.range(from, to).peekable();
        let mut frozen = self.frozen.iter().flat_map(|frozen| frozen.range(from, to)).peekable();
        let mut in_tree = in_tree.peekable();
        let mut hidden = 0;
        loop {
            let (next, value) = newest(&mut running, &mut frozen, &mut in_tree, Key::min)?;
            hidden += usize::from(value.is_none());
            let goes_on = value.map_or(hidden <= most_hidden, |value| visit(next, value));
            if !goes_on {
                return Some(next);
            }
            #[cfg(all(test, not(feature = "shuttle")))]
            tests::MOST_STEPS.set(tests::MOST_STEPS.get().max(hidden));
        }
    }
}

/// A value from a delta (`Ok`) or from the tree (`Err`).
type Layered<'a, T> = std::result::Result<&'a [u8], T>;

/// Takes the key that comes `first` of the three layers, each in that order, with the value that the newest one gives it:
/// none if it is deleted.
fn newest<'a, T>(
    running: &mut Peekable<impl Iterator<Item = (Key, Option<&'a [u8]>)>>,
    frozen: &mut Peekable<impl Iterator<Item = (Key, Option<&'a [u8]>)>>,
    in_tree: &mut Peekable<impl Iterator<Item = (Key, T)>>,
    first: fn(Key, Key) -> Key,
) -> Option<(Key, Option<Layered<'a, T>>)> {
    let keys = [
        running.peek().map(|(key, _)| *key),
        frozen.peek().map(|(key, _)| *key),
        in_tree.peek().map(|(key, _)| *key),
    ];
    let key = keys.into_iter().flatten().reduce(first)?;
    #[cfg(all(test, not(feature = "shuttle")))]
    tests::STEPS.set(tests::STEPS.get() + 1);
    let tree_value = in_tree.next_if(|(found, _)| *found == key).map(|(_, value)| value);
    let frozen_value = frozen.next_if(|(found, _)| *found == key).map(|(_, value)| value);
    let running_value = running.next_if(|(found, _)| *found == key).map(|(_, value)| value);
    let value = match running_value.or(frozen_value) {
        Some(value) => value.map(Ok),
        None => tree_value.map(Err),
    };
    Some((key, value))
}

/// A value that the deltas have, or that the tree has and they do not touch.
#[derive(Clone, Copy)]
enum Overlaid<'a> {
    Changed(&'a [u8]),
    InTree(InLeaf<'a>),
}

impl Overlaid<'_> {
    fn to_value(self) -> Option<Value> {
        match self {
            Self::Changed(value) => Some(Value::from(value)),
            Self::InTree(value) => value.to_value(),
        }
    }
}
