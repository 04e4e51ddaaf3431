//! `weir lab check REPORT.json`: what a report must show.
//!
//! *Truths* are known of kernel file systems whatever Weir does; a report that contradicts one was measured
//! wrongly, or on a machine too disturbed to measure on. *Claims* are what this project says of Weir. Each is
//! a figure, or a ratio between figures of the same round, and a bound for its median. What a report does
//! not have is said, and judged neither way.

use std::fmt::Write;

use super::schema::{Report, Row, skipped_groups};
use super::table::figure;
use crate::experiments::programs;
use crate::measure::Spread;

/// Kind of statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Known of kernel file systems.
    Truth,
    /// Said of Weir.
    Claim,
}

/// Where the median must lie.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// This or more.
    AtLeast(f64),
    /// This or less.
    AtMost(f64),
}

impl Bound {
    fn holds(self, value: f64) -> bool {
        match self {
            Bound::AtLeast(bound) => value >= bound,
            Bound::AtMost(bound) => value <= bound,
        }
    }
}

/// A statement with what the report says about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// Truth or claim.
    pub kind: Kind,
    /// The statement.
    pub what: String,
    /// What is required.
    pub bound: Bound,
    /// What was found, over the rounds; `None` when the report has no such figures.
    pub found: Option<Spread>,
    /// Rounds in which other load was seen, of the figures used.
    pub disturbed_rounds: u64,
    /// What the figure rests on.
    pub detail: Detail,
    /// Why there is nothing to judge.
    pub moot: Option<&'static str>,
}

/// What a finding rests on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Detail {
    /// The figure itself, where the finding is a ratio.
    pub value: Option<f64>,
    /// What it is compared with: target (and mode, where that is what differs) and its figure.
    pub against: Option<(String, f64)>,
    /// Unit of both.
    pub unit: String,
    /// Writes of the device per operation.
    pub writes: Option<f64>,
    /// Flushes of the device per operation.
    pub flushes: Option<f64>,
    /// CPU time per operation, in microseconds.
    pub cpu_us: Option<f64>,
    /// How many times worse than the floor it is.
    pub floor_ratio: Option<f64>,
}

impl Finding {
    /// Nothing is known yet.
    fn unknown(kind: Kind, what: String, bound: Bound) -> Self {
        let detail = Detail::default();
        Self { kind, what, bound, found: None, disturbed_rounds: 0, detail, moot: None }
    }

    /// Whether it holds; `None` when the report does not say.
    pub fn holds(&self) -> Option<bool> {
        self.found.map(|s| self.bound.holds(s.median))
    }
}

/// Which row: every parameter named must be equal.
#[derive(Clone, Copy)]
struct Wanted<'a> {
    experiment: &'a str,
    mode: &'a str,
    params: &'a [(&'a str, u64)],
    metric: &'a str,
}

const KERNEL: [&str; 3] = ["xfs", "ext4", "btrfs"];

/// A tail this many times as long as in the quiet run is the big fsync's.
const HURT: f64 = 3.0;

struct Checker<'a> {
    report: &'a Report,
    findings: Vec<Finding>,
}

impl<'a> Checker<'a> {
    fn rows(&self, target: &str, wanted: Wanted<'_>) -> impl Iterator<Item = &'a Row> {
        let fits = move |row: &&Row| {
            row.target == target
                && row.experiment == wanted.experiment
                && row.mode == wanted.mode
                && row.metric == wanted.metric
                && wanted.params.iter().all(|(k, v)| row.params.get(*k) == Some(&(*v).into()))
        };
        self.report.results.iter().filter(fits).collect::<Vec<_>>().into_iter()
    }

    /// The row with the largest median: the best depth, where several were tried.
    fn best(&self, target: &str, wanted: Wanted<'_>) -> Option<&'a Row> {
        self.rows(target, wanted).max_by(|a, b| a.median.total_cmp(&b.median))
    }

    fn one(&self, target: &str, wanted: Wanted<'_>) -> Option<&'a Row> {
        self.rows(target, wanted).next()
    }

    fn ratio(&mut self, kind: Kind, what: String, pair: Option<(&Row, &Row)>, bound: Bound) {
        let found = pair.and_then(|(a, b)| Spread::of_ratios(&a.by_round(), &b.by_round()));
        let disturbed_rounds = pair.map_or(0, |(a, b)| a.disturbed_rounds.max(b.disturbed_rounds));
        let detail = pair.map_or(Detail::default(), |(a, b)| {
            let name = if a.target == b.target {
                format!("{} {}", b.target, b.mode)
            } else {
                b.target.clone()
            };
            Detail { value: Some(a.median), against: Some((name, b.median)), ..self.detail(a) }
        });
        let unknown = Finding::unknown(kind, what, bound);
        self.findings.push(Finding { found, disturbed_rounds, detail, ..unknown });
    }

    fn value(&mut self, kind: Kind, what: String, row: Option<&Row>, bound: Bound) {
        let found = row.and_then(|r| Spread::of(&r.rounds));
        let disturbed_rounds = row.map_or(0, |r| r.disturbed_rounds);
        let detail = row.map_or(Detail::default(), |r| self.detail(r));
        let unknown = Finding::unknown(kind, what, bound);
        self.findings.push(Finding { found, disturbed_rounds, detail, ..unknown });
    }

    /// What an operation of the row's case costs: rows of the same case whose names say so.
    fn detail(&self, row: &Row) -> Detail {
        let cost = |prefix: &str| {
            let same = |r: &&Row| {
                r.experiment == row.experiment
                    && r.target == row.target
                    && r.mode == row.mode
                    && r.params == row.params
                    && r.metric.starts_with(prefix)
            };
            self.report.results.iter().find(same).map(|r| r.median)
        };
        Detail {
            value: None,
            against: None,
            unit: row.unit.replace("us", "µs"),
            writes: cost("writes_per_"),
            flushes: cost("flushes_per_"),
            cpu_us: cost("cpu_us_per_"),
            floor_ratio: row.floor_ratio,
        }
    }

    /// The kernel file system that does best, where more is better.
    fn best_kernel(&self, wanted: Wanted<'_>) -> Option<&'a Row> {
        let best = KERNEL.iter().filter_map(|kernel| self.best(kernel, wanted));
        best.max_by(|a, b| a.median.total_cmp(&b.median))
    }

    /// `target` against the kernel file system that does best, where more is better.
    fn against_best_kernel(&mut self, target: &str, what: &str, wanted: Wanted<'_>, bound: f64) {
        let best = self.best_kernel(wanted);
        let what = best.map_or(what.to_owned(), |b| format!("{what} (best: {})", b.target));
        let pair = self.best(target, wanted).zip(best);
        self.ratio(Kind::Claim, what, pair, Bound::AtLeast(bound));
    }

    /// A claim that is made over XFS, and held against the best as well where that is another.
    fn against_xfs_and_best(&mut self, target: &str, what: &str, wanted: Wanted<'_>, bound: f64) {
        self.against_xfs(target, format!("{what} over xfs"), wanted, Bound::AtLeast(bound));
        if self.best_kernel(wanted).is_some_and(|best| best.target != "xfs") {
            self.against_best_kernel(target, &format!("{what} over the kernel's"), wanted, bound);
        }
    }

    fn against_xfs(&mut self, target: &str, what: String, wanted: Wanted<'_>, bound: Bound) {
        let pair = self.best(target, wanted).zip(self.best("xfs", wanted));
        self.ratio(Kind::Claim, what, pair, bound);
    }
}

/// The length of the disk's flush, if it is one of ours.
fn slow_flush_us(report: &Report) -> Option<u64> {
    report.disk.strip_prefix("slow:")?.parse().ok()
}

fn fsmark<'a>(mode: &'a str, params: &'a [(&'a str, u64)], metric: &'a str) -> Wanted<'a> {
    Wanted { experiment: "fsmark", mode, params, metric }
}

fn truths(c: &mut Checker<'_>) {
    let slow = slow_flush_us(c.report).is_some_and(|us| us >= 2000);
    let one = [("threads", 1)];
    for target in ["xfs", "ext4"] {
        let factor = if slow { 10.0 } else { 2.5 };
        let pass = c.one(target, fsmark("pass", &one, "files_per_s"));
        let fast = c.best(target, fsmark("async", &one, "files_per_s"));
        let what = format!("{target}: asynchronous fsync, files/s over one by one");
        c.ratio(Kind::Truth, what, fast.zip(pass), Bound::AtLeast(factor));
        let pass = c.one(target, fsmark("pass", &one, "flushes_per_file"));
        // At the depth that has the most files per second.
        let wanted = fsmark("async", &one, "flushes_per_file");
        let fast =
            fast.and_then(|fast| c.rows(target, wanted).find(|row| row.params == fast.params));
        let what = format!("{target}: asynchronous fsync, flushes per file over one by one");
        c.ratio(Kind::Truth, what, fast.zip(pass), Bound::AtMost(0.5));
    }
    for target in ["xfs", "ext4"] {
        for class in ["read", "log"] {
            let tail = tail_of(c, target, class);
            let wanted =
                |mode| Wanted { experiment: "checkpoint", mode, params: &[], metric: &tail };
            let (quiet, end) = (c.one(target, wanted("quiet")), c.one(target, wanted("end")));
            let what = format!("{target}: {tail} with trickled writeback over one big fsync");
            let pair = c.one(target, wanted("trickle")).zip(end);
            // A disk that takes the data at once leaves nothing to be spread.
            let is_harmless = end.zip(quiet).is_some_and(|(e, q)| e.median < HURT * q.median);
            let bound = Bound::AtMost(0.8);
            if is_harmless {
                let why =
                    "on this disk one big fsync did others no harm: try --disk limit:wbps=150M";
                let unknown = Finding::unknown(Kind::Truth, what, bound);
                c.findings.push(Finding { moot: Some(why), ..unknown });
            } else {
                c.ratio(Kind::Truth, what, pair, bound);
            }
        }
    }
    for target in KERNEL {
        let wanted = |mode| Wanted {
            experiment: "fastread",
            mode,
            params: &[("queue", 64)],
            metric: "f1_p50_us",
        };
        let pair = c.one(target, wanted("nowait")).zip(c.one(target, wanted("pool")));
        let what = format!("{target}: cached read, no-wait first over a thread pool");
        c.ratio(Kind::Truth, what, pair, Bound::AtMost(0.2));
    }
    let wanted =
        |params| Wanted { experiment: "fsync", mode: "seq", params, metric: "flushes_per_fsync" };
    let many = c.one("btrfs", wanted(&[("jobs", 16)])).zip(c.one("btrfs", wanted(&[("jobs", 1)])));
    let what = "btrfs: flushes per fsync, 16 jobs over one".to_owned();
    c.ratio(Kind::Truth, what, many, Bound::AtMost(0.7));
}

/// p99.9 where there were enough operations on all sides, else p99.
fn tail_of(c: &Checker<'_>, target: &str, class: &str) -> String {
    let deep = format!("{class}_p999_us");
    let modes = ["quiet", "end", "trickle"];
    let everywhere = modes.iter().all(|mode| {
        let wanted = Wanted { experiment: "checkpoint", mode, params: &[], metric: &deep };
        c.one(target, wanted).is_some()
    });
    if everywhere { deep } else { format!("{class}_p99_us") }
}

fn durability_claims(c: &mut Checker<'_>, target: &str) {
    let slow = slow_flush_us(c.report).is_some_and(|us| us >= 2000);
    for threads in [1, 4] {
        let bound = match (slow, threads) {
            (true, 1) => 1.9,
            (true, _) => continue,
            _ => 3.0,
        };
        let params = [("threads", threads)];
        let what = format!("{target}: fsmark one by one, threads={threads}, files/s");
        let wanted = fsmark("pass", &params, "files_per_s");
        c.against_xfs_and_best(target, &what, wanted, bound);
    }
    let one = [("threads", 1)];
    let wanted = fsmark("async", &one, "files_per_s");
    if slow {
        let what = format!("{target}: fsmark asynchronous, one submitter, files/s");
        c.against_xfs_and_best(target, &what, wanted, 15.0);
        let params = [("threads", 16)];
        let wanted = fsmark("async", &params, "files_per_s");
        let what = format!("{target}: fsmark asynchronous, 16 submitters, files/s");
        c.against_xfs_and_best(target, &what, wanted, 8.0);
    } else {
        let what =
            format!("{target}: fsmark asynchronous, one submitter, files/s over the kernel's");
        c.against_best_kernel(target, &what, wanted, 4.0);
    }
    let row = c.best(target, fsmark("async", &one, "files_per_flush"));
    let what = format!("{target}: fsmark asynchronous, one submitter, fsyncs per flush");
    c.value(Kind::Claim, what, row, Bound::AtLeast(if slow { 500.0 } else { 100.0 }));
    ticket_claims(c, target);
    for (mode, bound) in [("seq", 2.0), ("rand", 4.0)] {
        for jobs in [1, 2, 4, 8, 16] {
            let params = [("jobs", jobs)];
            let wanted = Wanted { experiment: "fsync", mode, params: &params, metric: "mib_per_s" };
            if !slow && c.one(target, wanted).is_some() {
                let what = format!("{target}: fsync {mode}, jobs={jobs}, MiB/s over the kernel's");
                c.against_best_kernel(target, &what, wanted, bound);
            }
        }
    }
    for class in ["read", "log"] {
        checkpoint_claims(c, target, &tail_of(c, target, class));
        // The same of what did not wait for a disk that stood still, where that was watched for.
        checkpoint_claims(c, target, &format!("{class}_moving_p999_us"));
    }
}

fn checkpoint_claims(c: &mut Checker<'_>, target: &str, tail: &str) {
    let wanted = |mode| Wanted { experiment: "checkpoint", mode, params: &[], metric: tail };
    let quiet = c.one(target, wanted("quiet"));
    if quiet.is_none() && tail.contains("_moving_") {
        return;
    }
    for (mode, bound) in [("trickle", 1.5), ("async", 1.5), ("end", 3.0)] {
        let what = format!("{target}: {tail} with checkpoint '{mode}' over a quiet run");
        let pair = c.one(target, wanted(mode)).zip(quiet);
        c.ratio(Kind::Claim, what, pair, Bound::AtMost(bound));
    }
    let what = format!("{target}: {tail} with checkpoint 'end', µs");
    c.value(Kind::Claim, what, c.one(target, wanted("end")), Bound::AtMost(3000.0));
}

fn ticket_claims(c: &mut Checker<'_>, target: &str) {
    let hundred_thousand = [("tickets", 100_000)];
    let wanted = |mode, metric| {
        let params = if mode == "held" { &hundred_thousand[..] } else { &[] };
        Wanted { experiment: "tickets", mode, params, metric }
    };
    for (what, mode, metric, bound) in [
        ("submission of a ticket, µs, mean", "submit", "submit_mean_us", 2.0),
        ("submission of a ticket, µs, median", "submit", "submit_p50_us", 2.0),
        ("what 100,000 tickets in flight hold, MiB", "held", "held_mib", 100.0),
    ] {
        let row = c.one(target, wanted(mode, metric));
        c.value(Kind::Claim, format!("{target}: {what}"), row, Bound::AtMost(bound));
    }
}

fn mount_claims(c: &mut Checker<'_>, target: &str) {
    for threads in [1, 4] {
        let params = [("threads", threads)];
        let what =
            format!("{target}: fsmark one by one, threads={threads}, files/s over the kernel's");
        c.against_best_kernel(target, &what, fsmark("pass", &params, "files_per_s"), 1.0);
    }
    for mode in ["seq", "rand"] {
        for jobs in [1, 4, 16] {
            let params = [("jobs", jobs)];
            let wanted = Wanted { experiment: "fsync", mode, params: &params, metric: "mib_per_s" };
            let what = format!("{target}: fsync {mode}, jobs={jobs}, MiB/s over the kernel's");
            c.against_best_kernel(target, &what, wanted, 1.0);
        }
    }
    for mode in programs::MODES {
        for clients in [1, 4, 16] {
            let params = [("clients", clients)];
            let metric = "transactions_per_s";
            let wanted = Wanted { experiment: "programs", mode, params: &params, metric };
            let what =
                format!("{target}: {mode}, clients={clients}, transactions/s over the kernel's");
            c.against_best_kernel(target, &what, wanted, 1.0);
        }
    }
    let what = format!("{target}: untar and sync, time over xfs");
    let wanted = foundation("untar", "total_s");
    c.against_xfs(target, what, wanted, Bound::AtMost(1.5));
    let what = format!("{target}: create + write + fsync, files/s over xfs");
    let wanted = foundation("create-fsync", "files_per_s");
    c.against_xfs(target, what, wanted, Bound::AtLeast(1.0));
}

fn foundation<'a>(mode: &'a str, metric: &'a str) -> Wanted<'a> {
    Wanted { experiment: "foundation", mode, params: &[], metric }
}

fn foundation_claims(c: &mut Checker<'_>, target: &str) {
    for (what, wanted, bound) in [
        ("create + write + fsync, files/s", foundation("create-fsync", "files_per_s"), 2.0),
        ("64 KiB appends with fsync, MiB/s", foundation("append-64k", "mib_per_s"), 1.5),
        ("4 KiB buffered writes, GiB/s", foundation("buffered-4k", "gib_per_s"), 2.0),
    ] {
        let what = format!("{target}: {what} over xfs");
        c.against_xfs(target, what, wanted, Bound::AtLeast(bound));
    }
    for (what, metric, bound) in [
        ("cached read of a hot block", "hot_read_4k_ns", 1.0 / 2.0),
        ("cached read at random", "random_read_4k_ns", 1.0 / 1.3),
    ] {
        let what = format!("{target}: {what}, time over xfs");
        c.against_xfs(target, what, foundation("cached-read", metric), Bound::AtMost(bound));
    }
    for mode in ["write-1m", "read-1m"] {
        let wanted = foundation(mode, "mib_per_s");
        let pair = c.one(target, wanted).zip(c.one("raw", wanted));
        let what = format!("{target}: {mode}, MiB/s over the bare disk with 8 in flight");
        c.ratio(Kind::Claim, what, pair, Bound::AtLeast(0.9));
    }
    for mode in ["one-directory", "many-directories"] {
        let row = c.one(target, foundation(mode, "last_over_first_tenth"));
        let what = format!("{target}: {mode}, time of the last tenth over the first");
        c.value(Kind::Claim, what, row, Bound::AtMost(1.3));
        let row = c.one(target, foundation(mode, "open_ms"));
        let what = format!("{target}: {mode}, opening, ms");
        c.value(Kind::Claim, what, row, Bound::AtMost(500.0));
        let row = c.one(target, foundation(mode, "reads_per_cold_lookup"));
        let what = format!("{target}: {mode}, device reads of a cold look-up");
        c.value(Kind::Claim, what, row, Bound::AtMost(6.0));
    }
    let row = c.one(target, foundation("recovery", "recovery_ms"));
    let what = format!("{target}: recovery with a full log, ms");
    c.value(Kind::Claim, what, row, Bound::AtMost(5000.0));
}

/// All statements that concern the targets and experiments of a report.
pub fn findings(report: &Report) -> Vec<Finding> {
    let mut c = Checker { report, findings: Vec::new() };
    truths(&mut c);
    let has = |target: &str| report.results.iter().any(|r| r.target == target);
    for target in ["weir", "weir-loop"] {
        if has(target) {
            durability_claims(&mut c, target);
            foundation_claims(&mut c, target);
        }
    }
    for target in ["weir-mount", "weir-mount-loop"] {
        if has(target) {
            mount_claims(&mut c, target);
        }
    }
    c.findings
}

/// The findings as text, and whether a statement of a kind in `gate` does not hold.
pub fn render(report: &Report, gate: &[Kind]) -> (String, bool) {
    let all = findings(report);
    let mut out = String::new();
    let mut failed = false;
    let mut absent = 0;
    for f in &all {
        let kind = if f.kind == Kind::Truth { "truth" } else { "claim" };
        if let Some(why) = f.moot {
            let _ = writeln!(out, "moot  {kind}  {}: {why}", f.what);
            continue;
        }
        let Some(found) = f.found else {
            absent += 1;
            continue;
        };
        let holds = f.holds() == Some(true);
        failed |= !holds && gate.contains(&f.kind);
        let need = match f.bound {
            Bound::AtLeast(b) => format!("at least {}", figure(b)),
            Bound::AtMost(b) => format!("at most {}", figure(b)),
        };
        let word = if holds { "holds" } else { "FAILS" };
        let disturbed = match f.disturbed_rounds {
            0 => String::new(),
            n => format!("; {n} rounds disturbed"),
        };
        let _ = writeln!(
            out,
            "{word} {kind}  {}: {} ({}..{}), {need}{disturbed}",
            f.what,
            figure(found.median),
            figure(found.min),
            figure(found.max),
        );
    }
    for group in skipped_groups(&report.not_offered).iter().filter(|g| g.failed) {
        // What went wrong is no figure that is missing.
        failed |= gate.contains(&Kind::Claim);
        let (on, cases) = (group.target, group.cases.join(", "));
        let _ =
            writeln!(out, "FAILED case   {} on {on}: {cases}: {}", group.experiment, group.reason);
    }
    let count =
        |kind, holds| all.iter().filter(|f| f.kind == kind && f.holds() == Some(holds)).count();
    let _ = writeln!(
        out,
        "{} truths hold, {} fail; {} claims hold, {} fail; {absent} statements need figures that this report \
         does not have",
        count(Kind::Truth, true),
        count(Kind::Truth, false),
        count(Kind::Claim, true),
        count(Kind::Claim, false),
    );
    let doubtful =
        |f: &&Finding| f.kind == Kind::Truth && f.holds() == Some(false) && f.disturbed_rounds > 0;
    if all.iter().any(|f| doubtful(&f)) {
        out.push_str(
            "truths fail where the machine was disturbed: repeat the run on a quiet one\n",
        );
    }
    (out, failed)
}

#[cfg(test)]
mod tests {
    use super::super::schema::Skipped;
    use super::*;
    use crate::experiments::Better;

    type Params<'a> = &'a [(&'a str, u64)];
    /// Target, experiment, mode, parameters, metric, rounds.
    type Figures<'a> = (&'a str, &'a str, &'a str, Params<'a>, &'a str, &'a [f64]);

    fn report(disk: &str, rows: &[Figures<'_>]) -> Report {
        let results = rows
            .iter()
            .map(|(target, experiment, mode, params, metric, rounds)| {
                let spread = Spread::of(rounds).expect("rounds");
                Row {
                    experiment: (*experiment).into(),
                    target: (*target).into(),
                    mode: (*mode).into(),
                    params: params.iter().map(|(k, v)| ((*k).to_owned(), (*v).into())).collect(),
                    metric: (*metric).into(),
                    unit: String::new(),
                    better: Better::Higher,
                    median: spread.median,
                    min: spread.min,
                    max: spread.max,
                    rounds: rounds.to_vec(),
                    missing_rounds: Vec::new(),
                    baseline: None,
                    ratio: None,
                    ratio_min: None,
                    ratio_max: None,
                    base_mode: None,
                    mode_ratio: None,
                    floor_ratio: None,
                    disturbed_rounds: 0,
                }
            })
            .collect();
        Report { disk: disk.into(), results, ..Report::default() }
    }

    const ONE: &[(&str, u64)] = &[("threads", 1)];
    const DEEP: &[(&str, u64)] = &[("threads", 1), ("depth", 64)];
    const SHALLOW: &[(&str, u64)] = &[("threads", 1), ("depth", 8)];

    fn of<'a>(all: &'a [Finding], part: &str) -> &'a Finding {
        all.iter().find(|f| f.what.contains(part)).unwrap_or_else(|| panic!("no {part}"))
    }

    #[test]
    fn the_best_depth_counts_and_ratios_are_taken_within_a_round() {
        let pass: &[f64] = &[100.0, 200.0];
        let all = findings(&report(
            "plain",
            &[
                ("xfs", "fsmark", "pass", ONE, "files_per_s", pass),
                ("xfs", "fsmark", "async", SHALLOW, "files_per_s", &[150.0, 300.0]),
                ("xfs", "fsmark", "async", DEEP, "files_per_s", &[400.0, 800.0]),
            ],
        ));
        let f = of(&all, "xfs: asynchronous fsync, files/s");
        assert_eq!(f.found, Some(Spread { median: 4.0, min: 4.0, max: 4.0 }));
        assert_eq!(f.holds(), Some(true));
        assert_eq!(of(&all, "ext4: asynchronous").holds(), None, "not in the report");
    }

    #[test]
    fn a_round_that_one_side_lacks_pairs_no_values_of_different_rounds() {
        let rows: [Figures<'_>; 2] = [
            ("xfs", "fsmark", "pass", ONE, "files_per_s", &[200.0, 400.0]),
            ("xfs", "fsmark", "async", DEEP, "files_per_s", &[400.0, 800.0, 1600.0]),
        ];
        let mut report = report("plain", &rows);
        // Its first round failed, and the machine gets twice as fast from round to round.
        report.results[0].missing_rounds = vec![1];
        let all = findings(&report);
        let found = of(&all, "xfs: asynchronous fsync, files/s").found;
        assert_eq!(found, Some(Spread { median: 4.0, min: 4.0, max: 4.0 }));
    }

    #[test]
    fn flushes_are_those_of_the_depth_that_is_best() {
        let all = findings(&report(
            "plain",
            &[
                ("xfs", "fsmark", "pass", ONE, "flushes_per_file", &[1.0]),
                ("xfs", "fsmark", "async", SHALLOW, "files_per_s", &[150.0]),
                ("xfs", "fsmark", "async", SHALLOW, "flushes_per_file", &[0.6]),
                ("xfs", "fsmark", "async", DEEP, "files_per_s", &[400.0]),
                ("xfs", "fsmark", "async", DEEP, "flushes_per_file", &[0.1]),
            ],
        ));
        let found = of(&all, "xfs: asynchronous fsync, flushes").found;
        assert_eq!(found.map(|s| s.median), Some(0.1));
    }

    #[test]
    fn what_few_tickets_hold_is_not_what_a_hundred_thousand_hold() {
        let judged = |tickets| {
            let rows: [Figures<'_>; 1] =
                [("weir", "tickets", "held", &[("tickets", tickets)], "held_mib", &[20.0])];
            of(&findings(&report("plain", &rows)), "100,000 tickets").holds()
        };
        assert_eq!((judged(100_000), judged(1000)), (Some(true), None));
    }

    #[test]
    fn a_case_that_failed_fails_the_claims() {
        let mut report = report("plain", &[]);
        report.not_offered.push(Skipped {
            experiment: "foundation".into(),
            target: "weir".into(),
            mode: "recovery".into(),
            params: crate::experiments::Params::new(),
            reason: "3 of 2000 synced files are gone".into(),
            failed: true,
        });
        let (text, failed) = render(&report, &[Kind::Truth, Kind::Claim]);
        assert!(failed && text.contains("3 of 2000"), "{text}");
        assert!(!render(&report, &[Kind::Truth]).1);
        report.not_offered[0].failed = false;
        assert!(!render(&report, &[Kind::Truth, Kind::Claim]).1, "a target may lack a mode");
    }

    #[test]
    fn a_slow_disk_asks_for_ten_times() {
        let rows: [Figures<'_>; 2] = [
            ("xfs", "fsmark", "pass", ONE, "files_per_s", &[100.0]),
            ("xfs", "fsmark", "async", DEEP, "files_per_s", &[900.0]),
        ];
        let holds = |disk| of(&findings(&report(disk, &rows)), "files/s over one by one").holds();
        assert_eq!(holds("plain"), Some(true));
        assert_eq!(holds("slow:500"), Some(true));
        assert_eq!(holds("slow:2000"), Some(false));
    }

    #[test]
    fn trickling_is_judged_only_where_one_big_fsync_hurts() {
        let judged = |end: f64, trickle: f64| {
            let modes = [("quiet", [100.0]), ("end", [end]), ("trickle", [trickle])];
            let rows = modes.each_ref().map(|(mode, rounds)| -> Figures<'_> {
                ("xfs", "checkpoint", mode, &[], "log_p999_us", rounds)
            });
            let report = report("plain", &rows);
            let (text, failed) = render(&report, &[Kind::Truth]);
            assert_eq!(text.contains("moot  truth  xfs: log_p99"), end < 300.0, "{text}");
            (of(&findings(&report), "xfs: log_p99").holds(), failed)
        };
        assert_eq!(judged(150.0, 200.0), (None, false));
        assert_eq!(judged(299.0, 900.0), (None, false));
        assert_eq!(judged(480.0, 200.0), (Some(true), false));
        assert_eq!(judged(300.0, 290.0), (Some(false), true));
    }

    #[test]
    fn a_claim_is_judged_against_the_best_kernel_file_system() {
        let rows: [Figures<'_>; 3] = [
            ("xfs", "fsync", "seq", &[("jobs", 1)], "mib_per_s", &[100.0]),
            ("ext4", "fsync", "seq", &[("jobs", 1)], "mib_per_s", &[150.0]),
            ("weir", "fsync", "seq", &[("jobs", 1)], "mib_per_s", &[240.0]),
        ];
        let report = report("plain", &rows);
        let all = findings(&report);
        let f = of(&all, "weir: fsync seq, jobs=1");
        assert!(f.what.ends_with("(best: ext4)"), "{}", f.what);
        assert_eq!(f.found.map(|s| s.median), Some(1.6));
        assert_eq!(f.holds(), Some(false));
        assert!(render(&report, &[Kind::Truth, Kind::Claim]).1, "a failing claim fails the gate");
        assert!(!render(&report, &[Kind::Truth]).1, "unless only truths are gated");
    }
}
