//! A commit service on tokio: each request is a task that writes, awaits its ticket, and answers. Durability costs no
//! thread, and requests that arrive together share a flush.
//!
//! ```text
//! cargo run --release -p weir --example tokio_commit
//! ```

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::Scratch;
use tokio::task::JoinSet;
use weir::{File, OpenFlags, Result, SyncKind, Volume};

/// What a client sends, and gets back.
struct Order {
    client: u64,
    number: u64,
}

/// Stores orders, one file per client.
struct Orders {
    files: Vec<File>,
}

impl Orders {
    fn open(volume: &Volume, clients: u64) -> Result<Self> {
        let file = |client| volume.open_file(format!("/client-{client}"), OpenFlags::CREATE);
        Ok(Self { files: (0..clients).map(file).collect::<Result<_>>()? })
    }

    /// Durable when it returns. The write is a copy into the cache; it blocks only for the throttle, when more is
    /// written than the disk takes. A service that writes megabytes hands those to `spawn_blocking`.
    async fn store(&self, order: &Order) -> Result<()> {
        let file = &self.files[order.client as usize];
        file.append(&order.number.to_le_bytes())?;
        file.fsync_async(0..u64::MAX, SyncKind::Data)?.await
    }
}

/// `clients` clients with `each` orders one after the other; answers how long the slowest order took.
async fn serve(orders: Arc<Orders>, clients: u64, each: u64) -> Result<Duration> {
    let mut tasks = JoinSet::new();
    for client in 0..clients {
        let orders = orders.clone();
        tasks.spawn(async move {
            let mut slowest = Duration::ZERO;
            for number in 0..each {
                let begun = Instant::now();
                orders.store(&Order { client, number }).await?;
                slowest = slowest.max(begun.elapsed());
            }
            Ok::<_, weir::Error>(slowest)
        });
    }
    let mut slowest = Duration::ZERO;
    while let Some(ended) = tasks.join_next().await {
        let of_client = ended.map_err(|panic| weir::Error::Io(panic.to_string()))??;
        slowest = slowest.max(of_client);
    }
    Ok(slowest)
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    // Two workers serve any number of clients: none of them ever waits for the disk.
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(2).build()?)
}

fn main() -> Result<()> {
    let scratch = Scratch::new("tokio", 256 << 20)?;
    let volume = scratch.open()?;
    let (clients, each) = (200, 50);
    let orders = Arc::new(Orders::open(&volume, clients)?);
    let flushes = volume.stats().log.flushes;
    let begun = Instant::now();
    let slowest = runtime()?.block_on(serve(orders, clients, each))?;
    let took = begun.elapsed();
    let flushes = volume.stats().log.flushes - flushes;
    println!(
        "{} orders of {clients} clients durable in {took:?}: {:.0} per second, {flushes} flushes, the slowest took {slowest:?}",
        clients * each,
        (clients * each) as f64 / took.as_secs_f64(),
    );
    volume.close()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order_that_was_answered_is_there_and_clients_share_flushes() {
        let scratch = Scratch::new("tokio-test", 64 << 20).expect("volume");
        let (clients, each) = (20, 10);
        {
            let volume = scratch.open().expect("open");
            let orders = Arc::new(Orders::open(&volume, clients).expect("files"));
            let before = volume.stats().log.flushes;
            runtime().expect("runtime").block_on(serve(orders, clients, each)).expect("stored");
            let flushes = volume.stats().log.flushes - before;
            assert!(flushes < clients * each, "{flushes} flushes");
        }
        let volume = scratch.open().expect("open");
        for client in 0..clients {
            let attr = volume.metadata(format!("/client-{client}")).expect("there");
            assert_eq!(attr.size_bytes, each * 8);
        }
    }
}
