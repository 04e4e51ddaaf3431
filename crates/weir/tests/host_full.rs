//! A volume in a file with holes, on a host that runs full: what was acknowledged stays, what needs new blocks of the host answers an error
//! that says so, and once there is space again everything goes on, without a new opening.

mod common;

use common::*;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use weir::check::{CheckOptions, check_device};
use weir::device::Device;
use weir::device::memory::MemoryDevice;
use weir::*;

const LOG_BLOCKS: u64 = 128;

fn volume(options: VolumeOptions) -> (Arc<Probe>, Volume) {
    let sparse = Probe::new(Arc::new(MemoryDevice::new(64 * MIB)));
    let device: Arc<dyn Device> = sparse.clone();
    format(&device, LOG_BLOCKS);
    let volume = open(&device, options);
    (sparse, volume)
}

fn is_host_full<T: std::fmt::Debug>(result: &Result<T>) -> bool {
    matches!(result, Err(error @ Error::HostFull(_)) if error.errno() == 28)
}

/// Makes files of a page each, synced, until something fails. Answers how many there are, and the error.
fn make_until_it_fails(volume: &Volume) -> (u64, Error) {
    for number in 0..100_000 {
        let made = volume.open_file(format!("/f{number}"), OpenFlags::CREATE).and_then(|file| {
            file.write_at(0, &pattern(number, 4096))?;
            file.fsync()
        });
        if let Err(error) = made {
            return (number, error);
        }
    }
    panic!("a log of {LOG_BLOCKS} blocks takes everything");
}

fn assert_there(volume: &Volume, files: u64) {
    for number in 0..files {
        let file = volume.open_file(format!("/f{number}"), OpenFlags::READ).expect("acknowledged");
        assert!(contents(&file) == pattern(number, 4096), "file {number}");
    }
}

fn assert_sound(sparse: &Arc<Probe>) {
    let device: Arc<dyn Device> = sparse.clone();
    let report = check_device(&device, &CheckOptions::default()).expect("check");
    assert!(report.is_clean(), "{:#?}", report.problems);
}

/// There is no volume yet whose files could be deleted.
#[test]
fn a_volume_that_its_host_has_no_space_for_says_so() {
    let sparse = Probe::new(Arc::new(MemoryDevice::new(64 * MIB)));
    sparse.set_host_full(true);
    let device: Arc<dyn Device> = sparse.clone();
    for prewrite in [false, true] {
        let options = CreateOptions { prewrite, ..CreateOptions::default() };
        let made = Volume::format_device(&device, &options);
        assert!(is_host_full(&made), "{made:?}");
    }
    sparse.set_host_full(false);
    Volume::format_device(&device, &CreateOptions::default()).expect("there is space again");
    assert_sound(&sparse);
}

#[test]
fn a_checkpoint_waits_for_space_on_the_host_and_then_goes_on() {
    let (sparse, volume) = volume(manual(16 * MIB));
    sparse.set_host_full(true);
    create(&volume, "/f0").write_at(0, &pattern(0, 4096)).expect("write");
    volume.sync().expect("the log has its blocks");
    for _ in 0..3 {
        let ended = volume.checkpoint();
        assert!(is_host_full(&ended), "{ended:?}");
    }
    assert!(volume.shutdown_reason().is_none());
    assert!(matches!(volume.stats().checkpoint_refused, Some(Error::HostFull(_))));
    // Life goes on as far as the log takes it.
    create(&volume, "/f1").write_at(0, &pattern(1, 4096)).expect("write");
    volume.sync().expect("the log has its blocks");
    sparse.set_host_full(false);
    volume.checkpoint().expect("there is space again");
    assert!(volume.stats().checkpoint_refused.is_none());
    assert_eq!(volume.stats().log_fill.used_blocks, 0, "the log was released");
    assert_there(&volume, 2);
    volume.close().expect("close");
    drop(volume);
    assert_sound(&sparse);
}

/// Each call that a checkpoint makes may be the first that the host has no space for.
#[test]
fn a_checkpoint_can_be_taken_up_wherever_the_host_ran_full() {
    let mut steps_refused = 0;
    for steps_before in 0..12 {
        let (sparse, volume) = volume(manual(16 * MIB));
        for number in 0..20 {
            create(&volume, &format!("/f{number}"))
                .write_at(0, &pattern(number, 4096))
                .expect("write");
        }
        volume.sync().expect("sync");
        for _ in 0..steps_before {
            volume.background_step(BackgroundWork::Checkpoint).expect("there is space");
        }
        sparse.set_host_full(true);
        let ended = (0..20)
            .try_for_each(|_| volume.background_step(BackgroundWork::Checkpoint).map(|_| ()));
        steps_refused += u32::from(is_host_full(&ended));
        assert!(volume.shutdown_reason().is_none(), "{ended:?}");
        create(&volume, "/later").write_at(0, b"later").expect("write");
        volume.unlink(Volume::ROOT, b"f19").expect("unlink");
        sparse.set_host_full(false);
        volume.checkpoint().expect("there is space again");
        assert_there(&volume, 19);
        assert_eq!(names(&volume, "/").len(), 20);
        volume.close().expect("close");
        drop(volume);
        assert_sound(&sparse);
    }
    assert!(steps_refused >= 2, "the merge and what comes after it: {steps_refused}");
}

#[test]
fn a_full_log_on_a_full_host_answers_an_error_and_goes_on_when_there_is_space() {
    let (sparse, volume) = volume(manual(16 * MIB));
    sparse.set_host_full(true);
    let (files, error) = with_watchdog(60, || make_until_it_fails(&volume));
    assert!(files > 20, "{files}");
    assert_eq!(error.errno(), 28, "{error}");
    assert!(error.to_string().contains("host"), "{error}");
    assert!(volume.shutdown_reason().is_none());
    assert_there(&volume, files);
    sparse.set_host_full(false);
    let file = create(&volume, &format!("/f{files}"));
    file.write_at(0, &pattern(files, 4096)).expect("write");
    file.fsync().expect("there is space again");
    assert_there(&volume, files + 1);
    drop(file);
    volume.close().expect("close");
    drop(volume);
    assert_sound(&sparse);
}

#[test]
fn threads_try_now_and_then_and_nobody_waits_for_ever() {
    let (sparse, volume) = volume(threads(16 * MIB));
    sparse.set_host_full(true);
    let (files, error) = with_watchdog(60, || make_until_it_fails(&volume));
    assert_eq!(error.errno(), 28, "{error}");
    assert!(volume.shutdown_reason().is_none());
    // However often somebody tries, and however many: nobody burns a processor over it.
    let (before, began) = (sparse.failed_writes.load(Ordering::Relaxed), Instant::now());
    std::thread::scope(|scope| {
        for writer in 0..4 {
            let volume = &volume;
            scope.spawn(move || {
                while began.elapsed() < Duration::from_millis(500) {
                    let made =
                        volume.open_file(format!("/w{writer}"), OpenFlags::CREATE).map(|_| ());
                    assert!(made.is_ok() || is_host_full(&made), "{made:?}");
                }
            });
        }
    });
    let (attempts, tenths) = (
        sparse.failed_writes.load(Ordering::Relaxed) - before,
        began.elapsed().as_millis() as u64 / 100,
    );
    assert!(
        (1..=tenths + 1).contains(&attempts),
        "{attempts} attempts in {tenths} tenths of a second"
    );
    assert_there(&volume, files);
    sparse.set_host_full(false);
    with_watchdog(60, || {
        let file = create(&volume, "/later");
        file.write_at(0, b"later").expect("write");
        file.fsync().expect("there is space again");
        volume.checkpoint().expect("checkpoint");
    });
    assert_there(&volume, files);
    volume.close().expect("close");
    drop(volume);
    assert_sound(&sparse);
}

#[test]
fn a_close_on_a_full_host_says_so_and_the_next_opening_has_everything() {
    for background in [BackgroundMode::Manual, BackgroundMode::Threads] {
        let (sparse, volume) = volume(VolumeOptions { background, ..manual(16 * MIB) });
        sparse.set_host_full(true);
        for number in 0..10 {
            let file = create(&volume, &format!("/f{number}"));
            file.write_at(0, &pattern(number, 4096)).expect("write");
            file.fsync().expect("the log has its blocks");
        }
        let ended = with_watchdog(60, || volume.close());
        assert!(is_host_full(&ended), "{ended:?}");
        drop(volume);
        let device: Arc<dyn Device> = sparse.clone();
        let opened = Volume::open_device(device.clone(), manual(16 * MIB)).map(|_| ());
        assert!(is_host_full(&opened), "{opened:?}");
        sparse.set_host_full(false);
        let volume = open(&device, manual(16 * MIB));
        assert_there(&volume, 10);
        volume.close().expect("close");
        drop(volume);
        assert_sound(&sparse);
    }
}

#[test]
fn attempts_that_fail_for_want_of_space_on_the_host_do_not_use_up_the_volume() {
    let (sparse, volume) = volume(manual(16 * MIB));
    let file = create(&volume, "/large");
    let bytes = pattern(1, 4 << 20);
    file.write_at(0, &bytes).expect("write");
    sparse.set_host_full(true);
    for _ in 0..50 {
        let synced = file.fsync();
        assert!(is_host_full(&synced), "{synced:?}");
        let checkpoint = volume.checkpoint();
        assert!(is_host_full(&checkpoint), "{checkpoint:?}");
    }
    let stat = volume.statfs();
    assert!(stat.available_blocks > stat.total_blocks / 2, "{stat:?}");
    create(&volume, "/small").write_at(0, b"small").expect("there is room in the volume");
    assert!(contents(&file) == bytes, "dirty and readable");
    sparse.set_host_full(false);
    // What the last checkpoint has met is told once.
    assert!(is_host_full(&file.fsync()));
    file.fsync().expect("there is space again");
    volume.checkpoint().expect("checkpoint");
    assert!(contents(&file) == bytes);
    drop(file);
    volume.close().expect("close");
    drop(volume);
    assert_sound(&sparse);
}

/// More than may be dirty: whoever writes waits for writeback, but not for a host that gives it nothing.
#[test]
fn who_fills_memory_on_a_full_host_hears_of_it_and_can_go_on_later() {
    let (sparse, volume) = volume(threads(8 * MIB));
    let file = create(&volume, "/large");
    sparse.set_host_full(true);
    let piece = pattern(1, 256 << 10);
    let write = |number: u64| file.write_at(number * piece.len() as u64, &piece);
    let ended = with_watchdog(60, || (0..160).map(write).find(Result::is_err));
    assert!(ended.as_ref().is_some_and(is_host_full), "{ended:?}");
    assert!(volume.shutdown_reason().is_none());
    create(&volume, "/name").fsync().expect("the log has its blocks");
    sparse.set_host_full(false);
    with_watchdog(60, || {
        // What writeback has met is told once.
        let _ = file.fsync();
        for number in 0..160 {
            write(number).expect("there is space again");
        }
        file.fsync().expect("there is space again");
    });
    drop(file);
    volume.close().expect("close");
    drop(volume);
    assert_sound(&sparse);
}

/// A part of it fits into memory, and is taken back.
#[test]
fn an_append_that_fails_half_way_leaves_the_file_as_it_was() {
    let (sparse, volume) = volume(manual(16 * MIB));
    let file = create(&volume, "/f");
    file.write_at(0, &pattern(1, 10_000)).expect("write");
    // Some of what it wants has blocks, and there are others behind that.
    file.allocate(AllocateMode::KeepSize, 16 * MIB, 2 * MIB).expect("allocate");
    file.allocate(AllocateMode::KeepSize, 40 * MIB, MIB).expect("allocate");
    volume.checkpoint().expect("checkpoint");
    let shown = |file: &File| {
        let attr = file.attr().expect("attributes");
        (attr.size_bytes, attr.blocks, attr.mtime, attr.ctime)
    };
    let before = shown(&file);
    sparse.set_host_full(true);
    let appended = file.append(&pattern(2, 32 << 20));
    assert!(is_host_full(&appended), "{appended:?}");
    assert!(volume.stats().writeback_errors > 0, "a part was written, and went home in vain");
    assert_eq!(shown(&file), before);
    sparse.set_host_full(false);
    drop(file);
    volume.close().expect("close");
    drop(volume);
    let device: Arc<dyn Device> = sparse.clone();
    let volume = open(&device, manual(16 * MIB));
    let file = volume.open_file("/f", OpenFlags::READ).expect("it is there");
    assert_eq!(shown(&file), before, "the log has it so, too");
    assert!(contents(&file) == pattern(1, 10_000));
    drop(file);
    volume.close().expect("close");
    assert_sound(&sparse);
}
