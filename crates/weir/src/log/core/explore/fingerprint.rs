//! What the explorer keeps of a state that it has seen.

use std::hash::{Hash, Hasher};

/// Hashes a state into 128 bits: what is written is packed, small numbers into a byte each, and each eight bytes go through
/// two multiplications.
struct Fingerprint {
    low: u64,
    high: u64,
    packed: u64,
    bytes: u32,
}

impl Fingerprint {
    #[inline]
    fn byte(&mut self, byte: u8) {
        self.packed = self.packed << 8 | u64::from(byte);
        self.bytes += 1;
        if self.bytes.is_multiple_of(8) {
            self.mix();
        }
    }

    #[inline]
    fn mix(&mut self) {
        let fold = |number: u64, factor: u64| {
            let product = u128::from(number) * u128::from(factor);
            product as u64 ^ (product >> 64) as u64
        };
        self.low = fold(self.low ^ self.packed, 0x9e37_79b9_7f4a_7c15);
        self.high = fold(self.high ^ self.packed.rotate_left(29), 0xd6e8_feb8_6659_fd93);
        self.packed = 0;
    }

    fn finish(mut self) -> u128 {
        self.packed ^= u64::from(self.bytes) << 32;
        self.mix();
        self.packed = self.high;
        self.mix();
        u128::from(self.low) << 64 | u128::from(self.high)
    }
}

impl Hasher for Fingerprint {
    fn finish(&self) -> u64 {
        self.low ^ self.high
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.byte(byte);
        }
    }
    fn write_u8(&mut self, number: u8) {
        self.byte(number);
    }
    #[inline]
    fn write_u64(&mut self, number: u64) {
        if let Ok(small) = u8::try_from(number)
            && small < u8::MAX
        {
            return self.byte(small);
        }
        self.byte(u8::MAX);
        self.write(&number.to_le_bytes());
    }
    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }
    fn write_isize(&mut self, number: isize) {
        self.write_u64(number as u64);
    }
}

/// 128 bits for a state.
pub(super) fn fingerprint(world: &impl Hash) -> u128 {
    let (low, high) = (0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344);
    let mut hasher = Fingerprint { low, high, packed: 0, bytes: 0 };
    world.hash(&mut hasher);
    Fingerprint::finish(hasher)
}

/// The hash of what is a hash already.
#[derive(Default)]
pub(super) struct Taken(u64);

impl Hasher for Taken {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, _: &[u8]) {
        unreachable!("only fingerprints are kept");
    }
    fn write_u128(&mut self, number: u128) {
        self.0 = number as u64;
    }
}
