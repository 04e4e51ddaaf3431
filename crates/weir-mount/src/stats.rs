//! A [`Report`] as JSON and back: how a mount in another process tells its statistics (`WEIR_IOC_STATS`).
//!
//! `{"group": {"name": value, ...}, ...}`; a value is a number, a text, or a distribution:
//! `{"count", "sum", "mean", "p50_below", "p99_below", "max_below", "buckets": {"3": 17, ...}}`, where bucket b counts values of b
//! significant bits; of one that nothing was counted in all are there, and 0. The member [`METRICS`] lists all of them as
//! `group.name:kind` in the order in which they are to be read; kinds are `count` (only grows), `gauge`, `state` and `distribution`.

use serde_json::{Map, Value, json};
use weir::log::stats::{BUCKETS, HistogramSnapshot};
use weir::stats::Report;
use weir::stats::report::{Group, Metric};

/// Member that lists the metrics.
pub const METRICS: &str = "metrics";

/// A distribution. The bounds are powers of two, so they are within a factor of two. Whoever reads finds all members whatever was counted.
fn distribution(snapshot: &HistogramSnapshot) -> Value {
    let count = snapshot.count();
    let bound = |rank: u64| {
        if count == 0 {
            return 0;
        }
        let mut seen = 0;
        let bucket = snapshot.buckets.iter().position(|in_bucket| {
            seen += in_bucket;
            seen >= rank
        });
        // The largest values are below no number that there is.
        bucket.and_then(|bits| 1_u64.checked_shl(bits as u32)).unwrap_or(u64::MAX)
    };
    let filled = snapshot.buckets.iter().enumerate().filter(|(_, count)| **count > 0);
    let buckets: Map<String, Value> =
        filled.map(|(bucket, count)| (bucket.to_string(), json!(count))).collect();
    json!({
        "count": count,
        "sum": snapshot.sum,
        "mean": snapshot.sum.checked_div(count).unwrap_or(0),
        "p50_below": bound(count.div_ceil(2)),
        "p99_below": bound((count * 99).div_ceil(100)),
        "max_below": bound(count),
        "buckets": buckets,
    })
}

/// A distribution that [`distribution`] wrote.
fn snapshot(value: &Map<String, Value>) -> HistogramSnapshot {
    let mut snapshot = HistogramSnapshot {
        buckets: [0; BUCKETS],
        sum: value.get("sum").and_then(Value::as_u64).unwrap_or(0),
    };
    for (bucket, count) in value.get("buckets").and_then(Value::as_object).into_iter().flatten() {
        let place = bucket.parse().ok().and_then(|bucket: usize| snapshot.buckets.get_mut(bucket));
        if let (Some(place), Some(count)) = (place, count.as_u64()) {
            *place = count;
        }
    }
    snapshot
}

fn kind(metric: &Metric) -> &'static str {
    match metric {
        Metric::Count(_) => "count",
        Metric::Gauge(_) => "gauge",
        Metric::State(_) => "state",
        Metric::Distribution(_) => "distribution",
    }
}

/// All metrics. Units are in the names.
pub fn to_json(report: &Report) -> Value {
    let mut order = Vec::new();
    let mut all = Map::new();
    for group in &report.groups {
        let mut metrics = Map::new();
        for (name, metric) in &group.metrics {
            order.push(format!("{}.{name}:{}", group.name, kind(metric)));
            let value = match metric {
                Metric::Count(value) | Metric::Gauge(value) => json!(value),
                Metric::State(text) => json!(text),
                Metric::Distribution(snapshot) => distribution(snapshot),
            };
            metrics.insert(name.clone(), value);
        }
        all.insert(group.name.clone(), Value::Object(metrics));
    }
    all.insert(METRICS.to_owned(), json!(order));
    Value::Object(all)
}

/// The report that [`to_json`] wrote; what is not understood is left out.
pub fn from_json(value: &Value) -> Report {
    let mut report = Report::default();
    let order = value.get(METRICS).and_then(Value::as_array);
    for entry in order.into_iter().flatten().filter_map(Value::as_str) {
        let Some((place, kind)) = entry.split_once(':') else { continue };
        let Some((group, name)) = place.split_once('.') else { continue };
        let Some(metric) = metric(&value[group][name], kind) else { continue };
        if report.groups.last().is_none_or(|last| last.name != group) {
            report.groups.push(Group { name: group.to_owned(), metrics: Vec::new() });
        }
        if let Some(group) = report.groups.last_mut() {
            group.metrics.push((name.to_owned(), metric));
        }
    }
    report
}

fn metric(value: &Value, kind: &str) -> Option<Metric> {
    Some(match kind {
        "count" => Metric::Count(value.as_u64()?),
        "gauge" => Metric::Gauge(value.as_u64()?),
        "state" => Metric::State(value.as_str()?.to_owned()),
        "distribution" => Metric::Distribution(Box::new(snapshot(value.as_object()?))),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled() -> HistogramSnapshot {
        // 98 times 5 (three bits), once 1000 (ten bits), once the largest number.
        let mut snapshot = HistogramSnapshot { buckets: [0; BUCKETS], sum: 98 * 5 + 1000 };
        snapshot.buckets[3] = 98;
        snapshot.buckets[10] = 1;
        snapshot.buckets[64] = 1;
        snapshot
    }

    #[test]
    fn a_distribution_is_bounded_from_above_by_powers_of_two() {
        let shown = distribution(&filled());
        assert_eq!(shown["count"], 100);
        assert_eq!(shown["p50_below"], 8);
        assert_eq!(shown["p99_below"], 1024);
        assert_eq!(shown["max_below"], u64::MAX);
        let mut zeros = HistogramSnapshot { buckets: [0; BUCKETS], sum: 0 };
        zeros.buckets[0] = 5;
        assert_eq!(distribution(&zeros)["max_below"], 1);
    }

    #[test]
    fn a_distribution_has_the_same_members_whatever_was_counted() {
        let empty = HistogramSnapshot { buckets: [0; BUCKETS], sum: 0 };
        let names = |value: &Value| -> Vec<String> {
            value.as_object().map_or_else(Vec::new, |members| members.keys().cloned().collect())
        };
        let shown = distribution(&empty);
        assert_eq!(names(&shown), names(&distribution(&filled())));
        assert!(shown["p99_below"] == 0 && shown["mean"] == 0 && shown["buckets"] == json!({}));
    }

    #[test]
    fn a_report_survives_the_way_through_json() {
        let metric = |name: &str, metric| (name.to_owned(), metric);
        let report = Report {
            groups: vec![
                Group {
                    name: "a".to_owned(),
                    metrics: vec![
                        metric("commits", Metric::Count(3)),
                        metric("free", Metric::Gauge(u64::MAX)),
                        metric("state", Metric::State("shut down: \"x\"\n".to_owned())),
                    ],
                },
                Group {
                    name: "b".to_owned(),
                    metrics: vec![metric("wait_ns", Metric::Distribution(Box::new(filled())))],
                },
            ],
        };
        let text = to_json(&report).to_string();
        let read = from_json(&serde_json::from_str(&text).unwrap());
        assert_eq!(read, report);
    }
}
