//! What can go wrong, as an enum that a caller can match, with the errno a mount answers.

use thiserror::Error;

/// Result of every engine call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An engine error. [`Error::errno`] gives the POSIX code.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The name or inode does not exist.
    #[error("no such file or directory")]
    NotFound,
    /// The name exists already.
    #[error("file exists")]
    Exists,
    /// A directory was needed.
    #[error("not a directory")]
    NotDirectory,
    /// A directory cannot be used for this.
    #[error("is a directory")]
    IsDirectory,
    /// The directory still has entries.
    #[error("directory not empty")]
    NotEmpty,
    /// A name longer than 255 bytes, or a path or symlink target longer than 4095.
    #[error("name too long")]
    NameTooLong,
    /// An argument is outside of what the call accepts; the text says which.
    #[error("invalid argument: {0}")]
    Invalid(&'static str),
    /// A file would grow beyond 8 EiB - 1, or the machine's limit.
    #[error("file too large")]
    FileTooLarge,
    /// No space is left, after trimming and a checkpoint were tried.
    #[error("no space left on the volume: delete files or create a larger volume")]
    NoSpace,
    /// The operation is not permitted on this kind of object.
    #[error("operation not permitted")]
    NotPermitted,
    /// Permission denied.
    #[error("permission denied")]
    AccessDenied,
    /// More hard links than a link count can hold.
    #[error("too many links")]
    TooManyLinks,
    /// Too many levels of symbolic links.
    #[error("too many levels of symbolic links")]
    TooManySymlinks,
    /// The extended attribute does not exist.
    #[error("no such attribute")]
    NoAttribute,
    /// An extended attribute's name over the limit.
    #[error("attribute name too long: the limit is 255 bytes")]
    OutOfRange,
    /// An extended attribute's value over the limit.
    #[error("attribute value too large: the limit is 4096 bytes")]
    AttributeTooLarge,
    /// The volume, or this open of it, is read-only.
    #[error("read-only file system")]
    ReadOnly,
    /// The handle was not opened for this.
    #[error("bad file handle: the file was opened for reading only")]
    NotWritable,
    /// The log cannot be replayed within the memory cap; the text says what it takes.
    #[error("too little memory: {0}")]
    TooLittleMemory(String),
    /// The caller asked not to wait, and would have had to.
    #[error("would block")]
    WouldBlock,
    /// No data or hole at or after the offset.
    #[error("no such device or address: nothing at or after this offset")]
    NoSuchExtent,
    /// Another process or handle has the volume open.
    #[error("the volume is in use: {0}")]
    InUse(String),
    /// The operating system starts no more threads for this process or user.
    #[error(
        "no thread can be started ({0}): raise the limit on them (ulimit -u, or pids.max of the \
         control group), or end some"
    )]
    NoThread(String),
    /// The operating system opens no more files for this process, or for anybody.
    #[error("no file can be opened ({0}): raise the limit on them (ulimit -n), or close some")]
    NoDescriptor(String),
    /// The root directory has no name that could be taken away or replaced.
    #[error("the root directory cannot be removed, renamed or replaced")]
    RootDirectory,
    /// The operation is not offered.
    #[error("not supported: {0}")]
    NotSupported(&'static str),
    /// The host file system (or a thin device) has no blocks for what the volume writes where it has never written before. What was
    /// to be written stays dirty, readable and, if it was acknowledged, in the log; it is tried again.
    #[error("no space left on the host of the volume ({0}){HOST_ADVICE}")]
    HostFull(String),
    /// The device failed.
    #[error("I/O error: {0}")]
    Io(String),
    /// Stored data does not match its checksum or its specification.
    #[error("corrupt: {0}")]
    Corrupt(String),
    /// The file or device is not a Weir volume this version can open; the text says why and what
    /// to do.
    #[error("{0}")]
    NotAVolume(String),
    /// A flush failed, a frame of the log could be written nowhere, or a checkpoint found metadata that contradicts itself: the device's
    /// state is unknown and the volume is read-only until it is opened again. Or it was closed; or this is a forked child of the process that
    /// has it open. Sticky.
    #[error("{}", shutdown_text(.0))]
    Shutdown(String),
}

/// Why a volume is shut down of which a thread has panicked.
pub(crate) const PANICKED: &str = "an internal error ended one of its threads";
/// Why a volume is shut down that was closed.
pub(crate) const CLOSED: &str = "closed";
/// Why a volume can only be let go of in a child of the process that has opened it.
pub(crate) const FORKED: &str = "this process was forked from the one that has it open";

/// What to do about a host without space, while the volume goes on.
const HOST_ADVICE: &str = ": free some there, and try again";

fn shutdown_text(reason: &str) -> String {
    if reason == CLOSED {
        return "the volume was closed: open it again".to_owned();
    }
    if reason == FORKED {
        return format!("{FORKED}: open the volume after the fork, in the process that uses it");
    }
    if let Some(reason) = reason.strip_suffix(HOST_ADVICE) {
        // Nothing is wrong with the device, and trying again is not enough.
        return format!(
            "the volume was shut down after an error ({reason}): free some there, unmount, and \
             open it again"
        );
    }
    format!(
        "the volume was shut down after an error ({reason}): unmount, check the device, run fsck"
    )
}

impl Error {
    /// The same, for whoever does not know which file it is about.
    pub(crate) fn of_inode(&self, number: u64) -> Self {
        let name = |text: &str| format!("{text} (inode {number})");
        match self {
            Self::Io(text) => Self::Io(name(text)),
            Self::Corrupt(text) => Self::Corrupt(name(text)),
            other => other.clone(),
        }
    }

    /// The POSIX error number (Linux values) for this error.
    pub fn errno(&self) -> i32 {
        match self {
            Self::NotFound => 2,
            Self::Exists => 17,
            Self::NotDirectory => 20,
            Self::IsDirectory => 21,
            Self::NotEmpty => 39,
            Self::NameTooLong => 36,
            Self::Invalid(_) | Self::NotAVolume(_) => 22,
            Self::FileTooLarge => 27,
            Self::NoSpace | Self::HostFull(_) => 28,
            Self::NotPermitted => 1,
            Self::AccessDenied => 13,
            Self::TooManyLinks => 31,
            Self::TooManySymlinks => 40,
            Self::NoAttribute => 61,
            Self::OutOfRange => 34,
            Self::AttributeTooLarge => 7,
            Self::ReadOnly => 30,
            Self::NotWritable => 9,
            Self::WouldBlock | Self::NoThread(_) => 11,
            Self::TooLittleMemory(_) => 12,
            Self::NoSuchExtent => 6,
            Self::NoDescriptor(_) => 24,
            Self::InUse(_) | Self::RootDirectory => 16,
            Self::NotSupported(_) => 95,
            Self::Io(_) | Self::Corrupt(_) | Self::Shutdown(_) => 5,
        }
    }
}

/// Of the host, for the few calls to it that have no error of their own: what a program would tell apart stays apart.
impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ENOENT) => Self::NotFound,
            Some(libc::ENOTDIR) => Self::NotDirectory,
            Some(libc::EEXIST) => Self::Exists,
            Some(libc::EACCES) => Self::AccessDenied,
            Some(libc::EROFS) => Self::ReadOnly,
            Some(libc::EMFILE | libc::ENFILE) => Self::NoDescriptor(error.to_string()),
            // The host's space, not that of the volume.
            Some(libc::ENOSPC | libc::EDQUOT) => Self::HostFull(error.to_string()),
            _ => Self::Io(error.to_string()),
        }
    }
}

/// For programs whose functions answer [`std::io::Result`]: of the kind that belongs to [`Error::errno`], with the text and the error
/// itself, which `get_ref` and `downcast_ref` find again.
impl From<Error> for std::io::Error {
    fn from(error: Error) -> Self {
        Self::new(Self::from_raw_os_error(error.errno()).kind(), error)
    }
}

#[cfg(test)]
mod tests {
    use super::Error;
    use std::io;

    #[test]
    fn an_error_becomes_one_of_the_standard_library_and_keeps_its_kind_its_text_and_its_number() {
        let shutdown = Error::Shutdown("flush".into());
        for error in [Error::NotFound, Error::NoSpace, Error::Exists, Error::ReadOnly, shutdown] {
            let outer = io::Error::from(error.clone());
            assert_eq!(outer.kind(), io::Error::from_raw_os_error(error.errno()).kind());
            assert_eq!(outer.to_string(), error.to_string());
            let inner = outer.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
            assert_eq!(inner, Some(&error));
        }
    }

    #[test]
    fn a_shutdown_gives_one_piece_of_advice_and_that_of_its_reason() {
        let full = Error::HostFull("No space left on device (os error 28)".into());
        assert_eq!(
            Error::Shutdown(full.to_string()).to_string(),
            "the volume was shut down after an error (no space left on the host of the volume \
             (No space left on device (os error 28))): free some there, unmount, and open it again"
        );
        let io = Error::Io("flush: EIO".into());
        assert_eq!(
            Error::Shutdown(io.to_string()).to_string(),
            "the volume was shut down after an error (I/O error: flush: EIO): unmount, check the \
             device, run fsck"
        );
    }

    #[test]
    fn what_the_host_says_keeps_its_number() {
        for number in [2, 20, 17, 13, 28, 30, 5] {
            assert_eq!(Error::from(io::Error::from_raw_os_error(number)).errno(), number);
        }
        assert_eq!(Error::from(io::Error::other("text")), Error::Io("text".into()));
        assert_eq!(Error::NotAVolume("text".into()).errno(), 22);
    }
}
