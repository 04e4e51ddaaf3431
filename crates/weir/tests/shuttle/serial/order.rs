//! Whether there is an order.
//!
//! Calls that did not overlap keep their order; those that did may have come in any. An order explains a run if the model, doing
//! the calls one after the other, answers each as the volume did, and is where the volume is at the end
//! (Herlihy and Wing's linearizability). What a crash leaves must be a prefix of such an order.

use std::collections::{HashMap, HashSet};
use std::fmt::Debug;
use std::hash::Hash;

/// A call, and the moments of its beginning and its end.
#[derive(Debug, Clone)]
pub struct Call<O, R> {
    pub op: O,
    pub outcome: R,
    pub began: u64,
    pub ended: u64,
}

pub trait Model: Clone + Eq + Hash + Debug {
    type Op: Debug;
    type Outcome: Debug;
    /// Does `op`; whether the caller then hears `outcome`.
    fn apply(&mut self, op: &Self::Op, outcome: &Self::Outcome) -> bool;
}

/// The calls of each thread.
pub type Threads<M> = Vec<Vec<Call<<M as Model>::Op, <M as Model>::Outcome>>>;
/// How many calls of each thread have been made.
pub type Position = Vec<usize>;

struct Search<'a, M: Model> {
    threads: &'a Threads<M>,
    last: &'a M,
    /// Whether the end can be reached from there.
    seen: HashMap<(Position, M), bool>,
}

impl<M: Model> Search<'_, M> {
    fn next(&self, position: &Position, thread: usize) -> Option<&Call<M::Op, M::Outcome>> {
        self.threads[thread].get(position[thread])
    }

    fn reaches(&mut self, position: &Position, state: &M) -> bool {
        let here = (position.clone(), state.clone());
        if let Some(&known) = self.seen.get(&here) {
            return known;
        }
        let all = 0..self.threads.len();
        let mut reached =
            all.clone().all(|thread| self.next(position, thread).is_none()) && state == self.last;
        for thread in all.clone() {
            let Some(call) = self.next(position, thread) else { continue };
            let is_late = all
                .clone()
                .filter_map(|other| self.next(position, other))
                .any(|other| other.ended < call.began);
            let mut after = state.clone();
            if is_late || !after.apply(&call.op, &call.outcome) {
                continue;
            }
            let mut further = position.clone();
            further[thread] += 1;
            reached |= self.reaches(&further, &after);
        }
        self.seen.insert(here, reached);
        reached
    }
}

/// The states that orders of the calls go through which explain them, from `first` to `last`; none if there is no such order.
pub fn explain<M: Model>(threads: &Threads<M>, first: &M, last: &M) -> HashSet<(Position, M)> {
    let mut search = Search { threads, last, seen: HashMap::new() };
    search.reaches(&vec![0; threads.len()], first);
    search.seen.into_iter().filter_map(|(state, reached)| reached.then_some(state)).collect()
}
