"""What the checks of posix_checks.py share: a registry, system calls that Python lacks, and
helpers that run code as another user or in other processes."""

import ctypes
import errno
import mmap
import os
import sys
import traceback

LIBC = ctypes.CDLL(None, use_errno=True)
AT_FDCWD = -100
RENAME_NOREPLACE, RENAME_EXCHANGE, RENAME_WHITEOUT = 1, 2, 4
KEEP_SIZE, PUNCH_HOLE, COLLAPSE_RANGE, ZERO_RANGE, INSERT_RANGE = 1, 2, 8, 16, 32
O_TMPFILE = 0o20200000
BLOCK_BYTES = 4096
ANOTHER_USER = 54321
ANOTHER_GROUP = 54321

CHECKS = []


def check(function):
    """Registers a check; it gets an empty directory of its own as its argument."""
    CHECKS.append(function)
    return function


class Skip(Exception):
    """The kernel interface under test cannot reach this file system."""


def call(name, *arguments):
    function = getattr(LIBC, name)
    function.restype = ctypes.c_int
    result = function(*arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)
    return result


def renameat2(source, target, flags):
    call("renameat2", AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target),
         ctypes.c_uint(flags))


def fallocate(fd, mode, offset, length):
    call("fallocate", fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length))


def expect_errno(codes, function, *arguments, **named):
    """`function` must fail with one of `codes` (an errno name, or several)."""
    wanted = {getattr(errno, name) for name in ([codes] if isinstance(codes, str) else codes)}
    try:
        function(*arguments, **named)
    except OSError as error:
        assert error.errno in wanted, f"expected {codes}, got {error}"
        return
    raise AssertionError(f"expected {codes}, but {function.__name__}{arguments} succeeded")


def equal(found, expected, what=""):
    assert found == expected, f"{what}: expected {expected!r}, found {found!r}"


def write_file(path, data=b"", mode=0o644):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view):]
    finally:
        os.close(fd)


def read_file(path):
    with open(path, "rb") as file:
        return file.read()


def in_process(function, *arguments):
    """Starts `function` in a child process and returns its id; join() it."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        function(*arguments)
        code = 0
    except BaseException:  # noqa: B902 - everything a child does must end in os._exit
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def join(*children):
    for child in children:
        _, status = os.waitpid(child, 0)
        assert status == 0, f"a child process failed with status {status}"


def as_user(function, *arguments, groups=()):
    """Runs `function` as an ordinary user and waits for it."""
    def change_and_run():
        os.setgroups(list(groups))
        os.setresgid(ANOTHER_GROUP, ANOTHER_GROUP, ANOTHER_GROUP)
        os.setresuid(ANOTHER_USER, ANOTHER_USER, ANOTHER_USER)
        os.umask(0o022)
        function(*arguments)
    join(in_process(change_and_run))


def aligned_buffer(size):
    """Memory for O_DIRECT."""
    return mmap.mmap(-1, size)


def pattern(seed, size):
    """`size` bytes that differ from block to block and from seed to seed."""
    unit = b"".join(((seed * 7919 + n) % 2**32).to_bytes(4, "little") for n in range(256))
    return (unit * (size // len(unit) + 1))[:size]
