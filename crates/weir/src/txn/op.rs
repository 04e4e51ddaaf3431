//! One metadata operation while it is put together: item changes, space changes, log records.
//!
//! An [`Op`] is pure data. [`super::store::Store::commit`] applies it to the delta, the allocator
//! and the log in one step, so that readers, checkpoints and recovery see all of it or nothing.

use crate::alloc::{Run, SpaceChange};
use crate::cache::page::PageRef;
use crate::format::{Key, checksum};
use crate::log::OpRecords;
use crate::log::companion::Companions;
use std::cell::Cell;

/// Two inodes, an entry with a name that is not too long, an orphan.
const USUAL_RECORD_BYTES: usize = 768;
/// The values of these.
const USUAL_VALUE_BYTES: usize = 512;
/// Most memory of an operation that is kept for the thread's next.
const SPARE_BYTES: usize = 16 << 10;

thread_local! {
    /// The thread's last operation, emptied: its next one needs no memory of its own.
    static SPARE: Cell<Option<Op>> = const { Cell::new(None) };
}

/// See the module's head.
#[derive(Default)]
pub struct Op {
    changes: Vec<Change>,
    /// The values of `changes`, one after the other.
    values: Vec<u8>,
    pub(super) space: Vec<SpaceChange>,
    pub(super) records: OpRecords,
    pub(super) payload_pages: u64,
    /// Whose pages travel along, if they are of one inode.
    pub(super) payload_inode: Option<u64>,
    pub(super) inodes_added: i64,
    /// Directories that begin to exist.
    pub(super) new_directories: Vec<u64>,
}

/// An item's change; how long its value is.
struct Change {
    key: Key,
    length: Option<u32>,
}

impl Op {
    /// An operation that does nothing yet, with room for what a call on names does.
    pub fn new() -> Self {
        let spare = SPARE.try_with(Cell::take).unwrap_or_default();
        spare.unwrap_or_else(|| Self {
            changes: Vec::with_capacity(4),
            values: Vec::with_capacity(USUAL_VALUE_BYTES),
            records: OpRecords::with_capacity(USUAL_RECORD_BYTES),
            ..Self::default()
        })
    }

    /// It is done: its memory is for the thread's next one.
    pub(super) fn recycle(self) {
        let Self { mut changes, mut values, mut space, mut records, mut new_directories, .. } =
            self;
        let lists_bytes = changes.capacity() * size_of::<Change>()
            + space.capacity() * size_of::<SpaceChange>()
            + new_directories.capacity() * size_of::<u64>();
        if lists_bytes + values.capacity() + records.memory_bytes() > SPARE_BYTES {
            return;
        }
        changes.clear();
        values.clear();
        space.clear();
        records.clear();
        new_directories.clear();
        let emptied = Self { changes, values, space, records, new_directories, ..Self::default() };
        // A thread that ends keeps nothing.
        let _ = SPARE.try_with(|spare| spare.set(Some(emptied)));
    }

    /// The item `key` gets `value`.
    pub fn put(&mut self, key: Key, value: &[u8]) {
        let put = self.records.put(key, value);
        debug_assert!(put.is_ok(), "item values are bounded by their encoders");
        self.set_unlogged(key, value);
    }

    /// The item `key` goes away.
    pub fn delete(&mut self, key: Key) {
        self.records.delete(key);
        self.changes.push(Change { key, length: None });
    }

    /// What it does to items, in order.
    pub(super) fn changes(&self) -> impl Iterator<Item = (Key, Option<&[u8]>)> {
        let mut rest = &self.values[..];
        self.changes.iter().map(move |change| {
            let value = change.length.map(|length| {
                let (value, behind) = rest.split_at(length as usize);
                rest = behind;
                value
            });
            (change.key, value)
        })
    }

    /// The blocks of `run` belong to the volume's contents from now on.
    pub fn allocated(&mut self, run: Run) {
        self.records.alloc(run.start, run.blocks as u32);
        self.space.push(SpaceChange::Alloc(run));
    }

    /// The blocks of `run` are not needed once a checkpoint that contains this operation is durable.
    pub fn freed(&mut self, run: Run) {
        self.records.free(run.start, run.blocks as u32);
        self.space.push(SpaceChange::Free(run));
    }

    /// Page `file_block` of `inode` has this content; `home_block` (0: none) is overwritten with it later.
    pub fn payload(&mut self, inode: u64, file_block: u64, home_block: u64, page: PageRef) {
        let sum = checksum(&page);
        self.records.payload(inode, file_block, home_block, Some(sum), page);
        self.count_payload(1, Some(inode));
    }

    /// As [`Op::payload`]; whoever writes the frame computes the checksum, which is a good part of what the rest takes.
    pub fn payload_unsummed(
        &mut self,
        inode: u64,
        file_block: u64,
        home_block: u64,
        page: PageRef,
    ) {
        self.records.payload(inode, file_block, home_block, None, page);
        self.count_payload(1, Some(inode));
    }

    fn count_payload(&mut self, pages: u64, inode: Option<u64>) {
        let alone = self.payload_pages == 0 || self.payload_inode == inode;
        self.payload_inode = inode.filter(|_| alone);
        self.payload_pages += pages;
    }

    /// The blocks from `block` on were just written and hold data with these checksums.
    pub fn wrote(&mut self, block: u64, checksums: &[u32]) {
        self.records.wrote(block, checksums);
    }

    /// The blocks that it maps are written at the same time as its frame.
    pub fn beside(&mut self, companions: Companions) {
        self.records.beside(companions);
    }

    /// A logged page has gone home in place; the extent's new checksum is set with
    /// [`Op::set_unlogged`]: the log only carries the checksum.
    pub fn home_record(&mut self, home: Home) {
        self.records.home(home.inode, home.file_block, home.block, home.checksum);
    }

    /// The item `key` gets `value`, which replay derives from other records of this operation.
    pub fn set_unlogged(&mut self, key: Key, value: &[u8]) {
        self.changes.push(Change { key, length: Some(value.len() as u32) });
        self.values.extend_from_slice(value);
    }

    /// An inode begins to exist in this operation.
    pub fn inode_added(&mut self) {
        self.inodes_added += 1;
    }

    /// The directory `number`, an inode added in this operation, begins to exist, empty.
    pub fn directory_added(&mut self, number: u64) {
        self.new_directories.push(number);
    }

    /// An inode ceases to exist in this operation.
    pub fn inode_removed(&mut self) {
        self.inodes_added -= 1;
    }

    /// Payload of these pages that the log holds from before is void: they are home, or gone.
    pub fn settled(&mut self, inode: u64, file_block: u64, count: u64) {
        self.records.settled(inode, file_block, count);
    }

    /// Everything that `other` does comes after what this one does.
    pub fn append(&mut self, other: Self) {
        self.changes.extend(other.changes);
        self.values.extend(other.values);
        self.space.extend(other.space);
        self.records.append(other.records);
        if other.payload_pages > 0 {
            self.count_payload(other.payload_pages, other.payload_inode);
        }
        self.inodes_added += other.inodes_added;
        self.new_directories.extend(other.new_directories);
    }

    /// Pages that travel along.
    pub fn payload_pages(&self) -> u64 {
        self.payload_pages
    }

    /// Blocks of a frame that holds this operation alone.
    pub fn blocks(&self) -> u64 {
        self.records.blocks()
    }

    /// Changes of items so far.
    pub fn change_count(&self) -> usize {
        self.changes.len()
    }

    /// Nothing to commit.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Bytes of records so far.
    pub fn record_bytes(&self) -> usize {
        self.records.record_bytes()
    }
}

/// Where a logged page went home: see [`Op::home_record`].
#[derive(Debug, Clone, Copy)]
pub struct Home {
    /// The file.
    pub inode: u64,
    /// The page.
    pub file_block: u64,
    /// Where it lives on the device.
    pub block: u64,
    /// Of its content.
    pub checksum: u32,
}
