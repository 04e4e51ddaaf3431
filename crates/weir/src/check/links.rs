//! The references between inodes: names, link counts, parents, orphans. One small record for each
//! inode is all that is kept of the tree.

use super::report::{Findings, Place, ProblemKind};
use crate::Volume;
use crate::format::item::InodeItem;
use crate::types::FileType;
use std::collections::BTreeMap;

/// What is known about an inode number, from its inode item and from what names it.
#[derive(Debug, Clone, Copy, Default)]
struct Record {
    /// `None`: no inode item was seen.
    file_type: Option<FileType>,
    /// Type that the first entry says it has.
    named_type: Option<FileType>,
    /// Entries disagree about the type.
    types_differ: bool,
    orphan: bool,
    /// Its inode item cannot be decoded: nothing is known.
    damaged: bool,
    mark: Mark,
    links: u32,
    /// Entries that name it.
    names: u32,
    /// The parent that a directory says it has.
    parent: u64,
    /// The directory of the last entry that names it.
    named_in: u64,
}

/// Whether a directory is connected to the root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Mark {
    #[default]
    Unknown,
    OnPath,
    Done,
}

/// All inode numbers that were seen.
#[derive(Default)]
pub(super) struct Inodes {
    records: BTreeMap<u64, Record>,
}

impl Inodes {
    fn record(&mut self, number: u64) -> &mut Record {
        self.records.entry(number).or_default()
    }

    /// An inode item.
    pub fn add_inode(&mut self, number: u64, item: &InodeItem) {
        let record = self.record(number);
        record.file_type = Some(item.file_type);
        record.links = item.links;
        record.parent = item.parent;
    }

    /// An inode item that could not be decoded: nothing more is said about it.
    pub fn add_damaged(&mut self, number: u64) {
        self.record(number).damaged = true;
    }

    /// An orphan entry.
    pub fn add_orphan(&mut self, number: u64) {
        self.record(number).orphan = true;
    }

    /// Whether an orphan entry names `number`. They all come before the inodes.
    pub fn is_orphan(&self, number: u64) -> bool {
        self.records.get(&number).is_some_and(|record| record.orphan)
    }

    /// A directory entry.
    pub fn add_name(&mut self, directory: u64, target: u64, file_type: FileType) {
        let record = self.record(target);
        record.names = record.names.saturating_add(1);
        record.named_in = directory;
        let first = *record.named_type.get_or_insert(file_type);
        record.types_differ |= first != file_type;
    }

    /// Compares everything with everything. With `complete` false, a part of the tree could not be read: what
    /// may only be missing is no problem then.
    pub fn check(&mut self, complete: bool, findings: &mut Findings) {
        for (&number, record) in &self.records {
            check_record(number, record, complete, findings);
        }
        if complete {
            if !self.records.contains_key(&Volume::ROOT) {
                findings.add(ProblemKind::Unreachable, Place::Inode(Volume::ROOT), || {
                    "there is no root directory".to_owned()
                });
            }
            self.check_cycles(findings);
        }
    }

    /// Climbs from every directory towards the root, each step once.
    fn check_cycles(&mut self, findings: &mut Findings) {
        let numbers: Vec<u64> = self
            .records
            .iter()
            .filter(|(_, record)| record.file_type == Some(FileType::Directory))
            .map(|(number, _)| *number)
            .collect();
        let mut path = Vec::new();
        for start in numbers {
            let mut at = start;
            while let Some(record) = self.records.get_mut(&at) {
                if record.file_type != Some(FileType::Directory) || record.mark == Mark::Done {
                    break;
                }
                if record.mark == Mark::OnPath {
                    findings.add(ProblemKind::Cycle, Place::Inode(at), || {
                        format!("directory {at} contains itself")
                    });
                    break;
                }
                record.mark = Mark::OnPath;
                path.push(at);
                if record.names == 0 {
                    break;
                }
                at = record.named_in;
            }
            for number in path.drain(..) {
                self.record(number).mark = Mark::Done;
            }
        }
    }
}

fn check_record(number: u64, record: &Record, complete: bool, findings: &mut Findings) {
    let place = Place::Inode(number);
    if record.damaged {
        return;
    }
    let Some(file_type) = record.file_type else {
        if complete && record.names > 0 {
            findings.add(ProblemKind::DanglingEntry, place, || {
                format!("directory {} has an entry for it, but it does not exist", record.named_in)
            });
        }
        if complete && record.orphan {
            findings.add(ProblemKind::Orphan, place, || "an orphan that does not exist".to_owned());
        }
        return;
    };
    if record.types_differ || record.named_type.is_some_and(|named| named != file_type) {
        findings.add(ProblemKind::EntryType, place, || {
            format!("is a {file_type:?}, an entry in directory {} says otherwise", record.named_in)
        });
    }
    if record.orphan && record.links > 0 && file_type != FileType::Regular {
        findings.add(ProblemKind::Orphan, place, || {
            format!("a {file_type:?} with {} links is on the orphan list", record.links)
        });
    }
    if complete && record.links == 0 && !record.orphan {
        findings.add(ProblemKind::Orphan, place, || {
            "has no links and is not on the orphan list".to_owned()
        });
    }
    if file_type == FileType::Directory {
        check_directory(number, record, complete, findings);
    } else if record.names != record.links && (complete || record.names > record.links) {
        let kind =
            if record.names == 0 { ProblemKind::Unreachable } else { ProblemKind::LinkCount };
        findings.add(kind, place, || {
            format!("link count {}, but {} names", record.links, record.names)
        });
    }
}

/// A directory has one name, in its parent; the root has none.
fn check_directory(number: u64, record: &Record, complete: bool, findings: &mut Findings) {
    let place = Place::Inode(number);
    let wanted = u32::from(number != Volume::ROOT && record.links > 0);
    if record.names != wanted && (complete || record.names > wanted) {
        let kind =
            if record.names == 0 { ProblemKind::Unreachable } else { ProblemKind::LinkCount };
        findings.add(kind, place, || {
            format!("a directory with {} names, it must have {wanted}", record.names)
        });
    }
    let actual = if number == Volume::ROOT { Volume::ROOT } else { record.named_in };
    if record.parent != actual && (number == Volume::ROOT || record.names == 1) {
        findings.add(ProblemKind::Parent, place, || {
            format!("is in directory {actual}, and says that it is in {}", record.parent)
        });
    }
}
