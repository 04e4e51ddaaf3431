//! Every experiment for about two seconds on a directory, without root.

mod common;

use common::{Scratch, median, rows};

/// Runs one experiment with small loads and checks what every report must have.
fn check(name: &str, options: &[&str], expected: &[(&str, &str)]) {
    let scratch = Scratch::new(name);
    let target = format!("dir:{}", scratch.work());
    let mut args = vec![name, "--quick", "--rounds", "1", "--no-probe", "--on", &target];
    args.extend(options);
    let report = scratch.report(&args);
    assert_eq!(report["schema"], "weir-lab/1");
    assert!(report["command"].as_str().is_some_and(|c| c.starts_with("weir-lab ")));
    for (mode, metric) in expected {
        assert!(median(&report, name, mode, metric) > 0.0, "{mode} {metric}");
    }
    for row in rows(&report) {
        let rounds: Vec<f64> = row["rounds"]
            .as_array()
            .expect("rounds")
            .iter()
            .filter_map(serde_json::Value::as_f64)
            .collect();
        let median = row["median"].as_f64().expect("median");
        assert!(rounds.contains(&median), "one round: its value is the median: {row}");
    }
    scratch.assert_clean();
}

#[test]
fn fsmark_runs_every_mode() {
    let modes = ["pass", "each", "syncfs", "none", "async-libaio", "async-threads"];
    let expected: Vec<_> = modes.iter().map(|m| (*m, "files_per_s")).collect();
    check("fsmark", &["--files", "60", "--iterations", "2"], &expected);
}

#[test]
fn fsync_counts_what_it_did() {
    check(
        "fsync",
        &["--jobs", "1,4", "--seconds", "0.2"],
        &[("seq", "mib_per_s"), ("rand", "fsync_per_s"), ("seq", "fsync_p50_us")],
    );
}

#[test]
fn checkpoint_has_a_quiet_run_and_a_last_fsync() {
    check(
        "checkpoint",
        &["--dirty-mib", "16", "--mode", "quiet,end,trickle"],
        &[("quiet", "read_p50_us"), ("end", "last_fsync_ms"), ("trickle", "log_p50_us")],
    );
}

#[test]
fn fastread_serves_all_classes() {
    check(
        "fastread",
        &["--seconds", "0.2", "--queue", "8", "--rate", "500", "--mode", "pool,nowait,raw"],
        &[
            ("pool", "f1_p50_us"),
            ("nowait", "f2_count"),
            ("pool", "f3_count"),
            ("raw", "cached_4k_ns"),
        ],
    );
}

#[test]
fn ingest_reports_entry_and_durability() {
    check(
        "ingest",
        &["--total-mib", "8", "--writers", "1"],
        &[("new", "gib_per_s"), ("truncated", "gib_per_s"), ("new", "durable_ms")],
    );
}

#[test]
fn aging_counts_extents() {
    check(
        "aging",
        &["--files", "80", "--mode", "copy,append"],
        &[("copy-close", "tree_read_mib_per_s"), ("append-fsync", "mib_per_s")],
    );
}

#[test]
fn simoop_times_reads_writes_and_allocations() {
    check(
        "simoop",
        &[
            "--seconds",
            "1",
            "--files",
            "20",
            "--workers",
            "2",
            "--working-set-mib",
            "4",
            "--memory-mib",
            "0",
        ],
        &[("unlimited", "read_p50_us"), ("unlimited", "write_p50_us"), ("unlimited", "work_per_s")],
    );
}

#[test]
fn probe_measures_device_and_machine() {
    let scratch = Scratch::new("probe");
    let json = scratch.dir.join("probe.json").to_string_lossy().into_owned();
    let out = scratch.run(&["probe", &scratch.work(), "--json", &json]);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let report: serde_json::Value =
        serde_json::from_slice(&std::fs::read(json).expect("report")).expect("JSON");
    for metric in ["write_fdatasync_4k_us", "random_read_4k_us", "copy_4k_ns", "syscall_ns"] {
        assert!(median(&report, "probe", "floor", metric) > 0.0);
    }
    scratch.assert_clean();
}

#[test]
fn the_same_seed_gives_the_same_cases_and_metrics() {
    let names = |seed: &str| {
        let scratch = Scratch::new("seed");
        let target = format!("dir:{}", scratch.work());
        let report = scratch.report(&[
            "fsmark",
            "--quick",
            "--rounds",
            "1",
            "--no-probe",
            "--on",
            &target,
            "--files",
            "20",
            "--mode",
            "pass,none",
            "--seed",
            seed,
        ]);
        rows(&report)
            .filter(|r| r["metric"].as_str().is_some_and(|m| !m.contains("flush")))
            .map(|r| format!("{}/{}/{}", r["mode"], r["params"], r["metric"]))
            .collect::<Vec<_>>()
    };
    assert_eq!(names("7"), names("7"));
}

#[test]
fn the_library_runs_without_root_and_says_what_it_lacks() {
    let scratch = Scratch::new("library");
    let report = scratch.report(&[
        "fsmark",
        "--quick",
        "--rounds",
        "1",
        "--on",
        "weir",
        "--size",
        "512M",
        "--files",
        "50",
        "--iterations",
        "1",
        "--threads",
        "1",
        "--mode",
        "each,async-libaio",
    ]);
    assert!(median(&report, "fsmark", "each", "files_per_s") > 0.0);
    assert!(median(&report, "fsmark", "each", "flushes_per_file") > 0.0);
    let lacking = report["not_offered"].as_array().expect("list");
    assert!(lacking.iter().any(|s| s["mode"] == "async-libaio" && s["failed"] == false));
    scratch.assert_clean();
}
