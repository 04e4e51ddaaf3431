//! A volume, a mount of it, and the `weir` program, for tests.
#![allow(dead_code, missing_docs)]

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;

pub fn can_mount() -> bool {
    let can = rustix::process::geteuid().is_root() && Path::new("/dev/fuse").exists();
    if !can {
        eprintln!("skipped: mounting needs root and /dev/fuse");
    }
    can
}

pub fn weir(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_weir")).args(arguments).stdin(Stdio::null()).output().unwrap()
}

/// With arguments that need not be text.
pub fn weir_of_bytes(arguments: &[&[u8]]) -> Output {
    let arguments = arguments.iter().map(|argument| OsStr::from_bytes(argument));
    let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
    command.args(arguments).stdin(Stdio::null()).output().unwrap()
}

pub fn done(arguments: &[&str]) -> String {
    let output = weir(arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "weir {arguments:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

pub fn refused(code: i32, arguments: &[&str]) -> String {
    let output = weir(arguments);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "weir {arguments:?}: {said}");
    assert_eq!(said.lines().count(), 1, "one line: {said}");
    said
}

pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_secs(30), "never happened: {what}");
        sleep(Duration::from_millis(10));
    }
}

/// A volume and a place to mount it; taken apart when dropped.
pub struct Bench {
    pub dir: TempDir,
}

impl Bench {
    pub fn new() -> Option<Self> {
        can_mount().then(|| {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir(dir.path().join("mnt")).unwrap();
            let bench = Self { dir };
            done(&["create", &bench.volume(), "--size", "128M"]);
            bench
        })
    }
    pub fn mounted(options: &[&str]) -> Option<Self> {
        let bench = Self::new()?;
        bench.mount(options);
        Some(bench)
    }
    pub fn volume(&self) -> String {
        self.dir.path().join("v").to_str().unwrap().to_owned()
    }
    pub fn dir(&self) -> String {
        self.dir.path().join("mnt").to_str().unwrap().to_owned()
    }
    pub fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join("mnt").join(name)
    }
    pub fn mount(&self, options: &[&str]) {
        let (volume, dir) = (self.volume(), self.dir());
        let mut arguments = vec!["mount", &volume, &dir, "--background"];
        arguments.extend(options);
        let printed = done(&arguments);
        assert!(printed.contains(" mounted at "), "{printed}");
    }
    /// A program that another test has just forked has our files open until it calls exec, so this may be busy for a moment.
    pub fn unmount(&self) {
        let mut said = String::new();
        for _ in 0..100 {
            let output = weir(&["umount", &self.dir()]);
            if output.status.success() {
                return;
            }
            said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(said.contains(": busy"), "{said}");
            sleep(Duration::from_millis(50));
        }
        panic!("{said}");
    }
    pub fn foreground(&self) -> Server {
        self.foreground_with(&[])
    }
    pub fn foreground_with(&self, options: &[&str]) -> Server {
        self.foreground_saying(options, Stdio::piped())
    }
    /// A server that says to `said` what it has to say.
    pub fn foreground_saying(&self, options: &[&str], said: Stdio) -> Server {
        let mut child = Command::new(env!("CARGO_BIN_EXE_weir"))
            .args(["mount", &self.volume(), &self.dir()])
            .args(options)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(said)
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains(" mounted at "), "{line}");
        Server(child)
    }
    pub fn is_mounted(&self) -> bool {
        let dir = Path::new(&self.dir()).to_owned();
        weir_mount::mount_point::mount_at(&dir).unwrap().is_some()
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        while self.is_mounted() {
            let _ = weir_mount::mount_point::detach(Path::new(&self.dir()), true);
        }
    }
}

/// A file as a block device, until it is dropped.
pub struct Loop(pub String);

impl Loop {
    /// `None` (and a word) where there can be none.
    pub fn new(file: &str, options: &[&str]) -> Option<Self> {
        let made = Command::new("losetup").args(options).args(["-f", "--show", file]).output();
        match made {
            Ok(output) if output.status.success() => {
                Some(Self(String::from_utf8(output.stdout).unwrap().trim().to_owned()))
            }
            _ => {
                eprintln!("skipped: loop devices need root and losetup");
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.0]).status();
    }
}

pub struct Server(pub Child);

impl Server {
    pub fn signal(&self, signal: i32) {
        let pid = rustix::process::Pid::from_raw(self.0.id() as i32).unwrap();
        let signal = rustix::process::Signal::from_named_raw(signal).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }
    /// Waits until it ended; its exit code and what it said.
    pub fn end(mut self) -> (Option<i32>, String) {
        let mut said = String::new();
        self.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        (self.0.wait().unwrap().code(), said)
    }
}

pub const SIGINT: i32 = 2;
pub const SIGTERM: i32 = 15;

/// A volume in a directory of its own.
pub struct Scratch {
    pub dir: TempDir,
    pub volume: String,
}

impl Scratch {
    pub fn new(size: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let volume = dir.path().join("v").to_str().unwrap().to_owned();
        done(&["create", &volume, "--size", size]);
        Self { dir, volume }
    }
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
    pub fn shown(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }
    pub fn at(&self, path: &str) -> String {
        format!("{}:{path}", self.volume)
    }
    /// A file of the host, and the directories above it.
    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        fs::create_dir_all(self.path(name).parent().unwrap()).unwrap();
        fs::write(self.path(name), content).unwrap();
        self.shown(name)
    }
}
