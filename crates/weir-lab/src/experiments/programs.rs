//! programs: what programs that sync all the time make of a file system.
//!
//! Each does small transactions for a while and says how many it could; all are set up to have every one durable before it counts.
//! *sqlite-wal*, *sqlite-delete*: single inserts, each client a process with a database of its own; *sqlite-delete-apart*: and a directory of
//! its own, since through FUSE who syncs a directory keeps others out of it. *postgres*: `pgbench`'s simple update.
//! *redis*: `SET` with the append-only file synced each time. *rocksdb*: `db_bench`'s synced puts, whose threads share a log.
//! *dpkg*: packages of ten small files installed, each client into a root of its own.
//!
//! They work on a mount, so in a directory, and need not be installed: one that is not is reported as not offered. Servers are noted in
//! the registry, so that nothing is left of them whatever becomes of the lab.

mod dpkg;
mod postgres;
mod process;
mod redis;
mod rocksdb;
mod sqlite;

use std::path::PathBuf;
use std::time::Duration;

use super::{Better, Case, CaseResult, Cost, Env, Experiment, Size, Spent};
use crate::error::{LabError, LabResult};
use crate::measure::Recorder;

/// Options.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ProgramsOptions {
    /// Numbers of clients [default: 1, 4, 16; quick: 1, 4]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=256), value_delimiter = ',')]
    pub clients: Vec<u64>,
    /// Seconds per case [default: 5, medium: 2, quick: 1]
    #[arg(long, value_parser = super::seconds)]
    pub seconds: Option<f64>,
}

/// The experiment.
pub struct Programs {
    clients: Vec<u64>,
    time: Duration,
    size: Size,
}

/// What a client of a database stores with each transaction.
const VALUE_BYTES: usize = 400;
const ROOT: &str = "programs";
/// Each a program, or a way to use one.
pub const MODES: [&str; 7] =
    ["sqlite-wal", "sqlite-delete", "sqlite-delete-apart", "postgres", "redis", "rocksdb", "dpkg"];

/// What a program has to work with.
struct Place<'a> {
    env: &'a Env<'a>,
    /// For what it stores: an empty directory of the target.
    dir: PathBuf,
    /// For its socket and what it says: an empty directory elsewhere, which is the lab's.
    aside: PathBuf,
    clients: u64,
    time: Duration,
    size: Size,
}

/// What a program has done.
struct Work {
    transactions: u64,
    /// How long it took.
    took: Duration,
    /// How long each took, where that can be known.
    latencies: Option<Recorder>,
    /// What was to be stored.
    stored_bytes: u64,
    spent: Spent,
}

impl Work {
    /// Of a database.
    fn of_values(
        transactions: u64,
        took: Duration,
        latencies: Option<Recorder>,
        spent: Spent,
    ) -> Self {
        let stored_bytes = transactions * VALUE_BYTES as u64;
        Work { transactions, took, latencies, stored_bytes, spent }
    }
}

impl Programs {
    /// With options.
    pub fn new(o: &ProgramsOptions, size: Size) -> Self {
        let default = size.pick(&[1, 4][..], &[1, 4, 16], &[1, 4, 16]);
        let seconds = o.seconds.unwrap_or(size.pick(1.0, 2.0, 5.0));
        Programs {
            clients: if o.clients.is_empty() { default.to_vec() } else { o.clients.clone() },
            time: Duration::from_secs_f64(seconds.clamp(0.1, 3600.0)),
            size,
        }
    }
}

/// Has the program of `mode` work.
fn work(place: &Place<'_>, mode: &str) -> LabResult<Work> {
    match mode {
        "sqlite-wal" => sqlite::work(place, "wal", sqlite::Where::Together),
        "sqlite-delete" => sqlite::work(place, "delete", sqlite::Where::Together),
        "sqlite-delete-apart" => sqlite::work(place, "delete", sqlite::Where::Apart),
        "postgres" => postgres::work(place),
        "redis" => redis::work(place),
        "dpkg" => dpkg::work(place),
        _ => rocksdb::work(place),
    }
}

/// Takes away what was noted after a mark: servers, then the directory of their sockets.
struct Until<'a> {
    env: &'a Env<'a>,
    mark: usize,
}

impl Drop for Until<'_> {
    fn drop(&mut self) {
        for stuck in self.env.registry.release_to(self.mark) {
            crate::tell!("weir lab: left behind: {stuck}");
        }
    }
}

impl Experiment for Programs {
    fn name(&self) -> &'static str {
        "programs"
    }

    fn question(&self) -> &'static str {
        "How many durable transactions do SQLite, PostgreSQL, Redis, RocksDB and dpkg manage?"
    }

    fn base_mode(&self) -> &'static str {
        // What one program does says nothing about another.
        ""
    }

    fn cases(&self) -> Vec<Case> {
        let with_clients =
            |mode| self.clients.iter().map(move |&n| Case::new(mode).with("clients", n));
        MODES.into_iter().flat_map(with_clients).collect()
    }

    fn run(&self, env: &Env<'_>, case: &Case) -> LabResult<CaseResult> {
        let Some(root) = env.fs.mounted_at() else {
            return Err(LabError::NotOffered("programs need a mount"));
        };
        let inside = format!("{ROOT}/{}-{}", case.mode, case.number("clients"));
        let until = Until { env, mark: env.registry.mark() };
        // Short: it is where sockets are.
        let aside = std::env::temp_dir().join(format!("weir-programs-{}", std::process::id()));
        env.registry.make_dir(&aside)?;
        env.fs.remove_tree(&inside)?;
        env.fs.mkdir_all(&inside)?;
        let place = Place {
            env,
            dir: root.join(&inside),
            aside,
            clients: case.number("clients"),
            time: self.time,
            size: self.size,
        };
        let worked = work(&place, &case.mode);
        // Its servers end before what they work on goes.
        drop(until);
        let work = worked?;
        env.fs.remove_tree(&inside)?;
        let mut result = CaseResult::default();
        let rate = work.transactions as f64 / work.took.as_secs_f64();
        result.metric("transactions_per_s", "1/s", rate, Better::Higher);
        result.cost_per("transaction", work.spent, work.transactions, work.stored_bytes);
        if let Some(latencies) = work.latencies {
            result.latency("transaction", latencies);
        }
        Ok(result)
    }

    fn space_bytes(&self) -> u64 {
        self.size.pick(512 << 20, 1 << 30, 2 << 30)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_program_runs_with_each_number_of_clients() {
        let options = ProgramsOptions { clients: vec![2, 8], seconds: None };
        let cases = Programs::new(&options, Size::Quick).cases();
        let labels: Vec<String> = cases.iter().map(Case::label).collect();
        assert_eq!(labels.len(), MODES.len() * 2);
        assert_eq!(labels[..2], ["sqlite-wal clients=2", "sqlite-wal clients=8"]);
    }
}
