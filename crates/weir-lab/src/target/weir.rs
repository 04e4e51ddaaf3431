//! The library in this process, on a fresh volume.
//!
//! The volume lies on the run's loop device where there is one, so that it pays the same tax as the
//! kernel file systems and is counted by the same block layer; else on the image file itself, with
//! the engine's own device counters. What the engine does not have is "not offered".

use std::any::Any;
use std::io;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use weir::device::posix::{OpenMode, PosixDevice};
use weir::{AllocateMode, AtimePolicy, CreateOptions, FileType, OpenFlags, Volume, VolumeOptions};

use super::queue::ThreadQueue;
use super::stage::{Built, StageOptions, TargetInfo, counters_of, disks_below};
use super::{
    AsyncMethod, FileRef, FileStat, FreeMap, Fs, FsError, FsResult, LabFile, LogCounters, OpenHow,
    ReadQueue, SyncQueue,
};
use crate::disk::Disk;
use crate::error::{LabError, LabResult};
use crate::measure::{BlockDevice, DeviceCounters};

#[allow(clippy::needless_pass_by_value)] // For `map_err`.
fn fs_error(e: weir::Error) -> FsError {
    let kind = match e {
        weir::Error::NotSupported(why) => return FsError::NotOffered(why),
        weir::Error::NotFound => io::ErrorKind::NotFound,
        weir::Error::Exists => io::ErrorKind::AlreadyExists,
        weir::Error::NoSpace => io::ErrorKind::StorageFull,
        _ => io::ErrorKind::Other,
    };
    FsError::Io(io::Error::new(kind, e.to_string()))
}

fn lab_error(what: &str, e: weir::Error) -> LabError {
    match fs_error(e) {
        FsError::NotOffered(why) => LabError::NotOffered(why),
        FsError::Io(source) => LabError::io(what, source),
    }
}

/// Creates a volume and opens it.
pub fn set_up(disk: &Disk, options: &StageOptions) -> LabResult<Built> {
    let node = disk.loop_node.as_ref().filter(|_| !options.weir_on_file);
    let path = node.unwrap_or(&disk.file);
    // No discard: it would punch holes into the fully written image.
    let device = PosixDevice::open(path, OpenMode::ReadWrite)
        .map_err(|e| lab_error("opening the volume's disk", e))?
        .with_discard(false);
    let device = Arc::new(device);
    let shared: Arc<dyn weir::device::Device> = Arc::clone(&device) as _;
    // Not prewritten: the image is written in full already.
    Volume::format_device(&shared, &CreateOptions { force: true, ..CreateOptions::default() })
        .map_err(|e| lab_error("creating a volume", e))?;
    let volume =
        open(&device, options.weir_memory_bytes).map_err(|e| lab_error("opening the volume", e))?;
    let memory_mib = volume.stats().pages_capacity * 4096 / (1 << 20);
    let block = node.and_then(|_| disk.device());
    let info = TargetInfo {
        name: "weir".into(),
        fs_type: "weir".into(),
        on: format!("{} ({})", path.display(), disk.spec),
        format: "Volume::format_device, defaults".into(),
        options: format!("in process, noatime, page cache of {memory_mib} MiB"),
        version: env!("CARGO_PKG_VERSION").into(),
        counters: block.as_ref().map_or_else(|| "the engine's device".into(), counters_of),
    };
    let memory_bytes = Mutex::new(options.weir_memory_bytes);
    let fs = Arc::new(WeirFs { device, block, volume: RwLock::new(volume), memory_bytes });
    Ok(Built { fs, info, daemons: Box::new(Vec::new), disks: disks_below(disk) })
}

fn open(device: &Arc<PosixDevice>, memory_bytes: Option<u64>) -> Result<Volume, weir::Error> {
    let options =
        VolumeOptions { memory_bytes, atime: AtimePolicy::Never, ..VolumeOptions::default() };
    Volume::open_device(Arc::clone(device) as _, options)
}

/// An open volume.
struct WeirFs {
    device: Arc<PosixDevice>,
    /// The loop device under it, when the block layer can count.
    block: Option<BlockDevice>,
    volume: RwLock<Volume>,
    memory_bytes: Mutex<Option<u64>>,
}

impl WeirFs {
    fn volume(&self) -> Volume {
        self.volume.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Closes the volume and opens it again, with an empty cache.
    fn reopen(&self, memory_bytes: Option<u64>) -> FsResult<()> {
        let mut held = self.volume.write().unwrap_or_else(PoisonError::into_inner);
        held.close().map_err(fs_error)?;
        *held = open(&self.device, memory_bytes).map_err(fs_error)?;
        Ok(())
    }

    fn remove_below(volume: &Volume, path: &str) -> FsResult<()> {
        for entry in volume.read_dir(path).map_err(fs_error)? {
            let below = format!("{path}/{}", String::from_utf8_lossy(&entry.name));
            if entry.file_type == FileType::Directory {
                Self::remove_below(volume, &below)?;
            } else {
                volume.remove_file(&below).map_err(fs_error)?;
            }
        }
        volume.remove_dir(path).map_err(fs_error)
    }
}

impl Drop for WeirFs {
    fn drop(&mut self) {
        if let Err(e) = self.volume().close() {
            eprintln!("weir lab: closing the volume: {e}");
        }
    }
}

impl Fs for WeirFs {
    fn open(&self, path: &str, how: OpenHow) -> FsResult<FileRef> {
        let flags = match how {
            OpenHow::Read => OpenFlags::READ,
            OpenHow::Write => OpenFlags::READ_WRITE,
            OpenHow::Create => OpenFlags { truncate: true, ..OpenFlags::CREATE },
            OpenHow::Append => OpenFlags::CREATE,
        };
        let file = self.volume().open_file(path, flags).map_err(fs_error)?;
        Ok(Arc::new(WeirFile { file }))
    }

    fn mkdir_all(&self, path: &str) -> FsResult<()> {
        let volume = self.volume();
        let mut sofar = String::new();
        for part in path.split('/').filter(|p| !p.is_empty()) {
            if !sofar.is_empty() {
                sofar.push('/');
            }
            sofar.push_str(part);
            match volume.create_dir(&sofar, 0o755) {
                Ok(_) | Err(weir::Error::Exists) => {}
                Err(e) => return Err(fs_error(e)),
            }
        }
        Ok(())
    }

    fn stat(&self, path: &str) -> FsResult<FileStat> {
        let attr = self.volume().symlink_metadata(path).map_err(fs_error)?;
        Ok(FileStat {
            size_bytes: attr.size_bytes,
            allocated_bytes: attr.blocks * 4096,
            is_dir: attr.file_type == FileType::Directory,
        })
    }

    fn read_dir(&self, path: &str) -> FsResult<Vec<(String, bool)>> {
        let entries = self.volume().read_dir(path).map_err(fs_error)?;
        Ok(entries
            .into_iter()
            .map(|e| {
                let name = String::from_utf8_lossy(&e.name).into_owned();
                (name, e.file_type == FileType::Directory)
            })
            .collect())
    }

    fn rename(&self, from: &str, to: &str) -> FsResult<()> {
        self.volume().rename_path(from, to).map_err(fs_error)
    }

    fn unlink(&self, path: &str) -> FsResult<()> {
        self.volume().remove_file(path).map_err(fs_error)
    }

    fn remove_tree(&self, path: &str) -> FsResult<()> {
        let volume = self.volume();
        match volume.symlink_metadata(path) {
            Err(weir::Error::NotFound) => Ok(()),
            Err(e) => Err(fs_error(e)),
            Ok(attr) if attr.file_type == FileType::Directory => Self::remove_below(&volume, path),
            Ok(_) => volume.remove_file(path).map_err(fs_error),
        }
    }

    fn syncfs(&self) -> FsResult<()> {
        self.volume().sync().map_err(fs_error)
    }

    fn fullness(&self) -> FsResult<(f64, u64)> {
        let s = self.volume().statfs();
        let used = s.total_blocks.saturating_sub(s.available_blocks);
        Ok((used as f64 * 100.0 / s.total_blocks.max(1) as f64, s.total_blocks * 4096))
    }

    fn device(&self) -> Option<DeviceCounters> {
        if let Some(block) = &self.block {
            return block.counters().ok();
        }
        let c = self.device.stats().counters();
        Some(DeviceCounters {
            reads: c.reads,
            read_bytes: c.read_bytes,
            writes: c.writes,
            write_bytes: c.write_bytes,
            flushes: c.flushes,
        })
    }

    fn log(&self) -> Option<LogCounters> {
        let stats = self.volume().stats();
        Some(LogCounters { writes: stats.log.frames, forces: Some(stats.fsyncs) })
    }

    fn sync_queue(&self, method: AsyncMethod, depth: usize) -> FsResult<Box<dyn SyncQueue>> {
        match method {
            AsyncMethod::Threads => Ok(Box::new(ThreadQueue::new(depth))),
            AsyncMethod::Native => Err(FsError::NotOffered("the engine has no fsync tickets")),
            AsyncMethod::IoUring | AsyncMethod::Libaio => {
                Err(FsError::NotOffered("the library has no file descriptors"))
            }
        }
    }

    fn read_queue(&self, _depth: usize) -> FsResult<Box<dyn ReadQueue>> {
        Err(FsError::NotOffered("the engine has no asynchronous reads"))
    }

    fn async_methods(&self) -> &'static [AsyncMethod] {
        &[AsyncMethod::Threads]
    }

    fn make_cold(&self) -> FsResult<()> {
        let cap = *self.memory_bytes.lock().unwrap_or_else(PoisonError::into_inner);
        self.reopen(cap)
    }

    fn free_map(&self) -> FsResult<FreeMap> {
        Err(FsError::NotOffered("the engine does not list its free extents"))
    }

    fn set_memory_cap(&self, bytes: u64) -> FsResult<()> {
        *self.memory_bytes.lock().unwrap_or_else(PoisonError::into_inner) = Some(bytes);
        self.reopen(Some(bytes))
    }
}

/// An open file of a volume.
struct WeirFile {
    file: weir::File,
}

impl LabFile for WeirFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> FsResult<usize> {
        self.file.read_at(offset, buf).map_err(fs_error)
    }

    fn read_cached_at(&self, buf: &mut [u8], offset: u64) -> FsResult<Option<usize>> {
        match self.file.read_at_nowait(offset, buf) {
            Ok(n) => Ok(Some(n)),
            Err(weir::Error::WouldBlock) => Ok(None),
            Err(e) => Err(fs_error(e)),
        }
    }

    fn read_dontcache_at(&self, _buf: &mut [u8], _offset: u64) -> FsResult<usize> {
        Err(FsError::NotOffered("the engine has no uncached reads"))
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> FsResult<()> {
        let mut put = 0;
        while put < buf.len() {
            put += self.file.write_at(offset + put as u64, &buf[put..]).map_err(fs_error)?;
        }
        Ok(())
    }

    fn write_dontcache_at(&self, _buf: &[u8], _offset: u64) -> FsResult<()> {
        Err(FsError::NotOffered("the engine has no uncached writes"))
    }

    fn append(&self, buf: &[u8]) -> FsResult<()> {
        self.file.append(buf).map(drop).map_err(fs_error)
    }

    fn fsync(&self) -> FsResult<()> {
        self.file.fsync().map_err(fs_error)
    }

    fn fdatasync(&self) -> FsResult<()> {
        self.file.fdatasync().map_err(fs_error)
    }

    fn start_writeback(&self, _offset: u64, _len: u64) -> FsResult<()> {
        Err(FsError::NotOffered("the engine has no sync_range"))
    }

    fn fallocate(&self, offset: u64, len: u64, keep_size: bool) -> FsResult<()> {
        let mode = if keep_size { AllocateMode::KeepSize } else { AllocateMode::Extend };
        self.file.allocate(mode, offset, len).map_err(fs_error)
    }

    fn set_len(&self, len: u64) -> FsResult<()> {
        self.file.truncate(len).map_err(fs_error)
    }

    fn drop_from_cache(&self, _offset: u64, _len: u64) -> FsResult<()> {
        Err(FsError::NotOffered("the engine drops no ranges from its cache"))
    }

    fn extent_count(&self) -> FsResult<u64> {
        Err(FsError::NotOffered("the engine does not list a file's extents"))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::DiskSpec;

    fn fresh(name: &str) -> (Built, std::path::PathBuf) {
        let dir = std::env::temp_dir().join(format!("weir-lab-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("directory");
        let file = dir.join("disk.img");
        std::fs::write(&file, vec![0xA5; 64 << 20]).expect("image");
        let disk = Disk {
            spec: DiskSpec::Plain,
            size_bytes: 64 << 20,
            file,
            loop_node: None,
            run_dir: dir.clone(),
        };
        (set_up(&disk, &StageOptions::default()).expect("a volume"), dir)
    }

    #[test]
    fn files_survive_a_cold_start_and_trees_can_be_removed() {
        let (built, dir) = fresh("weir");
        let fs = built.fs;
        fs.mkdir_all("a/b").expect("made");
        fs.mkdir_all("a/b").expect("already there is fine");
        let file = fs.open("a/b/f", OpenHow::Create).expect("created");
        file.write_at(b"hello", 0).expect("written");
        file.append(b" there").expect("appended");
        file.fsync().expect("durable");
        drop(file);
        let flushed = fs.device().expect("counters").flushes;
        assert!(flushed > 0, "an fsync reaches the device");
        fs.make_cold().expect("reopened");
        let file = fs.open("a/b/f", OpenHow::Read).expect("there");
        let mut buf = [0; 16];
        assert_eq!(file.read_at(&mut buf, 0).expect("read"), 11);
        assert_eq!(&buf[..11], b"hello there");
        drop(file);
        assert_eq!(fs.stat("a/b/f").expect("stat").size_bytes, 11);
        fs.remove_tree("a").expect("removed");
        fs.remove_tree("a").expect("gone is fine");
        assert!(matches!(fs.stat("a"), Err(FsError::Io(e)) if e.kind() == io::ErrorKind::NotFound));
        drop(fs);
        std::fs::remove_dir_all(dir).expect("cleaned");
    }

    #[test]
    fn what_the_engine_lacks_is_not_offered() {
        let (built, dir) = fresh("weir-lacks");
        let file = built.fs.open("f", OpenHow::Create).expect("created");
        assert!(matches!(file.start_writeback(0, 1), Err(FsError::NotOffered(_))));
        assert!(matches!(built.fs.sync_queue(AsyncMethod::Native, 4), Err(FsError::NotOffered(_))));
        drop(file);
        drop(built);
        std::fs::remove_dir_all(dir).expect("cleaned");
    }
}
