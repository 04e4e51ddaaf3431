#!/usr/bin/python3
"""A second reader, made from docs/FORMAT.md alone, reads what the engine has written.

usage: run.sh --weir BIN [--quick] [--seed N] [--seeds N] [--mount-arg ARG]

For each seed, and for volumes of several kinds: random work on a mount, kill -9 of the server at a
random moment, then

    unrecovered   reader.py and a read-only mount of the same file show the same
    recovered     the engine recovers and closes it; the reader shows what it has shown before, the
                  same as a mount, and finds everything as the document has it: allocated is what
                  nodes and extents have, and so on
    damaged       copies with a damaged log, or one that is laid out anew and damaged: both show
                  the same state, or both refuse

and the last with the stored volumes in crates/weir/tests/golden. What is damaged how depends on
the seed only, as far as the volume does. The first difference is printed, and the volume is kept.
The last line is "N passed, N failed"; the exit code is 0 only if all passed. Needs root and
/dev/fuse; see tests/programs/install.sh.
"""

import argparse
import collections
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "kill"))

import damage  # noqa: E402
import mounted  # noqa: E402
import reader  # noqa: E402
from targets import TargetError, WeirTarget, run, say  # noqa: E402

GOLDEN = os.path.join(HERE, "..", "..", "crates", "weir", "tests", "golden")
GOLDEN_BYTES = 1 << 20
SHOWN_CHARACTERS = 300
BUSY_LIMIT_SECONDS = 10
MEMORY = "512M"  # for a damaged copy
# Pages that the log holds and that are not home may have no block yet, or count twice.
UNSETTLED = ("blocks",)

# Kinds of volumes: arguments of `weir create`, whether barriers make long batches, and which part of
# the damage is for them: short logs are soon the same.
KINDS = {
    "small": (("--size", "2M"), False, 0.3),
    "small log": (("--size", "96M", "--log-size", "1M"), True, 0.7),
    "many groups": (("--size", "1G", "--log-size", "6M"), False, 1.0),
}


class Difference(Exception):
    """The reader and the engine do not agree, or the reader finds what must not be."""


class Engine(WeirTarget):
    """Mounts for a look, of volumes that may be refused."""

    def shows(self, *mount_args):
        """What a mount shows: an error and no facts, or facts."""
        self.mount_args[:] = mount_args
        try:
            self.mount()
        except TargetError as error:
            if self.server.poll() is None:
                raise
            return last_line(error), {}
        facts = mounted.walk(self.directory)
        self.take_away()
        return None, facts

    def take_away(self):
        """The server may end with 1: it may have met what was damaged."""
        deadline, first = time.monotonic() + BUSY_LIMIT_SECONDS, None
        while True:
            try:
                run(self.binary, "umount", self.directory, limit=120)
                break
            except TargetError as error:  # somebody looks at all mounts, perhaps
                # What comes after an unmount that has failed half-way is "not mounted", and says nothing.
                first = first or error
                if time.monotonic() > deadline:
                    raise first from (None if error is first else error)
                time.sleep(0.2)
        self.server.wait(60)


def last_line(error) -> str:
    return str(error).strip().splitlines()[-1]


class Suite:
    def __init__(self, weir, work, mount_args):
        self.weir, self.work, self.mount_args = weir, work, mount_args
        self.directory, self.memory = os.path.join(work, "mnt"), os.path.join(work, "memory")
        os.makedirs(self.directory)
        # Damaged copies are many, and only read: in memory, they do not wait for the disk.
        os.makedirs(self.memory)
        run("mount", "-t", "tmpfs", "-o", f"size={MEMORY}", "weir-format", self.memory)
        self.targets, self.load = [], None
        self.log = os.path.join(work, "server.log")

    def engine(self, volume) -> Engine:
        engine = Engine(self.weir, volume, self.directory, self.log, self.mount_args)
        self.targets.append(engine)
        return engine

    def release(self):
        if self.load is not None:
            self.load.kill()
            self.load.wait()
        for target in self.targets:
            target.release()

    def end(self):
        self.release()
        run("umount", "-l", self.memory)  # a killed server's files are closed a little later

    def copy_of(self, volume) -> str:
        copy = os.path.join(self.memory, "copy")
        run("cp", "--sparse=always", volume, copy)
        return copy

    # --- what is compared

    def same_unrecovered(self, volume) -> reader.Reading:
        """The reader's view of a volume, which a read-only mount shares."""
        reading = reader.read(volume)
        error, facts = self.engine(volume).shows("--read-only", *self.mount_args)
        if (reading.error is None) != (error is None):
            raise Difference(f"the reader says: {reading.error or 'good'}; the engine: {error or 'good'}")
        same_facts(reading.paths, "the reader", facts, "the mount", UNSETTLED)
        return reading

    def same_recovered(self, volume, before):
        """The engine recovers and closes the volume. `before` is what the reader has seen."""
        engine = self.engine(volume)
        engine.mount()
        engine.take_away()
        if engine.server.returncode != 0:
            raise Difference(f"the server has met errors:\n{engine.log_tail()}")
        after = reader.read(volume)
        no_remarks(after)
        same_facts(before.paths, "the reader before recovery", after.paths, "after it", UNSETTLED)
        error, facts = self.engine(volume).shows("--read-only", *self.mount_args)
        if error:
            raise Difference(f"the engine refuses what it has recovered: {error}")
        same_facts(after.paths, "the reader", facts, "the mount", ())
        if (after.free_blocks, after.inode_count) != (after.root.free_blocks, after.root.inode_count):
            raise Difference(f"{after.free_blocks} blocks are free, {after.inode_count} inodes there; the "
                             f"root says {after.root.free_blocks}, {after.root.inode_count}")
        run(self.weir, "fsck", "--dry-run", volume)

    def same_damaged(self, volume, reading, rng, count) -> str:
        """Copies of a volume with damaged logs. Returns how they ended."""
        ends = collections.Counter()
        for _ in range(count):
            copy, done = self.copy_of(volume), []
            read = reading
            if reading.frames and rng.random() < 0.8:
                done.append(damage.lay_anew(copy, reading, rng))
                read = reader.read(copy)
            if not done or rng.random() < 0.7:
                done.append(damage.damage(copy, read if read.superblock else reading, rng))
            try:
                found = self.same_unrecovered(copy)
            except Difference as difference:
                run("cp", "--sparse=always", copy, volume + ".damaged")
                raise Difference(f"{difference}\n    damage: {'; '.join(done)}") from difference
            ends[end_of(found, reading)] += 1
            os.unlink(copy)
        return ", ".join(f"{number} {end}" for end, number in sorted(ends.items()))

    # --- cases

    def killed(self, kind, seed, damaged_count) -> str:
        create, barriers, part = KINDS[kind]
        rng = random.Random(f"{kind} {seed}")
        volume = os.path.join(self.work, f"{kind.replace(' ', '-')}.{seed}")
        run(self.weir, "create", volume, *create)
        self.load_and_kill(volume, seed, rng.uniform(0.4, 1.6), barriers)
        reading = self.same_unrecovered(volume)
        if reading.error:
            raise Difference(f"a killed volume is refused: {reading.error}")
        no_remarks(reading)
        ends = self.same_damaged(volume, reading, rng, round(part * damaged_count))
        self.same_recovered(volume, reading)
        os.unlink(volume)
        return (f"{len(reading.paths)} paths, {len(reading.frames)} frames, "
                f"{reading.payload_pages} pages in the log; damaged: {ends}")

    def load_and_kill(self, volume, seed, seconds, barriers):
        engine = self.engine(volume)
        engine.mount()
        load = self.load = subprocess.Popen(
            [sys.executable, os.path.join(HERE, "load.py"), os.path.join(self.directory, "w"), str(seed)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(0.1)
            if barriers:
                run(self.weir, "barrier", self.directory)
        engine.crash()
        said, _ = load.communicate(timeout=60)
        self.load = None
        engine.detach()
        if load.returncode != 0:
            raise TargetError(f"load.py ended with {load.returncode}: {said.decode(errors='replace')}")

    def golden(self, name, seed, damaged_count) -> str:
        volume = os.path.join(self.work, name)
        with open(os.path.join(GOLDEN, name), "rb") as packed, open(volume, "wb") as image:
            image.write(unpacked(packed.read()))
        reading = self.same_unrecovered(volume)
        if reading.error:
            raise Difference(f"a stored volume is refused: {reading.error}")
        no_remarks(reading)
        ends = self.same_damaged(volume, reading, random.Random(f"{name} {seed}"), damaged_count)
        self.same_recovered(volume, reading)
        os.unlink(volume)
        return f"{len(reading.paths)} paths, {len(reading.frames)} frames; damaged: {ends}"


def end_of(damaged, whole) -> str:
    if damaged.error:
        return "refused"
    if damaged.kept < len(damaged.frames):
        return "unproven"
    return "whole" if damaged.kept == len(whole.frames) else "shorter"


def no_remarks(reading):
    if reading.error:
        raise Difference(f"the reader refuses what must be good: {reading.error}")
    if reading.remarks:
        raise Difference(f"the reader remarks, among {len(reading.remarks)}: {reading.remarks[0]}")


def same_facts(ours, who_we, theirs, who_they, leave_out):
    for path in sorted({*ours, *theirs}):
        if path not in ours or path not in theirs:
            raise Difference(f"{path!r} is not there for {who_they if path in ours else who_we}")
        for fact in sorted({*ours[path], *theirs[path]} - {*leave_out}):
            our, their = ours[path].get(fact), theirs[path].get(fact)
            if our != their:
                raise Difference(f"{path[-80:]!r}: {fact} is {str(our)[:SHOWN_CHARACTERS]} for {who_we}, "
                                 f"{str(their)[:SHOWN_CHARACTERS]} for {who_they}")


def unpacked(packed) -> bytes:
    """A stored volume: see `pack` in crates/weir/tests/check/golden.rs."""
    image, at = bytearray(GOLDEN_BYTES), 0
    while at < len(packed):
        start = int.from_bytes(packed[at:at + 4], "little") * 4096
        at, filled = at + 4, 0
        while filled < 4096:
            if packed[at] == 255:
                image[start:start + 4096] = packed[at + 1:at + 4097]
                at, filled = at + 4097, 4096
            else:
                length = packed[at] + 1
                image[start + filled:start + filled + length] = packed[at + 1:at + 2] * length
                at, filled = at + 2, filled + length
    return bytes(image)


def parse():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weir", required=True, help="the weir binary")
    parser.add_argument("--quick", action="store_true", help="one seed, and less damage")
    parser.add_argument("--seed", type=int, default=1, help="the first (1)")
    parser.add_argument("--seeds", type=int, default=None, help="how many (6; quick: 1)")
    parser.add_argument("--mount-arg", action="append", default=[])
    return parser.parse_args()


def cases(suite, arguments):
    """(name, function) of each."""
    damaged, golden_damaged = (24, 16) if arguments.quick else (60, 100)
    seeds = arguments.seeds or (1 if arguments.quick else 6)
    for name in sorted(os.listdir(GOLDEN)):
        if name.endswith(".blocks"):
            yield name, lambda name=name: suite.golden(name, arguments.seed, golden_damaged)
    for seed in range(arguments.seed, arguments.seed + seeds):
        for kind in KINDS:
            yield (f"{kind}, seed {seed}",
                   lambda kind=kind, seed=seed: suite.killed(kind, seed, damaged))


def attempt(name, case) -> bool:
    started = time.monotonic()
    try:
        said, good = case(), True
    except (Difference, TargetError, OSError, subprocess.TimeoutExpired) as error:
        said, good = f"{type(error).__name__}: {error}", False
    say(f"{'ok  ' if good else 'FAIL'}  {name}: {said}, {time.monotonic() - started:.1f} s")
    return good


def main():
    arguments = parse()
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        say("run.sh: needs root and /dev/fuse")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    work = tempfile.mkdtemp(prefix="weir-format.", dir="/var/tmp")
    suite = Suite(arguments.weir, work, arguments.mount_arg)
    passed = failed = 0
    try:
        for name, case in cases(suite, arguments):
            good = attempt(name, case)
            passed, failed = passed + good, failed + (not good)
            suite.release()
    finally:
        suite.end()
        if failed:
            say(f"left for a look: {work}")
        else:
            shutil.rmtree(work)
    say(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
