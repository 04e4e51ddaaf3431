#!/usr/bin/env python3
"""A host file system that fails on request: it serves one file, `volume`, through /dev/fuse.

usage: faulty_host.py serve BACKING DIR SOCKET     serve BACKING as DIR/volume until killed
       faulty_host.py tell SOCKET COMMAND...       with these commands:
           fault none|write|read|sync|all    EIO from now on for these requests
           fault full                        ENOSPC for every write
           cut SEED PERCENT                  a power cut: of what was written but not synced, only
                                             these percent of the 512-byte sectors survive

Writes stay in memory until an fsync, as in the volatile cache of a disk. A failed fsync drops
them, as the page cache of Linux does. It speaks the kernel's protocol itself, so that no library
is needed; it knows only what an image file needs.
"""

import ctypes
import errno
import os
import random
import socket
import struct
import sys
import threading
import time

BLOCK_BYTES, SECTOR_BYTES = 4096, 512
ROOT, VOLUME = 1, 2
(LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE, STATFS, RELEASE, FSYNC, FLUSH, INIT, OPENDIR,
 READDIR, RELEASEDIR, ACCESS, INTERRUPT, DESTROY, BATCH_FORGET, FALLOCATE) = (
    1, 2, 3, 4, 14, 15, 16, 17, 18, 20, 25, 26, 27, 28, 29, 34, 36, 38, 42, 43)
NO_REPLY = (FORGET, BATCH_FORGET, INTERRUPT)
MAX_WRITE_BYTES = 1 << 20
IN_HEADER = struct.Struct("<IIQQIIIHH")
FAULTS = {"none": {}, "write": {WRITE: errno.EIO}, "read": {READ: errno.EIO},
          "sync": {FSYNC: errno.EIO}, "full": {WRITE: errno.ENOSPC, FALLOCATE: errno.ENOSPC},
          "all": {WRITE: errno.EIO, READ: errno.EIO, FSYNC: errno.EIO, FALLOCATE: errno.EIO}}


class Disk:
    """The backing file with a volatile cache of blocks in front of it."""

    def __init__(self, path):
        self.fd = os.open(path, os.O_RDWR)
        self.cache = {}
        self.lock = threading.Lock()

    def size(self):
        return os.fstat(self.fd).st_size

    def block(self, number):
        if number in self.cache:
            return self.cache[number]
        return os.pread(self.fd, BLOCK_BYTES, number * BLOCK_BYTES).ljust(BLOCK_BYTES, b"\0")

    def read(self, offset, size):
        with self.lock:
            end = min(offset + size, self.size())
            if end <= offset:
                return b""
            first, last = offset // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
            data = bytearray(os.pread(self.fd, (last - first + 1) * BLOCK_BYTES, first * BLOCK_BYTES))
            data.extend(bytes((last - first + 1) * BLOCK_BYTES - len(data)))
            for number in range(first, last + 1):
                if number in self.cache:
                    at = (number - first) * BLOCK_BYTES
                    data[at:at + BLOCK_BYTES] = self.cache[number]
            return bytes(data[offset - first * BLOCK_BYTES:end - first * BLOCK_BYTES])

    def write(self, offset, data):
        with self.lock:
            if offset + len(data) > self.size():
                os.ftruncate(self.fd, offset + len(data))
            at = 0
            while at < len(data):
                number, start = divmod(offset + at, BLOCK_BYTES)
                piece = data[at:at + BLOCK_BYTES - start]
                if len(piece) < BLOCK_BYTES:
                    old = self.block(number)
                    piece = old[:start] + piece + old[start + len(piece):]
                self.cache[number] = bytes(piece)
                at += BLOCK_BYTES - start

    def sync(self):
        with self.lock:
            size = self.size()
            for number, data in self.cache.items():
                os.pwrite(self.fd, data[:max(0, size - number * BLOCK_BYTES)], number * BLOCK_BYTES)
            self.cache.clear()

    def drop(self):
        with self.lock:
            self.cache.clear()

    def cut(self, seed, percent):
        rng, kept, lost = random.Random(seed), 0, 0
        with self.lock:
            for number, data in sorted(self.cache.items()):
                for start in range(0, BLOCK_BYTES, SECTOR_BYTES):
                    if rng.randrange(100) < percent:
                        os.pwrite(self.fd, data[start:start + SECTOR_BYTES],
                                  number * BLOCK_BYTES + start)
                        kept += 1
                    else:
                        lost += 1
            self.cache.clear()
        return f"{kept} sectors kept, {lost} lost"

    def truncate(self, size):
        with self.lock:
            os.ftruncate(self.fd, size)
            self.cache = {n: d for n, d in self.cache.items() if n * BLOCK_BYTES < size}

    def allocate(self, mode, offset, length):
        self.sync()
        if ctypes.CDLL(None).fallocate(self.fd, mode, ctypes.c_int64(offset),
                                       ctypes.c_int64(length)) != 0:
            raise OSError(errno.EOPNOTSUPP, "fallocate")


class Server:
    def __init__(self, backing):
        self.disk = Disk(backing)
        self.fault = {}

    def attributes(self, node):
        now = int(time.time())
        if node == ROOT:
            return struct.pack("<QQQQQQ10I", ROOT, 0, 0, now, now, now, 0, 0, 0, 0o40755, 2, 0, 0, 0,
                               BLOCK_BYTES, 0)
        size = self.disk.size()
        return struct.pack("<QQQQQQ10I", VOLUME, size, os.fstat(self.disk.fd).st_blocks, now, now,
                           now, 0, 0, 0, 0o100600, 1, 0, 0, 0, BLOCK_BYTES, 0)

    def answer(self, opcode, node, body):
        """The reply's payload, or an OSError."""
        if opcode in self.fault:
            if opcode == FSYNC:
                self.disk.drop()
            raise OSError(self.fault[opcode], "fault")
        if opcode == INIT:
            _, minor, read_ahead, flags = struct.unpack_from("<IIII", body)
            flags &= 1 << 0 | 1 << 5 | 1 << 15 | 1 << 22  # async read, big writes, async DIO, max_pages
            return struct.pack("<IIIIHHIIHHII6I", 7, min(minor, 31), read_ahead, flags, 64, 48,
                               MAX_WRITE_BYTES, 1, MAX_WRITE_BYTES // 4096, 0, 0, 0, *([0] * 6))
        if opcode == LOOKUP:
            if node != ROOT or body.rstrip(b"\0") != b"volume":
                raise OSError(errno.ENOENT, "lookup")
            return struct.pack("<QQQQII", VOLUME, 0, 0, 0, 0, 0) + self.attributes(VOLUME)
        if opcode == SETATTR:
            valid, _, _, size = struct.unpack_from("<IIQQ", body)
            if valid & 1 << 3:
                self.disk.truncate(size)
        if opcode in (GETATTR, SETATTR):
            return struct.pack("<QII", 0, 0, 0) + self.attributes(node)
        if opcode in (OPEN, OPENDIR):
            return struct.pack("<QII", 0, 1 if opcode == OPEN else 0, 0)  # FOPEN_DIRECT_IO
        if opcode == READ:
            _, offset, size = struct.unpack_from("<QQI", body)
            return self.disk.read(offset, size)
        if opcode == WRITE:
            _, offset, size = struct.unpack_from("<QQI", body)
            self.disk.write(offset, body[40:40 + size])
            return struct.pack("<II", size, 0)
        if opcode == FSYNC:
            self.disk.sync()
            return b""
        if opcode == FALLOCATE:
            _, offset, length, mode = struct.unpack_from("<QQQI", body)
            self.disk.allocate(mode, offset, length)
            return b""
        if opcode == STATFS:
            return struct.pack("<5Q4I6I", 10**6, 10**6, 10**6, 100, 100, 4096, 255, 4096, 0, *([0] * 6))
        if opcode == READDIR:
            return b""
        if opcode in (FLUSH, RELEASE, RELEASEDIR, ACCESS, DESTROY):
            return b""
        raise OSError(errno.ENOSYS, "not needed for an image file")

    def loop(self, device):
        while True:
            try:
                request = os.read(device, MAX_WRITE_BYTES + 8192)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    continue
                return  # unmounted
            _, opcode, unique, node, *_ = IN_HEADER.unpack_from(request)
            code, payload = 0, b""
            try:
                payload = self.answer(opcode, node, request[IN_HEADER.size:])
            except OSError as error:
                code = error.errno
            if opcode not in NO_REPLY:
                reply = struct.pack("<IiQ", 16 + len(payload), -code, unique) + payload
                try:
                    os.write(device, reply)
                except OSError:
                    pass  # the request was interrupted

    def obey(self, words):
        if words[0] == "fault":
            self.fault = FAULTS[words[1]]
            return "ok"
        if words[0] == "cut":
            return self.disk.cut(words[1], int(words[2]))
        raise ValueError(f"unknown command {words}")


def serve(backing, directory, control):
    device = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,max_read={MAX_WRITE_BYTES}"
    if libc.mount(b"faulty", os.fsencode(directory), b"fuse.faulty", 0, options.encode()) != 0:
        code = ctypes.get_errno()
        sys.exit(f"faulty_host: mount: {os.strerror(code)}")
    server = Server(backing)
    for _ in range(3):
        threading.Thread(target=server.loop, args=(device,), daemon=True).start()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(control)
    listener.listen()
    while True:
        connection, _ = listener.accept()
        with connection:
            try:
                answer = server.obey(connection.recv(1000).decode().split())
            except (ValueError, KeyError, IndexError) as error:
                answer = f"error {error!r}"
            connection.sendall(answer.encode())


def tell(control, *words):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(control)
        connection.sendall(" ".join(words).encode())
        answer = connection.recv(1000).decode()
    if answer.startswith("error"):
        raise ValueError(answer)
    return answer


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    elif len(sys.argv) >= 4 and sys.argv[1] == "tell":
        print(tell(*sys.argv[2:]))
    else:
        sys.exit(__doc__)
