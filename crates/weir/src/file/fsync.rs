//! Making a file durable.
//!
//! Few dirty pages go into the log frame as payload, together with the inode: one write and one
//! flush, shared with everybody who syncs meanwhile. New ones among them, and those that live apart from their neighbours in the
//! file, are written beside the frame that maps them (`writeback/beside.rs`): [`super::placement_policy`]. Many go home first
//! (in parallel, outside of the log), then a frame with the new mapping; the same one flush covers both.
//!
//! What has to be waited for: writeback of the pages in range that was under way already, because
//! one version of a page is written at a time; but not where that goes in place what the log holds.

use super::homes::run_of;
use super::known_homes::{Held, MappedRun};
use super::placement_policy;
use super::writeback::{PIECE_PAGES, USUAL_RUNS, page_range};
use crate::cache::map::{LoggedFilter, PageMap, RunFilter};
use crate::device::IoClass;
use crate::engine::{Engine, Room};
use crate::error::{Error, Result};
use crate::format::{BLOCK_BYTES, Key};
use crate::inode::{Inode, Reach};
use crate::log::Admission;
use crate::mutation::{self, Mutation};
use crate::sync::{Arc, at_once};
use crate::txn::{Lsn, Op};
use std::ops::Range;

/// Most data that travels in a log frame: beyond this, writing it twice costs more than the
/// saved request.
pub const MAX_PAYLOAD_PAGES: usize = 32;
/// From this fill of the part of the ring that operations may use, in percent, new pages that cannot go beside a frame at once leave room to
/// those that need it.
const PRESSED_PERCENT: u64 = 65;
/// Log space for the records of one payload operation.
pub(super) const PAYLOAD_RECORD_BYTES: usize = 512 + 64 * MAX_PAYLOAD_PAGES;

/// Log space for the inode of a file whose size the log does not know.
pub const SIZE_BYTES: usize = 1024;

/// What [`Engine::log_dirty`] did.
enum Logged {
    /// The pages are in the open frame as part of this operation (or there was nothing to do).
    Done,
    /// Too much to log: send it home.
    TooMuch,
    /// These are to be written beside their frame.
    Beside(Vec<Range<u64>>),
    /// Pages are under writeback: wait for it.
    Busy,
    /// Something changed while it was being looked at: look again.
    Again,
}

/// Which part of a file's state is to be durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SyncKind {
    /// Data, and what is needed to read it back (`fdatasync`).
    Data,
    /// All attributes too (`fsync`).
    Full,
}

impl Engine {
    /// Makes `range` of `inode` durable; blocks until it is.
    pub fn fsync(&self, inode: &Arc<Inode>, range: Range<u64>, kind: SyncKind) -> Result<()> {
        if self.options.read_only {
            return self.check_shutdown();
        }
        let began_ns = self.clock.monotonic_ns();
        let lsn = self.prepare_sync(inode, range, kind)?;
        self.counters.count_sync(self.clock.since_ns(began_ns));
        self.take_others_along(inode);
        self.commit_log(lsn)
    }

    /// A sync of `range` that finds everything durable already, and is counted as one; on a volume that is open for reading only,
    /// everything is. False: there is something to do, or the volume was shut down; nothing was done. Never waits for anything.
    pub fn fsync_if_durable(&self, inode: &Inode, range: Range<u64>, kind: SyncKind) -> bool {
        if self.options.read_only || self.check_writable().is_err() {
            return self.check_shutdown().is_ok();
        }
        let began_ns = self.clock.monotonic_ns();
        let pages = page_range(range.start, range.end.saturating_sub(range.start));
        // In this order: what leaves the dirty pages meanwhile has its LSN by then.
        let is_durable = Self::is_in_log(inode, &pages, kind)
            && (last_lsn(inode, kind) <= self.log.durable_lsn()
                || mutation::active(Mutation::TakeLoggedForDurable));
        if is_durable {
            self.note_found_durable(inode);
            self.log.note_found_durable();
            self.counters.count_sync(self.clock.since_ns(began_ns));
        }
        is_durable
    }

    /// The first half of an fsync: everything is in the log's stream (or home) up to the answered
    /// LSN. The second half, waiting for that LSN, may be left to somebody else.
    pub fn prepare_sync(
        &self,
        inode: &Arc<Inode>,
        range: Range<u64>,
        kind: SyncKind,
    ) -> Result<Lsn> {
        self.bring_into_log(inode, range, kind).inspect_err(|_| self.forget_failed(inode))
    }

    /// After a sync that failed.
    fn forget_failed(&self, inode: &Inode) {
        // What was looked up for it would keep parts of the tree in memory until the next.
        inode.known_mapping.lock().forget();
        // Nobody asks for what it has in the log: after a shutdown nobody else ends it.
        self.log.abandon_companions();
    }

    fn bring_into_log(&self, inode: &Arc<Inode>, range: Range<u64>, kind: SyncKind) -> Result<Lsn> {
        self.check_writable()?;
        let pages = page_range(range.start, range.end.saturating_sub(range.start));
        let mut sent_home = None;
        let mut beside_from = Some(self.beside_from());
        loop {
            let moment = inode.io_moment();
            match self.log_dirty(inode, &pages, kind, (Room::Normal, beside_from))? {
                Logged::Done => break,
                Logged::TooMuch if mutation::active(Mutation::SizeBeforeData) => break,
                Logged::TooMuch => {
                    if let Some(reach) = sent_home {
                        // What is dirty now was written since the sync began.
                        self.log_size(inode, reach, Room::Normal)?;
                        break;
                    }
                    sent_home = Some(reach_within(inode, &pages));
                    self.send_home(inode, &pages, std::slice::from_ref(&pages))?;
                    beside_from = None;
                }
                Logged::Beside(new_pages) => {
                    mark_chosen(inode, &new_pages);
                    self.sync_beside(inode, &pages)?;
                    // What is left is logged, or too much.
                    beside_from = None;
                }
                Logged::Busy => self.wait_pages(inode, moment),
                Logged::Again => {}
            }
        }
        Ok(last_lsn(inode, kind))
    }

    /// As [`Engine::prepare_sync`], if that needs no waiting. A ticket's new pages may go beside their frame, where that needs none either;
    /// otherwise they travel in the log, unless it is rather full. `None` for a ticket also where the log is nearly full: it is for
    /// somebody who may wait. What is no ticket goes into the log with somebody who has waited.
    pub fn prepare_at_once(
        &self,
        inode: &Arc<Inode>,
        range: Range<u64>,
        kind: SyncKind,
        is_ticket: bool,
    ) -> Result<Option<Lsn>> {
        let brought = self.bring_at_once(inode, range, kind, is_ticket);
        brought.inspect_err(|_| self.forget_failed(inode))
    }

    fn bring_at_once(
        &self,
        inode: &Arc<Inode>,
        range: Range<u64>,
        kind: SyncKind,
        is_ticket: bool,
    ) -> Result<Option<Lsn>> {
        let pages = page_range(range.start, range.end.saturating_sub(range.start));
        let log_bytes = self.ask_for_log_space();
        if is_ticket && self.log_holds_up(log_bytes) && !Self::is_in_log(inode, &pages, kind) {
            return Ok(None);
        }
        let is_pressed = self.log_percent(log_bytes) >= PRESSED_PERCENT;
        // Where too much waits already, nothing is looked up and chosen for it.
        let may_go_beside = is_ticket && self.log.takes_companions();
        let mut beside_from = (may_go_beside || is_pressed).then(|| self.beside_from());
        loop {
            let room = (Room::NoWait, beside_from);
            match at_once(|| self.log_dirty(inode, &pages, kind, room)) {
                Ok(Logged::Done) => return Ok(Some(last_lsn(inode, kind))),
                Ok(Logged::Beside(new_pages)) if may_go_beside => {
                    mark_chosen(inode, &new_pages);
                    if !self.sync_beside_at_once(inode, &pages)? && is_pressed {
                        return Ok(None);
                    }
                    // What is left is logged, or too much.
                    beside_from = None;
                }
                Ok(Logged::TooMuch | Logged::Beside(_) | Logged::Busy) | Err(Error::WouldBlock) => {
                    return Ok(None);
                }
                Ok(Logged::Again) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Puts the data of a file into the log, if that is no more than one operation carries, because a rename is about to put the file in
    /// another one's place, if `replaces` says so: after a crash the name then has what was written, or the file that it had. More is left to
    /// background writeback, which begins at once. Makes nothing durable. May wait for log space, and for pages of the file that are on
    /// their way home. False: there is something to write, and nothing is replaced.
    pub fn log_before_replacing(
        &self,
        inode: &Arc<Inode>,
        replaces: impl FnOnce() -> bool,
    ) -> Result<bool> {
        let (pages, kind) = (0..u64::MAX, SyncKind::Data);
        if self.options.read_only || Self::is_in_log(inode, &pages, kind) {
            return Ok(true);
        }
        if !replaces() {
            return Ok(false);
        }
        loop {
            let moment = inode.io_moment();
            let logged = self.log_dirty(inode, &pages, kind, (Room::Normal, None));
            match logged.inspect_err(|_| self.forget_failed(inode))? {
                Logged::Done => return Ok(true),
                Logged::TooMuch | Logged::Beside(_) => {
                    self.hand_over(inode, &pages);
                    return Ok(true);
                }
                Logged::Busy => self.wait_pages(inode, moment),
                Logged::Again => {}
            }
        }
    }

    /// Waits until `lsn` is durable, and shuts the volume down if that fails.
    pub fn commit_log(&self, lsn: Lsn) -> Result<()> {
        let committed = self.finish_barriers(lsn).and_then(|()| {
            loop {
                match self.log.commit(lsn) {
                    Err(Error::WouldBlock) => self.finish_barriers(Lsn::MAX)?,
                    ended => return ended,
                }
            }
        });
        committed.inspect_err(|error| {
            self.shut_down_after(error);
            self.log.abandon_companions();
        })
    }

    /// Puts the dirty pages of `pages` into the log, if they are few.
    fn log_dirty(
        &self,
        inode: &Arc<Inode>,
        pages: &Range<u64>,
        kind: SyncKind,
        (room, beside_from): (Room, Option<u64>),
    ) -> Result<Logged> {
        let limit = self.max_payload_pages();
        let (count, is_awaited) = unlogged(inode, pages, limit);
        if count == 0 && !is_awaited && !Self::has_news(inode, kind) {
            return Ok(Logged::Done);
        }
        if count > limit {
            return Ok(Logged::TooMuch);
        }
        if let Some(least) = beside_from {
            let chosen = self.worth_beside(inode, pages, count, least)?;
            if !chosen.is_empty() {
                return Ok(Logged::Beside(chosen));
            }
        }
        if room == Room::Normal {
            self.delay_for_log(count as u64 + 1);
        }
        let admission = self.admit(PAYLOAD_RECORD_BYTES, count, room)?;
        let _map = inode.lock_map()?;
        // The mapping cannot change from here on, so where the pages live can be looked up before the
        // page map is locked.
        let mut most = count;
        let wanted = || {
            let runs = unlogged_runs(inode, pages, limit + 1);
            // Others may have gone since they were counted. As many as are left are these, or they are counted again.
            most = most.min(runs.iter().map(|run| (run.end - run.start) as usize).sum());
            runs
        };
        let homes = self.homes(inode, wanted, Held::Map)?;
        inode.known_mapping.lock().forget();
        self.log_pages(inode, pages, (most, &homes), (room, admission))
    }

    /// From how many new pages on a sync has them written beside its frame.
    fn beside_from(&self) -> u64 {
        self.options.beside_from_pages.unwrap_or(placement_policy::MIN_BESIDE_PAGES)
    }

    /// The dirty pages that are to be written beside the frame, at least `least`.
    fn worth_beside(
        &self,
        inode: &Inode,
        pages: &Range<u64>,
        count: usize,
        least: u64,
    ) -> Result<Vec<Range<u64>>> {
        if (count as u64) < least {
            return Ok(Vec::new());
        }
        let runs = unlogged_runs(inode, pages, count);
        // Only a hint, so it needs no lock: where the pages go is decided when they are taken.
        let wanted = || placement_policy::with_neighbours(&runs);
        let homes = self.homes(inode, wanted, Held::Nothing)?;
        let moves = placement_policy::has_room_to_move(&self.alloc.totals());
        Ok(placement_policy::beside(&runs, least, moves, |page| home_of(&homes, page)))
    }

    /// A sync has nothing to put into the log.
    fn is_in_log(inode: &Inode, pages: &Range<u64>, kind: SyncKind) -> bool {
        unlogged(inode, pages, 0) == (0, false) && !Self::has_news(inode, kind)
    }

    /// Attributes that matter for `kind` are not in the log.
    fn has_news(inode: &Inode, kind: SyncKind) -> bool {
        let meta = inode.meta.lock();
        meta.item.size != inode.size() || (kind == SyncKind::Full && meta.dirty)
    }

    /// How many pages one operation may carry.
    pub fn max_payload_pages(&self) -> usize {
        MAX_PAYLOAD_PAGES.min((self.log.max_operation_blocks() as usize).saturating_sub(2))
    }

    /// What a sync of bytes `range` has to write is no more than one operation may carry.
    pub fn fits_frame(&self, inode: &Inode, range: &Range<u64>) -> bool {
        let pages = page_range(range.start, range.end.saturating_sub(range.start));
        let limit = self.max_payload_pages();
        count_unlogged(inode, &pages, limit) <= limit
    }

    /// Those of `inodes` that have more to write than a frame takes, if they are several: worth going home together.
    pub fn too_much_for_frames(&self, inodes: &[Arc<Inode>]) -> Vec<(Arc<Inode>, Range<u64>)> {
        let limit = self.max_payload_pages();
        let is_large = |inode: &&Arc<Inode>| count_unlogged(inode, &(0..u64::MAX), limit) > limit;
        let large: Vec<_> =
            inodes.iter().filter(is_large).map(|inode| (inode.clone(), 0..u64::MAX)).collect();
        if large.len() > 1 { large } else { Vec::new() }
    }

    /// Where the blocks of `ranges`, which are in order, live now. They are not asked for where the file has none.
    fn homes(
        &self,
        inode: &Inode,
        ranges: impl FnOnce() -> Vec<Range<u64>>,
        held: Held,
    ) -> Result<Vec<MappedRun>> {
        if inode.meta.lock().item.blocks == 0 {
            return Ok(Vec::new());
        }
        let ranges = ranges();
        if let Some(homes) = self.known_homes(inode, &ranges, held)? {
            return Ok(homes);
        }
        let mut homes = Vec::with_capacity(ranges.len());
        for range in &ranges {
            let (pieces, _) = self.look_up_mapping(inode, range)?;
            homes.extend(pieces.iter().map(run_of));
        }
        Ok(homes)
    }

    /// One operation with the pages and the inode. The caller holds the `map` lock. Who may not wait leaves the checksums to the writer of the
    /// frame: others wait for that together.
    fn log_pages(
        &self,
        inode: &Arc<Inode>,
        range: &Range<u64>,
        (limit, homes): (usize, &[MappedRun]),
        (room, admission): (Room, Admission),
    ) -> Result<Logged> {
        let mut map = inode.pages.write();
        // A page that the log holds may go home meanwhile.
        if map.first_unlogged_writeback(range.clone()).is_some() {
            return Ok(Logged::Busy);
        }
        if inode.meta.lock().purged {
            return Ok(Logged::Done);
        }
        let mut op = Op::new();
        let mut logged = [0; MAX_PAYLOAD_PAGES];
        let mut count = 0;
        for run in map.dirty_runs(range.clone(), PIECE_PAGES, UNLOGGED) {
            for index in run {
                let Some(page) = map.peek(index) else { continue };
                if count == limit {
                    // More became dirty meanwhile: count again.
                    return Ok(Logged::Again);
                }
                let (home, page) = (home_of(homes, index), page.clone());
                match room {
                    Room::Normal | Room::Reserve | Room::Chain => {
                        op.payload(inode.number, index, home, page);
                    }
                    Room::NoWait => op.payload_unsummed(inode.number, index, home, page),
                }
                logged[count] = index;
                count += 1;
            }
        }
        let mut meta = inode.meta.lock();
        // What lies below the end of the range and is not logged reads as it was before, or as zeros. A range behind
        // the end says nothing about how far the file reaches.
        meta.item.size = meta.item.size.max(covered_size(inode.size(), range));
        op.put(Key::inode(inode.number), &meta.item.encode());
        let lsn = self.store.commit(op, admission)?;
        let times_left = meta.item.size != inode.size();
        meta.logged(lsn, true);
        meta.dirty |= times_left;
        drop(meta);
        self.counters.sync_logged_pages.add(count as u64);
        for &index in &logged[..count] {
            if let Some(older) = map.set_logged(index, lsn) {
                self.store.obligations.release(older);
            }
        }
        // Dirty pages, as all that were just logged are, keep it on the list; an inode with nothing else to write leaves it.
        let is_listed_for_pages = map.counts().dirty > 0;
        drop(map);
        if !times_left && !is_listed_for_pages {
            self.dirty.remove_if_clean(inode);
        }
        Ok(Logged::Done)
    }

    /// Tells the log how far the file has reached, if the data that is home has not done so: its end may lie in a hole. Whoever has cut the
    /// file since has told the log already, and what it has grown by after that is nobody's promise.
    pub fn log_size(&self, inode: &Arc<Inode>, reach: Reach, room: Room) -> Result<()> {
        if inode.meta.lock().item.size >= reach.size.min(inode.size()) {
            return Ok(());
        }
        let admission = self.admit(SIZE_BYTES, 0, room)?;
        let _map = inode.map.lock();
        let _pages = inode.pages.read();
        let mut meta = inode.meta.lock();
        let size = reach.size.min(inode.size());
        if meta.purged || meta.item.size >= size || inode.cuts() != reach.cuts {
            return Ok(());
        }
        meta.item.size = size;
        let mut op = Op::new();
        op.put(Key::inode(inode.number), &meta.item.encode());
        let lsn = self.store.commit(op, admission)?;
        let times_left = size != inode.size();
        meta.logged(lsn, true);
        meta.dirty |= times_left;
        Ok(())
    }

    /// Waits until no page of the range is under writeback.
    pub fn wait_writeback(&self, inode: &Inode, pages: &Range<u64>) {
        self.when_quiet(inode, pages, |_| ());
    }

    /// As [`Engine::wait_writeback`]. Answers whether pages of `chosen`, a part of `pages`, were left then that somebody has chosen and that
    /// nobody has taken. Who looks later misses those that others have taken in between.
    pub fn wait_for_chosen(&self, inode: &Inode, pages: &Range<u64>, chosen: &Range<u64>) -> bool {
        let is_left = |map: &PageMap| map.dirty_runs(chosen.clone(), 1, CHOSEN).next().is_some();
        self.when_quiet(inode, pages, is_left)
    }

    /// What `look` sees at a moment when no page of the range is under writeback.
    fn when_quiet<R>(
        &self,
        inode: &Inode,
        pages: &Range<u64>,
        look: impl FnOnce(&PageMap) -> R,
    ) -> R {
        loop {
            let moment = inode.io_moment();
            let map = inode.pages.read();
            if map.first_writeback(pages.clone()).is_none() {
                return look(&map);
            }
            drop(map);
            self.wait_pages(inode, moment);
        }
    }

    /// Writes all pages of `chosen` home that were dirty and not logged when this began, and waits for those that
    /// were under way. `bounds`: the sync's range, within which a write is not torn.
    fn send_home(
        &self,
        inode: &Arc<Inode>,
        bounds: &Range<u64>,
        chosen: &[Range<u64>],
    ) -> Result<()> {
        let count = mark_chosen(inode, chosen);
        self.counters.sync_home_pages.add(count as u64);
        loop {
            self.write_back(inode, bounds.clone(), CHOSEN, IoClass::SyncWrite)?;
            // A page of which an older version was under way was left out.
            let mut some_left = false;
            for range in chosen {
                some_left |= self.wait_for_chosen(inode, range, range);
            }
            if !some_left {
                return Ok(());
            }
        }
    }
}

/// Dirty pages that the log does not have.
pub(super) const UNLOGGED: RunFilter =
    RunFilter { logged: LoggedFilter::NotLogged, only_towrite: false, skip_writeback: false };
/// Those of them that were dirty when the sync began.
pub(super) const CHOSEN: RunFilter = RunFilter { only_towrite: true, ..UNLOGGED };

/// How much of a file that is `size` long a sync of `pages` covers: 0 if they lie behind its end.
pub(super) fn covered_size(size: u64, pages: &Range<u64>) -> u64 {
    if pages.start.saturating_mul(BLOCK_BYTES as u64) >= size {
        return 0;
    }
    let all = mutation::active(Mutation::SizeBeyondRange);
    let end = if all { u64::MAX } else { pages.end };
    end.saturating_mul(BLOCK_BYTES as u64).min(size)
}

/// How far `inode` reaches within `pages`.
fn reach_within(inode: &Inode, pages: &Range<u64>) -> Reach {
    let _pages = inode.pages.read();
    let reach = inode.reach();
    Reach { size: covered_size(reach.size, pages), ..reach }
}

/// Marks the dirty pages of `chosen`. Answers how many.
fn mark_chosen(inode: &Inode, chosen: &[Range<u64>]) -> usize {
    let mut map = inode.pages.write();
    chosen.iter().map(|range| map.mark_towrite(range.clone())).sum()
}

/// The operation that a sync of `inode` has to wait for.
fn last_lsn(inode: &Inode, kind: SyncKind) -> Lsn {
    let meta = inode.meta.lock();
    if kind == SyncKind::Data { meta.data_lsn } else { meta.last_lsn }
}

/// Dirty pages of `pages` that the log does not have; stops counting beyond `limit`.
pub(super) fn count_unlogged(inode: &Inode, pages: &Range<u64>, limit: usize) -> usize {
    count_in(&inode.pages.read(), pages, limit)
}

/// The same, and whether pages of `pages` are on their way home that a sync has to wait for. Both at one moment: what cannot be written, or is
/// put back, is dirty again.
fn unlogged(inode: &Inode, pages: &Range<u64>, limit: usize) -> (usize, bool) {
    let map = inode.pages.read();
    (count_in(&map, pages, limit), map.first_unlogged_writeback(pages.clone()).is_some())
}

fn count_in(map: &PageMap, pages: &Range<u64>, limit: usize) -> usize {
    if map.counts().dirty == 0 {
        return 0;
    }
    let mut count = 0;
    for run in map.dirty_runs(pages.clone(), PIECE_PAGES, UNLOGGED) {
        count += (run.end - run.start) as usize;
        if count > limit {
            break;
        }
    }
    count
}

/// The first `most` runs of dirty pages of `pages` that the log does not have.
fn unlogged_runs(inode: &Inode, pages: &Range<u64>, most: usize) -> Vec<Range<u64>> {
    let map = inode.pages.read();
    let mut runs = Vec::with_capacity(most.min(USUAL_RUNS));
    runs.extend(map.dirty_runs(pages.clone(), PIECE_PAGES, UNLOGGED).take(most));
    runs
}

/// The block that page `index` is mapped to, 0 if none holds data of it.
pub(super) fn home_of(homes: &[MappedRun], index: u64) -> u64 {
    let place = homes.partition_point(|home| home.end() <= index);
    match homes.get(place) {
        Some(home) if home.file_block <= index && home.block != 0 => {
            home.block + (index - home.file_block)
        }
        _ => 0,
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::device::memory::MemoryDevice;
    use crate::sync::{Turn, take_turns};
    use crate::{
        BackgroundMode, BackgroundWork, CreateOptions, File, OpenFlags, Volume, VolumeOptions,
    };
    use std::cell::{Cell, RefCell};

    /// At which lock of a sync the log gets one of its pages from somebody else, and at which another page is written.
    struct Plan {
        file: File,
        locks: u32,
        logged_at: u32,
        written_at: u32,
    }

    thread_local! {
        static PLAN: RefCell<Option<Plan>> = const { RefCell::new(None) };
        static WRITTEN: Cell<bool> = const { Cell::new(false) };
    }

    const PAGE: u64 = BLOCK_BYTES as u64;

    fn come_to(turn: Turn) {
        let Some(mut plan) = PLAN.take() else { return };
        assert_eq!(turn, Turn::Locks, "nobody has what it wants");
        let file = &plan.file;
        if plan.locks == plan.logged_at {
            let ticket = file.fsync_async(PAGE..2 * PAGE, SyncKind::Data).expect("submit");
            assert!(ticket.poll().is_none(), "it is in the log, no more");
        }
        // Not amid something that would keep the write waiting.
        let inode = file.engine().inode(file.ino()).expect("the file");
        let may_write = inode.pages.try_write().is_some() && inode.meta.try_lock().is_some();
        if plan.locks >= plan.written_at && may_write && !WRITTEN.replace(true) {
            file.write_at(9 * PAGE, &[9; BLOCK_BYTES]).expect("write");
        }
        plan.locks += 1;
        PLAN.set(Some(plan));
    }

    /// While a sync looks its pages up, one of them gets into the log, and another becomes dirty: the sync has not looked up where that lives, so
    /// it must not say of it that it lives nowhere. What is there is not what was there first, once it has gone home.
    #[test]
    fn a_page_that_becomes_dirty_while_a_sync_looks_its_pages_up_is_found_after_a_crash() {
        for (logged_at, after) in (0..8).flat_map(|lock| (1..24).map(move |after| (lock, after))) {
            let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(32 << 20));
            Volume::format_device(&device, &CreateOptions::default()).expect("format");
            let open = || {
                let background = BackgroundMode::Manual;
                let memory_bytes = Some(2 << 20);
                let options = VolumeOptions { memory_bytes, background, ..Default::default() };
                Volume::open_device(device.clone(), options).expect("open")
            };
            let volume = open();
            let file = volume.open_file("/f", OpenFlags::CREATE).expect("create");
            file.write_at(0, &vec![1; 10 * BLOCK_BYTES]).expect("write");
            while volume.background_step(BackgroundWork::Writeback).expect("writeback") {}
            file.write_at(PAGE, &[2; 2 * BLOCK_BYTES]).expect("write");
            let (locks, written_at) = (0, logged_at + after);
            PLAN.set(Some(Plan { file: file.clone(), locks, logged_at, written_at }));
            WRITTEN.set(false);
            take_turns(Some(come_to));
            file.fsync().expect("fsync");
            take_turns(None);
            PLAN.set(None);
            // What is in the log goes home, where it lives; and nothing more is said about it.
            volume.background_step(BackgroundWork::Checkpoint).expect("checkpoint");
            drop((file, volume));
            let volume = open();
            let file = volume.open_file("/f", OpenFlags::READ).expect("what was synced is there");
            let mut bytes = vec![0; 10 * BLOCK_BYTES];
            assert_eq!(file.read_at(0, &mut bytes), Ok(bytes.len()));
            let expected = |page: usize| match page {
                1 | 2 => 2,
                9 if bytes[9 * BLOCK_BYTES] == 9 => 9,
                _ => 1,
            };
            for (page, content) in bytes.chunks_exact(BLOCK_BYTES).enumerate() {
                let is_right = content.iter().all(|byte| *byte == expected(page));
                assert!(is_right, "page {page}, logged at {logged_at}, written {after} later");
            }
        }
    }
}
