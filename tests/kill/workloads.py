#!/usr/bin/env python3
"""Writers whose acknowledged operations can be checked after a crash.

usage: workloads.py run ROOT HISTORY_DIR --seed N --seconds S
       workloads.py check ROOT HISTORY_DIR --seed N [--clean]

Each workload is a process that carries out an endless plan of operations in a directory of
its own. The plan is a pure function of the seed, so the checker can follow it without any
data from the crashed file system. The process logs to a file *outside* the file system under
test: `s K` before operation K is submitted, `a K` after a sync has returned that covers all
operations up to K. After a crash, operations up to the last `a` must be there; those after it
may be there, in part or not at all, but nothing else may be: no other bytes, no other names.

Data after the last acknowledgement is judged in units of 512 bytes: each holds what it held
at some moment between the acknowledgement and the crash, or zeros where the file grew.
Names, modes and extended attributes follow one ordered log: a directory is in the state
after one and the same operation, not older than the acknowledged one.
"""

import argparse
import ctypes
import mmap
import multiprocessing
import os
import random
import shutil
import signal
import stat
import struct
import sys
import time
import traceback
import zlib

LIBC = ctypes.CDLL(None, use_errno=True)
SECTOR_BYTES = 512
KEEP_SIZE_PUNCH = 3
SYNC_KINDS = ("fsync", "fdatasync")


class Damage(Exception):
    """Something that was acknowledged is missing, or something is there that nobody wrote."""


def content(*key, size):
    """`size` bytes that only the writer with this key can have written; none of them is 0."""
    data = random.Random("/".join(map(str, key))).randbytes(size)
    return data.replace(b"\0", b"\x01")


def sync_fd(fd, kind):
    if kind == "fsync":
        os.fsync(fd)
    elif kind == "fdatasync":
        os.fdatasync(fd)


def sync_dir(path):
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd, data, offset):
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def read_all(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Damage(f"{path}: cannot be read: {error}") from error


class Workload:
    """A plan, its execution, and the check of what is left of it."""

    def __init__(self, root, seed):
        self.root, self.seed = root, seed
        self.setup = random.Random(f"{seed}/setup")

    def path(self, *names):
        return os.path.join(self.root, *names)

    def plan(self):
        """Endless operations; each is a tuple whose last item is True if it is a sync."""
        raise NotImplementedError

    def apply(self, operation):
        raise NotImplementedError

    def check(self, acked, submitted):
        """Raises Damage. Operations 0..acked must be there, those up to `submitted` may be."""
        raise NotImplementedError

    def planned(self, last):
        for number, operation in zip(range(last + 1), self.plan()):
            yield number, operation


class AppendLog(Workload):
    """Appends records to a series of files, with fsync, fdatasync or O_DSYNC."""

    FILE_BYTES = 1 << 20

    def __init__(self, root, seed):
        super().__init__(root, seed)
        self.mode = self.setup.choice(("fsync", "fdatasync", "dsync"))
        self.largest = self.setup.choice((200, 5000, 60000))
        self.fd = None

    def plan(self):
        rng, file, end = random.Random(f"{self.seed}/plan"), 0, 0
        yield ("create", file, 0, 0, True)
        while True:
            size = rng.randrange(1, self.largest)
            yield ("append", file, end, size, self.mode == "dsync")
            end += size
            if self.mode != "dsync" and rng.random() < 0.4:
                yield ("sync", file, end, 0, True)
            if end > self.FILE_BYTES:
                file, end = file + 1, 0
                yield ("create", file, 0, 0, True)

    def record(self, file, offset, size):
        return content(self.seed, "log", file, offset, size=size)

    def apply(self, operation):
        kind, file, offset, size, _ = operation
        if kind == "create":
            if self.fd is not None:
                os.fsync(self.fd)
                os.close(self.fd)
            flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
            flags |= os.O_DSYNC if self.mode == "dsync" else 0
            self.fd = os.open(self.path(f"log{file}"), flags, 0o644)
            sync_dir(self.root)
        elif kind == "append":
            view = memoryview(self.record(file, offset, size))
            while view:
                view = view[os.write(self.fd, view):]
        else:
            sync_fd(self.fd, self.mode)

    def check(self, acked, submitted):
        durable, written = {}, {}
        for number, (kind, file, offset, size, _) in self.planned(submitted):
            if kind == "append":
                data = self.record(file, offset, size)
                written[file] = written.get(file, b"") + data
            elif kind == "create":
                written[file] = b""
            if number <= acked:
                durable = {name: len(data) for name, data in written.items()}
        for file, data in written.items():
            check_growing(self.path(f"log{file}"), data, durable.get(file))
        check_names(self.root, {f"log{file}" for file in written})


def check_growing(path, written, durable):
    """The file starts with the durable bytes; after them it has written bytes or zeros."""
    found = read_all(path)
    if found is None:
        if durable is not None:
            raise Damage(f"{path}: missing, {durable} bytes were acknowledged")
        return
    durable = durable or 0
    if not durable <= len(found) <= len(written):
        raise Damage(f"{path}: {len(found)} bytes, {durable} acknowledged, {len(written)} written")
    if found[:durable] != written[:durable]:
        at = next(i for i in range(durable) if found[i] != written[i])
        raise Damage(f"{path}: acknowledged byte {at} of {durable} is wrong")
    for start in range(durable, len(found), SECTOR_BYTES):
        end = min(start + SECTOR_BYTES, len(found))
        if found[start:end] != written[start:end]:
            for at in range(start, end):
                if found[at] not in (0, written[at]):
                    raise Damage(f"{path}: byte {at} was never written there")


def check_names(directory, allowed):
    strangers = set(os.listdir(directory)) - allowed
    if strangers:
        raise Damage(f"{directory}: files that nobody made: {sorted(strangers)[:5]}")


class Slots(Workload):
    """Overwrites slots of a file in place: buffered, O_DIRECT, O_DSYNC or through a mapping."""

    HEADER = struct.Struct("<4sIIII")

    def __init__(self, root, seed):
        super().__init__(root, seed)
        self.via = self.setup.choice(("buffered", "direct", "dsync", "mmap"))
        sizes = (4096, 16384, 65536) if self.via == "direct" else (512, 1536, 4096, 16384, 65536)
        self.slot_bytes = self.setup.choice(sizes)
        self.slots = max(8, min(256, (2 << 20) // self.slot_bytes))
        self.prealloc = self.setup.random() < 0.5
        self.fd = self.mapped = None

    def plan(self):
        rng, versions = random.Random(f"{self.seed}/plan"), [0] * self.slots
        yield ("create", 0, 0, True)
        while True:
            slot = rng.randrange(self.slots)
            versions[slot] += 1
            yield ("write", slot, versions[slot], self.via == "dsync")
            if self.via != "dsync" and rng.random() < 0.25:
                yield ("sync", rng.randrange(2), 0, True)

    def sector(self, slot, version, index):
        body = content(self.seed, "slot", slot, version, index, size=SECTOR_BYTES - 24)
        head = self.HEADER.pack(b"slot", slot, version, index, zlib.crc32(str(self.seed).encode()))
        return head + struct.pack("<I", zlib.crc32(head + body)) + body

    def slot_content(self, slot, version):
        return b"".join(self.sector(slot, version, index)
                        for index in range(self.slot_bytes // SECTOR_BYTES))

    def apply(self, operation):
        kind, slot, version, _ = operation
        if kind == "create":
            flags = {"direct": os.O_DIRECT, "dsync": os.O_DSYNC}.get(self.via, 0)
            self.fd = os.open(self.path("slots"), os.O_CREAT | os.O_RDWR | flags, 0o644)
            os.ftruncate(self.fd, self.slots * self.slot_bytes)
            if self.prealloc:
                os.posix_fallocate(self.fd, 0, self.slots * self.slot_bytes)
            os.fsync(self.fd)
            sync_dir(self.root)
            if self.via == "mmap":
                self.mapped = mmap.mmap(self.fd, self.slots * self.slot_bytes)
            self.buffer = mmap.mmap(-1, self.slot_bytes)
        elif kind == "write":
            data, offset = self.slot_content(slot, version), slot * self.slot_bytes
            if self.via == "mmap":
                self.mapped[offset:offset + self.slot_bytes] = data
            elif self.via == "direct":
                self.buffer[:] = data
                if os.pwritev(self.fd, [self.buffer], offset) != self.slot_bytes:
                    raise OSError(0, "short direct write")
            else:
                write_all(self.fd, data, offset)
        elif self.via == "mmap":
            self.mapped.flush()
        else:
            sync_fd(self.fd, SYNC_KINDS[slot])

    def check(self, acked, submitted):
        floor, ceiling = [0] * self.slots, [0] * self.slots
        for number, (kind, slot, version, _) in self.planned(submitted):
            if kind == "write":
                ceiling[slot] = version
            if number == acked:
                floor = list(ceiling)
        path = self.path("slots")
        found = read_all(path)
        if found is None or len(found) != self.slots * self.slot_bytes:
            if acked >= 0 or (found is not None and len(found) > self.slots * self.slot_bytes):
                raise Damage(f"{path}: {'missing' if found is None else len(found)} bytes, "
                             f"{self.slots * self.slot_bytes} acknowledged")
            return
        for slot in range(self.slots):
            for index in range(self.slot_bytes // SECTOR_BYTES):
                start = slot * self.slot_bytes + index * SECTOR_BYTES
                self.check_sector(found[start:start + SECTOR_BYTES], slot, index,
                                  floor[slot], ceiling[slot])

    def check_sector(self, found, slot, index, floor, ceiling):
        where = f"{self.path('slots')}: slot {slot} sector {index}"
        if not any(found):
            if floor > 0:
                raise Damage(f"{where}: zeros, version {floor} was acknowledged")
            return
        version = self.HEADER.unpack_from(found)[2]
        if not max(floor, 1) <= version <= ceiling:
            raise Damage(f"{where}: version {version}, {floor} acknowledged, {ceiling} written")
        if found != self.sector(slot, version, index):
            raise Damage(f"{where}: damaged content of version {version}")


class Replace(Workload):
    """Replaces files by write to a new file, fsync, rename, fsync of the directory."""

    NAMES = 12

    def __init__(self, root, seed):
        super().__init__(root, seed)
        self.largest = self.setup.choice((100, 4096, 20000, 200000))

    def plan(self):
        rng, version = random.Random(f"{self.seed}/plan"), 0
        while True:
            version += 1
            yield ("replace", rng.randrange(self.NAMES), version, rng.random() < 0.7)

    def version(self, name, version):
        size = random.Random(f"{self.seed}/size/{version}").randrange(self.largest)
        return struct.pack("<II", name, version) + content(self.seed, name, version, size=size)

    def apply(self, operation):
        _, name, version, is_sync = operation
        path = self.path(f"file{name}")
        fd = os.open(path + ".new", os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
        write_all(fd, self.version(name, version), 0)
        sync_fd(fd, SYNC_KINDS[version % 2])
        os.close(fd)
        os.rename(path + ".new", path)
        if is_sync:
            sync_dir(self.root)

    def check(self, acked, submitted):
        possible = {name: [0] for name in range(self.NAMES)}
        for number, (_, name, version, _) in self.planned(submitted):
            if number <= acked:
                possible[name] = [version]
            else:
                possible[name].append(version)
        for name, versions in possible.items():
            path = self.path(f"file{name}")
            found = read_all(path)
            if found is None:
                if versions[0] > 0:
                    raise Damage(f"{path}: missing, version {versions[0]} was acknowledged")
                continue
            version = struct.unpack_from("<II", found)[1] if len(found) >= 8 else 0
            if version == 0 or version not in versions:
                raise Damage(f"{path}: version {version}, one of {versions} was expected")
            if found != self.version(name, version):
                raise Damage(f"{path}: version {version} is not whole")
        check_names(self.root, {f"file{n}{end}" for n in possible for end in ("", ".new")})


class DataOps(Workload):
    """Unaligned writes, truncates, preallocation and holes in one file."""

    LARGEST = 300000

    def plan(self):
        rng = random.Random(f"{self.seed}/plan")
        yield ("create", 0, 0, True)
        since_sync = 0
        while True:
            kind = rng.choice(("write",) * 6 + ("truncate", "punch", "allocate"))
            offset, size = rng.randrange(self.LARGEST), rng.choice((1, 100, 4096, 10000, 70000))
            yield (kind, offset, size, False)
            since_sync += 1
            if since_sync >= 10 or rng.random() < 0.3:
                yield ("sync", rng.randrange(2), 0, True)
                since_sync = 0

    def data(self, offset, size):
        return content(self.seed, "data", offset, size, size=size)

    def apply(self, operation):
        kind, offset, size, _ = operation
        if kind == "create":
            self.fd = os.open(self.path("data"), os.O_CREAT | os.O_RDWR, 0o644)
            os.fsync(self.fd)
            sync_dir(self.root)
        elif kind == "write":
            write_all(self.fd, self.data(offset, size), offset)
        elif kind == "truncate":
            os.ftruncate(self.fd, offset)
        elif kind == "punch":
            punch(self.fd, offset, size)
        elif kind == "allocate":
            os.posix_fallocate(self.fd, offset, size)
        else:
            sync_fd(self.fd, SYNC_KINDS[offset])

    def follow(self, state, operation):
        """The content after `operation` on `state`."""
        kind, offset, size, _ = operation
        if kind == "write":
            state = state.ljust(offset, b"\0")
            return state[:offset] + self.data(offset, size) + state[offset + size:]
        if kind == "truncate":
            return state[:offset].ljust(offset, b"\0")
        if kind == "punch":
            size = max(0, min(offset + size, len(state)) - offset)
            return state[:offset] + bytes(size) + state[offset + size:]
        if kind == "allocate":
            return state.ljust(offset + size, b"\0")
        return state

    def check(self, acked, submitted):
        state, states = b"", []
        for number, operation in self.planned(submitted):
            state = self.follow(state, operation)
            states = [state] if number <= acked else states + [state]
        path = self.path("data")
        found = read_all(path)
        if found is None:
            if acked >= 0:
                raise Damage(f"{path}: missing")
            return
        if acked < 0:
            states = [b""] + states
        sizes = [len(state) for state in states]
        # A write that was under way may have extended the file by a part of its bytes.
        if not min(sizes) <= len(found) <= max(sizes):
            raise Damage(f"{path}: {len(found)} bytes, expected one of {sorted(set(sizes))}")
        if len(states) == 1:
            if found != states[0]:
                raise Damage(f"{path}: differs from the acknowledged content")
            return
        grew = max(sizes) > sizes[0] or min(sizes) < sizes[0]
        for start in range(0, len(found), SECTOR_BYTES):
            unit = found[start:start + SECTOR_BYTES]
            if any(fits(unit, state[start:start + SECTOR_BYTES]) for state in states):
                continue
            candidates = [state[start:start + SECTOR_BYTES] for state in states]
            if grew and not any(unit):
                continue
            if all(any(at < len(c) and unit[at] == c[at] for c in candidates) or
                   (grew and unit[at] == 0) for at in range(len(unit))):
                continue
            raise Damage(f"{path}: bytes {start}.. of {len(found)} hold what was never there "
                         f"since the last acknowledged sync")


def fits(unit, candidate):
    return unit == candidate[:len(unit)].ljust(len(unit), b"\0")


def punch(fd, offset, size):
    if LIBC.fallocate(fd, KEEP_SIZE_PUNCH, ctypes.c_int64(offset), ctypes.c_int64(size)) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "fallocate")


class Namespace(Workload):
    """Creates, links, renames, removes, chmods and sets attributes; syncs directories.

    The model maps each path to what it names; a file is a number, so that hard links show.
    """

    DIRS = ("", "a", "b", "a/sub")

    def __init__(self, root, seed):
        super().__init__(root, seed)
        self.small = self.setup.random() < 0.5

    def plan(self):
        """The random choices depend on the model only, never on the real file system."""
        rng = random.Random(f"{self.seed}/plan")
        yield ("start", "", "", 0, True)
        model, number, dirs, files = self.begin(), 0, set(), set()
        while True:
            number += 1
            operation = self.choose(rng, model, number)
            if operation is None:
                continue
            if operation[0] == "sync":
                # What is acknowledged is what was synced by its own descriptor, all of it.
                names = {what: name for name, what in sorted(model["names"].items())}
                changed = sorted(names[file] for file in files if file in names)
                yield ("sync", tuple(sorted(dirs & ({""} | model["names"].keys()))),
                       tuple(changed), 0, True)
                dirs, files = set(), set()
                continue
            yield operation
            kind, path, target, _, _ = operation
            if kind in ("chmod", "xattr"):
                files.add(model["names"][path])
            elif kind != "sync one":
                dirs.add(os.path.dirname(path))
                if target:
                    dirs.add(os.path.dirname(target))
            model = self.follow(model, operation)

    def begin(self):
        return {"names": {d: "dir" for d in self.DIRS if d}, "files": {}}

    def choose(self, rng, model, number):
        directory = rng.choice(self.DIRS)
        fresh = os.path.join(directory, f"n{number}")
        names = model["names"]
        files = sorted(n for n, what in names.items() if isinstance(what, int))
        kind = rng.choices(("create", "sync", "sync one", "rename", "replace", "unlink", "link",
                            "symlink", "chmod", "xattr", "mkdir", "rmdir"),
                           (12, 10, 4, 6, 3, 5, 4, 2, 4, 4, 2, 1))[0]
        if kind == "sync" or kind == "sync one":
            return (kind, directory, "", 0, False)
        if kind in ("create", "symlink", "mkdir"):
            if kind == "create" and len(files) > 60:
                return ("unlink", rng.choice(files), "", 0, False)
            return (kind, fresh, "", number, False)
        if kind == "rmdir":
            empty = sorted(n for n, what in names.items() if what == "dir" and n not in self.DIRS)
            return ("rmdir", rng.choice(empty), "", 0, False) if empty else None
        if not files:
            return None
        source = rng.choice(files)
        if kind == "replace":
            target = rng.choice(files)
            return None if names[source] == names[target] else ("rename", source, target, 0, False)
        if kind in ("rename", "link"):
            return (kind, source, fresh, 0, False)
        return (kind, source, "", number, False)

    def follow(self, model, operation):
        kind, path, target, number, _ = operation
        names, files = dict(model["names"]), dict(model["files"])
        if kind == "create":
            names[path], files[number] = number, (0o644, None)
        elif kind == "symlink":
            names[path] = f"-> target{number}"
        elif kind == "mkdir":
            names[path] = "dir"
        elif kind in ("rmdir", "unlink"):
            del names[path]
        elif kind == "rename":
            names[target] = names.pop(path)
        elif kind == "link":
            names[target] = names[path]
        elif kind == "chmod":
            files[names[path]] = (0o600 + number % 64, files[names[path]][1])
        elif kind == "xattr":
            files[names[path]] = (files[names[path]][0], number)
        return {"names": names, "files": files}

    def body(self, number):
        return content(self.seed, "file", number, size=number * 37 % (300 if self.small else 9000))

    def apply(self, operation):
        kind, path, target, number, _ = operation
        if kind == "sync":
            for name in path:
                sync_dir(self.path(name))
            for name in target:
                fd = os.open(self.path(name), os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)
            return
        path, target = self.path(path), self.path(target)
        if kind == "start":
            for directory in self.DIRS:
                os.makedirs(self.path(directory), exist_ok=True)
            for directory in self.DIRS:
                sync_dir(self.path(directory))
        elif kind == "create":
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            write_all(fd, self.body(number), 0)
            os.fsync(fd)
            os.close(fd)
        elif kind == "sync one":
            sync_dir(path)
        elif kind == "symlink":
            os.symlink(f"target{number}", path)
        elif kind == "mkdir":
            os.mkdir(path)
        elif kind == "chmod":
            os.chmod(path, 0o600 + number % 64)
        elif kind == "xattr":
            os.setxattr(path, "user.number", str(number).encode())
        elif kind in ("rename", "link"):
            getattr(os, kind)(path, target)
        else:
            getattr(os, kind)(path)

    def observe(self):
        """The real tree in the form of the model; a file's number comes from its inode's name."""
        names, inodes = {}, {}
        for directory, subdirs, others in os.walk(self.root):
            for name in subdirs + others:
                path = os.path.join(directory, name)
                info = os.lstat(path)
                relative = os.path.relpath(path, self.root)
                if stat.S_ISDIR(info.st_mode):
                    names[relative] = "dir"
                elif stat.S_ISLNK(info.st_mode):
                    names[relative] = "-> " + os.readlink(path)
                else:
                    names[relative] = ("inode", info.st_ino)
                    inodes.setdefault(info.st_ino, []).append((path, info))
        for entries in inodes.values():
            if entries[0][1].st_nlink != len(entries):
                raise Damage(f"{entries[0][0]}: link count {entries[0][1].st_nlink}, "
                             f"but it has {len(entries)} names")
        return names, inodes

    def check(self, acked, submitted):
        model, candidates = {"names": {}, "files": {}}, []
        unfinished = None
        for number, operation in self.planned(submitted):
            if operation[0] == "start":
                model = self.begin()
            else:
                model = self.follow(model, operation)
            candidates = [model] if number <= acked else candidates + [model]
            unfinished = operation if operation[0] == "create" else None
        if acked < 0:
            return  # not even the directories were acknowledged
        names, inodes = self.observe()
        reasons = []
        for candidate in reversed(candidates):
            partial = unfinished if candidate is candidates[-1] and len(candidates) > 1 else None
            reason = self.mismatch(candidate, names, inodes, partial)
            if reason is None:
                return
            reasons.append(reason)
        raise Damage(f"{self.root}: not in the state after any of the {len(candidates)} operations "
                     f"from {acked} to {submitted}; first: {reasons[-1]}; last: {reasons[0]}")

    def mismatch(self, candidate, names, inodes, partial):
        """None if the tree is in the state `candidate`. The content of the file that the
        operation `partial` was creating need not be complete."""
        want = candidate["names"]
        if names.keys() != want.keys():
            missing, extra = sorted(want.keys() - names.keys()), sorted(names.keys() - want.keys())
            return f"missing {missing[:3]}, unexpected {extra[:3]}"
        inode_of = {}
        for name, what in want.items():
            found = names[name]
            if not isinstance(what, int):
                if found != what:
                    return f"{name} is {found} instead of {what}"
                continue
            if found[0] != "inode" or inode_of.setdefault(what, found) != found:
                return f"{name} is not a link of the same file"
            path, info = inodes[found[1]][0]
            mode, number = candidate["files"][what]
            if stat.S_IMODE(info.st_mode) != mode:
                return f"{name} has mode {stat.S_IMODE(info.st_mode):o} instead of {mode:o}"
            if get_number(path) != number:
                return f"{name} has attribute {get_number(path)} instead of {number}"
            if partial is not None and partial[3] == what:
                check_growing(path, self.body(what), None)
            elif read_all(path) != self.body(what):
                return f"{name} has another content"
        if len(set(inode_of.values())) != len(inode_of):
            return "two files share an inode"
        return None


def get_number(path):
    try:
        return int(os.getxattr(path, "user.number"))
    except OSError:
        return None


KINDS = (AppendLog, Slots, Replace, DataOps, Namespace)


# --- running and checking -------------------------------------------------------------------


def read_history(path):
    """(last acknowledged, last submitted, errors) of a history file."""
    acked = submitted = -1
    errors = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            word, _, rest = line.rstrip("\n").partition(" ")
            if word == "s":
                submitted = int(rest)
            elif word == "a":
                acked = int(rest)
            elif word == "e":
                errors.append(rest)
    return acked, submitted, errors


def execute(workload, history, seconds, stop):
    """Carries out the plan until `seconds` are over, `stop` is set, or an operation fails."""
    log = os.open(history, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    deadline = time.monotonic() + seconds
    try:
        for number, operation in enumerate(workload.plan()):
            if stop() or time.monotonic() > deadline:
                break
            os.write(log, b"s %d\n" % number)
            workload.apply(operation)
            if operation[-1]:
                os.write(log, b"a %d\n" % number)
    except OSError as error:
        os.write(log, f"e {error.errno} {error}\n".encode())
    os.close(log)


def run_in_child(workload, history, seconds):
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A mapped page of a dead mount is a SIGBUS: the end of this process, as it should be.
    try:
        os.makedirs(workload.root, exist_ok=True)
        sync_dir(workload.root)
        sync_dir(os.path.dirname(workload.root))
        execute(workload, history, seconds, lambda: stopped)
    except OSError as error:
        with open(history, "a", encoding="utf-8") as file:
            file.write(f"e {error.errno} {error}\n")
    except Exception:
        traceback.print_exc()
        os._exit(1)


def workloads(root, seed, count=1):
    """`count` of each kind, each with its directory and its name."""
    for copy in range(count):
        for kind in KINDS:
            name = f"{kind.__name__.lower()}{copy}"
            yield name, kind(os.path.join(root, name), f"{seed}/{name}")


def start(root, histories, seed, seconds=3600, count=1):
    """Starts all writers; {name: process}."""
    os.makedirs(histories, exist_ok=True)
    os.makedirs(root, exist_ok=True)
    sync_dir(root)
    sync_dir(os.path.dirname(os.path.abspath(root)))
    started = {}
    for name, workload in workloads(root, seed, count):
        history = os.path.join(histories, name)
        open(history, "w", encoding="ascii").close()
        process = multiprocessing.Process(target=run_in_child, args=(workload, history, seconds))
        process.start()
        started[name] = process
    return started


def check_all(root, histories, seed, clean=False, count=1):
    """Checks each workload; returns (operations acknowledged, list of damages)."""
    total, damages = 0, []
    for name, workload in workloads(root, seed, count):
        history = os.path.join(histories, name)
        acked, submitted, _ = read_history(history)
        if clean:
            acked = submitted
        total += acked + 1
        try:
            if os.path.isdir(workload.root):
                workload.check(acked, submitted)
            elif acked >= 0:
                raise Damage(f"{workload.root}: missing, {acked + 1} operations acknowledged")
        except (Damage, OSError) as damage:
            damages.append(f"{name} (acknowledged {acked}, submitted {submitted}): {damage}")
    return total, damages


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=("run", "check"))
    parser.add_argument("root")
    parser.add_argument("histories")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--clean", action="store_true", help="all submitted must be there")
    arguments = parser.parse_args()
    if arguments.action == "run":
        shutil.rmtree(arguments.histories, ignore_errors=True)
        processes = start(arguments.root, arguments.histories, arguments.seed, arguments.seconds)
        for process in processes.values():
            process.join()
        for name in processes:
            acked, submitted, errors = read_history(os.path.join(arguments.histories, name))
            print(f"{name}: acknowledged {acked}, submitted {submitted} {' '.join(errors)}")
        return 0
    total, damages = check_all(arguments.root, arguments.histories, arguments.seed, arguments.clean)
    print(f"{total} acknowledged operations checked, {len(damages)} workloads damaged")
    for damage in damages:
        print(f"DAMAGE {damage}")
    return 1 if damages else 0


if __name__ == "__main__":
    sys.exit(main())
