//! Processes that put load on a file system: found, fed, watched, and never left behind.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::error::{IoContext, LabError, LabResult};
use crate::run::Cancel;
use crate::target::stage::find_tool;

/// How often a process that works is looked at.
const LOOK: Duration = Duration::from_millis(10);

/// Where a program is; `or_else` says that it is not installed, and what would install it.
pub fn program(tool: &str, or_else: &'static str) -> LabResult<PathBuf> {
    find_tool(tool).ok_or(LabError::NotOffered(or_else))
}

/// A process that is killed if nobody waits for it to end.
pub struct Working {
    child: Child,
    name: &'static str,
}

impl Drop for Working {
    fn drop(&mut self) {
        // It may have ended; then there is nothing to kill.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a process said.
pub struct Said {
    pub out: String,
    pub err: String,
}

impl Working {
    /// Starts a process in a group of its own: Ctrl-C reaches only the lab, which then ends it.
    pub fn start(name: &'static str, command: &mut Command) -> LabResult<Self> {
        use std::os::unix::process::CommandExt;
        command.process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().during(|| format!("running {name}"))?;
        Ok(Working { child, name })
    }

    /// Its standard input, once.
    pub fn input(&mut self) -> Option<std::process::ChildStdin> {
        self.child.stdin.take()
    }

    /// Waits for it to end.
    ///
    /// # Errors
    /// What it said, when it failed; [`LabError::Cancelled`], and then it is killed.
    pub fn finish(mut self, cancel: &Cancel) -> LabResult<Said> {
        let (mut out, mut err) = (self.child.stdout.take(), self.child.stderr.take());
        std::thread::scope(|scope| {
            let out = scope.spawn(|| all_of(out.as_mut()));
            let err = scope.spawn(|| all_of(err.as_mut()));
            let ended = self.wait(cancel);
            if ended.is_err() {
                // The readers wait for its end.
                let _ = self.child.kill();
            }
            let said =
                Said { out: out.join().unwrap_or_default(), err: err.join().unwrap_or_default() };
            if ended?.success() { Ok(said) } else { Err(self.failed(&said)) }
        })
    }

    fn wait(&mut self, cancel: &Cancel) -> LabResult<std::process::ExitStatus> {
        loop {
            cancel.check()?;
            if let Some(status) =
                self.child.try_wait().during(|| format!("waiting for {}", self.name))?
            {
                return Ok(status);
            }
            std::thread::sleep(LOOK);
        }
    }

    fn failed(&self, said: &Said) -> LabError {
        let text = if said.err.trim().is_empty() { &said.out } else { &said.err };
        let last = text.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or("it failed");
        LabError::Command { command: self.name.to_owned(), message: last.trim().to_owned() }
    }
}

fn all_of(pipe: Option<&mut impl Read>) -> String {
    let mut bytes = Vec::new();
    // What could be read is what there is to tell.
    let _ = pipe.map(|pipe| pipe.read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_fails_is_told_by_what_it_said_last() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo out; echo first >&2; echo the reason >&2; exit 3"]);
        let ended = Working::start("sh", &mut command).and_then(|w| w.finish(&Cancel::default()));
        let error = ended.map(|said| said.out).expect_err("it failed");
        assert!(error.to_string().contains("the reason"), "{error}");
    }

    #[test]
    fn a_process_ends_when_the_run_is_cancelled() {
        let cancel = Cancel::default();
        cancel.cancel();
        let mut command = Command::new("sleep");
        command.arg("1000");
        let working = Working::start("sleep", &mut command).expect("there is a sleep");
        let pid = working.child.id();
        assert!(matches!(working.finish(&cancel), Err(LabError::Cancelled)));
        assert!(crate::disk::registry::start_ticks(pid).is_none(), "it is gone");
    }
}
