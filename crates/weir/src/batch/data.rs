//! The data of a batch: the new content of its pages, in page frames that the log will carry, or written to new blocks.
//!
//! Whole pages of a batch too large for the log need nothing of the old content, so they are written before any lock is
//! taken. All others are put together with the old content under the file's `ops` lock, which keeps other writers out.

use super::Batch;
use super::patch::Patch;
use crate::alloc::{AllocKind, Run};
use crate::cache::page::{PageMut, PageRef};
use crate::device::IoClass;
use crate::device::buffer::AlignedBuf;
use crate::engine::Engine;
use crate::error::Result;
use crate::format::{BLOCK_BYTES, BLOCK_BYTES_U64, checksum};
use crate::inode::Inode;
use crate::sync::Arc;
use crate::sync::atomic::Ordering;
use std::collections::BTreeMap;
use std::ops::Range;

/// Most pages of a batch that travel in the log, whatever the log's size.
const MAX_PAYLOAD_PAGES: u64 = 512;
/// Most pages written home at a time, and so most of a [`Home`].
pub const WRITE_PAGES: u64 = 256;

/// Consecutive pages of a file that were written to new blocks.
pub struct Home {
    pub file_block: u64,
    pub run: Run,
    pub checksums: Vec<u32>,
}

impl Home {
    pub fn pages(&self) -> Range<u64> {
        self.file_block..self.file_block + self.run.blocks
    }
}

/// A page that travels in the log.
pub struct Logged {
    pub index: u64,
    pub page: PageRef,
}

/// What a batch holds until it is committed; given back if it is not.
pub struct Held<'a> {
    engine: &'a Engine,
    /// Blocks promised and not used.
    reserved: u64,
    /// Pages counted as dirty, each with a block promised.
    dirty: u64,
    /// By the inode that they are of.
    homes: BTreeMap<u64, Vec<Home>>,
    /// Where the last one ends.
    homes_end: Option<u64>,
}

/// Which pages of a batch travel in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// All of them.
    Log,
    /// Those that keep a part of the old content.
    LogPartial,
    /// None.
    Home,
}

impl Way {
    /// How the data of a batch that touches `pages` travels.
    pub fn of(engine: &Engine, pages: Pages) -> Self {
        let limit = engine.max_batch_payload_pages();
        if pages.all <= limit {
            Self::Log
        } else if pages.partial <= limit {
            Self::LogPartial
        } else {
            Self::Home
        }
    }
}

impl Engine {
    /// How many pages of a batch may travel in the log.
    pub fn max_batch_payload_pages(&self) -> u64 {
        let ring = self.log.fill().ring_blocks / 8;
        MAX_PAYLOAD_PAGES.min(ring).min(self.pool.capacity_pages() as u64 / 8)
    }
}

/// How many pages a batch touches.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pages {
    all: u64,
    /// Of which it keeps a part of the old content.
    partial: u64,
}

impl Pages {
    /// Those of `batch`.
    pub fn of(batch: &Batch) -> Self {
        let mut pages = Self::default();
        for patch in batch.patches.values() {
            for (run, whole) in patch.runs() {
                pages.all += run.end - run.start;
                pages.partial += if whole { 0 } else { run.end - run.start };
            }
            pages.all += u64::from(patch.cuts_within_a_page());
            pages.partial += u64::from(patch.cuts_within_a_page());
        }
        pages
    }

    /// How many are written home, whatever else is.
    pub fn surely_home(self, way: Way) -> u64 {
        if way == Way::Log { 0 } else { self.all - self.partial }
    }

    /// How many of them travel in the log.
    pub fn logged(self, way: Way) -> u64 {
        match way {
            Way::Log => self.all,
            Way::LogPartial => self.partial,
            Way::Home => 0,
        }
    }
}

impl<'a> Held<'a> {
    /// Promises the blocks that a batch needs which touches `pages`.
    pub fn for_pages(engine: &'a Engine, pages: Pages) -> Result<Self> {
        if pages.all > 0 {
            engine.reserve(pages.all)?;
        }
        let (homes, homes_end) = (BTreeMap::new(), None);
        Ok(Self { engine, reserved: pages.all, dirty: 0, homes, homes_end })
    }

    /// What was written to new blocks of inode `ino`.
    pub fn homes_of(&self, ino: u64) -> &[Home] {
        self.homes.get(&ino).map_or(&[], Vec::as_slice)
    }

    /// The same of all of them.
    pub fn homes(&self) -> impl Iterator<Item = &Home> {
        self.homes.values().flatten()
    }

    /// Writes pages `range` of inode `ino` to new blocks; `content` fills each.
    pub fn write_home(
        &mut self,
        ino: u64,
        range: Range<u64>,
        content: &mut dyn FnMut(u64, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let mut from = range.start;
        while from < range.end {
            let pages = (range.end - from).min(WRITE_PAGES);
            let mut buffer = AlignedBuf::zeroed(pages as usize * BLOCK_BYTES);
            for (index, page) in (from..).zip(buffer.chunks_exact_mut(BLOCK_BYTES)) {
                content(index, page)?;
            }
            let mut done = 0;
            while done < pages {
                let hint = self.homes_end;
                let run = self.engine.alloc.allocate(pages - done, 1, hint, AllocKind::Data)?;
                let bytes =
                    &buffer[done as usize * BLOCK_BYTES..][..run.blocks as usize * BLOCK_BYTES];
                let place = run.start * BLOCK_BYTES_U64;
                let written = self.engine.device.write(place, &[bytes], IoClass::SyncWrite, false);
                if let Err(error) = written {
                    let error = error.into();
                    self.engine.give_back(run, &error);
                    return Err(error);
                }
                let checksums = bytes.chunks_exact(BLOCK_BYTES).map(checksum).collect();
                let home = Home { file_block: from + done, run, checksums };
                self.homes_end = Some(run.end());
                self.homes.entry(ino).or_default().push(home);
                let paid = run.blocks.min(self.reserved);
                self.reserved -= paid;
                self.engine.alloc.release(paid);
                done += run.blocks;
            }
            from += pages;
        }
        self.engine.log.note_data_written();
        Ok(())
    }

    /// `pages` of the promised blocks are those of pages that become dirty.
    pub fn charge_dirty(&mut self, pages: u64) {
        debug_assert!(self.reserved >= pages);
        self.reserved = self.reserved.saturating_sub(pages);
        self.dirty += pages;
        // Counted before they are: writeback may end before the commit has.
        self.engine.dirty_pages.fetch_add(pages, Ordering::AcqRel);
    }

    /// The batch is committed, and `newly_dirty` pages became dirty.
    pub fn committed(mut self, newly_dirty: u64) {
        self.homes.clear();
        self.dirty = self.dirty.saturating_sub(newly_dirty);
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        for home in self.homes() {
            self.engine.alloc.cancel(home.run);
        }
        self.engine.pages_paid(self.dirty);
        if self.reserved > 0 {
            self.engine.alloc.release(self.reserved);
        }
    }
}

/// The old content of a file, as a batch finds it. The caller holds `ops`.
pub struct Old<'a> {
    pub engine: &'a Engine,
    pub inode: &'a Arc<Inode>,
    /// Nothing is left from here on.
    pub end: u64,
}

impl Old<'_> {
    /// Fills `page`, which is zeroed, with what page `index` keeps and what `patch` puts into it.
    pub fn fill(&self, patch: &Patch, index: u64, page: &mut [u8]) -> Result<()> {
        let start = index * BLOCK_BYTES_U64;
        if start < self.end {
            self.engine.copy_page_out(self.inode, index, page)?;
            let kept = (self.end - start).min(BLOCK_BYTES_U64) as usize;
            page[kept..].fill(0);
        }
        patch.apply(index, page);
        Ok(())
    }

    /// The page as a page frame.
    pub fn page(&self, patch: &Patch, index: u64) -> Result<Logged> {
        let mut page: PageMut = self.engine.page()?;
        page.fill(0);
        self.fill(patch, index, &mut page)?;
        Ok(Logged { index, page: page.freeze() })
    }
}
