//! Opening and closing files.

use std::sync::atomic::Ordering;

use weir::SetAttr;

use super::{WeirFs, is_privileged};
use crate::ops::{Caller, FileSystemOps, Handle, OpResult, Open};
use crate::tables::OpenFile;

impl WeirFs {
    fn open_file(&self, ino: u64, how: Open, is_new: bool) -> OpResult<Handle> {
        let file = self.check(self.volume.open_inode(ino, how.write || how.truncate))?;
        let facts = self.inodes.facts(ino);
        Ok(self.handles.insert(OpenFile::new(file, facts, how, is_new)))
    }

    /// As [`FileSystemOps::open`].
    pub(super) fn open_as(
        &self,
        caller: Caller,
        ino: u64,
        open: Open,
        is_new: bool,
    ) -> OpResult<Handle> {
        let handle = self.open_file(ino, open, is_new || open.truncate)?;
        // What was just made is empty, and keeps the mode that it was made with.
        if open.truncate && !is_new {
            let change = SetAttr { size_bytes: Some(0), ..SetAttr::default() };
            let facts = self.inodes.facts(ino);
            let ended = self.end_privileges(ino, &facts, !is_privileged(caller));
            if let Err(error) = ended.and_then(|()| self.setattr(caller, ino, &change)) {
                self.handles.remove(handle);
                return Err(error);
            }
        }
        Ok(handle)
    }

    /// Leaves new files to background writeback once others were closed after them.
    pub(super) fn hand_over_closed(&self, open: &OpenFile) {
        let bytes = open.unsynced_bytes.load(Ordering::Relaxed);
        if !open.is_new || bytes == 0 {
            return;
        }
        for ino in self.closed.add(open.file.ino(), bytes) {
            // One that the kernel has forgotten is gone, or not in memory any more: not worth a look at the disk.
            if self.inodes.knows(ino)
                && let Ok(file) = self.volume.open_inode(ino, true)
            {
                // It can only fail where nothing may be written any more; whoever syncs hears of that.
                let _ = file.expire(0..u64::MAX);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Weak};

    use weir::device::Device;
    use weir::device::memory::MemoryDevice;
    use weir::sync::Mutex;
    use weir::{
        AllocateMode, Attr, BackgroundMode, BackgroundWork, CreateOptions, FileType, Volume,
        VolumeOptions,
    };

    use super::*;
    use crate::errno::Errno;
    use crate::ops::{KernelCache, Make, SyncTarget, WriteMode};

    const CALLER: Caller = Caller { uid: 0, gid: 0 };
    const PIECE_BYTES: usize = 1 << 20;

    fn fs() -> WeirFs {
        let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(256 << 20));
        Volume::format_device(&device, &CreateOptions::default()).unwrap();
        let options =
            VolumeOptions { background: BackgroundMode::Manual, ..VolumeOptions::default() };
        WeirFs::new(Volume::open_device(device, options).unwrap(), true, Box::new(|_| {})).unwrap()
    }

    /// Opens `name`, which is made if it is not there, writes a piece, and closes it.
    fn write(fs: &WeirFs, name: &str, sync: bool) {
        let new = Make { file_type: FileType::Regular, permissions: 0o644, umask: 0, rdev: 0 };
        let open = Open { write: true, ..Open::default() };
        let made = fs.create(CALLER, Volume::ROOT, name.as_bytes(), &new, open, false);
        let (_, handle) = made.unwrap();
        fs.write(handle, 0, &vec![7; PIECE_BYTES], WriteMode::default()).unwrap();
        if sync {
            fs.sync(&SyncTarget::File { handle, range: 0..u64::MAX, data_only: false }).unwrap();
        }
        fs.release(handle);
    }

    /// Pages that background writeback has been handed so far.
    fn handed_over(fs: &WeirFs) -> u64 {
        while fs.volume().background_step(BackgroundWork::Writeback).unwrap() {}
        fs.volume().stats().handed_over_pages
    }

    #[test]
    fn a_new_file_is_handed_to_writeback_when_others_were_closed_after_it() {
        let fs = fs();
        for number in 0..4 {
            write(&fs, &format!("file {number}"), false);
        }
        // The first comes with the fifth.
        write(&fs, "file 4", false);
        assert_eq!(handed_over(&fs), PIECE_BYTES as u64 / 4096);
        fs.close().unwrap();
    }

    #[test]
    fn what_is_not_new_or_was_synced_is_left_alone() {
        let fs = fs();
        for number in 0..8 {
            write(&fs, &format!("file {number}"), true);
        }
        for number in 0..8 {
            write(&fs, &format!("file {number}"), false);
        }
        let step = fs.closed.add(Volume::ROOT, 0);
        assert!(step.is_empty(), "{step:?} were queued");
        fs.close().unwrap();
    }

    /// Which files a kernel was told to look at again.
    #[derive(Default)]
    struct Told(Mutex<Vec<u64>>, Mutex<Vec<u64>>);

    impl KernelCache for Told {
        fn attributes_changed(&self, ino: u64) {
            self.1.lock().push(ino);
        }
        fn content_changed(&self, ino: u64) {
            self.0.lock().push(ino);
        }
        fn name_changed(&self, _: u64, _: &[u8]) {}
        fn forget(&self, _: &[u64]) -> bool {
            false
        }
    }

    #[test]
    fn after_a_failed_allocation_the_kernel_knows_nothing_of_the_file() {
        let (fs, kernel) = (fs(), Arc::new(Told::default()));
        let told: Weak<Told> = Arc::downgrade(&kernel);
        fs.mounted(told);
        let new = Make { file_type: FileType::Regular, permissions: 0o644, umask: 0, rdev: 0 };
        let open = Open { write: true, ..Open::default() };
        let (attr, handle) = fs.create(CALLER, Volume::ROOT, b"f", &new, open, false).unwrap();
        fs.allocate(CALLER, handle, AllocateMode::Extend, 0, 4096).unwrap();
        assert!(kernel.0.lock().is_empty());
        let failed = fs.allocate(CALLER, handle, AllocateMode::ZeroRange, 0, 1 << 40);
        assert_eq!(failed.map_err(Errno::raw), Err(libc::ENOSPC));
        assert_eq!(*kernel.0.lock(), [attr.ino]);
        fs.release(handle);
        fs.close().unwrap();
    }

    #[test]
    fn a_file_that_was_removed_meanwhile_is_not_missed() {
        let fs = fs();
        for number in 0..8 {
            let name = format!("file {number}");
            write(&fs, &name, false);
            let ino = fs.lookup(Volume::ROOT, name.as_bytes()).unwrap().ino;
            fs.unlink(Volume::ROOT, name.as_bytes()).unwrap();
            fs.forget(ino, 2);
        }
        assert_eq!(handed_over(&fs), 0);
        fs.close().unwrap();
    }

    /// What it is called, and itself, with the inode it shows.
    type Answer<'a> = (&'a str, &'a dyn Fn() -> u64);

    #[test]
    fn every_answer_that_shows_an_inode_is_one_reference_to_it_and_no_other_is() {
        let fs = fs();
        let new = |file_type| Make { file_type, permissions: 0o644, umask: 0, rdev: 0 };
        let file = new(FileType::Regular);
        let open = Open { write: true, ..Open::default() };
        let known = || fs.in_use().0 - 1;
        let ino = fs.make(CALLER, Volume::ROOT, b"f", &file).unwrap().ino;
        fs.forget(ino, 1);
        assert_eq!(known(), 0);
        let closed = |(attr, handle): (Attr, Handle)| {
            fs.release(handle);
            attr.ino
        };
        let answers: [Answer<'_>; 6] = [
            ("lookup", &|| fs.lookup(Volume::ROOT, b"f").unwrap().ino),
            ("link", &|| fs.link(ino, Volume::ROOT, b"l").unwrap().ino),
            ("symlink", &|| fs.symlink(CALLER, Volume::ROOT, b"s", b"f").unwrap().ino),
            ("create", &|| {
                closed(fs.create(CALLER, Volume::ROOT, b"f", &file, open, false).unwrap())
            }),
            ("tmpfile", &|| closed(fs.tmpfile(CALLER, Volume::ROOT, &file).unwrap())),
            ("directory", &|| {
                fs.make(CALLER, Volume::ROOT, b"d", &new(FileType::Directory)).unwrap().ino
            }),
        ];
        for (what, answer) in answers {
            let shown = answer();
            assert_eq!(known(), 1, "{what}");
            fs.forget(shown, 1);
            assert_eq!(known(), 0, "{what}");
        }
        for (flags, exclusive) in [(open, true), (open, false)] {
            let refused = fs.create(CALLER, Volume::ROOT, b"d", &file, flags, exclusive);
            assert!(refused.is_err());
            assert_eq!(known(), 0, "what could not be opened");
        }
        // The first that does not fit is not looked at again before the next request.
        let mut taken = Vec::new();
        fs.readdir_plus(Volume::ROOT, 2, &mut |entry, _| {
            let fits = taken.len() < 2;
            fits.then(|| taken.push(entry.ino)).is_some()
        })
        .unwrap();
        for ino in &taken {
            fs.forget(*ino, 1);
        }
        assert_eq!((taken.len(), known()), (2, 0), "an entry that did not fit");
        fs.close().unwrap();
    }

    #[test]
    fn a_file_that_is_found_and_emptied_is_answered_as_an_empty_one() {
        let fs = fs();
        let new = Make { file_type: FileType::Regular, permissions: 0o644, umask: 0, rdev: 0 };
        let open = Open { write: true, ..Open::default() };
        let (made, handle) = fs.create(CALLER, Volume::ROOT, b"f", &new, open, true).unwrap();
        fs.write(handle, 0, &[1; 5000], WriteMode::default()).unwrap();
        let emptied = Open { truncate: true, ..open };
        let (attr, again) = fs.create(CALLER, Volume::ROOT, b"f", &new, emptied, false).unwrap();
        assert_eq!((attr.ino, attr.size_bytes, attr.blocks), (made.ino, 0, 0));
        assert_eq!(fs.getattr(made.ino).unwrap(), attr);
        fs.release(handle);
        fs.release(again);
    }

    #[test]
    fn the_kernel_hears_of_the_end_of_privileges_and_a_new_file_has_all_that_it_was_made_with() {
        let (fs, kernel) = (fs(), Arc::new(Told::default()));
        let told: Weak<Told> = Arc::downgrade(&kernel);
        fs.mounted(told);
        let anybody = Caller { uid: 1000, gid: 1000 };
        let new = Make { file_type: FileType::Regular, permissions: 0o6755, umask: 0, rdev: 0 };
        let emptied = Open { write: true, truncate: true, ..Open::default() };
        let create = |caller| {
            let (attr, handle) = fs.create(caller, Volume::ROOT, b"f", &new, emptied, false)?;
            fs.release(handle);
            Ok::<_, Errno>(attr.ino)
        };
        let ino = create(anybody).unwrap();
        assert_eq!(fs.getattr(ino).unwrap().permissions, 0o6755);
        create(CALLER).unwrap();
        assert_eq!(fs.getattr(ino).unwrap().permissions, 0o6755);
        assert!(kernel.1.lock().is_empty());
        create(anybody).unwrap();
        assert_eq!(fs.getattr(ino).unwrap().permissions, 0o755);
        assert_eq!(*kernel.1.lock(), [ino]);
        let privileged = SetAttr { permissions: Some(0o4755), ..SetAttr::default() };
        fs.setattr(CALLER, ino, &privileged).unwrap();
        let handle = fs.open(anybody, ino, Open { write: true, ..Open::default() }).unwrap();
        for _ in 0..2 {
            let mode = WriteMode { kill_suid_sgid: true, ..WriteMode::default() };
            fs.write(handle, 0, b"x", mode).unwrap();
        }
        assert_eq!(fs.getattr(ino).unwrap().permissions, 0o755);
        assert_eq!(*kernel.1.lock(), [ino, ino]);
        fs.release(handle);
    }
}
