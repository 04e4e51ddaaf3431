//! Read-ahead of one open handle.
//!
//! Reads that continue where the last one ended are sequential. The first sequential read (for a
//! handle that starts at the beginning of the file: the first read) opens a window of
//! [`MIN_WINDOW_BYTES`] beyond it. As soon as the reader gets into the newest window, the next one,
//! twice as large up to the limit, is requested: the reader finds it there when it arrives, and
//! requests stay large and asynchronous. A read elsewhere ends all that; random readers never cause
//! read-ahead. When a page that was read ahead is gone before it was used, memory is short and the
//! window is halved.
//!
//! The policy is pure: the caller tells every read, and starts what it is told, without waiting.
//! Everything is in pages.

use crate::format::BLOCK_BYTES_U64;
use std::ops::Range;

/// The first window.
pub const MIN_WINDOW_BYTES: u64 = 128 << 10;
/// The largest window when nobody says otherwise.
pub const DEFAULT_MAX_WINDOW_BYTES: u64 = 4 << 20;
const MIN_WINDOW_PAGES: u64 = MIN_WINDOW_BYTES / BLOCK_BYTES_U64;

/// What to do about one read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advice {
    /// Pages to start reading in the background: beyond the read itself, within the file.
    pub ahead: Option<Range<u64>>,
    /// The read starts in the page where the last one ended: not a new hit of that page (use
    /// [`super::map::PageMap::peek`]), or small sequential reads would make every page hot.
    pub continues_page: bool,
}

/// See the module's head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadAhead {
    max_window_pages: u64,
    /// Byte after the last read.
    next_byte: u64,
    /// The newest window. The reader inside of it asks for the next. Empty: no read-ahead now.
    window: Range<u64>,
}

impl Default for ReadAhead {
    fn default() -> Self {
        Self::new(DEFAULT_MAX_WINDOW_BYTES)
    }
}

impl ReadAhead {
    /// State of a fresh handle. A `max_window_bytes` of 0 turns read-ahead off.
    pub fn new(max_window_bytes: u64) -> Self {
        Self { max_window_pages: max_window_bytes / BLOCK_BYTES_U64, next_byte: 0, window: 0..0 }
    }

    /// Size of the newest window in pages.
    pub fn window_pages(&self) -> u64 {
        self.window.end - self.window.start
    }

    /// Notes a read of `length_bytes` at `offset` in a file of `file_bytes`, and says what to read
    /// ahead.
    pub fn on_read(&mut self, offset: u64, length_bytes: u64, file_bytes: u64) -> Advice {
        let sequential = offset == self.next_byte;
        let continues_page = sequential && !offset.is_multiple_of(BLOCK_BYTES_U64);
        let end_byte = offset.saturating_add(length_bytes);
        if length_bytes == 0 {
            return Advice { ahead: None, continues_page };
        }
        self.next_byte = end_byte;
        if !sequential {
            self.window = 0..0;
            return Advice { ahead: None, continues_page };
        }
        let file_pages = file_bytes.div_ceil(BLOCK_BYTES_U64);
        let end_page = end_byte.div_ceil(BLOCK_BYTES_U64);
        let read_pages = end_page - offset / BLOCK_BYTES_U64;
        Advice { ahead: self.advance(end_page, read_pages, file_pages), continues_page }
    }

    /// Opens the next window when the reader, now before `end_page`, is in the newest.
    fn advance(&mut self, end_page: u64, read_pages: u64, file_pages: u64) -> Option<Range<u64>> {
        if !self.window.is_empty() && end_page <= self.window.start {
            return None;
        }
        // Twice what was, and not less than two reads of the reader.
        let pages = (self.window_pages() * 2)
            .max(read_pages.saturating_mul(2))
            .max(MIN_WINDOW_PAGES)
            .min(self.max_window_pages);
        let start = self.window.end.max(end_page);
        if pages == 0 || start >= file_pages {
            return None;
        }
        self.window = start..start.saturating_add(pages);
        Some(start..self.window.end.min(file_pages))
    }

    /// A page that was read ahead was not in the cache any more when the reader came to it.
    pub fn on_lost_page(&mut self) {
        let pages = (self.window_pages() / 2).max(MIN_WINDOW_PAGES).min(self.window_pages());
        self.window.start = self.window.end - pages;
    }

    /// True when the page was requested by read-ahead: a miss there is a lost page.
    pub fn was_requested(&self, page: u64) -> bool {
        self.window.contains(&page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1024;
    const MIB: u64 = 1 << 20;

    /// Reads sequentially and checks that everything is requested once, in order, in time.
    fn read_through(read_bytes: u64, file_bytes: u64, max_bytes: u64) -> Vec<Range<u64>> {
        let mut state = ReadAhead::new(max_bytes);
        let mut requested_to = 0;
        let mut requests = Vec::new();
        let mut offset = 0;
        while offset < file_bytes {
            let length = read_bytes.min(file_bytes - offset);
            let advice = state.on_read(offset, length, file_bytes);
            offset += length;
            let read_to = offset.div_ceil(4096);
            if let Some(ahead) = advice.ahead {
                assert!(ahead.start >= read_to && ahead.start >= requested_to && !ahead.is_empty());
                assert!(requests.is_empty() || ahead.start == requested_to.max(read_to));
                assert!(ahead.end - ahead.start <= max_bytes / 4096);
                assert!(ahead.end <= file_bytes.div_ceil(4096));
                requested_to = ahead.end;
                requests.push(ahead);
            }
            assert!(requested_to >= read_to || max_bytes < 4096, "the reader ran into a miss");
        }
        requests
    }

    #[test]
    fn sequential_reads_find_everything_requested_with_growing_windows() {
        for read_bytes in [1, 512, 4096, 5000, 16 * KIB, 100_000, MIB] {
            let file_bytes = if read_bytes < 4096 { 2 * MIB + 77 } else { 40 * MIB + 77 };
            let requests = read_through(read_bytes, file_bytes, DEFAULT_MAX_WINDOW_BYTES);
            let sizes: Vec<u64> = requests.iter().map(|run| run.end - run.start).collect();
            let (last, whole) = sizes.split_last().unwrap();
            assert!(whole.windows(2).all(|pair| pair[1] == (pair[0] * 2).min(1024)), "{sizes:?}");
            assert!(*last <= 1024);
            assert_eq!(requests.last().unwrap().end, file_bytes.div_ceil(4096));
        }
    }

    #[test]
    fn the_next_window_is_requested_one_window_ahead() {
        let mut state = ReadAhead::default();
        assert_eq!(state.on_read(0, 4096, 64 * MIB).ahead, Some(1..33));
        assert_eq!(state.on_read(4096, 4096, 64 * MIB).ahead, Some(33..97));
        // Within pages 2..33 nothing more is needed; the first page of 33..97 is the trigger.
        for page in 2..33 {
            assert_eq!(state.on_read(page * 4096, 4096, 64 * MIB).ahead, None);
        }
        assert_eq!(state.on_read(33 * 4096, 4096, 64 * MIB).ahead, Some(97..225));
    }

    #[test]
    fn random_reads_never_cause_read_ahead() {
        let mut state = ReadAhead::default();
        let mut place = 12_345_u64;
        for _ in 0..100_000 {
            place = place.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let offset = (place >> 20) % (MIB - 1) * 4096 + 4096;
            if offset != state.next_byte {
                assert_eq!(state.on_read(offset, 4096, 4096 * MIB).ahead, None);
            }
        }
    }

    #[test]
    fn a_seek_stops_read_ahead_and_the_second_read_there_restarts_it_small() {
        let mut state = ReadAhead::default();
        for page in 0..2000 {
            state.on_read(page * 4096, 4096, 64 * MIB);
        }
        assert_eq!(state.window_pages(), 1024);
        assert_eq!(state.on_read(40 * MIB, 4096, 64 * MIB).ahead, None);
        let page = 40 * MIB / 4096;
        assert_eq!(state.on_read(40 * MIB + 4096, 4096, 64 * MIB).ahead, Some(page + 2..page + 34));
    }

    #[test]
    fn small_reads_within_a_page_are_one_hit() {
        let mut state = ReadAhead::default();
        assert!(!state.on_read(0, 1000, MIB).continues_page);
        assert!(state.on_read(1000, 1000, MIB).continues_page);
        assert!(state.on_read(2000, 2096, MIB).continues_page);
        assert!(!state.on_read(4096, 100, MIB).continues_page);
        assert!(!state.on_read(4096, 100, MIB).continues_page);
    }

    #[test]
    fn lost_pages_halve_the_window_and_it_grows_again() {
        let mut state = ReadAhead::default();
        for page in 0..2000 {
            state.on_read(page * 4096, 4096, 64 * MIB);
        }
        let end = state.window.end;
        assert!(state.was_requested(end - 1) && !state.was_requested(end));
        for expected in [512, 256, 128, 64, 32, 32] {
            state.on_lost_page();
            assert_eq!(state.window_pages(), expected);
        }
        assert_eq!(state.window.end, end);
        let mut fresh = ReadAhead::default();
        fresh.on_lost_page();
        assert_eq!(fresh.window_pages(), 0);
    }

    #[test]
    fn the_limit_holds_and_zero_turns_it_off() {
        for run in read_through(4096, 8 * MIB, 256 * KIB) {
            assert!(run.end - run.start <= 64);
        }
        assert!(read_through(4096, MIB, 0).is_empty());
        let mut state = ReadAhead::default();
        assert_eq!(state.on_read(0, 64 * MIB, 65 * MIB).ahead, Some(16_384..16_640));
    }

    #[test]
    fn nothing_is_read_beyond_the_end_of_the_file_until_it_grows() {
        let mut state = ReadAhead::default();
        assert_eq!(state.on_read(0, 4096, 4096).ahead, None);
        assert_eq!(state.on_read(4096, 0, 4096).ahead, None);
        assert_eq!(state.on_read(4096, 4096, 10 * 4096).ahead, Some(2..10));
        assert_eq!(state.on_read(8192, u64::MAX, 10 * 4096).ahead, None);
    }
}
