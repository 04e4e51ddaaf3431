//! A write-ahead log as a small library: append, commit by ticket, watch what is durable, replay.
//!
//! ```text
//! cargo run --release -p weir --example wal
//! ```
//!
//! Records are framed with a checksum and their length. Weir checks every block that it reads, and a record that was
//! committed is there after a crash; but the last records before a crash may never have been committed, and one that spans
//! two pages may be there in part. The checksum is how replay knows where the log ends. It covers the length too, so that zeros,
//! as which such a part may read, are no record.

mod common;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use common::Scratch;
use weir::{File, OpenFlags, Result, SyncKind, SyncTicket, Volume};

/// Checksum and length before each record.
const HEADER_BYTES: usize = 8;

/// How far the log is durable, and what is under way.
#[derive(Default)]
struct Progress {
    durable_bytes: u64,
    /// Commits by the position that they cover the log up to.
    commits: BTreeMap<u64, Arc<SyncTicket>>,
}

/// A write-ahead log in one file. All methods may be called from any thread.
pub struct Wal {
    file: File,
    progress: Mutex<Progress>,
}

impl Wal {
    /// Opens the log at `path`, or makes it, and calls `replay` with each record that is there. What follows the last
    /// whole record is cut off.
    pub fn open(volume: &Volume, path: &str, mut replay: impl FnMut(&[u8])) -> Result<Self> {
        let file = volume.open_file(path, OpenFlags::CREATE)?;
        let mut bytes = vec![0; file.size() as usize];
        file.read_at(0, &mut bytes)?;
        let mut end = 0;
        while let Some(record) = record_at(&bytes[end..]) {
            replay(record);
            end += HEADER_BYTES + record.len();
        }
        file.truncate(end as u64)?;
        file.fsync()?;
        let progress = Progress { durable_bytes: end as u64, commits: BTreeMap::new() };
        Ok(Self { file, progress: Mutex::new(progress) })
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a record at the end; answers the position behind it. Not durable yet. A copy into the cache.
    pub fn append(&self, record: &[u8]) -> Result<u64> {
        let mut framed = Vec::with_capacity(HEADER_BYTES + record.len());
        framed.extend_from_slice(&[0; 4]);
        framed.extend_from_slice(&(record.len() as u32).to_le_bytes());
        framed.extend_from_slice(record);
        let checksum = crc_fast::crc32_iscsi(&framed[4..]);
        framed[..4].copy_from_slice(&checksum.to_le_bytes());
        // Atomic with respect to other appends: records of several threads never mix.
        let offset = self.file.append(&framed)?;
        Ok(offset + framed.len() as u64)
    }

    /// Asks for everything up to `position` to be durable and answers at once. The ticket can be polled, waited for or
    /// awaited; so can [`Wal::wait_durable`], by anybody.
    pub fn commit(&self, position: u64) -> Result<Arc<SyncTicket>> {
        let ticket = Arc::new(self.file.fsync_async(0..position, SyncKind::Data)?);
        self.progress().commits.insert(position, ticket.clone());
        Ok(ticket)
    }

    /// The log up to here is known to be durable.
    pub fn durable(&self) -> u64 {
        self.progress().durable_bytes
    }

    /// Waits until everything up to `position` is durable, whoever asked for it.
    pub fn wait_durable(&self, position: u64) -> Result<()> {
        loop {
            let covering = {
                let progress = self.progress();
                if progress.durable_bytes >= position {
                    return Ok(());
                }
                progress.commits.range(position..).next().map(|(at, ticket)| (*at, ticket.clone()))
            };
            let (at, ticket) = match covering {
                Some(found) => found,
                None => (position, self.commit(position)?),
            };
            let ended = ticket.wait();
            let mut progress = self.progress();
            if ended.is_err() {
                // Whoever asks next tries again: what failed is still in the cache.
                progress.commits.remove(&at);
                return ended;
            }
            // A commit covers everything before it: earlier ones need not be waited for any more.
            progress.durable_bytes = progress.durable_bytes.max(at);
            progress.commits = progress.commits.split_off(&(at + 1));
        }
    }
}

/// The record at the start of `bytes`, if a whole one is there.
fn record_at(bytes: &[u8]) -> Option<&[u8]> {
    let (checksum, rest) = bytes.split_first_chunk::<4>()?;
    let (length, after) = rest.split_first_chunk::<4>()?;
    let record = after.get(..u32::from_le_bytes(*length) as usize)?;
    let covered = &rest[..length.len() + record.len()];
    (crc_fast::crc32_iscsi(covered) == u32::from_le_bytes(*checksum)).then_some(record)
}

/// `writers` threads commit `each` records one after the other, while a follower ships what is durable, and only that.
fn run(wal: &Wal, writers: u64, each: u64) -> Result<()> {
    std::thread::scope(|scope| {
        let (ship, shipped) = std::sync::mpsc::channel::<u64>();
        let follower = scope.spawn(move || -> Result<()> {
            for position in shipped {
                // A replica must never be ahead of what survives here.
                wal.wait_durable(position)?;
                assert!(wal.durable() >= position);
            }
            Ok(())
        });
        let threads: Vec<_> = (0..writers)
            .map(|writer| {
                let ship = ship.clone();
                scope.spawn(move || -> Result<()> {
                    for number in 0..each {
                        let position = wal.append(format!("{writer}: {number}").as_bytes())?;
                        let ticket = wal.commit(position)?;
                        // The follower's affair, not the writer's: it has ended only after an error.
                        let _ = ship.send(position);
                        ticket.wait()?;
                    }
                    Ok(())
                })
            })
            .collect();
        drop(ship);
        for thread in threads.into_iter().chain([follower]) {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        Ok(())
    })
}

fn main() -> Result<()> {
    let scratch = Scratch::new("wal", 256 << 20)?;
    let (writers, each) = (16, 200);
    {
        let volume = scratch.open()?;
        let wal = Wal::open(&volume, "/wal", |_| {})?;
        let flushes = volume.stats().log.flushes;
        let begun = Instant::now();
        run(&wal, writers, each)?;
        let took = begun.elapsed();
        let flushes = volume.stats().log.flushes - flushes;
        let records = writers * each;
        println!("{records} records committed one by one in {took:?}, with {flushes} flushes");
        // Not committed: a crash may take it.
        wal.append(b"the last words")?;
    }
    let volume = scratch.open()?;
    let mut records = 0;
    let wal = Wal::open(&volume, "/wal", |_| records += 1)?;
    println!("{records} records replayed");
    drop(wal);
    volume.close()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_are_no_record_and_an_empty_record_is_one() {
        let scratch = Scratch::new("wal-zeros", 64 << 20).expect("volume");
        let volume = scratch.open().expect("open");
        let wal = Wal::open(&volume, "/wal", |_| panic!("a new log")).expect("open");
        wal.append(b"").expect("append");
        drop(wal);
        // What lies behind it was lost, and something later was not.
        volume
            .open_file("/wal", OpenFlags::READ_WRITE)
            .expect("there")
            .append(&[0; 100])
            .expect("append");
        let mut found = Vec::new();
        drop(Wal::open(&volume, "/wal", |record| found.push(record.to_vec())).expect("open"));
        assert_eq!(found, [b""]);
    }

    #[test]
    fn committed_records_are_replayed_and_a_torn_one_ends_the_log() {
        let scratch = Scratch::new("wal-test", 64 << 20).expect("volume");
        {
            let volume = scratch.open().expect("open");
            let wal = Wal::open(&volume, "/wal", |_| panic!("a new log")).expect("open");
            run(&wal, 4, 20).expect("committed");
            drop(wal);
            // Half a record, as a crash leaves it: a length, and too little behind it.
            let file = volume.open_file("/wal", OpenFlags::READ_WRITE).expect("there");
            file.append(&[100, 0, 0, 0, 1, 2, 3, 4, 5]).expect("append");
            file.fsync().expect("durable");
        }
        let volume = scratch.open().expect("open");
        let mut found = Vec::new();
        let wal = Wal::open(&volume, "/wal", |record| found.push(record.to_vec())).expect("open");
        assert_eq!(found.len(), 80);
        for writer in 0..4 {
            let prefix = format!("{writer}: ");
            let mine = found.iter().filter(|r| r.starts_with(prefix.as_bytes()));
            let wanted = (0..20).map(|number| format!("{writer}: {number}").into_bytes());
            assert!(mine.cloned().eq(wanted), "records of a writer keep their order");
        }
        // The torn record is gone, and the log goes on in its place.
        let position = wal.append(b"after").expect("append");
        wal.commit(position).expect("ticket").wait().expect("durable");
        drop(wal);
        let mut last = Vec::new();
        drop(Wal::open(&volume, "/wal", |record| last = record.to_vec()).expect("open"));
        assert_eq!(last, b"after");
    }
}
