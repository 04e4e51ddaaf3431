//! The same operation by another call of the interface: by path, by a cursor, all of it, or not. Which one goes by what the operation is about, so
//! that a workload is the same every time.

use std::io::{Seek, SeekFrom, Write as _};

use weir::{Error, OpenFlags, RenameMode};

use super::{EngineSession, Result};
use crate::model::Outcome;
use crate::op::Op;
use crate::pattern;
use crate::system::SystemError;

impl EngineSession {
    /// `op` by a call of its own kind, if it is one of those that are made so.
    pub(super) fn by_another_way(&self, op: &Op) -> Option<Result<Outcome>> {
        let by_path = |path: &str| path.len() % 2 == 1;
        let done = match op {
            Op::Create { path, permissions } if by_path(path) => {
                let flags = OpenFlags {
                    create: true,
                    exclusive: true,
                    permissions: *permissions,
                    ..OpenFlags::READ
                };
                self.volume.open_file(path, flags).map(|_| ())
            }
            Op::Mkdir { path } if by_path(path) => self.volume.create_dir(path, 0o755).map(|_| ()),
            Op::Symlink { path, target } if by_path(path) => {
                self.volume.symlink_path(target, path).map(|_| ())
            }
            Op::Link { from, to } if by_path(to) => self.volume.link_path(from, to).map(|_| ()),
            Op::Unlink { path } if by_path(path) => self.volume.remove_file(path),
            Op::Rmdir { path } if by_path(path) => self.volume.remove_dir(path),
            Op::Rename { from, to, mode: RenameMode::Replace } if by_path(to) => {
                self.volume.rename_path(from, to)
            }
            Op::Write { .. } => return self.write_another_way(op),
            _ => return None,
        };
        Some(done.map(|()| Outcome::Done).map_err(SystemError::from))
    }

    fn write_another_way(&self, op: &Op) -> Option<Result<Outcome>> {
        let Op::Write { target, offset, length, tag } = op else { return None };
        let data = || pattern::bytes(*tag, *offset, *length);
        match tag % 4 {
            1 => Some(self.file(target).and_then(|file| {
                let mut cursor = file.cursor();
                let written = cursor.seek(SeekFrom::Start(*offset));
                match written.and_then(|_| cursor.write(&data())) {
                    Ok(count) => Ok(Outcome::Count(count as u64)),
                    Err(error) => Err(inner(error)),
                }
            })),
            // Where it may run out of room in the middle, only the other call says how far it came.
            2 if !self.device.has_faults()
                && op
                    .most_blocks()
                    .is_some_and(|most| self.volume.statfs().available_blocks > 2 * most) =>
            {
                Some(self.file(target).and_then(|file| {
                    file.write_all_at(*offset, &data())?;
                    Ok(Outcome::Count(*length))
                }))
            }
            _ => None,
        }
    }
}

/// The engine's error in one of the standard library.
fn inner(error: std::io::Error) -> SystemError {
    let text = error.to_string();
    match error.into_inner().and_then(|inner| inner.downcast::<Error>().ok()) {
        Some(error) => SystemError::from(*error),
        None => SystemError::new(0, text),
    }
}
