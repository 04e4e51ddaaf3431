//! Checkpoints: the delta goes into the trees, and the log is released.
//!
//! States, as in the design: `Running` → `CommitStart` (logged pages go home, attributes that only memory has are
//! committed) → `CommitDoing` (the delta is swapped: microseconds) → `Unblocked` (log frames, nodes, bitmaps and root
//! are written; the next transaction runs) → `SuperCommitted` (one flush, superblock, one flush) →
//! `Completed`; or `Aborted`, which shuts the volume down. A disk that refuses to read or write nodes, bitmaps, root or superblock,
//! or has no space for them, is no reason to: the step is done again by the next attempt, with its nodes elsewhere, until it
//! succeeds. Meanwhile the log has everything. (A flush that failed is one: nobody knows what it has dropped.)
//!
//! Each call of [`Engine::checkpoint_step`] does one phase, so that a simulator can put foreground
//! operations between any two of them; the checkpointer thread calls it in a loop.
//!
//! **Invariant:** the superblock names a root only after everything it refers to, and all log frames up to its LSN, were
//! written and then flushed. **Invariant:** replay starts no later than the first operation whose payload was not home
//! at the freeze. **Invariant:** only the holder of the role runs a step.

use super::merge::NewTree;
use super::store::Frozen;
use crate::device::IoClass;
use crate::device::buffer::AlignedBuf;
use crate::engine::{Engine, Room};
use crate::error::{Error, Result};
use crate::file::writeback::{Collected, Piece, owed_filter};
use crate::format::root::Root;
use crate::format::superblock::Superblock;
use crate::format::{BLOCK_BYTES_U64, Key};
use crate::inode::Inode;
use crate::log::ring::ReplayPoint;
use crate::mutation::{self, Mutation};
use crate::namespace::OP_RECORD_BYTES;
use crate::sync::{Arc, Condvar, Mutex};
use crate::tree::TreeRoot;
use crate::txn::{Lsn, Op};

/// How often a page is tried to be written home before who waits for it is told; at new places from the second time on. As often for a
/// checkpoint.
pub const HOME_ATTEMPTS: u32 = 3;
/// Inodes that one step of `CommitStart` brings home.
const HOME_INODES: usize = 32;
/// Pages that one step of `CommitStart` writes.
const HOME_PAGES: u64 = 2048;

/// State of the checkpoint under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phase {
    /// None is under way.
    #[default]
    Running,
    /// Logged pages go home.
    CommitStart,
    /// The delta is swapped.
    CommitDoing,
    /// The frozen delta is written; the next transaction runs.
    Unblocked,
    /// The superblock is being published.
    SuperCommitted,
    /// Published; what it freed is being released.
    Completed,
    /// It failed, and the volume was shut down.
    Aborted,
}

/// A checkpoint on its way.
enum Work {
    Home { inodes: Vec<Arc<Inode>>, up_to: u64 },
    Freeze,
    Log(Frozen),
    Merge(Frozen),
    Space(Frozen, NewTree),
    WriteSpace(Vec<SpaceWrite>, Published),
    Flush(Published),
    Super(Published),
}

impl Work {
    /// Its place in [`crate::stats::CHECKPOINT_STEPS`].
    fn step(&self) -> usize {
        match self {
            Self::Home { .. } => 0,
            Self::Freeze => 1,
            Self::Log(_) => 2,
            Self::Merge(_) => 3,
            Self::Space(..) | Self::WriteSpace(..) => 4,
            Self::Flush(_) => 5,
            Self::Super(_) => 6,
        }
    }
}

/// A bitmap or the root, and its block.
struct SpaceWrite {
    block: u64,
    content: AlignedBuf,
}

/// Why a step failed, and what is to be done in the next attempt if there is one.
struct Failed {
    error: Error,
    again: Option<Box<Work>>,
}

impl Failed {
    /// A step that has changed nothing: what the device has refused is done again.
    fn unchanged(error: Error, work: Work) -> Self {
        let again = is_refusal(&error).then(|| Box::new(work));
        Self { error, again }
    }
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self { error, again: None }
    }
}

/// The device may do later, or elsewhere, what it has refused with this.
pub fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::Io(_) | Error::HostFull(_))
}

/// How often an attempt may fail with this before who waits for a checkpoint hears of it. A full host does not have space a moment later.
fn attempts(error: &Error) -> u32 {
    if matches!(error, Error::Io(_)) { HOME_ATTEMPTS } else { 1 }
}

/// Does `work` until it succeeds, or has failed as often as somebody waits for.
pub fn with_attempts(work: impl Fn() -> Result<()>) -> Result<()> {
    let mut failed = 0;
    while let Err(error) = work() {
        failed += 1;
        if failed >= attempts(&error) {
            return Err(error);
        }
    }
    Ok(())
}

struct Published {
    tree: TreeRoot,
    /// Blocks of the nodes that are not part of it any more.
    replaced_blocks: u64,
    superblock: Superblock,
    replay: ReplayPoint,
    checkpoint_lsn: u64,
    /// What it covers stays in the log in part: pages were owed when it froze.
    keeps_log: bool,
}

#[derive(Default)]
struct Progress {
    started: u64,
    completed: u64,
    /// Up to this number somebody waits for checkpoints: they bring everything home.
    awaited: u64,
    /// How often somebody began to wait.
    waits: u64,
    phase: Phase,
    step_began_ns: u64,
    began_ns: u64,
    /// LSN that the last checkpoint covers.
    covered_lsn: u64,
    /// It has kept some of that in the log, for pages that were owed.
    keeps_log: bool,
    /// Attempts that failed and may be repeated, and why the last one did.
    failures: u64,
    failure: Option<Error>,
    /// What the device has refused to the one under way: it is tried again.
    refused: Option<Error>,
    /// How often a checkpoint could not write pages home, and why not the last one.
    home_failures: u64,
    home_failure: Option<Error>,
}

impl Progress {
    /// Somebody waits for checkpoint `number`.
    fn wait_for(&mut self, number: u64) -> u64 {
        self.awaited = self.awaited.max(number);
        self.waits += 1;
        number
    }
}

/// Who makes checkpoints, and how far they are. Lock order: the role, then anything; `progress` is a leaf.
#[derive(Default)]
pub struct Checkpointer {
    role: Mutex<Option<Work>>,
    progress: Mutex<Progress>,
    changed: Condvar,
}

impl Checkpointer {
    /// Where the checkpoint under way is.
    pub fn phase(&self) -> Phase {
        self.progress.lock().phase
    }

    /// When the step under way began, by the monotonic clock.
    pub fn step_began_ns(&self) -> u64 {
        self.progress.lock().step_began_ns
    }

    /// Checkpoints completed.
    pub fn completed(&self) -> u64 {
        self.progress.lock().completed
    }

    /// Attempts that failed and left everything as it was.
    pub fn failures(&self) -> u64 {
        self.progress.lock().failures
    }

    /// What the device has refused to the one under way, which tries again.
    pub fn refused(&self) -> Option<Error> {
        self.progress.lock().refused.clone()
    }

    /// Wakes everybody who waits for a checkpoint (the volume was shut down).
    pub fn wake_all(&self) {
        self.changed.notify_all();
    }

    /// The number of completed checkpoints at which everything up to now is covered. The last of them brings home all that the log has
    /// when it begins, whatever else it is wanted for.
    pub fn goal(&self) -> u64 {
        let mut progress = self.progress.lock();
        // One that has begun may have frozen already.
        let number = progress.started + 1;
        progress.wait_for(number)
    }

    /// The same for the next to complete, be it under way or not.
    pub fn next_goal(&self) -> u64 {
        let mut progress = self.progress.lock();
        let number = progress.completed + 1;
        progress.wait_for(number)
    }

    /// How often somebody has begun to wait: what [`Engine::skip_checkpoint`] wants to know from before it was found that there is
    /// nothing to write.
    pub fn waits(&self) -> u64 {
        self.progress.lock().waits
    }

    /// What a checkpoint could not write home: how often that happened, and why the last time.
    pub fn home_failures(&self) -> (u64, Option<Error>) {
        let progress = self.progress.lock();
        (progress.home_failures, progress.home_failure.clone())
    }

    fn note_home_failure(&self, error: Error) {
        let mut progress = self.progress.lock();
        progress.home_failures += 1;
        progress.home_failure = Some(error);
    }

    fn enter(&self, phase: Phase) {
        self.progress.lock().phase = phase;
    }

    /// What the last checkpoint covers, for a volume just opened.
    pub fn set_covered(&self, lsn: u64) {
        self.progress.lock().covered_lsn = lsn;
    }
}

impl Engine {
    /// Waits until `goal` checkpoints are complete (see [`Checkpointer::goal`]), or does the work where there are no
    /// threads (any more).
    ///
    /// # Errors
    /// Attempts failed, [`HOME_ATTEMPTS`] of them if the disk has refused something; the caller may try again.
    pub fn wait_checkpoint(&self, goal: u64) -> Result<()> {
        let mut failures = self.checkpointer.progress.lock().failures;
        let mut failed = 0;
        while self.checkpointer.completed() < goal {
            self.check_shutdown()?;
            let failure = if self.background.has_threads() {
                self.background.request_checkpoint();
                self.await_checkpoint(goal, &mut failures)
            } else {
                self.checkpoint_step().err()
            };
            if let Some(error) = failure {
                failed += 1;
                if failed >= attempts(&error) {
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Waits until `goal` checkpoints are complete, or more than `failures` attempts failed (then there are so many), or for a while.
    /// Answers why the last one did.
    fn await_checkpoint(&self, goal: u64, failures: &mut u64) -> Option<Error> {
        let mut progress = self.checkpointer.progress.lock();
        if progress.completed < goal && progress.failures == *failures {
            crate::sync::wait_for(&self.checkpointer.changed, &mut progress, 100_000);
        }
        let has_failed = progress.failures > *failures && progress.completed < goal;
        *failures = progress.failures;
        has_failed.then(|| progress.failure.clone().unwrap_or(Error::WouldBlock))
    }

    /// Has a checkpoint made, and more until `is_done` says that the log is as empty as it should be: of pages that somebody else is
    /// bringing home the log keeps what it has.
    ///
    /// # Errors
    /// As [`Engine::wait_checkpoint`]; or pages could not be written home, [`HOME_ATTEMPTS`] times. The log keeps them.
    pub fn empty_log(&self, is_done: impl Fn() -> bool) -> Result<()> {
        let mut attempts = 0;
        loop {
            let (failures, _) = self.checkpointer.home_failures();
            self.wait_checkpoint(self.checkpointer.goal())?;
            let moment = self.background.moment();
            if is_done() {
                return Ok(());
            }
            let (now, failure) = self.checkpointer.home_failures();
            attempts += u32::from(now > failures);
            match failure {
                Some(error) if attempts == HOME_ATTEMPTS => return Err(error),
                _ => self.await_others(moment),
            }
        }
    }

    /// Whether a checkpoint would change anything: cover more, or release what the last one has kept in the log. Pages may have been owed then
    /// of which the log said already that they are home: who brought them had not told yet.
    pub fn checkpoint_wanted(&self) -> bool {
        let (is_under_way, covered_lsn, keeps_log) = {
            let progress = self.checkpointer.progress.lock();
            let is_under_way = progress.started > progress.completed;
            (is_under_way, progress.covered_lsn, progress.keeps_log)
        };
        is_under_way
            || self.log.last_lsn() > covered_lsn
            || keeps_log
            || self.store.delta_size().running_keys > 0
            || self.store.obligations.oldest().is_some()
    }

    /// Nothing has to be written: whoever waits for a checkpoint has what he waits for, if he did so before that was found
    /// (`waits`: see [`Checkpointer::waits`]). Who came later may have something to be written, and has asked again.
    pub fn skip_checkpoint(&self, waits: u64) {
        let mut progress = self.checkpointer.progress.lock();
        if progress.started == progress.completed && progress.waits == waits {
            progress.started += 1;
            progress.completed += 1;
        }
        drop(progress);
        self.checkpointer.changed.notify_all();
        self.background.progress();
    }

    /// Does one phase of the checkpoint under way, or begins one. True if there is more to do for it.
    pub fn checkpoint_step(&self) -> Result<bool> {
        self.check_writable()?;
        let mut role = self.checkpointer.role.lock();
        let work = match role.take() {
            Some(work) => work,
            None => self.begin_checkpoint(),
        };
        // Up to the freeze a failure leaves everything as it was; after it, the frozen delta is there, and only its own
        // checkpoint can merge it.
        let before_freeze = matches!(work, Work::Home { .. } | Work::Freeze);
        let step = work.step();
        let began_ns = self.clock.monotonic_ns();
        self.checkpointer.progress.lock().step_began_ns = began_ns;
        let result = self.checkpoint_phase(work);
        let took_ns = self.clock.since_ns(began_ns);
        self.counters.checkpoint_step_us[step].record(took_ns / 1000);
        match result {
            Ok(next) => {
                self.checkpointer.progress.lock().refused = None;
                *role = next;
                Ok(role.is_some())
            }
            Err(Failed { error, again }) => {
                *role = again.map(|work| *work);
                if before_freeze || role.is_some() {
                    let mut progress = self.checkpointer.progress.lock();
                    if before_freeze {
                        progress.started -= 1;
                        progress.phase = Phase::Running;
                    }
                    progress.refused = is_refusal(&error).then(|| error.clone());
                    progress.failures += 1;
                    progress.failure = Some(error.clone());
                    drop(progress);
                    self.background.note_failure(&error);
                } else {
                    self.checkpointer.enter(Phase::Aborted);
                    self.shut_down(&format!("checkpoint: {error}"));
                }
                self.checkpointer.changed.notify_all();
                Err(error)
            }
        }
    }

    fn begin_checkpoint(&self) -> Work {
        let mut progress = self.checkpointer.progress.lock();
        progress.started += 1;
        progress.phase = Phase::CommitStart;
        progress.began_ns = self.clock.monotonic_ns();
        let is_awaited = progress.started <= progress.awaited;
        drop(progress);
        // Enough to go on, and soon done, if it is only wanted because the log fills up.
        let is_for_room = self.background.take_request_for_room() && !is_awaited;
        let up_to = if is_for_room { self.home_limit() } else { self.log.last_lsn() };
        Work::Home { inodes: self.dirty.all(), up_to }
    }

    fn checkpoint_phase(&self, work: Work) -> std::result::Result<Option<Work>, Failed> {
        if mutation::active(Mutation::ReleaseLogEarly) {
            self.log.release_before(&self.log.replay_point(self.log.last_lsn() + 1));
        }
        Ok(Some(match work {
            Work::Home { mut inodes, up_to } => {
                // The ring's reserve belongs to a barrier as long as its chain is open.
                self.finish_barriers(Lsn::MAX)?;
                self.bring_home(&mut inodes, up_to)?;
                if inodes.is_empty() { Work::Freeze } else { Work::Home { inodes, up_to } }
            }
            Work::Freeze => {
                self.checkpointer.enter(Phase::CommitDoing);
                let frozen = self.freeze()?;
                self.checkpointer.enter(Phase::Unblocked);
                Work::Log(frozen)
            }
            Work::Log(frozen) => {
                self.log.write_up_to(frozen.boundary.lsn)?;
                // What makes up for data that is missing may lie in a chain that was opened since the freeze.
                while !self.log.is_complete(frozen.boundary.lsn) {
                    self.finish_barriers(Lsn::MAX)?;
                    self.log.write_up_to(self.log.last_lsn())?;
                }
                Work::Merge(frozen)
            }
            Work::Merge(frozen) => match self.merge_delta(&frozen.tree, &frozen.delta) {
                Ok(new) => Work::Space(frozen, new),
                Err(error) => return Err(Failed::unchanged(error, Work::Merge(frozen))),
            },
            Work::Space(frozen, new) => {
                if let Err(error) = self.alloc.load_changed(&frozen.space, &new.allocs, &new.frees)
                {
                    return Err(Failed::unchanged(error, Work::Space(frozen, new)));
                }
                let (writes, published) = self.apply_space(frozen, &new)?;
                return self.checkpoint_phase(Work::WriteSpace(writes, published));
            }
            Work::WriteSpace(writes, published) => match self.write_space(&writes) {
                Ok(()) => Work::Flush(published),
                Err(error) if mutation::active(Mutation::SkipRefusedSpace) => {
                    return Err(Failed::unchanged(error, Work::Flush(published)));
                }
                Err(error) => {
                    return Err(Failed::unchanged(error, Work::WriteSpace(writes, published)));
                }
            },
            Work::Flush(published) => {
                if !mutation::active(Mutation::SuperblockBeforeFlush) {
                    self.log.flush()?;
                }
                self.checkpointer.enter(Phase::SuperCommitted);
                Work::Super(published)
            }
            Work::Super(published) => {
                if let Err(error) = self.write_places(&published.superblock) {
                    return Err(Failed::unchanged(error, Work::Super(published)));
                }
                self.publish(published)?;
                return Ok(None);
            }
        }))
    }

    /// Swaps the delta, between two chains of the log: what came after a barrier is not published without what came before.
    fn freeze(&self) -> Result<Frozen> {
        let transaction = self.superblock.lock().root.generation + 2;
        loop {
            let began = self.clock.monotonic_ns();
            if let Some(frozen) = self.store.freeze(transaction) {
                self.counters.freeze_ns.record(self.clock.since_ns(began));
                return Ok(frozen);
            }
            self.finish_barriers(Lsn::MAX)?;
        }
    }

    /// Writes logged pages home and commits attributes that only memory has, for some of `inodes`. Pages use the log's
    /// reserve; when even that is full, the rest waits for the next checkpoint. So does what the device refuses: the
    /// log keeps it, and the file's owner hears of it. A file whose mapping cannot be read keeps no other in the log.
    fn bring_home(&self, inodes: &mut Vec<Arc<Inode>>, up_to: u64) -> Result<()> {
        let mut pieces = Vec::new();
        let mut pages = 0;
        let mut result = Ok(());
        let mut again = None;
        let mut failed = None;
        for _ in 0..HOME_INODES {
            let Some(inode) = inodes.pop() else { break };
            match self.collect_owed(&inode, up_to, &mut pieces) {
                Ok(collected) => {
                    pages += collected.pages;
                    if !collected.complete {
                        again = Some(inode);
                        break;
                    }
                    if collected.pages == 0 {
                        // A cut may have made it clean, or whatever has logged its attributes: nobody else takes it off the list.
                        self.dirty.remove_if_clean(&inode);
                    }
                }
                // It was noted with the file.
                Err(error) if is_refusal(&error) => failed = Some(error),
                Err(error) => {
                    again = Some(inode);
                    result = Err(error);
                }
            }
            if pages >= HOME_PAGES || result.is_err() {
                break;
            }
        }
        let some_done = !pieces.is_empty();
        self.write_out(&mut pieces, IoClass::Background);
        match self.settle(pieces) {
            Ok(()) => inodes.extend(again),
            Err(error) if is_refusal(&error) => failed = Some(error),
            Err(error) => return Err(error),
        }
        if let Some(error) = failed {
            self.checkpointer.note_home_failure(error);
        }
        match result {
            // Settling gave log space back; or a barrier was raised, which has its room first.
            Err(Error::WouldBlock) if some_done || self.log.has_open_chain() => Ok(()),
            Err(Error::WouldBlock) => {
                inodes.clear();
                Ok(())
            }
            other => other,
        }
    }

    /// Takes what `inode` owes up to this operation, and has its attributes in the log if there is room for operations.
    fn collect_owed(
        &self,
        inode: &Arc<Inode>,
        up_to: u64,
        pieces: &mut Vec<Piece>,
    ) -> Result<Collected> {
        // Attributes release nothing: where checkpoints do not, for what they cannot bring home, those would use up the room for it.
        match self.commit_attributes(inode, Room::NoWait) {
            Err(Error::WouldBlock) => {}
            committed => committed?,
        }
        let budget = (HOME_PAGES, Room::Reserve);
        self.collect(inode, 0..u64::MAX, owed_filter(up_to), budget, pieces)
    }

    /// Commits an inode whose attributes changed in memory only (times, lazily).
    pub fn commit_attributes(&self, inode: &Arc<Inode>, room: Room) -> Result<()> {
        if !inode.meta.lock().dirty {
            return Ok(());
        }
        let admission = self.admit(OP_RECORD_BYTES / 8, 0, room)?;
        let mut meta = inode.meta.lock();
        if !meta.dirty || meta.purged {
            return Ok(());
        }
        let mut op = Op::new();
        op.put(Key::inode(inode.number), &meta.item.encode());
        let lsn = self.store.commit(op, admission)?;
        meta.logged(lsn, false);
        drop(meta);
        self.dirty.remove_if_clean(inode);
        Ok(())
    }

    /// Bitmaps and root, for the slots that the durable superblock does not name, and the superblock that will name them.
    fn apply_space(&self, frozen: Frozen, new: &NewTree) -> Result<(Vec<SpaceWrite>, Published)> {
        let old = self.superblock.lock().clone();
        let generation = old.root.generation + 1;
        let applied = self.alloc.apply(frozen.space, &new.allocs, &new.frees, generation)?;
        let bitmaps = applied.writes.into_iter();
        let mut writes: Vec<SpaceWrite> = bitmaps
            .map(|write| SpaceWrite { block: write.block, content: write.content })
            .collect();
        let checkpoint_lsn = frozen.boundary.lsn;
        let root = Root {
            generation,
            checkpoint_lsn,
            next_inode: frozen.next_inode,
            inode_count: frozen.inode_count,
            tree: stored_tree(&new.root),
            groups: applied.groups,
        };
        let current = self.geometry.root_slot_at(old.root.block).unwrap_or(1);
        let overwrite = mutation::active(Mutation::OverwriteDurableRoot);
        let slot = if overwrite { current } else { 1 - current };
        let block = self.geometry.root_block(slot);
        let (content, pointer) = root.encode(&self.geometry, &self.volume_id, block)?;
        writes.push(SpaceWrite { block, content });
        let forget = mutation::active(Mutation::ForgetOwedPayload);
        let owed = if forget { None } else { frozen.oldest_payload };
        let oldest = owed.unwrap_or(u64::MAX).min(checkpoint_lsn + 1);
        let replay = self.log.replay_point(oldest);
        let superblock = Superblock {
            generation: old.generation + 1,
            root: pointer,
            replay: crate::format::superblock::ReplayPoint {
                position_blocks: replay.position_blocks,
                sequence: replay.sequence,
                prev_digest: replay.prev_digest,
            },
            durable_lsn: checkpoint_lsn,
            durable_sequence: self.log.replay_point(checkpoint_lsn + 1).sequence,
            clean: false,
            errors_seen: self.has_met_damage(),
            ..old
        };
        let keeps_log = oldest <= checkpoint_lsn;
        let replaced_blocks = new.frees.iter().map(|run| run.blocks).sum();
        let tree = new.root;
        let published =
            Published { tree, replaced_blocks, superblock, replay, checkpoint_lsn, keeps_log };
        Ok((writes, published))
    }

    fn write_space(&self, writes: &[SpaceWrite]) -> Result<()> {
        for SpaceWrite { block, content } in writes {
            let offset_bytes = block * BLOCK_BYTES_U64;
            self.device.write(offset_bytes, &[content], IoClass::Background, false)?;
        }
        self.log.note_data_written();
        Ok(())
    }

    /// The superblock is written in both of its places: makes it durable, and the checkpoint the volume's state.
    fn publish(&self, published: Published) -> Result<()> {
        let Published { tree, replaced_blocks, superblock, replay, checkpoint_lsn, keeps_log } =
            published;
        self.make_superblock_durable(&superblock)?;
        self.checkpointer.enter(Phase::Completed);
        self.alloc.merge_published(replaced_blocks);
        self.store.publish(tree);
        self.store.nodes.drop_replaced();
        self.alloc.checkpoint_durable();
        self.log.release_before(&replay);
        self.counters.checkpoints.add(1);
        let mut progress = self.checkpointer.progress.lock();
        progress.completed += 1;
        progress.phase = Phase::Running;
        progress.covered_lsn = checkpoint_lsn;
        progress.keeps_log = keeps_log;
        let took_ns = self.clock.since_ns(progress.began_ns);
        drop(progress);
        self.counters.checkpoint_us.record(took_ns / 1000);
        self.checkpointer.changed.notify_all();
        self.background.progress();
        Ok(())
    }

    /// Makes `superblock` durable in both of its places, and the engine's from then on.
    ///
    /// # Errors
    /// The disk has refused it [`HOME_ATTEMPTS`] times: the one before is as good. Or the flush failed.
    pub fn write_superblock(&self, superblock: &Superblock) -> Result<()> {
        with_attempts(|| self.write_places(superblock))?;
        self.make_superblock_durable(superblock)
    }

    /// The same, when the log is shut down.
    pub fn write_last_superblock(&self, superblock: &Superblock) -> Result<()> {
        with_attempts(|| self.write_places(superblock))?;
        self.device.flush()?;
        *self.superblock.lock() = superblock.clone();
        Ok(())
    }

    /// May be repeated.
    fn write_places(&self, superblock: &Superblock) -> Result<()> {
        for block in superblock.places() {
            let bytes = superblock.encode(block)?;
            self.device.write(block * BLOCK_BYTES_U64, &[&bytes], IoClass::Log, false)?;
        }
        self.log.note_data_written();
        Ok(())
    }

    fn make_superblock_durable(&self, superblock: &Superblock) -> Result<()> {
        self.log.flush()?;
        *self.superblock.lock() = superblock.clone();
        Ok(())
    }
}

/// A tree root as the root's table stores it.
pub fn stored_tree(tree: &TreeRoot) -> crate::format::root::TreeRoot {
    crate::format::root::TreeRoot {
        root_block: tree.block,
        level: tree.level,
        checksum: tree.checksum,
        item_count: tree.item_count,
        node_count: tree.node_count,
        generation: tree.generation,
    }
}

/// A tree root from the root's table.
pub fn loaded_tree(stored: &crate::format::root::TreeRoot) -> TreeRoot {
    TreeRoot {
        block: stored.root_block,
        level: stored.level,
        checksum: stored.checksum,
        generation: stored.generation,
        item_count: stored.item_count,
        node_count: stored.node_count,
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use crate::background::LogShortage;
    use crate::sync::atomic::Ordering;
    use crate::sync::{Turn, take_turns};
    use crate::txn::{Lsn, volume_with_a_file};
    use crate::{AllocateMode, BackgroundWork, Error, File, Volume};
    use std::cell::RefCell;

    /// Who brings a page home commits that, and then tells that the log need not keep it any more: a checkpoint can freeze between
    /// the two, and then covers all there is and keeps the log.
    #[test]
    fn log_kept_for_a_page_that_was_home_already_is_released_by_the_next_checkpoint() {
        let (volume, file) = volume_with_a_file();
        let engine = file.engine();
        let checkpoint = || {
            while volume.background_step(BackgroundWork::Checkpoint).expect("checkpoint") {}
        };
        while engine.checkpoint_wanted() {
            checkpoint();
        }
        file.write_at(0, b"a change").expect("write");
        file.fsync().expect("fsync");
        // Of its pages one is home, and who brought it has not told when the checkpoint freezes.
        let lsn = engine.log.last_lsn();
        engine.store.obligations.add(lsn, 1, None);
        checkpoint();
        checkpoint();
        assert!(engine.log.fill().used_blocks > 0, "the log is kept");
        engine.store.obligations.release(lsn);
        while engine.checkpoint_wanted() {
            checkpoint();
        }
        assert_eq!(engine.log.fill().used_blocks, 0, "the log is released");
    }

    /// A volume whose log holds a page that no checkpoint finds, of this operation.
    fn with_a_page_that_stays() -> (Volume, File, Lsn) {
        let (volume, file) = volume_with_a_file();
        file.write_at(0, b"a change").expect("write");
        file.fsync().expect("fsync");
        let engine = file.engine();
        let lsn = engine.log.last_lsn();
        engine.store.obligations.add(lsn, 1, None);
        (volume, file, lsn)
    }

    /// Somebody needs room in a log that is full of pages which others have brought home, and are about to say so. (The simulator's seed 45
    /// came to that between the commit of a piece and the end of its writeback.)
    #[test]
    fn a_log_that_is_about_to_be_let_go_is_not_full_for_good() {
        let (_volume, file, lsn) = with_a_page_that_stays();
        let engine = file.engine();
        let obligations = &engine.store.obligations;
        let changing = obligations.begin_change();
        let mut shortage = LogShortage::default();
        for _ in 0..20 {
            assert_eq!(engine.relieve_log(&mut shortage), Ok(()));
        }
        drop(changing);
        let refused = (0..20).find_map(|_| engine.relieve_log(&mut shortage).err());
        assert!(matches!(refused, Some(Error::Corrupt(_))), "{refused:?}");
        obligations.release(lsn);
    }

    /// Which checkpoints meet the device's refusal is chance: others may have the pages in their hands, and the device may be well again.
    #[test]
    fn who_finds_the_log_full_hears_what_was_refused_before_the_last_checkpoint() {
        let (_volume, file, lsn) = with_a_page_that_stays();
        let engine = file.engine();
        let obligations = &engine.store.obligations;
        let refusal = Error::HostFull("the host".into());
        let by_checkpoint = || engine.checkpointer.note_home_failure(refusal.clone());
        let by_others = || engine.background.note_failure(&refusal);
        for note in [&by_checkpoint as &dyn Fn(), &by_others] {
            let mut shortage = LogShortage::default();
            // The first may still release what nobody needs.
            assert_eq!(engine.relieve_log(&mut shortage), Ok(()));
            assert_eq!(engine.relieve_log(&mut shortage), Ok(()));
            note();
            let refused = (0..20).find_map(|_| engine.relieve_log(&mut shortage).err());
            assert_eq!(refused, Some(refusal.clone()));
        }
        obligations.release(lsn);
    }

    /// A cut, and whatever logs attributes, makes an inode clean that is on the list, which keeps it in memory.
    #[test]
    fn what_is_on_the_dirty_list_and_clean_leaves_it_with_the_next_checkpoint() {
        let (volume, file) = volume_with_a_file();
        let engine = file.engine();
        let write = || file.write_at(0, &vec![7; 20_000]).expect("write");
        let cut = || file.truncate(0).expect("truncate");
        let punch = || file.allocate(AllocateMode::PunchHole, 0, 20_000).expect("punch");
        for take_out in [&cut as &dyn Fn(), &punch] {
            write();
            take_out();
            assert_eq!(engine.dirty_pages.load(Ordering::Acquire), 0);
            volume.checkpoint().expect("checkpoint");
            assert_eq!(engine.dirty.count(), 0);
        }
        // What is dirty, and nothing of it is in the log, stays.
        file.write_at(0, b"a change").expect("write");
        volume.background_step(BackgroundWork::Checkpoint).expect("checkpoint");
        assert_eq!(engine.dirty.count(), 1);
    }

    /// Somebody wants room in the log, and its checkpoint begins just after somebody else has found out which one he has to wait for.
    #[test]
    fn who_waits_for_a_checkpoint_waits_for_one_that_brings_everything_home() {
        let (volume, file) = volume_with_a_file();
        let engine = file.engine();
        file.write_at(0, &vec![7; 20_000]).expect("write");
        volume.sync().expect("sync");
        engine.background.request_room();
        let goal = engine.checkpointer.goal();
        while engine.checkpoint_step().expect("checkpoint") {}
        assert_eq!(engine.checkpointer.completed(), goal);
        assert_eq!(engine.store.obligations.oldest(), None);
    }

    #[test]
    fn a_checkpoint_that_was_found_needless_is_none_for_who_began_to_wait_later() {
        let (_volume, file) = volume_with_a_file();
        let engine = file.engine();
        let early = engine.checkpointer.goal();
        let waits = engine.checkpointer.waits();
        engine.skip_checkpoint(waits);
        assert_eq!(engine.checkpointer.completed(), early);
        let waits = engine.checkpointer.waits();
        let late = engine.checkpointer.goal();
        engine.skip_checkpoint(waits);
        assert!(engine.checkpointer.completed() < late);
    }

    thread_local! {
        static WATCHED: RefCell<Option<File>> = const { RefCell::new(None) };
    }

    fn look_whether_all_is_paid(_: Turn) {
        let Some(file) = WATCHED.take() else { return };
        let engine = file.engine();
        if engine.store.obligations.oldest().is_none() {
            assert_eq!(engine.dirty_pages.load(Ordering::Acquire), 0);
            assert_eq!(engine.alloc.totals().reserved_blocks, 0);
        }
        WATCHED.set(Some(file));
    }

    /// Who waits for an empty log waits until nothing is owed, and takes all pages for paid then.
    #[test]
    fn pages_that_are_cut_are_paid_before_they_are_not_owed_any_more() {
        let (_volume, file) = volume_with_a_file();
        file.write_at(0, &vec![7; 12_000]).expect("write");
        file.fsync().expect("fsync");
        assert!(file.engine().store.obligations.oldest().is_some());
        WATCHED.set(Some(file.clone()));
        take_turns(Some(look_whether_all_is_paid));
        let cut = file.truncate(0);
        take_turns(None);
        WATCHED.set(None);
        assert_eq!(cut, Ok(()));
        assert_eq!(file.engine().store.obligations.oldest(), None);
    }
}
