"""What a mounted volume shows, in the form of items.py: facts by path."""

import concurrent.futures
import hashlib
import os
import stat

from items import digest_of_pages
from volume import BLOCK

READ_WHOLE_BYTES = 1 << 28  # of larger files only what SEEK_DATA finds
CHUNK_BYTES = 1 << 20
READERS = 8


def walk(top) -> dict:
    """Several files at a time, for the disk's sake."""
    with concurrent.futures.ThreadPoolExecutor(READERS) as readers:
        facts = {path: described.result() for path, described in submit_all(top, readers).items()}
    return facts


def submit_all(top, readers) -> dict:
    facts, known = {"/": readers.submit(describe, os.fsencode(top))}, {}
    waiting = [(os.fsencode(top), b"/")]
    while waiting:
        directory, prefix = waiting.pop()
        with os.scandir(directory) as entries:
            for entry in entries:
                number = entry.inode()
                if number not in known:
                    known[number] = readers.submit(describe, entry.path)
                path = prefix + entry.name
                facts[path.decode("latin-1")] = known[number]
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, path + b"/"))
    return facts


def describe(path) -> dict:
    found = os.lstat(path)
    facts = {"ino": found.st_ino, "mode": found.st_mode, "nlink": found.st_nlink,
             "uid": found.st_uid, "gid": found.st_gid, "size": found.st_size,
             "blocks": found.st_blocks * 512 // BLOCK, "atime_ns": found.st_atime_ns,
             "mtime_ns": found.st_mtime_ns, "ctime_ns": found.st_ctime_ns,
             "rdev": (os.major(found.st_rdev), os.minor(found.st_rdev)), "xattrs": xattrs(path)}
    if stat.S_ISLNK(found.st_mode):
        facts["target"] = os.readlink(path).decode("latin-1")
    if stat.S_ISREG(found.st_mode):
        try:
            facts["content"] = digest_of_pages(pages(path, found.st_size))
        except OSError as error:
            facts["content"] = os.strerror(error.errno) if error.errno != 5 else "EIO"
    return facts


def xattrs(path) -> dict:
    values = {}
    for name in os.listxattr(path, follow_symlinks=False):
        value = os.getxattr(path, name, follow_symlinks=False)
        values[os.fsencode(name).decode("latin-1")] = hashlib.sha256(value).hexdigest()
    return values


def pages(path, size):
    """Number and content of the pages of a file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOATIME)
    try:
        for start, end in ranges(descriptor, size):
            # A read that meets a bad page ends before it, and the next one reports it.
            while start < end:
                chunk = os.pread(descriptor, min(CHUNK_BYTES, end - start), start)
                if not chunk:
                    break
                for at in range(0, len(chunk), BLOCK):
                    yield (start + at) // BLOCK, chunk[at:at + BLOCK].ljust(BLOCK, b"\0")
                start += len(chunk)
    finally:
        os.close(descriptor)


def ranges(descriptor, size):
    if size <= READ_WHOLE_BYTES:
        yield 0, size
        return
    end = 0
    while end < size:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError:  # nothing but a hole
            return
        end = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start - start % BLOCK, end
