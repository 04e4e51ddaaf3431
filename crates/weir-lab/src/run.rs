//! Runs experiments on targets in interleaved rounds and turns what they yield into a report.
//!
//! Order: each round, each experiment, each target (the order of targets rotates from round to
//! round), each case. A target is set up fresh for its turn and taken down after it, so at most
//! one file system of the lab is mounted at any time. Rounds go on until there are enough of them, or
//! until the next would not fit into the time that was given.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::disk::Disk;
use crate::disk::registry::Registry;
use crate::error::{LabError, LabResult};
use crate::experiments::{Better, Case, CaseResult, Env, Experiment, Size, load};
use crate::measure::{
    Disturbance, DisturbanceWatch, OfRound, Recorder, SERIES_STEP, Spread, WarmMemory,
};
use crate::report::schema::{Curve, Row, SeriesRow, Skipped};
use crate::target::TargetSpec;
use crate::target::stage::{Stage, StageOptions, TargetInfo};

/// Set by Ctrl-C; loops ask it.
#[derive(Clone, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Asks everything to stop.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether something asked.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// An error once cancelled.
    pub fn check(&self) -> LabResult<()> {
        if self.is_cancelled() { Err(LabError::Cancelled) } else { Ok(()) }
    }
}

/// An experiment of a plan.
pub struct Planned {
    /// The experiment.
    pub experiment: Box<dyn Experiment>,
    /// Targets of the plan that it runs on; all when empty.
    pub on: Vec<TargetSpec>,
    /// Only modes that contain one of these words, or equal one in `=WORD`; all when empty.
    pub only_modes: Vec<String>,
    /// So many rounds for each one that is asked for.
    pub times: usize,
    /// Most rounds that are of use.
    pub most_rounds: usize,
}

impl Planned {
    /// All of it, on all targets.
    pub fn whole(experiment: Box<dyn Experiment>) -> Self {
        let (on, only_modes) = (Vec::new(), Vec::new());
        Planned { experiment, on, only_modes, times: 1, most_rounds: usize::MAX }
    }
}

/// Rounds of a run that is limited by time, if none are asked for: more add little.
const ROUNDS_IN_TIME: usize = 7;

/// Memory that each case gets warm: what Weir takes at most by default. Quick loads need less.
const WARM_BYTES: u64 = 1 << 30;
const QUICK_WARM_BYTES: u64 = 128 << 20;

/// What to run.
pub struct Plan {
    /// Experiments, in order.
    pub experiments: Vec<Planned>,
    /// Targets, in order.
    pub targets: Vec<TargetSpec>,
    /// Rounds; each experiment's own default when not given.
    pub rounds: Option<usize>,
    /// After this time no round begins that would not end in it, but for the first of each experiment.
    pub time: Option<Duration>,
    /// How large the loads are.
    pub size: Size,
    /// Seed.
    pub seed: u64,
    /// Name of the target that the others are compared with.
    pub baseline: String,
    /// Only modes that contain one of these words; all when empty.
    pub only_modes: Vec<String>,
    /// For setting targets up.
    pub stage: StageOptions,
}

impl Plan {
    fn rounds_of(&self, planned: &Planned) -> usize {
        let own = || match self.time {
            Some(_) => ROUNDS_IN_TIME,
            None => planned.experiment.default_rounds(self.size),
        };
        let rounds = self.rounds.unwrap_or_else(own).saturating_mul(planned.times);
        rounds.clamp(1, planned.most_rounds.max(1))
    }

    fn targets_of(&self, planned: &Planned) -> Vec<TargetSpec> {
        let wanted = |t: &&TargetSpec| planned.on.is_empty() || planned.on.contains(t);
        self.targets.iter().filter(wanted).cloned().collect()
    }
}

/// Key of a series of rounds.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    experiment: String,
    /// Which one of the plan: an experiment may be planned twice with different options.
    planned: usize,
    target: String,
    case_index: usize,
}

/// Everything measured for one case on one target.
struct Cell {
    case: Case,
    /// Per metric, the value of each round that has one (in order of first appearance).
    metrics: Vec<(String, &'static str, Better, Vec<OfRound>)>,
    latencies: BTreeMap<String, Recorder>,
    last: CaseResult,
    /// Rounds in which other load was seen.
    disturbed_rounds: u64,
}

/// The outcome of a plan.
#[derive(Default)]
pub struct Outcome {
    /// One row per metric.
    pub rows: Vec<Row>,
    /// Percentile curves.
    pub curves: Vec<Curve>,
    /// Time series of the last round.
    pub series: Vec<SeriesRow>,
    /// Cases that a target does not offer.
    pub skipped: Vec<Skipped>,
    /// How targets were set up.
    pub targets: Vec<TargetInfo>,
    /// Remarks and disturbances.
    pub notes: Vec<String>,
    /// It was ended by Ctrl-C, with something measured.
    pub interrupted: bool,
}

/// The disturbances of one experiment, summed up.
#[derive(Default)]
struct Disturbed {
    measurements: usize,
    hit: usize,
    worst: Disturbance,
}

impl Disturbed {
    fn add(&mut self, seen: &Disturbance) {
        self.measurements += 1;
        self.hit += usize::from(seen.verdict().is_some());
        let worst = &mut self.worst;
        worst.steal_percent = worst.steal_percent.max(seen.steal_percent);
        worst.other_cpu_percent = worst.other_cpu_percent.max(seen.other_cpu_percent);
        worst.foreign_bytes_per_s = worst.foreign_bytes_per_s.max(seen.foreign_bytes_per_s);
    }

    fn note(&self, experiment: &str) -> Option<String> {
        let worst = self.worst.verdict()?;
        let (n, of) = (self.hit, self.measurements);
        Some(format!("{experiment}: {n} of {of} measurements were disturbed; at worst {worst}"))
    }
}

struct Progress {
    bar: ProgressBar,
    lines: bool,
}

impl Progress {
    fn new(steps: u64) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let bar = if terminal { ProgressBar::new(steps) } else { ProgressBar::hidden() };
        if let Ok(style) = ProgressStyle::with_template(
            "[{elapsed_precise}] {bar:30} {pos}/{len} {msg} (eta {eta})",
        ) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(500));
        Progress { bar, lines: !terminal }
    }

    fn turn(&self, text: &str) {
        if self.lines {
            crate::tell!("{text}");
        }
    }

    fn case(&self, text: String) {
        self.bar.set_message(text);
    }

    fn step(&self) {
        self.bar.inc(1);
    }
}

struct Runner<'a> {
    plan: &'a Plan,
    disk: Option<&'a Disk>,
    registry: &'a Arc<Registry>,
    cancel: &'a Cancel,
    progress: Progress,
    cells: BTreeMap<Key, Cell>,
    order: Vec<Key>,
    /// Of each experiment of the plan, the rounds that have begun.
    rounds_begun: Vec<u64>,
    /// The experiment of the plan whose round has not ended.
    under_way: Option<usize>,
    disturbances: BTreeMap<String, Disturbed>,
    memory: WarmMemory,
    out: Outcome,
}

/// Runs a plan. Whatever happens, nothing stays mounted. Where it is interrupted with something measured, that is its outcome.
pub fn run_plan(
    plan: &Plan,
    disk: Option<&Disk>,
    registry: &Arc<Registry>,
    cancel: &Cancel,
) -> LabResult<Outcome> {
    let turns =
        |p: &Planned| selected_cases(plan, p).len() * plan.rounds_of(p) * plan.targets_of(p).len();
    let steps: usize = plan.experiments.iter().map(turns).sum();
    if steps == 0 {
        return Err(LabError::BadOption("no mode is left to run (--mode)".into()));
    }
    let mut runner = Runner::new(plan, disk, registry, cancel, steps as u64);
    runner.warm_up();
    match runner.rounds() {
        Err(LabError::Cancelled) if !runner.cells.is_empty() => runner.keep_whole_rounds(),
        ended => ended?,
    }
    runner.progress.bar.finish_and_clear();
    Ok(runner.finish())
}

fn selected_cases(plan: &Plan, planned: &Planned) -> Vec<(usize, Case)> {
    let chosen = |words: &[String], case: &Case| {
        let fits = |word: &String| match word.strip_prefix('=') {
            Some(whole) => case.mode == whole,
            None => case.mode.contains(word),
        };
        words.is_empty() || words.iter().any(fits)
    };
    let cases = planned.experiment.cases().into_iter().enumerate();
    cases.filter(|(_, c)| chosen(&plan.only_modes, c) && chosen(&planned.only_modes, c)).collect()
}

/// The targets in the order of a round: each is first once.
fn rotated<T: Clone>(items: &[T], round: usize) -> Vec<T> {
    let mut order = items.to_vec();
    if !order.is_empty() {
        order.rotate_left(round % items.len());
    }
    order
}

impl<'a> Runner<'a> {
    fn new(
        plan: &'a Plan,
        disk: Option<&'a Disk>,
        registry: &'a Arc<Registry>,
        cancel: &'a Cancel,
        steps: u64,
    ) -> Self {
        Runner {
            plan,
            disk,
            registry,
            cancel,
            progress: Progress::new(steps),
            cells: BTreeMap::new(),
            order: Vec::new(),
            rounds_begun: vec![0; plan.experiments.len()],
            under_way: None,
            disturbances: BTreeMap::new(),
            memory: WarmMemory::of(plan.size.pick(QUICK_WARM_BYTES, WARM_BYTES, WARM_BYTES)),
            out: Outcome::default(),
        }
    }

    /// Every experiment has its first round before any has its second.
    fn rounds(&mut self) -> LabResult<()> {
        let plan = self.plan;
        let begun = Instant::now();
        let mut spent = vec![Duration::ZERO; plan.experiments.len()];
        let most = plan.experiments.iter().map(|p| plan.rounds_of(p)).max().unwrap_or(0);
        for round in 0..most {
            for (index, planned) in plan.experiments.iter().enumerate() {
                // The rounds so far say how long the next will take.
                let next = spent[index] / u32::try_from(round.max(1)).unwrap_or(1);
                let in_time = plan.time.is_none_or(|time| begun.elapsed() + next <= time);
                if round >= plan.rounds_of(planned) || (round > 0 && !in_time) {
                    continue;
                }
                let from = Instant::now();
                self.rounds_begun[index] += 1;
                self.under_way = Some(index);
                self.round(index, planned, round)?;
                self.under_way = None;
                spent[index] += from.elapsed();
            }
        }
        let times = plan.experiments.iter().zip(&spent);
        let times: Vec<String> = times
            .map(|(p, t)| format!("{} {:.0} s", p.experiment.name(), t.as_secs_f64()))
            .collect();
        self.out.notes.push(format!("time taken: {}", times.join(", ")));
        Ok(())
    }

    /// Ctrl-C: who has waited for some rounds keeps them. Of an experiment's first round there is what it has come to.
    fn keep_whole_rounds(&mut self) {
        self.out.interrupted = true;
        let Some(index) = self.under_way else { return };
        let Some(begun) = self.rounds_begun.get_mut(index) else { return };
        let (cut, name) = (*begun, self.plan.experiments[index].experiment.name());
        let kept = if cut > 1 {
            *begun -= 1;
            let cells = self.cells.iter_mut().filter(|(key, _)| key.planned == index);
            for metric in cells.flat_map(|(_, cell)| &mut cell.metrics) {
                metric.3.retain(|(round, _)| *round != cut);
            }
            "which is left out"
        } else {
            "which is there as far as it came"
        };
        self.out.notes.push(format!("interrupted in round {cut} of {name}, {kept}"));
    }

    fn round(&mut self, index: usize, planned: &Planned, round: usize) -> LabResult<()> {
        let cases = selected_cases(self.plan, planned);
        if cases.is_empty() {
            return Ok(());
        }
        let rounds = self.plan.rounds_of(planned);
        let name = planned.experiment.name();
        for spec in rotated(&self.plan.targets_of(planned), round) {
            let what = format!("{name} round {}/{rounds} on {}", round + 1, spec.name());
            self.progress.turn(&what);
            self.turn(index, &*planned.experiment, &cases, &spec, &what)?;
        }
        Ok(())
    }

    /// One turn of a target. A case that fails is reported and does not stop the others, which get
    /// a fresh file system; only an interruption ends the run.
    fn turn(
        &mut self,
        planned: usize,
        experiment: &dyn Experiment,
        cases: &[(usize, Case)],
        spec: &TargetSpec,
        what: &str,
    ) -> LabResult<()> {
        let mut stage: Option<Stage> = None;
        for (index, case) in cases {
            self.cancel.check()?;
            self.progress.case(format!("{what}: {}", case.label()));
            if experiment.fresh_for_each_case() {
                self.tear_down(stage.take());
            }
            let ready = match stage.take() {
                Some(ready) => Ok(ready),
                None => self.set_up_with_memory(experiment, spec),
            };
            let result = match ready {
                Ok(ready) => self.measure(experiment, case, stage.insert(ready)),
                Err(e) => Err(e),
            };
            match result {
                Ok((result, disturbed)) => {
                    let key = Key {
                        experiment: experiment.name().to_owned(),
                        planned,
                        target: spec.name(),
                        case_index: *index,
                    };
                    self.keep(key, case, result, disturbed);
                }
                Err(LabError::NotOffered(why)) => {
                    self.skip(experiment.name(), spec, case, why, false);
                }
                Err(LabError::Cancelled) => return Err(LabError::Cancelled),
                Err(e) => {
                    self.cancel.check()?;
                    self.skip(experiment.name(), spec, case, &e.to_string(), true);
                    self.tear_down(stage.take());
                }
            }
            self.progress.step();
        }
        self.tear_down(stage);
        Ok(())
    }

    /// Takes the memory that cases get, and says what it cost.
    fn warm_up(&mut self) {
        let speed = self.memory.take_twice();
        self.out.notes.push(format!(
            "memory: {:.0} MiB/s at the first touch, {:.0} MiB/s once freed; cases get memory of the latter kind",
            speed.first_mib_per_s, speed.again_mib_per_s
        ));
    }

    fn measure(
        &mut self,
        experiment: &dyn Experiment,
        case: &Case,
        stage: &Stage,
    ) -> LabResult<(CaseResult, bool)> {
        let env = env_of(self.plan, stage, self.cancel, self.registry);
        if !load::settle(&env)? {
            let (name, target) = (experiment.name(), &stage.info.name);
            let note =
                format!("{name} on {target}: the device was not idle before {}", case.label());
            if !self.out.notes.contains(&note) {
                self.out.notes.push(note);
            }
        }
        self.memory.release();
        let watch = DisturbanceWatch::start(&stage.disks);
        let result = experiment.run(&env, case);
        let seen = watch.stop();
        self.memory.take();
        self.disturbances.entry(experiment.name().to_owned()).or_default().add(&seen);
        let result = result?;
        result.check()?;
        Ok((result, seen.verdict().is_some()))
    }

    fn tear_down(&mut self, stage: Option<Stage>) {
        if let Some(Err(e)) = stage.map(Stage::tear_down) {
            self.out.notes.push(e.to_string());
        }
    }

    /// Sets a target up. It gets warm memory too: an engine may prepare some as it begins.
    fn set_up_with_memory(
        &mut self,
        experiment: &dyn Experiment,
        spec: &TargetSpec,
    ) -> LabResult<Stage> {
        self.memory.release();
        let stage = self.set_up(experiment, spec);
        self.memory.take();
        stage
    }

    fn set_up(&mut self, experiment: &dyn Experiment, spec: &TargetSpec) -> LabResult<Stage> {
        let stage = Stage::set_up(spec, self.disk, &self.plan.stage, self.registry)?;
        if !self.out.targets.iter().any(|t| t.name == stage.info.name) {
            self.out.targets.push(stage.info.clone());
        }
        let env = env_of(self.plan, &stage, self.cancel, self.registry);
        let prepared = experiment.prepare(&env);
        drop(env);
        match prepared {
            Ok(()) => Ok(stage),
            Err(e) => {
                self.tear_down(Some(stage));
                Err(e)
            }
        }
    }

    fn skip(&mut self, experiment: &str, spec: &TargetSpec, case: &Case, why: &str, failed: bool) {
        let skipped = Skipped {
            experiment: experiment.to_owned(),
            target: spec.name(),
            mode: case.mode.clone(),
            params: case.params.clone(),
            reason: why.to_owned(),
            failed,
        };
        if !self.out.skipped.contains(&skipped) {
            self.out.skipped.push(skipped);
        }
    }

    fn keep(&mut self, key: Key, case: &Case, mut result: CaseResult, disturbed: bool) {
        let round = self.rounds_begun.get(key.planned).copied().unwrap_or(1);
        if !self.order.contains(&key) {
            self.order.push(key.clone());
        }
        for note in result.notes.drain(..) {
            let note = format!("{} {} on {}: {note}", key.experiment, case.label(), key.target);
            if !self.out.notes.contains(&note) {
                self.out.notes.push(note);
            }
        }
        let cell = self.cells.entry(key).or_insert_with(|| Cell {
            case: case.clone(),
            metrics: Vec::new(),
            latencies: BTreeMap::new(),
            last: CaseResult::default(),
            disturbed_rounds: 0,
        });
        cell.disturbed_rounds += u64::from(disturbed);
        for m in &result.metrics {
            if let Some(have) = cell.metrics.iter_mut().find(|have| have.0 == m.name) {
                have.3.push((round, m.value));
            } else {
                let first = vec![(round, m.value)];
                cell.metrics.push((m.name.clone(), m.unit, m.better, first));
            }
        }
        for (class, recorder) in &result.latencies {
            cell.latencies
                .entry(class.clone())
                .and_modify(|all| all.merge(recorder))
                .or_insert_with(|| recorder.clone());
        }
        cell.last = result;
    }

    fn finish(mut self) -> Outcome {
        let mut out = std::mem::take(&mut self.out);
        for (experiment, seen) in &self.disturbances {
            out.notes.extend(seen.note(experiment));
        }
        for key in &self.order {
            let Some(cell) = self.cells.get(key) else { continue };
            let Some(planned) = self.plan.experiments.get(key.planned) else { continue };
            let experiment = &planned.experiment;
            let begun = self.rounds_begun.get(key.planned).copied().unwrap_or(0);
            for (metric, unit, better, by_round) in &cell.metrics {
                let rounds: Vec<f64> = by_round.iter().map(|(_, value)| *value).collect();
                let Some(spread) = Spread::of(&rounds) else { continue };
                let is_missing = |number: &u64| by_round.iter().all(|(has, _)| has != number);
                let values = |k: &Key| self.values(k, metric);
                let base_key = Key { target: self.plan.baseline.clone(), ..key.clone() };
                let ratio = values(&base_key).and_then(|b| Spread::of_ratios(by_round, b));
                let base_mode = self.sibling(key, experiment.base_mode());
                let base_values = base_mode.as_ref().and_then(values);
                let mode_ratio = base_values.and_then(|b| Spread::of_ratios(by_round, b));
                out.rows.push(Row {
                    experiment: key.experiment.clone(),
                    target: key.target.clone(),
                    mode: cell.case.mode.clone(),
                    params: cell.case.params.clone(),
                    metric: metric.clone(),
                    unit: (*unit).to_owned(),
                    better: *better,
                    median: spread.median,
                    min: spread.min,
                    max: spread.max,
                    missing_rounds: (1..=begun).filter(is_missing).collect(),
                    rounds,
                    baseline: ratio.map(|_| self.plan.baseline.clone()),
                    ratio: ratio.map(|r| r.median),
                    ratio_min: ratio.map(|r| r.min),
                    ratio_max: ratio.map(|r| r.max),
                    base_mode: mode_ratio.map(|_| experiment.base_mode().to_owned()),
                    mode_ratio: mode_ratio.map(|r| r.median),
                    floor_ratio: None,
                    disturbed_rounds: cell.disturbed_rounds,
                });
            }
            Self::curves_of(key, cell, &mut out);
        }
        out
    }

    fn values(&self, key: &Key, metric: &str) -> Option<&[OfRound]> {
        let cell = self.cells.get(key)?;
        cell.metrics.iter().find(|m| m.0 == metric).map(|m| m.3.as_slice())
    }

    /// The cell of the same target with the base mode whose parameters this cell has all.
    fn sibling(&self, key: &Key, base_mode: &str) -> Option<Key> {
        let own = self.cells.get(key)?;
        if own.case.mode == base_mode {
            return None;
        }
        self.order
            .iter()
            .filter(|k| k.experiment == key.experiment && k.target == key.target)
            .find(|k| {
                self.cells.get(k).is_some_and(|c| {
                    c.case.mode == base_mode
                        && c.case
                            .params
                            .iter()
                            .all(|(name, value)| own.case.params.get(name) == Some(value))
                })
            })
            .cloned()
    }

    fn curves_of(key: &Key, cell: &Cell, out: &mut Outcome) {
        for (class, recorder) in &cell.latencies {
            out.curves.push(Curve {
                experiment: key.experiment.clone(),
                target: key.target.clone(),
                mode: cell.case.mode.clone(),
                params: cell.case.params.clone(),
                class: class.clone(),
                count: recorder.count(),
                max_us: recorder.max_us(),
                points: recorder.curve(),
            });
        }
        for (class, recorder) in &cell.last.latencies {
            out.series.push(SeriesRow {
                experiment: key.experiment.clone(),
                target: key.target.clone(),
                mode: cell.case.mode.clone(),
                params: cell.case.params.clone(),
                class: class.clone(),
                step_ms: SERIES_STEP.as_millis() as u64,
                points: recorder.series(),
                marks: cell.last.marks.clone(),
            });
        }
    }
}

fn env_of<'a>(
    plan: &Plan,
    stage: &'a Stage,
    cancel: &'a Cancel,
    registry: &'a Arc<Registry>,
) -> Env<'a> {
    Env {
        fs: Arc::clone(&stage.fs),
        seed: plan.seed,
        cancel,
        registry,
        daemons: &*stage.daemons,
        disks: &stage.disks,
    }
}

/// How long something took, for messages.
pub fn elapsed_text(begun: Instant) -> String {
    let s = begun.elapsed().as_secs();
    if s < 60 { format!("{s} s") } else { format!("{} min {} s", s / 60, s % 60) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_is_first_once() {
        let t = ["a", "b", "c"];
        assert_eq!(rotated(&t, 0), ["a", "b", "c"]);
        assert_eq!(rotated(&t, 1), ["b", "c", "a"]);
        assert_eq!(rotated(&t, 2), ["c", "a", "b"]);
        assert_eq!(rotated(&t, 3), ["a", "b", "c"]);
        assert!(rotated::<u8>(&[], 5).is_empty());
    }

    /// What an experiment is to the rows of a report.
    struct Named;

    impl Experiment for Named {
        fn name(&self) -> &'static str {
            "named"
        }
        fn question(&self) -> &'static str {
            ""
        }
        fn cases(&self) -> Vec<Case> {
            vec![Case::new("base"), Case::new("other")]
        }
        fn base_mode(&self) -> &'static str {
            "base"
        }
        fn run(&self, _env: &Env<'_>, _case: &Case) -> LabResult<CaseResult> {
            Err(LabError::NotOffered("only its name is used"))
        }
        fn space_bytes(&self) -> u64 {
            0
        }
    }

    #[test]
    fn a_case_that_fails_in_one_round_is_compared_within_the_rounds_that_are_left() {
        let plan = Plan {
            experiments: vec![Planned::whole(Box::new(Named))],
            targets: vec![TargetSpec::Xfs, TargetSpec::Weir],
            rounds: Some(3),
            time: None,
            size: Size::Quick,
            seed: 1,
            baseline: "xfs".into(),
            only_modes: Vec::new(),
            stage: StageOptions::default(),
        };
        let (registry, cancel) = (Registry::new().expect("state directory"), Cancel::default());
        let mut runner = Runner::new(&plan, None, &registry, &cancel, 1);
        let value = |mode: usize, target: &str, round: usize| {
            // The machine gets twice as fast from round to round; weir is at three times xfs, and the other mode at five times the base.
            let factor = if target == "weir" { 3.0 } else { 1.0 };
            let of_mode = if mode == 1 { 5.0 } else { 1.0 };
            100.0 * factor * of_mode * 2.0_f64.powi(round as i32)
        };
        for round in 0..3 {
            runner.rounds_begun[0] += 1;
            for (target, mode) in [("xfs", 0), ("xfs", 1), ("weir", 0), ("weir", 1)] {
                if (target, mode, round) == ("weir", 1, 0) || (target, mode, round) == ("xfs", 0, 1)
                {
                    continue;
                }
                let (experiment, target) = ("named".to_owned(), target.to_owned());
                let mut result = CaseResult::default();
                result.metric("m", "x", value(mode, &target, round), Better::Higher);
                let key = Key { experiment, planned: 0, target, case_index: mode };
                runner.keep(key, &plan.experiments[0].experiment.cases()[mode], result, false);
            }
        }
        let rows = runner.finish().rows;
        let row = |target: &str, mode: &str| {
            rows.iter().find(|r| r.target == target && r.mode == mode).expect("a row")
        };
        let other = row("weir", "other");
        assert_eq!((other.missing_rounds.as_slice(), other.rounds.len()), (&[1][..], 2));
        assert_eq!(
            (other.ratio, other.ratio_min, other.ratio_max),
            (Some(3.0), Some(3.0), Some(3.0))
        );
        assert_eq!(other.mode_ratio, Some(5.0));
        let base = row("weir", "base");
        assert_eq!((base.missing_rounds.len(), base.ratio_max), (0, Some(3.0)));
        assert_eq!(row("xfs", "base").missing_rounds, [2]);
        assert_eq!(row("xfs", "other").mode_ratio, Some(5.0));
    }

    #[test]
    fn a_figure_that_is_no_number_is_a_failure_and_no_figure() {
        let mut result = CaseResult::default();
        result.metric("good", "", 1.0, Better::Higher);
        result.check().expect("a number");
        result.metric("bad", "", f64::NAN, Better::Higher);
        assert!(result.check().expect_err("none").to_string().contains("bad"));
    }

    #[test]
    fn cancelling_reaches_every_clone() {
        let a = Cancel::default();
        let b = a.clone();
        b.check().expect("not yet");
        a.cancel();
        assert!(matches!(b.check(), Err(LabError::Cancelled)));
    }
}
