//! A mount whose server is stopped: who asks hears so, and from whom, and can end it himself.
#![allow(missing_docs)]

mod common;

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use common::{Bench, SIGINT, SIGTERM, Server, done, eventually};

const SIGSTOP: i32 = 19;
const SIGCONT: i32 = 18;

fn begun(arguments: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_weir"))
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// A server that goes on when it is dropped: else nothing of it could be taken off.
struct Stopped(Server);

impl Stopped {
    fn new(server: Server) -> Self {
        server.signal(SIGSTOP);
        Self(server)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        self.0.signal(SIGCONT);
    }
}

/// How a program ends that may have hung.
fn end(child: &mut Child) -> ExitStatus {
    let mut status = None;
    eventually("an answer", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap()
}

#[test]
fn who_asks_a_mount_whose_server_is_stopped_hears_which_process_to_let_go_on() {
    for transport in ["io_uring", "no_io_uring"] {
        let Some(bench) = Bench::new() else { return };
        let stopped = Stopped::new(bench.foreground_with(&["-o", transport]));
        let pid = stopped.0.0.id();
        let (volume, dir) = (bench.volume(), bench.dir());
        let below = format!("{dir}/none");
        let mut asking = [
            begun(&["info", &volume]),
            begun(&["stat", &volume]),
            begun(&["stat", "--json", &dir]),
            begun(&["stat", "--watch", &dir]),
            begun(&["info", &below]),
        ];
        for child in &mut asking {
            assert_eq!(end(child).code(), Some(1));
            let mut said = String::new();
            child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
            assert_eq!(said.lines().count(), 1, "{said}");
            let remedy = format!("kill -CONT {pid}");
            assert!(said.contains(&remedy) && said.contains(&dir), "{said}");
        }
        drop(stopped);
        // It goes on as if nothing had been asked.
        assert!(done(&["info", &volume]).contains(&format!("mounted at {dir}")));
        bench.unmount();
    }
}

#[test]
fn who_watches_a_mount_whose_server_is_stopped_can_end_that() {
    let Some(bench) = Bench::new() else { return };
    let server = bench.foreground();
    let mut watching = begun(&["stat", "--watch", &bench.dir()]);
    let mut lines = BufReader::new(watching.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().starts_with("--- ")), "a first report");
    let stopped = Stopped::new(server);
    let pid = Pid::from_raw(watching.id() as i32).unwrap();
    kill_process(pid, Signal::from_named_raw(SIGINT).unwrap()).unwrap();
    assert_eq!(end(&mut watching).code(), Some(0));
    stopped.0.signal(SIGTERM);
    drop(stopped);
    eventually("unmounted", || !bench.is_mounted());
}
