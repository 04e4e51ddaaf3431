//! Median, spread and paired ratios over the rounds of a run.

use serde::{Deserialize, Serialize};

/// Median, minimum and maximum.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The middle value; the mean of the two middle ones when their number is even.
    pub median: f64,
    /// The smallest value.
    pub min: f64,
    /// The largest value.
    pub max: f64,
}

impl Spread {
    /// The spread of `values`; `None` when there are none.
    pub fn of(values: &[f64]) -> Option<Spread> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (first, last) = (*sorted.first()?, *sorted.last()?);
        let mid = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 {
            sorted[mid]
        } else {
            f64::midpoint(sorted[mid - 1], sorted[mid])
        };
        Some(Spread { median, min: first, max: last })
    }

    /// The spread of `mine[i] / base[i]`: only values of the same round are compared, because the
    /// machine drifts between rounds. `None` when no round has both, or the base is zero.
    pub fn of_ratios(mine: &[f64], base: &[f64]) -> Option<Spread> {
        let ratios: Vec<f64> =
            mine.iter().zip(base).filter(|(_, b)| **b != 0.0).map(|(m, b)| m / b).collect();
        Spread::of(&ratios)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_and_even_counts() {
        assert_eq!(Spread::of(&[3.0, 1.0, 2.0]), Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
        assert_eq!(Spread::of(&[4.0, 1.0]).map(|s| s.median), Some(2.5));
        assert_eq!(Spread::of(&[]), None);
    }

    #[test]
    fn ratios_pair_rounds_and_ignore_a_zero_base() {
        // A drift that doubles both sides from round to round leaves the ratio exact.
        let r = Spread::of_ratios(&[2.0, 4.0, 8.0], &[1.0, 2.0, 4.0]).expect("three pairs");
        assert_eq!(r, Spread { median: 2.0, min: 2.0, max: 2.0 });
        assert_eq!(Spread::of_ratios(&[1.0], &[0.0]), None);
        assert_eq!(Spread::of_ratios(&[1.0, 6.0], &[0.0, 2.0]).map(|s| s.median), Some(3.0));
        assert_eq!(Spread::of_ratios(&[1.0, 2.0], &[1.0]).map(|s| s.max), Some(1.0));
    }
}
