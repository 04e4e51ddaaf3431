//! What a batch has recorded, and how a commit that fails names the step it failed at.

use crate::error::Error;
use crate::types::{NewInode, RenameMode, SetAttr};
use std::fmt;

/// One recorded change.
pub enum Step {
    Make {
        dir: u64,
        name: Vec<u8>,
        ino: u64,
        new: NewInode,
        target: Option<Vec<u8>>,
    },
    Link {
        ino: u64,
        dir: u64,
        name: Vec<u8>,
    },
    Unlink {
        dir: u64,
        name: Vec<u8>,
    },
    Rmdir {
        dir: u64,
        name: Vec<u8>,
    },
    Rename {
        dir: u64,
        name: Vec<u8>,
        new_dir: u64,
        new_name: Vec<u8>,
        mode: RenameMode,
    },
    Attributes {
        ino: u64,
        change: SetAttr,
    },
    /// The content changes: see the file's patch. Or nothing was written, at any place.
    Content {
        ino: u64,
        changes: bool,
    },
}

/// A step, and which of the calls it comes from.
pub struct Recorded {
    pub call: usize,
    pub step: Step,
}

impl Recorded {
    /// The batch failed at this step.
    pub fn failed(&self, error: Error) -> BatchError {
        let step = FailedStep { number: self.call, description: self.step.to_string() };
        BatchError { step: Some(step), error }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |name: &[u8]| format!("{:?}", String::from_utf8_lossy(name));
        match self {
            Self::Make { dir, name, .. } => {
                write!(formatter, "making {} in directory {dir}", text(name))
            }
            Self::Link { ino, dir, name } => {
                write!(formatter, "linking inode {ino} as {} in directory {dir}", text(name))
            }
            Self::Unlink { dir, name } => {
                write!(formatter, "unlinking {} in directory {dir}", text(name))
            }
            Self::Rmdir { dir, name } => {
                write!(formatter, "removing directory {} in directory {dir}", text(name))
            }
            Self::Rename { dir, name, new_dir, new_name, mode } => {
                let (from, to) = (text(name), text(new_name));
                match mode {
                    RenameMode::Exchange => write!(formatter, "exchanging {from}")?,
                    _ => write!(formatter, "renaming {from}")?,
                }
                let word = if *mode == RenameMode::Exchange { "with" } else { "to" };
                write!(formatter, " in directory {dir} {word} {to} in directory {new_dir}")
            }
            Self::Attributes { ino, .. } => write!(formatter, "changing attributes of inode {ino}"),
            Self::Content { ino, .. } => write!(formatter, "changing content of inode {ino}"),
        }
    }
}

/// Why the commit of a [`Batch`](crate::Batch) failed, and at which step, if it was the fault of one.
///
/// Turns into an [`Error`], or a [`std::io::Error`], with `?`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchError {
    /// The step that cannot be done on the volume as it is. None where the batch as a whole found no room, memory or device.
    pub step: Option<FailedStep>,
    /// What is wrong.
    pub error: Error,
}

/// A step of a batch: see [`BatchError`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedStep {
    /// Which of the calls that recorded the batch it comes from, counted from 0. Calls that were refused do not count.
    pub number: usize,
    /// What it was to do, for people.
    pub description: String,
}

impl fmt::Display for BatchError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(FailedStep { number, description }) = &self.step {
            write!(formatter, "step {number} of the batch, {description}: ")?;
        }
        self.error.fmt(formatter)
    }
}

impl std::error::Error for BatchError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

impl From<Error> for BatchError {
    fn from(error: Error) -> Self {
        Self { step: None, error }
    }
}

impl From<BatchError> for Error {
    fn from(failed: BatchError) -> Self {
        failed.error
    }
}

/// Of the kind of its [`Error`]; the text names the step, and `get_ref` and `downcast_ref` find the [`BatchError`] again.
impl From<BatchError> for std::io::Error {
    fn from(failed: BatchError) -> Self {
        Self::new(Self::from_raw_os_error(failed.error.errno()).kind(), failed)
    }
}
