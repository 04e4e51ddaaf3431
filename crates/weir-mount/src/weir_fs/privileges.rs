//! Who may do what with a file: access control lists, which are stored as attributes and shown in the permission bits, and privileges of
//! programs, which end with the first write.

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

    /// The new inode's final form, and the lists it gets.
    pub(super) fn plan(&self, caller: Caller, parent: u64, new: &Make) -> OpResult<Planned> {
        let default = self.default_acl(parent)?;
        let (permissions, access) = match &default {
            Some(default) => default.inherit(new.permissions),
            None => (new.permissions & !new.umask, None),
        };
        let inode = NewInode {
            file_type: new.file_type,
            permissions,
            uid: caller.uid,
            gid: caller.gid,
            rdev: new.rdev,
        };
        let inherited = default.filter(|_| new.file_type == FileType::Directory);
        Ok(Planned { inode, access, inherited })
    }

    pub(super) fn store_lists(&self, ino: u64, planned: &Planned) -> OpResult<()> {
        let lists = [(acl::ACCESS, &planned.access), (acl::DEFAULT, &planned.inherited)];
        for (name, list) in lists {
            if let Some(list) = list {
                self.check(self.volume.setxattr(ino, name, &list.encode(), XattrMode::Set))?;
            }
        }
        Ok(())
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
