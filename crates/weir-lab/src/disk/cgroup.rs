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

const HIERARCHIES: &str = "/sys/fs/cgroup";

/// What a group limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Controller {
    Io,
    Memory,
}

impl Controller {
    /// Its directory in version 1, a file that is there when it works, its name in version 2.
    fn names(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Controller::Io => ("blkio", "blkio.throttle.read_iops_device", "io"),
            Controller::Memory => ("memory", "memory.limit_in_bytes", "memory"),
        }
    }
}

/// Where a controller is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Hierarchy {
    /// Version 1: the root of the controller's own hierarchy.
    V1(PathBuf),
    /// Version 2: the root of the one hierarchy.
    V2(PathBuf),
}

/// Finds a controller below `hierarchies`. With both versions mounted a controller is in one of them.
fn find(hierarchies: &Path, controller: Controller) -> LabResult<Hierarchy> {
    let (v1, probe, v2) = controller.names();
    let own = hierarchies.join(v1);
    if own.join(probe).exists() {
        return Ok(Hierarchy::V1(own));
    }
    let mut seen = Vec::new();
    // The unified hierarchy alone, or beside those of version 1.
    for root in [hierarchies.to_owned(), hierarchies.join("unified")] {
        let Ok(list) = fs::read_to_string(root.join("cgroup.controllers")) else { continue };
        if list.split_whitespace().any(|c| c == v2) {
            return Ok(Hierarchy::V2(root));
        }
        seen.push(format!("{} offers '{}'", root.display(), list.trim()));
    }
    let v2_text = if seen.is_empty() { "no version 2 hierarchy".into() } else { seen.join(", ") };
    Err(LabError::BadOption(format!(
        "this kernel offers no control group to limit {v2} with: no version 1 '{v1}' in {}, and {v2_text}",
        hierarchies.display()
    )))
}

/// The cgroup of this process in a version 1 hierarchy, as a directory.
fn own_v1_group(controller: &str, mount: &Path) -> PathBuf {
    let text = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = text
        .lines()
        .filter_map(|l| l.split_once(':')?.1.split_once(':'))
        .find(|(controllers, _)| controllers.split(',').any(|c| c == controller))
        .map_or("/", |(_, path)| path);
    let dir = mount.join(own.trim_start_matches('/'));
    if dir.exists() { dir } else { mount.to_owned() }
}

/// Limits the disk `below` (major:minor) for this run, and the loop device `on_loop`, which nobody else uses,
/// for the kernel's writeback as well.
pub fn limit_io(
    registry: &Arc<Registry>,
    on_loop: Option<&str>,
    below: &str,
    limits: IoLimits,
) -> LabResult<()> {
    let root = match find(Path::new(HIERARCHIES), Controller::Io)? {
        Hierarchy::V1(root) => {
            let own = own_v1_group("blkio", &root);
            limit_v1(registry, &own, below, limits)?;
            if let Some(number) = on_loop {
                limit_v1(registry, &root, number, limits)?;
                if own != root {
                    limit_v1(registry, &own, number, limits)?;
                }
            }
            return Ok(());
        }
        Hierarchy::V2(root) => root,
    };
    let group = v2_group(registry, &root, Controller::Io)?;
    let word = |key: &str, n: u64| if n == 0 { format!("{key}=max") } else { format!("{key}={n}") };
    for number in on_loop.into_iter().chain([below]) {
        let line = [
            number.to_owned(),
            word("rbps", limits.read_bytes_per_s),
            word("wbps", limits.write_bytes_per_s),
            word("riops", limits.read_iops),
            word("wiops", limits.write_iops),
        ]
        .join(" ");
        fs::write(group.join("io.max"), &line).during(|| format!("limiting {number} in io.max"))?;
    }
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

/// A version 2 group of our own below `root`, with `controller` switched on.
fn v2_group(registry: &Arc<Registry>, root: &Path, controller: Controller) -> LabResult<PathBuf> {
    let switch = root.join("cgroup.subtree_control");
    let wanted = controller.names().2;
    fs::write(&switch, format!("+{wanted}")).map_err(|e| {
        LabError::BadOption(format!(
            "control groups (version 2): '{wanted}' cannot be switched on in {} ({e}); inside a container,              run on the host, or delegate the controller",
            switch.display()
        ))
    })?;
    // Buffered writeback is attributed to a group only where both are on; one alone is better than none.
    let _ = fs::write(&switch, "+io +memory");
    let group = root.join(own_group());
    if !group.exists() {
        registry.add(Resource::Cgroup { path: group.clone(), parent: root.to_owned() })?;
        fs::create_dir(&group).during(|| format!("creating {}", group.display()))?;
    }
    Ok(group)
}

fn own_group() -> String {
    format!("weir-lab-{}", std::process::id())
}

fn enter(group: &Path) -> LabResult<()> {
    fs::write(group.join("cgroup.procs"), std::process::id().to_string())
        .during(|| format!("entering {}", group.display()))
}

/// Limits the memory of this process, `others` and the page cache they fill. The limit ends when
/// the registry is released to its earlier mark.
pub fn limit_memory(registry: &Arc<Registry>, bytes: u64, others: &[u32]) -> LabResult<()> {
    let (group, file) = match find(Path::new(HIERARCHIES), Controller::Memory)? {
        Hierarchy::V1(root) => {
            let parent = own_v1_group("memory", &root);
            let group = root.join(own_group());
            registry.add(Resource::Cgroup { path: group.clone(), parent })?;
            fs::create_dir_all(&group).during(|| format!("creating {}", group.display()))?;
            (group, "memory.limit_in_bytes")
        }
        Hierarchy::V2(root) => {
            let group = v2_group(registry, &root, Controller::Memory)?;
            // The group may be that of an I/O limit, which outlives this one.
            let file = group.join("memory.max");
            registry.add(Resource::Throttle { file, line: "max".into() })?;
            (group, "memory.max")
        }
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
    let (root, file) = match find(Path::new(HIERARCHIES), Controller::Memory) {
        Ok(Hierarchy::V1(root)) => (root, "memory.failcnt"),
        Ok(Hierarchy::V2(root)) => (root, "memory.events"),
        Err(_) => return 0,
    };
    let text = fs::read_to_string(root.join(own_group()).join(file)).unwrap_or_default();
    // Version 1: a number. Version 2: lines of a name and a number.
    let count = text.lines().find_map(|l| l.strip_prefix("max ")).unwrap_or(&text);
    count.trim().parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let root =
                std::env::temp_dir().join(format!("weir-lab-cg-{name}-{}", std::process::id()));
            fs::create_dir_all(&root).expect("made");
            for (path, text) in files {
                let path = root.join(path);
                fs::create_dir_all(path.parent().expect("below the root")).expect("made");
                fs::write(path, text).expect("written");
            }
            Tree(root)
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn each_layout_of_control_groups_is_recognised() {
        let v1 = Tree::new("v1", &[("blkio/blkio.throttle.read_iops_device", "")]);
        assert_eq!(find(&v1.0, Controller::Io).expect("v1"), Hierarchy::V1(v1.0.join("blkio")));
        let v2 = Tree::new("v2", &[("cgroup.controllers", "cpuset cpu io memory pids\n")]);
        for controller in [Controller::Io, Controller::Memory] {
            assert_eq!(find(&v2.0, controller).expect("v2"), Hierarchy::V2(v2.0.clone()));
        }
        let hybrid = Tree::new(
            "hybrid",
            &[
                ("memory/memory.limit_in_bytes", "0"),
                ("blkio/other", ""),
                ("unified/cgroup.controllers", "io\n"),
            ],
        );
        let unified = hybrid.0.join("unified");
        assert_eq!(find(&hybrid.0, Controller::Io).expect("hybrid"), Hierarchy::V2(unified));
        let memory = find(&hybrid.0, Controller::Memory).expect("hybrid");
        assert_eq!(memory, Hierarchy::V1(hybrid.0.join("memory")));
    }

    #[test]
    fn a_machine_without_the_controller_says_what_was_looked_for() {
        let none = Tree::new("none", &[("unified/cgroup.controllers", "hugetlb\n")]);
        let e = find(&none.0, Controller::Io).expect_err("not there").to_string();
        assert!(e.contains("no version 1 'blkio'") && e.contains("offers 'hugetlb'"), "{e}");
        let empty = Tree::new("empty", &[("x", "")]);
        let e = find(&empty.0, Controller::Memory).expect_err("not there").to_string();
        assert!(e.contains("limit memory") && e.contains("no version 2 hierarchy"), "{e}");
    }
}
