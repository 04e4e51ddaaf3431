#!/usr/bin/env python3
"""Kills a mount under load, again and again, and checks that all that was acknowledged is there.

usage: kill.py --weir BIN [--rounds 30] [--seed N]
       kill.py --weir BIN --power-cut  the image lies on a host whose writes are volatile until
                                      an fsync; with the server, they are lost at random
       kill.py --fs xfs|ext4 ...      the same with a kernel file system that is shut down
                                      without writing its log: proves the suite itself
       kill.py --self-test            proves that the checker finds planted damage

One round: start the loads on the mount; after a random time kill -9 the server; take the dead
mount away; in two rounds of three leave the recovery to the next mount (in half of these `weir fsck
--dry-run`, which changes nothing, must find no error first), in the third let `weir fsck` recover it,
which must exit 0 or 1; mount again (in some rounds that mount is killed in
the middle of its recovery, and mounted once more); check every acknowledged operation; check
that the files of the last rounds have not changed. In each eighth round the volume is unmounted
cleanly instead, and then everything that was submitted must be there. Loads: the writers of
workloads.py in every round, in turns with SQLite, fio and PostgreSQL beside them.

The seed fixes the plans of the writers and the times; the machine's timing is what it is, so a
failure may need several runs with the same seed. On a failure the volume, the histories and
the server's log are left where the last lines say.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import selftest
import services
from targets import FaultyHost, LoopTarget, TargetError, WeirTarget, end_processes_below, say

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "programs"))
import manifest  # noqa: E402 - from the directory of the program suite

KEPT_ROUNDS = 2


class Suite:
    def __init__(self, target, mount, host, seed):
        self.target, self.mount, self.host = target, mount, host
        self.rng = random.Random(seed)
        self.writers = services.Writers(mount, host, seed)
        self.sides = [None, services.Sqlite(mount, host, seed), services.Fio(mount, host, seed),
                      services.Postgres(mount, host, seed)]
        self.used = []
        self.settled = {}
        self.acknowledged = 0
        self.remark = ""

    def loads_of(self, number):
        side = self.sides[number % len(self.sides)]
        return [load for load in (side, self.writers) if load is not None]

    def start_cleaning(self, number):
        """Deletes an old round while the load runs, so that crashes hit frees as well."""
        old = number - KEPT_ROUNDS - 1
        if old not in self.settled:
            return None
        del self.settled[old]
        return subprocess.Popen(["rm", "-rf", self.writers.root(old)], cwd="/",
                                stderr=subprocess.DEVNULL)

    def load_and_crash(self, number, clean):
        """Returns the problems seen before the check."""
        loads, problems = self.loads_of(number), []
        for load in loads:
            load.start(number)
            if load is not self.writers and load not in self.used:
                self.used.append(load)
        cleaning = self.start_cleaning(number)
        time.sleep(self.rng.uniform(0.3, 2.5))
        for load in loads:
            early = load.early_ends()
            if early:
                problems.append(f"ended before the crash: {', '.join(early)}")
        if clean:
            for load in loads:
                load.ask_to_stop()
        else:
            if self.target.loads_end_first:
                for load in loads:
                    load.kill()
            if self.target.host:
                # Sometimes all unsynced sectors are lost, sometimes some, sometimes none.
                self.remark = ", " + self.target.power_cut(self.rng.randrange(10**9),
                                                           self.rng.choice((0, 10, 50, 90, 100)))
            else:
                self.target.crash()
        for load in loads:
            problems += load.stop()
        if cleaning is not None:
            cleaning.wait(60)
        if clean:
            self.target.unmount()
        else:
            end_processes_below(self.mount)
            self.target.detach()
        return problems

    def recover(self):
        """Perhaps a check, perhaps a killed recovery, mount. Returns what checked, in words."""
        how = self.rng.choice(("no fsck", "dry run", "fsck"))
        if how == "dry run":
            self.target.dry_run()
        elif how == "fsck":
            how += f" {self.target.fsck().returncode}"
        if self.rng.random() < 0.25:
            seconds = self.rng.choice((0.002, 0.01, 0.03, 0.1, 0.3))
            self.target.crash_in_recovery(seconds)
            self.remark += f", recovery killed after {seconds:g} s"
            if self.rng.random() < 0.5:
                self.target.dry_run()
        self.target.mount()
        return how

    def check(self, number, clean):
        damages = []
        count, found = self.writers.check(number, clean)
        self.acknowledged += count
        damages += found
        for load in self.used:  # all databases, not only the one of this round
            if load in self.loads_of(number):
                counted, found = load.check(number, clean)
                count += counted
                self.acknowledged += counted
            elif number % 3 == 0:
                _, found = load.check(number)
            else:
                continue
            damages += found
        for old, expected in self.settled.items():
            actual = manifest.build(os.fsencode(self.writers.root(old)))
            if manifest.compare(expected, actual):
                damages.append(f"the files of round {old} have changed, see above")
        self.settled[number] = manifest.build(os.fsencode(self.writers.root(number)))
        return count, damages + self.target.complain()

    def round(self, number):
        clean = number % 8 == 7
        started, self.remark = time.monotonic(), ""
        problems = self.load_and_crash(number, clean)
        how = self.recover()
        count, damages = self.check(number, clean)
        names = "+".join(type(load).__name__.lower() for load in self.loads_of(number))
        end = "unmounted" if clean else "killed"
        say(f"round {number:3d}: {names} {end}{self.remark}, {how}, {count} acknowledged "
            f"operations checked, {time.monotonic() - started:.1f} s")
        return problems + damages


def parse():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weir", help="the weir binary")
    parser.add_argument("--fs", choices=("xfs", "ext4"))
    parser.add_argument("--power-cut", action="store_true",
                        help="what the server had written but not synced is lost as well")
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--size", default="4G")
    parser.add_argument("--work", help="directory for the volume and the histories")
    parser.add_argument("--mount-arg", action="append", default=[])
    arguments = parser.parse_args()
    if not (arguments.weir or arguments.fs or arguments.self_test):
        parser.error("give --weir BIN, --fs xfs|ext4 or --self-test")
    return arguments


def main():
    arguments = parse()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    say(f"seed {seed}")
    if arguments.self_test:
        return selftest.main(seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    work = arguments.work or tempfile.mkdtemp(prefix="weir-kill.", dir="/var/tmp")
    mount, host, volume = (os.path.join(work, name) for name in ("mnt", "host", "volume"))
    for path in (work, mount, host):
        os.makedirs(path, exist_ok=True)
        os.chmod(path, 0o755)  # the server of PostgreSQL runs as another user
    host_disk = FaultyHost(work) if arguments.power_cut else None
    if host_disk:
        volume = host_disk.volume
    if arguments.weir:
        target = WeirTarget(arguments.weir, volume, mount, os.path.join(work, "server.log"),
                            arguments.mount_arg, host_disk)
    else:
        target = LoopTarget(arguments.fs, volume, mount, host_disk)
    suite = Suite(target, mount, host, seed)
    passed, problems = 0, []
    try:
        target.create(arguments.size)
        target.mount()
        for number in range(arguments.rounds):
            problems = suite.round(number)
            if problems:
                break
            passed += 1
        if not problems:
            target.unmount()
            target.fsck(ok=(0,))
    except (TargetError, OSError, subprocess.TimeoutExpired) as error:
        problems = [f"{type(error).__name__}: {error}"]
    finally:
        for load in suite.used + [suite.writers]:
            load.kill()
        end_processes_below(mount)
        target.release()
    for problem in problems:
        say(f"PROBLEM in round {passed}: {problem}")
    say(f"{suite.acknowledged} acknowledged operations survived {passed} rounds")
    if problems:
        say(f"seed {seed}; left for a look: {work}")
    else:
        shutil.rmtree(work)
    say(f"{passed} passed, {1 if problems else 0} failed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
