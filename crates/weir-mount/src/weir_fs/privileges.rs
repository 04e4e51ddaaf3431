//! Who may do what with a file: access control lists, which are stored as attributes and shown in the permission bits, and privileges of
//! programs, which end with the first write.

use std::sync::Weak;

use weir::{Attr, Error, FileType, NewInode, SetAttr, XattrMode};

use super::WeirFs;
use crate::acl::{self, Acl};
use crate::errno::Errno;
use crate::ops::{Caller, Make, OpResult};
use crate::tables::{Fact, Facts};

/// File capabilities of a program; dropped by any write.
pub(super) const CAPABILITY: &[u8] = b"security.capability";
/// Set-user-id and set-group-id.
const SUID_SGID: u32 = 0o6000;
/// Set-group-id.
const SGID: u32 = 0o2000;

impl WeirFs {
    pub(super) fn optional_xattr(&self, ino: u64, name: &[u8]) -> OpResult<Option<Vec<u8>>> {
        match self.volume.getxattr(ino, name) {
            Ok(value) => Ok(Some(value)),
            Err(Error::NoAttribute) => Ok(None),
            Err(error) => Err(self.fail(error)),
        }
    }

    /// Whether there can be an attribute of this name on this mount.
    pub(super) fn check_name(&self, name: &[u8]) -> OpResult<()> {
        // Of `system.` the kernel asks for no permission at all: what is there is the file system's to guard. There are the two lists, which
        // the kernel sets by another way, and nothing else.
        if name.starts_with(b"system.") && !(self.posix_acl && is_list(name)) {
            return Err(Errno::EOPNOTSUPP);
        }
        // A prefix is no name.
        if [&b"user."[..], b"trusted.", b"security."].contains(&name) {
            return Err(Errno::EINVAL);
        }
        Ok(())
    }

    pub(super) fn remove_optional_xattr(&self, ino: u64, name: &[u8]) -> OpResult<()> {
        match self.volume.removexattr(ino, name) {
            Ok(()) | Err(Error::NoAttribute) => Ok(()),
            Err(error) => Err(self.fail(error)),
        }
    }

    /// The list that new entries of `dir` inherit.
    pub(super) fn default_acl(&self, dir: u64) -> OpResult<Option<Acl>> {
        if !self.posix_acl {
            return Ok(None);
        }
        let facts = self.inodes.facts(dir);
        if facts.holds(Fact::NoDefaultAcl) {
            return Ok(None);
        }
        let epoch = facts.epoch();
        let value = self.optional_xattr(dir, acl::DEFAULT)?;
        if value.is_none() {
            facts.establish(Fact::NoDefaultAcl, epoch);
        }
        Ok(value.as_deref().and_then(Acl::parse))
    }

    /// The new inode as it is made, and what it gets then.
    pub(super) fn plan(&self, caller: Caller, parent: u64, new: &Make) -> OpResult<Planned> {
        let default = self.default_acl(parent)?;
        let (permissions, access) = match &default {
            Some(default) => default.inherit(new.permissions),
            None => (new.permissions & !new.umask, None),
        };
        let made_with = access
            .as_ref()
            .map_or(permissions, |list| permissions & !0o777 | list.mode_bits_without());
        let inode = NewInode {
            file_type: new.file_type,
            permissions: made_with,
            uid: caller.uid,
            gid: caller.gid,
            rdev: new.rdev,
        };
        let inherited = default.filter(|_| new.file_type == FileType::Directory);
        Ok(Planned { inode, access, inherited })
    }

    /// Stores the lists of an inode that was made with these attributes; answers those it has then.
    pub(super) fn store_lists(&self, attr: Attr, planned: &Planned) -> OpResult<Attr> {
        let ino = attr.ino;
        let lists = [(acl::ACCESS, &planned.access), (acl::DEFAULT, &planned.inherited)];
        for (name, list) in lists {
            if let Some(list) = list {
                self.check(self.volume.setxattr(ino, name, &list.encode(), XattrMode::Set))?;
            }
        }
        match (&planned.access, &planned.inherited) {
            (None, None) => Ok(attr),
            (None, Some(_)) => self.check(self.volume.getattr(ino)),
            (Some(list), _) => {
                let permissions = Some(attr.permissions & !0o777 | list.mode_bits());
                let change = SetAttr { permissions, ..SetAttr::default() };
                self.check(self.volume.setattr(ino, &change))
            }
        }
    }

    /// Ends the privileges of a file that is written or cut.
    pub(super) fn end_privileges(
        &self,
        ino: u64,
        facts: &Facts,
        kill_suid_sgid: bool,
    ) -> OpResult<()> {
        if facts.holds(Fact::Unprivileged) {
            return Ok(());
        }
        let epoch = facts.epoch();
        self.remove_optional_xattr(ino, CAPABILITY)?;
        let permissions = self.check(self.volume.getattr(ino))?.permissions;
        if permissions & SUID_SGID == 0 {
            facts.establish(Fact::Unprivileged, epoch);
        } else if kill_suid_sgid {
            let change = SetAttr { kill_suid_sgid: true, ..SetAttr::default() };
            self.check(self.volume.setattr(ino, &change))?;
            // The answer to a write or an `open` says nothing of the mode, and by the old one the kernel would run the file for its owner.
            if let Some(kernel) = self.kernel.get().and_then(Weak::upgrade) {
                kernel.attributes_changed(ino);
            }
        }
        Ok(())
    }

    /// `chmod` of an inode with an access list changes the list too.
    pub(super) fn chmod_list(&self, ino: u64, permissions: u32) -> OpResult<()> {
        let Some(value) = self.optional_xattr(ino, acl::ACCESS)? else { return Ok(()) };
        if let Some(mut list) = Acl::parse(&value) {
            list.set_mode_bits(permissions);
            self.check(self.volume.setxattr(ino, acl::ACCESS, &list.encode(), XattrMode::Set))?;
        }
        Ok(())
    }

    /// Sets the access list: what the permission bits can say goes there.
    pub(super) fn set_access_list(
        &self,
        caller: Caller,
        ino: u64,
        value: &[u8],
        mode: XattrMode,
    ) -> OpResult<()> {
        let list = Acl::parse(value).ok_or(Errno::EINVAL)?;
        let attr = self.check(self.volume.getattr(ino))?;
        let mut permissions = attr.permissions & !0o777 | list.mode_bits();
        // Someone outside of the file's group must not leave it set-group-id. (Of a caller's groups, the transport has picked the file's.)
        if !is_privileged(caller) && caller.gid != attr.gid {
            permissions &= !SGID;
        }
        if list.is_only_mode_bits() {
            self.remove_optional_xattr(ino, acl::ACCESS)?;
        } else {
            self.check(self.volume.setxattr(ino, acl::ACCESS, value, mode))?;
        }
        if permissions != attr.permissions {
            let change = SetAttr { permissions: Some(permissions), ..SetAttr::default() };
            self.check(self.volume.setattr(ino, &change))?;
        }
        Ok(())
    }
}

/// An inode about to be made.
pub(super) struct Planned {
    pub(super) inode: NewInode,
    access: Option<Acl>,
    inherited: Option<Acl>,
}

impl Planned {
    /// What is known of the inode that was made, with these attributes.
    pub(super) fn facts(&self, attr: &Attr) -> impl Iterator<Item = Fact> {
        let facts = [
            (attr.permissions & SUID_SGID == 0, Fact::Unprivileged),
            (self.access.is_none(), Fact::NoAccessAcl),
            (self.inherited.is_none(), Fact::NoDefaultAcl),
        ];
        facts.into_iter().filter(|(holds, _)| *holds).map(|(_, fact)| fact)
    }
}

/// Whether the caller has `CAP_FSETID`, as far as a request tells.
pub(super) fn is_privileged(caller: Caller) -> bool {
    caller.uid == 0
}

/// Whether an attribute is an access control list.
pub(super) fn is_list(name: &[u8]) -> bool {
    name == acl::ACCESS || name == acl::DEFAULT
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use weir::device::Device;
    use weir::device::memory::MemoryDevice;
    use weir::{AllocateMode, BackgroundMode, CreateOptions, SetTime, Volume, VolumeOptions};

    use super::*;
    use crate::ops::{FileSystemOps, Open, SetXattr, WriteMode};

    const CALLER: Caller = Caller { uid: 0, gid: 0 };

    fn fs() -> WeirFs {
        let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(64 << 20));
        Volume::format_device(&device, &CreateOptions::default()).unwrap();
        let options =
            VolumeOptions { background: BackgroundMode::Manual, ..VolumeOptions::default() };
        WeirFs::new(Volume::open_device(device, options).unwrap(), true, Box::new(|_| {})).unwrap()
    }

    /// A list of owner, user 1000, group, mask and others.
    fn list(permissions: [u16; 5]) -> Vec<u8> {
        let tags: [(u16, u32); 5] =
            [(1, u32::MAX), (2, 1000), (4, u32::MAX), (0x10, u32::MAX), (0x20, u32::MAX)];
        let entry = |((tag, id), permissions): ((u16, u32), u16)| {
            [&tag.to_le_bytes()[..], &permissions.to_le_bytes(), &id.to_le_bytes()].concat()
        };
        let entries = tags.into_iter().zip(permissions).flat_map(entry);
        2_u32.to_le_bytes().into_iter().chain(entries).collect()
    }

    #[test]
    fn what_inherits_a_list_is_made_with_less_and_answered_as_it_is_in_the_end() {
        let fs = fs();
        let given = list([7, 7, 0, 7, 4]);
        fs.setxattr(CALLER, Volume::ROOT, acl::DEFAULT, &given, SetXattr::Any).unwrap();
        let new = |file_type| Make { file_type, permissions: 0o2666, umask: 0o077, rdev: 0 };
        let planned = fs.plan(CALLER, Volume::ROOT, &new(FileType::Regular)).unwrap();
        assert_eq!(
            planned.inode.permissions, 0o2604,
            "the group has nothing until there is a list"
        );
        for (name, file_type) in [(&b"f"[..], FileType::Regular), (b"d", FileType::Directory)] {
            let made = fs.make(CALLER, Volume::ROOT, name, &new(file_type)).unwrap();
            assert_eq!(made.permissions, 0o2664);
            assert_eq!(made, fs.getattr(made.ino).unwrap());
            assert_eq!(fs.getxattr(made.ino, acl::ACCESS).unwrap(), list([6, 7, 0, 6, 4]));
        }
        let open = Open { write: true, ..Open::default() };
        let (made, handle) =
            fs.create(CALLER, Volume::ROOT, b"g", &new(FileType::Regular), open, true).unwrap();
        assert_eq!(made, fs.getattr(made.ino).unwrap());
        fs.release(handle);
        fs.close().unwrap();
    }

    /// What it is called, whether it ends privileges, and itself.
    type Act<'a> = (&'a str, bool, &'a dyn Fn() -> OpResult<()>);

    /// A set-user-id program, or one with capabilities, that somebody else can fill or give away would lend out what it had.
    #[test]
    fn whatever_changes_content_or_owner_ends_privileges_each_time_and_nothing_else_does() {
        let fs = fs();
        let somebody = Caller { uid: 1000, gid: 1000 };
        let new = Make { file_type: FileType::Regular, permissions: 0o755, umask: 0, rdev: 0 };
        let open = Open { write: true, ..Open::default() };
        let create = |name| fs.create(CALLER, Volume::ROOT, name, &new, open, true).unwrap();
        let ((attr, handle), (_, other)) = (create(b"program"), create(b"other"));
        let ino = attr.ino;
        fs.write(other, 0, &[1; 8192], WriteMode::default()).unwrap();
        let change = |change: SetAttr| fs.setattr(somebody, ino, &change).map(drop);
        let cut = SetAttr { size_bytes: Some(3), kill_suid_sgid: true, ..SetAttr::default() };
        let chown = SetAttr { uid: Some(7), kill_suid_sgid: true, ..SetAttr::default() };
        let chgrp = SetAttr { gid: Some(7), kill_suid_sgid: true, ..SetAttr::default() };
        let touch = SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() };
        let mode = WriteMode { kill_suid_sgid: true, ..WriteMode::default() };
        let acts: [Act<'_>; 10] = [
            ("write", true, &|| fs.write(handle, 0, b"x", mode).map(drop)),
            ("cut", true, &|| change(cut.clone())),
            ("chown", true, &|| change(chown.clone())),
            ("chgrp", true, &|| change(chgrp.clone())),
            ("allocate", true, &|| fs.allocate(somebody, handle, AllocateMode::Extend, 0, 9000)),
            ("copy", true, &|| fs.copy_range(somebody, other, 0, handle, 0, 4096).map(drop)),
            ("empty", true, &|| {
                let emptied = Open { truncate: true, ..open };
                fs.open(somebody, ino, emptied).map(|handle| fs.release(handle))
            }),
            ("touch", false, &|| change(touch.clone())),
            ("open", false, &|| fs.open(somebody, ino, open).map(|handle| fs.release(handle))),
            ("note", false, &|| fs.setxattr(somebody, ino, b"user.note", b"1", SetXattr::Any)),
        ];
        for (what, ends, act) in acts {
            // With both, and with one alone: what is known of it must not outlast the next change.
            for (bits, capable) in [(0o6755, true), (0o755, true), (0o755, true), (0o6755, false)] {
                let chmod = SetAttr { permissions: Some(bits), ..SetAttr::default() };
                // A change of the mode would end what is known by itself.
                if fs.getattr(ino).unwrap().permissions != bits {
                    fs.setattr(CALLER, ino, &chmod).unwrap();
                }
                if capable {
                    fs.setxattr(CALLER, ino, CAPABILITY, b"all", SetXattr::Any).unwrap();
                }
                act().unwrap();
                let left = fs.getattr(ino).unwrap().permissions;
                assert_eq!(left, if ends { 0o755 } else { bits }, "{what}");
                let expected =
                    if capable && !ends { Ok(b"all".to_vec()) } else { Err(Errno::ENODATA) };
                assert_eq!(fs.getxattr(ino, CAPABILITY), expected, "{what}");
                assert_eq!(
                    fs.volume().getxattr(ino, CAPABILITY).is_ok(),
                    expected.is_ok(),
                    "{what}"
                );
                fs.remove_optional_xattr(ino, CAPABILITY).unwrap();
            }
        }
        fs.release(handle);
        fs.release(other);
        fs.close().unwrap();
    }
}
