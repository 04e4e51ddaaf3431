//! What is written for pieces: neighbouring blocks of all of them in one request.

use super::piece::Piece;
use crate::cache::page::PageRef;
use crate::device::request::{Batch, Outcome};
use crate::device::{Buffers, IoClass, Operation, Request};
use crate::error::{Error, Result};
use crate::format::BLOCK_BYTES_U64;

/// Most pages of one request after neighbours were joined: 1 MiB. Others' requests wait behind it on many disks.
const REQUEST_PAGES: usize = 256;

/// Neighbouring blocks of some pieces, by their numbers.
pub(super) struct OutRequest {
    pub(super) block: u64,
    pub(super) pages: Vec<PageRef>,
    pub(super) pieces: Vec<usize>,
}

/// Which pieces a request was for, and how it ended.
pub(super) type Written = Vec<(Vec<usize>, Result<()>)>;

/// Writes that may be on their way.
pub(super) enum Writes {
    /// Which pieces each request of the batch is for.
    Submitted(Vec<Vec<usize>>, Batch),
    Done(Written),
}

impl Writes {
    pub(super) fn wait(self) -> Written {
        match self {
            Self::Submitted(numbers, batch) => with_results(numbers, batch.wait()),
            Self::Done(results) => results,
        }
    }
}

pub(super) fn with_results(numbers: Vec<Vec<usize>>, outcomes: Vec<Outcome>) -> Written {
    let results = outcomes.into_iter().map(|(result, _)| result.map_err(Error::from));
    numbers.into_iter().zip(results).collect()
}

/// What is to be written for `pieces`, in the order of blocks.
pub(super) fn requests_of(pieces: &[Piece]) -> Vec<OutRequest> {
    let mut order: Vec<(u64, usize, usize)> = Vec::new();
    for (number, piece) in pieces.iter().enumerate() {
        for (segment_number, segment) in piece.segments.iter().enumerate() {
            order.push((segment.block, number, segment_number));
        }
    }
    order.sort_unstable();
    let mut requests: Vec<OutRequest> = Vec::new();
    for (block, number, segment_number) in order {
        let segment = &pieces[number].segments[segment_number];
        let pages = pieces[number].pages[segment.first..segment.first + segment.pages].iter();
        let fits = requests.last().is_some_and(|last| {
            last.block + last.pages.len() as u64 == block
                && last.pages.len() + segment.pages <= REQUEST_PAGES
        });
        if !fits {
            requests.push(OutRequest { block, pages: Vec::new(), pieces: Vec::new() });
        }
        if let Some(last) = requests.last_mut() {
            last.pages.extend(pages.map(|page| page.page.clone()));
            if last.pieces.last() != Some(&number) {
                last.pieces.push(number);
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
