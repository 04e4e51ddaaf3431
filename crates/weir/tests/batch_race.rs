//! Batches raced against each other, and against everything else: money is moved between accounts, each of which knows what it
//! knew of the others, while names turn in circles; also across crashes amid all of it.

mod common;

use common::volatile::Volatile;
use common::*;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ScopedJoinHandle;
use weir::check::{CheckOptions, check_device};
use weir::device::Device;
use weir::*;

const ACCOUNTS: usize = 5;
const OPENING_BALANCE: i64 = 1000;
/// A second page of each account that has its version.
const STAMP: u64 = 30 * 4096 + 17;
const WORDS: usize = 2 + ACCOUNTS;
const DIRS: u64 = 3;

/// What an account has: how often it has changed, its balance, and the version of each other one when it last dealt with that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Record([i64; WORDS]);

impl Record {
    fn place(account: usize) -> u64 {
        account as u64 * 3 * 4096 + 100
    }
    fn read(file: &File, account: usize) -> Self {
        let mut bytes = [0; 8 * WORDS];
        assert_eq!(file.read_at(Self::place(account), &mut bytes), Ok(bytes.len()));
        let mut words = [0; WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = i64::from_le_bytes(bytes.try_into().expect("eight"));
        }
        Self(words)
    }
    fn bytes(self) -> Vec<u8> {
        self.0.iter().flat_map(|word| word.to_le_bytes()).collect()
    }
    fn version(self) -> i64 {
        self.0[0]
    }
    fn known(&self, other: usize) -> i64 {
        self.0[2 + other]
    }
}

fn stamp(file: &File) -> i64 {
    let mut bytes = [0; 8];
    assert_eq!(file.read_at(STAMP, &mut bytes), Ok(8));
    i64::from_le_bytes(bytes)
}

struct Bank {
    volume: Volume,
    files: Vec<File>,
    dirs: Vec<u64>,
    /// Of the program: who deals with an account holds its.
    locks: Vec<Mutex<()>>,
    /// Versions that were acknowledged as durable.
    durable: Vec<AtomicU64>,
    refused: AtomicU64,
    moved: AtomicU64,
}

impl Bank {
    fn found(volume: Volume) -> Self {
        let files: Vec<_> = (0..ACCOUNTS).map(|n| create(&volume, &format!("/a{n}"))).collect();
        for (number, file) in files.iter().enumerate() {
            file.write_at(0, &vec![0; 40 * 4096]).expect("write");
            let mut record = Record([0; WORDS]);
            record.0[1] = OPENING_BALANCE;
            file.write_at(Record::place(number), &record.bytes()).expect("write");
        }
        let dirs: Vec<u64> = (0..DIRS)
            .map(|n| {
                let path = format!("/d{n}");
                volume.create_dir(&path, 0o755).expect("directory");
                create(&volume, &format!("{path}/turns"));
                volume.resolve(&path, true).expect("directory")
            })
            .collect();
        volume.sync().expect("sync");
        Self {
            volume,
            files,
            dirs,
            locks: (0..ACCOUNTS).map(|_| Mutex::default()).collect(),
            durable: (0..ACCOUNTS).map(|_| AtomicU64::new(0)).collect(),
            refused: AtomicU64::new(0),
            moved: AtomicU64::new(0),
        }
    }

    fn acknowledged(&self, versions: &[(usize, i64)]) {
        for (account, version) in versions {
            self.durable[*account].fetch_max(*version as u64, Ordering::AcqRel);
        }
    }

    /// Between two accounts or three; the names turn, and a file comes or goes with it.
    fn transfer(&self, random: &mut Random, tickets: &mut Vec<(SyncTicket, Vec<(usize, i64)>)>) {
        let mut who = BTreeSet::new();
        let count = 2 + random.below(2) as usize;
        while who.len() < count {
            who.insert(random.below(ACCOUNTS as u64) as usize);
        }
        let who: Vec<usize> = who.into_iter().collect();
        let guards: Vec<_> = who.iter().map(|n| self.locks[*n].lock().expect("lock")).collect();
        let mut records: Vec<_> = who.iter().map(|n| Record::read(&self.files[*n], *n)).collect();
        for (at, n) in who.iter().enumerate() {
            assert_eq!(stamp(&self.files[*n]), records[at].version(), "nobody else deals with it");
        }
        let amount = random.below(100) as i64;
        records[0].0[1] -= amount;
        records[1].0[1] += amount;
        let versions: Vec<(usize, i64)> =
            who.iter().zip(&records).map(|(n, record)| (*n, record.version() + 1)).collect();
        let mut batch = self.volume.batch();
        let backwards = random.below(2) == 0;
        let mut order: Vec<usize> = (0..who.len()).collect();
        if backwards {
            order.reverse();
        }
        for at in order {
            records[at].0[0] += 1;
            for (other, version) in &versions {
                records[at].0[2 + other] = *version;
            }
            let file = &self.files[who[at]];
            batch.write_at(file, Record::place(who[at]), &records[at].bytes()).expect("recorded");
            batch.write_at(file, STAMP, &records[at].version().to_le_bytes()).expect("recorded");
            match random.below(8) {
                0 => batch.truncate(file, (31 + random.below(30)) * 4096 + 9).expect("recorded"),
                1 => {
                    let pages = 1 + random.below(40) as usize;
                    batch.write_at(file, 40 * 4096, &vec![7; pages * 4096]).expect("recorded");
                }
                2 => batch.write_at(file, 70_000, &vec![8; 30_000]).expect("recorded"),
                _ => {}
            }
        }
        self.record_names(random, &mut batch);
        let committed = match random.below(4) {
            0 => batch.commit().map(|_| self.acknowledged(&versions)),
            1 => batch.commit_relaxed().map(drop),
            _ => batch.commit_async().map(|ticket| match random.below(3) {
                0 => drop(ticket),
                _ => tickets.push((ticket, versions.clone())),
            }),
        };
        if let Err(failed) = committed {
            self.refused.fetch_add(1, Ordering::Relaxed);
            let expected = matches!(
                failed.error,
                Error::Exists | Error::NotFound | Error::NoSpace | Error::WouldBlock
            ) || matches!(failed.error, Error::Invalid(text) if text.starts_with("the batch is too"));
            assert!(expected, "{failed}");
        } else {
            self.moved.fetch_add(1, Ordering::Relaxed);
        }
        drop(guards);
        while tickets.len() > 20 {
            let (ticket, versions) = tickets.remove(random.below(20) as usize);
            ticket.wait().expect("durable");
            self.acknowledged(&versions);
        }
    }

    fn record_names(&self, random: &mut Random, batch: &mut Batch) {
        let dir = |random: &mut Random| self.dirs[random.below(DIRS) as usize];
        let name = format!("n{}", random.below(4)).into_bytes();
        if random.below(2) == 0 {
            let (a, b, c) = (dir(random), dir(random), dir(random));
            for (from, to) in [(a, b), (b, c), (c, a)] {
                if from != to {
                    let mode = RenameMode::Exchange;
                    batch.rename(from, b"turns", to, b"turns", mode).expect("recorded");
                }
            }
        }
        match random.below(6) {
            0 | 1 => {
                let (to, new) = (dir(random), NewInode::new(FileType::Regular, 0o644));
                let ino = batch.create_file(to, &name, &new).expect("recorded");
                batch.write_inode(ino, 0, &[b'x'; 6000]).expect("recorded");
                batch.write_inode(ino, 100_000, b"end").expect("recorded");
                batch.link(ino, dir(random), b"linked").expect("recorded");
            }
            2 => batch.unlink(dir(random), &name).expect("recorded"),
            3 => batch
                .rename(dir(random), &name, dir(random), b"n0", RenameMode::Replace)
                .expect("recorded"),
            _ => {}
        }
    }

    /// Single calls of all kinds that let the accounts be.
    fn disturb(&self, random: &mut Random) {
        let file = &self.files[random.below(ACCOUNTS as u64) as usize];
        let dir = self.dirs[random.below(DIRS) as usize];
        let name = format!("n{}", random.below(4)).into_bytes();
        match random.below(14) {
            0 => drop(file.write_at(16 * 4096 + random.below(9 * 4096), &[1; 9000])),
            1 => drop(file.truncate(31 * 4096 + random.below(200_000))),
            2 => file.fsync().expect("fsync"),
            3 => drop(self.volume.barrier().expect("barrier")),
            4 | 5 => drop(self.volume.unlink(dir, &name)),
            6 => drop(self.volume.unlink(dir, b"linked")),
            7 => drop(self.volume.make(dir, &name, &NewInode::new(FileType::Regular, 0o600))),
            8 => self.volume.sync().expect("sync"),
            9 => drop(file.allocate(AllocateMode::PunchHole, 17 * 4096, 5000)),
            10 => drop(file.write_at(35 * 4096, &vec![3; 120_000])),
            11 => drop(file.fsync_async(0..u64::MAX, SyncKind::Data)),
            _ => {
                let other = self.dirs[random.below(DIRS) as usize];
                drop(self.volume.rename(dir, &name, other, &name, RenameMode::Replace));
            }
        }
    }

    /// Who has seen a piece of a batch sees nothing older.
    fn audit(&self, random: &mut Random) {
        let one = random.below(ACCOUNTS as u64) as usize;
        let first = Record::read(&self.files[one], one);
        assert!(stamp(&self.files[one]) >= first.version(), "of one file");
        for (other, file) in self.files.iter().enumerate() {
            let then = if random.below(2) == 0 {
                Record::read(file, other).version()
            } else {
                stamp(file)
            };
            let known = first.known(other);
            assert!(then >= known, "account {one} knew version {known} of {other}, now {then}");
        }
        for dir in &self.dirs {
            self.volume.lookup(*dir, b"turns").expect("a name that is always there");
            for entry in 0..4 {
                let Ok(attr) = self.volume.lookup(*dir, format!("n{entry}").as_bytes()) else {
                    continue;
                };
                assert!(attr.size_bytes == 0 || attr.size_bytes == 100_003, "{attr:?}");
            }
        }
    }
}

/// What must hold of a bank whenever it is opened.
fn look_over(volume: &Volume, durable: &[u64]) {
    let files: Vec<_> = (0..ACCOUNTS)
        .map(|n| volume.open_file(format!("/a{n}"), OpenFlags::READ).expect("open"))
        .collect();
    let records: Vec<_> = files.iter().enumerate().map(|(n, f)| Record::read(f, n)).collect();
    let total: i64 = records.iter().map(|record| record.0[1]).sum();
    assert_eq!(total, OPENING_BALANCE * ACCOUNTS as i64, "{records:?}");
    for (one, record) in records.iter().enumerate() {
        assert_eq!(stamp(&files[one]), record.version(), "{records:?}");
        assert!(record.version() as u64 >= durable[one], "lost: {records:?} {durable:?}");
        for (other, theirs) in records.iter().enumerate() {
            assert!(theirs.version() >= record.known(other), "{records:?}");
        }
    }
    let turning: BTreeSet<u64> = (0..DIRS)
        .map(|n| volume.resolve(format!("/d{n}/turns"), true).expect("a name that is always there"))
        .collect();
    assert_eq!(turning.len(), DIRS as usize);
}

fn holds_nothing(volume: &Volume) {
    let stats = volume.stats();
    let log = &stats.log_fill;
    let held = [
        stats.space.reserved_blocks,
        stats.space.pending_free_blocks,
        stats.dirty_pages,
        stats.dirty_inodes,
        stats.logged_pages,
        log.used_blocks,
        log.queued_blocks,
        log.admitted_blocks,
        log.writers,
        log.companion_blocks,
        stats.tickets,
    ];
    assert!(held.iter().all(|count| *count == 0), "{held:?}");
}

fn check(device: &Arc<dyn Device>) {
    let report = check_device(device, &CheckOptions::default()).expect("check");
    assert!(report.is_clean(), "{:?}", report.problems);
}

/// What somebody does again and again.
type Deed = fn(&Bank, &mut Random);

/// Runs `rounds` of each of the workers; `meanwhile` until they have ended.
fn race(bank: &Bank, rounds: u64, seed: u64, meanwhile: impl FnOnce(&AtomicBool) + Send) {
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mut workers = Vec::new();
        for worker in 0..4 {
            workers.push(scope.spawn(move || {
                let mut random = Random::seeded(seed * 100 + worker);
                let mut tickets = Vec::new();
                for _ in 0..rounds {
                    bank.transfer(&mut random, &mut tickets);
                }
                for (ticket, versions) in tickets {
                    ticket.wait().expect("durable");
                    bank.acknowledged(&versions);
                }
            }));
        }
        let others: [(u64, Deed); 4] =
            [(10, Bank::disturb), (11, Bank::disturb), (20, Bank::audit), (21, Bank::audit)];
        for (worker, does) in others {
            let ended = &ended;
            scope.spawn(move || {
                let mut random = Random::seeded(seed * 100 + worker);
                while !ended.load(Ordering::Relaxed) {
                    does(bank, &mut random);
                }
            });
        }
        let until = &ended;
        scope.spawn(move || meanwhile(until));
        let results: Vec<_> = workers.into_iter().map(ScopedJoinHandle::join).collect();
        ended.store(true, Ordering::Relaxed);
        assert!(results.iter().all(Result::is_ok), "a worker has panicked");
    });
}

fn times() -> u64 {
    std::env::var("ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

#[test]
fn money_that_batches_move_is_neither_made_nor_lost() {
    with_watchdog(240 * times(), || {
        for seed in 1..=times() {
            for (log_blocks, memory_bytes) in [(96, 2 * MIB), (0, 2 * MIB), (512, 16 * MIB)] {
                let device = formatted(64 * MIB, log_blocks);
                let bank = Bank::found(open(&device, threads(memory_bytes)));
                race(&bank, 200, seed, |_| {});
                let Bank { volume, files, durable, moved, refused, .. } = bank;
                let durable: Vec<_> = durable.into_iter().map(AtomicU64::into_inner).collect();
                assert!(moved.into_inner() > 100, "{refused:?} refused");
                look_over(&volume, &durable);
                drop(files);
                volume.close().expect("close");
                holds_nothing(&volume);
                drop(volume);
                check(&device);
                let volume = open(&device, threads(memory_bytes));
                look_over(&volume, &durable);
                volume.close().expect("close");
                check(&device);
            }
        }
    });
}

#[test]
fn a_crash_amid_batches_leaves_each_of_them_whole() {
    with_watchdog(240 * times(), || {
        for seed in 1..=times() {
            for log_blocks in [96, 700] {
                let disk = Volatile::new(24 * MIB);
                let device: Arc<dyn Device> = disk.clone();
                format(&device, log_blocks);
                let bank = Bank::found(open(&device, threads(2 * MIB)));
                let mut crashes = 0;
                let known = |bank: &Bank| -> Vec<u64> {
                    bank.durable.iter().map(|version| version.load(Ordering::Acquire)).collect()
                };
                let crashes_seen = &mut crashes;
                race(&bank, 120, seed, |ended| {
                    while !ended.load(Ordering::Relaxed) {
                        let durable = known(&bank);
                        let left = disk.after_crash(seed * 1000 + *crashes_seen);
                        let volume = open(&left, threads(2 * MIB));
                        look_over(&volume, &durable);
                        volume.close().expect("close");
                        check(&left);
                        *crashes_seen += 1;
                    }
                });
                assert!(crashes > 0);
            }
        }
    });
}
