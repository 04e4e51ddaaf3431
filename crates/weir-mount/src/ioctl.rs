//! The commands of `include/weir.h`, as they arrive: numbers, layouts, decoding and encoding.
//!
//! FUSE passes on *restricted* ioctls: the kernel copies exactly the bytes that the number announces, at most 16,383, in and
//! out, and the server sees neither pointers nor other files of the caller. `docs/IOCTL.md` says what each command means.
//!
//! **Invariant:** the layouts below are those of the C header (asserted here; a C program in the tests uses the header).

use std::mem::{offset_of, size_of};
use std::ops::Range;

use weir::stats::Report;
use weir::{Capabilities, SyncRangeFlags};

use crate::dispatch::Class;
use crate::errno::Errno;

/// Type byte of all numbers.
const MAGIC: u32 = 0xB7;
const WRITE: u32 = 1;
const READ: u32 = 2;

/// As `_IOC` of the C library: from the caller's view, *write* is what it passes in.
const fn number(direction: u32, index: u32, bytes: usize) -> u32 {
    assert!(bytes < 1 << 14, "an ioctl carries at most 16,383 bytes");
    direction << 30 | (bytes as u32) << 16 | MAGIC << 8 | index
}

/// `struct weir_sync_range`, also of `WEIR_IOC_WRITE_RANGE` and `WEIR_IOC_EXPIRE`.
#[repr(C)]
struct WireRange {
    offset: u64,
    length: u64,
    flags: u32,
    reserved: u32,
}

/// `struct weir_lsn`.
#[repr(C)]
struct WireLsn {
    durable: u64,
    last: u64,
    file: u64,
}

/// `struct weir_wait_lsn`.
#[repr(C)]
struct WireWait {
    lsn: u64,
    timeout_us: u64,
    flags: u32,
    reserved: u32,
}

/// `struct weir_flags`.
#[repr(C)]
struct WireFlags {
    flags: u32,
    reserved: u32,
}

/// Bytes of text in one `struct weir_stats`.
pub const STATS_PAGE_BYTES: usize = 8168;

/// `struct weir_stats`.
#[repr(C)]
struct WireStats {
    snapshot: u64,
    offset: u32,
    total_bytes: u32,
    length: u32,
    reserved: u32,
    data: [u8; STATS_PAGE_BYTES],
}

/// `struct weir_barrier`.
#[repr(C)]
struct WireBarrier {
    flags: u32,
    reserved: u32,
    lsn: u64,
}

/// `struct weir_capabilities`.
#[repr(C)]
struct WireCapabilities {
    untorn: [u32; 3],
    max_log_payload_bytes: u32,
    max_tickets: u64,
    handover_bytes: u64,
    reserved: [u64; 4],
}

/// `struct weir_batch`, also of `WEIR_IOC_BATCH_COMMIT` and `WEIR_IOC_BATCH_ABORT`.
#[repr(C)]
struct WireBatch {
    id: u64,
    lsn: u64,
    flags: u32,
    reserved: u32,
}

/// Bytes of steps in one `struct weir_batch_add`.
pub const BATCH_PORTION_BYTES: usize = 16_352;

/// `struct weir_batch_add`.
#[repr(C)]
struct WireAdd {
    id: u64,
    length: u32,
    reserved: u32,
    steps: [u8; BATCH_PORTION_BYTES],
}

const _: () = {
    assert!(size_of::<WireBatch>() == 24 && offset_of!(WireBatch, flags) == 16);
    assert!(size_of::<WireAdd>() == 16_368 && offset_of!(WireAdd, steps) == 16);
    assert!(size_of::<WireCapabilities>() == 64 && offset_of!(WireCapabilities, max_tickets) == 16);
    assert!(size_of::<WireRange>() == 24);
    assert!(size_of::<WireLsn>() == 24);
    assert!(size_of::<WireWait>() == 24 && offset_of!(WireWait, flags) == 16);
    assert!(size_of::<WireFlags>() == 8);
    assert!(size_of::<WireBarrier>() == 16 && offset_of!(WireBarrier, lsn) == 8);
    assert!(size_of::<WireStats>() == 8192 && offset_of!(WireStats, data) == 24);
};

/// `WEIR_IOC_SYNC_RANGE`.
pub const SYNC_RANGE: u32 = number(WRITE, 1, size_of::<WireRange>());
/// `WEIR_IOC_LSN`.
pub const LSN: u32 = number(READ, 2, size_of::<WireLsn>());
/// `WEIR_IOC_WAIT_LSN`.
pub const WAIT_LSN: u32 = number(WRITE, 3, size_of::<WireWait>());
/// `WEIR_IOC_STATS`.
pub const STATS: u32 = number(READ | WRITE, 4, size_of::<WireStats>());
/// `WEIR_IOC_SYNC_VOLUME`.
pub const SYNC_VOLUME: u32 = number(WRITE, 5, size_of::<WireFlags>());

/// `WEIR_IOC_BARRIER`.
pub const BARRIER: u32 = number(READ | WRITE, 6, size_of::<WireBarrier>());

/// `WEIR_IOC_WRITE_RANGE`.
pub const WRITE_RANGE: u32 = number(WRITE, 7, size_of::<WireRange>());
/// `WEIR_IOC_EXPIRE`.
pub const EXPIRE: u32 = number(WRITE, 8, size_of::<WireRange>());
/// `WEIR_IOC_CAPABILITIES`.
pub const CAPABILITIES: u32 = number(READ, 9, size_of::<WireCapabilities>());

/// `WEIR_IOC_BATCH_BEGIN`.
pub const BATCH_BEGIN: u32 = number(READ | WRITE, 10, size_of::<WireBatch>());
/// `WEIR_IOC_BATCH_ADD`.
pub const BATCH_ADD: u32 = number(WRITE, 11, size_of::<WireAdd>());
/// `WEIR_IOC_BATCH_COMMIT`.
pub const BATCH_COMMIT: u32 = number(READ | WRITE, 12, size_of::<WireBatch>());
/// `WEIR_IOC_BATCH_ABORT`.
pub const BATCH_ABORT: u32 = number(WRITE, 13, size_of::<WireBatch>());

/// `WEIR_BATCH_SYNC`.
pub const BATCH_SYNC: u32 = 1;

/// `WEIR_WRITE_WAIT_BEFORE`, `WEIR_WRITE_START`, `WEIR_WRITE_WAIT_AFTER`: the bits of `sync_file_range(2)`.
pub const WRITE_WAIT_BEFORE: u32 = 1;
/// See [`WRITE_WAIT_BEFORE`].
pub const WRITE_START: u32 = 2;
/// See [`WRITE_WAIT_BEFORE`].
pub const WRITE_WAIT_AFTER: u32 = 4;
/// `WEIR_WRITE_NOWAIT`.
pub const WRITE_NOWAIT: u32 = 8;

/// `WEIR_SYNC_DATA`.
pub const SYNC_DATA: u32 = 1;
/// `WEIR_SYNC_START`.
pub const SYNC_START: u32 = 2;
/// `WEIR_SYNC_MAPPED`.
pub const SYNC_MAPPED: u32 = 4;
/// `WEIR_WAIT_PUSH`.
pub const WAIT_PUSH: u32 = 1;

/// `WEIR_BARRIER_FILE`.
pub const BARRIER_FILE: u32 = 1;
/// `WEIR_BARRIER_MAPPED`.
pub const BARRIER_MAPPED: u32 = 2;

/// A command, decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Make a range of the file (or a directory's names) durable.
    SyncRange {
        /// Bytes.
        range: Range<u64>,
        /// As `fdatasync`.
        data_only: bool,
        /// Do not wait for it.
        start: bool,
    },
    /// Make everything durable.
    SyncVolume {
        /// Do not wait for it.
        start: bool,
        /// With what only the kernel has.
        mapped: bool,
    },
    /// How far the volume and this file are.
    Lsn,
    /// Wait until an operation is durable.
    WaitLsn {
        /// Which.
        lsn: u64,
        /// For how long.
        timeout_us: u64,
        /// Make it durable now.
        push: bool,
    },
    /// Everything before is durable before anything after.
    Barrier {
        /// Data of this file only.
        file: bool,
        /// With what only the kernel has.
        mapped: bool,
    },
    /// Write dirty pages home, for no durability.
    WriteRange {
        /// Bytes.
        range: Range<u64>,
        /// What to do and to wait for.
        flags: SyncRangeFlags,
    },
    /// Leave a range to background writeback.
    Expire {
        /// Bytes.
        range: Range<u64>,
    },
    /// What the volume promises.
    Capabilities,
    /// Stage a batch.
    BatchBegin,
    /// Add steps to it.
    BatchAdd {
        /// Which.
        id: u64,
        /// For [`crate::batch::decode_steps`].
        steps: Vec<u8>,
    },
    /// Make its changes.
    BatchCommit {
        /// Which.
        id: u64,
        /// Wait until they are durable.
        sync: bool,
    },
    /// Drop it.
    BatchAbort {
        /// Which.
        id: u64,
    },
    /// One page of the statistics.
    Stats {
        /// Of which moment; 0: of now.
        snapshot: u64,
        /// Where the page begins.
        offset: u32,
    },
}

impl Command {
    /// How long it may keep a thread.
    pub fn class(&self) -> Class {
        match self {
            Self::WriteRange { flags, .. }
                if !flags.nowait || flags.wait_before || flags.wait_after =>
            {
                Class::Blocking
            }
            Self::SyncRange { .. }
            | Self::SyncVolume { .. }
            | Self::WaitLsn { .. }
            | Self::BatchCommit { .. } => Class::Blocking,
            _ if self.asks_the_kernel() => Class::Blocking,
            _ => Class::Normal,
        }
    }

    /// It waits for the kernel, which waits for requests: a thread that has to serve those must not serve this.
    pub fn asks_the_kernel(&self) -> bool {
        matches!(
            self,
            Self::SyncVolume { mapped: true, .. }
                | Self::Barrier { mapped: true, .. }
                | Self::BatchCommit { .. }
        )
    }
}

/// A number in what the caller passed.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn bytes<const N: usize>(&self, offset: usize) -> Result<[u8; N], Errno> {
        let bytes = self.0.get(offset..offset + N).ok_or(Errno::EINVAL)?;
        bytes.try_into().map_err(|_| Errno::EINVAL)
    }
    fn u64(&self, offset: usize) -> Result<u64, Errno> {
        self.bytes(offset).map(u64::from_ne_bytes)
    }
    fn u32(&self, offset: usize) -> Result<u32, Errno> {
        self.bytes(offset).map(u32::from_ne_bytes)
    }
    /// Flags, all of them in `known`; the word behind them must be zero.
    fn flags(&self, offset: usize, known: u32) -> Result<u32, Errno> {
        let (flags, reserved) = (self.u32(offset)?, self.u32(offset + 4)?);
        if flags & !known == 0 && reserved == 0 { Ok(flags) } else { Err(Errno::EINVAL) }
    }
    /// Number and flags of a `struct weir_batch`.
    fn batch(&self, known: u32) -> Result<(u64, u32), Errno> {
        let flags = self.flags(offset_of!(WireBatch, flags), known)?;
        Ok((self.u64(offset_of!(WireBatch, id))?, flags))
    }
    /// Offset and length; length 0 reaches to the end of the file.
    fn range(&self) -> Result<Range<u64>, Errno> {
        let offset = self.u64(offset_of!(WireRange, offset))?;
        let end = match self.u64(offset_of!(WireRange, length))? {
            0 => u64::MAX,
            length => offset.checked_add(length).ok_or(Errno::EINVAL)?,
        };
        Ok(offset..end)
    }
}

/// What the caller asks. Unknown numbers are [`Errno::ENOTTY`], unknown flags [`Errno::EINVAL`].
pub fn decode(number: u32, input: &[u8]) -> Result<Command, Errno> {
    let input = Input(input);
    Ok(match number {
        SYNC_RANGE => {
            let flags = input.flags(offset_of!(WireRange, flags), SYNC_DATA | SYNC_START)?;
            Command::SyncRange {
                range: input.range()?,
                data_only: flags & SYNC_DATA != 0,
                start: flags & SYNC_START != 0,
            }
        }
        SYNC_VOLUME => {
            let flags = input.flags(offset_of!(WireFlags, flags), SYNC_START | SYNC_MAPPED)?;
            Command::SyncVolume { start: flags & SYNC_START != 0, mapped: flags & SYNC_MAPPED != 0 }
        }
        LSN => Command::Lsn,
        WAIT_LSN => {
            let flags = input.flags(offset_of!(WireWait, flags), WAIT_PUSH)?;
            Command::WaitLsn {
                lsn: input.u64(offset_of!(WireWait, lsn))?,
                timeout_us: input.u64(offset_of!(WireWait, timeout_us))?,
                push: flags & WAIT_PUSH != 0,
            }
        }
        BARRIER => {
            let known = BARRIER_FILE | BARRIER_MAPPED;
            let flags = input.flags(offset_of!(WireBarrier, flags), known)?;
            Command::Barrier {
                file: flags & BARRIER_FILE != 0,
                mapped: flags & BARRIER_MAPPED != 0,
            }
        }
        WRITE_RANGE => {
            let known = WRITE_WAIT_BEFORE | WRITE_START | WRITE_WAIT_AFTER | WRITE_NOWAIT;
            let bits = input.flags(offset_of!(WireRange, flags), known)?;
            let flags = SyncRangeFlags {
                wait_before: bits & WRITE_WAIT_BEFORE != 0,
                write: bits & WRITE_START != 0,
                wait_after: bits & WRITE_WAIT_AFTER != 0,
                nowait: bits & WRITE_NOWAIT != 0,
            };
            Command::WriteRange { range: input.range()?, flags }
        }
        EXPIRE => {
            input.flags(offset_of!(WireRange, flags), 0)?;
            Command::Expire { range: input.range()? }
        }
        CAPABILITIES => Command::Capabilities,
        BATCH_BEGIN => {
            input.batch(0)?;
            Command::BatchBegin
        }
        BATCH_ADD => {
            let length = input.u32(offset_of!(WireAdd, length))? as usize;
            let at = offset_of!(WireAdd, steps);
            if length > BATCH_PORTION_BYTES || input.u32(offset_of!(WireAdd, reserved))? != 0 {
                return Err(Errno::EINVAL);
            }
            let steps = input.0.get(at..at + length).ok_or(Errno::EINVAL)?.to_vec();
            Command::BatchAdd { id: input.u64(offset_of!(WireAdd, id))?, steps }
        }
        BATCH_COMMIT => {
            let (id, flags) = input.batch(BATCH_SYNC)?;
            Command::BatchCommit { id, sync: flags & BATCH_SYNC != 0 }
        }
        BATCH_ABORT => Command::BatchAbort { id: input.batch(0)?.0 },
        STATS => Command::Stats {
            snapshot: input.u64(offset_of!(WireStats, snapshot))?,
            offset: input.u32(offset_of!(WireStats, offset))?,
        },
        _ => return Err(Errno::ENOTTY),
    })
}

/// Answer to [`Command::Lsn`].
pub fn encode_lsn(durable: u64, last: u64, file: u64) -> Vec<u8> {
    [durable, last, file].into_iter().flat_map(u64::to_ne_bytes).collect()
}

/// Answer to [`Command::Barrier`].
pub fn encode_barrier(lsn: u64) -> Vec<u8> {
    [0, lsn].into_iter().flat_map(u64::to_ne_bytes).collect()
}

/// Answer to [`Command::BatchBegin`] and [`Command::BatchCommit`].
pub fn encode_batch(id: u64, lsn: u64) -> Vec<u8> {
    [id, lsn, 0].into_iter().flat_map(u64::to_ne_bytes).collect()
}

/// Answer to [`Command::Capabilities`].
pub fn encode_capabilities(what: &Capabilities) -> Vec<u8> {
    let mut answer = Vec::with_capacity(size_of::<WireCapabilities>());
    for word in [
        what.untorn_write_bytes,
        what.untorn_alignment_bytes,
        what.untorn_boundary_bytes,
        what.max_log_payload_bytes,
    ] {
        answer.extend_from_slice(&word.to_ne_bytes());
    }
    answer.extend_from_slice(&what.max_tickets.to_ne_bytes());
    answer.extend_from_slice(&what.handover_bytes.to_ne_bytes());
    answer.resize(size_of::<WireCapabilities>(), 0);
    answer
}

/// The page of `text` at `offset`: an answer to [`Command::Stats`]. [`Errno::EINVAL`] beyond the end.
pub fn encode_stats(snapshot: u64, offset: u32, text: &[u8]) -> Result<Vec<u8>, Errno> {
    let rest = text.get(offset as usize..).ok_or(Errno::EINVAL)?;
    let page = &rest[..rest.len().min(STATS_PAGE_BYTES)];
    let mut answer = snapshot.to_ne_bytes().to_vec();
    for word in [offset, text.len() as u32, page.len() as u32, 0] {
        answer.extend_from_slice(&word.to_ne_bytes());
    }
    answer.extend_from_slice(page);
    answer.resize(size_of::<WireStats>(), 0);
    Ok(answer)
}

/// The statistics as a mount tells them.
pub fn stats_text(report: &Report) -> Vec<u8> {
    crate::stats::to_json(report).to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(values: &[u64]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_ne_bytes()).collect()
    }

    #[test]
    fn a_range_of_length_zero_reaches_to_the_end_and_one_that_wraps_is_refused() {
        let decoded = |offset, length, flags| decode(SYNC_RANGE, &words(&[offset, length, flags]));
        let all = Command::SyncRange { range: 7..u64::MAX, data_only: false, start: false };
        assert_eq!(decoded(7, 0, 0), Ok(all));
        let some = Command::SyncRange { range: 7..17, data_only: true, start: true };
        assert_eq!(decoded(7, 10, 3), Ok(some));
        assert_eq!(decoded(u64::MAX, 2, 0), Err(Errno::EINVAL));
    }

    #[test]
    fn unknown_flags_reserved_words_short_input_and_unknown_numbers_are_refused() {
        assert_eq!(decode(SYNC_RANGE, &words(&[0, 0, 4])), Err(Errno::EINVAL));
        assert_eq!(decode(SYNC_RANGE, &words(&[0, 0, 1 << 32])), Err(Errno::EINVAL));
        assert_eq!(decode(SYNC_RANGE, &words(&[0, 0])), Err(Errno::EINVAL));
        assert_eq!(decode(0x5401, &[]), Err(Errno::ENOTTY));
        // The same index with another size is another number.
        assert_eq!(decode(number(WRITE, 1, 16), &words(&[0, 0])), Err(Errno::ENOTTY));
    }

    #[test]
    fn what_only_the_kernel_has_is_asked_for_where_a_command_says_so() {
        let sync = |flags| decode(SYNC_VOLUME, &words(&[flags]));
        assert_eq!(sync(0), Ok(Command::SyncVolume { start: false, mapped: false }));
        assert_eq!(sync(6), Ok(Command::SyncVolume { start: true, mapped: true }));
        assert_eq!(sync(1), Err(Errno::EINVAL));
        let barrier = |flags| decode(BARRIER, &words(&[flags, 0]));
        assert_eq!(barrier(1), Ok(Command::Barrier { file: true, mapped: false }));
        let mapped = barrier(2).unwrap();
        assert_eq!(mapped, Command::Barrier { file: false, mapped: true });
        assert!(mapped.asks_the_kernel() && mapped.class() == Class::Blocking);
        assert_eq!(barrier(4), Err(Errno::EINVAL));
    }

    #[test]
    fn each_bit_of_a_hand_over_is_its_own_and_what_waits_may_keep_a_thread() {
        let flags = |bits| match decode(WRITE_RANGE, &words(&[7, 10, bits])) {
            Ok(Command::WriteRange { range, flags }) => {
                assert_eq!(range, 7..17);
                flags
            }
            other => panic!("{other:?}"),
        };
        let none =
            SyncRangeFlags { wait_before: false, write: false, wait_after: false, nowait: false };
        assert_eq!(flags(0), none);
        assert_eq!(flags(1), SyncRangeFlags { wait_before: true, ..none });
        assert_eq!(flags(2), SyncRangeFlags { write: true, ..none });
        assert_eq!(flags(4), SyncRangeFlags { wait_after: true, ..none });
        assert_eq!(flags(8), SyncRangeFlags { nowait: true, ..none });
        assert_eq!(decode(WRITE_RANGE, &words(&[7, 10, 16])), Err(Errno::EINVAL));
        let class = |bits| decode(WRITE_RANGE, &words(&[7, 10, bits])).unwrap().class();
        assert_eq!((class(2), class(8 | 2)), (Class::Blocking, Class::Normal));
        assert_eq!((class(8 | 1), class(8 | 4)), (Class::Blocking, Class::Blocking));
    }

    #[test]
    fn a_portion_of_a_batch_is_as_long_as_it_says_and_no_longer_than_it_can_be() {
        let portion = |length: u64, bytes: usize| {
            let mut input = words(&[3, length]);
            input.resize(16 + bytes, 0xAB);
            decode(BATCH_ADD, &input)
        };
        let steps = vec![0xAB; 100];
        assert_eq!(portion(100, BATCH_PORTION_BYTES), Ok(Command::BatchAdd { id: 3, steps }));
        assert!(portion(BATCH_PORTION_BYTES as u64, BATCH_PORTION_BYTES).is_ok());
        let longer = BATCH_PORTION_BYTES as u64 + 1;
        assert_eq!(portion(longer, BATCH_PORTION_BYTES), Err(Errno::EINVAL));
        assert_eq!(portion(u64::from(u32::MAX), BATCH_PORTION_BYTES), Err(Errno::EINVAL));
        assert_eq!(portion(1 << 32, BATCH_PORTION_BYTES), Err(Errno::EINVAL));
        assert_eq!(portion(100, 99), Err(Errno::EINVAL));
        assert_eq!(decode(BATCH_COMMIT, &words(&[1, 0, 2])), Err(Errno::EINVAL));
        assert_eq!(decode(BATCH_BEGIN, &words(&[0, 0, 1])), Err(Errno::EINVAL));
    }

    #[test]
    fn pages_of_the_statistics_join_up_to_the_text() {
        let text: Vec<u8> = (0..20_000_u32).map(|i| b'a' + (i % 26) as u8).collect();
        let mut joined = Vec::new();
        while joined.len() < text.len() {
            let page = encode_stats(9, joined.len() as u32, &text).unwrap();
            assert_eq!(page.len(), 8192);
            let length = u32::from_ne_bytes(page[16..20].try_into().unwrap()) as usize;
            assert!(length > 0);
            joined.extend_from_slice(&page[24..24 + length]);
        }
        assert_eq!(joined, text);
        assert_eq!(encode_stats(9, 20_001, &text), Err(Errno::EINVAL));
    }
}
