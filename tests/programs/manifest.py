#!/usr/bin/env python3
"""Writes one line for each file below a directory with everything a copy must preserve.

usage: manifest.py DIR [--against FILE] [--no-xattrs]

Without --against the manifest goes to standard output. With it, the manifest of DIR is
compared with the one in FILE; the differences are printed and the exit code is 1 if there
are any. Link counts and sizes of directories are left out: file systems differ in them.
"""

import argparse
import hashlib
import json
import os
import stat
import sys

KINDS = {
    stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "symlink", stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket", stat.S_IFCHR: "char", stat.S_IFBLK: "block",
}


def walk(top):
    """All paths below `top` (bytes, relative), without `top` itself."""
    stack = [b""]
    while stack:
        relative = stack.pop()
        with os.scandir(os.path.join(top, relative)) as entries:
            for entry in entries:
                path = os.path.join(relative, entry.name)
                yield path
                if entry.is_dir(follow_symlinks=False):
                    stack.append(path)


def content_hash(path):
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def describe(path, with_xattrs):
    info = os.lstat(path)
    kind = KINDS[stat.S_IFMT(info.st_mode)]
    fact = {
        "kind": kind, "mode": oct(stat.S_IMODE(info.st_mode)), "uid": info.st_uid,
        "gid": info.st_gid, "mtime_ns": info.st_mtime_ns,
    }
    if kind != "dir":
        fact["nlink"] = info.st_nlink
    if kind == "file":
        fact["size"] = info.st_size
        fact["sha256"] = content_hash(path)
    if kind == "symlink":
        fact["size"] = info.st_size
        fact["target"] = os.fsdecode(os.readlink(path))
    if kind in ("char", "block"):
        fact["rdev"] = [os.major(info.st_rdev), os.minor(info.st_rdev)]
    if with_xattrs and kind != "symlink":
        # XFS shows each ACL a second time under a name of its own.
        names = sorted(name for name in os.listxattr(path, follow_symlinks=False)
                       if not name.startswith("trusted.SGI_ACL_"))
        values = {n: os.getxattr(path, n, follow_symlinks=False).hex() for n in names}
        if values:
            fact["xattrs"] = values
    return info, fact


def build(top, with_xattrs=True):
    """{path: fact}; files with several names carry the first of them as `same_as`."""
    facts, first_name = {}, {}
    for relative in sorted(walk(top)):
        info, fact = describe(os.path.join(top, relative), with_xattrs)
        name = os.fsdecode(relative)
        if info.st_nlink > 1 and fact["kind"] != "dir":
            fact["same_as"] = first_name.setdefault((info.st_dev, info.st_ino), name)
        facts[name] = fact
    return facts


def changes(want, have, limit=200):
    """What differs between two values of a manifest, in at most about 2 * `limit` bytes."""
    if isinstance(want, dict) and isinstance(have, dict):
        names = [k for k in sorted(want.keys() | have.keys()) if want.get(k) != have.get(k)]
        want, have = ({k: v.get(k) for k in names} for v in (want, have))
    return f"expected {str(want)[:limit]}, found {str(have)[:limit]}"


def compare(expected, actual, out=sys.stdout, limit=40):
    """Prints each difference and returns how many there are."""
    differences = 0
    for name in sorted(expected.keys() | actual.keys()):
        want, have = expected.get(name), actual.get(name)
        if want == have:
            continue
        differences += 1
        if differences > limit:
            continue
        shown = name.encode("utf-8", "surrogateescape")
        if have is None:
            print(f"missing: {shown}", file=out)
        elif want is None:
            print(f"unexpected: {shown}", file=out)
        else:
            keys = [k for k in sorted(want.keys() | have.keys()) if want.get(k) != have.get(k)]
            text = "; ".join(f"{k}: {changes(want.get(k), have.get(k))}" for k in keys)
            print(f"differs: {shown}: {text}", file=out)
    if differences > limit:
        print(f"... and {differences - limit} more", file=out)
    return differences


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dir")
    parser.add_argument("--against")
    parser.add_argument("--no-xattrs", action="store_true")
    arguments = parser.parse_args()
    actual = build(os.fsencode(arguments.dir), not arguments.no_xattrs)
    if arguments.against is None:
        for name, fact in actual.items():
            print(json.dumps([name, fact], sort_keys=True))
        return 0
    with open(arguments.against, encoding="ascii") as file:
        expected = dict(json.loads(line) for line in file)
    differences = compare(expected, actual)
    if differences:
        print(f"{differences} of {len(expected)} files differ from {arguments.against}")
        return 1
    print(f"{len(actual)} files equal to the manifest")
    return 0


if __name__ == "__main__":
    sys.exit(main())
