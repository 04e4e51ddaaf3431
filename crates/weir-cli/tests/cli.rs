//! The command line as a program: what it prints, where, and with which exit code.
#![allow(missing_docs)]

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

fn weir(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_weir")).args(arguments).stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a command that must succeed, and returns what it printed.
fn done(arguments: &[&str]) -> String {
    let output = weir(arguments);
    assert!(output.status.success(), "weir {arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Runs a command that must fail with `code`, and returns its one line.
fn refused(code: i32, arguments: &[&str]) -> String {
    let output = weir(arguments);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "weir {arguments:?}: {said}");
    assert_eq!(said.lines().count(), 1, "one line: {said}");
    assert!(said.starts_with("weir: "), "{said}");
    said
}

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
    /// A new volume.
    fn volume(&self, name: &str) -> String {
        let volume = self.shown(name);
        done(&["create", &volume, "--size", "64M"]);
        volume
    }
}

fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn a_new_volume_is_clean_empty_and_as_large_as_asked() {
    let scratch = Scratch::new();
    let volume = scratch.shown("v");
    let printed = done(&["create", &volume, "--size", "64MiB", "--label", "mine"]);
    assert!(printed.contains("64.0 MiB"), "{printed}");
    assert_eq!(Path::new(&volume).metadata().unwrap().len(), 64 << 20);
    let info = json(&done(&["info", "--json", &volume]));
    assert_eq!(info["size_bytes"], 64 << 20);
    assert_eq!(info["label"], "mine");
    assert_eq!(info["clean"], true);
    assert_eq!(info["in_use"], serde_json::Value::Null);
    assert_eq!(done(&["ls", &format!("{volume}:/")]), "");
    assert_eq!(weir(&["fsck", &volume]).status.code(), Some(0));
}

#[test]
fn create_overwrites_nothing_without_force() {
    let scratch = Scratch::new();
    let file = scratch.shown("precious");
    fs::write(&file, vec![7; 2 << 20]).unwrap();
    let said = refused(1, &["create", &file, "--size", "64M"]);
    assert!(said.contains("exists already") && said.contains("--force"), "{said}");
    assert_eq!(fs::read(&file).unwrap(), vec![7; 2 << 20]);

    let volume = scratch.volume("v");
    done(&["mkdir", &format!("{volume}:/kept")]);
    refused(1, &["create", &volume, "--size", "64M"]);
    assert_eq!(done(&["ls", &format!("{volume}:/")]), "kept\n");
    for there in ["/kept", "/", "/kept/.."] {
        let said = refused(1, &["mkdir", &format!("{volume}:{there}")]);
        assert!(said.contains("file exists"), "{said}");
    }
    done(&["create", &volume, "--size", "64M", "--force"]);
    assert_eq!(done(&["ls", &format!("{volume}:/")]), "");
}

#[test]
fn a_prewritten_volume_has_no_holes() {
    let scratch = Scratch::new();
    let volume = scratch.shown("v");
    done(&["create", &volume, "--size", "32M", "--prewrite"]);
    assert!(Path::new(&volume).metadata().unwrap().blocks() * 512 >= 32 << 20);
    assert_eq!(weir(&["fsck", &volume]).status.code(), Some(0));
}

#[test]
fn bad_sizes_are_refused_and_nothing_is_made() {
    let scratch = Scratch::new();
    let volume = scratch.shown("v");
    for (code, size, hint) in
        [(2, "8X", "such as 8G"), (2, "", "such as 8G"), (2, "0", "least"), (2, "100K", "least")]
    {
        let said = refused(code, &["create", &volume, "--size", size]);
        assert!(said.contains(hint), "{said}");
        assert!(!Path::new(&volume).exists());
    }
    let said = refused(2, &["create", &volume]);
    assert!(said.contains("--size 8G"), "{said}");
}

#[test]
fn what_no_volume_can_be_made_with_or_in_is_refused_before_anything_is_written() {
    let scratch = Scratch::new();
    let volume = scratch.shown("v");
    let long = "x".repeat(65);
    for (options, hint) in [
        (["--size", "64M", "--log-size", "10G"], "from 256 KiB to 8.00 MiB"),
        (["--size", "64M", "--log-size", "1K"], "from 256 KiB to 8.00 MiB"),
        (["--size", "64M", "--label", &long], "shorter --label"),
    ] {
        let said = refused(1, &[&["create", &volume], &options[..]].concat());
        assert!(said.contains(hint), "{said}");
        assert!(!Path::new(&volume).exists());
        // Nor is what is there touched, although it may be replaced.
        let precious = scratch.shown("precious");
        fs::write(&precious, vec![7; 2 << 20]).unwrap();
        refused(1, &[&["create", &precious, "--force"], &options[..]].concat());
        assert_eq!(fs::read(&precious).unwrap(), vec![7; 2 << 20]);
    }
    let make = |place: &str| refused(1, &["create", place, "--size", "1M"]);
    let said = make(&scratch.shown("none/v"));
    assert!(said.contains("mkdir -p"), "{said}");
    let said = make(&scratch.shown(""));
    assert!(said.contains("is a directory") && !said.contains("--force"), "{said}");
    let said = make("/dev/null");
    assert!(said.contains("neither a file nor") && !said.contains("--force"), "{said}");
    std::os::unix::fs::symlink("nowhere", scratch.path("dangling")).unwrap();
    let said = make(&scratch.shown("dangling"));
    assert!(said.contains("leads nowhere"), "{said}");
}

#[test]
fn more_than_the_host_has_is_refused_before_anything_is_written() {
    let scratch = Scratch::new();
    let volume = scratch.shown("v");
    let said = refused(1, &["create", &volume, "--size", "4P", "--prewrite"]);
    assert!(said.contains("not enough space"), "{said}");
    assert!(!Path::new(&volume).exists());
}

#[test]
fn what_is_no_volume_is_named_and_left_alone() {
    let scratch = Scratch::new();
    let missing = scratch.shown("missing");
    let random = scratch.shown("random");
    let bytes: Vec<u8> =
        (0..2 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    fs::write(&random, &bytes).unwrap();
    let empty = scratch.shown("empty");
    File::create(&empty).unwrap();
    let dir = scratch.dir.path().to_str().unwrap();
    for command in ["info", "dump", "fsck"] {
        let code = if command == "fsck" { 8 } else { 1 };
        let said = refused(code, &[command, &missing]);
        assert!(said.contains("no such file") && said.contains("weir create"), "{said}");
        assert!(refused(code, &[command, &random]).contains("not a Weir volume"));
        assert!(refused(code, &[command, &empty]).contains("not a Weir volume"));
        refused(code, &[command, dir]);
    }
    refused(1, &["ls", &format!("{random}:/")]);
    refused(1, &["mkdir", &format!("{random}:/x")]);
    refused(1, &["mount", &random, dir]);
    refused(1, &["mount", &missing, dir]);
    assert_eq!(fs::read(&random).unwrap(), bytes, "nothing was written");
    assert!(!Path::new(&missing).exists(), "nothing was made");
}

#[test]
fn a_truncated_image_says_that_it_was_truncated() {
    let scratch = Scratch::new();
    let volume = scratch.volume("v");
    let file = File::options().write(true).open(&volume).unwrap();
    file.set_len(32 << 20).unwrap();
    for (code, command) in [(1, "info"), (8, "fsck")] {
        let said = refused(code, &[command, &volume]);
        assert!(said.contains("truncated"), "{said}");
    }
    let said = refused(1, &["ls", &format!("{volume}:/")]);
    assert!(said.contains("truncated"), "{said}");
}

/// Rewrites every copy of the superblock with another version and a right checksum.
fn make_newer(volume: &str) {
    let file = File::options().read(true).write(true).open(volume).unwrap();
    let blocks = file.metadata().unwrap().len() / 4096;
    for place in [0, 8, blocks - 16, blocks - 8] {
        let mut block = vec![0; 4096];
        file.read_exact_at(&mut block, place * 4096).unwrap();
        if &block[..8] != b"WEIR-FS1" {
            continue;
        }
        block[12..16].copy_from_slice(&99_u32.to_le_bytes());
        let checksum = weir::format::checksum_without_field(&block, 8);
        block[8..12].copy_from_slice(&checksum.to_le_bytes());
        file.write_all_at(&block, place * 4096).unwrap();
    }
}

#[test]
fn a_volume_of_a_newer_format_asks_for_a_newer_program() {
    let scratch = Scratch::new();
    let volume = scratch.volume("v");
    make_newer(&volume);
    let before = fs::read(&volume).unwrap();
    for (code, command) in [(1, "info"), (8, "fsck")] {
        let said = refused(code, &[command, &volume]);
        assert!(said.contains("newer"), "{said}");
    }
    refused(1, &["mkdir", &format!("{volume}:/x")]);
    refused(1, &["create", &volume, "--size", "64M"]);
    assert!(fs::read(&volume).unwrap() == before, "nothing was written");
}

#[test]
fn a_volume_in_use_is_refused_and_says_so() {
    let scratch = Scratch::new();
    let volume = scratch.volume("v");
    let options = weir::VolumeOptions::default();
    let open = weir::Volume::open(Path::new(&volume), options).unwrap();
    for (code, arguments) in [
        (8, vec!["fsck", &volume]),
        (1, vec!["dump", &volume]),
        (1, vec!["create", &volume, "--size", "64M", "--force"]),
    ] {
        let said = refused(code, &arguments);
        assert!(said.contains("in use"), "{said}");
        assert!(said.contains(&std::process::id().to_string()), "names the process: {said}");
    }
    assert!(refused(1, &["ls", &format!("{volume}:/")]).contains("in use"));
    let info = json(&done(&["info", "--json", &volume]));
    assert!(info["in_use"].is_string(), "{info}");
    assert_eq!(info["size_bytes"], 64 << 20);
    open.close().unwrap();
    drop(open);
    assert_eq!(weir(&["fsck", &volume]).status.code(), Some(0));
}

#[test]
fn usage_errors_are_one_line_and_have_their_own_code() {
    for arguments in [vec!["frobnicate"], vec!["create"], vec!["ls", "x"], vec!["cp", "x"]] {
        assert!(refused(2, &arguments).contains("--help"));
    }
    refused(16, &["fsck"]);
    refused(16, &["fsck", "--frobnicate", "x"]);
    let scratch = Scratch::new();
    let dir = scratch.dir.path().to_str().unwrap();
    let said = refused(2, &["mount", "v", dir, "-o", "frobnicate"]);
    assert!(said.contains("'frobnicate'"), "{said}");
}

#[test]
fn a_mount_point_must_be_a_directory_and_a_mount_must_be_ours() {
    let scratch = Scratch::new();
    let volume = scratch.volume("v");
    let said = refused(1, &["mount", &volume, &scratch.shown("nowhere")]);
    assert!(said.contains("mkdir"), "{said}");
    assert!(refused(1, &["mount", &volume, &volume]).contains("not a directory"));
    assert!(refused(1, &["umount", scratch.dir.path().to_str().unwrap()]).contains("not mounted"));
    assert!(refused(1, &["umount", "/proc"]).contains("not a Weir mount"));
}

#[test]
fn files_can_be_made_listed_read_and_removed_without_a_mount() {
    let scratch = Scratch::new();
    let volume = scratch.volume("v");
    let at = |path: &str| format!("{volume}:{path}");
    done(&["mkdir", "-p", "-m", "750", &at("/a/b/c")]);
    assert!(done(&["ls", "-l", &at("/a")]).starts_with("drwxr-xr-x"), "what is on the way");
    assert!(refused(1, &["mkdir", &at("/a/b")]).contains("exists"));
    done(&["mkdir", "-p", &at("/a/b")]);
    fs::write(scratch.path("hello"), "hello, world\n").unwrap();
    done(&["cp", &scratch.shown("hello"), &at("/a/b")]);
    assert_eq!(done(&["cat", &at("/a/b/hello")]), "hello, world\n");
    assert_eq!(done(&["ls", &at("/a/b")]), "c\nhello\n");
    let long = done(&["ls", "-l", &at("/a/b")]);
    assert!(long.lines().next().unwrap().starts_with("drwxr-x---"), "{long}");
    let stat = json(&done(&["stat", "--json", &at("/a/b/hello")]));
    assert_eq!((stat["size_bytes"].as_u64(), stat["type"].as_str()), (Some(13), Some("file")));
    // RFC 3339: with its zone.
    assert!(stat["mtime"].as_str().unwrap().ends_with('Z'), "{stat}");
    assert!(refused(1, &["rm", &at("/a")]).contains("-r"));
    // A slash at the end says that it is a directory.
    let host = scratch.shown("host");
    fs::write(&host, "new").unwrap();
    done(&["cp", &host, &at("/plain")]);
    for command in [vec!["rm", "-r"], vec!["cp", &host], vec!["ls"], vec!["cat"], vec!["stat"]] {
        let slash = at("/plain/");
        let said = refused(1, &[&command[..], &[&slash]].concat());
        assert!(said.contains("not a directory"), "{said}");
    }
    let said = refused(1, &["cp", &host, &at("/none/")]);
    assert!(said.contains("weir mkdir"), "{said}");
    assert_eq!(done(&["cat", &at("/plain")]), "new");
    done(&["rm", &at("/plain")]);
    assert!(refused(1, &["rm", &at("/nothing")]).contains("no such file"));
    done(&["rm", "-f", &at("/nothing")]);
    done(&["rm", "-r", &at("/a")]);
    assert_eq!(done(&["ls", &at("/")]), "");
    assert_eq!(weir(&["fsck", &volume]).status.code(), Some(0));
}

/// A line for each file below `dir` with everything a copy has to keep.
fn manifest(dir: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(path) = todo.pop() {
        let meta = path.symlink_metadata().unwrap();
        let content = if meta.is_dir() {
            todo.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            String::new()
        } else if meta.is_symlink() {
            fs::read_link(&path).unwrap().display().to_string()
        } else {
            let bytes = fs::read(&path).unwrap();
            format!("{} bytes, crc {:08x}", bytes.len(), weir::format::checksum(&bytes))
        };
        let links = if meta.is_dir() { 0 } else { meta.nlink() };
        lines.push(format!(
            "{} {:o} links {links} {}:{} mtime {}.{} {content}",
            path.strip_prefix(dir).unwrap().display(),
            meta.mode(),
            meta.uid(),
            meta.gid(),
            meta.mtime(),
            meta.mtime_nsec(),
        ));
    }
    lines.sort();
    lines
}

#[test]
fn a_tree_copied_in_and_out_keeps_everything() {
    let scratch = Scratch::new();
    let tree = scratch.path("tree");
    fs::create_dir_all(tree.join("deep/er")).unwrap();
    fs::write(tree.join("deep/er/file"), vec![42; 3_000_000]).unwrap();
    fs::write(tree.join("script"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(tree.join("script"), fs::Permissions::from_mode(0o751)).unwrap();
    fs::hard_link(tree.join("script"), tree.join("deep/linked")).unwrap();
    symlink("../script", tree.join("deep/symlink")).unwrap();
    symlink("nowhere", tree.join("dangling")).unwrap();
    fs::create_dir(tree.join("empty")).unwrap();
    let sparse = File::create(tree.join("sparse")).unwrap();
    sparse.write_all_at(b"end", 20 << 20).unwrap();
    sparse.set_len(30 << 20).unwrap();
    let times = fs::FileTimes::new()
        .set_modified(std::time::UNIX_EPOCH + std::time::Duration::new(1_234_567_890, 123_456_789));
    sparse.set_times(times).unwrap();
    drop(sparse);

    let volume = scratch.volume("v");
    done(&["cp", "-r", tree.to_str().unwrap(), &format!("{volume}:/copy")]);
    assert_eq!(weir(&["fsck", &volume]).status.code(), Some(0));
    let back = scratch.path("back");
    done(&["cp", "-r", &format!("{volume}:/copy"), back.to_str().unwrap()]);
    assert_eq!(manifest(&back), manifest(&tree));
    assert!(back.join("sparse").metadata().unwrap().blocks() * 512 < 1 << 20, "holes are kept");
    // A second time over what is there, and into a directory.
    done(&["cp", "-r", &format!("{}/.", tree.display()), &format!("{volume}:/copy")]);
    fs::create_dir(scratch.path("into")).unwrap();
    done(&["cp", "-r", &format!("{volume}:/copy"), &scratch.shown("into")]);
    assert_eq!(manifest(&scratch.path("into/copy")), manifest(&tree));
}

#[test]
fn a_copy_that_makes_no_sense_is_refused() {
    let scratch = Scratch::new();
    let volume = scratch.volume("v");
    let dir = scratch.dir.path().to_str().unwrap();
    assert!(refused(1, &["cp", dir, &format!("{volume}:/")]).contains("-r"));
    assert!(refused(1, &["cp", "/nonexistent", &format!("{volume}:/")]).contains("no such file"));
    assert!(refused(1, &["cp", &format!("{volume}:/x"), dir]).contains("no such file"));
    assert!(
        refused(1, &["cp", "-r", &format!("{volume}:/"), &format!("{volume}:/y")]).contains("both")
    );
    assert!(refused(1, &["cp", dir, dir]).contains("VOLUME:/path"));
}

#[test]
fn names_that_are_not_text_are_copied_and_listed_byte_for_byte() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let scratch = Scratch::new();
    let volume = scratch.volume("v");
    let name = OsStr::from_bytes(b"\xff\xfe odd");
    let source = scratch.dir.path().join(name);
    fs::write(&source, "x").unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_weir"))
        .arg("cp")
        .arg(&source)
        .arg(format!("{volume}:/"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let listed = weir(&["ls", &format!("{volume}:/")]).stdout;
    assert_eq!(listed, [name.as_bytes(), b"\n"].concat());
}

#[test]
fn a_full_volume_says_so_and_can_be_emptied() {
    let scratch = Scratch::new();
    let volume = scratch.shown("v");
    done(&["create", &volume, "--size", "16M"]);
    fs::write(scratch.path("big"), vec![1; 32 << 20]).unwrap();
    let said = refused(1, &["cp", &scratch.shown("big"), &format!("{volume}:/")]);
    assert!(said.contains("no space left"), "{said}");
    done(&["rm", &format!("{volume}:/big")]);
    fs::write(scratch.path("small"), vec![2; 4 << 20]).unwrap();
    done(&["cp", &scratch.shown("small"), &format!("{volume}:/")]);
    assert_eq!(weir(&["fsck", &volume]).status.code(), Some(0));
}

/// No string in it is a structure in the notation of the program's own language.
fn assert_structured(value: &serde_json::Value) {
    match value {
        serde_json::Value::String(text) => assert!(!text.contains(['{', '(']), "{text}"),
        serde_json::Value::Array(values) => values.iter().for_each(assert_structured),
        serde_json::Value::Object(values) => values.values().for_each(assert_structured),
        _ => {}
    }
}

#[test]
fn dump_shows_every_structure_as_text_and_as_json_lines() {
    let scratch = Scratch::new();
    let volume = scratch.volume("v");
    done(&["mkdir", "-p", &format!("{volume}:/a/b")]);
    for what in ["superblock", "log", "tree", "free"] {
        assert!(!done(&["dump", &volume, what, "--all"]).is_empty());
        for line in done(&["dump", &volume, what, "--all", "--json"]).lines() {
            assert_structured(&json(line));
        }
    }
    assert!(done(&["dump", &volume]).contains("generation"));
    let info = json(&done(&["info", "--json", &volume]));
    let dumped = done(&["dump", &volume, "--json"]);
    let superblock =
        dumped.lines().map(json).find(|value| value["superblock"].is_object()).unwrap();
    assert_eq!(superblock["superblock"]["volume_id"], info["id"]);
    let items = done(&["dump", &volume, "tree", "--all", "--json"]);
    let first = items.lines().map(json).find(|value| value["item"].is_object()).unwrap();
    assert_eq!(first["item"]["key"]["kind"], "inode");
}

#[test]
fn fsck_finds_a_flipped_bit_and_keeps_its_hands_off() {
    let scratch = Scratch::new();
    let volume = scratch.volume("v");
    fs::write(scratch.path("f"), vec![0xab; 8 << 20]).unwrap();
    done(&["cp", &scratch.shown("f"), &format!("{volume}:/")]);
    let mut image = fs::read(&volume).unwrap();
    let page = vec![0xab; 4096];
    let found = image.chunks(4096).rposition(|block| block == page).unwrap();
    image[found * 4096 + 100] ^= 1;
    File::options().write(true).open(&volume).unwrap().write_all(&image).unwrap();
    let output = weir(&["fsck", &volume]);
    assert_eq!(output.status.code(), Some(4), "{}", text(&output.stderr));
    let report = json(&text(&weir(&["fsck", "--json", &volume]).stdout));
    assert!(!report["problems"].as_array().unwrap().is_empty(), "{report}");
    assert!(fs::read(&volume).unwrap() == image, "nothing was changed");
    let said = text(&weir(&["cat", &format!("{volume}:/f")]).stderr);
    assert!(said.contains("corrupt"), "{said}");
}

#[test]
fn help_and_version_go_to_standard_output() {
    for arguments in
        [vec!["--help"], vec!["--version"], vec!["fsck", "--help"], vec!["help", "mount"]]
    {
        assert!(!done(&arguments).is_empty());
    }
    assert!(done(&["fsck", "--help"]).contains("16 wrong usage"));
}
