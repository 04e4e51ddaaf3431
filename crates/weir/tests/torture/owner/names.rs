//! What an owner does to names, and attributes; and batches.

use super::{FILES, Owner, Verdict, Work, pattern};
use crate::disk::seeing_all;
use crate::model::{Content, EVERYTHING, PAGE, Promise, World};
use std::collections::BTreeMap;
use std::sync::Arc;
use weir::*;

impl Owner {
    fn path_of(&self, name: &str) -> String {
        format!("{}/{name}", self.path())
    }
}

impl World {
    fn add_name(&mut self, op: u64, name: &str, file: u64) {
        self.names.insert(name.to_owned(), file);
        self.named = op;
    }

    /// With its last name a file goes.
    fn remove_name(&mut self, op: u64, name: &str) {
        self.named = op;
        let Some(file) = self.names.remove(name) else { return };
        if self.names.values().any(|other| *other == file) {
            self.file(file).change(op);
        } else {
            self.files.remove(&file);
        }
    }

    fn rename(&mut self, op: u64, from: &str, to: &str) {
        let Some(file) = self.names.get(from).copied() else { return };
        self.remove_name(op, to);
        self.names.remove(from);
        self.add_name(op, to, file);
        self.file(file).change(op);
    }
}

impl Work<'_> {
    fn some_name(&mut self) -> String {
        format!("f{}", self.below(FILES as u64 + 2))
    }

    fn name_in_use(&mut self) -> Option<String> {
        let names: Vec<String> = self.now().names.keys().cloned().collect();
        let count = names.len() as u64;
        (count > 0).then(|| names[self.below(count) as usize].clone())
    }

    /// A change of names has its place in the order.
    fn settle_names(&mut self, what: &str, result: Result<()>, world: World) {
        match self.verdict(what, result) {
            Verdict::Done(()) => {
                self.owner.history.push(world);
                let now = self.owner.history.now();
                self.files.retain(|(file, _), _| now.files.contains_key(file));
            }
            Verdict::Over => self.owner.history.push(world),
            Verdict::Refused => self.verify_names(),
        }
    }

    /// The names are those that the model has, and lead to the same files.
    pub(super) fn verify_names(&mut self) {
        self.doing("looks at its names");
        let found = seeing_all(|| self.volume.read_dir(self.owner.path()));
        let Verdict::Done(found) = self.verdict("list", found) else { return };
        let name = |entry: &DirEntry| String::from_utf8_lossy(&entry.name).into_owned();
        let found: BTreeMap<String, u64> =
            found.iter().map(|entry| (name(entry), entry.ino)).collect();
        let expected = &self.now().names;
        let same = |(name, file): (&String, &u64)| {
            let handle = self.files.get(&(*file, false));
            found.get(name).is_some_and(|ino| handle.is_none_or(|handle| handle.ino() == *ino))
        };
        if found.len() != expected.len() || !expected.iter().all(same) {
            self.finding(&format!("names are {found:?}, not {expected:?}"));
        }
    }

    pub(super) fn create(&mut self) {
        let name = self.some_name();
        if self.now().names.contains_key(&name) || self.now().files.len() >= FILES {
            return;
        }
        let (op, mut world) = self.owner.history.begin();
        let file = self.owner.history.names.next();
        world.add_name(op, &name, file);
        let names = &mut self.owner.history.names;
        world.files.insert(file, Arc::new(Content::durable(names, op, &[], BTreeMap::new())));
        self.doing(&format!("create {name}"));
        let made = self.volume.open_file(self.owner.path_of(&name), OpenFlags::CREATE_NEW);
        let result = made.map(|made| drop(self.files.insert((file, false), made)));
        self.settle_names("create", result, world);
    }

    pub(super) fn unlink(&mut self) {
        let Some(name) = self.name_in_use() else { return };
        let (op, mut world) = self.owner.history.begin();
        world.remove_name(op, &name);
        self.doing(&format!("unlink {name}"));
        let result = self.volume.unlink(self.dir, name.as_bytes());
        self.settle_names("unlink", result, world);
    }

    pub(super) fn link(&mut self) {
        let (Some(from), to) = (self.name_in_use(), self.some_name()) else { return };
        if self.now().names.contains_key(&to) {
            return;
        }
        let (op, mut world) = self.owner.history.begin();
        let file = world.names[&from];
        world.add_name(op, &to, file);
        world.file(file).change(op);
        self.doing(&format!("link {from} as {to}"));
        let result = self.volume.link_path(self.owner.path_of(&from), self.owner.path_of(&to));
        self.settle_names("link", result.map(drop), world);
    }

    pub(super) fn rename(&mut self) {
        let (Some(from), to) = (self.name_in_use(), self.some_name()) else { return };
        let (op, mut world) = self.owner.history.begin();
        let file = world.names[&from];
        let replaced = world.names.get(&to).copied();
        if replaced == Some(file) {
            return;
        }
        let mode = match replaced {
            Some(_) if self.below(3) == 0 => RenameMode::Exchange,
            Some(_) => RenameMode::Replace,
            None => RenameMode::NoReplace,
        };
        if let (RenameMode::Exchange, Some(other)) = (mode, replaced) {
            world.add_name(op, &from, other);
            world.add_name(op, &to, file);
            world.file(other).change(op);
            world.file(file).change(op);
        } else {
            world.rename(op, &from, &to);
        }
        let most_bytes = u64::from(self.volume.capabilities().max_log_payload_bytes);
        if mode == RenameMode::Replace && world.file(file).size <= most_bytes {
            world.file(file).settle(&EVERYTHING);
        }
        self.doing(&format!("rename {from} to {to}, {mode:?}"));
        let (from, to) = (from.as_bytes(), to.as_bytes());
        let result = self.volume.rename(self.dir, from, self.dir, to, mode);
        self.settle_names("rename", result, world);
    }

    pub(super) fn set_xattr(&mut self, file: u64) {
        let Some(handle) = self.handle(file, false) else { return };
        let name = format!("user.{}", self.below(3));
        let (op, mut world) = self.owner.history.begin();
        let content = world.file(file);
        content.change(op);
        self.doing(&format!("attribute {name} of {file}"));
        let result = if content.xattrs.contains_key(&name) && self.owner.dice.below(3) == 0 {
            content.xattrs.remove(&name);
            self.volume.removexattr(handle.ino(), name.as_bytes())
        } else {
            let value = pattern(op, self.owner.number, 0, self.owner.dice.below(300));
            content.xattrs.insert(name.clone(), value.clone());
            self.volume.setxattr(handle.ino(), name.as_bytes(), &value, XattrMode::Set)
        };
        self.settle_names("attribute", result, world);
    }

    /// Some of its files and names at once.
    pub(super) fn batch(&mut self, file: u64) {
        let (op, mut world) = self.owner.history.begin();
        let mut batch = self.volume.batch();
        for _ in 0..=self.below(4) {
            let recorded = match self.below(6) {
                0 => self.record_names(&mut batch, op, &mut world),
                1 => self.record_new(&mut batch, op, &mut world),
                _ => self.record_content(&mut batch, op, &mut world, file),
            };
            recorded.expect("a batch takes what can be");
            if self.is_over {
                return;
            }
        }
        if batch.is_empty() {
            return;
        }
        self.doing(&format!("batch {batch:?}"));
        let manner = self.below(3);
        let result = match manner {
            0 => batch.commit().map(|_| None),
            1 => batch.commit_async().map(Some),
            _ => batch.commit_relaxed().map(|_| None),
        };
        // What it says of its steps must not be more than a quarter of the log holds.
        let result = match result.map_err(Error::from) {
            Err(Error::Invalid(_)) => Err(Error::NoSpace),
            result => result,
        };
        match self.verdict("batch", result) {
            Verdict::Done(ticket) => {
                self.settle_names("batch", Ok(()), world.clone());
                if manner == 0 {
                    self.owner.history.acknowledge(&world, &Promise::Prefix);
                } else if let Some(ticket) = ticket {
                    self.owner.tickets.push((ticket, world, Promise::Prefix));
                }
            }
            Verdict::Over => self.owner.history.push(world),
            Verdict::Refused => {
                self.verify_names();
                self.verify(file, "a batch");
            }
        }
    }

    fn record_names(&mut self, batch: &mut Batch, op: u64, world: &mut World) -> Result<()> {
        let names: Vec<String> = world.names.keys().cloned().collect();
        if names.is_empty() {
            return Ok(());
        }
        let from = names[self.below(names.len() as u64) as usize].clone();
        let to = self.some_name();
        if self.below(3) == 0 {
            world.remove_name(op, &from);
            return batch.unlink(self.dir, from.as_bytes());
        }
        if world.names.get(&to) == world.names.get(&from) {
            return Ok(());
        }
        world.rename(op, &from, &to);
        let (from, to) = (from.as_bytes(), to.as_bytes());
        batch.rename(self.dir, from, self.dir, to, RenameMode::Replace)
    }

    fn record_new(&mut self, batch: &mut Batch, op: u64, world: &mut World) -> Result<()> {
        let name = self.some_name();
        if world.names.contains_key(&name) || world.files.len() >= FILES {
            return Ok(());
        }
        let file = self.owner.history.names.next();
        world.add_name(op, &name, file);
        let data = pattern(op, self.owner.number, 0, self.below(3 * PAGE));
        let content = Content::durable(&mut self.owner.history.names, op, &data, BTreeMap::new());
        world.files.insert(file, Arc::new(content));
        let new = NewInode::new(FileType::Regular, 0o644);
        let ino = batch.create_file(self.dir, name.as_bytes(), &new)?;
        batch.write_inode(ino, 0, &data)
    }

    fn record_content(
        &mut self,
        batch: &mut Batch,
        op: u64,
        world: &mut World,
        file: u64,
    ) -> Result<()> {
        if !world.files.contains_key(&file) {
            return Ok(());
        }
        let Some(handle) = self.handle(file, false) else { return Ok(()) };
        let range = self.range(file, 4 * PAGE);
        let names = &mut self.owner.history.names;
        if self.owner.dice.below(5) == 0 {
            world.file(file).truncate(names, op, range.start);
            return batch.truncate(&handle, range.start);
        }
        let data = pattern(op, self.owner.number, range.start, range.end - range.start);
        world.file(file).write(names, op, range.start, &data);
        // With the batch its pages are as they are then.
        world.file(file).settle(&range);
        batch.write_at(&handle, range.start, &data)
    }
}
