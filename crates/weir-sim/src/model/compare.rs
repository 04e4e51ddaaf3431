//! Comparison of a found volume with a state that the history allows.

use std::collections::BTreeMap;

use weir::FileType;

use super::data::FileData;
use super::found::{Found, FoundBody, FoundNode};
use super::{Body, Ino, Model, ROOT};
use crate::image::{BLOCK_BYTES, Block};
use crate::pattern;

/// How strict a comparison is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strictness {
    /// File contents and sizes must be what they are now, not what a crash may leave.
    pub exact: bool,
    /// What cannot be read is not held against the volume: only wrong answers are (a disk that rots).
    pub tolerate_unreadable: bool,
    /// Stop at the first difference: enough to reject a candidate.
    pub first_only: bool,
}

impl Strictness {
    /// After a crash.
    pub const CRASH: Self = Self { exact: false, tolerate_unreadable: false, first_only: true };
    /// A live or cleanly closed volume.
    pub const EXACT: Self = Self { exact: true, tolerate_unreadable: false, first_only: false };
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
            if !self.strictness.tolerate_unreadable {
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
                if self.found.problems.contains_key(&number) && self.strictness.tolerate_unreadable
                {
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
        if inode.mtime.is_some_and(|mtime| mtime != attr.mtime) {
            self.differ(path, || format!("mtime {:?}, expected {:?}", attr.mtime, inode.mtime));
        }
        if inode.atime.is_some_and(|atime| atime != attr.atime) {
            self.differ(path, || format!("atime {:?}, expected {:?}", attr.atime, inode.atime));
        }
        if attr.ctime < attr.btime {
            self.differ(path, || {
                format!("ctime {:?} is before birth {:?}", attr.ctime, attr.btime)
            });
        }
        if inode.xattrs != node.xattrs {
            self.differ(path, || {
                let found: Vec<String> = sizes_of(&node.xattrs);
                let expected: Vec<String> = sizes_of(&inode.xattrs);
                format!("extended attributes {found:?}, expected {expected:?} (or values differ)")
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
        let page_bytes = BLOCK_BYTES as u64;
        let indices: std::collections::BTreeSet<u64> =
            found.keys().chain(data.pages.keys()).copied().collect();
        for index in indices.into_iter().take_while(|index| index * page_bytes < size) {
            if self.strictness.tolerate_unreadable && node.unreadable.contains_key(&index) {
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
