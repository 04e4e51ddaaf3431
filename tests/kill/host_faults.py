#!/usr/bin/env python3
"""Faults of the host under a mounted volume: a full host file system, and I/O errors.

usage: host_faults.py full|eio (--weir BIN | --fs xfs|ext4) [--seed N] [--case NAME]

full   the image is a sparse file on a small tmpfs, on a small ext4, and on a host that begins
       to answer ENOSPC: writes must fail with an error, and nothing acknowledged may be lost.
       "+room": and once there is room on the host, the mounted volume must go on.
eio    the host answers EIO to writes, to reads, to syncs (and drops what was not synced), or
       to everything.

In each case: writers run; the fault comes; the server must stay alive and answer; the volume
is unmounted, or killed where it cannot be; the fault ends; `weir fsck` exits 0 or 1; all that
was acknowledged is there; the volume can be written and unmounted cleanly; fsck exits 0.
"""

import argparse
import errno
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import services
import workloads
from targets import (FaultyHost, LoopTarget, TargetError, WeirTarget, end_processes_below, run, say)

# The ballast is room for what writers write in a second once it is gone, on a volume that takes blocks the host
# has not given it yet for most of that.
SMALL_HOST_MIB, BALLAST_MIB, FILL_FILE_BYTES = 384, 128, 4 << 20
ANSWER_LIMIT_SECONDS = 60
GO_ON_LIMIT_SECONDS = 20


class SmallHost:
    """A tmpfs or ext4 that is smaller than the volume on it, and some ballast to make room."""

    def __init__(self, kind, work):
        self.directory = os.path.join(work, "small")
        os.makedirs(self.directory)
        if kind == "tmpfs":
            run("mount", "-t", "tmpfs", "-o", f"size={SMALL_HOST_MIB}m", "tmpfs", self.directory)
        else:
            image = os.path.join(work, "small.ext4")
            run("truncate", "-s", f"{SMALL_HOST_MIB}M", image)
            run("mkfs.ext4", "-q", "-F", image)
            run("mount", "-o", "loop", image, self.directory)
        self.volume = os.path.join(self.directory, "volume")
        self.ballast = os.path.join(self.directory, "ballast")
        with open(self.ballast, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, BALLAST_MIB << 20)

    def make_room(self):
        os.unlink(self.ballast)

    def stop(self):
        subprocess.run(["umount", "-l", self.directory], check=False, capture_output=True)


def fill(directory, seed, limit_seconds=120):
    """Writes and syncs files until one fails. Returns (errno, how many were acknowledged)."""
    deadline, number = time.monotonic() + limit_seconds, 0
    try:
        # The writers may have met the fault first, and then nothing can be made any more.
        os.makedirs(directory, exist_ok=True)
        workloads.sync_dir(os.path.dirname(directory))
        while time.monotonic() < deadline:
            fd = os.open(os.path.join(directory, f"fill{number}"), os.O_CREAT | os.O_WRONLY, 0o644)
            try:
                workloads.write_all(fd, fill_content(seed, number), 0)
                os.fsync(fd)
            finally:
                os.close(fd)
            workloads.sync_dir(directory)
            number += 1
    except OSError as error:
        return error.errno, number
    return 0, number


def fill_content(seed, number):
    return workloads.content(seed, "fill", number, size=1 << 16) * (FILL_FILE_BYTES >> 16)


def check_fill(directory, seed, count):
    return [f"fill{number} of {count} acknowledged files is damaged" for number in range(count)
            if workloads.read_all(os.path.join(directory, f"fill{number}")) !=
            fill_content(seed, number)]


def answers(directory):
    """The mount answers a question in time, be it with an error, and is not dead."""
    result = []

    def ask():
        try:
            os.statvfs(directory)
            os.stat(os.path.join(directory, "no such file"))
        except OSError as error:
            result.append(error.errno)
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_LIMIT_SECONDS)
    if not result:
        return [f"the mount does not answer within {ANSWER_LIMIT_SECONDS} s"]
    if result[0] in (errno.ENOTCONN, errno.ECONNABORTED):
        return [f"the mount is dead: {os.strerror(result[0])}"]
    return []


class Case:
    def __init__(self, arguments, kind, name, work, seed):
        self.kind, self.name, self.seed = kind, name, f"{seed}/{name}"
        self.mount, self.histories = os.path.join(work, "mnt"), os.path.join(work, "host")
        for path in (self.mount, self.histories):
            os.makedirs(path)
        host, self.goes_on = name.removesuffix("+room"), name.endswith("+room")
        self.small = SmallHost(host, work) if host in ("tmpfs", "ext4") else None
        self.faulty = None if self.small else FaultyHost(work)
        volume = (self.small or self.faulty).volume
        if arguments.weir:
            self.target = WeirTarget(arguments.weir, volume, self.mount,
                                     os.path.join(work, "server.log"), arguments.mount_arg,
                                     self.faulty)
        else:
            self.target = LoopTarget(arguments.fs, volume, self.mount, self.faulty)
        self.writers = services.Writers(self.mount, self.histories, self.seed)
        self.fill_dir = os.path.join(self.mount, "fill")

    def run(self):
        self.target.create("1G")
        self.target.mount()
        self.writers.start(0)
        time.sleep(1)
        early = self.writers.early_ends()
        problems = [f"ended before the fault: {early}"] if early else []
        filled, remark = self.cause_fault()
        problems += answers(self.mount)
        if not self.target.alive():
            problems.append(f"the server ended by itself:\n{self.target.log_tail()}")
        if self.small:
            problems += check_fill(self.fill_dir, self.seed, min(filled, 3))
        self.writers.ask_to_stop()
        problems += self.writers.stop()
        if self.goes_on:
            self.end_fault()
            problems += self.go_on()
        how = self.take_down()
        if self.goes_on and how != "unmounted":
            problems.append("it cannot be unmounted, though there is room")
        if not self.goes_on:
            self.end_fault()
        code = self.target.fsck().returncode
        self.target.mount()
        count, damages = self.writers.check(0)
        problems += damages + check_fill(self.fill_dir, self.seed, filled)
        say(f"{self.kind} {self.name}: {remark}{how}, fsck {code}, "
            f"{count + filled} acknowledged operations checked")
        return problems + self.use_again() + self.target.complain()

    def cause_fault(self):
        """Returns how many files the filler has acknowledged, and what happened."""
        if self.faulty:
            self.faulty.tell("fault", self.name)
        if self.name in ("read", "sync", "write", "all"):
            time.sleep(2)
            ended = len(self.writers.early_ends())
            return 0, f"{ended} of {len(self.writers.processes)} writers got an error, "
        code, filled = fill(self.fill_dir, self.seed)
        if code == 0:
            raise TargetError("the host is full, and yet no write or sync has failed")
        return filled, f"{filled} files fitted, then {errno.errorcode.get(code, code)}, "

    def go_on(self):
        """There is room again: what failed before may be told once more, and then all succeeds."""
        deadline, in_a_row, number, last = time.monotonic() + GO_ON_LIMIT_SECONDS, 0, 0, None
        while in_a_row < 20:
            if time.monotonic() > deadline:
                return [f"the volume does not go on with room on the host: {last}"]
            path = os.path.join(self.mount, f"later{number}")
            try:
                fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
                try:
                    workloads.write_all(fd, fill_content(self.seed, number)[:1 << 20], 0)
                    os.fsync(fd)
                finally:
                    os.close(fd)
                os.unlink(path)
                os.sync()
                in_a_row, number = in_a_row + 1, number + 1
            except OSError as error:
                in_a_row, last = 0, error
                time.sleep(0.1)
        return []

    def take_down(self):
        try:
            self.target.unmount()
            return "unmounted"
        except (TargetError, subprocess.TimeoutExpired):
            # With its disk gone it may refuse; what was acknowledged has to be there anyway.
            end_processes_below(self.mount)
            if self.target.alive():
                self.target.crash()
            self.target.detach()
            return "unmount failed, killed"

    def end_fault(self):
        if self.small:
            self.small.make_room()
        else:
            self.faulty.tell("fault", "none")

    def use_again(self):
        """The volume works as before: delete, write, unmount cleanly, fsck 0, all is there."""
        shutil.rmtree(self.fill_dir, ignore_errors=True)
        self.writers.start(1)
        time.sleep(1)
        problems = [f"{name} has ended on the repaired volume" for name in self.writers.early_ends()]
        self.writers.ask_to_stop()
        problems += self.writers.stop()
        self.target.unmount()
        self.target.fsck(ok=(0,))
        self.target.mount()
        problems += self.writers.check(1, clean=True)[1] + self.writers.check(0)[1]
        self.target.unmount()
        return problems

    def release(self):
        self.writers.kill()
        end_processes_below(self.mount)
        self.target.release()
        if self.small:
            self.small.stop()


CASES = {"full": ("tmpfs", "ext4", "full", "tmpfs+room", "ext4+room"), "eio": ("write", "sync", "read", "all")}


def run_case(arguments, name, seed):
    work = tempfile.mkdtemp(prefix=f"weir-{arguments.kind}-{name}.", dir="/var/tmp")
    case = Case(arguments, arguments.kind, name, work, seed)
    try:
        problems = case.run()
    except (TargetError, OSError, subprocess.TimeoutExpired, workloads.Damage) as error:
        problems = [f"{type(error).__name__}: {error}"]
    finally:
        case.release()
    for problem in problems:
        say(f"PROBLEM in {arguments.kind} {name}: {problem}")
    if problems:
        say(f"left for a look: {work}")
    else:
        shutil.rmtree(work)
    return not problems


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=sorted(CASES))
    parser.add_argument("--weir")
    parser.add_argument("--fs", choices=("xfs", "ext4"))
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--case", help="only this case")
    parser.add_argument("--mount-arg", action="append", default=[])
    arguments = parser.parse_args()
    if not (arguments.weir or arguments.fs):
        parser.error("give --weir BIN or --fs xfs|ext4")
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    say(f"seed {seed}")
    names = [arguments.case] if arguments.case else CASES[arguments.kind]
    passed = sum(run_case(arguments, name, seed) for name in names)
    say(f"{passed} passed, {len(names) - passed} failed")
    return 0 if passed == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
