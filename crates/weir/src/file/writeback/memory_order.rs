//! In which order scattered pages get their blocks.
//!
//! Pages that are placed side by side leave in one request, in the order of their blocks. Where pages lie apart in the file, that order
//! is free; and pages that were written one after the other lie one behind the other in memory. A request that follows memory is one
//! segment for the kernel and the disk, one that follows the file has a segment for each page: each is pinned, mapped and described to the
//! disk by itself, and some disks have descriptors for 256 at a time and no more.

use super::piece::Segment;
use crate::cache::map::WritebackPage;

/// The order of `news`, short runs of `pages` that lie apart in the file, in which they have the fewest segments in memory: as numbers
/// among them. `None`: the one that they are in.
pub(super) fn in_memory_order(news: &[Segment], pages: &[WritebackPage]) -> Option<Vec<usize>> {
    let first = |number: usize| pages[news[number].first].page.place();
    let behind = |number: usize| {
        let segment = &news[number];
        pages[segment.first + segment.pages - 1].page.place() + 1
    };
    let joints = |order: &mut dyn Iterator<Item = usize>| {
        let Some(mut last) = order.next() else { return 0 };
        let mut joints = 0;
        for number in order {
            joints += usize::from(behind(last) == first(number));
            last = number;
        }
        joints
    };
    let mut order: Vec<usize> = (0..news.len()).collect();
    order.sort_unstable_by_key(|&number| first(number));
    let gains = joints(&mut order.iter().copied()) > joints(&mut (0..news.len()));
    gains.then_some(order)
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::super::piece::Place;
    use super::*;
    use crate::cache::page::{PageMut, PagePool, PageRef};
    use crate::format::BLOCK_BYTES;

    /// Runs of `lengths` pages, whose places in memory are `frames`, numbered as they lie there.
    fn runs(lengths: &[usize], frames: &[usize]) -> (Vec<Segment>, Vec<WritebackPage>) {
        let pool = PagePool::new(64 * BLOCK_BYTES);
        let all: Vec<PageRef> =
            (0..16).map(|_| pool.alloc_zeroed().expect("memory")).map(PageMut::freeze).collect();
        let mut first = 0;
        let segments = lengths.iter().map(|&pages| {
            first += pages;
            Segment { first: first - pages, pages, block: 0, place: Place::New }
        });
        let segments = segments.collect();
        let pages = frames.iter().zip(0..).map(|(&frame, number)| WritebackPage {
            index: 100 * number,
            page: all[frame].clone(),
            logged_lsn: None,
            is_logged: false,
        });
        (segments, pages.collect())
    }

    #[test]
    fn runs_that_were_written_one_after_the_other_leave_in_that_order() {
        let (segments, pages) = runs(&[1, 2, 1, 1], &[4, 1, 2, 0, 3]);
        assert_eq!(in_memory_order(&segments, &pages), Some(vec![2, 1, 3, 0]));
    }

    #[test]
    fn the_order_of_the_file_stays_where_another_has_no_fewer_segments() {
        for (lengths, frames) in [
            (&[1, 1, 1][..], &[0, 1, 2][..]),
            (&[1, 1, 1], &[9, 5, 2]),
            (&[2, 2], &[4, 6, 0, 2]),
            (&[1], &[3]),
            (&[], &[]),
        ] {
            let (segments, pages) = runs(lengths, frames);
            assert_eq!(in_memory_order(&segments, &pages), None, "{frames:?}");
        }
    }
}
