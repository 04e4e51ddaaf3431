//! Batches of a mount: who may commit one, what a commit has to do beside the engine's, and what the kernel is told of it.
//!
//! The engine checks no permissions, and FUSE does not let a server check them as the kernel would (it is told one group of a
//! caller, no capabilities). So batches are for those who can change everything anyhow: the superuser, and whoever serves the
//! mount and so owns the volume; and of those only who is not shut in, as the superuser of a container is. See [`may_batch`].
//!
//! The file that holds a batch is open for writing: so there is none where the kernel knows the mount to be read-only, by a remount, or for
//! those who see it through a read-only bind mount.
//!
//! The kernel did not ask for these changes, so it must be told: before, so that dirty pages it holds (stored through a mapping,
//! or kept by `writeback_cache`) do not come later than what the batch writes; after, so that it forgets what was.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, Weak};

use weir::Batch;

use super::WeirFs;
use crate::acl;
use crate::batch::{Node, Step};
use crate::errno::Errno;
use crate::ioctl;
use crate::ops::{ControlTarget, KernelCache, OpResult};
use crate::tables::Facts;

/// What a batch changes of what the kernel may remember. Inodes that it makes itself are not among it.
#[derive(Debug, Default, PartialEq, Eq)]
struct Touched {
    content: BTreeSet<u64>,
    attributes: BTreeSet<u64>,
    permissions: BTreeSet<u64>,
    owners: BTreeSet<u64>,
    /// Directories that get new inodes.
    parents: BTreeSet<u64>,
    names: BTreeSet<(u64, Vec<u8>)>,
}

impl Touched {
    fn of(steps: &[Step]) -> Self {
        let mut touched = Self::default();
        for step in steps {
            touched.add(step);
        }
        touched
    }

    fn inode(set: &mut BTreeSet<u64>, node: Node) {
        if let Node::Ino(ino) = node {
            set.insert(ino);
        }
    }

    fn name(&mut self, dir: Node, name: &[u8]) {
        if let Node::Ino(dir) = dir {
            self.names.insert((dir, name.to_vec()));
            self.attributes.insert(dir);
        }
    }

    fn add(&mut self, step: &Step) {
        match step {
            // As a write(2) of nothing.
            Step::Write { data, .. } if data.is_empty() => {}
            Step::Write { ino, .. } | Step::Truncate { ino, .. } => {
                Self::inode(&mut self.content, *ino);
            }
            Step::Make { dir, name, .. } => {
                Self::inode(&mut self.parents, *dir);
                self.name(*dir, name);
            }
            Step::Symlink { dir, name, .. }
            | Step::Unlink { dir, name }
            | Step::Rmdir { dir, name } => self.name(*dir, name),
            Step::Link { ino, dir, name } => {
                Self::inode(&mut self.attributes, *ino);
                self.name(*dir, name);
            }
            Step::Rename { dir, name, new_dir, new_name, .. } => {
                self.name(*dir, name);
                self.name(*new_dir, new_name);
            }
            Step::SetAttr { ino, change } => {
                Self::inode(&mut self.attributes, *ino);
                if change.permissions.is_some() {
                    Self::inode(&mut self.permissions, *ino);
                }
                if change.uid.is_some() || change.gid.is_some() {
                    Self::inode(&mut self.owners, *ino);
                }
            }
        }
    }
}

/// Of inodes: how large they are before and after.
type Sizes = BTreeMap<u64, (u64, u64)>;

/// How large the files that `steps` write to are before and after, of those whose size is `known`.
fn sizes_after(steps: &[Step], known: impl Fn(u64) -> Option<u64>) -> Sizes {
    let mut sizes = Sizes::new();
    for step in steps {
        let (ino, end, is_cut) = match step {
            Step::Write { ino: Node::Ino(ino), offset, data } if !data.is_empty() => {
                (*ino, offset.saturating_add(data.len() as u64), false)
            }
            Step::Truncate { ino: Node::Ino(ino), size_bytes } => (*ino, *size_bytes, true),
            _ => continue,
        };
        let size = match sizes.entry(ino) {
            Entry::Occupied(size) => size.into_mut(),
            Entry::Vacant(place) => match known(ino) {
                Some(size) => place.insert((size, size)),
                None => continue,
            },
        };
        size.1 = if is_cut { end } else { size.1.max(end) };
    }
    sizes
}

/// What `steps` make of the byte at `place` of file `ino`, which had ended before.
fn new_byte(steps: &[Step], ino: u64, place: u64) -> u8 {
    let node = Node::Ino(ino);
    let mut byte = 0;
    for step in steps {
        match step {
            Step::Write { ino, offset, data } if *ino == node => {
                let at = place.checked_sub(*offset).and_then(|at| usize::try_from(at).ok());
                byte = at.and_then(|at| data.get(at)).copied().unwrap_or(byte);
            }
            Step::Truncate { ino, size_bytes } if *ino == node && *size_bytes <= place => byte = 0,
            _ => {}
        }
    }
    byte
}

/// Records `steps` for the engine.
fn record(batch: &mut Batch, steps: &[Step]) -> weir::Result<()> {
    let mut made = Vec::new();
    for step in steps {
        // The numbers were checked when the steps were decoded: each is of an earlier step.
        let number = |node: &Node| match *node {
            Node::Ino(ino) => ino,
            Node::Made(index) => made[index],
        };
        match step {
            Step::Write { ino, offset, data } => batch.write_inode(number(ino), *offset, data)?,
            Step::Truncate { ino, size_bytes } => {
                batch.truncate_inode(number(ino), *size_bytes)?;
            }
            Step::Make { dir, name, new } => {
                let ino = batch.make(number(dir), name, new)?;
                made.push(ino);
            }
            Step::Symlink { dir, name, target, uid, gid } => {
                let ino = batch.symlink(number(dir), name, target, *uid, *gid)?;
                made.push(ino);
            }
            Step::Link { ino, dir, name } => batch.link(number(ino), number(dir), name)?,
            Step::Unlink { dir, name } => batch.unlink(number(dir), name)?,
            Step::Rmdir { dir, name } => batch.rmdir(number(dir), name)?,
            Step::Rename { dir, name, new_dir, new_name, mode } => {
                batch.rename(number(dir), name, number(new_dir), new_name, *mode)?;
            }
            Step::SetAttr { ino, change } => batch.setattr(number(ino), change)?,
        }
    }
    Ok(())
}

impl WeirFs {
    pub(super) fn begin_batch(&self, target: ControlTarget) -> OpResult<Vec<u8>> {
        let handle = target.handle.ok_or(Errno::EISDIR)?;
        may_batch(target)?;
        if !self.handles.get(handle)?.how.write {
            return Err(Errno::EBADF);
        }
        self.batches.begin(handle).map(|id| ioctl::encode_batch(id, 0))
    }

    /// Makes the changes, in memory and in the log, and answers their LSN. May wait for the kernel, which may wait for requests.
    pub(super) fn apply_batch(&self, target: ControlTarget, steps: &[Step]) -> OpResult<u64> {
        may_batch(target)?;
        let mut touched = Touched::of(steps);
        let kernel = self.kernel.get().and_then(Weak::upgrade);
        if let Some(kernel) = &kernel {
            touched.content.iter().for_each(|ino| kernel.content_changed(*ino));
        }
        let sizes = self.known_sizes(steps);
        if kernel.as_ref().is_some_and(|kernel| kernel.keeps_sizes())
            && sizes.values().any(|(before, after)| before != after)
        {
            return Err(Errno::EOPNOTSUPP);
        }
        self.refuse_lists(&touched)?;
        for (dir, name) in &touched.names {
            // What loses or gains a name has other attributes then.
            if let Ok(attr) = self.volume.lookup(*dir, name) {
                touched.attributes.insert(attr.ino);
            }
        }
        for ino in &touched.content {
            self.end_privileges(*ino, &self.inodes.facts(*ino), target.caller.uid != 0)?;
        }
        // What the mode says of privileges, a new owner's step ends itself.
        for ino in &touched.owners {
            self.end_privileges(*ino, &self.inodes.facts(*ino), false)?;
        }
        let changing: Vec<Arc<Facts>> =
            touched.permissions.iter().map(|ino| self.inodes.facts(*ino)).collect();
        for facts in &changing {
            facts.changes();
        }
        let mut batch = self.volume.batch();
        let committed = record(&mut batch, steps).and_then(|()| Ok(batch.commit_relaxed()?));
        for facts in &changing {
            facts.changes();
        }
        if let Some(kernel) = &kernel {
            if committed.is_ok() {
                tell_of_growth(&**kernel, steps, &sizes);
            }
            // After an error too: privileges may have ended.
            tell(&**kernel, &touched);
        }
        self.check(committed)
    }

    /// How large the files are that `steps` write to and the kernel knows, before and after.
    fn known_sizes(&self, steps: &[Step]) -> Sizes {
        sizes_after(steps, |ino| {
            // Of what is not there the commit says so.
            let attr = self.inodes.knows(ino).then(|| self.volume.getattr(ino).ok()).flatten()?;
            Some(attr.size_bytes)
        })
    }

    /// Access control lists are attributes, which batches do not change: a step that would have to is refused.
    fn refuse_lists(&self, touched: &Touched) -> OpResult<()> {
        if !self.posix_acl {
            return Ok(());
        }
        for dir in &touched.parents {
            if self.default_acl(*dir)?.is_some() {
                return Err(Errno::EOPNOTSUPP);
            }
        }
        for ino in &touched.permissions {
            if self.optional_xattr(*ino, acl::ACCESS)?.is_some() {
                return Err(Errno::EOPNOTSUPP);
            }
        }
        Ok(())
    }
}

/// `CAP_DAC_OVERRIDE` and `CAP_DAC_READ_SEARCH`: what the kernel asks of who names files by number (`open_by_handle_at(2)`), and changes
/// them.
const REACHES_ALL: u64 = 1 << 1 | 1 << 2;

/// What the kernel lets a process do beside what its user may.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Power {
    capabilities: u64,
    user_namespace: PathBuf,
}

impl Power {
    /// Of a thread, by its number or `self`; `None` of one that cannot be looked at.
    fn of(thread: &str) -> Option<Self> {
        let status = fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
        let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
        let capabilities = u64::from_str_radix(effective.trim(), 16).ok()?;
        let user_namespace = fs::read_link(format!("/proc/{thread}/ns/user")).ok()?;
        Some(Self { capabilities, user_namespace })
    }

    /// Whether one who has this, of the same user as the server or the superuser, can change whatever the server (`own`) can.
    fn suffices(&self, own: &Self, is_owner: bool) -> bool {
        // A server without them has opened the volume nevertheless; the superuser is nobody to an owner who is somebody else.
        let needed = if is_owner { REACHES_ALL & own.capabilities } else { REACHES_ALL };
        self.user_namespace == own.user_namespace && self.capabilities & needed == needed
    }
}

/// See the module's head.
fn may_batch(target: ControlTarget) -> OpResult<()> {
    // The server keeps what it has.
    static OWN: OnceLock<Option<Power>> = OnceLock::new();
    let uid = target.caller.uid;
    let is_owner = uid == rustix::process::geteuid().as_raw();
    if uid != 0 && !is_owner {
        return Err(Errno::EPERM);
    }
    // A user number is not all: a container's superuser has it, and sees a directory of the mount only.
    let caller = Power::of(&target.thread.to_string()).ok_or(Errno::EPERM)?;
    let own = OWN.get_or_init(|| Power::of("self")).as_ref().ok_or(Errno::EPERM)?;
    if caller.suffices(own, is_owner) { Ok(()) } else { Err(Errno::EPERM) }
}

/// Who appends through the kernel does so where that takes the end to be, without asking.
fn tell_of_growth(kernel: &dyn KernelCache, steps: &[Step], sizes: &Sizes) {
    for (&ino, &(before, after)) in sizes {
        if after > before {
            kernel.grown(ino, after, new_byte(steps, ino, after - 1));
        }
    }
}

fn tell(kernel: &dyn KernelCache, touched: &Touched) {
    touched.content.iter().for_each(|ino| kernel.content_changed(*ino));
    touched.names.iter().for_each(|(dir, name)| kernel.name_changed(*dir, name));
    // A directory's list of names is its content.
    let dirs: BTreeSet<u64> = touched.names.iter().map(|(dir, _)| *dir).collect();
    for ino in &touched.attributes {
        if dirs.contains(ino) {
            kernel.content_changed(*ino);
        } else {
            kernel.attributes_changed(*ino);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Caller, FileSystemOps as _, Make, Open, SetXattr, WriteMode};
    use crate::weir_fs::privileges::CAPABILITY;
    use weir::device::Device;
    use weir::device::memory::MemoryDevice;
    use weir::{
        Attr, BackgroundMode, CreateOptions, FileType, SetAttr, Volume, VolumeOptions, XattrMode,
    };

    #[test]
    fn the_kernel_is_told_of_all_that_it_may_remember_and_of_nothing_that_is_new() {
        let (old, new) = (Node::Ino(5), Node::Made(0));
        let steps = [
            Step::Make {
                dir: Node::Ino(1),
                name: b"d".to_vec(),
                new: weir::NewInode::new(weir::FileType::Directory, 0o755),
            },
            Step::Write { ino: old, offset: 0, data: vec![1] },
            Step::Write { ino: new, offset: 0, data: vec![1] },
            Step::Rename {
                dir: Node::Ino(2),
                name: b"a".to_vec(),
                new_dir: new,
                new_name: b"b".to_vec(),
                mode: weir::RenameMode::Replace,
            },
            Step::SetAttr {
                ino: Node::Ino(6),
                change: SetAttr { permissions: Some(0o600), ..SetAttr::default() },
            },
        ];
        let expected = Touched {
            content: [5].into(),
            attributes: [1, 2, 6].into(),
            permissions: [6].into(),
            owners: BTreeSet::new(),
            parents: [1].into(),
            names: [(1, b"d".to_vec()), (2, b"a".to_vec())].into(),
        };
        assert_eq!(Touched::of(&steps), expected);
    }

    #[test]
    fn the_last_byte_is_what_the_steps_make_of_it_in_their_order() {
        let ino = Node::Ino(5);
        let write = |offset, data: &[u8]| Step::Write { ino, offset, data: data.to_vec() };
        let cut = |size_bytes| Step::Truncate { ino, size_bytes };
        let other = Step::Write { ino: Node::Ino(6), offset: 0, data: vec![9; 100] };
        let cases = [
            (vec![write(10, &[1, 2, 3]), write(11, &[4]), other], 13, 3),
            (vec![write(10, &[1, 2, 3]), cut(12)], 12, 2),
            (vec![write(10, &[1, 2, 3]), cut(12), cut(13)], 13, 0),
            (vec![write(10, &[1, 2, 3]), write(9, &[5; 9]), cut(13)], 13, 5),
        ];
        for (steps, size, byte) in cases {
            assert_eq!(sizes_after(&steps, |ino| (ino == 5).then_some(8)), [(5, (8, size))].into());
            assert_eq!(new_byte(&steps, 5, size - 1), byte, "{steps:?}");
        }
    }

    fn volume() -> Volume {
        let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(64 << 20));
        Volume::format_device(&device, &CreateOptions::default()).unwrap();
        let options =
            VolumeOptions { background: BackgroundMode::Manual, ..VolumeOptions::default() };
        Volume::open_device(device, options).unwrap()
    }

    /// A batch of who owns the mount.
    fn target(ino: u64) -> ControlTarget {
        let caller = Caller { uid: rustix::process::geteuid().as_raw(), gid: 0 };
        ControlTarget { ino, handle: None, caller, thread: std::process::id() }
    }

    #[test]
    fn privileges_that_a_batch_gives_end_with_the_next_write_and_capabilities_with_its_own() {
        let fs = WeirFs::new(volume(), true, Box::new(|_| {})).unwrap();
        let somebody = Caller { uid: 1000, gid: 1000 };
        let new = Make { file_type: FileType::Regular, permissions: 0o755, umask: 0, rdev: 0 };
        let open = Open { write: true, ..Open::default() };
        let made = fs.create(somebody, Volume::ROOT, b"f", &new, open, true);
        let (Attr { ino, .. }, handle) = made.unwrap();
        let mode = WriteMode { kill_suid_sgid: true, ..WriteMode::default() };
        let write = || fs.write(handle, 0, b"x", mode).map(drop);
        write().unwrap();
        let change = SetAttr { permissions: Some(0o6755), ..SetAttr::default() };
        fs.apply_batch(target(ino), &[Step::SetAttr { ino: Node::Ino(ino), change }]).unwrap();
        assert_eq!(fs.getattr(ino).unwrap().permissions, 0o6755);
        write().unwrap();
        assert_eq!(fs.getattr(ino).unwrap().permissions, 0o755);
        fs.setxattr(somebody, ino, CAPABILITY, b"some", SetXattr::Any).unwrap();
        let write = Step::Write { ino: Node::Ino(ino), offset: 0, data: vec![1] };
        fs.apply_batch(target(ino), &[write]).unwrap();
        assert_eq!(fs.optional_xattr(ino, CAPABILITY).unwrap(), None);
        fs.release(handle);
        fs.close().unwrap();
    }

    #[test]
    fn a_step_that_a_list_would_have_to_follow_is_refused_and_so_is_one_of_somebody_else() {
        let fs = WeirFs::new(volume(), true, Box::new(|_| {})).unwrap();
        let ino =
            fs.volume.make(Volume::ROOT, b"f", &weir::NewInode::new(FileType::Regular, 0o644));
        let ino = ino.unwrap().ino;
        let change = SetAttr { permissions: Some(0o600), ..SetAttr::default() };
        let chmod = [Step::SetAttr { ino: Node::Ino(ino), change }];
        let new = weir::NewInode::new(FileType::Regular, 0o644);
        let make = [Step::Make { dir: Node::Ino(Volume::ROOT), name: b"g".to_vec(), new }];
        let entry = |tag: u16, id: u32| {
            [&tag.to_le_bytes()[..], &4_u16.to_le_bytes(), &id.to_le_bytes()].concat()
        };
        let entries = [(1, u32::MAX), (2, 1000), (4, u32::MAX), (0x10, u32::MAX), (0x20, u32::MAX)];
        let entries = entries.into_iter().flat_map(|(tag, id)| entry(tag, id));
        let list: Vec<u8> = 2_u32.to_le_bytes().into_iter().chain(entries).collect();
        let set = |ino, name| fs.setxattr(target(ino).caller, ino, name, &list, SetXattr::Any);
        set(ino, acl::ACCESS).unwrap();
        assert_eq!(fs.apply_batch(target(ino), &chmod), Err(Errno::EOPNOTSUPP));
        assert_eq!(fs.getattr(ino).unwrap().permissions, 0o444);
        set(Volume::ROOT, acl::DEFAULT).unwrap();
        assert_eq!(fs.apply_batch(target(ino), &make), Err(Errno::EOPNOTSUPP));
        fs.removexattr(ino, acl::ACCESS).unwrap();
        fs.removexattr(Volume::ROOT, acl::DEFAULT).unwrap();
        // The descriptor that a batch was begun on may have come to somebody else since.
        let somebody = Caller { uid: target(ino).caller.uid + 4321, gid: 0 };
        let other = ControlTarget { caller: somebody, ..target(ino) };
        assert_eq!(fs.apply_batch(other, &chmod), Err(Errno::EPERM));
        assert_eq!(fs.getattr(ino).unwrap().permissions, 0o444);
        fs.apply_batch(target(ino), &chmod).unwrap();
        fs.apply_batch(target(ino), &make).unwrap();
        fs.close().unwrap();
    }

    #[derive(Default)]
    struct Told(weir::sync::Mutex<BTreeSet<(&'static str, u64)>>);

    impl KernelCache for Told {
        fn attributes_changed(&self, ino: u64) {
            self.0.lock().insert(("attributes", ino));
        }
        fn content_changed(&self, ino: u64) {
            self.0.lock().insert(("content", ino));
        }
        fn name_changed(&self, dir: u64, _: &[u8]) {
            self.0.lock().insert(("name", dir));
        }
        fn forget(&self, _: &[u64]) -> bool {
            false
        }
    }

    #[test]
    fn the_kernel_is_told_of_what_loses_a_name_or_is_replaced() {
        let fs = WeirFs::new(volume(), true, Box::new(|_| {})).unwrap();
        let told = Arc::new(Told::default());
        let kernel: Weak<Told> = Arc::downgrade(&told);
        fs.mounted(kernel);
        let new = weir::NewInode::new(FileType::Regular, 0o644);
        let make = |name: &[u8]| fs.volume.make(Volume::ROOT, name, &new).unwrap().ino;
        let (removed, moved, replaced) = (make(b"removed"), make(b"moved"), make(b"replaced"));
        let dir = Node::Ino(Volume::ROOT);
        let steps = [
            Step::Unlink { dir, name: b"removed".to_vec() },
            Step::Rename {
                dir,
                name: b"moved".to_vec(),
                new_dir: dir,
                new_name: b"replaced".to_vec(),
                mode: weir::RenameMode::Replace,
            },
        ];
        fs.apply_batch(target(removed), &steps).unwrap();
        let expected = [removed, moved, replaced].map(|ino| ("attributes", ino));
        let root = [("content", Volume::ROOT), ("name", Volume::ROOT)];
        assert_eq!(*told.0.lock(), expected.into_iter().chain(root).collect());
        // Of a name that is replaced, too, which the batch itself has made.
        told.0.lock().clear();
        let (linked, over) = (make(b"linked"), make(b"over"));
        let steps = [
            Step::Link { ino: Node::Ino(linked), dir, name: b"new".to_vec() },
            Step::Rename {
                dir,
                name: b"over".to_vec(),
                new_dir: dir,
                new_name: b"new".to_vec(),
                mode: weir::RenameMode::Replace,
            },
        ];
        fs.apply_batch(target(linked), &steps).unwrap();
        let expected = [linked, over].map(|ino| ("attributes", ino));
        assert_eq!(*told.0.lock(), expected.into_iter().chain(root).collect());
        fs.close().unwrap();
    }

    #[test]
    fn a_new_owner_ends_capabilities_and_a_write_of_nothing_does_not() {
        let volume = volume();
        let new = weir::NewInode::new(weir::FileType::Regular, 0o4755);
        let ino = volume.make(Volume::ROOT, b"f", &new).unwrap().ino;
        volume.setxattr(ino, CAPABILITY, b"some", XattrMode::Set).unwrap();
        let fs = WeirFs::new(volume, true, Box::new(|_| {})).unwrap();
        let target = target(ino);
        let nothing = Step::Write { ino: Node::Ino(ino), offset: 5, data: Vec::new() };
        fs.apply_batch(target, &[nothing]).unwrap();
        assert!(fs.optional_xattr(ino, CAPABILITY).unwrap().is_some());
        // As a chown(2) that comes by the ioctl.
        let change = SetAttr { uid: Some(5), kill_suid_sgid: true, ..SetAttr::default() };
        fs.apply_batch(target, &[Step::SetAttr { ino: Node::Ino(ino), change }]).unwrap();
        assert_eq!(fs.optional_xattr(ino, CAPABILITY).unwrap(), None);
        assert_eq!(fs.getattr(ino).unwrap().permissions, 0o755);
    }

    #[test]
    fn only_the_superuser_and_the_owner_of_the_mount_may_change_what_they_like() {
        let owner = rustix::process::geteuid().as_raw();
        let thread = std::process::id();
        let may = |uid, thread| {
            let caller = Caller { uid, gid: 5 };
            may_batch(ControlTarget { ino: 1, handle: None, caller, thread })
        };
        assert_eq!(may(owner, thread), Ok(()));
        assert_eq!(may(owner + 4321, thread), Err(Errno::EPERM));
        // Somebody who cannot be seen could be in any container.
        assert_eq!(may(owner, 0), Err(Errno::EPERM));
    }

    #[test]
    fn who_is_shut_in_or_lacks_what_the_server_has_may_not() {
        let power = |capabilities, namespace: &str| Power {
            capabilities,
            user_namespace: PathBuf::from(namespace),
        };
        let own = power(u64::MAX, "user:[1]");
        assert!(power(REACHES_ALL, "user:[1]").suffices(&own, true));
        assert!(!power(u64::MAX, "user:[2]").suffices(&own, true));
        assert!(!power(!(1 << 2), "user:[1]").suffices(&own, true));
        assert!(!power(!(1 << 1), "user:[1]").suffices(&own, true));
        // An ordinary user's server has none itself.
        let own = power(0, "user:[1]");
        assert!(power(0, "user:[1]").suffices(&own, true));
        assert!(!power(0, "user:[1]").suffices(&own, false));
    }
}
