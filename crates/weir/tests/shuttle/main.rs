//! The engine's locks under the deterministic scheduler: every scenario runs under random schedules and under schedules with
//! few preemptions (PCT). A schedule in which somebody waits for ever is a deadlock, which the scheduler reports with
//! the seed that repeats it.
//!
//! ```text
//! cargo test -p weir --features shuttle --test shuttle
//! ```
//!
//! The volume has no threads of its own here: whoever waits for background work does it, and one
//! thread of each scenario does nothing else. Time stands still.

#![cfg(feature = "shuttle")]
// `explore` gives the threads stacks for them.
#![allow(clippy::large_stack_arrays)]

use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::thread;
use shuttle::{Config, Runner};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use weir::device::Device;
use weir::device::memory::MemoryDevice;
use weir::dirty_list::DirtyList;
use weir::inode::for_tests::inode;
use weir::log::schedules;
use weir::sync::Clock;
use weir::*;

mod cuts;
mod isolation;
mod serial;

const RANDOM_SCHEDULES: usize = 250;
const PCT_SCHEDULES: usize = 150;
const PAGE: usize = 4096;

struct NoTime;

impl Clock for NoTime {
    fn realtime_ns(&self) -> i64 {
        1_000_000_000
    }
    fn monotonic_ns(&self) -> u64 {
        0
    }
    fn sleep_us(&self, _: u64) {
        thread::yield_now();
    }
}

/// A small disk whose writes have to be flushed.
fn device() -> Arc<dyn Device> {
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(2 << 20));
    let options = CreateOptions {
        volume_id: Some([7; 16]),
        log_bytes: Some(64 * 4096),
        ..CreateOptions::default()
    };
    Volume::format_device(&device, &options).expect("format");
    device
}

fn open(device: &Arc<dyn Device>) -> Volume {
    open_with(device, 256 << 10)
}

fn open_with(device: &Arc<dyn Device>, memory_bytes: u64) -> Volume {
    let options = VolumeOptions {
        background: BackgroundMode::Manual,
        memory_bytes: Some(memory_bytes),
        clock: Arc::new(NoTime),
        // New pages travel in the log in half of the schedules, and beside their frames in the others.
        beside_from_pages: thread_rng().gen_bool(0.5).then_some(1),
        purge_at_once_blocks: thread_rng().gen_bool(0.5).then_some(0),
        // The writeback of a few pages overlaps with itself, and with others, in half of them.
        round_pages: thread_rng().gen_bool(0.5).then_some(1),
        ..VolumeOptions::default()
    };
    Volume::open_device(device.clone(), options).expect("open")
}

/// `SCHEDULES=100` makes of each schedule a hundred.
fn times() -> usize {
    std::env::var("SCHEDULES").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

fn explore(scenario: fn()) {
    explore_some(scenario, 1);
}

/// As [`explore`], with one schedule of so many.
fn explore_some(scenario: fn(), one_in: usize) {
    let config = || {
        let mut config = Config::new();
        // Atomics of the scheduler are large, and the engine has hundreds of them in its histograms.
        config.stack_size = 4 << 20;
        config.max_steps = shuttle::MaxSteps::FailAfter(3_000_000);
        config
    };
    Runner::new(RandomScheduler::new(RANDOM_SCHEDULES * times() / one_in), config()).run(scenario);
    Runner::new(PctScheduler::new(3, PCT_SCHEDULES * times() / one_in), config()).run(scenario);
}

/// Runs `bodies` at once.
fn all(bodies: Vec<Box<dyn FnOnce() + Send>>) {
    let threads: Vec<_> = bodies.into_iter().map(|body| thread::spawn(body)).collect();
    for thread in threads {
        thread.join().expect("a thread of the scenario");
    }
}

fn background(volume: &Volume, steps: usize) -> Box<dyn FnOnce() + Send> {
    let volume = volume.clone();
    Box::new(move || {
        for step in 0..steps {
            let work = match step % 4 {
                0 => BackgroundWork::Writeback,
                _ => BackgroundWork::Checkpoint,
            };
            volume.background_step(work).expect("background");
        }
    })
}

fn contents(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.size() as usize];
    assert_eq!(file.read_at(0, &mut bytes), Ok(bytes.len()));
    bytes
}

#[test]
fn every_acknowledged_fsync_is_there_after_a_crash() {
    explore(|| {
        let device = device();
        let volume = open(&device);
        let mut bodies: Vec<Box<dyn FnOnce() + Send>> = vec![background(&volume, 8)];
        for number in 0..3_u8 {
            let volume = volume.clone();
            bodies.push(Box::new(move || {
                let path = format!("/{number}");
                let file = volume.open_file(path, OpenFlags::CREATE).expect("create");
                for round in 0..2 {
                    file.write_at(round * 5000, &[number + 1; 5000]).expect("write");
                    file.fsync().expect("fsync");
                }
            }));
        }
        all(bodies);
        drop(volume);
        let volume = open(&device);
        for number in 0..3_u8 {
            let file = volume.open_file(format!("/{number}"), OpenFlags::READ).expect("open");
            assert!(contents(&file) == [number + 1; 10_000]);
        }
    });
}

#[test]
fn write_truncate_fsync_and_writeback_of_one_file_agree() {
    explore(|| {
        let device = device();
        let volume = open(&device);
        let file = volume.open_file("/f", OpenFlags::CREATE).expect("create");
        file.write_at(0, &[1; 6 * PAGE]).expect("write");
        file.fsync().expect("fsync");
        let (writer, cutter, syncer) = (file.clone(), file.clone(), file.clone());
        all(vec![
            background(&volume, 10),
            Box::new(move || {
                for round in 2..5 {
                    writer.write_at(2 * PAGE as u64 + 100, &[round; 2 * PAGE]).expect("write");
                }
            }),
            Box::new(move || {
                cutter.truncate(5000).expect("truncate");
                cutter.allocate(AllocateMode::Extend, 0, 8 * PAGE as u64).expect("allocate");
            }),
            Box::new(move || {
                for _ in 0..2 {
                    syncer.fsync().expect("fsync");
                }
            }),
        ]);
        let before = contents(&file);
        assert!(before[..5000].iter().all(|&byte| byte == 1));
        // Behind the cut there is only what was written after it: whole calls of the writer, or zeros.
        let range = 2 * PAGE + 100..4 * PAGE + 100;
        assert!(before[range.end..].iter().all(|&byte| byte == 0));
        assert!(before[5000..range.start].iter().all(|&byte| byte == 0));
        assert!(before[range.clone()].iter().all(|&byte| byte == before[range.start]));
        file.fsync().expect("fsync");
        drop((file, volume));
        let volume = open(&device);
        assert!(contents(&volume.open_file("/f", OpenFlags::READ).expect("open")) == before);
    });
}

#[test]
fn a_reader_never_brings_cut_data_back() {
    explore(|| {
        let device = device();
        let volume = open(&device);
        volume
            .open_file("/f", OpenFlags::CREATE)
            .and_then(|file| file.write_at(0, &[7; 6 * PAGE]))
            .expect("write");
        volume.close().expect("close");
        // Nothing is cached.
        let volume = open(&device);
        let file = volume.open_file("/f", OpenFlags::READ_WRITE).expect("open");
        let (reader, cutter) = (file.clone(), file.clone());
        all(vec![
            background(&volume, 6),
            Box::new(move || {
                let mut bytes = vec![0; 6 * PAGE];
                for _ in 0..2 {
                    reader.read_at(0, &mut bytes).expect("read");
                    assert!(bytes.iter().all(|&byte| byte == 0 || byte == 7));
                }
            }),
            Box::new(move || {
                let page = PAGE as u64;
                cutter.allocate(AllocateMode::PunchHole, page, 2 * page).expect("punch");
                cutter.truncate(4 * page).expect("truncate");
                cutter.truncate(6 * page).expect("grow");
            }),
        ]);
        let bytes = contents(&file);
        assert!(bytes[..PAGE].iter().all(|&byte| byte == 7));
        assert!(bytes[PAGE..3 * PAGE].iter().all(|&byte| byte == 0));
        assert!(bytes[3 * PAGE..4 * PAGE].iter().all(|&byte| byte == 7));
        assert!(bytes[4 * PAGE..].iter().all(|&byte| byte == 0));
    });
}

/// First into pages that are absent or being read, then over pages that are cached or on their way home.
#[test]
fn large_writes_agree_with_readers_that_bring_pages_in_and_with_writeback() {
    explore(|| {
        let device = device();
        let volume = open(&device);
        volume
            .open_file("/f", OpenFlags::CREATE)
            .and_then(|file| file.write_at(0, &[7; 16 * PAGE]))
            .expect("write");
        volume.close().expect("close");
        // Nothing is cached.
        // Some writes find memory for new pages beside the old ones, others do not.
        let memory_bytes = if thread_rng().gen_bool(0.5) { 1 << 20 } else { 512 << 10 };
        let volume = open_with(&device, memory_bytes);
        let file = volume.open_file("/f", OpenFlags::READ_WRITE).expect("open");
        let (reader, writer, syncer) = (file.clone(), file.clone(), file.clone());
        all(vec![
            background(&volume, 6),
            Box::new(move || {
                for round in 0..3_u64 {
                    let mut bytes = vec![0; 8 * PAGE];
                    reader.read_at(round * 4 * PAGE as u64, &mut bytes).expect("read");
                    let is_whole =
                        |page: &[u8]| page == [page[0]; PAGE] && matches!(page[0], 7..10);
                    assert!(bytes.chunks(PAGE).all(is_whole));
                }
            }),
            Box::new(move || {
                for (unit, byte) in [(0, 8), (1, 8), (0, 9), (1, 9)] {
                    let at = unit * 8 * PAGE as u64;
                    assert_eq!(writer.write_at(at, &[byte; 8 * PAGE]), Ok(8 * PAGE));
                }
            }),
            Box::new(move || syncer.fsync().expect("fsync")),
        ]);
        assert!(contents(&file) == [9; 16 * PAGE]);
        file.fsync().expect("fsync");
        drop((file, volume));
        let volume = open(&device);
        let file = volume.open_file("/f", OpenFlags::READ).expect("open");
        assert!(contents(&file) == [9; 16 * PAGE]);
    });
}

#[test]
fn names_agree_with_checkpoints_in_between() {
    explore(|| {
        let device = device();
        let volume = open(&device);
        let dir = volume.create_dir("/d", 0o755).expect("mkdir").ino;
        let mut bodies: Vec<Box<dyn FnOnce() + Send>> = vec![background(&volume, 12)];
        for number in 0..2_u8 {
            let volume = volume.clone();
            bodies.push(Box::new(move || {
                let new = NewInode::new(FileType::Regular, 0o600);
                let own = [b'a' + number];
                volume.make(Volume::ROOT, &own, &new).expect("make");
                let replace = RenameMode::Replace;
                volume.rename(Volume::ROOT, &own, dir, b"shared", replace).expect("rename");
                volume.make(Volume::ROOT, &own, &new).expect("make");
                // The other's file may have been replaced, moved away, or not be there yet.
                let back = volume.rename(dir, b"shared", Volume::ROOT, &own, replace);
                assert!(matches!(back, Ok(()) | Err(Error::NotFound)));
                volume.fsync_dir(dir).expect("fsync");
                volume.unlink(Volume::ROOT, &own).expect("unlink");
            }));
        }
        all(bodies);
        let left = volume.read_dir("/d").expect("list").len() as u64;
        assert!(left <= 1);
        assert_eq!(volume.statfs().inodes, 2 + left);
        volume.close().expect("close");
        let volume = open(&device);
        assert_eq!(volume.read_dir("/d").expect("list").len() as u64, left);
        assert_eq!(volume.statfs().inodes, 2 + left);
    });
}

#[test]
fn what_is_replaced_is_found_whoever_looks_it_up_meanwhile() {
    explore(|| {
        let volume = open(&device());
        let make = |name: &str| volume.open_file(name, OpenFlags::CREATE).map(|_| ());
        for name in ["/file", "/first", "/second"] {
            make(name).expect("make");
        }
        let link = |name: &[u8]| volume.symlink(Volume::ROOT, name, b"second", 0, 0);
        link(b"link").and(link(b"other")).expect("symlink");
        let replacing = volume.clone();
        let looks: [fn(&Volume) -> Result<()>; 2] = [
            |volume| {
                volume.open_file("/file", OpenFlags::READ)?;
                volume.lookup(Volume::ROOT, b"file").map(|_| ())
            },
            |volume| {
                volume.metadata("/file")?;
                // What it leads to stays.
                volume.open_file("/link", OpenFlags::READ).map(|_| ())
            },
        ];
        let mut bodies: Vec<Box<dyn FnOnce() + Send>> = vec![Box::new(move || {
            replacing.rename_path("/first", "/file").expect("rename");
            replacing.rename_path("/other", "/link").expect("rename");
        })];
        for look in looks {
            let volume = volume.clone();
            bodies.push(Box::new(move || look(&volume).expect("there is something all the time")));
        }
        all(bodies);
    });
}

#[test]
fn a_file_that_takes_the_place_of_one_that_has_just_appeared_comes_after_its_data() {
    explore(|| {
        let device = device();
        let volume = open(&device);
        let new = volume.open_file("/new", OpenFlags::CREATE).expect("create");
        new.write_at(0, b"data").expect("write");
        let (renaming, making) = (volume.clone(), volume.clone());
        all(vec![
            Box::new(move || renaming.rename_path("/new", "/f").expect("rename")),
            Box::new(move || {
                let file = making.open_file("/f", OpenFlags::CREATE).expect("open");
                file.fsync().expect("fsync");
            }),
        ]);
        // Somebody else's sync makes the rename durable.
        let other = volume.open_file("/other", OpenFlags::CREATE).expect("create");
        other.fsync().expect("fsync");
        let crashed = open(&device);
        let file = crashed.open_file("/f", OpenFlags::READ).expect("open");
        assert_eq!(contents(&file), b"data");
    });
}

#[test]
fn eviction_and_reads_agree_with_less_memory_than_data() {
    explore(|| {
        let device = device();
        let volume = open(&device);
        let file = volume.open_file("/f", OpenFlags::CREATE).expect("create");
        for page in 0..80_u64 {
            file.write_at(page * PAGE as u64, &[page as u8; PAGE]).expect("write");
        }
        file.fsync().expect("fsync");
        let mut bodies: Vec<Box<dyn FnOnce() + Send>> = Vec::new();
        for number in 0..2_u64 {
            let file = file.clone();
            bodies.push(Box::new(move || {
                let mut bytes = [0; 2 * PAGE];
                for step in 0..12_u64 {
                    let page = (step * 29 + number * 11) % 79;
                    file.read_at(page * PAGE as u64, &mut bytes).expect("read");
                    for (index, bytes) in bytes.chunks(PAGE).enumerate() {
                        assert!(bytes.iter().all(|&byte| u64::from(byte) == page + index as u64));
                    }
                }
            }));
        }
        let writer = file.clone();
        bodies.push(Box::new(move || {
            for page in (0..80_u64).step_by(9) {
                writer.write_at(page * PAGE as u64 + 10, &[page as u8; 100]).expect("write");
            }
        }));
        all(bodies);
        let stats = volume.stats();
        assert!(stats.pages_in_use <= stats.pages_capacity);
    });
}

#[test]
fn the_last_user_of_an_unlinked_file_purges_it_once() {
    explore(|| {
        let device = device();
        let volume = open(&device);
        let file = volume.open_file("/f", OpenFlags::CREATE).expect("create");
        file.write_at(0, &[1; 3 * PAGE]).expect("write");
        let ino = file.ino();
        let (opener, remover, user) = (volume.clone(), volume.clone(), file);
        all(vec![
            background(&volume, 6),
            Box::new(move || {
                if let Ok(file) = opener.open_inode(ino, true) {
                    assert!(contents(&file) == [1; 3 * PAGE]);
                    file.fsync().expect("fsync");
                }
                let change = SetAttr { size_bytes: Some(10), ..SetAttr::default() };
                let changed = opener.setattr(ino, &change);
                assert!(matches!(changed, Ok(_) | Err(Error::NotFound)));
            }),
            Box::new(move || remover.remove_file("/f").expect("unlink")),
            Box::new(move || drop(user)),
        ]);
        while volume.background_step(BackgroundWork::Purge).expect("purge") {}
        assert_eq!(volume.getattr(ino), Err(Error::NotFound));
        assert_eq!(volume.statfs().inodes, 1);
        volume.close().expect("close");
        let volume = open(&device);
        assert_eq!(volume.statfs().inodes, 1);
    });
}

#[test]
fn space_of_a_removed_file_is_there_for_a_write_while_others_purge_it() {
    explore(|| {
        let device = device();
        let volume = open(&device);
        // Apart from each other, so that it takes several operations to purge them.
        let file = volume.open_file("/full", OpenFlags::CREATE).expect("create");
        let mut pages = 0;
        while file.write_at(2 * pages * PAGE as u64, &[7; PAGE]).is_ok() {
            pages += 1;
        }
        volume.sync().expect("sync");
        drop(file);
        let (cleaner, writer) = (volume.clone(), volume.clone());
        volume.remove_file("/full").expect("unlink");
        all(vec![
            Box::new(move || {
                cleaner.background_step(BackgroundWork::Purge).expect("purge");
            }),
            Box::new(move || {
                let file = writer.open_file("/next", OpenFlags::CREATE).expect("create");
                let most = vec![1; pages as usize * PAGE * 3 / 4];
                file.append(&most).expect("the space of the removed file");
            }),
        ]);
    });
}

#[test]
fn barriers_syncs_and_checkpoints_wait_for_each_other_without_end_to_that() {
    const LENGTHS: [usize; 2] = [16 * PAGE, 2 * PAGE];
    explore(|| {
        let device = device();
        let volume = open(&device);
        let mut bodies: Vec<Box<dyn FnOnce() + Send>> = vec![background(&volume, 6)];
        for number in 0..2_u8 {
            let volume = volume.clone();
            bodies.push(Box::new(move || {
                let path = format!("/{number}");
                let file = volume.open_file(&path, OpenFlags::CREATE).expect("create");
                // The first is more than travels in this log at once: its barrier opens a chain.
                file.write_at(0, &vec![number + 1; LENGTHS[number as usize]]).expect("write");
                let lsn = if number == 0 { volume.barrier() } else { file.barrier() };
                let lsn = lsn.expect("barrier");
                let after = volume.open_file(format!("/after{number}"), OpenFlags::CREATE);
                let after = after.expect("create");
                if number == 0 {
                    after.fsync().expect("fsync");
                    assert!(volume.durable_lsn() >= lsn);
                }
            }));
        }
        all(bodies);
        drop(volume);
        let volume = open(&device);
        assert!(volume.metadata("/after0").is_ok(), "it was synced");
        for number in 0..2_u8 {
            if volume.metadata(format!("/after{number}")).is_ok() {
                let file = volume.open_file(format!("/{number}"), OpenFlags::READ).expect("open");
                assert_eq!(contents(&file), vec![number + 1; LENGTHS[number as usize]]);
            }
        }
    });
}

#[test]
fn a_ticket_for_a_barrier_ends_when_the_barrier_is_durable_and_no_sooner() {
    explore(|| {
        let device = device();
        let volume = open(&device);
        let file = volume.open_file("/f", OpenFlags::CREATE).expect("create");
        file.write_at(0, &[1; 16 * PAGE]).expect("write");
        let (syncer, other) = (volume.clone(), volume.clone());
        all(vec![
            background(&volume, 4),
            Box::new(move || {
                let lsn = syncer.barrier().expect("barrier");
                let ticket = syncer.ticket_for(lsn).expect("a number that was given out");
                while ticket.poll().is_none() {
                    syncer.background_step(BackgroundWork::Log).expect("log");
                    thread::yield_now();
                }
                assert_eq!(ticket.poll(), Some(Ok(())));
                assert!(syncer.durable_lsn() >= lsn);
            }),
            Box::new(move || {
                let after = other.open_file("/after", OpenFlags::CREATE).expect("create");
                after.fsync().expect("fsync");
            }),
        ]);
        drop((file, volume));
        let volume = open(&device);
        let file = volume.open_file("/f", OpenFlags::READ).expect("open");
        assert_eq!(contents(&file), vec![1; 16 * PAGE]);
    });
}

#[test]
fn batches_renames_and_writers_of_the_same_files_end() {
    explore(|| {
        let device = device();
        let volume = open(&device);
        for dir in ["/d", "/e"] {
            volume.create_dir(dir, 0o755).expect("directory");
        }
        let dirs = ["/d", "/e"].map(|dir| volume.resolve(dir, true).expect("directory"));
        let files: Vec<File> = ["/f", "/g"]
            .iter()
            .map(|path| volume.open_file(path, OpenFlags::CREATE).expect("create"))
            .collect();
        let mut bodies: Vec<Box<dyn FnOnce() + Send>> = vec![background(&volume, 4)];
        for number in 0..2_u8 {
            let (volume, files) = (volume.clone(), files.clone());
            bodies.push(Box::new(move || {
                let [from, to] = if number == 0 { dirs } else { [dirs[1], dirs[0]] };
                let mut batch = volume.batch();
                let new = NewInode::new(FileType::Regular, 0o644);
                let ino = batch.create_file(from, b"x", &new).expect("recorded");
                batch.write_inode(ino, 0, &[number; 100]).expect("recorded");
                batch
                    .rename(from, b"x", to, &[b'a' + number], RenameMode::Replace)
                    .expect("recorded");
                for file in files.iter().rev() {
                    batch.write_at(file, 0, &[number + 1; 2 * PAGE]).expect("recorded");
                }
                batch.commit().expect("commit");
            }));
        }
        let other = (volume.clone(), files[0].clone());
        bodies.push(Box::new(move || {
            let (volume, file) = other;
            file.truncate(100).expect("truncate");
            volume.rename_path("/d", "/moved").expect("rename");
            file.fsync().expect("fsync");
        }));
        all(bodies);
        // Both batches wrote both files as a whole; whichever came last is in both.
        assert_eq!(contents(&files[1]).first(), contents(&files[1]).last());
        volume.sync().expect("sync");
        drop((files, volume));
        let volume = open(&device);
        assert_eq!(volume.read_dir("/moved").expect("list").len(), 1);
        assert_eq!(volume.read_dir("/e").expect("list").len(), 1);
        let second = volume.open_file("/g", OpenFlags::READ).expect("open");
        let bytes = contents(&second);
        assert_eq!(bytes.len(), 2 * PAGE);
        assert!(bytes.iter().all(|byte| *byte == bytes[0]));
    });
}

/// They lock the same directories and files, and name them in opposite order; one needs the lock of a directory that it hears of only when it
/// looks. Each happens as a whole, or not at all.
#[test]
fn batches_that_name_the_same_inodes_in_opposite_order_end() {
    explore(|| {
        let device = device();
        let volume = open(&device);
        let paths = ["/d", "/e"];
        let dirs = paths.map(|dir| {
            volume.create_dir(dir, 0o755).expect("directory");
            volume.open_file(format!("{dir}/t"), OpenFlags::CREATE).expect("create");
            volume.resolve(dir, true).expect("directory")
        });
        let turning =
            || paths.map(|dir| volume.resolve(format!("{dir}/t"), true).expect("always there"));
        let before = turning();
        volume.create_dir("/e/sub", 0o755).expect("directory");
        let sub = volume.resolve("/e/sub", true).expect("directory");
        let files =
            ["/f", "/g"].map(|path| volume.open_file(path, OpenFlags::CREATE).expect("create"));
        let failures = Arc::new(AtomicUsize::new(0));
        let mut bodies: Vec<Box<dyn FnOnce() + Send>> = vec![background(&volume, 4)];
        for one in 0..2_usize {
            let (volume, files, failures) = (volume.clone(), files.clone(), failures.clone());
            bodies.push(Box::new(move || {
                let (other, byte) = (1 - one, one as u8 + 1);
                let mut batch = volume.batch();
                batch.write_at(&files[one], 0, &[byte; PAGE + 50]).expect("recorded");
                let exchange = RenameMode::Exchange;
                batch.rename(dirs[one], b"t", dirs[other], b"t", exchange).expect("recorded");
                batch.truncate(&files[other], 0).expect("recorded");
                batch.write_at(&files[other], 0, &[byte; 39]).expect("recorded");
                if one == 0 {
                    batch.rmdir(dirs[1], b"sub").expect("recorded");
                }
                match batch.commit_relaxed().map_err(|failed| failed.error) {
                    Err(Error::NotEmpty) if one == 0 => {
                        failures.fetch_add(1, Ordering::Relaxed);
                    }
                    committed => drop(committed.expect("commit")),
                }
            }));
        }
        let (other, file) = (volume.clone(), files[1].clone());
        let made = Arc::new(AtomicUsize::new(0));
        let makes = made.clone();
        bodies.push(Box::new(move || {
            let new = NewInode::new(FileType::Regular, 0o644);
            match other.make(sub, b"x", &new) {
                Err(Error::NotFound) => {}
                made => {
                    let _made: Attr = made.expect("make");
                    makes.fetch_add(1, Ordering::Relaxed);
                }
            }
            file.fsync().expect("fsync");
        }));
        all(bodies);
        let failures = failures.load(Ordering::Relaxed);
        assert_eq!(made.load(Ordering::Relaxed), failures, "a file keeps its directory");
        let [d, e] = before;
        assert_eq!(turning(), if failures == 0 { [d, e] } else { [e, d] });
        let found = files.each_ref().map(contents);
        let first_is_last = found[0].len() > found[1].len();
        let expected = if first_is_last {
            [vec![1; PAGE + 50], vec![1; 39]]
        } else {
            [vec![2; 39], vec![2; PAGE + 50]]
        };
        assert!(found == expected && !(first_is_last && failures > 0));
    });
}

#[test]
fn tickets_end_whether_they_are_awaited_delivered_or_dropped() {
    explore(|| {
        let device = device();
        let volume = open(&device);
        let queue = CompletionQueue::new().expect("queue");
        let mut bodies: Vec<Box<dyn FnOnce() + Send>> = vec![background(&volume, 4)];
        for number in 0..3_u8 {
            let (volume, queue) = (volume.clone(), queue.clone());
            bodies.push(Box::new(move || {
                let file =
                    volume.open_file(format!("/{number}"), OpenFlags::CREATE).expect("create");
                // The last is more than is done at submission.
                let pages = if number == 2 { 20 } else { 1 };
                file.write_at(0, &vec![number + 1; pages * PAGE]).expect("write");
                let ticket = file.fsync_async(0..u64::MAX, SyncKind::Full).expect("submitted");
                match number {
                    0 => drop(ticket),
                    1 => ticket.deliver(&queue, 1),
                    _ => {
                        while ticket.poll().is_none() {
                            volume.background_step(BackgroundWork::Log).expect("log");
                            thread::yield_now();
                        }
                        assert_eq!(ticket.poll(), Some(Ok(())));
                    }
                }
            }));
        }
        let driver = volume.clone();
        bodies.push(Box::new(move || {
            for _ in 0..4 {
                driver.background_step(BackgroundWork::Log).expect("log");
            }
        }));
        all(bodies);
        while volume.background_step(BackgroundWork::Log).expect("log") {}
        let done = queue.take().expect("delivered");
        assert_eq!((done.user_data, done.result), (1, Ok(())));
        assert_eq!(volume.stats().tickets, 0);
        drop((queue, volume));
        let volume = open(&device);
        for number in 0..3_u8 {
            let file = volume.open_file(format!("/{number}"), OpenFlags::READ).expect("open");
            assert!(contents(&file).iter().all(|&byte| byte == number + 1));
            assert!(file.size() > 0, "a dropped ticket cancels nothing");
        }
    });
}

#[test]
fn a_sync_of_a_range_and_a_truncation_leave_one_of_the_two_orders() {
    explore(|| {
        let device = device();
        let volume = open(&device);
        let file = volume.open_file("/f", OpenFlags::CREATE).expect("create");
        file.write_at(0, &[1; 8 * PAGE]).expect("write");
        file.fsync().expect("fsync");
        file.write_at(2 * PAGE as u64, &[2; 4 * PAGE]).expect("write");
        let (syncer, cutter, writer, volume2) =
            (file.clone(), file.clone(), file.clone(), volume.clone());
        all(vec![
            background(&volume, 6),
            Box::new(move || {
                let range = 3 * PAGE as u64..5 * PAGE as u64;
                let ticket = syncer.fsync_async(range, SyncKind::Data).expect("submitted");
                while ticket.poll().is_none() {
                    volume2.background_step(BackgroundWork::Log).expect("log");
                    thread::yield_now();
                }
            }),
            Box::new(move || {
                cutter.truncate(4 * PAGE as u64 + 100).expect("truncate");
                cutter.fsync().expect("fsync");
            }),
            Box::new(move || assert_eq!(writer.write_at(0, &[3; 100]), Ok(100))),
        ]);
        drop((file, volume));
        let volume = open(&device);
        let bytes = contents(&volume.open_file("/f", OpenFlags::READ).expect("open"));
        assert_eq!(bytes.len(), 4 * PAGE + 100);
        assert!(bytes[100..2 * PAGE].iter().all(|&byte| byte == 1));
        assert!(bytes[..100].iter().all(|&byte| byte == bytes[0]));
        // All that is left was synced, by the range or by the whole.
        assert!(bytes[2 * PAGE..].iter().all(|&byte| byte == 2));
    });
}

#[test]
fn ranges_handed_over_reach_the_disk_beside_syncs_and_early_writeback() {
    explore(|| {
        let device = device();
        let volume = open(&device);
        let files: Vec<File> = ["/f", "/g"]
            .iter()
            .map(|path| volume.open_file(path, OpenFlags::CREATE).expect("create"))
            .collect();
        for file in &files {
            file.write_at(0, &[1; 10 * PAGE]).expect("write");
            file.fsync().expect("fsync");
            file.write_at(0, &[2; 10 * PAGE]).expect("write");
        }
        let home = volume.clone();
        let mut bodies: Vec<Box<dyn FnOnce() + Send>> = vec![Box::new(move || {
            for _ in 0..3 {
                home.background_step(BackgroundWork::EarlyHome).expect("early home");
                home.background_step(BackgroundWork::PartialCheckpoint).expect("checkpoint");
                home.background_step(BackgroundWork::Writeback).expect("writeback");
            }
        })];
        for (number, file) in files.iter().cloned().enumerate() {
            bodies.push(Box::new(move || {
                let page = PAGE as u64;
                let flags = SyncRangeFlags { wait_before: true, ..SyncRangeFlags::WRITE };
                file.sync_range(0..5 * page, flags).expect("sync_range");
                file.write_at(4 * page, &[3; PAGE]).expect("write");
                file.expire(3 * page..10 * page).expect("expire");
                if number == 0 {
                    let wait = SyncRangeFlags { wait_after: true, ..SyncRangeFlags::WRITE };
                    file.sync_range(0..u64::MAX, wait).expect("sync_range");
                }
                file.fsync().expect("fsync");
            }));
        }
        all(bodies);
        drop((files, volume));
        let volume = open(&device);
        for path in ["/f", "/g"] {
            let bytes = contents(&volume.open_file(path, OpenFlags::READ).expect("open"));
            for (index, page) in bytes.chunks(PAGE).enumerate() {
                let expected = if index == 4 { 3 } else { 2 };
                assert!(page.iter().all(|&byte| byte == expected), "{path} page {index}");
            }
        }
    });
}

#[test]
fn nobody_who_waits_for_the_log_is_forgotten() {
    schedules::explore(|| RandomScheduler::new(2000));
    schedules::explore(|| PctScheduler::new(3, 2000));
}

#[test]
fn a_dirty_inode_is_on_the_list_whoever_else_looks_at_it() {
    let scenario = || {
        let (list, inode) = (Arc::new(DirtyList::default()), inode());
        list.add(&inode);
        let cleaner = || -> Box<dyn FnOnce() + Send> {
            let (list, inode) = (list.clone(), inode.clone());
            Box::new(move || list.remove_if_clean(&inode))
        };
        let (writer_list, written) = (list.clone(), inode.clone());
        let writer = move || {
            written.meta.lock().dirty = true;
            writer_list.add(&written);
        };
        all(vec![cleaner(), cleaner(), Box::new(writer)]);
        assert_eq!(list.count(), 1, "a dirty inode is on the list");
        assert!(inode.listed.load(Ordering::SeqCst));
    };
    Runner::new(RandomScheduler::new(3000), Config::new()).run(scenario);
    Runner::new(PctScheduler::new(3, 1000), Config::new()).run(scenario);
}
