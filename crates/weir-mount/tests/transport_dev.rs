//! The transport over `/dev/fuse`. Skipped, with a word, where this machine cannot mount.
#![allow(missing_docs)]

#[path = "transport/cases.rs"]
mod cases;
mod common;

/// The mount option that asks for it.
const TRANSPORT: &str = "no_io_uring";
