//! Comparison of a found volume with a state that the history allows.

use std::collections::BTreeMap;

use weir::{AtimePolicy, FileType, Timestamp};

use super::data::{FileData, Page};
use super::found::{Found, FoundAttr, FoundBody, FoundNode};
use super::{Body, Ino, Inode, Model, ROOT};
use crate::image::{BLOCK_BYTES, Block};
use crate::pattern;

/// What the number of a file's blocks says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blocks {
    /// All data is home.
    Home,
    /// Pages that are dirty count, whether they have a block already or not, up to the size of the file.
    Dirty,
    /// The same, and what a crash has left of a cut is still there.
    Uncut,
}

/// What may have become of a volume by its disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disk {
    /// Nothing.
    Sound,
    /// What cannot be read is not held against the volume: only wrong answers are.
    Failing,
    /// The same, and what was acknowledged may be gone (a disk that rots).
    Lying,
}

/// How strict a comparison is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strictness {
    /// File contents and sizes must be what they are now, not what a crash may leave.
    pub exact: bool,
    /// How blocks are counted.
    pub blocks: Blocks,
    /// What is to be expected of the disk.
    pub disk: Disk,
    /// Stop at the first difference: enough to reject a candidate.
    pub first_only: bool,
}

impl Strictness {
    /// After a crash.
    pub const CRASH: Self =
        Self { exact: false, blocks: Blocks::Home, disk: Disk::Sound, first_only: true };
    /// A live volume.
    pub const EXACT: Self =
        Self { exact: true, blocks: Blocks::Dirty, first_only: false, ..Self::CRASH };
    /// A volume that was closed and opened again.
    pub const CLOSED: Self = Self { blocks: Blocks::Home, ..Self::EXACT };
}

/// Differences between `model` and `found`, one line each; empty when `found` is allowed.
pub fn compare(model: &Model, found: &Found, strictness: Strictness) -> Vec<String> {
    let mut comparison = Comparison {
        model,
        found,
        strictness,
        numbers: BTreeMap::new(),
        back: BTreeMap::new(),
        lines: Vec::new(),
    };
    for text in &found.contradictions {
        comparison.differ("", || text.clone());
    }
    comparison.visit("", ROOT, found.root);
    comparison.lines
}

struct Comparison<'a> {
    model: &'a Model,
    found: &'a Found,
    strictness: Strictness,
    /// Model inode to found inode, and back: hard links must agree.
    numbers: BTreeMap<Ino, u64>,
    back: BTreeMap<u64, Ino>,
    lines: Vec<String>,
}

impl Comparison<'_> {
    fn tolerates_unreadable(&self) -> bool {
        self.strictness.disk != Disk::Sound
    }

    fn done(&self) -> bool {
        self.strictness.first_only && !self.lines.is_empty()
    }

    /// Notes a difference at `path` (the root's is empty).
    fn differ(&mut self, path: &str, text: impl FnOnce() -> String) {
        // Rejecting a candidate needs no words.
        let line = if self.strictness.first_only {
            String::new()
        } else {
            format!("{}: {}", if path.is_empty() { "/" } else { path }, text())
        };
        self.lines.push(line);
    }

    fn visit(&mut self, path: &str, ino: Ino, number: u64) {
        let known = (self.numbers.get(&ino).copied(), self.back.get(&number).copied());
        match known {
            (Some(same), Some(_)) if same == number => return,
            (None, None) => {}
            _ => {
                return self.differ(path, || {
                    format!("hard links differ: found inode {number} has other names than expected")
                });
            }
        }
        self.numbers.insert(ino, number);
        self.back.insert(number, ino);
        let Some(node) = self.found.nodes.get(&number) else {
            if !self.tolerates_unreadable() {
                let problem = self.found.problems.get(&number).cloned();
                self.differ(path, || {
                    format!("inode {number}: {}", problem.unwrap_or_else(|| "missing".to_owned()))
                });
            }
            return;
        };
        self.attributes(path, ino, node);
        if self.done() {
            return;
        }
        let Some(inode) = self.model.inode(ino) else { return };
        match (&inode.body, &node.body) {
            (Body::File(data), FoundBody::File(_)) => self.contents(path, data, node),
            (Body::Directory { entries, .. }, FoundBody::Directory(found)) => {
                if self.found.problems.contains_key(&number) && self.tolerates_unreadable() {
                    return;
                }
                for (name, (child, file_type)) in found {
                    match entries.get(name) {
                        None => self
                            .differ(path, || format!("unexpected entry {name:?} ({file_type:?})")),
                        Some(expected) => {
                            let child_path = format!("{path}/{name}");
                            self.entry_type(&child_path, *expected, *file_type);
                            self.visit(&child_path, *expected, *child);
                        }
                    }
                    if self.done() {
                        return;
                    }
                }
                for (name, child) in entries {
                    if !found.contains_key(name) {
                        let file_type = self.model.inode(*child).map(|inode| inode.file_type);
                        self.differ(path, || format!("missing entry {name:?} ({file_type:?})"));
                    }
                }
            }
            (Body::Symlink(target), FoundBody::Symlink(found)) if target != found => {
                self.differ(path, || format!("symlink leads to {found:?}, expected {target:?}"));
            }
            _ => {}
        }
    }

    fn entry_type(&mut self, path: &str, ino: Ino, file_type: FileType) {
        if self.model.inode(ino).is_some_and(|inode| inode.file_type != file_type) {
            self.differ(path, || format!("the entry says {file_type:?}"));
        }
    }

    fn attributes(&mut self, path: &str, ino: Ino, node: &FoundNode) {
        let Some(inode) = self.model.inode(ino) else { return };
        let attr = &node.attr;
        let expected = (inode.file_type, inode.permissions, inode.uid, inode.gid, inode.rdev);
        let found = (attr.file_type, attr.permissions, attr.uid, attr.gid, attr.rdev);
        if expected != found {
            self.differ(path, || {
                format!("(type, permissions, uid, gid, rdev) is {found:?}, expected {expected:?}")
            });
        }
        let links = self.model.links(inode);
        if attr.links != links {
            self.differ(path, || format!("{} links, expected {links}", attr.links));
        }
        self.times(path, inode, attr);
        let blocks = match &inode.body {
            Body::File(_) => attr.blocks,
            Body::Symlink(_) => 1,
            _ => 0,
        };
        if attr.blocks != blocks {
            self.differ(path, || format!("{} blocks, expected {blocks}", attr.blocks));
        }
        if inode.xattrs != node.xattrs {
            self.differ(path, || {
                let found: Vec<String> = sizes_of(&node.xattrs);
                let expected: Vec<String> = sizes_of(&inode.xattrs);
                format!("extended attributes {found:?}, expected {expected:?} (or values differ)")
            });
        }
    }

    fn times(&mut self, path: &str, inode: &Inode, attr: &FoundAttr) {
        let exact = self.strictness.exact;
        for (name, times, found) in [
            ("atime", &inode.atime, attr.atime),
            ("mtime", &inode.mtime, attr.mtime),
            ("ctime", &inode.ctime, attr.ctime),
        ] {
            // Whoever passes a symbolic link reads it.
            let is_passed = name == "atime"
                && inode.file_type == FileType::Symlink
                && self.model.atime != AtimePolicy::Never;
            if !is_passed && !times.may_be(found, exact) {
                self.differ(path, || {
                    let Timestamp { seconds, nanoseconds } = found;
                    let allowed = times.describe(exact);
                    format!("{name} is {seconds}.{nanoseconds:09}, allowed {allowed}")
                });
            }
        }
        if !inode.birth.holds(attr.btime) {
            self.differ(path, || format!("birth {:?}, expected {:?}", attr.btime, inode.birth));
        }
    }

    /// Where there is said to be data, and how many blocks there are: for that, and for what was allocated.
    fn space(&mut self, path: &str, data: &FileData, node: &FoundNode) {
        let Some(found) = &node.data else {
            if !self.tolerates_unreadable() {
                self.differ(path, || "where it has data cannot be told".to_owned());
            }
            return;
        };
        if self.strictness.disk == Disk::Lying {
            return;
        }
        let exact = self.strictness.exact;
        let end = node.attr.size.div_ceil(BLOCK_BYTES as u64);
        let holds = |index: u64| found.iter().any(|run| run.contains(&index));
        let mut count = 0;
        for index in found.iter().cloned().flatten() {
            count += 1;
            if !data.pages.get(&index).is_some_and(Page::has_data) {
                self.differ(path, || {
                    format!("page {index} is said to hold data, and nobody wrote any")
                });
            }
        }
        let wanted = |page: &Page| if exact { page.has_data() } else { page.is_certain() };
        let lost = data.pages.range(..end).find(|(index, page)| wanted(page) && !holds(**index));
        if let Some((index, _)) = lost {
            self.differ(path, || format!("page {index} is said to be a hole, and was written"));
        }
        if self.done() {
            return;
        }
        let kept = data.kept().count() as u64;
        let expected = count + data.kept().filter(|index| !holds(*index)).count() as u64;
        // The first page may lie in the inode, which is a block only if there is no other.
        let is_inline =
            data.was_small && holds(0) && !data.pages.get(&0).is_some_and(Page::is_kept);
        let mut least = if is_inline { (expected - 1).max(1) } else { expected };
        let mut most = expected + data.surplus;
        if self.strictness.blocks != Blocks::Home {
            least = least.min(kept.max(end));
            most = most.max(end.min(most + count));
        }
        if self.strictness.blocks == Blocks::Uncut {
            most = u64::MAX;
        }
        if !(least..=most).contains(&node.attr.blocks) {
            self.differ(path, || {
                format!(
                    "{} blocks, expected {least} to {most}: {count} pages hold data ({found:?}), {kept} are allocated ({:?})",
                    node.attr.blocks,
                    data.kept().collect::<Vec<_>>()
                )
            });
        }
    }

    fn contents(&mut self, path: &str, data: &FileData, node: &FoundNode) {
        let FoundBody::File(found) = &node.body else { return };
        let size = node.attr.size;
        let exact = self.strictness.exact;
        let size_allowed = if exact { data.size == size } else { data.may_have_size(size) };
        if !size_allowed {
            self.differ(path, || {
                if exact {
                    format!("size {size}, expected {}", data.size)
                } else {
                    format!("size {size}, allowed {:?}", data.sizes())
                }
            });
            if self.done() {
                return;
            }
        }
        self.space(path, data, node);
        if self.done() {
            return;
        }
        let page_bytes = BLOCK_BYTES as u64;
        let indices: std::collections::BTreeSet<u64> =
            found.keys().chain(data.pages.keys()).copied().collect();
        for index in indices.into_iter().take_while(|index| index * page_bytes < size) {
            if self.tolerates_unreadable() && node.unreadable.contains_key(&index) {
                continue;
            }
            let visible = (size - index * page_bytes).min(page_bytes) as usize;
            let content = found.get(&index).unwrap_or_else(|| Block::zero());
            let page = data.pages.get(&index);
            let matches = |expected: &crate::image::BlockRef| {
                expected.bytes()[..visible] == content.bytes()[..visible]
            };
            let allowed = match page {
                None => matches(Block::zero()),
                Some(page) if exact => matches(page.now()),
                Some(_) => data.may_hold(index, size).is_some_and(|mut held| held.any(matches)),
            };
            if !allowed {
                let problem = node.unreadable.get(&index);
                self.differ(path, || {
                    let found = problem.map_or_else(
                        || pattern::describe(&content.bytes()[..visible]),
                        |problem| format!("unreadable: {problem}"),
                    );
                    let expected = page.map_or_else(
                        || "zeros".to_owned(),
                        |page| {
                            let candidates: Vec<_> = if exact {
                                vec![page.now()]
                            } else {
                                data.may_hold(index, size).into_iter().flatten().collect()
                            };
                            let texts = candidates
                                .iter()
                                .map(|content| pattern::describe(&content.bytes()[..visible]));
                            texts.collect::<Vec<_>>().join(" | or ")
                        },
                    );
                    format!("page {index} holds [{found}], allowed [{expected}]")
                });
                if self.done() {
                    return;
                }
            }
        }
    }
}

fn sizes_of(xattrs: &BTreeMap<String, Vec<u8>>) -> Vec<String> {
    xattrs.iter().map(|(name, value)| format!("{name} ({} bytes)", value.len())).collect()
}
