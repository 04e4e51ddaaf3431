//! The states that a crash may leave: the model after every operation that is not yet certain to be
//! durable, and how far certainty goes.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::compare::{Disk, Strictness, compare};
use super::data::FileData;
use super::found::Found;
use super::{Ino, Inode, Model};

/// How many states below the acknowledged prefix are kept, to name what was lost.
const REMEMBERED: usize = 256;

/// All of a file.
const EVERYTHING: Range<u64> = 0..u64::MAX;

/// What a sync that returned success has made durable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Durable {
    /// A file or directory, with everything the order puts before its last change.
    Inode {
        /// Which.
        ino: Ino,
        /// Only its data, its size, and what is needed to find them.
        data_only: bool,
    },
    /// Part of a file, with everything the order puts before the last write to this part, and before the last change
    /// of the inode that was no write.
    Range {
        /// Which.
        ino: Ino,
        /// As above.
        data_only: bool,
        /// Bytes.
        range: Range<u64>,
    },
    /// Everything.
    All,
    /// The operations up to here, and no data beyond what belongs to them.
    Prefix,
}

/// Model states by number of operations applied.
#[derive(Debug, Clone)]
pub struct History {
    /// Consecutive; the last is the present.
    states: VecDeque<Arc<Model>>,
    /// States as they were before an acknowledgement left a crash fewer choices: where a lying disk may lead back to.
    superseded: VecDeque<Arc<Model>>,
    /// Operations that must have survived.
    acknowledged: u64,
    /// The sync that demands it, for the report.
    acknowledged_by: Option<String>,
    /// States ever added.
    pushed: u64,
    /// Grows with every acknowledgement that demands more, and every operation taken back: states verified before are to be verified again.
    epoch: u64,
}

/// A point in a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment(u64);

/// Why a found volume is none of the allowed states.
#[derive(Debug, Clone)]
pub struct Mismatch {
    /// Lines for the report.
    pub lines: Vec<String>,
}

impl History {
    /// A history that starts with a durable volume.
    pub fn new(model: Model) -> Self {
        let acknowledged = model.step();
        Self {
            states: VecDeque::from([Arc::new(model)]),
            superseded: VecDeque::new(),
            acknowledged,
            acknowledged_by: None,
            pushed: 0,
            epoch: 0,
        }
    }

    /// The present.
    pub fn now(&self) -> &Arc<Model> {
        // There always is one: `new` makes it, and pruning keeps the last.
        &self.states[self.states.len() - 1]
    }

    /// The present, and what the last operation leaves open beside it, newest first.
    pub fn newest(&self) -> impl Iterator<Item = &Arc<Model>> {
        self.states.iter().rev().take(3)
    }

    /// See the field.
    pub const fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Operations that must have survived a crash.
    pub const fn acknowledged(&self) -> u64 {
        self.acknowledged
    }

    /// An operation was applied: `model` is the new present.
    pub fn push(&mut self, model: Arc<Model>) {
        self.states.push_back(model);
        self.pushed += 1;
    }

    /// More states that an operation passes through, if any.
    pub fn extend(&mut self, models: impl IntoIterator<Item = Arc<Model>>) {
        for model in models {
            self.push(model);
        }
    }

    /// The present, to come back to.
    pub const fn moment(&self) -> Moment {
        Moment(self.pushed)
    }

    /// Takes the states since `moment` back: the operation turned out to have failed. That leaves a crash fewer choices.
    pub fn back_to(&mut self, moment: Moment) {
        while self.states.len() > 1 && self.pushed > moment.0 {
            self.states.pop_back();
            self.pushed -= 1;
            self.epoch += 1;
        }
    }

    /// An operation has failed, or a part of it, and yet a crash may leave `model`, if there is one, which would have come of it. The present stays
    /// what it is.
    pub fn leave_open(&mut self, model: Option<Arc<Model>>) {
        let now = Arc::clone(self.now());
        self.extend(model.into_iter().flat_map(|model| [model, Arc::clone(&now)]));
    }

    /// A sync of the present has returned success.
    pub fn acknowledge(&mut self, durable: &Durable, by: &str) {
        let now = Arc::clone(self.now());
        self.acknowledge_at(&now, durable, by);
    }

    /// A sync that was asked for when `then` was the present has ended with success. What was done since then may be
    /// lost.
    pub fn acknowledge_at(&mut self, then: &Model, durable: &Durable, by: &str) {
        let inode = |ino: Ino| then.inode(ino);
        let whole = |ino: Ino| (ino, EVERYTHING);
        let (step, parts): (u64, Vec<(Ino, Range<u64>)>) = match durable {
            Durable::All => (then.step(), then.inodes().map(|(ino, _)| whole(ino)).collect()),
            Durable::Prefix => (then.step(), Vec::new()),
            Durable::Inode { ino, data_only } => {
                let step = |inode: &Arc<Inode>| {
                    if *data_only { inode.data_touched } else { inode.touched }
                };
                (inode(*ino).map_or(0, step), vec![whole(*ino)])
            }
            Durable::Range { ino, data_only, range } => {
                let step = |inode: &Arc<Inode>| {
                    let written = inode.data().map_or(0, |data| data.written(range));
                    written.max(if *data_only { inode.shaped } else { inode.changed })
                };
                (inode(*ino).map_or(0, step), vec![(*ino, range.clone())])
            }
        };
        let mut demands_more = step > self.acknowledged;
        if demands_more {
            self.acknowledged = step;
            self.acknowledged_by = Some(by.to_owned());
        }
        // Who syncs data and size, or a part of a file, hears nothing about times.
        let with_times = matches!(durable, Durable::All | Durable::Inode { data_only: false, .. });
        for (ino, range) in parts {
            demands_more |= self.settle(then, ino, (&range, with_times), step);
        }
        self.epoch += u64::from(demands_more);
        while self.states.len() > 1
            && self.states.get(REMEMBERED).is_some_and(|state| state.step() <= self.acknowledged)
        {
            self.states.pop_front();
        }
    }

    /// Part of `ino` is durable as it was `then`: also in the states before and after in which it has passed through
    /// this. True if that leaves a crash fewer choices.
    fn settle(
        &mut self,
        then: &Model,
        ino: Ino,
        (range, with_times): (&Range<u64>, bool),
        from_step: u64,
    ) -> bool {
        let Some(inode) = then.inode(ino) else { return false };
        let Some(data) = inode.data() else { return false };
        let settled = data.settled(range);
        let is_affected = data.is_affected(&settled);
        let times = with_times.then(|| [inode.mtime.newest_step(), inode.ctime.newest_step()]);
        let times = times.filter(|times| inode.has_times_in_memory(*times));
        if !is_affected && times.is_none() {
            return false;
        }
        let mut changed = false;
        let mut certain = FileData::clone(data);
        certain.settle(range);
        let certain = Arc::new(certain);
        for state in self.states.iter_mut().filter(|state| state.step() >= from_step) {
            let Some(inode) = state.inode(ino) else { continue };
            let Some(present) = inode.data() else { continue };
            let before = Arc::clone(state);
            let settled = if !is_affected {
                None
            } else if Arc::ptr_eq(present, data) {
                Some(Arc::clone(&certain))
            } else if present.is_affected(&settled) {
                let mut present = FileData::clone(present);
                present.apply_settled(&settled);
                Some(Arc::new(present))
            } else {
                None
            };
            let times = times.filter(|times| inode.has_times_in_memory(*times));
            if settled.is_none() && times.is_none() {
                continue;
            }
            changed = true;
            self.superseded.push_back(before);
            let state = Arc::make_mut(state);
            if let Some(settled) = settled {
                state.settle(ino, &settled);
            }
            if let Some(times) = times {
                state.settle_times(ino, times);
            }
        }
        let surplus = self.superseded.len().saturating_sub(REMEMBERED);
        self.superseded.drain(..surplus);
        changed
    }

    fn allowed(&self) -> impl DoubleEndedIterator<Item = &Arc<Model>> {
        let acknowledged = self.acknowledged;
        self.states.iter().filter(move |state| state.step() >= acknowledged)
    }

    /// The latest allowed state that `found` agrees with.
    ///
    /// # Errors
    /// None; the mismatch says which acknowledged operation was lost, or how the
    /// closest state differs.
    pub fn find(&self, found: &Found, strictness: Strictness) -> Result<Arc<Model>, Mismatch> {
        let fast = Strictness { first_only: true, ..strictness };
        // Damage in the part of the log that nothing says is durable yet looks like a crash before the flush.
        let lies = strictness.disk == Disk::Lying;
        let least = if lies { 0 } else { self.acknowledged };
        let states = self.states.iter().rev().filter(|state| state.step() >= least);
        let superseded = self.superseded.iter().rev().filter(|_| lies);
        let hit = states.chain(superseded).find(|state| compare(state, found, fast).is_empty());
        hit.map(Arc::clone).ok_or_else(|| self.explain(found, strictness))
    }

    /// What to print for a mismatch. `texts` of operations are added by the caller.
    fn explain(&self, found: &Found, strictness: Strictness) -> Mismatch {
        let full = Strictness { first_only: false, ..strictness };
        let mut lines = Vec::new();
        let first = self.allowed().next().map_or(0, |state| state.step());
        lines.push(format!(
            "allowed: the state after {first} to {} operations{}",
            self.now().step(),
            self.acknowledged_by.as_ref().map_or_else(String::new, |by| format!(
                " ({} are durable since: {by})",
                self.acknowledged
            )),
        ));
        let earlier =
            self.states.iter().filter(|state| state.step() < self.acknowledged).rev().find(
                |state| compare(state, found, Strictness { first_only: true, ..full }).is_empty(),
            );
        if let Some(state) = earlier {
            lines.push(format!(
                "found: the state after {} operations: acknowledged operation number {} is lost",
                state.step(),
                state.step() + 1,
            ));
            return Mismatch { lines };
        }
        let closest = self
            .allowed()
            .map(|state| (state.step(), compare(state, found, full)))
            .min_by_key(|(step, differences)| (differences.len(), u64::MAX - step));
        if let Some((step, differences)) = closest {
            lines.push(format!("closest is the state after {step} operations, but:"));
            let count = differences.len();
            lines.extend(differences.into_iter().take(20).map(|line| format!("  {line}")));
            if count > 20 {
                lines.push(format!("  and {} more differences", count - 20));
            }
        }
        Mismatch { lines }
    }
}
