//! Line charts as inline SVG: percentile curves and time series on a logarithmic axis.
//!
//! Colours come from CSS classes (`c0` to `c7`), so that one picture serves light and dark.

use std::fmt::Write;

/// One line of a chart.
pub struct Line {
    /// Its name in the legend.
    pub name: String,
    /// Which of the colours.
    pub color: usize,
    /// Points in the chart's own units.
    pub points: Vec<(f64, f64)>,
}

/// How x is scaled.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum XAxis {
    /// Percentiles, by the number of nines.
    Percentile,
    /// Seconds.
    Time,
}

/// A span behind the lines.
pub struct Shade {
    /// Begin and end in x units.
    pub span: (f64, f64),
    /// What it is.
    pub label: String,
}

/// A chart.
pub struct Chart {
    /// Its title.
    pub title: String,
    /// The scale of x.
    pub x: XAxis,
    /// Name of the unit of y; "us" is shown as µs, ms or s.
    pub unit: &'static str,
    /// The lines.
    pub lines: Vec<Line>,
    /// Spans to mark.
    pub shades: Vec<Shade>,
}

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 66.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 34.0;

/// Text that is safe inside HTML.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Position of a percentile: 0 for 0, 1 for 90, 2 for 99 and so on.
fn nines(percentile: f64) -> f64 {
    -(1.0 - (percentile / 100.0).min(0.999_999_99)).log10()
}

/// A value of y for people.
pub fn tick_label(value: f64, unit: &str) -> String {
    let plain = |v: f64| {
        let text = format!("{v:.3}");
        let text = text.trim_end_matches('0').trim_end_matches('.').to_owned();
        if text.is_empty() { "0".into() } else { text }
    };
    if unit != "us" {
        return if value >= 1000.0 { format!("{}k", plain(value / 1000.0)) } else { plain(value) };
    }
    if value >= 1e6 {
        format!("{} s", plain(value / 1e6))
    } else if value >= 1000.0 {
        format!("{} ms", plain(value / 1000.0))
    } else {
        format!("{} µs", plain(value))
    }
}

struct Scales {
    x: XAxis,
    x_max: f64,
    y_low: f64,
    y_high: f64,
}

impl Scales {
    fn of(chart: &Chart) -> Option<Scales> {
        let all = || chart.lines.iter().flat_map(|l| l.points.iter()).filter(|p| p.1 > 0.0);
        let x_max = all()
            .map(|p| if chart.x == XAxis::Percentile { nines(p.0) } else { p.0 })
            .fold(0.0, f64::max);
        let low = all().map(|p| p.1).fold(f64::INFINITY, f64::min);
        let high = all().map(|p| p.1).fold(0.0, f64::max);
        if !low.is_finite() || x_max <= 0.0 {
            return None;
        }
        let (mut y_low, mut y_high) = (low.log10().floor(), high.log10().ceil());
        if y_high - y_low < 1.0 {
            y_high = y_low + 1.0;
        }
        // A decade of which only the last tenth is used wastes the chart.
        if low.log10() - y_low > 0.7 && y_high - y_low > 1.5 {
            y_low += 0.5;
        }
        if y_high - high.log10() > 0.7 && y_high - y_low > 1.5 {
            y_high -= 0.5;
        }
        Some(Scales { x: chart.x, x_max, y_low, y_high })
    }

    fn x(&self, value: f64) -> f64 {
        let at = if self.x == XAxis::Percentile { nines(value) } else { value };
        LEFT + at / self.x_max * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        let at = (value.max(1e-9).log10() - self.y_low) / (self.y_high - self.y_low);
        HEIGHT - BOTTOM - at.clamp(0.0, 1.0) * (HEIGHT - TOP - BOTTOM)
    }
}

fn axes(out: &mut String, chart: &Chart, s: &Scales) {
    for decade in s.y_low.ceil() as i32..=s.y_high.floor() as i32 {
        let value = 10_f64.powi(decade);
        let y = s.y(value);
        let _ = write!(
            out,
            r#"<line class="grid" x1="{LEFT}" x2="{:.0}" y1="{y:.1}" y2="{y:.1}"/><text x="{:.0}" y="{:.1}" text-anchor="end">{}</text>"#,
            WIDTH - RIGHT,
            LEFT - 6.0,
            y + 4.5,
            tick_label(value, chart.unit)
        );
    }
    let ticks: Vec<(f64, String)> = match chart.x {
        XAxis::Percentile => [0.0, 50.0, 90.0, 99.0, 99.9, 99.99, 99.999]
            .iter()
            .filter(|p| nines(**p) <= s.x_max + 0.01)
            .map(|p| (*p, if *p == 0.0 { String::new() } else { format!("p{p}") }))
            .collect(),
        XAxis::Time => {
            let step = time_step(s.x_max);
            // A report may hold any time at all.
            (0..=((s.x_max / step) as u32).min(100))
                .map(|i| f64::from(i) * step)
                .map(|t| (t, format!("{} s", (t * 10.0).round() / 10.0)))
                .collect()
        }
    };
    for (value, label) in ticks {
        let x = s.x(value);
        // The last label would stick out of the picture.
        let anchor = if x > WIDTH - RIGHT - 20.0 { "end" } else { "middle" };
        let _ = write!(
            out,
            r#"<line class="grid" x1="{x:.1}" x2="{x:.1}" y1="{TOP}" y2="{:.0}"/><text x="{x:.1}" y="{:.0}" text-anchor="{anchor}">{label}</text>"#,
            HEIGHT - BOTTOM,
            HEIGHT - BOTTOM + 18.0,
        );
    }
}

/// A round step that gives five to ten ticks.
fn time_step(span: f64) -> f64 {
    [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0]
        .into_iter()
        .find(|step| span / step <= 8.0)
        .unwrap_or(1800.0)
}

/// Draws a chart with its legend; empty when it has nothing to show.
pub fn render(chart: &Chart) -> String {
    let Some(s) = Scales::of(chart) else { return String::new() };
    let mut out = String::new();
    let title = escape(&chart.title);
    let _ = write!(
        out,
        r#"<figure><figcaption>{title}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">"#
    );
    for shade in &chart.shades {
        let (from, to) = (s.x(shade.span.0), s.x(shade.span.1.min(s.x_max)).min(WIDTH - RIGHT));
        let _ = write!(
            out,
            r#"<rect class="shade" x="{from:.1}" y="{TOP}" width="{:.1}" height="{:.1}"><title>{}</title></rect>"#,
            (to - from).max(1.5),
            HEIGHT - TOP - BOTTOM,
            escape(&shade.label)
        );
    }
    axes(&mut out, chart, &s);
    for line in &chart.lines {
        let points: Vec<String> = line
            .points
            .iter()
            .filter(|p| p.1 > 0.0)
            .map(|p| format!("{:.1},{:.1}", s.x(p.0), s.y(p.1)))
            .collect();
        let _ = write!(
            out,
            r#"<polyline class="line c{}" points="{}"><title>{}</title></polyline>"#,
            line.color % 8,
            points.join(" "),
            escape(&line.name)
        );
    }
    out.push_str("</svg><div class=\"legend\">");
    for line in &chart.lines {
        let name = escape(&line.name);
        let _ = write!(out, r#"<span><i class="c{}"></i>{name}</span>"#, line.color % 8);
    }
    for shade in &chart.shades {
        let _ = write!(out, r#"<span><i class="shade"></i>{}</span>"#, escape(&shade.label));
    }
    out.push_str("</div></figure>\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_spaced_by_nines() {
        assert!((nines(90.0) - 1.0).abs() < 1e-9);
        assert!((nines(99.9) - 3.0).abs() < 1e-9);
        assert!(nines(0.0).abs() < 1e-9);
    }

    #[test]
    fn ticks_read_as_times() {
        assert_eq!(tick_label(0.1, "us"), "0.1 µs");
        assert_eq!(tick_label(100.0, "us"), "100 µs");
        assert_eq!(tick_label(10_000.0, "us"), "10 ms");
        assert_eq!(tick_label(1e6, "us"), "1 s");
        assert_eq!(tick_label(2500.0, "1/s"), "2.5k");
    }

    #[test]
    fn an_empty_chart_is_nothing_and_names_are_escaped() {
        let line = |points| Line { name: "<b>".into(), color: 0, points };
        let chart = |points| Chart {
            title: "a & b".into(),
            x: XAxis::Percentile,
            unit: "us",
            lines: vec![line(points)],
            shades: Vec::new(),
        };
        assert!(render(&chart(Vec::new())).is_empty());
        let drawn = render(&chart(vec![(50.0, 10.0), (99.0, 2000.0)]));
        assert!(drawn.contains("&lt;b&gt;") && drawn.contains("a &amp; b"));
        assert!(!drawn.contains("<b>") && !drawn.contains("NaN"));
    }
}
