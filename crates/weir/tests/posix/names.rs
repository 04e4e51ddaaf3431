//! Names, links and directories.

use super::*;
use std::collections::BTreeMap;

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
