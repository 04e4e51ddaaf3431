//! What a check answers: problems with a kind that a program can match, a place, and one line of
//! text.

use crate::format::Key;
use std::fmt;

/// Kinds of problems with their names for machines: in one place, so that none is forgotten in [`ProblemKind::ALL`], and so none by
/// the test that plants each.
macro_rules! problem_kinds {
    ($($(#[$doc:meta])* $kind:ident = $name:literal,)*) => {
        /// What is wrong.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum ProblemKind {
            $($(#[$doc])* $kind,)*
        }

        impl ProblemKind {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$kind),*];

            /// Short name for machines, for example `link-count`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name,)*
                }
            }
        }
    };
}

problem_kinds! {
    /// The superblock contradicts the root, or fewer copies of it are intact than any crash leaves.
    Superblock = "superblock",
    /// One copy of the superblock is not what it should be; the others are enough.
    SuperblockCopy = "superblock-copy",
    /// The checkpoint root cannot be read, or contradicts itself.
    Root = "root",
    /// A bitmap is not the one that the root names.
    Bitmap = "bitmap",
    /// A tree node is damaged: what it holds could not be checked.
    Node = "node",
    /// The tree has another number of nodes or items than its root says.
    TreeCounts = "tree-counts",
    /// An item cannot be decoded, or has an impossible key.
    Item = "item",
    /// Items of an inode that does not exist.
    ItemWithoutInode = "item-without-inode",
    /// A field of an inode has a value that its type does not allow.
    InodeField = "inode-field",
    /// An inode number that was never given out.
    InodeNumber = "inode-number",
    /// The root counts another number of inodes than there are.
    InodeCount = "inode-count",
    /// The size of a symbolic link or special file is wrong.
    Size = "size",
    /// An inode counts another number of blocks than its extents have.
    BlockCount = "block-count",
    /// An inode's link count is not the number of its names.
    LinkCount = "link-count",
    /// A directory counts another number of subdirectories than it has.
    SubdirectoryCount = "subdirectory-count",
    /// A directory counts another number of entries than it has.
    EntryCount = "entry-count",
    /// A directory names another parent than the directory that it is in.
    Parent = "parent",
    /// An entry names an inode that does not exist.
    DanglingEntry = "dangling-entry",
    /// An entry's type is not the inode's.
    EntryType = "entry-type",
    /// An entry or attribute is at a place that is not its name's hash.
    NameHash = "name-hash",
    /// A name that cannot be: `.`, `..`, or with a slash or zero byte.
    Name = "name",
    /// Two entries or attributes of one owner have the same name.
    DuplicateName = "duplicate-name",
    /// Inline data contradicts its inode.
    Inline = "inline",
    /// An extent leaves the data area.
    ExtentPlace = "extent-place",
    /// Two extents of a file cover the same file block.
    ExtentOverlap = "extent-overlap",
    /// An extent has data beyond the end of its file.
    ExtentBeyondEnd = "extent-beyond-end",
    /// Two owners claim the same block.
    BlockUsedTwice = "block-used-twice",
    /// A block in use is marked as free.
    MarkedFree = "marked-free",
    /// A block that nobody uses is marked as allocated.
    Leaked = "leaked",
    /// An orphan entry that makes no sense, or an unlinked inode without one.
    Orphan = "orphan",
    /// An inode with links that no directory names.
    Unreachable = "unreachable",
    /// Directories that contain each other.
    Cycle = "cycle",
    /// The log cannot be read, makes no sense, or ends too early.
    Log = "log",
    /// Recovery of the volume fails.
    Recovery = "recovery",
    /// A block of data does not match its checksum.
    Data = "data",
    /// Bytes behind the end of a file are not zero.
    Tail = "tail",
    /// The device cannot read a place.
    Unreadable = "unreadable",
}

/// Where it is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Place {
    /// The volume as a whole.
    Volume,
    /// A block of the volume.
    Block(u64),
    /// An allocation group.
    Group(u32),
    /// The log ring.
    Log,
    /// An inode.
    Inode(u64),
    /// A block of a file.
    FileBlock {
        /// The file.
        inode: u64,
        /// The place in it, in blocks.
        file_block: u64,
    },
    /// An item of the tree.
    Item(Key),
}

impl fmt::Display for Place {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Volume => write!(out, "volume"),
            Self::Block(block) => write!(out, "block {block}"),
            Self::Group(group) => write!(out, "group {group}"),
            Self::Log => write!(out, "log"),
            Self::Inode(inode) => write!(out, "inode {inode}"),
            Self::FileBlock { inode, file_block } => {
                write!(out, "inode {inode} file block {file_block}")
            }
            Self::Item(key) => {
                write!(out, "inode {} {:?} item {:#x}", key.inode, key.kind, key.offset)
            }
        }
    }
}

/// Which state of the volume a problem is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    /// The last checkpoint and the log, as they are on the device.
    Stored,
    /// What recovery makes of them.
    Recovered,
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// What.
    pub kind: ProblemKind,
    /// Where.
    pub place: Place,
    /// In which state of the volume.
    pub stage: Stage,
    /// The details, in one line.
    pub text: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}: {}", self.kind.name(), self.place, self.text)?;
        match self.stage {
            Stage::Stored => Ok(()),
            Stage::Recovered => write!(out, " (after recovery)"),
        }
    }
}

/// How much there is of everything, in the state after recovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Inodes of all types.
    pub inodes: u64,
    /// Regular files.
    pub files: u64,
    /// Directories.
    pub directories: u64,
    /// Symbolic links.
    pub symlinks: u64,
    /// Unlinked inodes, and files whose cut was interrupted: the next opening cleans them up.
    pub orphans: u64,
    /// Directory entries.
    pub entries: u64,
    /// Extended attributes.
    pub attributes: u64,
    /// Extents.
    pub extents: u64,
    /// Blocks that belong to files.
    pub file_blocks: u64,
    /// Tree nodes.
    pub nodes: u64,
    /// Items of the tree.
    pub items: u64,
    /// Blocks of data whose checksums were verified.
    pub verified_blocks: u64,
}

/// The answer of a check.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CheckReport {
    /// The first problems found, up to [`super::CheckOptions::max_problems`].
    pub problems: Vec<Problem>,
    /// All problems found.
    pub problem_count: u64,
    /// What is damaged without consequence: the next writes repair it.
    pub warnings: Vec<Problem>,
    /// The log holds operations that the next opening will apply; they were applied in memory, and
    /// the result was checked too.
    pub log_replayed: bool,
    /// The volume was closed in order.
    pub cleanly_closed: bool,
    /// Frames of the log that will be replayed.
    pub log_frames: u64,
    /// How much there is of everything.
    pub counts: Counts,
}

impl CheckReport {
    /// Nothing is wrong.
    pub const fn is_clean(&self) -> bool {
        self.problem_count == 0
    }

    /// Whether a problem of this kind was found (among those kept).
    pub fn has(&self, kind: ProblemKind) -> bool {
        self.problems.iter().any(|problem| problem.kind == kind)
    }
}

/// Gathers problems: counts all, keeps the first.
pub(super) struct Findings {
    report: CheckReport,
    limit: usize,
    pub stage: Stage,
}

impl Findings {
    pub fn new(limit: usize) -> Self {
        Self { report: CheckReport::default(), limit, stage: Stage::Stored }
    }

    /// Takes a problem in. What recovery left as it was is not counted again.
    pub fn add(&mut self, kind: ProblemKind, place: Place, text: impl FnOnce() -> String) {
        let known = |problem: &Problem| problem.kind == kind && problem.place == place;
        if self.stage == Stage::Recovered && self.report.problems.iter().any(known) {
            return;
        }
        self.report.problem_count += 1;
        if self.report.problems.len() < self.limit {
            let problem = Problem { kind, place, stage: self.stage, text: text() };
            self.report.problems.push(problem);
        }
    }

    /// Takes in what has no consequence.
    pub fn warn(&mut self, kind: ProblemKind, place: Place, text: String) {
        self.report.warnings.push(Problem { kind, place, stage: self.stage, text });
    }

    /// The report, to be completed.
    pub fn into_report(self) -> CheckReport {
        self.report
    }
}
