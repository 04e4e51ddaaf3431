"""Superblock, checkpoint root, bitmaps and tree of a volume, as docs/FORMAT.md has them.

Part of the second reader, see reader.py. What makes a volume unreadable raises `Corrupt`. What the
document says of a volume that is written, and a reader ignores, is noted as a remark.
"""

import mmap
import os
import struct

import crc32c as crc32c_library
import xxhash

# Head of the document, "Layout of a volume", "Allocation bitmap", "Tree node".
BLOCK = 4096
NODE_BLOCKS = 4
NODE_BYTES = NODE_BLOCKS * BLOCK
GROUP_BLOCKS = 32_256
GROUP_BITS = (1 << GROUP_BLOCKS) - 1
NUMBER_LIMIT = 1 << 62
MIRROR_BLOCKS = 16
LEAST_VOLUME_BLOCKS = 256
LEAST_LOG_BLOCKS = 64
HIGHEST_LEVEL = 12
LONGEST_VALUE = 4608
REMARKS_KEPT = 100

# "Items": the kinds.
INODE, INLINE, ENTRY, XATTR, EXTENT, ORPHAN = 1, 2, 3, 4, 5, 6


class Corrupt(Exception):
    """The volume is not what the document says; or it is, and says that it must be refused."""


def require(condition, what):
    if not condition:
        raise Corrupt(what)


def crc32c(data) -> int:
    return crc32c_library.crc32c(bytes(data))


def digest(data) -> int:
    return xxhash.xxh3_64_intdigest(bytes(data))


def own_checksum(data, offset=4) -> int:
    """The checksum of a structure that holds it at `offset`: computed with that field set to zero."""
    copy = bytearray(data)
    copy[offset:offset + 4] = bytes(4)
    return crc32c(copy)


def u16(data, offset) -> int:
    return struct.unpack_from("<H", data, offset)[0]


def u32(data, offset) -> int:
    return struct.unpack_from("<I", data, offset)[0]


def u64(data, offset) -> int:
    return struct.unpack_from("<Q", data, offset)[0]


def blocks_of(size_bytes) -> int:
    return -(-size_bytes // BLOCK)


class Device:
    """The file or device, and what there is to remark about what it holds."""

    def __init__(self, path):
        with open(path, "rb") as file:
            self.size = file.seek(0, os.SEEK_END)
            self.bytes = mmap.mmap(file.fileno(), self.size, prot=mmap.PROT_READ)
        self.remarks = []

    def blocks(self, start, count=1) -> bytes:
        require((start + count) * BLOCK <= self.size, f"blocks {start}+{count} are not on the device")
        return self.bytes[start * BLOCK:(start + count) * BLOCK]

    def expect(self, condition, what):
        if not condition and len(self.remarks) < REMARKS_KEPT:
            self.remarks.append(what)


# --- "Superblock" ------------------------------------------------------------------------------


class Superblock:
    FIELDS = {
        "version": (12, u32), "block_address": (32, u64), "generation": (40, u64),
        "block_size": (48, u32), "node_size": (52, u32), "total_blocks": (56, u64),
        "feature_compat": (64, u64), "feature_ro_compat": (72, u64), "feature_incompat": (80, u64),
        "root_start_block": (160, u64), "root_slot_blocks": (168, u32), "group_count": (172, u32),
        "bitmap_start_block": (176, u64), "log_start_block": (184, u64), "log_blocks": (192, u64),
        "root_block": (200, u64), "root_generation": (208, u64), "root_checksum": (216, u32),
        "root_bytes": (220, u32), "log_epoch": (224, u64), "epoch_first_sequence": (232, u64),
        "replay_position_blocks": (240, u64), "replay_sequence": (248, u64),
        "replay_prev_digest": (256, u64), "durable_lsn": (264, u64), "state": (272, u64),
        "durable_sequence": (280, u64), "replay_epoch": (288, u64),
    }

    def __init__(self, data):
        self.volume_id = data[16:32]
        self.label = data[96:160]
        self.reserved = data[296:]
        for name, (offset, read) in self.FIELDS.items():
            setattr(self, name, read(data, offset))

    def slots(self):
        """Where copies lie, and in which slot that is."""
        total = self.total_blocks
        return {0: 0, 8: 1, total - 16: 0, total - 8: 1}

    def is_in_place(self, block) -> bool:
        return (self.block_address == block and block in self.slots()
                and self.slots()[block] == self.generation % 2 and self.geometry_holds())

    def geometry_holds(self) -> bool:
        """Whether all places are those that T and L give ("Layout of a volume")."""
        total, log_blocks = self.total_blocks, self.log_blocks
        groups = -(-total // GROUP_BLOCKS)
        root_bytes = 512 + 24 * groups
        root_blocks = blocks_of(root_bytes)
        bitmaps = 16 + 2 * root_blocks
        return (self.block_size == BLOCK and self.node_size == NODE_BYTES
                and total >= LEAST_VOLUME_BLOCKS
                and LEAST_LOG_BLOCKS <= log_blocks <= max(total // 8, LEAST_LOG_BLOCKS)
                and self.group_count == groups and self.root_slot_blocks == root_blocks
                and self.root_bytes == root_bytes and self.root_start_block == 16
                and self.bitmap_start_block == bitmaps
                and self.log_start_block == bitmaps + 2 * groups
                and self.root_block in (16, 16 + root_blocks))

    @property
    def data_start(self):
        return self.log_start_block + self.log_blocks

    @property
    def data_end(self):
        return self.total_blocks - MIRROR_BLOCKS

    def has_data(self, block, count=1) -> bool:
        return self.data_start <= block and block + count <= self.data_end


NUMBERS = ("generation", "root_generation", "log_epoch", "epoch_first_sequence", "replay_sequence",
           "durable_lsn", "durable_sequence", "replay_epoch")


def read_copy(device, block):
    """The valid copy of the superblock at `block`, or None."""
    if (block + 1) * BLOCK > device.size:
        return None
    data = device.blocks(block)
    if data[:8] != b"WEIR-FS1" or u32(data, 8) != own_checksum(data, 8):
        return None
    copy = Superblock(data)
    require(copy.version <= 1, f"the superblock at {block} has version {copy.version}")
    require(copy.feature_incompat == 0, f"the superblock at {block} has an unknown incompat bit")
    return copy if copy.version == 1 and copy.is_in_place(block) else None


def may_be_outlived(device, best, valid) -> bool:
    """Whether a newer superblock may have been in use, of which no copy is left."""
    other = 1 - best.generation % 2
    if any(copy.generation % 2 == other for copy in valid):
        return False
    places = [block for block, slot in best.slots().items() if slot == other]
    is_new = best.generation == 1 and not any(any(device.blocks(block)) for block in places)
    return not is_new


def find_superblock(device) -> Superblock:
    slots = [copy for copy in map(lambda block: read_copy(device, block), (0, 8)) if copy]
    ends = {copy.total_blocks for copy in slots} or {device.size // BLOCK}
    mirrors = [read_copy(device, end - back) for end in ends for back in (16, 8) if end > 16]
    valid = slots + [copy for copy in mirrors if copy]
    require(valid, "there is no valid superblock")
    best = max(valid, key=lambda copy: copy.generation)
    best.may_be_outlived = may_be_outlived(device, best, valid)
    require(best.total_blocks * BLOCK <= device.size, "the device is smaller than the volume")
    for name in NUMBERS:
        require(getattr(best, name) < NUMBER_LIMIT, f"superblock: {name}")
    for copy in valid:
        device.expect(copy.volume_id == best.volume_id, "superblocks of several volumes")
        device.expect(not any(copy.reserved), "reserved bytes of a superblock")
    total = best.total_blocks
    for start, end in ((1, 8), (9, 16), (total - 15, total - 8), (total - 7, total)):
        device.expect(not any(device.blocks(start, end - start)), f"blocks {start}..{end} are used")
    label = best.label.rstrip(b"\0")
    device.expect(b"\0" not in label and label.decode(errors="replace").encode() == label, "label")
    return best


# --- "Checkpoint root" and "Allocation bitmap" -----------------------------------------------


class Root:
    """The checkpoint root: its counts, and its one tree's entry."""

    def __init__(self, device, superblock):
        address = superblock.root_block
        stored = device.blocks(address, superblock.root_slot_blocks)
        data = self.data = stored[:superblock.root_bytes]
        require(data[:4] == b"ROOT" and u32(data, 4) == own_checksum(data), "root: checksum")
        require(crc32c(data) == superblock.root_checksum, "root: checksum in the superblock")
        require(data[8:24] == superblock.volume_id and u64(data, 24) == address, "root: not its own")
        (self.generation, self.checkpoint_lsn, self.next_inode, self.inode_count,
         self.free_blocks, groups, trees) = struct.unpack_from("<5Q2I", data, 32)
        require(self.generation == superblock.root_generation < NUMBER_LIMIT, "root: generation")
        require(self.checkpoint_lsn < NUMBER_LIMIT, "root: checkpoint_lsn")
        require(groups == superblock.group_count and trees == 1, "root: counts")
        self.tree_block, self.tree_level = struct.unpack_from("<QB", data, 80)
        self.tree_checksum = u32(data, 92)
        self.tree_items, self.tree_nodes, self.tree_generation = struct.unpack_from("<3Q", data, 96)
        require(self.tree_level <= HIGHEST_LEVEL, "root: level of the tree")
        device.expect(not any(data[89:92]) and not any(data[120:512]), "reserved bytes of the root")


def read_bitmaps(device, superblock, root) -> list:
    """The bits of each group, as one number: bit b is block b of the group."""
    bitmaps = []
    for group in range(superblock.group_count):
        entry = 512 + 24 * group
        generation, free, checksum, slot = struct.unpack_from("<QIIB", root.data, entry)
        require(slot <= 1, f"group {group}: slot {slot}")
        device.expect(not any(root.data[entry + 17:entry + 24]), f"reserved bytes of group {group}")
        address = superblock.bitmap_start_block + slot * superblock.group_count + group
        data = device.blocks(address)
        require(data[:4] == b"BMAP" and u32(data, 4) == own_checksum(data) == checksum,
                f"bitmap {group}: checksum")
        require(data[8:24] == superblock.volume_id and u64(data, 24) == address
                and u32(data, 40) == group, f"bitmap {group}: not its own")
        require(u64(data, 32) == generation, f"bitmap {group}: generation")
        bits = int.from_bytes(data[64:], "little")
        require(GROUP_BLOCKS - bits.bit_count() == free == u32(data, 44), f"bitmap {group}: free")
        device.expect(not any(data[48:64]), f"reserved bytes of bitmap {group}")
        bitmaps.append(bits)
    require(count_free(bitmaps) == root.free_blocks, "root: free_blocks")
    return bitmaps


def count_free(bitmaps) -> int:
    return sum(GROUP_BLOCKS - bits.bit_count() for bits in bitmaps)


def runs_in_groups(block, count):
    """(group, mask) for each group that the blocks lie in."""
    while count:
        group, offset = divmod(block, GROUP_BLOCKS)
        here = min(count, GROUP_BLOCKS - offset)
        yield group, ((1 << here) - 1) << offset
        block, count = block + here, count - here


# --- "Tree node" --------------------------------------------------------------------------------


class Tree:
    """All items of the checkpoint's tree: key (inode, kind, offset), the order of keys, to value."""

    def __init__(self, device, superblock, root):
        self.device, self.superblock, self.root = device, superblock, root
        self.items, self.nodes = {}, []
        if root.tree_block:
            self._walk(root.tree_block, root.tree_level, root.tree_checksum, None, None)
            generation = u64(device.blocks(root.tree_block), 32)
            require(generation == root.tree_generation, "root: generation of the tree")
        require(len(self.items) == root.tree_items, "root: items of the tree")
        require(len(self.nodes) == root.tree_nodes, "root: nodes of the tree")

    def _walk(self, address, level, checksum, low, high):
        """The subtree of a node with keys from `low` to below `high`; None: no bound.

        The leftmost spine has no lower bound: its first keys may be larger than those below.
        """
        node = self._node(address, level, checksum)
        self.nodes.append(address)
        slots = self._leaf(node, address) if level == 0 else self._children(node)
        keys = [key for key, *_ in slots]
        require(keys and all(a < b for a, b in zip(keys, keys[1:])), f"node {address}: order")
        require(low is None or low <= keys[0], f"node {address}: below its parent's key")
        require(high is None or keys[-1] < high, f"node {address}: behind its parent's key")
        if level == 0:
            self.items.update(slots)
            return
        for place, (key, child, child_checksum) in enumerate(slots):
            child_low = None if low is None and place == 0 else key
            child_high = keys[place + 1] if place + 1 < len(keys) else high
            self._walk(child, level - 1, child_checksum, child_low, child_high)

    def _node(self, address, level, checksum) -> bytes:
        require(self.superblock.has_data(address, NODE_BLOCKS), f"node {address}: place")
        node = self.device.blocks(address, NODE_BLOCKS)
        require(node[:4] == b"NODE" and u32(node, 4) == own_checksum(node) == checksum,
                f"node {address}: checksum")
        require(node[8:24] == self.superblock.volume_id and u64(node, 24) == address,
                f"node {address}: not its own")
        require(u64(node, 32) <= self.root.generation, f"node {address}: generation")
        require(node[40] == level and node[41] == 0, f"node {address}: level or tree")
        self.device.expect(not any(node[48:64]), f"reserved bytes of node {address}")
        return node

    def _leaf(self, node, address):
        """(key, value) of each slot. Values are packed from the end, in the order of slots."""
        count, end, slots = u16(node, 42), NODE_BYTES, []
        require(64 + 24 * count <= NODE_BYTES - u32(node, 44), f"node {address}: too full")
        for at in range(64, 64 + 24 * count, 24):
            inode, offset, kind = struct.unpack_from("<QQB", node, at)
            value_offset, length = struct.unpack_from("<HH", node, at + 20)
            require(length <= LONGEST_VALUE and value_offset + length == end,
                    f"node {address}: values are not packed")
            self.device.expect(not any(node[at + 17:at + 20]), f"reserved bytes of node {address}")
            slots.append(((inode, kind, offset), node[value_offset:end]))
            end = value_offset
        require(NODE_BYTES - end == u32(node, 44), f"node {address}: value_bytes")
        return slots

    def _children(self, node):
        """(key, block, checksum) of each slot."""
        count, slots = u16(node, 42), []
        require(64 + 32 * count <= NODE_BYTES, "a node has too many slots")
        for at in range(64, 64 + 32 * count, 32):
            inode, offset, kind = struct.unpack_from("<QQB", node, at)
            self.device.expect(not any(node[at + 17:at + 20]), "reserved bytes of a node")
            slots.append(((inode, kind, offset), u64(node, at + 24), u32(node, at + 20)))
        return slots
