//! `weir cp`: where it writes, what it never overwrites, and what it says of copies cut off.
#![allow(missing_docs)]

mod common;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use common::{Bench, Scratch, done, refused, weir};

impl Scratch {
    /// A file in the volume.
    fn stored(&self, path: &str, content: impl AsRef<[u8]>) -> String {
        done(&["cp", &self.file("to-store", content), &self.at(path)]);
        fs::remove_file(self.path("to-store")).unwrap();
        self.at(path)
    }
    /// Flips a bit in the last block of the volume that is all `byte`.
    fn damage(&self, byte: u8) {
        let mut image = fs::read(&self.volume).unwrap();
        let found = image.chunks(4096).rposition(|block| block == [byte; 4096]).unwrap();
        image[found * 4096 + 100] ^= 1;
        fs::write(&self.volume, image).unwrap();
    }
}

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().mode() & 0o7777
}

#[test]
fn a_copy_into_a_volume_that_fills_up_fails_and_says_where_it_ends() {
    let scratch = Scratch::new("8M");
    // A write that has room for its beginning only is short, and no error.
    let pages: Vec<u8> = (0..12 << 20).map(|at: u32| (at >> 12) as u8 | 1).collect();
    let said = refused(1, &["cp", &scratch.file("big", &pages), &scratch.at("/")]);
    assert!(said.contains("no space left") && said.contains("incomplete"), "{said}");
    let stored = weir(&["cat", &scratch.at("/big")]).stdout;
    assert!(stored.len() < pages.len() && pages.starts_with(&stored), "{}", stored.len());
    assert!(said.contains(&format!("at byte {})", stored.len())), "{said}");
    assert_eq!(weir(&["fsck", &scratch.volume]).status.code(), Some(0));
}

#[test]
fn what_fits_almost_is_never_a_copy_that_succeeded() {
    let scratch = Scratch::new("8M");
    // Sizes around what is free, in steps below the unit of copying: each copy fails or is whole.
    let info: serde_json::Value =
        serde_json::from_str(&done(&["info", "--json", &scratch.volume])).unwrap();
    let free_bytes = info["available_bytes"].as_u64().unwrap();
    for less in [0, 64 << 10, 200 << 10, 600 << 10] {
        // Beside an old one there would be no room for any of them.
        done(&["rm", "-f", &scratch.at("/f")]);
        let content = vec![0xa5; (free_bytes - less) as usize];
        let output = weir(&["cp", &scratch.file("f", &content), &scratch.at("/f")]);
        let stored = weir(&["cat", &scratch.at("/f")]).stdout;
        assert_eq!(output.status.success(), stored == content, "{less} less than is free");
    }
}

#[test]
fn a_file_of_the_volume_is_replaced_only_by_a_copy_that_is_complete() {
    let scratch = Scratch::new("16M");
    let stored = scratch.stored("/file", "old");
    // Not by one that does not fit, ...
    let big = scratch.file("big", vec![7; 32 << 20]);
    let said = refused(1, &["cp", &big, &stored]);
    assert!(said.contains("no space left") && said.contains("old file is kept"), "{said}");
    assert_eq!(done(&["cat", &stored]), "old");
    // ... nor by one of what cannot be opened.
    let socket = scratch.shown("socket");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    assert!(!weir(&["cp", &socket, &stored]).status.success());
    assert_eq!(done(&["cat", &stored]), "old");
    drop(listener);
    // What is complete takes its place, large or small, and leaves nothing beside it.
    for content in [vec![1; 5 << 20], vec![2; 10]] {
        done(&["cp", &scratch.file("new", &content), &stored]);
        assert_eq!(weir(&["cat", &stored]).stdout, content);
        assert_eq!(done(&["ls", &scratch.at("/")]), "file\n");
    }
    assert_eq!(weir(&["fsck", &scratch.volume]).status.code(), Some(0));
}

#[test]
fn a_copy_into_a_volume_that_is_interrupted_leaves_the_old_file_or_the_new_one() {
    let scratch = Scratch::new("192M");
    let old = vec![0x0d; 1 << 20];
    let new = vec![0xab; 64 << 20];
    let stored = scratch.stored("/file", &old);
    let source = scratch.file("new", &new);
    let written = || fs::metadata(&scratch.volume).unwrap().blocks() * 512;
    for more_bytes in [0, 1 << 20, 16 << 20, 60 << 20] {
        let before = written();
        let mut child = Command::new(env!("CARGO_BIN_EXE_weir"))
            .args(["cp", &source, &stored])
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Killed when it has written so much, unless it is done by then.
        while written() < before + more_bytes && child.try_wait().unwrap().is_none() {
            std::thread::yield_now();
        }
        let _ = child.kill();
        child.wait().unwrap();
        let left = weir(&["cat", &stored]).stdout;
        assert!(left == old || left == new, "{} bytes", left.len());
        assert_eq!(done(&["ls", &scratch.at("/")]), "file\n");
        if left == new {
            done(&["cp", &scratch.file("old", &old), &stored]);
        }
    }
}

#[test]
fn a_fifo_or_device_that_is_named_is_read_and_in_a_tree_is_copied() {
    let scratch = Scratch::new("8M");
    done(&["cp", "/dev/null", &scratch.at("/nothing")]);
    assert!(done(&["ls", "-l", &scratch.at("/nothing")]).starts_with('-'));
    let mut child = Command::new(env!("CARGO_BIN_EXE_weir"))
        .args(["cp", "/dev/stdin", &scratch.at("/from-a-pipe")])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let text = "through the pipe\n".repeat(10_000);
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(done(&["cat", &scratch.at("/from-a-pipe")]), text);
    fs::create_dir(scratch.path("tree")).unwrap();
    let fifo = scratch.shown("tree/fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    done(&["cp", "-r", &scratch.shown("tree"), &scratch.at("/")]);
    assert!(done(&["ls", "-l", &scratch.at("/tree")]).starts_with('p'));
}

#[test]
fn what_has_no_size_until_it_is_read_is_copied_to_its_end() {
    let scratch = Scratch::new("8M");
    done(&["cp", "/proc/version", &scratch.at("/")]);
    assert_eq!(
        done(&["cat", &scratch.at("/version")]),
        fs::read_to_string("/proc/version").unwrap()
    );
}

#[test]
fn a_volume_is_never_the_destination_itself() {
    let scratch = Scratch::new("8M");
    let other = Scratch::new("8M");
    let stored = scratch.stored("/file", "kept");
    symlink(&scratch.volume, scratch.path("link")).unwrap();
    fs::hard_link(&scratch.volume, scratch.path("again")).unwrap();
    let before = fs::read(&scratch.volume).unwrap();
    for destination in [
        scratch.volume.clone(),
        scratch.shown("link"),
        scratch.shown("again"),
        other.volume.clone(),
    ] {
        let said = refused(1, &["cp", &stored, &destination]);
        assert!(said.contains(&format!("did you mean {destination}:/")), "{said}");
    }
    // Below a directory, too, whatever is to come in its place.
    let named = scratch.stored("/v", "not a volume");
    let dir = scratch.dir.path().to_str().unwrap();
    refused(1, &["cp", &named, dir]);
    refused(1, &["cp", "-r", &scratch.at("/."), dir]);
    for path in [&scratch.volume, &other.volume] {
        assert_eq!(weir(&["fsck", path]).status.code(), Some(0));
    }
    assert!(before.len() as u64 == Path::new(&scratch.volume).metadata().unwrap().len());
    assert_eq!(done(&["cat", &stored]), "kept");
}

#[test]
fn a_volume_is_not_copied_into_itself() {
    let scratch = Scratch::new("8M");
    let said = refused(1, &["cp", &scratch.volume, &scratch.at("/")]);
    assert!(said.contains("did you mean"), "{said}");
    // In a tree it is left out, with a word.
    scratch.file("beside", "beside");
    let output = weir(&["cp", "-r", scratch.dir.path().to_str().unwrap(), &scratch.at("/tree")]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("is the volume that it would be copied into"), "{said}");
    assert_eq!(done(&["ls", &scratch.at("/tree")]), "beside\n");
}

#[test]
fn a_file_that_is_locked_is_not_overwritten() {
    let scratch = Scratch::new("8M");
    let stored = scratch.stored("/file", "new");
    let target = scratch.file("target", "old");
    let locked = File::open(&target).unwrap();
    locked.lock().unwrap();
    let said = refused(1, &["cp", &stored, &target]);
    assert!(said.contains("locked"), "{said}");
    assert_eq!(fs::read(&target).unwrap(), b"old");
    drop(locked);
    done(&["cp", &stored, &target]);
    assert_eq!(fs::read(&target).unwrap(), b"new");
}

#[test]
fn a_mounted_volume_survives_a_destination_without_its_slash() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    let scratch = Scratch::new("8M");
    let stored = scratch.stored("/file", "kept");
    let said = refused(1, &["cp", &stored, &bench.volume()]);
    assert!(said.contains(&format!("mounted at {}", bench.dir())), "{said}");
    fs::write(bench.at("still"), "there").unwrap();
    bench.unmount();
    assert_eq!(done(&["cat", &format!("{}:/still", bench.volume())]), "there");
}

#[test]
fn devices_and_fifos_are_written_through() {
    let scratch = Scratch::new("8M");
    let stored = scratch.stored("/file", "through\n");
    let fifo = scratch.shown("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    // Open for both, so that neither side waits for the other.
    let mut reader = File::options().read(true).write(true).open(&fifo).unwrap();
    done(&["cp", &stored, &fifo]);
    assert!(Path::new(&fifo).symlink_metadata().unwrap().file_type().is_fifo());
    let mut through = [0; 8];
    reader.read_exact(&mut through).unwrap();
    assert_eq!(&through, b"through\n");
    // A node of our own: the machine's is not at stake.
    let null = scratch.shown("null");
    let made = Command::new("mknod").args([&null, "c", "1", "3"]).status().unwrap().success();
    if !made {
        eprintln!("skipped: making a device node needs root");
        return;
    }
    done(&["cp", &stored, &null]);
    assert!(Path::new(&null).symlink_metadata().unwrap().file_type().is_char_device());
}

#[test]
fn standard_output_can_be_a_destination_and_holes_come_out_as_zeros() {
    let scratch = Scratch::new("8M");
    let sparse = scratch.shown("sparse");
    File::create(&sparse).unwrap().set_len(300_000).unwrap();
    fs::copy(&sparse, scratch.path("expected")).unwrap();
    done(&["cp", &sparse, &scratch.at("/")]);
    assert_eq!(done(&["cp", &scratch.at("/sparse"), "/proc/self/fd/1"]).len(), 300_000);
}

#[test]
fn what_a_link_leads_to_is_written_and_the_link_stays() {
    let scratch = Scratch::new("8M");
    let stored = scratch.stored("/file", "new");
    let real = scratch.file("real", "old");
    let link = scratch.shown("link");
    symlink("real", &link).unwrap();
    done(&["cp", &stored, &link]);
    assert_eq!(fs::read(&real).unwrap(), b"new");
    assert_eq!(fs::read_link(&link).unwrap(), Path::new("real"));
    symlink("nowhere", scratch.path("dangling")).unwrap();
    let said = refused(1, &["cp", &stored, &scratch.shown("dangling")]);
    assert!(said.contains("leads nowhere"), "{said}");
}

#[test]
fn nothing_is_written_through_a_link_that_the_same_copy_made() {
    let scratch = Scratch::new("8M");
    let precious = scratch.file("precious", "precious");
    fs::create_dir_all(scratch.path("one")).unwrap();
    fs::create_dir_all(scratch.path("two")).unwrap();
    symlink(&precious, scratch.path("one/name")).unwrap();
    scratch.file("two/name", "overwritten");
    done(&["cp", "-r", &scratch.shown("one"), &scratch.shown("two"), &scratch.at("/")]);
    fs::create_dir(scratch.path("out")).unwrap();
    let names = [scratch.at("/one/name"), scratch.at("/two/name")];
    let said = refused(1, &["cp", "-r", &names[0], &names[1], &scratch.shown("out")]);
    assert!(said.contains("has just made"), "{said}");
    assert_eq!(fs::read(&precious).unwrap(), b"precious");
}

#[test]
fn a_volume_is_not_taken_away_for_a_link_or_a_fifo_either() {
    let scratch = Scratch::new("8M");
    fs::create_dir_all(scratch.path("tree/out")).unwrap();
    symlink("nowhere", scratch.path("tree/out/v")).unwrap();
    done(&["cp", "-r", &scratch.shown("tree"), &scratch.at("/")]);
    let other = Scratch::new("8M");
    fs::create_dir(scratch.path("out")).unwrap();
    let kept = scratch.path("out/v");
    fs::copy(&other.volume, &kept).unwrap();
    let said = refused(1, &["cp", "-r", &scratch.at("/tree/out"), &scratch.shown("")]);
    assert!(said.contains("a Weir volume"), "{said}");
    assert!(fs::read(&kept).unwrap() == fs::read(&other.volume).unwrap());
}

/// Whose copy it is cannot be said by who may not give files away: then nobody is to run it for somebody else.
#[test]
fn who_cannot_give_a_copy_its_owner_does_not_make_it_set_user_id() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let scratch = Scratch::new("8M");
    let program = scratch.file("program", "#!/bin/sh");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o6755)).unwrap();
    done(&["cp", "-r", &program, &scratch.at("/")]);
    fs::set_permissions(scratch.dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    fs::set_permissions(&scratch.volume, fs::Permissions::from_mode(0o644)).unwrap();
    let copied = |uid: u32, name: &str| {
        let place = scratch.at("/program");
        let mut copy = Command::new("setpriv");
        copy.args([&format!("--reuid={uid}"), &format!("--regid={uid}"), "--clear-groups"]);
        copy.args([env!("CARGO_BIN_EXE_weir"), "cp", "-r", &place, &scratch.shown(name)]);
        let output = copy.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        mode(&scratch.path(name))
    };
    assert_eq!(copied(0, "same"), 0o6755);
    assert_eq!(copied(65534, "other"), 0o755);
}

#[test]
fn a_file_that_is_replaced_keeps_its_mode_and_with_r_gets_the_copied_one() {
    let scratch = Scratch::new("8M");
    let source = scratch.file("source", "new");
    fs::set_permissions(&source, fs::Permissions::from_mode(0o755)).unwrap();
    done(&["cp", &source, &scratch.at("/file")]);
    let target = scratch.file("target", "old and longer");
    fs::set_permissions(&target, fs::Permissions::from_mode(0o600)).unwrap();
    done(&["cp", &scratch.at("/file"), &target]);
    assert_eq!((fs::read(&target).unwrap(), mode(Path::new(&target))), (b"new".to_vec(), 0o600));
    done(&["cp", "-r", &scratch.at("/file"), &target]);
    assert_eq!(mode(Path::new(&target)), 0o755);
    done(&["cp", &scratch.at("/file"), &scratch.shown("fresh")]);
    assert_eq!(mode(&scratch.path("fresh")), 0o755);
}

#[test]
fn a_copy_that_is_cut_off_leaves_the_old_file_and_is_not_counted() {
    let scratch = Scratch::new("16M");
    let stored = scratch.stored("/file", vec![0xab; 5 << 20]);
    scratch.damage(0xab);
    fs::create_dir(scratch.path("out")).unwrap();
    let target = scratch.file("out/file", "old");
    let output = weir(&["cp", &stored, &target]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("0 files copied, 1 not or not completely"), "{said}");
    assert_eq!(fs::read(&target).unwrap(), b"old");
    let left = fs::read_dir(scratch.path("out")).unwrap().count();
    assert_eq!(left, 1, "nothing else is left behind");
    // A new file ends where it could not be read on, and does not look whole.
    let fresh = scratch.path("out/fresh");
    weir(&["cp", &stored, fresh.to_str().unwrap()]);
    assert!(fresh.metadata().unwrap().len() < 5 << 20);
}

#[test]
fn a_copy_that_is_interrupted_leaves_the_old_file_or_the_new_one_and_nothing_else() {
    let scratch = Scratch::new("96M");
    let new = vec![0xab; 64 << 20];
    let stored = scratch.stored("/file", &new);
    fs::create_dir(scratch.path("out")).unwrap();
    let target = scratch.file("out/file", "old");
    let names = || fs::read_dir(scratch.path("out")).unwrap().count();
    for _ in 0..3 {
        let mut child = Command::new(env!("CARGO_BIN_EXE_weir"))
            .args(["cp", &stored, &target])
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Interrupted when it has begun to write, unless it is done by then.
        while names() < 2 && child.try_wait().unwrap().is_none() {
            std::thread::yield_now();
        }
        let pid = rustix::process::Pid::from_child(&child);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        child.wait().unwrap();
        let left = fs::read(&target).unwrap();
        assert!(left == b"old" || left == new, "{} bytes", left.len());
        assert_eq!(names(), 1, "nothing else is left behind");
    }
}

#[test]
fn what_a_copy_cut_off_leaves_is_for_its_owner_alone() {
    let scratch = Scratch::new("8M");
    fs::create_dir(scratch.path("secret")).unwrap();
    scratch.file("secret/letter", vec![1; 1 << 20]);
    done(&["cp", "-r", &scratch.shown("secret"), &scratch.at("/")]);
    // Ended by the signal that comes with the first byte beyond the limit.
    let (from, to) = (scratch.at("/secret"), scratch.shown("out"));
    let script = "ulimit -f 8; umask 0; exec \"$0\" cp -r \"$1\" \"$2\"";
    let program = env!("CARGO_BIN_EXE_weir");
    let ended = Command::new("sh").args(["-c", script, program, &from, &to]).output().unwrap();
    assert!(!ended.status.success());
    assert_eq!(mode(&scratch.path("out")), 0o700);
    assert_eq!(mode(&scratch.path("out/letter")), 0o600);
}

#[test]
fn several_sources_need_a_directory_and_without_it_nothing_is_copied() {
    let scratch = Scratch::new("8M");
    let (one, two) = (scratch.file("one", "1"), scratch.file("two", "2"));
    let said = refused(1, &["cp", &one, &two, &scratch.at("/target")]);
    assert!(said.contains("several sources") && said.contains("weir mkdir"), "{said}");
    assert_eq!(done(&["ls", &scratch.at("/")]), "");
    done(&["cp", &one, &two, &scratch.at("/")]);
    let stored = [scratch.at("/one"), scratch.at("/two")];
    let said = refused(1, &["cp", &stored[0], &stored[1], &scratch.shown("target")]);
    assert!(said.contains("several sources") && said.contains("mkdir"), "{said}");
    assert!(!scratch.path("target").exists());
    // Nor when one of them is not where it should be.
    fs::create_dir(scratch.path("out")).unwrap();
    refused(1, &["cp", &stored[0], &two, &scratch.shown("out")]);
    assert!(!scratch.path("out/one").exists());
}

#[test]
fn a_link_that_is_named_is_followed_and_below_r_is_copied() {
    let scratch = Scratch::new("8M");
    fs::create_dir(scratch.path("tree")).unwrap();
    scratch.file("real", "behind the link");
    symlink("../real", scratch.path("tree/link")).unwrap();
    done(&["cp", &scratch.shown("tree/link"), &scratch.at("/")]);
    assert_eq!(done(&["cat", &scratch.at("/link")]), "behind the link");
    assert!(done(&["ls", "-l", &scratch.at("/")]).starts_with('-'));
    done(&["cp", "-r", &scratch.shown("tree"), &scratch.at("/")]);
    assert!(done(&["ls", "-l", &scratch.at("/tree")]).contains("link -> ../real"));
    // And on the way out: there the link leads to what is beside the tree in the volume.
    scratch.stored("/real", "in the volume");
    done(&["cp", &scratch.at("/tree/link"), &scratch.shown("out")]);
    assert_eq!(fs::read(scratch.path("out")).unwrap(), b"in the volume");
    assert!(!scratch.path("out").symlink_metadata().unwrap().is_symlink());
    done(&["cp", "-r", &scratch.at("/tree/link"), &scratch.shown("kept")]);
    assert_eq!(fs::read_link(scratch.path("kept")).unwrap(), Path::new("../real"));
}

#[test]
fn attributes_that_the_other_side_does_not_take_are_left_out_with_a_word_and_an_exit_code() {
    let scratch = Scratch::new("8M");
    let left_out = |arguments: &[&str], name: &str| {
        let output = weir(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(&format!("attribute {name}: ")), "{said}");
        assert!(said.contains("1 file copied, 1 not or not completely: see above"), "{said}");
    };
    let stored = scratch.stored("/f", "out of the volume");
    let options = weir::VolumeOptions::default();
    let volume = weir::Volume::open(Path::new(&scratch.volume), options).unwrap();
    let ino = volume.metadata("/f").unwrap().ino;
    // What is no list is none to any file system of the host.
    let list = "system.posix_acl_access";
    volume.setxattr(ino, list.as_bytes(), b"no list", weir::XattrMode::Set).unwrap();
    volume.close().unwrap();
    drop(volume);
    left_out(&["cp", "-r", &stored, &scratch.shown("out")], list);
    assert_eq!(fs::read(scratch.path("out")).unwrap(), b"out of the volume");
    // In memory there may be more of an attribute than a volume takes.
    let Ok(memory) = tempfile::tempdir_in("/dev/shm") else { return };
    let path = memory.path().join("big");
    fs::write(&path, "into the volume").unwrap();
    let big =
        rustix::fs::setxattr(&path, "trusted.big", &[1; 5000], rustix::fs::XattrFlags::empty());
    if let Err(error) = big {
        eprintln!("skipped: no file here has such an attribute: {error}");
        return;
    }
    left_out(&["cp", path.to_str().unwrap(), &scratch.at("/big")], "trusted.big");
    assert_eq!(done(&["cat", &scratch.at("/big")]), "into the volume");
}
