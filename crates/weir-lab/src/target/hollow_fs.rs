//! The operations of [`super::hollow`]: names and attributes in memory, and nothing else.
//!
//! What is written is counted and thrown away, and reads as zeros; a sync is over before it begins. Attributes other than
//! those of `stat` are not there, and neither are commands. One lock, a leaf, held for a look-up in a map or two.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use weir::{
    AllocateMode, Attr, DirEntry, FileType, RenameMode, SetAttr, SetTime, StatFs, Timestamp,
};
use weir_mount::errno::Errno;
use weir_mount::ops::{
    Caller, FileSystemOps, Handle, Make, OpResult, Open, Seek, SetXattr, SyncTarget, Visit,
    VisitPlus, Wait, WriteMode,
};

const ROOT: u64 = 1;
const PAGE_BYTES: u64 = 4096;

struct Node {
    attr: Attr,
    /// References that the kernel holds.
    known: u64,
    /// Of a directory.
    parent: u64,
    names: BTreeMap<Vec<u8>, u64>,
    /// Of a symbolic link.
    target: Vec<u8>,
}

/// Everything there is, by inode number.
struct Nodes {
    by_number: HashMap<u64, Node>,
    last: u64,
}

/// See the module's head. A handle is the number of its inode.
pub struct HollowFs(Mutex<Nodes>);

fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp { seconds: since.as_secs() as i64, nanoseconds: since.subsec_nanos() }
}

impl Node {
    fn new(ino: u64, parent: u64, caller: Caller, new: &Make) -> Self {
        let now = now();
        let is_directory = new.file_type == FileType::Directory;
        let attr = Attr {
            ino,
            file_type: new.file_type,
            permissions: new.permissions & !new.umask,
            links: if is_directory { 2 } else { 1 },
            uid: caller.uid,
            gid: caller.gid,
            size_bytes: 0,
            blocks: 0,
            rdev: new.rdev,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            change_counter: 0,
        };
        Self { attr, known: 0, parent, names: BTreeMap::new(), target: Vec::new() }
    }

    fn resize(&mut self, size_bytes: u64) {
        self.attr.size_bytes = size_bytes;
        self.attr.blocks = size_bytes.div_ceil(PAGE_BYTES);
    }

    fn refer(&mut self) -> Attr {
        self.known += 1;
        self.attr.clone()
    }
}

impl Nodes {
    fn node(&mut self, ino: u64) -> OpResult<&mut Node> {
        self.by_number.get_mut(&ino).ok_or(Errno::ESTALE)
    }

    fn find(&self, parent: u64, name: &[u8]) -> OpResult<u64> {
        let parent = self.by_number.get(&parent).ok_or(Errno::ESTALE)?;
        parent.names.get(name).copied().ok_or(Errno::ENOENT)
    }

    /// A new inode; with a name if one is given.
    fn make(
        &mut self,
        caller: Caller,
        parent: u64,
        name: Option<&[u8]>,
        new: &Make,
    ) -> OpResult<&mut Node> {
        let ino = self.last + 1;
        if let Some(name) = name {
            let directory = self.node(parent)?;
            if directory.names.contains_key(name) {
                return Err(Errno::from_raw(libc::EEXIST));
            }
            directory.names.insert(name.to_vec(), ino);
        }
        self.last = ino;
        let mut node = Node::new(ino, parent, caller, new);
        if name.is_none() {
            node.attr.links = 0;
        }
        Ok(self.by_number.entry(ino).or_insert(node))
    }

    /// One link less; a node that nobody knows by name or otherwise is gone.
    fn unlink(&mut self, ino: u64, links: u32) -> OpResult<()> {
        let node = self.node(ino)?;
        node.attr.links = node.attr.links.saturating_sub(links);
        self.drop_if_unused(ino);
        Ok(())
    }

    fn drop_if_unused(&mut self, ino: u64) {
        if self.by_number.get(&ino).is_some_and(|node| node.attr.links == 0 && node.known == 0) {
            self.by_number.remove(&ino);
        }
    }

    fn remove(&mut self, parent: u64, name: &[u8], directory: bool) -> OpResult<()> {
        let ino = self.find(parent, name)?;
        let node = self.node(ino)?;
        match (node.attr.file_type == FileType::Directory, directory) {
            (true, false) => return Err(Errno::EISDIR),
            (false, true) => return Err(Errno::from_raw(libc::ENOTDIR)),
            (true, true) if !node.names.is_empty() => {
                return Err(Errno::from_raw(libc::ENOTEMPTY));
            }
            _ => {}
        }
        self.node(parent)?.names.remove(name);
        self.unlink(ino, if directory { 2 } else { 1 })
    }
}

impl HollowFs {
    /// An empty one; the root belongs to root.
    pub fn new() -> Self {
        let root = Make { file_type: FileType::Directory, permissions: 0o755, umask: 0, rdev: 0 };
        let root = Node::new(ROOT, ROOT, Caller { uid: 0, gid: 0 }, &root);
        Self(Mutex::new(Nodes { by_number: HashMap::from([(ROOT, root)]), last: ROOT }))
    }

    fn nodes(&self) -> MutexGuard<'_, Nodes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn grow(&self, handle: Handle, end: u64) -> OpResult<()> {
        let mut nodes = self.nodes();
        let node = nodes.node(handle.0)?;
        if end > node.attr.size_bytes {
            node.resize(end);
        }
        Ok(())
    }
}

impl FileSystemOps for HollowFs {
    fn lookup(&self, parent: u64, name: &[u8]) -> OpResult<Attr> {
        let mut nodes = self.nodes();
        let ino = nodes.find(parent, name)?;
        Ok(nodes.node(ino)?.refer())
    }

    fn forget(&self, ino: u64, count: u64) {
        let mut nodes = self.nodes();
        if let Ok(node) = nodes.node(ino) {
            node.known = node.known.saturating_sub(count);
            nodes.drop_if_unused(ino);
        }
    }

    fn getattr(&self, ino: u64) -> OpResult<Attr> {
        Ok(self.nodes().node(ino)?.attr.clone())
    }

    fn setattr(&self, _caller: Caller, ino: u64, change: &SetAttr) -> OpResult<Attr> {
        let mut nodes = self.nodes();
        let node = nodes.node(ino)?;
        if let Some(size_bytes) = change.size_bytes {
            node.resize(size_bytes);
        }
        let attr = &mut node.attr;
        attr.permissions = change.permissions.unwrap_or(attr.permissions);
        attr.uid = change.uid.unwrap_or(attr.uid);
        attr.gid = change.gid.unwrap_or(attr.gid);
        let time = |to: Option<SetTime>, was| match to {
            Some(SetTime::At(time)) => time,
            Some(SetTime::Now) => now(),
            None => was,
        };
        attr.atime = time(change.atime, attr.atime);
        attr.mtime = time(change.mtime, attr.mtime);
        Ok(attr.clone())
    }

    fn make(&self, caller: Caller, parent: u64, name: &[u8], new: &Make) -> OpResult<Attr> {
        let mut nodes = self.nodes();
        Ok(nodes.make(caller, parent, Some(name), new)?.refer())
    }

    fn create(
        &self,
        caller: Caller,
        parent: u64,
        name: &[u8],
        new: &Make,
        open: Open,
        exclusive: bool,
    ) -> OpResult<(Attr, Handle)> {
        let mut nodes = self.nodes();
        let node = match nodes.find(parent, name) {
            Ok(_) if exclusive => return Err(Errno::from_raw(libc::EEXIST)),
            Ok(ino) => nodes.node(ino)?,
            Err(_) => nodes.make(caller, parent, Some(name), new)?,
        };
        if open.truncate {
            node.resize(0);
        }
        Ok((node.refer(), Handle(node.attr.ino)))
    }

    fn tmpfile(&self, caller: Caller, parent: u64, new: &Make) -> OpResult<(Attr, Handle)> {
        let mut nodes = self.nodes();
        let node = nodes.make(caller, parent, None, new)?;
        Ok((node.refer(), Handle(node.attr.ino)))
    }

    fn symlink(&self, caller: Caller, parent: u64, name: &[u8], target: &[u8]) -> OpResult<Attr> {
        let new = Make { file_type: FileType::Symlink, permissions: 0o777, umask: 0, rdev: 0 };
        let mut nodes = self.nodes();
        let node = nodes.make(caller, parent, Some(name), &new)?;
        node.target = target.to_vec();
        node.resize(target.len() as u64);
        Ok(node.refer())
    }

    fn readlink(&self, ino: u64) -> OpResult<Vec<u8>> {
        Ok(self.nodes().node(ino)?.target.clone())
    }

    fn link(&self, ino: u64, parent: u64, name: &[u8]) -> OpResult<Attr> {
        let mut nodes = self.nodes();
        let directory = nodes.node(parent)?;
        if directory.names.contains_key(name) {
            return Err(Errno::from_raw(libc::EEXIST));
        }
        directory.names.insert(name.to_vec(), ino);
        let node = nodes.node(ino)?;
        node.attr.links += 1;
        Ok(node.refer())
    }

    fn unlink(&self, parent: u64, name: &[u8]) -> OpResult<()> {
        self.nodes().remove(parent, name, false)
    }

    fn rmdir(&self, parent: u64, name: &[u8]) -> OpResult<()> {
        self.nodes().remove(parent, name, true)
    }

    fn rename(
        &self,
        parent: u64,
        name: &[u8],
        new_parent: u64,
        new_name: &[u8],
        mode: RenameMode,
    ) -> OpResult<()> {
        if matches!(mode, RenameMode::Exchange | RenameMode::Whiteout { .. }) {
            return Err(Errno::EINVAL);
        }
        let mut nodes = self.nodes();
        let ino = nodes.find(parent, name)?;
        let directory = nodes.node(ino)?.attr.file_type == FileType::Directory;
        match nodes.find(new_parent, new_name) {
            Ok(there) if there == ino => return Ok(()),
            Ok(_) if mode == RenameMode::NoReplace => return Err(Errno::from_raw(libc::EEXIST)),
            Ok(_) => nodes.remove(new_parent, new_name, directory)?,
            Err(_) => {}
        }
        nodes.node(parent)?.names.remove(name);
        nodes.node(new_parent)?.names.insert(new_name.to_vec(), ino);
        nodes.node(ino)?.parent = new_parent;
        Ok(())
    }

    fn readdir(&self, dir: u64, cookie: u64, visit: Visit<'_>) -> OpResult<()> {
        self.visit(dir, cookie, &mut |entry, _| visit(entry))
    }

    fn readdir_plus(&self, dir: u64, cookie: u64, visit: VisitPlus<'_>) -> OpResult<()> {
        self.visit(dir, cookie, &mut |entry, node| {
            let taken = visit(entry, Ok(&node.attr));
            if taken && !matches!(&entry.name[..], b"." | b"..") {
                node.known += 1;
            }
            taken
        })
    }

    fn open(&self, _caller: Caller, ino: u64, open: Open) -> OpResult<Handle> {
        let mut nodes = self.nodes();
        let node = nodes.node(ino)?;
        if open.truncate {
            node.resize(0);
        }
        Ok(Handle(ino))
    }

    fn release(&self, _handle: Handle) {}

    fn read(&self, handle: Handle, offset: u64, buffer: &mut [u8], _wait: Wait) -> OpResult<usize> {
        let size_bytes = self.nodes().node(handle.0)?.attr.size_bytes;
        let count = (buffer.len() as u64).min(size_bytes.saturating_sub(offset)) as usize;
        buffer[..count].fill(0);
        Ok(count)
    }

    fn write(&self, handle: Handle, offset: u64, data: &[u8], _mode: WriteMode) -> OpResult<usize> {
        self.grow(handle, offset.saturating_add(data.len() as u64))?;
        Ok(data.len())
    }

    fn sync(&self, _target: &SyncTarget) -> OpResult<()> {
        Ok(())
    }

    fn sync_if_durable(&self, _target: &SyncTarget) -> Option<OpResult<()>> {
        Some(Ok(()))
    }

    fn allocate(
        &self,
        _caller: Caller,
        handle: Handle,
        mode: AllocateMode,
        offset: u64,
        length: u64,
    ) -> OpResult<()> {
        match mode {
            AllocateMode::Extend | AllocateMode::ZeroRange => {
                self.grow(handle, offset.saturating_add(length))
            }
            AllocateMode::CollapseRange | AllocateMode::InsertRange => Err(Errno::EOPNOTSUPP),
            _ => Ok(()),
        }
    }

    fn seek(&self, handle: Handle, offset: u64, seek: Seek) -> OpResult<u64> {
        let size_bytes = self.nodes().node(handle.0)?.attr.size_bytes;
        match seek {
            _ if offset >= size_bytes => Err(Errno::ENXIO),
            Seek::Data => Ok(offset),
            Seek::Hole => Ok(size_bytes),
        }
    }

    fn copy_range(
        &self,
        _caller: Caller,
        _from: Handle,
        _offset: u64,
        _to: Handle,
        _to_offset: u64,
        _length: u64,
    ) -> OpResult<u64> {
        Err(Errno::EOPNOTSUPP)
    }

    fn getxattr(&self, _ino: u64, _name: &[u8]) -> OpResult<Vec<u8>> {
        Err(Errno::ENODATA)
    }

    fn setxattr(
        &self,
        _caller: Caller,
        _ino: u64,
        _name: &[u8],
        _value: &[u8],
        _mode: SetXattr,
    ) -> OpResult<()> {
        Err(Errno::EOPNOTSUPP)
    }

    fn listxattr(&self, _ino: u64) -> OpResult<Vec<Vec<u8>>> {
        Ok(Vec::new())
    }

    fn removexattr(&self, _ino: u64, _name: &[u8]) -> OpResult<()> {
        Err(Errno::ENODATA)
    }

    fn statfs(&self) -> OpResult<StatFs> {
        let inodes = self.nodes().by_number.len() as u64;
        let blocks = 1 << 30;
        Ok(StatFs {
            total_blocks: blocks,
            free_blocks: blocks,
            available_blocks: blocks,
            inodes,
            free_inodes: u64::from(u32::MAX),
            max_name_bytes: 255,
        })
    }

    fn panicked(&self, what: &str) {
        crate::tell!("hollow: a handler panicked: {what}");
    }
}

impl HollowFs {
    /// Entries after `cookie`: `.`, `..`, then names by inode number, which is the cookie (shifted past the first two).
    fn visit(
        &self,
        dir: u64,
        cookie: u64,
        visit: &mut dyn FnMut(&DirEntry, &mut Node) -> bool,
    ) -> OpResult<()> {
        const FIRST: u64 = 3;
        let mut nodes = self.nodes();
        let node = nodes.node(dir)?;
        let mut entries =
            BTreeMap::from([(1, (b".".to_vec(), dir)), (2, (b"..".to_vec(), node.parent))]);
        for (name, ino) in &node.names {
            // Hard links in one directory share a number: the later one by name stands behind.
            let mut place = ino.saturating_mul(1 << 16) + FIRST;
            while entries.contains_key(&place) {
                place += 1;
            }
            entries.insert(place, (name.clone(), *ino));
        }
        for (cookie, (name, ino)) in entries.range((Bound::Excluded(cookie), Bound::Unbounded)) {
            let node = nodes.node(*ino)?;
            let entry = DirEntry {
                name: name.clone(),
                ino: *ino,
                file_type: node.attr.file_type,
                cookie: *cookie,
            };
            if !visit(&entry, node) {
                break;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALLER: Caller = Caller { uid: 0, gid: 0 };

    fn names(fs: &HollowFs, dir: u64) -> Vec<String> {
        let mut names = Vec::new();
        // One at a time: each goes on where the one before ended.
        let mut cookie = 0;
        loop {
            let mut seen = None;
            let mut first = |entry: &DirEntry| {
                let is_first = seen.is_none();
                seen.get_or_insert((entry.cookie, entry.name.clone()));
                is_first
            };
            fs.readdir(dir, cookie, &mut first).expect("a directory");
            let Some((next, name)) = seen else { return names };
            cookie = next;
            names.push(String::from_utf8_lossy(&name).into_owned());
        }
    }

    #[test]
    fn names_and_sizes_are_kept_and_what_is_forgotten_is_gone() {
        let fs = HollowFs::new();
        let new = Make { file_type: FileType::Regular, permissions: 0o666, umask: 0o22, rdev: 0 };
        let (attr, handle) =
            fs.create(CALLER, ROOT, b"a", &new, Open::default(), true).expect("made");
        assert_eq!(attr.permissions, 0o644);
        assert!(fs.create(CALLER, ROOT, b"a", &new, Open::default(), true).is_err());
        fs.write(handle, 5000, b"xyz", WriteMode::default()).expect("written");
        assert_eq!(fs.getattr(attr.ino).expect("there").size_bytes, 5003);
        fs.link(attr.ino, ROOT, b"b").expect("linked");
        fs.rename(ROOT, b"a", ROOT, b"c", RenameMode::Replace).expect("renamed");
        assert_eq!(names(&fs, ROOT), [".", "..", "b", "c"]);
        fs.unlink(ROOT, b"b").expect("unlinked");
        fs.unlink(ROOT, b"c").expect("unlinked");
        assert_eq!(fs.getattr(attr.ino).expect("still known").links, 0);
        fs.forget(attr.ino, 2);
        assert_eq!(fs.getattr(attr.ino), Err(Errno::ESTALE));
        assert_eq!(names(&fs, ROOT), [".", ".."]);
    }
}
