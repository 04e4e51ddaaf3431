//! What becomes of others where a thread of the engine panics, as none should: an error, and no waiting for ever.

mod common;

use common::*;
use std::sync::Arc;
use weir::device::Device;
use weir::device::memory::MemoryDevice;
use weir::format::frame::FRAME_MAGIC;
use weir::*;

fn probed() -> (Arc<Probe>, Volume) {
    let probe = Probe::new(Arc::new(MemoryDevice::new(64 * MIB)));
    let device: Arc<dyn Device> = probe.clone();
    format(&device, 1024);
    (probe, open(&device, threads(16 * MIB)))
}

/// A volume whose threads panic when they write what `is_meant` says of its first bytes; those of programs do not.
fn volume(is_meant: impl Fn(&[u8]) -> bool + Send + 'static) -> Volume {
    let (probe, volume) = probed();
    probe.refuse(move |_, begins| {
        assert!(!(weir::sync::is_own_thread() && is_meant(begins)), "on purpose");
        false
    });
    volume
}

/// What the ticket ends with, which it does.
fn end(ticket: &SyncTicket) -> Result<()> {
    ticket.wait_timeout(30_000_000).expect("never ends")
}

fn assert_shut_down(volume: &Volume) {
    let is_shutdown = |result| matches!(result, Err(Error::Shutdown(_)));
    assert!(is_shutdown(with_watchdog(30, || volume.sync())));
    assert!(is_shutdown(volume.sync_async().map(drop)) || volume.is_read_only());
    assert!(volume.shutdown_reason().is_some_and(|reason| reason.contains("internal error")));
    assert!(is_shutdown(with_watchdog(30, || volume.close())));
}

#[test]
fn a_ticket_ends_with_an_error_where_the_thread_of_the_log_panics() {
    let volume = volume(|begins| begins.starts_with(&FRAME_MAGIC));
    let file = create(&volume, "/f");
    file.write_at(0, &[1; 4096]).expect("write");
    let submit = || file.fsync_async(0..u64::MAX, SyncKind::Full);
    let mut tickets = vec![submit().expect("submit")];
    // The thread may have panicked by now.
    tickets.extend(submit());
    for ticket in &tickets {
        assert!(matches!(end(ticket), Err(Error::Shutdown(_))));
    }
    assert_shut_down(&volume);
}

#[test]
fn a_ticket_ends_with_an_error_where_the_thread_that_does_its_sync_panics() {
    let volume = volume(|begins| begins.starts_with(&[7; 64]));
    let file = create(&volume, "/f");
    // More than travels in the log, and less than anybody else looks after.
    file.write_at(0, &vec![7; 2 << 20]).expect("write");
    let ticket = file.fsync_async(0..u64::MAX, SyncKind::Full).expect("submit");
    assert!(matches!(end(&ticket), Err(Error::Shutdown(_))));
    assert_shut_down(&volume);
}

#[test]
fn what_was_handed_over_is_waited_for_no_longer_where_the_flusher_panics() {
    let volume = volume(|begins| begins.starts_with(&[7; 64]));
    let files = [0, 1].map(|number| create(&volume, &format!("/f{number}")));
    let range = || 0..2 << 20;
    for file in &files {
        file.write_at(0, &vec![7; 2 << 20]).expect("write");
    }
    for file in &files {
        // The flusher may have panicked before this is over.
        let _ = file.sync_range(range(), SyncRangeFlags::WRITE);
    }
    for file in &files {
        let waited = with_watchdog(30, || file.sync_range(range(), SyncRangeFlags::WAIT_AFTER));
        assert!(matches!(waited, Ok(()) | Err(Error::Shutdown(_))), "{waited:?}");
    }
    assert_shut_down(&volume);
}

/// The thread of a program that writes the frame of all.
#[test]
fn others_hear_of_it_where_the_thread_of_a_program_panics_amid_a_frame() {
    let (probe, volume) = probed();
    let file = create(&volume, "/f");
    let tickets: Vec<SyncTicket> = std::thread::scope(|scope| {
        file.write_at(0, &[1; 4096]).expect("write");
        let (ours, theirs) = (file.clone(), file.clone());
        let (begun, begins) = std::sync::mpsc::channel();
        let (go, gone) = std::sync::mpsc::channel::<()>();
        let state = std::sync::Mutex::new((begun, gone));
        probe.refuse(move |_, start| {
            if !weir::sync::is_own_thread() && start.starts_with(&FRAME_MAGIC) {
                let state = state.lock().expect("lock");
                state.0.send(()).expect("begun");
                state.1.recv().expect("go");
                panic!("on purpose");
            }
            false
        });
        let panics = scope.spawn(move || ours.fsync());
        begins.recv().expect("the frame is being written");
        let waits = scope.spawn(move || {
            theirs.write_at(8192, &[2; 4096]).expect("write");
            theirs.fsync()
        });
        let tickets = [0, 1].map(|_| file.fsync_async(0..u64::MAX, SyncKind::Full));
        std::thread::sleep(std::time::Duration::from_millis(20));
        go.send(()).expect("go");
        assert!(panics.join().is_err(), "it panics");
        let waited = with_watchdog(30, || waits.join());
        // The second may be the one that joins, and panics as well.
        assert!(!matches!(waited, Ok(Ok(()))), "{waited:?}");
        tickets.into_iter().flatten().collect()
    });
    for ticket in &tickets {
        assert!(matches!(end(ticket), Err(Error::Shutdown(_))));
    }
    assert_shut_down(&volume);
}

/// Who reads a page that somebody else was about to read who has panicked.
#[test]
fn a_page_is_read_by_another_where_the_thread_that_reads_it_panics() {
    let (probe, volume) = probed();
    create(&volume, "/f").write_at(0, &pattern(3, 4096)).expect("write");
    volume.close().expect("close");
    let device: Arc<dyn Device> = probe.clone();
    let volume = open(&device, threads(16 * MIB));
    let file = volume.open_file("/f", OpenFlags::READ).expect("open");
    probe.amid_next_page_read(|| panic!("on purpose"));
    let reader = file.clone();
    let panicked = std::thread::spawn(move || reader.read_at(0, &mut [0; 4096]).map(drop)).join();
    assert!(panicked.is_err() && probe.has_happened());
    let mut page = vec![0; 4096];
    with_watchdog(30, || file.read_at(0, &mut page)).expect("read");
    assert!(page == pattern(3, 4096));
    volume.close().expect("close");
}

#[test]
fn a_checkpoint_ends_with_an_error_where_its_thread_panics() {
    let volume = volume(|begins| begins.starts_with(&weir::format::node::NODE_MAGIC));
    create(&volume, "/f").fsync().expect("durable");
    assert!(with_watchdog(30, || volume.checkpoint()).is_err());
    assert_shut_down(&volume);
}

#[test]
fn a_program_that_panics_with_a_volume_open_leaves_it_in_good_order() {
    for options in [manual(16 * MIB), threads(16 * MIB)] {
        let device = formatted(64 * MIB, 0);
        let own = device.clone();
        let is_durable = with_watchdog(30, move || {
            let (told, hears) = std::sync::mpsc::channel();
            let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let volume = open(&own, options);
                let file = create(&volume, "/f");
                file.write_at(0, &[1; 4096]).expect("write");
                let ticket = file.fsync_async(0..u64::MAX, SyncKind::Full).expect("submit");
                ticket.on_completion(move |result| told.send(result).expect("somebody listens"));
                drop(file);
                assert!(volume.is_read_only(), "on purpose");
            }));
            assert!(panicked.is_err());
            hears.recv().expect("it ends")
        });
        assert_eq!(is_durable, Ok(()));
        let volume = open(&device, manual(16 * MIB));
        assert_eq!(volume.metadata("/f").map(|attr| attr.size_bytes), Ok(4096));
    }
}
