//! Loop file systems, slow and limited disks, and what is left after a kill. Need root; skip
//! themselves, and say so, where it is missing.

mod common;

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use common::{Needs, Scratch, SmallRun, figure, in_scratch, median, rows, weir_program};

/// A file system of half a GiB and a hundred files.
const SMALL: &str = "--size 512M --files 100 --iterations 1 --threads 1";

#[test]
fn kernel_file_systems_share_a_disk_and_report_device_truth() {
    in_scratch("kernel", Needs::Loops, |scratch| {
        let options = format!("{SMALL} --rounds 2 --mode pass,async --depth 64");
        let report = scratch.quick("fsmark", "xfs,ext4,btrfs", &options);
        for target in ["xfs", "ext4", "btrfs"] {
            assert!(figure(&report, target, "pass", "flushes_per_file") > 0.0, "{target}");
            let files = rows(&report)
                .find(|r| r["target"] == target && r["metric"] == "files_per_s")
                .expect("files_per_s");
            assert_eq!(files["rounds"].as_array().map(Vec::len), Some(2));
            assert_eq!(files["baseline"], "xfs");
            assert!(files["floor_ratio"].as_f64().is_some_and(|f| f > 0.0), "{files}");
        }
    });
}

#[test]
fn every_experiment_runs_on_file_systems_and_on_the_library() {
    in_scratch("every", Needs::Loops, |scratch| {
        for name in
            ["fsmark", "fsync", "checkpoint", "fastread", "ingest", "aging", "simoop", "foundation"]
        {
            let small = SmallRun::of(name);
            // Two targets that everything differs between; the others have tests of their own.
            let options = format!("--no-probe --size 1G {}", small.options);
            let report = scratch.quick(name, "xfs,weir", &options);
            small.check(&report, "xfs");
            small.check(&report, "weir");
        }
    });
}

#[test]
fn the_library_is_measured_on_the_loop_device_and_on_the_file_in_one_run() {
    in_scratch("weir", Needs::Loops, |scratch| {
        // On a disk whose flush takes so long that tickets gather behind it, however slow the processor is.
        let options = format!("{SMALL} --no-probe --disk slow:2000 --mode each,async --depth 64");
        let report = scratch.quick("fsmark", "ext4,weir,weir-loop", &options);
        for target in ["weir", "weir-loop"] {
            let flushes = |mode| figure(&report, target, mode, "flushes_per_file");
            assert!(flushes("each") > 0.0, "{target}");
            assert!(flushes("async") * 4.0 < flushes("each"), "{target}: tickets share flushes");
            let info = report["targets"].as_array().expect("targets");
            let on = info.iter().find(|t| t["name"] == target).map(|t| t["on"].to_string());
            let on_loop = on.is_some_and(|on| on.contains("/dev/loop"));
            assert_eq!(on_loop, target == "weir-loop", "the report says which is which");
        }
        assert_eq!(report["not_offered"].as_array().map(Vec::len), Some(2), "libaio only");
    });
}

#[test]
fn tickets_are_held_while_flushes_are() {
    in_scratch("tickets", Needs::Loops, |scratch| {
        let options = "--no-probe --size 512M --files 500 --tickets 5000";
        let report = scratch.quick("tickets", "ext4,weir", options);
        assert!(figure(&report, "weir", "submit", "submit_mean_us") > 0.0);
        assert!(figure(&report, "weir", "held", "tickets_in_flight") >= 4500.0);
        let lacking = report["not_offered"].as_array().expect("list");
        assert!(lacking.iter().all(|s| s["target"] == "ext4" && s["failed"] == false));
    });
}

#[test]
fn programs_work_on_mounts_and_leave_nothing_behind() {
    in_scratch("programs", Needs::Loops, |scratch| {
        let options =
            "--no-probe --size 1G --seconds 0.3 --clients 2 --mode sqlite,redis,rocksdb,dpkg";
        let report = scratch.quick("programs", "ext4,weir", options);
        let transactions = |mode| figure(&report, "ext4", mode, "transactions_per_s");
        for mode in
            ["sqlite-wal", "sqlite-delete", "sqlite-delete-apart", "redis", "rocksdb", "dpkg"]
        {
            let flushes = figure(&report, "ext4", mode, "flushes_per_transaction");
            assert!(transactions(mode) > 0.0 && flushes > 0.0, "{mode} waits for the disk");
            assert!(figure(&report, "ext4", mode, "cpu_us_per_transaction") > 0.0, "{mode}");
        }
        assert!(figure(&report, "ext4", "redis", "transaction_count") > 0.0);
        let lacking = report["not_offered"].as_array().expect("list");
        assert!(lacking.iter().all(|s| s["target"] == "weir" && s["failed"] == false));
    });
}

/// Its server refuses to run as root, and whoever it runs as must get to the work directory.
#[test]
fn a_server_that_refuses_to_run_as_root_works_on_a_mount() {
    in_scratch("postgres", Needs::Loops, |scratch| {
        let work = format!("/var/tmp/weir-lab-test-{}", std::process::id());
        std::fs::create_dir(&work).expect("work directory");
        let json = scratch.json();
        let out = scratch.run(&[
            "programs",
            "--quick",
            "--on",
            "ext4",
            "--no-probe",
            "--size",
            "1G",
            "--rounds",
            "1",
            "--seconds",
            "1",
            "--clients",
            "2",
            "--mode",
            "postgres",
            "--work",
            &work,
            "--json",
            &json,
        ]);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "{said}");
        std::fs::remove_dir(&work).expect("nothing is left in it");
        let report = std::fs::read(json).expect("report");
        let report = serde_json::from_slice(&report).expect("JSON");
        assert!(figure(&report, "ext4", "postgres", "transactions_per_s") > 0.0);
        assert!(figure(&report, "ext4", "postgres", "transaction_p50_us") > 0.0);
    });
}

#[test]
fn free_space_is_read_from_every_file_system() {
    in_scratch("aging", Needs::Loops, |scratch| {
        let targets = ["xfs", "ext4", "btrfs", "weir"];
        let options = "--no-probe --size 640M --files 100 --mode copy-close";
        let report = scratch.quick("aging", &targets.join(","), options);
        for target in targets {
            let get = |metric| figure(&report, target, "copy-close", metric);
            assert!(get("free_extents") >= 1.0, "{target}");
            assert!(get("free_in_1m_runs_percent") > 50.0, "a nearly empty disk is mostly whole");
        }
    });
}

#[test]
fn asynchronous_fsync_shares_the_flushes_of_a_slow_disk() {
    if !std::path::Path::new("/dev/fuse").exists() {
        return;
    }
    in_scratch("slow", Needs::Loops, |scratch| {
        let options = format!("{SMALL} --disk slow:2000 --mode each,async --depth 64");
        let report = scratch.quick("fsmark", "ext4,weir", &options);
        for target in ["ext4", "weir"] {
            let flushes = |mode| figure(&report, target, mode, "flushes_per_file");
            assert!(flushes("async") * 2.0 < flushes("each"), "{target}: fewer flushes per file");
        }
        assert!(median(&report, "probe", "floor", "write_fdatasync_4k_us") >= 2000.0);
        let text = scratch.run(&["check", "--table", &scratch.json()]).stdout;
        let text = String::from_utf8_lossy(&text).into_owned();
        assert!(text.contains("| slow:2000 | weir: fsmark asynchronous"), "{text}");
    });
}

#[test]
fn a_limited_disk_is_limited_and_released() {
    in_scratch("limit", Needs::Loops, |scratch| {
        let options = "--disk limit:wiops=200 --size 512M --jobs 1 --seconds 1 --mode seq";
        let report = scratch.quick("fsync", "ext4,weir", options);
        for target in ["ext4", "weir"] {
            let get = |metric| figure(&report, target, "seq", metric);
            let writes = get("writes_per_fsync") * get("fsync_per_s");
            assert!(writes < 300.0, "{target}: {writes} writes per second at a limit of 200");
        }
    });
}

#[test]
fn what_was_synced_is_there_after_a_crash_of_every_target_that_can_be_stopped() {
    in_scratch("recovery", Needs::Loops, |scratch| {
        let options = "--no-probe --size 512M --mode recovery";
        let report = scratch.quick("foundation", "xfs,ext4,weir,weir-loop", options);
        for target in ["xfs", "ext4", "weir", "weir-loop"] {
            assert!(figure(&report, target, "recovery", "recovery_ms") > 0.0, "{target}");
            assert!(figure(&report, target, "recovery", "synced_files") > 0.0, "{target}");
        }
        let full = figure(&report, "weir", "recovery", "log_full_percent");
        assert!(full > 5.0, "{full} % of the log to recover");
    });
}

#[test]
fn foundation_judges_streams_by_the_bare_disk() {
    in_scratch("foundation", Needs::Loops, |scratch| {
        let options = "--size 512M --files 1000 --sequential-mib 16 --synced-files 50 \
                       --mode create-fsync,append-64k,write-1m,read-1m,untar,directories,directory";
        let report = scratch.quick("foundation", "xfs,weir,raw", options);
        for target in ["xfs", "weir", "raw"] {
            for mode in ["write-1m", "read-1m"] {
                assert!(figure(&report, target, mode, "mib_per_s") > 0.0, "{target} {mode}");
            }
        }
        for target in ["xfs", "weir"] {
            for mode in ["one-directory", "many-directories"] {
                assert!(figure(&report, target, mode, "last_over_first_tenth") > 0.0);
                assert!(figure(&report, target, mode, "reads_per_cold_lookup") > 0.0);
            }
            assert!(figure(&report, target, "create-fsync", "flushes_per_file") > 0.0);
        }
        assert!(figure(&report, "xfs", "untar", "total_s") > 0.0);
        let lacking = report["not_offered"].as_array().expect("list");
        assert!(lacking.iter().all(|s| s["failed"] == false), "{lacking:?}");
    });
}

#[allow(clippy::zombie_processes)] // The callers wait; a panic here ends the test program.
/// Starts a long run and waits until its file system is mounted.
fn start_long(scratch: &Scratch) -> Child {
    let work = scratch.work();
    let options = "fsync --on xfs --size 512M --rounds 50 --no-probe --work";
    let child = scratch
        .command(&options.split(' ').chain([work.as_str()]).collect::<Vec<_>>())
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
    in_scratch("ctrl-c", Needs::Loops, |scratch| {
        let mut child = start_long(scratch);
        let pid = child.id().to_string();
        std::process::Command::new("kill").args(["-INT", &pid]).status().expect("kill");
        let status = child.wait().expect("ends");
        assert_eq!(status.code(), Some(130));
    });
}

#[test]
fn clean_takes_away_what_a_killed_run_left() {
    in_scratch("kill", Needs::Loops, |scratch| {
        let mut child = start_long(scratch);
        child.kill().expect("killed");
        assert_eq!(child.wait().expect("ends").signal(), Some(9));
        assert_eq!(scratch.loops(), 1, "a kill leaves the loop device");
        let out = scratch.run(&["clean"]);
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        assert!(String::from_utf8_lossy(&out.stdout).contains("released Loop"));
        scratch.assert_clean();
        let again = scratch.run(&["clean"]);
        assert_eq!(String::from_utf8_lossy(&again.stdout), "nothing to clean\n");
    });
}

#[test]
fn a_weir_mount_is_a_target_like_any_other() {
    let Some(weir) = weir_program() else { return };
    in_scratch("mount", Needs::Loops, |scratch| {
        let options = format!("{SMALL} --weir-bin {weir} --mode each");
        let report = scratch.quick("fsmark", "weir-mount,weir-mount-loop,ext4", &options);
        for target in ["weir-mount", "weir-mount-loop", "ext4"] {
            assert!(figure(&report, target, "each", "flushes_per_file") > 0.0, "{target}");
        }
    });
}

#[test]
fn mounts_with_different_options_are_compared_in_one_run_and_the_report_says_which() {
    let Some(weir) = weir_program() else { return };
    in_scratch("mount-options", Needs::Loops, |scratch| {
        let options =
            format!("{SMALL} --weir-bin {weir} --mode each --mount-option max_background=9");
        let targets = ["weir-mount", "weir-mount+no_io_uring+threads=3"];
        let report = scratch.quick("fsmark", &targets.join(","), &options);
        for (target, told) in targets.into_iter().zip(["", ",no_io_uring,threads=3"]) {
            assert!(figure(&report, target, "each", "files_per_s") > 0.0, "{target}");
            let infos = report["targets"].as_array().expect("an array");
            let info = infos.iter().find(|info| info["name"] == target).expect("it is there");
            let options = info["options"].as_str().expect("a string");
            let told = format!("(weir mount -o noatime,max_background=9{told})");
            assert!(options.ends_with(&told), "{options}");
        }
    });
}

#[test]
fn a_killed_mount_recovers_what_was_synced() {
    let Some(weir) = weir_program() else { return };
    in_scratch("mount-kill", Needs::Loops, |scratch| {
        let options = format!("--no-probe --size 512M --weir-bin {weir} --mode recovery,untar");
        let report = scratch.quick("foundation", "weir-mount", &options);
        assert!(figure(&report, "weir-mount", "recovery", "synced_files") > 0.0);
        assert!(figure(&report, "weir-mount", "untar", "total_s") > 0.0);
    });
}
