//! Space: no space is an answer at the entry of an operation and never later; a full volume can be opened, deleted from,
//! synced and closed; what is deleted can be used again, and cycles leak nothing.

mod common;

use common::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use weir::check::{CheckOptions, check_device};
use weir::device::Device;
use weir::*;

const ROOT: u64 = Volume::ROOT;

/// Fills the volume with files of `file_bytes` until there is no space. Answers bytes written.
fn fill(volume: &Volume, prefix: &str, file_bytes: usize) -> u64 {
    let data = pattern(1, file_bytes);
    let mut total = 0;
    for number in 0.. {
        let file = match volume.open_file(format!("/{prefix}{number}"), OpenFlags::CREATE) {
            Ok(file) => file,
            Err(error) => {
                assert_eq!(error, Error::NoSpace);
                return total;
            }
        };
        match file.write_at(0, &data) {
            Ok(count) => {
                total += count as u64;
                if count < data.len() {
                    return total;
                }
            }
            Err(error) => {
                assert_eq!(error, Error::NoSpace);
                return total;
            }
        }
    }
    total
}

/// Fills the volume until there is no space, also not what a checkpoint finds when the trees are denser than was feared.
fn fill_up(volume: &Volume, file_bytes: usize) {
    fill(volume, "f", file_bytes);
    fill(volume, "tiny", 1);
    volume.checkpoint().expect("checkpoint");
    fill(volume, "more", 1);
}

fn assert_clean(device: &Arc<dyn Device>) {
    let report = check_device(device, &CheckOptions::default()).expect("check");
    assert!(report.is_clean(), "{:#?}", report.problems);
}

fn remove_all(volume: &Volume) {
    for entry in volume.read_dir("/").expect("list") {
        if entry.file_type == FileType::Directory {
            volume.rmdir(ROOT, &entry.name).expect("rmdir on a full volume");
        } else {
            volume.unlink(ROOT, &entry.name).expect("unlink on a full volume");
        }
    }
}

/// Blocks that are free once everything pending is settled.
fn settled_free(volume: &Volume) -> u64 {
    for _ in 0..3 {
        volume.checkpoint().expect("checkpoint");
    }
    while volume.background_step(BackgroundWork::Purge).expect("purge") {}
    for _ in 0..3 {
        volume.checkpoint().expect("checkpoint");
    }
    let space = volume.stats().space;
    assert_eq!((space.reserved_blocks, space.pending_free_blocks), (0, 0));
    space.free_blocks
}

fn volume_of(size_bytes: u64, log_blocks: u64) -> (Arc<dyn Device>, Volume) {
    let device = formatted(size_bytes, log_blocks);
    let volume = open(&device, manual(MIB));
    (device, volume)
}

#[test]
fn a_full_volume_can_be_opened_read_synced_deleted_from_and_closed() {
    for (size_bytes, file_bytes) in [
        (2 * MIB, 100),
        (4 * MIB, 5000),
        (16 * MIB, 300_000),
        (16 * MIB, 40 << 20),
        (8 * MIB, 1500),
    ] {
        let (device, volume) = volume_of(size_bytes, 64);
        let mut written = fill(&volume, "f", file_bytes);
        assert!(written > 0);
        written += fill(&volume, "tiny", 1);
        volume.sync().expect("everything that was accepted can be synced");
        // A checkpoint makes the trees denser than was feared: a few more names may fit.
        let more = (0..).find_map(|number| volume.create_dir(format!("/more{number}"), 0).err());
        assert_eq!(more, Some(Error::NoSpace));
        volume.checkpoint().expect("a checkpoint of a full volume");
        volume.close().expect("close");

        let volume = open(&device, manual(MIB));
        let data = pattern(1, file_bytes);
        let mut read = 0;
        let is_file = |entry: &DirEntry| entry.file_type == FileType::Regular;
        for entry in volume.read_dir("/").expect("list").into_iter().filter(is_file) {
            let file = volume.open_inode(entry.ino, false).expect("open");
            let content = contents(&file);
            assert!(data.starts_with(&content));
            read += content.len() as u64;
        }
        assert_eq!(read, written);
        // Attributes, cuts and overwriting of what is in the cache need no space that is not there.
        let kept = volume.lookup(ROOT, b"f0").expect("lookup").ino;
        let change = SetAttr { permissions: Some(0o600), ..SetAttr::default() };
        volume.setattr(kept, &change).expect("chmod on a full volume");
        let file = volume.open_inode(kept, true).expect("open");
        file.truncate(file.size() / 2).expect("truncate on a full volume");
        file.fsync().expect("fsync on a full volume");
        drop(file);
        volume.sync().expect("sync");
        remove_all(&volume);
        volume.sync().expect("sync");
        volume.close().expect("close");

        let volume = open(&device, manual(MIB));
        let again = fill(&volume, "f", file_bytes);
        assert!(again as f64 > 0.9 * written as f64, "{again} of {written}");
    }
}

/// A program that makes its directories each time it starts does so on a full volume too, and where it may only read.
#[test]
fn a_name_that_is_there_exists_also_where_nothing_can_be_made() {
    let (device, volume) = volume_of(4 * MIB, 64);
    volume.create_dir_all("/a/b", 0o755).expect("directories");
    volume.open_file("/file", OpenFlags::CREATE).expect("file");
    fill_up(&volume, 5000);
    let exists = |volume: &Volume, error: &Error| {
        let fifo = NewInode::new(FileType::Fifo, 0o600);
        for name in ["a", "file"] {
            let path = format!("/{name}");
            let answers = [
                volume.create_dir(&path, 0o755).map(drop),
                volume.symlink_path("target", &path).map(drop),
                volume.link_path("/file", &path).map(drop),
                volume.make(ROOT, name.as_bytes(), &fifo).map(drop),
                volume.open_file(&path, OpenFlags::CREATE_NEW).map(drop),
            ];
            assert_eq!(answers, [const { Err(Error::Exists) }; 5], "{name}, {error}");
        }
        volume.create_dir_all("/a/b", 0o755).expect("it is there");
        assert_eq!(volume.create_dir_all("/file", 0o755), Err(Error::Exists));
        assert_eq!(volume.create_dir("/a/new", 0o755).as_ref(), Err(error));
        assert_eq!(volume.symlink_path("target", "/new").as_ref(), Err(error));
        assert_eq!(volume.link_path("/file", "/new").as_ref(), Err(error));
        assert_eq!(volume.create_dir("/file/new", 0o755), Err(Error::NotDirectory));
    };
    exists(&volume, &Error::NoSpace);
    volume.close().expect("close");
    drop(volume);
    let options = VolumeOptions { read_only: true, ..manual(MIB) };
    exists(&open(&device, options), &Error::ReadOnly);
}

#[test]
fn logs_are_rotated_on_a_full_volume() {
    const GENERATIONS: u8 = 5;
    let name = |generation| format!("log.{generation}").into_bytes();
    for (size_bytes, file_bytes) in [(2 * MIB, 100), (4 * MIB, 5000), (16 * MIB, 1 << 20)] {
        let (device, volume) = volume_of(size_bytes, 64);
        let archive = volume.create_dir("/archive", 0o755).expect("directory").ino;
        for generation in 0..GENERATIONS {
            let file = volume.open_file(format!("/log.{generation}"), OpenFlags::CREATE);
            file.expect("create").write_at(0, &[generation; 10]).expect("write");
        }
        fill_up(&volume, file_bytes);
        let refused = volume.create_dir("/no", 0o755).expect_err("the volume is full");
        assert_eq!(refused, Error::NoSpace);
        let rename = |(from_dir, from): (u64, &[u8]), (to_dir, to): (u64, &[u8])| {
            let moved = volume.rename(from_dir, from, to_dir, to, RenameMode::NoReplace);
            moved.expect("rename on a full volume");
        };
        for _ in 0..20 * GENERATIONS {
            rename((ROOT, &name(GENERATIONS - 1)), (archive, b"oldest"));
            for generation in (1..GENERATIONS).rev() {
                rename((ROOT, &name(generation - 1)), (ROOT, &name(generation)));
            }
            rename((archive, b"oldest"), (ROOT, &name(0)));
        }
        volume.checkpoint().expect("a checkpoint after many renames");
        volume.close().expect("close");
        assert_clean(&device);
        let volume = open(&device, manual(MIB));
        for generation in 0..GENERATIONS {
            let ino = volume.lookup(ROOT, &name(generation)).expect("lookup").ino;
            let file = volume.open_inode(ino, false).expect("open");
            assert_eq!(contents(&file), [generation; 10]);
        }
    }
}

#[test]
fn names_that_move_leave_what_checkpoints_and_deletion_need() {
    for (size_bytes, file_bytes) in [(2 * MIB, 1), (4 * MIB, 1), (16 * MIB, 5000)] {
        let (device, volume) = volume_of(size_bytes, 64);
        fill_up(&volume, file_bytes);
        let entries = volume.read_dir("/").expect("list");
        // Every name becomes as long as can be: the tree has to grow, and somewhere that must be refused.
        let moved = entries.iter().take_while(|entry| {
            let long = [&entry.name[..], &[b'x'; 200]].concat();
            match volume.rename(ROOT, &entry.name, ROOT, &long, RenameMode::Replace) {
                Ok(()) => true,
                Err(error) => {
                    assert_eq!(error, Error::NoSpace);
                    false
                }
            }
        });
        let moved = moved.count();
        assert!(moved < entries.len(), "the tree grew for ever");
        volume.checkpoint().expect("a checkpoint after as many renames as find room");
        volume.close().expect("close");
        assert_clean(&device);
        let volume = open(&device, manual(MIB));
        assert_eq!(volume.read_dir("/").expect("list").len(), entries.len());
        remove_all(&volume);
        volume.sync().expect("sync");
        volume.close().expect("close");
    }
}

#[test]
fn attributes_of_everything_change_on_a_full_volume() {
    for (size_bytes, file_bytes) in [(2 * MIB, 1), (4 * MIB, 1), (16 * MIB, 5000)] {
        let (device, volume) = volume_of(size_bytes, 64);
        fill_up(&volume, file_bytes);
        volume.checkpoint().expect("checkpoint");
        let entries = volume.read_dir("/").expect("list");
        for round in 0..3 {
            for entry in &entries {
                let change = SetAttr { permissions: Some(0o600 + round), ..SetAttr::default() };
                volume.setattr(entry.ino, &change).expect("chmod on a full volume");
            }
            volume.checkpoint().expect("a checkpoint of changed attributes");
        }
        volume.close().expect("close");
        assert_clean(&device);
    }
}

/// Leaves that are nearly full become two by one more item each, and names that are alike fill all of them at about the
/// same time: the tree grows by much more than what is put into it.
#[test]
fn a_checkpoint_finds_room_for_every_node_of_a_full_volume() {
    for (seed, size_mib) in (30..50).zip([2, 3, 4, 6, 8].into_iter().cycle()) {
        let size_bytes = size_mib * MIB;
        let device = formatted(size_bytes, size_bytes / 4096 / 8);
        let volume = open(&device, manual(4 * MIB));
        let mut random = Random::seeded(seed);
        let (mut names, mut refused) = (Vec::new(), 0);
        for number in 0.. {
            let name = format!("{}{number}", "p".repeat(200));
            match volume.open_file(format!("/{name}"), OpenFlags::CREATE) {
                Ok(_) => names.push(name),
                Err(error) => {
                    assert_eq!(error, Error::NoSpace);
                    refused += 1;
                }
            }
            if refused == 6 {
                break;
            }
            if random.below(500) == 0 {
                volume.checkpoint().expect("a checkpoint while names come");
            }
        }
        volume.checkpoint().expect("a checkpoint of a full volume");
        for name in names.iter().step_by(24 + seed as usize % 9) {
            volume.unlink(ROOT, name.as_bytes()).expect("unlink");
        }
        for name in names.iter().skip(1).step_by(8) {
            if let Ok(attr) = volume.lookup(ROOT, name.as_bytes()) {
                let change = SetAttr { permissions: Some(0o600), ..SetAttr::default() };
                volume.setattr(attr.ino, &change).expect("chmod");
            }
        }
        volume.checkpoint().expect("a checkpoint that comes to every node");
        volume.close().expect("close");
        assert_clean(&device);
        let volume = open(&device, manual(4 * MIB));
        remove_all(&volume);
        volume.sync().expect("sync");
        volume.close().expect("close");
    }
}

/// Items that lie in full leaves, as those of files that were made one after the other do: one more makes two of every
/// leaf.
#[test]
fn a_checkpoint_that_divides_every_leaf_leaves_room_for_the_next_one() {
    for spare_blocks in [4, 40, 80, 120, 160, 200] {
        let (device, volume) = volume_of(8 * MIB, 256);
        let value = [1; 1000];
        let mut files = Vec::new();
        while volume.stats().space.room_blocks > spare_blocks {
            let file = create(&volume, &format!("/f{}", files.len()));
            volume
                .setxattr(file.ino(), b"user.large", &value, XattrMode::Set)
                .expect("there is room");
            files.push(file.ino());
            if files.len() % 500 == 0 {
                volume.checkpoint().expect("checkpoint");
            }
        }
        volume.checkpoint().expect("a checkpoint of full leaves");
        for ino in files.iter().step_by(24) {
            match volume.setxattr(*ino, b"user.small", b"", XattrMode::Set) {
                Ok(()) => {}
                Err(error) => assert_eq!(error, Error::NoSpace),
            }
        }
        volume.checkpoint().expect("a checkpoint that divides leaves");
        let change = SetAttr { permissions: Some(0o600), ..SetAttr::default() };
        for ino in files.iter().step_by(6) {
            volume.setattr(*ino, &change).expect("chmod");
        }
        volume.checkpoint().expect("a checkpoint that comes to every leaf");
        remove_all(&volume);
        volume.close().expect("close");
        assert_clean(&device);
    }
}

/// A file of ones as large as the volume has room for, and its size.
fn file_of_all_room(volume: &Volume) -> (File, u64) {
    let file = create(volume, "/f");
    let mut size = 0;
    while let Ok(count) = file.write_at(size, &vec![1; 65_536]) {
        size += count as u64;
    }
    (file, size)
}

/// Every page that is overwritten may become an extent of its own, of which none is known before the pages are written.
#[test]
fn a_checkpoint_finds_room_for_the_extents_of_a_full_volume() {
    for (size_mib, spare_pages) in
        [(64, 500), (64, 3000), (256, 10_000), (256, 20_000), (512, 40_000)]
    {
        let device = formatted(size_mib * MIB, size_mib * 16);
        let volume = open(&device, manual(size_mib * MIB));
        let (file, size) = file_of_all_room(&volume);
        volume.checkpoint().expect("a checkpoint of a full volume");
        let pages = size / 4096 - spare_pages;
        file.truncate(pages * 4096).expect("truncate");
        volume.checkpoint().expect("checkpoint");
        let mut written = 0;
        for page in (1..pages).step_by(2) {
            if volume.stats().space.room_blocks == 0 {
                break;
            }
            file.write_at(page * 4096, &[2; 4096]).expect("there is room");
            written += 1;
        }
        assert!(written > spare_pages * 9 / 10, "{written} pages found room");
        volume.checkpoint().expect("a checkpoint of scattered extents");
        volume.close().expect("close");
        assert_clean(&device);
    }
}

/// Holes within extents, and parts of pages that become zero, on a volume that has no room for either.
#[test]
fn a_file_of_a_full_volume_is_cut_into_pieces() {
    for (offset, length) in [(0, 4096), (100, 200), (4000, 4196)] {
        let device = formatted(64 * MIB, 2048);
        let volume = open(&device, manual(64 * MIB));
        let (file, size) = file_of_all_room(&volume);
        fill_up(&volume, 4096);
        for entry in volume.read_dir("/").expect("list") {
            let file = volume.open_inode(entry.ino, true).expect("open");
            if file.size() < size {
                file.truncate(file.size() / 3).expect("truncate on a full volume");
            }
        }
        let mut expected = vec![1; size as usize];
        for page in (1..size / 4096 - 1).step_by(2) {
            let start = page * 4096 + offset;
            match file.allocate(AllocateMode::PunchHole, start, length) {
                Ok(()) => expected[start as usize..][..length as usize].fill(0),
                // Single blocks are free in plenty, and no node finds room any more.
                Err(error) => {
                    assert_eq!((error, length), (Error::NoSpace, 4096));
                    let space = volume.stats().space;
                    assert!(space.free_blocks > 4 * space.unscattered_blocks, "{space:?}");
                }
            }
        }
        volume.checkpoint().expect("a checkpoint of holes");
        volume.close().expect("close");
        drop((file, volume));
        assert_clean(&device);
        let volume = open(&device, manual(MIB));
        assert!(contents(&volume.open_file("/f", OpenFlags::READ).expect("open")) == expected);
        remove_all(&volume);
        volume.close().expect("close");
    }
}

/// A range that is inserted within an extent makes two of it, so the tree grows, on a volume that has no room for that.
#[test]
fn ranges_are_inserted_into_a_file_of_a_full_volume_until_there_is_no_room() {
    let device = formatted(64 * MIB, 2048);
    let volume = open(&device, manual(64 * MIB));
    let (file, mut size) = file_of_all_room(&volume);
    fill_up(&volume, 4096);
    size -= 100 * 4096;
    file.truncate(size).expect("truncate");
    let mut pages = vec![1_u8; size as usize / 4096];
    let mut at = 1;
    while at + 2 < pages.len() {
        match file.allocate(AllocateMode::InsertRange, at as u64 * 4096, 4096) {
            Ok(()) => pages.insert(at, 0),
            Err(error) => {
                assert_eq!(error, Error::NoSpace, "at page {at}");
                break;
            }
        }
        at += 3;
    }
    assert!(at > 100, "some have found room");
    volume.checkpoint().expect("a checkpoint of what was inserted");
    // What takes away is not refused.
    while at > 1 {
        at -= 3;
        file.allocate(AllocateMode::CollapseRange, at as u64 * 4096, 8192).expect("collapse");
        pages.drain(at..at + 2);
    }
    volume.checkpoint().expect("a checkpoint of what was taken out");
    volume.close().expect("close");
    drop((file, volume));
    assert_clean(&device);
    let volume = open(&device, manual(MIB));
    let read = contents(&volume.open_file("/f", OpenFlags::READ).expect("open"));
    let found = read.chunks(4096).map(|page| page[0]);
    assert!(found.take(pages.len()).eq(pages), "the pages as they were shifted");
    remove_all(&volume);
    volume.close().expect("close");
}

#[test]
fn cycles_of_filling_and_deleting_leak_no_block() {
    let (device, mut volume) = volume_of(8 * MIB, 64);
    let fresh = settled_free(&volume);
    for round in 0..12_u64 {
        let file_bytes = [700, 30_000, 4096, 1 << 20][round as usize % 4];
        fill(&volume, "f", file_bytes);
        if round % 3 == 0 {
            volume.sync().expect("sync");
        }
        if round % 4 == 1 {
            volume.close().expect("close");
            volume = open(&formatted(MIB, 64), manual(MIB));
            drop(volume);
            volume = open(&device, manual(MIB));
        }
        remove_all(&volume);
        let free = settled_free(&volume);
        assert!(free + 4 >= fresh, "round {round}: {fresh} were free, {free} are");
        assert_eq!(volume.statfs().inodes, 1);
    }
}

#[test]
fn every_kind_of_inode_and_attribute_gives_its_space_back() {
    let (_device, volume) = volume_of(32 * MIB, 0);
    let fresh = settled_free(&volume);
    for _ in 0..3 {
        let dir = volume.create_dir("/d", 0o755).expect("mkdir").ino;
        for number in 0..300_u64 {
            let name = format!("entry number {number}");
            let attr = match number % 4 {
                0 => volume.symlink(dir, name.as_bytes(), &[b'x'; 3000], 0, 0),
                1 => volume.make(dir, name.as_bytes(), &NewInode::new(FileType::Directory, 0)),
                2 => volume.make(dir, name.as_bytes(), &NewInode::new(FileType::Fifo, 0)),
                _ => volume.make(dir, name.as_bytes(), &NewInode::new(FileType::Regular, 0)),
            };
            let ino = attr.expect("make").ino;
            volume.setxattr(ino, b"user.large", &[1; 4000], XattrMode::Set).expect("set");
            if number % 4 == 3 {
                let file = volume.open_inode(ino, true).expect("open");
                file.allocate(AllocateMode::KeepSize, number << 20, 40_000).expect("allocate");
                file.write_at(number * 1000, &[1; 3000]).expect("write");
            }
        }
        volume.checkpoint().expect("checkpoint");
        for entry in volume.read_dir("/d").expect("list") {
            if entry.file_type == FileType::Directory {
                volume.rmdir(dir, &entry.name).expect("rmdir");
            } else {
                volume.unlink(dir, &entry.name).expect("unlink");
            }
        }
        volume.rmdir(ROOT, b"d").expect("rmdir");
        let free = settled_free(&volume);
        assert!(free + 4 >= fresh, "{fresh} were free, {free} are");
        assert_eq!(volume.statfs().inodes, 1);
    }
}

#[test]
fn statfs_counts_dirty_data_and_comes_back() {
    let (_device, volume) = volume_of(32 * MIB, 0);
    settled_free(&volume);
    let before = volume.statfs();
    let file = create(&volume, "/f");
    file.write_at(0, &vec![1; 400 * 4096]).expect("write");
    let dirty = volume.statfs();
    assert!(dirty.free_blocks + 400 <= before.free_blocks, "delayed data counts");
    assert!(dirty.available_blocks < dirty.free_blocks && dirty.free_blocks < dirty.total_blocks);
    assert_eq!(file.attr().expect("attr").blocks, 400);
    volume.checkpoint().expect("checkpoint");
    let clean = volume.statfs();
    assert!(clean.free_blocks.abs_diff(dirty.free_blocks) <= 24);
    assert_eq!(file.attr().expect("attr").blocks, 400);
    file.allocate(AllocateMode::PunchHole, 0, 200 * 4096).expect("punch");
    assert_eq!(file.attr().expect("attr").blocks, 200);
    assert!(volume.statfs().free_blocks + 24 >= clean.free_blocks + 200, "pending counts as free");
}

#[test]
fn an_allocation_that_does_not_fit_fails_and_what_it_reserved_serves_writes() {
    let (_device, volume) = volume_of(8 * MIB, 64);
    let file = create(&volume, "/f");
    assert_eq!(file.allocate(AllocateMode::Extend, 0, 1 << 40), Err(Error::NoSpace));
    file.truncate(0).expect("truncate");
    file.allocate(AllocateMode::Extend, 0, 4 * MIB).expect("allocate");
    // With the rest full, the allocated part can be written for the first time.
    fill(&volume, "rest", 100_000);
    volume.sync().expect("sync");
    assert_eq!(contents(&file), vec![0; 4 << 20]);
}

#[test]
fn appends_are_all_or_nothing_when_space_ends() {
    let (_device, volume) = volume_of(4 * MIB, 64);
    let file = create(&volume, "/f");
    let part = pattern(5, 100_000);
    let mut count = 0;
    let error = loop {
        match file.append(&part) {
            Ok(offset) => assert_eq!(offset, count * 100_000),
            Err(error) => break error,
        }
        count += 1;
    };
    assert_eq!(error, Error::NoSpace);
    assert_eq!(file.size(), count * 100_000);
    let read = contents(&file);
    assert!(read.chunks(100_000).all(|chunk| chunk == part));
}

#[test]
fn a_full_volume_is_overwritten_page_by_page() {
    let (device, volume) = volume_of(8 * MIB, 64);
    let (file, size) = file_of_all_room(&volume);
    file.fsync().expect("fsync");
    volume.checkpoint().expect("checkpoint");
    let mut expected = vec![1_u8; size as usize];
    for page in (0..size / 4096).rev() {
        let written = file.write_at(page * 4096, &[2; 4096]);
        assert_eq!(written, Ok(4096), "page {page}: {:?}", volume.stats().space);
        expected[page as usize * 4096..][..4096].fill(2);
        if page % 16 == 0 {
            file.fsync().expect("fsync");
        }
    }
    volume.close().expect("close");
    drop((file, volume));
    let volume = open(&device, manual(MIB));
    assert!(contents(&volume.open_file("/f", OpenFlags::READ).expect("open")) == expected);
}

#[test]
fn scattered_free_blocks_take_data_and_never_starve_a_checkpoint() {
    let (device, volume) = volume_of(16 * MIB, 64);
    // Files of one block each, side by side; then every other one goes.
    let full = fill(&volume, "f", 4096) / 4096;
    volume.sync().expect("sync");
    let mut removed = 0;
    for number in (0..full).step_by(2) {
        volume.remove_file(format!("/f{number}")).expect("unlink");
        removed += 1;
    }
    settled_free(&volume);
    // One large file has to take the holes. Not all of them: each is an extent, and the tree that holds those needs
    // room for whole nodes.
    let file = create(&volume, "/large");
    let mut data = pattern(3, removed as usize * 4096);
    let written = file.write_at(0, &data).expect("write");
    assert!(written > data.len() / 5, "{:?}", volume.stats().space);
    data.truncate(written);
    file.fsync().expect("fsync");
    volume.checkpoint().expect("checkpoint");
    // Metadata alone may grow only as long as its nodes find room.
    let value = vec![1; 4000];
    let refused = (1..full).step_by(2).find_map(|number| {
        let ino = volume.resolve(format!("/f{number}"), true).expect("resolve");
        volume.setxattr(ino, b"user.large", &value, XattrMode::Set).err()
    });
    assert_eq!(refused, Some(Error::NoSpace));
    volume.checkpoint().expect("checkpoint");
    // Who asks how much there is hears what writing would tell him.
    let (space, available_blocks) = (volume.stats().space, volume.statfs().available_blocks);
    let grown = file.write_at(written as u64, &[1; 4096]);
    assert!(space.free_blocks > 100 && available_blocks == 0, "{space:?}, {available_blocks}");
    assert_eq!(grown, Err(Error::NoSpace));
    for number in (1..full).step_by(2) {
        let path = format!("/f{number}");
        let change = SetAttr { permissions: Some(0o600), ..SetAttr::default() };
        let ino = volume.resolve(&path, true).expect("resolve");
        volume.setattr(ino, &change).expect("chmod");
        if number % 8 == 1 {
            volume.checkpoint().expect("checkpoint");
        }
        volume.remove_file(path).expect("unlink");
    }
    volume.close().expect("close");
    drop((file, volume));
    let volume = open(&device, manual(MIB));
    let file = volume.open_file("/large", OpenFlags::READ).expect("open");
    assert!(contents(&file) == data);
}

#[test]
fn what_was_allocated_can_be_written_on_a_full_volume() {
    let (device, volume) = volume_of(16 * MIB, 64);
    let (file, log) = (create(&volume, "/f"), create(&volume, "/log"));
    file.allocate(AllocateMode::Extend, 0, 4 * MIB).expect("allocate");
    log.append(b"begins").expect("append");
    log.allocate(AllocateMode::KeepSize, 0, MIB).expect("allocate behind the end");
    fill_up(&volume, 4096);
    let data = pattern(9, 4 << 20);
    let mut logged = b"begins".to_vec();
    for (number, chunk) in data.chunks(10_000).enumerate() {
        let at = number * 10_000;
        let written = file.write_at(at as u64, chunk);
        assert_eq!(written, Ok(chunk.len()), "at {at}: {:?}", volume.stats().space);
        let entry = &chunk[..2000 + number];
        assert_eq!(log.append(entry), Ok(logged.len() as u64));
        logged.extend_from_slice(entry);
        if number % 10 == 0 {
            file.fsync().expect("fsync");
        }
    }
    // What was allocated comes to an end; of what does not fit, nothing is left.
    let refused = log.append(&vec![1; MIB as usize]);
    assert_eq!((refused, log.size()), (Err(Error::NoSpace), logged.len() as u64));
    drop((file, log));
    volume.close().expect("close");
    assert_clean(&device);
    let volume = open(&device, manual(MIB));
    assert!(contents(&volume.open_file("/f", OpenFlags::READ).expect("open")) == data);
    assert!(contents(&volume.open_file("/log", OpenFlags::READ).expect("open")) == logged);
}

#[test]
fn a_full_volume_is_overwritten_in_any_pieces() {
    for (seed, memory_mib) in [(1, 1), (2, 4), (3, 16), (4, 64)] {
        let (device, volume) = (formatted(32 * MIB, 512), memory_mib * MIB);
        let mut volume = open(&device, manual(volume));
        let mut random = Random::seeded(seed);
        let file = create(&volume, "/f");
        file.write_at(0, &vec![1; 12 << 20]).expect("write");
        file.allocate(AllocateMode::Extend, 12 * MIB, 2 * MIB).expect("allocate");
        create(&volume, "/small").write_at(0, &[0; 100]).expect("write");
        drop(file);
        fill_up(&volume, 100_000);
        let mut expected = vec![1; 14 << 20];
        expected[12 << 20..].fill(0);
        for round in 0..1500 {
            let file = volume.open_file("/f", OpenFlags::READ_WRITE).expect("open");
            let length = 1 + random.below([100, 5000, 40_000, 300_000][round % 4]) as usize;
            let mut offset = random.below(14 << 20) as usize;
            if random.below(3) == 0 {
                offset &= !4095;
            }
            let length = length.min(expected.len() - offset);
            let data = pattern(round as u64, length);
            let written = file.write_at(offset as u64, &data);
            assert_eq!(written, Ok(length), "round {round}: {:?}", volume.stats().space);
            expected[offset..offset + length].copy_from_slice(&data);
            match random.below(40) {
                0 => file.fsync().expect("fsync"),
                1 => volume.checkpoint().expect("checkpoint"),
                2 if round % 3 == 0 => {
                    drop(file);
                    volume.close().expect("close");
                    volume = open(&device, manual(memory_mib * MIB));
                }
                _ => {}
            }
        }
        // A small file lives in its inode, and stays as long as it is.
        let small = volume.open_file("/small", OpenFlags::READ_WRITE).expect("open");
        for number in 0..50 {
            assert_eq!(small.write_at(number, &[number as u8]), Ok(1));
        }
        assert!(contents(&small)[..50].iter().copied().eq(0..50));
        drop(small);
        // What has no block is refused, behind what has one.
        let file = volume.open_file("/f", OpenFlags::READ_WRITE).expect("open");
        let end = expected.len() as u64;
        assert_eq!(file.write_at(end, &[1; 4096]), Err(Error::NoSpace));
        assert_eq!(file.write_at(end - 8192, &vec![7; 40_960]), Ok(8192));
        expected[end as usize - 8192..].fill(7);
        assert!(contents(&file) == expected);
        drop(file);
        volume.close().expect("close");
        assert_clean(&device);
        let volume = open(&device, manual(MIB));
        assert!(contents(&volume.open_file("/f", OpenFlags::READ).expect("open")) == expected);
    }
}

/// First writes here and there of what was allocated make the tree grow, which is refused when what is spare is used up. What is written by
/// then needs nothing of that.
#[test]
fn what_is_written_is_overwritten_when_nothing_is_spare() {
    const ALLOCATED_PAGES: u64 = 6144;
    for round_pages in [1, 7, 31] {
        let (device, volume) = (formatted(64 * MIB, 512), manual(4 * MIB));
        let volume = open(&device, volume);
        let file = create(&volume, "/f");
        file.write_at(0, &vec![1; 4 << 20]).expect("write");
        let allocated = create(&volume, "/allocated");
        let length = ALLOCATED_PAGES * 4096;
        allocated.allocate(AllocateMode::Extend, 0, length).expect("allocate");
        fill_up(&volume, 100_000);
        let refused = (0..ALLOCATED_PAGES / 2)
            .find(|page| allocated.write_at(page * 8192, &[7; 4096]) == Err(Error::NoSpace));
        let refused = refused.expect("the tree has no room to grow that much");
        let mut expected = vec![1; 4 << 20];
        let mut random = Random::seeded(round_pages);
        for round in 0..300 {
            let pages = 1 + random.below(round_pages) as usize;
            let skew = if round % 3 == 0 { random.below(4096) as usize } else { 0 };
            let offset = random.below(1024 - pages as u64) as usize * 4096 + skew;
            let data = pattern(round, pages * 4096 - skew / 2);
            let written = file.write_at(offset as u64, &data);
            assert_eq!(written, Ok(data.len()), "{round}: {:?}", volume.stats().space);
            expected[offset..offset + data.len()].copy_from_slice(&data);
            match random.below(30) {
                0 => file.fsync().expect("fsync"),
                1 => volume.checkpoint().expect("checkpoint"),
                _ => {}
            }
        }
        for page in 0..refused {
            assert_eq!(allocated.write_at(page * 8192, &[9; 4096]), Ok(4096), "page {page}");
        }
        drop((file, allocated));
        volume.close().expect("close");
        assert_clean(&device);
        let volume = open(&device, manual(MIB));
        assert!(contents(&volume.open_file("/f", OpenFlags::READ).expect("open")) == expected);
        let read = contents(&volume.open_file("/allocated", OpenFlags::READ).expect("open"));
        for (page, bytes) in read.chunks_exact(4096).enumerate() {
            let is_written = page % 2 == 0 && (page as u64) < 2 * refused;
            assert!(bytes.iter().all(|byte| *byte == if is_written { 9 } else { 0 }), "{page}");
        }
    }
}

#[test]
fn many_overwrite_a_full_volume_at_the_same_time() {
    with_watchdog(120, || {
        let device = formatted(32 * MIB, 512);
        let volume = open(&device, threads(4 * MIB));
        let files: Vec<File> =
            (0..4).map(|number| create(&volume, &format!("/own{number}"))).collect();
        for file in &files {
            file.write_at(0, &vec![0; 7 << 19]).expect("write");
            // So little that the extents it becomes at worst, every other page one, find room in what users leave.
            file.allocate(AllocateMode::Extend, 7 * MIB / 2, MIB / 2).expect("allocate");
        }
        create(&volume, "/own4");
        fill_up(&volume, 100_000);
        let expected: Vec<Vec<u8>> = std::thread::scope(|scope| {
            let volume = &volume;
            let overwrite = |(number, file): (usize, &File)| {
                let mut random = Random::seeded(number as u64 + 1);
                let mut expected = vec![0; 4 << 20];
                for round in 0..400 {
                    let length = 1 + random.below([300, 50_000][round % 2]) as usize;
                    let offset = random.below((expected.len() - length) as u64) as usize;
                    let data = pattern(round as u64, length);
                    let written = file.write_at(offset as u64, &data);
                    assert_eq!(written, Ok(length), "{round}: {:?}", volume.stats().space);
                    expected[offset..offset + length].copy_from_slice(&data);
                    if random.below(10) == 0 {
                        file.fsync().expect("fsync");
                    }
                }
                expected
            };
            let writers: Vec<_> =
                files.iter().enumerate().map(|each| scope.spawn(move || overwrite(each))).collect();
            writers.into_iter().map(|writer| writer.join().expect("writer")).collect()
        });
        assert!(volume.stats().in_place_writes > 0, "{:?}", volume.stats().space);
        drop(files);
        volume.close().expect("close");
        assert_clean(&device);
        let volume = open(&device, manual(MIB));
        for (number, expected) in expected.iter().enumerate() {
            let file = volume.open_file(format!("/own{number}"), OpenFlags::READ).expect("open");
            assert!(contents(&file) == *expected);
        }
    });
}

/// Who cuts a file may wait for room, and so for all purges, with the file's lock in hand.
#[test]
fn a_file_that_is_removed_while_it_is_cut_is_purged_after_that() {
    with_watchdog(60, || {
        let probe = Probe::new(formatted(16 * MIB, 64));
        let device: Arc<dyn Device> = probe.clone();
        let volume = Arc::new(open(&device, manual(4 * MIB)));
        let path = |number| format!("/cut{number}");
        let inos: Vec<u64> = (0..200)
            .map(|number| {
                let file = create(&volume, &path(number));
                file.write_at(0, &[1; 8192]).expect("write");
                file.ino()
            })
            .collect();
        fill_up(&volume, 4096);
        let being_cut = Arc::new(AtomicU64::new(0));
        let (remover, removed) = (volume.clone(), being_cut.clone());
        probe.amid_next_data_write(move || {
            remover.remove_file(path(removed.load(Ordering::Relaxed))).expect("unlink");
        });
        let change = SetAttr { size_bytes: Some(5000), ..SetAttr::default() };
        for (number, ino) in (0..).zip(inos) {
            being_cut.store(number, Ordering::Relaxed);
            volume.setattr(ino, &change).expect("cut on a full volume");
            if probe.has_happened() {
                assert_eq!(volume.setattr(ino, &change), Err(Error::NotFound));
                break;
            }
        }
        assert!(probe.has_happened(), "a cut had to wait for room");
        volume.close().expect("close");
        drop(volume);
        assert_clean(&device);
    });
}

/// Attributes of files that fill a leaf each to the last byte, by what they take there, and before which of them one more is put. In the
/// order of these keys a leaf that loses its last item to the next one leaves much of itself empty, and so does the next one.
const FULL_LEAVES: [(&[usize], Option<usize>); 4] = [
    (&[3787, 4134, 4134, 4049], None),
    (&[3891, 4134, 4134, 3945], Some(2)),
    (&[4134, 4134, 4036, 3800], Some(1)),
    (&[2762, 4134, 940, 4134, 4134], Some(3)),
];

/// Names of as many attributes, in the order in which they are stored. Each takes 38 bytes besides its value.
fn attribute_names(count: usize) -> Vec<Vec<u8>> {
    let mut names: Vec<_> =
        (0..count).map(|number| format!("user.{number:05}").into_bytes()).collect();
    names.sort_by_key(|name| weir::format::item::name_hash(name));
    names
}

/// Large items that fill their leaves: no tree has room for a small one more in most leaves without a quarter more of them.
#[test]
fn a_checkpoint_finds_room_where_small_items_spoil_leaves_of_large_ones() {
    const BESIDES_VALUE: usize = 38;
    for spare_blocks in [40, 80, 120, 160, 200] {
        let device = formatted(32 * MIB, 1024);
        let volume = open(&device, manual(64 * MIB));
        let room = || volume.stats().space.room_blocks;
        let mut files = Vec::new();
        while room() > spare_blocks || {
            volume.checkpoint().expect("checkpoint");
            room() > spare_blocks
        } {
            let ino = create(&volume, &format!("/f{}", files.len())).ino();
            let (sizes, place) = FULL_LEAVES[files.len() % FULL_LEAVES.len()];
            let mut names = attribute_names(sizes.len() + usize::from(place.is_some()));
            let small = place.map(|place| names.remove(place));
            for (name, size) in names.iter().zip(sizes) {
                let value = vec![1; size - BESIDES_VALUE];
                volume.setxattr(ino, name, &value, XattrMode::Set).expect("there is room");
            }
            files.push((ino, small));
        }
        volume.checkpoint().expect("a checkpoint of full leaves");
        let mut added = 0;
        for (ino, small) in &files {
            let Some(small) = small else { continue };
            match volume.setxattr(*ino, small, b"", XattrMode::Set) {
                Ok(()) => added += 1,
                Err(error) => assert_eq!(error, Error::NoSpace),
            }
        }
        assert!(added > 0);
        volume.checkpoint().expect("a checkpoint that divides leaves");
        remove_all(&volume);
        volume.close().expect("close");
        assert_clean(&device);
    }
}
