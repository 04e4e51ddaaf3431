/* Uses every command of weir.h on a file and a directory of a mount; prints what failed.
 * usage: ioctl DIR */
#define _GNU_SOURCE
#include "weir.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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
	write_home(file, dir);
	statistics(file);
	statistics(dir);
	CHECK(ioctl(dir, WEIR_IOC_SYNC_VOLUME, &flags) == 0);
	flags.flags = WEIR_SYNC_START;
	CHECK(ioctl(file, WEIR_IOC_SYNC_VOLUME, &flags) == 0);

	other = open("/dev/null", O_RDONLY);
	errno = 0;
	CHECK(ioctl(other, WEIR_IOC_SYNC_VOLUME, &flags) == -1 && errno == ENOTTY);
	return failures ? 1 : 0;
}
