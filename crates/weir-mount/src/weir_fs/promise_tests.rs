//! What a request has promised when it is answered: durability, errors, and that what failed has left nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::Duration;

use weir::device::memory::MemoryDevice;
use weir::device::{Device, DeviceError, DeviceInfo, DeviceResult, IoClass, OnDone, Request};
use weir::{Attr, BackgroundMode, BackgroundWork, CreateOptions, SetTime, VolumeOptions};

use super::*;
use crate::batch::{StepFields, op};

const CALLER: Caller = Caller { uid: 0, gid: 0 };
const WRITE: Open = Open { write: true, truncate: false, sync: None };

fn served_from(device: &Arc<dyn Device>) -> WeirFs {
    Volume::format_device(device, &CreateOptions::default()).unwrap();
    let options = VolumeOptions { background: BackgroundMode::Manual, ..VolumeOptions::default() };
    let volume = Volume::open_device(Arc::clone(device), options).unwrap();
    WeirFs::new(volume, true, Box::new(|_| {})).unwrap()
}

fn fs() -> WeirFs {
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(64 << 20));
    served_from(&device)
}

fn new(file_type: FileType) -> Make {
    Make { file_type, permissions: 0o644, umask: 0, rdev: 0 }
}

fn created(fs: &WeirFs, open: Open) -> (Attr, Handle) {
    fs.create(CALLER, Volume::ROOT, b"f", &new(FileType::Regular), open, true).unwrap()
}

/// A mount that makes no promise, and what it shows after a power cut: what of `device` was flushed, or written, is there.
fn after_a_crash(fs: WeirFs, device: Arc<dyn Device>) -> Volume {
    // Nobody closes it.
    std::mem::forget(fs);
    let options = VolumeOptions { read_only: true, ..VolumeOptions::default() };
    Volume::open_device(device, options).unwrap()
}

/// What comes over a channel while everything that is to be done in the background is.
fn answered<T>(fs: &WeirFs, answers: &Receiver<T>) -> T {
    for _ in 0..2000 {
        for work in [BackgroundWork::Log, BackgroundWork::Writeback] {
            let _ = fs.volume.background_step(work);
        }
        if let Ok(answer) = answers.recv_timeout(Duration::from_millis(10)) {
            return answer;
        }
    }
    panic!("no answer");
}

#[test]
fn a_batch_is_durable_before_its_answer_where_the_mount_promises_that_of_names() {
    for (all, names) in [(false, false), (true, false), (false, true)] {
        let fs = fs().synchronous(Synchronous { all, names });
        let (attr, handle) = created(&fs, WRITE);
        let caller = Caller { uid: rustix::process::geteuid().as_raw(), gid: 0 };
        let thread = std::process::id();
        let target = ControlTarget { ino: attr.ino, handle: Some(handle), caller, thread };
        let id = fs.batches.begin(handle).unwrap();
        let mut steps = Vec::new();
        let (op, name) = (op::UNLINK, &b"f"[..]);
        StepFields { op, dir: Volume::ROOT, name, ..StepFields::default() }.encode(&mut steps);
        fs.batches.add(handle, id, &steps).unwrap();
        let (sender, answers) = channel();
        let is_durable = || fs.volume.durable_lsn() >= fs.volume.last_lsn();
        fs.commit_batch(target, id, false, Box::new(move |done| sender.send(done).unwrap()));
        if all || names {
            let before = answers.try_recv();
            assert!(before == Err(TryRecvError::Empty) || is_durable(), "{before:?}");
            answered(&fs, &answers).unwrap();
            assert!(is_durable(), "all: {all}, names: {names}");
        } else {
            answers.try_recv().unwrap().unwrap();
            assert!(!is_durable(), "nothing was promised");
        }
        fs.release(handle);
        fs.close().unwrap();
    }
}

#[test]
fn what_is_written_by_o_sync_is_durable_with_its_times() {
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(64 << 20));
    let fs = served_from(&device);
    let (attr, handle) = created(&fs, WRITE);
    fs.write(handle, 0, &[1; 8192], WriteMode::default()).unwrap();
    let past = SetTime::At(weir::Timestamp::default());
    fs.setattr(CALLER, attr.ino, &SetAttr { mtime: Some(past), ..SetAttr::default() }).unwrap();
    fs.sync(&SyncTarget::Volume).unwrap();
    let mode = WriteMode { full_sync: true, ..WriteMode::default() };
    fs.write(handle, 0, &[2; 4096], mode).unwrap();
    let shown = fs.getattr(attr.ino).unwrap();
    let volume = after_a_crash(fs, device);
    let found = volume.getattr(attr.ino).unwrap();
    assert_eq!((found.mtime, found.ctime), (shown.mtime, shown.ctime));
    let file = volume.open_inode(attr.ino, false).unwrap();
    let mut byte = [0];
    file.read_at(4095, &mut byte).unwrap();
    assert_eq!(byte, [2]);
}

/// A device in memory that writes no file's pages while it is `broken`.
struct Failing {
    inner: MemoryDevice,
    broken: AtomicBool,
}

impl Failing {
    fn refused(&self, class: IoClass) -> DeviceResult<()> {
        if self.broken.load(Ordering::Relaxed) && class == IoClass::Writeback {
            return Err(DeviceError {
                operation: "write",
                offset_bytes: 0,
                length_bytes: 0,
                reason: "broken".to_owned(),
                no_space: false,
            });
        }
        Ok(())
    }
}

impl Device for Failing {
    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }
    fn read(&self, offset: u64, buffers: &mut [&mut [u8]], class: IoClass) -> DeviceResult<()> {
        self.inner.read(offset, buffers, class)
    }
    fn write(&self, offset: u64, buffers: &[&[u8]], class: IoClass, fua: bool) -> DeviceResult<()> {
        self.refused(class)?;
        self.inner.write(offset, buffers, class, fua)
    }
    fn flush(&self) -> DeviceResult<()> {
        self.inner.flush()
    }
    fn discard(&self, offset: u64, length: u64) -> DeviceResult<()> {
        self.inner.discard(offset, length)
    }
    fn submit(&self, request: Request, on_done: OnDone) {
        match self.refused(request.class) {
            Ok(()) => self.inner.submit(request, on_done),
            Err(error) => on_done(Err(error), request.buffers),
        }
    }
}

#[test]
fn every_way_to_sync_tells_once_that_an_earlier_writeback_has_failed() {
    type Sync<'a> = (&'a str, &'a dyn Fn(&WeirFs, Handle) -> OpResult<()>);
    let whole = |handle| SyncTarget::File { handle, range: 0..u64::MAX, data_only: false };
    let part = |handle| SyncTarget::File { handle, range: 0..4096, data_only: true };
    let submitted = |fs: &WeirFs, target: &SyncTarget| {
        let (sender, answers) = channel();
        let done: Done = Box::new(move |done| sender.send(done).unwrap());
        assert!(fs.submit_sync(target, done).is_ok());
        answered(fs, &answers)
    };
    // Waits, so that somebody else has to do what is done in the background.
    let waited = |fs: &WeirFs, target: &SyncTarget| {
        let (sender, answers) = channel();
        std::thread::scope(|scope| {
            scope.spawn(move || sender.send(fs.sync(target)).unwrap());
            answered(fs, &answers)
        })
    };
    let ways: [Sync<'_>; 4] = [
        ("fsync", &|fs, handle| waited(fs, &whole(handle))),
        ("a sync of a part", &|fs, handle| waited(fs, &part(handle))),
        ("a ticket", &|fs, handle| submitted(fs, &whole(handle))),
        ("a ticket of a part", &|fs, handle| submitted(fs, &part(handle))),
    ];
    for (what, sync) in ways {
        let inner = MemoryDevice::new(64 << 20);
        let failing = Arc::new(Failing { inner, broken: AtomicBool::new(false) });
        let device: Arc<dyn Device> = Arc::clone(&failing) as _;
        let fs = served_from(&device);
        let (_, handle) = created(&fs, WRITE);
        fs.write(handle, 0, &vec![1; 1 << 20], WriteMode::default()).unwrap();
        fs.handles.get(handle).unwrap().file.expire(0..u64::MAX).unwrap();
        failing.broken.store(true, Ordering::Relaxed);
        fs.volume.background_step(BackgroundWork::Writeback).unwrap_err();
        failing.broken.store(false, Ordering::Relaxed);
        assert_eq!(sync(&fs, handle), Err(Errno::EIO), "{what}");
        assert_eq!(sync(&fs, handle), Ok(()), "{what}, again");
        fs.release(handle);
        fs.close().unwrap();
    }
}

/// `system.posix_acl_*` of as many named users as an attribute has room for.
fn long_list() -> Vec<u8> {
    let entry = |tag: u16, id: u32| {
        [&tag.to_le_bytes()[..], &7_u16.to_le_bytes(), &id.to_le_bytes()].concat()
    };
    let users = (1..=500).map(|id| (2, id));
    let rest = [(4, u32::MAX), (0x10, u32::MAX), (0x20, u32::MAX)];
    let entries = [(1, u32::MAX)].into_iter().chain(users).chain(rest);
    let entries = entries.flat_map(|(tag, id)| entry(tag, id));
    2_u32.to_le_bytes().into_iter().chain(entries).collect()
}

#[test]
fn what_has_no_room_for_its_inherited_list_is_not_made() {
    for file_type in [FileType::Regular, FileType::Directory] {
        let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(16 << 20));
        let fs = served_from(&device);
        fs.setxattr(CALLER, Volume::ROOT, acl::DEFAULT, &long_list(), SetXattr::Any).unwrap();
        let make = |number: u32| {
            let name = number.to_string();
            fs.make(CALLER, Volume::ROOT, name.as_bytes(), &new(file_type)).map(drop)
        };
        let mut refused = 0;
        let mut made = 0;
        for number in 0..100_000 {
            let known = fs.in_use().0;
            match make(number) {
                Ok(()) => made += 1,
                Err(error) => {
                    assert_eq!(error.raw(), libc::ENOSPC);
                    let found = fs.volume.lookup(Volume::ROOT, number.to_string().as_bytes());
                    assert_eq!(found.map(drop), Err(Error::NotFound), "{number}");
                    assert_eq!(fs.in_use().0, known);
                    refused += 1;
                }
            }
            if refused == 20 {
                break;
            }
        }
        assert!(made > 0 && refused == 20, "{made} {refused}");
        fs.close().unwrap();
    }
}

#[test]
fn a_list_follows_chmod_and_ends_set_group_id_if_somebody_outside_of_the_group_sets_it() {
    let fs = fs();
    let (attr, handle) = created(&fs, WRITE);
    let change = SetAttr { gid: Some(7), ..SetAttr::default() };
    fs.setattr(CALLER, attr.ino, &change).unwrap();
    let chmod = |permissions| {
        let change = SetAttr { permissions: Some(permissions), ..SetAttr::default() };
        fs.setattr(CALLER, attr.ino, &change).unwrap();
    };
    for (gid, expected) in [(7, 0o2777), (8, 0o777)] {
        chmod(0o2777);
        let owner = Caller { uid: 1000, gid };
        fs.setxattr(owner, attr.ino, acl::ACCESS, &long_list(), SetXattr::Any).unwrap();
        assert_eq!(fs.getattr(attr.ino).unwrap().permissions, expected, "group {gid}");
    }
    chmod(0o640);
    let list = Acl::parse(&fs.getxattr(attr.ino, acl::ACCESS).unwrap()).unwrap();
    assert_eq!(list.mode_bits(), 0o640);
    fs.release(handle);
    fs.close().unwrap();
}
