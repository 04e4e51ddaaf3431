//! A device that keeps all writes in memory and reads through to another one: recovery runs on
//! it, and the volume below stays as it is.
//!
//! Memory: the blocks that recovery writes, which are the log's payload and the tree nodes that
//! its records change; never more than a few times the log ring.
//!
//! Lock: `blocks`, a leaf, never held over a read of the device below.

use crate::device::buffer::AlignedBuf;
use crate::device::request::{check_transfer, perform};
use crate::device::{Device, DeviceInfo, DeviceResult, IoClass, OnDone, Request};
use crate::format::{BLOCK_BYTES, BLOCK_BYTES_U64};
use crate::sync::{Arc, RwLock};
use std::collections::BTreeMap;

/// See the module's head.
pub(super) struct Overlay {
    below: Arc<dyn Device>,
    blocks: RwLock<BTreeMap<u64, Box<[u8]>>>,
}

impl Overlay {
    pub fn new(below: Arc<dyn Device>) -> Self {
        Self { below, blocks: RwLock::new(BTreeMap::new()) }
    }

    /// Lays the written blocks over `buffer`, which was read from `first` on.
    fn patch(&self, first: u64, buffer: &mut [u8]) {
        let count = (buffer.len() / BLOCK_BYTES) as u64;
        for (block, content) in self.blocks.read().range(first..first + count) {
            let at = (block - first) as usize * BLOCK_BYTES;
            buffer[at..at + BLOCK_BYTES].copy_from_slice(content);
        }
    }

    /// Whether every block of the range was written.
    fn covers(&self, first: u64, count: u64) -> bool {
        self.blocks.read().range(first..first + count).count() as u64 == count
    }
}

impl Device for Overlay {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { fua: true, volatile_cache: false, discard: false, ..self.below.info() }
    }

    fn read(
        &self,
        offset_bytes: u64,
        buffers: &mut [&mut [u8]],
        class: IoClass,
    ) -> DeviceResult<()> {
        let slices = buffers.iter().map(|buffer| &**buffer);
        let size_bytes = self.info().size_bytes;
        let length_bytes = check_transfer("read", size_bytes, offset_bytes, slices)?;
        let mut block = offset_bytes / BLOCK_BYTES_U64;
        if !self.covers(block, length_bytes / BLOCK_BYTES_U64) {
            self.below.read(offset_bytes, buffers, class)?;
        }
        for buffer in buffers.iter_mut() {
            self.patch(block, buffer);
            block += (buffer.len() / BLOCK_BYTES) as u64;
        }
        Ok(())
    }

    fn write(
        &self,
        offset_bytes: u64,
        buffers: &[&[u8]],
        _class: IoClass,
        _fua: bool,
    ) -> DeviceResult<()> {
        let size_bytes = self.info().size_bytes;
        check_transfer("write", size_bytes, offset_bytes, buffers.iter().copied())?;
        let contents = buffers.iter().flat_map(|buffer| buffer.chunks_exact(BLOCK_BYTES));
        let contents = contents.map(Box::<[u8]>::from);
        self.blocks.write().extend((offset_bytes / BLOCK_BYTES_U64..).zip(contents));
        Ok(())
    }

    fn flush(&self) -> DeviceResult<()> {
        Ok(())
    }

    fn discard(&self, _offset_bytes: u64, _length_bytes: u64) -> DeviceResult<()> {
        Ok(())
    }

    fn submit(&self, request: Request, on_done: OnDone) {
        let (result, buffers) = perform(self, request);
        on_done(result, buffers);
    }
}

/// A block read by itself.
pub(super) fn read_block(device: &dyn Device, block: u64) -> DeviceResult<AlignedBuf> {
    let mut bytes = AlignedBuf::zeroed(BLOCK_BYTES);
    device.read(block * BLOCK_BYTES_U64, &mut [&mut bytes], IoClass::Background)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::memory::MemoryDevice;

    #[test]
    fn writes_are_read_back_and_never_reach_the_device_below() {
        let image: Vec<u8> =
            (0..16 * BLOCK_BYTES).map(|index| (index / BLOCK_BYTES) as u8).collect();
        let below = Arc::new(MemoryDevice::from_image(&image));
        let overlay = Overlay::new(below.clone());
        let content = AlignedBuf::from_slice(&[0xee; 2 * BLOCK_BYTES]);
        overlay.write(3 * BLOCK_BYTES_U64, &[&content], IoClass::Log, false).unwrap();
        let mut expected = image.clone();
        expected[3 * BLOCK_BYTES..5 * BLOCK_BYTES].fill(0xee);
        let mut head = AlignedBuf::zeroed(4 * BLOCK_BYTES);
        let mut tail = AlignedBuf::zeroed(12 * BLOCK_BYTES);
        overlay.read(0, &mut [&mut head, &mut tail], IoClass::SyncRead).unwrap();
        assert_eq!([&head[..], &tail[..]].concat(), expected);
        assert_eq!(below.image(), image);
        assert!(overlay.write(16 * BLOCK_BYTES_U64, &[&content], IoClass::Log, false).is_err());
    }
}
