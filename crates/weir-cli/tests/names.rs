//! Names may have any bytes in them: what is said of them is one line, which no terminal obeys.
#![allow(missing_docs)]

mod common;

use std::fs;
use std::path::Path;

use common::{Bench, done, weir_of_bytes};
use tempfile::TempDir;

/// Clears the screen, and goes on in a line that looks like ours.
const EVIL: &str = "a\x1b[2J\nweir: all is well\u{9b}31m";
/// The same, as people see it.
const SHOWN: &str = "a\\x1b[2J\\nweir: all is well\\x9b31m";

fn scratch() -> (TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let volume = dir.path().join("v").to_str().unwrap().to_owned();
    done(&["create", &volume, "--size", "8M"]);
    (dir, volume)
}

/// Runs `weir`: its exit code, and what it printed and said, of which no line has anything to obey.
fn run(arguments: &[&str]) -> (Option<i32>, String, String) {
    let arguments: Vec<&[u8]> = arguments.iter().map(|argument| argument.as_bytes()).collect();
    let output = weir_of_bytes(&arguments);
    let texts = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    for text in &texts {
        let obeyed = text.lines().flat_map(str::chars).find(|one| one.is_control());
        assert_eq!(obeyed, None, "{text:?}");
    }
    let [printed, said] = texts;
    (output.status.code(), printed, said)
}

#[test]
fn an_error_is_one_line_whatever_it_is_about() {
    let (dir, volume) = scratch();
    let inside = format!("{volume}:/{EVIL}");
    let outside = dir.path().join(EVIL).to_str().unwrap().to_owned();
    let (to, mount_at) = (format!("{volume}:/"), dir.path().to_str().unwrap().to_owned());
    for arguments in [
        &["cat", &inside][..],
        &["ls", &inside],
        &["stat", &inside],
        &["rm", &inside],
        &["mkdir", &format!("{inside}/b")],
        &["cp", &inside, &mount_at],
        &["cp", &outside, &to],
        &["info", &outside],
        &["stat", &outside],
        &["dump", &outside],
        &["fsck", &outside],
        &["sync", &outside],
        &["umount", &outside],
        &["mount", &outside, &mount_at],
        &["mount", &volume, &outside],
        &["create", &outside],
        &["create", &format!("{outside}/x"), "--size", "8M"],
        &["no-such-command", EVIL],
        &["ls", &inside, EVIL],
        &["create", &volume, "--size", EVIL],
        &["mount", &volume, &mount_at, "-o", EVIL],
    ] {
        let (code, printed, said) = run(arguments);
        assert!(code != Some(0) && printed.is_empty(), "{arguments:?}");
        assert_eq!(said.lines().count(), 1, "{arguments:?}: {said}");
    }
    let (_, _, said) = run(&["cat", &inside]);
    assert_eq!(said, format!("weir: {volume}:/{SHOWN}: no such file or directory\n"));
}

#[test]
fn what_is_shown_of_a_volume_and_its_files_keeps_to_its_lines() {
    let (dir, volume) = scratch();
    let evil = dir.path().join(EVIL).to_str().unwrap().to_owned();
    let label = "l\x1b[2J\nstate       clean";
    let (code, printed, _) = run(&["create", &evil, "--size", "8M", "--label", label]);
    assert!(code == Some(0) && printed.lines().count() == 1, "{printed}");
    assert!(printed.contains(SHOWN), "{printed}");
    let lines = |text: &str| text.lines().count();
    let (_, plain, _) = run(&["info", &volume]);
    let (_, printed, _) = run(&["info", &evil]);
    assert_eq!(lines(&printed), lines(&plain), "{printed}");
    assert!(printed.contains("label       l\\x1b[2J\\nstate"), "{printed}");
    assert_eq!(lines(&run(&["fsck", &evil]).1), 1);
    // A file, a link to it, and an attribute.
    let open = weir::Volume::open(Path::new(&evil), weir::VolumeOptions::default()).unwrap();
    let file = weir::NewInode::new(weir::FileType::Regular, 0o644);
    let ino = open.make(weir::Volume::ROOT, EVIL.as_bytes(), &file).unwrap().ino;
    open.setxattr(ino, b"user.x\x1b\ny", b"", weir::XattrMode::Set).unwrap();
    open.symlink(weir::Volume::ROOT, b"link", EVIL.as_bytes(), 0, 0).unwrap();
    open.make(weir::Volume::ROOT, b"plain", &file).unwrap();
    open.close().unwrap();
    drop(open);
    let stat = |name: &str| run(&["stat", &format!("{evil}:/{name}")]).1;
    assert_eq!(lines(&stat(EVIL)), lines(&stat("plain")) + 1);
    assert_eq!(lines(&stat("link")), lines(&stat("plain")) + 1);
    assert!(stat("link").contains(&format!("target: {SHOWN}")), "{}", stat("link"));
    // To a program that is not a terminal names are given as they are.
    assert!(done(&["ls", &format!("{evil}:/")]).contains(EVIL));
}

#[test]
fn a_mount_announces_itself_in_one_line() {
    let Some(bench) = Bench::new() else { return };
    let volume = bench.dir.path().join(EVIL).to_str().unwrap().to_owned();
    fs::rename(bench.volume(), &volume).unwrap();
    let (code, printed, _) = run(&["mount", &volume, &bench.dir(), "--background"]);
    assert!(code == Some(0) && printed.lines().count() == 1, "{printed}");
    assert!(printed.contains(&format!("mounted at {}", bench.dir())), "{printed}");
    let (code, _, said) = run(&["mkdir", &format!("{volume}:/d")]);
    assert!(code == Some(1) && said.contains("in use"), "{said}");
    bench.unmount();
}

#[test]
fn wrong_usage_with_a_name_that_is_no_text_is_wrong_usage() {
    for arguments in [
        &[b"ls".as_slice(), b"v:/\xff", b"--bogus"][..],
        &[b"\xff"],
        &[b"ls", b"\xff"],
        &[b"fsck", b"\xff", b"\xff"],
        &[b"create", b"v", b"--size", b"\xff"],
    ] {
        let output = weir_of_bytes(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let code = if arguments[0] == b"fsck" { 16 } else { 2 };
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}
