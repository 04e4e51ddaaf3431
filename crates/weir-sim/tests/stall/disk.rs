//! A slow disk in virtual time: each read or write takes a millisecond, however long it is, each flush fifty.
//!
//! Requests of one class are served one after the other, those of different classes side by side, and every flush beside
//! all else. So what a thread waits for is its own requests and those before them in their class.
//!
//! Content is kept; a block that repeats one word (the big file is made of such) takes eight bytes.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use shuttle::sync::{Condvar, Mutex as SharedMutex};
use shuttle::thread;
use weir::device::request::{check_range, check_transfer, perform};
use weir::device::{Device, DeviceInfo, DeviceResult, IoClass, OnDone, Request};

use crate::time::Time;

/// How long a read or write takes.
pub const WRITE_NS: u64 = 1_000_000;
/// How long a flush takes.
pub const FLUSH_NS: u64 = 50_000_000;
const BLOCK: usize = 4096;

enum Block {
    Word([u8; 8]),
    Bytes(Box<[u8]>),
}

/// One class's submitted requests.
#[derive(Default)]
struct Queue {
    requests: SharedMutex<(VecDeque<(Request, OnDone)>, bool)>,
    arrived: Condvar,
}

/// What has been asked so far.
#[derive(Debug, Clone, Default)]
pub struct Served {
    pub writes: BTreeMap<IoClass, u64>,
    pub flushes: u64,
    pub bytes: u64,
}

#[derive(Default)]
struct State {
    blocks: HashMap<u64, Block>,
    /// When each class has served what it has to do now.
    free_ns: BTreeMap<IoClass, u64>,
    served: Served,
    /// With `STALL_TRACE`: who is waiting for what since when.
    calls: BTreeMap<u64, (u64, String)>,
    next_call: u64,
}

/// See the module's head.
pub struct SlowDisk {
    size_bytes: u64,
    time: Time,
    state: Mutex<State>,
    queues: BTreeMap<IoClass, Arc<Queue>>,
    traces: bool,
}

const CLASSES: [IoClass; 7] = [
    IoClass::Log,
    IoClass::Beside,
    IoClass::SyncRead,
    IoClass::SyncWrite,
    IoClass::ReadAhead,
    IoClass::Writeback,
    IoClass::Background,
];

impl SlowDisk {
    pub fn new(size_bytes: u64, time: Time) -> Arc<Self> {
        let queues = CLASSES.into_iter().map(|class| (class, Arc::default())).collect();
        let traces = std::env::var_os("STALL_TRACE").is_some();
        Arc::new(Self { size_bytes, time, state: Mutex::default(), queues, traces })
    }

    /// Starts one server for the submitted requests of each class.
    pub fn start(self: &Arc<Self>) -> Vec<thread::JoinHandle<()>> {
        let serve = |queue: &Arc<Queue>| {
            let (disk, queue) = (Arc::clone(self), Arc::clone(queue));
            thread::spawn(move || disk.serve(&queue))
        };
        self.queues.values().map(serve).collect()
    }

    /// The servers end.
    pub fn stop(&self) {
        for queue in self.queues.values() {
            queue.requests.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
            queue.arrived.notify_all();
        }
    }

    /// Writes of one class that have ended.
    pub fn writes(&self, class: IoClass) -> u64 {
        self.with(|state| state.served.writes.get(&class).copied().unwrap_or(0))
    }

    pub fn served(&self) -> Served {
        self.with(|state| state.served.clone())
    }

    /// With the environment variable `STALL_TRACE`: the engine's functions that wait for the disk now.
    pub fn waiting(&self) -> Vec<String> {
        self.with(|state| {
            state.calls.values().map(|(since, text)| format!("since {since} ns: {text}")).collect()
        })
    }

    fn with<T>(&self, body: impl FnOnce(&mut State) -> T) -> T {
        body(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn serve(&self, queue: &Queue) {
        loop {
            let mut requests = queue.requests.lock().unwrap_or_else(PoisonError::into_inner);
            while requests.0.is_empty() && !requests.1 {
                requests = queue.arrived.wait(requests).unwrap_or_else(PoisonError::into_inner);
            }
            let Some((request, on_done)) = requests.0.pop_front() else { return };
            drop(requests);
            let (result, buffers) = perform(self, request);
            on_done(result, buffers);
        }
    }

    /// Takes the calling thread's time for a request of `class`.
    fn spend(&self, class: IoClass) {
        let now = self.time.now_ns();
        let end = self.with(|state| {
            let free = state.free_ns.entry(class).or_default();
            *free = (*free).max(now) + WRITE_NS;
            *free
        });
        self.traced(|| self.time.sleep_until(end));
    }

    fn traced(&self, wait: impl FnOnce()) {
        if !self.traces {
            return wait();
        }
        let backtrace = std::backtrace::Backtrace::force_capture().to_string();
        let frames =
            backtrace.lines().filter_map(|line| line.trim().split_once(": ")).map(|at| at.1);
        let engine: Vec<&str> = frames.filter(|name| name.contains("weir::")).take(9).collect();
        let call = self.with(|state| {
            state.next_call += 1;
            state.calls.insert(state.next_call, (self.time.now_ns(), engine.join(" < ")));
            state.next_call
        });
        wait();
        self.with(|state| state.calls.remove(&call));
    }
}

fn stored(bytes: &[u8]) -> Block {
    let word: [u8; 8] = std::array::from_fn(|index| bytes[index]);
    if bytes.chunks_exact(8).all(|chunk| chunk == word) {
        Block::Word(word)
    } else {
        Block::Bytes(bytes.into())
    }
}

impl Device for SlowDisk {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { size_bytes: self.size_bytes, fua: false, volatile_cache: true, discard: false }
    }

    fn read(
        &self,
        offset_bytes: u64,
        buffers: &mut [&mut [u8]],
        class: IoClass,
    ) -> DeviceResult<()> {
        check_transfer("read", self.size_bytes, offset_bytes, buffers.iter().map(|b| &**b))?;
        self.spend(class);
        self.with(|state| {
            let blocks = buffers.iter_mut().flat_map(|buffer| buffer.chunks_exact_mut(BLOCK));
            for (number, target) in (offset_bytes / BLOCK as u64..).zip(blocks) {
                match state.blocks.get(&number) {
                    None => target.fill(0),
                    Some(Block::Bytes(bytes)) => target.copy_from_slice(bytes),
                    Some(Block::Word(word)) => {
                        target.chunks_exact_mut(8).for_each(|chunk| chunk.copy_from_slice(word));
                    }
                }
            }
        });
        Ok(())
    }

    fn write(
        &self,
        offset_bytes: u64,
        buffers: &[&[u8]],
        class: IoClass,
        _fua: bool,
    ) -> DeviceResult<()> {
        let length =
            check_transfer("write", self.size_bytes, offset_bytes, buffers.iter().copied())?;
        self.spend(class);
        self.with(|state| {
            *state.served.writes.entry(class).or_default() += 1;
            state.served.bytes += length;
            let blocks = buffers.iter().flat_map(|buffer| buffer.chunks_exact(BLOCK));
            for (number, bytes) in (offset_bytes / BLOCK as u64..).zip(blocks) {
                state.blocks.insert(number, stored(bytes));
            }
        });
        Ok(())
    }

    fn flush(&self) -> DeviceResult<()> {
        self.traced(|| self.time.sleep(FLUSH_NS));
        self.with(|state| state.served.flushes += 1);
        Ok(())
    }

    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> DeviceResult<()> {
        check_range("discard", self.size_bytes, offset_bytes, length_bytes)
    }

    fn submit(&self, request: Request, on_done: OnDone) {
        let queue = &self.queues[&request.class];
        let mut requests = queue.requests.lock().unwrap_or_else(PoisonError::into_inner);
        requests.0.push_back((request, on_done));
        drop(requests);
        queue.arrived.notify_one();
    }
}
