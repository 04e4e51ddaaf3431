//! `weir barrier`: everything before is durable before anything after.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use weir_mount::client;

use crate::commands::sync::{open_asked, refused};
use crate::failure::{Failure, Outcome};
use crate::open::{print, print_json};

/// How often a wait asks again: the server answers after a minute at the latest.
const WAIT_US: u64 = 60_000_000;

/// Arguments of `weir barrier`.
#[derive(Debug, Args)]
#[command(
    long_about = "Raise a barrier on a mounted volume: after a crash, nothing that was done after it \
                  is there unless everything that was done before it is. Does not wait, and does \
                  not make anything durable by itself. Prints the operation (LSN) whose durability \
                  means that of everything before the barrier.",
    after_help = "Examples:\n  weir barrier /mnt\n  weir barrier --wait /mnt   # ends when it is durable"
)]
pub struct BarrierArgs {
    /// A mount point, or any file below one
    #[arg(value_name = "DIR")]
    pub path: PathBuf,
    /// Make it durable, and wait for that
    #[arg(long, short)]
    pub wait: bool,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: &BarrierArgs) -> Outcome {
    let path = args.path.as_path();
    let file = open_asked(path)?;
    let fail = |error: std::io::Error| refused(path, &error);
    // What the kernel still has was done before the barrier, too; it says which of it could not be sent.
    let lsn = client::barrier(&file, weir_mount::ioctl::BARRIER_MAPPED).map_err(fail)?;
    rustix::fs::syncfs(&file).map_err(|error| Failure::host(path, &error.into()))?;
    if args.wait {
        client::wait_lsn(&file, lsn, WAIT_US, weir_mount::ioctl::WAIT_PUSH).map_err(fail)?;
    }
    let durable = client::lsn(&file).map_err(fail)?.durable;
    if args.json {
        return print_json(&json!({ "lsn": lsn, "durable_lsn": durable }));
    }
    let state = if durable >= lsn { "durable" } else { "not durable yet" };
    print(format!("barrier at lsn {lsn}, {state} (durable up to {durable})\n").as_bytes())
}
