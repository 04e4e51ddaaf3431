//! The details that POSIX (and Linux, where it goes further) prescribes, one by one.

mod common;

use common::*;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use weir::*;

const ROOT: u64 = Volume::ROOT;

fn mkdir(volume: &Volume, dir: u64, name: &[u8]) -> Attr {
    volume.make(dir, name, &NewInode::new(FileType::Directory, 0o755)).expect("mkdir")
}

fn mkfile(volume: &Volume, dir: u64, name: &[u8]) -> Attr {
    volume.make(dir, name, &NewInode::new(FileType::Regular, 0o644)).expect("create")
}

fn timed_volume(atime: AtimePolicy) -> (Volume, std::sync::Arc<HandClock>) {
    let clock = HandClock::at(1_000);
    let options = VolumeOptions { clock: clock.clone(), atime, ..manual(4 * MIB) };
    (open(&formatted(32 * MIB, 0), options), clock)
}

// --- Errors --------------------------------------------------------------------------------------

#[test]
fn every_error_of_the_namespace_has_its_errno() {
    let volume = small_volume();
    let dir = mkdir(&volume, ROOT, b"d").ino;
    let file = mkfile(&volume, ROOT, b"f").ino;
    mkfile(&volume, dir, b"inside");
    volume.symlink(ROOT, b"loop", b"/loop", 0, 0).expect("symlink");
    let new = NewInode::new(FileType::Regular, 0o600);
    let errno = |result: Result<()>| result.expect_err("refused").errno();
    let ok = |result: Result<Attr>| result.map(|_| ());

    assert_eq!(errno(ok(volume.lookup(ROOT, b"none"))), libc::ENOENT);
    assert_eq!(errno(ok(volume.getattr(999))), libc::ENOENT);
    assert_eq!(errno(ok(volume.lookup(file, b"x"))), libc::ENOTDIR);
    assert_eq!(errno(ok(volume.make(ROOT, b"f", &new))), libc::EEXIST);
    assert_eq!(errno(ok(volume.make(file, b"x", &new))), libc::ENOTDIR);
    assert_eq!(errno(ok(volume.make(ROOT, &[b'n'; 256], &new))), libc::ENAMETOOLONG);
    assert_eq!(errno(ok(volume.lookup(ROOT, &[b'n'; 256]))), libc::ENAMETOOLONG);
    assert_eq!(errno(ok(volume.make(ROOT, b"..", &new))), libc::EINVAL);
    assert_eq!(errno(ok(volume.make(ROOT, b"a/b", &new))), libc::EINVAL);
    assert_eq!(errno(ok(volume.make(ROOT, b"", &new))), libc::ENOENT);
    for there in ["/", "/.", "/d", "/d/", "/d/..", "/d/."] {
        assert_eq!(errno(ok(volume.create_dir(there, 0o755))), libc::EEXIST, "{there}");
    }
    assert_eq!(errno(ok(volume.create_dir("", 0o755))), libc::ENOENT);
    assert_eq!(errno(ok(volume.metadata(""))), libc::ENOENT);
    assert_eq!(errno(volume.open_file("", OpenFlags::CREATE).map(|_| ())), libc::ENOENT);
    assert_eq!(errno(volume.unlink(ROOT, b"d")), libc::EISDIR);
    assert_eq!(errno(volume.rmdir(ROOT, b"f")), libc::ENOTDIR);
    assert_eq!(errno(volume.rmdir(ROOT, b"d")), libc::ENOTEMPTY);
    assert_eq!(errno(volume.rmdir(dir, b".")), libc::EINVAL);
    assert_eq!(errno(volume.rmdir(dir, b"..")), libc::ENOTEMPTY);
    assert_eq!(errno(ok(volume.link(dir, ROOT, b"hard"))), libc::EPERM);
    assert_eq!(errno(volume.readlink(file).map(|_| ())), libc::EINVAL);
    assert_eq!(errno(ok(volume.symlink(ROOT, b"s", &[b'x'; 4096], 0, 0))), libc::ENAMETOOLONG);
    assert_eq!(errno(ok(volume.symlink(ROOT, b"s", b"", 0, 0))), libc::ENOENT);
    assert_eq!(errno(ok(volume.metadata("/loop"))), libc::ELOOP);
    assert_eq!(errno(volume.open_inode(dir, false).map(|_| ())), libc::EISDIR);
    assert_eq!(errno(volume.open_file("/f", OpenFlags::CREATE_NEW).map(|_| ())), libc::EEXIST);
    assert_eq!(errno(volume.open_file("/f/x", OpenFlags::READ).map(|_| ())), libc::ENOTDIR);
    assert_eq!(errno(volume.open_file("/none/x", OpenFlags::CREATE).map(|_| ())), libc::ENOENT);
    let size = SetAttr { size_bytes: Some(0), ..SetAttr::default() };
    assert_eq!(errno(ok(volume.setattr(dir, &size))), libc::EISDIR);
    let exchange = RenameMode::Exchange;
    assert_eq!(errno(volume.rename(ROOT, b"f", ROOT, b"none", exchange)), libc::ENOENT);
    assert_eq!(errno(volume.rename(ROOT, b"f", ROOT, b"d", RenameMode::NoReplace)), libc::EEXIST);
}

#[test]
fn every_error_of_files_and_attributes_has_its_errno() {
    let volume = small_volume();
    let file = create(&volume, "/f");
    let errno = |result: Result<u64>| result.expect_err("refused").errno();
    let none = |result: Result<()>| result.map(|()| 0);
    let max = i64::MAX as u64;

    // What fits before the largest size is written.
    let last = create(&volume, "/last");
    assert_eq!(last.write_at(max - 2, b"four"), Ok(2));
    assert_eq!(last.size(), max);
    assert_eq!(errno(last.append(b"x")), libc::EFBIG);

    assert_eq!(errno(none(file.truncate(max + 1))), libc::EFBIG);
    assert_eq!(errno(file.write_at(max, b"x").map(|_| 0)), libc::EFBIG);
    assert_eq!(errno(file.write_at(u64::MAX, b"x").map(|_| 0)), libc::EFBIG);
    assert_eq!(errno(none(file.allocate(AllocateMode::Extend, max, 1))), libc::EFBIG);
    assert_eq!(errno(none(file.allocate(AllocateMode::Extend, 0, 0))), libc::EINVAL);
    assert_eq!(errno(none(file.allocate(AllocateMode::CollapseRange, 1, 4096))), libc::EINVAL);
    assert_eq!(errno(file.seek_data(0)), libc::ENXIO);
    assert_eq!(errno(file.seek_hole(0)), libc::ENXIO);
    file.write_at(0, &[1; 9000]).expect("write");
    assert_eq!(errno(file.copy_range(0, &file, 100, 200)), libc::EINVAL);
    assert_eq!(errno(file.seek_data(9000)), libc::ENXIO);
    let reader = volume.open_file("/f", OpenFlags::READ).expect("open");
    assert!(reader.write_at(0, b"x").is_err() && reader.truncate(0).is_err());
    file.fsync().expect("fsync");
    volume.checkpoint().expect("checkpoint");

    let ino = file.ino();
    let get = |name: &[u8]| volume.getxattr(ino, name).map(|_| 0);
    assert_eq!(errno(get(b"user.none")), libc::ENODATA);
    assert_eq!(errno(get(b"other.thing")), libc::EOPNOTSUPP);
    assert_eq!(errno(get(b"user.")), libc::EOPNOTSUPP);
    let set =
        |name: &[u8], bytes: usize, mode| none(volume.setxattr(ino, name, &vec![0; bytes], mode));
    assert_eq!(errno(set(b"user.x", 4097, XattrMode::Set)), libc::E2BIG);
    assert_eq!(errno(set(&[b'u'; 256], 1, XattrMode::Set)), libc::ERANGE);
    assert_eq!(errno(set(b"user.x", 1, XattrMode::Replace)), libc::ENODATA);
    set(b"user.x", 4096, XattrMode::Create).expect("set");
    assert_eq!(errno(set(b"user.x", 1, XattrMode::Create)), libc::EEXIST);
    assert_eq!(errno(none(volume.removexattr(ino, b"user.y"))), libc::ENODATA);
}

#[test]
fn nothing_but_the_cache_answers_a_read_that_must_not_wait() {
    let device = formatted(32 * MIB, 0);
    let volume = open(&device, manual(4 * MIB));
    create(&volume, "/f").write_at(0, &[7; 8192]).expect("write");
    volume.close().expect("close");
    let volume = open(&device, manual(4 * MIB));
    let file = volume.open_file("/f", OpenFlags::READ).expect("open");
    let mut buffer = [0; 8192];
    assert_eq!(file.read_at_nowait(0, &mut buffer), Err(Error::WouldBlock));
    assert_eq!(Error::WouldBlock.errno(), libc::EAGAIN);
    file.read_at(0, &mut buffer).expect("read");
    assert_eq!(file.read_at_nowait(0, &mut buffer), Ok(8192));
    assert_eq!(file.read_at_nowait(9000, &mut buffer), Ok(0));
}

#[test]
fn a_read_only_volume_refuses_every_change_and_serves_the_log() {
    let device = formatted(32 * MIB, 0);
    {
        let volume = open(&device, manual(4 * MIB));
        let file = create(&volume, "/f");
        file.write_at(0, b"in the log only").expect("write");
        file.fsync().expect("fsync");
    }
    let options = VolumeOptions { read_only: true, ..manual(4 * MIB) };
    let volume = open(&device, options);
    let file = volume.open_file("/f", OpenFlags::READ).expect("open");
    assert_eq!(contents(&file), b"in the log only");
    let errors = [
        volume.open_file("/f", OpenFlags::READ_WRITE).map(|_| ()),
        volume.open_inode(file.ino(), true).map(|_| ()),
        volume.open_file("/new", OpenFlags::CREATE).map(|_| ()),
        volume.tmpfile(ROOT, &NewInode::new(FileType::Regular, 0o600)).map(|_| ()),
        volume.unlink(ROOT, b"f"),
        volume.rename_path("/f", "/g"),
        volume.create_dir("/d", 0o755).map(|_| ()),
        volume.setxattr(ROOT, b"user.x", b"", XattrMode::Set),
        volume.setattr(ROOT, &SetAttr { uid: Some(1), ..SetAttr::default() }).map(|_| ()),
    ];
    for error in errors {
        assert_eq!(error.expect_err("refused").errno(), libc::EROFS);
    }
    assert!(volume.is_read_only());
    // As on any other file system: there is nothing to make durable.
    file.fsync().expect("fsync");
    file.fdatasync().expect("fdatasync");
    volume.fsync_dir(ROOT).expect("fsync of a directory");
    volume.sync().expect("syncfs");
    for ticket in [
        file.fsync_async(0..u64::MAX, SyncKind::Full),
        volume.fsync_dir_async(ROOT),
        volume.sync_async(),
        volume.ticket_for(volume.last_lsn()),
    ] {
        assert_eq!(ticket.expect("submitted").wait(), Ok(()));
    }
    volume.close().expect("close");
}

#[test]
fn a_handle_that_was_opened_for_reading_refuses_every_change_with_ebadf() {
    let volume = open(&formatted(32 * MIB, 0), manual(4 * MIB));
    create(&volume, "/f").write_at(0, b"kept").expect("write");
    let file = volume.open_file("/f", OpenFlags::READ).expect("open");
    let other = create(&volume, "/g");
    let errors = [
        file.write_at(0, b"x").map(|_| ()),
        file.append(b"x").map(|_| ()),
        file.truncate(0),
        file.allocate(AllocateMode::PunchHole, 0, 10),
        other.copy_range(0, &file, 0, 10).map(|_| ()),
        volume.batch().write_at(&file, 0, b"x"),
        volume.batch().truncate(&file, 0),
    ];
    for error in errors {
        assert_eq!(error.expect_err("refused").errno(), libc::EBADF);
    }
    file.fsync().expect("a sync needs no right to write");
    assert_eq!(contents(&file), b"kept");
}

#[test]
fn a_slash_at_the_end_of_a_path_says_that_it_is_a_directory() {
    let volume = small_volume();
    create(&volume, "/f").write_at(0, b"kept").expect("write");
    volume.create_dir("/d/", 0o755).expect("a directory may be made so");
    let errno = |result: Result<()>| result.expect_err("refused").errno();
    let open = |path: &str, flags| volume.open_file(path, flags).map(|_| ());
    assert_eq!(errno(open("/new/", OpenFlags::CREATE)), libc::EISDIR);
    assert_eq!(errno(open("/new/", OpenFlags::READ)), libc::ENOENT);
    assert_eq!(errno(open("/f/", OpenFlags::READ)), libc::ENOTDIR);
    assert_eq!(errno(volume.remove_file("/f/")), libc::ENOTDIR);
    assert_eq!(errno(volume.remove_file("/d/")), libc::EISDIR);
    assert_eq!(errno(volume.rename_path("/f/", "/g")), libc::ENOTDIR);
    assert_eq!(errno(volume.rename_path("/f", "/g/")), libc::ENOTDIR);
    assert_eq!(names(&volume, "/"), [b"d".to_vec(), b"f".to_vec()]);
    volume.rename_path("/d/", "/e/").expect("rename");
    volume.remove_dir("/e/").expect("rmdir");
    assert_eq!(names(&volume, "/"), [b"f".to_vec()]);
}

#[test]
fn the_root_directory_is_neither_removed_nor_renamed_nor_replaced() {
    let volume = small_volume();
    create(&volume, "/f").write_at(0, b"kept").expect("write");
    let errno = |result: Result<()>| result.expect_err("refused").errno();
    for root in ["/", "//"] {
        assert_eq!(errno(volume.remove_dir(root)), libc::EBUSY);
        assert_eq!(errno(volume.remove_file(root)), libc::EISDIR);
        assert_eq!(errno(volume.rename_path(root, "/g")), libc::EBUSY);
        assert_eq!(errno(volume.rename_path("/f", root)), libc::EBUSY);
        assert_eq!(errno(volume.create_dir(root, 0o755).map(|_| ())), libc::EEXIST);
    }
    assert_eq!(errno(volume.remove_dir("")), libc::ENOENT);
    assert_eq!(names(&volume, "/"), [b"f".to_vec()]);
}

#[test]
fn a_file_is_made_where_a_symbolic_link_at_the_end_leads() {
    let volume = small_volume();
    let dir = mkdir(&volume, ROOT, b"d").ino;
    volume.symlink(ROOT, b"there", b"d/link", 0, 0).expect("symlink");
    volume.symlink(dir, b"link", b"../new", 0, 0).expect("symlink");
    volume.symlink(ROOT, b"nowhere", b"none/new", 0, 0).expect("symlink");
    volume.symlink(ROOT, b"slash", b"made/", 0, 0).expect("symlink");
    volume.symlink(ROOT, b"loop", b"loop", 0, 0).expect("symlink");
    let errno = |path: &str, flags| volume.open_file(path, flags).expect_err("refused").errno();
    assert_eq!(errno("/there", OpenFlags::READ), libc::ENOENT);
    assert_eq!(errno("/there", OpenFlags::CREATE_NEW), libc::EEXIST);
    create(&volume, "/there").write_at(0, b"here").expect("write");
    assert_eq!(contents(&volume.open_file("/new", OpenFlags::READ).expect("open")), b"here");
    assert_eq!(contents(&create(&volume, "/d/link")), b"here");
    assert_eq!(errno("/nowhere", OpenFlags::CREATE), libc::ENOENT);
    assert_eq!(errno("/slash", OpenFlags::CREATE), libc::EISDIR);
    assert_eq!(errno("/loop", OpenFlags::CREATE), libc::ELOOP);
}

#[test]
fn only_what_was_made_without_a_name_gets_a_first_one() {
    let volume = open(&formatted(32 * MIB, 0), manual(4 * MIB));
    let new = NewInode::new(FileType::Regular, 0o600);
    let (made, unnamed) = volume.tmpfile(ROOT, &new).expect("tmpfile");
    unnamed.write_at(0, b"linked").expect("write");
    assert_eq!(volume.link(made.ino, ROOT, b"t").expect("first name").links, 1);
    // It has had a name: when that is gone, so is the file, but for who has it open.
    volume.unlink(ROOT, b"t").expect("unlink");
    assert_eq!(volume.link(made.ino, ROOT, b"t"), Err(Error::NotFound));
    let file = create(&volume, "/f");
    volume.unlink(ROOT, b"f").expect("unlink");
    assert_eq!(volume.link(file.ino(), ROOT, b"f"), Err(Error::NotFound));
    let mut batch = volume.batch();
    batch.link(file.ino(), ROOT, b"f").expect("recorded");
    assert_eq!(batch.commit().map_err(Error::from), Err(Error::NotFound));
    assert_eq!(contents(&unnamed), b"linked");
    assert!(volume.read_dir("/").expect("list").is_empty());
    drop((unnamed, file));
    volume.close().expect("close");
}

#[test]
fn a_failed_flush_shuts_the_volume_down_and_memory_stays_readable() {
    let probe = Probe::new(formatted(32 * MIB, 0));
    let volume = Volume::open_device(probe.clone(), manual(4 * MIB)).expect("open");
    let file = create(&volume, "/f");
    file.write_at(0, b"kept").expect("write");
    file.fsync().expect("fsync");
    file.write_at(0, b"lost").expect("write");
    probe.fail_flushes.store(true, Ordering::Relaxed);
    assert!(matches!(file.fsync(), Err(Error::Shutdown(_))));
    probe.fail_flushes.store(false, Ordering::Relaxed);
    assert!(matches!(file.fsync(), Err(Error::Shutdown(_))), "sticky");
    assert!(matches!(volume.create_dir("/d", 0), Err(Error::Shutdown(_))));
    assert_eq!(volume.create_dir("/d", 0).expect_err("refused").errno(), libc::EIO);
    assert!(volume.shutdown_reason().is_some());
    assert_eq!(contents(&file), b"lost");
}

#[test]
fn a_failed_writeback_is_reported_once_to_every_handle_and_retried_elsewhere() {
    let probe = Probe::new(formatted(32 * MIB, 0));
    let volume = Volume::open_device(probe.clone(), manual(4 * MIB)).expect("open");
    let first = create(&volume, "/f");
    let second = volume.open_file("/f", OpenFlags::READ_WRITE).expect("open");
    let data = pattern(1, 300_000);
    first.write_at(0, &data).expect("write");
    probe.fail_data_writes.store(true, Ordering::Relaxed);
    assert!(volume.background_step(BackgroundWork::Writeback).is_err());
    assert!(probe.failed_writes.load(Ordering::Relaxed) > 0);
    probe.fail_data_writes.store(false, Ordering::Relaxed);
    let third = volume.open_file("/f", OpenFlags::READ_WRITE).expect("open");
    assert!(contents(&first) == data, "what could not be written is still there");
    for file in [&first, &second] {
        assert_eq!(file.fsync().expect_err("reported").errno(), libc::EIO);
        assert_eq!(file.fsync(), Ok(()));
    }
    assert_eq!(third.fsync(), Ok(()), "opened after the error");
    volume.close().expect("close");
}

#[test]
fn a_checkpoint_goes_on_when_a_logged_page_cannot_go_home() {
    let probe = Probe::new(formatted(32 * MIB, 0));
    let volume = Volume::open_device(probe.clone(), manual(4 * MIB)).expect("open");
    let file = create(&volume, "/f");
    let data = pattern(2, 12_000);
    file.write_at(0, &data).expect("write");
    file.fsync().expect("fsync");
    // Its home write fails; nodes and bitmaps are written with the same class later, when the device is well again.
    probe.fail_data_writes.store(true, Ordering::Relaxed);
    assert_eq!(volume.background_step(BackgroundWork::Checkpoint), Ok(true));
    assert!(probe.failed_writes.load(Ordering::Relaxed) > 0);
    probe.fail_data_writes.store(false, Ordering::Relaxed);
    while volume.background_step(BackgroundWork::Checkpoint).expect("checkpoint") {}
    assert!(contents(&file) == data);
    drop((file, volume));
    let volume = Volume::open_device(probe, manual(4 * MIB)).expect("open");
    let file = volume.open_file("/f", OpenFlags::READ).expect("open");
    assert!(contents(&file) == data);
}

#[test]
fn damaged_data_is_an_error_and_never_wrong_bytes() {
    let device = std::sync::Arc::new(weir::device::memory::MemoryDevice::new(32 * MIB));
    let dynamic: std::sync::Arc<dyn weir::device::Device> = device.clone();
    format(&dynamic, 0);
    let volume = open(&dynamic, manual(4 * MIB));
    create(&volume, "/f").write_at(0, &vec![0xab; 40_000]).expect("write");
    volume.close().expect("close");
    let mut image = device.image();
    // Blocks of the log may hold the same.
    for block in image.chunks_mut(4096) {
        if block.iter().all(|&byte| byte == 0xab) {
            block[100] ^= 1;
        }
    }
    let damaged: std::sync::Arc<dyn weir::device::Device> =
        std::sync::Arc::new(weir::device::memory::MemoryDevice::from_image(&image));
    let volume = open(&damaged, manual(4 * MIB));
    let file = volume.open_file("/f", OpenFlags::READ).expect("open");
    let error = file.read_at(0, &mut vec![0; 40_000]).expect_err("damaged");
    assert!(matches!(error, Error::Corrupt(_)));
    assert_eq!(error.errno(), libc::EIO);
    assert_eq!(volume.stats().checksum_errors, 1);
}

// --- Attributes ----------------------------------------------------------------------------------

#[test]
fn privileges_are_dropped_on_request_where_the_group_may_execute() {
    let volume = small_volume();
    for (before, after) in [
        (0o6755, 0o0755),
        (0o6745, 0o2745),
        (0o2755, 0o0755),
        (0o4644, 0o0644),
        (0o1777, 0o1777),
        (0o2644, 0o2644),
    ] {
        let file = mkfile(&volume, ROOT, b"f").ino;
        let set = SetAttr { permissions: Some(before), ..SetAttr::default() };
        assert_eq!(volume.setattr(file, &set).expect("chmod").permissions, before);
        let kill = SetAttr { kill_suid_sgid: true, ..SetAttr::default() };
        assert_eq!(volume.setattr(file, &kill).expect("kill").permissions, after);
        let owner = SetAttr { uid: Some(5), gid: Some(6), kill_suid_sgid: true, ..set };
        let attr = volume.setattr(file, &owner).expect("chown");
        assert_eq!((attr.uid, attr.gid, attr.permissions), (5, 6, after));
        volume.unlink(ROOT, b"f").expect("unlink");
    }
    // Directories keep theirs.
    let dir = mkdir(&volume, ROOT, b"d").ino;
    let both = SetAttr { permissions: Some(0o6755), kill_suid_sgid: true, ..SetAttr::default() };
    assert_eq!(volume.setattr(dir, &both).expect("chmod").permissions, 0o6755);
}

#[test]
fn set_group_id_directories_pass_on_their_group_and_directories_the_bit() {
    let volume = small_volume();
    let dir = mkdir(&volume, ROOT, b"d").ino;
    let shared = SetAttr { permissions: Some(0o2775), gid: Some(42), ..SetAttr::default() };
    volume.setattr(dir, &shared).expect("setattr");
    let new = |file_type| NewInode { uid: 7, gid: 8, ..NewInode::new(file_type, 0o750) };
    let file = volume.make(dir, b"f", &new(FileType::Regular)).expect("make");
    assert_eq!((file.uid, file.gid, file.permissions), (7, 42, 0o750));
    let below = volume.make(dir, b"d", &new(FileType::Directory)).expect("make");
    assert_eq!((below.uid, below.gid, below.permissions), (7, 42, 0o2750));
    let link = volume.symlink(dir, b"l", b"t", 7, 8).expect("symlink");
    assert_eq!((link.uid, link.gid, link.permissions), (7, 42, 0o777));
    let (temporary, _file) = volume.tmpfile(dir, &new(FileType::Regular)).expect("tmpfile");
    assert_eq!(temporary.gid, 42);
    let outside = volume.make(ROOT, b"f", &new(FileType::Regular)).expect("make");
    assert_eq!(outside.gid, 8);
}

#[test]
fn times_move_as_posix_says() {
    let (volume, clock) = timed_volume(AtimePolicy::Strict);
    let seconds = |ino: u64| {
        let attr = volume.getattr(ino).expect("getattr");
        (attr.atime.seconds, attr.mtime.seconds, attr.ctime.seconds)
    };
    let dir = mkdir(&volume, ROOT, b"d").ino;
    let file = create(&volume, "/d/f");
    let ino = file.ino();
    assert_eq!(seconds(ino), (1000, 1000, 1000));
    let counter = volume.getattr(ino).expect("getattr").change_counter;

    let mut at = 1000;
    let mut step =
        |what: &str, act: &dyn Fn(), file: (i64, i64, i64), dir_expected: (i64, i64, i64)| {
            clock.advance_s(1);
            at += 1;
            act();
            let resolve = |times: (i64, i64, i64)| {
                let one = |time: i64| if time == 0 { at } else { time };
                (one(times.0), one(times.1), one(times.2))
            };
            assert_eq!(seconds(ino), resolve(file), "{what}: file");
            assert_eq!(seconds(dir), resolve(dir_expected), "{what}: directory");
        };
    // 0 stands for the present time.
    let quiet = (1000, 1000, 1000);
    step("write", &|| drop(file.write_at(0, b"hello")), (1000, 0, 0), quiet);
    step("read", &|| drop(file.read_at(0, &mut [0; 3])), (0, 1001, 1001), quiet);
    step("empty write", &|| drop(file.write_at(0, b"")), (1002, 1001, 1001), quiet);
    step("read at the end", &|| drop(file.read_at(50, &mut [0; 3])), (1002, 1001, 1001), quiet);
    step("truncate", &|| file.truncate(2).expect("truncate"), (1002, 0, 0), quiet);
    let chmod = SetAttr { permissions: Some(0o600), ..SetAttr::default() };
    step("chmod", &|| drop(volume.setattr(ino, &chmod)), (1002, 1005, 0), quiet);
    step("link", &|| drop(volume.link(ino, dir, b"g")), (1002, 1005, 0), (1000, 0, 0));
    step("unlink", &|| volume.unlink(dir, b"g").expect("unlink"), (1002, 1005, 0), (1000, 0, 0));
    step(
        "rename",
        &|| volume.rename_path("/d/f", "/d/h").expect("rename"),
        (1002, 1005, 0),
        (1000, 0, 0),
    );
    step(
        "setxattr",
        &|| volume.setxattr(ino, b"user.x", b"1", XattrMode::Set).expect("set"),
        (1002, 1005, 0),
        (1000, 1009, 1009),
    );
    step("list", &|| drop(names(&volume, "/d")), (1002, 1005, 1010), (0, 1009, 1009));
    let past = Timestamp { seconds: -5, nanoseconds: 999_999_999 };
    let utimes =
        SetAttr { atime: Some(SetTime::At(past)), mtime: Some(SetTime::Now), ..SetAttr::default() };
    step("utimes", &|| drop(volume.setattr(ino, &utimes)), (-5, 0, 0), (1011, 1009, 1009));
    step(
        "fallocate",
        &|| file.allocate(AllocateMode::Extend, 0, 9000).expect("allocate"),
        (-5, 0, 0),
        (1011, 1009, 1009),
    );
    step(
        "punch",
        &|| file.allocate(AllocateMode::PunchHole, 0, 5000).expect("punch"),
        (-5, 0, 0),
        (1011, 1009, 1009),
    );

    let attr = volume.getattr(ino).expect("getattr");
    assert_eq!((attr.atime, attr.btime.seconds), (past, 1000));
    assert!(attr.change_counter >= counter + 10);
    volume.close().expect("close");
}

#[test]
fn access_times_follow_the_policy() {
    let atime = |volume: &Volume| volume.metadata("/f").expect("stat").atime.seconds;
    for policy in [AtimePolicy::Never, AtimePolicy::Relative, AtimePolicy::Strict] {
        let (volume, clock) = timed_volume(policy);
        let file = create(&volume, "/f");
        file.write_at(0, b"abc").expect("write");
        let read = || {
            clock.advance_s(10);
            file.read_at(0, &mut [0; 3]).expect("read");
            atime(&volume)
        };
        let seen = [read(), read(), read()];
        match policy {
            AtimePolicy::Never => assert_eq!(seen, [1000; 3]),
            AtimePolicy::Relative => assert_eq!(seen, [1010; 3], "only after a change"),
            AtimePolicy::Strict => assert_eq!(seen, [1010, 1020, 1030]),
        }
        file.write_at(0, b"x").expect("write");
        clock.advance_s(10);
        file.read_at(0, &mut [0; 3]).expect("read");
        let expected = if policy == AtimePolicy::Never { 1000 } else { 1040 };
        assert_eq!(atime(&volume), expected);
    }
}

/// Who clears away what nobody has used for some days looks at access times.
#[test]
fn a_file_that_is_always_in_memory_shows_each_day_that_it_is_read() {
    const DAY_SECONDS: i64 = 86_400;
    for options in [manual(4 * MIB), threads(8 * MIB)] {
        let clock = HandClock::at(1000);
        let options = VolumeOptions { clock: clock.clone(), ..options };
        let has_threads = options.background == BackgroundMode::Threads;
        let volume = open(&formatted(32 * MIB, 0), options);
        let file = create(&volume, "/f");
        file.write_at(0, b"abc").expect("write");
        let atime = || {
            file.read_at(0, &mut [0; 3]).expect("read");
            file.attr().expect("attr").atime.seconds
        };
        clock.advance_s(10);
        assert_eq!([atime(), atime()], [1010; 2]);
        for day in 1..4 {
            clock.advance_s(DAY_SECONDS - 1);
            assert_eq!(atime(), 1010 + (day - 1) * DAY_SECONDS);
            clock.advance_s(1);
            let expected = 1010 + day * DAY_SECONDS;
            // The threads look at the clock once in a while.
            with_watchdog(60, || while has_threads && atime() < expected {});
            assert_eq!(atime(), expected);
        }
        volume.close().expect("close");
    }
}

#[test]
fn lazy_access_times_survive_sync_and_close() {
    let device = formatted(32 * MIB, 0);
    let clock = HandClock::at(1000);
    let options = || VolumeOptions { clock: clock.clone(), ..manual(4 * MIB) };
    for close in [false, true] {
        let volume = open(&device, options());
        let file = create(&volume, "/f");
        file.write_at(0, b"abc").expect("write");
        clock.advance_s(100);
        file.read_at(0, &mut [0; 3]).expect("read");
        let atime = file.attr().expect("attr").atime;
        if close {
            volume.close().expect("close");
        } else {
            volume.sync().expect("sync");
        }
        drop((file, volume));
        let volume = open(&device, options());
        assert_eq!(volume.metadata("/f").expect("stat").atime, atime);
    }
}

// --- Links and renames -----------------------------------------------------------------------------

#[test]
fn a_directory_counts_its_subdirectories() {
    let volume = small_volume();
    let links = |path: &str| volume.metadata(path).expect("stat").links;
    assert_eq!(links("/"), 2);
    let dir = mkdir(&volume, ROOT, b"d").ino;
    let other = mkdir(&volume, ROOT, b"e").ino;
    mkdir(&volume, dir, b"x");
    mkfile(&volume, dir, b"f");
    mkfile(&volume, other, b"g");
    assert_eq!((links("/"), links("/d"), links("/d/x"), links("/e")), (4, 3, 2, 2));
    volume.rename(dir, b"x", other, b"x", RenameMode::Replace).expect("rename");
    assert_eq!((links("/d"), links("/e")), (2, 3));
    volume.rename(other, b"x", dir, b"f", RenameMode::Exchange).expect("exchange");
    assert_eq!((links("/d"), links("/e")), (3, 2));
    assert_eq!(volume.parent(volume.resolve("/d/f", true).expect("resolve")), Ok(dir));
    assert_eq!(volume.metadata("/e/x").expect("stat").file_type, FileType::Regular);
    mkdir(&volume, other, b"empty");
    volume.rename(dir, b"f", other, b"empty", RenameMode::Replace).expect("replace a directory");
    assert_eq!((links("/d"), links("/e")), (2, 3));
    volume.rmdir(other, b"empty").expect("rmdir");
    assert_eq!((links("/d"), links("/e"), links("/")), (2, 2, 4));
}

#[test]
fn rename_to_itself_or_to_another_name_of_the_same_inode_does_nothing() {
    let volume = small_volume();
    let file = mkfile(&volume, ROOT, b"a").ino;
    volume.link(file, ROOT, b"b").expect("link");
    for mode in [RenameMode::Replace, RenameMode::Exchange] {
        volume.rename(ROOT, b"a", ROOT, b"a", mode).expect("onto itself");
        volume.rename(ROOT, b"a", ROOT, b"b", mode).expect("onto a link of itself");
    }
    assert_eq!(names(&volume, "/"), [b"a".to_vec(), b"b".to_vec()]);
    assert_eq!(volume.getattr(file).expect("getattr").links, 2);
    assert_eq!(volume.rename(ROOT, b"a", ROOT, b"b", RenameMode::NoReplace), Err(Error::Exists));
    let dir = mkdir(&volume, ROOT, b"d").ino;
    volume.rename(ROOT, b"d", ROOT, b"d", RenameMode::Replace).expect("onto itself");
    assert_eq!(volume.getattr(dir).expect("getattr").links, 2);
}

#[test]
fn a_rename_can_leave_a_whiteout_which_is_like_any_other_inode() {
    let volume = small_volume();
    let whiteout = RenameMode::Whiteout { uid: 11, gid: 12 };
    let file = mkfile(&volume, ROOT, b"a").ino;
    let dir = mkdir(&volume, ROOT, b"d").ino;
    let below = mkdir(&volume, dir, b"below").ino;
    let is_whiteout = |dir, name: &[u8]| {
        let left = volume.lookup(dir, name).expect("something is left");
        let device = (left.file_type, left.rdev, left.permissions, left.links);
        assert_eq!(device, (FileType::CharDevice, 0, 0, 1));
        assert_eq!((left.uid, left.gid), (11, 12));
        left.ino
    };
    let inodes = volume.statfs().inodes;
    volume.rename(ROOT, b"a", ROOT, b"b", whiteout).expect("in one directory");
    let first = is_whiteout(ROOT, b"a");
    assert_eq!(volume.lookup(ROOT, b"b").expect("moved").ino, file);
    assert_eq!(volume.statfs().inodes, inodes + 1);
    // Over the whiteout, which goes, into another directory.
    volume.rename(dir, b"below", ROOT, b"a", RenameMode::Replace).expect_err("no directory");
    volume.rename(ROOT, b"b", ROOT, b"a", whiteout).expect("over the first");
    assert!(is_whiteout(ROOT, b"b") != first);
    assert_eq!(volume.getattr(first), Err(Error::NotFound));
    volume.rename(dir, b"below", ROOT, b"moved", whiteout).expect("a directory");
    is_whiteout(dir, b"below");
    assert_eq!(volume.parent(below), Ok(ROOT));
    assert_eq!(volume.rmdir(ROOT, b"d"), Err(Error::NotEmpty));
    volume.rename(ROOT, b"a", dir, b"a", whiteout).expect("a file");
    // Two names of one inode: nothing happens.
    volume.link(file, dir, b"twin").expect("link");
    volume.rename(dir, b"a", dir, b"twin", whiteout).expect("nothing");
    assert_eq!(volume.lookup(dir, b"a").expect("still there").ino, file);
    assert_eq!(volume.getattr(ROOT).expect("attr").links, 4);
    assert_eq!(volume.getattr(dir).expect("attr").links, 2);
    let mut batch = volume.batch();
    assert!(matches!(batch.rename(dir, b"a", dir, b"z", whiteout), Err(Error::Invalid(_))));
    volume.unlink(dir, b"below").expect("a whiteout is removed as any name");
}

#[test]
fn rename_refuses_what_would_break_the_tree() {
    let volume = small_volume();
    let dir = mkdir(&volume, ROOT, b"d").ino;
    let below = mkdir(&volume, dir, b"e").ino;
    let other = mkdir(&volume, ROOT, b"o").ino;
    mkfile(&volume, below, b"f");
    let rename = |from: (u64, &[u8]), to: (u64, &[u8]), mode| {
        volume.rename(from.0, from.1, to.0, to.1, mode).map_err(|error| error.errno())
    };
    let (replace, exchange) = (RenameMode::Replace, RenameMode::Exchange);
    for mode in [replace, RenameMode::NoReplace] {
        assert_eq!(rename((ROOT, b"d"), (dir, b"x"), mode), Err(libc::EINVAL));
        assert_eq!(rename((ROOT, b"d"), (below, b"x"), mode), Err(libc::EINVAL));
    }
    assert_eq!(rename((ROOT, b"d"), (below, b"f"), exchange), Err(libc::EINVAL));
    assert_eq!(rename((below, b"f"), (ROOT, b"d"), exchange), Err(libc::EINVAL));
    assert_eq!(rename((ROOT, b"o"), (ROOT, b"d"), replace), Err(libc::ENOTEMPTY));
    assert_eq!(rename((dir, b"e"), (ROOT, b"d"), replace), Err(libc::ENOTEMPTY));
    assert_eq!(rename((below, b"f"), (ROOT, b"d"), replace), Err(libc::EISDIR));
    assert_eq!(rename((ROOT, b"o"), (below, b"f"), replace), Err(libc::ENOTDIR));
    volume.rmdir(ROOT, b"o").expect("rmdir");
    assert_eq!(rename((ROOT, b"d"), (other, b"d"), replace), Err(libc::ENOENT), "removed");
    assert_eq!(names(&volume, "/d/e"), [b"f".to_vec()]);
}

#[test]
fn an_unlinked_file_lives_on_until_its_last_handle_goes() {
    let device = formatted(32 * MIB, 0);
    let volume = open(&device, manual(4 * MIB));
    let before = volume.statfs().inodes;
    let file = create(&volume, "/f");
    let hold = volume.hold(file.ino()).expect("hold");
    file.write_at(0, b"still here").expect("write");
    volume.unlink(ROOT, b"f").expect("unlink");
    assert_eq!(file.attr().expect("attr").links, 0);
    volume.checkpoint().expect("checkpoint");
    assert_eq!(contents(&file), b"still here");
    file.write_at(5, b"more").expect("write");
    file.fsync().expect("fsync of an unlinked file");
    let ino = file.ino();
    drop(file);
    assert!(volume.getattr(ino).is_ok(), "held");
    drop(hold);
    assert_eq!(volume.getattr(ino), Err(Error::NotFound));
    assert_eq!(volume.hold(ino).map(|_| ()), Err(Error::NotFound));
    let size = SetAttr { size_bytes: Some(9), ..SetAttr::default() };
    assert_eq!(volume.setattr(ino, &size), Err(Error::NotFound));
    assert_eq!(volume.statfs().inodes, before);

    // The next opening purges what is unlinked.
    let file = create(&volume, "/g");
    file.write_at(0, &vec![1; 100_000]).expect("write");
    volume.unlink(ROOT, b"g").expect("unlink");
    volume.sync().expect("sync");
    drop((file, volume));
    let volume = open(&device, manual(4 * MIB));
    assert_eq!(volume.statfs().inodes, before);
}

#[test]
fn a_file_without_a_name_can_get_one() {
    let device = formatted(32 * MIB, 0);
    let volume = open(&device, manual(4 * MIB));
    let (attr, file) =
        volume.tmpfile(ROOT, &NewInode::new(FileType::Regular, 0o600)).expect("tmpfile");
    assert_eq!(attr.links, 0);
    file.write_at(0, b"content").expect("write");
    assert_eq!(volume.link(attr.ino, ROOT, b"named").expect("link").links, 1);
    let (lost, unnamed) =
        volume.tmpfile(ROOT, &NewInode::new(FileType::Regular, 0o600)).expect("tmpfile");
    volume.sync().expect("sync");
    drop((file, unnamed, volume));
    let volume = open(&device, manual(4 * MIB));
    assert_eq!(contents(&volume.open_file("/named", OpenFlags::READ).expect("open")), b"content");
    assert_eq!(volume.getattr(lost.ino), Err(Error::NotFound));
    assert_eq!(
        volume.tmpfile(ROOT, &NewInode::new(FileType::Fifo, 0)).map(|_| ()).map_err(|e| e.errno()),
        Err(libc::EINVAL)
    );
}

// --- Names, symbolic links, paths -----------------------------------------------------------------

#[test]
fn names_are_bytes_of_up_to_255() {
    let device = formatted(32 * MIB, 0);
    let volume = open(&device, manual(4 * MIB));
    let mut expected: Vec<Vec<u8>> =
        (1..=255_u8).filter(|&byte| byte != b'/' && byte != b'.').map(|byte| vec![byte]).collect();
    expected.push(vec![0xff; 255]);
    expected.push(b"...".to_vec());
    expected.push([b"a".repeat(254), b"\x80".to_vec()].concat());
    for name in &expected {
        mkfile(&volume, ROOT, name);
    }
    volume.close().expect("close");
    let volume = open(&device, manual(4 * MIB));
    expected.sort();
    assert_eq!(names(&volume, "/"), expected);
    for name in &expected {
        volume.unlink(ROOT, name).expect("unlink");
    }
}

#[test]
fn symbolic_links_of_4095_bytes_are_kept_and_followed() {
    let device = formatted(32 * MIB, 0);
    let volume = open(&device, manual(4 * MIB));
    create(&volume, "/file").write_at(0, b"found").expect("write");
    let mut target = vec![b'/'; 4095];
    target[4091..].copy_from_slice(b"file");
    let link = volume.symlink(ROOT, b"long", &target, 0, 0).expect("symlink");
    assert_eq!((link.size_bytes, link.links), (4095, 1));
    mkdir(&volume, ROOT, b"d");
    let dir = volume.resolve("/d", true).expect("resolve");
    volume.symlink(dir, b"relative", b"../file", 0, 0).expect("symlink");
    volume.symlink(ROOT, b"dangling", b"nowhere", 0, 0).expect("symlink");
    volume.close().expect("close");
    let volume = open(&device, manual(4 * MIB));
    assert_eq!(volume.readlink(link.ino), Ok(target));
    for path in ["/long", "/d/relative", "/d/../d/./relative"] {
        assert_eq!(volume.metadata(path).expect("stat").size_bytes, 5);
    }
    assert_eq!(volume.metadata("/dangling"), Err(Error::NotFound));
    assert_eq!(volume.symlink_metadata("/dangling").expect("lstat").file_type, FileType::Symlink);
    volume.unlink(ROOT, b"long").expect("unlink");
    assert!(volume.metadata("/file").is_ok());
}

#[test]
fn forty_links_are_followed_and_no_more() {
    let volume = small_volume();
    create(&volume, "/0");
    for number in 1..=41 {
        let (name, target) = (number.to_string(), (number - 1).to_string());
        volume.symlink(ROOT, name.as_bytes(), target.as_bytes(), 0, 0).expect("symlink");
    }
    assert!(volume.metadata("/40").is_ok());
    assert_eq!(volume.metadata("/41"), Err(Error::TooManySymlinks));
}

#[test]
fn special_files_keep_their_device_numbers() {
    let device = formatted(32 * MIB, 0);
    let volume = open(&device, manual(4 * MIB));
    let make = |name: &[u8], file_type| {
        let new = NewInode { rdev: 0x1234_5678, ..NewInode::new(file_type, 0o600) };
        volume.make(ROOT, name, &new).expect("make").ino
    };
    let (block, fifo) = (make(b"b", FileType::BlockDevice), make(b"f", FileType::Fifo));
    assert!(volume.open_inode(fifo, false).is_err());
    assert_eq!(volume.fsync_dir(block), Ok(()));
    volume.close().expect("close");
    let volume = open(&device, manual(4 * MIB));
    assert_eq!(volume.getattr(block).expect("getattr").rdev, 0x1234_5678);
    assert_eq!(volume.getattr(fifo).expect("getattr").rdev, 0);
}

// --- Listing ----------------------------------------------------------------------------------------

#[test]
fn listing_shows_entries_that_stay_exactly_once_while_others_come_and_go() {
    let volume = small_volume();
    let dir = mkdir(&volume, ROOT, b"d").ino;
    let stays: Vec<Vec<u8>> = (0..700).map(|n| format!("stays{n}").into_bytes()).collect();
    for name in &stays {
        mkfile(&volume, dir, name);
    }
    for number in 0..300 {
        mkfile(&volume, dir, format!("goes{number}").as_bytes());
    }
    volume.checkpoint().expect("checkpoint");
    let mut seen: BTreeMap<Vec<u8>, u32> = BTreeMap::new();
    let (mut cookie, mut round) = (0, 0);
    loop {
        let mut batch = 0;
        volume
            .readdir(dir, cookie, &mut |entry| {
                *seen.entry(entry.name).or_default() += 1;
                cookie = entry.cookie;
                batch += 1;
                batch < 7
            })
            .expect("readdir");
        if batch < 7 {
            break;
        }
        if round < 300 {
            volume.unlink(dir, format!("goes{round}").as_bytes()).expect("unlink");
            mkfile(&volume, dir, format!("comes{round}").as_bytes());
            let (from, to) = (format!("comes{round}"), format!("moves{round}"));
            volume
                .rename(dir, from.as_bytes(), dir, to.as_bytes(), RenameMode::Replace)
                .expect("rename");
        }
        if round == 60 {
            volume.checkpoint().expect("checkpoint");
        }
        round += 1;
    }
    for name in &stays {
        assert_eq!(seen.get(name), Some(&1), "{}", String::from_utf8_lossy(name));
    }
    assert!(seen.values().all(|&count| count == 1));
}

#[test]
fn a_removed_directory_takes_no_new_entries() {
    let volume = small_volume();
    let dir = mkdir(&volume, ROOT, b"d").ino;
    let hold = volume.hold(dir).expect("hold");
    volume.rmdir(ROOT, b"d").expect("rmdir");
    let new = NewInode::new(FileType::Regular, 0);
    assert_eq!(volume.make(dir, b"f", &new), Err(Error::NotFound));
    assert_eq!(volume.tmpfile(dir, &new).map(|_| ()), Err(Error::NotFound));
    assert_eq!(volume.read_dir("/d"), Err(Error::NotFound));
    let mut count = 0;
    volume
        .readdir(dir, 0, &mut |_| {
            count += 1;
            true
        })
        .expect("an open directory can be listed");
    assert_eq!(count, 0);
    drop(hold);
    assert_eq!(volume.getattr(dir), Err(Error::NotFound));
}

// --- Files ------------------------------------------------------------------------------------------

#[test]
fn writes_of_a_data_sync_handle_are_durable_when_they_return() {
    let device = formatted(32 * MIB, 0);
    let volume = open(&device, manual(4 * MIB));
    let source = create(&volume, "/source");
    source.write_at(0, &pattern(3, 10_000)).expect("write");
    let flags = OpenFlags { data_sync: true, ..OpenFlags::CREATE };
    let file = volume.open_file("/f", flags).expect("open");
    file.write_at(0, b"first").expect("write");
    file.append(b" second").expect("append");
    source.copy_range(0, &file, 20_000, 10_000).expect("copy");
    drop((file, source, volume));
    let volume = open(&device, manual(4 * MIB));
    let file = volume.open_file("/f", OpenFlags::READ).expect("open");
    let read = contents(&file);
    assert_eq!(&read[..12], b"first second");
    assert!(read[12..20_000].iter().all(|&byte| byte == 0));
    assert!(read[20_000..] == pattern(3, 10_000));
}

#[test]
fn opening_with_truncate_empties_the_file() {
    let volume = small_volume();
    create(&volume, "/f").write_at(0, &[1; 5000]).expect("write");
    let flags = OpenFlags { truncate: true, ..OpenFlags::READ_WRITE };
    assert_eq!(volume.open_file("/f", flags).expect("open").size(), 0);
}

#[test]
fn opening_with_truncate_moves_the_times_of_an_empty_file_and_gives_its_blocks_back() {
    let (volume, clock) = timed_volume(AtimePolicy::Strict);
    let cutting = OpenFlags { truncate: true, ..OpenFlags::CREATE };
    let file = volume.open_file("/f", cutting).expect("create");
    file.allocate(AllocateMode::KeepSize, 0, 40_000).expect("allocate");
    clock.advance_s(5);
    volume.open_file("/f", cutting).expect("open");
    let attr = file.attr().expect("attributes");
    assert_eq!((attr.blocks, attr.mtime.seconds, attr.ctime.seconds), (0, 1005, 1005));
}

#[test]
fn exclusive_means_something_only_with_create_and_truncate_only_with_write() {
    let volume = small_volume();
    create(&volume, "/f").write_at(0, b"abc").expect("write");
    volume.symlink(Volume::ROOT, b"l", b"f", 0, 0).expect("symlink");
    let exclusive = OpenFlags { exclusive: true, ..OpenFlags::READ };
    let file = volume.open_file("/l", exclusive).expect("the link is followed");
    assert_eq!(contents(&file), b"abc");
    let refused = |flags| volume.open_file("/l", flags).map(|file| file.ino());
    assert_eq!(refused(OpenFlags::CREATE_NEW), Err(Error::Exists));
    let cutting = OpenFlags { truncate: true, ..OpenFlags::READ };
    assert!(matches!(refused(cutting), Err(Error::Invalid(_))));
    let making = OpenFlags { create: true, ..cutting };
    assert!(matches!(volume.open_file("/new", making), Err(Error::Invalid(_))));
    assert_eq!(volume.metadata("/new"), Err(Error::NotFound), "nothing was made");
    assert_eq!(contents(&file), b"abc");
}

#[test]
fn a_time_that_cannot_be_is_refused() {
    let device = formatted(32 * MIB, 0);
    let volume = open(&device, manual(4 * MIB));
    let file = create(&volume, "/f");
    file.write_at(0, b"abc").expect("write");
    let at = |nanoseconds| Some(SetTime::At(Timestamp { seconds: -5, nanoseconds }));
    let times = [
        SetAttr { mtime: at(1_000_000_000), ..SetAttr::default() },
        SetAttr { atime: at(u32::MAX), size_bytes: Some(1), ..SetAttr::default() },
    ];
    for change in &times {
        let refused = volume.setattr(file.ino(), change);
        assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
        let mut batch = volume.batch();
        let refused = batch.setattr(file.ino(), change);
        assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
        assert!(batch.is_empty());
    }
    let last = SetAttr { mtime: at(999_999_999), ..SetAttr::default() };
    volume.setattr(file.ino(), &last).expect("a time that can be");
    volume.close().expect("close");
    drop((file, volume));
    let attr = open(&device, manual(4 * MIB)).metadata("/f").expect("it can be read back");
    assert_eq!((attr.size_bytes, Some(SetTime::At(attr.mtime))), (3, at(999_999_999)));
}
