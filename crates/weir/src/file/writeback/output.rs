//! What is written for pieces: neighbouring blocks of all of them in one request.

use super::piece::Piece;
use crate::cache::pacing::SHARED_REQUEST_BYTES;
use crate::cache::page::PageRef;
use crate::device::request::{Outcome, Underway};
use crate::device::{Buffers, IoClass, Operation, Request};
use crate::error::{Error, Result};
use crate::format::BLOCK_BYTES_U64;

/// Most pages of one request after neighbours were joined: 1 MiB. Others' requests wait behind it on many disks.
pub(super) const REQUEST_PAGES: usize = 256;
/// The same while others use the disk.
pub(super) const SHARED_REQUEST_PAGES: usize = (SHARED_REQUEST_BYTES / BLOCK_BYTES_U64) as usize;

/// Neighbouring blocks of some pieces, by their numbers.
pub(super) struct OutRequest {
    pub(super) block: u64,
    pub(super) pages: Vec<PageRef>,
    pub(super) pieces: Vec<usize>,
}

impl OutRequest {
    /// How much it writes.
    pub(super) fn bytes(&self) -> u64 {
        self.pages.len() as u64 * BLOCK_BYTES_U64
    }
}

/// Which pieces a request was for, and how it ended.
pub(super) type Written = Vec<(Vec<usize>, Result<()>)>;

/// Writes that may be on their way.
pub(super) enum Writes {
    /// Which pieces each request of the batch is for.
    Begun(Vec<Vec<usize>>, Underway),
    Done(Written),
}

impl Writes {
    pub(super) fn wait(self) -> Written {
        match self {
            Self::Begun(numbers, underway) => with_results(numbers, underway.wait()),
            Self::Done(results) => results,
        }
    }
}

pub(super) fn with_results(numbers: Vec<Vec<usize>>, outcomes: Vec<Outcome>) -> Written {
    let results = outcomes.into_iter().map(|(result, _)| result.map_err(Error::from));
    numbers.into_iter().zip(results).collect()
}

/// What is to be written for `pieces`, in the order of blocks, at most `most_pages` by each request.
pub(super) fn requests_of(pieces: &[Piece], most_pages: usize) -> Vec<OutRequest> {
    let segments = pieces.iter().map(|piece| piece.segments.len()).sum();
    let mut order: Vec<(u64, usize, usize)> = Vec::with_capacity(segments);
    for (number, piece) in pieces.iter().enumerate() {
        for (segment_number, segment) in piece.segments.iter().enumerate() {
            order.push((segment.block, number, segment_number));
        }
    }
    order.sort_unstable();
    let mut requests: Vec<OutRequest> = Vec::new();
    for (block, number, segment_number) in order {
        let segment = &pieces[number].segments[segment_number];
        let pages = &pieces[number].pages[segment.first..segment.first + segment.pages];
        for (page, block) in pages.iter().zip(block..) {
            let fits = requests.last().is_some_and(|last| {
                last.block + last.pages.len() as u64 == block && last.pages.len() < most_pages
            });
            if !fits {
                requests.push(OutRequest { block, pages: Vec::new(), pieces: Vec::new() });
            }
            if let Some(last) = requests.last_mut() {
                last.pages.push(page.page.clone());
                if last.pieces.last() != Some(&number) {
                    last.pieces.push(number);
                }
            }
        }
    }
    requests
}

/// The same for the device, and the pieces of each.
pub(super) fn to_device(
    requests: Vec<OutRequest>,
    class: IoClass,
) -> (Vec<Vec<usize>>, Vec<Request>) {
    let one = |request: OutRequest| {
        let device_request = Request {
            operation: Operation::Write { fua: false },
            offset_bytes: request.block * BLOCK_BYTES_U64,
            buffers: Buffers::Pages(request.pages),
            class,
        };
        (request.pieces, device_request)
    };
    requests.into_iter().map(one).unzip()
}

/// Notes with each piece that a part of it could not be written.
pub(super) fn note_failures(pieces: &mut [Piece], results: Written) {
    for (numbers, result) in results {
        if let Err(error) = result {
            for number in numbers {
                pieces[number].failed = Some(error.clone());
            }
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::super::piece::{Place, Segment};
    use super::*;
    use crate::cache::map::WritebackPage;
    use crate::cache::page::PagePool;
    use crate::inode::for_tests::inode;
    use crate::sync::Weak;
    use crate::sync::atomic::AtomicBool;

    /// A piece with `pages` pages from each of the blocks on, nothing else decided.
    fn piece(pool: &PagePool, runs: &[(u64, usize)]) -> Piece {
        let mut piece = Piece {
            engine: Weak::new(),
            inode: inode(),
            admission: None,
            token: 1,
            pages: Vec::new(),
            runs: Vec::new(),
            checksums: Vec::new(),
            segments: Vec::new(),
            size: 0,
            into_inode: false,
            replaceable: None,
            spare: None,
            failed: None,
            ended: AtomicBool::new(false),
        };
        for &(block, pages) in runs {
            let first = piece.pages.len();
            piece.segments.push(Segment { first, pages, block, place: Place::New });
            piece.pages.extend((first..first + pages).map(|index| WritebackPage {
                index: index as u64,
                page: pool.alloc_zeroed().expect("memory").freeze(),
                logged_lsn: None,
                is_logged: false,
            }));
        }
        piece
    }

    fn shape(requests: &[OutRequest]) -> Vec<(u64, usize, &[usize])> {
        requests.iter().map(|each| (each.block, each.pages.len(), &*each.pieces)).collect()
    }

    #[test]
    fn neighbours_of_all_pieces_share_requests_up_to_the_largest() {
        let pool = PagePool::new(64 * 4096);
        let pieces = [piece(&pool, &[(100, 5), (40, 1)]), piece(&pool, &[(105, 4), (41, 2)])];
        let apart = requests_of(&pieces, 1);
        assert_eq!(apart.len(), 12);
        assert!(apart.iter().all(|each| each.bytes() == BLOCK_BYTES_U64));
        assert_eq!(
            shape(&requests_of(&pieces, 4)),
            [(40, 3, &[0, 1][..]), (100, 4, &[0]), (104, 4, &[0, 1]), (108, 1, &[1])]
        );
        let joined = requests_of(&pieces, 256);
        assert_eq!(shape(&joined), [(40, 3, &[0, 1][..]), (100, 9, &[0, 1])]);
        // Each page is in its place.
        let written = joined[1].pages.iter().map(|page| page.as_ptr());
        let expected = pieces[0].pages[..5].iter().chain(&pieces[1].pages[..4]);
        assert!(written.eq(expected.map(|each| each.page.as_ptr())));
    }
}
