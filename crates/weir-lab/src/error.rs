//! The errors of the lab, each of which prints as one line that says what to do.

use std::io;
use std::path::PathBuf;

/// Why a run, or one case of it, could not be done.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// The target has no such operation or mode; reported as a row, not as a failure.
    #[error("not offered: {0}")]
    NotOffered(&'static str),
    /// Ctrl-C or a termination signal.
    #[error("interrupted; everything was unmounted and detached")]
    Cancelled,
    /// A word in `--on` that is no target.
    #[error(
        "unknown target '{0}': use dir:PATH, xfs, ext4, btrfs, weir, weir-mount, weir-loop, weir-mount-loop, hollow-mount or raw (see `weir lab list`)"
    )]
    UnknownTarget(String),
    /// A word in `--disk` that is no disk.
    #[error(
        "unknown disk '{0}': use plain, slow:FLUSH_US or limit:KEY=N,... with keys rbps, wbps, riops, wiops"
    )]
    UnknownDisk(String),
    /// Loop devices, mounts and cgroups need root.
    #[error(
        "{0} needs root (loop devices, mounts); run as root, or use --on dir:PATH and --on weir"
    )]
    NeedsRoot(String),
    /// A program that a target needs is not installed.
    #[error("{tool} is not installed; it is in the package '{package}'")]
    ToolMissing {
        /// The program.
        tool: &'static str,
        /// The Debian package that has it.
        package: &'static str,
    },
    /// The work directory is too full for the images of this run.
    #[error("{dir}: {need_mib} MiB needed for this run, {free_mib} MiB free; use --size or --work")]
    NoSpace {
        /// The directory.
        dir: PathBuf,
        /// What the run needs.
        need_mib: u64,
        /// What is there.
        free_mib: u64,
    },
    /// The directory is not on a block device, so flushes and writes cannot be counted.
    #[error(
        "{0} is on {1}, which has no block device: no flushes or writes to count (--allow-no-device runs without them)"
    )]
    NoDeviceTruth(PathBuf, String),
    /// An option has no sensible meaning.
    #[error("{0}")]
    BadOption(String),
    /// Another program said no.
    #[error("{command} failed: {message}")]
    Command {
        /// The command line.
        command: String,
        /// What it printed, on one line.
        message: String,
    },
    /// A file operation failed.
    #[error("{what}: {source}")]
    Io {
        /// What was being done, to which file.
        what: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A JSON file is not one of ours.
    #[error("{path}: not a readable report: {message}")]
    BadReport {
        /// The file.
        path: PathBuf,
        /// The cause.
        message: String,
    },
}

impl LabError {
    /// Wraps an I/O error with what was being done.
    pub fn io(what: impl Into<String>, source: io::Error) -> Self {
        LabError::Io { what: what.into(), source }
    }
}

impl From<io::Error> for LabError {
    fn from(source: io::Error) -> Self {
        LabError::Io { what: "file operation".into(), source }
    }
}

/// Result of everything in the lab.
pub type LabResult<T> = Result<T, LabError>;

/// Adds "what was being done" to an I/O result.
pub trait IoContext<T> {
    /// Wraps the error with `what`.
    fn during(self, what: impl FnOnce() -> String) -> LabResult<T>;
}

impl<T> IoContext<T> for io::Result<T> {
    fn during(self, what: impl FnOnce() -> String) -> LabResult<T> {
        self.map_err(|source| LabError::Io { what: what(), source })
    }
}
