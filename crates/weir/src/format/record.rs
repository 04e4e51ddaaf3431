//! Log records: what a frame says, one state change after the other.
//!
//! A record is kind u8, reserved u8, body length u16, body. Records are not aligned. [`Record`]
//! encodes into any byte vector and [`Records`] decodes arbitrary bytes: a decoder never panics,
//! never allocates, and answers malformed bytes with an error and then ends.

use super::key::{Key, Kind};
use super::{FormatError, MAX_FILE_BLOCKS, MAX_VALUE_BYTES};

/// Bytes of a record before its body.
pub const RECORD_HEADER_BYTES: usize = 4;
/// Most blocks that one `wrote` record can name; [`Record::encode`] splits longer runs.
pub const MAX_WROTE_BLOCKS: usize = 8192;
/// Where the payload index lies in an encoded `payload` record, from the record's first byte.
pub const PAYLOAD_INDEX_OFFSET: usize = RECORD_HEADER_BYTES + 24;
/// Where its checksum lies.
pub const PAYLOAD_CHECKSUM_OFFSET: usize = PAYLOAD_INDEX_OFFSET + 4;

/// Bytes of a key within a record.
pub const KEY_BYTES: usize = 17;
const PUT: u8 = 1;
const DELETE: u8 = 2;
const ALLOC: u8 = 3;
const FREE: u8 = 4;
const PAYLOAD: u8 = 5;
const WROTE: u8 = 6;
const HOME: u8 = 7;
const NEXT_INODE: u8 = 8;
const SETTLED: u8 = 9;

/// A run of little-endian crc32c values, borrowed from a record or from memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Checksums<'a> {
    /// As stored.
    Stored(&'a [u8]),
    /// As computed.
    Values(&'a [u32]),
}

impl<'a> Checksums<'a> {
    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            Self::Stored(bytes) => bytes.len() / 4,
            Self::Values(values) => values.len(),
        }
    }
    /// True when there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// All of them in order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + 'a {
        let (stored, values): (&'a [u8], &'a [u32]) = match *self {
            Self::Stored(bytes) => (bytes, &[]),
            Self::Values(values) => (&[], values),
        };
        let stored = stored.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        stored.chain(values.iter().copied())
    }
}

/// One log record. The meaning of each is in `docs/FORMAT.md`, section Log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record<'a> {
    /// The item now has this value.
    Put {
        /// Which item.
        key: Key,
        /// Its whole value.
        value: &'a [u8],
    },
    /// The item is gone.
    Delete {
        /// Which item.
        key: Key,
    },
    /// The blocks are in use.
    Alloc {
        /// First block.
        block: u64,
        /// How many.
        length_blocks: u32,
    },
    /// The blocks are free once the checkpoint is durable.
    Free {
        /// First block.
        block: u64,
        /// How many.
        length_blocks: u32,
    },
    /// A page's content is a payload block of this frame.
    Payload {
        /// Owner of the page.
        inode: u64,
        /// The page's place in the file.
        file_block: u64,
        /// Where its content lives on disk and no longer matters; 0 = nowhere yet.
        home_block: u64,
        /// Which payload block of the frame.
        index: u32,
        /// Of the payload block.
        checksum: u32,
    },
    /// The blocks were written before this frame and must hold this.
    Wrote {
        /// First block.
        block: u64,
        /// One crc32c for each block.
        checksums: Checksums<'a>,
    },
    /// A logged page has gone home in place.
    Home {
        /// Owner of the page.
        inode: u64,
        /// The page's place in the file.
        file_block: u64,
        /// Where it was written.
        block: u64,
        /// What the extent's checksum for the block is now.
        checksum: u32,
    },
    /// Inode numbers below this are used.
    NextInode {
        /// The bound.
        next_inode: u64,
    },
    /// Payload of these pages that the log holds from before is void: they are home, or gone.
    Settled {
        /// Owner of the pages.
        inode: u64,
        /// The first page's place in the file.
        file_block: u64,
        /// How many; may reach to the end of all files.
        length_blocks: u64,
    },
}

fn put_header(out: &mut Vec<u8>, kind: u8, body_bytes: usize) {
    out.push(kind);
    out.push(0);
    out.extend_from_slice(&(body_bytes as u16).to_le_bytes());
}

fn put_key(out: &mut Vec<u8>, key: Key) {
    let mut bytes = [0; KEY_BYTES];
    bytes[..8].copy_from_slice(&key.inode.to_le_bytes());
    bytes[8..16].copy_from_slice(&key.offset.to_le_bytes());
    bytes[16] = key.kind as u8;
    out.extend_from_slice(&bytes);
}

impl Record<'_> {
    /// Appends the record to `out` and returns how many records that took: more than one only for
    /// a `wrote` of more than [`MAX_WROTE_BLOCKS`].
    ///
    /// # Errors
    /// A value longer than a tree item may be; nothing was appended then.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<u32, FormatError> {
        match *self {
            Self::Put { key, value } => {
                if value.len() > MAX_VALUE_BYTES {
                    return Err(FormatError::new("record", "value too long"));
                }
                put_header(out, PUT, KEY_BYTES + value.len());
                put_key(out, key);
                out.extend_from_slice(value);
            }
            Self::Delete { key } => {
                put_header(out, DELETE, KEY_BYTES);
                put_key(out, key);
            }
            Self::Alloc { block, length_blocks } | Self::Free { block, length_blocks } => {
                let kind = if matches!(self, Self::Alloc { .. }) { ALLOC } else { FREE };
                put_header(out, kind, 12);
                out.extend_from_slice(&block.to_le_bytes());
                out.extend_from_slice(&length_blocks.to_le_bytes());
            }
            Self::Payload { inode, file_block, home_block, index, checksum } => {
                put_header(out, PAYLOAD, 32);
                let mut body = [0; 32];
                body[..8].copy_from_slice(&inode.to_le_bytes());
                body[8..16].copy_from_slice(&file_block.to_le_bytes());
                body[16..24].copy_from_slice(&home_block.to_le_bytes());
                body[24..28].copy_from_slice(&index.to_le_bytes());
                body[28..].copy_from_slice(&checksum.to_le_bytes());
                out.extend_from_slice(&body);
            }
            Self::Wrote { block, checksums } => return Ok(encode_wrote(out, block, checksums)),
            Self::Home { inode, file_block, block, checksum } => {
                put_header(out, HOME, 28);
                let mut body = [0; 28];
                body[..8].copy_from_slice(&inode.to_le_bytes());
                body[8..16].copy_from_slice(&file_block.to_le_bytes());
                body[16..24].copy_from_slice(&block.to_le_bytes());
                body[24..].copy_from_slice(&checksum.to_le_bytes());
                out.extend_from_slice(&body);
            }
            Self::NextInode { next_inode } => {
                put_header(out, NEXT_INODE, 8);
                out.extend_from_slice(&next_inode.to_le_bytes());
            }
            Self::Settled { inode, file_block, length_blocks } => {
                put_header(out, SETTLED, 24);
                out.extend_from_slice(&inode.to_le_bytes());
                out.extend_from_slice(&file_block.to_le_bytes());
                out.extend_from_slice(&length_blocks.to_le_bytes());
            }
        }
        Ok(1)
    }
}

/// Appends as many `wrote` records as the run of blocks needs.
fn encode_wrote(out: &mut Vec<u8>, mut block: u64, checksums: Checksums<'_>) -> u32 {
    let mut records = 0;
    let mut left = checksums.len();
    let mut values = checksums.iter();
    while left > 0 {
        let count = left.min(MAX_WROTE_BLOCKS);
        put_header(out, WROTE, 10 + 4 * count);
        out.extend_from_slice(&block.to_le_bytes());
        out.extend_from_slice(&(count as u16).to_le_bytes());
        for value in values.by_ref().take(count) {
            out.extend_from_slice(&value.to_le_bytes());
        }
        block = block.saturating_add(count as u64);
        left -= count;
        records += 1;
    }
    records
}

/// Takes fixed-size fields off the front of a record's body.
struct Body<'a>(&'a [u8]);

impl<'a> Body<'a> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], FormatError> {
        let (field, rest) = self.0.split_first_chunk::<N>().ok_or_else(short)?;
        self.0 = rest;
        Ok(*field)
    }
    fn u64(&mut self) -> Result<u64, FormatError> {
        Ok(u64::from_le_bytes(self.take()?))
    }
    fn u32(&mut self) -> Result<u32, FormatError> {
        Ok(u32::from_le_bytes(self.take()?))
    }
    fn file_block(&mut self) -> Result<u64, FormatError> {
        let file_block = self.u64()?;
        if file_block > MAX_FILE_BLOCKS {
            return Err(FormatError::new("record", "a place beyond the largest file"));
        }
        Ok(file_block)
    }
    fn key(&mut self) -> Result<Key, FormatError> {
        let (inode, offset) = (self.u64()?, self.u64()?);
        let [kind] = self.take()?;
        let kind = Kind::from_u8(kind)
            .ok_or_else(|| FormatError::new("record", format!("unknown item kind {kind}")))?;
        Ok(Key { inode, kind, offset })
    }
    fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }
}

fn short() -> FormatError {
    FormatError::new("record", "body too short")
}

fn decode_body(kind: u8, bytes: &[u8]) -> Result<Record<'_>, FormatError> {
    let mut body = Body(bytes);
    let record = match kind {
        PUT => {
            let key = body.key()?;
            let value = body.rest();
            if value.len() > MAX_VALUE_BYTES {
                return Err(FormatError::new("record", "value too long"));
            }
            Record::Put { key, value }
        }
        DELETE => Record::Delete { key: body.key()? },
        ALLOC => Record::Alloc { block: body.u64()?, length_blocks: body.u32()? },
        FREE => Record::Free { block: body.u64()?, length_blocks: body.u32()? },
        PAYLOAD => Record::Payload {
            inode: body.u64()?,
            file_block: body.file_block()?,
            home_block: body.u64()?,
            index: body.u32()?,
            checksum: body.u32()?,
        },
        WROTE => {
            let block = body.u64()?;
            let count = usize::from(u16::from_le_bytes(body.take()?));
            let stored = body.rest();
            if stored.len() != 4 * count {
                return Err(FormatError::new("record", "count and length of wrote disagree"));
            }
            Record::Wrote { block, checksums: Checksums::Stored(stored) }
        }
        HOME => Record::Home {
            inode: body.u64()?,
            file_block: body.file_block()?,
            block: body.u64()?,
            checksum: body.u32()?,
        },
        NEXT_INODE => Record::NextInode { next_inode: body.u64()? },
        SETTLED => Record::Settled {
            inode: body.u64()?,
            file_block: body.file_block()?,
            length_blocks: body.u64()?,
        },
        _ => return Err(FormatError::new("record", format!("unknown kind {kind}"))),
    };
    if !body.0.is_empty() {
        return Err(FormatError::new("record", "body too long"));
    }
    Ok(record)
}

/// Decodes records one after the other; ends after the first error.
#[derive(Debug, Clone)]
pub struct Records<'a>(&'a [u8]);

impl<'a> Records<'a> {
    /// The records in `bytes`, which must hold nothing else.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    fn decode_next(&mut self) -> Result<Record<'a>, FormatError> {
        let bytes = std::mem::take(&mut self.0);
        let ([kind, _reserved, low, high], rest) =
            bytes.split_first_chunk::<RECORD_HEADER_BYTES>().ok_or_else(short)?;
        let body_bytes = usize::from(u16::from_le_bytes([*low, *high]));
        let (body, rest) = rest.split_at_checked(body_bytes).ok_or_else(short)?;
        let record = decode_body(*kind, body)?;
        self.0 = rest;
        Ok(record)
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = Result<Record<'a>, FormatError>;
    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() { None } else { Some(self.decode_next()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples<'a>(value: &'a [u8], sums: &'a [u32]) -> Vec<Record<'a>> {
        vec![
            Record::Put { key: Key::inode(5), value },
            Record::Put { key: Key::orphan(5), value: &[] },
            Record::Delete { key: Key::extent(7, 9) },
            Record::Alloc { block: 1 << 40, length_blocks: 77 },
            Record::Free { block: 3, length_blocks: u32::MAX },
            Record::Payload { inode: 1, file_block: 2, home_block: 3, index: 4, checksum: 5 },
            Record::Wrote { block: 100, checksums: Checksums::Values(sums) },
            Record::Home { inode: 1, file_block: 2, block: 3, checksum: 4 },
            Record::NextInode { next_inode: u64::MAX },
            Record::Settled { inode: 1, file_block: 2, length_blocks: u64::MAX },
        ]
    }

    /// Two checksum runs are equal when their values are, however they are held.
    fn same(left: &Record<'_>, right: &Record<'_>) -> bool {
        match (left, right) {
            (
                Record::Wrote { block: a, checksums: x },
                Record::Wrote { block: b, checksums: y },
            ) => a == b && x.iter().eq(y.iter()),
            _ => left == right,
        }
    }

    #[test]
    fn every_record_survives_encoding() {
        let sums = [1, 2, u32::MAX];
        let value = vec![9; MAX_VALUE_BYTES];
        let records = samples(&value, &sums);
        let mut bytes = Vec::new();
        for record in &records {
            assert_eq!(record.encode(&mut bytes), Ok(1));
        }
        let decoded: Vec<_> = Records::new(&bytes).collect::<Result<_, _>>().unwrap();
        assert_eq!(decoded.len(), records.len());
        assert!(decoded.iter().zip(&records).all(|(left, right)| same(left, right)));
    }

    #[test]
    fn bytes_of_each_record_are_as_specified() {
        let mut bytes = Vec::new();
        let record = Record::Payload {
            inode: 1,
            file_block: 2,
            home_block: 3,
            index: 0x0403_0201,
            checksum: 6,
        };
        record.encode(&mut bytes).unwrap();
        assert_eq!(bytes[..4], [5, 0, 32, 0]);
        assert_eq!(bytes[PAYLOAD_INDEX_OFFSET..][..4], [1, 2, 3, 4]);
        assert_eq!(bytes[PAYLOAD_CHECKSUM_OFFSET..], [6, 0, 0, 0]);
        bytes.clear();
        Record::Put { key: Key::new(1, Kind::Extent, 2), value: &[0xee] }
            .encode(&mut bytes)
            .unwrap();
        let expected = [1, 0, 18, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 5, 0xee];
        assert_eq!(bytes, expected);
    }

    #[test]
    fn long_runs_of_wrote_are_split_without_a_gap() {
        let sums: Vec<u32> = (0..2 * MAX_WROTE_BLOCKS as u32 + 5).collect();
        let mut bytes = Vec::new();
        let record = Record::Wrote { block: 10, checksums: Checksums::Values(&sums) };
        assert_eq!(record.encode(&mut bytes), Ok(3));
        let mut next = 0;
        for record in Records::new(&bytes) {
            let Record::Wrote { block, checksums } = record.unwrap() else { panic!("not a wrote") };
            assert_eq!(block, 10 + u64::from(next));
            for sum in checksums.iter() {
                assert_eq!(sum, next);
                next += 1;
            }
        }
        assert_eq!(next as usize, sums.len());
    }

    #[test]
    fn a_value_too_long_for_an_item_is_refused_both_ways() {
        let value = vec![0; MAX_VALUE_BYTES + 1];
        let mut bytes = Vec::new();
        assert!(Record::Put { key: Key::MIN, value: &value }.encode(&mut bytes).is_err());
        assert!(bytes.is_empty());
        put_header(&mut bytes, PUT, KEY_BYTES + value.len());
        put_key(&mut bytes, Key::MIN);
        bytes.extend_from_slice(&value);
        assert!(Records::new(&bytes).next().unwrap().is_err());
    }

    #[test]
    fn arbitrary_bytes_end_in_an_error_or_nothing() {
        let sums = [1, 2, 3];
        let mut good = Vec::new();
        for record in samples(&[7; 40], &sums) {
            record.encode(&mut good).unwrap();
        }
        for cut in 0..good.len() {
            // A prefix decodes to records and at most one error, at its end.
            let results: Vec<_> = Records::new(&good[..cut]).collect();
            let errors = results.iter().filter(|result| result.is_err()).count();
            assert!(errors <= 1 && results.iter().rev().skip(1).all(Result::is_ok));
        }
        let mut seed = 1_u64;
        for _ in 0..20_000 {
            let mut bytes = good.clone();
            for _ in 0..3 {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let at = (seed >> 33) as usize % bytes.len();
                bytes[at] = (seed >> 20) as u8;
            }
            assert!(Records::new(&bytes).count() <= bytes.len());
        }
    }
}
