//! The states that a crash may leave: the model after every operation that is not yet certain to be
//! durable, and how far certainty goes.

use std::collections::VecDeque;
use std::sync::Arc;

use super::compare::{Strictness, compare};
use super::found::Found;
use super::{Ino, Model};

/// How many states below the acknowledged prefix are kept, to name what was lost.
const REMEMBERED: usize = 256;

/// What a sync that returned success has made durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durable {
    /// A file or directory, with everything the order puts before its last change.
    Inode {
        /// Which.
        ino: Ino,
        /// Only its data, its size, and what is needed to find them.
        data_only: bool,
    },
    /// Everything.
    All,
}

/// Model states by number of operations applied.
#[derive(Debug, Clone)]
pub struct History {
    /// Consecutive; the last is the present.
    states: VecDeque<Arc<Model>>,
    /// Operations that must have survived.
    acknowledged: u64,
    /// The sync that demands it, for the report.
    acknowledged_by: Option<String>,
    /// Grows with every acknowledgement: states verified before are to be verified again.
    epoch: u64,
}

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
            acknowledged,
            acknowledged_by: None,
            epoch: 0,
        }
    }

    /// The present.
    pub fn now(&self) -> &Arc<Model> {
        // There always is one: `new` makes it, and pruning keeps the last.
        &self.states[self.states.len() - 1]
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
    }

    /// More states that an operation passes through, if any.
    pub fn extend(&mut self, models: impl IntoIterator<Item = Arc<Model>>) {
        self.states.extend(models);
    }

    /// Takes the states after `model` back: the operation turned out to have failed.
    pub fn back_to(&mut self, model: &Arc<Model>) {
        while self.states.len() > 1 && !Arc::ptr_eq(self.now(), model) {
            self.states.pop_back();
        }
    }

    /// A sync returned success.
    pub fn acknowledge(&mut self, durable: Durable, by: &str) {
        let now = Arc::clone(self.now());
        let (step, inodes): (u64, Vec<Ino>) = match durable {
            Durable::All => (now.step(), now.inodes().map(|(ino, _)| ino).collect()),
            Durable::Inode { ino, data_only } => {
                let step = now
                    .inode(ino)
                    .map_or(0, |inode| if data_only { inode.data_touched } else { inode.touched });
                (step, vec![ino])
            }
        };
        self.epoch += 1;
        if step > self.acknowledged {
            self.acknowledged = step;
            self.acknowledged_by = Some(by.to_owned());
        }
        for ino in inodes {
            self.settle(&now, ino);
        }
        while self.states.len() > 1
            && self.states.get(REMEMBERED).is_some_and(|state| state.step() <= self.acknowledged)
        {
            self.states.pop_front();
        }
    }

    /// The contents of `ino` are durable: also in the earlier states from the last change of them on.
    fn settle(&mut self, now: &Model, ino: Ino) {
        let Some(inode) = now.inode(ino) else { return };
        let Some(data) = inode.data() else { return };
        let synced = Arc::new(data.synced());
        for state in &mut self.states {
            if state.step() >= inode.data_touched && state.inode(ino).is_some() {
                Arc::make_mut(state).settle(ino, &synced);
            }
        }
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
        let least = if strictness.tolerate_unreadable { 0 } else { self.acknowledged };
        let mut states = self.states.iter().rev().filter(|state| state.step() >= least);
        let hit = states.find(|state| compare(state, found, fast).is_empty());
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
