//! `PostgreSQL`: a server as it is shipped, with every commit durable, and `pgbench`'s simple update.

use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::process::{Said, Working, program};
use super::{Cost, Place, Work};
use crate::disk::{await_helper, start_helper};
use crate::error::{IoContext, LabError, LabResult};
use crate::measure::Recorder;
use crate::sys::is_root;

const MISSING: &str = "PostgreSQL is not installed; it is in the package 'postgresql'";
const PATIENCE: Duration = Duration::from_secs(60);
/// `nobody`: the server refuses to run as root.
const NOBODY: u32 = 65_534;
const PORT: &str = "5499";
const DATABASE: &str = "postgres";

/// The programs of the newest version that is installed.
fn programs() -> LabResult<PathBuf> {
    // Debian has them out of the way, so that versions can be side by side.
    let of_version = |dir: std::fs::DirEntry| {
        let version: f64 = dir.file_name().to_str()?.parse().ok()?;
        let bin = dir.path().join("bin");
        bin.join("pgbench").is_file().then_some((version, bin))
    };
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let newest = versions.filter_map(of_version).max_by(|a, b| a.0.total_cmp(&b.0));
    match newest {
        Some((_, bin)) => Ok(bin),
        None => Ok(program("initdb", MISSING)?.parent().map(Path::to_owned).unwrap_or_default()),
    }
}

/// How its programs are started.
struct Cluster<'a> {
    place: &'a Place<'a>,
    bin: PathBuf,
    data: PathBuf,
    /// For its socket, and for what `pgbench` logs.
    run: PathBuf,
}

/// Makes a directory that is the server's alone, whoever it runs as.
fn own_directory(dir: PathBuf) -> LabResult<PathBuf> {
    let making = || format!("making {} for a server", dir.display());
    std::fs::DirBuilder::new().mode(0o700).create(&dir).during(making)?;
    if is_root() {
        std::os::unix::fs::chown(&dir, Some(NOBODY), Some(NOBODY)).during(making)?;
    }
    Ok(dir)
}

impl Cluster<'_> {
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.bin.join(program));
        command.env("LC_ALL", "C").env("PGHOST", &self.run).env("PGPORT", PORT);
        command.current_dir(&self.run).stdin(Stdio::null());
        if is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        command
    }

    fn run(&self, name: &'static str, command: &mut Command) -> LabResult<Said> {
        Working::start(name, command)?.finish(self.place.env.cancel)
    }

    /// Makes a cluster of databases with a superuser named after nobody in particular.
    fn create(&self) -> LabResult<()> {
        let mut initdb = self.command("initdb");
        initdb.arg("-D").arg(&self.data).args(["-U", DATABASE, "--auth=trust", "--no-sync"]);
        self.run("initdb", &mut initdb).map(drop)
    }

    /// Starts the server and waits until it answers.
    fn start(&self) -> LabResult<()> {
        let log = self.place.aside.join("postgres.log");
        let said = std::fs::File::create(&log).during(|| format!("creating {}", log.display()))?;
        let mut server = self.command("postgres");
        server.arg("-D").arg(&self.data).arg("-k").arg(&self.run).args(["-p", PORT]);
        server.args(["-c", "listen_addresses=", "-c", "shared_buffers=64MB"]);
        server.process_group(0).stdout(Stdio::null()).stderr(said);
        let pid = start_helper(&mut server, self.place.env.registry)?;
        let answers = || {
            let mut ready = self.command("pg_isready");
            let status = ready.stdout(Stdio::null()).stderr(Stdio::null()).status();
            status.is_ok_and(|s| s.success()).then_some(())
        };
        await_helper(pid, PATIENCE, answers).ok_or_else(|| {
            let text = std::fs::read_to_string(&log).unwrap_or_default();
            let message = text.lines().next_back().unwrap_or("it does not answer").to_owned();
            LabError::Command { command: "postgres".to_owned(), message }
        })
    }

    fn pgbench(&self) -> Command {
        let mut command = self.command("pgbench");
        command.args(["-U", DATABASE]);
        command
    }

    /// Updates until the time is over. Each transaction is logged by `pgbench`, in files whose names begin with `log`.
    fn update(&self, log: &Path) -> LabResult<Said> {
        let mut load = self.pgbench();
        load.args(["-N", "-n", "-M", "prepared", "-l"])
            .arg(format!("--log-prefix={}", log.display()));
        load.arg("-c").arg(self.place.clients.to_string());
        load.arg("-T").arg(self.place.time.as_secs().max(1).to_string()).arg(DATABASE);
        self.run("pgbench", &mut load)
    }
}

/// Updates until the time is over.
pub fn work(place: &Place<'_>) -> LabResult<Work> {
    let bin = programs()?;
    let data = own_directory(place.dir.join("data"))?;
    let cluster = Cluster { place, bin, data, run: own_directory(place.aside.join("run"))? };
    cluster.create()?;
    cluster.start()?;
    let scale: u64 = place.size.pick(1, 5, 10);
    let mut fill = cluster.pgbench();
    fill.args(["-i", "-q", "-s"]).arg(scale.to_string()).arg(DATABASE);
    cluster.run("pgbench -i", &mut fill)?;
    // What filling has left to write is not the load's.
    place.env.fs.syncfs()?;
    let log = cluster.run.join("pgbench");
    let cost = Cost::start(place.env);
    let said = cluster.update(&log)?;
    let spent = cost.stop(place.env);
    let latencies = logged(&log)?;
    let (transactions, took) = done(&said.out).ok_or_else(|| LabError::Command {
        command: "pgbench".to_owned(),
        message: "it does not say how many transactions it did".to_owned(),
    })?;
    Ok(Work::of_values(transactions, took, Some(latencies), spent))
}

/// How many transactions it did, and in what time: its rate leaves out how long connecting took.
fn done(out: &str) -> Option<(u64, Duration)> {
    let after = |head: &str| out.lines().rev().find_map(|l| l.trim().strip_prefix(head));
    let count = after("number of transactions actually processed:")?.trim();
    let count: u64 = count.split('/').next()?.trim().parse().ok()?;
    let rate: f64 = after("tps =")?.split_whitespace().next()?.parse().ok()?;
    Some((count, Duration::try_from_secs_f64(count as f64 / rate).ok()?))
}

/// How long each transaction took: the third word of each line, in microseconds.
fn logged(prefix: &Path) -> LabResult<Recorder> {
    let mut recorder = Recorder::new(Instant::now());
    let reading = || format!("reading what pgbench logged at {}", prefix.display());
    let dir = prefix.parent().unwrap_or(Path::new("."));
    let name = prefix.file_name().unwrap_or_default().to_string_lossy().into_owned();
    for entry in std::fs::read_dir(dir).during(reading)? {
        let entry = entry.during(reading)?;
        if !entry.file_name().to_string_lossy().starts_with(&format!("{name}.")) {
            continue;
        }
        let text = std::fs::read_to_string(entry.path()).during(reading)?;
        for us in text.lines().filter_map(|l| l.split(' ').nth(2)?.parse::<u64>().ok()) {
            recorder.record_ns(us * 1000);
        }
    }
    Ok(recorder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_pgbench_says_is_understood() {
        let out = "transaction type: <builtin: simple update>\nscaling factor: 10\n\
                   number of transactions actually processed: 3000\nlatency average = 1.0 ms\n\
                   tps = 1500.000000 (without initial connection time)\n";
        assert_eq!(done(out), Some((3000, Duration::from_secs(2))));
        let of_count = "number of transactions actually processed: 10/10\ntps = 5.0 (x)\n";
        assert_eq!(done(of_count), Some((10, Duration::from_secs(2))));
        assert_eq!(done("connection to server failed\n"), None);
        let none = "number of transactions actually processed: 0\ntps = 0.000000 (x)\n";
        assert_eq!(done(none), None, "no rate, no time");
    }
}
