//! Writeback of much: in rounds, one of them on its way to the disk while the next is collected, so that the disk does not wait
//! for checksums and commits. For a sync ([`Engine::write_back`]), for all of them ([`Engine::send_home_together`]); and at the pace of the
//! background for what was handed over ([`Engine::drain_handover`]) and what is too much in memory ([`Engine::flush_while`]).
//!
//! **Invariant:** whoever waits for something that he may hold himself, be it the pacer's portion or log space, finishes what he has
//! under way first.
//! **Invariant:** rounds are finished in the order in which they began; a batch that was handed over ends with its last round, or with the
//! drain.
//!
//! A thread that has computed for a while rests between two pieces, so that others get the processor: [`crate::cache::stretch`].

use super::is_paced;
use super::output::{OutRequest, Writes, Written, note_failures, requests_of, to_device};
use super::piece::{PIECE_PAGES, Piece};
use crate::cache::map::RunFilter;
use crate::cache::stretch::{REST_US, Stretch};
use crate::device::IoClass;
use crate::engine::{Engine, Room};
use crate::error::{Error, Result};
use crate::file::handover::{Batch, TO_WRITE};
use crate::file::paced::Portion;
use crate::inode::Inode;
use crate::mutation::{self, Mutation};
use crate::sync::{Arc, OnPanic};
use std::ops::Range;

/// Pages of one round of a sync: 8 MiB.
const SYNC_ROUND_PAGES: u64 = 8 * PIECE_PAGES;
/// The same while others wait for the disk: with one round behind it, 1 MiB.
const SHARED_ROUND_PAGES: u64 = PIECE_PAGES / 2;
/// Pages of one round of the background while there is foreground I/O: 4 MiB.
const BESIDE_ROUND_PAGES: u64 = 4 * PIECE_PAGES;
/// Pages that are collected between two looks at the clock, while others may want the processor.
const MOST_PAGES_AT_ONCE: u64 = PIECE_PAGES / 2;
/// Files that the background looks at together.
pub const FLUSH_INODES: usize = 256;
/// Batches that one call writes while more and more are handed over: the thread has other things to do as well.
const MOST_BATCHES: usize = 16;

/// What one caller has under way.
struct Rounds<'a> {
    engine: &'a Engine,
    filter: RunFilter,
    class: IoClass,
    /// Home, but not settled: that happens while the next one is on its way, so that the disk does not wait for it.
    home: Option<Home>,
    /// The round before the one that is being collected.
    last: Option<Round>,
    /// The work since the thread last slept.
    stretch: Stretch,
    /// The first error.
    result: Result<()>,
}

/// Pieces on their way. Hold their log space, and must be finished.
struct Round {
    pieces: Vec<Piece>,
    /// How the portions of it ended that have been written already.
    earlier: Written,
    writes: Writes,
    share: Share,
    ends_batch: bool,
}

/// Pieces that are written, or failed. Hold their log space.
struct Home {
    pieces: Vec<Piece>,
    ends_batch: bool,
}

/// What a round counts for while it is on its way.
enum Share {
    /// Bytes of a sync, for which the background makes room.
    Sync(u64),
    /// Of what the background may have in flight.
    Paced(Portion),
    Nothing,
}

/// An error of writeback that says nothing of other files: a node or a block that cannot be read, or data that no place takes.
pub fn is_of_one_file(error: &Error) -> bool {
    matches!(error, Error::Io(_) | Error::Corrupt(_))
}

impl Engine {
    /// Collects, writes and settles dirty pages of `inode` until none of the range that pass `filter` are left but
    /// those under writeback.
    pub fn write_back(
        &self,
        inode: &Arc<Inode>,
        range: Range<u64>,
        filter: RunFilter,
        class: IoClass,
    ) -> Result<()> {
        let mut rounds = Rounds::new(self, filter, class);
        rounds.write(&[(inode.clone(), range)], Then::End, |_| true);
        rounds.end()
    }

    /// Sends the dirty pages of many files home that the log does not have, together, for a sync. What fails stays dirty.
    pub fn send_home_together(&self, files: &[(Arc<Inode>, Range<u64>)]) -> Result<()> {
        let mut rounds = Rounds::new(self, TO_WRITE, IoClass::SyncWrite);
        rounds.write(files, Then::End, |_| true);
        rounds.end()
    }

    /// Writes everything that was handed over up to now, and some of what is handed over meanwhile. Answers how many pages
    /// that were.
    ///
    /// # Errors
    /// The first that struck; the file's owner hears of it, and the pages stay dirty.
    pub fn drain_handover(&self) -> Result<u64> {
        let handover = &self.background.handover;
        let _drain = handover.begin_drain();
        let _gives_up = OnPanic::new(|| while self.end_handed_over_batch() {});
        let mut rounds = Rounds::new(self, TO_WRITE, IoClass::Writeback);
        let mut pages = 0;
        let mut given_up = Batch::new();
        for number in 0..MOST_BATCHES {
            if rounds.result.is_err() || number > 0 && !handover.is_due() {
                break;
            }
            let Some(batch) = handover.take_batch() else { break };
            pages += rounds.write(&batch, Then::NextBatch, |_| true);
            if rounds.result.is_err() {
                given_up = batch;
            }
        }
        let result = self.write_each_alone(rounds.end(), given_up, TO_WRITE);
        // After an error, or where the end of a batch had nothing to write any more.
        while self.end_handed_over_batch() {}
        self.counters.handed_over_pages.add(pages);
        result.map(|()| pages)
    }

    /// Writes dirty pages that pass `filter` home, of all files that have some, until there are none or `go_on` says no, which hears
    /// how many there were. Answers that.
    ///
    /// # Errors
    /// The first that struck; the file's owner hears of it, and the pages stay dirty.
    pub fn flush_while(&self, filter: RunFilter, go_on: impl Fn(u64) -> bool) -> Result<u64> {
        let mut rounds = Rounds::new(self, filter, IoClass::Writeback);
        let mut pages = 0;
        let given_up = loop {
            let inodes = self.dirty.next_batch(FLUSH_INODES).into_iter();
            let files: Vec<_> = inodes.map(|inode| (inode, 0..u64::MAX)).collect();
            let written = rounds.write(&files, Then::More, |more| go_on(pages + more));
            pages += written;
            if written == 0 || rounds.result.is_err() || !go_on(pages) {
                // The last round may fail yet.
                break files;
            }
        };
        self.write_each_alone(rounds.end(), given_up, filter).map(|()| pages)
    }

    /// Where the rounds that `given_up` was part of have ended with an error of one file, writes each of its files by itself: one that cannot be
    /// written is no reason for the others to stay in memory. Answers the error.
    fn write_each_alone(
        &self,
        result: Result<()>,
        given_up: Batch,
        filter: RunFilter,
    ) -> Result<()> {
        for (inode, range) in given_up {
            if !result.as_ref().is_err_and(is_of_one_file) {
                break;
            }
            let written = self.write_back(&inode, range, filter, IoClass::Writeback);
            if written.as_ref().is_err_and(|error| !is_of_one_file(error)) {
                return written;
            }
        }
        result
    }

    /// The oldest batch under way is home, or given up. False: there is none.
    fn end_handed_over_batch(&self) -> bool {
        let Some(batch): Option<Batch> = self.background.handover.end_batch() else { return false };
        for (inode, _) in batch {
            inode.io_ended();
        }
        self.background.progress();
        true
    }
}

/// What comes after some ranges.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    /// Nothing: the caller waits for the last round, and may as well write it.
    End,
    /// The end of a batch that was handed over, and maybe another.
    NextBatch,
    /// Maybe more.
    More,
}

impl<'a> Rounds<'a> {
    fn new(engine: &'a Engine, filter: RunFilter, class: IoClass) -> Self {
        let begin = if is_paced(class) { Stretch::new } else { Stretch::of_sync };
        let stretch = begin(engine.now_us());
        Self { engine, filter, class, home: None, last: None, stretch, result: Ok(()) }
    }

    /// Sends the dirty pages of `ranges` on their way. Answers how many were collected. Stops at the first error, and after a round
    /// where `go_on` says no, which hears how many there were.
    fn write(
        &mut self,
        ranges: &[(Arc<Inode>, Range<u64>)],
        then: Then,
        go_on: impl Fn(u64) -> bool,
    ) -> u64 {
        let mut pages = 0;
        let mut rest = ranges;
        while !rest.is_empty() && self.result.is_ok() && (pages == 0 || go_on(pages)) {
            let mut pieces = Vec::new();
            pages += self.collect(&mut rest, &mut pieces);
            let is_last = rest.is_empty() || self.result.is_err();
            let goes_on = !is_last || then != Then::End;
            // What is given up of a batch has yet to be tried.
            self.begin(pieces, goes_on, rest.is_empty() && then == Then::NextBatch);
        }
        pages
    }

    /// The end of all rounds.
    fn end(mut self) -> Result<()> {
        self.finish();
        self.result
    }

    /// Pieces under way hold log space, and maybe a portion.
    fn holds_something(&self) -> bool {
        self.home.is_some() || self.last.is_some()
    }

    fn round_pages(&self) -> u64 {
        let engine = self.engine;
        if let Some(pages) = engine.options.round_pages {
            return pages;
        }
        if self.is_paced() {
            return if engine.is_foreground_active() {
                BESIDE_ROUND_PAGES
            } else {
                SYNC_ROUND_PAGES
            };
        }
        let is_shared = engine.background.has_threads() && engine.is_foreground_active();
        if is_shared { SHARED_ROUND_PAGES } else { SYNC_ROUND_PAGES }
    }

    fn is_paced(&self) -> bool {
        is_paced(self.class)
    }

    /// Collects one round of what is left. Answers how many pages it has.
    fn collect(&mut self, rest: &mut &[(Arc<Inode>, Range<u64>)], pieces: &mut Vec<Piece>) -> u64 {
        let most_pages = self.round_pages();
        // Whoever may have to rest comes up for air between pieces.
        let at_once = if self.may_rest() { MOST_PAGES_AT_ONCE } else { most_pages };
        let mut pages = 0;
        while let Some((inode, range)) = rest.first() {
            // What is under way holds log space.
            let room = if self.holds_something() { Room::NoWait } else { Room::Normal };
            let budget = (most_pages.saturating_sub(pages).min(at_once), room);
            match self.engine.collect(inode, range.clone(), self.filter, budget, pieces) {
                Ok(collected) => {
                    pages += collected.pages;
                    if !collected.complete {
                        if collected.pages > 0 && pages < most_pages {
                            self.make_way();
                            continue;
                        }
                        break;
                    }
                }
                Err(Error::WouldBlock) if self.holds_something() => {
                    self.finish();
                    if self.result.is_err() {
                        break;
                    }
                    continue;
                }
                Err(error) => {
                    self.note(Err(error));
                    break;
                }
            }
            *rest = &rest[1..];
            self.make_way();
        }
        pages
    }

    /// There are others who may want the processor.
    fn may_rest(&self) -> bool {
        let engine = self.engine;
        engine.background.has_threads() && engine.is_foreground_active()
    }

    /// After a stretch of work, lets those run who wait for this processor; unless somebody waits for pages to become clean.
    /// The caller holds no lock. What is under way stays so.
    fn make_way(&mut self) {
        let engine = self.engine;
        if !self.stretch.is_over(engine.now_us()) {
            return;
        }
        if self.may_rest() && !engine.holds_writers_up() {
            engine.clock.sleep_us(REST_US);
            engine.counters.writeback_rests.add(1);
        }
        self.stretch = Stretch::new(engine.now_us());
    }

    /// Sends a round on its way, settles what is home, and waits for the round before. Unless it `goes_on`, the round is written here and now.
    fn begin(&mut self, pieces: Vec<Piece>, goes_on: bool, ends_batch: bool) {
        let mut requests = requests_of(&pieces, self.engine.most_request_pages(self.class));
        let mut earlier = Vec::new();
        let mut share = Share::Nothing;
        if self.is_paced() && !requests.is_empty() {
            loop {
                let portion = self.next_portion(&requests);
                let rest = requests.split_off(portion.requests);
                if rest.is_empty() {
                    share = Share::Paced(portion);
                    break;
                }
                // Nobody who waits for those pages waits for this portion too.
                self.settle_home();
                earlier.extend(self.engine.run_requests(requests, self.class));
                self.engine.end_paced_write(portion);
                requests = rest;
            }
        } else if goes_on {
            self.engine.let_log_pass(self.class);
            let bytes = requests.iter().map(OutRequest::bytes).sum();
            self.engine.begin_sync_write(bytes);
            share = Share::Sync(bytes);
        }
        let writes = self.send(requests, goes_on);
        self.settle_home();
        let mut round = Round { pieces, earlier, writes, share, ends_batch };
        if mutation::active(Mutation::SettleUnderway) {
            let settled = self.engine.settle(std::mem::take(&mut round.pieces));
            self.note(settled);
        }
        if let Some(before) = self.last.replace(round) {
            self.home = Some(self.wait(before));
        }
    }

    fn next_portion(&mut self, requests: &[OutRequest]) -> Portion {
        let engine = self.engine;
        engine.let_log_pass(self.class);
        if let Some(portion) = engine.try_paced_write(requests.iter().map(OutRequest::bytes)) {
            return portion;
        }
        self.finish();
        engine.begin_paced_write(requests.iter().map(OutRequest::bytes))
    }

    fn send(&self, requests: Vec<OutRequest>, goes_on: bool) -> Writes {
        let engine = self.engine;
        if !engine.may_overlap() || !goes_on || requests.is_empty() {
            return Writes::Done(engine.run_requests(requests, self.class));
        }
        let (numbers, requests) = to_device(requests, self.class);
        Writes::Begun(numbers, engine.device.clone().begin_all(requests))
    }

    /// Waits for everything, and settles it.
    fn finish(&mut self) {
        self.settle_home();
        if let Some(last) = self.last.take() {
            self.home = Some(self.wait(last));
        }
        self.settle_home();
    }

    /// Waits until a round is written.
    fn wait(&mut self, round: Round) -> Home {
        let Round { mut pieces, earlier, writes, share, ends_batch } = round;
        let from_us = self.engine.now_us();
        let results = writes.wait();
        self.stretch.waited(from_us, self.engine.now_us());
        match share {
            Share::Sync(bytes) => self.engine.end_sync_write(bytes),
            Share::Paced(portion) => self.engine.end_paced_write(portion),
            Share::Nothing => {}
        }
        if !(earlier.is_empty() && results.is_empty()) {
            self.engine.log.note_data_written();
        }
        note_failures(&mut pieces, earlier);
        note_failures(&mut pieces, results);
        Home { pieces, ends_batch }
    }

    fn settle_home(&mut self) {
        let Some(Home { pieces, ends_batch }) = self.home.take() else { return };
        for piece in pieces {
            let settled = self.engine.settle([piece]);
            self.note(settled);
            self.make_way();
        }
        if ends_batch {
            self.engine.end_handed_over_batch();
        }
    }

    fn note(&mut self, result: Result<()>) {
        if self.result.is_ok() {
            self.result = result;
        }
    }
}
