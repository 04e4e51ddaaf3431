//! Plain values of the public API: attributes, flags, statistics of a volume.

use crate::format;

/// What an inode is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FileType {
    /// Regular file.
    Regular,
    /// Directory.
    Directory,
    /// Symbolic link.
    Symlink,
    /// Named pipe.
    Fifo,
    /// Socket.
    Socket,
    /// Character device.
    CharDevice,
    /// Block device.
    BlockDevice,
}

impl FileType {
    /// The `S_IFMT` bits of this type.
    pub const fn mode_bits(self) -> u32 {
        match self {
            Self::Fifo => 0o010_000,
            Self::CharDevice => 0o020_000,
            Self::Directory => 0o040_000,
            Self::BlockDevice => 0o060_000,
            Self::Regular => 0o100_000,
            Self::Symlink => 0o120_000,
            Self::Socket => 0o140_000,
        }
    }
    /// The type in the `S_IFMT` bits of `mode`.
    pub const fn from_mode(mode: u32) -> Option<Self> {
        Some(match mode & 0o170_000 {
            0o010_000 => Self::Fifo,
            0o020_000 => Self::CharDevice,
            0o040_000 => Self::Directory,
            0o060_000 => Self::BlockDevice,
            0o100_000 => Self::Regular,
            0o120_000 => Self::Symlink,
            0o140_000 => Self::Socket,
            _ => return None,
        })
    }
    /// The `DT_*` number of this type, as stored in directory entries.
    pub const fn dirent_type(self) -> u8 {
        (self.mode_bits() >> 12) as u8
    }
    /// The type with this `DT_*` number.
    pub const fn from_dirent_type(number: u8) -> Option<Self> {
        if number > 15 { None } else { Self::from_mode((number as u32) << 12) }
    }
}

/// A point in time: seconds since 1970 and nanoseconds below a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp {
    /// Seconds since 1970, may be negative.
    pub seconds: i64,
    /// 0 ..= 999,999,999.
    pub nanoseconds: u32,
}

impl Timestamp {
    /// The most nanoseconds below a second.
    pub const MAX_NANOSECONDS: u32 = 999_999_999;

    /// From nanoseconds since 1970.
    pub const fn from_ns(ns: i64) -> Self {
        Self {
            seconds: ns.div_euclid(1_000_000_000),
            nanoseconds: ns.rem_euclid(1_000_000_000) as u32,
        }
    }
}

/// Attributes of an inode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attr {
    /// Inode number.
    pub ino: u64,
    /// What it is.
    pub file_type: FileType,
    /// Permission bits including set-user-id, set-group-id and sticky (07777).
    pub permissions: u32,
    /// Hard links.
    pub links: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Size in bytes; for directories the number of entries.
    pub size_bytes: u64,
    /// Allocated (or reserved) space in units of 4096 bytes.
    pub blocks: u64,
    /// Device number of device nodes.
    pub rdev: u32,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of the data.
    pub mtime: Timestamp,
    /// Last change of the attributes.
    pub ctime: Timestamp,
    /// Birth.
    pub btime: Timestamp,
    /// Grows with every change of data or attributes.
    pub change_counter: u64,
}

/// A time to set: a given one, or the time of the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetTime {
    /// The clock's.
    Now,
    /// This one.
    At(Timestamp),
}

/// What to change of an inode; `None` leaves as is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// Permission bits (07777).
    pub permissions: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// New size: regular files only.
    pub size_bytes: Option<u64>,
    /// Access time. (Of both: [`crate::Error::Invalid`] if there are more nanoseconds than make a second.)
    pub atime: Option<SetTime>,
    /// Modification time.
    pub mtime: Option<SetTime>,
    /// Clear set-user-id, and set-group-id where the group may execute (an unprivileged change of
    /// size or owner); a directory keeps both.
    pub kill_suid_sgid: bool,
}

/// What a new inode looks like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewInode {
    /// What it is.
    pub file_type: FileType,
    /// Permission bits (07777), umask already applied.
    pub permissions: u32,
    /// Owner.
    pub uid: u32,
    /// Group; a set-group-id directory overrides it, and passes the bit on to directories.
    pub gid: u32,
    /// Device number for device nodes.
    pub rdev: u32,
}

impl NewInode {
    /// An inode of `file_type` owned by root.
    pub const fn new(file_type: FileType, permissions: u32) -> Self {
        Self { file_type, permissions, uid: 0, gid: 0, rdev: 0 }
    }
}

/// One entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirEntry {
    /// The entry's name.
    pub name: Vec<u8>,
    /// The inode it names.
    pub ino: u64,
    /// What that is.
    pub file_type: FileType,
    /// Pass this to continue after the entry. Stable for as long as the entry exists.
    pub cookie: u64,
}

/// How [`crate::Volume::rename`] treats the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RenameMode {
    /// Replace it, as POSIX says.
    #[default]
    Replace,
    /// Refuse with [`crate::Error::Exists`].
    NoReplace,
    /// Swap the two, atomically.
    Exchange,
    /// As `Replace`, and leave a *whiteout* in the old place, atomically: a character device of number 0 without permissions,
    /// which overlayfs takes for a name that was removed (`RENAME_WHITEOUT`). Not in a batch.
    Whiteout {
        /// Its owner.
        uid: u32,
        /// Its group, unless the directory says otherwise.
        gid: u32,
    },
}

/// How a file is opened by path. Begin with one of the constants: `OpenFlags { create: true, ..OpenFlags::default() }` opens for reading
/// only, and what it makes has no permission bits (mode 0000), while [`OpenFlags::CREATE`] writes and makes files of mode 0644.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(clippy::struct_excessive_bools)]
pub struct OpenFlags {
    /// Writes are allowed.
    pub write: bool,
    /// Create it when it does not exist (with `permissions`). Does not imply `write`.
    pub create: bool,
    /// With `create`: refuse when it exists, also as a symbolic link, whether that leads anywhere or not. Without: nothing.
    pub exclusive: bool,
    /// Cut it to length 0. Needs `write`: [`crate::Error::Invalid`] without.
    pub truncate: bool,
    /// Every write is durable when it returns (data and what is needed to find it).
    pub data_sync: bool,
    /// Permission bits of a new file (07777); 0 by default, 0644 in the constants. Later opens of the file do not look at them.
    pub permissions: u32,
}

impl OpenFlags {
    /// For reading.
    pub const READ: Self = Self {
        write: false,
        create: false,
        exclusive: false,
        truncate: false,
        data_sync: false,
        permissions: 0o644,
    };
    /// For reading and writing.
    pub const READ_WRITE: Self = Self { write: true, ..Self::READ };
    /// For reading and writing; created if missing.
    pub const CREATE: Self = Self { create: true, ..Self::READ_WRITE };
    /// For reading and writing; must not exist yet.
    pub const CREATE_NEW: Self = Self { exclusive: true, ..Self::CREATE };
}

/// What [`crate::File::allocate`] does with a range (the modes of `fallocate(2)`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AllocateMode {
    /// Reserve blocks; the file grows if the range ends beyond it.
    Extend,
    /// Reserve blocks; the size stays.
    KeepSize,
    /// Free the blocks of the range; it reads as zeros. The size stays.
    PunchHole,
    /// The range reads as zeros and has blocks; the file grows if the range ends beyond it.
    ZeroRange,
    /// As `ZeroRange`; the size stays.
    ZeroRangeKeepSize,
    /// Take the range out and move what follows down. Block-aligned.
    CollapseRange,
    /// Open a hole and move what follows up. Block-aligned.
    InsertRange,
}

/// Space and inodes of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatFs {
    /// Blocks of 4096 bytes for data and trees.
    pub total_blocks: u64,
    /// Not allocated and not reserved, including what becomes free with the next checkpoint.
    pub free_blocks: u64,
    /// Of these, what users can fill.
    pub available_blocks: u64,
    /// Inodes in use.
    pub inodes: u64,
    /// Inodes that could still be made.
    pub free_inodes: u64,
    /// Longest name.
    pub max_name_bytes: u32,
}

/// What a volume promises of single writes, and how much of everything it takes at a time.
///
/// **Untorn writes.** A [`crate::File::write_at`] of whole pages (`untorn_alignment_bytes`) of at most `untorn_write_bytes`
/// that does not cross a multiple of `untorn_boundary_bytes` of the file is old or new after a crash, never a mixture, whether it was
/// synced or background writeback got to it first; and of two such writes that overlap, neither is mixed with what was there before
/// both. So a database whose pages are aligned to their size, up to 128 KiB, needs no full-page writes and no
/// double-write buffer. Limits: a *ranged* sync (or `sync_range`, `expire`) that covers only a part of the write may make
/// that part durable alone; a truncation, or a hole punched, that cuts through the write is an operation of its own;
/// and a write that leaves a gap behind the end of the file may be preceded by a size in between.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Longest write that is never torn.
    pub untorn_write_bytes: u32,
    /// Offset and length of such a write are multiples of this.
    pub untorn_alignment_bytes: u32,
    /// Such a write does not cross a multiple of this.
    pub untorn_boundary_bytes: u32,
    /// Most dirty bytes of an fsync that travel in the log: one write, one flush. Of a file that is renamed over another one so much comes
    /// before the rename, synced or not.
    pub max_log_payload_bytes: u32,
    /// Tickets that may be in flight at a time.
    pub max_tickets: u64,
    /// Dirty bytes that may be handed to background writeback at a time (`sync_range`).
    pub handover_bytes: u64,
    /// Data of a batch that travels in the log; what is beyond goes home first, to new blocks.
    pub max_batch_payload_bytes: u64,
}

/// How a volume is created.
#[derive(Debug, Clone, Default)]
pub struct CreateOptions {
    /// Size of the volume in bytes, rounded down to blocks; `None`: the size of the device or file.
    pub size_bytes: Option<u64>,
    /// Size of the log ring; `None`: 1/32 of the volume within [256 MiB, 2 GiB], at most 1/8.
    pub log_bytes: Option<u64>,
    /// Write the whole volume with zeros, so that later flushes never pay for the host file system's
    /// journal.
    pub prewrite: bool,
    /// Replace whatever is there.
    pub force: bool,
    /// A name for people.
    pub label: String,
    /// The volume's id; `None`: random.
    pub volume_id: Option<format::VolumeId>,
    /// Owner of the root directory.
    pub root_uid: u32,
    /// Group of the root directory.
    pub root_gid: u32,
}

/// When reading updates a file's access time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AtimePolicy {
    /// Never.
    Never,
    /// When it is older than the last change, or than a day.
    #[default]
    Relative,
    /// Always.
    Strict,
}

/// Who does the background work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BackgroundMode {
    /// Threads of the volume: log, checkpointer, flushers, cleaner, deferred syncs, barriers, fresh memory.
    #[default]
    Threads,
    /// Nobody, until [`crate::Volume::background_step`] is called; a call that has to wait for
    /// background work does that work itself, but for [`crate::SyncTicket`] and [`crate::CompletionQueue`]: those know of no volume, so
    /// somebody has to do [`crate::BackgroundWork::Log`]. For simulators and tests.
    Manual,
}

/// How a volume is opened.
#[derive(Clone)]
pub struct VolumeOptions {
    /// Hard cap over pages, tree nodes, delta and log buffers; `None`: min(1 GiB, RAM / 8), of the RAM that the
    /// process's control group may have. Never less than 256 KiB.
    pub memory_bytes: Option<u64>,
    /// Nothing is written, ever; the log is replayed in memory.
    pub read_only: bool,
    /// Who does the background work.
    pub background: BackgroundMode,
    /// Seconds between checkpoints when there is anything to do.
    pub checkpoint_interval_s: u32,
    /// When reading updates access times.
    pub atime: AtimePolicy,
    /// Time source.
    pub clock: crate::sync::Arc<dyn crate::sync::Clock>,
    /// Called during recovery with how far it is: (blocks read, blocks to be read at most). The log is read twice; between the
    /// steps of the second time pages go home.
    pub on_recovery_progress: Option<crate::sync::Arc<dyn Fn(u64, u64) + Send + Sync>>,
    /// For simulators and tests: a batch is cut into parts of at most so many blocks of the log, so that a small one is a
    /// chain of frames too.
    #[doc(hidden)]
    pub batch_part_blocks: Option<u64>,
    /// For simulators and tests: so few new pages of a sync are already written beside their frame.
    #[doc(hidden)]
    pub beside_from_pages: Option<u64>,
    /// For simulators and tests: every merge of a checkpoint is given up and made anew with as few nodes as there can be.
    #[doc(hidden)]
    pub dense_merges: bool,
    /// For simulators and tests: a removed file with more blocks than this is purged in the background.
    #[doc(hidden)]
    pub purge_at_once_blocks: Option<u64>,
    /// For simulators and tests: writeback goes out in rounds of so few pages, and in portions of one request, so that a
    /// little of it overlaps as much does.
    #[doc(hidden)]
    pub round_pages: Option<u64>,
    /// For simulators and tests: one operation takes away so few extents of a file that is cut, or items of one that is purged, that
    /// what has a few of them takes several as well.
    #[doc(hidden)]
    pub cut_extents: Option<usize>,
}

impl Default for VolumeOptions {
    fn default() -> Self {
        Self {
            memory_bytes: None,
            read_only: false,
            background: BackgroundMode::Threads,
            checkpoint_interval_s: 30,
            atime: AtimePolicy::Relative,
            clock: crate::sync::Arc::new(crate::sync::SystemClock::default()),
            on_recovery_progress: None,
            batch_part_blocks: None,
            beside_from_pages: None,
            dense_merges: false,
            purge_at_once_blocks: None,
            round_pages: None,
            cut_extents: None,
        }
    }
}

impl std::fmt::Debug for VolumeOptions {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("VolumeOptions")
            .field("memory_bytes", &self.memory_bytes)
            .field("read_only", &self.read_only)
            .field("background", &self.background)
            .field("checkpoint_interval_s", &self.checkpoint_interval_s)
            .field("atime", &self.atime)
            .finish_non_exhaustive()
    }
}
