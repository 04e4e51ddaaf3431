//! `weir cp`: copies into and out of a volume without a mount.
//!
//! Mode, owner, times, extended attributes, symbolic links and holes are kept, and with `-r` hard
//! links among all that one command copies. Owners and special files that an ordinary user may not
//! make on the host are left as they can be, with a word.
//!
//! What is wrong with one file of a tree, or with one of several sources, is told and counted, and
//! the rest is copied ([`Tally::go_on`]). Where nothing that comes after it could go well (a side
//! that is full, say), or where what was asked for looks like a mistake, the copy ends.
//!
//! The volume itself is no destination: whoever forgets the `:/` must not lose it.

mod from_volume;
mod output;
mod to_volume;

use std::collections::HashSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::Args;

use crate::failure::{Failure, Outcome, USAGE, say};
use crate::open::with_volume;
use crate::place::{Place, Side};
use crate::progress::{Progress, Unit};
use crate::show;
use crate::streams;

/// Unit of copying.
const CHUNK_BYTES: usize = 1 << 20;

/// Arguments of `weir cp`.
#[derive(Debug, Args)]
#[command(
    override_usage = "weir cp [-r] SRC... DST",
    long_about = "Copy into or out of an unmounted volume. One side is VOLUME:/path, the other a \
                  path of the host. As with cp, a destination that is a directory gets the source \
                  below it, and several sources need one; what is there already is overwritten.\n\n\
                  Mode, owner, times, extended attributes and holes are kept, and with -r hard \
                  links among all that is copied. A symbolic link that is named is followed; with \
                  -r links are copied as links. A FIFO or device of the host that is named is \
                  read; with -r it is copied as what it is. A file that is there is replaced when \
                  its copy is complete. On the host it keeps its mode and owner without -r, and a \
                  device, a FIFO and what a link leads to are written through. A Weir volume, and a \
                  file that a program has locked, is never overwritten.",
    after_help = "Examples:\n  \
        weir cp notes.txt disk.weir:/\n  \
        weir cp -r ~/src disk.weir:/src\n  \
        weir cp -r disk.weir:/src /tmp/copy\n  \
        weir cp -r dir/. disk.weir:/     # what is in dir\n  \
        make-list | weir cp /dev/stdin disk.weir:/list\n\n\
        Exit codes: 0 all is copied, 1 not all: what was left out or is incomplete is named, and\n\
        the rest is copied as far as the destination takes it, 2 wrong usage"
)]
pub struct CpArgs {
    /// Directories too, with everything in them
    #[arg(short, long, visible_short_alias = 'a')]
    pub recursive: bool,
    /// From where, then to where
    #[arg(value_name = "SRC... DST", num_args = 1.., required = true)]
    pub paths: Vec<OsString>,
}

/// What a copy did, and what it could not do.
struct Tally {
    progress: Progress,
    files: u64,
    bytes: u64,
    skipped: u64,
    /// Copies on the host that belong to whoever copies, who may not give files away.
    owners_lost: u64,
    /// Symbolic links made on the host, which nothing that comes after them is written through.
    made_links: HashSet<PathBuf>,
}

impl Tally {
    fn skip(&mut self, subject: impl std::fmt::Display, what: impl std::fmt::Display) {
        say(format_args!("{subject}: {what}"));
        self.skipped += 1;
    }
    /// Tells a failure, and goes on where others of what is to be copied may still go well.
    fn go_on(&mut self, copied: Outcome) -> Outcome {
        match copied {
            Err(failure) if failure.is_local() => {
                say(failure);
                self.skipped += 1;
                Ok(())
            }
            copied => copied,
        }
    }
    fn count_bytes(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
        self.progress.add(bytes as u64);
    }
}

/// Runs the command.
pub fn run(args: &CpArgs) -> Outcome {
    let Some((destination, sources @ [_, ..])) = args.paths.split_last() else {
        let what = "say what to copy, and where to: see weir cp --help";
        return Err(Failure::bare(what).with_code(USAGE));
    };
    let mut tally = Tally {
        progress: Progress::new("copied", Unit::Bytes, None),
        files: 0,
        bytes: 0,
        skipped: 0,
        owners_lost: 0,
        made_links: HashSet::new(),
    };
    match Side::parse(destination) {
        Side::Volume(place) => into_volume(args, sources, &place, &mut tally)?,
        Side::Host(path) => out_of_volume(args, sources, &path, &mut tally)?,
    }
    if tally.owners_lost > 0 {
        let copies = show::counted(tally.owners_lost, "copy belongs", "copies belong");
        say(format_args!("{copies} to you and not to the owner: only root gives files away"));
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
        streams::check_open(source)?;
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
        let is_one = sources.len() == 1;
        let mut copier = to_volume::Copier::new(volume, place, args.recursive, tally);
        sources.iter().try_for_each(|source| {
            let copied = copier.copy(source, place);
            // Of one there is no rest, and the failure is all there is to say.
            if is_one { copied } else { copier.tally.go_on(copied) }
        })
    })
}

fn out_of_volume(args: &CpArgs, sources: &[OsString], path: &Path, tally: &mut Tally) -> Outcome {
    let places = sources.iter().map(|source| match Side::parse(source) {
        Side::Volume(place) => Ok(place),
        Side::Host(_) => {
            Err(Failure::bare("neither side is in a volume: write one as VOLUME:/path"))
        }
    });
    let places = places.collect::<Outcome<Vec<Place>>>()?;
    streams::check_open(path)?;
    output::refuse_volume(path)?;
    output::clean_up_when_interrupted()?;
    if places.len() > 1 && !path.is_dir() {
        return Err(no_directory(path.display(), &format!("mkdir {}", path.display())));
    }
    let is_one = places.len() == 1;
    // What is in one volume has links among itself.
    places.chunk_by(|one, next| one.volume == next.volume).try_for_each(|places| {
        with_volume(&places[0].volume, true, |volume| {
            let mut copier = from_volume::Copier::new(volume, args.recursive, tally);
            places.iter().try_for_each(|place| {
                let copied = copier.copy(place, path);
                if is_one { copied } else { copier.tally.go_on(copied) }
            })
        })
    })
}

fn no_directory(shown: impl std::fmt::Display, remedy: &str) -> Failure {
    Failure::new(shown, format!("no such directory, which several sources need: {remedy}"))
}

fn both_sides(place: &Place) -> Failure {
    Failure::new(place, "both sides are in volumes: copy to the host first")
}
