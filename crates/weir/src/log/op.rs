//! [`OpRecords`]: the records of one operation, with the pages that travel with them; and the
//! frame under construction that takes whole operations.

use super::companion::Companions;
use super::core::Lsn;
use crate::cache::page::PageRef;
use crate::device::buffer::AlignedBuf;
use crate::format::frame::{FRAME_HEADER_BYTES, meta_blocks};
use crate::format::record::{Checksums, PAYLOAD_CHECKSUM_OFFSET, PAYLOAD_INDEX_OFFSET, Record};
use crate::format::{FormatError, Key, checksum};

/// Largest buffer of a written frame that is kept for the next.
const SPARE_FRAME_BYTES: usize = 1 << 20;

/// The records of one operation: it is replayed as a whole or not at all. Reusable: [`super::Log::append`]
/// leaves it empty, with its memory.
#[derive(Debug, Default)]
pub struct OpRecords {
    bytes: Vec<u8>,
    record_count: u32,
    /// Where in `bytes` the payload indices are; they count from 0 until `append` knows the frame.
    index_fields: Vec<u32>,
    payloads: Vec<PageRef>,
    /// Which of them the writer of the frame has to sum.
    unsummed: Vec<u32>,
    companions: Vec<Companions>,
}

impl OpRecords {
    /// No records.
    pub fn new() -> Self {
        Self::default()
    }

    /// No records, and memory for so many bytes of them.
    pub fn with_capacity(bytes: usize) -> Self {
        Self { bytes: Vec::with_capacity(bytes), ..Self::default() }
    }

    /// Adds any record but `payload`, which needs its page: see [`OpRecords::payload`].
    ///
    /// # Errors
    /// A value longer than an item may be, or a payload record.
    pub fn push(&mut self, record: &Record<'_>) -> Result<(), FormatError> {
        if matches!(record, Record::Payload { .. }) {
            return Err(FormatError::new("record", "a payload record needs its page"));
        }
        self.record_count += record.encode(&mut self.bytes)?;
        Ok(())
    }

    /// The item now has this value.
    ///
    /// # Errors
    /// The value is longer than an item may be.
    pub fn put(&mut self, key: Key, value: &[u8]) -> Result<(), FormatError> {
        self.push(&Record::Put { key, value })
    }

    /// The item is gone.
    pub fn delete(&mut self, key: Key) {
        self.push_valid(&Record::Delete { key });
    }

    /// The blocks are in use.
    pub fn alloc(&mut self, block: u64, length_blocks: u32) {
        self.push_valid(&Record::Alloc { block, length_blocks });
    }

    /// The blocks are free once the checkpoint is durable.
    pub fn free(&mut self, block: u64, length_blocks: u32) {
        self.push_valid(&Record::Free { block, length_blocks });
    }

    /// The blocks from `block` on were written and must hold this.
    pub fn wrote(&mut self, block: u64, checksums: &[u32]) {
        self.push_valid(&Record::Wrote { block, checksums: Checksums::Values(checksums) });
    }

    /// The logged page was written home in place.
    pub fn home(&mut self, inode: u64, file_block: u64, block: u64, checksum: u32) {
        self.push_valid(&Record::Home { inode, file_block, block, checksum });
    }

    /// Inode numbers below this are used.
    pub fn next_inode(&mut self, next_inode: u64) {
        self.push_valid(&Record::NextInode { next_inode });
    }

    /// Payload of these pages that the log holds from before is void.
    pub fn settled(&mut self, inode: u64, file_block: u64, length_blocks: u64) {
        self.push_valid(&Record::Settled { inode, file_block, length_blocks });
    }

    /// The page's content travels in the frame; `checksum` is its crc32c, or else whoever writes the frame computes it.
    pub fn payload(
        &mut self,
        inode: u64,
        file_block: u64,
        home_block: u64,
        checksum: Option<u32>,
        page: PageRef,
    ) {
        let field = self.bytes.len() + PAYLOAD_INDEX_OFFSET;
        let index = self.payloads.len() as u32;
        if checksum.is_none() {
            self.unsummed.push(index);
        }
        let checksum = checksum.unwrap_or(0);
        let record = Record::Payload { inode, file_block, home_block, index, checksum };
        self.push_valid_any(&record);
        self.index_fields.push(field as u32);
        self.payloads.push(page);
    }

    /// The blocks that the operation maps are written at the same time as its frame.
    pub fn beside(&mut self, companions: Companions) {
        self.companions.push(companions);
    }

    fn push_valid(&mut self, record: &Record<'_>) {
        debug_assert!(!matches!(record, Record::Payload { .. }));
        self.push_valid_any(record);
    }

    /// Adds a record of a kind whose encoding cannot fail.
    fn push_valid_any(&mut self, record: &Record<'_>) {
        match record.encode(&mut self.bytes) {
            Ok(count) => self.record_count += count,
            Err(error) => unreachable!("only `put` can be too long: {error}"),
        }
    }

    /// Adds the records of `other` behind these.
    pub fn append(&mut self, mut other: Self) {
        let (start, base) = (self.bytes.len() as u32, self.payloads.len() as u32);
        if base > 0 {
            for &field in &other.index_fields {
                shift_index(&mut other.bytes[field as usize..], base);
            }
        }
        self.bytes.append(&mut other.bytes);
        self.record_count += other.record_count;
        self.index_fields.extend(other.index_fields.iter().map(|field| start + field));
        self.payloads.append(&mut other.payloads);
        self.unsummed.extend(other.unsummed.iter().map(|index| base + index));
        self.companions.append(&mut other.companions);
    }

    /// True when there is no record.
    pub fn is_empty(&self) -> bool {
        self.record_count == 0
    }

    /// Bytes of the encoded records.
    pub fn record_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Pages that travel along.
    pub fn payload_blocks(&self) -> u64 {
        self.payloads.len() as u64
    }

    /// Blocks of a frame that holds this operation alone: what has to be admitted.
    pub fn blocks(&self) -> u64 {
        Self::blocks_for(self.bytes.len(), self.payload_blocks())
    }

    /// Blocks of a frame that holds `record_bytes` of records and `payload_blocks` pages.
    pub const fn blocks_for(record_bytes: usize, payload_blocks: u64) -> u64 {
        meta_blocks(FRAME_HEADER_BYTES + record_bytes) + payload_blocks
    }

    /// Memory held, used or not.
    pub fn memory_bytes(&self) -> usize {
        self.bytes.capacity()
            + self.index_fields.capacity() * size_of::<u32>()
            + self.payloads.capacity() * size_of::<PageRef>()
            + self.unsummed.capacity() * size_of::<u32>()
    }

    /// Forgets everything, keeps the memory.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.record_count = 0;
        self.index_fields.clear();
        self.payloads.clear();
        self.unsummed.clear();
        self.companions.clear();
    }

    /// Blocks that are written beside it.
    pub(super) fn companion_blocks(&self) -> u64 {
        self.companions.iter().map(Companions::blocks).sum()
    }
}

/// A frame under construction, or sealed and waiting to be written.
#[derive(Debug, Default)]
pub(super) struct Frame {
    /// Room for the header, then the records.
    pub meta: AlignedBuf,
    pub payloads: Vec<PageRef>,
    /// Payload pages that are not summed yet, and where in `meta` their checksums belong.
    unsummed: Vec<(u32, u32)>,
    /// What is written at the same time.
    pub companions: Vec<Companions>,
    pub record_count: u32,
    pub first_lsn: Lsn,
    pub last_lsn: Lsn,
    pub transaction: u64,
    /// The batch goes on in the next frame.
    pub continues: bool,
}

impl Frame {
    /// No operation was added yet.
    pub fn is_empty(&self) -> bool {
        self.record_count == 0
    }

    /// Blocks of the frame as it is; an empty one will not be written.
    pub fn blocks(&self) -> u64 {
        meta_blocks(self.meta.len()) + self.payloads.len() as u64
    }

    /// Bytes of header and records with `op` added.
    pub fn meta_bytes_with(&self, op: &OpRecords) -> usize {
        self.meta.len().max(FRAME_HEADER_BYTES) + op.bytes.len()
    }

    /// Blocks of the frame with `op` added.
    pub fn blocks_with(&self, op: &OpRecords) -> u64 {
        meta_blocks(self.meta_bytes_with(op)) + self.payloads.len() as u64 + op.payload_blocks()
    }

    /// Adds the operation with its number, and empties `op`.
    pub fn add(&mut self, op: &mut OpRecords, lsn: Lsn, transaction: u64) {
        if self.is_empty() {
            self.meta.resize_zeroed(FRAME_HEADER_BYTES);
            self.first_lsn = lsn;
            self.transaction = transaction;
        }
        let start = self.meta.len();
        self.meta.extend_from_slice(&op.bytes);
        let base = self.payloads.len() as u32;
        if base > 0 {
            for &field in &op.index_fields {
                shift_index(&mut self.meta[start + field as usize..], base);
            }
        }
        for &index in &op.unsummed {
            let field = op.index_fields[index as usize] as usize + start;
            let field = field + PAYLOAD_CHECKSUM_OFFSET - PAYLOAD_INDEX_OFFSET;
            self.unsummed.push((base + index, field as u32));
        }
        self.payloads.append(&mut op.payloads);
        self.companions.append(&mut op.companions);
        self.record_count += op.record_count;
        self.last_lsn = lsn;
        op.clear();
    }

    /// Computes the checksums that were left to the writer of the frame. The pages are frozen, so it does not matter when.
    pub fn sum_payloads(&mut self) {
        for (index, field) in self.unsummed.drain(..) {
            let sum = checksum(&self.payloads[index as usize]);
            self.meta[field as usize..][..4].copy_from_slice(&sum.to_le_bytes());
        }
    }

    /// Makes the frame empty, keeping its memory. False when that is too much to keep.
    pub fn recycle(&mut self) -> bool {
        self.meta.clear();
        self.payloads.clear();
        self.unsummed.clear();
        self.companions.clear();
        self.record_count = 0;
        self.continues = false;
        self.meta.capacity() <= SPARE_FRAME_BYTES
    }
}

/// Adds `base` to the little-endian index at the start of `bytes`.
fn shift_index(bytes: &mut [u8], base: u32) {
    if let Some(field) = bytes.first_chunk_mut::<4>() {
        *field = (u32::from_le_bytes(*field) + base).to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::page::PagePool;
    use crate::format::record::Records;

    #[test]
    fn payload_indices_count_through_the_operations_of_a_frame() {
        let pool = PagePool::new(64 * 4096);
        let mut frame = Frame::default();
        let mut op = OpRecords::new();
        for lsn in 1..=4 {
            op.delete(Key::inode(lsn));
            for page in 0..lsn {
                let page_ref = pool.alloc_zeroed().unwrap().freeze();
                op.payload(lsn, page, 0, Some(0), page_ref);
            }
            let expected = frame.blocks_with(&op);
            frame.add(&mut op, lsn, 1);
            assert_eq!(frame.blocks(), expected);
            assert!(op.is_empty() && op.payload_blocks() == 0);
        }
        let indices: Vec<u32> = Records::new(&frame.meta[FRAME_HEADER_BYTES..])
            .filter_map(|record| match record.unwrap() {
                Record::Payload { index, .. } => Some(index),
                _ => None,
            })
            .collect();
        assert_eq!(indices, (0..10).collect::<Vec<u32>>());
        assert_eq!((frame.first_lsn, frame.last_lsn, frame.record_count), (1, 4, 14));
    }

    #[test]
    fn a_frame_has_the_checksums_of_its_pages_whoever_computes_them() {
        let pool = PagePool::new(64 * 4096);
        let mut frame = Frame::default();
        for lsn in 1..=4 {
            let mut op = OpRecords::new();
            op.delete(Key::inode(lsn));
            for number in 0..3 {
                let mut page = pool.alloc_zeroed().unwrap();
                page.fill((16 * lsn + number) as u8);
                let page = page.freeze();
                let sum = checksum(&page);
                op.payload(lsn, number, 0, (number != lsn % 3).then_some(sum), page);
                op.next_inode(lsn);
            }
            let mut joined = OpRecords::new();
            joined.append(op);
            frame.add(&mut joined, lsn, 1);
        }
        assert_eq!(frame.unsummed.len(), 4);
        frame.sum_payloads();
        let mut seen = 0;
        for record in Records::new(&frame.meta[FRAME_HEADER_BYTES..]) {
            if let Record::Payload { inode, file_block, index, checksum: sum, .. } = record.unwrap()
            {
                let page = &frame.payloads[index as usize];
                assert_eq!(page[0], (16 * inode + file_block) as u8);
                assert_eq!(sum, checksum(page));
                seen += 1;
            }
        }
        assert_eq!((seen, frame.unsummed.len()), (12, 0));
    }

    #[test]
    fn appended_operations_are_as_if_they_were_one() {
        let pool = PagePool::new(64 * 4096);
        let (mut whole, mut parts) = (OpRecords::new(), OpRecords::new());
        for number in 1..=4 {
            let mut part = OpRecords::new();
            part.delete(Key::inode(number));
            whole.delete(Key::inode(number));
            for page in 0..number {
                let page_ref = pool.alloc_zeroed().unwrap().freeze();
                part.payload(number, page, 0, (page % 2 == 0).then_some(0), page_ref.clone());
                whole.payload(number, page, 0, (page % 2 == 0).then_some(0), page_ref);
            }
            parts.append(part);
        }
        assert_eq!(parts.bytes, whole.bytes);
        assert_eq!(parts.index_fields, whole.index_fields);
        assert_eq!(parts.unsummed, whole.unsummed);
        assert_eq!(parts.record_count, whole.record_count);
        assert_eq!(parts.payload_blocks(), whole.payload_blocks());
    }

    #[test]
    fn frames_of_operations_never_need_more_than_the_operations_alone() {
        let mut frame = Frame::default();
        let mut op = OpRecords::new();
        let mut admitted = 0;
        for size in (0..4000).step_by(333) {
            op.put(Key::inode(1), &vec![0; size]).unwrap();
            admitted += op.blocks();
            frame.add(&mut op, 1, 1);
            assert!(frame.blocks() <= admitted);
        }
    }
}
