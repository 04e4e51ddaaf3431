//! The transport over `io_uring`, where the kernel has that, otherwise `/dev/fuse` once more. Skipped, with a word, where this machine
//! cannot mount.
#![allow(missing_docs)]

#[path = "transport/cases.rs"]
mod cases;
mod common;

/// The mount option that asks for it.
const TRANSPORT: &str = "io_uring";
