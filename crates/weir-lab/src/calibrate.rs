//! `weir lab calibrate`: does the lab agree with fio on the same directory?
//!
//! Both run the same two jobs in turns: appends of 64 KiB with an fsync after each, and small files that
//! are synced before they are closed. A round is one run of each, back to back, first the one and then the
//! other; the ratio is taken within the round. Only rounds without disturbance by others count, and the
//! calibration goes on until there are enough of them. The lab claims to be within [`TOLERANCE_PERCENT`]
//! of fio; when it is not it says so and fails, and when the machine does not hold still it says that and
//! judges nothing.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use serde_json::Value;

use crate::cli::say;
use crate::disk::registry::Registry;
use crate::error::{IoContext, LabError, LabResult};
use crate::experiments::fsmark::{Fsmark, FsmarkOptions};
use crate::experiments::fsync::{FsyncJobs, FsyncOptions};
use crate::experiments::{Case, Env, Experiment, Size, load};
use crate::measure::device::{BlockDevice, disk_of};
use crate::measure::{DisturbanceWatch, Spread};
use crate::run::Cancel;
use crate::target::mounted::{Cold, MountedFs};
use crate::target::stage::find_tool;

/// How far the lab and fio may be apart.
pub const TOLERANCE_PERCENT: f64 = 10.0;

const SMALL_FILES: u64 = 1500;
const SECONDS: f64 = 1.0;

fn fio(dir: &Path, args: &[&str]) -> LabResult<Value> {
    let out = Command::new("fio")
        .args(["--name=calibrate", "--output-format=json", "--ioengine=psync", "--fallocate=none"])
        .arg(format!("--directory={}", dir.display()))
        .args(args)
        .output()
        .during(|| "running fio".into())?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let said = String::from_utf8_lossy(&out.stderr).trim().replace('\n', "; ");
    if !out.status.success() {
        return Err(LabError::Command { command: "fio".into(), message: said });
    }
    // Warnings may precede the JSON.
    let json = text.find('{').map_or("", |at| &text[at..]);
    serde_json::from_str(json)
        .map_err(|e| LabError::Command { command: "fio".into(), message: format!("{e}; {said}") })
}

fn job(report: &Value) -> LabResult<&Value> {
    report.pointer("/jobs/0").ok_or_else(|| LabError::Command {
        command: "fio".into(),
        message: "no job in its report".into(),
    })
}

/// A figure of a job. A job that has done nothing was no round, and no disturbance of one.
fn number(job: &Value, pointer: &str) -> LabResult<f64> {
    job.pointer(pointer).and_then(Value::as_f64).filter(|n| *n > 0.0).ok_or_else(|| {
        LabError::Command { command: "fio".into(), message: format!("no {pointer} in its report") }
    })
}

fn fio_appends(dir: &Path) -> LabResult<f64> {
    let runtime = format!("--runtime={SECONDS}");
    let report = fio(dir, &["--rw=write", "--bs=64k", "--size=1g", "--fsync=1", &runtime])?;
    Ok(number(job(&report)?, "/write/bw_bytes")? / 1_048_576.0)
}

fn fio_small_files(dir: &Path) -> LabResult<f64> {
    let files = format!("--nrfiles={SMALL_FILES}");
    let report = fio(
        dir,
        &[
            "--rw=write",
            "--bs=4k",
            "--filesize=4k",
            &files,
            "--openfiles=1",
            "--create_on_open=1",
            "--file_service_type=sequential",
            // One write per file, so this is one fsync per file; `fsync_on_close` makes fio flush
            // three times per file where the same calls by hand need two.
            "--fsync=1",
        ],
    )?;
    let job = job(&report)?;
    Ok(number(job, "/write/total_ios")? / number(job, "/job_runtime")? * 1e3)
}

fn own(env: &Env<'_>, experiment: &dyn Experiment, case: &Case, metric: &str) -> LabResult<f64> {
    load::settle(env)?;
    let result = experiment.run(env, case)?;
    let found = result.metrics.iter().find(|m| m.name == metric).map(|m| m.value);
    found.ok_or_else(|| LabError::BadOption(format!("no metric {metric}")))
}

/// What a calibration found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Within the tolerance.
    Agrees,
    /// Beyond it, on a quiet machine.
    Differs,
    /// There were not enough undisturbed rounds to tell.
    Disturbed,
}

/// Fewer undisturbed rounds than this say nothing.
const FEWEST_ROUNDS: usize = 5;
/// Tries for each undisturbed round that is wanted.
const TRIES: usize = 3;

/// One round of one job: what the lab and fio measured, and what disturbed it.
#[derive(Clone, Debug)]
struct Round {
    lab: f64,
    fio: f64,
    disturbed: Option<String>,
}

/// Judges the rounds of a job: the median ratio of those that nothing disturbed.
fn judge(rounds: &[Round]) -> (Verdict, Option<Spread>) {
    let quiet: Vec<&Round> = rounds.iter().filter(|r| r.disturbed.is_none()).collect();
    let lab: Vec<_> = (1..).zip(quiet.iter().map(|r| r.lab)).collect();
    let fio: Vec<_> = (1..).zip(quiet.iter().map(|r| r.fio)).collect();
    let ratio = Spread::of_ratios(&lab, &fio);
    let verdict = match ratio {
        Some(r) if quiet.len() >= FEWEST_ROUNDS => {
            if (r.median - 1.0).abs() * 100.0 <= TOLERANCE_PERCENT {
                Verdict::Agrees
            } else {
                Verdict::Differs
            }
        }
        _ => Verdict::Disturbed,
    };
    (verdict, ratio)
}

/// Runs a job with the lab's own experiments.
type OwnRun = dyn Fn(&Env<'_>) -> LabResult<f64>;

/// A job as both can run it.
struct Job {
    what: &'static str,
    unit: &'static str,
    lab: Box<OwnRun>,
    fio: fn(&Path) -> LabResult<f64>,
}

fn jobs() -> [Job; 2] {
    let appends =
        FsyncJobs::new(&FsyncOptions { jobs: vec![1], seconds: Some(SECONDS) }, Size::Quick);
    let append_case = Case::new("seq").with("jobs", 1);
    let options = FsmarkOptions {
        files: Some(SMALL_FILES),
        iterations: Some(1),
        threads: vec![1],
        ..FsmarkOptions::default()
    };
    let small = Fsmark::new(&options, Size::Quick, false);
    let small_case = Case::new("each").with("threads", 1);
    [
        Job {
            what: "fsync seq, 1 job",
            unit: "MiB/s",
            lab: Box::new(move |env| own(env, &appends, &append_case, "mib_per_s")),
            fio: fio_appends,
        },
        Job {
            what: "fsmark each, 1 thread",
            unit: "files/s",
            lab: Box::new(move |env| own(env, &small, &small_case, "files_per_s")),
            fio: fio_small_files,
        },
    ]
}

fn round(
    job: &Job,
    number: usize,
    env: &Env<'_>,
    fio_dir: &Path,
    disks: &[BlockDevice],
) -> LabResult<Round> {
    // Left by the round before; its removal must not be part of this one.
    let _ = std::fs::remove_dir_all(fio_dir);
    std::fs::create_dir_all(fio_dir).during(|| format!("creating {}", fio_dir.display()))?;
    load::settle(env)?;
    let watch = DisturbanceWatch::start(disks);
    let (lab, fio);
    // Whoever goes first meets another state of the disk: take turns.
    if number.is_multiple_of(2) {
        lab = (job.lab)(env)?;
        load::settle(env)?;
        fio = (job.fio)(fio_dir)?;
    } else {
        fio = (job.fio)(fio_dir)?;
        load::settle(env)?;
        lab = (job.lab)(env)?;
    }
    Ok(Round { lab, fio, disturbed: watch.stop().verdict() })
}

/// Runs the calibration and prints it.
pub fn run(
    dir: &Path,
    rounds: usize,
    registry: &Arc<Registry>,
    cancel: &Cancel,
) -> LabResult<Verdict> {
    if find_tool("fio").is_none() {
        return Err(LabError::ToolMissing { tool: "fio", package: "fio" });
    }
    let root = dir
        .canonicalize()
        .during(|| format!("opening {}", dir.display()))?
        .join(format!("weir-lab-calibrate-{}", std::process::id()));
    registry.make_dir(&root)?;
    let fio_dir = root.join("fio");
    let fs = Arc::new(MountedFs::new(root.clone(), None, Cold::Advise));
    let env = Env { fs, seed: 1, cancel, registry, daemons: &Vec::new, disks: &[] };
    let disks: Vec<_> = disk_of(&root).into_iter().collect();
    let wanted = rounds.max(FEWEST_ROUNDS);
    let mut worst = Verdict::Agrees;
    for job in jobs() {
        let mut done: Vec<Round> = Vec::new();
        while done.iter().filter(|r| r.disturbed.is_none()).count() < wanted
            && done.len() < wanted * TRIES
        {
            cancel.check()?;
            done.push(round(&job, done.len(), &env, &fio_dir, &disks)?);
        }
        let verdict = judge(&done).0;
        print_job(&job, &done);
        worst = match (worst, verdict) {
            (Verdict::Differs, _) | (_, Verdict::Differs) => Verdict::Differs,
            (Verdict::Disturbed, _) | (_, Verdict::Disturbed) => Verdict::Disturbed,
            _ => Verdict::Agrees,
        };
    }
    Ok(worst)
}

fn print_job(job: &Job, rounds: &[Round]) {
    let (verdict, ratio) = judge(rounds);
    let quiet: Vec<&Round> = rounds.iter().filter(|r| r.disturbed.is_none()).collect();
    let side = |name: &str, value: fn(&Round) -> f64| {
        let values: Vec<f64> = quiet.iter().map(|r| value(r)).collect();
        Spread::of(&values).map_or(String::new(), |s| {
            format!("{name} {:.0} ({:.0}..{:.0}) {}  ", s.median, s.min, s.max, job.unit)
        })
    };
    let ratio = ratio
        .map_or(String::new(), |r| format!("ratio {:.3} ({:.3}..{:.3})  ", r.median, r.min, r.max));
    let line = format!(
        "{:<22} {}{}{ratio}{}\n",
        job.what,
        side("lab", |r| r.lab),
        side("fio", |r| r.fio),
        match verdict {
            Verdict::Agrees => format!("agrees within {TOLERANCE_PERCENT:.0} %"),
            Verdict::Differs => format!("DOES NOT AGREE within {TOLERANCE_PERCENT:.0} %"),
            Verdict::Disturbed => "NOT JUDGED: the machine is disturbed".into(),
        }
    );
    say(&line);
    let disturbed: Vec<&str> = rounds.iter().filter_map(|r| r.disturbed.as_deref()).collect();
    if let Some(last) = disturbed.last() {
        let (n, of) = (disturbed.len(), rounds.len());
        say(&format!(
            "    {n} of {of} rounds were disturbed and do not count, the last by {last}\n"
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(quiet: usize, ratio: f64, disturbed: usize) -> Vec<Round> {
        let quiet = (0..quiet).map(|i| {
            let fio = 100.0 + i as f64;
            Round { lab: fio * ratio, fio, disturbed: None }
        });
        let noisy = (0..disturbed).map(|_| Round {
            lab: 500.0,
            fio: 100.0,
            disturbed: Some("somebody".into()),
        });
        quiet.chain(noisy).collect()
    }

    #[test]
    fn a_report_of_fio_without_a_figure_is_an_error() {
        let job = serde_json::json!({"job_runtime": 12, "write": {"bw_bytes": 0}});
        assert!((number(&job, "/job_runtime").expect("there") - 12.0).abs() < 1e-9);
        for missing in ["/write/bw_bytes", "/write/total_ios"] {
            assert!(number(&job, missing).expect_err("none").to_string().contains(missing));
        }
    }

    #[test]
    fn only_quiet_rounds_are_judged() {
        assert_eq!(judge(&rounds(5, 1.09, 20)).0, Verdict::Agrees);
        assert_eq!(judge(&rounds(9, 0.91, 0)).0, Verdict::Agrees);
        assert_eq!(judge(&rounds(9, 1.11, 0)).0, Verdict::Differs);
        assert_eq!(judge(&rounds(9, 0.89, 3)).0, Verdict::Differs);
    }

    #[test]
    fn too_few_quiet_rounds_are_no_verdict() {
        assert_eq!(judge(&rounds(4, 1.0, 20)).0, Verdict::Disturbed);
        assert_eq!(judge(&[]).0, Verdict::Disturbed);
    }
}
