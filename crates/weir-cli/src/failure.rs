//! Errors for people: one line that says where, what, and what to do.

use std::fmt::{self, Display};
use std::io::Write;
use std::path::Path;

use weir::Error;

use crate::open::{mount_above, mounted_on};

/// Exit code of a command that did not do what it was asked.
pub const FAILED: u8 = 1;
/// Exit code of a command line that makes no sense.
pub const USAGE: u8 = 2;
/// `fsck`: errors were found and are still there.
pub const FSCK_ERRORS_LEFT: u8 = 4;
/// `fsck`: could not look.
pub const FSCK_OPERATIONAL: u8 = 8;
/// `fsck`: usage.
pub const FSCK_USAGE: u8 = 16;

/// A line for people on standard error, which may be closed, or a log on a disk that is full: then it is lost, and nothing else.
/// (`eprintln!` panics there.)
pub fn say(what: impl Display) {
    let _ = writeln!(std::io::stderr().lock(), "weir: {what}");
}

/// Why a command ends, and with which code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Exit code.
    pub code: u8,
    message: String,
}

/// Result of every command.
pub type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// `subject: what`.
    pub fn new(subject: impl Display, what: impl Display) -> Self {
        Self::bare(format!("{subject}: {what}"))
    }

    /// The whole message.
    pub fn bare(message: impl Into<String>) -> Self {
        // One line, whatever a library put into its text.
        let message: String = message.into();
        let message = message.split('\n').map(str::trim).collect::<Vec<_>>().join(" ");
        Self { code: FAILED, message: message.trim().to_owned() }
    }

    /// The same with another exit code.
    #[must_use]
    pub fn with_code(self, code: u8) -> Self {
        Self { code, ..self }
    }

    /// A volume that cannot be opened, created or closed.
    pub fn volume(volume: &Path, error: &Error) -> Self {
        let shown = volume.display();
        if let Some(source) = mounted_on(volume) {
            let what = format!(
                "a mount of {source}: unmount it and give that, or use its files with cp, ls and so on"
            );
            return Self::new(shown, what);
        }
        let what = match error {
            Error::NotFound => format!(
                "no such file or device: check the path, or make it: weir create {shown} --size 8G"
            ),
            Error::Exists => {
                "exists already: choose another path, or overwrite it with --force".to_owned()
            }
            Error::AccessDenied if is_locked(volume) => format!(
                "it is marked as not to be changed: open it with --read-only, or take the mark away: chattr -i -a {shown}"
            ),
            Error::AccessDenied => {
                "permission denied: run as the owner of the volume, or as root".to_owned()
            }
            Error::IsDirectory => "is a directory: give the path of a file or device".to_owned(),
            Error::NotDirectory => {
                "a part of the path is a file, not a directory: check the path".to_owned()
            }
            Error::TooManySymlinks => {
                "symbolic links that lead in a circle: check the path".to_owned()
            }
            Error::NameTooLong => "the name is too long: choose a shorter one".to_owned(),
            Error::InUse(who) => {
                format!("in use: {who}: unmount it first (weir umount DIR), or end that program")
            }
            Error::ReadOnly => {
                "write-protected: open it with --read-only, or make it writable".to_owned()
            }
            Error::Io(problem) => {
                format!("{problem}: check the device (dmesg), then run: weir fsck {shown}")
            }
            Error::TooLittleMemory(problem) => format!(
                "too little memory: {problem}: open it for writing once (weir mount {shown} DIR), or give the mount more --memory"
            ),
            Error::Corrupt(problem) => {
                format!("corrupt: {problem}: see what is left with: weir fsck {shown}")
            }
            other => other.to_string(),
        };
        // The engine names the volume in some of its texts.
        let subject = format!("{shown}: ");
        let what = what.strip_prefix(&subject).unwrap_or(&what);
        Self::new(shown, what)
    }

    /// A volume that cannot be made.
    pub fn creating(volume: &Path, error: &Error) -> Self {
        let what = match error {
            Error::NotFound => "no files can be made there: choose another path",
            Error::AccessDenied if is_locked(volume) => return Self::volume(volume, error),
            Error::AccessDenied => {
                "permission denied: choose a directory that you may write to, or run as root"
            }
            Error::ReadOnly => "write-protected: choose another place, or make it writable",
            Error::HostFull(_) => {
                "not enough space: choose a smaller --size, or free space on the host"
            }
            _ => return Self::volume(volume, error),
        };
        Self::new(volume.display(), what)
    }

    /// A path inside a volume.
    pub fn inside(shown: impl Display, error: &Error) -> Self {
        match error {
            Error::Io(_) | Error::Corrupt(_) => {
                Self::new(shown, format!("{error}: run weir fsck on the volume"))
            }
            Error::ReadOnly => Self::new(shown, "the volume is open for reading only"),
            _ => Self::new(shown, error),
        }
    }

    /// A file of the host.
    pub fn host(path: &Path, error: &std::io::Error) -> Self {
        if error.raw_os_error() == Some(libc::ENOTCONN) {
            let dir = mount_above(path).unwrap_or_else(|| path.display().to_string());
            let what = format!("the server of the mount is gone: take it off: weir umount {dir}");
            return Self::new(path.display(), what);
        }
        let text = error.to_string();
        // Without "(os error 2)".
        let text = text.split(" (os error").next().unwrap_or(&text).to_lowercase();
        Self::new(path.display(), text)
    }
}

/// Nobody may change the file, not even root (`chattr +i`, `chattr +a`).
fn is_locked(path: &Path) -> bool {
    use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};
    let locked = StatxAttributes::IMMUTABLE | StatxAttributes::APPEND;
    statx(CWD, path, AtFlags::empty(), StatxFlags::BASIC_STATS)
        .is_ok_and(|file| file.stx_attributes.intersects(locked))
}

impl Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_is_one_line_with_something_to_do() {
        let volume = Path::new("/v.weir");
        for error in [
            Error::NotFound,
            Error::Exists,
            Error::AccessDenied,
            Error::InUse("process 7".into()),
            Error::ReadOnly,
            Error::NoSpace,
            Error::HostFull("write of 4096 bytes".into()),
            Error::NotDirectory,
            Error::TooManySymlinks,
            Error::NameTooLong,
            Error::TooLittleMemory("9 MiB".into()),
            Error::Io("read at\n4096".into()),
            Error::Corrupt("node".into()),
        ] {
            let text = Failure::volume(volume, &error).to_string();
            assert!(!text.contains('\n'), "{text}");
            assert!(text.starts_with("/v.weir: "), "{text}");
            assert!(text.matches(": ").count() >= 2, "says what to do: {text}");
            let text = Failure::creating(volume, &error).to_string();
            assert!(text.starts_with("/v.weir: ") && !text.contains("--read-only"), "{text}");
            assert!(text.matches(": ").count() >= 2, "says what to do: {text}");
        }
    }
}
