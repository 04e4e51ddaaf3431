//! Durability without waiting and without an executor: a ticket can be polled, waited for, awaited with ten lines of our own,
//! or delivered to a queue that `poll(2)` understands.
//!
//! ```text
//! cargo run --release -p weir --example tickets
//! ```

mod common;

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Instant;

use common::Scratch;
use rustix::event::{PollFd, PollFlags, poll};
use weir::{CompletionQueue, File, OpenFlags, Result, SyncKind, SyncTicket, Volume};

/// Wakes the thread that waits in [`block_on`].
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// The smallest executor there is: polls one future, and sleeps in between.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// A transaction that spans two files, written the way it reads: nobody's thread waits in it.
async fn transfer(from: &File, to: &File, amount: u64) -> Result<()> {
    from.append(&amount.to_le_bytes())?;
    to.append(&amount.to_le_bytes())?;
    // Both are submitted before either is awaited: most often one frame and one flush make both durable.
    let (first, second) = (submit(from)?, submit(to)?);
    first.await?;
    second.await
}

fn submit(file: &File) -> Result<SyncTicket> {
    file.fsync_async(0..u64::MAX, SyncKind::Data)
}

/// Writes `count` files, all of them in flight at once, and lets the kernel tell when results are there.
fn many_at_once(volume: &Volume, count: u64) -> Result<u64> {
    let queue = CompletionQueue::new()?;
    let flushes_before = volume.stats().log.flushes;
    for number in 0..count {
        let file = volume.open_file(format!("/many-{number}"), OpenFlags::CREATE)?;
        file.write_at(0, &[number as u8; 4096])?;
        // The file may be closed at once; the ticket keeps what it needs.
        file.fsync_async(0..u64::MAX, SyncKind::Full)?.deliver(&queue, number);
    }
    let mut ended = 0;
    while ended < count {
        // An event loop would have its sockets in this list too.
        let mut descriptors = [PollFd::new(&queue, PollFlags::IN)];
        poll(&mut descriptors, None).map_err(std::io::Error::from)?;
        while let Some(completion) = queue.take() {
            completion.result?;
            ended += 1;
        }
    }
    Ok(volume.stats().log.flushes - flushes_before)
}

fn main() -> Result<()> {
    let scratch = Scratch::new("tickets", 256 << 20)?;
    let volume = scratch.open()?;
    let accounts = ["/alice", "/bob"].map(|path| volume.open_file(path, OpenFlags::CREATE));
    let [alice, bob] = accounts;
    let (alice, bob) = (alice?, bob?);

    // Awaited.
    block_on(transfer(&alice, &bob, 42))?;
    println!("transferred; everything up to operation {} is durable", volume.durable_lsn());

    // Polled, with something else to do in between.
    alice.append(b"a note")?;
    let ticket = submit(&alice)?;
    let mut meanwhile = 0_u64;
    while ticket.poll().is_none() {
        meanwhile += 1;
        std::hint::spin_loop();
    }
    ticket.wait()?;
    println!("polled {meanwhile} times while the disk worked");

    // Delivered.
    let count = 2000;
    let begun = Instant::now();
    let flushes = many_at_once(&volume, count)?;
    println!("{count} files durable in {:?}, with {flushes} flushes", begun.elapsed());
    volume.close()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tickets_awaited_and_delivered_are_durable_after_opening_again() {
        let scratch = Scratch::new("tickets-test", 64 << 20).expect("volume");
        {
            let volume = scratch.open().expect("open");
            let alice = volume.open_file("/alice", OpenFlags::CREATE).expect("create");
            let bob = volume.open_file("/bob", OpenFlags::CREATE).expect("create");
            block_on(transfer(&alice, &bob, 7)).expect("durable");
            let flushes = many_at_once(&volume, 200).expect("durable");
            assert!(flushes < 200, "{flushes} flushes for 200 files");
        }
        let volume = scratch.open().expect("open");
        for path in ["/alice", "/bob"] {
            let mut amount = [0; 8];
            let file = volume.open_file(path, OpenFlags::READ).expect("there");
            assert_eq!(file.read_at(0, &mut amount), Ok(8));
            assert_eq!(u64::from_le_bytes(amount), 7);
        }
        assert_eq!(volume.metadata("/many-199").expect("there").size_bytes, 4096);
    }
}
