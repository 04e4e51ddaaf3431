//! Editing a closed volume below the engine: items, bits and root can be changed at will, and
//! everything is written back with right checksums, so that only the meaning is damaged.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use weir::device::buffer::AlignedBuf;
use weir::device::memory::MemoryDevice;
use weir::device::{Device, IoClass};
use weir::format::bitmap::{self, BitmapHeader, WORDS};
use weir::format::item::{Dirent, Extent, InodeItem};
use weir::format::node::{ChildRef, Node, NodeBuilder, Placement};
use weir::format::root::{Root, TreeRoot};
use weir::format::superblock::{Superblock, choose_superblock};
use weir::format::{BLOCK_BYTES, BLOCK_BYTES_U64, Key, Kind, NODE_BLOCKS, NODE_BYTES};
use weir::tree::walk::WalkVolume;
use weir::tree::{self, Visitor, WalkProblem};

/// See the module's head. One allocation group only.
pub struct Image {
    pub device: Arc<MemoryDevice>,
    pub superblock: Superblock,
    pub root: Root,
    /// Bits of everything but tree nodes.
    pub words: [u64; WORDS],
    pub items: BTreeMap<Key, Vec<u8>>,
    /// Blocks whose bits are turned around at the end.
    pub wrong_bits: Vec<u64>,
    /// Added to what the root counts, at the end.
    pub wrong_counts: (i64, i64, i64),
    /// Where the nodes were written.
    pub nodes: Vec<u64>,
    /// How many generations newer than the root they claim to be.
    pub newer_nodes: u64,
}

#[derive(Default)]
struct Collect {
    items: BTreeMap<Key, Vec<u8>>,
    nodes: Vec<u64>,
}

impl Visitor for Collect {
    fn node(&mut self, node: &Node) -> ControlFlow<()> {
        self.nodes.push(node.block());
        ControlFlow::Continue(())
    }
    fn item(&mut self, key: Key, value: &[u8]) -> ControlFlow<()> {
        self.items.insert(key, value.to_vec());
        ControlFlow::Continue(())
    }
    fn problem(&mut self, problem: WalkProblem) -> ControlFlow<()> {
        panic!("the sample is damaged: {problem:?}");
    }
}

pub fn read(device: &MemoryDevice, block: u64, bytes: usize) -> AlignedBuf {
    let mut buffer = AlignedBuf::zeroed(bytes);
    device.read(block * BLOCK_BYTES_U64, &mut [&mut buffer], IoClass::SyncRead).expect("read");
    buffer
}

pub fn write(device: &MemoryDevice, block: u64, bytes: &[u8]) {
    let bytes = AlignedBuf::from_slice(bytes);
    device.write(block * BLOCK_BYTES_U64, &[&bytes], IoClass::SyncWrite, false).expect("write");
}

/// Turns one byte around.
pub fn flip(device: &MemoryDevice, block: u64, offset: usize) {
    let mut bytes = read(device, block, BLOCK_BYTES);
    bytes[offset] ^= 0x40;
    write(device, block, &bytes);
}

pub fn load_root(device: &MemoryDevice, superblock: &Superblock) -> Root {
    let geometry = &superblock.geometry;
    let bytes =
        read(device, superblock.root.block, geometry.root_slot_blocks() as usize * BLOCK_BYTES);
    Root::decode(&bytes, geometry, &superblock.volume_id, &superblock.root).expect("root")
}

fn set_bits(words: &mut [u64; WORDS], start: u64, blocks: u64, value: bool) {
    for block in start..start + blocks {
        let (word, bit) = ((block / 64) as usize, block % 64);
        words[word] = words[word] & !(1 << bit) | u64::from(value) << bit;
    }
}

impl Image {
    pub fn load(device: &Arc<MemoryDevice>) -> Self {
        let (superblock, _) = choose_superblock(&**device).expect("superblock");
        let root = load_root(device, &superblock);
        let mut collect = Collect::default();
        let stored = &root.tree;
        let tree = tree::TreeRoot {
            block: stored.root_block,
            level: stored.level,
            checksum: stored.checksum,
            generation: stored.generation,
            item_count: stored.item_count,
            node_count: stored.node_count,
        };
        let volume = WalkVolume {
            device: &**device,
            volume_id: superblock.volume_id,
            total_blocks: superblock.geometry.total_blocks(),
        };
        tree::walk(volume, &tree, 0, &mut collect);
        let entry = &root.groups[0];
        let header = Self::bitmap_header(&superblock, &root);
        let bytes = read(device, header.block_address, BLOCK_BYTES);
        let mut words = bitmap::decode(&bytes, &header, entry).expect("bitmap");
        for block in collect.nodes {
            set_bits(&mut words, block, NODE_BLOCKS, false);
        }
        Self {
            device: device.clone(),
            superblock,
            root,
            words,
            items: collect.items,
            wrong_bits: Vec::new(),
            wrong_counts: (0, 0, 0),
            nodes: Vec::new(),
            newer_nodes: 0,
        }
    }

    fn bitmap_header(superblock: &Superblock, root: &Root) -> BitmapHeader {
        let entry = &root.groups[0];
        BitmapHeader {
            volume_id: superblock.volume_id,
            block_address: superblock.geometry.bitmap_block(0, entry.slot),
            generation: entry.generation,
            group: 0,
        }
    }

    fn free_run(&self) -> u64 {
        let geometry = &self.superblock.geometry;
        let is_free = |block: u64| self.words[(block / 64) as usize] >> (block % 64) & 1 == 0;
        (geometry.data_start()..geometry.data_end() - NODE_BLOCKS)
            .find(|start| (*start..start + NODE_BLOCKS).all(is_free))
            .expect("a free run")
    }

    fn write_node(&mut self, builder: NodeBuilder) -> ChildRef {
        let block = self.free_run();
        set_bits(&mut self.words, block, NODE_BLOCKS, true);
        self.nodes.push(block);
        let place = Placement {
            volume_id: self.superblock.volume_id,
            block,
            generation: self.root.generation + self.newer_nodes,
            tree: 0,
        };
        let (bytes, node) = builder.finish(&place).expect("node");
        assert_eq!(bytes.len(), NODE_BYTES);
        write(&self.device, block, &bytes);
        node.child_ref()
    }

    /// Packs entries into nodes of one level.
    fn write_level<T>(
        &mut self,
        level: u8,
        entries: &[(Key, T)],
        push: impl Fn(&mut NodeBuilder, Key, &T) -> bool,
    ) -> Vec<(Key, ChildRef)> {
        let mut children = Vec::new();
        let mut builder = NodeBuilder::new(level);
        let mut first = None;
        for (key, entry) in entries {
            if !push(&mut builder, *key, entry) {
                let full = std::mem::replace(&mut builder, NodeBuilder::new(level));
                children.push((first.take().expect("a key"), self.write_node(full)));
                assert!(push(&mut builder, *key, entry), "an item fits into an empty node");
            }
            first.get_or_insert(*key);
        }
        if let Some(first) = first {
            children.push((first, self.write_node(builder)));
        }
        children
    }

    /// Writes everything back.
    pub fn store(&mut self) {
        let items: Vec<_> = std::mem::take(&mut self.items).into_iter().collect();
        let mut level = 0;
        let mut children = self.write_level(0, &items, |builder, key, value: &Vec<u8>| {
            builder.push_item(key, value).is_ok()
        });
        while children.len() > 1 {
            level += 1;
            let below = std::mem::take(&mut children);
            children = self.write_level(level, &below, |builder, key, child: &ChildRef| {
                builder.push_child(key, *child).is_ok()
            });
        }
        self.items = items.into_iter().collect();
        let top = children.first().expect("items").1;
        let (items, nodes, inodes) = self.wrong_counts;
        self.root.tree = TreeRoot {
            root_block: top.block,
            level,
            checksum: top.checksum,
            item_count: (self.items.len() as u64).wrapping_add_signed(items),
            node_count: (self.nodes.len() as u64).wrapping_add_signed(nodes),
            generation: self.root.tree.generation,
        };
        self.root.inode_count = self.root.inode_count.wrapping_add_signed(inodes);
        for block in std::mem::take(&mut self.wrong_bits) {
            self.words[(block / 64) as usize] ^= 1 << (block % 64);
        }
        let header = Self::bitmap_header(&self.superblock, &self.root);
        let (bytes, checksum) = bitmap::encode(&header, &self.words);
        write(&self.device, header.block_address, &bytes);
        self.root.groups[0].checksum = checksum;
        self.root.groups[0].free_blocks = self.words.iter().map(|word| word.count_zeros()).sum();
        self.store_root();
    }

    /// Writes root and superblock.
    pub fn store_root(&mut self) {
        let geometry = self.superblock.geometry;
        let block = self.superblock.root.block;
        let (bytes, pointer) =
            self.root.encode(&geometry, &self.superblock.volume_id, block).expect("root");
        write(&self.device, block, &bytes);
        self.superblock.root = pointer;
        for block in self.superblock.places() {
            write(&self.device, block, &self.superblock.encode(block).expect("superblock"));
        }
    }

    /// Changes an inode.
    pub fn edit_inode(&mut self, number: u64, edit: impl FnOnce(&mut InodeItem)) {
        let value = self.items.get_mut(&Key::inode(number)).expect("an inode");
        let mut item = InodeItem::decode(value).expect("an inode");
        edit(&mut item);
        *value = item.encode().to_vec();
    }

    /// Items of one inode and kind.
    pub fn items_of(&self, number: u64, kind: Kind) -> Vec<(Key, Vec<u8>)> {
        let (first, last) = (Key::new(number, kind, 0), Key::new(number, kind, u64::MAX));
        self.items.range(first..=last).map(|(key, value)| (*key, value.clone())).collect()
    }

    /// The key of the entry `name` in `directory`, and the inode that it names.
    pub fn entry(&self, directory: u64, name: &str) -> (Key, u64) {
        self.items_of(directory, Kind::Dirent)
            .into_iter()
            .find_map(|(key, value)| {
                let entry = Dirent::decode(&value).expect("an entry");
                (entry.name == name.as_bytes()).then_some((key, entry.inode))
            })
            .unwrap_or_else(|| panic!("no entry {name}"))
    }

    /// The inode that a path names.
    pub fn find(&self, path: &str) -> u64 {
        path.split('/').filter(|name| !name.is_empty()).fold(1, |dir, name| self.entry(dir, name).1)
    }

    /// The extents of an inode.
    pub fn extents(&self, number: u64) -> Vec<(Key, Extent)> {
        let items = self.items_of(number, Kind::Extent).into_iter();
        items.map(|(key, value)| (key, Extent::decode(&value).expect("an extent"))).collect()
    }
}
