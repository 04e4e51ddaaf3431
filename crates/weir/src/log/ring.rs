//! Geometry of the log ring: where the next frame goes, what may be overwritten, and who may still
//! add to the log. Pure.
//!
//! Places are counted without end (*virtual* places: the ring's size times the lap plus the place
//! in the ring), so that "full" and "empty" never look alike. The live region is `tail..head`.
//!
//! **Invariant**: `head - tail + queued + admitted + waste <= blocks`, where *waste* bounds what a
//! frame that does not fit before the end of the ring can leave unused. So a frame that was
//! admitted always finds its place, and live frames are never overwritten; [`Ring::place`] checks it
//! again and would rather fail.

use super::core::Lsn;
use crate::format::MAX_FRAME_BLOCKS;
use std::collections::VecDeque;

/// Smallest ring.
pub const MIN_RING_BLOCKS: u64 = 64;
/// Most blocks that a retry moves a frame on.
const RETRY_STEP_BLOCKS: u64 = 64;

/// Who adds to the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdmissionClass {
    /// Operations: may fill half of the ring.
    Foreground,
    /// Those that bring much at a time: may fill all of that half but a twentieth, which is left to the others. (Where that begins they wait
    /// before they come here: `cache/throttle.rs`, `LOG_REFUSE_PERCENT`.) All of it where the ring is empty, and nobody else has room: the
    /// largest and what it may leave unused at the end of the ring are nearly that half.
    Bulk,
    /// What empties it again (writing logged pages home): may fill 90 %.
    Background,
}

/// The log has no room for this now: a checkpoint must release some first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the log is full: {used_blocks} blocks in use, {wanted_blocks} wanted, limit {limit_blocks}"
)]
pub struct LogFull {
    /// Live, queued and admitted blocks, and what wrapping may waste.
    pub used_blocks: u64,
    /// What was asked for.
    pub wanted_blocks: u64,
    /// What the class may fill.
    pub limit_blocks: u64,
}

/// A place for one frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Place in the ring.
    pub position_blocks: u64,
    start: u64,
    blocks: u64,
}

impl Placement {
    /// Length of the frame.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }
}

/// See the module's head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ring {
    blocks: u64,
    head: u64,
    tail: u64,
    queued: u64,
}

impl Ring {
    /// An empty ring whose next frame goes to `position_blocks`.
    pub fn new(blocks: u64, position_blocks: u64) -> Self {
        let start = position_blocks % blocks.max(1);
        Self { blocks: blocks.max(1), head: start, tail: start, queued: 0 }
    }

    /// A ring in which the `live_blocks` before `position_blocks` are in use.
    pub fn with_live(blocks: u64, position_blocks: u64, live_blocks: u64) -> Self {
        let mut ring = Self::new(blocks, position_blocks);
        // Places are virtual: one lap further on, the live part lies at or above 0.
        ring.head += ring.blocks;
        ring.tail = ring.head - live_blocks.min(ring.blocks);
        ring
    }

    /// Most blocks of a frame in a ring of `blocks`.
    pub const fn max_frame_blocks(blocks: u64) -> u64 {
        if blocks / 4 < MAX_FRAME_BLOCKS { blocks / 4 } else { MAX_FRAME_BLOCKS }
    }

    /// Size of the ring.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Blocks between the oldest live frame and the newest.
    pub fn used_blocks(&self) -> u64 {
        self.head - self.tail
    }

    /// Blocks of frames that are open or sealed and have no place yet.
    pub fn queued_blocks(&self) -> u64 {
        self.queued
    }

    /// What frames that still come, `coming` blocks in all, can waste at the end of the ring.
    fn waste(&self, coming: u64) -> u64 {
        let before_end = self.blocks - self.head % self.blocks;
        if coming <= before_end {
            return 0;
        }
        let frame = coming.min(Self::max_frame_blocks(self.blocks));
        before_end.min(frame.saturating_sub(1))
    }

    /// What may be left unused at the end of the ring if `admitted` blocks come that are not queued yet, and another quarter of the
    /// ring.
    pub fn waste_ahead(&self, admitted: u64) -> u64 {
        self.waste(self.queued.saturating_add(admitted).saturating_add(self.blocks / 4))
    }

    /// Whether `wanted` more blocks may come, beside the `admitted` ones that are not queued yet.
    ///
    /// # Errors
    /// The class has filled its part of the ring.
    pub fn admissible(
        &self,
        wanted: u64,
        admitted: u64,
        class: AdmissionClass,
    ) -> Result<(), LogFull> {
        let is_alone = self.used_blocks() == 0 && self.queued == 0 && admitted == 0;
        let limit = match class {
            AdmissionClass::Foreground => self.blocks / 2,
            AdmissionClass::Bulk if is_alone => self.blocks / 2,
            AdmissionClass::Bulk => self.blocks / 2 - self.blocks / 40,
            AdmissionClass::Background => self.blocks / 10 * 9,
        };
        let coming = self.queued.saturating_add(admitted);
        let waste = self.waste(coming.saturating_add(wanted));
        let used = self.used_blocks().saturating_add(coming).saturating_add(waste);
        if used.saturating_add(wanted) <= limit {
            return Ok(());
        }
        Err(LogFull { used_blocks: used, wanted_blocks: wanted, limit_blocks: limit })
    }

    /// Frames have grown by `blocks`.
    pub fn queue(&mut self, blocks: u64) {
        self.queued += blocks;
    }

    /// The place for the next queued frame.
    ///
    /// # Errors
    /// There is no room, which admission excludes.
    pub fn place(&mut self, blocks: u64) -> Result<Placement, LogFull> {
        let placement = self.place_behind(blocks)?;
        self.queued = self.queued.saturating_sub(blocks);
        Ok(placement)
    }

    /// Another place, further on, for a frame that could not be written; what was placed behind it has lost its place. The space
    /// it skips was admitted to nobody; what is queued and `admitted` still has to fit, and the background must have room left to
    /// empty the ring.
    ///
    /// # Errors
    /// There is no room further on.
    pub fn place_again(&mut self, failed: Placement, admitted: u64) -> Result<Placement, LogFull> {
        let from = failed.start + failed.blocks.min(RETRY_STEP_BLOCKS);
        let placement = self.fit(from, failed.blocks)?;
        let moved = Self { head: placement.start + placement.blocks, ..self.clone() };
        let coming = moved.queued.saturating_add(admitted);
        let used_blocks = moved.used_blocks() + moved.waste(coming);
        let limit_blocks = self.blocks / 4 * 3;
        if used_blocks.saturating_add(coming) > limit_blocks {
            return Err(LogFull { used_blocks, wanted_blocks: coming, limit_blocks });
        }
        *self = moved;
        Ok(placement)
    }

    /// A place behind what was placed last, for a frame that has lost its own: the frame before it has moved on.
    ///
    /// # Errors
    /// There is no room further on.
    pub fn place_behind(&mut self, blocks: u64) -> Result<Placement, LogFull> {
        let placement = self.fit(self.head, blocks)?;
        self.head = placement.start + blocks;
        Ok(placement)
    }

    fn fit(&self, from: u64, blocks: u64) -> Result<Placement, LogFull> {
        let place = from % self.blocks;
        let start = if place + blocks > self.blocks { from - place + self.blocks } else { from };
        if start + blocks - self.tail > self.blocks {
            return Err(LogFull {
                used_blocks: start - self.tail,
                wanted_blocks: blocks,
                limit_blocks: self.blocks,
            });
        }
        Ok(Placement { position_blocks: start % self.blocks, start, blocks })
    }

    fn release_to(&mut self, tail: u64) {
        self.tail = tail.clamp(self.tail, self.head);
    }
}

/// Where replay has to start: a frame, or where the next frame is going to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplayPoint {
    /// Place in the ring.
    pub position_blocks: u64,
    /// Sequence number expected there.
    pub sequence: u64,
    /// Digest of the frame before.
    pub prev_digest: u64,
}

/// A frame on the device that replay may still need.
#[derive(Debug, Clone, Copy)]
struct LiveFrame {
    last_lsn: Lsn,
    start: u64,
    sequence: u64,
    prev_digest: u64,
}

/// The live frames, oldest first, and the end of the chain.
#[derive(Debug)]
pub struct LiveFrames {
    frames: VecDeque<LiveFrame>,
    /// Behind the last frame written (virtual place).
    end: u64,
    next_sequence: u64,
    digest: u64,
}

impl LiveFrames {
    /// No frame is live; the next goes to `start`.
    pub fn new(start: &ReplayPoint, ring: &Ring) -> Self {
        Self {
            frames: VecDeque::new(),
            end: ring.head,
            next_sequence: start.sequence,
            digest: start.prev_digest,
        }
    }

    /// Frames from before the log was opened, in order, whose last ends where the next begins: replay still needs them. `first`: where replay
    /// has begun; of each frame the last LSN, the place, and the digest.
    pub fn with_recovered(
        first: &ReplayPoint,
        recovered: impl Iterator<Item = (Lsn, u64, u64)>,
        ring: &Ring,
    ) -> Self {
        let mut live = Self::new(first, ring);
        let origin = ring.tail % ring.blocks;
        for (last_lsn, position_blocks, digest) in recovered {
            let distance = (position_blocks + ring.blocks - origin) % ring.blocks;
            let (sequence, prev_digest) = (live.next_sequence, live.digest);
            let start = ring.tail + distance;
            live.frames.push_back(LiveFrame { last_lsn, start, sequence, prev_digest });
            live.next_sequence += 1;
            live.digest = digest;
        }
        live
    }

    /// Sequence number of the next frame to be written.
    pub fn next_sequence(&self) -> u64 {
        self.next_sequence
    }

    /// Digest of the last frame written.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// A frame was written at `placement`, with the digest `digest`.
    pub fn push(&mut self, last_lsn: Lsn, placement: Placement, digest: u64) {
        self.frames.push_back(LiveFrame {
            last_lsn,
            start: placement.start,
            sequence: self.next_sequence,
            prev_digest: self.digest,
        });
        self.end = placement.start + placement.blocks;
        self.next_sequence += 1;
        self.digest = digest;
    }

    /// The frame that contains `lsn`, or where the next frame to be written will be when no
    /// written live frame contains it. A released LSN gives the oldest live frame.
    pub fn replay_point(&self, lsn: Lsn, ring: &Ring) -> ReplayPoint {
        let index = self.frames.partition_point(|frame| frame.last_lsn < lsn);
        self.frames.get(index).map_or(
            ReplayPoint {
                position_blocks: self.end % ring.blocks,
                sequence: self.next_sequence,
                prev_digest: self.digest,
            },
            |frame| ReplayPoint {
                position_blocks: frame.start % ring.blocks,
                sequence: frame.sequence,
                prev_digest: frame.prev_digest,
            },
        )
    }

    /// The last operation of those frames that lie further back than `blocks` from the end of the log, if any does.
    pub fn lsn_behind(&self, blocks: u64) -> Option<Lsn> {
        let limit = self.end.saturating_sub(blocks);
        // The last frame that starts before the limit may reach across it.
        let before = self.frames.partition_point(|frame| frame.start < limit);
        Some(self.frames.get(before.checked_sub(2)?)?.last_lsn)
    }

    /// Frames before `point` are not needed any more: their blocks may be used again.
    pub fn release_before(&mut self, point: &ReplayPoint, ring: &mut Ring) {
        while self.frames.front().is_some_and(|frame| frame.sequence < point.sequence) {
            self.frames.pop_front();
        }
        ring.release_to(self.frames.front().map_or(self.end, |frame| frame.start));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_ahead_wastes_no_more_than_is_said() {
        for place in 0..64 {
            for (queued, admitted) in [(0, 0), (3, 0), (0, 9), (10, 5)] {
                let mut ring = Ring::new(64, place);
                ring.queue(queued);
                let said = ring.waste_ahead(admitted);
                for more in 0..=16 {
                    assert!(ring.waste(queued + admitted + more) <= said, "{place}: {more}");
                }
            }
        }
    }

    #[test]
    fn what_lies_behind_leaves_the_newest_blocks() {
        let mut ring = Ring::new(1000, 990);
        let start = ReplayPoint { position_blocks: 990, sequence: 1, prev_digest: 0 };
        let mut live = LiveFrames::new(&start, &ring);
        assert_eq!(live.lsn_behind(0), None);
        let mut ends = Vec::new();
        for lsn in 1..=20 {
            ring.queue(lsn);
            let placement = ring.place(lsn).expect("room");
            live.push(lsn * 10, placement, lsn);
            ends.push((lsn * 10, placement.start + lsn));
        }
        let end = ends[19].1;
        for blocks in 0..300 {
            let behind = live.lsn_behind(blocks).unwrap_or(0);
            for &(lsn, frame_end) in &ends {
                if lsn <= behind {
                    assert!(end - frame_end >= blocks, "{blocks}: {lsn}");
                }
            }
            // No more than the frame at the limit and the one before are left besides.
            let left =
                ends.iter().filter(|(lsn, frame_end)| *lsn > behind && end - *frame_end >= blocks);
            assert!(left.count() <= 2, "{blocks}");
        }
    }

    struct Random(u64);
    impl Random {
        fn below(&mut self, bound: u64) -> u64 {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) % bound
        }
    }

    #[test]
    fn frames_never_wrap_and_never_meet_live_ones() {
        for blocks in [64, 65, 100, 256, 4096] {
            let mut random = Random(blocks);
            let mut ring = Ring::new(blocks, random.below(blocks));
            let start =
                ReplayPoint { position_blocks: ring.head % blocks, sequence: 1, prev_digest: 0 };
            let mut live = LiveFrames::new(&start, &ring);
            // Model: which frame owns each block of the ring.
            let mut owner = vec![0_u64; blocks as usize];
            let max_frame = Ring::max_frame_blocks(blocks);
            let mut oldest = 1;
            for _ in 0..20_000 {
                // Several operations are admitted, then queued as one or more frames.
                let mut admitted = Vec::new();
                for _ in 0..=random.below(4) {
                    let wanted = 1 + random.below(max_frame);
                    let class = if random.below(3) == 0 {
                        AdmissionClass::Background
                    } else {
                        AdmissionClass::Foreground
                    };
                    if ring.admissible(wanted, admitted.iter().sum(), class).is_ok() {
                        admitted.push(wanted);
                    }
                }
                ring.queue(admitted.iter().sum());
                for frame in admitted {
                    let placement = ring.place(frame).expect("an admitted frame finds its place");
                    let first = placement.position_blocks;
                    assert!(first + frame <= blocks);
                    let sequence = live.next_sequence();
                    for block in first..first + frame {
                        assert!(owner[block as usize] < oldest, "live block overwritten");
                        owner[block as usize] = sequence;
                    }
                    live.push(sequence * 10, placement, sequence);
                    let point = live.replay_point(sequence * 10 - 9, &ring);
                    assert_eq!(point.position_blocks, first);
                    assert_eq!(
                        (point.sequence, point.prev_digest + 1),
                        (sequence, sequence.max(1))
                    );
                }
                assert!(ring.used_blocks() <= blocks && ring.queued_blocks() == 0);
                if random.below(3) == 0 && live.next_sequence() > 1 {
                    oldest += random.below(live.next_sequence() - oldest + 1);
                    let point = live.replay_point((oldest - 1) * 10 + 1, &ring);
                    assert_eq!(point.sequence, oldest);
                    live.release_before(&point, &mut ring);
                }
            }
            assert!(live.next_sequence() > 1000);
        }
    }

    #[test]
    fn the_largest_frame_is_admitted_wherever_an_empty_ring_stands() {
        for blocks in [64, 65, 127, 128, 1024, 4096] {
            for position in 0..blocks {
                let ring = Ring::new(blocks, position);
                let largest = Ring::max_frame_blocks(blocks);
                for class in [AdmissionClass::Foreground, AdmissionClass::Bulk] {
                    assert_eq!(ring.admissible(largest, 0, class), Ok(()), "{blocks} {position}");
                }
            }
        }
    }

    #[test]
    fn background_goes_on_where_foreground_stops() {
        let mut ring = Ring::new(100, 0);
        assert!(ring.admissible(50, 0, AdmissionClass::Foreground).is_ok());
        assert!(ring.admissible(51, 0, AdmissionClass::Foreground).is_err());
        assert!(ring.admissible(50, 0, AdmissionClass::Bulk).is_ok());
        assert!(ring.admissible(51, 0, AdmissionClass::Bulk).is_err());
        // It leaves something to others where there are any.
        assert!(ring.admissible(47, 1, AdmissionClass::Bulk).is_ok());
        assert!(ring.admissible(48, 1, AdmissionClass::Bulk).is_err());
        ring.queue(20);
        ring.place(20).unwrap();
        ring.queue(10);
        assert!(ring.admissible(15, 6, AdmissionClass::Foreground).is_err());
        assert!(ring.admissible(14, 6, AdmissionClass::Foreground).is_ok());
        assert!(ring.admissible(54, 6, AdmissionClass::Background).is_ok());
        assert!(ring.admissible(55, 6, AdmissionClass::Background).is_err());
        assert!(ring.admissible(u64::MAX, 6, AdmissionClass::Background).is_err());
    }

    #[test]
    fn retries_move_on_and_leave_room_for_what_was_admitted() {
        let mut ring = Ring::new(64, 0);
        ring.queue(8 + 8 + 10);
        ring.place(8).unwrap();
        let second = ring.place(8).unwrap();
        let again = ring.place_again(second, 6).unwrap();
        assert_eq!(again.position_blocks, 16);
        // 10 blocks are still queued, and a quarter is left to the background.
        assert!(ring.clone().place_again(again, 7).is_err());
        let third = ring.place_again(again, 6).unwrap();
        assert_eq!(third.position_blocks, 24);
        assert!(ring.place_again(third, 0).is_err());
        assert_eq!(ring.place(10).unwrap().position_blocks, 32);
        assert_eq!(ring.used_blocks(), 42);
        assert!(ring.admissible(12, 0, AdmissionClass::Background).is_ok());
    }

    /// Also where they go around the end of the ring.
    #[test]
    fn recovered_frames_are_live_until_they_are_released() {
        for origin in 0..64 {
            let first = ReplayPoint { position_blocks: origin, sequence: 5, prev_digest: 50 };
            let place = |blocks: u64| (origin + blocks) % 64;
            let mut ring = Ring::with_live(64, place(12), 12);
            let recovered = [(10, place(0), 51), (20, place(3), 52), (30, place(8), 53)];
            let mut live = LiveFrames::with_recovered(&first, recovered.into_iter(), &ring);
            assert_eq!((live.next_sequence(), live.digest()), (8, 53));
            let point = |position_blocks, sequence, prev_digest| ReplayPoint {
                position_blocks,
                sequence,
                prev_digest,
            };
            assert_eq!(live.replay_point(1, &ring), first);
            assert_eq!(live.replay_point(11, &ring), point(place(3), 6, 51));
            assert_eq!(live.replay_point(31, &ring), point(place(12), 8, 53));
            live.release_before(&point(place(3), 6, 51), &mut ring);
            assert_eq!(ring.used_blocks(), 9);
            live.release_before(&point(place(12), 8, 53), &mut ring);
            assert_eq!(ring.used_blocks(), 0);
        }
    }

    #[test]
    fn releasing_everything_empties_the_ring() {
        let mut ring = Ring::new(64, 60);
        let start = ReplayPoint { position_blocks: 60, sequence: 7, prev_digest: 3 };
        let mut live = LiveFrames::new(&start, &ring);
        assert_eq!(live.replay_point(1, &ring), start);
        ring.queue(5);
        let placement = ring.place(5).unwrap();
        assert_eq!((placement.position_blocks, ring.used_blocks()), (0, 9));
        live.push(20, placement, 99);
        let next = live.replay_point(21, &ring);
        assert_eq!(next, ReplayPoint { position_blocks: 5, sequence: 8, prev_digest: 99 });
        live.release_before(&next, &mut ring);
        assert_eq!(ring.used_blocks(), 0);
    }
}
