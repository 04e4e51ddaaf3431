//! Volumes with everything in them.

use std::sync::Arc;
use weir::device::Device;
use weir::device::memory::MemoryDevice;
use weir::sync::Clock;
use weir::{
    AllocateMode, BackgroundMode, CreateOptions, FileType, NewInode, OpenFlags, Volume,
    VolumeOptions, XattrMode,
};

pub const MIB: u64 = 1 << 20;

/// A clock that stands still: images made with it do not depend on when.
#[derive(Debug)]
pub struct FixedClock;

impl Clock for FixedClock {
    fn realtime_ns(&self) -> i64 {
        1_700_000_000_000_000_000
    }
    fn monotonic_ns(&self) -> u64 {
        0
    }
    fn sleep_us(&self, _duration_us: u64) {}
}

pub fn manual() -> VolumeOptions {
    VolumeOptions {
        background: BackgroundMode::Manual,
        memory_bytes: Some(8 * MIB),
        clock: Arc::new(FixedClock),
        ..VolumeOptions::default()
    }
}

pub fn formatted(size_bytes: u64) -> Arc<MemoryDevice> {
    let device = Arc::new(MemoryDevice::new(size_bytes));
    let options = CreateOptions {
        volume_id: Some(*b"a sample volume!"),
        label: "sample".to_owned(),
        ..CreateOptions::default()
    };
    let shared: Arc<dyn Device> = device.clone();
    Volume::format_device(&shared, &options).expect("format");
    device
}

pub fn open(device: &Arc<MemoryDevice>) -> Volume {
    Volume::open_device(device.clone(), manual()).expect("open")
}

/// Bytes that differ from page to page and are never zero; the same all over a page, so that stored
/// images are small.
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    (0..length).map(|index| (seed * 31 + index as u64 / 4096 * 6) as u8 | 1).collect()
}

/// One of every kind of object, with fixed contents. Files stay small: it fits into 1 MiB.
pub fn populate(volume: &Volume) {
    let root = Volume::ROOT;
    volume.create_dir("/dir", 0o755).expect("mkdir");
    volume.create_dir("/dir/sub", 0o700).expect("mkdir");
    volume.create_dir("/empty", 0o2775).expect("mkdir");
    for (path, length) in [("/dir/file", 50_000), ("/dir/sub/deep", 4096), ("/small", 100)] {
        let file = volume.open_file(path, OpenFlags::CREATE).expect("create");
        file.write_at(0, &pattern(length as u64, length)).expect("write");
        file.fsync().expect("fsync");
    }
    let sparse = volume.open_file("/sparse", OpenFlags::CREATE).expect("create");
    sparse.write_at(1 << 40, b"far away").expect("write");
    sparse.write_at(123_456, &pattern(9, 5000)).expect("write");
    sparse.fsync().expect("fsync");
    let reserved = volume.open_file("/reserved", OpenFlags::CREATE).expect("create");
    reserved.write_at(0, &pattern(4, 6000)).expect("write");
    reserved.allocate(AllocateMode::KeepSize, 0, 40_000).expect("allocate");
    let file = volume.resolve("/dir/file", true).expect("resolve");
    volume.link(file, root, b"hard").expect("link");
    volume.symlink(root, b"soft", b"dir/file", 1, 2).expect("symlink");
    for (name, file_type) in [
        (&b"fifo"[..], FileType::Fifo),
        (b"socket", FileType::Socket),
        (b"null", FileType::CharDevice),
    ] {
        let new = NewInode { rdev: 0x103, ..NewInode::new(file_type, 0o600) };
        volume.make(root, name, &new).expect("mknod");
    }
    let small = volume.resolve("/small", true).expect("resolve");
    volume.setxattr(small, b"user.color", b"blue", XattrMode::Create).expect("setxattr");
    volume.setxattr(small, b"user.large", &[7; 4096], XattrMode::Create).expect("setxattr");
    volume.setxattr(root, b"trusted.a", b"", XattrMode::Set).expect("setxattr");
}

/// A closed volume of 4 MiB with [`populate`]'s objects and an unlinked file that was still open.
pub fn closed() -> Arc<MemoryDevice> {
    let device = formatted(4 * MIB);
    let volume = open(&device);
    populate(&volume);
    let gone = volume.open_file("/gone", OpenFlags::CREATE).expect("create");
    gone.write_at(0, &pattern(5, 20_000)).expect("write");
    volume.remove_file("/gone").expect("unlink");
    volume.close().expect("close");
    device
}
