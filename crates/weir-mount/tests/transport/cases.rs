//! The transport against the running kernel, over a file system in memory.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::XattrFlags;
use rustix::io::Errno;
use weir_mount::mount_point::mount_at;
use weir_mount::{FileSystemOps, UnmountError};

use crate::TRANSPORT;
use crate::common::{MemoryFs, TestMount};

/// Mounts over the transport that this run is about.
fn mounted(ops: Arc<dyn FileSystemOps>, options: &str) -> Option<TestMount> {
    TestMount::new(ops, &format!("{options},{TRANSPORT}"))
}

fn eventually(what: &str, condition: impl Fn() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_secs(20), "never happened: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn names_are_bytes_and_data_comes_back() {
    let Some(mount) = mounted(MemoryFs::new(), "") else { return };
    let name = OsStr::from_bytes(b"not utf-8: \xff\xfe, a\nnewline");
    let path = mount.path().join(name);
    let data: Vec<u8> = (0..3_000_000_u32).map(|i| (i * 7 % 251) as u8).collect();
    fs::write(&path, &data).unwrap();
    assert_eq!(fs::read(&path).unwrap(), data);
    let listed: Vec<_> =
        fs::read_dir(mount.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(listed, [name]);
    let meta = fs::metadata(&path).unwrap();
    assert_eq!(meta.len(), data.len() as u64);
    assert_eq!(meta.permissions().mode() & 0o777, 0o644);
}

#[test]
fn writes_arrive_in_requests_of_one_mebibyte() {
    let ops = MemoryFs::new();
    let Some(mount) = mounted(Arc::clone(&ops) as _, "") else { return };
    let mut how = OpenOptions::new();
    let mut file = how.read(true).write(true).create(true).open(mount.path().join("f")).unwrap();
    file.write_all(&vec![1; 4 << 20]).unwrap();
    assert_eq!(ops.largest_write(), 1 << 20);
}

#[test]
fn what_a_write_only_handle_of_a_new_file_writes_is_seen_by_readers_and_mappings_at_once() {
    for options in ["", "nodirect_new"] {
        let Some(mount) = mounted(MemoryFs::new(), options) else { return };
        let path = mount.path().join("f");
        let writer = File::create(&path).unwrap();
        // Neither a page nor the end of the buffer is where a request ends.
        let data: Vec<u8> = (0..3_000_001_u32).map(|i| (i * 11 % 253) as u8).collect();
        writer.write_all_at(&data[1..], 1).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), data.len() as u64);
        let both = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let mut found = vec![0; data.len()];
        both.read_exact_at(&mut found, 0).unwrap();
        assert!(found[1..] == data[1..] && found[0] == 0, "{options}");
        // What readers have in the page cache by now must not outlive the next writes, of either handle.
        for (round, handle) in [&writer, &both, &writer].into_iter().enumerate() {
            let piece = [round as u8 + 100; 5000];
            handle.write_all_at(&piece, 4000).unwrap();
            both.read_exact_at(&mut found, 0).unwrap();
            assert!(found[4000..9000] == piece && found[9000..] == data[9000..], "{options}");
        }
        writer.set_len(4500).unwrap();
        assert_eq!(both.read_at(&mut found, 4000).unwrap(), 500);
    }
}

#[test]
fn writes_at_the_same_place_do_not_mix_even_where_each_is_many_requests() {
    const LENGTH_BYTES: usize = 1 << 20;
    for options in ["max_write=4096", "max_write=4096,nodirect_new"] {
        let Some(mount) = mounted(MemoryFs::new(), options) else { return };
        let path = mount.path().join("f");
        let file = File::create(&path).unwrap();
        for round in 0..8_u8 {
            let both = Barrier::new(2);
            thread::scope(|scope| {
                for byte in [round * 2, round * 2 + 1] {
                    let data = vec![byte; LENGTH_BYTES];
                    let (file, both) = (&file, &both);
                    scope.spawn(move || {
                        both.wait();
                        assert_eq!(file.write_at(&data, 0).unwrap(), data.len());
                    });
                }
            });
            let found = fs::read(&path).unwrap();
            assert!(found.iter().all(|byte| *byte == found[0]), "{options}: two writes mix");
        }
    }
}

#[test]
fn directories_links_and_renames_work_and_missing_names_stay_missing() {
    let Some(mount) = mounted(MemoryFs::new(), "") else { return };
    let at = |name: &str| mount.path().join(name);
    fs::create_dir_all(at("a/b/c")).unwrap();
    fs::write(at("a/b/f"), "x").unwrap();
    symlink("b/f", at("a/s")).unwrap();
    fs::hard_link(at("a/b/f"), at("a/h")).unwrap();
    assert_eq!(fs::read_to_string(at("a/s")).unwrap(), "x");
    assert_eq!(fs::metadata(at("a/h")).unwrap().nlink(), 2);
    assert!(!at("a/later").exists());
    fs::rename(at("a/h"), at("a/later")).unwrap();
    assert!(at("a/later").exists() && !at("a/h").exists());
    assert_eq!(fs::remove_dir(at("a")).unwrap_err().raw_os_error(), Some(libc::ENOTEMPTY));
    fs::remove_dir_all(at("a")).unwrap();
    assert_eq!(fs::read_dir(mount.path()).unwrap().count(), 0);
}

#[test]
fn a_large_directory_is_listed_completely_and_once() {
    let Some(mount) = mounted(MemoryFs::new(), "") else { return };
    for number in 0..3000 {
        File::create(mount.path().join(format!("file-{number:05}"))).unwrap();
    }
    let mut names: Vec<_> = fs::read_dir(mount.path())
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            assert_eq!(entry.metadata().unwrap().len(), 0);
            entry.file_name().into_string().unwrap()
        })
        .collect();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 3000);
}

#[test]
fn synchronous_opens_reach_the_file_system_as_synchronous_writes() {
    let ops = MemoryFs::new();
    let Some(mount) = mounted(Arc::clone(&ops) as _, "") else { return };
    let open = |flags| {
        OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .custom_flags(flags)
            .open(mount.path().join("f"))
            .unwrap()
    };
    open(0).write_all(b"plain").unwrap();
    assert_eq!((ops.synced_writes(), ops.full_syncs()), (0, 0));
    open(libc::O_DSYNC).write_all(b"data").unwrap();
    assert_eq!((ops.synced_writes(), ops.full_syncs()), (1, 0));
    open(libc::O_SYNC).write_all(b"all").unwrap();
    assert_eq!(ops.full_syncs(), 1);
    // A new file goes another way through the kernel.
    let before = ops.synced_writes();
    let mut how = OpenOptions::new();
    let new = how.write(true).create_new(true).custom_flags(libc::O_DSYNC);
    new.open(mount.path().join("g")).unwrap().write_all(b"data").unwrap();
    assert_eq!((ops.synced_writes(), ops.full_syncs()), (before + 1, 1));
}

#[test]
fn where_it_is_promised_each_change_is_made_durable_before_its_answer() {
    let ops = MemoryFs::new();
    let Some(mount) = mounted(Arc::clone(&ops) as _, "") else { return };
    let at = |name: &str| mount.path().join(name);
    let rename_to_m = || fs::rename(at("l"), at("m"));
    let set = || rustix::fs::setxattr(at("f"), "user.k", b"v", XattrFlags::empty());
    let changes: [(&str, &dyn Fn()); 13] = [
        ("mkdir", &|| fs::create_dir(at("d")).unwrap()),
        ("create", &|| drop(File::create_new(at("f")).unwrap())),
        ("open to truncate", &|| drop(File::create(at("f")).unwrap())),
        ("mknod", &|| {
            let mode = rustix::fs::Mode::RUSR;
            let fifo = rustix::fs::FileType::Fifo;
            rustix::fs::mknodat(rustix::fs::CWD, at("p"), fifo, mode, 0).unwrap();
        }),
        ("symlink", &|| symlink("x", at("s")).unwrap()),
        ("link", &|| fs::hard_link(at("f"), at("l")).unwrap()),
        ("rename", &|| rename_to_m().unwrap()),
        ("rename with flags", &|| {
            let (from, to) = (at("m"), at("n"));
            let (cwd, flags) = (rustix::fs::CWD, rustix::fs::RenameFlags::NOREPLACE);
            rustix::fs::renameat_with(cwd, from, cwd, to, flags).unwrap();
        }),
        ("unlink", &|| fs::remove_file(at("n")).unwrap()),
        ("rmdir", &|| fs::remove_dir(at("d")).unwrap()),
        ("chmod", &|| fs::set_permissions(at("f"), fs::Permissions::from_mode(0o600)).unwrap()),
        ("setxattr", &|| set().unwrap()),
        ("removexattr", &|| rustix::fs::removexattr(at("f"), "user.k").unwrap()),
    ];
    // The first round is without the promise, and undone.
    for promised in [false, true] {
        ops.is_synchronous.store(promised, Ordering::SeqCst);
        for (name, change) in changes {
            let before = ops.made_durable.load(Ordering::SeqCst);
            change();
            let made = ops.made_durable.load(Ordering::SeqCst) - before;
            assert_eq!(made, u64::from(promised), "{name}, promised: {promised}");
        }
        ops.is_synchronous.store(false, Ordering::SeqCst);
        for left in ["f", "p", "s"] {
            fs::remove_file(at(left)).unwrap();
        }
    }
}

#[test]
fn a_blocked_fsync_on_every_thread_stops_nobody_else() {
    let ops = MemoryFs::new();
    let Some(mount) = mounted(Arc::clone(&ops) as _, "threads=2") else { return };
    fs::write(mount.path().join("hot"), "data").unwrap();
    ops.hold_fsyncs();
    let syncers: Vec<_> = (0..6)
        .map(|number| {
            let file = File::create(mount.path().join(format!("f{number}"))).unwrap();
            thread::spawn(move || file.sync_all().unwrap())
        })
        .collect();
    eventually("six fsyncs wait", || ops.waiting_fsyncs.load(Ordering::SeqCst) == 6);
    assert_eq!(fs::read_to_string(mount.path().join("hot")).unwrap(), "data");
    fs::write(mount.path().join("other"), "more").unwrap();
    assert_eq!(ops.waiting_fsyncs.load(Ordering::SeqCst), 6);
    ops.let_go();
    for syncer in syncers {
        syncer.join().unwrap();
    }
}

#[test]
fn a_panic_in_a_handler_is_an_io_error_and_the_mount_goes_on() {
    let ops = MemoryFs::new();
    let Some(mount) = mounted(Arc::clone(&ops) as _, "") else { return };
    for _ in 0..5 {
        let error = fs::metadata(mount.path().join("panic")).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
    }
    eventually("five panics are reported", || ops.panics().len() == 5);
    assert_eq!(ops.panics()[0], "asked for the name 'panic'");
    fs::write(mount.path().join("after"), "ok").unwrap();
    assert_eq!(fs::read_to_string(mount.path().join("after")).unwrap(), "ok");
}

#[test]
fn an_unlinked_open_file_lives_until_it_is_closed() {
    let ops = MemoryFs::new();
    let Some(mount) = mounted(Arc::clone(&ops) as _, "") else { return };
    let path = mount.path().join("f");
    let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
    file.write_all(b"still here").unwrap();
    let ino = file.metadata().unwrap().ino();
    fs::remove_file(&path).unwrap();
    let mut text = String::new();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "still here");
    drop(file);
    eventually("released", || ops.open_handles() == 0);
    eventually("forgotten", || ops.lookups(ino).is_none());
}

#[test]
fn extended_attributes_keep_their_rules() {
    let Some(mount) = mounted(MemoryFs::new(), "") else { return };
    let path = mount.path().join("f");
    fs::write(&path, "").unwrap();
    let set = |flags| rustix::fs::setxattr(&path, "user.k", b"value", flags);
    assert_eq!(set(XattrFlags::REPLACE), Err(Errno::NODATA));
    set(XattrFlags::CREATE).unwrap();
    assert_eq!(set(XattrFlags::CREATE), Err(Errno::EXIST));
    let mut value = [0_u8; 16];
    assert_eq!(rustix::fs::getxattr(&path, "user.k", &mut value), Ok(5));
    assert_eq!(&value[..5], b"value");
    assert_eq!(rustix::fs::getxattr(&path, "user.k", &mut value[..3]), Err(Errno::RANGE));
    rustix::fs::removexattr(&path, "user.k").unwrap();
    assert_eq!(rustix::fs::getxattr(&path, "user.k", &mut value), Err(Errno::NODATA));
}

#[test]
fn without_attributes_the_kernel_stops_asking_for_them() {
    let ops = MemoryFs::new();
    let Some(mount) = mounted(Arc::clone(&ops) as _, "noxattr") else { return };
    for number in 0..10 {
        fs::write(mount.path().join(format!("f{number}")), "x").unwrap();
    }
    assert_eq!(ops.xattr_reads.load(Ordering::SeqCst), 0);
    let mut value = [0_u8; 16];
    let read = rustix::fs::getxattr(mount.path().join("f0"), "user.k", &mut value);
    assert_eq!(read, Err(Errno::OPNOTSUPP));
    let set = rustix::fs::setxattr(mount.path().join("f0"), "user.k", b"v", XattrFlags::empty());
    assert_eq!(set, Err(Errno::OPNOTSUPP), "nobody could read it");
    let removed = rustix::fs::removexattr(mount.path().join("f0"), "user.k");
    assert_eq!(removed, Err(Errno::OPNOTSUPP));
}

#[test]
fn a_busy_mount_is_not_taken_off_and_says_who_uses_it() {
    let Some(mount) = mounted(MemoryFs::new(), "") else { return };
    let file = File::create(mount.path().join("f")).unwrap();
    let error = mount.controller.unmount(false).unwrap_err();
    let UnmountError::Busy(users) = &error else { panic!("{error}") };
    assert!(users.iter().any(|user| user.pid == std::process::id()), "{error}");
    // Lazily it disappears at once, and is served until the file is closed.
    mount.controller.unmount(true).unwrap();
    assert!(!mount.path().join("f").exists());
    file.write_all_at(b"late", 0).unwrap();
    drop(file);
    mount.join().unwrap();
}

#[test]
fn an_unmount_from_outside_ends_the_server_without_an_error() {
    let Some(mount) = mounted(MemoryFs::new(), "") else { return };
    fs::write(mount.path().join("f"), "x").unwrap();
    let status = std::process::Command::new("umount").arg(mount.path()).status().unwrap();
    assert!(status.success());
    assert!(matches!(mount.controller.unmount(false), Err(UnmountError::NotMounted)));
    mount.join().unwrap();
}

#[test]
fn a_later_mount_with_the_same_device_number_is_left_alone() {
    // The kernel gives the lowest free number; other tests may take it.
    for _ in 0..100 {
        let Some(gone) = mounted(MemoryFs::new(), "") else { return };
        let number = |mount: &TestMount| {
            let dir = mount.path().canonicalize().unwrap();
            mount_at(&dir).unwrap().unwrap().device
        };
        let its_number = number(&gone);
        rustix::mount::unmount(gone.path(), rustix::mount::UnmountFlags::empty()).unwrap();
        let later: Vec<_> = (0..4).filter_map(|_| mounted(MemoryFs::new(), "")).collect();
        if !later.iter().any(|mount| number(mount) == its_number) {
            continue;
        }
        for lazy in [false, true] {
            let refused = gone.controller.unmount(lazy);
            assert!(matches!(refused, Err(UnmountError::NotMounted)), "{refused:?}");
        }
        assert_eq!(gone.controller.held_by(), None);
        gone.controller.abort().unwrap();
        for mount in &later {
            fs::write(mount.path().join("f"), "x").unwrap();
        }
        gone.join().unwrap();
        return;
    }
    panic!("no later mount has ever got the number");
}

#[test]
fn what_is_aborted_can_be_taken_off_still() {
    let Some(mount) = mounted(MemoryFs::new(), "") else { return };
    let dir = mount.path().canonicalize().unwrap();
    // What is in use stays, even where aborting means a forced unmount.
    let user = File::create(dir.join("f")).unwrap();
    mount.controller.abort().unwrap();
    assert!(user.metadata().is_err() && mount_at(&dir).unwrap().is_some());
    assert!(matches!(mount.controller.unmount(false), Err(UnmountError::Busy(_))));
    drop(user);
    mount.controller.unmount(false).unwrap();
    assert_eq!(mount_at(&dir).unwrap(), None);
    mount.join().unwrap();
}

#[test]
fn a_later_mount_at_the_same_place_is_left_alone() {
    let Some(below) = mounted(MemoryFs::new(), "") else { return };
    let dir = below.path().to_owned();
    let status = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "none"])
        .arg(&dir)
        .status()
        .unwrap();
    if !status.success() {
        eprintln!("skipped: no tmpfs here");
        return;
    }
    let refused = [false, true].map(|lazy| below.controller.unmount(lazy));
    rustix::mount::unmount(&dir, rustix::mount::UnmountFlags::empty()).unwrap();
    for refused in refused {
        assert!(matches!(refused, Err(UnmountError::Covered(_))), "{refused:?}");
    }
    below.controller.unmount(false).unwrap();
    below.join().unwrap();
}

#[test]
fn a_mount_is_taken_off_where_it_is_now_after_a_rename_above_it() {
    let parent = tempfile::tempdir().unwrap();
    let (before, after) = (parent.path().join("before"), parent.path().join("after"));
    fs::create_dir_all(before.join("mnt")).unwrap();
    let Some(mount) = TestMount::at(&before.join("mnt"), MemoryFs::new(), TRANSPORT) else {
        return;
    };
    fs::rename(&before, &after).unwrap();
    fs::write(after.join("mnt/f"), "x").unwrap();
    let taken_off = mount.controller.unmount(false);
    let is_there = after.join("mnt/f").exists();
    fs::rename(&after, &before).unwrap();
    assert!(taken_off.is_ok() && !is_there, "{taken_off:?}");
    mount.join().unwrap();
}

#[test]
fn the_kernel_shows_what_is_mounted() {
    let Some(mount) = mounted(MemoryFs::new(), "fsname=/some volume,noatime") else {
        return;
    };
    let dir = mount.path().canonicalize().unwrap();
    let entry = mount_at(&dir).unwrap().unwrap();
    assert_eq!(entry.fs_type, "fuse.weir");
    assert_eq!(entry.source, "/some volume");
}
