//! A piece that is in the log before the cache has it.
//!
//! 1. What the cache has of its pages that is not home goes home: it has the promise of a block, and the log does not hear of it later.
//! 2. The new contents are put together in page frames of their own, and logged as the payload of one operation, which is made durable.
//! 3. Only now they enter the cache, as pages that the log has for good, and go to where they live.
//!
//! So at no time is there a dirty page without a promise that could be written elsewhere, and whoever reads sees what was there until the
//! piece cannot be lost any more. The caller holds `ops` from the first step to the last: nobody else writes the file, cuts it, or
//! maps it anew, and its pages stay clean between the first and the third.
//!
//! **Invariant:** between the commit of the operation and the third step no page of the piece is dirty or under writeback, so what
//! the log has of it is the newest, and is owed as of that operation.

use crate::alloc::PAGES_PER_METADATA_BLOCK;
use crate::cache::map::RunFilter;
use crate::cache::page::{PageMut, PageRef};
use crate::device::IoClass;
use crate::engine::{Engine, Room};
use crate::error::Result;
use crate::file::extents;
use crate::file::fsync::{PAYLOAD_RECORD_BYTES, covered_size, home_of};
use crate::file::homes::run_of;
use crate::file::writeback::page_range;
use crate::format::item::InodeItem;
use crate::format::{BLOCK_BYTES, BLOCK_BYTES_U64, Key};
use crate::inode::{ATIME_UNSETTLED, Inode, Meta};
use crate::sync::Arc;
use crate::sync::atomic::Ordering;
use crate::txn::obligations::Changing;
use crate::txn::{Lsn, Op};
use std::ops::Range;

/// How the pages of a piece are mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mapping {
    /// All of them are written.
    Written,
    /// Some are to be written for the first time.
    FirstWrites,
    /// Some have no block, or the file lies in its inode.
    Elsewhere,
}

/// The tree can grow by so much: the same that is kept for promised pages.
struct Growth<'a> {
    engine: &'a Engine,
    blocks: u64,
}

impl Drop for Growth<'_> {
    fn drop(&mut self) {
        self.engine.alloc.release(self.blocks);
    }
}

/// What the attributes were before a piece was logged.
struct Before {
    item: InodeItem,
    is_dirty: bool,
    /// What they were with it.
    logged: InodeItem,
}

impl Before {
    /// The piece does not become durable, and nobody sees it: the volume is shut down. What others have changed since stands, with all else.
    fn restore(&self, inode: &Inode) {
        self.restore_in(&mut inode.meta.lock());
    }

    fn restore_in(&self, meta: &mut Meta) {
        if meta.item == self.logged {
            meta.item = self.item;
            meta.dirty = self.is_dirty;
        }
    }
}

impl Engine {
    /// Writes bytes of pages that all have blocks, within one operation's reach: durably, and without blocks. False: they do not, or
    /// the file has met errors, so that its blocks are not relied on; nothing was done. The caller holds `ops`, and no other lock.
    /// Waits for a flush and for what is written home.
    ///
    /// # Errors
    /// [`crate::Error::NoSpace`] if pages are written for the first time, and the tree has no room for that. Those of reading
    /// what stays of a page, and of the log, which shut the volume down. An error while the pages go home leaves them dirty: the next sync
    /// meets it, or was told of it.
    pub(super) fn overwrite(&self, inode: &Arc<Inode>, offset: u64, data: &[u8]) -> Result<bool> {
        let end = offset + data.len() as u64;
        let pages = page_range(offset, data.len() as u64);
        let count = pages.end - pages.start;
        let fits = count <= self.max_payload_pages() as u64;
        if !fits || !self.bring_older_home(inode, &pages) {
            return Ok(false);
        }
        let (underway, growth) = match self.mapping_of(inode, &pages)? {
            Mapping::Elsewhere => return Ok(false),
            Mapping::Written => (self.begin_piece(), None),
            Mapping::FirstWrites => {
                let blocks = count.div_ceil(PAGES_PER_METADATA_BLOCK);
                let underway = self.promise_piece(blocks)?;
                (underway, Some(Growth { engine: self, blocks }))
            }
        };
        let frames = self.overwritten_pages(inode, offset, data)?;
        let Some((lsn, before, changing)) = self.log_overwritten(inode, &pages, &frames, end)?
        else {
            return Ok(false);
        };
        self.counters.in_place_writes.add(1);
        self.commit_log(lsn).inspect_err(|_| before.restore(inode))?;
        self.cache_overwritten(inode, &pages, frames, (lsn, end));
        drop(changing);
        let (all, class) = (RunFilter::default(), IoClass::SyncWrite);
        if self.write_back(inode, pages.clone(), all, class).is_ok() {
            self.wait_writeback(inode, &pages);
        }
        drop((growth, underway));
        Ok(true)
    }

    /// How `pages` are mapped, which nobody changes while `ops` is held and they are clean.
    pub(super) fn mapping_of(&self, inode: &Inode, pages: &Range<u64>) -> Result<Mapping> {
        {
            let meta = inode.meta.lock();
            if meta.item.is_inline() || meta.item.blocks == 0 || meta.purged {
                return Ok(Mapping::Elsewhere);
            }
        }
        let mut mapped_to = pages.start;
        let mut mapping = Mapping::Written;
        for piece in extents::all_pieces(&self.store, inode, pages.start, pages.end)? {
            if piece.file_block > mapped_to {
                break;
            }
            if piece.unwritten {
                mapping = Mapping::FirstWrites;
            }
            mapped_to = piece.end();
        }
        Ok(if mapped_to >= pages.end { mapping } else { Mapping::Elsewhere })
    }

    /// Nothing of `pages` is dirty, or on its way home. False: that could not be had.
    fn bring_older_home(&self, inode: &Arc<Inode>, pages: &Range<u64>) -> bool {
        let is_trusted = || inode.write_error.lock().0 == 0;
        let is_home = || {
            let map = inode.pages.read();
            let is_clean = map.dirty_runs(pages.clone(), 1, RunFilter::default()).next().is_none();
            is_clean && map.first_writeback(pages.clone()).is_none()
        };
        if is_home() {
            return is_trusted();
        }
        let class = IoClass::SyncWrite;
        if self.write_back(inode, pages.clone(), RunFilter::default(), class).is_err() {
            return false;
        }
        self.wait_writeback(inode, pages);
        is_home() && is_trusted()
    }

    /// The pages as they will be: what they are, with `data` in it.
    fn overwritten_pages(
        &self,
        inode: &Arc<Inode>,
        offset: u64,
        mut data: &[u8],
    ) -> Result<Vec<PageRef>> {
        let pages = page_range(offset, data.len() as u64);
        let mut frames = Vec::with_capacity((pages.end - pages.start) as usize);
        for index in pages {
            let mut page: PageMut = self.page()?;
            let within = offset.saturating_sub(index * BLOCK_BYTES_U64) as usize;
            let (part, rest) = data.split_at(data.len().min(BLOCK_BYTES - within));
            let is_before_end = index * BLOCK_BYTES_U64 < inode.size();
            if part.len() < BLOCK_BYTES && is_before_end {
                self.copy_page_out(inode, index, &mut page)?;
            } else if part.len() < BLOCK_BYTES {
                page.fill(0);
            }
            page[within..within + part.len()].copy_from_slice(part);
            frames.push(page.freeze());
            data = rest;
        }
        Ok(frames)
    }

    /// One operation with the pages and the inode, of a file that will reach to byte `end` at least. None: the file is gone.
    fn log_overwritten(
        &self,
        inode: &Arc<Inode>,
        pages: &Range<u64>,
        frames: &[PageRef],
        end: u64,
    ) -> Result<Option<(Lsn, Before, Changing<'_>)>> {
        self.delay_for_log(frames.len() as u64 + 1);
        let admission = self.admit(PAYLOAD_RECORD_BYTES, frames.len(), Room::Normal)?;
        let _map = inode.lock_map()?;
        let (mapped, _) = self.look_up_mapping(inode, pages)?;
        inode.known_mapping.lock().forget();
        let homes: Vec<_> = mapped.iter().map(run_of).collect();
        let mut op = Op::new();
        for (index, page) in pages.clone().zip(frames) {
            op.payload(inode.number, index, home_of(&homes, index), page.clone());
        }
        let mut meta = inode.meta.lock();
        if meta.purged {
            return Ok(None);
        }
        let (item, is_dirty) = (meta.item, meta.dirty);
        meta.touch_data(self.now());
        // In memory it is as long as that once the pages are there.
        let size = inode.size().max(end);
        meta.item.size = meta.item.size.max(covered_size(size, pages));
        op.put(Key::inode(inode.number), &meta.item.encode());
        let before = Before { item, is_dirty, logged: meta.item };
        let changing = self.store.obligations.begin_change();
        let committed = self.store.commit(op, admission);
        let lsn = committed.inspect_err(|_| before.restore_in(&mut meta))?;
        let is_size_left = meta.item.size != size;
        meta.logged(lsn, true);
        meta.dirty |= is_size_left;
        Ok(Some((lsn, before, changing)))
    }

    /// The pages enter the cache as what operation `lsn` holds durably, of a file that reaches to byte `end` at least.
    fn cache_overwritten(
        &self,
        inode: &Arc<Inode>,
        pages: &Range<u64>,
        frames: Vec<PageRef>,
        (lsn, end): (Lsn, u64),
    ) {
        let count = frames.len() as u64;
        // Counted as if they had a promise, and before they are dirty: writeback may end at once, and gives one back for each.
        self.alloc.count_in_place(count);
        self.dirty_pages.fetch_add(count, Ordering::AcqRel);
        let mut newly_dirty = 0;
        // Given back when the map is unlocked.
        let mut replaced = Vec::with_capacity(frames.len());
        let mut map = inode.pages.write();
        for (index, page) in pages.clone().zip(frames) {
            let inserted = self.put_in(&mut map, inode, index, page);
            newly_dirty += u64::from(inserted.newly_dirty);
            replaced.extend(inserted.replaced);
            if let Some(older) = map.set_logged(index, lsn) {
                debug_assert!(false, "the page was clean: what the log had of it is home");
                self.store.obligations.release(older);
            }
        }
        if end > inode.size() {
            inode.size.store(end, Ordering::Release);
        }
        drop(map);
        self.pages_paid(count - newly_dirty);
        inode.atime_settled_until_s.store(ATIME_UNSETTLED, Ordering::Relaxed);
        self.dirty.add(inode);
    }
}
