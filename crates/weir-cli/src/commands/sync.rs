//! `weir sync`: what `syncfs` would do, if the kernel told a FUSE server of it.

use std::path::PathBuf;

use clap::Args;
use rustix::fs::{XattrFlags, setxattr};
use rustix::io::Errno;

use crate::failure::{Failure, Outcome};

/// Arguments of `weir sync`.
#[derive(Debug, Args)]
#[command(
    long_about = "Make everything written through a mount so far durable. The kernel does not \
                  pass sync and syncfs on to a FUSE server: after sync, run this.",
    after_help = "Example:\n  tar -C /mnt -xf tree.tar && weir sync /mnt"
)]
pub struct SyncArgs {
    /// A mount point, or any file below one
    #[arg(value_name = "DIR", required = true)]
    pub paths: Vec<PathBuf>,
}

/// Runs the command.
pub fn run(args: &SyncArgs) -> Outcome {
    // Pages that the kernel still keeps (a writeback cache, mapped files) have to come first.
    rustix::fs::sync();
    for path in &args.paths {
        setxattr(path, "weir.sync", b"", XattrFlags::empty()).map_err(|error| match error {
            Errno::OPNOTSUPP | Errno::PERM => {
                Failure::new(path.display(), "not on a Weir mount: use sync")
            }
            error => Failure::host(path, &error.into()),
        })?;
    }
    Ok(())
}
