//! Log frames and their records, on bytes whose checksum is right.

#![no_main]

use libfuzzer_sys::fuzz_target;
use weir::format::checksum_without_field;
use weir::format::frame::FrameHeader;
use weir::format::record::{Record, Records};

fuzz_target!(|input: &[u8]| {
    for record in Records::new(input) {
        let Ok(record) = record else { break };
        let mut bytes = Vec::new();
        if record.encode(&mut bytes).is_ok() {
            let again: Vec<_> = Records::new(&bytes).collect();
            // An empty `wrote` says nothing and is not written.
            let says_nothing =
                matches!(record, Record::Wrote { checksums, .. } if checksums.is_empty());
            assert!(says_nothing || again == [Ok(record)]);
        }
    }
    let mut frame = input.to_vec();
    frame.resize(input.len().next_multiple_of(4096).max(4096), 0);
    frame[..4].copy_from_slice(b"FRAM");
    let Some(header) = FrameHeader::peek(&frame) else { return };
    let _ = header.verify(&frame);
    let Some(meta) = frame.get(..header.meta_bytes as usize) else { return };
    let sum = checksum_without_field(meta, 4);
    frame[4..8].copy_from_slice(&sum.to_le_bytes());
    assert!(header.verify(&frame).is_some());
    for record in Records::new(header.records(&frame)) {
        if let Ok(Record::Payload { index, .. }) = record {
            let _ = header.payload(&frame, index);
        }
    }
});
