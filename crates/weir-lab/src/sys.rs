//! System calls that no safe crate covers: `sync_file_range`, `preadv2`/`pwritev2` with flags,
//! Linux native AIO, `io_uring` submission, FIEMAP, a minimal system call for the probe, `madvise` and `malloc_trim`.
//!
//! This is the one module of the lab with `unsafe`. Each block states why it is sound; nothing
//! here keeps a pointer beyond the call, except [`Ring`] and [`AioContext`], which own the memory
//! the kernel writes to until the completion was reaped (see their heads).

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;

fn check(ret: libc::c_long) -> io::Result<usize> {
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(ret as usize) }
}

/// `sync_file_range(SYNC_FILE_RANGE_WRITE)`: starts writeback of dirty pages, makes nothing durable.
pub fn sync_file_range_write(file: &File, offset: u64, len: u64) -> io::Result<()> {
    // SAFETY: takes integers and an open descriptor, touches no memory of ours.
    let ret = unsafe {
        libc::sync_file_range(
            file.as_raw_fd(),
            offset as i64,
            len as i64,
            libc::SYNC_FILE_RANGE_WRITE,
        )
    };
    check(ret.into()).map(drop)
}

/// Read only what the page cache has: `preadv2(RWF_NOWAIT)`. `None` when it would have to wait.
pub fn pread_nowait(file: &File, buf: &mut [u8], offset: u64) -> io::Result<Option<usize>> {
    match preadv2(file, buf, offset, libc::RWF_NOWAIT) {
        Ok(n) => Ok(Some(n)),
        Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => Ok(None),
        Err(e) => Err(e),
    }
}

/// `preadv2` with the given flags.
pub fn preadv2(file: &File, buf: &mut [u8], offset: u64, flags: i32) -> io::Result<usize> {
    let iov = libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() };
    // SAFETY: `iov` describes `buf`, exclusively borrowed for the duration of the call.
    check(unsafe { libc::preadv2(file.as_raw_fd(), &raw const iov, 1, offset as i64, flags) } as _)
}

/// `RWF_DONTCACHE` (Linux 6.14): uncached buffered I/O, writeback starts at once.
pub const RWF_DONTCACHE: i32 = 0x80;

/// `pwritev2` with the given flags.
pub fn pwritev2(file: &File, buf: &[u8], offset: u64, flags: i32) -> io::Result<usize> {
    let iov = libc::iovec { iov_base: buf.as_ptr().cast_mut().cast(), iov_len: buf.len() };
    // SAFETY: `iov` describes `buf`, borrowed for the duration of the call; the kernel only reads.
    check(unsafe { libc::pwritev2(file.as_raw_fd(), &raw const iov, 1, offset as i64, flags) } as _)
}

/// The cheapest system call there is, for the probe.
pub fn null_syscall() -> i64 {
    // SAFETY: getppid takes nothing and cannot fail.
    unsafe { libc::syscall(libc::SYS_getppid) }
}

/// Asks for huge pages where `memory`, which has not been touched yet, holds whole ones. A kernel that has none is as good.
pub fn prefer_huge_pages(memory: &mut [u8]) {
    const HUGE_BYTES: usize = 2 << 20;
    let head = memory.as_ptr().align_offset(HUGE_BYTES);
    let Some(aligned) = memory.get_mut(head..) else { return };
    // SAFETY: the range is ours, and the advice changes nothing that is read from it.
    unsafe { libc::madvise(aligned.as_mut_ptr().cast(), aligned.len(), libc::MADV_HUGEPAGE) };
}

/// Gives the heap's free memory back to the system, where the C library can: what the process grows by afterwards is then
/// what it has come to hold, and not what earlier cases left free.
pub fn give_back_free_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes an integer, and locks the heap itself.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// One extent of a file as FIEMAP reports it (bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileExtent {
    /// Offset in the file.
    pub logical_bytes: u64,
    /// Offset on the device.
    pub physical_bytes: u64,
    /// Length.
    pub length_bytes: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct FiemapExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

const FIEMAP_BATCH: usize = 256;
const FS_IOC_FIEMAP: libc::c_ulong = 0xC020_660B;
const FIEMAP_FLAG_SYNC: u32 = 1;
const FIEMAP_EXTENT_LAST: u32 = 1;

#[repr(C)]
struct Fiemap {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extents: [FiemapExtent; FIEMAP_BATCH],
}

/// The extents of a file, after its dirty pages were allocated.
pub fn file_extents(file: &File) -> io::Result<Vec<FileExtent>> {
    let mut found = Vec::new();
    let mut start = 0;
    loop {
        let mut map = Fiemap {
            start,
            length: u64::MAX - start,
            flags: FIEMAP_FLAG_SYNC,
            mapped_extents: 0,
            extent_count: FIEMAP_BATCH as u32,
            reserved: 0,
            extents: [FiemapExtent::default(); FIEMAP_BATCH],
        };
        // SAFETY: the kernel writes at most `extent_count` entries into `extents`, all inside `map`.
        check(unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FIEMAP, &raw mut map) }.into())?;
        let mapped = (map.mapped_extents as usize).min(FIEMAP_BATCH);
        for e in &map.extents[..mapped] {
            found.push(FileExtent {
                logical_bytes: e.logical,
                physical_bytes: e.physical,
                length_bytes: e.length,
            });
            start = e.logical + e.length;
            if e.flags & FIEMAP_EXTENT_LAST != 0 {
                return Ok(found);
            }
        }
        if mapped == 0 {
            return Ok(found);
        }
    }
}

/// A buffer aligned for `O_DIRECT`.
pub struct AlignedBuf {
    storage: Vec<u8>,
    start: usize,
    len: usize,
}

impl AlignedBuf {
    /// A buffer of `len` bytes at an address that is a multiple of 4096, filled with `fill`.
    pub fn new(len: usize, fill: u8) -> Self {
        let storage = vec![fill; len + 4096];
        let start = storage.as_ptr().align_offset(4096);
        AlignedBuf { storage, start, len }
    }
}

impl std::ops::Deref for AlignedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.storage[self.start..self.start + self.len]
    }
}

impl std::ops::DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.storage[self.start..self.start + self.len]
    }
}

/// A finished request of a [`Ring`] or an [`AioContext`].
pub struct Done {
    /// The tag given at submission.
    pub tag: u64,
    /// Bytes, or the error.
    pub result: io::Result<usize>,
    /// The buffer of a read.
    pub buf: Option<AlignedBuf>,
}

fn done(tag: u64, res: i64, buf: Option<AlignedBuf>) -> Done {
    let result =
        if res < 0 { Err(io::Error::from_raw_os_error(-res as i32)) } else { Ok(res as usize) };
    Done { tag, result, buf }
}

/// An `io_uring`. Owns every buffer from submission until its completion was reaped, and waits for
/// all of them when dropped, so the kernel never writes to freed memory. Descriptors must stay
/// open until the completion; the kernel takes its own reference at submission, so a closed one
/// fails or names another file but never touches our memory.
pub struct Ring {
    uring: io_uring::IoUring,
    bufs: HashMap<u64, AlignedBuf>,
    in_flight: usize,
}

impl Ring {
    /// A ring of `depth` entries.
    pub fn new(depth: usize) -> io::Result<Self> {
        let uring = io_uring::IoUring::new((depth.max(1) as u32).next_power_of_two())?;
        Ok(Ring { uring, bufs: HashMap::new(), in_flight: 0 })
    }

    /// Raises the number of kernel workers that may run file system calls at once.
    pub fn set_workers(&self, bounded: u32, unbounded: u32) -> io::Result<()> {
        self.uring.submitter().register_iowq_max_workers(&mut [bounded, unbounded])
    }

    fn push(&mut self, entry: &io_uring::squeue::Entry) -> io::Result<()> {
        // SAFETY: the only pointer an entry can carry is a read buffer, which `bufs` owns until
        // the completion was reaped; `Drop` reaps what is left.
        unsafe { self.uring.submission().push(entry) }
            .map_err(|_| io::Error::other("io_uring submission queue full"))?;
        // From here on the entry is in the queue, and goes to the kernel with the next call if this one is refused.
        self.in_flight += 1;
        match self.uring.submit() {
            Err(e)
                if !matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY | libc::EINTR)) =>
            {
                Err(e)
            }
            _ => Ok(()),
        }
    }

    /// Submits an fsync of the whole file, or of `range` (offset, length).
    pub fn fsync(
        &mut self,
        fd: RawFd,
        data_only: bool,
        range: Option<(u64, u32)>,
        tag: u64,
    ) -> io::Result<()> {
        use io_uring::{opcode, types};
        let flags =
            if data_only { types::FsyncFlags::DATASYNC } else { types::FsyncFlags::empty() };
        let (offset, len) = range.unwrap_or((0, 0));
        let entry = opcode::Fsync::new(types::Fd(fd)).flags(flags).offset(offset).len(len);
        self.push(&entry.build().user_data(tag))
    }

    /// Submits a read into a buffer that the ring owns until it is handed back with the completion.
    pub fn read(
        &mut self,
        fd: RawFd,
        mut buf: AlignedBuf,
        offset: u64,
        tag: u64,
    ) -> io::Result<()> {
        use io_uring::{opcode, types};
        let entry = opcode::Read::new(types::Fd(fd), buf.as_mut_ptr(), buf.len() as u32)
            .offset(offset)
            .build()
            .user_data(tag);
        // It stays here also when the call fails: an entry that is in the queue may be carried out later.
        self.bufs.insert(tag, buf);
        self.push(&entry)
    }

    /// The next completion, waiting for it when `wait`; `None` when nothing is in flight or done.
    pub fn reap(&mut self, wait: bool) -> io::Result<Option<Done>> {
        loop {
            if let Some(cqe) = self.uring.completion().next() {
                self.in_flight -= 1;
                let tag = cqe.user_data();
                return Ok(Some(done(tag, cqe.result().into(), self.bufs.remove(&tag))));
            }
            if !wait || self.in_flight == 0 {
                return Ok(None);
            }
            match self.uring.submit_and_wait(1) {
                Err(e) if e.kind() != io::ErrorKind::Interrupted => return Err(e),
                _ => {}
            }
        }
    }

    /// Requests submitted and not reaped.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        while self.in_flight > 0 {
            if self.reap(true).is_err() {
                // The kernel may still own these buffers: leaking them is the sound choice.
                std::mem::forget(std::mem::take(&mut self.bufs));
                return;
            }
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    reqprio: i16,
    fd: u32,
    buf: u64,
    nbytes: u64,
    offset: i64,
    reserved2: u64,
    flags: u32,
    resfd: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct IoEvent {
    data: u64,
    obj: u64,
    res: i64,
    res2: i64,
}

const IOCB_CMD_FSYNC: u16 = 2;
const IOCB_CMD_FDSYNC: u16 = 3;

/// A Linux native AIO context, used for fsync only: no request carries a buffer, and the kernel
/// copies the `iocb` during `io_submit`, so it keeps no pointer of ours.
pub struct AioContext {
    id: libc::c_ulong,
    in_flight: usize,
}

impl AioContext {
    /// A context for `depth` requests in flight.
    pub fn new(depth: usize) -> io::Result<Self> {
        let mut id: libc::c_ulong = 0;
        // SAFETY: the kernel writes one word to `id`.
        check(unsafe { libc::syscall(libc::SYS_io_setup, depth as libc::c_long, &raw mut id) })?;
        Ok(AioContext { id, in_flight: 0 })
    }

    /// Submits an fsync.
    pub fn fsync(&mut self, fd: RawFd, data_only: bool, tag: u64) -> io::Result<()> {
        let mut iocb = Iocb {
            data: tag,
            opcode: if data_only { IOCB_CMD_FDSYNC } else { IOCB_CMD_FSYNC },
            fd: fd as u32,
            ..Iocb::default()
        };
        let mut list = [&raw mut iocb];
        // SAFETY: `list` holds one valid iocb that outlives the call; the kernel copies it.
        check(unsafe { libc::syscall(libc::SYS_io_submit, self.id, 1_i64, list.as_mut_ptr()) })?;
        self.in_flight += 1;
        Ok(())
    }

    /// As [`Ring::reap`].
    pub fn reap(&mut self, wait: bool) -> io::Result<Option<Done>> {
        if self.in_flight == 0 {
            return Ok(None);
        }
        let mut event = IoEvent::default();
        loop {
            // SAFETY: room for the one event that is asked for; no timeout pointer.
            let ret = unsafe {
                libc::syscall(
                    libc::SYS_io_getevents,
                    self.id,
                    libc::c_long::from(wait),
                    1_i64,
                    &raw mut event,
                    std::ptr::null_mut::<libc::timespec>(),
                )
            };
            match check(ret) {
                Ok(0) if !wait => return Ok(None),
                Ok(0) => {}
                Ok(_) => {
                    self.in_flight -= 1;
                    return Ok(Some(done(event.data, event.res, None)));
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Requests submitted and not reaped.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }
}

impl Drop for AioContext {
    fn drop(&mut self) {
        // SAFETY: destroys the context we created; the kernel waits for what is in flight.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.id) };
    }
}

/// Bytes and inodes of a file system.
#[derive(Clone, Copy, Debug)]
pub struct Space {
    /// Size of the file system.
    pub total_bytes: u64,
    /// What an ordinary user may still allocate.
    pub available_bytes: u64,
}

/// `statvfs` of the file system that `path` is on.
pub fn space(path: &Path) -> io::Result<Space> {
    let s = rustix::fs::statvfs(path)?;
    Ok(Space { total_bytes: s.f_blocks * s.f_frsize, available_bytes: s.f_bavail * s.f_frsize })
}

/// `syncfs` of the file system that `path` is on.
pub fn syncfs(path: &Path) -> io::Result<()> {
    let dir = File::open(path)?;
    Ok(rustix::fs::syncfs(&dir)?)
}

/// The shutdown call, under the same number in XFS, ext4 and others.
fn shut_down_with(file: &File, flags: u32) -> io::Result<()> {
    const FS_IOC_SHUTDOWN: libc::c_ulong = 0x8004_587D;
    // SAFETY: the kernel reads one u32 from `flags`, which outlives the call.
    check(unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_SHUTDOWN, &raw const flags) }.into())
        .map(drop)
}

/// Stops the file system that `file` is on without another write to its log: what a crash leaves.
pub fn shut_down(file: &File) -> io::Result<()> {
    const NO_LOG_FLUSH: u32 = 2;
    shut_down_with(file, NO_LOG_FLUSH)
}

/// Whether the file system that `file` is on has the call: one that has it refuses flags that do not exist.
pub fn offers_shut_down(file: &File) -> bool {
    const NO_SUCH_FLAGS: u32 = 0xFFFF;
    matches!(shut_down_with(file, NO_SUCH_FLAGS), Err(e) if e.raw_os_error() == Some(libc::EINVAL))
}

/// Whether this process may mount.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn scratch(name: &str) -> File {
        let path = std::env::temp_dir().join(format!("weir-lab-sys-{}-{name}", std::process::id()));
        let mut f = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)
            .expect("scratch file");
        f.write_all(&[7_u8; 8192]).expect("write");
        std::fs::remove_file(path).expect("unlink");
        f
    }

    #[test]
    fn ring_returns_each_tag_once_with_its_data() {
        let f = scratch("ring");
        let Ok(mut ring) = Ring::new(4) else { return };
        ring.fsync(f.as_raw_fd(), true, Some((0, 4096)), 11).expect("fsync");
        ring.read(f.as_raw_fd(), AlignedBuf::new(4096, 0), 4096, 12).expect("read");
        let mut tags = Vec::new();
        while let Some(d) = ring.reap(true).expect("reap") {
            let n = d.result.expect("completes");
            if d.tag == 12 {
                assert_eq!(n, 4096);
                assert!(d.buf.is_some_and(|b| b.iter().all(|&x| x == 7)));
            }
            tags.push(d.tag);
        }
        tags.sort_unstable();
        assert_eq!(tags, [11, 12]);
        assert_eq!(ring.in_flight(), 0);
    }

    #[test]
    fn aio_fsync_completes_and_reports_errors() {
        let f = scratch("aio");
        let mut aio = AioContext::new(4).expect("io_setup");
        aio.fsync(f.as_raw_fd(), false, 5).expect("submit");
        let d = aio.reap(true).expect("reap").expect("one in flight");
        assert_eq!(d.tag, 5);
        d.result.expect("fsync");
        assert!(aio.fsync(-1, false, 6).is_err(), "a bad descriptor is refused");
        assert!(aio.reap(false).expect("reap").is_none());
    }

    #[test]
    fn aligned_buffer_is_aligned_and_whole() {
        let b = AlignedBuf::new(10_000, 3);
        assert_eq!(b.as_ptr() as usize % 4096, 0);
        assert_eq!(b.len(), 10_000);
        assert!(b.iter().all(|&x| x == 3));
    }
}
