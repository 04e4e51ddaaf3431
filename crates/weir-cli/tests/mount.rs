//! Real mounts of real volumes through the `weir` program. Skipped, with a word, where this machine
//! cannot mount (no root, no `/dev/fuse`).
#![allow(missing_docs)]

mod common;

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::{FallocateFlags, RenameFlags, XattrFlags};
use rustix::io::Errno;

use common::{Bench, SIGINT, SIGTERM, Server, done, eventually, refused};

#[test]
fn what_was_written_is_there_after_a_remount() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    let data: Vec<u8> = (0..5_000_000_u32).map(|i| (i * 31 % 253) as u8).collect();
    fs::create_dir_all(bench.at("a/b")).unwrap();
    fs::write(bench.at("a/b/f"), &data).unwrap();
    std::os::unix::fs::symlink("b/f", bench.at("a/s")).unwrap();
    fs::hard_link(bench.at("a/b/f"), bench.at("h")).unwrap();
    for number in 0..500 {
        fs::write(bench.at(&format!("file-{number}")), format!("{number}")).unwrap();
    }
    bench.unmount();
    assert!(done(&["info", &bench.volume()]).contains("clean"));
    bench.mount(&[]);
    assert!(fs::read(bench.at("a/s")).unwrap() == data);
    assert_eq!(fs::metadata(bench.at("h")).unwrap().nlink(), 2);
    assert_eq!(fs::read_dir(bench.at("")).unwrap().count(), 502);
    for number in 0..500 {
        let text = fs::read_to_string(bench.at(&format!("file-{number}"))).unwrap();
        assert_eq!(text, format!("{number}"));
    }
    bench.unmount();
}

#[test]
fn what_was_synced_survives_a_kill() {
    let Some(bench) = Bench::new() else { return };
    let server = bench.foreground();
    let mut file = File::create(bench.at("acknowledged")).unwrap();
    file.write_all(b"durable").unwrap();
    file.sync_all().unwrap();
    fs::write(bench.at("all"), "of it").unwrap();
    done(&["sync", &bench.dir()]);
    drop(file);
    server.signal(9);
    server.end();
    let said = refused(1, &["mount", &bench.volume(), &bench.dir()]);
    assert!(said.contains("umount --lazy"), "the dead mount is named: {said}");
    done(&["umount", "--lazy", &bench.dir()]);
    bench.mount(&[]);
    assert_eq!(fs::read_to_string(bench.at("acknowledged")).unwrap(), "durable");
    assert_eq!(fs::read_to_string(bench.at("all")).unwrap(), "of it");
    bench.unmount();
}

const TRANSPORTS: [&str; 2] = ["io_uring", "no_io_uring"];

/// Serves `bench` with mount `options` while `change` is made, and takes the server away as a power cut would.
fn changed_and_killed(bench: &Bench, options: &str, change: impl FnOnce()) {
    let server = bench.foreground_with(&["-o", options]);
    change();
    server.signal(9);
    server.end();
    let _ = weir_mount::mount_point::detach(Path::new(&bench.dir()), true);
    bench.mount(&[]);
}

#[test]
fn changes_of_directories_survive_a_kill_where_the_mount_is_synchronous() {
    for transport in TRANSPORTS {
        for option in ["dirsync", "sync"] {
            let Some(bench) = Bench::new() else { return };
            changed_and_killed(&bench, &format!("{option},{transport}"), || {
                fs::create_dir(bench.at("d")).unwrap();
                drop(File::create(bench.at("d/f")).unwrap());
                fs::rename(bench.at("d/f"), bench.at("d/g")).unwrap();
            });
            assert!(bench.at("d/g").exists(), "{option},{transport}");
            bench.unmount();
        }
    }
}

#[test]
fn every_change_survives_a_kill_where_the_mount_is_synchronous() {
    for transport in TRANSPORTS {
        let Some(bench) = Bench::mounted(&[]) else { return };
        for name in ["mode", "written", "allocated"] {
            fs::write(bench.at(name), "old").unwrap();
        }
        bench.unmount();
        let options = format!("sync,{transport}");
        let lost = |what: &str| format!("{what} is lost, {transport}");
        changed_and_killed(&bench, &options, || {
            fs::set_permissions(bench.at("mode"), fs::Permissions::from_mode(0o751)).unwrap();
        });
        let mode = fs::metadata(bench.at("mode")).unwrap().mode();
        assert_eq!(mode & 0o777, 0o751, "{}", lost("a mode"));
        bench.unmount();
        changed_and_killed(&bench, &options, || fs::write(bench.at("written"), "new").unwrap());
        assert_eq!(fs::read_to_string(bench.at("written")).unwrap(), "new", "{}", lost("data"));
        bench.unmount();
        changed_and_killed(&bench, &options, || {
            let file = OpenOptions::new().write(true).open(bench.at("allocated")).unwrap();
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 1 << 20).unwrap();
        });
        let size = fs::metadata(bench.at("allocated")).unwrap().len();
        assert_eq!(size, 1 << 20, "{}", lost("a size"));
        bench.unmount();
    }
}

#[test]
fn what_a_synchronous_descriptor_allocates_or_is_copied_to_survives_a_kill() {
    for transport in TRANSPORTS {
        for flag in [libc::O_DSYNC, libc::O_SYNC] {
            let Some(bench) = Bench::mounted(&[]) else { return };
            fs::write(bench.at("from"), vec![7; 300_000]).unwrap();
            fs::write(bench.at("f"), "old").unwrap();
            bench.unmount();
            let open =
                || OpenOptions::new().write(true).custom_flags(flag).open(bench.at("f")).unwrap();
            changed_and_killed(&bench, transport, || {
                rustix::fs::fallocate(open(), FallocateFlags::empty(), 0, 1 << 20).unwrap();
            });
            assert_eq!(fs::metadata(bench.at("f")).unwrap().len(), 1 << 20, "{transport}");
            bench.unmount();
            changed_and_killed(&bench, transport, || {
                let from = File::open(bench.at("from")).unwrap();
                let copied = rustix::fs::copy_file_range(from, None, open(), None, 300_000);
                assert_eq!(copied, Ok(300_000));
            });
            let found = fs::read(bench.at("f")).unwrap();
            assert!(found[..300_000].iter().all(|byte| *byte == 7), "{transport}, {flag:#o}");
            bench.unmount();
        }
    }
}

/// What container runtimes do with a file system: it takes what programs change, on top of layers that they share.
#[test]
fn a_mount_is_the_upper_layer_of_an_overlay() {
    let overlays = fs::read_to_string("/proc/filesystems").unwrap().contains("\toverlay\n");
    if !overlays {
        eprintln!("skipped: the kernel has no overlayfs");
        return;
    }
    for options in [&[][..], &["-o", "no_io_uring"]] {
        let Some(bench) = Bench::mounted(options) else { return };
        let lower = bench.dir.path().join("lower");
        fs::create_dir_all(lower.join("etc/old")).unwrap();
        for (name, text) in [("etc/kept", "k"), ("etc/changed", "c"), ("etc/old/in", "i")] {
            fs::write(lower.join(name), text).unwrap();
        }
        for dir in ["upper", "work"] {
            fs::create_dir(bench.at(dir)).unwrap();
        }
        let merged = bench.dir.path().join("merged");
        fs::create_dir(&merged).unwrap();
        let layers = format!(
            "lowerdir={},upperdir={},workdir={},redirect_dir=on",
            lower.display(),
            bench.at("upper").display(),
            bench.at("work").display()
        );
        let mount = || {
            let mounted = Command::new("mount")
                .args(["-t", "overlay", "overlay", "-o", &layers])
                .arg(&merged)
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&mounted.stderr);
            assert!(mounted.status.success(), "{options:?}: {said}");
        };
        let unmount = || assert!(Command::new("umount").arg(&merged).status().unwrap().success());
        mount();
        let etc = merged.join("etc");
        fs::write(etc.join("changed"), "new").unwrap();
        fs::rename(etc.join("kept"), etc.join("moved")).unwrap();
        fs::rename(etc.join("old"), merged.join("young")).unwrap();
        unmount();
        bench.unmount();
        bench.mount(options);
        mount();
        let text = |path: &str| fs::read_to_string(merged.join(path)).unwrap();
        assert_eq!([text("etc/changed"), text("etc/moved"), text("young/in")], ["new", "k", "i"]);
        let names = fs::read_dir(&etc).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.collect();
        names.sort();
        assert_eq!(names, ["changed", "moved"], "what was renamed is gone");
        unmount();
        bench.unmount();
        let checked = done(&["fsck", &bench.volume()]);
        assert!(checked.contains(" clean: ") && checked.contains(" special files, "), "{checked}");
    }
}

#[test]
fn a_volume_in_use_is_not_mounted_twice_nor_opened_nor_overwritten() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    let other = tempfile::tempdir().unwrap();
    let (volume, other) = (bench.volume(), other.path().to_str().unwrap());
    for background in [&["--background"][..], &[]] {
        let arguments = [&["mount", &volume, other][..], background].concat();
        let said = refused(1, &arguments);
        assert!(said.contains("in use") && said.contains(&bench.dir()), "{said}");
    }
    for arguments in [
        &["ls", &format!("{volume}:/")][..],
        &["mkdir", &format!("{volume}:/x")],
        &["dump", &volume],
        &["create", &volume, "--size", "64M", "--force"],
    ] {
        assert!(refused(1, arguments).contains("in use"));
    }
    let info = done(&["info", &volume]);
    assert!(info.contains("in use: mounted at") && info.contains("flushes"), "{info}");
    bench.unmount();
}

#[test]
fn an_interrupt_unmounts_cleanly() {
    for signal in [SIGINT, SIGTERM] {
        let Some(bench) = Bench::new() else { return };
        let server = bench.foreground();
        fs::write(bench.at("f"), "kept").unwrap();
        server.signal(signal);
        let (code, said) = server.end();
        assert_eq!((code, said.as_str()), (Some(0), ""));
        assert!(!bench.is_mounted());
        assert!(done(&["info", &bench.volume()]).contains("clean"));
        assert_eq!(done(&["cat", &format!("{}:/f", bench.volume())]), "kept");
    }
}

fn first_line(server: &mut Server) -> String {
    line_of(server.0.stderr.take().unwrap())
}

/// The first line that comes, or none if that takes too long.
fn line_of(from: impl Read + Send + 'static) -> String {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let (mut said, mut line) = (BufReader::new(from), String::new());
        let _ = said.read_line(&mut line);
        let _ = sender.send(line);
        // Whatever else is said must not meet a closed pipe.
        said.read_to_string(&mut String::new())
    });
    receiver.recv_timeout(std::time::Duration::from_secs(20)).unwrap_or_default()
}

#[test]
fn a_mount_that_is_covered_is_synced_when_asked_to_end_and_says_why_it_goes_on() {
    let Some(bench) = Bench::new() else { return };
    let mut server = bench.foreground();
    fs::write(bench.at("f"), "kept").unwrap();
    let dir = bench.dir();
    let tmpfs = Command::new("mount").args(["-t", "tmpfs", "none", &dir]).status().unwrap();
    assert!(tmpfs.success());
    server.signal(SIGTERM);
    let line = first_line(&mut server);
    assert!(line.contains(&format!("{dir} is covered by another mount")), "{line}");
    let status = || done(&["info", &bench.volume()]);
    assert!(status().contains("in use"), "{}", status());
    eventually("it is synced", || {
        fs::read(bench.volume()).unwrap().windows(4).any(|w| w == b"kept")
    });
    rustix::mount::unmount(Path::new(&dir), rustix::mount::UnmountFlags::empty()).unwrap();
    assert_eq!(fs::read_to_string(bench.at("f")).unwrap(), "kept", "it is still served");
    bench.unmount();
    assert_eq!(server.0.wait().unwrap().code(), Some(0));
}

#[test]
fn a_mount_that_others_see_says_so_when_it_is_asked_to_end() {
    let Some(bench) = Bench::new() else { return };
    let mut server = bench.foreground();
    fs::write(bench.at("f"), "kept").unwrap();
    let other = tempfile::tempdir().unwrap();
    let bound = Command::new("mount").args(["--bind", &bench.dir()]).arg(other.path()).status();
    assert!(bound.unwrap().success());
    // It does not end with this file, so that is not what is to be told.
    let open = File::open(bench.at("f")).unwrap();
    server.signal(SIGTERM);
    let line = first_line(&mut server);
    let at = format!("still mounted at {}", other.path().display());
    assert!(line.contains(&at) && !bench.is_mounted(), "{line}");
    drop(open);
    assert_eq!(fs::read_to_string(other.path().join("f")).unwrap(), "kept");
    rustix::mount::unmount(other.path(), rustix::mount::UnmountFlags::empty()).unwrap();
    assert_eq!(server.0.wait().unwrap().code(), Some(0));
}

#[test]
fn an_unmount_that_waits_for_another_mount_of_the_volume_says_where_that_is() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    let dir = bench.dir.path();
    let unmounting = |what: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
        let mut child = command.args(["umount", what]).stderr(Stdio::piped()).spawn().unwrap();
        let line = line_of(child.stderr.take().unwrap());
        (child, line)
    };
    let other = dir.join("other");
    fs::create_dir(&other).unwrap();
    let bound = Command::new("mount").args(["--bind", &bench.dir()]).arg(&other).status();
    assert!(bound.unwrap().success());
    let (mut child, line) = unmounting(&bench.dir());
    assert!(line.contains(&format!("still mounted at {}", other.display())), "{line}");
    // In a namespace of its own a process goes on seeing it.
    let script = "mount --make-rprivate / && echo ready && exec sleep 100";
    let mut process = Command::new("unshare");
    let process = process.args(["-m", "sh", "-c", script]).stdout(Stdio::piped()).spawn();
    let Ok(mut process) = process else {
        eprintln!("skipped: no unshare");
        return;
    };
    let mut ready = String::new();
    BufReader::new(process.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    let (mut second, line) = unmounting(other.to_str().unwrap());
    let own_id = format!("(pid {})", process.id());
    process.kill().unwrap();
    process.wait().unwrap();
    assert!(line.contains("in the namespace of") && line.contains(&own_id), "{line}");
    assert!(second.wait().unwrap().success() && child.wait().unwrap().success());
}

#[test]
fn an_interrupt_of_a_busy_mount_is_refused_and_a_second_one_detaches() {
    let Some(bench) = Bench::new() else { return };
    let mut server = bench.foreground();
    let mut said = BufReader::new(server.0.stderr.take().unwrap());
    let mut file =
        OpenOptions::new().read(true).write(true).create_new(true).open(bench.at("f")).unwrap();
    server.signal(SIGINT);
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    let own_id = format!("pid {}", std::process::id());
    assert!(line.contains("busy") && line.contains(&own_id), "{line}");
    assert!(bench.is_mounted());
    server.signal(SIGINT);
    eventually("detached", || !bench.is_mounted());
    line.clear();
    said.read_line(&mut line).unwrap();
    assert!(line.contains("detached, 1 files still open: ends when they are closed"), "{line}");
    file.write_all(b"still served").unwrap();
    file.seek(SeekFrom::Start(0)).unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "still served");
    drop(file);
    assert_eq!(server.0.wait().unwrap().code(), Some(0));
    assert_eq!(done(&["cat", &format!("{}:/f", bench.volume())]), "still served");
}

#[test]
fn a_third_interrupt_ends_it_with_the_volume_closed() {
    let Some(bench) = Bench::new() else { return };
    let mut server = bench.foreground();
    let mut said = BufReader::new(server.0.stderr.take().unwrap());
    let mut file = File::create(bench.at("f")).unwrap();
    file.write_all(b"written").unwrap();
    let mut line = String::new();
    for _ in 0..2 {
        server.signal(SIGINT);
        said.read_line(&mut line).unwrap();
    }
    server.signal(SIGINT);
    assert_eq!(server.0.wait().unwrap().code(), Some(130), "{line}");
    assert!(file.write_all(b"too late").is_err());
    drop(file);
    assert!(done(&["info", &bench.volume()]).contains("clean"));
    assert_eq!(done(&["cat", &format!("{}:/f", bench.volume())]), "written");
}

/// Overwrites each of these blocks of a volume's file with something else.
fn spoil(volume: &str, block: &[u8; 4096]) {
    let file = OpenOptions::new().read(true).write(true).open(volume).unwrap();
    let content = fs::read(volume).unwrap();
    let places = content.chunks(4096).enumerate().filter(|(_, found)| found == block);
    let places: Vec<u64> = places.map(|(at, _)| at as u64 * 4096).collect();
    assert!(!places.is_empty(), "the block is nowhere in the volume");
    for place in places {
        file.write_all_at(&[0; 4096], place).unwrap();
    }
}

#[test]
fn a_server_that_cannot_tell_of_an_error_goes_on_and_ends_when_asked() {
    for options in [&[][..], &["-o", "no_io_uring"]] {
        let Some(bench) = Bench::mounted(&[]) else { return };
        let block = [0xA7; 4096];
        fs::write(bench.at("spoiled"), block.repeat(64)).unwrap();
        bench.unmount();
        spoil(&bench.volume(), &block);
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut server = bench.foreground_saying(options, full.into());
        // More often than there are threads that serve.
        for _ in 0..8 {
            let error = fs::read(bench.at("spoiled")).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EIO));
        }
        fs::write(bench.at("after"), "kept").unwrap();
        assert_eq!(fs::read_to_string(bench.at("after")).unwrap(), "kept");
        server.signal(SIGTERM);
        assert_eq!(server.0.wait().unwrap().code(), Some(0), "{options:?}");
        assert_eq!(done(&["cat", &format!("{}:/after", bench.volume())]), "kept");
    }
}

#[test]
fn a_hangup_unmounts_but_not_what_was_started_to_outlive_it() {
    // Said in either case: what the test itself was started with may be either.
    for (how, outlives) in [("--default-signal=HUP", false), ("--ignore-signal=HUP", true)] {
        let Some(bench) = Bench::new() else { return };
        let mut child = Command::new("env")
            .args([how, env!("CARGO_BIN_EXE_weir"), "mount", &bench.volume(), &bench.dir()])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        assert!(line_of(child.stdout.take().unwrap()).contains(" mounted at "));
        let server = Server(child);
        server.signal(1);
        if outlives {
            assert!(bench.is_mounted());
            fs::write(bench.at("file"), "written after the hangup").unwrap();
            server.signal(SIGTERM);
        }
        assert_eq!(server.end(), (Some(0), String::new()), "{how}");
        assert!(!bench.is_mounted());
    }
}

#[test]
fn attributes_that_the_kernel_guards_for_nobody_are_refused() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    fs::write(bench.at("f"), "x").unwrap();
    for name in ["system.mine", "system.posix_acl_mine", "system.posix_acl_accessory"] {
        let set = rustix::fs::setxattr(bench.at("f"), name, b"1", XattrFlags::empty());
        assert_eq!(set, Err(Errno::OPNOTSUPP), "{name}");
        let removed = rustix::fs::removexattr(bench.at("f"), name);
        assert_eq!(removed, Err(Errno::OPNOTSUPP), "{name}");
    }
    bench.unmount();
}

#[test]
fn an_unmount_by_other_means_ends_the_server_with_success() {
    for program in [&["umount"][..], &["fusermount3", "-u"]] {
        let Some(bench) = Bench::new() else { return };
        let server = bench.foreground();
        fs::write(bench.at("f"), "x").unwrap();
        let status = Command::new(program[0]).args(&program[1..]).arg(bench.dir()).status();
        if !status.is_ok_and(|status| status.success()) {
            eprintln!("skipped: no {}", program[0]);
            bench.unmount();
            continue;
        }
        // The volume may still be closing: a command waits for that.
        assert_eq!(done(&["cat", &format!("{}:/f", bench.volume())]), "x");
        assert_eq!(server.end(), (Some(0), String::new()));
    }
}

#[test]
fn a_mount_that_does_not_work_in_the_background_says_why_and_fails() {
    let Some(bench) = Bench::new() else { return };
    let missing = format!("{}-missing", bench.volume());
    let said = refused(1, &["mount", &missing, &bench.dir(), "--background"]);
    assert!(said.contains("no such file"), "{said}");
    assert!(!bench.is_mounted());
    let log = bench.dir.path().join("log");
    let log = log.to_str().unwrap();
    refused(1, &["mount", &missing, &bench.dir(), "--background", "--log", log]);
}

/// `mount(8)` finds its helpers in /sbin only: in a namespace of its own that has one more.
const MOUNT_AS_FSTAB_SAYS: &str = "set -e
    mount -t overlay -o lowerdir=$1/sbin:/usr/sbin none /usr/sbin
    mount --fstab $1/fstab $1/mnt
    grep \" $1/mnt fuse.weir \" /proc/self/mounts
    echo x > $1/mnt/f
    mount --fstab $1/fstab -o remount,ro $1/mnt
    grep \" $1/mnt fuse.weir ro,\" /proc/self/mounts
    if touch $1/mnt/g; then exit 1; fi
    mount --fstab $1/fstab -o remount,rw $1/mnt
    touch $1/mnt/f
    exec 3> $1/mnt/f
    if mount --fstab $1/fstab -o remount,ro $1/mnt; then exit 1; else test $? = 32; fi
    echo x >&3
    exec 3>&-
    if mount -t weir $1/v $1/mnt -o sparkling; then exit 1; else test $? = 1; fi
    if mount -t weir $1/none $1/mnt; then exit 1; else test $? = 32; fi
    weir umount $1/mnt
    mount -t weir -s -r $1/v $1/mnt -o sparkling
    cat $1/mnt/f
    if touch $1/mnt/g; then exit 1; fi
    weir umount $1/mnt";

#[test]
fn what_fstab_says_is_mounted_by_mount() {
    let Some(bench) = Bench::new() else { return };
    let at = |name: &str| bench.dir.path().join(name);
    let program = Path::new(env!("CARGO_BIN_EXE_weir"));
    fs::create_dir(at("sbin")).unwrap();
    std::os::unix::fs::symlink(program, at("sbin/mount.weir")).unwrap();
    let (volume, dir, log) = (bench.volume(), bench.dir(), at("log"));
    let options = format!("defaults,noatime,user,memory=16M,log={},nofail", log.display());
    fs::write(at("fstab"), format!("{volume} {dir} weir {options} 0 0\n")).unwrap();

    let path = format!("{}:{}", program.parent().unwrap().display(), env!("PATH"));
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", MOUNT_AS_FSTAB_SAYS, "sh"])
        .arg(bench.dir.path())
        .env("PATH", path)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(printed.contains("noatime") && printed.ends_with("x\n"), "{printed}");
    assert!(said.contains("mount option 'sparkling'"), "{said}");
    assert!(said.contains("no such file"), "{said}");
    assert!(log.exists());
}

#[test]
fn create_and_mount_is_one_command() {
    let Some(bench) = Bench::new() else { return };
    fs::remove_file(bench.volume()).unwrap();
    let said = refused(2, &["mount", "--create", &bench.volume(), &bench.dir(), "--background"]);
    assert!(said.contains("--size 8G"), "{said}");
    bench.mount(&["--create", "--size", "64M"]);
    fs::write(bench.at("f"), "x").unwrap();
    bench.unmount();
    // Once it is there it is used, not made again.
    bench.mount(&["--create", "--size", "64M"]);
    assert_eq!(fs::read_to_string(bench.at("f")).unwrap(), "x");
    bench.unmount();
}

#[test]
fn a_read_only_mount_changes_nothing() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    fs::write(bench.at("f"), "x").unwrap();
    bench.unmount();
    let before = fs::read(bench.volume()).unwrap();
    bench.mount(&["--read-only"]);
    assert_eq!(fs::read_to_string(bench.at("f")).unwrap(), "x");
    let error = fs::write(bench.at("g"), "x").unwrap_err();
    assert_eq!(error.raw_os_error(), Some(Errno::ROFS.raw_os_error()));
    bench.unmount();
    assert!(fs::read(bench.volume()).unwrap() == before);
}

#[test]
fn without_the_device_one_line_says_what_to_do() {
    let Some(bench) = Bench::new() else { return };
    // A private /dev without fuse.
    let script = "mount -t tmpfs none /dev && exec \"$0\" mount \"$1\" \"$2\"";
    let output = Command::new("unshare")
        .args(["-m", "sh", "-c", script, env!("CARGO_BIN_EXE_weir")])
        .args([bench.volume(), bench.dir()])
        .stdin(Stdio::null())
        .output();
    let Ok(output) = output else {
        eprintln!("skipped: no unshare");
        return;
    };
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.starts_with("weir: /dev/fuse is missing: load the module"), "{said}");
    assert!(done(&["info", &bench.volume()]).contains("clean"), "the volume was closed");
}

#[test]
fn reading_what_the_server_has_in_memory_moves_the_access_time() {
    for transport in TRANSPORTS {
        for (policy, moves) in [("relatime", true), ("strictatime", true), ("noatime", false)] {
            let Some(bench) = Bench::mounted(&["-o", &format!("{policy},{transport}")]) else {
                return;
            };
            // Written past the kernel's page cache, so that the read reaches the server.
            let path = bench.at("f");
            fs::write(&path, "in memory").unwrap();
            let before = fs::metadata(&path).unwrap();
            std::thread::sleep(std::time::Duration::from_millis(5));
            assert_eq!(fs::read_to_string(&path).unwrap(), "in memory");
            let after = fs::metadata(&path).unwrap();
            let moved = (after.atime(), after.atime_nsec()) > (before.atime(), before.atime_nsec());
            assert_eq!(moved, moves, "{policy},{transport}");
            bench.unmount();
        }
    }
}

#[test]
fn renames_keep_their_flags() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    let rename = |from: &str, to: &str, flags| {
        rustix::fs::renameat_with(
            rustix::fs::CWD,
            bench.at(from),
            rustix::fs::CWD,
            bench.at(to),
            flags,
        )
    };
    fs::write(bench.at("a"), "a").unwrap();
    fs::write(bench.at("b"), "b").unwrap();
    assert_eq!(rename("a", "b", RenameFlags::NOREPLACE), Err(Errno::EXIST));
    rename("a", "b", RenameFlags::EXCHANGE).unwrap();
    assert_eq!(fs::read_to_string(bench.at("a")).unwrap(), "b");
    rename("a", "c", RenameFlags::NOREPLACE).unwrap();
    rename("c", "b", RenameFlags::empty()).unwrap();
    assert_eq!(fs::read_to_string(bench.at("b")).unwrap(), "b");
    assert!(!bench.at("a").exists() && !bench.at("c").exists());
    bench.unmount();
}

#[test]
fn holes_are_found_punched_and_kept() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(bench.at("sparse"))
        .unwrap();
    file.set_len(16 << 20).unwrap();
    file.write_all_at(&[1; 8192], 8 << 20).unwrap();
    file.sync_all().unwrap();
    let data = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(0)).unwrap();
    assert_eq!(data, 8 << 20);
    let hole = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(data)).unwrap();
    assert_eq!(hole, (8 << 20) + 8192);
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, punch, 8 << 20, 4096).unwrap();
    let mut block = [9; 8192];
    file.read_exact_at(&mut block, 8 << 20).unwrap();
    assert!(block[..4096].iter().all(|&byte| byte == 0));
    assert!(block[4096..].iter().all(|&byte| byte == 1));
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 1 << 20).unwrap();
    assert!(file.metadata().unwrap().blocks() * 512 >= 1 << 20);
    assert_eq!(rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(16 << 20)), Err(Errno::NXIO));
    drop(file);
    bench.unmount();
}

/// As on file systems that know no other way than in place: what has blocks can be written.
#[test]
fn a_full_volume_takes_what_was_allocated_and_is_overwritten() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    let open = |name| {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).open(bench.at(name)).unwrap()
    };
    let (allocated, database) = (open("allocated"), open("database"));
    rustix::fs::fallocate(&allocated, FallocateFlags::empty(), 0, 4 << 20).unwrap();
    database.write_all_at(&vec![1; 4 << 20], 0).unwrap();
    for size in [1 << 20, 4096, 1] {
        let data = vec![2; size];
        for number in 0.. {
            let Err(error) = fs::write(bench.at(&format!("fill{size}.{number}")), &data) else {
                continue;
            };
            assert_eq!(error.raw_os_error(), Some(Errno::NOSPC.raw_os_error()));
            break;
        }
    }
    for (index, offset) in (0..4 << 20).step_by(65_536).enumerate() {
        let data = vec![index as u8; 65_536];
        allocated.write_all_at(&data, offset).unwrap();
        database.write_all_at(&data[..30_000], offset).unwrap();
        if index % 8 == 0 {
            database.sync_data().unwrap();
        }
    }
    drop((allocated, database));
    bench.unmount();
    bench.mount(&[]);
    let (allocated, database) =
        (fs::read(bench.at("allocated")).unwrap(), fs::read(bench.at("database")).unwrap());
    for (index, (new, old)) in allocated.chunks(65_536).zip(database.chunks(65_536)).enumerate() {
        assert!(new.iter().chain(&old[..30_000]).all(|&byte| byte == index as u8));
        assert!(old[30_000..].iter().all(|&byte| byte == 1));
    }
    bench.unmount();
}

#[test]
fn an_unprivileged_write_ends_set_user_id() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    let set_up = |name: &str| {
        let path = bench.at(name);
        fs::write(&path, "program").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o6777)).unwrap();
        rustix::fs::setxattr(&path, "user.note", b"stays", XattrFlags::empty()).unwrap();
        path
    };
    let as_nobody = |script: &str, path: &Path| {
        let status = Command::new("sh")
            .args(["-c", script, "sh"])
            .arg(path)
            .uid(65534)
            .gid(65534)
            .status()
            .unwrap();
        assert!(status.success(), "{script}");
    };
    for (name, script) in [
        ("append", "echo x >> \"$1\""),
        ("cut", ": > \"$1\""),
        ("truncate", "truncate -s 3 \"$1\""),
        ("allocate", "fallocate -l 9000 \"$1\""),
    ] {
        let path = set_up(name);
        as_nobody(script, &path);
        let mode = fs::metadata(&path).unwrap().mode() & 0o7777;
        assert_eq!(mode, 0o777, "{name}");
        // Root may write without that.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o6777)).unwrap();
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"y").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o6777, "{name}");
    }
    let path = set_up("chown");
    std::os::unix::fs::chown(&path, Some(7), None).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o777);
    bench.unmount();
}

/// `system.posix_acl_*` of owner, a named user, group, mask and other.
fn acl(owner: u16, user: (u32, u16), group: u16, mask: u16, other: u16) -> Vec<u8> {
    let mut value = 2_u32.to_le_bytes().to_vec();
    let none = u32::MAX;
    for (tag, permissions, id) in [
        (1_u16, owner, none),
        (2, user.1, user.0),
        (4, group, none),
        (0x10, mask, none),
        (0x20, other, none),
    ] {
        value.extend_from_slice(&tag.to_le_bytes());
        value.extend_from_slice(&permissions.to_le_bytes());
        value.extend_from_slice(&id.to_le_bytes());
    }
    value
}

#[test]
fn access_control_lists_are_enforced_inherited_and_follow_chmod() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    let read_as = |uid: u32, path: &Path| {
        let mut cat = Command::new("cat");
        cat.arg(path).uid(uid).gid(uid).stdout(Stdio::null()).stderr(Stdio::null());
        cat.status().unwrap().success()
    };
    let set = |path: &Path, name: &str, value: &[u8]| {
        rustix::fs::setxattr(path, name, value, XattrFlags::empty()).unwrap();
    };
    let dir = bench.at("dir");
    fs::create_dir(&dir).unwrap();
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
    set(&dir, "system.posix_acl_default", &acl(7, (4242, 4), 0, 7, 0));
    let path = dir.join("f");
    let file = OpenOptions::new().write(true).create_new(true).mode(0o666).open(&path).unwrap();
    drop(file);
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o660);
    assert!(read_as(4242, &path), "the named user may read");
    assert!(!read_as(4243, &path), "others may not");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    assert!(!read_as(4242, &path), "chmod took the mask away");
    set(&path, "system.posix_acl_access", &acl(6, (4243, 4), 0, 4, 0));
    assert!(read_as(4243, &path) && !read_as(4242, &path));
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
    fs::create_dir(dir.join("sub")).unwrap();
    let mut value = [0; 256];
    let inherited = rustix::fs::getxattr(dir.join("sub"), "system.posix_acl_default", &mut value);
    assert!(inherited.is_ok(), "directories pass the list on");
    bench.unmount();
}

#[test]
fn lists_that_nobody_enforces_are_refused_and_hidden() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    let list = acl(6, (4242, 4), 0, 4, 0);
    let set = || {
        let name = "system.posix_acl_access";
        rustix::fs::setxattr(bench.at("f"), name, &list, XattrFlags::empty())
    };
    let listed = || {
        let mut names = [0; 256];
        let bytes = rustix::fs::listxattr(bench.at("f"), &mut names).unwrap();
        names[..bytes].to_vec()
    };
    fs::write(bench.at("f"), "x").unwrap();
    set().unwrap();
    assert_eq!(listed(), b"system.posix_acl_access\0");
    bench.unmount();
    for transport in TRANSPORTS {
        bench.mount(&["-o", &format!("noacl,{transport}")]);
        assert_eq!(set(), Err(Errno::OPNOTSUPP), "{transport}");
        let mut value = [0; 256];
        let found = rustix::fs::getxattr(bench.at("f"), "system.posix_acl_access", &mut value);
        assert_eq!(found, Err(Errno::OPNOTSUPP), "{transport}");
        assert_eq!(listed(), b"", "{transport}");
        bench.unmount();
    }
    bench.mount(&[]);
    assert_eq!(listed(), b"system.posix_acl_access\0", "it is still there for who enforces it");
    bench.unmount();
}

#[test]
fn the_status_attribute_says_that_all_is_well() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    let mut value = [0; 64];
    let bytes = rustix::fs::getxattr(bench.dir(), "weir.status", &mut value).unwrap();
    assert_eq!(&value[..bytes], b"ok");
    bench.unmount();
}

#[test]
fn an_open_directory_listing_survives_removals() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    for number in 0..2000 {
        File::create(bench.at(&format!("f{number}"))).unwrap();
    }
    let mut seen = 0;
    for entry in fs::read_dir(bench.dir()).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
        seen += 1;
    }
    assert_eq!(seen, 2000);
    assert_eq!(fs::read_dir(bench.dir()).unwrap().count(), 0);
    bench.unmount();
}

/// Whoever asks a server that does not answer waits until it does, and cannot even be killed.
#[test]
fn a_mount_whose_server_is_stopped_is_detached_without_asking_it() {
    let Some(bench) = Bench::new() else { return };
    for transport in ["io_uring", "no_io_uring"] {
        let mut server = bench.foreground_with(&["-o", transport]);
        server.signal(signal_hook::consts::SIGSTOP);
        let (mut command, dir) = (Command::new(env!("CARGO_BIN_EXE_weir")), bench.dir());
        let mut child = command.args(["umount", "--lazy", &dir]).spawn().unwrap();
        let began = std::time::Instant::now();
        let mut ended = child.try_wait().unwrap();
        while ended.is_none() && began.elapsed() < std::time::Duration::from_secs(10) {
            std::thread::sleep(std::time::Duration::from_millis(10));
            ended = child.try_wait().unwrap();
        }
        let is_mounted = bench.is_mounted();
        server.signal(signal_hook::consts::SIGCONT);
        assert!(ended.is_some_and(|status| status.success()), "{transport}: {ended:?}");
        assert!(!is_mounted, "{transport}");
        assert_eq!(server.0.wait().unwrap().code(), Some(0), "{transport}");
    }
}

#[test]
fn a_volume_with_a_name_that_is_no_text_is_known_by_it() {
    use std::os::unix::ffi::OsStrExt;
    let Some(bench) = Bench::new() else { return };
    let volume = bench.dir.path().join(std::ffi::OsStr::from_bytes(b"v\xff, \\ v"));
    fs::rename(bench.volume(), &volume).unwrap();
    let run = |arguments: &[&std::ffi::OsStr]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
        let output = command.args(arguments).stdin(Stdio::null()).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (name, dir) = (volume.as_os_str(), bench.dir());
    let mounted = run(&["mount".as_ref(), name, dir.as_ref(), "--background".as_ref()]);
    assert_eq!(mounted, (Some(0), String::new()));
    let (code, said) = run(&["fsck".as_ref(), name]);
    assert!(code == Some(8) && said.contains(&format!("mounted at {dir}")), "{code:?} {said}");
    // By its name, and it is waited for.
    assert_eq!(run(&["umount".as_ref(), name]), (Some(0), String::new()));
    assert!(!bench.is_mounted());
    assert_eq!(run(&["fsck".as_ref(), name]).0, Some(0));
}
