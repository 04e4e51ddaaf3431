//! The run's disk without any file system: what *foundation* judges sequential bandwidth by.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::stage::{Built, TargetInfo, counters_of, disks_below};
use super::{
    AsyncMethod, FileRef, FileStat, FreeMap, Fs, FsError, FsResult, LogCounters, OpenHow,
    ReadQueue, SyncQueue, TargetSpec,
};
use crate::disk::Disk;
use crate::measure::{BlockDevice, DeviceCounters};

const NO_FILES: FsError = FsError::NotOffered("a bare disk has no files");

/// A disk. It has no files; experiments that know what to do with one ask for it.
struct RawFs {
    path: PathBuf,
    block: Option<BlockDevice>,
}

/// Takes the disk as it is.
pub fn set_up(spec: &TargetSpec, disk: &Disk) -> Built {
    let path = disk.path_of(spec).clone();
    let block = disk.below();
    let info = TargetInfo {
        name: "raw".into(),
        fs_type: "none".into(),
        on: format!("{} ({})", path.display(), disk.spec),
        format: "none".into(),
        options: "O_DIRECT".into(),
        version: String::new(),
        counters: block.as_ref().map(counters_of).unwrap_or_default(),
    };
    let fs = Arc::new(RawFs { path, block });
    Built { fs, info, daemons: Box::new(Vec::new), disks: disks_below(spec, disk) }
}

impl Fs for RawFs {
    fn bare_disk(&self) -> Option<PathBuf> {
        Some(self.path.clone())
    }

    fn device(&self) -> Option<DeviceCounters> {
        self.block.as_ref()?.counters().ok()
    }

    fn make_cold(&self) -> FsResult<Option<Duration>> {
        Ok(None)
    }

    fn open(&self, _path: &str, _how: OpenHow) -> FsResult<FileRef> {
        Err(NO_FILES)
    }

    fn mkdir_all(&self, _path: &str) -> FsResult<()> {
        Err(NO_FILES)
    }

    fn stat(&self, _path: &str) -> FsResult<FileStat> {
        Err(NO_FILES)
    }

    fn read_dir(&self, _path: &str) -> FsResult<Vec<(String, bool)>> {
        Err(NO_FILES)
    }

    fn rename(&self, _from: &str, _to: &str) -> FsResult<()> {
        Err(NO_FILES)
    }

    fn unlink(&self, _path: &str) -> FsResult<()> {
        Err(NO_FILES)
    }

    fn remove_tree(&self, _path: &str) -> FsResult<()> {
        Err(NO_FILES)
    }

    fn syncfs(&self) -> FsResult<()> {
        Err(NO_FILES)
    }

    fn fullness(&self) -> FsResult<(f64, u64)> {
        Err(NO_FILES)
    }

    fn log(&self) -> Option<LogCounters> {
        None
    }

    fn sync_queue(&self, _method: AsyncMethod, _depth: usize) -> FsResult<Box<dyn SyncQueue>> {
        Err(NO_FILES)
    }

    fn read_queue(&self, _depth: usize) -> FsResult<Box<dyn ReadQueue>> {
        Err(NO_FILES)
    }

    fn async_methods(&self) -> &'static [AsyncMethod] {
        &[]
    }

    fn free_map(&self) -> FsResult<FreeMap> {
        Err(NO_FILES)
    }

    fn set_memory_cap(&self, _bytes: u64) -> FsResult<()> {
        Err(NO_FILES)
    }
}
