//! Names by path: directories on the way, links, and what paths end with. Files as streams.
#![allow(missing_docs)]
#![cfg(not(feature = "shuttle"))]

use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::sync::Arc;
use weir::device::Device;
use weir::device::memory::MemoryDevice;
use weir::*;

fn volume() -> Volume {
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(32 << 20));
    Volume::format_device(&device, &CreateOptions::default()).unwrap();
    let options = VolumeOptions { background: BackgroundMode::Manual, ..VolumeOptions::default() };
    Volume::open_device(device, options).unwrap()
}

#[test]
fn all_directories_of_a_path_are_made_and_those_that_are_there_are_left() {
    let volume = volume();
    let made = volume.create_dir_all("/a/b//c/", 0o750).unwrap();
    assert_eq!(made.permissions, 0o750);
    assert_eq!(volume.metadata("/a/b").unwrap().permissions, 0o750);
    assert_eq!(volume.create_dir_all("a/b/c", 0o700).unwrap().ino, made.ino);
    assert_eq!(volume.metadata("/a/b/c").unwrap().permissions, 0o750);
    assert_eq!(volume.create_dir_all("/", 0o700).unwrap().ino, Volume::ROOT);
    let beside = volume.create_dir_all("/a/x/../y/.", 0o700).unwrap();
    assert_eq!(volume.metadata("/a/y").unwrap().ino, beside.ino);
    assert!(volume.metadata("/a/x").is_ok());

    // As deep as a path can say.
    let deep = "d/".repeat(2047);
    let lowest = volume.create_dir_all(&deep, 0o700).unwrap();
    assert_eq!(volume.metadata(&deep).unwrap().ino, lowest.ino);
    assert_eq!(volume.create_dir_all(deep + "d/d", 0o700), Err(Error::NameTooLong));
}

#[test]
fn what_is_no_directory_is_not_taken_for_one_of_a_path() {
    let volume = volume();
    volume.open_file("/file", OpenFlags::CREATE).unwrap();
    volume.create_dir("/dir", 0o700).unwrap();
    volume.symlink_path("dir", "/good").unwrap();
    volume.symlink_path("nowhere", "/bad").unwrap();
    assert_eq!(volume.create_dir_all("/file", 0o700), Err(Error::Exists));
    assert_eq!(volume.create_dir_all("/file/a", 0o700), Err(Error::NotDirectory));
    assert_eq!(volume.create_dir_all("/file/a/b", 0o700), Err(Error::NotDirectory));
    assert_eq!(volume.create_dir_all("/bad", 0o700), Err(Error::Exists));
    assert_eq!(volume.create_dir_all("/bad/a", 0o700), Err(Error::Exists));
    assert!(volume.create_dir_all("", 0o700).is_err());
    volume.create_dir_all("/good/a/b", 0o700).unwrap();
    assert!(volume.metadata("/dir/a/b").is_ok());
}

#[test]
fn links_are_made_by_path_and_not_followed_where_they_are_meant() {
    let volume = volume();
    volume.create_dir("/dir", 0o700).unwrap();
    let file = volume.open_file("/dir/file", OpenFlags::CREATE).unwrap();
    let link = volume.symlink_path("file", "/dir/link").unwrap();
    assert_eq!(volume.read_link("/dir/link").unwrap(), b"file");
    assert_eq!(volume.metadata("/dir/link").unwrap().ino, file.ino());
    assert_eq!(volume.read_link("/dir/file").err().map(|error| error.errno()), Some(22));

    assert_eq!(volume.link_path("/dir/file", "/second").unwrap().links, 2);
    assert_eq!(volume.link_path("/dir/link", "/third").unwrap().ino, link.ino);
    assert_eq!(volume.symlink_metadata("/third").unwrap().links, 2);
    assert_eq!(volume.link_path("/dir/file", "/second"), Err(Error::Exists));
    assert_eq!(volume.link_path("/dir", "/fourth"), Err(Error::NotPermitted));
    assert_eq!(volume.link_path("/none", "/fourth"), Err(Error::NotFound));
    // Only a directory has a slash at the end.
    for path in ["/second/", "/dir/", "/"] {
        assert_eq!(volume.symlink_path("file", path), Err(Error::Exists), "{path}");
        assert_eq!(volume.link_path("/dir/file", path), Err(Error::Exists), "{path}");
    }
    assert_eq!(volume.symlink_path("file", "/fourth/"), Err(Error::NotFound));
    assert_eq!(volume.link_path("/dir/file", "/fourth/"), Err(Error::NotFound));
}

#[test]
fn what_is_no_directory_is_neither_removed_nor_renamed_by_a_path_that_says_that_it_is_one() {
    let volume = volume();
    volume.create_dir("/dir", 0o700).unwrap();
    volume.open_file("/file", OpenFlags::CREATE).unwrap();
    volume.symlink_path("dir", "/link").unwrap();
    for path in ["/file/", "/link/", "/file//"] {
        assert_eq!(volume.remove_file(path), Err(Error::NotDirectory), "{path}");
        assert_eq!(volume.rename_path(path, "/new"), Err(Error::NotDirectory), "{path}");
        assert_eq!(volume.rename_path("/file", path), Err(Error::NotDirectory), "{path}");
    }
    assert_eq!(volume.rename_path("/file", "/new/"), Err(Error::NotDirectory));
    assert_eq!(volume.remove_file("/dir/"), Err(Error::IsDirectory));
    volume.rename_path("/dir/", "/new/").unwrap();
    let names: Vec<_> = volume.read_dir("/").unwrap().into_iter().map(|entry| entry.name).collect();
    assert_eq!(names.len(), 3, "{names:?}");
}

#[test]
fn who_may_only_read_a_file_does_not_cut_it() {
    let volume = volume();
    let flags = OpenFlags { write: true, ..OpenFlags::CREATE };
    volume.open_file("/file", flags).unwrap().write_at(0, b"kept").unwrap();
    let cuts = OpenFlags { truncate: true, write: false, ..OpenFlags::READ };
    assert!(matches!(volume.open_file("/file", cuts), Err(Error::Invalid(_))));
    assert_eq!(volume.metadata("/file").unwrap().size_bytes, 4);
}

#[test]
fn a_cursor_reads_and_writes_where_it_is_and_moves_on() {
    let volume = volume();
    let file = volume.open_file("/f", OpenFlags::CREATE).unwrap();
    let mut first = file.cursor();
    first.write_all(&[1; 5000]).unwrap();
    first.write_all(&[2; 5000]).unwrap();
    first.flush().unwrap();
    assert_eq!((first.position(), file.size()), (10_000, 10_000));

    let (mut second, mut read) = (file.cursor(), Vec::new());
    assert_eq!(second.seek(SeekFrom::Start(4999)).unwrap(), 4999);
    assert_eq!(second.read_to_end(&mut read).unwrap(), 5001);
    assert_eq!((read[0], &read[1..]), (1, &[2; 5000][..]));
    assert_eq!(second.read(&mut [0; 8]).unwrap(), 0);
    assert_eq!(second.seek(SeekFrom::Current(-1)).unwrap(), 9999);
    assert_eq!(second.seek(SeekFrom::End(10)).unwrap(), 10_010);
    second.write_all(&[3]).unwrap();
    let mut end = [9; 11];
    file.read_at(10_000, &mut end).unwrap();
    assert_eq!(end, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3]);
    assert_eq!(first.position(), 10_000);

    assert_eq!(
        second.seek(SeekFrom::Current(-20_000)).unwrap_err().kind(),
        ErrorKind::InvalidInput
    );
    assert_eq!(second.position(), 10_011);
    assert_eq!(second.seek(SeekFrom::Start(u64::MAX)).unwrap(), u64::MAX);
    assert_eq!(second.read(&mut [0; 8]).unwrap(), 0);
    assert_eq!(second.write(&[1]).unwrap_err().kind(), ErrorKind::FileTooLarge);
    let unwritable = volume.open_file("/f", OpenFlags::READ).unwrap();
    let error = unwritable.cursor().write(&[1]).unwrap_err();
    assert_eq!(error.get_ref().and_then(|inner| inner.downcast_ref()), Some(&Error::NotWritable));
}
