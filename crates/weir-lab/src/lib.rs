//! The lab: published file system experiments, on any file system, side by side.
//!
//! A run takes experiments ([`experiments`]) and targets ([`target`]), puts each target on the
//! same disk ([`disk`]), runs them in interleaved rounds ([`run`]) and reports medians, spreads,
//! ratios, latency distributions and what the device was really asked to do ([`measure`],
//! [`report`]). `docs/LAB.md` describes the command, the experiments and the JSON schema.
//!
//! Invariants: whatever is mounted, attached or started is written down first
//! ([`disk::registry`]); nothing is emulated that a target does not offer; `unsafe` is confined to
//! [`sys`].

#![deny(unsafe_code)]

/// A line for people on standard error, which may be closed, or belong to somebody who has read enough: then it is lost, and nothing else.
/// (`eprintln!` panics there, which would end a run.)
macro_rules! tell {
    ($($what:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr().lock(), $($what)*);
    }};
}
pub(crate) use tell;

pub mod calibrate;
pub mod cli;
pub mod disk;
pub mod error;
pub mod experiments;
pub mod measure;
pub mod probe;
pub mod report;
pub mod run;
#[allow(unsafe_code)]
pub mod sys;
pub mod target;

use std::process::ExitCode;

pub use cli::{LabArgs, run as run_lab};
pub use error::LabError;

/// 130 interrupted, 2 wrong usage, 1 anything else.
fn exit_code(error: &LabError) -> u8 {
    match error {
        LabError::Cancelled => 130,
        LabError::UnknownTarget(_) | LabError::UnknownDisk(_) => 2,
        _ => 1,
    }
}

/// Runs a command and prints its error, if any, on one line.
pub fn main(args: LabArgs) -> ExitCode {
    match cli::run(args) {
        Ok(code) => code,
        Err(e) => {
            crate::tell!("weir lab: {e}");
            ExitCode::from(exit_code(&e))
        }
    }
}
