//! A thread that has a directory to itself: what it finds there, at any time and after any crash, is what the model says.
//!
//! A call that returns when the disk has died, or because the volume was shut down, has happened or not; with it the thread's work is over.

use crate::Stage;
use crate::common::Random;
use crate::disk::{Disk, seeing_all};
use crate::model::{Content, EVERYTHING, Found, History, Names, PAGE, Promise, World};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use weir::*;

const FILES: usize = 6;
/// Longest file that is made; a shift may make it longer.
const MOST_BYTES: u64 = 48 * PAGE;
const TICKETS: usize = 12;
const LOOKS: u32 = 20;
const TRACED: usize = 60;

pub struct Owner {
    number: u64,
    dice: Random,
    history: History,
    /// What a close that began by now makes durable.
    covered: World,
    /// Tickets that nobody has waited for.
    tickets: Vec<(SyncTicket, World, Promise)>,
    /// What it did last, for people.
    trace: VecDeque<String>,
}

/// What came of a call.
enum Verdict<T> {
    Done(T),
    /// It has not happened.
    Refused,
    /// It may have happened.
    Over,
}

impl Owner {
    pub fn new(number: u64, seed: u64) -> Self {
        Self {
            number,
            dice: Random::seeded(seed),
            history: History::new(),
            covered: World::default(),
            tickets: Vec::new(),
            trace: VecDeque::new(),
        }
    }

    pub fn path(&self) -> String {
        format!("/o{}", self.number)
    }

    /// Works until it is stopped, or until nothing more can be done.
    pub fn work(&mut self, volume: &Volume, disk: &Arc<Disk>, stage: &Stage) {
        let dir = volume.resolve(self.path(), true).expect("it is there");
        self.covered = self.history.now().clone();
        let (files, is_over) = (BTreeMap::new(), false);
        let mut work = Work { owner: self, volume, disk, stage, dir, files, is_over };
        while !work.is_over && !stage.stop.load(Ordering::SeqCst) {
            work.step();
            stage.ops.fetch_add(1, Ordering::SeqCst);
            if !stage.closing.load(Ordering::SeqCst) {
                work.owner.covered = work.owner.history.now().clone();
            }
        }
        work.hear_tickets();
    }

    /// Every ticket ends, and the volume has.
    pub fn end_tickets(&mut self, stage: &Stage) {
        for (ticket, ..) in self.tickets.drain(..) {
            stage.doing("waits for a ticket to end");
            let _ = ticket.wait();
        }
    }

    /// The volume was closed, and says that all is durable.
    pub fn was_closed(&mut self) {
        let covered = self.covered.clone();
        self.history.acknowledge(&covered, &Promise::All);
    }

    /// What is there must be what may be there, and it is durable from now on.
    pub fn check(&mut self, volume: &Volume) -> Result<(), String> {
        let failed = |error: Error| format!("{}: cannot be read: {error}", self.path());
        let found = self.found(volume).map_err(failed)?;
        self.trace.push_back("the volume is opened".to_owned());
        let trace = self.trace.iter().cloned().collect::<Vec<_>>().join("\n  ");
        self.history.adopt(&found).map_err(|why| format!("{trace}\n{}: {why}", self.path()))
    }

    /// What is there.
    pub fn found(&self, volume: &Volume) -> Result<Found> {
        let mut found = Found::new();
        let mut names: BTreeMap<u64, u32> = BTreeMap::new();
        for entry in volume.read_dir(self.path())? {
            let name = String::from_utf8_lossy(&entry.name).into_owned();
            let file = volume.open_inode(entry.ino, false)?;
            let mut xattrs = BTreeMap::new();
            for key in volume.listxattr(entry.ino)? {
                let value = volume.getxattr(entry.ino, &key)?;
                xattrs.insert(String::from_utf8_lossy(&key).into_owned(), value);
            }
            *names.entry(entry.ino).or_default() += 1;
            found.insert(name, (entry.ino, contents(&file)?, xattrs));
        }
        for (ino, count) in names {
            assert_eq!(volume.getattr(ino)?.links, count, "links of inode {ino}");
        }
        Ok(found)
    }
}

fn contents(file: &File) -> Result<Vec<u8>> {
    let mut bytes = vec![0xee; file.size() as usize];
    let count = file.read_at(0, &mut bytes)?;
    assert_eq!(count, bytes.len(), "a read ends at the end of the file");
    Ok(bytes)
}

/// Bytes that tell which operation wrote them, and where.
fn pattern(op: u64, owner: u64, offset: u64, length: u64) -> Vec<u8> {
    let word = |place: u64| (op << 32) | (owner << 28) | (place & 0xfff_ffff);
    let byte = |at: u64| word(at / 8).to_le_bytes()[(at % 8) as usize];
    (offset..offset + length).map(byte).collect()
}

/// One life of the volume.
struct Work<'a> {
    owner: &'a mut Owner,
    volume: &'a Volume,
    disk: &'a Arc<Disk>,
    stage: &'a Stage,
    dir: u64,
    /// By the model's number, and whether its writes are durable when they return.
    files: BTreeMap<(u64, bool), File>,
    is_over: bool,
}

impl Work<'_> {
    fn below(&mut self, end: u64) -> u64 {
        self.owner.dice.below(end)
    }

    fn now(&self) -> &World {
        self.owner.history.now()
    }

    fn content(&self, file: u64) -> &Content {
        &self.now().files[&file]
    }

    fn finding(&self, text: &str) -> ! {
        let ops = self.owner.history.ops;
        let trace = self.owner.trace.iter().cloned().collect::<Vec<_>>().join("\n  ");
        let stats = self.volume.stats();
        let (log, space) = (stats.log_fill, stats.space);
        let state = format!(
            "{log:?}, {space:?}, {:?}, {:?}, logged {}, dirty {}",
            stats.checkpoint_phase, stats.checkpoint_refused, stats.logged_pages, stats.dirty_pages
        );
        panic!("{trace}\n{state}\n{} after {ops} operations: {text}", self.owner.path());
    }

    /// The thread is about to do this.
    fn doing(&mut self, what: &str) {
        self.stage.doing(what);
        let (op, trace) = (self.owner.history.ops, &mut self.owner.trace);
        trace.push_back(format!("{op}: {what}"));
        if trace.len() > TRACED {
            trace.pop_front();
        }
    }

    fn note(&mut self, answer: &str) {
        if let Some(last) = self.owner.trace.back_mut() {
            *last += answer;
        }
    }

    fn verdict<T>(&mut self, what: &str, result: Result<T>) -> Verdict<T> {
        let is_dead = self.disk.core.is_dead();
        let answer = result.as_ref().map_or_else(|error| format!(": {error}"), |_| String::new());
        self.note(&if is_dead { format!("{answer} (too late)") } else { answer });
        match result {
            _ if is_dead => {}
            Ok(value) => return Verdict::Done(value),
            Err(Error::Shutdown(_)) => {}
            Err(Error::NoSpace) => return Verdict::Refused,
            Err(Error::Io(_) | Error::HostFull(_)) if self.disk.core.has_failed() => {
                return Verdict::Refused;
            }
            Err(error) => self.finding(&format!("{what}: {error}")),
        }
        self.is_over = true;
        Verdict::Over
    }

    fn step(&mut self) {
        self.hear_tickets();
        if self.now().files.is_empty() {
            return self.create();
        }
        let files: Vec<u64> = self.now().files.keys().copied().collect();
        let file = files[self.below(files.len() as u64) as usize];
        match self.below(100) {
            0..16 => self.write(file, false),
            16..21 => self.write(file, true),
            21..31 => self.append(file),
            31..36 => self.truncate(file),
            36..45 => self.allocate(file),
            45..56 => self.sync(file),
            56..64 => self.submit(file),
            64..67 => self.hand_over(file),
            67..71 => self.create(),
            71..74 => self.unlink(),
            74..79 => self.rename(),
            79..80 => self.link(),
            80..87 => self.batch(file),
            87..90 => self.set_xattr(file),
            90..92 => self.barrier(file),
            92..93 => self.copy(file),
            93..95 => self.reopen(file),
            95..96 => self.verify_names(),
            _ => self.read(file),
        }
    }

    /// The handle of a file; `None` where the way to it cannot be read.
    fn handle(&mut self, file: u64, syncs: bool) -> Option<File> {
        if let Some(handle) = self.files.get(&(file, syncs)) {
            return Some(handle.clone());
        }
        let name = self.now().names.iter().find(|(_, named)| **named == file)?.0.clone();
        let flags = OpenFlags { data_sync: syncs, ..OpenFlags::READ_WRITE };
        let opened = self.volume.open_file(format!("{}/{name}", self.owner.path()), flags);
        let Verdict::Done(opened) = self.verdict("open", opened) else { return None };
        self.files.insert((file, syncs), opened.clone());
        Some(opened)
    }

    fn reopen(&mut self, file: u64) {
        self.files.remove(&(file, false));
        self.files.remove(&(file, true));
        self.handle(file, false);
    }

    /// A range that begins in or near the file.
    fn range(&mut self, file: u64, most_bytes: u64) -> Range<u64> {
        let size = self.content(file).size;
        let mut start = self.below((size + 2 * PAGE).min(MOST_BYTES));
        let most = if self.below(6) == 0 { 8 * most_bytes } else { most_bytes };
        let mut length = 1 + self.below(most);
        if self.below(2) == 0 {
            start -= start % PAGE;
            length = length.next_multiple_of(PAGE);
        }
        start..(start + length).min(MOST_BYTES + PAGE)
    }

    /// What is shown of the file is what the model has: nothing of what was refused.
    fn verify(&mut self, file: u64, what: &str) {
        self.look(file, what, &[]);
    }

    /// Which of these worlds the file shows; `None`: that which was before.
    fn look(&mut self, file: u64, what: &str, worlds: &[World]) -> Option<usize> {
        self.doing(&format!("looks at what is there after {what}"));
        let handle = seeing_all(|| self.handle(file, false))?;
        let mut shown = seeing_all(|| contents(&handle));
        for _ in 0..LOOKS {
            // Somebody else may have met the error that this one waited for.
            if shown.is_err() && !self.disk.core.is_dead() {
                shown = seeing_all(|| contents(&handle));
            }
        }
        let shown = match self.verdict("look", shown) {
            Verdict::Done(shown) => shown,
            Verdict::Refused => self.finding(&format!("after {what}: it cannot be read")),
            Verdict::Over => return None,
        };
        if shown == self.content(file).read(EVERYTHING) {
            return None;
        }
        let shows = |world: &World| world.files[&file].read(EVERYTHING) == shown;
        let found = worlds.iter().position(shows);
        if found.is_none() {
            let mut as_it_is = self.content(file).clone();
            as_it_is.settle(&EVERYTHING);
            let why = as_it_is.refuses(&shown).unwrap_or_default();
            self.finding(&format!("after {what}: there is {why}"));
        }
        found
    }

    fn read(&mut self, file: u64) {
        let range = self.range(file, 4 * PAGE);
        let Some(handle) = self.handle(file, false) else { return };
        self.doing("read");
        let mut bytes = vec![0xee; (range.end - range.start) as usize];
        let count = handle.read_at(range.start, &mut bytes);
        let Verdict::Done(count) = self.verdict("read", count) else { return };
        if bytes[..count] != self.content(file).read(range.clone()) {
            self.verify(file, "a read");
            self.finding(&format!("a read of {range:?} gave something else once"));
        }
    }

    /// The world after a write of `data`.
    fn written(&mut self, file: u64, offset: u64, data: &[u8]) -> World {
        let (op, mut world) = self.owner.history.begin();
        world.file(file).write(&mut self.owner.history.names, op, offset, data);
        world
    }

    fn data(&self, range: &Range<u64>) -> Vec<u8> {
        let op = self.owner.history.ops + 1;
        pattern(op, self.owner.number, range.start, range.end - range.start)
    }

    fn write(&mut self, file: u64, syncs: bool) {
        let range = self.range(file, 3 * PAGE);
        let Some(handle) = self.handle(file, syncs) else { return };
        let data = self.data(&range);
        let what = if syncs { "a write that syncs" } else { "a write" };
        self.doing(&format!("{what} of {range:?} to {file}"));
        let result = handle.write_at(range.start, &data);
        match self.verdict(what, result) {
            Verdict::Done(count) => {
                let world = self.written(file, range.start, &data[..count]);
                self.owner.history.replace(world.clone());
                if syncs {
                    let range = range.start..range.start + count as u64;
                    let promise = Promise::File { file, range, data_only: true };
                    self.owner.history.acknowledge(&world, &promise);
                }
            }
            Verdict::Refused if syncs => self.adopt_part(file, what, range.start, &data),
            Verdict::Refused => self.verify(file, what),
            Verdict::Over => {
                let world = self.written(file, range.start, &data);
                self.owner.history.replace(world);
            }
        }
    }

    /// A call that was refused may have written a part of `data`: as much as is seen is there.
    fn adopt_part(&mut self, file: u64, what: &str, offset: u64, data: &[u8]) {
        let end = offset + data.len() as u64;
        let first = (offset / PAGE + 1) * PAGE;
        let parts = (first..end).step_by(PAGE as usize).chain([end]);
        let worlds: Vec<World> =
            parts.map(|end| self.written(file, offset, &data[..(end - offset) as usize])).collect();
        let seen = self.look(file, what, &worlds);
        if let Some(seen) = seen.or(self.is_over.then_some(worlds.len() - 1)) {
            self.owner.history.replace(worlds[seen].clone());
        }
    }

    fn append(&mut self, file: u64) {
        let Some(handle) = self.handle(file, false) else { return };
        let size = self.content(file).size;
        if size > MOST_BYTES {
            return;
        }
        let most = if self.below(4) == 0 { 40 * PAGE } else { 3 * PAGE };
        let range = size..size + 1 + self.below(most);
        let data = self.data(&range);
        self.doing(&format!("append of {range:?} to {file}"));
        let result = handle.append(&data);
        let verdict = self.verdict("append", result);
        let world = self.written(file, size, &data);
        match verdict {
            Verdict::Done(offset) if offset == size => self.owner.history.replace(world),
            Verdict::Done(offset) => self.finding(&format!("append at {offset}, not {size}")),
            Verdict::Refused => {
                // A part may have become durable before it was taken back.
                self.owner.history.push_middle(world, Some(file));
                if self.disk.core.failed_reads() > 0 {
                    self.adopt_part(file, "an append", size, &data);
                } else {
                    self.verify(file, "an append");
                }
            }
            Verdict::Over => self.owner.history.replace(world),
        }
    }

    /// A change with its place in the order.
    fn reshape(
        &mut self,
        file: u64,
        what: &str,
        call: impl FnOnce(&File) -> Result<()>,
        apply: impl Fn(&mut Names, u64, &mut Content),
    ) {
        let Some(handle) = self.handle(file, false) else { return };
        let (op, mut world) = self.owner.history.begin();
        let before = world.files[&file].clone();
        apply(&mut self.owner.history.names, op, world.file(file));
        world.file(file).forget_touch_unless_changed(&before);
        self.doing(&format!("{what} of {file}"));
        let result = call(&handle);
        match self.verdict(what, result) {
            Verdict::Done(()) | Verdict::Over => self.owner.history.push(world),
            Verdict::Refused => self.verify(file, what),
        }
    }

    fn truncate(&mut self, file: u64) {
        let size = self.content(file).size;
        let most = if self.below(3) == 0 { MOST_BYTES } else { size + PAGE };
        let mut size = self.below(most.max(1));
        if self.below(3) == 0 {
            size -= size % PAGE;
        }
        let apply =
            |names: &mut Names, op, content: &mut Content| content.truncate(names, op, size);
        self.reshape(file, &format!("truncate to {size}"), |file| file.truncate(size), apply);
    }

    fn allocate(&mut self, file: u64) {
        use AllocateMode::{CollapseRange, Extend, InsertRange, KeepSize, PunchHole, ZeroRange};
        let range = self.range(file, 3 * PAGE);
        let size = self.content(file).size;
        let aligned = range.start / PAGE * PAGE..range.end.next_multiple_of(PAGE);
        let modes = [PunchHole, PunchHole, Extend, KeepSize, ZeroRange, CollapseRange, InsertRange];
        let mode = modes[self.below(modes.len() as u64) as usize];
        let what = format!("{mode:?} {range:?}");
        let call = |range: &Range<u64>| {
            let (offset, length) = (range.start, range.end - range.start);
            move |file: &File| file.allocate(mode, offset, length)
        };
        match mode {
            CollapseRange if aligned.end < size => {
                self.reshape(file, &what, call(&aligned), |names, op, content| {
                    content.collapse(names, op, &aligned);
                });
            }
            InsertRange if aligned.start < size && size < MOST_BYTES => {
                self.reshape(file, &what, call(&aligned), |names, op, content| {
                    content.insert(names, op, aligned.start, aligned.end - aligned.start);
                });
            }
            ZeroRange => self.zero_range(file, &range),
            Extend => self.reshape(file, &what, call(&range), |names, op, content| {
                content.grow(names, op, range.end);
            }),
            KeepSize => self.reshape(file, &what, call(&range), |_, _, _| {}),
            _ => {
                let call =
                    |file: &File| file.allocate(PunchHole, range.start, range.end - range.start);
                self.reshape(file, &what, call, |names, op, content| {
                    content.zero(names, op, &range);
                });
            }
        }
    }

    /// It zeroes before the file grows.
    fn zero_range(&mut self, file: u64, range: &Range<u64>) {
        let Some(handle) = self.handle(file, false) else { return };
        let (op, mut zeroed) = self.owner.history.begin();
        let before = zeroed.files[&file].clone();
        zeroed.file(file).zero(&mut self.owner.history.names, op, range);
        let mut grown = zeroed.clone();
        grown.file(file).grow(&mut self.owner.history.names, op, range.end);
        for world in [&mut zeroed, &mut grown] {
            world.file(file).forget_touch_unless_changed(&before);
        }
        self.doing(&format!("zero range {range:?} of {file}"));
        let result = handle.allocate(AllocateMode::ZeroRange, range.start, range.end - range.start);
        let verdict = self.verdict("zero range", result);
        self.owner.history.push_middle(zeroed.clone(), None);
        match verdict {
            Verdict::Done(()) | Verdict::Over => self.owner.history.push(grown),
            Verdict::Refused => {
                if self.look(file, "zero range", std::slice::from_ref(&zeroed)).is_some() {
                    self.owner.history.push(zeroed);
                }
            }
        }
    }

    fn copy(&mut self, file: u64) {
        let from = self.range(file, 4 * PAGE);
        let others: Vec<u64> = self.now().files.keys().copied().filter(|it| *it != file).collect();
        if others.is_empty() {
            return;
        }
        let target = others[self.below(others.len() as u64) as usize];
        let to = self.range(target, PAGE).start;
        let (Some(source), Some(handle)) = (self.handle(file, false), self.handle(target, false))
        else {
            return;
        };
        let data = self.content(file).read(from.clone());
        self.doing(&format!("copy of {from:?} of {file} to {to} of {target}"));
        let result = source.copy_range(from.start, &handle, to, from.end - from.start);
        let count = match self.verdict("copy", result) {
            Verdict::Done(count) => count as usize,
            Verdict::Over => data.len(),
            Verdict::Refused => return self.verify(target, "a copy"),
        };
        let world = self.written(target, to, &data[..count]);
        self.owner.history.replace(world);
    }
}

mod names;
mod syncs;
