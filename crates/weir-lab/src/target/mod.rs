//! What an experiment needs from a file system, whatever stands behind it.
//!
//! [`Fs`] is a mounted file system or an open Weir volume, [`LabFile`] an open file, [`SyncQueue`]
//! and [`ReadQueue`] are ways to have many requests in flight from one thread. A target that lacks
//! an operation answers [`FsError::NotOffered`], which becomes a row "not offered" in the report:
//! nothing is emulated, since an emulation would measure the lab.

pub mod freemap;
pub mod hollow;
mod hollow_fs;
pub mod mounted;
pub mod queue;
pub mod raw;
pub mod stage;
pub mod weir;
mod weir_device;
pub mod weir_mount;

use std::any::Any;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::LabError;
use crate::measure::DeviceCounters;
pub use freemap::FreeMap;

/// Why a file operation failed.
#[derive(Debug, thiserror::Error)]
pub enum FsError {
    /// The target has no such operation.
    #[error("not offered: {0}")]
    NotOffered(&'static str),
    /// It has, and it failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Result of a file operation.
pub type FsResult<T> = Result<T, FsError>;

impl From<rustix::io::Errno> for FsError {
    fn from(e: rustix::io::Errno) -> Self {
        FsError::Io(e.into())
    }
}

impl From<FsError> for LabError {
    fn from(e: FsError) -> Self {
        match e {
            FsError::NotOffered(why) => LabError::NotOffered(why),
            FsError::Io(source) => LabError::Io { what: "file operation".into(), source },
        }
    }
}

/// How to open a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenHow {
    /// Existing, for reading only.
    Read,
    /// Existing, for reading and writing.
    Write,
    /// Created or emptied, for reading and writing.
    Create,
    /// Created if missing, every write goes to the end.
    Append,
}

/// What `stat` says that experiments look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStat {
    /// Logical size.
    pub size_bytes: u64,
    /// Space held on the device, including space beyond the end of the file.
    pub allocated_bytes: u64,
    /// Whether it is a directory.
    pub is_dir: bool,
}

/// An open file. All offsets and lengths are in bytes; writes and reads are complete or fail
/// (a read is short only at the end of the file).
pub trait LabFile: Send + Sync {
    /// Reads through the cache, waiting for the device if it must.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> FsResult<usize>;
    /// Reads what is cached; `None` if it would have to wait.
    fn read_cached_at(&self, buf: &mut [u8], offset: u64) -> FsResult<Option<usize>>;
    /// Reads without leaving the data in the cache.
    fn read_dontcache_at(&self, buf: &mut [u8], offset: u64) -> FsResult<usize>;
    /// Writes into the cache.
    fn write_at(&self, buf: &[u8], offset: u64) -> FsResult<()>;
    /// Writes through the cache: writeback starts at once and the pages are dropped after it.
    fn write_dontcache_at(&self, buf: &[u8], offset: u64) -> FsResult<()>;
    /// Writes at the end of a file opened with [`OpenHow::Append`].
    fn append(&self, buf: &[u8]) -> FsResult<()>;
    /// Makes data and metadata durable.
    fn fsync(&self) -> FsResult<()>;
    /// Makes data durable, and the metadata needed to read it.
    fn fdatasync(&self) -> FsResult<()>;
    /// Starts writeback of a range; makes nothing durable.
    fn start_writeback(&self, offset: u64, len: u64) -> FsResult<()>;
    /// Reserves space; with `keep_size` beyond the end of the file.
    fn fallocate(&self, offset: u64, len: u64, keep_size: bool) -> FsResult<()>;
    /// Truncates, down or up.
    fn set_len(&self, len: u64) -> FsResult<()>;
    /// Asks for the range to leave the cache.
    fn drop_from_cache(&self, offset: u64, len: u64) -> FsResult<()>;
    /// Number of extents on the device.
    fn extent_count(&self) -> FsResult<u64>;
    /// The concrete type, for queues of the same target.
    fn as_any(&self) -> &dyn Any;
}

/// A handle that can be shared with worker threads and queues.
pub type FileRef = Arc<dyn LabFile>;

/// How asynchronous fsyncs are issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AsyncMethod {
    /// `IORING_OP_FSYNC`.
    IoUring,
    /// `IOCB_CMD_FSYNC` of Linux native AIO.
    Libaio,
    /// As many threads as requests in flight, each in `fsync`.
    Threads,
    /// The target's own asynchronous fsync (Weir's tickets).
    Native,
}

impl AsyncMethod {
    /// Its name in modes and options.
    pub fn name(self) -> &'static str {
        match self {
            AsyncMethod::IoUring => "uring",
            AsyncMethod::Libaio => "libaio",
            AsyncMethod::Threads => "threads",
            AsyncMethod::Native => "ticket",
        }
    }
}

/// What an asynchronous sync covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncScope {
    /// `fsync`.
    File,
    /// `fdatasync`.
    Data,
    /// `fdatasync` of a range (offset, length).
    DataRange(u64, u64),
}

/// A finished request of a queue.
#[derive(Debug)]
pub struct Completion {
    /// The tag given at submission.
    pub tag: u64,
    /// Bytes read (0 for a sync), or the error.
    pub result: io::Result<usize>,
}

/// Asynchronous syncs from one thread.
pub trait SyncQueue: Send {
    /// Submits; the file is kept open until the completion is returned.
    fn submit(&mut self, file: &FileRef, scope: SyncScope, tag: u64) -> FsResult<()>;
    /// A finished request; waits for one when `wait`, `None` when none is in flight (or done).
    fn complete(&mut self, wait: bool) -> FsResult<Option<Completion>>;
    /// Submitted and not returned by `complete`.
    fn in_flight(&self) -> usize;
}

/// Asynchronous reads from one thread.
pub trait ReadQueue: Send {
    /// Submits a read of `len` bytes.
    fn submit(&mut self, file: &FileRef, offset: u64, len: usize, tag: u64) -> FsResult<()>;
    /// As [`SyncQueue::complete`].
    fn complete(&mut self, wait: bool) -> FsResult<Option<Completion>>;
}

/// The journal or log of a file system as it counts itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogCounters {
    /// Log writes (XFS), journal commits (ext4), transaction commits (btrfs), frames (Weir).
    pub writes: u64,
    /// Requests to force the log, where the file system counts them.
    pub forces: Option<u64>,
}

/// A mounted file system or an open volume. Paths are relative to its root, `/` separated.
pub trait Fs: Send + Sync {
    /// Opens a file.
    fn open(&self, path: &str, how: OpenHow) -> FsResult<FileRef>;
    /// Creates a directory, and its parents.
    fn mkdir_all(&self, path: &str) -> FsResult<()>;
    /// Looks a path up.
    fn stat(&self, path: &str) -> FsResult<FileStat>;
    /// Names in a directory, with whether each is a directory.
    fn read_dir(&self, path: &str) -> FsResult<Vec<(String, bool)>>;
    /// Renames.
    fn rename(&self, from: &str, to: &str) -> FsResult<()>;
    /// Removes a file.
    fn unlink(&self, path: &str) -> FsResult<()>;
    /// Removes a tree; nothing if it is not there.
    fn remove_tree(&self, path: &str) -> FsResult<()>;
    /// Makes everything durable.
    fn syncfs(&self) -> FsResult<()>;
    /// Share of the file system in use, in percent, and its size.
    fn fullness(&self) -> FsResult<(f64, u64)>;
    /// Device requests so far; `None` without device truth.
    fn device(&self) -> Option<DeviceCounters>;
    /// Log activity so far, where it can be seen.
    fn log(&self) -> Option<LogCounters>;
    /// Asynchronous syncs, `depth` in flight.
    fn sync_queue(&self, method: AsyncMethod, depth: usize) -> FsResult<Box<dyn SyncQueue>>;
    /// Asynchronous reads, `depth` in flight.
    fn read_queue(&self, depth: usize) -> FsResult<Box<dyn ReadQueue>>;
    /// The asynchronous methods worth comparing here, best known first.
    fn async_methods(&self) -> &'static [AsyncMethod];
    /// Makes later reads cold: everything durable and out of the cache. No file may be open.
    /// Answers how long the mount (or opening) took, where there is one.
    fn make_cold(&self) -> FsResult<Option<Duration>>;
    /// The free extents. No file may be open.
    fn free_map(&self) -> FsResult<FreeMap>;
    /// Caps the memory that the target's own cache may use, where it has one.
    fn set_memory_cap(&self, bytes: u64) -> FsResult<()>;
    /// Where other programs can work on it; `None` when it is not mounted.
    fn mounted_at(&self) -> Option<PathBuf> {
        None
    }
    /// The disk itself, for the target that has no file system on it.
    fn bare_disk(&self) -> Option<PathBuf> {
        None
    }
    /// Prepares for [`Fs::crash`], and says whether it is offered at all: from here on nothing empties the
    /// log before it has to.
    fn let_log_grow(&self) -> FsResult<()> {
        Err(FsError::NotOffered("this target cannot be stopped like by a crash"))
    }
    /// How full the log is, where the target can tell.
    fn log_fill(&self) -> Option<LogFill> {
        None
    }
    /// Holds the device's flushes back, or lets them go: what waits for one goes on waiting.
    fn hold_flushes(&self, hold: bool) -> FsResult<()> {
        let _ = hold;
        Err(FsError::NotOffered("flushes of this target cannot be held back"))
    }
    /// Stops the file system without letting it write anything more, and starts it again. Answers how
    /// long it took until it was usable. No file may be open.
    fn crash(&self) -> FsResult<Duration> {
        Err(FsError::NotOffered("this target cannot be stopped like by a crash"))
    }
}

/// How full a log is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogFill {
    /// From the oldest live record to the newest.
    pub used_bytes: u64,
    /// What users may fill before they have to wait.
    pub limit_bytes: u64,
}

/// One word of `--on`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TargetSpec {
    /// A directory of any mounted file system.
    Dir(PathBuf),
    /// A fresh XFS on the run's disk.
    Xfs,
    /// A fresh ext4 on the run's disk.
    Ext4,
    /// A fresh btrfs on the run's disk.
    Btrfs,
    /// The library in this process, on a fresh volume in the image file.
    Weir,
    /// The same on the loop device of the kernel file systems.
    WeirLoop,
    /// A volume in the image file, through FUSE.
    WeirMount,
    /// The same on the loop device of the kernel file systems.
    WeirMountLoop,
    /// One of these two, mounted with options of its own besides those of the run.
    WeirMountWith {
        /// Whether it is on the loop device.
        on_loop: bool,
        /// Words for `weir mount -o`.
        options: Vec<String>,
    },
    /// A file system without content, through FUSE: what a mount costs before any file system has done anything.
    HollowMount,
    /// The run's disk without any file system.
    Raw,
}

impl FromStr for TargetSpec {
    type Err = LabError;

    fn from_str(word: &str) -> Result<Self, LabError> {
        Ok(match word {
            "xfs" => TargetSpec::Xfs,
            "ext4" => TargetSpec::Ext4,
            "btrfs" => TargetSpec::Btrfs,
            // The names in -file are older ones.
            "weir" | "weir-file" => TargetSpec::Weir,
            "weir-loop" => TargetSpec::WeirLoop,
            "weir-mount" | "weir-mount-file" => TargetSpec::WeirMount,
            "weir-mount-loop" => TargetSpec::WeirMountLoop,
            "hollow-mount" => TargetSpec::HollowMount,
            "raw" => TargetSpec::Raw,
            _ => match word.strip_prefix("dir:") {
                Some(path) if !path.is_empty() => TargetSpec::Dir(PathBuf::from(path)),
                Some(_) => return Err(LabError::UnknownTarget(word.to_owned())),
                None => TargetSpec::with_options(word)
                    .ok_or_else(|| LabError::UnknownTarget(word.to_owned()))?,
            },
        })
    }
}

impl TargetSpec {
    /// `weir-mount+OPT+OPT`.
    fn with_options(word: &str) -> Option<Self> {
        let (name, options) = word.split_once('+')?;
        let on_loop = match name {
            "weir-mount" => false,
            "weir-mount-loop" => true,
            _ => return None,
        };
        let options = options.split('+').map(str::to_owned).collect();
        Some(TargetSpec::WeirMountWith { on_loop, options })
    }

    /// Options that this target alone is mounted with.
    pub fn own_mount_options(&self) -> &[String] {
        match self {
            TargetSpec::WeirMountWith { options, .. } => options,
            _ => &[],
        }
    }

    /// Whether `weir mount` serves it.
    pub fn is_weir_mount(&self) -> bool {
        use TargetSpec::{WeirMount, WeirMountLoop, WeirMountWith};
        matches!(self, WeirMount | WeirMountLoop | WeirMountWith { .. })
    }

    /// Its name in reports.
    pub fn name(&self) -> String {
        match self {
            TargetSpec::Dir(path) => format!("dir:{}", path.display()),
            TargetSpec::Xfs => "xfs".into(),
            TargetSpec::Ext4 => "ext4".into(),
            TargetSpec::Btrfs => "btrfs".into(),
            TargetSpec::Weir => "weir".into(),
            TargetSpec::WeirLoop => "weir-loop".into(),
            TargetSpec::WeirMount => "weir-mount".into(),
            TargetSpec::WeirMountLoop => "weir-mount-loop".into(),
            TargetSpec::WeirMountWith { on_loop, options } => {
                let name = if *on_loop { "weir-mount-loop" } else { "weir-mount" };
                format!("{name}+{}", options.join("+"))
            }
            TargetSpec::HollowMount => "hollow-mount".into(),
            TargetSpec::Raw => "raw".into(),
        }
    }

    /// A kernel file system that the lab formats and mounts itself.
    pub fn is_kernel_image(&self) -> bool {
        matches!(self, TargetSpec::Xfs | TargetSpec::Ext4 | TargetSpec::Btrfs)
    }

    /// Whether it is put on a loop device over the run's image, which needs root.
    pub fn needs_loop(&self) -> bool {
        let on_loop = match self {
            TargetSpec::WeirLoop | TargetSpec::WeirMountLoop => true,
            TargetSpec::WeirMountWith { on_loop, .. } => *on_loop,
            _ => false,
        };
        on_loop || self.is_kernel_image()
    }

    /// Whether it lives on the run's disk (everything but `dir:`).
    pub fn uses_disk(&self) -> bool {
        !matches!(self, TargetSpec::Dir(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn target_words_round_trip_and_unknown_ones_are_named() {
        let words = ["xfs", "ext4", "btrfs", "weir", "weir-loop", "weir-mount", "weir-mount-loop"];
        let mounts = ["weir-mount+writeback_cache", "weir-mount-loop+threads=3+no_io_uring"];
        for word in words.into_iter().chain(mounts).chain(["hollow-mount", "raw", "dir:/mnt/a b"]) {
            assert_eq!(word.parse::<TargetSpec>().expect(word).name(), word);
        }
        for (older, name) in [("weir-file", "weir"), ("weir-mount-file", "weir-mount")] {
            assert_eq!(older.parse::<TargetSpec>().expect(older).name(), name);
        }
        for word in ["zfs", "dir:", "", "XFS", "xfs+noatime", "weir+noatime"] {
            let e = word.parse::<TargetSpec>().expect_err(word).to_string();
            assert!(e.contains(&format!("'{word}'")), "{e}");
        }
    }
}
