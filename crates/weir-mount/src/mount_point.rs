//! Attaching `/dev/fuse` to a directory and taking it off again.
//!
//! `mount(2)` is used directly; where that is not allowed (an ordinary user), the `fusermount3`
//! helper does it and passes the connection back over a socket. No library of C is needed.
//! (`fuser` can mount too, but on its way out it takes whatever is mounted at the path *then*,
//! so that a new mount at the same place could be lost.)
//!
//! Nothing here may touch a path below a mount that is not served yet, or by the process that
//! serves it: the kernel would wait for an answer from us. Mounts are looked up in
//! `/proc/self/mountinfo` instead.

use std::ffi::{CString, OsStr, OsString};
use std::fs;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
use rustix::io::{Errno, FdFlags};
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::error::{MountError, UnmountError, User};
use crate::options::{Atime, MountOptions};

const FUSE_DEVICE: &str = "/dev/fuse";
/// Shown as the file system's type: `fuse.weir`.
const SUBTYPE: &str = "weir";

/// A line of `/proc/self/mountinfo`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountEntry {
    /// Device number, `major:minor`.
    pub device: String,
    /// Where.
    pub dir: PathBuf,
    /// Type with subtype, e.g. `fuse.weir`.
    pub fs_type: String,
    /// What.
    pub source: OsString,
    /// Mounted for reading only.
    pub read_only: bool,
}

/// Undoes the octal escapes of `/proc` files.
fn unescape(text: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, tail)) = rest.split_first() {
        let code = match tail {
            [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..] if first == b'\\' => {
                Some((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'))
            }
            _ => None,
        };
        bytes.push(code.unwrap_or(first));
        rest = if code.is_some() { &tail[3..] } else { tail };
    }
    OsString::from_vec(bytes)
}

fn parse_mount_entry(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|&byte| byte == b' ');
    let device = String::from_utf8(fields.nth(2)?.to_vec()).ok()?;
    let dir = PathBuf::from(unescape(fields.nth(1)?));
    let read_only = fields.next()?.split(|&byte| byte == b',').any(|option| option == b"ro");
    // A varying number of optional fields ends with a single dash.
    fields.find(|field| *field == b"-")?;
    let fs_type = String::from_utf8(fields.next()?.to_vec()).ok()?;
    let source = unescape(fields.next()?);
    Some(MountEntry { device, dir, fs_type, source, read_only })
}

/// Every mount this process can see, oldest first.
pub fn mounts() -> io::Result<Vec<MountEntry>> {
    let text = fs::read("/proc/self/mountinfo")?;
    Ok(text.split(|&byte| byte == b'\n').filter_map(parse_mount_entry).collect())
}

/// Mounts of the file system with this device number that this process can see, oldest first.
pub fn mounts_of(device: &str) -> io::Result<Vec<MountEntry>> {
    Ok(mounts()?.into_iter().filter(|entry| entry.device == device).collect())
}

/// A mount of the file system with this device number, for people: `mounted at DIR`, or in another
/// mount namespace. `None`: there is none, as far as this process can see.
pub fn held_by(device: &str) -> Option<String> {
    if let Some(entry) = mounts_of(device).ok()?.pop() {
        return Some(format!("mounted at {}", entry.dir.display()));
    }
    let processes = fs::read_dir("/proc").ok()?;
    processes.flatten().find_map(|process| {
        let pid = process.file_name().to_str()?.parse::<u32>().ok()?;
        let text = fs::read(process.path().join("mountinfo")).ok()?;
        let entries = text.split(|&byte| byte == b'\n').filter_map(parse_mount_entry);
        let entry = entries.into_iter().find(|entry| entry.device == device)?;
        let user = User { pid, name: name_of(&process.path()) };
        Some(format!("mounted at {} in the namespace of {user}", entry.dir.display()))
    })
}

/// The topmost mount at exactly `dir` (which must be canonical).
pub fn mount_at(dir: &Path) -> io::Result<Option<MountEntry>> {
    Ok(mounts()?.into_iter().rev().find(|entry| entry.dir == dir))
}

/// The number of the mount that `dir` is on, the topmost if it is a mount point, which no other has while the system runs; `None`: there is no
/// such directory, or no such number (before Linux 6.8). Nobody who serves the mount is asked.
pub fn unique_id(dir: &Path) -> Option<u64> {
    /// `STATX_MNT_ID_UNIQUE`.
    const UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);
    let flags = AtFlags::NO_AUTOMOUNT | AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
    let found = rustix::fs::statx(rustix::fs::CWD, dir, flags, UNIQUE).ok()?;
    (found.stx_mask & UNIQUE.bits() != 0).then_some(found.stx_mnt_id)
}

/// Whether the kernel still sends requests over a connection: nobody has ended it, and its mount is somewhere still.
pub fn is_connected(connection: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(connection, PollFlags::IN)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    match rustix::event::poll(&mut polled, Some(&at_once)) {
        Ok(_) => !polled[0].revents().contains(PollFlags::ERR),
        Err(_) => true,
    }
}

/// The canonical form of `path` as far as its last name, of which nobody is asked what it is: a file system that is mounted there may have a
/// server that does not answer.
pub fn canonical_unasked(path: &Path) -> io::Result<PathBuf> {
    let absolute = std::path::absolute(path)?;
    let (Some(parent), Some(name)) = (absolute.parent(), absolute.file_name()) else {
        return absolute.canonicalize();
    };
    Ok(parent.canonicalize()?.join(name))
}

fn kernel_flags(options: &MountOptions, privileged: bool) -> MountFlags {
    let wanted = [
        (options.read_only, MountFlags::RDONLY),
        (!options.suid.unwrap_or(privileged), MountFlags::NOSUID),
        (!options.dev.unwrap_or(privileged), MountFlags::NODEV),
        (!options.exec, MountFlags::NOEXEC),
        (options.atime == Atime::Never, MountFlags::NOATIME),
        (options.atime == Atime::Relative, MountFlags::RELATIME),
        (options.atime == Atime::Strict, MountFlags::STRICTATIME),
        (options.sync, MountFlags::SYNCHRONOUS),
        (options.dirsync, MountFlags::DIRSYNC),
    ];
    wanted
        .into_iter()
        .filter(|(on, _)| *on)
        .fold(MountFlags::empty(), |flags, (_, flag)| flags | flag)
}

/// Mounts at `dir` (canonical) and returns the connection to the kernel.
pub fn attach(dir: &Path, options: &MountOptions) -> Result<OwnedFd, MountError> {
    let privileged = rustix::process::geteuid().is_root();
    let device = rustix::fs::open(FUSE_DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(|error| match error {
            Errno::NOENT | Errno::NODEV | Errno::NXIO => MountError::NoFuse,
            error @ (Errno::MFILE | Errno::NFILE) => MountError::Session(error.into()),
            error => MountError::FuseDevice(error.into()),
        })?;
    let mut data = format!(
        "fd={},rootmode=40000,user_id={},group_id={},default_permissions,subtype={SUBTYPE}",
        device.as_raw_fd(),
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw(),
    );
    if options.allow_other.unwrap_or(privileged) {
        data.push_str(",allow_other");
    }
    let data = CString::new(data).map_err(|_| MountError::Name)?;
    let source = CString::new(options.fs_name.as_bytes()).map_err(|_| MountError::Name)?;
    let flags = kernel_flags(options, privileged);
    match rustix::mount::mount(source.as_c_str(), dir, "fuse", flags, data.as_c_str()) {
        Ok(()) => Ok(device),
        Err(Errno::PERM) => {
            drop(device);
            attach_with_helper(dir, options)
        }
        Err(Errno::NODEV) => Err(MountError::NoFuse),
        Err(error) => Err(MountError::Mount(error.into())),
    }
}

/// Gives what is mounted at `dir` (canonical) the options that are the kernel's: read-only or not, what works there, whether changes are
/// waited for. Those of its server stay.
pub fn remount(dir: &Path, options: &MountOptions) -> io::Result<()> {
    let privileged = rustix::process::geteuid().is_root();
    Ok(rustix::mount::mount_remount(dir, kernel_flags(options, privileged), c"")?)
}

fn helper_options(options: &MountOptions) -> OsString {
    let mut list = b"fsname=".to_vec();
    for &byte in options.fs_name.as_bytes() {
        if matches!(byte, b'\\' | b',') {
            list.push(b'\\');
        }
        list.push(byte);
    }
    let mut list = OsString::from_vec(list);
    list.push(format!(",subtype={SUBTYPE},default_permissions"));
    let switches = [
        (options.read_only, "ro"),
        (options.allow_other == Some(true), "allow_other"),
        (options.suid != Some(true), "nosuid"),
        (options.dev != Some(true), "nodev"),
        (!options.exec, "noexec"),
        (options.atime == Atime::Never, "noatime"),
        (options.sync, "sync"),
        (options.dirsync, "dirsync"),
    ];
    for (_, name) in switches.into_iter().filter(|(on, _)| *on) {
        list.push(",");
        list.push(name);
    }
    list
}

fn attach_with_helper(dir: &Path, options: &MountOptions) -> Result<OwnedFd, MountError> {
    let (ours, theirs) = UnixStream::pair().map_err(MountError::Mount)?;
    rustix::io::fcntl_setfd(&theirs, FdFlags::empty())
        .map_err(|error| MountError::Mount(error.into()))?;
    let helper = Command::new("fusermount3")
        .arg("-o")
        .arg(helper_options(options))
        .arg("--")
        .arg(dir)
        .env("_FUSE_COMMFD", theirs.as_raw_fd().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => MountError::NoHelper,
            _ => MountError::Mount(error),
        })?;
    drop(theirs);
    let connection = receive_descriptor(&ours);
    let output = helper.wait_with_output().map_err(MountError::Mount)?;
    match connection {
        Ok(Some(connection)) => Ok(connection),
        Ok(None) => {
            let said = String::from_utf8_lossy(&output.stderr);
            let said = said.lines().next().unwrap_or("it gave no reason").trim();
            Err(MountError::Helper(said.trim_start_matches("fusermount3: ").to_owned()))
        }
        Err(error) => Err(MountError::Mount(error.into())),
    }
}

/// One descriptor from the socket; `None` when the other side closed it without sending one.
fn receive_descriptor(socket: impl AsFd) -> Result<Option<OwnedFd>, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(&socket, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(mut descriptors) = message
            && let Some(descriptor) = descriptors.next()
        {
            return Ok(Some(descriptor));
        }
    }
    Ok(None)
}

/// How often, and after how long each time, an unmount is tried again that nobody can be seen to be in the way of.
const BUSY_ATTEMPTS: u32 = 20;
const BUSY_PAUSE: Duration = Duration::from_millis(25);

/// Unmounts `dir`; `lazy` detaches it now and lets its users finish. Where nobody can be seen who uses it, that may be somebody who has only
/// looked at it: he is given half a second.
pub fn detach(dir: &Path, lazy: bool) -> Result<(), UnmountError> {
    until_unseen_users_are_gone(|| detach_once(dir, lazy), || std::thread::sleep(BUSY_PAUSE))
}

fn until_unseen_users_are_gone(
    attempt: impl Fn() -> Result<(), UnmountError>,
    pause: impl Fn(),
) -> Result<(), UnmountError> {
    for _ in 1..BUSY_ATTEMPTS {
        match attempt() {
            Err(UnmountError::Busy(users)) if users.is_empty() => pause(),
            result => return result,
        }
    }
    attempt()
}

fn detach_once(dir: &Path, lazy: bool) -> Result<(), UnmountError> {
    let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match rustix::mount::unmount(dir, flags | UnmountFlags::NOFOLLOW) {
        Ok(()) => Ok(()),
        Err(Errno::BUSY) => Err(UnmountError::Busy(users_of(dir))),
        Err(Errno::INVAL) => Err(UnmountError::NotMounted),
        Err(Errno::PERM) => detach_with_helper(dir, lazy),
        Err(error) => Err(UnmountError::Io(error.into())),
    }
}

fn detach_with_helper(dir: &Path, lazy: bool) -> Result<(), UnmountError> {
    let mut helper = Command::new("fusermount3");
    helper.arg(if lazy { "-uz" } else { "-u" }).arg("--").arg(dir);
    let output = helper.stdin(Stdio::null()).output().map_err(UnmountError::Io)?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("busy") {
        return Err(UnmountError::Busy(users_of(dir)));
    }
    Err(UnmountError::Io(io::Error::other(said.lines().next().unwrap_or("failed").to_owned())))
}

/// Ends the connection of the mount with this device number at `dir`, whoever uses it: every request gets an error, those under way and
/// those to come. The mount stays until it is taken off.
pub fn abort(dir: &Path, device: &str) -> io::Result<()> {
    let number = device.rsplit(':').next().unwrap_or_default();
    let by_file = fs::write(format!("/sys/fs/fuse/connections/{number}/abort"), "1");
    let Err(error) = by_file else { return Ok(()) };
    // That file system need not be mounted. A forced unmount aborts as well, even if it does not take the mount off.
    if mount_at(dir)?.is_none_or(|entry| entry.device != device) {
        return Err(error);
    }
    match rustix::mount::unmount(dir, UnmountFlags::FORCE | UnmountFlags::NOFOLLOW) {
        Ok(()) | Err(Errno::BUSY) => Ok(()),
        Err(_) => Err(error),
    }
}

/// The name of a process, by its directory.
fn name_of(process: &Path) -> String {
    let name = fs::read(process.join("comm")).unwrap_or_default();
    OsStr::from_bytes(name.trim_ascii_end()).to_string_lossy().into_owned()
}

/// Processes that keep `dir` busy: by working directory, root, or an open file.
pub fn users_of(dir: &Path) -> Vec<User> {
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    let mut users = Vec::new();
    for process in processes.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok())
        else {
            continue;
        };
        let base = process.path();
        let below = |link: &Path| fs::read_link(link).is_ok_and(|target| target.starts_with(dir));
        let open_file = || {
            fs::read_dir(base.join("fd"))
                .is_ok_and(|mut files| files.any(|file| file.is_ok_and(|file| below(&file.path()))))
        };
        if below(&base.join("cwd"))
            || below(&base.join("root"))
            || below(&base.join("exe"))
            || open_file()
        {
            users.push(User { pid, name: name_of(&base) });
        }
    }
    users
}

/// Lets the kernel read further ahead than its default of 128 KiB. Best effort: only root can.
pub fn set_read_ahead(device: &str, bytes: u32) {
    let file = format!("/sys/class/bdi/{device}/read_ahead_kb");
    let _ = fs::write(file, (bytes / 1024).to_string());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_only_looks_at_a_mount_keeps_nobody_from_taking_it_off() {
        let tried = |frees_after: u32, users: &[User]| {
            let attempts = std::cell::Cell::new(0);
            let attempt = || {
                attempts.set(attempts.get() + 1);
                let is_free = attempts.get() > frees_after;
                if is_free { Ok(()) } else { Err(UnmountError::Busy(users.to_vec())) }
            };
            let result = until_unseen_users_are_gone(attempt, || ());
            (result.is_ok(), attempts.get())
        };
        assert_eq!(tried(0, &[]), (true, 1));
        assert_eq!(tried(2, &[]), (true, 3));
        assert_eq!(tried(u32::MAX, &[]), (false, BUSY_ATTEMPTS));
        // Who can be seen is told about at once.
        let user = User { pid: 7, name: "sh".to_owned() };
        assert_eq!(tried(2, &[user]), (false, 1));
    }

    #[test]
    fn a_mountinfo_line_with_any_number_of_optional_fields_is_understood() {
        let line =
            b"36 35 0:98 / /mnt/a\\040b rw,noatime shared:1 master:2 - fuse.weir /v\\134x rw";
        let entry = parse_mount_entry(line).unwrap();
        assert_eq!(entry.device, "0:98");
        assert_eq!(entry.dir, Path::new("/mnt/a b"));
        assert_eq!(entry.fs_type, "fuse.weir");
        assert_eq!(entry.source, "/v\\x");
        assert!(!entry.read_only);
        let plain = b"1 0 8:1 / / noatime,ro - ext4 /dev/sda1 rw";
        let entry = parse_mount_entry(plain).unwrap();
        assert!(entry.dir == Path::new("/") && entry.read_only);
        assert_eq!(parse_mount_entry(b"garbage"), None);
    }

    #[test]
    fn escapes_are_undone_and_a_lone_backslash_stays() {
        assert_eq!(unescape(b"a\\011b"), "a\tb");
        assert_eq!(unescape(b"a\\"), "a\\");
        assert_eq!(unescape(b"\\09"), "\\09");
    }

    #[test]
    fn root_gets_a_full_mount_and_a_user_a_safe_one() {
        let options = MountOptions::default();
        assert!(!kernel_flags(&options, true).intersects(MountFlags::NOSUID | MountFlags::NODEV));
        assert!(kernel_flags(&options, false).contains(MountFlags::NOSUID | MountFlags::NODEV));
    }

    #[test]
    fn what_is_asked_of_a_mount_is_asked_of_the_kernel_and_nothing_else_whoever_mounts() {
        let apply = |list: &str| {
            let mut options = MountOptions { fs_name: "v".into(), ..MountOptions::default() };
            options.apply(list).unwrap();
            options
        };
        let safe = MountFlags::NOSUID | MountFlags::NODEV;
        let none = MountFlags::empty();
        // Flags by root, by a user, and what the helper is told.
        for (list, by_root, by_user, told) in [
            ("rw", none, safe, "nosuid,nodev"),
            ("ro", MountFlags::RDONLY, safe | MountFlags::RDONLY, "ro,nosuid,nodev"),
            ("nosuid", MountFlags::NOSUID, safe, "nosuid,nodev"),
            ("nodev", MountFlags::NODEV, safe, "nosuid,nodev"),
            ("suid", none, MountFlags::NODEV, "nodev"),
            ("dev", none, MountFlags::NOSUID, "nosuid"),
            ("noexec", MountFlags::NOEXEC, safe | MountFlags::NOEXEC, "nosuid,nodev,noexec"),
            ("sync", MountFlags::SYNCHRONOUS, safe | MountFlags::SYNCHRONOUS, "nosuid,nodev,sync"),
            ("dirsync", MountFlags::DIRSYNC, safe | MountFlags::DIRSYNC, "nosuid,nodev,dirsync"),
            ("allow_other", none, safe, "allow_other,nosuid,nodev"),
        ] {
            let options = apply(list);
            let times = MountFlags::RELATIME;
            assert_eq!(kernel_flags(&options, true), by_root | times, "{list}");
            assert_eq!(kernel_flags(&options, false), by_user | times, "{list}");
            let expected = format!("fsname=v,subtype=weir,default_permissions,{told}");
            assert_eq!(helper_options(&options), OsStr::new(&expected), "{list}");
        }
        for (list, times) in
            [("noatime", MountFlags::NOATIME), ("strictatime", MountFlags::STRICTATIME)]
        {
            assert_eq!(kernel_flags(&apply(list), true), times);
        }
    }

    #[test]
    fn a_comma_in_the_volume_name_does_not_become_an_option() {
        let options = MountOptions { fs_name: "a,suid".into(), ..MountOptions::default() };
        assert!(helper_options(&options).as_bytes().starts_with(b"fsname=a\\,suid,"));
    }

    #[test]
    fn a_process_with_its_working_directory_below_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let canonical = dir.path().canonicalize().unwrap();
        let mut child = Command::new("sleep").arg("30").current_dir(dir.path()).spawn().unwrap();
        let users = users_of(&canonical);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(users.iter().any(|user| user.pid == child.id() && user.name == "sleep"));
    }
}
