//! Transactions: the delta over the trees, atomic operations, and the checkpoint that merges one
//! into the other.
//!
//! * [`delta`]: the ordered map of after-images (pure data)
//! * [`op`]: one operation, put together (pure data)
//! * [`store`]: look-ups through delta and tree, commit, freeze
//! * [`mapping_moments`]: how often the mappings of files have changed
//! * [`names`]: names that paths have led to, and how often directory entries have changed
//! * [`new_directories`]: filters of the names in directories that were made since opening
//! * [`view`]: the same look-ups through changes that are not committed yet
//! * [`checkpoint`]: the transaction's states and the work of each
//! * `merge`: its merge, which leaves room for the next one
//!
//! **Invariant:** a commit applies an operation to delta, allocator and log under one lock; the
//! order of LSNs is the order of changes. **Invariant:** at most one delta is frozen.

pub mod checkpoint;
pub mod delta;
pub mod mapping_moments;
mod merge;
pub mod names;
pub mod new_directories;
pub mod obligations;
pub mod op;
pub mod store;
pub mod view;

pub use merge::DeltaSum;
pub use op::{Home, Op};
pub use store::Store;
pub use view::{Overlay, View};

/// Log sequence number: one per operation, from 1 on, never reused within a volume.
pub type Lsn = u64;

/// A fresh volume in memory that does nothing by itself, and an empty file of it.
#[cfg(all(test, not(feature = "shuttle")))]
pub(crate) fn volume_with_a_file() -> (crate::Volume, crate::File) {
    volume_with_a_file_on(crate::sync::Arc::new(crate::device::memory::MemoryDevice::new(32 << 20)))
}

/// The same on this device.
#[cfg(all(test, not(feature = "shuttle")))]
pub(crate) fn volume_with_a_file_on(
    device: crate::sync::Arc<dyn crate::device::Device>,
) -> (crate::Volume, crate::File) {
    use crate::{BackgroundMode, CreateOptions, OpenFlags, Volume, VolumeOptions};
    Volume::format_device(&device, &CreateOptions::default()).expect("format");
    let options = VolumeOptions { background: BackgroundMode::Manual, ..VolumeOptions::default() };
    let volume = Volume::open_device(device, options).expect("open");
    let file = volume.open_file("/f", OpenFlags::CREATE).expect("create");
    (volume, file)
}
