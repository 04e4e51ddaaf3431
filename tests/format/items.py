"""What the items of a volume mean: "Items" of docs/FORMAT.md, and the last step of "What replay does".

Part of the second reader, see reader.py.
"""

import bisect
import hashlib
import stat
import struct
from dataclasses import dataclass, field

from volume import (BLOCK, ENTRY, EXTENT, GROUP_BITS, GROUP_BLOCKS, INLINE, INODE, MIRROR_BLOCKS,
                    NODE_BLOCKS, NUMBER_LIMIT, ORPHAN, XATTR, blocks_of, crc32c, digest, require,
                    runs_in_groups, u32, u64)

ROOT_DIRECTORY = 1
INODE_BYTES = 192
INODE_LAYOUT = "<4I4Q4q4I3I"
TYPES = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO,
         stat.S_IFSOCK)
MOST_INLINE_DATA, LONGEST_TARGET, LONGEST_XATTR = 2048, 4095, 4096
MOST_WRITTEN_BLOCKS, MOST_UNWRITTEN_BLOCKS = 256, GROUP_BLOCKS
UNWRITTEN = 1


def digest_of_pages(pages) -> str:
    """SHA-256 of a file's pages that are not zero, with their numbers: files may be of any size."""
    sha = hashlib.sha256()
    for number, page in pages:
        if any(page):
            sha.update(struct.pack("<Q", number))
            sha.update(page)
    return sha.hexdigest()


@dataclass
class Extent:
    start: int
    physical: int
    blocks: int
    unwritten: bool
    checksums: tuple


@dataclass
class Inode:
    number: int
    mode: int
    links: int
    uid: int
    gid: int
    size: int
    blocks: int
    parent: int
    times_ns: tuple  # atime, mtime, ctime, btime
    device: tuple  # major, minor
    has_inline: bool
    subdirectories: int
    inline: bytes = None
    entries: list = field(default_factory=list)  # name, inode number, type
    xattrs: dict = field(default_factory=dict)
    extents: list = field(default_factory=list)

    def is_a(self, file_type) -> bool:
        return stat.S_IFMT(self.mode) == file_type


# --- Recovery: what is done to orphans ("What replay does", 6) -----------------------------------


def keys_by_inode(items) -> dict:
    keys = {}
    for key in sorted(items):
        keys.setdefault(key[0], []).append(key)
    return keys


def finish_orphans(replay):
    """Purges orphans without links, and finishes the cuts of the others."""
    items, keys = replay.items, keys_by_inode(replay.items)
    for orphan in keys.get(0, []):
        _, kind, number = orphan
        require(kind == ORPHAN and items[orphan] == b"", f"item {orphan} of inode 0")
        inode = items.get((number, INODE, 0))
        require(inode is not None, f"the orphan {number} has no inode")
        size, links = u64(inode, 16), u32(inode, 4)
        cut_from = blocks_of(size) if links else 0
        freed = sum(cut_extent(replay, key, cut_from) for key in keys[number] if key[1] == EXTENT)
        if links:
            items[number, INODE, 0] = inode[:24] + struct.pack("<Q", u64(inode, 24) - freed) + inode[32:]
        else:
            for key in keys[number]:
                items.pop(key, None)
            replay.pages.pop(number, None)
        del items[orphan]


def cut_extent(replay, key, cut_from) -> int:
    """Frees what of an extent lies at or behind a file block. Returns how much that is."""
    value, start = replay.items[key], key[2]
    physical, blocks, flags = struct.unpack_from("<QII", value)
    kept = min(max(cut_from - start, 0), blocks)
    if kept == blocks:
        return 0
    replay.set_allocated(physical + kept, blocks - kept, False)
    if kept:
        checksums = b"" if flags & UNWRITTEN else value[16:16 + 4 * kept]
        replay.items[key] = struct.pack("<QII", physical, kept, flags) + checksums
    else:
        del replay.items[key]
    return blocks - kept


# --- Items -------------------------------------------------------------------------------------


def read_inode(number, value) -> Inode:
    require(len(value) == INODE_BYTES, f"inode {number} has {len(value)} bytes")
    (mode, links, uid, gid, size, blocks, parent, _change, *times) = struct.unpack_from(
        INODE_LAYOUT, value)
    seconds, nanoseconds, (device, flags, subdirectories) = times[:4], times[4:8], times[8:]
    require(stat.S_IFMT(mode) in TYPES and mode < 1 << 16, f"inode {number}: mode {mode:o}")
    require(flags <= 1 and links < 1 << 31 and size < 1 << 63, f"inode {number}: flags, links or size")
    require(max(nanoseconds) < 10**9, f"inode {number}: nanoseconds")
    times_ns = tuple(s * 10**9 + ns for s, ns in zip(seconds, nanoseconds))
    # `new_encode_dev` of Linux.
    major, minor = (device >> 8) & 0xFFF, (device & 0xFF) | ((device >> 12) & 0xFFF00)
    return Inode(number, mode, links, uid, gid, size, blocks, parent, times_ns, (major, minor),
                 bool(flags), subdirectories)


def read_entry(offset, value) -> tuple:
    number, kind, length = struct.unpack_from("<QBB", value)
    name = value[10:]
    require(len(name) == length >= 1 and b"/" not in name and name not in (b".", b".."),
            f"the name of an entry: {name}")
    require(is_hash_of(offset, name), f"the hash of the name {name}")
    return name, number, kind


def read_xattr(offset, value) -> tuple:
    name_length, _, value_length = struct.unpack_from("<BBH", value)
    name, content = value[4:4 + name_length], value[4 + name_length:]
    require(1 <= len(name) == name_length and len(content) == value_length <= LONGEST_XATTR,
            f"lengths of the extended attribute {name}")
    require(is_hash_of(offset, name), f"the hash of the name {name}")
    return name, content


def is_hash_of(offset, name) -> bool:
    """Upper bits: the hash. Low bits: the collision index."""
    return b"\0" not in name and offset & ~0xFF == (digest(name) & 0x7FFF_FFFF_FFFF_FF00 or 256)


def read_extent(superblock, start, value) -> Extent:
    physical, blocks, flags = struct.unpack_from("<QII", value)
    unwritten = flags == UNWRITTEN
    require(flags <= 1, f"flags {flags} of an extent")
    require(1 <= blocks <= (MOST_UNWRITTEN_BLOCKS if unwritten else MOST_WRITTEN_BLOCKS),
            f"an extent of {blocks} blocks")
    require(len(value) == 16 + (0 if unwritten else 4 * blocks), "an extent of a wrong length")
    require(superblock.has_data(physical, blocks)
            and physical // GROUP_BLOCKS == (physical + blocks - 1) // GROUP_BLOCKS,
            f"an extent at {physical}+{blocks}")
    checksums = () if unwritten else struct.unpack_from(f"<{blocks}I", value, 16)
    return Extent(start, physical, blocks, unwritten, checksums)


def read_inodes(superblock, items) -> dict:
    """All inodes, each with what belongs to it."""
    inodes = {}
    for (number, kind, offset), value in sorted(items.items()):
        require(0 < number < NUMBER_LIMIT, f"inode number {number}")
        if kind == INODE:
            require(offset == 0, f"inode {number} has an offset")
            inodes[number] = read_inode(number, value)
            continue
        require(number in inodes, f"an item of inode {number}, which is not")
        inode = inodes[number]
        if kind == INLINE:
            require(offset == 0, f"inline data of inode {number} has an offset")
            inode.inline = value
        elif kind == ENTRY:
            inode.entries.append(read_entry(offset, value))
        elif kind == XATTR:
            name, content = read_xattr(offset, value)
            inode.xattrs[name] = content
        elif kind == EXTENT:
            inode.extents.append(read_extent(superblock, offset, value))
        else:
            require(False, f"an item of kind {kind} of inode {number}")
    return inodes


# --- Rules that hold between items ---------------------------------------------------------------


def check_inode(inode, pages, expect):
    number = inode.number
    ends = [extent.start + extent.blocks for extent in inode.extents]
    starts = [extent.start for extent in inode.extents]
    require(all(end <= start for end, start in zip(ends, starts[1:])), f"inode {number}: extents overlap")
    expect(inode.blocks == sum(extent.blocks for extent in inode.extents), f"inode {number}: blocks")
    expect(inode.has_inline == (inode.inline is not None), f"inode {number}: flag of inline data")
    if inode.is_a(stat.S_IFDIR):
        directories = sum(kind == stat.S_IFDIR >> 12 for _, _, kind in inode.entries)
        expect(inode.size == len(inode.entries), f"directory {number}: size")
        expect(inode.subdirectories == directories and inode.links == 2 + directories,
               f"directory {number}: subdirectories")
    else:
        expect(inode.parent == inode.subdirectories == 0, f"inode {number}: fields of directories")
        expect(not inode.entries, f"inode {number}: entries")
    if inode.is_a(stat.S_IFLNK):
        expect(inode.has_inline and len(inode.inline) == inode.size <= LONGEST_TARGET,
               f"symlink {number}: target")
    elif inode.has_inline:
        expect(inode.is_a(stat.S_IFREG) and len(inode.inline) <= MOST_INLINE_DATA,
               f"inode {number}: inline data")
        expect(len(inode.inline) <= inode.size or 0 in pages, f"inode {number}: inline data is longer")
        first = inode.extents[0] if inode.extents else None
        expect(first is None or first.start > 0 or first.unwritten, f"inode {number}: block 0 twice")


def check_allocation(superblock, bitmaps, nodes, inodes, expect):
    """Allocated is what is permanently so, and what nodes and extents have; nothing is twice."""
    used = [0] * superblock.group_count

    def use(block, count, what):
        for group, mask in runs_in_groups(block, count):
            expect(not used[group] & mask, f"{what}: blocks {block}+{count} are in use twice")
            used[group] |= mask

    total = superblock.total_blocks
    use(0, superblock.data_start, "metadata")
    use(superblock.data_end, MIRROR_BLOCKS, "mirrors")
    use(total, superblock.group_count * GROUP_BLOCKS - total, "behind the end")
    for node in nodes:
        use(node, NODE_BLOCKS, "node")
    for inode in inodes.values():
        for extent in inode.extents:
            use(extent.physical, extent.blocks, f"inode {inode.number}")
    for group, (actual, expected) in enumerate(zip(bitmaps, used)):
        unused = (actual & ~expected & GROUP_BITS).bit_count()
        unsafe = (expected & ~actual).bit_count()
        expect(actual == expected, f"group {group}: {unused} blocks are allocated and unused, "
                                   f"{unsafe} used and free")


# --- Contents and paths -----------------------------------------------------------------------


class Contents:
    """The data of files: the payload page if there is one, else the inline item, else the extent."""

    def __init__(self, device, pages):
        self.device, self.pages = device, pages

    def digest(self, inode) -> str:
        """`digest_of_pages`, or what a reader of the file hears."""
        try:
            return digest_of_pages(self._pages(inode))
        except ChecksumError:
            return "EIO"

    def _pages(self, inode):
        end = blocks_of(inode.size)
        numbers = {*self.pages.get(inode.number, {}), *([0] if inode.has_inline else [])}
        for extent in inode.extents:
            if not extent.unwritten:
                numbers.update(range(extent.start, extent.start + extent.blocks))
        for number in sorted(number for number in numbers if number < end):
            page = self._page(inode, number)
            behind = page[max(inode.size - number * BLOCK, 0):]
            self.device.expect(not any(behind), f"inode {inode.number}: bytes behind its end")
            yield number, page[:BLOCK - len(behind)] + bytes(len(behind))

    def _page(self, inode, number) -> bytes:
        logged = self.pages.get(inode.number, {}).get(number)
        if logged is not None:
            return logged
        if number == 0 and inode.has_inline:
            return inode.inline[:BLOCK].ljust(BLOCK, b"\0")
        place = bisect.bisect_right(inode.extents, number, key=lambda extent: extent.start) - 1
        extent = inode.extents[place]
        block = self.device.blocks(extent.physical + number - extent.start)
        if crc32c(block) != extent.checksums[number - extent.start]:
            raise ChecksumError
        return block


class ChecksumError(Exception):
    """A block of data is not what its extent says."""


def describe(inode, contents) -> dict:
    """What a mount shows of an inode, in the form of mounted.py."""
    atime, mtime, ctime, _ = inode.times_ns
    facts = {"ino": inode.number, "mode": inode.mode, "nlink": inode.links, "uid": inode.uid,
             "gid": inode.gid, "size": inode.size, "atime_ns": atime, "mtime_ns": mtime,
             "ctime_ns": ctime, "rdev": inode.device,
             "xattrs": {name.decode("latin-1"): hashlib.sha256(value).hexdigest()
                        for name, value in inode.xattrs.items()},
             "blocks": inode.blocks or int(inode.has_inline)}
    if inode.is_a(stat.S_IFLNK):
        facts["target"] = (inode.inline or b"").decode("latin-1")
    if inode.is_a(stat.S_IFREG):
        facts["content"] = contents.digest(inode)
    return facts


def walk(inodes, contents, expect) -> dict:
    """Facts by path, all names; and whether links and parents are right."""
    require(ROOT_DIRECTORY in inodes, "there is no root directory")
    facts = {"/": describe(inodes[ROOT_DIRECTORY], contents)}
    expect(inodes[ROOT_DIRECTORY].parent == ROOT_DIRECTORY, "the parent of the root directory")
    names, known, reached = {}, {}, {ROOT_DIRECTORY}
    waiting = [(ROOT_DIRECTORY, "/")]
    while waiting:
        directory, prefix = waiting.pop()
        for name, number, kind in inodes[directory].entries:
            path = prefix + name.decode("latin-1")
            require(number in inodes, f"{path!r} names inode {number}, which is not")
            inode = inodes[number]
            expect(inode.mode >> 12 == kind, f"{path!r}: type of the entry")
            names[number] = names.get(number, 0) + 1
            if number not in known:
                known[number] = describe(inode, contents)
            facts[path] = known[number]
            if inode.is_a(stat.S_IFDIR):
                require(number not in reached, f"{path!r}: the directory has two names")
                expect(inode.parent == directory, f"{path!r}: parent")
                reached.add(number)
                waiting.append((number, path + "/"))
    for number, inode in inodes.items():
        if inode.is_a(stat.S_IFDIR):
            expect(number in reached, f"directory {number} has no name")
        else:
            expect(inode.links == names.get(number, 0), f"inode {number}: links")
    return facts
