//! Creating a volume. The superblock is written last: an interrupted creation leaves no volume.

use super::open::{Parts, assemble};
use crate::alloc::Allocator;
use crate::device::buffer::AlignedBuf;
use crate::device::posix::{OpenMode, PosixDevice};
use crate::device::{Device, IoClass};
use crate::error::{Error, Result};
use crate::format::geometry::{Geometry, TAIL_BLOCKS, default_log_blocks};
use crate::format::item::InodeItem;
use crate::format::superblock::{
    self, Features, MAX_LABEL_BYTES, ReplayPoint, RootPointer, Superblock,
};
use crate::format::{BLOCK_BYTES, BLOCK_BYTES_U64, Key, MIN_VOLUME_BYTES, VolumeId};
use crate::log::LogStart;
use crate::sync::{Arc, Clock, SystemClock};
use crate::tree::TreeRoot;
use crate::types::{BackgroundMode, CreateOptions, FileType, Timestamp, VolumeOptions};
use std::path::Path;

/// Zeros written at a time.
const ZERO_BYTES: usize = 1 << 20;
/// How much of a device's start, and of its end, is looked at for something that must not be
/// overwritten.
const SNIFF_BYTES: u64 = 128 << 10;
/// How much is looked at elsewhere.
const SAMPLE_BYTES: u64 = 4096;
/// Places elsewhere, spread evenly over the device.
const SAMPLES: u64 = 64;
/// Places where something may begin or has a copy: a partition, and other superblocks of btrfs and
/// ext4.
const LIKELY_BYTES: [u64; 5] = [1 << 20, 2 << 20, 64 << 20, 128 << 20, 256 << 30];

/// Tells how far a long creation is: bytes written, bytes to write.
pub(crate) type Progress<'a> = &'a mut dyn FnMut(u64, u64);

/// See [`crate::Volume::create`].
pub(crate) fn create(path: &Path, options: &CreateOptions, progress: Progress<'_>) -> Result<()> {
    let existing = std::fs::metadata(path).ok();
    let is_device = existing.as_ref().is_some_and(is_block_device);
    match existing {
        None => {
            let size_bytes =
                options.size_bytes.ok_or(Error::Invalid("a new image needs a size"))?;
            geometry_of(size_bytes, options)?;
            let device = PosixDevice::create(path, size_bytes / BLOCK_BYTES_U64 * BLOCK_BYTES_U64)?;
            let device: Arc<dyn Device> = Arc::new(device);
            let result = format(&device, options, progress);
            if result.is_err() {
                // It is ours and no volume; the first error is the one to report.
                let _ = std::fs::remove_file(path);
            }
            result
        }
        Some(_) if !is_device && !options.force => Err(Error::Exists),
        Some(metadata) => {
            // Whoever has it open keeps it, force or not.
            let device = PosixDevice::open(path, OpenMode::ReadWrite)?;
            if is_device && !options.force && !looks_empty(&device)? {
                return Err(Error::Exists);
            }
            let wanted = options.size_bytes.unwrap_or(device.info().size_bytes);
            // Before anything of what is there is cut off.
            geometry_of(wanted, options)?;
            let device = if !is_device && wanted != metadata.len() {
                // Nobody else opens it in between.
                device.resized(path, wanted / BLOCK_BYTES_U64 * BLOCK_BYTES_U64)?
            } else {
                device
            };
            format(&(Arc::new(device) as Arc<dyn Device>), options, progress)
        }
    }
}

fn is_block_device(metadata: &std::fs::Metadata) -> bool {
    use std::os::unix::fs::FileTypeExt;
    metadata.file_type().is_block_device()
}

/// The geometry of a volume of this size; refuses everything that no volume can be made with.
fn geometry_of(size_bytes: u64, options: &CreateOptions) -> Result<Geometry> {
    if size_bytes < MIN_VOLUME_BYTES {
        return Err(Error::Invalid("a volume needs at least 1 MiB"));
    }
    if options.label.len() > MAX_LABEL_BYTES || options.label.contains('\0') {
        return Err(Error::Invalid("a label has at most 64 bytes, none of them zero"));
    }
    let total_blocks = size_bytes / BLOCK_BYTES_U64;
    let log_blocks = options
        .log_bytes
        .map_or_else(|| default_log_blocks(total_blocks), |bytes| bytes / BLOCK_BYTES_U64);
    Geometry::new(total_blocks, log_blocks).map_err(|_| {
        Error::Invalid(
            "the log needs 256 KiB to an eighth of the volume, and the volume at most 20.9 PiB",
        )
    })
}

/// Nothing but zeros at the start, where file systems and partition tables have their marks, at the
/// end, where RAID members and backups of partition tables have theirs, and wherever else a sample
/// is taken. A device whose data is all between the samples looks empty.
fn looks_empty(device: &dyn Device) -> Result<bool> {
    let device_bytes = device.info().size_bytes;
    let mut bytes = AlignedBuf::zeroed(SNIFF_BYTES as usize);
    let mut is_zero = |offset_bytes: u64, length_bytes: u64| -> Result<bool> {
        let length_bytes = length_bytes.min(device_bytes.saturating_sub(offset_bytes));
        let part = &mut bytes[..length_bytes as usize];
        device.read(offset_bytes, &mut [&mut *part], IoClass::SyncRead)?;
        Ok(part.iter().all(|&byte| byte == 0))
    };
    for offset_bytes in [0, device_bytes.saturating_sub(SNIFF_BYTES)] {
        if !is_zero(offset_bytes, SNIFF_BYTES)? {
            return Ok(false);
        }
    }
    let step_bytes = device_bytes / SAMPLES / BLOCK_BYTES_U64 * BLOCK_BYTES_U64;
    let spread = (1..SAMPLES).map(|sample| sample * step_bytes);
    for offset_bytes in LIKELY_BYTES.into_iter().chain(spread) {
        if offset_bytes < device_bytes && !is_zero(offset_bytes, SAMPLE_BYTES)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Sixteen random bytes from the kernel.
fn random_id() -> Result<VolumeId> {
    use std::io::Read;
    let mut id = [0; 16];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut id)?;
    Ok(id)
}

/// See [`crate::Volume::format_device`].
pub(crate) fn format(
    device: &Arc<dyn Device>,
    options: &CreateOptions,
    progress: Progress<'_>,
) -> Result<()> {
    let device_bytes = device.info().size_bytes;
    let size_bytes = options.size_bytes.unwrap_or(device_bytes);
    let geometry = geometry_of(size_bytes, options)?;
    if size_bytes / BLOCK_BYTES_U64 * BLOCK_BYTES_U64 > device_bytes {
        return Err(Error::Invalid("the volume would be larger than the device"));
    }
    let volume_id = match options.volume_id {
        Some(id) => id,
        None => random_id()?,
    };
    write_zeros(&**device, &geometry, options.prewrite, progress)?;
    device.flush()?;

    let clock = SystemClock::default();
    let created_ns = if options.volume_id.is_some() { 0 } else { clock.realtime_ns() };
    let superblock = Superblock {
        volume_id,
        // The checkpoint below publishes generation 2, in slot 0.
        generation: 1,
        geometry,
        features: Features::default(),
        created_ns: created_ns as u64,
        label: options.label.clone(),
        root: RootPointer { block: geometry.root_block(1), generation: 0, checksum: 0 },
        log_epoch: 1,
        epoch_first_sequence: 1,
        durable_sequence: 0,
        replay_epoch: 0,
        replay: ReplayPoint { position_blocks: 0, sequence: 1, prev_digest: 0 },
        durable_lsn: 0,
        clean: true,
        errors_seen: false,
    };
    let log_start = LogStart {
        point: crate::log::ring::ReplayPoint { position_blocks: 0, sequence: 1, prev_digest: 0 },
        epoch: 1,
        next_lsn: 1,
        transaction: 1,
        live_blocks: 0,
    };
    let parts = Parts {
        superblock,
        tree: TreeRoot::EMPTY,
        next_inode: crate::Volume::ROOT + 1,
        inode_count: 1,
        alloc: Allocator::format(device.clone(), &geometry, volume_id),
        log_start,
    };
    let volume_options = VolumeOptions {
        memory_bytes: Some(1 << 20),
        background: BackgroundMode::Manual,
        ..VolumeOptions::default()
    };
    let engine = assemble(device.clone(), volume_options, parts);
    let root = root_directory(options, Timestamp::from_ns(created_ns));
    engine.store.replay(Key::inode(crate::Volume::ROOT), Some(&root.encode()));
    engine.wait_checkpoint(engine.checkpointer.goal())?;
    let published = engine.superblock.lock().clone();
    let generation = published.generation + 1;
    engine.write_superblock(&Superblock { generation, clean: true, ..published })
}

fn root_directory(options: &CreateOptions, now: Timestamp) -> InodeItem {
    InodeItem {
        file_type: FileType::Directory,
        permissions: 0o755,
        links: 2,
        uid: options.root_uid,
        gid: options.root_gid,
        size: 0,
        blocks: 0,
        parent: crate::Volume::ROOT,
        change_counter: 1,
        atime: now,
        mtime: now,
        ctime: now,
        btime: now,
        rdev: 0,
        flags: 0,
        subdirectories: 0,
    }
}

/// Superblock places first, so that an older volume is gone, also after a power cut, before anything else of it; then the log ring, or with
/// `everything` the whole volume.
fn write_zeros(
    device: &dyn Device,
    geometry: &Geometry,
    everything: bool,
    progress: Progress<'_>,
) -> Result<()> {
    let total = geometry.total_blocks();
    let head = 0..geometry.root_start_block();
    let tail = total - TAIL_BLOCKS..total;
    let ring = geometry.log_start_block()..geometry.log_start_block() + geometry.log_blocks();
    let middle = head.end..tail.start;
    let written = if everything { middle } else { ring };
    let places = [head, tail];
    let blocks: u64 = places.iter().chain([&written]).map(|area| area.end - area.start).sum();
    let zeros = AlignedBuf::zeroed(ZERO_BYTES);
    let mut done = 0;
    let mut step = |bytes| {
        done += bytes;
        progress(done, blocks * BLOCK_BYTES_U64);
    };
    forget_older_superblock(device)?;
    for area in places {
        write_area(device, &zeros, area, &mut step)?;
    }
    forget_older_volume(device, geometry)?;
    device.flush()?;
    write_area(device, &zeros, written, &mut step)
}

/// Of a volume that is there the newest superblock goes last: with the one before it, which a power cut may leave alone otherwise, it is not what
/// it was.
fn forget_older_superblock(device: &dyn Device) -> Result<()> {
    let Ok((newest, _)) = superblock::choose_superblock(device) else { return Ok(()) };
    let zeros = AlignedBuf::zeroed(BLOCK_BYTES);
    for block in newest.other_places() {
        write_area(device, &zeros, block..block + 1, &mut |_| {})?;
    }
    Ok(device.flush()?)
}

/// A volume that filled the device has mirrors of its superblocks behind the end of a smaller one: without its slots it would be found by
/// them. What else is there is nobody's business.
fn forget_older_volume(device: &dyn Device, geometry: &Geometry) -> Result<()> {
    let device_blocks = device.info().size_bytes / BLOCK_BYTES_U64;
    let mut block = AlignedBuf::zeroed(BLOCK_BYTES);
    for slot in [0, 1] {
        let mirror = (device_blocks - TAIL_BLOCKS) + Geometry::superblock_block(slot);
        if mirror < geometry.total_blocks() {
            continue;
        }
        let offset_bytes = mirror * BLOCK_BYTES_U64;
        device.read(offset_bytes, &mut [&mut block], IoClass::SyncRead)?;
        if block.starts_with(&superblock::MAGIC) {
            write_area(device, &AlignedBuf::zeroed(BLOCK_BYTES), mirror..mirror + 1, &mut |_| {})?;
        }
    }
    Ok(())
}

fn write_area(
    device: &dyn Device,
    zeros: &[u8],
    area: std::ops::Range<u64>,
    step: &mut dyn FnMut(u64),
) -> Result<()> {
    let mut offset_bytes = area.start * BLOCK_BYTES_U64;
    let end_bytes = area.end * BLOCK_BYTES_U64;
    while offset_bytes < end_bytes {
        let length = (zeros.len() as u64).min(end_bytes - offset_bytes);
        device.write(offset_bytes, &[&zeros[..length as usize]], IoClass::Background, false)?;
        offset_bytes += length;
        step(length);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_device_looks_empty_only_without_anything_at_its_start_its_end_and_the_samples() {
        const DEVICE_BYTES: u64 = 200 << 20;
        let path = std::env::temp_dir().join(format!("weir-sniff-{}", std::process::id()));
        let device = PosixDevice::create(&path, DEVICE_BYTES).expect("an image");
        let file = std::fs::OpenOptions::new().write(true).open(&path).expect("the image");
        assert_eq!(looks_empty(&device), Ok(true));
        for marked_bytes in [
            510,
            64 << 10,
            (128 << 10) - 1,
            1 << 20,
            64 << 20,
            128 << 20,
            100 << 20,
            DEVICE_BYTES - (128 << 10),
            DEVICE_BYTES - 512,
        ] {
            file.write_all_at(&[1], marked_bytes).expect("written");
            assert_eq!(looks_empty(&device), Ok(false), "a mark at {marked_bytes}");
            file.write_all_at(&[0], marked_bytes).expect("written");
        }
        assert_eq!(looks_empty(&device), Ok(true));
        std::fs::remove_file(&path).expect("removed");
    }
}
