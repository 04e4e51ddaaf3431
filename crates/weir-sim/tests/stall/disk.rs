//! A slow disk in virtual time: each read or write takes a millisecond, however long it is, each flush fifty.
//!
//! Requests of one class are served one after the other, those of different classes side by side, and every flush beside
//! all else. So what a thread waits for is its own requests and those before them in their class.
//!
//! Or ([`Order::ByPlace`]) all requests but flushes one after the other, next the one that lies behind the last, or the first of all if there is
//! none: as a scheduler does for a disk whose own queue is short. Who sends more and more of what lies one behind the other keeps
//! all others waiting.
//!
//! Content is kept; a block that repeats one word (the big file is made of such) takes eight bytes.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use shuttle::sync::{Condvar, Mutex as SharedMutex};
use shuttle::thread;
use weir::device::request::{check_range, check_transfer, perform};
use weir::device::{Device, DeviceInfo, DeviceResult, IoClass, OnDone, Request};
use weir::format::frame::FRAME_MAGIC;

use crate::time::Time;

/// How long a read or write takes.
pub const WRITE_NS: u64 = 1_000_000;
/// How long a flush takes.
pub const FLUSH_NS: u64 = 50_000_000;
const BLOCK: usize = 4096;

/// Who is served next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// In each class the oldest.
    PerClass,
    /// The next one by its place.
    ByPlace,
}

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

/// Who waits for a request under [`Order::ByPlace`].
enum Asking {
    /// A caller.
    Caller,
    /// Nobody: it was submitted.
    Submitted(Box<(Request, OnDone)>),
}

/// Requests that are served by their places.
#[derive(Default)]
struct Elevator {
    /// By offset, then in the order of the calls.
    asked: BTreeMap<(u64, u64), Asking>,
    count: u64,
    /// Where the last one was.
    at: u64,
    /// Callers' requests that have been served, and are not taken notice of.
    served: BTreeSet<u64>,
    over: bool,
}

impl Elevator {
    fn ask(&mut self, offset_bytes: u64, asking: Asking) -> u64 {
        self.count += 1;
        self.asked.insert((offset_bytes, self.count), asking);
        self.count
    }

    /// The next one, if there is any.
    fn next(&mut self) -> Option<(u64, Asking)> {
        let behind = self.asked.range((self.at, 0)..).next();
        let key = *behind.or_else(|| self.asked.first_key_value())?.0;
        self.at = key.0;
        self.asked.remove(&key).map(|asking| (key.1, asking))
    }
}

/// What has been asked so far.
#[derive(Debug, Clone, Default)]
pub struct Served {
    pub frames: u64,
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
    order: Order,
    queues: BTreeMap<IoClass, Arc<Queue>>,
    elevator: SharedMutex<Elevator>,
    /// Something was asked of the elevator, or was served.
    moved: Condvar,
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
    pub fn new(size_bytes: u64, time: Time, order: Order) -> Arc<Self> {
        let queues = CLASSES.into_iter().map(|class| (class, Arc::default())).collect();
        let traces = std::env::var_os("STALL_TRACE").is_some();
        let (elevator, moved) = (SharedMutex::default(), Condvar::new());
        let state = Mutex::default();
        Arc::new(Self { size_bytes, time, state, order, queues, elevator, moved, traces })
    }

    /// Starts one server for the submitted requests of each class, or one for all.
    pub fn start(self: &Arc<Self>) -> Vec<thread::JoinHandle<()>> {
        if self.order == Order::ByPlace {
            let disk = Arc::clone(self);
            return vec![thread::spawn(move || disk.serve_by_place())];
        }
        let serve = |queue: &Arc<Queue>| {
            let (disk, queue) = (Arc::clone(self), Arc::clone(queue));
            thread::spawn(move || disk.serve(&queue))
        };
        self.queues.values().map(serve).collect()
    }

    /// The servers end.
    pub fn stop(&self) {
        self.elevator.lock().unwrap_or_else(PoisonError::into_inner).over = true;
        self.moved.notify_all();
        for queue in self.queues.values() {
            queue.requests.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
            queue.arrived.notify_all();
        }
    }

    /// Writes of one class that have ended.
    pub fn writes(&self, class: IoClass) -> u64 {
        self.with(|state| state.served.writes.get(&class).copied().unwrap_or(0))
    }

    /// Frames of the log that have been written, those that go with data included.
    pub fn frames(&self) -> u64 {
        self.with(|state| state.served.frames)
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

    fn serve_by_place(&self) {
        loop {
            let mut elevator = self.elevator.lock().unwrap_or_else(PoisonError::into_inner);
            let (number, asking) = loop {
                if let Some(next) = elevator.next() {
                    break next;
                }
                if elevator.over {
                    return;
                }
                elevator = self.moved.wait(elevator).unwrap_or_else(PoisonError::into_inner);
            };
            drop(elevator);
            self.time.sleep(WRITE_NS);
            match asking {
                Asking::Caller => {
                    let mut elevator = self.elevator.lock().unwrap_or_else(PoisonError::into_inner);
                    elevator.served.insert(number);
                    self.moved.notify_all();
                }
                Asking::Submitted(submitted) => {
                    let (request, on_done) = *submitted;
                    let (result, buffers) = perform(&Content(self), request);
                    on_done(result, buffers);
                }
            }
        }
    }

    /// Takes the calling thread's time for a request of `class`.
    fn spend(&self, class: IoClass, offset_bytes: u64) {
        if self.order == Order::ByPlace {
            let mut elevator = self.elevator.lock().unwrap_or_else(PoisonError::into_inner);
            let number = elevator.ask(offset_bytes, Asking::Caller);
            self.moved.notify_all();
            while !elevator.served.remove(&number) {
                elevator = self.moved.wait(elevator).unwrap_or_else(PoisonError::into_inner);
            }
            return;
        }
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

/// What the disk holds, for a request whose time has been taken.
struct Content<'a>(&'a SlowDisk);

impl Device for Content<'_> {
    fn info(&self) -> DeviceInfo {
        self.0.info()
    }
    fn read(&self, offset_bytes: u64, buffers: &mut [&mut [u8]], _: IoClass) -> DeviceResult<()> {
        let size_bytes = self.0.size_bytes;
        check_transfer("read", size_bytes, offset_bytes, buffers.iter().map(|b| &**b))?;
        self.0.with(|state| {
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
        let size_bytes = self.0.size_bytes;
        let length = check_transfer("write", size_bytes, offset_bytes, buffers.iter().copied())?;
        self.0.with(|state| {
            *state.served.writes.entry(class).or_default() += 1;
            let is_frame = buffers.first().is_some_and(|first| first.starts_with(&FRAME_MAGIC));
            state.served.frames += u64::from(is_frame);
            state.served.bytes += length;
            let blocks = buffers.iter().flat_map(|buffer| buffer.chunks_exact(BLOCK));
            for (number, bytes) in (offset_bytes / BLOCK as u64..).zip(blocks) {
                state.blocks.insert(number, stored(bytes));
            }
        });
        Ok(())
    }
    fn flush(&self) -> DeviceResult<()> {
        unreachable!("flushes are called, not submitted: they are served beside all else")
    }
    fn discard(&self, offset_bytes: u64, length_bytes: u64) -> DeviceResult<()> {
        self.0.discard(offset_bytes, length_bytes)
    }
    fn submit(&self, _: Request, _: OnDone) {
        unreachable!("it was submitted already")
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
        self.spend(class, offset_bytes);
        Content(self).read(offset_bytes, buffers, class)
    }

    fn write(
        &self,
        offset_bytes: u64,
        buffers: &[&[u8]],
        class: IoClass,
        fua: bool,
    ) -> DeviceResult<()> {
        self.spend(class, offset_bytes);
        Content(self).write(offset_bytes, buffers, class, fua)
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
        if self.order == Order::ByPlace {
            let mut elevator = self.elevator.lock().unwrap_or_else(PoisonError::into_inner);
            let offset_bytes = request.offset_bytes;
            elevator.ask(offset_bytes, Asking::Submitted(Box::new((request, on_done))));
            drop(elevator);
            return self.moved.notify_all();
        }
        let queue = &self.queues[&request.class];
        let mut requests = queue.requests.lock().unwrap_or_else(PoisonError::into_inner);
        requests.0.push_back((request, on_done));
        drop(requests);
        queue.arrived.notify_one();
    }
}
