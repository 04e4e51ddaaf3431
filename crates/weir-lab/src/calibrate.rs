//! `weir lab calibrate`: does the lab agree with fio on the same directory?
//!
//! Both run the same job in turns (lab, fio, lab, fio): appends of 64 KiB with an fsync after each,
//! and small files that are synced before they are closed. The lab claims to be within
//! [`TOLERANCE_PERCENT`]; when it is not, it says so and fails.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use serde_json::Value;

use crate::disk::registry::{Registry, Resource};
use crate::error::{IoContext, LabError, LabResult};
use crate::experiments::fsmark::{Fsmark, FsmarkOptions};
use crate::experiments::fsync::{FsyncJobs, FsyncOptions};
use crate::experiments::{Case, Env, Experiment, load};
use crate::measure::device::disk_of;
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
    // Warnings may precede the JSON.
    let json = text.find('{').map_or("", |at| &text[at..]);
    serde_json::from_str(json).map_err(|e| LabError::Command {
        command: "fio".into(),
        message: format!("{e}; {}", String::from_utf8_lossy(&out.stderr).trim()),
    })
}

fn job(report: &Value) -> LabResult<&Value> {
    report.pointer("/jobs/0").ok_or_else(|| LabError::Command {
        command: "fio".into(),
        message: "no job in its report".into(),
    })
}

fn fio_appends(dir: &Path) -> LabResult<f64> {
    let runtime = format!("--runtime={SECONDS}");
    let report = fio(dir, &["--rw=write", "--bs=64k", "--size=1g", "--fsync=1", &runtime])?;
    let bytes = job(&report)?.pointer("/write/bw_bytes").and_then(Value::as_f64).unwrap_or(0.0);
    Ok(bytes / 1_048_576.0)
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
    let ms = job.get("job_runtime").and_then(Value::as_f64).unwrap_or(0.0);
    let ios = job.pointer("/write/total_ios").and_then(Value::as_f64).unwrap_or(0.0);
    Ok(ios / ms.max(1.0) * 1e3)
}

fn own(env: &Env<'_>, experiment: &dyn Experiment, case: &Case, metric: &str) -> LabResult<f64> {
    load::settle(env)?;
    let result = experiment.run(env, case)?;
    let found = result.metrics.iter().find(|m| m.name == metric).map(|m| m.value);
    found.ok_or_else(|| LabError::BadOption(format!("no metric {metric}")))
}

/// Runs the calibration and prints it; true when the lab agrees with fio.
pub fn run(
    dir: &Path,
    rounds: usize,
    registry: &Arc<Registry>,
    cancel: &Cancel,
) -> LabResult<bool> {
    if find_tool("fio").is_none() {
        return Err(LabError::ToolMissing { tool: "fio", package: "fio" });
    }
    let root = dir
        .canonicalize()
        .during(|| format!("opening {}", dir.display()))?
        .join(format!("weir-lab-calibrate-{}", std::process::id()));
    registry.add(Resource::Dir { path: root.clone() })?;
    std::fs::create_dir_all(&root).during(|| format!("creating {}", root.display()))?;
    let fio_dir = root.join("fio");
    let fs = Arc::new(MountedFs::new(root.clone(), None, Cold::Advise));
    let env = Env { fs, seed: 1, quick: true, cancel, registry, daemons: &Vec::new };
    let appends = FsyncJobs::new(&FsyncOptions { jobs: vec![1], seconds: Some(SECONDS) }, true);
    let append_case = Case::new("seq").with("jobs", 1);
    let small = Fsmark::new(
        &FsmarkOptions {
            files: Some(SMALL_FILES),
            iterations: Some(1),
            threads: vec![1],
            ..FsmarkOptions::default()
        },
        true,
        false,
    );
    let small_case = Case::new("each").with("threads", 1);

    let mut pairs: [(&str, &str, Vec<f64>, Vec<f64>); 2] = [
        ("fsync seq, 1 job", "MiB/s", Vec::new(), Vec::new()),
        ("fsmark each, 1 thread", "files/s", Vec::new(), Vec::new()),
    ];
    let disks: Vec<_> = disk_of(&root).into_iter().collect();
    let watch = DisturbanceWatch::start(&disks);
    let fresh = || -> LabResult<()> {
        let _ = std::fs::remove_dir_all(&fio_dir);
        std::fs::create_dir_all(&fio_dir).during(|| format!("creating {}", fio_dir.display()))?;
        load::settle(&env)
    };
    for round in 0..rounds.max(1) {
        // Whoever goes first meets another state of the disk: take turns.
        for turn in [round % 2, (round + 1) % 2] {
            cancel.check()?;
            if turn == 0 {
                pairs[0].2.push(own(&env, &appends, &append_case, "mib_per_s")?);
                pairs[1].2.push(own(&env, &small, &small_case, "files_per_s")?);
            } else {
                fresh()?;
                pairs[0].3.push(fio_appends(&fio_dir)?);
                fresh()?;
                pairs[1].3.push(fio_small_files(&fio_dir)?);
            }
        }
    }
    let watched = watch.stop().verdict();
    let mut holds = true;
    for (what, unit, ours, theirs) in &pairs {
        let (Some(a), Some(b), Some(ratio)) =
            (Spread::of(ours), Spread::of(theirs), Spread::of_ratios(ours, theirs))
        else {
            continue;
        };
        let within = (ratio.median - 1.0).abs() * 100.0 <= TOLERANCE_PERCENT;
        holds &= within;
        println!(
            "{what:<22} lab {:.0} ({:.0}..{:.0})  fio {:.0} ({:.0}..{:.0}) {unit}  ratio {:.3} ({:.3}..{:.3})  {}",
            a.median,
            a.min,
            a.max,
            b.median,
            b.min,
            b.max,
            ratio.median,
            ratio.min,
            ratio.max,
            if within { "agrees" } else { "DOES NOT AGREE within 10 %" }
        );
    }
    if let Some(said) = watched {
        // fio itself runs as a child and is not counted as foreign.
        println!("note: disturbed: {said}");
    }
    Ok(holds)
}
