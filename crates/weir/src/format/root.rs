//! The checkpoint root: where the trees are and which bitmap of each group is current.

use std::mem::{offset_of, size_of};

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::geometry::{GROUP_ENTRY_BYTES, Geometry, ROOT_HEADER_BYTES};
use super::superblock::RootPointer;
use super::{BLOCK_BYTES, FormatError, MAX_COUNTER, NODE_BLOCKS, VolumeId, checksum_without_field};
use crate::device::buffer::AlignedBuf;

/// First bytes of a root.
pub const MAGIC: [u8; 4] = *b"ROOT";
/// Entries of the tree table.
pub const TREE_SLOTS: usize = 8;

const STRUCTURE: &str = "checkpoint root";

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawTree {
    root_block: U64,
    level: u8,
    reserved1: [u8; 3],
    checksum: U32,
    item_count: U64,
    node_count: U64,
    generation: U64,
    reserved2: [u8; 8],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 4],
    checksum: U32,
    volume_id: VolumeId,
    block_address: U64,
    generation: U64,
    checkpoint_lsn: U64,
    next_inode: U64,
    inode_count: U64,
    free_blocks: U64,
    group_count: U32,
    tree_count: U32,
    trees: [RawTree; TREE_SLOTS],
    reserved: [u8; 48],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawGroup {
    generation: U64,
    free_blocks: U32,
    checksum: U32,
    slot: u8,
    reserved: [u8; 7],
}

const _: () = {
    assert!(size_of::<RawTree>() == 48);
    assert!(offset_of!(RawTree, checksum) == 12);
    assert!(offset_of!(RawTree, item_count) == 16);
    assert!(offset_of!(RawTree, generation) == 32);
    assert!(size_of::<RawHeader>() as u64 == ROOT_HEADER_BYTES);
    assert!(offset_of!(RawHeader, checksum) == 4);
    assert!(offset_of!(RawHeader, volume_id) == 8);
    assert!(offset_of!(RawHeader, generation) == 32);
    assert!(offset_of!(RawHeader, next_inode) == 48);
    assert!(offset_of!(RawHeader, free_blocks) == 64);
    assert!(offset_of!(RawHeader, group_count) == 72);
    assert!(offset_of!(RawHeader, trees) == 80);
    assert!(offset_of!(RawHeader, reserved) == 464);
    assert!(size_of::<RawGroup>() as u64 == GROUP_ENTRY_BYTES);
    assert!(offset_of!(RawGroup, free_blocks) == 8);
    assert!(offset_of!(RawGroup, checksum) == 12);
    assert!(offset_of!(RawGroup, slot) == 16);
};

/// Where a tree's root node is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TreeRoot {
    /// First block of the root node; 0 = the tree is empty.
    pub root_block: u64,
    /// Level of the root node; 0 = it is a leaf.
    pub level: u8,
    /// Checksum of the root node.
    pub checksum: u32,
    /// Items in the tree.
    pub item_count: u64,
    /// Nodes in the tree.
    pub node_count: u64,
    /// Generation of the checkpoint that wrote the root node.
    pub generation: u64,
}

/// Which bitmap of a group is current.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GroupEntry {
    /// Generation of the checkpoint that wrote the bitmap.
    pub generation: u64,
    /// Clear bits.
    pub free_blocks: u32,
    /// The value of the bitmap's checksum field.
    pub checksum: u32,
    /// The slot it is in, 0 or 1.
    pub slot: u8,
}

/// A checkpoint root's content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Root {
    /// Generation of the checkpoint.
    pub generation: u64,
    /// The tree holds exactly the records up to here.
    pub checkpoint_lsn: u64,
    /// No inode number from here on was ever used.
    pub next_inode: u64,
    /// Inodes in use.
    pub inode_count: u64,
    /// The file-system tree.
    pub tree: TreeRoot,
    /// One entry per group.
    pub groups: Vec<GroupEntry>,
}

impl Root {
    /// Sum of the groups' free blocks.
    pub fn free_blocks(&self) -> u64 {
        self.groups.iter().map(|group| u64::from(group.free_blocks)).sum()
    }

    /// The root's blocks, for the slot that starts at `block_address`, and the pointer to it that
    /// belongs into the superblock.
    ///
    /// # Errors
    /// There are not as many groups as `geometry` says.
    pub fn encode(
        &self,
        geometry: &Geometry,
        volume_id: &VolumeId,
        block_address: u64,
    ) -> Result<(AlignedBuf, RootPointer), FormatError> {
        if self.groups.len() != geometry.group_count() as usize {
            return Err(FormatError::new(STRUCTURE, "wrong number of groups"));
        }
        let mut trees = [RawTree::new_zeroed(); TREE_SLOTS];
        trees[0] = RawTree {
            root_block: self.tree.root_block.into(),
            level: self.tree.level,
            reserved1: [0; 3],
            checksum: self.tree.checksum.into(),
            item_count: self.tree.item_count.into(),
            node_count: self.tree.node_count.into(),
            generation: self.tree.generation.into(),
            reserved2: [0; 8],
        };
        let header = RawHeader {
            magic: MAGIC,
            checksum: 0.into(),
            volume_id: *volume_id,
            block_address: block_address.into(),
            generation: self.generation.into(),
            checkpoint_lsn: self.checkpoint_lsn.into(),
            next_inode: self.next_inode.into(),
            inode_count: self.inode_count.into(),
            free_blocks: self.free_blocks().into(),
            group_count: geometry.group_count().into(),
            tree_count: 1.into(),
            trees,
            reserved: [0; 48],
        };
        let mut buffer =
            AlignedBuf::with_capacity(geometry.root_slot_blocks() as usize * BLOCK_BYTES);
        buffer.extend_from_slice(header.as_bytes());
        for group in &self.groups {
            let raw = RawGroup {
                generation: group.generation.into(),
                free_blocks: group.free_blocks.into(),
                checksum: group.checksum.into(),
                slot: group.slot,
                reserved: [0; 7],
            };
            buffer.extend_from_slice(raw.as_bytes());
        }
        let field = offset_of!(RawHeader, checksum);
        let own_checksum = super::checksum(&buffer);
        buffer[field..field + 4].copy_from_slice(&own_checksum.to_le_bytes());
        let stored_checksum = super::checksum(&buffer);
        buffer.resize_zeroed(geometry.root_slot_blocks() as usize * BLOCK_BYTES);
        let pointer = RootPointer {
            block: block_address,
            generation: self.generation,
            checksum: stored_checksum,
        };
        Ok((buffer, pointer))
    }

    /// The root in `bytes`, which were read from the slot that `pointer` names.
    ///
    /// # Errors
    /// It is not the root that `pointer` describes, or a field is impossible.
    pub fn decode(
        bytes: &[u8],
        geometry: &Geometry,
        volume_id: &VolumeId,
        pointer: &RootPointer,
    ) -> Result<Self, FormatError> {
        let check = |holds: bool, problem: &str| {
            if holds { Ok(()) } else { Err(FormatError::new(STRUCTURE, problem)) }
        };
        let used = bytes
            .get(..geometry.root_bytes() as usize)
            .ok_or_else(|| FormatError::new(STRUCTURE, "too short"))?;
        let (header, entries) = RawHeader::ref_from_prefix(used)
            .map_err(|_| FormatError::new(STRUCTURE, "too short"))?;
        check(header.magic == MAGIC, "wrong magic")?;
        check(super::checksum(used) == pointer.checksum, "not the one the superblock names")?;
        let computed = checksum_without_field(used, offset_of!(RawHeader, checksum));
        check(header.checksum.get() == computed, "its checksum does not match")?;
        check(header.volume_id == *volume_id, "it belongs to another volume")?;
        check(header.block_address.get() == pointer.block, "it belongs to another place")?;
        check(header.generation.get() == pointer.generation, "it is of another generation")?;
        check(header.group_count.get() == geometry.group_count(), "wrong number of groups")?;
        check(header.tree_count.get() == 1, "wrong number of trees")?;
        let counters =
            [header.generation, header.checkpoint_lsn, header.next_inode, header.inode_count];
        let in_range = counters.iter().all(|counter| counter.get() < MAX_COUNTER);
        check(in_range, "a counter is impossibly large")?;
        let tree = decode_tree(&header.trees[0], geometry)?;
        let raw_groups = <[RawGroup]>::ref_from_bytes(entries)
            .map_err(|_| FormatError::new(STRUCTURE, "the group table is cut"))?;
        let groups = raw_groups
            .iter()
            .zip(0..)
            .map(|(raw, group)| decode_group(raw, group, geometry))
            .collect::<Result<Vec<_>, _>>()?;
        let root = Self {
            generation: header.generation.get(),
            checkpoint_lsn: header.checkpoint_lsn.get(),
            next_inode: header.next_inode.get(),
            inode_count: header.inode_count.get(),
            tree,
            groups,
        };
        check(root.free_blocks() == header.free_blocks.get(), "free blocks do not add up")?;
        Ok(root)
    }
}

fn decode_tree(raw: &RawTree, geometry: &Geometry) -> Result<TreeRoot, FormatError> {
    let tree = TreeRoot {
        root_block: raw.root_block.get(),
        level: raw.level,
        checksum: raw.checksum.get(),
        item_count: raw.item_count.get(),
        node_count: raw.node_count.get(),
        generation: raw.generation.get(),
    };
    if tree.root_block == 0 {
        if (tree.level, tree.item_count, tree.node_count) != (0, 0, 0) {
            return Err(FormatError::new(STRUCTURE, "an empty tree with content"));
        }
    } else if !geometry.is_data_run(tree.root_block, NODE_BLOCKS) {
        return Err(FormatError::new(STRUCTURE, "the tree's root is outside of the data area"));
    }
    // So that counting on, and sums of what nodes take, never overflow.
    if tree.node_count > geometry.data_blocks() / NODE_BLOCKS || tree.item_count >= MAX_COUNTER {
        return Err(FormatError::new(STRUCTURE, "the tree counts more than the volume can have"));
    }
    Ok(tree)
}

fn decode_group(
    raw: &RawGroup,
    group: u32,
    geometry: &Geometry,
) -> Result<GroupEntry, FormatError> {
    let entry = GroupEntry {
        generation: raw.generation.get(),
        free_blocks: raw.free_blocks.get(),
        checksum: raw.checksum.get(),
        slot: raw.slot,
    };
    if entry.slot > 1 || entry.free_blocks as usize > geometry.data_bits(group).len() {
        return Err(FormatError::new(STRUCTURE, format!("impossible entry of group {group}")));
    }
    Ok(entry)
}

#[cfg(test)]
mod tests;
