//! What is said when something is wrong: one line with the right remedy, and the right exit code.
#![allow(missing_docs)]

mod common;

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{Bench, Loop, done, eventually, refused, weir};
use tempfile::TempDir;

struct Scratch {
    dir: TempDir,
}

impl Scratch {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
    fn shown(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }
    fn volume(&self) -> String {
        let volume = self.shown("v");
        done(&["create", &volume, "--size", "8M"]);
        volume
    }
}

#[test]
fn a_volume_on_a_device_has_the_size_of_the_device() {
    let scratch = Scratch::new();
    let file = scratch.shown("disk");
    File::create(&file).unwrap().set_len(24 << 20).unwrap();
    let Some(device) = Loop::new(&file, &[]) else { return };
    let printed = done(&["create", &device.0]);
    assert!(printed.contains("a volume of 24.0 MiB"), "{printed}");
}

#[test]
fn a_device_whose_sectors_are_larger_than_a_block_is_refused_for_that() {
    let scratch = Scratch::new();
    let file = scratch.shown("disk");
    File::create(&file).unwrap().set_len(24 << 20).unwrap();
    let Some(device) = Loop::new(&file, &["-b", "8192"]) else { return };
    for command in [&["create", "--force", &device.0][..], &["info", &device.0]] {
        let told = refused(1, command);
        assert!(told.contains("sectors of more than 4096 bytes"), "{told}");
    }
}

#[test]
fn a_device_with_something_at_its_end_is_not_overwritten_without_force() {
    let scratch = Scratch::new();
    let file = scratch.shown("disk");
    let image = File::create(&file).unwrap();
    image.set_len(24 << 20).unwrap();
    image.write_all_at(b"EFI PART", (24 << 20) - 512).unwrap();
    let Some(device) = Loop::new(&file, &[]) else { return };
    let said = refused(1, &["create", &device.0]);
    assert!(said.contains("--force"), "{said}");
    let mut mark = [0; 8];
    File::open(&file).unwrap().read_exact_at(&mut mark, (24 << 20) - 512).unwrap();
    assert_eq!(&mark, b"EFI PART");
}

#[test]
fn a_write_protected_device_is_named_as_that_when_it_is_opened() {
    let scratch = Scratch::new();
    let volume = scratch.volume();
    let Some(device) = Loop::new(&volume, &["-r"]) else { return };
    for arguments in [
        vec!["mkdir".to_owned(), format!("{}:/x", device.0)],
        vec!["create".to_owned(), "--force".to_owned(), device.0.clone()],
    ] {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let said = refused(1, &arguments);
        assert!(said.contains("write-protected"), "{said}");
    }
    assert_eq!(done(&["ls", &format!("{}:/", device.0)]), "");
}

#[test]
fn a_check_whose_report_nobody_gets_did_not_correct_anything() {
    let scratch = Scratch::new();
    let volume = scratch.volume();
    for options in [vec![], vec!["--json"]] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_weir"))
            .arg("fsck")
            .args(options)
            .arg(&volume)
            .stdout(full)
            .stderr(Stdio::piped())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(8));
    }
}

#[test]
fn names_that_are_no_text_can_be_listed_read_and_removed() {
    let scratch = Scratch::new();
    let volume = scratch.volume();
    let name = OsStr::from_bytes(b"no\xfftext");
    fs::write(scratch.path("").join(name), "content").unwrap();
    let at = |path: &OsStr| {
        let mut place = OsString::from(format!("{volume}:/"));
        place.push(path);
        place
    };
    let run = |arguments: &[&OsStr]| {
        let output = Command::new(env!("CARGO_BIN_EXE_weir")).args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{arguments:?}: {said}");
        output.stdout
    };
    let source = scratch.path("").join(name);
    run(&["cp".as_ref(), source.as_ref(), at("".as_ref()).as_ref()]);
    assert_eq!(run(&["cat".as_ref(), &at(name)]), b"content");
    assert_eq!(run(&["ls".as_ref(), &at(name)]), b"no\xfftext\n");
    run(&["rm".as_ref(), &at(name)]);
    run(&["mkdir".as_ref(), &at(name)]);
    assert_eq!(run(&["ls".as_ref(), &at("".as_ref())]), b"no\xfftext\n");
}

#[test]
fn a_path_that_leads_nowhere_is_not_blamed_on_the_device() {
    let scratch = Scratch::new();
    fs::write(scratch.path("text"), "text").unwrap();
    symlink("circle", scratch.path("circle")).unwrap();
    let long = "x".repeat(300);
    for (name, hint) in [("text/x", "not a directory"), ("circle", "circle"), (&long, "too long")] {
        for command in ["info", "dump"] {
            let said = refused(1, &[command, &scratch.shown(name)]);
            assert!(said.contains(hint) && !said.contains("dmesg"), "{said}");
        }
    }
    let said = refused(1, &["stat", &scratch.shown("nope")]);
    assert!(said.contains("no such file") && !said.contains("weir create"), "{said}");
    let said = refused(1, &["create", "/proc/weir-test", "--size", "8M"]);
    assert!(!said.contains("weir create"), "{said}");
}

#[test]
fn what_is_mounted_is_not_created_again_and_a_file_of_a_mount_is_no_volume() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    let volume = bench.volume();
    for options in [vec![], vec!["--force"]] {
        let arguments = [vec!["create", &volume, "--size", "8M"], options].concat();
        let said = refused(1, &arguments);
        assert!(said.contains(&format!("mounted at {}", bench.dir())), "{said}");
        assert!(!said.contains("--force"), "{said}");
    }
    fs::write(bench.at("file"), "content").unwrap();
    let said = refused(1, &["stat", bench.at("file").to_str().unwrap()]);
    assert!(said.contains(&format!("weir stat {}", bench.dir())), "{said}");
    let said = refused(1, &["stat", bench.at("nope").to_str().unwrap()]);
    assert!(said.contains("no such file") && !said.contains("weir create"), "{said}");
    for arguments in [
        vec!["info".to_owned(), bench.dir()],
        vec!["ls".to_owned(), format!("{}:/", bench.dir())],
        vec!["cp".to_owned(), "/dev/null".to_owned(), format!("{}:/x", bench.dir())],
    ] {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let said = refused(1, &arguments);
        assert!(said.contains(&format!("a mount of {volume}")), "{said}");
    }
    let said = refused(1, &["sync", "/dev/null"]);
    assert!(said.contains("not on a Weir mount"), "{said}");
    bench.unmount();
}

#[test]
fn a_mount_whose_server_is_gone_says_how_to_take_it_off() {
    let Some(bench) = Bench::new() else { return };
    let server = bench.foreground();
    server.signal(9);
    server.end();
    for path in [bench.dir(), bench.at("file").to_str().unwrap().to_owned()] {
        for command in ["stat", "sync"] {
            let said = refused(1, &[command, &path]);
            assert!(said.contains(&format!("weir umount {}", bench.dir())), "{said}");
        }
    }
}

#[test]
fn wrong_usage_has_its_own_code_in_the_lab_too() {
    let lab = |arguments: &[&str]| {
        let output = weir(&[&["lab"], arguments].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        said
    };
    assert!(lab(&["fsync", "--on", "foo"]).contains("hollow-mount or raw"));
    lab(&["fsync", "--on", "weir", "--disk", "foo"]);
    assert!(lab(&["check"]).contains("weir lab check --help"));
}

#[test]
fn a_size_that_is_almost_enough_is_shown_exactly() {
    let scratch = Scratch::new();
    let said = refused(2, &["create", &scratch.shown("v"), "--size", "1023K"]);
    assert!(said.contains("1047552 bytes") && said.contains("1048576 (1.00 MiB)"), "{said}");
}

#[test]
fn a_link_that_leads_nowhere_is_listed_as_the_link() {
    let scratch = Scratch::new();
    let volume = scratch.volume();
    symlink("nowhere", scratch.path("link")).unwrap();
    done(&["cp", "-r", &scratch.shown("link"), &format!("{volume}:/")]);
    let listed = done(&["ls", "-l", &format!("{volume}:/link")]);
    assert!(listed.starts_with('l') && listed.ends_with("link -> nowhere\n"), "{listed}");
    refused(1, &["ls", &format!("{volume}:/link/")]);
}

#[test]
fn a_volume_that_was_not_closed_is_called_that_by_info_and_fsck_alike() {
    let scratch = Scratch::new();
    let volume = scratch.volume();
    let open = weir::Volume::open(Path::new(&volume), weir::VolumeOptions::default()).unwrap();
    let left = scratch.shown("left");
    fs::copy(&volume, &left).unwrap();
    open.close().unwrap();
    let info = done(&["info", &left]);
    assert!(info.contains("not closed"), "{info}");
    let checked = weir(&["fsck", "-n", &left]);
    let printed = String::from_utf8(checked.stdout).unwrap();
    assert!(printed.contains("not closed but nothing to replay"), "{printed}");
    assert_eq!(checked.status.code(), Some(0));
}

#[test]
fn a_check_that_is_to_change_nothing_leaves_the_log_as_it_is_and_one_that_may_replays_it() {
    let scratch = Scratch::new();
    let volume = scratch.volume();
    let open = weir::Volume::open(Path::new(&volume), weir::VolumeOptions::default()).unwrap();
    open.create_dir("/dir", 0o755).unwrap();
    open.sync().unwrap();
    let left = scratch.shown("left");
    fs::copy(&volume, &left).unwrap();
    open.close().unwrap();
    let before = fs::read(&left).unwrap();
    for options in [&["-n"][..], &["--dry-run", "--json"]] {
        let checked = weir(&[&["fsck"][..], options, &[&left]].concat());
        assert_eq!(checked.status.code(), Some(0), "{options:?}");
        assert!(fs::read(&left).unwrap() == before, "{options:?} has written");
    }
    assert_eq!(weir(&["fsck", &left]).status.code(), Some(1));
    assert!(fs::read(&left).unwrap() != before);
    assert_eq!(weir(&["fsck", &left]).status.code(), Some(0));
}

#[test]
fn a_mount_refuses_sizes_that_would_have_no_effect() {
    let scratch = Scratch::new();
    let volume = scratch.volume();
    let dir = scratch.shown("");
    for (options, hint) in [
        (["--size", "128M"], "--create"),
        (["--label", "mine"], "--create"),
        (["--memory", "1"], "256 KiB"),
    ] {
        let said = refused(2, &[&["mount", &volume, &dir], &options[..]].concat());
        assert!(said.contains(hint), "{said}");
    }
}

#[test]
fn a_mount_is_taken_off_by_the_name_of_its_volume_too() {
    let Some(bench) = Bench::mounted(&["-o", "nofail,x-systemd.automount"]) else { return };
    // Busy while a program that another test has forked has our files open.
    eventually("unmounted", || weir(&["umount", &bench.volume()]).status.success());
    assert!(!bench.is_mounted());
    let said = refused(1, &["umount", &bench.volume()]);
    assert!(said.contains("not mounted"), "{said}");
}

#[test]
fn the_help_of_mount_options_keeps_its_columns() {
    let help = done(&["mount", "--help"]);
    let lines: Vec<&str> = help.lines().collect();
    let begin = lines.iter().position(|line| line.contains("Options for -o")).unwrap();
    let end = lines.iter().position(|line| line.starts_with("Examples:")).unwrap();
    for line in lines[begin + 1..end].iter().filter(|line| !line.is_empty()) {
        let indent = line.len() - line.trim_start().len();
        assert!(indent == 2 || indent == 29, "{line}");
        // What is at the left are options, which no sentence goes on with.
        let first = line.trim_start().chars().next().unwrap();
        assert!(indent == 29 || first.is_ascii_lowercase(), "{line}");
    }
    for listed in ["async", "nowriteback_cache", " direct_new", "nofail"] {
        assert!(help.contains(listed), "{listed}");
    }
}

/// `weir` with a limit of the shell's on something.
fn limited(limit: &str, arguments: &[&str]) -> (Option<i32>, String) {
    let script = format!("ulimit {limit} && exec \"$0\" \"$@\"");
    let mut command = Command::new("sh");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_weir")]).args(arguments);
    let output = command.stdin(Stdio::null()).output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// A write behind the limit would end the process without a word (SIGXFSZ).
#[test]
fn a_volume_that_is_larger_than_files_may_be_is_refused_and_the_limit_is_named() {
    let scratch = Scratch::new();
    let volume = scratch.volume();
    let new = scratch.shown("new");
    for arguments in [
        &["create", &new, "--size", "8M"][..],
        &["create", &volume, "--size", "9M", "--force"],
        &["mkdir", &format!("{volume}:/d")],
    ] {
        let (code, said) = limited("-f 1000", arguments);
        assert_eq!(code, Some(1), "{arguments:?}: {said}");
        assert!(said.contains("ulimit -f"), "{arguments:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    assert!(!Path::new(&new).exists());
    // Nothing is written.
    assert_eq!(limited("-f 1000", &["ls", &format!("{volume}:/")]), (Some(0), String::new()));
    assert_eq!(fs::metadata(&volume).unwrap().len(), 8 << 20);
    done(&["mkdir", &format!("{volume}:/d")]);
}

#[test]
fn a_volume_that_cannot_be_made_or_opened_for_want_of_descriptors_names_that_limit() {
    let scratch = Scratch::new();
    let (volume, new) = (scratch.volume(), scratch.shown("new"));
    let mut refusals = 0;
    for descriptors in 4..20 {
        let limit = format!("-n {descriptors}");
        for arguments in
            [&["mkdir", "-p", &format!("{volume}:/d")][..], &["create", &new, "--size", "8M"]]
        {
            let (code, said) = limited(&limit, arguments);
            // What fails before is the command's own, and says so without a word of the device.
            assert!(!said.contains("dmesg"), "{said}");
            refusals += usize::from(code == Some(1) && said.contains("ulimit -n"));
            assert_eq!(Path::new(&new).exists(), code == Some(0) && arguments[0] == "create");
            let _ = fs::remove_file(&new);
        }
    }
    assert!(refusals > 0);
}

#[test]
fn a_mount_that_fails_for_want_of_descriptors_names_that_limit_and_no_other_remedy() {
    let Some(bench) = Bench::new() else { return };
    let volume = bench.volume();
    let mut refusals = 0;
    for descriptors in 5..40 {
        let arguments = ["mount", &volume, &bench.dir(), "--background"];
        let (code, said) = limited(&format!("-n {descriptors}"), &arguments);
        if code == Some(0) {
            bench.unmount();
            continue;
        }
        refusals += 1;
        assert!(said.contains("ulimit -n"), "{descriptors}: {said}");
        assert!(!said.contains("root") && !said.contains("weir: weir"), "{descriptors}: {said}");
    }
    assert!(refusals > 0);
}

/// Root may do everything else.
#[test]
fn a_volume_that_is_marked_as_not_to_be_changed_is_refused_with_the_way_to_change_that() {
    let scratch = Scratch::new();
    let volume = scratch.volume();
    for mark in ["i", "a"] {
        let chattr = |sign: &str| {
            let marked = Command::new("chattr").arg(format!("{sign}{mark}")).arg(&volume).output();
            marked.is_ok_and(|output| output.status.success())
        };
        if !chattr("+") {
            eprintln!("skipped: chattr +{mark} needs root, and a file system that has it");
            return;
        }
        let inside = format!("{volume}:/d");
        let create = ["create", &volume, "--size", "8M", "--force"];
        let outputs = [&["mkdir", &inside][..], &create].map(weir);
        assert!(chattr("-"));
        for output in outputs {
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{said}");
            assert!(said.contains("chattr -i -a") && !said.contains("root"), "{said}");
        }
    }
    done(&["mkdir", &format!("{volume}:/d")]);
}

/// Two that write one volume destroy it; each has a lock on something else, unless they agree.
#[test]
fn a_volume_is_in_use_also_by_way_of_a_loop_device() {
    let Some(bench) = Bench::new() else { return };
    let volume = bench.volume();
    let Some(device) = Loop::new(&volume, &[]) else { return };
    let read_only = ["mount", "-o", "ro"];
    for (mounted, other) in [(&volume, &device.0), (&device.0, &volume)] {
        for how in [&read_only[..1], &read_only[..]] {
            done(&[how, &[mounted.as_str(), &bench.dir(), "--background"][..]].concat());
            let writes = format!("{other}:/d");
            let said = refused(1, &["mkdir", &writes]);
            assert!(said.contains("in use"), "{said}");
            let reads = weir(&["ls", &format!("{other}:/")]).status.success();
            assert_eq!(reads, how.len() > 1, "those that only read are in nobody's way");
            bench.unmount();
        }
    }
    // Parts of a file are volumes of their own.
    let parts = bench.dir.path().join("parts").to_str().unwrap().to_owned();
    File::create(&parts).unwrap().set_len(32 << 20).unwrap();
    let part = |offset: &str| Loop::new(&parts, &["-o", offset, "--sizelimit", "16M"]);
    let (Some(first), Some(second)) = (part("4096"), part("16M")) else { return };
    done(&["create", &first.0, "--size", "8M"]);
    done(&["create", &second.0, "--size", "8M"]);
    done(&["mount", &first.0, &bench.dir(), "--background"]);
    done(&["mkdir", &format!("{}:/d", second.0)]);
    bench.unmount();
}

#[test]
fn a_small_file_that_is_no_volume_is_not_to_be_made_one() {
    let scratch = Scratch::new();
    let notes = scratch.shown("notes");
    fs::write(&notes, "not to be lost").unwrap();
    let said = refused(8, &["fsck", &notes]);
    assert!(said.contains("check the path") && !said.contains("weir create"), "{said}");
}

#[test]
fn a_copy_without_a_destination_says_so_once() {
    for arguments in [&["cp"][..], &["cp", "f"]] {
        let said = refused(2, arguments);
        assert!(said.contains("see weir cp --help"), "{said}");
        assert!(said.matches("SRC").count() <= 1, "{said}");
    }
}
