//! Whatever bytes a device holds: the check, recovery, reading and writing end, with an error or
//! with correct data; they never panic, hang, or ask for absurd amounts of memory.
//!
//! `WEIR_FLIPS` sets the number of cases of each property (default 150).
//!
//! This module has the test binary's allocator: a wrapper that remembers the largest request. Its
//! `unsafe` is that of `GlobalAlloc`, passed on unchanged to the system's allocator.

use crate::image::{Image, read, write};
use crate::sample::{MIB, closed, formatted, manual, open, populate};
use proptest::prelude::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;
use weir::check::{CheckOptions, check_device};
use weir::device::Device;
use weir::device::memory::MemoryDevice;
use weir::format::frame::{FRAME_HEADER_BYTES, FrameHeader};
use weir::format::item::Dirent;
use weir::format::record::{Checksums, Record};
use weir::format::superblock::choose_superblock;
use weir::format::{BLOCK_BYTES, Key, Kind};
use weir::{AllocateMode, Error, FileType, OpenFlags, RenameMode, Timestamp, Volume, XattrMode};

struct Watched;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator with the same arguments.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

/// No part of a volume of 4 MiB justifies a request of this size.
const ABSURD_BYTES: usize = 96 << 20;
/// A case takes milliseconds; one that takes this long never ends.
const HANG: Duration = Duration::from_secs(30);
/// Where a walk through a damaged volume stops: it may have cycles.
const MAX_VISITED: usize = 2000;

fn cases() -> ProptestConfig {
    let cases = std::env::var("WEIR_FLIPS").ok().and_then(|text| text.parse().ok()).unwrap_or(150);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

type Contents = BTreeMap<String, Result<Vec<(u64, Vec<u8>)>, Error>>;

/// Reads everything that is reachable.
fn contents(volume: &Volume) -> Contents {
    let mut found = Contents::new();
    let mut queue = vec![(String::new(), Volume::ROOT)];
    while let Some((path, inode)) = queue.pop() {
        if found.len() >= MAX_VISITED {
            break;
        }
        let mut entries = Vec::new();
        let listed = volume.readdir(inode, 0, &mut |entry| {
            entries.push(entry);
            entries.len() < MAX_VISITED
        });
        if let Err(error) = listed {
            found.insert(path.clone(), Err(error));
        }
        for entry in entries {
            let path = format!("{path}/{}", String::from_utf8_lossy(&entry.name));
            if let Ok(names) = volume.listxattr(entry.ino) {
                for name in names {
                    let _ = volume.getxattr(entry.ino, &name);
                }
            }
            let data = match volume.getattr(entry.ino).map(|attr| attr.file_type) {
                Ok(FileType::Directory) => {
                    if path.len() < 200 {
                        queue.push((path, entry.ino));
                    }
                    continue;
                }
                Ok(FileType::Regular) => file_data(volume, entry.ino),
                Ok(FileType::Symlink) => volume.readlink(entry.ino).map(|target| vec![(0, target)]),
                Ok(_) => Ok(Vec::new()),
                Err(error) => Err(error),
            };
            found.insert(path, data);
        }
    }
    found
}

/// The parts of a file that are no holes, as far as they fit into a few MiB.
fn file_data(volume: &Volume, inode: u64) -> Result<Vec<(u64, Vec<u8>)>, Error> {
    let file = volume.open_inode(inode, false)?;
    let mut parts = Vec::new();
    let mut offset = 0;
    while parts.len() < 50 {
        let start = match file.seek_data(offset) {
            Ok(start) => start,
            Err(Error::NoSuchExtent) => break,
            Err(error) => return Err(error),
        };
        let end = file.seek_hole(start)?;
        let mut bytes = vec![0; (end - start).min(256 << 10) as usize];
        let count = file.read_at(start, &mut bytes)?;
        bytes.truncate(count);
        parts.push((start, bytes));
        offset = end;
    }
    Ok(parts)
}

/// Uses the volume: makes, changes and removes things, in the hope that something breaks.
fn exercise(volume: &Volume) {
    let _ = volume.create_dir("/new", 0o755);
    for path in ["/new/file", "/dir/file", "/small", "/sparse", "/reserved"] {
        if let Ok(file) = volume.open_file(path, OpenFlags::CREATE) {
            let _ = file.write_at(3000, &[1; 9000]);
            let _ = file.fsync();
            let _ = file.truncate(5000);
        }
    }
    let _ = volume.rename_path("/dir/sub", "/new/sub");
    let _ = volume.checkpoint();
    exercise_files(volume);
    exercise_names(volume);
    let names = volume.read_dir("/").unwrap_or_default();
    for entry in names.iter().take(50) {
        let _ = volume.unlink(Volume::ROOT, &entry.name);
        let _ = volume.rmdir(Volume::ROOT, &entry.name);
    }
    let _ = volume.sync();
    let _ = volume.close();
}

/// All that a file can be asked for besides.
fn exercise_files(volume: &Volume) {
    let modes = [
        AllocateMode::Extend,
        AllocateMode::KeepSize,
        AllocateMode::PunchHole,
        AllocateMode::ZeroRange,
        AllocateMode::ZeroRangeKeepSize,
        AllocateMode::CollapseRange,
        AllocateMode::InsertRange,
    ];
    let open = |path| volume.open_file(path, OpenFlags::READ_WRITE);
    let Ok(target) = volume.open_file("/copy", OpenFlags::CREATE) else { return };
    for path in ["/dir/file", "/small", "/sparse", "/reserved", "/gone"] {
        let Ok(file) = open(path) else { continue };
        for mode in modes {
            let _ = file.allocate(mode, 4096, 8192);
        }
        let _ = file.copy_range(0, &target, 100, 70_000);
        let _ = file.append(&[3; 5000]);
        let _ = file.fsync();
    }
}

/// All that can be done with names, also of what is no directory.
fn exercise_names(volume: &Volume) {
    let dirs: Vec<u64> = ["/", "/dir", "/dir/sub", "/empty", "/new", "/new/sub"]
        .into_iter()
        .filter_map(|path| volume.resolve(path, true).ok())
        .collect();
    let listed = |dir| {
        let mut entries = Vec::new();
        let _ = volume.readdir(dir, 0, &mut |entry| {
            entries.push(entry);
            entries.len() < 8
        });
        entries
    };
    let modes = [RenameMode::Exchange, RenameMode::NoReplace, RenameMode::Replace];
    for &dir in &dirs {
        for (number, entry) in listed(dir).into_iter().enumerate() {
            let to = dirs[number % dirs.len()];
            let _ = volume.link(entry.ino, to, b"linked");
            let _ = volume.setxattr(entry.ino, b"user.new", &[5; 300], XattrMode::Set);
            let _ = volume.removexattr(entry.ino, b"user.color");
            for mode in modes {
                for other in listed(to).iter().take(3) {
                    let _ = volume.rename(dir, &entry.name, to, &other.name, mode);
                }
            }
            let _ = volume.rmdir(dir, &entry.name);
            let mut batch = volume.batch();
            let _ = batch.rename(dir, &entry.name, to, b"moved", RenameMode::Replace);
            let _ = batch.rmdir(to, b"moved");
            let _ = batch.commit();
        }
    }
    let _ = volume.checkpoint();
}

/// Checks, opens, reads and uses the volume. Answers what could be read.
fn survive(image: &[u8], read_only: bool) -> Option<Contents> {
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::from_image(image));
    let report = check_device(&device, &CheckOptions::default());
    if let Ok(report) = &report {
        report.problems.iter().for_each(|problem| drop(problem.to_string()));
    }
    let options = weir::VolumeOptions { read_only, ..manual() };
    let volume = Volume::open_device(device, options).ok()?;
    let found = contents(&volume);
    exercise(&volume);
    Some(found)
}

/// Runs `work` on a thread of its own and makes a hang a failure.
fn watched<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let result = work();
        let _ = sender.send(());
        result
    });
    let ended = receiver.recv_timeout(HANG) != Err(mpsc::RecvTimeoutError::Timeout);
    assert!(ended, "it hangs");
    let result = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    let largest = LARGEST.load(Ordering::Relaxed);
    assert!(largest < ABSURD_BYTES, "{largest} bytes were asked for at once");
    result
}

/// A closed volume, and one that crashed with a log to replay.
fn images() -> &'static [Vec<u8>; 2] {
    static IMAGES: OnceLock<[Vec<u8>; 2]> = OnceLock::new();
    IMAGES.get_or_init(|| {
        let device = formatted(2 * MIB);
        let volume = open(&device);
        populate(&volume);
        volume.sync().expect("sync");
        drop(volume);
        [closed().image(), device.image()]
    })
}

#[derive(Debug, Clone, Copy)]
enum Hit {
    Bit,
    Byte(u8),
    Zero,
    CopyOf(u32),
}

/// (which block, where in it, what)
fn hits() -> impl Strategy<Value = Vec<(u32, u16, Hit)>> {
    let hit = prop_oneof![
        4 => Just(Hit::Bit),
        2 => any::<u8>().prop_map(Hit::Byte),
        1 => Just(Hit::Zero),
        1 => any::<u32>().prop_map(Hit::CopyOf),
    ];
    prop::collection::vec((any::<u32>(), any::<u16>(), hit), 1..6)
}

fn apply_hits(image: &mut [u8], hits: &[(u32, u16, Hit)]) {
    let used: Vec<usize> = (0..image.len() / BLOCK_BYTES)
        .filter(|block| image[block * BLOCK_BYTES..][..BLOCK_BYTES].iter().any(|&byte| byte != 0))
        .collect();
    let pick = |selector: u32| used[selector as usize % used.len()] * BLOCK_BYTES;
    for (selector, offset, hit) in hits {
        let block = pick(*selector);
        let at = block + usize::from(*offset) % BLOCK_BYTES;
        match hit {
            Hit::Bit => image[at] ^= 1 << (offset >> 13),
            Hit::Byte(value) => image[at] = *value,
            Hit::Zero => image[block..block + BLOCK_BYTES].fill(0),
            Hit::CopyOf(other) => {
                image.copy_within(pick(*other)..pick(*other) + BLOCK_BYTES, block);
            }
        }
    }
}

fn generation(image: &[u8]) -> Option<u64> {
    choose_superblock(&MemoryDevice::from_image(image))
        .ok()
        .map(|(superblock, _)| superblock.generation)
}

proptest! {
    #![proptest_config(cases())]

    /// Raw damage: checksums tell.
    #[test]
    fn damaged_blocks_give_errors_or_what_was_written(
        crashed in any::<bool>(),
        read_only in any::<bool>(),
        hits in hits(),
    ) {
        static UNDAMAGED: OnceLock<Contents> = OnceLock::new();
        let expected = UNDAMAGED.get_or_init(|| survive(&images()[0], true).expect("it opens"));
        let original = &images()[usize::from(crashed)];
        let mut image = original.clone();
        apply_hits(&mut image, &hits);
        // An older superblock leads to an older state, and a shorter log too.
        let comparable = !crashed && generation(&image) == generation(original);
        let found = watched(move || survive(&image, read_only));
        for (path, data) in found.filter(|_| comparable).unwrap_or_default() {
            if let Ok(data) = data {
                prop_assert_eq!(Some(&Ok(data)), expected.get(&path), "{}", path);
            }
        }
    }
}

/// A change of the tree's items.
#[derive(Debug, Clone)]
enum Edit {
    Byte(u16, u8),
    Field(u16, u64),
    Cut(u16),
    Remove,
    Move(u64, i64, u8),
    CopyTo(u64, i64),
}

fn interesting() -> impl Strategy<Value = u64> {
    prop_oneof![
        0_u64..300,
        Just(u64::MAX),
        Just(i64::MAX as u64),
        Just(1 << 51),
        Just(u64::MAX - 4095),
        any::<u64>()
    ]
}

fn edits() -> impl Strategy<Value = Vec<(u32, Edit)>> {
    let edit = prop_oneof![
        3 => (any::<u16>(), any::<u8>()).prop_map(|(at, value)| Edit::Byte(at, value)),
        4 => (any::<u16>(), interesting()).prop_map(|(at, value)| Edit::Field(at, value)),
        1 => any::<u16>().prop_map(Edit::Cut),
        1 => Just(Edit::Remove),
        1 => (0_u64..20, -3_i64..3, 0_u8..8).prop_map(|(a, b, c)| Edit::Move(a, b, c)),
        1 => (0_u64..20, -3_i64..3).prop_map(|(a, b)| Edit::CopyTo(a, b)),
    ];
    prop::collection::vec((any::<u32>(), edit), 1..5)
}

fn apply_edits(items: &mut BTreeMap<Key, Vec<u8>>, edits: &[(u32, Edit)]) {
    for (selector, edit) in edits {
        let Some(key) = items.keys().nth(*selector as usize % items.len().max(1)).copied() else {
            return;
        };
        let mut value = items[&key].clone();
        let length = value.len().max(1);
        match edit {
            Edit::Byte(at, byte) => {
                if let Some(place) = value.get_mut(usize::from(*at) % length) {
                    *place = *byte;
                }
                items.insert(key, value);
            }
            Edit::Field(at, field) => {
                let at = usize::from(*at) % length / 8 * 8;
                if let Some(place) = value.get_mut(at..at + 8) {
                    place.copy_from_slice(&field.to_le_bytes());
                }
                items.insert(key, value);
            }
            Edit::Cut(length_wanted) => {
                value.truncate(usize::from(*length_wanted) % length);
                items.insert(key, value);
            }
            Edit::Remove => drop(items.remove(&key)),
            Edit::Move(inode, offset, kind) => {
                items.remove(&key);
                let kind = Kind::from_u8(*kind).unwrap_or(key.kind);
                items
                    .insert(Key::new(*inode, kind, key.offset.wrapping_add_signed(*offset)), value);
            }
            Edit::CopyTo(inode, offset) => {
                let offset = key.offset.wrapping_add_signed(*offset);
                items.insert(Key::new(*inode, key.kind, offset), value);
            }
        }
    }
    if items.is_empty() {
        items.insert(Key::inode(1), vec![0; 192]);
    }
}

/// A batch asked for the lock of what it names again and again: the name says that it is a directory, and it is a file.
#[test]
fn a_batch_ends_where_a_name_lies_about_what_it_names() {
    watched(|| {
        let mut image = Image::load(&Arc::new(MemoryDevice::from_image(&images()[0])));
        let item = image.items[&Key::inode(image.find("/small"))].clone();
        image.items.insert(Key::inode(image.find("/empty")), item);
        image.store();
        let volume = Volume::open_device(image.device.clone(), manual()).expect("open");
        let root = Volume::ROOT;
        let mut batch = volume.batch();
        batch.rmdir(root, b"empty").expect("recorded");
        let failed = batch.commit().expect_err("it is a file");
        assert!(failed.error == Error::NotDirectory && failed.step.is_some(), "{failed}");
        let mut batch = volume.batch();
        batch.rename(root, b"dir", root, b"empty", RenameMode::Replace).expect("recorded");
        // As what it is or as what it is called: it ends.
        let _ = batch.commit();
        assert!(volume.shutdown_reason().is_none());
    });
}

proptest! {
    #![proptest_config(cases())]

    /// Damage under right checksums, as a bug or an attacker makes it.
    #[test]
    fn items_that_lie_never_make_it_panic_or_hang(
        edits in edits(),
        next_inode in prop::option::of(interesting()),
        inode_count in prop::option::of(interesting()),
        bits in prop::collection::vec(80_u64..500, 0..3),
        read_only in prop::bool::weighted(0.2),
    ) {
        watched(move || {
            let mut image = Image::load(&Arc::new(MemoryDevice::from_image(&images()[0])));
            apply_edits(&mut image.items, &edits);
            image.root.next_inode = next_inode.unwrap_or(image.root.next_inode);
            image.root.inode_count = inode_count.unwrap_or(image.root.inode_count);
            image.wrong_bits = bits;
            image.store();
            survive(&image.device.image(), read_only)
        });
    }

    /// Records that no engine ever wrote, under right checksums.
    #[test]
    fn records_that_lie_never_make_it_panic_or_hang(
        records in prop::collection::vec(forged(), 1..8),
        lsn in prop::option::of(interesting()),
        read_only in prop::bool::weighted(0.2),
    ) {
        let frame = ForgedFrame { records, last_lsn: lsn, ..ForgedFrame::default() };
        watched(move || survive(&with_frames(&[frame]), read_only));
    }

    /// Frames of a log that no engine ever wrote: numbers that go back, chains without an end, gaps.
    #[test]
    fn frames_that_lie_never_make_it_panic_or_hang(
        frames in prop::collection::vec(forged_frame(), 1..12),
        read_only in prop::bool::weighted(0.2),
    ) {
        watched(move || survive(&with_frames(&frames), read_only));
    }
}

/// Entries of directories that will be made only now: the first image's names, under the numbers that are given out next.
#[test]
fn entries_of_inodes_that_are_still_to_be_made_never_make_it_panic_or_hang() {
    watched(|| {
        let mut image = Image::load(&Arc::new(MemoryDevice::from_image(&images()[0])));
        let next = image.root.next_inode;
        let names = image.items.iter().filter(|(key, _)| key.kind == Kind::Dirent);
        let copies: Vec<(Key, Vec<u8>)> = names
            .flat_map(|(key, value)| {
                (next..next + 8).map(|inode| (Key { inode, ..*key }, value.clone()))
            })
            .collect();
        assert!(!copies.is_empty());
        image.items.extend(copies);
        image.store();
        survive(&image.device.image(), false)
    });
}

/// Were they taken, what such a log holds would never be behind a checkpoint, and whoever needs its space would wait for ever.
#[test]
fn frames_whose_operations_go_back_are_refused() {
    let opened = |first_lsn| {
        let frames = [ForgedFrame::default(), ForgedFrame { first_lsn, ..ForgedFrame::default() }];
        let device: Arc<dyn Device> = Arc::new(MemoryDevice::from_image(&with_frames(&frames)));
        Volume::open_device(device, manual()).map(drop)
    };
    assert_eq!(opened(None), Ok(()));
    for first_lsn in [0, 1] {
        let refused = opened(Some(first_lsn));
        assert!(
            matches!(&refused, Err(Error::Corrupt(text)) if text.contains("behind one that ends"))
        );
    }
}

/// Directories that say they are in each other, though they are reached from the root.
#[test]
fn a_rename_into_directories_that_contain_each_other_ends() {
    watched(|| {
        let mut image = Image::load(&Arc::new(MemoryDevice::from_image(&images()[0])));
        let (outer, inner) = (image.find("/dir"), image.find("/dir/sub"));
        image.edit_inode(outer, |item| item.parent = inner);
        image.store();
        let volume = open(&image.device);
        let renamed = volume.rename_path("/empty", "/dir/sub/empty");
        assert!(matches!(renamed, Err(Error::Corrupt(_))), "{renamed:?}");
        assert!(volume.read_dir("/empty").is_ok(), "nothing has changed");
    });
}

/// An entry that names the directory it is in. Whoever would remove it, or put something in its place, has that directory's lock already.
#[test]
fn a_directory_that_contains_itself_is_neither_removed_nor_replaced() {
    watched(|| {
        let mut image = Image::load(&Arc::new(MemoryDevice::from_image(&images()[0])));
        let dir = image.find("/dir");
        let (key, _) = image.entry(dir, "sub");
        let entry = Dirent { inode: dir, file_type: FileType::Directory, name: b"sub" };
        image.items.insert(key, entry.encode().to_vec());
        // As if there were nothing in it.
        image.edit_inode(dir, |item| item.size = 0);
        image.store();
        let volume = open(&image.device);
        let itself = |result| assert!(matches!(result, Err(Error::Corrupt(_))), "{result:?}");
        itself(volume.remove_dir("/dir/sub"));
        itself(volume.rename_path("/empty", "/dir/sub"));
        let mut batch = volume.batch();
        batch.rmdir(dir, b"sub").expect("a step");
        itself(batch.commit().map(drop).map_err(Error::from));
        let mut batch = volume.batch();
        batch.rename(Volume::ROOT, b"empty", dir, b"sub", RenameMode::Replace).expect("a step");
        itself(batch.commit().map(drop).map_err(Error::from));
        assert!(volume.read_dir("/empty").is_ok(), "nothing has changed");
    });
}

/// Times between which lie more seconds than can be counted.
#[test]
fn times_at_both_ends_of_what_can_be_are_read() {
    watched(|| {
        let mut image = Image::load(&Arc::new(MemoryDevice::from_image(&images()[0])));
        let dir = image.find("/dir");
        let at = |seconds| Timestamp { seconds, nanoseconds: 0 };
        image.edit_inode(dir, |item| {
            (item.mtime, item.ctime, item.atime) = (at(i64::MIN), at(i64::MIN), at(i64::MIN + 1));
        });
        image.store();
        let volume = open(&image.device);
        assert!(volume.read_dir("/dir").is_ok());
    });
}

/// Counts of the tree that no volume can have.
#[test]
fn a_tree_that_counts_more_than_there_can_be_is_refused() {
    for counts in [(i64::MAX, 0, 0), (-1000, 0, 0), (0, i64::MAX, 0), (0, -1000, 0), (0, 5000, 0)] {
        watched(move || {
            let mut image = Image::load(&Arc::new(MemoryDevice::from_image(&images()[0])));
            image.wrong_counts = counts;
            image.store();
            assert!(survive(&image.device.image(), false).is_none(), "{counts:?}");
        });
    }
}

#[derive(Debug, Clone)]
struct Forged {
    kind: u8,
    key: (u64, u8, u64),
    first: u64,
    second: u64,
    value: Vec<u8>,
}

fn forged() -> impl Strategy<Value = Forged> {
    let number = || prop_oneof![4 => 0_u64..20, 1 => interesting()];
    let place = || prop_oneof![4 => 80_u64..300, 1 => interesting()];
    let value = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..40),
        prop::collection::vec(any::<u8>(), 192..=192),
        prop::collection::vec(any::<u8>(), 1000..4600),
    ];
    (0_u8..10, (number(), 1_u8..7, number()), place(), number(), value)
        .prop_map(|(kind, key, first, second, value)| Forged { kind, key, first, second, value })
}

/// A frame: `None` stands for what the engine would have written.
#[derive(Debug, Clone, Default)]
struct ForgedFrame {
    records: Vec<Forged>,
    first_lsn: Option<u64>,
    last_lsn: Option<u64>,
    durable_lsn: Option<u64>,
    continues: bool,
    /// Blocks between it and the frame before.
    gap: u64,
}

fn forged_frame() -> impl Strategy<Value = ForgedFrame> {
    let lsn = || prop::option::weighted(0.4, interesting());
    let records = prop::collection::vec(forged(), 0..4);
    let continues = prop::bool::weighted(0.2);
    (records, lsn(), lsn(), prop::option::weighted(0.1, interesting()), continues, 0_u64..3)
        .prop_map(|(records, first_lsn, last_lsn, durable_lsn, continues, gap)| ForgedFrame {
            records,
            first_lsn,
            last_lsn,
            durable_lsn,
            continues,
            gap,
        })
}

/// A volume whose log holds these frames, with payload for records that need it.
fn with_frames(frames: &[ForgedFrame]) -> Vec<u8> {
    static BASE: OnceLock<Vec<u8>> = OnceLock::new();
    let base = BASE.get_or_init(|| {
        let device = formatted(2 * MIB);
        let volume = open(&device);
        populate(&volume);
        volume.checkpoint().expect("checkpoint");
        drop(volume.open_file("/last", OpenFlags::CREATE).expect("create"));
        volume.sync().expect("sync");
        drop(volume);
        device.image()
    });
    let device = MemoryDevice::from_image(base);
    let (superblock, _) = choose_superblock(&device).expect("superblock");
    let ring = superblock.geometry.log_start_block();
    let mut position = superblock.replay.position_blocks;
    let mut header =
        FrameHeader::peek(&read(&device, ring + position, BLOCK_BYTES)).expect("a frame");
    for (number, forged) in frames.iter().enumerate() {
        let (bytes, count) = encoded(&forged.records);
        position += if number > 0 { forged.gap } else { 0 };
        header.ring_position_blocks = position;
        let next_lsn = if number > 0 { header.last_lsn + 1 } else { header.first_lsn };
        header.first_lsn = forged.first_lsn.unwrap_or(next_lsn);
        let last_lsn = forged.last_lsn.unwrap_or(header.first_lsn).max(header.first_lsn);
        header.last_lsn = last_lsn.min((1 << 62) - 1);
        header.first_lsn = header.first_lsn.min(header.last_lsn);
        header.durable_lsn = forged.durable_lsn.unwrap_or(header.durable_lsn);
        header.continues = forged.continues;
        header.meta_bytes = (FRAME_HEADER_BYTES + bytes.len()) as u32;
        header.record_count = count;
        header.payload_blocks = 1;
        let blocks = header.total_blocks();
        if position + blocks > superblock.geometry.log_blocks() {
            break;
        }
        let mut frame = vec![0; blocks as usize * BLOCK_BYTES];
        frame[FRAME_HEADER_BYTES..][..bytes.len()].copy_from_slice(&bytes);
        header.prev_digest = header.seal(&mut frame).expect("seal");
        header.sequence += 1;
        write(&device, ring + position, &frame);
        position += blocks;
    }
    device.image()
}

/// Records and how many they are.
fn encoded(records: &[Forged]) -> (Vec<u8>, u32) {
    let mut bytes = Vec::new();
    let mut count = 0;
    for forged in records {
        let (inode, kind, offset) = forged.key;
        let key = Key::new(inode, Kind::from_u8(kind).unwrap_or(Kind::Inode), offset);
        let (block, length_blocks) = (forged.first, forged.second as u32);
        let home_block = forged.first;
        let checksum = weir::format::checksum(&[0; BLOCK_BYTES]);
        let sums = [checksum; 3];
        let record = match forged.kind {
            0 | 1 => Record::Put { key, value: &forged.value },
            2 => Record::Delete { key },
            3 => Record::Alloc { block, length_blocks },
            4 => Record::Free { block, length_blocks },
            5 => Record::Payload { inode, file_block: offset, home_block, index: 0, checksum },
            6 => Record::Wrote { block, checksums: Checksums::Values(&sums) },
            7 => Record::Home { inode, file_block: offset, block, checksum },
            8 => Record::NextInode { next_inode: forged.first },
            _ => Record::Settled { inode, file_block: offset, length_blocks: forged.first },
        };
        count += record.encode(&mut bytes).expect("encode");
    }
    (bytes, count)
}
