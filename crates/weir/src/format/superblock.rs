//! The superblock: which checkpoint is current and where replay starts.
//!
//! Two slots (generation mod 2), each with a mirror at the end of the volume.
//! [`choose_superblock`] reads all four places and takes the valid copy of the highest generation. A place that cannot be read is
//! no proof that nothing newer is there.
//! Feature policy: an unknown incompat bit refuses to open, an unknown `ro_compat` bit allows
//! reading, an unknown compat bit is ignored.

use std::mem::{offset_of, size_of};

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::geometry::{Geometry, TAIL_BLOCKS};
use super::{
    BLOCK_BYTES, BLOCK_BYTES_U64, FormatError, MAX_COUNTER, NODE_BYTES, VolumeId,
    checksum_without_field,
};
use crate::Error;
use crate::device::buffer::AlignedBuf;
use crate::device::{Device, IoClass};

/// First bytes of a superblock.
pub const MAGIC: [u8; 8] = *b"WEIR-FS1";
/// Version of the format.
pub const VERSION: u32 = 1;
/// Incompat bits this code understands.
pub const KNOWN_INCOMPAT: u64 = 0;
/// Read-only-compat bits this code understands.
pub const KNOWN_RO_COMPAT: u64 = 0;
/// Longest label.
pub const MAX_LABEL_BYTES: usize = 64;

const STRUCTURE: &str = "superblock";
const STATE_CLEAN: u64 = 1;
const STATE_ERRORS: u64 = 2;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct Raw {
    magic: [u8; 8],
    checksum: U32,
    version: U32,
    volume_id: VolumeId,
    block_address: U64,
    generation: U64,
    block_size: U32,
    node_size: U32,
    total_blocks: U64,
    feature_compat: U64,
    feature_ro_compat: U64,
    feature_incompat: U64,
    created_ns: U64,
    label: [u8; MAX_LABEL_BYTES],
    root_start_block: U64,
    root_slot_blocks: U32,
    group_count: U32,
    bitmap_start_block: U64,
    log_start_block: U64,
    log_blocks: U64,
    root_block: U64,
    root_generation: U64,
    root_checksum: U32,
    root_bytes: U32,
    log_epoch: U64,
    epoch_first_sequence: U64,
    replay_position_blocks: U64,
    replay_sequence: U64,
    replay_prev_digest: U64,
    durable_lsn: U64,
    state: U64,
    durable_sequence: U64,
    replay_epoch: U64,
    reserved: [u8; 3800],
}

const _: () = {
    assert!(size_of::<Raw>() == BLOCK_BYTES);
    assert!(offset_of!(Raw, checksum) == 8);
    assert!(offset_of!(Raw, volume_id) == 16);
    assert!(offset_of!(Raw, block_address) == 32);
    assert!(offset_of!(Raw, block_size) == 48);
    assert!(offset_of!(Raw, total_blocks) == 56);
    assert!(offset_of!(Raw, feature_compat) == 64);
    assert!(offset_of!(Raw, created_ns) == 88);
    assert!(offset_of!(Raw, label) == 96);
    assert!(offset_of!(Raw, root_start_block) == 160);
    assert!(offset_of!(Raw, group_count) == 172);
    assert!(offset_of!(Raw, bitmap_start_block) == 176);
    assert!(offset_of!(Raw, log_start_block) == 184);
    assert!(offset_of!(Raw, log_blocks) == 192);
    assert!(offset_of!(Raw, root_block) == 200);
    assert!(offset_of!(Raw, root_checksum) == 216);
    assert!(offset_of!(Raw, log_epoch) == 224);
    assert!(offset_of!(Raw, replay_position_blocks) == 240);
    assert!(offset_of!(Raw, durable_lsn) == 264);
    assert!(offset_of!(Raw, state) == 272);
    assert!(offset_of!(Raw, durable_sequence) == 280);
    assert!(offset_of!(Raw, replay_epoch) == 288);
    assert!(offset_of!(Raw, reserved) == 296);
};

/// The current checkpoint root, as the superblock names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RootPointer {
    /// First block: one of the two root slots.
    pub block: u64,
    /// Generation of the checkpoint.
    pub generation: u64,
    /// crc32c of the root's used bytes as stored.
    pub checksum: u32,
}

/// Where replay of the log starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReplayPoint {
    /// Place in the ring.
    pub position_blocks: u64,
    /// Sequence number expected there.
    pub sequence: u64,
    /// `prev_digest` expected there.
    pub prev_digest: u64,
}

/// Feature bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Features {
    /// Unknown bits are ignored.
    pub compat: u64,
    /// Unknown bits allow reading only.
    pub ro_compat: u64,
    /// Unknown bits refuse to open.
    pub incompat: u64,
}

impl Features {
    /// Whether this code may write to a volume with these features.
    pub const fn allow_writing(&self) -> bool {
        self.allow_reading() && self.ro_compat & !KNOWN_RO_COMPAT == 0
    }
    /// Whether this code may open a volume with these features at all.
    pub const fn allow_reading(&self) -> bool {
        self.incompat & !KNOWN_INCOMPAT == 0
    }
}

/// A superblock's content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// Identity of the volume.
    pub volume_id: VolumeId,
    /// Higher wins; the slot is generation mod 2.
    pub generation: u64,
    /// Where everything is.
    pub geometry: Geometry,
    /// Feature bits.
    pub features: Features,
    /// When the volume was made: nanoseconds since 1970.
    pub created_ns: u64,
    /// At most 64 bytes, without zero bytes.
    pub label: String,
    /// The current checkpoint.
    pub root: RootPointer,
    /// Epoch that new frames carry.
    pub log_epoch: u64,
    /// Frames from this sequence on must carry `log_epoch`.
    pub epoch_first_sequence: u64,
    /// The epoch that frames before that sequence must carry; 0: not known, any smaller one.
    pub replay_epoch: u64,
    /// Where replay starts.
    pub replay: ReplayPoint,
    /// Everything up to here was durable when this was written.
    pub durable_lsn: u64,
    /// Frames from where replay starts up to this sequence (exclusive) were durable when this was written; 0: not known.
    pub durable_sequence: u64,
    /// The volume was closed in order.
    pub clean: bool,
    /// Since the volume was opened, something was read that does not match its checksum: fsck should run.
    pub errors_seen: bool,
}

/// Why a block is not a usable superblock.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SuperblockError {
    /// Nothing but zeros.
    #[error("it is empty")]
    Empty,
    /// Something else is there.
    #[error("it has no Weir superblock")]
    NotWeir,
    /// A Weir superblock of a later format; the checksum holds.
    #[error("format version {0} is newer than version {VERSION} of this program")]
    NewerVersion(u32),
    /// Features this code does not know; the checksum holds.
    #[error("it uses features this program does not know (incompat bits {0:#x})")]
    UnknownFeatures(u64),
    /// It is a Weir superblock, and damaged.
    #[error("{0}")]
    Damaged(#[from] FormatError),
}

impl Superblock {
    /// The slot this generation belongs to.
    pub const fn slot(&self) -> u8 {
        (self.generation & 1) as u8
    }

    /// The two places this superblock is written to: slot and mirror.
    pub const fn places(&self) -> [u64; 2] {
        let slot = self.slot();
        [Geometry::superblock_block(slot), self.geometry.superblock_mirror_block(slot)]
    }

    /// The places of the one before and of the one after.
    pub const fn other_places(&self) -> [u64; 2] {
        let other = 1 - self.slot();
        [Geometry::superblock_block(other), self.geometry.superblock_mirror_block(other)]
    }

    /// Whether a valid copy was found in the slot that this one is not in.
    fn has_neighbour(&self, places: &[SuperblockPlace]) -> bool {
        let others = self.other_places();
        places.iter().any(|place| others.contains(&place.block) && place.found.is_ok())
    }

    /// Whether a newer superblock may have been in use, both copies of which are damaged. Mostly a crash has left them so, of one that
    /// was never in use: what the log holds tells.
    pub fn may_be_outlived(&self, places: &[SuperblockPlace]) -> bool {
        let others = self.other_places();
        let is_empty = |place: &SuperblockPlace| place.found == Err(SuperblockError::Empty);
        let is_new = self.generation == 1
            && places.iter().filter(|place| others.contains(&place.block)).all(is_empty);
        !is_new && !self.has_neighbour(places)
    }

    /// The bytes of the copy at `block_address`.
    ///
    /// # Errors
    /// The label has more than 64 bytes or contains a zero byte.
    pub fn encode(&self, block_address: u64) -> Result<AlignedBuf, FormatError> {
        let mut label = [0; MAX_LABEL_BYTES];
        let text = self.label.as_bytes();
        match label.get_mut(..text.len()) {
            Some(target) if !text.contains(&0) => target.copy_from_slice(text),
            _ => {
                return Err(FormatError::new(
                    STRUCTURE,
                    "a label has at most 64 bytes, none of them zero",
                ));
            }
        }
        let geometry = &self.geometry;
        let state = if self.clean { STATE_CLEAN } else { 0 }
            | if self.errors_seen { STATE_ERRORS } else { 0 };
        let mut raw = Raw {
            magic: MAGIC,
            checksum: 0.into(),
            version: VERSION.into(),
            volume_id: self.volume_id,
            block_address: block_address.into(),
            generation: self.generation.into(),
            block_size: (BLOCK_BYTES as u32).into(),
            node_size: (NODE_BYTES as u32).into(),
            total_blocks: geometry.total_blocks().into(),
            feature_compat: self.features.compat.into(),
            feature_ro_compat: self.features.ro_compat.into(),
            feature_incompat: self.features.incompat.into(),
            created_ns: self.created_ns.into(),
            label,
            root_start_block: geometry.root_start_block().into(),
            root_slot_blocks: geometry.root_slot_blocks().into(),
            group_count: geometry.group_count().into(),
            bitmap_start_block: geometry.bitmap_start_block().into(),
            log_start_block: geometry.log_start_block().into(),
            log_blocks: geometry.log_blocks().into(),
            root_block: self.root.block.into(),
            root_generation: self.root.generation.into(),
            root_checksum: self.root.checksum.into(),
            root_bytes: geometry.root_bytes().into(),
            log_epoch: self.log_epoch.into(),
            epoch_first_sequence: self.epoch_first_sequence.into(),
            replay_position_blocks: self.replay.position_blocks.into(),
            replay_sequence: self.replay.sequence.into(),
            replay_prev_digest: self.replay.prev_digest.into(),
            durable_lsn: self.durable_lsn.into(),
            state: state.into(),
            durable_sequence: self.durable_sequence.into(),
            replay_epoch: self.replay_epoch.into(),
            reserved: [0; 3800],
        };
        raw.checksum = super::checksum(raw.as_bytes()).into();
        Ok(AlignedBuf::from_slice(raw.as_bytes()))
    }

    /// The superblock in `bytes`, which were read from `block_address`.
    ///
    /// # Errors
    /// See [`SuperblockError`].
    pub fn decode(bytes: &[u8], block_address: u64) -> Result<Self, SuperblockError> {
        let damaged = |problem: &str| SuperblockError::from(FormatError::new(STRUCTURE, problem));
        let raw = Raw::ref_from_bytes(bytes).map_err(|_| damaged("a superblock has 4096 bytes"))?;
        if raw.magic != MAGIC {
            let empty = bytes.iter().all(|&byte| byte == 0);
            return Err(if empty { SuperblockError::Empty } else { SuperblockError::NotWeir });
        }
        let computed = checksum_without_field(bytes, offset_of!(Raw, checksum));
        if raw.checksum.get() != computed {
            return Err(damaged("its checksum does not match"));
        }
        if raw.version.get() > VERSION {
            return Err(SuperblockError::NewerVersion(raw.version.get()));
        }
        let features = Features {
            compat: raw.feature_compat.get(),
            ro_compat: raw.feature_ro_compat.get(),
            incompat: raw.feature_incompat.get(),
        };
        if !features.allow_reading() {
            return Err(SuperblockError::UnknownFeatures(features.incompat & !KNOWN_INCOMPAT));
        }
        let superblock = Self::from_raw(raw, features)?;
        if raw.block_address.get() != block_address || !superblock.places().contains(&block_address)
        {
            return Err(damaged("it belongs to another place"));
        }
        Ok(superblock)
    }

    /// Checks every field that can be wrong under a right checksum.
    fn from_raw(raw: &Raw, features: Features) -> Result<Self, FormatError> {
        let check = |holds: bool, problem: &str| {
            if holds { Ok(()) } else { Err(FormatError::new(STRUCTURE, problem)) }
        };
        check(raw.version.get() == VERSION, "version 0 does not exist")?;
        check(raw.block_size.get() == BLOCK_BYTES as u32, "the block size is not 4096")?;
        check(raw.node_size.get() == NODE_BYTES as u32, "the node size is not 16384")?;
        let geometry = Geometry::new(raw.total_blocks.get(), raw.log_blocks.get())?;
        check(
            raw.root_start_block.get() == geometry.root_start_block()
                && raw.root_slot_blocks.get() == geometry.root_slot_blocks()
                && raw.group_count.get() == geometry.group_count()
                && raw.bitmap_start_block.get() == geometry.bitmap_start_block()
                && raw.log_start_block.get() == geometry.log_start_block()
                && raw.root_bytes.get() == geometry.root_bytes(),
            "the places do not fit the volume's size",
        )?;
        let root = RootPointer {
            block: raw.root_block.get(),
            generation: raw.root_generation.get(),
            checksum: raw.root_checksum.get(),
        };
        check(geometry.root_slot_at(root.block).is_some(), "the root is in neither of its slots")?;
        let replay = ReplayPoint {
            position_blocks: raw.replay_position_blocks.get(),
            sequence: raw.replay_sequence.get(),
            prev_digest: raw.replay_prev_digest.get(),
        };
        check(replay.position_blocks < geometry.log_blocks(), "replay starts outside of the ring")?;
        let counters = [
            raw.generation,
            raw.root_generation,
            raw.log_epoch,
            raw.epoch_first_sequence,
            raw.replay_sequence,
            raw.durable_lsn,
            raw.durable_sequence,
            raw.replay_epoch,
        ];
        let in_range = counters.iter().all(|counter| counter.get() < MAX_COUNTER);
        check(in_range, "a counter is impossibly large")?;
        let length = raw.label.iter().position(|&byte| byte == 0).unwrap_or(MAX_LABEL_BYTES);
        let (text, padding) = raw.label.split_at(length);
        check(padding.iter().all(|&byte| byte == 0), "the label is not padded with zeros")?;
        let label = std::str::from_utf8(text)
            .map_err(|_| FormatError::new(STRUCTURE, "the label is not UTF-8"))?;
        let state = raw.state.get();
        Ok(Self {
            volume_id: raw.volume_id,
            generation: raw.generation.get(),
            geometry,
            features,
            created_ns: raw.created_ns.get(),
            label: label.to_owned(),
            root,
            log_epoch: raw.log_epoch.get(),
            epoch_first_sequence: raw.epoch_first_sequence.get(),
            replay_epoch: raw.replay_epoch.get(),
            replay,
            durable_lsn: raw.durable_lsn.get(),
            durable_sequence: raw.durable_sequence.get(),
            clean: state & STATE_CLEAN != 0,
            errors_seen: state & STATE_ERRORS != 0,
        })
    }
}

/// A place a superblock was looked for, and what was there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SuperblockPlace {
    /// The block.
    pub block: u64,
    /// Generation of the valid copy there, or why there is none.
    pub found: Result<u64, SuperblockError>,
}

/// The superblock of the volume on `device`, and what was found at each place looked at.
///
/// # Errors
/// [`Error::NotAVolume`], with one line that says what is there instead and what to do;
/// [`Error::Io`] if no copy could be read, or neither copy of a generation that may be the newest.
pub fn choose_superblock(device: &dyn Device) -> crate::Result<(Superblock, Vec<SuperblockPlace>)> {
    let device_blocks = device.info().size_bytes / BLOCK_BYTES_U64;
    let mut search = Search::new(device);
    search.look_at(Geometry::superblock_block(0));
    search.look_at(Geometry::superblock_block(1));
    // The mirrors are at the end of the volume, which a valid slot knows; else try the device's end.
    let total_blocks =
        search.best.as_ref().map_or(device_blocks, |best| best.geometry.total_blocks());
    if total_blocks >= 2 * TAIL_BLOCKS {
        let tail = total_blocks - TAIL_BLOCKS;
        search.look_at(tail + Geometry::superblock_block(0));
        search.look_at(tail + Geometry::superblock_block(1));
    }
    search.conclude(device_blocks)
}

struct Search<'a> {
    device: &'a dyn Device,
    block: AlignedBuf,
    places: Vec<SuperblockPlace>,
    best: Option<Superblock>,
    /// Places that could not be read, and why not the last one.
    unread: Vec<u64>,
    io_error: Option<Error>,
}

impl<'a> Search<'a> {
    fn new(device: &'a dyn Device) -> Self {
        let block = AlignedBuf::zeroed(BLOCK_BYTES);
        let (places, unread) = (Vec::new(), Vec::new());
        Self { device, block, places, best: None, unread, io_error: None }
    }

    fn look_at(&mut self, block: u64) {
        let device_bytes = self.device.info().size_bytes;
        let offset_bytes = block.saturating_mul(BLOCK_BYTES_U64);
        if offset_bytes.saturating_add(BLOCK_BYTES_U64) > device_bytes {
            return;
        }
        let read = self.device.read(offset_bytes, &mut [&mut self.block], IoClass::SyncRead);
        if let Err(error) = read {
            let unreadable = FormatError::new(STRUCTURE, error.reason.clone());
            self.places.push(SuperblockPlace { block, found: Err(unreadable.into()) });
            self.unread.push(block);
            self.io_error = Some(error.into());
            return;
        }
        let found = Superblock::decode(&self.block, block);
        let generation = found.as_ref().map(|superblock| superblock.generation);
        self.places.push(SuperblockPlace { block, found: generation.map_err(Clone::clone) });
        if let Ok(superblock) = found
            && self.best.as_ref().is_none_or(|best| best.generation < superblock.generation)
        {
            self.best = Some(superblock);
        }
    }

    /// The newest superblock may be where nothing could be read, and what the older one refers to may have been used again.
    fn is_in_doubt(&self, best: &Superblock) -> bool {
        let places = best.other_places();
        !best.has_neighbour(&self.places) && self.unread.iter().any(|block| places.contains(block))
    }

    fn conclude(self, device_blocks: u64) -> crate::Result<(Superblock, Vec<SuperblockPlace>)> {
        let refuse = |text: String| Err(Error::NotAVolume(text));
        let errors = || self.places.iter().filter_map(|place| place.found.as_ref().err());
        // Before anything else: a copy that a newer program wrote makes older ones stale.
        let newer = errors().find(|error| {
            matches!(error, SuperblockError::NewerVersion(_) | SuperblockError::UnknownFeatures(_))
        });
        if let Some(error) = newer {
            return refuse(format!("a Weir volume, but {error}: use a newer weir"));
        }
        let in_doubt = self.best.as_ref().is_some_and(|best| self.is_in_doubt(best));
        if let Some(superblock) = self.best {
            let total_blocks = superblock.geometry.total_blocks();
            if total_blocks > device_blocks {
                return refuse(format!(
                    "a Weir volume of {} bytes, but only {} bytes are there: it was truncated or \
                     copied in part; restore it whole",
                    total_blocks.saturating_mul(BLOCK_BYTES_U64),
                    device_blocks * BLOCK_BYTES_U64,
                ));
            }
            return match self.io_error {
                Some(error) if in_doubt => Err(error),
                _ => Ok((superblock, self.places)),
            };
        }
        if let Some(error) = self.io_error {
            return Err(error);
        }
        if let Some(SuperblockError::Damaged(problem)) =
            errors().find(|error| matches!(error, SuperblockError::Damaged(_)))
        {
            return refuse(format!(
                "a Weir volume without an intact superblock ({}): restore it from a copy",
                problem.problem
            ));
        }
        if device_blocks == 0 {
            return refuse(
                "not a Weir volume: it is smaller than 4096 bytes: check the path".into(),
            );
        }
        if errors().all(|error| *error == SuperblockError::Empty) {
            return refuse(
                "not a Weir volume: it is empty where one begins: check the path, or make one: weir create"
                    .into(),
            );
        }
        refuse("not a Weir volume: it holds something else: check the path".into())
    }
}

#[cfg(test)]
mod tests;
