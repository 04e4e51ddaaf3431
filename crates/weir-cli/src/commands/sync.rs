//! `weir sync`: what `syncfs` would do, if the kernel told a FUSE server of it, and syncs of parts of a file.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use clap::Args;
use weir_mount::client;

use crate::failure::{Failure, Outcome, each};
use crate::open::mounted_at;
use crate::size;

/// Arguments of `weir sync`.
#[derive(Debug, Args)]
#[command(
    long_about = "Make what was written through a mount durable: of a directory everything on its \
                  volume (the kernel does not pass sync and syncfs on to a FUSE server), of a file \
                  the file, or some of its bytes.",
    after_help = "Examples:\n  tar -C /mnt -xf tree.tar && weir sync /mnt\n  \
                  weir sync /mnt/journal\n  weir sync --range 1G:64M /mnt/table"
)]
pub struct SyncArgs {
    /// A mount point or any directory below one: everything. A file: this file
    #[arg(value_name = "PATH", required = true)]
    pub paths: Vec<PathBuf>,
    /// Only these bytes of the files; sizes may end in K, M, G
    #[arg(long, value_name = "OFF:LEN", value_parser = parse_range)]
    pub range: Option<(u64, u64)>,
    /// As fdatasync: without attributes that are not needed to read the data
    #[arg(long, short)]
    pub data: bool,
}

fn parse_range(text: &str) -> Result<(u64, u64), String> {
    let wrong = || format!("'{text}' is no range: write OFFSET:LENGTH, such as 1G:64M");
    let (offset, length) = text.split_once(':').ok_or_else(wrong)?;
    let offset = size::parse(offset).map_err(|_| wrong())?;
    let length = size::parse(length).map_err(|_| wrong())?;
    // No file reaches further, and the kernel's words for that are those of a file system that knows no such call.
    let is_within = offset.checked_add(length).is_some_and(|end| i64::try_from(end).is_ok());
    if length == 0 || !is_within {
        return Err(wrong());
    }
    Ok((offset, length))
}

/// A file or directory of a mount, to be asked something.
pub(super) fn open_asked(path: &Path) -> Outcome<File> {
    // A FIFO or a terminal must not keep us.
    File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .map_err(|error| Failure::host(path, &error))
}

/// An error of a command of a mount.
pub(super) fn refused(path: &Path, error: &io::Error) -> Failure {
    match error.raw_os_error() {
        Some(libc::ENOTTY | libc::EINVAL | libc::EOPNOTSUPP | libc::ESPIPE) => {
            let what = match mounted_at(path) {
                Some(dir) => {
                    format!("a volume, mounted at {dir}: give {dir}", dir = dir.display())
                }
                None => "not on a Weir mount: see what is with: mount -t fuse.weir".to_owned(),
            };
            Failure::new(path.display(), what)
        }
        _ => Failure::host(path, error),
    }
}

/// Runs the command.
pub fn run(args: &SyncArgs) -> Outcome {
    each(&args.paths, |path| {
        let file = open_asked(path)?;
        let is_dir = file.metadata().map_err(|error| Failure::host(path, &error))?.is_dir();
        if is_dir && args.range.is_some() {
            let what = "is a directory: --range is for files";
            return Err(Failure::new(path.display(), what).with_code(crate::failure::USAGE));
        }
        // Of another volume, as likely as not.
        sync(&file, is_dir, args).map_err(|error| refused(path, &error).of_one())
    })
}

/// With what only the kernel has, which comes first.
fn sync(file: &File, is_dir: bool, args: &SyncArgs) -> io::Result<()> {
    let flags = if args.data { weir_mount::ioctl::SYNC_DATA } else { 0 };
    if is_dir {
        client::sync_volume(file, weir_mount::ioctl::SYNC_MAPPED)?;
        // The kernel says here what of its pages could not be sent since the directory was opened.
        return Ok(rustix::fs::syncfs(file)?);
    }
    let (offset, length) = args.range.unwrap_or((0, 0));
    client::write_back(file, offset, length)?;
    client::sync_range(file, offset, length, flags)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_offset_and_length_with_units() {
        assert_eq!(parse_range("0:4096"), Ok((0, 4096)));
        assert_eq!(parse_range("1G:64M"), Ok((1 << 30, 64 << 20)));
        assert_eq!(parse_range("9223372036854775806:1"), Ok((i64::MAX as u64 - 1, 1)));
        let beyond = ["18446744073709551615:2", "9223372036854775807:1", "0:9223372036854775808"];
        for wrong in ["", "5", "5:", ":5", "a:b", "0:0", "-1:5"].into_iter().chain(beyond) {
            assert!(parse_range(wrong).is_err(), "{wrong}");
        }
    }
}
