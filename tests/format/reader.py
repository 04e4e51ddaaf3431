#!/usr/bin/python3
"""A second reader of volumes, made from docs/FORMAT.md alone, without a look at the engine.

usage: reader.py VOLUME [--paths]

It shows that the document says all that one needs: run.sh compares what this reader finds on
volumes that the engine has written, also after kills and with damaged logs, with what a mount
shows. Beside each part stands the section of the document that it follows. Where this reader and
the engine differ, the document decides, and if it does not say, that is its error.

It reads: it replays the log and finishes orphans in memory, as recovery would, and changes nothing.
Everything is in memory, so volumes should be small. Parts: volume.py (superblock, root, bitmaps,
tree), log.py (frames, proof, replay), items.py (inodes, names, data). Needs the packages
python3-crc32c and python3-xxhash, and so the python3 of Debian and no other.

Prints as JSON a summary, or with --paths everything, and what is not as the document has it. The
exit code is 1 if that is anything, or if the volume cannot be read.
"""

import argparse
import json
import sys
from dataclasses import dataclass, field

import items
import log
import volume


@dataclass
class Reading:
    """What was found. `error` says why the volume is refused; then there is nothing else."""

    error: str = None
    remarks: list = field(default_factory=list)
    paths: dict = field(default_factory=dict)  # path (latin-1) -> facts as in mounted.py
    superblock: volume.Superblock = None
    root: volume.Root = None
    frames: list = field(default_factory=list)  # all that were found
    kept: int = 0  # so many of them count
    free_blocks: int = 0
    inode_count: int = 0
    payload_pages: int = 0

    def summary(self) -> dict:
        if self.error:
            return {"error": self.error}
        return {"blocks": self.superblock.total_blocks, "generation": self.root.generation,
                "frames": len(self.frames), "frames_that_count": self.kept,
                "payload_pages": self.payload_pages, "free_blocks": self.free_blocks,
                "inodes": self.inode_count, "paths": len(self.paths), "remarks": self.remarks}


def read(path) -> Reading:
    reading = Reading()
    device = volume.Device(path)
    try:
        fill(reading, device)
    except volume.Corrupt as error:
        reading.error = str(error)
    reading.remarks = device.remarks
    return reading


def fill(reading, device):
    superblock = reading.superblock = volume.find_superblock(device)
    root = reading.root = volume.Root(device, superblock)
    bitmaps = volume.read_bitmaps(device, superblock, root)
    tree = volume.Tree(device, superblock, root)
    reading.frames = log.Scan(device, superblock).frames()
    kept = log.kept_frames(device, superblock, root, reading.frames)
    reading.kept = len(kept)
    replay = log.Replay(device, superblock, root, tree.items, bitmaps)
    replay.apply(kept)
    items.finish_orphans(replay)
    inodes = items.read_inodes(superblock, replay.items)
    for inode in inodes.values():
        items.check_inode(inode, replay.pages.get(inode.number, {}), device.expect)
        device.expect(inode.number < replay.next_inode, f"inode {inode.number} is not used yet")
    items.check_allocation(superblock, bitmaps, tree.nodes, inodes, device.expect)
    reading.paths = items.walk(inodes, items.Contents(device, replay.pages), device.expect)
    reading.free_blocks = volume.count_free(bitmaps)
    reading.inode_count = len(inodes)
    reading.payload_pages = sum(map(len, replay.pages.values()))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("volume")
    parser.add_argument("--paths", action="store_true", help="all paths with their attributes")
    arguments = parser.parse_args()
    reading = read(arguments.volume)
    shown = reading.summary() | ({"all": reading.paths} if arguments.paths else {})
    print(json.dumps(shown, indent=1))
    return 1 if reading.error or reading.remarks else 0


if __name__ == "__main__":
    sys.exit(main())
