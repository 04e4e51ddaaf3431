//! The library in this process, on a fresh volume.
//!
//! Target `weir`: the volume is the run's image file, as users have it, with the engine's own device
//! counters. Target `weir-loop`: it lies on the loop device, so that it pays the tax of the kernel file
//! systems and is counted by the same block layer. Asynchronous syncs are the engine's tickets, delivered
//! to a completion queue. What the engine does not have is "not offered".

use std::any::Any;
use std::io;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use weir::device::posix::{OpenMode, PosixDevice};
use weir::{
    AllocateMode, AtimePolicy, BackgroundMode, CompletionQueue, CreateOptions, FileType, OpenFlags,
    SyncKind, SyncRangeFlags, Volume, VolumeOptions,
};

use super::queue::ThreadQueue;
use super::stage::{Built, StageOptions, TargetInfo, counters_of, disks_below};
use super::weir_device::{Severable, free_extents};
use super::{
    AsyncMethod, Completion, FileRef, FileStat, FreeMap, Fs, FsError, FsResult, LabFile,
    LogCounters, LogFill, OpenHow, ReadQueue, SyncQueue, SyncScope, TargetSpec,
};
use crate::disk::Disk;
use crate::error::{LabError, LabResult};
use crate::measure::{BlockDevice, DeviceCounters};

fn io_error(e: &weir::Error) -> io::Error {
    let kind = match e {
        weir::Error::NotFound => io::ErrorKind::NotFound,
        weir::Error::Exists => io::ErrorKind::AlreadyExists,
        weir::Error::NoSpace => io::ErrorKind::StorageFull,
        weir::Error::WouldBlock => io::ErrorKind::WouldBlock,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, e.to_string())
}

#[allow(clippy::needless_pass_by_value)] // For `map_err`.
fn fs_error(e: weir::Error) -> FsError {
    match e {
        weir::Error::NotSupported(why) => FsError::NotOffered(why),
        other => FsError::Io(io_error(&other)),
    }
}

fn lab_error(what: &str, e: weir::Error) -> LabError {
    match fs_error(e) {
        FsError::NotOffered(why) => LabError::NotOffered(why),
        FsError::Io(source) => LabError::io(what, source),
    }
}

/// Creates a volume and opens it.
pub fn set_up(spec: &TargetSpec, disk: &Disk, options: &StageOptions) -> LabResult<Built> {
    let path = disk.path_of(spec);
    // No discard: it would punch holes into the fully written image.
    let device = PosixDevice::open(path, OpenMode::ReadWrite)
        .map_err(|e| lab_error("opening the volume's disk", e))?
        .with_discard(false);
    let device = Arc::new(device);
    let shared: Arc<dyn weir::device::Device> = Arc::clone(&device) as _;
    // Not prewritten: the image is written in full already.
    Volume::format_device(&shared, &CreateOptions { force: true, ..CreateOptions::default() })
        .map_err(|e| lab_error("creating a volume", e))?;
    let block = disk.device_of(spec);
    let choices =
        Choices { memory_bytes: options.weir_memory_bytes, background: BackgroundMode::Threads };
    let open = open(&device, choices).map_err(|e| lab_error("opening the volume", e))?;
    let memory_mib = open.volume.stats().pages_capacity * 4096 / (1 << 20);
    let info = TargetInfo {
        name: spec.name(),
        fs_type: "weir".into(),
        on: format!("{} ({})", path.display(), disk.spec),
        format: "Volume::format_device, defaults".into(),
        options: format!("in process, noatime, page cache of {memory_mib} MiB"),
        version: env!("CARGO_PKG_VERSION").into(),
        counters: block.as_ref().map_or_else(|| "the engine's device".into(), counters_of),
    };
    let choices = Mutex::new(choices);
    let fs = Arc::new(WeirFs { device, block, open: RwLock::new(Some(open)), choices });
    Ok(Built { fs, info, daemons: Box::new(Vec::new), disks: disks_below(spec, disk) })
}

/// How the volume is opened, now and whenever it is opened again.
#[derive(Clone, Copy)]
struct Choices {
    memory_bytes: Option<u64>,
    background: BackgroundMode,
}

/// A volume with the device that it can be cut off from.
struct Open {
    volume: Volume,
    device: Arc<Severable>,
}

fn open(device: &Arc<PosixDevice>, choices: Choices) -> Result<Open, weir::Error> {
    let options = VolumeOptions {
        memory_bytes: choices.memory_bytes,
        background: choices.background,
        atime: AtimePolicy::Never,
        ..VolumeOptions::default()
    };
    let device = Arc::new(Severable::new(Arc::clone(device)));
    Ok(Open { volume: Volume::open_device(Arc::clone(&device) as _, options)?, device })
}

/// An open volume.
struct WeirFs {
    device: Arc<PosixDevice>,
    /// The loop device under it, when the block layer can count.
    block: Option<BlockDevice>,
    /// `None` only while it is opened anew, or when that failed.
    open: RwLock<Option<Open>>,
    choices: Mutex<Choices>,
}

impl WeirFs {
    fn volume(&self) -> FsResult<Volume> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        open.as_ref()
            .map(|o| o.volume.clone())
            .ok_or_else(|| FsError::Io(io::Error::other("the volume could not be opened again")))
    }

    fn choose(&self, change: impl FnOnce(&mut Choices)) {
        change(&mut self.choices.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Ends the volume with `end` and opens it again, with an empty cache; answers how long the
    /// opening took.
    fn reopen(&self, end: impl FnOnce(&Open) -> FsResult<()>) -> FsResult<Duration> {
        let mut held = self.open.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = held.take() {
            end(&open)?;
        }
        let choices = *self.choices.lock().unwrap_or_else(PoisonError::into_inner);
        let begun = Instant::now();
        *held = Some(open(&self.device, choices).map_err(fs_error)?);
        Ok(begun.elapsed())
    }

    fn close(open: &Open) -> FsResult<()> {
        open.volume.close().map_err(fs_error)
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
        if let Err(e) = self.volume().and_then(|v| v.close().map_err(fs_error)) {
            crate::tell!("weir lab: closing the volume: {e}");
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
        let file = self.volume()?.open_file(path, flags).map_err(fs_error)?;
        Ok(Arc::new(WeirFile { file }))
    }

    fn mkdir_all(&self, path: &str) -> FsResult<()> {
        let volume = self.volume()?;
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
        let attr = self.volume()?.symlink_metadata(path).map_err(fs_error)?;
        Ok(FileStat {
            size_bytes: attr.size_bytes,
            allocated_bytes: attr.blocks * 4096,
            is_dir: attr.file_type == FileType::Directory,
        })
    }

    fn read_dir(&self, path: &str) -> FsResult<Vec<(String, bool)>> {
        let entries = self.volume()?.read_dir(path).map_err(fs_error)?;
        Ok(entries
            .into_iter()
            .map(|e| {
                let name = String::from_utf8_lossy(&e.name).into_owned();
                (name, e.file_type == FileType::Directory)
            })
            .collect())
    }

    fn rename(&self, from: &str, to: &str) -> FsResult<()> {
        self.volume()?.rename_path(from, to).map_err(fs_error)
    }

    fn unlink(&self, path: &str) -> FsResult<()> {
        self.volume()?.remove_file(path).map_err(fs_error)
    }

    fn remove_tree(&self, path: &str) -> FsResult<()> {
        let volume = self.volume()?;
        match volume.symlink_metadata(path) {
            Err(weir::Error::NotFound) => Ok(()),
            Err(e) => Err(fs_error(e)),
            Ok(attr) if attr.file_type == FileType::Directory => Self::remove_below(&volume, path),
            Ok(_) => volume.remove_file(path).map_err(fs_error),
        }
    }

    fn syncfs(&self) -> FsResult<()> {
        self.volume()?.sync().map_err(fs_error)
    }

    fn fullness(&self) -> FsResult<(f64, u64)> {
        let s = self.volume()?.statfs();
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
        let stats = self.volume().ok()?.stats();
        Some(LogCounters { writes: stats.log.frames, forces: Some(stats.fsyncs) })
    }

    fn sync_queue(&self, method: AsyncMethod, depth: usize) -> FsResult<Box<dyn SyncQueue>> {
        match method {
            AsyncMethod::Threads => Ok(Box::new(ThreadQueue::new(depth))),
            AsyncMethod::Native => {
                let queue = CompletionQueue::new().map_err(fs_error)?;
                Ok(Box::new(TicketQueue { queue, in_flight: 0 }))
            }
            AsyncMethod::IoUring | AsyncMethod::Libaio => {
                Err(FsError::NotOffered("the library has no file descriptors"))
            }
        }
    }

    fn read_queue(&self, _depth: usize) -> FsResult<Box<dyn ReadQueue>> {
        Err(FsError::NotOffered("the engine has no asynchronous reads"))
    }

    fn async_methods(&self) -> &'static [AsyncMethod] {
        &[AsyncMethod::Native, AsyncMethod::Threads]
    }

    fn make_cold(&self) -> FsResult<Option<Duration>> {
        self.reopen(Self::close).map(Some)
    }

    fn free_map(&self) -> FsResult<FreeMap> {
        // Closed, the bitmaps on the device are all there is to know.
        let mut found = Ok(Vec::new());
        self.reopen(|open| {
            Self::close(open)?;
            found = free_extents(&self.device).map_err(fs_error);
            Ok(())
        })?;
        Ok(FreeMap::new(found?))
    }

    fn set_memory_cap(&self, bytes: u64) -> FsResult<()> {
        self.choose(|c| c.memory_bytes = Some(bytes));
        self.reopen(Self::close).map(drop)
    }

    fn let_log_grow(&self) -> FsResult<()> {
        // Without threads nobody checkpoints until a call has to wait for log space. Nor does anybody
        // lead asynchronous syncs: only blocking ones are made until the crash.
        self.choose(|c| c.background = BackgroundMode::Manual);
        self.reopen(Self::close).map(drop)
    }

    fn log_fill(&self) -> Option<LogFill> {
        let fill = self.volume().ok()?.stats().log_fill;
        // Users may fill one half; the other is the checkpoint's.
        Some(LogFill {
            used_bytes: fill.used_blocks * 4096,
            limit_bytes: fill.ring_blocks * 4096 / 2,
        })
    }

    fn hold_flushes(&self, hold: bool) -> FsResult<()> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = open.as_ref() {
            open.device.hold_flushes(hold);
        }
        Ok(())
    }

    fn crash(&self) -> FsResult<Duration> {
        self.choose(|c| c.background = BackgroundMode::Threads);
        self.reopen(|open| {
            open.device.sever();
            // What close would like to write no longer reaches the disk; that it fails is the point.
            let _ = open.volume.close();
            Ok(())
        })
    }
}

/// Tickets of the engine, delivered to one completion queue.
struct TicketQueue {
    queue: Arc<CompletionQueue>,
    in_flight: usize,
}

impl SyncQueue for TicketQueue {
    fn submit(&mut self, file: &FileRef, scope: SyncScope, tag: u64) -> FsResult<()> {
        let file = file
            .as_any()
            .downcast_ref::<WeirFile>()
            .ok_or(FsError::NotOffered("a file of another target"))?;
        let (range, kind) = match scope {
            SyncScope::File => (0..u64::MAX, SyncKind::Full),
            SyncScope::Data => (0..u64::MAX, SyncKind::Data),
            SyncScope::DataRange(offset, len) => {
                (offset..offset.saturating_add(len), SyncKind::Data)
            }
        };
        file.file.fsync_async(range, kind).map_err(fs_error)?.deliver(&self.queue, tag);
        self.in_flight += 1;
        Ok(())
    }

    fn complete(&mut self, wait: bool) -> FsResult<Option<Completion>> {
        if self.in_flight == 0 {
            return Ok(None);
        }
        let next = if wait { Some(self.queue.wait()) } else { self.queue.take() };
        Ok(next.map(|done| {
            self.in_flight -= 1;
            let result = done.result.map(|()| 0).map_err(|e| io_error(&e));
            Completion { tag: done.user_data, result }
        }))
    }

    fn in_flight(&self) -> usize {
        self.in_flight
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

    fn start_writeback(&self, offset: u64, len: u64) -> FsResult<()> {
        let range = offset..offset.saturating_add(len);
        self.file.sync_range(range, SyncRangeFlags::WRITE).map_err(fs_error)
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
        (set_up(&TargetSpec::Weir, &disk, &StageOptions::default()).expect("a volume"), dir)
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
    fn tickets_complete_each_tag_once_and_are_durable_across_a_crash() {
        let (built, dir) = fresh("weir-tickets");
        let fs = built.fs;
        let mut queue = fs.sync_queue(AsyncMethod::Native, 8).expect("offered");
        for tag in 0..8_u64 {
            let file = fs.open(&format!("f{tag}"), OpenHow::Create).expect("created");
            file.write_at(&[tag as u8; 5000], 0).expect("written");
            let scope = [SyncScope::File, SyncScope::Data, SyncScope::DataRange(0, 5000)];
            queue.submit(&file, scope[tag as usize % 3], tag).expect("submitted");
        }
        let mut tags = Vec::new();
        while let Some(done) = queue.complete(true).expect("completes") {
            done.result.expect("durable");
            tags.push(done.tag);
        }
        tags.sort_unstable();
        assert_eq!(tags, (0..8).collect::<Vec<u64>>());
        drop(fs.open("lost", OpenHow::Create).expect("created, never synced"));
        drop(queue);
        fs.crash().expect("recovered");
        for tag in 0..8_u64 {
            let file = fs.open(&format!("f{tag}"), OpenHow::Read).expect("there");
            let mut buf = [0; 5000];
            assert_eq!(file.read_at(&mut buf, 0).expect("read"), 5000);
            assert_eq!(buf, [tag as u8; 5000]);
        }
        assert!(fs.stat("lost").is_err(), "what was not synced did not reach the disk");
        drop(fs);
        std::fs::remove_dir_all(dir).expect("cleaned");
    }

    #[test]
    fn the_log_grows_until_the_crash_when_nobody_checkpoints() {
        let (built, dir) = fresh("weir-log");
        let fs = built.fs;
        fs.let_log_grow().expect("reopened");
        let mut last = 0;
        for i in 0..64 {
            let file = fs.open(&format!("f{i}"), OpenHow::Create).expect("created");
            file.write_at(&[1; 4096], 0).expect("written");
            file.fsync().expect("durable");
            let used = fs.log_fill().expect("known").used_bytes;
            assert!(used > last, "{used} after {last}");
            last = used;
        }
        fs.crash().expect("recovered");
        assert!((0..64).all(|i| fs.stat(&format!("f{i}")).is_ok()));
        drop(fs);
        std::fs::remove_dir_all(dir).expect("cleaned");
    }

    #[test]
    fn the_free_map_agrees_with_the_space_that_is_free() {
        let (built, dir) = fresh("weir-free");
        let fs = built.fs;
        fs.open("f", OpenHow::Create).expect("created").write_at(&vec![1; 1 << 20], 0).expect("ok");
        let map = fs.free_map().expect("offered");
        let (percent, total) = fs.fullness().expect("known");
        let free = total as f64 * (100.0 - percent) / 100.0;
        let found = map.total_bytes() as f64;
        assert!(found >= free && found < total as f64, "{found} of {free} in {total}");
        drop(fs);
        std::fs::remove_dir_all(dir).expect("cleaned");
    }

    #[test]
    fn what_the_engine_lacks_is_not_offered() {
        let (built, dir) = fresh("weir-lacks");
        let file = built.fs.open("f", OpenHow::Create).expect("created");
        assert!(matches!(file.write_dontcache_at(&[1], 0), Err(FsError::NotOffered(_))));
        assert!(matches!(built.fs.sync_queue(AsyncMethod::Libaio, 4), Err(FsError::NotOffered(_))));
        drop(file);
        drop(built);
        std::fs::remove_dir_all(dir).expect("cleaned");
    }
}
