//! The report as one self-contained HTML file: no scripts, no network, light and dark.

use std::fmt::Write;

use super::schema::{Curve, Report, Row, SeriesRow, skipped_groups};
use super::svg::{Chart, Line, Shade, XAxis, escape, render as draw};
use super::table::{figure, is_headline};
use crate::experiments::{Better, Params, Size, label};

const STYLE: &str = include_str!("style.css");

/// Figures that each experiment shows as bars, in this order.
const BARS: [(&str, &[&str]); 10] = [
    (
        "fsmark",
        &["files_per_s", "flushes_per_file", "writes_per_file", "cpu_us_per_file", "fsync_p99_us"],
    ),
    (
        "programs",
        &[
            "transactions_per_s",
            "transaction_p99_us",
            "flushes_per_transaction",
            "writes_per_transaction",
            "cpu_us_per_transaction",
        ],
    ),
    ("tickets", &["submit_mean_us", "submit_p50_us", "tickets_per_s", "held_mib"]),
    (
        "fsync",
        &[
            "mib_per_s",
            "fsync_per_s",
            "fsync_p99_us",
            "flushes_per_fsync",
            "writes_per_fsync",
            "cpu_us_per_fsync",
        ],
    ),
    (
        "checkpoint",
        &[
            "read_p99_us",
            "read_p999_us",
            "log_p99_us",
            "log_p999_us",
            "cached_read_p99_us",
            "last_fsync_ms",
        ],
    ),
    ("fastread", &["requests_per_s", "f1_p50_us", "f1_p99_us", "f1_requests_per_s"]),
    ("ingest", &["gib_per_s", "durable_ms", "write_p99_us"]),
    ("aging", &["extents_per_file", "free_extents", "free_under_256k_mib", "seq_write_mib_per_s"]),
    (
        "foundation",
        &[
            "files_per_s",
            "mib_per_s",
            "gib_per_s",
            "hot_read_4k_ns",
            "random_read_4k_ns",
            "total_s",
            "last_over_first_tenth",
            "cold_lookup_p50_us",
            "reads_per_cold_lookup",
            "open_ms",
            "recovery_ms",
        ],
    ),
    ("simoop", &["work_per_s", "read_p99_us", "write_p99_us", "alloc_p99_us"]),
];

/// Parameters that every row of an experiment has alike: said once, not at every bar.
fn common_params(rows: &[&Row]) -> Params {
    let Some(first) = rows.first() else { return Params::new() };
    let mut common = first.params.clone();
    common.retain(|key, value| rows.iter().all(|r| r.params.get(key) == Some(value)));
    common
}

fn without(params: &Params, common: &Params) -> Params {
    let mut rest = params.clone();
    rest.retain(|key, _| !common.contains_key(key));
    rest
}

fn unique<'a>(items: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut found: Vec<&str> = Vec::new();
    for item in items {
        if !found.contains(&item) {
            found.push(item);
        }
    }
    found
}

/// The whole page.
pub fn render(report: &Report) -> String {
    let mut out = String::new();
    let targets = unique(report.targets.iter().map(|t| t.name.as_str()));
    let experiments: Vec<&str> = unique(report.results.iter().map(|r| r.experiment.as_str()))
        .into_iter()
        .filter(|e| *e != "probe")
        .collect();
    let _ = write!(
        out,
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\">\
         <title>weir lab: {}</title><style>{STYLE}</style></head><body>\n",
        escape(&experiments.join(", "))
    );
    header(&mut out, report, &experiments);
    for name in &experiments {
        experiment(&mut out, report, name, &targets);
    }
    floor(&mut out, report);
    remarks(&mut out, report);
    setup(&mut out, report);
    out.push_str("</body></html>\n");
    out
}

fn header(out: &mut String, report: &Report, experiments: &[&str]) {
    let m = &report.machine;
    let _ = write!(
        out,
        "<header><h1>weir lab</h1><p class=\"command\"><code>{}</code></p><p>{} · {} CPUs, {:.0} GiB · \
         Linux {} · disk {} of {} MiB · {} · took {:.0} s{}</p>",
        escape(&report.command),
        escape(&m.cpu),
        m.cpus,
        m.memory_mib as f64 / 1024.0,
        escape(&m.kernel),
        escape(&report.disk),
        report.size_bytes >> 20,
        date(report.started_unix_s),
        report.duration_s,
        match report.loads {
            Size::Quick => " · <b>quick run</b>: small loads",
            Size::Medium => " · <b>medium run</b>: every mode, short loads",
            Size::Full => "",
        },
    );
    if experiments.len() > 1 {
        out.push_str("<nav>");
        for name in experiments {
            let name = escape(name);
            let _ = write!(out, "<a href=\"#{name}\">{name}</a> ");
        }
        out.push_str("</nav>");
    }
    out.push_str("</header>\n");
}

/// Civil date of a Unix time (UTC).
fn date(unix_s: u64) -> String {
    let days = (unix_s / 86_400) as i64 + 719_468;
    let era = days.div_euclid(146_097);
    let doe = days.rem_euclid(146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let (day, month) = (doy - (153 * mp + 2) / 5 + 1, if mp < 10 { mp + 3 } else { mp - 9 });
    let year = yoe + era * 400 + i64::from(month <= 2);
    let (h, min) = (unix_s % 86_400 / 3600, unix_s % 3600 / 60);
    format!("{year}-{month:02}-{day:02} {h:02}:{min:02} UTC")
}

fn question(name: &str) -> String {
    crate::experiments::every(Size::Quick)
        .iter()
        .find(|e| e.name() == name)
        .map(|e| e.question().to_owned())
        .unwrap_or_default()
}

fn experiment(out: &mut String, report: &Report, name: &str, targets: &[&str]) {
    let all: Vec<&Row> = report.results.iter().filter(|r| r.experiment == name).collect();
    let common = common_params(&all);
    let rows: Vec<Row> =
        all.iter().map(|r| Row { params: without(&r.params, &common), ..(*r).clone() }).collect();
    let rows: Vec<&Row> = rows.iter().collect();
    let id = escape(name);
    let baseline = rows.iter().find_map(|r| r.baseline.clone()).unwrap_or_default();
    let _ = write!(
        out,
        "<section id=\"{id}\"><h2>{id}</h2><p class=\"question\">{} <small>{}{}</small></p>\n<div class=\"charts\">",
        escape(&question(name)),
        escape(&label("", &common)),
        if targets.len() > 1 {
            format!(" Ratios (x) are to {} in the same round.", escape(&baseline))
        } else {
            String::new()
        }
    );
    let wanted = BARS.iter().find(|(e, _)| *e == name).map_or(&[] as &[&str], |(_, m)| m);
    for metric in wanted {
        bars(out, &rows, metric, targets);
    }
    out.push_str("</div>\n");
    let curves: Vec<Curve> = report
        .curves
        .iter()
        .filter(|c| c.experiment == name)
        .map(|c| Curve { params: without(&c.params, &common), ..c.clone() })
        .collect();
    let curves: Vec<&Curve> = curves.iter().collect();
    latency_charts(out, name, &curves, targets);
    let series: Vec<SeriesRow> = report
        .series
        .iter()
        .filter(|s| s.experiment == name)
        .map(|s| SeriesRow { params: without(&s.params, &common), ..s.clone() })
        .collect();
    let series: Vec<&SeriesRow> = series.iter().collect();
    if matches!(name, "checkpoint" | "simoop") {
        time_charts(out, name, &series, targets);
    }
    full_table(out, &rows);
    out.push_str("</section>\n");
}

/// A ratio for people; small ones keep their digits.
fn times(ratio: f64) -> String {
    if ratio < 0.01 { format!("{}x", figure(ratio)) } else { format!("{ratio:.2}x") }
}

/// The name of a metric without the unit at its end.
fn metric_title(metric: &str) -> String {
    let units = ["_us", "_ms", "_ns", "_mib", "_s"];
    let bare = units.iter().find_map(|u| metric.strip_suffix(u)).unwrap_or(metric);
    let bare = if bare.ends_with("_per") { metric } else { bare };
    bare.replace('_', " ").replace("p999", "p99.9")
}

/// Bars grouped by case, one per target, with the spread as a whisker.
fn bars(out: &mut String, rows: &[&Row], metric: &str, targets: &[&str]) {
    let rows: Vec<&&Row> = rows.iter().filter(|r| r.metric == metric).collect();
    let Some(first) = rows.first() else { return };
    let top = rows.iter().map(|r| r.max).fold(0.0, f64::max);
    if top <= 0.0 {
        return;
    }
    // Latencies and costs of very different size are only readable on a logarithmic scale.
    let low = rows.iter().map(|r| r.min).filter(|v| *v > 0.0).fold(f64::INFINITY, f64::min);
    let log = top / low > 60.0;
    let place = |v: f64| {
        let share = if log {
            let floor = (low / 2.0).log10();
            ((v.max(low / 2.0)).log10() - floor) / (top.log10() - floor)
        } else {
            v / top
        };
        share.clamp(0.0, 1.0) * 100.0
    };
    let direction = match first.better {
        Better::Higher => "more is better",
        Better::Lower => "less is better",
        Better::Neither => "",
    };
    let _ = write!(
        out,
        "<figure class=\"bars\"><figcaption>{} <small>{}{}{}</small></figcaption>",
        escape(&metric_title(metric)),
        escape(&first.unit.replace("us", "µs")),
        if direction.is_empty() { String::new() } else { format!(", {direction}") },
        if log { ", log scale" } else { "" }
    );
    let labels: Vec<String> = rows.iter().map(|r| label(&r.mode, &r.params)).collect();
    for case in unique(labels.iter().map(String::as_str)) {
        let _ = write!(out, "<div class=\"case\">{}</div>", escape(case));
        for row in rows.iter().filter(|r| label(&r.mode, &r.params) == case) {
            let color = targets.iter().position(|t| *t == row.target).unwrap_or(0) % 8;
            let ratio = row.ratio.filter(|_| row.baseline.as_deref() != Some(&row.target));
            let ratio = ratio.map_or(String::new(), |r| format!(" · {}", times(r)));
            let _ = write!(
                out,
                "<div class=\"row\" title=\"{:.4}..{:.4} {}\"><span class=\"name\">{}</span>\
                 <span class=\"track\"><span class=\"bar c{color}\" style=\"width:{:.1}%\"></span>\
                 <span class=\"spread\" style=\"left:{:.1}%;width:{:.1}%\"></span></span>\
                 <span class=\"value\">{}<small>{ratio}</small></span></div>",
                row.min,
                row.max,
                escape(&row.unit),
                escape(&row.target),
                place(row.median),
                place(row.min),
                (place(row.max) - place(row.min)).max(0.0),
                figure(row.median),
            );
        }
    }
    out.push_str("</figure>\n");
}

fn latency_charts(out: &mut String, name: &str, curves: &[&Curve], targets: &[&str]) {
    if curves.is_empty() {
        return;
    }
    // Where the modes are the point, a chart per target compares them; else a chart per case
    // compares targets.
    let by_mode = matches!(name, "checkpoint" | "fastread");
    let mut classes = unique(curves.iter().map(|c| c.class.as_str()));
    // Those that users wait for first.
    classes.sort_by_key(|c| {
        ["read", "log", "write", "fsync", "f1"].iter().position(|k| k == c).unwrap_or(9)
    });
    let mut charts = Vec::new();
    let cases: Vec<String> = curves.iter().map(|c| label(&c.mode, &c.params)).collect();
    let cases = unique(cases.iter().map(String::as_str));
    for class in classes {
        let of_class = || curves.iter().filter(|c| c.class == class);
        if by_mode {
            for target in targets {
                let lines = cases
                    .iter()
                    .enumerate()
                    .filter_map(|(i, case)| {
                        let c = of_class()
                            .find(|c| c.target == *target && label(&c.mode, &c.params) == *case)?;
                        Some(line((*case).to_owned(), i, c))
                    })
                    .collect();
                charts.push(curve_chart(format!("{target}: {class}"), lines));
            }
        } else {
            for case in &cases {
                let lines = of_class()
                    .filter(|c| label(&c.mode, &c.params) == *case)
                    .map(|c| {
                        let color = targets.iter().position(|t| *t == c.target).unwrap_or(0);
                        line(c.target.clone(), color, c)
                    })
                    .collect();
                charts.push(curve_chart(format!("{case}: {class}"), lines));
            }
        }
    }
    out.push_str("<h3>Latency distributions</h3>\n");
    // The first few are open to the eye, the rest a click away.
    let split = charts.len().min(4);
    out.push_str("<div class=\"charts\">");
    charts[..split].iter().for_each(|c| out.push_str(&draw(c)));
    out.push_str("</div>\n");
    if charts.len() > split {
        let _ = write!(
            out,
            "<details><summary>{} more</summary><div class=\"charts\">",
            charts.len() - split
        );
        charts[split..].iter().for_each(|c| out.push_str(&draw(c)));
        out.push_str("</div></details>\n");
    }
}

fn line(name: String, color: usize, curve: &Curve) -> Line {
    Line { name, color, points: curve.points.clone() }
}

fn curve_chart(title: String, lines: Vec<Line>) -> Chart {
    Chart { title, x: XAxis::Percentile, unit: "us", lines, shades: Vec::new() }
}

/// Maxima over time, with the phases of the background work shaded.
fn time_charts(out: &mut String, name: &str, series: &[&SeriesRow], targets: &[&str]) {
    if series.is_empty() {
        return;
    }
    out.push_str("<h3>Over time (slowest operation of each 100 ms, last round)</h3>\n");
    let cases: Vec<String> = series.iter().map(|s| label(&s.mode, &s.params)).collect();
    let cases = unique(cases.iter().map(String::as_str));
    let mut charts = Vec::new();
    for case in &cases {
        for target in targets {
            let found: Vec<&&SeriesRow> = series
                .iter()
                .filter(|s| s.target == *target && label(&s.mode, &s.params) == *case)
                .collect();
            let Some(first) = found.first() else { continue };
            let lines = found
                .iter()
                .enumerate()
                .map(|(i, s)| Line {
                    name: s.class.clone(),
                    color: i,
                    points: points_of(s, |p| p.max_us),
                })
                .collect();
            let shades = first
                .marks
                .iter()
                .filter(|m| m.label != "dirtying")
                .map(|m| Shade {
                    span: (m.from_ms as f64 / 1e3, m.to_ms as f64 / 1e3),
                    label: m.label.clone(),
                })
                .collect();
            let title = format!("{target}: {case}");
            charts.push(Chart { title, x: XAxis::Time, unit: "us", lines, shades });
        }
    }
    if name == "simoop" {
        let lines = series
            .iter()
            .filter(|s| s.class == "alloc")
            .map(|s| Line {
                name: s.target.clone(),
                color: targets.iter().position(|t| *t == s.target).unwrap_or(0),
                points: points_of(s, |p| p.count as f64 * 1e3 / s.step_ms.max(1) as f64),
            })
            .collect();
        let title = "work rate, loops per second".into();
        let chart = Chart { title, x: XAxis::Time, unit: "1/s", lines, shades: Vec::new() };
        charts.insert(0, chart);
    }
    // The mode that hurts comes right after the quiet run: show both for every target.
    let split = charts.len().min(2 * targets.len().max(1));
    out.push_str("<div class=\"charts\">");
    charts[..split].iter().for_each(|c| out.push_str(&draw(c)));
    out.push_str("</div>\n");
    if charts.len() > split {
        let _ = write!(
            out,
            "<details><summary>{} more</summary><div class=\"charts\">",
            charts.len() - split
        );
        charts[split..].iter().for_each(|c| out.push_str(&draw(c)));
        out.push_str("</div></details>\n");
    }
}

fn points_of(s: &SeriesRow, y: impl Fn(&crate::measure::SeriesPoint) -> f64) -> Vec<(f64, f64)> {
    s.points.iter().enumerate().map(|(i, p)| (i as f64 * s.step_ms as f64 / 1e3, y(p))).collect()
}

fn full_table(out: &mut String, rows: &[&Row]) {
    let shown = rows.iter().filter(|r| is_headline(&r.metric)).count();
    let _ = write!(
        out,
        "<details><summary>Table ({shown} figures; all {} are in the JSON)</summary><div class=\"scroll\"><table>\
         <thead><tr><th>case<th>metric<th>target<th>median<th>min<th>max<th>ratio<th>spread<th>vs base mode<th>floor</tr></thead><tbody>",
        rows.len()
    );
    for row in rows.iter().filter(|r| is_headline(&r.metric)) {
        let x = |v: Option<f64>| v.map_or(String::new(), |v| format!("{v:.2}x"));
        let spread = match (row.ratio_min, row.ratio_max) {
            (Some(a), Some(b)) => format!("{a:.2}–{b:.2}"),
            _ => String::new(),
        };
        let _ = write!(
            out,
            "<tr><td>{}<td>{}<td>{}<td class=\"n\">{}<td class=\"n\">{}<td class=\"n\">{}<td class=\"n\">{}<td class=\"n\">{spread}<td class=\"n\">{}<td class=\"n\">{}</tr>",
            escape(&label(&row.mode, &row.params)),
            escape(&row.metric),
            escape(&row.target),
            figure(row.median),
            figure(row.min),
            figure(row.max),
            x(row.ratio),
            x(row.mode_ratio),
            x(row.floor_ratio),
        );
    }
    out.push_str("</tbody></table></div></details>\n");
}

fn floor(out: &mut String, report: &Report) {
    let rows: Vec<&Row> = report.results.iter().filter(|r| r.experiment == "probe").collect();
    if rows.is_empty() {
        return;
    }
    let disks = unique(rows.iter().map(|r| r.target.as_str()));
    out.push_str(
        "<section id=\"probe\"><h2>The floor</h2><p class=\"question\">What the disk and the machine \
         can do without any file system. Columns named <i>floor</i> above say how many times worse a \
         result is.</p><div class=\"scroll\"><table><thead><tr><th>figure",
    );
    for disk in &disks {
        let _ = write!(out, "<th>{}", escape(disk));
    }
    out.push_str("<th>unit</tr></thead><tbody>");
    for metric in unique(rows.iter().map(|r| r.metric.as_str())) {
        let _ = write!(out, "<tr><td>{}", escape(metric));
        for disk in &disks {
            let found = rows.iter().find(|r| r.metric == metric && r.target == *disk);
            let text = found.map_or(String::new(), |r| figure(r.median));
            let _ = write!(out, "<td class=\"n\">{text}");
        }
        let unit = rows.iter().find(|r| r.metric == metric).map_or("", |r| r.unit.as_str());
        let _ = write!(out, "<td>{}</tr>", escape(unit));
    }
    out.push_str("</tbody></table></div></section>\n");
}

fn remarks(out: &mut String, report: &Report) {
    if report.notes.is_empty() && report.not_offered.is_empty() {
        return;
    }
    out.push_str("<section id=\"notes\"><h2>Remarks</h2><ul>");
    for note in &report.notes {
        let _ = write!(out, "<li>{}</li>", escape(note));
    }
    for s in skipped_groups(&report.not_offered) {
        let _ = write!(
            out,
            "<li>{}: {} on {}: {}: {}</li>",
            if s.failed { "<b>failed</b>" } else { "not offered" },
            escape(s.experiment),
            escape(s.target),
            escape(&s.cases.join(", ")),
            escape(s.reason)
        );
    }
    out.push_str("</ul></section>\n");
}

fn setup(out: &mut String, report: &Report) {
    let m = &report.machine;
    let _ = write!(
        out,
        "<section id=\"setup\"><h2>Set-up</h2><p>Lab {}; seed {}; work directory on {}; write cache: {}.</p>\
         <div class=\"scroll\"><table><thead><tr><th>target<th>type<th>on<th>format<th>mount options<th>version<th>device counters</tr></thead><tbody>",
        escape(&report.version),
        report.seed,
        escape(&m.disk),
        escape(&m.write_cache),
    );
    for t in &report.targets {
        let _ = write!(
            out,
            "<tr><td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}</tr>",
            escape(&t.name),
            escape(&t.fs_type),
            escape(&t.on),
            escape(&t.format),
            escape(&t.options.replace(',', ", ")),
            escape(&t.version),
            escape(&t.counters),
        );
    }
    out.push_str("</tbody></table></div></section>\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::SeriesPoint;

    #[test]
    fn a_report_of_anybodys_making_puts_no_markup_into_the_page_and_ends() {
        let name = "<script>alert(1)</script>";
        let point = SeriesPoint { count: 1, mean_us: 1.0, max_us: 1.0 };
        let series = |step_ms| SeriesRow {
            experiment: "simoop".into(),
            target: "weir".into(),
            mode: name.into(),
            params: Params::new(),
            class: "alloc".into(),
            step_ms,
            points: vec![point; 3],
            marks: Vec::new(),
        };
        let mut floor = crate::probe::Floor::default();
        let better = Better::Higher;
        let (metric, unit) = ("files_per_s", "us");
        floor.figures.push(crate::probe::FloorFigure { metric, unit, value: 1.0, better });
        let row = |experiment: &str| Row {
            experiment: experiment.into(),
            target: name.into(),
            mode: name.into(),
            unit: name.into(),
            baseline: Some(name.into()),
            ..floor.rows("t").remove(0)
        };
        let report = Report {
            results: vec![row(name), row("fsmark"), row("simoop"), row("probe")],
            series: vec![series(0), series(u64::MAX)],
            ..Report::default()
        };
        let page = render(&report);
        assert!(!page.contains("<script") && page.len() < 1 << 20, "{} bytes", page.len());
    }

    #[test]
    fn dates_are_civil() {
        assert_eq!(date(0), "1970-01-01 00:00 UTC");
        assert_eq!(date(951_782_400), "2000-02-29 00:00 UTC");
        assert_eq!(date(1_793_318_460), "2026-10-30 00:01 UTC");
    }
}
