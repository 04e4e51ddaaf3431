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
    let _ = writeln!(std::io::stderr().lock(), "weir: {}", harmless(what));
}

/// Text as one line that a terminal obeys in nothing, whatever names are in it: a control character as `\n`, `\t`, `\x1b`. What has been
/// made so stays so.
pub fn harmless(text: impl Display) -> String {
    let text = text.to_string();
    if !text.chars().any(char::is_control) {
        return text;
    }
    let escaped = |character: char| match character {
        '\n' => "\\n".to_owned(),
        '\r' => "\\r".to_owned(),
        '\t' => "\\t".to_owned(),
        control if control.is_control() => format!("\\x{:02x}", u32::from(control)),
        other => other.to_string(),
    };
    text.chars().map(escaped).collect()
}

/// Why a command ends, and with which code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Exit code.
    pub code: u8,
    message: String,
    /// Whether it is about one file, and says nothing of the next.
    is_local: bool,
}

/// Result of every command.
pub type Outcome<T = ()> = Result<T, Failure>;

/// Does `work` for each of `things`. What is wrong with one of several is told, and the others have their turn.
pub fn each<T>(things: &[T], mut work: impl FnMut(&T) -> Outcome) -> Outcome {
    let mut code = None;
    for thing in things {
        match work(thing) {
            Err(failure) if failure.is_local() && things.len() > 1 => {
                say(&failure);
                code = code.or(Some(failure.code));
            }
            done => done?,
        }
    }
    // All has been said.
    code.map_or(Ok(()), |code| Err(Failure::bare("").with_code(code)))
}

impl Failure {
    /// `subject: what`.
    pub fn new(subject: impl Display, what: impl Display) -> Self {
        Self::bare(format!("{subject}: {what}"))
    }

    /// The whole message: one line, whatever a library or a name put into it.
    pub fn bare(message: impl AsRef<str>) -> Self {
        let message = harmless(message.as_ref().trim());
        Self { code: FAILED, message, is_local: false }
    }

    /// The same with another exit code.
    #[must_use]
    pub fn with_code(self, code: u8) -> Self {
        Self { code, ..self }
    }

    /// The same with more words behind it.
    #[must_use]
    pub fn with_remark(self, remark: impl Display) -> Self {
        Self { message: harmless(format_args!("{} ({remark})", self.message)), ..self }
    }

    /// The same, of which nothing follows for other files.
    #[must_use]
    pub fn of_one(self) -> Self {
        Self { is_local: true, ..self }
    }

    /// Whether others of several files may still go well.
    pub fn is_local(&self) -> bool {
        self.is_local
    }

    /// A volume that cannot be opened, created or closed.
    pub fn volume(volume: &Path, error: &Error) -> Self {
        let shown = volume.display();
        if let Some(source) = mounted_on(volume) {
            let what = format!(
                "a mount of {}: unmount it and give that, or use its files with cp, ls and so on",
                source.display()
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
                "write-protected: mount it with --read-only, check it with --dry-run, or make it writable"
                    .to_owned()
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
        let failure = match error {
            Error::Io(_) | Error::Corrupt(_) => {
                Self::new(shown, format!("{error}: run weir fsck on the volume"))
            }
            Error::ReadOnly => Self::new(shown, "the volume is open for reading only"),
            _ => Self::new(shown, error),
        };
        let is_local = !matches!(
            error,
            Error::ReadOnly
                | Error::NoSpace
                | Error::HostFull(_)
                | Error::Shutdown(_)
                | Error::TooLittleMemory(_)
                | Error::NoThread(_)
                | Error::NoDescriptor(_)
        );
        Self { is_local, ..failure }
    }

    /// A file of the host.
    pub fn host(path: &Path, error: &std::io::Error) -> Self {
        if error.raw_os_error() == Some(libc::ENOTCONN) {
            let dir = mount_above(path).unwrap_or_else(|| path.to_owned());
            let what = format!(
                "the server of the mount is gone: take it off: weir umount {}",
                dir.display()
            );
            return Self::new(path.display(), what);
        }
        let text = error.to_string();
        // Without "(os error 2)".
        let text = text.split(" (os error").next().unwrap_or(&text).to_lowercase();
        let is_local = !matches!(
            error.raw_os_error(),
            Some(
                libc::EROFS
                    | libc::ENOSPC
                    | libc::EDQUOT
                    | libc::EPIPE
                    | libc::EMFILE
                    | libc::ENFILE
                    | libc::ENOMEM
            )
        );
        Self { is_local, ..Self::new(path.display(), text) }
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
    fn a_message_is_one_line_that_no_terminal_obeys_whatever_is_named_in_it() {
        let named = "a\nb\tc\x1b[2Jd\u{9b}1me\u{7f}\r\u{fc}\\n";
        let text = harmless(named);
        assert_eq!(text, "a\\nb\\tc\\x1b[2Jd\\x9b1me\\x7f\\r\u{fc}\\n");
        assert_eq!(harmless(&text), text);
        for failure in [
            Failure::new(named, named),
            Failure::bare(named),
            Failure::inside(named, &Error::Io(named.into())).with_remark(named),
            Failure::volume(Path::new(named), &Error::NotFound),
            Failure::host(Path::new(named), &std::io::Error::other(named)),
        ] {
            assert!(!failure.to_string().chars().any(char::is_control), "{failure:?}");
        }
    }

    #[test]
    fn the_others_have_their_turn_unless_nothing_can_go_well() {
        let run = |numbers: &[u8]| {
            let mut seen = Vec::new();
            let outcome = each(numbers, |&number| {
                seen.push(number);
                match number {
                    0 => Err(Failure::new("0", "refused")),
                    1 => Err(Failure::inside("1", &Error::NotFound).with_code(9)),
                    _ => Ok(()),
                }
            });
            (seen, outcome.map_err(|failure| (failure.code, failure.to_string())))
        };
        assert_eq!(run(&[2, 3]), (vec![2, 3], Ok(())));
        assert_eq!(run(&[2, 1, 3]), (vec![2, 1, 3], Err((9, String::new()))));
        assert_eq!(run(&[2, 0, 3]), (vec![2, 0], Err((FAILED, "0: refused".to_owned()))));
        assert_eq!(run(&[1]).1, Err((9, "1: no such file or directory".to_owned())));
    }

    #[test]
    fn what_is_wrong_with_one_file_says_nothing_of_the_next() {
        let path = Path::new("f");
        let host = |number| Failure::host(path, &std::io::Error::from_raw_os_error(number));
        assert!(host(libc::EACCES).is_local() && host(libc::ENAMETOOLONG).is_local());
        assert!(host(libc::EACCES).with_remark("so").is_local());
        assert!(!host(libc::ENOSPC).is_local() && !host(libc::EROFS).is_local());
        assert!(Failure::inside("f", &Error::NotFound).is_local());
        assert!(!Failure::inside("f", &Error::NoSpace).is_local());
        assert!(!Failure::new("f", "refused").is_local());
    }

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
