//! Many threads on one volume with little memory and a small log: what is read is what was written, nothing is lost, and
//! nobody waits for ever (a watchdog aborts the process).
//!
//! Data races are looked for with `ThreadSanitizer`; it needs a nightly toolchain with the `rust-src` component:
//!
//! ```text
//! RUSTFLAGS=-Zsanitizer=thread cargo +nightly test -Zbuild-std --target x86_64-unknown-linux-gnu \
//!     -p weir --test concurrency
//! ```

mod common;

use common::*;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use weir::device::Device;
use weir::*;

fn run(threads: u64, body: impl Fn(u64) + Sync) {
    with_watchdog(120, || {
        std::thread::scope(|scope| {
            for number in 0..threads {
                let body = &body;
                scope.spawn(move || body(number));
            }
        });
    });
}

/// Runs a function in the end, also of a thread that panics: those who go on until others are done must not wait for it for ever.
struct AtEnd<F: Fn()>(F);

impl<F: Fn()> Drop for AtEnd<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// A record of 512 bytes that says who wrote it where; torn or misplaced ones are found.
fn record(owner: u64, place: u64, version: u64) -> [u8; 512] {
    let mut bytes = [0; 512];
    for (index, word) in bytes.chunks_mut(8).enumerate() {
        let value = (owner << 56) | (place << 28) | (version << 4) | (index as u64 % 16);
        word.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

/// Version of an intact record (0: never written).
fn version(bytes: &[u8], owner: u64, place: u64) -> u64 {
    let word = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
    let version = (word >> 4) & 0xff_ffff;
    if word == 0 {
        assert!(bytes.iter().all(|&byte| byte == 0), "torn record");
        return 0;
    }
    assert!(bytes == record(owner, place, version), "torn or misplaced record at {place}");
    version
}

#[test]
fn writers_of_one_file_never_lose_or_tear_a_record() {
    const WRITERS: u64 = 4;
    const PLACES: u64 = 3000;
    let device = formatted(64 * MIB, 256);
    let volume = open(&device, threads(512 * KIB));
    let file = create(&volume, "/f");
    file.truncate(WRITERS * PLACES * 512).expect("truncate");
    let ended = AtomicU64::new(0);
    // Records of the writers alternate, so that pages are shared.
    let offset = |writer: u64, place: u64| (place * WRITERS + writer) * 512;
    run(WRITERS + 3, |number| {
        let mut dice = Random::seeded(number + 1);
        if number < WRITERS {
            let _end = AtEnd(|| {
                ended.fetch_add(1, Ordering::SeqCst);
            });
            let mut versions = vec![0; PLACES as usize];
            for round in 1..4000 {
                let place = dice.below(PLACES);
                let at = offset(number, place);
                assert_eq!(file.write_at(at, &record(number, place, round)), Ok(512));
                versions[place as usize] = round;
                match dice.below(100) {
                    0 => file.fsync().expect("fsync"),
                    1 => file.fdatasync().expect("fdatasync"),
                    _ => {}
                }
                let place = dice.below(PLACES);
                let mut bytes = [0; 512];
                file.read_at(offset(number, place), &mut bytes).expect("read");
                assert_eq!(version(&bytes, number, place), versions[place as usize]);
            }
            return;
        }
        // Readers and a checkpointer.
        while ended.load(Ordering::SeqCst) < WRITERS {
            if number == WRITERS + 2 {
                volume.checkpoint().expect("checkpoint");
                continue;
            }
            let mut bytes = vec![0; 512 * 64];
            let first = dice.below(WRITERS * PLACES - 64);
            file.read_at(first * 512, &mut bytes).expect("read");
            for (index, bytes) in bytes.chunks(512).enumerate() {
                let at = first + index as u64;
                version(bytes, at % WRITERS, at / WRITERS);
            }
        }
    });
    // Nothing is left that would count as dirty, or as promised, for ever.
    volume.sync().expect("sync");
    volume.checkpoint().expect("checkpoint");
    let stats = volume.stats();
    assert_eq!((stats.dirty_pages, stats.space.reserved_blocks), (0, 0));
    let before = contents(&file);
    volume.close().expect("close");
    drop((file, volume));
    let volume = open(&device, manual(MIB));
    assert!(contents(&volume.open_file("/f", OpenFlags::READ).expect("open")) == before);
}

#[test]
fn a_sync_of_the_volume_covers_what_its_caller_wrote_whoever_else_writes_and_syncs() {
    const WRITERS: u64 = 6;
    const PLACES: u64 = 40;
    let device = formatted(64 * MIB, 256);
    let volume = open(&device, threads(512 * KIB));
    let files: Vec<File> = (0..2).map(|number| create(&volume, &format!("/{number}"))).collect();
    // Places of the writers alternate, so that pages are shared; each is in one of the files.
    let offset = |writer: u64, place: u64| (place * WRITERS + writer) * 1536;
    let synced: Vec<Mutex<Vec<u64>>> =
        (0..WRITERS).map(|_| Mutex::new(vec![0; PLACES as usize])).collect();
    let ended = AtomicU64::new(0);
    run(WRITERS + 1, |number| {
        if number == WRITERS {
            // Files are clean again and again.
            while ended.load(Ordering::SeqCst) < WRITERS {
                volume.checkpoint().expect("checkpoint");
            }
            return;
        }
        let _end = AtEnd(|| {
            ended.fetch_add(1, Ordering::SeqCst);
        });
        let mut dice = Random::seeded(number + 1);
        let mut versions = vec![0; PLACES as usize];
        for round in 1..3000 {
            let place = dice.below(PLACES);
            let file = &files[(place % 2) as usize];
            let at = offset(number, place);
            assert_eq!(file.write_at(at, &record(number, place, round)), Ok(512));
            versions[place as usize] = round;
            match dice.below(80) {
                0 => file.fsync().expect("fsync"),
                1 => {
                    volume.sync().expect("sync");
                    synced[number as usize].lock().expect("unpoisoned").clone_from(&versions);
                }
                2 => {
                    let range = at..at + 512;
                    file.fsync_async(range, SyncKind::Data).expect("asked").wait().expect("synced");
                }
                _ => {}
            }
        }
    });
    // Without another sync, as after a crash.
    drop((files, volume));
    let volume = open(&device, manual(MIB));
    let files: Vec<File> = (0..2)
        .map(|number| volume.open_file(format!("/{number}"), OpenFlags::READ).expect("open"))
        .collect();
    for (writer, synced) in (0..WRITERS).zip(synced) {
        for (place, least) in (0..PLACES).zip(synced.into_inner().expect("unpoisoned")) {
            let mut bytes = [0; 512];
            files[(place % 2) as usize].read_at(offset(writer, place), &mut bytes).expect("read");
            let found = version(&bytes, writer, place);
            assert!(found >= least, "{found} of {writer}, {place}, of which {least} was synced");
        }
    }
}

#[test]
fn readers_never_see_cut_data_again() {
    // Writer and cutters take turns on ranges: what was cut reads as zeros until it is written with the next
    // round's byte; a byte of an earlier round must never come back.
    const ROUNDS: u64 = 120;
    const BYTES: u64 = 200 * 4096;
    let device = formatted(64 * MIB, 256);
    let volume = open(&device, threads(512 * KIB));
    let file = create(&volume, "/f");
    let floor = AtomicU64::new(0);
    let done = AtomicBool::new(false);
    run(4, |number| {
        if number == 0 {
            let _end = AtEnd(|| done.store(true, Ordering::SeqCst));
            for round in 1..=ROUNDS {
                file.write_at(0, &vec![round as u8; BYTES as usize]).expect("write");
                if round % 3 == 0 {
                    file.fsync().expect("fsync");
                }
                if round % 4 == 0 {
                    volume.checkpoint().expect("checkpoint");
                }
                match round % 3 {
                    0 => file.allocate(AllocateMode::PunchHole, 0, BYTES).expect("punch"),
                    1 => {
                        file.truncate(100).expect("truncate");
                        file.truncate(0).expect("truncate");
                        file.truncate(BYTES).expect("grow");
                    }
                    _ => file.allocate(AllocateMode::ZeroRange, 0, BYTES).expect("zero"),
                }
                floor.store(round, Ordering::SeqCst);
                std::thread::yield_now();
            }
            return;
        }
        let mut dice = Random::seeded(number);
        let mut buffer = vec![0; 20 * 4096];
        while !done.load(Ordering::SeqCst) {
            let least = floor.load(Ordering::SeqCst);
            let count = file.read_at(dice.below(BYTES), &mut buffer).expect("read");
            let old = buffer[..count].iter().find(|&&byte| byte != 0 && u64::from(byte) <= least);
            assert_eq!(old, None, "data that was cut in round {least} or before");
        }
    });
    assert!(contents(&file).iter().all(|&byte| byte == 0));
}

#[test]
fn appends_of_many_threads_are_whole_and_all_there() {
    const EACH: u64 = 400;
    let device = formatted(64 * MIB, 64);
    let volume = open(&device, threads(512 * KIB));
    let file = create(&volume, "/log");
    run(4, |number| {
        for round in 1..=EACH {
            let offset = file.append(&record(number, round, round)).expect("append");
            assert_eq!(offset % 512, 0);
            if round % 20 == 0 {
                file.fdatasync().expect("fdatasync");
            }
        }
    });
    drop(volume);
    let bytes = contents(&file);
    let mut seen = BTreeSet::new();
    for bytes in bytes.chunks(512) {
        let word = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
        let (owner, place) = (word >> 56, (word >> 28) & 0xff_ffff);
        assert_eq!(version(bytes, owner, place), place);
        assert!(seen.insert((owner, place)));
    }
    assert_eq!(seen.len() as u64, 4 * EACH);
}

#[test]
fn a_storm_of_names_leaves_a_consistent_tree() {
    const THREADS: u64 = 6;
    let device = formatted(64 * MIB, 128);
    let volume = open(&device, threads(512 * KIB));
    let dirs: Vec<u64> = (0..4)
        .map(|number| volume.create_dir(format!("/d{number}"), 0o755).expect("mkdir").ino)
        .collect();
    run(THREADS, |number| {
        let mut dice = Random::seeded(number + 7);
        for _ in 0..1500 {
            let dir = dirs[dice.below(4) as usize];
            let other = dirs[dice.below(4) as usize];
            let name = format!("n{}", dice.below(12)).into_bytes();
            let other_name = format!("n{}", dice.below(12)).into_bytes();
            let file = NewInode::new(FileType::Regular, 0o600);
            let result = match dice.below(9) {
                0 | 1 => volume.make(dir, &name, &file).map(|_| ()),
                2 => {
                    volume.make(dir, &name, &NewInode::new(FileType::Directory, 0o700)).map(|_| ())
                }
                3 => volume.unlink(dir, &name),
                4 => volume.rmdir(dir, &name),
                5 => volume.rename(dir, &name, other, &other_name, RenameMode::Replace),
                6 => volume.rename(dir, &name, other, &other_name, RenameMode::Exchange),
                7 => volume.lookup(dir, &name).and_then(|attr| {
                    let change = SetAttr { uid: Some(number as u32), ..SetAttr::default() };
                    volume.setattr(attr.ino, &change)?;
                    if attr.file_type == FileType::Regular {
                        volume.link(attr.ino, other, &other_name)?;
                        let file = volume.open_inode(attr.ino, true)?;
                        file.write_at(dice.below(10_000), b"some data")?;
                        if dice.below(4) == 0 {
                            file.fsync()?;
                        }
                    }
                    Ok(())
                }),
                _ => volume.fsync_dir(dir),
            };
            if let Err(error) = result {
                let expected = [
                    libc::ENOENT,
                    libc::EEXIST,
                    libc::ENOTEMPTY,
                    libc::EISDIR,
                    libc::ENOTDIR,
                    libc::EINVAL,
                    libc::EPERM,
                ];
                assert!(expected.contains(&error.errno()), "{error}");
            }
        }
    });
    let counted = count_tree(&volume);
    assert_eq!(volume.statfs().inodes, counted);
    volume.close().expect("close");
    let volume = open(&device, manual(MIB));
    assert_eq!(count_tree(&volume), counted);
    assert_eq!(volume.statfs().inodes, counted);
}

/// Walks the tree, checks link counts, sizes and parents, and counts inodes.
fn count_tree(volume: &Volume) -> u64 {
    let mut links = std::collections::BTreeMap::<u64, u32>::new();
    let mut dirs = vec![Volume::ROOT];
    let mut seen_dirs = 0;
    while let Some(dir) = dirs.pop() {
        seen_dirs += 1;
        let (mut entries, mut subdirectories) = (0, 0);
        volume
            .readdir(dir, 0, &mut |entry| {
                entries += 1;
                if entry.file_type == FileType::Directory {
                    subdirectories += 1;
                    dirs.push(entry.ino);
                    assert_eq!(volume.parent(entry.ino), Ok(dir));
                } else {
                    *links.entry(entry.ino).or_default() += 1;
                }
                true
            })
            .expect("readdir");
        let attr = volume.getattr(dir).expect("getattr");
        assert_eq!((attr.size_bytes, attr.links), (entries, 2 + subdirectories));
    }
    for (&ino, &count) in &links {
        assert_eq!(volume.getattr(ino).expect("getattr").links, count);
    }
    seen_dirs + links.len() as u64
}

#[test]
fn files_come_and_go_in_many_threads_without_a_leak() {
    let device = formatted(64 * MIB, 128);
    let volume = open(&device, threads(512 * KIB));
    volume.checkpoint().expect("checkpoint");
    let fresh = volume.statfs().free_blocks;
    run(6, |number| {
        let mut dice = Random::seeded(number + 70);
        for round in 0..150 {
            let path = format!("/{number}-{}", round % 5);
            let data = pattern(round, dice.below(60_000) as usize + 1);
            let file = create(&volume, &path);
            file.truncate(0).expect("truncate");
            file.write_at(0, &data).expect("write");
            if dice.below(3) == 0 {
                file.fsync().expect("fsync");
            }
            assert!(contents(&file) == data);
            if dice.below(2) == 0 {
                volume.remove_file(&path).expect("unlink");
                assert!(contents(&file) == data, "unlinked and open");
            }
        }
    });
    for entry in volume.read_dir("/").expect("list") {
        volume.unlink(Volume::ROOT, &entry.name).expect("unlink");
    }
    for _ in 0..4 {
        volume.checkpoint().expect("checkpoint");
    }
    assert_eq!(volume.statfs().inodes, 1);
    let space = volume.stats().space;
    assert_eq!((space.reserved_blocks, volume.stats().dirty_pages), (0, 0));
    assert!(volume.statfs().free_blocks + 8 >= fresh);
    volume.close().expect("close");
}

#[test]
fn more_cold_readers_than_the_cache_has_room_for_all_come_through() {
    let device = formatted(64 * MIB, 0);
    let volume = open(&device, manual(8 * MIB));
    let file = create(&volume, "/f");
    let data = pattern(9, 24 << 20);
    file.write_at(0, &data).expect("write");
    volume.close().expect("close");
    drop((file, volume));
    let volume = open(&device, threads(256 * KIB));
    run(24, |number| {
        let file = volume.open_file("/f", OpenFlags::READ).expect("open");
        let mut dice = Random::seeded(number + 1);
        let mut buffer = vec![0; 128 << 10];
        for _ in 0..40 {
            let at = dice.below(data.len() as u64 - 128 * KIB) as usize;
            file.read_at(at as u64, &mut buffer).expect("read");
            assert!(buffer == data[at..at + buffer.len()]);
        }
    });
}

#[test]
fn a_full_volume_under_load_says_so_and_goes_on() {
    let device = formatted(8 * MIB, 64);
    let volume = open(&device, threads(512 * KIB));
    run(4, |number| {
        for round in 0..6 {
            let mut written = Vec::new();
            for file_number in 0..200 {
                let path = format!("/{number}-{file_number}");
                let result = volume.open_file(&path, OpenFlags::CREATE).and_then(|file| {
                    written.push(path);
                    file.write_at(0, &pattern(file_number, 30_000))?;
                    if file_number % 8 == round {
                        file.fsync()?;
                    }
                    Ok(())
                });
                match result {
                    Ok(()) => {}
                    Err(Error::NoSpace) => break,
                    Err(error) => panic!("{error}"),
                }
            }
            for path in written {
                volume.remove_file(path).expect("unlink");
            }
        }
    });
    assert_eq!(volume.statfs().inodes, 1);
    volume.close().expect("close");
}

#[test]
fn a_volume_dropped_under_load_is_like_a_crash_and_ends() {
    for round in 0..6 {
        let device = formatted(32 * MIB, 64);
        let volume = open(&device, threads(256 * KIB));
        let stop = Arc::new(AtomicBool::new(false));
        let acknowledged = AtomicU64::new(0);
        let file = create(&volume, "/f");
        with_watchdog(60, || {
            std::thread::scope(|scope| {
                for number in 0..3_u64 {
                    let (stop, file, acknowledged) = (&stop, &file, &acknowledged);
                    scope.spawn(move || {
                        let mut dice = Random::seeded(number + round);
                        let mut version = 0;
                        while !stop.load(Ordering::Relaxed) {
                            version += 1;
                            let place = dice.below(500);
                            file.write_at(
                                place * 4096 + number * 512,
                                &record(number, place, version),
                            )
                            .expect("write");
                            if version % 16 == 0 && number == 0 {
                                file.write_at(3 * 512, &version.to_le_bytes()).expect("write");
                                file.fsync().expect("fsync");
                                acknowledged.store(version, Ordering::SeqCst);
                            }
                        }
                    });
                }
                while acknowledged.load(Ordering::SeqCst) < 64 {
                    std::thread::yield_now();
                }
                // The threads of the volume end while handles are in use: their users do the work then.
                drop(volume);
                let reached = acknowledged.load(Ordering::SeqCst);
                while acknowledged.load(Ordering::SeqCst) < reached + 64 {
                    std::thread::yield_now();
                }
                stop.store(true, Ordering::Relaxed);
            });
        });
        drop(file);
        let device: Arc<dyn Device> = device;
        let volume = open(&device, manual(MIB));
        let file = volume.open_file("/f", OpenFlags::READ).expect("open");
        let mut bytes = [0; 8];
        file.read_at(3 * 512, &mut bytes).expect("read");
        assert!(u64::from_le_bytes(bytes) >= acknowledged.load(Ordering::SeqCst));
    }
}
