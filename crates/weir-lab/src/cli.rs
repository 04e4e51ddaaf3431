//! The command line of `weir lab`, embedded by the `weir` program and by `weir-lab`.

mod claims;

use std::fmt::Write;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::{Args, Subcommand};

use crate::calibrate::Verdict;
use crate::disk::awake::Awake;
use crate::disk::registry::{Registry, clean_stale, stale_files};
use crate::disk::{Disk, DiskSpec, limited_disk, make_run_dir, parse_amount, slow};
use crate::error::{IoContext, LabError, LabResult};
use crate::experiments::{self, Experiment, Size};
use crate::probe::{self, Floor};
use crate::report::schema::{Report, SCHEMA, skipped_groups};
use crate::report::{check, claims_table, compare, html, machine, picture, table};
use crate::run::{Cancel, Outcome, Plan, Planned, elapsed_text, run_plan};
use crate::sys::is_root;
use crate::target::stage::{StageOptions, check_dir, check_options, preflight};
use crate::target::{TargetSpec, hollow};

/// Measure what happens to latency, on any file system, side by side.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    weir lab all --quick --on xfs,ext4,btrfs,weir,weir-mount --html report.html\n  \
    weir lab fsmark --on dir:/srv --on dir:/mnt --json fsmark.json\n  \
    weir lab fsync --on ext4,weir --disk slow:2000\n  \
    weir lab all --medium --minutes 35 --on xfs,ext4,btrfs,weir,weir-mount --json report.json\n  \
    weir lab claims --json claims.json\n  \
    weir lab probe /srv\n  \
    weir lab compare old.json new.json --gate 10")]
pub struct LabArgs {
    #[command(subcommand)]
    command: LabCommand,
}

#[derive(Debug, Subcommand)]
enum LabCommand {
    /// List experiments, targets and disks
    List,
    /// Many small files made durable
    Fsmark {
        #[command(flatten)]
        run: RunArgs,
        #[command(flatten)]
        options: experiments::fsmark::FsmarkOptions,
    },
    /// Jobs that write and sync their own file
    Fsync {
        #[command(flatten)]
        run: RunArgs,
        #[command(flatten)]
        options: experiments::fsync::FsyncOptions,
    },
    /// A database writes back while others work
    Checkpoint {
        #[command(flatten)]
        run: RunArgs,
        #[command(flatten)]
        options: experiments::checkpoint::CheckpointOptions,
    },
    /// Reads that do not queue what is in the cache
    Fastread {
        #[command(flatten)]
        run: RunArgs,
        #[command(flatten)]
        options: experiments::fastread::FastreadOptions,
    },
    /// How fast writes enter the cache
    Ingest {
        #[command(flatten)]
        run: RunArgs,
        #[command(flatten)]
        options: experiments::ingest::IngestOptions,
    },
    /// What growth does to free space
    Aging {
        #[command(flatten)]
        run: RunArgs,
        #[command(flatten)]
        options: experiments::aging::AgingOptions,
    },
    /// A mixed load under memory pressure
    Simoop {
        #[command(flatten)]
        run: RunArgs,
        #[command(flatten)]
        options: experiments::simoop::SimoopOptions,
    },
    /// The plain paths: small files, appends, cached reads, streams, untar, a million names, recovery
    Foundation {
        #[command(flatten)]
        run: RunArgs,
        #[command(flatten)]
        options: experiments::foundation::FoundationOptions,
    },
    /// What an asynchronous sync costs whoever asks for it, and what it holds while it waits
    Tickets {
        #[command(flatten)]
        run: RunArgs,
        #[command(flatten)]
        options: experiments::tickets::TicketsOptions,
    },
    /// Durable transactions of programs that sync all the time, on a mount
    Programs {
        #[command(flatten)]
        run: RunArgs,
        #[command(flatten)]
        options: experiments::programs::ProgramsOptions,
    },
    /// All that the claims about Weir's speed need, on a plain and on a slow disk, and what became of each
    Claims {
        #[command(flatten)]
        run: RunArgs,
    },
    /// The seven published experiments, fsmark to simoop
    All {
        #[command(flatten)]
        run: RunArgs,
    },
    /// The floor of a directory's disk and of the machine, in a few seconds
    Probe {
        /// The directory
        dir: PathBuf,
        /// Write the figures as JSON
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
    },
    /// What changed between two reports by more than their spread
    Compare {
        /// The older report
        old: PathBuf,
        /// The newer report
        new: PathBuf,
        /// Fail when a metric got worse by more than this, beyond its spread
        #[arg(long, value_name = "PERCENT", value_parser = percent)]
        gate: Option<f64>,
    },
    /// What a report must show: known truths of kernel file systems, and the claims made for Weir
    Check {
        /// Reports
        #[arg(required = true)]
        reports: Vec<PathBuf>,
        /// Fail also when a claim does not hold, not only a truth
        #[arg(long)]
        claims: bool,
        /// Print the claims as a table for a document
        #[arg(long)]
        table: bool,
    },
    /// Draw a report's fsmark as one SVG, for a README
    Picture {
        /// The report
        report: PathBuf,
        /// The picture
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
        /// One panel above the other, for a narrow screen
        #[arg(long)]
        narrow: bool,
    },
    /// Render a report as one HTML file
    Html {
        /// The report
        report: PathBuf,
        /// The page
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
    },
    /// Check the lab against fio on a directory
    Calibrate {
        /// The directory
        dir: PathBuf,
        /// Undisturbed rounds wanted, lab and fio in turns
        #[arg(long, default_value_t = 9, value_parser = rounds)]
        rounds: usize,
    },
    /// Take away what a crashed run left mounted or attached
    Clean,
    /// Serve the slow-flush disk (started by the lab itself)
    #[command(hide = true)]
    SlowDisk {
        /// Where to mount it
        mount_point: PathBuf,
        /// Its size
        size_bytes: u64,
        /// Length of a flush
        flush_us: u64,
    },
    /// Serve a file system without content (started by the lab itself)
    #[command(hide = true)]
    Hollow {
        /// Where to mount it
        mount_point: PathBuf,
        /// Mount options
        options: String,
    },
}

/// Options that all experiments share.
#[allow(clippy::struct_excessive_bools)] // Each is a switch of the command line.
#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// Target, repeatable: dir:PATH, xfs, ext4, btrfs, weir, weir-mount, weir-loop, weir-mount-loop,
    /// hollow-mount, raw [default: weir, and dir: of the work directory]
    #[arg(long = "on", value_name = "TARGET", value_delimiter = ',')]
    on: Vec<String>,
    /// Directory for images and mount points
    #[arg(long, value_name = "DIR", default_value = ".")]
    work: PathBuf,
    /// Rounds, interleaved over the targets [default: 3; quick and medium: 2, some experiments 1]
    #[arg(long, value_name = "N", value_parser = rounds)]
    rounds: Option<usize>,
    /// As many rounds as fit into this time, one at least, seven or --rounds at most
    #[arg(long, value_name = "N")]
    minutes: Option<f64>,
    /// Short version: smaller loads, fewer cases
    #[arg(long)]
    quick: bool,
    /// Every case of the full version, each for about a second
    #[arg(long, conflicts_with = "quick")]
    medium: bool,
    /// Seed of the load
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Disk: plain, slow:US (flush in µs), or limit:rbps=..,wbps=..,riops=..,wiops=.. [default: plain]
    #[arg(long)]
    disk: Option<String>,
    /// Size of the disk [default: 16G, slow and medium: 4G, quick: 2G]
    #[arg(long)]
    size: Option<String>,
    /// Target that ratios compare with [default: the first]
    #[arg(long, value_name = "TARGET")]
    baseline: Option<String>,
    /// Only modes whose name contains this word, or is WORD in =WORD, repeatable
    #[arg(long = "mode", value_name = "WORD", value_delimiter = ',')]
    modes: Vec<String>,
    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the report as one HTML file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Weir's cache, for example 1G
    #[arg(long, value_name = "BYTES")]
    weir_memory: Option<String>,
    /// Mount option for every weir-mount, as for `weir mount -o`, repeatable; for one target: --on weir-mount+OPT
    #[arg(long = "mount-option", value_name = "OPT")]
    mount_options: Vec<String>,
    /// The `weir` program for weir-mount [default: this program or its neighbour]
    #[arg(long, value_name = "FILE")]
    weir_bin: Option<PathBuf>,
    /// Keep idle processors from sleeping, for every target alike: waking them differs from hour to hour (root)
    #[arg(long)]
    awake: bool,
    /// Do not measure the floor first
    #[arg(long)]
    no_probe: bool,
    /// Run on directories without a block device (tmpfs), without device figures
    #[arg(long)]
    allow_no_device: bool,
}

impl RunArgs {
    fn loads(&self) -> Size {
        match (self.quick, self.medium) {
            (true, _) => Size::Quick,
            (_, true) => Size::Medium,
            _ => Size::Full,
        }
    }
}

/// Runs a `weir lab` command.
pub fn run(args: LabArgs) -> LabResult<ExitCode> {
    match args.command {
        LabCommand::List => {
            say(&listing());
            Ok(ExitCode::SUCCESS)
        }
        LabCommand::Clean => Ok(clean()),
        LabCommand::Probe { dir, json } => probe_command(&dir, json.as_deref()),
        LabCommand::Compare { old, new, gate } => {
            let (text, failed) = compare::render(&Report::load(&old)?, &Report::load(&new)?, gate);
            say(&text);
            Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
        }
        LabCommand::Calibrate { dir, rounds } => {
            check_dir(&dir, true)?;
            let cancel = Cancel::default();
            let registry = Registry::new()?;
            install_signal_handler(&cancel, &registry);
            Ok(match crate::calibrate::run(&dir, rounds, &registry, &cancel)? {
                Verdict::Agrees => ExitCode::SUCCESS,
                Verdict::Differs => ExitCode::FAILURE,
                Verdict::Disturbed => ExitCode::from(2),
            })
        }
        LabCommand::Check { reports, claims, table } => check_command(&reports, claims, table),
        LabCommand::Picture { report, out, narrow } => {
            let text = picture::render(&Report::load(&report)?, narrow)?;
            std::fs::write(&out, text).during(|| format!("writing {}", out.display()))?;
            Ok(ExitCode::SUCCESS)
        }
        LabCommand::Html { report, out } => {
            let text = html::render(&Report::load(&report)?);
            std::fs::write(&out, text).during(|| format!("writing {}", out.display()))?;
            Ok(ExitCode::SUCCESS)
        }
        LabCommand::SlowDisk { mount_point, size_bytes, flush_us } => {
            slow::serve(&mount_point, size_bytes, Duration::from_micros(flush_us))
                .during(|| format!("serving {}", mount_point.display()))?;
            Ok(ExitCode::SUCCESS)
        }
        LabCommand::Hollow { mount_point, options } => {
            hollow::serve(&mount_point, &options)?;
            Ok(ExitCode::SUCCESS)
        }
        LabCommand::Fsmark { run, options } => experiment(&run, |q, s| {
            vec![Box::new(experiments::fsmark::Fsmark::new(&options, q, s))]
        }),
        LabCommand::Fsync { run, options } => {
            experiment(&run, |q, _| vec![Box::new(experiments::fsync::FsyncJobs::new(&options, q))])
        }
        LabCommand::Checkpoint { run, options } => experiment(&run, |q, _| {
            vec![Box::new(experiments::checkpoint::Checkpoint::new(&options, q))]
        }),
        LabCommand::Fastread { run, options } => experiment(&run, |q, _| {
            vec![Box::new(experiments::fastread::Fastread::new(&options, q))]
        }),
        LabCommand::Ingest { run, options } => {
            experiment(&run, |q, _| vec![Box::new(experiments::ingest::Ingest::new(&options, q))])
        }
        LabCommand::Aging { run, options } => {
            experiment(&run, |q, _| vec![Box::new(experiments::aging::Aging::new(&options, q))])
        }
        LabCommand::Simoop { run, options } => {
            experiment(&run, |q, _| vec![Box::new(experiments::simoop::Simoop::new(&options, q))])
        }
        LabCommand::Foundation { run, options } => experiment(&run, |q, _| {
            vec![Box::new(experiments::foundation::Foundation::new(&options, q))]
        }),
        LabCommand::Programs { run, options } => experiment(&run, |q, _| {
            vec![Box::new(experiments::programs::Programs::new(&options, q))]
        }),
        LabCommand::Tickets { run, options } => {
            experiment(&run, |q, _| vec![Box::new(experiments::tickets::Tickets::new(&options, q))])
        }
        LabCommand::Claims { run } => claims::run(&run),
        LabCommand::All { run } => experiment(&run, experiments::all),
    }
}

fn check_command(reports: &[PathBuf], claims: bool, table: bool) -> LabResult<ExitCode> {
    let gate: &[check::Kind] =
        if claims { &[check::Kind::Truth, check::Kind::Claim] } else { &[check::Kind::Truth] };
    let mut failed = false;
    let mut loaded = Vec::new();
    for path in reports {
        let report = Report::load(path)?;
        let (text, fails) = check::render(&report, gate);
        if !table {
            say(&format!("{}:\n{text}", path.display()));
        }
        failed |= fails;
        loaded.push(report);
    }
    if table {
        say(&claims_table::render(&loaded));
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn probe_command(dir: &Path, json: Option<&Path>) -> LabResult<ExitCode> {
    check_dir(dir, true)?;
    let begun = Instant::now();
    let cancel = Cancel::default();
    // Mounts are known by their absolute paths.
    let dir = &dir.canonicalize().during(|| format!("opening {}", dir.display()))?;
    let registry = Registry::new()?;
    install_signal_handler(&cancel, &registry);
    let mut floor = probe::measure_dir(dir, &registry, &cancel)?;
    if is_root() && Path::new("/dev/fuse").exists() {
        probe::fuse_round_trip(dir, &registry, &mut floor)?;
    }
    cancel.check()?;
    for f in &floor.figures {
        say(&format!("{:<32} {:>12} {}\n", f.metric, table::figure(f.value), f.unit));
    }
    if let Some(path) = json {
        let mut report = empty_report(dir, begun);
        report.results = floor.rows(&format!("dir:{}", dir.display()));
        report.save(path)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A report of this command on this machine, without results.
fn empty_report(work: &Path, begun: Instant) -> Report {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    Report {
        schema: SCHEMA.into(),
        command: command_line(),
        version: env!("CARGO_PKG_VERSION").into(),
        started_unix_s: now.saturating_sub(begun.elapsed().as_secs()),
        duration_s: begun.elapsed().as_secs_f64(),
        machine: machine::describe(work),
        disk: DiskSpec::Plain.to_string(),
        ..Report::default()
    }
}

/// Prints; whoever reads may have seen enough and gone.
pub(crate) fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    // What it is about is in the exit code and in the files that were asked for.
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

fn clean() -> ExitCode {
    let (released, stuck) = clean_stale();
    for line in &released {
        say(&format!("released {line}\n"));
    }
    for line in &stuck {
        crate::tell!("weir lab: still there: {line}");
    }
    if released.is_empty() && stuck.is_empty() {
        say("nothing to clean\n");
    }
    if stuck.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn listing() -> String {
    let mut out = String::from("experiments:\n");
    for e in experiments::every(Size::Full) {
        let mut modes: Vec<String> = Vec::new();
        for case in e.cases() {
            if !modes.contains(&case.mode) {
                modes.push(case.mode);
            }
        }
        let _ = writeln!(out, "  {:<11} {}", e.name(), e.question());
        let _ = writeln!(out, "  {:<11}   modes: {}", "", modes.join(", "));
    }
    out.push_str(
        "targets (--on, several):\n\
         \x20 dir:PATH    any mounted file system, as it is\n\
         \x20 xfs         a fresh XFS on the run's disk (root)\n\
         \x20 ext4        a fresh ext4 on the run's disk (root)\n\
         \x20 btrfs       a fresh btrfs on the run's disk, single data and metadata (root)\n\
         \x20 weir        the library in this process, on a fresh volume in the run's image file\n\
         \x20 weir-mount  such a volume through FUSE\n\
         \x20 weir-loop, weir-mount-loop\n\
         \x20             the same on the loop device of the kernel file systems (root)\n\
         \x20 weir-mount+OPT+OPT\n\
         \x20             mounted with these options besides --mount-option\n\
         \x20 hollow-mount\n\
         \x20             a file system without content through FUSE: what any mount costs at least\n\
         \x20 raw         the run's disk without any file system, for foundation\n\
         disks (--disk), shared by all targets of a run except dir::\n\
         \x20 plain       a fully written image file in the work directory\n\
         \x20 slow:US     a RAM-backed file whose flush takes US microseconds\n\
         \x20 limit:...   the image throttled: rbps=, wbps= (bytes/s), riops=, wiops= (requests/s)\n",
    );
    out
}

/// Takes everything down on the second Ctrl-C; the first asks the run to end by itself.
fn install_signal_handler(cancel: &Cancel, registry: &Arc<Registry>) {
    let (cancel, registry) = (cancel.clone(), Arc::downgrade(registry));
    let installed = ctrlc::set_handler(move || {
        if cancel.is_cancelled() {
            if let Some(registry) = registry.upgrade() {
                for stuck in registry.release_all() {
                    crate::tell!("weir lab: left behind: {stuck} (run `weir lab clean`)");
                }
            }
            std::process::exit(130);
        }
        crate::tell!("weir lab: stopping, taking everything down (again to force)");
        cancel.cancel();
    });
    if let Err(e) = installed {
        crate::tell!("weir lab: Ctrl-C will not clean up ({e}); use `weir lab clean` then");
    }
}

/// The targets of a run, checked.
fn targets_of(args: &RunArgs, stage: &StageOptions) -> LabResult<Vec<TargetSpec>> {
    let words: Vec<String> = if args.on.is_empty() {
        vec!["weir".into(), format!("dir:{}", args.work.display())]
    } else {
        args.on.clone()
    };
    let mut targets = Vec::new();
    for word in words {
        let target: TargetSpec = word.parse()?;
        if !targets.contains(&target) {
            targets.push(target);
        }
    }
    // What is wrong whatever the machine has is said first.
    targets.iter().try_for_each(|target| check_options(target, stage))?;
    targets.iter().try_for_each(|target| preflight(target, stage))?;
    Ok(targets)
}

fn baseline_of(args: &RunArgs, targets: &[TargetSpec]) -> LabResult<String> {
    let first = targets.first().map(TargetSpec::name).unwrap_or_default();
    let Some(name) = &args.baseline else { return Ok(first) };
    if targets.iter().any(|t| t.name() == *name) {
        return Ok(name.clone());
    }
    Err(LabError::BadOption(format!("--baseline {name} is not one of the targets of this run")))
}

fn disk_size(args: &RunArgs, disk: DiskSpec) -> LabResult<u64> {
    let default = match (args.loads(), disk) {
        (Size::Quick, _) => 2 << 30,
        (Size::Medium, _) | (_, DiskSpec::Slow { .. }) => 4 << 30,
        (Size::Full, _) => 16 << 30,
    };
    let Some(text) = &args.size else { return Ok(default) };
    let size = parse_amount(text)
        .ok_or_else(|| LabError::BadOption(format!("--size {text} is not a size, such as 8G")))?;
    if size < 512 << 20 {
        return Err(LabError::BadOption("--size must be at least 512M".into()));
    }
    Ok(size & !0xF_FFFF)
}

fn experiment(
    args: &RunArgs,
    build: impl FnOnce(Size, bool) -> Vec<Box<dyn Experiment>>,
) -> LabResult<ExitCode> {
    let setup = Setup::of(args)?;
    let slow_flush = matches!(setup.disk, DiskSpec::Slow { flush_us } if flush_us >= 500);
    let planned = build(args.loads(), slow_flush).into_iter().map(Planned::whole).collect();
    let session = Session::begin()?;
    let made = make_report(args, setup, planned, &session)?;
    // Saved first: who reads the table may have gone meanwhile (a pipe into `head`), and hours with it.
    publish(&made.report, args.json.as_deref(), args.html.as_deref())?;
    say(&table::render(&made.report));
    if made.interrupted {
        return Err(LabError::Cancelled);
    }
    Ok(if made.complete { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What Ctrl-C needs to know of; one per process.
struct Session {
    cancel: Cancel,
    registry: Arc<Registry>,
}

impl Session {
    fn begin() -> LabResult<Self> {
        if !stale_files().is_empty() {
            crate::tell!(
                "weir lab: an earlier run left things behind; `weir lab clean` takes them away"
            );
        }
        // Open loops sleep until an operation is due: the default slack of 50 µs would be charged to it.
        // Threads inherit the setting; where it cannot be had, small open-loop latencies are larger.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        allow_many_files();
        let (cancel, registry) = (Cancel::default(), Registry::new()?);
        install_signal_handler(&cancel, &registry);
        Ok(Session { cancel, registry })
    }
}

/// A run's options, checked.
struct Setup {
    disk: DiskSpec,
    size_bytes: u64,
    targets: Vec<TargetSpec>,
    baseline: String,
    stage: StageOptions,
}

impl Setup {
    fn of(args: &RunArgs) -> LabResult<Self> {
        let disk: DiskSpec = args.disk.as_deref().unwrap_or("plain").parse()?;
        let stage = StageOptions {
            weir_bin: args.weir_bin.clone(),
            weir_memory_bytes: args.weir_memory.as_deref().map(memory_of).transpose()?,
            mount_options: args.mount_options.clone(),
            allow_no_device: args.allow_no_device,
        };
        let targets = targets_of(args, &stage)?;
        let baseline = baseline_of(args, &targets)?;
        if args.minutes.is_some_and(|m| !(m > 0.0 && m < 1e6)) {
            return Err(LabError::BadOption("--minutes must be more than 0".into()));
        }
        for path in [&args.json, &args.html].into_iter().flatten() {
            check_writable(path)?;
        }
        let size_bytes = disk_size(args, disk)?;
        Ok(Setup { disk, size_bytes, targets, baseline, stage })
    }
}

/// A report, and whether nothing failed and nothing is left behind.
struct Made {
    report: Report,
    complete: bool,
    /// It has what was measured until Ctrl-C.
    interrupted: bool,
}

/// Runs experiments. Whatever happens, nothing stays mounted.
fn make_report(
    args: &RunArgs,
    setup: Setup,
    planned: Vec<Planned>,
    session: &Session,
) -> LabResult<Made> {
    let begun = Instant::now();
    let (disk, size_bytes) = (setup.disk, setup.size_bytes);
    let outcome = measure(args, setup, planned, session);
    let stuck = session.registry.release_all();
    for line in &stuck {
        crate::tell!("weir lab: left behind: {line} (run `weir lab clean`)");
    }
    let outcome = match outcome {
        Err(_) if session.cancel.is_cancelled() => return Err(LabError::Cancelled),
        other => other?,
    };
    let interrupted = outcome.interrupted;
    let report = Report {
        disk: disk.to_string(),
        size_bytes,
        seed: args.seed,
        quick: args.quick,
        loads: args.loads(),
        targets: outcome.targets,
        results: outcome.rows,
        curves: outcome.curves,
        series: outcome.series,
        not_offered: outcome.skipped,
        notes: outcome.notes,
        ..empty_report(&args.work, begun)
    };
    let ended = if interrupted { "interrupted after" } else { "done in" };
    crate::tell!("weir lab: {ended} {}", elapsed_text(begun));
    // Also who prints no table of all figures is to know why the exit code is 1.
    for group in skipped_groups(&report.not_offered).iter().filter(|g| g.failed) {
        let (on, cases) = (group.target, group.cases.join(", "));
        crate::tell!("weir lab: failed: {} on {on}: {cases}: {}", group.experiment, group.reason);
    }
    let complete = stuck.is_empty() && !report.not_offered.iter().any(|s| s.failed);
    Ok(Made { report, complete, interrupted })
}

fn publish(report: &Report, json: Option<&Path>, page: Option<&Path>) -> LabResult<()> {
    if let Some(path) = json {
        report.save(path)?;
    }
    if let Some(path) = page {
        std::fs::write(path, html::render(report))
            .during(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

fn measure(
    args: &RunArgs,
    setup: Setup,
    experiments: Vec<Planned>,
    session: &Session,
) -> LabResult<Outcome> {
    let Session { cancel, registry } = session;
    let Setup { disk: disk_spec, size_bytes, targets, baseline, stage } = setup;
    let awake = args.awake.then(Awake::begin).transpose()?;
    let needs_disk = targets.iter().any(TargetSpec::uses_disk);
    let limited = matches!(disk_spec, DiskSpec::Limit(_));
    if !needs_disk && matches!(disk_spec, DiskSpec::Slow { .. }) {
        return Err(LabError::BadOption(
            "--disk slow needs a target that is put on it: dir: targets stay where they are".into(),
        ));
    }
    if disk_spec != DiskSpec::Plain && !is_root() {
        return Err(LabError::NeedsRoot(format!("--disk {disk_spec}")));
    }
    let disk = if needs_disk {
        check_dir(&args.work, args.allow_no_device)?;
        let run_dir = make_run_dir(&args.work, registry)?;
        let with_loop = targets.iter().any(TargetSpec::needs_loop);
        Some(Disk::create(disk_spec, &run_dir, size_bytes, with_loop, registry, cancel)?)
    } else {
        if limited {
            limit_work_disk(&args.work, disk_spec, registry)?;
        }
        None
    };
    for target in &targets {
        if let TargetSpec::Dir(path) = target {
            let need = experiments.iter().map(|e| e.experiment.space_bytes()).max().unwrap_or(0);
            crate::target::stage::check_space(path, need)?;
        }
    }
    let plan = Plan {
        experiments,
        targets,
        rounds: args.rounds,
        time: args.minutes.map(|m| Duration::from_secs_f64(m * 60.0)),
        size: args.loads(),
        seed: args.seed,
        baseline,
        only_modes: args.modes.clone(),
        stage,
    };
    let floors =
        if args.no_probe { Vec::new() } else { floors_of(&plan, disk.as_ref(), registry, cancel)? };
    let mut outcome = run_plan(&plan, disk.as_ref(), registry, cancel)?;
    let mut rows: Vec<_> = floors.iter().flat_map(|(name, _, floor)| floor.rows(name)).collect();
    for row in &mut outcome.rows {
        let floor = floors.iter().find(|(_, targets, _)| targets.contains(&row.target));
        row.floor_ratio = floor.and_then(|(_, _, floor)| floor.ratio_of(row));
    }
    rows.append(&mut outcome.rows);
    outcome.rows = rows;
    if awake.is_some() {
        outcome.notes.push("idle processors were kept from sleeping (--awake)".into());
    }
    let cached = disk.as_ref().and_then(Disk::cached_by_host);
    outcome.notes.extend(cached.map(str::to_owned));
    if limited && plan.targets.iter().any(|t| !t.uses_disk()) && needs_disk {
        outcome
            .notes
            .push("dir: targets were not limited: --disk is the disk of the others".into());
    }
    Ok(outcome)
}

/// The floor of each disk of the run: (name, targets it applies to, figures).
fn floors_of(
    plan: &Plan,
    disk: Option<&Disk>,
    registry: &Registry,
    cancel: &Cancel,
) -> LabResult<Vec<(String, Vec<String>, Floor)>> {
    let mut floors = Vec::new();
    for (name, on_loop) in [("disk", false), ("disk under a loop device", true)] {
        let here = |t: &&TargetSpec| t.uses_disk() && t.needs_loop() == on_loop;
        let on_disk: Vec<&TargetSpec> = plan.targets.iter().filter(here).collect();
        if let (Some(disk), Some(one)) = (disk, on_disk.first()) {
            let names = on_disk.iter().map(|t| t.name()).collect();
            // Nothing is formatted yet: the probe may write anywhere.
            floors.push((name.into(), names, probe::measure(disk.path_of(one), cancel)?));
        }
    }
    for target in &plan.targets {
        if let TargetSpec::Dir(path) = target {
            let name = target.name();
            floors.push((name.clone(), vec![name], probe::measure_dir(path, registry, cancel)?));
        }
    }
    Ok(floors)
}

fn limit_work_disk(work: &Path, spec: DiskSpec, registry: &Arc<Registry>) -> LabResult<()> {
    let DiskSpec::Limit(limits) = spec else { return Ok(()) };
    crate::disk::cgroup::limit_io(registry, None, &limited_disk(work)?, limits)
}

/// A number of rounds.
fn rounds(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|n| (1..=10_000).contains(n));
    number.ok_or_else(|| "not a number from 1 to 10000".into())
}

/// By how much a metric may get worse.
fn percent(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|n| n.is_finite() && *n >= 0.0);
    number.ok_or_else(|| "not a number of percent from 0 on".into())
}

fn memory_of(text: &str) -> LabResult<u64> {
    parse_amount(text)
        .ok_or_else(|| LabError::BadOption(format!("--weir-memory {text} is not a size")))
}

/// Each fsync in flight keeps its file open: as many as this process may have at all.
fn allow_many_files() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // Where it is refused, a case that needs more fails and says so.
    let _ = setrlimit(Resource::Nofile, limit);
}

/// A report that cannot be written should be known before the run, not after it. A run that then is refused or stopped leaves none.
fn check_writable(path: &Path) -> LabResult<()> {
    let was_there = path.exists();
    let opened = std::fs::OpenOptions::new().append(true).create(true).open(path);
    opened.during(|| format!("opening {}", path.display()))?;
    if !was_there {
        std::fs::remove_file(path).during(|| format!("removing {}", path.display()))?;
    }
    Ok(())
}

/// The command as it was given, quoted where a shell would need it.
pub fn command_line() -> String {
    std::env::args_os()
        .enumerate()
        .map(|(i, word)| {
            // A path may hold any bytes.
            let word = word.to_string_lossy().into_owned();
            let word = if i == 0 {
                Path::new(&word)
                    .file_name()
                    .map_or(word.clone(), |n| n.to_string_lossy().into_owned())
            } else {
                word
            };
            let plain = |c: char| c.is_alphanumeric() || "-_./:=,%@+".contains(c);
            if !word.is_empty() && word.chars().all(plain) {
                word
            } else {
                format!("'{}'", word.replace('\'', "'\\''"))
            }
        })
        .collect::<Vec<_>>()
        .join(" ")
}
