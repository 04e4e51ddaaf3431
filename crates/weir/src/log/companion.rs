//! Data that is written at the same time as the frame of the operation that maps it.
//!
//! An operation that maps new blocks says what they must hold (`wrote`), and recovery cuts the unflushed tail before the first frame whose
//! blocks hold something else. So a frame need not come after its data on the device. It is enough that nobody counts the frame as written, and
//! no flush as covering it, before the data is there too. So the data is left to whoever writes the frame: an operation has [`Companions`], which
//! wait in the frame, and one batch writes the frame with the data of all of its operations, neighbours joined. A group of callers
//! therefore shares not only the frame's write and the flush but the writes of its data, and each sleeps once.
//!
//! **Data may have begun before.** Whoever brings it to a log that nobody writes, or whose writer it will join, need not wait with it for
//! the frame, which takes longest to be made: the disk writes while checksums, mapping and frame come into being ([`Data::Begun`]). The
//! frame's writer then waits for it after the frame.
//!
//! **When data cannot be written** its operation is in the log already, and cannot be taken back. The writer then has the owner append what makes up for it
//! ([`Companion::make_up`]: the pages themselves, as payload), and frames count together with those that do. Meanwhile the log takes no
//! companions ([`Log::takes_companions`]), so that this ends. If it cannot be made up for, the log shuts down. If a chain was opened meanwhile,
//! what makes up lies in it, and replay has all of a chain or nothing: then the frames before it count with its end.
//!
//! **Invariants.** A companion hears exactly once what became of it: [`Companion::end`] after its frame has counted as written or the log was shut
//! down, or [`Companion::make_up`]. It hears of it from the writer, who holds no lock then, or from whoever tidies up after a shutdown
//! ([`Log::abandon_companions`]). A writer that waits for locks of owners waits for computing only.

use super::op::Frame;
use super::stats::add;
use super::{Log, Lsn};
use crate::cache::page::PageRef;
use crate::device::request::Underway;
use crate::device::{Buffers, DeviceResult, IoClass, Operation, Request};
use crate::format::BLOCK_BYTES_U64;
use crate::mutation::{self, Mutation};
use crate::sync::atomic::Ordering;
use crate::{Error, Result};
use std::collections::VecDeque;
use std::fmt;

/// Data that may wait for its frame: more is written by whoever comes with it. Small syncs wait behind it.
const MAX_QUEUED_BLOCKS: u64 = 512;
/// Most pages of one request after neighbours were joined: 1 MiB.
const REQUEST_PAGES: usize = 256;

/// Whose data is written beside a frame. See the module's head.
pub trait Companion: Send + Sync {
    /// The data is on the device, and the frame that maps it counts as written; or neither will ever be, because the log is shut down.
    fn end(&self, result: Result<()>);
    /// The data could not be written. Appends what makes up for it, and answers the LSN of that.
    ///
    /// # Errors
    /// Nothing does: the log has to be shut down.
    fn make_up(&self) -> Result<Lsn>;
}

/// What is written beside the frame of an operation.
pub struct Companions {
    data: Data,
    owner: Box<dyn Companion>,
}

/// Data that goes beside a frame.
pub enum Data {
    /// It waits: first blocks, and what goes to the blocks from there on.
    Waits(Vec<(u64, Vec<PageRef>)>),
    /// It is on its way, so many blocks.
    Begun(Underway, u64),
}

impl Companions {
    /// `data`, and who owns it.
    pub fn new(data: Data, owner: Box<dyn Companion>) -> Self {
        Self { data, owner }
    }

    /// Blocks to be written.
    pub fn blocks(&self) -> u64 {
        match &self.data {
            Data::Waits(writes) => writes.iter().map(|(_, pages)| pages.len() as u64).sum(),
            Data::Begun(_, blocks) => *blocks,
        }
    }
}

impl fmt::Debug for Companions {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Companions").field("blocks", &self.blocks()).finish_non_exhaustive()
    }
}

/// Of one frame: what is left to be written beside it, and whom to tell.
pub(super) struct Party {
    owners: Vec<Box<dyn Companion>>,
    blocks: u64,
    /// Of the frame's write: that of what is written beside frames, if somebody may wait for such data until this frame is there too.
    pub class: IoClass,
    /// Not written yet.
    requests: Vec<Request>,
    /// On their way, and the places of those whose data it is.
    begun: Vec<(usize, Underway)>,
    /// Of each request, the places of those whose data it has.
    owners_of: Vec<Vec<usize>>,
    results: Vec<DeviceResult<()>>,
}

impl Party {
    /// Takes the companions of `frame`.
    pub fn of(frame: &mut Frame) -> Self {
        let mut owners = Vec::with_capacity(frame.companions.len());
        let blocks = frame.companions.iter().map(Companions::blocks).sum();
        let mut writes: Vec<(u64, Vec<PageRef>, usize)> = Vec::new();
        let mut begun = Vec::new();
        for companions in frame.companions.drain(..) {
            let place = owners.len();
            match companions.data {
                Data::Waits(own) => {
                    let own = own.into_iter();
                    writes.extend(own.map(|(block, pages)| (block, pages, place)));
                }
                Data::Begun(underway, _) => begun.push((place, underway)),
            }
            owners.push(companions.owner);
        }
        writes.sort_unstable_by_key(|(block, _, _)| *block);
        let mut joined: Vec<(u64, Vec<PageRef>)> = Vec::with_capacity(writes.len());
        let mut owners_of: Vec<Vec<usize>> = Vec::with_capacity(writes.len());
        for (block, mut pages, owner) in writes {
            match (joined.last_mut(), owners_of.last_mut()) {
                (Some((first, before)), Some(places))
                    if *first + before.len() as u64 == block
                        && before.len() + pages.len() <= REQUEST_PAGES =>
                {
                    before.append(&mut pages);
                    places.push(owner);
                }
                _ => {
                    joined.push((block, pages));
                    owners_of.push(vec![owner]);
                }
            }
        }
        let requests = joined.into_iter().map(|(block, pages)| Request {
            operation: Operation::Write { fua: false },
            offset_bytes: block * BLOCK_BYTES_U64,
            buffers: Buffers::Pages(pages),
            class: IoClass::Beside,
        });
        let requests: Vec<Request> = requests.collect();
        let (class, results) = (IoClass::Beside, Vec::new());
        Self { owners, blocks, class, requests, begun, owners_of, results }
    }

    /// Nothing is written beside the frame.
    pub fn is_empty(&self) -> bool {
        self.owners.is_empty()
    }

    /// What is still to be written. How it ends goes to [`Party::written`].
    pub fn take_requests(&mut self) -> Vec<Request> {
        std::mem::take(&mut self.requests)
    }

    /// How the requests ended.
    pub fn written(&mut self, results: impl Iterator<Item = DeviceResult<()>>) {
        self.results.extend(results);
    }

    /// Waits for what was on its way before. The results of all else are there.
    fn wait_begun(&mut self) {
        for (place, underway) in self.begun.drain(..) {
            if mutation::active(Mutation::CountBegun) {
                std::mem::forget(underway);
                continue;
            }
            for (result, _) in underway.wait() {
                self.results.push(result);
                self.owners_of.push(vec![place]);
            }
        }
    }

    /// Some of it could not be written.
    pub fn has_failed(&self) -> bool {
        !mutation::active(Mutation::CountWithoutData)
            && self.results.iter().any(std::result::Result::is_err)
    }

    /// Has those whose data could not be written append what makes up for it. Answers the last LSN of that, if there were some.
    ///
    /// # Errors
    /// Something cannot be made up for.
    pub fn make_up(&mut self) -> Result<Option<Lsn>> {
        if !self.has_failed() {
            return Ok(None);
        }
        let failed = self.results.iter().zip(&self.owners_of).filter(|(result, _)| result.is_err());
        let mut places: Vec<usize> = failed.flat_map(|(_, places)| places).copied().collect();
        places.sort_unstable();
        places.dedup();
        let mut made_up = Ok(None);
        // From the last, so that the places before stay what they are.
        for place in places.iter().rev() {
            let owner = self.owners.swap_remove(*place);
            let lsn = owner.make_up();
            made_up = made_up.and_then(|last| Ok(last.max(Some(lsn?))));
        }
        self.results.clear();
        made_up
    }

    /// Tells everybody who has not made up for anything, when nothing is on its way any more.
    pub fn end(self, result: &Result<()>) {
        drop(self.begun);
        for owner in self.owners {
            owner.end(result.clone());
        }
    }
}

impl Log {
    /// Whether an operation may have companions now: what is queued is little, and nothing has to be made up for. A hint.
    pub fn takes_companions(&self) -> bool {
        !self.making_up.load(Ordering::Acquire)
            && self.companion_blocks.load(Ordering::Acquire) < MAX_QUEUED_BLOCKS
    }

    /// No data waits for a frame, and nobody writes, or his frame is on its way and he may be joined: whoever comes now will write his own. A
    /// hint.
    pub fn awaits_writer(&self) -> bool {
        !self.has_companions() && self.commit.lock().core.takes_writer()
    }

    /// Some data waits for somebody to write its frame.
    pub fn has_companions(&self) -> bool {
        self.companion_blocks.load(Ordering::Acquire) > 0
    }

    /// Writes what no frame has taken along, and waits for what was on its way.
    pub(super) fn write_rest(&self, party: &mut Party) {
        let requests = party.take_requests();
        if !requests.is_empty() {
            let outcomes = self.device.run_all(requests);
            party.written(outcomes.into_iter().map(|(result, _)| result));
        }
        party.wait_begun();
    }

    /// Books that the data of a frame was written, or that it was tried.
    pub(super) fn note_beside(&self, party: &Party) {
        self.note_data_written();
        add(&self.stats.beside_bytes, party.blocks * BLOCK_BYTES_U64);
    }

    /// After a shutdown: frames that nobody will write any more end their companions. Call it without a lock.
    pub fn abandon_companions(&self) {
        if !self.shut_down.load(Ordering::Acquire) || !self.has_companions() {
            return;
        }
        let error = self.shutdown_error();
        let mut parties = Vec::new();
        let mut append = self.append.lock();
        let super::Appender { open, sealed, .. } = &mut *append;
        for frame in sealed.iter_mut().chain([open]) {
            self.forget_queued(frame);
            parties.push(Party::of(frame));
        }
        drop(append);
        for party in parties {
            party.end(&Err(error.clone()));
        }
    }

    /// The companions of `frame` are not queued any more.
    pub(super) fn forget_queued(&self, frame: &Frame) {
        let blocks: u64 = frame.companions.iter().map(Companions::blocks).sum();
        if blocks > 0 {
            self.companion_blocks.fetch_sub(blocks, Ordering::AcqRel);
        }
    }
}

/// Ends the companions of frames that will not be written.
pub(super) fn end_unwritten(frames: &mut VecDeque<Frame>, error: &Error) {
    for frame in frames {
        Party::of(frame).end(&Err(error.clone()));
    }
}

/// Frames that are on the device and do not count as written yet, with what was written beside them.
#[derive(Default)]
pub(super) struct Uncounted {
    /// The last LSN of each, and whether a batch goes on behind it.
    pub frames: Vec<(Lsn, bool)>,
    pub parties: Vec<Party>,
    /// Data is missing beside one of them, and what makes up for it reaches to this LSN: they count together. 0: none is.
    made_up_to: Lsn,
}

impl Uncounted {
    /// Data is missing beside the last frame; what makes up for it ends with `lsn`.
    pub fn owe(&mut self, lsn: Lsn) {
        self.made_up_to = self.made_up_to.max(lsn);
    }

    /// What makes up for missing data is not all on the device.
    pub fn owes(&self) -> bool {
        self.frames.last().is_none_or(|(last_lsn, _)| *last_lsn < self.made_up_to)
            && self.made_up_to > 0
    }

    /// How far what makes up for missing data reaches; 0 where none is missing.
    pub fn made_up_to(&self) -> Lsn {
        self.made_up_to
    }

    /// `later` was written behind these.
    pub fn append(&mut self, later: &mut Self) {
        self.frames.append(&mut later.frames);
        self.parties.append(&mut later.parties);
        self.owe(std::mem::take(&mut later.made_up_to));
    }

    /// The frames as they count: each with its last LSN, and whether it is nothing without the next. Where a chain goes on behind what makes up
    /// for missing data, so it does behind all that count together with it.
    pub fn take_frames(&mut self) -> Vec<(Lsn, bool)> {
        let made_up_to = std::mem::take(&mut self.made_up_to);
        let mut frames = std::mem::take(&mut self.frames);
        if mutation::active(Mutation::CountBeforeChain) {
            return frames;
        }
        let end = frames.iter().position(|(last_lsn, _)| *last_lsn >= made_up_to);
        if let Some(end) = end.filter(|&end| frames[end].1) {
            frames[..end].iter_mut().for_each(|(_, continues)| *continues = true);
        }
        frames
    }

    /// Tells all of them.
    pub fn end(&mut self, result: &Result<()>) {
        for party in self.parties.drain(..) {
            party.end(result);
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    fn uncounted(made_up_to: Lsn, frames: &[(Lsn, bool)]) -> Uncounted {
        Uncounted { frames: frames.to_vec(), parties: Vec::new(), made_up_to }
    }

    #[test]
    fn frames_with_missing_data_count_together_with_all_that_makes_up_for_it() {
        assert!(!uncounted(0, &[]).owes());
        assert!(!uncounted(0, &[(1, false)]).owes());
        assert!(uncounted(5, &[]).owes());
        // What makes up may come in any frame of the next group.
        assert!(uncounted(5, &[(1, false), (4, false)]).owes());
        assert!(!uncounted(5, &[(1, false), (4, false), (6, false)]).owes());
        let mut left = uncounted(5, &[(1, false)]);
        left.append(&mut uncounted(7, &[(6, false)]));
        assert!(left.owes());
        assert_eq!(left.take_frames(), [(1, false), (6, false)]);
        assert!(!left.owes(), "they are counted");
    }

    #[test]
    fn frames_that_need_something_of_a_chain_go_on_with_it() {
        let frames = [(1, false), (3, true), (4, false), (5, true), (7, true), (8, false)];
        let as_they_are = uncounted(0, &frames).take_frames();
        assert_eq!(as_they_are, frames);
        assert_eq!(uncounted(4, &frames).take_frames(), frames, "it lies before the chain");
        let counted = uncounted(6, &frames).take_frames();
        assert_eq!(counted[..4], [(1, true), (3, true), (4, true), (5, true)]);
        assert_eq!(counted[4..], frames[4..]);
        assert_eq!(uncounted(8, &frames).take_frames(), frames, "the chain's last frame is there");
    }
}
