//! How much memory there is: the machine's, or what the control group of this process may have of it. Who takes more than that is killed.

use std::path::Path;

/// Where control groups are found, by version.
const GROUPS: &str = "/sys/fs/cgroup";
const OLD_GROUPS: &str = "/sys/fs/cgroup/memory";

/// Bytes that this process can have, as far as the host tells.
pub fn memory_bytes() -> Option<u64> {
    bytes_by(&|path| std::fs::read_to_string(path).ok())
}

/// As [`memory_bytes`], of a host whose files are what `read` answers.
fn bytes_by(read: &dyn Fn(&Path) -> Option<String>) -> Option<u64> {
    let machine = read(Path::new("/proc/meminfo")).and_then(|text| {
        let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
        total.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    });
    let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    let limits = groups.lines().filter_map(|line| limit_of(line, read));
    machine.into_iter().chain(limits).min()
}

/// The least limit of a group, which is a line `number:controllers:path` of `/proc/self/cgroup`, and of those that it is in. In a container the
/// path may be that outside of it, and only the root be there.
fn limit_of(line: &str, read: &dyn Fn(&Path) -> Option<String>) -> Option<u64> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (controllers, path) = (fields.next()?, fields.next()?);
    let (base, limits) = if controllers.is_empty() {
        (GROUPS, &["memory.max", "memory.high"][..])
    } else if controllers.split(',').any(|controller| controller == "memory") {
        (OLD_GROUPS, &["memory.limit_in_bytes"][..])
    } else {
        return None;
    };
    let groups = Path::new(path.trim_start_matches('/')).ancestors();
    let files = groups.flat_map(|group| limits.iter().map(move |limit| group.join(limit)));
    // One that is no number (`max`) is none.
    files.filter_map(|file| read(&Path::new(base).join(file))?.trim().parse().ok()).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn bytes_of(files: &[(&str, &str)]) -> Option<u64> {
        bytes_by(&|path| {
            let file = files.iter().find(|(name, _)| Path::new(name) == path)?;
            Some(file.1.to_owned())
        })
    }

    #[test]
    fn the_memory_of_a_process_is_the_machines_or_what_its_groups_may_have() {
        let machine = ("/proc/meminfo", "MemFree: 5 kB\nMemTotal:    1048576 kB\n");
        assert_eq!(bytes_of(&[]), None);
        assert_eq!(bytes_of(&[machine]), Some(1024 * MIB));
        let new = ("/proc/self/cgroup", "0::/a/b\n");
        let limit = |name, text| bytes_of(&[machine, new, (name, text)]);
        assert_eq!(limit("/sys/fs/cgroup/a/b/memory.max", "104857600\n"), Some(100 * MIB));
        assert_eq!(limit("/sys/fs/cgroup/a/b/memory.max", "max\n"), Some(1024 * MIB));
        assert_eq!(limit("/sys/fs/cgroup/a/memory.high", "104857600\n"), Some(100 * MIB));
        // In a container.
        assert_eq!(limit("/sys/fs/cgroup/memory.max", "104857600\n"), Some(100 * MIB));
        assert_eq!(limit("/sys/fs/cgroup/other/memory.max", "1\n"), Some(1024 * MIB));
        let old = ("/proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/a:b\n1:cpu:/c\n0::/\n");
        let limit = |name, text| bytes_of(&[machine, old, (name, text)]);
        let file = "/sys/fs/cgroup/memory/a:b/memory.limit_in_bytes";
        assert_eq!(limit(file, "104857600\n"), Some(100 * MIB));
        // None.
        assert_eq!(limit(file, "9223372036854771712\n"), Some(1024 * MIB));
        let file = "/sys/fs/cgroup/memory/memory.limit_in_bytes";
        assert_eq!(limit(file, "104857600\n"), Some(100 * MIB));
    }
}
