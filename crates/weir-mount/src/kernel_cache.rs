//! What the kernel remembers, through its notifications.
//!
//! What it does not remember (`ENOENT`) is as it should be, and where the connection is gone there is nothing to tell.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use fuser::INodeNo;

use crate::ops::KernelCache;

/// `FUSE_NOTIFY_PRUNE`, since Linux 6.18 (FUSE 7.45); `fuser` does not know it.
const NOTIFY_PRUNE: i32 = 9;
/// `struct fuse_out_header` and `struct fuse_notify_prune_out`, which the inodes follow.
const PRUNE_HEAD_BYTES: usize = 16 + 16;

/// See the module's head.
pub(crate) struct FuserKernelCache {
    notifier: fuser::Notifier,
    /// For notifications that `fuser` does not know.
    connection: Arc<OwnedFd>,
    keeps_sizes: bool,
}

impl FuserKernelCache {
    pub(crate) fn new(
        notifier: fuser::Notifier,
        connection: Arc<OwnedFd>,
        keeps_sizes: bool,
    ) -> Self {
        Self { notifier, connection, keeps_sizes }
    }
}

impl KernelCache for FuserKernelCache {
    fn attributes_changed(&self, ino: u64) {
        let _ = self.notifier.inval_inode(INodeNo(ino), -1, 0);
    }
    fn content_changed(&self, ino: u64) {
        let _ = self.notifier.inval_inode(INodeNo(ino), 0, 0);
    }
    fn name_changed(&self, dir: u64, name: &[u8]) {
        let _ = self.notifier.inval_entry(INodeNo(dir), OsStr::from_bytes(name));
    }
    fn forget(&self, inodes: &[u64]) -> bool {
        let Some(message) = prune_message(inodes) else { return false };
        // The kernel takes a notification whole or refuses it, with this error if it does not know what it is. Whatever else is
        // wrong, such as a lack of memory, may be over the next time.
        rustix::io::write(&self.connection, &message) != Err(rustix::io::Errno::INVAL)
    }
    fn grown(&self, ino: u64, size_bytes: u64, last: u8) {
        // Only what brings a byte moves the end.
        let _ = self.notifier.store(INodeNo(ino), size_bytes.saturating_sub(1), &[last]);
    }
    fn keeps_sizes(&self) -> bool {
        self.keeps_sizes
    }
}

/// Asks to forget `inodes`; `None` if they are more than a message can say.
fn prune_message(inodes: &[u64]) -> Option<Vec<u8>> {
    let count = u32::try_from(inodes.len()).ok()?;
    let length = u32::try_from(PRUNE_HEAD_BYTES + size_of_val(inodes)).ok()?;
    let mut message = Vec::with_capacity(length as usize);
    message.extend_from_slice(&length.to_ne_bytes());
    message.extend_from_slice(&NOTIFY_PRUNE.to_ne_bytes());
    // No request has this number: it is a notification.
    message.extend_from_slice(&0_u64.to_ne_bytes());
    message.extend_from_slice(&count.to_ne_bytes());
    // Padding, and a word kept for later.
    message.extend_from_slice(&[0; 12]);
    message.extend(inodes.iter().flat_map(|ino| ino.to_ne_bytes()));
    Some(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prune_message_is_laid_out_as_the_kernel_reads_it() {
        let message = prune_message(&[7, u64::MAX]).unwrap();
        assert_eq!(message.len(), PRUNE_HEAD_BYTES + 16);
        let word = |at: usize| u32::from_ne_bytes(message[at..at + 4].try_into().unwrap());
        let long = |at: usize| u64::from_ne_bytes(message[at..at + 8].try_into().unwrap());
        assert_eq!((word(0), word(4), long(8)), (48, 9, 0));
        assert_eq!((word(16), word(20), long(24)), (2, 0, 0));
        assert_eq!((long(32), long(40)), (7, u64::MAX));
    }
}
