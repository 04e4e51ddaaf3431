//! The page cache's building blocks. They know nothing of files, the log or the device; the file
//! layer puts them together.
//!
//! | module | what | kind |
//! |---|---|---|
//! | [`page`] | page frames with a reference count, from a bounded pool of huge-page slabs | mechanism, `unsafe` |
//! | [`map`] | the pages of one file with their marks: dirty, writeback, logged, to-write | mechanism |
//! | [`eviction`] | which chunk of which file to give up: S3-FIFO | pure policy |
//! | [`throttle`] | how long an operation waits at its entry | pure policy |
//! | [`readahead`] | what to read before it is asked for, per handle | pure policy |
//! | [`pacing`] | how much writeback may be in flight | pure policy |
//! | [`stretch`] | when a thread that writes much back rests | pure policy |
//!
//! **A read hit** takes the inode's map lock shared, finds the page ([`map::PageMap::get`]), and
//! copies. It writes no shared memory but the lock word: heat for the eviction policy is a bit mask in
//! the chunk that stops changing after three hits.
//!
//! **A write** of a whole page allocates a frame ([`page::PagePool::alloc_for_overwrite`], or a batch
//! under one lock), fills it before the map is locked, and hands it over ([`map::PageMap::insert_dirty`]).
//! A page that is there already is written in place ([`map::PageMap::page_for_write`]), unless writeback
//! or a zero-copy reader holds it: then the map gets a clone, and the old page goes when its last
//! holder does. Nobody waits for a page.
//!
//! **Eviction** works on chunks of 64 pages. A chunk enters the policy when its first page enters the
//! map ([`map::Inserted::new_chunk`]). When the pool is short, the policy names victims, asking
//! [`map::PageMap::chunk_heat`] on the way, and [`map::PageMap::take_cold`] takes their clean, cold
//! pages. Pages that are dirty, under writeback, or owed to home by the log cannot be taken, so
//! reclaim never waits for I/O.
//!
//! **Order of locks**: a file's map lock, then the eviction policy's lock, or the pool's lock; the last
//! two are leaves. The evictor holds the policy's lock while it asks maps, in the opposite order: it
//! may only *try* their locks, and answers [`eviction::Residency::Busy`] where that fails. Pages that
//! were taken out of a map are best dropped after its lock is released.

pub mod eviction;
pub mod map;
pub mod pacing;
pub mod page;
pub mod readahead;
pub mod stretch;
pub mod throttle;
pub mod write_behind;
