//! Behaviour against the model, shape, and accounting.

use super::*;
use proptest::prelude::*;

fn keys() -> impl Strategy<Value = Key> {
    (0u64..30, 1u8..=6, 0u64..12)
        .prop_map(|(inode, kind, offset)| Key::new(inode, Kind::from_u8(kind).unwrap(), offset))
}

fn values() -> impl Strategy<Value = Vec<u8>> {
    let length = prop_oneof![
        4 => 0usize..300,
        1 => Just(4608),
        1 => 1000usize..4608,
    ];
    (length, any::<u8>()).prop_map(|(length, byte)| vec![byte; length])
}

/// Puts and deletes of single keys, and deletions of whole ranges of existing keys.
#[derive(Debug, Clone)]
enum Step {
    Set(Key, Option<Vec<u8>>),
    DeleteRange(Key, Key),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        30 => (keys(), values()).prop_map(|(key, value)| Step::Set(key, Some(value))),
        10 => keys().prop_map(|key| Step::Set(key, None)),
        1 => (keys(), keys()).prop_map(|(one, two)| Step::DeleteRange(one.min(two), one.max(two))),
    ];
    prop::collection::vec(step, 0..250)
}

fn packings() -> impl Strategy<Value = Packing> {
    prop_oneof![3 => Just(Packing::Shared), 1 => Just(Packing::Dense)]
}

fn batch(model: &Model, steps: Vec<Step>) -> Changes {
    let mut changes = Changes::new();
    for step in steps {
        match step {
            Step::Set(key, value) => {
                changes.insert(key, value);
            }
            Step::DeleteRange(from, to) => {
                changes.extend(model.range(from..to).map(|(key, _)| (*key, None)));
            }
        }
    }
    changes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn random_batches_match_a_map(
        batches in prop::collection::vec((steps(), packings()), 1..8),
        probes in prop::collection::vec(keys(), 40),
        cache_nodes in 0u64..200,
    ) {
        let mut volume = Volume::new(cache_nodes * 16384);
        for (steps, packing) in batches {
            let changes = batch(&volume.model, steps);
            volume.apply_packed(changes, packing);
            volume.check_contents();
            for key in &probes {
                volume.check_reads(key);
            }
        }
        volume.check_reads(&Key::MIN);
        volume.check_reads(&Key::MAX);
        let everything = volume.model.keys().map(|key| (*key, None)).collect();
        volume.apply(everything);
        prop_assert!(volume.root.is_empty() && volume.sink.live.is_empty());
    }
}

/// Three levels with few items: values so large that a leaf holds three.
fn large_value(number: u64) -> (Key, Option<Vec<u8>>) {
    (Key::extent(number / 7, number % 7), Some(vec![number as u8; 4500]))
}

#[test]
fn trees_of_three_levels_match_a_map() {
    let mut random = Random(1);
    let mut volume = Volume::new(4 << 20);
    volume.apply((0..9000).map(|number| large_value(number * 2)).collect());
    assert_eq!(volume.root.level, 2);
    for round in 0..30 {
        let mut changes = Changes::new();
        for _ in 0..random.below(300) {
            let (key, value) = large_value(random.below(18_000));
            changes.insert(key, value.filter(|_| random.below(2) == 0));
        }
        if round % 5 == 1 {
            let from = random.below(18_000);
            let to = from + random.below(6000);
            changes.extend((from..to).map(|number| (large_value(number).0, None)));
        }
        volume.apply(changes);
        volume.check_contents();
        for _ in 0..20 {
            volume.check_reads(&large_value(random.below(18_010)).0);
        }
    }
}

#[test]
fn thinning_out_keeps_nodes_filled_and_lowers_the_root() {
    let mut random = Random(2);
    let mut volume = Volume::new(64 << 20);
    volume.apply((0..6000).map(large_value).collect());
    assert_eq!(volume.root.level, 2);
    let mut left: Vec<Key> = volume.model.keys().copied().collect();
    let mut lowest = volume.root.level;
    while !left.is_empty() {
        let mut changes = Changes::new();
        for _ in 0..200.min(left.len()) {
            let victim = random.below(left.len() as u64) as usize;
            changes.insert(left.swap_remove(victim), None);
        }
        volume.apply(changes);
        let seen = volume.check_contents();
        // Two leaves that fit into one are joined when one of them is below a third: so on average
        // a leaf holds at least one and a half of these items.
        let items = seen.items.len();
        assert!(seen.leaf_used_bytes.len() <= items * 2 / 3 + 10, "{items} items left");
        assert!(volume.root.level <= lowest, "the root only goes down");
        lowest = volume.root.level;
        assert!(seen.single_children <= 1);
    }
    assert_eq!((volume.root.block, volume.root.level, volume.root.node_count), (0, 0, 0));
}

/// Three leaves of 75 items each; half of leaf `halved` is deleted, then all but five of the
/// second.
fn leaves_after_thinning_the_second_of_three(halved: u64) -> Vec<usize> {
    let mut volume = Volume::new(64 << 20);
    volume.apply((0..225).map(numbered).collect());
    assert_eq!(volume.check_contents().leaf_used_bytes, [75 * 216; 3]);
    let halved = (halved * 75..halved * 75 + 75).filter(|number| number % 2 == 1);
    volume.apply(halved.map(|number| (Key::inode(number), None)).collect());
    assert_eq!(volume.check_contents().leaf_used_bytes.len(), 3);
    volume.apply((80..150).map(|number| (Key::inode(number), None)).collect());
    volume.check_contents().leaf_used_bytes
}

#[test]
fn underfull_leaf_joins_the_one_after_it() {
    assert_eq!(leaves_after_thinning_the_second_of_three(2), [75 * 216, (5 + 38) * 216]);
}

#[test]
fn underfull_leaf_joins_the_one_before_it() {
    assert_eq!(leaves_after_thinning_the_second_of_three(0), [(38 + 5) * 216, 75 * 216]);
}

#[test]
fn underfull_leaf_between_full_ones_stays() {
    assert_eq!(leaves_after_thinning_the_second_of_three(9), [75 * 216, 5 * 216, 75 * 216]);
}

#[test]
fn merge_never_reads_back_what_it_writes() {
    // Almost no cache, and a root that the merge itself wrote.
    let mut volume = Volume::new(0);
    for start in 0..20 {
        volume.apply((start * 500..start * 500 + 500).map(numbered).collect());
    }
    assert_eq!(volume.root.level, 1);
    volume.check_contents();
}

#[test]
fn chain_of_single_children_is_not_kept_as_the_root() {
    // Three full interior nodes above leaves of three items; the middle one keeps a single leaf.
    let mut volume = Volume::new(64 << 20);
    let leaf_items = 510 * 3;
    volume.apply((0..3 * leaf_items).map(large_value).collect());
    assert_eq!(volume.root.node_count, 3 * 511 + 1);
    let delete = |number| (large_value(number).0, None);
    volume.apply((leaf_items + 3..2 * leaf_items).map(delete).collect());
    assert_eq!(volume.check_contents().single_children, 1);
    // Now it is all that is left, and untouched.
    volume.apply((0..leaf_items).chain(2 * leaf_items..3 * leaf_items).map(delete).collect());
    volume.check_contents();
    assert_eq!((volume.root.level, volume.root.node_count, volume.root.item_count), (0, 1, 3));
}

#[test]
fn sequential_load_in_one_merge_leaves_full_nodes() {
    let mut volume = Volume::new(64 << 20);
    volume.apply((0..200_000).map(numbered).collect());
    assert!(volume.leaf_fill() > 0.98, "{}", volume.leaf_fill());
}

#[test]
fn sequential_load_in_small_merges_leaves_full_nodes() {
    let mut volume = Volume::new(64 << 20);
    for start in 0..1000 {
        volume.apply((start * 200..start * 200 + 200).map(numbered).collect());
    }
    assert_eq!(volume.root.item_count, 200_000);
    assert!(volume.leaf_fill() > 0.95, "{}", volume.leaf_fill());
}

#[test]
fn file_appended_in_the_middle_of_the_tree_leaves_full_nodes() {
    let mut volume = Volume::new(64 << 20);
    let extent = |inode, block| (Key::extent(inode, block), Some(vec![1; 1040]));
    volume.apply((0..1000).map(|inode| extent(inode, 0)).collect());
    for start in 0..500 {
        volume.apply((start * 8..start * 8 + 8).map(|block| extent(500, block + 1)).collect());
    }
    // 1056 bytes each: at most 15 fit, 94 %.
    assert!(volume.leaf_fill() > 0.80, "{}", volume.leaf_fill());
}

#[test]
fn random_inserts_leave_nodes_two_thirds_full() {
    let mut random = Random(3);
    let mut volume = Volume::new(64 << 20);
    for _ in 0..100 {
        let batch = (0..600).map(|_| numbered(random.below(1 << 40)));
        volume.apply(batch.collect());
    }
    assert!(volume.leaf_fill() > 0.66, "{}", volume.leaf_fill());
}

#[test]
fn one_change_rewrites_one_path_and_shares_the_rest() {
    let mut volume = Volume::new(64 << 20);
    volume.apply((0..100_000).map(|number| numbered(number * 2)).collect());
    assert_eq!(volume.root.level, 2);
    let levels = u64::from(volume.root.level) + 1;
    let changes: [Changes; 3] = [
        [(numbered(50_000).0, Some(vec![9; 192]))].into(),
        [(numbered(70_000).0, None)].into(),
        [(numbered(150_000).0, None), (numbered(150_002).0, None)].into(),
    ];
    for changes in changes {
        let before = volume.sink.allocated;
        let live = volume.sink.live.clone();
        volume.apply(changes);
        assert_eq!(volume.sink.allocated - before, levels);
        assert_eq!(live.difference(&volume.sink.live).count() as u64, levels);
    }
    volume.check_contents();
}

/// Leaves that items of these sizes take at least: each begins where the one before cannot hold more.
fn fewest_leaves(model: &Model) -> usize {
    let (mut leaves, mut used_bytes) = (0, NODE_CAPACITY_BYTES);
    for value in model.values() {
        let bytes = LEAF_SLOT_BYTES + value.len();
        if used_bytes + bytes > NODE_CAPACITY_BYTES {
            (leaves, used_bytes) = (leaves + 1, 0);
        }
        used_bytes += bytes;
    }
    leaves
}

#[test]
fn a_dense_merge_writes_the_fewest_leaves_that_hold_the_items() {
    let mut random = Random(7);
    for largest_value in [40, 300, 4608] {
        let mut volume = Volume::new(64 << 20);
        for _ in 0..1000 {
            let item = |random: &mut Random| {
                let value = vec![1; random.below(largest_value) as usize];
                (Key::inode(random.below(1 << 40)), Some(value))
            };
            volume.apply((0..8).map(|_| item(&mut random)).collect());
        }
        assert!(volume.check_contents().leaf_used_bytes.len() > fewest_leaves(&volume.model));
        let before = volume.sink.live.clone();
        let changed = *volume.model.keys().next().expect("an item");
        volume.apply_packed([(changed, Some(vec![2; 30]))].into(), Packing::Dense);
        assert_eq!(volume.check_contents().leaf_used_bytes.len(), fewest_leaves(&volume.model),);
        assert!(volume.sink.live.is_disjoint(&before), "nothing is shared with the old tree");
        // One more item in every leaf adds no leaf to speak of, where each would become two.
        let more: Changes = (0..volume.root.node_count)
            .map(|_| (Key::inode(random.below(1 << 40)), Some(vec![3; 20])))
            .collect();
        let nodes = volume.root.node_count;
        volume.apply_packed(more, Packing::Dense);
        assert!(volume.root.node_count <= nodes + nodes / 50 + 2, "{nodes} nodes before");
    }
}

#[test]
fn a_dense_merge_that_changes_nothing_writes_nothing() {
    let mut volume = Volume::new(64 << 20);
    volume.apply((0..5000).map(numbered).collect());
    let before = (volume.root, volume.sink.allocated);
    volume.apply_packed((0..5000).map(numbered).collect(), Packing::Dense);
    assert_eq!((volume.root, volume.sink.allocated), before);
}

#[test]
fn changes_that_change_nothing_write_nothing() {
    let mut volume = Volume::new(64 << 20);
    volume.apply((0..20_000).map(|number| numbered(number * 2)).collect());
    let before = (volume.root, volume.sink.allocated);
    let mut changes: Changes = (0..20_000).map(|number| numbered(number * 2)).collect();
    changes.extend((0..20_000).map(|number| (numbered(number * 2 + 1).0, None)));
    volume.apply(changes);
    assert_eq!((volume.root, volume.sink.allocated), before);
    let root = volume.merge(std::iter::empty()).unwrap();
    assert_eq!(root, volume.root);

    // No-ops beside one real change share their leaves.
    let mut changes: Changes = (0..20_000).map(|number| numbered(number * 2)).collect();
    changes.insert(numbered(7777).0, Some(vec![]));
    volume.apply(changes);
    assert!(volume.sink.allocated - before.1 <= 4);
    volume.check_contents();
}

#[test]
fn deleting_what_is_not_there_keeps_the_tree_empty() {
    let mut volume = Volume::new(1 << 20);
    volume.apply([(Key::MIN, None), (Key::MAX, None)].into());
    assert_eq!(volume.root, TreeRoot::EMPTY);
    assert_eq!(get(&volume.cache, &volume.root, Key::MIN).unwrap(), None);
    assert_eq!(get_le(&volume.cache, &volume.root, Key::MAX).unwrap(), None);
    volume.check_reads(&Key::MIN);
    assert_eq!(volume.check_contents().summary, WalkSummary::default());
}

#[test]
fn extreme_keys_and_values_are_kept() {
    let mut volume = Volume::new(1 << 20);
    volume.apply([(Key::MIN, Some(vec![])), (Key::MAX, Some(vec![1; 4608]))].into());
    volume.check_contents();
    volume.check_reads(&Key::MIN);
    volume.check_reads(&Key::MAX);
}

#[test]
fn cursor_moves_both_ways_and_over_the_end() {
    let mut volume = Volume::new(64 << 20);
    volume.apply((0..5000).map(|number| numbered(number * 2)).collect());
    let mut cursor = Cursor::seek(&volume.cache, &volume.root, Key::MIN).unwrap();
    let mut random = Random(4);
    for _ in 0..500 {
        let start = random.below(10_010);
        cursor.reseek(Key::inode(start)).unwrap();
        let mut expected = start.next_multiple_of(2);
        for _ in 0..random.below(100) {
            let item = cursor.next().unwrap();
            let wanted = Some(expected).filter(|number| *number < 10_000);
            assert_eq!(item.map(|(key, _)| key.inode), wanted);
            expected += 2;
        }
    }
    cursor.reseek(Key::MAX).unwrap();
    assert_eq!(cursor.next().unwrap(), None);
    cursor.reseek(Key::MIN).unwrap();
    let mut count = 0;
    while cursor.next().unwrap().is_some() {
        count += 1;
    }
    assert_eq!(count, 5000);
}

#[test]
fn failed_allocation_leaves_the_old_tree_intact() {
    let mut volume = Volume::new(64 << 20);
    volume.apply((0..20_000).map(|number| numbered(number * 2)).collect());
    let changes: Changes = (0..20_000).map(|number| numbered(number * 2 + 1)).collect();
    for grants in [0, 1, 5, 300] {
        let live = volume.sink.live.clone();
        volume.sink.grants = grants;
        let items = changes.iter().map(|(key, value)| (*key, value.as_deref()));
        assert_eq!(volume.merge(items), Err(Error::NoSpace));
        volume.sink.live = live;
        volume.sink.freed.clear();
        volume.check_contents();
    }
    volume.sink.grants = u64::MAX;
    volume.apply(changes);
    volume.check_contents();
}

#[test]
fn impossible_changes_are_refused() {
    for prefilled in [0, 5000] {
        let mut volume = Volume::new(64 << 20);
        volume.apply((0..prefilled).map(numbered).collect());
        let put = |number| (Key::inline(number), Some(&[1][..]));
        for keys in [[10, 10], [11, 10], [4000, 10]] {
            let result = volume.merge(keys.map(put).into_iter());
            assert!(matches!(result, Err(Error::Invalid(_))), "{result:?}");
            volume.sink.live.extend(std::mem::take(&mut volume.sink.freed));
        }
        let result = volume.merge([(Key::MIN, Some(&[0; 4609][..]))].into_iter());
        assert!(matches!(result, Err(Error::Invalid(_))));
    }
}

#[test]
fn walk_reports_progress_and_stops_when_asked() {
    struct Impatient(u64);
    impl Visitor for Impatient {
        fn node(&mut self, _: &Node) -> ControlFlow<()> {
            self.0 += 1;
            if self.0 == 10 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        }
        fn item(&mut self, _: Key, _: &[u8]) -> ControlFlow<()> {
            ControlFlow::Continue(())
        }
        fn problem(&mut self, problem: WalkProblem) -> ControlFlow<()> {
            panic!("{problem:?}");
        }
    }
    let mut volume = Volume::new(64 << 20);
    volume.apply((0..100_000).map(numbered).collect());
    let seen = volume.check_contents();
    assert_eq!(seen.progress_calls as u64, seen.summary.nodes / 256);
    let (device, total_blocks) = (&*volume.device, TOTAL_BLOCKS);
    let place = walk::WalkVolume { device, volume_id: VOLUME_ID, total_blocks };
    let summary = super::super::walk(place, &volume.root, 0, &mut Impatient(0));
    assert!(summary.interrupted);
    assert_eq!((summary.nodes, summary.problems), (10, 0));
}
