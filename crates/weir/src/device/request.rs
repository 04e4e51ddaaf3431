//! What device implementations share: the checks of the trait's rules, performing a
//! submitted [`Request`] through the blocking calls, and a batch through submissions.

use super::{Buffers, Device, DeviceError, DeviceResult, Operation, Request};
use crate::format::{BLOCK_BYTES, BLOCK_BYTES_U64};
use crate::sync::{Arc, Condvar, Mutex};

/// Checks that a range is made of whole blocks and lies inside a device of `size_bytes`.
///
/// # Errors
/// The range breaks one of the two rules.
pub fn check_range(
    operation: &'static str,
    size_bytes: u64,
    offset_bytes: u64,
    length_bytes: u64,
) -> DeviceResult<()> {
    let refuse = |reason: &str| {
        Err(DeviceError {
            operation,
            offset_bytes,
            length_bytes,
            reason: reason.to_owned(),
            no_space: false,
        })
    };
    if !offset_bytes.is_multiple_of(BLOCK_BYTES_U64)
        || !length_bytes.is_multiple_of(BLOCK_BYTES_U64)
    {
        return refuse("not a multiple of 4096 bytes");
    }
    match offset_bytes.checked_add(length_bytes) {
        Some(end) if end <= size_bytes => Ok(()),
        _ => refuse("beyond the end of the device"),
    }
}

/// Checks a transfer of `buffers` at `offset_bytes`, and gives its total length in bytes.
///
/// # Errors
/// The range is not inside the device, or a buffer is not aligned to 4096 bytes or not a multiple
/// of 4096 bytes long.
pub fn check_transfer<'a>(
    operation: &'static str,
    size_bytes: u64,
    offset_bytes: u64,
    buffers: impl Iterator<Item = &'a [u8]>,
) -> DeviceResult<u64> {
    let mut length_bytes = 0;
    let mut aligned = true;
    for buffer in buffers {
        length_bytes += buffer.len() as u64;
        aligned &= is_aligned(buffer);
    }
    check_range(operation, size_bytes, offset_bytes, length_bytes)?;
    if aligned {
        Ok(length_bytes)
    } else {
        Err(DeviceError {
            operation,
            offset_bytes,
            length_bytes,
            reason: "a buffer is not aligned to 4096 bytes".to_owned(),
            no_space: false,
        })
    }
}

/// An empty buffer transfers nothing, wherever it points.
fn is_aligned(buffer: &[u8]) -> bool {
    let block = BLOCK_BYTES;
    buffer.is_empty()
        || (buffer.as_ptr().addr().is_multiple_of(block) && buffer.len().is_multiple_of(block))
}

/// Performs `request` on the calling thread and gives back its result and its memory.
pub fn perform(device: &dyn Device, request: Request) -> (DeviceResult<()>, Buffers) {
    let Request { operation, offset_bytes, mut buffers, class } = request;
    let result = match operation {
        Operation::Flush => device.flush(),
        Operation::Discard { length_bytes } => device.discard(offset_bytes, length_bytes),
        Operation::Write { fua } => match &buffers {
            Buffers::Owned(_) | Buffers::Pages(_) | Buffers::Framed(..) => {
                device.write(offset_bytes, &buffers.slices(), class, fua)
            }
            Buffers::Fill(_) | Buffers::None => Err(wrong_buffers("write", offset_bytes)),
        },
        Operation::Read => match &mut buffers {
            Buffers::Owned(buffer) => device.read(offset_bytes, &mut [buffer], class),
            Buffers::Fill(pages) => {
                let mut slices: Vec<&mut [u8]> =
                    pages.iter_mut().map(|page| &mut page[..]).collect();
                device.read(offset_bytes, &mut slices, class)
            }
            Buffers::Pages(_) | Buffers::Framed(..) | Buffers::None => {
                Err(wrong_buffers("read", offset_bytes))
            }
        },
    };
    (result, buffers)
}

/// How a request ended, and its memory.
pub type Outcome = (DeviceResult<()>, Buffers);

/// Results of a batch that is under way.
struct Latch {
    outcomes: Mutex<Vec<Option<Outcome>>>,
    left: Mutex<usize>,
    ended: Condvar,
}

/// Requests that were submitted together.
#[must_use = "the memory of the requests comes back with their results"]
pub struct Batch(Arc<Latch>);

impl Batch {
    /// Waits for the last of them: results and memory in the order of the requests.
    pub fn wait(self) -> Vec<Outcome> {
        let mut left = self.0.left.lock();
        while *left > 0 {
            self.0.ended.wait(&mut left);
        }
        drop(left);
        let outcomes = std::mem::take(&mut *self.0.outcomes.lock());
        // Each was filled before it was counted.
        outcomes.into_iter().flatten().collect()
    }
}

/// Submits all of `requests`.
pub fn submit_batch<D: Device + ?Sized>(device: &D, requests: Vec<Request>) -> Batch {
    let count = requests.len();
    let outcomes = Mutex::new((0..count).map(|_| None).collect());
    let latch = Arc::new(Latch { outcomes, left: Mutex::new(count), ended: Condvar::new() });
    for (number, request) in requests.into_iter().enumerate() {
        let done = Arc::clone(&latch);
        let on_done = move |result, buffers| {
            done.outcomes.lock()[number] = Some((result, buffers));
            let mut left = done.left.lock();
            *left -= 1;
            if *left == 0 {
                done.ended.notify_all();
            }
        };
        device.submit(request, Box::new(on_done));
    }
    Batch(latch)
}

/// Requests that began together ([`Device::begin_all`]), and the rest of what it takes to end them. Dropping it waits for them.
#[must_use = "the memory of the requests comes back with their results"]
pub struct Underway(Option<Finish>);

type Finish = Box<dyn FnOnce() -> Vec<Outcome> + Send>;

impl Underway {
    /// `finish` waits for the last of the requests, and gives results and memory in their order.
    pub fn new(finish: impl FnOnce() -> Vec<Outcome> + Send + 'static) -> Self {
        Self(Some(Box::new(finish)))
    }

    /// Waits for the last of them: results and memory in the order of the requests.
    pub fn wait(mut self) -> Vec<Outcome> {
        self.0.take().map_or_else(Vec::new, |finish| finish())
    }
}

impl Drop for Underway {
    fn drop(&mut self) {
        if let Some(finish) = self.0.take() {
            finish();
        }
    }
}

impl std::fmt::Debug for Underway {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Underway").finish_non_exhaustive()
    }
}

/// Submits all of `requests`, and waits for the last.
pub fn submit_all<D: Device + ?Sized>(device: &D, requests: Vec<Request>) -> Vec<Outcome> {
    submit_batch(device, requests).wait()
}

/// The request's buffers cannot serve its operation.
fn wrong_buffers(operation: &'static str, offset_bytes: u64) -> DeviceError {
    DeviceError {
        operation,
        offset_bytes,
        length_bytes: 0,
        reason: "the request's buffers are not of the kind its operation needs".to_owned(),
        no_space: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::buffer::AlignedBuf;

    #[test]
    fn ranges_outside_or_unaligned_are_refused() {
        assert!(check_range("read", 8192, 0, 8192).is_ok());
        assert!(check_range("read", 8192, 8192, 0).is_ok());
        assert!(check_range("read", 8192, 4096, 8192).is_err());
        assert!(check_range("read", 8192, 1, 4096).is_err());
        assert!(check_range("read", 8192, 0, 100).is_err());
        assert!(check_range("read", 8192, u64::MAX - 4095, 4096).is_err());
    }

    #[test]
    fn unaligned_buffers_are_refused() {
        let buffer = AlignedBuf::zeroed(12288);
        let check = |slice: &[u8]| check_transfer("write", 1 << 20, 0, [slice].into_iter());
        assert_eq!(check(&buffer), Ok(12288));
        assert!(check(&buffer[512..512 + 4096]).is_err());
        assert!(check(&buffer[..100]).is_err());
    }
}
