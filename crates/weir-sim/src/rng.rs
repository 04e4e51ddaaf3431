//! Seeded randomness: `xoshiro256**` seeded through `SplitMix64`.
//!
//! Owned by the simulator so that a seed printed today means the same run tomorrow, whatever
//! happens to a library's algorithm.

/// A seeded generator. The same seed gives the same sequence on every machine, for ever.
#[derive(Debug, Clone)]
pub struct Rng {
    state: [u64; 4],
}

/// One step of `SplitMix64`: a bijection that scatters its input.
pub const fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

impl Rng {
    /// A generator for `seed`.
    pub const fn new(seed: u64) -> Self {
        const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;
        let first = mix(seed);
        let second = mix(seed.wrapping_add(GAMMA));
        let third = mix(seed.wrapping_add(GAMMA.wrapping_mul(2)));
        let fourth = mix(seed.wrapping_add(GAMMA.wrapping_mul(3)));
        Self { state: [first, second, third, fourth] }
    }

    /// A generator for one purpose (`label`) within a seeded run, independent of how much was drawn
    /// elsewhere.
    pub const fn derived(seed: u64, label: u64) -> Self {
        Self::new(mix(seed) ^ mix(label.wrapping_mul(0xA24B_AED4_963E_E407)))
    }

    /// The next 64 bits.
    pub const fn next_u64(&mut self) -> u64 {
        let result = self.state[1].wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let shifted = self.state[1] << 17;
        self.state[2] ^= self.state[0];
        self.state[3] ^= self.state[1];
        self.state[1] ^= self.state[2];
        self.state[0] ^= self.state[3];
        self.state[2] ^= shifted;
        self.state[3] = self.state[3].rotate_left(45);
        result
    }

    /// A number below `bound`; 0 when `bound` is 0.
    pub const fn below(&mut self, bound: u64) -> u64 {
        ((self.next_u64() as u128 * bound as u128) >> 64) as u64
    }

    /// As [`Self::below`], for indices.
    pub const fn index(&mut self, length: usize) -> usize {
        self.below(length as u64) as usize
    }

    /// True once in `of` times.
    pub const fn one_in(&mut self, of: u64) -> bool {
        self.below(of) == 0
    }

    /// One of `items`; `None` when there are none.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        if items.is_empty() { None } else { items.get(self.index(items.len())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_of_a_seed_is_that_of_the_published_algorithm() {
        let mut rng = Rng::new(42);
        let first: Vec<u64> = (0..3).map(|_| rng.next_u64()).collect();
        assert_eq!(
            first,
            [1_546_998_764_402_558_742, 6_990_951_692_964_543_102, 12_544_586_762_248_559_009]
        );
    }

    #[test]
    fn numbers_below_a_bound_reach_every_value_and_no_other() {
        let mut rng = Rng::new(1);
        let mut seen = [false; 7];
        for _ in 0..200 {
            seen[rng.index(7)] = true;
        }
        assert_eq!(seen, [true; 7]);
        assert_eq!(rng.below(0), 0);
    }

    #[test]
    fn derived_generators_differ_by_label_and_by_seed() {
        let first = |seed, label| Rng::derived(seed, label).next_u64();
        assert_ne!(first(1, 1), first(1, 2));
        assert_ne!(first(1, 1), first(2, 1));
        assert_eq!(first(3, 4), first(3, 4));
    }
}
