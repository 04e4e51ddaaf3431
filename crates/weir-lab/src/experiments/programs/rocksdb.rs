//! `RocksDB`: `db_bench` puts values one by one, each synced; its threads share one log.

use std::process::{Command, Stdio};
use std::time::Duration;

use super::process::{Working, program};
use super::{Cost, Place, VALUE_BYTES, Work};
use crate::error::{LabError, LabResult};

const MISSING: &str = "db_bench is not installed; it is in the package 'rocksdb-tools'";

/// So many thousands of puts at most, which no time is enough for: the time ends it.
const NEVER_DONE: u64 = 1_000_000_000;

/// Puts until the time is over.
pub fn work(place: &Place<'_>) -> LabResult<Work> {
    let tool = program("db_bench", MISSING)?;
    let mut command = Command::new(tool);
    command.args(["--benchmarks=fillsync", "--sync=1", "--compression_type=none"]);
    command.arg(format!("--db={}", place.dir.display()));
    command.arg(format!("--wal_dir={}", place.dir.display()));
    command.arg(format!("--threads={}", place.clients));
    command.arg(format!("--num={NEVER_DONE}"));
    command.arg(format!("--value_size={VALUE_BYTES}"));
    command.arg(format!("--duration={}", place.time.as_secs().max(1)));
    let cost = Cost::start(place.env);
    let said =
        Working::start("db_bench", command.stdin(Stdio::null()))?.finish(place.env.cancel)?;
    let spent = cost.stop(place.env);
    let (transactions, took) = done(&said.out).ok_or_else(|| LabError::Command {
        command: "db_bench".to_owned(),
        message: "no line that says how many puts it did".to_owned(),
    })?;
    Ok(Work::of_values(transactions, took, None, spent))
}

/// How many puts it did, and in what time: of `fillsync : 583.2 micros/op 1714 ops/sec 2.000 seconds 3430 operations; ...`.
fn done(out: &str) -> Option<(u64, Duration)> {
    let line = out.lines().find(|l| l.starts_with("fillsync"))?;
    let words: Vec<&str> = line.split_whitespace().collect();
    let before = |unit: &str| {
        let at = words.iter().position(|w| w.trim_end_matches(';') == unit)?;
        words.get(at.checked_sub(1)?).copied()
    };
    let puts: u64 = before("operations")?.parse().ok()?;
    let seconds: f64 = before("seconds")?.parse().ok().filter(|s| *s > 0.0)?;
    Some((puts, Duration::try_from_secs_f64(seconds).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_program_says_is_understood() {
        let out = "RocksDB: version 7.8.3\n------\n\
                   fillsync     :     583.2 micros/op 1714 ops/sec 2.500 seconds 3430 operations;    0.7 MB/s\n";
        assert_eq!(done(out), Some((3430, Duration::from_millis(2500))));
        assert_eq!(done("put error: IO error: No space left on device\n"), None);
    }
}
