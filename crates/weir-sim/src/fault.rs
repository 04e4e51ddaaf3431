//! Planned misbehaviour of the simulated disk.

use std::ops::Range;

use weir::device::IoClass;

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// A read fails with EIO.
    ReadError,
    /// A write fails with EIO; so many of its first or last blocks as chance has it are on the medium.
    WriteError,
    /// A write fails because the host file system is full; nothing is written.
    WriteNoSpace,
    /// A flush fails. Each write it should have covered is durable, still pending or gone, at random.
    FlushError,
    /// One bit of a block that is read has changed on the medium.
    BitRot {
        /// Which bit of the first block read.
        bit: u32,
    },
    /// A write reports success but lands elsewhere.
    MisdirectedWrite {
        /// How far away.
        distance_blocks: i64,
    },
    /// A read gives the content of another place.
    MisdirectedRead {
        /// How far away.
        distance_blocks: i64,
    },
    /// A read gives what the blocks held before they were last written.
    StaleRead,
    /// A write reports success but does nothing.
    LostWrite,
}

impl FaultKind {
    /// The kind of call it strikes.
    pub const fn operation(self) -> &'static str {
        match self {
            Self::ReadError
            | Self::BitRot { .. }
            | Self::MisdirectedRead { .. }
            | Self::StaleRead => "read",
            Self::WriteError
            | Self::WriteNoSpace
            | Self::MisdirectedWrite { .. }
            | Self::LostWrite => "write",
            Self::FlushError => "flush",
        }
    }

    /// The disk lies: the engine is not told that something went wrong.
    pub const fn is_silent(self) -> bool {
        matches!(
            self,
            Self::BitRot { .. }
                | Self::MisdirectedWrite { .. }
                | Self::MisdirectedRead { .. }
                | Self::StaleRead
                | Self::LostWrite
        )
    }
}

/// One planned fault: strikes calls of its kind that touch its blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// What goes wrong.
    pub kind: FaultKind,
    /// This many matching calls go well first.
    pub after: u64,
    /// Then this many are struck; [`u64::MAX`]: all (a sticky fault).
    pub times: u64,
    /// Only calls that touch these blocks (flushes always match).
    pub blocks: Range<u64>,
    /// Only calls of this class, if given.
    pub class: Option<IoClass>,
    /// Only calls amid another call, and calls amid which there are others.
    pub amid: bool,
}

impl Fault {
    /// Strikes once, anywhere, after `after` calls of the kind.
    pub const fn once(kind: FaultKind, after: u64) -> Self {
        Self { kind, after, times: 1, blocks: 0..u64::MAX, class: None, amid: false }
    }

    /// Strikes every call from the one after `after` calls of the kind on.
    pub const fn sticky(kind: FaultKind, after: u64) -> Self {
        Self { kind, after, times: u64::MAX, blocks: 0..u64::MAX, class: None, amid: false }
    }

    /// The same fault, restricted to calls that touch `blocks`.
    #[must_use]
    pub fn in_blocks(mut self, blocks: Range<u64>) -> Self {
        self.blocks = blocks;
        self
    }

    /// The same fault, restricted to calls that overlap with others.
    #[must_use]
    pub const fn amid(mut self) -> Self {
        self.amid = true;
        self
    }

    fn matches(&self, operation: &str, blocks: &Range<u64>, class: Option<IoClass>) -> bool {
        self.kind.operation() == operation
            && (operation == "flush"
                || (self.blocks.start < blocks.end && blocks.start < self.blocks.end))
            && (self.class.is_none() || class.is_none() || self.class == class)
    }
}

/// The faults of a device, and how often each has matched.
#[derive(Debug, Clone, Default)]
pub struct FaultPlan {
    faults: Vec<(Fault, u64)>,
    struck: u64,
}

impl FaultPlan {
    /// A plan of these faults.
    pub fn new(faults: impl IntoIterator<Item = Fault>) -> Self {
        Self { faults: faults.into_iter().map(|fault| (fault, 0)).collect(), struck: 0 }
    }

    /// Nothing is planned.
    pub fn is_empty(&self) -> bool {
        self.faults.is_empty()
    }

    /// How many calls were struck so far.
    pub const fn struck(&self) -> u64 {
        self.struck
    }

    /// Counts a call and gives the fault that strikes it, if any. `is_amid`: it overlaps with others.
    pub fn strike(
        &mut self,
        operation: &str,
        blocks: &Range<u64>,
        class: Option<IoClass>,
        is_amid: bool,
    ) -> Option<FaultKind> {
        let mut result = None;
        for (fault, seen) in &mut self.faults {
            if fault.matches(operation, blocks, class) && (is_amid || !fault.amid) {
                let number = *seen;
                *seen += 1;
                let ends = fault.after.saturating_add(fault.times);
                if result.is_none() && (fault.after..ends).contains(&number) {
                    result = Some(fault.kind);
                }
            }
        }
        self.struck += u64::from(result.is_some());
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_fault_strikes_once_and_a_sticky_one_for_ever() {
        let mut plan = FaultPlan::new([Fault::once(FaultKind::ReadError, 1)]);
        let reads: Vec<bool> =
            (0..4).map(|_| plan.strike("read", &(0..1), None, false).is_some()).collect();
        assert_eq!(reads, [false, true, false, false]);
        let mut plan = FaultPlan::new([Fault::sticky(FaultKind::FlushError, 1)]);
        assert!(plan.strike("write", &(0..1), None, false).is_none());
        let flushes: Vec<bool> =
            (0..3).map(|_| plan.strike("flush", &(0..0), None, false).is_some()).collect();
        assert_eq!(flushes, [false, true, true]);
    }

    #[test]
    fn a_fault_in_a_range_strikes_calls_that_touch_it() {
        let mut plan = FaultPlan::new([Fault::sticky(FaultKind::WriteError, 0).in_blocks(10..12)]);
        assert!(plan.strike("write", &(8..10), None, false).is_none());
        assert!(plan.strike("write", &(11..20), None, false).is_some());
        assert!(plan.strike("write", &(12..20), None, false).is_none());
    }

    #[test]
    fn a_fault_amid_others_strikes_and_counts_no_other_call() {
        let mut plan = FaultPlan::new([Fault::once(FaultKind::WriteError, 1).amid()]);
        let struck = [false, true, false, true, true]
            .map(|is_amid| plan.strike("write", &(0..1), None, is_amid).is_some());
        assert_eq!(struck, [false, false, false, true, false]);
    }
}
