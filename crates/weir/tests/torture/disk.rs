//! A disk in memory that fails, takes its time, and forgets in a power cut what was not flushed.
//!
//! *Now* is what a read gives, *durable* what a flush has covered. A write is pending from its begin to the end of a flush that began after it
//! ended; a power cut leaves of every block the durable content or that of any pending write. When the disk has died, everything on it
//! fails: what a call answered before that was answered before the crash.
//!
//! Locks: `platter`, then `dice`. Both are leaves, and nobody sleeps with one in hand.

use crate::common::Random;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use weir::device::request::{check_range, check_transfer, perform};
use weir::device::{Device, DeviceError, DeviceInfo, DeviceResult, IoClass, OnDone, Request};

const BLOCK_BYTES: usize = 4096;
const SECTOR_BYTES: usize = 512;
/// Threads that perform what was submitted.
const SERVERS: u32 = 3;

type Block = Arc<[u8]>;

thread_local! {
    /// Reads of this thread do not fail, though others do: it looks at what there is.
    static SEES_ALL: Cell<bool> = const { Cell::new(false) };
}

/// Does `body`, in which reads by the calling thread do not fail unless the disk is dead.
pub fn seeing_all<R>(body: impl FnOnce() -> R) -> R {
    SEES_ALL.set(true);
    let result = body();
    SEES_ALL.set(false);
    result
}

/// What the disk does for a while. Chances are per thousand.
#[derive(Debug, Default)]
pub struct Weather {
    pub failing_reads: AtomicU32,
    pub failing_writes: AtomicU32,
    pub failing_flushes: AtomicU32,
    /// The host has no room for blocks that were never written.
    pub host_is_full: AtomicBool,
    pub slow: AtomicU32,
    /// A request takes so long that others overtake it by far.
    pub stuck: AtomicU32,
}

/// How a disk comes to an end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The power fails: any part of what is pending is lost.
    PowerCut,
    /// The process is killed, and the disk goes on with what it has.
    Killed,
    /// Nobody uses it any more.
    AtRest,
}

struct Pending {
    first: usize,
    /// `None`: something newer of this block is durable.
    blocks: Vec<Option<Block>>,
    /// When it ended, by a count; `None`: it is under way.
    ended: Option<u64>,
}

#[derive(Default)]
struct Platter {
    now: Vec<Block>,
    durable: Vec<Block>,
    /// Has been written: the host has a block for it.
    has_host_block: Vec<bool>,
    pending: BTreeMap<u64, Pending>,
    begun: u64,
    ended: u64,
    is_dead: bool,
}

pub struct Core {
    info: DeviceInfo,
    platter: Mutex<Platter>,
    dice: Mutex<Random>,
    pub weather: Weather,
    is_dead: AtomicBool,
    failed_reads: AtomicU64,
    failed_others: AtomicU64,
}

/// The disk as the engine has it: what was submitted is performed by threads of its own.
pub struct Disk {
    pub core: Arc<Core>,
    queue: Mutex<Sender<(Request, OnDone)>>,
}

impl Disk {
    /// An empty one.
    pub fn new(size_bytes: u64, dice: &mut Random) -> Arc<Self> {
        let count = size_bytes as usize / BLOCK_BYTES;
        let zeros: Block = Arc::from([0; BLOCK_BYTES]);
        let platter = Platter {
            now: vec![zeros.clone(); count],
            durable: vec![zeros; count],
            has_host_block: vec![false; count],
            ..Platter::default()
        };
        Self::with(size_bytes, platter, dice)
    }

    fn with(size_bytes: u64, platter: Platter, dice: &mut Random) -> Arc<Self> {
        let fua = dice.below(4) == 0;
        let discard = dice.below(2) == 0;
        let core = Arc::new(Core {
            info: DeviceInfo { size_bytes, fua, volatile_cache: true, discard },
            platter: Mutex::new(platter),
            dice: Mutex::new(Random::seeded(dice.below(u64::MAX))),
            weather: Weather::default(),
            is_dead: AtomicBool::new(false),
            failed_reads: AtomicU64::new(0),
            failed_others: AtomicU64::new(0),
        });
        let (sender, receiver) = channel();
        let receiver = Arc::new(Mutex::new(receiver));
        for number in 0..SERVERS {
            let (core, receiver) = (core.clone(), receiver.clone());
            let serve = move || serve(&core, &receiver);
            let named = std::thread::Builder::new().name(format!("disk-{number}"));
            named.spawn(serve).expect("a thread");
        }
        Arc::new(Self { core, queue: Mutex::new(sender) })
    }

    /// How many there have been.
    pub fn writes(&self) -> u64 {
        lock(&self.core.platter).begun
    }

    /// Ends this disk at this moment, and makes another of what is on it.
    pub fn end(&self, end: End, dice: &mut Random) -> Arc<Self> {
        let mut platter = lock(&self.core.platter);
        platter.is_dead = true;
        self.core.is_dead.store(true, Ordering::SeqCst);
        let left = platter.left(end, dice);
        drop(platter);
        Self::with(self.core.info.size_bytes, left, dice)
    }
}

fn serve(core: &Core, queue: &Mutex<Receiver<(Request, OnDone)>>) {
    loop {
        // Whoever has the lock waits for the next request, and others for the lock.
        let next = lock(queue).recv();
        let Ok((request, on_done)) = next else { return };
        let (result, buffers) = perform(core, request);
        on_done(result, buffers);
    }
}

impl Platter {
    fn left(&self, end: End, dice: &mut Random) -> Self {
        let mut left = Self {
            now: self.now.clone(),
            durable: self.durable.clone(),
            has_host_block: self.has_host_block.clone(),
            begun: self.begun,
            ended: self.ended,
            ..Self::default()
        };
        match end {
            End::AtRest => assert!(self.pending.is_empty(), "writes are pending after a close"),
            End::Killed => {
                for (id, pending) in &self.pending {
                    let copy = Pending {
                        blocks: pending.blocks.clone(),
                        ended: pending.ended,
                        ..*pending
                    };
                    left.pending.insert(*id, copy);
                    // What was under way ends, or never gets there.
                    match pending.ended {
                        None if dice.below(2) == 0 => left.end_write(*id, false),
                        None => drop(left.pending.remove(id)),
                        Some(_) => {}
                    }
                }
            }
            End::PowerCut => {
                let manner = dice.below(4);
                for pending in self.pending.values() {
                    let is_kept = dice.below(2) == 0;
                    for (index, block) in pending.blocks.iter().enumerate() {
                        let Some(block) = block else { continue };
                        let keeps = match manner {
                            0 => false,
                            1 => true,
                            2 => is_kept,
                            _ => dice.below(2) == 0,
                        };
                        if keeps {
                            left.durable[pending.first + index] = block.clone();
                        } else if manner == 3 && dice.below(8) == 0 {
                            let torn = mixed(&left.durable[pending.first + index], block, dice);
                            left.durable[pending.first + index] = torn;
                        }
                    }
                }
                left.now.clone_from(&left.durable);
            }
        }
        left
    }

    fn begin_write(&mut self, first: usize, blocks: Vec<Option<Block>>) -> u64 {
        self.begun += 1;
        self.pending.insert(self.begun, Pending { first, blocks, ended: None });
        self.begun
    }

    /// A read gives it from now on; with `fua` it is durable.
    fn end_write(&mut self, id: u64, fua: bool) {
        self.ended += 1;
        let Some(written) = self.pending.get_mut(&id) else { return };
        written.ended = Some(self.ended);
        for (place, block) in written.blocks.iter().enumerate() {
            if let Some(block) = block {
                self.now[written.first + place] = block.clone();
                self.has_host_block[written.first + place] = true;
            }
        }
        if !fua {
            return;
        }
        let Some(written) = self.pending.remove(&id) else { return };
        for (place, block) in written.blocks.into_iter().enumerate() {
            if let Some(block) = block {
                self.make_durable(written.first + place, block, u64::MAX);
            }
        }
    }

    /// What ended before, by its count, is out of date.
    fn make_durable(&mut self, place: usize, block: Block, ended: u64) {
        self.durable[place] = block;
        let is_older = |older: &Pending| older.ended.is_some_and(|older| older < ended);
        for older in self.pending.values_mut().filter(|older| is_older(older)) {
            if let Some(index) = place.checked_sub(older.first)
                && let Some(outdated) = older.blocks.get_mut(index)
            {
                *outdated = None;
            }
        }
    }

    /// What had ended by `until` is durable, but for what `chosen` leaves out.
    fn settle(&mut self, until: u64, mut chosen: impl FnMut() -> bool) {
        let had_ended = |pending: &Pending| pending.ended.is_some_and(|ended| ended <= until);
        let mut covered: Vec<(u64, u64)> = (self.pending.iter())
            .filter(|(_, pending)| had_ended(pending))
            .map(|(id, pending)| (pending.ended.unwrap_or(0), *id))
            .collect();
        covered.sort_unstable();
        for (ended, id) in covered {
            if !chosen() {
                continue;
            }
            let Some(pending) = self.pending.remove(&id) else { continue };
            for (index, block) in pending.blocks.into_iter().enumerate() {
                if let Some(block) = block {
                    self.make_durable(pending.first + index, block, ended);
                }
            }
        }
    }
}

/// Some sectors of the one and some of the other.
fn mixed(old: &[u8], new: &[u8], dice: &mut Random) -> Block {
    let mut bytes = old.to_vec();
    for (to, from) in bytes.chunks_mut(SECTOR_BYTES).zip(new.chunks(SECTOR_BYTES)) {
        if dice.below(2) == 0 {
            to.copy_from_slice(from);
        }
    }
    Arc::from(bytes)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nobody panics with it")
}

fn refused<T>(operation: &'static str, offset_bytes: u64, reason: &str) -> DeviceResult<T> {
    let no_space = reason == FULL;
    let reason = reason.to_owned();
    Err(DeviceError { operation, offset_bytes, length_bytes: 0, reason, no_space })
}

const FULL: &str = "No space left on device (os error 28)";
const INJECTED: &str = "injected";
const DEAD: &str = "the disk is dead";

impl Core {
    /// Nothing that a call answers from now on was answered before the crash.
    pub fn is_dead(&self) -> bool {
        self.is_dead.load(Ordering::SeqCst)
    }

    pub fn failed_reads(&self) -> u64 {
        self.failed_reads.load(Ordering::SeqCst)
    }

    /// Something has failed since the disk was made.
    pub fn has_failed(&self) -> bool {
        self.failed_reads() > 0 || self.failed_others.load(Ordering::SeqCst) > 0
    }

    fn chance(&self, per_mille: &AtomicU32) -> bool {
        let per_mille = per_mille.load(Ordering::Relaxed);
        per_mille > 0 && lock(&self.dice).below(1000) < u64::from(per_mille)
    }

    fn take_time(&self) {
        if self.chance(&self.weather.slow) {
            let micros = 20 + lock(&self.dice).below(1500);
            std::thread::sleep(Duration::from_micros(micros));
        }
        if self.chance(&self.weather.stuck) {
            let millis = 20 + lock(&self.dice).below(400);
            std::thread::sleep(Duration::from_millis(millis));
        }
    }

    fn alive(&self) -> DeviceResult<MutexGuard<'_, Platter>> {
        let platter = lock(&self.platter);
        if platter.is_dead { refused("request", 0, DEAD) } else { Ok(platter) }
    }

    fn write_blocks(&self, first: usize, blocks: Vec<Block>, fua: bool) -> DeviceResult<()> {
        let offset_bytes = (first * BLOCK_BYTES) as u64;
        let count = blocks.len();
        let id = self.alive()?.begin_write(first, blocks.into_iter().map(Some).collect());
        self.take_time();
        let fails = self.chance(&self.weather.failing_writes);
        let is_full = self.weather.host_is_full.load(Ordering::Relaxed);
        let part = lock(&self.dice).below(2 * count as u64 + 1) as usize;
        let mut platter = self.alive()?;
        let lacks_room = !platter.has_host_block[first..first + count].iter().all(|has| *has);
        if is_full && lacks_room {
            self.failed_others.fetch_add(1, Ordering::SeqCst);
            platter.pending.remove(&id);
            return refused("write", offset_bytes, FULL);
        }
        if !fails {
            platter.end_write(id, fua);
            return Ok(());
        }
        // So many of its first or last blocks are there all the same.
        self.failed_others.fetch_add(1, Ordering::SeqCst);
        if let Some(pending) = platter.pending.get_mut(&id) {
            for (index, block) in pending.blocks.iter_mut().enumerate() {
                let is_there = if part < count { index < part } else { index >= part - count };
                if !is_there {
                    *block = None;
                }
            }
        }
        platter.end_write(id, false);
        refused("write", offset_bytes, INJECTED)
    }
}

impl Device for Core {
    fn info(&self) -> DeviceInfo {
        self.info
    }

    fn read(&self, offset: u64, buffers: &mut [&mut [u8]], _: IoClass) -> DeviceResult<()> {
        let slices = buffers.iter().map(|buffer| &**buffer);
        check_transfer("read", self.info.size_bytes, offset, slices)?;
        self.take_time();
        if !SEES_ALL.get() && self.chance(&self.weather.failing_reads) {
            self.failed_reads.fetch_add(1, Ordering::SeqCst);
            return refused("read", offset, INJECTED);
        }
        let platter = self.alive()?;
        let targets = buffers.iter_mut().flat_map(|buffer| buffer.chunks_mut(BLOCK_BYTES));
        for (target, block) in targets.zip(&platter.now[offset as usize / BLOCK_BYTES..]) {
            target.copy_from_slice(block);
        }
        Ok(())
    }

    fn write(&self, offset: u64, buffers: &[&[u8]], _: IoClass, fua: bool) -> DeviceResult<()> {
        check_transfer("write", self.info.size_bytes, offset, buffers.iter().copied())?;
        assert!(!fua || self.info.fua, "forced unit access, where there is none");
        let blocks = buffers.iter().flat_map(|buffer| buffer.chunks(BLOCK_BYTES)).map(Arc::from);
        self.write_blocks(offset as usize / BLOCK_BYTES, blocks.collect(), fua)
    }

    fn flush(&self) -> DeviceResult<()> {
        let until = self.alive()?.ended;
        self.take_time();
        let fails = self.chance(&self.weather.failing_flushes);
        let mut platter = self.alive()?;
        if fails {
            self.failed_others.fetch_add(1, Ordering::SeqCst);
            let mut dice = lock(&self.dice);
            platter.settle(until, || dice.below(2) == 0);
            return refused("flush", 0, INJECTED);
        }
        platter.settle(until, || true);
        Ok(())
    }

    fn discard(&self, offset: u64, length: u64) -> DeviceResult<()> {
        check_range("discard", self.info.size_bytes, offset, length)?;
        let mut platter = self.alive()?;
        if self.info.discard {
            // Gone at once, and for good: nobody may want it any more.
            let zeros: Block = Arc::from([0; BLOCK_BYTES]);
            for place in (offset..offset + length).step_by(BLOCK_BYTES) {
                let place = place as usize / BLOCK_BYTES;
                platter.make_durable(place, zeros.clone(), u64::MAX);
                platter.now[place] = zeros.clone();
            }
        }
        Ok(())
    }

    fn submit(&self, request: Request, on_done: OnDone) {
        let (result, buffers) = perform(self, request);
        on_done(result, buffers);
    }
}

impl Device for Disk {
    fn info(&self) -> DeviceInfo {
        self.core.info
    }
    fn read(&self, offset: u64, buffers: &mut [&mut [u8]], class: IoClass) -> DeviceResult<()> {
        self.core.read(offset, buffers, class)
    }
    fn write(&self, at: u64, buffers: &[&[u8]], class: IoClass, fua: bool) -> DeviceResult<()> {
        self.core.write(at, buffers, class, fua)
    }
    fn flush(&self) -> DeviceResult<()> {
        self.core.flush()
    }
    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> DeviceResult<()> {
        self.core.discard(offset_bytes, length_bytes)
    }
    fn submit(&self, request: Request, on_done: OnDone) {
        if SEES_ALL.get() {
            return self.core.submit(request, on_done);
        }
        let sent = lock(&self.queue).send((request, on_done));
        assert!(sent.is_ok(), "the disk's threads are there for as long as it is");
    }
}
