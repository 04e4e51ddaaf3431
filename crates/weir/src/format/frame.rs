//! Header of a log frame: what makes a run of blocks in the ring the next piece of the log.
//!
//! The header and the records behind it are covered by one checksum; payload blocks are covered by the
//! checksums in their `payload` records. `prev_digest` chains each frame to the one before, so
//! that a frame of an earlier lap of the ring can never follow a cut tail.

use super::{
    BLOCK_BYTES, FormatError, MAX_COUNTER, MAX_FRAME_BLOCKS, VolumeId, checksum_without_field,
    digest,
};
use std::mem::offset_of;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First bytes of a frame.
pub const FRAME_MAGIC: [u8; 4] = *b"FRAM";
/// Size of the header; the records follow at once.
pub const FRAME_HEADER_BYTES: usize = 128;
/// Flag: the batch goes on in the next frame.
pub const FLAG_CONTINUES: u32 = 1;
/// How far behind its regular place a frame may start, after writes that failed.
pub const RETRY_WINDOW_BLOCKS: u64 = 192;

const CHECKSUM_OFFSET: usize = 4;

/// The header as stored.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawFrameHeader {
    magic: [u8; 4],
    checksum: U32,
    volume_id: [u8; 16],
    epoch: U64,
    sequence: U64,
    first_lsn: U64,
    last_lsn: U64,
    transaction: U64,
    durable_lsn: U64,
    prev_digest: U64,
    ring_position_blocks: U64,
    meta_bytes: U32,
    record_count: U32,
    payload_blocks: U32,
    total_blocks: U32,
    flags: U32,
    reserved: [u8; 20],
}

const _: () = assert!(size_of::<RawFrameHeader>() == FRAME_HEADER_BYTES);
const _: () = assert!(offset_of!(RawFrameHeader, checksum) == CHECKSUM_OFFSET);
const _: () = assert!(offset_of!(RawFrameHeader, volume_id) == 8);
const _: () = assert!(offset_of!(RawFrameHeader, epoch) == 24);
const _: () = assert!(offset_of!(RawFrameHeader, sequence) == 32);
const _: () = assert!(offset_of!(RawFrameHeader, first_lsn) == 40);
const _: () = assert!(offset_of!(RawFrameHeader, last_lsn) == 48);
const _: () = assert!(offset_of!(RawFrameHeader, transaction) == 56);
const _: () = assert!(offset_of!(RawFrameHeader, durable_lsn) == 64);
const _: () = assert!(offset_of!(RawFrameHeader, prev_digest) == 72);
const _: () = assert!(offset_of!(RawFrameHeader, ring_position_blocks) == 80);
const _: () = assert!(offset_of!(RawFrameHeader, meta_bytes) == 88);
const _: () = assert!(offset_of!(RawFrameHeader, record_count) == 92);
const _: () = assert!(offset_of!(RawFrameHeader, payload_blocks) == 96);
const _: () = assert!(offset_of!(RawFrameHeader, total_blocks) == 100);
const _: () = assert!(offset_of!(RawFrameHeader, flags) == 104);
const _: () = assert!(offset_of!(RawFrameHeader, reserved) == 108);

/// The header's meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// Of the volume.
    pub volume_id: VolumeId,
    /// Log epoch: one more after every recovery.
    pub epoch: u64,
    /// One more than the frame before.
    pub sequence: u64,
    /// LSN of the first operation.
    pub first_lsn: u64,
    /// LSN of the last operation.
    pub last_lsn: u64,
    /// Generation of the checkpoint that will contain it.
    pub transaction: u64,
    /// What was durable when the frame was written.
    pub durable_lsn: u64,
    /// Digest of the frame before.
    pub prev_digest: u64,
    /// Its own place in the ring.
    pub ring_position_blocks: u64,
    /// Bytes of header and records.
    pub meta_bytes: u32,
    /// Number of records.
    pub record_count: u32,
    /// Payload blocks at the end of the frame.
    pub payload_blocks: u32,
    /// The batch goes on in the next frame.
    pub continues: bool,
}

/// Blocks that `meta_bytes` of header and records take.
pub const fn meta_blocks(meta_bytes: usize) -> u64 {
    meta_bytes.div_ceil(BLOCK_BYTES) as u64
}

impl FrameHeader {
    /// Blocks of the whole frame.
    pub fn total_blocks(&self) -> u64 {
        meta_blocks(self.meta_bytes as usize) + u64::from(self.payload_blocks)
    }

    /// Writes the header over the first bytes of `frame`, whose first `meta_bytes` bytes are
    /// header and records, seals it with the checksum, and returns the digest the next frame must carry.
    ///
    /// # Errors
    /// `frame` is shorter than `meta_bytes`, or `meta_bytes` than a header.
    pub fn seal(&self, frame: &mut [u8]) -> Result<u64, FormatError> {
        let meta = frame
            .get_mut(..self.meta_bytes as usize)
            .ok_or_else(|| FormatError::new("frame", "buffer too short"))?;
        let raw = RawFrameHeader {
            magic: FRAME_MAGIC,
            checksum: U32::new(0),
            volume_id: self.volume_id,
            epoch: U64::new(self.epoch),
            sequence: U64::new(self.sequence),
            first_lsn: U64::new(self.first_lsn),
            last_lsn: U64::new(self.last_lsn),
            transaction: U64::new(self.transaction),
            durable_lsn: U64::new(self.durable_lsn),
            prev_digest: U64::new(self.prev_digest),
            ring_position_blocks: U64::new(self.ring_position_blocks),
            meta_bytes: U32::new(self.meta_bytes),
            record_count: U32::new(self.record_count),
            payload_blocks: U32::new(self.payload_blocks),
            total_blocks: U32::new(self.total_blocks() as u32),
            flags: U32::new(if self.continues { FLAG_CONTINUES } else { 0 }),
            reserved: [0; 20],
        };
        raw.write_to_prefix(meta)
            .map_err(|_| FormatError::new("frame", "no room for the header"))?;
        let checksum = super::checksum(meta);
        meta[CHECKSUM_OFFSET..CHECKSUM_OFFSET + 4].copy_from_slice(&checksum.to_le_bytes());
        Ok(digest(meta))
    }

    /// The header at the start of `block`, if it says of itself that it is a frame's and its lengths are
    /// possible. The checksum is not looked at yet: that takes all `meta_bytes` bytes, see
    /// [`FrameHeader::verify`].
    pub fn peek(block: &[u8]) -> Option<Self> {
        let (raw, _) = RawFrameHeader::ref_from_prefix(block).ok()?;
        if raw.magic != FRAME_MAGIC {
            return None;
        }
        let header = Self {
            volume_id: raw.volume_id,
            epoch: raw.epoch.get(),
            sequence: raw.sequence.get(),
            first_lsn: raw.first_lsn.get(),
            last_lsn: raw.last_lsn.get(),
            transaction: raw.transaction.get(),
            durable_lsn: raw.durable_lsn.get(),
            prev_digest: raw.prev_digest.get(),
            ring_position_blocks: raw.ring_position_blocks.get(),
            meta_bytes: raw.meta_bytes.get(),
            record_count: raw.record_count.get(),
            payload_blocks: raw.payload_blocks.get(),
            continues: raw.flags.get() & FLAG_CONTINUES != 0,
        };
        let lengths_hold = header.meta_bytes as usize >= FRAME_HEADER_BYTES
            && header.total_blocks() <= MAX_FRAME_BLOCKS
            && header.total_blocks() == u64::from(raw.total_blocks.get())
            && header.first_lsn <= header.last_lsn
            && [header.last_lsn, header.sequence, header.epoch].iter().all(|n| *n < MAX_COUNTER);
        lengths_hold.then_some(header)
    }

    /// Checks the checksum of `frame`, which starts with this header, and returns the digest that
    /// the next frame must carry; `None` when the bytes are not what was written.
    pub fn verify(&self, frame: &[u8]) -> Option<u64> {
        let meta = frame.get(..self.meta_bytes as usize)?;
        let (raw, _) = RawFrameHeader::ref_from_prefix(meta).ok()?;
        let matches = checksum_without_field(meta, CHECKSUM_OFFSET) == raw.checksum.get();
        matches.then(|| digest(meta))
    }

    /// The records' bytes within `frame`.
    pub fn records<'a>(&self, frame: &'a [u8]) -> &'a [u8] {
        frame.get(FRAME_HEADER_BYTES..self.meta_bytes as usize).unwrap_or(&[])
    }

    /// Payload block `index` within `frame`.
    pub fn payload<'a>(&self, frame: &'a [u8], index: u32) -> Option<&'a [u8]> {
        if index >= self.payload_blocks {
            return None;
        }
        let block = meta_blocks(self.meta_bytes as usize) as usize + index as usize;
        frame.get(block * BLOCK_BYTES..(block + 1) * BLOCK_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> FrameHeader {
        FrameHeader {
            volume_id: [7; 16],
            epoch: 3,
            sequence: 4,
            first_lsn: 10,
            last_lsn: 12,
            transaction: 5,
            durable_lsn: 9,
            prev_digest: 0x1122,
            ring_position_blocks: 33,
            meta_bytes: 5000,
            record_count: 2,
            payload_blocks: 1,
            continues: true,
        }
    }

    #[test]
    fn sealed_headers_read_back_and_verify() {
        let mut frame = vec![0x5a; 3 * BLOCK_BYTES];
        let sealed = header().seal(&mut frame).unwrap();
        let read = FrameHeader::peek(&frame).unwrap();
        assert_eq!(read, header());
        assert_eq!(read.total_blocks(), 3);
        assert_eq!(read.verify(&frame), Some(sealed));
        assert_eq!(sealed, digest(&frame[..5000]));
        assert_eq!(read.records(&frame).len(), 5000 - FRAME_HEADER_BYTES);
        assert_eq!(read.payload(&frame, 0).unwrap().len(), BLOCK_BYTES);
        assert!(read.payload(&frame, 1).is_none());
    }

    #[test]
    fn any_changed_byte_of_the_meta_part_is_noticed() {
        let mut frame = vec![0x5a; 3 * BLOCK_BYTES];
        header().seal(&mut frame).unwrap();
        for at in (0..FRAME_HEADER_BYTES).chain([1000, 4096, 4999]) {
            frame[at] ^= 4;
            let accepted = FrameHeader::peek(&frame).and_then(|read| read.verify(&frame));
            assert_eq!(accepted, None, "byte {at}");
            frame[at] ^= 4;
        }
    }

    #[test]
    fn impossible_lengths_are_refused() {
        let mut frame = vec![0; 3 * BLOCK_BYTES];
        for change in [
            (|h| h.meta_bytes = 127) as fn(&mut FrameHeader),
            |h| h.payload_blocks = u32::MAX,
            |h| h.payload_blocks = 1023,
            |h| h.first_lsn = 13,
        ] {
            let mut wrong = header();
            change(&mut wrong);
            let _ = wrong.seal(&mut frame);
            assert_eq!(FrameHeader::peek(&frame), None);
        }
        assert!(header().seal(&mut [0; 200]).is_err());
        assert_eq!(FrameHeader::peek(b"FRAM"), None);
    }
}
