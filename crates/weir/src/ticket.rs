//! Durability as something to hold: [`SyncTicket`] and [`CompletionQueue`].
//!
//! A ticket is one promise: "what this request covers is durable", or an error. It can be waited for, polled, awaited as a
//! future on any executor, delivered to a queue, or given a callback. Dropping it does not cancel anything. Thousands in
//! flight cost one small allocation each and no thread.
//!
//! While nobody waits for a ticket, the log may gather it with others for up to two milliseconds, if tickets have come many at
//! a time: that is what makes a deep queue share frames and flushes. Whoever waits ends that at once: [`SyncTicket::wait`],
//! awaiting, a callback, [`CompletionQueue::wait`] (or `wait_timeout`) before or after the delivery, a second [`CompletionQueue::take`] in vain, or a delivery to a
//! queue whose file descriptor is in use. [`SyncTicket::poll`] only looks.
//!
//! Whoever makes many tickets end at once puts the wake-ups of queues off until the last ([`gather_wakes`]): a thread that waits for
//! a queue would otherwise be woken for each, take one, and go back to sleep.
//!
//! Lock order: a ticket's state is a leaf; wakers, queues and callbacks run outside of it. A panic of a waker or callback ends there.

use crate::error::{Error, FORKED, PANICKED, Result};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Clock, Condvar, Mutex, MutexGuard, Process, SystemClock, wait_for};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::Future;
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::Weak;
use std::task::{Context, Poll, Waker};

/// Who is told that somebody waits.
pub trait Hurry: Send + Sync {
    /// Somebody has begun to wait for what was asked for patiently.
    fn hurry(&self);
}

/// Who has given a promise, and does what else there is to do when it ends.
pub trait PromiseOwner: Send + Sync {
    /// The request has ended.
    fn end(&self, promise: Promise, result: Result<()>);
}

#[derive(Default)]
struct State {
    result: Option<Result<()>>,
    waker: Option<Waker>,
    queue: Option<(Arc<CompletionQueue>, u64)>,
    callback: Option<OnCompletion>,
    /// Whom to tell when somebody waits for the first time.
    hurry: Option<Arc<dyn Hurry>>,
}

/// Called once with how a request ended.
type OnCompletion = Box<dyn FnOnce(Result<()>) + Send>;

struct Shared {
    state: Mutex<State>,
    done: Condvar,
    process: Process,
}

/// A request for durability, a promise: what it covers is durable when the ticket ends, or it ends with an error. Wait for it
/// ([`SyncTicket::wait`]), look at it ([`SyncTicket::poll`]), await it as a future on any executor, have it delivered to a
/// [`CompletionQueue`] ([`SyncTicket::deliver`]), or give it a callback ([`SyncTicket::on_completion`]).
///
/// Dropping a ticket cancels nothing: what was asked for becomes durable all the same, and only whether it failed stays untold.
///
/// While nobody waits for it, a ticket may be gathered with others for up to two milliseconds, if tickets have come many at a time: that is how a
/// deep queue shares writes and flushes. Whoever waits ends that at once, by any of the ways above but `poll`, which only looks: a
/// loop around `poll` may take two milliseconds longer than `wait`. A delivery counts as waiting once somebody waits for the queue,
/// looks twice in vain, or has asked for its file descriptor.
///
/// In a child that is forked meanwhile it ends with an error at once, also if it had ended well before; but a queue that it was delivered to
/// before the fork waits in vain there.
#[must_use = "a ticket that is dropped is not cancelled, but nobody learns whether it failed"]
pub struct SyncTicket(Arc<Shared>);

/// The engine's end of a ticket; completing it twice is impossible. Where a panic takes it along, the ticket ends with an error.
pub struct Promise(Option<Arc<Shared>>);

/// A ticket and its other end. `hurry`: who is told when somebody waits for the ticket, if it may be gathered with others
/// until then.
pub fn ticket(hurry: Option<Arc<dyn Hurry>>) -> (SyncTicket, Promise) {
    let state = Mutex::new(State { hurry, ..State::default() });
    let shared = Arc::new(Shared { state, done: Condvar::new(), process: Process::this() });
    (SyncTicket(shared.clone()), Promise(Some(shared)))
}

impl Promise {
    /// Nobody has the ticket any more.
    pub(crate) fn is_unheard(&self) -> bool {
        self.0.as_ref().is_some_and(|shared| Arc::strong_count(shared) == 1)
    }

    /// The request has ended.
    pub fn complete(mut self, result: Result<()>) {
        if let Some(shared) = self.0.take() {
            shared.end(result);
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        // In a schedule test nobody goes on after a panic.
        if std::thread::panicking()
            && !cfg!(feature = "shuttle")
            && let Some(shared) = self.0.take()
        {
            shared.end(Err(Error::Shutdown(PANICKED.to_owned())));
        }
    }
}

impl Shared {
    /// In a forked child nobody ends it.
    fn check_process(&self) -> Result<()> {
        if self.process.is_this() { Ok(()) } else { Err(Error::Shutdown(FORKED.to_owned())) }
    }

    fn end(self: Arc<Self>, result: Result<()>) {
        let (waker, queue, callback) = {
            let mut state = self.state.lock();
            state.result = Some(result.clone());
            state.hurry = None;
            (state.waker.take(), state.queue.take(), state.callback.take())
        };
        self.done.notify_all();
        if let Some(waker) = waker {
            run_foreign(|| waker.wake());
        }
        if let Some((queue, user_data)) = queue {
            queue.push(Completion { user_data, result }, Some(self));
        } else if let Some(callback) = callback {
            run_foreign(|| callback(result));
        }
    }
}

/// Runs what a program has left here. If that panics, its panic hook has heard of it, and this thread goes on: it makes others' requests
/// durable as well.
pub(crate) fn run_foreign(call: impl FnOnce()) {
    if cfg!(feature = "shuttle") {
        // There a panic is how a schedule ends.
        return call();
    }
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
}

impl std::fmt::Debug for SyncTicket {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("SyncTicket").field("result", &self.poll()).finish()
    }
}

impl SyncTicket {
    /// The result, if the request has ended. Does not block, and only looks: the request may go on being gathered with others.
    pub fn poll(&self) -> Option<Result<()>> {
        if let Err(error) = self.0.check_process() {
            return Some(Err(error));
        }
        self.0.state.lock().result.clone()
    }

    /// Somebody waits now.
    fn hurry(&self) {
        let hurry = self.0.state.lock().hurry.take();
        if let Some(hurry) = hurry {
            hurry.hurry();
        }
    }

    /// Blocks until the request has ended.
    pub fn wait(&self) -> Result<()> {
        self.0.check_process()?;
        self.hurry();
        let mut state = self.0.state.lock();
        loop {
            if let Some(result) = &state.result {
                return result.clone();
            }
            self.0.done.wait(&mut state);
        }
    }

    /// As [`SyncTicket::wait`], for at most about `timeout_us` microseconds; `None` if that was not enough.
    pub fn wait_timeout(&self, timeout_us: u64) -> Option<Result<()>> {
        if let Err(error) = self.0.check_process() {
            return Some(Err(error));
        }
        self.hurry();
        let clock = SystemClock::default();
        let began_ns = clock.monotonic_ns();
        let mut state = self.0.state.lock();
        let mut is_over = false;
        while state.result.is_none() && !is_over {
            // Woken is not served, and must not lengthen the wait.
            let waited_us = clock.since_ns(began_ns) / 1000;
            let left_us = timeout_us.saturating_sub(waited_us);
            is_over = left_us == 0 || wait_for(&self.0.done, &mut state, left_us);
        }
        state.result.clone()
    }

    /// Delivers the result to `queue` with `user_data`, now or when the request ends. Uses the ticket up.
    pub fn deliver(self, queue: &Arc<CompletionQueue>, user_data: u64) {
        if let Err(error) = self.0.check_process() {
            return queue.push(Completion { user_data, result: Err(error) }, None);
        }
        let (ended, hurry) = {
            let mut state = self.0.state.lock();
            if state.result.is_none() {
                state.queue = Some((queue.clone(), user_data));
            }
            (state.result.clone(), state.hurry.take())
        };
        if let Some(result) = ended {
            queue.push(Completion { user_data, result }, None);
        } else if let Some(hurry) = hurry {
            queue.expect(&hurry);
        }
    }

    /// Calls `callback` with the result: now, on this thread, if the request has ended, else when it does, on the thread that
    /// finds out: one of the engine's, or one that syncs, commits or closes something of the volume at that moment, or waits for pages or for
    /// room, as a write or a cut may, with that file locked. That thread makes others'
    /// requests durable as well, so the callback must be short, must not wait for anything, also not for a lock that somebody holds over
    /// such a call, and must not drop the last handle of an unlinked file. If it panics there, nothing ends but itself. Uses the ticket up.
    pub fn on_completion(self, callback: impl FnOnce(Result<()>) + Send + 'static) {
        if let Err(error) = self.0.check_process() {
            return callback(Err(error));
        }
        self.hurry();
        let mut state = self.0.state.lock();
        match state.result.clone() {
            None => state.callback = Some(Box::new(callback)),
            Some(result) => {
                drop(state);
                callback(result);
            }
        }
    }
}

impl Future for SyncTicket {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Err(error) = self.0.check_process() {
            return Poll::Ready(Err(error));
        }
        self.hurry();
        // Cloned before the lock is taken, and the last one dropped after it: both run what an executor has put there.
        let waker = context.waker().clone();
        let mut state = self.0.state.lock();
        if let Some(result) = state.result.clone() {
            drop(state);
            return Poll::Ready(result);
        }
        let last = state.waker.replace(waker);
        drop(state);
        drop(last);
        Poll::Pending
    }
}

/// An entry of a [`CompletionQueue`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completion {
    /// What was given to [`SyncTicket::deliver`].
    pub user_data: u64,
    /// How the request ended.
    pub result: Result<()>,
}

/// Where tickets are delivered in the order in which they end. Its file descriptor (an eventfd) is readable while the queue is
/// not empty, for `poll(2)` and friends.
#[derive(Debug)]
pub struct CompletionQueue {
    entries: Mutex<Entries>,
    arrived: Condvar,
    event: OwnedFd,
    /// Somebody has asked for the file descriptor: waiting for it goes unseen.
    watched: AtomicBool,
}

#[derive(Default)]
struct Entries {
    /// Each with what is left of its ticket. Whoever takes the one frees the other: he is likely to make the next tickets, and has memory
    /// for them then. The thread that ends tickets, for many at a time, would give it back to everybody's, under their lock.
    ended: VecDeque<(Completion, Option<Arc<Shared>>)>,
    /// Whom to tell when somebody waits: one for each volume that tickets under way are of.
    hurry: Vec<Weak<dyn Hurry>>,
    /// Found empty since the last ticket was sent here: whoever looks again has nothing else to do.
    looked: bool,
    /// Threads that sleep until something comes.
    waiters: usize,
}

impl std::fmt::Debug for Entries {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_list().entries(self.ended.iter().map(|(completion, _)| completion)).finish()
    }
}

impl CompletionQueue {
    /// An empty queue.
    ///
    /// # Errors
    /// The operating system has no eventfd to give.
    pub fn new() -> Result<Arc<Self>> {
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let event = rustix::event::eventfd(0, flags).map_err(std::io::Error::from)?;
        let entries = Mutex::new(Entries::default());
        let watched = AtomicBool::new(false);
        Ok(Arc::new(Self { entries, arrived: Condvar::new(), event, watched }))
    }

    fn push(self: &Arc<Self>, completion: Completion, left: Option<Arc<Shared>>) {
        let mut entries = self.entries.lock();
        entries.ended.push_back((completion, left));
        // The counter only says "not empty"; it cannot overflow with one addition per change from empty.
        if entries.ended.len() == 1 && self.watched.load(Ordering::Relaxed) {
            self.signal();
        }
        let is_awaited = entries.waiters > 0;
        drop(entries);
        if is_awaited && !PutOff::note(self) {
            self.arrived.notify_one();
        }
    }

    /// Makes the file descriptor readable. Under the lock.
    fn signal(&self) {
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }

    /// A ticket under way will be delivered here.
    fn expect(&self, hurry: &Arc<dyn Hurry>) {
        let mut entries = self.entries.lock();
        // Who sleeps in `wait` has said so before this ticket came, and does not again.
        if self.watched.load(Ordering::Relaxed) || entries.waiters > 0 {
            drop(entries);
            return hurry.hurry();
        }
        entries.looked = false;
        let known = |weak: &Weak<dyn Hurry>| std::ptr::addr_eq(weak.as_ptr(), Arc::as_ptr(hurry));
        if !entries.hurry.iter().any(known) {
            // Who knows how many come never looks in vain, and one queue may see many volumes come and go: each would keep its memory.
            entries.hurry.retain(|volume| volume.strong_count() > 0);
            entries.hurry.push(Arc::downgrade(hurry));
        }
    }

    /// Takes the next completion; when there is none, tells everybody who is concerned that somebody waits.
    fn next(&self, waits: bool) -> Option<Completion> {
        let mut entries = self.entries.lock();
        let Some((completion, left)) = entries.ended.pop_front() else {
            if waits || std::mem::replace(&mut entries.looked, true) {
                Self::hurry_all(entries);
            }
            return None;
        };
        if entries.ended.is_empty() && self.watched.load(Ordering::Relaxed) {
            let _ = rustix::io::read(&self.event, &mut [0_u8; 8]);
        }
        drop(entries);
        drop(left);
        Some(completion)
    }

    /// Somebody waits for what is to be delivered here.
    fn hurry_all(mut entries: MutexGuard<'_, Entries>) {
        let hurry = std::mem::take(&mut entries.hurry);
        drop(entries);
        hurry.iter().filter_map(Weak::upgrade).for_each(|volume| volume.hurry());
    }

    /// The next completion, if there is one. Does not block.
    pub fn take(&self) -> Option<Completion> {
        self.next(false)
    }

    /// The next completion; blocks until there is one.
    pub fn wait(&self) -> Completion {
        loop {
            if let Some(next) = self.next(true) {
                return next;
            }
            self.sleep(None);
        }
    }

    /// As [`CompletionQueue::wait`], for at most about `timeout_us` microseconds; `None` if nothing came until then.
    pub fn wait_timeout(&self, timeout_us: u64) -> Option<Completion> {
        let clock = SystemClock::default();
        let began_ns = clock.monotonic_ns();
        let mut is_over = false;
        loop {
            if let Some(next) = self.next(true) {
                return Some(next);
            }
            if is_over {
                return None;
            }
            // Woken is not served: somebody else may have taken what came.
            let waited_us = clock.since_ns(began_ns) / 1000;
            let left_us = timeout_us.saturating_sub(waited_us);
            is_over = left_us == 0 || self.sleep(Some(left_us));
        }
    }

    /// Sleeps until something may have come, at most `most_us` microseconds. True: the time ran out. What was meant to wake this thread may
    /// have come all the same, so it looks again.
    fn sleep(&self, most_us: Option<u64>) -> bool {
        let mut entries = self.entries.lock();
        // What was sent here since the last look is not gathered either: then it is told before this sleeps.
        if !entries.ended.is_empty() || !entries.hurry.is_empty() {
            return false;
        }
        entries.waiters += 1;
        let timed_out = if let Some(most_us) = most_us {
            wait_for(&self.arrived, &mut entries, most_us)
        } else {
            self.arrived.wait(&mut entries);
            false
        };
        entries.waiters -= 1;
        timed_out
    }
}

/// Queues whose waiters a thread is to wake.
#[derive(Default)]
struct PutOff {
    /// How many [`GatheredWakes`] the thread has.
    depth: usize,
    /// Each once, and whether more than one completion has come.
    queues: Vec<(Arc<CompletionQueue>, bool)>,
}

thread_local! {
    static PUT_OFF: RefCell<PutOff> = const { RefCell::new(PutOff { depth: 0, queues: Vec::new() }) };
}

impl PutOff {
    /// Something has come to `queue`. False: it is for the caller to wake its waiters.
    fn note(queue: &Arc<CompletionQueue>) -> bool {
        let noted = PUT_OFF.try_with(|put_off| {
            let mut put_off = put_off.borrow_mut();
            if put_off.depth == 0 {
                return false;
            }
            let known = put_off.queues.iter_mut().find(|(known, _)| Arc::ptr_eq(known, queue));
            match known {
                Some((_, several)) => *several = true,
                None => put_off.queues.push((queue.clone(), false)),
            }
            true
        });
        noted.unwrap_or(false)
    }
}

/// See [`gather_wakes`].
#[must_use = "wake-ups are put off for as long as it lives"]
pub struct GatheredWakes {
    /// It belongs to its thread: only that has what was put off.
    not_send: PhantomData<*const ()>,
}

/// As long as the answer lives, threads that wait for queues are not woken by what this thread delivers there, but at its end.
pub fn gather_wakes() -> GatheredWakes {
    PUT_OFF.with(|put_off| put_off.borrow_mut().depth += 1);
    GatheredWakes { not_send: PhantomData }
}

impl Drop for GatheredWakes {
    fn drop(&mut self) {
        let queues = PUT_OFF.with(|put_off| {
            let mut put_off = put_off.borrow_mut();
            put_off.depth -= 1;
            if put_off.depth == 0 { std::mem::take(&mut put_off.queues) } else { Vec::new() }
        });
        for (queue, several) in queues {
            if several {
                queue.arrived.notify_all();
            } else {
                queue.arrived.notify_one();
            }
        }
    }
}

impl AsFd for CompletionQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        let entries = self.entries.lock();
        if !self.watched.swap(true, Ordering::Relaxed) && !entries.ended.is_empty() {
            self.signal();
        }
        Self::hurry_all(entries);
        self.event.as_fd()
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::error::Error;
    use std::sync::mpsc;

    #[test]
    fn a_callback_is_called_once_whether_the_end_comes_before_or_after_it() {
        let (sender, receiver) = mpsc::channel();
        let tell = |sender: &mpsc::Sender<_>| {
            let sender = sender.clone();
            move |result| sender.send(result).expect("receiver lives")
        };
        let (early, promise) = ticket(None);
        promise.complete(Ok(()));
        early.on_completion(tell(&sender));
        assert_eq!(receiver.try_recv(), Ok(Ok(())));

        let (late, promise) = ticket(None);
        late.on_completion(tell(&sender));
        assert!(receiver.try_recv().is_err());
        promise.complete(Err(Error::WouldBlock));
        assert_eq!(receiver.try_recv(), Ok(Err(Error::WouldBlock)));
        drop(sender);
        assert!(receiver.recv().is_err(), "nothing was told twice");
    }

    #[test]
    fn a_callback_may_use_another_ticket() {
        let (first, first_promise) = ticket(None);
        let (second, second_promise) = ticket(None);
        let (sender, receiver) = mpsc::channel();
        first.on_completion(move |_| second_promise.complete(Ok(())));
        second.on_completion(move |result| sender.send(result).expect("receiver lives"));
        first_promise.complete(Ok(()));
        assert_eq!(receiver.try_recv(), Ok(Ok(())));
    }

    #[test]
    fn a_ticket_that_has_ended_is_delivered_at_once_and_nobody_sleeps_over_it() {
        let queue = CompletionQueue::new().expect("an eventfd");
        let (ticket, promise) = ticket(None);
        promise.complete(Err(Error::WouldBlock));
        ticket.deliver(&queue, 7);
        // As who has looked a moment before it came.
        assert!(!queue.sleep(Some(1)), "not for a microsecond");
        let came = Completion { user_data: 7, result: Err(Error::WouldBlock) };
        assert_eq!((queue.take(), queue.take()), (Some(came), None));
    }

    #[test]
    fn wake_ups_that_were_put_off_twice_wait_for_the_last_end() {
        let put_off = || PUT_OFF.with(|put_off| put_off.borrow().queues.len());
        let queue = CompletionQueue::new().expect("an eventfd");
        // Somebody sleeps.
        queue.entries.lock().waiters += 1;
        let outer = gather_wakes();
        let inner = gather_wakes();
        let (ticket, promise) = ticket(None);
        ticket.deliver(&queue, 1);
        promise.complete(Ok(()));
        drop(inner);
        assert_eq!(put_off(), 1);
        drop(outer);
        assert_eq!(put_off(), 0);
    }

    #[test]
    fn what_is_left_of_a_ticket_is_freed_by_whoever_takes_its_completion() {
        let queue = CompletionQueue::new().expect("an eventfd");
        let (ticket, promise) = ticket(None);
        let left = Arc::downgrade(promise.0.as_ref().expect("not ended"));
        ticket.deliver(&queue, 1);
        promise.complete(Ok(()));
        assert!(left.upgrade().is_some(), "not by whoever completes it");
        assert_eq!(queue.take(), Some(Completion { user_data: 1, result: Ok(()) }));
        assert!(left.upgrade().is_none());
    }

    /// As with one queue for many volumes, each of which is closed before what came of it is taken.
    #[test]
    fn a_queue_forgets_volumes_that_are_gone_also_if_it_is_never_found_empty() {
        let queue = CompletionQueue::new().expect("an eventfd");
        let kept: Arc<dyn Hurry> = Arc::new(Told::default());
        for number in 0..1000 {
            let volume: Arc<dyn Hurry> = Arc::new(Told::default());
            for hurry in [&volume, &kept] {
                let (ticket, promise) = ticket(Some(hurry.clone()));
                ticket.deliver(&queue, number);
                promise.complete(Ok(()));
            }
            drop(volume);
            assert!((0..2).all(|_| queue.take().is_some_and(|next| next.user_data == number)));
            let known = queue.entries.lock().hurry.len();
            assert!(known <= 2, "{known} volumes are known");
        }
    }

    /// Counts how often it was told that somebody waits.
    #[derive(Default)]
    struct Told(std::sync::atomic::AtomicUsize);

    impl Hurry for Told {
        fn hurry(&self) {
            self.0.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        }
    }

    impl Told {
        fn times(&self) -> usize {
            self.0.load(std::sync::atomic::Ordering::SeqCst)
        }
    }

    fn patient(told: &Arc<Told>) -> (SyncTicket, Promise) {
        ticket(Some(Arc::<Told>::clone(told)))
    }

    #[test]
    fn who_waits_for_a_ticket_says_so_once_and_who_only_looks_does_not() {
        let told = Arc::new(Told::default());
        let (first, _promise) = patient(&told);
        assert!(first.poll().is_none() && told.times() == 0);
        assert!(first.wait_timeout(1).is_none() && first.wait_timeout(1).is_none());
        assert_eq!(told.times(), 1);
        let (second, _promise) = patient(&told);
        second.on_completion(|_| ());
        assert_eq!(told.times(), 2);
        let (third, promise) = patient(&told);
        promise.complete(Ok(()));
        assert_eq!((third.wait(), told.times()), (Ok(()), 2));
    }

    #[test]
    fn who_is_woken_for_nothing_waits_for_a_ticket_no_longer_than_asked() {
        use std::sync::atomic::{AtomicBool, Ordering};
        let (waited_for, _promise) = ticket(None);
        let inner = waited_for.0.clone();
        let is_over = AtomicBool::new(false);
        let woken = std::thread::scope(|scope| {
            let waker = scope.spawn(|| {
                let mut times = 0;
                while !is_over.load(Ordering::SeqCst) && times < 500 {
                    std::thread::sleep(std::time::Duration::from_millis(10));
                    let _state = inner.state.lock();
                    inner.done.notify_all();
                    times += 1;
                }
                times
            });
            let result = waited_for.wait_timeout(100_000);
            is_over.store(true, Ordering::SeqCst);
            assert_eq!(result, None);
            waker.join().expect("no panic")
        });
        assert!(woken < 400, "100 ms took as long as {woken} wake-ups of 10 ms");
    }

    #[test]
    fn wakes_that_were_put_off_reach_every_waiter() {
        let queue = CompletionQueue::new().expect("an eventfd");
        let promises: Vec<Promise> = (0..4)
            .map(|number| {
                let (ticket, promise) = ticket(None);
                ticket.deliver(&queue, number);
                promise
            })
            .collect();
        std::thread::scope(|scope| {
            let waiters: Vec<_> = (0..4).map(|_| scope.spawn(|| queue.wait().user_data)).collect();
            while queue.entries.lock().waiters < 4 {
                std::thread::yield_now();
            }
            let wakes = gather_wakes();
            for promise in promises {
                promise.complete(Ok(()));
            }
            assert_eq!(queue.entries.lock().ended.len(), 4, "nobody was woken");
            drop(wakes);
            let mut seen: Vec<u64> =
                waiters.into_iter().map(|waiter| waiter.join().expect("no panic")).collect();
            seen.sort_unstable();
            assert_eq!(seen, [0, 1, 2, 3]);
        });
    }

    #[test]
    fn who_waits_for_a_queue_for_some_time_gets_what_comes_and_otherwise_nothing() {
        let told = Arc::new(Told::default());
        let queue = CompletionQueue::new().expect("an eventfd");
        assert_eq!(queue.wait_timeout(0), None);
        assert_eq!(queue.wait_timeout(1), None);
        let (first, promise) = patient(&told);
        first.deliver(&queue, 1);
        assert_eq!((queue.wait_timeout(1), told.times()), (None, 1), "who waits says so");
        assert_eq!(queue.entries.lock().waiters, 0);
        promise.complete(Err(Error::WouldBlock));
        let ended = Completion { user_data: 1, result: Err(Error::WouldBlock) };
        assert_eq!(queue.wait_timeout(0), Some(ended), "what is there needs no time");
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| queue.wait_timeout(u64::MAX));
            while queue.entries.lock().waiters == 0 {
                std::thread::yield_now();
            }
            // Somebody else is faster: who was woken goes back to sleep.
            queue.arrived.notify_all();
            let (second, promise) = ticket(None);
            second.deliver(&queue, 2);
            promise.complete(Ok(()));
            let ended = Some(Completion { user_data: 2, result: Ok(()) });
            assert_eq!(waiter.join().expect("no panic"), ended);
        });
    }

    #[test]
    fn a_ticket_for_a_queue_that_somebody_waits_for_is_not_gathered() {
        let told = Arc::new(Told::default());
        let queue = CompletionQueue::new().expect("an eventfd");
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| queue.wait().user_data);
            while queue.entries.lock().waiters == 0 {
                std::thread::yield_now();
            }
            let (ticket, promise) = patient(&told);
            ticket.deliver(&queue, 7);
            let times = told.times();
            promise.complete(Ok(()));
            assert_eq!(waiter.join().expect("no panic"), 7);
            assert_eq!(times, 1);
        });
    }

    /// Has another ticket sent to the queue while the first look at it tells who is concerned.
    struct Sends(Mutex<Option<(Arc<CompletionQueue>, SyncTicket)>>);

    impl Hurry for Sends {
        fn hurry(&self) {
            let sent = self.0.lock().take();
            if let Some((queue, ticket)) = sent {
                ticket.deliver(&queue, 2);
            }
        }
    }

    #[test]
    fn a_ticket_that_comes_between_a_look_at_a_queue_and_the_sleep_is_not_gathered() {
        let told = Arc::new(Told::default());
        let queue = CompletionQueue::new().expect("an eventfd");
        let (second, promise) = patient(&told);
        let sends: Arc<dyn Hurry> = Arc::new(Sends(Mutex::new(Some((queue.clone(), second)))));
        let (first, _under_way) = ticket(Some(sends.clone()));
        first.deliver(&queue, 1);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| queue.wait().user_data);
            while queue.entries.lock().waiters == 0 {
                std::thread::yield_now();
            }
            let times = told.times();
            promise.complete(Ok(()));
            assert_eq!(waiter.join().expect("no panic"), 2);
            assert_eq!(times, 1, "who sleeps has said so");
        });
    }

    /// A waker that looks, when it is dropped, whether a ticket can be used.
    struct Looks {
        shared: Arc<Shared>,
        usable: Arc<AtomicBool>,
    }

    impl std::task::Wake for Looks {
        fn wake(self: Arc<Self>) {}
    }

    impl Drop for Looks {
        fn drop(&mut self) {
            self.usable.store(self.shared.state.try_lock().is_some(), Ordering::SeqCst);
        }
    }

    #[test]
    fn what_is_dropped_with_a_waker_may_use_the_ticket() {
        let (ticket, _promise) = ticket(None);
        let usable = Arc::new(AtomicBool::new(false));
        let looks = Looks { shared: ticket.0.clone(), usable: usable.clone() };
        let mut ticket = std::pin::pin!(ticket);
        let waker = Waker::from(Arc::new(looks));
        assert!(ticket.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        drop(waker);
        let other = Waker::noop();
        assert!(ticket.as_mut().poll(&mut Context::from_waker(other)).is_pending());
        assert!(usable.load(Ordering::SeqCst));
    }

    /// Which of the two is meant is open for a type that may be sent to other threads: then this does not compile.
    #[test]
    fn gathered_wakes_stay_with_their_thread() {
        trait Which<Case> {
            fn is_decided() -> bool {
                true
            }
        }
        struct Sendable;
        impl<T> Which<()> for T {}
        impl<T: Send> Which<Sendable> for T {}
        assert!(<GatheredWakes as Which<_>>::is_decided());
    }

    #[test]
    fn a_second_look_at_an_empty_queue_counts_as_waiting() {
        let told = Arc::new(Told::default());
        let queue = CompletionQueue::new().expect("an eventfd");
        let deliver = || {
            let (ticket, promise) = patient(&told);
            ticket.deliver(&queue, 1);
            promise
        };
        let mut under_way = Vec::new();
        for _ in 0..3 {
            under_way.push(deliver());
            assert!(queue.take().is_none());
        }
        assert_eq!(told.times(), 0, "each look came after something new");
        assert!(queue.take().is_none());
        assert_eq!(told.times(), 1);
        assert!(queue.take().is_none());
        assert_eq!(told.times(), 1, "nothing new is under way");
    }

    #[test]
    fn tickets_for_a_queue_whose_descriptor_is_in_use_are_never_gathered() {
        let told = Arc::new(Told::default());
        let queue = CompletionQueue::new().expect("an eventfd");
        let (early, early_promise) = patient(&told);
        early.deliver(&queue, 1);
        assert_eq!(told.times(), 0);
        queue.as_fd();
        assert_eq!(told.times(), 1, "from here on waiting goes unseen");
        let (late, late_promise) = patient(&told);
        late.deliver(&queue, 2);
        assert_eq!(told.times(), 2);
        late_promise.complete(Ok(()));
        early_promise.complete(Ok(()));
        let order: Vec<u64> =
            std::iter::from_fn(|| queue.take()).map(|next| next.user_data).collect();
        assert_eq!(order, [2, 1]);
    }

    #[test]
    fn the_descriptor_is_readable_as_long_as_something_is_in_the_queue() {
        let queue = CompletionQueue::new().expect("an eventfd");
        let push = |number| {
            let (ticket, promise) = ticket(None);
            ticket.deliver(&queue, number);
            promise.complete(Ok(()));
        };
        let readable = || {
            let mut fds = [rustix::event::PollFd::new(&*queue, rustix::event::PollFlags::IN)];
            let none = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
            rustix::event::poll(&mut fds, Some(&none)).expect("poll") > 0
        };
        push(1);
        assert!(readable(), "what was there before the descriptor was asked for counts");
        push(2);
        assert!(queue.take().is_some() && readable());
        assert!(queue.take().is_some() && !readable());
        push(3);
        assert!(readable());
    }
}
