//! The crash simulator of Weir: finds out whether a volume survives, by trying.
//!
//! A workload runs on a simulated disk ([`device`]) with a virtual clock; at every device call, images
//! that a power cut may leave ([`disk`]) are recovered, checked, and compared with an in-memory
//! model of the file system ([`model`]) that knows which states are allowed. `docs/TESTING.md` says
//! what is promised, what is tried, and how to repeat a finding.

pub mod cli;
pub mod clock;
pub mod device;
pub mod disk;
pub mod engine;
pub mod explore;
pub mod fault;
pub mod image;
pub mod model;
pub mod mutation;
pub mod op;
pub mod pattern;
pub mod rng;
mod run;
pub mod system;
pub mod toy;
pub mod turns;
pub mod workload;

pub use run::{Finding, SimOptions, SimReport, Workload, run_on};

/// Runs the simulator on the engine.
pub fn run(options: &SimOptions) -> SimReport {
    run_on(&engine::Engine, options)
}
