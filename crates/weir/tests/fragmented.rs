//! Files with many small extents.
#![allow(missing_docs)]

mod common;

use common::{MIB, contents, create, format, formatted, manual, open, pattern, threads};
use weir::check::{CheckOptions, check_device};
use weir::device::buffer::AlignedBuf;
use weir::device::memory::MemoryDevice;
use weir::device::{Device, IoClass};
use weir::{AllocateMode, Error, File, OpenFlags, Volume};

/// Writeback that replaces many extents at once looks them up in batches. A batch must not end
/// inside an extent: its rest would count twice, and its blocks would be freed twice.
#[test]
fn replacing_a_fragmented_range_frees_each_block_once() {
    const PAIRS: u64 = 120;
    let device = formatted(64 * MIB, 0);
    let volume = open(&device, threads(16 * MIB));
    let file = volume.open_file("/f", OpenFlags::CREATE_NEW).expect("create");
    // Extents of two blocks that cannot be joined: every second pair is written a round later.
    for round in 0..2 {
        for pair in (round..PAIRS).step_by(2) {
            let content = vec![pair as u8; 2 * BLOCK as usize];
            file.write_at(pair * 2 * BLOCK, &content).expect("write");
            volume.checkpoint().expect("checkpoint");
        }
    }
    let whole = vec![0xee; (PAIRS * 2 * BLOCK) as usize];
    file.write_at(0, &whole).expect("write");
    file.fsync().expect("fsync");
    volume.checkpoint().expect("checkpoint");
    let mut read = vec![0; whole.len()];
    assert_eq!(file.read_at(0, &mut read).expect("read"), whole.len());
    assert!(read == whole);
    drop(file);
    volume.close().expect("close");
    drop(volume);
    let report = check_device(&device, &CheckOptions::default()).expect("check");
    assert!(report.is_clean(), "{:?}", report.problems);
}

const BLOCK: u64 = 4096;

fn closed_and_clean(volume: Volume, device: &std::sync::Arc<dyn Device>) {
    volume.close().expect("close");
    drop(volume);
    let report = check_device(device, &CheckOptions::default()).expect("check");
    assert!(report.is_clean(), "{:?}", report.problems);
}

/// Writes page `index` of file and model.
fn put(file: &File, model: &mut [u8], index: u64, seed: u64) {
    let page = pattern(seed, BLOCK as usize);
    file.write_at(index * BLOCK, &page).expect("write");
    model[(index * BLOCK) as usize..][..BLOCK as usize].copy_from_slice(&page);
}

/// A file of 4 MiB that is all hole, and what it holds.
fn sparse_file(device: &std::sync::Arc<dyn Device>) -> (Volume, File, Vec<u8>) {
    let volume = open(device, manual(16 * MIB));
    let file = create(&volume, "/f");
    let model = vec![0; 1024 * BLOCK as usize];
    file.truncate(model.len() as u64).expect("truncate");
    (volume, file, model)
}

#[test]
fn scattered_new_pages_of_a_sync_leave_in_one_write() {
    let memory = std::sync::Arc::new(MemoryDevice::new(64 * MIB));
    let device: std::sync::Arc<dyn Device> = memory.clone();
    format(&device, 0);
    let (volume, file, mut model) = sparse_file(&device);
    file.fsync().expect("fsync");
    let before = memory.stats().counters();
    // More than a frame carries, so they go home.
    for place in 0..100 {
        put(&file, &mut model, place * 10 + 3, place);
    }
    file.fsync().expect("fsync");
    let after = memory.stats().counters();
    // The pages, and the frame with their places.
    assert_eq!(after.writes - before.writes, 2);
    assert!(contents(&file) == model);
    drop(file);
    closed_and_clean(volume, &device);
    let volume = open(&device, manual(16 * MIB));
    assert!(contents(&create(&volume, "/f")) == model);
}

/// Where pages lie apart in the file, any order on the device is as good for the file; that in which they lie in memory, which is mostly
/// that in which they were written, is one segment for the disk.
#[test]
fn scattered_pages_lie_on_the_device_in_the_order_in_which_they_were_written() {
    const PAGES: u64 = 16;
    let device = formatted(64 * MIB, 0);
    let (volume, file, mut model) = sparse_file(&device);
    for number in 0..PAGES {
        put(&file, &mut model, number * 7 % PAGES * 50 + 3, number);
    }
    file.fsync().expect("fsync");
    let mut image = AlignedBuf::zeroed(64 * MIB as usize);
    device.read(0, &mut [&mut image], IoClass::SyncRead).expect("read");
    let place = |number| {
        let page = pattern(number, BLOCK as usize);
        image.chunks_exact(BLOCK as usize).position(|block| block == page).expect("on the device")
    };
    assert!((1..PAGES).all(|number| place(number) == place(number - 1) + 1));
    // What they hold and where they are is replayed, and settled, as in any other order.
    drop((file, volume));
    let volume = open(&device, manual(16 * MIB));
    assert!(contents(&create(&volume, "/f")) == model);
    closed_and_clean(volume, &device);
}

/// Several runs of one operation cut the same extent, move its parts, and stay in others of its parts.
#[test]
fn runs_of_one_operation_share_an_extent() {
    let device = formatted(64 * MIB, 0);
    let volume = open(&device, manual(16 * MIB));
    let file = create(&volume, "/f");
    let mut model = vec![0; 600 * BLOCK as usize];
    for index in 0..600 {
        put(&file, &mut model, index, index);
    }
    file.fsync().expect("fsync");
    volume.checkpoint().expect("checkpoint");
    for round in 0..6 {
        // These are in the log, and go home in place.
        for place in 0..10 {
            put(&file, &mut model, place * 50 + 2 * round, 1000 * round + place);
        }
        file.fsync().expect("fsync");
        // These are not, and get new places, some of them right beside the others.
        for place in 0..50 {
            put(&file, &mut model, place * 10 + 2 * round + place % 2, 2000 * round + place);
        }
        if round % 2 == 0 {
            file.fsync().expect("fsync");
        }
        volume.checkpoint().expect("checkpoint");
        assert!(contents(&file) == model, "round {round}");
    }
    drop(file);
    closed_and_clean(volume, &device);
    let volume = open(&device, manual(16 * MIB));
    assert!(contents(&create(&volume, "/f")) == model);
}

/// Of more extents than the log has room for, no more are gathered than it takes to know that.
#[test]
fn a_shift_that_the_log_has_no_room_for_is_refused_at_once() {
    const RUNS: u64 = 40_000;
    let device = formatted(512 * MIB, 64);
    let volume = open(&device, manual(256 * MIB));
    let file = create(&volume, "/f");
    for run in 0..RUNS {
        file.write_at(run * 8192, &[1; 4096]).expect("write");
    }
    volume.checkpoint().expect("checkpoint");
    let visits = || volume.stats().nodes.hits + volume.stats().nodes.misses;
    for (mode, length) in
        [(AllocateMode::InsertRange, 4096), (AllocateMode::CollapseRange, RUNS / 2 * 8192)]
    {
        let before = visits();
        let refused = file.allocate(mode, 4096, length);
        assert!(matches!(refused, Err(Error::NotSupported(_))), "{mode:?}: {refused:?}");
        let looked = visits() - before;
        assert!(looked < RUNS / 20, "{mode:?}: {looked} nodes were looked at");
    }
    volume.close().expect("close");
}
