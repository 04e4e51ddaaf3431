//! A flush that fails, seen from the programs on a mount: nothing is acknowledged any more, what is in memory stays readable,
//! and the mount says what happened. And a disk that refuses a checkpoint only. Skipped, with a word, where this machine cannot mount.
#![allow(missing_docs)]

mod common;

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use common::TestMount;
use weir::device::memory::MemoryDevice;
use weir::device::{
    Buffers, Device, DeviceError, DeviceInfo, DeviceResult, IoClass, OnDone, Operation, Request,
};
use weir::format::root;
use weir::{CreateOptions, Volume, VolumeOptions};
use weir_mount::{WeirFs, client, ioctl};

/// A disk with a volatile cache that fails to flush from some moment on, and one that does not take checkpoints' roots for a while.
struct Failing {
    memory: MemoryDevice,
    broken: AtomicBool,
    refuses_roots: AtomicBool,
    /// Data does not get home.
    refuses_data: AtomicBool,
}

fn failed(operation: &'static str, reason: &str) -> DeviceResult<()> {
    let (offset_bytes, length_bytes, no_space) = (0, 0, false);
    Err(DeviceError { operation, offset_bytes, length_bytes, reason: reason.to_owned(), no_space })
}

impl Failing {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            memory: MemoryDevice::new(128 << 20),
            broken: AtomicBool::new(false),
            refuses_roots: AtomicBool::new(false),
            refuses_data: AtomicBool::new(false),
        })
    }

    fn refuses(&self, class: IoClass) -> bool {
        let is_data = matches!(class, IoClass::SyncWrite | IoClass::Writeback);
        is_data && self.refuses_data.load(Ordering::SeqCst)
    }

    fn flush_result(&self) -> DeviceResult<()> {
        if self.broken.load(Ordering::SeqCst) {
            return failed("flush", "the disk is gone");
        }
        Ok(())
    }
}

/// A new volume on `device`, and what its mount has told its log.
fn served(device: &Arc<Failing>) -> (Arc<WeirFs>, Arc<Mutex<Vec<String>>>) {
    let shared: Arc<dyn Device> = device.clone();
    Volume::format_device(&shared, &CreateOptions::default()).unwrap();
    let volume = Volume::open_device(shared, VolumeOptions::default()).unwrap();
    let said = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&said);
    let sink = Box::new(move |text: &str| log.lock().unwrap().push(text.to_owned()));
    (Arc::new(WeirFs::new(volume, true, sink).unwrap()), said)
}

fn status(mount: &TestMount) -> String {
    let mut value = [0; 512];
    let bytes = rustix::fs::getxattr(mount.path(), "weir.status", &mut value).unwrap();
    String::from_utf8_lossy(&value[..bytes]).into_owned()
}

impl Device for Failing {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { fua: false, volatile_cache: true, ..self.memory.info() }
    }
    fn read(&self, offset: u64, buffers: &mut [&mut [u8]], class: IoClass) -> DeviceResult<()> {
        self.memory.read(offset, buffers, class)
    }
    fn write(&self, offset: u64, buffers: &[&[u8]], class: IoClass, fua: bool) -> DeviceResult<()> {
        let is_root = buffers.first().is_some_and(|first| first.starts_with(&root::MAGIC));
        let refused = is_root && self.refuses_roots.load(Ordering::SeqCst);
        if refused || self.refuses(class) {
            return failed("write", "bad medium");
        }
        self.memory.write(offset, buffers, class, fua)
    }
    fn flush(&self) -> DeviceResult<()> {
        self.flush_result()
    }
    fn discard(&self, offset: u64, length: u64) -> DeviceResult<()> {
        self.memory.discard(offset, length)
    }
    fn submit(&self, request: Request, on_done: OnDone) {
        if request.operation == Operation::Flush {
            return on_done(self.flush_result(), Buffers::None);
        }
        if matches!(request.operation, Operation::Write { .. }) && self.refuses(request.class) {
            return on_done(failed("write", "bad medium"), request.buffers);
        }
        self.memory.submit(request, on_done);
    }
}

fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> Option<i32> {
    result.unwrap_err().raw_os_error()
}

fn state(file: &File) -> String {
    let stats: serde_json::Value = serde_json::from_slice(&client::stats(file).unwrap()).unwrap();
    stats["volume"]["state"].as_str().unwrap().to_owned()
}

#[test]
fn after_a_failed_flush_every_sync_is_an_error_memory_is_readable_and_the_mount_says_why() {
    let device = Failing::new();
    let (fs, said) = served(&device);
    let Some(mount) = TestMount::new(fs, "threads=2") else { return };

    fs::write(mount.path().join("before"), "durable").unwrap();
    let dir = File::open(mount.path()).unwrap();
    dir.sync_all().unwrap();
    assert_eq!(state(&dir), "ok");
    let files: Vec<_> = (0..6)
        .map(|number| {
            let mut file = File::create(mount.path().join(format!("f{number}"))).unwrap();
            file.write_all(b"in memory").unwrap();
            file
        })
        .collect();

    device.broken.store(true, Ordering::SeqCst);
    // Some wait on a server thread, some hold a ticket.
    let syncers: Vec<_> =
        files.into_iter().map(|file| thread::spawn(move || (file.sync_all(), file))).collect();
    for syncer in syncers {
        let (synced, file) = syncer.join().unwrap();
        assert_eq!(errno(synced), Some(libc::EIO));
        assert_eq!(errno(file.sync_data()), Some(libc::EIO), "and again");
        assert_eq!(errno(file.write_all_at(b"more", 0)), Some(libc::EIO));
    }
    assert_eq!(errno(dir.sync_all()), Some(libc::EIO));
    assert_eq!(errno(client::sync_volume(&dir, 0)), Some(libc::EIO));
    assert_eq!(errno(client::barrier(&dir, 0)), Some(libc::EIO));
    let last = client::lsn(&dir).unwrap().last;
    assert_eq!(errno(client::wait_lsn(&dir, last, 0, ioctl::WAIT_PUSH)), Some(libc::EIO));
    assert_eq!(errno(client::wait_lsn(&dir, last, 10_000_000, 0)), Some(libc::EIO));
    assert_eq!(errno(File::create(mount.path().join("new"))), Some(libc::EIO));

    assert_eq!(fs::read_to_string(mount.path().join("f3")).unwrap(), "in memory");
    assert_eq!(fs::read_to_string(mount.path().join("before")).unwrap(), "durable");
    let state = state(&dir);
    assert!(state.starts_with("shut down") && state.contains("the disk is gone"), "{state}");
    let status = status(&mount);
    assert!(status.contains("shut down: "), "{status}");
    let said = said.lock().unwrap();
    assert!(said.iter().any(|line| line.contains("the disk is gone")), "{said:?}");
}

#[test]
fn a_checkpoint_that_the_disk_refuses_is_told_and_programs_go_on() {
    let device = Failing::new();
    let (fs, said) = served(&device);
    let Some(mount) = TestMount::new(fs.clone(), "threads=2") else { return };
    device.refuses_roots.store(true, Ordering::SeqCst);
    let synced = |name: &str| {
        let mut file = File::create(mount.path().join(name)).unwrap();
        file.write_all(b"durable").unwrap();
        file.sync_all()
    };
    synced("before").unwrap();
    let refused = fs.volume().checkpoint();
    assert!(matches!(refused, Err(weir::Error::Io(_))), "{refused:?}");
    synced("meanwhile").unwrap();
    let told = status(&mount);
    assert!(told.contains("tried again") && told.contains("bad medium"), "{told}");
    // The log hears of it though no request has failed.
    let begun = Instant::now();
    while !said.lock().unwrap().iter().any(|line| line.contains("bad medium")) {
        assert!(begun.elapsed() < Duration::from_secs(60), "the log was not told");
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(fs.trouble().device_errors, 0);
    device.refuses_roots.store(false, Ordering::SeqCst);
    fs.volume().checkpoint().unwrap();
    assert_eq!(status(&mount), "ok");
    synced("after").unwrap();
}

#[test]
fn the_error_of_a_sync_that_was_started_is_told_by_the_next_one_once() {
    let device = Failing::new();
    let (fs, _) = served(&device);
    let Some(mount) = TestMount::new(fs.clone(), "threads=2") else { return };
    let file = File::create(mount.path().join("f")).unwrap();
    file.sync_all().unwrap();
    // More than a frame takes, so it goes home, and apart, so that nobody sends it there before it is asked for.
    for page in 0..100 {
        file.write_all_at(&[1; 4096], page * 40_960).unwrap();
    }
    device.refuses_data.store(true, Ordering::SeqCst);
    client::sync_range(&file, 0, 0, ioctl::SYNC_START).unwrap();
    while fs.volume().stats().tickets > 0 {
        thread::yield_now();
    }
    device.refuses_data.store(false, Ordering::SeqCst);
    assert_eq!(errno(file.sync_all()), Some(libc::EIO), "the program has not heard of it");
    file.sync_all().unwrap();
}
