//! Standard streams that are closed, or full: nothing is lost there without a word.
#![allow(missing_docs)]

mod common;

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{Bench, done};

/// `weir` with redirections of the shell's: its exit code, and what it says.
fn redirected(redirections: &str, arguments: &[&str]) -> (Option<i32>, String) {
    let script = format!("exec \"$0\" \"$@\" {redirections}");
    let mut command = Command::new("sh");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_weir")]).args(arguments);
    let output = command.output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn volume() -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let volume = dir.path().join("v").to_str().unwrap().to_owned();
    done(&["create", &volume, "--size", "8M"]);
    for (name, content) in [("empty", ""), ("full", "content")] {
        fs::write(dir.path().join(name), content).unwrap();
        let from = dir.path().join(name);
        done(&["cp", from.to_str().unwrap(), &format!("{volume}:/{name}")]);
    }
    (dir, volume)
}

#[test]
fn what_cannot_be_printed_is_an_error_in_one_line() {
    let (_dir, volume) = volume();
    let (full, empty) = (format!("{volume}:/full"), format!("{volume}:/empty"));
    for arguments in [
        &["cat", &full][..],
        &["cat", &empty],
        &["ls", &format!("{volume}:/")],
        &["stat", &full],
        &["info", &volume],
        &["dump", &volume],
        &["--help"],
        &["--version"],
        &["cat", "--help"],
    ] {
        let (code, said) = redirected(">&-", arguments);
        assert_eq!(said, "weir: standard output: bad file descriptor\n", "{arguments:?}");
        assert_eq!(code, Some(1), "{arguments:?}");
    }
    let (code, said) = redirected(">&-", &["fsck", &volume]);
    assert!(code == Some(8) && said.contains("standard output"), "{said}");
    // One that is open for reading only takes as little.
    for (redirections, what) in
        [(">/dev/full", "no space left on device"), ("</dev/null >&0", "bad file descriptor")]
    {
        for arguments in [&["cat", &full][..], &["--help"], &["ls", "--help"]] {
            // Help is printed by a library, to which such an output is none.
            if redirections.contains(">/dev/full") || arguments[0] == "cat" {
                let (code, said) = redirected(redirections, arguments);
                assert_eq!((code, said), (Some(1), format!("weir: standard output: {what}\n")));
            }
        }
    }
    let simulate = ["sim", "--states", "20", "--threads", "1"];
    let (code, said) = redirected(">/dev/full", &simulate);
    assert!(code == Some(1) && said.contains("standard output: "), "{said}");
    // Who asks for nothing to be printed gets that.
    for nowhere in [">/dev/null", "1<>/dev/null", "<>/dev/null >&0 2>&0"] {
        assert_eq!(redirected(nowhere, &["ls", &format!("{volume}:/")]).0, Some(0), "{nowhere}");
    }
}

#[test]
fn a_stream_that_is_closed_is_no_empty_file_and_takes_none() {
    let (_dir, volume) = volume();
    let full = format!("{volume}:/full");
    let before = done(&["ls", &format!("{volume}:/")]);
    for (redirections, arguments) in [
        ("<&-", ["cp", "/dev/stdin", &full]),
        ("<&-", ["cp", "/dev/fd/0", &full]),
        (">&-", ["cp", &full, "/dev/stdout"]),
        (">&-", ["cp", &full, "/proc/self/fd/1"]),
    ] {
        let (code, said) = redirected(redirections, &arguments);
        assert_eq!(code, Some(1), "{arguments:?}: {said}");
        assert!(said.contains(": bad file descriptor") && said.lines().count() == 1, "{said}");
    }
    assert_eq!(done(&["cat", &full]), "content");
    assert_eq!(done(&["ls", &format!("{volume}:/")]), before);
}

#[test]
fn what_prints_nothing_works_with_all_streams_closed() {
    let (_dir, volume) = volume();
    let new = format!("{volume}:/new");
    let (code, _) = redirected("<&- >&- 2>&-", &["mkdir", &new]);
    assert_eq!(
        (code, done(&["ls", &format!("{volume}:/")]).as_str()),
        (Some(0), "empty\nfull\nnew\n")
    );
    let (code, _) = redirected("<&- >&- 2>&-", &["rm", "-r", &new]);
    assert_eq!(code, Some(0));
    assert_eq!(done(&["fsck", &volume]).lines().count(), 1);
}

#[test]
fn a_mount_in_the_background_needs_no_standard_streams() {
    let Some(bench) = Bench::new() else { return };
    let arguments = ["mount", &bench.volume(), &bench.dir(), "--background"];
    let (code, _) = redirected("<&- >&- 2>&-", &arguments);
    assert_eq!(code, Some(0));
    assert!(bench.is_mounted());
    fs::write(bench.at("f"), "kept").unwrap();
    bench.unmount();
    assert_eq!(done(&["cat", &format!("{}:/f", bench.volume())]), "kept");
}

/// Whoever interrupts a mount that takes long, because of a recovery say, does not find it there later.
#[test]
fn a_mount_in_the_background_whose_starter_is_gone_is_taken_off_again() {
    let Some(bench) = Bench::new() else { return };
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
    command.args(["mount", "--serve", &bench.volume(), &bench.dir()]);
    let mut server = command.stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
    let mut code = None;
    let began = Instant::now();
    while code.is_none() && began.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(10));
        code = server.try_wait().unwrap().map(|status| status.code());
    }
    let _ = server.kill();
    server.wait().unwrap();
    let said = std::io::read_to_string(server.stderr.take().unwrap()).unwrap();
    assert_eq!(code, Some(Some(1)), "{said}");
    assert!(said.contains("has not waited") && said.lines().count() == 1, "{said}");
    assert!(!bench.is_mounted());
    assert!(done(&["info", &bench.volume()]).contains("clean"));
}
