//! Puts a target on its feet for one turn and takes it down again: format, mount, unmount.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::mounted::{Cold, MountedFs};
use super::{Fs, TargetSpec};
use crate::disk::Disk;
use crate::disk::registry::{Registry, Resource};
use crate::error::{IoContext, LabError, LabResult};
use crate::measure::device::{BlockDevice, disk_of, mount_of};
use crate::sys::is_root;

/// Choices that hold for all targets of a run.
#[derive(Clone, Debug, Default)]
pub struct StageOptions {
    /// The `weir` program for `weir-mount`; found next to this one when not given.
    pub weir_bin: Option<PathBuf>,
    /// Weir's cache, for `weir` and `weir-mount`.
    pub weir_memory_bytes: Option<u64>,
    /// Words for `weir mount -o`, for every `weir-mount`.
    pub mount_options: Vec<String>,
    /// Run on directories without a block device.
    pub allow_no_device: bool,
}

/// How a target was set up, for the report.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetInfo {
    /// Its name.
    pub name: String,
    /// Type of file system.
    pub fs_type: String,
    /// What it lives on.
    pub on: String,
    /// How it was formatted.
    pub format: String,
    /// Mount options in effect.
    pub options: String,
    /// Version of the file system's tools, or of the library.
    pub version: String,
    /// Where device counters come from; empty without device truth.
    pub counters: String,
}

/// Lists the processes of a target; they may change when it is made cold.
pub type Daemons = Box<dyn Fn() -> Vec<u32> + Send + Sync>;

/// A target that is ready to be used.
pub struct Stage {
    /// The file system.
    pub fs: Arc<dyn Fs>,
    /// How it was set up.
    pub info: TargetInfo,
    /// Processes that work for the target now, to be put under its memory limit.
    pub daemons: Daemons,
    /// Disks whose traffic is ours.
    pub disks: Vec<BlockDevice>,
    registry: Arc<Registry>,
    mark: usize,
    /// Made durable after the tear-down: what a `dir:` target leaves to its file system must not
    /// be written back during another target's turn.
    settle: Option<PathBuf>,
}

/// Checks what was asked for, which no machine would make right.
pub fn check_options(spec: &TargetSpec, options: &StageOptions) -> LabResult<()> {
    match spec {
        TargetSpec::HollowMount => super::weir_mount::check_options(spec, options),
        weir if weir.is_weir_mount() => super::weir_mount::check_options(spec, options),
        _ => Ok(()),
    }
}

/// Checks, before any time is spent, that a target can be set up at all.
pub fn preflight(spec: &TargetSpec, options: &StageOptions) -> LabResult<()> {
    if spec.needs_loop() && !is_root() {
        return Err(LabError::NeedsRoot(format!("target '{}'", spec.name())));
    }
    if spec.needs_loop() {
        for tool in ["losetup", "mount", "umount"] {
            need_tool(tool, "mount")?;
        }
    }
    match spec {
        TargetSpec::Dir(path) => check_dir(path, options.allow_no_device),
        TargetSpec::Xfs => {
            need_tool("mkfs.xfs", "xfsprogs")?;
            need_tool("xfs_db", "xfsprogs")
        }
        TargetSpec::Ext4 => {
            need_tool("mkfs.ext4", "e2fsprogs")?;
            need_tool("dumpe2fs", "e2fsprogs")
        }
        TargetSpec::Btrfs => need_tool("mkfs.btrfs", "btrfs-progs"),
        // The library is part of this program; it needs no root and no tools.
        TargetSpec::Weir | TargetSpec::WeirLoop | TargetSpec::Raw => Ok(()),
        TargetSpec::WeirMount | TargetSpec::WeirMountLoop | TargetSpec::WeirMountWith { .. } => {
            super::weir_mount::preflight(spec, options)
        }
        TargetSpec::HollowMount => super::weir_mount::preflight_fuse(spec),
    }
}

/// Checks that a directory is there, writable and on a block device.
pub fn check_dir(path: &Path, allow_no_device: bool) -> LabResult<()> {
    let meta = std::fs::metadata(path).during(|| format!("opening {}", path.display()))?;
    if !meta.is_dir() {
        return Err(LabError::BadOption(format!("{} is not a directory", path.display())));
    }
    if !allow_no_device && disk_of(path).is_none() {
        let kind = mount_of(path).map_or("an unknown mount".to_owned(), |m| m.fs_type);
        return Err(LabError::NoDeviceTruth(path.to_owned(), kind));
    }
    Ok(())
}

/// Looks a program up in `PATH` and in the places for system programs.
pub fn find_tool(tool: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|dir| dir.join(tool))
        .find(|p| p.is_file())
}

fn need_tool(tool: &'static str, package: &'static str) -> LabResult<()> {
    find_tool(tool).map(drop).ok_or(LabError::ToolMissing { tool, package })
}

/// Runs a program with its error output on one line.
pub fn run(program: &str, args: &[&str]) -> LabResult<String> {
    super::mounted::run_tool(program, args)
        .map_err(|e| LabError::Command { command: program.to_owned(), message: e.to_string() })
}

impl Stage {
    /// Sets a target up, fresh.
    pub fn set_up(
        spec: &TargetSpec,
        disk: Option<&Disk>,
        options: &StageOptions,
        registry: &Arc<Registry>,
    ) -> LabResult<Stage> {
        let mark = registry.mark();
        if let Some(disk) = disk.filter(|_| spec.uses_disk()) {
            disk.wait_free();
        }
        let built = match (spec, disk) {
            (TargetSpec::Dir(path), _) => set_up_dir(path, registry),
            (_, None) => Err(LabError::BadOption(format!("{} needs a disk", spec.name()))),
            (TargetSpec::Weir | TargetSpec::WeirLoop, Some(disk)) => {
                super::weir::set_up(spec, disk, options)
            }
            (spec, Some(disk)) if spec.is_weir_mount() => {
                super::weir_mount::set_up(spec, disk, options, registry)
            }
            (TargetSpec::HollowMount, Some(disk)) => {
                super::hollow::set_up(spec, disk, options, registry)
            }
            (TargetSpec::Raw, Some(disk)) => Ok(super::raw::set_up(spec, disk)),
            (_, Some(disk)) => set_up_kernel(spec, disk, registry),
        };
        match built {
            Ok(Built { fs, info, daemons, disks }) => {
                let settle = match spec {
                    TargetSpec::Dir(path) => Some(path.clone()),
                    _ => None,
                };
                let registry = Arc::clone(registry);
                Ok(Stage { fs, info, daemons, disks, registry, mark, settle })
            }
            Err(e) => {
                registry.release_to(mark);
                Err(e)
            }
        }
    }

    /// Takes it down. Everything opened on it must be closed.
    pub fn tear_down(self) -> LabResult<()> {
        let Stage { fs, registry, mark, settle, .. } = self;
        drop(fs);
        let stuck = registry.release_to(mark);
        if let Some(path) = settle {
            crate::sys::syncfs(&path).during(|| format!("syncing {}", path.display()))?;
        }
        if stuck.is_empty() {
            return Ok(());
        }
        Err(LabError::BadOption(format!(
            "left behind (try `weir lab clean`): {}",
            stuck.join("; ")
        )))
    }
}

/// What the set-up of a kind of target yields.
pub struct Built {
    /// The file system.
    pub fs: Arc<dyn Fs>,
    /// For the report.
    pub info: TargetInfo,
    /// See [`Stage::daemons`].
    pub daemons: Daemons,
    /// See [`Stage::disks`].
    pub disks: Vec<BlockDevice>,
}

fn set_up_dir(path: &Path, registry: &Arc<Registry>) -> LabResult<Built> {
    let root = path
        .canonicalize()
        .during(|| format!("opening {}", path.display()))?
        .join(format!("weir-lab-dir-{}", std::process::id()));
    registry.make_dir(&root)?;
    let mount = mount_of(&root);
    let device = disk_of(&root);
    let info = TargetInfo {
        name: TargetSpec::Dir(path.to_owned()).name(),
        fs_type: mount.as_ref().map(|m| m.fs_type.clone()).unwrap_or_default(),
        on: mount.as_ref().map(|m| m.source.clone()).unwrap_or_default(),
        format: "as found".into(),
        options: mount.map(|m| m.options).unwrap_or_default(),
        version: String::new(),
        counters: device.as_ref().map(counters_of).unwrap_or_default(),
    };
    let disks = device.iter().cloned().collect();
    let fs = Arc::new(MountedFs::new(root, device, Cold::Advise));
    Ok(Built { fs, info, daemons: Box::new(Vec::new), disks })
}

/// Where the counters of a block device come from, for the report.
pub fn counters_of(device: &BlockDevice) -> String {
    format!("/sys/block/{}/stat", device.name)
}

/// The disks that a target on `disk` keeps busy: what the image is on, below the loop device if it is there.
pub fn disks_below(spec: &TargetSpec, disk: &Disk) -> Vec<BlockDevice> {
    disk.device_of(spec).into_iter().chain(disk.below()).collect()
}

fn first_line(program: &str, args: &[&str]) -> String {
    // `mkfs.ext4 -V` prints its version on the error stream.
    std::process::Command::new(program)
        .args(args)
        .output()
        .ok()
        .and_then(|o| {
            let all = [o.stdout, o.stderr].concat();
            String::from_utf8_lossy(&all).lines().next().map(str::to_owned)
        })
        .unwrap_or_default()
}

fn set_up_kernel(spec: &TargetSpec, disk: &Disk, registry: &Arc<Registry>) -> LabResult<Built> {
    let node = disk.loop_node.clone().ok_or_else(|| LabError::NeedsRoot(spec.name()))?;
    let dev = node.to_string_lossy().into_owned();
    // No discard: it would punch holes into the fully written image.
    let (fs_type, mkfs, format, options) = match spec {
        TargetSpec::Xfs => ("xfs", "mkfs.xfs", vec!["-f", "-q", "-K"], "noatime"),
        TargetSpec::Ext4 => (
            "ext4",
            "mkfs.ext4",
            vec!["-F", "-q", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"],
            "noatime,nodiscard",
        ),
        _ => (
            "btrfs",
            "mkfs.btrfs",
            vec!["-f", "-q", "-K", "-d", "single", "-m", "single"],
            "noatime,nodiscard",
        ),
    };
    let mut args = format.clone();
    args.push(&dev);
    run(mkfs, &args)?;
    let mount_point = disk.run_dir.join(format!("mnt-{fs_type}"));
    std::fs::create_dir_all(&mount_point)?;
    registry.add(Resource::Mount { path: mount_point.clone() })?;
    run("mount", &["-t", fs_type, "-o", options, &dev, &mount_point.to_string_lossy()])?;
    let device = BlockDevice::of_node(&node);
    let info = TargetInfo {
        name: spec.name(),
        fs_type: fs_type.into(),
        on: format!("{dev} on {} ({})", disk.file.display(), disk.spec),
        format: format!("{mkfs} {}", format.join(" ")),
        options: mount_of(&mount_point).map(|m| m.options).unwrap_or_default(),
        version: first_line(mkfs, &["-V"]),
        counters: device.as_ref().map(counters_of).unwrap_or_default(),
    };
    let cold = Cold::Remount { node, options: options.into() };
    let fs = Arc::new(MountedFs::new(mount_point, device, cold));
    Ok(Built { fs, info, daemons: Box::new(Vec::new), disks: disks_below(spec, disk) })
}

/// Whether a directory has room for `bytes`.
pub fn check_space(dir: &Path, bytes: u64) -> LabResult<()> {
    let free = crate::sys::space(dir).during(|| format!("statfs {}", dir.display()))?;
    if free.available_bytes < bytes {
        return Err(LabError::NoSpace {
            dir: dir.to_owned(),
            need_mib: bytes >> 20,
            free_mib: free.available_bytes >> 20,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::DiskSpec;

    #[test]
    fn a_missing_tool_is_named_with_its_package() {
        let e = need_tool("mkfs.nothing", "nothing-progs").expect_err("not installed").to_string();
        assert_eq!(e, "mkfs.nothing is not installed; it is in the package 'nothing-progs'");
    }

    #[test]
    fn the_disk_of_the_work_directory_is_not_below_a_disk_in_memory() {
        let run_dir = std::env::current_dir().expect("a directory");
        let on = |spec| {
            let (file, size_bytes, loop_node) = (run_dir.join("disk"), 1 << 30, None);
            let disk = Disk { spec, size_bytes, file, loop_node, run_dir: run_dir.clone() };
            disks_below(&TargetSpec::WeirMount, &disk)
        };
        assert_eq!(on(DiskSpec::Plain), disk_of(&run_dir).into_iter().collect::<Vec<_>>());
        assert_eq!(on(DiskSpec::Slow { flush_us: 2000 }), []);
    }

    #[test]
    fn a_directory_without_a_device_is_refused_unless_allowed() {
        // /proc is never on a block device.
        let proc = Path::new("/proc");
        assert!(matches!(check_dir(proc, false), Err(LabError::NoDeviceTruth(..))));
        assert!(check_dir(proc, true).is_ok());
        assert!(check_dir(Path::new("/nonexistent"), true).is_err());
    }
}
