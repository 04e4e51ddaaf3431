//! The decoders of tree items: what they accept is written back as it was read.

#![no_main]

use libfuzzer_sys::fuzz_target;
use weir::format::item::{Dirent, Extent, InodeItem, Xattr};

fuzz_target!(|input: &[u8]| {
    let Some((kind, bytes)) = input.split_first() else { return };
    match kind % 4 {
        0 => {
            if let Ok(item) = InodeItem::decode(bytes) {
                assert_eq!(InodeItem::decode(&item.encode()), Ok(item));
            }
        }
        1 => {
            if let Ok(entry) = Dirent::decode(bytes) {
                assert_eq!(&*entry.encode(), bytes);
            }
        }
        2 => {
            if let Ok(attribute) = Xattr::decode(bytes) {
                assert_eq!(Xattr::decode(&attribute.encode()), Ok(attribute));
            }
        }
        _ => {
            let head = Extent::decode_head(bytes);
            let Ok(extent) = Extent::decode(bytes) else {
                assert!(head.is_err());
                return;
            };
            assert_eq!(extent.encode(), bytes);
            for index in [0, extent.blocks - 1, extent.blocks, u64::MAX / 8] {
                let inside = index < extent.blocks && !extent.is_unwritten();
                assert_eq!(Extent::checksum_at(bytes, index).is_some(), inside);
            }
            let _ = extent.part(extent.blocks / 2, 1);
        }
    }
});
