//! `weir umount`: takes a mount off and waits until its volume is closed.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use clap::Args;
use weir_mount::{UnmountError, mount_point};

use crate::commands::info::newest_superblock;
use crate::failure::{Failure, Outcome, say};
use crate::open::{mounted_at, volume_of};

/// A server that needs longer than this to write what is left is reported.
const CLOSE_LIMIT: Duration = Duration::from_secs(90);
/// What a server needs no longer than as a rule; then people hear what is waited for.
const PATIENCE: Duration = Duration::from_secs(1);

/// Arguments of `weir umount`.
#[derive(Debug, Args)]
#[command(
    long_about = "Unmount a volume and wait until it is closed: after that, everything is on the \
                  disk. (A word on standard error tells where that cannot be seen, as of a mount \
                  with another fsname whose server belongs to somebody else.) umount and \
                  fusermount3 -u work too, but do not wait.",
    after_help = "Examples:\n  weir umount /mnt\n  weir umount --lazy /mnt   # it is in use, and shall vanish now"
)]
pub struct UmountArgs {
    /// Where it is mounted, or the volume that is
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// Detach it from the tree now; programs that use it may finish
    #[arg(long, short)]
    pub lazy: bool,
}

/// What is to be taken off, by its mount point or by the volume. The file system that is mounted there is not asked: its server may be dead, and
/// of one that was stopped, or hangs, nobody hears again who asks.
fn mount_dir(dir: &Path) -> Outcome<PathBuf> {
    let canonical =
        mount_point::canonical_unasked(dir).map_err(|error| Failure::host(dir, &error))?;
    if mount_point::mount_at(&canonical).is_ok_and(|entry| entry.is_some()) {
        return Ok(canonical);
    }
    if let Some(mounted) = volume_mounted_at(&canonical) {
        return Ok(mounted);
    }
    // A symbolic link to a mount point; or no mount point.
    canonical.canonicalize().map_err(|error| Failure::host(dir, &error))
}

/// Where a volume is mounted that is named instead of its mount point.
fn volume_mounted_at(path: &Path) -> Option<PathBuf> {
    // A mount whose server is dead has no attributes: it is no volume either.
    path.metadata().ok().filter(|meta| !meta.is_dir())?;
    mounted_at(path)
}

/// Runs the command.
pub fn run(args: &UmountArgs) -> Outcome {
    let dir = mount_dir(&args.dir)?;
    let shown = &args.dir.display();
    let entry = mount_point::mount_at(&dir)
        .map_err(|error| Failure::new("/proc/self/mountinfo", error))?
        .ok_or_else(|| Failure::new(shown, "not mounted: see what is with: mount -t fuse.weir"))?;
    if entry.fs_type != "fuse.weir" {
        return Err(Failure::new(
            shown,
            format!("not a Weir mount but {}: use umount", entry.fs_type),
        ));
    }
    // As long as its server can be seen.
    let (volume, file) = if args.lazy { (PathBuf::new(), None) } else { volume_of(&entry) };
    mount_point::detach(&dir, args.lazy).map_err(|error| match error {
        UnmountError::Busy(_) => Failure::new(
            shown,
            format!("{error}: end it, or detach the mount with: weir umount --lazy {shown}"),
        ),
        error => Failure::new(shown, error),
    })?;
    if args.lazy {
        return Ok(());
    }
    let Some(file) = file else {
        let what = format!(
            "unmounted, but {} is no volume that can be opened here: when that is closed cannot be seen",
            volume.display()
        );
        say(format_args!("{shown}: {what}"));
        return Ok(());
    };
    wait_until_closed(&args.dir, &file, &entry.device)?;
    match newest_superblock(&file, &volume) {
        Ok(superblock) if !superblock.clean && !entry.read_only => Err(Failure::new(
            volume.display(),
            "unmounted, but its server could not close it: see what it said, then run weir fsck",
        )),
        // Closed; or mounted under the name of something else, and so out of sight.
        _ => Ok(()),
    }
}

/// The server holds a lock on the volume until it is closed. As long as the file system is mounted elsewhere, that is whom it waits for.
fn wait_until_closed(dir: &Path, file: &File, device: &str) -> Outcome {
    let began = Instant::now();
    let mut told = false;
    loop {
        match file.try_lock_shared() {
            Err(std::fs::TryLockError::WouldBlock) => {}
            // Closed; or there is no telling, and so nothing to wait for.
            Ok(()) | Err(std::fs::TryLockError::Error(_)) => {
                // In nobody's way.
                let _ = file.unlock();
                return Ok(());
            }
        }
        if began.elapsed() > PATIENCE && !told {
            let what = match mount_point::held_by(device) {
                Some(who) => format!("unmounted here, but still {who}: waiting for that to end"),
                None => "unmounted, writing what is left".to_owned(),
            };
            say(format_args!("{}: {what}", dir.display()));
            told = true;
        }
        if began.elapsed() > CLOSE_LIMIT {
            let what = match mount_point::held_by(device) {
                Some(who) => format!(
                    "unmounted here, but still {who}, so that its volume is in use: unmount it \
                     there too"
                ),
                None => "unmounted, but its server is still writing: wait for that process to end"
                    .to_owned(),
            };
            return Err(Failure::new(dir.display(), what));
        }
        sleep(Duration::from_millis(10));
    }
}
