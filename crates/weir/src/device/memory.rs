//! A disk in memory, for tests and benchmarks: sparse, never loses a completed write.
//!
//! Memory is taken in chunks of 64 KiB at the first write into each, so that a device of any
//! size costs nothing to make. A request that spans chunks is not atomic towards concurrent ones,
//! as on a real disk. [`Device::submit`] performs the request before it returns, on the
//! calling thread.
//!
//! Locks: `chunks` (the map), then one chunk. Both are leaves.

use std::collections::BTreeMap;

use super::buffer::AlignedBuf;
use super::request::{check_range, check_transfer, perform};
use super::stats::DeviceStats;
use super::{Device, DeviceInfo, DeviceResult, IoClass, OnDone, Request};
use crate::format::BLOCK_BYTES_U64;
use crate::sync::{Arc, RwLock};

/// Unit of allocation.
const CHUNK_BYTES: u64 = 64 << 10;

type Chunk = Arc<RwLock<AlignedBuf>>;

/// See the module's head.
#[derive(Debug)]
pub struct MemoryDevice {
    size_bytes: u64,
    chunks: RwLock<BTreeMap<u64, Chunk>>,
    stats: DeviceStats,
}

/// One chunk's part of a request: which chunk, and the range within it.
struct Piece {
    chunk: u64,
    start: usize,
    length: usize,
}

/// The part of `[offset, offset + length)` that lies in the chunk of `offset`.
fn first_piece(offset_bytes: u64, length: usize) -> Piece {
    let start = offset_bytes % CHUNK_BYTES;
    Piece {
        chunk: offset_bytes / CHUNK_BYTES,
        start: start as usize,
        length: length.min((CHUNK_BYTES - start) as usize),
    }
}

impl MemoryDevice {
    /// A device of `size_bytes` (rounded down to whole blocks) that reads as zeros.
    pub fn new(size_bytes: u64) -> Self {
        Self {
            size_bytes: size_bytes / BLOCK_BYTES_U64 * BLOCK_BYTES_U64,
            chunks: RwLock::new(BTreeMap::new()),
            stats: DeviceStats::default(),
        }
    }

    /// A device that holds `image`, rounded up to whole blocks with zeros.
    pub fn from_image(image: &[u8]) -> Self {
        let size_bytes = (image.len() as u64).next_multiple_of(BLOCK_BYTES_U64);
        let device = Self::new(size_bytes);
        device.store(0, image);
        device
    }

    /// The whole content. For small devices.
    pub fn image(&self) -> Vec<u8> {
        let mut image = vec![0; self.size_bytes as usize];
        self.load(0, &mut image);
        image
    }

    /// Memory in use for content.
    pub fn used_bytes(&self) -> u64 {
        self.chunks.read().len() as u64 * CHUNK_BYTES
    }

    /// What was asked so far.
    pub fn stats(&self) -> &DeviceStats {
        &self.stats
    }

    fn chunk(&self, index: u64) -> Option<Chunk> {
        self.chunks.read().get(&index).cloned()
    }

    fn chunk_or_new(&self, index: u64) -> Chunk {
        if let Some(chunk) = self.chunk(index) {
            return chunk;
        }
        let mut chunks = self.chunks.write();
        let fresh = || Arc::new(RwLock::new(AlignedBuf::zeroed(CHUNK_BYTES as usize)));
        Arc::clone(chunks.entry(index).or_insert_with(fresh))
    }

    fn load(&self, mut offset_bytes: u64, mut target: &mut [u8]) {
        while !target.is_empty() {
            let piece = first_piece(offset_bytes, target.len());
            let (part, rest) = target.split_at_mut(piece.length);
            match self.chunk(piece.chunk) {
                Some(chunk) => {
                    part.copy_from_slice(&chunk.read()[piece.start..piece.start + piece.length]);
                }
                None => part.fill(0),
            }
            offset_bytes += piece.length as u64;
            target = rest;
        }
    }

    fn store(&self, mut offset_bytes: u64, mut source: &[u8]) {
        while !source.is_empty() {
            let piece = first_piece(offset_bytes, source.len());
            let (part, rest) = source.split_at(piece.length);
            let chunk = self.chunk_or_new(piece.chunk);
            chunk.write()[piece.start..piece.start + piece.length].copy_from_slice(part);
            offset_bytes += piece.length as u64;
            source = rest;
        }
    }

    /// Zeros the range; whole chunks give their memory back.
    fn clear(&self, mut offset_bytes: u64, length_bytes: u64) {
        let end = offset_bytes + length_bytes;
        while offset_bytes < end {
            let remaining = (end - offset_bytes).min(CHUNK_BYTES) as usize;
            let piece = first_piece(offset_bytes, remaining);
            if piece.length as u64 == CHUNK_BYTES {
                self.chunks.write().remove(&piece.chunk);
            } else if let Some(chunk) = self.chunk(piece.chunk) {
                chunk.write()[piece.start..piece.start + piece.length].fill(0);
            }
            offset_bytes += piece.length as u64;
        }
    }
}

impl Device for MemoryDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { size_bytes: self.size_bytes, fua: true, volatile_cache: false, discard: true }
    }

    fn read(
        &self,
        offset_bytes: u64,
        buffers: &mut [&mut [u8]],
        _class: IoClass,
    ) -> DeviceResult<()> {
        let slices = buffers.iter().map(|buffer| &**buffer);
        let checked = check_transfer("read", self.size_bytes, offset_bytes, slices);
        let length_bytes = *checked.as_ref().unwrap_or(&0);
        let result = checked.map(|_| {
            let mut offset_bytes = offset_bytes;
            for buffer in buffers.iter_mut() {
                self.load(offset_bytes, buffer);
                offset_bytes += buffer.len() as u64;
            }
        });
        self.stats.count_read(length_bytes, &result);
        result
    }

    fn write(
        &self,
        offset_bytes: u64,
        buffers: &[&[u8]],
        _class: IoClass,
        _fua: bool,
    ) -> DeviceResult<()> {
        let slices = buffers.iter().copied();
        let checked = check_transfer("write", self.size_bytes, offset_bytes, slices);
        let length_bytes = *checked.as_ref().unwrap_or(&0);
        let result = checked.map(|_| {
            let mut offset_bytes = offset_bytes;
            for buffer in buffers {
                self.store(offset_bytes, buffer);
                offset_bytes += buffer.len() as u64;
            }
        });
        self.stats.count_write(length_bytes, &result);
        result
    }

    fn flush(&self) -> DeviceResult<()> {
        self.stats.count_flush(&DeviceResult::Ok(()));
        Ok(())
    }

    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> DeviceResult<()> {
        let result = check_range("discard", self.size_bytes, offset_bytes, length_bytes)
            .map(|()| self.clear(offset_bytes, length_bytes));
        self.stats.count_discard(&result);
        result
    }

    fn submit(&self, request: Request, on_done: OnDone) {
        let (result, buffers) = perform(self, request);
        on_done(result, buffers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Buffers, Operation};

    fn pattern(len: usize, seed: u8) -> AlignedBuf {
        let bytes: Vec<u8> = (0..len).map(|i| (i / 7) as u8 ^ (i >> 12) as u8 ^ seed).collect();
        AlignedBuf::from_slice(&bytes)
    }

    #[test]
    fn reads_see_writes_across_chunks_and_zeros_elsewhere() {
        let device = MemoryDevice::new(1 << 20);
        let written = pattern(3 * CHUNK_BYTES as usize, 1);
        let (head, tail) = written.split_at(8192);
        device.write(CHUNK_BYTES - 4096, &[head, tail], IoClass::Log, false).unwrap();
        let mut expected = vec![0; 1 << 20];
        let start = CHUNK_BYTES as usize - 4096;
        expected[start..start + written.len()].copy_from_slice(&written);
        let mut first = AlignedBuf::zeroed(4096);
        let mut rest = AlignedBuf::zeroed((1 << 20) - 4096);
        device.read(0, &mut [&mut first, &mut rest], IoClass::SyncRead).unwrap();
        assert_eq!(&first[..], &expected[..4096]);
        assert_eq!(&rest[..], &expected[4096..]);
        assert_eq!(device.image(), expected);
        assert_eq!(device.used_bytes(), 4 * CHUNK_BYTES);
    }

    #[test]
    fn huge_devices_cost_nothing_until_written() {
        let device = MemoryDevice::new(u64::MAX);
        let size_bytes = device.info().size_bytes;
        let block = pattern(4096, 9);
        device.write(size_bytes - 4096, &[&block], IoClass::Log, true).unwrap();
        assert!(device.write(size_bytes, &[&block], IoClass::Log, true).is_err());
        assert_eq!(device.used_bytes(), CHUNK_BYTES);
        assert_eq!(device.stats().counters().errors, 1);
    }

    #[test]
    fn discard_zeros_exactly_its_range_and_frees_whole_chunks() {
        let image = pattern(4 * CHUNK_BYTES as usize, 3);
        let device = MemoryDevice::from_image(&image);
        device.discard(4096, 2 * CHUNK_BYTES).unwrap();
        let mut expected = image.to_vec();
        expected[4096..4096 + 2 * CHUNK_BYTES as usize].fill(0);
        assert_eq!(device.image(), expected);
        assert_eq!(device.used_bytes(), 3 * CHUNK_BYTES);
    }

    #[test]
    fn submitted_requests_give_their_buffers_back() {
        let device = MemoryDevice::from_image(&pattern(8192, 5));
        let (sender, receiver) = std::sync::mpsc::channel();
        let request = Request {
            operation: Operation::Read,
            offset_bytes: 4096,
            buffers: Buffers::Owned(AlignedBuf::zeroed(4096)),
            class: IoClass::ReadAhead,
        };
        device.submit(
            request,
            Box::new(move |result, buffers| sender.send((result, buffers)).unwrap()),
        );
        let (result, buffers) = receiver.recv().unwrap();
        assert_eq!(result, Ok(()));
        let Buffers::Owned(buffer) = buffers else { panic!("other buffers came back") };
        assert_eq!(&buffer[..], &device.image()[4096..]);
        let counters = device.stats().counters();
        assert_eq!((counters.reads, counters.read_bytes), (1, 4096));
    }
}
