//! The slow-flush disk: a RAM-backed file served through FUSE whose `fsync` takes a given time.
//!
//! It runs in a process of its own: the loop device on top of it must not depend on memory that
//! the measuring process waits for. Reads and writes are answered at memory speed. Flushes are
//! carried out one after another by one thread, as a device does, and never hold up a read or
//! write here (what lies above may: a loop device submits nothing while it waits for a flush).

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant, UNIX_EPOCH};

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, WriteFlags,
};

/// Name of the one file.
pub const FILE_NAME: &str = "disk";

const TTL: Duration = Duration::from_secs(3600);
const FILE_INODE: INodeNo = INodeNo(2);

struct SlowDisk {
    memory: File,
    size_bytes: u64,
    flushes: Sender<ReplyEmpty>,
}

impl SlowDisk {
    fn attr(&self, ino: INodeNo) -> FileAttr {
        let root = ino == INodeNo::ROOT;
        FileAttr {
            ino,
            size: if root { 0 } else { self.size_bytes },
            blocks: if root { 0 } else { self.size_bytes / 512 },
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if root { FileType::Directory } else { FileType::RegularFile },
            perm: if root { 0o755 } else { 0o600 },
            nlink: if root { 2 } else { 1 },
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

impl Filesystem for SlowDisk {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Each is an optimisation the kernel may lack: the disk works without.
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        let _ = config.set_max_write(1 << 20);
        let _ = config.set_max_background(256);
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if parent == INodeNo::ROOT && name == FILE_NAME {
            reply.entry(&TTL, &self.attr(FILE_INODE), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        if ino == INodeNo::ROOT || ino == FILE_INODE {
            reply.attr(&TTL, &self.attr(ino));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn open(&self, _req: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let flags = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        reply.opened(FileHandle(0), flags);
    }

    fn read(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut buf = vec![0; (size as usize).min(self.size_bytes.saturating_sub(offset) as usize)];
        match self.memory.read_exact_at(&mut buf, offset) {
            Ok(()) => reply.data(&buf),
            Err(_) => reply.error(Errno::EIO),
        }
    }

    fn write(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        if offset.saturating_add(data.len() as u64) > self.size_bytes {
            reply.error(Errno::ENOSPC);
            return;
        }
        match self.memory.write_all_at(data, offset) {
            Ok(()) => reply.written(data.len() as u32),
            Err(_) => reply.error(Errno::EIO),
        }
    }

    fn fsync(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        if let Err(refused) = self.flushes.send(reply) {
            refused.0.error(Errno::EIO);
        }
    }

    fn flush(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn readdir(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        if offset == 0 {
            let _full = reply.add(FILE_INODE, 1, FileType::RegularFile, FILE_NAME);
        }
        reply.ok();
    }
}

/// Sleeps precisely: the timer's slack (50 µs and more) would be a tax on every flush.
fn wait_exactly(time: Duration) {
    let begun = Instant::now();
    if let Some(coarse) = time.checked_sub(Duration::from_micros(150)) {
        std::thread::sleep(coarse);
    }
    while begun.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// Serves the disk until it is unmounted.
pub fn serve(mount_point: &Path, size_bytes: u64, flush: Duration) -> io::Result<()> {
    let memory = rustix::fs::memfd_create("weir-lab-disk", rustix::fs::MemfdFlags::CLOEXEC)?;
    let memory = File::from(memory);
    memory.set_len(size_bytes)?;
    let (flushes, queue) = channel::<ReplyEmpty>();
    std::thread::spawn(move || {
        for reply in queue {
            wait_exactly(flush);
            reply.ok();
        }
    });
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName("weir-lab-slow-disk".into()),
        MountOption::RW,
        MountOption::NoAtime,
    ];
    config.n_threads = Some(2);
    config.clone_fd = true;
    fuser::mount(SlowDisk { memory, size_bytes, flushes }, mount_point, &config)
}
