//! The on-disk structures. No I/O, no locks: bytes in, values out, and back.
//!
//! `docs/FORMAT.md` specifies every byte; the layout assertions of the submodules hold the
//! code to it. Every decoder takes arbitrary bytes and answers with a value or an error: it
//! never panics and never allocates more than its input's size.

pub mod bitmap;
pub mod frame;
pub mod geometry;
pub mod item;
pub mod key;
pub mod node;
pub mod record;
pub mod root;
pub mod superblock;

pub use key::{Key, Kind};

/// Unit of allocation, caching and checksumming.
pub const BLOCK_BYTES: usize = 4096;
/// [`BLOCK_BYTES`] for offset arithmetic.
pub const BLOCK_BYTES_U64: u64 = BLOCK_BYTES as u64;
/// Size of a tree node.
pub const NODE_BYTES: usize = 16384;
/// Blocks of a tree node.
pub const NODE_BLOCKS: u64 = (NODE_BYTES / BLOCK_BYTES) as u64;
/// Blocks of an allocation group: what one bitmap block can describe.
pub const GROUP_BLOCKS: u64 = 4032 * 8;
/// The largest value of a tree item.
pub const MAX_VALUE_BYTES: usize = 4608;
/// Most blocks of a written extent (its checksums are in the item).
pub const MAX_WRITTEN_EXTENT_BLOCKS: u64 = 256;
/// Most blocks of an unwritten extent.
pub const MAX_UNWRITTEN_EXTENT_BLOCKS: u64 = GROUP_BLOCKS;
/// Most blocks of a log frame.
pub const MAX_FRAME_BLOCKS: u64 = 1024;
/// Largest file that keeps its data in the tree.
pub const MAX_INLINE_BYTES: usize = 2048;
/// Longest name of a directory entry.
pub const MAX_NAME_BYTES: usize = 255;
/// Longest target of a symbolic link.
pub const MAX_SYMLINK_BYTES: usize = 4095;
/// Largest value of an extended attribute.
pub const MAX_XATTR_BYTES: usize = 4096;
/// Smallest volume.
pub const MIN_VOLUME_BYTES: u64 = 1 << 20;
/// Largest file: 8 EiB - 1.
pub const MAX_FILE_BYTES: u64 = i64::MAX as u64;

/// Blocks of the largest file.
pub const MAX_FILE_BLOCKS: u64 = MAX_FILE_BYTES / BLOCK_BYTES_U64 + 1;

/// Generations, LSNs, sequence, epoch and inode numbers stay below this: they grow by one at a time
/// and never get there. Decoders refuse larger ones, so that counting on never overflows.
pub const MAX_COUNTER: u64 = 1 << 62;
/// Where such a number has come so far on a volume that is opened, something has damaged it: writing it is refused, since it would end with
/// numbers that no decoder accepts.
pub const MAX_COUNTER_AT_OPENING: u64 = MAX_COUNTER / 2;

/// Identifies a volume; repeated in every structure.
pub type VolumeId = [u8; 16];

/// CRC-32/ISCSI of `bytes`.
pub fn checksum(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// crc32c of `bytes` with the four bytes at `field_offset` taken as zero.
pub fn checksum_without_field(bytes: &[u8], field_offset: usize) -> u32 {
    let (head, rest) = bytes.split_at(field_offset.min(bytes.len()));
    let tail = rest.get(4..).unwrap_or(&[]);
    let mut crc = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    for part in [head, &[0; 4], tail] {
        crc.update(part);
    }
    // A crc of 32 bits, in the type of the widest.
    crc.finalize() as u32
}

/// XXH3-64 of `bytes`: the digest that chains log frames, and the hash of names.
pub fn digest(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}

/// Why bytes could not be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{structure}: {problem}")]
pub struct FormatError {
    /// Which structure, e.g. `superblock`.
    pub structure: &'static str,
    /// What is wrong with it.
    pub problem: String,
}

impl FormatError {
    /// An error of `structure`.
    pub fn new(structure: &'static str, problem: impl Into<String>) -> Self {
        Self { structure, problem: problem.into() }
    }
}

impl From<FormatError> for crate::Error {
    fn from(error: FormatError) -> Self {
        Self::Corrupt(error.to_string())
    }
}
