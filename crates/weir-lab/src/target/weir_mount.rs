//! Weir through FUSE: `weir create` and `weir mount`, then a mounted file system like any other.

use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::TargetSpec;
use super::mounted::{Cold, MountedFs, Server};
use super::stage::{Built, StageOptions, TargetInfo, counters_of, disks_below, run};
use crate::disk::registry::{Registry, Resource};
use crate::disk::{Disk, await_helper, start_helper};
use crate::error::{LabError, LabResult};
use crate::measure::device::{fuse_mount_of, mount_of};

/// A mount may have to recover its volume first.
const PATIENCE: Duration = Duration::from_secs(20);

/// The `weir` program: the option, this program itself, or its neighbour.
fn weir_bin(options: &StageOptions) -> Option<PathBuf> {
    if let Some(given) = &options.weir_bin {
        return given.is_file().then(|| given.clone());
    }
    let own = std::env::current_exe().ok()?;
    if own.file_name().is_some_and(|n| n == "weir") {
        return Some(own);
    }
    let neighbour = own.with_file_name("weir");
    neighbour.is_file().then_some(neighbour)
}

/// What `weir mount -o` is told: access times are off everywhere in the lab, then the run's options, then the target's.
pub(super) fn mount_list(spec: &TargetSpec, options: &StageOptions) -> String {
    let own = spec.own_mount_options().iter();
    let words = options.mount_options.iter().chain(own).map(String::as_str);
    ["noatime"].into_iter().chain(words).collect::<Vec<_>>().join(",")
}

/// Whether there are mounts with these options.
pub fn check_options(spec: &TargetSpec, options: &StageOptions) -> LabResult<()> {
    weir_mount::MountOptions::default()
        .apply(&mount_list(spec, options))
        .map_err(|error| LabError::BadOption(error.to_string()))
}

/// Whether there can be mounts.
pub fn preflight_fuse(spec: &TargetSpec) -> LabResult<()> {
    if !std::path::Path::new("/dev/fuse").exists() {
        let target = spec.name();
        return Err(LabError::BadOption(format!("target '{target}': there is no /dev/fuse")));
    }
    Ok(())
}

/// Whether there is a program to mount with, and whether it will know the options.
pub fn preflight(spec: &TargetSpec, options: &StageOptions) -> LabResult<()> {
    preflight_fuse(spec)?;
    let bin = weir_bin(options).ok_or_else(|| {
        LabError::BadOption("target 'weir-mount': no `weir` program found; give --weir-bin".into())
    })?;
    let help = Command::new(&bin).args(["mount", "--help"]).stdin(Stdio::null()).output();
    if help.is_ok_and(|o| o.status.success() && !o.stdout.is_empty()) {
        return Ok(());
    }
    Err(LabError::BadOption(format!("target 'weir-mount': {} cannot mount", bin.display())))
}

fn last_line(log: &std::path::Path) -> Option<String> {
    let text = std::fs::read_to_string(log).ok()?;
    text.lines().rev().find(|l| !l.trim().is_empty()).map(str::to_owned)
}

/// The process that serves the mount. It is started anew to make the mount cold: its cache is its
/// own, so dropping the kernel's pages would leave the data warm.
struct Daemon {
    bin: PathBuf,
    volume: PathBuf,
    mount_point: PathBuf,
    log: PathBuf,
    mount_list: String,
    memory_bytes: Mutex<Option<u64>>,
    registry: Arc<Registry>,
    pid: AtomicU32,
}

impl Daemon {
    fn start(&self) -> LabResult<()> {
        let mut command = Command::new(&self.bin);
        command.arg("mount").args(["-o", &self.mount_list]);
        if let Some(bytes) = *self.memory_cap() {
            command.arg("--memory").arg(bytes.to_string());
        }
        command.arg(&self.volume).arg(&self.mount_point);
        // A file, not a pipe: nobody reads while the daemon runs.
        let log = std::fs::File::create(&self.log)?;
        // Out of reach of the terminal's Ctrl-C: the lab unmounts first, then the daemon ends.
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let pid = start_helper(&mut command, &self.registry)?;
        self.registry.add(Resource::Mount { path: self.mount_point.clone() })?;
        self.pid.store(pid, Ordering::Relaxed);
        match await_helper(pid, PATIENCE, || fuse_mount_of(&self.mount_point)) {
            Some(_) => Ok(()),
            None => Err(LabError::Command {
                command: format!("weir mount {}", self.volume.display()),
                message: last_line(&self.log)
                    .unwrap_or_else(|| "the volume was not mounted".into()),
            }),
        }
    }

    fn memory_cap(&self) -> MutexGuard<'_, Option<u64>> {
        self.memory_bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts it again after it has ended; answers how long until the mount was there.
    fn again(&self) -> io::Result<Duration> {
        let begun = Instant::now();
        self.start().map_err(io::Error::other)?;
        Ok(begun.elapsed())
    }
}

/// The server as [`MountedFs`] holds it.
struct Served(Arc<Daemon>);

impl Server for Served {
    fn restart(&self, memory_bytes: Option<u64>) -> io::Result<Duration> {
        if memory_bytes.is_some() {
            *self.0.memory_cap() = memory_bytes;
        }
        self.0.registry.release_mount(&self.0.mount_point)?;
        self.0.again()
    }

    fn kill_and_restart(&self) -> io::Result<Duration> {
        let pid = self.0.pid.load(Ordering::Relaxed);
        if let Some(pid) = rustix::process::Pid::from_raw(pid as i32) {
            rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
        }
        // The mount of a dead server can still be taken down.
        self.0.registry.release_mount(&self.0.mount_point)?;
        self.0.again()
    }
}

/// Creates a volume on the run's disk and mounts it.
pub fn set_up(
    spec: &TargetSpec,
    disk: &Disk,
    options: &StageOptions,
    registry: &Arc<Registry>,
) -> LabResult<Built> {
    preflight(spec, options)?;
    let bin = weir_bin(options).unwrap_or_default();
    let bin_text = bin.to_string_lossy().into_owned();
    let volume = disk.path_of(spec);
    let volume_text = volume.to_string_lossy().into_owned();
    run(&bin_text, &["create", "--force", &volume_text])?;
    let mount_point = disk.run_dir.join("mnt-weir");
    std::fs::create_dir_all(&mount_point)?;
    let mount_list = mount_list(spec, options);
    // What the kernel shows lacks what is between it and the server.
    let told = format!("weir mount -o {mount_list}");
    let daemon = Arc::new(Daemon {
        bin,
        volume: volume.clone(),
        mount_point: mount_point.clone(),
        log: disk.run_dir.join("weir-mount.log"),
        mount_list,
        memory_bytes: Mutex::new(options.weir_memory_bytes),
        registry: Arc::clone(registry),
        pid: AtomicU32::new(0),
    });
    daemon.start()?;
    let mount = mount_of(&mount_point);
    // Without a loop device of its own, what the host's disk counts is the nearest truth.
    let device = disk.device_of(spec).or_else(|| disk.below());
    let info = TargetInfo {
        name: spec.name(),
        fs_type: mount.as_ref().map(|m| m.fs_type.clone()).unwrap_or_default(),
        on: format!("{volume_text} ({})", disk.spec),
        format: "weir create".into(),
        options: mount.map_or(told.clone(), |m| format!("{} ({told})", m.options)),
        version: run(&bin_text, &["--version"]).unwrap_or_default().trim().to_owned(),
        counters: device.as_ref().map(counters_of).unwrap_or_default(),
    };
    let cold = Cold::Restart(Box::new(Served(Arc::clone(&daemon))));
    let fs = Arc::new(MountedFs::new(mount_point, device, cold));
    let daemons = Box::new(move || vec![daemon.pid.load(Ordering::Relaxed)]);
    Ok(Built { fs, info, daemons, disks: disks_below(spec, disk) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_mounted_with_the_options_of_the_run_and_then_its_own() {
        let options =
            StageOptions { mount_options: vec!["noxattr".into()], ..StageOptions::default() };
        let list = |word: &str| mount_list(&word.parse().expect(word), &options);
        assert_eq!(list("weir-mount"), "noatime,noxattr");
        assert_eq!(list("weir-mount-loop+xattr+threads=3"), "noatime,noxattr,xattr,threads=3");
    }
}
