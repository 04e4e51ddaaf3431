//! The model: names, links, permissions and one attribute, one operation after the other. Inodes go by the numbers that the volume has
//! given them.

use std::collections::BTreeMap;
use weir::{Error, RenameMode};

pub type Ino = u64;
/// A directory, and a name in it.
pub type Place = (Ino, &'static str);

#[derive(Debug, Clone)]
pub enum Op {
    MakeFile(Place),
    MakeDir(Place),
    /// `open(2)` with `O_CREAT` of a name in the root, and with `O_EXCL` or not.
    Open(&'static str, bool),
    Link(Ino, Place),
    Unlink(Place),
    Rmdir(Place),
    Rename(Place, Place, RenameMode),
    LookUp(Place),
    List(Ino),
    Attributes(Ino),
    Permit(Ino, u32),
    SetAttribute(Ino, u8),
    GetAttribute(Ino),
    /// All or nothing; of changes only.
    Batch(Vec<Op>),
    /// Everything that has returned before is durable.
    Sync,
}

/// What a caller hears.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    Done,
    Failed(Error),
    /// An inode, its links, its permissions and, of a directory, the number of its entries.
    Found(Ino, u32, u32, u64),
    Listed(Vec<(String, Ino)>),
    Value(u8),
    /// The new inodes of a batch, or the only one, or the one that was there.
    Made(Vec<Ino>),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Inode {
    /// Of a directory: its entries, and the one that it is in.
    pub directory: Option<(BTreeMap<&'static str, Ino>, Ino)>,
    pub links: u32,
    pub permissions: u32,
    pub attribute: Option<u8>,
}

impl Inode {
    fn is_dir(&self) -> bool {
        self.directory.is_some()
    }

    fn entries(&self) -> &BTreeMap<&'static str, Ino> {
        static NONE: BTreeMap<&'static str, Ino> = BTreeMap::new();
        self.directory.as_ref().map_or(&NONE, |(entries, _)| entries)
    }
}

/// All inodes that have a name, or are held open.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Tree {
    pub inodes: BTreeMap<Ino, Inode>,
    pub root: Ino,
    /// Those that stay without a name, because somebody holds them.
    pub held: Vec<Ino>,
}

const PERMISSIONS: u32 = 0o644;
pub const DIR_PERMISSIONS: u32 = 0o755;

impl Tree {
    pub fn new(root: Ino) -> Self {
        let directory = Some((BTreeMap::new(), root));
        let inode = Inode { directory, links: 2, permissions: DIR_PERMISSIONS, attribute: None };
        Self { inodes: BTreeMap::from([(root, inode)]), root, held: Vec::new() }
    }

    /// What a crash leaves of it: nobody holds anything.
    pub fn reachable(&self) -> Self {
        let inodes = self.inodes.iter().filter(|(_, inode)| inode.links > 0);
        let inodes = inodes.map(|(number, inode)| (*number, inode.clone())).collect();
        Self { inodes, root: self.root, held: Vec::new() }
    }

    fn inode(&self, number: Ino) -> Result<&Inode, Error> {
        self.inodes.get(&number).ok_or(Error::NotFound)
    }

    fn inode_mut(&mut self, number: Ino) -> Result<&mut Inode, Error> {
        self.inodes.get_mut(&number).ok_or(Error::NotFound)
    }

    fn find(&self, (dir, name): Place) -> Result<Ino, Error> {
        self.inode(dir)?.entries().get(name).copied().ok_or(Error::NotFound)
    }

    /// The directory takes new names, and does not have this one.
    fn check_free(&self, place: Place) -> Result<(), Error> {
        if self.inode(place.0)?.links == 0 {
            return Err(Error::NotFound);
        }
        match self.find(place) {
            Ok(_) => Err(Error::Exists),
            Err(_) => Ok(()),
        }
    }

    fn insert(&mut self, (dir, name): Place, number: Ino) {
        let is_dir = self.inodes[&number].is_dir();
        if let Some(parent) = self.inodes.get_mut(&dir) {
            parent.links += u32::from(is_dir);
            parent.directory.as_mut().expect("a directory").0.insert(name, number);
        }
        if let Some((_, parent)) = &mut self.inodes.get_mut(&number).expect("inode").directory {
            *parent = dir;
        }
    }

    fn take_out(&mut self, (dir, name): Place) -> Ino {
        let parent = self.inodes.get_mut(&dir).expect("a directory");
        let number = parent.directory.as_mut().expect("a directory").0.remove(name).expect("name");
        let is_dir = self.inodes[&number].is_dir();
        self.inodes.get_mut(&dir).expect("a directory").links -= u32::from(is_dir);
        number
    }

    /// `number` has lost a name.
    fn unname(&mut self, number: Ino) {
        let inode = self.inodes.get_mut(&number).expect("inode");
        inode.links = if inode.is_dir() { 0 } else { inode.links - 1 };
        if inode.links == 0 && !self.held.contains(&number) {
            self.inodes.remove(&number);
        }
    }

    fn is_below(&self, mut number: Ino, ancestor: Ino) -> bool {
        loop {
            if number == ancestor {
                return true;
            }
            let parent = self.inodes.get(&number).and_then(|inode| inode.directory.as_ref());
            match parent {
                Some((_, parent)) if number != self.root => number = *parent,
                _ => return false,
            }
        }
    }

    fn make(&mut self, place: Place, is_dir: bool, made: Option<Ino>) -> Result<Ino, Error> {
        self.check_free(place)?;
        // Where the volume could not make it, any new number will do.
        let number = made.unwrap_or(Ino::MAX - self.inodes.len() as Ino);
        let directory = is_dir.then(|| (BTreeMap::new(), place.0));
        let (links, permissions) = if is_dir { (2, DIR_PERMISSIONS) } else { (1, PERMISSIONS) };
        self.inodes.insert(number, Inode { directory, links, permissions, attribute: None });
        self.insert(place, number);
        Ok(number)
    }

    fn link(&mut self, number: Ino, place: Place) -> Result<(), Error> {
        let inode = self.inode(number)?;
        let (is_dir, links) = (inode.is_dir(), inode.links);
        if is_dir {
            return Err(Error::NotPermitted);
        }
        self.check_free(place)?;
        if links == 0 {
            return Err(Error::NotFound);
        }
        self.inode_mut(number)?.links += 1;
        self.insert(place, number);
        Ok(())
    }

    fn remove(&mut self, place: Place, is_dir: bool) -> Result<(), Error> {
        let inode = self.inode(self.find(place)?)?;
        match (is_dir, inode.is_dir()) {
            (true, false) => return Err(Error::NotDirectory),
            (false, true) => return Err(Error::IsDirectory),
            (true, true) if !inode.entries().is_empty() => return Err(Error::NotEmpty),
            _ => {}
        }
        let number = self.take_out(place);
        self.unname(number);
        Ok(())
    }

    fn check_rename(&self, from: Place, to: Place, mode: RenameMode) -> Result<Ino, Error> {
        let loops = |moved, parent| self.inodes[&moved].is_dir() && self.is_below(parent, moved);
        let invalid = Error::Invalid("a directory cannot be moved below itself");
        let source = self.find(from)?;
        if self.inode(to.0)?.links == 0 {
            return Err(Error::NotFound);
        }
        if loops(source, to.0) {
            return Err(invalid);
        }
        match (mode, self.find(to).ok()) {
            (RenameMode::Exchange, None) => Err(Error::NotFound),
            (RenameMode::Exchange, Some(other)) if loops(other, from.0) => Err(invalid),
            (RenameMode::NoReplace, Some(_)) => Err(Error::Exists),
            (RenameMode::Exchange, _) | (_, None) => Ok(source),
            (_, Some(victim)) if victim == source => Ok(source),
            (_, Some(victim)) => match (&self.inodes[&source], &self.inodes[&victim]) {
                (source, victim) if source.is_dir() && !victim.is_dir() => Err(Error::NotDirectory),
                (source, victim) if !source.is_dir() && victim.is_dir() => Err(Error::IsDirectory),
                (_, victim) if !victim.entries().is_empty() => Err(Error::NotEmpty),
                _ => Ok(source),
            },
        }
    }

    fn rename(&mut self, from: Place, to: Place, mode: RenameMode) -> Result<(), Error> {
        let source = self.check_rename(from, to, mode)?;
        let target = self.find(to).ok();
        if target == Some(source) {
            return Ok(());
        }
        self.take_out(from);
        if let Some(target) = target {
            self.take_out(to);
            if mode == RenameMode::Exchange {
                self.insert(from, target);
            } else {
                self.unname(target);
            }
        }
        self.insert(to, source);
        Ok(())
    }

    fn found(&self, number: Ino) -> Result<Outcome, Error> {
        let inode = self.inode(number)?;
        let entries = inode.entries().len() as u64;
        Ok(Outcome::Found(number, inode.links, inode.permissions, entries))
    }

    fn list(&self, dir: Ino) -> Result<Outcome, Error> {
        let entries = self.inode(dir)?.entries().iter();
        Ok(Outcome::Listed(entries.map(|(name, number)| ((*name).to_owned(), *number)).collect()))
    }

    fn open(&mut self, name: &'static str, new: bool, made: Option<Ino>) -> Result<Ino, Error> {
        let place = (self.root, name);
        match self.find(place) {
            Ok(_) if new => Err(Error::Exists),
            Ok(number) if self.inodes[&number].is_dir() => Err(Error::IsDirectory),
            Ok(number) => Ok(number),
            Err(_) => self.make(place, false, made),
        }
    }

    /// Numbers of new inodes are taken from `made`, the first first.
    fn change(&mut self, op: &Op, made: &mut Vec<Ino>) -> Result<Outcome, Error> {
        let mut next = || (!made.is_empty()).then(|| made.remove(0));
        match *op {
            Op::MakeFile(place) => {
                self.make(place, false, next()).map(|new| Outcome::Made(vec![new]))
            }
            Op::MakeDir(place) => {
                self.make(place, true, next()).map(|new| Outcome::Made(vec![new]))
            }
            Op::Open(name, new) => {
                self.open(name, new, next()).map(|found| Outcome::Made(vec![found]))
            }
            Op::Link(number, place) => self.link(number, place).map(|()| Outcome::Done),
            Op::Unlink(place) => self.remove(place, false).map(|()| Outcome::Done),
            Op::Rmdir(place) => self.remove(place, true).map(|()| Outcome::Done),
            Op::Rename(from, to, mode) => self.rename(from, to, mode).map(|()| Outcome::Done),
            Op::Permit(number, permissions) => {
                self.inode_mut(number)?.permissions = permissions;
                Ok(Outcome::Done)
            }
            Op::SetAttribute(number, value) => {
                self.inode_mut(number)?.attribute = Some(value);
                Ok(Outcome::Done)
            }
            Op::LookUp(place) => self.find(place).map(|number| Outcome::Made(vec![number])),
            Op::List(dir) => self.list(dir),
            Op::Attributes(number) => self.found(number),
            Op::GetAttribute(number) => {
                self.inode(number)?.attribute.map(Outcome::Value).ok_or(Error::NoAttribute)
            }
            Op::Batch(ref parts) => self.batch(parts, made),
            Op::Sync => Ok(Outcome::Done),
        }
    }

    fn batch(&mut self, parts: &[Op], made: &mut Vec<Ino>) -> Result<Outcome, Error> {
        let mut after = self.clone();
        let mut all = Vec::new();
        for part in parts {
            if let Outcome::Made(new) = after.change(part, made)? {
                all.extend(new);
            }
        }
        *self = after;
        Ok(Outcome::Made(all))
    }

    /// Does `op`; whether the caller then hears `outcome`.
    pub fn apply(&mut self, op: &Op, outcome: &Outcome) -> bool {
        let mut made = match outcome {
            Outcome::Made(numbers) => numbers.clone(),
            _ => Vec::new(),
        };
        let expected = self.change(op, &mut made).unwrap_or_else(Outcome::Failed);
        expected == *outcome
    }
}
