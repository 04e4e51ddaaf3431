//! What others do while a sync or a barrier is under way: they take pages that it has chosen just when it looks whether any are left, or go on
//! writing.

mod common;

use common::locks::{Happenings, amid_locks};
use common::volatile::Volatile;
use common::*;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use weir::device::Device;
use weir::*;

/// Locks that a call takes between the end of a wait for pages and its next steps, none of them under another.
const LOCKS: u32 = 5;

/// Writeback by somebody else, which stops amid its first write of data.
struct Writeback {
    goes_on: Sender<()>,
    thread: JoinHandle<()>,
}

impl Writeback {
    /// Answers when it has stopped, or has found nothing to write.
    fn begin(probe: &Arc<Probe>, volume: &Volume) -> Self {
        let (stopped, has_stopped) = channel();
        let (goes_on, waits): (Sender<()>, Receiver<()>) = channel();
        let tells = stopped.clone();
        probe.amid_next_data_write(move || {
            tells.send(()).expect("the test waits for it");
            // An error: the test is over.
            let _ = waits.recv();
        });
        let (probe, volume) = (probe.clone(), volume.clone());
        let thread = std::thread::spawn(move || {
            volume.background_step(BackgroundWork::Writeback).expect("writeback");
            // Nobody else stops where this one has not.
            probe.amid_next_data_write(|| ());
            let _ = stopped.send(());
        });
        has_stopped.recv().expect("it stops or ends");
        Self { goes_on, thread }
    }

    fn end(self) {
        let _ = self.goes_on.send(());
        self.thread.join().expect("it ends");
    }
}

/// A volume on a disk that forgets what is not flushed, and an empty file of it.
fn probed() -> (Arc<Volatile>, Arc<Probe>, Volume, File) {
    let device = Volatile::new(16 * MIB);
    let dynamic: Arc<dyn Device> = device.clone();
    format(&dynamic, 0);
    let probe = Probe::new(dynamic);
    let volume = Volume::open_device(probe.clone(), manual(8 * MIB)).expect("open");
    let file = create(&volume, "/f");
    (device, probe, volume, file)
}

/// Writes `pages` pages, and lets the file end in a hole behind them. Answers its size.
fn write_before_a_hole(file: &File, pages: usize) -> u64 {
    let size = (pages as u64 + 1) * 4096;
    file.write_all_at(0, &pattern(1, size as usize)).expect("write");
    file.allocate(AllocateMode::PunchHole, size - 4096, 4096).expect("punch");
    size
}

/// A file of `pages` pages whose first version is on its way home, and whose second one is dirty.
fn two_versions(pages: usize) -> (Arc<Volatile>, Arc<Probe>, Volume, File, Writeback) {
    let (device, probe, volume, file) = probed();
    volume.sync().expect("sync");
    file.write_all_at(0, &pattern(1, pages * 4096)).expect("write");
    let earlier = Writeback::begin(&probe, &volume);
    file.write_all_at(0, &pattern(2, pages * 4096)).expect("write");
    (device, probe, volume, file, earlier)
}

/// Makes `call`, which waits for the version on its way, and then finds the other one taken by somebody else, who also does `besides`. Answers
/// that writeback, if the call has not waited for it.
fn while_others_take<R>(
    lock: u32,
    (probe, volume, earlier): (&Arc<Probe>, &Volume, Writeback),
    besides: impl FnOnce() + 'static,
    call: impl FnOnce() -> R,
) -> Option<Writeback> {
    let later: Rc<Cell<Option<Writeback>>> = Rc::default();
    let (begins, ends) = (later.clone(), later.clone());
    let (probe, volume) = (probe.clone(), volume.clone());
    let take = move || {
        begins.set(Some(Writeback::begin(&probe, &volume)));
        besides();
    };
    let planned = Happenings {
        at_waits: vec![
            Box::new(|| earlier.end()),
            Box::new(move || ends.take().into_iter().for_each(Writeback::end)),
        ],
        at_lock: Some((lock, Box::new(take))),
        ..Happenings::default()
    };
    let (_, left) = amid_locks(planned, call);
    assert!(left.at_lock.is_none(), "lock {lock} was taken");
    later.take()
}

fn found_after_a_crash(device: &Volatile, length: usize) -> Option<Vec<u8>> {
    let volume = open(&device.after_crash(1), manual(8 * MIB));
    volume.metadata("/after").ok()?;
    let mut bytes = vec![0; length];
    let file = volume.open_file("/f", OpenFlags::READ).expect("open");
    file.read_at(0, &mut bytes).expect("read");
    Some(bytes)
}

#[test]
fn a_sync_waits_for_pages_that_others_take_when_it_looks_whether_any_are_left() {
    const PAGES: usize = 40;
    for lock in 0..LOCKS {
        with_watchdog(60, || {
            let (device, probe, volume, file, earlier) = two_versions(PAGES);
            create(&volume, "/after");
            let goes_on = file.clone();
            // More than a frame takes, so that the sync does not put it into the log.
            let besides = move || {
                goes_on.write_all_at(100 * 4096, &pattern(3, PAGES * 4096)).expect("write");
            };
            let how = (&probe, &volume, earlier);
            let sync = || file.fsync().expect("fsync");
            let later = while_others_take(lock, how, besides, sync);
            let found = found_after_a_crash(&device, PAGES * 4096);
            later.into_iter().for_each(Writeback::end);
            assert!(found == Some(pattern(2, PAGES * 4096)), "taken before lock {lock}");
        });
    }
}

#[test]
fn a_barrier_waits_for_pages_that_others_take_when_it_looks_whether_any_are_left() {
    const PAGES: usize = 8;
    for lock in 0..LOCKS {
        with_watchdog(60, || {
            let (device, probe, volume, file, earlier) = two_versions(PAGES);
            volume.barrier().expect("barrier");
            create(&volume, "/after");
            let how = (&probe, &volume, earlier);
            let sync = || volume.fsync_dir(Volume::ROOT).expect("fsync");
            let later = while_others_take(lock, how, || (), sync);
            let found = found_after_a_crash(&device, PAGES * 4096);
            later.into_iter().for_each(Writeback::end);
            drop(file);
            assert!(found == Some(pattern(2, PAGES * 4096)), "taken before lock {lock}");
        });
    }
}

/// What the file ended with when the sync began is a hole, and there is too much to write to log the size with data.
#[test]
fn a_sync_makes_the_size_durable_also_if_others_write_all_the_time() {
    const PAGES: usize = 40;
    let (device, probe, _volume, file) = probed();
    let size = write_before_a_hole(&file, PAGES);
    let goes_on = file.clone();
    probe.amid_next_data_write(move || {
        goes_on.write_all_at(0, &pattern(2, PAGES * 4096)).expect("write");
    });
    file.fsync().expect("fsync");
    assert!(probe.has_happened());
    let after = open(&device.after_crash(1), manual(8 * MIB));
    assert_eq!(after.metadata("/f").expect("it is there").size_bytes, size);
}

/// As above, and somebody cuts the file meanwhile: what it reached when the sync began is nobody's promise any more.
#[test]
fn a_sync_does_not_bring_a_size_back_that_was_cut_off_meanwhile() {
    const PAGES: usize = 40;
    let (device, probe, _volume, file) = probed();
    let size = write_before_a_hole(&file, PAGES);
    let goes_on = file.clone();
    probe.amid_next_data_write(move || {
        // Nothing on its way home is cut off. What makes the file longer again is too much for the log.
        goes_on.truncate(size - 4096).expect("cut");
        goes_on.write_all_at(100 * 4096, &pattern(2, PAGES * 4096)).expect("write");
    });
    file.fsync().expect("fsync");
    assert!(probe.has_happened());
    let after = open(&device.after_crash(1), manual(8 * MIB));
    let found = after.metadata("/f").expect("it is there").size_bytes;
    assert_eq!(found, size - 4096, "no write has made it longer");
}

/// What goes home for a barrier says no more of the size than where it ends itself.
#[test]
fn a_barrier_comes_behind_the_size_of_a_file_that_ends_in_a_hole() {
    const PAGES: usize = 40;
    let (device, _probe, volume, file) = probed();
    volume.sync().expect("sync");
    let size = write_before_a_hole(&file, PAGES);
    volume.barrier().expect("barrier");
    create(&volume, "/after");
    volume.fsync_dir(Volume::ROOT).expect("fsync");
    let after = open(&device.after_crash(1), manual(8 * MIB));
    after.metadata("/after").expect("it was synced");
    assert_eq!(after.metadata("/f").expect("it is there").size_bytes, size);
}

/// Pages that somebody else has taken are not dirty, and not in the log either.
#[test]
fn a_barrier_comes_behind_pages_that_are_on_their_way_home() {
    const PAGES: usize = 8;
    let (device, probe, volume, file) = probed();
    // The log has the size.
    file.write_all_at(0, &pattern(1, PAGES * 4096)).expect("write");
    volume.checkpoint().expect("checkpoint");
    file.write_all_at(0, &pattern(2, PAGES * 4096)).expect("write");
    let (tells, told) = channel();
    let (disk, raises) = (device.clone(), volume.clone());
    probe.amid_next_data_write(move || {
        raises.barrier().expect("barrier");
        create(&raises, "/after");
        let ticket = raises.fsync_dir_async(Volume::ROOT).expect("submit");
        while raises.background_step(BackgroundWork::Frames).expect("the log goes on") {}
        let found = found_after_a_crash(&disk, PAGES * 4096);
        tells.send((ticket.poll(), found)).expect("the test waits for it");
    });
    while volume.background_step(BackgroundWork::Writeback).expect("writeback") {}
    let (ended, found) = told.recv().expect("the pages went home");
    assert_eq!((ended, found.map(|_| ())), (None, None), "what came after does not count yet");
    volume.fsync_dir(Volume::ROOT).expect("fsync");
    assert!(found_after_a_crash(&device, PAGES * 4096) == Some(pattern(2, PAGES * 4096)));
}

/// Archivers take a file without blocks for a hole, and do not read it.
#[test]
fn pages_on_their_way_home_are_blocks_of_their_file() {
    let (_, probe, volume, file) = probed();
    file.write_all_at(0, &pattern(1, 5 * 4096)).expect("write");
    let blocks = || volume.getattr(file.ino()).expect("attributes").blocks;
    assert_eq!(blocks(), 5, "dirty");
    let underway = Writeback::begin(&probe, &volume);
    assert_eq!(blocks(), 5, "on their way");
    file.write_all_at(0, &pattern(2, 4096)).expect("write");
    assert_eq!(blocks(), 5, "one of them again");
    underway.end();
    assert_eq!(blocks(), 5, "home");
}
