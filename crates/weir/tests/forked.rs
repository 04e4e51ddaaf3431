//! A process that is forked with a volume open: the child can do nothing with it but let go, and the parent goes on as if there were none.

mod common;

use common::*;
use std::cell::RefCell;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use weir::device::posix::{OpenMode, PosixDevice};
use weir::device::{Device, IoClass};
use weir::*;

/// A child that takes longer hangs.
const PATIENCE_S: u32 = 20;

struct TempVolume(PathBuf);

impl TempVolume {
    fn new(name: &str) -> Self {
        let name = format!("weir-forked-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_file(&path);
        let options = CreateOptions { size_bytes: Some(32 * MIB), ..CreateOptions::default() };
        Volume::create(&path, &options).expect("create");
        Self(path)
    }

    fn open(&self) -> Volume {
        Volume::open(&self.0, threads(4 * MIB)).expect("open")
    }
}

impl Drop for TempVolume {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Runs `child` in a child when `parent` is done in the parent. Answers the child's complaints.
fn beside_a_child(parent: impl FnOnce(), child: impl FnOnce() -> Vec<String>) -> String {
    let (mut may_begin, mut begins) = std::io::pipe().expect("pipe");
    let (mut said, mut says) = std::io::pipe().expect("pipe");
    // SAFETY: the child calls what the test is about, and ends without running anything of the test's.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: plain integers.
        unsafe { libc::alarm(PATIENCE_S) };
        drop(begins);
        let _ = may_begin.read(&mut [0]);
        let complaints =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).map(|all| all.join("\n"));
        let _ = says.write_all(complaints.unwrap_or_else(|_| "panicked".into()).as_bytes());
        // SAFETY: a plain integer.
        unsafe { libc::_exit(0) };
    }
    assert!(pid > 0, "fork");
    drop((may_begin, says));
    parent();
    begins.write_all(&[1]).expect("begin");
    let mut complaints = String::new();
    said.read_to_string(&mut complaints).expect("what the child says");
    let mut status = 0;
    // SAFETY: `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0, "the child was killed by signal {}: {complaints}", status & 0x7f);
    complaints
}

/// Notes in `complaints` if the call that is named was not refused as it should be.
fn refused<T: std::fmt::Debug>(complaints: &mut Vec<String>, call: &str, result: Result<T>) {
    match result {
        Err(Error::Shutdown(reason)) if reason.contains("forked") => {}
        other => complaints.push(format!("{call}: {other:?}")),
    }
}

#[test]
fn a_forked_child_hears_that_the_volume_is_its_parents_and_changes_nothing() {
    let temporary = TempVolume::new("child");
    let volume = temporary.open();
    let file = create(&volume, "/f");
    file.write_at(0, &pattern(1, 100_000)).expect("write");
    file.fsync().expect("fsync");
    file.write_at(0, &pattern(2, 100_000)).expect("write");
    let ticket = volume.sync_async().expect("ticket");
    ticket.wait().expect("wait");
    let queue = CompletionQueue::new().expect("queue");
    let unlinked = create(&volume, "/unlinked");
    unlinked.write_at(0, &pattern(3, 100_000)).expect("write");
    volume.remove_file("/unlinked").expect("unlink");

    // No other handles: the child drops the last of its copy.
    let handles = RefCell::new(Some((volume, file, unlinked, ticket)));
    let acknowledged = || {
        for number in 0..20 {
            let handles = handles.borrow();
            let (volume, ..) = handles.as_ref().expect("they are the parent's");
            let file = create(volume, &format!("/acknowledged{number}"));
            file.write_at(0, &pattern(number, 30_000)).expect("write");
            file.fsync().expect("fsync");
        }
    };
    let complaints = beside_a_child(acknowledged, || {
        let mut all = Vec::new();
        let (volume, file, unlinked, ticket) = handles.take().expect("its copy");
        refused(&mut all, "write", file.write_at(0, &pattern(9, 50_000)));
        refused(&mut all, "append", file.append(&[9; 500]));
        refused(&mut all, "truncate", file.truncate(5));
        refused(&mut all, "read", file.read_at(0, &mut [0; 100]));
        refused(&mut all, "fsync", file.fsync());
        refused(&mut all, "barrier", file.barrier());
        refused(&mut all, "fsync, later", file.fsync_async(0..10, SyncKind::Full));
        refused(&mut all, "create", volume.open_file("/new", OpenFlags::CREATE));
        refused(&mut all, "rename", volume.rename_path("/f", "/g"));
        refused(&mut all, "remove", volume.remove_file("/f"));
        refused(&mut all, "sync", volume.sync());
        refused(&mut all, "sync, later", volume.sync_async());
        refused(&mut all, "barrier of all", volume.barrier());
        refused(&mut all, "wait for an LSN", volume.wait_durable(volume.last_lsn() + 9, None));
        refused(&mut all, "checkpoint", volume.checkpoint());
        refused(&mut all, "ticket", ticket.wait());
        refused(&mut all, "ticket, looked at", ticket.poll().unwrap_or(Ok(())));
        ticket.deliver(&queue, 7);
        refused(&mut all, "ticket, delivered", queue.wait().result);
        refused(&mut all, "close", volume.close());
        let again = Volume::open(&temporary.0, threads(4 * MIB));
        if !matches!(again, Err(Error::InUse(_))) {
            all.push(format!("open: {again:?}"));
        }
        drop((file, unlinked, volume));
        all
    });
    assert_eq!(complaints, "");

    let (volume, file, unlinked, _) = handles.take().expect("they are the parent's");
    assert!(contents(&file) == pattern(2, 100_000));
    assert!(contents(&unlinked) == pattern(3, 100_000));
    file.write_at(0, &pattern(4, 100_000)).expect("write");
    file.fsync().expect("fsync");
    // As if it crashed.
    drop((file, unlinked, volume));
    let volume = temporary.open();
    for number in 0..20 {
        let path = format!("/acknowledged{number}");
        let file = volume.open_file(&path, OpenFlags::READ).expect("it was acknowledged");
        assert!(contents(&file) == pattern(number, 30_000), "{path}");
    }
    let file = volume.open_file("/f", OpenFlags::READ).expect("open");
    assert!(contents(&file) == pattern(4, 100_000));
    assert_eq!(volume.metadata("/new").err(), Some(Error::NotFound));
    volume.close().expect("close");
    drop((file, volume));
    let device: Arc<dyn Device> =
        Arc::new(PosixDevice::open(&temporary.0, OpenMode::ReadOnly).expect("open"));
    let report = weir::check::check_device(&device, &weir::check::CheckOptions::default());
    assert!(report.expect("check").is_clean());
}

#[test]
fn a_child_opens_what_its_parent_has_left() {
    let temporary = TempVolume::new("later");
    let volume = temporary.open();
    create(&volume, "/f").write_at(0, &pattern(1, 9000)).expect("write");
    volume.close().expect("close");
    drop(volume);
    let complaints = beside_a_child(
        || (),
        || {
            let volume = temporary.open();
            let file = volume.open_file("/f", OpenFlags::READ_WRITE).expect("open");
            assert!(contents(&file) == pattern(1, 9000));
            file.write_at(0, &pattern(2, 9000)).expect("write");
            file.fsync().expect("fsync");
            drop(file);
            volume.close().expect("close");
            Vec::new()
        },
    );
    assert_eq!(complaints, "");
    let volume = temporary.open();
    let file = volume.open_file("/f", OpenFlags::READ).expect("open");
    assert!(contents(&file) == pattern(2, 9000));
}

#[test]
fn a_device_refuses_the_child_of_its_process_and_does_not_wait_for_its_threads() {
    let temporary = TempVolume::new("device");
    let device = PosixDevice::open(&temporary.0, OpenMode::ReadWrite).expect("open");
    let device: Arc<dyn Device> = Arc::new(device.with_io_uring(false));
    let read = |device: &Arc<dyn Device>| {
        let mut bytes = weir::device::buffer::AlignedBuf::zeroed(4096);
        device.read(0, &mut [&mut bytes], IoClass::SyncRead)
    };
    let both = |device: &Arc<dyn Device>| {
        let request = |offset_bytes| weir::device::Request {
            operation: weir::device::Operation::Read,
            offset_bytes,
            buffers: weir::device::Buffers::Owned(weir::device::buffer::AlignedBuf::zeroed(4096)),
            class: IoClass::SyncRead,
        };
        device.run_all(vec![request(0), request(4096)]).into_iter().map(|(result, _)| result)
    };
    // So that it has threads.
    assert!(both(&device).all(|result| result.is_ok()));
    let only = RefCell::new(Some(device));
    let complaints = beside_a_child(
        || (),
        || {
            let device = only.take().expect("its copy");
            let mut results = vec![read(&device), device.flush()];
            results.extend(both(&device));
            let refused = results.iter().filter(|result| {
                result.as_ref().is_err_and(|error| error.reason.contains("forked"))
            });
            let complaints =
                if refused.count() == 4 { vec![] } else { vec![format!("{results:?}")] };
            drop(device);
            complaints
        },
    );
    assert_eq!(complaints, "");
    assert_eq!(read(&only.take().expect("it is the parent's")), Ok(()));
}
