//! `weir fsck`: checks everything. The checking is the engine's ([`weir::check`]); here are the
//! options, the report for people and programs, and the exit codes.
//!
//! The check itself changes nothing. When the volume was not closed and all is well, the log is
//! replayed for good afterwards, by opening and closing the volume: the same recovery has then just
//! succeeded in memory.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use serde_json::{Value, json};
use weir::check::{CheckOptions, CheckReport, Problem, Stage, check};

use crate::failure::{FAILED, FSCK_ERRORS_LEFT, FSCK_OPERATIONAL, Failure, harmless};
use crate::open::{once_closed, print, print_json, with_volume};
use crate::progress::{Progress, Unit};
use crate::show;
use crate::size;

/// Exit code: something was corrected, nothing is left.
const CORRECTED: u8 = 1;

/// Arguments of `weir fsck`.
#[derive(Debug, Args)]
#[command(
    long_about = "Verify every checksum, reference, link count, bitmap and size of an unmounted \
                  volume. If it was not closed, the log is replayed in memory first; when all is \
                  well then, it is replayed for good. Nothing else is ever changed.",
    after_help = "Exit codes, as in fsck(8): 0 no errors, 1 no errors after the log was replayed, \
        4 errors found, 8 could not check, 16 wrong usage\n\n\
        Examples:\n  \
        weir fsck disk.weir\n  \
        weir fsck --dry-run disk.weir\n  \
        weir fsck --json disk.weir | jq .problems"
)]
pub struct FsckArgs {
    /// A file or block device
    #[arg(value_name = "VOL")]
    pub volume: PathBuf,
    /// Change nothing at all: leave a log as it is
    #[arg(long, short = 'n')]
    pub dry_run: bool,
    /// Metadata only: do not read the files' data
    #[arg(long)]
    pub no_data: bool,
    /// List this many problems at most; all are counted
    #[arg(long, value_name = "COUNT", default_value_t = 1000)]
    pub max_problems: usize,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: &FsckArgs) -> Result<ExitCode, Failure> {
    let path = args.volume.as_path();
    let fail = |error: weir::Error| Failure::volume(path, &error).with_code(FSCK_OPERATIONAL);
    let report = checked(args).map_err(fail)?;
    let replay = report.is_clean() && report.log_replayed && !args.dry_run;
    if replay {
        let closed = with_volume(path, false, |_| Ok(()));
        closed.map_err(|failure| failure.with_code(FSCK_OPERATIONAL))?;
    }
    let printed = if args.json {
        print_json(&as_json(&report, replay))
    } else {
        print(as_text(path, &report, replay).as_bytes())
    };
    printed.map_err(unprinted)?;
    let code = match (report.is_clean(), replay) {
        (false, _) => FSCK_ERRORS_LEFT,
        (true, true) => CORRECTED,
        (true, false) => 0,
    };
    Ok(ExitCode::from(code))
}

/// A report that nobody saw: not the code that tells of a log replayed. A reader that went away
/// keeps its own.
fn unprinted(failure: Failure) -> Failure {
    if failure.code == FAILED { failure.with_code(FSCK_OPERATIONAL) } else { failure }
}

fn checked(args: &FsckArgs) -> weir::Result<CheckReport> {
    let progress = Arc::new(Progress::new("checking", Unit::Items, Some(0)));
    let reporter = Arc::clone(&progress);
    let options = CheckOptions {
        verify_data: !args.no_data,
        max_problems: args.max_problems,
        on_progress: Some(Arc::new(move |done, all| {
            reporter.set_total(all);
            reporter.set(done);
        })),
    };
    once_closed(&args.volume, || check(&args.volume, &options))
}

fn as_text(path: &Path, report: &CheckReport, replayed: bool) -> String {
    let shown = path.display();
    let mut lines = Vec::new();
    lines.extend(report.problems.iter().map(|problem| format!("{shown}: {problem}")));
    let unlisted = report.problem_count.saturating_sub(report.problems.len() as u64);
    if unlisted > 0 {
        let problems = show::counted(unlisted, "more problem", "more problems");
        lines.push(format!("{shown}: and {problems}"));
    }
    lines.extend(report.warnings.iter().map(|warning| format!("{shown}: note: {warning}")));
    let counts = &report.counts;
    let frames = show::counted(report.log_frames, "frame", "frames");
    let log = match (report.log_replayed, replayed) {
        (true, true) => format!(", {frames} of the log replayed"),
        (true, false) => format!(", {frames} of the log to replay"),
        (false, _) if report.cleanly_closed => String::new(),
        (false, _) => ", not closed but nothing to replay".to_owned(),
    };
    let verdict = match report.problem_count {
        0 => "clean".to_owned(),
        1 => "1 PROBLEM".to_owned(),
        count => format!("{count} PROBLEMS"),
    };
    let named = counts.files + counts.directories + counts.symlinks;
    let special = match counts.inodes.saturating_sub(named) {
        0 => String::new(),
        others => format!(", {}", show::counted(others, "special file", "special files")),
    };
    lines.push(format!(
        "{shown}: {verdict}: {}, {}, {}{special}, {} in use, {} of data verified{log}",
        show::counted(counts.files, "file", "files"),
        show::counted(counts.directories, "directory", "directories"),
        show::counted(counts.symlinks, "symlink", "symlinks"),
        size::show(counts.file_blocks.saturating_mul(4096)),
        size::show(counts.verified_blocks.saturating_mul(4096)),
    ));
    // Texts of problems have names in them.
    lines.iter().map(harmless).collect::<Vec<_>>().join("\n") + "\n"
}

fn problem_json(problem: &Problem) -> Value {
    json!({
        "kind": problem.kind.name(),
        "place": problem.place.to_string(),
        "after_recovery": problem.stage == Stage::Recovered,
        "text": problem.text,
    })
}

fn as_json(report: &CheckReport, replayed: bool) -> Value {
    let counts = &report.counts;
    json!({
        "clean": report.is_clean(),
        "problem_count": report.problem_count,
        "problems": report.problems.iter().map(problem_json).collect::<Vec<_>>(),
        "warnings": report.warnings.iter().map(problem_json).collect::<Vec<_>>(),
        "cleanly_closed": report.cleanly_closed,
        "log_frames": report.log_frames,
        "log_replayed": replayed,
        "counts": {
            "inodes": counts.inodes,
            "files": counts.files,
            "directories": counts.directories,
            "symlinks": counts.symlinks,
            "orphans": counts.orphans,
            "entries": counts.entries,
            "attributes": counts.attributes,
            "extents": counts.extents,
            "file_blocks": counts.file_blocks,
            "nodes": counts.nodes,
            "items": counts.items,
            "verified_blocks": counts.verified_blocks,
        },
    })
}
