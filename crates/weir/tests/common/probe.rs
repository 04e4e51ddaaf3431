//! A device that counts, fails on request, and lets something happen amid a read or a write.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use weir::device::{
    Device, DeviceError, DeviceInfo, DeviceResult, IoClass, OnDone, Operation, Request,
};

/// See the module's head.
pub struct Probe {
    inner: Arc<dyn Device>,
    pub reads: AtomicU64,
    pub read_bytes: AtomicU64,
    pub writes: AtomicU64,
    /// Writes of this class fail while it is set.
    pub fail_data_writes: AtomicBool,
    pub fail_flushes: AtomicBool,
    pub fail_reads: AtomicBool,
    /// So many reads to come fail.
    pub failing_reads: AtomicU64,
    /// So many reads from now on one fails: 1 for the next.
    pub failing_read: AtomicI64,
    /// Writes that have failed.
    pub failed_writes: AtomicU64,
    amid_read: Mutex<Option<Happening>>,
    amid_page_read: Mutex<Option<Happening>>,
    amid_data_write: Mutex<Option<Happening>>,
    /// Amid the write of a block, after so many before.
    amid_block_write: Mutex<Option<(u64, u32, Happening)>>,
    refused: Mutex<Option<Refused>>,
    refused_page: Mutex<Option<Vec<u8>>>,
    unreadable: Mutex<Option<Unreadable>>,
    /// The blocks written so far, all that there are while the host is full.
    written: Mutex<HashSet<u64>>,
    host_is_full: AtomicBool,
}

/// What happens amid a write.
type Happening = Box<dyn FnOnce() + Send>;

/// Which writes fail: by offset and by what the first buffer begins with.
type Refused = Box<dyn Fn(u64, &[u8]) -> bool + Send>;

/// Which reads fail: by offset and length.
type Unreadable = Box<dyn Fn(u64, u64) -> bool + Send>;

impl Probe {
    pub fn new(inner: Arc<dyn Device>) -> Arc<Self> {
        Arc::new(Self {
            inner,
            reads: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            fail_data_writes: AtomicBool::new(false),
            fail_flushes: AtomicBool::new(false),
            fail_reads: AtomicBool::new(false),
            failing_reads: AtomicU64::new(0),
            failing_read: AtomicI64::new(0),
            failed_writes: AtomicU64::new(0),
            amid_read: Mutex::new(None),
            amid_page_read: Mutex::new(None),
            amid_data_write: Mutex::new(None),
            amid_block_write: Mutex::new(None),
            refused: Mutex::new(None),
            refused_page: Mutex::new(None),
            unreadable: Mutex::new(None),
            written: Mutex::default(),
            host_is_full: AtomicBool::new(false),
        })
    }

    /// As a file with holes on a host that is full, or is not any more: only what was written before can be written.
    pub fn set_host_full(&self, is_full: bool) {
        self.host_is_full.store(is_full, Ordering::Relaxed);
    }

    /// From now on writes fail of which this is true, by offset and by what the first buffer begins with.
    pub fn refuse(&self, is_refused: impl Fn(u64, &[u8]) -> bool + Send + 'static) {
        *lock(&self.refused) = Some(Box::new(is_refused));
    }

    /// From now on writes fail that have a page like this among their pages; `None`: none.
    pub fn refuse_page(&self, page: Option<Vec<u8>>) {
        *lock(&self.refused_page) = page;
    }

    /// From now on reads fail of which this is true, by offset and length.
    pub fn refuse_reads(&self, is_refused: impl Fn(u64, u64) -> bool + Send + 'static) {
        *lock(&self.unreadable) = Some(Box::new(is_refused));
    }

    /// `happening` runs while the next read is under way, on the thread that reads.
    pub fn amid_next_read(&self, happening: impl FnOnce() + Send + 'static) {
        *lock(&self.amid_read) = Some(Box::new(happening));
    }

    /// `happening` runs while the next read of a single page is under way (nodes are larger), on the thread that reads.
    pub fn amid_next_page_read(&self, happening: impl FnOnce() + Send + 'static) {
        *lock(&self.amid_page_read) = Some(Box::new(happening));
    }

    /// `happening` runs while the next write of data is under way, on the thread that writes: it must not wait for that write.
    pub fn amid_next_data_write(&self, happening: impl FnOnce() + Send + 'static) {
        *lock(&self.amid_data_write) = Some(Box::new(happening));
    }

    /// The same for a write that begins with `block`, after `writes` of it before.
    pub fn amid_write_of(
        &self,
        block: u64,
        writes: u32,
        happening: impl FnOnce() + Send + 'static,
    ) {
        *lock(&self.amid_block_write) = Some((block, writes, Box::new(happening)));
    }

    /// Nothing is left to happen.
    pub fn has_happened(&self) -> bool {
        lock(&self.amid_read).is_none()
            && lock(&self.amid_page_read).is_none()
            && lock(&self.amid_data_write).is_none()
            && lock(&self.amid_block_write).is_none()
    }

    fn happens_amid_write_of(&self, offset_bytes: u64) {
        let mut planned = lock(&self.amid_block_write);
        let happening = match planned.take() {
            Some((block, 0, happening)) if block * 4096 == offset_bytes => Some(happening),
            Some((block, writes, happening)) if block * 4096 == offset_bytes => {
                *planned = Some((block, writes - 1, happening));
                None
            }
            others => {
                *planned = others;
                None
            }
        };
        drop(planned);
        if let Some(happening) = happening {
            happening();
        }
    }

    fn count(&self, length_bytes: u64) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.read_bytes.fetch_add(length_bytes, Ordering::Relaxed);
    }

    /// Counts a write, or says why it fails.
    fn admit_write(
        &self,
        class: IoClass,
        offset_bytes: u64,
        buffers: &[&[u8]],
    ) -> DeviceResult<()> {
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.happens_amid_write_of(offset_bytes);
        let begins = buffers.first().copied().unwrap_or_default();
        let refused_page = lock(&self.refused_page).clone();
        if refused_page.is_some_and(|refused| {
            buffers.iter().any(|buffer| buffer.chunks(4096).any(|page| page == refused))
        }) {
            self.failed_writes.fetch_add(1, Ordering::Relaxed);
            return injected("write");
        }
        if self.refuses(class, offset_bytes, begins) {
            return injected("write");
        }
        let length_bytes = buffers.iter().map(|buffer| buffer.len() as u64).sum();
        self.take_from_host(offset_bytes, length_bytes).inspect_err(|_| {
            self.failed_writes.fetch_add(1, Ordering::Relaxed);
        })
    }

    fn take_from_host(&self, offset_bytes: u64, length_bytes: u64) -> DeviceResult<()> {
        let blocks = offset_bytes / 4096..(offset_bytes + length_bytes).div_ceil(4096);
        let mut written = lock(&self.written);
        let is_there = |block: u64| written.contains(&block);
        if self.host_is_full.load(Ordering::Relaxed) && !blocks.clone().all(is_there) {
            let reason = "No space left on device (os error 28)".into();
            let operation = "write";
            return Err(DeviceError {
                operation,
                offset_bytes,
                length_bytes,
                reason,
                no_space: true,
            });
        }
        written.extend(blocks);
        Ok(())
    }

    fn refuses(&self, class: IoClass, offset_bytes: u64, begins: &[u8]) -> bool {
        let is_data = match class {
            IoClass::SyncWrite | IoClass::Writeback | IoClass::Background => true,
            IoClass::Beside => !begins.starts_with(&weir::format::frame::FRAME_MAGIC),
            _ => false,
        };
        if is_data {
            // Out of the lock: it may write data itself.
            let happening = lock(&self.amid_data_write).take();
            if let Some(happening) = happening {
                happening();
            }
        }
        let is_refused = lock(&self.refused);
        let fails = is_data && self.fail_data_writes.load(Ordering::Relaxed)
            || is_refused.as_ref().is_some_and(|is_refused| is_refused(offset_bytes, begins));
        if fails {
            self.failed_writes.fetch_add(1, Ordering::Relaxed);
        }
        fails
    }
}

/// What happens may panic, and others go on.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn injected<T>(operation: &'static str) -> DeviceResult<T> {
    Err(DeviceError {
        operation,
        offset_bytes: 0,
        length_bytes: 0,
        reason: "injected".into(),
        no_space: false,
    })
}

impl Device for Probe {
    fn info(&self) -> DeviceInfo {
        // So that flushes are asked for.
        DeviceInfo { volatile_cache: true, fua: false, ..self.inner.info() }
    }
    fn read(
        &self,
        offset_bytes: u64,
        buffers: &mut [&mut [u8]],
        class: IoClass,
    ) -> DeviceResult<()> {
        let length_bytes = buffers.iter().map(|buffer| buffer.len() as u64).sum();
        self.count(length_bytes);
        let is_page = length_bytes == 4096;
        let happening = lock(&self.amid_read).take();
        if let Some(happening) = happening {
            happening();
        }
        let happening = is_page.then(|| lock(&self.amid_page_read).take()).flatten();
        if let Some(happening) = happening {
            happening();
        }
        if self.failing_read.fetch_sub(1, Ordering::Relaxed) == 1 {
            return injected("read");
        }
        let one_less = |left: u64| left.checked_sub(1);
        let fails =
            self.failing_reads.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok();
        let unreadable = lock(&self.unreadable);
        let is_refused =
            unreadable.as_ref().is_some_and(|refused| refused(offset_bytes, length_bytes));
        drop(unreadable);
        if fails || is_refused || self.fail_reads.load(Ordering::Relaxed) {
            return injected("read");
        }
        self.inner.read(offset_bytes, buffers, class)
    }
    fn write(
        &self,
        offset_bytes: u64,
        buffers: &[&[u8]],
        class: IoClass,
        fua: bool,
    ) -> DeviceResult<()> {
        self.admit_write(class, offset_bytes, buffers)?;
        self.inner.write(offset_bytes, buffers, class, fua)
    }
    fn flush(&self) -> DeviceResult<()> {
        if self.fail_flushes.load(Ordering::Relaxed) {
            return injected("flush");
        }
        self.inner.flush()
    }
    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> DeviceResult<()> {
        self.inner.discard(offset_bytes, length_bytes)
    }
    fn submit(&self, request: Request, on_done: OnDone) {
        match request.operation {
            Operation::Read => self.count(0),
            Operation::Write { .. } => {
                let slices = request.buffers.slices();
                let admitted = self.admit_write(request.class, request.offset_bytes, &slices);
                if admitted.is_err() {
                    return on_done(admitted, request.buffers);
                }
            }
            _ => {}
        }
        self.inner.submit(request, on_done);
    }
}
