//! Mounts a file system of our own through FUSE.
//!
//! The parts, from the kernel inwards:
//!
//! | module | does |
//! |---|---|
//! | [`mount_point`] | attaches `/dev/fuse` to a directory, and takes it off |
//! | [`servers`] | which processes serve mounts, and which volumes they have open |
//! | [`session`] | one mount from attaching to the last answer |
//! | `fuser_transport` | decodes requests and encodes replies, by the `fuser` crate |
//! | `uring` | the same over `io_uring`, a ring for each core, where the kernel offers that |
//! | [`dispatch`] | which thread serves a request; catches panics |
//! | [`ioctl`] | the commands of `include/weir.h`; [`client`] is their other end |
//! | [`batch`] | batches as programs stage them: steps on the wire, and who has staged what |
//! | [`watch`] | who waits for the log to get somewhere |
//! | [`ops`] | the operations, free of any transport |
//! | [`weir_fs`] | the operations on a [`weir::Volume`] |
//!
//! Another transport replaces the two in the middle and uses the rest as it is.

pub mod acl;
pub mod batch;
pub mod client;
mod closed;
pub mod dispatch;
pub mod errno;
pub mod error;
mod forgetting;
mod fuser_convert;
mod fuser_transport;
pub mod ioctl;
mod kernel_cache;
mod leftover;
pub mod mount_point;
pub mod ops;
pub mod options;
pub mod servers;
pub mod session;
pub mod stats;
pub mod tables;
mod uring;
pub mod watch;
pub mod weir_fs;

pub use errno::Errno;
pub use error::{MountError, UnmountError, User};
pub use ops::FileSystemOps;
pub use options::{Atime, MountOptions, TransportOptions};
pub use session::{Controller, Session, mount};
pub use weir_fs::{Trouble, WeirFs};
