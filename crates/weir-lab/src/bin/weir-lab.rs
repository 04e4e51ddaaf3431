//! `weir-lab`: the lab on its own; `weir lab` is the same.

use std::process::ExitCode;

use clap::Parser;

#[derive(Parser)]
#[command(name = "weir-lab", version, about)]
struct Arguments {
    #[command(flatten)]
    lab: weir_lab::LabArgs,
}

fn main() -> ExitCode {
    weir_lab::main(Arguments::parse().lab)
}
