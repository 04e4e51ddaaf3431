//! `weir create`: a new volume.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Args;
use serde_json::json;
use weir::CreateOptions;
use weir::format::superblock::MAX_LABEL_BYTES;

use crate::failure::{Failure, Outcome, USAGE, harmless, say};
use crate::open::{mounted_at, print, print_json};
use crate::progress::{Progress, Unit};
use crate::signals;
use crate::size;

/// Smallest volume that the format allows.
const MIN_BYTES: u64 = weir::format::MIN_VOLUME_BYTES;
/// Smallest log.
const MIN_LOG_BYTES: u64 = weir::format::geometry::MIN_LOG_BLOCKS * 4096;
/// Ends a program that was interrupted from the terminal.
const INTERRUPTED: i32 = 130;

/// Arguments of `weir create`.
#[derive(Debug, Args)]
#[command(
    long_about = "Make a new volume in a file or on a block device. Without --force no file is \
                  overwritten, and no device that is not empty: nothing but zeros at its start, \
                  its end and 64 places between.",
    after_help = "Examples:\n  \
        weir create disk.weir --size 8G\n  \
        weir create /dev/sdb1 --label backup\n  \
        weir create disk.weir --size 8G --prewrite   # later flushes cost the host nothing extra"
)]
pub struct CreateArgs {
    /// A new file, or a block device
    #[arg(value_name = "VOL")]
    pub volume: PathBuf,
    /// How it looks
    #[command(flatten)]
    pub format: FormatArgs,
    /// Replace whatever is there
    #[arg(long)]
    pub force: bool,
    /// Print what was made as JSON
    #[arg(long)]
    pub json: bool,
}

/// How a new volume looks; shared with `weir mount --create`.
#[derive(Debug, Clone, Args)]
pub struct FormatArgs {
    /// Size, such as 8G or 512MiB; for a device: all of it
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub size: Option<u64>,
    /// Write the whole volume once, so that later flushes never wait for the host to allocate
    #[arg(long)]
    pub prewrite: bool,
    /// A name for people, up to 64 bytes
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub label: String,
    /// Size of the log; by default 1/32 of the volume within 256M and 2G, at most an eighth
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub log_size: Option<u64>,
}

/// Runs the command.
pub fn run(args: &CreateArgs) -> Outcome {
    let size_bytes = create(&args.volume, &args.format, args.force)?;
    let shown = args.volume.display();
    if args.json {
        return print_json(&json!({ "volume": shown.to_string(), "size_bytes": size_bytes }));
    }
    let text = format!("{}: a volume of {}\n", harmless(shown), size::show(size_bytes));
    print(text.as_bytes())
}

/// Makes the volume and returns its size.
pub fn create(volume: &Path, format: &FormatArgs, force: bool) -> Outcome<u64> {
    let present = volume.metadata().ok();
    let is_device = present.as_ref().is_some_and(|meta| meta.file_type().is_block_device());
    let is_new = present.is_none();
    check_place(volume, present.as_ref())?;
    if let Some(dir) = mounted_at(volume) {
        let error = weir::Error::InUse(format!("mounted at {}", dir.display()));
        return Err(Failure::volume(volume, &error));
    }
    check_size(volume, format, present.as_ref(), is_device)?;
    if !is_new && !is_device && !force {
        return Err(Failure::volume(volume, &weir::Error::Exists));
    }
    let options = CreateOptions {
        size_bytes: format.size,
        log_bytes: format.log_size,
        prewrite: format.prewrite,
        force,
        label: format.label.clone(),
        volume_id: None,
        root_uid: rustix::process::getuid().as_raw(),
        root_gid: rustix::process::getgid().as_raw(),
    };
    let interrupt = RemoveOnInterrupt::arm(volume, is_new)?;
    let progress = Progress::new("writing", Unit::Bytes, Some(0));
    let created = weir::Volume::create_with_progress(volume, &options, &mut |done, all| {
        progress.set_total(all);
        progress.set(done);
    });
    drop(progress);
    interrupt.disarm();
    created.map_err(|error| Failure::creating(volume, &error))?;
    let made_bytes = match format.size {
        Some(size_bytes) => size_bytes,
        None => device_bytes(volume).map_err(|error| Failure::host(volume, &error))?,
    };
    Ok(made_bytes / 4096 * 4096)
}

/// Where a file or device ends; the attributes of a device do not tell.
fn device_bytes(volume: &Path) -> std::io::Result<u64> {
    File::open(volume)?.seek(SeekFrom::End(0))
}

/// Refuses what a volume can be neither made in place of nor beside.
fn check_place(volume: &Path, present: Option<&std::fs::Metadata>) -> Outcome {
    let complain = |what: &str| Err(Failure::new(volume.display(), what));
    match present.map(std::fs::Metadata::file_type) {
        Some(kind) if kind.is_dir() => Err(Failure::volume(volume, &weir::Error::IsDirectory)),
        Some(kind) if !kind.is_file() && !kind.is_block_device() => {
            complain("neither a file nor a block device: give the path of a new file, or a device")
        }
        Some(_) => Ok(()),
        None if volume.symlink_metadata().is_ok() => {
            complain("a symbolic link that leads nowhere: remove it, or choose another path")
        }
        None => {
            let parent = volume.parent().filter(|parent| !parent.as_os_str().is_empty());
            match parent.map(|parent| (parent, parent.is_dir())) {
                Some((parent, false)) => Err(Failure::new(
                    parent.display(),
                    format!("no such directory: make it first: mkdir -p {}", parent.display()),
                )),
                _ => Ok(()),
            }
        }
    }
}

/// Refuses a log, or a name, that a volume of this size cannot have.
fn check_format(volume: &Path, format: &FormatArgs, size_bytes: u64) -> Outcome {
    if format.label.len() > MAX_LABEL_BYTES {
        return Err(Failure::new(
            volume.display(),
            format!(
                "the label has {} bytes, and may have {MAX_LABEL_BYTES}: choose a shorter --label",
                format.label.len()
            ),
        ));
    }
    let most_bytes = (size_bytes / 8).max(MIN_LOG_BYTES);
    match format.log_size {
        Some(log_bytes) if !(MIN_LOG_BYTES..=most_bytes).contains(&log_bytes) => Err(Failure::new(
            volume.display(),
            format!(
                "a log of {} does not fit: choose a --log-size from {} to {}, or leave it out",
                size::show(log_bytes),
                size::show(MIN_LOG_BYTES),
                size::show(most_bytes)
            ),
        )),
        _ => Ok(()),
    }
}

fn check_size(
    volume: &Path,
    format: &FormatArgs,
    present: Option<&std::fs::Metadata>,
    is_device: bool,
) -> Outcome {
    let complain = |what: String| Err(Failure::new(volume.display(), what));
    let usage = |what: String| Err(Failure::new(volume.display(), what).with_code(USAGE));
    let Some(size_bytes) = format.size else {
        return match present {
            None => usage("no size: say how large it is to be, such as --size 8G".to_owned()),
            Some(meta) if !is_device && meta.len() < MIN_BYTES => usage(
                "no size: the file there is too small: add --size, such as --size 8G".to_owned(),
            ),
            Some(meta) if !is_device => check_format(volume, format, meta.len()),
            // How large the device is is seen when it is opened.
            Some(_) => check_format(volume, format, u64::MAX),
        };
    };
    if size_bytes < MIN_BYTES {
        // In bytes: rounded, the two can look the same.
        return usage(format!(
            "too small: {size_bytes} bytes asked for, the least is {MIN_BYTES} ({}): choose a \
             larger --size",
            size::show(MIN_BYTES)
        ));
    }
    check_format(volume, format, size_bytes)?;
    if is_device {
        return Ok(());
    }
    let occupied_bytes = present.map_or(0, |meta| meta.blocks() * 512);
    let Some(free_bytes) = free_host_bytes(volume) else { return Ok(()) };
    let available_bytes = free_bytes.saturating_add(occupied_bytes);
    if format.prewrite && size_bytes > available_bytes {
        return complain(format!(
            "not enough space: {} asked for, {} free on the host: choose a smaller --size",
            size::show(size_bytes),
            size::show(available_bytes)
        ));
    }
    if size_bytes > available_bytes {
        say(format_args!(
            "{}: larger than the {} free on its host: it will fill up before it is full",
            volume.display(),
            size::show(available_bytes)
        ));
    }
    Ok(())
}

fn free_host_bytes(volume: &Path) -> Option<u64> {
    let parent = volume.parent().filter(|parent| !parent.as_os_str().is_empty());
    let space = rustix::fs::statvfs(parent.unwrap_or(Path::new("."))).ok()?;
    // One without blocks, such as /proc, does not count them.
    (space.f_blocks > 0).then_some(())?;
    Some(space.f_bavail.saturating_mul(space.f_frsize))
}

/// What is left when a creation is interrupted.
fn interrupted(volume: &Path, is_new: bool) -> Failure {
    let lost =
        if is_new { "" } else { ", and what was there is lost: make a new one with --force" };
    Failure::new(volume.display(), format!("interrupted: no volume was made{lost}"))
}

/// Whose the end of a creation is: of two that ask, one has it.
#[derive(Clone, Default)]
struct End(Arc<AtomicBool>);

impl End {
    fn is_mine(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }
}

/// Removes a half-made file when the program is interrupted.
struct RemoveOnInterrupt {
    end: End,
    handle: signal_hook::iterator::Handle,
}

impl RemoveOnInterrupt {
    fn arm(volume: &Path, is_new: bool) -> Outcome<Self> {
        let mut signals = signals::ending()?;
        let handle = signals.handle();
        let end = End::default();
        let (watched, path) = (end.clone(), volume.to_owned());
        std::thread::spawn(move || {
            if signals.forever().next().is_some() && watched.is_mine() {
                if is_new {
                    // Half a volume is of no use to anyone.
                    let _ = std::fs::remove_file(&path);
                }
                say(interrupted(&path, is_new));
                std::process::exit(INTERRUPTED);
            }
        });
        Ok(Self { end, handle })
    }

    /// A volume that is complete stays. Does not return where the interruption came first: what was made is gone, or about to be.
    fn disarm(self) {
        while !self.end.is_mine() {
            // Who removes it ends the process.
            std::thread::park();
        }
        self.handle.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_creation_is_interrupted_or_complete_and_never_both() {
        for _ in 0..1000 {
            let end = End::default();
            let other = end.clone();
            let interruption = std::thread::spawn(move || other.is_mine());
            let is_complete = end.is_mine();
            assert_ne!(interruption.join().unwrap(), is_complete);
        }
    }

    #[test]
    fn an_interruption_tells_when_it_cost_what_was_there() {
        let said = |is_new| interrupted(Path::new("v"), is_new).to_string();
        assert_eq!(said(true), "v: interrupted: no volume was made");
        assert!(said(false).contains("what was there is lost"));
    }
}
