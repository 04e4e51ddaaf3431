//! Writes a small seed corpus, `corpus/TARGET/`: structures of a real volume.

#[path = "../../crates/weir/tests/check/image.rs"]
#[allow(dead_code)]
mod image;
#[path = "../../crates/weir/tests/check/sample.rs"]
#[allow(dead_code)]
mod sample;

use std::path::Path;
use weir::format::frame::FrameHeader;
use weir::format::record::Records;
use weir::format::{BLOCK_BYTES, Kind, NODE_BYTES};

fn seed(target: &str, name: usize, bytes: &[u8]) -> std::io::Result<()> {
    let directory = Path::new("corpus").join(target);
    std::fs::create_dir_all(&directory)?;
    std::fs::write(directory.join(format!("seed-{name}")), bytes)
}

fn main() -> std::io::Result<()> {
    let device = sample::closed();
    let image = image::Image::load(&device);
    let geometry = image.superblock.geometry;
    seed("superblock", 0, &image::read(&device, image.superblock.places()[0], BLOCK_BYTES))?;
    let root = image::read(&device, image.superblock.root.block, BLOCK_BYTES);
    seed("root", 0, &root[..geometry.root_bytes() as usize])?;
    let bitmap = geometry.bitmap_block(0, image.root.groups[0].slot);
    seed("bitmap", 0, &image::read(&device, bitmap, BLOCK_BYTES))?;
    seed("node", 0, &image::read(&device, image.root.tree.root_block, NODE_BYTES))?;
    for (number, (key, value)) in image.items.iter().enumerate() {
        let kind = match key.kind {
            Kind::Inode => 0,
            Kind::Dirent => 1,
            Kind::Xattr => 2,
            Kind::Extent => 3,
            Kind::Inline | Kind::Orphan => continue,
        };
        seed("items", number, &[&[kind], &value[..]].concat())?;
    }
    for block in 0..geometry.log_blocks() {
        let first = image::read(&device, geometry.log_start_block() + block, BLOCK_BYTES);
        let Some(header) = FrameHeader::peek(&first) else { continue };
        seed("frame", 2 * block as usize, &first)?;
        let records = header.records(&first);
        if Records::new(records).all(|record| record.is_ok()) {
            seed("frame", 2 * block as usize + 1, records)?;
        }
    }
    for mode in 0..4_u8 {
        let changes: Vec<u8> = (0..36).map(|index: u8| index.wrapping_mul(37) ^ mode).collect();
        seed("image", mode.into(), &[&[mode], &changes[..]].concat())?;
    }
    Ok(())
}
