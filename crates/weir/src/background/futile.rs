//! When to stop waiting for writeback and checkpoints: where all of it fails, whoever waits at a limit hears why, and does not wait for ever.
//! Pure: the caller counts, and waits.

/// So often something has failed, and nothing got better, before that is said.
const LOOKS: u32 = 3;

/// What somebody has seen who waits.
#[derive(Debug)]
pub struct Futile {
    failures: u64,
    looks: u32,
}

impl Futile {
    /// Begins to wait when `failures` were counted.
    pub const fn new(failures: u64) -> Self {
        Self { failures, looks: 0 }
    }

    /// After some waiting: `failures` are counted now, and `is_better` if pages became clean or space free meanwhile. True: there is nothing
    /// to wait for.
    pub fn look(&mut self, failures: u64, is_better: bool) -> bool {
        let fails = failures > self.failures;
        self.failures = failures;
        if is_better {
            self.looks = 0;
        } else if fails {
            self.looks += 1;
        }
        self.looks >= LOOKS
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn only_failures_without_any_progress_are_futile() {
        // What was seen at each look: something failed, something got better.
        let (fails, slow, better, both) =
            ((true, false), (false, false), (false, true), (true, true));
        let looks_until = |seen: &[(bool, bool)]| {
            let (mut futile, mut failures) = (Futile::new(7), 7);
            seen.iter().position(|&(fails, is_better)| {
                failures += u64::from(fails);
                futile.look(failures, is_better)
            })
        };
        assert_eq!(looks_until(&[fails; 5]), Some(2));
        assert_eq!(looks_until(&[slow; 100]), None);
        assert_eq!(looks_until(&[both; 100]), None);
        assert_eq!(looks_until(&[fails, slow, slow, fails, slow, fails]), Some(5));
        assert_eq!(looks_until(&[fails, fails, better, fails, fails, fails]), Some(5));
    }
}
