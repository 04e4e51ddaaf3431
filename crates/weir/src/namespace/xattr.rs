//! Extended attributes: one item each, found like directory entries.

use super::rules::Metas as _;
use super::{MetaLocks, OP_RECORD_BYTES, OP_SPACE_BLOCKS};
use crate::alloc::ReserveClass;
use crate::engine::{Engine, Room};
use crate::error::{Error, Result};
use crate::format::item::{Xattr, name_hash};
use crate::format::{Key, Kind, MAX_NAME_BYTES, MAX_XATTR_BYTES};
use crate::inode::Inode;
use crate::mutation::{self, Mutation};
use crate::txn::Op;

/// Whether an attribute may or must exist before it is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum XattrMode {
    /// Either way.
    #[default]
    Set,
    /// It must not: [`Error::Exists`].
    Create,
    /// It must: [`Error::NoAttribute`].
    Replace,
}

fn check_attribute(name: &[u8]) -> Result<()> {
    if name.is_empty() || name.contains(&0) {
        return Err(Error::Invalid("an attribute needs a name, without NUL"));
    }
    if name.len() > MAX_NAME_BYTES {
        return Err(Error::OutOfRange);
    }
    let prefixes: [&[u8]; 4] = [b"user.", b"trusted.", b"security.", b"system.posix_acl_"];
    if prefixes.iter().any(|prefix| name.len() > prefix.len() && name.starts_with(prefix)) {
        Ok(())
    } else {
        Err(Error::NotSupported(
            "attributes outside of user, trusted, security and system.posix_acl",
        ))
    }
}

/// After a look at attributes, none of which may have been left: the last name of `inode` was taken away since, or it may be true.
fn check_not_purged(inode: &Inode) -> Result<()> {
    if inode.meta.lock().purged { Err(Error::NotFound) } else { Ok(()) }
}

impl Engine {
    /// The attribute's item if it exists, else a place for it.
    fn find_xattr(&self, number: u64, name: &[u8]) -> Result<(Key, Option<Vec<u8>>)> {
        let hash = name_hash(name);
        let first = Key::new(number, Kind::Xattr, hash);
        let last = Key::new(number, Kind::Xattr, hash | 0xff);
        let mut free = hash;
        let mut found = None;
        self.store.scan(first, last, &mut |key, item| {
            let xattr = Xattr::decode(item)?;
            if xattr.name == name {
                found = Some((key, Some(xattr.value.to_vec())));
                return Ok(false);
            }
            if key.offset == free {
                free += 1;
            }
            Ok(true)
        })?;
        if let Some(found) = found {
            return Ok(found);
        }
        if free & !0xff != hash {
            return Err(Error::NoSpace);
        }
        Ok((Key::new(number, Kind::Xattr, free), None))
    }

    /// The value of attribute `name`.
    pub fn getxattr(&self, number: u64, name: &[u8]) -> Result<Vec<u8>> {
        check_attribute(name)?;
        let inode = self.inode(number)?;
        let (_, found) = self.find_xattr(number, name)?;
        check_not_purged(&inode)?;
        found.ok_or(Error::NoAttribute)
    }

    /// Sets attribute `name`.
    pub fn setxattr(&self, number: u64, name: &[u8], value: &[u8], mode: XattrMode) -> Result<()> {
        check_attribute(name)?;
        if value.len() > MAX_XATTR_BYTES {
            return Err(Error::AttributeTooLarge);
        }
        self.before_entry()?;
        self.check_space(OP_SPACE_BLOCKS, ReserveClass::User)?;
        let inode = self.inode(number)?;
        let _ops = inode.ops.lock();
        let admission = self.admit(OP_RECORD_BYTES, 0, Room::Normal)?;
        let (key, present) = self.find_xattr(number, name)?;
        match mode {
            XattrMode::Create if present.is_some() && !mutation::active(Mutation::CreateOver) => {
                return Err(Error::Exists);
            }
            XattrMode::Replace if present.is_none() => return Err(Error::NoAttribute),
            _ => {}
        }
        let mut op = Op::new();
        op.put(key, &Xattr { name, value }.encode());
        let now = self.now();
        let mut metas = MetaLocks::new(&[&inode]);
        let meta = metas.of(&inode);
        if meta.purged {
            return Err(Error::NotFound);
        }
        meta.touch_attributes(now);
        metas.commit(self, op, admission)?;
        Ok(())
    }

    /// Names of all attributes.
    pub fn listxattr(&self, number: u64) -> Result<Vec<Vec<u8>>> {
        let inode = self.inode(number)?;
        let last = Key::new(number, Kind::Xattr, u64::MAX);
        let mut next = Some(Key::new(number, Kind::Xattr, 0));
        let mut names = Vec::new();
        while let Some(from) = next {
            let (items, more) = self.store.collect(from, last, 64)?;
            for (_, item) in items {
                names.push(Xattr::decode(&item)?.name.to_vec());
            }
            next = more;
        }
        check_not_purged(&inode)?;
        Ok(names)
    }

    /// Removes attribute `name`.
    pub fn removexattr(&self, number: u64, name: &[u8]) -> Result<()> {
        check_attribute(name)?;
        self.before_entry()?;
        let inode = self.inode(number)?;
        let _ops = inode.ops.lock();
        let admission = self.admit(OP_RECORD_BYTES, 0, Room::Normal)?;
        let (key, present) = self.find_xattr(number, name)?;
        if present.is_none() {
            return Err(Error::NoAttribute);
        }
        let mut op = Op::new();
        op.delete(key);
        let now = self.now();
        let mut metas = MetaLocks::new(&[&inode]);
        let meta = metas.of(&inode);
        if meta.purged {
            return Err(Error::NotFound);
        }
        meta.touch_attributes(now);
        metas.commit(self, op, admission)?;
        Ok(())
    }
}
