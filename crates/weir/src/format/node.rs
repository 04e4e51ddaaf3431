//! The tree node: 16 KiB, a header, sorted slots, and in a leaf the values packed at the end.
//!
//! A [`Node`] has been verified: magic, checksum, volume, own address, level, count, strictly
//! increasing keys, packing of the values. From then on every access is plain indexing that cannot
//! leave the node, and a search compares raw slots without decoding more than it looks at.
//! [`NodeBuilder`] writes nodes, and refuses what [`Node::parse`] would refuse.

use super::key::{Key, Kind};
use super::{FormatError, MAX_VALUE_BYTES, NODE_BYTES, VolumeId};
use crate::device::buffer::AlignedBuf;
use std::mem::{offset_of, size_of};
use std::ops::Range;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First four bytes of a node.
pub const NODE_MAGIC: [u8; 4] = *b"NODE";
/// Bytes of a node for slots and values.
pub const NODE_CAPACITY_BYTES: usize = NODE_BYTES - HEADER_BYTES;
/// Bytes that an item takes besides its value.
pub const LEAF_SLOT_BYTES: usize = size_of::<LeafSlot>();
/// Bytes that a child takes.
pub const INTERIOR_SLOT_BYTES: usize = size_of::<InteriorSlot>();
/// Highest level of a node. Even with nodes a third full, 12 levels hold more items than 64 bits
/// can count.
pub const MAX_LEVEL: u8 = 12;
/// Trees that a checkpoint root has room for.
pub const MAX_TREES: u8 = 8;

const HEADER_BYTES: usize = size_of::<NodeHeader>();
const STRUCTURE: &str = "tree node";

/// The first 64 bytes of a node.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct NodeHeader {
    magic: [u8; 4],
    checksum: U32,
    volume_id: VolumeId,
    block_address: U64,
    generation: U64,
    level: u8,
    tree: u8,
    count: U16,
    value_bytes: U32,
    reserved: [u8; 16],
}

/// The key as slots store it.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawKey {
    inode: U64,
    offset: U64,
    kind: u8,
    reserved: [u8; 3],
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct LeafSlot {
    key: RawKey,
    value_offset: U16,
    value_length: U16,
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct InteriorSlot {
    key: RawKey,
    child_checksum: U32,
    child_block: U64,
}

const _: () = {
    assert!(size_of::<NodeHeader>() == 64);
    assert!(offset_of!(NodeHeader, checksum) == 4);
    assert!(offset_of!(NodeHeader, volume_id) == 8);
    assert!(offset_of!(NodeHeader, block_address) == 24);
    assert!(offset_of!(NodeHeader, generation) == 32);
    assert!(offset_of!(NodeHeader, level) == 40);
    assert!(offset_of!(NodeHeader, tree) == 41);
    assert!(offset_of!(NodeHeader, count) == 42);
    assert!(offset_of!(NodeHeader, value_bytes) == 44);
    assert!(offset_of!(NodeHeader, reserved) == 48);
    assert!(size_of::<LeafSlot>() == 24);
    assert!(offset_of!(LeafSlot, value_offset) == 20);
    assert!(offset_of!(LeafSlot, value_length) == 22);
    assert!(size_of::<InteriorSlot>() == 32);
    assert!(offset_of!(InteriorSlot, child_checksum) == 20);
    assert!(offset_of!(InteriorSlot, child_block) == 24);
    assert!(offset_of!(RawKey, offset) == 8);
    assert!(offset_of!(RawKey, kind) == 16);
    // A leaf must be able to hold three of the largest items: splitting relies on more than one.
    assert!(3 * (MAX_VALUE_BYTES + size_of::<LeafSlot>()) <= NODE_BYTES - size_of::<NodeHeader>());
};

impl RawKey {
    fn encode(key: Key) -> Self {
        Self {
            inode: U64::new(key.inode),
            offset: U64::new(key.offset),
            kind: key.kind as u8,
            reserved: [0; 3],
        }
    }

    fn decode(&self) -> Option<Key> {
        Some(Key::new(self.inode.get(), Kind::from_u8(self.kind)?, self.offset.get()))
    }

    /// Whether this key is smaller than `key`, without a branch: a search's comparisons are
    /// unpredictable.
    #[allow(clippy::needless_bitwise_bool)]
    fn is_before(&self, key: &Key) -> bool {
        let (inode, offset, kind) = (self.inode.get(), self.offset.get(), key.kind as u8);
        (inode < key.inode)
            | ((inode == key.inode)
                & ((self.kind < kind) | ((self.kind == kind) & (offset < key.offset))))
    }
}

/// What a parent (or the checkpoint root) knows about a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChildRef {
    /// First of its four blocks.
    pub block: u64,
    /// Its checksum.
    pub checksum: u32,
}

/// What a node read from `child.block` has to be.
#[derive(Debug, Clone, Copy)]
pub struct Expectation {
    /// Of this volume.
    pub volume_id: VolumeId,
    /// At this place, with this checksum.
    pub child: ChildRef,
    /// At this level.
    pub level: u8,
}

/// Where and when a built node is to be written.
#[derive(Debug, Clone, Copy)]
pub struct Placement {
    /// The volume.
    pub volume_id: VolumeId,
    /// First of its four blocks.
    pub block: u64,
    /// Generation of the checkpoint.
    pub generation: u64,
    /// Index in the tree table.
    pub tree: u8,
}

/// A verified, immutable node in memory.
///
/// The bytes are not aligned to blocks on purpose: aligned nodes would compete for the same sets of
/// the processor's caches.
pub struct Node {
    child: ChildRef,
    generation: u64,
    level: u8,
    tree: u8,
    count: u16,
    value_bytes: u32,
    bytes: Box<[u8]>,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Node")
            .field("block", &self.child.block)
            .field("level", &self.level)
            .field("count", &self.count)
            .field("generation", &self.generation)
            .finish_non_exhaustive()
    }
}

impl Node {
    /// Takes over `bytes` as read from the device.
    ///
    /// # Errors
    /// When anything about them is not as specified, or not as expected.
    pub fn parse(bytes: &[u8], expected: &Expectation) -> Result<Self, FormatError> {
        let problem = |text: String| {
            Err(FormatError::new(STRUCTURE, format!("{text} at block {}", expected.child.block)))
        };
        if bytes.len() != NODE_BYTES {
            return problem(format!("{} bytes", bytes.len()));
        }
        let Ok((header, _)) = NodeHeader::ref_from_prefix(bytes) else {
            return problem("no header".to_owned());
        };
        if header.magic != NODE_MAGIC {
            return problem("wrong magic".to_owned());
        }
        let stored = header.checksum.get();
        if stored != expected.child.checksum {
            let wanted = expected.child.checksum;
            return problem(format!("checksum {stored:08x}, its parent says {wanted:08x}"));
        }
        if super::checksum_without_field(bytes, offset_of!(NodeHeader, checksum)) != stored {
            return problem("checksum does not match".to_owned());
        }
        if header.volume_id != expected.volume_id {
            return problem("node of another volume".to_owned());
        }
        if header.block_address.get() != expected.child.block {
            return problem(format!("says it belongs at {}", header.block_address.get()));
        }
        if header.level != expected.level || header.level > MAX_LEVEL {
            return problem(format!("level {}, expected {}", header.level, expected.level));
        }
        if header.tree >= MAX_TREES {
            return problem(format!("tree {}", header.tree));
        }
        let node = Self {
            child: expected.child,
            generation: header.generation.get(),
            level: header.level,
            tree: header.tree,
            count: header.count.get(),
            value_bytes: if header.level == 0 { header.value_bytes.get() } else { 0 },
            bytes: bytes.into(),
        };
        match if node.level == 0 { node.verify_leaf() } else { node.verify_interior() } {
            Ok(()) => Ok(node),
            Err(text) => problem(text),
        }
    }

    fn verify_leaf(&self) -> Result<(), String> {
        let slots = self.leaf_slots();
        if slots.is_empty() || slots.len() != usize::from(self.count) {
            return Err(format!("count {}", self.count));
        }
        verify_keys(slots.iter().map(|slot| &slot.key))?;
        let mut end = NODE_BYTES;
        for (index, slot) in slots.iter().enumerate() {
            let length = usize::from(slot.value_length.get());
            let start = usize::from(slot.value_offset.get());
            if length > MAX_VALUE_BYTES || start + length != end {
                return Err(format!("value of slot {index} at {start}, {length} bytes"));
            }
            end = start;
        }
        if end < HEADER_BYTES + slots.len() * LEAF_SLOT_BYTES {
            return Err("values overlap the slots".to_owned());
        }
        if (NODE_BYTES - end) as u64 != u64::from(self.value_bytes) {
            return Err(format!("value_bytes {}", self.value_bytes));
        }
        Ok(())
    }

    fn verify_interior(&self) -> Result<(), String> {
        let slots = self.interior_slots();
        if slots.is_empty() || slots.len() != usize::from(self.count) {
            return Err(format!("count {}", self.count));
        }
        if let Some(index) = slots.iter().position(|slot| slot.child_block.get() == 0) {
            return Err(format!("slot {index} has no child"));
        }
        verify_keys(slots.iter().map(|slot| &slot.key))
    }

    /// The slots of a leaf; none if this is not one.
    fn leaf_slots(&self) -> &[LeafSlot] {
        let end = HEADER_BYTES + usize::from(self.count) * LEAF_SLOT_BYTES;
        match self.bytes.get(HEADER_BYTES..end) {
            Some(bytes) if self.level == 0 => <[LeafSlot]>::ref_from_bytes(bytes).unwrap_or(&[]),
            _ => &[],
        }
    }

    /// The slots of an interior node; none if this is not one.
    fn interior_slots(&self) -> &[InteriorSlot] {
        let end = HEADER_BYTES + usize::from(self.count) * INTERIOR_SLOT_BYTES;
        match self.bytes.get(HEADER_BYTES..end) {
            Some(bytes) if self.level > 0 => <[InteriorSlot]>::ref_from_bytes(bytes).unwrap_or(&[]),
            _ => &[],
        }
    }

    /// Its place and checksum: what its parent stores.
    pub fn child_ref(&self) -> ChildRef {
        self.child
    }
    /// First of its blocks.
    pub fn block(&self) -> u64 {
        self.child.block
    }
    /// Its checksum.
    pub fn checksum(&self) -> u32 {
        self.child.checksum
    }
    /// The checkpoint that wrote it.
    pub fn generation(&self) -> u64 {
        self.generation
    }
    /// 0 = leaf.
    pub fn level(&self) -> u8 {
        self.level
    }
    /// Index in the tree table.
    pub fn tree(&self) -> u8 {
        self.tree
    }
    /// Number of slots.
    pub fn count(&self) -> usize {
        usize::from(self.count)
    }
    /// Bytes in use by slots and values, of [`NODE_CAPACITY_BYTES`].
    pub fn used_bytes(&self) -> usize {
        if self.level == 0 {
            self.count() * LEAF_SLOT_BYTES + self.value_bytes as usize
        } else {
            self.count() * INTERIOR_SLOT_BYTES
        }
    }
    /// All 16 KiB as on the device.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The key of a slot.
    pub fn key(&self, slot: usize) -> Option<Key> {
        if self.level == 0 {
            self.leaf_slots().get(slot)?.key.decode()
        } else {
            self.interior_slots().get(slot)?.key.decode()
        }
    }
    /// The smallest key; a verified node has one.
    pub fn first_key(&self) -> Option<Key> {
        self.key(0)
    }
    /// The largest key.
    pub fn last_key(&self) -> Option<Key> {
        self.key(self.count().checked_sub(1)?)
    }
    /// Number of slots with keys smaller than `key`.
    pub fn lower_bound(&self, key: &Key) -> usize {
        if self.level == 0 {
            partition(self.leaf_slots(), |slot| slot.key.is_before(key))
        } else {
            partition(self.interior_slots(), |slot| slot.key.is_before(key))
        }
    }
    /// Where `key` is in a leaf (`Ok`), or would be (`Err`).
    pub fn find(&self, key: &Key) -> Result<usize, usize> {
        let slot = self.lower_bound(key);
        if self.key(slot) == Some(*key) { Ok(slot) } else { Err(slot) }
    }
    /// Which child of an interior node covers `key`: the last one whose key is not larger, or
    /// the first.
    pub fn child_index(&self, key: &Key) -> usize {
        match self.find(key) {
            Ok(slot) => slot,
            Err(slot) => slot.saturating_sub(1),
        }
    }
    /// A child of an interior node.
    pub fn child(&self, slot: usize) -> Option<ChildRef> {
        let slot = self.interior_slots().get(slot)?;
        Some(ChildRef { block: slot.child_block.get(), checksum: slot.child_checksum.get() })
    }
    /// Where in [`Node::bytes`] the value of a leaf's slot is.
    pub fn value_range(&self, slot: usize) -> Option<Range<u16>> {
        let slot = self.leaf_slots().get(slot)?;
        let start = slot.value_offset.get();
        Some(start..start.checked_add(slot.value_length.get())?)
    }
    /// Bytes that the item of a leaf's slot takes.
    pub fn item_bytes(&self, slot: usize) -> usize {
        let value = self.leaf_slots().get(slot).map_or(0, |slot| slot.value_length.get());
        LEAF_SLOT_BYTES + usize::from(value)
    }
    /// Bytes that the items of a leaf's slots take together.
    pub fn items_bytes(&self, slots: &Range<usize>) -> usize {
        let Some((slots, values)) = self.items(slots) else { return 0 };
        slots.len() * LEAF_SLOT_BYTES + values.len()
    }
    /// Slots of a leaf and their values, which lie side by side; none if that is an empty range.
    fn items(&self, slots: &Range<usize>) -> Option<(&[LeafSlot], Range<usize>)> {
        let slots = self.leaf_slots().get(slots.clone())?;
        let (first, last) = (slots.first()?, slots.last()?);
        let end = usize::from(first.value_offset.get()) + usize::from(first.value_length.get());
        Some((slots, usize::from(last.value_offset.get())..end))
    }
    /// The value of a leaf's slot.
    pub fn value(&self, slot: usize) -> Option<&[u8]> {
        let range = self.value_range(slot)?;
        self.bytes.get(usize::from(range.start)..usize::from(range.end))
    }
}

/// Keys are of known kinds and strictly increasing.
fn verify_keys<'a>(keys: impl Iterator<Item = &'a RawKey>) -> Result<(), String> {
    let mut previous: Option<Key> = None;
    for (index, raw) in keys.enumerate() {
        let Some(key) = raw.decode() else {
            return Err(format!("slot {index} has kind {}", raw.kind));
        };
        if previous.is_some_and(|previous| previous >= key) {
            return Err(format!("key of slot {index} is not larger than the one before"));
        }
        previous = Some(key);
    }
    Ok(())
}

/// Number of leading slots for which `is_before` holds, as `partition_point`, but made for nodes
/// that are not in the processor's caches: a step looks at seven slots at once, whose loads do not
/// wait for each other, and nothing branches on what is found.
fn partition<T>(slots: &[T], is_before: impl Fn(&T) -> bool) -> usize {
    const WAYS: usize = 8;
    let before = |index: usize| slots.get(index).is_some_and(&is_before);
    // Invariant: base <= result <= base + size.
    let (mut base, mut size) = (0, slots.len());
    while size > 2 * WAYS {
        let step = size / WAYS;
        let passed: usize = (1..WAYS).map(|way| usize::from(before(base + way * step))).sum();
        base += passed * step;
        size = if passed == WAYS - 1 { size - passed * step } else { step };
    }
    while size > 1 {
        let half = size / 2;
        base = if before(base + half) { base + half } else { base };
        size -= half;
    }
    base + usize::from(before(base))
}

/// Writes one node, slot by slot in key order.
#[derive(Debug)]
pub struct NodeBuilder {
    bytes: AlignedBuf,
    level: u8,
    count: u16,
    slots_end: usize,
    values_start: usize,
    last: Option<Key>,
}

impl NodeBuilder {
    /// An empty node of this level.
    pub fn new(level: u8) -> Self {
        Self {
            bytes: AlignedBuf::zeroed(NODE_BYTES),
            level,
            count: 0,
            slots_end: HEADER_BYTES,
            values_start: NODE_BYTES,
            last: None,
        }
    }

    /// Appends an item to a leaf.
    ///
    /// # Errors
    /// When it does not fit, its value is too large, the keys do not increase, or this is no leaf.
    pub fn push_item(&mut self, key: Key, value: &[u8]) -> Result<(), FormatError> {
        if self.level != 0 || value.len() > MAX_VALUE_BYTES {
            return Err(FormatError::new(
                STRUCTURE,
                format!("item of {} bytes in a node of level {}", value.len(), self.level),
            ));
        }
        let end = self.values_start;
        let start = end.saturating_sub(value.len());
        let slot = LeafSlot {
            key: RawKey::encode(key),
            value_offset: U16::new(start as u16),
            value_length: U16::new(value.len() as u16),
        };
        self.push_slot(key, slot.as_bytes(), value.len())?;
        if let Some(place) = self.bytes.get_mut(start..end) {
            place.copy_from_slice(value);
        }
        Ok(())
    }

    /// Appends items as another leaf has them.
    ///
    /// # Errors
    /// As [`NodeBuilder::push_item`]; when there are no such items.
    pub fn push_items(&mut self, node: &Node, slots: &Range<usize>) -> Result<(), FormatError> {
        let problem = |text: &str| Err(FormatError::new(STRUCTURE, text.to_owned()));
        let Some((slots, values)) = node.items(slots).filter(|_| self.level == 0) else {
            return problem("no items to copy");
        };
        let (first, last) = (slots.first(), slots.last());
        let decoded = |slot: Option<&LeafSlot>| slot.and_then(|slot| slot.key.decode());
        let (Some(first), Some(last)) = (decoded(first), decoded(last)) else {
            return problem("impossible key");
        };
        if self.last.is_some_and(|last| last >= first) {
            return problem("items out of order");
        }
        let slots_end = self.slots_end + slots.len() * LEAF_SLOT_BYTES;
        let Some(values_start) =
            self.values_start.checked_sub(values.len()).filter(|start| slots_end <= *start)
        else {
            return problem("overflows");
        };
        if let Some(place) = self.bytes.get_mut(values_start..self.values_start) {
            place.copy_from_slice(&node.bytes[values.clone()]);
        }
        // All values move by the same distance.
        let distance = (values_start as u16).wrapping_sub(values.start as u16);
        if let Some(places) = self.bytes.get_mut(self.slots_end..slots_end) {
            for (place, slot) in places.chunks_exact_mut(LEAF_SLOT_BYTES).zip(slots) {
                let value_offset = U16::new(slot.value_offset.get().wrapping_add(distance));
                place.copy_from_slice(LeafSlot { value_offset, ..*slot }.as_bytes());
            }
        }
        (self.slots_end, self.values_start) = (slots_end, values_start);
        self.count += slots.len() as u16;
        self.last = Some(last);
        Ok(())
    }

    /// Appends a child to an interior node.
    ///
    /// # Errors
    /// When it does not fit, the keys do not increase, or this is a leaf.
    pub fn push_child(&mut self, key: Key, child: ChildRef) -> Result<(), FormatError> {
        if self.level == 0 || child.block == 0 {
            return Err(FormatError::new(
                STRUCTURE,
                format!("child {} in a node of level {}", child.block, self.level),
            ));
        }
        let slot = InteriorSlot {
            key: RawKey::encode(key),
            child_checksum: U32::new(child.checksum),
            child_block: U64::new(child.block),
        };
        self.push_slot(key, slot.as_bytes(), 0)
    }

    /// Places `slot`, and reserves `value_bytes` at the end of the node.
    fn push_slot(&mut self, key: Key, slot: &[u8], value_bytes: usize) -> Result<(), FormatError> {
        if self.last.is_some_and(|last| last >= key) {
            return Err(FormatError::new(STRUCTURE, format!("{key:?} out of order")));
        }
        let end = self.slots_end + slot.len();
        if end + value_bytes > self.values_start {
            return Err(FormatError::new(STRUCTURE, "overflows"));
        }
        if let Some(place) = self.bytes.get_mut(self.slots_end..end) {
            place.copy_from_slice(slot);
        }
        self.slots_end = end;
        self.values_start -= value_bytes;
        self.count += 1;
        self.last = Some(key);
        Ok(())
    }

    /// Completes the node: the bytes for the device, and the node for the cache.
    ///
    /// # Errors
    /// When it is empty, or its level or tree is impossible.
    pub fn finish(mut self, at: &Placement) -> Result<(AlignedBuf, Node), FormatError> {
        if self.count == 0 || self.level > MAX_LEVEL || at.tree >= MAX_TREES {
            return Err(FormatError::new(
                STRUCTURE,
                format!("{} slots, level {}, tree {}", self.count, self.level, at.tree),
            ));
        }
        let value_bytes = (NODE_BYTES - self.values_start) as u32;
        let mut header = NodeHeader {
            magic: NODE_MAGIC,
            checksum: U32::ZERO,
            volume_id: at.volume_id,
            block_address: U64::new(at.block),
            generation: U64::new(at.generation),
            level: self.level,
            tree: at.tree,
            count: U16::new(self.count),
            value_bytes: U32::new(value_bytes),
            reserved: [0; 16],
        };
        let header_place = |bytes: &mut AlignedBuf, header: &NodeHeader| {
            if let Some(place) = bytes.get_mut(..HEADER_BYTES) {
                place.copy_from_slice(header.as_bytes());
            }
        };
        header_place(&mut self.bytes, &header);
        let checksum = super::checksum(&self.bytes);
        header.checksum = U32::new(checksum);
        header_place(&mut self.bytes, &header);
        let node = Node {
            child: ChildRef { block: at.block, checksum },
            generation: at.generation,
            level: self.level,
            tree: at.tree,
            count: self.count,
            value_bytes,
            bytes: self.bytes[..].into(),
        };
        Ok((self.bytes, node))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Placement =
        Placement { volume_id: [7; 16], block: 0x0102_0304, generation: 9, tree: 0 };

    #[test]
    fn items_copied_from_a_leaf_are_as_if_they_were_pushed() {
        let value = |number: u64| vec![number as u8; (number * 7 % 50) as usize];
        let mut source = NodeBuilder::new(0);
        (0..100).for_each(|n| source.push_item(Key::inode(n + 1), &value(n)).unwrap());
        let (_, source) = source.finish(&PLACE).unwrap();
        for slots in [0..100, 0..1, 99..100, 17..63] {
            let (mut copied, mut pushed) = (NodeBuilder::new(0), NodeBuilder::new(0));
            for builder in [&mut copied, &mut pushed] {
                builder.push_item(Key::MIN, b"before").unwrap();
            }
            copied.push_items(&source, &slots).unwrap();
            for slot in slots.clone() {
                let key = source.key(slot).unwrap();
                pushed.push_item(key, source.value(slot).unwrap()).unwrap();
            }
            assert!(copied.push_items(&source, &slots).is_err(), "out of order");
            let bytes: usize = slots.clone().map(|slot| source.item_bytes(slot)).sum();
            assert_eq!(source.items_bytes(&slots), bytes);
            for builder in [&mut copied, &mut pushed] {
                builder.push_item(Key::MAX, b"behind").unwrap();
            }
            let (copied, node) = copied.finish(&PLACE).unwrap();
            assert_eq!(copied[..], pushed.finish(&PLACE).unwrap().0[..]);
            let child = node.child_ref();
            let expected = Expectation { volume_id: PLACE.volume_id, child, level: 0 };
            assert!(Node::parse(&copied, &expected).is_ok());
        }
        let mut builder = NodeBuilder::new(0);
        assert!(builder.push_items(&source, &(5..5)).is_err());
        assert!(builder.push_items(&source, &(99..101)).is_err());
        builder.push_item(Key::MIN, &[0; 4608]).unwrap();
        builder.push_item(Key::inline(0), &[0; 4608]).unwrap();
        builder.push_item(Key::orphan(0), &[0; 4608]).unwrap();
        assert!(builder.push_items(&source, &(1..100)).is_err(), "does not fit");
    }

    fn expectation(checksum: u32, level: u8) -> Expectation {
        let child = ChildRef { block: PLACE.block, checksum };
        Expectation { volume_id: PLACE.volume_id, child, level }
    }

    fn leaf() -> (AlignedBuf, Node) {
        let mut builder = NodeBuilder::new(0);
        builder.push_item(Key::inode(1), b"first").unwrap();
        builder.push_item(Key::inline(1), b"").unwrap();
        builder.push_item(Key::extent(1, 0x1122), &[3; MAX_VALUE_BYTES]).unwrap();
        builder.push_item(Key::inode(2), b"last").unwrap();
        builder.finish(&PLACE).unwrap()
    }

    fn interior() -> (AlignedBuf, Node) {
        let mut builder = NodeBuilder::new(3);
        for index in 0..100 {
            let child = ChildRef { block: 1000 + index * 4, checksum: index as u32 };
            builder.push_child(Key::inode(10 + index), child).unwrap();
        }
        builder.finish(&PLACE).unwrap()
    }

    /// Puts the right checksum into changed bytes.
    fn reseal(bytes: &mut [u8]) -> u32 {
        let checksum = crate::format::checksum_without_field(bytes, 4);
        bytes[4..8].copy_from_slice(&checksum.to_le_bytes());
        checksum
    }

    #[test]
    fn bytes_of_a_leaf_are_as_specified() {
        let (bytes, node) = leaf();
        assert_eq!(bytes.len(), 16384);
        assert_eq!(&bytes[..4], b"NODE");
        assert_eq!(bytes[4..8], node.checksum().to_le_bytes());
        assert_eq!(node.checksum(), crate::format::checksum_without_field(&bytes, 4));
        assert_eq!(bytes[8..24], [7; 16]);
        assert_eq!(bytes[24..32], PLACE.block.to_le_bytes());
        assert_eq!(bytes[32..40], 9u64.to_le_bytes());
        assert_eq!(bytes[40..44], [0, 0, 4, 0]);
        assert_eq!(bytes[44..48], (5 + 4608 + 4u32).to_le_bytes());
        // Slot 2: inode, offset, kind, value_offset, value_length.
        let slot = &bytes[64 + 2 * 24..64 + 3 * 24];
        assert_eq!(slot[..8], 1u64.to_le_bytes());
        assert_eq!(slot[8..16], 0x1122u64.to_le_bytes());
        assert_eq!(slot[16..20], [5, 0, 0, 0]);
        assert_eq!(slot[20..22], (16384 - 5 - 4608u16).to_le_bytes());
        assert_eq!(slot[22..24], 4608u16.to_le_bytes());
        assert_eq!(&bytes[16384 - 5..], b"first");
        assert_eq!(&bytes[16384 - 5 - 4608 - 4..16384 - 5 - 4608], b"last");
    }

    #[test]
    fn bytes_of_an_interior_node_are_as_specified() {
        let (bytes, _) = interior();
        assert_eq!(bytes[40..48], [3, 0, 100, 0, 0, 0, 0, 0]);
        let slot = &bytes[64 + 5 * 32..64 + 6 * 32];
        assert_eq!(slot[..8], 15u64.to_le_bytes());
        assert_eq!(slot[8..20], [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
        assert_eq!(slot[20..24], 5u32.to_le_bytes());
        assert_eq!(slot[24..32], 1020u64.to_le_bytes());
    }

    #[test]
    fn built_nodes_are_read_back() {
        for (bytes, built) in [leaf(), interior()] {
            let node = Node::parse(&bytes, &expectation(built.checksum(), built.level())).unwrap();
            assert_eq!(node.used_bytes(), built.used_bytes());
            assert_eq!(node.count(), built.count());
            for slot in 0..=node.count() {
                assert_eq!(node.key(slot), built.key(slot));
                assert_eq!(node.value(slot), built.value(slot));
                assert_eq!(node.child(slot), built.child(slot));
            }
        }
        let (_, node) = leaf();
        assert_eq!(node.value(0), Some(&b"first"[..]));
        assert_eq!(node.value(1), Some(&b""[..]));
        assert_eq!(node.find(&Key::inode(2)), Ok(3));
        assert_eq!(node.find(&Key::extent(1, 0x1121)), Err(2));
        assert_eq!(node.used_bytes(), 4 * 24 + 4617);
    }

    #[test]
    fn search_finds_the_child_that_covers_a_key() {
        let (_, node) = interior();
        assert_eq!(node.child_index(&Key::inode(1)), 0);
        assert_eq!(node.child_index(&Key::inode(10)), 0);
        assert_eq!(node.child_index(&Key::extent(10, 3)), 0);
        assert_eq!(node.child_index(&Key::inode(11)), 1);
        assert_eq!(node.child_index(&Key::MAX), 99);
    }

    #[test]
    fn partition_finds_every_boundary_of_every_size() {
        for size in 0..=700 {
            let slots: Vec<usize> = (0..size).collect();
            for boundary in 0..=size {
                assert_eq!(partition(&slots, |slot| *slot < boundary), boundary, "of {size}");
            }
        }
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let (mut bytes, node) = leaf();
        let expected = expectation(node.checksum(), 0);
        for offset in (0..200).chain(11_000..12_000).chain(16_000..16_384) {
            bytes[offset] ^= 0x10;
            assert!(Node::parse(&bytes, &expected).is_err(), "offset {offset}");
            bytes[offset] ^= 0x10;
        }
        assert!(Node::parse(&bytes, &expected).is_ok());
    }

    #[test]
    fn wrong_fields_are_refused_even_with_a_right_checksum() {
        // (offset, new byte) in the leaf of four slots.
        let changes = [
            (0, b'M'),                // magic
            (8, 1),                   // volume
            (24, 5),                  // address
            (40, 1),                  // level
            (41, MAX_TREES),          // tree
            (42, 3),                  // count: a value too many
            (42, 0),                  // count
            (43, 0xff),               // count beyond the node
            (44, 0),                  // value_bytes
            (64 + 16, 0),             // kind
            (64 + 16, 3),             // order: (1, dirent, 0) before (1, inline, 0)
            (64 + 24, 0),             // order: inode 0 after 1
            (64 + 22, 4),             // value length
            (64 + 20, 0),             // value offset
            (64 + 2 * 24 + 23, 0x13), // length over the limit
        ];
        for (offset, byte) in changes {
            let (mut bytes, _) = leaf();
            assert_ne!(bytes[offset], byte);
            bytes[offset] = byte;
            let checksum = reseal(&mut bytes);
            let result = Node::parse(&bytes, &expectation(checksum, 0));
            assert!(result.is_err(), "byte {offset} = {byte}");
        }
        let (mut bytes, _) = interior();
        bytes[64 + 24..64 + 32].fill(0);
        let checksum = reseal(&mut bytes);
        assert!(Node::parse(&bytes, &expectation(checksum, 3)).is_err(), "child 0");
        assert!(Node::parse(&bytes[..8192], &expectation(checksum, 3)).is_err(), "half a node");
    }

    #[test]
    fn reserved_bytes_are_ignored() {
        let (mut bytes, _) = leaf();
        bytes[48..64].fill(0xaa);
        bytes[64 + 17..64 + 20].fill(0xbb);
        let checksum = reseal(&mut bytes);
        assert!(Node::parse(&bytes, &expectation(checksum, 0)).is_ok());
    }

    #[test]
    fn builder_refuses_what_cannot_be_read_back() {
        let child = ChildRef { block: 4, checksum: 0 };
        let mut builder = NodeBuilder::new(0);
        assert!(builder.push_child(Key::MIN, child).is_err());
        assert!(builder.push_item(Key::MIN, &[0; MAX_VALUE_BYTES + 1]).is_err());
        for inode in 1..=3 {
            builder.push_item(Key::inode(inode), &[0; MAX_VALUE_BYTES]).unwrap();
        }
        assert!(builder.push_item(Key::inode(3), b"").is_err(), "same key");
        assert!(builder.push_item(Key::inode(4), &[0; MAX_VALUE_BYTES]).is_err(), "full");
        let rest = NODE_CAPACITY_BYTES - 3 * (MAX_VALUE_BYTES + LEAF_SLOT_BYTES) - LEAF_SLOT_BYTES;
        assert!(builder.push_item(Key::inode(4), &vec![0; rest + 1]).is_err(), "a byte too many");
        builder.push_item(Key::inode(4), &vec![0; rest]).unwrap();
        let (bytes, node) = builder.finish(&PLACE).unwrap();
        assert_eq!(node.used_bytes(), NODE_CAPACITY_BYTES);
        assert!(Node::parse(&bytes, &expectation(node.checksum(), 0)).is_ok());
        assert!(NodeBuilder::new(0).finish(&PLACE).is_err(), "empty");
        let mut builder = NodeBuilder::new(1);
        assert!(builder.push_child(Key::MIN, ChildRef { block: 0, checksum: 0 }).is_err());
    }

    proptest::proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(
            is_leaf: bool,
            changes in proptest::collection::vec((0usize..400, proptest::num::u8::ANY), 1..40),
        ) {
            let (mut bytes, built) = if is_leaf { leaf() } else { interior() };
            for (offset, byte) in changes {
                // Leaves what is checked first alone, to get further.
                let offset = 40 + offset;
                bytes[offset] = byte;
            }
            let checksum = reseal(&mut bytes);
            for level in [0, built.level(), bytes[40]] {
                if let Ok(node) = Node::parse(&bytes, &expectation(checksum, level)) {
                    for slot in 0..=node.count() {
                        let _ = (node.value(slot), node.child(slot));
                        if let Some(key) = node.key(slot) {
                            assert_eq!(node.find(&key), Ok(slot));
                        }
                    }
                    let _ = node.child_index(&Key::MAX);
                }
            }
        }
    }
}
