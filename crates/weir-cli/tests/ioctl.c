/* Uses every command of weir.h on a file and a directory of a mount; prints what failed.
 * usage: ioctl DIR */
#define _GNU_SOURCE
#include "weir.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int failures;

#define CHECK(condition)                                                                              \
	do {                                                                                          \
		if (!(condition)) {                                                                   \
			printf("line %d: %s (errno %d)\n", __LINE__, #condition, errno);              \
			failures++;                                                                   \
		}                                                                                     \
	} while (0)

_Static_assert(sizeof(struct weir_sync_range) == 24, "layout");
_Static_assert(sizeof(struct weir_lsn) == 24, "layout");
_Static_assert(sizeof(struct weir_wait_lsn) == 24, "layout");
_Static_assert(sizeof(struct weir_stats) == 8192, "layout");
_Static_assert(sizeof(struct weir_flags) == 8, "layout");
_Static_assert(sizeof(struct weir_barrier) == 16, "layout");
_Static_assert(sizeof(struct weir_capabilities) == 64, "layout");
_Static_assert(sizeof(struct weir_batch) == 24, "layout");
_Static_assert(sizeof(struct weir_batch_add) == 16368, "layout");
_Static_assert(sizeof(struct weir_batch_step) == 48, "layout");
_Static_assert(sizeof(struct weir_batch_times) == 24, "layout");

static void sync_and_wait(int fd)
{
	struct weir_sync_range range = { .offset = 0, .length = 4096, .flags = WEIR_SYNC_DATA };
	struct weir_lsn lsn;
	struct weir_wait_lsn wait = { .timeout_us = 0 };

	CHECK(ioctl(fd, WEIR_IOC_SYNC_RANGE, &range) == 0);
	CHECK(ioctl(fd, WEIR_IOC_LSN, &lsn) == 0);
	CHECK(lsn.file > 0 && lsn.file <= lsn.durable && lsn.durable <= lsn.last);

	range.flags = WEIR_SYNC_START;
	range.length = 0;
	CHECK(ioctl(fd, WEIR_IOC_SYNC_RANGE, &range) == 0);
	CHECK(ioctl(fd, WEIR_IOC_LSN, &lsn) == 0);
	wait.lsn = lsn.last;
	wait.flags = WEIR_WAIT_PUSH;
	CHECK(ioctl(fd, WEIR_IOC_WAIT_LSN, &wait) == 0);
	CHECK(ioctl(fd, WEIR_IOC_LSN, &lsn) == 0);
	CHECK(lsn.durable >= wait.lsn);
	wait.flags = 0;
	CHECK(ioctl(fd, WEIR_IOC_WAIT_LSN, &wait) == 0);

	range.flags = 1u << 9;
	errno = 0;
	CHECK(ioctl(fd, WEIR_IOC_SYNC_RANGE, &range) == -1 && errno == EINVAL);
	wait.lsn = ~0ull;
	errno = 0;
	CHECK(ioctl(fd, WEIR_IOC_WAIT_LSN, &wait) == -1 && errno == EINVAL);
}

static void barrier(int fd, unsigned flags)
{
	struct weir_barrier barrier = { .flags = flags };
	struct weir_wait_lsn wait = { .flags = WEIR_WAIT_PUSH };
	struct weir_lsn lsn;

	CHECK(write(fd, "after", 5) == 5 || errno == EISDIR || errno == EBADF);
	CHECK(ioctl(fd, WEIR_IOC_BARRIER, &barrier) == 0);
	wait.lsn = barrier.lsn;
	CHECK(ioctl(fd, WEIR_IOC_WAIT_LSN, &wait) == 0);
	CHECK(ioctl(fd, WEIR_IOC_LSN, &lsn) == 0);
	CHECK(lsn.durable >= barrier.lsn);
}

static void statistics(int fd)
{
	struct weir_stats page = { .snapshot = 0 };
	char *text;
	unsigned read;

	CHECK(ioctl(fd, WEIR_IOC_STATS, &page) == 0);
	text = calloc(1, page.total_bytes + 1);
	for (read = 0; read < page.total_bytes;) {
		page.offset = read;
		CHECK(ioctl(fd, WEIR_IOC_STATS, &page) == 0);
		CHECK(page.length > 0 && read + page.length <= page.total_bytes);
		if (page.length == 0)
			break;
		memcpy(text + read, page.data, page.length);
		read += page.length;
	}
	CHECK(text[0] == '{' && text[page.total_bytes - 1] == '}');
	CHECK(strstr(text, "\"flush_ns\""));
	free(text);

	page.snapshot = 999999;
	page.offset = 0;
	errno = 0;
	CHECK(ioctl(fd, WEIR_IOC_STATS, &page) == -1 && errno == ESTALE);
}

static void write_home(int fd, int dir)
{
	struct weir_sync_range range = { .flags = WEIR_WRITE_WAIT_BEFORE | WEIR_WRITE_START | WEIR_WRITE_WAIT_AFTER };
	struct weir_capabilities capabilities;

	CHECK(ioctl(fd, WEIR_IOC_WRITE_RANGE, &range) == 0);
	range.flags = WEIR_WRITE_START | WEIR_WRITE_NOWAIT;
	CHECK(ioctl(fd, WEIR_IOC_WRITE_RANGE, &range) == 0 || errno == EAGAIN);
	errno = 0;
	CHECK(ioctl(dir, WEIR_IOC_WRITE_RANGE, &range) == -1 && errno == EISDIR);
	range.flags = 0;
	CHECK(ioctl(fd, WEIR_IOC_EXPIRE, &range) == 0);
	CHECK(ioctl(dir, WEIR_IOC_CAPABILITIES, &capabilities) == 0);
	CHECK(capabilities.untorn_write_bytes >= 4096 && capabilities.max_tickets > 0);
}

static void step(struct weir_batch_add *add, struct weir_batch_step step, const char *name, const char *data)
{
	char *to = add->steps + add->length;

	step.name_bytes = strlen(name);
	step.data_bytes = strlen(data);
	memcpy(to, &step, sizeof step);
	memcpy(to + sizeof step, name, step.name_bytes);
	memcpy(to + sizeof step + step.name_bytes, data, step.data_bytes);
	add->length += (sizeof step + step.name_bytes + step.data_bytes + 7) / 8 * 8;
}

static void batch(int file, int dir, const char *where)
{
	static struct weir_batch_add add;
	struct weir_batch batch = { 0 };
	struct stat root, old, new;
	char path[4200], text[32] = { 0 };
	int fd;

	CHECK(fstat(dir, &root) == 0 && fstat(file, &old) == 0);
	CHECK(ioctl(file, WEIR_IOC_BATCH_BEGIN, &batch) == 0 && batch.id != 0);
	add.id = batch.id;
	step(&add, (struct weir_batch_step){ .op = WEIR_BATCH_MAKE, .dir = root.st_ino, .mode = S_IFDIR | 0755 }, "made", "");
	step(&add, (struct weir_batch_step){ .op = WEIR_BATCH_MAKE, .dir = WEIR_BATCH_MADE(0), .mode = S_IFREG | 0640, .gid = 7 },
	     "file", "");
	step(&add, (struct weir_batch_step){ .op = WEIR_BATCH_WRITE, .ino = WEIR_BATCH_MADE(1), .value = 3 }, "", "content");
	step(&add, (struct weir_batch_step){ .op = WEIR_BATCH_SYMLINK, .dir = root.st_ino }, "to-made", "made/file");
	step(&add, (struct weir_batch_step){ .op = WEIR_BATCH_TRUNCATE, .ino = old.st_ino, .value = 100 }, "", "");
	step(&add,
	     (struct weir_batch_step){ .op = WEIR_BATCH_SETATTR, .ino = old.st_ino, .mode = 0600, .flags = WEIR_BATCH_SET_MODE }, "",
	     "");
	CHECK(ioctl(file, WEIR_IOC_BATCH_ADD, &add) == 0);
	errno = 0;
	CHECK(fstatat(dir, "made", &new, 0) == -1 && errno == ENOENT);
	batch.flags = WEIR_BATCH_SYNC;
	CHECK(ioctl(file, WEIR_IOC_BATCH_COMMIT, &batch) == 0 && batch.lsn != 0);

	CHECK(fstat(file, &old) == 0 && old.st_size == 100 && (old.st_mode & 07777) == 0600);
	snprintf(path, sizeof path, "%s/to-made", where);
	fd = open(path, O_RDONLY);
	CHECK(fd >= 0 && fstat(fd, &new) == 0 && new.st_size == 10 && (new.st_mode & 07777) == 0640 && new.st_gid == 7);
	CHECK(pread(fd, text, sizeof text, 3) == 7 && strcmp(text, "content") == 0);
	close(fd);

	/* The batch has ended, and bad ones change nothing. */
	errno = 0;
	CHECK(ioctl(file, WEIR_IOC_BATCH_COMMIT, &batch) == -1 && errno == EINVAL);
	memset(&batch, 0, sizeof batch);
	errno = 0;
	CHECK(ioctl(dir, WEIR_IOC_BATCH_BEGIN, &batch) == -1 && errno == EISDIR);
	CHECK(ioctl(file, WEIR_IOC_BATCH_BEGIN, &batch) == 0);
	add.id = batch.id;
	add.length = sizeof add.steps + 8;
	errno = 0;
	CHECK(ioctl(file, WEIR_IOC_BATCH_ADD, &add) == -1 && errno == EINVAL);
	CHECK(ioctl(file, WEIR_IOC_BATCH_ABORT, &batch) == 0);
}

int main(int argc, char **argv)
{
	struct weir_flags flags = { 0 };
	char path[4096], block[4096];
	int dir, file, other;

	if (argc != 2)
		return 2;
	snprintf(path, sizeof path, "%s/ioctl-c", argv[1]);
	dir = open(argv[1], O_RDONLY | O_DIRECTORY);
	file = open(path, O_CREAT | O_RDWR, 0644);
	memset(block, 'w', sizeof block);
	CHECK(dir >= 0 && file >= 0);
	CHECK(write(file, block, sizeof block) == sizeof block);

	sync_and_wait(file);
	barrier(file, 0);
	barrier(file, WEIR_BARRIER_FILE);
	barrier(dir, 0);
	barrier(file, WEIR_BARRIER_FILE | WEIR_BARRIER_MAPPED);
	barrier(dir, WEIR_BARRIER_MAPPED);
	write_home(file, dir);
	batch(file, dir, argv[1]);
	statistics(file);
	statistics(dir);
	CHECK(ioctl(dir, WEIR_IOC_SYNC_VOLUME, &flags) == 0);
	flags.flags = WEIR_SYNC_START;
	CHECK(ioctl(file, WEIR_IOC_SYNC_VOLUME, &flags) == 0);
	flags.flags = WEIR_SYNC_START | WEIR_SYNC_MAPPED;
	CHECK(ioctl(file, WEIR_IOC_SYNC_VOLUME, &flags) == 0);
	flags.flags = WEIR_SYNC_MAPPED;
	CHECK(ioctl(dir, WEIR_IOC_SYNC_VOLUME, &flags) == 0);

	other = open("/dev/null", O_RDONLY);
	errno = 0;
	CHECK(ioctl(other, WEIR_IOC_SYNC_VOLUME, &flags) == -1 && errno == ENOTTY);
	return failures ? 1 : 0;
}
