//! Faults for random workloads.

use weir::device::IoClass;

use crate::fault::{Fault, FaultKind, FaultPlan};
use crate::rng::Rng;
use crate::system::Settings;

/// A plan drawn from `rng`, and whether the disk lies in it.
///
/// Lies are told about every place, most of them about data and trees, which are read again while the volume is open.
pub fn draw(settings: &Settings, rng: &mut Rng) -> (FaultPlan, bool) {
    let silent = rng.one_in(3);
    let magnitude = rng.below(8);
    let after = rng.below(1 << magnitude);
    let distance_blocks = 1 + rng.below(settings.volume_blocks / 2) as i64;
    let kind = if silent {
        match rng.below(6) {
            0..=1 => FaultKind::BitRot { bit: rng.below(32_768) as u32 },
            2 => FaultKind::MisdirectedRead { distance_blocks },
            3 => FaultKind::LostWrite,
            4 => FaultKind::MisdirectedWrite { distance_blocks },
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
    // Few calls overlap with others: every other error of a write or a flush is for one of those.
    let fault = if !silent && kind != FaultKind::ReadError && rng.one_in(2) {
        Fault { after: after % 3, ..fault }.amid()
    } else {
        fault
    };
    // Frames are few, and what comes of one that has to be written again is intricate.
    let class = (fault.amid && rng.one_in(2)).then_some(IoClass::Log);
    let fault = if kind == FaultKind::WriteError { Fault { class, ..fault } } else { fault };
    // What lies behind the ring: data and trees. (Superblocks, roots and bitmaps are few and first.)
    let behind = 24 + settings.log_blocks..u64::MAX;
    let fault = if silent && !rng.one_in(3) { fault.in_blocks(behind.clone()) } else { fault };
    // A host that is full has blocks for the ring, and most often some day for the rest.
    let fault = if kind == FaultKind::WriteNoSpace && !rng.one_in(4) {
        let times = if rng.one_in(4) { u64::MAX } else { 1 + rng.below(40) };
        Fault { times, ..fault }.in_blocks(behind)
    } else {
        fault
    };
    // What a checkpoint is refused for a while is tried again.
    let fault = if kind == FaultKind::WriteError && !fault.amid && rng.one_in(2) {
        let (class, times) = (Some(IoClass::Background), 1 + rng.below(6));
        Fault { times, class, ..fault }
    } else {
        fault
    };
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

/// One lie about something that a recovery reads or writes: superblocks, roots and bitmaps, the ring, or anything.
pub fn draw_lie(settings: &Settings, rng: &mut Rng) -> FaultPlan {
    let distance_blocks = 1 + rng.below(settings.log_blocks) as i64;
    let distance_blocks = if rng.one_in(2) { distance_blocks } else { -distance_blocks };
    let kind = match rng.below(8) {
        0..=3 => FaultKind::BitRot { bit: rng.below(32_768) as u32 },
        4..=5 => FaultKind::MisdirectedRead { distance_blocks },
        6 => FaultKind::LostWrite,
        _ => FaultKind::MisdirectedWrite { distance_blocks },
    };
    let blocks = match rng.below(3) {
        0 => 0..20,
        1 => 20 + rng.below(settings.log_blocks)..20 + settings.log_blocks,
        _ => 0..u64::MAX,
    };
    FaultPlan::new([Fault::once(kind, rng.below(4)).in_blocks(blocks)])
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
