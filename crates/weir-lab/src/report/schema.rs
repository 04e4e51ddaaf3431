//! The JSON report, `weir-lab/1`. Documented field by field in `docs/LAB.md`; a change that a
//! reader could notice needs a new number.

use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::ser::{Formatter, PrettyFormatter};

use crate::error::{IoContext, LabError, LabResult};
use crate::experiments::{Better, Mark, Params, Size, label};
use crate::measure::{OfRound, SeriesPoint};
use crate::target::stage::TargetInfo;

/// The value of `schema`.
pub const SCHEMA: &str = "weir-lab/1";

/// One metric of one case on one target.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// For example `fsmark`.
    pub experiment: String,
    /// For example `xfs`.
    pub target: String,
    /// For example `async`.
    pub mode: String,
    /// For example `{"depth": 64, "threads": 4}`.
    pub params: Params,
    /// For example `files_per_s`.
    pub metric: String,
    /// For example `files/s`.
    pub unit: String,
    /// Which way is better.
    pub better: Better,
    /// Median over the rounds.
    pub median: f64,
    /// Minimum over the rounds.
    pub min: f64,
    /// Maximum over the rounds.
    pub max: f64,
    /// The value of each round that has one.
    pub rounds: Vec<f64>,
    /// The numbers of those that have none, from 1 on: the case failed, or did too little for this figure.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing_rounds: Vec<u64>,
    /// The target that `ratio` compares with; null where it has no such row.
    pub baseline: Option<String>,
    /// Median of this target's value over the baseline's of the same round.
    pub ratio: Option<f64>,
    /// Smallest of these ratios.
    pub ratio_min: Option<f64>,
    /// Largest of these ratios.
    pub ratio_max: Option<f64>,
    /// The mode of the same target that `mode_ratio` compares with.
    pub base_mode: Option<String>,
    /// Median of this mode's value over the base mode's of the same round.
    pub mode_ratio: Option<f64>,
    /// How many times worse the median is than the floor that the probe found, where there is one.
    pub floor_ratio: Option<f64>,
    /// Rounds in which other load was seen on the machine.
    #[serde(default)]
    pub disturbed_rounds: u64,
}

impl Row {
    /// The value of each round with the round's number.
    pub fn by_round(&self) -> Vec<OfRound> {
        let numbers = (1..).filter(|n| !self.missing_rounds.contains(n));
        numbers.zip(self.rounds.iter().copied()).collect()
    }

    /// What makes two rows of different reports the same measurement.
    pub fn identity(&self) -> (String, String, String, String, String) {
        let params = serde_json::to_string(&self.params).unwrap_or_default();
        (
            self.experiment.clone(),
            self.target.clone(),
            self.mode.clone(),
            params,
            self.metric.clone(),
        )
    }
}

/// The latency distribution of one class of operations, all rounds merged.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    /// As in [`Row`].
    pub experiment: String,
    /// As in [`Row`].
    pub target: String,
    /// As in [`Row`].
    pub mode: String,
    /// As in [`Row`].
    pub params: Params,
    /// For example `fsync`.
    pub class: String,
    /// Operations.
    pub count: u64,
    /// The slowest.
    pub max_us: f64,
    /// (percentile, µs).
    pub points: Vec<(f64, f64)>,
}

/// The time series of one class of operations in the last round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SeriesRow {
    /// As in [`Row`].
    pub experiment: String,
    /// As in [`Row`].
    pub target: String,
    /// As in [`Row`].
    pub mode: String,
    /// As in [`Row`].
    pub params: Params,
    /// For example `read`.
    pub class: String,
    /// Width of a point.
    pub step_ms: u64,
    /// Operations by the time they were due.
    pub points: Vec<SeriesPoint>,
    /// Spans such as the checkpoint's final fsync.
    pub marks: Vec<Mark>,
}

/// A case without figures: the target does not offer it, or it failed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Skipped {
    /// As in [`Row`].
    pub experiment: String,
    /// As in [`Row`].
    pub target: String,
    /// As in [`Row`].
    pub mode: String,
    /// As in [`Row`].
    pub params: Params,
    /// Why.
    pub reason: String,
    /// It is offered, but an error ended it.
    #[serde(default)]
    pub failed: bool,
}

/// Cases without figures that have target and reason in common, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkippedGroup<'a> {
    /// As in [`Skipped`].
    pub experiment: &'a str,
    /// As in [`Skipped`].
    pub target: &'a str,
    /// As in [`Skipped`].
    pub reason: &'a str,
    /// As in [`Skipped`].
    pub failed: bool,
    /// Mode and parameters of each.
    pub cases: Vec<String>,
}

/// Groups cases by what they have in common, in the order of the first of each.
pub fn skipped_groups(skipped: &[Skipped]) -> Vec<SkippedGroup<'_>> {
    let mut groups: Vec<SkippedGroup<'_>> = Vec::new();
    for s in skipped {
        let case = label(&s.mode, &s.params);
        let same = |g: &&mut SkippedGroup<'_>| {
            (g.experiment, g.target, g.reason, g.failed)
                == (s.experiment.as_str(), s.target.as_str(), s.reason.as_str(), s.failed)
        };
        match groups.iter_mut().find(same) {
            Some(group) => group.cases.push(case),
            None => groups.push(SkippedGroup {
                experiment: &s.experiment,
                target: &s.target,
                reason: &s.reason,
                failed: s.failed,
                cases: vec![case],
            }),
        }
    }
    groups
}

/// The machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Kernel release.
    pub kernel: String,
    /// Processor model.
    pub cpu: String,
    /// Processors.
    pub cpus: u64,
    /// RAM.
    pub memory_mib: u64,
    /// The disk that the work directory is on, and the file system there.
    pub disk: String,
    /// Write cache of that disk as the kernel sees it.
    pub write_cache: String,
}

/// A whole report.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: String,
    /// The exact command.
    pub command: String,
    /// Version of the lab.
    pub version: String,
    /// When it began, seconds since 1970.
    pub started_unix_s: u64,
    /// How long it took.
    pub duration_s: f64,
    /// The machine.
    pub machine: Machine,
    /// The disk all targets shared.
    pub disk: String,
    /// Its size.
    pub size_bytes: u64,
    /// Seed of the load.
    pub seed: u64,
    /// Short version.
    pub quick: bool,
    /// How large the loads were.
    #[serde(default)]
    pub loads: Size,
    /// How targets were set up.
    pub targets: Vec<TargetInfo>,
    /// One row per metric.
    pub results: Vec<Row>,
    /// Latency distributions.
    pub curves: Vec<Curve>,
    /// Time series.
    pub series: Vec<SeriesRow>,
    /// What targets do not offer.
    pub not_offered: Vec<Skipped>,
    /// Remarks and disturbances.
    pub notes: Vec<String>,
}

/// A field a line, and what an array holds on one: it is numbers, mostly.
#[derive(Default)]
struct Lines(PrettyFormatter<'static>);

impl Formatter for Lines {
    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_object(writer)
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_object(writer)
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.0.begin_object_key(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_object_value(writer)
    }

    fn end_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_object_value(writer)
    }
}

impl Report {
    /// Writes it as JSON.
    pub fn save(&self, path: &Path) -> LabResult<()> {
        let mut text = Vec::new();
        let mut serializer = serde_json::Serializer::with_formatter(&mut text, Lines::default());
        self.serialize(&mut serializer)
            .map_err(|e| LabError::BadReport { path: path.to_owned(), message: e.to_string() })?;
        text.push(b'\n');
        std::fs::write(path, text).during(|| format!("writing {}", path.display()))
    }

    /// Reads one back; refuses other schemas.
    pub fn load(path: &Path) -> LabResult<Report> {
        let text =
            std::fs::read_to_string(path).during(|| format!("reading {}", path.display()))?;
        let bad = |message: String| LabError::BadReport { path: path.to_owned(), message };
        let value: serde_json::Value =
            serde_json::from_str(&text).map_err(|e| bad(e.to_string()))?;
        match value.get("schema").and_then(|s| s.as_str()) {
            Some(SCHEMA) => {}
            Some(other) => return Err(bad(format!("schema '{other}', expected '{SCHEMA}'"))),
            None => return Err(bad("no schema".into())),
        }
        serde_json::from_value(value).map_err(|e| bad(e.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_saved_report_is_read_back_as_it_was() {
        let report = Report {
            schema: SCHEMA.into(),
            notes: vec!["one".into(), "two".into()],
            targets: vec![TargetInfo { name: "xfs".into(), ..TargetInfo::default() }],
            ..Report::default()
        };
        let path = std::env::temp_dir().join(format!("weir-lab-report-{}", std::process::id()));
        report.save(&path).expect("saved");
        assert_eq!(Report::load(&path).expect("read"), report);
        let text = std::fs::read_to_string(&path).expect("text");
        assert!(text.contains("\n  \"notes\": [\"one\",\"two\"]\n"), "{text}");
        std::fs::remove_file(path).expect("removed");
    }

    /// A chart of percentiles shows the sixth nine: what is read one digit beside what was written
    /// moves a point by a pixel, and a page made again differs.
    #[test]
    fn every_number_is_read_back_bit_for_bit() {
        let points = (3..60).map(|i| (100.0 * (1.0 - 1.7_f64.powi(-i)), f64::from(i).sqrt()));
        let curve = Curve {
            experiment: "e".into(),
            target: "weir".into(),
            mode: "m".into(),
            params: Params::new(),
            class: "c".into(),
            count: 1,
            max_us: 1e5 / 3.0,
            points: points.collect(),
        };
        let report = Report { schema: SCHEMA.into(), curves: vec![curve], ..Report::default() };
        let path = std::env::temp_dir().join(format!("weir-lab-curve-{}", std::process::id()));
        report.save(&path).expect("saved");
        assert_eq!(Report::load(&path).expect("read"), report);
        std::fs::remove_file(path).expect("removed");
    }

    #[test]
    fn cases_without_figures_are_grouped_by_target_and_reason() {
        let skipped = |target: &str, mode: &str, reason: &str| Skipped {
            experiment: "e".into(),
            target: target.into(),
            mode: mode.into(),
            params: Params::new(),
            reason: reason.into(),
            failed: false,
        };
        let all = [skipped("a", "x", "no"), skipped("b", "x", "no"), skipped("a", "y", "no")];
        let found = skipped_groups(&all);
        assert_eq!(found.len(), 2);
        assert_eq!(
            (found[0].target, found[0].cases.as_slice()),
            ("a", &["x".into(), "y".into()][..])
        );
        assert_eq!(found[1].target, "b");
    }
}
