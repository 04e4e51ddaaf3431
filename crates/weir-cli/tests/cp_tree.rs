//! `weir cp -r`: what is one file stays one file, and what cannot be copied is named, counted and left out, and nothing else is.
#![allow(missing_docs)]

mod common;

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::{Command, Output};

use common::{Scratch, done, weir};

const NOBODY: u32 = 65534;

impl Scratch {
    fn copy_in(&self, sources: &[&str]) -> Output {
        let mut arguments = vec!["cp".to_owned(), "-r".to_owned()];
        arguments.extend(sources.iter().map(|source| self.shown(source)));
        arguments.push(self.at("/"));
        weir(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
    }
    fn copy_out(&self, sources: &[&str], destination: &str) -> Output {
        let mut arguments = vec!["cp".to_owned(), "-r".to_owned()];
        arguments.extend(sources.iter().map(|source| self.at(&format!("/{source}"))));
        arguments.push(self.shown(destination));
        weir(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
    }
    fn cat(&self, path: &str) -> String {
        done(&["cat", &self.at(path)])
    }
    /// Inode and links of a file in the volume.
    fn inode(&self, path: &str) -> (u64, u64) {
        let text = done(&["stat", "--json", &self.at(path)]);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        (value["inode"].as_u64().unwrap(), value["links"].as_u64().unwrap())
    }
    /// Spoils a leaf of the tree that has nothing in it but items of this kind of one inode.
    fn spoil_leaf_of(&self, kind: &str, inode: u64) {
        let nodes = done(&["dump", &self.volume, "tree", "--json"]);
        let nodes =
            nodes.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let is_ours = |key: &serde_json::Value| key["kind"] == kind && key["inode"] == inode;
        let leaf = nodes
            .filter(|node| node["level"] == 0)
            .find(|node| is_ours(&node["first_key"]) && is_ours(&node["last_key"]))
            .expect("a leaf of its own");
        let image = fs::File::options().read(true).write(true).open(&self.volume).unwrap();
        let (at, mut byte) = (leaf["block"].as_u64().unwrap() * 4096 + 100, [0]);
        image.read_exact_at(&mut byte, at).unwrap();
        image.write_all_at(&[byte[0] ^ 1], at).unwrap();
    }
    fn open(&self) -> weir::Volume {
        weir::Volume::open(Path::new(&self.volume), weir::VolumeOptions::default()).unwrap()
    }
}

fn succeeded(output: &Output) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{said}");
}

/// What a copy said that did not copy everything: all lines but the last, which counts them.
fn left_out(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    let mut lines: Vec<&str> = said.lines().collect();
    let last = lines.pop().unwrap();
    let counted = format!(" copied, {} not or not completely: see above", lines.len());
    assert!(last.ends_with(&counted), "{said}");
    lines.join("\n")
}

fn same_file(one: &Path, other: &Path) -> bool {
    let [one, other] = [one, other].map(|path| path.symlink_metadata().unwrap());
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

fn may_be_others() -> bool {
    let may = rustix::process::geteuid().is_root();
    if !may {
        eprintln!("skipped: acting as another user needs root");
    }
    may
}

/// `weir` by way of `setpriv` with these arguments.
fn with_privileges(privileges: &[&str], arguments: &[&str]) -> Output {
    let mut command = Command::new("setpriv");
    command.args(privileges).arg(env!("CARGO_BIN_EXE_weir")).args(arguments);
    command.output().unwrap()
}

fn as_nobody(arguments: &[&str]) -> Output {
    let id = NOBODY.to_string();
    let privileges = [&format!("--reuid={id}"), &format!("--regid={id}"), "--clear-groups"];
    with_privileges(&privileges, arguments)
}

#[test]
fn names_of_one_file_in_several_sources_are_one_file_in_the_copy() {
    let scratch = Scratch::new("16M");
    scratch.file("a", "one");
    for name in ["b", "d1/x", "d2/y"] {
        fs::create_dir_all(scratch.path(name).parent().unwrap()).unwrap();
        fs::hard_link(scratch.path("a"), scratch.path(name)).unwrap();
    }
    scratch.file("apart", "one");
    symlink("nowhere", scratch.path("d1/link")).unwrap();
    fs::hard_link(scratch.path("d1/link"), scratch.path("d2/link2")).unwrap();
    succeeded(&scratch.copy_in(&["a", "b", "d1", "d2", "apart"]));
    let (ino, links) = scratch.inode("/a");
    assert_eq!(links, 4);
    for name in ["/b", "/d1/x", "/d2/y"] {
        assert_eq!(scratch.inode(name), (ino, 4), "{name}");
    }
    assert_ne!(scratch.inode("/apart").0, ino);
    assert_eq!(scratch.inode("/d1/link"), scratch.inode("/d2/link2"));
    fs::create_dir(scratch.path("out")).unwrap();
    succeeded(&scratch.copy_out(&["a", "b", "d1", "d2", "apart"], "out"));
    let at = |name: &str| scratch.path("out").join(name);
    for name in ["b", "d1/x", "d2/y"] {
        assert!(same_file(&at("a"), &at(name)), "{name}");
    }
    assert!(!same_file(&at("a"), &at("apart")));
    assert!(same_file(&at("d1/link"), &at("d2/link2")));
    // Without -r each is a file of its own, as with cp(1).
    let out = scratch.shown("out2");
    fs::create_dir(&out).unwrap();
    done(&["cp", &scratch.at("/a"), &scratch.at("/b"), &out]);
    assert!(!same_file(&scratch.path("out2/a"), &scratch.path("out2/b")));
    assert_eq!(weir(&["fsck", &scratch.volume]).status.code(), Some(0));
}

#[test]
fn one_file_that_comes_twice_to_one_name_is_there_once() {
    let scratch = Scratch::new("16M");
    scratch.file("d1/f", "one");
    fs::create_dir(scratch.path("d2")).unwrap();
    fs::hard_link(scratch.path("d1/f"), scratch.path("d2/f")).unwrap();
    succeeded(&scratch.copy_in(&["d1/f", "d2/f"]));
    assert_eq!(scratch.cat("/f"), "one");
    succeeded(&scratch.copy_in(&["d1", "d2"]));
    fs::create_dir(scratch.path("out")).unwrap();
    succeeded(&scratch.copy_out(&["d1/f", "d2/f"], "out"));
    assert_eq!(fs::read_to_string(scratch.path("out/f")).unwrap(), "one");
    assert_eq!(weir(&["fsck", &scratch.volume]).status.code(), Some(0));
}

#[test]
fn a_copy_whose_name_went_to_another_file_is_linked_to_no_more() {
    let scratch = Scratch::new("16M");
    scratch.file("d1/f", "one");
    scratch.file("d2/f", "two");
    fs::create_dir(scratch.path("d3")).unwrap();
    fs::hard_link(scratch.path("d1/f"), scratch.path("d3/g")).unwrap();
    let sources = ["d1/f", "d2/f", "d3/g"];
    succeeded(&scratch.copy_in(&sources));
    assert_eq!((scratch.cat("/f").as_str(), scratch.cat("/g").as_str()), ("two", "one"));
    succeeded(&scratch.copy_in(&["d1", "d2", "d3"]));
    fs::create_dir(scratch.path("out")).unwrap();
    succeeded(&scratch.copy_out(&sources, "out"));
    let read = |name: &str| fs::read_to_string(scratch.path("out").join(name)).unwrap();
    assert_eq!((read("f").as_str(), read("g").as_str()), ("two", "one"));
    assert_eq!(weir(&["fsck", &scratch.volume]).status.code(), Some(0));
}

/// A crash between two steps would leave a name that nobody has given.
#[test]
fn a_file_is_replaced_without_a_name_in_between() {
    let scratch = Scratch::new("16M");
    for content in ["old", "new and longer"] {
        scratch.file("f", content);
        succeeded(&scratch.copy_in(&["f"]));
        assert_eq!(scratch.cat("/f"), content);
    }
    let image = fs::read(&scratch.volume).unwrap();
    let name = b".weir-cp-";
    assert!(!image.windows(name.len()).any(|bytes| bytes == name), "it was in the log");
}

#[test]
fn what_cannot_be_read_on_the_host_is_named_and_the_rest_is_copied() {
    if !may_be_others() {
        return;
    }
    let scratch = Scratch::new("16M");
    for name in ["tree/a/f", "tree/closed/f", "tree/z/f", "tree/secret", "tree/sub/closed/f"] {
        scratch.file(name, "content");
    }
    let mode = |name: &str, mode| {
        fs::set_permissions(scratch.path(name), fs::Permissions::from_mode(mode)).unwrap();
    };
    for name in ["tree/closed", "tree/sub/closed", "tree/secret"] {
        mode(name, 0o700);
    }
    mode("", 0o755);
    chown(&scratch.volume, Some(NOBODY), Some(NOBODY)).unwrap();
    let output = as_nobody(&["cp", "-r", &scratch.shown("tree"), &scratch.at("/")]);
    let said = left_out(&output);
    assert_eq!(said.lines().count(), 3, "{said}");
    for name in ["tree/closed", "tree/sub/closed", "tree/secret"] {
        let line = format!("weir: {}: permission denied", scratch.shown(name));
        assert!(said.lines().any(|said| said == line), "{said}");
    }
    assert_eq!(scratch.cat("/tree/a/f") + &scratch.cat("/tree/z/f"), "contentcontent");
    assert_eq!(done(&["ls", &scratch.at("/tree/closed")]), "");
    // One of several sources that is not to be read is as one file of a tree.
    let sources = ["tree/secret", "tree/a"].map(|name| scratch.shown(name));
    let output = as_nobody(&["cp", "-r", &sources[0], &sources[1], &scratch.at("/")]);
    assert!(left_out(&output).contains("tree/secret: permission denied"));
    assert_eq!(scratch.cat("/a/f"), "content");
}

#[test]
fn what_cannot_be_written_on_the_host_is_named_and_the_rest_is_copied() {
    if !may_be_others() {
        return;
    }
    let scratch = Scratch::new("16M");
    for name in ["tree/a", "tree/d/f", "tree/z"] {
        scratch.file(name, "content");
    }
    succeeded(&scratch.copy_in(&["tree"]));
    // There is a directory that somebody else may not write to.
    fs::create_dir_all(scratch.path("out/tree/d")).unwrap();
    for name in ["out", "out/tree"] {
        chown(scratch.path(name), Some(NOBODY), Some(NOBODY)).unwrap();
    }
    for name in ["", "v"] {
        fs::set_permissions(scratch.path(name), fs::Permissions::from_mode(0o755)).unwrap();
    }
    let output = as_nobody(&["cp", "-r", &scratch.at("/tree"), &scratch.shown("out")]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("out/tree/d/f: permission denied"), "{said}");
    for name in ["out/tree/a", "out/tree/z"] {
        assert_eq!(fs::read_to_string(scratch.path(name)).unwrap(), "content");
    }
}

#[test]
fn what_is_in_the_way_of_one_file_keeps_no_other_from_being_copied() {
    let scratch = Scratch::new("16M");
    for name in ["tree/a", "tree/d/f", "tree/f", "tree/g", "tree/z"] {
        scratch.file(name, "content");
    }
    succeeded(&scratch.copy_in(&["tree"]));
    // A directory, a link that leads nowhere, and a file in the place of a directory.
    fs::create_dir_all(scratch.path("out/tree/f")).unwrap();
    symlink("nowhere", scratch.path("out/tree/g")).unwrap();
    scratch.file("out/tree/d", "in the way");
    let said = left_out(&scratch.copy_out(&["tree"], "out"));
    assert_eq!(said.lines().count(), 3, "{said}");
    for name in ["d", "f", "g"] {
        assert!(said.contains(&format!("{}: ", scratch.shown(&format!("out/tree/{name}")))));
    }
    for name in ["a", "z"] {
        let copied = scratch.path("out/tree").join(name);
        assert_eq!(fs::read_to_string(copied).unwrap(), "content");
    }
    // The other way.
    fs::create_dir(scratch.path("other")).unwrap();
    fs::create_dir_all(scratch.path("other/tree/f")).unwrap();
    for (name, content) in [("d", "in the way"), ("new", "new")] {
        scratch.file(&format!("other/tree/{name}"), content);
    }
    let said = left_out(&scratch.copy_in(&["other/tree"]));
    assert_eq!(said.lines().count(), 2, "{said}");
    assert_eq!(scratch.cat("/tree/new") + &scratch.cat("/tree/f"), "newcontent");
}

#[test]
fn a_directory_of_the_volume_that_cannot_be_read_is_named_and_the_rest_is_copied() {
    let scratch = Scratch::new("16M");
    for name in ["tree/a", "tree/z"] {
        scratch.file(name, "content");
    }
    succeeded(&scratch.copy_in(&["tree"]));
    let volume = scratch.open();
    let dir = volume.create_dir("/tree/many", 0o755).unwrap().ino;
    for number in 0..2000 {
        let name = format!("{number:0>200}").into_bytes();
        volume.link(volume.resolve("/tree/a", true).unwrap(), dir, &name).unwrap();
    }
    volume.close().unwrap();
    drop(volume);
    scratch.spoil_leaf_of("dirent", dir);
    let output = scratch.copy_out(&["tree"], "out");
    let said = left_out(&output);
    assert!(said.contains(&format!("weir: {}: corrupt", scratch.at("/tree/many"))), "{said}");
    for name in ["out/a", "out/z"] {
        assert_eq!(fs::read_to_string(scratch.path(name)).unwrap(), "content");
    }
    // By itself it is an error as any other.
    assert_eq!(scratch.copy_out(&["tree/many"], "alone").status.code(), Some(1));
}

#[test]
fn attributes_that_cannot_be_listed_are_missed() {
    let scratch = Scratch::new("16M");
    scratch.file("f", "content");
    succeeded(&scratch.copy_in(&["f"]));
    let volume = scratch.open();
    let ino = volume.metadata("/f").unwrap().ino;
    for number in 0..60 {
        let name = format!("user.{number}").into_bytes();
        volume.setxattr(ino, &name, &[7; 4000], weir::XattrMode::Set).unwrap();
    }
    volume.close().unwrap();
    drop(volume);
    scratch.spoil_leaf_of("xattr", ino);
    let said = left_out(&scratch.copy_out(&["f"], "out"));
    assert!(said.contains(&format!("{}: corrupt", scratch.shown("out"))), "{said}");
    assert!(said.ends_with("(without its attributes)"), "{said}");
    assert_eq!(fs::read_to_string(scratch.path("out")).unwrap(), "content");
}

#[test]
fn an_owner_who_is_not_kept_is_missed_by_root_and_counted_for_others() {
    if !may_be_others() {
        return;
    }
    let scratch = Scratch::new("16M");
    for name in ["tree/a", "tree/b"] {
        scratch.file(name, "content");
        chown(scratch.path(name), Some(1), Some(1)).unwrap();
    }
    chown(scratch.path("tree"), Some(1), Some(1)).unwrap();
    succeeded(&scratch.copy_in(&["tree"]));
    fs::set_permissions(&scratch.volume, fs::Permissions::from_mode(0o644)).unwrap();
    fs::set_permissions(scratch.dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let (from, to) = (scratch.at("/tree"), scratch.shown("of-root"));
    let privileges = ["--bounding-set", "-chown", "--inh-caps", "-chown"];
    let said = left_out(&with_privileges(&privileges, &["cp", "-r", &from, &to]));
    assert_eq!(said.lines().count(), 3, "{said}");
    for name in ["", "/a", "/b"] {
        let line = format!("weir: {to}{name}: operation not permitted (the owner is not kept)");
        assert!(said.lines().any(|said| said == line), "{said}");
    }
    let output = as_nobody(&["cp", "-r", &from, &scratch.shown("of-nobody")]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && said.lines().count() == 1, "{said}");
    assert!(said.contains("3 copies belong to you"), "{said}");
    for dir in ["of-root", "of-nobody"] {
        let copied = scratch.path(dir).join("a");
        assert_eq!(fs::read_to_string(copied).unwrap(), "content");
    }
}

#[test]
fn the_help_says_what_the_exit_code_means() {
    assert!(done(&["cp", "--help"]).contains("1 not all: what was left out"));
}
