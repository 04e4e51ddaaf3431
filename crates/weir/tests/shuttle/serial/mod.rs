//! What threads do at once is what they could have done one after the other, and what a crash leaves is the beginning of that.
//!
//! Every schedule has a workload of its own: three threads, a few calls each, on so little that they meet. What they heard, and
//! what is there at the end, is explained by an order of the calls (`order`) that a model can do one after the other: names (`names`, `tree`)
//! and contents (`contents`).

mod contents;
mod names;
mod order;
mod tree;

use order::{Call, Model, Threads};
use shuttle::rand::{Rng, thread_rng};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use weir::*;

use crate::{all, background};

/// Moments of a run.
#[derive(Default)]
struct Moments(AtomicU64);

impl Moments {
    fn next(&self) -> u64 {
        self.0.fetch_add(1, Ordering::SeqCst)
    }
}

fn one_of<T: Copy>(of: &[T]) -> T {
    of[thread_rng().gen_range(0..of.len())]
}

/// Runs the calls of all threads at once, beside background work. `perform` answers the steps that a call is made of.
fn run<M: Model>(
    volume: &Volume,
    moments: &Arc<Moments>,
    calls: Vec<Vec<M::Op>>,
    perform: impl Fn(M::Op) -> Vec<(M::Op, M::Outcome)> + Clone + Send + 'static,
) -> Threads<M>
where
    M::Op: Send + 'static,
    M::Outcome: Send + 'static,
{
    let results: Arc<Mutex<Threads<M>>> = Arc::default();
    let mut bodies = vec![background(volume, 6)];
    for (thread, ops) in calls.into_iter().enumerate() {
        results.lock().expect("lock").push(Vec::new());
        let (perform, moments, results) = (perform.clone(), moments.clone(), results.clone());
        bodies.push(Box::new(move || {
            for op in ops {
                let began = moments.next();
                let steps = perform(op).into_iter();
                let ended = moments.next();
                let calls = steps.map(|(op, outcome)| Call { op, outcome, began, ended });
                results.lock().expect("lock")[thread].extend(calls);
            }
        }));
    }
    all(bodies);
    std::mem::take(&mut *results.lock().expect("lock"))
}

/// The calls, in the order of their beginnings.
fn describe<M: Model>(threads: &Threads<M>) -> String {
    let mut calls: Vec<_> = threads
        .iter()
        .enumerate()
        .flat_map(|(thread, calls)| calls.iter().map(move |call| (thread, call)))
        .collect();
    calls.sort_by_key(|(_, call)| call.began);
    let lines = calls.iter().map(|(thread, call)| {
        let Call { op, outcome, began, ended } = call;
        format!("{began:3} to {ended:3}, thread {thread}: {op:?} -> {outcome:?}\n")
    });
    lines.collect::<Vec<_>>().concat()
}
