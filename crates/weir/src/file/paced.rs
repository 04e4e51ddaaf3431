//! Background writeback at the pace that foreground I/O bears: the mechanism around [`Pacer`].
//!
//! Whoever writes in the background asks for a portion ([`Engine::begin_paced_write`]), writes it, and gives it back. What the
//! pacer learns from: reads that somebody waited for, and the log's frame writes (without the time that their bytes
//! take at [`LOG_BYTES_PER_US`], so that a large frame does not look like a slow disk). Frames that nobody waits for do not
//! count: a stream without syncs has one of them for each gigabyte or so, and would slow itself down.
//!
//! The data of a sync is not held up, but counted: background writeback leaves the disk to it.
//!
//! Lock: `state` is a leaf.

use crate::cache::pacing::{Pacer, cost_bytes};
use crate::device::IoClass;
use crate::engine::Engine;
use crate::file::writeback::is_paced;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard, wait_for};

/// Transfer rate at which a frame's size is taken out of its latency: 1 GB/s.
const LOG_BYTES_PER_US: u64 = 1000;
/// The log's figures are read this often.
const LOG_SAMPLE_US: u64 = 10_000;
/// Who has waited for the log within this time waits for it again.
const SYNCS_LATELY_US: u64 = 100_000;
/// Longest wait between two looks at what is in flight.
const PATIENCE_US: u64 = 5_000;

#[derive(Default)]
struct State {
    pacer: Pacer,
    in_flight_bytes: u64,
    /// Of large syncs.
    sync_bytes: u64,
    log: LogSample,
    /// Somebody has waited for the log lately, until then.
    syncs_until_us: u64,
}

impl State {
    /// True when background writeback may submit another `bytes` beside `portion_bytes` that it is about to submit.
    fn may_submit(&mut self, portion_bytes: u64, bytes: u64) -> bool {
        let own_bytes = self.in_flight_bytes + portion_bytes;
        // One request may always be: syncs that follow one another must not stop it.
        let all_bytes = if own_bytes == 0 { 0 } else { own_bytes + self.sync_bytes };
        self.pacer.may_submit(all_bytes, bytes)
    }

    /// As many of the requests with these `sizes` as may be submitted, at least the first.
    fn take_portion(&mut self, sizes: impl Iterator<Item = u64>) -> Portion {
        let mut portion = Portion { requests: 0, bytes: 0 };
        for bytes in sizes {
            if portion.requests > 0 && !self.may_submit(portion.bytes, bytes) {
                break;
            }
            portion.requests += 1;
            portion.bytes += bytes;
        }
        self.in_flight_bytes += portion.bytes;
        portion
    }

    /// The log's totals are these now.
    fn note_log(&mut self, now: LogSample) {
        let now_us = now.at_us;
        let awaited = now.awaited.saturating_sub(self.log.awaited);
        let write_us = now.write_ns.saturating_sub(self.log.write_ns) / 1000;
        let transfer_us = now.bytes.saturating_sub(self.log.bytes) / LOG_BYTES_PER_US;
        let frames = now.frames.saturating_sub(self.log.frames);
        self.log = now;
        if awaited == 0 {
            return;
        }
        self.syncs_until_us = now_us.saturating_add(SYNCS_LATELY_US);
        if let Some(latency_us) = write_us.saturating_sub(transfer_us).checked_div(frames) {
            self.pacer.on_foreground_io(latency_us, now_us);
        }
    }

    /// True while somebody waits for the log, or has lately.
    fn are_syncs_awaited(&self, now_us: u64) -> bool {
        now_us < self.syncs_until_us
    }
}

/// The log's totals when they were last read.
#[derive(Default)]
struct LogSample {
    at_us: u64,
    frames: u64,
    awaited: u64,
    bytes: u64,
    write_ns: u64,
}

/// What background writeback may do, and does.
#[derive(Default)]
pub struct Pacing {
    state: Mutex<State>,
    ended: Condvar,
    /// How many wait for pages that are on their way home.
    awaited: AtomicU64,
}

/// Requests that may be written together, to be given to [`Engine::end_paced_write`].
#[must_use = "what is not given back stays in flight"]
pub struct Portion {
    /// How many of the requests.
    pub requests: usize,
    bytes: u64,
}

/// Figures of [`Pacing`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PacingStats {
    /// Bytes that background writeback may have in flight, each request counting for some more than it has.
    pub limit_bytes: u64,
    /// Bytes that it has in flight, counted so.
    pub in_flight_bytes: u64,
    /// Latency of foreground I/O above which the limit is halved; none before the first sample.
    pub tolerated_us: Option<u64>,
}

impl Pacing {
    /// Performs `wait`, for pages that are on their way home. They may travel in a batch that keeps the background's pace; so meanwhile each
    /// thread in the background may have one request on its way, whatever else is.
    pub fn await_pages(&self, wait: impl FnOnce()) {
        self.awaited.fetch_add(1, Ordering::AcqRel);
        // Who has seen nobody wait sleeps by now.
        drop(self.state.lock());
        self.ended.notify_all();
        wait();
        self.awaited.fetch_sub(1, Ordering::AcqRel);
    }

    /// The figures now.
    pub fn stats(&self) -> PacingStats {
        let state = self.state.lock();
        PacingStats {
            limit_bytes: state.pacer.limit_bytes(),
            in_flight_bytes: state.in_flight_bytes,
            tolerated_us: state.pacer.tolerated_us(),
        }
    }
}

impl Engine {
    /// The monotonic clock, in microseconds.
    pub fn now_us(&self) -> u64 {
        self.clock.monotonic_ns() / 1000
    }

    /// Waits until some of the requests with these `sizes` may be written, at least the first.
    pub fn begin_paced_write(&self, sizes: impl Iterator<Item = u64>) -> Portion {
        let began_us = self.now_us();
        let mut sizes = sizes.map(cost_bytes).peekable();
        let first_bytes = sizes.peek().copied().unwrap_or(0);
        let mut state = self.background.pacing.state.lock();
        let mut waited = false;
        loop {
            let now_us = self.now_us();
            self.sample_log(&mut state, now_us);
            state.pacer.on_time(now_us);
            let is_awaited = self.background.pacing.awaited.load(Ordering::Acquire) > 0;
            // Whoever has panicked does not give its portion back.
            if state.may_submit(0, first_bytes) || is_awaited || self.check_shutdown().is_err() {
                break;
            }
            waited = true;
            wait_for(&self.background.pacing.ended, &mut state, PATIENCE_US);
        }
        let portion = state.take_portion(sizes);
        drop(state);
        if waited {
            let waited_us = self.now_us().saturating_sub(began_us);
            self.counters.pacing_wait_us.record(waited_us);
        }
        portion
    }

    /// As [`Engine::begin_paced_write`] where nothing has to be waited for. In manual mode all that is asked for, or with small
    /// rounds one request.
    pub fn try_paced_write(&self, sizes: impl Iterator<Item = u64>) -> Option<Portion> {
        if !self.background.has_threads() {
            let most = if self.options.round_pages.is_some() { 1 } else { usize::MAX };
            return Some(Portion { requests: sizes.take(most).count(), bytes: 0 });
        }
        let mut sizes = sizes.map(cost_bytes).peekable();
        let first_bytes = sizes.peek().copied().unwrap_or(0);
        let (mut state, now_us) = self.sampled_pacing();
        state.pacer.on_time(now_us);
        state.may_submit(0, first_bytes).then(|| state.take_portion(sizes))
    }

    /// A portion was written, or failed.
    #[allow(clippy::needless_pass_by_value, reason = "a portion is given back once")]
    pub fn end_paced_write(&self, portion: Portion) {
        let mut state = self.background.pacing.state.lock();
        state.in_flight_bytes = state.in_flight_bytes.saturating_sub(portion.bytes);
        drop(state);
        self.background.pacing.ended.notify_all();
    }

    /// True while others read from the device or write to the log: a large sync is to leave them room.
    pub fn is_foreground_active(&self) -> bool {
        let (state, now_us) = self.sampled_pacing();
        state.pacer.is_foreground_active(now_us)
    }

    /// True while others wait for the log, or have lately.
    pub fn are_syncs_awaited(&self) -> bool {
        let (state, now_us) = self.sampled_pacing();
        state.are_syncs_awaited(now_us)
    }

    /// The state, with what the log has done until now, and the time.
    fn sampled_pacing(&self) -> (MutexGuard<'_, State>, u64) {
        let now_us = self.now_us();
        let mut state = self.background.pacing.state.lock();
        self.sample_log(&mut state, now_us);
        (state, now_us)
    }

    /// What is sent to the device from now on comes after the frames that are on their way to it, and if it is a sync's a little after a
    /// flush (see `log/underway.rs`).
    pub fn let_log_pass(&self, class: IoClass) {
        if !self.background.has_threads() {
            return;
        }
        let frames_us = self.log.let_frames_pass();
        let flush_us = if is_paced(class) { None } else { self.log.let_flush_pass() };
        for waited_us in frames_us.into_iter().chain(flush_us) {
            self.counters.let_pass_us.record(waited_us);
        }
    }

    /// Data of a large sync is on its way to the device, to be taken back by [`Engine::end_sync_write`].
    pub fn begin_sync_write(&self, bytes: u64) {
        self.background.pacing.state.lock().sync_bytes += bytes;
    }

    /// Such data was written, or failed.
    pub fn end_sync_write(&self, bytes: u64) {
        let mut state = self.background.pacing.state.lock();
        state.sync_bytes = state.sync_bytes.saturating_sub(bytes);
        drop(state);
        self.background.pacing.ended.notify_all();
    }

    /// Somebody waited for the device since `began_ns`.
    pub fn note_foreground_read(&self, began_ns: u64) {
        let now_ns = self.clock.monotonic_ns();
        let latency_us = now_ns.saturating_sub(began_ns) / 1000;
        self.counters.read_us.record(latency_us);
        if self.background.has_threads() {
            let mut state = self.background.pacing.state.lock();
            state.pacer.on_foreground_io(latency_us, now_ns / 1000);
        }
    }

    /// Tells the pacer how long the log's writes have taken since the last time.
    fn sample_log(&self, state: &mut State, now_us: u64) {
        if now_us < state.log.at_us.saturating_add(LOG_SAMPLE_US) {
            return;
        }
        let stats = self.log.stats().snapshot();
        state.note_log(LogSample {
            at_us: now_us,
            frames: stats.frames,
            awaited: stats.frames_awaited,
            bytes: stats.frame_bytes + stats.beside_bytes,
            write_ns: stats.frame_write_ns.sum,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_frames_that_somebody_waits_for_are_syncs_and_foreground() {
        let mut state = State::default();
        let written = LogSample { at_us: 20_000, frames: 3, bytes: 12_288, ..Default::default() };
        state.note_log(written);
        assert!(!state.are_syncs_awaited(20_000) && !state.pacer.is_foreground_active(20_000));
        let written =
            LogSample { at_us: 40_000, frames: 5, awaited: 1, bytes: 20_480, write_ns: 100_000 };
        state.note_log(written);
        assert!(state.are_syncs_awaited(40_000) && state.pacer.is_foreground_active(40_000));
        // What was true is not for ever.
        assert!(state.are_syncs_awaited(40_000 + SYNCS_LATELY_US - 1));
        assert!(!state.are_syncs_awaited(40_000 + SYNCS_LATELY_US));
        assert!(!state.pacer.is_foreground_active(40_000 + SYNCS_LATELY_US));
    }
}
