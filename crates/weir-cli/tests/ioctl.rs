//! The commands of a mount (`include/weir.h`), from Rust, from C and from the command line. Skipped, with a word, where this
//! machine cannot mount.
#![allow(missing_docs)]

mod common;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use weir_mount::{client, ioctl};

use common::{Bench, SIGINT, Server, done, eventually, refused, weir};

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

#[test]
fn statistics_are_read_whole_however_many_read_them_at_a_time() {
    const READERS: u32 = 40;
    let Some(bench) = Bench::mounted(&[]) else { return };
    let dir = File::open(bench.dir()).unwrap();
    thread::scope(|scope| {
        for _ in 0..READERS {
            scope.spawn(|| {
                for _ in 0..20 {
                    let text = client::stats(&dir).unwrap();
                    let stats: serde_json::Value = serde_json::from_slice(&text).unwrap();
                    assert!(stats["durability"]["fsyncs"].is_u64());
                }
            });
        }
    });
    drop(dir);
    bench.unmount();
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
    for expected in [
        "[durability]",
        "@flush_ns: ",
        "@data_phase_ns: ",
        "|@",
        "state: ok",
        "phase: ",
        "writers: ",
    ] {
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

fn ino(file: &File) -> u64 {
    file.metadata().unwrap().ino()
}

fn refused_with<T: std::fmt::Debug>(result: io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

#[test]
fn a_batch_of_many_portions_is_seen_at_once_by_programs_that_had_looked_before_and_survives_a_kill()
{
    let Some(bench) = Bench::new() else { return };
    let server = bench.foreground();
    let root = File::open(bench.dir()).unwrap();
    let table = file(&bench, "table");
    table.write_all_at(&vec![1; 100_000], 0).unwrap();
    fs::write(bench.at("old"), "old").unwrap();
    fs::write(bench.at("other-name-of-old"), "replaced").unwrap();
    // What is not synced is not part of a batch that follows.
    client::sync_volume(&root, 0).unwrap();
    // The kernel has names, missing names, attributes, pages and the list of the directory in memory.
    assert!(fs::read(bench.at("table")).unwrap() == vec![1; 100_000]);
    assert!(!bench.at("new").exists());
    let listed = || fs::read_dir(bench.dir()).unwrap().count();
    assert_eq!(listed(), 3);

    let mut batch = client::Batch::begin(&table).unwrap();
    batch.write(ino(&table), 50_000, &vec![2; 100_000]).unwrap();
    let new = batch.make(ino(&root), b"new", libc::S_IFREG | 0o644).unwrap();
    batch.write(new, 0, b"new content").unwrap();
    batch.rename(ino(&root), b"old", ino(&root), b"other-name-of-old").unwrap();
    batch.link(ino(&table), ino(&root), b"link").unwrap();
    batch.commit(true).unwrap();

    let check = || {
        let mut expected = vec![1; 50_000];
        expected.resize(150_000, 2);
        assert!(fs::read(bench.at("table")).unwrap() == expected);
        assert_eq!(fs::read(bench.at("new")).unwrap(), b"new content");
        assert_eq!(fs::read(bench.at("other-name-of-old")).unwrap(), b"old");
        assert!(!bench.at("old").exists());
        assert_eq!(fs::metadata(bench.at("link")).unwrap().nlink(), 2);
        assert_eq!(listed(), 4);
    };
    check();
    assert_eq!(table.metadata().unwrap().nlink(), 2);
    drop((root, table));
    kill(server);
    let _ = weir_mount::mount_point::detach(Path::new(&bench.dir()), true);
    bench.mount(&[]);
    check();
    bench.unmount();
    done(&["fsck", &bench.volume()]);
}

/// The kernel appends where it takes the end to be, and does not ask.
#[test]
fn who_appends_after_a_batch_does_so_behind_what_it_has_added() {
    for transport in ["io_uring", "no_io_uring"] {
        let Some(bench) = Bench::mounted(&["-o", transport]) else { return };
        let table = file(&bench, "table");
        let mut log = OpenOptions::new().append(true).create(true).open(bench.at("log")).unwrap();
        let mut expected = Vec::new();
        for round in 0..5_usize {
            log.write_all(b"appended,").unwrap();
            expected.extend_from_slice(b"appended,");
            let added = vec![b'a' + round as u8; [1, 4087, 5, 8192, 100_000][round]];
            let mut batch = client::Batch::begin(&table).unwrap();
            batch.write(ino(&log), expected.len() as u64, &added).unwrap();
            batch.commit(false).unwrap();
            expected.extend_from_slice(&added);
        }
        log.write_all(b"end").unwrap();
        expected.extend_from_slice(b"end");
        assert!(fs::read(bench.at("log")).unwrap() == expected);
        drop((table, log));
        bench.unmount();
    }
}

/// The kernel sees a command, and no file that is opened for writing.
#[test]
fn a_batch_writes_to_a_program_that_is_being_run() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    let path = bench.at("sleep");
    // By another process: this one forks in other tests, and would have it open for writing there.
    assert!(
        Command::new("cp").args(["/bin/sleep", path.to_str().unwrap()]).status().unwrap().success()
    );
    let mut run = Command::new(&path).arg("100").spawn().unwrap();
    let busy = OpenOptions::new().write(true).open(&path).unwrap_err();
    let program = File::open(&path).unwrap();
    let table = file(&bench, "table");
    let mut batch = client::Batch::begin(&table).unwrap();
    batch.write(ino(&program), program.metadata().unwrap().len(), b"added").unwrap();
    let committed = batch.commit(false);
    run.kill().unwrap();
    run.wait().unwrap();
    assert_eq!(busy.raw_os_error(), Some(libc::ETXTBSY));
    committed.unwrap();
    assert!(fs::read(&path).unwrap().ends_with(b"added"));
    drop((table, program));
    bench.unmount();
}

/// With `writeback_cache` the kernel appended over what a batch had added, since it goes by its own size of a file.
#[test]
fn a_batch_that_changes_a_size_which_the_kernel_keeps_is_refused() {
    let Some(bench) = Bench::mounted(&["-o", "writeback_cache"]) else { return };
    let root = File::open(bench.dir()).unwrap();
    let mut table = file(&bench, "table");
    table.write_all(b"one,").unwrap();
    let commit = |record: &dyn Fn(&mut client::Batch<'_>) -> io::Result<()>| {
        let mut batch = client::Batch::begin(&table).unwrap();
        record(&mut batch).unwrap();
        batch.commit(true)
    };
    let table_ino = ino(&table);
    for size in [2, 100] {
        let cut = commit(&|batch| batch.truncate(table_ino, size));
        assert_eq!(refused_with(cut), libc::EOPNOTSUPP, "{size}");
    }
    let longer = commit(&|batch| batch.write(table_ino, 4, b"two,"));
    assert_eq!(refused_with(longer), libc::EOPNOTSUPP);
    commit(&|batch| {
        batch.truncate(table_ino, 0)?;
        batch.write(table_ino, 0, b"ONE,")?;
        let new = batch.make(ino(&root), b"new", libc::S_IFREG | 0o644)?;
        batch.write(new, 0, b"of any size")
    })
    .unwrap();
    assert_eq!(fs::read(bench.at("new")).unwrap(), b"of any size");
    let mut end = OpenOptions::new().append(true).open(bench.at("table")).unwrap();
    end.write_all(b"two,").unwrap();
    assert_eq!(fs::read(bench.at("table")).unwrap(), b"ONE,two,");
    drop((root, table, end));
    bench.unmount();
}

#[test]
fn a_batch_that_fails_changes_nothing_and_one_that_is_not_committed_is_forgotten() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    let root = File::open(bench.dir()).unwrap();
    let table = file(&bench, "table");
    table.write_all_at(b"before", 0).unwrap();
    let stage = |last: fn(&mut client::Batch<'_>, u64) -> io::Result<()>| {
        let mut batch = client::Batch::begin(&table).unwrap();
        batch.write(ino(&table), 0, b"during").unwrap();
        batch.make(ino(&root), b"new", libc::S_IFREG | 0o644).unwrap();
        last(&mut batch, ino(&root)).unwrap();
        batch
    };
    let missing = stage(|batch, root| batch.unlink(root, b"missing"));
    assert_eq!(refused_with(missing.commit(true)), libc::ENOENT);
    let taken = stage(|batch, root| batch.make(root, b"table", libc::S_IFREG).map(drop));
    assert_eq!(refused_with(taken.commit(false)), libc::EEXIST);
    let nowhere = stage(|batch, _| batch.write(999_999, 0, b"x"));
    assert_eq!(refused_with(nowhere.commit(true)), libc::ENOENT);
    let too_far = stage(|batch, root| batch.write(root, 0, b"a directory has no content"));
    assert_eq!(refused_with(too_far.commit(true)), libc::EISDIR);
    let too_large = stage(|batch, root| batch.truncate(root, u64::MAX));
    assert_eq!(refused_with(too_large.commit(true)), libc::EFBIG);
    let malformed = stage(|batch, root| batch.unlink(root, b"a/b"));
    assert_eq!(refused_with(malformed.commit(true)), libc::EINVAL);
    drop(stage(|_, _| Ok(())));
    // The number of one file's batch is none of another's.
    let other = file(&bench, "other");
    let mine = client::Batch::begin(&table).unwrap();
    let theirs = client::Batch::begin(&other).unwrap();
    assert_ne!(mine.id(), theirs.id());
    drop((mine, theirs));
    drop(other);

    assert_eq!(fs::read(bench.at("table")).unwrap(), b"before");
    assert!(!bench.at("new").exists());
    assert_eq!(refused_with(client::Batch::begin(&root)), libc::EISDIR);
    drop((root, table));
    bench.unmount();
    done(&["fsck", &bench.volume()]);
}

#[test]
fn what_a_program_staged_and_left_is_dropped_when_its_file_is_closed() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    for _ in 0..2 * weir_mount::batch::MAX_BATCHES {
        let file = file(&bench, "file");
        let mut batch = client::Batch::begin(&file).unwrap();
        batch.write(ino(&file), 0, &vec![1; 40_000]).unwrap();
        // As if the program had died: without a word.
        std::mem::forget(batch);
    }
    let file = file(&bench, "file");
    let staged: Vec<_> = (0..weir_mount::batch::MAX_BATCHES)
        .map_while(|_| client::Batch::begin(&file).ok())
        .collect();
    // Closes are told to the server a little later.
    assert!(staged.len() > weir_mount::batch::MAX_BATCHES / 2, "{}", staged.len());
    drop(staged);
    assert_eq!(fs::read(bench.at("file")).unwrap(), b"");
    drop(file);
    bench.unmount();
}

#[test]
fn a_batch_of_a_user_who_is_not_the_owner_is_refused() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    if !runs_as_root() {
        eprintln!("skipped: only root can become somebody else");
        return bench.unmount();
    }
    let path = bench.at("theirs");
    fs::write(&path, "x").unwrap();
    std::os::unix::fs::chown(&path, Some(1234), Some(1234)).unwrap();
    // struct weir_batch is 24 bytes: _IOWR(0xB7, 10, 24).
    let script = format!(
        "import fcntl, os, sys\nos.setgid(1234); os.setuid(1234)\nfd = os.open({path:?}, os.O_RDWR)\n\
         try: fcntl.ioctl(fd, 0xC018B70A, bytearray(24))\n\
         except OSError as error: sys.exit(error.errno)\n"
    );
    let Ok(ran) = Command::new("python3").args(["-c", &script]).status() else {
        eprintln!("skipped: no python3 here");
        return bench.unmount();
    };
    assert_eq!(ran.code(), Some(libc::EPERM));
    bench.unmount();
}

/// What `BEGIN` of a batch answers to `program`, as whom `wrapper` runs it: an errno, or 0. `None`: it cannot be run so here.
fn begin_as(wrapper: &[&str], path: &Path) -> Option<i32> {
    // struct weir_batch is 24 bytes: _IOWR(0xB7, 10, 24).
    let script = "import fcntl, os, sys\nfd = os.open(sys.argv[1], os.O_RDWR)\n\
                  try: fcntl.ioctl(fd, 0xC018B70A, bytearray(24))\n\
                  except OSError as error: sys.exit(100 + error.errno)\n";
    let (program, arguments) = wrapper.split_first()?;
    let arguments = [arguments, &["python3", "-c", script]].concat();
    let ran = Command::new(program).args(arguments).arg(path).status();
    match ran.ok()?.code()? {
        0 => Some(0),
        code => Some(code - 100).filter(|errno| *errno > 0),
    }
}

#[test]
fn a_superuser_who_is_shut_in_has_no_batches() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    let path = bench.at("file");
    fs::write(&path, "x").unwrap();
    if begin_as(&["env"], &path) != Some(0) {
        eprintln!("skipped: no python3 here");
        return bench.unmount();
    }
    for wrapper in [
        &["setpriv", "--bounding-set=-dac_override"][..],
        &["setpriv", "--bounding-set=-dac_read_search"],
        &["unshare", "--user", "--map-root-user"],
    ] {
        match begin_as(wrapper, &path) {
            Some(errno) => assert_eq!(errno, libc::EPERM, "{wrapper:?}"),
            None => eprintln!("skipped: {wrapper:?} does not work here"),
        }
    }
    bench.unmount();
}

#[test]
fn a_mount_that_the_kernel_knows_to_be_read_only_has_no_batches() {
    let Some(bench) = Bench::mounted(&[]) else { return };
    fs::write(bench.at("file"), "before").unwrap();
    let reader = File::open(bench.at("file")).unwrap();
    let batch = client::Batch::begin(&reader);
    assert_eq!(refused_with(batch), libc::EBADF, "nor before that, where nothing may be written");
    let dir = bench.dir();
    // Who has it open for writing keeps it from being remounted: a program that another test has just forked has, for a moment.
    eventually("remounted", || {
        Command::new("mount").args(["-i", "-o", "remount,ro", &dir]).status().unwrap().success()
    });
    assert_eq!(refused_with(client::Batch::begin(&reader)), libc::EBADF);
    assert_eq!(refused_with(File::options().write(true).open(bench.at("file"))), libc::EROFS);
    drop(reader);
    bench.unmount();
}

fn runs_as_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}
