//! A volume that is open for reading only: all of it can be read, and nothing is changed.

mod common;

use common::*;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use weir::device::Device;
use weir::*;

/// What a call is, and how it ends.
type Call<'a> = (&'a str, &'a dyn Fn() -> Result<()>);

#[test]
fn a_volume_that_is_open_for_reading_only_refuses_every_change_and_writes_nothing() {
    let probe = Probe::new(formatted(16 * MIB, 64));
    let device: Arc<dyn Device> = probe.clone();
    let volume = open(&device, manual(4 * MIB));
    let file = create(&volume, "/f");
    file.write_at(0, &pattern(1, 20_000)).expect("write");
    let ino = file.ino();
    volume.setxattr(ino, b"user.a", b"1", XattrMode::Set).expect("attribute");
    volume.create_dir("/d", 0o755).expect("directory");
    volume.sync().expect("sync");
    // Not closed in order: there is a log to replay, in memory.
    drop((file, volume));

    let writes = probe.writes.load(Ordering::Relaxed);
    let volume = open(&device, VolumeOptions { read_only: true, ..manual(4 * MIB) });
    assert!(volume.is_read_only());
    let file = volume.open_inode(ino, false).expect("open for reading");
    let mode = SetAttr { permissions: Some(0o600), ..SetAttr::default() };
    let empty = SetAttr { size_bytes: Some(0), ..SetAttr::default() };
    let root = Volume::ROOT;
    let refused: [Call<'_>; 14] = [
        ("open for writing", &|| volume.open_inode(ino, true).map(drop)),
        ("open by path for writing", &|| volume.open_file("/f", OpenFlags::READ_WRITE).map(drop)),
        ("create", &|| volume.open_file("/new", OpenFlags::CREATE).map(drop)),
        ("mkdir", &|| volume.create_dir("/new", 0o755).map(drop)),
        ("symlink", &|| volume.symlink(root, b"new", b"f", 0, 0).map(drop)),
        ("link", &|| volume.link(ino, root, b"new").map(drop)),
        ("tmpfile", &|| volume.tmpfile(root, &NewInode::new(FileType::Regular, 0o600)).map(drop)),
        ("unlink", &|| volume.unlink(root, b"f")),
        ("rmdir", &|| volume.remove_dir("/d")),
        ("rename", &|| volume.rename(root, b"f", root, b"g", RenameMode::Replace)),
        ("chmod", &|| volume.setattr(ino, &mode).map(drop)),
        ("truncate", &|| volume.setattr(ino, &empty).map(drop)),
        ("setxattr", &|| volume.setxattr(ino, b"user.b", b"2", XattrMode::Set)),
        ("removexattr", &|| volume.removexattr(ino, b"user.a")),
    ];
    for (what, call) in refused {
        assert_eq!(call(), Err(Error::ReadOnly), "{what}");
    }
    // There is nothing to make durable, and nothing to hand over.
    let done: [Call<'_>; 5] = [
        ("fsync", &|| file.fsync()),
        ("fsync of a directory", &|| volume.fsync_dir(root)),
        ("sync", &|| volume.sync()),
        ("expire", &|| file.expire(0..u64::MAX)),
        ("sync_range", &|| {
            let flags = SyncRangeFlags { write: true, wait_after: true, ..Default::default() };
            file.sync_range(0..u64::MAX, flags)
        }),
    ];
    for (what, call) in done {
        assert_eq!(call(), Ok(()), "{what}");
    }
    let before = volume.metadata("/f").expect("attributes");
    assert!(contents(&file) == pattern(1, 20_000));
    assert_eq!(volume.metadata("/f"), Ok(before), "reading leaves no time of access");
    volume.close().expect("close");
    assert_eq!(probe.writes.load(Ordering::Relaxed), writes, "nothing was written");
}
