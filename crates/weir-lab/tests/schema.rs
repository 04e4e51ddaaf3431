//! The JSON schema is an interface: a report with every field set must serialise to exactly the
//! golden file. A deliberate change needs a new schema number and `docs/LAB.md`.

use weir_lab::experiments::{Better, Mark, Params, Size};
use weir_lab::measure::SeriesPoint;
use weir_lab::report::schema::{Curve, Machine, Report, Row, SCHEMA, SeriesRow, Skipped};
use weir_lab::target::stage::TargetInfo;

const GOLDEN: &str = include_str!("schema.golden.json");

fn sample() -> Report {
    let params: Params = [("threads".to_owned(), 4.into())].into();
    let (experiment, target, mode) = ("fsmark".to_owned(), "ext4".to_owned(), "async".to_owned());
    Report {
        schema: SCHEMA.into(),
        command: "weir lab fsmark --on xfs,ext4".into(),
        version: "0.1.0".into(),
        started_unix_s: 1_750_000_000,
        duration_s: 12.5,
        machine: Machine {
            kernel: "6.18".into(),
            cpu: "cpu".into(),
            cpus: 2,
            memory_mib: 24_000,
            disk: "vda: ext4 (rw)".into(),
            write_cache: "write back, FUA no".into(),
        },
        disk: "plain".into(),
        size_bytes: 1 << 30,
        seed: 1,
        quick: false,
        loads: Size::Full,
        targets: vec![TargetInfo {
            name: target.clone(),
            fs_type: "ext4".into(),
            on: "/dev/loop0".into(),
            format: "mkfs.ext4".into(),
            options: "rw,noatime".into(),
            version: "1.47".into(),
            counters: "/sys/block/loop0/stat".into(),
        }],
        results: vec![Row {
            experiment: experiment.clone(),
            target: target.clone(),
            mode: mode.clone(),
            params: params.clone(),
            metric: "files_per_s".into(),
            unit: "files/s".into(),
            better: Better::Higher,
            median: 2.5,
            min: 2.0,
            max: 3.0,
            rounds: vec![2.0, 3.0],
            missing_rounds: Vec::new(),
            baseline: Some("xfs".into()),
            ratio: Some(1.25),
            ratio_min: Some(1.0),
            ratio_max: Some(1.5),
            base_mode: Some("pass".into()),
            mode_ratio: Some(5.0),
            floor_ratio: None,
            disturbed_rounds: 0,
        }],
        curves: vec![Curve {
            experiment: experiment.clone(),
            target: target.clone(),
            mode: mode.clone(),
            params: params.clone(),
            class: "fsync".into(),
            count: 10,
            max_us: 9.5,
            points: vec![(50.0, 3.5)],
        }],
        series: vec![SeriesRow {
            experiment: experiment.clone(),
            target: target.clone(),
            mode: mode.clone(),
            params: params.clone(),
            class: "fsync".into(),
            step_ms: 100,
            points: vec![SeriesPoint { count: 1, mean_us: 2.5, max_us: 2.5 }],
            marks: vec![Mark { from_ms: 1, to_ms: 2, label: "making durable".into() }],
        }],
        not_offered: vec![Skipped {
            experiment,
            target,
            mode,
            params,
            reason: "no".into(),
            failed: false,
        }],
        notes: vec!["note".into()],
    }
}

#[test]
fn the_schema_is_the_golden_one() {
    let text = serde_json::to_string_pretty(&sample()).expect("serialises") + "\n";
    assert_eq!(text, GOLDEN);
}

#[test]
fn a_report_survives_saving_and_loading() {
    let path = std::env::temp_dir().join(format!("weir-lab-schema-{}.json", std::process::id()));
    sample().save(&path).expect("saved");
    let loaded = Report::load(&path).expect("loaded");
    let _ = std::fs::remove_file(&path);
    assert_eq!(loaded, sample());
}

#[test]
fn fields_added_by_later_labs_do_not_break_this_one() {
    let with_more = GOLDEN.replacen("\"quick\": false", "\"quick\": false,\n  \"new\": 1", 1);
    let report: Report = serde_json::from_str(&with_more).expect("unknown fields are ignored");
    assert_eq!(report, sample());
}
