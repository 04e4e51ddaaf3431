//! Runs the `weir-lab` program in a scratch directory with a state directory of its own.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

/// A scratch directory on a real disk, removed with all in it.
pub struct Scratch {
    pub dir: PathBuf,
}

impl Scratch {
    pub fn new(name: &str) -> Self {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let n = COUNTER.fetch_add(1, Ordering::Relaxed);
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("{name}-{}-{n}", std::process::id()));
        std::fs::create_dir_all(dir.join("work")).expect("scratch directory");
        Scratch { dir: dir.canonicalize().expect("it exists") }
    }

    pub fn work(&self) -> String {
        self.dir.join("work").to_string_lossy().into_owned()
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_weir-lab"));
        command
            .args(args)
            .env("WEIR_LAB_STATE_DIR", self.dir.join("state"))
            .stdin(Stdio::null())
            .current_dir(self.work());
        command
    }

    pub fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().expect("weir-lab starts")
    }

    /// Where [`Scratch::report`] leaves the JSON.
    pub fn json(&self) -> String {
        self.dir.join("out.json").to_string_lossy().into_owned()
    }

    /// Runs an experiment and returns its JSON.
    pub fn report(&self, args: &[&str]) -> Value {
        let json = self.json();
        let html = self.dir.join("out.html").to_string_lossy().into_owned();
        let work = self.work();
        let mut all = args.to_vec();
        all.extend(["--work", &work, "--json", &json, "--html", &html, "--allow-no-device"]);
        let out = self.run(&all);
        assert!(out.status.success(), "{all:?}: {}", String::from_utf8_lossy(&out.stderr));
        let page = std::fs::read_to_string(&html).expect("page");
        assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
        assert!(!page.contains("<script") && !page.contains("http://") && !page.contains("NaN"));
        serde_json::from_slice(&std::fs::read(json).expect("report")).expect("JSON")
    }

    /// A short run of one experiment, one round unless `options` says otherwise.
    pub fn quick(&self, experiment: &str, on: &str, options: &str) -> Value {
        let mut args = vec![experiment, "--quick", "--on", on];
        args.extend(options.split_whitespace());
        if !options.contains("--rounds") {
            args.extend(["--rounds", "1"]);
        }
        self.report(&args)
    }

    /// Nothing of a run is mounted, attached or left in the work directory.
    pub fn assert_clean(&self) {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
        let here = self.dir.to_string_lossy().into_owned();
        assert!(!mounts.contains(&here), "still mounted: {mounts}");
        assert_eq!(self.loops(), 0, "a loop device is left");
        let left: Vec<_> = std::fs::read_dir(self.work()).expect("work").flatten().collect();
        assert!(left.is_empty(), "left behind: {left:?}");
        let state = std::fs::read_dir(self.dir.join("state")).map_or(0, Iterator::count);
        assert_eq!(state, 0, "a state file is left");
    }

    /// Loop devices whose backing file is in this directory.
    pub fn loops(&self) -> usize {
        let here = self.dir.to_string_lossy().into_owned();
        let Ok(blocks) = std::fs::read_dir("/sys/block") else { return 0 };
        blocks
            .flatten()
            .filter_map(|e| std::fs::read_to_string(e.path().join("loop/backing_file")).ok())
            .filter(|file| file.starts_with(&here))
            .count()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// The median of a metric.
pub fn median(report: &Value, experiment: &str, mode: &str, metric: &str) -> f64 {
    rows(report)
        .find(|r| r["experiment"] == experiment && r["mode"] == mode && r["metric"] == metric)
        .and_then(|r| r["median"].as_f64())
        .unwrap_or_else(|| panic!("no {experiment} {mode} {metric}"))
}

pub fn rows(report: &Value) -> impl Iterator<Item = &Value> {
    report["results"].as_array().expect("results").iter()
}

pub fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|m| std::os::unix::fs::MetadataExt::uid(&m) == 0)
}

/// Whether loop file systems can be tested here; says why not.
pub fn loops_possible() -> bool {
    let tools = ["mkfs.xfs", "mkfs.ext4", "mkfs.btrfs", "losetup"];
    let found =
        |t: &str| ["/usr/sbin", "/sbin", "/usr/bin"].iter().any(|d| Path::new(d).join(t).exists());
    let missing: Vec<_> = tools.iter().filter(|t| !found(t)).collect();
    if !is_root() || !Path::new("/dev/loop-control").exists() || !missing.is_empty() {
        eprintln!("skipped: needs root, loop devices and {tools:?} (missing {missing:?})");
        return false;
    }
    true
}

/// What a test may need to run at all.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// A directory.
    Nothing,
    /// Root, loop devices, and the tools of the kernel file systems.
    Loops,
}

/// Loop devices and time on the disk are shared: one of the tests that need them at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Runs `test` in a scratch directory and checks that nothing is left of it; skips, and says so, where
/// what it needs is missing.
pub fn in_scratch(name: &str, needs: Needs, test: impl FnOnce(&Scratch)) {
    let _alone = (needs == Needs::Loops)
        .then(|| ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner));
    if needs == Needs::Loops && !loops_possible() {
        return;
    }
    let scratch = Scratch::new(name);
    test(&scratch);
    scratch.assert_clean();
}

/// The figure of one target.
pub fn figure(report: &Value, target: &str, mode: &str, metric: &str) -> f64 {
    rows(report)
        .find(|r| r["target"] == target && r["mode"] == mode && r["metric"] == metric)
        .and_then(|r| r["median"].as_f64())
        .unwrap_or_else(|| panic!("no {target} {mode} {metric}"))
}

/// The `weir` program next to the test's own, when the workspace was built as a whole.
pub fn weir_program() -> Option<String> {
    let neighbour = Path::new(env!("CARGO_BIN_EXE_weir-lab")).with_file_name("weir");
    let given = std::env::var_os("WEIR_BIN").map_or(neighbour, PathBuf::from);
    let found = given.is_file().then(|| given.to_string_lossy().into_owned());
    if found.is_none() {
        eprintln!("skipped: no `weir` program (build the workspace, or set WEIR_BIN)");
    }
    found
}

/// An experiment with loads so small that it takes about two seconds on a target.
pub struct SmallRun {
    name: &'static str,
    pub options: &'static str,
    /// Modes and metrics that must be there and not be zero.
    expected: &'static [(&'static str, &'static str)],
}

const SMALL_RUNS: [SmallRun; 8] = [
    SmallRun {
        name: "fsmark",
        options: "--files 60 --iterations 2",
        expected: &[
            ("pass", "files_per_s"),
            ("each", "files_per_s"),
            ("syncfs", "files_per_s"),
            ("none", "files_per_s"),
            ("async-threads", "files_per_s"),
        ],
    },
    SmallRun {
        name: "fsync",
        options: "--jobs 1,4 --seconds 0.2",
        expected: &[("seq", "mib_per_s"), ("rand", "fsync_per_s"), ("seq", "fsync_p50_us")],
    },
    SmallRun {
        name: "checkpoint",
        options: "--dirty-mib 16 --mode quiet,end,trickle",
        expected: &[("quiet", "read_p50_us"), ("end", "last_fsync_ms"), ("trickle", "log_p50_us")],
    },
    SmallRun {
        name: "fastread",
        options: "--seconds 0.2 --queue 8 --rate 500 --mode pool,nowait,raw",
        expected: &[
            ("pool", "f1_p50_us"),
            ("nowait", "f2_count"),
            ("pool", "f3_count"),
            ("raw", "cached_4k_ns"),
        ],
    },
    SmallRun {
        name: "ingest",
        options: "--total-mib 8 --writers 1",
        expected: &[("new", "gib_per_s"), ("truncated", "gib_per_s"), ("new", "durable_ms")],
    },
    SmallRun {
        name: "aging",
        options: "--files 80 --mode copy,append",
        expected: &[("copy-close", "tree_read_mib_per_s"), ("append-fsync", "mib_per_s")],
    },
    SmallRun {
        name: "simoop",
        options: "--seconds 1 --files 20 --workers 2 --working-set-mib 4 --memory-mib 0",
        expected: &[
            ("unlimited", "read_p50_us"),
            ("unlimited", "write_p50_us"),
            ("unlimited", "work_per_s"),
        ],
    },
    SmallRun {
        name: "foundation",
        options: "--files 200 --synced-files 20 --sequential-mib 8 --cached-mib 8",
        expected: &[
            ("create-fsync", "files_per_s"),
            ("append-64k", "mib_per_s"),
            ("cached-read", "hot_read_4k_ns"),
            ("buffered-4k", "gib_per_s"),
            ("read-1m", "mib_per_s"),
            ("many-directories", "cold_lookup_p50_us"),
        ],
    },
];

impl SmallRun {
    pub fn of(name: &str) -> &'static SmallRun {
        SMALL_RUNS.iter().find(|r| r.name == name).expect("a known experiment")
    }

    /// A report of one round has all that is expected of a target, and nothing failed.
    pub fn check(&self, report: &Value, target: &str) {
        for (mode, metric) in self.expected {
            assert!(figure(report, target, mode, metric) > 0.0, "{target} {mode} {metric}");
        }
        for row in rows(report) {
            let rounds = row["rounds"].as_array().expect("rounds");
            assert!(rounds.contains(&row["median"]), "one round: its value is the median: {row}");
        }
        let lacking = report["not_offered"].as_array().expect("list");
        assert!(lacking.iter().all(|s| s["failed"] == false), "{lacking:?}");
    }
}
