//! `weir-sim`: the crash simulator on the command line.

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    weir_sim::cli::main(&weir_sim::cli::Arguments::parse())
}
