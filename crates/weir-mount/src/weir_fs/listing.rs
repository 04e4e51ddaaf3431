//! Listing directories.

use weir::{Attr, DirEntry, Error, FileType};

use super::WeirFs;
use crate::ops::{FileSystemOps, OpResult, Visit, VisitPlus};

/// Cookies of `.` and `..`; the engine's are larger.
const COOKIE_DOT: u64 = 1;
const COOKIE_DOT_DOT: u64 = 2;
/// Entries fetched at once for `readdir_plus`: the engine is not called from its own visitor.
const PLUS_BATCH: usize = 64;

fn engine_cookie(cookie: u64) -> u64 {
    if cookie <= COOKIE_DOT_DOT { 0 } else { cookie }
}

impl WeirFs {
    fn dots(&self, dir: u64, cookie: u64, visit: Visit<'_>) -> OpResult<bool> {
        let dot = |name: &[u8], ino, cookie| DirEntry {
            name: name.to_vec(),
            ino,
            file_type: FileType::Directory,
            cookie,
        };
        if cookie < COOKIE_DOT && !visit(&dot(b".", dir, COOKIE_DOT)) {
            return Ok(false);
        }
        if cookie < COOKIE_DOT_DOT {
            let parent = self.check(self.volume.parent(dir))?;
            return Ok(visit(&dot(b"..", parent, COOKIE_DOT_DOT)));
        }
        Ok(true)
    }

    /// As [`FileSystemOps::readdir`].
    pub(super) fn list(&self, dir: u64, cookie: u64, visit: Visit<'_>) -> OpResult<()> {
        if !self.dots(dir, cookie, visit)? {
            return Ok(());
        }
        let mut taken_any = cookie < COOKIE_DOT_DOT;
        let listed = self.volume.readdir(dir, engine_cookie(cookie), &mut |entry| {
            let taken = visit(&entry);
            taken_any |= taken;
            taken
        });
        listed.or_else(|error| self.meets(error, taken_any))
    }

    /// The end of an answer by an error. The kernel takes, and counts, none of the entries of an answer that is one: where there are some,
    /// they are the answer, and the request for the next one meets the error again.
    fn meets(&self, error: Error, taken_any: bool) -> OpResult<()> {
        if taken_any { Ok(()) } else { Err(self.fail(error)) }
    }

    /// The attributes of an inode that the kernel will know.
    fn acquired(&self, ino: u64) -> weir::Result<Attr> {
        self.acquire(ino)?;
        self.volume.getattr(ino).inspect_err(|_| self.forget(ino, 1))
    }

    /// As [`FileSystemOps::readdir_plus`].
    pub(super) fn list_plus(&self, dir: u64, cookie: u64, visit: VisitPlus<'_>) -> OpResult<()> {
        let own = self.check(self.volume.getattr(dir))?;
        if !self.dots(dir, cookie, &mut |entry| {
            // The kernel takes nothing from the attributes of these two but their type.
            visit(entry, Ok(&Attr { ino: entry.ino, ..own.clone() }))
        })? {
            return Ok(());
        }
        let mut after = engine_cookie(cookie);
        let mut batch: Vec<DirEntry> = Vec::with_capacity(PLUS_BATCH);
        let mut taken_any = cookie < COOKIE_DOT_DOT;
        loop {
            let collected = self.volume.readdir(dir, after, &mut |entry| {
                batch.push(entry);
                batch.len() < PLUS_BATCH
            });
            let full = batch.len() == PLUS_BATCH;
            for entry in batch.drain(..) {
                after = entry.cookie;
                let taken = match self.acquired(entry.ino) {
                    // An entry that was removed meanwhile is left out.
                    Err(Error::NotFound) => continue,
                    // Its name can be read, and what comes behind it: whoever asks for more of it hears what is wrong.
                    Err(error) => visit(&entry, Err(self.fail(error))),
                    Ok(attr) => {
                        let taken = visit(&entry, Ok(&attr));
                        if !taken {
                            self.forget(entry.ino, 1);
                        }
                        taken
                    }
                };
                if !taken {
                    return Ok(());
                }
                taken_any = true;
            }
            if let Err(error) = collected {
                return self.meets(error, taken_any);
            }
            if !full {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use weir::device::memory::MemoryDevice;
    use weir::device::{Device, DeviceError, DeviceInfo, DeviceResult, IoClass, OnDone, Request};
    use weir::{BackgroundMode, CreateOptions, Volume, VolumeOptions};

    use super::*;
    use crate::errno::Errno;
    use crate::ops::{Caller, Make};

    const FILES: usize = 400;

    /// A device that can be told to read nothing.
    struct Unreadable {
        below: MemoryDevice,
        is_bad: AtomicBool,
    }

    impl Device for Unreadable {
        fn info(&self) -> DeviceInfo {
            self.below.info()
        }
        fn read(
            &self,
            offset_bytes: u64,
            to: &mut [&mut [u8]],
            class: IoClass,
        ) -> DeviceResult<()> {
            if self.is_bad.load(Ordering::Relaxed) {
                let reason = "a bad sector".to_owned();
                let (operation, length_bytes, no_space) = ("read", 0, false);
                return Err(DeviceError {
                    operation,
                    offset_bytes,
                    length_bytes,
                    reason,
                    no_space,
                });
            }
            self.below.read(offset_bytes, to, class)
        }
        fn write(&self, at: u64, from: &[&[u8]], class: IoClass, fua: bool) -> DeviceResult<()> {
            self.below.write(at, from, class, fua)
        }
        fn flush(&self) -> DeviceResult<()> {
            self.below.flush()
        }
        fn discard(&self, offset_bytes: u64, length_bytes: u64) -> DeviceResult<()> {
            self.below.discard(offset_bytes, length_bytes)
        }
        fn submit(&self, request: Request, on_done: OnDone) {
            self.below.submit(request, on_done);
        }
    }

    #[test]
    fn an_entry_whose_inode_cannot_be_read_is_listed_by_its_name_and_nothing_is_held_for_it() {
        let device = Arc::new(Unreadable {
            below: MemoryDevice::new(64 << 20),
            is_bad: AtomicBool::new(false),
        });
        let below: Arc<dyn Device> = Arc::clone(&device) as _;
        Volume::format_device(&below, &CreateOptions::default()).unwrap();
        let open = || {
            let background = BackgroundMode::Manual;
            let options = VolumeOptions { background, ..VolumeOptions::default() };
            let volume = Volume::open_device(Arc::clone(&below), options).unwrap();
            WeirFs::new(volume, true, Box::new(|_| {})).unwrap()
        };
        let fs = open();
        // The names fill more than one node of the tree, and so the inodes are in others.
        let name = |number: usize| format!("{number:0200}").into_bytes();
        let new = Make { file_type: FileType::Regular, permissions: 0o644, umask: 0, rdev: 0 };
        for number in 0..FILES {
            fs.make(Caller { uid: 0, gid: 0 }, Volume::ROOT, &name(number), &new).unwrap();
        }
        fs.close().unwrap();

        let fs = open();
        fs.readdir(Volume::ROOT, 0, &mut |_| true).unwrap();
        // Of the first files the kernel knows more than their names.
        let known = (0..20).map(|number| fs.lookup(Volume::ROOT, &name(number)));
        let mut references: Vec<u64> = known.map(|attr| attr.unwrap().ino).collect();
        let (mut cookie, mut seen, mut unread) = (0, 0, 0);
        device.is_bad.store(true, Ordering::Relaxed);
        loop {
            let before = seen;
            fs.readdir_plus(Volume::ROOT, cookie, &mut |entry, attr| {
                (cookie, seen) = (entry.cookie, seen + 1);
                match attr {
                    // As the kernel counts them.
                    Ok(attr) if attr.ino != Volume::ROOT => references.push(entry.ino),
                    Ok(_) => {}
                    Err(error) => {
                        assert_eq!(error, Errno::EIO);
                        unread += 1;
                    }
                }
                true
            })
            .unwrap();
            if seen == before {
                break;
            }
        }
        assert!(seen == FILES + 2 && unread > 0, "{seen}, {unread}");
        device.is_bad.store(false, Ordering::Relaxed);
        for ino in references {
            fs.forget(ino, 1);
        }
        assert_eq!(fs.in_use().0, 1, "what the kernel has forgotten is held");
        fs.close().unwrap();
    }
}
