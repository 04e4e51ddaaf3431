//! A small deterministic random number generator: the same seed gives the same load everywhere.

/// xoshiro256++ seeded through splitmix64.
#[derive(Clone, Debug)]
pub struct Rng {
    s: [u64; 4],
}

impl Rng {
    /// A generator for `seed`; `stream` separates threads.
    pub fn new(seed: u64, stream: u64) -> Self {
        let mut x = seed ^ stream.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut next = || {
            x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = x;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^ (z >> 31)
        };
        Rng { s: [next(), next(), next(), next()] }
    }

    /// Any 64 bits.
    pub fn draw(&mut self) -> u64 {
        let s = &mut self.s;
        let out = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        out
    }

    /// Uniform below `n` (0 when `n` is 0).
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.draw()) * u128::from(n)) >> 64) as u64
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.draw() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Log-uniform between `low` and `high`, both included.
    pub fn log_uniform(&mut self, low: u64, high: u64) -> u64 {
        let (l, h) = ((low as f64).ln(), (high as f64).ln());
        ((l + (h - l) * self.unit()).exp().round() as u64).clamp(low, high)
    }
}

/// Zipf-distributed ranks below `n` with exponent near one, by inverting the continuous
/// approximation of the distribution: exact enough to decide what a cache sees as hot.
#[derive(Clone, Debug)]
pub struct Zipf {
    n: f64,
    one_minus_s: f64,
}

impl Zipf {
    /// Ranks 0 to `n - 1`, exponent `s` (not 1).
    pub fn new(n: u64, s: f64) -> Self {
        Zipf { n: n.max(1) as f64, one_minus_s: 1.0 - s }
    }

    /// A rank; small ones are likely.
    pub fn sample(&self, rng: &mut Rng) -> u64 {
        let top = (self.n + 1.0).powf(self.one_minus_s);
        let x = (1.0 + rng.unit() * (top - 1.0)).powf(1.0 / self.one_minus_s);
        ((x - 1.0) as u64).min(self.n as u64 - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_seed_same_numbers_other_stream_others() {
        let take = |seed, stream| {
            let mut r = Rng::new(seed, stream);
            [r.draw(), r.draw(), r.draw()]
        };
        assert_eq!(take(1, 2), take(1, 2));
        assert_ne!(take(1, 2), take(1, 3));
        assert_ne!(take(1, 2), take(2, 2));
    }

    #[test]
    fn below_stays_below_and_covers() {
        let mut r = Rng::new(7, 0);
        let mut seen = [0_u32; 10];
        for _ in 0..10_000 {
            seen[r.below(10) as usize] += 1;
        }
        assert!(seen.iter().all(|&n| (800..1200).contains(&n)), "{seen:?}");
        assert_eq!(r.below(0), 0);
    }

    #[test]
    fn log_uniform_halves_fall_around_the_geometric_mean() {
        let mut r = Rng::new(7, 1);
        let low = (0..10_000).filter(|_| r.log_uniform(1, 256) <= 16).count();
        assert!((4500..5800).contains(&low), "{low}");
    }

    #[test]
    fn zipf_is_skewed_and_in_range() {
        let z = Zipf::new(10_000, 0.99);
        let mut r = Rng::new(3, 0);
        let ranks: Vec<u64> = (0..20_000).map(|_| z.sample(&mut r)).collect();
        assert!(ranks.iter().all(|&k| k < 10_000));
        let hot = ranks.iter().filter(|&&k| k < 1000).count() as f64 / 20_000.0;
        assert!((0.65..0.85).contains(&hot), "a tenth of the ranks gets {hot}");
    }
}
