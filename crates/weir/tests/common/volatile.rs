//! A disk that loses what was not flushed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use weir::device::buffer::AlignedBuf;
use weir::device::memory::MemoryDevice;
use weir::device::{
    Buffers, Device, DeviceInfo, DeviceResult, IoClass, OnDone, Operation, Request,
};

/// A disk with a volatile cache: writes since the last flush are lost, kept or torn in a crash.
pub struct Volatile {
    inner: MemoryDevice,
    size_bytes: u64,
    fua: bool,
    pending: std::sync::Mutex<Vec<(u64, Vec<u8>)>>,
    pub writes: AtomicU64,
}

impl Volatile {
    pub fn new(size_bytes: u64) -> Arc<Self> {
        Self::with_fua(size_bytes, false)
    }

    /// With `fua` it understands forced unit access: such a write is durable when it returns, and no other.
    pub fn with_fua(size_bytes: u64, fua: bool) -> Arc<Self> {
        let inner = MemoryDevice::new(size_bytes);
        Arc::new(Self {
            inner,
            size_bytes,
            fua,
            pending: std::sync::Mutex::default(),
            writes: AtomicU64::new(0),
        })
    }

    /// What the disk holds after a power cut now; the volume goes on.
    pub fn after_crash(&self, seed: u64) -> Arc<dyn Device> {
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        self.after_crash_with(|data| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            match random % 4 {
                0 => 0,
                1 => data.len() / 2 / 4096 * 4096,
                _ => data.len(),
            }
        })
    }

    /// The same, with so many bytes of each write that was not flushed as `kept_bytes` says.
    pub fn after_crash_with(&self, mut kept_bytes: impl FnMut(&[u8]) -> usize) -> Arc<dyn Device> {
        let copy = MemoryDevice::new(self.size_bytes);
        let mut bytes = AlignedBuf::zeroed(self.size_bytes as usize);
        // At one moment, though others write and flush.
        let pending = self.pending.lock().expect("lock");
        self.inner.read(0, &mut [&mut bytes], IoClass::SyncRead).expect("read");
        for (offset, data) in pending.iter() {
            let keep = kept_bytes(data);
            bytes[*offset as usize..*offset as usize + keep].copy_from_slice(&data[..keep]);
        }
        drop(pending);
        for (index, part) in bytes.chunks(1 << 20).enumerate() {
            copy.write((index as u64) << 20, &[part], IoClass::Log, false).expect("write");
        }
        Arc::new(copy)
    }
}

fn aligned(bytes: &[u8]) -> AlignedBuf {
    let mut buffer = AlignedBuf::zeroed(bytes.len());
    buffer.copy_from_slice(bytes);
    buffer
}

impl Device for Volatile {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { volatile_cache: true, fua: self.fua, ..self.inner.info() }
    }
    fn read(&self, offset: u64, buffers: &mut [&mut [u8]], class: IoClass) -> DeviceResult<()> {
        // What was written is read back, durable or not.
        let pending = self.pending.lock().expect("lock");
        self.inner.read(offset, buffers, class)?;
        let mut at = offset;
        for buffer in buffers {
            for (start, data) in pending.iter() {
                let from = at.max(*start);
                let to = (at + buffer.len() as u64).min(start + data.len() as u64);
                if from < to {
                    buffer[(from - at) as usize..(to - at) as usize]
                        .copy_from_slice(&data[(from - start) as usize..(to - start) as usize]);
                }
            }
            at += buffer.len() as u64;
        }
        Ok(())
    }
    fn write(&self, offset: u64, buffers: &[&[u8]], _: IoClass, fua: bool) -> DeviceResult<()> {
        assert!(self.fua || !fua);
        self.writes.fetch_add(1, Ordering::Relaxed);
        if fua {
            return self.inner.write(offset, &[&aligned(&buffers.concat())], IoClass::Log, false);
        }
        self.pending.lock().expect("lock").push((offset, buffers.concat()));
        Ok(())
    }
    fn flush(&self) -> DeviceResult<()> {
        let mut pending = self.pending.lock().expect("lock");
        for (offset, data) in std::mem::take(&mut *pending) {
            self.inner.write(offset, &[&aligned(&data)], IoClass::Log, false)?;
        }
        self.inner.flush()
    }
    fn discard(&self, offset: u64, length: u64) -> DeviceResult<()> {
        self.inner.discard(offset, length)
    }
    fn submit(&self, request: Request, on_done: OnDone) {
        let Request { operation, offset_bytes, mut buffers, class } = request;
        let result = match operation {
            Operation::Read => match &mut buffers {
                Buffers::Owned(memory) => self.read(offset_bytes, &mut [memory], class),
                Buffers::Fill(pages) => {
                    let mut slices: Vec<&mut [u8]> = pages.iter_mut().map(|p| &mut **p).collect();
                    self.read(offset_bytes, &mut slices, class)
                }
                _ => Ok(()),
            },
            Operation::Write { fua } => self.write(offset_bytes, &buffers.slices(), class, fua),
            _ => Ok(()),
        };
        on_done(result, buffers);
    }
}
