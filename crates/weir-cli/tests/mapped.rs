//! What programs store through shared mappings, which only the kernel knows of until somebody asks it. Skipped, with a word, where
//! this machine cannot mount, or has no Python.
#![allow(missing_docs)]

mod common;

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use common::{Bench, Server, done, weir};

const OVER_DEV_FUSE: &[&str] = &["-o", "no_io_uring"];

/// Maps a file, fills it with sevens, says so, and keeps it mapped until it is killed.
const PROGRAM: &str = "
import mmap, sys
with open(sys.argv[1], 'r+b') as file:
    mapping = mmap.mmap(file.fileno(), 0)
    mapping[:] = b'\\x07' * len(mapping)
    print('stored', flush=True)
    sys.stdin.read()
";

struct Mapper(Child);

impl Drop for Mapper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A program that has filled `path`, of this length, through a mapping. `None`: no Python here.
fn store(path: &Path, length_bytes: u64) -> Option<Mapper> {
    File::create(path).unwrap().set_len(length_bytes).unwrap();
    let child = Command::new("python3")
        .args(["-c", PROGRAM, path.to_str().unwrap()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let Ok(mut child) = child else {
        eprintln!("skipped: no python3 here");
        return None;
    };
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "stored\n");
    Some(Mapper(child))
}

/// Takes the server away as a power cut would, and mounts what is left.
fn crash(bench: &Bench, server: Server, mappers: Vec<Mapper>) {
    server.signal(9);
    server.end();
    let _ = weir_mount::mount_point::detach(Path::new(&bench.dir()), true);
    drop(mappers);
    bench.mount(&[]);
}

fn survives(command: &[&str], options: &[&str]) {
    const LENGTH_BYTES: u64 = 10_000_001;
    let Some(bench) = Bench::new() else { return };
    let server = bench.foreground_with(options);
    let mut mappers = Vec::new();
    for name in ["a", "b"] {
        let Some(mapper) = store(&bench.at(name), LENGTH_BYTES) else {
            return bench.unmount();
        };
        mappers.push(mapper);
    }
    let dir = bench.dir();
    done(&[command, &[&dir]].concat());
    crash(&bench, server, mappers);
    for name in ["a", "b"] {
        let found = fs::read(bench.at(name)).unwrap();
        assert_eq!(found.len() as u64, LENGTH_BYTES, "{command:?} {options:?}");
        let lost = found.iter().filter(|byte| **byte != 7).count();
        assert_eq!(lost, 0, "bytes lost after weir {command:?} {options:?}");
    }
    bench.unmount();
}

#[test]
fn a_sync_of_a_mount_takes_along_what_was_stored_through_mappings() {
    survives(&["sync"], &[]);
    survives(&["sync"], OVER_DEV_FUSE);
}

#[test]
fn a_barrier_comes_after_what_was_stored_through_mappings() {
    survives(&["barrier", "--wait"], &[]);
    survives(&["barrier", "--wait"], OVER_DEV_FUSE);
}

#[test]
fn where_data_is_takes_along_what_was_stored_through_mappings() {
    for options in [&[][..], OVER_DEV_FUSE] {
        let Some(bench) = Bench::mounted(options) else { return };
        let Some(mapper) = store(&bench.at("f"), 1 << 20) else { return bench.unmount() };
        let file = File::open(bench.at("f")).unwrap();
        let data = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(0));
        assert_eq!(data, Ok(0), "{options:?}");
        let hole = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(0));
        assert_eq!(hole, Ok(1 << 20), "{options:?}");
        let copied = Command::new("cp").args([bench.at("f"), bench.at("copy")]).status().unwrap();
        assert!(copied.success());
        let copy = fs::read(bench.at("copy")).unwrap();
        assert!(copy.len() == 1 << 20 && copy.iter().all(|byte| *byte == 7), "{options:?}");
        drop((file, mapper));
        bench.unmount();
    }
}

#[test]
fn a_sync_says_that_what_was_stored_does_not_fit() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    // The volume has 128 MiB.
    let mapper = store(&bench.at("large"), 300 << 20);
    if mapper.is_some() {
        let output = weir(&["sync", &bench.dir()]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("no space left"), "{said}");
    }
    drop(mapper);
    bench.unmount();
}
