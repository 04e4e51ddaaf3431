//! Buffered writes: bytes go into the cache, blocks are chosen at writeback (delayed allocation).
//!
//! Every page that becomes dirty has a block reserved, so writeback and fsync cannot fail for
//! space. A writer waits at the entry only: for the throttle, for space, and for the old content of a page
//! that it overwrites in part. On a full volume what has a block is overwritten there (`in_place.rs`).
//!
//! Many whole pages are copied into page frames before the page map is locked ([`Engine::fill_ahead`]), and the lock is held for as long
//! as it takes to put the frames into the map. A writer that copied under the lock would have it nearly all the time, and whoever
//! writes pages of this file back, or reads it, would get it by chance.
//!
//! **Invariant (untorn):** whole pages within one aligned unit of [`UNTORN_PAGES`] that are written by one call get into the
//! page map under one hold of its lock: memory for all of them is had before the first is changed.

use super::in_place::Charge;
use super::truncate::TimesBefore;
use crate::cache::map::{Inserted, OldContents, PageMap, UNTORN_PAGES, WriteRefused};
use crate::cache::page::{Growth, PageMut, PageRef};
use crate::device::IoClass;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::format::{BLOCK_BYTES, BLOCK_BYTES_U64, MAX_FILE_BYTES};
use crate::inode::{ATIME_UNSETTLED, Inode};
use crate::mutation::{self, Mutation};
use crate::prefetch::overwrite_far;
use crate::reclaim::{BATCH_PAGES, Shortage};
use crate::sync::Arc;
use crate::sync::atomic::Ordering;
use std::ops::Range;

/// Most pages written under one hold of the page map's lock: readers of the file wait this long.
const CHUNK_PAGES: u64 = 64;
/// So many whole pages are copied before the map is locked.
const AHEAD_PAGES: u64 = 8;

/// What stopped a chunk.
enum Stop {
    /// This page's old content is needed.
    Fill(u64),
    /// No page frame was free.
    NoMemory,
}

/// What a write of several chunks goes by, and what ended it.
#[derive(Default)]
struct Course {
    /// Pages that the caller has reserved, from which the chunks take theirs.
    promised: Option<u64>,
    /// How often it has moved the file's times.
    times_moved: u64,
    /// Why less than all was written.
    ended_by: Option<Error>,
}

/// Page frames for what is about to be overwritten.
struct Frames {
    /// New contents of the pages that the write begins with, in their order.
    filled: std::vec::IntoIter<PageMut>,
    ready: Vec<PageMut>,
    /// The pages before this one are provided for.
    reach: u64,
    /// Whether the cache may take memory that it does not have yet.
    growth: Growth,
}

impl Engine {
    /// Writes `data` at `offset`. Less than all is written only if an error struck in between.
    pub fn write(&self, inode: &Arc<Inode>, offset: u64, data: &[u8]) -> Result<usize> {
        let _ops = inode.ops.lock();
        self.end_cut(inode)?;
        // As much as there is room for before the largest size.
        let room = MAX_FILE_BYTES.saturating_sub(offset).min(data.len() as u64) as usize;
        let fits = if room > 0 { &data[..room] } else { data };
        let is_short = mutation::active(Mutation::WriteShort) && fits.len() > 9000;
        let fits = if is_short { &fits[..9000] } else { fits };
        self.write_locked(inode, offset, fits, &mut Course::default())
    }

    /// Writes `data` at the end of the file, in one piece; answers where that was. All or nothing: the answer
    /// has no room for a part, so space for all of it is reserved first.
    pub fn append(&self, inode: &Arc<Inode>, data: &[u8]) -> Result<u64> {
        let _ops = inode.ops.lock();
        self.check_writable()?;
        self.end_cut(inode)?;
        let offset = inode.size();
        let length = data.len() as u64;
        let pages = self.charged_pages(offset, length)?;
        let is_promised = self.charge_append(inode, offset..offset + length, pages)?;
        let promised = is_promised.then_some(pages);
        inode.set_appending_from(offset);
        let result = self.append_locked(inode, offset, data, promised);
        inode.set_appending_from(u64::MAX);
        result
    }

    /// As [`Engine::append`], at `offset`, the end of the file. The caller holds `ops`, and has promised the pages or none.
    fn append_locked(
        &self,
        inode: &Arc<Inode>,
        offset: u64,
        data: &[u8],
        promised: Option<u64>,
    ) -> Result<u64> {
        let times = TimesBefore::of(inode);
        let mut course = Course { promised, ..Course::default() };
        let result = self.write_locked(inode, offset, data, &mut course);
        self.alloc.release(course.promised.unwrap_or(0));
        if matches!(result, Ok(written) if written == data.len()) {
            return Ok(offset);
        }
        if inode.size() > offset {
            // A part was written, and is taken back with the times that the file had.
            self.take_back(inode, offset, times.moved(course.times_moved))?;
        }
        Err(result.err().or(course.ended_by).unwrap_or(Error::NoSpace))
    }

    /// Pages that a write is charged for, chunk by chunk.
    fn charged_pages(&self, offset: u64, length: u64) -> Result<u64> {
        let end = end_of(offset, length)?;
        let mut pages = 0;
        let mut at = offset;
        while at < end {
            let chunk_end = self.chunk_end(at, end);
            pages += pages_of(at, chunk_end);
            at = chunk_end;
        }
        Ok(pages)
    }

    fn chunk_end(&self, at: u64, end: u64) -> u64 {
        ((at / BLOCK_BYTES_U64 + self.chunk_pages()) * BLOCK_BYTES_U64).min(end)
    }

    /// As [`Engine::write`]; the caller holds `ops`.
    fn write_locked(
        &self,
        inode: &Arc<Inode>,
        offset: u64,
        data: &[u8],
        course: &mut Course,
    ) -> Result<usize> {
        self.check_writable()?;
        let end = end_of(offset, data.len() as u64)?;
        let mut done = 0;
        while done < data.len() {
            let at = offset + done as u64;
            let chunk_end = self.chunk_end(at, end);
            let chunk = &data[done..done + (chunk_end - at) as usize];
            match self.write_chunk(inode, at, chunk, course) {
                Ok(count) => done += count,
                Err(error) if done == 0 => return Err(error),
                Err(error) => {
                    course.ended_by = Some(error);
                    return Ok(done);
                }
            }
            if course.promised.is_some() && done as u64 != chunk_end - offset {
                // An error struck: what is left of the chunk was promised once.
                return Ok(done);
            }
        }
        Ok(done)
    }

    /// Largest write within an aligned unit that is never torn: see [`crate::Capabilities`].
    pub fn untorn_pages(&self) -> u64 {
        let most = self.chunk_pages().min(self.max_piece_pages()).min(UNTORN_PAGES);
        1 << most.ilog2()
    }

    fn chunk_pages(&self) -> u64 {
        CHUNK_PAGES.min(self.pool.capacity_pages() as u64 / 8).max(1)
    }

    /// Writes what is locked at once. Less than all only if an error struck in between, or if the volume is full and what comes next goes
    /// by itself. At least a byte.
    fn write_chunk(
        &self,
        inode: &Arc<Inode>,
        offset: u64,
        mut data: &[u8],
        course: &mut Course,
    ) -> Result<usize> {
        self.throttle(data.len() as u64)?;
        let mut pages = pages_of(offset, offset + data.len() as u64);
        let first = offset / BLOCK_BYTES_U64;
        let charge = match &mut course.promised {
            Some(left) => {
                *left -= pages;
                Charge::Blocks
            }
            None => self.charge_write(inode, offset, data)?,
        };
        match charge {
            Charge::Blocks => {}
            Charge::InPlace { pages: count, .. } => {
                pages = count;
                let fits = (first + count) * BLOCK_BYTES_U64 - offset;
                data = &data[..data.len().min(fits as usize)];
            }
            Charge::Written { bytes } => {
                course.times_moved += 1;
                return Ok(bytes);
            }
        }
        // Counted as if all became dirty: writeback may end before this write has.
        self.dirty_pages.fetch_add(pages, Ordering::AcqRel);
        let mut newly_dirty = 0;
        let mut done = 0;
        let mut shortage = Shortage::default();
        let mut growth = Growth::IfCheap;
        let mut pauses = 0;
        let result = loop {
            let left = (offset + done as u64, &data[done..]);
            let stopped = match self.fill_ahead(inode, left, growth) {
                Ok(frames) => {
                    self.copy_in(inode, (offset, data), frames, &mut done, &mut newly_dirty)
                }
                Err(stop) => Some(stop),
            };
            let relieved = match stopped {
                None => break Ok(()),
                Some(Stop::Fill(index)) => self.fill(inode, index..index + 1, IoClass::SyncRead),
                Some(Stop::NoMemory) if growth == Growth::IfCheap => {
                    if self.evict(BATCH_PAGES) == 0 && !self.await_clean_page(&mut pauses) {
                        growth = Growth::Allowed;
                    }
                    Ok(())
                }
                Some(Stop::NoMemory) => self.make_room(&mut shortage),
            };
            if let Err(error) = relieved {
                break Err(error);
            }
        };
        self.pages_paid(pages - newly_dirty);
        if done > 0 {
            let now = self.now();
            {
                let mut meta = inode.meta.lock();
                let before = meta.item.ctime;
                meta.touch_data(now);
                course.times_moved += 1;
                if mutation::active(Mutation::ForgetChangeTime) {
                    meta.item.ctime = before;
                }
            }
            inode.atime_settled_until_s.store(ATIME_UNSETTLED, Ordering::Relaxed);
            self.dirty.add(inode);
            if matches!(charge, Charge::InPlace { .. }) {
                self.settle_in_place(inode, offset..offset + done as u64);
            }
        }
        match result {
            Err(error) if done == 0 => Err(error),
            Err(error) => {
                course.ended_by = Some(error);
                Ok(done)
            }
            Ok(()) => Ok(done),
        }
    }

    /// Copies the whole pages that `data` begins with into page frames, without the lock of the page map. Nothing where there are few, or
    /// where memory is short and some of these pages are cached: they can be overwritten in place. Nobody else writes meanwhile, since the caller
    /// holds `ops`.
    fn fill_ahead(
        &self,
        inode: &Inode,
        (offset, data): (u64, &[u8]),
        growth: Growth,
    ) -> std::result::Result<Frames, Stop> {
        let mut frames =
            Frames { filled: Vec::new().into_iter(), ready: Vec::new(), reach: 0, growth };
        let (first, count) = (offset / BLOCK_BYTES_U64, data.len() / BLOCK_BYTES);
        let pages = first..first + count as u64;
        let is_whole = offset.is_multiple_of(BLOCK_BYTES_U64) && count as u64 >= AHEAD_PAGES;
        if !is_whole {
            return Ok(frames);
        }
        let mut filled = Vec::with_capacity(count);
        if self.pool.alloc_batch_for_overwrite(count, growth, &mut filled) < count {
            // What is there can be overwritten in place.
            let needs_all = inode.pages.read().is_absent(pages);
            return if needs_all { Err(Stop::NoMemory) } else { Ok(frames) };
        }
        for (page, part) in filled.iter_mut().zip(data.chunks_exact(BLOCK_BYTES)) {
            overwrite_far(page, part);
        }
        (frames.reach, frames.filled) = (pages.end, filled.into_iter());
        Ok(frames)
    }

    /// Copies into the cache until all is in or something stops it. Newly dirty pages are counted before anybody can write
    /// them back.
    fn copy_in(
        &self,
        inode: &Inode,
        (offset, data): (u64, &[u8]),
        mut frames: Frames,
        done: &mut usize,
        newly_dirty: &mut u64,
    ) -> Option<Stop> {
        // Given back when the map is unlocked.
        let mut replaced = Vec::new();
        let mut pages = inode.pages.write();
        let size = inode.size();
        let mut stop = None;
        while *done < data.len() {
            let at = offset + *done as u64;
            let (index, within) = (at / BLOCK_BYTES_U64, (at % BLOCK_BYTES_U64) as usize);
            let count = (BLOCK_BYTES - within).min(data.len() - *done);
            let part = &data[*done..*done + count];
            if let Some(filled) = frames.filled.next() {
                debug_assert!(part.len() == BLOCK_BYTES && index < frames.reach);
                let inserted = self.put_in(&mut pages, inode, index, filled.freeze());
                replaced.extend(inserted.replaced);
                *newly_dirty += u64::from(inserted.newly_dirty);
                *done += count;
                continue;
            }
            if within == 0 {
                let whole_pages = (data.len() - *done) as u64 / BLOCK_BYTES_U64;
                if !self.get_frames(&mut pages, index..index + whole_pages, &mut frames) {
                    stop = Some(Stop::NoMemory);
                    break;
                }
            }
            let place = (index, within);
            match self.copy_page(&mut pages, inode, place, part, size, &mut frames) {
                Ok(became_dirty) => *newly_dirty += u64::from(became_dirty),
                Err(reason) => {
                    stop = Some(reason);
                    break;
                }
            }
            *done += count;
        }
        let end = offset + *done as u64;
        if *done > 0 && end > size {
            inode.size.store(end, Ordering::Release);
        }
        stop
    }

    /// Memory for the pages of `whole` that lie in one unit, unless it was got before. False: there is not enough.
    fn get_frames(&self, pages: &mut PageMap, whole: Range<u64>, frames: &mut Frames) -> bool {
        if whole.start < frames.reach || whole.end <= whole.start + 1 {
            return true;
        }
        let unit_end = (whole.start / UNTORN_PAGES + 1) * UNTORN_PAGES;
        frames.reach = whole.end.min(unit_end);
        let needed = pages.frames_to_overwrite(whole.start..frames.reach);
        let missing = needed.saturating_sub(frames.ready.len());
        self.pool.alloc_batch_for_overwrite(missing, frames.growth, &mut frames.ready);
        // What is taken first comes last.
        frames.ready.reverse();
        frames.ready.len() >= needed
    }

    /// Copies `part` into one page; true if the page was not dirty before.
    fn copy_page(
        &self,
        pages: &mut PageMap,
        inode: &Inode,
        (index, within): (u64, usize),
        part: &[u8],
        size: u64,
        frames: &mut Frames,
    ) -> std::result::Result<bool, Stop> {
        let whole = part.len() == BLOCK_BYTES;
        let keep = if whole { OldContents::Discard } else { OldContents::Keep };
        let clone = || frames.ready.pop().or_else(|| self.pool.alloc_emergency());
        match pages.page_for_write_in(index, keep, clone) {
            Ok(page) if whole => {
                overwrite_far(page.bytes, part);
                return Ok(page.newly_dirty);
            }
            Ok(page) => {
                page.bytes[within..within + part.len()].copy_from_slice(part);
                return Ok(page.newly_dirty);
            }
            Err(WriteRefused::NoMemory) => return Err(Stop::NoMemory),
            Err(WriteRefused::Absent | WriteRefused::Reading) => {}
        }
        let page_start = index * BLOCK_BYTES_U64;
        // Bytes of the file in this page that stay as they are.
        let part_end = page_start + (within + part.len()) as u64;
        let keeps_tail = part_end < size;
        if !whole && ((within > 0 && page_start < size) || keeps_tail) {
            return Err(Stop::Fill(index));
        }
        let page = if whole {
            frames.ready.pop().or_else(|| self.pool.alloc_for_overwrite_in(frames.growth))
        } else {
            self.pool.alloc_zeroed()
        };
        let mut page = page.ok_or(Stop::NoMemory)?;
        if whole {
            overwrite_far(&mut page, part);
        } else {
            page[within..within + part.len()].copy_from_slice(part);
        }
        Ok(self.put_in(pages, inode, index, page.freeze()).newly_dirty)
    }

    /// Puts a page with new contents into the map.
    pub(super) fn put_in(
        &self,
        pages: &mut PageMap,
        inode: &Inode,
        index: u64,
        page: PageRef,
    ) -> Inserted {
        let inserted = pages.insert_dirty(index, page);
        if inserted.new_chunk {
            self.note_resident(inode.number, index);
        }
        inserted
    }
}

fn end_of(offset: u64, length: u64) -> Result<u64> {
    let end = offset.checked_add(length).ok_or(Error::FileTooLarge)?;
    if end > MAX_FILE_BYTES { Err(Error::FileTooLarge) } else { Ok(end) }
}

/// Pages that bytes `start .. end` touch.
fn pages_of(start: u64, end: u64) -> u64 {
    end.div_ceil(BLOCK_BYTES_U64) - start / BLOCK_BYTES_U64
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::txn::volume_with_a_file;
    use crate::{SetAttr, SetTime, Timestamp};

    #[test]
    fn what_others_set_while_an_append_is_taken_back_stays() {
        let (volume, file) = volume_with_a_file();
        file.write_at(0, b"before").expect("write");
        let (engine, inode) = (file.engine(), file.inode());
        let set = Timestamp { seconds: 7, nanoseconds: 7 };
        let change = SetAttr { mtime: Some(SetTime::At(set)), ..SetAttr::default() };
        for others_change in [false, true] {
            let before = file.attr().expect("attributes");
            let times = TimesBefore::of(inode);
            let mut course = Course::default();
            {
                let _ops = inode.ops.lock();
                inode.set_appending_from(6);
                engine.write_locked(inode, 6, b"and after", &mut course).expect("write");
                if others_change {
                    volume.setattr(file.ino(), &change).expect("it needs no `ops`");
                }
                let moved = times.moved(course.times_moved);
                engine.take_back(inode, 6, moved).expect("taken back");
                inode.set_appending_from(u64::MAX);
            }
            let after = file.attr().expect("attributes");
            let is_as_before = (after.mtime, after.ctime) == (before.mtime, before.ctime);
            assert_eq!(is_as_before, !others_change);
            assert!(after.size_bytes == 6 && after.ctime >= before.ctime);
        }
    }
}
