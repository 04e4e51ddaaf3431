//! The items of the tree, in key order: each decoded, and held against its inode.

use super::View;
use super::data::DataCheck;
use super::links::Inodes;
use super::report::{Counts, Findings, Place, ProblemKind};
use super::space::{Claim, Reached};
use crate::Volume;
use crate::format::item::{Dirent, Extent, InodeItem, Xattr, name_hash};
use crate::format::node::Node;
use crate::format::{
    BLOCK_BYTES_U64, Key, Kind, MAX_FILE_BLOCKS, MAX_INLINE_BYTES, MAX_SYMLINK_BYTES, NODE_BLOCKS,
};
use crate::tree::{Visitor, WalkProblem};
use crate::types::FileType;
use std::ops::ControlFlow;

/// The inode whose items are being visited.
struct Current {
    number: u64,
    item: InodeItem,
    /// Unlinked, or being cut: what lies beyond its end, or is missing, is being removed.
    orphan: bool,
    entries: u64,
    subdirectories: u64,
    inline_bytes: Option<usize>,
    extent_blocks: u64,
    /// First file block behind the extents so far.
    extents_end: u64,
    /// Names with the same hash as the last one, and whose they are.
    names: Vec<Box<[u8]>>,
    names_at: Option<Key>,
}

impl Current {
    fn new(number: u64, item: InodeItem, orphan: bool) -> Self {
        Self {
            number,
            item,
            orphan,
            entries: 0,
            subdirectories: 0,
            inline_bytes: None,
            extent_blocks: 0,
            extents_end: 0,
            names: Vec::new(),
            names_at: None,
        }
    }

    /// Its last name is gone, and its items may be on their way out.
    const fn unlinked(&self) -> bool {
        self.item.links == 0
    }
}

/// A visitor of the whole tree.
pub(super) struct Items<'a, 'b> {
    view: &'a View<'b>,
    findings: &'a mut Findings,
    pub counts: Counts,
    pub inodes: Inodes,
    pub reached: Reached,
    data: Option<DataCheck>,
    current: Option<Current>,
    /// The last inode number that has items but no inode.
    ownerless: Option<u64>,
    /// Every node could be read.
    pub complete: bool,
    max_inode: u64,
}

impl<'a, 'b> Items<'a, 'b> {
    pub fn new(view: &'a View<'b>, findings: &'a mut Findings) -> Self {
        let reached = Reached::new(view.superblock.geometry);
        Self {
            view,
            findings,
            counts: Counts::default(),
            inodes: Inodes::default(),
            reached,
            data: view.verify_data.then(DataCheck::default),
            current: None,
            ownerless: None,
            complete: true,
            max_inode: 0,
        }
    }

    /// After the walk: the last inode, the rest of the data, and the sums in the root.
    pub fn finish(&mut self) {
        self.finish_inode();
        self.verify_data();
        self.inodes.check(self.complete, self.findings);
        let root = self.view.root;
        let found = self.counts.inodes;
        if self.complete && root.inode_count != found {
            self.findings.add(ProblemKind::InodeCount, Place::Volume, || {
                format!("{found} inodes, the root counts {}", root.inode_count)
            });
        }
        if self.max_inode >= root.next_inode {
            let number = self.max_inode;
            self.findings.add(ProblemKind::InodeNumber, Place::Inode(number), || {
                format!("the next new inode would be {}", root.next_inode)
            });
        }
    }

    fn problem(&mut self, kind: ProblemKind, key: Key, text: impl FnOnce() -> String) {
        self.findings.add(kind, Place::Item(key), text);
    }

    fn verify_data(&mut self) {
        if let Some(data) = &mut self.data {
            data.verify(self.view.device, self.findings);
            self.counts.verified_blocks = data.verified_blocks;
            self.view.report_progress(self.counts.nodes, data.verified_blocks);
        }
    }

    fn visit(&mut self, key: Key, value: &[u8]) {
        self.counts.items += 1;
        if key.inode == 0 || key.kind == Kind::Orphan {
            self.orphan(key, value);
            return;
        }
        if key.kind == Kind::Inode {
            self.finish_inode();
            self.begin_inode(key, value);
            return;
        }
        if self.current.as_ref().is_none_or(|current| current.number != key.inode) {
            self.finish_inode();
            if self.complete && self.ownerless != Some(key.inode) {
                self.ownerless = Some(key.inode);
                let kind = ProblemKind::ItemWithoutInode;
                self.problem(kind, key, || "its inode does not exist".to_owned());
            }
        }
        if key.kind == Kind::Inline && key.offset != 0 {
            self.problem(ProblemKind::Item, key, || "inline data at an offset".to_owned());
            return;
        }
        let result = match key.kind {
            Kind::Dirent => self.entry(key, value),
            Kind::Xattr => self.attribute(key, value),
            Kind::Extent => self.extent(key, value),
            _ => {
                self.inline(key, value);
                Ok(())
            }
        };
        if let Err(error) = result {
            self.problem(ProblemKind::Item, key, || error.to_string());
        }
    }

    fn orphan(&mut self, key: Key, value: &[u8]) {
        if key.inode != 0 || key.kind != Kind::Orphan || key.offset == 0 || !value.is_empty() {
            self.problem(ProblemKind::Item, key, || "not an orphan entry".to_owned());
            return;
        }
        self.counts.orphans += 1;
        self.inodes.add_orphan(key.offset);
    }

    fn begin_inode(&mut self, key: Key, value: &[u8]) {
        self.counts.inodes += 1;
        self.max_inode = self.max_inode.max(key.inode);
        if key.offset != 0 {
            self.problem(ProblemKind::Item, key, || "an inode at an offset".to_owned());
            return;
        }
        let item = match InodeItem::decode(value) {
            Ok(item) => item,
            Err(error) => {
                self.ownerless = Some(key.inode);
                self.inodes.add_damaged(key.inode);
                self.problem(ProblemKind::Item, key, || error.to_string());
                return;
            }
        };
        match item.file_type {
            FileType::Regular => self.counts.files += 1,
            FileType::Directory => self.counts.directories += 1,
            FileType::Symlink => self.counts.symlinks += 1,
            _ => {}
        }
        self.check_fields(key.inode, &item);
        self.inodes.add_inode(key.inode, &item);
        let orphan = self.inodes.is_orphan(key.inode);
        self.current = Some(Current::new(key.inode, item, orphan));
    }

    /// What an inode's type says about its fields.
    fn check_fields(&mut self, number: u64, item: &InodeItem) {
        let file_type = item.file_type;
        let is_directory = file_type == FileType::Directory;
        let may_be_inline = matches!(file_type, FileType::Regular | FileType::Symlink);
        let wrong = [
            (number == Volume::ROOT && !is_directory, "the root is no directory"),
            (number == Volume::ROOT && item.links == 0, "the root has no links"),
            (!is_directory && item.parent != 0, "a parent, but it is no directory"),
            (!is_directory && item.subdirectories != 0, "subdirectories, but it is no directory"),
            (!may_be_inline && item.is_inline(), "inline data, but its type has none"),
        ];
        for (_, text) in wrong.into_iter().filter(|(holds, _)| *holds) {
            self.findings.add(ProblemKind::InodeField, Place::Inode(number), || text.to_owned());
        }
    }

    /// The inode that owns `key`, if it is of one of these types.
    fn owner(&mut self, key: Key, types: &[FileType]) -> Option<&mut Current> {
        let current = self.current.as_mut().filter(|current| current.number == key.inode)?;
        if types.contains(&current.item.file_type) {
            return self.current.as_mut();
        }
        let file_type = current.item.file_type;
        self.problem(ProblemKind::Item, key, || format!("its inode is a {file_type:?}"));
        None
    }

    fn entry(&mut self, key: Key, value: &[u8]) -> Result<(), crate::format::FormatError> {
        self.counts.entries += 1;
        let entry = Dirent::decode(value)?;
        self.inodes.add_name(key.inode, entry.inode, entry.file_type);
        if let Some(current) = self.owner(key, &[FileType::Directory]) {
            current.entries += 1;
            current.subdirectories += u64::from(entry.file_type == FileType::Directory);
        }
        let impossible = entry.name.contains(&0) || entry.name.contains(&b'/');
        if impossible || entry.name == b"." || entry.name == b".." {
            self.problem(ProblemKind::Name, key, || {
                format!("{:?} cannot be a name", String::from_utf8_lossy(entry.name))
            });
        }
        self.check_name(key, entry.name);
        Ok(())
    }

    fn attribute(&mut self, key: Key, value: &[u8]) -> Result<(), crate::format::FormatError> {
        self.counts.attributes += 1;
        let attribute = Xattr::decode(value)?;
        if attribute.name.contains(&0) {
            self.problem(ProblemKind::Name, key, || {
                "a zero byte in an attribute's name".to_owned()
            });
        }
        self.check_name(key, attribute.name);
        Ok(())
    }

    /// A name is where its hash says, and there once.
    fn check_name(&mut self, key: Key, name: &[u8]) {
        let hash = key.offset & !0xff;
        if name_hash(name) != hash {
            self.problem(ProblemKind::NameHash, key, || {
                format!("{:?} belongs at {:#x}", String::from_utf8_lossy(name), name_hash(name))
            });
        }
        let Some(current) = self.current.as_mut().filter(|c| c.number == key.inode) else { return };
        let at = Some(Key { offset: hash, ..key });
        if current.names_at != at {
            current.names_at = at;
            current.names.clear();
        }
        // At most 256 names share a hash: the low eight bits of the key number them.
        let known = current.names.iter().any(|other| **other == *name);
        current.names.push(name.into());
        if known {
            self.problem(ProblemKind::DuplicateName, key, || {
                format!("{:?} is there twice", String::from_utf8_lossy(name))
            });
        }
    }

    fn inline(&mut self, key: Key, value: &[u8]) {
        let types = [FileType::Regular, FileType::Symlink];
        let Some(current) = self.owner(key, &types) else { return };
        current.inline_bytes = Some(value.len());
    }

    fn extent(&mut self, key: Key, value: &[u8]) -> Result<(), crate::format::FormatError> {
        self.counts.extents += 1;
        let (block, blocks, unwritten) = Extent::decode_head(value)?;
        self.counts.file_blocks += blocks;
        let file_end = key.offset.saturating_add(blocks);
        if file_end > MAX_FILE_BLOCKS {
            self.problem(ProblemKind::Item, key, || "beyond the largest file".to_owned());
        }
        let claim = self.reached.claim(block, blocks);
        let last = block + (blocks - 1);
        match claim {
            Claim::Fresh => {}
            Claim::Outside => self.problem(ProblemKind::ExtentPlace, key, || {
                format!("blocks {block} to {last} are not in the data area")
            }),
            Claim::Twice => self.problem(ProblemKind::BlockUsedTwice, key, || {
                format!("blocks {block} to {last} belong to somebody else, too")
            }),
        }
        let Some(current) = self.owner(key, &[FileType::Regular]) else { return Ok(()) };
        current.extent_blocks += blocks;
        let overlaps = key.offset < current.extents_end;
        current.extents_end = current.extents_end.max(file_end);
        let (size, inline) = (current.item.size, current.item.is_inline());
        let beyond = !unwritten && !current.orphan && file_end > size.div_ceil(BLOCK_BYTES_U64);
        if overlaps {
            self.problem(ProblemKind::ExtentOverlap, key, || {
                "overlaps the extent before it".to_owned()
            });
        }
        if beyond {
            self.problem(ProblemKind::ExtentBeyondEnd, key, || {
                format!("ends at file block {file_end}, the file has {size} bytes")
            });
        }
        // Blocks reserved by `fallocate` may wait behind inline data.
        if inline && key.offset == 0 && !unwritten {
            self.problem(ProblemKind::Inline, key, || {
                "the first block is inline and in an extent".to_owned()
            });
        }
        if !unwritten
            && claim != Claim::Outside
            && file_end <= MAX_FILE_BLOCKS
            && let Some(data) = &mut self.data
        {
            data.add(key.inode, key.offset, block, value.get(16..).unwrap_or(&[]), size);
            if data.is_full() {
                self.verify_data();
            }
        }
        Ok(())
    }

    /// All items of the current inode were seen: its sums.
    fn finish_inode(&mut self) {
        let Some(current) = self.current.take() else { return };
        if !self.complete {
            return;
        }
        let place = Place::Inode(current.number);
        let Current { item, entries, extent_blocks, .. } = current;
        let blocks_match = if current.unlinked() {
            // A purge takes extents out step by step.
            extent_blocks <= item.blocks
        } else {
            extent_blocks == item.blocks
        };
        if !blocks_match {
            self.findings.add(ProblemKind::BlockCount, place, || {
                format!("{} blocks counted, {extent_blocks} in extents", item.blocks)
            });
        }
        match item.file_type {
            FileType::Regular => self.finish_inline(&current),
            FileType::Symlink => {
                self.finish_inline(&current);
                if item.size == 0 || item.size > MAX_SYMLINK_BYTES as u64 {
                    self.findings.add(ProblemKind::Size, place, || {
                        format!("a symbolic link of {} bytes", item.size)
                    });
                }
            }
            FileType::Directory => {
                if item.size != entries {
                    self.findings.add(ProblemKind::EntryCount, place, || {
                        format!("{} entries counted, {entries} found", item.size)
                    });
                }
                self.finish_directory(&current);
            }
            _ if item.size != 0 => {
                self.findings.add(ProblemKind::Size, place, || {
                    format!("a special file of {} bytes", item.size)
                });
            }
            _ => {}
        }
    }

    fn finish_directory(&mut self, current: &Current) {
        let place = Place::Inode(current.number);
        let Current { item, subdirectories, .. } = current;
        if u64::from(item.subdirectories) != *subdirectories {
            self.findings.add(ProblemKind::SubdirectoryCount, place, || {
                format!("{} subdirectories counted, {subdirectories} found", item.subdirectories)
            });
        }
        let links = if current.unlinked() { 0 } else { subdirectories.saturating_add(2) };
        if u64::from(item.links) != links {
            self.findings.add(ProblemKind::LinkCount, place, || {
                format!("link count {}, it must be {links}", item.links)
            });
        }
    }

    /// The inline item fits the flag and the size.
    fn finish_inline(&mut self, current: &Current) {
        let Current { item, inline_bytes, .. } = current;
        let is_link = item.file_type == FileType::Symlink;
        let text = match *inline_bytes {
            Some(_) if !item.is_inline() => "has inline data, and its flags deny it".to_owned(),
            None if (item.is_inline() || is_link) && !current.unlinked() => {
                "its flags promise inline data, and there is none".to_owned()
            }
            Some(bytes) if is_link && bytes as u64 != item.size => {
                format!("a target of {bytes} bytes, the size is {}", item.size)
            }
            Some(bytes) if !is_link && bytes > MAX_INLINE_BYTES => {
                format!("{bytes} bytes of inline data")
            }
            // A cut that the log still holds has yet to reach the inline data.
            Some(bytes) if !is_link && self.view.settled && bytes as u64 > item.size => {
                format!("{bytes} bytes of inline data, the size is {}", item.size)
            }
            _ => return,
        };
        self.findings.add(ProblemKind::Inline, Place::Inode(current.number), || text);
    }
}

impl Visitor for Items<'_, '_> {
    fn node(&mut self, node: &Node) -> ControlFlow<()> {
        self.counts.nodes += 1;
        let place = Place::Block(node.block());
        match self.reached.claim(node.block(), NODE_BLOCKS) {
            Claim::Fresh => {}
            Claim::Outside => self.findings.add(ProblemKind::Node, place, || {
                "a tree node outside of the data area".to_owned()
            }),
            Claim::Twice => self.findings.add(ProblemKind::BlockUsedTwice, place, || {
                "a tree node in blocks that belong to somebody else, too".to_owned()
            }),
        }
        let newest = self.view.root.generation;
        if node.generation() > newest {
            self.findings.add(ProblemKind::Node, place, || {
                format!("of generation {}, the root is of {newest}", node.generation())
            });
        }
        ControlFlow::Continue(())
    }

    fn item(&mut self, key: Key, value: &[u8]) -> ControlFlow<()> {
        self.visit(key, value);
        ControlFlow::Continue(())
    }

    fn problem(&mut self, problem: WalkProblem) -> ControlFlow<()> {
        let text = problem.error.to_string();
        if problem.block == 0 {
            self.findings.add(ProblemKind::TreeCounts, Place::Volume, || text);
            return ControlFlow::Continue(());
        }
        self.complete = false;
        let kind = match problem.error {
            crate::Error::Io(_) => ProblemKind::Unreadable,
            _ => ProblemKind::Node,
        };
        self.findings.add(kind, Place::Block(problem.block), || text);
        ControlFlow::Continue(())
    }

    fn progress(&mut self, visited_nodes: u64, _node_count: u64) -> ControlFlow<()> {
        self.view.report_progress(visited_nodes, self.counts.verified_blocks);
        ControlFlow::Continue(())
    }
}
