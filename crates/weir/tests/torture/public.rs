//! Threads that share names and files. What each of their calls may answer depends on the others; that it is an answer which this call can
//! give, that it comes, and that the volume is sound afterwards, does not.

use crate::Stage;
use crate::common::Random;
use crate::disk::Disk;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use weir::*;

const DIRECTORIES: u64 = 3;
const NAMES: u64 = 5;
const KIB: u64 = 1024;

pub struct Public<'a> {
    pub dice: Random,
    pub volume: &'a Volume,
    pub disk: &'a Arc<Disk>,
    pub stage: &'a Stage,
    /// Files that are open, whether they have names or not.
    pub open: Vec<File>,
    pub tickets: Vec<SyncTicket>,
}

/// What a call on names may answer that others change.
fn is_of_names(error: &Error) -> bool {
    matches!(
        error,
        Error::NotFound
            | Error::Exists
            | Error::NotDirectory
            | Error::IsDirectory
            | Error::NotEmpty
            | Error::NoAttribute
            | Error::NotPermitted
            | Error::Invalid(_)
            | Error::TooManySymlinks
    )
}

impl Public<'_> {
    pub fn work(mut self) -> Vec<SyncTicket> {
        while !self.stage.stop.load(Ordering::SeqCst) {
            if !self.step() {
                break;
            }
            self.stage.ops.fetch_add(1, Ordering::SeqCst);
        }
        self.stage.doing("lets go of its files");
        self.open.clear();
        self.tickets
    }

    fn below(&mut self, end: u64) -> u64 {
        self.dice.below(end)
    }

    fn dir(&mut self) -> String {
        format!("/pub/d{}", self.below(DIRECTORIES))
    }

    fn path(&mut self) -> String {
        let (dir, name) = (self.dir(), self.below(NAMES));
        // Some of the names are mostly directories.
        if name == 0 && self.below(2) == 0 {
            return format!("{dir}/n0/n{}", self.below(NAMES));
        }
        format!("{dir}/n{name}")
    }

    fn place(&mut self) -> (String, String) {
        let path = self.path();
        let (dir, name) = path.rsplit_once('/').expect("it has a directory");
        (dir.to_owned(), name.to_owned())
    }

    /// False: it is of no use to go on.
    fn step(&mut self) -> bool {
        let (what, result) = match self.below(30) {
            0..4 => self.open_one(),
            4..14 => self.use_one(),
            14..24 => self.change_names(),
            24..26 => self.batch(),
            _ => self.look(),
        };
        if self.open.len() > 6 {
            let victim = self.below(6) as usize;
            self.open.swap_remove(victim);
        }
        match result {
            _ if self.disk.core.is_dead() => false,
            Ok(()) | Err(Error::NoSpace) => true,
            Err(Error::Shutdown(_)) => false,
            Err(Error::Io(_) | Error::HostFull(_)) if self.disk.core.has_failed() => true,
            Err(ref error) if is_of_names(error) => true,
            Err(error) => panic!("{what}: {error}"),
        }
    }

    fn say(&self, text: &str) -> String {
        self.stage.doing(text);
        text.to_owned()
    }

    fn open_one(&mut self) -> (String, Result<()>) {
        let path = self.path();
        let data_sync = self.below(8) == 0;
        let truncate = self.below(8) == 0;
        let flags = OpenFlags { data_sync, truncate, ..OpenFlags::CREATE };
        let what = self.say(&format!("open {path}"));
        let opened = self.volume.open_file(path, flags);
        (what, opened.map(|file| self.open.push(file)))
    }

    fn use_one(&mut self) -> (String, Result<()>) {
        let count = self.open.len() as u64;
        if count == 0 {
            return self.open_one();
        }
        let file = self.open[self.dice.below(count) as usize].clone();
        let offset = self.below(200 * KIB);
        let most = if self.below(10) == 0 { 200 * KIB } else { 10 * KIB };
        let length = 1 + self.below(most);
        let data = vec![self.below(256) as u8; length as usize];
        let range = offset..offset + length;
        let kind = if self.below(2) == 0 { SyncKind::Full } else { SyncKind::Data };
        let aligned = (offset / 4096 * 4096, length.next_multiple_of(4096));
        let choice = self.below(18);
        let what = self.say(&format!("use {choice} of inode {}, {range:?}", file.ino()));
        let result = match choice {
            0..3 => file.write_at(offset, &data).map(drop),
            3..5 if file.size() < 300 * KIB => file.append(&data).map(drop),
            5 => file.truncate(offset),
            6 => file.fsync(),
            7 => file.fdatasync(),
            8 => file.fsync_async(range, kind).map(|ticket| self.tickets.push(ticket)),
            9 => file.sync_range(range, SyncRangeFlags::WRITE | SyncRangeFlags::WAIT_AFTER),
            10 => file.expire(range),
            11 => file.allocate(AllocateMode::PunchHole, offset, length),
            12 => file.allocate(AllocateMode::Extend, offset, length),
            13 => file.allocate(AllocateMode::CollapseRange, aligned.0, aligned.1),
            14 => file.allocate(AllocateMode::InsertRange, aligned.0, aligned.1),
            15 => file.allocate(AllocateMode::ZeroRange, offset, length),
            16 => file.barrier().map(drop),
            _ => {
                let mut bytes = data;
                file.read_at(offset, &mut bytes).map(drop)
            }
        };
        if self.tickets.len() > 20 {
            let ticket = self.tickets.remove(0);
            self.stage.doing("waits for a ticket");
            // Whatever it says.
            let _ = ticket.wait();
        }
        // As long as it gets through shifts, it gets too long by and by.
        if file.size() > 600 * KIB {
            self.stage.doing("cuts what has grown");
            let _ = file.truncate(0);
        }
        (what, result)
    }

    fn change_names(&mut self) -> (String, Result<()>) {
        let (path, other) = (self.path(), self.path());
        let choice = self.below(12);
        let what = self.say(&format!("names {choice}: {path}, {other}"));
        let volume = self.volume;
        let result = match choice {
            0 => volume.create_dir(&path, 0o755).map(drop),
            1 => volume.remove_dir(&path),
            2 | 3 => volume.remove_file(&path),
            4..7 => volume.rename_path(&path, &other),
            7 => self.rename(RenameMode::Exchange),
            8 => self.rename(RenameMode::Whiteout { uid: 0, gid: 0 }),
            9 => volume.link_path(&path, &other).map(drop),
            10 => volume.symlink_path(&other, &path).map(drop),
            _ => self.make_nameless(&path),
        };
        (what, result)
    }

    fn rename(&mut self, mode: RenameMode) -> Result<()> {
        let ((dir, name), (new_dir, new_name)) = (self.place(), self.place());
        let (from, to) = (self.volume.resolve(dir, true)?, self.volume.resolve(new_dir, true)?);
        self.volume.rename(from, name.as_bytes(), to, new_name.as_bytes(), mode)
    }

    fn make_nameless(&mut self, path: &str) -> Result<()> {
        let (dir, name) = path.rsplit_once('/').unwrap_or_default();
        let dir = self.volume.resolve(dir, true)?;
        let (attr, file) = self.volume.tmpfile(dir, &NewInode::new(FileType::Regular, 0o600))?;
        file.append(&[7; 5000])?;
        self.open.push(file);
        if self.below(2) == 0 {
            self.volume.link(attr.ino, dir, name.as_bytes())?;
        }
        Ok(())
    }

    fn batch(&mut self) -> (String, Result<()>) {
        let what = self.say("a batch");
        let result = self.commit();
        (what, result)
    }

    fn commit(&mut self) -> Result<()> {
        let mut batch = self.volume.batch();
        for _ in 0..=self.below(4) {
            let ((dir, name), (new_dir, new_name)) = (self.place(), self.place());
            let dir = self.volume.resolve(dir, true)?;
            let (name, new_name) = (name.as_bytes(), new_name.as_bytes());
            match self.below(5) {
                0 => {
                    let new = NewInode::new(FileType::Regular, 0o644);
                    let ino = batch.create_file(dir, name, &new)?;
                    batch.write_inode(ino, 0, &[1; 3000])?;
                }
                1 => batch.unlink(dir, name)?,
                2 => {
                    let to = self.volume.resolve(new_dir, true)?;
                    batch.rename(dir, name, to, new_name, RenameMode::Replace)?;
                }
                _ => {
                    let length = self.below(40 * KIB) as usize;
                    if let Some(file) = self.open.first() {
                        batch.write_at(file, 100, &vec![2; length])?;
                    }
                }
            }
        }
        self.stage.doing(&format!("commits {batch:?}"));
        match self.below(3) {
            0 => batch.commit().map(drop)?,
            1 => self.tickets.push(batch.commit_async()?),
            _ => batch.commit_relaxed().map(drop)?,
        }
        Ok(())
    }

    fn look(&mut self) -> (String, Result<()>) {
        let (path, dir) = (self.path(), self.dir());
        let choice = self.below(14);
        let what = self.say(&format!("looks {choice} at {path}"));
        let volume = self.volume;
        let set = |ino| volume.setxattr(ino, b"user.a", &[3; 700], XattrMode::Set);
        let change = SetAttr { permissions: Some(0o600), ..SetAttr::default() };
        let result = match choice {
            0..3 => volume.read_dir(&dir).map(drop),
            3 => volume.metadata(&path).map(drop),
            4 => volume.at_path(&path, true, set),
            5 => volume.at_path(&path, true, |ino| volume.removexattr(ino, b"user.a")),
            6 => volume.at_path(&path, true, |ino| volume.listxattr(ino)).map(drop),
            7 => volume.at_path(&path, true, |ino| volume.setattr(ino, &change)).map(drop),
            8 => volume.at_path(&dir, true, |ino| volume.fsync_dir(ino)),
            9 => volume.sync(),
            10 if self.below(3) == 0 => volume.checkpoint(),
            11 => volume.barrier().map(drop),
            12 => volume.sync_async().map(|ticket| self.tickets.push(ticket)),
            _ => {
                let (stats, space) = (volume.stats(), volume.statfs());
                assert!(space.free_blocks <= space.total_blocks, "{space:?}");
                assert!(stats.durable_lsn <= stats.last_lsn, "{stats:?}");
                Ok(())
            }
        };
        (what, result)
    }
}
