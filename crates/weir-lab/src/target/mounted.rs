//! Any mounted file system, through the system calls a careful program has today.

use std::any::Any;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{Advice, FallocateFlags};

use super::{
    AsyncMethod, FileRef, FileStat, FreeMap, Fs, FsError, FsResult, LabFile, LogCounters, OpenHow,
    ReadQueue, SyncQueue, queue,
};
use crate::measure::DeviceCounters;
use crate::measure::device::{BlockDevice, disk_of, mount_of};
use crate::sys;

const NOT_OURS: FsError = FsError::NotOffered("only the lab's own file systems are made to crash");
const NO_SHUT_DOWN: FsError = FsError::NotOffered("this file system has no shutdown call");

/// A directory of a mounted file system.
pub struct MountedFs {
    root: PathBuf,
    fs_type: String,
    device: Option<BlockDevice>,
    cold: Cold,
}

/// How a mounted file system is made cold, and inspected, with nothing open on it.
pub enum Cold {
    /// Drop each file's pages with `posix_fadvise`; other people's caches stay.
    Advise,
    /// Let the process that serves the mount be started anew: it has a cache of its own.
    Restart(Box<dyn Server>),
    /// Unmount and mount again: exact, for file systems that the lab mounted itself.
    Remount {
        /// The device node.
        node: PathBuf,
        /// Options for `mount -o`.
        options: String,
    },
}

/// A process that serves a mount. Both calls answer how long it took until the new process' mount
/// was usable.
pub trait Server: Send + Sync {
    /// Ends the process in order and starts another, with another memory cap if one is given.
    fn restart(&self, memory_bytes: Option<u64>) -> io::Result<Duration>;
    /// Kills the process and starts another.
    fn kill_and_restart(&self) -> io::Result<Duration>;
}

impl MountedFs {
    /// The file system that `root` is on.
    pub fn new(root: PathBuf, device: Option<BlockDevice>, cold: Cold) -> Self {
        let fs_type = mount_of(&root).map(|m| m.fs_type).unwrap_or_default();
        let device = device.or_else(|| disk_of(&root));
        MountedFs { root, fs_type, device, cold }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// What is below the file system's own counters, such as `loop0`.
    fn device_name(&self) -> Option<&str> {
        self.device.as_ref().map(|d| d.name.as_str())
    }

    /// Unmounts and mounts again; answers how long the mount took.
    fn remount(&self, node: &Path, options: &str) -> io::Result<Duration> {
        let (root, node) = (self.root.to_string_lossy(), node.to_string_lossy());
        run_tool("umount", &[&root])?;
        let begun = Instant::now();
        run_tool("mount", &["-t", &self.fs_type, "-o", options, &node, &root])?;
        Ok(begun.elapsed())
    }

    fn advise_tree(dir: &Path) -> io::Result<()> {
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                Self::advise_tree(&entry.path())?;
            } else if kind.is_file() {
                let file = File::open(entry.path())?;
                rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?;
            }
        }
        Ok(())
    }
}

/// Runs a program; its error output, on one line, becomes the error.
pub fn run_tool(program: &str, args: &[&str]) -> io::Result<String> {
    let out = std::process::Command::new(program).args(args).output()?;
    if out.status.success() {
        return Ok(String::from_utf8_lossy(&out.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&out.stderr);
    let line = said.lines().filter(|l| !l.trim().is_empty()).collect::<Vec<_>>().join("; ");
    Err(io::Error::other(format!("{program} {}: {line}", args.join(" "))))
}

impl Fs for MountedFs {
    fn open(&self, path: &str, how: OpenHow) -> FsResult<FileRef> {
        let mut options = OpenOptions::new();
        match how {
            OpenHow::Read => options.read(true),
            OpenHow::Write => options.read(true).write(true),
            OpenHow::Create => options.read(true).write(true).create(true).truncate(true),
            OpenHow::Append => options.append(true).create(true),
        };
        Ok(Arc::new(MountedFile { file: options.open(self.at(path))? }))
    }

    fn mkdir_all(&self, path: &str) -> FsResult<()> {
        Ok(fs::create_dir_all(self.at(path))?)
    }

    fn stat(&self, path: &str) -> FsResult<FileStat> {
        let m = fs::symlink_metadata(self.at(path))?;
        Ok(FileStat { size_bytes: m.len(), allocated_bytes: m.blocks() * 512, is_dir: m.is_dir() })
    }

    fn read_dir(&self, path: &str) -> FsResult<Vec<(String, bool)>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(self.at(path))? {
            let entry = entry?;
            names.push((
                entry.file_name().to_string_lossy().into_owned(),
                entry.file_type()?.is_dir(),
            ));
        }
        Ok(names)
    }

    fn rename(&self, from: &str, to: &str) -> FsResult<()> {
        Ok(fs::rename(self.at(from), self.at(to))?)
    }

    fn unlink(&self, path: &str) -> FsResult<()> {
        Ok(fs::remove_file(self.at(path))?)
    }

    fn remove_tree(&self, path: &str) -> FsResult<()> {
        match fs::remove_dir_all(self.at(path)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e.into()),
            _ => Ok(()),
        }
    }

    fn syncfs(&self) -> FsResult<()> {
        sys::syncfs(&self.root)?;
        if let Cold::Restart(_) = &self.cold {
            // The kernel does not pass syncfs on to a FUSE server: Weir's has a command for it.
            weir_mount::client::sync_volume(fs::File::open(&self.root)?, 0)?;
        }
        Ok(())
    }

    fn fullness(&self) -> FsResult<(f64, u64)> {
        let s = sys::space(&self.root)?;
        let used = s.total_bytes.saturating_sub(s.available_bytes);
        Ok((used as f64 * 100.0 / s.total_bytes.max(1) as f64, s.total_bytes))
    }

    fn device(&self) -> Option<DeviceCounters> {
        self.device.as_ref()?.counters().ok()
    }

    fn log(&self) -> Option<LogCounters> {
        let device = self.device_name()?;
        match self.fs_type.as_str() {
            "xfs" => {
                let text = fs::read_to_string(format!("/sys/fs/xfs/{device}/stats/stats")).ok()?;
                parse_xfs_log(&text)
            }
            "ext4" => {
                let text = fs::read_to_string(format!("/proc/fs/jbd2/{device}-8/info")).ok()?;
                parse_jbd2(&text)
            }
            "btrfs" => btrfs_commits(device),
            _ => None,
        }
    }

    fn sync_queue(&self, method: AsyncMethod, depth: usize) -> FsResult<Box<dyn SyncQueue>> {
        queue::sync_queue(method, depth)
    }

    fn read_queue(&self, depth: usize) -> FsResult<Box<dyn ReadQueue>> {
        queue::read_queue(depth)
    }

    fn async_methods(&self) -> &'static [AsyncMethod] {
        &[AsyncMethod::IoUring, AsyncMethod::Libaio, AsyncMethod::Threads]
    }

    fn make_cold(&self) -> FsResult<Option<Duration>> {
        self.syncfs()?;
        match &self.cold {
            Cold::Advise => {
                Self::advise_tree(&self.root)?;
                Ok(None)
            }
            Cold::Restart(server) => Ok(Some(server.restart(None)?)),
            Cold::Remount { node, options } => Ok(Some(self.remount(node, options)?)),
        }
    }

    fn free_map(&self) -> FsResult<FreeMap> {
        let Cold::Remount { node, .. } = &self.cold else {
            return Err(FsError::NotOffered("free extents are read only on the lab's own images"));
        };
        // Mounted again, the allocator's state is on the device and nothing is in flight.
        self.make_cold()?;
        FreeMap::of_kernel_fs(&self.fs_type, node)
    }

    fn set_memory_cap(&self, bytes: u64) -> FsResult<()> {
        if let Cold::Restart(server) = &self.cold {
            self.syncfs()?;
            server.restart(Some(bytes))?;
            return Ok(());
        }
        Err(FsError::NotOffered("the kernel's cache is limited by the memory cgroup"))
    }

    fn mounted_at(&self) -> Option<PathBuf> {
        Some(self.root.clone())
    }

    fn let_log_grow(&self) -> FsResult<()> {
        match &self.cold {
            Cold::Advise => Err(NOT_OURS),
            Cold::Restart(_) => Ok(()),
            Cold::Remount { .. } => {
                // Known before the load, not after it.
                let offered = sys::offers_shut_down(&File::open(&self.root)?);
                if offered { Ok(()) } else { Err(NO_SHUT_DOWN) }
            }
        }
    }

    fn crash(&self) -> FsResult<Duration> {
        match &self.cold {
            Cold::Advise => Err(NOT_OURS),
            Cold::Restart(server) => Ok(server.kill_and_restart()?),
            Cold::Remount { node, options } => {
                sys::shut_down(&File::open(&self.root)?)?;
                Ok(self.remount(node, options)?)
            }
        }
    }
}

/// An open file of a mounted file system.
pub struct MountedFile {
    file: File,
}

impl MountedFile {
    /// The descriptor, for queues.
    pub fn file(&self) -> &File {
        &self.file
    }
}

/// A kernel or file system that lacks a flag answers in one of these ways.
fn flag_error(e: io::Error, why: &'static str) -> FsError {
    match e.raw_os_error() {
        Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ENOSYS) => FsError::NotOffered(why),
        _ => FsError::Io(e),
    }
}

impl LabFile for MountedFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> FsResult<usize> {
        let mut got = 0;
        while got < buf.len() {
            match self.file.read_at(&mut buf[got..], offset + got as u64) {
                Ok(0) => break,
                Ok(n) => got += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(got)
    }

    fn read_cached_at(&self, buf: &mut [u8], offset: u64) -> FsResult<Option<usize>> {
        match sys::pread_nowait(&self.file, buf, offset) {
            // A part is cached: the caller must wait for the rest.
            Ok(Some(n)) if n < buf.len() => Ok(None),
            Ok(n) => Ok(n),
            Err(e) => Err(flag_error(e, "RWF_NOWAIT is refused by this file system")),
        }
    }

    fn read_dontcache_at(&self, buf: &mut [u8], offset: u64) -> FsResult<usize> {
        sys::preadv2(&self.file, buf, offset, sys::RWF_DONTCACHE)
            .map_err(|e| flag_error(e, "RWF_DONTCACHE is refused by this file system"))
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> FsResult<()> {
        Ok(self.file.write_all_at(buf, offset)?)
    }

    fn write_dontcache_at(&self, buf: &[u8], offset: u64) -> FsResult<()> {
        let mut put = 0;
        while put < buf.len() {
            let at = offset + put as u64;
            put += sys::pwritev2(&self.file, &buf[put..], at, sys::RWF_DONTCACHE)
                .map_err(|e| flag_error(e, "RWF_DONTCACHE is refused by this file system"))?;
        }
        Ok(())
    }

    fn append(&self, buf: &[u8]) -> FsResult<()> {
        Ok((&self.file).write_all(buf)?)
    }

    fn fsync(&self) -> FsResult<()> {
        Ok(self.file.sync_all()?)
    }

    fn fdatasync(&self) -> FsResult<()> {
        Ok(self.file.sync_data()?)
    }

    fn start_writeback(&self, offset: u64, len: u64) -> FsResult<()> {
        Ok(sys::sync_file_range_write(&self.file, offset, len)?)
    }

    fn fallocate(&self, offset: u64, len: u64, keep_size: bool) -> FsResult<()> {
        let flags = if keep_size { FallocateFlags::KEEP_SIZE } else { FallocateFlags::empty() };
        rustix::fs::fallocate(self.file.as_fd(), flags, offset, len)
            .map_err(|e| flag_error(e.into(), "fallocate is refused by this file system"))
    }

    fn set_len(&self, len: u64) -> FsResult<()> {
        Ok(self.file.set_len(len)?)
    }

    fn drop_from_cache(&self, offset: u64, len: u64) -> FsResult<()> {
        let len = std::num::NonZeroU64::new(len);
        Ok(rustix::fs::fadvise(&self.file, offset, len, Advice::DontNeed)?)
    }

    fn extent_count(&self) -> FsResult<u64> {
        let extents = sys::file_extents(&self.file)
            .map_err(|e| flag_error(e, "FIEMAP is refused by this file system"))?;
        Ok(extents.len() as u64)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// `log writes blocks noiclogs force force_sleep` of `/sys/fs/xfs/*/stats/stats`.
fn parse_xfs_log(text: &str) -> Option<LogCounters> {
    let line = text.lines().find_map(|l| l.strip_prefix("log "))?;
    let f: Vec<u64> = line.split_whitespace().filter_map(|w| w.parse().ok()).collect();
    Some(LogCounters { writes: *f.first()?, forces: f.get(3).copied() })
}

/// `123 transactions (120 requested), ...` of `/proc/fs/jbd2/*/info`.
fn parse_jbd2(text: &str) -> Option<LogCounters> {
    let writes = text.split_whitespace().next()?.parse().ok()?;
    Some(LogCounters { writes, forces: None })
}

/// `commits N` of `/sys/fs/btrfs/UUID/commit_stats`, for the file system that holds `device`.
fn btrfs_commits(device: &str) -> Option<LogCounters> {
    for entry in fs::read_dir("/sys/fs/btrfs").ok()?.flatten() {
        if entry.path().join("devices").join(device).exists() {
            let text = fs::read_to_string(entry.path().join("commit_stats")).ok()?;
            let writes = text.lines().find_map(|l| l.strip_prefix("commits "))?.trim();
            return Some(LogCounters { writes: writes.parse().ok()?, forces: None });
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_counters_are_read_from_each_kernel_format() {
        let xfs = "extent_alloc 1 2 3 4\nlog 17 3400 0 66 12\nxstrat 1 0\n";
        assert_eq!(parse_xfs_log(xfs), Some(LogCounters { writes: 17, forces: Some(66) }));
        let jbd2 = "42 transactions (40 requested), each up to 8192 blocks\naverage: \n";
        assert_eq!(parse_jbd2(jbd2), Some(LogCounters { writes: 42, forces: None }));
        assert_eq!(parse_jbd2(""), None);
    }

    #[test]
    fn a_missing_flag_is_not_offered_and_an_io_error_stays_one() {
        let refused = flag_error(io::Error::from_raw_os_error(libc::EOPNOTSUPP), "flag");
        assert!(matches!(refused, FsError::NotOffered("flag")));
        let broken = flag_error(io::Error::from_raw_os_error(libc::EIO), "flag");
        assert!(matches!(broken, FsError::Io(_)));
    }
}
