//! What the engine asks of a disk, and nothing more.
//!
//! A [`Device`] takes reads, writes, flushes and discards. Each exists in two forms: blocking on
//! the calling thread ([`Device::read`] …: the cheapest way when the caller has to wait anyway,
//! for example a leader that writes a log frame), and submitted ([`Device::submit`]: completes later
//! on a thread of the device's choosing). [`Device::run_all`] is for a thread that has many and waits for them. A completed write may still be in the device's volatile cache;
//! a flush that *started* after a write completed makes that write durable.
//!
//! Offsets and lengths are multiples of 4096 and buffers are aligned to 4096 bytes (the
//! POSIX device uses `O_DIRECT`); implementations check and refuse what is not.

pub mod buffer;
pub mod memory;
pub mod posix;
pub mod request;
pub mod stats;

use crate::cache::page::PageRef;
use crate::format::BLOCK_BYTES;
use crate::sync::Arc;
use buffer::AlignedBuf;
use request::Underway;

/// Priority of a request, most urgent first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IoClass {
    /// Log frames and superblocks.
    Log,
    /// A frame and the data that is written at the same time.
    Beside,
    /// A caller waits for this read.
    SyncRead,
    /// A caller waits for this write (data phase of an fsync).
    SyncWrite,
    /// Guessed reads.
    ReadAhead,
    /// Nobody waits.
    Writeback,
    /// Checkpoint and clean-up.
    Background,
}

/// What the device can do and wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Capacity.
    pub size_bytes: u64,
    /// A write can be made durable by itself.
    pub fua: bool,
    /// Completed writes are lost in a power cut unless flushed.
    pub volatile_cache: bool,
    /// Discards are understood.
    pub discard: bool,
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{operation} of {length_bytes} bytes at {offset_bytes}: {reason}")]
pub struct DeviceError {
    /// read, write, flush or discard.
    pub operation: &'static str,
    /// Where.
    pub offset_bytes: u64,
    /// How much.
    pub length_bytes: u64,
    /// The host's words.
    pub reason: String,
    /// The host file system (or device) is full.
    pub no_space: bool,
}

impl From<DeviceError> for crate::Error {
    fn from(error: DeviceError) -> Self {
        // Of a flush it says that something is lost, not what: that is no error to try again after.
        if error.no_space && error.operation == "write" {
            return Self::HostFull(error.to_string());
        }
        Self::Io(error.to_string())
    }
}

/// Result of a request.
pub type DeviceResult<T> = Result<T, DeviceError>;

/// Memory that a submitted request owns while it is under way.
#[derive(Debug)]
pub enum Buffers {
    /// One run of memory (log frames, nodes, bitmaps).
    Owned(AlignedBuf),
    /// Pages of the cache, one block each: the source of a write, shared with readers.
    Pages(Vec<PageRef>),
    /// One run of memory, and pages behind it: the source of a write (a log frame with payload).
    Framed(AlignedBuf, Vec<PageRef>),
    /// Fresh pages that a read fills: nobody else holds them yet.
    Fill(Vec<crate::cache::page::PageMut>),
    /// No memory (flush, discard).
    None,
}

impl Buffers {
    /// Bytes of all of the memory.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Owned(buffer) => buffer.len() as u64,
            Self::Pages(pages) => (pages.len() * BLOCK_BYTES) as u64,
            Self::Framed(head, pages) => (head.len() + pages.len() * BLOCK_BYTES) as u64,
            Self::Fill(pages) => (pages.len() * BLOCK_BYTES) as u64,
            Self::None => 0,
        }
    }

    /// What a write of them stores, in order; nothing of buffers that only a read can use.
    pub fn slices(&self) -> Vec<&[u8]> {
        match self {
            Self::Owned(buffer) => vec![buffer],
            Self::Pages(pages) => pages.iter().map(|page| &page[..]).collect(),
            Self::Framed(head, pages) => {
                std::iter::once(&head[..]).chain(pages.iter().map(|page| &page[..])).collect()
            }
            Self::Fill(_) | Self::None => Vec::new(),
        }
    }
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Fill the buffers.
    Read,
    /// Store the buffers; with `fua`, durably (only where [`DeviceInfo::fua`]).
    Write {
        /// Force unit access.
        fua: bool,
    },
    /// Make all writes completed before this request started durable.
    Flush,
    /// The range's content is not needed any more.
    Discard {
        /// Length of the range.
        length_bytes: u64,
    },
}

/// A submitted request.
#[derive(Debug)]
pub struct Request {
    /// What to do.
    pub operation: Operation,
    /// Where; 0 for a flush.
    pub offset_bytes: u64,
    /// Memory, given back at completion.
    pub buffers: Buffers,
    /// How urgent.
    pub class: IoClass,
}

/// Called exactly once, on any thread, with the request's buffers. It must not block on
/// other requests.
pub type OnDone = Box<dyn FnOnce(DeviceResult<()>, Buffers) + Send>;

/// A disk. See the module's head for the rules.
pub trait Device: Send + Sync {
    /// Capacity and abilities; constant.
    fn info(&self) -> DeviceInfo;
    /// Reads into `buffers`, one after the other, from `offset_bytes` on. Blocks.
    fn read(
        &self,
        offset_bytes: u64,
        buffers: &mut [&mut [u8]],
        class: IoClass,
    ) -> DeviceResult<()>;
    /// Writes `buffers`, one after the other, from `offset_bytes` on. Blocks; not durable before a flush, or with
    /// `fua`.
    fn write(
        &self,
        offset_bytes: u64,
        buffers: &[&[u8]],
        class: IoClass,
        fua: bool,
    ) -> DeviceResult<()>;
    /// Makes every write that completed before this call durable. Blocks.
    fn flush(&self) -> DeviceResult<()>;
    /// Tells the device that a range is unused. Blocks. A hint: devices that cannot do nothing.
    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> DeviceResult<()>;
    /// Starts `request`; `on_done` is called when it has ended.
    fn submit(&self, request: Request, on_done: OnDone);
    /// Performs all of `requests`, side by side as far as the device can, and returns when the last has ended: results
    /// and memory in the order of the requests. Blocks; not for a thread that the device calls completions on.
    fn run_all(&self, requests: Vec<Request>) -> Vec<(DeviceResult<()>, Buffers)> {
        request::submit_all(self, requests)
    }
    /// Begins `requests` and returns at once, as [`Device::run_all`] otherwise. Whoever has much to write sends a part on its way so, and
    /// prepares the next meanwhile. Of very many, some may begin only when they are waited for. Any thread may wait; but Linux has
    /// the thread that began them notice their end, so another may hear of it only when that one is done with what it asks of the device.
    fn begin_all(self: Arc<Self>, requests: Vec<Request>) -> Underway {
        let batch = request::submit_batch(&*self, requests);
        Underway::new(|| batch.wait())
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_space_is_an_error_that_says_what_to_do() {
        let error = |operation, no_space| DeviceError {
            operation,
            offset_bytes: 8192,
            length_bytes: 4096,
            reason: "No space left on device (os error 28)".into(),
            no_space,
        };
        let full = crate::Error::from(error("write", true));
        assert_eq!(full.errno(), 28);
        let text = full.to_string();
        assert!(
            text.starts_with("no space left on the host of the volume (write of 4096"),
            "{text}"
        );
        assert!(text.ends_with("free some there, and try again"), "{text}");
        for (operation, no_space) in [("write", false), ("flush", true), ("discard", true)] {
            assert_eq!(crate::Error::from(error(operation, no_space)).errno(), 5, "{operation}");
        }
    }
}
