//! `hollow-mount`: what a mount costs before any file system has done anything.
//!
//! A file system without content ([`super::hollow_fs`]), behind the same transport as `weir-mount`, in a process of its own like
//! that. What a program takes on it is the program's own work, the kernel's, and the round trips: the floor of everything that goes through
//! FUSE. It makes nothing durable, so its figures are no file system's.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use weir_mount::MountOptions;

use super::TargetSpec;
use super::hollow_fs::HollowFs;
use super::mounted::{Cold, MountedFs};
use super::stage::{Built, StageOptions, TargetInfo, counters_of, disks_below};
use crate::disk::registry::{Registry, Resource};
use crate::disk::{Disk, await_helper, own_command, start_helper};
use crate::error::{LabError, LabResult};
use crate::measure::device::fuse_mount_of;

const PATIENCE: Duration = Duration::from_secs(10);

/// Serves one at `mount_point`, mounted with `options`, until it is unmounted.
pub fn serve(mount_point: &Path, options: &str) -> LabResult<()> {
    let failed = |message: String| LabError::Command { command: "hollow-mount".into(), message };
    let mut mount_options =
        MountOptions { fs_name: "weir-lab-hollow".into(), ..MountOptions::default() };
    mount_options.apply(options).map_err(|error| LabError::BadOption(error.to_string()))?;
    let session = weir_mount::mount(mount_point, Arc::new(HollowFs::new()), &mount_options)
        .map_err(|error| failed(error.to_string()))?;
    session.serve().map_err(|error| failed(error.to_string()))
}

/// Starts a server and waits until it is there.
pub fn set_up(
    spec: &TargetSpec,
    disk: &Disk,
    options: &StageOptions,
    registry: &Arc<Registry>,
) -> LabResult<Built> {
    let list = super::weir_mount::mount_list(spec, options);
    let mount_point: PathBuf = disk.run_dir.join("mnt-hollow");
    std::fs::create_dir_all(&mount_point)?;
    let mut command = own_command()?;
    command.arg("hollow").arg(&mount_point).arg(&list);
    let pid = start_helper(&mut command, registry)?;
    registry.add(Resource::Mount { path: mount_point.clone() })?;
    let mount = await_helper(pid, PATIENCE, || fuse_mount_of(&mount_point)).ok_or_else(|| {
        LabError::Command {
            command: "hollow-mount".into(),
            message: "it could not be mounted (is /dev/fuse there?)".into(),
        }
    })?;
    let device = disk.below();
    let info = TargetInfo {
        name: spec.name(),
        fs_type: mount.fs_type,
        on: "nothing".into(),
        format: "none: names in memory, data thrown away, nothing is made durable".into(),
        options: format!("{} ({list})", mount.options),
        version: env!("CARGO_PKG_VERSION").into(),
        counters: device.as_ref().map(counters_of).unwrap_or_default(),
    };
    let fs = Arc::new(MountedFs::new(mount_point, device, Cold::Advise));
    Ok(Built { fs, info, daemons: Box::new(move || vec![pid]), disks: disks_below(spec, disk) })
}
