//! Every experiment for about two seconds on a directory, without root; `loops.rs` runs the same on file systems.

mod common;

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use common::{Needs, Scratch, SmallRun, figure, in_scratch, median, rows};

/// Runs an experiment with small loads on a directory and checks what every report must have.
fn check(name: &str) {
    in_scratch(name, Needs::Nothing, |scratch| {
        let small = SmallRun::of(name);
        let on = format!("dir:{}", scratch.work());
        let report = scratch.quick(name, &on, &format!("--no-probe {}", small.options));
        assert_eq!(report["schema"], "weir-lab/1");
        assert!(report["command"].as_str().is_some_and(|c| c.starts_with("weir-lab ")));
        small.check(&report, &on);
    });
}

#[test]
fn fsmark_runs_every_mode() {
    check("fsmark");
}

#[test]
fn fsync_counts_what_it_did() {
    check("fsync");
}

#[test]
fn checkpoint_has_a_quiet_run_and_a_last_fsync() {
    check("checkpoint");
}

#[test]
fn fastread_serves_all_classes() {
    check("fastread");
}

#[test]
fn ingest_reports_entry_and_durability() {
    check("ingest");
}

#[test]
fn aging_counts_extents() {
    check("aging");
}

#[test]
fn simoop_times_reads_writes_and_allocations() {
    check("simoop");
}

#[test]
fn foundation_runs_the_plain_paths_on_a_directory() {
    check("foundation");
}

#[test]
fn an_interrupted_run_reports_the_rounds_that_it_has_ended() {
    in_scratch("interrupted", Needs::Nothing, |scratch| {
        let (json, on) = (scratch.json(), format!("dir:{}", scratch.work()));
        let options = "fsmark --quick --files 50 --threads 1 --mode =pass --rounds 10000 --no-probe \
                       --allow-no-device";
        let places = ["--on", &on, "--json", &json];
        let mut child = scratch
            .command(&options.split(' ').chain(places).collect::<Vec<_>>())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("starts");
        let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
        let third = lines.find(|line| line.as_ref().is_ok_and(|l| l.contains("round 3/10000")));
        assert!(third.is_some(), "it ended by itself");
        let pid = child.id().to_string();
        std::process::Command::new("kill").args(["-INT", &pid]).status().expect("kill");
        // What it says is read to the end: a pipe that is full or closed would hold it up.
        lines.for_each(drop);
        assert_eq!(child.wait().expect("ends").code(), Some(130));
        let report: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&json).expect("report")).expect("JSON");
        let of_rounds: Vec<usize> =
            rows(&report).map(|row| row["rounds"].as_array().expect("rounds").len()).collect();
        assert!(!of_rounds.is_empty() && of_rounds.iter().all(|rounds| *rounds == of_rounds[0]));
        assert!(of_rounds[0] >= 2, "{of_rounds:?}");
        let notes = report["notes"].as_array().expect("notes");
        let told = format!("interrupted in round {} of fsmark", of_rounds[0] + 1);
        let is_told = |note: &serde_json::Value| note.as_str().is_some_and(|n| n.contains(&told));
        assert!(notes.iter().any(is_told), "{notes:?}");
    });
}

#[test]
fn probe_measures_device_and_machine() {
    in_scratch("probe", Needs::Nothing, |scratch| {
        let json = scratch.dir.join("probe.json").to_string_lossy().into_owned();
        // By a path that is not absolute: a mount of root's is known by one that is.
        let out = scratch.run(&["probe", ".", "--json", &json]);
        let complaints = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && complaints.is_empty(), "{complaints}");
        let left = std::fs::read_dir(scratch.work()).expect("the directory").count();
        assert_eq!(left, 0, "nothing is left behind");
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
fn a_report_is_saved_also_when_nobody_reads_the_table() {
    in_scratch("unread", Needs::Nothing, |scratch| {
        let (on, json) = (format!("dir:{}", scratch.work()), scratch.json());
        let mut child = scratch
            .command(&["fsmark", "--quick", "--no-probe", "--rounds", "1", "--files", "5"])
            .args(["--mode", "none", "--allow-no-device", "--on", &on, "--json", &json])
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::null())
            .spawn()
            .expect("starts");
        drop(child.stdout.take());
        assert!(child.wait().expect("ends").success());
        let report: serde_json::Value =
            serde_json::from_slice(&std::fs::read(json).expect("report")).expect("JSON");
        assert!(median(&report, "fsmark", "none", "files_per_s") > 0.0);
    });
}

#[test]
fn a_path_that_is_no_text_is_as_good_as_another() {
    use std::os::unix::ffi::OsStrExt;
    in_scratch("bytes", Needs::Nothing, |scratch| {
        let work = scratch.dir.join(std::ffi::OsStr::from_bytes(b"w\xFF"));
        std::fs::create_dir(&work).expect("made");
        let (on, json) = (format!("dir:{}", scratch.work()), scratch.json());
        let out = scratch
            .command(&["fsmark", "--quick", "--no-probe", "--rounds", "1", "--files", "5"])
            .args(["--mode", "none", "--allow-no-device", "--on", &on, "--json", &json, "--work"])
            .arg(&work)
            .output()
            .expect("starts");
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        assert!(std::fs::metadata(json).is_ok_and(|m| m.len() > 0));
    });
}

#[test]
fn the_library_runs_without_root_and_says_what_it_lacks() {
    in_scratch("library", Needs::Nothing, |scratch| {
        let options = "--size 512M --files 50 --iterations 1 --threads 1 --mode each,async";
        let report = scratch.quick("fsmark", "weir", options);
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
        let options = "fsync --on weir --no-probe --size 512M --rounds 1 --jobs 1 --seconds 0.3 \
                       --mode seq-range";
        let report = scratch.report(&options.split_whitespace().collect::<Vec<_>>());
        assert!(figure(&report, "weir", "seq-range", "fsync_per_s") > 0.0);
        let options = "--no-probe --size 1G --dirty-mib 16 --mode async,trickle";
        let report = scratch.quick("checkpoint", "weir", options);
        assert!(figure(&report, "weir", "async", "last_fsync_ms") > 0.0);
        assert!(figure(&report, "weir", "trickle", "last_fsync_ms") > 0.0);
    });
}

#[test]
fn a_report_can_be_checked_drawn_and_rendered_again() {
    in_scratch("picture", Needs::Nothing, |scratch| {
        let on = format!("dir:{},weir", scratch.work());
        let options = "--size 512M --files 50 --iterations 1 --mode pass,each,async";
        scratch.quick("fsmark", &on, options);
        let json = scratch.dir.join("out.json").to_string_lossy().into_owned();
        let file = |name: &str| scratch.dir.join(name).to_string_lossy().into_owned();
        let (svg, html) = (file("p.svg"), file("p.html"));
        let narrow = file("narrow.svg");
        for args in [
            &["picture", &json, "--out", &svg][..],
            &["picture", &json, "--narrow", "--out", &narrow],
            &["html", &json, "--out", &html],
        ] {
            let out = scratch.run(args);
            assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        }
        for picture in [svg, narrow] {
            let picture = std::fs::read_to_string(picture).expect("picture");
            assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"));
            assert!(picture.contains(">weir</text>") && !picture.contains("NaN"));
        }
        let first = std::fs::read_to_string(scratch.dir.join("out.html")).expect("page");
        let again = std::fs::read_to_string(html).expect("page");
        let differs = first.lines().zip(again.lines()).find(|(one, other)| one != other);
        assert!(first == again, "made again, the page is another: {differs:?}");
        // No kernel file system: no truth can be contradicted.
        let out = scratch.run(&["check", &json]);
        assert!(out.status.success());
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        assert!(text.contains("fsyncs per flush") && text.contains("0 truths hold"), "{text}");
    });
}

#[test]
fn a_program_that_is_not_installed_is_not_offered() {
    let scratch = Scratch::new("missing");
    let json = scratch.json();
    let args = ["programs", "--quick", "--on", "dir:.", "--allow-no-device", "--no-probe"];
    let some =
        ["--mode", "sqlite,redis,rocksdb,dpkg", "--clients", "1", "--rounds", "1", "--json", &json];
    let mut command = scratch.command(&[&args[..], &some].concat());
    let out = command.env("PATH", "/nowhere").output().expect("weir-lab starts");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let report = std::fs::read(json).expect("report");
    let report: serde_json::Value = serde_json::from_slice(&report).expect("JSON");
    let lacking = report["not_offered"].as_array().expect("list");
    let reasons: Vec<&str> = lacking.iter().filter_map(|s| s["reason"].as_str()).collect();
    assert_eq!(reasons.len(), 6, "{reasons:?}");
    assert!(reasons.iter().all(|reason| reason.contains("is in the package")), "{reasons:?}");
}
