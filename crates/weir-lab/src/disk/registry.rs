//! Everything a run leaves on the machine while it runs, written down before it is made, so that a
//! normal end, Ctrl-C and `weir lab clean` after a crash all take it away the same way.
//!
//! Invariants: a resource is in the file before it exists; it is removed from the file only after
//! it is gone; resources are released in reverse order; nothing is removed that lies on a file
//! system which is mounted below a directory of the lab. The one lock protects list and file.

use std::fs;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::error::{IoContext, LabError, LabResult};
use crate::measure::device::mounts;
use crate::sys::is_root;

/// Something to take away again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Resource {
    /// A directory that the lab created, with all that is in it.
    Dir {
        /// Its path.
        path: PathBuf,
    },
    /// A process the lab started.
    Process {
        /// Process id.
        pid: u32,
        /// Start time in ticks since boot: tells it from a later process with the same id.
        start_ticks: u64,
    },
    /// Loop devices on a backing file.
    Loop {
        /// The file.
        backing: PathBuf,
    },
    /// A mount point.
    Mount {
        /// Where.
        path: PathBuf,
    },
    /// A blkio limit: writing `line` to `file` lifts it.
    Throttle {
        /// The cgroup file.
        file: PathBuf,
        /// `major:minor 0`.
        line: String,
    },
    /// A cgroup; its processes go back to `parent`.
    Cgroup {
        /// Its directory.
        path: PathBuf,
        /// Where its processes came from.
        parent: PathBuf,
    },
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct State {
    pid: u32,
    start_ticks: u64,
    resources: Vec<Resource>,
}

/// The resources of one run.
pub struct Registry {
    file: PathBuf,
    state: Mutex<State>,
}

/// Where state files are kept.
pub fn state_dir() -> PathBuf {
    if let Some(dir) = std::env::var_os("WEIR_LAB_STATE_DIR") {
        return PathBuf::from(dir);
    }
    if is_root() {
        return PathBuf::from("/run/weir-lab");
    }
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(dir) => PathBuf::from(dir).join("weir-lab"),
        None => {
            std::env::temp_dir().join(format!("weir-lab-{}", rustix::process::getuid().as_raw()))
        }
    }
}

/// Start time of a process, if it is alive. A zombie is not, but for one with threads that have not
/// ended yet: they still hold what the process had open.
pub fn start_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let threads = || fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    if fields.next()? == "Z" && threads() <= 1 {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

impl Registry {
    /// An empty registry for this process.
    pub fn new() -> LabResult<Arc<Registry>> {
        // Two registries in one process (tests) must not share a file.
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let dir = state_dir();
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir);
        made.during(|| format!("creating {}", dir.display()))?;
        if !is_own(&dir) {
            return Err(LabError::BadOption(format!(
                "{} belongs to somebody else or may be written by everybody: remove it, or set WEIR_LAB_STATE_DIR",
                dir.display()
            )));
        }
        let pid = std::process::id();
        let start_ticks = start_ticks(pid).unwrap_or(0);
        let state = State { pid, start_ticks, resources: Vec::new() };
        let n = COUNTER.fetch_add(1, Ordering::Relaxed);
        // The start too: a run whose number an earlier one had must not write over what that one left.
        let file = dir.join(format!("{pid}-{start_ticks}-{n}.json"));
        Ok(Arc::new(Registry { file, state: Mutex::new(state) }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panicking thread leaves a list that is still right: it is changed in one step.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a resource that is about to be made.
    pub fn add(&self, resource: Resource) -> LabResult<()> {
        let mut state = self.lock();
        state.resources.push(resource);
        save(&self.file, &state).during(|| format!("writing {}", self.file.display()))
    }

    /// Makes a directory that is removed with all that is in it. One that is there already is not the lab's to remove.
    pub fn make_dir(&self, path: &Path) -> LabResult<()> {
        let making = || format!("creating {}", path.display());
        if fs::symlink_metadata(path).is_ok() {
            return Err(LabError::BadOption(format!(
                "{} is there already: `weir lab clean` takes it away if an earlier run left it",
                path.display()
            )));
        }
        self.add(Resource::Dir { path: path.to_owned() })?;
        fs::create_dir(path).during(making)
    }

    /// How many resources there are: a mark for [`Registry::release_to`].
    pub fn mark(&self) -> usize {
        self.lock().resources.len()
    }

    /// Releases what was added after `mark`, latest first. Returns what would not go.
    pub fn release_to(&self, mark: usize) -> Vec<String> {
        let mut state = self.lock();
        let mut stuck = Vec::new();
        let mut kept = Vec::new();
        while state.resources.len() > mark {
            let Some(resource) = state.resources.pop() else { break };
            if let Err(e) = release(&resource) {
                stuck.push(format!("{resource:?}: {e}"));
                kept.push(resource);
            }
        }
        state.resources.extend(kept.into_iter().rev());
        if state.resources.is_empty() {
            let _ = fs::remove_file(&self.file);
        } else if let Err(e) = save(&self.file, &state) {
            stuck.push(format!("{}: {e}", self.file.display()));
        }
        stuck
    }

    /// Unmounts what is mounted at `path` and ends the process that was noted right before it, its
    /// server. Both stay noted: releasing them again later does nothing.
    pub fn release_mount(&self, path: &Path) -> io::Result<()> {
        let state = self.lock();
        let mount = Resource::Mount { path: path.to_owned() };
        let Some(at) = state.resources.iter().rposition(|r| *r == mount) else { return Ok(()) };
        release(&mount)?;
        match at.checked_sub(1).map(|server| &state.resources[server]) {
            Some(server @ Resource::Process { .. }) => release(server),
            _ => Ok(()),
        }
    }

    /// Forgets nothing and releases everything.
    pub fn release_all(&self) -> Vec<String> {
        self.release_to(0)
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        for stuck in self.release_all() {
            crate::tell!("weir lab: left behind: {stuck} (try `weir lab clean`)");
        }
    }
}

fn save(file: &Path, state: &State) -> io::Result<()> {
    let temporary = file.with_extension("tmp");
    // Whatever the umask is: one that everybody may write is not acted on.
    let mut options = fs::OpenOptions::new();
    let mut out = options.write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    out.write_all(&serde_json::to_vec_pretty(state)?)?;
    fs::rename(&temporary, file)
}

/// Whether nobody else can have made or changed this: a state file says what to unmount and to remove.
fn is_own(path: &Path) -> bool {
    const BY_EVERYBODY: u32 = 0o002;
    fs::symlink_metadata(path).is_ok_and(|m| {
        let is_right = m.is_dir() || m.is_file();
        let by_everybody = m.mode() & BY_EVERYBODY != 0;
        is_right && m.uid() == rustix::process::geteuid().as_raw() && !by_everybody
    })
}

/// State files of runs that are no longer alive.
pub fn stale_files() -> Vec<PathBuf> {
    stale_files_in(&state_dir())
}

fn stale_files_in(dir: &Path) -> Vec<PathBuf> {
    let Some(entries) = is_own(dir).then(|| fs::read_dir(dir).ok()).flatten() else {
        return Vec::new();
    };
    entries
        .flatten()
        .map(|e| e.path())
        .filter(|p| p.extension().is_some_and(|e| e == "json") && is_own(p))
        .filter(|p| load(p).is_some_and(|s| start_ticks(s.pid) != Some(s.start_ticks)))
        .collect()
}

fn load(file: &Path) -> Option<State> {
    serde_json::from_slice(&fs::read(file).ok()?).ok()
}

/// Takes away what crashed runs left. Returns (released, left behind).
pub fn clean_stale() -> (Vec<String>, Vec<String>) {
    let (mut released, mut stuck) = (Vec::new(), Vec::new());
    for file in stale_files() {
        let Some(mut state) = load(&file) else { continue };
        let mut kept = Vec::new();
        while let Some(resource) = state.resources.pop() {
            match release(&resource) {
                Ok(()) => released.push(format!("{resource:?}")),
                Err(e) => {
                    stuck.push(format!("{resource:?}: {e}"));
                    kept.push(resource);
                }
            }
        }
        kept.reverse();
        state.resources = kept;
        let written =
            if state.resources.is_empty() { fs::remove_file(&file) } else { save(&file, &state) };
        if let Err(e) = written {
            stuck.push(format!("{}: {e}", file.display()));
        }
    }
    (released, stuck)
}

/// Releases one resource; succeeds when it is already gone.
fn release(resource: &Resource) -> io::Result<()> {
    match resource {
        Resource::Dir { path } => remove_dir(path),
        Resource::Process { pid, start_ticks } => end_process(*pid, *start_ticks),
        Resource::Loop { backing } => detach_loops(backing),
        Resource::Mount { path } => unmount(path),
        Resource::Throttle { file, line } => fs::write(file, line),
        Resource::Cgroup { path, parent } => remove_cgroup(path, parent),
    }
}

/// Removes a directory with all that is in it. What is mounted below it is taken off, and not emptied: a helper that was slow may have mounted
/// it after its mount was released, and was ended then.
fn remove_dir(path: &Path) -> io::Result<()> {
    // As the kernel names it.
    let dir = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let below = mounts()?.into_iter().map(|mount| mount.mount_point);
    let below: Vec<PathBuf> = below.filter(|mount_point| mount_point.starts_with(&dir)).collect();
    // The latest first: it may lie on an earlier one.
    below.iter().rev().try_for_each(|mount_point| unmount(mount_point))?;
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Asks a process we started to end, and insists in the end.
fn end_process(pid: u32, started: u64) -> io::Result<()> {
    use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
    let Some(target) = Pid::from_raw(pid as i32) else { return Ok(()) };
    let begun = Instant::now();
    // A server whose mount was just taken away ends by itself, after it has closed its volume; only
    // one that does not is asked, once, and killed when it takes no notice.
    let steps =
        [(Duration::from_millis(500), Signal::TERM), (Duration::from_secs(20), Signal::KILL)];
    let mut steps = steps.iter().peekable();
    while start_ticks(pid) == Some(started) {
        if let Some((_, signal)) = steps.next_if(|(after, _)| begun.elapsed() >= *after) {
            match kill_process(target, *signal) {
                Err(rustix::io::Errno::SRCH) => break,
                Err(e) => return Err(e.into()),
                Ok(()) => {}
            }
        }
        std::thread::sleep(Duration::from_millis(10));
        // Reap it if it is our child; after a crash it is somebody else's.
        let _ = waitpid(Some(target), WaitOptions::NOHANG);
        if begun.elapsed() > Duration::from_secs(25) {
            return Err(io::Error::other(format!("process {pid} does not end")));
        }
    }
    let _ = waitpid(Some(target), WaitOptions::NOHANG);
    Ok(())
}

fn is_mounted(path: &Path) -> bool {
    mounts().is_ok_and(|mounts| mounts.iter().any(|m| m.mount_point == path))
}

/// Unmounts; waits out a busy moment, then detaches lazily.
fn unmount(path: &Path) -> io::Result<()> {
    let begun = Instant::now();
    while is_mounted(path) {
        let mut umount = Command::new("umount");
        if begun.elapsed() > Duration::from_secs(3) {
            umount.arg("-l");
        }
        let mut out = umount.arg(path).output()?;
        if !out.status.success() && !is_root() {
            // An ordinary user's FUSE mount.
            out = Command::new("fusermount3").arg("-u").arg(path).output()?;
        }
        if !out.status.success() {
            if begun.elapsed() > Duration::from_secs(6) {
                let said = String::from_utf8_lossy(&out.stderr);
                return Err(io::Error::other(said.trim().to_owned()));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    Ok(())
}

fn detach_loops(backing: &Path) -> io::Result<()> {
    let begun = Instant::now();
    loop {
        let loops = loops_of(backing)?;
        if loops.is_empty() {
            return Ok(());
        }
        for node in &loops {
            Command::new("losetup").arg("-d").arg(node).output()?;
        }
        if begun.elapsed() > Duration::from_secs(5) {
            return Err(io::Error::other(format!("{} stays attached", loops.join(" "))));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Loop devices on a backing file, from /sys (the file itself may be gone or unreachable).
fn loops_of(backing: &Path) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/sys/block")?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Ok(file) = fs::read(entry.path().join("loop/backing_file")) else { continue };
        let file = file.strip_suffix(b"\n").unwrap_or(&file);
        let file = file.strip_suffix(b" (deleted)").unwrap_or(file);
        if file == backing.as_os_str().as_bytes() {
            found.push(format!("/dev/{name}"));
        }
    }
    Ok(found)
}

fn remove_cgroup(path: &Path, parent: &Path) -> io::Result<()> {
    let begun = Instant::now();
    while path.exists() {
        if let Ok(pids) = fs::read_to_string(path.join("cgroup.procs")) {
            for pid in pids.lines() {
                let _ = fs::write(parent.join("cgroup.procs"), pid);
            }
        }
        match fs::remove_dir(path) {
            Err(e) if begun.elapsed() > Duration::from_secs(3) => return Err(e),
            _ => std::thread::sleep(Duration::from_millis(10)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn release_goes_backwards_to_the_mark_and_ends_with_no_file() {
        let registry = Registry::new().expect("state directory");
        let base = std::env::temp_dir().join(format!("weir-lab-reg-{}", std::process::id()));
        let (outer, inner) = (base.clone(), base.join("inner"));
        registry.add(Resource::Dir { path: outer.clone() }).expect("noted");
        fs::create_dir_all(&outer).expect("made");
        let mark = registry.mark();
        registry.add(Resource::Dir { path: inner.clone() }).expect("noted");
        fs::create_dir_all(&inner).expect("made");
        assert!(registry.file.exists());
        assert!(registry.release_to(mark).is_empty());
        assert!(!inner.exists() && outer.exists());
        assert!(registry.release_all().is_empty());
        assert!(!outer.exists() && !registry.file.exists());
    }

    #[test]
    fn releasing_what_was_noted_but_never_made_succeeds() {
        for resource in [
            Resource::Dir { path: "/nonexistent/weir-lab".into() },
            Resource::Mount { path: "/nonexistent/weir-lab".into() },
            Resource::Loop { backing: "/nonexistent/weir-lab.img".into() },
            Resource::Process { pid: std::process::id(), start_ticks: 1 },
            Resource::Cgroup { path: "/nonexistent/cg".into(), parent: "/nonexistent".into() },
        ] {
            release(&resource).unwrap_or_else(|e| panic!("{resource:?}: {e}"));
        }
    }

    #[test]
    fn a_directory_that_was_there_before_is_not_taken_and_not_removed() {
        let registry = Registry::new().expect("state directory");
        let path = std::env::temp_dir().join(format!("weir-lab-there-{}", std::process::id()));
        fs::create_dir_all(path.join("of-a-user")).expect("made");
        let error = registry.make_dir(&path).expect_err("it is somebody's").to_string();
        assert!(error.contains("is there already"), "{error}");
        assert!(registry.release_all().is_empty());
        assert!(path.join("of-a-user").exists());
        fs::remove_dir_all(&path).expect("removed");
        registry.make_dir(&path).expect("free now");
        assert!(path.is_dir() && registry.release_all().is_empty() && !path.exists());
    }

    /// A file system in memory; false (and a word) where there can be none.
    fn mount_tmpfs(at: &Path) -> bool {
        fs::create_dir_all(at).expect("made");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "none"]).arg(at).output();
        let is_mounted = mounted.is_ok_and(|out| out.status.success());
        if !is_mounted {
            eprintln!("skipped: mounting needs root");
        }
        is_mounted
    }

    #[test]
    fn what_was_mounted_late_in_a_directory_is_taken_off_and_not_emptied() {
        let registry = Registry::new().expect("state directory");
        let base = std::env::temp_dir().join(format!("weir-lab-late-{}", std::process::id()));
        let elsewhere = base.with_extension("elsewhere");
        registry.make_dir(&base).expect("made");
        if !mount_tmpfs(&elsewhere) {
            return;
        }
        fs::write(elsewhere.join("kept"), "kept").expect("written");
        // Of a name that no list of text has, and one on the other.
        let late = base.join(std::ffi::OsStr::from_bytes(b"no \xff text"));
        fs::create_dir(&late).expect("made");
        let bind = Command::new("mount").arg("--bind").args([&elsewhere, &late]).output();
        assert!(bind.expect("mount").status.success());
        fs::create_dir(late.join("inner")).expect("made");
        assert!(mount_tmpfs(&late.join("inner")));
        assert_eq!(registry.release_all(), Vec::<String>::new());
        assert!(!base.exists());
        assert_eq!(fs::read_to_string(elsewhere.join("kept")).expect("still there"), "kept");
        unmount(&elsewhere).expect("taken off");
        fs::remove_dir(&elsewhere).expect("removed");
    }

    #[test]
    fn a_mount_is_taken_off_also_while_another_has_a_name_that_is_no_text() {
        let base = std::env::temp_dir().join(format!("weir-lab-names-{}", std::process::id()));
        let (ours, other) = (base.join("ours"), base.join(std::ffi::OsStr::from_bytes(b"o\xff")));
        if !mount_tmpfs(&other) {
            return;
        }
        assert!(mount_tmpfs(&ours));
        release(&Resource::Mount { path: ours.clone() }).expect("taken off");
        let left = mounts().expect("a list").into_iter().map(|mount| mount.mount_point);
        let left: Vec<PathBuf> = left.filter(|at| at.starts_with(&base)).collect();
        unmount(&other).expect("taken off");
        assert_eq!(left, [other]);
        fs::remove_dir_all(&base).expect("removed");
    }

    #[test]
    fn state_that_somebody_else_may_have_written_is_not_acted_on() {
        use std::os::unix::fs::{PermissionsExt, chown};
        let dir = std::env::temp_dir().join(format!("weir-lab-state-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("made");
        let mode = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("changed");
        };
        mode(&dir, 0o700);
        let file = dir.join("1-0.json");
        let dead = State { pid: std::process::id(), start_ticks: 1, resources: Vec::new() };
        save(&file, &dead).expect("saved");
        assert_eq!(stale_files_in(&dir), [file.as_path()]);
        assert_eq!(fs::metadata(&file).expect("there").mode() & 0o777, 0o600);
        for path in [&dir, &file] {
            mode(path, 0o777);
            assert!(stale_files_in(&dir).is_empty(), "everybody may write {}", path.display());
            mode(path, 0o700);
            if is_root() {
                chown(path, Some(12_345), None).expect("given away");
                assert!(stale_files_in(&dir).is_empty(), "{} is another's", path.display());
                chown(path, Some(0), None).expect("taken back");
            }
        }
        let link = std::env::temp_dir().join(format!("weir-lab-link-{}", std::process::id()));
        std::os::unix::fs::symlink(&dir, &link).expect("linked");
        assert!(stale_files_in(&link).is_empty(), "a link may lead anywhere");
        fs::remove_file(link).expect("removed");
        fs::remove_dir_all(dir).expect("removed");
    }

    #[test]
    fn a_run_with_the_process_number_of_an_earlier_one_leaves_its_state_alone() {
        let (one, other) = (Registry::new().expect("one"), Registry::new().expect("other"));
        let start = start_ticks(std::process::id()).expect("alive").to_string();
        let names = [&one.file, &other.file].map(|f| f.to_string_lossy().into_owned());
        assert!(names.iter().all(|name| name.contains(&format!("-{start}-"))), "{names:?}");
        assert_ne!(names[0], names[1]);
    }

    #[test]
    fn a_state_file_of_a_living_process_is_not_stale() {
        let registry = Registry::new().expect("state directory");
        registry.add(Resource::Dir { path: "/nonexistent/x".into() }).expect("noted");
        assert!(!stale_files().contains(&registry.file));
        let dead = State { pid: std::process::id(), start_ticks: 1, resources: Vec::new() };
        save(&registry.file, &dead).expect("saved");
        assert!(stale_files().contains(&registry.file));
    }
}
