//! `weir lab compare OLD NEW`: what changed between two reports, by more than their spread.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::schema::{Report, Row, Skipped};
use super::table::figure;
use crate::experiments::{Better, label};

/// How a metric moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Better, and the ranges of the rounds do not overlap.
    Better,
    /// Worse, and the ranges of the rounds do not overlap.
    Worse,
    /// Within the spread.
    Same,
}

/// One metric in both reports.
#[derive(Clone, Debug)]
pub struct Change<'a> {
    /// The old row.
    pub old: &'a Row,
    /// The new row.
    pub new: &'a Row,
    /// New median over old median.
    pub ratio: f64,
    /// Whether it matters.
    pub verdict: Verdict,
}

/// Compares two rows of the same metric.
pub fn verdict(old: &Row, new: &Row) -> Verdict {
    let up = new.min > old.max;
    let down = new.max < old.min;
    match (new.better, up, down) {
        (Better::Higher, true, _) | (Better::Lower, _, true) => Verdict::Better,
        (Better::Higher, _, true) | (Better::Lower, true, _) => Verdict::Worse,
        _ => Verdict::Same,
    }
}

/// The metrics that both reports have.
pub fn changes<'a>(old: &'a Report, new: &'a Report) -> Vec<Change<'a>> {
    let before: BTreeMap<_, &Row> = old.results.iter().map(|r| (r.identity(), r)).collect();
    new.results
        .iter()
        .filter_map(|new| {
            let old = before.get(&new.identity())?;
            // From nothing to something is beyond every gate.
            let ratio = new.median / old.median;
            Some(Change { old, new, ratio, verdict: verdict(old, new) })
        })
        .collect()
}

/// Whether a report has figures of a case that another has none of.
fn had_figures(report: &Report, lacking: &Skipped) -> bool {
    report.results.iter().any(|r| {
        r.experiment == lacking.experiment
            && r.target == lacking.target
            && r.mode == lacking.mode
            && r.params == lacking.params
    })
}

/// The comparison as text, and whether a metric got worse by more than `gate_percent`, or a case fails that did not.
pub fn render(old: &Report, new: &Report, gate_percent: Option<f64>) -> (String, bool) {
    let all = changes(old, new);
    let mut out = String::new();
    if old.machine != new.machine || old.disk != new.disk {
        out.push_str("note: different machines or disks: only ratios within a run compare\n");
    }
    if (old.loads, old.size_bytes, old.seed) != (new.loads, new.size_bytes, new.seed) {
        out.push_str("note: different loads, seeds or sizes of the disk\n");
    }
    let mut failed = false;
    let mut same = 0;
    for c in &all {
        if c.verdict == Verdict::Same {
            same += 1;
            continue;
        }
        let percent = (c.ratio - 1.0) * 100.0;
        let word = if c.verdict == Verdict::Better { "better" } else { "WORSE" };
        let beyond = gate_percent.is_some_and(|g| percent.abs() > g);
        // The floor is the machine's, and one figure has no spread to be beyond.
        failed |= c.verdict == Verdict::Worse && beyond && c.new.experiment != "probe";
        let _ = writeln!(
            out,
            "{word:<6} {} {} on {}: {} {} -> {} ({percent:+.1} %)",
            c.new.experiment,
            label(&c.new.mode, &c.new.params),
            c.new.target,
            c.new.metric,
            figure(c.old.median),
            figure(c.new.median),
        );
    }
    for s in new.not_offered.iter().filter(|s| s.failed && had_figures(old, s)) {
        failed |= gate_percent.is_some();
        let case = label(&s.mode, &s.params);
        let _ = writeln!(out, "FAILED {} {case} on {}: {}", s.experiment, s.target, s.reason);
    }
    let gone = old.results.len().saturating_sub(all.len());
    let _ = writeln!(
        out,
        "{} metrics in both reports, {same} within their spread; {gone} only in the old one",
        all.len()
    );
    (out, failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::Floor;

    fn row(better: Better, min: f64, max: f64) -> Row {
        let mut floor = Floor::default();
        floor.figures.push(crate::probe::FloorFigure {
            metric: "m",
            unit: "u",
            value: 1.0,
            better,
        });
        let mut row = floor.rows("t").remove(0);
        (row.min, row.max, row.median) = (min, max, f64::midpoint(min, max));
        row
    }

    #[test]
    fn only_ranges_that_do_not_overlap_count_as_change() {
        let old = row(Better::Higher, 10.0, 12.0);
        assert_eq!(verdict(&old, &row(Better::Higher, 12.5, 13.0)), Verdict::Better);
        assert_eq!(verdict(&old, &row(Better::Higher, 8.0, 9.0)), Verdict::Worse);
        assert_eq!(verdict(&old, &row(Better::Higher, 11.0, 19.0)), Verdict::Same);
        let old = row(Better::Lower, 10.0, 12.0);
        assert_eq!(verdict(&old, &row(Better::Lower, 12.5, 13.0)), Verdict::Worse);
        assert_eq!(verdict(&old, &row(Better::Lower, 8.0, 9.0)), Verdict::Better);
        let old = row(Better::Neither, 1.0, 1.0);
        assert_eq!(verdict(&old, &row(Better::Neither, 5.0, 5.0)), Verdict::Same);
    }

    fn report(mut row: Row) -> Report {
        row.experiment = "fsmark".into();
        Report { results: vec![row], ..Report::default() }
    }

    #[test]
    fn what_was_nothing_and_is_something_is_beyond_every_gate() {
        let gated = |old: Row, new: Row| render(&report(old), &report(new), Some(10.0)).1;
        let lower = |value| row(Better::Lower, value, value);
        assert!(gated(lower(0.0), lower(100.0)));
        assert!(!gated(lower(0.0), lower(0.0)) && !gated(lower(100.0), lower(0.0)));
        assert!(!gated(lower(100.0), lower(105.0)) && gated(lower(100.0), lower(120.0)));
    }

    #[test]
    fn the_floor_of_the_machine_is_told_and_not_gated() {
        let floor =
            |value| Report { results: vec![row(Better::Lower, value, value)], ..Report::default() };
        let (text, failed) = render(&floor(100.0), &floor(150.0), Some(10.0));
        assert!(text.contains("WORSE") && !failed, "{text}");
    }

    #[test]
    fn a_case_that_fails_and_did_not_is_beyond_every_gate() {
        let old = report(row(Better::Higher, 1.0, 1.0));
        let was = &old.results[0];
        let lacking = |mode: &str, failed| Report {
            not_offered: vec![Skipped {
                experiment: was.experiment.clone(),
                target: was.target.clone(),
                mode: mode.to_owned(),
                params: was.params.clone(),
                reason: "files are gone".into(),
                failed,
            }],
            ..Report::default()
        };
        let (text, failed) = render(&old, &lacking(&was.mode, true), Some(10.0));
        assert!(failed && text.contains("files are gone"), "{text}");
        assert!(!render(&old, &lacking(&was.mode, true), None).1, "without a gate it is told");
        assert!(!render(&old, &lacking(&was.mode, false), Some(10.0)).1, "not offered any more");
        assert!(!render(&old, &lacking("another", true), Some(10.0)).1, "it failed before");
    }
}
