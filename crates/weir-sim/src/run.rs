//! Runs many cases, on several threads, with the same result whatever the number of threads.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use weir::AtimePolicy;
use weir::sync::Mutex;

use crate::explore::{Case, Failure, Limits, Tally, explore, prepare};
use crate::fault::FaultPlan;
use crate::image::Image;
use crate::model::Model;
use crate::op::Op;
use crate::rng::Rng;
use crate::system::{Settings, System};
use crate::workload::{exhaustive, faults, random};

/// Which workloads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Workload {
    /// Every sequence of one and of two operations.
    Exhaustive,
    /// Long random ones.
    Random,
    /// Long random ones on a misbehaving disk.
    Faults,
    /// All of them in turn.
    All,
}

impl Workload {
    const fn name(self) -> &'static str {
        match self {
            Self::Exhaustive => "exhaustive",
            Self::Random => "random",
            Self::Faults => "faults",
            Self::All => "all",
        }
    }
}

/// What to run.
#[derive(Debug, Clone)]
pub struct SimOptions {
    /// Draws everything.
    pub seed: u64,
    /// Stop after this many crash states.
    pub states: u64,
    /// Stop after this time.
    pub time: Option<Duration>,
    /// Which workloads.
    pub workload: Workload,
    /// Run only this case, for replay.
    pub case: Option<u64>,
    /// Seeded bug of the engine to switch on; needs the feature `mutations`.
    pub mutation: Option<String>,
    /// Worker threads. The result does not depend on it.
    pub threads: usize,
    /// Look for a shorter workload that fails too.
    pub shrink: bool,
    /// How much to examine.
    pub limits: Limits,
    /// Print progress every few seconds.
    pub progress: bool,
    /// A case that takes longer hangs: say which, and end the process.
    pub hang: Option<Duration>,
}

impl Default for SimOptions {
    fn default() -> Self {
        Self {
            seed: 1,
            states: 100_000,
            time: None,
            workload: Workload::All,
            case: None,
            mutation: None,
            threads: 1,
            shrink: true,
            limits: Limits::default(),
            progress: false,
            hang: None,
        }
    }
}

/// A finding, and how to see it again.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    /// Number of the case.
    pub case: u64,
    /// What kind of case.
    pub name: String,
    /// What happened.
    pub failure: Failure,
    /// Crash states verified before, in all cases up to this one.
    pub after_states: u64,
    /// The command that repeats it.
    pub replay: String,
    /// The shortest workload found that fails, if it was looked for.
    pub shrunk: Option<Failure>,
}

/// What a run has examined and found.
#[derive(Debug, Clone, Serialize)]
pub struct SimReport {
    /// The seed.
    pub seed: u64,
    /// The workloads.
    pub workload: Workload,
    /// Cases run.
    pub cases: u64,
    /// Crash states mounted and verified.
    pub states: u64,
    /// Of these: crashed during recovery.
    pub recovery_states: u64,
    /// Of these: crashed after a recovery and more work.
    pub later_states: u64,
    /// Crash states skipped because an equal one was verified before.
    pub duplicates: u64,
    /// Operations executed.
    pub operations: u64,
    /// Of these: begun in the midst of another one.
    pub overlapped: u64,
    /// Frames of the log that two callers had on their way at the same time, counted by the second.
    pub joined: u64,
    /// Operations that failed for lack of space or a fault.
    pub refused: u64,
    /// Device calls that a fault struck.
    pub faults: u64,
    /// Of these: during a call amid which others went on, that call included.
    pub faults_amid: u64,
    /// Seconds it took.
    pub seconds: f64,
    /// Crash states per second, all threads together.
    pub states_per_second: f64,
    /// The first finding, if any.
    pub finding: Option<Finding>,
}

/// Most cases between two looks at the limits.
const BATCH: u64 = 64;
/// The fewest: so that all threads have something to do.
const SMALLEST_BATCH: u64 = 4;
/// States of a case, before there was one.
const USUAL_STATES: u64 = 500;

/// Cases of a mix after which it begins anew: first the exhaustive ones, then random ones, the last ones with faults.
const ROUND: u64 = 46;
const EXHAUSTIVE_OF_ROUND: u64 = 42;
const FAULTS_OF_ROUND: u64 = 45;

type Start = (Image, Model);

struct Factory<'a, S> {
    system: &'a S,
    options: &'a SimOptions,
    actions: Vec<Vec<Op>>,
    /// Prepared volumes by name.
    starts: Mutex<BTreeMap<String, Start>>,
}

impl<S: System> Factory<'_, S> {
    fn start(&self, name: &str, settings: &Settings, ops: &[Op]) -> Result<Start, Failure> {
        let key = format!("{name} {settings:?}");
        if let Some(start) = self.starts.lock().get(&key) {
            return Ok(start.clone());
        }
        let start = prepare(self.system, settings, ops)?;
        self.starts.lock().insert(key, start.clone());
        Ok(start)
    }

    /// The case with this number.
    fn case(&self, number: u64) -> Result<Case, Failure> {
        let workload = match self.options.workload {
            // So that a million states hold every sequence of one action.
            Workload::All => match number % ROUND {
                0..EXHAUSTIVE_OF_ROUND => Workload::Exhaustive,
                EXHAUSTIVE_OF_ROUND..FAULTS_OF_ROUND => Workload::Random,
                _ => Workload::Faults,
            },
            chosen => chosen,
        };
        // In a mix, the exhaustive sequences are numbered without gaps.
        let inner = match self.options.workload {
            Workload::All => {
                let place = (number % ROUND).min(EXHAUSTIVE_OF_ROUND - 1);
                number / ROUND * EXHAUSTIVE_OF_ROUND + place
            }
            _ => number,
        };
        let seed = crate::rng::mix(self.options.seed ^ crate::rng::mix(number));
        let mut case = match workload {
            Workload::Exhaustive => self.exhaustive(inner, seed),
            _ => self.random(number, seed, workload == Workload::Faults),
        }?;
        if !self.system.overlaps() {
            case.ops = case.ops.into_iter().flat_map(Op::unlapped).collect();
        }
        Ok(case)
    }

    fn exhaustive(&self, number: u64, seed: u64) -> Result<Case, Failure> {
        let sequence = exhaustive::sequence(number, self.options.seed);
        let tree = exhaustive::TREES[sequence.tree];
        // Every other sequence makes chains of frames of its batches.
        let batch_part_blocks = (number % 2 == 1).then_some(2);
        // Every second pair of them writes each new page of a sync beside its frame.
        let beside_from_pages = (number % 4 > 1).then_some(1);
        // Every fifth one writes the whole tree with every checkpoint.
        let dense_merges = number.is_multiple_of(5);
        // Every third one leaves removed files to the background.
        let purge_at_once_blocks = number.is_multiple_of(3).then_some(0);
        // In the other half of all, the writeback of each file overlaps with that of the next.
        let round_pages = (number % 8 > 3).then_some(1);
        // Every second one cuts files extent by extent, and every seventh has a disk that understands forced unit access.
        let cut_extents = (number / 3 % 2 == 1).then_some(1);
        let fua = number.is_multiple_of(7);
        // Where reading moves access times.
        let atime = match number % 16 {
            5 => AtimePolicy::Relative,
            13 => AtimePolicy::Strict,
            _ => AtimePolicy::Never,
        };
        let settings = Settings {
            batch_part_blocks,
            beside_from_pages,
            dense_merges,
            purge_at_once_blocks,
            round_pages,
            cut_extents,
            fua,
            atime,
            ..Settings::SMALL
        };
        let (image, model) = self.start(tree, &settings, &exhaustive::tree(sequence.tree))?;
        Ok(Case {
            name: format!("exhaustive, tree {tree}, sequence {number}"),
            seed,
            settings,
            image,
            model,
            ops: exhaustive::operations(&sequence, &self.actions),
            faults: FaultPlan::default(),
            silent_faults: false,
            limits: self.options.limits.clone(),
        })
    }

    fn random(&self, number: u64, seed: u64, faulty: bool) -> Result<Case, Failure> {
        let mut rng = Rng::derived(seed, 0xCA);
        let mut shape = random::Shape::draw(&mut rng);
        if faulty {
            // A fault strikes few calls: more of them are to have others amid them.
            shape.overlap_one_in /= 2;
        }
        let (image, model) = self.start("random", &shape.settings, &[])?;
        let mut ops = random::operations(&shape, &model, &mut rng);
        let (faults, silent_faults) = if faulty {
            faults::draw(&shape.settings, &mut rng)
        } else {
            (FaultPlan::default(), false)
        };
        if shape.settings.atime != AtimePolicy::Never {
            // When they read is not known.
            ops = ops.into_iter().flat_map(without_reads_amid).collect();
        }
        if faulty {
            // The sync after it may fail: then it has no place in the order.
            ops.iter_mut().for_each(Op::tear);
        }
        let mut limits = self.options.limits.clone();
        limits.outcomes_per_point = limits.outcomes_per_point.min(6);
        Ok(Case {
            name: format!("{}, number {number}", if faulty { "faults" } else { "random" }),
            seed,
            settings: shape.settings,
            image,
            model,
            ops,
            faults,
            silent_faults,
            limits,
        })
    }

    fn run(&self, number: u64) -> (Tally, CaseOutcome) {
        match self.case(number) {
            Err(failure) => (Tally::default(), Err(Box::new((None, failure)))),
            Ok(case) => {
                let (tally, result) = explore(self.system, &case);
                (tally, result.map_err(|failure| Box::new((Some(case), failure))))
            }
        }
    }
}

/// An overlap without those of its operations that only read.
fn without_reads_amid(op: Op) -> Vec<Op> {
    match op {
        Op::Overlap { outer, amid, mut inner } => {
            inner.retain(|op| !matches!(op, Op::Read { .. }));
            if inner.is_empty() { vec![*outer] } else { vec![Op::Overlap { outer, amid, inner }] }
        }
        op => vec![op],
    }
}

/// How many cases come next: as many as the states that are left take, going by those before. Whatever the number of threads, so that
/// the same options run the same cases.
fn batch(options: &SimOptions, total: &Tally, cases: u64) -> u64 {
    if options.case.is_some() {
        return 1;
    }
    let states_per_case = total.states.checked_div(cases).unwrap_or(USUAL_STATES).max(1);
    let left = options.states.saturating_sub(total.states);
    left.div_ceil(states_per_case).clamp(SMALLEST_BATCH, BATCH)
}

/// Runs cases on `system` until a limit of `options` is reached or something is found.
pub fn run_on<S: System>(system: &S, options: &SimOptions) -> SimReport {
    let begin = Instant::now();
    let factory = Factory {
        system,
        options,
        actions: exhaustive::actions(),
        starts: Mutex::new(BTreeMap::new()),
    };
    let mut total = Tally::default();
    let mut cases = 0;
    let mut finding = None;
    let mut first = options.case.unwrap_or(0);
    let last = match options.workload {
        Workload::Exhaustive => exhaustive::count(),
        _ => u64::MAX,
    };
    let mut printed = Instant::now();
    while finding.is_none() && first < last {
        let batch = batch(options, &total, cases);
        let numbers = first..(first + batch).min(last);
        for (number, tally, result) in run_batch(&factory, numbers, options.threads) {
            total.add(&tally);
            cases += 1;
            if let Err(found) = result {
                let (case, failure) = *found;
                finding = Some(report(system, options, number, &total, case, failure));
                break;
            }
        }
        first += batch;
        let out_of_time = options.time.is_some_and(|time| begin.elapsed() >= time);
        if options.case.is_some() || total.states >= options.states || out_of_time {
            break;
        }
        if options.progress && printed.elapsed() > Duration::from_secs(10) {
            printed = Instant::now();
            let rate = total.states as f64 / begin.elapsed().as_secs_f64();
            eprintln!("{cases} cases, {} crash states, {rate:.0}/s", total.states);
        }
    }
    let seconds = begin.elapsed().as_secs_f64();
    SimReport {
        seed: options.seed,
        workload: options.workload,
        cases,
        states: total.states,
        recovery_states: total.recovery_states,
        later_states: total.later_states,
        duplicates: total.duplicates,
        operations: total.operations,
        overlapped: total.overlapped,
        joined: total.joined,
        refused: total.refused,
        faults: total.faults,
        faults_amid: total.faults_amid,
        seconds,
        states_per_second: total.states as f64 / seconds.max(1e-9),
        finding,
    }
}

/// Nothing, or the case (if it could be prepared) with what was found.
type CaseOutcome = Result<(), Box<(Option<Case>, Failure)>>;
type CaseResult = (u64, Tally, CaseOutcome);

/// Runs a batch and gives the results in the order of the numbers.
fn run_batch<S: System>(
    factory: &Factory<'_, S>,
    numbers: std::ops::Range<u64>,
    threads: usize,
) -> Vec<CaseResult> {
    let next = AtomicU64::new(numbers.start);
    let failed = AtomicBool::new(false);
    let results = Mutex::new(Vec::new());
    let mutation = factory.options.mutation.as_deref();
    let active = Mutex::new(BTreeMap::new());
    let working = AtomicU64::new(threads.max(1) as u64);
    std::thread::scope(|scope| {
        if let Some(limit) = factory.options.hang {
            let (active, working) = (&active, &working);
            scope.spawn(move || watch(factory.options, active, working, limit));
        }
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                let _active = crate::mutation::Active::switch_on(mutation);
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    // After a failure only earlier cases matter, and those are taken already.
                    if number >= numbers.end || failed.load(Ordering::Relaxed) {
                        break;
                    }
                    active.lock().insert(number, Instant::now());
                    let (tally, result) = factory.run(number);
                    active.lock().remove(&number);
                    if result.is_err() {
                        failed.store(true, Ordering::Relaxed);
                    }
                    results.lock().push((number, tally, result));
                }
                working.fetch_sub(1, Ordering::Relaxed);
            });
        }
    });
    let mut results = results.into_inner();
    results.sort_by_key(|(number, ..)| *number);
    results
}

/// Ends the process when a case hangs: a thread that waits for ever cannot be stopped in another way.
fn watch(
    options: &SimOptions,
    active: &Mutex<BTreeMap<u64, Instant>>,
    working: &AtomicU64,
    limit: Duration,
) {
    let mut pause = Duration::from_millis(1);
    while working.load(Ordering::Relaxed) > 0 {
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(100));
        let hanging =
            active.lock().iter().find(|(_, begin)| begin.elapsed() > limit).map(|case| *case.0);
        if let Some(number) = hanging {
            eprintln!("FOUND: case {number} hangs; replay: {}", replay(options, number));
            std::process::exit(3);
        }
    }
}

/// The command that repeats a case.
fn replay(options: &SimOptions, number: u64) -> String {
    let mutation =
        options.mutation.as_ref().map_or_else(String::new, |name| format!(" --mutation {name}"));
    let workload = options.workload.name();
    format!("weir-sim --seed {} --workload {workload} --case {number}{mutation}", options.seed)
}

fn report<S: System>(
    system: &S,
    options: &SimOptions,
    number: u64,
    total: &Tally,
    case: Option<Case>,
    failure: Failure,
) -> Finding {
    let _active = crate::mutation::Active::switch_on(options.mutation.as_deref());
    let shrunk = case.as_ref().filter(|_| options.shrink).and_then(|case| shrink(system, case));
    Finding {
        case: number,
        name: case.map_or_else(|| "preparation".to_owned(), |case| case.name),
        failure,
        after_states: total.states,
        replay: replay(options, number),
        shrunk,
    }
}

/// Leaves operations out for as long as something is still found: first long stretches, then single
/// ones, then those that run amid others.
fn shrink<S: System>(system: &S, case: &Case) -> Option<Failure> {
    let mut shrinking = Shrinking { system, case, began: Instant::now(), best: None };
    let mut ops = case.ops.clone();
    let mut stretch = (ops.len() / 2).max(1);
    loop {
        let mut at = 0;
        while at < ops.len() {
            let mut fewer = ops.clone();
            fewer.drain(at..(at + stretch).min(ops.len()));
            if shrinking.still_fails(&fewer) {
                ops = fewer;
            } else {
                at += stretch;
            }
        }
        if stretch == 1 {
            break;
        }
        stretch = (stretch / 2).max(1);
    }
    for at in 0..ops.len() {
        let mut inner_at = 0;
        while let Some(fewer) = without_inner(&ops, at, inner_at) {
            if shrinking.still_fails(&fewer) {
                ops = fewer;
            } else {
                inner_at += 1;
            }
        }
    }
    shrinking.best
}

/// What is tried while a workload shrinks.
struct Shrinking<'a, S> {
    system: &'a S,
    case: &'a Case,
    began: Instant,
    best: Option<Failure>,
}

impl<S: System> Shrinking<'_, S> {
    /// Whether `ops` alone fail as well; not after 20 seconds.
    fn still_fails(&mut self, ops: &[Op]) -> bool {
        if self.began.elapsed() > Duration::from_secs(20) {
            return false;
        }
        let mut limits = self.case.limits.clone();
        // A shorter workload passes fewer points: look closer at each.
        limits.outcomes_per_point = limits.outcomes_per_point.max(16);
        let attempt = Case { ops: ops.to_vec(), limits, ..self.case.clone() };
        let (_, result) = explore(self.system, &attempt);
        let failure = result.err();
        let fails = failure.is_some();
        self.best = failure.or_else(|| self.best.take());
        fails
    }
}

/// `ops` without operation `inner_at` of those that run amid `ops[at]`; the outer one alone without the last of them. None:
/// there is no such.
fn without_inner(ops: &[Op], at: usize, inner_at: usize) -> Option<Vec<Op>> {
    let Op::Overlap { outer, amid, inner } = ops.get(at)? else { return None };
    let mut left = inner.clone();
    if inner_at >= left.len() {
        return None;
    }
    left.remove(inner_at);
    let mut fewer = ops.to_vec();
    fewer[at] = if left.is_empty() {
        (**outer).clone()
    } else {
        Op::Overlap { outer: outer.clone(), amid: *amid, inner: left }
    };
    Some(fewer)
}
