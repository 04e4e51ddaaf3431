#!/usr/bin/env python3
"""POSIX and Linux file semantics on a mounted file system, one named check each.

usage: posix_checks.py DIR [NAME...]     run all checks (or those named) below DIR, as root
       posix_checks.py --keep DIR        make a tree whose manifest must survive a remount

Prints a line for each check that fails or is skipped, and a summary. A check is skipped only
where the kernel has no way to pass the call to a FUSE server, or where the call is optional.
"""

import os
import shutil
import sys
import time
import traceback

import posix_checks_data  # noqa: F401 - importing registers the checks
import posix_checks_names  # noqa: F401
import posix_checks_rights  # noqa: F401
from posix_support import CHECKS, Skip, pattern, write_file


def run(top, wanted):
    os.umask(0o022)
    shutil.rmtree(top, ignore_errors=True)
    os.makedirs(top)
    os.chmod(top, 0o755)
    passed, failed, skipped = 0, [], []
    for function in CHECKS:
        if wanted and function.__name__ not in wanted:
            continue
        scratch = os.path.join(top, function.__name__)
        os.mkdir(scratch)
        started = time.monotonic()
        try:
            function(scratch)
            shutil.rmtree(scratch)
            passed += 1
        except Skip as reason:
            skipped.append(function.__name__)
            print(f"skip {function.__name__}: {reason}")
            shutil.rmtree(scratch, ignore_errors=True)
        except Exception:  # noqa: B902 - a failed check must not hide the others
            failed.append(function.__name__)
            print(f"FAIL {function.__name__}")
            traceback.print_exc(file=sys.stdout)
            shutil.rmtree(scratch, ignore_errors=True)
        seconds = time.monotonic() - started
        if seconds > 5:
            print(f"slow {function.__name__}: {seconds:.1f} s")
        sys.stdout.flush()
    print(f"{passed} semantic checks passed, {len(failed)} failed, {len(skipped)} skipped")
    for name in failed:
        print(f"failed: {name}")
    return 1 if failed or passed == 0 else 0


def keep(top):
    """One of each kind of file, with what is easily lost at an unmount."""
    os.makedirs(top)
    for number in range(300):
        path = os.path.join(top, f"file{number:04d}")
        write_file(path, pattern(number, number * 97))
        os.chmod(path, number * 13 % 0o7777)
        os.utime(path, ns=(number * 10**16 + 1, number * 10**16 + 999999999))
    for number in range(0, 300, 3):
        os.link(os.path.join(top, f"file{number:04d}"), os.path.join(top, f"hard{number:04d}"))
        os.symlink(f"file{number:04d}", os.path.join(top, f"soft{number:04d}"))
    os.symlink("t" * 1000, os.path.join(top, "long-target"))
    write_file(os.path.join(top, "n" * 255), b"long name")
    write_file(os.path.join(top, "sparse"), b"start")
    os.truncate(os.path.join(top, "sparse"), 50 * 2**20)
    os.mkfifo(os.path.join(top, "fifo"), 0o620)
    os.mknod(os.path.join(top, "device"), 0o020600, os.makedev(240, 70000))
    path = os.path.join(top, "attributes")
    write_file(path, b"x")
    os.setxattr(path, "user.one", b"1" * 2000)
    os.setxattr(path, "trusted.two", bytes(range(256)))
    os.setxattr(path, "security.three", b"")
    os.mkdir(os.path.join(top, "directory"))
    os.chmod(os.path.join(top, "directory"), 0o3771)
    os.chown(os.path.join(top, "directory"), 4000000000, 12345)
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if sys.argv[1] == "--keep":
        sys.exit(keep(sys.argv[2]))
    sys.exit(run(os.path.abspath(sys.argv[1]), set(sys.argv[2:])))
