//! Damaged trees: errors, never panics, never endless.

use super::*;
use crate::format::NODE_BYTES;
use crate::format::checksum_without_field;
use proptest::prelude::*;

fn small_tree() -> Volume {
    let mut volume = Volume::new(64 << 20);
    volume.apply((0..9000).map(|number| numbered(number * 2)).collect());
    assert_eq!(volume.root.level, 1);
    volume
}

fn read(volume: &Volume, block: u64) -> Vec<u8> {
    let mut bytes = vec![0; NODE_BYTES];
    let mut buffer = AlignedBuf::zeroed(NODE_BYTES);
    let offset = block * BLOCK_BYTES_U64;
    volume.device.read(offset, &mut [&mut buffer], IoClass::Background).unwrap();
    bytes.copy_from_slice(&buffer);
    bytes
}

fn write(volume: &Volume, block: u64, bytes: &[u8]) {
    let mut buffer = AlignedBuf::zeroed(NODE_BYTES);
    buffer.copy_from_slice(bytes);
    let offset = block * BLOCK_BYTES_U64;
    volume.device.write(offset, &[&buffer], IoClass::Background, false).unwrap();
}

/// Empties the cache.
fn forget_all(volume: &mut Volume) {
    let device = Arc::clone(&volume.device) as Arc<dyn Device>;
    volume.cache = NodeCache::new(device, VOLUME_ID, TOTAL_BLOCKS, 64 << 20);
}

/// Uses the tree in every way; results are not looked at, but it has to come to an end.
fn exercise(volume: &mut Volume, keys: &[u64]) {
    for number in keys {
        let key = Key::inode(*number);
        let _ = get(&volume.cache, &volume.root, key);
        let _ = get_le(&volume.cache, &volume.root, key);
    }
    if let Ok(mut cursor) = Cursor::seek(&volume.cache, &volume.root, Key::MIN) {
        let mut last = None;
        while let Ok(Some((key, _))) = cursor.next() {
            assert!(last < Some(key), "cursor goes backwards");
            last = Some(key);
        }
    }
    let seen = volume.walk();
    assert!(seen.items.iter().is_sorted_by(|one, two| one.0 < two.0));
    let live = volume.sink.live.clone();
    let changes: BTreeMap<_, _> =
        keys.iter().map(|number| (Key::inode(*number), Some(&[1][..]))).collect();
    let _ = volume.merge(changes.into_iter());
    volume.sink.live = live;
    volume.sink.freed.clear();
    volume.sink.unwritten.clear();
}

#[test]
fn damaged_leaf_is_an_error_there_and_nowhere_else() {
    let mut volume = small_tree();
    let root = volume.cache.get(volume.root.child_ref(), 1).unwrap();
    let (slot, victim) = (50, root.child(50).unwrap());
    let (from, to) = (root.key(slot).unwrap(), root.key(slot + 1).unwrap());
    let mut bytes = read(&volume, victim.block);
    bytes[9000] ^= 1;
    write(&volume, victim.block, &bytes);
    forget_all(&mut volume);

    for (key, value) in &volume.model {
        let result = get(&volume.cache, &volume.root, *key);
        if (from..to).contains(key) {
            assert!(matches!(result, Err(Error::Corrupt(_))), "{result:?}");
        } else {
            assert_eq!(result.unwrap().as_deref(), Some(value.as_slice()));
        }
    }
    assert_eq!(volume.cache.damaged(), volume.model.range(from..to).count() as u64, "each time");
    assert!(matches!(get_le(&volume.cache, &volume.root, from), Err(Error::Corrupt(_))));
    let mut cursor = Cursor::seek(&volume.cache, &volume.root, Key::MIN).unwrap();
    let error = loop {
        match cursor.next() {
            Ok(item) => assert!(item.unwrap().0 < from),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Corrupt(_)));
    let change = [(from, Some(&[1][..]))];
    assert!(matches!(volume.merge(change.into_iter()), Err(Error::Corrupt(_))));

    let seen = volume.walk();
    assert_eq!(seen.problems.len(), 1);
    assert_eq!((seen.problems[0].block, seen.problems[0].level), (victim.block, 0));
    assert_eq!(seen.problems[0].from, Some(from));
    let expected = volume.model.iter().filter(|(key, _)| !(from..to).contains(key));
    assert!(seen.items.iter().map(|(key, value)| (key, value)).eq(expected));
}

#[test]
fn wrong_counts_are_reported_by_the_walk() {
    let mut volume = small_tree();
    for change in [(1, 0), (0, 1)] {
        let root = volume.root;
        volume.root.node_count += change.0;
        volume.root.item_count += change.1;
        let seen = volume.walk();
        assert_eq!((seen.problems.len(), seen.problems[0].block), (1, 0));
        volume.root = root;
    }
}

#[test]
fn merge_refuses_counts_that_cannot_be() {
    let mut volume = small_tree();
    volume.root.item_count = 10;
    let deletions: Vec<_> = volume.model.keys().map(|key| (*key, None)).collect();
    let result = volume.merge(deletions.into_iter());
    assert!(matches!(result, Err(Error::Corrupt(_))), "{result:?}");
}

#[test]
fn impossible_roots_are_corrupt() {
    let mut volume = small_tree();
    let good = volume.root;
    let roots = [
        TreeRoot { level: 0, ..good },
        TreeRoot { level: 2, ..good },
        TreeRoot { level: 255, ..good },
        TreeRoot { checksum: !good.checksum, ..good },
        TreeRoot { block: good.block + 4, ..good },
        TreeRoot { block: TOTAL_BLOCKS - 3, ..good },
        TreeRoot { block: u64::MAX, ..good },
        TreeRoot { block: u64::MAX / 4096 + 2, ..good },
    ];
    for root in roots {
        for cached in [true, false] {
            if !cached {
                forget_all(&mut volume);
            }
            volume.root = root;
            let result = get(&volume.cache, &root, Key::MIN);
            assert!(matches!(result, Err(Error::Corrupt(_))), "{root:?}");
            assert!(Cursor::seek(&volume.cache, &root, Key::MIN).is_err());
            assert_eq!(volume.walk().problems.len(), 1);
            let result = volume.merge([(Key::MIN, Some(&[][..]))].into_iter());
            assert!(matches!(result, Err(Error::Corrupt(_))));
        }
    }
}

#[test]
fn nodes_of_another_tree_are_refused() {
    let mut volume = small_tree();
    volume.root = merge(
        &volume.cache,
        &TreeRoot::EMPTY,
        [(Key::MIN, Some(&[1][..]))].into_iter(),
        Packing::Shared,
        (9, 3),
        &mut volume.sink,
    )
    .unwrap();
    volume.sink.write_pending();
    assert_eq!(volume.walk().problems.len(), 1);
    assert!(volume.merge([(Key::MIN, None)].into_iter()).is_err());
}

/// Changes bytes of a node, and makes all checksums up to the root right again, as only a bug
/// or an attacker would.
fn forge(volume: &mut Volume, path: &[usize], changes: &[(usize, u8)]) {
    let mut blocks = vec![volume.root.block];
    for slot in path {
        let bytes = read(volume, blocks[blocks.len() - 1]);
        let at = 64 + slot * 32 + 24;
        blocks.push(u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()));
    }
    let mut checksum = None;
    for (depth, block) in blocks.iter().enumerate().rev() {
        let mut bytes = read(volume, *block);
        match checksum {
            None => changes.iter().for_each(|(offset, byte)| bytes[*offset] = *byte),
            Some(checksum) => {
                let at = 64 + path[depth] * 32 + 20;
                bytes[at..at + 4].copy_from_slice(&u32::to_le_bytes(checksum));
            }
        }
        let sum = checksum_without_field(&bytes, 4);
        bytes[4..8].copy_from_slice(&sum.to_le_bytes());
        write(volume, *block, &bytes);
        checksum = Some(sum);
    }
    volume.root.checksum = checksum.unwrap();
    forget_all(volume);
}

#[test]
fn child_that_names_its_parent_is_corrupt() {
    let mut volume = small_tree();
    let block = volume.root.block.to_le_bytes();
    let changes: Vec<_> = (0..8).map(|byte| (64 + 24 + byte, block[byte])).collect();
    forge(&mut volume, &[], &changes);
    let result = get(&volume.cache, &volume.root, Key::MIN);
    assert!(matches!(result, Err(Error::Corrupt(_))));
    exercise(&mut volume, &[0, 1, 500]);
}

#[test]
fn forged_separators_are_noticed() {
    // The leaf's second key becomes larger than everything in the next leaves.
    let mut volume = small_tree();
    let root = volume.cache.get(volume.root.child_ref(), 1).unwrap();
    let leaf = volume.cache.get(root.child(3).unwrap(), 0).unwrap();
    let last = 64 + (leaf.count() - 1) * 24;
    forge(&mut volume, &[3], &[(last + 7, 0xff)]);
    assert_eq!(volume.walk().problems.len(), 1);
    let key = root.key(3).unwrap();
    assert!(matches!(volume.merge([(key, None)].into_iter()), Err(Error::Corrupt(_))));
    volume.sink.live.extend(std::mem::take(&mut volume.sink.freed));
    exercise(&mut volume, &[0, 1, 500]);

    // A leaf that starts later than its separator says.
    let mut volume = small_tree();
    let separator = root.key(3).unwrap();
    forge(&mut volume, &[3], &[(64, separator.inode as u8 + 1)]);
    let result = get_le(&volume.cache, &volume.root, separator);
    assert!(matches!(result, Err(Error::Corrupt(_))), "{result:?}");
    assert_eq!(volume.walk().problems.len(), 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn forged_trees_never_panic_or_loop(
        path in prop_oneof![Just(vec![]), (0usize..100).prop_map(|slot| vec![slot])],
        changes in prop::collection::vec((40usize..2500, any::<u8>()), 1..6),
        keys in prop::collection::vec(0u64..20_000, 1..200),
    ) {
        let mut volume = small_tree();
        forge(&mut volume, &path, &changes);
        exercise(&mut volume, &keys);
    }

    #[test]
    fn damaged_bytes_are_always_noticed(
        victim in any::<prop::sample::Index>(),
        offset in 0usize..NODE_BYTES,
        mask in 1u8..,
    ) {
        let mut volume = small_tree();
        let blocks: Vec<u64> = volume.sink.live.iter().copied().collect();
        let block = blocks[victim.index(blocks.len())];
        let mut bytes = read(&volume, block);
        bytes[offset] ^= mask;
        write(&volume, block, &bytes);
        forget_all(&mut volume);
        let seen = volume.walk();
        prop_assert_eq!(seen.problems.len(), 1);
        prop_assert_eq!(seen.problems[0].block, block);
    }
}
