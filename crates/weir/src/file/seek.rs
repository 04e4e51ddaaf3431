//! Data and holes, and copying ranges between files.

use super::extents;
use crate::cache::map::RunFilter;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::format::BLOCK_BYTES_U64;
use crate::inode::Inode;
use crate::sync::Arc;

/// Most bytes that a copy holds in memory.
const COPY_BYTES: usize = 256 * 1024;

impl Engine {
    /// The first offset `>= offset` with data: `SEEK_DATA`. Unwritten and unallocated blocks are holes unless the cache
    /// holds newer data.
    pub fn seek_data(&self, inode: &Inode, offset: u64) -> Result<u64> {
        let size = inode.size();
        if offset >= size {
            return Err(Error::NoSuchExtent);
        }
        let page = offset / BLOCK_BYTES_U64;
        match self.next_data(inode, page, size.div_ceil(BLOCK_BYTES_U64))? {
            Some(found) => Ok(offset.max(found * BLOCK_BYTES_U64)),
            None => Err(Error::NoSuchExtent),
        }
    }

    /// The first offset `>= offset` in a hole; the end of the file counts as one: `SEEK_HOLE`.
    pub fn seek_hole(&self, inode: &Inode, offset: u64) -> Result<u64> {
        let size = inode.size();
        if offset >= size {
            return Err(Error::NoSuchExtent);
        }
        let end = size.div_ceil(BLOCK_BYTES_U64);
        let mut page = offset / BLOCK_BYTES_U64;
        while page < end {
            if self.next_data(inode, page, page + 1)? != Some(page) {
                break;
            }
            page = self.data_end(inode, page, end)?;
        }
        Ok(offset.max(page * BLOCK_BYTES_U64).min(size))
    }

    /// The first page of `from .. end` with data.
    fn next_data(&self, inode: &Inode, from: u64, end: u64) -> Result<Option<u64>> {
        let in_cache = {
            let pages = inode.pages.read();
            let dirty = pages.dirty_runs(from..end, 1, RunFilter::default()).next();
            let dirty = dirty.map(|run| run.start);
            dirty.into_iter().chain(pages.first_writeback(from..end)).min()
        };
        if from == 0 && inode.meta.lock().item.is_inline() {
            return Ok(Some(0));
        }
        let end = in_cache.unwrap_or(end);
        // Mostly the first is data: a walk would read many more.
        match extents::first_piece(&self.store, inode, from, end)? {
            (Some(piece), _) if !piece.unwritten => return Ok(Some(piece.file_block)),
            (None, None) => return Ok(in_cache),
            _ => {}
        }
        let mut walk = extents::Walk::new(&self.store, inode, (from, end));
        while let Some(pieces) = walk.pieces()? {
            if let Some(piece) = pieces.iter().find(|piece| !piece.unwritten) {
                return Ok(Some(piece.file_block));
            }
        }
        Ok(in_cache)
    }

    /// The end of the run of data that page `from` is in, at least one page on; it may be found too early.
    fn data_end(&self, inode: &Inode, from: u64, end: u64) -> Result<u64> {
        let (first, _) = extents::first_piece(&self.store, inode, from, end)?;
        let mapped = first.filter(|piece| piece.file_block == from && !piece.unwritten);
        Ok(mapped.map_or(from + 1, |piece| piece.end()))
    }

    /// Copies up to `length` bytes between files (or within one, if the ranges do not overlap). Less only at
    /// the end of the source, or when an error struck in between.
    pub fn copy_range(
        self: &Arc<Self>,
        from: (&Arc<Inode>, u64),
        to: (&Arc<Inode>, u64),
        length: u64,
    ) -> Result<u64> {
        let (source, mut read_at) = from;
        let (target, mut write_at) = to;
        let length = length.min(source.size().saturating_sub(read_at));
        if source.number == target.number
            && read_at < write_at.saturating_add(length)
            && write_at < read_at.saturating_add(length)
        {
            return Err(Error::Invalid("source and target of a copy overlap"));
        }
        let mut buffer = vec![0; COPY_BYTES.min(length as usize)];
        let mut done = 0;
        while done < length {
            let part = buffer.len().min((length - done) as usize);
            let step = self
                .read(source, read_at, &mut buffer[..part])
                .and_then(|count| self.write(target, write_at, &buffer[..count]));
            match step {
                Ok(0) => break,
                Ok(count) => {
                    done += count as u64;
                    read_at += count as u64;
                    write_at += count as u64;
                }
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(done)
    }
}
