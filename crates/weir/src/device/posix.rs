//! A disk that is a regular file or a block device of the host.
//!
//! Blocking calls run on the caller's thread, and so do batches where the host has `io_uring` (`posix/uring.rs`).
//! [`Device::submit`] hands the request to a small pool of
//! threads (`posix/pool.rs`), which take the most urgent class first and merge nothing.
//!
//! * I/O bypasses the host's cache (`O_DIRECT`) unless the host's file system refuses that (tmpfs).
//! * A flush is `fdatasync`: the size never changes after creation.
//! * The lock is `flock`: it belongs to the open file, so it ends with the process however that
//!   ends, and a second open in the same process is refused too. A child that was forked and goes on as
//!   the same program has the open file as well: so the lock is given back when the device is dropped, and only where
//!   a process dies without that such a child keeps it (and the claim on a block device always). What a process that died had on its way
//!   through `io_uring` keeps it a moment longer, which an opening waits for (`posix/lock.rs`). Writers exclude everybody,
//!   readers exclude writers. A block device is opened with `O_EXCL` as well, which the kernel refuses
//!   while the device is mounted or part of another. Of a loop device the file behind it is locked as well: that may be opened itself.
//! * A forked child can do nothing here but let go: see `sync/process.rs`.
//! * `fua` is not offered: Linux serves a synchronous write to a file or block device with a full
//!   flush, so asking for it never beats a write and a flush. It is honoured that way if asked for.
//! * Discarding ranges of an image file is off until asked for: each punched hole makes later
//!   writes allocate on the host, and every flush then pays for the host's journal.
//!
//! This module uses `unsafe` for four system calls that the standard library lacks: `preadv`,
//! `pwritev`, `fallocate` and the `BLKDISCARD` control.

mod lock;
mod pool;
mod segments;
mod uring;

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::ops::{ControlFlow, Range};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use super::buffer::AlignedBuf;
use super::request::{Underway, check_range, check_transfer};
use super::stats::DeviceStats;
use super::{Buffers, Device, DeviceError, DeviceInfo, DeviceResult, IoClass, OnDone, Request};
use crate::error::FORKED;
use crate::format::BLOCK_BYTES_U64;
use crate::sync::{Arc, NumberedProcess};
use crate::{Error, Result};
use pool::Pool;
use segments::Segments;
use uring::Rings;

/// Most segments of one vectored call (Linux's `IOV_MAX`).
const MAX_SEGMENTS: usize = 1024;
/// Unit of [`PosixDevice::prewrite`].
const PREWRITE_CHUNK_BYTES: u64 = 1 << 20;
/// Threads for submitted requests, unless [`PosixDevice::with_threads`] says otherwise.
const DEFAULT_THREADS: usize = 8;

/// What the opener wants to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpenMode {
    /// Only read; shares the volume with other readers.
    ReadOnly,
    /// Read and write; alone.
    ReadWrite,
}

/// See the module's head.
#[derive(Debug)]
pub struct PosixDevice {
    disk: Arc<Disk>,
    pool: Pool,
    rings: Rings,
}

/// The open file and what is known of it; shared with the pool's threads.
#[derive(Debug)]
struct Disk {
    file: File,
    /// The file behind a loop device.
    behind: Option<File>,
    is_block_device: bool,
    direct: bool,
    info: DeviceInfo,
    stats: DeviceStats,
    /// Who has opened and locked it.
    process: NumberedProcess,
}

impl Drop for Disk {
    fn drop(&mut self) {
        // A forked child that drops its copy does not take the lock from its parent.
        if self.process.is_this() {
            // Closing gives it back as well, if nobody else has the open file.
            let _ = self.file.unlock();
            let _ = self.behind.as_ref().map(File::unlock);
        }
    }
}

impl PosixDevice {
    /// Opens and locks an existing image file or block device.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::AccessDenied`]; [`Error::InUse`], naming the process that
    /// has it open if the host tells; [`Error::NotAVolume`] if it is neither file nor block device;
    /// [`Error::ReadOnly`] for a writing open of something write-protected; [`Error::NotSupported`] for a device whose sectors are larger
    /// than a block;
    /// [`Error::NotDirectory`], [`Error::TooManySymlinks`], [`Error::NameTooLong`] for a path that
    /// leads nowhere; [`Error::Io`].
    pub fn open(path: &Path, mode: OpenMode) -> Result<Self> {
        let metadata = std::fs::metadata(path).map_err(|error| open_error(path, &error))?;
        let is_block_device = metadata.file_type().is_block_device();
        if !is_block_device && !metadata.is_file() {
            return Err(Error::NotAVolume(format!(
                "{}: neither a regular file nor a block device: give the path of a volume",
                path.display()
            )));
        }
        // Its open would succeed, and each of its writes fail.
        if is_block_device && mode == OpenMode::ReadWrite && is_write_protected(metadata.rdev()) {
            return Err(Error::ReadOnly);
        }
        if is_block_device && has_large_sectors(metadata.rdev()) {
            return Err(Error::NotSupported(
                "a device with sectors of more than 4096 bytes: give one whose sectors are smaller",
            ));
        }
        if !is_block_device && mode == OpenMode::ReadWrite {
            check_size_limit(metadata.len())?;
        }
        let mut options = OpenOptions::new();
        options.read(true).write(mode == OpenMode::ReadWrite);
        let claim = is_block_device && mode == OpenMode::ReadWrite;
        let exclusive = if claim { libc::O_EXCL } else { 0 };
        let open =
            || open_direct(&options, exclusive, path).map_err(|error| open_error(path, &error));
        let (file, direct) = lock::when_free(open, || lock::claim_patience(&metadata))?;
        Self::finish(file, direct, is_block_device, mode)
    }

    /// Creates an image file of `size_bytes`, a multiple of 4096; it reads as zeros. The file's
    /// existence is durable on return; its blocks are holes (see [`PosixDevice::prewrite`]).
    ///
    /// # Errors
    /// [`Error::Exists`] if something is there already; [`Error::HostFull`]; as [`PosixDevice::open`].
    pub fn create(path: &Path, size_bytes: u64) -> Result<Self> {
        if size_bytes == 0 || !size_bytes.is_multiple_of(BLOCK_BYTES_U64) {
            return Err(Error::Invalid("the size of an image must be a multiple of 4096 bytes"));
        }
        check_size_limit(size_bytes)?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let (file, direct) =
            open_direct(&options, 0, path).map_err(|error| open_error(path, &error))?;
        let made = Self::finish_create(file, direct, path, size_bytes);
        if made.is_err() {
            // It is ours and useless; the first error is the one to report.
            let _ = std::fs::remove_file(path);
        }
        made
    }

    fn finish_create(file: File, direct: bool, path: &Path, size_bytes: u64) -> Result<Self> {
        set_size(&file, size_bytes).map_err(|error| size_error(path, &error))?;
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        File::open(parent.unwrap_or(Path::new(".")))?.sync_all()?;
        Self::finish(file, direct, false, OpenMode::ReadWrite)
    }

    /// The image at `path`, which this is, with another size, locked all the while: nobody else meets it in between.
    ///
    /// # Errors
    /// [`Error::HostFull`]; [`Error::Invalid`] for a size that the host does not offer, or when somebody uses the device already;
    /// [`Error::Io`].
    pub fn resized(mut self, path: &Path, size_bytes: u64) -> Result<Self> {
        let disk = Arc::get_mut(&mut self.disk);
        let disk = disk.ok_or(Error::Invalid("the size of a device that is in use is fixed"))?;
        check_size_limit(size_bytes)?;
        set_size(&disk.file, size_bytes).map_err(|error| size_error(path, &error))?;
        disk.info.size_bytes = size_bytes;
        Ok(self)
    }

    /// Locks the open file and learns its size.
    fn finish(file: File, direct: bool, is_block_device: bool, mode: OpenMode) -> Result<Self> {
        lock::lock(&file, mode)?;
        let metadata = file.metadata()?;
        let size_bytes =
            if is_block_device { (&file).seek(SeekFrom::End(0))? } else { metadata.len() };
        let info = DeviceInfo {
            size_bytes: size_bytes / BLOCK_BYTES_U64 * BLOCK_BYTES_U64,
            fua: false,
            volatile_cache: !is_block_device || has_volatile_cache(metadata.rdev()),
            discard: is_block_device && can_discard(metadata.rdev()),
        };
        let stats = DeviceStats::default();
        let process = NumberedProcess::this();
        let behind = if is_block_device { lock::behind(&metadata, mode)? } else { None };
        let disk = Arc::new(Disk { file, behind, is_block_device, direct, info, stats, process });
        Ok(Self { disk, pool: Pool::new(DEFAULT_THREADS), rings: Rings::new(true) })
    }

    /// Turns discarding on or off; it is on for block devices that can, off for files.
    #[must_use]
    pub fn with_discard(mut self, discard: bool) -> Self {
        // Only we hold the disk: the pool starts threads at the first request.
        if let Some(disk) = Arc::get_mut(&mut self.disk) {
            disk.info.discard = discard;
        }
        self
    }

    /// Sets how many threads serve submitted requests (at least 1). For a device not used yet.
    #[must_use]
    pub fn with_threads(mut self, threads: usize) -> Self {
        self.pool = Pool::new(threads.max(1));
        self
    }

    /// Turns `io_uring` for batches off, or on again: it is on, and used where the host allows it. For a device not
    /// used yet.
    #[must_use]
    pub fn with_io_uring(mut self, io_uring: bool) -> Self {
        self.rings = Rings::new(io_uring);
        self
    }

    /// Whether batches go through `io_uring`, as far as is known: the first one finds out.
    pub fn uses_io_uring(&self) -> bool {
        self.rings.available()
    }

    /// Whether the host's page cache is bypassed.
    pub fn is_direct(&self) -> bool {
        self.disk.direct
    }

    /// Whether this is a block device, not an image file.
    pub fn is_block_device(&self) -> bool {
        self.disk.is_block_device
    }

    /// What was asked so far.
    pub fn stats(&self) -> &DeviceStats {
        &self.disk.stats
    }

    /// Writes zeros over a range of bytes (multiples of 4096) and flushes, so that later flushes
    /// never pay the host for allocating it. `progress` hears how many bytes are done, and may
    /// stop the work; what is done by then stays done.
    ///
    /// # Errors
    /// The range is not made of whole blocks of the device; or the device's.
    pub fn prewrite(
        &self,
        range_bytes: Range<u64>,
        progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> DeviceResult<()> {
        let length_bytes = range_bytes.end.saturating_sub(range_bytes.start);
        let size_bytes = self.disk.info.size_bytes;
        check_range("write", size_bytes, range_bytes.start, length_bytes)?;
        let zeros = AlignedBuf::zeroed(length_bytes.min(PREWRITE_CHUNK_BYTES) as usize);
        let mut done_bytes = 0;
        while done_bytes < length_bytes {
            let piece = (length_bytes - done_bytes).min(PREWRITE_CHUNK_BYTES) as usize;
            self.disk.write(range_bytes.start + done_bytes, &[&zeros[..piece]])?;
            done_bytes += piece as u64;
            if progress(done_bytes).is_break() {
                break;
            }
        }
        self.disk.flush()
    }
}

impl Device for PosixDevice {
    fn info(&self) -> DeviceInfo {
        self.disk.info
    }

    fn read(
        &self,
        offset_bytes: u64,
        buffers: &mut [&mut [u8]],
        _class: IoClass,
    ) -> DeviceResult<()> {
        self.disk.read(offset_bytes, buffers)
    }

    fn write(
        &self,
        offset_bytes: u64,
        buffers: &[&[u8]],
        _class: IoClass,
        fua: bool,
    ) -> DeviceResult<()> {
        self.disk.write(offset_bytes, buffers)?;
        if fua { self.disk.flush() } else { Ok(()) }
    }

    fn flush(&self) -> DeviceResult<()> {
        self.disk.flush()
    }

    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> DeviceResult<()> {
        self.disk.discard(offset_bytes, length_bytes)
    }

    fn submit(&self, request: Request, on_done: OnDone) {
        self.pool.submit(&self.disk, request, on_done);
    }

    fn run_all(&self, mut requests: Vec<Request>) -> Vec<(DeviceResult<()>, Buffers)> {
        // A ring that was forked along has one end, which the parent reads as well.
        if !self.disk.process.is_this() {
            return super::request::submit_all(self, requests);
        }
        if requests.len() == 1
            && let Some(request) = requests.pop()
        {
            return vec![super::request::perform(&*self.disk, request)];
        }
        match self.rings.run(&self.disk, requests) {
            Ok(outcomes) => outcomes,
            Err(requests) => super::request::submit_all(self, requests),
        }
    }

    fn begin_all(self: Arc<Self>, requests: Vec<Request>) -> Underway {
        let begun = if self.disk.process.is_this() {
            self.rings.begin(&self.disk, requests)
        } else {
            Err(requests)
        };
        match begun {
            Ok(batch) => Underway::new(move || self.rings.end(batch)),
            Err(requests) => {
                let batch = super::request::submit_batch(&*self, requests);
                Underway::new(|| batch.wait())
            }
        }
    }
}

/// The pool's threads perform requests on the disk itself, by blocking calls.
impl Device for Disk {
    fn info(&self) -> DeviceInfo {
        self.info
    }
    fn read(&self, offset: u64, buffers: &mut [&mut [u8]], _class: IoClass) -> DeviceResult<()> {
        Self::read(self, offset, buffers)
    }
    fn write(
        &self,
        offset: u64,
        buffers: &[&[u8]],
        _class: IoClass,
        fua: bool,
    ) -> DeviceResult<()> {
        Self::write(self, offset, buffers)?;
        if fua { Self::flush(self) } else { Ok(()) }
    }
    fn flush(&self) -> DeviceResult<()> {
        Self::flush(self)
    }
    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> DeviceResult<()> {
        Self::discard(self, offset_bytes, length_bytes)
    }
    fn submit(&self, request: Request, on_done: OnDone) {
        let (result, buffers) = super::request::perform(self, request);
        on_done(result, buffers);
    }
}

impl Disk {
    /// Refuses what a child asks for that was forked: it has no thread to do anything, and its parent's notion of what is where.
    fn check_process(
        &self,
        operation: &'static str,
        offset_bytes: u64,
        length_bytes: u64,
    ) -> DeviceResult<()> {
        if self.process.is_this() {
            return Ok(());
        }
        let error = io::Error::other(FORKED);
        Err(device_error(operation, offset_bytes, length_bytes, &error))
    }

    fn read(&self, offset_bytes: u64, buffers: &mut [&mut [u8]]) -> DeviceResult<()> {
        let slices = buffers.iter().map(|buffer| &**buffer);
        let checked = check_transfer("read", self.info.size_bytes, offset_bytes, slices);
        let length_bytes = *checked.as_ref().unwrap_or(&0);
        let checked = checked.and_then(|_| self.check_process("read", offset_bytes, length_bytes));
        let result = checked.and_then(|()| {
            read_all(&self.file, offset_bytes, buffers)
                .map_err(|error| device_error("read", offset_bytes, length_bytes, &error))
        });
        self.stats.count_read(length_bytes, &result);
        result
    }

    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> DeviceResult<()> {
        let slices = buffers.iter().copied();
        let checked = check_transfer("write", self.info.size_bytes, offset_bytes, slices);
        let length_bytes = *checked.as_ref().unwrap_or(&0);
        let checked = checked.and_then(|_| self.check_process("write", offset_bytes, length_bytes));
        let result = checked.and_then(|()| {
            write_all(&self.file, offset_bytes, buffers)
                .map_err(|error| device_error("write", offset_bytes, length_bytes, &error))
        });
        self.stats.count_write(length_bytes, &result);
        result
    }

    fn flush(&self) -> DeviceResult<()> {
        let result = self.check_process("flush", 0, 0).and_then(|()| {
            self.file.sync_data().map_err(|error| device_error("flush", 0, 0, &error))
        });
        self.stats.count_flush(&result);
        result
    }

    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> DeviceResult<()> {
        check_range("discard", self.info.size_bytes, offset_bytes, length_bytes)?;
        self.check_process("discard", offset_bytes, length_bytes)?;
        if !self.info.discard || length_bytes == 0 {
            return Ok(());
        }
        let result = if self.is_block_device {
            discard_device(&self.file, offset_bytes, length_bytes)
        } else {
            punch_hole(&self.file, offset_bytes, length_bytes)
        };
        // A discard is a hint: a host that cannot is not an error.
        if matches!(&result, Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP)) {
            return Ok(());
        }
        let result =
            result.map_err(|error| device_error("discard", offset_bytes, length_bytes, &error));
        self.stats.count_discard(&result);
        result
    }
}

/// Opens with `O_DIRECT`, or without where the file system refuses it; true = direct.
fn open_direct(options: &OpenOptions, flags: i32, path: &Path) -> io::Result<(File, bool)> {
    match options.clone().custom_flags(flags | libc::O_DIRECT).open(path) {
        Ok(file) => Ok((file, true)),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            // A refused creation has made the file on some hosts: take what is there, since the
            // exclusive creation was decided before the flags were looked at.
            let mut again = options.clone();
            if path.metadata().is_ok_and(|metadata| metadata.len() == 0 && metadata.is_file()) {
                again.create_new(false);
            }
            Ok((again.custom_flags(flags).open(path)?, false))
        }
        Err(error) => Err(error),
    }
}

/// Refuses a file of the host behind whose part that this process may write. A write there would end the process (SIGXFSZ) rather than fail,
/// and a volume is written all over.
fn check_size_limit(size_bytes: u64) -> Result<()> {
    use rustix::process::{Resource, getrlimit};
    match getrlimit(Resource::Fsize).current {
        Some(limit_bytes) if limit_bytes < size_bytes => Err(Error::Invalid(
            "the volume is larger than the files that this process may write: raise that limit \
             (ulimit -f)",
        )),
        _ => Ok(()),
    }
}

fn set_size(file: &File, size_bytes: u64) -> io::Result<()> {
    file.set_len(size_bytes)?;
    file.sync_all()
}

fn size_error(path: &Path, error: &io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::EFBIG) => Error::Invalid("the image is larger than a file of the host can be"),
        Some(libc::ENOSPC | libc::EDQUOT) => Error::HostFull(error.to_string()),
        _ => open_error(path, error),
    }
}

/// The error of an open, create or resize.
fn open_error(path: &Path, error: &io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::ENOENT) => Error::NotFound,
        Some(libc::EEXIST) => Error::Exists,
        Some(libc::EACCES | libc::EPERM) => Error::AccessDenied,
        Some(libc::EROFS) => Error::ReadOnly,
        Some(libc::EBUSY) => Error::InUse(lock::describe_claim(path)),
        Some(libc::EISDIR) => Error::IsDirectory,
        Some(libc::ENOTDIR) => Error::NotDirectory,
        Some(libc::ELOOP) => Error::TooManySymlinks,
        Some(libc::ENAMETOOLONG) => Error::NameTooLong,
        Some(libc::EMFILE | libc::ENFILE) => Error::NoDescriptor(error.to_string()),
        Some(libc::ENOSPC | libc::EDQUOT) => Error::HostFull(error.to_string()),
        _ => Error::Io(format!("{}: {error}", path.display())),
    }
}

fn device_error(
    operation: &'static str,
    offset_bytes: u64,
    length_bytes: u64,
    error: &io::Error,
) -> DeviceError {
    DeviceError {
        operation,
        offset_bytes,
        length_bytes,
        reason: error.to_string(),
        no_space: matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT)),
    }
}

/// An attribute of a block device's queue, from sysfs; of the whole disk if it is a partition.
fn queue_attribute(device: u64, attribute: &str) -> Option<String> {
    let base = format!("/sys/dev/block/{}:{}", libc::major(device), libc::minor(device));
    [format!("{base}/queue/{attribute}"), format!("{base}/../queue/{attribute}")]
        .iter()
        .find_map(|path| std::fs::read_to_string(path).ok())
}

/// Whether the host takes no writes for a block device.
fn is_write_protected(device: u64) -> bool {
    let path = format!("/sys/dev/block/{}:{}/ro", libc::major(device), libc::minor(device));
    std::fs::read_to_string(path).is_ok_and(|text| text.trim() == "1")
}

/// Whether the host refuses requests of one block: what is written with others cannot be proof against a crash by itself.
fn has_large_sectors(device: u64) -> bool {
    let sector_bytes = queue_attribute(device, "logical_block_size");
    let sector_bytes = sector_bytes.and_then(|text| text.trim().parse::<u64>().ok());
    sector_bytes.is_some_and(|bytes| bytes > BLOCK_BYTES_U64)
}

fn has_volatile_cache(device: u64) -> bool {
    queue_attribute(device, "write_cache").is_none_or(|text| text.trim() != "write through")
}

fn can_discard(device: u64) -> bool {
    queue_attribute(device, "discard_max_bytes").is_some_and(|text| text.trim() != "0")
}

/// Fills all of `buffers`, over short counts and interruptions.
fn read_all(file: &File, offset_bytes: u64, buffers: &mut [&mut [u8]]) -> io::Result<()> {
    let left = Segments::from_kernel(buffers.iter_mut().map(|buffer| &mut **buffer));
    transfer_all(offset_bytes, left, io::ErrorKind::UnexpectedEof, |segments, count, offset| {
        // SAFETY: the segments describe `buffers`, which are borrowed exclusively for the whole call.
        unsafe { libc::preadv64(file.as_raw_fd(), segments, count, offset) }
    })
}

/// Writes all of `buffers`, over short counts and interruptions.
fn write_all(file: &File, offset_bytes: u64, buffers: &[&[u8]]) -> io::Result<()> {
    let left = Segments::to_kernel(buffers.iter().copied());
    transfer_all(offset_bytes, left, io::ErrorKind::WriteZero, |segments, count, offset| {
        // SAFETY: the segments describe `buffers`, which are borrowed for the whole call.
        unsafe { libc::pwritev64(file.as_raw_fd(), segments, count, offset) }
    })
}

/// Repeats `call` until nothing is `left`; `at_end` is the error if it transfers nothing.
fn transfer_all(
    mut offset_bytes: u64,
    mut left: Segments,
    at_end: io::ErrorKind,
    call: impl Fn(*const libc::iovec, i32, i64) -> isize,
) -> io::Result<()> {
    while !left.is_empty() {
        let (segments, count) = left.as_raw(MAX_SEGMENTS);
        let offset = system_offset(offset_bytes)?;
        let count = retry_interrupted(|| checked(call(segments, count as i32, offset)))?;
        if count == 0 {
            return Err(at_end.into());
        }
        offset_bytes += count as u64;
        left.advance(count);
    }
    Ok(())
}

fn retry_interrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// An offset as the system wants it; the range checks have kept it below 2^63.
fn system_offset(offset_bytes: u64) -> io::Result<i64> {
    i64::try_from(offset_bytes).map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW))
}

/// The result of a system call that answers -1 for an error.
fn checked(answer: isize) -> io::Result<usize> {
    usize::try_from(answer).map_err(|_| io::Error::last_os_error())
}

fn punch_hole(file: &File, offset_bytes: u64, length_bytes: u64) -> io::Result<()> {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let (offset, length) = (system_offset(offset_bytes)?, system_offset(length_bytes)?);
    // SAFETY: plain integers, and a descriptor that `file` keeps open.
    let call =
        || checked(unsafe { libc::fallocate64(file.as_raw_fd(), mode, offset, length) } as isize);
    retry_interrupted(call).map(|_| ())
}

/// `_IO(0x12, 119)` of `linux/fs.h`; its argument is two 64-bit integers, start and length.
const BLKDISCARD: u64 = 0x1277;

fn discard_device(file: &File, offset_bytes: u64, length_bytes: u64) -> io::Result<()> {
    let range = [offset_bytes, length_bytes];
    // SAFETY: the control reads exactly two u64 at the pointer, which live across the call. The
    // cast of the number is because C libraries disagree on its type.
    let call = || {
        checked(unsafe { libc::ioctl(file.as_raw_fd(), BLKDISCARD as _, range.as_ptr()) } as isize)
    };
    retry_interrupted(call).map(|_| ())
}

#[cfg(test)]
mod tests;
