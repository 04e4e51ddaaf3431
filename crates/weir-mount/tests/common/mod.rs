//! A file system in memory behind [`FileSystemOps`], and a mount of it: for testing the transport
//! without the engine. One lock, no durability; names `panic` and files written to by `hold` give
//! the tests something to hold on to.

#![allow(dead_code)]

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

use weir::{
    AllocateMode, Attr, DirEntry, FileType, RenameMode, SetAttr, SetTime, StatFs, Timestamp,
};
use weir_mount::ops::{
    Caller, Change, Done, Handle, Make, OpResult, Open, Seek, SetXattr, SyncTarget, Visit,
    VisitPlus, Wait, WriteMode,
};
use weir_mount::{Controller, Errno, FileSystemOps, MountError, MountOptions, mount};

const ENOTEMPTY: i32 = 39;
const EEXIST: i32 = 17;

struct Node {
    attr: Attr,
    data: Vec<u8>,
    target: Vec<u8>,
    entries: BTreeMap<Vec<u8>, u64>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    lookups: u64,
}

struct State {
    nodes: HashMap<u64, Node>,
    handles: HashMap<u64, u64>,
    next: u64,
    panics: Vec<String>,
    synced_writes: u64,
    largest_write: usize,
    full_syncs: u64,
}

/// The file system.
pub struct MemoryFs {
    state: Mutex<State>,
    /// Files whose fsync waits until [`MemoryFs::let_go`].
    held: Mutex<bool>,
    changed: Condvar,
    pub waiting_fsyncs: AtomicU64,
    pub xattr_reads: AtomicU64,
    /// Names of the threads that have changed sizes.
    pub resized_by: Mutex<Vec<String>>,
    /// Every change is promised to be durable before its answer.
    pub is_synchronous: AtomicBool,
    /// How often something was made durable for that.
    pub made_durable: AtomicU64,
}

fn attr(ino: u64, file_type: FileType, permissions: u32, caller: Caller) -> Attr {
    let time = Timestamp { seconds: 1_000_000_000, nanoseconds: 123_456_789 };
    Attr {
        ino,
        file_type,
        permissions,
        links: if file_type == FileType::Directory { 2 } else { 1 },
        uid: caller.uid,
        gid: caller.gid,
        size_bytes: 0,
        blocks: 0,
        rdev: 0,
        atime: time,
        mtime: time,
        ctime: time,
        btime: time,
        change_counter: 0,
    }
}

impl State {
    fn node(&mut self, ino: u64) -> OpResult<&mut Node> {
        self.nodes.get_mut(&ino).ok_or(Errno::ENOENT)
    }
    fn child(&mut self, dir: u64, name: &[u8]) -> OpResult<u64> {
        self.node(dir)?.entries.get(name).copied().ok_or(Errno::ENOENT)
    }
    fn file(&mut self, handle: Handle) -> OpResult<&mut Node> {
        let ino = *self.handles.get(&handle.0).ok_or(Errno::EBADF)?;
        self.node(ino)
    }
    fn referenced(&mut self, ino: u64) -> OpResult<Attr> {
        let node = self.node(ino)?;
        node.lookups += 1;
        Ok(node.attr.clone())
    }
    fn open(&mut self, ino: u64) -> Handle {
        self.next += 1;
        self.handles.insert(self.next, ino);
        Handle(self.next)
    }
    fn new_node(&mut self, attr_of: impl FnOnce(u64) -> Attr) -> u64 {
        self.next += 1;
        let ino = self.next;
        let node = Node {
            attr: attr_of(ino),
            data: Vec::new(),
            target: Vec::new(),
            entries: BTreeMap::new(),
            xattrs: BTreeMap::new(),
            lookups: 0,
        };
        self.nodes.insert(ino, node);
        ino
    }
    fn name(&mut self, dir: u64, name: &[u8], ino: u64) -> OpResult<()> {
        let entries = &mut self.node(dir)?.entries;
        if entries.contains_key(name) {
            return Err(Errno::from_raw(EEXIST));
        }
        entries.insert(name.to_vec(), ino);
        Ok(())
    }
}

impl MemoryFs {
    pub fn new() -> Arc<Self> {
        let mut state = State {
            nodes: HashMap::new(),
            handles: HashMap::new(),
            next: 0,
            panics: Vec::new(),
            synced_writes: 0,
            largest_write: 0,
            full_syncs: 0,
        };
        let root = Caller { uid: 0, gid: 0 };
        assert_eq!(state.new_node(|ino| attr(ino, FileType::Directory, 0o755, root)), 1);
        Arc::new(Self {
            state: Mutex::new(state),
            held: Mutex::new(false),
            changed: Condvar::new(),
            waiting_fsyncs: AtomicU64::new(0),
            xattr_reads: AtomicU64::new(0),
            resized_by: Mutex::default(),
            is_synchronous: AtomicBool::new(false),
            made_durable: AtomicU64::new(0),
        })
    }
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
    /// Inodes that exist or are known to the kernel.
    pub fn nodes(&self) -> usize {
        self.state().nodes.len()
    }
    pub fn panics(&self) -> Vec<String> {
        self.state().panics.clone()
    }
    pub fn synced_writes(&self) -> u64 {
        self.state().synced_writes
    }
    pub fn full_syncs(&self) -> u64 {
        self.state().full_syncs
    }
    pub fn largest_write(&self) -> usize {
        self.state().largest_write
    }
    pub fn open_handles(&self) -> usize {
        self.state().handles.len()
    }
    pub fn lookups(&self, ino: u64) -> Option<u64> {
        self.state().nodes.get(&ino).map(|node| node.lookups)
    }
    /// From now on every fsync waits.
    pub fn hold_fsyncs(&self) {
        *self.held.lock().unwrap() = true;
    }
    /// Ends [`MemoryFs::hold_fsyncs`].
    pub fn let_go(&self) {
        *self.held.lock().unwrap() = false;
        self.changed.notify_all();
    }
}

impl FileSystemOps for MemoryFs {
    fn lookup(&self, parent: u64, name: &[u8]) -> OpResult<Attr> {
        assert!(name != b"panic", "asked for the name 'panic'");
        let mut state = self.state();
        let ino = state.child(parent, name)?;
        state.referenced(ino)
    }
    fn forget(&self, ino: u64, count: u64) {
        let mut state = self.state();
        if let Ok(node) = state.node(ino) {
            node.lookups = node.lookups.saturating_sub(count);
            if node.lookups == 0 && node.attr.links == 0 {
                state.nodes.remove(&ino);
            }
        }
    }
    fn getattr(&self, ino: u64) -> OpResult<Attr> {
        self.state().node(ino).map(|node| node.attr.clone())
    }
    fn setattr(&self, _caller: Caller, ino: u64, change: &SetAttr) -> OpResult<Attr> {
        let mut state = self.state();
        let node = state.node(ino)?;
        if let Some(permissions) = change.permissions {
            node.attr.permissions = permissions;
        }
        node.attr.uid = change.uid.unwrap_or(node.attr.uid);
        node.attr.gid = change.gid.unwrap_or(node.attr.gid);
        if change.kill_suid_sgid {
            node.attr.permissions &= !0o6000;
        }
        if let Some(size) = change.size_bytes {
            let thread = std::thread::current();
            self.resized_by.lock().unwrap().push(thread.name().unwrap_or_default().to_owned());
            node.data.resize(size as usize, 0);
            node.attr.size_bytes = size;
        }
        if let Some(SetTime::At(time)) = change.mtime {
            node.attr.mtime = time;
        }
        if let Some(SetTime::At(time)) = change.atime {
            node.attr.atime = time;
        }
        Ok(node.attr.clone())
    }
    fn make(&self, caller: Caller, parent: u64, name: &[u8], new: &Make) -> OpResult<Attr> {
        let mut state = self.state();
        if state.child(parent, name).is_ok() {
            return Err(Errno::from_raw(EEXIST));
        }
        let permissions = new.permissions & !new.umask;
        let ino = state.new_node(|ino| Attr {
            rdev: new.rdev,
            ..attr(ino, new.file_type, permissions, caller)
        });
        state.name(parent, name, ino)?;
        state.referenced(ino)
    }
    fn create(
        &self,
        caller: Caller,
        parent: u64,
        name: &[u8],
        new: &Make,
        _open: Open,
        _exclusive: bool,
    ) -> OpResult<(Attr, Handle)> {
        let attr = self.make(caller, parent, name, new)?;
        let handle = self.state().open(attr.ino);
        Ok((attr, handle))
    }
    fn tmpfile(&self, _caller: Caller, _parent: u64, _new: &Make) -> OpResult<(Attr, Handle)> {
        Err(Errno::EOPNOTSUPP)
    }
    fn symlink(&self, caller: Caller, parent: u64, name: &[u8], target: &[u8]) -> OpResult<Attr> {
        let mut state = self.state();
        let ino = state.new_node(|ino| Attr {
            size_bytes: target.len() as u64,
            ..attr(ino, FileType::Symlink, 0o777, caller)
        });
        state.node(ino)?.target = target.to_vec();
        state.name(parent, name, ino)?;
        state.referenced(ino)
    }
    fn readlink(&self, ino: u64) -> OpResult<Vec<u8>> {
        self.state().node(ino).map(|node| node.target.clone())
    }
    fn link(&self, ino: u64, parent: u64, name: &[u8]) -> OpResult<Attr> {
        let mut state = self.state();
        state.name(parent, name, ino)?;
        state.node(ino)?.attr.links += 1;
        state.referenced(ino)
    }
    fn unlink(&self, parent: u64, name: &[u8]) -> OpResult<()> {
        let mut state = self.state();
        let ino = state.child(parent, name)?;
        state.node(parent)?.entries.remove(name);
        state.node(ino)?.attr.links -= 1;
        Ok(())
    }
    fn rmdir(&self, parent: u64, name: &[u8]) -> OpResult<()> {
        let mut state = self.state();
        let ino = state.child(parent, name)?;
        if !state.node(ino)?.entries.is_empty() {
            return Err(Errno::from_raw(ENOTEMPTY));
        }
        state.node(parent)?.entries.remove(name);
        state.node(ino)?.attr.links = 0;
        Ok(())
    }
    fn rename(
        &self,
        parent: u64,
        name: &[u8],
        new_parent: u64,
        new_name: &[u8],
        mode: RenameMode,
    ) -> OpResult<()> {
        let mut state = self.state();
        let ino = state.child(parent, name)?;
        let target = state.child(new_parent, new_name).ok();
        match (mode, target) {
            (RenameMode::NoReplace, Some(_)) => return Err(Errno::from_raw(EEXIST)),
            (RenameMode::Exchange, None) => return Err(Errno::ENOENT),
            (RenameMode::Exchange, Some(other)) => {
                state.node(parent)?.entries.insert(name.to_vec(), other);
            }
            (_, other) => {
                if let Some(other) = other {
                    state.node(other)?.attr.links -= 1;
                }
                state.node(parent)?.entries.remove(name);
            }
        }
        state.node(new_parent)?.entries.insert(new_name.to_vec(), ino);
        Ok(())
    }
    fn readdir(&self, dir: u64, cookie: u64, visit: Visit<'_>) -> OpResult<()> {
        let mut state = self.state();
        let entries: Vec<_> = state.node(dir)?.entries.clone().into_iter().collect();
        for (index, (name, ino)) in entries.into_iter().enumerate().skip(cookie as usize) {
            let file_type = state.node(ino)?.attr.file_type;
            let entry = DirEntry { name, ino, file_type, cookie: index as u64 + 1 };
            if !visit(&entry) {
                return Ok(());
            }
        }
        Ok(())
    }
    fn readdir_plus(&self, dir: u64, cookie: u64, visit: VisitPlus<'_>) -> OpResult<()> {
        let mut entries = Vec::new();
        self.readdir(dir, cookie, &mut |entry| {
            entries.push(entry.clone());
            true
        })?;
        for entry in entries {
            let attr = self.state().referenced(entry.ino)?;
            if !visit(&entry, Ok(&attr)) {
                self.forget(entry.ino, 1);
                return Ok(());
            }
        }
        Ok(())
    }
    fn open(&self, caller: Caller, ino: u64, open: Open) -> OpResult<Handle> {
        if open.truncate {
            let change = SetAttr { size_bytes: Some(0), ..SetAttr::default() };
            self.setattr(caller, ino, &change)?;
        }
        Ok(self.state().open(ino))
    }
    fn release(&self, handle: Handle) {
        self.state().handles.remove(&handle.0);
    }
    fn read(&self, handle: Handle, offset: u64, buffer: &mut [u8], wait: Wait) -> OpResult<usize> {
        if wait == Wait::No && offset.is_multiple_of(8192) {
            return Err(Errno::EAGAIN);
        }
        let mut state = self.state();
        let data = &state.file(handle)?.data;
        let start = (offset as usize).min(data.len());
        let end = (start + buffer.len()).min(data.len());
        buffer[..end - start].copy_from_slice(&data[start..end]);
        Ok(end - start)
    }
    fn write(&self, handle: Handle, offset: u64, data: &[u8], mode: WriteMode) -> OpResult<usize> {
        let mut state = self.state();
        state.largest_write = state.largest_write.max(data.len());
        state.synced_writes += u64::from(mode.data_sync);
        state.full_syncs += u64::from(mode.full_sync);
        let node = state.file(handle)?;
        if mode.kill_suid_sgid {
            node.attr.permissions &= !0o6000;
        }
        let end = offset as usize + data.len();
        if node.data.len() < end {
            node.data.resize(end, 0);
        }
        node.data[offset as usize..end].copy_from_slice(data);
        node.attr.size_bytes = node.data.len() as u64;
        Ok(data.len())
    }
    fn sync(&self, target: &SyncTarget) -> OpResult<()> {
        if let SyncTarget::File { range, data_only, .. } = target
            && range.end != u64::MAX
        {
            // The second half of a synchronous write.
            self.state().synced_writes += u64::from(*data_only);
            self.state().full_syncs += u64::from(!*data_only);
        }
        let mut held = self.held.lock().unwrap();
        self.waiting_fsyncs.fetch_add(1, Ordering::SeqCst);
        while *held {
            held = self.changed.wait(held).unwrap();
        }
        self.waiting_fsyncs.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    }
    fn must_be_durable(&self, _change: Change) -> bool {
        self.is_synchronous.load(Ordering::SeqCst)
    }
    fn make_durable(&self, done: Done) {
        self.made_durable.fetch_add(1, Ordering::SeqCst);
        // On another thread, as it is where a disk is waited for.
        std::thread::spawn(move || done(Ok(())));
    }
    fn allocate(
        &self,
        _caller: Caller,
        _handle: Handle,
        _mode: AllocateMode,
        _offset: u64,
        _length: u64,
    ) -> OpResult<()> {
        Err(Errno::EOPNOTSUPP)
    }
    fn seek(&self, handle: Handle, offset: u64, seek: Seek) -> OpResult<u64> {
        let size = self.state().file(handle)?.attr.size_bytes;
        match seek {
            _ if offset >= size => Err(Errno::ENXIO),
            Seek::Data => Ok(offset),
            Seek::Hole => Ok(size),
        }
    }
    fn copy_range(
        &self,
        _caller: Caller,
        from: Handle,
        offset: u64,
        to: Handle,
        to_offset: u64,
        length: u64,
    ) -> OpResult<u64> {
        let mut buffer = vec![0; length as usize];
        let read = self.read(from, offset, &mut buffer, Wait::Yes)?;
        buffer.truncate(read);
        self.write(to, to_offset, &buffer, WriteMode::default()).map(|copied| copied as u64)
    }
    fn getxattr(&self, ino: u64, name: &[u8]) -> OpResult<Vec<u8>> {
        self.xattr_reads.fetch_add(1, Ordering::SeqCst);
        self.state().node(ino)?.xattrs.get(name).cloned().ok_or(Errno::ENODATA)
    }
    fn setxattr(
        &self,
        _caller: Caller,
        ino: u64,
        name: &[u8],
        value: &[u8],
        mode: SetXattr,
    ) -> OpResult<()> {
        let mut state = self.state();
        let xattrs = &mut state.node(ino)?.xattrs;
        match (mode, xattrs.contains_key(name)) {
            (SetXattr::Create, true) => return Err(Errno::from_raw(EEXIST)),
            (SetXattr::Replace, false) => return Err(Errno::ENODATA),
            _ => {}
        }
        xattrs.insert(name.to_vec(), value.to_vec());
        Ok(())
    }
    fn listxattr(&self, ino: u64) -> OpResult<Vec<Vec<u8>>> {
        Ok(self.state().node(ino)?.xattrs.keys().cloned().collect())
    }
    fn removexattr(&self, ino: u64, name: &[u8]) -> OpResult<()> {
        self.state().node(ino)?.xattrs.remove(name).map(|_| ()).ok_or(Errno::ENODATA)
    }
    fn statfs(&self) -> OpResult<StatFs> {
        Ok(StatFs {
            total_blocks: 1000,
            free_blocks: 900,
            available_blocks: 800,
            inodes: 10,
            free_inodes: 90,
            max_name_bytes: 255,
        })
    }
    fn panicked(&self, what: &str) {
        self.state().panics.push(what.to_owned());
    }
}

/// A mount that is taken off when dropped.
pub struct TestMount {
    pub dir: tempfile::TempDir,
    pub controller: Controller,
    server: Option<JoinHandle<Result<(), MountError>>>,
}

impl TestMount {
    /// Mounts `ops`; `None` (and a word why) where this machine cannot mount.
    pub fn new(ops: Arc<dyn FileSystemOps>, options: &str) -> Option<Self> {
        if !Self::can_mount() {
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().to_owned();
        Some(Self::start(dir, &at, ops, options))
    }
    /// As [`TestMount::new`], at `dir`.
    pub fn at(dir: &Path, ops: Arc<dyn FileSystemOps>, options: &str) -> Option<Self> {
        Self::can_mount().then(|| Self::start(tempfile::tempdir().unwrap(), dir, ops, options))
    }
    fn can_mount() -> bool {
        let can = rustix::process::geteuid().is_root() && Path::new("/dev/fuse").exists();
        if !can {
            eprintln!("skipped: mounting needs root and /dev/fuse");
        }
        can
    }
    fn start(
        dir: tempfile::TempDir,
        at: &Path,
        ops: Arc<dyn FileSystemOps>,
        options: &str,
    ) -> Self {
        let mut mount_options = MountOptions::default();
        mount_options.apply(options).unwrap();
        let session = mount(at, ops, &mount_options).unwrap();
        let controller = session.controller();
        let server = std::thread::spawn(move || session.serve());
        Self { dir, controller, server: Some(server) }
    }
    pub fn path(&self) -> &Path {
        self.dir.path()
    }
    /// Waits until the server ended by itself.
    pub fn join(mut self) -> Result<(), MountError> {
        self.server.take().unwrap().join().unwrap()
    }
}

impl Drop for TestMount {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            let _ = self.controller.unmount(true);
            let _ = server.join();
        }
    }
}
