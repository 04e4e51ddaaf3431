//! Attributes.

use super::rules::Metas as _;
use super::{MetaLocks, OP_RECORD_BYTES};
use crate::engine::{Engine, Room};
use crate::error::{Error, Result};
use crate::inode::{Inode, Meta};
use crate::sync::Arc;
use crate::sync::atomic::Ordering;
use crate::txn::Op;
use crate::types::{AtimePolicy, FileType, SetAttr, SetTime, Timestamp};

/// A day, for the relative access time policy.
const DAY_SECONDS: i64 = 86_400;

impl Engine {
    /// Changes attributes, and the size. A size change comes first; all else is one operation.
    pub fn setattr(&self, number: u64, change: &SetAttr) -> Result<Arc<Inode>> {
        check_times(change)?;
        let inode = self.inode(number)?;
        if let Some(size_bytes) = change.size_bytes {
            match inode.file_type {
                FileType::Regular => self.truncate(&inode, size_bytes)?,
                FileType::Directory => return Err(Error::IsDirectory),
                _ => return Err(Error::Invalid("only regular files have a size to set")),
            }
        }
        let rest = SetAttr { size_bytes: None, ..change.clone() };
        if rest == SetAttr::default() {
            return Ok(inode);
        }
        let admission = self.enter(OP_RECORD_BYTES, 0)?;
        let now = self.now();
        let mut metas = MetaLocks::new(&[&inode]);
        let meta = metas.of(&inode);
        if meta.purged {
            return Err(Error::NotFound);
        }
        if !apply(meta, &rest, now) {
            return Ok(inode.clone());
        }
        metas.commit(self, Op::new(), admission)?;
        drop(metas);
        Ok(inode)
    }

    /// Drops set-user-id and set-group-id as an unprivileged write does; one operation, and only if there
    /// is something to drop.
    pub fn drop_privileges(&self, inode: &Arc<Inode>) -> Result<()> {
        let change = SetAttr { kill_suid_sgid: true, ..SetAttr::default() };
        if killed(inode.meta.lock().item.permissions).is_some() {
            self.setattr(inode.number, &change)?;
        }
        Ok(())
    }

    /// Reading this inode may move its access time. Cheap: for the path of a cached read.
    pub fn wants_atime(&self, inode: &Inode) -> bool {
        match self.options.atime {
            AtimePolicy::Never => false,
            AtimePolicy::Strict => true,
            AtimePolicy::Relative => {
                self.recent_s() >= inode.atime_settled_until_s.load(Ordering::Relaxed)
            }
        }
    }

    /// Reading moves the access time as the volume's policy says; in memory, logged with the next operation of
    /// the inode or the next checkpoint, or here and now if memory has too many inodes: that may wait.
    pub fn touch_atime(&self, inode: &Inode) {
        // Inodes with news are kept in memory: they must not be more than fit.
        if let Some(inode) = self.touch_atime_in_memory(inode)
            && self.inodes.is_over_limit(inode.number)
            && self.check_writable().is_ok()
        {
            // A failure is none of the reader's: the time stays in memory for the next attempt.
            let committed =
                self.throttle(0).and_then(|()| self.commit_attributes(&inode, Room::Normal));
            drop(committed);
        }
    }

    /// As [`Engine::touch_atime`], in memory only. Answers the inode, if that is news for the log.
    pub fn touch_atime_in_memory(&self, inode: &Inode) -> Option<Arc<Inode>> {
        if self.options.atime == AtimePolicy::Never || self.options.read_only {
            return None;
        }
        let now = self.now();
        let mut meta = inode.meta.lock();
        let item = &meta.item;
        let due = self.options.atime == AtimePolicy::Strict
            || item.atime <= item.mtime
            || item.atime <= item.ctime
            || now.seconds.saturating_sub(item.atime.seconds) >= DAY_SECONDS;
        if self.options.atime == AtimePolicy::Relative {
            let read_s = if due { now.seconds } else { item.atime.seconds };
            let until_s = read_s.saturating_add(DAY_SECONDS);
            inode.atime_settled_until_s.store(until_s, Ordering::Relaxed);
        }
        if !due || meta.purged || meta.item.atime == now {
            return None;
        }
        meta.item.atime = now;
        meta.dirty = true;
        drop(meta);
        let inode = self.inodes.find(inode.number)?;
        self.dirty.add(&inode);
        // It may have been purged, and taken off the list, before it was put there.
        if inode.meta.lock().purged {
            self.dirty.remove(&inode);
            return None;
        }
        Some(inode)
    }
}

/// Refuses times that no inode item can hold: what was logged of them could not be read back.
pub(crate) fn check_times(change: &SetAttr) -> Result<()> {
    let cannot_be =
        |set| matches!(set, Some(SetTime::At(at)) if at.nanoseconds > Timestamp::MAX_NANOSECONDS);
    if cannot_be(change.atime) || cannot_be(change.mtime) {
        return Err(Error::Invalid("the nanoseconds of a time must be at most 999,999,999"));
    }
    Ok(())
}

/// Whether something was changed.
pub(crate) fn apply(meta: &mut Meta, change: &SetAttr, now: Timestamp) -> bool {
    let before = meta.item;
    let item = &mut meta.item;
    if let Some(permissions) = change.permissions {
        item.permissions = permissions & 0o7777;
    }
    if let Some(uid) = change.uid {
        item.uid = uid;
    }
    if let Some(gid) = change.gid {
        item.gid = gid;
    }
    if change.kill_suid_sgid
        && item.file_type != FileType::Directory
        && let Some(permissions) = killed(item.permissions)
    {
        item.permissions = permissions;
    }
    let time = |set: SetTime| match set {
        SetTime::Now => now,
        SetTime::At(at) => at,
    };
    if let Some(set) = change.atime {
        item.atime = time(set);
    }
    if let Some(set) = change.mtime {
        item.mtime = time(set);
    }
    let explicit = change.permissions.is_some()
        || change.uid.is_some()
        || change.gid.is_some()
        || change.atime.is_some()
        || change.mtime.is_some();
    if !explicit && before == *item {
        return false;
    }
    meta.touch_attributes(now);
    true
}

/// `permissions` without set-user-id, and without set-group-id where the group may execute; `None` if that
/// changes nothing.
fn killed(permissions: u32) -> Option<u32> {
    let mut left = permissions & !0o4000;
    if left & 0o2010 == 0o2010 {
        left &= !0o2000;
    }
    (left != permissions).then_some(left)
}

#[cfg(test)]
mod tests {
    use super::killed;

    #[test]
    fn set_group_id_without_group_execution_stays() {
        assert_eq!(killed(0o4755), Some(0o755));
        assert_eq!(killed(0o2755), Some(0o755));
        assert_eq!(killed(0o2745), None);
        assert_eq!(killed(0o644), None);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod nowait_tests {
    use crate::device::Device;
    use crate::device::memory::MemoryDevice;
    use crate::sync::{Arc, Turn, take_turns};
    use crate::{
        AtimePolicy, BackgroundMode, CreateOptions, Error, File, OpenFlags, Volume, VolumeOptions,
    };
    use std::cell::RefCell;

    /// More in each part of the table than that should hold.
    const FILES: u32 = 160;

    thread_local! {
        /// Before which lock the files are opened, and the files.
        static PLAN: RefCell<Option<(Volume, u32, Vec<File>)>> = const { RefCell::new(None) };
    }

    fn open_all(volume: &Volume) -> Vec<File> {
        let open = |number| volume.open_file(format!("/{number}"), OpenFlags::READ).expect("open");
        (0..FILES).map(open).collect()
    }

    fn come_to(turn: Turn) {
        let Some((volume, locks, mut files)) = PLAN.take() else { return };
        assert_eq!(turn, Turn::Locks, "nobody has what it wants");
        if locks == 1 {
            files = open_all(&volume);
        }
        PLAN.set(Some((volume, locks.saturating_sub(1), files)));
    }

    /// Logging the time of a read may wait for room in the log. Whoever may not wait leaves that to others, also where memory gets too many
    /// inodes while he looks.
    #[test]
    fn a_read_that_must_not_wait_logs_no_time() {
        let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(32 << 20));
        Volume::format_device(&device, &CreateOptions::default()).expect("format");
        let open_volume = || {
            let options = VolumeOptions {
                background: BackgroundMode::Manual,
                memory_bytes: Some(1 << 20),
                atime: AtimePolicy::Strict,
                ..VolumeOptions::default()
            };
            Volume::open_device(device.clone(), options).expect("open")
        };
        let volume = open_volume();
        for number in 0..FILES {
            volume.open_file(format!("/{number}"), OpenFlags::CREATE).expect("create");
        }
        let file = volume.open_file("/0", OpenFlags::READ_WRITE).expect("open");
        file.write_at(0, b"x").expect("write");
        volume.close().expect("close");
        drop((file, volume));
        let mut refused = 0;
        for locks in 1..30 {
            let volume = open_volume();
            let file = volume.open_file("/0", OpenFlags::READ).expect("open");
            file.read_at(0, &mut [0]).expect("read");
            volume.checkpoint().expect("checkpoint");
            let before = volume.last_lsn();
            PLAN.set(Some((volume.clone(), locks, Vec::new())));
            take_turns(Some(come_to));
            let read = file.read_at_nowait(0, &mut [0]);
            take_turns(None);
            drop(PLAN.take());
            assert_eq!(volume.last_lsn(), before, "before lock {locks}");
            refused += u32::from(read == Err(Error::WouldBlock));
        }
        assert!(refused > 0, "it looks whether there are too many");
    }
}
