//! Times, owners and permissions, and what opening does to them.

use super::*;

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
