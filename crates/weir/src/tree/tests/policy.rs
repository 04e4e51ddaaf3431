//! The node cache.

use super::super::shard::Shard;
use super::*;
use crate::format::node::{NodeBuilder, Placement};

fn leaf(block: u64, generation: u64) -> Arc<Node> {
    node(0, block, generation)
}

fn node(level: u8, block: u64, generation: u64) -> Arc<Node> {
    let mut builder = NodeBuilder::new(level);
    if level == 0 {
        builder.push_item(Key::MIN, b"").unwrap();
    } else {
        let child = crate::format::node::ChildRef { block: 1, checksum: 1 };
        builder.push_child(Key::MIN, child).unwrap();
    }
    let at = Placement { volume_id: VOLUME_ID, block, generation, tree: 0 };
    Arc::new(builder.finish(&at).unwrap().1)
}

fn shard(capacity_nodes: usize) -> Shard {
    let mut shard = Shard::default();
    shard.set_capacity(capacity_nodes);
    shard
}

/// Asks for a node, and adds it if it is missing.
fn touch(shard: &mut Shard, node: &Arc<Node>) -> bool {
    let hit = shard.get(node.child_ref()).is_some();
    if !hit {
        shard.insert(Arc::clone(node), false);
    }
    hit
}

#[test]
fn scan_does_not_evict_nodes_in_use() {
    let mut shard = shard(100);
    let hot: Vec<_> = (1..=80).map(|block| leaf(block, 1)).collect();
    let scan: Vec<_> = (1000..1500).map(|block| leaf(block, 1)).collect();
    for _ in 0..4 {
        for node in &hot {
            touch(&mut shard, node);
        }
    }
    for node in &scan {
        assert!(!touch(&mut shard, node));
    }
    assert!(hot.iter().all(|node| touch(&mut shard, node)));
}

#[test]
fn interior_nodes_outlive_a_scan_of_leaves() {
    let mut shard = shard(50);
    let interior: Vec<_> = (1..=20).map(|block| node(1, block, 1)).collect();
    for node in &interior {
        shard.insert(Arc::clone(node), false);
    }
    for block in 1000..2000 {
        shard.insert(leaf(block, 1), false);
    }
    assert!(interior.iter().all(|node| shard.get(node.child_ref()).is_some()));
}

#[test]
fn node_that_comes_back_soon_stays() {
    let mut shard = shard(20);
    let wanted = leaf(1, 1);
    shard.insert(Arc::clone(&wanted), false);
    for block in 100..125 {
        shard.insert(leaf(block, 1), false);
    }
    assert!(shard.get(wanted.child_ref()).is_none());
    shard.insert(Arc::clone(&wanted), false);
    for block in 200..400 {
        shard.insert(leaf(block, 1), false);
    }
    assert!(shard.get(wanted.child_ref()).is_some());
}

#[test]
fn stale_node_of_the_same_place_is_no_hit() {
    let mut shard = shard(10);
    let (old, new) = (leaf(5, 1), leaf(5, 2));
    shard.insert(Arc::clone(&old), false);
    assert!(shard.get(new.child_ref()).is_none());
    shard.insert(Arc::clone(&new), false);
    assert!(shard.get(old.child_ref()).is_none());
    assert!(shard.get(new.child_ref()).is_some());
    assert_eq!(shard.node_count(), 1);
    shard.replaced(old.child_ref());
    assert_eq!(shard.take_replaced().len(), 0, "only the very node is replaced");
    shard.replaced(new.child_ref());
    assert!(shard.get(new.child_ref()).is_some(), "readers of the old tree still find it");
    assert_eq!((shard.take_replaced().len(), shard.node_count()), (1, 0));
}

/// Who has looked into an older tree may have waited so long for the disk that its node's place was used again.
#[test]
fn a_node_that_was_read_late_does_not_drive_out_the_one_that_has_its_place_now() {
    for is_hot in [false, true] {
        let mut shard = shard(10);
        let (old, new) = (leaf(5, 1), leaf(5, 2));
        shard.insert(Arc::clone(&new), is_hot);
        shard.insert(Arc::clone(&old), false);
        assert!(shard.get(new.child_ref()).is_some());
        assert!(shard.get(old.child_ref()).is_none());
        assert_eq!(shard.node_count(), 1);
    }
}

#[test]
fn replaced_nodes_leave_before_hot_ones_which_outlive_a_scan() {
    let mut shard = shard(40);
    let old: Vec<_> = (1..=20).map(|block| leaf(block, 1)).collect();
    for node in &old {
        shard.insert(Arc::clone(node), true);
    }
    let new: Vec<_> = (101..=120).map(|block| leaf(block, 2)).collect();
    for (old, new) in old.iter().zip(&new) {
        assert!(shard.get(old.child_ref()).is_some());
        shard.replaced(old.child_ref());
        shard.insert(Arc::clone(new), true);
    }
    for block in 1000..1100 {
        shard.insert(leaf(block, 2), false);
    }
    assert!(old.iter().filter(|node| shard.get(node.child_ref()).is_some()).count() >= 16);
    for block in 201..=216 {
        shard.insert(leaf(block, 2), true);
    }
    assert!(old.iter().all(|node| shard.get(node.child_ref()).is_none()));
    assert!(new.iter().all(|node| shard.get(node.child_ref()).is_some()));
    // A new node takes the place of one that was replaced, and is none.
    shard.replaced(new[0].child_ref());
    shard.insert(leaf(101, 3), false);
    assert_eq!(shard.take_replaced().len(), 0);
}

#[test]
fn leaves_that_change_again_and_again_are_not_read_again() {
    // 256 nodes; the leaves that change are 60 to 120 of them.
    let mut volume = Volume::new(4 << 20);
    volume.apply((0..4500).map(numbered).collect());
    for round in 0..20_u64 {
        let before = volume.cache.stats().misses;
        let changed =
            (0..4500).step_by(20).map(|number| (Key::inode(number), Some(vec![round as u8; 192])));
        // What is added meanwhile would fill the cache in three rounds.
        let added = (0..6000).map(|number| numbered(100_000 + round * 6000 + number));
        volume.apply(changed.chain(added).collect());
        let misses = volume.cache.stats().misses - before;
        assert!(misses <= 2, "{misses} nodes were read in round {round}");
    }
}

#[test]
fn memory_stays_bounded_whatever_comes() {
    let mut random = Random(5);
    let mut shard = shard(30);
    let nodes: Vec<_> =
        (0..200).map(|block| node(u8::from(block % 7 == 0), block + 1, 1)).collect();
    for step in 0..20_000 {
        let node = &nodes[random.below(200) as usize];
        match random.below(4) {
            0 => {
                shard.replaced(node.child_ref());
                if step % 7 == 0 {
                    shard.take_replaced();
                }
            }
            _ => {
                touch(&mut shard, node);
            }
        }
        if step % 1000 == 0 {
            shard.set_capacity(1 + random.below(60) as usize);
        }
        assert!(shard.node_count() <= 60);
        let (small, main, ghost) = shard.queue_lengths();
        assert!(small + main <= 2 * 60 + 66 && ghost <= 60);
    }
    shard.set_capacity(0);
    assert_eq!(shard.node_count(), 0);
}

#[test]
fn eviction_depends_on_the_calls_only() {
    let run = || {
        let mut random = Random(6);
        let mut shard = shard(25);
        let nodes: Vec<_> = (1..100).map(|block| leaf(block, 1)).collect();
        (0..5000)
            .map(|_| touch(&mut shard, &nodes[random.below(99).min(random.below(99)) as usize]))
            .collect::<Vec<_>>()
    };
    assert_eq!(run(), run());
}

#[test]
fn cache_counts_and_keeps_within_its_capacity() {
    let mut volume = Volume::new(1 << 20);
    volume.apply((0..20_000).map(numbered).collect());
    let keys: Vec<_> = volume.model.keys().copied().collect();
    for key in &keys {
        assert!(get(&volume.cache, &volume.root, *key).unwrap().is_some());
        assert!(volume.cache.stats().bytes <= 1 << 20);
    }
    let stats = volume.cache.stats();
    assert!(stats.misses >= volume.root.node_count - 64 && stats.evictions > 0);
    assert!(stats.hits > 20_000, "{stats:?}");
    assert_eq!(stats.bytes, stats.nodes * 16384);

    // With room for everything a second round reads nothing.
    volume.cache.set_capacity(16 << 20);
    let reads = |volume: &Volume| {
        let before = volume.cache.stats().misses;
        for key in &keys {
            get(&volume.cache, &volume.root, *key).unwrap();
        }
        volume.cache.stats().misses - before
    };
    assert!(reads(&volume) > 0);
    assert_eq!(reads(&volume), 0);
    volume.cache.set_capacity(0);
    assert!(volume.cache.stats().nodes <= 8);
    assert!(reads(&volume) > 0);
}

#[test]
fn values_outlive_the_eviction_of_their_node() {
    let mut volume = Volume::new(0);
    volume.apply((0..5000).map(numbered).collect());
    let value = get(&volume.cache, &volume.root, Key::inode(17)).unwrap().unwrap();
    let copy = value.clone();
    volume.apply((0..5000).map(|number| (Key::inode(number), None)).collect());
    assert_eq!(&*value, &[17; 192]);
    assert_eq!(value, copy);
}
