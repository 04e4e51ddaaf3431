//! Who serves mounts, and which volumes these processes have open.
//!
//! The source of a mount is the name that its volume had when it was mounted. The volume may have been renamed since, and something
//! else have that name. What a server has open stays the same file whatever it is called, so that is what is looked at, in `/proc`: of
//! the processes that this one may look into (its user's own; for root all), and where the kernel tells which connection a descriptor of
//! `/dev/fuse` belongs to (Linux 6.16). No server is asked anything: one that hangs is seen as any other.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, statx};

use crate::mount_point::{self, MountEntry};

/// The type of a mount of ours, as the kernel shows it.
pub const MOUNT_TYPE: &str = "fuse.weir";

/// What tells that two names lead to the same file or block device, whatever they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Identity {
    /// A file: the device number of its file system, and its number there.
    File((u32, u32), u64),
    /// A block device, whichever node it is named by.
    Device((u32, u32)),
}

impl Identity {
    /// Of what `path` leads to; `None` for anything but a file or block device. The file system that it is on is not asked for news.
    pub fn of(path: &Path) -> Option<Self> {
        let flags = AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
        let found = statx(CWD, path, flags, StatxFlags::TYPE | StatxFlags::INO).ok()?;
        match FileType::from_raw_mode(found.stx_mode.into()) {
            FileType::RegularFile => {
                Some(Self::File((found.stx_dev_major, found.stx_dev_minor), found.stx_ino))
            }
            FileType::BlockDevice => {
                Some(Self::Device((found.stx_rdev_major, found.stx_rdev_minor)))
            }
            _ => None,
        }
    }

    /// What the host tells of a loop device.
    fn loop_attribute(self, name: &str) -> Option<Vec<u8>> {
        let Self::Device((major, minor)) = self else { return None };
        fs::read(format!("/sys/dev/block/{major}:{minor}/loop/{name}")).ok()
    }

    /// What the file behind a loop device is called.
    pub fn file_behind(self) -> Option<PathBuf> {
        let file = self.loop_attribute("backing_file")?;
        let file = file.strip_suffix(b"\n").unwrap_or(&file);
        Some(PathBuf::from(OsStr::from_bytes(file)))
    }

    /// The file behind a loop device, and whether the device begins where that does.
    fn behind(self) -> Option<(Self, bool)> {
        let file = Self::of(&self.file_behind()?)?;
        let begins = self.loop_attribute("offset").is_some_and(|at| at.trim_ascii() == b"0");
        Some((file, begins))
    }
}

/// A file or block device that a server has open, and has locked: a volume, or what is behind one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenVolume {
    identity: Identity,
    /// The descriptor in `/proc`, which leads to the file itself.
    descriptor: PathBuf,
}

impl OpenVolume {
    /// What it is called now.
    pub fn path(&self) -> Option<PathBuf> {
        fs::read_link(&self.descriptor).ok()
    }

    /// Opens it once more, for reading.
    pub fn open(&self) -> io::Result<File> {
        File::open(&self.descriptor)
    }
}

/// A process that serves mounts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    pid: u32,
    /// Device numbers of its mounts: [`MountEntry::device`].
    mounts: Vec<String>,
    volumes: Vec<OpenVolume>,
}

impl Server {
    /// Its number.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether it is stopped (`SIGSTOP`), and so answers nobody until it is let go on.
    pub fn is_stopped(&self) -> bool {
        let stat = fs::read(format!("/proc/{}/stat", self.pid));
        stat.is_ok_and(|stat| is_stopped(&stat))
    }

    /// Whether it serves this mount.
    pub fn serves(&self, mount: &MountEntry) -> bool {
        self.mounts.contains(&mount.device)
    }

    /// Whether it has this volume open, be it by way of a loop device.
    pub fn has_open(&self, volume: Identity) -> bool {
        // Several devices that begin elsewhere show parts of one file: each is a volume of its own.
        let behind = volume.behind().and_then(|(file, begins)| begins.then_some(file));
        self.volumes.iter().any(|open| {
            open.identity == volume
                || behind == Some(open.identity)
                || open.identity.behind().is_some_and(|(file, _)| file == volume)
        })
    }

    /// The volume of its mount; `None` where it has several.
    pub fn volume(&self) -> Option<&OpenVolume> {
        let is_device = |open: &&OpenVolume| matches!(open.identity, Identity::Device(_));
        // With a loop device it has also locked the file behind that.
        let has_device = self.volumes.iter().any(|open| is_device(&open));
        let mut candidates = self.volumes.iter().filter(|open| is_device(open) == has_device);
        let first = candidates.next()?;
        let is_one = candidates.all(|other| other.identity == first.identity);
        (is_one && self.mounts.len() == 1).then_some(first)
    }
}

/// The processes that serve mounts of ours, as far as can be seen: see the module's head. Nobody is looked for where there are none.
pub fn servers() -> Vec<Server> {
    let mounts = mount_point::mounts().unwrap_or_default();
    let mounts = mounts.into_iter().filter(|entry| entry.fs_type == MOUNT_TYPE);
    let devices: Vec<String> = mounts.map(|entry| entry.device).collect();
    if devices.is_empty() {
        return Vec::new();
    }
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    let is_process = |name: &OsStr| name.as_bytes().iter().all(u8::is_ascii_digit);
    let processes = processes.flatten().filter(|entry| is_process(&entry.file_name()));
    processes.filter_map(|process| server(&process.path(), &devices)).collect()
}

/// Whether a process with this `/proc/PID/stat` is stopped: the letter behind its name, which may have anything in it.
fn is_stopped(stat: &[u8]) -> bool {
    let behind = stat.iter().rposition(|&byte| byte == b')').map(|at| &stat[at + 1..]);
    matches!(behind.and_then(|behind| behind.trim_ascii_start().first()), Some(b'T' | b't'))
}

/// What is known of the process with this directory, if it serves one of the mounts with these device numbers.
fn server(process: &Path, devices: &[String]) -> Option<Server> {
    let pid = process.file_name()?.to_str()?.parse().ok()?;
    let (mut mounts, mut others) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(process.join("fd")).ok()?.flatten() {
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let told = process.join("fdinfo").join(entry.file_name());
        // As a rule /dev/fuse; a container may have it elsewhere.
        if target.file_name() != Some(OsStr::new("fuse")) {
            others.push((entry.path(), told));
        } else if let Some(device) = fs::read(told).ok().and_then(|text| connection(&text))
            && devices.contains(&device)
            && !mounts.contains(&device)
        {
            mounts.push(device);
        }
    }
    if mounts.is_empty() {
        return None;
    }
    let is_locked = |told: &Path| fs::read(told).is_ok_and(|text| has_lock(&text));
    let locked = others.into_iter().filter(|(_, told)| is_locked(told));
    let volumes = locked.filter_map(|(descriptor, _)| {
        Some(OpenVolume { identity: Identity::of(&descriptor)?, descriptor })
    });
    Some(Server { pid, mounts, volumes: volumes.collect() })
}

/// The device number of the mount that a descriptor of `/dev/fuse` belongs to, from its `/proc/PID/fdinfo`.
fn connection(told: &[u8]) -> Option<String> {
    let mut lines = told.split(|&byte| byte == b'\n');
    let number = lines.find_map(|line| line.strip_prefix(b"fuse_connection:"))?;
    let number: u32 = std::str::from_utf8(number.trim_ascii()).ok()?.parse().ok()?;
    // As the kernel packs it.
    let (major, minor) = (number >> 20, number & 0xf_ffff);
    Some(format!("{major}:{minor}"))
}

/// Whether a descriptor holds a lock on its file as a whole, from its `/proc/PID/fdinfo`.
fn has_lock(told: &[u8]) -> bool {
    let mut lines = told.split(|&byte| byte == b'\n');
    lines.any(|line| {
        line.starts_with(b"lock:") && line.split(|&byte| byte == b' ').any(|word| word == b"FLOCK")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_tells_its_connection_and_its_lock() {
        let fuse = b"pos:\t0\nflags:\t0100002\nmnt_id:\t5\nino:\t7\nfuse_connection:\t98\n";
        assert_eq!(connection(fuse).as_deref(), Some("0:98"));
        assert_eq!(connection(b"pos:\t0\n"), None);
        assert_eq!(connection(b"fuse_connection:\tx\n"), None);
        let lock = b"pos:\t0\nlock:\t1: FLOCK  ADVISORY  WRITE 77 08:01:123 0 EOF\n";
        assert!(has_lock(lock) && !has_lock(fuse));
        assert!(!has_lock(b"lock:\t1: POSIX  ADVISORY  WRITE 77 08:01:123 0 EOF\n"));
    }

    #[test]
    fn a_process_tells_that_it_is_stopped() {
        assert!(is_stopped(b"77 (weir) T 1 77 77 0") && is_stopped(b"77 (a) S) t 1"));
        assert!(!is_stopped(b"77 (weir) S 1 77 77 0") && !is_stopped(b"77 (T) R 1"));
        assert!(!is_stopped(b"77 (weir)") && !is_stopped(b""));
    }

    #[test]
    fn a_file_is_the_same_by_all_of_its_names_and_no_other_is() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("file"), "").unwrap();
        fs::write(at("other"), "").unwrap();
        fs::hard_link(at("file"), at("again")).unwrap();
        std::os::unix::fs::symlink("file", at("link")).unwrap();
        let file = Identity::of(&at("file"));
        assert!(file.is_some() && file == Identity::of(&at("again")));
        assert_eq!(file, Identity::of(&at("link")));
        assert_ne!(file, Identity::of(&at("other")));
        fs::rename(at("file"), at("moved")).unwrap();
        assert_eq!(file, Identity::of(&at("moved")));
        for neither in [dir.path(), Path::new("/dev/null"), &at("none")] {
            assert_eq!(Identity::of(neither), None, "{}", neither.display());
        }
    }

    fn open(identity: Identity) -> OpenVolume {
        OpenVolume { identity, descriptor: "/nonexistent".into() }
    }

    #[test]
    fn the_volume_of_a_server_is_told_only_where_it_has_one() {
        let (one, two) = (Identity::File((8, 1), 1), Identity::File((8, 1), 2));
        let device = Identity::Device((7, 0));
        let volume_of = |mounts: &[&str], open_ones: &[Identity]| {
            let mounts = mounts.iter().map(|&mount| mount.to_owned()).collect();
            let volumes = open_ones.iter().copied().map(open).collect();
            let server = Server { pid: 7, mounts, volumes };
            server.volume().map(|volume| volume.identity)
        };
        assert_eq!(volume_of(&["0:1"], &[one]), Some(one));
        assert_eq!(volume_of(&["0:1"], &[one, device]), Some(device), "with what is behind it");
        assert_eq!(volume_of(&["0:1"], &[one, two]), None);
        assert_eq!(volume_of(&["0:1", "0:2"], &[one]), None);
        assert_eq!(volume_of(&["0:1"], &[]), None);
    }
}
