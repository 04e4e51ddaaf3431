//! The simulated disk: [`weir::device::Device`] over an [`Image`], with a volatile cache, planned
//! faults and a record of everything that happened.
//!
//! It is deterministic: the same calls give the same answers, errors and record. The record
//! ([`SimDevice::take_events`]) is what the explorer makes crash states from, so a workload
//! runs once however many of its crash states are examined.
//!
//! Requests that are *submitted* complete at once, or, with [`Completion::Queued`], when the driver
//! polls, in a seeded order; until then they are in flight: a crash may keep any part of a
//! write, and a flush does not cover it. Those that *begin* complete when they are waited for.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use weir::device::request::Underway;
use weir::device::{
    Buffers, Device, DeviceError, DeviceInfo, DeviceResult, IoClass, OnDone, Operation, Request,
};
use weir::sync::{Mutex, MutexGuard};

use crate::disk::{DiskState, Event, Write};
use crate::fault::{FaultKind, FaultPlan};
use crate::image::{BLOCK_BYTES, Block, BlockRef, Image};
use crate::rng::Rng;

const BLOCK_BYTES_U64: u64 = BLOCK_BYTES as u64;

/// When submitted requests complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completion {
    /// Before `submit` returns.
    Immediate,
    /// At [`SimDevice::poll`], in an order drawn from this seed.
    Queued(u64),
}

/// What kind of disk it is.
// Independent facts, not a state.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug, Clone)]
pub struct DeviceConfig {
    /// Completed writes are lost in a power cut unless flushed.
    pub volatile_cache: bool,
    /// Forced unit access works.
    pub fua: bool,
    /// Discards are understood.
    pub discard: bool,
    /// When submitted requests complete.
    pub completion: Completion,
    /// What goes wrong.
    pub faults: FaultPlan,
    /// Something went wrong before: what is on it may be damaged.
    pub is_struck: bool,
    /// Draws how much of a write or flush that fails has happened all the same.
    pub seed: u64,
    /// More calls than this are taken for an endless loop of the engine: the device panics.
    pub call_limit: u64,
    /// How many calls the trace keeps.
    pub trace_length: usize,
}

impl Default for DeviceConfig {
    fn default() -> Self {
        Self {
            volatile_cache: true,
            fua: false,
            discard: false,
            completion: Completion::Immediate,
            faults: FaultPlan::default(),
            is_struck: false,
            seed: 0,
            call_limit: 50_000,
            trace_length: 100,
        }
    }
}

/// Name of the trace entries that separate operations of the workload.
const MARK: &str = "mark";

/// One call, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceEntry {
    /// Number of the call, from 1.
    pub call: u64,
    /// read, write, flush, discard, or `complete` for a queued request's end.
    pub operation: &'static str,
    /// The blocks touched.
    pub blocks: Range<u64>,
    /// Its class, where it has one.
    pub class: Option<IoClass>,
    /// The fault that struck it.
    pub fault: Option<FaultKind>,
}

impl fmt::Display for TraceEntry {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.operation == MARK {
            return write!(formatter, "-- operation {}", self.blocks.start);
        }
        write!(formatter, "#{} {}", self.call, self.operation)?;
        if !self.blocks.is_empty() {
            write!(formatter, " blocks {}..{}", self.blocks.start, self.blocks.end)?;
        }
        if let Some(class) = self.class {
            write!(formatter, " {class:?}")?;
        }
        if let Some(fault) = self.fault {
            write!(formatter, " FAULT {fault:?}")?;
        }
        Ok(())
    }
}

/// See the module's head.
pub struct SimDevice {
    config: DeviceConfig,
    size_bytes: u64,
    /// Calls are numbered on from the writes that were in the cache at the start.
    first_call: u64,
    state: Mutex<State>,
}

struct State {
    /// What reads give.
    view: Image,
    disk: DiskState,
    events: Vec<Event>,
    trace: VecDeque<TraceEntry>,
    calls: u64,
    faults: FaultPlan,
    /// Content before the last write, kept only when stale reads are planned.
    previous: BTreeMap<u64, BlockRef>,
    keep_previous: bool,
    queue: Vec<Queued>,
    /// What somebody does during one of the next calls: that many writes and flushes go by before.
    meanwhile: Option<(u32, Meanwhile)>,
    /// Somebody goes on amid what somebody else does.
    is_amid: bool,
    /// Calls struck then, or while they were to be under way then.
    struck_amid: u64,
    rng: Rng,
    /// Asks the engine how much is durable, and what it last said.
    durable_lsn: Option<LsnProbe>,
    known_lsn: u64,
}

/// What somebody does while a call is under way.
pub type Meanwhile = Box<dyn FnOnce() + Send>;

/// Answers the engine's durable LSN; called in the midst of its device calls.
pub type LsnProbe = Box<dyn Fn() -> u64 + Send>;

struct Queued {
    call: u64,
    request: Request,
    on_done: OnDone,
    /// The outcome was decided at submission.
    result: DeviceResult<()>,
}

impl fmt::Debug for SimDevice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("SimDevice")
            .field("size_bytes", &self.size_bytes)
            .finish_non_exhaustive()
    }
}

impl SimDevice {
    /// A disk that holds `image`, all of it durable.
    pub fn new(image: Image, config: DeviceConfig) -> Self {
        Self::with_disk(DiskState::new(image), config)
    }

    /// A disk that goes on with a filled cache: the host stayed up and only the program died. Its
    /// writes in flight complete.
    pub fn with_disk(mut disk: DiskState, config: DeviceConfig) -> Self {
        disk.complete_all();
        let image = disk.view();
        let first_call = disk.pending().map(|write| write.id).max().unwrap_or(0);
        let seed = match config.completion {
            Completion::Immediate => config.seed,
            Completion::Queued(seed) => config.seed ^ seed,
        };
        let state = State {
            view: image.clone(),
            disk,
            events: Vec::new(),
            trace: VecDeque::new(),
            calls: first_call,
            faults: config.faults.clone(),
            previous: BTreeMap::new(),
            keep_previous: !config.faults.is_empty(),
            queue: Vec::new(),
            meanwhile: None,
            is_amid: false,
            struck_amid: 0,
            rng: Rng::derived(seed, 0xD1),
            durable_lsn: None,
            known_lsn: 0,
        };
        let size_bytes = image.blocks() * BLOCK_BYTES_U64;
        Self { size_bytes, first_call, config, state: Mutex::new(state) }
    }

    /// Notes in the trace that operation `number` of the workload begins.
    pub fn mark(&self, number: u64) {
        let mut state = self.state.lock();
        let blocks = number..number;
        let call = state.calls;
        let entry = TraceEntry { call, operation: MARK, blocks, class: None, fault: None };
        state.record(entry, self.config.trace_length);
    }

    /// Everything that happened since the last call of this.
    pub fn take_events(&self) -> Vec<Event> {
        let mut state = self.state.lock();
        state.probe_lsn();
        std::mem::take(&mut state.events)
    }

    /// From now on the record says at which point the engine claimed how much to be durable.
    pub fn watch_lsn(&self, probe: Option<LsnProbe>) {
        let before = {
            let mut state = self.state.lock();
            state.known_lsn = probe.as_ref().map_or(0, |probe| probe());
            std::mem::replace(&mut state.durable_lsn, probe)
        };
        // It may hold the engine, which may have something to say to the device.
        drop(before);
    }

    /// What the engine claims to be durable now, if it is watched.
    pub fn claimed_lsn(&self) -> Option<u64> {
        self.state.lock().durable_lsn.as_ref().map(|probe| probe())
    }

    /// During the write or flush that comes after `calls` others, `meanwhile` is run: the call has begun and not
    /// ended. Answers what was planned before and did not come to pass.
    pub fn plan_meanwhile(&self, planned: Option<(u32, Meanwhile)>) -> Option<Meanwhile> {
        let before = std::mem::replace(&mut self.state.lock().meanwhile, planned);
        before.map(|(_, meanwhile)| meanwhile)
    }

    /// Somebody begins amid what somebody else does.
    pub fn begin_amid(&self) {
        self.state.lock().is_amid = true;
    }

    /// Who has begun so has come to an end.
    pub fn end_amid(&self) {
        self.state.lock().is_amid = false;
    }

    /// Runs what is planned for this call, without the lock.
    fn let_others_go_on<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let due = state.meanwhile.take_if(|(calls, _)| {
            let is_due = *calls == 0;
            *calls = calls.saturating_sub(1);
            is_due
        });
        let Some((_, meanwhile)) = due else { return state };
        drop(state);
        meanwhile();
        self.state.lock()
    }

    /// Notes in the record that one of several overlapping operations has begun, or returned.
    pub fn note(&self, event: Event) {
        let mut state = self.state.lock();
        state.probe_lsn();
        state.events.push(event);
    }

    /// Notes in the record that a ticket has ended.
    pub fn note_ended(&self, ticket: u32) {
        let mut state = self.state.lock();
        state.probe_lsn();
        state.events.push(Event::Ended(ticket));
    }

    /// What is durable and what is pending now.
    pub fn disk_state(&self) -> DiskState {
        self.state.lock().disk.clone()
    }

    /// What reads give now.
    pub fn view(&self) -> Image {
        self.state.lock().view.clone()
    }

    /// Number of calls so far.
    pub fn calls(&self) -> u64 {
        self.state.lock().calls
    }

    /// The latest calls, oldest first.
    pub fn trace(&self) -> Vec<TraceEntry> {
        self.state.lock().trace.iter().cloned().collect()
    }

    /// Something is planned to go wrong, or went wrong before.
    pub fn has_faults(&self) -> bool {
        self.config.is_struck || !self.state.lock().faults.is_empty()
    }

    /// How many calls a planned fault has struck.
    pub fn faults_struck(&self) -> u64 {
        self.state.lock().faults.struck()
    }

    /// How many of these while somebody went on amid a call, or were that call.
    pub fn faults_struck_amid(&self) -> u64 {
        self.state.lock().struck_amid
    }

    /// Replaces what is planned to go wrong; answers what was planned before.
    pub fn set_faults(&self, faults: FaultPlan) -> FaultPlan {
        let mut state = self.state.lock();
        state.keep_previous |= !faults.is_empty();
        std::mem::replace(&mut state.faults, faults)
    }

    /// Completes one queued request, chosen by the seed; false when there is none.
    pub fn poll(&self) -> bool {
        let mut state = self.state.lock();
        let count = state.queue.len();
        if count == 0 {
            return false;
        }
        let index = state.rng.index(count);
        let mut queued = state.queue.remove(index);
        let entry = TraceEntry {
            call: queued.call,
            operation: "complete",
            blocks: 0..0,
            class: None,
            fault: None,
        };
        state.record(entry, self.config.trace_length);
        if queued.result.is_ok() {
            queued.result = self.finish(&mut state, queued.call, &mut queued.request);
        }
        drop(state);
        (queued.on_done)(queued.result, queued.request.buffers);
        true
    }

    /// Number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.state.lock().queue.len()
    }

    /// Checks a call's range, counts and records it, and finds out which fault strikes it.
    fn enter(
        &self,
        state: &mut State,
        operation: &'static str,
        offset_bytes: u64,
        length_bytes: u64,
        class: Option<IoClass>,
    ) -> DeviceResult<(u64, Option<FaultKind>)> {
        state.calls += 1;
        crate::turns::get_ahead();
        assert!(
            state.calls <= self.first_call + self.config.call_limit,
            "more than {} device calls: the engine seems to loop",
            self.config.call_limit
        );
        let refuse = |reason: &str| Err(error(operation, offset_bytes, length_bytes, reason));
        if !offset_bytes.is_multiple_of(BLOCK_BYTES_U64)
            || !length_bytes.is_multiple_of(BLOCK_BYTES_U64)
        {
            return refuse("not a multiple of 4096 bytes");
        }
        if offset_bytes.checked_add(length_bytes).is_none_or(|end| end > self.size_bytes) {
            return refuse("beyond the end of the device");
        }
        let first = offset_bytes / BLOCK_BYTES_U64;
        let blocks = first..first + length_bytes / BLOCK_BYTES_U64;
        let is_due = state.meanwhile.as_ref().is_some_and(|(calls, _)| *calls == 0);
        let is_amid = state.is_amid || is_due && matches!(operation, "write" | "flush");
        let fault = state.faults.strike(operation, &blocks, class, is_amid);
        state.struck_amid += u64::from(fault.is_some() && is_amid);
        let call = state.calls;
        let entry = TraceEntry { call, operation, blocks, class, fault };
        state.record(entry, self.config.trace_length);
        Ok((call, fault))
    }

    /// A write of `blocks` begins: decides its outcome, and puts it among the pending.
    fn begin_write(
        state: &mut State,
        call: u64,
        offset_bytes: u64,
        mut blocks: Vec<BlockRef>,
        class: IoClass,
        fault: Option<FaultKind>,
    ) -> DeviceResult<()> {
        let mut first_block = offset_bytes / BLOCK_BYTES_U64;
        let length_bytes = blocks.len() as u64 * BLOCK_BYTES_U64;
        let mut result = Ok(());
        match fault {
            Some(FaultKind::WriteNoSpace) => {
                let mut failure =
                    error("write", offset_bytes, length_bytes, "No space left on device");
                failure.no_space = true;
                return Err(failure);
            }
            Some(FaultKind::LostWrite) => return Ok(()),
            Some(FaultKind::MisdirectedWrite { distance_blocks }) => {
                let last = state.view.blocks().saturating_sub(blocks.len() as u64);
                first_block = first_block.saturating_add_signed(distance_blocks).min(last);
            }
            Some(FaultKind::WriteError) => {
                // Its beginning, or its end.
                let kept = state.rng.index(blocks.len() + 1);
                if state.rng.one_in(3) {
                    let gone = blocks.len() - kept;
                    blocks.drain(..gone);
                    first_block += gone as u64;
                } else {
                    blocks.truncate(kept);
                }
                result = Err(error("write", offset_bytes, length_bytes, "Input/output error"));
            }
            _ => {}
        }
        let write = Arc::new(Write { id: call, first_block, blocks, class });
        state.log_event(Event::Write(Arc::clone(&write)));
        if result.is_err() {
            // The part that reached the cache is there to stay.
            state.complete_write(call);
        }
        result
    }

    /// A queued request ends well.
    fn finish(&self, state: &mut State, call: u64, request: &mut Request) -> DeviceResult<()> {
        match request.operation {
            Operation::Write { fua } => {
                state.complete_write(call);
                if fua && self.config.fua || !self.config.volatile_cache {
                    state.log_event(Event::Durable(call));
                }
                Ok(())
            }
            Operation::Read => {
                let offset_bytes = request.offset_bytes;
                match &mut request.buffers {
                    Buffers::Owned(buffer) => {
                        self.read_locked(state, offset_bytes, &mut [buffer], request.class)
                    }
                    Buffers::Fill(pages) => {
                        let mut slices: Vec<&mut [u8]> =
                            pages.iter_mut().map(|page| &mut page[..]).collect();
                        self.read_locked(state, offset_bytes, &mut slices, request.class)
                    }
                    Buffers::Pages(_) | Buffers::Framed(..) | Buffers::None => {
                        Err(error("read", offset_bytes, 0, "no memory to read into"))
                    }
                }
            }
            Operation::Flush => self.flush_locked(state),
            Operation::Discard { length_bytes } => {
                self.discard_locked(state, request.offset_bytes, length_bytes)
            }
        }
    }

    fn read_locked(
        &self,
        state: &mut State,
        offset_bytes: u64,
        buffers: &mut [&mut [u8]],
        class: IoClass,
    ) -> DeviceResult<()> {
        let length_bytes = buffers.iter().map(|buffer| buffer.len() as u64).sum();
        check_buffers("read", offset_bytes, buffers.iter().map(|buffer| &**buffer))?;
        let (_, fault) = self.enter(state, "read", offset_bytes, length_bytes, Some(class))?;
        let mut first = offset_bytes / BLOCK_BYTES_U64;
        match fault {
            Some(FaultKind::ReadError) => {
                return Err(error("read", offset_bytes, length_bytes, "Input/output error"));
            }
            Some(FaultKind::BitRot { bit }) => state.rot(first, bit),
            Some(FaultKind::MisdirectedRead { distance_blocks }) => {
                let last = state.view.blocks().saturating_sub(length_bytes / BLOCK_BYTES_U64);
                first = first.saturating_add_signed(distance_blocks).min(last);
            }
            _ => {}
        }
        let stale = fault == Some(FaultKind::StaleRead);
        let parts = buffers.iter_mut().flat_map(|buffer| buffer.chunks_exact_mut(BLOCK_BYTES));
        for (index, part) in (first..).zip(parts) {
            let previous = if stale { state.previous.get(&index) } else { None };
            part.copy_from_slice(previous.unwrap_or_else(|| state.view.block(index)).bytes());
        }
        Ok(())
    }

    fn flush_now(&self) -> DeviceResult<()> {
        let mut state = self.state.lock();
        let (_, fault) = self.enter(&mut state, "flush", 0, 0, None)?;
        let covers = state.disk.completed();
        let mut state = self.let_others_go_on(state);
        Self::end_flush(&mut state, covers, fault)
    }

    fn flush_locked(&self, state: &mut State) -> DeviceResult<()> {
        let (_, fault) = self.enter(state, "flush", 0, 0, None)?;
        let covers = state.disk.completed();
        Self::end_flush(state, covers, fault)
    }

    fn end_flush(
        state: &mut State,
        covers: Vec<u64>,
        fault: Option<FaultKind>,
    ) -> DeviceResult<()> {
        if fault != Some(FaultKind::FlushError) {
            state.log_event(Event::Flush { covers });
            return Ok(());
        }
        let (mut durable, mut dropped) = (Vec::new(), Vec::new());
        for id in covers {
            match state.rng.below(3) {
                0 => durable.push(id),
                1 => dropped.push(id),
                _ => {}
            }
        }
        state.log_event(Event::FlushFailed { durable, dropped });
        state.view = state.disk.view();
        Err(error("flush", 0, 0, "Input/output error"))
    }

    fn discard_locked(
        &self,
        state: &mut State,
        offset_bytes: u64,
        length_bytes: u64,
    ) -> DeviceResult<()> {
        self.enter(state, "discard", offset_bytes, length_bytes, None)?;
        if self.config.discard {
            let first_block = offset_bytes / BLOCK_BYTES_U64;
            let blocks = length_bytes / BLOCK_BYTES_U64;
            state.log_event(Event::Discard { first_block, blocks });
            state.view = state.disk.view();
        }
        Ok(())
    }

    fn write_blocking(
        &self,
        offset_bytes: u64,
        buffers: &[&[u8]],
        class: IoClass,
        fua: bool,
        queued: bool,
    ) -> (u64, DeviceResult<()>) {
        let mut state = self.state.lock();
        let length_bytes = buffers.iter().map(|buffer| buffer.len() as u64).sum();
        if let Err(failure) = check_buffers("write", offset_bytes, buffers.iter().copied()) {
            return (0, Err(failure));
        }
        let entered = self.enter(&mut state, "write", offset_bytes, length_bytes, Some(class));
        let (call, fault) = match entered {
            Ok(entered) => entered,
            Err(failure) => return (0, Err(failure)),
        };
        let blocks =
            buffers.iter().flat_map(|buffer| buffer.chunks_exact(BLOCK_BYTES)).map(Block::new);
        let blocks = blocks.collect();
        let result = Self::begin_write(&mut state, call, offset_bytes, blocks, class, fault);
        let mut state = self.let_others_go_on(state);
        if result.is_ok() && !queued {
            state.complete_write(call);
            if fua && self.config.fua || !self.config.volatile_cache {
                state.log_event(Event::Durable(call));
            }
        }
        (call, result)
    }
}

impl State {
    fn record(&mut self, entry: TraceEntry, length: usize) {
        if self.trace.len() >= length {
            self.trace.pop_front();
        }
        self.trace.push_back(entry);
    }

    fn probe_lsn(&mut self) {
        let Some(probe) = &self.durable_lsn else { return };
        let lsn = probe();
        if lsn > self.known_lsn {
            self.known_lsn = lsn;
            self.events.push(Event::DurableLsn(lsn));
        }
    }

    fn log_event(&mut self, event: Event) {
        self.probe_lsn();
        self.disk.apply(&event);
        self.events.push(event);
    }

    fn complete_write(&mut self, call: u64) {
        let Some(write) = self.disk.pending().find(|write| write.id == call).map(Arc::clone) else {
            return;
        };
        for (index, block) in (write.first_block..).zip(&write.blocks) {
            if self.keep_previous {
                self.previous.insert(index, Arc::clone(self.view.block(index)));
            }
            self.view.set_block(index, Arc::clone(block));
        }
        self.log_event(Event::Complete(call));
    }

    /// One bit of the medium changes, unless a newer version of the block is still in the cache.
    fn rot(&mut self, block: u64, bit: u32) {
        let mut bytes = *self.view.block(block).bytes();
        bytes[bit as usize / 8 % BLOCK_BYTES] ^= 1 << (bit % 8);
        let content = Block::new(&bytes);
        self.log_event(Event::Rot { block, content });
        self.view = self.disk.view();
    }
}

fn error(
    operation: &'static str,
    offset_bytes: u64,
    length_bytes: u64,
    reason: &str,
) -> DeviceError {
    DeviceError {
        operation,
        offset_bytes,
        length_bytes,
        reason: reason.to_owned(),
        no_space: false,
    }
}

/// Buffers must be aligned and made of whole blocks, as `O_DIRECT` wants them.
fn check_buffers<'a>(
    operation: &'static str,
    offset_bytes: u64,
    mut buffers: impl Iterator<Item = &'a [u8]>,
) -> DeviceResult<()> {
    let aligned = |buffer: &[u8]| {
        buffer.as_ptr().addr().is_multiple_of(BLOCK_BYTES)
            && buffer.len().is_multiple_of(BLOCK_BYTES)
    };
    if buffers.all(aligned) {
        Ok(())
    } else {
        Err(error(operation, offset_bytes, 0, "a buffer is not aligned to 4096 bytes"))
    }
}

impl Device for SimDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            size_bytes: self.size_bytes,
            fua: self.config.fua,
            volatile_cache: self.config.volatile_cache,
            discard: self.config.discard,
        }
    }

    fn read(
        &self,
        offset_bytes: u64,
        buffers: &mut [&mut [u8]],
        class: IoClass,
    ) -> DeviceResult<()> {
        self.read_locked(&mut self.state.lock(), offset_bytes, buffers, class)
    }

    fn write(
        &self,
        offset_bytes: u64,
        buffers: &[&[u8]],
        class: IoClass,
        fua: bool,
    ) -> DeviceResult<()> {
        self.write_blocking(offset_bytes, buffers, class, fua, false).1
    }

    fn flush(&self) -> DeviceResult<()> {
        self.flush_now()
    }

    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> DeviceResult<()> {
        self.discard_locked(&mut self.state.lock(), offset_bytes, length_bytes)
    }

    /// What begins so is in flight, and shows in reads and in a flush only when it was waited for.
    fn begin_all(self: Arc<Self>, requests: Vec<Request>) -> Underway {
        let begin = |request: Request| {
            let (call, result) = match request.operation {
                Operation::Write { fua } => {
                    let (slices, offset_bytes) = (request.buffers.slices(), request.offset_bytes);
                    self.write_blocking(offset_bytes, &slices, request.class, fua, true)
                }
                _ => (self.calls(), Ok(())),
            };
            (call, result, request)
        };
        let begun: Vec<_> = requests.into_iter().map(begin).collect();
        let device = Arc::clone(&self);
        let end = move |(call, result, mut request): (u64, DeviceResult<()>, Request)| {
            let finish = |()| device.finish(&mut device.state.lock(), call, &mut request);
            (result.and_then(finish), request.buffers)
        };
        Underway::new(move || begun.into_iter().map(end).collect())
    }

    fn submit(&self, mut request: Request, on_done: OnDone) {
        let queued = matches!(self.config.completion, Completion::Queued(_));
        let (call, result) = match (request.operation, &request.buffers) {
            (
                Operation::Write { fua },
                buffers @ (Buffers::Owned(_) | Buffers::Pages(_) | Buffers::Framed(..)),
            ) => {
                let slices = buffers.slices();
                self.write_blocking(request.offset_bytes, &slices, request.class, fua, queued)
            }
            (Operation::Write { .. }, _) => {
                (0, Err(error("write", request.offset_bytes, 0, "no memory to write from")))
            }
            _ if queued => (self.calls(), Ok(())),
            _ => (0, self.finish(&mut self.state.lock(), 0, &mut request)),
        };
        if queued {
            self.state.lock().queue.push(Queued { call, request, on_done, result });
        } else {
            on_done(result, request.buffers);
        }
    }
}
