//! A disk that refuses what a checkpoint wants to write: once, at one place for ever, or for a while. The checkpoint tries again, with its
//! nodes elsewhere; the log has what was acknowledged meanwhile, and nothing is shut down.

mod common;

use common::*;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;
use weir::check::{CheckOptions, check_device};
use weir::device::Device;
use weir::device::memory::MemoryDevice;
use weir::format::{bitmap, frame, node, root, superblock};
use weir::*;

const LOG_BLOCKS: u64 = 128;
const FILES: u64 = 20;

/// How everything begins that is written and is no page of a file.
const MAGICS: [&[u8]; 5] =
    [&node::NODE_MAGIC, &bitmap::MAGIC, &root::MAGIC, &superblock::MAGIC, &frame::FRAME_MAGIC];

fn probe() -> (Arc<Probe>, Arc<dyn Device>) {
    let probe = Probe::new(Arc::new(MemoryDevice::new(64 * MIB)));
    let device: Arc<dyn Device> = probe.clone();
    format(&device, LOG_BLOCKS);
    (probe, device)
}

/// Files of a page each, synced: the log has them.
fn make_files(volume: &Volume, numbers: std::ops::Range<u64>) -> Result<()> {
    for number in numbers {
        let file = volume.open_file(format!("/f{number}"), OpenFlags::CREATE)?;
        file.write_at(0, &pattern(number, 4096))?;
        file.fsync()?;
    }
    Ok(())
}

fn assert_there(volume: &Volume, files: u64) {
    for number in 0..files {
        let file = volume.open_file(format!("/f{number}"), OpenFlags::READ).expect("acknowledged");
        assert!(contents(&file) == pattern(number, 4096), "file {number}");
    }
}

fn close_and_check(volume: Volume, device: &Arc<dyn Device>, files: u64) {
    volume.close().expect("close");
    drop(volume);
    let report = check_device(device, &CheckOptions::default()).expect("check");
    assert!(report.is_clean(), "{:#?}", report.problems);
    let volume = open(device, manual(16 * MIB));
    assert_there(&volume, files);
}

fn is_io<T>(result: &Result<T>) -> bool {
    matches!(result, Err(Error::Io(_)))
}

/// From now on each place at which one of the first `places` nodes is written is broken, for ever.
fn break_places_of_nodes(probe: &Probe, places: usize) -> Arc<Mutex<BTreeSet<u64>>> {
    let broken = Arc::new(Mutex::new(BTreeSet::new()));
    let known = broken.clone();
    probe.refuse(move |offset_bytes, begins| {
        let mut known = known.lock().expect("lock");
        if begins.starts_with(&node::NODE_MAGIC) && known.len() < places {
            known.insert(offset_bytes);
        }
        known.contains(&offset_bytes)
    });
    broken
}

#[test]
fn a_checkpoint_is_tried_again_whichever_of_its_writes_the_disk_refuses_once() {
    let mut refused = 0;
    for writes_before in 0..1000 {
        let (probe, device) = probe();
        let volume = open(&device, manual(16 * MIB));
        make_files(&volume, 0..FILES).expect("the log has room");
        let writes = AtomicU64::new(0);
        probe.refuse(move |_, _| writes.fetch_add(1, Ordering::Relaxed) == writes_before);
        volume.checkpoint().expect("it is over soon");
        assert!(volume.stats().checkpoint_refused.is_none());
        assert_eq!(volume.stats().log_fill.used_blocks, 0, "the log was released");
        let struck = probe.failed_writes.load(Ordering::Relaxed);
        close_and_check(volume, &device, FILES);
        if struck == 0 {
            break;
        }
        refused += struck;
    }
    // Data, a frame that says where it is, nodes, a bitmap, the root and both superblocks.
    assert!((7..100).contains(&refused), "{refused}");
}

#[test]
fn nodes_go_elsewhere_when_their_place_is_broken() {
    for background in [BackgroundMode::Manual, BackgroundMode::Threads] {
        let (probe, device) = probe();
        let volume = open(&device, VolumeOptions { background, ..manual(16 * MIB) });
        let broken = break_places_of_nodes(&probe, 2);
        make_files(&volume, 0..FILES).expect("the log has room");
        with_watchdog(60, || volume.checkpoint()).expect("at the third attempt");
        assert_eq!(broken.lock().expect("lock").len(), 2, "two attempts met a broken place");
        close_and_check(volume, &device, FILES);
    }
}

#[test]
fn an_opening_puts_its_nodes_elsewhere_as_well() {
    let (probe, device) = probe();
    let volume = open(&device, manual(16 * MIB));
    make_files(&volume, 0..FILES).expect("the log has room");
    drop(volume);
    let broken = break_places_of_nodes(&probe, 2);
    let volume = open(&device, manual(16 * MIB));
    assert_eq!(broken.lock().expect("lock").len(), 2, "two attempts met a broken place");
    assert_there(&volume, FILES);
    close_and_check(volume, &device, FILES);
}

/// What has one place, or two, and is refused there: syncs succeed as long as the log takes them, then who needs room in it hears why there is
/// none, and once the disk takes it everything goes on.
#[test]
fn what_is_refused_for_a_while_is_waited_for_and_nothing_is_shut_down() {
    let kinds: [&'static [u8]; 4] =
        [&node::NODE_MAGIC, &bitmap::MAGIC, &root::MAGIC, &superblock::MAGIC];
    for kind in kinds {
        for background in [BackgroundMode::Manual, BackgroundMode::Threads] {
            let (probe, device) = probe();
            let volume = open(&device, VolumeOptions { background, ..manual(16 * MIB) });
            probe.refuse(move |_, begins| begins.starts_with(kind));
            make_files(&volume, 0..FILES).expect("the log has room");
            let ended = with_watchdog(60, || volume.checkpoint());
            assert!(is_io(&ended), "{kind:?}: {ended:?}");
            assert!(matches!(volume.stats().checkpoint_refused, Some(Error::Io(_))), "{kind:?}");
            make_files(&volume, FILES..FILES + 5).expect("the log has room");
            let ended = with_watchdog(60, || make_files(&volume, FILES + 5..10_000));
            assert!(is_io(&ended), "{kind:?}: {ended:?}");
            assert!(volume.shutdown_reason().is_none(), "{kind:?}");
            assert_there(&volume, FILES + 5);
            probe.refuse(|_, _| false);
            make_files(&volume, FILES + 5..200).expect("the disk takes it");
            volume.checkpoint().expect("the disk takes it");
            assert!(volume.stats().checkpoint_refused.is_none(), "{kind:?}");
            assert_eq!(volume.stats().space.pending_free_blocks, 0, "{kind:?}");
            close_and_check(volume, &device, 200);
        }
    }
}

/// Checkpoints end, but release nothing: the pages that the log has stay there.
#[test]
fn who_needs_log_space_hears_that_the_disk_refuses_pages_and_nothing_is_shut_down() {
    for background in [BackgroundMode::Manual, BackgroundMode::Threads] {
        let (probe, device) = probe();
        let volume = open(&device, VolumeOptions { background, ..manual(16 * MIB) });
        probe.refuse(|_, begins| !MAGICS.iter().any(|magic| begins.starts_with(magic)));
        make_files(&volume, 0..FILES).expect("the log has room");
        let ended = with_watchdog(60, || make_files(&volume, FILES..10_000));
        assert!(is_io(&ended), "{ended:?}");
        assert!(volume.shutdown_reason().is_none());
        assert_there(&volume, FILES);
        probe.refuse(|_, _| false);
        make_files(&volume, FILES..200).expect("the disk takes it");
        volume.checkpoint().expect("the disk takes it");
        close_and_check(volume, &device, 200);
    }
}

#[test]
fn a_disk_that_refuses_everything_behind_the_log_does_not_make_the_volume_seem_full() {
    let (probe, device) = probe();
    let volume = open(&device, manual(16 * MIB));
    let file = create(&volume, "/large");
    let bytes = pattern(1, 4 << 20);
    file.write_at(0, &bytes).expect("write");
    probe.refuse(|_, begins| !begins.starts_with(&frame::FRAME_MAGIC));
    for _ in 0..50 {
        let synced = file.fsync();
        assert!(is_io(&synced), "{synced:?}");
        let checkpoint = volume.checkpoint();
        assert!(is_io(&checkpoint), "{checkpoint:?}");
    }
    let stat = volume.statfs();
    assert!(stat.available_blocks > stat.total_blocks / 2, "{stat:?}");
    probe.refuse(|_, _| false);
    // What the last checkpoint has met is told once.
    assert!(is_io(&file.fsync()));
    file.fsync().expect("the disk takes it");
    volume.checkpoint().expect("the disk takes it");
    assert!(contents(&file) == bytes);
    drop(file);
    close_and_check(volume, &device, 0);
}

#[test]
fn a_close_that_the_disk_refuses_says_so_and_the_next_opening_has_everything() {
    for background in [BackgroundMode::Manual, BackgroundMode::Threads] {
        let (probe, device) = probe();
        let volume = open(&device, VolumeOptions { background, ..manual(16 * MIB) });
        probe.refuse(|_, begins| begins.starts_with(&root::MAGIC));
        make_files(&volume, 0..FILES).expect("the log has room");
        let ended = with_watchdog(60, || volume.close());
        assert!(is_io(&ended), "{ended:?}");
        drop(volume);
        let opened = Volume::open_device(device.clone(), manual(16 * MIB)).map(|_| ());
        assert!(is_io(&opened), "{opened:?}");
        probe.refuse(|_, _| false);
        let volume = open(&device, manual(16 * MIB));
        assert_there(&volume, FILES);
        close_and_check(volume, &device, FILES);
    }
}

/// A volume in whose background this fails, and what its listener hears.
fn heard_of(
    fails: impl Fn(u64, &[u8]) -> bool + Send + 'static,
) -> (Arc<Probe>, Volume, mpsc::Receiver<Error>) {
    let (probe, device) = probe();
    let volume = open(&device, threads(16 * MIB));
    let (tell, heard) = mpsc::channel();
    volume.on_background_error(move |error| drop(tell.send(error.clone())));
    probe.refuse(fails);
    (probe, volume, heard)
}

#[test]
fn a_listener_hears_of_checkpoints_that_are_refused_and_of_no_close() {
    let (probe, volume, heard) = heard_of(|_, begins| begins.starts_with(&root::MAGIC));
    make_files(&volume, 0..FILES).expect("the log has room");
    assert!(is_io(&volume.checkpoint()));
    let error = heard.recv_timeout(Duration::from_secs(60)).expect("it is told");
    assert!(matches!(error, Error::Io(_)), "{error:?}");
    probe.refuse(|_, _| false);
    volume.close().expect("the disk takes it");
    // The listener is gone with the volume, and the channel with it.
    assert!(heard.iter().all(|error| matches!(error, Error::Io(_))));
}

#[test]
fn a_listener_hears_why_the_volume_was_shut_down_and_may_panic() {
    let (probe, volume, heard) = heard_of(|_, _| false);
    probe.fail_flushes.store(true, Ordering::Relaxed);
    assert!(make_files(&volume, 0..1).is_err());
    let reason = volume.shutdown_reason().expect("a flush has failed");
    let is_it = |error: Error| error == Error::Shutdown(reason.clone());
    let mut told = std::iter::from_fn(|| heard.recv_timeout(Duration::from_secs(60)).ok());
    assert!(told.any(is_it), "it was not told");
    volume.on_background_error(|_| panic!("on purpose"));
    let _ = with_watchdog(60, || volume.close());
    assert!(heard.iter().next().is_none(), "told once, and never after it was replaced");
}

/// What a listener holds.
struct Held;

impl Drop for Held {
    fn drop(&mut self) {
        panic!("on purpose");
    }
}

#[test]
fn a_listener_that_is_replaced_while_it_is_told_may_panic_when_it_goes() {
    let (probe, device) = probe();
    let volume = open(&device, manual(16 * MIB));
    let (tell, heard) = mpsc::channel();
    let (held, another) = (Held, volume.clone());
    volume.on_background_error(move |_| {
        let _ = (&held, tell.send(()));
        another.on_background_error(|_| ());
    });
    probe.fail_data_writes.store(true, Ordering::Relaxed);
    create(&volume, "/f").write_at(0, &pattern(1, 1 << 20)).expect("it is in memory");
    assert!(volume.background_step(BackgroundWork::Writeback).is_err());
    probe.fail_data_writes.store(false, Ordering::Relaxed);
    volume.close().expect("nobody's error");
    assert_eq!(heard.iter().count(), 1, "it was told, and is gone");
}

#[test]
fn a_handle_that_writes_through_tells_an_error_once() {
    let probe = Probe::new(formatted(64 * MIB, 0));
    let device: Arc<dyn Device> = probe.clone();
    let volume = open(&device, manual(16 * MIB));
    let flags = OpenFlags { data_sync: true, ..OpenFlags::CREATE };
    let file = volume.open_file("/f", flags).expect("open");
    probe.fail_data_writes.store(true, Ordering::Relaxed);
    assert!(file.write_at(0, &vec![1; 1 << 20]).is_err());
    probe.fail_data_writes.store(false, Ordering::Relaxed);
    assert_eq!(file.write_at(0, &vec![2; 1 << 20]), Ok(1 << 20), "told twice");
}

#[test]
fn who_needs_memory_is_not_told_of_a_file_that_cannot_be_written() {
    const PIECE: u64 = 64 << 10;
    let (probe, device) = probe();
    let volume = open(&device, manual(4 * MIB));
    let (bad, other) = (create(&volume, "/bad"), create(&volume, "/other"));
    let page = pattern(1, 4096);
    probe.refuse_page(Some(page.clone()));
    bad.write_at(0, &page).expect("it is in memory");
    let data = |piece: u64| pattern(2 + piece, PIECE as usize);
    for piece in 0..256 {
        let written = other.write_at(piece * PIECE, &data(piece));
        assert_eq!(written, Ok(PIECE as usize), "piece {piece}");
    }
    let mut found = vec![0; PIECE as usize];
    for piece in 0..256 {
        assert_eq!(other.read_at(piece * PIECE, &mut found), Ok(PIECE as usize));
        assert!(found == data(piece), "piece {piece}");
    }
    probe.refuse_page(None);
    assert_eq!(other.fsync(), Ok(()));
    assert!(is_io(&bad.fsync()), "its owner hears of it");
    assert_eq!(bad.fsync(), Ok(()));
    assert!(contents(&bad) == page);
    volume.close().expect("close");
}

/// The log's room for bringing pages home is not used up by what releases nothing: while one page cannot go home, checkpoint after checkpoint
/// finds new times in memory.
#[test]
fn checkpoints_that_release_nothing_leave_room_for_those_that_will() {
    let (probe, device) = probe();
    let volume = open(&device, manual(16 * MIB));
    let page = pattern(7, 4096);
    let file = create(&volume, "/refused");
    file.write_at(0, &page).expect("write");
    file.fsync().expect("the log has it");
    let other = create(&volume, "/other");
    probe.refuse_page(Some(page.clone()));
    for round in 0..LOG_BLOCKS {
        other.write_at(0, &round.to_le_bytes()).expect("memory has room");
        while volume.background_step(BackgroundWork::Checkpoint).expect("nothing is refused it") {}
    }
    assert!(probe.failed_writes.load(Ordering::Relaxed) > 0);
    probe.refuse_page(None);
    volume.checkpoint().expect("the disk is well again");
    assert_eq!(volume.stats().log_fill.used_blocks, 0);
    assert!(contents(&file) == page);
    drop((file, other));
    close_and_check(volume, &device, 0);
}

/// Checkpoints succeed, and release nothing; no page of a file can go home. Whoever waits for pages to become clean hears of that.
#[test]
fn who_fills_memory_beside_checkpoints_that_bring_nothing_home_hears_of_it() {
    let (probe, device) = probe();
    let volume = open(&device, threads(2 * MIB));
    make_files(&volume, 0..FILES).expect("files");
    let file = create(&volume, "/large");
    file.fsync().expect("fsync");
    probe.refuse(|_, begins| !MAGICS.iter().any(|magic| begins.starts_with(magic)));
    // The flushers find no room in the log, which is full of what cannot go home.
    assert!(with_watchdog(60, || make_files(&volume, FILES..1000)).is_err());
    let piece = pattern(1, 64 << 10);
    let write = |number: u64| file.write_at(number * piece.len() as u64, &piece);
    let ended = with_watchdog(20, || (0..64).map(write).find(Result::is_err));
    assert!(ended.as_ref().is_some_and(is_io), "{ended:?}");
    assert!(volume.shutdown_reason().is_none());
    probe.refuse(|_, _| false);
    with_watchdog(60, || {
        // What writeback has met is told once.
        let _ = file.fsync();
        file.fsync().expect("the disk is well again");
    });
    drop(file);
    close_and_check(volume, &device, FILES);
}
