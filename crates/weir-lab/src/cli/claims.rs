//! `weir lab claims`: everything that the claims about Weir's speed need, in one command.
//!
//! On a plain disk: *fsmark*, *fsync*, *checkpoint*, *foundation* and *tickets* as far as a claim rests on
//! them; then *fsmark* on a disk whose flush takes 2 ms. Two reports, and a table with a line per claim.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use super::{LabError, LabResult, RunArgs, Session, Setup, make_report, publish};
use crate::experiments::checkpoint::{Checkpoint, CheckpointOptions};
use crate::experiments::foundation::{Foundation, FoundationOptions};
use crate::experiments::fsmark::{Fsmark, FsmarkOptions};
use crate::experiments::fsync::{FsyncJobs, FsyncOptions};
use crate::experiments::tickets::{Tickets, TicketsOptions};
use crate::experiments::{Experiment, Size};
use crate::report::claims_table;
use crate::run::Planned;
use crate::target::TargetSpec;

const SLOW_DISK: &str = "slow:2000";
const ON: [&str; 6] = ["xfs", "ext4", "btrfs", "weir", "weir-mount", "raw"];
const ON_SLOW: [&str; 4] = ["xfs", "ext4", "btrfs", "weir"];

/// Runs both parts, or the one whose disk was asked for.
pub fn run(args: &RunArgs) -> LabResult<ExitCode> {
    let args = RunArgs { medium: !args.quick, ..args.clone() };
    let mut parts: Vec<(RunArgs, Vec<Planned>)> = Vec::new();
    let one_disk = args.disk.is_some();
    let slow = args.disk.as_deref().is_some_and(|d| d.starts_with("slow:"));
    if !slow {
        parts.push((part(&args, "plain", &ON, None), on_plain(args.loads())));
    }
    if slow || !one_disk {
        let suffix = (!one_disk).then_some("slow");
        parts.push((part(&args, SLOW_DISK, &ON_SLOW, suffix), on_slow(args.loads())));
    }
    // What is wrong with the second part should be known before the first has run.
    let checked = parts.iter().map(|(a, _)| Setup::of(a)).collect::<LabResult<Vec<Setup>>>()?;
    let session = Session::begin()?;
    let mut reports = Vec::new();
    let (mut complete, mut interrupted) = (true, false);
    for ((args, planned), setup) in parts.into_iter().zip(checked) {
        let made = make_report(&args, setup, planned, &session)?;
        publish(&made.report, args.json.as_deref(), args.html.as_deref())?;
        complete &= made.complete;
        interrupted = made.interrupted;
        reports.push(made.report);
        if interrupted {
            break;
        }
    }
    super::say(&claims_table::render(&reports));
    if interrupted {
        return Err(LabError::Cancelled);
    }
    Ok(if complete { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The options of a part: its disk and targets, and files of its own.
fn part(args: &RunArgs, disk: &str, on: &[&str], suffix: Option<&str>) -> RunArgs {
    let named = |path: &Option<PathBuf>| path.as_deref().map(|p| with_suffix(p, suffix));
    RunArgs {
        on: if args.on.is_empty() {
            on.iter().map(|t| (*t).to_owned()).collect()
        } else {
            args.on.clone()
        },
        disk: Some(args.disk.clone().unwrap_or_else(|| disk.to_owned())),
        rounds: args.rounds.or(args.minutes.is_none().then_some(if args.quick { 1 } else { 3 })),
        // The database of checkpoint, and room to age in.
        size: args.size.clone().or((disk == "plain" && !args.quick).then(|| "10G".to_owned())),
        json: named(&args.json),
        html: named(&args.html),
        ..args.clone()
    }
}

/// `claims.json` becomes `claims-slow.json`.
fn with_suffix(path: &Path, suffix: Option<&str>) -> PathBuf {
    let Some(suffix) = suffix else { return path.to_owned() };
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let extension = path.extension().map_or(String::new(), |e| format!(".{}", e.to_string_lossy()));
    path.with_file_name(format!("{stem}-{suffix}{extension}"))
}

fn fsmark(files: u64, threads: &[u64], depth: &[u64]) -> Fsmark {
    let options = FsmarkOptions {
        files: Some(files),
        threads: threads.to_vec(),
        depth: depth.to_vec(),
        iterations: Some(1),
        ..FsmarkOptions::default()
    };
    Fsmark::new(&options, Size::Full, false)
}

fn planned(experiment: impl Experiment + 'static, on: &[TargetSpec], modes: &[&str]) -> Planned {
    Planned {
        on: on.to_vec(),
        only_modes: modes.iter().map(|m| (*m).to_owned()).collect(),
        ..Planned::whole(Box::new(experiment))
    }
}

fn on_plain(size: Size) -> Vec<Planned> {
    use TargetSpec::{Btrfs, Ext4, Raw, Weir, WeirLoop, WeirMount, WeirMountLoop, Xfs};
    let files = size.pick(1000, 6000, 6000);
    let library = [Xfs, Ext4, Btrfs, Weir, WeirLoop];
    let every = [Xfs, Ext4, Btrfs, Weir, WeirLoop, WeirMount, WeirMountLoop];
    let seconds = Some(size.pick(0.5, 1.0, 1.0));
    let fsync = FsyncOptions { jobs: vec![1, 2, 4, 8, 16], seconds };
    // The claim is about 1.5 GiB.
    let checkpoint_size = size.pick(Size::Quick, Size::Full, Size::Full);
    let checkpoint = || Checkpoint::new(&CheckpointOptions::default(), checkpoint_size);
    let during = ["quiet", "end", "trickle", "async"];
    let foundation = || Foundation::new(&FoundationOptions::default(), size);
    let plain = ["create-fsync", "append-64k", "cached-read", "buffered-4k", "-1m", "untar"];
    vec![
        planned(fsmark(files, &[1, 4], &[64]), &every, &["pass"]),
        planned(fsmark(2 * files, &[1], &[64, 256, 1024, 4096]), &library, &["=async"]),
        planned(FsyncJobs::new(&fsync, size), &every, &["=seq", "=rand"]),
        // The p99.9 of log appends is the fourth slowest of a round, so it takes more of them. How XFS does is for comparison: a claim is
        // about a quiet run.
        Planned { times: 2, most_rounds: 6, ..planned(checkpoint(), &[Weir], &during) },
        Planned { most_rounds: 1, ..planned(checkpoint(), &[Xfs], &during) },
        planned(foundation(), &[Xfs, Weir, WeirLoop, WeirMount, WeirMountLoop, Raw], &plain),
        // A million files need no repetition, and nothing to compare with.
        Planned { most_rounds: 1, ..planned(foundation(), &[Weir], &["director", "recovery"]) },
        planned(Tickets::new(&TicketsOptions::default(), size), &[Weir, WeirLoop], &[]),
    ]
}

fn on_slow(size: Size) -> Vec<Planned> {
    let files = size.pick(2048, 12_288, 12_288);
    let one_by_one = size.pick(150, 600, 600);
    vec![
        planned(fsmark(one_by_one, &[1], &[64]), &[], &["pass"]),
        planned(fsmark(one_by_one / 4, &[4, 16], &[64]), &[], &["pass"]),
        planned(fsmark(files, &[1], &[64, 1024, 4096]), &[], &["=async"]),
        planned(fsmark(files / 16, &[16], &[32, 64]), &[], &["=async"]),
    ]
}
