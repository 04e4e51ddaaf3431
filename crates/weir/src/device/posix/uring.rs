//! Batches of reads and writes through `io_uring`: the thread that has them submits and waits for them itself, so a
//! request costs no hand-over to another thread. Between the two it may do something else ([`Rings::begin`]).
//!
//! A batch takes a ring of its own, kept from an earlier one or new, for as long as it runs. Where the host refuses rings
//! (an old kernel, a sandbox) the first attempt finds out and the device's threads do the work from then on. Whatever
//! the ring cannot do (a flush, a discard, a forced write), or gives back undone, is done by a blocking call.
//!
//! **Invariant:** no request is in the kernel's hands when a batch ends, however it ends: the memory of its buffers belongs to
//! the caller again. A ring on which a system call failed is not used again.
//!
//! This module uses `unsafe` to give the kernel addresses that it uses after the call: `io_uring` is made of that. All of it
//! is in [`Batch`], which owns the memory and does not go away before the kernel has let go of it.

use super::segments::Segments;
use super::{Disk, MAX_SEGMENTS, device_error};
use crate::device::request::{check_transfer, perform};
use crate::device::{Buffers, DeviceResult, IoClass, Operation, Request};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Mutex};
use io_uring::{IoUring, opcode, squeue, types};
use std::fmt;
use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

/// Requests in flight of a batch that somebody waits for.
const URGENT_DEPTH: usize = 64;
/// Requests in flight of a batch that nobody waits for: keeps a disk busy, and its queue short for others.
const PATIENT_DEPTH: usize = 32;
/// Rings that are kept for the next batch.
const SPARE_RINGS: usize = 4;
/// Temporary errors in a row after which a ring is given up.
const MAX_REFUSALS: u32 = 1000;

/// Errors that say nothing of the disk. The last two come where the thread that has begun a batch ends before the kernel got round to a
/// part of it.
const UNDONE: [i32; 6] =
    [libc::EINTR, libc::EAGAIN, libc::EINVAL, libc::EOPNOTSUPP, libc::ECANCELED, libc::EFAULT];

/// What a batch answers, in the order of its requests.
pub(super) type Outcomes = Vec<(DeviceResult<()>, Buffers)>;

/// The rings of one device. See the module's head.
pub(super) struct Rings {
    spare: Mutex<Vec<IoUring>>,
    refused: AtomicBool,
}

impl fmt::Debug for Rings {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Rings").field("refused", &self.refused).finish_non_exhaustive()
    }
}

impl Rings {
    /// No ring yet. Not `allowed`: as if the host refused.
    pub(super) fn new(allowed: bool) -> Self {
        Self { spare: Mutex::new(Vec::new()), refused: AtomicBool::new(!allowed) }
    }

    /// False once the host has refused a ring.
    pub(super) fn available(&self) -> bool {
        !self.refused.load(Ordering::Relaxed)
    }

    fn take(&self) -> Option<IoUring> {
        if !self.available() {
            return None;
        }
        if let Some(ring) = self.spare.lock().pop() {
            return Some(ring);
        }
        match IoUring::new(URGENT_DEPTH as u32) {
            Ok(ring) => Some(ring),
            Err(error) => {
                let refusals = [libc::ENOSYS, libc::EPERM, libc::EACCES];
                if error.raw_os_error().is_some_and(|number| refusals.contains(&number)) {
                    self.refused.store(true, Ordering::Relaxed);
                }
                // Otherwise out of memory or descriptors: the next batch may have more luck.
                None
            }
        }
    }

    /// Performs all requests.
    ///
    /// # Errors
    /// There is no ring to be had: the requests, unperformed.
    pub(super) fn run(
        &self,
        disk: &Arc<Disk>,
        requests: Vec<Request>,
    ) -> Result<Outcomes, Vec<Request>> {
        let Some(ring) = self.take() else { return Err(requests) };
        Ok(self.end(Batch::new(ring, disk, requests)))
    }

    /// Begins the requests, as many as a ring takes at a time; the rest when they are waited for, which is what [`Rings::end`] does.
    ///
    /// # Errors
    /// There is no ring to be had: the requests, unperformed.
    pub(super) fn begin(
        &self,
        disk: &Arc<Disk>,
        requests: Vec<Request>,
    ) -> Result<Batch, Vec<Request>> {
        let Some(ring) = self.take() else { return Err(requests) };
        let mut batch = Batch::new(ring, disk, requests);
        batch.fill();
        batch.submit(0);
        Ok(batch)
    }

    /// Performs what is left of the batch, and keeps its ring for the next.
    pub(super) fn end(&self, mut batch: Batch) -> Outcomes {
        batch.run();
        let (outcomes, ring) = batch.finish();
        if let Some(ring) = ring {
            let mut spare = self.spare.lock();
            if spare.len() < SPARE_RINGS {
                spare.push(ring);
            }
        }
        outcomes
    }
}

/// One request on its way.
struct Transfer {
    request: Request,
    length_bytes: u64,
    /// What is left of the buffers, as the kernel wants it; nothing if the ring cannot do the request.
    segments: Segments,
    result: Option<DeviceResult<()>>,
}

impl Transfer {
    fn new(disk: &Disk, mut request: Request) -> Self {
        let checked = check(disk, &request);
        // What breaks a rule is refused by the blocking call, in its words.
        let length_bytes = checked.unwrap_or(0);
        let segments = if length_bytes > 0 { segments(&mut request) } else { Segments::default() };
        Self { request, length_bytes, segments, result: None }
    }

    fn is_read(&self) -> bool {
        self.request.operation == Operation::Read
    }

    /// The submission of what is left.
    fn entry(&self, file: types::Fd) -> squeue::Entry {
        let offset_bytes = self.request.offset_bytes + self.length_bytes - self.segments.bytes();
        let (segments, count) = self.segments.as_raw(MAX_SEGMENTS);
        if self.is_read() {
            opcode::Readv::new(file, segments, count).offset(offset_bytes).build()
        } else {
            opcode::Writev::new(file, segments, count).offset(offset_bytes).build()
        }
    }

    /// Books a completion. True when something is left to be submitted.
    fn completed(&mut self, disk: &Disk, answer: i32) -> bool {
        let Ok(count) = usize::try_from(answer) else {
            if UNDONE.contains(&-answer) {
                self.perform_blocking(disk);
            } else {
                self.end(disk, Err(io::Error::from_raw_os_error(-answer)));
            }
            return false;
        };
        if count == 0 {
            let read = self.is_read();
            let kind = if read { io::ErrorKind::UnexpectedEof } else { io::ErrorKind::WriteZero };
            self.end(disk, Err(kind.into()));
            return false;
        }
        self.segments.advance(count);
        if self.segments.is_empty() {
            self.end(disk, Ok(()));
        }
        self.result.is_none()
    }

    fn end(&mut self, disk: &Disk, result: io::Result<()>) {
        let name = if self.is_read() { "read" } else { "write" };
        let result = result.map_err(|error| {
            device_error(name, self.request.offset_bytes, self.length_bytes, &error)
        });
        if self.is_read() {
            disk.stats.count_read(self.length_bytes, &result);
        } else {
            disk.stats.count_write(self.length_bytes, &result);
        }
        self.result = Some(result);
    }

    /// From the start, in case a part was done: that does no harm.
    fn perform_blocking(&mut self, disk: &Disk) {
        let buffers = std::mem::replace(&mut self.request.buffers, Buffers::None);
        let (operation, offset_bytes) = (self.request.operation, self.request.offset_bytes);
        let request = Request { operation, offset_bytes, buffers, class: self.request.class };
        let (result, buffers) = perform(disk, request);
        self.request.buffers = buffers;
        self.result = Some(result);
    }
}

/// The length of a transfer that keeps the rules.
fn check(disk: &Disk, request: &Request) -> DeviceResult<u64> {
    let check = |slices: &mut dyn Iterator<Item = &[u8]>| {
        check_transfer("batch", disk.info.size_bytes, request.offset_bytes, slices)
    };
    match &request.buffers {
        Buffers::Owned(buffer) => check(&mut std::iter::once(&**buffer)),
        Buffers::Pages(_) | Buffers::Framed(..) => check(&mut request.buffers.slices().into_iter()),
        Buffers::Fill(pages) => check(&mut pages.iter().map(|page| &**page)),
        Buffers::None => Ok(0),
    }
}

/// The memory of a read's or write's buffers; empty for a request that the ring cannot do.
fn segments(request: &mut Request) -> Segments {
    match (request.operation, &mut request.buffers) {
        (
            Operation::Write { fua: false },
            buffers @ (Buffers::Owned(_) | Buffers::Pages(_) | Buffers::Framed(..)),
        ) => Segments::to_kernel(buffers.slices().into_iter()),
        (Operation::Read, Buffers::Owned(buffer)) => {
            Segments::from_kernel(std::iter::once(&mut **buffer))
        }
        (Operation::Read, Buffers::Fill(pages)) => {
            Segments::from_kernel(pages.iter_mut().map(|page| &mut **page))
        }
        _ => Segments::default(),
    }
}

/// The requests of one batch and the ring they run on.
pub(super) struct Batch {
    disk: Arc<Disk>,
    /// Gone when a system call on it has failed.
    ring: Option<IoUring>,
    transfers: Vec<Transfer>,
    /// Still to be submitted, last first.
    waiting: Vec<usize>,
    /// Pushed and not completed.
    in_flight: usize,
    depth: usize,
    /// Temporary errors of the ring since something completed.
    refusals: u32,
}

impl Batch {
    fn new(ring: IoUring, disk: &Arc<Disk>, requests: Vec<Request>) -> Self {
        let urgent = requests.iter().any(|request| request.class <= IoClass::SyncWrite);
        let depth = if urgent { URGENT_DEPTH } else { PATIENT_DEPTH };
        let transfers: Vec<Transfer> =
            requests.into_iter().map(|request| Transfer::new(disk, request)).collect();
        let by_ring = |&index: &usize| !transfers[index].segments.is_empty();
        let waiting = (0..transfers.len()).rev().filter(by_ring).collect();
        let disk = Arc::clone(disk);
        Self { disk, ring: Some(ring), transfers, waiting, in_flight: 0, depth, refusals: 0 }
    }

    fn run(&mut self) {
        // Some may have completed while the caller did something else.
        self.reap();
        while self.ring.is_some() && (self.in_flight > 0 || !self.waiting.is_empty()) {
            self.fill();
            // Half of it, or all when nothing else is to be submitted.
            let want = if self.waiting.is_empty() { self.in_flight } else { self.in_flight / 2 };
            self.submit(want.max(1));
            self.reap();
        }
        for transfer in self.transfers.iter_mut().filter(|transfer| transfer.result.is_none()) {
            transfer.perform_blocking(&self.disk);
        }
    }

    /// Fills the ring.
    fn fill(&mut self) {
        let Some(ring) = &mut self.ring else { return };
        let file = types::Fd(self.disk.file.as_raw_fd());
        while self.in_flight < self.depth {
            let Some(index) = self.waiting.pop() else { break };
            let entry = self.transfers[index].entry(file).user_data(index as u64);
            // SAFETY: the entry names memory that `self.transfers[index]` owns: its segments, which are not touched while
            // it is in flight, and its buffers. The batch does not end before the kernel has completed it.
            if unsafe { ring.submission().push(&entry) }.is_err() {
                self.waiting.push(index);
                break;
            }
            self.in_flight += 1;
        }
    }

    /// Hands what is in the ring to the kernel, and waits until `want` of it have completed.
    fn submit(&mut self, want: usize) {
        let Some(ring) = &mut self.ring else { return };
        if let Err(error) = ring.submit_and_wait(want) {
            let passing = [libc::EINTR, libc::EAGAIN, libc::EBUSY];
            let passes = error.raw_os_error().is_some_and(|number| passing.contains(&number));
            self.refusals += 1;
            if !passes || self.refusals > MAX_REFUSALS {
                self.give_up_ring();
            }
        }
    }

    /// Books what has completed.
    fn reap(&mut self) {
        let Some(ring) = &mut self.ring else { return };
        for completion in ring.completion() {
            self.in_flight -= 1;
            self.refusals = 0;
            let index = completion.user_data() as usize;
            if self.transfers[index].completed(&self.disk, completion.result()) {
                self.waiting.push(index);
            }
        }
    }

    /// The ring does not work: waits for what the kernel has taken, and closes it.
    fn give_up_ring(&mut self) {
        // What was pushed and not taken never will be.
        while self.ring.as_mut().is_some_and(|ring| self.in_flight > ring.submission().len()) {
            self.reap();
            std::thread::sleep(Duration::from_micros(100));
        }
        self.ring = None;
        self.in_flight = 0;
        self.waiting.clear();
    }

    /// The results, and the ring if it still works.
    fn finish(mut self) -> (Outcomes, Option<IoUring>) {
        let ring = self.ring.take();
        let transfers = std::mem::take(&mut self.transfers).into_iter();
        let unknown = || Err(device_error("batch", 0, 0, &io::ErrorKind::Other.into()));
        let outcomes = transfers
            .map(|transfer| (transfer.result.unwrap_or_else(unknown), transfer.request.buffers));
        (outcomes.collect(), ring)
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        // After a panic: the buffers must not go away while the kernel uses them.
        self.give_up_ring();
    }
}

#[cfg(test)]
mod tests {
    use super::super::PosixDevice;
    use super::*;
    use crate::device::Device;
    use crate::device::buffer::AlignedBuf;

    #[test]
    fn what_the_kernel_gives_back_undone_is_done_all_the_same() {
        let name = format!("weir-uring-test-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let device = PosixDevice::create(&path, 1 << 20).unwrap();
        std::fs::remove_file(&path).unwrap();
        for (number, answer) in UNDONE.into_iter().enumerate() {
            let mut bytes = AlignedBuf::zeroed(4096);
            bytes.fill(number as u8 + 1);
            let request = Request {
                operation: Operation::Write { fua: false },
                offset_bytes: number as u64 * 4096,
                buffers: Buffers::Owned(bytes.clone()),
                class: IoClass::SyncWrite,
            };
            let mut transfer = Transfer::new(&device.disk, request);
            assert!(!transfer.completed(&device.disk, -answer));
            assert_eq!(transfer.result, Some(Ok(())), "{answer}");
            let mut found = AlignedBuf::zeroed(4096);
            device.read(number as u64 * 4096, &mut [&mut found], IoClass::SyncRead).unwrap();
            assert!(found == bytes, "{answer}");
        }
    }
}
