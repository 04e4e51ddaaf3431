//! The free extents of a file system, exact, from the tools of each.

use std::path::Path;

use super::mounted::run_tool;
use super::{FsError, FsResult};

/// Free extents as (start, length) in bytes, sorted and merged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FreeMap {
    extents: Vec<(u64, u64)>,
}

/// Upper bounds of the histogram's classes, in bytes; the last class is open.
pub const CLASSES: [(u64, &str); 6] = [
    (16 << 10, "16k"),
    (64 << 10, "64k"),
    (256 << 10, "256k"),
    (1 << 20, "1m"),
    (16 << 20, "16m"),
    (u64::MAX, "more"),
];

impl FreeMap {
    /// Builds the map from extents in any order; neighbours are merged.
    pub fn new(mut extents: Vec<(u64, u64)>) -> Self {
        extents.sort_unstable();
        let mut merged: Vec<(u64, u64)> = Vec::with_capacity(extents.len());
        for (start, len) in extents.into_iter().filter(|e| e.1 > 0) {
            match merged.last_mut() {
                Some(last) if last.0 + last.1 == start => last.1 += len,
                _ => merged.push((start, len)),
            }
        }
        FreeMap { extents: merged }
    }

    /// Number of free extents.
    pub fn count(&self) -> usize {
        self.extents.len()
    }

    /// Free bytes.
    pub fn total_bytes(&self) -> u64 {
        self.extents.iter().map(|e| e.1).sum()
    }

    /// Free bytes in extents shorter than `bound_bytes`.
    pub fn bytes_under(&self, bound_bytes: u64) -> u64 {
        self.extents.iter().map(|e| e.1).filter(|l| *l < bound_bytes).sum()
    }

    /// Extents per class of [`CLASSES`].
    pub fn histogram(&self) -> [u64; CLASSES.len()] {
        let mut counts = [0; CLASSES.len()];
        for (_, len) in &self.extents {
            let class = CLASSES.iter().position(|(bound, _)| len < bound);
            counts[class.unwrap_or(CLASSES.len() - 1)] += 1;
        }
        counts
    }

    /// Asks the tools of a kernel file system on `node`.
    pub fn of_kernel_fs(fs_type: &str, node: &Path) -> FsResult<FreeMap> {
        let node = node.to_string_lossy();
        let extents = match fs_type {
            "xfs" => {
                let geometry =
                    run_tool("xfs_db", &["-r", "-c", "sb 0", "-c", "p agblocks", &node])?;
                let listing = run_tool("xfs_db", &["-r", "-c", "freesp -d", &node])?;
                parse_xfs_freesp(&geometry, &listing)
            }
            "ext4" => parse_dumpe2fs(&run_tool("dumpe2fs", &[&node])?),
            "btrfs" => {
                let tree =
                    |t: &str| run_tool("btrfs", &["inspect-internal", "dump-tree", "-t", t, &node]);
                let chunks = tree("chunk")?;
                Some(parse_btrfs(&tree("extent")?, &chunks))
            }
            _ => return Err(FsError::NotOffered("free extents of this file system")),
        };
        let extents = extents.ok_or_else(|| {
            std::io::Error::other(format!("{fs_type}: free space listing not understood"))
        })?;
        Ok(FreeMap::new(extents))
    }
}

const BLOCK_BYTES: u64 = 4096;

/// `xfs_db freesp -d`: lines `agno agbno len` before the histogram.
fn parse_xfs_freesp(geometry: &str, listing: &str) -> Option<Vec<(u64, u64)>> {
    let ag_blocks: u64 = geometry.split('=').nth(1)?.trim().parse().ok()?;
    let mut found = Vec::new();
    for line in listing.lines() {
        let f: Vec<u64> = line.split_whitespace().map_while(|w| w.parse().ok()).collect();
        if let [ag, block, len] = f[..] {
            found.push(((ag * ag_blocks + block) * BLOCK_BYTES, len * BLOCK_BYTES));
        }
    }
    Some(found)
}

/// `dumpe2fs`: `  Free blocks: 9266-32767, 33000` per group.
fn parse_dumpe2fs(text: &str) -> Option<Vec<(u64, u64)>> {
    let block_bytes: u64 =
        text.lines().find_map(|l| l.strip_prefix("Block size:"))?.trim().parse().ok()?;
    let mut found = Vec::new();
    // The summary's "Free blocks:" starts the line; those of the groups are indented.
    for list in text.lines().filter_map(|l| l.strip_prefix("  Free blocks: ")) {
        for run in list.split(", ").filter(|r| !r.trim().is_empty()) {
            let (from, to) = run.split_once('-').unwrap_or((run, run));
            let (from, to): (u64, u64) = (from.trim().parse().ok()?, to.trim().parse().ok()?);
            found.push((from * block_bytes, (to + 1 - from) * block_bytes));
        }
    }
    Some(found)
}

/// Parses `key (A TYPE B)` of btrfs' tree dumps.
fn btrfs_key(line: &str) -> Option<(u64, &str, u64)> {
    let (_, key) = line.split_once("key (")?;
    let mut words = key.split(')').next()?.split(' ');
    Some((words.next()?.parse().ok()?, words.next()?, words.next()?.parse().ok()?))
}

/// The gaps between extents inside block groups, plus what no chunk has claimed yet as one extent
/// beyond them.
fn parse_btrfs(extent_tree: &str, chunk_tree: &str) -> Vec<(u64, u64)> {
    let node_bytes = 16_384;
    let mut used: Vec<(u64, u64)> = Vec::new();
    let mut groups: Vec<(u64, u64)> = Vec::new();
    for (start, kind, arg) in extent_tree.lines().filter_map(btrfs_key) {
        match kind {
            "EXTENT_ITEM" => used.push((start, arg)),
            "METADATA_ITEM" => used.push((start, node_bytes)),
            "BLOCK_GROUP_ITEM" => groups.push((start, arg)),
            _ => {}
        }
    }
    used.sort_unstable();
    groups.sort_unstable();
    let mut found = Vec::new();
    for &(start, len) in &groups {
        let mut at = start;
        let first = used.partition_point(|e| e.0 < start);
        for &(from, bytes) in used[first..].iter().take_while(|e| e.0 < start + len) {
            if from > at {
                found.push((at, from - at));
            }
            at = at.max(from + bytes);
        }
        if start + len > at {
            found.push((at, start + len - at));
        }
    }
    let device: u64 = chunk_tree
        .lines()
        .find_map(|l| l.split_once("total_bytes ")?.1.split(' ').next()?.parse().ok())
        .unwrap_or(0);
    let claimed: u64 = groups.iter().map(|g| g.1).sum();
    let beyond = groups.last().map_or(0, |g| g.0 + g.1 + 1);
    if device > claimed {
        found.push((beyond, device - claimed));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_merge_and_classes_count_by_length() {
        let m = FreeMap::new(vec![(8192, 4096), (0, 8192), (1 << 20, 2 << 20), (9 << 20, 0)]);
        assert_eq!(m.count(), 2);
        assert_eq!(m.total_bytes(), 12_288 + (2 << 20));
        assert_eq!(m.bytes_under(1 << 20), 12_288);
        assert_eq!(m.histogram(), [1, 0, 0, 0, 1, 0]);
    }

    #[test]
    fn xfs_listing_is_placed_by_allocation_group() {
        let out = parse_xfs_freesp(
            "agblocks = 1000\n",
            "       0       10        4\n       1       0      16\n   from      to extents\n      4       7       1       5   0.02\n",
        );
        let want = vec![(10 * 4096, 4 * 4096), (1000 * 4096, 16 * 4096)];
        assert_eq!(out, Some(want));
    }

    #[test]
    fn dumpe2fs_groups_are_read_and_the_summary_is_not() {
        let text = "Free blocks:              100\nBlock size:               4096\n\
                    Group 0: (Blocks 0-32767)\n  Free blocks: 10-19, 30\n  Free inodes: 12-99\n";
        assert_eq!(parse_dumpe2fs(text), Some(vec![(40_960, 40_960), (30 * 4096, 4096)]));
    }

    #[test]
    fn btrfs_gaps_are_those_inside_block_groups() {
        let extents = "\titem 0 key (1000 BLOCK_GROUP_ITEM 100000) itemoff 1\n\
                       \titem 1 key (1000 EXTENT_ITEM 4000) itemoff 1\n\
                       \titem 2 key (9000 METADATA_ITEM 0) itemoff 1\n";
        let chunks = "\t\tdevid 1 total_bytes 500000 bytes_used 100000\n";
        let gaps = parse_btrfs(extents, chunks);
        assert_eq!(gaps, vec![(5000, 4000), (25_384, 75_616), (101_001, 400_000)]);
    }
}
