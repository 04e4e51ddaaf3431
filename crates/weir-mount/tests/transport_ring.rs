//! The transport over `io_uring`, where the kernel offers that (`/sys/module/fuse/parameters/enable_uring`), otherwise `/dev/fuse` once more. Skipped, with a word, where this machine cannot mount.
#![allow(missing_docs)]

use std::fs;

use weir_mount::FileSystemOps;

#[path = "transport/cases.rs"]
mod cases;
mod common;

/// The mount option that asks for it.
const TRANSPORT: &str = "io_uring";

fn has_thread(prefix: &str) -> bool {
    let Ok(tasks) = fs::read_dir("/proc/self/task") else { return false };
    tasks.flatten().any(|task| {
        fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.starts_with(prefix))
    })
}

#[test]
fn rings_are_used_where_the_kernel_offers_them_and_not_otherwise() {
    let offered = fs::read_to_string("/sys/module/fuse/parameters/enable_uring");
    let offered = offered.is_ok_and(|text| text.starts_with('Y'));
    let ops: std::sync::Arc<dyn FileSystemOps> = common::MemoryFs::new();
    let Some(mount) = common::TestMount::new(ops, TRANSPORT) else { return };
    fs::write(mount.path().join("file"), "x").unwrap();
    assert_eq!(has_thread("weir-fuse-"), offered);
    if !offered {
        eprintln!("the rings were not tested: the kernel does not offer them");
    }
}
