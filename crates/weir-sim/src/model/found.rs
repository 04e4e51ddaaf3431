//! What a recovered volume holds, as read through its public interface.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use weir::{FileType, Timestamp};

use super::data::FileData;
use super::times::{Span, Times};
use super::{Body, Ino, Inode, Model, ROOT};
use crate::image::{BLOCK_BYTES, Block, BlockRef};

/// Attributes of a found inode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundAttr {
    /// What it is.
    pub file_type: FileType,
    /// Permission bits (07777).
    pub permissions: u32,
    /// Link count.
    pub links: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Size; meaningful for regular files only.
    pub size: u64,
    /// Allocated or reserved space.
    pub blocks: u64,
    /// Device number.
    pub rdev: u32,
    /// Access time.
    pub atime: Timestamp,
    /// Time of the last change of the contents.
    pub mtime: Timestamp,
    /// Time of the last change of the inode.
    pub ctime: Timestamp,
    /// Birth.
    pub btime: Timestamp,
}

/// What a found inode holds.
#[derive(Debug, Clone)]
pub enum FoundBody {
    /// Pages that are not all zeros, by file block; the last one zero-padded.
    File(BTreeMap<u64, BlockRef>),
    /// Entries: name, inode number, type as the entry has it.
    Directory(BTreeMap<String, (u64, FileType)>),
    /// Target.
    Symlink(String),
    /// Pipe, socket or device node.
    Special,
}

/// One inode.
#[derive(Debug, Clone)]
pub struct FoundNode {
    /// Attributes.
    pub attr: FoundAttr,
    /// Extended attributes.
    pub xattrs: BTreeMap<String, Vec<u8>>,
    /// Contents.
    pub body: FoundBody,
    /// Of a regular file: the file blocks that are said to hold data (`SEEK_DATA`), if that could be told.
    pub data: Option<Vec<Range<u64>>>,
    /// File blocks that could not be read, with the error.
    pub unreadable: BTreeMap<u64, String>,
}

/// A whole volume, by the engine's inode numbers.
#[derive(Debug, Clone, Default)]
pub struct Found {
    /// The root directory's number.
    pub root: u64,
    /// Everything reachable.
    pub nodes: BTreeMap<u64, FoundNode>,
    /// What could not be read, beside pages: inode number and error.
    pub problems: BTreeMap<u64, String>,
    /// Answers that do not agree with each other.
    pub contradictions: Vec<String>,
}

/// Pages of `bytes`, a file's contents from file block `first_page` on, without those of zeros.
pub fn pages_of(first_page: u64, bytes: &[u8]) -> impl Iterator<Item = (u64, BlockRef)> + '_ {
    (first_page..)
        .zip(bytes.chunks(BLOCK_BYTES))
        .filter(|(_, chunk)| **chunk != Block::zero().bytes()[..chunk.len()])
        .map(|(index, chunk)| (index, Block::new(chunk)))
}

impl Found {
    /// What a volume that equals `model` holds; for file systems made of a model.
    pub fn from_model(model: &Model) -> Self {
        let mut found = Self { root: u64::from(ROOT), ..Self::default() };
        for (ino, inode) in model.inodes() {
            let some =
                |times: &Times| times.now().next().map_or(Timestamp::default(), |now| now.first);
            let data = inode.data().map(|data| data.where_data_is());
            let attr = FoundAttr {
                file_type: inode.file_type,
                permissions: inode.permissions,
                links: model.links(inode),
                uid: inode.uid,
                gid: inode.gid,
                size: inode.data().map_or(0, |data| data.size),
                rdev: inode.rdev,
                blocks: match &inode.body {
                    Body::File(data) => data.blocks(),
                    Body::Symlink(_) => 1,
                    _ => 0,
                },
                atime: some(&inode.atime),
                mtime: some(&inode.mtime),
                ctime: some(&inode.ctime),
                btime: inode.birth.first,
            };
            let body = match &inode.body {
                Body::File(data) => FoundBody::File(
                    data.pages
                        .iter()
                        .map(|(index, page)| (*index, Arc::clone(page.now())))
                        .collect(),
                ),
                Body::Directory { entries, .. } => FoundBody::Directory(
                    entries
                        .iter()
                        .filter_map(|(name, child)| {
                            let file_type = model.inode(*child)?.file_type;
                            Some((name.clone(), (u64::from(*child), file_type)))
                        })
                        .collect(),
                ),
                Body::Symlink(target) => FoundBody::Symlink(target.clone()),
                Body::Special => FoundBody::Special,
            };
            let xattrs = inode.xattrs.clone();
            let node = FoundNode { attr, xattrs, body, data, unreadable: BTreeMap::new() };
            found.nodes.insert(u64::from(ino), node);
        }
        found
    }
}

impl Model {
    /// The model of a volume whose every byte is durable as found: where a run continues after recovery.
    pub fn from_found(found: &Found) -> Self {
        let mut model = Self::new();
        let mut numbers = BTreeMap::from([(found.root, ROOT)]);
        let mut parents = BTreeMap::from([(ROOT, ROOT)]);
        let mut names: BTreeMap<Ino, u32> = BTreeMap::new();
        let mut queue = vec![found.root];
        let mut at = 0;
        while let Some(number) = queue.get(at).copied() {
            at += 1;
            let Some(node) = found.nodes.get(&number) else { continue };
            if let FoundBody::Directory(entries) = &node.body {
                for (child, _) in entries.values() {
                    let next = ROOT + numbers.len() as Ino;
                    let ino = *numbers.entry(*child).or_insert_with(|| {
                        queue.push(*child);
                        next
                    });
                    *names.entry(ino).or_default() += 1;
                    parents.insert(ino, numbers[&number]);
                }
            }
        }
        for (number, ino) in &numbers {
            let Some(node) = found.nodes.get(number) else { continue };
            let body = match &node.body {
                FoundBody::File(pages) => {
                    let pages = pages.iter().map(|(index, page)| (*index, Arc::clone(page)));
                    let mut data = FileData::durable(node.attr.size, pages);
                    data.holds(node.data.iter().flatten().cloned(), node.attr.blocks);
                    Body::File(Arc::new(data))
                }
                FoundBody::Directory(entries) => Body::Directory {
                    entries: entries
                        .iter()
                        .map(|(name, (child, _))| (name.clone(), numbers[child]))
                        .collect(),
                    parent: parents[ino],
                },
                FoundBody::Symlink(target) => Body::Symlink(target.clone()),
                FoundBody::Special => Body::Special,
            };
            let made = (0, Span::exactly(node.attr.btime));
            let mut inode = Inode::new(node.attr.file_type, node.attr.permissions, body, made);
            inode.uid = node.attr.uid;
            inode.gid = node.attr.gid;
            inode.rdev = node.attr.rdev;
            inode.names = names.get(ino).copied().unwrap_or(1);
            inode.atime = Times::new(Span::exactly(node.attr.atime), 0);
            inode.mtime = Times::new(Span::exactly(node.attr.mtime), 0);
            inode.ctime = Times::new(Span::exactly(node.attr.ctime), 0);
            inode.xattrs.clone_from(&node.xattrs);
            model.insert(*ino, inode);
        }
        model
    }
    /// What a volume does not tell of itself, and `before` knows, which it agrees with: which blocks were allocated by a call.
    #[must_use]
    pub fn with_allocations_of(mut self, before: &Self) -> Self {
        for (path, ino) in before.paths() {
            let known = before.inode(ino).and_then(|inode| inode.data()).map(Arc::clone);
            let (Some(known), Ok(ino)) = (known, self.resolve(&path)) else { continue };
            if let Some(inode) = self.inodes.get_mut(&ino)
                && let Body::File(data) = &mut Arc::make_mut(inode).body
            {
                Arc::make_mut(data).keep_as(&known);
            }
        }
        self
    }

    /// Reading all of it meanwhile may have moved the access times.
    pub fn was_read(&mut self, when: Span) {
        for inode in self.inodes.values_mut() {
            Arc::make_mut(inode).atime.may_set(when, 0);
        }
    }
}
