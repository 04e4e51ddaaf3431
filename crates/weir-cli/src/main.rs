//! The `weir` program: see the library of this crate.

fn main() -> std::process::ExitCode {
    weir_cli::main()
}
