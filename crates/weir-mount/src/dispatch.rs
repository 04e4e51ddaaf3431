//! Which thread serves a request, and what happens when a handler panics.
//!
//! A transport runs one thread per core that reads requests. A request that waits for the device on
//! such a thread keeps it from reading the next one, so that two slow `fsync`s on a two-core
//! machine would stop every other program. The rule here:
//!
//! - [`Class::Quick`] requests are served where they were read.
//! - [`Class::Normal`] requests too, unless requests are being held up (the engine throttles writers, or reads tree nodes from
//!   the device); then they are treated as blocking. One alone that took long says nothing: as a rule its thread was preempted.
//! - [`Class::Blocking`] requests are served where they were read only while at least one other
//!   transport thread stays free; otherwise a pool takes them. A hand-over costs a thread wake-up,
//!   which is what a single `fsync` at a time must not pay.
//! - Requests for durability are as blocking ones, but instead of the pool the engine takes them: they become tickets
//!   ([`crate::ops::FileSystemOps::submit_sync`]), and the engine's log thread answers a whole group of them after
//!   one flush. The pool is left with what cannot be submitted without waiting.
//!
//! - What waits for the kernel, which waits for requests, has a few threads of its own, by what it asks for ([`Asks`]): were it to take
//!   the whole pool, the request that the kernel waits for would wait there for ever.
//!
//! Handlers run under `catch_unwind`: the reply object is dropped by the unwinding, which answers
//! EIO, and the mount goes on. So does whoever is told of it.
//!
//! Lock order: the queue's lock is a leaf; no handler runs under it.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use weir::sync::{Condvar, Mutex, without_signals};

/// How long a request may keep a transport thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Memory only.
    Quick,
    /// Memory only as a rule.
    Normal,
    /// Waits for the device as a rule.
    Blocking,
}

/// What a request waits for the kernel for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asks {
    /// Pages of files: the kernel waits for reads, writes and changes of size, which ask for nothing.
    Content,
    /// That too, and names: it waits for whoever has the directory, and so, by way of a file that is being removed there, for requests of
    /// the other kind.
    Names,
}

/// Where a request is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// On the thread that read it.
    Here,
    /// There too, and it counts against the threads that may wait.
    HereCounted,
    /// On a thread of the pool.
    Pool,
}

/// A request that took longer than this was held up.
const HELD_UP_US: u64 = 1_000;
/// Two held up among so many requests mean that requests wait. On a busy machine a thread loses its core for milliseconds now and
/// then; in a time slice it serves hundreds of requests, so that this seldom happens twice in a row.
const HELD_UP_WITHIN: u32 = 32;
/// For how long after that `Normal` requests are taken for blocking ones.
const PRESSURE_US: u64 = 100_000;
/// Most threads of the pool; more requests than that wait for a free one. Enough for a group commit
/// of this many to share one flush.
const MAX_POOL_THREADS: usize = 64;
/// Most threads that wait for the kernel for the same.
const MAX_ASKING_THREADS: usize = 16;

/// The placement rule: no locks, no clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Threads that read requests.
    pub transport_threads: usize,
    /// Counted requests being served on them now.
    pub waiting_here: usize,
    /// A request was lately held up.
    pub pressure: bool,
}

impl Placement {
    /// Where a request of `class` goes.
    pub const fn place(self, class: Class) -> Place {
        match class {
            Class::Quick => Place::Here,
            Class::Normal if !self.pressure => Place::Here,
            Class::Normal | Class::Blocking => {
                if self.waiting_here + 1 < self.transport_threads {
                    Place::HereCounted
                } else {
                    Place::Pool
                }
            }
        }
    }
}

/// How many more requests a held up one is remembered for, after one more request. No locks, no clock.
const fn remembered(before: u32, held_up: bool) -> u32 {
    if held_up { HELD_UP_WITHIN } else { before.saturating_sub(1) }
}

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    idle_threads: usize,
    threads: Vec<JoinHandle<()>>,
    closing: bool,
}

/// Hears of panics.
type OnPanic = Arc<dyn Fn(&str) + Send + Sync>;

/// A pool.
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
    on_panic: OnPanic,
    /// What its threads are called.
    name: &'static str,
    most_threads: usize,
}

/// Serves requests by the rule above.
pub struct Dispatcher {
    transport_threads: usize,
    waiting_here: AtomicUsize,
    started: Instant,
    /// How many more requests the last held up one is remembered for.
    held_up: AtomicU32,
    /// Microseconds since `started` until which there is pressure.
    pressure_until_us: AtomicU64,
    shared: Arc<Shared>,
    /// For what waits for the kernel, by [`Asks`].
    asking: [Arc<Shared>; 2],
}

/// One transport thread counted as waiting; dropping it uncounts.
pub struct Counted<'a>(&'a AtomicUsize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Permission to serve a request on this thread.
pub enum Here<'a> {
    /// It is quick.
    Free,
    /// It is expected to be quick, but others were not lately.
    Counted(#[allow(dead_code)] Counted<'a>),
    /// It waits as a rule.
    Waiting(#[allow(dead_code)] Counted<'a>),
}

impl Dispatcher {
    /// A dispatcher for a transport with this many threads; `on_panic` hears of panics.
    pub fn new(
        transport_threads: usize,
        on_panic: impl Fn(&str) + Send + Sync + 'static,
    ) -> Arc<Self> {
        let on_panic: OnPanic = Arc::new(on_panic);
        let pool = |name, most_threads| {
            let (queue, changed) = (Mutex::default(), Condvar::new());
            let on_panic = Arc::clone(&on_panic);
            Arc::new(Shared { queue, changed, on_panic, name, most_threads })
        };
        Arc::new(Self {
            transport_threads,
            waiting_here: AtomicUsize::new(0),
            started: Instant::now(),
            held_up: AtomicU32::new(0),
            pressure_until_us: AtomicU64::new(0),
            shared: pool("weir-pool", MAX_POOL_THREADS),
            asking: ["weir-ask", "weir-names"].map(|name| pool(name, MAX_ASKING_THREADS)),
        })
    }

    fn now_us(&self) -> u64 {
        self.started.elapsed().as_micros() as u64
    }

    /// Asks for a request of `class` to be served on this thread; `None`: use [`Self::submit`].
    pub fn admit(&self, class: Class) -> Option<Here<'_>> {
        if class == Class::Quick {
            return Some(Here::Free);
        }
        let pressure_until_us = self.pressure_until_us.load(Ordering::Relaxed);
        let pressure = pressure_until_us != 0 && self.now_us() < pressure_until_us;
        let waiting_here = self.waiting_here.fetch_add(1, Ordering::Relaxed);
        let counted = Counted(&self.waiting_here);
        let placement =
            Placement { transport_threads: self.transport_threads, waiting_here, pressure };
        match placement.place(class) {
            Place::Here => Some(Here::Free),
            Place::HereCounted if class == Class::Blocking => Some(Here::Waiting(counted)),
            Place::HereCounted => Some(Here::Counted(counted)),
            Place::Pool => None,
        }
    }

    /// Serves `job` on this thread, which [`Self::admit`] allowed.
    pub fn run_here(&self, permission: Here<'_>, job: impl FnOnce()) {
        let began_us = self.now_us();
        self.shared.guarded(job);
        let now_us = self.now_us();
        // One that waits as a rule says nothing of the others.
        let expected = matches!(permission, Here::Waiting(_));
        drop(permission);
        if !expected {
            self.note(now_us - began_us > HELD_UP_US, now_us);
        }
    }

    /// Serves `job` on a thread that is there to wait.
    pub fn run_waiting(&self, job: impl FnOnce()) {
        self.shared.guarded(job);
    }

    /// Threads may miss each other's requests here: it is a rule of thumb.
    fn note(&self, held_up: bool, now_us: u64) {
        let before = self.held_up.load(Ordering::Relaxed);
        if held_up && before > 0 {
            self.pressure_until_us.store(now_us + PRESSURE_US, Ordering::Relaxed);
        }
        let after = remembered(before, held_up);
        if after != before {
            self.held_up.store(after, Ordering::Relaxed);
        }
    }

    /// Serves `job` on a thread of the pool.
    pub fn submit(&self, job: impl FnOnce() + Send + 'static) {
        if let Err(job) = self.shared.give(Box::new(job)) {
            // No thread to be had at all: serving it here is slow, losing it is wrong.
            self.shared.guarded(job);
        }
    }

    /// Serves `job`, which waits for the kernel as `asks` says, on a thread that is there for that. Where the system has none, it is dropped, which
    /// answers EIO: here it might wait for a request that only this thread serves.
    pub fn submit_asking(&self, asks: Asks, job: impl FnOnce() + Send + 'static) {
        drop(self.asking[asks as usize].give(Box::new(job)).err());
    }

    /// Serves `job` here or on the pool, by its class.
    pub fn run(&self, class: Class, job: impl FnOnce() + Send + 'static) {
        match self.admit(class) {
            Some(permission) => self.run_here(permission, job),
            None => self.submit(job),
        }
    }

    /// Serves what is queued and ends the pools' threads.
    pub fn close(&self) {
        self.asking.iter().for_each(|pool| pool.close());
        self.shared.close();
    }
}

impl Shared {
    /// Queues `job`, or gives it back if there is no thread, and the system has none.
    fn give(self: &Arc<Self>, job: Job) -> Result<(), Job> {
        let mut queue = self.queue.lock();
        let wanted = queue.jobs.len() >= queue.idle_threads;
        if wanted && queue.threads.len() < self.most_threads {
            let shared = Arc::clone(self);
            let name = format!("{}-{}", self.name, queue.threads.len());
            let thread = std::thread::Builder::new().name(name);
            match without_signals(|| thread.spawn(move || shared.serve())) {
                Ok(thread) => queue.threads.push(thread),
                Err(_) if queue.threads.is_empty() => return Err(job),
                Err(_) => {}
            }
        }
        queue.jobs.push_back(job);
        drop(queue);
        self.changed.notify_one();
        Ok(())
    }

    fn close(&self) {
        let threads = {
            let mut queue = self.queue.lock();
            queue.closing = true;
            std::mem::take(&mut queue.threads)
        };
        self.changed.notify_all();
        for thread in threads {
            // Handlers cannot unwind out of a pool thread, so joining cannot fail.
            let _ = thread.join();
        }
    }

    fn guarded(&self, job: impl FnOnce()) {
        // State that a panic may have left half changed belongs to the engine, which answers for
        // it; nothing of the dispatcher is touched by a job.
        if let Err(payload) = catch_unwind(AssertUnwindSafe(job)) {
            // Nor may telling of it take the thread away.
            let _ = catch_unwind(AssertUnwindSafe(|| {
                (self.on_panic)(panic_message(payload.as_ref()));
            }));
        }
    }

    fn serve(&self) {
        let mut queue = self.queue.lock();
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                drop(queue);
                self.guarded(job);
                queue = self.queue.lock();
            } else if queue.closing {
                return;
            } else {
                queue.idle_threads += 1;
                self.changed.wait(&mut queue);
                queue.idle_threads -= 1;
            }
        }
    }
}

/// The text of a panic.
pub fn panic_message(payload: &(dyn Any + Send)) -> &str {
    payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("panic without a message")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn one_transport_thread_always_stays_free_of_blocking_requests() {
        for transport_threads in 1..8 {
            for waiting_here in 0..8 {
                for pressure in [false, true] {
                    let placement = Placement { transport_threads, waiting_here, pressure };
                    assert_eq!(placement.place(Class::Quick), Place::Here);
                    for class in [Class::Normal, Class::Blocking] {
                        let place = placement.place(class);
                        if place == Place::HereCounted {
                            assert!(waiting_here < transport_threads - 1);
                        }
                        if place == Place::Here {
                            assert!(class == Class::Normal && !pressure);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn two_requests_held_up_among_a_few_make_pressure_and_one_alone_does_not() {
        let dispatcher = Dispatcher::new(1, |_| {});
        let note = |held_up: bool, times: u32| {
            for _ in 0..times {
                dispatcher.note(held_up, dispatcher.now_us());
            }
        };
        let admitted = || dispatcher.admit(Class::Normal).is_some();
        note(true, 1);
        note(false, HELD_UP_WITHIN);
        note(true, 1);
        assert!(admitted());
        note(false, HELD_UP_WITHIN - 1);
        note(true, 1);
        assert!(!admitted());
        dispatcher.close();
    }

    #[test]
    fn a_thread_that_is_there_to_wait_may_take_its_time() {
        let dispatcher = Dispatcher::new(1, |_| {});
        let long = || std::thread::sleep(std::time::Duration::from_micros(2 * HELD_UP_US));
        (0..3).for_each(|_| dispatcher.run_waiting(long));
        assert!(dispatcher.admit(Class::Normal).is_some());
        (0..3).for_each(|_| dispatcher.run_here(Here::Free, long));
        assert!(dispatcher.admit(Class::Normal).is_none());
        dispatcher.close();
    }

    #[test]
    fn a_blocked_request_on_every_counted_thread_sends_the_next_to_the_pool() {
        let dispatcher = Dispatcher::new(2, |_| {});
        let first = dispatcher.admit(Class::Blocking);
        assert!(matches!(first, Some(Here::Waiting(_))));
        assert!(dispatcher.admit(Class::Blocking).is_none());
        assert!(dispatcher.admit(Class::Quick).is_some());
        drop(first);
        assert!(dispatcher.admit(Class::Blocking).is_some());
        dispatcher.close();
    }

    #[test]
    fn queued_requests_are_all_served_before_close_returns() {
        let dispatcher = Dispatcher::new(1, |_| {});
        let (sender, receiver) = mpsc::channel();
        for number in 0..200 {
            let sender = sender.clone();
            dispatcher.run(Class::Blocking, move || sender.send(number).unwrap());
        }
        dispatcher.close();
        drop(sender);
        let mut served: Vec<i32> = receiver.iter().collect();
        served.sort_unstable();
        assert_eq!(served, (0..200).collect::<Vec<_>>());
    }

    #[test]
    fn more_blocked_requests_than_idle_threads_do_not_wait_for_each_other() {
        let dispatcher = Dispatcher::new(1, |_| {});
        let barrier = Arc::new(std::sync::Barrier::new(8));
        for _ in 0..8 {
            let barrier = Arc::clone(&barrier);
            dispatcher.run(Class::Blocking, move || {
                barrier.wait();
            });
        }
        dispatcher.close();
    }

    /// The kernel answers none of those who ask it for names before one who asks for pages was served, and none of those before it was served
    /// a request of its own.
    #[test]
    fn however_many_wait_for_the_kernel_what_it_waits_for_is_served() {
        let dispatcher = Dispatcher::new(1, |_| {});
        let answers = Arc::new((Mutex::new(Vec::new()), Condvar::new()));
        for asks in [Asks::Names, Asks::Content] {
            for _ in 0..4 * MAX_POOL_THREADS {
                let answers = Arc::clone(&answers);
                dispatcher.submit_asking(asks, move || {
                    let (answered, changed) = &*answers;
                    let mut answered = answered.lock();
                    while !answered.contains(&asks) {
                        changed.wait(&mut answered);
                    }
                    if asks == Asks::Content && !answered.contains(&Asks::Names) {
                        answered.push(Asks::Names);
                        changed.notify_all();
                    }
                });
            }
        }
        let answer = |asks: &[Asks]| {
            answers.0.lock().extend(asks);
            answers.1.notify_all();
        };
        let (sender, receiver) = mpsc::channel();
        dispatcher.submit(move || sender.send(()).unwrap());
        let served = receiver.recv_timeout(std::time::Duration::from_secs(20));
        let others =
            if served.is_ok() { &[Asks::Content][..] } else { &[Asks::Content, Asks::Names] };
        answer(others);
        dispatcher.close();
        assert_eq!(served, Ok(()), "it waits for those who wait for it");
    }

    #[test]
    fn a_panic_is_reported_and_the_next_request_is_served() {
        let (sender, receiver) = mpsc::channel();
        let dispatcher = Dispatcher::new(2, move |what| sender.send(what.to_owned()).unwrap());
        dispatcher.run(Class::Quick, || panic!("handler {}", 7));
        assert_eq!(receiver.recv().unwrap(), "handler 7");
        let served = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&served);
        dispatcher.run(Class::Blocking, move || {
            counter.fetch_add(1, Ordering::SeqCst);
        });
        dispatcher.close();
        assert_eq!(served.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn a_thread_outlives_that_nobody_could_be_told_of_a_panic() {
        let dispatcher = Dispatcher::new(1, |_| panic!("the log is full"));
        dispatcher.run_waiting(|| panic!("here"));
        let (sender, receiver) = mpsc::channel();
        // As many as there may be threads: none of them may be lost.
        for _ in 0..2 * MAX_POOL_THREADS {
            dispatcher.submit(|| panic!("on the pool"));
        }
        dispatcher.submit(move || sender.send(()).unwrap());
        dispatcher.close();
        assert_eq!(receiver.recv(), Ok(()));
    }
}
