//! The commands of a mount (`include/weir.h`), from Rust, from C and from the command line. Skipped, with a word, where this
//! machine cannot mount.
#![allow(missing_docs)]

mod common;

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use weir_mount::{client, ioctl};

use common::{Bench, SIGINT, Server, done, refused, weir};

#[test]
fn a_c_program_that_includes_the_header_finds_every_command() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = tempfile::tempdir().unwrap();
    let binary = program.path().join("ioctl");
    let compiled = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(root.join("../../include"))
        .arg(root.join("tests/ioctl.c"))
        .arg("-o")
        .arg(&binary)
        .output();
    let Ok(compiled) = compiled else {
        eprintln!("skipped: no C compiler here");
        return;
    };
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let ran = Command::new(&binary).arg(bench.dir()).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stdout));
    bench.unmount();
}

fn file(bench: &Bench, name: &str) -> File {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(bench.at(name))
        .unwrap()
}

fn fsyncs(bench: &Bench) -> u64 {
    let dir = File::open(bench.dir()).unwrap();
    let text = client::stats(&dir).unwrap();
    let stats: serde_json::Value = serde_json::from_slice(&text).unwrap();
    stats["durability"]["fsyncs"].as_u64().unwrap()
}

/// Takes the server away without a word to the volume, as a power cut would.
fn kill(server: Server) {
    server.signal(9);
    server.end();
}

#[test]
fn a_ranged_sync_through_the_mount_survives_a_kill() {
    let Some(bench) = Bench::new() else { return };
    let server = bench.foreground();
    let table = file(&bench, "table");
    table.write_all_at(&vec![7; 1 << 20], 0).unwrap();
    client::sync_range(&table, 0, 256 << 10, 0).unwrap();
    table.write_all_at(&[8; 4096], 1 << 20).unwrap();
    client::sync_range(&table, 1 << 20, 4096, ioctl::SYNC_START).unwrap();
    let last = client::lsn(&table).unwrap().last;
    client::wait_lsn(&table, last, 0, ioctl::WAIT_PUSH).unwrap();
    client::sync_range(&table, 1 << 20, 4096, ioctl::SYNC_DATA).unwrap();
    drop(table);
    kill(server);
    let _ = weir_mount::mount_point::detach(Path::new(&bench.dir()), true);
    bench.mount(&[]);
    let found = fs::read(bench.at("table")).unwrap();
    assert_eq!(found.len(), (1 << 20) + 4096);
    assert!(found[..256 << 10].iter().all(|byte| *byte == 7));
    assert!(found[1 << 20..].iter().all(|byte| *byte == 8));
    bench.unmount();
}

#[test]
fn a_wait_for_an_operation_nobody_syncs_ends_in_time_and_stops_nobody_else() {
    let Some(bench) = Bench::mounted(&["-o", "threads=2"]) else { return };
    let dir = File::open(bench.dir()).unwrap();
    client::sync_volume(&dir, 0).unwrap();
    fs::write(bench.at("new"), "not synced").unwrap();
    let lsn = client::lsn(&dir).unwrap();
    assert!(lsn.last > lsn.durable, "nobody synced yet");
    let error = client::wait_lsn(&dir, lsn.last, 0, 0).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ETIMEDOUT));
    // More waiters than the server has threads to wait with.
    let waiters: Vec<_> = (0..100)
        .map(|_| {
            let dir = dir.try_clone().unwrap();
            thread::spawn(move || client::wait_lsn(&dir, lsn.last, 30_000_000, 0))
        })
        .collect();
    assert_eq!(fs::read_to_string(bench.at("new")).unwrap(), "not synced");
    let began = Instant::now();
    client::sync_volume(&dir, 0).unwrap();
    for waiter in waiters {
        waiter.join().unwrap().unwrap();
    }
    assert!(began.elapsed() < Duration::from_secs(20), "woken by the sync, not by the time");
    drop(dir);
    bench.unmount();
}

#[test]
fn many_programs_that_sync_at_once_share_flushes_and_hold_no_server_thread() {
    let Some(bench) = Bench::mounted(&["-o", "threads=2"]) else { return };
    let before = fsyncs(&bench);
    let syncers: Vec<_> = (0..16)
        .map(|number| {
            let path = bench.at(&format!("f{number}"));
            thread::spawn(move || {
                for round in 0..20_u8 {
                    let mut file = File::create(&path).unwrap();
                    file.write_all(&[round; 5000]).unwrap();
                    file.sync_all().unwrap();
                    let dir = File::open(path.parent().unwrap()).unwrap();
                    dir.sync_all().unwrap();
                }
            })
        })
        .collect();
    for syncer in syncers {
        syncer.join().unwrap();
    }
    assert_eq!(fsyncs(&bench) - before, 16 * 20 * 2);
    for number in 0..16 {
        assert_eq!(fs::read(bench.at(&format!("f{number}"))).unwrap(), [19; 5000]);
    }
    bench.unmount();
}

#[test]
fn an_unlinked_file_whose_sync_is_under_way_is_purged_in_the_end() {
    let Some(bench) = Bench::mounted(&["-o", "threads=2"]) else { return };
    for round in 0..50 {
        let file = file(&bench, "doomed");
        file.write_all_at(&vec![round; 20_000], 0).unwrap();
        client::sync_range(&file, 0, 0, ioctl::SYNC_START).unwrap();
        fs::remove_file(bench.at("doomed")).unwrap();
    }
    bench.unmount();
    let info = done(&["info", "--json", &bench.volume()]);
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    assert_eq!(info["inodes"], 1, "only the root is left");
    done(&["fsck", &bench.volume()]);
}

#[test]
fn the_command_line_syncs_orders_and_tells() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    let path = bench.at("journal");
    fs::write(&path, vec![1; 100_000]).unwrap();
    let journal = path.to_str().unwrap();
    done(&["sync", "--range", "0:64K", journal]);
    done(&["sync", "--data", journal]);
    done(&["sync", &bench.dir()]);
    let said = refused(2, &["sync", "--range", "0:4K", &bench.dir()]);
    assert!(said.contains("--range is for files"), "{said}");
    let said = refused(1, &["sync", "/tmp"]);
    assert!(said.contains("not on a Weir mount"), "{said}");

    fs::write(bench.at("later"), "x").unwrap();
    let barrier = done(&["barrier", "--wait", &bench.dir()]);
    assert!(barrier.starts_with("barrier at lsn ") && barrier.contains(", durable"), "{barrier}");

    let text = done(&["stat", &bench.dir()]);
    for expected in
        ["[durability]", "@flush_ns: ", "@data_phase_ns: ", "|@", "state: ok", "phase: "]
    {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let of_volume = done(&["stat", "--json", &bench.volume()]);
    let stats: serde_json::Value = serde_json::from_str(&of_volume).unwrap();
    assert!(stats["durability"]["flush_ns"]["count"].as_u64().unwrap() >= 3);

    let watched = done(&["stat", "--watch", "--json", "--count", "1", &bench.dir()]);
    let added: serde_json::Value = serde_json::from_str(watched.lines().next().unwrap()).unwrap();
    assert_eq!(added["durability"]["fsyncs"], 0, "nothing was synced meanwhile");
    bench.unmount();
    // Nobody uses it: what the superblock says.
    assert!(done(&["stat", &bench.volume()]).contains("state       clean"));
    let said = refused(1, &["stat", "--watch", &bench.volume()]);
    assert!(said.contains("nothing to watch"), "{said}");
}

#[test]
fn statistics_of_a_volume_that_a_program_has_open_are_not_to_be_had_and_it_says_so() {
    let Some(bench) = Bench::new() else { return };
    let volume = weir::Volume::open(Path::new(&bench.volume()), weir::VolumeOptions::default());
    let volume = volume.unwrap();
    let said = refused(1, &["stat", &bench.volume()]);
    assert!(said.contains("in use") && said.contains("Volume::stats"), "{said}");
    volume.close().unwrap();
}

#[test]
fn interrupting_a_watch_ends_it_with_whole_lines() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    let watch = Command::new(env!("CARGO_BIN_EXE_weir"))
        .args(["stat", "--watch", "--json", &bench.dir()])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    thread::sleep(Duration::from_millis(1500));
    let server = Server(watch);
    server.signal(SIGINT);
    let Server(child) = server;
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.ends_with('\n'));
    for line in text.lines() {
        serde_json::from_str::<serde_json::Value>(line).unwrap();
    }
    bench.unmount();
    assert!(!weir(&["stat", &bench.dir()]).status.success());
}
