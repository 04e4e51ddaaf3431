//! One queue: a ring, its entries, and the thread that waits on it.
//!
//! The kernel has one queue for each core and puts a request into that of the core it was made on, so the thread that serves it
//! runs there too: no other core has to be woken. An entry is a header and room for a payload; it is in the kernel's hands or
//! held by a [`Held`], which answers it, from any thread. Only the queue's thread gives entries to the kernel (what
//! completes a command runs on the thread that submitted it); other threads leave them in `answered` and wake it.
//!
//! **Invariant:** an entry's memory is touched through its only [`Held`], which exists from the completion of the command that
//! filled it until its answer is left in `answered`; the kernel touches it only while a command of it is submitted.
//! **Invariant:** each [`Held`] is answered once: dropping it unanswered answers EIO.
//! **Invariant:** a queue that can serve no more returns an error, even if its connection lives: whoever runs it has to end that, since
//! the kernel goes on giving it the requests of its core.
//!
//! `unsafe` here: memory of entries, which the kernel uses after a call; commands that carry its addresses.

#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use weir::sync::Mutex;

use super::abi::{self, Fate, HEADER_BYTES, Request};
use super::hops::Hops;
use super::manners::Manners;
use super::wake::{SOURCES, Wake};
use crate::errno::Errno;

/// The ring of a queue: commands need the large entries.
pub type Ring = IoUring<squeue::Entry128, cqueue::Entry>;

/// From here on completions are of the reads that other threads wake the queue's by: see [`Wake::sources`].
const WAKE: u64 = u64::MAX - SOURCES as u64 + 1;
/// Where the length lies in a submission entry (`struct io_uring_sqe`).
const SQE_LENGTH_AT: usize = 24;

const _: () = assert!(size_of::<squeue::Entry128>() == 128);

/// Memory of a queue's entries, mapped without being backed: what is never used costs nothing.
struct Memory {
    start: *mut u8,
    length: usize,
}

// SAFETY: a plain mapping; who may touch what is said by the invariants at the head.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(length: usize) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping wherever the kernel likes.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { start: start.cast(), length })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`; whoever refers to it keeps this alive.
        unsafe { libc::munmap(self.start.cast(), self.length) };
    }
}

thread_local! {
    /// The queue that the calling thread serves; only ever compared.
    static SERVED_HERE: Cell<*const Shared> = const { Cell::new(std::ptr::null()) };
    /// The request that the calling thread works on within [`answering_later`], and its answer.
    static LATER: RefCell<Option<(Entry, Option<Answered>)>> = const { RefCell::new(None) };
}

/// Where a request is held; only ever compared.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The address of what the queue shares.
    shared: usize,
    index: usize,
}

/// An entry that is to be given back. Dropping it does that.
pub struct Answered {
    shared: Arc<Shared>,
    index: usize,
    commit_id: u64,
}

impl Drop for Answered {
    fn drop(&mut self) {
        self.shared.answer(self.index, self.commit_id);
    }
}

/// Does `job`, whose request is `own`, and keeps its answer if that is given on this thread: the thread of the queue, on the same core, takes
/// the processor as soon as it is woken. What others hear meanwhile, from a flush that is led here, say, they hear at once.
pub fn answering_later(own: Entry, job: impl FnOnce()) -> Option<Answered> {
    struct Kept;
    impl Drop for Kept {
        fn drop(&mut self) {
            // A job that unwinds has answered too.
            drop(LATER.take());
        }
    }
    LATER.set(Some((own, None)));
    let kept = Kept;
    job();
    let answered = LATER.take().and_then(|(_, answered)| answered);
    drop(kept);
    answered
}

/// Keeps `answered`, or gives it back where it is not the request that is worked on here.
fn keep_own(entry: Entry, answered: Answered) -> Option<Answered> {
    LATER.with_borrow_mut(|later| match later {
        Some((own, kept)) if *own == entry => kept.replace(answered),
        _ => Some(answered),
    })
}

/// What the queue's thread shares with those who answer.
pub struct Shared {
    number: u16,
    memory: Memory,
    entries: usize,
    payload_bytes: usize,
    /// Entries to be given back to the kernel.
    answered: Mutex<Vec<(usize, u64)>>,
    wake: Wake,
    /// Requests that are held.
    open: AtomicUsize,
}

impl Shared {
    fn entry_bytes(&self) -> usize {
        super::PAGE_BYTES + self.payload_bytes
    }
    fn header(&self, index: usize) -> *mut u8 {
        assert!(index < self.entries);
        // SAFETY: within the mapping, which has `entries` times `entry_bytes`.
        unsafe { self.memory.start.add(index * self.entry_bytes()) }
    }
    fn payload(&self, index: usize) -> *mut u8 {
        // SAFETY: the payload follows the page of the header.
        unsafe { self.header(index).add(super::PAGE_BYTES) }
    }

    fn answer(&self, index: usize, commit_id: u64) {
        let mut answered = self.answered.lock();
        answered.push((index, commit_id));
        let first = answered.len() == 1;
        drop(answered);
        // The queue's own thread looks before it waits.
        if first && !std::ptr::eq(SERVED_HERE.get(), self) {
            self.wake.wake();
        }
    }
}

/// A request to be answered.
pub struct Held {
    shared: Arc<Shared>,
    index: usize,
    /// Its first fields.
    pub request: Request,
    answered: bool,
}

impl Held {
    /// The operation's header and the payload.
    pub fn parts(&self) -> (abi::Fields<'_>, &[u8]) {
        let (header, payload) = (self.shared.header(self.index), self.shared.payload(self.index));
        let length = self.request.payload_bytes.min(self.shared.payload_bytes);
        // SAFETY: this is the entry's only holder, and borrowed.
        unsafe {
            let header = std::slice::from_raw_parts(header.cast_const(), HEADER_BYTES);
            let payload = std::slice::from_raw_parts(payload.cast_const(), length);
            (abi::operation(header), payload)
        }
    }

    /// Room for the answer; the request's payload is lost.
    pub fn space(&mut self) -> &mut [u8] {
        let payload = self.shared.payload(self.index);
        // SAFETY: this is the entry's only holder, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(payload, self.shared.payload_bytes) }
    }

    /// Answers: an error, or so many bytes of [`Held::space`].
    pub fn answer(mut self, result: Result<usize, Errno>) {
        self.commit(result);
    }

    /// Its queue, by number, and where that holds it.
    pub fn place(&self) -> (usize, Entry) {
        (self.shared.number.into(), self.entry())
    }

    fn entry(&self) -> Entry {
        Entry { shared: Arc::as_ptr(&self.shared).addr(), index: self.index }
    }

    /// Most entries of the queue are held.
    pub fn is_scarce(&self) -> bool {
        self.shared.open.load(Ordering::Relaxed) > self.shared.entries / 2
    }

    fn commit(&mut self, result: Result<usize, Errno>) {
        self.answered = true;
        let header = self.shared.header(self.index);
        // SAFETY: this is the entry's only holder; the slice ends before the entry is given away.
        let header = unsafe { std::slice::from_raw_parts_mut(header, HEADER_BYTES) };
        abi::answer(header, self.request.unique, result);
        self.shared.open.fetch_sub(1, Ordering::Relaxed);
        let answered = Answered {
            shared: Arc::clone(&self.shared),
            index: self.index,
            commit_id: self.request.commit_id,
        };
        drop(keep_own(self.entry(), answered));
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.answered {
            self.commit(Err(Errno::EIO));
        }
    }
}

/// A queue that has not begun.
pub struct Queue {
    ring: Ring,
    shared: Arc<Shared>,
    /// Where programs come from; `None`: nothing can be done about it.
    hops: Option<Arc<Hops>>,
}

impl Queue {
    /// The ring and memory of queue `number`.
    pub fn new(
        number: u16,
        entries: usize,
        payload_bytes: usize,
        hops: Option<Arc<Hops>>,
    ) -> io::Result<Self> {
        let depth = (entries + SOURCES).next_power_of_two() as u32;
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_r_disabled()
            .build(depth)?;
        let shared = Shared {
            number,
            memory: Memory::new(entries * (super::PAGE_BYTES + payload_bytes))?,
            entries,
            payload_bytes,
            answered: Mutex::default(),
            wake: Wake::new(number.into())?,
            open: AtomicUsize::new(0),
        };
        Ok(Self { ring, shared: Arc::new(shared), hops })
    }

    /// Serves requests of the connection `device` until it ends.
    pub fn run(mut self, device: &OwnedFd, serve: &dyn Fn(Held)) -> io::Result<()> {
        SERVED_HERE.set(Arc::as_ptr(&self.shared));
        self.ring.submitter().register_enable_rings()?;
        // Registered, so that the cores do not count references to it against each other.
        self.ring.submitter().register_files(&[device.as_raw_fd()])?;
        let device = types::Fixed(0);
        let places: Vec<[libc::iovec; 2]> = (0..self.shared.entries)
            .map(|index| {
                let part = |start: *mut u8, length| libc::iovec {
                    iov_base: start.cast(),
                    iov_len: length,
                };
                [
                    part(self.shared.header(index), HEADER_BYTES),
                    part(self.shared.payload(index), self.shared.payload_bytes),
                ]
            })
            .collect();
        let mut counters = Box::new([[0_u8; 8]; SOURCES]);
        for source in 0..SOURCES {
            self.listen(source, &mut counters)?;
        }
        for (index, place) in places.iter().enumerate() {
            let command = opcode::UringCmd80::new(device, abi::REGISTER)
                .cmd(abi::command(0, self.shared.number))
                .addr(Some(place.as_ptr() as u64))
                .build()
                .user_data(index as u64);
            self.push(&with_length(command, place.len() as u32))?;
        }
        // Entries with the kernel. When none is and the connection has ended, nobody will ask any more.
        let mut submitted = self.shared.entries;
        // Entries that have held a request, so that the command under way is an answer; and those that the kernel did not want.
        let mut used = vec![false; self.shared.entries];
        let mut unwanted = 0;
        let mut ended = false;
        let mut listening = [true; SOURCES];
        let mut completed: Vec<(u64, i32)> = Vec::new();
        let mut manners = Manners::of_this_thread();
        let mut answered: Vec<(usize, u64)> = Vec::new();
        loop {
            std::mem::swap(&mut answered, &mut *self.shared.answered.lock());
            for (index, commit_id) in answered.drain(..) {
                let command = opcode::UringCmd80::new(device, abi::COMMIT_AND_FETCH)
                    .cmd(abi::command(commit_id, self.shared.number))
                    .build()
                    .user_data(index as u64);
                self.push(&command)?;
                submitted += 1;
            }
            if ended && submitted == 0 {
                if listening == [false; SOURCES] {
                    return Ok(());
                }
                // The reads under way have addresses of this function: they must end first.
                self.shared.wake.end_reads()?;
            }
            if manners.as_mut().is_some_and(|manners| !manners.turn()) {
                manners = None;
            }
            self.shared.wake.set_late(manners.as_ref().is_some_and(Manners::is_late));
            let patience = manners.as_ref().and_then(Manners::patience);
            match (self.submit_and_wait(patience), &mut manners) {
                (Err(error), Some(manners)) if has_timed_out(&error) => manners.rest(),
                (Err(error), _) if !is_temporary(&error) => return Err(error),
                _ => {}
            }
            completed.extend(self.ring.completion().map(|done| (done.user_data(), done.result())));
            for (user_data, result) in completed.drain(..) {
                if user_data >= WAKE {
                    let source = (user_data - WAKE) as usize;
                    listening[source] = !(ended && submitted == 0);
                    if listening[source] {
                        self.listen(source, &mut counters)?;
                    }
                    continue;
                }
                submitted -= 1;
                let index = user_data as usize;
                match abi::fate(result) {
                    Fate::Request => {
                        used[index] = true;
                        let held = self.held(index);
                        if let Some(manners) = &mut manners {
                            let pid = held.request.pid;
                            manners.note(pid, self.hops(pid));
                        }
                        serve(held);
                    }
                    Fate::Ended => ended = true,
                    Fate::Refused if used[index] => {
                        let error = io::Error::from_raw_os_error(-result);
                        return Err(io::Error::other(format!("an answer was refused: {error}")));
                    }
                    // Fewer entries do; and where the kernel wants none, requests come over `/dev/fuse`.
                    Fate::Refused => {
                        unwanted += 1;
                        ended |= unwanted == self.shared.entries;
                    }
                }
            }
        }
    }

    /// Submits what there is, and waits for something to complete; with `patience`, not for longer than that: `ETIME`, or where something
    /// was submitted too, as if something had completed (the call can tell one of the two only).
    fn submit_and_wait(&self, patience: Option<Duration>) -> io::Result<usize> {
        let Some(patience) = patience else { return self.ring.submit_and_wait(1) };
        let timeout = types::Timespec::from(patience);
        self.ring.submitter().submit_with_args(1, &types::SubmitArgs::new().timespec(&timeout))
    }

    /// Notes where a request comes from; whether its program hops.
    fn hops(&self, pid: u32) -> bool {
        self.hops.as_ref().is_some_and(|hops| hops.note(pid, self.shared.number))
    }

    /// The request that the kernel has put into an entry.
    fn held(&self, index: usize) -> Held {
        let header = self.shared.header(index);
        // SAFETY: the command of this entry has completed, and nobody holds it yet.
        let header = unsafe { std::slice::from_raw_parts(header.cast_const(), HEADER_BYTES) };
        // A whole header is never too short.
        let request = abi::request(header).unwrap_or(Request {
            opcode: 0,
            unique: 0,
            ino: 0,
            uid: u32::MAX,
            gid: u32::MAX,
            pid: 0,
            commit_id: 0,
            payload_bytes: 0,
        });
        self.shared.open.fetch_add(1, Ordering::Relaxed);
        Held { shared: Arc::clone(&self.shared), index, request, answered: false }
    }

    /// Lets a source of [`Wake`] complete something.
    fn listen(&mut self, source: usize, counters: &mut [[u8; 8]; SOURCES]) -> io::Result<()> {
        let counter = &mut counters[source];
        let read = opcode::Read::new(
            types::Fd(self.shared.wake.sources()[source].as_raw_fd()),
            counter.as_mut_ptr(),
            counter.len() as u32,
        );
        self.push(&read.build().user_data(WAKE + source as u64).into())
    }

    fn push(&mut self, entry: &squeue::Entry128) -> io::Result<()> {
        // SAFETY: the addresses are of `Shared`'s memory, of the places and of the counters. The first is kept by whoever holds
        // an entry, the others live until `run` returns, which it does when nothing is submitted. (With an error of the ring itself it
        // returns earlier; then nothing runs what is submitted any more, since commands and reads are completed on this thread.)
        unsafe { self.ring.submission().push(entry) }
            .map_err(|_| io::Error::other("more commands than entries"))
    }
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}

fn has_timed_out(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ETIME)
}

/// The entry with a length, which the crate has no method for.
fn with_length(mut entry: squeue::Entry128, length: u32) -> squeue::Entry128 {
    // SAFETY: the type is the kernel's `struct io_uring_sqe` of 128 bytes (asserted above), with a 32-bit length at this offset.
    unsafe {
        std::ptr::from_mut(&mut entry)
            .cast::<u8>()
            .add(SQE_LENGTH_AT)
            .cast::<u32>()
            .write_unaligned(length);
    }
    entry
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(shared: &Arc<Shared>, index: usize) -> Held {
        let commit_id = 100 + index as u64;
        let (opcode, unique, ino, payload_bytes) = (abi::op::FSYNC, index as u64, 1, 0);
        let request =
            Request { opcode, unique, ino, uid: 0, gid: 0, pid: 0, commit_id, payload_bytes };
        shared.open.fetch_add(1, Ordering::Relaxed);
        Held { shared: Arc::clone(shared), index, request, answered: false }
    }

    #[test]
    fn a_request_that_is_worked_on_is_answered_behind_the_work_and_others_at_once() {
        let Ok(queue) = Queue::new(0, 4, super::super::PAGE_BYTES, None) else {
            eprintln!("skipped: no io_uring here");
            return;
        };
        let shared = &queue.shared;
        let answered = || shared.answered.lock().clone();
        let (own, other, unwound) = (held(shared, 0), held(shared, 1), held(shared, 2));
        let kept = answering_later(own.entry(), || {
            own.answer(Ok(0));
            other.answer(Ok(0));
        });
        assert_eq!(answered(), [(1, 101)]);
        drop(kept);
        assert_eq!(answered(), [(1, 101), (0, 100)]);
        let entry = unwound.entry();
        let job = move || {
            let _unanswered = unwound;
            panic!("amid the work");
        };
        let work = std::panic::AssertUnwindSafe(|| drop(answering_later(entry, job)));
        assert!(std::panic::catch_unwind(work).is_err());
        assert_eq!(answered(), [(1, 101), (0, 100), (2, 102)], "it is not lost");
        assert_eq!(shared.open.load(Ordering::Relaxed), 0);
    }
}
