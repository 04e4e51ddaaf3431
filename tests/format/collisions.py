"""Names whose hashes are equal but for the bits that the format does not use.

XXH3-64 of eight bytes is a bijection, so it can be undone: `names(seed)` gives several hundred names
that all want the same key.
"""

import struct

import xxhash

MASK = (1 << 64) - 1
PRIME = 0x9FB21C651E98DF25
INVERSE_PRIME = pow(PRIME, -1, 1 << 64)
SECRET_WORDS = (0x1CAD21F72C81017C, 0xDB979083E96DD4DE)  # bytes 8 to 24 of XXH3's secret
LENGTH = 8


def rotated(value, bits):
    return ((value << bits) | (value >> (64 - bits))) & MASK


def name_of_hash(wanted) -> bytes:
    value = wanted ^ (wanted >> 28) ^ (wanted >> 56)
    value = value * INVERSE_PRIME & MASK
    value ^= (value >> 35) + LENGTH
    value = value * INVERSE_PRIME & MASK
    for _ in range(63):  # x ^ rot(x, 49) ^ rot(x, 24) is undone by itself, done so often
        value = value ^ rotated(value, 49) ^ rotated(value, 24)
    value ^= SECRET_WORDS[0] ^ SECRET_WORDS[1]
    return struct.pack("<II", value >> 32, value & 0xFFFFFFFF)


def names(seed) -> list:
    upper = seed * 0x9E3779B97F4A7C15 & 0x7FFFFFFFFFFFFF00
    found = []
    for wanted in (upper | top | low for top in (0, 1 << 63) for low in range(256)):
        name = name_of_hash(wanted)
        if b"\0" not in name and b"/" not in name:
            assert xxhash.xxh3_64_intdigest(name) == wanted
            found.append(name)
    return found
