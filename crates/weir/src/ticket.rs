//! Durability as something to hold: [`SyncTicket`] and [`CompletionQueue`].
//!
//! A ticket is one promise: "what this request covers is durable", or an error. It can be waited for, polled, awaited as a
//! future on any executor, delivered to a queue, or given a callback. Dropping it does not cancel anything. Thousands in
//! flight cost one small allocation each and no thread.
//!
//! While nobody waits for a ticket, the log may gather it with others for up to two milliseconds, if tickets have come many at
//! a time: that is what makes a deep queue share frames and flushes. Whoever waits ends that at once: [`SyncTicket::wait`],
//! awaiting, a callback, [`CompletionQueue::wait`], a second [`CompletionQueue::take`] in vain, or a delivery to a
//! queue whose file descriptor is in use. [`SyncTicket::poll`] only looks.
//!
//! Lock order: a ticket's state is a leaf; wakers, queues and callbacks run outside of it.

use crate::error::Result;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Condvar, Mutex, wait_for};
use std::collections::VecDeque;
use std::future::Future;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::Weak;
use std::task::{Context, Poll, Waker};

/// Who is told that somebody waits.
pub trait Hurry: Send + Sync {
    /// What was asked for patiently is waited for now.
    fn hurry(&self);
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

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    done: Condvar,
}

/// A request for durability. See the module's head.
#[must_use = "a ticket that is dropped is not cancelled, but nobody learns whether it failed"]
pub struct SyncTicket(Arc<Shared>);

/// The engine's end of a ticket; completing it twice is impossible.
pub struct Promise(Arc<Shared>);

/// A ticket and its other end.
pub fn ticket() -> (SyncTicket, Promise) {
    let shared = Arc::new(Shared::default());
    (SyncTicket(shared.clone()), Promise(shared))
}

impl Promise {
    /// The request may be gathered with others until `hurry` is told that somebody waits.
    pub fn patient_until_told(&self, hurry: Arc<dyn Hurry>) {
        self.0.state.lock().hurry = Some(hurry);
    }

    /// The request has ended.
    pub fn complete(self, result: Result<()>) {
        let (waker, queue, callback) = {
            let mut state = self.0.state.lock();
            state.result = Some(result.clone());
            state.hurry = None;
            (state.waker.take(), state.queue.take(), state.callback.take())
        };
        self.0.done.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
        if let Some((queue, user_data)) = queue {
            queue.push(user_data, result);
        } else if let Some(callback) = callback {
            callback(result);
        }
    }
}

impl std::fmt::Debug for SyncTicket {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("SyncTicket").field("result", &self.poll()).finish()
    }
}

impl SyncTicket {
    /// The result, if the request has ended. Does not block.
    pub fn poll(&self) -> Option<Result<()>> {
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
        self.hurry();
        let mut state = self.0.state.lock();
        loop {
            if let Some(result) = &state.result {
                return Some(result.clone());
            }
            if wait_for(&self.0.done, &mut state, timeout_us) {
                return state.result.clone();
            }
        }
    }

    /// Delivers the result to `queue` with `user_data`, now or when the request ends. Uses the ticket up.
    pub fn deliver(self, queue: &Arc<CompletionQueue>, user_data: u64) {
        let (ended, hurry) = {
            let mut state = self.0.state.lock();
            if state.result.is_none() {
                state.queue = Some((queue.clone(), user_data));
            }
            (state.result.clone(), state.hurry.take())
        };
        if let Some(result) = ended {
            queue.push(user_data, result);
        } else if let Some(hurry) = hurry {
            queue.expect(&hurry);
        }
    }

    /// Calls `callback` with the result: now, on this thread, if the request has ended, else when it does, on the thread of
    /// the engine that finds out. That thread makes others' requests durable as well, so the callback must be short, must not
    /// wait for anything, and must not drop the last handle of an unlinked file. Uses the ticket up.
    pub fn on_completion(self, callback: impl FnOnce(Result<()>) + Send + 'static) {
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
        self.hurry();
        let mut state = self.0.state.lock();
        if let Some(result) = &state.result {
            return Poll::Ready(result.clone());
        }
        state.waker = Some(context.waker().clone());
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
    ended: VecDeque<Completion>,
    /// Whom to tell when somebody waits: one for each volume that tickets under way are of.
    hurry: Vec<Weak<dyn Hurry>>,
    /// Found empty since the last ticket was sent here: whoever looks again has nothing else to do.
    looked: bool,
}

impl std::fmt::Debug for Entries {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.ended.fmt(formatter)
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

    fn push(&self, user_data: u64, result: Result<()>) {
        let mut entries = self.entries.lock();
        entries.ended.push_back(Completion { user_data, result });
        // The counter only says "not empty"; it cannot overflow with one addition per change from empty.
        if entries.ended.len() == 1 && self.watched.load(Ordering::Relaxed) {
            self.signal();
        }
        drop(entries);
        self.arrived.notify_one();
    }

    /// Makes the file descriptor readable. Under the lock.
    fn signal(&self) {
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }

    /// A ticket under way will be delivered here.
    fn expect(&self, hurry: &Arc<dyn Hurry>) {
        if self.watched.load(Ordering::Relaxed) {
            return hurry.hurry();
        }
        let mut entries = self.entries.lock();
        entries.looked = false;
        let known = |weak: &Weak<dyn Hurry>| std::ptr::addr_eq(weak.as_ptr(), Arc::as_ptr(hurry));
        if !entries.hurry.iter().any(known) {
            entries.hurry.push(Arc::downgrade(hurry));
        }
    }

    /// Takes the next completion; when there is none, tells everybody who is concerned that somebody waits.
    fn next(&self, waits: bool) -> Option<Completion> {
        let mut entries = self.entries.lock();
        let next = entries.ended.pop_front();
        if next.is_none() {
            if waits || std::mem::replace(&mut entries.looked, true) {
                let hurry = std::mem::take(&mut entries.hurry);
                drop(entries);
                hurry.iter().filter_map(Weak::upgrade).for_each(|volume| volume.hurry());
            }
        } else if entries.ended.is_empty() && self.watched.load(Ordering::Relaxed) {
            let _ = rustix::io::read(&self.event, &mut [0_u8; 8]);
        }
        next
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
            let mut entries = self.entries.lock();
            if entries.ended.is_empty() {
                self.arrived.wait(&mut entries);
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
        drop(entries);
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
        let (early, promise) = ticket();
        promise.complete(Ok(()));
        early.on_completion(tell(&sender));
        assert_eq!(receiver.try_recv(), Ok(Ok(())));

        let (late, promise) = ticket();
        late.on_completion(tell(&sender));
        assert!(receiver.try_recv().is_err());
        promise.complete(Err(Error::WouldBlock));
        assert_eq!(receiver.try_recv(), Ok(Err(Error::WouldBlock)));
        drop(sender);
        assert!(receiver.recv().is_err(), "nothing was told twice");
    }

    #[test]
    fn a_callback_may_use_another_ticket() {
        let (first, first_promise) = ticket();
        let (second, second_promise) = ticket();
        let (sender, receiver) = mpsc::channel();
        first.on_completion(move |_| second_promise.complete(Ok(())));
        second.on_completion(move |result| sender.send(result).expect("receiver lives"));
        first_promise.complete(Ok(()));
        assert_eq!(receiver.try_recv(), Ok(Ok(())));
    }
}
