//! What is refused, with which number, and what fails with the device.

use super::*;
use std::sync::atomic::Ordering;

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
