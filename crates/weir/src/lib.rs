//! Weir: a crash-safe file system that a program links into itself.

pub mod alloc;
pub mod background;
pub mod cache;
pub mod check;
pub mod device;
pub mod engine;
mod error;
pub mod file;
pub mod format;
pub mod inode;
pub mod log;
#[doc(hidden)]
pub mod mutation;
pub mod namespace;
pub mod reclaim;
pub mod recovery;
pub mod stats;
pub mod sync;
mod ticket;
pub mod tree;
pub mod txn;
mod types;
mod volume;

pub use background::BackgroundWork;
pub use error::{Error, Result};
pub use file::fsync::SyncKind;
pub use file::handle::{File, InodeHold};
pub use namespace::xattr::XattrMode;
pub use stats::Stats;
pub use ticket::{Completion, CompletionQueue, SyncTicket};
pub use types::*;
pub use volume::Volume;
