//! A volume that is shut down amid a call: the call has happened or it has not, for whoever goes on reading.

use crate::device::Device;
use crate::device::memory::MemoryDevice;
use crate::sync::{Arc, Turn, take_turns};
use crate::{
    AllocateMode, Attr, BackgroundMode, BackgroundWork, CreateOptions, Error, File, FileType,
    NewInode, OpenFlags, RenameMode, Result, SetAttr, SyncKind, Volume, VolumeOptions, XattrMode,
};
use std::cell::RefCell;

const PAGE: u64 = 4096;
const ROOT: u64 = Volume::ROOT;
/// More locks than any of the calls takes.
const MOST_LOCKS: u32 = 500;

thread_local! {
    /// What is to be shut down, and before which of the calling thread's locks.
    static PLAN: RefCell<Option<(File, u32)>> = const { RefCell::new(None) };
}

fn come_to(turn: Turn) {
    assert_eq!(turn, Turn::Locks, "nobody has what it wants");
    match PLAN.take() {
        Some((file, 0)) => file.engine().shut_down("on purpose"),
        Some((file, locks)) => PLAN.set(Some((file, locks - 1))),
        None => {}
    }
}

fn volume() -> (Volume, File) {
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(32 << 20));
    Volume::format_device(&device, &CreateOptions::default()).expect("format");
    let background = BackgroundMode::Manual;
    let options = VolumeOptions { background, memory_bytes: Some(4 << 20), ..Default::default() };
    let volume = Volume::open_device(device, options).expect("open");
    let file = volume.open_file("/file", OpenFlags::CREATE).expect("create");
    for page in [0, 1, 2, 3, 5, 7] {
        file.write_at(page * PAGE, &[page as u8 + 1; PAGE as usize]).expect("write");
    }
    volume.setxattr(file.ino(), b"user.old", b"1", XattrMode::Set).expect("attribute");
    volume.open_file("/other", OpenFlags::CREATE).expect("create").append(b"other").expect("write");
    volume.create_dir("/dir", 0o755).expect("make");
    volume.create_dir("/empty", 0o755).expect("make");
    volume.open_file("/dir/inner", OpenFlags::CREATE).expect("create");
    volume.symlink_path("file", "/link").expect("link");
    volume.sync().expect("sync");
    // Some of it is dirty.
    file.write_at(2 * PAGE + 7, &[9; 2 * PAGE as usize]).expect("write");
    (volume, file)
}

/// One thing with a name: its attributes but for times, its content, its extended attributes.
type Seen = (Vec<u8>, Attr, Vec<u8>, Vec<(Vec<u8>, Vec<u8>)>);

/// Everything there is to see, but for times.
fn look(volume: &Volume, file: &File) -> Vec<Seen> {
    let mut seen = vec![look_at(volume, b"open file", file.ino())];
    for dir in ["/", "/dir", "/moved"] {
        let Ok(mut entries) = volume.read_dir(dir) else { continue };
        entries.sort_by(|one, other| one.name.cmp(&other.name));
        for entry in entries {
            let name = [dir.as_bytes(), b"/", &entry.name].concat();
            seen.push(look_at(volume, &name, entry.ino));
        }
    }
    seen
}

fn look_at(volume: &Volume, name: &[u8], ino: u64) -> Seen {
    let mut attr = volume.getattr(ino).expect("attributes");
    let zero = crate::Timestamp::default();
    (attr.atime, attr.mtime, attr.ctime, attr.btime) = (zero, zero, zero, zero);
    attr.change_counter = 0;
    let content = match attr.file_type {
        FileType::Regular => {
            let mut bytes = vec![0; attr.size_bytes as usize];
            let file = volume.open_inode(ino, false).expect("open");
            assert_eq!(file.read_at(0, &mut bytes), Ok(bytes.len()));
            bytes
        }
        FileType::Symlink => volume.readlink(ino).expect("target"),
        _ => Vec::new(),
    };
    let names = volume.listxattr(ino).expect("attributes");
    let value = |name: &Vec<u8>| volume.getxattr(ino, name).expect("value");
    let xattrs = names.iter().map(|name| (name.clone(), value(name))).collect();
    (name.to_vec(), attr, content, xattrs)
}

/// Makes `call` with the volume shut down before each of its locks.
fn is_whole_or_not_at_all(what: &str, call: impl Fn(&Volume, &File) -> Result<()>) {
    is_whole_or_not_at_all_on(&volume, what, call);
}

/// The same with volumes that `make` makes.
fn is_whole_or_not_at_all_on(
    make: &dyn Fn() -> (Volume, File),
    what: &str,
    call: impl Fn(&Volume, &File) -> Result<()>,
) {
    let mut refused = 0;
    for locks in 0..MOST_LOCKS {
        let (volume, file) = make();
        let before = look(&volume, &file);
        PLAN.set(Some((file.clone(), locks)));
        take_turns(Some(come_to));
        let called = call(&volume, &file);
        take_turns(None);
        let is_over = PLAN.take().is_some();
        let after = look(&volume, &file);
        match called {
            Err(Error::Shutdown(_)) => {
                refused += 1;
                assert!(after == before, "{what}: refused at lock {locks}, but it has happened");
            }
            called => {
                called.expect("no other error");
                let (volume, file) = make();
                call(&volume, &file).expect("nothing stands against it");
                let expected = look(&volume, &file);
                assert!(after == expected, "{what}: shut down at lock {locks}, done in part");
            }
        }
        if is_over {
            assert!(refused > 0, "{what} was never refused");
            return;
        }
    }
    panic!("{what} takes too many locks");
}

#[test]
fn a_size_is_set_or_not_when_the_volume_is_shut_down_amid_it() {
    for size in [0, 100, PAGE, 2 * PAGE + 100, 5 * PAGE, 8 * PAGE, 8 * PAGE + 1, 20 * PAGE] {
        is_whole_or_not_at_all(&format!("size {size}"), |_, file| file.truncate(size));
    }
    is_whole_or_not_at_all("size and mode", |volume, file| {
        let change = SetAttr { permissions: Some(0o600), ..SetAttr::default() };
        volume.setattr(file.ino(), &change).map(drop)
    });
}

#[test]
fn a_range_changes_or_not_when_the_volume_is_shut_down_amid_it() {
    use AllocateMode::{CollapseRange, InsertRange, KeepSize, PunchHole};
    // Extents are moved when all is home, which gives blocks to what is dirty.
    let settled = || {
        let (volume, file) = volume();
        while volume.background_step(BackgroundWork::Writeback).expect("writeback") {}
        (volume, file)
    };
    // Zeroing a range is two operations, a hole and its allocation; extending a file too, an allocation and a new size.
    for (mode, first, length) in [
        (PunchHole, PAGE + 5, 3 * PAGE),
        (PunchHole, 10, 100),
        (CollapseRange, PAGE, 2 * PAGE),
        (InsertRange, 2 * PAGE, 3 * PAGE),
        (KeepSize, 4 * PAGE, 9 * PAGE),
    ] {
        let what = format!("{mode:?} at {first}");
        let make: &dyn Fn() -> _ = match mode {
            CollapseRange | InsertRange => &settled,
            _ => &volume,
        };
        is_whole_or_not_at_all_on(make, &what, |_, file| file.allocate(mode, first, length));
    }
}

#[test]
fn names_change_or_not_when_the_volume_is_shut_down_amid_it() {
    let new = NewInode::new(FileType::Regular, 0o644);
    is_whole_or_not_at_all("make", |volume, _| volume.make(ROOT, b"new", &new).map(drop));
    is_whole_or_not_at_all("make a directory", |volume, _| {
        volume.create_dir("/dir/new", 0o755).map(drop)
    });
    is_whole_or_not_at_all("symlink", |volume, _| volume.symlink_path("x", "/new").map(drop));
    is_whole_or_not_at_all("link", |volume, _| volume.link_path("/file", "/dir/new").map(drop));
    is_whole_or_not_at_all("unlink", |volume, _| volume.remove_file("/file"));
    is_whole_or_not_at_all("unlink a link", |volume, _| volume.remove_file("/link"));
    is_whole_or_not_at_all("rmdir", |volume, _| volume.remove_dir("/empty"));
    is_whole_or_not_at_all("rename", |volume, _| volume.rename_path("/dir", "/moved"));
    is_whole_or_not_at_all("rename over", |volume, _| volume.rename_path("/other", "/file"));
    is_whole_or_not_at_all("exchange", |volume, _| {
        let dir = volume.resolve("/dir", false)?;
        volume.rename(dir, b"inner", ROOT, b"file", RenameMode::Exchange)
    });
}

#[test]
fn attributes_change_or_not_when_the_volume_is_shut_down_amid_it() {
    is_whole_or_not_at_all("mode and owner", |volume, file| {
        let change = SetAttr { permissions: Some(0o600), uid: Some(7), ..SetAttr::default() };
        volume.setattr(file.ino(), &change).map(drop)
    });
    is_whole_or_not_at_all("setxattr", |volume, file| {
        volume.setxattr(file.ino(), b"user.new", b"2", XattrMode::Set)
    });
    is_whole_or_not_at_all("replace an attribute", |volume, file| {
        volume.setxattr(file.ino(), b"user.old", b"2", XattrMode::Set)
    });
    is_whole_or_not_at_all("removexattr", |volume, file| {
        volume.removexattr(file.ino(), b"user.old")
    });
}

#[test]
fn a_batch_happens_or_not_when_the_volume_is_shut_down_amid_it() {
    is_whole_or_not_at_all("batch", |volume, file| {
        let mut batch = volume.batch();
        batch.write_at(file, PAGE - 5, &[7; 10])?;
        batch.truncate(file, 6 * PAGE + 3)?;
        batch.rename(ROOT, b"other", ROOT, b"renamed", RenameMode::Replace)?;
        let made = batch.create_file(ROOT, b"new", &NewInode::new(FileType::Regular, 0o600))?;
        batch.write_inode(made, 0, b"new")?;
        batch.unlink(ROOT, b"link")?;
        batch.commit_relaxed()?;
        Ok(())
    });
}

/// What was written is in memory whatever becomes of the sync.
#[test]
fn a_sync_that_is_refused_changes_nothing_that_is_read() {
    for locks in 0..MOST_LOCKS {
        let (volume, file) = volume();
        let before = look(&volume, &file);
        PLAN.set(Some((file.clone(), locks)));
        take_turns(Some(come_to));
        let ticket = file.fsync_async(0..u64::MAX, SyncKind::Data);
        take_turns(None);
        let is_over = PLAN.take().is_some();
        drop(ticket);
        assert!(look(&volume, &file) == before, "at lock {locks}");
        if is_over {
            return;
        }
    }
    panic!("it takes too many locks");
}
