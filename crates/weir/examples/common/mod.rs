//! A volume in a scratch directory, for the examples.

use std::path::PathBuf;
use weir::{CreateOptions, Result, Volume, VolumeOptions};

/// A scratch directory with a new volume; removed with everything in it when it is dropped.
pub struct Scratch {
    directory: PathBuf,
}

impl Scratch {
    /// A new volume of `size_bytes`.
    pub fn new(name: &str, size_bytes: u64) -> Result<Self> {
        let directory = std::env::temp_dir().join(format!("weir-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory)?;
        let scratch = Self { directory };
        let options = CreateOptions { size_bytes: Some(size_bytes), ..CreateOptions::default() };
        Volume::create(&scratch.image(), &options)?;
        Ok(scratch)
    }

    fn image(&self) -> PathBuf {
        self.directory.join("volume.weir")
    }

    /// Opens the volume.
    pub fn open(&self) -> Result<Volume> {
        Volume::open(&self.image(), VolumeOptions::default())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What cannot be removed is left in the directory for temporary files, where it does no harm.
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}
