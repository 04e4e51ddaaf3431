"""The log of a volume, and what replay makes of it: "Log" and "What replay does" of docs/FORMAT.md.

Part of the second reader, see reader.py.
"""

import functools
import struct
from dataclasses import dataclass

from volume import (BLOCK, EXTENT, INODE, LONGEST_VALUE, NUMBER_LIMIT, ORPHAN, Corrupt, blocks_of,
                    crc32c, digest, own_checksum, require, runs_in_groups, u16, u32, u64)

HEADER_BYTES = 128
MOST_FRAME_BLOCKS = 1024
SEARCH_BLOCKS = 192
LAST_FILE_BLOCK = 1 << 51
INODE_LIMIT = 1 << 61
LONGEST_WRITTEN_EXTENT = 256

# Kinds of records.
PUT, DELETE, ALLOC, FREE, PAYLOAD, WROTE, HOME, NEXT_INODE, SETTLED = range(1, 10)
FIXED_LENGTHS = {DELETE: 17, ALLOC: 12, FREE: 12, PAYLOAD: 32, HOME: 28, NEXT_INODE: 8, SETTLED: 24}
LAYOUTS = {ALLOC: "<QI", FREE: "<QI", PAYLOAD: "<QQQII", HOME: "<QQQI", NEXT_INODE: "<Q",
           SETTLED: "<QQQ"}


@dataclass
class Frame:
    """A frame whose header holds."""

    place: int
    meta: bytes
    epoch: int
    sequence: int
    first_lsn: int
    last_lsn: int
    durable_lsn: int
    prev_digest: int
    payload_blocks: int
    total_blocks: int
    goes_on: bool  # the batch, in the next frame
    payload_start: int  # block of the volume
    records: list = None

    @property
    def end(self):
        return self.place + self.total_blocks

    @functools.cached_property
    def digest(self):
        return digest(self.meta)


def read_frame(device, superblock, place):
    """The frame at a place of the ring, if magic, checksum, volume, place, lengths and numbers hold."""
    start = (superblock.log_start_block + place) * BLOCK
    header = device.bytes[start:start + HEADER_BYTES]
    if header[:4] != b"FRAM":
        return None
    (epoch, sequence, first_lsn, last_lsn, _transaction, durable_lsn, prev_digest,
     own_place) = struct.unpack_from("<8Q", header, 24)
    meta_bytes, _record_count, payload_blocks, total_blocks, flags = struct.unpack_from(
        "<5I", header, 88)
    most_blocks = min(MOST_FRAME_BLOCKS, superblock.log_blocks // 4)
    if (meta_bytes < HEADER_BYTES or total_blocks != blocks_of(meta_bytes) + payload_blocks
            or total_blocks > most_blocks or place + total_blocks > superblock.log_blocks
            or own_place != place or header[8:24] != superblock.volume_id
            or first_lsn > last_lsn
            or max(epoch, sequence, last_lsn, durable_lsn) >= NUMBER_LIMIT):
        return None
    meta = device.bytes[start:start + meta_bytes]
    if own_checksum(meta) != u32(meta, 4):
        return None
    payload_start = superblock.log_start_block + place + blocks_of(meta_bytes)
    padding = device.bytes[start + meta_bytes:payload_start * BLOCK]
    device.expect(not any(padding) and not any(header[108:]), f"reserved bytes of the frame at {place}")
    return Frame(place, meta, epoch, sequence, first_lsn, last_lsn, durable_lsn, prev_digest,
                 payload_blocks, total_blocks, bool(flags & 1), payload_start)


# --- Records ------------------------------------------------------------------------------------


def read_records(frame) -> list:
    """Tuples of kind and fields. Records of an intact frame that make no sense are an error."""
    records, at, meta = [], HEADER_BYTES, frame.meta
    while at < len(meta):
        require(at + 4 <= len(meta), "a record ends behind its frame")
        kind, length = meta[at], u16(meta, at + 2)
        at += 4
        require(at + length <= len(meta), "a record ends behind its frame")
        records.append(read_record(kind, meta[at:at + length], frame))
        at += length
    return records


def read_record(kind, body, frame) -> tuple:
    require(PUT <= kind <= SETTLED, f"a record of kind {kind}")
    require(FIXED_LENGTHS.get(kind, len(body)) == len(body), f"record {kind} of {len(body)} bytes")
    if kind == PUT:
        require(17 <= len(body) <= 17 + LONGEST_VALUE, f"a put of {len(body)} bytes")
        return kind, read_key(body), body[17:]
    if kind == DELETE:
        return kind, read_key(body)
    if kind == WROTE:
        require(len(body) >= 10 and len(body) == 10 + 4 * u16(body, 8), "a wrote of a wrong length")
        return kind, u64(body, 0), struct.unpack_from(f"<{u16(body, 8)}I", body, 10)
    record = (kind, *struct.unpack(LAYOUTS[kind], body))
    if kind in (PAYLOAD, HOME, SETTLED):
        require(record[2] <= LAST_FILE_BLOCK, "a file block that is too large")
    if kind == PAYLOAD:
        require(record[4] < frame.payload_blocks, "a payload index that is not there")
    return record


def read_key(body) -> tuple:
    inode, offset, kind = struct.unpack_from("<QQB", body)
    require(INODE <= kind <= ORPHAN, f"a key of kind {kind}")
    return inode, kind, offset


# --- "What replay does", 1: finding frames -------------------------------------------------------


class Scan:
    def __init__(self, device, superblock):
        self.device, self.superblock = device, superblock
        self.read = functools.cache(functools.partial(read_frame, device, superblock))

    def frames(self) -> list:
        superblock, found = self.superblock, []
        copies = self._copies(superblock.replay_position_blocks, superblock.replay_sequence,
                              superblock.replay_prev_digest)
        while copies:
            frame, copies = self._choose(copies)
            last = found[-1].last_lsn if found else 0
            require(frame.first_lsn > last, f"LSNs of frame {frame.sequence} are not behind {last}")
            found.append(frame)
        return found

    def _choose(self, copies):
        """The first copy that is continued, else the first; and what continues it."""
        for frame in copies:
            following = self._copies(frame.end, frame.sequence + 1, frame.digest)
            if following:
                return frame, following
        return copies[0], []

    def _copies(self, place, sequence, prev_digest) -> list:
        """All frames that may follow one that has ended at `place`, in the order of looking."""
        ring_end = self.superblock.log_blocks
        behind = range(place, min(place + SEARCH_BLOCKS + 1, ring_end))
        wrapped = range(0, min(SEARCH_BLOCKS + 1, place))
        frames = (self.read(at) for at in (*behind, *wrapped))
        return [frame for frame in frames
                if frame and frame.sequence == sequence and frame.prev_digest == prev_digest
                and self._is_of_its_epoch(frame) and self._is_intact(frame)]

    def _is_of_its_epoch(self, frame) -> bool:
        superblock = self.superblock
        if frame.sequence >= superblock.epoch_first_sequence:
            return frame.epoch == superblock.log_epoch
        return (frame.epoch < superblock.log_epoch
                and superblock.replay_epoch in (0, frame.epoch))

    def _is_intact(self, frame) -> bool:
        """Also its payload. Notes its records."""
        frame.records = read_records(frame)
        return all(crc32c(self.device.blocks(frame.payload_start + record[4])) == record[5]
                   for record in frame.records if record[0] == PAYLOAD)


# --- 2 to 4: what of them counts -----------------------------------------------------------------


def kept_frames(device, superblock, root, frames) -> list:
    durable = max([superblock.durable_lsn, *(frame.durable_lsn for frame in frames)])
    proven = sum(frame.last_lsn <= durable for frame in frames)
    holds = [True] * (proven + 1) + tail_holds(device, superblock, frames[proven:])
    kept = max(count for count in range(len(frames) + 1)
               if holds[count] and (count == 0 or not frames[count - 1].goes_on))
    end = superblock.replay_sequence + kept
    last_lsn = max(root.checkpoint_lsn, frames[kept - 1].last_lsn if kept else 0)
    require(end >= superblock.durable_sequence, f"the log ends at frame {end}, before what is durable")
    require(last_lsn >= durable, f"the log ends at {last_lsn}, before {durable}, which is durable")
    if superblock.may_be_outlived:
        for place in range(superblock.log_blocks):
            frame = read_frame(device, superblock, place)
            require(not frame or frame.epoch <= superblock.log_epoch and frame.durable_lsn <= last_lsn,
                    f"the frame at {place} is of a newer superblock, of which no copy is left")
    return frames[:kept]


def tail_holds(device, superblock, tail) -> list:
    """For each frame: whether the last expectation of every block up to it holds."""
    failing, holds = set(), []
    for frame in tail:
        for block, checksum in expectations(frame):
            require(block < superblock.total_blocks, f"frame {frame.sequence} names block {block}")
            if checksum is None or crc32c(device.blocks(block)) == checksum:
                failing.discard(block)
            else:
                failing.add(block)
        holds.append(not failing)
    return holds


def expectations(frame):
    """(block, checksum) in order; None: anything goes."""
    for kind, *fields in frame.records:
        if kind == WROTE:
            yield from ((fields[0] + place, crc) for place, crc in enumerate(fields[1]))
        elif kind == HOME:
            yield fields[2], fields[3]
        elif kind == PAYLOAD and fields[2] != 0:
            yield fields[2], None
        elif kind == FREE:
            yield from ((block, None) for block in range(fields[0], fields[0] + fields[1]))


# --- 5: applying -----------------------------------------------------------------------------------


class Replay:
    """Items and bitmaps of the checkpoint become those at the end of the log."""

    def __init__(self, device, superblock, root, items, bitmaps):
        self.device, self.superblock = device, superblock
        self.checkpoint_lsn, self.next_inode = root.checkpoint_lsn, root.next_inode
        self.items, self.bitmaps = items, bitmaps
        self.pages = {}  # inode -> file block -> content, where the log holds it

    def apply(self, frames):
        for frame in frames:
            is_new = frame.last_lsn > self.checkpoint_lsn
            self.device.expect(not is_new or frame.first_lsn > self.checkpoint_lsn,
                               f"frame {frame.sequence} has LSNs of both sides of the checkpoint")
            for record in frame.records:
                self._apply_to_pages(frame, *record)
                if is_new:
                    self._apply(*record)
        self.pages = {inode: pages for inode, pages in self.pages.items()
                      if pages and (inode, INODE, 0) in self.items}

    def _apply_to_pages(self, frame, kind, *fields):
        if kind == PAYLOAD:
            inode, page, _home, index, _crc = fields
            self.pages.setdefault(inode, {})[page] = self.device.blocks(frame.payload_start + index)
        elif kind == HOME:
            self.pages.get(fields[0], {}).pop(fields[1], None)
        elif kind == SETTLED:
            inode, start, count = fields
            pages = self.pages.get(inode, {})
            for page in [page for page in pages if start <= page < start + count]:
                del pages[page]
        elif kind == DELETE and fields[0][1] == INODE:
            self.pages.pop(fields[0][0], None)

    def _apply(self, kind, *fields):
        if kind in (PUT, DELETE):
            inode = fields[0][0]
        else:
            inode = fields[0] if kind in (PAYLOAD, HOME, SETTLED) else 0
        require(inode < INODE_LIMIT, f"inode number {inode}")
        if kind == PUT:
            self.items[fields[0]] = fields[1]
            self.next_inode = max(self.next_inode, inode + 1)
        elif kind == DELETE:
            self.device.expect(fields[0] in self.items, f"item {fields[0]} is deleted, and is not")
            self.items.pop(fields[0], None)
        elif kind in (ALLOC, FREE):
            self.set_allocated(*fields, kind == ALLOC)
        elif kind == HOME:
            self._note_home(*fields)
        elif kind == NEXT_INODE:
            self.next_inode = max(self.next_inode, fields[0])

    def set_allocated(self, block, count, allocated):
        require(self.superblock.has_data(block, count), f"blocks {block}+{count} are no data")
        for group, mask in runs_in_groups(block, count):
            before = self.bitmaps[group] & mask
            self.device.expect(before == (0 if allocated else mask),
                               f"blocks {block}+{count} are {'allocated' if allocated else 'freed'} twice")
            self.bitmaps[group] = (self.bitmaps[group] & ~mask) | (mask if allocated else 0)

    def _note_home(self, inode, page, block, checksum):
        """The checksum of a page in the extent that maps it."""
        for start in range(page, max(-1, page - LONGEST_WRITTEN_EXTENT), -1):
            value = self.items.get((inode, EXTENT, start))
            if value is None:
                continue
            physical, length, flags = struct.unpack_from("<QII", value)
            if page - start >= length or flags & 1:
                break
            self.device.expect(physical + page - start == block,
                               f"page {page} of inode {inode} goes home to {block}, not its extent's")
            changed = bytearray(value)
            struct.pack_into("<I", changed, 16 + 4 * (page - start), checksum)
            self.items[inode, EXTENT, start] = bytes(changed)
            return
        raise Corrupt(f"page {page} of inode {inode} goes home, and no written extent maps it")
