//! Keys of the file-system tree: (inode, kind, offset), ordered in that order.

/// What an item is; the numbers are on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Attributes of an inode.
    Inode = 1,
    /// Inline data or a symlink's target.
    Inline = 2,
    /// A directory entry.
    Dirent = 3,
    /// An extended attribute.
    Xattr = 4,
    /// A run of blocks of a file.
    Extent = 5,
    /// An unlinked inode that is still to be purged.
    Orphan = 6,
}

impl Kind {
    /// The kind with this number on disk.
    pub fn from_u8(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::Inode,
            2 => Self::Inline,
            3 => Self::Dirent,
            4 => Self::Xattr,
            5 => Self::Extent,
            6 => Self::Orphan,
            _ => return None,
        })
    }
}

/// Key of an item. Field order is comparison order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// Owner.
    pub inode: u64,
    /// What it is.
    pub kind: Kind,
    /// Meaning depends on the kind.
    pub offset: u64,
}

impl Key {
    /// The smallest key.
    pub const MIN: Self = Self { inode: 0, kind: Kind::Inode, offset: 0 };
    /// The largest key.
    pub const MAX: Self = Self { inode: u64::MAX, kind: Kind::Orphan, offset: u64::MAX };

    /// A key from its parts.
    pub const fn new(inode: u64, kind: Kind, offset: u64) -> Self {
        Self { inode, kind, offset }
    }
    /// The attributes of `inode`.
    pub const fn inode(inode: u64) -> Self {
        Self::new(inode, Kind::Inode, 0)
    }
    /// The inline data of `inode`.
    pub const fn inline(inode: u64) -> Self {
        Self::new(inode, Kind::Inline, 0)
    }
    /// The extent of `inode` that starts at `file_block`.
    pub const fn extent(inode: u64, file_block: u64) -> Self {
        Self::new(inode, Kind::Extent, file_block)
    }
    /// The orphan entry of `inode`.
    pub const fn orphan(inode: u64) -> Self {
        Self::new(0, Kind::Orphan, inode)
    }
    /// The next larger key, if there is one.
    pub fn successor(self) -> Option<Self> {
        if let Some(offset) = self.offset.checked_add(1) {
            return Some(Self { offset, ..self });
        }
        if let Some(kind) = Kind::from_u8(self.kind as u8 + 1) {
            return Some(Self { kind, offset: 0, ..self });
        }
        Some(Self { inode: self.inode.checked_add(1)?, kind: Kind::Inode, offset: 0 })
    }
}
