//! `weir dump`: structures on the disk, for people who debug them. Reads through the format module
//! alone, so it shows a volume that cannot be opened, as far as its checksums hold.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use weir::device::buffer::AlignedBuf;
use weir::device::posix::{OpenMode, PosixDevice};
use weir::device::{Device, IoClass};
use weir::format::bitmap::{self, BitmapHeader};
use weir::format::frame::{FrameHeader, RETRY_WINDOW_BLOCKS};
use weir::format::geometry::Geometry;
use weir::format::node::{ChildRef, Expectation, Node};
use weir::format::record::{Record, Records};
use weir::format::root::Root;
use weir::format::superblock::{Superblock, choose_superblock};
use weir::format::{BLOCK_BYTES, BLOCK_BYTES_U64, GROUP_BLOCKS, Key, Kind, NODE_BYTES};

use crate::commands::info::id_text;
use crate::failure::{Failure, Outcome};
use crate::open::{once_closed, print};
use crate::show;

/// Arguments of `weir dump`.
#[derive(Debug, Args)]
#[command(
    long_about = "Show structures on the disk of an unmounted volume. Every checksum is verified; \
                  what does not match is said and skipped.",
    after_help = "Examples:\n  weir dump disk.weir superblock\n  weir dump disk.weir log --all\n  weir dump disk.weir tree free --json"
)]
pub struct DumpArgs {
    /// A file or block device
    #[arg(value_name = "VOL")]
    pub volume: PathBuf,
    /// What to show
    #[arg(value_name = "WHAT", default_value = "superblock")]
    pub what: Vec<What>,
    /// The log with its records, the tree with its items, free space with its runs
    #[arg(long, short)]
    pub all: bool,
    /// One JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// A structure to show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum What {
    /// All copies of the superblock, and the checkpoint root
    Superblock,
    /// Frames that a recovery would read
    Log,
    /// Nodes of the file system's tree
    Tree,
    /// Free space by allocation group
    Free,
}

struct Dump<'a> {
    device: PosixDevice,
    superblock: Superblock,
    path: &'a Path,
    all: bool,
    json: bool,
}

/// Runs the command.
pub fn run(args: &DumpArgs) -> Outcome {
    let path = args.volume.as_path();
    let fail = |error: weir::Error| Failure::volume(path, &error);
    let device = once_closed(path, || PosixDevice::open(path, OpenMode::ReadOnly)).map_err(fail)?;
    let (superblock, places) = choose_superblock(&device).map_err(fail)?;
    let dump = Dump { device, superblock, path, all: args.all, json: args.json };
    for what in &args.what {
        match what {
            What::Superblock => {
                for place in &places {
                    let (found, value) = match &place.found {
                        Ok(generation) => (
                            format!("generation {generation}"),
                            json!({ "superblock_copy": place.block, "generation": generation }),
                        ),
                        Err(error) => (
                            error.to_string(),
                            json!({ "superblock_copy": place.block, "damaged": error.to_string() }),
                        ),
                    };
                    let text = format!("superblock copy at block {}: {found}", place.block);
                    dump.line(&text, &value)?;
                }
                dump.superblock()?;
            }
            What::Log => dump.log()?,
            What::Tree => dump.tree()?,
            What::Free => dump.free()?,
        }
    }
    Ok(())
}

impl Dump<'_> {
    fn line(&self, text: &str, value: &Value) -> Outcome {
        if self.json {
            return print(show::json_text(value, false).as_bytes());
        }
        print(format!("{text}\n").as_bytes())
    }

    fn read(&self, block: u64, blocks: u64) -> Outcome<AlignedBuf> {
        let mut buffer = AlignedBuf::zeroed(blocks as usize * BLOCK_BYTES);
        self.device
            .read(block * BLOCK_BYTES_U64, &mut [&mut buffer], IoClass::SyncRead)
            .map_err(|error| Failure::volume(self.path, &error.into()))?;
        Ok(buffer)
    }

    fn root(&self) -> Outcome<Root> {
        let (geometry, pointer) = (&self.superblock.geometry, &self.superblock.root);
        let bytes = self.read(pointer.block, geometry.root_slot_blocks().into())?;
        Root::decode(&bytes, geometry, &self.superblock.volume_id, pointer)
            .map_err(|error| Failure::new(self.path.display(), error))
    }

    fn superblock(&self) -> Outcome {
        let superblock = &self.superblock;
        let value = superblock_json(superblock);
        let text = format!("superblock: {}", show::json_text(&value, true).trim_end());
        self.line(&text, &json!({ "superblock": value }))?;
        let root = self.root()?;
        let text = format!(
            "root: generation {}, checkpoint lsn {}, next inode {}, {} inodes, {} free blocks, \
             tree {:?}",
            root.generation,
            root.checkpoint_lsn,
            root.next_inode,
            root.inode_count,
            root.free_blocks(),
            root.tree
        );
        let value = json!({ "root": {
            "generation": root.generation,
            "checkpoint_lsn": root.checkpoint_lsn,
            "next_inode": root.next_inode,
            "inode_count": root.inode_count,
            "free_blocks": root.free_blocks(),
            "tree_block": root.tree.root_block,
            "tree_level": root.tree.level,
            "tree_items": root.tree.item_count,
            "tree_nodes": root.tree.node_count,
        } });
        self.line(&text, &value)
    }

    /// The frame that continues the log at `position`, if one is there.
    fn frame_at(
        &self,
        position: u64,
        sequence: u64,
        digest: u64,
    ) -> Outcome<Option<(FrameHeader, AlignedBuf, u64)>> {
        let geometry = &self.superblock.geometry;
        let start = geometry.log_start_block();
        let ring_blocks = geometry.log_blocks();
        if position >= ring_blocks {
            return Ok(None);
        }
        let first = self.read(start + position, 1)?;
        let Some(header) = FrameHeader::peek(&first) else { return Ok(None) };
        let continues = header.volume_id == self.superblock.volume_id
            && header.sequence == sequence
            && header.prev_digest == digest
            && header.ring_position_blocks == position
            && position + header.total_blocks() <= ring_blocks;
        if !continues {
            return Ok(None);
        }
        let frame = self.read(start + position, header.total_blocks())?;
        Ok(header.verify(&frame).map(|digest| (header, frame, digest)))
    }

    fn log(&self) -> Outcome {
        let replay = &self.superblock.replay;
        let (mut position, mut sequence, mut digest) =
            (replay.position_blocks, replay.sequence, replay.prev_digest);
        let mut frames = 0_u64;
        loop {
            let window = (position..=position + RETRY_WINDOW_BLOCKS).chain(0..=RETRY_WINDOW_BLOCKS);
            let mut found = None;
            for place in window {
                found = self.frame_at(place, sequence, digest)?;
                if found.is_some() {
                    break;
                }
            }
            let Some((header, frame, next_digest)) = found else { break };
            self.frame(&header, &frame)?;
            frames += 1;
            position = header.ring_position_blocks + header.total_blocks();
            sequence = sequence.wrapping_add(1);
            digest = next_digest;
        }
        let counted = show::counted(frames, "frame", "frames");
        let text = format!("log: {counted} to replay from block {}", replay.position_blocks);
        let value =
            json!({ "log_frames": frames, "replay_position_blocks": replay.position_blocks });
        self.line(&text, &value)
    }

    fn frame(&self, header: &FrameHeader, frame: &[u8]) -> Outcome {
        let text = format!(
            "frame {} at {}: epoch {}, lsn {}..{}, transaction {}, {} records in {} bytes, {} \
             payload blocks{}",
            header.sequence,
            header.ring_position_blocks,
            header.epoch,
            header.first_lsn,
            header.last_lsn,
            header.transaction,
            header.record_count,
            header.meta_bytes,
            header.payload_blocks,
            if header.continues { ", batch goes on" } else { "" },
        );
        let value = json!({
            "frame": header.sequence,
            "position_blocks": header.ring_position_blocks,
            "epoch": header.epoch,
            "first_lsn": header.first_lsn,
            "last_lsn": header.last_lsn,
            "transaction": header.transaction,
            "records": header.record_count,
            "meta_bytes": header.meta_bytes,
            "payload_blocks": header.payload_blocks,
            "continues": header.continues,
        });
        self.line(&text, &value)?;
        if !self.all {
            return Ok(());
        }
        for record in Records::new(header.records(frame)) {
            let (text, value) = match record {
                Ok(record) => (format!("{record:?}"), record_json(&record)),
                Err(error) => (error.to_string(), json!({ "damaged": error.to_string() })),
            };
            self.line(&format!("    {}", shortened(&text)), &json!({ "record": value }))?;
        }
        Ok(())
    }

    fn tree(&self) -> Outcome {
        let tree = self.root()?.tree;
        if tree.root_block == 0 {
            return self.line("tree: empty", &json!({ "tree": "empty" }));
        }
        let root = ChildRef { block: tree.root_block, checksum: tree.checksum };
        let mut todo = vec![(root, tree.level)];
        while let Some((child, level)) = todo.pop() {
            let bytes = self.read(child.block, (NODE_BYTES / BLOCK_BYTES) as u64)?;
            let expected = Expectation { volume_id: self.superblock.volume_id, child, level };
            let node = match Node::parse(&bytes, &expected) {
                Ok(node) => node,
                Err(error) => {
                    let text = format!("damaged: {error}");
                    self.line(&text, &json!({ "block": child.block, "damaged": text }))?;
                    continue;
                }
            };
            self.node(&node)?;
            if let Some(below) = level.checked_sub(1) {
                let children = (0..node.count()).rev().filter_map(|slot| node.child(slot));
                todo.extend(children.map(|child| (child, below)));
            }
        }
        Ok(())
    }

    fn node(&self, node: &Node) -> Outcome {
        let (first, last) = (node.first_key(), node.last_key());
        let range = format!("{} .. {}", key_text(first), key_text(last));
        let indent = "  ".repeat(usize::from(8_u8.saturating_sub(node.level())));
        let text = format!(
            "{indent}level {} block {} generation {} slots {} used {} keys {range}",
            node.level(),
            node.block(),
            node.generation(),
            node.count(),
            node.used_bytes()
        );
        let value = json!({
            "block": node.block(),
            "level": node.level(),
            "generation": node.generation(),
            "slots": node.count(),
            "used_bytes": node.used_bytes(),
            "first_key": first.map(key_json),
            "last_key": last.map(key_json),
        });
        self.line(&text, &value)?;
        if !self.all || node.level() > 0 {
            return Ok(());
        }
        for slot in 0..node.count() {
            let (key, value) = (node.key(slot), node.value(slot).unwrap_or_default());
            let text =
                format!("{} = {} bytes {}", key_text(key), value.len(), value.escape_ascii());
            let item = json!({ "item": {
                "key": key.map(key_json),
                "value_bytes": value.len(),
                "value_hex": show::hex(value),
            } });
            self.line(&format!("{indent}    {}", shortened(&text)), &item)?;
        }
        Ok(())
    }

    fn free(&self) -> Outcome {
        let root = self.root()?;
        let geometry = &self.superblock.geometry;
        for (group, entry) in (0_u32..).zip(&root.groups) {
            let total = GROUP_BLOCKS.min(geometry.total_blocks() - Geometry::group_start(group));
            let text = format!("group {group}: {} of {total} blocks free", entry.free_blocks);
            let value =
                json!({ "group": group, "free_blocks": entry.free_blocks, "blocks": total });
            self.line(&text, &value)?;
            if !self.all {
                continue;
            }
            let block = geometry.bitmap_block(group, entry.slot);
            let header = BitmapHeader {
                volume_id: self.superblock.volume_id,
                block_address: block,
                generation: entry.generation,
                group,
            };
            match bitmap::decode(&self.read(block, 1)?, &header, entry) {
                Ok(words) => self.runs(group, &words)?,
                Err(error) => {
                    let text = format!("    damaged: {error}");
                    self.line(&text, &json!({ "group": group, "damaged": error.to_string() }))?;
                }
            }
        }
        let text = format!("free: {} blocks", root.free_blocks());
        self.line(&text, &json!({ "free_blocks": root.free_blocks() }))
    }

    fn runs(&self, group: u32, words: &[u64]) -> Outcome {
        let base = Geometry::group_start(group);
        let is_free = |bit: u64| words[bit as usize / 64] >> (bit % 64) & 1 == 0;
        let bits = words.len() as u64 * 64;
        let mut bit = 0;
        while bit < bits {
            let start = bit;
            while bit < bits && is_free(bit) {
                bit += 1;
            }
            if bit > start {
                let text = format!("    {} +{}", base + start, bit - start);
                self.line(&text, &json!({ "free_block": base + start, "blocks": bit - start }))?;
            }
            bit += 1;
        }
        Ok(())
    }
}

fn superblock_json(superblock: &Superblock) -> Value {
    let (geometry, features) = (&superblock.geometry, &superblock.features);
    let (root, replay) = (&superblock.root, &superblock.replay);
    json!({
        "volume_id": id_text(superblock),
        "generation": superblock.generation,
        "label": superblock.label,
        "created_ns": superblock.created_ns,
        "total_blocks": geometry.total_blocks(),
        "log_start_block": geometry.log_start_block(),
        "log_blocks": geometry.log_blocks(),
        "groups": geometry.group_count(),
        "features": {
            "compat": features.compat,
            "ro_compat": features.ro_compat,
            "incompat": features.incompat,
        },
        "root": {
            "block": root.block,
            "generation": root.generation,
            "checksum": root.checksum,
        },
        "log_epoch": superblock.log_epoch,
        "epoch_first_sequence": superblock.epoch_first_sequence,
        "replay": {
            "position_blocks": replay.position_blocks,
            "sequence": replay.sequence,
            // More than a number of a JSON reader need hold.
            "prev_digest": format!("{:#018x}", replay.prev_digest),
        },
        "durable_lsn": superblock.durable_lsn,
        "durable_sequence": superblock.durable_sequence,
        "replay_epoch": superblock.replay_epoch,
        "clean": superblock.clean,
        "errors_seen": superblock.errors_seen,
    })
}

/// The word for what an item is.
fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Inode => "inode",
        Kind::Inline => "inline",
        Kind::Dirent => "dirent",
        Kind::Xattr => "xattr",
        Kind::Extent => "extent",
        Kind::Orphan => "orphan",
    }
}

fn key_json(key: Key) -> Value {
    json!({ "inode": key.inode, "kind": kind_name(key.kind), "offset": key.offset })
}

/// `12 dirent 34`: inode, kind and offset.
fn key_text(key: Option<Key>) -> String {
    key.map_or_else(
        || "no key".to_owned(),
        |key| format!("{} {} {}", key.inode, kind_name(key.kind), key.offset),
    )
}

fn record_json(record: &Record<'_>) -> Value {
    match *record {
        Record::Put { key, value } => json!({
            "kind": "put",
            "key": key_json(key),
            "value_bytes": value.len(),
            "value_hex": show::hex(value),
        }),
        Record::Delete { key } => json!({ "kind": "delete", "key": key_json(key) }),
        Record::Alloc { block, length_blocks } => {
            json!({ "kind": "alloc", "block": block, "length_blocks": length_blocks })
        }
        Record::Free { block, length_blocks } => {
            json!({ "kind": "free", "block": block, "length_blocks": length_blocks })
        }
        Record::Payload { inode, file_block, home_block, index, checksum } => json!({
            "kind": "payload",
            "inode": inode,
            "file_block": file_block,
            "home_block": home_block,
            "index": index,
            "checksum": checksum,
        }),
        Record::Wrote { block, checksums } => json!({
            "kind": "wrote",
            "block": block,
            "checksums": checksums.iter().collect::<Vec<_>>(),
        }),
        Record::Home { inode, file_block, block, checksum } => json!({
            "kind": "home",
            "inode": inode,
            "file_block": file_block,
            "block": block,
            "checksum": checksum,
        }),
        Record::NextInode { next_inode } => {
            json!({ "kind": "next_inode", "next_inode": next_inode })
        }
        Record::Settled { inode, file_block, length_blocks } => json!({
            "kind": "settled",
            "inode": inode,
            "file_block": file_block,
            "length_blocks": length_blocks,
        }),
    }
}

/// At most 160 characters.
fn shortened(text: &str) -> String {
    const LIMIT: usize = 160;
    match text.char_indices().nth(LIMIT) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}
