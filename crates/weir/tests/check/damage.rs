//! Every kind of damage, planted one by one under right checksums, is found and called by its name.

use crate::clean::{assert_clean, check};
use crate::image::{Image, flip, read, write};
use crate::sample::{MIB, closed, formatted, manual, open};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;
use weir::check::{CheckOptions, CheckReport, ProblemKind, Stage, check_device};
use weir::device::memory::MemoryDevice;
use weir::device::{Device, DeviceError, DeviceInfo, DeviceResult, IoClass, OnDone, Request};
use weir::format::frame::{FRAME_HEADER_BYTES, FrameHeader};
use weir::format::item::{Dirent, INODE_INLINE, InodeItem, Xattr, name_hash};
use weir::format::record::Record;
use weir::format::superblock::choose_superblock;
use weir::format::{BLOCK_BYTES, BLOCK_BYTES_U64, Key, Kind, checksum};
use weir::{BackgroundWork, Error, FileType, OpenFlags, Volume, VolumeOptions};

const ROOT: u64 = Volume::ROOT;

thread_local! {
    /// Kinds of problems that the tests of this thread have planted and found.
    static PLANTED: RefCell<BTreeSet<ProblemKind>> = const { RefCell::new(BTreeSet::new()) };
}

fn kinds(report: &CheckReport) -> BTreeSet<ProblemKind> {
    report.problems.iter().map(|problem| problem.kind).collect()
}

/// The report names exactly these kinds of problems.
#[track_caller]
fn assert_kinds(what: &str, report: &CheckReport, expected: &[ProblemKind]) {
    PLANTED.with_borrow_mut(|planted| planted.extend(expected));
    let texts: Vec<_> = report.problems.iter().map(ToString::to_string).collect();
    assert_eq!(kinds(report), expected.iter().copied().collect(), "{what}: {texts:#?}");
    assert_eq!(report.problem_count as usize, report.problems.len());
}

/// Edits a closed volume and checks it.
#[track_caller]
fn planted(what: &str, expected: &[ProblemKind], edit: impl FnOnce(&mut Image)) {
    let mut image = Image::load(&closed());
    edit(&mut image);
    image.store();
    assert_kinds(what, &check(&image.device), expected);
}

#[test]
fn a_volume_written_back_by_the_editor_is_clean() {
    let mut image = Image::load(&closed());
    image.store();
    assert_clean(&check(&image.device));
}

#[test]
fn an_entry_may_have_any_collision_index() {
    let mut image = Image::load(&closed());
    let (key, _) = image.entry(ROOT, "fifo");
    let value = image.items.remove(&key).expect("an entry");
    image.items.insert(Key { offset: key.offset + 200, ..key }, value);
    image.store();
    assert_clean(&check(&image.device));
}

#[test]
fn wrong_sums_in_the_root_are_found() {
    use ProblemKind::{InodeCount, InodeNumber, Node, Root, TreeCounts};
    planted("items", &[TreeCounts], |image| image.wrong_counts.0 = 1);
    planted("nodes", &[TreeCounts], |image| image.wrong_counts.1 = -1);
    planted("inodes", &[InodeCount], |image| image.wrong_counts.2 = 1);
    planted("next inode", &[InodeNumber], |image| image.root.next_inode = 5);
    planted("tree", &[Root], |image| image.root.tree.generation = image.root.generation + 1);
    planted("bitmap", &[Root], |image| image.root.groups[0].generation = image.root.generation + 1);
    planted("node", &[Node], |image| image.newer_nodes = 1);
}

/// As a bug would leave it: files that are made would take the places of others.
#[test]
fn a_number_that_is_in_use_is_not_given_out_again() {
    let mut image = Image::load(&closed());
    let orphans = image.items.keys().filter(|key| key.kind == Kind::Orphan);
    let gone: BTreeSet<u64> = orphans.map(|key| key.offset).collect();
    let numbers = image.items.keys().map(|key| key.inode);
    let used = numbers.filter(|number| !gone.contains(number)).max().expect("items");
    image.root.next_inode = 2;
    image.store();
    let volume = open(&image.device);
    let made = volume.create_dir("/made", 0o755).expect("mkdir");
    assert!(made.ino > used, "{} was in use, {} was given out", used, made.ino);
    drop(volume.open_file("/made/file", OpenFlags::CREATE_NEW).expect("create"));
    volume.close().expect("close");
    drop(volume);
    assert_clean(&check(&image.device));
}

#[test]
fn wrong_bits_are_found() {
    use ProblemKind::{Leaked, MarkedFree};
    planted("leak", &[Leaked], |image| {
        image.wrong_bits = vec![image.superblock.geometry.data_end() - 1];
    });
    planted("file block", &[MarkedFree], |image| {
        let (_, extent) = image.extents(image.find("/dir/file"))[0].clone();
        image.wrong_bits = vec![extent.block + 1];
    });
    planted("superblock", &[MarkedFree], |image| image.wrong_bits = vec![0]);
}

type Edit = fn(&mut InodeItem);

#[test]
fn wrong_inodes_are_found() {
    use ProblemKind::{
        BlockCount, EntryCount, EntryType, InodeField, LinkCount, Parent, Size, SubdirectoryCount,
    };
    let edits: [(&str, &[ProblemKind], &str, Edit); 14] = [
        ("links", &[LinkCount], "/dir/file", |item| item.links += 1),
        ("directory links", &[LinkCount], "/dir", |item| item.links += 1),
        ("too many links", &[ProblemKind::Item], "/small", |item| item.links = u32::MAX),
        ("subdirectories", &[SubdirectoryCount], "/dir", |item| item.subdirectories += 1),
        ("entries", &[EntryCount], "/dir", |item| item.size += 1),
        ("parent", &[Parent], "/dir/sub", |item| item.parent = 1),
        ("root's parent", &[Parent], "/", |item| item.parent = 2),
        ("file's parent", &[InodeField], "/small", |item| item.parent = 1),
        ("file's subdirectories", &[InodeField], "/small", |item| item.subdirectories = 1),
        ("inline directory", &[InodeField], "/dir", |item| item.flags = INODE_INLINE),
        ("blocks", &[BlockCount], "/dir/file", |item| item.blocks += 1),
        ("blocks of a directory", &[BlockCount], "/dir", |item| item.blocks = 1),
        ("size of a fifo", &[Size], "/fifo", |item| item.size = 1),
        ("type", &[EntryType], "/fifo", |item| item.file_type = FileType::Socket),
    ];
    for (what, expected, path, edit) in edits {
        planted(what, expected, |image| image.edit_inode(image.find(path), edit));
    }
}

/// What hangs below it is reported on top.
#[test]
fn a_root_that_is_no_directory_is_found() {
    let mut image = Image::load(&closed());
    image.edit_inode(ROOT, |item| item.file_type = FileType::Socket);
    image.store();
    let report = check(&image.device);
    assert!(report.has(ProblemKind::InodeField) && report.has(ProblemKind::Item));
}

#[test]
fn wrong_names_are_found() {
    use ProblemKind::{DanglingEntry, DuplicateName, EntryType, Name, NameHash};
    planted("dangling", &[DanglingEntry], |image| {
        image.items.remove(&Key::inode(image.find("/fifo")));
        image.wrong_counts.2 = -1;
    });
    planted("type", &[EntryType], |image| {
        let (key, inode) = image.entry(ROOT, "fifo");
        let entry = Dirent { inode, file_type: FileType::Socket, name: b"fifo" };
        image.items.insert(key, entry.encode().to_vec());
    });
    planted("hash", &[NameHash], |image| {
        let (key, _) = image.entry(ROOT, "fifo");
        let value = image.items.remove(&key).expect("an entry");
        image.items.insert(Key { offset: key.offset ^ 0x100, ..key }, value);
    });
    for name in [&b"a/b"[..], b"..", b".", b"a\0b"] {
        planted("name", &[Name], |image| {
            let (key, inode) = image.entry(ROOT, "fifo");
            image.items.remove(&key);
            let entry = Dirent { inode, file_type: FileType::Fifo, name };
            image.items.insert(Key { offset: name_hash(name), ..key }, entry.encode().to_vec());
        });
    }
    planted("twice", &[DuplicateName], |image| {
        let (key, inode) = image.entry(ROOT, "fifo");
        let value = image.items[&key].clone();
        image.items.insert(Key { offset: key.offset + 1, ..key }, value);
        image.edit_inode(ROOT, |item| item.size += 1);
        image.edit_inode(inode, |item| item.links += 1);
    });
    planted("attribute hash", &[NameHash], |image| {
        let key = Key::new(ROOT, Kind::Xattr, name_hash(b"user.other"));
        image.items.insert(key, Xattr { name: b"user.one", value: b"" }.encode());
    });
    planted("attribute twice", &[DuplicateName], |image| {
        let key = Key::new(ROOT, Kind::Xattr, name_hash(b"trusted.a") + 9);
        image.items.insert(key, Xattr { name: b"trusted.a", value: b"x" }.encode());
    });
}

/// Whoever copies a tree to the host joins names to paths there.
#[test]
fn a_name_that_leads_out_of_its_directory_is_shown_to_nobody() {
    for name in [&b"../../etc/cron.d/job"[..], b"/etc/passwd", b"..", b".", b"a\0b"] {
        let mut image = Image::load(&closed());
        let (key, inode) = image.entry(ROOT, "fifo");
        image.items.remove(&key);
        let entry = Dirent { inode, file_type: FileType::Fifo, name };
        image.items.insert(Key { offset: name_hash(name), ..key }, entry.encode().to_vec());
        image.store();
        let volume = open(&image.device);
        let mut shown = Vec::new();
        let listed = volume.readdir(ROOT, 0, &mut |entry| {
            shown.push(entry.name);
            true
        });
        assert!(
            matches!(&listed, Err(Error::Corrupt(what)) if what.contains("fsck")),
            "{listed:?}"
        );
        assert!(!shown.iter().any(|shown| shown == name));
        volume.close().expect("close");
    }
}

/// Whoever does not know what a volume has may read it where its maker says so, and must not write to it.
#[test]
fn a_volume_with_features_that_only_its_makers_can_write_is_opened_for_reading_alone() {
    let mut image = Image::load(&closed());
    image.superblock.features.ro_compat |= 1 << 63;
    image.store();
    let before = image.device.image();
    let opened = Volume::open_device(image.device.clone(), manual());
    assert!(matches!(opened, Err(Error::NotAVolume(_))), "{:?}", opened.map(|_| ()));
    let options = VolumeOptions { read_only: true, ..manual() };
    let volume = Volume::open_device(image.device.clone(), options).expect("for reading");
    volume.metadata("/dir/file").expect("metadata");
    volume.close().expect("close");
    assert!(image.device.image() == before, "it was written to");
}

#[test]
fn broken_trees_of_directories_are_found() {
    use ProblemKind::{Cycle, LinkCount, Orphan, Parent, Unreachable};
    planted("lost file", &[Unreachable], |image| {
        let (key, _) = image.entry(ROOT, "small");
        image.items.remove(&key);
        image.edit_inode(ROOT, |item| item.size -= 1);
    });
    planted("lost directory", &[Unreachable], |image| {
        let (key, _) = image.entry(ROOT, "empty");
        image.items.remove(&key);
        image.edit_inode(ROOT, |item| {
            item.size -= 1;
            item.links -= 1;
            item.subdirectories -= 1;
        });
    });
    planted("cycle", &[Cycle], |image| {
        let (key, dir) = image.entry(ROOT, "dir");
        let sub = image.find("/dir/sub");
        let value = image.items.remove(&key).expect("an entry");
        image.items.insert(Key { inode: sub, ..key }, value);
        image.edit_inode(dir, |item| item.parent = sub);
        image.edit_inode(ROOT, |item| {
            item.size -= 1;
            item.links -= 1;
            item.subdirectories -= 1;
        });
        image.edit_inode(sub, |item| {
            item.size += 1;
            item.links += 1;
            item.subdirectories += 1;
        });
    });
    planted("two names of a directory", &[LinkCount], |image| {
        let entry =
            Dirent { inode: image.find("/dir/sub"), file_type: FileType::Directory, name: b"x" };
        image.items.insert(Key::new(ROOT, Kind::Dirent, name_hash(b"x")), entry.encode().to_vec());
        image.edit_inode(ROOT, |item| {
            item.size += 1;
            item.links += 1;
            item.subdirectories += 1;
        });
    });
    planted("directory in itself, with a wrong parent", &[Cycle, Parent], |image| {
        let empty = image.find("/empty");
        let entry = Dirent { inode: empty, file_type: FileType::Directory, name: b"self" };
        image
            .items
            .insert(Key::new(empty, Kind::Dirent, name_hash(b"self")), entry.encode().to_vec());
        image.edit_inode(empty, |item| {
            item.size += 1;
            item.links += 1;
            item.subdirectories += 1;
            item.parent = 77;
        });
        let (key, _) = image.entry(ROOT, "empty");
        image.items.remove(&key);
        image.edit_inode(ROOT, |item| {
            item.size -= 1;
            item.links -= 1;
            item.subdirectories -= 1;
        });
    });
    planted("a name for the root", &[LinkCount, Cycle], |image| {
        let empty = image.find("/empty");
        let entry = Dirent { inode: ROOT, file_type: FileType::Directory, name: b"up" };
        image
            .items
            .insert(Key::new(empty, Kind::Dirent, name_hash(b"up")), entry.encode().to_vec());
        image.edit_inode(empty, |item| {
            item.size += 1;
            item.links += 1;
            item.subdirectories += 1;
        });
    });
    let orphan = |image: &Image| {
        let mut orphans = image.items.range(Key::orphan(0)..=Key::orphan(u64::MAX));
        *orphans.next().expect("an orphan").0
    };
    planted("orphan without entry", &[Orphan], |image| drop(image.items.remove(&orphan(image))));
    planted("orphan without inode", &[Orphan], |image| {
        image.items.insert(Key::orphan(4711), Vec::new());
    });
    planted("orphan that is a directory", &[Orphan], |image| {
        image.items.insert(Key::orphan(image.find("/empty")), Vec::new());
    });
}

#[test]
fn wrong_inline_data_is_found() {
    use ProblemKind::{Inline, Size};
    planted("flag missing", &[Inline], |image| {
        image.edit_inode(image.find("/small"), |item| item.flags = 0);
    });
    planted("data missing", &[Inline], |image| {
        drop(image.items.remove(&Key::inline(image.find("/small"))));
    });
    planted("too long", &[Inline], |image| {
        let small = image.find("/small");
        image.items.insert(Key::inline(small), vec![1; 2049]);
        image.edit_inode(small, |item| item.size = 4000);
    });
    planted("longer than the file", &[Inline], |image| {
        image.edit_inode(image.find("/small"), |item| item.size = 99);
    });
    planted("target of another length", &[Inline], |image| {
        image.edit_inode(image.find("/soft"), |item| item.size += 1);
    });
    planted("empty target", &[Size], |image| {
        let soft = image.find("/soft");
        image.items.insert(Key::inline(soft), Vec::new());
        image.edit_inode(soft, |item| item.size = 0);
    });
    planted("inline and in an extent", &[Inline], |image| {
        let file = image.find("/dir/file");
        image.items.insert(Key::inline(file), vec![1; 10]);
        image.edit_inode(file, |item| item.flags = INODE_INLINE);
    });
}

#[test]
fn wrong_extents_are_found() {
    use ProblemKind::{BlockUsedTwice, ExtentBeyondEnd, ExtentOverlap, ExtentPlace, Leaked};
    let far = |image: &mut Image, block: u64| {
        let (key, mut extent) = image.extents(image.find("/sparse")).pop().expect("an extent");
        extent.block = block;
        image.items.insert(key, extent.encode());
    };
    planted("in the log", &[ExtentPlace, Leaked], |image| {
        far(image, image.superblock.geometry.log_start_block());
    });
    planted("behind the end", &[ExtentPlace, Leaked], |image| {
        far(image, image.superblock.geometry.data_end());
    });
    planted("beyond the device", &[ExtentPlace, Leaked], |image| far(image, 1 << 40));
    planted("overlap", &[ExtentOverlap], |image| {
        let sparse = image.find("/sparse");
        let (key, extent) = image.extents(sparse).pop().expect("an extent");
        image.items.remove(&key);
        image.items.insert(Key::extent(sparse, 31), extent.encode());
    });
    planted("beyond the end", &[ExtentBeyondEnd], |image| {
        image.edit_inode(image.find("/dir/file"), |item| item.size = 8192);
    });
    planted("used twice", &[BlockUsedTwice, Leaked], |image| {
        let (_, theirs) = image.extents(image.find("/dir/file"))[0].clone();
        let (key, _) = image.extents(image.find("/dir/sub/deep"))[0].clone();
        image.items.insert(key, theirs.part(0, 1).encode());
    });
}

#[test]
fn items_that_make_no_sense_are_found() {
    use ProblemKind::{Item, ItemWithoutInode};
    let xattr = Xattr { name: b"user.a", value: b"" }.encode();
    let place = name_hash(b"user.a");
    planted("nobody's", &[ItemWithoutInode], |image| {
        image.items.insert(Key::new(999, Kind::Xattr, place), xattr.clone());
        image.items.insert(Key::new(999, Kind::Xattr, place + 1), xattr.clone());
    });
    planted("entry in a file", &[Item], |image| {
        let entry = Dirent { inode: image.find("/fifo"), file_type: FileType::Fifo, name: b"x" };
        let key = Key::new(image.find("/small"), Kind::Dirent, name_hash(b"x"));
        image.items.insert(key, entry.encode().to_vec());
        image.edit_inode(entry.inode, |item| item.links += 1);
    });
    planted("inline data at an offset", &[Item], |image| {
        let key = Key { offset: 3, ..Key::inline(image.find("/small")) };
        image.items.insert(key, Vec::new());
    });
    planted("list entry of somebody", &[Item], |image| {
        image.items.insert(Key::new(image.find("/small"), Kind::Orphan, 1), Vec::new());
    });
    planted("attribute cut short", &[Item], |image| {
        image.items.insert(Key::new(ROOT, Kind::Xattr, place), vec![1, 2]);
    });
    planted("inode cut short", &[Item], |image| {
        image.items.insert(Key::inode(image.find("/fifo")), vec![0; 191]);
    });
    planted("extent cut short", &[Item, ProblemKind::BlockCount, ProblemKind::Leaked], |image| {
        let (key, _) = image.extents(image.find("/dir/sub/deep"))[0].clone();
        image.items.insert(key, vec![1; 15]);
    });
    planted("behind the largest file", &[Item, ProblemKind::ExtentBeyondEnd], |image| {
        let sparse = image.find("/sparse");
        let (key, extent) = image.extents(sparse).pop().expect("an extent");
        image.items.remove(&key);
        image.items.insert(Key::extent(sparse, 1 << 51), extent.encode());
        image.edit_inode(sparse, |item| item.size = i64::MAX as u64);
    });
}

#[test]
fn damaged_blocks_are_found() {
    use ProblemKind::{Bitmap, Data, Node, Root, Tail};
    let device = closed();
    let image = Image::load(&device);
    let (_, extent) = image.extents(image.find("/dir/file"))[0].clone();
    let bitmap = image.superblock.geometry.bitmap_block(0, image.root.groups[0].slot);
    for (what, block, kind) in [
        ("data", extent.block, Data),
        ("node", image.root.tree.root_block + 2, Node),
        ("bitmap", bitmap, Bitmap),
        ("root", image.superblock.root.block, Root),
    ] {
        let device = Arc::new(MemoryDevice::from_image(&device.image()));
        flip(&device, block, 100);
        assert_kinds(what, &check(&device), &[kind]);
    }
    planted("tail", &[Tail], |image| {
        let file = image.find("/dir/file");
        let (key, mut extent) = image.extents(file).pop().expect("an extent");
        let block = extent.block + extent.blocks - 1;
        let mut bytes = read(&image.device, block, BLOCK_BYTES);
        bytes[BLOCK_BYTES - 1] = 1;
        write(&image.device, block, &bytes);
        *extent.checksums.last_mut().expect("a checksum") = checksum(&bytes);
        image.items.insert(key, extent.encode());
    });
    flip(&device, extent.block, 100);
    let options = CheckOptions { verify_data: false, ..CheckOptions::default() };
    let device: Arc<dyn Device> = device;
    assert_clean(&check_device(&device, &options).expect("check"));
}

#[test]
fn damaged_superblocks_are_warnings_until_too_few_are_left() {
    let device = closed();
    let (superblock, _) = choose_superblock(&*device).expect("superblock");
    let [slot, mirror] = superblock.places();
    let other = 8 - slot;
    flip(&device, mirror, 300);
    let report = check(&device);
    assert!(report.is_clean());
    assert_eq!(report.warnings.len(), 1);
    assert_eq!(report.warnings[0].kind, ProblemKind::SuperblockCopy);
    PLANTED.with_borrow_mut(|planted| planted.insert(ProblemKind::SuperblockCopy));
    flip(&device, other, 300);
    assert_kinds("two copies", &check(&device), &[ProblemKind::Superblock]);

    let mut image = Image::load(&closed());
    image.superblock.durable_lsn = 0;
    image.store_root();
    assert_kinds("durable", &check(&image.device), &[ProblemKind::Superblock]);
    let mut image = Image::load(&closed());
    image.superblock.errors_seen = true;
    image.store_root();
    assert_eq!(check(&image.device).warnings.len(), 1);
}

/// Who looks after the volume was closed (`weir info`) hears of it, until the next use goes well.
#[test]
fn a_use_that_has_met_damage_leaves_word_of_it() {
    let seen = |device: &Arc<MemoryDevice>| {
        choose_superblock(&**device).expect("superblock").0.errors_seen
    };
    let look = |device: &Arc<MemoryDevice>, path: &str| {
        let volume = open(device);
        let file = volume.open_file(path, OpenFlags::READ);
        let read = file.and_then(|file| file.read_at(0, &mut [0; 4096]));
        volume.close().expect("close");
        read
    };
    let device = formatted(MIB);
    let volume = open(&device);
    for (name, byte) in [("/a", 0xaa), ("/b", 0xbb)] {
        let file = volume.open_file(name, OpenFlags::CREATE).expect("create");
        file.write_at(0, &[byte; 8192]).expect("write");
    }
    volume.close().expect("close");
    assert_eq!((look(&device, "/a").map(|_| ()), seen(&device)), (Ok(()), false));
    let is_last = |block: &[u8]| block.iter().all(|&byte| byte == 0xbb);
    let last = device.image().chunks(BLOCK_BYTES).rposition(is_last).expect("page 1 of /b");
    flip(&device, last as u64 - 1, 100);
    assert_eq!((look(&device, "/a").map(|_| ()), seen(&device)), (Ok(()), false), "not met");
    assert!(matches!(look(&device, "/b"), Err(Error::Corrupt(_))));
    assert!(seen(&device));
    assert_eq!((look(&device, "/a").map(|_| ()), seen(&device)), (Ok(()), false), "not any more");
}

/// A volume whose log holds one frame, and where that is.
fn with_one_frame() -> (Arc<MemoryDevice>, u64) {
    let device = formatted(MIB);
    let volume = open(&device);
    drop(volume.open_file("/a", OpenFlags::CREATE).expect("create"));
    volume.sync().expect("sync");
    drop(volume);
    let report = check(&device);
    assert_clean(&report);
    assert_eq!(report.log_frames, 1);
    let (superblock, _) = choose_superblock(&*device).expect("superblock");
    let start = superblock.geometry.log_start_block() + superblock.replay.position_blocks;
    (device, start)
}

/// Puts other records into the frame at `block`, under a right checksum.
fn forge(device: &MemoryDevice, block: u64, records: &[u8], count: u32) {
    let bytes = read(device, block, BLOCK_BYTES);
    let mut header = FrameHeader::peek(&bytes).expect("a frame");
    header.meta_bytes = (FRAME_HEADER_BYTES + records.len()) as u32;
    header.record_count = count;
    assert_eq!((header.payload_blocks, header.total_blocks()), (0, 1));
    let mut frame = vec![0; BLOCK_BYTES];
    frame[FRAME_HEADER_BYTES..][..records.len()].copy_from_slice(records);
    header.seal(&mut frame).expect("seal");
    write(device, block, &frame);
}

fn encoded(records: &[Record<'_>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for record in records {
        record.encode(&mut bytes).expect("encode");
    }
    bytes
}

#[test]
fn what_the_log_says_is_checked_as_recovery_applies_it() {
    use ProblemKind::{ItemWithoutInode, Log, Recovery};
    let (device, block) = with_one_frame();
    forge(&device, block, &[99, 0, 0, 0], 1);
    assert_kinds("unknown record", &check(&device), &[Log]);

    let (device, block) = with_one_frame();
    let free = Record::Free { block: 200, length_blocks: 1 };
    forge(&device, block, &encoded(&[free]), 1);
    let report = check(&device);
    assert_kinds("free of a free block", &report, &[Recovery]);
    assert_eq!(report.problems[0].stage, Stage::Recovered);

    let (device, block) = with_one_frame();
    let value = Xattr { name: b"user.a", value: b"" }.encode();
    let key = Key::new(2, Kind::Xattr, name_hash(b"user.a"));
    forge(&device, block, &encoded(&[Record::Put { key, value: &value }]), 1);
    let report = check(&device);
    assert_kinds("attribute of nobody", &report, &[ItemWithoutInode]);
    assert_eq!(report.problems[0].stage, Stage::Recovered);
    assert!(report.log_replayed);

    let (device, block) = with_one_frame();
    let leak = Record::Alloc { block: 200, length_blocks: 3 };
    forge(&device, block, &encoded(&[leak]), 1);
    assert_kinds("leak", &check(&device), &[ProblemKind::Leaked]);
}

#[test]
fn a_log_that_ends_too_early_or_should_be_empty_is_found() {
    let (device, _) = with_one_frame();
    let mut image = Image::load(&device);
    image.superblock.durable_lsn += 1000;
    image.store_root();
    assert_kinds("lost", &check(&device), &[ProblemKind::Log]);
    image.superblock.durable_lsn -= 1000;
    image.superblock.clean = true;
    image.store_root();
    assert_kinds("closed", &check(&device), &[ProblemKind::Log]);
}

/// A checkpoint may leave the only copy of a page in the log: frames that are older than the checkpoint are needed too.
#[test]
fn a_lost_frame_from_before_the_checkpoint_is_found() {
    let device = formatted(MIB);
    let volume = open(&device);
    for path in ["/old", "/new"] {
        let file = volume.open_file(path, OpenFlags::CREATE).expect("create");
        file.write_at(0, &vec![6; 14 * BLOCK_BYTES]).expect("write");
        file.fsync().expect("fsync");
        // What has a home between others travels in the log.
        file.write_at(BLOCK_BYTES_U64, &vec![7; 12 * BLOCK_BYTES]).expect("write");
        file.fsync().expect("fsync");
    }
    while volume.background_step(BackgroundWork::PartialCheckpoint).expect("a step") {}
    assert!(volume.stats().logged_pages > 0, "something is left in the log only");
    drop(volume);
    assert_clean(&check(&device));
    let (superblock, _) = choose_superblock(&*device).expect("superblock");
    let frame = superblock.geometry.log_start_block() + superblock.replay.position_blocks;
    flip(&device, frame + 2, 100);
    assert_kinds("page in the log", &check(&device), &[ProblemKind::Log]);
    let opened = Volume::open_device(device, manual());
    assert!(matches!(opened, Err(Error::Corrupt(_))), "{:?}", opened.map(|_| ()));
}

/// A device that cannot read one block.
struct BadBlock {
    below: Arc<MemoryDevice>,
    bad: u64,
}

impl Device for BadBlock {
    fn info(&self) -> DeviceInfo {
        self.below.info()
    }
    fn read(
        &self,
        offset_bytes: u64,
        buffers: &mut [&mut [u8]],
        class: IoClass,
    ) -> DeviceResult<()> {
        let length_bytes: u64 = buffers.iter().map(|buffer| buffer.len() as u64).sum();
        let bad_bytes = self.bad * BLOCK_BYTES_U64;
        if (offset_bytes..offset_bytes + length_bytes).contains(&bad_bytes) {
            let reason = "a bad sector".to_owned();
            return Err(DeviceError {
                operation: "read",
                offset_bytes,
                length_bytes,
                reason,
                no_space: false,
            });
        }
        self.below.read(offset_bytes, buffers, class)
    }
    fn write(&self, _: u64, _: &[&[u8]], _: IoClass, _: bool) -> DeviceResult<()> {
        panic!("a check writes nothing");
    }
    fn flush(&self) -> DeviceResult<()> {
        panic!("a check writes nothing");
    }
    fn discard(&self, _: u64, _: u64) -> DeviceResult<()> {
        panic!("a check writes nothing");
    }
    fn submit(&self, request: Request, on_done: OnDone) {
        self.below.submit(request, on_done);
    }
}

#[test]
fn blocks_that_cannot_be_read_are_named() {
    let below = closed();
    let image = Image::load(&below);
    let geometry = image.superblock.geometry;
    let (_, extent) = image.extents(image.find("/dir/file"))[0].clone();
    for bad in [
        extent.block + 1,
        image.root.tree.root_block,
        geometry.bitmap_block(0, image.root.groups[0].slot),
        image.superblock.root.block,
        geometry.log_start_block() + image.superblock.replay.position_blocks,
    ] {
        let device: Arc<dyn Device> = Arc::new(BadBlock { below: below.clone(), bad });
        let report = check_device(&device, &CheckOptions::default()).expect("check");
        assert_kinds("bad block", &report, &[ProblemKind::Unreadable]);
        assert_eq!(report.problem_count, 1);
    }
}

#[test]
fn only_so_many_problems_are_kept_and_all_are_counted() {
    let mut image = Image::load(&closed());
    for number in 1000..1100 {
        image.items.insert(Key::orphan(number), Vec::new());
    }
    image.store();
    let device: Arc<dyn Device> = image.device;
    let options = CheckOptions { max_problems: 7, ..CheckOptions::default() };
    let report = check_device(&device, &options).expect("check");
    assert_eq!((report.problems.len(), report.problem_count), (7, 100));
}

#[test]
fn what_is_no_volume_is_an_error() {
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(MIB));
    let result = check_device(&device, &CheckOptions::default());
    assert!(matches!(result, Err(weir::Error::NotAVolume(_))));
}

/// A kind of problem that no test here plants fails this one.
#[test]
fn every_kind_of_problem_is_planted_and_found() {
    wrong_sums_in_the_root_are_found();
    wrong_bits_are_found();
    wrong_inodes_are_found();
    a_root_that_is_no_directory_is_found();
    wrong_names_are_found();
    broken_trees_of_directories_are_found();
    wrong_inline_data_is_found();
    wrong_extents_are_found();
    items_that_make_no_sense_are_found();
    damaged_blocks_are_found();
    damaged_superblocks_are_warnings_until_too_few_are_left();
    what_the_log_says_is_checked_as_recovery_applies_it();
    a_log_that_ends_too_early_or_should_be_empty_is_found();
    a_lost_frame_from_before_the_checkpoint_is_found();
    blocks_that_cannot_be_read_are_named();
    let planted = PLANTED.with_borrow(Clone::clone);
    let missing: Vec<_> = ProblemKind::ALL.iter().filter(|kind| !planted.contains(kind)).collect();
    assert!(missing.is_empty(), "nobody plants {missing:?}");
}
