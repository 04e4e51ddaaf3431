//! Bad input: one clear line, a failing exit code, nothing left behind.

mod common;

use std::path::Path;

use common::Scratch;

/// Runs the lab and returns its only line of complaint.
fn refused(args: &[&str]) -> String {
    let scratch = Scratch::new("bad");
    let out = scratch.run(args);
    assert!(!out.status.success(), "{args:?} must be refused");
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    let lines: Vec<&str> = text.lines().filter(|l| l.starts_with("weir lab: ")).collect();
    assert_eq!(lines.len(), 1, "{args:?} says: {text}");
    scratch.assert_clean();
    lines[0].to_owned()
}

#[test]
fn an_unknown_target_is_named() {
    assert!(refused(&["fsmark", "--quick", "--on", "zfs"]).contains("unknown target 'zfs'"));
    assert!(refused(&["fsync", "--on", "dir:"]).contains("unknown target 'dir:'"));
}

#[test]
fn a_missing_directory_is_named() {
    let line = refused(&["fsmark", "--on", "dir:/nonexistent-weir-lab"]);
    assert!(line.contains("/nonexistent-weir-lab"), "{line}");
}

#[test]
fn an_unknown_disk_is_named() {
    let line = refused(&["fsmark", "--on", "dir:.", "--allow-no-device", "--disk", "quick"]);
    assert!(line.contains("unknown disk 'quick'"), "{line}");
}

#[test]
fn a_directory_without_a_device_is_refused() {
    if !Path::new("/dev/shm").is_dir() {
        return;
    }
    let line = refused(&["fsmark", "--quick", "--on", "dir:/dev/shm"]);
    assert!(line.contains("/dev/shm") && line.contains("no block device"), "{line}");
}

#[test]
fn a_baseline_that_is_not_run_is_refused() {
    let line = refused(&["fsmark", "--on", "dir:.", "--allow-no-device", "--baseline", "xfs"]);
    assert!(line.contains("--baseline xfs"), "{line}");
}

#[test]
fn an_image_larger_than_the_disk_is_refused_before_writing() {
    if !common::loops_possible() {
        return;
    }
    let line = refused(&["fsmark", "--on", "ext4", "--size", "900T", "--work", "."]);
    assert!(line.contains("MiB needed") && line.contains("free"), "{line}");
}

#[test]
fn a_mount_option_that_does_not_exist_is_named() {
    let line = refused(&["fsmark", "--on", "weir-mount", "--mount-option", "frobnicate"]);
    assert!(line.contains("mount option 'frobnicate'"), "{line}");
    let line = refused(&["fsmark", "--on", "weir-mount,weir-mount+threads=0"]);
    assert!(line.contains("mount option 'threads=0'"), "{line}");
    assert!(refused(&["fsmark", "--on", "xfs+noatime"]).contains("unknown target 'xfs+noatime'"));
}

#[test]
fn a_report_of_another_schema_is_refused() {
    let scratch = Scratch::new("schema");
    let file = scratch.dir.join("old.json").to_string_lossy().into_owned();
    std::fs::write(&file, r#"{"schema":"weir-lab/0"}"#).expect("written");
    let out = scratch.run(&["compare", &file, &file]);
    assert!(!out.status.success());
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(text.contains("schema 'weir-lab/0'"), "{text}");
    let out = scratch.run(&["compare", "/nonexistent", &file]);
    assert!(String::from_utf8_lossy(&out.stderr).contains("/nonexistent"));
}

#[test]
fn a_number_that_makes_no_load_is_refused() {
    let scratch = Scratch::new("numbers");
    let most = u64::MAX.to_string();
    for (command, option, value) in [
        ("fsmark", "--files", "0"),
        ("fsmark", "--threads", "0"),
        ("fsmark", "--threads", "1,1000000"),
        ("fsmark", "--iterations", "0"),
        ("fsmark", "--rounds", "0"),
        ("fsync", "--jobs", "0"),
        ("fsync", "--seconds", "nan"),
        ("simoop", "--seconds", "inf"),
        ("fastread", "--queue", "0"),
        ("checkpoint", "--reads", most.as_str()),
        ("ingest", "--total-mib", most.as_str()),
        ("tickets", "--tickets", "0"),
        ("programs", "--clients", "0"),
        ("programs", "--seconds", "0"),
    ] {
        let out = scratch.run(&[command, "--on", "dir:.", "--allow-no-device", option, value]);
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{command} {option} {value}: {text}");
        assert!(text.contains(option) && !text.contains("panicked"), "{text}");
    }
    let out = scratch.run(&["compare", "old.json", "new.json", "--gate", "nan"]);
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.code() == Some(2) && text.contains("--gate"), "{text}");
    scratch.assert_clean();
}

#[test]
fn a_run_that_is_refused_leaves_no_report() {
    let line = refused(&[
        "fsmark",
        "--on",
        "dir:.",
        "--allow-no-device",
        "--size",
        "5",
        "--json",
        "o.json",
        "--html",
        "o.html",
    ]);
    assert!(line.contains("--size"), "{line}");
    let line = refused(&["fsmark", "--on", "dir:.", "--allow-no-device", "--json", "no/o.json"]);
    assert!(line.contains("no/o.json"), "{line}");
}

#[test]
fn a_mode_that_matches_nothing_is_said() {
    let line =
        refused(&["fsmark", "--on", "dir:.", "--allow-no-device", "--no-probe", "--mode", "xyz"]);
    assert!(line.contains("--mode"), "{line}");
}

/// A run whose words nobody reads any more, or that cannot be kept, goes on: what it is for is in its files.
#[test]
fn nobody_who_reads_and_no_room_is_no_reason_to_panic() {
    let scratch = Scratch::new("unread");
    for args in [&["clean"][..], &["list"], &["fsync", "--on", "zfs"]] {
        let expected = scratch.run(args).status.code();
        let (reader, unread) = std::io::pipe().expect("a pipe");
        drop(reader);
        let full = std::fs::File::options().write(true).open("/dev/full").expect("there");
        let status = scratch.command(args).stdout(full).stderr(unread).status().expect("started");
        assert_eq!(status.code(), expected, "{args:?}");
    }
}
