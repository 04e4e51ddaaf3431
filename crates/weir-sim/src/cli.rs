//! The command line: arguments, and the report as text or JSON. `weir sim` embeds it.

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;

use crate::explore::Failure;
use crate::{SimOptions, SimReport, Workload, run};

/// Arguments of the simulator.
#[derive(Debug, Clone, clap::Parser)]
#[command(name = "weir-sim", about = "Finds out whether a volume survives crashes, by trying")]
pub struct Arguments {
    /// What to run.
    #[command(flatten)]
    pub run: RunArguments,
}

/// What to run.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Exit codes: 0 nothing was found, 1 something was, 2 wrong usage\n\n\
        Examples:\n  \
        weir sim --states 10000\n  \
        weir sim --seed 7 --workload random --time 60\n  \
        weir sim --seed 7 --workload random --case 3   # a finding again, as its report says")]
pub struct RunArguments {
    /// Draws everything; the same seed gives the same result.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Stop after this many crash states: at the end of the round of at least 4 cases that reaches
    /// them. The result does not depend on the number of threads.
    #[arg(long, default_value_t = 100_000)]
    pub states: u64,
    /// Stop after this many seconds.
    #[arg(long, value_name = "SECONDS")]
    pub time: Option<u64>,
    /// Which workloads.
    #[arg(long, value_enum, default_value_t = Workload::All)]
    pub workload: Workload,
    /// Run only the case with this number: what a finding tells to type.
    #[arg(long)]
    pub case: Option<u64>,
    /// Switch a seeded bug of the engine on (needs a build with the feature `mutations`).
    #[arg(long, value_name = "NAME")]
    pub mutation: Option<String>,
    /// Worker threads; the result does not depend on their number.
    #[arg(long, default_value_t = 2)]
    pub threads: usize,
    /// Print the whole trace of device calls of a finding, not only its end.
    #[arg(long)]
    pub trace: bool,
    /// Do not look for a shorter workload when something is found.
    #[arg(long)]
    pub no_shrink: bool,
    /// Print the report as JSON.
    #[arg(long)]
    pub json: bool,
}

impl RunArguments {
    fn options(&self) -> SimOptions {
        SimOptions {
            seed: self.seed,
            states: self.states,
            time: self.time.map(Duration::from_secs),
            workload: self.workload,
            case: self.case,
            mutation: self.mutation.clone(),
            threads: self.threads,
            shrink: !self.no_shrink,
            progress: !self.json,
            hang: Some(Duration::from_secs(120)),
            ..SimOptions::default()
        }
    }
}

/// Runs and prints. Success: nothing was found.
pub fn main(arguments: &Arguments) -> ExitCode {
    let arguments = &arguments.run;
    if let Some(name) = &arguments.mutation
        && !crate::mutation::names().contains(&name.as_str())
    {
        let known = crate::mutation::names();
        if known.is_empty() {
            eprintln!("weir-sim: --mutation needs a build with `--features mutations`");
        } else {
            eprintln!("weir-sim: no mutation {name:?}; there are: {}", known.join(", "));
        }
        return ExitCode::from(2);
    }
    let report = run(&arguments.options());
    let shown = if arguments.json {
        serde_json::to_string_pretty(&report).map(|text| text + "\n").map_err(io::Error::from)
    } else {
        Ok(text(&report, arguments.trace))
    };
    let mut out = io::stdout().lock();
    let printed = shown.and_then(|text| out.write_all(text.as_bytes()).and_then(|()| out.flush()));
    match printed {
        // Who has read enough of it is no error.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            eprintln!("weir-sim: standard output: {error}");
            ExitCode::FAILURE
        }
        _ if report.finding.is_some() => ExitCode::FAILURE,
        _ => ExitCode::SUCCESS,
    }
}

/// The report as text.
pub fn text(report: &SimReport, whole_trace: bool) -> String {
    let mut lines = Vec::new();
    if let Some(finding) = &report.finding {
        lines.push(format!(
            "FOUND in case {} ({}), after {} crash states",
            finding.case, finding.name, finding.after_states
        ));
        failure_text(&finding.failure, whole_trace, &mut lines);
        if let Some(shrunk) = &finding.shrunk {
            lines.push("shortest workload found that fails:".to_owned());
            failure_text(shrunk, whole_trace, &mut lines);
        }
        lines.push(format!("replay: {}", finding.replay));
    }
    lines.push(format!(
        "{} crash states in {} {} ({} during recovery, {} after a recovery; {} duplicates skipped), \
         {} operations ({} of them amid others, {} refused; {} frames beside the one before), \
         {} faults ({} of them amid others)",
        report.states,
        report.cases,
        if report.cases == 1 { "case" } else { "cases" },
        report.recovery_states,
        report.later_states,
        report.duplicates,
        report.operations,
        report.overlapped,
        report.refused,
        report.joined,
        report.faults,
        report.faults_amid,
    ));
    lines.push(format!(
        "{:.1} s, {:.0} crash states per second, seed {}: {}",
        report.seconds,
        report.states_per_second,
        report.seed,
        if report.finding.is_some() { "FAILED" } else { "all green" },
    ));
    lines.join("\n") + "\n"
}

fn failure_text(failure: &Failure, whole_trace: bool, lines: &mut Vec<String>) {
    lines.push(format!("  {}", failure.summary));
    lines.extend(failure.details.iter().map(|line| format!("  {line}")));
    lines.push("  operations:".to_owned());
    lines.extend(failure.operations.iter().map(|line| format!("    {line}")));
    let traces =
        [("the workload", &failure.workload_trace), ("the session that broke", &failure.trace)];
    for (session, trace) in traces.into_iter().filter(|(_, trace)| !trace.is_empty()) {
        lines.push(format!("  last device calls of {session}:"));
        let shown = if whole_trace { trace.len() } else { 20 };
        let skipped = trace.len().saturating_sub(shown);
        lines.extend(trace.iter().skip(skipped).map(|line| format!("    {line}")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::toy::{Toy, ToyBug};
    use clap::Parser;

    #[test]
    fn the_report_of_a_finding_names_operations_crash_and_replay_command() {
        let arguments = Arguments::parse_from(["weir-sim", "--workload", "random", "--seed", "7"]);
        let options = SimOptions { progress: false, ..arguments.run.options() };
        let report = crate::run_on(&Toy::new(ToyBug::AcknowledgeBeforeFlush), &options);
        let text = text(&report, false);
        for part in [
            "mkdir /w0",
            "pending",
            "is lost",
            "replay: weir-sim --seed 7 --workload random --case",
            "FAILED",
        ] {
            assert!(text.contains(part), "{part:?} is missing in\n{text}");
        }
    }
}
