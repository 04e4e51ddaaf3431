//! The volume's device as the lab needs it: one that a volume can be cut off from, and its free space
//! read from the bitmaps of a closed volume.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use weir::device::buffer::AlignedBuf;
use weir::device::posix::PosixDevice;
use weir::device::request::Underway;
use weir::device::{
    Buffers, Device, DeviceError, DeviceInfo, DeviceResult, IoClass, OnDone, Operation, Request,
};
use weir::format::bitmap::{self, BitmapHeader};
use weir::format::geometry::Geometry;
use weir::format::root::Root;
use weir::format::superblock::choose_superblock;
use weir::format::{BLOCK_BYTES, BLOCK_BYTES_U64, GROUP_BLOCKS};

/// A device whose writes and flushes fail once it is severed, as if the power were gone; and batches, which
/// are writeback. Other reads go on, so that the volume's threads can end. Its flushes can be held back.
pub struct Severable {
    inner: Arc<PosixDevice>,
    severed: AtomicBool,
    /// Whether flushes wait. Looked at before each flush only: a load with flushes held differs in nothing else.
    held: Mutex<bool>,
    let_go: Condvar,
}

impl Severable {
    /// Connected.
    pub fn new(inner: Arc<PosixDevice>) -> Self {
        let severed = AtomicBool::new(false);
        Severable { inner, severed, held: Mutex::new(false), let_go: Condvar::new() }
    }

    /// From here on nothing reaches the disk.
    pub fn sever(&self) {
        self.severed.store(true, Ordering::SeqCst);
    }

    /// Lets flushes wait from here on, or no longer.
    pub fn hold_flushes(&self, hold: bool) {
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) = hold;
        self.let_go.notify_all();
    }

    fn wait_until_let_go(&self) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        while *held {
            held = self.let_go.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn check(&self, operation: &'static str) -> DeviceResult<()> {
        if !self.severed.load(Ordering::Relaxed) {
            return Ok(());
        }
        Err(DeviceError {
            operation,
            offset_bytes: 0,
            length_bytes: 0,
            reason: "the lab cut the power".into(),
            no_space: false,
        })
    }
}

impl Device for Severable {
    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }

    fn read(
        &self,
        offset_bytes: u64,
        buffers: &mut [&mut [u8]],
        class: IoClass,
    ) -> DeviceResult<()> {
        self.inner.read(offset_bytes, buffers, class)
    }

    fn write(
        &self,
        offset_bytes: u64,
        buffers: &[&[u8]],
        class: IoClass,
        fua: bool,
    ) -> DeviceResult<()> {
        self.check("write")?;
        self.inner.write(offset_bytes, buffers, class, fua)
    }

    fn flush(&self) -> DeviceResult<()> {
        self.wait_until_let_go();
        self.check("flush")?;
        self.inner.flush()
    }

    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> DeviceResult<()> {
        self.check("discard")?;
        self.inner.discard(offset_bytes, length_bytes)
    }

    fn submit(&self, request: Request, on_done: OnDone) {
        if request.operation != Operation::Read
            && let Err(error) = self.check("write")
        {
            on_done(Err(error), request.buffers);
            return;
        }
        self.inner.submit(request, on_done);
    }

    fn run_all(&self, requests: Vec<Request>) -> Vec<(DeviceResult<()>, Buffers)> {
        // Handed on whole: what the lab measures is the way that a volume takes without it.
        match self.check("write") {
            Ok(()) => self.inner.run_all(requests),
            Err(error) => {
                requests.into_iter().map(|each| (Err(error.clone()), each.buffers)).collect()
            }
        }
    }

    fn begin_all(self: Arc<Self>, requests: Vec<Request>) -> Underway {
        match self.check("write") {
            Ok(()) => self.inner.clone().begin_all(requests),
            Err(_) => Underway::new(move || self.run_all(requests)),
        }
    }
}

fn read(device: &PosixDevice, block: u64, blocks: u64) -> Result<AlignedBuf, weir::Error> {
    let mut buffer = AlignedBuf::zeroed(blocks as usize * BLOCK_BYTES);
    device.read(block * BLOCK_BYTES_U64, &mut [&mut buffer], IoClass::SyncRead)?;
    Ok(buffer)
}

/// The free extents of the closed volume on `device`, as (start, length) in bytes.
pub fn free_extents(device: &PosixDevice) -> Result<Vec<(u64, u64)>, weir::Error> {
    let (superblock, _) = choose_superblock(device)?;
    let (geometry, pointer) = (&superblock.geometry, &superblock.root);
    let bytes = read(device, pointer.block, geometry.root_slot_blocks().into())?;
    let root = Root::decode(&bytes, geometry, &superblock.volume_id, pointer)?;
    let mut found = Vec::new();
    for (group, entry) in (0_u32..).zip(&root.groups) {
        let block = geometry.bitmap_block(group, entry.slot);
        let header = BitmapHeader {
            volume_id: superblock.volume_id,
            block_address: block,
            generation: entry.generation,
            group,
        };
        let words = bitmap::decode(&read(device, block, 1)?, &header, entry)?;
        let base = Geometry::group_start(group);
        let blocks = GROUP_BLOCKS.min(geometry.total_blocks() - base);
        runs_of_zeros(&words, blocks, |start, length| {
            found.push(((base + start) * BLOCK_BYTES_U64, length * BLOCK_BYTES_U64));
        });
    }
    Ok(found)
}

/// Calls `each` with (start, length) of each run of zero bits among the first `bits`.
fn runs_of_zeros(words: &[u64], bits: u64, mut each: impl FnMut(u64, u64)) {
    let is_zero = |bit: u64| words[bit as usize / 64] >> (bit % 64) & 1 == 0;
    let mut bit = 0;
    while bit < bits {
        let start = bit;
        while bit < bits && is_zero(bit) {
            bit += 1;
        }
        if bit > start {
            each(start, bit - start);
        }
        bit += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_zeros_end_at_ones_and_at_the_last_bit() {
        let mut runs = Vec::new();
        // Bits 1, 2 and 64 are ones; 70 bits count.
        runs_of_zeros(&[0b110, 0b1], 70, |start, length| runs.push((start, length)));
        assert_eq!(runs, [(0, 1), (3, 61), (65, 5)]);
    }
}
