//! Files with many small extents.
#![allow(missing_docs)]

mod common;

use common::{MIB, formatted, open, threads};
use weir::OpenFlags;
use weir::check::{CheckOptions, check_device};

/// Writeback that replaces many extents at once looks them up in batches. A batch must not end
/// inside an extent: its rest would count twice, and its blocks would be freed twice.
#[test]
fn replacing_a_fragmented_range_frees_each_block_once() {
    const BLOCK: usize = 4096;
    const PAIRS: u64 = 120;
    let device = formatted(64 * MIB, 0);
    let volume = open(&device, threads(16 * MIB));
    let file = volume.open_file("/f", OpenFlags::CREATE_NEW).expect("create");
    // Extents of two blocks that cannot be joined: every second pair is written a round later.
    for round in 0..2 {
        for pair in (round..PAIRS).step_by(2) {
            let content = vec![pair as u8; 2 * BLOCK];
            file.write_at(pair * 2 * BLOCK as u64, &content).expect("write");
            volume.checkpoint().expect("checkpoint");
        }
    }
    let whole = vec![0xee; PAIRS as usize * 2 * BLOCK];
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
