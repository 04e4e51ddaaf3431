//! What a member does with what is its own, and what all do to the files that they share.

use super::{
    AFTER, ATTRIBUTE, BEFORE, FILES, Item, KINDS, Kind, LOG, MANIFEST, PAGE, PAGES_OF_MEMBER, PAIR,
    Promise, Record, Shared, Shown, attribute, manifest, manifest_bytes, pattern, shown,
};
use crate::common::Random;
use crate::disk::Disk;
use crate::{Stage, lock};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use weir::*;

pub struct Member<'a> {
    pub number: u64,
    pub dice: Random,
    pub volume: &'a Volume,
    pub disk: &'a Arc<Disk>,
    pub stage: &'a Stage,
    pub shared: Arc<Shared>,
    /// By file, and whether its writes are durable when they return.
    pub files: BTreeMap<(usize, bool), File>,
    /// A manifest as it was opened once: its item, and what was in it.
    pub held: Option<(File, usize, Shown)>,
    /// What its last barrier has answered.
    pub barred: u64,
}

pub fn contents(file: &File) -> Result<Vec<u8>> {
    let mut bytes = vec![0xee; file.size() as usize];
    let count = file.read_at(0, &mut bytes)?;
    bytes.truncate(count);
    Ok(bytes)
}

impl Member<'_> {
    pub fn work(mut self) {
        while !self.stage.stop.load(Ordering::SeqCst) {
            let result = self.step();
            if !self.goes_on(&result) {
                break;
            }
            self.stage.ops.fetch_add(1, Ordering::SeqCst);
        }
        self.stage.doing("lets go of its files");
    }

    /// False: it is of no use to go on.
    fn goes_on(&self, result: &Result<()>) -> bool {
        match result {
            _ if self.disk.core.is_dead() => false,
            Ok(()) | Err(Error::NoSpace) => true,
            Err(Error::Io(_) | Error::HostFull(_)) => self.disk.core.has_failed(),
            Err(_) => false,
        }
    }

    /// It has not happened; else nobody knows.
    fn is_refused(&self, error: &Error) -> bool {
        let is_refusal = match error {
            Error::NoSpace => true,
            Error::Io(_) | Error::HostFull(_) => self.disk.core.has_failed(),
            Error::Shutdown(_) => false,
            _ if self.disk.core.is_dead() => false,
            error => panic!("member {}: {error}", self.number),
        };
        is_refusal && !self.disk.core.is_dead() && self.volume.shutdown_reason().is_none()
    }

    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.dice.below(end)
    }

    /// The number of one of its items.
    fn own(&self, kind: usize) -> usize {
        self.number as usize * KINDS.len() + kind
    }

    pub(super) fn handle(&mut self, file: usize, syncs: bool) -> Result<File> {
        if let Some(handle) = self.files.get(&(file, syncs)) {
            return Ok(handle.clone());
        }
        let flags = OpenFlags { data_sync: syncs, ..OpenFlags::READ_WRITE };
        let opened = self.volume.open_file(FILES[file], flags)?;
        self.files.insert((file, syncs), opened.clone());
        Ok(opened)
    }

    /// All pages of a member, or some.
    pub(super) fn pages_of_somebody(&mut self) -> Range<u64> {
        let count = self.shared.items.len() as u64 / KINDS.len() as u64 * PAGES_OF_MEMBER;
        let first = self.below(count);
        let end = first + 1 + self.below(PAGES_OF_MEMBER);
        first * PAGE..end * PAGE
    }

    fn step(&mut self) -> Result<()> {
        let result = match self.below(100) {
            0..14 => self.write(),
            14..18 => self.punch(),
            18..28 => self.pair(),
            28..36 => self.barrier(),
            36..42 => self.set_attribute(),
            42..47 => self.replace(),
            47..56 => self.append(),
            56 => self.cut(),
            57..66 => self.sync(),
            66..75 => self.submit(),
            75 => self.submit_many(),
            76..82 => self.hear(),
            82..90 => self.disturb(),
            _ => self.look(),
        };
        if self.below(60) == 0 {
            self.stage.doing("closes its files");
            self.files.clear();
        }
        if let Err(error) = &result {
            // Panics where it is no answer that there can be.
            let _ = self.is_refused(error);
        }
        result
    }

    /// What the owner's call has come to.
    fn settle<T>(&self, items: &[(usize, u64)], result: Result<T>) -> Result<T> {
        for (item, version) in items {
            let item = &self.shared.items[*item];
            match &result {
                // Whether a crash leaves it is open all the same.
                _ if self.disk.core.is_dead() => {}
                Ok(_) => item.done(*version),
                Err(error) if self.is_refused(error) => item.refused(*version),
                Err(_) => {}
            }
        }
        result
    }

    fn begin(&self, kinds: &[usize], is_hole: bool) -> Vec<(usize, u64)> {
        let own = kinds.iter().map(|kind| self.own(*kind));
        own.map(|item| (item, self.shared.items[item].begin(is_hole))).collect()
    }

    fn place(&self, item: usize) -> (usize, Range<u64>) {
        self.shared.items[item].place().expect("a page")
    }

    pub(super) fn write(&mut self) -> Result<()> {
        let kind = self.below(2) as usize;
        let (file, range) = self.place(self.own(kind));
        let syncs = self.below(4) == 0;
        let handle = self.handle(file, syncs)?;
        let begun = self.begin(&[kind], false);
        let (item, version) = begun[0];
        self.stage.doing(&format!("writes version {version} of item {item}, syncs: {syncs}"));
        let written = handle.write_at(range.start, &pattern(item as u64, version, PAGE));
        if syncs && written.as_ref().is_err_and(|error| self.is_refused(error)) {
            // Only the sync may have failed: what is there now is shown.
            return written.map(drop).or_else(|error| self.see_what_is_there(&begun, error));
        }
        let count = self.settle(&begun, written)?;
        assert_eq!(count as u64, PAGE, "a page is written as a whole");
        if syncs && !self.disk.core.is_dead() {
            self.shared.items[item].acknowledge(version);
        }
        Ok(())
    }

    /// A write that syncs has failed, and is there or not.
    fn see_what_is_there(&self, begun: &[(usize, u64)], error: Error) -> Result<()> {
        let (item, version) = begun[0];
        let (file, range) = self.place(item);
        let shows = || -> Result<Shown> {
            let mut bytes = vec![0xee; PAGE as usize];
            let handle = &self.files[&(file, true)];
            let count = crate::disk::seeing_all(|| handle.read_at(range.start, &mut bytes))?;
            Ok(shown(item as u64, &bytes[..count], |_| PAGE))
        };
        match shows() {
            Ok(Shown::Version(there)) if there == version => {
                self.settle(begun, Ok(()))?;
            }
            Ok(_) => drop(self.settle(begun, Err::<(), _>(error.clone()))),
            // Nobody knows: so this is the last that it does.
            Err(_) => return Err(Error::Shutdown("it cannot be read what is there".to_owned())),
        }
        Err(error)
    }

    fn punch(&mut self) -> Result<()> {
        let kind = self.below(2) as usize;
        let (file, range) = self.place(self.own(kind));
        let handle = self.handle(file, false)?;
        let begun = self.begin(&[kind], true);
        self.stage.doing(&format!("punches item {}", begun[0].0));
        let mode = AllocateMode::PunchHole;
        let result = handle.allocate(mode, range.start, range.end - range.start);
        self.settle(&begun, result)
    }

    /// Both pages at once.
    fn pair(&mut self) -> Result<()> {
        let handles = [self.handle(0, false)?, self.handle(1, false)?];
        let begun = self.begin(&PAIR, false);
        let mut batch = self.volume.batch();
        for ((item, version), handle) in begun.iter().zip(&handles) {
            let (_, range) = self.place(*item);
            batch.write_at(handle, range.start, &pattern(*item as u64, *version, PAGE))?;
        }
        let mut seen = self.shared.see(&Promise::Operations);
        // The batch itself, too.
        seen.items.retain(|known| !begun.iter().any(|(item, _)| *item == known.0));
        seen.items.extend(&begun);
        let manner = self.below(3);
        self.stage.doing(&format!("commits its pair in manner {manner}: {begun:?}"));
        match manner {
            0 => {
                let result = batch.commit().map_err(Error::from);
                let lsn = self.settle(&begun, result)?;
                self.check_durable(lsn, "a batch that is committed");
                self.shared.hears(&self.disk.core, &seen, true);
            }
            1 => {
                let result = batch.commit_async().map_err(Error::from);
                let ticket = self.settle(&begun, result)?;
                self.take_up(ticket, seen)?;
            }
            _ => {
                let result = batch.commit_relaxed().map_err(Error::from);
                let lsn = self.settle(&begun, result)?;
                if self.below(3) == 0 {
                    let ticket = self.volume.ticket_for(lsn)?;
                    self.take_up(ticket, seen)?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn check_durable(&self, lsn: u64, what: &str) {
        let durable = self.volume.durable_lsn();
        assert!(durable >= lsn, "{what} is {lsn}, and all to {durable} is durable");
    }

    /// One page, a barrier, and the other.
    fn barrier(&mut self) -> Result<()> {
        let handles = [self.handle(0, false)?, self.handle(1, false)?];
        let before = self.begin(&[BEFORE], false);
        let (item, version) = before[0];
        let (_, range) = self.place(item);
        self.stage.doing(&format!("writes version {version} before a barrier"));
        let data = pattern(item as u64, version, PAGE);
        let written = handles[0].write_at(range.start, &data);
        self.settle(&before, written)?;
        let of_file = self.below(2) == 0;
        let promise = if of_file {
            Promise::File { file: 0, range: 0..u64::MAX, data_only: false }
        } else {
            Promise::All
        };
        let mut seen = self.shared.see(&promise);
        seen.items.extend(self.shared.see(&Promise::Operations).items);
        self.stage.doing("raises a barrier");
        let lsn = if of_file { handles[0].barrier() } else { self.volume.barrier() }?;
        self.barred = lsn;
        // Never ahead of the other: versions of both begin with nothing.
        let item = self.own(AFTER);
        let (_, range) = self.place(item);
        {
            let mut versions = lock(&self.shared.items[item].versions);
            versions.last = version;
            versions.may.push((version, false));
        }
        self.stage.doing(&format!("writes version {version} after a barrier"));
        let data = pattern(item as u64, version, PAGE);
        let written = handles[1].write_at(range.start, &data);
        self.settle(&[(item, version)], written)?;
        if self.below(2) == 0 {
            let ticket = self.volume.ticket_for(lsn)?;
            self.take_up(ticket, seen)?;
        }
        Ok(())
    }

    fn set_attribute(&mut self) -> Result<()> {
        let ino = self.handle(0, false)?.ino();
        let begun = self.begin(&[ATTRIBUTE], false);
        let (item, version) = begun[0];
        self.stage.doing("sets its attribute");
        let (name, value) = (attribute(self.number), pattern(item as u64, version, 64));
        let result = self.volume.setxattr(ino, name.as_bytes(), &value, XattrMode::Set);
        self.settle(&begun, result)
    }

    /// As programs write their settings: a new file in the place of the old one.
    fn replace(&mut self) -> Result<()> {
        let begun = self.begin(&[MANIFEST], false);
        let (item, version) = begun[0];
        let name = manifest(self.number);
        let new_name = format!("{name}.new");
        self.stage.doing(&format!("makes {new_name}"));
        let data = pattern(item as u64, version, manifest_bytes(version));
        let most_bytes = u64::from(self.volume.capabilities().max_log_payload_bytes);
        // The first is in nobody's place.
        let is_first = self.shared.items[item].visible() == 0;
        let syncs = is_first || self.below(3) == 0 || data.len() as u64 > most_bytes;
        let prepare = || {
            let flags = OpenFlags { truncate: true, ..OpenFlags::CREATE };
            let file = self.volume.open_file(&new_name, flags)?;
            file.write_all_at(0, &data)?;
            if syncs { file.fsync() } else { Ok(()) }
        };
        let prepared = prepare();
        if prepared.is_err() {
            self.shared.items[item].refused(version);
            return prepared;
        }
        self.stage.doing(&format!("renames {new_name}, synced: {syncs}"));
        let result = self.volume.rename_path(&new_name, &name);
        self.settle(&begun, result)?;
        if self.below(2) == 0 {
            let seen = self.shared.see(&Promise::Operations);
            let dir = self.volume.resolve("/club", true)?;
            self.stage.doing("syncs the directory");
            self.volume.fsync_dir(dir)?;
            // Others' names are changed there, too; their attributes are not.
            let mut seen = seen;
            seen.items.retain(|(item, _)| self.shared.items[*item].kind == Kind::Manifest);
            self.shared.hears(&self.disk.core, &seen, true);
        }
        Ok(())
    }

    fn append(&mut self) -> Result<()> {
        let syncs = self.below(6) == 0;
        let handle = self.handle(LOG, syncs)?;
        let owner = 128 + self.number;
        let most = if self.below(10) == 0 { 6 * PAGE } else { PAGE };
        let version = self.shared.next.fetch_add(1, Ordering::SeqCst);
        let length = 1 + self.below(most);
        self.stage.doing(&format!("appends {length} bytes, syncs: {syncs}"));
        let shared = self.shared.clone();
        let _others_append = shared.cutting.read();
        let offset = handle.append(&pattern(owner, version, length));
        let is_in_time = !self.disk.core.is_dead();
        let mut records = lock(&self.shared.records);
        match offset {
            Ok(offset) if is_in_time => {
                let record = Record { offset, owner, version, length, is_durable: syncs };
                records.known.push(record);
                Ok(())
            }
            result => {
                records.has_failed = true;
                result.map(drop)
            }
        }
    }

    /// As whoever needs what is in a log no longer: all of it goes, or its end, or pages at its beginning.
    fn cut(&mut self) -> Result<()> {
        let handle = self.handle(LOG, false)?;
        self.stage.doing("waits until nobody appends");
        let shared = self.shared.clone();
        let _alone = shared.cutting.write();
        let size = handle.size();
        let collapses = self.below(3) == 0;
        let bound = if self.below(2) == 0 { 0 } else { self.below(size + 1) };
        let first = bound / PAGE * PAGE;
        if collapses && (first == 0 || first >= size) {
            return Ok(());
        }
        self.stage.doing(&format!("cuts the log of {size} bytes, at {bound}, {collapses}"));
        let result = if collapses {
            handle.allocate(AllocateMode::CollapseRange, 0, first)
        } else {
            handle.truncate(bound)
        };
        let mut records = lock(&self.shared.records);
        match &result {
            Err(error) if self.is_refused(error) => return result,
            Ok(()) if collapses => {
                records.known.retain_mut(|record| {
                    // A crash leaves it here or there.
                    record.is_durable = false;
                    let is_left = record.offset >= first;
                    record.offset = record.offset.saturating_sub(first);
                    is_left
                });
            }
            Ok(()) => records.known.retain(|record| record.offset + record.length <= bound),
            Err(_) => records.known.clear(),
        }
        if self.disk.core.is_dead() {
            records.known.clear();
        }
        records.cuts += 1;
        // Of what was promised to nobody a crash may leave what was there before.
        records.has_failed = true;
        result
    }

    /// What changes nothing that belongs to anybody.
    fn disturb(&mut self) -> Result<()> {
        let file = self.below(3) as usize;
        let handle = self.handle(file, false)?;
        let range = if self.below(4) == 0 { 0..u64::MAX } else { self.pages_of_somebody() };
        let choice = self.below(14);
        self.stage.doing(&format!("disturbs in manner {choice}: {range:?} of file {file}"));
        let name = format!("/club/link{}", self.number);
        let bytes = self.shared.items.len() as u64 / KINDS.len() as u64 * PAGES_OF_MEMBER * PAGE;
        match choice {
            0 | 1 => handle.expire(range),
            2..7 => {
                let flags = SyncRangeFlags {
                    wait_before: self.below(2) == 0,
                    write: self.below(4) > 0,
                    wait_after: self.below(2) == 0,
                    nowait: self.below(2) == 0,
                };
                match handle.sync_range(range, flags) {
                    Err(Error::WouldBlock) if flags.nowait => Ok(()),
                    result => result,
                }
            }
            7 => match self.volume.link_path(FILES[file], &name) {
                Err(Error::Exists) => self.volume.remove_file(&name),
                result => result.map(drop),
            },
            8 if file != LOG => handle.truncate(bytes + self.below(8 * PAGE)),
            9 if file != LOG => handle.allocate(AllocateMode::KeepSize, 0, bytes),
            10 => handle.barrier().map(drop),
            11 => {
                let found = handle.seek_hole(0).and_then(|_| handle.seek_data(0));
                match found {
                    // There is nothing in the log yet.
                    Err(Error::NoSuchExtent) => Ok(()),
                    result => result.map(drop),
                }
            }
            12 => {
                let (stats, space) = (self.volume.stats(), self.volume.statfs());
                assert!(space.free_blocks <= space.total_blocks, "{space:?}");
                assert!(stats.durable_lsn <= stats.last_lsn, "{stats:?}");
                Ok(())
            }
            _ => handle.report_errors(),
        }
    }

    /// What anybody has may be seen, and nothing else.
    fn look(&mut self) -> Result<()> {
        let member = self.below(self.shared.items.len() as u64 / KINDS.len() as u64) as usize;
        match self.below(8) {
            0 | 1 => return self.look_at_record(),
            2 => return self.look_at_manifest(member),
            3 => return self.look_at_attribute(member),
            4 => return self.look_at_held(),
            _ => {}
        }
        let kinds = [&[0][..], &[1], &PAIR, &[BEFORE], &[AFTER]];
        let kinds = kinds[self.below(5) as usize];
        let mut last = 0;
        for kind in kinds {
            let index = member * KINDS.len() + kind;
            let seen = self.look_at(index)?;
            // Of a batch nothing older is seen once something of it was.
            if let Shown::Version(version) = seen {
                assert!(version >= last, "a batch of {member} was seen in part");
                last = version;
            }
            assert!(seen != Shown::Hole || last == 0, "half of the first batch of {member}");
        }
        Ok(())
    }

    fn look_at(&mut self, index: usize) -> Result<Shown> {
        let (file, range) = self.place(index);
        let handle = self.handle(file, false)?;
        let shared = self.shared.clone();
        let item: &Item = &shared.items[index];
        let before = item.visible();
        let holes = |item: &Item| lock(&item.versions).may.iter().any(|(_, is_hole)| *is_hole);
        let may_be_hole = holes(item);
        let is_hole = lock(&item.versions).may.contains(&(before, true));
        let mut bytes = vec![0xee; PAGE as usize];
        self.stage.doing(&format!("reads item {index}"));
        let read = if self.below(4) == 0 {
            match handle.read_at_nowait(range.start, &mut bytes) {
                Err(Error::WouldBlock) => handle.read_at(range.start, &mut bytes),
                result => result,
            }
        } else {
            handle.read_at(range.start, &mut bytes)
        };
        let count = read?;
        let seen = shown(index as u64, &bytes[..count], |_| PAGE);
        let last = lock(&item.versions).last;
        let is_it = match seen {
            Shown::Hole => may_be_hole || holes(item),
            Shown::Version(version) => (before..=last).contains(&version),
            Shown::Broken => false,
        };
        let is_own = index / KINDS.len() == self.number as usize;
        let is_exact = !is_own || seen.is(before, is_hole);
        let kind = item.kind;
        assert!(is_it && is_exact, "{kind:?}, item {index}: {seen:?}, not {before}..={last}");
        Ok(seen)
    }

    /// What `seen` is of must be what was visible before, or newer.
    fn check_seen(&self, index: usize, before: u64, seen: Shown) {
        let item = &self.shared.items[index];
        let (kind, last) = (item.kind, lock(&item.versions).last);
        let is_it = match seen {
            Shown::Hole => before == 0,
            Shown::Version(version) => (before..=last).contains(&version),
            Shown::Broken => false,
        };
        assert!(is_it, "{kind:?}, item {index}: {seen:?}, not {before}..={last}");
    }

    /// It is there at all times, as a whole.
    fn look_at_manifest(&mut self, member: usize) -> Result<()> {
        let index = member * KINDS.len() + MANIFEST;
        let before = self.shared.items[index].visible();
        let name = manifest(member as u64);
        self.stage.doing(&format!("opens {name}"));
        if self.below(3) == 0 {
            let listed = self.volume.read_dir("/club")?;
            let is_there = listed.iter().any(|entry| name.as_bytes().ends_with(&entry.name));
            assert!(is_there || before == 0, "{name} is not listed");
        }
        let opened = match self.volume.open_file(&name, OpenFlags::READ) {
            Err(Error::NotFound) if before == 0 => return Ok(()),
            opened => opened?,
        };
        let seen = shown(index as u64, &contents(&opened)?, manifest_bytes);
        assert!(seen != Shown::Hole, "{name} is empty");
        self.check_seen(index, before, seen);
        if self.below(2) == 0 {
            self.held = Some((opened, index, seen));
        }
        Ok(())
    }

    /// A file that is open stays as it is, whatever has taken its place.
    fn look_at_held(&mut self) -> Result<()> {
        let Some((file, index, first)) = &self.held else { return Ok(()) };
        self.stage.doing("reads a manifest that it has open");
        let seen = shown(*index as u64, &contents(file)?, manifest_bytes);
        assert_eq!(seen, *first, "{file:?} has changed");
        Ok(())
    }

    fn look_at_attribute(&mut self, member: usize) -> Result<()> {
        let index = member * KINDS.len() + ATTRIBUTE;
        let before = self.shared.items[index].visible();
        let ino = self.handle(0, false)?.ino();
        self.stage.doing("looks at an attribute");
        let seen = match self.volume.getxattr(ino, attribute(member as u64).as_bytes()) {
            Err(Error::NoAttribute) => Shown::Hole,
            value => shown(index as u64, &value?, |_| 64),
        };
        self.check_seen(index, before, seen);
        Ok(())
    }

    fn look_at_record(&mut self) -> Result<()> {
        let handle = self.handle(LOG, false)?;
        self.stage.doing("reads a record");
        let shared = self.shared.clone();
        let _others_append = shared.cutting.read();
        let (offset, expected) = {
            let records = lock(&self.shared.records);
            let count = records.known.len() as u64;
            if count == 0 {
                return Ok(());
            }
            let record = &records.known[self.dice.below(count) as usize];
            (record.offset, record.bytes())
        };
        let mut bytes = vec![0xee; expected.len()];
        let count = handle.read_at(offset, &mut bytes)?;
        assert!(bytes[..count] == expected, "a record at {offset} has gone");
        Ok(())
    }
}
