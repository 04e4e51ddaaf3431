"""Checks of file content: writes, truncation, allocation, mappings, direct I/O, locks."""

import fcntl
import mmap
import os
import random
import resource
import signal
import struct
import time

from posix_support import (BLOCK_BYTES, COLLAPSE_RANGE, INSERT_RANGE, KEEP_SIZE, PUNCH_HOLE,
                           ZERO_RANGE, Skip, aligned_buffer, check, equal, expect_errno,
                           fallocate, in_process, join, pattern, read_file, write_file)

MIB = 1 << 20


def open_new(top, name="f", flags=0):
    return os.open(os.path.join(top, name), os.O_RDWR | os.O_CREAT | flags, 0o644)


@check
def append_from_several_processes_loses_nothing(top):
    """O_APPEND is atomic: each record is whole, and none overwrites another."""
    path = os.path.join(top, "log")
    write_file(path)

    def append(worker):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND)
        for number in range(500):
            os.write(fd, struct.pack("<II", worker, number) + bytes([worker]) * 92)
        os.close(fd)
    join(*[in_process(append, worker) for worker in range(4)])
    data = read_file(path)
    equal(len(data), 4 * 500 * 100)
    following = [0] * 4
    for start in range(0, len(data), 100):
        worker, number = struct.unpack_from("<II", data, start)
        equal(number, following[worker], f"record of worker {worker} at {start}")
        equal(data[start + 8:start + 100], bytes([worker]) * 92)
        following[worker] += 1


@check
def append_ignores_the_file_position_and_pwrite_the_end(top):
    fd = open_new(top, flags=os.O_APPEND)
    os.write(fd, b"abc")
    os.lseek(fd, 0, os.SEEK_SET)
    os.write(fd, b"def")
    equal(os.pread(fd, 100, 0), b"abcdef")
    os.close(fd)


@check
def random_writes_match_a_model(top):
    """Writes, reads, truncates of all sizes against a copy in memory, through two descriptors."""
    rng = random.Random(42)
    path = os.path.join(top, "f")
    first, second = open_new(top), os.open(path, os.O_RDWR)
    model = bytearray()
    for step in range(2000):
        offset, length = rng.randrange(300000), rng.choice((1, 100, 4096, 5000, 70000))
        kind = rng.random()
        if kind < 0.5:
            data = rng.randbytes(length)
            os.pwrite(rng.choice((first, second)), data, offset)
            model.extend(bytes(max(0, offset + length - len(model))))
            model[offset:offset + length] = data
        elif kind < 0.6:
            os.ftruncate(first, offset)
            del model[offset:]
            model.extend(bytes(offset - len(model)))
        elif kind < 0.62:
            os.fsync(second)
        else:
            equal(os.pread(rng.choice((first, second)), length, offset),
                  bytes(model[offset:offset + length]), f"step {step}")
    os.close(first)
    os.close(second)
    equal(read_file(path), bytes(model))


@check
def truncate_down_and_up_leaves_zeros(top):
    fd = open_new(top)
    for cut in (0, 1, 511, 512, 4095, 4096, 4097, 65537, 299999):
        os.pwrite(fd, b"\xff" * 300000, 0)
        os.ftruncate(fd, cut)
        equal(os.fstat(fd).st_size, cut)
        os.ftruncate(fd, 400000)
        equal(os.pread(fd, 500000, 0), b"\xff" * cut + bytes(400000 - cut), f"cut at {cut}")
        os.fsync(fd)
        equal(os.pread(fd, 500000, 0), b"\xff" * cut + bytes(400000 - cut), f"synced, {cut}")
        os.ftruncate(fd, cut)
        os.pwrite(fd, b"end", cut + 10000)
        equal(os.pread(fd, 20000, cut), bytes(10000) + b"end", f"write past the end, {cut}")
    expect_errno("EINVAL", os.ftruncate, fd, -1)
    os.close(fd)
    fd = os.open(os.path.join(top, "f"), os.O_RDONLY)
    expect_errno(["EINVAL", "EBADF"], os.ftruncate, fd, 0)
    os.close(fd)


@check
def truncate_extends_sparsely_to_huge_sizes(top):
    fd = open_new(top)
    size = 15 * 2**40
    os.ftruncate(fd, size)
    os.pwrite(fd, b"far", size - 3)
    os.pwrite(fd, b"near", 0)
    os.fsync(fd)
    info = os.fstat(fd)
    equal(info.st_size, size)
    assert info.st_blocks * 512 < MIB, f"{info.st_blocks} blocks for a sparse file"
    equal(os.pread(fd, 10, size - 6), b"\0\0\0far")
    equal(os.pread(fd, 10, size // 2), bytes(10))
    expect_errno(["EFBIG", "EINVAL"], os.pwrite, fd, b"x", 2**63 - 1)
    os.close(fd)


@check
def write_beyond_the_size_limit_fails_with_efbig(top):
    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))
        fd = open_new(top)
        equal(os.pwrite(fd, b"x" * 10, 99995), 5, "partial write at the limit")
        expect_errno("EFBIG", os.pwrite, fd, b"x", 100000)
        expect_errno("EFBIG", os.ftruncate, fd, 100001)
        equal(os.fstat(fd).st_size, 100000)
    join(in_process(limited))


@check
def o_trunc_and_o_creat_behave(top):
    path = os.path.join(top, "f")
    write_file(path, b"0123456789")
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    equal(os.read(fd, 20), b"0123456789")
    os.close(fd)
    os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
    equal(os.stat(path).st_size, 0)
    equal(os.stat(path).st_mode & 0o7777, 0o644)


@check
def fallocate_extends_or_keeps_the_size(top):
    fd = open_new(top)
    os.write(fd, b"head")
    try:
        fallocate(fd, KEEP_SIZE, 0, MIB)
    except OSError as error:
        raise AssertionError(f"fallocate is not supported: {error}") from error
    info = os.fstat(fd)
    equal(info.st_size, 4)
    assert info.st_blocks * 512 >= MIB, "no space was allocated beyond the end"
    fallocate(fd, 0, 2 * MIB, 1000)
    equal(os.fstat(fd).st_size, 2 * MIB + 1000)
    equal(os.pread(fd, 3 * MIB, 0), b"head" + bytes(2 * MIB + 1000 - 4))
    os.pwrite(fd, b"x" * 5000, MIB - 2500)
    equal(os.pread(fd, 10000, MIB - 5000), bytes(2500) + b"x" * 5000 + bytes(2500))
    expect_errno("EINVAL", fallocate, fd, 0, 0, 0)
    expect_errno("EINVAL", fallocate, fd, 0, -1, 10)
    os.close(fd)


@check
def punch_hole_zeroes_and_frees(top):
    fd = open_new(top)
    data = pattern(3, MIB)
    os.write(fd, data)
    os.fsync(fd)
    before = os.fstat(fd).st_blocks
    for start, length in ((4096, 65536), (200001, 1), (300000, 100000), (MIB - 10, 5000)):
        fallocate(fd, PUNCH_HOLE | KEEP_SIZE, start, length)
        end = min(start + length, MIB)
        data = data[:start] + bytes(end - start) + data[end:]
        equal(os.pread(fd, 2 * MIB, 0), data, f"after punching {length} at {start}")
    os.fsync(fd)
    assert os.fstat(fd).st_blocks < before - 200, "the holes take space"
    equal(os.fstat(fd).st_size, MIB)
    expect_errno("EOPNOTSUPP", fallocate, fd, PUNCH_HOLE, 0, 4096)
    os.close(fd)


@check
def zero_range_zeroes_and_may_extend(top):
    fd = open_new(top)
    os.write(fd, b"\xee" * 200000)
    try:
        fallocate(fd, ZERO_RANGE, 1000, 100000)
    except OSError as error:
        raise Skip(f"FALLOC_FL_ZERO_RANGE: {error}") from error
    equal(os.pread(fd, 300000, 0), b"\xee" * 1000 + bytes(100000) + b"\xee" * 99000)
    fallocate(fd, ZERO_RANGE | KEEP_SIZE, 190000, 100000)
    equal(os.fstat(fd).st_size, 200000)
    fallocate(fd, ZERO_RANGE, 195000, 10000)
    equal(os.pread(fd, 300000, 185000), b"\xee" * 5000 + bytes(15000))
    os.close(fd)


@check
def collapse_and_insert_range_shift_the_file(top):
    fd = open_new(top)
    data = pattern(9, 256 * 1024)
    os.write(fd, data)
    try:
        fallocate(fd, COLLAPSE_RANGE, 65536, 65536)
    except OSError as error:
        raise Skip(f"FUSE does not pass it on: {error}") from error
    equal(os.pread(fd, MIB, 0), data[:65536] + data[131072:])
    fallocate(fd, INSERT_RANGE, 65536, 65536)
    equal(os.pread(fd, MIB, 0), data[:65536] + bytes(65536) + data[131072:])
    os.close(fd)


def data_runs(fd):
    """The runs of data that SEEK_DATA and SEEK_HOLE report."""
    size, offset, runs = os.fstat(fd).st_size, 0, []
    while offset < size:
        try:
            start = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError:
            break
        offset = os.lseek(fd, start, os.SEEK_HOLE)
        assert start < offset <= size, f"hole at {offset} after data at {start}"
        runs.append((start, offset))
    return runs


@check
def seek_data_and_hole_find_all_data(top):
    fd = open_new(top)
    places = [0, 5 * MIB, 9 * MIB + 4096, 30 * MIB]
    for place in places:
        os.pwrite(fd, b"d" * 8192, place)
    os.ftruncate(fd, 64 * MIB)
    for synced in (False, True):
        if synced:
            os.fsync(fd)
        runs = data_runs(fd)
        for place in places:
            assert any(a <= place and place + 8192 <= b for a, b in runs), \
                f"data at {place} is not in {runs} (synced: {synced})"
        total = sum(b - a for a, b in runs)
        assert total <= 8 * MIB, f"{total} bytes reported as data"
    equal(os.lseek(fd, 0, os.SEEK_HOLE) >= 8192, True)
    expect_errno("ENXIO", os.lseek, fd, 64 * MIB, os.SEEK_DATA)
    expect_errno("ENXIO", os.lseek, fd, 40 * MIB, os.SEEK_DATA)
    expect_errno("ENXIO", os.lseek, fd, 65 * MIB, os.SEEK_HOLE)
    os.close(fd)


@check
def shared_mapping_and_file_are_one(top):
    fd = open_new(top)
    os.write(fd, pattern(1, 10 * BLOCK_BYTES))
    with mmap.mmap(fd, 10 * BLOCK_BYTES) as mapped:
        mapped[5000:5010] = b"from mmap!"
        equal(os.pread(fd, 10, 5000), b"from mmap!", "pread sees the mapping")
        os.pwrite(fd, b"from write", 9000)
        equal(mapped[9000:9010], b"from write", "the mapping sees pwrite")
        mapped.flush()
        mapped[20000:20004] = b"late"
    os.fsync(fd)
    os.close(fd)
    data = read_file(os.path.join(top, "f"))
    equal((data[5000:5010], data[9000:9010], data[20000:20004]),
          (b"from mmap!", b"from write", b"late"))


@check
def mapping_writes_of_one_process_reach_another(top):
    fd = open_new(top)
    os.ftruncate(fd, 64 * BLOCK_BYTES)

    def fill(worker):
        with mmap.mmap(fd, 64 * BLOCK_BYTES) as mapped:
            for block in range(worker, 64, 4):
                start = block * BLOCK_BYTES
                mapped[start:start + BLOCK_BYTES] = pattern(block, BLOCK_BYTES)
            mapped.flush()
    join(*[in_process(fill, worker) for worker in range(4)])
    for block in range(64):
        equal(os.pread(fd, BLOCK_BYTES, block * BLOCK_BYTES), pattern(block, BLOCK_BYTES))
    os.close(fd)


@check
def truncated_mapping_reads_zeros_after_extension(top):
    fd = open_new(top)
    os.write(fd, b"\xaa" * (4 * BLOCK_BYTES))
    with mmap.mmap(fd, 4 * BLOCK_BYTES) as mapped:
        equal(mapped[BLOCK_BYTES], 0xAA)
        os.ftruncate(fd, BLOCK_BYTES + 100)
        equal(mapped[BLOCK_BYTES + 100:2 * BLOCK_BYTES], bytes(BLOCK_BYTES - 100), "tail of the page")
        mapped[BLOCK_BYTES + 200] = 0x55  # beyond the end: must never become file content
        os.ftruncate(fd, 4 * BLOCK_BYTES)
        equal(mapped[2 * BLOCK_BYTES:], bytes(2 * BLOCK_BYTES))
    os.fsync(fd)
    equal(os.pread(fd, BLOCK_BYTES, 2 * BLOCK_BYTES), bytes(BLOCK_BYTES))
    os.close(fd)


@check
def private_mapping_and_execution_of_a_program(top):
    fd = open_new(top)
    os.write(fd, b"x" * BLOCK_BYTES)
    with mmap.mmap(fd, BLOCK_BYTES, flags=mmap.MAP_PRIVATE) as mapped:
        mapped[0] = 0
        equal(os.pread(fd, 1, 0), b"x", "a private mapping stays private")
    os.close(fd)
    program = os.path.join(top, "true")
    write_file(program, read_file("/bin/true"), 0o755)
    equal(os.spawnv(os.P_WAIT, program, [program]), 0, "exit code of a copied program")
    script = os.path.join(top, "script")
    write_file(script, b"#!/bin/sh\nexit 7\n", 0o755)
    equal(os.spawnv(os.P_WAIT, script, [script]), 7, "exit code of a script")


@check
def direct_io_and_buffered_io_see_the_same(top):
    path = os.path.join(top, "f")
    try:
        direct = open_new(top, flags=os.O_DIRECT)
    except OSError as error:
        raise AssertionError(f"O_DIRECT is refused: {error}") from error
    buffered = os.open(path, os.O_RDWR)
    buffer = aligned_buffer(64 * 1024)
    rng, model = random.Random(3), bytearray(MIB)
    os.ftruncate(buffered, MIB)
    for step in range(300):
        length = rng.choice((4096, 8192, 65536))
        offset = rng.randrange((MIB - length) // 4096 + 1) * 4096
        if rng.random() < 0.5:
            buffer[:length] = rng.randbytes(length)
            equal(os.pwritev(direct, [memoryview(buffer)[:length]], offset), length)
            model[offset:offset + length] = buffer[:length]
        else:
            data = rng.randbytes(length)
            os.pwrite(buffered, data, offset)
            model[offset:offset + length] = data
        offset = rng.randrange(MIB // 4096) * 4096
        expected = bytes(model[offset:offset + 4096])
        equal(os.pread(buffered, 4096, offset), expected, f"buffered read, step {step}")
        equal(os.preadv(direct, [memoryview(buffer)[:4096]], offset), 4096)
        equal(bytes(buffer[:4096]), expected, f"direct read, step {step}")
    # A direct read at the end is short; a direct write extends the file.
    os.ftruncate(buffered, MIB + 100)
    equal(os.preadv(direct, [buffer], MIB), 100)
    equal(os.preadv(direct, [buffer], 2 * MIB), 0)
    equal(os.pwritev(direct, [memoryview(buffer)[:4096]], 2 * MIB), 4096)
    equal(os.fstat(buffered).st_size, 2 * MIB + 4096)
    os.close(direct)
    os.close(buffered)


@check
def sync_flags_and_calls_are_accepted(top):
    for flag in (os.O_SYNC, os.O_DSYNC):
        fd = open_new(top, f"f{flag}", flag)
        for number in range(20):
            os.write(fd, pattern(number, 5000))
        os.close(fd)
        equal(read_file(os.path.join(top, f"f{flag}")), b"".join(pattern(n, 5000) for n in range(20)))
    directory = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    fd = open_new(top, "g")
    os.write(fd, b"x")
    os.fsync(fd)
    os.fdatasync(fd)
    os.fsync(directory)
    os.fdatasync(directory)
    os.close(fd)
    os.close(directory)
    read_only = os.open(os.path.join(top, "g"), os.O_RDONLY)
    os.fsync(read_only)
    os.close(read_only)
    os.sync()


@check
def vectored_and_large_transfers_are_whole(top):
    fd = open_new(top)
    pieces = [pattern(n, n * 37 + 1) for n in range(500)]
    whole = b"".join(pieces)
    equal(os.writev(fd, pieces), len(whole))
    buffers = [bytearray(n * 41 + 1) for n in range(400)]
    os.lseek(fd, 0, os.SEEK_SET)
    count = os.readv(fd, buffers)
    equal(b"".join(bytes(b) for b in buffers)[:count], whole[:count])
    large = pattern(5, 33 * MIB + 17)
    written = 0
    while written < len(large):
        written += os.pwrite(fd, large[written:], 1 + written)
    os.fsync(fd)
    equal(os.fstat(fd).st_size, len(large) + 1)
    chunks, offset = [], 1
    while chunk := os.pread(fd, 16 * MIB, offset):
        chunks.append(chunk)
        offset += len(chunk)
    equal(b"".join(chunks) == large, True, "33 MiB read back")
    equal(os.pread(fd, 10, len(large) + 1), b"")
    equal(os.pwrite(fd, b"", 10 * len(large)), 0)
    equal(os.fstat(fd).st_size, len(large) + 1, "a write of nothing does not extend")
    os.close(fd)


@check
def copy_file_range_and_sendfile_copy(top):
    source, target = open_new(top, "s"), open_new(top, "t")
    data = pattern(8, 3 * MIB + 123)
    os.write(source, data)
    copied = 0
    while copied < len(data):
        count = os.copy_file_range(source, target, len(data) - copied, copied, copied)
        assert count > 0, "copy_file_range stopped early"
        copied += count
    equal(os.pread(target, 4 * MIB, 0) == data, True, "copy_file_range")
    equal(os.copy_file_range(source, source, 5000, 100, 2 * MIB), 5000)
    equal(os.pread(source, 5000, 2 * MIB), data[100:5100])
    os.ftruncate(target, 0)
    os.lseek(target, 0, os.SEEK_SET)
    sent = 0
    while sent < MIB:
        sent += os.sendfile(target, source, sent, MIB - sent)
    equal(os.pread(target, 2 * MIB, 0), data[:MIB])
    os.close(source)
    os.close(target)


@check
def fcntl_locks_exclude_and_split(top):
    path = os.path.join(top, "f")
    write_file(path, bytes(100))
    fd = os.open(path, os.O_RDWR)
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 0)
    fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 10, 50)

    def other():
        mine = os.open(path, os.O_RDWR)
        expect_errno(["EACCES", "EAGAIN"], fcntl.lockf, mine, fcntl.LOCK_EX | fcntl.LOCK_NB, 5, 5)
        expect_errno(["EACCES", "EAGAIN"], fcntl.lockf, mine, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 55)
        fcntl.lockf(mine, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, 55)
        fcntl.lockf(mine, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 20)
    join(in_process(other))
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the child's locks went with it
    fcntl.lockf(fd, fcntl.LOCK_UN, 10, 40)          # splits the lock

    def after_split():
        mine = os.open(path, os.O_RDWR)
        fcntl.lockf(mine, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 40)
        expect_errno(["EACCES", "EAGAIN"], fcntl.lockf, mine, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 39)
        expect_errno(["EACCES", "EAGAIN"], fcntl.lockf, mine, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 50)
    join(in_process(after_split))
    os.close(fd)


@check
def flock_excludes_and_a_waiter_gets_it(top):
    path = os.path.join(top, "f")
    write_file(path, b"0")
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)

    def other():
        mine = os.open(path, os.O_RDWR)
        expect_errno("EAGAIN", fcntl.flock, mine, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(mine, fcntl.LOCK_EX)  # waits for the parent
        equal(os.pread(mine, 10, 0), b"done")
    child = in_process(other)
    time.sleep(0.2)
    os.pwrite(fd, b"done", 0)
    fcntl.flock(fd, fcntl.LOCK_UN)
    join(child)
    os.close(fd)


@check
def counters_under_a_lock_are_exact(top):
    path = os.path.join(top, "f")
    write_file(path, b"0")

    def count():
        fd = os.open(path, os.O_RDWR)
        for _ in range(200):
            fcntl.lockf(fd, fcntl.LOCK_EX)
            os.pwrite(fd, str(int(os.pread(fd, 20, 0)) + 1).encode(), 0)
            fcntl.lockf(fd, fcntl.LOCK_UN)
        os.close(fd)
    join(*[in_process(count) for _ in range(4)])
    equal(read_file(path), b"800")


@check
def open_file_limits_and_many_open_files(top):
    fds = []
    for number in range(800):
        fds.append(open_new(top, f"f{number}"))
        os.write(fds[-1], str(number).encode())
    for number, fd in enumerate(fds):
        equal(os.pread(fd, 10, 0), str(number).encode())
        os.close(fd)
