//! The commit of a batch: locks, plan, data, log, cache. See the module above for the order, and `docs/ARCHITECTURE.md` for
//! that of the locks.
//!
//! **Invariant:** log space is admitted under `ops` locks at most. If what has to be logged turns out to be more, all locks inside of
//! those are given up, and it is admitted anew.

use super::Batch;
use super::data::{Held, Logged, Old, Pages, WRITE_PAGES, Way};
use super::patch::Patch;
use super::plan::{self, Ops, Plan, Unplanned};
use super::step::{BatchError, Recorded, Step};
use crate::alloc::{ReserveClass, Run};
use crate::background::LogShortage;
use crate::cache::map::{Inserted, PageMap, Removed};
use crate::engine::{Engine, class_of};
use crate::error::{Error, Result};
use crate::file::extents::{self, Unmapped};
use crate::format::item::{Extent, INODE_INLINE, InodeItem};
use crate::format::{BLOCK_BYTES_U64, Key};
use crate::inode::{Inode, Meta};
use crate::log::{Admission, OpRecords};
use crate::mutation::{self, Mutation};
use crate::namespace::rules::Metas as _;
use crate::namespace::{MetaLocks, OP_SPACE_BLOCKS};
use crate::sync::{Arc, MutexGuard, RwLockWriteGuard};
use crate::txn::{DeltaSum, Lsn, Op, Overlay};
use crate::types::{FileType, NewInode, Timestamp};
use std::collections::BTreeSet;
use std::ops::Range;

/// Log space for the item of one inode.
const ITEM_BYTES: usize = 256;
/// What an entry, an orphan or a target takes in the tree besides its text.
const ENTRY_BYTES: usize = 64;

/// One file of a batch, while it is committed.
struct FileWork<'a> {
    inode: Arc<Inode>,
    patch: &'a Patch,
    /// Where the old content ends, if some of it goes.
    cut: Option<u64>,
    new_size: u64,
    logged: Vec<Logged>,
}

impl FileWork<'_> {
    /// Pages of which nothing of the old is left.
    fn cut_pages(&self) -> Range<u64> {
        self.cut.map_or(u64::MAX, |cut| cut.div_ceil(BLOCK_BYTES_U64))..u64::MAX
    }
}

/// What the extents of a file change by.
#[derive(Default, Clone, Copy)]
struct Mapped {
    added: u64,
    removed: u64,
    drops_inline: bool,
}

/// The operations of the data, before they are packed.
#[derive(Default)]
struct DataOps {
    ops: Vec<Op>,
    /// Of each file: what its mapping changes by.
    mapped: Vec<Mapped>,
    /// Pages in the log: (file, place in its list, operation).
    payloads: Vec<(usize, usize, usize)>,
}

/// The inodes that a batch makes: in the table, but not alive, until it is committed.
struct Newborn<'a> {
    engine: &'a Engine,
    inodes: Vec<Arc<Inode>>,
    committed: bool,
}

impl Drop for Newborn<'_> {
    fn drop(&mut self) {
        if !self.committed {
            for inode in &self.inodes {
                self.engine.inodes.remove(inode.number);
            }
        }
    }
}

/// Blocks promised to the names of a batch until it is committed, when the store's reserve takes over: of several batches that come at a
/// time, none counts on what another one is about to take.
struct NamesRoom<'a> {
    engine: &'a Engine,
    blocks: u64,
}

impl Drop for NamesRoom<'_> {
    fn drop(&mut self) {
        if self.blocks > 0 {
            self.engine.alloc.release(self.blocks);
        }
    }
}

/// What locks taken in vain wait for before they are taken again.
enum Attempt<T> {
    Done(T),
    /// These directories' locks are needed besides.
    Lock(BTreeSet<u64>),
}

impl Engine {
    /// Makes the changes of `batch`. Answers the LSN of the last part of it.
    pub(super) fn commit_batch(&self, batch: &Batch) -> Result<Lsn, BatchError> {
        self.check_writable()?;
        if batch.steps.is_empty() {
            return Ok(self.log.last_lsn());
        }
        self.throttle(0)?;
        let pages = Pages::of(batch);
        let way = Way::of(self, pages);
        if let Err(error) = self.check_fits_log(least_log_blocks(pages, way)) {
            // Before gigabytes are written for nothing.
            return Err(self.refusal(batch, error));
        }
        let logged_pages = pages.logged(way);
        if logged_pages > 0 {
            self.delay_for_log(logged_pages);
        }
        let (mut held, names_room) = match self.keep_room(batch, pages) {
            Err(Error::NoSpace) => return Err(self.refusal(batch, Error::NoSpace)),
            kept => kept?,
        };
        if way != Way::Log {
            write_whole_pages(batch, &mut held)?;
        }
        let mut newborn = self.newborn(batch)?;
        let mut directories = plan::directories(batch);
        loop {
            match self.try_commit(batch, &directories, (&mut held, way))? {
                Attempt::Lock(missed) => directories.extend(missed),
                Attempt::Done((lsn, newly_dirty, victims)) => {
                    newborn.committed = true;
                    held.committed(newly_dirty);
                    drop(names_room);
                    for victim in victims {
                        self.purge_or_leave(&victim);
                    }
                    return Ok(lsn);
                }
            }
        }
    }

    /// Room for its data, and besides for its names.
    fn keep_room(&self, batch: &Batch, pages: Pages) -> Result<(Held<'_>, NamesRoom<'_>)> {
        let held = Held::for_pages(self, pages)?;
        let names_room = self.keep_names_room(batch)?;
        Ok((held, names_room))
    }

    /// Why `batch` fails for which there is no room, as `error` says: as with single calls, what is wrong with a step comes first.
    fn refusal(&self, batch: &Batch, error: Error) -> BatchError {
        let _newborn = match self.newborn(batch) {
            Ok(newborn) => newborn,
            Err(error) => return error.into(),
        };
        let mut directories = plan::directories(batch);
        loop {
            let parents = self.parents(&directories);
            let locked: BTreeSet<u64> = parents.iter().map(|inode| inode.number).collect();
            let _tree = (!parents.is_empty()).then(|| self.tree_lock.lock());
            let _directories: Vec<_> = parents.iter().map(|inode| inode.ops.lock()).collect();
            match plan::plan(self, batch, &locked, self.now()) {
                Ok(_) => return error.into(),
                Err(Unplanned::Failed(error)) => return error,
                Err(Unplanned::NeedsLocks(missed)) => directories.extend(missed),
            }
        }
    }

    /// Those of `directories` that are there. What cannot be found, or is something else, the plan refuses when it comes to the step that
    /// names it.
    fn parents(&self, directories: &BTreeSet<u64>) -> Vec<Arc<Inode>> {
        directories.iter().filter_map(|number| self.directory(*number).ok()).collect()
    }

    /// Room for the names that `batch` makes and moves: as if each came alone, or what all of them are to the next checkpoint, if that is
    /// less. (Of many, few have a leaf of their own divided.)
    fn keep_names_room(&self, batch: &Batch) -> Result<NamesRoom<'_>> {
        let mut room = NamesRoom { engine: self, blocks: 0 };
        let names_put =
            batch.steps.iter().filter(|recorded| puts_name(&recorded.step)).count() as u64;
        if names_put == 0 {
            return Ok(room);
        }
        let only_moves = !batch.steps.iter().any(|recorded| adds_name(&recorded.step));
        let class = if only_moves { ReserveClass::Tidy } else { ReserveClass::User };
        let together = self.store.growth_blocks(names_sum(&batch.steps)) + OP_SPACE_BLOCKS;
        let blocks = together.min(names_put * OP_SPACE_BLOCKS);
        self.reserve_for(blocks, class)?;
        room.blocks = blocks;
        Ok(room)
    }

    fn newborn(&self, batch: &Batch) -> Result<Newborn<'_>> {
        let mut newborn = Newborn { engine: self, inodes: Vec::new(), committed: false };
        for Recorded { step, .. } in &batch.steps {
            let Step::Make { ino, new, .. } = step else { continue };
            let (inode, dropped) = self.inodes.find_or_load(*ino, || Ok(unborn(*ino, new)))?;
            drop(dropped);
            newborn.inodes.push(inode);
        }
        Ok(newborn)
    }

    /// One attempt with the `ops` locks of `directories`.
    #[allow(clippy::type_complexity, reason = "named where it is taken apart")]
    fn try_commit(
        &self,
        batch: &Batch,
        directories: &BTreeSet<u64>,
        (held, way): (&mut Held<'_>, Way),
    ) -> Result<Attempt<(Lsn, u64, Vec<Arc<Inode>>)>, BatchError> {
        let parents = self.parents(directories);
        let locked: BTreeSet<u64> = parents.iter().map(|inode| inode.number).collect();
        let files: Vec<_> = batch.patches.keys().filter_map(|ino| self.regular(*ino)).collect();
        let _tree = (!parents.is_empty()).then(|| self.tree_lock.lock());
        let _directories: Vec<_> = parents.iter().map(|inode| inode.ops.lock()).collect();
        let _files: Vec<_> = files.iter().map(|inode| inode.ops.lock()).collect();
        let now = self.now();
        let plan = match plan::plan(self, batch, &locked, now) {
            Ok(plan) => plan,
            Err(Unplanned::NeedsLocks(missed)) => return Ok(Attempt::Lock(missed)),
            Err(Unplanned::Failed(error)) => return Err(error),
        };
        if files.len() < batch.patches.len() {
            // One of them came into being since.
            return Err(Error::NotFound.into());
        }
        let mut works = Vec::with_capacity(files.len());
        for (inode, patch) in files.iter().cloned().zip(batch.patches.values()) {
            works.push(self.prepare_file(inode, patch, (held, way))?);
        }
        held.charge_dirty(works.iter().map(|work| work.logged.len() as u64).sum());
        let mut blocks = log_blocks(&plan, &works, held);
        loop {
            let admission = self.admit_batch(blocks)?;
            let maps = self.quiet_maps(&works, held);
            let data = self.data_ops(&works, held)?;
            let limit = self.max_part_blocks();
            let needed = packed_blocks(&data.ops, limit) + names_blocks(&plan, limit);
            if needed > admission.blocks() {
                drop(maps);
                blocks = needed;
                continue;
            }
            let (lsn, newly_dirty) =
                self.apply_batch(&plan, (&works, held), data, now, admission)?;
            drop(maps);
            for work in &works {
                self.dirty.add(&work.inode);
                self.dirty.remove_if_clean(&work.inode);
            }
            return Ok(Attempt::Done((lsn, newly_dirty, plan.victims)));
        }
    }

    /// The regular file `number`.
    fn regular(&self, number: u64) -> Option<Arc<Inode>> {
        self.inode(number).ok().filter(|inode| inode.file_type == FileType::Regular)
    }

    /// Most blocks of a frame of a batch that takes several operations.
    pub fn max_part_blocks(&self) -> u64 {
        let limit = self.log.max_operation_blocks();
        self.options.batch_part_blocks.map_or(limit, |blocks| blocks.clamp(1, limit))
    }

    /// Refuses a batch that takes so many blocks of the log.
    fn check_fits_log(&self, blocks: u64) -> Result<()> {
        if blocks <= self.log.fill().ring_blocks / 4 {
            return Ok(());
        }
        Err(Error::Invalid("the batch is too large: a quarter of the log must hold it"))
    }

    /// Log space for a batch. The caller holds `ops` locks at most.
    fn admit_batch(&self, blocks: u64) -> Result<Admission> {
        self.check_fits_log(blocks)?;
        let mut shortage = LogShortage::default();
        loop {
            self.check_writable()?;
            match self.log.admit(blocks, class_of(blocks)) {
                Ok(admission) => return Ok(admission),
                Err(_full) => self.relieve_log(&mut shortage)?,
            }
        }
    }

    /// Puts the pages of a file together. The caller holds its `ops`, so the old content stays as it is.
    fn prepare_file<'a>(
        &self,
        inode: Arc<Inode>,
        patch: &'a Patch,
        (held, way): (&mut Held<'_>, Way),
    ) -> Result<FileWork<'a>> {
        self.end_cut(&inode)?;
        let old_size = inode.size();
        let cut = patch.cut_of(old_size);
        let old = Old { engine: self, inode: &inode, end: cut.unwrap_or(old_size) };
        let mut logged = Vec::new();
        let mut take = |pages: Range<u64>, is_whole: bool| -> Result<()> {
            match (way, is_whole) {
                (Way::Log, _) | (Way::LogPartial, false) => {
                    for index in pages {
                        logged.push(old.page(patch, index)?);
                    }
                    Ok(())
                }
                // They are home already.
                (Way::LogPartial | Way::Home, true) => Ok(()),
                (Way::Home, false) => {
                    let mut content = |index, page: &mut [u8]| old.fill(patch, index, page);
                    held.write_home(inode.number, pages, &mut content)
                }
            }
        };
        // A cut within a page leaves zeros behind it; of a hole, the hole.
        let mut cut_page =
            cut.filter(|cut| !cut.is_multiple_of(BLOCK_BYTES_U64)).map(|cut| cut / BLOCK_BYTES_U64);
        if let Some(index) = cut_page
            && !self.may_have_content(&inode, index)?
        {
            cut_page = None;
        }
        for (run, is_whole) in patch.runs() {
            if let Some(index) = cut_page
                && index < run.end
            {
                cut_page = None;
                if index < run.start {
                    take(index..index + 1, false)?;
                }
            }
            take(run, is_whole)?;
        }
        if let Some(index) = cut_page {
            take(index..index + 1, false)?;
        }
        let new_size = patch.size_after(old_size);
        Ok(FileWork { inode, patch, cut, new_size, logged })
    }

    /// The operations that map and log the data. The caller holds the `map` locks.
    fn data_ops(&self, works: &[FileWork<'_>], held: &Held<'_>) -> Result<DataOps> {
        let mut overlay = Overlay::new(&self.store);
        let mut data = DataOps::default();
        for (number, work) in works.iter().enumerate() {
            let mut mapped = Mapped::default();
            let is_inline = work.inode.meta.lock().item.is_inline();
            if work.cut.is_some() {
                mapped.removed += cut_op(work, self.cut_extents(), &mut overlay, &mut data)?;
                mapped.drops_inline |= is_inline && work.cut_pages().start == 0;
            }
            for home in held.homes_of(work.inode.number) {
                let (op, removed) = home_op(&work.inode, home, &overlay)?;
                overlay.absorb(&op);
                data.ops.push(op);
                mapped.removed += removed;
                mapped.added += home.run.blocks;
                mapped.drops_inline |= is_inline && home.file_block == 0;
            }
            self.payload_ops((number, work), &overlay, &mut data)?;
            data.mapped.push(mapped);
        }
        Ok(data)
    }

    /// Puts the pages that travel in the log into operations, each of which fits into a frame.
    fn payload_ops(
        &self,
        (number, work): (usize, &FileWork<'_>),
        overlay: &Overlay<'_>,
        data: &mut DataOps,
    ) -> Result<()> {
        let most = self.max_part_blocks().saturating_sub(1).max(1);
        let limit = self.max_payload_pages().min(most as usize);
        for (chunk_number, chunk) in work.logged.chunks(limit).enumerate() {
            let mut op = Op::new();
            for (place, logged) in chunk.iter().enumerate() {
                let index = logged.index;
                let ino = work.inode.number;
                let mut home = None;
                // What was cut away has none: it is not looked for, since that would step over all that was cut, once for each page.
                if !work.cut_pages().contains(&index) {
                    let (pieces, _) = extents::pieces(overlay, ino, index, index + 1)?;
                    home = pieces.first().filter(|piece| !piece.unwritten).map(|piece| piece.block);
                }
                op.payload(ino, index, home.unwrap_or(0), logged.page.clone());
                data.payloads.push((number, chunk_number * limit + place, data.ops.len()));
            }
            data.ops.push(op);
        }
        Ok(())
    }

    /// Applies everything, in memory and to the log, with all page maps and attributes locked. Answers the LSN, and how many pages
    /// have become dirty.
    fn apply_batch(
        &self,
        plan: &Plan<'_>,
        (works, held): (&[FileWork<'_>], &Held<'_>),
        data: DataOps,
        now: Timestamp,
        admission: Admission,
    ) -> Result<(Lsn, u64), BatchError> {
        let mut maps: Vec<_> = works.iter().map(|work| work.inode.pages.write()).collect();
        let concerned: Vec<_> = plan.concerned.values().collect();
        let mut metas = MetaLocks::new(&concerned);
        let applied = apply_names(plan, works, &data.mapped, &mut metas, now);
        let committed = applied.and_then(|names| {
            let DataOps { mut ops, payloads, .. } = data;
            ops.extend(names);
            let (parts, part_of) = pack(ops, self.max_part_blocks());
            let count = parts.len() as u64;
            let lsn = self.store.commit_parts(parts, admission)?;
            let first = lsn + 1 - count;
            let at = |(file, place, op): (usize, usize, usize)| (file, place, first + part_of[op]);
            Ok((lsn, payloads.into_iter().map(at).collect::<Vec<_>>()))
        });
        let (lsn, payloads) = match committed {
            Ok(committed) => committed,
            Err(error) => {
                metas.restore();
                return Err(error);
            }
        };
        metas.logged(lsn);
        let mut removed = Vec::new();
        for (work, map) in works.iter().zip(&mut maps) {
            work.inode.set_logged_size(work.new_size);
            let meta = metas.of(&work.inode);
            meta.dirty |= meta.item.size != work.new_size;
            remove_old(work, held, map, &mut removed);
        }
        let mut newly_dirty = 0;
        // Given back when the maps are unlocked.
        let mut replaced = Vec::with_capacity(payloads.len());
        for (file, place, lsn) in payloads {
            let work = &works[file];
            let inserted = self.cache_logged(work, &work.logged[place], &mut maps[file], lsn);
            newly_dirty += u64::from(inserted.newly_dirty);
            replaced.extend(inserted.replaced);
        }
        drop(metas);
        drop(maps);
        for removed in &removed {
            self.forget_removed(removed);
        }
        Ok((lsn, newly_dirty))
    }

    /// A page that the log has as of `lsn` enters the cache, in place of the one that is there. An older version on its way home stays with
    /// its writeback.
    fn cache_logged(
        &self,
        work: &FileWork<'_>,
        logged: &Logged,
        map: &mut RwLockWriteGuard<'_, PageMap>,
        lsn: Lsn,
    ) -> Inserted {
        let inserted = map.insert_dirty(logged.index, logged.page.clone());
        if inserted.new_chunk {
            self.note_resident(work.inode.number, logged.index);
        }
        if let Some(older) = map.set_logged(logged.index, lsn) {
            self.store.obligations.release(older);
        }
        inserted
    }
}

impl Engine {
    /// The `map` locks of all files, at a moment when no page that the batch changes is under writeback: but for those that are overwritten
    /// where they live, since the log has them, while a newer version goes into the log. Not so the page that a cut ends in, nor any behind it:
    /// what goes home says how far the file reached when it began.
    fn quiet_maps<'a>(
        &self,
        works: &'a [FileWork<'_>],
        held: &Held<'_>,
    ) -> Vec<MutexGuard<'a, ()>> {
        let remapped: Vec<_> = works.iter().map(|work| remapped(work, held)).collect();
        'again: loop {
            let mut maps = Vec::with_capacity(works.len());
            for (work, ranges) in works.iter().zip(&remapped) {
                let moment = work.inode.io_moment();
                maps.push(work.inode.map.lock());
                let busy = {
                    let pages = work.inode.pages.read();
                    let cut = work
                        .cut
                        .filter(|_| !mutation::active(Mutation::CutBesideHome))
                        .map(|cut| cut / BLOCK_BYTES_U64..u64::MAX);
                    ranges
                        .iter()
                        .cloned()
                        .chain(cut)
                        .any(|range| pages.first_writeback(range).is_some())
                        || work.logged.iter().any(|page| pages.is_moving(page.index))
                };
                if busy {
                    // Its end needs the lock; and that of another file may come first.
                    drop(maps);
                    self.wait_pages(&work.inode, moment);
                    continue 'again;
                }
            }
            return maps;
        }
    }
}

/// Unmaps what a cut takes away. Answers how many blocks.
fn cut_op(
    work: &FileWork<'_>,
    limit: usize,
    overlay: &mut Overlay<'_>,
    data: &mut DataOps,
) -> Result<u64> {
    let (number, range) = (work.inode.number, work.cut_pages());
    let mut removed = 0;
    let mut from = Some(range.start);
    let mut mapping = extents::Mapping::from(number);
    let mut first = true;
    while let Some(start) = from {
        let mut op = Op::new();
        if first {
            op.settled(number, range.start, range.end - range.start);
            first = false;
        }
        let place = (start, range.end);
        let (count, next) = extents::cut(overlay, &mut op, mapping, place, Unmapped::Freed, limit)?;
        mapping = mapping.from_its_start();
        overlay.absorb(&op);
        // All that was looked at may have been cut before.
        if !op.is_empty() {
            data.ops.push(op);
        }
        removed += count;
        from = next;
    }
    Ok(removed)
}

/// Maps pages to the new blocks that hold them. Answers how many blocks are mapped no more besides.
fn home_op(inode: &Inode, home: &super::data::Home, overlay: &Overlay<'_>) -> Result<(Op, u64)> {
    let number = inode.number;
    let mut op = Op::new();
    let pages = home.pages();
    let mut removed = 0;
    let mut from = Some(pages.start);
    while let Some(start) = from {
        let range = (start, pages.end);
        let (count, next) =
            extents::cut(overlay, &mut op, number, range, Unmapped::Freed, usize::MAX)?;
        removed += count;
        from = next;
    }
    op.allocated(Run { start: home.run.start, blocks: home.run.blocks });
    op.wrote(home.run.start, &home.checksums);
    let extent = Extent {
        block: home.run.start,
        blocks: home.run.blocks,
        checksums: home.checksums.clone(),
    };
    let left = extents::left_neighbour(overlay, number, pages.start)?;
    extents::insert(&mut op, number, pages.start, &extent, left);
    if inode.pages.read().logged(pages.clone()).next().is_some() {
        op.settled(number, pages.start, pages.end - pages.start);
    }
    Ok((op, removed))
}

/// Takes the pages out of the cache whose mapping a batch changes, whatever their state.
fn remove_old(work: &FileWork<'_>, held: &Held<'_>, map: &mut PageMap, removed: &mut Vec<Removed>) {
    for range in remapped(work, held) {
        removed.push(map.remove_range(range));
    }
}

/// Pages whose mapping the batch changes: that it has written home, or cuts. Of others only the content changes.
fn remapped(work: &FileWork<'_>, held: &Held<'_>) -> Vec<Range<u64>> {
    let homes = held.homes_of(work.inode.number).iter().map(super::data::Home::pages);
    homes.chain(work.cut.map(|_| work.cut_pages())).collect()
}

/// An inode that a batch will make: nobody can use it.
fn unborn(number: u64, new: &NewInode) -> Inode {
    let nothing = Timestamp::from_ns(0);
    let item = InodeItem {
        file_type: new.file_type,
        permissions: 0,
        links: 0,
        uid: 0,
        gid: 0,
        size: 0,
        blocks: 0,
        parent: 0,
        change_counter: 0,
        atime: nothing,
        mtime: nothing,
        ctime: nothing,
        btime: nothing,
        rdev: 0,
        flags: 0,
        subdirectories: 0,
    };
    let inode = Inode::new(number, item);
    {
        let mut meta: MutexGuard<'_, Meta> = inode.meta.lock();
        (meta.purged, meta.orphan) = (true, false);
    }
    inode
}

fn adds_name(step: &Step) -> bool {
    matches!(step, Step::Make { .. } | Step::Link { .. })
}

/// Whether the step puts an entry into a directory.
fn puts_name(step: &Step) -> bool {
    adds_name(step) || matches!(step, Step::Rename { .. })
}

/// What names change in the tree at most: entries; inodes, their own, those of directories, and of who loses a name; targets; orphans.
fn names_sum(steps: &[Recorded]) -> DeltaSum {
    let of = |inodes: usize, others: usize, text: usize| DeltaSum {
        keys: (inodes + others) as u64,
        bytes: (inodes * ITEM_BYTES + others * ENTRY_BYTES + text) as u64,
    };
    let sums = steps.iter().map(|recorded| match &recorded.step {
        Step::Make { name, target, .. } => {
            of(2, 2, name.len() + target.as_ref().map_or(0, Vec::len))
        }
        Step::Link { name, .. } => of(2, 2, name.len()),
        Step::Rename { name, new_name, .. } => of(4, 3, name.len() + new_name.len()),
        Step::Unlink { .. } | Step::Rmdir { .. } => of(3, 2, 0),
        Step::Attributes { .. } | Step::Content { .. } => of(1, 0, 0),
    });
    sums.fold(DeltaSum::default(), |sum, one| DeltaSum {
        keys: sum.keys + one.keys,
        bytes: sum.bytes + one.bytes,
    })
}

/// Writes the pages of which nothing old is left to new blocks.
fn write_whole_pages(batch: &Batch, held: &mut Held<'_>) -> Result<()> {
    for (&ino, patch) in &batch.patches {
        for (run, is_whole) in patch.runs() {
            if is_whole {
                let mut content = |index, page: &mut [u8]| {
                    patch.apply(index, page);
                    Ok(())
                };
                held.write_home(ino, run, &mut content)?;
            }
        }
    }
    Ok(())
}

/// The steps, and what the data does to the attributes of its files. Answers the operations.
fn apply_names(
    plan: &Plan<'_>,
    works: &[FileWork<'_>],
    mapped: &[Mapped],
    metas: &mut MetaLocks<'_>,
    now: Timestamp,
) -> Result<Vec<Op>, BatchError> {
    let mut ops = Ops::default();
    for (recorded, step) in &plan.steps {
        plan::apply(step, metas, ops.next(), now).map_err(|error| recorded.failed(error))?;
    }
    for (work, mapped) in works.iter().zip(mapped) {
        let item = &mut metas.of(&work.inode).item;
        item.size = work.patch.logged_size_after(item.size, work.new_size);
        item.blocks = (item.blocks + mapped.added).saturating_sub(mapped.removed);
        if mapped.drops_inline {
            item.flags &= !INODE_INLINE;
            ops.next().delete(Key::inline(work.inode.number));
        }
    }
    for number in plan.concerned.keys() {
        if let Some(item) = metas.item_to_log(*number) {
            ops.next().put(Key::inode(*number), &item.encode());
        }
    }
    Ok(ops.finish())
}

/// Puts operations together into parts, each of which fits into a frame of `limit` blocks. The second answer says into which
/// part each has gone.
pub fn pack(ops: Vec<Op>, limit: u64) -> (Vec<Op>, Vec<u64>) {
    let limit = if mutation::active(Mutation::CutBatch) { 0 } else { limit };
    let mut parts: Vec<Op> = Vec::new();
    let mut part_of = Vec::with_capacity(ops.len());
    for op in ops {
        let joins =
            !op.is_empty() && parts.last().is_some_and(|last| last.blocks() + op.blocks() <= limit);
        match parts.last_mut() {
            Some(last) if joins || op.is_empty() => last.append(op),
            _ if op.is_empty() => {}
            _ => parts.push(op),
        }
        part_of.push((parts.len() as u64).saturating_sub(1));
    }
    (parts, part_of)
}

/// Blocks of the log that [`pack`] makes of `ops` at most.
fn packed_blocks(ops: &[Op], limit: u64) -> u64 {
    let mut packed = Packed::default();
    for op in ops {
        packed.add(op, limit);
    }
    packed.blocks()
}

/// Operations that are put together as they come, as [`pack`] does it.
#[derive(Default)]
pub struct Packed {
    /// Blocks of the parts that have ended.
    ended_blocks: u64,
    /// Bytes of records, and pages, of the last one.
    open: (usize, u64),
}

impl Packed {
    /// One more.
    pub fn add(&mut self, op: &Op, limit: u64) {
        let (bytes, pages) = (op.record_bytes(), op.payload_pages());
        let (open, added) = (self.open, OpRecords::blocks_for(bytes, pages));
        if open == (0, 0) || OpRecords::blocks_for(open.0, open.1) + added <= limit {
            self.open = (open.0 + bytes, open.1 + pages);
        } else {
            self.ended_blocks += self.open_blocks();
            self.open = (bytes, pages);
        }
    }

    fn open_blocks(&self) -> u64 {
        OpRecords::blocks_for(self.open.0, self.open.1) + 1
    }

    /// Blocks of the log, at most.
    pub fn blocks(&self) -> u64 {
        self.ended_blocks + self.open_blocks()
    }
}

/// Log space for the names and attributes.
fn names_blocks(plan: &Plan<'_>, limit: u64) -> u64 {
    let bytes = plan.record_bytes + plan.concerned.len() * ITEM_BYTES;
    let blocks = OpRecords::blocks_for(bytes, 0);
    blocks + blocks / limit.max(1) * 2 + 1
}

/// A first guess of the log space for all of it.
fn log_blocks(plan: &Plan<'_>, works: &[FileWork<'_>], held: &Held<'_>) -> u64 {
    let payload: u64 = works.iter().map(|work| work.logged.len() as u64).sum();
    let mapping: usize = held.homes().map(|home| mapping_bytes(1, home.run.blocks)).sum();
    let bytes = mapping + payload as usize * 64 + works.len() * 64;
    OpRecords::blocks_for(bytes, payload) + names_blocks(plan, u64::MAX) + 2
}

/// Of that what is known of a batch that touches `pages` before anything is looked up or written. It is never more.
fn least_log_blocks(pages: Pages, way: Way) -> u64 {
    let home = pages.surely_home(way);
    OpRecords::blocks_for(mapping_bytes(home.div_ceil(WRITE_PAGES), home), 0)
}

/// Log space for mapping `pages` to `homes` runs of new blocks.
fn mapping_bytes(homes: u64, pages: u64) -> usize {
    512 * homes as usize + 12 * pages as usize
}
