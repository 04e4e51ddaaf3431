//! The names of a batch: which locks it needs, what each step finds, whether it is allowed.
//!
//! The steps are tried one after the other on copies of the attributes and on an overlay of the store. The caller holds the
//! tree lock and the `ops` locks of all directories concerned, so what was looked up stays true until the commit; attributes may change
//! until they are locked, and the same rules are applied to them again then.

use super::Batch;
use super::step::{BatchError, Recorded, Step};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::format::Key;
use crate::inode::{Inode, Meta};
use crate::namespace::attr;
use crate::namespace::entry::{Found, Lookup, find};
use crate::namespace::rules::{self, Exchange, Metas, Move, Side};
use crate::sync::Arc;
use crate::txn::{Op, Overlay};
use crate::types::{FileType, NewInode, RenameMode, SetAttr, Timestamp};
use std::collections::{BTreeMap, BTreeSet};

/// Records of one operation before another is begun: they are packed into frames later.
const OP_BYTES: usize = 16 << 10;

/// A name, looked up.
pub struct Entry<'a> {
    parent: Arc<Inode>,
    name: &'a [u8],
    found: Found,
    inode: Arc<Inode>,
}

impl Entry<'_> {
    fn side(&self) -> Side<'_> {
        Side { parent: &self.parent, name: self.name }
    }
}

/// A step, looked up.
pub enum Planned<'a> {
    Make {
        to: (Arc<Inode>, &'a [u8], Key),
        inode: Arc<Inode>,
        new: &'a NewInode,
        target: Option<&'a [u8]>,
    },
    Link {
        to: (Arc<Inode>, &'a [u8], Key),
        inode: Arc<Inode>,
    },
    Unlink(Entry<'a>),
    Rmdir(Entry<'a>),
    Move {
        from: Entry<'a>,
        to: (Arc<Inode>, &'a [u8], Key),
        victim: Option<Arc<Inode>>,
    },
    Exchange(Entry<'a>, Entry<'a>),
    Attributes(Arc<Inode>, &'a SetAttr),
    /// Whether it changes.
    Content(Arc<Inode>, bool),
}

/// All steps, looked up.
pub struct Plan<'a> {
    /// Each with what was recorded, which its errors name.
    pub steps: Vec<(&'a Recorded, Planned<'a>)>,
    /// Every inode whose attributes change.
    pub concerned: BTreeMap<u64, Arc<Inode>>,
    /// Inodes that lose a name.
    pub victims: Vec<Arc<Inode>>,
    /// Log space for the records of the names.
    pub record_bytes: usize,
}

/// Copies of attributes.
#[derive(Default)]
struct Copies(BTreeMap<u64, Meta>);

impl Metas for Copies {
    fn of(&mut self, inode: &Inode) -> &mut Meta {
        self.0.entry(inode.number).or_insert_with(|| inode.meta.lock().clone())
    }
}

/// Why a plan cannot be made.
pub enum Unplanned {
    /// The locks of these directories are needed besides.
    NeedsLocks(BTreeSet<u64>),
    Failed(BatchError),
}

/// Operations put together one after the other, none of them too large.
#[derive(Default)]
pub struct Ops {
    pub done: Vec<Op>,
    current: Op,
}

impl Ops {
    /// Where the next records go.
    pub fn next(&mut self) -> &mut Op {
        if self.current.record_bytes() > OP_BYTES {
            self.done.push(std::mem::take(&mut self.current));
        }
        &mut self.current
    }

    /// All of them.
    pub fn finish(mut self) -> Vec<Op> {
        if !self.current.is_empty() {
            self.done.push(self.current);
        }
        self.done
    }
}

/// Does what `step` does, to `metas` and `op`.
pub fn apply(step: &Planned<'_>, metas: &mut dyn Metas, op: &mut Op, now: Timestamp) -> Result<()> {
    match step {
        Planned::Make { to: (parent, name, place), inode, new, target } => {
            let target_bytes = target.map_or(0, <[u8]>::len) as u64;
            let meta = metas.of(parent);
            let item = rules::new_item((parent.number, meta), new, target_bytes, now);
            let to = Side { parent, name };
            rules::make(metas, op, (to, *place), (inode.number, &item), *target)?;
            let meta = metas.of(inode);
            (meta.item, meta.purged, meta.orphan) = (item, false, false);
            Ok(())
        }
        Planned::Link { to: (parent, name, place), inode } => {
            rules::link(metas, op, (Side { parent, name }, *place), inode, now)
        }
        Planned::Unlink(entry) => {
            rules::unlink(metas, op, (&entry.parent, entry.found.key), &entry.inode, now);
            Ok(())
        }
        Planned::Rmdir(entry) => {
            rules::rmdir(metas, op, (&entry.parent, entry.found.key), &entry.inode, now)
        }
        Planned::Move { from, to: (parent, name, place), victim } => {
            let (to, victim) = (Side { parent, name }, victim.as_ref());
            let source = &from.found;
            let from_side = from.side();
            let step = Move {
                from: from_side,
                source,
                moved: &from.inode,
                to,
                place: *place,
                victim,
                left: None,
            };
            rules::move_name(metas, op, step, now)
        }
        Planned::Exchange(first, second) => {
            let step = Exchange {
                from: first.side(),
                source: &first.found,
                first: &first.inode,
                to: second.side(),
                other: &second.found,
                second: &second.inode,
            };
            rules::exchange(metas, op, step, now)
        }
        Planned::Attributes(inode, change) => {
            let meta = alive(metas.of(inode))?;
            attr::apply(meta, change, now);
            Ok(())
        }
        Planned::Content(inode, changes) => {
            let meta = alive(metas.of(inode))?;
            if *changes {
                meta.touch_data(now);
            }
            Ok(())
        }
    }
}

fn alive(meta: &mut Meta) -> Result<&mut Meta> {
    if meta.purged { Err(Error::NotFound) } else { Ok(meta) }
}

/// Directories that the steps of a batch name; those that it makes itself need no lock.
pub fn directories(batch: &Batch) -> BTreeSet<u64> {
    let mut directories = BTreeSet::new();
    for Recorded { step, .. } in &batch.steps {
        match step {
            Step::Make { dir, .. }
            | Step::Link { dir, .. }
            | Step::Unlink { dir, .. }
            | Step::Rmdir { dir, .. } => {
                directories.insert(*dir);
            }
            Step::Rename { dir, new_dir, .. } => directories.extend([*dir, *new_dir]),
            Step::Attributes { .. } | Step::Content { .. } => {}
        }
    }
    for Recorded { step, .. } in &batch.steps {
        if let Step::Make { ino, .. } = step {
            directories.remove(ino);
        }
    }
    directories
}

struct Planner<'a> {
    engine: &'a Engine,
    overlay: Overlay<'a>,
    metas: Copies,
    locked: &'a BTreeSet<u64>,
    /// Directories that are to be locked as well. From the first one on, what is found is a guess.
    missed: BTreeSet<u64>,
    made: BTreeSet<u64>,
    now: Timestamp,
    plan: Plan<'a>,
}

/// Looks all steps up. The caller holds the tree lock, and the `ops` locks of the directories `locked`.
pub fn plan<'a>(
    engine: &'a Engine,
    batch: &'a Batch,
    locked: &'a BTreeSet<u64>,
    now: Timestamp,
) -> Result<Plan<'a>, Unplanned> {
    let plan = Plan {
        steps: Vec::new(),
        concerned: BTreeMap::new(),
        victims: Vec::new(),
        record_bytes: 0,
    };
    let overlay = Overlay::new(&engine.store);
    let (metas, missed, made) = (Copies::default(), BTreeSet::new(), BTreeSet::new());
    let mut planner = Planner { engine, overlay, metas, locked, missed, made, now, plan };
    for recorded in &batch.steps {
        if let Err(error) = planner.take(recorded) {
            if planner.missed.is_empty() {
                return Err(Unplanned::Failed(recorded.failed(error)));
            }
            break;
        }
    }
    // All at once: if each were asked for alone, a batch of many were planned as many times.
    if planner.missed.is_empty() {
        Ok(planner.plan)
    } else {
        Err(Unplanned::NeedsLocks(planner.missed))
    }
}

impl<'a> Planner<'a> {
    /// Looks the step up and tries it, so that the next ones see what it does.
    fn take(&mut self, recorded: &'a Recorded) -> Result<()> {
        let Some(step) = self.look_up(&recorded.step)? else { return Ok(()) };
        let mut op = Op::new();
        apply(&step, &mut self.metas, &mut op, self.now)?;
        self.overlay.absorb(&op);
        self.plan.record_bytes += op.record_bytes();
        self.plan.steps.push((recorded, step));
        Ok(())
    }

    fn concerns(&mut self, inode: &Arc<Inode>) {
        self.plan.concerned.entry(inode.number).or_insert_with(|| inode.clone());
    }

    fn inode(&mut self, number: u64) -> Result<Arc<Inode>> {
        let inode = self.engine.inode(number)?;
        // Made by a later step of this batch.
        if self.metas.of(&inode).purged && !self.made.contains(&number) {
            return Err(Error::NotFound);
        }
        self.concerns(&inode);
        Ok(inode)
    }

    /// A directory in which names change.
    fn parent(&mut self, number: u64) -> Result<Arc<Inode>> {
        let inode = self.inode(number)?;
        if inode.file_type != FileType::Directory {
            return Err(Error::NotDirectory);
        }
        self.needs_lock(number)?;
        Ok(inode)
    }

    /// Refuses what is no directory, whatever its name says: it would be asked for again and again.
    fn needs_lock(&mut self, number: u64) -> Result<()> {
        if self.locked.contains(&number) || self.made.contains(&number) {
            return Ok(());
        }
        self.engine.directory(number)?;
        self.missed.insert(number);
        Ok(())
    }

    /// A directory that gets a name more.
    fn target(&mut self, dir: u64, name: &'a [u8]) -> Result<(Arc<Inode>, &'a [u8], Key)> {
        let parent = self.parent(dir)?;
        if self.metas.of(&parent).item.links == 0 {
            return Err(Error::NotFound);
        }
        match find(&self.overlay, dir, name)? {
            Lookup::Present(_) => Err(Error::Exists),
            Lookup::Absent(place) => Ok((parent, name, place)),
        }
    }

    fn entry(&mut self, dir: u64, name: &'a [u8]) -> Result<Entry<'a>> {
        let parent = self.parent(dir)?;
        self.entry_of(parent, name)
    }

    fn entry_of(&mut self, parent: Arc<Inode>, name: &'a [u8]) -> Result<Entry<'a>> {
        let dir = parent.number;
        match find(&self.overlay, dir, name)? {
            Lookup::Present(found) => {
                let inode = self.inode(found.inode)?;
                Ok(Entry { parent, name, found, inode })
            }
            Lookup::Absent(_) => Err(Error::NotFound),
        }
    }

    fn look_up(&mut self, step: &'a Step) -> Result<Option<Planned<'a>>> {
        Ok(Some(match step {
            Step::Make { dir, name, ino, new, target } => {
                let to = self.target(*dir, name)?;
                self.made.insert(*ino);
                let inode = self.inode(*ino)?;
                Planned::Make { to, inode, new, target: target.as_deref() }
            }
            Step::Link { ino, dir, name } => {
                self.parent(*dir)?;
                let inode = self.inode(*ino)?;
                if inode.file_type == FileType::Directory {
                    return Err(Error::NotPermitted);
                }
                Planned::Link { to: self.target(*dir, name)?, inode }
            }
            Step::Unlink { dir, name } => {
                let entry = self.entry(*dir, name)?;
                if entry.found.file_type == FileType::Directory {
                    return Err(Error::IsDirectory);
                }
                self.plan.victims.push(entry.inode.clone());
                Planned::Unlink(entry)
            }
            Step::Rmdir { dir, name } => {
                let entry = self.entry(*dir, name)?;
                if entry.found.file_type != FileType::Directory {
                    return Err(Error::NotDirectory);
                }
                rules::check_not_itself(&entry.parent, &entry.inode)?;
                self.needs_lock(entry.found.inode)?;
                self.plan.victims.push(entry.inode.clone());
                Planned::Rmdir(entry)
            }
            Step::Rename { dir, name, new_dir, new_name, mode } => {
                return self.rename((*dir, name), (*new_dir, new_name), *mode);
            }
            Step::Attributes { ino, change } => Planned::Attributes(self.inode(*ino)?, change),
            Step::Content { ino, changes } => {
                let inode = self.inode(*ino)?;
                match inode.file_type {
                    FileType::Regular => Planned::Content(inode, *changes),
                    FileType::Directory => return Err(Error::IsDirectory),
                    _ => return Err(Error::Invalid("only regular files have content")),
                }
            }
        }))
    }

    fn rename(
        &mut self,
        (dir, name): (u64, &'a [u8]),
        (new_dir, new_name): (u64, &'a [u8]),
        mode: RenameMode,
    ) -> Result<Option<Planned<'a>>> {
        let (from_parent, parent) = (self.parent(dir)?, self.parent(new_dir)?);
        if self.metas.of(&parent).item.links == 0 {
            return Err(Error::NotFound);
        }
        let from = self.entry_of(from_parent, name)?;
        self.check_no_loop(&from.found, new_dir)?;
        let present = match find(&self.overlay, new_dir, new_name)? {
            Lookup::Absent(_) if mode == RenameMode::Exchange => {
                return Err(Error::NotFound);
            }
            Lookup::Absent(place) => {
                let to = (parent, new_name, place);
                return Ok(Some(Planned::Move { from, to, victim: None }));
            }
            Lookup::Present(present) => present,
        };
        let inode = self.inode(present.inode)?;
        match mode {
            RenameMode::NoReplace => return Err(Error::Exists),
            _ if present.inode == from.found.inode => return Ok(None),
            RenameMode::Exchange => {
                self.check_no_loop(&present, dir)?;
                let other = Entry { parent, name: new_name, found: present, inode };
                return Ok(Some(Planned::Exchange(from, other)));
            }
            RenameMode::Replace | RenameMode::Whiteout { .. } => {}
        }
        rules::check_replace(from.found.file_type, present.file_type)?;
        if inode.number == dir {
            // The victim holds the source, so it is not empty.
            return Err(Error::NotEmpty);
        }
        rules::check_not_itself(&parent, &inode)?;
        if inode.file_type == FileType::Directory {
            self.needs_lock(inode.number)?;
        }
        self.plan.victims.push(inode.clone());
        let to = (parent, new_name, present.key);
        Ok(Some(Planned::Move { from, to, victim: Some(inode) }))
    }

    fn check_no_loop(&mut self, moved: &Found, new_parent: u64) -> Result<()> {
        let (engine, metas) = (self.engine, &mut self.metas);
        rules::check_no_loop(moved, new_parent, |number| {
            Ok(metas.of(&*engine.directory(number)?).item.parent)
        })
    }
}
