//! Asynchronous syncs and reads on kernel file systems: `io_uring`, Linux native AIO, threads.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;

use super::mounted::MountedFile;
use super::{AsyncMethod, Completion, FileRef, FsError, FsResult, ReadQueue, SyncQueue, SyncScope};
use crate::sys::{AioContext, AlignedBuf, Done, Ring};

/// Builds the queue for a method on a mounted file system.
pub fn sync_queue(method: AsyncMethod, depth: usize) -> FsResult<Box<dyn SyncQueue>> {
    Ok(match method {
        AsyncMethod::IoUring => {
            let ring = Ring::new(depth).map_err(uring_missing)?;
            // Every fsync is run by a kernel worker: without this, about eight of them.
            // Kernels before 5.15 cannot be told; they are measured as they are.
            let _ = ring.set_workers(depth as u32, depth as u32);
            Box::new(KernelQueue { inner: Kernel::Ring(Box::new(ring)), files: HashMap::new() })
        }
        AsyncMethod::Libaio => Box::new(KernelQueue {
            inner: Kernel::Aio(AioContext::new(depth)?),
            files: HashMap::new(),
        }),
        AsyncMethod::Threads => Box::new(ThreadQueue::new(depth)),
        AsyncMethod::Native => {
            return Err(FsError::NotOffered("kernel file systems have no tickets"));
        }
    })
}

/// Asynchronous buffered reads through `io_uring`.
pub fn read_queue(depth: usize) -> FsResult<Box<dyn ReadQueue>> {
    let ring = Ring::new(depth).map_err(uring_missing)?;
    Ok(Box::new(RingReads { ring, files: HashMap::new(), spare: Vec::new() }))
}

fn uring_missing(e: io::Error) -> FsError {
    match e.raw_os_error() {
        Some(libc::ENOSYS | libc::EPERM) => FsError::NotOffered("io_uring is disabled here"),
        _ => FsError::Io(e),
    }
}

fn raw_fd(file: &FileRef) -> FsResult<RawFd> {
    file.as_any()
        .downcast_ref::<MountedFile>()
        .map(|f| f.file().as_raw_fd())
        .ok_or(FsError::NotOffered("a file of another target"))
}

enum Kernel {
    Ring(Box<Ring>),
    Aio(AioContext),
}

/// `io_uring` or AIO; `files` keeps each descriptor open until its completion.
struct KernelQueue {
    inner: Kernel,
    files: HashMap<u64, FileRef>,
}

impl SyncQueue for KernelQueue {
    fn submit(&mut self, file: &FileRef, scope: SyncScope, tag: u64) -> FsResult<()> {
        let fd = raw_fd(file)?;
        match &mut self.inner {
            Kernel::Ring(ring) => {
                let range = match scope {
                    SyncScope::DataRange(offset, len) => {
                        Some((offset, len.min(u64::from(u32::MAX)) as u32))
                    }
                    SyncScope::File | SyncScope::Data => None,
                };
                ring.fsync(fd, scope != SyncScope::File, range, tag)?;
            }
            Kernel::Aio(aio) => match scope {
                SyncScope::File => aio.fsync(fd, false, tag)?,
                SyncScope::Data => aio.fsync(fd, true, tag)?,
                SyncScope::DataRange(..) => {
                    return Err(FsError::NotOffered("libaio fsync has no range"));
                }
            },
        }
        self.files.insert(tag, Arc::clone(file));
        Ok(())
    }

    fn complete(&mut self, wait: bool) -> FsResult<Option<Completion>> {
        let done = match &mut self.inner {
            Kernel::Ring(ring) => ring.reap(wait)?,
            Kernel::Aio(aio) => aio.reap(wait)?,
        };
        Ok(done.map(|Done { tag, result, .. }| {
            self.files.remove(&tag);
            Completion { tag, result }
        }))
    }

    fn in_flight(&self) -> usize {
        match &self.inner {
            Kernel::Ring(ring) => ring.in_flight(),
            Kernel::Aio(aio) => aio.in_flight(),
        }
    }
}

struct RingReads {
    ring: Ring,
    files: HashMap<u64, FileRef>,
    spare: Vec<AlignedBuf>,
}

impl ReadQueue for RingReads {
    fn submit(&mut self, file: &FileRef, offset: u64, len: usize, tag: u64) -> FsResult<()> {
        let spare = self.spare.pop().filter(|b| b.len() == len);
        let buf = spare.unwrap_or_else(|| AlignedBuf::new(len, 0));
        self.ring.read(raw_fd(file)?, buf, offset, tag)?;
        self.files.insert(tag, Arc::clone(file));
        Ok(())
    }

    fn complete(&mut self, wait: bool) -> FsResult<Option<Completion>> {
        Ok(self.ring.reap(wait)?.map(|Done { tag, result, buf }| {
            self.files.remove(&tag);
            self.spare.extend(buf);
            Completion { tag, result }
        }))
    }
}

type Job = (FileRef, SyncScope, u64);

/// One thread per request in flight, each blocked in `fsync`: what programs do without AIO.
pub struct ThreadQueue {
    jobs: Option<mpsc::Sender<Job>>,
    done: mpsc::Receiver<Completion>,
    threads: Vec<JoinHandle<()>>,
    in_flight: usize,
}

impl ThreadQueue {
    /// A queue of `depth` threads.
    pub fn new(depth: usize) -> Self {
        let (jobs, take) = mpsc::channel::<Job>();
        let take = Arc::new(Mutex::new(take));
        let (put, done) = mpsc::channel();
        let threads = (0..depth.max(1))
            .map(|_| {
                let (take, put) = (Arc::clone(&take), put.clone());
                std::thread::spawn(move || sync_worker(&take, &put))
            })
            .collect();
        ThreadQueue { jobs: Some(jobs), done, threads, in_flight: 0 }
    }
}

fn sync_worker(take: &Mutex<mpsc::Receiver<Job>>, put: &mpsc::Sender<Completion>) {
    loop {
        let job = match take.lock() {
            Ok(queue) => queue.recv(),
            Err(_) => return,
        };
        let Ok((file, scope, tag)) = job else { return };
        let result = match scope {
            SyncScope::File => file.fsync(),
            SyncScope::Data => file.fdatasync(),
            SyncScope::DataRange(..) => Err(FsError::NotOffered("threads have no ranged sync")),
        };
        drop(file);
        let result = result.map(|()| 0).map_err(|e| match e {
            FsError::Io(e) => e,
            FsError::NotOffered(why) => io::Error::new(io::ErrorKind::Unsupported, why),
        });
        if put.send(Completion { tag, result }).is_err() {
            return;
        }
    }
}

impl SyncQueue for ThreadQueue {
    fn submit(&mut self, file: &FileRef, scope: SyncScope, tag: u64) -> FsResult<()> {
        if let SyncScope::DataRange(..) = scope {
            return Err(FsError::NotOffered("threads have no ranged sync"));
        }
        let jobs = self.jobs.as_ref().ok_or_else(|| io::Error::other("queue closed"))?;
        jobs.send((Arc::clone(file), scope, tag)).map_err(|_| io::Error::other("workers gone"))?;
        self.in_flight += 1;
        Ok(())
    }

    fn complete(&mut self, wait: bool) -> FsResult<Option<Completion>> {
        if self.in_flight == 0 {
            return Ok(None);
        }
        let next = if wait { self.done.recv().ok() } else { self.done.try_recv().ok() };
        if next.is_some() {
            self.in_flight -= 1;
        }
        Ok(next)
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

impl Drop for ThreadQueue {
    fn drop(&mut self) {
        self.jobs = None;
        for t in self.threads.drain(..) {
            // A worker that panicked has already sent nothing; its job shows as missing.
            let _ = t.join();
        }
    }
}
