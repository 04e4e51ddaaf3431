//! Whether the server of a mount answers, which a process finds out that can be left behind.
//!
//! Who asks a file system whose server is stopped, or hangs, waits in the kernel, and cannot always be killed there: not before the server goes on,
//! or is gone. So somebody else asks first, for whom nobody waits longer than [`PATIENCE`]; where there is no answer the mount is not asked
//! anything. (A server may still stop between that answer and what it is asked next.)

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use weir_mount::servers::{self, Server};

use crate::failure::{Failure, Outcome};
use crate::open::mount_entry_above;

/// What the process that asks is called.
const NAME: &str = "weir-asks";
/// How long an answer is waited for that takes a server no look at its disk.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two looks whether there is one.
const PAUSE: Duration = Duration::from_millis(1);

/// Whether the process that was started as `name` is to ask.
pub fn is_meant(name: Option<&OsStr>) -> bool {
    name == Some(OsStr::new(NAME))
}

/// The process that asks. Whatever the answer is, it is one.
pub fn main(dir: Option<OsString>) -> ExitCode {
    if let Some(dir) = dir {
        let _ = rustix::fs::statvfs(Path::new(&dir));
    }
    ExitCode::SUCCESS
}

/// Refuses `path` on a mount whose server does not answer.
pub fn check_answers(path: &Path) -> Outcome {
    check_unless(path, path, || false)
}

/// As [`check_answers`], of the mount that `dir` is on, until `is_ended`. `path` is what to tell people of.
pub fn check_unless(path: &Path, dir: &Path, is_ended: impl Fn() -> bool) -> Outcome {
    let Some(mount) = mount_entry_above(dir) else { return Ok(()) };
    let Ok(mut asking) = ask(&mount.dir) else { return Ok(()) };
    let began = Instant::now();
    while matches!(asking.try_wait(), Ok(None)) {
        let is_late = began.elapsed() > PATIENCE;
        if is_late || is_ended() {
            // It ends when the kernel lets it.
            let _ = asking.kill();
        }
        if is_ended() {
            return Ok(());
        }
        if is_late {
            let servers = servers::servers();
            let server = servers.iter().find(|server| server.serves(&mount));
            return Err(Failure::new(path.display(), unanswered(server, &mount.dir)));
        }
        sleep(PAUSE);
    }
    Ok(())
}

fn ask(dir: &Path) -> std::io::Result<Child> {
    let mut command = Command::new("/proc/self/exe");
    command.arg0(NAME).arg(dir);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()
}

/// What is wrong with a mount at `dir` that does not answer, and what to do.
fn unanswered(server: Option<&Server>, dir: &Path) -> String {
    let (mounted, off) = (dir.display(), format!("weir umount --lazy {}", dir.display()));
    match server.map(|server| (server.pid(), server.is_stopped())) {
        Some((pid, true)) => format!(
            "mounted at {mounted}, and its server (process {pid}) is stopped: let it go on: kill -CONT {pid}"
        ),
        Some((pid, false)) => format!(
            "mounted at {mounted}, and its server (process {pid}) does not answer: wait for it, or end it and take the mount off: \
             kill -9 {pid}; {off}"
        ),
        None => format!(
            "mounted at {mounted}, and its server, which belongs to somebody else, does not answer: wait for it, or take the mount \
             off: {off}"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_mount_of_ours_is_not_asked() {
        for path in ["/", "/proc", "/nowhere", "relative"] {
            assert_eq!(check_answers(Path::new(path)), Ok(()));
        }
    }

    #[test]
    fn a_mount_whose_server_nobody_sees_can_be_taken_off() {
        let told = unanswered(None, Path::new("/mnt"));
        assert!(told.contains("weir umount --lazy /mnt"), "{told}");
    }
}
