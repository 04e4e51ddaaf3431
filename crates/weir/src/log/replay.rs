//! Reading the log after a crash: which frames of the ring are the log, and what they say.
//!
//! [`recover`] scans the ring from the place the superblock names, in large sequential reads, keeps
//! only the places of accepted frames and, up to a bound, their records in memory, proves the unflushed tail
//! (`docs/FORMAT.md`, "What replay does", 1 to 4) and answers where the log ends. [`Recovered::replay`] then hands each
//! frame's records to a visitor, reading again what was not kept; [`Recovered::replay_payloads`] reads the frames whose
//! payload is wanted. Nothing is written.
//!
//! A device error is an error: only content that does not match ends or cuts the log. Otherwise a
//! cable that was loose for a moment would cost acknowledged operations.

use super::core::Lsn;
use super::ring::{ReplayPoint, Ring};
use super::tail::{Expectations, cut};
use super::{LogGeometry, LogStart};
use crate::device::buffer::AlignedBuf;
use crate::device::{Device, IoClass};
use crate::format::frame::{FrameHeader, RETRY_WINDOW_BLOCKS};
use crate::format::record::{Record, Records};
use crate::format::{BLOCK_BYTES, BLOCK_BYTES_U64, checksum};
use crate::mutation::{self, Mutation};
use crate::{Error, Result};
use std::cell::Cell;

/// First read of the ring; each further one is four times as large, up to [`LARGEST_READ_BLOCKS`].
const FIRST_READ_BLOCKS: u64 = 16;
/// 4 MiB.
const LARGEST_READ_BLOCKS: u64 = 1024;
/// Records kept in memory by the scan at most: those of a gigabyte of log, if most of it is payload.
pub const KEPT_RECORD_BYTES: usize = 32 << 20;
/// Blocks of data read at once to prove the tail: 1 MiB.
const PROOF_READ_BLOCKS: u64 = 256;

/// What the superblock and the root say about the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplayStart {
    /// Where replay starts.
    pub point: ReplayPoint,
    /// The superblock's `log_epoch`.
    pub epoch: u64,
    /// Frames from this sequence on must carry `epoch`.
    pub epoch_first_sequence: u64,
    /// What those before it must carry; 0: any smaller one.
    pub replay_epoch: u64,
    /// Everything up to here was durable.
    pub durable_lsn: Lsn,
    /// LSN of the next operation if the log holds none: one more than the checkpoint's.
    pub next_lsn: Lsn,
}

impl ReplayStart {
    /// Whether the frame with this sequence number may carry `epoch`. A frame that was cut, and the one that was written in its stead, both
    /// continue the one before: before `epoch_first_sequence` as well only the epoch tells which of them is the log's.
    fn allows(&self, epoch: u64, sequence: u64) -> bool {
        if sequence >= self.epoch_first_sequence {
            return epoch == self.epoch;
        }
        epoch < self.epoch && (self.replay_epoch == 0 || epoch == self.replay_epoch)
    }
}

/// How far the scan is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Blocks read so far.
    pub read_blocks: u64,
    /// Blocks of the ring: about the most that will be read.
    pub ring_blocks: u64,
}

/// A frame of the log.
#[derive(Debug, Clone, Copy)]
struct Accepted {
    position: u64,
    total_blocks: u64,
    epoch: u64,
    last_lsn: Lsn,
    digest: u64,
    continues: bool,
}

/// What [`recover`] found.
#[derive(Debug)]
pub struct Recovered {
    geometry: LogGeometry,
    start: ReplayStart,
    frames: Vec<Accepted>,
    metas: Vec<Option<Box<[u8]>>>,
    /// Where the next frame of the log belongs.
    pub end: ReplayPoint,
    /// LSN of the next operation.
    pub next_lsn: Lsn,
    /// What superblock and accepted frames say was durable.
    pub durable_lsn: Lsn,
    /// Valid frames that were cut away because data they describe, or the rest of their batch,
    /// had not reached the device.
    pub frames_cut: usize,
}

/// A frame on its way to the visitor.
#[derive(Debug)]
pub struct ReplayFrame<'a> {
    /// Its header.
    pub header: FrameHeader,
    /// All of it, or header and records.
    bytes: &'a [u8],
}

impl<'a> ReplayFrame<'a> {
    /// The records in order.
    pub fn records(&self) -> Records<'a> {
        Records::new(self.header.records(self.bytes))
    }

    /// Payload block `index`, if the frame was replayed for its payload.
    pub fn payload(&self, index: u32) -> Option<&'a [u8]> {
        self.header.payload(self.bytes, index)
    }
}

/// Reads runs of the ring through a window that slides forward.
struct RingReader<'a> {
    device: &'a dyn Device,
    geometry: LogGeometry,
    /// Grows and never shrinks; its first `filled` bytes are the ring's from `start` on.
    window: AlignedBuf,
    filled: usize,
    start: u64,
    next_read: u64,
    read_blocks: u64,
    progress: &'a mut dyn FnMut(Progress),
}

/// Largest window that a thread keeps for the next reader: a recovery needs two, and a check a third.
const SPARE_WINDOW_BYTES: usize = 1 << 20;

thread_local! {
    static SPARE_WINDOW: Cell<AlignedBuf> = const { Cell::new(AlignedBuf::new()) };
}

impl Drop for RingReader<'_> {
    fn drop(&mut self) {
        let window = std::mem::take(&mut self.window);
        if window.capacity() <= SPARE_WINDOW_BYTES {
            // A thread that is about to end keeps nothing.
            let _ = SPARE_WINDOW.try_with(|spare| spare.set(window));
        }
    }
}

impl<'a> RingReader<'a> {
    fn new(
        device: &'a dyn Device,
        geometry: LogGeometry,
        progress: &'a mut dyn FnMut(Progress),
    ) -> Self {
        let window = SPARE_WINDOW.try_with(Cell::take).unwrap_or_default();
        let next_read = FIRST_READ_BLOCKS;
        Self { device, geometry, window, filled: 0, start: 0, next_read, read_blocks: 0, progress }
    }

    fn window_end(&self) -> u64 {
        self.start + (self.filled / BLOCK_BYTES) as u64
    }

    /// The `blocks` blocks from `position` on; the caller knows that the ring has them.
    fn get(&mut self, position: u64, blocks: u64) -> Result<&[u8]> {
        if position < self.start || position + blocks > self.window_end() {
            self.slide(position, blocks)?;
        }
        let from = (position - self.start) as usize * BLOCK_BYTES;
        self.window[..self.filled]
            .get(from..from + blocks as usize * BLOCK_BYTES)
            .ok_or_else(|| Error::Corrupt("log: a frame reaches beyond the ring".to_owned()))
    }

    /// Moves the window to `position`, keeping what it has of that.
    fn slide(&mut self, position: u64, blocks: u64) -> Result<()> {
        let mut kept = 0;
        if position >= self.start && position < self.window_end() {
            let from = (position - self.start) as usize * BLOCK_BYTES;
            kept = self.filled - from;
            self.window.copy_within(from..self.filled, 0);
        }
        let kept_blocks = (kept / BLOCK_BYTES) as u64;
        let ring_left = self.geometry.log_blocks.saturating_sub(position + kept_blocks);
        let wanted = blocks.saturating_sub(kept_blocks).max(self.next_read).min(ring_left);
        self.next_read = (self.next_read * 4).min(LARGEST_READ_BLOCKS);
        let filled = kept + wanted as usize * BLOCK_BYTES;
        if self.window.len() < filled {
            self.window.resize_zeroed(filled);
        }
        // Nothing is valid until the read has succeeded.
        self.filled = 0;
        self.start = position;
        let place = self.geometry.log_start_block + position + kept_blocks;
        let target = &mut self.window[kept..filled];
        self.device.read(place * BLOCK_BYTES_U64, &mut [target], IoClass::SyncRead)?;
        self.filled = filled;
        self.read_blocks += wanted;
        let ring_blocks = self.geometry.log_blocks;
        (self.progress)(Progress { read_blocks: self.read_blocks, ring_blocks });
        Ok(())
    }
}

/// Places where the frame after one that ends at `end` may start, most likely first: there, up to 192
/// blocks further on, and the same from place 0.
fn candidates(end: u64, ring_blocks: u64) -> impl Iterator<Item = u64> {
    let window = RETRY_WINDOW_BLOCKS + 1;
    let here = end..ring_blocks.min(end.saturating_add(window));
    here.chain(0..window.min(end).min(ring_blocks))
}

struct Scan<'a> {
    reader: RingReader<'a>,
    geometry: LogGeometry,
    start: ReplayStart,
    frames: Vec<Accepted>,
    /// Header and records of each, where there was room for them.
    metas: Vec<Option<Box<[u8]>>>,
    kept_bytes: usize,
    most_kept_bytes: usize,
    expectations: Expectations,
    durable: Lsn,
}

/// A frame that was found, and which of the candidates it was.
struct Found {
    candidate: usize,
    accepted: Accepted,
    durable_lsn: Lsn,
}

impl Scan<'_> {
    /// State after the first `count` accepted frames.
    fn point_after(&self, count: usize) -> ReplayPoint {
        point_after(&self.frames, count, &self.start)
    }

    /// Searches the candidates from the `skip`-th on for the frame that continues at `point`.
    fn find(&mut self, point: &ReplayPoint, skip: usize) -> Result<Option<Found>> {
        let places = candidates(point.position_blocks, self.geometry.log_blocks);
        for (candidate, position) in places.enumerate().skip(skip) {
            if let Some((accepted, durable_lsn)) = self.accept(point, position)? {
                return Ok(Some(Found { candidate, accepted, durable_lsn }));
            }
        }
        Ok(None)
    }

    /// The frame at `position`, if it is the one that continues at `point` and whole.
    fn accept(&mut self, point: &ReplayPoint, position: u64) -> Result<Option<(Accepted, Lsn)>> {
        let Some(header) = FrameHeader::peek(self.reader.get(position, 1)?) else {
            return Ok(None);
        };
        let epoch_holds = self.start.allows(header.epoch, point.sequence);
        let total_blocks = header.total_blocks();
        let stale = mutation::active(Mutation::AcceptStaleFrame);
        let belongs = header.volume_id == self.geometry.volume_id
            && header.sequence == point.sequence
            && (header.prev_digest == point.prev_digest || stale)
            && header.ring_position_blocks == position
            && total_blocks <= Ring::max_frame_blocks(self.geometry.log_blocks)
            && position + total_blocks <= self.geometry.log_blocks
            && (epoch_holds || stale);
        if !belongs {
            return Ok(None);
        }
        let frame = self.reader.get(position, total_blocks)?;
        let Some(digest) = header.verify(frame) else { return Ok(None) };
        let unverified = mutation::active(Mutation::AcceptTornPayload);
        if !unverified && !payloads_match(&header, frame)? {
            return Ok(None);
        }
        let accepted = Accepted {
            position,
            total_blocks,
            epoch: header.epoch,
            last_lsn: header.last_lsn,
            digest,
            continues: header.continues,
        };
        Ok(Some((accepted, header.durable_lsn)))
    }

    /// Follows the chain to its end.
    fn follow(&mut self) -> Result<()> {
        let mut last_candidate = 0;
        loop {
            let point = self.point_after(self.frames.len());
            let mut found = self.find(&point, 0)?;
            if found.is_none() {
                found = self.find_after_other_copy(last_candidate)?;
            }
            let Some(found) = found else { return Ok(()) };
            last_candidate = found.candidate;
            self.push(&found)?;
        }
    }

    /// A write that was reported as failed may have reached the device all the same. Then the frame exists
    /// twice and the log continues from the later copy: looks for one that has a successor, and
    /// puts it in the place of the last frame accepted.
    fn find_after_other_copy(&mut self, last_candidate: usize) -> Result<Option<Found>> {
        let Some(before_last) = self.frames.len().checked_sub(1) else { return Ok(None) };
        let point = self.point_after(before_last);
        let mut skip = last_candidate + 1;
        while let Some(other) = self.find(&point, skip)? {
            self.metas[before_last] = None;
            let first = std::mem::replace(&mut self.frames[before_last], other.accepted);
            let after = self.point_after(before_last + 1);
            if let Some(found) = self.find(&after, 0)? {
                return Ok(Some(found));
            }
            self.frames[before_last] = first;
            skip = other.candidate + 1;
        }
        Ok(None)
    }

    /// Takes a frame into the log.
    fn push(&mut self, found: &Found) -> Result<()> {
        let Accepted { position, total_blocks, last_lsn, .. } = found.accepted;
        let index = self.frames.len() as u64;
        let total = self.geometry.total_blocks;
        self.durable = self.durable.max(found.durable_lsn);
        let frame = self.reader.get(position, total_blocks)?;
        let header = FrameHeader::peek(frame).ok_or_else(changed)?;
        let before = self.frames.last().map_or(0, |frame| frame.last_lsn);
        if header.first_lsn <= before {
            // What such a log holds would never be behind a checkpoint.
            return Err(Error::Corrupt(format!(
                "log: a frame begins with operation {} behind one that ends with {before}",
                header.first_lsn
            )));
        }
        if last_lsn > self.durable {
            for (number, record) in Records::new(header.records(frame)).enumerate() {
                self.expectations.add(&record?, index, number as u64, total).map_err(|_| {
                    Error::Corrupt("log: a record names a block outside of the volume".to_owned())
                })?;
            }
            self.expectations.end_frame(index, last_lsn);
        }
        let meta = frame.get(..header.meta_bytes as usize);
        let meta = meta.filter(|meta| self.kept_bytes + meta.len() <= self.most_kept_bytes);
        self.kept_bytes += meta.map_or(0, <[u8]>::len);
        self.metas.push(meta.map(Box::from));
        self.expectations.forget_durable(self.durable);
        self.frames.push(found.accepted);
        Ok(())
    }

    /// How many of the accepted frames the log keeps.
    fn prove_tail(&mut self) -> Result<usize> {
        if mutation::active(Mutation::SkipTailVerification) {
            return Ok(self.frames.len());
        }
        let checks = self.expectations.sorted_checks();
        let mut holds = Vec::with_capacity(checks.len());
        let mut buffer = AlignedBuf::new();
        let mut from = 0;
        while from < checks.len() {
            // One read covers a run of neighbouring blocks.
            let first = checks[from].block;
            let run = checks[from..].iter().zip(checks[from..].iter().skip(1)).take_while(
                |(check, next)| {
                    next.block - check.block <= 1 && next.block - first < PROOF_READ_BLOCKS
                },
            );
            let until = from + run.count() + 1;
            let blocks = checks[until - 1].block - first + 1;
            buffer.clear();
            buffer.resize_zeroed(blocks as usize * BLOCK_BYTES);
            let place = first * BLOCK_BYTES_U64;
            self.reader.device.read(place, &mut [&mut buffer], IoClass::SyncRead)?;
            let sums: Vec<u32> = buffer.chunks_exact(BLOCK_BYTES).map(checksum).collect();
            let run = checks[from..until].iter();
            holds.extend(run.map(|c| sums.get((c.block - first) as usize) == Some(&c.checksum)));
            from = until;
        }
        let forbidden = self.expectations.forbidden(&holds);
        let frames = &self.frames;
        let in_part = mutation::active(Mutation::ReplayPartOfChain);
        Ok(cut(0, frames.len(), &forbidden, |index| !frames[index].continues || in_part))
    }
}

/// A frame reads differently than a moment ago.
fn changed() -> Error {
    Error::Corrupt("log: a frame changed while it was read".to_owned())
}

fn point_after(frames: &[Accepted], count: usize, start: &ReplayStart) -> ReplayPoint {
    count.checked_sub(1).and_then(|last| frames.get(last)).map_or(start.point, |last| ReplayPoint {
        position_blocks: last.position + last.total_blocks,
        sequence: start.point.sequence.saturating_add(count as u64),
        prev_digest: last.digest,
    })
}

/// Whether every payload block is what its record says. Records that cannot be decoded under a
/// checksum that holds were never written by a log: that is corruption, not the end of the log.
fn payloads_match(header: &FrameHeader, frame: &[u8]) -> Result<bool> {
    for record in Records::new(header.records(frame)) {
        if let Record::Payload { index, checksum: wanted, .. } = record? {
            let Some(block) = header.payload(frame, index) else {
                return Err(Error::Corrupt("log: payload index outside of the frame".to_owned()));
            };
            if checksum(block) != wanted {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// Finds the log on the ring, and keeps up to `kept_record_bytes` of records in memory. See the module's head.
///
/// # Errors
/// The device failed, or a frame is intact but makes no sense.
pub fn recover(
    device: &dyn Device,
    geometry: &LogGeometry,
    start: &ReplayStart,
    kept_record_bytes: usize,
    progress: &mut dyn FnMut(Progress),
) -> Result<Recovered> {
    if start.point.position_blocks > geometry.log_blocks {
        return Err(Error::Corrupt("superblock: replay starts outside of the log".to_owned()));
    }
    let mut scan = Scan {
        reader: RingReader::new(device, *geometry, progress),
        geometry: *geometry,
        start: *start,
        frames: Vec::new(),
        metas: Vec::new(),
        kept_bytes: 0,
        most_kept_bytes: kept_record_bytes.min(KEPT_RECORD_BYTES),
        expectations: Expectations::default(),
        durable: start.durable_lsn,
    };
    scan.follow()?;
    let kept = scan.prove_tail()?;
    let frames_cut = scan.frames.len() - kept;
    scan.frames.truncate(kept);
    scan.metas.truncate(kept);
    let mut end = scan.point_after(kept);
    end.position_blocks %= geometry.log_blocks.max(1);
    let last_lsn = scan.frames.last().map_or(0, |frame| frame.last_lsn);
    Ok(Recovered {
        geometry: *geometry,
        start: *start,
        frames: scan.frames,
        metas: scan.metas,
        end,
        next_lsn: start.next_lsn.max(last_lsn.saturating_add(1)),
        durable_lsn: scan.durable,
        frames_cut,
    })
}

impl Recovered {
    /// Number of frames that the log holds.
    pub fn frame_count(&self) -> usize {
        self.frames.len()
    }

    /// True when operations that were durable once are missing: the ring was damaged after it was
    /// written. A crash never does that.
    pub fn lost_durable(&self) -> bool {
        self.next_lsn <= self.durable_lsn
    }

    /// Whether the ring holds a frame that is none of these, and that a superblock newer than the one replay began with must have come before:
    /// it is of a later epoch, or says that operations were durable which are not here. No crash leaves such a frame. Reads all of the ring. What
    /// cannot be read there says nothing.
    pub fn is_outlived(&self, device: &dyn Device) -> bool {
        let mut no_progress = |_| ();
        let mut reader = RingReader::new(device, self.geometry, &mut no_progress);
        let is_whole = |reader: &mut RingReader<'_>, position| -> Result<bool> {
            let Some(header) = FrameHeader::peek(reader.get(position, 1)?) else {
                return Ok(false);
            };
            let is_newer = header.epoch > self.start.epoch || header.durable_lsn >= self.next_lsn;
            let blocks = header.total_blocks();
            let is_here = header.volume_id == self.geometry.volume_id
                && header.ring_position_blocks == position
                && position + blocks <= self.geometry.log_blocks;
            Ok(is_newer && is_here && header.verify(reader.get(position, blocks)?).is_some())
        };
        (0..self.geometry.log_blocks)
            .any(|position| is_whole(&mut reader, position).unwrap_or(false))
    }

    /// The epoch that all accepted frames carry; 0 if there is none, or more than one.
    pub fn epoch(&self) -> u64 {
        let first = self.frames.first().map_or(0, |frame| frame.epoch);
        if self.frames.iter().all(|frame| frame.epoch == first) { first } else { 0 }
    }

    /// Blocks of the ring from where replay started to the end of the last accepted frame.
    fn live_blocks(&self) -> u64 {
        let blocks = self.geometry.log_blocks;
        if self.frames.is_empty() {
            return 0;
        }
        let start = self.start.point.position_blocks % blocks;
        match (self.end.position_blocks % blocks + blocks - start) % blocks {
            0 => blocks,
            distance => distance,
        }
    }

    /// The accepted frames, for [`super::Log::keep_recovered`].
    pub fn live_frames(&self) -> impl ExactSizeIterator<Item = (Lsn, u64, u64)> {
        self.frames.iter().map(|frame| (frame.last_lsn, frame.position, frame.digest))
    }

    /// Where replay has begun.
    pub fn first(&self) -> &ReplayPoint {
        &self.start.point
    }

    /// How a log goes on from here, once a superblock with the epoch after the present one and
    /// [`Recovered::end`] is durable.
    pub fn continue_with(&self, transaction: u64) -> LogStart {
        LogStart {
            point: self.end,
            epoch: self.start.epoch + 1,
            next_lsn: self.next_lsn,
            transaction,
            live_blocks: self.live_blocks(),
        }
    }

    /// Hands the records of the accepted frames to `visit`, in order.
    ///
    /// # Errors
    /// The device failed, a frame reads differently than before, or the visitor's own.
    pub fn replay(
        &self,
        device: &dyn Device,
        progress: &mut dyn FnMut(Progress),
        visit: &mut dyn FnMut(&ReplayFrame<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut reader = RingReader::new(device, self.geometry, progress);
        let late = usize::from(mutation::active(Mutation::ReplayOneFrameLate));
        for (accepted, meta) in self.frames.iter().zip(&self.metas).skip(late) {
            let frame = match meta {
                // Verified when it was kept.
                Some(bytes) => {
                    ReplayFrame { header: FrameHeader::peek(bytes).ok_or_else(changed)?, bytes }
                }
                None => read_again(&mut reader, accepted)?,
            };
            visit(&frame)?;
        }
        Ok(())
    }

    /// Reads the accepted frames again that end with a `wanted` operation, and hands them to `visit`, in order, with their payload.
    ///
    /// # Errors
    /// As [`Recovered::replay`].
    pub fn replay_payloads(
        &self,
        device: &dyn Device,
        wanted: &dyn Fn(Lsn) -> bool,
        progress: &mut dyn FnMut(Progress),
        visit: &mut dyn FnMut(&ReplayFrame<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut reader = RingReader::new(device, self.geometry, progress);
        for accepted in self.frames.iter().filter(|frame| wanted(frame.last_lsn)) {
            visit(&read_again(&mut reader, accepted)?)?;
        }
        Ok(())
    }
}

/// A frame that the scan accepted.
fn read_again<'r>(reader: &'r mut RingReader<'_>, accepted: &Accepted) -> Result<ReplayFrame<'r>> {
    let bytes = reader.get(accepted.position, accepted.total_blocks)?;
    let header = FrameHeader::peek(bytes).ok_or_else(changed)?;
    if header.verify(bytes) != Some(accepted.digest) {
        return Err(changed());
    }
    Ok(ReplayFrame { header, bytes })
}
