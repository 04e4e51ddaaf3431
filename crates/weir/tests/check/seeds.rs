//! A small seed corpus for the fuzz targets, `TARGET/seed-*`: structures of a real volume. Written to where
//! `WEIR_FUZZ_SEEDS` says, or to a temporary directory.

use super::image::{Image, read};
use super::sample;
use std::path::{Path, PathBuf};
use weir::format::frame::FrameHeader;
use weir::format::record::Records;
use weir::format::{BLOCK_BYTES, Kind, NODE_BYTES};

fn seed(into: &Path, target: &str, name: usize, bytes: &[u8]) {
    let directory = into.join(target);
    std::fs::create_dir_all(&directory).unwrap();
    std::fs::write(directory.join(format!("seed-{name}")), bytes).unwrap();
}

#[test]
fn every_fuzz_target_has_seeds() {
    let temporary = std::env::temp_dir().join(format!("weir-seeds-{}", std::process::id()));
    let asked = std::env::var_os("WEIR_FUZZ_SEEDS").map(PathBuf::from);
    let into = asked.unwrap_or_else(|| temporary.clone());
    let device = sample::closed();
    let image = Image::load(&device);
    let geometry = image.superblock.geometry;
    seed(&into, "superblock", 0, &read(&device, image.superblock.places()[0], BLOCK_BYTES));
    let root = read(&device, image.superblock.root.block, BLOCK_BYTES);
    seed(&into, "root", 0, &root[..geometry.root_bytes() as usize]);
    let bitmap = geometry.bitmap_block(0, image.root.groups[0].slot);
    seed(&into, "bitmap", 0, &read(&device, bitmap, BLOCK_BYTES));
    seed(&into, "node", 0, &read(&device, image.root.tree.root_block, NODE_BYTES));
    for (number, (key, value)) in image.items.iter().enumerate() {
        let kind = match key.kind {
            Kind::Inode => 0,
            Kind::Dirent => 1,
            Kind::Xattr => 2,
            Kind::Extent => 3,
            Kind::Inline | Kind::Orphan => continue,
        };
        seed(&into, "items", number, &[&[kind], &value[..]].concat());
    }
    for block in 0..geometry.log_blocks() {
        let first = read(&device, geometry.log_start_block() + block, BLOCK_BYTES);
        let Some(header) = FrameHeader::peek(&first) else { continue };
        seed(&into, "frame", 2 * block as usize, &first);
        let records = header.records(&first);
        if Records::new(records).all(|record| record.is_ok()) {
            seed(&into, "frame", 2 * block as usize + 1, records);
        }
    }
    for mode in 0..4_u8 {
        let changes: Vec<u8> = (0..36).map(|index: u8| index.wrapping_mul(37) ^ mode).collect();
        seed(&into, "image", mode.into(), &[&[mode], &changes[..]].concat());
    }
    for target in ["superblock", "root", "bitmap", "node", "items", "frame", "image"] {
        assert!(into.join(target).read_dir().unwrap().count() > 0, "{target}");
    }
    if into == temporary {
        std::fs::remove_dir_all(&temporary).unwrap();
    }
}
