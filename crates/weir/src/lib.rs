//! Weir: a crash-safe file system that a program links into itself.
//!
//! A volume is one file or one block device. This page is the whole API:
//!
//! * [`Volume`]: [`Volume::create`], [`Volume::open`], [`Volume::close`]; names by path ([`Volume::open_file`],
//!   [`Volume::create_dir`] …) and by inode number ([`Volume::lookup`], [`Volume::make`] …); [`Volume::sync`],
//!   [`Volume::checkpoint`], [`Volume::stats`]
//! * [`File`]: [`File::read_at`], [`File::write_at`], [`File::append`], [`File::truncate`], [`File::allocate`];
//!   durability: [`File::fsync`], [`File::fdatasync`], and without waiting: [`File::fsync_async`]; as a stream of
//!   `std::io`: [`File::cursor`]
//! * order and atomicity: [`Volume::barrier`], [`File::barrier`]; [`Volume::batch`] makes a [`Batch`]
//! * [`SyncTicket`], [`CompletionQueue`]: durability as something to hold
//! * [`Error`]: what can go wrong, with [`Error::errno`]
//! * module [`mod@check`] is fsck
//! * [`device`](crate::device): the [`device::Device`] trait, for volumes on something else than a file
//!
//! Everything is `Send + Sync` and may be called from any thread. Nothing is durable before a sync says so; after a
//! crash, the effects of all metadata operations up to some point are there, and that point is never before
//! the last one that a sync covered.
//!
//! ```
//! # fn main() -> weir::Result<()> {
//! use weir::{CreateOptions, OpenFlags, Volume, VolumeOptions};
//!
//! let directory = std::env::temp_dir();
//! let path = directory.join(format!("weir-doc-{}.weir", std::process::id()));
//! Volume::create(&path, &CreateOptions { size_bytes: Some(16 << 20), ..CreateOptions::default() })?;
//! let volume = Volume::open(&path, VolumeOptions::default())?;
//! let file = volume.open_file("/journal", OpenFlags::CREATE)?;
//! file.append(b"first entry\n")?;
//! file.fsync()?;
//! volume.close()?;
//! # std::fs::remove_file(&path)?;
//! # Ok(())
//! # }
//! ```
//!
//! The other modules are the engine's parts. They are public for the simulator, fsck, the lab and the command line of this
//! repository, and hidden here because they change with the engine: `docs/ARCHITECTURE.md` is their map.

#[doc(hidden)]
pub mod alloc;
#[doc(hidden)]
pub mod background;
#[doc(hidden)]
pub mod barrier;
mod batch;
#[doc(hidden)]
pub mod cache;
pub mod check;
pub mod device;
#[doc(hidden)]
pub mod dirty_list;
#[doc(hidden)]
pub mod engine;
mod error;
#[doc(hidden)]
pub mod file;
#[doc(hidden)]
pub mod format;
#[doc(hidden)]
pub mod inode;
#[doc(hidden)]
pub mod log;
#[doc(hidden)]
pub mod mutation;
#[doc(hidden)]
pub mod namespace;
mod number_map;
mod prefetch;
#[doc(hidden)]
pub mod reclaim;
#[doc(hidden)]
pub mod recovery;
mod running;
#[cfg(all(test, not(feature = "shuttle")))]
mod shutdown_tests;
pub mod stats;
#[doc(hidden)]
pub mod sync;
mod ticket;
#[doc(hidden)]
pub mod tree;
#[doc(hidden)]
pub mod txn;
mod types;
mod volume;

pub use background::BackgroundWork;
pub use batch::{Batch, BatchError, FailedStep};
pub use error::{Error, Result};
pub use file::cursor::FileCursor;
pub use file::fsync::SyncKind;
pub use file::handle::{File, InodeHold};
pub use file::handover::SyncRangeFlags;
pub use file::paced::PacingStats;
pub use file::submit::WhenFull;
pub use namespace::xattr::XattrMode;
pub use stats::Stats;
pub use ticket::{Completion, CompletionQueue, SyncTicket};
pub use types::*;
pub use volume::Volume;
