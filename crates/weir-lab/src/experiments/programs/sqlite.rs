//! `SQLite`: each client is a `sqlite3` with a database of its own that inserts row after row.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

use super::process::{Working, program};
use super::{Cost, Place, VALUE_BYTES, Work};
use crate::error::{IoContext, LabError, LabResult};
use crate::experiments::load::{random_bytes, together};

const MISSING: &str = "sqlite3 is not installed; it is in the package 'sqlite3'";

/// Where the clients' databases are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Where {
    /// In one directory.
    Together,
    /// Each in a directory of its own.
    Apart,
}

/// Inserts until the time is over. `journal` is the program's word for how it keeps a transaction whole.
pub fn work(place: &Place<'_>, journal: &str, databases: Where) -> LabResult<Work> {
    let tool = program("sqlite3", MISSING)?;
    let started: Vec<Working> = (0..place.clients)
        .map(|n| {
            let mut dir = place.dir.clone();
            if databases == Where::Apart {
                dir.push(n.to_string());
                std::fs::create_dir(&dir).during(|| format!("making {}", dir.display()))?;
            }
            let mut command = Command::new(&tool);
            command.args(["-batch", "-bail"]).arg(dir.join(format!("{n}.db")));
            Working::start("sqlite3", command.stdin(Stdio::piped()))
        })
        .collect::<LabResult<_>>()?;
    let clients: Vec<std::sync::Mutex<Option<Working>>> =
        started.into_iter().map(|w| std::sync::Mutex::new(Some(w))).collect();
    let cost = Cost::start(place.env);
    let (counts, took) = together(place.clients, |n, begun| {
        let mine = &clients[n as usize];
        let taken = mine.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        let Some(client) = taken else { return Ok(0) };
        feed(place, client, journal, begun)
    })?;
    let spent = cost.stop(place.env);
    Ok(Work::of_values(counts.iter().sum(), took, None, spent))
}

/// Feeds one client from `begun` on; answers how many rows it has stored.
fn feed(
    place: &Place<'_>,
    mut client: Working,
    journal: &str,
    begun: std::time::Instant,
) -> LabResult<u64> {
    let mut value = String::new();
    for byte in random_bytes(VALUE_BYTES, place.env.seed) {
        let _ = write!(value, "{byte:02x}");
    }
    let insert = format!("INSERT INTO t(v) VALUES(x'{value}');\n");
    let mut fed = 0;
    let mut feed_all = |mut pipe: std::process::ChildStdin| -> LabResult<()> {
        // What waits in the pipe when the time is over is done all the same: it should be little.
        rustix::pipe::fcntl_setpipe_size(&pipe, 4096).map_err(std::io::Error::from)?;
        let feeding = || "feeding sqlite3".into();
        let head = format!(
            "PRAGMA journal_mode={journal};\nPRAGMA synchronous=FULL;\n\
             CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB);\n"
        );
        pipe.write_all(head.as_bytes()).during(feeding)?;
        while begun.elapsed() < place.time {
            place.env.cancel.check()?;
            pipe.write_all(insert.as_bytes()).during(feeding)?;
            fed += 1;
        }
        pipe.write_all(b"SELECT count(*) FROM t;\n").during(feeding)
    };
    let fed_all = client.input().map_or(Ok(()), &mut feed_all);
    if matches!(fed_all, Err(LabError::Cancelled)) {
        return Err(LabError::Cancelled);
    }
    // Where it failed, its own words say more than the broken pipe.
    let said = client.finish(place.env.cancel)?;
    fed_all?;
    check(&said.out, journal, fed)?;
    Ok(fed)
}

/// Whether it has said what it should: the journal that it uses, and how many rows there are.
fn check(out: &str, journal: &str, fed: u64) -> LabResult<()> {
    let mut lines = out.lines();
    let (used, rows) = (lines.next().unwrap_or(""), lines.next_back().unwrap_or(""));
    if used == journal && rows.parse() == Ok(fed) {
        return Ok(());
    }
    let message =
        format!("journal '{used}' in place of '{journal}', {rows} rows in place of {fed}");
    Err(LabError::Command { command: "sqlite3".to_owned(), message })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_are_not_there_are_no_transactions() {
        assert!(check("wal\n12\n", "wal", 12).is_ok());
        assert!(check("wal\n11\n", "wal", 12).is_err());
        assert!(check("delete\n12\n", "wal", 12).is_err(), "it keeps no log here");
        assert!(check("", "wal", 0).is_err());
    }
}
