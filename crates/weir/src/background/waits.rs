//! Who waits for room: writers while too much is dirty, syncs while the log is too full, and whoever finds no log space, no free block or
//! no page. Each asks for what makes some before it waits, and hears of it where that fails.

use super::futile::Futile;
use crate::alloc::ReserveClass;
use crate::cache::throttle::{Demand, Pressure};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::file::writeback::is_of_one_file;
use crate::format::BLOCK_BYTES_U64;
use crate::sync::atomic::Ordering;
use crate::types::BackgroundMode;

/// How often, and for how long each time, a writer waits for a clean page where memory is dear: a millisecond in all.
const CLEAN_PAUSES: u32 = 20;
const CLEAN_PAUSE_US: u64 = 50;
/// So many checkpoints in a row that have released nothing of the log are the last that somebody waits for. The first may have begun before
/// there was anything to release.
const VAIN_CHECKPOINTS: u32 = 6;
/// Half of the wait after the first of them, which doubles from one to the next.
const VAIN_PAUSE_US: u64 = 1_000;
/// No engine leaves a log like that: the room that checkpoints need for it is kept.
const FULL_FOR_GOOD: &str = "the log is full of pages, and has no room for bringing them home: open the volume for reading only, and \
                             copy its files to another";
/// How long somebody who can free no page himself lets others go on, who have them in their hands.
const OTHERS_PAUSE_US: u64 = 100;
/// How long whoever waits for a checkpoint to release log space waits before it looks again.
const LOG_PAUSE_US: u64 = 1_000;
/// After so many it asks for room whatever they have released.
const LOG_PATIENCE_CHECKPOINTS: u64 = 4;

/// What somebody has seen who waits for log space.
#[derive(Debug, Default)]
pub struct LogShortage {
    /// Checkpoints in a row that have released nothing, though nobody else had any room.
    vain_checkpoints: u32,
    /// How often a checkpoint had not been able to write pages home before the first of them, and anybody in the background anything.
    failures_before: (u64, u64),
}

impl Engine {
    /// More dirty data than should stay in memory.
    pub fn wants_writeback(&self) -> bool {
        self.background.limits.wants_writeback(&self.pressure())
    }

    /// Writers are delayed, or wait, until pages are clean or a checkpoint has ended.
    pub fn holds_writers_up(&self) -> bool {
        let demand = Demand { data_bytes: BLOCK_BYTES_U64 };
        self.background.limits.admit(&self.pressure(), demand).delay_ns > 0
    }

    fn dirty_bytes(&self) -> u64 {
        self.dirty_pages.load(Ordering::Acquire) * BLOCK_BYTES_U64
    }

    pub(super) fn log_bytes(&self) -> u64 {
        let fill = self.log.fill();
        (fill.used_blocks + fill.queued_blocks) * BLOCK_BYTES_U64
    }

    fn pressure(&self) -> Pressure {
        let delta = self.store.delta_size();
        Pressure {
            dirty_bytes: self.dirty_bytes(),
            delta_bytes: delta.bytes(),
            log_bytes: self.log_bytes(),
        }
    }

    /// How full the operations' part of the log is, in percent.
    pub fn log_percent(&self, log_bytes: u64) -> u64 {
        self.background.limits.log_percent(log_bytes)
    }

    /// Memory that the delta may take while the log is replayed.
    pub fn replayed_delta_bytes(&self) -> u64 {
        self.background.limits.replayed_delta_bytes()
    }

    /// Who puts data into the log and does not wait: asks for what empties it, from where others are held up. Answers how many bytes of it
    /// are used.
    pub fn ask_for_log_space(&self) -> u64 {
        let log_bytes = self.log_bytes();
        let others_wait = self.background.limits.log_delay_ns(log_bytes, 1) > 0;
        if others_wait && self.background.has_threads() {
            self.ask_to_empty_log(log_bytes);
        }
        log_bytes
    }

    /// Asks for whatever should be done with so much of the log used.
    pub(super) fn ask_to_empty_log(&self, log_bytes: u64) {
        if self.home_horizon(log_bytes).is_some() {
            self.background.request_flush();
        }
        let pressure = Pressure { log_bytes, ..Pressure::default() };
        if self.background.limits.wants_checkpoint(&pressure) {
            self.background.request_room();
        }
    }

    /// So much of the log is used that who may not wait leaves it to somebody who may, and waits as long as anybody is delayed: what went on
    /// would fill the log to its end, and there everybody waits for a whole checkpoint.
    pub fn log_holds_up(&self, log_bytes: u64) -> bool {
        self.background.has_threads() && self.background.limits.log_delay_is_longest(log_bytes)
    }

    /// The entry of a sync that puts `blocks` into the log: asks for what empties it early enough, and waits in proportion
    /// to how full it is. The caller holds at most `ops` locks.
    pub fn delay_for_log(&self, blocks: u64) {
        if !self.background.has_threads() {
            return;
        }
        let log_bytes = self.log_bytes();
        self.ask_to_empty_log(log_bytes);
        let delay_ns = self.background.limits.log_delay_ns(log_bytes, blocks);
        if delay_ns == 0 {
            return;
        }
        self.wait_for_log(Some(blocks));
        let sleep_us = self.background.debt.lock().add(delay_ns);
        if sleep_us > 0 {
            self.counters.log_delay_us.record(sleep_us);
            self.clock.sleep_us(sleep_us);
        }
    }

    /// Waits while the log is too full for `blocks` more, or for what nobody waits for (`None`), until a checkpoint has released some of it. Not
    /// for ever: where checkpoints fail, or some have released too little, admission says why, or has the log emptied. The caller holds at
    /// most `ops` locks.
    pub fn wait_for_log(&self, blocks: Option<u64>) {
        let mut waited_us = 0;
        let failures = self.checkpointer.failures();
        let last = self.checkpointer.completed() + LOG_PATIENCE_CHECKPOINTS;
        while self.checkpointer.failures() == failures && self.checkpointer.completed() < last {
            // What a frame may leave unused at the end of the ring is up to admission: in a small ring that is much, for as long as nothing is
            // appended.
            let fill = self.log.fill();
            let used_blocks = fill.used_blocks + fill.queued_blocks + fill.admitted_blocks;
            let log_bytes = used_blocks * BLOCK_BYTES_U64;
            let is_refused = self.background.limits.log_refuses(log_bytes, blocks);
            if !is_refused || !self.background.has_threads() || self.check_writable().is_err() {
                break;
            }
            self.ask_to_empty_log(log_bytes);
            self.clock.sleep_us(LOG_PAUSE_US);
            waited_us += LOG_PAUSE_US;
        }
        if waited_us > 0 {
            self.counters.log_delay_us.record(waited_us);
        }
    }

    /// The one place where writers wait for writeback: a smooth delay that grows with what is dirty, and a wait at the
    /// hard limit. `data_bytes`: what the caller will dirty. The caller holds at most `ops` locks.
    ///
    /// # Errors
    /// The volume is shut down, or nothing of what is waited for succeeds.
    pub fn throttle(&self, data_bytes: u64) -> Result<()> {
        let limits = &self.background.limits;
        if data_bytes > 0 && self.dirty_bytes() <= limits.writeback_start_bytes() {
            return Ok(());
        }
        let (mut futile, mut seen) = (None, None);
        loop {
            let moment = self.background.moment();
            let pressure = self.pressure();
            let admission = limits.admit(&pressure, Demand { data_bytes });
            if limits.wants_writeback(&pressure) {
                self.background.request_writeback();
            }
            if limits.wants_checkpoint(&pressure) {
                self.background.request_room();
            }
            if admission.delay_ns > 0 && self.background.has_threads() {
                let sleep_us = self.background.debt.lock().add(admission.delay_ns);
                if sleep_us > 0 {
                    self.counters.throttled.add(1);
                    self.counters.throttle_us.record(sleep_us);
                    self.clock.sleep_us(sleep_us);
                }
            }
            if !admission.must_wait {
                return Ok(());
            }
            self.check_writable()?;
            if self.background.has_threads() {
                let begun = || Futile::new(self.background.failures().0);
                let futile = futile.get_or_insert_with(begun);
                self.background.wait_progress(moment);
                // That a checkpoint has ended helps only who waits for that: it may have brought nothing home.
                let waits_for_checkpoint =
                    limits.admit(&pressure, Demand { data_bytes: 0 }).must_wait;
                let progress = if waits_for_checkpoint {
                    self.checkpointer.completed()
                } else {
                    self.background.paid_pages.load(Ordering::Acquire)
                };
                let is_better = seen.replace(progress) != Some(progress);
                let (failures, last) = self.background.failures();
                if let (true, Some(error)) = (futile.look(failures, is_better), last) {
                    return Err(error);
                }
            } else if limits.wants_writeback(&pressure) && self.flush_some()? > 0 {
                // Made some progress; look again.
            } else {
                self.wait_checkpoint(self.checkpointer.goal())?;
                // What is left may be on its way home, by somebody else.
                self.await_others(moment);
            }
        }
    }

    /// Writes some dirty pages home for a caller who needs others to be clean, whichever. Answers how many.
    ///
    /// # Errors
    /// Nothing could be written. What became of one file is its owner's to hear, as long as others can be.
    fn flush_some(&self) -> Result<u64> {
        let before_pages = self.dirty_pages.load(Ordering::Acquire);
        match self.flush_batch() {
            Err(error) if is_of_one_file(&error) => {
                let left_pages = self.dirty_pages.load(Ordering::Acquire);
                match before_pages.saturating_sub(left_pages) {
                    0 => Err(error),
                    pages => Ok(pages),
                }
            }
            flushed => flushed,
        }
    }

    /// Waits until a checkpoint has released log space. Where there was none to release, and others have the room who have been let in
    /// and are not in the log yet, lets them go on.
    ///
    /// # Errors
    /// As [`Engine::wait_checkpoint`]; or several in a row have released nothing, and nobody else has any room: what they could not bring
    /// home stays in the log.
    pub fn relieve_log(&self, shortage: &mut LogShortage) -> Result<()> {
        self.counters.log_stalls.add(1);
        // The end of the one under way may be enough; the caller looks again.
        let next = self.checkpointer.next_goal();
        self.timed_stall(|| {
            let before_blocks = self.log.fill().used_blocks;
            let before = (self.replay_sequence(), self.log.last_lsn());
            if shortage.vain_checkpoints == 0 {
                shortage.failures_before =
                    (self.checkpointer.home_failures().0, self.background.failures().0);
            }
            self.wait_checkpoint(next)?;
            let fill = self.log.fill();
            // Where others append, a chain of theirs may have kept the checkpoint from releasing anything; the log is finite, so that ends.
            let is_moving = before != (self.replay_sequence(), self.log.last_lsn());
            if fill.used_blocks < before_blocks || is_moving {
                shortage.vain_checkpoints = 0;
                return Ok(());
            }
            let others_go_on = fill.has_open_chain || self.store.obligations.are_changing();
            if fill.admitted_blocks > 0 || others_go_on {
                self.clock.sleep_us(OTHERS_PAUSE_US);
                return Ok(());
            }
            shortage.vain_checkpoints += 1;
            if shortage.vain_checkpoints < VAIN_CHECKPOINTS {
                // Somebody may be about to go on who has not had a processor for as long; amid a close too, which has ended the threads.
                if self.options.background != BackgroundMode::Manual {
                    self.clock.sleep_us(VAIN_PAUSE_US << shortage.vain_checkpoints);
                }
                return Ok(());
            }
            let refused = self.refused_since(shortage.failures_before);
            Err(refused.unwrap_or_else(|| Error::Corrupt(FULL_FOR_GOOD.into())))
        })
    }

    /// What the device has refused to bring home since so often: to checkpoints, or to others in the background. The last of several
    /// checkpoints may have found the pages in the hands of others, or a device that is well again.
    fn refused_since(&self, (by_checkpoints, by_others): (u64, u64)) -> Option<Error> {
        let (failures, failure) = self.checkpointer.home_failures();
        let (others, other) = self.background.failures();
        if failures > by_checkpoints { failure } else { other.filter(|_| others > by_others) }
    }

    /// Of the frame with which the log begins.
    fn replay_sequence(&self) -> u64 {
        self.superblock.lock().replay.sequence
    }

    /// Makes blocks available to `class` that only wait for something: purges, writeback, and a checkpoint. False if there
    /// is nothing to hope for.
    pub fn relieve_space(&self, class: ReserveClass) -> Result<bool> {
        self.counters.space_stalls.add(1);
        self.timed_stall(|| {
            self.purge_all()?;
            let totals = self.alloc.totals();
            let pending = totals.pending_free_blocks + totals.reserved_blocks;
            if pending == 0 && self.store.delta_size().running_keys == 0 {
                return Ok(false);
            }
            // A checkpoint frees blocks, and what was kept for it: changes take less room in the trees than
            // was feared.
            let before = self.alloc.room_blocks(class);
            // What the log holds for good is written where it lives, and takes no new block.
            self.commit_log(self.log.last_lsn())?;
            // What becomes dirty meanwhile is not waited for: somebody who overwrites without end would never let this one go on.
            let mut left_pages = self.dirty_pages.load(Ordering::Acquire);
            while left_pages > 0 {
                match self.flush_some() {
                    Ok(0) => break,
                    Ok(pages) => left_pages = left_pages.saturating_sub(pages),
                    // Its owner has heard of it, and what a checkpoint frees has nothing to do with it.
                    Err(error) if is_of_one_file(&error) => break,
                    Err(error) => return Err(error),
                }
            }
            self.wait_checkpoint(self.checkpointer.goal())?;
            Ok(self.alloc.room_blocks(class) > before)
        })
    }

    /// Lets others go on who have something to do that the caller waits for, from `moment` on.
    pub fn await_others(&self, moment: u64) {
        if self.background.has_threads() {
            self.background.wait_progress(moment);
        } else {
            self.clock.sleep_us(OTHERS_PAUSE_US);
        }
    }

    /// Waits until some page can be evicted.
    pub fn relieve_memory(&self) -> Result<()> {
        self.counters.memory_stalls.add(1);
        self.timed_stall(|| {
            if self.options.read_only {
                // Nothing can be written; others are about to be done with what they read.
                self.clock.sleep_us(OTHERS_PAUSE_US);
                return Ok(());
            }
            let moment = self.background.moment();
            if !self.background.has_threads() {
                if self.flush_some()? == 0 {
                    // Other callers have the pages: [`Engine::make_room`] says for how long that is believed.
                    self.clock.sleep_us(OTHERS_PAUSE_US);
                }
                return Ok(());
            }
            self.background.request_writeback();
            if !self.wants_writeback() {
                self.flush_some()?;
            }
            self.background.wait_progress(moment);
            Ok(())
        })
    }

    /// Fresh memory is dear, and no page is clean: gives writeback, if there is any, a moment to clean some, as long as a few `pauses` may
    /// take less than making the memory. False: the caller had better make it.
    pub fn await_clean_page(&self, pauses: &mut u32) -> bool {
        let is_coming = self.background.has_threads()
            && (self.wants_writeback() || self.background.handover.pages() > 0);
        if !is_coming || *pauses >= CLEAN_PAUSES {
            return false;
        }
        *pauses += 1;
        self.clock.sleep_us(CLEAN_PAUSE_US);
        true
    }

    fn timed_stall<T>(&self, wait: impl FnOnce() -> Result<T>) -> Result<T> {
        let began = self.clock.monotonic_ns();
        let result = wait();
        let took_ns = self.clock.since_ns(began);
        self.counters.stall_us.record(took_ns / 1000);
        result
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::device::{Device, memory::MemoryDevice};
    use crate::sync::atomic::AtomicU64;
    use crate::sync::{Arc, Clock, SystemClock};
    use crate::{CreateOptions, OpenFlags, Volume, VolumeOptions};

    /// The machine's, but that nobody sleeps: it counts for how long somebody would.
    #[derive(Default)]
    struct Sleepless {
        clock: SystemClock,
        slept_us: AtomicU64,
    }

    impl Clock for Sleepless {
        fn realtime_ns(&self) -> i64 {
            self.clock.realtime_ns()
        }
        fn monotonic_ns(&self) -> u64 {
            self.clock.monotonic_ns()
        }
        fn sleep_us(&self, duration_us: u64) {
            self.slept_us.fetch_add(duration_us, Ordering::Relaxed);
        }
    }

    #[test]
    fn who_needs_log_space_amid_a_close_gives_others_as_much_time_as_before_it() {
        let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(32 << 20));
        Volume::format_device(&device, &CreateOptions::default()).expect("format");
        let clock = Arc::new(Sleepless::default());
        let options = VolumeOptions { clock: clock.clone(), ..VolumeOptions::default() };
        let volume = Volume::open_device(device, options).expect("open");
        let file = volume.open_file("/f", OpenFlags::CREATE).expect("create");
        file.fsync().expect("fsync");
        let engine = file.engine();
        let (obligations, lsn) = (&engine.store.obligations, engine.log.last_lsn());
        // Others have a page in their hands that a checkpoint waits for.
        obligations.add(lsn, 1, None);
        // As a close does, before the volume is closed for others.
        engine.stop_threads();
        clock.slept_us.store(0, Ordering::Relaxed);
        let mut shortage = LogShortage::default();
        assert!((0..20).any(|_| engine.relieve_log(&mut shortage).is_err()));
        assert!(clock.slept_us.load(Ordering::Relaxed) > VAIN_PAUSE_US << VAIN_CHECKPOINTS >> 1);
        obligations.release(lsn);
    }
}
