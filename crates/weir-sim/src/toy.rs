//! A file system too simple to be wrong, and its broken brothers: the simulator is tested on them.
//!
//! One log record per block, chained by hashes; mounting replays the log into a [`Model`]. Operations
//! themselves are kept beside the device, and records name them by number.

use std::sync::Arc;

use weir::device::buffer::AlignedBuf;
use weir::device::{Device, IoClass};
use weir::sync::Mutex;

use crate::clock::SimClock;
use crate::device::SimDevice;
use crate::image::BLOCK_BYTES;
use crate::model::found::Found;
use crate::model::{Model, Outcome, errno};
use crate::op::{Commit, Hold, Op};
use crate::rng::mix;
use crate::system::{Session, Settings, System, SystemError};

/// What is wrong with a toy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToyBug {
    /// Nothing.
    None,
    /// A sync returns without a flush.
    AcknowledgeBeforeFlush,
    /// A torn record is taken for a whole one.
    AcceptTorn,
    /// A record is accepted though the one before it is not its predecessor.
    AcceptStale,
    /// Mounting does not make the replayed tail durable.
    NoFlushAtOpen,
    /// Replay leaves the last record out.
    ReplayTooShort,
    /// An unlink is not logged when the file is open.
    ForgetUnlink,
    /// Replay does not end on a full log.
    LoopInRecovery,
    /// Replay panics on a torn record.
    PanicOnTorn,
}

/// A toy file system.
pub struct Toy {
    /// What is wrong with it.
    pub bug: ToyBug,
    /// Every operation ever logged, by number.
    ops: Arc<Mutex<Vec<Op>>>,
}

impl Toy {
    /// A toy with this bug.
    pub fn new(bug: ToyBug) -> Self {
        Self { bug, ops: Arc::default() }
    }
}

/// A mounted toy.
pub struct ToySession {
    bug: ToyBug,
    device: Arc<SimDevice>,
    model: Model,
    next_block: u64,
    chain: u64,
    dirty: bool,
    ops: Arc<Mutex<Vec<Op>>>,
    ended: Vec<(u32, Result<(), SystemError>)>,
}

const MAGIC: u64 = 0x0059_4F54;

struct Record {
    op: u64,
    chain: u64,
    intact: bool,
}

fn io(error: &weir::device::DeviceError) -> SystemError {
    SystemError::new(errno::EIO, error.to_string())
}

fn word(buffer: &[u8], at: usize) -> u64 {
    buffer[at..at + 8].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

fn read_record(device: &SimDevice, block: u64) -> Result<Option<Record>, SystemError> {
    let mut buffer = AlignedBuf::zeroed(BLOCK_BYTES);
    device
        .read(block * BLOCK_BYTES as u64, &mut [&mut buffer], IoClass::SyncRead)
        .map_err(|error| io(&error))?;
    if word(&buffer, 0) != MAGIC {
        return Ok(None);
    }
    // The operation's number is in the last sector, the check in the first: a torn record can be told.
    let (op, chain) = (word(&buffer, 4088), word(&buffer, 8));
    let intact = word(&buffer, 16) == mix(op ^ chain);
    Ok(Some(Record { op, chain, intact }))
}

impl ToySession {
    fn append(&mut self, op: &Op) -> Result<(), SystemError> {
        if self.next_block * BLOCK_BYTES as u64 >= self.device.info().size_bytes {
            return Err(SystemError::new(errno::ENOSPC, "log full"));
        }
        let mut ops = self.ops.lock();
        ops.push(op.clone());
        // Never 0: a record's sectors differ from those of an empty block.
        let number = ops.len() as u64;
        drop(ops);
        let chain = mix(self.chain ^ number);
        let mut buffer = AlignedBuf::zeroed(BLOCK_BYTES);
        for (at, value) in [(0, MAGIC), (8, chain), (16, mix(number ^ chain)), (4088, number)] {
            buffer[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        let offset = self.next_block * BLOCK_BYTES as u64;
        self.device.write(offset, &[&buffer], IoClass::Log, false).map_err(|error| io(&error))?;
        self.next_block += 1;
        self.chain = chain;
        self.dirty = true;
        Ok(())
    }

    fn sync(&mut self) -> Result<(), SystemError> {
        if self.dirty && self.bug != ToyBug::AcknowledgeBeforeFlush {
            self.device.flush().map_err(|error| io(&error))?;
        }
        self.dirty = false;
        Ok(())
    }
}

impl Session for ToySession {
    fn apply(&mut self, op: &Op) -> Result<Outcome, SystemError> {
        let mut next = self.model.clone();
        let outcome =
            next.apply(op, None).map_err(|number| SystemError::new(number, "the model says so"))?;
        match op {
            Op::Sync(_) | Op::Checkpoint => self.sync()?,
            Op::Submit { ticket, hold, .. } => {
                let result = self.sync();
                if *hold != Hold::Drop {
                    self.ended.push((*ticket, result));
                }
            }
            Op::Batch { commit, .. } => {
                self.append(op)?;
                match commit {
                    Commit::Relaxed => {}
                    Commit::Sync => self.sync()?,
                    Commit::Async { ticket, hold } => {
                        let result = self.sync();
                        if *hold != Hold::Drop {
                            self.ended.push((*ticket, result));
                        }
                    }
                }
            }
            Op::Unlink { .. }
                if self.bug == ToyBug::ForgetUnlink && !self.model.slots().is_empty() => {}
            op if op.is_neutral() => {}
            op => self.append(op)?,
        }
        self.model = next;
        Ok(outcome)
    }

    fn ended(&mut self) -> Vec<(u32, Result<(), SystemError>)> {
        std::mem::take(&mut self.ended)
    }

    fn found(&mut self) -> Result<Found, SystemError> {
        Ok(Found::from_model(&self.model))
    }

    fn close(self) -> Result<Option<u64>, SystemError> {
        self.device.flush().map_err(|error| io(&error))?;
        Ok(None)
    }
}

impl System for Toy {
    type Session = ToySession;

    /// Its records do not say where they belong.
    fn notices_lies(&self) -> bool {
        false
    }

    /// Nobody tells it the time.
    fn has_times(&self) -> bool {
        false
    }

    /// Each operation writes its record itself.
    fn overlaps(&self) -> bool {
        false
    }

    fn create(
        &self,
        device: &Arc<SimDevice>,
        _clock: &Arc<SimClock>,
        _settings: &Settings,
    ) -> Result<(), SystemError> {
        let zeros = AlignedBuf::zeroed(BLOCK_BYTES);
        device.write(0, &[&zeros], IoClass::Log, false).map_err(|error| io(&error))?;
        device.flush().map_err(|error| io(&error))
    }

    fn open(
        &self,
        device: &Arc<SimDevice>,
        _clock: &Arc<SimClock>,
        _settings: &Settings,
    ) -> Result<ToySession, SystemError> {
        let mut accepted = Vec::new();
        let (mut chain, mut block) = (0, 0);
        let blocks = device.info().size_bytes / BLOCK_BYTES as u64;
        while block < blocks {
            let Some(record) = read_record(device, block)? else { break };
            let follows = record.chain == mix(chain ^ record.op);
            assert!(record.intact || self.bug != ToyBug::PanicOnTorn, "a torn record");
            let accepted_anyway = match self.bug {
                ToyBug::AcceptTorn => !record.intact,
                ToyBug::AcceptStale => record.intact,
                _ => false,
            };
            if !(record.intact && follows || accepted_anyway) {
                break;
            }
            accepted.push(record.op);
            chain = record.chain;
            block += 1;
            if self.bug == ToyBug::LoopInRecovery && block == 3 {
                block = 0;
                chain = 0;
            }
        }
        if self.bug == ToyBug::ReplayTooShort {
            accepted.pop();
        }
        let mut model = Model::new();
        let ops = self.ops.lock();
        for op in accepted.iter().filter_map(|number| ops.get((*number as usize).wrapping_sub(1))) {
            // An operation that fails in replay failed in life as well, or the toy is broken and the
            // comparison will say so.
            let _ = model.apply(op, None);
        }
        drop(ops);
        model.close_all();
        let mut session = ToySession {
            bug: self.bug,
            device: Arc::clone(device),
            model,
            next_block: block,
            chain,
            dirty: true,
            ops: Arc::clone(&self.ops),
            ended: Vec::new(),
        };
        if self.bug != ToyBug::NoFlushAtOpen {
            device.flush().map_err(|error| io(&error))?;
            session.dirty = false;
        }
        Ok(session)
    }

    fn check(&self, _device: &Arc<SimDevice>) -> Result<Vec<String>, SystemError> {
        Ok(Vec::new())
    }
}
