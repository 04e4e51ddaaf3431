//! The lock on a volume's file: how it is taken, and who has it.
//!
//! Whoever finds it taken does not wait, but for a process that is no more: what that had on its way through `io_uring` may end after it,
//! and the kernel gives the lock back with the last of it. Somebody who is started again right after `kill -9` would find the volume
//! in use by nobody otherwise. (That it stays locked for so long is as it should be: no write of a dead process comes late.)

use super::OpenMode;
use crate::{Error, Result};
use std::ffi::OsStr;
use std::fs::{File, Metadata, TryLockError};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Longest wait for what a dead process has on its way.
const GONE_PATIENCE: Duration = Duration::from_secs(10);
/// The same where the host does not say who has the lock: as of a process of another container, or a dead one of this.
const UNKNOWN_PATIENCE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(1);

/// Takes the lock for `mode`. Waits only for who is gone: see the module's head.
pub(super) fn lock(file: &File, mode: OpenMode) -> Result<()> {
    when_free(|| try_lock(file, mode), || holder(file).map_or(UNKNOWN_PATIENCE, patience_with))
}

/// How long a claim on a block device is waited for. One that nobody has a lock with is the host's.
pub(super) fn claim_patience(metadata: &Metadata) -> Duration {
    holder_of(metadata).map_or(Duration::ZERO, patience_with)
}

/// Tries until something is not in use, or has been for as long as `patience` says.
pub(super) fn when_free<T>(
    attempt: impl Fn() -> Result<T>,
    patience: impl Fn() -> Duration,
) -> Result<T> {
    let begun = Instant::now();
    loop {
        match attempt() {
            Err(Error::InUse(_)) if begun.elapsed() < patience() => sleep(PAUSE),
            done => return done,
        }
    }
}

/// The file behind a loop device that shows all of it, locked for `mode`: whoever opens that file as a volume and whoever opens the device
/// have the same one. Nothing for any other device, and where the host does not say, or does not show the file.
pub(super) fn behind(metadata: &Metadata, mode: OpenMode) -> Result<Option<File>> {
    let attribute = |name: &str| {
        let (major, minor) = (libc::major(metadata.rdev()), libc::minor(metadata.rdev()));
        std::fs::read(format!("/sys/dev/block/{major}:{minor}/loop/{name}")).ok()
    };
    let Some(path) = attribute("backing_file") else { return Ok(None) };
    // Several that show parts of a file are in nobody's way.
    if attribute("offset").is_none_or(|offset| offset.trim_ascii() != b"0") {
        return Ok(None);
    }
    let path = path.strip_suffix(b"\n").unwrap_or(&path);
    let Ok(file) = File::open(OsStr::from_bytes(path)) else { return Ok(None) };
    lock(&file, mode)?;
    Ok(Some(file))
}

fn try_lock(file: &File, mode: OpenMode) -> Result<()> {
    let taken = match mode {
        OpenMode::ReadOnly => file.try_lock_shared(),
        OpenMode::ReadWrite => file.try_lock(),
    };
    match taken {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(Error::InUse(describe_holder(file))),
        Err(TryLockError::Error(error)) => Err(error.into()),
    }
}

/// Who has claimed a block device: one of us, or the host.
pub(super) fn describe_claim(path: &Path) -> String {
    let locked = File::open(path).map_err(Error::from);
    match locked.and_then(|file| try_lock(&file, OpenMode::ReadOnly)) {
        Err(Error::InUse(holder)) => holder,
        _ => "the host has it mounted or otherwise claimed".to_owned(),
    }
}

/// Who holds the lock, as far as the host tells.
fn describe_holder(file: &File) -> String {
    let Some(pid) = holder(file) else { return "another process has it open".to_owned() };
    if pid == std::process::id() {
        return format!("this process ({pid}) has it open already");
    }
    match std::fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(name) => format!("process {pid} ({}) has it open", name.trim_end()),
        Err(_) => format!("process {pid} has it open"),
    }
}

fn holder(file: &File) -> Option<u32> {
    file.metadata().ok().and_then(|metadata| holder_of(&metadata))
}

fn holder_of(metadata: &Metadata) -> Option<u32> {
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    holder_in(&locks, metadata.dev(), metadata.ino())
}

/// The process that holds a `flock` on the file, from the text of `/proc/locks`, whose lines are
/// `1: FLOCK ADVISORY WRITE pid major:minor:inode start end` (`-> ` marks a waiter).
pub(super) fn holder_in(locks: &str, device: u64, inode: u64) -> Option<u32> {
    let wanted = format!("{:02x}:{:02x}:{inode}", libc::major(device), libc::minor(device));
    locks.lines().find_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        if fields.next()? != "FLOCK" {
            return None;
        }
        let pid = fields.nth(2)?;
        (fields.next()? == wanted).then(|| pid.parse().ok()).flatten()
    })
}

fn patience_with(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    if stat.is_ok_and(|stat| is_alive(&stat)) { Duration::ZERO } else { GONE_PATIENCE }
}

/// Whether `stat`, of `/proc/PID`, is of a process that still runs: the letter behind its name, which may have anything in it.
pub(super) fn is_alive(stat: &str) -> bool {
    let state = stat.rsplit_once(')').and_then(|(_, behind)| behind.split_whitespace().next());
    !matches!(state, None | Some("Z" | "X" | "x"))
}
