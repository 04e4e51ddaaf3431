//! Handles of the model: what is open, and how.

use super::{Errno, Ino, Model, errno};
use crate::op::Target;

/// An open handle, or a hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// Of this inode.
    pub ino: Ino,
    /// Writes are allowed.
    pub writes: bool,
    /// Each write is durable when it returns.
    pub syncs: bool,
}

impl Model {
    /// The file to write to.
    pub(super) fn file_to_write(&self, target: &Target) -> Result<Ino, Errno> {
        let ino = self.file(target)?;
        match target {
            Target::Slot(slot) if self.slots.get(slot).is_some_and(|slot| !slot.writes) => {
                Err(errno::EBADF)
            }
            _ => Ok(ino),
        }
    }

    pub(super) fn set_slot(&mut self, slot: u8, opened: Option<Slot>) {
        let old = match opened {
            Some(opened) => self.slots.insert(slot, opened),
            None => self.slots.remove(&slot),
        };
        if let Some(old) = old {
            self.drop_if_unused(old.ino);
        }
    }

    /// Closes every handle, as a crash or an unmount does.
    pub fn close_all(&mut self) {
        for slot in self.slots.keys().copied().collect::<Vec<_>>() {
            self.set_slot(slot, None);
        }
    }

    pub(super) fn drop_if_unused(&mut self, ino: Ino) {
        let is_nameless = self.inodes.get(&ino).is_some_and(|inode| inode.names == 0);
        if is_nameless && !self.slots.values().any(|open| open.ino == ino) {
            self.inodes.remove(&ino);
        }
    }
}
