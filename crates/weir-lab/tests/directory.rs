//! Every experiment for about two seconds on a directory, without root.

mod common;

use common::{Needs, figure, in_scratch, median, rows};

/// Runs one experiment with small loads and checks what every report must have.
fn check(name: &str, options: &str, expected: &[(&str, &str)]) {
    in_scratch(name, Needs::Nothing, |scratch| {
        let on = format!("dir:{}", scratch.work());
        let report = scratch.quick(name, &on, &format!("--no-probe {options}"));
        check_report(name, &report, expected);
    });
}

fn check_report(name: &str, report: &serde_json::Value, expected: &[(&str, &str)]) {
    assert_eq!(report["schema"], "weir-lab/1");
    assert!(report["command"].as_str().is_some_and(|c| c.starts_with("weir-lab ")));
    for (mode, metric) in expected {
        assert!(median(report, name, mode, metric) > 0.0, "{mode} {metric}");
    }
    for row in rows(report) {
        let rounds: Vec<f64> = row["rounds"]
            .as_array()
            .expect("rounds")
            .iter()
            .filter_map(serde_json::Value::as_f64)
            .collect();
        let median = row["median"].as_f64().expect("median");
        assert!(rounds.contains(&median), "one round: its value is the median: {row}");
    }
}

#[test]
fn fsmark_runs_every_mode() {
    let modes = ["pass", "each", "syncfs", "none", "async-libaio", "async-threads"];
    let expected: Vec<_> = modes.iter().map(|m| (*m, "files_per_s")).collect();
    check("fsmark", "--files 60 --iterations 2", &expected);
}

#[test]
fn fsync_counts_what_it_did() {
    check(
        "fsync",
        "--jobs 1,4 --seconds 0.2",
        &[("seq", "mib_per_s"), ("rand", "fsync_per_s"), ("seq", "fsync_p50_us")],
    );
}

#[test]
fn checkpoint_has_a_quiet_run_and_a_last_fsync() {
    check(
        "checkpoint",
        "--dirty-mib 16 --mode quiet,end,trickle",
        &[("quiet", "read_p50_us"), ("end", "last_fsync_ms"), ("trickle", "log_p50_us")],
    );
}

#[test]
fn fastread_serves_all_classes() {
    check(
        "fastread",
        "--seconds 0.2 --queue 8 --rate 500 --mode pool,nowait,raw",
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
        "--total-mib 8 --writers 1",
        &[("new", "gib_per_s"), ("truncated", "gib_per_s"), ("new", "durable_ms")],
    );
}

#[test]
fn aging_counts_extents() {
    check(
        "aging",
        "--files 80 --mode copy,append",
        &[("copy-close", "tree_read_mib_per_s"), ("append-fsync", "mib_per_s")],
    );
}

#[test]
fn simoop_times_reads_writes_and_allocations() {
    check(
        "simoop",
        "--seconds 1 --files 20 --workers 2 --working-set-mib 4 --memory-mib 0",
        &[("unlimited", "read_p50_us"), ("unlimited", "write_p50_us"), ("unlimited", "work_per_s")],
    );
}

#[test]
fn foundation_runs_the_plain_paths_on_a_directory() {
    check(
        "foundation",
        "--files 200 --synced-files 20 --sequential-mib 8 --cached-mib 8",
        &[
            ("create-fsync", "files_per_s"),
            ("append-64k", "mib_per_s"),
            ("cached-read", "hot_read_4k_ns"),
            ("buffered-4k", "gib_per_s"),
            ("read-1m", "mib_per_s"),
            ("untar", "total_s"),
            ("many-directories", "cold_lookup_p50_us"),
        ],
    );
}

#[test]
fn probe_measures_device_and_machine() {
    in_scratch("probe", Needs::Nothing, |scratch| {
        let json = scratch.dir.join("probe.json").to_string_lossy().into_owned();
        let out = scratch.run(&["probe", &scratch.work(), "--json", &json]);
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let report: serde_json::Value =
            serde_json::from_slice(&std::fs::read(json).expect("report")).expect("JSON");
        for metric in ["write_fdatasync_4k_us", "random_read_4k_us", "copy_4k_ns", "syscall_ns"] {
            assert!(median(&report, "probe", "floor", metric) > 0.0);
        }
    });
}

#[test]
fn the_same_seed_gives_the_same_cases_and_metrics() {
    let names = |seed: &str| {
        let mut names = Vec::new();
        in_scratch("seed", Needs::Nothing, |scratch| {
            let on = format!("dir:{}", scratch.work());
            let options = format!("--no-probe --files 20 --mode pass,none --seed {seed}");
            let report = scratch.quick("fsmark", &on, &options);
            names = rows(&report)
                .filter(|r| r["metric"].as_str().is_some_and(|m| !m.contains("flush")))
                .map(|r| format!("{}/{}/{}", r["mode"], r["params"], r["metric"]))
                .collect();
        });
        names
    };
    assert_eq!(names("7"), names("7"));
}

#[test]
fn the_library_runs_without_root_and_says_what_it_lacks() {
    in_scratch("library", Needs::Nothing, |scratch| {
        let options = "--size 512M --files 50 --iterations 1 --threads 1 --mode each,async";
        let report = scratch.quick("fsmark", "weir-file", options);
        assert!(median(&report, "fsmark", "each", "files_per_s") > 0.0);
        assert!(median(&report, "fsmark", "each", "flushes_per_file") > 0.0);
        assert!(median(&report, "fsmark", "async", "files_per_flush") > 1.0);
        let lacking = report["not_offered"].as_array().expect("list");
        let modes: Vec<_> = lacking.iter().map(|s| (&s["mode"], &s["failed"])).collect();
        assert_eq!(modes, [(&"async-libaio".into(), &false.into())]);
    });
}

#[test]
fn ranged_tickets_and_writeback_on_request_are_offered_by_the_library() {
    in_scratch("ranged", Needs::Nothing, |scratch| {
        // Modes that only the full version has.
        let options = "fsync --on weir-file --no-probe --size 512M --rounds 1 --jobs 1 --seconds 0.3 \
                       --mode seq-range";
        let report = scratch.report(&options.split_whitespace().collect::<Vec<_>>());
        assert!(figure(&report, "weir-file", "seq-range", "fsync_per_s") > 0.0);
        let options = "--no-probe --size 1G --dirty-mib 16 --mode async,trickle";
        let report = scratch.quick("checkpoint", "weir-file", options);
        assert!(figure(&report, "weir-file", "async", "last_fsync_ms") > 0.0);
        assert!(figure(&report, "weir-file", "trickle", "last_fsync_ms") > 0.0);
    });
}

#[test]
fn a_report_can_be_checked_drawn_and_rendered_again() {
    in_scratch("picture", Needs::Nothing, |scratch| {
        let on = format!("dir:{},weir-file", scratch.work());
        let options = "--size 512M --files 50 --iterations 1 --mode pass,each,async";
        scratch.quick("fsmark", &on, options);
        let json = scratch.dir.join("out.json").to_string_lossy().into_owned();
        let file = |name: &str| scratch.dir.join(name).to_string_lossy().into_owned();
        let (svg, html) = (file("p.svg"), file("p.html"));
        for args in [["picture", &json, "--out", &svg], ["html", &json, "--out", &html]] {
            let out = scratch.run(&args);
            assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        }
        let picture = std::fs::read_to_string(svg).expect("picture");
        assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"));
        assert!(picture.contains(">weir-file</text>") && !picture.contains("NaN"));
        let first = std::fs::read_to_string(scratch.dir.join("out.html")).expect("page");
        assert_eq!(std::fs::read_to_string(html).expect("page"), first);
        // No kernel file system: no truth can be contradicted.
        let out = scratch.run(&["check", &json]);
        assert!(out.status.success());
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        assert!(text.contains("fsyncs per flush") && text.contains("0 truths hold"), "{text}");
    });
}
