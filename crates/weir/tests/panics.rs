//! What becomes of others where a thread of the engine panics, as none should: an error, and no waiting for ever.

mod common;

use common::*;
use std::sync::Arc;
use weir::device::Device;
use weir::device::memory::MemoryDevice;
use weir::format::frame::FRAME_MAGIC;
use weir::*;

/// A volume whose threads panic when they write what `is_meant` says of its first bytes; those of programs do not.
fn volume(is_meant: impl Fn(&[u8]) -> bool + Send + 'static) -> Volume {
    let probe = Probe::new(Arc::new(MemoryDevice::new(64 * MIB)));
    let device: Arc<dyn Device> = probe.clone();
    format(&device, 1024);
    let volume = open(&device, threads(16 * MIB));
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
    assert!(is_shutdown(volume.sync()));
    assert!(is_shutdown(volume.sync_async().map(drop)) || volume.is_read_only());
    assert!(volume.shutdown_reason().is_some_and(|reason| reason.contains("internal error")));
    assert!(is_shutdown(volume.close()));
}

#[test]
fn a_ticket_ends_with_an_error_where_the_thread_of_the_log_panics() {
    let volume = volume(|begins| begins.starts_with(&FRAME_MAGIC));
    let file = create(&volume, "/f");
    file.write_at(0, &[1; 4096]).expect("write");
    let tickets = [0, 1].map(|_| file.fsync_async(0..u64::MAX, SyncKind::Full).expect("submit"));
    for ticket in &tickets {
        assert!(matches!(end(ticket), Err(Error::Shutdown(_))));
    }
    assert_shut_down(&volume);
}

#[test]
fn a_checkpoint_ends_with_an_error_where_its_thread_panics() {
    let volume = volume(|begins| begins.starts_with(&weir::format::node::NODE_MAGIC));
    create(&volume, "/f").fsync().expect("durable");
    assert!(with_watchdog(30, || volume.checkpoint()).is_err());
    assert_shut_down(&volume);
}
