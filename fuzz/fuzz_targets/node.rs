//! The tree node parser, on bytes whose checksum is right, and every access to what it accepts.

#![no_main]

use libfuzzer_sys::fuzz_target;
use weir::format::node::{ChildRef, Expectation, Node};
use weir::format::{Key, NODE_BYTES, checksum_without_field};

fuzz_target!(|input: &[u8]| {
    // The first half of the input is the node's start, the second its end: both are dense.
    let mut bytes = vec![0; NODE_BYTES];
    let (head, tail) = input.split_at(input.len() / 2);
    let (head_length, tail_length) =
        (head.len().min(NODE_BYTES / 2), tail.len().min(NODE_BYTES / 2));
    bytes[..head_length].copy_from_slice(&head[..head_length]);
    bytes[NODE_BYTES - tail_length..].copy_from_slice(&tail[tail.len() - tail_length..]);
    bytes[..4].copy_from_slice(b"NODE");
    bytes[8..24].fill(0);
    let sum = checksum_without_field(&bytes, 4);
    bytes[4..8].copy_from_slice(&sum.to_le_bytes());
    let block = bytes[24..32].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    let child = ChildRef { block, checksum: sum };
    let expected = Expectation { volume_id: [0; 16], child, level: bytes[40] };
    let _ = Node::parse(input, &expected);
    let Ok(node) = Node::parse(&bytes, &expected) else { return };
    let mut previous = None;
    for slot in 0..node.count() {
        let key = node.key(slot).expect("a key in every slot");
        assert!(previous < Some(key));
        previous = Some(key);
        assert_eq!(node.lower_bound(&key), slot);
        if node.level() == 0 {
            assert_eq!(node.find(&key), Ok(slot));
            node.value(slot).expect("a value in every slot of a leaf");
        } else {
            assert_eq!(node.child_index(&key), slot);
            node.child(slot).expect("a child in every slot of an interior node");
        }
    }
    assert_eq!(node.lower_bound(&Key::MIN), 0);
    assert!(node.used_bytes() <= NODE_BYTES);
    let _ = (node.key(node.count()), node.value(node.count()), node.child(node.count()));
});
