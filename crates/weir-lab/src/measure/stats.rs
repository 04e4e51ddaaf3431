//! Median, spread and paired ratios over the rounds of a run.

use serde::{Deserialize, Serialize};

/// The number of a round, from one on, and the value that it gave.
pub type OfRound = (u64, f64);

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

    /// The spread of `mine / base`, each with the number of its round: only values of the same round are compared, because the
    /// machine drifts between rounds. A round in which one of the two has no value, or the base is zero, has no ratio; `None` when none has.
    pub fn of_ratios(mine: &[OfRound], base: &[OfRound]) -> Option<Spread> {
        let base_of = |round| base.iter().find(|(r, b)| *r == round && *b != 0.0).map(|(_, b)| *b);
        let ratios: Vec<f64> =
            mine.iter().filter_map(|&(round, value)| Some(value / base_of(round)?)).collect();
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
        let all = |values: &[f64]| -> Vec<OfRound> { (1..).zip(values.iter().copied()).collect() };
        let of = |mine: &[f64], base: &[f64]| Spread::of_ratios(&all(mine), &all(base));
        // A drift that doubles both sides from round to round leaves the ratio exact.
        let r = of(&[2.0, 4.0, 8.0], &[1.0, 2.0, 4.0]).expect("three pairs");
        assert_eq!(r, Spread { median: 2.0, min: 2.0, max: 2.0 });
        assert_eq!(of(&[1.0], &[0.0]), None);
        assert_eq!(of(&[1.0, 6.0], &[0.0, 2.0]).map(|s| s.median), Some(3.0));
        assert_eq!(of(&[1.0, 2.0], &[1.0]).map(|s| s.max), Some(1.0));
        // A round that one side lacks is left out, and pairs no values of different rounds.
        let lacking = Spread::of_ratios(&[(2, 4.0), (3, 8.0)], &all(&[1.0, 2.0, 4.0]));
        assert_eq!(lacking, Some(Spread { median: 2.0, min: 2.0, max: 2.0 }));
        assert_eq!(Spread::of_ratios(&[(1, 4.0)], &[(2, 2.0)]), None);
    }
}
