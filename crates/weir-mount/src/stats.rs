//! The engine's counters as JSON: how a mount in another process tells them (attribute
//! `weir.stats` of the root directory, read by `weir info`).

use serde_json::{Value, json};
use weir::Stats;
use weir::log::stats::HistogramSnapshot;

/// Name of the attribute.
pub const ATTRIBUTE: &str = "weir.stats";

/// Count, mean and upper bounds of the median, the 99th percentile and the maximum. Buckets are
/// powers of two, so the bounds are within a factor of two.
fn histogram(snapshot: &HistogramSnapshot) -> Value {
    let count = snapshot.count();
    let bound = |rank: u64| {
        let mut seen = 0;
        let bucket = snapshot.buckets.iter().position(|in_bucket| {
            seen += in_bucket;
            seen >= rank
        });
        match bucket {
            Some(64) | None => u64::MAX,
            Some(bits) => (1_u64 << bits) - 1,
        }
    };
    if count == 0 {
        return json!({ "count": 0 });
    }
    json!({
        "count": count,
        "mean": snapshot.sum / count,
        "p50_below": bound(count.div_ceil(2)),
        "p99_below": bound((count * 99).div_ceil(100)),
        "max_below": bound(count),
    })
}

/// All counters. Units are in the names.
pub fn to_json(stats: &Stats) -> Value {
    let log = &stats.log;
    json!({
        "cache": {
            "hits": stats.cache_hits,
            "misses": stats.cache_misses,
            "evicted_pages": stats.evicted_pages,
            "pages_in_use": stats.pages_in_use,
            "pages_capacity": stats.pages_capacity,
            "dirty_pages": stats.dirty_pages,
            "inodes_in_memory": stats.inodes_in_memory,
            "dirty_inodes": stats.dirty_inodes,
            "delta_bytes": stats.delta_bytes,
            "node_hits": stats.nodes.hits,
            "node_misses": stats.nodes.misses,
            "nodes": stats.nodes.nodes,
        },
        "log": {
            "operations": log.operations,
            "frames": log.frames,
            "frame_bytes": log.frame_bytes,
            "payload_blocks": log.payload_blocks,
            "write_retries": log.write_retries,
            "flushes": log.flushes,
            "commits": log.commits,
            "commits_found_durable": log.commits_found_durable,
            "commits_per_flush": histogram(&log.commits_per_flush),
            "blocks_per_frame": histogram(&log.blocks_per_frame),
            "frame_write_ns": histogram(&log.frame_write_ns),
            "flush_ns": histogram(&log.flush_ns),
            "queue_ns": histogram(&log.queue_ns),
            "commit_ns": histogram(&log.commit_ns),
            "ring_blocks": stats.log_fill.ring_blocks,
            "used_blocks": stats.log_fill.used_blocks,
            "logged_pages": stats.logged_pages,
            "last_lsn": stats.last_lsn,
            "durable_lsn": stats.durable_lsn,
        },
        "checkpoint": {
            "count": stats.checkpoints,
            "phase": format!("{:?}", stats.checkpoint_phase),
            "freeze_ns": histogram(&stats.freeze_ns),
            "whole_us": histogram(&stats.checkpoint_us),
        },
        "stalls": {
            "throttled": stats.throttled,
            "log_space": stats.log_stalls,
            "free_blocks": stats.space_stalls,
            "memory": stats.memory_stalls,
            "throttle_us": histogram(&stats.throttle_us),
            "stall_us": histogram(&stats.stall_us),
        },
        "errors": {
            "checksum": stats.checksum_errors,
            "writeback": stats.writeback_errors,
            "purge": stats.purge_errors,
        },
        "fsyncs": stats.fsyncs,
        "space": {
            "total_blocks": stats.space.total_blocks,
            "free_blocks": stats.space.free_blocks,
            "pending_free_blocks": stats.space.pending_free_blocks,
            "reserved_blocks": stats.space.reserved_blocks,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_is_bounded_from_above_by_powers_of_two() {
        let mut snapshot = HistogramSnapshot { buckets: [0; 65], sum: 0 };
        assert_eq!(histogram(&snapshot), json!({ "count": 0 }));
        // 98 times 5 (three bits), once 1000 (ten bits), once the largest number.
        snapshot.buckets[3] = 98;
        snapshot.buckets[10] = 1;
        snapshot.buckets[64] = 1;
        snapshot.sum = 98 * 5 + 1000;
        let shown = histogram(&snapshot);
        assert_eq!(shown["count"], 100);
        assert_eq!(shown["p50_below"], 7);
        assert_eq!(shown["p99_below"], 1023);
        assert_eq!(shown["max_below"], u64::MAX);
    }
}
