//! Redis: a server that syncs its append-only file before it answers, and clients that set values over a socket.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::process::program;
use super::{Cost, Place, VALUE_BYTES, Work};
use crate::disk::{await_helper, start_helper};
use crate::error::{IoContext, LabError, LabResult};
use crate::experiments::load::{merged, random_bytes, together};
use crate::measure::{Recorder, Rng};

const MISSING: &str = "redis-server is not installed; it is in the package 'redis-server'";
const PATIENCE: Duration = Duration::from_secs(20);
/// Keys of all clients.
const KEYS: u64 = 10_000;

/// Sets values until the time is over.
pub fn work(place: &Place<'_>) -> LabResult<Work> {
    let tool = program("redis-server", MISSING)?;
    let socket = place.aside.join("redis.sock");
    let log = place.aside.join("redis.log");
    let mut command = Command::new(tool);
    command.args(["--port", "0", "--save", "", "--appendonly", "yes", "--appendfsync", "always"]);
    // Rewriting the file would be another load.
    command.args(["--auto-aof-rewrite-percentage", "0"]);
    command.arg("--unixsocket").arg(&socket).arg("--logfile").arg(&log);
    command.arg("--dir").arg(&place.dir);
    {
        use std::os::unix::process::CommandExt;
        command.process_group(0);
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let pid = start_helper(&mut command, place.env.registry)?;
    let answers = || Client::connect(&socket).ok()?.ask(b"*1\r\n$4\r\nPING\r\n").ok();
    if await_helper(pid, PATIENCE, answers).is_none() {
        let said = std::fs::read_to_string(&log).unwrap_or_default();
        let message = said.lines().next_back().unwrap_or("it does not answer").to_owned();
        return Err(LabError::Command { command: "redis-server".to_owned(), message });
    }
    let value = random_bytes(VALUE_BYTES, place.env.seed);
    let cost = Cost::start(place.env);
    let (recorders, took) = together(place.clients, |n, begun| {
        let mut client = Client::connect(&socket).during(|| "connecting to redis-server".into())?;
        let mut rng = Rng::new(place.env.seed, n);
        let mut sets = Recorder::new(begun);
        while begun.elapsed() < place.time {
            place.env.cancel.check()?;
            let request = set(rng.below(KEYS), &value);
            let from = Instant::now();
            client.ask(&request).during(|| "setting a value".into())?;
            sets.since(from);
        }
        Ok(sets)
    })?;
    let spent = cost.stop(place.env);
    let latencies = merged(recorders, Instant::now());
    Ok(Work::of_values(latencies.count(), took, Some(latencies), spent))
}

/// The request to set a key, as the protocol has it.
fn set(key: u64, value: &[u8]) -> Vec<u8> {
    let key = format!("key:{key:08}");
    let mut request = format!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n${}\r\n", key.len(), value.len());
    request.reserve(value.len() + 2);
    let mut request = request.into_bytes();
    request.extend_from_slice(value);
    request.extend_from_slice(b"\r\n");
    request
}

/// A connection.
struct Client {
    to: UnixStream,
    from: BufReader<UnixStream>,
}

impl Client {
    fn connect(socket: &std::path::Path) -> std::io::Result<Self> {
        let to = UnixStream::connect(socket)?;
        let from = BufReader::new(to.try_clone()?);
        Ok(Client { to, from })
    }

    /// Asks, and waits for an answer that says that it is done.
    fn ask(&mut self, request: &[u8]) -> std::io::Result<()> {
        self.to.write_all(request)?;
        let mut answer = String::new();
        self.from.read_line(&mut answer)?;
        if answer.starts_with('+') {
            return Ok(());
        }
        Err(std::io::Error::other(format!("redis-server says '{}'", answer.trim())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_says_how_long_its_parts_are() {
        let text = String::from_utf8(set(7, b"abc")).expect("text");
        assert_eq!(text, "*3\r\n$3\r\nSET\r\n$12\r\nkey:00000007\r\n$3\r\nabc\r\n");
    }
}
