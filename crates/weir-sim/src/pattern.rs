//! File contents that say where they come from.
//!
//! Every 8-byte word at a multiple of 8 of a file holds the tag of the write that made it, the file
//! block it belongs to and its place therein. So the text of a mismatch can name the write that a
//! page's bytes came from, and data that turns up at a wrong place is recognised.

use std::fmt::Write as _;

use crate::image::BLOCK_BYTES;

const MARK: u64 = 0x5A5;

fn word(tag: u32, offset: u64) -> u64 {
    let block = offset / BLOCK_BYTES as u64;
    let place = offset % BLOCK_BYTES as u64 / 8;
    MARK << 53 | u64::from(tag & 0xF_FFFF) << 33 | (block & 0xFF_FFFF) << 9 | place
}

/// Fills `target`, the part of a file from `offset` on, with the words of `tag`.
pub fn fill(tag: u32, offset: u64, target: &mut [u8]) {
    let mut done = 0;
    while done < target.len() {
        let position = offset + done as u64;
        let bytes = word(tag, position / 8 * 8).to_le_bytes();
        let skip = (position % 8) as usize;
        let count = (8 - skip).min(target.len() - done);
        target[done..done + count].copy_from_slice(&bytes[skip..skip + count]);
        done += count;
    }
}

/// The bytes of `tag` for a range of a file.
pub fn bytes(tag: u32, offset: u64, length: u64) -> Vec<u8> {
    let mut target = vec![0; length as usize];
    fill(tag, offset, &mut target);
    target
}

/// What one aligned word says.
#[derive(PartialEq, Eq, Clone, Copy)]
enum Origin {
    Zero,
    Tag { tag: u64, block: u64 },
    Other,
}

fn origin(bytes: &[u8], place: u64) -> Origin {
    let Ok(array) = <[u8; 8]>::try_from(bytes) else {
        return if bytes.iter().all(|byte| *byte == 0) { Origin::Zero } else { Origin::Other };
    };
    let value = u64::from_le_bytes(array);
    if value == 0 {
        Origin::Zero
    } else if value >> 53 == MARK && value & 0x1FF == place {
        Origin::Tag { tag: value >> 33 & 0xF_FFFF, block: value >> 9 & 0xFF_FFFF }
    } else {
        Origin::Other
    }
}

/// Where the bytes of a page come from, in runs; at most a handful are listed.
pub fn describe(page: &[u8]) -> String {
    let mut runs: Vec<(usize, usize, Origin)> = Vec::new();
    for (place, chunk) in page.chunks(8).enumerate() {
        let origin = origin(chunk, place as u64);
        let end = place * 8 + chunk.len();
        match runs.last_mut() {
            Some(run) if run.2 == origin => run.1 = end,
            _ => runs.push((place * 8, end, origin)),
        }
    }
    let mut text = String::new();
    for (start, end, origin) in runs.iter().take(6) {
        let what = match origin {
            Origin::Zero => "zeros".to_owned(),
            Origin::Tag { tag, block } => format!("tag {tag} of file block {block}"),
            Origin::Other => "mixed or unknown".to_owned(),
        };
        let separator = if text.is_empty() { "" } else { ", " };
        let _ = write!(text, "{separator}{start}..{end} {what}");
    }
    if runs.len() > 6 {
        let _ = write!(text, ", and {} more runs", runs.len() - 6);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_filled_in_parts_equals_one_filled_at_once() {
        let whole = bytes(9, 1000, 5000);
        let mut parts = bytes(9, 1000, 13);
        parts.extend(bytes(9, 1013, 4987));
        assert_eq!(whole, parts);
        assert_ne!(whole, bytes(8, 1000, 5000));
    }

    #[test]
    fn descriptions_name_tag_and_block() {
        let mut page = bytes(77, 3 * 4096, 4096);
        page[..512].fill(0);
        assert_eq!(describe(&page), "0..512 zeros, 512..4096 tag 77 of file block 3");
    }
}
