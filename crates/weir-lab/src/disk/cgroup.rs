//! Limits through control groups, version 1 and 2: I/O of a disk, memory of the run.
//!
//! Version 1 accounts buffered writeback to the root group, where it may be limited too; so a
//! limit there covers the page cache as well as direct I/O. Version 2 attributes writeback to the
//! group that dirtied the pages, but exempts the root, so the run moves into a group of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::registry::{Registry, Resource};
use crate::error::{IoContext, LabError, LabResult};

/// Limits on a disk; 0 means none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoLimits {
    /// Bytes read per second.
    pub read_bytes_per_s: u64,
    /// Bytes written per second.
    pub write_bytes_per_s: u64,
    /// Read requests per second.
    pub read_iops: u64,
    /// Write requests per second.
    pub write_iops: u64,
}

const V1_BLKIO: &str = "/sys/fs/cgroup/blkio";
const V1_MEMORY: &str = "/sys/fs/cgroup/memory";
const V2: &str = "/sys/fs/cgroup";

/// The cgroup of this process in a version 1 hierarchy, as a directory.
fn own_v1_group(controller: &str, mount: &str) -> PathBuf {
    let text = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = text
        .lines()
        .filter_map(|l| l.split_once(':')?.1.split_once(':'))
        .find(|(controllers, _)| controllers.split(',').any(|c| c == controller))
        .map_or("/", |(_, path)| path);
    let dir = PathBuf::from(mount).join(own.trim_start_matches('/'));
    if dir.exists() { dir } else { PathBuf::from(mount) }
}

/// Limits the disk `number` (major:minor) for this run.
pub fn limit_io(registry: &Arc<Registry>, number: &str, limits: IoLimits) -> LabResult<()> {
    let root = Path::new(V1_BLKIO);
    if root.join("blkio.throttle.read_iops_device").exists() {
        let own = own_v1_group("blkio", V1_BLKIO);
        limit_v1(registry, root, number, limits)?;
        if own != root {
            limit_v1(registry, &own, number, limits)?;
        }
        return Ok(());
    }
    let group = v2_group(registry, "io")?;
    let word = |key: &str, n: u64| if n == 0 { format!("{key}=max") } else { format!("{key}={n}") };
    let line = [
        number.to_owned(),
        word("rbps", limits.read_bytes_per_s),
        word("wbps", limits.write_bytes_per_s),
        word("riops", limits.read_iops),
        word("wiops", limits.write_iops),
    ]
    .join(" ");
    fs::write(group.join("io.max"), &line).during(|| format!("limiting {number} in io.max"))?;
    enter(&group)
}

fn limit_v1(
    registry: &Arc<Registry>,
    group: &Path,
    number: &str,
    limits: IoLimits,
) -> LabResult<()> {
    for (file, n) in [
        ("blkio.throttle.read_bps_device", limits.read_bytes_per_s),
        ("blkio.throttle.write_bps_device", limits.write_bytes_per_s),
        ("blkio.throttle.read_iops_device", limits.read_iops),
        ("blkio.throttle.write_iops_device", limits.write_iops),
    ] {
        if n == 0 {
            continue;
        }
        let file = group.join(file);
        registry.add(Resource::Throttle { file: file.clone(), line: format!("{number} 0") })?;
        fs::write(&file, format!("{number} {n}"))
            .during(|| format!("limiting {number} in {}", file.display()))?;
    }
    Ok(())
}

/// A version 2 group of our own below the root, with `controller` available.
fn v2_group(registry: &Arc<Registry>, controller: &str) -> LabResult<PathBuf> {
    let root = Path::new(V2);
    let available = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
    if !available.split_whitespace().any(|c| c == controller) {
        return Err(LabError::BadOption(format!(
            "no control group with the '{controller}' controller is writable here"
        )));
    }
    let group = root.join(format!("weir-lab-{}", std::process::id()));
    if !group.exists() {
        // Writeback is attributed only where both controllers are on.
        fs::write(root.join("cgroup.subtree_control"), "+io +memory")
            .during(|| "enabling cgroup controllers".into())?;
        registry.add(Resource::Cgroup { path: group.clone(), parent: root.into() })?;
        fs::create_dir(&group).during(|| format!("creating {}", group.display()))?;
    }
    Ok(group)
}

fn enter(group: &Path) -> LabResult<()> {
    fs::write(group.join("cgroup.procs"), std::process::id().to_string())
        .during(|| format!("entering {}", group.display()))
}

/// Limits the memory of this process, `others` and the page cache they fill. The limit ends when
/// the registry is released to its earlier mark.
pub fn limit_memory(registry: &Arc<Registry>, bytes: u64, others: &[u32]) -> LabResult<()> {
    let v1 = Path::new(V1_MEMORY).join("memory.limit_in_bytes").exists();
    let (group, file) = if v1 {
        let parent = own_v1_group("memory", V1_MEMORY);
        let group = Path::new(V1_MEMORY).join(format!("weir-lab-{}", std::process::id()));
        registry.add(Resource::Cgroup { path: group.clone(), parent })?;
        fs::create_dir_all(&group).during(|| format!("creating {}", group.display()))?;
        (group, "memory.limit_in_bytes")
    } else {
        (v2_group(registry, "memory")?, "memory.max")
    };
    fs::write(group.join(file), bytes.to_string())
        .during(|| format!("limiting memory in {}", group.display()))?;
    for pid in others {
        // A daemon that ended meanwhile shows in the experiment, not here.
        let _ = fs::write(group.join("cgroup.procs"), pid.to_string());
    }
    enter(&group)
}

/// How often this process' memory group ran into its limit so far.
pub fn memory_limit_hits() -> u64 {
    let group = format!("weir-lab-{}", std::process::id());
    let v1 = Path::new(V1_MEMORY).join(&group).join("memory.failcnt");
    if let Ok(text) = fs::read_to_string(v1) {
        return text.trim().parse().unwrap_or(0);
    }
    let v2 = Path::new(V2).join(&group).join("memory.events");
    fs::read_to_string(v2)
        .ok()
        .and_then(|t| t.lines().find_map(|l| l.strip_prefix("max "))?.trim().parse().ok())
        .unwrap_or(0)
}
