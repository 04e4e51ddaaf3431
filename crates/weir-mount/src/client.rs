//! The other end of [`crate::ioctl`]: what a program calls on a file or directory of a mount. The command line and the tests
//! use this; C programs include `include/weir.h`.
//!
//! `unsafe` here: one call of `ioctl(2)`, with a buffer as large as the number of the command announces, and one
//! of `sync_file_range(2)`.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use crate::batch::{MADE, STEP_BYTES, StepFields, op};
use crate::ioctl::{self, STATS_PAGE_BYTES};

/// How often [`stats`] begins at most.
const MOST_BEGINNINGS: u32 = 100;

/// One command; `buffer` is passed in and out.
fn call(fd: impl AsFd, number: u32, buffer: &mut [u8]) -> io::Result<()> {
    let announced = (number >> 16 & 0x3FFF) as usize;
    assert_eq!(buffer.len(), announced, "the buffer is what the number announces");
    // SAFETY: the kernel reads and writes at most `announced` bytes at the pointer, which are borrowed mutably here.
    let result = unsafe {
        libc::ioctl(fd.as_fd().as_raw_fd(), libc::Ioctl::from(number), buffer.as_mut_ptr())
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn words(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

/// Makes `length` bytes at `offset` durable (0: to the end), or starts to. `flags`: see [`ioctl::SYNC_DATA`].
pub fn sync_range(fd: impl AsFd, offset: u64, length: u64, flags: u32) -> io::Result<()> {
    call(fd, ioctl::SYNC_RANGE, &mut words(&[offset, length, pair(flags)]))
}

/// Makes everything durable. `flags`: see [`ioctl::SYNC_START`], [`ioctl::SYNC_MAPPED`].
pub fn sync_volume(fd: impl AsFd, flags: u32) -> io::Result<()> {
    call(fd, ioctl::SYNC_VOLUME, &mut words(&[pair(flags)]))
}

/// How far a volume and a file are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lsns {
    /// Everything up to here is durable.
    pub durable: u64,
    /// The last operation.
    pub last: u64,
    /// The last operation of this file.
    pub file: u64,
}

fn word(buffer: &[u8], index: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&buffer[index * 8..index * 8 + 8]);
    u64::from_ne_bytes(word)
}

fn half(buffer: &[u8], index: usize) -> u32 {
    let mut half = [0; 4];
    half.copy_from_slice(&buffer[index * 4..index * 4 + 4]);
    u32::from_ne_bytes(half)
}

/// Two 32-bit words as they lie in memory.
fn pair(first: u32) -> u64 {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&first.to_ne_bytes());
    u64::from_ne_bytes(bytes)
}

/// How far the volume and the file of `fd` are.
pub fn lsn(fd: impl AsFd) -> io::Result<Lsns> {
    let mut buffer = [0; 24];
    call(fd, ioctl::LSN, &mut buffer)?;
    Ok(Lsns { durable: word(&buffer, 0), last: word(&buffer, 1), file: word(&buffer, 2) })
}

/// Waits until operation `lsn` is durable. `flags`: see [`ioctl::WAIT_PUSH`].
pub fn wait_lsn(fd: impl AsFd, lsn: u64, timeout_us: u64, flags: u32) -> io::Result<()> {
    call(fd, ioctl::WAIT_LSN, &mut words(&[lsn, timeout_us, pair(flags)]))
}

/// Sends what the kernel has of these bytes and the server does not: pages written through a mapping, or kept by
/// `writeback_cache`. Nothing is durable by that.
pub fn write_back(fd: impl AsFd, offset: u64, length: u64) -> io::Result<()> {
    const ALL: libc::c_uint = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    let too_large = |_| io::Error::from_raw_os_error(libc::EINVAL);
    let (offset, length) = (
        libc::off64_t::try_from(offset).map_err(too_large)?,
        libc::off64_t::try_from(length).map_err(too_large)?,
    );
    // SAFETY: no memory is passed.
    let result = unsafe { libc::sync_file_range(fd.as_fd().as_raw_fd(), offset, length, ALL) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Raises a barrier; answers the LSN at which everything before it is durable. `flags`: see
/// [`ioctl::BARRIER_FILE`], [`ioctl::BARRIER_MAPPED`].
pub fn barrier(fd: impl AsFd, flags: u32) -> io::Result<u64> {
    let mut buffer = words(&[pair(flags), 0]);
    call(fd, ioctl::BARRIER, &mut buffer)?;
    Ok(word(&buffer, 1))
}

/// The statistics of the mount of `fd`, as JSON.
pub fn stats(fd: impl AsFd) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    let mut buffer = vec![0; STATS_PAGE_BYTES + 24];
    let mut begun = 1;
    loop {
        let offset = text.len() as u32;
        buffer[8..12].copy_from_slice(&offset.to_ne_bytes());
        match call(fd.as_fd(), ioctl::STATS, &mut buffer) {
            // So many others have begun to read since that the mount has forgotten this one.
            Err(error)
                if error.kind() == io::ErrorKind::StaleNetworkFileHandle
                    && begun < MOST_BEGINNINGS =>
            {
                begun += 1;
                text.clear();
                buffer.fill(0);
                continue;
            }
            called => called?,
        }
        let total_bytes = half(&buffer, 3) as usize;
        let length = half(&buffer, 4) as usize;
        text.extend_from_slice(buffer.get(24..24 + length).unwrap_or_default());
        if text.len() >= total_bytes || length == 0 {
            return Ok(text);
        }
    }
}

/// Changes that happen together or not at all, staged on an open file of a mount (any that is open for writing, and stays so meanwhile).
/// Dropping it forgets them. Files and directories are named by their inode numbers (`st_ino`); what the batch makes itself, by
/// the number that the making step answers. For the superuser and the owner of the mount only.
#[derive(Debug)]
pub struct Batch<'fd> {
    fd: BorrowedFd<'fd>,
    id: u64,
    portion: Vec<u8>,
    made: u64,
    ended: bool,
}

impl<'fd> Batch<'fd> {
    /// Begins one.
    pub fn begin(fd: &'fd impl AsFd) -> io::Result<Self> {
        let mut buffer = words(&[0, 0, 0]);
        call(fd, ioctl::BATCH_BEGIN, &mut buffer)?;
        let (fd, id) = (fd.as_fd(), word(&buffer, 0));
        Ok(Self { fd, id, portion: Vec::new(), made: 0, ended: false })
    }

    /// Its number.
    pub fn id(&self) -> u64 {
        self.id
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.portion.is_empty() {
            return Ok(());
        }
        let mut buffer = Vec::with_capacity(16 + ioctl::BATCH_PORTION_BYTES);
        buffer.extend_from_slice(&self.id.to_ne_bytes());
        buffer.extend_from_slice(&pair(self.portion.len() as u32).to_ne_bytes());
        buffer.append(&mut self.portion);
        buffer.resize(16 + ioctl::BATCH_PORTION_BYTES, 0);
        call(self.fd, ioctl::BATCH_ADD, &mut buffer)
    }

    /// Adds a step. It is sent with others, so an error may be one of an earlier step's.
    pub fn step(&mut self, step: &StepFields<'_>) -> io::Result<()> {
        if step.wire_bytes() > ioctl::BATCH_PORTION_BYTES {
            return Err(io::Error::from_raw_os_error(libc::E2BIG));
        }
        if self.portion.len() + step.wire_bytes() > ioctl::BATCH_PORTION_BYTES {
            self.flush()?;
        }
        step.encode(&mut self.portion);
        Ok(())
    }

    /// Writes `data` at `offset` of a file.
    pub fn write(&mut self, ino: u64, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut value = offset;
        for data in data.chunks(ioctl::BATCH_PORTION_BYTES - STEP_BYTES) {
            self.step(&StepFields { op: op::WRITE, ino, value, data, ..StepFields::default() })?;
            value += data.len() as u64;
        }
        Ok(())
    }

    /// Sets a file's size.
    pub fn truncate(&mut self, ino: u64, size_bytes: u64) -> io::Result<()> {
        let value = size_bytes;
        self.step(&StepFields { op: op::TRUNCATE, ino, value, ..StepFields::default() })
    }

    /// Makes an inode of the type and with the permissions of `mode`, owned by the superuser; answers a number for later steps of this batch.
    pub fn make(&mut self, dir: u64, name: &[u8], mode: u32) -> io::Result<u64> {
        self.step(&StepFields { op: op::MAKE, dir, name, mode, ..StepFields::default() })?;
        self.made += 1;
        Ok(MADE | (self.made - 1))
    }

    /// One more name for an inode.
    pub fn link(&mut self, ino: u64, dir: u64, name: &[u8]) -> io::Result<()> {
        self.step(&StepFields { op: op::LINK, ino, dir, name, ..StepFields::default() })
    }

    /// Removes the name of something that is no directory.
    pub fn unlink(&mut self, dir: u64, name: &[u8]) -> io::Result<()> {
        self.step(&StepFields { op: op::UNLINK, dir, name, ..StepFields::default() })
    }

    /// Renames, replacing what is there.
    pub fn rename(&mut self, dir: u64, name: &[u8], new_dir: u64, to: &[u8]) -> io::Result<()> {
        let (value, data) = (new_dir, to);
        self.step(&StepFields { op: op::RENAME, dir, name, value, data, ..StepFields::default() })
    }

    /// Makes the changes; with `sync` they are durable afterwards. Answers the LSN of the batch. With an error nothing has happened
    /// (but `EIO` of a commit with `sync`: what the next mount finds is all of it or nothing).
    pub fn commit(mut self, sync: bool) -> io::Result<u64> {
        self.flush()?;
        let flags = if sync { ioctl::BATCH_SYNC } else { 0 };
        let mut buffer = words(&[self.id, 0, pair(flags)]);
        self.ended = true;
        call(self.fd, ioctl::BATCH_COMMIT, &mut buffer)?;
        Ok(word(&buffer, 1))
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        if !self.ended {
            // If it cannot be dropped now, it is when the file is closed.
            let _ = call(self.fd, ioctl::BATCH_ABORT, &mut words(&[self.id, 0, 0]));
        }
    }
}
