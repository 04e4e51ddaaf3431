//! A batch of a workload as one of the engine: paths become inode numbers while it is recorded, also those of what
//! earlier parts of it make, move and remove.

use std::collections::BTreeMap;

use weir::{Batch, FileType, NewInode, RenameMode, SetAttr, SetTime, Volume};

use super::{EngineSession, Result};
use crate::model::errno;
use crate::op::{Op, Target};
use crate::pattern;
use crate::system::SystemError;

/// A name of a directory.
type Place = (u64, Vec<u8>);

/// The parts recorded so far.
pub struct Recorder<'a> {
    session: &'a EngineSession,
    batch: Batch,
    /// Names that the parts have changed, and what they stand for after them.
    names: BTreeMap<Place, Option<u64>>,
    /// Inodes that the parts make.
    made: Vec<u64>,
}

impl<'a> Recorder<'a> {
    /// Records `parts`.
    ///
    /// # Errors
    /// A part names what is not there, or the engine refuses it.
    pub fn record(session: &'a EngineSession, parts: &[Op]) -> Result<Batch> {
        let batch = session.volume.batch();
        let mut recorder = Self { session, batch, names: BTreeMap::new(), made: Vec::new() };
        for part in parts {
            recorder.part(part)?;
        }
        Ok(recorder.batch)
    }

    fn part(&mut self, part: &Op) -> Result<()> {
        match part {
            Op::Write { target, offset, length, tag } => {
                let data = pattern::bytes(*tag, *offset, *length);
                match self.file(target)? {
                    Ok(file) => self.batch.write_at(&file, *offset, &data)?,
                    Err(made) => self.batch.write_inode(made, *offset, &data)?,
                }
            }
            Op::Truncate { target, size } => match self.file(target)? {
                Ok(file) => self.batch.truncate(&file, *size)?,
                Err(made) => self.batch.truncate_inode(made, *size)?,
            },
            Op::Chmod { path, permissions } => {
                let change = SetAttr { permissions: Some(*permissions), ..SetAttr::default() };
                self.batch.setattr(self.number(path)?, &change)?;
            }
            Op::Chown { path, uid, gid } => {
                let change = SetAttr { uid: Some(*uid), gid: Some(*gid), ..SetAttr::default() };
                self.batch.setattr(self.number(path)?, &change)?;
            }
            Op::Utimens { path, atime, mtime } => {
                let (atime, mtime) = (Some(SetTime::At(*atime)), Some(SetTime::At(*mtime)));
                let change = SetAttr { atime, mtime, ..SetAttr::default() };
                self.batch.setattr(self.number(path)?, &change)?;
            }
            _ => self.name_part(part)?,
        }
        Ok(())
    }

    fn name_part(&mut self, part: &Op) -> Result<()> {
        match part {
            Op::Create { path, permissions } => {
                let place = self.place(path)?;
                let new = NewInode::new(FileType::Regular, *permissions);
                let made = self.batch.create_file(place.0, &place.1, &new)?;
                self.makes(place, made);
            }
            Op::Mkdir { path } => {
                let place = self.place(path)?;
                let made = self.batch.make_dir(place.0, &place.1, 0o755)?;
                self.makes(place, made);
            }
            Op::Symlink { path, target } => {
                let place = self.place(path)?;
                let made = self.batch.symlink(place.0, &place.1, target.as_bytes(), 0, 0)?;
                self.makes(place, made);
            }
            Op::Link { from, to } => {
                let (number, place) = (self.number(from)?, self.place(to)?);
                self.batch.link(number, place.0, &place.1)?;
                self.names.insert(place, Some(number));
            }
            Op::Unlink { path } => {
                let place = self.place(path)?;
                self.batch.unlink(place.0, &place.1)?;
                self.names.insert(place, None);
            }
            Op::Rmdir { path } => {
                let place = self.place(path)?;
                self.batch.rmdir(place.0, &place.1)?;
                self.names.insert(place, None);
            }
            Op::Rename { from, to, mode } => self.rename(from, to, *mode)?,
            _ => return Err(SystemError::new(0, format!("{part} is no part of a batch"))),
        }
        Ok(())
    }

    fn makes(&mut self, place: Place, made: u64) {
        self.names.insert(place, Some(made));
        self.made.push(made);
    }

    fn rename(&mut self, from: &str, to: &str, mode: RenameMode) -> Result<()> {
        let (source, target) = (self.place(from)?, self.place(to)?);
        self.batch.rename(source.0, &source.1, target.0, &target.1, mode)?;
        // What is missing, or in the way, the commit refuses.
        let (moved, other) = (self.entry(&source).ok(), self.entry(&target).ok());
        if moved != other {
            let left = other.filter(|_| mode == RenameMode::Exchange);
            self.names.insert(source, left);
            self.names.insert(target, moved);
        }
        Ok(())
    }

    fn entry(&self, place: &Place) -> Result<u64> {
        match self.names.get(place) {
            Some(Some(number)) => Ok(*number),
            Some(None) => Err(SystemError::new(errno::ENOENT, "gone in this batch")),
            None => Ok(self.session.volume.lookup(place.0, &place.1)?.ino),
        }
    }

    fn walk<'p>(&self, names: impl Iterator<Item = &'p str>) -> Result<u64> {
        let mut number = Volume::ROOT;
        for name in names {
            number = self.entry(&(number, name.as_bytes().to_vec()))?;
        }
        Ok(number)
    }

    fn number(&self, path: &str) -> Result<u64> {
        self.walk(path.split('/').filter(|name| !name.is_empty()))
    }

    fn place(&self, path: &str) -> Result<Place> {
        let number = self.number(crate::op::parent(path))?;
        let name = path.rsplit('/').next().unwrap_or("");
        Ok((number, name.as_bytes().to_vec()))
    }

    /// An open file, or the number of one that this batch makes.
    fn file(&self, target: &Target) -> Result<std::result::Result<weir::File, u64>> {
        match target {
            Target::Slot(slot) => Ok(Ok(self.session.slot(*slot)?)),
            Target::Path(path) => {
                let number = self.number(path)?;
                if self.made.contains(&number) {
                    return Ok(Err(number));
                }
                Ok(Ok(self.session.volume.open_inode(number, true)?))
            }
        }
    }
}
