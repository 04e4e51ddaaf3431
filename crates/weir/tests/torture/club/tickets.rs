//! How a member asks for durability, and who hears of it: whoever asked, another member, a queue's taker, or a callback.

use super::{Club, OWN_THREAD, Promise, QUEUES, Seen, Shared};
use crate::club::Member;
use crate::disk::Core;
use crate::{Stage, lock};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;
use weir::*;

/// Most requests that a member has submitted at a time.
const MANY: u64 = 300;

/// Wakes a thread that waits for a future.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// The smallest executor.
fn block_on(mut ticket: SyncTicket) -> Result<()> {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    loop {
        if let Poll::Ready(result) = look(&mut ticket, &waker) {
            return result;
        }
        std::thread::park();
    }
}

fn look(ticket: &mut SyncTicket, waker: &Waker) -> Poll<Result<()>> {
    Pin::new(ticket).poll(&mut Context::from_waker(waker))
}

impl Shared {
    /// What was promised counts if it was answered before the disk died.
    pub(super) fn hears(&self, core: &Core, seen: &Seen, is_kept: bool) {
        if is_kept && !core.is_dead() {
            self.acknowledge(seen);
        }
    }

    fn deliver(&self, ticket: SyncTicket, queue: usize, seen: Seen) {
        let number = self.next.fetch_add(1, Ordering::SeqCst);
        lock(&self.delivered[queue]).insert(number, seen);
        ticket.deliver(&self.queues[queue], number);
    }

    fn under_way(&self, queue: usize) -> usize {
        lock(&self.delivered[queue]).len()
    }

    fn hear_of(&self, core: &Core, queue: usize, completion: &Completion) {
        let seen = lock(&self.delivered[queue]).remove(&completion.user_data);
        let seen = seen.expect("a ticket is delivered once");
        self.hears(core, &seen, completion.result.is_ok());
    }
}

impl Club {
    /// The thread that one queue has to itself: while anything is under way to it, something comes.
    pub fn reap(&self, core: &Core, stage: &Stage) {
        loop {
            if self.shared.under_way(OWN_THREAD) > 0 {
                stage.doing("waits for the queue that it has to itself");
                let completion = self.shared.queues[OWN_THREAD].wait();
                self.shared.hear_of(core, OWN_THREAD, &completion);
            } else if self.stop_reaper.load(Ordering::SeqCst) {
                return;
            } else {
                stage.doing("has nothing to wait for");
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }

    /// All tickets end, whatever has become of the volume.
    pub fn end_tickets(&self, core: &Core, stage: &Stage) {
        let kept = std::mem::take(&mut *lock(&self.shared.kept));
        for (ticket, seen) in kept {
            stage.doing("waits for a ticket of the club to end");
            let is_kept = ticket.wait().is_ok();
            self.shared.hears(core, &seen, is_kept);
        }
        stage.doing("waits for callbacks");
        while self.shared.callbacks.load(Ordering::SeqCst) > 0 {
            std::thread::sleep(Duration::from_micros(200));
        }
        for (number, queue) in self.shared.queues.iter().enumerate() {
            while self.shared.under_way(number) > 0 {
                stage.doing("waits for what comes to a queue of the club");
                self.shared.hear_of(core, number, &queue.wait());
            }
            assert_eq!(queue.take(), None, "more came than was sent");
        }
    }
}

impl Member<'_> {
    /// What has become of a call that makes durable what was seen.
    fn heard(&self, seen: &Seen, result: Result<()>) -> Result<()> {
        self.shared.hears(&self.disk.core, seen, result.is_ok());
        result
    }

    /// A sync that waits.
    pub(super) fn sync(&mut self) -> Result<()> {
        let file = self.below(3) as usize;
        let choice = self.below(14);
        let all = |data_only| Promise::File { file, range: 0..u64::MAX, data_only };
        let promise = match choice {
            0 | 1 => Promise::All,
            2 => Promise::Operations,
            3..8 => all(true),
            _ => all(false),
        };
        let handle = self.handle(file, false)?;
        let seen = self.shared.see(&promise);
        self.stage.doing(&format!("sync {choice} of file {file}"));
        let result = match choice {
            0 => self.volume.checkpoint(),
            1 => self.volume.sync(),
            2 => return self.watch(),
            3..8 => handle.fdatasync(),
            8 => match handle.fsync_if_durable(0..u64::MAX, SyncKind::Full) {
                Some(result) => result,
                None => return Ok(()),
            },
            _ => handle.fsync(),
        };
        if choice < 2 && result.is_ok() {
            self.check_durable(self.barred, "a barrier before a sync of all");
        }
        self.heard(&seen, result)
    }

    /// Looks how far it is, or waits for that, and asks for nothing.
    fn watch(&mut self) -> Result<()> {
        let seen = self.shared.see(&Promise::Operations);
        let lsn = self.volume.last_lsn();
        self.stage.doing("watches how far the log is");
        let is_durable = match self.below(3) {
            0 => self.volume.durable_lsn() >= lsn,
            _ => self.volume.wait_durable(lsn, Some(self.below(20_000)))?,
        };
        self.shared.hears(&self.disk.core, &seen, is_durable);
        Ok(())
    }

    /// A sync that does not wait.
    pub(super) fn submit(&mut self) -> Result<()> {
        let file = self.below(3) as usize;
        let handle = self.handle(file, false)?;
        let choice = self.below(10);
        let data_only = self.below(2) == 0;
        let kind = if data_only { SyncKind::Data } else { SyncKind::Full };
        let range = if self.below(2) == 0 { 0..u64::MAX } else { self.pages_of_somebody() };
        let promise = match choice {
            0 => Promise::All,
            1 | 2 => Promise::Operations,
            _ => Promise::File { file, range: range.clone(), data_only },
        };
        let seen = self.shared.see(&promise);
        self.stage.doing(&format!("submits {promise:?}"));
        let ticket = match choice {
            0 => self.volume.sync_async(),
            1 | 2 => self.volume.ticket_for(self.volume.last_lsn()),
            _ => handle.fsync_async_with(range, kind, WhenFull::Wait),
        }?;
        self.take_up(ticket, seen)
    }

    /// As a program does that has hundreds of requests under way.
    pub(super) fn submit_many(&mut self) -> Result<()> {
        let queue = self.below(QUEUES as u64) as usize;
        for _ in 0..self.below(MANY) {
            self.write()?;
            let file = self.below(2) as usize;
            let (handle, range) = (self.handle(file, false)?, self.pages_of_somebody());
            let promise = Promise::File { file, range: range.clone(), data_only: true };
            let seen = self.shared.see(&promise);
            self.stage.doing("submits one of many");
            let ticket = handle.fsync_async(range, SyncKind::Data)?;
            self.shared.deliver(ticket, queue, seen);
        }
        Ok(())
    }

    /// Somebody hears of it, in some way.
    pub(super) fn take_up(&mut self, ticket: SyncTicket, seen: Seen) -> Result<()> {
        let choice = self.below(11);
        self.stage.doing(&format!("takes a ticket up in manner {choice}"));
        match choice {
            0 => {
                let result = ticket.wait();
                self.heard(&seen, result)
            }
            1 => loop {
                if let Some(result) = ticket.wait_timeout(self.below(2000)) {
                    return self.heard(&seen, result);
                }
            },
            2 => {
                for _ in 0..50 {
                    if let Some(result) = ticket.poll() {
                        return self.heard(&seen, result);
                    }
                    std::thread::sleep(Duration::from_micros(100));
                }
                self.keep(ticket, seen);
                Ok(())
            }
            3 => {
                let result = block_on(ticket);
                self.heard(&seen, result)
            }
            4 => {
                // Another thread's waker takes the place of this one.
                let mut ticket = ticket;
                let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
                if let Poll::Ready(result) = look(&mut ticket, &waker) {
                    return self.heard(&seen, result);
                }
                self.keep(ticket, seen);
                Ok(())
            }
            5 => {
                self.call_back(ticket, seen);
                Ok(())
            }
            6 => {
                drop(ticket);
                Ok(())
            }
            7 => {
                self.keep(ticket, seen);
                Ok(())
            }
            _ => {
                let queue = choice as usize - 8;
                self.shared.deliver(ticket, queue, seen);
                Ok(())
            }
        }
    }

    fn keep(&self, ticket: SyncTicket, seen: Seen) {
        lock(&self.shared.kept).push((ticket, seen));
    }

    /// Whoever is told may submit the next.
    fn call_back(&mut self, ticket: SyncTicket, seen: Seen) {
        let (shared, core) = (self.shared.clone(), self.disk.core.clone());
        let file = self.below(2) as usize;
        let handle = self.files.get(&(file, false)).cloned();
        let (queue, range) = (self.below(QUEUES as u64) as usize, self.pages_of_somebody());
        shared.callbacks.fetch_add(1, Ordering::SeqCst);
        ticket.on_completion(move |result| {
            shared.hears(&core, &seen, result.is_ok());
            if let Some(handle) = handle {
                let promise = Promise::File { file, range: range.clone(), data_only: true };
                let seen = shared.see(&promise);
                if let Ok(ticket) = handle.fsync_async(range, SyncKind::Data) {
                    shared.deliver(ticket, queue, seen);
                }
            }
            shared.callbacks.fetch_sub(1, Ordering::SeqCst);
        });
    }

    /// Waits for what another may have asked for.
    pub(super) fn hear(&mut self) -> Result<()> {
        let choice = self.below(4);
        if choice < 2 {
            let kept = {
                let mut kept = lock(&self.shared.kept);
                let count = kept.len() as u64;
                (count > 0).then(|| kept.swap_remove(self.dice.below(count) as usize))
            };
            let Some((ticket, seen)) = kept else { return Ok(()) };
            self.stage.doing("waits for a ticket that was left");
            let result = if choice == 0 { block_on(ticket) } else { ticket.wait() };
            return self.heard(&seen, result);
        }
        let number = choice as usize - 2;
        let queue = &self.shared.queues[number];
        self.stage.doing("takes from a queue");
        let completion = if number == 1 {
            let mut watched = [rustix::event::PollFd::new(&**queue, rustix::event::PollFlags::IN)];
            let most = rustix::event::Timespec { tv_sec: 0, tv_nsec: 2_000_000 };
            let ready = rustix::event::poll(&mut watched, Some(&most)).unwrap_or(0);
            if ready == 0 { None } else { queue.take() }
        } else if self.dice.below(2) == 0 {
            queue.take()
        } else {
            queue.wait_timeout(self.dice.below(5000))
        };
        if let Some(completion) = completion {
            self.shared.hear_of(&self.disk.core, number, &completion);
        }
        Ok(())
    }
}
