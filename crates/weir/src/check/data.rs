//! Verification of data blocks: checksums, and zeros behind the end of a file.
//!
//! Runs of blocks are gathered during the walk of the tree and verified in the order of their
//! places, in large reads. Memory: about 2 MiB of checksums and places.

use super::report::{Findings, Place, ProblemKind};
use crate::device::buffer::AlignedBuf;
use crate::device::{Device, IoClass};
use crate::format::{BLOCK_BYTES, BLOCK_BYTES_U64, checksum};

/// Blocks gathered before they are verified: 1 GiB of data.
const GATHERED_BLOCKS: usize = 1 << 18;
/// Largest read.
const READ_BLOCKS: u64 = 256;
/// A gap of up to so many blocks is read through.
const GAP_BLOCKS: u64 = 8;

/// Blocks of a file at consecutive places.
#[derive(Debug, Clone, Copy)]
struct DataRun {
    block: u64,
    blocks: u64,
    inode: u64,
    file_block: u64,
    /// Index of the first block's checksum.
    sums: usize,
    /// The file block that holds the end of the file, and the bytes of it that belong to the file.
    tail: Option<(u64, usize)>,
}

/// See the module's head.
#[derive(Default)]
pub(super) struct DataCheck {
    runs: Vec<DataRun>,
    sums: Vec<u32>,
    buffer: AlignedBuf,
    pub verified_blocks: u64,
}

impl DataCheck {
    /// Takes in a written extent of a file of `size` bytes, with its checksums as stored.
    pub fn add(&mut self, inode: u64, file_block: u64, block: u64, stored_sums: &[u8], size: u64) {
        let sums = self.sums.len();
        self.sums.extend(
            stored_sums
                .chunks_exact(4)
                .map(|sum| u32::from_le_bytes([sum[0], sum[1], sum[2], sum[3]])),
        );
        let blocks = (self.sums.len() - sums) as u64;
        let within = (size % BLOCK_BYTES_U64) as usize;
        let tail = (within > 0).then_some((size / BLOCK_BYTES_U64, within));
        self.runs.push(DataRun { block, blocks, inode, file_block, sums, tail });
    }

    /// Enough was gathered.
    pub fn is_full(&self) -> bool {
        self.sums.len() >= GATHERED_BLOCKS
    }

    /// Verifies what was gathered, and forgets it.
    pub fn verify(&mut self, device: &dyn Device, findings: &mut Findings) {
        let mut runs = std::mem::take(&mut self.runs);
        runs.sort_unstable_by_key(|run| run.block);
        let mut rest = &runs[..];
        while let Some(first) = rest.first() {
            let mut end = first.block + first.blocks;
            let mut count = 1;
            for next in &rest[1..] {
                let next_end = next.block + next.blocks;
                if next.block > end + GAP_BLOCKS || next_end > first.block + READ_BLOCKS {
                    break;
                }
                end = end.max(next_end);
                count += 1;
            }
            let (together, others) = rest.split_at(count);
            self.verify_range(device, together, end, findings);
            rest = others;
        }
        runs.clear();
        self.runs = runs;
        self.sums.clear();
    }

    /// Reads everything from the first of `runs` to before `end` and verifies the runs.
    fn verify_range(
        &mut self,
        device: &dyn Device,
        runs: &[DataRun],
        end: u64,
        findings: &mut Findings,
    ) {
        let Some(start) = runs.first().map(|run| run.block) else { return };
        self.buffer.clear();
        self.buffer.resize_zeroed((end - start) as usize * BLOCK_BYTES);
        let target = &mut [&mut self.buffer[..]];
        let whole = device.read(start * BLOCK_BYTES_U64, target, IoClass::Background).is_ok();
        for run in runs {
            for index in 0..run.blocks {
                let at = (run.block + index - start) as usize * BLOCK_BYTES;
                let Some(bytes) = self.buffer.get_mut(at..at + BLOCK_BYTES) else { continue };
                let block = run.block + index;
                let place =
                    Place::FileBlock { inode: run.inode, file_block: run.file_block + index };
                // A read that failed is repeated block by block, to name the bad ones.
                if !whole
                    && let Err(error) =
                        device.read(block * BLOCK_BYTES_U64, &mut [bytes], IoClass::Background)
                {
                    findings.add(ProblemKind::Unreadable, place, || error.to_string());
                    continue;
                }
                self.verified_blocks += 1;
                let expected = self.sums.get(run.sums + index as usize);
                if expected != Some(&checksum(bytes)) {
                    findings.add(ProblemKind::Data, place, || {
                        format!("block {block} does not match its checksum")
                    });
                }
                let tail = run.tail.filter(|(last, _)| *last == run.file_block + index);
                if let Some((_, within)) = tail
                    && bytes[within..].iter().any(|&byte| byte != 0)
                {
                    findings.add(ProblemKind::Tail, place, || {
                        format!("block {block} is not zero behind the end of the file")
                    });
                }
            }
        }
    }
}
