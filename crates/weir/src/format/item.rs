//! Values of tree items: inodes, directory entries, extended attributes, extents.
//!
//! `docs/FORMAT.md`, section "Items", specifies them. Decoders accept arbitrary bytes.

use super::geometry::MAX_GROUPS;
use super::{
    FormatError, GROUP_BLOCKS, MAX_NAME_BYTES, MAX_UNWRITTEN_EXTENT_BLOCKS,
    MAX_WRITTEN_EXTENT_BLOCKS, MAX_XATTR_BYTES,
};
use crate::types::{FileType, Timestamp};
use std::mem::{offset_of, size_of};
use zerocopy::little_endian::{I64, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Flag of [`RawInode::flags`]: the data is in the inline item.
pub const INODE_INLINE: u32 = 1;
/// Flag of a stored extent: reads as zeros, has no checksums.
pub const EXTENT_UNWRITTEN: u32 = 1;
/// Most hard links of an inode.
pub const MAX_LINKS: u32 = i32::MAX as u32;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawInode {
    mode: U32,
    links: U32,
    uid: U32,
    gid: U32,
    size: U64,
    blocks: U64,
    parent: U64,
    change_counter: U64,
    atime: I64,
    mtime: I64,
    ctime: I64,
    btime: I64,
    atime_ns: U32,
    mtime_ns: U32,
    ctime_ns: U32,
    btime_ns: U32,
    rdev: U32,
    flags: U32,
    subdirectories: U32,
    reserved: [u8; 84],
}

/// Size of a stored inode.
pub const INODE_BYTES: usize = 192;
const _: () = assert!(size_of::<RawInode>() == INODE_BYTES);
const _: () = assert!(offset_of!(RawInode, size) == 16);
const _: () = assert!(offset_of!(RawInode, parent) == 32);
const _: () = assert!(offset_of!(RawInode, atime) == 48);
const _: () = assert!(offset_of!(RawInode, atime_ns) == 80);
const _: () = assert!(offset_of!(RawInode, rdev) == 96);
const _: () = assert!(offset_of!(RawInode, subdirectories) == 104);
const _: () = assert!(offset_of!(RawInode, reserved) == 108);

/// A stored inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InodeItem {
    /// What it is.
    pub file_type: FileType,
    /// Permission bits (07777).
    pub permissions: u32,
    /// Hard links.
    pub links: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Bytes; directories: entries.
    pub size: u64,
    /// Allocated blocks.
    pub blocks: u64,
    /// Directories: the containing directory.
    pub parent: u64,
    /// Grows with every change.
    pub change_counter: u64,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of data.
    pub mtime: Timestamp,
    /// Last change of attributes.
    pub ctime: Timestamp,
    /// Birth.
    pub btime: Timestamp,
    /// Device number.
    pub rdev: u32,
    /// See [`INODE_INLINE`].
    pub flags: u32,
    /// Directories: entries that are directories.
    pub subdirectories: u32,
}

impl InodeItem {
    /// The bytes on disk.
    pub fn encode(&self) -> [u8; INODE_BYTES] {
        let raw = RawInode {
            mode: (self.file_type.mode_bits() | (self.permissions & 0o7777)).into(),
            links: self.links.into(),
            uid: self.uid.into(),
            gid: self.gid.into(),
            size: self.size.into(),
            blocks: self.blocks.into(),
            parent: self.parent.into(),
            change_counter: self.change_counter.into(),
            atime: self.atime.seconds.into(),
            mtime: self.mtime.seconds.into(),
            ctime: self.ctime.seconds.into(),
            btime: self.btime.seconds.into(),
            atime_ns: self.atime.nanoseconds.into(),
            mtime_ns: self.mtime.nanoseconds.into(),
            ctime_ns: self.ctime.nanoseconds.into(),
            btime_ns: self.btime.nanoseconds.into(),
            rdev: self.rdev.into(),
            flags: self.flags.into(),
            subdirectories: self.subdirectories.into(),
            reserved: [0; 84],
        };
        let mut bytes = [0; INODE_BYTES];
        bytes.copy_from_slice(raw.as_bytes());
        bytes
    }

    /// Reads the bytes on disk.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let error = |problem: &str| FormatError::new("inode", problem);
        let raw = RawInode::read_from_bytes(bytes).map_err(|_| error("wrong length"))?;
        let mode = raw.mode.get();
        let file_type = FileType::from_mode(mode).ok_or_else(|| error("unknown file type"))?;
        if mode & !0o177_777 != 0 {
            return Err(error("unknown mode bits"));
        }
        let time = |seconds: I64, nanoseconds: U32| {
            if nanoseconds.get() > Timestamp::MAX_NANOSECONDS {
                return Err(error("nanoseconds out of range"));
            }
            Ok(Timestamp { seconds: seconds.get(), nanoseconds: nanoseconds.get() })
        };
        let item = Self {
            file_type,
            permissions: mode & 0o7777,
            links: raw.links.get(),
            uid: raw.uid.get(),
            gid: raw.gid.get(),
            size: raw.size.get(),
            blocks: raw.blocks.get(),
            parent: raw.parent.get(),
            change_counter: raw.change_counter.get(),
            atime: time(raw.atime, raw.atime_ns)?,
            mtime: time(raw.mtime, raw.mtime_ns)?,
            ctime: time(raw.ctime, raw.ctime_ns)?,
            btime: time(raw.btime, raw.btime_ns)?,
            rdev: raw.rdev.get(),
            flags: raw.flags.get(),
            subdirectories: raw.subdirectories.get(),
        };
        if item.size > super::MAX_FILE_BYTES {
            return Err(error("size over 8 EiB - 1"));
        }
        if item.links > MAX_LINKS || item.subdirectories > MAX_LINKS {
            return Err(error("more links than an inode can have"));
        }
        if item.blocks > MAX_GROUPS * GROUP_BLOCKS {
            return Err(error("more blocks than the largest volume has"));
        }
        if item.flags & !INODE_INLINE != 0 {
            return Err(error("unknown flags"));
        }
        Ok(item)
    }

    /// The data is in the inline item.
    pub fn is_inline(&self) -> bool {
        self.flags & INODE_INLINE != 0
    }
}

/// A directory entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dirent<'a> {
    /// The inode it names.
    pub inode: u64,
    /// What that is.
    pub file_type: FileType,
    /// 1–255 bytes.
    pub name: &'a [u8],
}

/// An entry's inode, type and length of name.
const DIRENT_HEAD_BYTES: usize = 10;

/// A directory entry's bytes on disk; no memory of its own, since every new name has one.
pub struct EncodedDirent {
    bytes: [u8; DIRENT_HEAD_BYTES + MAX_NAME_BYTES],
    length: usize,
}

impl std::ops::Deref for EncodedDirent {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl<'a> Dirent<'a> {
    /// The bytes on disk.
    pub fn encode(&self) -> EncodedDirent {
        let mut bytes = [0; DIRENT_HEAD_BYTES + MAX_NAME_BYTES];
        let length = DIRENT_HEAD_BYTES + self.name.len();
        bytes[..8].copy_from_slice(&self.inode.to_le_bytes());
        bytes[8] = self.file_type.dirent_type();
        bytes[9] = self.name.len() as u8;
        bytes[DIRENT_HEAD_BYTES..length].copy_from_slice(self.name);
        EncodedDirent { bytes, length }
    }

    /// Reads the bytes on disk.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, FormatError> {
        let error = |problem: &str| FormatError::new("directory entry", problem);
        let (head, name) =
            bytes.split_first_chunk::<DIRENT_HEAD_BYTES>().ok_or_else(|| error("too short"))?;
        let [i0, i1, i2, i3, i4, i5, i6, i7, kind, length] = *head;
        let inode = u64::from_le_bytes([i0, i1, i2, i3, i4, i5, i6, i7]);
        let file_type =
            FileType::from_dirent_type(kind).ok_or_else(|| error("unknown file type"))?;
        if usize::from(length) != name.len() || name.is_empty() {
            return Err(error("name length does not match"));
        }
        Ok(Self { inode, file_type, name })
    }
}

/// An extended attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Xattr<'a> {
    /// Name with its prefix, 1–255 bytes.
    pub name: &'a [u8],
    /// Up to 4096 bytes.
    pub value: &'a [u8],
}

impl<'a> Xattr<'a> {
    /// The bytes on disk.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(4 + self.name.len() + self.value.len());
        bytes.push(self.name.len() as u8);
        bytes.push(0);
        bytes.extend_from_slice(&(self.value.len() as u16).to_le_bytes());
        bytes.extend_from_slice(self.name);
        bytes.extend_from_slice(self.value);
        bytes
    }

    /// Reads the bytes on disk.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, FormatError> {
        let error = |problem: &str| FormatError::new("extended attribute", problem);
        let (&[name_length, _, low, high], rest) =
            bytes.split_first_chunk::<4>().ok_or_else(|| error("too short"))?;
        let value_length = usize::from(u16::from_le_bytes([low, high]));
        let name_length = usize::from(name_length);
        if name_length == 0 || name_length + value_length != rest.len() {
            return Err(error("lengths do not match"));
        }
        if value_length > MAX_XATTR_BYTES {
            return Err(error("value over 4096 bytes"));
        }
        let (name, value) = rest.split_at(name_length);
        Ok(Self { name, value })
    }
}

/// A run of blocks of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// First block of the volume.
    pub block: u64,
    /// Length in blocks.
    pub blocks: u64,
    /// One checksum per block; empty when the extent is unwritten.
    pub checksums: Vec<u32>,
}

impl Extent {
    /// An extent that reads as zeros.
    pub const fn unwritten(block: u64, blocks: u64) -> Self {
        Self { block, blocks, checksums: Vec::new() }
    }

    /// It reads as zeros.
    pub fn is_unwritten(&self) -> bool {
        self.checksums.is_empty()
    }

    /// The bytes on disk.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(16 + 4 * self.checksums.len());
        bytes.extend_from_slice(&self.block.to_le_bytes());
        bytes.extend_from_slice(&(self.blocks as u32).to_le_bytes());
        let flags = if self.is_unwritten() { EXTENT_UNWRITTEN } else { 0 };
        bytes.extend_from_slice(&flags.to_le_bytes());
        for checksum in &self.checksums {
            bytes.extend_from_slice(&checksum.to_le_bytes());
        }
        bytes
    }

    /// The bytes on disk of an extent of one block.
    pub fn encode_block(block: u64, checksum: u32) -> [u8; 20] {
        let mut bytes = [0; 20];
        bytes[..8].copy_from_slice(&block.to_le_bytes());
        bytes[8..12].copy_from_slice(&1_u32.to_le_bytes());
        bytes[16..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// The head of the bytes on disk: (block, blocks, unwritten).
    pub fn decode_head(bytes: &[u8]) -> Result<(u64, u64, bool), FormatError> {
        let error = |problem: &str| FormatError::new("extent", problem);
        let (head, checksums) =
            bytes.split_first_chunk::<16>().ok_or_else(|| error("too short"))?;
        let [b0, b1, b2, b3, b4, b5, b6, b7, l0, l1, l2, l3, f0, f1, f2, f3] = *head;
        let block = u64::from_le_bytes([b0, b1, b2, b3, b4, b5, b6, b7]);
        let blocks = u64::from(u32::from_le_bytes([l0, l1, l2, l3]));
        let flags = u32::from_le_bytes([f0, f1, f2, f3]);
        if flags & !EXTENT_UNWRITTEN != 0 {
            return Err(error("unknown flags"));
        }
        let unwritten = flags & EXTENT_UNWRITTEN != 0;
        let limit = if unwritten { MAX_UNWRITTEN_EXTENT_BLOCKS } else { MAX_WRITTEN_EXTENT_BLOCKS };
        if blocks == 0 || blocks > limit {
            return Err(error("length out of range"));
        }
        if checksums.len() as u64 != if unwritten { 0 } else { 4 * blocks } {
            return Err(error("number of checksums does not match the length"));
        }
        let last = block.checked_add(blocks - 1).ok_or_else(|| error("address overflow"))?;
        if last >= MAX_GROUPS * GROUP_BLOCKS {
            return Err(error("beyond the largest volume"));
        }
        if block == 0 || block / GROUP_BLOCKS != last / GROUP_BLOCKS {
            return Err(error("not inside one group"));
        }
        Ok((block, blocks, unwritten))
    }

    /// The checksum of the extent's block `index`, straight from the bytes on disk; `None` when
    /// unwritten or out of range.
    pub fn checksum_at(bytes: &[u8], index: u64) -> Option<u32> {
        let start = 16 + 4 * usize::try_from(index).ok()?;
        let field = bytes.get(start..start + 4)?;
        Some(u32::from_le_bytes(field.try_into().ok()?))
    }

    /// Reads the bytes on disk.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let (block, blocks, _) = Self::decode_head(bytes)?;
        let checksums = bytes[16..]
            .chunks_exact(4)
            .map(|field| u32::from_le_bytes([field[0], field[1], field[2], field[3]]))
            .collect();
        Ok(Self { block, blocks, checksums })
    }

    /// The part of the extent that starts `skip` blocks in and is `blocks` long.
    #[must_use]
    pub fn part(&self, skip: u64, blocks: u64) -> Self {
        debug_assert!(skip + blocks <= self.blocks && blocks > 0);
        let checksums = if self.is_unwritten() {
            Vec::new()
        } else {
            self.checksums[skip as usize..(skip + blocks) as usize].to_vec()
        };
        Self { block: self.block + skip, blocks, checksums }
    }
}

/// A name's place among its owner's items: at least 256, below 2^63 (so that it can be a directory
/// cookie), low 8 bits zero (they number collisions).
pub fn name_hash(name: &[u8]) -> u64 {
    (super::digest(name) & 0x7fff_ffff_ffff_ff00).max(0x100)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> InodeItem {
        InodeItem {
            file_type: FileType::Regular,
            permissions: 0o4755,
            links: 3,
            uid: 1000,
            gid: 100,
            size: 123_456,
            blocks: 31,
            parent: 0,
            change_counter: 9,
            atime: Timestamp { seconds: -5, nanoseconds: 999_999_999 },
            mtime: Timestamp { seconds: 1 << 40, nanoseconds: 1 },
            ctime: Timestamp { seconds: 7, nanoseconds: 2 },
            btime: Timestamp { seconds: 8, nanoseconds: 3 },
            rdev: 0,
            flags: INODE_INLINE,
            subdirectories: 0,
        }
    }

    #[test]
    fn inode_survives_the_disk() {
        let item = sample();
        assert_eq!(InodeItem::decode(&item.encode()), Ok(item));
    }

    #[test]
    fn inode_with_impossible_fields_is_refused() {
        let good = sample().encode();
        assert!(InodeItem::decode(&good[..191]).is_err());
        for (offset, value) in [(1usize, 0xf0u8), (2, 1), (23, 0x80), (83, 0xff), (100, 0xfe)] {
            let mut bad = good;
            bad[offset] = value;
            assert!(InodeItem::decode(&bad).is_err(), "byte {offset}");
        }
    }

    #[test]
    fn extent_parts_keep_their_checksums() {
        let extent = Extent { block: 100, blocks: 5, checksums: vec![1, 2, 3, 4, 5] };
        assert_eq!(Extent::decode(&extent.encode()), Ok(extent.clone()));
        let block = extent.part(1, 1);
        assert_eq!(Extent::encode_block(block.block, block.checksums[0])[..], block.encode());
        assert_eq!(extent.part(1, 3), Extent { block: 101, blocks: 3, checksums: vec![2, 3, 4] });
        assert_eq!(Extent::checksum_at(&extent.encode(), 4), Some(5));
        assert_eq!(Extent::checksum_at(&extent.encode(), 5), None);
    }

    #[test]
    fn extent_across_groups_is_refused() {
        let extent = Extent::unwritten(GROUP_BLOCKS - 1, 2);
        assert!(Extent::decode(&extent.encode()).is_err());
    }

    #[test]
    fn names_and_attributes_survive_the_disk() {
        let entry = Dirent { inode: 42, file_type: FileType::Fifo, name: b"pipe" };
        assert_eq!(Dirent::decode(&entry.encode()), Ok(entry));
        let xattr = Xattr { name: b"user.color", value: b"blue" };
        assert_eq!(Xattr::decode(&xattr.encode()), Ok(xattr));
        assert!(Xattr::decode(&xattr.encode()[..10]).is_err());
    }
}
