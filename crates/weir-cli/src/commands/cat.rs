//! `weir cat`: prints files without a mount.

use clap::Args;
use weir::{OpenFlags, Volume};

use crate::failure::{Failure, Outcome, each};
use crate::open::{check_output, print, with_volume};
use crate::place::{Place, place_parser};

const CHUNK_BYTES: usize = 1 << 20;

/// Arguments of `weir cat`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  weir cat disk.weir:/etc/fstab disk.weir:/etc/hosts")]
pub struct CatArgs {
    /// A file in a volume
    #[arg(value_name = "VOL:/PATH", value_parser = place_parser(), required = true)]
    pub places: Vec<Place>,
}

/// Runs the command.
pub fn run(args: &CatArgs) -> Outcome {
    // Of files that are empty nothing would be written that could fail.
    check_output()?;
    each(&args.places, |place| with_volume(&place.volume, true, |volume| cat(volume, place)))
}

fn cat(volume: &Volume, place: &Place) -> Outcome {
    let fail = |error: weir::Error| Failure::inside(place, &error);
    let file = volume.open_file(place.named_path(), OpenFlags::READ).map_err(fail)?;
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut offset = 0;
    loop {
        let read_bytes = file.read_at(offset, &mut buffer).map_err(fail)?;
        if read_bytes == 0 {
            return Ok(());
        }
        print(&buffer[..read_bytes])?;
        offset += read_bytes as u64;
    }
}
