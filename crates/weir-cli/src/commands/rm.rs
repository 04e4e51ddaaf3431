//! `weir rm`: removes files without a mount.

use clap::Args;
use weir::{DirEntry, Error, FileType, Volume};

use crate::failure::{Failure, Outcome, each};
use crate::open::with_volume;
use crate::place::{Place, place_parser};
use crate::progress::{Progress, Unit};

/// Entries of a directory looked at before they are removed.
const BATCH: usize = 1024;

/// Arguments of `weir rm`.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  weir rm disk.weir:/notes.txt\n  weir rm -r disk.weir:/build disk.weir:/tmp/x"
)]
pub struct RmArgs {
    /// A file in a volume, or with -r a directory
    #[arg(value_name = "VOL:/PATH", value_parser = place_parser(), required = true)]
    pub places: Vec<Place>,
    /// Directories too, with everything in them
    #[arg(short, long)]
    pub recursive: bool,
    /// What does not exist is as good as removed
    #[arg(short, long)]
    pub force: bool,
}

/// Runs the command.
pub fn run(args: &RmArgs) -> Outcome {
    let progress = Progress::new("removed", Unit::Items, None);
    each(&args.places, |place| {
        with_volume(&place.volume, false, |volume| remove(volume, place, args, &progress))
    })
}

fn remove(volume: &Volume, place: &Place, args: &RmArgs, progress: &Progress) -> Outcome {
    let fail = |error: Error| Failure::inside(place, &error);
    if place.path.iter().all(|&byte| byte == b'/') {
        let failure = Failure::new(place, "is the root of the volume: name what is in it");
        return Err(failure.of_one());
    }
    let attr = match volume.symlink_metadata(&place.path) {
        Err(Error::NotFound) if args.force => return Ok(()),
        attr => attr.map_err(fail)?,
    };
    if place.must_be_directory && attr.file_type != FileType::Directory {
        return Err(fail(Error::NotDirectory));
    }
    let (dir, name) = volume.resolve_parent(&place.path).map_err(fail)?;
    if attr.file_type != FileType::Directory {
        volume.unlink(dir, &name).map_err(fail)?;
        progress.add(1);
        return Ok(());
    }
    if !args.recursive {
        let failure = Failure::new(place, "is a directory: add -r to remove it and what is in it");
        return Err(failure.of_one());
    }
    empty(volume, attr.ino, progress).map_err(fail)?;
    volume.rmdir(dir, &name).map_err(fail)?;
    progress.add(1);
    Ok(())
}

/// Removes everything below `root`. Own stack: a tree can be deeper than the program's.
fn empty(volume: &Volume, root: u64, progress: &Progress) -> weir::Result<()> {
    // Directories on the way down, with the name of each in the one before.
    let mut path: Vec<(u64, Vec<u8>)> = vec![(root, Vec::new())];
    while let Some((dir, _)) = path.last() {
        let dir = *dir;
        let mut batch: Vec<DirEntry> = Vec::new();
        volume.readdir(dir, 0, &mut |entry| {
            batch.push(entry);
            batch.len() < BATCH
        })?;
        if batch.is_empty() {
            let (_, name) = path.pop().unwrap_or_default();
            if let Some((parent, _)) = path.last() {
                volume.rmdir(*parent, &name)?;
                progress.add(1);
            }
            continue;
        }
        let mut descend = None;
        for entry in batch {
            if entry.file_type == FileType::Directory {
                descend.get_or_insert((entry.ino, entry.name));
            } else {
                volume.unlink(dir, &entry.name)?;
                progress.add(1);
            }
        }
        path.extend(descend);
    }
    Ok(())
}
