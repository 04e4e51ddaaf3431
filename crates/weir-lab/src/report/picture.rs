//! `weir lab picture REPORT.json`: the headline of a report as one SVG for a README.
//!
//! Two panels from *fsmark*: files per second, and the p99 of an fsync, for one writer, four writers and
//! one asynchronous submitter. Self-contained; light and dark by the reader's preference; the whisker of a
//! bar spans the rounds. Side by side, or one above the other for a narrow screen.

use std::fmt::Write;

use super::schema::{Report, Row};
use super::svg::{escape, tick_label};
use super::table::figure;
use crate::error::{LabError, LabResult};

const WIDTH: f64 = 896.0;
const PANEL: f64 = 432.0;
const NAME: f64 = 112.0;
const VALUE: f64 = 112.0;
const ROW: f64 = 21.0;
/// Around everything.
const MARGIN: f64 = 12.0;
const HEAD: f64 = 74.0;
const GROUP_HEAD: f64 = 30.0;

const STYLE: &str = "text{font:13px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;fill:#2b313a}\
.t{font-size:16px;font-weight:600}.s{fill:#68717e;font-size:12px}.g{font-weight:600}\
.n{text-anchor:end}.k{fill:#9aa7b6}.w{fill:#1769c4}.m{fill:#5ba0e6}.r{stroke:#2b313a;stroke-width:1.6}\
.a{stroke:#d5dae1}.b{fill:#fff}\
@media(prefers-color-scheme:dark){text{fill:#dfe3e8}.s{fill:#97a1ae}.k{fill:#66717f}.w{fill:#4c9df0}\
.m{fill:#2f6fb3}.r{stroke:#eef1f4}.a{stroke:#39414c}.b{fill:#14171c}}";

/// A group of bars: its title, the mode, the number of threads.
const GROUPS: [(&str, &str, u64); 3] = [
    ("1 writer, fsync before each close", "each", 1),
    ("4 writers, fsync before each close", "each", 4),
    ("1 submitter, fsyncs in flight", "async", 1),
];

struct Panel {
    title: &'static str,
    note: &'static str,
    metric: &'static str,
    log: bool,
}

const PANELS: [Panel; 2] = [
    Panel {
        title: "Small files made durable",
        note: "files per second, more is better; each group on its own scale",
        metric: "files_per_s",
        log: false,
    },
    Panel {
        title: "p99 of an fsync",
        note: "less is better, log scale",
        metric: "fsync_p99_us",
        log: true,
    },
];

/// The row of a target in a group: with several depths, the one with the most files per second.
fn row_of<'a>(
    report: &'a Report,
    target: &str,
    group: (&str, &str, u64),
    metric: &str,
) -> Option<&'a Row> {
    let of = |metric: &str| {
        report
            .results
            .iter()
            .filter(|r| {
                r.experiment == "fsmark"
                    && r.target == target
                    && r.mode == group.1
                    && r.params.get("threads") == Some(&group.2.into())
            })
            .filter(|r| r.metric == metric)
            .collect::<Vec<_>>()
    };
    let best = of("files_per_s").into_iter().max_by(|a, b| a.median.total_cmp(&b.median))?;
    of(metric).into_iter().find(|r| r.params == best.params)
}

/// The picture of a report's *fsmark*.
pub fn render(report: &Report, narrow: bool) -> LabResult<String> {
    let targets: Vec<&str> = report.targets.iter().map(|t| t.name.as_str()).collect();
    let groups: Vec<_> = GROUPS
        .into_iter()
        .filter(|g| targets.iter().any(|t| row_of(report, t, *g, PANELS[0].metric).is_some()))
        .collect();
    if groups.is_empty() {
        return Err(LabError::BadOption(
            "the report has no fsmark figures of modes 'each' or 'async' with 1 or 4 threads"
                .into(),
        ));
    }
    let rows = targets.len() as f64 * ROW + GROUP_HEAD;
    let panel_height = HEAD + rows * groups.len() as f64;
    let (width, height) =
        if narrow { (PANEL, 2.0 * panel_height) } else { (WIDTH, panel_height + 30.0) };
    let (outer_width, outer_height) = (width + 2.0 * MARGIN, height + MARGIN);
    // With a background of its own: the page's may be dark where the reader prefers light, and the other way round.
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"-{MARGIN} 0 {outer_width} {outer_height:.0}\" \
         width=\"{outer_width}\" height=\"{outer_height:.0}\" role=\"img\" aria-label=\"{}\">\n<style>{STYLE}</style>\n\
         <rect class=\"b\" x=\"-{MARGIN}\" width=\"{outer_width}\" height=\"{outer_height:.0}\" rx=\"6\"/>\n",
        escape(&summary(report, &targets))
    );
    for (i, panel) in PANELS.iter().enumerate() {
        let at = i as f64;
        let (left, top) =
            if narrow { (0.0, at * (panel_height - 10.0)) } else { (at * (WIDTH - PANEL), 0.0) };
        draw_panel(&mut out, report, panel, (left, top), &targets, &groups);
    }
    if !narrow {
        let _ = writeln!(
            out,
            "<text class=\"s\" x=\"0\" y=\"{:.0}\">{}</text>",
            height - 8.0,
            escape(&footer(report))
        );
    }
    out.push_str("</svg>\n");
    Ok(out)
}

/// In words, for those who do not see it.
fn summary(report: &Report, targets: &[&str]) -> String {
    let mut text = "Small files made durable per second".to_owned();
    for target in targets {
        if let Some(row) = row_of(report, target, GROUPS[0], "files_per_s") {
            let _ = write!(text, ", {target} {}", figure(row.median));
        }
    }
    text
}

fn footer(report: &Report) -> String {
    let rounds = report.results.iter().map(|r| r.rounds.len()).max().unwrap_or(0);
    let m = &report.machine;
    format!(
        "4 KiB files; medians and ranges of {rounds} interleaved rounds; disk {}; {} CPUs, Linux {}; weir lab {}",
        report.disk, m.cpus, m.kernel, report.version
    )
}

fn draw_panel(
    out: &mut String,
    report: &Report,
    panel: &Panel,
    (left, top): (f64, f64),
    targets: &[&str],
    groups: &[(&str, &str, u64)],
) {
    let found = |target: &str, group| row_of(report, target, group, panel.metric);
    let all = groups.iter().flat_map(|g| targets.iter().filter_map(|t| found(t, *g)));
    let whole = Scale::of(all);
    let x0 = left + NAME;
    let _ = writeln!(
        out,
        "<text class=\"t\" x=\"{left}\" y=\"{}\">{}</text><text class=\"s\" x=\"{left}\" y=\"{}\">{}</text>",
        top + 24.0,
        panel.title,
        top + 44.0,
        panel.note
    );
    let mut y = top + HEAD;
    for group in groups {
        let _ = writeln!(out, "<text class=\"g\" x=\"{left}\" y=\"{y:.0}\">{}</text>", group.0);
        y += 10.0;
        let base = found(targets.first().copied().unwrap_or(""), *group).map(|r| r.median);
        // A rate is compared within its group; latencies of all groups share a logarithmic scale.
        let of_group = targets.iter().filter_map(|t| found(t, *group));
        let scale = if panel.log { whole } else { Scale::of(of_group) };
        let place = |value: f64| scale.place(value, panel.log);
        let bottom = y + targets.len() as f64 * ROW;
        let _ =
            writeln!(out, "<path class=\"a\" d=\"M{x0:.1} {:.1}V{:.1}\"/>", y + 1.0, bottom - 1.0);
        for target in targets {
            let middle = y + ROW / 2.0;
            let _ = write!(
                out,
                "<text class=\"n\" x=\"{:.0}\" y=\"{:.1}\">{}</text>",
                x0 - 8.0,
                middle + 4.5,
                escape(target)
            );
            if let Some(row) = found(target, *group) {
                bar(out, row, panel, base, x0, middle, &place);
            } else {
                let (x, y) = (x0 + 6.0, middle + 4.5);
                let _ = write!(out, "<text class=\"s\" x=\"{x:.0}\" y=\"{y:.1}\">–</text>");
            }
            out.push('\n');
            y += ROW;
        }
        y += GROUP_HEAD - 10.0;
    }
}

/// What the bars of a scale span.
#[derive(Clone, Copy)]
struct Scale {
    least: f64,
    most: f64,
}

impl Scale {
    fn of<'a>(rows: impl Iterator<Item = &'a Row>) -> Self {
        let none = Scale { least: f64::INFINITY, most: f64::MIN_POSITIVE };
        rows.fold(none, |s, row| Scale {
            least: if row.min > 0.0 { s.least.min(row.min) } else { s.least },
            most: s.most.max(row.max),
        })
    }

    /// Length of a bar.
    fn place(self, value: f64, log: bool) -> f64 {
        let share = if log {
            let low = self.least.log10().floor();
            (value.max(1e-9).log10() - low) / (self.most.log10() - low).max(1.0)
        } else {
            value / self.most
        };
        share.clamp(0.0, 1.0) * (PANEL - NAME - VALUE)
    }
}

fn bar(
    out: &mut String,
    row: &Row,
    panel: &Panel,
    base: Option<f64>,
    x0: f64,
    middle: f64,
    place: &impl Fn(f64) -> f64,
) {
    let class = match row.target.as_str() {
        "weir" | "weir-loop" => "w",
        name if name.starts_with("weir") => "m",
        _ => "k",
    };
    let (low, high) = (x0 + place(row.min), x0 + place(row.max));
    let text = if panel.metric.ends_with("_us") {
        tick_label(three_digits(row.median), "us")
    } else {
        figure(row.median)
    };
    let is_base = base.is_none() || row.baseline.as_deref() == Some(row.target.as_str());
    let ratio = row.ratio.filter(|_| !is_base).map_or(String::new(), |r| format!(" · {r:.1}x"));
    let _ = write!(
        out,
        "<rect class=\"{class}\" x=\"{x0:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"13\" rx=\"2\"/>\
         <path class=\"r\" d=\"M{low:.1} {middle:.1}H{high:.1}\"/>\
         <text x=\"{:.1}\" y=\"{:.1}\">{text}<tspan class=\"s\">{ratio}</tspan></text>",
        middle - 6.5,
        place(row.median).max(1.0),
        high.max(x0 + place(row.median)) + 7.0,
        middle + 4.5,
    );
}

/// A latency as people read it: three digits.
fn three_digits(value: f64) -> f64 {
    if value <= 0.0 {
        return 0.0;
    }
    let scale = 10_f64.powf(2.0 - value.log10().floor());
    (value * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_grow_with_the_value_and_stay_in_their_panel() {
        let scale = Scale { least: 20.0, most: 5000.0 };
        for log in [false, true] {
            let lengths = [20.0, 100.0, 5000.0].map(|v| scale.place(v, log));
            assert!(lengths.is_sorted() && lengths[0] > 0.0, "{lengths:?}");
            assert!((lengths[2] - (PANEL - NAME - VALUE)).abs() < 1e-9);
        }
        let nothing = Scale::of(std::iter::empty());
        assert!(nothing.place(0.0, false).is_finite() && nothing.place(0.0, true).is_finite());
    }

    #[test]
    fn latencies_have_three_digits() {
        for (value, shown) in [(123.456, 123.0), (0.123_456, 0.123), (98_765.0, 98_800.0)] {
            assert!((three_digits(value) - shown).abs() < 1e-9, "{value}");
        }
        assert!(three_digits(0.0).abs() < 1e-9);
    }

    #[test]
    fn a_report_without_fsmark_has_no_picture() {
        let e = render(&Report::default(), false).expect_err("nothing to draw").to_string();
        assert!(e.contains("no fsmark"), "{e}");
    }
}
