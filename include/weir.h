/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Commands of a Weir mount: durability that is ranged, ordered, and not waited for.
 *
 * Each is an ioctl(2) on any file or directory of the mount, as described in docs/IOCTL.md; on other file systems
 * they fail with ENOTTY. `reserved` fields and unknown flags must be 0, or the call fails with EINVAL.
 *
 *     int fd = open("/mnt/journal", O_RDWR);
 *     struct weir_sync_range range = { .offset = 0, .length = 65536, .flags = WEIR_SYNC_START };
 *     ioctl(fd, WEIR_IOC_SYNC_RANGE, &range);      // returns at once
 *     ...
 *     range.flags = 0;
 *     ioctl(fd, WEIR_IOC_SYNC_RANGE, &range);      // returns when these bytes are durable
 */
#ifndef WEIR_H
#define WEIR_H

#include <linux/types.h>
#include <sys/ioctl.h>

#define WEIR_IOC_MAGIC 0xB7

/* Makes bytes [offset, offset + length) of a file durable; length 0: up to the end of the file. Bytes outside are neither
 * written nor waited for. On a directory: its names; offset and length do not matter. */
struct weir_sync_range {
	__u64 offset;
	__u64 length;
	__u32 flags;
	__u32 reserved;
};
#define WEIR_SYNC_DATA 1u  /* as fdatasync: without attributes that are not needed to read the bytes */
#define WEIR_SYNC_START 2u /* return when it is under way; an error is told by the next sync of this file */
#define WEIR_IOC_SYNC_RANGE _IOW(WEIR_IOC_MAGIC, 1, struct weir_sync_range)

/* Log sequence numbers: each operation has one, and after a crash the operations up to some LSN are there. */
struct weir_lsn {
	__u64 durable; /* everything up to this one is durable */
	__u64 last;    /* the last one of the volume */
	__u64 file;    /* the last one of this file; 0 for a directory */
};
#define WEIR_IOC_LSN _IOR(WEIR_IOC_MAGIC, 2, struct weir_lsn)

/* Waits until operation `lsn` is durable. ETIMEDOUT after timeout_us (0: does not wait; at most a minute), EINVAL if there
 * is no such operation yet. */
struct weir_wait_lsn {
	__u64 lsn;
	__u64 timeout_us;
	__u32 flags;
	__u32 reserved;
};
#define WEIR_WAIT_PUSH 1u /* make it durable now instead of waiting for somebody else's sync; no time limit */
#define WEIR_IOC_WAIT_LSN _IOW(WEIR_IOC_MAGIC, 3, struct weir_wait_lsn)

/* Statistics of the mount as JSON, page by page. First call: snapshot and offset 0. The server sets snapshot; pass it on
 * with offset += length until offset == total_bytes. ESTALE: too many others read meanwhile, begin again. */
struct weir_stats {
	__u64 snapshot;
	__u32 offset;
	__u32 total_bytes;
	__u32 length;
	__u32 reserved;
	char data[8168];
};
#define WEIR_IOC_STATS _IOWR(WEIR_IOC_MAGIC, 4, struct weir_stats)

/* As syncfs(2), which the kernel does not pass on: everything before is durable when it returns. With WEIR_SYNC_MAPPED also
 * what the kernel has and has not sent: stored through shared mappings, or kept by -o writeback_cache. (A page that could not
 * be sent is not told here, but by syncfs(2) of a descriptor that was open before.) */
#define WEIR_SYNC_MAPPED 4u
struct weir_flags {
	__u32 flags; /* WEIR_SYNC_START, WEIR_SYNC_MAPPED */
	__u32 reserved;
};
#define WEIR_IOC_SYNC_VOLUME _IOW(WEIR_IOC_MAGIC, 5, struct weir_flags)

/* Raises a barrier: after a crash, what happened after it is there only if all that happened before it is. Waits for
 * nothing. When `lsn` is durable, so is everything before the barrier; it may be one more than the last operation yet. */
struct weir_barrier {
	__u32 flags;
	__u32 reserved;
	__u64 lsn; /* out */
};
#define WEIR_BARRIER_FILE 1u /* data of this file (open for writing) and all names, instead of data of all files */
#define WEIR_BARRIER_MAPPED 2u /* also what only the kernel has; waits until it has sent that */
#define WEIR_IOC_BARRIER _IOWR(WEIR_IOC_MAGIC, 6, struct weir_barrier)

/* As sync_file_range(2), but what is said there about waiting holds: WEIR_WRITE_START starts to write dirty pages home, but
 * those under way, and waits for no page, only for the budget of background writeback (WEIR_WRITE_NOWAIT: EAGAIN instead). What was
 * handed over is sorted and merged. Makes nothing durable: a later sync has little left to do. On files. */
#define WEIR_WRITE_WAIT_BEFORE 1u
#define WEIR_WRITE_START 2u
#define WEIR_WRITE_WAIT_AFTER 4u
#define WEIR_WRITE_NOWAIT 8u
#define WEIR_IOC_WRITE_RANGE _IOW(WEIR_IOC_MAGIC, 7, struct weir_sync_range)

/* Leaves a range to background writeback, now instead of when it is old; returns at once. flags 0. On files. */
#define WEIR_IOC_EXPIRE _IOW(WEIR_IOC_MAGIC, 8, struct weir_sync_range)

/* What the volume promises of single writes, and how much it takes at a time. */
struct weir_capabilities {
	__u32 untorn_write_bytes;     /* a synced overwrite of up to this length is old or new after a crash */
	__u32 untorn_alignment_bytes; /* if offset and length are multiples of this */
	__u32 untorn_boundary_bytes;  /* and it does not cross a multiple of this */
	__u32 max_log_payload_bytes;  /* a sync of up to this much is one write and one flush */
	__u64 max_tickets;            /* syncs under way at a time */
	__u64 handover_bytes;         /* dirty bytes handed to background writeback at a time */
	__u64 reserved[4];
};
#define WEIR_IOC_CAPABILITIES _IOR(WEIR_IOC_MAGIC, 9, struct weir_capabilities)

/* Changes of many files and names that happen together or not at all, also across a crash. Staged on a regular file of the
 * mount that is open for writing (any; it only holds the batch): BEGIN sets id, ADD appends steps, COMMIT makes them, in their
 * order, or fails and changes nothing; either ends the batch, as do ABORT and the last close of the file. Only for the superuser
 * and the owner of the mount, outside of containers (EPERM): permissions are not checked. */
struct weir_batch {
	__u64 id;    /* out of BEGIN */
	__u64 lsn;   /* out of COMMIT: durable with this operation; in: not looked at */
	__u32 flags; /* of COMMIT: 0 or WEIR_BATCH_SYNC */
	__u32 reserved;
};
#define WEIR_BATCH_SYNC 1u /* return when it is durable */

/* Steps one after the other, `length` bytes of them. They are taken together or, with an error, not at all. */
struct weir_batch_add {
	__u64 id;
	__u32 length;
	__u32 reserved;
	char steps[16352];
};
#define WEIR_IOC_BATCH_BEGIN _IOWR(WEIR_IOC_MAGIC, 10, struct weir_batch)
#define WEIR_IOC_BATCH_ADD _IOW(WEIR_IOC_MAGIC, 11, struct weir_batch_add)
#define WEIR_IOC_BATCH_COMMIT _IOWR(WEIR_IOC_MAGIC, 12, struct weir_batch)
#define WEIR_IOC_BATCH_ABORT _IOW(WEIR_IOC_MAGIC, 13, struct weir_batch)

/* A step; behind it name_bytes of a name (no NUL), data_bytes of data, and zeros up to a multiple of 8. Inodes and directories
 * are named by st_ino, or, if the batch makes them, by WEIR_BATCH_MADE(n): the n-th that it makes, from 0. Fields that a kind does
 * not use are 0. */
struct weir_batch_step {
	__u16 op;
	__u16 name_bytes;
	__u32 data_bytes;
	__u64 ino;
	__u64 dir;
	__u64 value;
	__u32 mode;
	__u32 uid;
	__u32 gid;
	__u32 flags;
};
#define WEIR_BATCH_MADE(n) (1ull << 63 | (n))
/*                               uses: */
#define WEIR_BATCH_WRITE 1    /* ino; value: offset; data */
#define WEIR_BATCH_TRUNCATE 2 /* ino; value: size */
#define WEIR_BATCH_MAKE 3     /* dir, name; mode: type and permissions; uid, gid; value: number of a device */
#define WEIR_BATCH_SYMLINK 4  /* dir, name; data: target; uid, gid */
#define WEIR_BATCH_LINK 5     /* ino; dir, name */
#define WEIR_BATCH_UNLINK 6   /* dir, name */
#define WEIR_BATCH_RMDIR 7    /* dir, name */
#define WEIR_BATCH_RENAME 8   /* dir, name; value: new directory; data: new name; flags: 0, RENAME_NOREPLACE or RENAME_EXCHANGE */
#define WEIR_BATCH_SETATTR 9  /* ino; flags: what is changed; mode, uid, gid; data: struct weir_batch_times, if ATIME or MTIME */

#define WEIR_BATCH_SET_MODE 1u
#define WEIR_BATCH_SET_UID 2u
#define WEIR_BATCH_SET_GID 4u
#define WEIR_BATCH_SET_ATIME 8u
#define WEIR_BATCH_SET_MTIME 16u
#define WEIR_BATCH_SET_ATIME_NOW 32u
#define WEIR_BATCH_SET_MTIME_NOW 64u
struct weir_batch_times {
	__s64 atime_seconds;
	__s64 mtime_seconds;
	__u32 atime_nanoseconds;
	__u32 mtime_nanoseconds;
};

#endif
