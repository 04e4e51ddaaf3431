//! The table on the terminal.

use super::schema::{Report, Row, skipped_groups};
use crate::experiments::label;
use std::fmt::Write;

/// A figure with as many digits as make sense.
pub fn figure(value: f64) -> String {
    let magnitude = value.abs();
    if value == 0.0 {
        "0".into()
    } else if magnitude >= 10_000.0 {
        grouped(value.round() as i64)
    } else if magnitude >= 100.0 {
        format!("{value:.0}")
    } else if magnitude >= 10.0 {
        format!("{value:.1}")
    } else if magnitude >= 0.01 {
        format!("{value:.2}")
    } else {
        format!("{value:.4}")
    }
}

fn grouped(n: i64) -> String {
    let digits = n.unsigned_abs().to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    if n < 0 { format!("-{out}") } else { out }
}

/// Metrics that the table shows; JSON has all of them.
pub fn is_headline(metric: &str) -> bool {
    const SHOWN: [&str; 38] = [
        "files_per_s",
        "mib_per_s",
        "fsync_per_s",
        "gib_per_s",
        "fsync_p50_us",
        "fsync_p99_us",
        "flushes_per_file",
        "flushes_per_fsync",
        "writes_per_fsync",
        "write_amplification",
        "last_fsync_ms",
        "requests_per_s",
        "durable_ms",
        "extents_per_file",
        "free_extents",
        "free_under_256k_mib",
        "seq_write_mib_per_s",
        "tree_read_mib_per_s",
        "work_per_s",
        "stalls_per_s",
        "median_us",
        "mib_per_s_one_at_a_time",
        "total_s",
        "last_over_first_tenth",
        "cold_lookup_p50_us",
        "reads_per_cold_lookup",
        "open_ms",
        "recovery_ms",
        "cpu_us_per_file",
        "cpu_us_per_fsync",
        "cpu_us_per_ticket",
        "submit_mean_us",
        "submit_p50_us",
        "held_mib",
        "tickets_per_s",
        "transactions_per_s",
        "transaction_p99_us",
        "flushes_per_transaction",
    ];
    const SHOWN_ENDS: [&str; 8] = [
        "read_p99_us",
        "read_p999_us",
        "log_p99_us",
        "log_p999_us",
        "f1_p50_us",
        "f1_p95_us",
        "write_p99_us",
        "alloc_p99_us",
    ];
    SHOWN.contains(&metric)
        || SHOWN_ENDS.iter().any(|e| metric.ends_with(e))
        || metric.ends_with("_ns")
}

/// The whole table as text.
pub fn render(report: &Report) -> String {
    let header = [
        "experiment",
        "case",
        "metric",
        "target",
        "median",
        "min..max",
        "ratio",
        "vs mode",
        "floor",
    ];
    let mut lines: Vec<[String; 9]> = vec![header.map(str::to_owned)];
    let mut rows: Vec<&Row> = report
        .results
        .iter()
        .filter(|r| r.experiment == "probe" || is_headline(&r.metric))
        .collect();
    // Targets of the same figure next to each other, in the order of the run.
    let rank = |r: &Row| {
        report
            .results
            .iter()
            .position(|o| o.experiment == r.experiment && o.mode == r.mode && o.params == r.params)
    };
    rows.sort_by_key(|r| rank(r));
    let mut seen: Vec<(Option<usize>, &str)> = Vec::new();
    let mut order: Vec<&Row> = Vec::new();
    for row in &rows {
        let key = (rank(row), row.metric.as_str());
        if seen.contains(&key) {
            continue;
        }
        seen.push(key);
        order.extend(rows.iter().filter(|r| rank(r) == key.0 && r.metric == row.metric));
    }
    let ratio = |r: Option<f64>| r.map_or(String::new(), |r| format!("{r:.2}x"));
    for row in order {
        let spread = match (row.ratio_min, row.ratio_max) {
            (Some(low), Some(high)) if row.rounds.len() > 1 => {
                format!("{} ({low:.2}-{high:.2})", ratio(row.ratio))
            }
            _ => ratio(row.ratio),
        };
        lines.push([
            row.experiment.clone(),
            label(&row.mode, &row.params),
            row.metric.clone(),
            row.target.clone(),
            figure(row.median),
            format!("{}..{}", figure(row.min), figure(row.max)),
            spread,
            ratio(row.mode_ratio),
            ratio(row.floor_ratio),
        ]);
    }
    let mut out = aligned(&lines);
    for s in skipped_groups(&report.not_offered) {
        let word = if s.failed { "FAILED" } else { "not offered" };
        let cases = s.cases.join(", ");
        let _ = writeln!(out, "{word}: {} on {}: {cases}: {}", s.experiment, s.target, s.reason);
    }
    for note in &report.notes {
        let _ = writeln!(out, "note: {note}");
    }
    out
}

/// Columns padded to their widest cell; figures to the right. A cell equal to the one above in the
/// leading columns is left empty.
fn aligned<const N: usize>(lines: &[[String; N]]) -> String {
    let mut widths = [0; N];
    for line in lines {
        for (w, cell) in widths.iter_mut().zip(line) {
            *w = (*w).max(cell.chars().count());
        }
    }
    let mut out = String::new();
    for (i, line) in lines.iter().enumerate() {
        let mut text = String::new();
        let mut repeating = i > 1;
        for (c, cell) in line.iter().enumerate() {
            repeating = repeating && c < 3 && lines[i - 1][c] == *cell;
            let shown = if repeating { "" } else { cell.as_str() };
            let width = widths[c];
            if c >= 4 {
                let _ = write!(text, "{shown:>width$}  ");
            } else {
                let _ = write!(text, "{shown:<width$}  ");
            }
        }
        out.push_str(text.trim_end());
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_keep_three_meaningful_digits() {
        for (value, text) in [
            (0.0, "0"),
            (1_234_567.0, "1,234,567"),
            (-12_345.0, "-12,345"),
            (999.4, "999"),
            (12.34, "12.3"),
            (1.234, "1.23"),
            (0.001_23, "0.0012"),
        ] {
            assert_eq!(figure(value), text);
        }
    }

    #[test]
    fn repeated_leading_cells_are_shown_once() {
        let line =
            |a: &str, b: &str| [a.to_owned(), b.to_owned(), "m".into(), "t".into(), "1".into()];
        let text = aligned(&[line("e", "c"), line("x", "y"), line("x", "z")]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].starts_with('x') && lines[2].starts_with("   z"), "{text}");
    }
}
