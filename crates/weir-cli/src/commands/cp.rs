//! `weir cp`: copies into and out of a volume without a mount.
//!
//! Mode, owner, times, extended attributes, symbolic links, hard links within what is copied, and
//! holes are kept. Owners and special files that an ordinary user may not make on the host are left
//! as they can be, with a word.

mod from_volume;
mod to_volume;

use std::ffi::OsString;

use clap::Args;

use crate::failure::{Failure, Outcome};
use crate::open::with_volume;
use crate::place::{Place, Side};
use crate::progress::{Progress, Unit};

/// Unit of copying.
const CHUNK_BYTES: usize = 1 << 20;

/// Arguments of `weir cp`.
#[derive(Debug, Args)]
#[command(
    long_about = "Copy into or out of an unmounted volume. One side is VOLUME:/path, the other a \
                  path of the host. As with cp, a destination that is a directory gets the source \
                  below it; what is there already is overwritten.",
    after_help = "Examples:\n  weir cp notes.txt disk.weir:/\n  weir cp -r ~/src disk.weir:/src\n  weir cp -r disk.weir:/src /tmp/copy\n  weir cp -r dir/. disk.weir:/     # what is in dir"
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
}

impl Tally {
    fn skip(&mut self, subject: impl std::fmt::Display, what: impl std::fmt::Display) {
        eprintln!("weir: {subject}: {what}");
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
    let destination = Side::parse(destination);
    let mut tally = Tally {
        progress: Progress::new("copied", Unit::Bytes, None),
        files: 0,
        bytes: 0,
        skipped: 0,
    };
    match destination {
        Side::Volume(place) => {
            let sources = sources.iter().map(|source| match Side::parse(source) {
                Side::Host(path) => Ok(path),
                Side::Volume(place) => Err(both_sides(&place)),
            });
            let sources = sources.collect::<Outcome<Vec<_>>>()?;
            for source in &sources {
                // Before the volume is touched.
                source.symlink_metadata().map_err(|error| Failure::host(source, &error))?;
            }
            with_volume(&place.volume, false, |volume| {
                sources.iter().try_for_each(|source| {
                    to_volume::copy(volume, source, &place, args.recursive, &mut tally)
                })
            })?;
        }
        Side::Host(path) => {
            for source in sources {
                let Side::Volume(place) = Side::parse(source) else {
                    return Err(Failure::bare(
                        "neither side is in a volume: write one as VOLUME:/path".to_owned(),
                    ));
                };
                with_volume(&place.volume, true, |volume| {
                    from_volume::copy(volume, &place, &path, args.recursive, &mut tally)
                })?;
            }
        }
    }
    if tally.skipped > 0 {
        return Err(Failure::bare(format!(
            "{} files copied, {} not or not completely: see above",
            tally.files, tally.skipped
        )));
    }
    Ok(())
}

fn both_sides(place: &Place) -> Failure {
    Failure::new(place, "both sides are in volumes: copy to the host first")
}
