"""Logs that are damaged, or laid out anew as the format allows it, all of it decided by a random generator.

What is done has its right answer in docs/FORMAT.md, but for the odds of a checksum: the log ends
sooner, or the volume is refused.
"""

import os
import struct

from log import expectations
from volume import BLOCK, crc32c, digest, own_checksum

GAP_BLOCKS = 192  # where frames are looked for behind a failed write
GAPS = ((0, 1, 5, GAP_BLOCKS - 1, GAP_BLOCKS, GAP_BLOCKS + 1), (180, 4, 4, 2, 4, 1))


class Image:
    """A volume's file that is changed."""

    def __init__(self, path, superblock):
        self.file, self.superblock = open(path, "r+b"), superblock

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def read(self, block, count=1) -> bytes:
        return os.pread(self.file.fileno(), count * BLOCK, block * BLOCK)

    def write(self, block, data):
        os.pwrite(self.file.fileno(), data, block * BLOCK)

    def hurt(self, rng, block) -> str:
        """Damages one block; returns how."""
        kind = rng.choice(("zeroed", "a bit flipped", "torn", "random"))
        data = bytearray(self.read(block))
        if kind == "zeroed":
            data = bytes(BLOCK)
        elif kind == "a bit flipped":
            data[rng.randrange(BLOCK)] ^= 1 << rng.randrange(8)
        elif kind == "torn":
            sector = 512 * rng.randrange(8)
            data[sector:] = bytes(BLOCK - sector)
        else:
            data = rng.randbytes(BLOCK)
        self.write(block, data)
        return f"{kind} at block {block}"


def near_the_end(rng, frames):
    return frames[-1 - min(int(rng.expovariate(0.7)), len(frames) - 1)]


# --- Damage -------------------------------------------------------------------------------------


def hurt_frame(image, rng, frames):
    frame = near_the_end(rng, frames)
    block = rng.choice((0, rng.randrange(frame.total_blocks)))
    how = image.hurt(rng, image.superblock.log_start_block + frame.place + block)
    return f"frame {frame.sequence} of ..{frames[-1].sequence}: {how}"


def cut_log(image, rng, frames):
    """From somewhere in a frame on, nothing has been written."""
    frame = near_the_end(rng, frames)
    place = frame.place + rng.randrange(frame.total_blocks)
    count = min(300, image.superblock.log_blocks - place)
    image.write(image.superblock.log_start_block + place, bytes(count * BLOCK))
    return f"cut in frame {frame.sequence} of ..{frames[-1].sequence}"


def hurt_data(image, rng, frames):
    """A block that proves frames of the tail, or did until a later one has said that it need not."""
    durable = max(image.superblock.durable_lsn, *(frame.durable_lsn for frame in frames))
    proofs = {}
    for frame in frames:
        if frame.last_lsn > durable:
            for block, checksum in expectations(frame):
                if checksum is not None or block in proofs:
                    proofs[block] = checksum
    void = [block for block, checksum in proofs.items() if checksum is None]
    if not proofs:
        return hurt_frame(image, rng, frames)
    return image.hurt(rng, rng.choice(void if void and rng.random() < 0.5 else list(proofs)))


def hurt_superblocks(image, rng, _frames):
    places = rng.sample(sorted(image.superblock.slots()), rng.randint(1, 3))
    return ", ".join(f"superblock {image.hurt(rng, place)}" for place in places)


def hurt_behind_the_end(image, rng, frames):
    place = frames[-1].end % image.superblock.log_blocks
    return f"behind the log: {image.hurt(rng, image.superblock.log_start_block + place)}"


KINDS = (hurt_frame, cut_log, hurt_data, hurt_superblocks, hurt_behind_the_end)
WEIGHTS = (4, 2, 6, 2, 1)


def damage(path, reading, rng) -> str:
    """Damages the volume at `path`, of which `reading` was read. Returns what was done."""
    kinds = rng.choices(KINDS, WEIGHTS, k=rng.choice((1, 1, 2)))
    with Image(path, reading.superblock) as image:
        if not reading.frames:
            kinds = [hurt_superblocks]
        return "; ".join(kind(image, rng, reading.frames) for kind in kinds)


# --- A log laid out anew --------------------------------------------------------------------------


class Relaid:
    """The frames of a log at other places of the ring, as failed writes, its end and older epochs
    make it, with another part of it known as durable."""

    def __init__(self, image, reading, rng):
        self.image, self.rng, self.frames = image, rng, reading.frames
        self.superblock = reading.superblock
        self.stored = [self._stored(frame) for frame in self.frames]
        first, ring = reading.superblock.replay_sequence, reading.superblock.log_blocks
        total = sum(frame.total_blocks for frame in self.frames)
        self.start = rng.choice((0, rng.randrange(ring - 8), max(0, ring - rng.randint(1, total))))
        self.prev_digest = self.first_prev_digest = rng.getrandbits(64)
        self.durable_frames = rng.choice((0, 0, 0, rng.randrange(len(self.frames))))
        self.durable_lsn = max(reading.root.checkpoint_lsn,
                               self.frames[self.durable_frames - 1].last_lsn if self.durable_frames else 0)
        self.epoch = reading.superblock.log_epoch
        self.new_epoch_from = first
        if rng.random() < 0.4 and self.epoch > 1:
            self.new_epoch_from += rng.randrange(len(self.frames) + 1)
        self.replay_epoch = rng.choice((0, self.epoch - 1)) if self.new_epoch_from > first else 0
        self.chain_left = 0

    def _stored(self, frame):
        meta_blocks = frame.total_blocks - frame.payload_blocks
        start = self.superblock.log_start_block + frame.place
        return self.image.read(start, meta_blocks), self.image.read(start + meta_blocks, frame.payload_blocks)

    def lay(self):
        ring, rng = self.superblock.log_blocks, self.rng
        self.image.write(self.superblock.log_start_block, bytes(ring * BLOCK))
        place, room = self.start, ring
        for number, frame in enumerate(self.frames):
            gap = rng.choices(*GAPS)[0]
            at = place + gap
            if at + frame.total_blocks > ring:
                at = rng.choice((0, 0, 0, 1, GAP_BLOCKS))
            room -= (at - place) % ring + 2 * frame.total_blocks
            if room < 0 or at + frame.total_blocks > ring:
                break
            place = self._write(number, frame, at)
        self._write_superblocks()

    def _write(self, number, frame, at) -> int:
        """Returns where the next frame is to be looked for. Some frames are there twice."""
        meta = self._header(number, frame)
        self._put(meta, number, at)
        end, self.prev_digest = at + frame.total_blocks, digest(meta)
        if self.rng.random() < 0.06 and end + frame.total_blocks <= self.superblock.log_blocks:
            second = bytearray(meta)
            self._put(second, number, end)
            end += frame.total_blocks
            self.prev_digest = self.rng.choice((self.prev_digest, digest(second)))
        return end

    def _header(self, number, frame) -> bytearray:
        sequence = self.superblock.replay_sequence + number
        is_old = sequence < self.new_epoch_from
        durable_lsn = self.durable_lsn if number >= self.durable_frames else min(
            frame.durable_lsn, self.durable_lsn)
        meta = bytearray(frame.meta)
        epoch = self.epoch - is_old
        if self.rng.random() < 0.01:
            epoch = self.rng.choice((self.epoch - 1, self.epoch + 1, max(self.epoch - 2, 0)))
        struct.pack_into("<Q", meta, 24, epoch)
        struct.pack_into("<Q", meta, 64, durable_lsn)
        struct.pack_into("<Q", meta, 72, self.prev_digest)
        if number >= self.durable_frames:
            if self.chain_left:
                self.chain_left -= 1
            elif self.rng.random() < 0.08:
                self.chain_left = self.rng.randrange(1, 6)
            struct.pack_into("<I", meta, 104, 1 if self.chain_left else 0)
        return meta

    def _put(self, meta, number, at):
        """Writes a frame to a place, with place and checksum in its header."""
        struct.pack_into("<Q", meta, 80, at)
        struct.pack_into("<I", meta, 4, own_checksum(meta))
        stored_meta, payload = self.stored[number]
        self.image.write(self.superblock.log_start_block + at,
                         bytes(meta).ljust(len(stored_meta), b"\0") + payload)

    def _write_superblocks(self):
        superblock = self.superblock
        copy = bytearray(self.image.read(superblock.block_address))
        for offset, value in ((232, self.new_epoch_from), (240, self.start),
                              (256, self.first_prev_digest), (264, self.durable_lsn),
                              (280, self.rng.choice((0, superblock.replay_sequence + self.durable_frames))),
                              (288, self.replay_epoch)):
            struct.pack_into("<Q", copy, offset, value)
        for place, slot in superblock.slots().items():
            if slot == superblock.generation % 2:
                struct.pack_into("<Q", copy, 32, place)
                copy[8:12] = bytes(4)
                struct.pack_into("<I", copy, 8, crc32c(copy))
                self.image.write(place, copy)

    def __str__(self):
        return (f"laid out anew from place {self.start}, {self.durable_frames} of "
                f"{len(self.frames)} frames durable, new epoch from {self.new_epoch_from}")


def lay_anew(path, reading, rng) -> str:
    with Image(path, reading.superblock) as image:
        relaid = Relaid(image, reading, rng)
        relaid.lay()
        return str(relaid)
