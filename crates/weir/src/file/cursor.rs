//! [`FileCursor`]: a file as `std::io` has it, for code that reads and writes streams.

use super::handle::File;
use std::io::{self, Read, Seek, SeekFrom, Write};

/// A place in a [`File`] from which is read and written and which moves on: [`std::io::Read`], [`Write`] and [`Seek`]. Each cursor has a
/// place of its own, also of the same file.
///
/// Its errors are [`crate::Error`] as [`std::io::Error`], which has it inside. [`Write::flush`] has nothing to do, and makes
/// nothing durable: that is for [`File::fsync`] and its kin. Nothing is buffered here, so each call is one of the engine's; small pieces are
/// for [`std::io::BufReader`] and [`std::io::BufWriter`].
///
/// ```
/// # fn main() -> weir::Result<()> {
/// # use weir::{CreateOptions, OpenFlags, Volume, VolumeOptions};
/// use std::io::{BufRead, BufReader, Write};
/// # let path = std::env::temp_dir().join(format!("weir-cursor-{}.weir", std::process::id()));
/// # Volume::create(&path, &CreateOptions { size_bytes: Some(16 << 20), ..CreateOptions::default() })?;
/// # let volume = Volume::open(&path, VolumeOptions::default())?;
/// let file = volume.open_file("/list", OpenFlags::CREATE)?;
/// writeln!(file.cursor(), "first\nsecond")?;
/// file.fsync()?;
/// let lines: Vec<String> = BufReader::new(file.cursor()).lines().collect::<Result<_, _>>()?;
/// assert_eq!(lines, ["first", "second"]);
/// # drop(file);
/// # volume.close()?;
/// # std::fs::remove_file(&path)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct FileCursor {
    file: File,
    position: u64,
}

impl File {
    /// A cursor at the start of the file.
    pub fn cursor(&self) -> FileCursor {
        FileCursor { file: self.clone(), position: 0 }
    }
}

impl FileCursor {
    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The byte that is read or written next.
    pub fn position(&self) -> u64 {
        self.position
    }
}

impl Read for FileCursor {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(self.position, buffer)?;
        self.position += count as u64;
        Ok(count)
    }
}

impl Write for FileCursor {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let count = self.file.write_at(self.position, data)?;
        self.position += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for FileCursor {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let position = match to {
            SeekFrom::Start(position) => Some(position),
            SeekFrom::Current(by) => self.position.checked_add_signed(by),
            SeekFrom::End(by) => self.file.size().checked_add_signed(by),
        };
        let before = || io::Error::new(io::ErrorKind::InvalidInput, "a place before the start");
        self.position = position.ok_or_else(before)?;
        Ok(self.position)
    }
}
