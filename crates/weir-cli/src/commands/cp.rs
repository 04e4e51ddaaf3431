//! `weir cp`: copies into and out of a volume without a mount.
//!
//! Mode, owner, times, extended attributes, symbolic links, hard links within what is copied, and
//! holes are kept. Owners and special files that an ordinary user may not make on the host are left
//! as they can be, with a word.
//!
//! The volume itself is no destination: whoever forgets the `:/` must not lose it.

mod from_volume;
mod output;
mod to_volume;

use std::collections::HashSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::Args;

use crate::failure::{Failure, Outcome, say};
use crate::open::with_volume;
use crate::place::{Place, Side};
use crate::progress::{Progress, Unit};
use crate::show;

/// Unit of copying.
const CHUNK_BYTES: usize = 1 << 20;

/// Arguments of `weir cp`.
#[derive(Debug, Args)]
#[command(
    override_usage = "weir cp [-r] SRC... DST",
    long_about = "Copy into or out of an unmounted volume. One side is VOLUME:/path, the other a \
                  path of the host. As with cp, a destination that is a directory gets the source \
                  below it, and several sources need one; what is there already is overwritten.\n\n\
                  Mode, owner, times, extended attributes, holes, and hard links within what is \
                  copied are kept. A symbolic link that is named is followed; with -r links are \
                  copied as links. A FIFO or device of the host that is named is read; with -r it is \
                  copied as what it is. A file that is there is replaced when its copy is complete. \
                  On the host it keeps its mode and owner without -r, and a device, a FIFO and what \
                  a link leads to are written through. A Weir volume, and a file that a program has \
                  locked, is never overwritten.",
    after_help = "Examples:\n  \
        weir cp notes.txt disk.weir:/\n  \
        weir cp -r ~/src disk.weir:/src\n  \
        weir cp -r disk.weir:/src /tmp/copy\n  \
        weir cp -r dir/. disk.weir:/     # what is in dir\n  \
        make-list | weir cp /dev/stdin disk.weir:/list"
)]
pub struct CpArgs {
    /// Directories too, with everything in them
    #[arg(short, long, visible_short_alias = 'a')]
    pub recursive: bool,
    /// From where, then to where
    #[arg(value_name = "SRC... DST", num_args = 2.., required = true)]
    pub paths: Vec<OsString>,
}

/// What a copy did, and what it could not do.
struct Tally {
    progress: Progress,
    files: u64,
    bytes: u64,
    skipped: u64,
    /// Symbolic links made on the host, which nothing that comes after them is written through.
    made_links: HashSet<PathBuf>,
}

impl Tally {
    fn skip(&mut self, subject: impl std::fmt::Display, what: impl std::fmt::Display) {
        say(format_args!("{subject}: {what}"));
        self.skipped += 1;
    }
    fn count_bytes(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
        self.progress.add(bytes as u64);
    }
}

/// Runs the command.
pub fn run(args: &CpArgs) -> Outcome {
    let Some((destination, sources)) = args.paths.split_last() else { return Ok(()) };
    let mut tally = Tally {
        progress: Progress::new("copied", Unit::Bytes, None),
        files: 0,
        bytes: 0,
        skipped: 0,
        made_links: HashSet::new(),
    };
    match Side::parse(destination) {
        Side::Volume(place) => into_volume(args, sources, &place, &mut tally)?,
        Side::Host(path) => out_of_volume(args, sources, &path, &mut tally)?,
    }
    if tally.skipped > 0 {
        return Err(Failure::bare(format!(
            "{} copied, {} not or not completely: see above",
            show::counted(tally.files, "file", "files"),
            tally.skipped
        )));
    }
    Ok(())
}

fn into_volume(args: &CpArgs, sources: &[OsString], place: &Place, tally: &mut Tally) -> Outcome {
    let sources = sources.iter().map(|source| match Side::parse(source) {
        Side::Host(path) => Ok(path),
        Side::Volume(place) => Err(both_sides(&place)),
    });
    let sources = sources.collect::<Outcome<Vec<PathBuf>>>()?;
    let own = place.volume.metadata().ok().map(|meta| output::identity(&meta));
    for source in &sources {
        // Before the volume is touched.
        let meta = source.symlink_metadata().map_err(|error| Failure::host(source, &error))?;
        let meta = source.metadata().unwrap_or(meta);
        if own == Some(output::identity(&meta)) {
            let shown = source.display();
            return Err(Failure::new(
                &shown,
                format!("is the volume that it would be copied into: did you mean {shown}:/PATH ?"),
            ));
        }
    }
    with_volume(&place.volume, false, |volume| {
        if sources.len() > 1 {
            let found = volume.metadata(&place.path);
            if !found.is_ok_and(|attr| attr.file_type == weir::FileType::Directory) {
                return Err(no_directory(place, &format!("weir mkdir {place}")));
            }
        }
        sources
            .iter()
            .try_for_each(|source| to_volume::copy(volume, source, place, args.recursive, tally))
    })
}

fn out_of_volume(args: &CpArgs, sources: &[OsString], path: &Path, tally: &mut Tally) -> Outcome {
    let places = sources.iter().map(|source| match Side::parse(source) {
        Side::Volume(place) => Ok(place),
        Side::Host(_) => {
            Err(Failure::bare("neither side is in a volume: write one as VOLUME:/path".to_owned()))
        }
    });
    let places = places.collect::<Outcome<Vec<Place>>>()?;
    output::refuse_volume(path)?;
    output::clean_up_when_interrupted()?;
    if places.len() > 1 && !path.is_dir() {
        return Err(no_directory(path.display(), &format!("mkdir {}", path.display())));
    }
    places.iter().try_for_each(|place| {
        with_volume(&place.volume, true, |volume| {
            from_volume::copy(volume, place, path, args.recursive, tally)
        })
    })
}

fn no_directory(shown: impl std::fmt::Display, remedy: &str) -> Failure {
    Failure::new(shown, format!("no such directory, which several sources need: {remedy}"))
}

fn both_sides(place: &Place) -> Failure {
    Failure::new(place, "both sides are in volumes: copy to the host first")
}
