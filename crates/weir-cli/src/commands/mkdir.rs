//! `weir mkdir`: makes directories without a mount.

use clap::Args;
use weir::{Error, FileType, NewInode, Volume};

use crate::failure::{Failure, Outcome, each};
use crate::open::with_volume;
use crate::place::{Place, place_parser};

/// Arguments of `weir mkdir`.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  weir mkdir disk.weir:/data\n  weir mkdir -p -m 700 disk.weir:/home/ada/.ssh"
)]
pub struct MkdirArgs {
    /// The new directory, in a volume
    #[arg(value_name = "VOL:/PATH", value_parser = place_parser(), required = true)]
    pub places: Vec<Place>,
    /// Make what is missing on the way; an existing directory is fine
    #[arg(short, long)]
    pub parents: bool,
    /// Permission bits, octal
    #[arg(short, long, value_name = "MODE", value_parser = parse_mode, default_value = "755")]
    pub mode: u32,
}

fn parse_mode(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| *mode <= 0o7777)
        .ok_or_else(|| "not an octal mode: use something like 755".to_owned())
}

/// Runs the command.
pub fn run(args: &MkdirArgs) -> Outcome {
    each(&args.places, |place| {
        with_volume(&place.volume, false, |volume| {
            mkdir(volume, place, args).map_err(|error| Failure::inside(place, &error))
        })
    })
}

/// A directory owned by whoever runs the command.
pub fn new_directory(permissions: u32) -> NewInode {
    NewInode {
        uid: rustix::process::getuid().as_raw(),
        gid: rustix::process::getgid().as_raw(),
        ..NewInode::new(FileType::Directory, permissions)
    }
}

fn mkdir(volume: &Volume, place: &Place, args: &MkdirArgs) -> weir::Result<()> {
    if !args.parents {
        if place.name().is_none() {
            // The root, and what leads back to a directory.
            return volume.metadata(&place.path).and(Err(Error::Exists));
        }
        let (dir, name) = volume.resolve_parent(&place.path)?;
        return volume.make(dir, &name, &new_directory(args.mode)).map(|_| ());
    }
    let ends = place.path.iter().enumerate().skip(1).filter(|(_, byte)| **byte == b'/');
    let prefixes = ends.map(|(end, _)| end).chain([place.path.len()]);
    for end in prefixes {
        let path = &place.path[..end];
        let last = end == place.path.len();
        match volume.metadata(path) {
            Ok(attr) if attr.file_type == FileType::Directory => {}
            Ok(_) if last => return Err(Error::Exists),
            Ok(_) => return Err(Error::NotDirectory),
            Err(Error::NotFound) => {
                let (dir, name) = volume.resolve_parent(path)?;
                let permissions = if last { args.mode } else { 0o755 };
                volume.make(dir, &name, &new_directory(permissions))?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
