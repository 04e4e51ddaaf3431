//! Loop file systems, slow and limited disks, and what is left after a kill. Need root; skip
//! themselves, and say so, where it is missing.

mod common;

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use common::{Scratch, loops_possible, median, rows};

/// Loop devices and time on the disk are shared: one of these tests at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn alone() -> std::sync::MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[test]
fn kernel_file_systems_share_a_disk_and_report_device_truth() {
    let _alone = alone();
    if !loops_possible() {
        return;
    }
    let scratch = Scratch::new("kernel");
    let report = scratch.report(&[
        "fsmark",
        "--quick",
        "--rounds",
        "2",
        "--on",
        "xfs,ext4,btrfs",
        "--size",
        "512M",
        "--files",
        "100",
        "--iterations",
        "1",
        "--mode",
        "pass,async",
        "--threads",
        "1",
    ]);
    for target in ["xfs", "ext4", "btrfs"] {
        let of_target: Vec<_> = rows(&report).filter(|r| r["target"] == target).collect();
        let flushes = of_target
            .iter()
            .find(|r| r["mode"] == "pass" && r["metric"] == "flushes_per_file")
            .and_then(|r| r["median"].as_f64());
        assert!(flushes.is_some_and(|f| f > 0.0), "{target}: {flushes:?}");
        let files = of_target.iter().find(|r| r["metric"] == "files_per_s").expect("files_per_s");
        assert_eq!(files["rounds"].as_array().map(Vec::len), Some(2));
        assert_eq!(files["baseline"], "xfs");
        assert!(files["floor_ratio"].as_f64().is_some_and(|f| f > 0.0), "{files}");
    }
    scratch.assert_clean();
}

#[test]
fn free_space_is_read_from_every_kernel_file_system() {
    let _alone = alone();
    if !loops_possible() {
        return;
    }
    let scratch = Scratch::new("aging");
    let report = scratch.report(&[
        "aging",
        "--quick",
        "--rounds",
        "1",
        "--no-probe",
        "--on",
        "xfs,ext4,btrfs",
        "--size",
        "640M",
        "--files",
        "100",
        "--mode",
        "copy-close",
    ]);
    for target in ["xfs", "ext4", "btrfs"] {
        let get = |metric: &str| {
            rows(&report)
                .find(|r| r["target"] == target && r["metric"] == metric)
                .and_then(|r| r["median"].as_f64())
                .unwrap_or_else(|| panic!("{target} {metric}"))
        };
        assert!(get("free_extents") >= 1.0);
        assert!(get("free_in_1m_runs_percent") > 50.0, "a nearly empty disk is mostly whole");
        assert!(get("extents_per_file") >= 1.0);
    }
    scratch.assert_clean();
}

#[test]
fn asynchronous_fsync_shares_the_flushes_of_a_slow_disk() {
    let _alone = alone();
    if !loops_possible() || !std::path::Path::new("/dev/fuse").exists() {
        return;
    }
    let scratch = Scratch::new("slow");
    let report = scratch.report(&[
        "fsmark",
        "--quick",
        "--rounds",
        "1",
        "--on",
        "ext4",
        "--disk",
        "slow:2000",
        "--size",
        "512M",
        "--files",
        "100",
        "--iterations",
        "1",
        "--mode",
        "pass,async",
        "--threads",
        "1",
    ]);
    let flushes = |mode| median(&report, "fsmark", mode, "flushes_per_file");
    assert!(flushes("async") * 2.0 < flushes("pass"), "fewer flushes per file");
    assert!(median(&report, "probe", "floor", "write_fdatasync_4k_us") >= 2000.0);
    scratch.assert_clean();
}

#[test]
fn a_limited_disk_is_limited_and_released() {
    let _alone = alone();
    if !loops_possible() {
        return;
    }
    let scratch = Scratch::new("limit");
    let report = scratch.report(&[
        "fsync",
        "--quick",
        "--rounds",
        "1",
        "--on",
        "ext4",
        "--disk",
        "limit:wiops=200",
        "--size",
        "512M",
        "--jobs",
        "1",
        "--seconds",
        "1",
        "--mode",
        "seq",
    ]);
    let writes = median(&report, "fsync", "seq", "writes_per_fsync")
        * median(&report, "fsync", "seq", "fsync_per_s");
    assert!(writes < 300.0, "{writes} writes per second at a limit of 200");
    scratch.assert_clean();
}

#[allow(clippy::zombie_processes)] // The callers wait; a panic here ends the test program.
/// Starts a long run and waits until its file system is mounted.
fn start_long(scratch: &Scratch) -> Child {
    let work = scratch.work();
    let child = scratch
        .command(&[
            "fsync",
            "--on",
            "xfs",
            "--size",
            "512M",
            "--rounds",
            "50",
            "--no-probe",
            "--work",
            &work,
        ])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("starts");
    let begun = Instant::now();
    let here = scratch.dir.to_string_lossy().into_owned();
    loop {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
        if mounts.contains(&here) {
            return child;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "never mounted");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn ctrl_c_takes_everything_down() {
    let _alone = alone();
    if !loops_possible() {
        return;
    }
    let scratch = Scratch::new("ctrl-c");
    let mut child = start_long(&scratch);
    let pid = child.id().to_string();
    std::process::Command::new("kill").args(["-INT", &pid]).status().expect("kill");
    let status = child.wait().expect("ends");
    assert_eq!(status.code(), Some(130));
    scratch.assert_clean();
}

#[test]
fn clean_takes_away_what_a_killed_run_left() {
    let _alone = alone();
    if !loops_possible() {
        return;
    }
    let scratch = Scratch::new("kill");
    let mut child = start_long(&scratch);
    child.kill().expect("killed");
    assert_eq!(child.wait().expect("ends").signal(), Some(9));
    assert_eq!(scratch.loops(), 1, "a kill leaves the loop device");
    let out = scratch.run(&["clean"]);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(String::from_utf8_lossy(&out.stdout).contains("released Loop"));
    scratch.assert_clean();
    let again = scratch.run(&["clean"]);
    assert_eq!(String::from_utf8_lossy(&again.stdout), "nothing to clean\n");
}

/// The `weir` program next to the test's own, when the workspace was built as a whole.
fn weir_program() -> Option<String> {
    let neighbour = std::path::Path::new(env!("CARGO_BIN_EXE_weir-lab")).with_file_name("weir");
    let given = std::env::var_os("WEIR_BIN").map_or(neighbour, std::path::PathBuf::from);
    given.is_file().then(|| given.to_string_lossy().into_owned())
}

#[test]
fn a_weir_mount_is_a_target_like_any_other() {
    let _alone = alone();
    let Some(weir) = weir_program().filter(|_| loops_possible()) else {
        eprintln!("skipped: no `weir` program (build the workspace, or set WEIR_BIN)");
        return;
    };
    let scratch = Scratch::new("mount");
    let report = scratch.report(&[
        "fsmark",
        "--quick",
        "--rounds",
        "1",
        "--on",
        "weir-mount,ext4",
        "--weir-bin",
        &weir,
        "--size",
        "512M",
        "--files",
        "50",
        "--iterations",
        "1",
        "--threads",
        "1",
        "--mode",
        "each",
    ]);
    for target in ["weir-mount", "ext4"] {
        let flushes = rows(&report)
            .find(|r| r["target"] == target && r["metric"] == "flushes_per_file")
            .and_then(|r| r["median"].as_f64());
        assert!(flushes.is_some_and(|f| f > 0.0), "{target}: {flushes:?}");
    }
    scratch.assert_clean();
}
