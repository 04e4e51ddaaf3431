//! Whether the answers of one volume agree with each other, whatever is on it: what a directory lists with what is looked up in it, where a
//! file says that it has data with what is read there, and how many inodes there are with those that are found.

use weir::{Error, FileType};

use super::{EngineSession, found_attr};
use crate::image::BLOCK_BYTES;
use crate::model::found::{Found, FoundBody, FoundNode};

const PAGE_BYTES: u64 = BLOCK_BYTES as u64;

impl EngineSession {
    /// Answers that contradict each other, one line each.
    pub(super) fn disagreements(&self, found: &Found) -> Vec<String> {
        let mut lines = Vec::new();
        for (ino, node) in &found.nodes {
            match &node.body {
                FoundBody::Directory(_) => self.of_directory(found, (*ino, node), &mut lines),
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

    /// What a volume that was closed still promises, counts or keeps for somebody: nothing is dirty any more, and nobody is there. While it is
    /// open, what is never given back is missed by others, until nothing goes on.
    pub(super) fn still_held(&self) -> Option<String> {
        let stats = self.volume.stats();
        let log = &stats.log_fill;
        let held = [
            ("blocks promised", stats.space.reserved_blocks),
            ("blocks freed and not free", stats.space.pending_free_blocks),
            ("pages counted as dirty", stats.dirty_pages),
            ("dirty inodes", stats.dirty_inodes),
            ("pages owed by the log", stats.logged_pages),
            ("blocks of the log in use", log.used_blocks),
            ("blocks of the log queued", log.queued_blocks),
            ("blocks of the log let in", log.admitted_blocks),
            ("holders of log space", log.writers),
            ("blocks beside frames", log.companion_blocks),
            ("tickets", stats.tickets),
        ];
        let texts = held.iter().filter(|(_, count)| *count > 0);
        let texts: Vec<_> = texts.map(|(what, count)| format!("{count} {what}")).collect();
        (!texts.is_empty()).then(|| format!("after closing there are {}", texts.join(", ")))
    }

    fn of_directory(&self, found: &Found, (ino, node): (u64, &FoundNode), lines: &mut Vec<String>) {
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
                Ok(attr) if attr.ino == *child && attr.file_type == *file_type => {
                    let (mut seen, known) = (found_attr(&attr), found.nodes.get(child));
                    // It was read since.
                    seen.atime = known.map_or(seen.atime, |node| node.attr.atime);
                    if known.is_some_and(|node| node.attr != seen) {
                        lines.push(format!(
                            "{name:?} in directory {ino} is looked up as {seen:?}, it is {:?}",
                            known.map(|node| &node.attr)
                        ));
                    }
                }
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
