//! Whoever looks while something is replaced, removed or committed sees it before or after, and never something in between.

use super::{NoTime, device, explore};
use shuttle::rand::{Rng, thread_rng};
use shuttle::thread;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use weir::sync::Clock;
use weir::*;

/// A nanosecond passes with each look, so that each change of a time is one.
struct Ticks(AtomicI64);

impl Clock for Ticks {
    fn realtime_ns(&self) -> i64 {
        NoTime.realtime_ns() + self.0.fetch_add(1, Ordering::Relaxed)
    }
    fn monotonic_ns(&self) -> u64 {
        NoTime.monotonic_ns()
    }
    fn sleep_us(&self, pause_us: u64) {
        NoTime.sleep_us(pause_us);
    }
}

fn open() -> Volume {
    let options = VolumeOptions {
        background: BackgroundMode::Manual,
        memory_bytes: Some(256 << 10),
        clock: Arc::new(Ticks(AtomicI64::new(0))),
        atime: AtimePolicy::Strict,
        purge_at_once_blocks: thread_rng().gen_bool(0.2).then_some(0),
        ..VolumeOptions::default()
    };
    Volume::open_device(device(), options).expect("open")
}

fn both(first: impl FnOnce() + Send + 'static, second: impl FnOnce() + Send + 'static) {
    for thread in [thread::spawn(first), thread::spawn(second)] {
        thread.join().expect("a thread of the scenario");
    }
}

#[test]
fn an_attribute_that_both_files_have_is_found_while_one_replaces_the_other() {
    explore(|| {
        let volume = open();
        for path in ["/a", "/b"] {
            let ino = volume.open_file(path, OpenFlags::CREATE).expect("create").ino();
            volume.setxattr(ino, b"user.x", b"1", XattrMode::Set).expect("set");
        }
        let replacing = volume.clone();
        both(
            move || replacing.rename_path("/b", "/a").expect("rename"),
            move || {
                let found = volume.at_path("/a", true, |ino| volume.getxattr(ino, b"user.x"));
                assert_eq!(found, Ok(b"1".to_vec()));
                let found = volume.at_path("/a", true, |ino| volume.listxattr(ino));
                assert_eq!(found, Ok(vec![b"user.x".to_vec()]));
            },
        );
    });
}

/// Whoever removes its name meanwhile: it is open then, without one, and no second one is made.
#[test]
fn who_makes_a_file_opens_the_one_he_made() {
    explore(|| {
        let volume = open();
        let removing = volume.clone();
        let removed = Arc::new(AtomicBool::new(false));
        let is_removed = removed.clone();
        both(
            move || {
                let file = volume.open_file("/f", OpenFlags::CREATE_NEW).expect("create");
                file.write_at(0, b"data").expect("write");
                let (attr, hold) = volume
                    .make_held(Volume::ROOT, b"g", &NewInode::new(FileType::Fifo, 0o600))
                    .expect("make");
                assert_eq!(attr.ino, hold.ino());
                volume.getattr(hold.ino()).expect("it is held");
                thread::yield_now();
                let is_there = volume.lookup(Volume::ROOT, b"f").is_ok();
                assert!(!(is_there && removed.load(Ordering::Acquire)), "made twice");
            },
            move || {
                let unlink = |name| removing.unlink(Volume::ROOT, name);
                if (0..3).any(|_| unlink(b"f").is_ok()) {
                    is_removed.store(true, Ordering::Release);
                }
                let _ = unlink(b"g");
            },
        );
    });
}

#[test]
fn names_are_made_in_a_directory_that_another_one_replaces() {
    explore(|| {
        let volume = open();
        volume.create_dir("/d", 0o755).expect("mkdir");
        volume.create_dir("/e", 0o755).expect("mkdir");
        let replacing = volume.clone();
        both(
            move || match replacing.rename_path("/e", "/d") {
                // What is made comes first.
                Ok(()) | Err(Error::NotEmpty) => {}
                failed => failed.expect("rename"),
            },
            // There is a directory all the time.
            move || match thread_rng().gen_range(0..2) {
                0 => drop(volume.open_file("/d/f", OpenFlags::CREATE).expect("create")),
                _ => drop(volume.create_dir("/d/s", 0o755).expect("mkdir")),
            },
        );
    });
}

#[test]
fn a_name_that_both_directories_have_is_moved_or_removed_while_they_swap() {
    explore(|| {
        let volume = open();
        for dir in ["/d", "/e"] {
            volume.create_dir(dir, 0o755).expect("mkdir");
            volume.create_dir(format!("{dir}/s"), 0o755).expect("mkdir");
            volume.open_file(format!("{dir}/f"), OpenFlags::CREATE).expect("create");
        }
        let swapping = volume.clone();
        both(
            move || {
                swapping.rename(1, b"d", 1, b"e", RenameMode::Exchange).expect("exchange");
                // What was in the way before, unless the other thread has had it.
                let _ = swapping.remove_file("/e/f");
                let _ = swapping.remove_dir("/e/s");
                let _ = swapping.remove_dir("/e");
            },
            move || match thread_rng().gen_range(0..3) {
                0 => volume.remove_file("/d/f").expect("remove"),
                1 => volume.remove_dir("/d/s").expect("remove"),
                _ => volume.rename_path("/d/f", "/d/g").expect("rename"),
            },
        );
    });
}

#[test]
fn who_has_seen_one_size_of_a_batch_sees_the_other() {
    explore(|| {
        let volume = open();
        let paths = ["/1", "/2", "/3", "/4"];
        let files = paths.map(|path| volume.open_file(path, OpenFlags::CREATE).expect("create"));
        let mut batch = volume.batch();
        for file in &files {
            batch.write_at(file, 0, b"new").expect("record");
        }
        both(
            move || {
                batch.commit_relaxed().expect("commit");
            },
            move || {
                for _ in 0..30 {
                    let sizes = files.each_ref().map(File::size);
                    assert!(sizes.is_sorted(), "one after the other: {sizes:?}");
                }
            },
        );
    });
}

#[test]
fn a_file_of_a_batch_is_there_or_not() {
    explore(|| {
        let volume = open();
        let mut batch = volume.batch();
        let new = NewInode::new(FileType::Regular, 0o644);
        let ino = batch.create_file(Volume::ROOT, b"f", &new).expect("record");
        both(
            move || {
                batch.commit_relaxed().expect("commit");
            },
            move || match volume.getattr(ino) {
                Err(Error::NotFound) => {}
                seen => {
                    assert_eq!(seen.map(|attr| (attr.links, attr.permissions)), Ok((1, 0o644)));
                }
            },
        );
    });
}

#[test]
fn nothing_is_left_dirty_of_a_link_that_was_read_while_it_was_removed() {
    explore(|| {
        let volume = open();
        let ino = volume.symlink(Volume::ROOT, b"l", b"x", 0, 0).expect("symlink").ino;
        volume.sync().expect("sync");
        let (reading, removing) = (volume.clone(), volume.clone());
        both(
            move || drop(reading.readlink(ino)),
            move || removing.unlink(Volume::ROOT, b"l").expect("unlink"),
        );
        while volume.background_step(BackgroundWork::Purge).expect("purge") {}
        volume.sync().expect("sync");
        assert_eq!(volume.stats().dirty_inodes, 0);
    });
}

#[test]
fn what_is_above_a_directory_is_found_while_that_gets_another_name() {
    explore(|| {
        let volume = open();
        for path in ["/d", "/e"] {
            volume.create_dir(path, 0o755).expect("mkdir");
        }
        let dir = volume.resolve("/d", true).expect("resolve");
        let swapping = volume.clone();
        both(
            move || swapping.rename(1, b"d", 1, b"e", RenameMode::Exchange).expect("exchange"),
            move || {
                let above = volume.lookup(dir, b"..").expect("the root");
                assert_eq!(above.ino, Volume::ROOT);
            },
        );
    });
}
