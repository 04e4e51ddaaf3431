//! What the figures were measured on.

use std::fs;
use std::path::Path;

use super::schema::Machine;
use crate::measure::device::{disk_of, mount_of};

fn first_value(text: &str, key: &str) -> Option<String> {
    let line = text.lines().find(|l| l.starts_with(key))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn queue_file(disk: &str, name: &str) -> String {
    let path = Path::new("/sys/block").join(disk).join("queue").join(name);
    fs::read_to_string(path).map(|t| t.trim().to_owned()).unwrap_or_default()
}

/// Describes the machine and the disk of the work directory.
pub fn describe(work: &Path) -> Machine {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let memory_kib = first_value(&meminfo, "MemTotal")
        .and_then(|v| v.trim_end_matches(" kB").trim().parse::<u64>().ok())
        .unwrap_or(0);
    let mount = mount_of(work);
    let disk = disk_of(work);
    let name = disk.as_ref().map_or("none", |d| d.name.as_str());
    let on = mount.map_or(String::new(), |m| format!("{} ({})", m.fs_type, m.options));
    Machine {
        kernel: fs::read_to_string("/proc/sys/kernel/osrelease")
            .map(|t| t.trim().to_owned())
            .unwrap_or_default(),
        cpu: first_value(&cpuinfo, "model name").unwrap_or_default(),
        cpus: std::thread::available_parallelism().map_or(1, |n| n.get() as u64),
        memory_mib: memory_kib / 1024,
        disk: format!("{name}: {on}"),
        write_cache: disk
            .as_ref()
            .map(|d| {
                format!(
                    "{}, FUA {}",
                    queue_file(&d.name, "write_cache"),
                    if queue_file(&d.name, "fua") == "1" { "yes" } else { "no" }
                )
            })
            .unwrap_or_default(),
    }
}
