//! When there are rings, and what a ring that fails does to programs. Skipped, with a word, where this machine cannot mount.
//!
//! `unsafe` here: taking a ring's descriptor away from its thread, which is how a ring is made to fail.
#![allow(missing_docs, unsafe_code)]

mod common;

use std::fs;
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use weir_mount::FileSystemOps;

/// Rings are told apart by when they came.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn has_thread(prefix: &str) -> bool {
    let Ok(tasks) = fs::read_dir("/proc/self/task") else { return false };
    tasks.flatten().any(|task| {
        fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.starts_with(prefix))
    })
}

/// The kernel has rings; root can have them offered.
fn has_rings() -> bool {
    let has = Path::new("/sys/module/fuse/parameters/enable_uring").exists();
    if !has {
        eprintln!("the rings were not tested: the kernel does not have them");
    }
    has
}

#[test]
fn rings_are_used_where_the_kernel_has_them_and_the_offer_is_as_it_was_afterwards() {
    let offer = || fs::read_to_string("/sys/module/fuse/parameters/enable_uring").ok();
    let _one_at_a_time = ONE_AT_A_TIME.lock();
    let before = offer();
    let ops: std::sync::Arc<dyn FileSystemOps> = common::MemoryFs::new();
    let Some(mount) = common::TestMount::new(ops, "io_uring") else { return };
    assert_eq!(offer(), before);
    fs::write(mount.path().join("file"), "x").unwrap();
    assert_eq!(has_thread("weir-fuse-"), has_rings());
}

fn rings_of_this_process() -> Vec<RawFd> {
    let descriptors = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let is_ring = |path: &Path| {
        fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains("[io_uring]"))
    };
    let rings = descriptors.filter(|entry| is_ring(&entry.path()));
    rings.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Asks the mount for something on every core, in turn.
fn ask_on_every_core(dir: &Path) -> Vec<std::io::Result<()>> {
    let cores = thread::available_parallelism().unwrap().get();
    let results = (0..cores).map(|core| {
        let mut set = rustix::thread::CpuSet::new();
        set.set(core);
        rustix::thread::sched_setaffinity(None, &set).unwrap();
        fs::write(dir.join(format!("on-{core}")), "x")
    });
    results.collect()
}

#[test]
fn a_ring_that_fails_ends_the_mount_with_errors_and_not_with_programs_that_wait() {
    if !has_rings() {
        return;
    }
    let _one_at_a_time = ONE_AT_A_TIME.lock();
    let before = rings_of_this_process();
    let ops = common::MemoryFs::new();
    let Some(mount) = common::TestMount::new(ops.clone(), "io_uring") else { return };
    assert!(ask_on_every_core(mount.path()).iter().all(Result::is_ok));
    let victim = rings_of_this_process().into_iter().find(|ring| !before.contains(ring)).unwrap();
    let null = fs::File::open("/dev/null").unwrap();
    // SAFETY: the number stays open, and its owner closes it once; what it meets there now is an error, which is the point.
    assert_eq!(unsafe { libc::dup2(null.as_raw_fd(), victim) }, victim);

    let (done, is_done) = mpsc::channel();
    let dir = mount.path().to_path_buf();
    thread::spawn(move || done.send(ask_on_every_core(&dir)));
    let answers = is_done.recv_timeout(Duration::from_secs(60)).expect("a program waits for ever");
    assert!(answers.iter().any(Result::is_err), "{answers:?}");
    let ended = mount.join().unwrap_err().to_string();
    assert!(ended.contains("failed") && ended.contains("the mount was ended"), "{ended}");
    assert!(ops.panics().iter().any(|text| text.contains("the ring of core")));
}

/// The scheduling class of each ring's thread, as the kernel numbers them (`SCHED_*`).
fn classes() -> Vec<i32> {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    let class = |task: fs::DirEntry| {
        let stat = fs::read_to_string(task.path().join("stat")).ok()?;
        let (name, fields) = stat.split_once('(')?.1.rsplit_once(") ")?;
        // The fields that follow begin with the third of `proc(5)`; the policy is the 41st.
        name.starts_with("weir-fuse-").then(|| fields.split(' ').nth(38)?.parse().ok()).flatten()
    };
    tasks.filter_map(class).collect()
}

#[test]
fn a_program_that_changes_the_core_is_lent_a_place_and_no_thread_sleeps_in_that_class_for_long() {
    let cores = thread::available_parallelism().unwrap().get();
    if !has_rings() || cores < 2 || !weir::sync::may_change_class() {
        eprintln!("skipped: no rings, one core, or a process that may not change classes");
        return;
    }
    let _one_at_a_time = ONE_AT_A_TIME.lock();
    let Some(mount) = common::TestMount::new(common::MemoryFs::new(), "io_uring") else { return };
    let file = fs::File::create(mount.path().join("file")).unwrap();
    let mut was_lent = false;
    for n in 0..400_u32 {
        let mut set = rustix::thread::CpuSet::new();
        set.set(n as usize % 2);
        rustix::thread::sched_setaffinity(None, &set).unwrap();
        let mode = rustix::fs::Mode::from_bits_truncate(0o600 + n % 8);
        rustix::fs::fchmod(&file, mode).unwrap();
        was_lent |= classes().contains(&libc::SCHED_IDLE);
    }
    assert!(was_lent, "{:?}", classes());
    let patient = std::time::Instant::now();
    while classes().contains(&libc::SCHED_IDLE) {
        assert!(patient.elapsed() < Duration::from_secs(30), "{:?}", classes());
        thread::sleep(Duration::from_millis(10));
    }
    assert!(!classes().is_empty());
}

/// A hand-over to a thread of another core costs some ten round trips.
#[test]
fn what_may_wait_is_served_on_the_core_that_asks_for_it() {
    if !has_rings() {
        return;
    }
    let _one_at_a_time = ONE_AT_A_TIME.lock();
    let ops = common::MemoryFs::new();
    let Some(mount) = common::TestMount::new(ops.clone(), "io_uring") else { return };
    let mut set = rustix::thread::CpuSet::new();
    set.set(0);
    rustix::thread::sched_setaffinity(None, &set).unwrap();
    let file = fs::File::create(mount.path().join("file")).unwrap();
    (0..200).for_each(|size| file.set_len(size).unwrap());
    let resized_by = ops.resized_by.lock().unwrap();
    assert_eq!(resized_by.len(), 200);
    let others: Vec<_> = resized_by.iter().filter(|name| *name != "weir-wait-0").collect();
    assert!(others.is_empty(), "{} on {}", others.len(), others[0]);
}

#[test]
fn syncs_are_answered_where_others_compute_on_the_same_core() {
    if !has_rings() {
        return;
    }
    let _one_at_a_time = ONE_AT_A_TIME.lock();
    let Some(mount) = common::TestMount::new(common::MemoryFs::new(), "io_uring") else { return };
    let file = fs::File::create(mount.path().join("file")).unwrap();
    let stay = || {
        let mut set = rustix::thread::CpuSet::new();
        set.set(0);
        rustix::thread::sched_setaffinity(None, &set).unwrap();
    };
    let done = AtomicBool::new(false);
    let patient = std::time::Instant::now();
    let was_late = thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                stay();
                while !done.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let synced = scope.spawn(|| {
            stay();
            let mut was_late = false;
            // Until the queue's thread has seen that it is late, and then for as long as it remembers.
            while !was_late && patient.elapsed() < Duration::from_secs(10) {
                file.sync_all().unwrap();
                was_late = classes().contains(&libc::SCHED_OTHER);
            }
            (0..50).for_each(|_| file.sync_all().unwrap());
            was_late
        });
        let was_late = synced.join();
        done.store(true, Ordering::Relaxed);
        was_late
    });
    if !was_late.unwrap() {
        eprintln!("skipped: the queue's thread was never late");
    }
}

/// How often threads whose names begin so have gone to sleep.
fn sleeps_of(prefix: &str) -> u64 {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    let status = tasks.filter_map(|task| fs::read_to_string(task.path().join("status")).ok());
    let named = status.filter(|text| text.starts_with(&format!("Name:\t{prefix}")));
    let sleeps = |text: String| {
        let line = text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        line.unwrap().trim().parse::<u64>().unwrap()
    };
    named.map(sleeps).sum()
}

#[test]
fn threads_of_a_mount_take_no_signals_of_the_program() {
    let _one_at_a_time = ONE_AT_A_TIME.lock();
    let Some(mount) = common::TestMount::new(common::MemoryFs::new(), "io_uring") else { return };
    let file = fs::File::create(mount.path().join("f")).unwrap();
    file.sync_all().unwrap();
    file.set_len(4096).unwrap();
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    let status = tasks.filter_map(|task| fs::read_to_string(task.path().join("status")).ok());
    let ours: Vec<_> = status.filter(|text| text.starts_with("Name:\tweir-")).collect();
    assert_eq!(!ours.is_empty(), has_rings());
    for text in ours {
        let spared = text.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
        let spared = u64::from_str_radix(spared.trim(), 16).unwrap();
        assert!(spared & 1 << (libc::SIGTERM - 1) != 0, "{text}");
    }
}

#[test]
fn what_is_removed_is_forgotten_many_at_a_time() {
    const FILES: usize = 4000;
    let _one_at_a_time = ONE_AT_A_TIME.lock();
    let ops = common::MemoryFs::new();
    let Some(mount) = common::TestMount::new(ops.clone(), "io_uring,threads=2") else { return };
    if !has_rings() {
        return;
    }
    let file = |number: usize| mount.path().join(number.to_string());
    (0..FILES).for_each(|number| fs::write(file(number), "").unwrap());
    let (before, began) = (sleeps_of("fuser-"), Instant::now());
    (0..FILES).for_each(|number| fs::remove_file(file(number)).unwrap());
    while ops.nodes() > 1 {
        assert!(began.elapsed() < Duration::from_secs(20), "{} are known", ops.nodes());
        thread::sleep(Duration::from_millis(1));
    }
    // Each of the two threads waits for a request, and rests for a millisecond. Now and then one finds a lock taken.
    let most = 4 * (1 + began.elapsed().as_millis() as u64) + FILES as u64 / 10;
    let sleeps = sleeps_of("fuser-") - before;
    assert!(sleeps <= most, "slept {sleeps} times, not {most}");
}
