//! Contents: three threads write, append, cut, copy and read two files, whose pages go home, are brought in and go again meanwhile. Content
//! is made of cells of 512 bytes.
//!
//! A read is one look at one page; so reads are tried where everything happens within the first page of each file. Otherwise
//! changes reach over pages, and what counts is what is there at the end.

use super::order::{Model, Threads, explain};
use super::{Moments, describe, one_of, run};
use shuttle::rand::{Rng, thread_rng};
use std::collections::BTreeMap;
use std::sync::Arc;
use weir::*;

use crate::{device, open, open_with};

const CELL_BYTES: u64 = 512;
const PAGE_CELLS: u64 = 8;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Op {
    /// Cells of a file, from one on.
    Write(usize, u64, u64, u8),
    Append(usize, u64, u8),
    Cut(usize, u64),
    /// From a file, from a cell on, to a file and a cell, so many. It looks how many there are, reads, and writes: three steps.
    Copy((usize, u64), (usize, u64), u64),
    /// The first, after which the cells go by this name.
    Measure((usize, u64), u64, u64),
    Load((usize, u64), u64),
    Store((usize, u64), u64),
    Allocate(usize, AllocateMode, u64, u64),
    /// Writes and cuts, all at once.
    Batch(Vec<Op>),
    Read(usize),
    Size(usize),
    Sync(usize),
    HandOver(usize),
    Barrier(usize),
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Outcome {
    Done,
    Failed(Error),
    Cells(Vec<u8>),
    Number(u64),
}

/// The cells of two files, and what copies have read.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Files([Vec<u8>; 2], BTreeMap<u64, Vec<u8>>);

fn cells(bytes: &[u8]) -> Vec<u8> {
    bytes
        .chunks(CELL_BYTES as usize)
        .map(|cell| {
            assert!(
                cell.len() == CELL_BYTES as usize && cell.iter().all(|byte| *byte == cell[0]),
                "a cell that nobody wrote: {} bytes, {:?} to {:?}",
                cell.len(),
                cell.first(),
                cell.last()
            );
            cell[0]
        })
        .collect()
}

impl Files {
    fn write(&mut self, file: usize, at: u64, new: &[u8]) {
        let (content, at) = (&mut self.0[file], at as usize);
        content.resize(content.len().max(at + new.len()), 0);
        content[at..at + new.len()].copy_from_slice(new);
    }

    fn part(&self, (file, at): (usize, u64), count: usize) -> Vec<u8> {
        let content = &self.0[file];
        let start = (at as usize).min(content.len());
        content[start..content.len().min(start + count)].to_vec()
    }

    fn load(&mut self, from: (usize, u64), name: u64) {
        let count = self.1[&name].len();
        let part = self.part(from, count);
        self.1.insert(name, part);
    }

    fn store(&mut self, (file, at): (usize, u64), name: u64) -> u64 {
        let part = self.1.remove(&name).expect("it was read before");
        if !part.is_empty() {
            self.write(file, at, &part);
        }
        part.len() as u64
    }

    fn allocate(&mut self, file: usize, mode: AllocateMode, at: u64, count: u64) -> Outcome {
        let content = &mut self.0[file];
        let (at, end, size) = (at as usize, (at + count) as usize, content.len());
        match mode {
            AllocateMode::KeepSize => {}
            AllocateMode::Extend => content.resize(size.max(end), 0),
            AllocateMode::ZeroRange => {
                content.resize(size.max(end), 0);
                content[at..end].fill(0);
            }
            AllocateMode::PunchHole => content[at.min(size)..end.min(size)].fill(0),
            AllocateMode::CollapseRange if end >= size => {
                return Outcome::Failed(Error::Invalid(""));
            }
            AllocateMode::CollapseRange => {
                content.drain(at..end);
            }
            AllocateMode::InsertRange if at >= size => return Outcome::Failed(Error::Invalid("")),
            AllocateMode::InsertRange => {
                content.splice(at..at, std::iter::repeat_n(0, end - at));
            }
            other @ AllocateMode::ZeroRangeKeepSize => unreachable!("{other:?}"),
        }
        Outcome::Done
    }

    fn change(&mut self, op: &Op) -> Outcome {
        match *op {
            Op::Write(file, at, count, tag) => self.write(file, at, &vec![tag; count as usize]),
            Op::Append(file, count, tag) => {
                let at = self.0[file].len() as u64;
                self.write(file, at, &vec![tag; count as usize]);
                return Outcome::Number(at);
            }
            Op::Cut(file, size) => self.0[file].resize(size as usize, 0),
            Op::Measure(from, count, name) => {
                let part = self.part(from, count as usize);
                self.1.insert(name, part);
            }
            Op::Load(from, name) => self.load(from, name),
            Op::Store(to, name) => return Outcome::Number(self.store(to, name)),
            Op::Copy(..) => unreachable!("it is made of three steps"),
            Op::Allocate(file, mode, at, count) => return self.allocate(file, mode, at, count),
            Op::Batch(ref parts) => {
                for part in parts {
                    self.change(part);
                }
            }
            Op::Read(file) => return Outcome::Cells(self.0[file].clone()),
            Op::Size(file) => return Outcome::Number(self.0[file].len() as u64),
            Op::Sync(_) | Op::HandOver(_) | Op::Barrier(_) => {}
        }
        Outcome::Done
    }
}

impl Model for Files {
    type Op = Op;
    type Outcome = Outcome;
    fn apply(&mut self, op: &Op, outcome: &Outcome) -> bool {
        match (self.change(op), outcome) {
            // Whatever the reason is.
            (Outcome::Failed(Error::Invalid(_)), Outcome::Failed(Error::Invalid(_))) => true,
            (expected, outcome) => expected == *outcome,
        }
    }
}

/// How far the calls of a schedule reach.
#[derive(Clone, Copy)]
struct Reach {
    cells: u64,
    /// Changes of whole pages, which reach over many; and no reads.
    pages: bool,
}

impl Reach {
    /// A place, and how many cells from there.
    fn range(self) -> (u64, u64) {
        let at = thread_rng().gen_range(0..self.cells);
        (at, thread_rng().gen_range(1..=(self.cells - at).min(20)))
    }

    fn page_range(self) -> (u64, u64) {
        let pages = self.cells / PAGE_CELLS;
        let at = thread_rng().gen_range(0..pages);
        (at * PAGE_CELLS, thread_rng().gen_range(1..=(pages - at).min(2)) * PAGE_CELLS)
    }

    fn write(self) -> Op {
        let (file, (at, count)) = (thread_rng().gen_range(0..2), self.range());
        match thread_rng().gen_range(0..4) {
            0 => Op::Cut(file, at),
            _ => Op::Write(file, at, count, thread_rng().gen_range(1..255)),
        }
    }

    fn allocate(self, file: usize) -> Op {
        use AllocateMode::*;
        let mode = one_of(&[KeepSize, Extend, ZeroRange, PunchHole, CollapseRange, InsertRange]);
        if matches!(mode, CollapseRange | InsertRange) {
            let (at, count) = self.page_range();
            return Op::Allocate(file, mode, at, count);
        }
        let (at, count) = self.range();
        Op::Allocate(file, mode, at, count)
    }

    fn call(self) -> Op {
        let file = thread_rng().gen_range(0..2);
        match thread_rng().gen_range(0..16) {
            0..=3 => self.write(),
            // Within a page there is no room behind the end.
            4 if self.pages => Op::Append(file, self.range().1, thread_rng().gen_range(1..255)),
            5 => {
                let ((from, count), (to, room)) = (self.range(), self.range());
                // One look at one page.
                let count = count.min(PAGE_CELLS - from % PAGE_CELLS);
                Op::Copy((file, from), (1 - file, to), count.min(room))
            }
            6 | 7 if self.pages => self.allocate(file),
            8 | 9 => Op::Batch((0..thread_rng().gen_range(2..4)).map(|_| self.write()).collect()),
            10 => Op::Sync(file),
            11 if thread_rng().gen_bool(0.5) => Op::HandOver(file),
            11 => Op::Barrier(file),
            12 if !self.pages => Op::Size(file),
            _ if !self.pages => Op::Read(file),
            _ => self.write(),
        }
    }
}

fn content(file: &File) -> Result<Vec<u8>> {
    let mut bytes = vec![0; (1 + file.size() as usize).next_multiple_of(4096)];
    let count = file.read_at(0, &mut bytes)?;
    bytes.truncate(count);
    Ok(cells(&bytes))
}

fn commit(volume: &Volume, files: &[File; 2], parts: &[Op]) -> Result<()> {
    let mut batch = volume.batch();
    for part in parts {
        match *part {
            Op::Write(file, at, count, tag) => {
                let bytes = vec![tag; (count * CELL_BYTES) as usize];
                batch.write_at(&files[file], at * CELL_BYTES, &bytes)?;
            }
            Op::Cut(file, size) => batch.truncate(&files[file], size * CELL_BYTES)?,
            ref other => unreachable!("{other:?} in a batch"),
        }
    }
    batch.commit_relaxed()?;
    Ok(())
}

fn perform(volume: &Volume, files: &[File; 2], op: &Op) -> Result<Outcome> {
    let done = |()| Outcome::Done;
    let bytes = |count: u64, tag| vec![tag; (count * CELL_BYTES) as usize];
    match *op {
        Op::Write(file, at, count, tag) => {
            let written = files[file].write_at(at * CELL_BYTES, &bytes(count, tag))?;
            assert_eq!(written as u64, count * CELL_BYTES);
            Ok(Outcome::Done)
        }
        Op::Append(file, count, tag) => {
            files[file].append(&bytes(count, tag)).map(|at| Outcome::Number(at / CELL_BYTES))
        }
        Op::Cut(file, size) => files[file].truncate(size * CELL_BYTES).map(done),
        Op::Copy((from, at), (to, target), count) => files[from]
            .copy_range(at * CELL_BYTES, &files[to], target * CELL_BYTES, count * CELL_BYTES)
            .map(|copied| Outcome::Number(copied / CELL_BYTES)),
        Op::Measure(..) | Op::Load(..) | Op::Store(..) => unreachable!("nobody calls that"),
        Op::Allocate(file, mode, at, count) => {
            files[file].allocate(mode, at * CELL_BYTES, count * CELL_BYTES).map(done)
        }
        Op::Batch(ref parts) => commit(volume, files, parts).map(done),
        Op::Read(file) => content(&files[file]).map(Outcome::Cells),
        Op::Size(file) => Ok(Outcome::Number(files[file].size() / CELL_BYTES)),
        Op::Sync(file) => files[file].fsync().map(done),
        Op::HandOver(file) => files[file].expire(0..u64::MAX).map(done),
        Op::Barrier(file) => files[file].barrier().map(|_| Outcome::Done),
    }
}

fn open_both(volume: &Volume) -> [File; 2] {
    ["/0", "/1"].map(|path| volume.open_file(path, OpenFlags::CREATE).expect("open"))
}

fn look_at(files: &[File; 2]) -> Files {
    Files([&files[0], &files[1]].map(|file| content(file).expect("read")), BTreeMap::new())
}

/// What a call is made of.
fn steps(op: Op, outcome: Outcome, name: u64) -> Vec<(Op, Outcome)> {
    match (op, outcome) {
        (Op::Copy(from, to, count), copied @ Outcome::Number(_)) => {
            let looked = (Op::Measure(from, count, name), Outcome::Done);
            vec![looked, (Op::Load(from, name), Outcome::Done), (Op::Store(to, name), copied)]
        }
        // Zeros first, and then what makes the file longer.
        (Op::Allocate(file, AllocateMode::ZeroRange, at, count), Outcome::Done) => {
            let step = |mode| (Op::Allocate(file, mode, at, count), Outcome::Done);
            vec![step(AllocateMode::PunchHole), step(AllocateMode::Extend)]
        }
        step => vec![step],
    }
}

fn scenario(reach: Reach, calls_each: usize, threads: usize) {
    let device = device();
    // So little memory that pages are thrown out and brought in again.
    let volume = open_with(&device, 32 << 10);
    let files = Arc::new(open_both(&volume));
    for (tag, file) in (100..).zip(&*files) {
        let cells = thread_rng().gen_range(0..=reach.cells);
        file.write_at(0, &vec![tag; (cells * CELL_BYTES) as usize]).expect("write");
    }
    if thread_rng().gen_bool(0.5) {
        volume.checkpoint().expect("checkpoint");
    }
    let first = look_at(&files);
    let calls = (0..threads).map(|_| (0..calls_each).map(|_| reach.call()).collect()).collect();
    let moments: Arc<Moments> = Arc::default();
    let (on, handles, names) = (volume.clone(), files.clone(), moments.clone());
    let perform = move |op: Op| {
        let outcome = perform(&on, &handles, &op).unwrap_or_else(Outcome::Failed);
        steps(op, outcome, names.next())
    };
    let threads: Threads<Files> = run::<Files>(&volume, &moments, calls, perform);
    let last = look_at(&files);
    assert!(
        !explain(&threads, &first, &last).is_empty(),
        "no order explains this:\n{}from {first:?}\nto   {last:?}",
        describe::<Files>(&threads)
    );
    volume.sync().expect("sync");
    assert_eq!(look_at(&open_both(&open(&device))), last, "{}", describe::<Files>(&threads));
}

#[test]
fn what_is_read_is_as_if_one_call_came_after_the_other() {
    crate::explore(|| scenario(Reach { cells: PAGE_CELLS, pages: false }, 3, 3));
}

#[test]
fn what_is_written_is_as_if_one_call_came_after_the_other() {
    crate::explore(|| scenario(Reach { cells: 4 * PAGE_CELLS, pages: true }, 3, 3));
}

#[test]
fn one_caller_finds_what_the_model_says() {
    crate::explore_some(|| scenario(Reach { cells: PAGE_CELLS, pages: false }, 12, 1), 4);
    crate::explore_some(|| scenario(Reach { cells: 4 * PAGE_CELLS, pages: true }, 12, 1), 4);
}
