//! Faults for random workloads.

use crate::fault::{Fault, FaultKind, FaultPlan};
use crate::rng::Rng;
use crate::system::Settings;

/// A plan drawn from `rng`, and whether the disk lies in it.
///
/// Lies are told about everything but the log ring: that the last frame of the log was damaged
/// after it was flushed cannot be told from a crash before the flush.
pub fn draw(settings: &Settings, rng: &mut Rng) -> (FaultPlan, bool) {
    let silent = rng.one_in(3);
    let magnitude = rng.below(8);
    let after = rng.below(1 << magnitude);
    let distance_blocks = 1 + rng.below(settings.volume_blocks / 2) as i64;
    let kind = if silent {
        match rng.below(4) {
            0..=1 => FaultKind::BitRot { bit: rng.below(32_768) as u32 },
            2 => FaultKind::MisdirectedRead { distance_blocks },
            _ => FaultKind::StaleRead,
        }
    } else {
        match rng.below(6) {
            0..=1 => FaultKind::ReadError,
            2..=3 => FaultKind::WriteError,
            4 => FaultKind::WriteNoSpace,
            _ => FaultKind::FlushError,
        }
    };
    let fault = if !silent && rng.one_in(4) {
        Fault::sticky(kind, after)
    } else {
        Fault::once(kind, after)
    };
    // What lies behind the ring: data and trees. (Superblocks, roots and bitmaps are few and first.)
    let fault = if silent { fault.in_blocks(24 + settings.log_blocks..u64::MAX) } else { fault };
    (FaultPlan::new([fault]), silent)
}

/// One fault of a disk that says so: an error of a read, a write or a flush, once or for ever, early.
pub fn draw_errors(rng: &mut Rng) -> FaultPlan {
    let kind = match rng.below(4) {
        0 => FaultKind::ReadError,
        1 => FaultKind::WriteError,
        2 => FaultKind::WriteNoSpace,
        _ => FaultKind::FlushError,
    };
    let after = rng.below(8);
    FaultPlan::new([if rng.one_in(2) {
        Fault::once(kind, after)
    } else {
        Fault::sticky(kind, after)
    }])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_fault_is_drawn() {
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..300 {
            let (plan, silent) = draw(&Settings::SMALL, &mut Rng::new(seed));
            assert!(!plan.is_empty());
            seen.insert((format!("{plan:?}").split(['{', ' ']).nth(8).map(str::to_owned), silent));
        }
        assert!(seen.iter().any(|(_, silent)| *silent) && seen.iter().any(|(_, silent)| !*silent));
    }
}
