#!/usr/bin/python3
"""Random work below a directory of a mount, of all kinds that leave traces on the disk.

usage: load.py DIR SEED

Goes on until the mount is gone. What is held open stays open, so that kills leave orphans.
"""

import ctypes
import errno
import os
import random
import stat
import struct
import sys

import collisions

GONE = {errno.ENOTCONN, errno.ECONNABORTED, errno.ECANCELED, errno.EIO, errno.EROFS, errno.ENODEV}
EXPECTED = {errno.ENOENT, errno.EEXIST, errno.ENODATA, errno.ENOSPC, errno.EISDIR, errno.ENOTEMPTY,
            errno.EINVAL, errno.EFBIG, errno.ENOTDIR, errno.EPERM, errno.EOPNOTSUPP, errno.ERANGE}
MOST_DIRECTORIES, MOST_FILES, MOST_OPEN = 40, 250, 20
LONGEST_PATH = 2000
PUNCH_HOLE, KEEP_SIZE, ZERO_RANGE = 2, 1, 16
ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", tag, rights, who) for tag, rights, who in (
        (1, 7, 0xFFFFFFFF), (2, 5, 1234), (4, 5, 0xFFFFFFFF), (16, 7, 0xFFFFFFFF), (32, 0, 0xFFFFFFFF)))
libc = ctypes.CDLL(None, use_errno=True)


def fallocate(descriptor, mode, offset, length):
    if libc.fallocate(descriptor, mode, ctypes.c_long(offset), ctypes.c_long(length)) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


class Load:
    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.directories, self.files, self.unlinked = [b"."], [], []
        self.colliding = collisions.names(seed + 1)
        os.mkdir(b"same")
        self.steps = [
            (self.make, 4), (self.make_directory, 1), (self.write, 5), (self.truncate, 1),
            (self.allocate, 1), (self.link, 1), (self.rename, 1), (self.remove, 1),
            (self.make_symlink, 1), (self.make_special, 1), (self.change_xattr, 3),
            (self.change_attributes, 1), (self.move_directory, 1), (self.write_unlinked, 1),
            (self.make_sparse, 0.05), (self.sync_directory, 0.2), (self.collide, 2)]

    def run(self):
        steps, weights = zip(*self.steps)
        while True:
            try:
                self.rng.choices(steps, weights)[0]()
            except OSError as error:
                if error.errno in GONE:
                    return
                if error.errno not in EXPECTED:
                    raise

    # --- choices

    def chance(self, of_one) -> bool:
        return self.rng.random() < of_one

    def name(self) -> bytes:
        kind = self.rng.random()
        if kind < 0.3:
            length = 255 if kind < 0.05 else self.rng.randint(1, 40)
            odd = [byte for byte in range(1, 256) if byte not in b"./"]
            return bytes(self.rng.choices(odd, k=length))
        return b"n%d" % self.rng.randrange(10**9)

    def new_path(self) -> bytes:
        return self.rng.choice(self.directories) + b"/" + self.name()

    def file(self) -> bytes:
        return self.rng.choice(self.files) if self.files else b"no file yet"

    def data(self, length) -> bytes:
        return bytes(length) if self.chance(0.1) else self.rng.randbytes(length)

    def length(self) -> int:
        rng = self.rng
        return rng.choice((0, 1, rng.randint(1, 2048), 2047, 2048, 2049, rng.randint(2048, 9000), 4096,
                           8192, rng.randint(1, 1 << 16), rng.randint(1, 300_000)))

    # --- files

    def make(self):
        if len(self.files) >= MOST_FILES:
            return self.remove()
        path = self.new_path()
        mode = self.rng.choice((0o644, 0o600, 0o4755, 0o1777))
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, mode)
        self.files.append(path)
        try:
            os.write(descriptor, self.data(self.length()))
            if self.chance(0.4):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def write(self):
        descriptor = os.open(self.file(), os.O_RDWR)
        try:
            size = min(os.fstat(descriptor).st_size, 1 << 22)
            for _ in range(self.rng.randint(1, 6)):
                if self.chance(0.5):
                    length = self.rng.choice((1, 100, 4096, 4096 * self.rng.randint(1, 5)))
                    os.pwrite(descriptor, self.data(length), self.rng.randint(0, max(size, 1)))
                else:
                    page = self.rng.randint(0, size // 4096 + 4)
                    os.pwrite(descriptor, self.data(4096), 4096 * page)
                if self.chance(0.3):
                    os.fsync(descriptor)
            if self.chance(0.5):
                os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def truncate(self):
        path, rng = self.file(), self.rng
        size = min(os.stat(path).st_size, 1 << 22)
        os.truncate(path, rng.choice((0, size // 2, rng.randint(0, size + 1),
                                      size + rng.randint(0, 100_000), 100, 2000, 5000)))

    def allocate(self):
        descriptor = os.open(self.file(), os.O_RDWR)
        try:
            size = min(os.fstat(descriptor).st_size, 1 << 22)
            mode = self.rng.choice((0, KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE,
                                    ZERO_RANGE, ZERO_RANGE | KEEP_SIZE))
            fallocate(descriptor, mode, self.rng.randint(0, size + 20_000),
                      self.rng.randint(1, 300_000))
            if self.chance(0.3):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_sparse(self):
        path = self.new_path()
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
        self.files.append(path)
        try:
            for offset in (0, 1 << 32, (1 << 40) + 123, 1 << 62, (1 << 63) - 5000):
                os.pwrite(descriptor, self.data(4999), offset)
        finally:
            os.close(descriptor)

    def write_unlinked(self):
        if self.unlinked:
            descriptor = self.rng.choice(self.unlinked)
            os.pwrite(descriptor, self.data(10_000), self.rng.randint(0, 100_000))
            os.fsync(descriptor)

    def sync_directory(self):
        descriptor = os.open(self.rng.choice(self.directories), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    # --- names

    def link(self):
        path = self.new_path()
        os.link(self.file(), path)
        self.files.append(path)

    def rename(self):
        if self.files:
            place = self.rng.randrange(len(self.files))
            target = self.rng.choice((self.new_path(), self.file()))
            os.rename(self.files[place], target)
            self.files[place] = target

    def remove(self):
        if self.files:
            path = self.files.pop(self.rng.randrange(len(self.files)))
            if self.chance(0.3) and len(self.unlinked) < MOST_OPEN:
                self.unlinked.append(os.open(path, os.O_RDWR))
            os.unlink(path)

    def make_directory(self):
        path = self.new_path()
        if len(self.directories) < MOST_DIRECTORIES and len(path) < LONGEST_PATH:
            os.mkdir(path, 0o755)
            self.directories.append(path)

    def move_directory(self):
        if len(self.directories) < 4:
            return
        old, new = self.rng.choice(self.directories[1:]), self.new_path()
        if (new + b"/").startswith(old + b"/") or max(map(len, self.directories)) + len(new) > LONGEST_PATH:
            return
        os.rename(old, new)
        moved = lambda path: new + path[len(old):] if (path + b"/").startswith(old + b"/") else path
        self.directories = [moved(path) for path in self.directories]
        self.files = [moved(path) for path in self.files]

    def collide(self):
        name = self.rng.choice(self.colliding[:60])
        if self.chance(0.4):
            os.unlink(b"same/" + name)
        else:
            os.close(os.open(b"same/" + name, os.O_CREAT | os.O_WRONLY, 0o640))

    def make_symlink(self):
        length = self.rng.choice((1, 20, 255, 2048, 2049, 4095, self.rng.randint(1, 4095)))
        os.symlink(self.data(length).replace(b"\0", b"z"), self.new_path())

    def make_special(self):
        path, kind = self.new_path(), self.rng.choice((stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK))
        device = os.makedev(self.rng.randrange(1 << 12), self.rng.randrange(1 << 20))
        os.mknod(path, kind | 0o620, device if kind in (stat.S_IFCHR, stat.S_IFBLK) else 0)

    # --- attributes

    def change_xattr(self):
        path = self.rng.choice((self.file(), self.rng.choice(self.directories)))
        name = self.rng.choice((b"user.a", b"user." + b"x" * self.rng.randint(1, 250), b"security.s",
                                b"trusted.t%d" % self.rng.randrange(5), b"user.\xc3\xa9"))
        kind = self.rng.random()
        if kind < 0.1:
            os.setxattr(path, b"system.posix_acl_access", ACL)
        elif kind < 0.2:
            os.setxattr(self.rng.choice(self.directories), b"system.posix_acl_default", ACL)
        elif kind < 0.4:
            os.removexattr(path, name)
        else:
            os.setxattr(path, name, self.data(self.rng.choice((0, 1, 10, 100, 1000, 4000, 4096))))

    def change_attributes(self):
        path, rng = self.file(), self.rng
        kind = rng.randrange(3)
        if kind == 0:
            os.chown(path, rng.choice((0, 1000, 0xFFFFFFFE)), rng.choice((0, 100, 77_777)))
        elif kind == 1:
            os.chmod(path, rng.randrange(0o10000))
        else:
            os.utime(path, ns=(rng.randint(-(1 << 62), 1 << 62), rng.randint(-(1 << 62), 1 << 62)))


def main():
    os.makedirs(sys.argv[1], exist_ok=True)
    os.chdir(sys.argv[1])
    Load(int(sys.argv[2])).run()


if __name__ == "__main__":
    main()
