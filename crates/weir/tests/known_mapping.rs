//! What was looked up of a file's mapping is not used once the mapping has changed.

mod common;

use common::*;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use weir::check::{CheckOptions, check_device};
use weir::device::Device;
use weir::*;

const PAGE: u64 = 4096;
/// More than travel in the log: a sync sends so many home.
const CROWD_PAGES: u64 = 40;

fn volume_on_probe() -> (Arc<Probe>, Volume) {
    let probe = Probe::new(formatted(32 * MIB, 0));
    let volume = Volume::open_device(probe.clone(), manual(4 * MIB)).expect("open");
    (probe, volume)
}

/// Writes what `seed` makes to pages `first ..`, into the file and what is expected of it.
fn write(file: &File, expected: &mut Vec<u8>, first: u64, pages: u64, seed: u64) {
    let (start, bytes) = ((first * PAGE) as usize, pattern(seed, (pages * PAGE) as usize));
    file.write_at(first * PAGE, &bytes).expect("write");
    expected.resize(expected.len().max(start + bytes.len()), 0);
    expected[start..start + bytes.len()].copy_from_slice(&bytes);
}

/// The file is as expected: now, and on a volume that was closed, found to be clean, and opened again.
fn holds(probe: Arc<Probe>, volume: Volume, file: File, expected: &[u8]) {
    assert!(contents(&file) == expected, "while it is open");
    drop(file);
    volume.close().expect("close");
    drop(volume);
    let device: Arc<dyn Device> = probe;
    let report = check_device(&device, &CheckOptions::default()).expect("check");
    assert!(report.is_clean(), "{:#?}", report.problems);
    let volume = open(&device, manual(4 * MIB));
    let file = volume.open_file("/f", OpenFlags::READ).expect("open");
    assert!(contents(&file) == expected, "after it was opened again");
}

/// A sync looks up that new pages follow an extent. While they are written that extent goes: it must not come back, lengthened,
/// with blocks that are free.
#[test]
fn an_extent_that_goes_amid_the_writing_of_its_successors_stays_gone() {
    for mode in [AllocateMode::PunchHole, AllocateMode::ZeroRange, AllocateMode::ZeroRangeKeepSize]
    {
        with_watchdog(60, || {
            let (probe, volume) = volume_on_probe();
            let (file, mut expected) = (create(&volume, "/f"), Vec::new());
            write(&file, &mut expected, 0, 4, 1);
            volume.checkpoint().expect("checkpoint");
            write(&file, &mut expected, 4, CROWD_PAGES, 2);
            let other = volume.open_file("/f", OpenFlags::READ_WRITE).expect("open");
            probe.amid_next_data_write(move || {
                other.allocate(mode, 0, 4 * PAGE).expect("the extent goes");
            });
            file.fsync().expect("fsync");
            assert!(probe.has_happened(), "the pages went home");
            expected[..4 * PAGE as usize].fill(0);
            holds(probe, volume, file, &expected);
        });
    }
}

/// A sync whose writes fail leaves behind what it has looked up. By the next sync of the same pages these lie elsewhere: the blocks
/// where they once were must not be given back again.
#[test]
fn blocks_that_a_failed_sync_has_looked_up_are_not_freed_by_the_next_one() {
    let (probe, volume) = volume_on_probe();
    let (file, mut expected) = (create(&volume, "/f"), Vec::new());
    // The last pages stay mapped throughout.
    write(&file, &mut expected, 0, CROWD_PAGES + 4, 1);
    volume.checkpoint().expect("checkpoint");
    write(&file, &mut expected, 0, CROWD_PAGES, 2);
    probe.fail_data_writes.store(true, Ordering::Relaxed);
    file.fsync().expect_err("the writes fail");
    probe.fail_data_writes.store(false, Ordering::Relaxed);
    file.allocate(AllocateMode::PunchHole, 0, CROWD_PAGES * PAGE).expect("punch");
    volume.checkpoint().expect("checkpoint");
    write(&file, &mut expected, 0, CROWD_PAGES, 3);
    file.fsync().expect("fsync");
    holds(probe, volume, file, &expected);
}
