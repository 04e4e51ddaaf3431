//! The experiments: what each runs, as a list of cases, and what a case yields.

pub mod aging;
pub mod checkpoint;
pub mod fastread;
pub mod foundation;
pub mod fsmark;
pub mod fsync;
pub mod ingest;
pub mod load;
pub mod programs;
pub mod simoop;
pub mod tickets;
mod tree;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::disk::registry::Registry;
use crate::error::{LabError, LabResult};
use crate::measure::device::CpuTime;
use crate::measure::{BlockDevice, DeviceCounters, PERCENTILES, Recorder};
use crate::run::Cancel;
use crate::target::Fs;

/// How large the loads are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Size {
    /// Few cases and small loads: all experiments in minutes.
    Quick,
    /// Every case of the full version, each for about a second: all experiments in half an hour.
    Medium,
    /// The loads of the published experiments: hours.
    #[default]
    Full,
}

impl Size {
    /// The value for this size.
    pub fn pick<T>(self, quick: T, medium: T, full: T) -> T {
        match self {
            Size::Quick => quick,
            Size::Medium => medium,
            Size::Full => full,
        }
    }

    /// Whether cases are left out.
    pub fn is_quick(self) -> bool {
        self == Size::Quick
    }
}

/// The parser of a number of seconds.
fn seconds(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|s| *s > 0.0 && *s <= 86_400.0);
    number.ok_or_else(|| "not a number of seconds, more than 0 and at most 86400".into())
}

/// Which way is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// Throughput.
    Higher,
    /// Latency, cost.
    Lower,
    /// A description of the run rather than a merit.
    Neither,
}

/// Parameters of a case, as they appear in the report.
pub type Params = BTreeMap<String, Value>;

/// One thing to run: a mode with its parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// For example `pass` or `async`.
    pub mode: String,
    /// For example `threads: 4`.
    pub params: Params,
}

impl Case {
    /// A case without parameters.
    pub fn new(mode: &str) -> Self {
        Case { mode: mode.to_owned(), params: Params::new() }
    }

    /// Adds a parameter.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.params.insert(key.to_owned(), value.into());
        self
    }

    /// A whole-number parameter; 0 when missing.
    pub fn number(&self, key: &str) -> u64 {
        self.params.get(key).and_then(Value::as_u64).unwrap_or(0)
    }

    /// A word parameter; empty when missing.
    pub fn word(&self, key: &str) -> &str {
        self.params.get(key).and_then(Value::as_str).unwrap_or("")
    }

    /// `mode key=value ...`, for people.
    pub fn label(&self) -> String {
        label(&self.mode, &self.params)
    }
}

/// `mode key=value ...`, for people.
pub fn label(mode: &str, params: &Params) -> String {
    let mut label = mode.to_owned();
    for (key, value) in params {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let _ = write!(label, " {key}={text}");
    }
    label
}

/// One figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Metric {
    /// Its name, with the unit as suffix where it has one.
    pub name: String,
    /// Its unit.
    pub unit: &'static str,
    /// The figure.
    pub value: f64,
    /// Which way is better.
    pub better: Better,
}

/// A span of time to mark in a time series.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mark {
    /// Begin.
    pub from_ms: u64,
    /// End.
    pub to_ms: u64,
    /// What happened.
    pub label: String,
}

impl Mark {
    /// A mark between two moments of a run.
    pub fn new(label: &str, from: Duration, to: Duration) -> Self {
        Mark {
            from_ms: from.as_millis() as u64,
            to_ms: to.as_millis() as u64,
            label: label.to_owned(),
        }
    }
}

/// What one run of a case yields.
#[derive(Default)]
pub struct CaseResult {
    /// The figures.
    pub metrics: Vec<Metric>,
    /// Latencies per class of operation.
    pub latencies: Vec<(String, Recorder)>,
    /// Spans to mark.
    pub marks: Vec<Mark>,
    /// Remarks, such as "cached file did not fit".
    pub notes: Vec<String>,
}

impl CaseResult {
    /// Adds a figure.
    pub fn metric(&mut self, name: &str, unit: &'static str, value: f64, better: Better) {
        self.metrics.push(Metric { name: name.to_owned(), unit, value, better });
    }

    /// Whether each figure is a number: what was divided by nothing says nothing, and JSON has no way to write it.
    pub fn check(&self) -> LabResult<()> {
        match self.metrics.iter().find(|m| !m.value.is_finite()) {
            None => Ok(()),
            Some(m) => Err(LabError::BadOption(format!(
                "{} cannot be told: the case did nothing that can be counted",
                m.name
            ))),
        }
    }

    /// Adds a class of latencies: its percentiles, its count and its curve.
    pub fn latency(&mut self, class: &str, recorder: Recorder) {
        if recorder.count() > 0 {
            self.percentiles(class, &recorder);
            self.latencies.push((class.to_owned(), recorder));
        }
    }

    /// The same without the curve.
    pub fn percentiles(&mut self, class: &str, recorder: &Recorder) {
        if recorder.count() == 0 {
            return;
        }
        for (name, percentile) in PERCENTILES {
            // A percentile that rests on less than one operation says nothing.
            if recorder.count() as f64 * (100.0 - percentile) / 100.0 < 0.999 && percentile > 50.0 {
                continue;
            }
            let value = recorder.percentile_us(percentile);
            self.metric(&format!("{class}_{name}_us"), "us", value, Better::Lower);
        }
        self.metric(&format!("{class}_max_us"), "us", recorder.max_us(), Better::Lower);
        self.metric(&format!("{class}_count"), "ops", recorder.count() as f64, Better::Neither);
    }

    /// Adds what the device did and the CPU spent per `unit`; see [`CaseResult::device_per`].
    pub fn cost_per(&mut self, unit: &str, spent: Spent, units: u64, app_bytes: u64) {
        self.device_per(unit, spent.device, units, app_bytes);
        let us = spent.cpu_us as f64 / units.max(1) as f64;
        self.metric(&format!("cpu_us_per_{unit}"), "us", us, Better::Lower);
    }

    /// Adds what the device did per `unit` (a file, an fsync), and the write amplification when
    /// the application wrote `app_bytes`.
    pub fn device_per(
        &mut self,
        unit: &str,
        counters: Option<DeviceCounters>,
        units: u64,
        app_bytes: u64,
    ) {
        let Some(c) = counters else { return };
        let per = |n: u64| n as f64 / units.max(1) as f64;
        self.metric(&format!("flushes_per_{unit}"), "flushes", per(c.flushes), Better::Lower);
        self.metric(&format!("writes_per_{unit}"), "writes", per(c.writes), Better::Lower);
        if c.flushes > 0 {
            let ratio = units as f64 / c.flushes as f64;
            self.metric(&format!("{unit}s_per_flush"), "", ratio, Better::Higher);
        }
        if app_bytes > 0 {
            let ratio = c.write_bytes as f64 / app_bytes as f64;
            self.metric("write_amplification", "x", ratio, Better::Lower);
        }
    }
}

/// What the device and the processors have done before a load.
pub struct Cost {
    device: Option<DeviceCounters>,
    cpu: CpuTime,
}

/// What a load has cost.
#[derive(Clone, Copy)]
pub struct Spent {
    /// Requests of the device, where there is device truth.
    pub device: Option<DeviceCounters>,
    /// CPU of the lab, of the processes that work for it, and of the kernel's threads.
    pub cpu_us: u64,
}

impl Cost {
    /// Before the load.
    pub fn start(env: &Env<'_>) -> Self {
        // The processors' last: it takes the longest, and nothing of that is the load's.
        let device = env.fs.device();
        Cost { device, cpu: CpuTime::before() }
    }

    /// After it.
    pub fn stop(&self, env: &Env<'_>) -> Spent {
        let device = env.device_since(self.device);
        Spent { device, cpu_us: CpuTime::after().us_since(&self.cpu) }
    }
}

/// What a case runs against.
pub struct Env<'a> {
    /// The file system.
    pub fs: Arc<dyn Fs>,
    /// Seed of the run, the same for all targets and rounds.
    pub seed: u64,
    /// Ctrl-C.
    pub cancel: &'a Cancel,
    /// For cgroups that a case enters.
    pub registry: &'a Arc<Registry>,
    /// Processes that work for the target.
    pub daemons: &'a (dyn Fn() -> Vec<u32> + Send + Sync),
    /// Disks that the target keeps busy, the lowest last.
    pub disks: &'a [BlockDevice],
}

impl Env<'_> {
    /// Device counters, if there is device truth.
    pub fn device_since(&self, before: Option<DeviceCounters>) -> Option<DeviceCounters> {
        Some(self.fs.device()?.since(before?))
    }
}

/// An experiment with its options.
pub trait Experiment {
    /// Its name on the command line.
    fn name(&self) -> &'static str;
    /// The question that it answers, in one line.
    fn question(&self) -> &'static str;
    /// What is run, in order.
    fn cases(&self) -> Vec<Case>;
    /// The mode that the others are compared with on the same target, at equal parameters.
    fn base_mode(&self) -> &'static str;
    /// Whether each case needs a freshly formatted file system.
    fn fresh_for_each_case(&self) -> bool {
        false
    }
    /// Rounds when none are asked for.
    fn default_rounds(&self, size: Size) -> usize {
        size.pick(2, 2, 3)
    }
    /// Prepares files, once per turn of a target.
    fn prepare(&self, env: &Env<'_>) -> LabResult<()> {
        let _ = env;
        Ok(())
    }
    /// Runs one case.
    fn run(&self, env: &Env<'_>, case: &Case) -> LabResult<CaseResult>;
    /// Space that the experiment needs on the target.
    fn space_bytes(&self) -> u64;
}

/// Every experiment with its default options: those of [`all`], *foundation*, *tickets* and *programs*.
pub fn every(size: Size) -> Vec<Box<dyn Experiment>> {
    let mut every = all(size, false);
    let options = foundation::FoundationOptions::default();
    every.push(Box::new(foundation::Foundation::new(&options, size)));
    every.push(Box::new(tickets::Tickets::new(&tickets::TicketsOptions::default(), size)));
    every.push(Box::new(programs::Programs::new(&programs::ProgramsOptions::default(), size)));
    every
}

/// The published experiments with their default options.
pub fn all(size: Size, slow_flush: bool) -> Vec<Box<dyn Experiment>> {
    vec![
        Box::new(fsmark::Fsmark::new(&fsmark::FsmarkOptions::default(), size, slow_flush)),
        Box::new(fsync::FsyncJobs::new(&fsync::FsyncOptions::default(), size)),
        Box::new(checkpoint::Checkpoint::new(&checkpoint::CheckpointOptions::default(), size)),
        Box::new(fastread::Fastread::new(&fastread::FastreadOptions::default(), size)),
        Box::new(ingest::Ingest::new(&ingest::IngestOptions::default(), size)),
        Box::new(aging::Aging::new(&aging::AgingOptions::default(), size)),
        Box::new(simoop::Simoop::new(&simoop::SimoopOptions::default(), size)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn a_case_reads_back_its_parameters() {
        let c = Case::new("async").with("threads", 4).with("via", "uring");
        assert_eq!((c.number("threads"), c.number("depth"), c.word("via")), (4, 0, "uring"));
        assert_eq!(c.label(), "async threads=4 via=uring");
    }

    #[test]
    fn percentiles_are_reported_only_as_far_as_the_sample_goes() {
        let mut r = Recorder::new(Instant::now());
        for _ in 0..150 {
            r.record_ns(1000);
        }
        let mut result = CaseResult::default();
        result.latency("fsync", r);
        let names: Vec<&str> = result.metrics.iter().map(|m| m.name.as_str()).collect();
        assert!(names.contains(&"fsync_p99_us") && !names.contains(&"fsync_p999_us"), "{names:?}");
    }

    #[test]
    fn device_figures_are_per_unit() {
        let c = DeviceCounters { writes: 30, flushes: 20, write_bytes: 8192, ..Default::default() };
        let mut result = CaseResult::default();
        result.device_per("file", Some(c), 10, 4096);
        let get = |n: &str| result.metrics.iter().find(|m| m.name == n).map(|m| m.value);
        assert_eq!(get("flushes_per_file"), Some(2.0));
        assert_eq!(get("writes_per_file"), Some(3.0));
        assert_eq!(get("files_per_flush"), Some(0.5));
        assert_eq!(get("write_amplification"), Some(2.0));
        let mut none = CaseResult::default();
        none.device_per("file", None, 10, 4096);
        assert!(none.metrics.is_empty());
    }
}
