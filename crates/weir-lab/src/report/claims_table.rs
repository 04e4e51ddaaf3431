//! `weir lab check --table`: the claims of one or more reports as a table for a document.

use std::fmt::Write;

use super::check::{Bound, Finding, Kind, findings};
use super::schema::{Report, skipped_groups};
use super::table::figure;

/// Marks figures that may not be worth much.
const DISTURBED: char = '†';

/// A line per claim that the reports have figures for: what was found, what the best other file system does
/// in the same rounds, what was claimed, and what each operation costs the device and the processors.
pub fn render(reports: &[Report]) -> String {
    let mut out = String::from(
        "| disk | claim | found | compared with | asked | | per operation: writes, flushes, CPU µs | from the floor |\n\
         |---|---|---|---|---|---|---|---|\n",
    );
    let (mut holding, mut all) = (0, 0);
    for report in reports {
        for finding in findings(report).iter().filter(|f| f.kind == Kind::Claim) {
            let Some(line) = line(&report.disk, finding) else { continue };
            out.push_str(&line);
            all += 1;
            holding += usize::from(finding.holds() == Some(true));
        }
    }
    let _ = writeln!(out, "\n{holding} of {all} claims hold.");
    for report in reports {
        for group in skipped_groups(&report.not_offered).iter().filter(|g| g.failed) {
            let (on, cases) = (group.target, group.cases.join(", "));
            let what = group.experiment;
            let _ = writeln!(out, "**Failed**: {what} on {on}: {cases}: {}", group.reason);
        }
    }
    if out.contains(DISTURBED) {
        let _ = writeln!(out, "{DISTURBED} Other load was seen in so many rounds.");
    }
    out
}

fn line(disk: &str, finding: &Finding) -> Option<String> {
    let found = finding.found?;
    let spread = format!("{} ({}..{})", figure(found.median), figure(found.min), figure(found.max));
    let asked = match finding.bound {
        Bound::AtLeast(b) => format!("≥ {}", figure(b)),
        Bound::AtMost(b) => format!("≤ {}", figure(b)),
    };
    let verdict = if finding.holds() == Some(true) { "holds" } else { "**fails**" };
    let detail = &finding.detail;
    let cost = [detail.writes, detail.flushes, detail.cpu_us];
    let cost = if cost.iter().all(Option::is_none) {
        String::new()
    } else {
        cost.map(|c| c.map_or("–".into(), figure)).join(", ")
    };
    let (result, compared) = match (&detail.against, detail.value) {
        (Some((name, base)), Some(value)) => (
            format!("{} {}: {spread}x", figure(value), detail.unit),
            format!("{name} {} {}", figure(*base), detail.unit),
        ),
        _ => (format!("{spread} {}", detail.unit), String::new()),
    };
    let floor = detail.floor_ratio.map_or(String::new(), |f| format!("{}x", figure(f)));
    let what = match finding.disturbed_rounds {
        0 => finding.what.clone(),
        n => format!("{} {DISTURBED}{n}", finding.what),
    };
    Some(format!(
        "| {disk} | {what} | {} | {compared} | {asked} | {verdict} | {cost} | {floor} |\n",
        result.trim_end(),
    ))
}

#[cfg(test)]
mod tests {
    use super::super::check::Detail;
    use super::*;
    use crate::measure::Spread;

    #[test]
    fn a_line_has_the_figure_its_ratio_and_what_an_operation_costs() {
        let finding = Finding {
            kind: Kind::Claim,
            what: "weir: fsmark".into(),
            bound: Bound::AtLeast(3.0),
            found: Some(Spread { median: 2.0, min: 1.5, max: 2.5 }),
            disturbed_rounds: 2,
            detail: Detail {
                value: Some(8000.0),
                against: Some(("xfs".into(), 4000.0)),
                unit: "files/s".into(),
                writes: Some(1.0),
                flushes: None,
                cpu_us: Some(12.5),
                floor_ratio: Some(1.5),
            },
            moot: None,
        };
        assert_eq!(
            line("plain", &finding).expect("has a figure"),
            "| plain | weir: fsmark †2 | 8000 files/s: 2.00 (1.50..2.50)x | xfs 4000 files/s | ≥ 3.00 | \
             **fails** | 1.00, –, 12.5 | 1.50x |\n"
        );
        assert_eq!(line("plain", &Finding { found: None, ..finding }), None);
    }
}
