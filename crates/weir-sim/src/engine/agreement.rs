//! Whether the answers of one volume agree with each other, whatever is on it: what a directory lists with what is looked up in it, where a
//! file says that it has data with what is read there, and how many inodes there are with those that are found.

use weir::{Error, FileType};

use super::EngineSession;
use crate::image::BLOCK_BYTES;
use crate::model::found::{Found, FoundBody, FoundNode};

const PAGE_BYTES: u64 = BLOCK_BYTES as u64;

impl EngineSession {
    /// Answers that contradict each other, one line each.
    pub(super) fn disagreements(&self, found: &Found) -> Vec<String> {
        let mut lines = Vec::new();
        for (ino, node) in &found.nodes {
            match &node.body {
                FoundBody::Directory(_) => self.of_directory(*ino, node, &mut lines),
                FoundBody::File(_) => self.of_file(*ino, node, &mut lines),
                _ => {}
            }
        }
        // Later there may be such as have no name.
        let inodes = self.volume.statfs().inodes;
        if self.is_fresh && found.problems.is_empty() && inodes != found.nodes.len() as u64 {
            lines.push(format!("{inodes} inodes are in use, {} are found", found.nodes.len()));
        }
        lines
    }

    fn of_directory(&self, ino: u64, node: &FoundNode, lines: &mut Vec<String>) {
        let FoundBody::Directory(entries) = &node.body else { return };
        if node.attr.size != entries.len() as u64 {
            lines.push(format!(
                "directory {ino} says it has {} entries, it lists {}",
                node.attr.size,
                entries.len()
            ));
        }
        for (name, (child, file_type)) in entries {
            match self.volume.lookup(ino, name.as_bytes()) {
                Ok(attr) if attr.ino == *child && attr.file_type == *file_type => {}
                Ok(attr) => lines.push(format!(
                    "directory {ino} lists {name:?} as {child} ({file_type:?}), it is {} ({:?})",
                    attr.ino, attr.file_type
                )),
                Err(Error::Io(_) | Error::Corrupt(_)) => {}
                Err(error) => lines.push(format!("{name:?}, listed in directory {ino}: {error}")),
            }
            let above = || self.volume.lookup(*child, b"..").map(|attr| attr.ino);
            if *file_type == FileType::Directory
                && let Ok(above) = above()
                && above != ino
            {
                lines
                    .push(format!("directory {child} is in {ino}, and says that it is in {above}"));
            }
        }
    }

    /// Whatever is no zero lies where there is data; what cannot be read is no contradiction.
    fn of_file(&self, ino: u64, node: &FoundNode, lines: &mut Vec<String>) {
        let FoundBody::File(pages) = &node.body else { return };
        let Ok(file) = self.volume.open_inode(ino, false) else { return };
        let mut at = 0;
        for index in pages.keys() {
            let page = index * PAGE_BYTES;
            if page < at {
                continue;
            }
            match file.seek_data(page) {
                Ok(data) if data == page => {}
                Ok(data) => {
                    lines.push(format!(
                        "inode {ino}: page {index} holds data, the next is said to be at {data}"
                    ));
                }
                Err(Error::NoSuchExtent) => {
                    lines.push(format!(
                        "inode {ino}: page {index} holds data, there is said to be none"
                    ));
                }
                Err(_) => return,
            }
            match file.seek_hole(page) {
                Ok(hole) if hole > page && hole <= node.attr.size => at = hole,
                Ok(hole) => {
                    lines.push(format!("inode {ino}: the hole behind page {index} is at {hole}"));
                }
                Err(_) => return,
            }
        }
    }
}
