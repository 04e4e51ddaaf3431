//! `fsck`: verifies a volume that nobody has open, without changing anything.
//!
//! Checked are all copies of the superblock, the root and its group table, every bitmap, every
//! node and item of the tree and how they refer to each other, the space in use against the
//! bitmaps, and the log; with [`CheckOptions::verify_data`] also every block of data.
//!
//! What counts is the state after recovery. When the log holds anything, the last checkpoint is
//! checked as it is stored; then the volume is opened over an [`overlay`] that keeps all writes in
//! memory, ordinary recovery runs there, and its result is checked. Without a log to replay there
//! is one pass, which allocates little: the crash simulator runs it after every recovery.
//!
//! Memory: 4 KiB for each group of 126 MiB in use, about 100 bytes for each inode, 2 MiB for
//! data verification, and what recovery writes. Any bytes at all lead to a report or an error.
//!
//! Locks: none.

mod data;
mod items;
mod links;
mod overlay;
mod report;
mod space;

pub use report::{CheckReport, Counts, Place, Problem, ProblemKind, Stage};

use crate::Volume;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::format::root::Root;
use crate::format::superblock::{Superblock, SuperblockError, SuperblockPlace, choose_superblock};
use crate::format::{BLOCK_BYTES_U64, NODE_BLOCKS};
use crate::log::LogGeometry;
use crate::log::replay::{KEPT_RECORD_BYTES, recover};
use crate::sync::Arc;
use crate::tree::walk::{WalkVolume, walk};
use crate::txn::checkpoint::loaded_tree;
use crate::types::{BackgroundMode, VolumeOptions};
use crate::volume::open::{OUTLIVED, lost_durable, posix_device, read_root, replay_start};
use items::Items;
use overlay::{Overlay, read_block};
use report::Findings;
use std::path::Path;

/// Memory cap of the recovery in memory, for volumes that are larger.
const RECOVERY_MEMORY_BYTES: u64 = 256 << 20;
/// The cap that it gets where it cannot do with less, by and by: a log holds what was changed with a lot of memory.
const MOST_RECOVERY_MEMORY_BYTES: u64 = 16 << 30;

/// Called with (blocks checked, blocks to check).
pub type OnProgress = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// What to check.
#[derive(Clone)]
pub struct CheckOptions {
    /// Read all data and verify its checksums.
    pub verify_data: bool,
    /// Keep this many problems with their text; all are counted.
    pub max_problems: usize,
    /// Told about progress now and then.
    pub on_progress: Option<OnProgress>,
}

impl Default for CheckOptions {
    fn default() -> Self {
        Self { verify_data: true, max_problems: 1000, on_progress: None }
    }
}

impl std::fmt::Debug for CheckOptions {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("CheckOptions")
            .field("verify_data", &self.verify_data)
            .field("max_problems", &self.max_problems)
            .finish_non_exhaustive()
    }
}

/// One state of a volume: a device, and the checkpoint on it.
struct View<'a> {
    device: &'a dyn Device,
    superblock: &'a Superblock,
    root: &'a Root,
    /// No log follows: nothing is on its way.
    settled: bool,
    verify_data: bool,
    on_progress: Option<&'a OnProgress>,
}

impl View<'_> {
    fn report_progress(&self, nodes: u64, data_blocks: u64) {
        let Some(report) = self.on_progress else { return };
        let node_blocks = self.root.tree.node_count.saturating_mul(NODE_BLOCKS);
        let used = self.superblock.geometry.data_blocks().saturating_sub(self.root.free_blocks());
        let all = if self.verify_data { used } else { node_blocks };
        let done = nodes.saturating_mul(NODE_BLOCKS).saturating_add(data_blocks);
        report(done.min(all), all);
    }
}

/// Checks the volume in an image file or on a block device.
///
/// # Errors
/// [`Error::InUse`] if it is open for writing; else as [`check_device`].
pub fn check(path: &Path, options: &CheckOptions) -> Result<CheckReport> {
    check_device(&posix_device(path, true)?, options)
}

/// Checks the volume on `device`, which nobody else uses. Nothing is written.
///
/// # Errors
/// [`Error::NotAVolume`] or [`Error::Io`] if there is no superblock to start from. Everything else is a problem in
/// the report.
pub fn check_device(device: &Arc<dyn Device>, options: &CheckOptions) -> Result<CheckReport> {
    check_within(device, options, RECOVERY_MEMORY_BYTES)
}

/// As [`check_device`], with this memory cap of the recovery in memory to begin with.
fn check_within(
    device: &Arc<dyn Device>,
    options: &CheckOptions,
    memory_bytes: u64,
) -> Result<CheckReport> {
    let (superblock, places) = choose_superblock(&**device)?;
    let mut findings = Findings::new(options.max_problems);
    check_superblocks(&**device, &superblock, &places, &mut findings);
    let mut state = Checked { log_frames: 0, counts: Counts::default() };
    if let Some(root) = load_root(&**device, &superblock, &mut findings) {
        state = check_stored(
            device,
            (&superblock, &root, &places),
            (options, memory_bytes),
            &mut findings,
        );
    }
    let mut report = findings.into_report();
    report.log_frames = state.log_frames;
    report.log_replayed = state.log_frames > 0;
    report.cleanly_closed = superblock.clean;
    report.counts = state.counts;
    Ok(report)
}

struct Checked {
    log_frames: u64,
    counts: Counts,
}

/// The stored state, and if a log follows it, what recovery makes of it.
fn check_stored(
    device: &Arc<dyn Device>,
    (superblock, root, places): (&Superblock, &Root, &[SuperblockPlace]),
    (options, memory_bytes): (&CheckOptions, u64),
    findings: &mut Findings,
) -> Checked {
    let log_frames =
        check_log(&**device, superblock, root, superblock.may_be_outlived(places), findings);
    let settled = log_frames == Some(0);
    let view = View {
        device: &**device,
        superblock,
        root,
        settled,
        // Pages of the log may be half-way home: their blocks match no checksum until they are.
        verify_data: options.verify_data && settled,
        on_progress: options.on_progress.as_ref(),
    };
    let counts = check_view(&view, findings);
    let frames = log_frames.unwrap_or(0);
    if frames == 0 {
        return Checked { log_frames: frames, counts };
    }
    findings.stage = Stage::Recovered;
    let recovered = check_recovered(device, superblock, (options, memory_bytes), findings);
    findings.stage = Stage::Stored;
    Checked { log_frames: frames, counts: recovered.unwrap_or(counts) }
}

/// Recovers the volume in memory and checks the result.
fn check_recovered(
    device: &Arc<dyn Device>,
    superblock: &Superblock,
    (options, memory_bytes): (&CheckOptions, u64),
    findings: &mut Findings,
) -> Option<Counts> {
    if !superblock.features.allow_writing() {
        let text = "the log was not replayed: the volume uses features that allow reading only";
        findings.warn(ProblemKind::Recovery, Place::Volume, text.to_owned());
        return None;
    }
    let volume_bytes = superblock.geometry.total_blocks().saturating_mul(BLOCK_BYTES_U64);
    let mut memory_bytes = volume_bytes.min(memory_bytes);
    let recovery = loop {
        match recover_over(device, memory_bytes) {
            // That says something about this check, and nothing about the volume.
            Err(Error::TooLittleMemory(_)) if memory_bytes < MOST_RECOVERY_MEMORY_BYTES => {
                memory_bytes = memory_bytes.saturating_mul(4).min(MOST_RECOVERY_MEMORY_BYTES);
            }
            recovery => break recovery,
        }
    };
    let (overlay, superblock) = match recovery {
        Ok(recovered) => recovered,
        Err(error) => {
            findings.add(ProblemKind::Recovery, Place::Volume, || error.to_string());
            return None;
        }
    };
    let root = load_root(&*overlay, &superblock, findings)?;
    let frames = check_log(&*overlay, &superblock, &root, false, findings)?;
    if frames > 0 {
        findings.add(ProblemKind::Recovery, Place::Log, || {
            format!("{frames} frames are left after recovery and close")
        });
    }
    let view = View {
        device: &*overlay,
        superblock: &superblock,
        root: &root,
        settled: true,
        verify_data: options.verify_data,
        on_progress: options.on_progress.as_ref(),
    };
    Some(check_view(&view, findings))
}

/// What recovery makes of the volume, with all that it writes in memory.
fn recover_over(
    device: &Arc<dyn Device>,
    memory_bytes: u64,
) -> Result<(Arc<dyn Device>, Superblock)> {
    let overlay: Arc<dyn Device> = Arc::new(Overlay::new(device.clone()));
    let options = VolumeOptions {
        memory_bytes: Some(memory_bytes),
        background: BackgroundMode::Manual,
        ..VolumeOptions::default()
    };
    Volume::open_device(overlay.clone(), options)?.close()?;
    let (superblock, _) = choose_superblock(&*overlay)?;
    Ok((overlay, superblock))
}

/// The checkpoint root that `superblock` names.
fn load_root(
    device: &dyn Device,
    superblock: &Superblock,
    findings: &mut Findings,
) -> Option<Root> {
    match read_root(device, superblock) {
        Ok(root) => Some(root),
        Err(error) => {
            let kind = match error {
                Error::Io(_) => ProblemKind::Unreadable,
                _ => ProblemKind::Root,
            };
            let place = Place::Block(superblock.root.block);
            findings.add(kind, place, || error.to_string());
            None
        }
    }
}

/// Tree, references and bitmaps of one state.
fn check_view(view: &View<'_>, findings: &mut Findings) -> Counts {
    let root = view.root;
    let root_place = Place::Block(view.superblock.root.block);
    if root.tree.generation > root.generation {
        findings.add(ProblemKind::Root, root_place, || {
            format!(
                "a tree of generation {} in a root of {}",
                root.tree.generation, root.generation
            )
        });
    }
    if view.superblock.durable_lsn < root.checkpoint_lsn {
        findings.add(ProblemKind::Superblock, Place::Volume, || {
            format!(
                "operations up to {} were durable, but the root holds them up to {}",
                view.superblock.durable_lsn, root.checkpoint_lsn
            )
        });
    }
    let mut items = Items::new(view, findings);
    let volume = WalkVolume {
        device: view.device,
        volume_id: view.superblock.volume_id,
        total_blocks: view.superblock.geometry.total_blocks(),
    };
    let summary = walk(volume, &loaded_tree(&root.tree), 0, &mut items);
    items.complete &= !summary.interrupted;
    items.finish();
    let Items { counts, reached, complete, .. } = items;
    space::check_bitmaps(view, &reached, complete, findings);
    counts
}

/// Frames of the log that recovery will replay; `None` if it will fail.
fn check_log(
    device: &dyn Device,
    superblock: &Superblock,
    root: &Root,
    may_be_outlived: bool,
    findings: &mut Findings,
) -> Option<u64> {
    let geometry = LogGeometry {
        volume_id: superblock.volume_id,
        log_start_block: superblock.geometry.log_start_block(),
        log_blocks: superblock.geometry.log_blocks(),
        total_blocks: superblock.geometry.total_blocks(),
    };
    let start = replay_start(superblock, root);
    let recovered = match recover(device, &geometry, &start, KEPT_RECORD_BYTES, &mut |_| {}) {
        Ok(recovered) => recovered,
        Err(error) => {
            let kind = match error {
                Error::Io(_) => ProblemKind::Unreadable,
                _ => ProblemKind::Log,
            };
            findings.add(kind, Place::Log, || error.to_string());
            return None;
        }
    };
    let frames = recovered.frame_count() as u64;
    if lost_durable(superblock, &recovered) {
        findings.add(ProblemKind::Log, Place::Log, || {
            format!(
                "ends before operation {} and frame {}, but operations up to {} and frames before {} were durable",
                recovered.next_lsn,
                recovered.end.sequence,
                recovered.durable_lsn,
                superblock.durable_sequence
            )
        });
        return None;
    }
    if may_be_outlived && recovered.is_outlived(device) {
        findings.add(ProblemKind::Superblock, Place::Log, || OUTLIVED.to_owned());
        return None;
    }
    if superblock.clean && frames > 0 {
        findings.add(ProblemKind::Log, Place::Log, || {
            format!("{frames} frames in the log of a volume that was closed in order")
        });
    }
    Some(frames)
}

/// Any crash leaves one generation whose slot and mirror are both intact: the newest, or the one
/// before. What else is damaged is repaired by the next writes.
fn check_superblocks(
    device: &dyn Device,
    newest: &Superblock,
    places: &[SuperblockPlace],
    findings: &mut Findings,
) {
    let generation = newest.generation;
    let copies = |wanted: u64| places.iter().filter(|place| place.found == Ok(wanted)).count();
    let whole = copies(generation) == 2 || copies(generation.saturating_sub(1)) == 2;
    // A new volume has only been published once.
    let young = generation <= 2;
    if !whole && !young {
        findings.add(ProblemKind::Superblock, Place::Volume, || {
            "fewer copies of the superblock are intact than any crash leaves".to_owned()
        });
    }
    for place in places {
        let text = match &place.found {
            Ok(found) if *found + 1 < generation => Some(format!("a copy of generation {found}")),
            Ok(found) => copy_problem(device, newest, place.block, *found),
            Err(SuperblockError::Empty) if young => None,
            Err(error) => Some(error.to_string()),
        };
        if let Some(text) = text {
            findings.warn(ProblemKind::SuperblockCopy, Place::Block(place.block), text);
        }
    }
    if newest.errors_seen {
        let text = "damage was met in the last use of the volume".to_owned();
        findings.warn(ProblemKind::Superblock, Place::Volume, text);
    }
}

/// A valid copy must be of the same volume, and equal to the one chosen if it is of its generation.
fn copy_problem(
    device: &dyn Device,
    newest: &Superblock,
    block: u64,
    generation: u64,
) -> Option<String> {
    let bytes = match read_block(device, block) {
        Ok(bytes) => bytes,
        Err(error) => return Some(error.to_string()),
    };
    let copy = match Superblock::decode(&bytes, block) {
        Ok(copy) => copy,
        Err(error) => return Some(error.to_string()),
    };
    if copy.volume_id != newest.volume_id || copy.geometry != newest.geometry {
        return Some("a copy of another volume's superblock".to_owned());
    }
    (generation == newest.generation && copy != *newest)
        .then(|| "differs from the other copy of its generation".to_owned())
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::device::memory::MemoryDevice;
    use crate::{CreateOptions, OpenFlags};

    #[test]
    fn a_log_that_was_filled_with_a_lot_of_memory_is_no_problem_of_the_volume() {
        const LITTLE_BYTES: u64 = 256 << 10;
        let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(16 << 20));
        Volume::format_device(&device, &CreateOptions::default()).expect("format");
        let options = |memory_bytes| VolumeOptions {
            memory_bytes: Some(memory_bytes),
            background: BackgroundMode::Manual,
            ..VolumeOptions::default()
        };
        let volume = Volume::open_device(device.clone(), options(64 << 20)).expect("open");
        for number in 0..1000 {
            let path = format!("/{number:0>200}");
            volume.open_file(path, OpenFlags::CREATE).expect("create");
        }
        volume.sync().expect("sync");
        drop(volume);
        let opened = Volume::open_device(device.clone(), options(LITTLE_BYTES)).map(|_| ());
        assert!(matches!(opened, Err(Error::TooLittleMemory(_))), "{opened:?}");
        let report = check_within(&device, &CheckOptions::default(), LITTLE_BYTES).expect("check");
        assert!(report.is_clean(), "{:?}", report.problems);
        assert_eq!((report.log_replayed, report.counts.files), (true, 1000));
    }
}
