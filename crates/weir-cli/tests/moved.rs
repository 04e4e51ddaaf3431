//! A volume is known by what its server has open, whatever it was called when it was mounted, and a mount by a name of any bytes.
#![allow(missing_docs)]

mod common;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use common::{Bench, Loop, done, eventually, refused, weir, weir_of_bytes};

/// A name beside the volume of a bench.
fn beside(bench: &Bench, name: &str) -> String {
    bench.dir.path().join(name).to_str().unwrap().to_owned()
}

/// A bench whose mounted volume has got another name, and that name.
fn moved() -> Option<(Bench, String)> {
    let bench = Bench::mounted(&[])?;
    let moved = beside(&bench, "moved");
    fs::rename(bench.volume(), &moved).unwrap();
    Some((bench, moved))
}

#[test]
fn a_volume_that_was_renamed_while_it_is_mounted_is_in_use_at_its_mount() {
    let Some((bench, moved)) = moved() else { return };
    let mounted_at = format!("mounted at {}", bench.dir());
    let info = done(&["info", &moved]);
    assert!(info.contains(&mounted_at) && info.contains("flushes"), "{info}");
    let stat = done(&["stat", "--json", &moved]);
    assert!(stat.contains("\"durability\""), "{stat}");
    let other = tempfile::tempdir().unwrap();
    let inside = format!("{moved}:/x");
    for arguments in [
        &["mount", &moved, other.path().to_str().unwrap()][..],
        &["create", &moved, "--size", "8M", "--force"],
        &["mkdir", &inside],
        &["dump", &moved],
        &["sync", &moved],
        &["barrier", &moved],
    ] {
        let said = refused(1, arguments);
        assert!(said.contains(&mounted_at), "{said}");
    }
    let said = refused(8, &["fsck", &moved]);
    assert!(said.contains(&mounted_at), "{said}");
    let said = refused(1, &["info", &bench.dir()]);
    assert!(said.contains(&format!("a mount of {moved}:")), "{said}");
    bench.unmount();
}

#[test]
fn a_volume_that_was_renamed_is_unmounted_by_its_new_name_and_waited_for() {
    let Some((bench, moved)) = moved() else { return };
    fs::write(bench.at("f"), "kept").unwrap();
    // Busy while a program that another test has forked has our files open.
    eventually("unmounted", || weir(&["umount", &moved]).status.success());
    assert!(File::open(&moved).unwrap().try_lock().is_ok(), "its server is gone");
    assert!(!bench.is_mounted());
    assert_eq!(done(&["cat", &format!("{moved}:/f")]), "kept");
}

#[test]
fn what_has_got_the_name_of_a_mounted_volume_is_not_mounted() {
    let Some((bench, moved)) = moved() else { return };
    let name = bench.volume();
    done(&["create", &name, "--size", "8M"]);
    let info = done(&["info", &name]);
    assert!(info.contains("clean") && !info.contains("in use"), "{info}");
    done(&["mkdir", &format!("{name}:/d")]);
    let said = refused(1, &["umount", &name]);
    assert!(said.contains("not mounted") && bench.is_mounted(), "{said}");
    // What is waited for is the volume of the mount.
    bench.unmount();
    assert!(File::open(&moved).unwrap().try_lock().is_ok(), "its server is gone");
    assert!(done(&["info", &moved]).contains("clean"));
}

#[test]
fn a_second_name_of_a_mounted_volume_is_in_use_as_well() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    let again = beside(&bench, "again");
    fs::hard_link(bench.volume(), &again).unwrap();
    let said = refused(1, &["create", &again, "--size", "8M", "--force"]);
    assert!(said.contains(&format!("mounted at {}", bench.dir())), "{said}");
    bench.unmount();
}

#[test]
fn a_file_behind_a_loop_device_is_known_by_any_name() {
    let Some(bench) = Bench::new() else { return };
    let Some(device) = Loop::new(&bench.volume(), &[]) else { return };
    let mounted_at = format!("mounted at {}", bench.dir());
    let (volume, moved) = (bench.volume(), beside(&bench, "moved"));
    let device = device.0.clone();
    // Mounted, then from which name to which, and what else there is to name it by.
    for (mounted, from, to, other) in
        [(&device, &volume, &moved, &moved), (&moved, &moved, &volume, &device)]
    {
        done(&["mount", mounted, &bench.dir(), "--background"]);
        fs::rename(from, to).unwrap();
        let said = refused(1, &["mkdir", &format!("{other}:/d")]);
        assert!(said.contains(&mounted_at), "{said}");
        bench.unmount();
    }
}

/// Takes a mount off again.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = weir_mount::mount_point::detach(&self.0, true);
    }
}

#[test]
fn a_mount_point_is_found_whatever_its_name_is() {
    let Some(bench) = Bench::new() else { return };
    let dir = bench.dir.path().join(OsStr::from_bytes(b"m\xff \\ \n\t\x1b[2J"));
    fs::create_dir(&dir).unwrap();
    let (name, volume) = (dir.as_os_str().as_bytes(), bench.volume());
    let run = |arguments: &[&[u8]]| {
        let output = weir_of_bytes(arguments);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        String::from_utf8(output.stdout).unwrap()
    };
    for _ in 0..2 {
        let _mounted = Mounted(dir.clone());
        let printed = run(&[b"mount", volume.as_bytes(), name, b"--background"]);
        assert!(printed.lines().count() == 1 && !printed.contains('\x1b'), "{printed:?}");
        let info = run(&[b"info", volume.as_bytes()]);
        assert!(info.contains("in use: mounted at") && info.contains("flushes"), "{info}");
        assert!(!info.contains('\x1b'), "{info:?}");
        assert!(run(&[b"stat", b"--json", volume.as_bytes()]).contains("\"durability\""));
        run(&[b"sync", name]);
        // By the volume, and by its own name.
        let what = if fs::read_dir(&dir).unwrap().count() == 0 { volume.as_bytes() } else { name };
        fs::write(dir.join("f"), "kept").unwrap();
        eventually("unmounted", || weir_of_bytes(&[b"umount", what]).status.success());
        assert!(!dir.join("f").exists(), "nothing is mounted there");
    }
    assert_eq!(done(&["cat", &format!("{volume}:/f")]), "kept");
}

/// Without this a process of root cannot look into another that has it.
const BLIND: &str = "-sys_ptrace";

#[test]
fn an_unmount_that_cannot_see_the_volume_says_so() {
    let Some(bench) = Bench::new() else { return };
    let server = bench.foreground_with(&["-o", "fsname=data"]);
    fs::write(bench.at("file"), "content").unwrap();
    let mut said = String::new();
    // Busy while a program that another test has forked has our files open.
    eventually("unmounted", || {
        let mut blind = Command::new("setpriv");
        blind.args(["--bounding-set", BLIND, "--inh-caps", BLIND]);
        blind.args([env!("CARGO_BIN_EXE_weir"), "umount", &bench.dir()]);
        let output = blind.stdin(Stdio::null()).output().unwrap();
        said = String::from_utf8_lossy(&output.stderr).into_owned();
        output.status.success()
    });
    assert!(said.contains("data is no volume") && said.lines().count() == 1, "{said}");
    assert_eq!(server.end(), (Some(0), String::new()));
}

#[test]
fn an_unmount_by_another_name_of_the_source_waits_for_the_volume_that_it_sees() {
    let Some(bench) = Bench::new() else { return };
    let server = bench.foreground_with(&["-o", "fsname=data"]);
    let info = done(&["info", &bench.volume()]);
    assert!(info.contains(&format!("mounted at {}", bench.dir())), "{info}");
    let mut said = String::new();
    eventually("unmounted", || {
        let output = weir(&["umount", &bench.dir()]);
        said = String::from_utf8_lossy(&output.stderr).into_owned();
        output.status.success()
    });
    assert_eq!(said, "");
    assert!(File::open(bench.volume()).unwrap().try_lock().is_ok(), "its server is gone");
    assert_eq!(server.end(), (Some(0), String::new()));
}
