//! Reading: from the cache under one shared lock; what is missing is read from the device into the cache.
//!
//! A page that is being read holds a token in the page map. Whoever writes, cuts or removes the page meanwhile voids the
//! token, and what was read is dropped: so neither the mapping nor the blocks need a lock while
//! the device works. A checksum mismatch counts only if the token is still good.

use super::extents;
use crate::cache::map::ReadPlan;
use crate::cache::page::{PageMut, PageRef};
use crate::device::{Buffers, DeviceResult, IoClass, Operation, Request};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::format::{BLOCK_BYTES, BLOCK_BYTES_U64, Key, checksum};
use crate::inode::Inode;
use crate::reclaim::Shortage;
use crate::sync::{Arc, Condvar, Mutex, OnPanic};
use crate::types::BackgroundMode;
use std::ops::Range;

/// Most pages that one miss reads.
const MISS_PAGES: u64 = 256;
/// Most pages of one read-ahead request to the device.
const READ_AHEAD_REQUEST_PAGES: usize = 128;

/// Consecutive pages to be read from consecutive blocks.
struct Source {
    first: u64,
    block: u64,
    pages: Vec<PageMut>,
    checksums: Vec<u32>,
}

/// What a range being read is made of.
#[derive(Default)]
struct Plan {
    from_device: Vec<Source>,
    ready: Vec<(u64, PageMut)>,
    /// The page that the plan goes up to: less than was asked for if memory is short.
    reached: u64,
}

/// What a plan does when there is no memory for its first page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NoMemory {
    Wait,
    GiveUp,
}

impl Engine {
    /// Reads up to `buffer.len()` bytes from `offset` on; less only at the end of the file.
    pub fn read(&self, inode: &Arc<Inode>, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        let Cached { mut copied, mut readable } = copy_cached(inode, offset, buffer);
        if copied == readable {
            self.counters.cache_hits.add(1);
            return Ok(copied);
        }
        self.counters.cache_misses.add(1);
        while copied < readable {
            let at = offset + copied as u64;
            let first = at / BLOCK_BYTES_U64;
            let last = (offset + readable as u64).div_ceil(BLOCK_BYTES_U64);
            self.fill(inode, first..last.min(first + self.miss_pages()), IoClass::SyncRead)?;
            let more = copy_cached(inode, at, &mut buffer[copied..]);
            // The file may have got longer or shorter meanwhile.
            readable = copied + more.readable;
            copied += more.copied;
        }
        Ok(copied)
    }

    /// As [`Engine::read`], from the cache only: [`Error::WouldBlock`] if anything is missing.
    pub fn read_nowait(&self, inode: &Inode, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        let Cached { copied, readable } = copy_cached(inode, offset, buffer);
        if copied == readable {
            self.counters.cache_hits.add(1);
            return Ok(copied);
        }
        self.counters.cache_misses.add(1);
        Err(Error::WouldBlock)
    }

    /// Fills `page` with what page `index` holds, read from the device if need be.
    pub fn copy_page_out(&self, inode: &Arc<Inode>, index: u64, page: &mut [u8]) -> Result<()> {
        let mut shortage = Shortage::default();
        let mut was_filled = false;
        loop {
            if let Some(cached) = inode.pages.read().peek(index) {
                page.copy_from_slice(cached);
                return Ok(());
            }
            self.fill(inode, index..index + 1, IoClass::SyncRead)?;
            if inode.pages.read().peek(index).is_none() {
                // It was evicted again, or there was no memory for it.
                if was_filled {
                    self.make_room(&mut shortage)?;
                }
                was_filled = true;
            }
        }
    }

    fn miss_pages(&self) -> u64 {
        MISS_PAGES.min(self.pool.capacity_pages() as u64 / 8).max(1)
    }

    /// Makes the first pages of `range` present, or finds them being read by somebody and waits. Some may be gone
    /// again when this returns, if memory is short.
    pub fn fill(&self, inode: &Arc<Inode>, range: Range<u64>, class: IoClass) -> Result<()> {
        let moment = inode.io_moment();
        let first = range.start;
        let plan = inode.pages.write().begin_read(range);
        if plan.runs.is_empty() {
            // Nothing was absent: the page may be on its way through another reader.
            let reading = inode.pages.read().is_reading(first);
            if reading {
                inode.wait_io(moment);
            }
            return Ok(());
        }
        let gives_up = give_up_on_panic(inode, &plan);
        let result = self.read_runs(inode, &plan, class);
        drop(gives_up);
        if result != Ok(true) {
            abort(inode, &plan);
        }
        inode.io_ended();
        // A mismatch of a page that was changed meanwhile is no error: the caller looks again.
        match result {
            Err(Error::Corrupt(text)) if text == STALE => Ok(()),
            other => other.map(|_| ()),
        }
    }

    /// True if all of the plan was read; false if memory was short for the rest.
    fn read_runs(&self, inode: &Arc<Inode>, plan: &ReadPlan, class: IoClass) -> Result<bool> {
        for run in &plan.runs {
            let sources = self.plan_run(inode, run.clone(), NoMemory::Wait)?;
            for (index, page) in sources.ready {
                self.finish(inode, index, plan.token, page.freeze());
            }
            for mut source in sources.from_device {
                let mut slices: Vec<&mut [u8]> =
                    source.pages.iter_mut().map(|page| &mut page[..]).collect();
                let began_ns = self.clock.monotonic_ns();
                self.device.read(source.block * BLOCK_BYTES_U64, &mut slices, class)?;
                self.note_foreground_read(began_ns);
                self.finish_source(inode, plan.token, source)?;
            }
            if sources.reached < run.end {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Finds out where the pages of `run` come from, and gets memory for them. Memory is waited for only while the plan
    /// holds none: many readers that hold some and wait for more would wait for each other.
    fn plan_run(&self, inode: &Inode, run: Range<u64>, no_memory: NoMemory) -> Result<Plan> {
        let mut plan = Plan { reached: run.start, ..Plan::default() };
        if run.start == 0 && inode.meta.lock().item.is_inline() {
            let Some(page) = self.plan_page(true, no_memory)? else { return Ok(plan) };
            plan.ready.push((0, self.inline_page(inode, page)?));
            plan.reached = 1;
        }
        for piece in extents::all_pieces(&self.store, inode, plan.reached, run.end)? {
            let zeros_to = if piece.unwritten { piece.end() } else { piece.file_block };
            if !self.plan_zeros(&mut plan, (run.start, zeros_to), no_memory)? {
                return Ok(plan);
            }
            if piece.unwritten {
                continue;
            }
            let mut source = Source {
                first: piece.file_block,
                block: piece.block,
                pages: Vec::with_capacity(piece.blocks as usize),
                checksums: Vec::with_capacity(piece.blocks as usize),
            };
            while plan.reached < piece.end() {
                let page = self.plan_page(plan.reached == run.start, no_memory)?;
                let Some(page) = page else { break };
                source.pages.push(page);
                source.checksums.push(piece.checksum(plan.reached - piece.file_block).unwrap_or(0));
                plan.reached += 1;
            }
            if !source.pages.is_empty() {
                plan.from_device.push(source);
            }
            if plan.reached < piece.end() {
                return Ok(plan);
            }
        }
        self.plan_zeros(&mut plan, (run.start, run.end), no_memory)?;
        Ok(plan)
    }

    /// Plans pages of zeros up to `end`. False: no memory.
    fn plan_zeros(
        &self,
        plan: &mut Plan,
        (start, end): (u64, u64),
        no_memory: NoMemory,
    ) -> Result<bool> {
        while plan.reached < end {
            let page = self.plan_page(plan.reached == start, no_memory)?;
            let Some(mut page) = page else { return Ok(false) };
            page.fill(0);
            plan.ready.push((plan.reached, page));
            plan.reached += 1;
        }
        Ok(true)
    }

    /// Memory for one more page of a plan; waits for it only for the first.
    fn plan_page(&self, is_first: bool, no_memory: NoMemory) -> Result<Option<PageMut>> {
        if let Some(page) = self.pool.alloc_for_overwrite() {
            return Ok(Some(page));
        }
        if is_first && no_memory == NoMemory::Wait {
            return self.page().map(Some);
        }
        self.evict(crate::reclaim::BATCH_PAGES);
        Ok(self.pool.alloc_for_overwrite())
    }

    /// Page 0 of a file whose data is in its inline item.
    fn inline_page(&self, inode: &Inode, mut page: PageMut) -> Result<PageMut> {
        page.fill(0);
        if let Some(data) = self.store.get(Key::inline(inode.number))? {
            let length = data.len().min(BLOCK_BYTES);
            page[..length].copy_from_slice(&data[..length]);
        }
        Ok(page)
    }

    /// Verifies what was read and puts it into the cache.
    fn finish_source(&self, inode: &Arc<Inode>, token: u64, source: Source) -> Result<()> {
        for (place, (page, expected)) in source.pages.into_iter().zip(source.checksums).enumerate()
        {
            let index = source.first + place as u64;
            if checksum(&page) != expected {
                if !inode.pages.write().abort_read(index, token) {
                    return Err(Error::Corrupt(STALE.into()));
                }
                self.counters.checksum_errors.add(1);
                let block = source.block + place as u64;
                return Err(Error::Corrupt(format!(
                    "inode {} page {index}: block {block} does not match its checksum",
                    inode.number
                )));
            }
            self.finish(inode, index, token, page.freeze());
        }
        Ok(())
    }

    fn finish(&self, inode: &Arc<Inode>, index: u64, token: u64, page: PageRef) {
        let inserted = inode.pages.write().finish_read(index, token, page);
        if let Ok(inserted) = inserted
            && inserted.new_chunk
        {
            self.note_resident(inode.number, index);
        }
    }

    /// Starts reading the absent pages of `range` without waiting for them. Errors are left to the read that
    /// needs the page.
    pub fn read_ahead(self: &Arc<Self>, inode: &Arc<Inode>, range: Range<u64>) {
        if self.options.background == BackgroundMode::Manual {
            return;
        }
        let end = range.end.min(inode.size().div_ceil(BLOCK_BYTES_U64));
        let room = self.pool.capacity_pages() as u64 / 8;
        if range.start >= end || end - range.start > room {
            return;
        }
        let plan = inode.pages.write().begin_read(range.start..end);
        let _gives_up = give_up_on_panic(inode, &plan);
        for run in &plan.runs {
            let sources = self.plan_run(inode, run.clone(), NoMemory::GiveUp);
            let reached = sources.as_ref().map_or(run.start, |sources| sources.reached);
            if reached < run.end {
                let rest = reached..run.end;
                let runs = std::iter::once(rest).collect();
                abort(inode, &ReadPlan { token: plan.token, runs });
            }
            let Ok(sources) = sources else { continue };
            for (index, page) in sources.ready {
                self.finish(inode, index, plan.token, page.freeze());
            }
            for source in sources.from_device {
                self.submit_source(inode, plan.token, source);
            }
        }
        if !plan.runs.is_empty() {
            inode.io_ended();
        }
    }

    /// Hands one source to the device, in requests of moderate size.
    fn submit_source(self: &Arc<Self>, inode: &Arc<Inode>, token: u64, mut source: Source) {
        while !source.pages.is_empty() {
            let count = source.pages.len().min(READ_AHEAD_REQUEST_PAGES);
            let rest = source.pages.split_off(count);
            let checksums = source.checksums.split_off(count);
            let pages = std::mem::replace(&mut source.pages, rest);
            let checksums = std::mem::replace(&mut source.checksums, checksums);
            let (first, block) = (source.first, source.block);
            source.first += count as u64;
            source.block += count as u64;
            let request = Request {
                operation: Operation::Read,
                offset_bytes: block * BLOCK_BYTES_U64,
                buffers: Buffers::Fill(pages),
                class: IoClass::ReadAhead,
            };
            let ahead = Ahead {
                engine: self.clone(),
                inode: inode.clone(),
                token,
                first,
                block,
                checksums,
                _underway: self.reads_ahead.begin(),
            };
            self.device.submit(request, Box::new(|result, buffers| ahead.ended(result, buffers)));
        }
    }
}

/// Requests of read-ahead that are under way. Nobody waits for them but whoever ends the volume: they hold the engine, and the device with it.
#[derive(Default)]
pub struct ReadsAhead {
    underway: Mutex<u64>,
    ended: Condvar,
}

impl ReadsAhead {
    fn begin(self: &Arc<Self>) -> UnderwayAhead {
        *self.underway.lock() += 1;
        UnderwayAhead(self.clone())
    }

    /// Waits until none is under way.
    pub fn wait(&self) {
        let mut underway = self.underway.lock();
        while *underway > 0 {
            self.ended.wait(&mut underway);
        }
    }
}

/// One of them.
struct UnderwayAhead(Arc<ReadsAhead>);

impl Drop for UnderwayAhead {
    fn drop(&mut self) {
        let mut underway = self.0.underway.lock();
        *underway -= 1;
        if *underway == 0 {
            self.0.ended.notify_all();
        }
    }
}

/// A request of read-ahead. Ends after it has let go of all else: the fields are dropped in their order.
struct Ahead {
    engine: Arc<Engine>,
    inode: Arc<Inode>,
    token: u64,
    first: u64,
    block: u64,
    checksums: Vec<u32>,
    _underway: UnderwayAhead,
}

impl Ahead {
    /// What the device calls.
    fn ended(mut self, result: DeviceResult<()>, buffers: Buffers) {
        let (token, first, block) = (self.token, self.first, self.block);
        let checksums = std::mem::take(&mut self.checksums);
        let run = first..first + checksums.len() as u64;
        let plan = ReadPlan { token, runs: std::iter::once(run).collect() };
        let _gives_up = give_up_on_panic(&self.inode, &plan);
        let ended = match (result, buffers) {
            (Ok(()), Buffers::Fill(pages)) => {
                let source = Source { first, block, pages, checksums };
                self.engine.finish_source(&self.inode, token, source)
            }
            _ => Err(Error::WouldBlock),
        };
        if ended.is_err() {
            abort(&self.inode, &plan);
        }
        self.inode.io_ended();
    }
}

/// Text of the error that a read answers when its page was changed under it.
const STALE: &str = "changed while it was being read";

/// How far a read came without the device.
struct Cached {
    copied: usize,
    /// How many of the bytes wanted the file has.
    readable: usize,
}

/// Copies from the cache until a page is missing. What is copied, and the end of the file with it, is of one moment: a cut zeroes the rest of
/// its last page and sets the size under the same lock.
fn copy_cached(inode: &Inode, offset: u64, buffer: &mut [u8]) -> Cached {
    let pages = inode.pages.read();
    let readable = inode.size().saturating_sub(offset).min(buffer.len() as u64) as usize;
    let mut copied = 0;
    while copied < readable {
        let at = offset + copied as u64;
        let within = (at % BLOCK_BYTES_U64) as usize;
        let Some(page) = pages.get(at / BLOCK_BYTES_U64) else { break };
        let count = (BLOCK_BYTES - within).min(readable - copied);
        buffer[copied..copied + count].copy_from_slice(&page[within..within + count]);
        copied += count;
    }
    Cached { copied, readable }
}

/// Nobody waits for pages that a thread was to read that panics.
fn give_up_on_panic(inode: &Inode, plan: &ReadPlan) -> OnPanic<impl Fn()> {
    OnPanic::new(move || {
        abort(inode, plan);
        inode.io_ended();
    })
}

/// Gives up the pages of `plan` that are still being read.
fn abort(inode: &Inode, plan: &ReadPlan) {
    let mut pages = inode.pages.write();
    for index in plan.runs.iter().cloned().flatten() {
        pages.abort_read(index, plan.token);
    }
}
