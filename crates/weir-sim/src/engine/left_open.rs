//! What an error that shut the volume down leaves open of a write. On a full volume each piece of it goes into the log before anybody sees it
//! (the engine's `in_place.rs`), and the frame of the one that failed may be on the medium all the same.

use super::{EngineSession, Result};
use crate::model::Outcome;
use crate::op::{Op, Target};

/// Bytes that an operation writes: the first of them, and how many.
fn written(op: &Op, appended_at: u64) -> Option<(u64, u64)> {
    match op {
        Op::Write { offset, length, .. } | Op::Untorn { offset, length, .. } => {
            Some((*offset, *length))
        }
        Op::CopyRange { to_offset, length, .. } => Some((*to_offset, *length)),
        Op::Append { length, .. } => Some((appended_at, *length)),
        _ => None,
    }
}

impl EngineSession {
    /// See [`crate::system::Session::left_open_bytes`]. `lsn`: the last one before `op`.
    pub(super) fn left_open(&self, op: &Op, outcome: &Result<Outcome>, lsn: u64) -> Option<u64> {
        let (start, length) = written(op, self.appended_at)?;
        let done = match (outcome, op) {
            (Ok(Outcome::Count(count)), _) => *count,
            // What was there when the error struck stays.
            (Err(error), Op::Append { target, .. }) if error.shutdown => {
                self.size_of(target).map_or(0, |size| size.saturating_sub(start))
            }
            (Err(error), _) if error.shutdown => 0,
            _ => return None,
        };
        let is_cut_off = done < length && self.volume.shutdown_reason().is_some();
        let is_in_place = || self.volume.stats().in_place_writes > 0;
        if !is_cut_off || self.volume.last_lsn() == lsn || !is_in_place() {
            return None;
        }
        let unit_bytes = u64::from(self.volume.capabilities().untorn_boundary_bytes);
        let unit_end = ((start + done) / unit_bytes + 1) * unit_bytes;
        Some(length.min(unit_end - start))
    }

    fn size_of(&self, target: &Target) -> Option<u64> {
        Some(self.file(target).ok()?.size())
    }
}
