//! Where the content of a file goes on the host.
//!
//! As with cp(1), a device, a FIFO and what a symbolic link leads to are written through. A regular
//! file is replaced only when its copy is complete: that is written beside it under another name
//! and renamed over it, so that a copy cut short leaves the old file. A Weir volume, and what some
//! program has locked, is never overwritten.

use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use weir::format::geometry::{Geometry, TAIL_BLOCKS};
use weir::format::superblock::MAGIC;
use weir::format::{BLOCK_BYTES_U64, MIN_VOLUME_BYTES};

use crate::failure::{Failure, Outcome};
use crate::open::mounted_at;
use crate::signals;

/// Names tried for a copy beside the file that it will replace.
const MAX_NAMES: u32 = 1000;
/// Zeros written at a time where a hole cannot be left.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// What an interruption would leave behind. There is one copy at a time.
static UNFINISHED: Mutex<Option<PathBuf>> = Mutex::new(None);

fn unfinished() -> MutexGuard<'static, Option<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on an interruption removes the copy that is being made beside a file.
pub(super) fn clean_up_when_interrupted() -> Outcome {
    let mut signals = signals::ending()?;
    std::thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            // Held until the end: no other copy begins.
            let mut unfinished = unfinished();
            if let Some(path) = unfinished.take() {
                let _ = fs::remove_file(path);
            }
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
    });
    Ok(())
}

/// A file of the host that is being written; see the module's head. What was not
/// [completed](Output::complete) is removed when it would have replaced a file.
pub(super) struct Output {
    file: File,
    /// A device or FIFO: takes bytes one after the other, and has no size or attributes of ours.
    is_stream: bool,
    /// Where a stream stands.
    position_bytes: u64,
    /// What is written instead of `path`, until that is complete.
    temporary: Option<PathBuf>,
    path: PathBuf,
    /// The file that is replaced.
    pub(super) replaced: Option<Metadata>,
}

impl Output {
    /// Begins to write `target`.
    pub(super) fn open(target: &Path) -> Outcome<Self> {
        let host = |error: io::Error| Failure::host(target, &error);
        let is_link = target.symlink_metadata().is_ok_and(|meta| meta.is_symlink());
        match target.metadata() {
            Ok(meta) if meta.is_dir() => {
                let what = "is a directory: give another destination";
                Err(Failure::new(target.display(), what).of_one())
            }
            Ok(meta) if meta.is_file() && !is_descriptor(target, is_link) => {
                refuse_volume(target)?;
                let path =
                    if is_link { target.canonicalize().map_err(host)? } else { target.into() };
                Self::beside(&path, meta)
            }
            Ok(_) => {
                refuse_volume(target)?;
                let file = File::options().write(true).truncate(true).open(target).map_err(host)?;
                Ok(Self::new(file, target, true))
            }
            Err(error) if error.kind() == ErrorKind::NotFound && is_link => Err(Failure::new(
                target.display(),
                "a symbolic link that leads nowhere: remove it, or choose another path",
            )
            .of_one()),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Ok(Self::new(create_new(target).map_err(host)?, target, false))
            }
            Err(error) => Err(host(error)),
        }
    }

    fn new(file: File, path: &Path, is_stream: bool) -> Self {
        let path = path.to_owned();
        Self { file, is_stream, position_bytes: 0, temporary: None, path, replaced: None }
    }

    /// A new file in the directory of `path`, which it will replace.
    fn beside(path: &Path, replaced: Metadata) -> Outcome<Self> {
        for attempt in 0..MAX_NAMES {
            let name = format!(".weir-cp-{}-{attempt}", std::process::id());
            let temporary = path.with_file_name(name);
            let mut unfinished = unfinished();
            match create_new(&temporary) {
                Ok(file) => {
                    *unfinished = Some(temporary.clone());
                    let mut output = Self::new(file, path, false);
                    output.temporary = Some(temporary);
                    output.replaced = Some(replaced);
                    return Ok(output);
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => {
                    let dir = path.parent().unwrap_or(path);
                    return Err(Failure::host(dir, &error));
                }
            }
        }
        Err(Failure::new(path.display(), "too many cut-off copies: remove .weir-cp-* beside it"))
    }

    /// Writes all of `bytes` at `offset_bytes`; calls come in the order of their offsets.
    pub(super) fn write(&mut self, offset_bytes: u64, bytes: &[u8]) -> Outcome {
        let written = if self.is_stream {
            self.zeros_until(offset_bytes).and_then(|()| {
                self.position_bytes += bytes.len() as u64;
                self.file.write_all(bytes)
            })
        } else {
            self.file.write_all_at(bytes, offset_bytes)
        };
        written.map_err(|error| Failure::host(&self.path, &error))
    }

    /// What is a hole in the volume comes out as zeros.
    fn zeros_until(&mut self, offset_bytes: u64) -> io::Result<()> {
        while self.position_bytes < offset_bytes {
            let wanted = (offset_bytes - self.position_bytes).min(ZEROS.len() as u64);
            self.file.write_all(&ZEROS[..wanted as usize])?;
            self.position_bytes += wanted;
        }
        Ok(())
    }

    /// Gives the file its size; attributes and [`Output::complete`] come after it.
    pub(super) fn finish(&mut self, size_bytes: u64) -> Outcome {
        let finished = if self.is_stream {
            self.zeros_until(size_bytes)
        } else {
            self.file.set_len(size_bytes)
        };
        finished.map_err(|error| Failure::host(&self.path, &error))
    }

    /// The file that takes attributes; `None` for a device or FIFO.
    pub(super) fn with_attributes(&self) -> Option<&Path> {
        (!self.is_stream).then(|| self.temporary.as_deref().unwrap_or(&self.path))
    }

    /// Puts the copy in the place of the file that was there.
    pub(super) fn complete(mut self) -> Outcome {
        let Some(temporary) = &self.temporary else { return Ok(()) };
        fs::rename(temporary, &self.path).map_err(|error| Failure::host(&self.path, &error))?;
        self.temporary = None;
        *unfinished() = None;
        Ok(())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            let _ = fs::remove_file(temporary);
            *unfinished() = None;
        }
    }
}

/// For us alone until it has its attributes.
fn create_new(path: &Path) -> io::Result<File> {
    File::options().write(true).create_new(true).mode(0o600).open(path)
}

/// `/dev/stdout` and the like: to be written as it stands, whatever is behind it.
fn is_descriptor(path: &Path, is_link: bool) -> bool {
    path.starts_with("/proc") || is_link && path.starts_with("/dev")
}

/// Takes away what is in the way of a link or special file.
pub(super) fn make_room(target: &Path) -> Outcome {
    let Ok(meta) = target.symlink_metadata() else { return Ok(()) };
    if meta.is_file() || meta.file_type().is_block_device() {
        refuse_volume(target)?;
    }
    match fs::remove_file(target) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(|error| Failure::host(target, &error)),
    }
}

/// Refuses to overwrite a Weir volume, or what a program has locked: whoever leaves out the `:/`
/// wants to copy into the volume, and not to lose it.
pub(super) fn refuse_volume(path: &Path) -> Outcome {
    let shown = path.display();
    let Ok(meta) = path.metadata() else { return Ok(()) };
    if !meta.is_file() && !meta.file_type().is_block_device() {
        return Ok(());
    }
    // Who may write but not read it cannot be helped.
    let Ok(file) = File::open(path) else { return Ok(()) };
    if has_superblock(&file) {
        let state = match mounted_at(path) {
            Some(dir) => format!("a Weir volume, mounted at {}", dir.display()),
            None => "a Weir volume".to_owned(),
        };
        return Err(Failure::new(
            &shown,
            format!("is {state}, and not overwritten: did you mean {shown}:/ ?"),
        ));
    }
    match file.try_lock_shared() {
        Err(fs::TryLockError::WouldBlock) => Err(Failure::new(
            shown,
            "in use by another program, which has it locked: choose another destination",
        )),
        _ => Ok(()),
    }
}

/// Whether a place of the superblock has its mark. A volume that is damaged is one nevertheless.
fn has_superblock(file: &File) -> bool {
    let Ok(end_bytes) = rustix::fs::seek(file, rustix::fs::SeekFrom::End(0)) else { return false };
    if end_bytes < MIN_VOLUME_BYTES {
        return false;
    }
    let tail = (end_bytes / BLOCK_BYTES_U64).saturating_sub(TAIL_BLOCKS);
    let slots = [0, 1].map(Geometry::superblock_block);
    slots.into_iter().chain(slots.map(|slot| tail + slot)).any(|block| {
        let mut mark = [0; MAGIC.len()];
        file.read_exact_at(&mut mark, block * BLOCK_BYTES_U64).is_ok() && mark == MAGIC
    })
}

/// What tells that two paths lead to the same file or device.
pub(super) fn identity(meta: &Metadata) -> (u64, u64) {
    if meta.file_type().is_block_device() { (0, meta.rdev()) } else { (meta.dev(), meta.ino()) }
}
